import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import CheckpointError, ConfigError, DoesNotFitError, StateError
from can_train.factors.observations import read_records, write_record
from can_train.factors.store import factor_rule, get_safety_factor_db
from can_train.fit.factor_rule import NO_AIM
from can_train.training import train as training_loop
from can_train.training.attempt_record import recording_observation
from can_train.training.dry_run import get_effective_safety_factor
from can_train.training.session import Session
from can_train.training.train import make_session
from fakes.costly import Costly
from fakes.line_fit import LineBatch, LineTask, Notices, StoppedTask, fixed, line_parts, line_run

KEY = "synthetic_gat_student_normal"


def attempt(folder: Path, task: LineTask | None = None, **training: Any) -> Session:
    """Trains as a run does, from the factor to the observation."""
    parts = line_parts(folder, task, **training)
    # The host's available memory changes from run to run.
    parts.meter.capacity_bytes = 2**30
    factor = factor_rule(parts.run, parts.meter.key, parts.reporter)
    session = make_session(parts, factor)
    with parts.stops.installed(), recording_observation(session):
        training_loop.train(session)
    return session


def test_a_run_that_ends_leaves_one_observation(tmp_path: Path) -> None:
    session = attempt(tmp_path, batch_size=20)
    (observed,) = read_records(tmp_path / "state").finished
    assert (observed.outcome, observed.key, observed.factor) == ("ok", KEY, 0.6)
    assert observed.peak_allocated_bytes == session.monitor.peak_bytes > 0
    assert (observed.logical_batch, observed.binding_limit) == (20, "requested")
    assert (tmp_path / "state" / "batch_size_factors.json").exists()
    # The record that it began says nothing more.
    assert len(list((tmp_path / "state" / "observations").iterdir())) == 1


