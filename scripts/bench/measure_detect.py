"""Measures how many frames a second `can-train detect` judges: a simulated log of candump is piped into it, for each
model and size, which are trained briefly on the simulated bus. Two lengths of input tell start-up and frames apart, and
whether memory stays bounded.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from bench.measure_data import run_python, say
from bench.results_file import environment, markdown, write_section
from can_train.reporter import SilentReporter
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings, SyntheticSettings
from can_train_tasks.can.synthetic.writing import write_synthetic

MODELS: Final = tuple((model, size) for model in ("gat", "vgae") for size in ("student", "teacher"))

TRAINING: Final = (
    "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=10", "--epochs", "1", "--no-baselines",
    "--device", "cpu",
)  # fmt: skip

SECONDS: Final = 600.0
"""Length of the drive that is watched."""
SHORT_SHARE: Final = 8
"""How many times shorter the other input is."""
ROUNDS: Final = 3

GOAL: Final = 50_000
"""Frames per second of processor time: ten times what a busy bus of 500 kbit/s carries."""

NOTES: Final = """\
`can-train detect RUN --input -`, to which `cat` pipes a simulated log in the format of `candump -L`, faster than it is
read. *Frames/s*: the difference of the two inputs' frames over that of their processor time, that of all threads, so
without start-up; the median of {rounds} rounds. *Start*: processor time of the short input less that of its frames.
*MiB*: peak memory of the process, the largest over the rounds. Windows have 100 frames. A busy bus of 500 kbit/s
carries 4,000 to 5,000 frames/s."""


class Usage(NamedTuple):
    """What a process took."""

    processor_s: float
    peak_mib: float


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench/detect", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the drive (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each measurement (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the student GAT alone, and write nothing")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    models = MODELS[:1] if options.quick else MODELS
    with tempfile.TemporaryDirectory() as folder:
        rows, slowest = measure(Path(folder), options.seconds, options.rounds, models)
    head = environment({name: version(name) for name in ("torch", "torch_geometric", "polars", "numpy")})
    text = "\n\n".join([head, markdown(rows), NOTES.format(rounds=options.rounds)])
    print(text)
    if not (options.no_write or options.quick):
        write_section("detect", "Live detection (`scripts/bench/detect`)", text)
    if slowest < GOAL:
        sys.exit(f"missed: {slowest:,.0f} frames/s, fewer than {GOAL:,}")


def measure(
    folder: Path, seconds: float, rounds: int, models: Sequence[tuple[str, str]]
) -> tuple[list[list[str]], float]:
    """Trains and watches; returns the rows of the table, the head first, and the slowest model's frames a second."""
    say(f"simulating a drive of {seconds:g} s")
    lines = list(candump_lines(simulated_drive(folder / "bus", seconds)))
    few, many = len(lines) // SHORT_SHARE, len(lines)
    inputs = {few: folder / "short.log", many: folder / "long.log"}
    for count, path in inputs.items():
        path.write_text("".join(lines[:count]), encoding="ascii")
    rows = [["model", "frames/s", "start, s", f"MiB at {few:,} frames", f"MiB at {many:,} frames"]]
    rates = []
    for model, size in models:
        say(f"training {model} {size}")
        run = trained(folder, model, size)
        say(f"watching with {model} {size}")
        used = [{count: watched(run, path) for count, path in inputs.items()} for _ in range(rounds)]
        seconds_each = [(one[many].processor_s - one[few].processor_s) / (many - few) for one in used]
        start_s = median(one[few].processor_s for one in used) - median(seconds_each) * few
        peaks = [max(one[count].peak_mib for one in used) for count in inputs]
        rates.append(1 / median(seconds_each))
        rows.append([f"{model} {size}", f"{rates[-1]:,.0f}", f"{start_s:.1f}", *(f"{peak:.0f}" for peak in peaks)])
        say(" | ".join(rows[-1]))
    return rows, min(rates)


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


def trained(folder: Path, model: str, size: str) -> Path:
    """Trains a model and returns the folder of its run."""
    runs = folder / f"{model}-{size}"
    places = ("--runs-dir", str(runs), "--state-dir", str(folder / "state"))
    run_python("-m", "can_train", "--model", model, "--size", size, *TRAINING, *places)
    (result,) = runs.glob("*/result.json")
    return result.parent


def watched(run: Path, log: Path) -> Usage:
    """Pipes a log into `can-train detect`."""
    command = [sys.executable, "-P", "-m", "can_train", "detect", str(run), "--input", "-"]
    with subprocess.Popen(["cat", str(log)], stdout=subprocess.PIPE) as pipe:
        detect = subprocess.Popen(command, stdin=pipe.stdout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert pipe.stdout is not None
        pipe.stdout.close()  # so that `cat` ends if `detect` does
        # On Linux the peak includes this process's own before exec, which is smaller: it has not imported torch.
        _, status, used = os.wait4(detect.pid, 0)
        detect.returncode = os.waitstatus_to_exitcode(status)
    if detect.returncode != 0:
        sys.exit(f"{' '.join(command)} < {log} ended with {detect.returncode}")
    return Usage(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


if __name__ == "__main__":
    main()
