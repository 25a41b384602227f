"""Keeps room for what the optimizer will take. Its state does not exist before the first step, and a step that runs out
of memory half-way cannot be undone: so the room is held until then, and made sure of before every step.
"""

import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit.optimizer import OptimizerMemory
from can_train.fit.rescue import FIRST_WAIT_S
from can_train.memory.meters import Meter
from can_train.memory.out_of_memory import CatchOutOfMemory


class OptimizerReserve:
    """The optimizer's room on one device.

    Args:
        needs: What the optimizer takes.
        meter: Of the device.
        held_bytes: Of its state, what is there already (in a resumed run, all of it).
        retries: Attempts to make room, after the first.
        wait: Sleeps some seconds.
    """

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
        """What is held, in a list that is emptied once it is freed."""
        return self._ballast

    def expect(self, needs: OptimizerMemory, *, held_bytes: int) -> None:
        """Takes note of what the optimizer will take from now on: other parameters may be trained than before."""
        self._tensor_bytes = needs.tensor_bytes
        self._transient_bytes = needs.transient_bytes
        self._missing_bytes = max(needs.state_bytes - held_bytes, 0)

    def hold(self) -> None:
        """Takes the place of the state that the next step will make.

        Raises:
            DoesNotFitError: There is no room for it.
        """
        if self._missing_bytes and not self._ballast:
            self._ballast = self._take(self._missing_bytes)

    def before_step(self) -> None:
        """Frees what was held and makes sure that the step's memory can be had.

        Raises:
            DoesNotFitError: It cannot; nothing has been stepped.
        """
        # Emptied rather than replaced: who has asked for `tensors` must not keep them.
        self._ballast.clear()
        self._take(self._transient_bytes + self._missing_bytes)
        self._missing_bytes = 0

    def _take(self, need: int) -> list[Tensor]:
        for attempt in range(self._retries + 1):
            # In one piece where that can be had, which is quick, else in the pieces that the optimizer will ask for.
            taken = self._attempt([need]) or self._attempt(_pieces(need, self._tensor_bytes))
            if taken:
                return taken
            self._meter.release()
            if attempt:
                self._wait(FIRST_WAIT_S * 2 ** (attempt - 1))
        raise DoesNotFitError(
            "The optimizer's step must fit beside weights and gradients",
            value=f"{need / 2**20:.1f} MiB cannot be had",
            remedy="Another process may hold the memory (nvidia-smi); --optimizer sgd takes less",
            # A run that failed here goes on with smaller micro-batches.
            details=OutOfMemoryDetails(should_fit=True),
        )

    def _attempt(self, sizes: Sequence[int]) -> list[Tensor]:
        with CatchOutOfMemory():
            return [torch.empty(size, dtype=torch.uint8, device=self._meter.device) for size in sizes]
        return []


def _pieces(need: int, tensor_bytes: Sequence[int]) -> list[int]:
    """Sizes of the parameters, over and over until they make up what is needed."""
    pieces: list[int] = []
    missing = need
    for size in cycle(tensor_bytes):
        if missing <= 0:
            break
        pieces.append(min(size, missing))
        missing -= size
    return pieces
