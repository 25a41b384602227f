"""Runs that learn which micro-batches are the fastest, on a processor whose clock follows a law."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.factors.observations import read_records
from can_train.factors.store import factor_rule
from can_train.fit.rescue import Backoff
from can_train.fit.run_plan import RunPlan
from can_train.fit.step_time import MicroBatchChoice, StepTimer
from can_train.memory.meters import CpuMeter
from can_train.task import Feature
from can_train.training.attempt_record import recording_observation
from can_train.training.report import detail_lines, plan_summary
from can_train.training.session import Session
from can_train.training.train import make_session, train
from fakes.line_fit import LineBatch, LineTask, line_parts

pytestmark = pytest.mark.slow
BATCH = 6
EPOCHS = 40  # Of ten steps
CACHE = 2  # Samples of a micro-batch beyond which each takes three times as long


class ClockMeter(CpuMeter):
    """A processor whose time is told by what is computed on it."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.now, self.speed = 0.0, speed

    def moment(self) -> float:
        return self.now


class ClockedBatch(LineBatch):
    """Some points, whose micro-batches move the clock."""

    def __init__(self, x: Tensor, meter: ClockMeter) -> None:
        super().__init__(x, 10**9)
        self._meter = meter

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        size = stop - start
        self._meter.now += self._meter.speed * (3 + size) * (1.0 if size <= CACHE else 3.0)
        return super().losses(model, start, stop)


class ClockedTask(LineTask):
    """Points that take the same memory; the process gets a SIGTERM after a share of the run."""

    def __init__(self, meter: ClockMeter, *, stop_at: float = 2.0) -> None:
        super().__init__()
        self.memory_features = (Feature("points"),)
        self._meter, self._stop_at = meter, stop_at

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.ones((len(rows), 1))

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        return ClockedBatch(self._x[rows].to(device, dtype), self._meter)

    def before_step(self, model: nn.Module, rows: Any, share: float, generator: torch.Generator) -> None:
        if share >= self._stop_at:
            self._stop_at = 2.0
            os.kill(os.getpid(), signal.SIGTERM)


def run_once(folder: Path, *, state: Path, speed: float = 1.0, stop_at: float = 2.0, **training: Any) -> Session:
    """Trains a run, or goes on with it; what it teaches is in a folder that several runs share."""
    meter = ClockMeter(speed)
    settings = {"paths.state_dir": str(state)}
    given = {"epochs": EPOCHS, "batch_size": BATCH, "precision": "fp64", "micro_batch": "fastest"} | training
    parts = line_parts(folder, ClockedTask(meter, stop_at=stop_at), settings=settings, **given)
    parts.meter = meter
    session = make_session(parts, factor_rule(parts.run, meter.key, parts.reporter, run_id=parts.folder.run_id))
    with parts.stops.installed(), recording_observation(session):
        train(session)
    return session


def choice_of(session: Session) -> MicroBatchChoice:
    choice = session.own_plan.micro_batch
    assert choice is not None
    return choice


def weights(session: Session) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in session.model.parameters()]


def are_equal(one: Session, other: Session) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


@pytest.fixture(scope="module")
def three_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Session]:
    folder = tmp_path_factory.mktemp("runs")
    return [run_once(folder / str(number), state=folder / "state", speed=10.0**number) for number in range(3)]


def test_a_later_run_takes_the_size_that_took_least_time(three_runs: list[Session]) -> None:
    first, *_, last = three_runs
    assert choice_of(first).is_largest
    assert first.engine.run_plan.phase_plan.most_parts == 1
    assert choice_of(last).samples == CACHE
    assert last.engine.run_plan.phase_plan.largest_micro_batch == CACHE
    # (6 + 3) · 3 against 3 · (2 + 3)
    assert choice_of(last).gain == pytest.approx(1 - 15 / 27, abs=0.05)


def test_at_most_two_percent_of_the_steps_try_other_sizes(three_runs: list[Session]) -> None:
    for session in three_runs:
        own = session.engine.run_plan.phase_plan.most_parts
        records = [json.loads(line) for line in session.folder.path.joinpath("steps.jsonl").read_text().splitlines()]
        others = [record for record in records if record.get("micro_batches", own) != own]
        assert 0 < len(others) <= 0.02 * session.total_steps


