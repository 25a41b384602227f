"""The processes that train one run together, one a GPU: what they exchange, and how a failure or a signal on one of
them becomes known to all, so that none waits forever.
"""

import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]  # no __all__

from can_train.errors import CanTrainError, DoesNotFitError, RunError
from can_train.fit.packing import BatchCosts, share_out

JOIN_TIMEOUT: Final = timedelta(minutes=10)
"""Longest wait for all processes to be there: some read a hundred thousand files of Python from a slow disk first."""

WAIT_TIMEOUT: Final = timedelta(hours=24)
"""Longest wait for one another after that: one may prepare data for hours. A process that has ended is noticed at once,
since its connections close."""

REDUCE_TIMEOUT: Final = timedelta(minutes=10)
"""Longest wait for gradients between GPUs, which all ranks begin to exchange at the same moment."""

PACK_BYTES: Final = 2**20
"""Small tensors that are exchanged at once: a network of 10 Gbit/s carries so much in the time of a few exchanges."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where one process stands among those of its run; rank 0 listens at address and port.

    Attributes:
        size: Processes in all.
        local_rank: Rank among the processes of its machine.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


@dataclass(frozen=True)
class Failure:
    """An error on a rank, by the first line of its message."""

    rank: int
    message: str
    did_not_fit: bool


@dataclass(frozen=True)
class _Done(Generic[T]):
    """What a rank's work returned; tells it from a failure."""

    result: T


