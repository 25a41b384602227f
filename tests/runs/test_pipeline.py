"""What becomes of the stages of a pipeline, on runs that were never trained."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from can_train.config.resolved import preset_folders
from can_train.errors import ConfigError
from can_train.runs.past_runs import PastRuns, with_folders
from can_train.runs.pipeline import (
    NEW,
    RESUMED,
    REUSED,
    RUNNING_ALREADY,
    PipelineContext,
    PlannedStage,
    StageRequest,
    load_stages,
    plan_stages,
    select_stages,
)
from can_train.runs.run_state import CANCELLED, RUNNING, RunState
from can_train.slurm import client as slurm
from fakes.finished_runs import RESULT, Shelf

STAGES = {stage.name: stage for stage in load_stages("standard", preset_folders("can"))}
ALL = [*STAGES]
STUDENTS = ("normal", "student", "knowledge_distillation")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def steps(
    shelf: Shelf, names: Sequence[str] = ALL, *, force: bool = False, state: str = CANCELLED, **request: object
) -> dict[str, PlannedStage]:
    requests = []
    for stage in select_stages(list(STAGES.values()), names):
        what = (stage.model, stage.mode, stage.size)
        run = shelf.resolved(*what, **request)
        requests.append(StageRequest(stage=stage, request=shelf.request(*what, **request), run=run))
    past = PastRuns(shelf.folder / "state", shelf.folder / "runs", slurm)
    context = PipelineContext(stages=STAGES, past=past, state_of=lambda _: RunState(state=state), force=force)
    return {step.name: step for step in plan_stages(requests, context)}


def what(found: dict[str, PlannedStage]) -> dict[str, str]:
    return {name: step.what for name, step in found.items()}


def trained(shelf: Shelf, number: int, step: PlannedStage, *, finished: bool = True, **roles: Path) -> Path:
    """Lays down the run of a step."""
    return shelf.put(number, with_folders(step.run, roles), RESULT if finished else None).path


def test_without_earlier_runs_all_are_new_and_build_on_each_other(shelf: Shelf) -> None:
    found = steps(shelf)
    assert {*what(found).values()} == {NEW}
    assert {name: dict(step.sources) for name, step in found.items() if step.sources} == {
        "curriculum": {"autoencoder": "autoencoder"},
        "knowledge_distillation": {"teacher": "curriculum", "without_teacher": "student"},
        "fusion": {"autoencoder": "autoencoder", "classifier": "knowledge_distillation"},
    }


def test_what_has_done_the_same_is_used_again_and_its_folder_written_down(shelf: Shelf) -> None:
    first = steps(shelf)
    path = trained(shelf, 1, first["autoencoder"])
    found = steps(shelf)
    assert what(found) == dict.fromkeys(ALL, NEW) | {"autoencoder": REUSED}
    assert (
        found["curriculum"].run.mode.autoencoder == found["curriculum"].run.config["mode"]["autoencoder"] == str(path)
    )
    trained(shelf, 2, found["curriculum"])
    assert what(steps(shelf)) == dict.fromkeys(ALL, NEW) | {"autoencoder": REUSED, "curriculum": REUSED}


def test_other_settings_are_another_run_and_other_places_are_not(shelf: Shelf) -> None:
    trained(shelf, 1, steps(shelf)["normal"])
    assert what(steps(shelf, ["normal"], cluster="slurm", values={"cluster.mem": "3G"})) == {"normal": REUSED}
    assert what(steps(shelf, ["normal"], values={"training.epochs": 7})) == {"normal": NEW}
    assert what(steps(shelf, ["normal"], device="cpu")) == {"normal": NEW}


def test_a_stage_is_trained_anew_when_what_it_builds_on_is_another_run(shelf: Shelf) -> None:
    first = steps(shelf, STUDENTS)
    teacher, student = trained(shelf, 1, first["normal"]), trained(shelf, 2, first["student"])
    trained(shelf, 3, first["knowledge_distillation"], teacher=teacher, without_teacher=student)
    assert what(steps(shelf, STUDENTS)) == dict.fromkeys(STUDENTS, REUSED)
    trained(shelf, 4, first["normal"])
    assert what(steps(shelf, STUDENTS)) == {"normal": REUSED, "student": REUSED, "knowledge_distillation": NEW}


def test_a_run_that_was_compared_with_nothing_is_not_used_where_a_comparison_is_yet_to_be_made(shelf: Shelf) -> None:
    first = steps(shelf, STUDENTS)
    teacher = trained(shelf, 1, first["normal"])
    trained(shelf, 2, first["knowledge_distillation"], teacher=teacher)
    assert what(steps(shelf, STUDENTS)) == {"normal": REUSED, "student": NEW, "knowledge_distillation": NEW}


def test_force_trains_all_anew(shelf: Shelf) -> None:
    trained(shelf, 1, steps(shelf)["autoencoder"])
    assert {*what(steps(shelf, force=True)).values()} == {NEW}


@pytest.mark.parametrize(("state", "expected"), [(CANCELLED, RESUMED), (RUNNING, RUNNING_ALREADY)])
def test_what_was_interrupted_goes_on_and_what_is_at_work_is_left_alone(
    shelf: Shelf, state: str, expected: str
) -> None:
    path = trained(shelf, 1, steps(shelf)["autoencoder"], finished=False)
    found = steps(shelf, state=state)
    assert found["autoencoder"].what == expected
    assert found["curriculum"].run.mode.autoencoder == str(path)
    assert found["curriculum"].what == NEW


def test_a_run_that_has_finished_comes_before_a_newer_one_that_has_not(shelf: Shelf) -> None:
    step = steps(shelf)["autoencoder"]
    path = trained(shelf, 1, step)
    trained(shelf, 2, step, finished=False)
    found = steps(shelf)["autoencoder"]
    assert found.known is not None
    assert (found.what, found.known.folder.path) == (REUSED, path)


def test_a_run_without_its_weights_is_not_used_again(shelf: Shelf) -> None:
    path = trained(shelf, 1, steps(shelf)["autoencoder"])
    (path / "checkpoints" / "manifest.json").unlink()
    assert steps(shelf)["autoencoder"].what == NEW


def test_a_run_on_data_that_have_changed_since_is_not_used_again(shelf: Shelf) -> None:
    log = shelf.folder / "drive.csv"
    log.touch()
    os.utime(log, (0, 0))
    trained(shelf, 1, steps(shelf, ["normal"], dataset=str(log))["normal"])
    assert steps(shelf, ["normal"], dataset=str(log))["normal"].what == REUSED
    log.touch()
    assert steps(shelf, ["normal"], dataset=str(log))["normal"].what == NEW


def test_a_stage_that_is_not_asked_for_supplies_what_it_trained_before_the_next_best_does(shelf: Shelf) -> None:
    found = steps(shelf, STUDENTS)["knowledge_distillation"]
    assert found.sources["teacher"] == "normal"
    earlier = steps(shelf, ["autoencoder", "curriculum"])
    curriculum = trained(shelf, 1, earlier["curriculum"])
    found = steps(shelf, STUDENTS)["knowledge_distillation"]
    assert (found.run.mode.teacher, "teacher" in found.sources) == (str(curriculum), False)
    assert found.notices == [f"teacher: {curriculum.name} (the newest finished run that fits)"]


def test_what_no_stage_and_no_earlier_run_supplies_is_said_with_its_command(shelf: Shelf) -> None:
    with pytest.raises(ConfigError, match="builds on a teacher") as error:
        steps(shelf, ["knowledge_distillation"])
    assert "can-train --model gat --dataset synthetic --mode normal --size teacher" in error.value.remedy


def test_a_stage_that_makes_what_another_cannot_build_on_is_refused(shelf: Shelf) -> None:
    requests = []
    for name, window in (("autoencoder", 50), ("curriculum", 100)):
        stage = STAGES[name]
        of = (stage.model, stage.mode, stage.size)
        sets = (f"dataset.window={window}",)
        requests.append(
            StageRequest(stage=stage, request=shelf.request(*of, sets=sets), run=shelf.resolved(*of, sets=sets))
        )
    past = PastRuns(shelf.folder / "state", shelf.folder / "runs", slurm)
    with pytest.raises(ConfigError, match=r"The run of stage autoencoder.*dataset\.window is 50, not 100"):
        plan_stages(requests, PipelineContext(stages=STAGES, past=past, state_of=lambda _: RunState(state=CANCELLED)))
