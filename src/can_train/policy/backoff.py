"""How far micro-batches shrink after an out-of-memory and how they grow back: a pure state, moved by what happened. The
state is in the checkpoint, so that a resumed run does not run into the same wall again.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from can_train.policy.packing import ROUNDING

QUIET_STEPS: Final = 20
"""Optimizer steps without an out-of-memory after which a larger micro-batch is tried."""

MAX_QUIET_STEPS: Final = 2000
"""Longest wait: it doubles with each attempt to grow that failed."""

CLOSE: Final = 0.05
"""Relative distance between what fits and what failed below which growing between them is not worth a failure."""

RETREAT: Final = 0.9
"""Share of the limit that is kept when the allocator is too full (it only just managed, twice in a row), or when memory
runs out at a cost that did fit."""


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """What out-of-memories have taught since the run began; costs in bytes above base.

    Attributes:
        limit: What one micro-batch may cost for now; infinite: whatever was planned.
        failed: Smallest cost that ran out; infinite: none in force.
        held: Limit that lasted a whole quiet stretch; 0: none has.
        quiet: Optimizer steps since the last out-of-memory or growth.
        patience: Quiet steps that the next growth waits for.
        surprises: Out-of-memories in a row, without a growth between, of what should have fitted.
    """

    limit: float = math.inf
    failed: float = math.inf
    held: float = 0.0
    quiet: int = 0
    patience: int = QUIET_STEPS
    surprises: int = 0

    def after_oom(self, cost: float, *, factor: float, proven: float = 0.0) -> "Backoff":
        """A micro-batch ran out of memory.

        What has never been seen to fit is divided by the factor. Where something as costly did fit, the failure says
        little of the others: a sample took more than it should, or the memory is in pieces. Those to come are then only
        a little smaller, and less little each time.

        Args:
            cost: Of that micro-batch.
            factor: Divisor of the limit.
            proven: Largest cost that was seen to fit; 0 where nobody searched.
        """
        held = self.held if self.held < cost else 0.0
        if cost > proven * (1 + ROUNDING):
            limit, surprises = max(cost / factor, held), self.surprises
        else:
            limit, surprises = cost * max(1 - (1 - RETREAT) * 2**self.surprises, 1 / factor), self.surprises + 1
        return replace(
            self, limit=min(self.limit, limit), failed=min(cost, self.failed), held=held, quiet=0, surprises=surprises
        )

    def after_step(self, *, planned: float, factor: float) -> "Backoff":
        """An optimizer step went well; after enough of them the limit grows.

        Args:
            planned: The largest cost that plans ask for: growth ends there.
            factor: What a limit grows by where nothing is known of the sizes above it.
        """
        if self.limit == math.inf:
            return self
        if self.quiet + 1 < self.patience:
            return replace(self, quiet=self.quiet + 1)
        if self.failed > self.limit * (1 + CLOSE):
            limit = min((self.limit + self.failed) / 2, factor * self.limit)
            # Where nothing has failed since the last growth, that one went well: there is no reason left to wait.
            patience = QUIET_STEPS if self.failed == math.inf else self.patience
            grown = replace(self, limit=limit, held=self.limit, quiet=0, patience=patience, surprises=0)
        else:
            # What failed then may fit now: the memory may have been another process's. Trying it costs a rescue, so
            # the wait for the next such try doubles.
            patience = min(self.patience * 2, MAX_QUIET_STEPS)
            grown = Backoff(limit=self.limit * factor, held=self.limit, patience=patience)
        return grown if grown.limit < planned else Backoff(held=grown.held, patience=grown.patience)

    def after_pressure(self, cost: float) -> "Backoff":
        """The allocator had to release its cache in two steps in a row: the next micro-batches are a little smaller."""
        return replace(self, limit=min(self.limit, cost) * RETREAT, failed=min(self.failed, cost), held=0.0, quiet=0)
