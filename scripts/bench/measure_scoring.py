"""Measures how fast a finished run scores a log, reading included. A student GAT is trained briefly on the synthetic
bus and evaluated on a long generated log: once from the log's text, once from graphs that have been prepared before.
"""

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Final

import torch

from bench.harness import Benchmark, Table, median_time, run_python, train
from bench.measure_data import build_all, read_frames, write_hcrl_log
from can_train.config.resolved import PathSettings
from can_train.reporter import SilentReporter
from can_train.training.evaluate import EvaluationRequest, evaluate

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "torch_geometric"))

GOAL: Final = 100_000
"""Frames per second, reading included, on two cores."""

TRAINING: Final = (
    "--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5",
    "--epochs", "1", "--no-baselines", "--device", "cpu",
)  # fmt: skip


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if the goal is missed."""
    parser = BENCHMARK.parser()
    parser.add_argument("--frames", type=int, default=1_000_000, help="rows of the log (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (default: %(default)s)")
    options = parser.parse_args()
    table = Table("measured", "frames/s")
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(Path(folder), options.frames, options.rounds)
    for name, rate in rates.items():
        table.add(name, f"{rate:,.0f}")
    whole = rates["from text to scores"]
    missed = [f"{whole:,.0f} frames/s, the goal is {GOAL:,}"] if whole < GOAL else []
    BENCHMARK.finish(options, missed, table=table, rounds=options.rounds, frames=options.frames,
                     threads=torch.get_num_threads(), load=os.getloadavg()[0])  # fmt: skip


def measure(folder: Path, frames: int, rounds: int) -> dict[str, float]:
    """Makes the run and the log in `folder`. Returns frames per second for each measurement."""
    log = folder / "drive.csv"
    write_hcrl_log(log, frames)
    run = train(folder / "runs", folder / "state", *TRAINING)
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
