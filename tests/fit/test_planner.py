"""Plans of a line: exploring leaves nothing behind, and the plan says what decided."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit.cost_model import SearchResult
from can_train.fit.epochs import kept_rows
from can_train.fit.explore import Explorer, ProbeBounds, Search, SearchTime, fit_by_probes
from can_train.fit.factor_rule import EarlierSearch, FactorRule, RememberedLimit, RememberedLimits
from can_train.fit.packing import BatchCosts
from can_train.fit.planner import Planner, on_no_rung, plan_request
from can_train.fit.run_plan import RunPlan, still_fits
from can_train.fit.rungs import ModuleCost, Rung
from can_train.fit.search import Peak, SearchBounds, find_phase_limit, pack_worst_case
from can_train.memory.meters import CpuMeter, open_meter
from can_train.task import Feature
from can_train.training.report import detail_lines, plan_summary
from can_train.training.train import make_session
from fakes.line_fit import SAMPLES, LineBatch, LineTask, Notices, fixed, line_parts, line_run

MIB = 2**20
UNIT = MIB // 8
"""Memory of the smallest sample: as little as still hides what the model takes."""
FACTOR = fixed(0.5)


class UnevenMemoryBatch(LineBatch):
    """Takes so many bytes of activations for each unit of its samples' positions."""

    def __init__(self, x: Tensor, units: NDArray[np.float64], unit: int) -> None:
        super().__init__(x, 10**9)
        self._units, self._unit = units, unit

    def losses(self, model: nn.Module, start: int, stop: int) -> Any:
        held = torch.ones(int(self._units[start:stop].sum()) * self._unit // 4, requires_grad=True)
        terms = super().losses(model, start, stop)
        total, denominator = terms["error"]
        return {"error": (total + 0 * held.square().sum(), denominator)}


class UnevenMemoryTask(LineTask):
    """Points of which number r takes 1 + r % 5 units of memory, or more where it says so."""

    def __init__(self, *, largest: int = 5, unit: int = UNIT) -> None:
        super().__init__()
        self._unit = unit
        self.memory_features = (Feature("units"),)
        self._units = 1.0 + np.arange(SAMPLES + 10) % 5
        self._units[7] = largest
        self.asked: list[list[int]] = []

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._units[rows, None]

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> UnevenMemoryBatch:
        self.asked.append(rows.tolist())
        return UnevenMemoryBatch(self._x[rows].to(device, dtype), self._units[rows], self._unit)


def planned(folder: Path, task: LineTask, capacity_units: float, **training: Any) -> tuple[RunPlan, Notices]:
    meter, reporter = CpuMeter(), Notices()
    meter.capacity_bytes = int(capacity_units * UNIT)
    run = line_run(folder, **training)
    planner = Planner(run=run, task=task, model=task.build_model(), meter=meter, reporter=reporter)
    return planner.make(FACTOR), reporter


def test_the_memory_on_further_rungs_is_told_as_a_rough_figure() -> None:
    def error(need_mib: int) -> DoesNotFitError:
        return DoesNotFitError("A sample must fit", value=f"{need_mib}", remedy="Take less",
                               details=OutOfMemoryDetails(need_bytes=need_mib * 2**20))  # fmt: skip

    first = on_no_rung({Rung(): error(6), Rung(recompute=("net",)): error(4)})
    assert first.value == "6; about 4.0 MiB with --fit recompute"


def test_the_law_of_the_memory_is_found_and_the_limit_tried(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, UnevenMemoryTask(), 100, batch_size=60)
    assert plan.limits is not None
    training = plan.limits.training
    # At the end of the backward pass: a unit itself, its gradient, and two factors of the square's.
    assert training.model.coefficients[0] == pytest.approx(4 * UNIT, rel=1e-3)
    assert 0.9 * 100 * UNIT <= training.peak_bytes(training.tuned_limit) <= 100 * UNIT
    assert training.trials <= 6
    assert training.measured_ratio == pytest.approx(1.0, abs=0.01)


def test_a_plan_says_what_there_is_to_know_of_its_device(tmp_path: Path) -> None:
    task, meter = UnevenMemoryTask(), CpuMeter()
    meter.notices = ("The simulated GPU leaves something out",)
    planner = Planner(run=line_run(tmp_path), task=task, model=task.build_model(), meter=meter, reporter=Notices())
    assert planner.make(FACTOR).notices[0] == meter.notices[0]


@pytest.mark.parametrize(
    ("training", "batch", "binding"),
    [
        ({"find_batch_size": "max", "min_steps_per_epoch": 2, "lr_batch_size": 2}, range(3, 9), "memory"),
        ({"find_batch_size": "max", "min_steps_per_epoch": 30, "lr_batch_size": 1}, [2], "min_steps"),
        ({"find_batch_size": "max", "min_steps_per_epoch": 30, "lr_batch_size": 3}, [3], "preset"),
        ({"batch_size": 20}, [20], "requested"),
        ({"lr_batch_size": 20}, [20], "preset"),
        ({"batch_size": 10, "gradient_accumulation_steps": 3}, [30], "requested"),
        ({"batch_size": 100}, [60], "dataset"),
    ],
)
def test_the_plan_names_the_limit_that_decided(tmp_path: Path, training: Any, batch: Any, binding: str) -> None:
    plan, _ = planned(tmp_path, UnevenMemoryTask(), 150, **training)
    assert plan.phase_plan.logical_batch in batch
    assert plan.phase_plan.binding_limit == binding
    assert plan.phase_plan.largest_cost <= plan.phase_plan.rules.safe_limit


def test_a_planner_that_is_made_from_another_measures_modules_anew(tmp_path: Path) -> None:
    task, meter = LineTask(), CpuMeter()
    planner = Planner(run=line_run(tmp_path), task=task, model=task.build_model(), meter=meter, reporter=Notices())
    planner._measured["layer"] = ModuleCost(name="layer", saved_bytes=1, seconds=1.0)
    # Another phase has another loss.
    assert not replace(planner, state_leaves=True)._measured


@pytest.mark.parametrize("batch", [1, 60])
def test_evaluation_takes_no_more_memory_than_a_step(tmp_path: Path, batch: int) -> None:
    plan, _ = planned(tmp_path, UnevenMemoryTask(), 400, batch_size=batch)
    assert plan.limits is not None
    assert plan.predicted_peak_bytes is not None
    cost, evaluation = plan.evaluation_limit.cost, plan.limits.evaluation
    assert 0 < cost <= FACTOR.provisional * evaluation.tuned_limit
    assert evaluation.peak_bytes(cost) <= plan.predicted_peak_bytes * 1.000001


@pytest.mark.parametrize("training", [{"find_batch_size": "off", "batch_size": 30}, {"micro_batch_size": 8}])
def test_a_plan_that_needs_no_limit_tries_nothing_but_the_batch_dependence(
    tmp_path: Path, training: dict[str, Any]
) -> None:
    task = UnevenMemoryTask()
    assert planned(tmp_path, task, 100, **training)[0].limits is None
    assert [len(rows) for rows in task.asked] == [8]


def test_oversize_samples_are_named_with_need_and_cards(tmp_path: Path) -> None:
    with pytest.raises(
        DoesNotFitError, match=r"1 of 60 do not: point 7; they need .* of 12\.5 MiB\.\n.*--oversize skip.*cards"
    ):
        planned(tmp_path, UnevenMemoryTask(largest=64), 100)


class SquareMemoryTask(UnevenMemoryTask):
    """Takes memory for the square of its units, which the features do not say."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> UnevenMemoryBatch:
        return UnevenMemoryBatch(self._x[rows].to(device, dtype), self._units[rows] ** 2, self._unit)


def test_the_need_of_an_oversize_sample_is_measured_where_features_do_not_explain_it(tmp_path: Path) -> None:
    # 196 units, each of them four times, which a line through the squares of 1 to 5 does not reach.
    with pytest.raises(DoesNotFitError, match=r"point 7; they need up to 98\.0 MiB of 25\.0 MiB\.\n") as raised:
        planned(tmp_path, SquareMemoryTask(largest=14), 200)
    assert raised.value.details.need_bytes == pytest.approx(98 * MIB, rel=0.01)
    assert "pages" not in str(raised.value)


def test_the_need_of_an_oversize_sample_that_cannot_be_measured_is_more_than_the_device_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Explorer, "peak_on_host", lambda explorer, row: None)
    with pytest.raises(DoesNotFitError, match=r"point 7; they need more than the 25\.0 MiB of the device\.\n"):
        planned(tmp_path, SquareMemoryTask(largest=14), 200)


class JudgedTask(UnevenMemoryTask):
    """Its last points are no validation samples, and are judged."""

    def __init__(self, units: dict[int, int], *, is_square: bool = False) -> None:
        super().__init__()
        self.validation_rows, self.is_square = np.arange(SAMPLES, SAMPLES + 8), is_square
        for row, number in units.items():
            self._units[row] = number

    @property
    def tested_rows(self) -> NDArray[np.int64]:
        return np.arange(SAMPLES + 8, SAMPLES + 10)

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> UnevenMemoryBatch:
        batch = super().logical_batch(rows, device, dtype, generator)
        batch._units = batch._units ** (2 if self.is_square else 1)
        return batch


def evaluated(folder: Path, task: JudgedTask, *, verify: bool) -> RunPlan:
    meter = CpuMeter()
    meter.capacity_bytes = 200 * UNIT
    planner = Planner(run=line_run(folder), task=task, model=task.build_model(), meter=meter, reporter=Notices(),
                      verify=verify)  # fmt: skip
    return planner.make(FACTOR)


@pytest.mark.parametrize("verify", [True, False], ids=["tried", "predicted"])
@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({63: 150}, r"Every validation sample .* 1 of 8 do not: point 63; they need up to 37\.5 MiB of 25\.0 MiB"),
        ({61: 150, 62: 170, 67: 160}, r"Every validation .* 3 of 8 do not: point 62, point 67, point 61; they need"),
    ],
)
def test_evaluated_samples_that_do_not_fit_are_named_before_training(
    tmp_path: Path, units: dict[int, int], message: str, verify: bool
) -> None:
    with pytest.raises(DoesNotFitError, match=message) as raised:
        evaluated(tmp_path, JudgedTask(units), verify=verify)
    assert raised.value.details.in_evaluation
    assert "Take a device that holds them" in str(raised.value)
    assert "oversize" not in str(raised.value)


@pytest.mark.parametrize("verify", [True, False], ids=["tried", "predicted"])
def test_a_test_sample_that_does_not_fit_is_a_notice_of_a_plan_that_trains(tmp_path: Path, verify: bool) -> None:
    assert evaluated(tmp_path, JudgedTask({68: 150}), verify=verify).notices[-1] == (
        "Every test sample must fit on the device by itself, and 1 of 2 do not: point 68; they need up to 37.5 MiB of "
        "25.0 MiB. The run is trained all the same; can-train resume RUN --device cpu then judges it"
    )


def test_the_need_of_a_test_sample_far_beyond_all_measured_sizes_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line predicts 1 GiB of 4,096 units; they do not take it."""
    monkeypatch.setattr(Explorer, "peak_on_host", lambda explorer, row, **how: 40 * MIB)
    notice = evaluated(tmp_path, JudgedTask({68: 4096}), verify=True).notices[-1]
    assert "point 68; they need up to 40.0 MiB of 25.0 MiB" in notice


@pytest.mark.parametrize("verify", [True, False], ids=["tried", "measured"])
def test_evaluated_samples_are_named_where_features_do_not_explain_their_memory(tmp_path: Path, verify: bool) -> None:
    with pytest.raises(DoesNotFitError, match=r"1 of 8 do not: point 63; they need up to 49\.0 MiB of 25\.0 MiB"):
        evaluated(tmp_path, JudgedTask({63: 14, 64: 8}, is_square=True), verify=verify)


def test_a_sample_of_an_evaluation_that_costs_more_than_any_training_sample_is_tried(tmp_path: Path) -> None:
    task = JudgedTask({63: 40, 68: 40})
    assert evaluated(tmp_path, task, verify=True).limits is not None
    assert task.asked[-2:] == [[63], [68]]


def test_of_the_first_samples_that_stand_for_a_stream_those_that_do_not_fit_are_named_once(tmp_path: Path) -> None:
    task = UnevenMemoryTask(largest=64)
    task.in_order, task.train_rows = True, np.resize(task.train_rows, 3 * len(task.train_rows))
    with pytest.raises(
        DoesNotFitError,
        match=r"1 of 60 do not: point 7; they need up to 32\.0 MiB of 12\.5 MiB\.\nLeave them out in the str",
    ):
        planned(tmp_path, task, 100, find_batch_size="max")


def test_oversize_samples_are_skipped_where_asked_and_counted(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, UnevenMemoryTask(largest=64), 100, oversize="skip", batch_size=20)
    assert plan.skipped == (7,)
    assert 7 not in kept_rows(LineTask(), plan.skipped)
    assert "oversize=skip leaves 1 of 60 training samples out" in plan.notices


def test_a_device_that_holds_no_sample_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="At least one training sample must fit"):
        planned(tmp_path, UnevenMemoryTask(), 1.5)


