"""The engine: fits one optimized model to its device, whosever loop trains it. A run has one for each phase of its
task, the loop of another framework has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from can_train.fit.cost_model import DeviceLimits
    from can_train.fit.micro_batcher import BatchResult, MicroBatcher
    from can_train.fit.packing import SplitRules
    from can_train.fit.rescue import OptimizerReserve
    from can_train.memory.meters import Meter
    from can_train.memory.monitor import MemoryMonitor


@dataclass(kw_only=True)
class Engine:
    """The memory of one optimized model on its device.

    Attributes:
        batcher: Cuts batches into micro-batches, and rescues those that run out of memory.
        reserve: The memory of the optimizer's step.
        monitor: Measures peaks; the engines of a run have one monitor.
        largest_cost: Cost in bytes of the costliest micro-batch whose memory was counted: the monitor's peak is its.
        cost_after_rescue: Cost in bytes of the costliest one after the last out-of-memory; `largest_cost` where memory
            never ran out.
        largest_micro_batch: Samples of the largest micro-batch.
    """

    meter: Meter
    monitor: MemoryMonitor
    batcher: MicroBatcher
    reserve: OptimizerReserve
    largest_cost: float = 0.0
    cost_after_rescue: float = 0.0
    largest_micro_batch: int = 0

    def set_limits(self, rules: SplitRules, limits: DeviceLimits | None) -> None:
        """Cuts batches by other limits from now on, whose costs are not comparable with earlier ones."""
        self.batcher.set_limits(rules, limits)
        self.largest_cost = self.cost_after_rescue = 0.0

    def record_result(self, result: BatchResult, *, is_counted: bool = True) -> None:
        """Records the micro-batches of a batch, and their costs where the monitor counted their memory."""
        self.largest_micro_batch = max((self.largest_micro_batch, *result.micro_batches))
        if is_counted:
            self.largest_cost = max(self.largest_cost, result.largest_cost)
            self.cost_after_rescue = max(self.cost_after_rescue, result.cost_after_rescue)

    def record_rescue(self) -> None:
        """Separates the micro-batches from now on from those before: memory ran out, and is free again."""
        self.monitor.rescued()
        self.cost_after_rescue = 0.0

    @property
    def peak_bytes_after_rescue(self) -> int:
        """Peak since the last out-of-memory; 0 where no micro-batch since then was counted."""
        return self.monitor.peak_bytes_after_rescue if self.cost_after_rescue else 0
