"""Streams: data sets that are iterated, and have no index. Their samples get numbers, so that training, planning and
resumption treat them as they treat the samples of a list.

An epoch is a pass of the stream. A stream that divides itself among the processes of a `DataLoader` is iterated in a
fixed number of parts, whichever process reads them, and its samples are taken from each part in turn. Their order does
not depend on the number of processes. Any other stream is one part.

The sample of a part depends on the run's seed, the epoch and its place there: the generators are seeded for each.
"""

import copy
import hashlib
import os
import pickle
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from statistics import median
from types import ModuleType
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as loader_worker

from can_train.errors import DataError
from can_train.fit.collate import leaves
from can_train.training.read_ahead import Failed, Look, Readers, SampleReader, Shape, checked, look_of

LOOKED: Final = 256  # Samples at the beginning of a stream, for plans, the search for a batch and checks
PARTS: Final = 8  # Parts of a stream that divides itself among processes
_LOOKED_BYTES: Final = 2**29  # The first samples stay in memory: fewer where they are large
_MOST_IDLE: Final = 1000  # Answers of a worker without samples
_PACKED: Final = 8  # Samples whose way from another process is tried
_LARGE_BYTES: Final = 2**16  # From this size on, a tensor in a stream is data
_CHECKED: Final = 3  # Samples before a state that is tried, and after it
_LIVE_EPOCHS: Final = 2  # Epochs of a part that are iterated at a time: read ahead, and trained

Address = tuple[int, int, int]
"""A sample of a stream: epoch, part, and place in the part."""
Take = Callable[[int, int, int], Any]
"""Returns the sample at an address."""
Asked = Callable[[str], AbstractContextManager[None]]
"""Opens a block for the code of a stream, and names it in errors."""


class End:
    """Stands behind the last sample of a part."""


def is_stream(samples: Any) -> bool:
    """Tells whether a data set can only be iterated."""
    has_index = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    # PyTorch's class has an index, which raises an error.
    return isinstance(samples, IterableDataset) or (hasattr(samples, "__iter__") and not has_index)


def length_of(stream: Any) -> int | None:
    """Returns the samples that a stream says it has; None: it does not say."""
    try:
        return len(stream)
    # An IterableDataset of PyTorch raises TypeError, and a class of another package perhaps NotImplementedError.
    except (TypeError, NotImplementedError):
        return None


class _Part:
    """The description of a process, in the place of PyTorch's: a stream asks for it to divide itself."""

    def __init__(self, number: int, parts: int, seed: int, stream: Any) -> None:
        self.id, self.seed, self.dataset = number, seed, stream
        self.divides, self._parts = False, parts

    @property
    def num_workers(self) -> int:
        """Parts of the stream."""
        self.divides = True
        return self._parts


class _Cursor:
    """One iteration of a part."""

    def __init__(self, stream: Any, address: tuple[int, int], parts: int, seed: int) -> None:
        self.stream, self._seed = stream, seed
        (self._epoch, self._part), self._parts = address, parts
        self.info = _Part(self._part, parts, seed, stream)
        self.index, self.has_ended = 0, False
        self._iterator: Iterator[Any] | None = None

    def load(self, index: int, state: Any) -> None:
        """Goes on before the sample at `index`, by the stream's state there."""
        self.stream.load_state_dict(copy.deepcopy(state))
        self.index = index

    def following(self) -> Any:
        """Returns the next sample, or `End`."""
        if self.has_ended:
            return End()
        with _as_part(self.info if self._parts > 1 else None):
            _seed(self._seed, self._epoch, *((self._part, self.index) if self.index else ()))
            try:
                if self._iterator is None:
                    if hasattr(self.stream, "set_epoch"):
                        self.stream.set_epoch(self._epoch)
                    self._iterator = iter(self.stream)
                sample = next(self._iterator)
            except StopIteration:
                self.has_ended = True
                return End()
        self.index += 1
        return sample


def _seed(*numbers: int) -> None:
    """Seeds the generators of the host. All parts begin alike: each takes its share of one shuffled list, say."""
    # For each sample: `np.random.SeedSequence` would take longer than all three generators.
    mixed = hashlib.blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=8).digest()
    seed = int.from_bytes(mixed, "little")
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


