"""Reads samples in other processes while the model computes: PyTorch's `DataLoader` runs the processes, and this module
decides how many there are, and gives each sample back by its row and seed.

A sample depends on its row and its seed alone, so that it is the same in any process, in any order.
"""

import io
import os
import pickle
import shutil
import signal
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from typing import Any, Final, NoReturn, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset

from can_train.errors import CanTrainError, ConfigError, DoesNotFitError, FailedRunError, OutOfMemoryDetails
from can_train.fit.collate import is_plain, leaves
from can_train.io.units import count_of, size_text
from can_train.memory.host import available_bytes, die_with_parent, processes_here, room_bytes
from can_train.memory.out_of_memory import is_out_of_memory

AUTO: Final = "auto"
_MOST_WORKERS: Final = 8  # That `auto` starts
_LOOKED: Final = 8  # Samples that `auto` reads to find out how long reading takes
_FAST_S: Final = 2e-4  # A sample that is read in this time is not worth the way from another process
_BATCHES_AHEAD: Final = 2  # Logical batches that are read before they are needed
_SMALLEST_CHUNK: Final = 16  # As far as a batch has so many, and there is room
_LARGEST_CHUNK: Final = 64  # Samples that a worker reads at a time
_LEAST_CHUNKS: Final = 2  # Chunks that each worker has to do, so that it never waits for the next
_HOST_SHARE: Final = 0.25  # Of the available host memory, for samples that are read ahead
_SHARED_SHARE: Final = 0.8  # Of the free shared memory
_IN_PIPE_BYTES: Final = 2**16  # A larger chunk goes through shared memory
_ALIGNMENT: Final = 64
_END_S: Final = 5.0  # Longest wait for a worker that was killed
_LOOK_S: Final = 1.0  # Without a sample from any worker, until the workers are checked to be alive
_PATIENCE_S: Final = 60.0  # Without a sample from any worker, until that is said
_WAITING: Final = (
    "The processes that read samples have given none for {seconds:g} s; {sample} is waited for. A file system that "
    "does not answer, or a lock, makes a data set wait for ever"
)
_PROBED_BYTES: Final = 2**26  # Of a data set's description, beside its tensors and arrays, that are looked at
SHARED_MEMORY: Final = Path("/dev/shm")

Rows = NDArray[np.int64]
Failed = Callable[[Exception], Any]
"""Returns the value that takes the place of a sample that cannot be read."""
Request = tuple[Sequence[int], Sequence[int]]
"""Rows and seeds of samples."""


class Read(Protocol):
    """Reads samples."""

    def __call__(self, rows: Sequence[int], seeds: Sequence[int], failed: Failed | None = None) -> list[Any]:
        """Returns the samples of some rows, each read with its seed."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The facts that a few samples tell.

    Attributes:
        seconds: Median time to read a sample.
        sample_bytes: Bytes of the largest one.
        refusal: Why samples cannot come from another process, as a clause; empty: they can.
    """

    seconds: float
    sample_bytes: int
    refusal: str = ""