class CostlyTask(LineTask):
    """Points that take 256 KiB each until the backward pass."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        class CostlyBatch(LineBatch):
            def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
                total, denominator = super().losses(model, start, stop)["error"]
                if total.requires_grad:
                    total = Costly.apply(total, (stop - start) * 2**18)
                return {"error": (total, denominator)}

        return CostlyBatch(self._x[rows].to(device, dtype), self.fail_above)


def test_the_next_run_confirms_the_limits_that_a_run_has_found(tmp_path: Path) -> None:
    first = attempt(tmp_path, CostlyTask(), batch_size=60)
    shutil.rmtree(tmp_path / "runs")
    again = attempt(tmp_path, CostlyTask(), batch_size=60)
    found, confirmed = first.engine.run_plan.limits, again.engine.run_plan.limits
    assert found is not None
    assert confirmed is not None
    assert (found.training.confirmed, confirmed.training.confirmed) == (False, True)
    assert confirmed.earlier_run == first.folder.run_id
    (_, observed) = read_records(tmp_path / "state").finished
    assert observed.limits[""].training.tuned_limit == confirmed.training.tuned_limit


@pytest.mark.parametrize("other", ["thawed", "cut short"])
def test_limits_of_other_weights_or_of_a_search_cut_short_are_not_left_to_the_next_run(
    tmp_path: Path, other: str
) -> None:
    parts = line_parts(tmp_path, CostlyTask(), batch_size=60)
    session = make_session(parts, factor_rule(parts.run, parts.meter.key, parts.reporter))
    state, limits = session.engine, session.engine.run_plan.limits
    assert limits is not None
    if other == "thawed":
        session.is_thawed = True
    else:
        cut_short = replace(limits, training=replace(limits.training, untried=1e12))
        state.run_plan = replace(state.run_plan, limits=cut_short)
    with recording_observation(session):
        pass
    (observed,) = read_records(tmp_path / "state").finished
    assert observed.limits == {}


def test_a_run_that_memory_did_not_limit_leaves_the_factor_alone(tmp_path: Path) -> None:
    attempt(tmp_path)
    assert get_safety_factor_db(tmp_path / "state").get_factor(KEY) == 0.6


def test_a_run_that_was_rescued_says_so_and_teaches_it(tmp_path: Path) -> None:
    roomy = LineTask()
    parts = line_parts(tmp_path, roomy, batch_size=30)
    factor = factor_rule(parts.run, parts.meter.key, parts.reporter)
    session = make_session(parts, factor)
    assert session.engine.run_plan.phase_plan.most_parts == 1
    roomy.fail_above = 20
    with recording_observation(session):
        training_loop.train(session)
    (observed,) = read_records(tmp_path / "state").finished
    assert (observed.outcome, observed.logical_batch, observed.ooms_rescued) == (
        "rescued",
        30,
        session.engine.batcher.ooms_rescued,
    )
    assert observed.largest_micro_batch <= 20
    assert "with the same gradient" in "\n".join(parts.reporter.texts)  # type: ignore[attr-defined]
    assert get_effective_safety_factor(parts.run) <= 0.6 * 0.85


def test_after_an_out_of_memory_a_lower_factor_cuts_finer_and_keeps_the_batch(tmp_path: Path) -> None:
    first = make_session(line_parts(tmp_path, batch_size=30), fixed(0.6))
    again = make_session(line_parts(tmp_path, batch_size=30), replace(fixed(0.3), after_oom=True))
    assert again.engine.run_plan.phase_plan.logical_batch == first.engine.run_plan.phase_plan.logical_batch == 30
    assert again.engine.batcher.rules.safe_limit == pytest.approx(first.engine.batcher.rules.safe_limit / 2)


def test_what_was_learned_since_leaves_a_frozen_plan_alone(tmp_path: Path) -> None:
    first = make_session(line_parts(tmp_path, batch_size=30), fixed(0.6))
    again = make_session(line_parts(tmp_path, batch_size=30), fixed(0.3))
    assert again.engine.run_plan == first.engine.run_plan


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"limits": null}'])
def test_a_plan_of_another_version_is_named(tmp_path: Path, text: str) -> None:
    parts = line_parts(tmp_path, batch_size=30)
    parts.folder.plan_path.write_text(text)
    with pytest.raises(CheckpointError, match="this version cannot read"):
        make_session(parts, fixed(0.6))


@pytest.mark.parametrize(
    ("training", "rule", "remedy"),
    [
        ({"find_batch_size": "off", "adaptive_micro_batch": False}, "adaptive_micro_batch is off", "Turn it on"),
        ({"micro_batch_size": 1, "oom_retries": 1}, "ran out 2 times in a row", "choose a smaller model"),
    ],
)
def test_what_cannot_be_rescued_is_named_and_the_run_saved(
    tmp_path: Path, training: dict[str, Any], rule: str, remedy: str
) -> None:
    task = LineTask()
    parts = line_parts(tmp_path, task, batch_size=30, **training)
    factor = factor_rule(parts.run, parts.meter.key, parts.reporter)
    session = make_session(parts, factor)
    task.fail_above = 0
    with (
        pytest.raises(DoesNotFitError, match=rf"{rule}.*: point \d+.*\n.*{remedy}"),
        recording_observation(session),
    ):
        training_loop.train(session)
    assert [observed.outcome for observed in read_records(tmp_path / "state").finished] == ["oom"]
    task.fail_above = 10**9
    assert attempt(tmp_path, task, batch_size=30, **training).progress.trained


def test_a_resumed_attempt_of_few_steps_still_measures_a_peak(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        attempt(tmp_path, StoppedTask(after=37), micro_batch_size=3, batch_size=3)
    session = attempt(tmp_path, micro_batch_size=3, batch_size=3)
    assert isinstance(session.reporter, Notices)
    assert "Continuing at step 37" in session.reporter.texts
    assert [observed.outcome for observed in read_records(tmp_path / "state").finished] == ["interrupted", "ok"]
    assert all(observed.peak_allocated_bytes for observed in read_records(tmp_path / "state").finished)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(SystemExit(143), "interrupted"), (KeyboardInterrupt(), "interrupted"), (ValueError(), "error")],
)
def test_how_an_attempt_ended_is_recorded(tmp_path: Path, error: BaseException, outcome: str) -> None:
    parts = line_parts(tmp_path, batch_size=20)
    factor = factor_rule(parts.run, parts.meter.key, parts.reporter)
    session = make_session(parts, factor)
    with pytest.raises(type(error)), recording_observation(session):
        raise error
    assert [observed.outcome for observed in read_records(tmp_path / "state").finished] == [outcome]


@pytest.mark.parametrize("shards_fit", [True, False])
def test_an_attempt_that_ran_out_of_memory_was_rescued_only_where_shards_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shards_fit: bool
) -> None:
    parts = line_parts(tmp_path, batch_size=20)
    sessions: list[Session] = []

    def plan(*given: Any, as_shards: bool = False) -> Session:
        if as_shards and not shards_fit:
            raise DoesNotFitError("Shards do not fit", value="3 MiB", remedy="Take a larger device")
        return make_session(*given)

    def run_out_at_first(session: Session) -> None:
        sessions.append(session)
        if len(sessions) == 1:
            session.may_go_on_as_shards = True
            raise DoesNotFitError("Memory ran out", value="point 3", remedy="Take a larger device")

    steps = {"make_session": plan, "train": run_out_at_first, "judge_best": lambda _: {"judgement": {}}}
    for name, step in steps.items():
        monkeypatch.setattr(training_loop, name, step)
    ends = nullcontext() if shards_fit else pytest.raises(DoesNotFitError, match="point 3, also with --fit shard")
    with ends:
        training_loop._attempt_result(parts, factor_rule(parts.run, parts.meter.key, parts.reporter))
    observed = read_records(tmp_path / "state").finished
    assert [one.outcome for one in observed] == (["rescued", "ok"] if shards_fit else ["oom"])


def test_a_state_folder_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder is wanted")
    session = attempt(tmp_path, batch_size=20)
    assert session.progress.trained
    assert isinstance(session.reporter, Notices)
    assert any("teaches nothing" in text for text in session.reporter.texts)
    with pytest.raises(StateError):
        get_effective_safety_factor(line_run(tmp_path))


def test_without_learning_the_static_factor_is_used_and_nothing_is_written(tmp_path: Path) -> None:
    session = attempt(tmp_path, batch_size=20, use_adaptive_batch_size_factor=False, graph_memory_safety_factor=0.3)
    assert session.engine.run_plan.phase_plan.safety_factor == 0.3
    assert not (tmp_path / "state").exists()


def test_the_effective_factor_is_that_of_the_next_run(tmp_path: Path) -> None:
    run = line_run(tmp_path)
    assert get_effective_safety_factor(run) == 0.6
    assert get_effective_safety_factor(run.config) == 0.6
    with pytest.raises(ConfigError, match="A configuration names its task: its keys are none"):
        get_effective_safety_factor({})


def test_attempts_of_a_run_are_counted(tmp_path: Path) -> None:
    attempt(tmp_path, batch_size=20)
    shutil.rmtree(next((tmp_path / "runs").glob("*/checkpoints")))
    attempt(tmp_path, batch_size=20)
    assert [observed.attempt for observed in read_records(tmp_path / "state").finished] == [1, 2]


def test_planning_leaves_model_and_generators_as_they_were(tmp_path: Path) -> None:
    parts = line_parts(tmp_path)
    factor = factor_rule(parts.run, parts.meter.key, parts.reporter)
    torch.manual_seed(parts.run.training.seed)
    fresh = parts.task.build_model()
    expected = torch.rand(())
    session = make_session(parts, factor)
    assert session.engine.run_plan.limits is not None
    assert torch.equal(torch.rand(()), expected)
    for one, other in zip(session.model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is None


def test_a_pinned_factor_aims_at_no_peak(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, batch_size=20)
    get_safety_factor_db(tmp_path / "state").pin(KEY, 0.25)
    pinned = factor_rule(parts.run, parts.meter.key, parts.reporter)
    assert (pinned.decided.value if pinned.decided else None, pinned.aim) == (0.25, NO_AIM)


def test_an_out_of_memory_of_any_rank_in_the_last_attempt_cuts_finer(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, batch_size=20)
    attempt(tmp_path, batch_size=20)
    (first,) = read_records(tmp_path / "state").finished
    for number, outcomes in ((2, ("oom", "interrupted")), (3, ("ok", "ok"))):
        for rank, outcome in enumerate(outcomes):
            ended = replace(first, attempt=number, rank=rank, outcome=outcome)
            write_record(tmp_path / "state", ended)
        rule = factor_rule(parts.run, parts.meter.key, parts.reporter, run_id=parts.folder.run_id)
        assert rule.after_oom == ("oom" in outcomes)
