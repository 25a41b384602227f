"""Samples are read by other processes ahead of the computation, and come to the same bits."""

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from can_train import Task
from can_train.errors import ConfigError, DoesNotFitError, FailedRunError, TaskError
from can_train.training import read_ahead
from can_train.training.loading import Checkpoints
from can_train.training.read_ahead import Failed, Read, SampleReader, Shape, is_in_memory
from can_train.training.sample_task import TaskContext
from can_train.training.seeded_samples import read_seeded, sample_seeds
from can_train.training.session import Session
from can_train.training.train import make_session, train
from fakes.line_fit import fixed, line_parts
from fakes.processes import running_children
from fakes.sample_tasks import TwoPhases, TwoTerms, Words

KINDS = (Words, TwoTerms, TwoPhases)


class Augmented:
    """A data set that draws from all global generators, and notes the process that reads."""

    def __init__(self, samples: Sequence[Tensor], notes: Path | None = None) -> None:
        self._samples, self._notes = samples, notes

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Tensor:
        if index >= len(self):
            raise IndexError(index)
        if self._notes is not None:
            with self._notes.open("a") as file:
                file.write(f"{os.getpid()} {torch.get_num_threads()}\n")
        return self._samples[index] + random.random() + np.random.random() + torch.rand(())  # noqa: NPY002


def augmented(kind: type[Task], notes: Path | None = None) -> type[Task]:
    """Returns a task whose samples are read from an augmented data set."""

    class OnDisk(kind):  # type: ignore[misc, valid-type]
        def datasets(self) -> Mapping[str, Sequence[Any]]:
            return {name: Augmented(samples, notes) for name, samples in super().datasets().items()}

        def model(self) -> nn.Module:
            model = super().model()
            return model if kind is TwoPhases else nn.Sequential(model, nn.Dropout(0.1))

    return OnDisk


def trained(folder: Path, kind: type[Task], workers: int | str, **training: Any) -> Session:
    context = TaskContext(settings=kind.Settings(), num_workers=str(workers))
    given_settings = {"precision": "fp64", "batch_size": 16, "find_batch_size": "off", "epochs": 3, **training}
    session = make_session(line_parts(folder, kind(context), **given_settings), fixed(0.5))  # type: ignore[arg-type]
    train(session)
    assert running_children() == []
    return session


def each(read: Callable[[int, int], Any]) -> Read:
    """Reads samples one by one."""

    def read_all(rows: Sequence[int], seeds: Sequence[int], failed: Failed | None = None) -> list[Any]:
        return [read(row, seed) for row, seed in zip(rows, seeds, strict=True)]

    return read_all


def weights(session: Session) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()])


