import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.errors import CheckpointError
from can_train.reporter import SilentReporter
from can_train.training.loading import Checkpoints
from can_train.training.train import make_session, train
from fakes.line_fit import Notices, StoppedTask, fixed, line_parts, train_line


def state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((4,), value)}, "progress": {"step": int(value), "best": float("inf")}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), step=1)
    checkpoints.save(state(2), step=2)
    return tmp_path


def value(loaded: dict[str, Any] | None) -> float:
    assert loaded is not None
    return float(loaded["model"]["weight"][0])


def test_nothing_is_loaded_where_nothing_was_saved(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").load(SilentReporter()) is None


def test_the_newest_is_loaded(folder: Path) -> None:
    assert value(Checkpoints(folder).load(SilentReporter())) == 2


def test_only_the_newest_and_the_one_before_it_are_kept(folder: Path) -> None:
    Checkpoints(folder).save(state(3), step=3)
    assert sorted(path.name for path in folder.glob("*.pt")) == ["step-00000002.pt", "step-00000003.pt"]


def test_the_same_step_may_be_saved_again_and_again(folder: Path) -> None:
    for number in (5, 6, 7):
        Checkpoints(folder).save(state(number), step=2)
        assert value(Checkpoints(folder).load(SilentReporter())) == number
    assert len(list(folder.glob("*.pt"))) == 2


def torn(data: bytes) -> bytes:
    return data[:-7]


def flipped(data: bytes) -> bytes:
    return data[:500] + bytes([data[500] ^ 1]) + data[501:]


@pytest.mark.parametrize("damage", [torn, flipped, lambda _: b""])
def test_a_damaged_newest_gives_way_to_the_one_before_it_aloud(folder: Path, damage: Any) -> None:
    newest = folder / "step-00000002.pt"
    newest.write_bytes(damage(newest.read_bytes()))
    reporter = Notices()
    assert value(Checkpoints(folder).load(reporter)) == 1
    assert "step-00000002.pt is damaged" in reporter.texts[0]


def test_two_damaged_ones_are_an_error_with_a_remedy(folder: Path) -> None:
    for path in folder.glob("*.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"No checkpoint of this run is whole.*\n.*again"):
        Checkpoints(folder).load(SilentReporter())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"checkpoints": [{"file": 1}]}'])
def test_a_manifest_that_is_none_is_an_error(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest cannot be read"):
        Checkpoints(folder).load(SilentReporter())


def test_a_damaged_one_is_not_kept_as_the_one_before_the_next(folder: Path) -> None:
    newest = folder / "step-00000002.pt"
    newest.write_bytes(torn(newest.read_bytes()))
    checkpoints = Checkpoints(folder)
    checkpoints.load(SilentReporter())
    checkpoints.save(state(5), step=2)
    assert value(checkpoints.load(SilentReporter())) == 5
    newest.unlink()
    assert value(checkpoints.load(SilentReporter())) == 1


def test_a_write_that_fails_leaves_the_checkpoints_as_they_were(folder: Path) -> None:
    (folder / "step-00000003.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot be written.*\n.*resume the run"):
        Checkpoints(folder).save(state(3), step=3)
    assert value(Checkpoints(folder).load(SilentReporter())) == 2
    assert not list(folder.glob(".*.tmp"))


def test_a_crash_between_file_and_manifest_leaves_the_checkpoints_as_they_were(folder: Path) -> None:
    manifest = (folder / "manifest.json").read_bytes()
    before = (folder / "step-00000001.pt").read_bytes()
    Checkpoints(folder).save(state(3), step=3)
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "step-00000001.pt").write_bytes(before)
    assert value(Checkpoints(folder).load(SilentReporter())) == 2
    Checkpoints(folder).save(state(4), step=3)
    assert value(Checkpoints(folder).load(SilentReporter())) == 4


def test_code_in_a_checkpoint_is_never_run(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (folder / "trapped",))

    Checkpoints(folder).save({"model": Trap()}, step=9)
    with pytest.raises(CheckpointError, match="tensors and plain values only"):
        Checkpoints(folder).load(SilentReporter())
    assert not (folder / "trapped").exists()


def zipped(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("data", [b"", b"text", zipped(state(3))[:500], zipped([1, 2]), zipped({"model": 1})])
def test_what_is_no_checkpoint_although_its_checksum_is_right_is_an_error_with_a_remedy(
    folder: Path, data: bytes
) -> None:
    entry = {"file": "other.pt", "sha256": hashlib.sha256(data).hexdigest(), "step": 3}
    (folder / "other.pt").write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps({"checkpoints": [entry]}))
    for read in (Checkpoints(folder).newest, lambda: Checkpoints(folder).load(SilentReporter())):
        with pytest.raises(CheckpointError, match=r"other.pt.*\nCopy the run once more"):
            read()


def test_a_checkpoint_of_another_version_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    Checkpoints(folder).save({"format": 99}, step=3)
    assert manifest["checkpoints"][0]["step"] == 2
    with pytest.raises(CheckpointError, match="format 99"):
        Checkpoints(folder).load(SilentReporter())


@pytest.mark.parametrize("entry", [{"file": 1, "sha256": "", "step": 1}, {"file": "x", "sha256": "", "step": "many"}])
def test_a_manifest_of_other_values_is_an_error(folder: Path, entry: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps({"checkpoints": [entry]}))
    with pytest.raises(CheckpointError, match="manifest cannot be read"):
        Checkpoints(folder).load(SilentReporter())


TRAINED = {"epochs": 4, "batch_size": 10, "checkpoint_every": 8}


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object], *, of: int = 0) -> None:
    """Changes the content of a checkpoint, the newest by default, and has the manifest fit it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = manifest["checkpoints"][of]
    path = folder / entry["file"]
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], object]:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


WRONG_CONTENTS: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"no {key}": lambda state, key=key: state.pop(key) for key in  # type: ignore[misc]
       ("model", "best", "optimization", "progress", "metrics_lines", "trainable", "randomness", "micro_batches",
        "device", "other_ranks", "thawed_plan")},
    "a model of another shape": put(torch.zeros(3, 3), "model", "0.weight"),
    "a model without a weight": lambda state: state["model"].pop("0.weight"),
    "best weights of another shape": put(torch.zeros(3, 3), "best", "0.weight"),
    "a progress without its steps": lambda state: state["progress"].pop("step"),
    "a negative progress": put(-3, "progress", "step"),
    "a progress of text": put("far", "progress", "epoch"),
    "a list as progress": put([], "progress"),
    "no optimizer": put({}, "optimization", 0, "optimizer"),
    "a moment of another shape": put(torch.zeros(3, 3), "optimization", 0, "optimizer", "state", 0, "exp_avg"),
    "no moments' decay": lambda state: state["optimization"][0]["optimizer"]["param_groups"][0].pop("betas"),
    "a text as rate": put("fast", "optimization", 0, "optimizer", "param_groups", 0, "lr"),
    "a text as tick": put("late", "optimization", 0, "scheduler", "last_epoch"),
    "no back-off": put({"limit": "none", "x": 1}, "micro_batches", 0, "backoff"),
    "another randomness": put(torch.zeros(3), "randomness", "torch"),
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG_CONTENTS.values(), ids=WRONG_CONTENTS)
def test_a_checkpoint_of_wrong_content_gives_way_to_the_one_before_it_aloud(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    undisturbed = train_line(tmp_path / "undisturbed", **TRAINED)
    stopped = line_parts(tmp_path, StoppedTask(after=20), micro_batch_size=10, **TRAINED)
    checkpoints = stopped.folder.checkpoints_path
    with pytest.raises(SystemExit), stopped.stops.installed():
        train(make_session(stopped, fixed(0.5)))
    rewrite(checkpoints, change)
    stopped.folder.metrics_path.write_bytes(b"\xff\xfe garbage\n" + stopped.folder.metrics_path.read_bytes())
    session = train_line(tmp_path, **TRAINED)
    assert any("damaged" in text for text in session.reporter.texts)  # type: ignore[attr-defined]
    assert "Continuing at step 18" in session.reporter.texts  # type: ignore[attr-defined]
    for one, other in zip(session.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_another_checkpoint_a_wrong_content_is_an_error_and_stays(tmp_path: Path) -> None:
    stopped = line_parts(tmp_path, StoppedTask(after=20), micro_batch_size=10, **TRAINED)
    with pytest.raises(SystemExit), stopped.stops.installed():
        train(make_session(stopped, fixed(0.5)))
    checkpoints = stopped.folder.checkpoints_path
    for each in (0, 1):
        rewrite(checkpoints, put(torch.zeros(3, 3), "model", "0.weight"), of=each)
    manifest = (checkpoints / "manifest.json").read_text()
    with pytest.raises(CheckpointError, match=r"No checkpoint of this run is whole"):
        train_line(tmp_path, **TRAINED)
    assert (checkpoints / "manifest.json").read_text() == manifest
