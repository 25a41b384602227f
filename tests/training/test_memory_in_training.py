"""What memory asks of a training on a simulated GPU: other parameters, a full cache, a leak, a huge sample."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DoesNotFitError
from can_train.factors.exchange import run_notes
from can_train.factors.observations import Observation, read_records
from can_train.factors.summary import history_of, summarize
from can_train.memory.meters import SimulatedMeter
from can_train.memory.monitor import RISES, WINDOW_STEPS
from can_train.memory.simulated.allocator import EXPANDABLE
from can_train.task import Feature
from can_train.training import train as training_loop
from can_train.training.attempt_record import recording_observation
from can_train.training.session import Session
from can_train.training.train import make_session, take_step
from fakes.costly import CostlyNet
from fakes.line_fit import SAMPLES, LineBatch, LineTask, Notices, fixed, line_parts

MIB = 2**20
FACTOR = fixed(0.9)


class CostlyTask(LineTask):
    """Points that take 2 MiB each, and some of them more than a search was told."""

    def __init__(self, surprises: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self.memory_features = (Feature("points"),)
        self.surprises = surprises or {}
        self.thaws_at = 10**9
        self.session: Session | None = None
        self.kept: list[Tensor] | None = None

    def build_model(self) -> nn.Module:
        return CostlyNet()

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.ones((len(rows), 1))

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        if self.kept is not None:
            self.kept.append(torch.zeros(MIB // 4))
        return CostlyBatch(self, rows, self._x[rows].to(device, dtype))


class CostlyBatch(LineBatch):
    """Some points."""

    def __init__(self, task: CostlyTask, rows: NDArray[np.int64], x: Tensor) -> None:
        super().__init__(x, 10**9)
        self.task, self.rows = task, rows

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        x, rows = self._x[start:stop], self.rows[start:stop]
        # Surprises come once the search is over.
        more = sum(self.task.surprises.get(int(row), 0) for row in rows) if self.task.session else 0
        error = (model(x, (len(rows) + more) * MIB) - 3 * x[:, :1]).square().sum()
        return {"error": (error, float(stop - start))}


class BufferedTask(CostlyTask):
    """Points beside 8 MiB of buffers."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("memory", torch.zeros(2 * MIB, dtype=torch.float32))
        return model


class HeavyNet(CostlyNet):
    """A net with 8 MiB of weights more."""

    def __init__(self) -> None:
        super().__init__()
        self.heavy = nn.Parameter(torch.zeros(2 * MIB))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        out: Tensor = super().forward(x, *more) + self.heavy.mean()
        return out


class HeavyTask(CostlyTask):
    """Points for that net."""

    def build_model(self) -> nn.Module:
        return HeavyNet()


def gpu(capacity_mib: int) -> SimulatedMeter:
    return SimulatedMeter(capacity_mib * MIB, settings=EXPANDABLE)


def session_on(folder: Path, task: CostlyTask, capacity_mib: int, **training: Any) -> Session:
    parts = replace(line_parts(folder, task, **({"batch_size": 30} | training)), meter=gpu(capacity_mib))
    with parts.meter.active():
        session = make_session(parts, FACTOR)
    task.session = session
    return session


def train(session: Session) -> None:
    assert isinstance(session.meter, SimulatedMeter)
    with session.meter.active():
        training_loop.train(session)


def notices(session: Session) -> str:
    assert isinstance(session.reporter, Notices)
    return "\n".join(session.reporter.texts)


def test_a_batch_that_fits_where_no_gradients_are_yet_is_computed_at_once(tmp_path: Path) -> None:
    session = session_on(tmp_path, HeavyTask(), 108, epochs=1)
    plan = session.engine.run_plan.phase_plan
    # Beside the gradients of a part before it, a micro-batch may have no more.
    assert plan.rules.safe_limit < plan.largest_cost == pytest.approx(60 * MIB)
    train(session)
    batcher, peak = session.engine.batcher, session.engine.monitor.peak_bytes
    assert (plan.most_parts, batcher.ooms_rescued) == (1, 0)
    assert session.engine.run_plan.predicted_peak_bytes == pytest.approx(peak, rel=1e-3)
    assert "is more than fits" not in notices(session)