def test_a_task_that_lies_about_its_memory_is_told(tmp_path: Path) -> None:
    class Lying(UnevenMemoryTask):
        def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
            return np.ones((len(rows), 1))

    plan, _ = planned(tmp_path, Lying(), 200, batch_size=60)
    assert any("does not follow its features (units)" in notice for notice in plan.notices)


def test_a_hidden_allocation_is_noticed_by_the_verification() -> None:
    order = BatchCosts.of_samples(np.full(1000, 1.0))
    counts = np.ones((1000, 1))

    def law(positions: NDArray[np.int64]) -> int:
        return MIB + len(positions) * 1000

    probed = fit_by_probes(law, (Feature("samples"),), counts, ProbeBounds(capacity_bytes=10 * MIB))
    costs = BatchCosts(counts, probed.model.features, probed.model.coefficients)

    def measured(positions: NDArray[np.int64]) -> Peak:
        hidden = int(0.12 * 10 * MIB)
        peak = law(positions) + hidden
        if peak > 10 * MIB:
            raise torch.OutOfMemoryError
        return Peak(peak, 0)

    limit = find_phase_limit(probed, measured, costs, SearchBounds(upper=20 * MIB, capacity_bytes=10 * MIB))
    assert limit.measured_ratio > 1.1
    assert len(order) == 1000
    assert 0.93 <= limit.peak_bytes(limit.tuned_limit) / (10 * MIB) <= 1


