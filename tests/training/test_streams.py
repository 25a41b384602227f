"""Samples that can only be iterated are trained on bit by bit alike, whoever reads them."""

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from can_train import Task
from can_train.errors import CanTrainError, TaskError
from can_train.training import sample_task, streams
from can_train.training.loading import Checkpoints
from can_train.training.sample_task import TaskContext
from can_train.training.session import Session
from can_train.training.streams import StreamParts
from can_train.training.train import make_session, train
from fakes.line_fit import fixed, line_parts
from fakes.processes import running_children
from fakes.sample_tasks import TwoPhases, Words
from fakes.streams import LOADED, Counted, Endless, Refilled, Sharded, Stateful, streamed

KINDS = (Counted, Sharded, Stateful, Refilled)


@pytest.fixture(autouse=True)
def few_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LOOKED", 20)


def session_of(folder: Path, kind: type[Task], workers: int | str, **training: Any) -> Session:
    context = TaskContext(settings=kind.Settings(), num_workers=str(workers))
    given = {"precision": "fp64", "batch_size": 16, "find_batch_size": "off", "epochs": 2, **training}
    return make_session(line_parts(folder, kind(context), **given), fixed(0.5))  # type: ignore[arg-type]


def trained(folder: Path, kind: type[Task], workers: int | str, **training: Any) -> Session:
    session = session_of(folder, kind, workers, **training)
    train(session)
    assert running_children() == []
    return session


def weights(session: Session) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()])


def stopped_after(kind: type[Task], steps: int) -> type[Task]:
    """Returns a task whose run receives a signal in a step."""

    class Stopped(kind):  # type: ignore[misc, valid-type]
        session: Any = None
        left = steps

        def before_step(self, *arguments: Any) -> None:
            Stopped.left -= 1
            if not Stopped.left:
                self.session.stops.received = signal.SIGTERM

    return Stopped


@pytest.mark.parametrize(
    ("kind", "stream", "micro_batch_size"), [*((Words, stream, 3) for stream in KINDS), (TwoPhases, Sharded, 0)]
)
def test_any_number_of_workers_gives_the_same_bits(
    kind: type[Task], stream: Any, micro_batch_size: int, tmp_path: Path
) -> None:
    task = streamed(kind, stream)
    in_line = trained(tmp_path / "0", task, 0, micro_batch_size=micro_batch_size)
    for workers in (1, 3):
        ahead = trained(tmp_path / str(workers), task, workers, micro_batch_size=micro_batch_size)
        assert torch.equal(weights(ahead), weights(in_line))
        assert ahead.progress.best_loss == in_line.progress.best_loss


def saved_reading(folder: Path) -> dict[str, Any]:
    """Returns the place in the stream of the last checkpoint."""
    (checkpoints,) = folder.rglob("checkpoints")
    state = Checkpoints(checkpoints).newest()
    assert state is not None
    return dict(state["reading"])


@pytest.mark.parametrize("stream", KINDS)
@pytest.mark.parametrize(("workers", "steps"), [((0, 0), 3), ((0, 3), 14), ((3, 1), 14)], ids=str)
def test_a_run_that_is_resumed_within_an_epoch_comes_to_the_same_bits(
    stream: Any, workers: tuple[int, int], steps: int, tmp_path: Path
) -> None:
    task = streamed(Words, stream)
    whole = trained(tmp_path / "whole", task, 0)
    kind = stopped_after(task, steps)
    session = session_of(tmp_path / "parts", kind, workers[0])
    kind.session = session  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        train(session)
    place = saved_reading(tmp_path / "parts")
    assert sum(place["counts"]) == (steps - 1) % 10 * 16
    if stream is Stateful:
        (state,) = place["states"]
        assert place["counts"][0] - 16 <= state[0] <= place["counts"][0]
    LOADED.clear()
    resumed = session_of(tmp_path / "parts", kind, workers[1])
    assert resumed.progress.step == steps
    train(resumed)
    assert torch.equal(weights(resumed), weights(whole))
    # Where a state restores the samples, it is used; its trial goes over the first few.
    brought = [place for place in LOADED if place > 10]
    assert bool(brought) == (stream is Stateful and workers == (0, 0))


