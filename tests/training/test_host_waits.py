"""The host does not wait for the device within a step: it gives the device the next step while one is computed."""

import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from can_train.cli.main import main
from can_train.errors import FailedRunError
from can_train.fit.micro_batcher import LateNumbers, MicroBatcher
from can_train.training import train as training
from can_train.training.session import Session
from can_train.training.train import make_session, take_step, train
from fakes.host_waits import HostWaits
from fakes.line_fit import LineBatch, LineTask, fixed, line_parts

STEPS = 4
# The losses of the step before, which the device has computed meanwhile.
LATE_READING = "can_train/fit/micro_batcher.py:__getitem__"


def waits_of(folder: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """Trains by a command line; returns the waits of its steps 2 to 5 by place, and their number of micro-batches."""
    waits, parts, steps, take_step = HostWaits(), 0, 0, training.take_step

    def watched(session: Session, rows: NDArray[np.int64], **options: Any) -> None:
        nonlocal parts, steps
        steps += 1
        if steps == 1:
            take_step(session, rows, **options)
            return
        before = session.progress.epoch_parts
        waits.add([*session.model.parameters(), *session.model.buffers()])
        with waits:
            take_step(session, rows, **options)
        parts += session.progress.epoch_parts - before
        if steps == 1 + STEPS:
            session.stop_signal = signal.SIGTERM

    monkeypatch.setattr(training, "take_step", watched)
    places = [f"--{name}={folder / name}" for name in ("runs-dir", "state-dir")]
    assert main([*line.split(), "--epochs", "9", "--dataset", "synthetic", "--device", "cpu", *places]) == 143
    return waits.waits, parts


CAN = "--batch-size 4 --micro-batch-size 2 --set dataset.synthetic.seconds=20 --model"
WORDS = "--task seq2seq --batch-size 8 --micro-batch-size 4 --set dataset.synthetic.words=200 --set model.hidden=16"
LINES = {
    "gat": f"{CAN} gat --size student",
    "vgae": f"{CAN} vgae --size student",
    "seq2seq": WORDS,
    "transformer": f"{WORDS} --model transformer --set model.heads=2",
    "bendr": "--task bendr --batch-size 4 --micro-batch-size 2 --set model.hidden=16 --set model.layers=1",
    "muon": "--task muon --batch-size 8 --micro-batch-size 4 --set model.hidden=8",
    "tracknet": "--task tracknet --batch-size 4 --micro-batch-size 2 --precision fp32 --set model.width=4 "
    "--set model.groups=2 --set model.levels=2 --set dataset.width=64 --set dataset.height=36 "
    "--set dataset.synthetic.width=64",
}


@pytest.fixture(autouse=True)
def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of the first, second, fourth, eighth (and so on) split batch read gradients."""
    monkeypatch.setattr(MicroBatcher, "is_compared", lambda batcher, result: False)


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_step_of_a_task_waits_for_the_device_only_to_read_the_losses_before(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, parts = waits_of(tmp_path, line, monkeypatch)
    assert parts >= 2 * STEPS
    # Means, and in some tasks denominators, of each optimizer update; those of the last step are not read yet.
    assert set(waits) == {LATE_READING}, waits
    assert waits[LATE_READING] % (STEPS - 1) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which counts its own waits")
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_gpu_counts_no_waits_in_a_step(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, take_step, told = 0, training.take_step, list[str]()

    def watched(session: Session, rows: NDArray[np.int64], **options: Any) -> None:
        nonlocal steps
        steps += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if steps > 1 else "default")
            take_step(session, rows, **options)
            torch.cuda.set_sync_debug_mode("default")
        told.extend(str(warning.message) for warning in caught)
        if steps == 1 + STEPS:
            session.stop_signal = signal.SIGTERM

    monkeypatch.setattr(training, "take_step", watched)
    places = [f"--{name}={tmp_path / name}" for name in ("runs-dir", "state-dir")]
    assert main([*line.split(), "--epochs", "9", "--dataset", "synthetic", "--device", "cuda", *places]) == 143
    assert not [text for text in told if "synchronizing" in text]


def test_the_losses_of_a_step_are_read_after_the_next_step(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, batch_size=10)
    with parts.meter.active():
        session = make_session(parts, fixed(0.5))
        rows = session.epochs.steps(0)
        take_step(session, rows[0], ends_epoch=False)
        assert (session.progress.step, session.progress.epoch_denominators) == (1, {})
        take_step(session, rows[1], ends_epoch=False)
        assert session.progress.epoch_denominators == {"error": 10.0}
        session.read_losses()
        assert session.progress.epoch_denominators == {"error": 20.0}


class DivergingTask(LineTask):
    """Points whose loss is not a number from the fourth step on."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        batch = super().logical_batch(rows, device, dtype, generator)
        if self.session is not None and self.session.progress.step >= 3:
            batch._x = batch._x * torch.nan
        return batch

    session: Session | None = None


def test_weights_of_a_step_whose_loss_is_no_number_are_never_saved(tmp_path: Path) -> None:
    task = DivergingTask()
    parts = line_parts(tmp_path, task, batch_size=10, checkpoint_every=1)
    session = task.session = make_session(parts, fixed(0.5))
    with pytest.raises(FailedRunError, match="no longer finite: step 3,"):
        train(session)
    saved = session.checkpoints.load(session.reporter)
    assert saved is not None
    assert saved["progress"]["step"] == 3
    assert all(weights.isfinite().all() for weights in saved["model"].values())


def test_numbers_are_brought_to_the_host_together() -> None:
    numbers = LateNumbers({"a": torch.tensor(1.5), "b": 4, "c": torch.tensor(3)}).times(2.0)
    with HostWaits() as waits:
        waits.add([*numbers._given.values()])
        numbers.start_copy()
        assert not waits.waits
        assert dict(numbers) == {"a": 3.0, "b": 8.0, "c": 6.0}
        assert waits.waits == {LATE_READING: 1}
