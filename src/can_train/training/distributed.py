"""The processes that train one run together, one a GPU: their exchanges, and how a failure or a signal on one of
them becomes known to all, so that none waits forever.
"""

import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]  # no __all__

from can_train.errors import RUN_FAILED, CanTrainError, DoesNotFitError, RankGoneError, RunError, first_sentence
from can_train.fit.packing import BatchCosts, share_out
from can_train.io.records import this_host

# Longest wait for all processes to be there: some read a hundred thousand files of Python from a slow disk first.
_JOIN_TIMEOUT: Final = timedelta(minutes=10)
# Longest wait for one another after that: one may prepare data for hours. A process that has ended is noticed at once,
# since its connections close.
_WAIT_TIMEOUT: Final = timedelta(hours=24)
# Longest wait for gradients between GPUs, which all ranks begin to exchange at the same moment.
_REDUCE_TIMEOUT: Final = timedelta(minutes=10)
# Wait for an exchange that was begun, where a process ends in the middle of it.
_LEAVE_TIMEOUT_S: Final = 5.0

# Small tensors that are exchanged at once: a network of 10 Gbit/s carries so much in the time of a few exchanges.
_PACK_BYTES: Final = 2**20

_MESSAGE_BYTES: Final = 2**12  # Of an object that takes one exchange
_LENGTH_BYTES: Final = 8  # At the begin of a message

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of a process among the processes of its run, which meet at address and port."""

    rank: int
    size: int  # processes in all
    local_rank: int  # among the processes of its machine
    address: str
    port: int
    # Where torchrun listens there already: the prefix of these ranks' entries in its store. Empty: rank 0 listens.
    store_prefix: str = ""


@dataclass(frozen=True)
class Failure:
    """An error on a rank, by the first line of its message."""

    rank: int
    message: str
    did_not_fit: bool


class RankFailedError(CanTrainError):
    """Another process of the run failed, so that this one cannot go on."""

    exit_code = RUN_FAILED

    def __init__(self, failures: Sequence[Failure]) -> None:
        found = "; ".join(f"rank {failure.rank}: {failure.message}" for failure in failures)
        remedy = "Mend what stopped it, then resume the run"
        super().__init__("Every process of a run must get through", value=found, remedy=remedy)
        # Whether memory was too small on any rank.
        self.did_not_fit = any(failure.did_not_fit for failure in failures)


@dataclass(frozen=True, kw_only=True)
class Forms:
    """Checksums that are equal where ranks have tensors of the same form."""

    gradients: int = 0  # Of the parameters that have a gradient
    buffers: int = 0  # Of the names, shapes and types of buffers


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
            The results of the work on all ranks, by rank.

        Raises:
            Exception: The work failed here.
            RankFailedError: It failed elsewhere.
            RankGoneError: Another process has ended.
        """
        with self.reporting_failure():
            result = work()
        return self.exchange(result)

    def reporting_failure(self) -> AbstractContextManager[None]:
        """Tells the other ranks of an error that ends the block: they would wait for this one until the timeout. The
        block exchanges nothing with them, and `exchange` comes after it.
        """
        return nullcontext()

    def exchange(self, result: T) -> list[T]:
        """Returns the small picklable objects of all ranks, by rank; raises RankFailedError or RankGoneError."""
        return [result]

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
        """Does some work on rank 0, and then on the others, which find its results prepared; raises as `gather`
        does.
        """
        done: list[T] = []
        for has_turn in (self.is_first, not self.is_first):
            self.gather(lambda has_turn=has_turn: done.append(work()) if has_turn else None)  # type: ignore[misc]
        return done[0]

    def share(self, samples: int, price: Callable[[], BatchCosts], floor: int = 1) -> slice:
        """Decides which of some samples this rank computes, so that all shares cost about the same.

        Args:
            samples: How many there are.
            price: Prices them, with the same result on all ranks.
            floor: Samples that no share has fewer of, unless it is empty or the only one.
        """
        return slice(0, samples)

    def forms(self, parameters: Sequence[nn.Parameter], model: nn.Module) -> Forms:
        """Describes the gradients and the buffers of this rank, for the other ranks to compare with theirs."""
        return Forms()

    def reduce_gradients(self, parameters: Sequence[nn.Parameter], *, alike: bool = False) -> None:
        """Adds up each parameter's gradient over the ranks, in place; every rank has the sum afterwards.

        A parameter without a gradient on any rank stays without; where only some have one, the others add zeros.

        Args:
            parameters: The same on all ranks.
            alike: Whether the same parameters are known to have a gradient on all ranks.
        """

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors, which are the same in number, shape and type on every rank, with rank 0's."""

    def broadcast_buffers(self, model: nn.Module, *, alike: bool = False) -> None:
        """Overwrites a model's buffers with rank 0's.

        One that some rank has not made yet, or that has another shape there (a cache that grows with its inputs),
        stays each rank's own.

        Args:
            model: The model.
            alike: Whether all ranks are known to have the same buffers, of the same shapes.
        """

    def sharing_host(self) -> int:
        """Counts the processes of the run on this machine, this one included."""
        return 1

    def close(self) -> None:
        """Ends the connections; all ranks call it at the same point."""

    def leave(self) -> None:
        """Ends connections that are left, whatever the other ranks do; to be called before the process ends."""