def test_each_sample_of_a_stream_is_trained_once_in_an_epoch(tmp_path: Path) -> None:
    session = session_of(tmp_path, streamed(Words, Sharded), 0)
    task: Any = session.task
    rows = [int(row) for step in session.epochs.steps(1) for row in step]
    task.stream.open([0])
    samples = [task.sample(row) for row in sorted(rows)]
    lengths = sorted(len(sample) for sample in samples)
    (files,) = [task.stream.stream._files]
    assert lengths == sorted(len(sample) for file in files for sample in file)


def test_a_plan_says_how_a_stream_is_read(tmp_path: Path) -> None:
    told = {}
    for stream in KINDS:
        told[stream] = streamed(Words, stream)().notices()[0].removeprefix("The stream 'train' is ")
    plan = "; its first 20 samples stand for the rest in this plan"
    again = "resumed by reading it from the beginning of the epoch (a state_dict"
    assert told == {
        Counted: f"read by one process, and {again} is missing){plan}",
        Sharded: f"read in 8 parts, and {again} is missing){plan}",
        Stateful: f"read by one process, and resumed by its state_dict{plan}",
        Refilled: f"read by one process, and {again} does not bring the same samples back){plan}",
    }


def test_the_parts_of_a_stream_share_its_large_tensors_and_nothing_else() -> None:
    stream = Sharded([torch.zeros(3, 2), *(torch.zeros(2**12, 2, dtype=torch.float64) for _ in range(20))])
    parts = StreamParts(stream, 0)
    assert parts.count == 8
    first, second = (parts._cursor_at(0, part).stream for part in (0, 1))
    assert first._files is not second._files
    assert first._files[2][0] is second._files[2][0] is stream._files[2][0]
    assert first._files[0][0] is not second._files[0][0]


def test_a_plan_says_that_a_stream_cannot_be_repeated() -> None:
    class Timed(Counted):
        def __iter__(self) -> Iterator[Tensor]:
            yield from [sample + time.perf_counter() for sample in self._samples]

    (_, told) = streamed(Words, Timed)().notices()
    assert told.startswith("The stream 'train' begins with another sample each time, so that no run can be repeated")


def test_steps_per_epoch_is_the_length_of_an_endless_stream(tmp_path: Path) -> None:
    kind = streamed(Words, Endless)
    task: Any = kind(TaskContext(settings=kind.Settings(), epoch_samples=5 * 16))
    parts = line_parts(tmp_path, task, batch_size=16, find_batch_size="off", precision="fp64", epochs=2)
    session = make_session(parts, fixed(0.5))
    train(session)
    assert session.progress.step == 10


def test_a_plan_reads_the_first_samples_alone() -> None:
    kind = streamed(Words, Endless)

    class Both(kind):  # type: ignore[misc, valid-type]
        def datasets(self) -> Mapping[str, Any]:
            return {**super().datasets(), "validation": (torch.ones(2, 2) for _ in itertools.count())}

    context = TaskContext(settings=kind.Settings(), epoch_samples=10**6, sampling=True)
    task = Both(context)
    assert len(task.validation_rows) == 256
    assert (len(task.train_rows), len(np.unique(task.train_rows))) == (10**6, 20)
    assert np.array_equal(task.batch_features(task.train_rows)[:20], task.batch_features(task.train_rows)[20:40])


def test_the_largest_batch_is_searched_for_with_the_first_samples(tmp_path: Path) -> None:
    session = session_of(tmp_path, streamed(), 0, find_batch_size="max", lr_batch_size=2, min_steps_per_epoch=8,
                         batch_size=0)  # fmt: skip
    train(session)
    # 160 samples in at least 8 steps.
    assert (session.own_plan.phase_plan.logical_batch, session.progress.step) == (20, 16)