class SampleReader:
    """Reads the samples of a task: in this process, or ahead in others.

    Args:
        read: Reads samples.
        setting: Value of `training.num_workers`.
        size: Returns the number of samples in all data sets.
        sets: Returns the data sets.
        notice: Is given a sentence about workers that are not used.
    """

    def __init__(
        self,
        read: Read,
        setting: str,
        *,
        size: Callable[[], int],
        sets: Callable[[], Collection[Any]],
        notice: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._read, self._setting, self._size, self._sets, self._notice = read, setting, size, sets, notice
        self._ahead: _ReadAhead | None = None
        self._look: Look | None = None

    def take(self, rows: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        """Returns samples: those that were read ahead, and reads the others."""
        if self._ahead is None:
            return self._read(rows, seeds)
        return [self._ahead.take(row, seed) for row, seed in zip(rows, seeds, strict=True)]

    @contextmanager
    def ahead(self, requests: Iterable[Request]) -> Iterator[None]:
        """Reads samples ahead of their use in the block, in the order of `requests`; each request has the samples of
        one logical batch.

        Raises:
            ConfigError: Workers were asked for, and memory is too small for them, or samples cannot come from them.
            DoesNotFitError: A worker was killed, as it is where host memory ends.
        """
        asked = iter(requests)
        if self._ahead is not None or (first := next(asked, None)) is None:
            yield
            return
        if not (shape := self.shape(len(first[0]))).workers:
            yield
            return
        with _ReadAhead(self._read, chain([first], asked), shape) as self._ahead:
            try:
                yield
            finally:
                self._ahead = None

    def shape(self, batch: int, *, most: int = sys.maxsize) -> "Shape":
        """Decides how many workers read, of `most` that can, and how many samples ahead; `batch` is the size of a
        logical batch.
        """
        if self._setting != AUTO and not int(self._setting):
            return Shape()
        if self._setting == AUTO and not (self.is_slow() and available_cores() > 1):
            return Shape()
        look = self.looked()
        if look.refusal:
            raise ConfigError(f"Samples cannot be read by other processes: {look.refusal}",
                              value=f"--num-workers {self._setting}", remedy="Give --num-workers 0")  # fmt: skip
        wanted = min(available_cores(), _MOST_WORKERS) if self._setting == AUTO else int(self._setting)
        wanted = min(wanted, most)
        shape = _shape_for(wanted, batch, look.sample_bytes)
        if shape.workers == wanted:
            return shape
        free = size_text(_room_bytes())
        if self._setting != AUTO:
            each = f"{size_text(look.sample_bytes)} a sample, {free} for samples that are read ahead"
            remedy = "Give --num-workers 0, or more shared memory (docker run --shm-size 8g)"
            rule = f"Memory is too small for {wanted} processes that read samples"
            raise ConfigError(rule, value=each, remedy=remedy)
        self._notice(f"Samples are read by {shape.workers} processes in place of {wanted}: {free} are free for them")
        return shape

    def is_slow(self) -> bool:
        """Tells whether reading takes time, and can be left to other processes."""
        if all(map(is_in_memory, self._sets())):
            return False
        look = self.looked()
        return not look.refusal and look.seconds > _FAST_S and all(map(is_portable, self._sets()))

    def looked(self) -> Look:
        """Reads a few samples, once."""
        if self._look is None:
            size = self._size()
            rows = np.unique(np.linspace(0, size - 1, min(size, _LOOKED)).astype(np.int64)).tolist()
            self._look = _look_at(self._read, rows)
        return self._look


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How samples are read ahead: by how many workers, how many samples at a time, how many times."""

    workers: int = 0
    chunk: int = 1
    chunks_ahead: int = _LEAST_CHUNKS  # Of each worker


class ArraySamples(Sequence[Any]):
    """Samples that are cut out of arrays in memory when they are asked for. They are read as samples of a list are:
    nothing is drawn at random meanwhile.
    """


def is_in_memory(samples: Any) -> bool:
    """Tells whether no code of a task runs when one of its samples is read, or none that takes time or draws."""
    if isinstance(samples, ArraySamples):
        return True
    # A class of a task that is derived from them may augment in a method of its own.
    return any(isinstance(samples, kind) and type(samples).__getitem__ is kind.__getitem__
               for kind in (list, tuple, Tensor))  # fmt: skip


def available_cores() -> int:
    """Returns the processors that this process may use; processes of one run on a machine share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # SLURM binds each rank to its own processors; torchrun lets all ranks use all.
    return max(cores // max(count_of(os.environ, "LOCAL_WORLD_SIZE", 1), 1), 1)


def _room_bytes() -> int:
    """Returns the bytes that samples which are read ahead may take."""
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else available_bytes()
    return int(min(_SHARED_SHARE * shared / processes_here(), room_bytes(_HOST_SHARE)))


def _shape_for(workers: int, batch: int, sample_bytes: int) -> Shape:
    """Returns how samples are read ahead, with fewer workers where memory does not suffice."""
    # The batch that is computed holds its samples, too.
    most = _room_bytes() // max(sample_bytes, 1) - batch
    least = _LEAST_CHUNKS + 1
    while workers and most < workers * least:
        workers -= 1
    if not workers:
        return Shape()
    # A few samples at a time, since each chunk takes a message in both directions.
    wished = max(-(-batch // workers), min(batch, _SMALLEST_CHUNK))
    chunk = max(min(wished, _LARGEST_CHUNK, most // (workers * least)), 1)
    wanted = -(-_BATCHES_AHEAD * batch // (workers * chunk))
    affordable = most // (workers * chunk) - 1
    return Shape(workers=workers, chunk=chunk, chunks_ahead=max(min(wanted, affordable), _LEAST_CHUNKS))


def _look_at(read: Read, rows: Sequence[int]) -> Look:
    """Reads a few samples."""
    samples, times = list[Any](), [time.perf_counter()]
    for row in rows:
        samples += read([row], [row])
        times.append(time.perf_counter())
    return look_of(samples, median(stop - start for start, stop in pairwise(times)))


def look_of(samples: Sequence[Any], seconds: float) -> Look:
    """Packs samples as a worker does; each took `seconds` to read."""
    largest, refusal = 0, ""
    for sample in samples:
        if any(tensor.device.type != "cpu" for tensor in leaves(sample)):
            refusal = "they are on a device"
        else:
            try:
                packed = _pack([sample])
            except Exception as error:  # noqa: BLE001 - a sample's own code decides what is raised
                refusal = f"they cannot be pickled ({type(error).__name__}: {error})"
            else:
                largest = max(largest, len(packed.outline) + packed.size)
    return Look(seconds=seconds, sample_bytes=largest, refusal=refusal)


# The processes


class Readers(ABC):
    """Workers that read chunks of samples, as a block. Chunk j is read by worker j modulo their number."""

    def __init__(self, read: Read, shape: Shape) -> None:
        self._read, self._shape, self._is_told = read, shape, False

    def __enter__(self) -> Self:
        before, handler = set(active_children()), signal.getsignal(signal.SIGCHLD)
        with warnings.catch_warnings():
            # More workers than processors are right where reading waits for a disk or a network.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader: DataLoader[Any] = DataLoader(
                _Chunks(self._read), sampler=_Sent(self._cut), batch_size=None, collate_fn=_as_it_is,
                num_workers=self._shape.workers, prefetch_factor=self._shape.chunks_ahead,
                # The loader draws a seed of its own, which must not change the run's random numbers.
                generator=torch.Generator(), worker_init_fn=partial(_begin_worker, os.getpid()),
                multiprocessing_context="fork" if hasattr(os, "fork") else None, timeout=_LOOK_S,
            )  # fmt: skip
            try:
                self._results = iter(loader)
            except OSError as error:
                _end([child for child in active_children() if child not in before])
                raise ConfigError("The processes that read samples cannot be started", value=error.strerror or "",
                                  remedy="Read with fewer of them: --num-workers 2; or allow more open files and "
                                         "processes (ulimit -n, ulimit -u)") from error  # fmt: skip
            finally:
                # The loader's handler raises an error wherever the program stands when a worker dies.
                signal.signal(signal.SIGCHLD, handler)
        self._workers = [child for child in active_children() if child not in before]
        return self

    def __exit__(self, *error: object) -> None:
        _end(self._workers)
        del self._results

    @abstractmethod
    def _cut(self) -> Iterator[Request]:
        """Yields the chunks, as workers are ready for them."""

    def _receive(self) -> list[Any]:
        """Returns the samples of the next chunk, some of them errors; says once where they take long."""
        since = time.monotonic()
        while True:
            try:
                return _unpack(next(self._results))
            except RuntimeError as error:
                if "timed out" not in str(error) or not all(worker.is_alive() for worker in self._workers):
                    raise self._gone() from error
                if not self._is_told and time.monotonic() - since >= _PATIENCE_S:
                    warnings.warn(_WAITING.format(seconds=_PATIENCE_S, sample=self._awaited()), stacklevel=2)
                    self._is_told = True

    def _awaited(self) -> str:
        """Names the sample that the next chunk begins with, as far as it is known."""
        return "the next sample"

    def _gone(self) -> CanTrainError:
        """Makes the error of a worker that has ended."""
        codes = [worker.exitcode for worker in self._workers if worker.exitcode]
        if -signal.SIGKILL in codes or -signal.SIGBUS in codes or not codes:
            ended = (
                "by the kernel: shared memory is full" if -signal.SIGBUS in codes else "host memory is full, perhaps"
            )
            return DoesNotFitError(
                "A process that reads samples was killed", value=ended,
                remedy="Ask for more memory (--mem), or read with fewer processes (--num-workers)",
                details=OutOfMemoryDetails(of_host=True),
            )  # fmt: skip
        name = signal.Signals(-codes[0]).name if codes[0] < 0 else f"exit status {codes[0]}"
        return FailedRunError("A process that reads samples has crashed", value=name,
                              remedy="Give --num-workers 0 to see the data set's own error")  # fmt: skip


def _end(workers: Sequence[Any]) -> None:
    """Ends processes that read samples."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(_END_S)


class _ReadAhead(Readers):
    """Samples that workers read, as a block."""

    def __init__(self, read: Read, requests: Iterator[Request], shape: Shape) -> None:
        super().__init__(read, shape)
        self._requests = requests
        self._sent: Counter[tuple[int, int]] = Counter()  # Samples that no worker has given back
        self._chunks: list[tuple[int, Sequence[tuple[int, int]]]] = []  # That workers have not given back, in order
        self._held: dict[tuple[int, int], tuple[int, Any]] = {}  # Batch and sample, or error, by row and seed
        self._batch = -1  # Number of the batch whose samples were taken last

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._held.clear()

    def _cut(self) -> Iterator[Request]:
        """Yields the requests in chunks, as workers are ready for them."""
        for number, (rows, seeds) in enumerate(self._requests):
            keys = [(int(row), int(seed)) for row, seed in zip(rows, seeds, strict=True)]
            for start in range(0, len(keys), self._shape.chunk):
                chunk = keys[start : start + self._shape.chunk]
                self._sent.update(chunk)
                self._chunks.append((number, chunk))
                yield [row for row, _ in chunk], [seed for _, seed in chunk]

    def _awaited(self) -> str:
        return f"the sample of row {self._chunks[0][1][0][0]}" if self._chunks else super()._awaited()

    def take(self, row: int, seed: int) -> Any:
        """Returns a sample; reads it here where no worker has been asked for it."""
        key = (row, seed)
        while key not in self._held and self._sent[key] > 0:
            samples = self._receive()
            number, keys = self._chunks.pop(0)
            for each in keys:
                self._sent[each] -= 1
                if not self._sent[each]:
                    # A training sends each sample of each epoch with a key of its own.
                    del self._sent[each]
            for each, sample in zip(keys, samples, strict=True):
                self._held[each] = (number, sample)
        if key not in self._held:
            return self._read([row], [seed])[0]
        batch, sample = self._held[key]
        if batch > self._batch:
            # Samples of an earlier batch are kept until then, since a rescue may compute it once more.
            self._batch = batch
            self._held = {key: entry for key, entry in self._held.items() if entry[0] >= batch}
        return checked(sample)


class _Sent:
    """The chunks that are sent to workers, as the sampler of a loader."""

    def __init__(self, cut: Callable[[], Iterator[Request]]) -> None:
        self._cut = cut

    def __iter__(self) -> Iterator[Request]:
        return self._cut()


class _Chunks(Dataset[Any]):
    """Reads a chunk of samples, in a worker."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, request: Request) -> "_Packed":
        # A simulated GPU of the process that computes does not count the samples.
        with _disable_current_modes():
            return _pack(self._read(*request, failed=_Failure.of))


def _as_it_is(packed: Any) -> Any:
    return packed


def _begin_worker(parent: int, number: int) -> None:
    """Leaves signals to all processes of a run to the one that computes: it kills its workers when it ends."""
    for received in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(received, signal.SIG_IGN)
    # It would hold the lock of its run after a kill of that process.
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def checked(sample: Any) -> Any:
    """Returns a sample; raises the error that took its place."""
    if isinstance(sample, _Failure):
        sample.raise_again()
    return sample


@dataclass(frozen=True)
class _Failure:
    """An error of a sample, as it comes from a worker."""

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        """Describes an error."""
        if isinstance(error, CanTrainError):
            return cls(type(error), error.args, {**vars(error), "__cause__": None})
        return cls(MemoryError if is_out_of_memory(error) else RuntimeError, (str(error),), {})

    def raise_again(self) -> NoReturn:
        """Raises the error."""
        error = self.kind.__new__(self.kind, *self.arguments)
        error.args = self.arguments
        vars(error).update({name: value for name, value in self.state.items() if name != "__cause__"})
        raise error


# The way from one process to the other


@dataclass(frozen=True)
class _Packed:
    """Some objects: an outline, and the bytes of their tensors and arrays in one block."""

    outline: bytes
    spans: Sequence[tuple[int, int]]
    block: Tensor | bytearray

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return len(self.block)


class _Packer(pickle.Pickler):
    """Pickles objects, and leaves the bytes of their tensors out."""

    def reducer_override(self, value: Any) -> Any:
        """Describes a plain tensor by type and shape; other objects are pickled as usual."""
        if type(value) is not Tensor or not is_plain(value):
            return NotImplemented
        numbers: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(numbers), value.dtype, tuple(value.shape))


def _tensor(numbers: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(numbers, dtype=dtype).reshape(shape)


def _pack(objects: Sequence[Any]) -> _Packed:
    outline, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(outline, protocol=5, buffer_callback=buffers.append).dump(_column(objects))
    views, spans, size = [buffer.raw() for buffer in buffers], [], 0
    for view in views:
        spans.append((size, size + view.nbytes))
        size += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
    block: Tensor | bytearray = bytearray(size)
    if size > _IN_PIPE_BYTES:
        block = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    whole = _view(block)
    for (start, stop), view in zip(spans, views, strict=True):
        whole[start:stop] = view
    return _Packed(outline.getvalue(), spans, block)


def _unpack(packed: _Packed) -> list[Any]:
    whole = _view(packed.block)
    # Of a process of this run.
    column: _Column = pickle.loads(packed.outline, buffers=[whole[start:stop] for start, stop in packed.spans])
    return column.values()


@dataclass(frozen=True)
class _Column:
    """One part of each sample: tensors or arrays of one shape as one, members of tuples, lists and dicts as columns."""

    kind: str  # stacked, tuple, list, dict or plain
    content: Any
    keys: Sequence[Any] = ()  # Of dicts

    def values(self) -> list[Any]:
        """Returns the part of each sample."""
        if self.kind in ("stacked", "plain"):
            return list(self.content)
        rows = zip(*(column.values() for column in self.content), strict=True)
        if self.kind == "dict":
            return [dict(zip(self.keys, row, strict=True)) for row in rows]
        return list(rows) if self.kind == "tuple" else list(map(list, rows))


def _column(values: Sequence[Any]) -> _Column:
    """Arranges objects that are built alike by their parts: a tensor for each takes several times as long."""
    kinds, plain = {type(value) for value in values}, _Column("plain", list(values))
    if len(kinds) != 1:
        return plain
    (kind,) = kinds
    if kind in (Tensor, np.ndarray):
        is_alike = len({(value.dtype, tuple(value.shape)) for value in values}) == 1 and all(map(is_plain, values))
        return _Column("stacked", (torch if kind is Tensor else np).stack(list(values))) if is_alike else plain
    if kind is dict:
        keys = list(values[0])
        if not keys or any(list(value) != keys for value in values):
            return plain
        return _Column("dict", [_column([value[key] for value in values]) for key in keys], keys)
    if kind in (tuple, list) and values[0] and len({len(value) for value in values}) == 1:
        return _Column(kind.__name__, [_column(part) for part in zip(*values, strict=True)])
    return plain


def _view(block: Tensor | bytearray) -> memoryview:
    numbers: Any = block if isinstance(block, bytearray) else block.numpy()
    return memoryview(numbers)


class _EnoughError(Exception):
    """Enough of a data set was looked at."""


class _Probe(pickle.Pickler):
    """Pickles a data set into nothing, without its tensors, arrays, classes and functions."""

    def __init__(self) -> None:
        super().__init__(self, protocol=5)
        self._bytes = 0

    def write(self, data: Any) -> None:
        """Counts bytes."""
        self._bytes += memoryview(data).nbytes
        if self._bytes > _PROBED_BYTES:
            raise _EnoughError

    def persistent_id(self, value: Any) -> str | None:
        """Leaves objects out."""
        is_left_out = isinstance(value, Tensor | np.ndarray | bytes | str | type) or callable(value)
        return "left out" if is_left_out else None


def is_portable(samples: Any) -> bool:
    """Tells whether a data set may be used by several processes: an open file, say, has one position for all."""
    if isinstance(samples, Tensor):
        return True
    try:
        _Probe().dump(samples)
    except _EnoughError:
        return True
    except Exception:  # noqa: BLE001 - the data set's own code decides what is raised
        return False
    return True
