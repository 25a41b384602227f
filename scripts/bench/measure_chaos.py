"""Attacks can-train at random: command lines, logs, files, interrupted writes, full disks, clocks, two hosts. A seed
decides everything, so that a failure can be repeated; what was interrupted goes on where it stopped.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Final

from bench import chaos_files, chaos_hosts, chaos_lines, chaos_logs, chaos_writes
from bench.chaos_cases import Attack, Bounds, NoMoreCases, Progress, dice_of, run_attack
from bench.results_file import environment, markdown, write_section
from can_train.io.records import write_json_atomic

ATTACKS: Final[Mapping[str, Attack]] = {
    attack.name: attack
    for attack in (
        *chaos_lines.attacks(),
        *chaos_logs.attacks(),
        *chaos_files.attacks(),
        *chaos_writes.attacks(),
        *chaos_hosts.attacks(),
    )
}

IMPORTED: Final = (
    "torch.distributed",
    "can_train.config.compose",
    "can_train.training.train",
    "can_train.cli.evaluate",
)

WRITE_S: Final = 5.0
"""Seconds between two notes of what was done."""

NOTES: Final = """\
A case is wrong where an error leaves the program, text says `Traceback`, the exit code is none of 0, 2, 3 and 128 + a
signal, 2 or 3 comes without a sentence, `--json` prints something else, a line takes more than 20 s of processor time
or 2 GiB, or a record or checkpoint that was there is gone. Inputs of logs are lines. A training that is disturbed is
resumed, and must end with the weights of an undisturbed one, bit by bit."""


def main() -> None:
    """Attacks, prints what was wrong, and writes the table into RESULTS.md; exit status 1 if anything was wrong."""
    options = _options()
    # Every process of an attack has one thread, and begins with what takes seconds to import.
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
    if not options.quick and {*done} == {*ATTACKS}:
        write_section("chaos", "Attacks (`scripts/bench/chaos`)", _section(done, options.seed))
    if any(progress.failures for progress in done.values()):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="other cases")
    parser.add_argument("--quick", action="store_true", help="about a minute; writes nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--only", metavar="NAME[:NUMBER]", help=f"some attacks ({', '.join(ATTACKS)}), or one case")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="note in FILE what was done, and go on from there")
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


def _section(done: Mapping[str, Progress], seed: int) -> str:
    head = ["attack", "cases", "inputs", "wrong", "peak memory, MiB", "minutes"]
    rows: list[Sequence[str]] = [head, *(_cells(attack, done[name]) for name, attack in ATTACKS.items())]
    return "\n\n".join([environment({"torch": version("torch"), "polars": version("polars")}), markdown(rows),
                        f"Seed {seed}. {NOTES}"])  # fmt: skip


def _cells(attack: Attack, progress: Progress) -> list[str]:
    return [attack.text, f"{progress.done:,}", f"{progress.done * attack.inputs:,}", str(len(progress.failures)),
            f"{progress.peak_mib:.0f}", f"{progress.seconds / 60:.1f}"]  # fmt: skip


if __name__ == "__main__":
    main()
