"""A task that is not the same in all epochs: its samples and losses are those of the epoch, wherever a run is taken up,
and what is said of its steps is true.
"""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import can_train.fit.epochs
from can_train.fit.epochs import kept_rows, planned_orders
from can_train.fit.run_plan import RunPlan
from can_train.runs.run_folder import RunFolder
from can_train.runs.status import read_progress
from can_train.task import Feature
from can_train.training import train as training_loop
from can_train.training.report import plan_summary
from can_train.training.session import Session
from can_train.training.train import make_session
from fakes.line_fit import SAMPLES, LineBatch, LineTask, fixed, line_parts, train_line
from fakes.several_ranks import run_ranks
from fakes.training_ranks import fit_line

HALF = fixed(0.5)
SETTINGS = {"batch_size": 20, "micro_batch_size": 10, "epochs": 4, "checkpoint_every": 3}
EPOCH_ROWS = (12, 28, 44, SAMPLES)
STEPS = (1, 2, 3, 3)


class GrowingTask(LineTask):
    """Sees ever more of its points, dropped at random, those of later epochs further from the line; sends this process
    a SIGTERM while it prepares training batch `stop`, counted from 1.
    """

    def __init__(self, *, stop: int = 0) -> None:
        super().__init__()
        self.stop = stop
        self.seen: list[tuple[int, list[int]]] = []
        self.validated = 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(super().build_model(), nn.Dropout(0.3))

    def in_epoch(self, epoch: int, epochs: int) -> "PointsOfEpoch":
        share = (epoch + 1) / epochs
        return PointsOfEpoch(self, epoch, np.arange(round((SAMPLES - 12) * max(0.0, (share - 0.25) / 0.75)) + 12))

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        self.validated += generator is None
        return super().logical_batch(rows, device, dtype, generator)


class PointsOfEpoch:
    """The points of one epoch."""

    def __init__(self, task: GrowingTask, epoch: int, rows: NDArray[np.int64]) -> None:
        self.task, self.epoch, self.train_rows = task, epoch, rows

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        assert generator is not None
        self.task.seen.append((self.epoch, rows.tolist()))
        if len(self.task.seen) == self.task.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return LineBatch((1 + self.epoch) * self.task._x[rows].to(device, dtype), self.task.fail_above)


def trained(folder: Path, task: LineTask, **training: Any) -> Session:
    return train_line(folder, task, **(SETTINGS | training))


def weights(session: Session) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()])


def losses(folder: Path) -> list[Any]:
    lines = next(folder.glob("runs/*/metrics.jsonl")).read_text().splitlines()
    names = ("step", "epoch", "lr", "train", "validation_loss")
    return [[record.get(name) for name in names] for record in map(json.loads, lines)]


