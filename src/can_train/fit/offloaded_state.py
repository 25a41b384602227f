"""Rung "offload-optimizer": the optimizer's state waits in the memory of the host, and a step brings it to the device
in chunks of parameters. The weights equal a plain step's, bit by bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from can_train.errors import first_sentence
from can_train.memory.cuda_operators import is_on_device, offloading, on_host
from can_train.memory.host import PINNED_SHARE, room_bytes
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.memory.sharded_tensors import shard_of, sharded_like

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from can_train.memory.meters import Meter

LEAST_BYTES: Final = 4096  # Smaller parts of the state stay on the device, as scalars do
# Parameters of a chunk take at most so many bytes, and at most this share of all: three chunks are on the device at
# once. Copies of this size reach the full rate of PCIe, so that larger chunks would only take more memory.
_CHUNK_BYTES: Final = 64 * 2**20
_CHUNK_SHARE: Final = 1 / 32
CHUNKS: Final = 3  # That are on the device at once: one is stepped, one comes, one leaves
_COMPARED_STEPS: Final = 3


@dataclass(frozen=True)
class _Chunk:
    """Parameters of one group that are stepped together."""

    group: dict[str, Any]
    parameters: Sequence[Tensor]


class _StateLeftError(Exception):
    """Ends an optimizer's own step before it has stepped, since its state has left."""


@dataclass
class _OnDevice:
    """The state of a chunk that is on the device, or on its way there or back."""

    hosts: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # Copies on the host, by parameter and name
    leaving: list[Tensor] = field(default_factory=list)
    copied: torch.cuda.Event | None = None


def keep_states(keep: Sequence[Callable[[bool], object]], *, on_host: bool, meter: Meter) -> bool:
    """Keeps the state of several optimizers on the host from now on, or on the device; tells whether there is room for
    it. Without room, all of it is on the host.

    Args:
        keep: For each optimizer, keeps its state on the host or not.
        on_host: Where the state is to be.
        meter: Of the device.
    """
    with CatchOutOfMemory() as caught:
        for each in keep:
            each(on_host)
    if caught.message:
        for each in keep:
            each(True)
    meter.release()
    return not caught.message


