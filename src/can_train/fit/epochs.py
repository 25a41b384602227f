"""Which samples each optimizer step of each epoch sees: a pure function of seed and epoch, so that a run can continue
from any position.

Shapes: R samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DoesNotFitError
from can_train.fit import random_state
from can_train.fit.packing import BatchCosts, optimizer_batches
from can_train.task import Task, TaskInEpoch

Rows = NDArray[np.int64]


def kept_rows(task: TaskInEpoch, skipped: Sequence[int]) -> Rows:
    """Returns the training samples of a task without the skipped ones."""
    return np.setdiff1d(task.train_rows, skipped) if skipped else task.train_rows


def rows_by_epoch(task: Task, skipped: Sequence[int], *, epochs: int) -> Callable[[int], Rows]:
    """Makes the function that returns the training samples of an epoch, without the skipped ones."""
    if epochs_differ(task, epochs):
        return lambda epoch: kept_rows(task.in_epoch(epoch, epochs), skipped)
    rows = kept_rows(task, skipped)
    return lambda epoch: rows


def epoch_shares(task: Task, skipped: Sequence[int], *, epochs: int) -> tuple[float, ...]:
    """Returns the samples of each epoch ÷ those of the last; a single one where epochs are alike."""
    if not epochs_differ(task, epochs):
        return (1.0,)
    rows = rows_by_epoch(task, skipped, epochs=epochs)
    sizes = [len(rows(epoch)) for epoch in range(epochs)]
    return tuple(size / max(sizes[-1], 1) for size in sizes)


def planned_orders(task: Task, skipped: Sequence[int], *, seed: int, epochs: int) -> list[Rows]:
    """Returns the samples, in order, of the epochs that a plan is made for.

    Returns:
        The first epoch; where epochs differ, the last, which is the fullest, and the first, which differs most from it.

    Raises:
        DoesNotFitError: No sample is left.
    """
    rows = kept_rows(task, skipped)
    if len(rows) == 0:
        raise DoesNotFitError("At least one training sample must fit", value="every one of them is oversize")
    if not epochs_differ(task, epochs):
        return [random_state.epoch_order(rows, seed=seed, epoch=0)]
    # The rows of the last epoch are the task's own: a dry run repeats a sample of the data to its full length, which
    # `in_epoch` does not know.
    first = kept_rows(task.in_epoch(0, epochs), skipped)
    ends = ((rows, epochs - 1), (first, 0))
    return [random_state.epoch_order(one, seed=seed, epoch=epoch) for one, epoch in ends if len(one)]


def epochs_differ(task: Task, epochs: int) -> bool:
    """Tells whether a task changes from epoch to epoch: it then returns another object for the first one."""
    return task.in_epoch(0, epochs) is not task


class Epochs:
    """The optimizer steps of a run.

    Args:
        rows: Returns the training samples of an epoch, counted from 0.
        main_feature: Returns [R] the units of the task's main feature of R samples.
        seed: Seed of the order.
        logical_batch: Samples of a step.
        preflight_units: Units of the main feature above which a batch becomes several steps; infinite: never.
    """

    def __init__(
        self,
        rows: Callable[[int], Rows],
        main_feature: Callable[[Rows], NDArray[np.float64]],
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

    def steps(self, epoch: int) -> list[Rows]:
        """Returns the samples of each optimizer step of an epoch, counted from 0."""
        order = random_state.epoch_order(self._rows(epoch), seed=self._seed, epoch=epoch)
        batches = [order[start : start + self._logical_batch] for start in range(0, len(order), self._logical_batch)]
        if self._preflight_units == np.inf:
            return batches
        steps: list[Rows] = []
        for batch in batches:
            sizes = optimizer_batches(BatchCosts.of_samples(self._main_feature(batch)), self._preflight_units)
            steps += np.split(batch, np.cumsum(sizes)[:-1])
        return steps

    def total_steps(self, epochs: int) -> int:
        """Returns the optimizer steps of a whole run, which is the length of its schedule."""
        # Without preflight there is no need to order the samples.
        if self._preflight_units == np.inf:
            return sum(-(-len(self._rows(epoch)) // self._logical_batch) for epoch in range(epochs))
        return sum(len(self.steps(epoch)) for epoch in range(epochs))