@contextmanager
def _as_part(info: _Part | None) -> Iterator[None]:
    """Shows a stream the part that it is asked for, in the block. Ranks are no further division: each reads all."""
    before, place = loader_worker._worker_info, {name: os.environ[name] for name in _ALONE if name in os.environ}
    loader_worker._worker_info = info  # type: ignore[assignment]
    # Without these variables a stream is alone: setting them for each sample would take longer than reading it.
    for name in place:
        os.environ[name] = _ALONE[name]
    try:
        yield
    finally:
        loader_worker._worker_info = before
        os.environ.update(place)


_ALONE: Final = {"RANK": "0", "WORLD_SIZE": "1"}
"""Variables by which a stream divides itself among ranks, with the values of a process that is alone."""


class StreamParts:
    """The parts of a stream, any of which is read from any place on: quickly in order, else from its beginning.

    Args:
        stream: The data set.
        seed: Of the run.
        divides: Whether it may be read in parts, and several times; otherwise it is read once.
    """

    def __init__(self, stream: Any, seed: int, *, divides: bool = True) -> None:
        self.stream, self._seed, self._is_copied = stream, seed, divides
        if not divides:
            self.count = 1
        self.first: Any = None  # The sample that the first iteration began with, once the parts are counted
        self._cursors: dict[tuple[int, int], _Cursor] = {}
        self._process = os.getpid()
        self.saved: dict[tuple[int, int], tuple[int, Any]] = {}  # Place and state that a part may go on from

    @cached_property
    def count(self) -> int:
        """Parts that the stream is read in."""
        shards = getattr(self.stream, "num_shards", None)
        parts = min(PARTS, shards) if isinstance(shards, int) else PARTS
        probed = _Cursor(self._copied(is_needed=False), (0, 0), parts, self._seed)
        self.first = probed.following()
        return parts if probed.info.divides else 1

    @cached_property
    def has_state(self) -> bool:
        """Whether the stream has a state that it can be resumed by."""
        return hasattr(self.stream, "state_dict") and hasattr(self.stream, "load_state_dict")

    @cached_property
    def restores(self) -> bool:
        """Whether the stream's state brings the same samples back: the state of a shuffle buffer, say, may not."""
        if not self.has_state:
            return False
        probed, again = (self._cursor_at(0) for _ in range(2))
        for _ in range(_CHECKED):
            probed.following()
        state = probed.stream.state_dict()
        if not _is_plain(state):
            return False
        expected = [probed.following() for _ in range(_CHECKED)]
        try:
            again.load(_CHECKED, state)
            pairs = [(sample, again.following()) for sample in expected]
        except Exception:  # noqa: BLE001 - the stream's own code decides what is raised
            return False
        return all(_alike(sample, restored) for sample, restored in pairs) and not isinstance(pairs[0][0], End)

    def _cursor_at(self, epoch: int, part: int = 0) -> _Cursor:
        stream = self._copied(is_needed=self.count > 1 or self.has_state)
        return _Cursor(stream, (epoch, part), self.count, self._seed)

    def _copied(self, *, is_needed: bool) -> Any:
        """Copies the stream: a generator that it has begins alike each time. Where it is iterated several times at
        once, each of them needs an epoch and a state, too.
        """
        if not self._is_copied:
            return self.stream
        try:
            return copy.deepcopy(self.stream, _large_in(self.stream))
        except Exception as error:
            if not is_needed:
                return self.stream
            raise DataError("A stream that divides itself among processes, or has a state, cannot be copied",
                            value=f"{type(self.stream).__name__}: {type(error).__name__} {error}",
                            remedy="Open files and connections in its __iter__") from error  # fmt: skip

    def read(self, epoch: int, part: int, index: int) -> Any:
        """Returns a sample of a part, or `End` behind its last one."""
        if self._process != os.getpid():
            # Files that another process has opened have one position for both.
            self._cursors, self._process = {}, os.getpid()
        cursor = self._cursors.get((epoch, part))
        place, state = self.saved.get((epoch, part), (0, None))
        is_nearer = 0 < place <= index and (cursor is None or cursor.index < place or cursor.index > index)
        if cursor is None or cursor.index > index or is_nearer:
            cursor = self._cursors[epoch, part] = self._cursor_at(epoch, part)
            if is_nearer:
                cursor.load(place, state)
            for late in sorted(key for key in self._cursors if key[1] == part)[:-_LIVE_EPOCHS]:
                if late != (epoch, part):
                    del self._cursors[late]
        while cursor.index < index and not cursor.has_ended:
            cursor.following()
        return cursor.following()

    def state(self, epoch: int, part: int, count: int = sys.maxsize) -> tuple[int, Any] | None:
        """Returns the place of a part, and the stream's state there; None: there is none before the sample `count`."""
        cursor = self._cursors.get((epoch, part)) if self.restores else None
        if cursor is None or cursor.has_ended or not 0 < cursor.index <= count:
            return None
        return cursor.index, copy.deepcopy(cursor.stream.state_dict())


