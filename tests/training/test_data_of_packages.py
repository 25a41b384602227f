"""Data of other packages that docs/tasks.md shows, on files that are made here."""

import gc
import io
import json
import random
import re
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from can_train import Task
from can_train.training import streams
from can_train.training.sample_task import TaskContext
from can_train.training.session import Session
from can_train.training.train import make_session, train
from fakes.line_fit import fixed, line_parts

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text()
EPOCH = 12 * 16


def shown(name: str) -> type[Task]:
    """Returns a task of the page."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if f"class {name}(" in code]
    names: dict[str, Any] = {"__name__": "shown"}
    exec(code, names)
    task: type[Task] = names[name]
    return task


def session_of(folder: Path, kind: type[Task], workers: int, stop: int = 0, **settings: Any) -> Session:
    """Makes a session; the run receives a signal in step `stop`."""

    class Stopped(kind):  # type: ignore[misc, valid-type]
        def before_step(self, *arguments: Any) -> None:
            if session.progress.step + 1 == stop:
                session.stops.received = signal.SIGTERM

    of_stream = kind.__name__ != "Pictures" and settings.get("streaming", True)
    context = TaskContext(
        settings=kind.Settings(**settings), num_workers=str(workers), epoch_samples=EPOCH if of_stream else 0
    )
    given = {"batch_size": 16, "find_batch_size": "off", "epochs": 2}
    task: Any = Stopped(context)
    session = make_session(line_parts(folder, task, **given), fixed(0.5))  # type: ignore[arg-type]
    return session


def trained(session: Session) -> Tensor:
    train(session)
    return torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()])


def assert_the_same_bits(folder: Path, kind: type[Task], **settings: Any) -> None:
    """Trains without and with workers, and killed and resumed."""
    whole = trained(session_of(folder / "0", kind, 0, **settings))
    assert torch.equal(trained(session_of(folder / "2", kind, 2, **settings)), whole)
    with pytest.raises(SystemExit):
        trained(session_of(folder / "parts", kind, 2, stop=17, **settings))
    assert torch.equal(trained(session_of(folder / "parts", kind, 0, **settings)), whole)


@pytest.fixture(autouse=True)
def few_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LOOKED", 20)


def test_pictures_in_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    drawn = np.random.default_rng(0)
    for name, count in (("train", 20), ("validation", 5)):
        for kind in ("cats", "dogs"):
            folder = tmp_path / "pictures" / name / kind
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(0, 256, (6, 8, 3), dtype=np.uint8)
                image.fromarray(pixels).save(folder / f"{number}.png")
    whole = trained(session_of(tmp_path / "0", shown("Pictures"), 0, root=str(tmp_path / "pictures")))
    ahead = trained(session_of(tmp_path / "2", shown("Pictures"), 2, root=str(tmp_path / "pictures")))
    assert torch.equal(whole, ahead)


def write_tar(path: Path, samples: int, drawn: np.random.Generator) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            values = io.BytesIO()
            np.save(values, drawn.normal(size=8).astype(np.float32))
            for suffix, content in (("npy", values.getvalue()), ("cls", str(drawn.integers(3)).encode())):
                member = tarfile.TarInfo(f"{number:05}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


# Its generators leave files to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("files", [3, 10])
def test_tar_files_of_webdataset(files: int, tmp_path: Path) -> None:
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    drawn = np.random.default_rng(0)
    for number in range(files):
        write_tar(tmp_path / f"train-{number:03}.tar", 220 // files + number, drawn)
    write_tar(tmp_path / "validation.tar", 20, drawn)
    assert_the_same_bits(tmp_path, shown("Tars"), root=str(tmp_path), files=files)
    gc.collect()


@pytest.mark.parametrize("settings", [{"streaming": False}, {}, {"buffer": 30}], ids=str)
def test_rows_of_hugging_face(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets", reason="datasets is not installed: it brings pyarrow, 0.2 GB")
    drawn = random.Random(0)
    for name, count in (("train-0", 70), ("train-1", 90), ("train-2", 50), ("validation", 20)):
        rows = [{"x": [drawn.random() for _ in range(3)], "y": drawn.random()} for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert_the_same_bits(tmp_path, shown("Rows"), root=str(tmp_path), **settings)