@pytest.mark.parametrize("micro_batch_size", [0, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_number_of_workers_gives_the_same_bits(kind: type[Task], micro_batch_size: int, tmp_path: Path) -> None:
    task = augmented(kind)
    in_line = trained(tmp_path / "0", task, 0, micro_batch_size=micro_batch_size)
    for workers in (1, 3):
        ahead = trained(tmp_path / str(workers), task, workers, micro_batch_size=micro_batch_size)
        assert torch.equal(weights(ahead), weights(in_line))
        assert ahead.progress.best_loss == in_line.progress.best_loss


def test_samples_are_read_by_other_processes_with_one_thread_as_in_line(tmp_path: Path) -> None:
    readers = {}
    for workers in (0, 2):
        notes = tmp_path / f"notes-{workers}"
        trained(tmp_path / str(workers), augmented(Words, notes), workers, epochs=1)
        lines = [line.split() for line in notes.read_text().splitlines()]
        assert {threads for _, threads in lines} == {"1"}
        readers[workers] = [int(process) for process, _ in lines]
    assert set(readers[0]) == {os.getpid()}
    assert len(set(readers[2]) - {os.getpid()}) > 2, "those that count features, and those that train"
    # This process reads the samples of the plan alone.
    assert readers[2].count(os.getpid()) < readers[0].count(os.getpid()) - 40


def test_reading_ahead_draws_nothing_from_the_generators(tmp_path: Path) -> None:
    reader = SampleReader(each(lambda row, seed: row * 100 + seed), "2", size=lambda: 9, sets=list)
    states = []
    for requests in ([], [(range(9), range(9))]):
        torch.manual_seed(1)
        random.seed(1)
        with reader.ahead(requests):
            assert reader.take(range(9), range(9)) == [row * 101 for row in range(9)]
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1]


def test_reading_a_sample_leaves_the_generator_of_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    task = augmented(Words)()
    _ = task.sets
    seeds.clear()
    task.sample(3, seed=7)
    assert seeds == []


def test_a_sample_is_read_here_where_nobody_was_asked_for_it_and_kept_while_its_batch_is_computed() -> None:
    reader = SampleReader(each(lambda row, seed: (os.getpid(), row, seed)), "2", size=lambda: 9, sets=list)
    here = os.getpid()
    with reader.ahead([([1, 2], [5, 5]), ([3, 4], [6, 6])]):
        assert [process == here for process, *_ in reader.take([1, 2, 1, 1, 3], [5] * 5)] == [
            False,
            False,
            False,
            False,
            True,
        ]
        assert reader.take([3], [6])[0][0] != here
        assert reader.take([2], [5]) == [(here, 2, 5)], "its batch is over"


def test_a_long_training_holds_no_entry_of_samples_that_it_has_taken() -> None:
    read = each(lambda row, seed: (row, seed))
    shape = Shape(workers=2, chunk=2)
    requests = [(list(range(4)), [step] * 4) for step in range(50)]
    with read_ahead._ReadAhead(read, iter(requests), shape) as ahead:
        for rows, seeds in requests:
            for row, seed in zip(rows, seeds, strict=True):
                assert ahead.take(row, seed) == (row, seed)
        assert not ahead._sent
        assert len(ahead._held) <= 4 + 2


class Failing(Sequence[Tensor]):
    """A data set with one sample that cannot be read."""

    def __init__(self, act: Any) -> None:
        self._act = act

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        if index == 39 and os.getpid() != PARENT:
            self._act()
        return torch.zeros(2, 2, dtype=torch.float64)


PARENT = os.getpid()


def failing(act: Any) -> type[Task]:
    class Broken(Words):
        def datasets(self) -> Mapping[str, Sequence[Any]]:
            zeros = [torch.zeros(2, 2, dtype=torch.float64)] * 4
            return {"train": Failing(act), "validation": zeros}

    return Broken


def kill(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def fail() -> None:
    raise ValueError("no such picture")


def test_processes_that_give_no_sample_for_long_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_PATIENCE_S", 0.5)
    with pytest.warns(UserWarning, match=r"given none for 0\.5 s; the sample of row \d+ is waited for") as told:
        trained(tmp_path, failing(partial(time.sleep, 1.8)), 2, epochs=1)
    assert len([one for one in told if "is waited for" in str(one.message)]) <= 2, "one in training, one in a search"


def test_processes_that_cannot_be_started_are_an_error_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_files(loader: Any) -> Any:
        begun(loader)
        raise OSError(errno.EMFILE, "Too many open files")

    begun = DataLoader.__iter__
    monkeypatch.setattr(DataLoader, "__iter__", out_of_files)
    with pytest.raises(ConfigError, match=r"cannot be started: Too many open files\.\nRead with fewer of them"):
        trained(tmp_path, augmented(Words), 2)
    assert running_children() == []


def test_an_error_of_a_sample_names_the_sample(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as raised:
        trained(tmp_path, failing(fail), 2)
    assert "sample 39 of the set 'train': ValueError: no such picture" in str(raised.value)
    assert raised.value.traceback.splitlines()[-1] == "ValueError: no such picture"
    assert running_children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_calls_exit_does_not_end_a_run_well(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not workers:
        # This process fails as well.
        monkeypatch.setitem(globals(), "PARENT", 0)
    with pytest.raises(TaskError, match="sample 39 of the set 'train': SystemExit: 0"):
        trained(tmp_path, failing(partial(sys.exit, 0)), workers)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits an hour before slow samples are told, so that a worker that has ended must be noticed by itself."""
    monkeypatch.setattr(read_ahead, "_PATIENCE_S", 3600.0)


@pytest.mark.usefixtures("patient")
def test_a_worker_that_is_killed_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError) as raised:
        trained(tmp_path, failing(lambda: kill(signal.SIGKILL)), 2, epochs=2)
    assert str(raised.value) == (
        "A process that reads samples was killed: host memory is full, perhaps.\n"
        "Ask for more memory (--mem), or read with fewer processes (--num-workers)."
    )
    assert raised.value.details.of_host
    (folder,) = tmp_path.rglob("checkpoints")
    assert Checkpoints(folder).newest() is not None
    assert running_children() == []


@pytest.mark.usefixtures("patient")
def test_a_worker_that_crashes_is_told_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(FailedRunError, match="has crashed: SIGSEGV"):
        trained(tmp_path, failing(lambda: kill(signal.SIGSEGV)), 2)


def reader_of(setting: str, sets: Sequence[Any], seconds: float = 0.001) -> tuple[SampleReader, list[str]]:
    notices = list[str]()

    def read(row: int, seed: int) -> Tensor:
        if seconds:
            time.sleep(seconds)
        return torch.zeros(1000)

    return SampleReader(each(read), setting, size=lambda: 99, sets=lambda: sets, notice=notices.append), notices


class OnDisk:
    """Stands for a data set that reads files."""

    def __init__(self, held: Any = None) -> None:
        self.held, self.table = held, np.zeros(100)


def test_auto_leaves_reading_to_others_only_where_it_takes_time_and_can_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "available_cores", lambda: 3)
    with (tmp_path / "file").open("w") as file:
        cases = {"slow": [OnDisk()], "open file": [OnDisk(file)], "in memory": [[1], torch.zeros(3), ()]}
        workers = {name: reader_of("auto", sets)[0].shape(32).workers for name, sets in cases.items()}
    assert workers == {"slow": 3, "open file": 0, "in memory": 0}
    assert reader_of("auto", [OnDisk()], seconds=0.0)[0].shape(32).workers == 0
    assert reader_of("0", [OnDisk()])[0].shape(32).workers == 0
    assert reader_of("5", [[1]])[0].shape(32).workers == 5
    monkeypatch.setattr(read_ahead, "available_cores", lambda: 1)
    assert reader_of("auto", [OnDisk()])[0].shape(32).workers == 0


def test_memory_that_is_too_small_is_told_before_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "available_cores", lambda: 4)
    # Of 4,000 bytes each; 32 are computed, and each worker needs room for 3.
    monkeypatch.setattr(read_ahead, "_room_bytes", lambda: 40 * 4200)
    reader, notices = reader_of("auto", [OnDisk()])
    assert reader.shape(32).workers == 2
    assert notices == ["Samples are read by 2 processes in place of 4: 164 KiB are free for them"]
    asked, _ = reader_of("4", [OnDisk()])
    with pytest.raises(ConfigError) as raised, asked.ahead([(range(32), range(32))]):
        pass
    assert str(raised.value).splitlines()[1:] == [
        "Give --num-workers 0, or more shared memory (docker run --shm-size 8g)."
    ]


@settings(max_examples=200, deadline=None)
@given(workers=st.integers(1, 64), batch=st.integers(1, 5000), sample=st.integers(1, 2**24), room=st.integers(0, 2**36))
def test_what_is_read_ahead_stays_within_the_room(workers: int, batch: int, sample: int, room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "_room_bytes", lambda: room)
        shape = read_ahead._shape_for(workers, batch, sample)
    assert 0 <= shape.workers <= workers
    if shape.workers:
        held = batch + shape.workers * shape.chunk * (shape.chunks_ahead + 1)
        assert held * sample <= room


LEAVES = st.one_of(
    st.integers(), st.text(), st.none(), st.binary(),
    st.builds(
        lambda shape, dtype, strided: torch.arange(float(np.prod(shape))).reshape(shape).to(dtype).swapaxes(0, -1)
        if strided else torch.ones(shape).to(dtype),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
        st.booleans(),
    ),
    st.builds(np.ones, st.lists(st.integers(0, 3), max_size=3), st.sampled_from([np.float64, np.int16])),
)  # fmt: skip
SAMPLES = st.recursive(LEAVES, lambda inner: st.one_of(st.tuples(inner, inner), st.dictionaries(st.text(), inner)))


@settings(max_examples=200, deadline=None)
@given(
    samples=st.one_of(
        st.lists(SAMPLES, max_size=4),
        SAMPLES.map(lambda sample: [sample] * 3),
        st.tuples(LEAVES, LEAVES).map(lambda pair: [{"x": pair[0], "y": [pair[1]]}, {"x": pair[1], "y": [pair[0]]}]),
    ),
    in_pipe=st.booleans(),
)
def test_samples_come_from_a_worker_as_they_were(samples: list[Any], in_pipe: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "_IN_PIPE_BYTES", 2**16 if in_pipe else 0)
        assert_alike(read_ahead._unpack(read_ahead._pack(samples)), samples)


def assert_alike(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
        one.copy_(one.clone())  # It can be written to
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, strict=True)
    elif isinstance(one, list | tuple):
        for left, right in zip(one, other, strict=True):
            assert_alike(left, right)
    elif isinstance(one, dict):
        assert_alike([*one.items()], [*other.items()])
    else:
        assert one == other


def test_samples_that_cannot_be_pickled_are_read_in_line_or_told() -> None:
    def reader(setting: str) -> SampleReader:
        def read(row: int, seed: int) -> Any:
            time.sleep(0.001)
            return lambda: row

        return SampleReader(each(read), setting, size=lambda: 9, sets=lambda: [OnDisk()])

    assert reader("auto").shape(4).workers == 0
    with pytest.raises(ConfigError) as raised:
        reader("2").shape(4)
    assert str(raised.value).startswith("Samples cannot be read by other processes: they cannot be pickled (")
    assert str(raised.value).endswith("--num-workers 2.\nGive --num-workers 0.")


def test_a_row_that_is_drawn_several_times_is_augmented_each_time() -> None:
    rows = np.array([4, 2, 4, 4])
    seeds = sample_seeds(rows, torch.Generator().manual_seed(3))
    assert len(set(seeds)) == 4
    # The rows of a batch have the seeds that they have alone.
    assert sample_seeds(np.array([2, 4]), torch.Generator().manual_seed(3)) == [seeds[1], seeds[0]]
    read = read_seeded(rows.tolist(), seeds, Augmented(torch.zeros(5)).__getitem__)
    assert len({float(value) for value in read}) == 4


class Drawn(list[Tensor]):
    """A list that augments."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + torch.rand(())


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_a_list_with_code_of_its_own_is_read_as_a_data_set() -> None:
    assert not is_in_memory(Drawn([torch.zeros(2)]))
    for samples in ([torch.zeros(2)], (torch.zeros(2),), torch.zeros(2), Pair(torch.zeros(2), torch.ones(2))):
        assert is_in_memory(samples)
