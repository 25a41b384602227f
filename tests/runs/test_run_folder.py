"""The folder of a run, and its name."""

import errno
import os
from pathlib import Path

import pytest

from can_train.config.compose import RunRequest, resolve
from can_train.errors import RunError
from can_train.io import records
from can_train.runs import run_folder
from can_train.runs.run_folder import RunFolder, new_folders, new_run_ids, short_name

TAKEN, FREE = "20260101-000000-key-0001", "20260101-000000-key-0002"


def test_runs_of_one_second_differ_in_their_ids_and_short_names() -> None:
    ids = new_run_ids([f"key{number % 3}" for number in range(1000)])
    assert len({*ids}) == len({short_name(run_id) for run_id in ids}) == 1000


def test_folders_of_a_submission_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolve(RunRequest(model="vgae", dataset="synthetic", values={"paths.runs_dir": str(tmp_path)}))
    draws = iter([[TAKEN, FREE], [FREE, "20260101-000000-key-0003"]])
    (tmp_path / TAKEN).mkdir()
    monkeypatch.setattr(run_folder, "new_run_ids", lambda keys: next(draws))
    assert [folder.run_id for folder in new_folders([run, run])] == [FREE, "20260101-000000-key-0003"]


def test_a_folder_that_cannot_be_written_to_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(records, "write_json_atomic", fail)
    with pytest.raises(RunError, match=r"No space left on device\.\nFree some space"):
        RunFolder.create(tmp_path, "key", {})
    assert not [*tmp_path.iterdir()]


def test_a_new_run_whose_id_is_taken_gets_another_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter([TAKEN, TAKEN, FREE])
    (tmp_path / TAKEN).mkdir()
    monkeypatch.setattr(run_folder, "new_run_id", lambda key: next(ids))
    assert RunFolder.create(tmp_path, "key", {}).run_id == FREE
    with pytest.raises(RunError, match=r"File exists\.\nGive the same line again"):
        RunFolder.create(tmp_path, "key", {}, run_id=FREE)