def _large_in(stream: Any) -> dict[int, Any]:
    """Returns the large tensors and arrays of a stream, which its copies share."""
    shared, seen, left = dict[int, Any](), set[int](), [stream]
    while left:
        value = left.pop()
        if isinstance(value, Tensor | np.ndarray):
            if value.nbytes < _LARGE_BYTES:
                # It may well be a counter: `datasets` has the number of its epoch in one.
                continue
            shared[id(value)] = value
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                left.extend(value.values())
            elif isinstance(value, list | tuple):
                left.extend(value)
            elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
                left.extend(vars(value).values())
    return shared


def _is_plain(state: Any) -> bool:
    """Tells whether a checkpoint may hold a state: tensors, numbers, text, and lists, tuples and dicts of them."""
    if isinstance(state, dict):
        return all(_is_plain(part) for pair in state.items() for part in pair)
    if isinstance(state, list | tuple):
        return type(state) in (list, tuple) and all(map(_is_plain, state))
    return state is None or type(state) in (bool, int, float, str, Tensor)


def _alike(sample: Any, other: Any) -> bool:
    if isinstance(sample, End) or isinstance(other, End):
        return type(sample) is type(other)
    tensors = list(leaves(sample)), list(leaves(other))
    if len(tensors[0]) != len(tensors[1]) or not all(map(torch.equal, *tensors)):
        return False
    return bool(tensors[0]) or pickle.dumps(sample) == pickle.dumps(other)


@dataclass
class Merge:
    """A place in an epoch: samples are taken from each part in turn, as long as it has any."""

    epoch: int
    counts: list[int]  # Samples that were taken from each part
    ended: list[bool]
    turn: int = 0

    @classmethod
    def start(cls, epoch: int, parts: int) -> "Merge":
        """Returns the place before the first sample."""
        return cls(epoch, [0] * parts, [False] * parts)

    @property
    def position(self) -> int:
        """Samples of the epoch that were taken."""
        return sum(self.counts)

    def copied(self) -> "Merge":
        """Returns a copy that stays here."""
        return replace(self, counts=[*self.counts], ended=[*self.ended])

    def following(self, take: Take) -> Any:
        """Returns the next sample, or `End`."""
        while not all(self.ended):
            part = self.turn
            self.turn = (part + 1) % len(self.counts)
            if self.ended[part]:
                continue
            sample = take(self.epoch, part, self.counts[part])
            if not isinstance(sample, End):
                self.counts[part] += 1
                return sample
            self.ended[part] = True
        return End()


@dataclass(frozen=True, kw_only=True)
class Looked:
    """The first samples of a stream.

    Attributes:
        samples: They stay in memory: plans, checks and the training loss of an epoch need them.
        seconds: Median time to read a sample.
    """

    samples: Sequence[Any]
    seconds: float


