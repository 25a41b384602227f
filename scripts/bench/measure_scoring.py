"""Measures how fast a finished run scores a log, reading included. A student GAT is trained briefly on the synthetic
bus and evaluated on a long generated log: once from the log's text, once from graphs that have been prepared before.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from bench.measure_data import build_all, read_frames, run_python, write_hcrl_log
from bench.results_file import environment, markdown, write_section
from can_train.config.resolved import PathSettings
from can_train.reporter import SilentReporter
from can_train.training.evaluate import EvaluationRequest, evaluate

FRAMES: Final = 1_000_000
ROUNDS: Final = 3

GOAL: Final = 100_000
"""Frames per second, reading included, on two cores."""

TRAINING: Final = (
    "--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5",
    "--epochs", "1", "--no-baselines", "--device", "cpu",
)  # fmt: skip

NOTES: Final = """\
Medians of {rounds} rounds in one process that has imported its libraries. *From text* reads the log, builds its graphs
and saves them; *prepared* loads the saved graphs; *the whole command* is one `can-train evaluate`, from its start to
its table. The log has {frames:,} frames from 27 IDs, in windows of 100 frames. Torch uses {threads} threads, which
sleep while they wait (OMP_WAIT_POLICY=passive, as the command line sets it). The machine's load was {load:.1f}."""


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench/scoring", description=__doc__)
    parser.add_argument("--frames", type=int, default=FRAMES, help="rows of the log (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each measurement (default: %(default)s)")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(Path(folder), options.frames, options.rounds)
    table = markdown([["measured", "frames/s"], *([name, f"{rate:,.0f}"] for name, rate in rates.items())])
    head = environment({"torch": version("torch"), "torch_geometric": version("torch_geometric")})
    notes = NOTES.format(
        rounds=options.rounds, frames=options.frames, threads=torch.get_num_threads(), load=os.getloadavg()[0]
    )
    print(table)
    if not options.no_write:
        text = "\n\n".join([head, table, notes])
        write_section("scoring", "Scoring a log with a finished run (`scripts/bench/scoring`)", text)
    if rates["from text to scores"] < GOAL:
        sys.exit(f"missed: {rates['from text to scores']:,.0f} frames/s, the goal is {GOAL:,}")


def measure(folder: Path, frames: int, rounds: int) -> dict[str, float]:
    """Makes the run and the log in `folder`. Returns frames per second for each measurement."""
    log, runs = folder / "drive.csv", folder / "runs"
    write_hcrl_log(log, frames)
    run_python("-m", "can_train", *TRAINING, "--runs-dir", str(runs), "--state-dir", str(folder / "state"))
    (run,) = runs.iterdir()
    # This round, which imports the libraries, is not counted.
    judged(run, log, folder / "first")
    fresh = [judged(run, log, folder / f"state-{number}") for number in range(rounds)]
    again = [judged(run, log, folder / "first") for _ in range(rounds)]
    blocks = list(read_frames(log))
    seconds = {
        "from text to scores": median(sum(each.values()) for each in fresh),
        "prepared to scores": median(sum(each.values()) for each in again),
        "of this: reading text and keeping graphs": median(each["reading"] for each in fresh),
        "of that: parsing alone": median_time(lambda: sum(map(len, read_frames(log))), rounds),
        "of that: graphs alone": median_time(lambda: build_all(blocks), rounds),
        "of this: scoring": median(each["scoring"] for each in fresh),
        "the whole command": median_time(lambda: command(run, log, folder / "command"), 1),
    }
    return {name: frames / each for name, each in seconds.items()}


def judged(run: Path, log: Path, state: Path) -> dict[str, float]:
    """Evaluates the run on the log in this process. Returns the seconds of each part."""
    paths = PathSettings(state_dir=str(state))
    request = EvaluationRequest(run=run, dataset=str(log), device="cpu", paths=paths)
    seconds: dict[str, float] = evaluate(request, SilentReporter()).document["seconds"]
    return seconds


def command(run: Path, log: Path, state: Path) -> None:
    """Evaluates the run on the log by the command line."""
    arguments = ("--dataset", str(log), "--device", "cpu", "--state-dir", str(state))
    run_python("-m", "can_train", "evaluate", str(run), *arguments)


def median_time(work: Callable[[], Any], rounds: int) -> float:
    """Returns the median seconds of the rounds."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


if __name__ == "__main__":
    main()
