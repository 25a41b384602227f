import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.errors import CheckpointError
from can_train.reporter import SilentReporter
from can_train.training.loading import Checkpoints
from fakes.line_fit import Notices


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