@dataclass(kw_only=True)
class TrainingStream:
    """The training samples of a stream: sample p of epoch e has the number e · N + p.

    Samples of two logical batches are held: whoever reads on needs those that are computed for longer.

    Args:
        stream: The data set.
        samples: N, the samples of an epoch.
        seed: Of the run.
        described: Name of the set in messages.
        asked: Opens a block for the stream's code.
    """

    stream: Any
    samples: int
    seed: int
    described: str
    asked: Asked
    _ahead: "StreamAhead | None" = None  # Reads samples in other processes; None: they are read here
    _held: dict[int, Any] = field(default_factory=dict)
    _span: tuple[int, int] = (0, 0)  # Numbers of the batch that was opened last
    _merge: Merge | None = None
    _resumable: dict[str, Any] | None = None

    @cached_property
    def parts(self) -> StreamParts:
        """The stream, as it is read."""
        return StreamParts(self.stream, self.seed)

    @cached_property
    def part_count(self) -> int:
        """Parts that the stream is read in."""
        with self.asked(self.described):
            return self.parts.count

    @cached_property
    def restores(self) -> bool:
        """Whether the stream's state brings the same samples back."""
        with self.asked(f"the state of {self.described}"):
            return self.parts.restores

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> Any:
        return self.take([number])[0]

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Returns samples by their numbers; reads on as far as it must."""
        looked = self.looked.samples
        for number in sorted(numbers):
            if number >= len(looked) and number not in self._held:
                self._read_to(max(numbers) if max(numbers) // self.samples == number // self.samples else number)
        return [looked[number] if number < len(looked) else self._held[number] for number in numbers]

    @cached_property
    def looked(self) -> Looked:
        """The first samples."""
        samples, times, size = list[Any](), [time.perf_counter()], 0
        self._merge = Merge.start(0, self.part_count)
        with self.asked(f"the first samples of {self.described}"):
            while len(samples) < min(LOOKED, self.samples) and size < _LOOKED_BYTES:
                sample = self._merge.following(self.parts.read)
                if isinstance(sample, End):
                    raise self._ended(len(samples))
                samples.append(sample)
                size += sum(tensor.nbytes for tensor in leaves(sample))
                times.append(time.perf_counter())
        return Looked(samples=samples, seconds=median(np.diff(times).tolist()))

    def open(self, numbers: Sequence[int]) -> None:
        """Begins a logical batch, where it is not the batch that was opened last or a share of it."""
        low, high = min(numbers), max(numbers) + 1
        if high <= len(self.looked.samples) or (self._span[0] <= low and high <= self._span[1]):
            return
        before, self._span = self._span[0], (low, high)
        self._held = {number: sample for number, sample in self._held.items() if number >= min(before, low)}
        self._resumable = self._place() if self._merge and self._number(self._merge) == low else None

    def _number(self, merge: Merge) -> int:
        return merge.epoch * self.samples + merge.position

    def _read_to(self, number: int) -> None:
        epoch = number // self.samples
        if self._merge is None or self._merge.epoch != epoch or self._number(self._merge) > number:
            self._merge = Merge.start(epoch, self.part_count)
        merge, keep = self._merge, min(self._span[0], number)
        take = self._ahead.take if self._ahead is not None else self.parts.read
        with self.asked(f"{self.described}, from sample {merge.position} of epoch {epoch + 1} on"):
            while (reached := self._number(merge)) <= number:
                sample = merge.following(take)
                if isinstance(sample, End):
                    raise self._ended(merge.position)
                # A run that is resumed goes over the samples that it has trained on.
                if reached >= keep:
                    self._held[reached] = sample

    def _ended(self, position: int) -> DataError:
        if not position:
            return DataError(f"{self.described} has no samples",
                             remedy="Its __iter__ must begin anew each time that it is called")  # fmt: skip
        rule = f"{self.described} ended after {position:,} of the {self.samples:,} samples of an epoch"
        return DataError(rule, remedy="Give fewer with --set training.steps_per_epoch=STEPS, or correct its __len__")

    @property
    def merge(self) -> Merge:
        """The place that was read up to."""
        return (self._merge or Merge.start(0, self.part_count)).copied()

    @property
    def reached(self) -> int:
        """The number of the sample after the one that was read last."""
        return self._number(self.merge)

    # Reading ahead

    def read(self, rows: Sequence[int], seeds: Sequence[int], failed: Failed | None = None) -> list[Any]:
        """Reads samples of a part: `rows` are the epoch and the part, `seeds` the first place and the one behind the
        last. Behind the samples is the part's state. An error takes the place of samples that could not be read.
        """
        if not rows:
            return []
        epoch, number = rows
        read = list[Any]()
        try:
            with self.asked(f"{self.described}, part {number + 1} of {self.part_count} in epoch {epoch + 1}"):
                for index in range(*seeds):
                    read.append(self.parts.read(epoch, number, index))
        except Exception as error:
            if failed is None:
                raise
            read += [failed(error)] * (seeds[1] - seeds[0] - len(read))
        return [*read, self.parts.state(epoch, number)]

    @contextmanager
    def ahead(self, reader: SampleReader, batches: Iterator[Sequence[int]]) -> Iterator[None]:
        """Reads the samples of logical batches ahead in the block, by the workers of `reader`; a batch is a span of
        numbers.
        """
        first = next(batches, None)
        if first is None or not (shape := reader.shape(first[1] - first[0], most=self.part_count)).workers:
            yield
            return
        # Looked at before there are workers, which have it then.
        _ = self.restores
        with StreamAhead(self, chain([first], batches), shape) as self._ahead:
            try:
                yield
            finally:
                self._ahead = None

    @property
    def look(self) -> Look:
        """The facts that the first samples tell."""
        return look_of(self.looked.samples[:_PACKED], self.looked.seconds)

    # Resumption

    def _place(self) -> dict[str, Any]:
        assert self._merge is not None
        merge, states = self._merge, list[Any]()
        if not self.restores:
            return {**vars(merge.copied()), "states": [None] * len(merge.counts)}
        for part, taken in enumerate(merge.counts):
            read = self._ahead.state if self._ahead is not None else self.parts.state
            state = read(merge.epoch, part, taken)
            states.append(state and list(state))
        return {**vars(merge.copied()), "states": states}

    def place(self) -> Mapping[str, Any]:
        """Returns the place at the beginning of the batch that was opened last, for a checkpoint."""
        return self._resumable or {}

    def go_on_from(self, place: Mapping[str, Any]) -> None:
        """Goes on from a place; a place of another kind is not used: samples are then read from the epoch's first."""
        try:
            saved = msgspec.convert({name: place[name] for name in ("epoch", "counts", "ended", "turn")}, Merge)
            states = msgspec.convert(place["states"], list[tuple[int, Any] | None])
        except (KeyError, msgspec.ValidationError):
            return
        if len(saved.counts) != self.part_count or len(states) != self.part_count:
            return
        self._merge = saved
        if self.restores:
            self.parts.saved = {(saved.epoch, part): state for part, state in enumerate(states) if state}

    @property
    def sentences(self) -> Iterator[str]:
        """Says how the stream is read, how a resumed run comes to its place in it, and where that cannot be."""
        divided = f"in {self.part_count} parts" if self.part_count > 1 else "by one process"
        if self.restores:
            resumed = "resumed by its state_dict"
        else:
            why = "does not bring the same samples back" if self.parts.has_state else "is missing"
            resumed = f"resumed by reading it from the beginning of the epoch (a state_dict {why})"
        first = f"its first {len(self.looked.samples):,} samples stand for the rest in this plan"
        yield f"{self.described} is read {divided}, and {resumed}; {first}"
        if not _alike(self.parts.first, self.looked.samples[0]):
            seeded = "seed its generators in set_epoch, or draw from the global ones"
            yield f"{self.described} begins with another sample each time, so that no run can be repeated: {seeded}"