def test_a_sample_that_does_not_fit_is_named_after_a_checkpoint(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask({17: 400}), 200, epochs=1, oom_retries=0)
    with pytest.raises(DoesNotFitError, match=r"Memory ran out.*point 17; sample \d+ of the batch"):
        train(session)
    saved = session.checkpoints.load(session.reporter)
    assert saved is not None
    assert saved["progress"]["step"] == session.progress.step < 2


def observed(folder: Path, surprise: int, **training: Any) -> Observation:
    """Trains as a run does on 200 MiB, where one sample takes more than a search was told; returns what it leaves."""
    task = CostlyTask({17: surprise})
    parts = replace(line_parts(folder, task, batch_size=30, epochs=1, **training), meter=gpu(200))
    with parts.meter.active():
        session = task.session = make_session(parts, FACTOR)
        with suppress(DoesNotFitError), recording_observation(session):
            training_loop.train(session)
    (observation,) = read_records(folder / "state").finished
    return observation


@pytest.mark.parametrize("find_batch_size", ["opt", "off"])
@pytest.mark.parametrize("training", [{"adaptive_micro_batch": False}, {"oom_retries": 0}], ids=["off", "in vain"])
def test_an_out_of_memory_that_ends_a_run_counts_and_is_not_noted_as_rescued(
    tmp_path: Path, training: dict[str, Any], find_batch_size: str
) -> None:
    run = observed(tmp_path, 400, find_batch_size=find_batch_size, **training)
    assert (run.outcome, run_notes(run)) == ("oom", "out of memory")
    assert summarize([run])[0].ooms == 1


@pytest.mark.parametrize("find_batch_size", ["opt", "off"])
def test_an_out_of_memory_that_a_run_survives_counts_and_is_noted(tmp_path: Path, find_batch_size: str) -> None:
    run = observed(tmp_path, 70, find_batch_size=find_batch_size)
    assert (run.outcome, run_notes(run)) == ("rescued", "1 out-of-memory rescued")
    assert summarize([run])[0].ooms == 1


def test_an_out_of_memory_without_a_tuned_limit_is_counted_and_teaches_nothing(tmp_path: Path) -> None:
    (record,) = summarize([observed(tmp_path, 400, find_batch_size="off", adaptive_micro_batch=False)])
    assert (record.ooms, record.state) == (1, "first")


@pytest.mark.parametrize(("capacity_mib", "whole"), [(200, True), (70, False)], ids=["whole", "in parts"])
def test_a_plan_counts_the_copies_of_buffers_that_a_step_holds(tmp_path: Path, capacity_mib: int, whole: bool) -> None:
    session = session_on(tmp_path, BufferedTask(), capacity_mib)
    assert (session.engine.run_plan.phase_plan.most_parts == 1) == whole
    train(session)
    predicted = session.engine.run_plan.predicted_peak_bytes
    assert predicted is not None
    assert session.monitor.peak_bytes == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("capacity_mib", [1000, 70])
def test_the_first_step_takes_no_more_than_the_plan_says(tmp_path: Path, capacity_mib: int) -> None:
    """It makes the optimizer's state, whose place was held until then."""
    session = session_on(tmp_path, HeavyTask(), capacity_mib, batch_size=5, epochs=1)
    train(session)
    predicted = session.engine.run_plan.predicted_peak_bytes
    assert predicted is not None
    assert session.monitor.peak_bytes == pytest.approx(predicted, rel=0.03)


def test_a_surprise_is_rescued_said_and_logged(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask({17: 70}), 200, epochs=1)
    assert session.engine.run_plan.phase_plan.most_parts == 1
    train(session)
    assert "memory ran out once; finished in 2 micro-batches, with the same gradient" in notices(session)
    assert session.engine.batcher.ooms_rescued == 1