def test_a_worst_case_batch_holds_the_costliest_samples_and_is_filled_up() -> None:
    order = BatchCosts.of_samples([1.0, 7.0, 5.0, 3.0])
    assert sorted(order.each()[pack_worst_case(order, 13.0)].tolist(), reverse=True) == [7.0, 5.0, 1.0]
    assert pack_worst_case(order, 0.5).size == 0
    assert order.each()[pack_worst_case(order, 100.0)].sum() == pytest.approx(100.0, abs=1.0)


def test_exploring_leaves_model_gradients_and_generators_as_they_were(tmp_path: Path) -> None:
    task = UnevenMemoryTask()
    model = nn.Sequential(task.build_model(), nn.BatchNorm1d(1), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    meter = CpuMeter()
    meter.capacity_bytes = 100 * UNIT
    Planner(run=line_run(tmp_path), task=task, model=model, meter=meter, reporter=Notices()).make(fixed(0.5))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert model.training


def test_batch_dependence_is_named(tmp_path: Path) -> None:
    class Normalising(LineTask):
        def build_model(self) -> nn.Module:
            return nn.Sequential(super().build_model(), nn.BatchNorm1d(1))

    plan, _ = planned(tmp_path, Normalising(), 100, batch_size=20)
    assert any("batch through 1: micro-batches change the gradient of error" in notice for notice in plan.notices)


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
    first = make_session(line_parts(tmp_path), FACTOR).engine.run_plan
    task = UnevenMemoryTask()
    again = make_session(line_parts(tmp_path, task), fixed(0.9))
    assert again.engine.run_plan == first
    assert task.asked == []


def test_on_another_device_the_batch_is_kept_and_cut_anew(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, UnevenMemoryTask(), batch_size=40)
    parts.meter.capacity_bytes = 1000 * UNIT
    first = make_session(parts, FACTOR).engine.run_plan
    smaller = line_parts(tmp_path, UnevenMemoryTask(), batch_size=40)
    smaller.meter.capacity_bytes = 100 * UNIT
    assert not still_fits(first, smaller.meter)
    again = make_session(smaller, FACTOR).engine.run_plan
    assert again.phase_plan.logical_batch == first.phase_plan.logical_batch == 40
    assert again.phase_plan.most_parts > first.phase_plan.most_parts == 1


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, UnevenMemoryTask(), 100, batch_size=60)
    assert RunPlan.from_plain(plan.to_plain()) == plan