class StreamReader(SampleReader):
    """Decides how a stream is read: in this process, or ahead in others.

    Args:
        stream: The training samples.
        setting: Value of `training.num_workers`.
        notice: Is given a sentence about workers that are not used.
    """

    def __init__(self, stream: TrainingStream, setting: str, notice: Callable[[str], object]) -> None:
        super().__init__(stream.read, setting, size=lambda: len(stream), sets=lambda: [stream.stream], notice=notice)
        self._stream = stream

    def looked(self) -> Look:
        """Returns the facts that the first samples tell."""
        return self._stream.look


class StreamAhead(Readers):
    """Workers that read the parts of a stream, as a block; each part has one worker.

    Args:
        stream: The training samples.
        batches: Spans of numbers that will be trained on, in order.
        shape: The workers.
    """

    def __init__(self, stream: TrainingStream, batches: Iterator[Sequence[int]], shape: Shape) -> None:
        super().__init__(stream.read, _in_parts(shape, stream.part_count))
        self._stream, self._batches = stream, batches
        self._begin = stream.merge  # Of the first epoch that is read
        self._wanted: dict[int, int] = {}  # Samples of each epoch, up to the last batch that was asked for
        self._asked: dict[tuple[int, int], int] = {}  # Samples of a part that workers read or have read
        self._taken: dict[tuple[int, int], int] = {}  # Samples of a part that were taken
        # Length of a part whose end was reached.
        ends = enumerate(zip(self._begin.counts, self._begin.ended, strict=True))
        self._ends = {(self._begin.epoch, part): length for part, (length, has_ended) in ends if has_ended}
        self._chunks: list[tuple[int, int, int] | None] = []  # Addresses of the chunks that workers still have
        self._held: dict[Address, Any] = {}
        self._states: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        self._idle = 0  # Answers without samples, one after another

    def _cut(self) -> Iterator[Any]:
        for turn in count():
            chunk = self._following_chunk(turn % self._shape.workers)
            self._chunks.append(chunk and chunk[:3])
            # A worker without work answers nevertheless: the loader asks them in turn.
            yield ((chunk[0], chunk[1]), (chunk[2], chunk[3])) if chunk else ((), ())

    def _following_chunk(self, worker: int) -> tuple[int, int, int, int] | None:
        """Returns epoch, part, first and last place of the samples that a worker reads next; None: none for now."""
        parts = range(worker, self._stream.part_count, self._shape.workers)
        while True:
            for epoch, wanted in sorted(self._wanted.items()):
                part = min(parts, key=lambda part: self._asked_of(epoch, part))
                start = self._asked_of(epoch, part)
                if start < self._quota(epoch, wanted):
                    stop = min(start + self._shape.chunk, self._quota(epoch, self._stream.samples))
                    self._asked[epoch, part] = stop
                    return epoch, part, start, stop
            if not self._want_more():
                return None

    def _asked_of(self, epoch: int, part: int) -> int:
        if (epoch, part) in self._ends:
            return sys.maxsize
        return self._asked.get((epoch, part), self._start_of(epoch, part))

    def _start_of(self, epoch: int, part: int) -> int:
        return self._begin.counts[part] if epoch == self._begin.epoch else 0

    def _quota(self, epoch: int, wanted: int) -> int:
        """Returns the samples of each part that an epoch takes up to a position, as far as the ends are known."""
        ended = [length for (ended_in, _), length in self._ends.items() if ended_in == epoch]
        parts = self._stream.part_count - len(ended)
        return -(-(wanted - sum(ended)) // parts) if parts else 0

    def _want_more(self) -> bool:
        """Asks for one more batch, where it is near to be trained on."""
        reached = self._stream.reached
        furthest = max((epoch * len(self._stream) + wanted for epoch, wanted in self._wanted.items()), default=reached)
        if furthest - reached > self._shape.chunk * self._shape.workers * self._shape.chunks_ahead:
            return False
        if (batch := next(self._batches, None)) is None:
            return False
        epoch, start = divmod(batch[0], len(self._stream))
        self._wanted = {late: wanted for late, wanted in self._wanted.items() if late >= self._stream.merge.epoch}
        self._wanted[epoch] = max(self._wanted.get(epoch, 0), start + batch[1] - batch[0])
        return True

    def take(self, epoch: int, part: int, index: int) -> Any:
        """Returns a sample; reads it here where no worker reads it, or will."""
        key = epoch, part
        if epoch < self._begin.epoch or index < self._taken.get(key, self._start_of(epoch, part)):
            return self._stream.parts.read(epoch, part, index)
        while (epoch, part, index) not in self._held:
            if self._ends.get(key, index + 1) < index:
                return End()
            self._give_back()
            # Else nobody would ever read it.
            assert self._idle < _MOST_IDLE * self._shape.workers, (epoch, part, index)
        self._taken[key] = index + 1
        return checked(self._held.pop((epoch, part, index)))

    def _give_back(self) -> None:
        """Receives a chunk of a worker."""
        samples, chunk = self._receive(), self._chunks.pop(0)
        self._idle = self._idle + 1 if chunk is None else 0
        if chunk is None:
            return
        epoch, part, start = chunk
        *samples, state = samples
        for index, sample in enumerate(samples, start):
            self._held[epoch, part, index] = sample
            if isinstance(sample, End):
                self._ends.setdefault((epoch, part), index)
        if state is not None:
            self._states.setdefault((epoch, part), []).append(state)

    def state(self, epoch: int, part: int, count: int) -> tuple[int, Any] | None:
        """Returns the last state of a part up to a place, of those that workers have sent; drops those before it."""
        saved = self._stream.parts.saved.get((epoch, part))
        states = [state for state in (saved, *self._states.get((epoch, part), ())) if state]
        before = [state for state in states if state[0] <= count]
        self._states[epoch, part] = [*before[-1:], *(state for state in states if state[0] > count)]
        return before[-1] if before else None


def _in_parts(shape: Shape, parts: int) -> Shape:
    """Cuts chunks for the parts: a chunk has samples of one part."""
    chunk = max(shape.chunk * shape.workers // parts, 1)
    ahead = max(shape.chunk * shape.chunks_ahead // chunk, -(-parts // shape.workers) + 1)
    return Shape(workers=shape.workers, chunk=chunk, chunks_ahead=ahead)
