"""Measures the start of can-train: the time to `can-train --help`, to a table of factors, to a plan and to the first
optimizer step, beside the time of Python's import of PyTorch. The commands take turns, so that other work on the
machine affects all of them.
"""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.harness import Benchmark, Table, Usage, run_measured, say

BENCHMARK: Final = Benchmark(__name__, packages=("torch",), quick="one round without the first step")
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


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md."""
    options = BENCHMARK.parser().parse_args()
    rounds = 1 if options.quick else ROUNDS
    commands = {name: line for name, line in COMMANDS.items() if not (options.quick and name == STEP)}
    with tempfile.TemporaryDirectory() as folder:
        usages = measure(commands, Path(folder), rounds if options.quick else rounds + 1)
    medians = {name: Usage(*map(median, zip(*each[-rounds:], strict=True))) for name, each in usages.items()}
    least_s = medians[IMPORT].cpu_s
    table = Table("until", "CPU, s", "wall, s", "beside")
    for name, usage in medians.items():
        table.add(name, f"{usage.cpu_s:.2f}", f"{usage.wall_s:.2f}", f"{usage.cpu_s / least_s:.1f} ×")
    BENCHMARK.finish(options, table=table, rounds=rounds, load=os.getloadavg()[0])


def measure(commands: Mapping[str, Sequence[str]], folder: Path, rounds: int) -> dict[str, list[Usage]]:
    """Runs every command in each round, in a folder that is a person's home, too."""
    usages: dict[str, list[Usage]] = {name: [] for name in commands}
    variables = {**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder)}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name, arguments in commands.items():
            usages[name].append(run_measured([sys.executable, "-P", *arguments], cwd=folder, env=variables))
    return usages
