"""Measures how fast runs learn the fastest micro-batch: under simulated laws of time with a known optimum, and in real
trainings of the five tasks on the processor.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from bench.harness import Benchmark, Table, train
from bench.time_laws import LAWS, TimedRuns
from can_train.factors.observations import read_records
from can_train.factors.store import replay_sizes
from can_train.factors.summary import summarize
from can_train.fit.step_time import TimedSize, TimeModel

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "torch_geometric"), quick="two seeds, and no trainings")
RUNS: Final = 3
STEPS: Final = 10_000
"""Steps of a simulated run."""

SEEDS: Final = 8
BATCHES: Final = ((64, 64), (256, 256), (256, 86))
"""Samples of a batch, and of the largest micro-batch that fits."""

GOAL: Final = 0.98
SLOWER: Final = 1.02
NOISE: Final = 0.1

TASKS: Final[Mapping[str, Sequence[str]]] = {
    "can": ("--model", "gat", "--batch-size", "64", "--epochs", "6", "--no-baselines"),
    "muon": ("--task", "muon", "--batch-size", "32", "--epochs", "10"),
    "seq2seq": ("--task", "seq2seq", "--model", "lstm", "--set", "model.hidden=64", "--batch-size", "32",
                "--epochs", "5"),
    "bendr": ("--task", "bendr", "--batch-size", "16", "--epochs", "30", "--set", "dataset.window_s=1"),
    "tracknet": ("--task", "tracknet", "--precision", "fp32", "--set", "dataset.width=128", "--set",
                 "dataset.height=72", "--set", "model.width=8", "--set", "model.levels=2", "--set", "model.groups=2",
                 "--batch-size", "16", "--epochs", "12"),
}  # fmt: skip
"""The trainings, some with smaller models than the presets'."""


_ON_CPU: Final = ("--dataset", "synthetic", "--device", "cpu", "--micro-batch", "fastest")


class Learned(NamedTuple):
    """The sizes under one law after the runs, over the seeds."""

    mean: float  # Throughput ÷ the best size's
    least: float
    slowest: float  # Time ÷ the largest size's, the worst
    longest: float  # Time of a run, trials included, ÷ that of a run in the largest size


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md; exit status 1 if a goal is missed."""
    options = BENCHMARK.parser().parse_args()
    laws, missed = Table("law", "batch", "throughput ÷ optimum", "least", "time ÷ largest", "longest run"), []
    for name in LAWS:
        for batch, largest in BATCHES:
            found = learn(name, batch, largest, seeds=2 if options.quick else SEEDS)
            laws.add(name, f"{batch}, {largest} fit", f"{found.mean:.3f}", f"{found.least:.3f}",
                     f"{found.slowest:.3f}", f"{found.longest:.3f}")  # fmt: skip
            if found.mean < GOAL or found.slowest > SLOWER:
                missed.append(f"{name}, {batch}: {found.mean:.3f} of the optimum, {found.slowest:.3f} of the largest")
    tasks = Table("task", "batch", "chosen by run", "tried", "time of a sample ÷ largest", "predicted ÷ measured")
    for task, words in () if options.quick else TASKS.items():
        tasks.add(task, *trained(words))
    BENCHMARK.finish(options, missed, laws=laws, tasks=tasks)


def learn(name: str, batch: int, largest: int, *, seeds: int) -> Learned:
    """Learns the fastest size under a law."""
    efficiencies, slower, longest = [], [], []
    for seed in range(seeds):
        runs = TimedRuns(LAWS[name], batch, largest, noise=NOISE, seed=seed)
        longest += [runs.run(STEPS) for _ in range(RUNS)]
        chosen = runs.step_time(runs.choice(STEPS).cost)
        efficiencies.append(runs.fastest / chosen)
        slower.append(chosen / runs.step_time(largest))
    return Learned(fmean(efficiencies), min(efficiencies), max(slower), max(longest))


def trained(words: Sequence[str]) -> list[str]:
    """Trains a task a few times in a row; returns the cells of its row: of the first phase where it has several."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        for number in range(RUNS):
            train(Path(folder) / str(number), state, *words, *_ON_CPU)
        (summary,) = summarize(read_records(state).finished)
        times: list[list[TimedSize]] = [next(iter(run.times.values()), []) for run in summary.runs]
        replayed = [sizes[0] for sizes in replay_sizes(summary) if sizes]
        return [str(summary.runs[0].logical_batch), *_figures(times, [size.own_samples for size in replayed]),
                ", ".join(f"{size.predicted_seconds / size.measured_seconds:.2f}" for size in replayed
                          if size.predicted_seconds and size.measured_seconds) or "–"]  # fmt: skip


def _figures(times: Sequence[Sequence[TimedSize]], chosen: Sequence[float]) -> list[str]:
    """Returns the sizes of the runs, the sizes that were tried, and the time of the last run's size."""
    known = [run for run in times if run]
    if not known:
        return ["–"] * 3
    last, rung = known[-1][0], known[-1][0].rung
    sizes = sorted({round(size.samples, 1) for run in known for size in run if size.rung == rung}, reverse=True)
    model = TimeModel([(rung, size) for size in sizes], known, first_rung=rung)
    ratio, deviation = model.ratio((rung, last.samples), (rung, sizes[0]))
    own = f"{math.exp(ratio):.2f} ± {deviation:.2f}"
    return [", ".join(f"{size:.3g}" for size in chosen), ", ".join(f"{size:.3g}" for size in sizes), own]