def test_other_parameters_make_another_plan_and_take_stale_state_along(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask(), 60, epochs=1)
    split = session.engine.run_plan.phase_plan.most_parts
    assert split > 1
    train(session)
    frozen = [session.model.inner.weight, session.model.inner.bias]
    for parameter in frozen:
        parameter.requires_grad_(False)
    again(session)
    assert session.engine.run_plan.phase_plan.most_parts == 1
    assert session.engine.run_plan.phase_plan.logical_batch == 30
    assert not any(parameter in session.engine.optimization.optimizer.state for parameter in frozen)
    assert session.model.outer.weight in session.engine.optimization.optimizer.state
    for parameter in frozen:
        parameter.requires_grad_(True)
    again(session)
    assert session.engine.run_plan.phase_plan.most_parts == split
    assert all(parameter in session.engine.optimization.optimizer.state for parameter in frozen)


class ThawingTask(CostlyTask):
    """Points whose inner layer, and with it all that takes memory, is frozen until the third step."""

    def build_model(self) -> nn.Module:
        model = CostlyNet()
        model.inner.requires_grad_(False)
        return model

    def before_step(
        self, model: nn.Module, rows: NDArray[np.int64], progress: float, generator: torch.Generator
    ) -> None:
        if progress >= 0.5:
            assert isinstance(model, CostlyNet)
            model.inner.requires_grad_(True)


def test_a_step_that_thaws_a_layer_is_planned_for_it_and_has_room_for_its_optimizer_state(tmp_path: Path) -> None:
    session = session_on(tmp_path, ThawingTask(), 60, epochs=2)
    reserved: list[int] = []
    before_step = session.engine.reserve.before_step

    def noted() -> None:
        reserved.append(len(session.engine.reserve._tensor_bytes))
        before_step()

    session.engine.reserve.before_step = noted  # type: ignore[method-assign]
    assert session.engine.run_plan.phase_plan.most_parts == 1
    train(session)
    assert session.engine.run_plan.phase_plan.most_parts > 1
    assert session.engine.batcher.ooms_rescued == 0
    assert reserved == [2, 2, 4, 4]


