"""How deep a reader goes from a training step, or from a door of somebody else's loop, to its backward pass."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train import LoopSettings, MicroBatcher
from can_train.adapters.framework_loop import FrameworkLoop
from can_train.adapters.part_values import Part
from fakes.line_fit import LineBatch, LineTask, train_line
from guards.sources import PACKAGE

MAX_TO_BACKWARD = 5
"""Functions of the package on the stack from the door to the call of `backward()`, both included."""


def functions_on_stack(frame: FrameType | None) -> list[str]:
    """The package's functions that are being called, the innermost one last."""
    found = []
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE) and "simulated" not in frame.f_code.co_filename:
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found[::-1]


class Watched(torch.autograd.Function):
    """Returns a loss, and notes who calls its backward pass."""

    stacks: list[list[str]]

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Watched.stacks.append(functions_on_stack(sys._getframe()))
        return gradients[0]


class WatchedBatch(LineBatch):
    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        losses = super().losses(model, start, stop).items()
        return {term: (Watched.apply(total), denominator) for term, (total, denominator) in losses}


class WatchedTask(LineTask):
    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        return WatchedBatch(self._x[rows].to(device, dtype), self.fail_above)


def watched(loss: Tensor) -> Tensor:
    found: Tensor = Watched.apply(loss)
    return found


def calls_from(door: str) -> list[list[str]]:
    return [stack[stack.index(door) :] for stack in Watched.stacks if door in stack]


@pytest.fixture(autouse=True)
def no_stacks() -> None:
    Watched.stacks = []


def test_a_training_step_reaches_backward_in_few_calls(tmp_path: Path) -> None:
    train_line(tmp_path, WatchedTask(), batch_size=20, micro_batch_size=10, epochs=1)
    calls = [stack for stack in calls_from("take_step") if "measure_batch_dependence" not in stack]
    assert len(calls) == 6
    assert max(map(len, calls)) <= MAX_TO_BACKWARD, calls[0]
    assert not [name for stack in calls for name in stack if "<lambda>" in name]


def test_a_loop_of_ones_own_reaches_backward_in_few_calls() -> None:
    model, x = nn.Linear(3, 1), torch.ones(8, 3)
    batcher = MicroBatcher(model, limits=4)
    batcher.run(lambda start, stop: {"loss": (watched(model(x[start:stop]).sum()), stop - start)}, 8)
    # The first batch that is split is then compared with the whole: those passes are no step.
    calls = [stack for stack in calls_from("MicroBatcher.run") if "measure_batch_dependence" not in stack]
    assert len(calls) == 2
    assert max(map(len, calls)) <= MAX_TO_BACKWARD, calls[0]


def test_a_frameworks_loop_reaches_backward_in_few_calls(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    settings = LoopSettings(limits=4, learn=False, state_dir=tmp_path)
    loop = FrameworkLoop(framework="mine", model=model, optimizers=[], settings=settings)

    def loss_of(part: Part) -> tuple[Tensor, None]:
        return watched(model(part.batch).mean()), None

    batch = torch.ones(8, 3)
    loop.step(batch, lambda: loss_of, lambda: loop.run_parts(batch, loss_of))
    loop.close()
    calls = [stack for stack in calls_from("FrameworkLoop.run_parts") if "measure_batch_dependence" not in stack]
    assert len(calls) == 2
    assert max(map(len, calls)) <= MAX_TO_BACKWARD, calls[0]