class ConnectedRanks(Ranks):
    """Several processes, connected by `torch.distributed`: NCCL for tensors on GPUs, gloo for everything else."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.rank, self.size, self.local_rank = place.rank, place.size, place.local_rank
        # A thread of its own waits for the others, so that this one goes on hearing signals, and so that a simulated
        # GPU, which is a mode of this thread, does not take messages for its tensors.
        self._calls = _Calls()
        self._tensors = self._calls.run(lambda: _connect(place, device))
        if device.type == "cuda":
            torch.cuda.set_device(device)

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:  # noqa: D102 - as above
        try:
            yield
        except RankFailedError:
            # All ranks know of it.
            raise
        except Exception as error:
            own = isinstance(error, CanTrainError)
            message = str(error).splitlines()[0].rstrip(".") if own else _with_type(error)
            failure = Failure(self.rank, message, isinstance(error, DoesNotFitError))
            # The error here explains more than that another process ended too.
            with suppress(RankGoneError):
                self._gather((failure, None))
            raise

    def exchange(self, result: T) -> list[T]:  # noqa: D102
        reports: list[tuple[Failure | None, T]] = self._gather((None, result))
        if failures := [failure for failure, _ in reports if failure is not None]:
            raise RankFailedError(failures)
        return [result for _, result in reports]

    def share(self, samples: int, price: Callable[[], BatchCosts], floor: int = 1) -> slice:  # noqa: D102
        sizes = share_out(price(), self.size, floor)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def forms(self, parameters: Sequence[nn.Parameter], model: nn.Module) -> Forms:  # noqa: D102
        present = bytes(_kind_of(parameter.grad) for parameter in parameters)
        return Forms(gradients=zlib.crc32(present), buffers=zlib.crc32(repr(tuple(_buffer_kinds(model))).encode()))

    def reduce_gradients(self, parameters: Sequence[nn.Parameter], *, alike: bool = False) -> None:  # noqa: D102
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if alike and not any(gradient.is_sparse for gradient in gradients):
            self._exchange(lambda: _add_up(gradients, self._tensors))
        else:
            self._exchange(lambda: add_gradients(parameters, torch.device("cpu"), self._tensors))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:  # noqa: D102
        listed = [tensor.detach() for tensor in tensors]

        def send(tensor: Tensor) -> None:
            dist.broadcast(tensor, 0, group=self._tensors if tensor.is_cuda else None)

        self._exchange(lambda: _packed(listed, send))

    def broadcast_buffers(self, model: nn.Module, *, alike: bool = False) -> None:  # noqa: D102
        buffers = _buffer_kinds(model)
        shared = list(buffers.values())
        if not alike:
            having = Counter(kind for kinds in self._gather(tuple(buffers)) for kind in kinds)
            shared = [buffers[kind] for kind, ranks in having.items() if ranks == self.size]
        if shared:
            self.broadcast(shared)

    @property
    def tensor_group(self) -> ProcessGroup:
        """The group that exchanges tensors of the device."""
        group = self._tensors or dist.group.WORLD
        assert group is not None, "the ranks are connected"
        return group

    def collective(self, call: Callable[[], object]) -> None:
        """Runs a collective of tensors, which all ranks enter; raises RankGoneError."""
        if self._tensors is None:
            self._exchange(call)
            return
        # A thread of its own has streams of its own, too.
        with _ranks_gone():
            call()

    def sharing_host(self) -> int:  # noqa: D102
        host = this_host()
        return self._gather(host).count(host)

    def close(self) -> None:  # noqa: D102
        self._exchange(dist.destroy_process_group)

    def leave(self) -> None:  # noqa: D102
        # Python ends its threads where they stand; in code of C++ that takes the process down with SIGABRT.
        with suppress(RuntimeError, TimeoutError):
            if dist.is_initialized():
                self._calls.run(dist.destroy_process_group, timeout_s=_LEAVE_TIMEOUT_S)

    def _gather(self, value: Any) -> list[Any]:
        written = self._exchange(lambda: _gathered(pickle.dumps(value), self.size))
        return [pickle.loads(text) for text in written]

    def _exchange(self, call: Callable[[], T]) -> T:
        with _ranks_gone():
            return self._calls.run(call)


def _with_type(error: Exception) -> str:
    text, kind = first_sentence(error), type(error).__name__
    return kind if text == kind else f"{kind}: {text}"


@contextmanager
def _ranks_gone() -> Iterator[None]:
    """Turns the error of an exchange in the block into RankGoneError."""
    try:
        yield
    # Gloo and NCCL report a closed connection as a plain RuntimeError, each in words of its own.
    except RuntimeError as error:
        rule, found = "Every process of a run must stay until all have got through", first_sentence(error)
        remedy = "Its own log says why; the run goes on from its last checkpoint"
        raise RankGoneError(rule, value=f"another one has ended ({found})", remedy=remedy) from error


class _Calls:
    """Runs calls one after another in a thread of its own; it does not keep the process from ending."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        # A daemon, so that a process can end while an exchange still waits for a rank that is gone.
        Thread(target=self._work, name="ranks", daemon=True).start()

    def run(self, call: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Runs a call; raises its errors, and TimeoutError where it takes longer."""
        future: Future[T] = Future()
        self._waiting.put((call, future))
        return future.result(timeout_s)

    def _work(self) -> None:
        while True:
            call, future = self._waiting.get()
            result, failure = None, None
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - raised again where the result is waited for
                failure = error
            # Before the waiting thread goes on, which may measure memory: the call holds tensors.
            del call
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            del result, failure, future


def _gathered(text: bytes, size: int) -> list[bytes]:
    """Returns the texts of all ranks. Those that fit into a message of fixed length take one exchange, where
    `all_gather_object` takes two and more time for each; longer ones are exchanged once their lengths are known.
    """
    own = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    own[:_LENGTH_BYTES] = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little")), dtype=torch.uint8)
    room = _MESSAGE_BYTES - _LENGTH_BYTES
    if len(text) <= room:
        own[_LENGTH_BYTES : _LENGTH_BYTES + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    messages = _all_gathered(own, size)
    lengths = [int.from_bytes(message[:_LENGTH_BYTES], "little") for message in messages]
    if max(lengths) <= room:
        return [
            message[_LENGTH_BYTES : _LENGTH_BYTES + length] for message, length in zip(messages, lengths, strict=True)
        ]
    padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
    return [message[:length] for message, length in zip(_all_gathered(padded, size), lengths, strict=True)]


def _all_gathered(own: Tensor, size: int) -> list[bytes]:
    messages = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(messages, own)
    return [message.numpy().tobytes() for message in messages]


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


def check_alike(ranks: Ranks, describe: Callable[[], Mapping[str, object]], rule: str, remedy: str) -> None:
    """Checks that all ranks describe something in the same way; a part that is None on a rank is not compared.

    Raises:
        RunError: They differ; the message has the first part that does, and of which ranks.
    """
    descriptions = ranks.gather(describe)

    def compare() -> None:
        for name, first in descriptions[0].items():
            for rank, other in enumerate(descriptions):
                if first is not None and other.get(name, _ABSENT) not in (first, None):
                    found = f"{name}: {first} on rank 0, {other.get(name, 'none')} on rank {rank}"
                    raise RunError(rule, value=found, remedy=remedy)

    ranks.on_rank0(compare)


def add_gradients(parameters: Sequence[nn.Parameter], device: torch.device, group: ProcessGroup | None = None) -> None:
    """Adds up each parameter's gradient over the processes of a group, in place; None is the group of all processes,
    which exchanges tensors of `device`.

    A parameter without a gradient in any process stays without; where only some have one, the others add zeros.
    A gradient that is sparse in all processes stays sparse.
    """
    kinds = [_kind_of(parameter.grad) for parameter in parameters]
    present = torch.tensor(kinds, dtype=torch.uint8, device=device)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    gradients = []
    # A branch of the model that no sample of a share took has no gradient on that rank; a collective that only some
    # ranks enter would hang.
    for parameter, kind in zip(parameters, present.tolist(), strict=True):
        if kind == _SPARSE:
            parameter.grad = _sum_of_sparse(parameter, group)
        elif kind == _DENSE:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            gradients.append(parameter.grad)
    _add_up(gradients, group)


_ABSENT, _SPARSE, _DENSE = range(3)  # kinds of gradients: the highest one of all processes counts


def _kind_of(gradient: Tensor | None) -> int:
    return _ABSENT if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


def _sum_of_sparse(parameter: nn.Parameter, group: ProcessGroup | None) -> Tensor:
    """Adds up a sparse gradient over the processes of a group.

    All of them gather the rows of all, in one order, so that their sums have the same bits.
    """
    # Of a table, as of an embedding: one index a row.
    rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    if parameter.grad is not None:
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices(), gradient.values()
    counts = _gathered_tensors(torch.tensor([rows.shape[1]], device=values.device), group)
    numbers = [int(count) for count in counts]
    most = max(numbers)
    # Tensors that are gathered have one shape.
    all_rows = _gathered_tensors(nn.functional.pad(rows, (0, most - rows.shape[1])), group)
    padding = values.new_zeros(most - len(values), *values.shape[1:])
    all_values = _gathered_tensors(torch.cat([values, padding]), group)
    indices = torch.cat([each[:, :number] for each, number in zip(all_rows, numbers, strict=True)], dim=1)
    entries = torch.cat([each[:number] for each, number in zip(all_values, numbers, strict=True)])
    return torch.sparse_coo_tensor(indices, entries, parameter.shape, check_invariants=False).coalesce()


def _gathered_tensors(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    received = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, tensor.contiguous(), group=group)
    return received


def _add_up(gradients: Sequence[Tensor], group: ProcessGroup | None) -> None:
    _packed(gradients, lambda tensor: dist.all_reduce(tensor, group=group))


def _buffer_kinds(model: nn.Module) -> dict[tuple[str, torch.Size, torch.dtype], Tensor]:
    return {(name, buffer.shape, buffer.dtype): buffer for name, buffer in model.named_buffers()}


def _connect(place: RankPlace, device: torch.device) -> ProcessGroup | None:
    """Finds the other processes; returns the group that tensors are exchanged in, None for the one for everything."""
    try:
        listens = place.rank == 0 and not place.store_prefix
        opened = TCPStore(place.address, place.port, place.size, listens, _JOIN_TIMEOUT)
        store = PrefixStore(place.store_prefix, opened) if place.store_prefix else opened
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=_WAIT_TIMEOUT)
    except RuntimeError as error:
        found = f"rank {place.rank} of {place.size} at {place.address}:{place.port}: {first_sentence(error)}"
        remedy = "MASTER_ADDR and MASTER_PORT name another place; GLOO_SOCKET_IFNAME names the network between nodes"
        raise RunError("The processes of a run must find each other", value=found, remedy=remedy) from error
    if device.type != "cuda":
        return None
    # Each thread has a current device of its own.
    torch.cuda.set_device(device)
    group: ProcessGroup = dist.new_group(backend="nccl", timeout=_REDUCE_TIMEOUT)
    # The first exchange makes the connection, and takes its buffers.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.cuda.synchronize(device)
    return group


def _packed(tensors: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Runs a collective on tensors."""
    # Small ones of one type that follow one another by the pack, since each exchange takes its time, however little it
    # carries.
    packs: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not packs or packs[-1][-1].dtype != tensor.dtype or tensor.nbytes > room:
            packs.append([])
            room = _PACK_BYTES
        packs[-1].append(tensor)
        room -= tensor.nbytes
    for pack in packs:
        # Large ones in place, since a copy of all would take their size once more on the device.
        if len(pack) == 1 and pack[0].is_contiguous():
            collective(pack[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in pack])
        collective(flat)
        for tensor, changed in zip(pack, flat.split([tensor.numel() for tensor in pack]), strict=True):
            tensor.copy_(changed.view(tensor.shape))
