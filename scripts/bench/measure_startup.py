"""Measures the start of can-train: the time to `can-train --help`, to a table of factors, to a plan and to the first
optimizer step, beside the time in which Python imports PyTorch. The commands take turns, so that other work on the
machine affects all of them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from bench.measure_data import say
from bench.results_file import environment, markdown, write_section

ROUNDS: Final = 5

TRAINING: Final = (
    "--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5",
    "--epochs", "1", "--no-baselines", "--device", "sim:1GiB",
)  # fmt: skip

FIRST_STEP: Final = """
import os, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook

def end(*_):
    frame = sys._getframe()
    # Probes step as well, before training does.
    while frame and frame.f_code.co_name != "take_step":
        frame = frame.f_back
    if frame:
        os._exit(0)

register_optimizer_step_pre_hook(end)
from can_train.cli.main import run
try:
    run()
finally:
    os._exit(3)
"""
"""Runs the command line up to the first optimizer step of training."""

IMPORT: Final = '`python -c "import torch"`'
CAN_TRAIN: Final = ("-m", "can_train")
STEP: Final = "the first optimizer step"
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    IMPORT: ("-c", "import torch"),
    "`can-train --help`": (*CAN_TRAIN, "--help"),
    "`can-train factors`": (*CAN_TRAIN, "factors"),
    "a plan (`--dry-run`)": (*CAN_TRAIN, *TRAINING, "--dry-run"),
    STEP: ("-c", FIRST_STEP, *TRAINING),
}

NOTES: Final = """\
Seconds of processes, from their start to their end: medians of {rounds} rounds, in which the commands take turns, after
one round that is not counted and leaves compiled modules and prepared data. *CPU* is the processor time of all threads,
*beside* its ratio to that of the import. The training is of a student GAT on simulated drives of 5 s; a process ends
when its first optimizer step begins. The device is a GPU simulated on the CPU (`sim:1GiB`), which is probed before the
first step, as a GPU is. The machine's load was {load:.1f}, which lengthens *wall*."""


class Seconds(NamedTuple):
    """What a process took."""

    processor: float
    wall: float


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md."""
    parser = argparse.ArgumentParser(prog="scripts/bench/startup", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round without the first step, and write nothing")
    quick = parser.parse_args().quick
    rounds = 1 if quick else ROUNDS
    commands = {name: line for name, line in COMMANDS.items() if not (quick and name == STEP)}
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(commands, Path(folder), rounds if quick else rounds + 1)
    table = markdown(rows({name: each[-rounds:] for name, each in taken.items()}))
    notes = NOTES.format(rounds=rounds, load=os.getloadavg()[0])
    text = "\n\n".join([environment({"torch": version("torch")}), table, notes])
    print(text)
    if not quick:
        write_section("startup", "From the command to the first step (`scripts/bench/startup`)", text)


def measure(commands: Mapping[str, Sequence[str]], folder: Path, rounds: int) -> dict[str, list[Seconds]]:
    """Runs every command in each round; returns what it took."""
    taken: dict[str, list[Seconds]] = {name: [] for name in commands}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name, arguments in commands.items():
            taken[name].append(seconds_of(arguments, folder))
    return taken


def rows(taken: Mapping[str, Sequence[Seconds]]) -> list[list[str]]:
    """Returns the rows of the table, the head first."""
    found = {name: Seconds(*map(median, zip(*each, strict=True))) for name, each in taken.items()}
    least = found[IMPORT]
    body = [[name, f"{one.processor:.2f}", f"{one.wall:.2f}", f"{one.processor / least.processor:.1f} ×"]
            for name, one in found.items()]  # fmt: skip
    return [["until", "CPU, s", "wall, s", "beside"], *body]


def seconds_of(arguments: Sequence[str], folder: Path) -> Seconds:
    """Runs this Python in a folder that is a person's home, too."""
    home = {"HOME": str(folder), "XDG_STATE_HOME": str(folder)}
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-P", *arguments], cwd=folder, env={**os.environ, **home},
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{said}{' '.join(arguments)} ended with {process.returncode}")
    return Seconds(used.ru_utime + used.ru_stime, time.perf_counter() - started)


if __name__ == "__main__":
    main()
