"""Reserves memory for the optimizer's step.

The optimizer makes its state in the first step, and a step that runs out of memory half-way cannot be undone: retrying
it made a silent error of 4 to 5 %. So its memory is held as ballast until then, and checked before every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit.rescue import FIRST_WAIT_S
from can_train.memory.out_of_memory import CatchOutOfMemory

if TYPE_CHECKING:
    from can_train.fit.optimizer import OptimizerMemory
    from can_train.memory.meters import Meter


class OptimizerReserve:
    """The optimizer's memory on one device; `held_bytes` of its state are there already (all of it, once resumed)."""

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
        self._ballast: list[Tensor] = []
        self.expect(needs, held_bytes=held_bytes)

    @property
    def tensors(self) -> list[Tensor]:
        """The ballast, in a list that is emptied once it is freed."""
        return self._ballast

    def expect(self, needs: OptimizerMemory, *, held_bytes: int) -> None:
        """Replaces what the optimizer will take: other parameters may be trained than before."""
        self._tensor_bytes = needs.tensor_bytes
        self._transient_bytes = needs.transient_bytes
        self._missing_bytes = max(needs.state_bytes - held_bytes, 0)

    def hold(self) -> None:
        """Allocates ballast in place of the state that the next step will make, or raises `DoesNotFitError`."""
        if self._missing_bytes and not self._ballast:
            self._ballast = self._allocate(self._missing_bytes)

    def before_step(self) -> None:
        """Frees the ballast and checks that the step's memory can be allocated.

        Raises:
            DoesNotFitError: It cannot; nothing has been stepped.
        """
        # Emptied rather than replaced: whoever has asked for `tensors` must not keep them.
        self._ballast.clear()
        self._allocate(self._transient_bytes + self._missing_bytes)
        self._missing_bytes = 0

    def _allocate(self, need: int) -> list[Tensor]:
        for retry in range(self._retries + 1):
            # One piece is quick. Where memory is fragmented, the pieces that the optimizer will ask for still fit.
            for in_pieces in (False, True):
                sizes = _pieces(need, self._tensor_bytes) if in_pieces else [need]
                with CatchOutOfMemory():
                    return [torch.empty(size, dtype=torch.uint8, device=self._meter.device) for size in sizes]
            self._meter.release()
            # After the first failure, the released cache may be enough.
            if retry:
                self._wait(FIRST_WAIT_S * 2 ** (retry - 1))
        raise DoesNotFitError(
            "The optimizer's step must fit beside weights and gradients",
            value=f"{need / 2**20:.1f} MiB cannot be had",
            remedy="Another process may hold the memory (nvidia-smi); --optimizer sgd takes less",
            # Smaller micro-batches leave room for it when the run is resumed.
            details=OutOfMemoryDetails(should_fit=True),
        )


def _pieces(need: int, tensor_bytes: Sequence[int]) -> list[int]:
    """Returns the sizes of the parameters, over and over until they make up what is needed."""
    pieces: list[int] = []
    missing = need
    for size in cycle(tensor_bytes or (need,)):
        if missing <= 0:
            break
        pieces.append(min(size, missing))
        missing -= size
    return pieces