def test_each_epoch_sees_its_own_samples_once_in_batches_of_its_own(tmp_path: Path) -> None:
    task = GrowingTask()
    trained(tmp_path, task)
    for epoch, count in enumerate(EPOCH_ROWS):
        batches = [rows for number, rows in task.seen if number == epoch]
        assert [len(rows) for rows in batches] == [20] * (count // 20) + [count % 20] * bool(count % 20)
        assert sorted(row for rows in batches for row in rows) == list(range(count))
    # The task itself validates, once an epoch with validation samples and once with training samples; the search and
    # the look for batch dependence come before.
    assert task.validated == 2 * 4


def test_the_schedule_of_the_learning_rate_is_as_long_as_the_epochs_together(tmp_path: Path) -> None:
    session = trained(tmp_path, GrowingTask(), scheduler="cosine", lr=0.1)
    assert session.progress.step == session.epochs.total_steps(4) == sum(STEPS)
    assert session.engine.optimization.lr == pytest.approx(0.0, abs=1e-12)
    assert session.engine.optimization.scheduler.last_epoch == sum(STEPS)


@pytest.mark.parametrize("step", range(1, sum(STEPS) + 1))
def test_a_run_stopped_in_an_epoch_of_any_length_goes_on_as_if_it_had_not_been(tmp_path: Path, step: int) -> None:
    whole = trained(tmp_path / "whole", GrowingTask())
    with pytest.raises(SystemExit):
        trained(tmp_path / "cut", GrowingTask(stop=step))
    task = GrowingTask()
    cut = trained(tmp_path / "cut", task)
    assert len(task.seen) == sum(STEPS) - step
    assert torch.equal(weights(cut), weights(whole))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_run_that_is_taken_up_in_another_epoch_ends_elsewhere(tmp_path: Path) -> None:
    class Forgetful(GrowingTask):
        """Begins again with the first epoch whenever it is made."""

        def in_epoch(self, epoch: int, epochs: int) -> PointsOfEpoch:
            points = super().in_epoch(epoch, epochs)
            points.epoch = 0
            return points

    whole = trained(tmp_path / "whole", GrowingTask())
    with pytest.raises(SystemExit):
        trained(tmp_path / "cut", GrowingTask(stop=5))
    assert not torch.equal(weights(trained(tmp_path / "cut", Forgetful())), weights(whole))


def test_samples_that_are_left_out_are_left_out_of_every_epoch(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, task := GrowingTask(), **SETTINGS)
    session = make_session(parts, HALF)
    plan = session.engine.run_plan.to_plain() | {"skipped": [3, 30]}
    parts.folder.plan_path.write_text(json.dumps(plan))
    again = make_session(parts, HALF)
    assert again.engine.run_plan == RunPlan.from_plain(plan)
    training_loop.train(again)
    seen = [sorted(row for number, rows in task.seen if number == epoch for row in rows) for epoch in range(4)]
    assert seen == [sorted(set(range(count)) - {3, 30}) for count in EPOCH_ROWS]
    assert again.progress.step == again.epochs.total_steps(4)


def test_preflight_splits_the_batches_of_each_epoch(tmp_path: Path) -> None:
    task = GrowingTask()
    session = trained(tmp_path, task, preflight_threshold=300)
    assert all(sum(row + 1 for row in rows) <= 300 for _, rows in task.seen)
    assert session.progress.step == session.epochs.total_steps(4) == len(task.seen) > sum(STEPS)


def test_max_leaves_enough_steps_in_the_smallest_epoch(tmp_path: Path) -> None:
    changed = {"epochs": 4, "min_steps_per_epoch": 3, "find_batch_size": "max", "lr_batch_size": 2}
    parts = line_parts(tmp_path, GrowingTask(), **changed)
    plan = make_session(parts, HALF).engine.run_plan.phase_plan
    assert (plan.logical_batch, plan.binding_limit) == (4, "min_steps")
    assert (plan.fewest_steps_per_epoch, plan.steps_per_epoch) == (3, 15)


def test_a_batch_that_was_asked_for_is_not_cut_down_to_the_smallest_epoch(tmp_path: Path) -> None:
    plan = make_session(
        line_parts(tmp_path, GrowingTask(), **SETTINGS | {"batch_size": 50}), HALF
    ).engine.run_plan.phase_plan
    assert (plan.logical_batch, plan.binding_limit) == (50, "requested")
    assert (plan.fewest_steps_per_epoch, plan.steps_per_epoch) == (1, 2)


def test_a_plan_says_how_many_steps_its_epochs_have(tmp_path: Path) -> None:
    session = trained(tmp_path, GrowingTask())
    plan, *_ = plan_summary(session.engine.run_plan, "cpu", 2**30)
    assert "20 samples a step (as asked for), 1 to 3 steps an epoch" in plan
    assert any(
        "The shortest epoch has only 1 optimizer step" in notice
        for notice in session.engine.run_plan.phase_plan.notices
    )
    (folder,) = (tmp_path / "runs").iterdir()
    progress = read_progress(RunFolder(folder), None)
    assert (progress.step, progress.steps) == (sum(STEPS), sum(STEPS))


def test_a_plan_looks_at_the_last_epoch_and_at_the_first() -> None:
    last, first = planned_orders(GrowingTask(), (3,), seed=0, epochs=4)
    assert sorted(last.tolist()) == [0, 1, 2, *range(4, SAMPLES)]
    assert sorted(first.tolist()) == [0, 1, 2, *range(4, 12)]


def test_a_plan_looks_at_all_epochs_up_to_a_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    task = LineTask()
    orders = [order.tolist() for order in planned_orders(task, (3,), seed=5, epochs=4)]
    rows = kept_rows(task, (3,))
    assert orders == [task.epoch_order(rows, seed=5, epoch=epoch).tolist() for epoch in range(4)]
    monkeypatch.setattr(can_train.fit.epochs, "_OTHER_ROWS", 2 * len(rows) + 1)
    assert len(list(planned_orders(task, (3,), seed=5, epochs=4))) == 3
    monkeypatch.setattr(task, "in_order", True, raising=False)
    assert len(list(planned_orders(task, (3,), seed=5, epochs=4))) == 1


class HeavyAtFirst(GrowingTask):
    """Points of which the twelve of the first epoch take 1 MiB each, and those that come later a sixteenth."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_features = (Feature("units"),)

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.where(rows < EPOCH_ROWS[0], 16.0, 1.0)[:, None]

    def logical_batch(self, rows: NDArray[np.int64], *given: Any) -> Any:
        units, points = self.batch_features(rows)[:, 0], super().logical_batch(rows, *given)

        def losses(model: nn.Module, start: int, stop: int) -> Any:
            held = torch.ones(int(units[start:stop].sum()) * 2**14, requires_grad=True)
            total, denominator = points.losses(model, start, stop)["error"]
            return {"error": (total + 0 * held.square().sum(), denominator)}

        return SimpleNamespace(denominators=points.denominators, losses=losses)


def test_a_plan_is_for_the_costliest_micro_batch_of_the_first_epoch_too(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, HeavyAtFirst(), epochs=4, batch_size=12, find_batch_size="opt")
    session = make_session(parts, fixed(1.0))
    plan = session.engine.run_plan
    costs = [
        [plan.training_costs(session.task, rows).cost(0, len(rows)) for rows in session.epochs.steps(epoch)]
        for epoch in (0, 3)
    ]
    assert session.engine.run_plan.phase_plan.largest_cost == pytest.approx(costs[0][0])
    assert costs[0][0] > 1.5 * max(costs[1])


@pytest.mark.slow
def test_several_ranks_train_ever_more_samples_as_one_process_does(tmp_path: Path) -> None:
    settings = {**SETTINGS, "precision": "fp64", "scheduler": "cosine", "growing": True}
    ends = []
    for ranks in (1, 3):
        (folder := tmp_path / str(ranks)).mkdir()
        assert run_ranks(ranks, fit_line, folder, **settings) == [0] * ranks
        ends.append(torch.load(folder / f"rank-{ranks - 1}.pt"))
    assert ends[0]["step"] == ends[1]["step"] == 1 + 2 + 3 + 3
    alone, several = (end["weights"] for end in ends)
    assert (several - alone).norm() <= 1e-10 * alone.norm()


def test_what_a_task_has_to_say_is_said_with_the_plan(tmp_path: Path) -> None:
    task = GrowingTask()
    task.notices = lambda: ("points are few",)  # type: ignore[method-assign]
    assert "points are few" in make_session(line_parts(tmp_path, task), HALF).engine.run_plan.notices
