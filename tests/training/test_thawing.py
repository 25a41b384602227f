"""A layer that is frozen when training begins and thawed later is trained from then on, also across a resumption."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.training.session import Session
from fakes.line_fit import LineTask, StoppedTask, train_line

SETTINGS: dict[str, Any] = {"batch_size": 20, "micro_batch_size": 10, "epochs": 4, "checkpoint_every": 1}
STEPS = 12
THAWED_AT = 6


class ThawingTask(LineTask):
    """Points, and a model whose first layer is frozen until half of the training is done.

    Attributes:
        first_layer: Its weight before each step.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.first_layer: list[Tensor] = []

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for parameter in next(iter(model.children())).parameters():
            parameter.requires_grad_(False)
        return model

    def before_step(
        self, model: nn.Module, rows: NDArray[np.int64], progress: float, generator: torch.Generator
    ) -> None:
        layer = next(iter(model.children()))
        self.first_layer.append(layer.weight.detach().clone())  # type: ignore[operator, union-attr]
        if progress >= THAWED_AT / STEPS:
            layer.requires_grad_(True)


class StoppedThawingTask(ThawingTask, StoppedTask):
    """The same, sent a SIGTERM while it prepares some training batch."""


def trained(folder: Path, task: LineTask, **training: Any) -> Session:
    return train_line(folder, task, **{**SETTINGS, **training})


def optimizer_state(session: Session) -> list[Tensor]:
    """Moments and step counts of all parameters, in order."""
    state = session.engine.optimization.optimizer.state_dict()["state"]
    return [value for index in sorted(state) for _, value in sorted(state[index].items())]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_a_layer_moves_from_the_step_in_which_it_is_thawed(tmp_path: Path, optimizer: str) -> None:
    task = ThawingTask()
    session = trained(tmp_path, task, optimizer=optimizer)
    weights = [*task.first_layer, session.model[0].weight.detach()]  # type: ignore[index, union-attr]
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(weights)]
    assert moved == [False] * THAWED_AT + [True] * (STEPS - THAWED_AT)


@pytest.mark.parametrize("stopped_in", [3, THAWED_AT, THAWED_AT + 1, 9], ids=lambda step: f"step {step}")
def test_a_resumed_run_ends_with_the_same_weights_and_moments_bit_by_bit(tmp_path: Path, stopped_in: int) -> None:
    whole = trained(tmp_path / "whole", ThawingTask())
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", StoppedThawingTask(after=stopped_in))
    resumed = trained(tmp_path / "stopped", ThawingTask())
    assert resumed.progress.step == whole.progress.step == STEPS
    for mine, its in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.requires_grad == its.requires_grad
    assert all(torch.equal(*pair) for pair in zip(optimizer_state(resumed), optimizer_state(whole), strict=True))
