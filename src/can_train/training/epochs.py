"""Which samples each optimizer step of each epoch sees: a pure function of seed and epoch, so that any position in a
run can be come back to.
"""

import numpy as np
from numpy.typing import NDArray

from can_train.policy.limits import optimizer_batches
from can_train.policy.packing import BatchCosts
from can_train.training import randomness


class Epochs:
    """The optimizer steps of a run.

    Args:
        rows: [R] the training samples.
        main_feature: [R] how much of the task's main feature each has.
        seed: Of the order.
        logical_batch: Samples of a step.
        preflight_units: Units of the main feature above which a batch becomes several steps; infinite: never.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        main_feature: NDArray[np.float64],
        *,
        seed: int,
        logical_batch: int,
        preflight_units: float,
    ) -> None:
        self._rows = rows
        self._main_feature = main_feature
        self._seed = seed
        self._logical_batch = logical_batch
        self._preflight_units = preflight_units

    def steps(self, epoch: int) -> list[NDArray[np.int64]]:
        """Returns the samples of each optimizer step of an epoch, counted from 0."""
        order = randomness.epoch_order(np.arange(len(self._rows)), seed=self._seed, epoch=epoch)
        return [self._rows[positions] for positions in self._cut(order)]

    def total_steps(self, epochs: int) -> int:
        """Returns the optimizer steps of a whole run: as many as its schedule is long."""
        if self._preflight_units == np.inf:
            return epochs * -(-len(self._rows) // self._logical_batch)
        return sum(len(self.steps(epoch)) for epoch in range(epochs))

    def _cut(self, order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        batches = [order[start : start + self._logical_batch] for start in range(0, len(order), self._logical_batch)]
        if self._preflight_units == np.inf:
            return batches
        steps: list[NDArray[np.int64]] = []
        for batch in batches:
            sizes = optimizer_batches(BatchCosts.of_samples(self._main_feature[batch]), self._preflight_units)
            steps += np.split(batch, np.cumsum(sizes)[:-1])
        return steps
