"""What a run builds on is found where it is by now, and stays what it was."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from can_train import Task
from can_train.errors import RunError
from can_train.runs.run_folder import RunFolder, relocate_prerequisites, without_missing_prerequisites
from can_train.task import BatchTask
from can_train.training.loading import check_inputs_unchanged, finished_model, load_finished
from fakes.finished_runs import Shelf
from fakes.own_tasks import write_task


def task_with(data: str = "", **digests: str) -> BatchTask:
    """A task whose data and reference models have digests, those by role."""
    reference_models = [
        SimpleNamespace(role=role, name=f"run-{role}", digest=digest) for role, digest in digests.items()
    ]
    return cast(BatchTask, SimpleNamespace(reference_models=lambda: reference_models, data_digest=lambda: data))


def test_a_reference_model_that_is_another_by_now_is_refused_by_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        check_inputs_unchanged(folder, task_with(teacher="1", autoencoder="2"))
    with pytest.raises(RunError, match=r"the autoencoder run-autoencoder has other weights.*\nBring the"):
        check_inputs_unchanged(folder, task_with(teacher="1", autoencoder="3"))


def test_data_that_are_others_by_now_are_refused_and_said_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        check_inputs_unchanged(folder, task_with("1", teacher="1"))
    with pytest.raises(RunError, match=r"the data that it began with: they have other contents.*\nBring the"):
        check_inputs_unchanged(folder, task_with("2", teacher="2"))


def test_a_run_that_does_without_what_it_was_compared_with_goes_on(tmp_path: Path) -> None:
    check_inputs_unchanged(RunFolder(tmp_path), task_with("1", teacher="1", without_teacher="2"))
    written = (tmp_path / "built_on.json").read_text()
    check_inputs_unchanged(RunFolder(tmp_path), task_with("1", teacher="1"))
    assert (tmp_path / "built_on.json").read_text() == written


def test_a_file_that_is_damaged_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "built_on.json").write_text("{")
    for _ in range(2):
        check_inputs_unchanged(RunFolder(tmp_path), task_with(teacher="1"))
    with pytest.raises(RunError, match="teacher"):
        check_inputs_unchanged(RunFolder(tmp_path), task_with(teacher="2"))


@pytest.fixture
def distilled(tmp_path: Path) -> tuple[Shelf, Any, RunFolder]:
    """A student's run beside its teacher and the student without one."""
    shelf = Shelf(tmp_path)
    teacher, alone = (shelf.put(number, shelf.resolved("gat", "normal", size)) for number, size in
                      ((1, "teacher"), (2, "student")))  # fmt: skip
    run = shelf.resolved("gat", "knowledge_distillation", "student")
    run = replace(run, mode=replace(run.mode, teacher=str(teacher.path), without_teacher=str(alone.path)))
    return shelf, run, shelf.put(3, run)


def test_runs_that_were_moved_together_find_each_other(distilled: tuple[Shelf, Any, RunFolder]) -> None:
    shelf, run, folder = distilled
    assert relocate_prerequisites(run, folder.path) is run
    moved = shelf.folder / "elsewhere"
    (shelf.folder / "runs").rename(moved)
    found = relocate_prerequisites(run, moved / folder.run_id)
    assert found.mode.teacher == str(moved / Path(run.mode.teacher).name)
    assert found.mode.without_teacher == str(moved / Path(run.mode.without_teacher).name)


def test_what_a_run_can_do_without_is_left_out_aloud_where_it_is_gone(distilled: tuple[Shelf, Any, RunFolder]) -> None:
    _, run, _ = distilled
    assert without_missing_prerequisites(run) == (run, [])
    shutil.rmtree(run.mode.teacher)
    shutil.rmtree(run.mode.without_teacher)
    kept, notices = without_missing_prerequisites(run)
    assert (kept.mode.teacher, kept.mode.without_teacher) == (run.mode.teacher, "")
    assert notices == [f"without teacher: {run.mode.without_teacher} is gone, so the run goes on without"]
    with pytest.raises(RunError, match=r"teacher_normal.* is gone\.\nBring its folder back"):
        load_finished(Path(run.mode.teacher))


def test_a_run_does_not_import_the_task_that_a_run_names_on_which_it_builds(
    distilled: tuple[Shelf, Any, RunFolder], tmp_path: Path
) -> None:
    _, run, _ = distilled
    task, mark = write_task(tmp_path / "code"), tmp_path / "MARK"
    task.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n{task.read_text()}")
    teacher = RunFolder(Path(run.mode.teacher))
    config = teacher.config() | {"task": "my_file.py:MyTask"}
    config["paths"] |= {"code_dir": str(task.parent)}
    (teacher.path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(RunError) as caught:
        finished_model(run, "teacher")
    assert str(caught.value) == (
        f"A run builds on runs of its own task: {teacher.path} is of my_file.py:MyTask.\nName a run of can."
    )
    assert not mark.exists()


def test_data_without_files_are_known_by_the_numbers_of_their_samples(tmp_path: Path) -> None:
    class Made(Task):
        count = 8

        def datasets(self) -> Mapping[str, Any]:
            return {"train": list(range(self.count)), "test": [1]}

    for _ in range(2):
        check_inputs_unchanged(RunFolder(tmp_path), Made())
    Made.count = 9
    with pytest.raises(RunError, match="the data that it began with"):
        check_inputs_unchanged(RunFolder(tmp_path), Made())