class Short(Counted):
    def __len__(self) -> int:
        return 10 + super().__len__()


class Empty(Endless):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (iter, "can be iterated once only"),
        (lambda samples: (sample for sample in samples), "can be iterated once only"),
        (Endless, "does not say how many samples it has: Endless has no __len__"),
        (Empty, "does not say how many"),
    ],
)
def test_a_stream_that_cannot_be_trained_on_is_an_error(make: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(CanTrainError, match=told) as raised:
        _ = streamed(Words, make)().train_rows
    assert raised.value.exit_code == 2


def test_a_stream_that_ends_early_is_an_error_with_its_length(tmp_path: Path) -> None:
    with pytest.raises(CanTrainError, match="ended after 160 of the 170 samples of an epoch"):
        trained(tmp_path, streamed(Words, Short), 0)


def test_a_stream_without_samples_is_an_error() -> None:
    task = streamed(Words, Empty)
    with pytest.raises(CanTrainError, match="has no samples") as raised:
        _ = task(TaskContext(settings=task.Settings(), epoch_samples=10)).train_rows
    assert raised.value.exit_code == 2


def test_a_stream_needs_a_validation_set_and_goes_without_a_sampler() -> None:
    class Alone(Words):
        def datasets(self) -> Mapping[str, Any]:
            return {"train": Counted(list(super().datasets()["train"]))}

    class Sampled(streamed(Words, Counted)):  # type: ignore[misc]
        def sampler(self, epoch: int) -> Any:
            return [1, 2]

    with pytest.raises(CanTrainError, match="needs a validation set beside it"):
        _ = Alone().sets
    with pytest.raises(CanTrainError, match="decides the order of its samples itself"):
        _ = Sampled().sets


def test_validation_and_test_samples_of_streams_are_read_once() -> None:
    class Streams(Words):
        def datasets(self) -> Mapping[str, Any]:
            sets = {name: Counted(list(samples)) for name, samples in super().datasets().items()}
            return {**sets, "validation": itertools.islice(sets["test"], 7)}

    task = Streams()
    assert [type(samples).__name__ for samples in task.sets.values()] == ["list", "list", "TrainingStream"]
    assert (len(task.validation_rows), len(task.test_sets["test"])) == (7, 10)


def test_validation_samples_that_do_not_fit_into_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Streams(Words):
        def datasets(self) -> Mapping[str, Any]:
            return {name: Counted(list(samples)) for name, samples in super().datasets().items()}

    monkeypatch.setattr(sample_task, "available_bytes", lambda: 10_000)
    with pytest.raises(CanTrainError, match=r"'validation' does not fit into memory, .*: 10 samples take 2\.5 KiB"):
        _ = Streams().sets


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_stream_names_its_place_whoever_reads_it(workers: int, tmp_path: Path) -> None:
    class Broken(Counted):
        def __iter__(self) -> Iterator[Tensor]:
            for number, sample in enumerate(super().__iter__()):
                if number == 70:
                    raise ValueError("a file is broken")
                yield sample

    with pytest.raises(TaskError, match=r"The stream 'train', .*a file is broken") as raised:
        trained(tmp_path, streamed(Words, Broken), workers)
    assert "epoch 1" in str(raised.value)


def test_samples_with_an_index_are_validated_with_beside_a_stream(tmp_path: Path) -> None:
    class Both(streamed(Words, Sharded)):  # type: ignore[misc]
        def datasets(self) -> Mapping[str, Any]:
            sets = super().datasets()
            return {**sets, "validation": Indexed(sets["validation"])}

    in_line, ahead = trained(tmp_path / "0", Both, 0), trained(tmp_path / "2", Both, 2)
    assert torch.equal(weights(in_line), weights(ahead))
    assert ahead.progress.best_loss == in_line.progress.best_loss


class Indexed:
    """A data set that is augmented when it is read."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Tensor:
        sample: Tensor = self._samples[index] + torch.rand(())
        return sample