class OffloadedState:
    """Keeps the state of an optimizer on the host between its steps, from `begin` on.

    `optimizer.step()` then steps chunks of parameters, one after the other, by the optimizer's own step. On a GPU the
    state of the next chunk comes, and the state of the last one leaves, on streams of their own meanwhile.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.is_on = False
        self._in_plain_step = False
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # To the device, and from it
        self._last_copied: torch.cuda.Event | None = None
        self._patch()

    def _patch(self) -> None:
        plain = self._optimizer.step

        # A scheduler marks the method that it has wrapped, and wraps methods alone.
        @wraps(plain)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if not self.is_on:
                return self._plain_step(plain, closure, kwargs)
            # Memory may run out in it, or be there again, so that the state comes back.
            loss = None if closure is None else _computed(closure)
            if self.is_on:
                self._step(partial(plain, **kwargs))
            else:
                plain(**kwargs)
            return loss

        self._optimizer.step = MethodType(step, self._optimizer)  # type: ignore[method-assign]
        self._optimizer.register_step_pre_hook(lambda *_: self._end_plain_step())
        # Copies to the host may be under way.
        self._optimizer.register_state_dict_pre_hook(lambda optimizer: self._await_copies())

    @property
    def host_bytes(self) -> int:
        """Bytes of the state that are on the host."""
        left = (value for value in self._values() if _movable_part(value) is not None and not is_on_device(value))
        return sum(value.nbytes for value in left) if self.is_on else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the state that are on the device."""
        return sum(value.nbytes for value in self._values()) - self.host_bytes

    def keep(self, on_host: bool) -> None:
        """Keeps the state on the host from now on, or on the device, where memory may run out."""
        if on_host:
            self.begin()
        else:
            self.end()

    def begin(self) -> None:
        """Moves the state to the host."""
        self.is_on = True
        self._return_small_values()
        for chunk in self._chunks(with_gradients=False):
            self._let_go(self._leave(chunk, _OnDevice()))

    def end(self) -> None:
        """Moves the state back to the device; where it does not fit, it stays on the host and memory runs out."""
        if not self.is_on:
            return
        self._await_copies()
        arrived: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        try:
            for chunk in self._chunks(with_gradients=False):
                for parameter in chunk.parameters:
                    before = dict(self._optimizer.state.get(parameter, {}))
                    alone = _Chunk(chunk.group, [parameter])
                    self._await(self._fetch(alone), alone)
                    arrived.append((self._optimizer.state.get(parameter, {}), before))
        except Exception:
            for state, before in arrived:
                state.update(before)
            raise
        self.is_on = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Opens a span in which the optimizer makes or reads its state: where its parameters are, on the host."""
        if not self.is_on:
            yield
            return
        with parameters_on_host(self._parameters):
            yield
        self._copy_on_host()
        self.begin()

    def _copy_on_host(self) -> None:
        """Copies the state that was read: to pinned memory, and so that it belongs to the optimizer alone."""
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                part = _movable_part(value)
                if part is not None and not is_on_device(part):
                    copy = _host_tensor(part, shard_of(parameter).device).copy_(part)
                    state[name] = _in_place_of(value, copy)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _return_small_values(self) -> None:
        """Moves the small parts of a state that was made on the host to where the optimizer looks for them."""
        for group in self._optimizer.param_groups:
            counts_on_host = not (group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                own = shard_of(parameter)
                for name, value in state.items() if is_on_device(own) else ():
                    if not isinstance(value, Tensor) or (name == "step" and counts_on_host):
                        continue
                    part = shard_of(value)
                    if part.nbytes < LEAST_BYTES and not is_on_device(part):
                        copy = torch.empty_like(part, device=own.device).copy_(part)
                        state[name] = _in_place_of(value, copy)

    def _values(self) -> Iterator[Tensor]:
        for state in self._optimizer.state.values():
            yield from (shard_of(value) for value in state.values() if isinstance(value, Tensor))

    def _plain_step(
        self, plain: Callable[..., Any], closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs the optimizer's own step, as if nothing watched it. The state may leave before it steps: in a hook or in
        its closure, where memory runs out. Chunks are stepped then in place of it.
        """
        losses: list[Any] = []

        def watched() -> Any:
            assert closure is not None
            losses.append(closure())
            self._end_plain_step()
            return losses[-1]

        self._in_plain_step = True
        try:
            return plain(**kwargs) if closure is None else plain(watched, **kwargs)
        except _StateLeftError:
            pass
        finally:
            self._in_plain_step = False
        if closure is not None and not losses:
            # The state left in a hook, which comes before the closure.
            losses.append(_computed(closure))
        self._step(partial(plain, **kwargs), hooks_before=False)
        return losses[-1] if losses else None

    def _end_plain_step(self) -> None:
        if self.is_on and self._in_plain_step:
            raise _StateLeftError

    def _step(self, plain: Callable[[], Any], *, hooks_before: bool = True) -> None:
        optimizer = self._optimizer
        groups, chunks = optimizer.param_groups, self._chunks()
        with _hooks_called_once(optimizer, before=hooks_before):
            try:
                self._step_chunks(chunks, plain)
            finally:
                optimizer.param_groups = groups

    def _step_chunks(self, chunks: Sequence[_Chunk], step: Callable[[], Any]) -> None:
        leaving, arriving = _OnDevice(), self._fetch(chunks[0]) if chunks else _OnDevice()
        for chunk, following in pairwise([*chunks, None]):
            assert chunk is not None
            ready, arriving = arriving, _OnDevice() if following is None else self._fetch(following)
            self._await(ready, chunk)
            self._optimizer.param_groups = [chunk.group]
            every = chunk.group["params"]
            chunk.group["params"] = list(chunk.parameters)
            try:
                step()
            finally:
                chunk.group["params"] = every
            self._let_go(leaving)
            leaving = self._leave(chunk, ready)
        self._let_go(leaving)

    def _chunks(self, *, with_gradients: bool = True) -> list[_Chunk]:
        groups = self._optimizer.param_groups
        limit = chunk_limit(self._parameters)
        chunks = []
        for group in groups:
            stepped = [one for one in group["params"] if one.grad is not None or not with_gradients]
            chunks += [_Chunk(group, part) for part in in_chunks(stepped, limit)]
        return chunks

    def _fetch(self, chunk: _Chunk) -> _OnDevice:
        """Begins to copy the state of a chunk to the device."""
        there = _OnDevice()
        for parameter in chunk.parameters:
            state = self._optimizer.state.get(parameter, {})
            device = shard_of(parameter).device if is_on_device(shard_of(parameter)) else None
            for name, value in state.items() if device is not None else ():
                host = _movable_part(value)
                if host is not None and not is_on_device(host):
                    state[name] = _in_place_of(value, torch.empty_like(host, device=device, pin_memory=False))
                    there.hosts[id(parameter), name] = host
        stream = self._stream(chunk, 0)
        if stream is None:
            self._copy(chunk, there)
            return there
        # Kernels that the device was given before may still use the memory.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        if self._last_copied is not None:
            stream.wait_event(self._last_copied)
        with torch.cuda.stream(stream):
            self._copy(chunk, there)
            there.copied = stream.record_event()
        return there

    def _copy(self, chunk: _Chunk, there: _OnDevice) -> None:
        for parameter in chunk.parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if (host := there.hosts.get((id(parameter), name))) is not None:
                    shard_of(value).copy_(host, non_blocking=True)

    @staticmethod
    def _await(ready: _OnDevice, chunk: _Chunk) -> None:
        if ready.copied is not None:
            torch.cuda.current_stream(shard_of(chunk.parameters[0]).device).wait_event(ready.copied)

    def _leave(self, chunk: _Chunk, ready: _OnDevice) -> _OnDevice:
        """Begins to copy the state of a chunk to the host."""
        left, pairs = _OnDevice(), []
        for parameter in chunk.parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                part = _movable_part(value)
                if part is None or not is_on_device(part):
                    continue
                host = ready.hosts.get((id(parameter), name))
                if host is None or host.shape != part.shape or host.dtype != part.dtype:
                    host = _host_tensor(part, part.device)
                state[name] = _in_place_of(value, host)
                pairs.append((host, part))
        left.leaving = [value for _, value in pairs]
        stream = self._stream(chunk, 1)
        if stream is None:
            for host, value in pairs:
                host.copy_(value)
            return left
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for host, value in pairs:
                host.copy_(value, non_blocking=True)
            left.copied = self._last_copied = stream.record_event()
        return left

    @staticmethod
    def _let_go(leaving: _OnDevice) -> None:
        """Frees the memory of a chunk on the device, which goes on once it has copied it."""
        if leaving.copied is not None and leaving.leaving:
            torch.cuda.current_stream(leaving.leaving[0].device).wait_event(leaving.copied)
        leaving.leaving.clear()

    def _await_copies(self) -> None:
        if self._last_copied is not None:
            self._last_copied.synchronize()

    def _stream(self, chunk: _Chunk, way: int) -> torch.cuda.Stream | None:
        """Returns the stream of copies to the device (0) or from it (1); None where there is no GPU."""
        device = shard_of(chunk.parameters[0]).device
        if device.type != "cuda" or not torch.cuda.is_initialized():
            return None
        self._streams = self._streams or (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[way]


def _computed(closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return closure()


def chunk_limit(parameters: Sequence[Tensor]) -> float:
    """Returns the bytes of parameters that a chunk may have."""
    return min(_CHUNK_BYTES, _CHUNK_SHARE * sum(shard_of(parameter).nbytes for parameter in parameters))


def chunk_bytes(parameters: Sequence[Tensor]) -> int:
    """Returns the bytes of the parameters of the largest chunk."""
    chunks = in_chunks(parameters, chunk_limit(parameters))
    return max((sum(shard_of(parameter).nbytes for parameter in chunk) for chunk in chunks), default=0)


def in_chunks(parameters: Sequence[Tensor], limit_bytes: float) -> Iterator[list[Tensor]]:
    """Cuts parameters, in order, into chunks of at most some bytes; one that takes more is a chunk of its own."""
    chunk, size = list[Tensor](), 0
    for parameter in parameters:
        own = shard_of(parameter).nbytes
        size += own
        if chunk and size > limit_bytes:
            yield chunk
            chunk, size = [], own
        chunk.append(parameter)
    if chunk:
        yield chunk


def _movable_part(value: Any) -> Tensor | None:
    """Returns this rank's part of a value of the state, where it is large enough to wait on the host."""
    part = shard_of(value) if isinstance(value, Tensor) else None
    if part is None or part.layout is not torch.strided or part.nbytes < LEAST_BYTES:
        return None
    return None if is_traceable_wrapper_subclass(part) else part


def _in_place_of(value: Any, part: Tensor) -> Tensor:
    """Returns a tensor to keep in place of a value of the state: `part`, or a sharded tensor with it as this rank's."""
    return part if shard_of(value) is value else sharded_like(part, value)


def _host_tensor(like: Tensor, device: torch.device) -> Tensor:
    """Makes a tensor of the host for values that go to a device; pinned for a GPU, as far as the host has memory."""
    is_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    is_pinned = is_gpu and like.nbytes <= room_bytes(PINNED_SHARE)
    with offloading():
        return torch.empty_like(like, device="cpu", pin_memory=is_pinned)


@contextmanager
def _hooks_called_once(optimizer: Any, *, before: bool = True) -> Iterator[None]:
    """Calls the hooks of an optimizer's step after the block, and before it where that was not done already, and not in
    each call of its step.
    """
    hooks, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in hooks.values() if before else ():
        hook(optimizer, (), {})
    optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks, after
    for hook in after.values():
        hook(optimizer, (), {})


@contextmanager
def parameters_on_host(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Opens a span in which parameters are, without values, on the host: an optimizer makes its state beside them."""
    held = [(parameter, shard_of(parameter.data)) for parameter in parameters]
    try:
        with offloading():
            for parameter, data in held:
                _set_data(parameter, torch.empty_like(data, device="cpu"))
            yield
    finally:
        for parameter, data in held:
            _set_data(parameter, data)


def _set_data(parameter: Any, data: Tensor) -> None:
    """Gives a parameter other values; of a sharded one, this rank's."""
    if shard_of(parameter) is parameter:
        parameter.data = data
    else:
        parameter._local_tensor = data


def refusal(make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> str:
    """Returns the reason why an optimizer cannot step in chunks, as a clause; empty where it can. Some steps of small
    parameters are compared: an optimizer whose step of one parameter depends on others moves the weights otherwise.
    """
    try:
        whole, parts = (_weights_after(make, is_on=is_on) for is_on in (False, True))
    except Exception as error:  # noqa: BLE001 - an optimizer may be anybody's code
        return f"its step failed for a part of the parameters ({first_sentence(error)})"
    is_same = all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    return "" if is_same else "its step of a parameter depends on other parameters"


def refusal_of(optimizer: Optimizer) -> str:
    """Returns the reason why the optimizer of somebody else's loop cannot step in chunks, as `refusal` does."""
    if getattr(optimizer, "scaler", None) is not None:
        return "accelerate's gradient scaler calls a step of its own"
    kind: Any = type(optimizer)
    taken = signature(kind).parameters
    return refusal(partial(kind, **{name: value for name, value in optimizer.defaults.items() if name in taken}))


def _weights_after(make: Callable[[Sequence[nn.Parameter]], Optimizer], *, is_on: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Its tensors are in cycles, and would stay on a simulated GPU until these are collected.
    with torch.random.fork_rng(devices=[]), on_host():
        torch.manual_seed(0)
        shapes = ((6, 4), (5, 3), (4, 8), (3, 3))
        weights = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
        optimizer = make(weights)
        if is_on:
            OffloadedState(optimizer).begin()
        for number in range(_COMPARED_STEPS):
            for weight in weights:
                weight.grad = (1 + number) * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
    return [weight.detach() for weight in weights]