class RankFailedError(CanTrainError):
    """Another process of the run failed, so that this one cannot go on."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__(
            "Every process of a run must get through",
            value="; ".join(f"rank {failure.rank}: {failure.message}" for failure in failures),
            remedy="Mend what stopped it, then resume the run",
        )
        self.failures = tuple(failures)

    @property
    def did_not_fit(self) -> bool:
        """Whether memory was too small on one of them."""
        return any(failure.did_not_fit for failure in self.failures)


class RankGoneError(CanTrainError):
    """Another process of the run ended without reporting why."""


class Ranks:
    """The processes that train a run: here this one alone, so that each method just does the work."""

    rank = 0
    size = 1
    local_rank = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run's files and prints."""
        return self.rank == 0

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Does some work on every rank, and waits until all have done it.

        Args:
            work: Exchanges nothing with other ranks; returns a small picklable object.

        Returns:
            What the work returned on each rank, by rank.

        Raises:
            Exception: The work failed here.
            RankFailedError: It failed elsewhere.
            RankGoneError: Another process has ended.
        """
        return [work()]

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Does some work on rank 0, and returns its result on every rank; raises as `gather` does."""
        results = self.gather(lambda: work() if self.is_first else None)
        result: T = results[0]  # type: ignore[assignment]  # rank 0's is never the None of those that did not work
        return result

    def on_every_rank(self, work: Callable[[], T]) -> T:
        """Does some work on every rank, and returns each rank's own result there; raises as `gather` does."""
        made: list[T] = []
        self.gather(lambda: made.append(work()))
        return made[0]

    def on_rank0_first(self, work: Callable[[], T]) -> T:
        """Does some work on rank 0, and then on the others, which find what it has prepared; raises as `gather`
        does.
        """
        done: list[T] = []
        for has_turn in (self.is_first, not self.is_first):
            self.gather(lambda has_turn=has_turn: done.append(work()) if has_turn else None)  # type: ignore[misc]
        return done[0]

    def share(self, samples: int, price: Callable[[], BatchCosts]) -> slice:
        """Decides which of some samples this rank computes, so that all shares cost about the same.

        Args:
            samples: How many there are.
            price: Prices them, with the same result on all ranks.
        """
        return slice(0, samples)

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Adds up each parameter's gradient over the ranks, in place; every rank has the sum afterwards.

        A parameter without a gradient on any rank stays without; where only some have one, the others add zeros.
        """

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors, which are the same in number, shape and type on every rank, with rank 0's."""

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Overwrites a model's buffers with rank 0's.

        One that some rank has not made yet, or that has another shape there (a cache that grows with what was seen),
        stays each rank's own.
        """

    def sharing_host(self) -> int:
        """Counts the processes of the run on this machine, this one included."""
        return 1

    def close(self) -> None:
        """Ends the connections; all ranks call it at the same point."""


class ConnectedRanks(Ranks):
    """Several processes, connected by `torch.distributed`: NCCL for tensors on GPUs, gloo for everything else."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.rank, self.size, self.local_rank = place.rank, place.size, place.local_rank
        # A thread of its own waits for the others, so that this one goes on hearing signals, and so that a simulated
        # GPU, which is a mode of this thread, does not take messages for its tensors.
        self._calls: _Calls[Any] = _Calls()
        self._calls.run(lambda: _connect(place))
        if device.type == "cuda":
            # Each thread has a current device of its own.
            torch.cuda.set_device(device)
            self._calls.run(lambda: torch.cuda.set_device(device))
        self._tensors = self._calls.run(lambda: _tensor_group(device))

    def gather(self, work: Callable[[], T]) -> list[T]:  # noqa: D102 - as above
        try:
            result = work()
        except Exception as error:
            failure = Failure(self.rank, _first_line(error), isinstance(error, DoesNotFitError))
            # The others wait in the same exchange: without a report from here they would wait until the timeout. The
            # error here explains more than that another process ended too.
            with suppress(RankGoneError):
                self._gather(failure)
            raise
        reports: list[_Done[T] | Failure] = self._gather(_Done(result))
        failures = [report for report in reports if isinstance(report, Failure)]
        if failures:
            raise RankFailedError(failures)
        return [report.result for report in reports if isinstance(report, _Done)]

    def share(self, samples: int, price: Callable[[], BatchCosts]) -> slice:  # noqa: D102
        sizes = share_out(price(), self.size)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: D102
        def reduce() -> None:
            present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
            dist.all_reduce(present, dist.ReduceOp.MAX)
            gradients = []
            # A branch of the model that no sample of a share took has no gradient on that rank; a collective that only
            # some ranks enter would hang.
            for parameter, is_present in zip(parameters, present.tolist(), strict=True):
                if is_present:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    gradients.append(parameter.grad)
            _packed(gradients, lambda tensor: dist.all_reduce(tensor, group=self._tensors))

        self._exchange(reduce)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:  # noqa: D102
        listed = [tensor.detach() for tensor in tensors]
        self._exchange(lambda: _packed(listed, lambda tensor: dist.broadcast(tensor, 0, group=self._tensors)))

    def broadcast_buffers(self, model: nn.Module) -> None:  # noqa: D102
        buffers = {(name, buffer.shape, buffer.dtype): buffer for name, buffer in model.named_buffers()}
        shared = list(buffers.values())
        # Compared by checksum in every step; the names themselves are exchanged only where they differ.
        if not self._same_on_all(tuple(buffers)):
            having = Counter(kind for kinds in self._gather(tuple(buffers)) for kind in kinds)
            shared = [buffers[kind] for kind, ranks in having.items() if ranks == self.size]
        self.broadcast(shared)

    def sharing_host(self) -> int:  # noqa: D102
        return self._gather(socket.gethostname()).count(socket.gethostname())

    def close(self) -> None:  # noqa: D102
        self._exchange(dist.destroy_process_group)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(values, value))
        return values

    def _exchange(self, call: Callable[[], None]) -> None:
        with _gone_ranks_reported():
            self._calls.run(call)

    def _same_on_all(self, value: object) -> bool:
        """Tells whether a value reads the same on every rank, which costs less than to exchange it."""
        checksum = zlib.crc32(repr(value).encode())
        sums: list[int] = []

        def exchange() -> None:
            # The largest checksum, and the smallest negated: their sum is 0 where all are equal.
            extremes = torch.tensor([checksum, -checksum])
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
            sums.append(int(extremes.sum()))

        self._exchange(exchange)
        return sums == [0]


