"""Measures how many frames a second `can-train detect` judges on one core: a simulated log of candump is piped into it,
for each model and size, which are trained briefly on the simulated bus. Two lengths of input separate start-up from
frames, and show whether memory stays bounded.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.harness import Benchmark, Table, Usage, run_measured, say, train
from can_train.reporter import SilentReporter
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings, SyntheticSettings
from can_train_tasks.can.synthetic.writing import write_synthetic

BENCHMARK: Final = Benchmark(
    __name__, packages=("torch", "torch_geometric", "polars", "numpy"), quick="the student GAT alone"
)
MODELS: Final = tuple((model, size) for model in ("gat", "vgae") for size in ("student", "teacher"))

TRAINING: Final = (
    "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=10", "--epochs", "1", "--no-baselines",
    "--device", "cpu",
)  # fmt: skip

SHORT_SHARE: Final = 8  # frames of the long input over the frames of the short input
GOAL: Final = 50_000
"""Frames per second of processor time: ten times the traffic of a busy bus of 500 kbit/s."""


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if the goal is missed."""
    parser = BENCHMARK.parser()
    parser.add_argument("--seconds", type=float, default=600.0, help="of the drive (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (default: %(default)s)")
    options = parser.parse_args()
    models = MODELS[:1] if options.quick else MODELS
    with tempfile.TemporaryDirectory() as folder:
        table, slowest = measure(Path(folder), options.seconds, options.rounds, models)
    missed = [f"{slowest:,.0f} frames/s, fewer than {GOAL:,}"] if slowest < GOAL else []
    BENCHMARK.finish(options, missed, table=table, rounds=options.rounds)


def measure(folder: Path, seconds: float, rounds: int, models: Sequence[tuple[str, str]]) -> tuple[Table, float]:
    """Trains and watches; returns the table and the slowest model's frames a second."""
    say(f"simulating a drive of {seconds:g} s")
    lines = list(candump_lines(simulated_drive(folder / "bus", seconds)))
    few, many = len(lines) // SHORT_SHARE, len(lines)
    inputs = {few: folder / "short.log", many: folder / "long.log"}
    for count, path in inputs.items():
        path.write_text("".join(lines[:count]), encoding="ascii")
    table = Table("model", "frames/s", "start, s", f"MiB at {few:,} frames", f"MiB at {many:,} frames")
    rates = []
    for model, size in models:
        say(f"training {model} {size}")
        run = train(folder / f"{model}-{size}", folder / "state", "--model", model, "--size", size, *TRAINING)
        say(f"watching with {model} {size}")
        used = [{count: watched(run, path) for count, path in inputs.items()} for _ in range(rounds)]
        seconds_each = [(usage[many].cpu_s - usage[few].cpu_s) / (many - few) for usage in used]
        start_s = median(usage[few].cpu_s for usage in used) - median(seconds_each) * few
        peaks = [max(usage[count].peak_mib for usage in used) for count in inputs]
        rates.append(1 / median(seconds_each))
        table.add(f"{model} {size}", f"{rates[-1]:,.0f}", f"{start_s:.1f}", *(f"{peak:.0f}" for peak in peaks))
    return table, min(rates)


def simulated_drive(folder: Path, seconds: float) -> Frames:
    """Simulates the bus, with another seed than the training's, and reads a drive without attacks."""
    write_synthetic(folder, SyntheticSettings(seed=10, seconds=seconds), SilentReporter())
    log = min(folder.glob("train_01_attack_free/*"))
    return Frames.concatenate(list(LogReader(log, CanDatasetSettings()).blocks()))


def candump_lines(frames: Frames) -> Iterator[str]:
    """Writes frames as `candump -L` does."""
    columns = zip(frames.timestamp.tolist(), frames.can_id.tolist(), frames.length.tolist(), frames.payload,
                  strict=True)  # fmt: skip
    for time_s, can_id, length, payload in columns:
        name = f"{can_id:03X}" if can_id <= 0x7FF else f"{can_id:08X}"
        yield f"({time_s:.6f}) can0 {name}#{payload[:length].tobytes().hex().upper()}\n"


def watched(run: Path, log: Path) -> Usage:
    """Pipes a log into `can-train detect` on one core."""
    command = [sys.executable, "-P", "-m", "can_train", "detect", str(run), "--input", "-"]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen(["cat", str(log)], stdout=subprocess.PIPE) as pipe:
            return run_measured(command, stdin=pipe.stdout)
    finally:
        os.sched_setaffinity(0, cores)
