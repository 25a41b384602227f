"""The memory that an optimizer takes beside the batch: its measure on the CPU, and the reserve on the device until the
optimizer has made its state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit.offloaded_state import OffloadedState, parameters_on_host
from can_train.fit.optimizer import make_optimizer
from can_train.io.units import size_text
from can_train.memory.out_of_memory import FIRST_WAIT_S, CatchOutOfMemory, without_others
from can_train.memory.sharded_tensors import shard_of
from can_train.memory.simulated.gpu import LiveStorageTracker

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.memory.meters import Meter

_UNLIMITED: Final = 2**62
_SAMPLE_WEIGHTS: Final = 2**18  # Whose state is measured: what an optimizer counts beside it is a small part


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes that an optimizer takes of the device."""

    parameter_bytes: int  # Size of the trained parameters; their gradients take as much
    state_bytes: int  # State that the optimizer keeps from its first step on
    transient_bytes: int  # Temporary memory of a step
    # Size of each trained parameter that is not empty: the pieces that an optimizer works in.
    tensor_bytes: tuple[int, ...]
    host_bytes: int = 0  # State that waits on the host between steps


def measure_optimizer(
    parameters: Iterable[Tensor], make: Callable[[Sequence[nn.Parameter]], Optimizer], *, offloaded: bool = False
) -> OptimizerMemory:
    """Measures two steps of the optimizer that `make` returns, on zeros of the trained parameters' shapes; `offloaded`
    tells whether its state waits on the host.
    """
    shards = [shard_of(parameter) for parameter in parameters]
    # A model on meta may be larger than the host.
    fake = FakeTensorMode() if any(shard.is_meta for shard in shards) else nullcontext()
    with fake, LiveStorageTracker(_UNLIMITED) as tracker:
        shadows = [nn.Parameter(torch.zeros(shard.shape, dtype=shard.dtype, device="cpu")) for shard in shards]
        parameter_bytes = tracker.live_bytes
        for shadow in shadows:
            shadow.grad = torch.zeros_like(shadow)
        before = tracker.live_bytes
        # Adagrad makes its state here.
        with parameters_on_host(shadows) if offloaded else nullcontext():
            optimizer = make(shadows)
        if offloaded:
            OffloadedState(optimizer).begin()
        optimizer.step()
        state_bytes = tracker.live_bytes - before
        # State is made in the first step, so only the second has the temporary memory of all later ones.
        optimizer.step()
        transient_bytes = tracker.peak_bytes - tracker.live_bytes
    return OptimizerMemory(
        parameter_bytes=parameter_bytes,
        state_bytes=max(state_bytes, 0),
        transient_bytes=max(transient_bytes, 0),
        tensor_bytes=tuple(shadow.nbytes for shadow in shadows if shadow.nbytes),
        host_bytes=tracker.host_bytes,
    )


def state_share(training: TrainingSettings, dtype: torch.dtype) -> float:
    """Returns the size of the state that the optimizer of some settings keeps ÷ the size of the weights; no weights are
    needed for it.
    """
    sample = [torch.empty(_SAMPLE_WEIGHTS, dtype=dtype, device="cpu")]
    needs = measure_optimizer(sample, lambda shadows: make_optimizer(shadows, training, training.lr, sample[0].device))
    return needs.state_bytes / needs.parameter_bytes


class OptimizerReserve:
    """Reserves the memory of the optimizer's step on one device. Of its state, `held_bytes` are there already (all of
    it, once resumed).

    The optimizer makes its state in the first step, and a step that runs out of memory half-way cannot be undone:
    retrying it made a silent error of 4 to 5 %. So its memory is held as ballast until then, and checked before every
    step.

    Attributes:
        tensors: The ballast, in a list that is emptied once it is freed.
        remedy: The end of the sentence that an error gives as its remedy.
    """

    remedy = "take smaller micro-batches, --optimizer sgd, which needs less, or a larger device"

    def __init__(
        self,
        needs: OptimizerMemory,
        meter: Meter,
        *,
        held_bytes: int = 0,
        retries: int = 3,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._meter = meter
        self._retries = retries
        self._wait = wait
        self.tensors: list[Tensor] = []
        self.expect(needs, held_bytes=held_bytes)

    def expect(self, needs: OptimizerMemory, *, held_bytes: int) -> None:
        """Replaces the memory that the optimizer will take: other parameters may be trained than before."""
        self._tensor_bytes = needs.tensor_bytes
        self._transient_bytes = needs.transient_bytes
        self._missing_bytes = max(needs.state_bytes - held_bytes, 0)

    def hold(self) -> None:
        """Allocates ballast in place of the state that the next step will make, or raises `DoesNotFitError`."""
        if self._missing_bytes and not self.tensors:
            self.tensors = self._allocate(self._missing_bytes)

    def before_step(self) -> None:
        """Frees the ballast and checks that the step's memory can be allocated.

        Raises:
            DoesNotFitError: It cannot; nothing has been stepped.
        """
        # Emptied rather than replaced: whoever has asked for `tensors` must not keep them.
        self.tensors.clear()
        self._allocate(self._transient_bytes + self._missing_bytes)
        self._missing_bytes = 0

    def _allocate(self, need: int) -> list[Tensor]:
        for retry in range(self._retries + 1):
            if (held := allocate_ballast(need, self._tensor_bytes, self._meter.device)) is not None:
                return held
            self._meter.release()
            # After the first failure, the released cache may be enough.
            if retry:
                self._wait(FIRST_WAIT_S * 2 ** (retry - 1))
        raise DoesNotFitError(
            "The optimizer's step must fit beside weights and gradients",
            value=f"{size_text(need)} cannot be had",
            remedy=without_others(self._meter.foreign_bytes_at_start + self._meter.foreign_bytes(), self.remedy),
            # Smaller micro-batches leave room for it when the run is resumed.
            details=OutOfMemoryDetails(should_fit=True),
        )


def allocate_ballast(need: int, tensor_bytes: Sequence[int], device: torch.device) -> list[Tensor] | None:
    """Allocates as many bytes as an optimizer's state and step need, for parameters of `tensor_bytes` each; returns
    None where the device has no room for them.
    """
    # One piece is quick. Where memory is fragmented, the pieces that the optimizer will ask for still fit.
    for sizes in ([need], [*_pieces(need, tensor_bytes)]):
        with CatchOutOfMemory():
            return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    return None


def _pieces(need: int, tensor_bytes: Sequence[int]) -> Iterator[int]:
    """Yields the sizes of the parameters, over and over until they add up to `need`."""
    for size in cycle(tensor_bytes or (need,)):
        if need <= 0:
            break
        yield min(size, need)
        need -= size