def test_words_for_numbers_become_limits(tmp_path: Path) -> None:
    request = plan_request(line_run(tmp_path, accumulation_target_mib="on", preflight_threshold=50).training)
    assert request.rules.target == 2048 * MIB
    assert request.preflight_threshold == 50


def too_large(plan: RunPlan) -> list[str]:
    return [notice for notice in plan.notices if "is predicted to need" in notice]


def test_a_floor_above_what_fits_is_warned_of(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, UnevenMemoryTask(), 100, batch_size=60, min_micro_batch_size=20)
    (notice,) = too_large(plan)
    assert notice.startswith("min_micro_batch_size=20 forbids micro-batches that fit: one of 20 samples")
    assert notice.endswith("(12.5 MiB usable); the run will fail for lack of memory")
    assert too_large(planned(tmp_path, UnevenMemoryTask(), 1000, batch_size=60, min_micro_batch_size=20)[0]) == []


@pytest.mark.parametrize(
    ("training", "ends"),
    [
        ({}, "it will run out of memory and be split"),
        ({"adaptive_micro_batch": False}, "the run will fail for lack of memory"),
        ({"min_micro_batch_size": 20}, "the run will fail for lack of memory"),
        ({"micro_batch_size": 4}, None),
    ],
)
def test_a_fixed_micro_batch_above_what_fits_is_warned_of(tmp_path: Path, training: Any, ends: str | None) -> None:
    meter, task = open_meter("sim:100MiB"), UnevenMemoryTask(unit=MIB)
    run = line_run(tmp_path, **{"batch_size": 60, "micro_batch_size": 20} | training)
    with meter.active():
        model = task.build_model()
        plan = Planner(run=run, task=task, model=model, meter=meter, reporter=Notices()).make(FACTOR)
    notices = too_large(plan)
    assert plan.limits is None
    assert [notice.startswith("micro_batch_size=20 is more than fits") for notice in notices] == [True] * bool(ends)
    assert all(notice.endswith(str(ends)) for notice in notices)


