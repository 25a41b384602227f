"""Runs the benchmarks one after the other, since they are timed, prints a line for each, and goes on after a failure.
Then it remakes the summary at the top of RESULTS.md and the picture of README.md from the sections of RESULTS.md.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from bench.harness import BENCH, RESULTS, Benchmark, write_section
from bench.picture import PICTURE, picture
from bench.summary import AbsentError, summary

BENCHMARK: Final = Benchmark(__name__, quick="less of each, in under 3 minutes")

LATEST_START_S: Final = 25 * 60
"""No benchmark begins after so many seconds: the longest one here takes about five minutes."""


class Arguments(NamedTuple):
    """How a benchmark is called here.

    Attributes:
        full: Arguments of a full run; None: it isn't run.
        quick: Arguments of a quick run, which writes nothing; None: it isn't run.
        left_out: Why a run is left out, or a full one is in part only.
    """

    full: str | None = ""
    quick: str | None = "--quick"
    left_out: str = ""


LONG: Final = "the whole takes long; run it by itself"
TRAININGS: Final = "its trainings take minutes"

ARGUMENTS: Final[Mapping[str, Arguments]] = {
    "bus": Arguments("--no-write", "--seeds 0 --no-write", "its table also has logs that are not in the repository"),
    "chaos": Arguments("--quick", "--quick --only logs,clocks", LONG),
    "claims": Arguments("--quick", "--quick --only bendr can", LONG),
    "data": Arguments(quick="--messages 400000 --no-write"),
    "detect": Arguments(quick="--quick --seconds 60 --rounds 1"),
    "detectors": Arguments(None, None, f"{TRAININGS}, and it has logs that are not in the repository"),
    "engine": Arguments("--quick", left_out=LONG),
    "frameworks": Arguments(None, None, "it needs the frameworks' own tests, which are not in the repository"),
    "history": Arguments("--quick", left_out=LONG),
    "rules": Arguments(quick="--seeds 3 --no-write"),
    "learning": Arguments("--scenarios 0", None, TRAININGS),
    "monitor": Arguments("--quick", left_out=LONG),
    "planning": Arguments("--quick", None, LONG),
    "plans": Arguments("--quick", None, LONG),
    "reasons": Arguments(None, None, TRAININGS),
    "rungs": Arguments("--quick", None, TRAININGS),
    "scoring": Arguments(quick="--frames 50000 --rounds 1 --no-write"),
    "slurm": Arguments(None, None, "it needs a SLURM of its own (scripts/slurm-sandbox)"),
}
"""Benchmarks that are called in another way than without arguments, or with --quick."""


class Outcome(NamedTuple):
    """The outcome of a benchmark: `ok`, `missed`, `failed` or `skipped`, and the reason."""

    status: str
    reason: str = ""


def main() -> None:
    """Runs the benchmarks; exit status 1 if one missed a goal or failed."""
    parser = BENCHMARK.parser()
    parser.add_argument("--only", nargs="+", choices=benchmarks(), default=benchmarks(), help="some of them")
    parser.add_argument("--summary", action="store_true", help="run none: remake the summary and the picture alone")
    options = parser.parse_args()
    latest = time.monotonic() + LATEST_START_S
    outcomes = [] if options.summary else [timed(name, latest, quick=options.quick) for name in options.only]
    if not options.quick and not options.no_write:
        write_summary()
    if any(outcome.status in ("missed", "failed") for outcome in outcomes):
        sys.exit(1)


def benchmarks() -> list[str]:
    """Returns the names of all benchmarks but this one."""
    return sorted({file.stem.removeprefix("measure_") for file in BENCH.glob("measure_*.py")} - {"all"})


def timed(name: str, latest: float, *, quick: bool) -> Outcome:
    """Runs a benchmark unless it is too late, prints a line, and returns the outcome."""
    arguments = ARGUMENTS.get(name, Arguments())
    chosen = arguments.quick if quick else arguments.full
    started, cpu_before = time.monotonic(), cpu_of_commands()
    if chosen is None:
        outcome = Outcome("skipped", arguments.left_out)
    elif started > latest:
        outcome = Outcome("skipped", "half an hour is nearly over; run it by itself")
    else:
        outcome = run([str(BENCH / name), *chosen.split()])
    in_part = f"in part: {arguments.left_out}" if chosen and not quick and outcome.status != "skipped" else ""
    notes = "; ".join(filter(None, [outcome.reason, in_part]))
    seconds = f"{time.monotonic() - started:6.1f} s, CPU {cpu_of_commands() - cpu_before:6.1f} s"
    print(f"{name:<12} {seconds}  {outcome.status:<8} {notes}".rstrip(), flush=True)
    return outcome


def cpu_of_commands() -> float:
    """Returns the CPU seconds of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command: Sequence[str]) -> Outcome:
    """Runs a command; if it fails, its last line is the reason."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return Outcome("ok")
    failed = done.returncode != 1 or "\nTraceback (most recent call last):" in f"\n{done.stdout}"
    last = (done.stdout.strip() or "it said nothing").splitlines()[-1].strip()
    return Outcome("failed" if failed else "missed", last.removeprefix("missed: "))


def write_summary() -> None:
    """Remakes the summary and the picture."""
    results = RESULTS.read_text(encoding="utf-8")
    try:
        table, drawn = summary(results), picture(results)
    except AbsentError as error:
        sys.exit(f"scripts/bench/all: no summary: {error}")
    write_section("all", table)
    PICTURE.write_text(drawn, encoding="utf-8")
