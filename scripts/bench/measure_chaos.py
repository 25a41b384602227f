"""Attacks can-train at random: command lines, logs, files, interrupted writes, full disks, clocks, two hosts. A seed
decides everything, so that a failure can be repeated; --resume goes on where a run was interrupted.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from bench import chaos_files, chaos_hosts, chaos_lines, chaos_logs, chaos_writes
from bench.chaos_cases import Attack, Bounds, NoMoreCases, Progress, dice_of, run_attack
from bench.harness import Benchmark, Table
from can_train.io.records import write_json_atomic

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "polars"), quick="about a minute")
_MODULES: Final = (chaos_lines, chaos_logs, chaos_files, chaos_writes, chaos_hosts)
ATTACKS: Final[Mapping[str, Attack]] = {attack.name: attack for module in _MODULES for attack in module.ATTACKS}

IMPORTED: Final = (
    "torch.distributed",
    "can_train.config.compose",
    "can_train.training.train",
    "can_train.cli.evaluate",
)

WRITE_S: Final = 5.0
"""Seconds between two notes of the progress."""


def main() -> None:
    """Attacks, prints failures, and writes the table into RESULTS.md; exit status 1 if anything was wrong."""
    options = _options()
    # Every process of an attack has one thread, and begins with the modules that take seconds to import.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in IMPORTED:
        import_module(name)
    if options.only and ":" in options.only:
        sys.exit(_repeat(options.only, options.seed))
    done = _read(options.resume, options.seed)
    until = time.monotonic() + options.minutes * 60
    for attack in ATTACKS.values():
        if not options.only or attack.name in options.only.split(","):
            progress = done.setdefault(attack.name, Progress())
            written = time.monotonic()
            for _ in _attack(attack, progress, options, until):
                if time.monotonic() > written + WRITE_S:
                    _write(options.resume, options.seed, done)
                    written = time.monotonic()
            _write(options.resume, options.seed, done)
            _print(attack, progress, options.seed)
    if {*done} == {*ATTACKS} and not options.quick:
        table = Table("attack", "cases", "inputs", "wrong", "peak memory, MiB", "minutes")
        for name, attack in ATTACKS.items():
            table.add(*_cells(attack, done[name]))
        BENCHMARK.finish(options, table=table, seed=options.seed)
    if any(progress.failures for progress in done.values()):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = BENCHMARK.parser()
    parser.add_argument("--seed", type=int, default=0, help="other cases")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--only", metavar="NAME[:NUMBER]", help=f"some attacks ({', '.join(ATTACKS)}), or one case")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="note the progress in FILE, and go on from there")
    return parser.parse_args()


def _attack(attack: Attack, progress: Progress, options: argparse.Namespace, until: float) -> Iterator[None]:
    count = attack.quick_count if options.quick else attack.count
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        yield from run_attack(attack, options.seed, Path(place), progress, Bounds(count, until))


def _repeat(name: str, seed: int) -> int:
    """Does one case in this process; returns the exit code."""
    attack, number = ATTACKS[name.partition(":")[0]], int(name.partition(":")[2])
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        attack.prepare(Path(place))
        try:
            failure = attack.case(number, dice_of(attack, seed, number), Path(place))
        except NoMoreCases:
            failure = "there is no such case"
    print(failure or "nothing was wrong")
    return int(bool(failure))


def _read(file: Path | None, seed: int) -> dict[str, Progress]:
    if file is None or not file.exists():
        return {}
    stored = json.loads(file.read_text())
    if stored["seed"] != seed:
        sys.exit(f"{file} is of seed {stored['seed']}")
    return {name: Progress(**values) for name, values in stored["attacks"].items()}


def _write(file: Path | None, seed: int, done: Mapping[str, Progress]) -> None:
    if file is not None:
        write_json_atomic(file, {"seed": seed, "attacks": {name: vars(progress) for name, progress in done.items()}})


def _print(attack: Attack, progress: Progress, seed: int) -> None:
    print(" | ".join(_cells(attack, progress)), flush=True)
    for number, failure in progress.failures:
        again = shlex.join(["scripts/bench/chaos", "--seed", str(seed), "--only", f"{attack.name}:{number}"])
        print(f"{failure}\n  {again}", flush=True)


def _cells(attack: Attack, progress: Progress) -> list[str]:
    return [attack.text, f"{progress.done:,}", f"{progress.done * attack.inputs:,}", str(len(progress.failures)),
            f"{progress.peak_mib:.0f}", f"{progress.seconds / 60:.1f}"]  # fmt: skip