def test_samples_that_were_skipped_stay_skipped_when_a_run_is_planned_again(tmp_path: Path) -> None:
    meter, task = CpuMeter(), UnevenMemoryTask(largest=64)
    meter.capacity_bytes = 100 * UNIT
    run = line_run(tmp_path, oversize="skip", batch_size=20)
    planner = Planner(run=run, task=task, model=task.build_model(), meter=meter, reporter=Notices())
    plan = planner.make(FACTOR)
    assert planner.replan_same_batch(plan, FACTOR).skipped == plan.skipped == (7,)
    with pytest.raises(DoesNotFitError, match="point 7"):
        planner.replan_same_batch(replace(plan, skipped=()), FACTOR)


class TimedTask(UnevenMemoryTask):
    """Takes so many seconds a sample and a batch, by its own clock."""

    def __init__(self, seconds: float, a_batch: float) -> None:
        super().__init__()
        self.now, self._seconds, self._a_batch = 0.0, seconds, a_batch

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> UnevenMemoryBatch:
        self.now += self._a_batch + self._seconds * len(rows)
        return super().logical_batch(rows, device, dtype, generator)


class TimedMeter(CpuMeter):
    """Has the clock of a task."""

    def __init__(self, task: TimedTask) -> None:
        super().__init__()
        self._task = task

    def seconds(self) -> float:
        return self._task.now


def timed_plan(
    folder: Path, seconds: float, a_batch: float = 0.0, *, capacity_units: int = 250, **options: Any
) -> tuple[RunPlan, float]:
    """Plans a task; returns the plan and how long exploring took by the task's clock."""
    task = TimedTask(seconds, a_batch)
    meter = TimedMeter(task)
    meter.capacity_bytes = capacity_units * UNIT
    run = line_run(folder, batch_size=60)
    made = Planner(run=run, task=task, model=task.build_model(), meter=meter, reporter=Notices(), **options)
    _ = made.batch_dependence
    started = task.now
    return made.make(FACTOR), task.now - started


