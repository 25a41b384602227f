"""What a task does before each step: once, with randomness of its own, and undone with the step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DoesNotFitError
from can_train.fit.random_state import step_generator
from can_train.training.session import Session
from fakes.line_fit import LineBatch, LineTask, StoppedTask, train_line

STEPS = 6
SETTINGS = {"batch_size": 20, "find_batch_size": "off", "epochs": 2}


class Diary(nn.Linear):
    """A line that remembers in buffers what it was told."""

    pages: Tensor
    written: Tensor

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("pages", torch.zeros(100, dtype=torch.float64))
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))

    def write(self, number: float) -> None:
        self.pages[int(self.written)] = number
        self.written.add_(1)

    def read(self) -> list[float]:
        numbers: list[float] = self.pages[: int(self.written)].tolist()
        return numbers


class DiaryTask(LineTask):
    """Points, and a model that is told a random number before each step.

    Attributes:
        told: (rows, progress) of each step, as far as this process goes.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.told: list[tuple[NDArray[np.int64], float]] = []

    def build_model(self) -> nn.Module:
        return Diary()

    def before_step(
        self, model: nn.Module, rows: NDArray[np.int64], progress: float, generator: torch.Generator
    ) -> None:
        assert isinstance(model, Diary)
        self.told.append((rows, progress))
        model.write(float(torch.rand((), generator=generator)))


class StoppedDiaryTask(DiaryTask, StoppedTask):
    """The same, sent a SIGTERM while it prepares some training batch."""


def trained(folder: Path, task: LineTask, **training: Any) -> Session:
    return train_line(folder, task, **{**SETTINGS, **training})


def diary(session: Session) -> list[float]:
    assert isinstance(session.model, Diary)
    return session.model.read()


def test_it_comes_before_each_step_with_the_steps_samples_and_the_share_that_is_done(tmp_path: Path) -> None:
    task = DiaryTask()
    session = trained(tmp_path, task)
    assert [progress for _, progress in task.told] == [step / STEPS for step in range(STEPS)]
    expected = [rows for epoch in range(2) for rows in session.epochs.steps(epoch)]
    assert all((rows == own).all() for (rows, _), own in zip(task.told, expected, strict=True))


def test_its_randomness_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    written = diary(trained(tmp_path, DiaryTask(), seed=3))
    drawn = [torch.rand((), generator=step_generator(seed=3, step=step, before=True)) for step in range(STEPS)]
    assert written == [float(number) for number in drawn]
    assert len(set(written)) == STEPS


def test_it_draws_nothing_from_the_steps_own_randomness() -> None:
    before, own = (step_generator(seed=3, step=2, before=before).initial_seed() for before in (True, False))
    assert before != own


def test_it_is_not_repeated_for_the_parts_of_a_batch(tmp_path: Path) -> None:
    session = trained(tmp_path, DiaryTask(), find_batch_size="auto", micro_batch_size=3)
    assert session.engine.run_plan.phase_plan.most_parts == 7
    assert len(diary(session)) == STEPS


def test_a_rescue_within_the_step_keeps_what_was_done_before_it(tmp_path: Path) -> None:
    session = trained(tmp_path, DiaryTask(fail_above=7))
    assert session.engine.batcher.ooms_rescued > 0
    assert diary(session) == diary(trained(tmp_path / "undisturbed", DiaryTask()))


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, at: int) -> None:
    whole = trained(tmp_path / "whole", DiaryTask(), micro_batch_size=20)
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", StoppedDiaryTask(after=at), micro_batch_size=20)
    resumed = trained(tmp_path / "stopped", DiaryTask(), micro_batch_size=20)
    assert diary(resumed) == diary(whole)
    assert torch.equal(resumed.model.weight, whole.model.weight)


class TooLargeTask(DiaryTask):
    """Points that no longer fit, from the third step on."""

    def logical_batch(self, *given: Any) -> LineBatch:
        if len(self.told) == 3:
            self.fail_above = 0
        return super().logical_batch(*given)


def test_what_was_done_before_a_step_that_does_not_fit_is_undone_and_done_again(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError):
        trained(tmp_path, TooLargeTask())
    resumed = trained(tmp_path, DiaryTask())
    assert diary(resumed) == diary(trained(tmp_path / "undisturbed", DiaryTask()))
