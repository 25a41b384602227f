"""The optimizer steps of a run: which samples each of them sees.

Shapes: R samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DoesNotFitError
from can_train.fit.packing import BatchCosts, optimizer_batches, packing_order
from can_train.fit.plan import bucketed

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.task import BatchTask, TaskInEpoch

Rows = NDArray[np.int64]
# Samples of the epochs after the first one for which a plan is made. Cutting 100,000 samples takes up to a second.
_OTHER_ROWS: Final = 100_000


def epochs_differ(task: BatchTask, epochs: int) -> bool:
    """Tells whether a task changes from epoch to epoch: it then returns another object for the first one."""
    return task.in_epoch(0, epochs) is not task


def kept_rows(task: TaskInEpoch, skipped: Sequence[int]) -> Rows:
    """Returns the training samples of a task without the skipped ones."""
    return np.setdiff1d(task.train_rows, skipped) if skipped else task.train_rows


def rows_by_epoch(task: BatchTask, skipped: Sequence[int], *, epochs: int) -> Callable[[int], Rows]:
    """Makes the function that returns the training samples of an epoch, without the skipped ones."""
    if epochs_differ(task, epochs):
        return lambda epoch: kept_rows(task.in_epoch(epoch, epochs), skipped)
    rows = kept_rows(task, skipped)
    return lambda epoch: rows


def order_by_epoch(task: BatchTask, skipped: Sequence[int], training: TrainingSettings) -> Callable[[int], Rows]:
    """Makes the function that returns the training samples of an epoch in their order, without the skipped ones."""
    rows = rows_by_epoch(task, skipped, epochs=training.epochs)
    return lambda epoch: task.epoch_order(rows(epoch), seed=training.seed, epoch=epoch)


def size_of_epochs(task: BatchTask, skipped: Sequence[int], *, epochs: int) -> int | None:
    """Returns the training samples of every epoch, without skipped ones; None: epochs may have different numbers."""
    return None if epochs_differ(task, epochs) else task.epoch_size(kept_rows(task, skipped))


def epoch_shares(task: BatchTask, skipped: Sequence[int], *, seed: int, epochs: int) -> tuple[float, ...]:
    """Returns the samples of each epoch ÷ samples of the epoch that `planned_orders` yields first; a single share where
    epochs are alike. Where only the order of an epoch tells its size, the epochs of `planned_orders` and the last stand
    for all.
    """
    if epochs_differ(task, epochs):
        sizes = [len(kept_rows(task.in_epoch(epoch, epochs), skipped)) for epoch in range(epochs)]
        return tuple(size / max(sizes[-1], 1) for size in sizes)
    rows = kept_rows(task, skipped)
    if task.epoch_size(rows) is not None:
        return (1.0,)
    looked = dict.fromkeys((*range(min(epochs, _planned_epochs(rows))), epochs - 1))
    sizes = [len(task.epoch_order(rows, seed=seed, epoch=epoch)) for epoch in looked]
    return tuple(size / max(sizes[0], 1) for size in sizes)


def _planned_epochs(rows: Rows) -> int:
    """Returns the number of epochs of these samples that a plan is made for at most."""
    return 1 + _OTHER_ROWS // max(len(rows), 1)


def packed_rows(task: BatchTask, rows: Rows) -> Rows:
    """Returns samples that are computed together in the order of `packing_order`."""
    if not any(feature.padding for feature in task.memory_features):
        return rows
    return rows[packing_order(task.memory_features, task.batch_features(rows))]


def planned_orders(task: BatchTask, skipped: Sequence[int], *, seed: int, epochs: int) -> Iterator[Rows]:
    """Yields the samples, in order, of the epochs that a plan is made for: the first epoch, then the others, up to
    `_OTHER_ROWS` samples; where epochs differ, the last, which is the fullest, and the first, which differs most from
    it.

    Raises:
        DoesNotFitError: No sample is left.
    """
    rows = kept_rows(task, skipped)
    if len(rows) == 0:
        raise DoesNotFitError("At least one training sample must fit", value="all samples are oversize",
                              remedy="Choose a larger device, or a smaller model by its settings (--set)")  # fmt: skip
    if not epochs_differ(task, epochs):
        # Each epoch has other batches, and the largest of all of them makes the run's peak.
        for epoch in range(1 if task.in_order else min(epochs, _planned_epochs(rows))):
            yield task.planned_order(rows, seed=seed, epoch=epoch)
        return
    # The rows of the last epoch are the task's own: a dry run repeats a sample of the data to its full length, which
    # `in_epoch` does not know.
    first = kept_rows(task.in_epoch(0, epochs), skipped)
    ends = ((rows, epochs - 1), (first, 0))
    yield from (task.planned_order(kept, seed=seed, epoch=epoch) for kept, epoch in ends if len(kept))


@dataclass(frozen=True)
class Steps(Sequence[Rows]):
    """The samples of optimizer steps; samples of a stream are counted when their step is asked for."""

    batches: Sequence[Rows]
    packed: Callable[[Rows], Rows]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Steps(self.batches[index], self.packed)
        return self.packed(self.batches[index])


@dataclass(frozen=True)
class Epochs:
    """The optimizer steps of a run: a pure function of seed and epoch, so that it can continue from any position."""

    order: Callable[[int], Rows]  # Returns the training samples of an epoch, counted from 0, in their order
    main_feature: Callable[[Rows], NDArray[np.float64]]  # Returns [R] the units of the main feature of R samples
    seed: int
    logical_batch: int
    preflight_units: float  # A batch of more units of the main feature becomes several steps; infinite: never
    packed: Callable[[Rows], Rows] = lambda rows: rows  # Returns the samples of a step in the order of `packing_order`
    size: int | None = None  # Samples of every epoch; None: `order` tells it of each
    bucketed: bool = False  # Whether batches hold samples of about the same size

    def steps(self, epoch: int) -> Steps:
        """Returns the samples of each optimizer step of an epoch, counted from 0, in the order of `packing_order`."""
        return Steps(self.batches(epoch), self.packed)

    def batches(self, epoch: int) -> Sequence[Rows]:
        """Returns the samples of each optimizer step of an epoch, before they are put into the order of a step."""
        order = self.order(epoch)
        if self.bucketed:
            order = order[bucketed(self.main_feature(order), self.logical_batch, seed=self.seed, epoch=epoch)]
        batches = [order[start : start + self.logical_batch] for start in range(0, len(order), self.logical_batch)]
        if self.preflight_units == np.inf:
            return batches
        steps: list[Rows] = []
        for batch in batches:
            sizes = optimizer_batches(BatchCosts.of_samples(self.main_feature(batch)), self.preflight_units)
            steps += np.split(batch, np.cumsum(sizes)[:-1])
        return steps

    def total_steps(self, epochs: int) -> int:
        """Returns the optimizer steps of a whole run, which is the length of its schedule."""
        if self.preflight_units == np.inf and self.size is not None:
            # An order of each of a million epochs takes a minute.
            return epochs * -(-self.size // self.logical_batch)
        if self.preflight_units == np.inf:
            return sum(-(-len(self.order(epoch)) // self.logical_batch) for epoch in range(epochs))
        return sum(len(self.steps(epoch)) for epoch in range(epochs))