def test_a_search_ends_in_time_and_says_what_it_did_not_try(tmp_path: Path) -> None:
    unlimited, long = timed_plan(tmp_path / "a", 0.2, search_seconds=np.inf)
    plan, short = timed_plan(tmp_path / "b", 0.2)
    assert (unlimited.limits is not None, unlimited.limits.training.untried) == (True, 0)
    assert long > 30 >= short
    assert plan.limits is not None
    assert 0 < plan.limits.training.tuned_limit < unlimited.limits.training.tuned_limit
    assert plan.phase_plan.logical_batch == unlimited.phase_plan.logical_batch
    assert any("was not tried for lack of time (a search keeps to 10% of an epoch or 30 s)" in text
               for text in plan.notices)  # fmt: skip
    assert "was not tried for lack of time" in "\n".join(detail_lines(plan))
    assert not any("not tried" in text for text in [*unlimited.notices, *detail_lines(unlimited)])


class Heavy(nn.Sequential):
    """Has weights whose gradients take more than any batch."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.extra = nn.Parameter(torch.zeros(2**20))

    def forward(self, x: Tensor) -> Tensor:
        line: Tensor = super().forward(x)
        return line + 0 * self.extra.sum()


class HiddenTask(TimedTask):
    """Weights hide the memory of its samples."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, 0.0)
        self._unit = 8

    def build_model(self) -> nn.Module:
        return Heavy(*super().build_model())


@pytest.mark.parametrize(("batch_size", "is_seen"), [(2, True), (60, False)])
def test_probes_of_cheap_samples_beside_large_weights_end_in_time(
    tmp_path: Path, batch_size: int, is_seen: bool
) -> None:
    task = HiddenTask(0.1)
    meter = TimedMeter(task)
    meter.capacity_bytes = 2**30
    run = line_run(tmp_path, batch_size=batch_size)
    planner = Planner(run=run, task=task, model=task.build_model(), meter=meter, reporter=Notices())
    _ = planner.batch_dependence
    started, task.asked = task.now, []
    plan = planner.make(FACTOR)
    assert task.now - started <= 30
    assert max(map(len, task.asked)) <= 8 * batch_size
    told = [notice for notice in plan.notices if "grows with batches was not seen" in notice]
    assert bool(told) is not is_seen
    assert plan.room_samples is None
    shown = "\n".join([*told, *detail_lines(plan)])
    assert ("was not seen: there was no time for larger batches" in shown) is not is_seen


def test_larger_batches_that_take_no_longer_are_tried_in_the_end(tmp_path: Path) -> None:
    unlimited, _ = timed_plan(tmp_path / "a", 0.0, 1.05, capacity_units=800, search_seconds=np.inf)
    plan, _ = timed_plan(tmp_path / "b", 0.0, 1.05, capacity_units=800)
    assert plan.limits is not None
    assert unlimited.limits is not None
    assert plan.limits.training.trials > unlimited.limits.training.trials
    assert plan.limits.training.tuned_limit == unlimited.limits.training.tuned_limit


def test_unless_a_search_is_limited_it_takes_as_long_as_it_takes() -> None:
    assert Search().time.allows(1e9, epoch_seconds=1.0, share=0.75)


def test_the_time_of_a_search_grows_with_that_of_an_epoch_which_ranks_share() -> None:
    now = 0.0
    allowed = SearchTime(clock=lambda: now)
    assert allowed.allows(29, epoch_seconds=100, share=1.0)
    assert not allowed.allows(31, epoch_seconds=100, share=1.0)
    assert allowed.allows(99, epoch_seconds=1000, share=1.0)
    assert not allowed.allows(99, epoch_seconds=1000, share=0.75)
    now = 20.0
    assert not allowed.allows(99, epoch_seconds=100, share=1.0)
    assert allowed.allows(79, epoch_seconds=100, share=1.0)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_searches_for_a_share_of_its_part_of_an_epoch(tmp_path: Path, ranks: int) -> None:
    task = LineTask()
    run = line_run(tmp_path)
    planner = Planner(run=run, task=task, model=task.build_model(), meter=CpuMeter(), reporter=Notices(), ranks=ranks)
    assert planner.explorer.epoch_share == 0.1 / ranks


