"""Curriculum: a classifier sees all attacks and the hardest benign windows first, then more and more benign windows.

Shapes: R training windows, H benign training windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.task import Outputs
from can_train_tasks.can.data.dataset import CanData
from can_train_tasks.can.data.graphs import Bools, Floats, Ints
from can_train_tasks.can.losses import ClassifierBatch
from can_train_tasks.can.modes.windows import ClassifierTask
from can_train_tasks.can.reference_models import AUTOENCODER, WindowReferenceModel
from can_train_tasks.can.settings import CurriculumSettings

# Share of the training between two steps of the moving average. With steps of one epoch, a momentum of 0.9 would lag
# nine epochs, and a training of ten epochs would not reach the final ratio.
TICK: Final = 1e-3

# Rank of every attack: before the hardest benign window, whose rank is 0.
_ATTACK: Final = -1


@dataclass(frozen=True)
class RatioSchedule:
    """Benign windows for each attack: constant at first, then a ramp, smoothed by a moving average."""

    start: float  # the ratio before it begins to rise
    end: float  # the ratio in the last epoch
    warmup: float  # share of the training before the ratio begins to rise, in [0, 1)
    smoothing: float  # momentum of the moving average for each `TICK`, in [0, 1)

    def ratio(self, epoch: int, epochs: int) -> float:
        """Returns the ratio of an epoch, counted from 0.

        >>> schedule = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=0.9)
        >>> [round(schedule.ratio(epoch, 11), 2) for epoch in (0, 1, 6, 10)]
        [1.0, 1.0, 5.96, 10.0]
        """
        # The ratio is a function of the epoch alone, so a resumed run needs no state of the moving average.
        progress = epoch / (epochs - 1) if epochs > 1 else 1.0
        risen = self._smoothed(progress) / self._smoothed(1.0)
        return self.start + (self.end - self.start) * risen

    def _smoothed(self, progress: float) -> float:
        """Returns the moving average of a ramp that rises by 1 a tick."""
        # a(k) = m·a(k − 1) + (1 − m)·k with a(0) = 0 is k − m·(1 − mᵏ)/(1 − m), which holds between ticks too. It ends
        # m/(1 − m) ticks below the ramp: the caller divides by its last value.
        ticks = max(progress - self.warmup, 0.0) / TICK
        lag = self.smoothing / (1 - self.smoothing)
        return ticks - lag * (1.0 - math.pow(self.smoothing, ticks))


@dataclass(frozen=True, kw_only=True, eq=False)
class Composition:
    """The windows of an epoch: `rows`, ascending; `benign` and `attacks` count them by class."""

    rows: Ints
    benign: int
    attacks: int

    @property
    def log_prior(self) -> float:
        """Logarithm of benign ÷ attack windows; a class without windows counts as one."""
        # With this prior added to the benign logit, the model need not learn the class frequencies of an epoch, and its
        # logits have one meaning in all epochs.
        return math.log(max(self.benign, 1) / max(self.attacks, 1))


class Curriculum:
    """Training windows in the order of joining an epoch: all attacks, then benign windows, the hardest first.

    Args:
        rows: [R] the windows, ascending.
        is_attack: [R] the labels.
        difficulty: [H] of the benign windows. Equally hard windows join in ascending order.
    """

    def __init__(self, rows: Ints, is_attack: Bools, difficulty: Floats) -> None:
        self._rows = rows
        self._rank = np.full(len(rows), _ATTACK, dtype=np.int64)
        hardest_first = np.argsort(-difficulty, kind="stable")
        self._rank[np.flatnonzero(~is_attack)[hardest_first]] = np.arange(len(difficulty))
        self.benign = len(difficulty)
        self.attacks = len(rows) - len(difficulty)

    def with_ratio(self, ratio: float) -> Composition:
        """Returns all attacks, and the hardest benign windows: `ratio` for each attack, or all if there are fewer."""
        # A sample of the data may hold no attack; then all benign windows take part.
        wanted = round(ratio * self.attacks) if self.attacks else self.benign
        benign = min(max(wanted, 1), self.benign)
        return Composition(rows=self._rows[self._rank < benign], benign=benign, attacks=self.attacks)


class CurriculumTask(ClassifierTask):
    r"""A classifier learns from labelled windows; an epoch has all attacks and the hardest benign windows.

    In training, :math:`\log(\mathrm{benign} / \mathrm{attacks})` of the epoch is added to the benign logit (Source:
    Menon et al., "Long-tail learning via logit adjustment", 2021). Validation, threshold and judgement equal the plain
    classifier's.

    Raises:
        DataError: There are no labels, or windows of one class only.
        CheckpointError: The autoencoder does not fit the windows.
    """

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data)
        self._is_training_attack = data.flat.label[data.split.train] > 0
        self._benign = data.split.train[~self._is_training_attack]
        self._available = len(self._benign) / max(int(self._is_training_attack.sum()), 1)
        autoencoder = finished[AUTOENCODER]
        self._autoencoder = WindowReferenceModel(AUTOENCODER, autoencoder, data, self._benign, output="errors")
        mode: CurriculumSettings = run.mode
        # The ratio rises until the last epoch, but to no more than the data have.
        end = min(mode.end_ratio, max(self._available, mode.start_ratio))
        self._schedule = RatioSchedule(mode.start_ratio, end, mode.ratio_warmup, mode.ratio_smoothing)
        # Plans are made before the autoencoder's outputs are known, so they use random difficulties: with equal
        # difficulties, the windows of the first log would be the hardest.
        self._rank(np.random.default_rng(run.training.seed).random(len(self._benign)))

    def reference_models(self) -> Sequence[WindowReferenceModel]:
        """Returns the autoencoder, whose errors rank the benign windows."""
        return (self._autoencoder,)

    def bind_outputs(self, role: str, outputs: Outputs) -> None:
        """Ranks the benign windows by their errors.

        Raises:
            RunError: An error is not a finite number.
        """
        difficulty = self._autoencoder.network_scores(outputs(self._benign)["errors"].double().cpu().numpy())
        self._autoencoder.check_finite(difficulty)
        self._rank(difficulty)

    def in_epoch(self, epoch: int, epochs: int) -> CurriculumEpoch:
        """Returns the windows of an epoch, counted from 0, and its batches."""
        return CurriculumEpoch(self, self._curriculum.with_ratio(self._schedule.ratio(epoch, epochs)))

    def notices(self) -> Sequence[str]:
        """Returns a notice if the data have fewer benign windows than the last epoch should have."""
        wanted = self._run.mode.end_ratio
        # The ratio in a sample differs from the ratio in the whole data.
        if self._data.sample is not None or self._available >= wanted:
            return ()
        available = f"The data have {self._available:.3g} benign windows for each attack"
        return (f"{available}: the ratio rises to that, not to mode.end_ratio={wanted:g}",)

    def _rank(self, difficulty: Floats) -> None:
        self._curriculum = Curriculum(self._data.split.train, self._is_training_attack, difficulty)
        self._train_on(self._curriculum.with_ratio(self._schedule.end).rows)


@dataclass(frozen=True, eq=False)
class CurriculumEpoch:
    """A curriculum in one epoch."""

    task: CurriculumTask
    composition: Composition

    @property
    def train_rows(self) -> Ints:
        """The windows of the epoch, ascending."""
        return self.composition.rows

    def logical_batch(
        self, rows: Ints, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> ClassifierBatch:
        """Prepares a logical batch; all windows have equal weight."""
        gather, prior = self.task.gather_to(device, dtype), self.composition.log_prior
        hidden = self.task.hidden_ids(rows, generator)
        return ClassifierBatch(rows, gather, np.ones(len(rows)), benign_offset=prior, hidden=hidden)
