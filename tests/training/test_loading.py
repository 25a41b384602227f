from pathlib import Path

import pytest

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun
from can_train.errors import StateError
from can_train.training.loading import load_task
from fakes.line_fit import Notices


def run_with_state(folder: Path) -> ResolvedRun:
    values = {"dataset.synthetic.seconds": 5.0, "paths.state_dir": str(folder)}
    return resolve(RunRequest(model="gat", size="student", dataset="synthetic", device="cpu", values=values))


def test_data_that_cannot_be_kept_are_trained_on_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    scratch = tmp_path / "temporary"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    notices = Notices()
    task = load_task(run_with_state(tmp_path / "file"), notices)
    kept = load_task(run_with_state(tmp_path / "state"), Notices())
    assert "Prepared data are not kept." in "\n".join(notices.texts)
    rows = task.train_rows
    assert (task.batch_features(rows) == kept.batch_features(rows)).all()
    assert not list(scratch.glob("can-train-*"))


def test_data_for_which_no_folder_has_room_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    run = run_with_state(tmp_path / "file")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(StateError, match="The folder for prepared data cannot be written"):
        load_task(run, Notices())
