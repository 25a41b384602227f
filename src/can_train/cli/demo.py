"""`can-train demo`: a training that runs out of memory on a small simulated GPU."""

import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from can_train.cli.output import print_text, working
from can_train.errors import Stopped, with_command_name
from can_train.io.units import duration
from can_train.reporter import COLUMNS, SilentReporter, wrapped

if TYPE_CHECKING:
    import torch

    from can_train.reporter import Stage

_BATCH: Final = 256
SMALL: Final = "sim:96MiB"
_ROOMY: Final = "sim:1GiB"
# Memory that another process takes of the small GPU, the step before, and the number of steps. Less would leave room.
TAKEN: Final = "45MiB"
TAKEN_AFTER: Final = 5
STEPS_TAKEN: Final = 3
_SETTINGS: Final[Mapping[str, Any]] = {
    "training.batch_size": _BATCH,
    "training.epochs": 1,
    # 64-bit numbers: rounding is then too small to hide a mistake.
    "training.precision": "fp64",
    # Another process cannot take the memory in PyTorch's cache, which is released right before it comes.
    "training.cuda_empty_cache_interval": TAKEN_AFTER,
    # Peaks are compared, on devices with and without room for the data.
    "training.data_on_device": "off",
    "mode.baselines": False,
    # The sizes above are made for its windows, and it is soon simulated; how real the traffic is does not matter here.
    "dataset.synthetic.version": 1,
}
# Dropout would draw other masks for micro-batches than for the whole batch.
_MODEL: Final = "model.dropout=0"

_INTRODUCTION: Final = """\
A small graph network is trained three times, on a simulated CAN bus and on
simulated GPUs. It happens in a temporary folder; nothing else is changed.
"""

_NEXT: Final = """\
Try next:
  can-train --model gat --dataset synthetic --dry-run    # plan a training
  can-train --model gat --dataset path/to/log.csv        # train on your log
  can-train --help                                       # what else there is"""


def demo() -> None:
    """Show in about a minute what happens when memory runs short, on simulated GPUs.

    A small network is trained three times in a temporary folder; nothing else is changed.
    """
    started = time.monotonic()
    print_text(_INTRODUCTION)
    # Before there is a folder to remove: Ctrl-C ends an import at once.
    from can_train.training import train  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="can-train-demo-") as name:
        run_in(Path(name))
    print_text(with_command_name(f"\nThat took {duration(time.monotonic() - started)}. {_NEXT}"))


def run_in(folder: Path) -> tuple["Trained", "Trained"]:
    """Trains in a folder and prints the story; returns the trainings on the roomy and, the first, on the small GPU."""
    from can_train.memory.meters import FOREIGN

    # The file that tells the simulated GPUs the memory of another process; no file: 0 bytes.
    taken = folder / "taken"
    os.environ[FOREIGN] = str(taken)
    print_text(f"1. On a GPU with room ({_size(_ROOMY)})")
    whole = _train(folder, _ROOMY, {"training.use_adaptive_batch_size_factor": False})
    _say(f"Each batch of {_BATCH} samples is computed in one piece: peak {_mib(whole.result['peak_memory_bytes'])}.")

    print_text(f"\n2. The same training on a GPU of {_size(SMALL)}, where such a batch does not fit")
    split = _train(folder, SMALL, {}, taken)
    plan, peak = split.result["plan"]["plan"], _mib(split.result["peak_memory_bytes"])
    _say(f"As long as it was alone, each batch was computed in {plan['most_parts']} micro-batches: "
         f"peak {peak}, where {_mib(split.result['predicted_peak_bytes'])} had been predicted.")  # fmt: skip

    print_text("\n3. Once more, with what that run has taught")
    again = _train(folder, SMALL, {}).result
    factor, peak = again["plan"]["plan"]["safety_factor"], _mib(again["peak_memory_bytes"])
    _say(f"That run used {plan['safety_factor']:.1%} of what was found to fit, to be on the safe side. Its peak "
         f"showed that {factor:.1%} may be used, so this run does: peak {peak}.")  # fmt: skip
    print_text("\n4. What the lack of memory has changed in the trained weights")
    _say(_comparison(whole, split))
    return whole, split


def _say(text: str) -> None:
    print_text(wrapped(f"   {text}", COLUMNS))


def _comparison(whole: "Trained", split: "Trained") -> str:
    """Says how far the weights after two trainings lie apart."""
    count, apart = sum(value.numel() for value in whole.weights.values()), largest_difference(whole, split)
    if not apart:
        return f"Nothing: all {count:,} weights of 1 and 2 are the same, to the last bit."
    digits = math.floor(-math.log10(apart))
    return (
        f"All {count:,} weights of 1 and 2 agree to {digits} decimal places. The largest difference is {apart:.0e}: "
        "numbers were added in another order, and rounded there."
    )


def largest_difference(whole: "Trained", split: "Trained") -> float:
    """Returns the largest difference between a weight after one training and after another."""
    return max(float((value - split.weights[name]).abs().max()) for name, value in whole.weights.items())


def _size(device: str) -> str:
    return device.removeprefix("sim:").replace("MiB", " MiB").replace("GiB", " GiB")


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training: its `result.json`, and its weights after the last step."""

    result: Mapping[str, Any]
    weights: "Mapping[str, torch.Tensor]"


def _train(folder: Path, device: str, values: Mapping[str, Any], taken: Path | None = None) -> Trained:
    """Trains once; where `taken` is given, another process holds memory of the device for some steps."""
    from can_train.config.compose import RunRequest, resolve
    from can_train.training.loading import Checkpoints
    from can_train.training.train import train_new

    folders = {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state")}
    request = RunRequest(model="gat", size="student", dataset="synthetic", device=device, sets=(_MODEL,),
                         values={**_SETTINGS, **folders, **values})  # fmt: skip
    try:
        outcome = train_new(resolve(request), _Reporter(taken))
    except Stopped as stop:
        # The notice was about a run whose folder is removed.
        stop.is_told = False
        raise
    result, state = outcome.folder.result(), Checkpoints(outcome.folder.checkpoints_path).newest()
    assert result is not None
    assert state is not None
    trained = {name: value for name, value in state["model"].items() if value.is_floating_point()}
    return Trained(result=result, weights=trained)


class _Reporter(SilentReporter):
    """Prints notices of a rescue and, on a terminal, the current stage; other notices are left out.

    Args:
        taken: The file that stands for another process, which then comes and goes; None: nobody else comes.
    """

    def __init__(self, taken: Path | None) -> None:
        self._taken = taken

    def notice(self, text: str) -> None:
        """Prints a notice about a step."""
        if text.startswith("step "):
            _say(text[0].upper() + text[1:])

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Iterator["Stage"]:
        """Shows the title, and lets the other process come and go between two steps of a training."""
        with working(title):
            yield _DemoStage(self._taken if title == "training" else None)


class _DemoStage:
    def __init__(self, taken: Path | None) -> None:
        self._taken = taken
        self._done = 0

    def advance(self, amount: int = 1, **figures: float | str) -> None:
        self._done += amount
        if self._taken is None or not amount:
            return
        if self._done == TAKEN_AFTER:
            self._taken.write_text(TAKEN)
            _say(f"After step {self._done} another process takes {_size(TAKEN)} of the GPU.")
        if self._done == TAKEN_AFTER + STEPS_TAKEN:
            self._taken.unlink()
            _say(f"After step {self._done} the other process ends.")