class _Calls(Generic[T]):
    """Runs calls one after another in a thread of its own; it does not keep the process from ending."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], T], Future[T]]] = SimpleQueue()
        # A daemon, so that a process can end while an exchange still waits for a rank that is gone.
        Thread(target=self._work, name="ranks", daemon=True).start()

    def run(self, call: Callable[[], T]) -> T:
        """Returns what a call returns; raises what it raises."""
        future: Future[T] = Future()
        self._waiting.put((call, future))
        return future.result()

    def _work(self) -> None:
        while True:
            call, future = self._waiting.get()
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised again where the result is waited for
                future.set_exception(error)
            # Else the last call's tensors would live until the next one.
            del call, future


def join_ranks(place: RankPlace | None, device: str) -> Ranks:
    """Connects the processes of a run; one that is alone needs no connection.

    Call it before a GPU's meter is opened: the memory that the connection takes is not training's.

    Args:
        place: Where this process stands; None: alone.
        device: Value of `--device`.

    Raises:
        RunError: The others cannot be reached.
    """
    if place is None or place.size == 1:
        return Ranks()
    own = rank_device(device, place)
    is_gpu = own.startswith("cuda") and torch.cuda.is_available()
    return ConnectedRanks(place, torch.device(own if is_gpu else "cpu"))


def rank_device(device: str, place: RankPlace | Ranks) -> str:
    """Decides which device a rank uses where `--device` leaves it open: each its own GPU of the machine's.

    Where a scheduler shows every process one GPU only, it is that one.
    """
    if place.size == 1 or device not in ("auto", "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{place.local_rank if torch.cuda.device_count() > 1 else 0}"


def _connect(place: RankPlace) -> None:
    try:
        store = TCPStore(place.address, place.port, place.size, place.rank == 0, JOIN_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=WAIT_TIMEOUT)
    except RuntimeError as error:
        raise RunError(
            "The processes of a run must find each other",
            value=f"rank {place.rank} of {place.size} at {place.address}:{place.port}: {_first_line(error)}",
            remedy="MASTER_ADDR and MASTER_PORT name another place; GLOO_SOCKET_IFNAME names the network between nodes",
        ) from error


def _tensor_group(device: torch.device) -> ProcessGroup | None:
    """Makes the group that tensors are exchanged in; None is the one for everything."""
    if device.type != "cuda":
        return None
    group: ProcessGroup = dist.new_group(backend="nccl", timeout=REDUCE_TIMEOUT)
    # The first exchange is what makes the connection, and takes its buffers.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.cuda.synchronize(device)
    return group


def _packed(tensors: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Runs a collective on tensors."""
    # Large ones in place, since a copy of all would take their size once more on the device; small ones by the pack,
    # since each exchange takes its time, however little it carries.
    for pack in _packs(tensors):
        if len(pack) == 1 and pack[0].is_contiguous():
            collective(pack[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in pack])
        collective(flat)
        for tensor, changed in zip(pack, flat.split([tensor.numel() for tensor in pack]), strict=True):
            tensor.copy_(changed.view(tensor.shape))


def _packs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Puts tensors of one type that follow one another together, up to a pack's size."""
    packs: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not packs or packs[-1][-1].dtype != tensor.dtype or tensor.nbytes > room:
            packs.append([])
            room = PACK_BYTES
        packs[-1].append(tensor)
        room -= tensor.nbytes
    return packs


@contextmanager
def _gone_ranks_reported() -> Iterator[None]:
    try:
        yield
    # Gloo and NCCL report a closed connection as a plain RuntimeError, each in words of its own.
    except RuntimeError as error:
        raise RankGoneError(
            "Every process of a run must stay until all have got through",
            value=f"another one has ended ({_first_line(error)})",
            remedy="Its own log says why; the run goes on from its last checkpoint",
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