def test_smaller_micro_batches_train_the_same_weights(three_runs: list[Session], tmp_path: Path) -> None:
    largest = run_once(tmp_path, state=tmp_path / "state", micro_batch="largest")
    assert largest.own_plan.micro_batch is None
    for one, other in zip(weights(largest), weights(three_runs[-1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert not are_equal(largest, three_runs[-1])


def test_on_a_processor_every_run_of_a_line_has_the_same_cuts_unless_asked_otherwise(tmp_path: Path) -> None:
    runs = [run_once(tmp_path / str(number), state=tmp_path / "state", micro_batch="auto") for number in range(2)]
    assert [session.own_plan.micro_batch for session in runs] == [None, None]
    assert are_equal(*runs)


def test_the_times_of_a_run_are_in_its_observation(three_runs: list[Session]) -> None:
    state = Path(three_runs[0].run.paths.state_dir)
    first, *_, last = [run.times[""] for run in read_records(state).finished]
    assert first[0].samples == BATCH
    assert last[0].samples == CACHE
    # The clock of the last run is a hundred times slower, which changes no ratio.
    assert last[0].seconds == pytest.approx(100 * 15 / 6)
    assert {round(size.samples): round(size.log_ratio, 3) for size in first}[3] == round(float(np.log(36 / 27)), 3)


def test_two_first_runs_have_the_same_bits_whatever_their_clocks_say(three_runs: list[Session], tmp_path: Path) -> None:
    assert are_equal(run_once(tmp_path, state=tmp_path / "state", speed=0.3), three_runs[0])


def stopped_and_resumed(folder: Path) -> Session:
    with pytest.raises(SystemExit):
        run_once(folder, state=folder / "state", stop_at=0.15)
    return run_once(folder, state=folder / "state")


def test_a_resumed_run_has_the_same_bits(three_runs: list[Session], tmp_path: Path) -> None:
    resumed = stopped_and_resumed(tmp_path)
    assert choice_of(resumed) == choice_of(three_runs[0])
    assert are_equal(resumed, three_runs[0])


def test_a_resumed_run_that_forgot_its_trials_has_other_bits(
    three_runs: list[Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above."""
    trial = StepTimer.trial
    monkeypatch.setattr(StepTimer, "trial", lambda timer, step: trial(timer, step) if step < 60 else None)
    assert not are_equal(stopped_and_resumed(tmp_path), three_runs[0])


@pytest.mark.parametrize(
    "training",
    [
        {"micro_batch": "largest"},
        {"deterministic": True, "micro_batch": "auto"},
        {"micro_batch_size": 3},
        {"accumulation": "divisor"},
        {"accumulation_splits": "2"},
        {"accumulation_target_mib": "1"},
        {"find_batch_size": "off"},
        {"use_adaptive_batch_size_factor": False},
    ],
    ids=str,
)
def test_nothing_is_tried_where_the_user_has_decided(tmp_path: Path, training: Any) -> None:
    session = run_once(tmp_path, state=tmp_path / "state", **{"epochs": 1} | training)
    assert session.own_plan.micro_batch is None


def test_sizes_stay_where_samples_depend_on_their_batch(tmp_path: Path) -> None:
    class NormedTask(ClockedTask):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    meter = ClockMeter(1.0)
    parts = line_parts(tmp_path, NormedTask(meter), batch_size=BATCH, epochs=EPOCHS)
    session = make_session(parts, factor_rule(parts.run, meter.key, parts.reporter))
    assert session.own_plan.micro_batch is None


def test_steps_after_an_out_of_memory_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "after_step", lambda backoff, **_: Backoff(limit=1.0))
    run_once(tmp_path, state=tmp_path / "state", epochs=40)
    assert [run.times for run in read_records(tmp_path / "state").finished] == [{}]


def test_a_plan_says_which_size_it_takes_and_which_it_tries(three_runs: list[Session]) -> None:
    first, *_, last = [session.own_plan for session in three_runs]
    key, capacity = three_runs[0].meter.key, three_runs[0].meter.capacity_bytes
    assert not any("Smaller" in line for line in plan_summary(first, key, capacity))
    assert any(
        line.startswith("Smaller micro-batches are faster: 2 samples on average against 6 that fit, 4")
        for line in plan_summary(last, key, capacity)
    )
    (told,) = [line for line in detail_lines(first) if "micro-batch " in line]
    assert "6 samples on average, the largest that fit, 6; " in told
    assert "steps of the run try 3" in told
    (told,) = [line for line in detail_lines(last) if "micro-batch " in line]
    assert "2 samples on average: 4" in told


def test_a_plan_with_a_choice_survives_its_file(three_runs: list[Session]) -> None:
    plan = three_runs[-1].own_plan
    assert RunPlan.from_plain(json.loads(json.dumps(plan.to_plain()))) == plan
    assert plan.phase_plan.rules.fastest < plan.phase_plan.rules.safe_limit