def known_from(plan: RunPlan, **changed: Any) -> FactorRule:
    """The rule of a run that knows the limits of an earlier plan."""
    assert plan.limits is not None

    def known(phase: SearchResult) -> RememberedLimit:
        return RememberedLimit(tuned_limit=phase.tuned_limit, capped=phase.capped, base_bytes=phase.model.base_bytes,
                          measured_ratio=phase.measured_ratio)  # fmt: skip

    limits = RememberedLimits(training=known(plan.limits.training), evaluation=known(plan.limits.evaluation))
    earlier = EarlierSearch(run_id="earlier-run", capacity_bytes=plan.limits.capacity_bytes,
                            torch_version=torch.__version__, phases={"": limits})  # fmt: skip
    return replace(FACTOR, earlier=replace(earlier, **changed))


def hungry_planner(folder: Path, task: UnevenMemoryTask, *, capacity_units: int = 300) -> Planner:
    meter = CpuMeter()
    meter.capacity_bytes = capacity_units * UNIT
    run = line_run(folder, batch_size=60)
    return Planner(run=run, task=task, model=task.build_model(), meter=meter, reporter=Notices())


def test_the_limit_of_an_earlier_run_is_confirmed_by_one_trial_and_named(tmp_path: Path) -> None:
    first = hungry_planner(tmp_path, UnevenMemoryTask()).make(FACTOR)
    task = UnevenMemoryTask()
    again = hungry_planner(tmp_path, task).make(known_from(first))
    assert first.limits is not None
    assert again.limits is not None
    assert again.phase_plan == first.phase_plan
    assert again.limits.training == replace(first.limits.training, trials=1, ooms=0, confirmed=True)
    assert again.limits.evaluation.confirmed
    assert "(the tuned limit of run earlier-run, confirmed by one trial" in "\n".join(detail_lines(again))


def test_a_limit_is_the_same_however_often_it_is_confirmed(tmp_path: Path) -> None:
    first = hungry_planner(tmp_path, UnevenMemoryTask(), capacity_units=150).make(FACTOR)
    again = hungry_planner(tmp_path, UnevenMemoryTask(), capacity_units=150).make(known_from(first))
    assert again.phase_plan == first.phase_plan
    assert (again.limits is not None, again.limits.training.confirmed) == (True, True)


@pytest.mark.parametrize("changed", [{"capacity_bytes": 304 * UNIT}, {"torch_version": "0.1"}, {"phases": {}}])
def test_the_limit_of_a_run_elsewhere_is_searched_for_anew(tmp_path: Path, changed: Any) -> None:
    first = hungry_planner(tmp_path, UnevenMemoryTask()).make(FACTOR)
    assert hungry_planner(tmp_path, UnevenMemoryTask()).make(known_from(first, **changed)).limits == first.limits


def test_a_task_that_takes_other_memory_now_is_searched_anew(tmp_path: Path) -> None:
    class Changed(UnevenMemoryTask):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.register_buffer("table", torch.zeros(4 * UNIT // 4))
            return model

    first = hungry_planner(tmp_path, UnevenMemoryTask()).make(FACTOR)
    again = hungry_planner(tmp_path, Changed()).make(known_from(first))
    assert again.limits == hungry_planner(tmp_path, Changed()).make(FACTOR).limits


@pytest.mark.parametrize(("splits", "parts"), [("off", 1), (2, 2), (7, 7)])
def test_a_batch_is_computed_in_as_many_parts_as_asked_for_and_stays_as_it_is(
    tmp_path: Path, splits: Any, parts: int
) -> None:
    plan, _ = planned(tmp_path, UnevenMemoryTask(), 1000, batch_size=20, accumulation_splits=splits)
    assert (plan.phase_plan.logical_batch, plan.phase_plan.fewest_parts) == (20, parts)
    text = "\n".join(plan_summary(plan, "x", 1))
    assert ("in 2 micro-batches" in text and "accumulation_splits 2" in text) == (splits == 2)
