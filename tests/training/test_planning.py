"""Trials on a line: they leave nothing behind, and the plan says what decided."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.errors import DoesNotFitError
from can_train.memory.meters import CpuMeter
from can_train.state.factor_store import FactorChoice
from can_train.training.planning import Trial, make_plan, plan_request
from can_train.training.session import make_session
from line_fit import SAMPLES, LineBatch, LineTask, Notices, line_parts, line_run

CAPACITY = 10**6
FACTOR = FactorChoice(0.5, "for a test")


class Watched(LineTask):
    """Keeps the rows of every batch it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        self.asked.append(rows.tolist())
        return super().logical_batch(rows, device, dtype, generator)


def fits_up_to(largest: float) -> Callable[[int], int]:
    """A device of `CAPACITY` bytes whose trials take the same for each sample."""

    def trial(size: int) -> int:
        if size > largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return int(size * CAPACITY / largest)

    return trial


def request(folder: Path, *, factor: float = 0.5, dataset_size: int = 1000, **training: Any) -> Any:
    return plan_request(line_run(folder, **training), factor=factor, dataset_size=dataset_size)


@pytest.mark.parametrize(
    ("training", "batch", "binding"),
    [
        ({"min_steps_per_epoch": 4}, 50, "memory"),
        ({"min_steps_per_epoch": 50}, 20, "min_steps"),
        ({"batch_size": 300}, 300, "requested"),
        ({"batch_size": 100, "gradient_accumulation_steps": 3}, 300, "requested"),
        ({"batch_size": 5000}, 1000, "dataset"),
    ],
)
def test_the_plan_names_the_limit_that_decided(
    tmp_path: Path, training: dict[str, int], batch: int, binding: str
) -> None:
    plan = make_plan(request(tmp_path, **training), fits_up_to(100), CAPACITY)
    assert (plan.logical_batch, plan.binding_limit) == (batch, binding)
    assert sum(plan.micro_batches) == batch
    assert max(plan.micro_batches) <= plan.safe_limit <= 50


def test_a_data_set_smaller_than_one_batch_binds(tmp_path: Path) -> None:
    plan = make_plan(request(tmp_path, dataset_size=30, min_steps_per_epoch=1), fits_up_to(100), CAPACITY)
    assert (plan.logical_batch, plan.binding_limit, plan.steps_per_epoch) == (30, "dataset", 1)


@pytest.mark.parametrize("training", [{"find_batch_size": "off", "batch_size": 64}, {"micro_batch_size": 8}])
def test_a_plan_that_needs_no_limit_tries_nothing(tmp_path: Path, training: dict[str, Any]) -> None:
    def trial(size: int) -> int:
        raise AssertionError(size)

    assert make_plan(request(tmp_path, **training), trial, CAPACITY).tuned_limit is None


def test_a_device_that_holds_no_sample_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"(?s)At least one.*smaller model"):
        make_plan(request(tmp_path), fits_up_to(0.5), CAPACITY)


def test_a_trial_takes_the_costliest_samples_and_repeats_them(tmp_path: Path) -> None:
    task = Watched()
    trial = Trial(line_run(tmp_path, find_batch_size_steps_per_trial=2), task, task.build_model(), CpuMeter())
    trial(3)
    trial(SAMPLES + 2)
    costliest = list(range(SAMPLES - 1, -1, -1))
    assert task.asked == [costliest[:3]] * 2 + [costliest + costliest[:2]] * 2


def test_every_feature_counts_the_same_in_what_is_costliest(tmp_path: Path) -> None:
    class ManyUnits(Watched):
        """Nodes are few and edges are many; sample 7 has the most nodes by far."""

        def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
            nodes = np.where(rows == 7, 50.0, 1.0)
            return np.stack([nodes, 1000.0 + rows, np.ones(len(rows))], axis=1)

    task = ManyUnits()
    Trial(line_run(tmp_path), task, task.build_model(), CpuMeter())(1)
    assert task.asked[0] == [7]


def test_a_trials_peak_grows_with_its_size(tmp_path: Path) -> None:
    task = LineTask()
    trial = Trial(line_run(tmp_path), task, task.build_model(), CpuMeter())
    small, large = trial(100), trial(10_000)
    assert 10 * small < large
    assert trial(100) == small


def test_a_trial_leaves_model_and_gradients_as_they_were(tmp_path: Path) -> None:
    task = LineTask()
    model = nn.Sequential(task.build_model(), nn.BatchNorm1d(1)).eval()
    model(torch.ones(2, 4)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    Trial(line_run(tmp_path), task, model, CpuMeter())(20)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(after, gradients, strict=True))
    assert not model.training


def test_a_failed_trial_holds_no_memory(tmp_path: Path) -> None:
    task = LineTask(fail_above=10)
    meter = CpuMeter()
    plan = make_plan(
        request(tmp_path, batch_size=40, factor=1.0, dataset_size=SAMPLES),
        Trial(line_run(tmp_path), task, task.build_model(), meter),
        meter.capacity_bytes,
    )
    assert plan.tuned_limit == 10
    assert plan.micro_batches == (10, 10, 10, 10)


def test_a_session_draws_the_same_numbers_with_a_search_and_without(tmp_path: Path) -> None:
    class Dropping(LineTask):
        """Draws from the global generator, as dropout does."""

        def build_model(self) -> nn.Module:
            return nn.Sequential(super().build_model(), nn.Dropout(0.5))

    draws = []
    for name, training in (("searched", {}), ("fixed", {"micro_batch_size": 20})):
        parts = line_parts(tmp_path / name, Dropping(), batch_size=20, **training)
        session = make_session(replace(parts, reporter=Notices()), FACTOR)
        draws.append((torch.rand(3), [parameter.detach().clone() for parameter in session.model.parameters()]))
    assert torch.equal(draws[0][0], draws[1][0])
    assert all(torch.equal(one, other) for one, other in zip(draws[0][1], draws[1][1], strict=True))


def test_the_plan_of_the_first_attempt_is_kept(tmp_path: Path) -> None:
    first = make_session(line_parts(tmp_path), FACTOR).plan
    task = Watched()
    again = make_session(line_parts(tmp_path, task), FactorChoice(0.9, "learned since"))
    assert again.plan == first
    assert task.asked == []