def test_a_run_that_is_resumed_after_a_layer_was_thawed_is_planned_for_it(tmp_path: Path) -> None:
    whole = session_on(tmp_path / "whole", ThawingTask(), 60, epochs=3)
    train(whole)
    stopped = session_on(tmp_path / "stopped", ThawingTask(), 60, epochs=3)
    stops = stopped.stops

    def stop(*given: Any) -> None:
        if stopped.progress.step == 4:
            stops.received = 15

    stopped.task.before_step = stop_after(stopped.task.before_step, stop)  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        train(stopped)
    resumed = session_on(tmp_path / "stopped", ThawingTask(), 60, epochs=3)
    assert resumed.model.inner.weight.requires_grad
    train(resumed)
    assert resumed.engine.run_plan.phase_plan.most_parts == whole.engine.run_plan.phase_plan.most_parts > 1
    assert resumed.engine.batcher.ooms_rescued == 0
    assert all(torch.equal(*pair) for pair in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def stop_after(call: Any, stop: Any) -> Any:
    def both(*given: Any) -> None:
        call(*given)
        stop()

    return both


def again(session: Session) -> None:
    """Trains one more epoch."""
    session.progress.trained = False
    session.progress.epoch = 0
    train(session)


@pytest.mark.parametrize(
    ("training", "released"),
    [
        ({"cuda_empty_cache_interval": 0}, False),
        ({"cuda_empty_cache_interval": 2}, True),
        ({"cuda_empty_cache_interval": 0, "cuda_empty_cache_threshold_mib": 195}, True),
        ({"cuda_empty_cache_interval": 0, "cuda_empty_cache_threshold_mib": 5}, False),
    ],
)
def test_the_cache_is_released_in_time_and_where_little_is_free(
    tmp_path: Path, training: dict[str, Any], released: bool
) -> None:
    session = session_on(tmp_path, CostlyTask(), 200, epochs=1, **training)
    free: list[int] = []
    stepped = session.engine.batcher.stepped

    def noted() -> None:
        free.append(session.meter.free_bytes())
        stepped()

    session.engine.batcher.stepped = noted  # type: ignore[method-assign]
    train(session)
    after = session.meter.free_bytes()
    assert free[-1] < 190 * MIB
    assert (after > 190 * MIB) is released


def test_a_leak_is_said_once(tmp_path: Path) -> None:
    task = CostlyTask()
    steps = WINDOW_STEPS * (RISES + 2)
    session = session_on(tmp_path, task, 4000, batch_size=1, find_batch_size="off", epochs=-(-steps // SAMPLES))
    task.kept = []
    train(session)
    assert notices(session).count("has risen by") == 1
    assert "something keeps tensors from step to step" in notices(session)


def test_an_out_of_memory_by_a_leak_names_it_first_and_says_nothing_of_micro_batches(tmp_path: Path) -> None:
    task = CostlyTask()
    session = session_on(tmp_path, task, 100, epochs=60, oom_retries=0)
    assert session.engine.run_plan.phase_plan.most_parts == 1
    task.kept = []
    with (
        pytest.raises(
            DoesNotFitError, match=r"Something holds memory .* that no plan counts: \d+\.\d MiB of 100"
        ) as died,
        session.meter.active(),
        recording_observation(session),
    ):
        training_loop.train(session)
    error = died.value
    assert "more with each step since step 0; memory ran out" in error.value
    assert error.remedy.startswith("Look for tensors that outlive their step")
    assert error.details.held_bytes > 30 * MIB
    assert error.details.should_fit
    (observation,) = read_records(tmp_path / "state").finished
    assert observation.leaked_bytes == error.details.held_bytes
    assert not observation.teaches_out_of_memory
    assert history_of([observation]) == []
    task.session, task.kept = None, None
    resumed = session_on(tmp_path, task, 100, epochs=60, oom_retries=0)
    assert resumed.progress.step > 0
    assert resumed.engine.batcher.is_undisturbed


def test_state_that_an_optimizer_makes_step_by_step_is_no_leak(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask(), 200, epochs=1)
    for step in range(40):
        session.leak_watch.after_step(step * 2 * MIB)
    held = session.leak.held_bytes
    assert held > 70 * MIB
    with session.meter.active():
        session.engine.optimization.optimizer.state[session.model.inner.weight] = {"past": torch.zeros(15 * MIB)}
        assert session.leak.held_bytes == 0


def test_a_training_that_keeps_nothing_is_no_leak(tmp_path: Path) -> None:
    steps = WINDOW_STEPS * (RISES + 2)
    session = session_on(tmp_path, CostlyTask(), 4000, batch_size=1, find_batch_size="off", epochs=-(-steps // SAMPLES))
    train(session)
    assert "has risen by" not in notices(session)


def test_validation_runs_out_of_memory_and_goes_on(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask(), 200, epochs=1)
    fails = iter([True, False, False, False, False])
    forward = session.model.forward

    def failing(x: Tensor, num_bytes: int) -> Tensor:
        if not session.model.training and next(fails, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return forward(x, num_bytes)

    session.model.forward = failing
    train(session)
    assert session.engine.batcher.ooms_rescued == 1
    assert session.progress.best_loss < float("inf")


def test_the_last_batch_of_an_epoch_weighs_what_it_is(tmp_path: Path) -> None:
    """60 points in batches of 25: the last 10 are a mean over 10, not over 25."""
    session = session_on(tmp_path, CostlyTask(), 100, batch_size=25, epochs=1, optimizer="sgd", weight_decay=0.0)
    seen: list[float] = []
    step = session.engine.optimization.step

    def noted(*position: int) -> bool:
        rows = session.epochs.steps(0)[session.progress.step_in_epoch]
        accumulated = torch.cat([p.grad.flatten() for p in session.model.parameters() if p.grad is not None]).clone()
        assert isinstance(session.task, CostlyTask)
        x = session.task._x[rows].to(torch.float32)
        loss = (session.model(x, 0) - 3 * x[:, :1]).square().mean()
        whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(session.model.parameters()))])
        seen.append(float((accumulated - whole).norm() / whole.norm()))
        return step(*position)

    session.engine.optimization.step = noted  # type: ignore[method-assign]
    train(session)
    assert len(seen) == 3
    assert max(seen) <= 1e-5


def test_after_a_rescue_peak_and_cost_of_what_followed_are_known_apart(tmp_path: Path) -> None:
    task = CostlyTask({17: 70})
    session = session_on(tmp_path, task, 200, epochs=1)

    def pass_over() -> None:
        task.surprises = {}
        session.record_rescue()

    session.engine.batcher.watch(pass_over)
    train(session)
    costs = session.engine.run_plan.training_costs(task, session.epochs.steps(0)[0])
    assert session.engine.batcher.oom_cost == pytest.approx(costs.cost(0, len(costs)))
    assert session.fullest.cost_after_rescue == pytest.approx(session.engine.batcher.oom_cost / 2)
    assert session.fullest.peak_bytes_after_rescue < 50 * MIB
    # What failed had half of the 2 × 100 MiB that it wanted.
    assert session.monitor.peak_bytes >= 100 * MIB


def test_without_a_rescue_all_that_ran_is_settled(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask(), 200, epochs=1)
    train(session)
    assert session.engine.batcher.oom_cost is None
    assert session.fullest.cost_after_rescue == session.fullest.largest_cost > 0
    assert session.fullest.peak_bytes_after_rescue == session.monitor.peak_bytes


def test_where_nothing_ran_after_memory_ran_out_nothing_is_settled(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask({17: 400}), 200, batch_size=1, epochs=1, oom_retries=0)
    with pytest.raises(DoesNotFitError, match="point 17"):
        train(session)
    assert session.fullest.largest_cost > 0
    assert (session.fullest.cost_after_rescue, session.fullest.peak_bytes_after_rescue) == (0, 0)
    assert session.monitor.peak_bytes >= 2 * MIB


def test_the_peak_of_a_training_outlasts_the_probes_for_other_parameters(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask(), 100, epochs=1)
    rows = session.epochs.steps(0)
    with session.meter.active():
        take_step(session, rows[0], ends_epoch=False)
        for parameter in session.model.inner.parameters():
            parameter.requires_grad_(False)
        take_step(session, rows[1], ends_epoch=True)
    # 30 points of 2 MiB, and then nothing.
    assert session.monitor.peak_bytes >= 60 * MIB
    assert session.fullest.peak_bytes_after_rescue == session.monitor.peak_bytes


def test_what_follows_the_training_is_not_in_its_peak(tmp_path: Path) -> None:
    session = session_on(tmp_path, CostlyTask(), 200, epochs=1)
    train(session)
    peak = session.monitor.peak_bytes
    with session.meter.active():
        torch.empty(150 * MIB, dtype=torch.uint8)
    assert session.monitor.peak_bytes == peak < 100 * MIB


class FullTask(LineTask):
    """Runs out of memory when it is judged."""

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def test_memory_that_runs_out_in_the_judgement_leaves_a_complete_training_which_is_said(tmp_path: Path) -> None:
    parts = replace(line_parts(tmp_path, FullTask(), epochs=1, oom_retries=0), meter=SimulatedMeter(64 * MIB))
    with pytest.raises(DoesNotFitError, match=r"Training is complete.* can-train resume .* --device cpu") as raised:
        training_loop._train_and_judge(parts)
    # No training step explains it.
    assert raised.value.details.in_evaluation
    assert not raised.value.parts
