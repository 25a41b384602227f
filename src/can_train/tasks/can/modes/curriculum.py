"""What a curriculum shows when: the schedule of benign windows for each attack, and which windows an epoch has by it.
How hard a window is, others find out.

Shapes: R training windows, H benign ones among them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import RunError
from can_train.task import Outputs
from can_train.tasks.can.data.dataset import CanData
from can_train.tasks.can.losses import ClassifierBatch, Gather
from can_train.tasks.can.modes.classifier import ClassifierTask
from can_train.tasks.can.reference_models import AUTOENCODER, WindowReferenceModel, reference_model_of
from can_train.tasks.can.settings import CurriculumSettings

TICK: Final = 1e-3
"""Share of the training after which the smoothed ratio moves on. Smoothed by epochs, ten of them would not reach the
end: with a momentum of 0.9 the ratio would lag nine epochs behind."""


_ATTACK: Final = -1
"""Place of every attack: before the hardest benign window."""


@dataclass(frozen=True, kw_only=True)
class RatioSchedule:
    """Benign windows for each attack: level at first, then a ramp, smoothed by a moving average.

    Attributes:
        start: The ratio at first.
        end: The ratio in the last epoch.
        warmup: Share of the training before it begins to rise, in [0, 1).
        smoothing: Momentum of the moving average, in [0, 1); a tick is `TICK` of the training.
    """

    start: float
    end: float
    warmup: float
    smoothing: float

    def ratio(self, epoch: int, epochs: int) -> float:
        """Returns the ratio of an epoch: a pure function, so that it can be come back to.

        >>> schedule = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=0.9)
        >>> [round(schedule.ratio(epoch, 11), 2) for epoch in (0, 1, 6, 10)]
        [1.0, 1.0, 5.96, 10.0]

        Args:
            epoch: Counted from 0.
            epochs: Of the training; where there is one only, it is the last.
        """
        progress = epoch / (epochs - 1) if epochs > 1 else 1.0
        risen = self._smoothed(progress) / self._smoothed(1.0)
        return self.start + (self.end - self.start) * risen

    def _smoothed(self, progress: float) -> float:
        """Returns the average at a point of the training of a ramp that rises by 1 a tick.

        a(k) = m·a(k − 1) + (1 − m)·k from a(0) = 0 is k − m·(1 − mᵏ)/(1 − m), which holds between ticks too. It ends
        m/(1 − m) ticks short of the ramp: the caller divides by where it ends.
        """
        ticks = max(progress - self.warmup, 0.0) / TICK
        lag = self.smoothing / (1 - self.smoothing)
        return ticks - lag * (1.0 - math.pow(self.smoothing, ticks))


@dataclass(frozen=True, kw_only=True, eq=False)
class Composition:
    """The windows of an epoch.

    Attributes:
        rows: Its windows, ascending.
        benign: How many of them are benign.
        attacks: How many are attacks.
    """

    rows: NDArray[np.int64]
    benign: int
    attacks: int

    @property
    def log_prior(self) -> float:
        """Logarithm of benign ÷ attack windows; a class without windows counts as one."""
        return math.log(max(self.benign, 1) / max(self.attacks, 1))


class Curriculum:
    """Training windows in the order in which they come in: all attacks, then the benign ones, the hardest first.

    Args:
        rows: [R] the windows, ascending.
        is_attack: [R].
        difficulty: [H] of the benign windows, in the order of `rows`; of equally hard ones the first comes first.
    """

    def __init__(self, rows: NDArray[np.int64], is_attack: NDArray[np.bool_], difficulty: NDArray[np.float64]) -> None:
        self._rows = rows
        self._place = np.full(len(rows), _ATTACK, dtype=np.int64)
        hardest_first = np.argsort(-difficulty, kind="stable")
        self._place[np.flatnonzero(~is_attack)[hardest_first]] = np.arange(len(difficulty))
        self.benign = len(difficulty)
        self.attacks = len(rows) - len(difficulty)

    def with_ratio(self, ratio: float) -> Composition:
        """Returns every attack once, and so many of the hardest benign windows for each; at most all there are.

        Where there is no attack, as there may be none in a sample of the data, all benign windows are there.
        """
        wanted = round(ratio * self.attacks) if self.attacks else self.benign
        benign = min(max(wanted, 1), self.benign)
        return Composition(rows=self._rows[self._place < benign], benign=benign, attacks=self.attacks)


class CurriculumTask(ClassifierTask):
    r"""Windows with labels, of which an epoch has all attacks and the hardest benign ones.

    In training, :math:`\log(\mathrm{benign} / \mathrm{attacks})` of the epoch is added to the benign logit (Source:
    Menon et al., "Long-tail learning via logit adjustment", 2021): the model need not learn how frequent a class is,
    and its own logits mean the same in all epochs. Validation is the plain classifier's: all windows as they come,
    weighted by class, logits as they are. So are threshold and judgement.

    Args:
        run: The resolved run.
        data: The windows.
        finished: The autoencoder.

    Raises:
        DataError: There are no labels, or windows of one class only.
        CheckpointError: The autoencoder does not fit the windows.
    """

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data)
        self._is_training_attack = self._is_attack(data.split.train)
        self._benign = data.split.train[~self._is_training_attack]
        self._autoencoder = reference_model_of(AUTOENCODER, finished[AUTOENCODER], data, self._benign, output="errors")
        self._schedule = self._schedule_of(run.mode)
        # A plan that is made before the autoencoder was asked takes any windows for hard, not the first log's.
        self._rank(np.random.default_rng(run.training.seed).random(len(self._benign)))

    def reference_models(self) -> Sequence[WindowReferenceModel]:
        """Returns the autoencoder, whose errors rank the benign windows."""
        return (self._autoencoder,)

    def bind_outputs(self, role: str, outputs: Outputs) -> None:
        """Learns how hard each benign window is.

        Raises:
            RunError: An error is not a finite number.
        """
        errors = outputs(self._benign)["errors"].double().cpu().numpy()
        difficulty = self._autoencoder.network.combine(errors)
        broken = int(np.count_nonzero(~np.isfinite(difficulty)))
        if broken:
            raise RunError(
                "The autoencoder's error of every benign window must be a finite number",
                value=f"{broken} of {len(difficulty)} are not, by {self._autoencoder.name}",
                remedy="It has diverged: train it anew with a lower learning rate, or in fp32",
            )
        self._rank(difficulty)

    def in_epoch(self, epoch: int, epochs: int) -> "CurriculumEpoch":
        """Returns the windows of an epoch, counted from 0, and its batches."""
        composition = self._curriculum.with_ratio(self._schedule.ratio(epoch, epochs))
        return CurriculumEpoch(self, composition)

    def gather_to(self, device: torch.device, dtype: torch.dtype) -> Gather:
        """Returns what makes batches of windows."""
        return self._gatherer_to(device, dtype)

    def _rank(self, difficulty: NDArray[np.float64]) -> None:
        self._curriculum = Curriculum(self._data.split.train, self._is_training_attack, difficulty)
        self._train_on(self._curriculum.with_ratio(self._schedule.end).rows)

    def _schedule_of(self, mode: CurriculumSettings) -> RatioSchedule:
        """Returns the schedule; it rises until the last epoch, if only to what there is."""
        end = min(mode.end_ratio, max(self._available, mode.start_ratio))
        return RatioSchedule(start=mode.start_ratio, end=end, warmup=mode.ratio_warmup, smoothing=mode.ratio_smoothing)

    @property
    def _available(self) -> float:
        """Benign windows for each attack."""
        return len(self._benign) / max(int(self._is_training_attack.sum()), 1)

    def notices(self) -> Sequence[str]:
        """Says where the data end before the curriculum does; a sample of them cannot tell."""
        wanted = self._run.mode.end_ratio
        if self._data.sample is not None or self._available >= wanted:
            return ()
        there = f"The data have {self._available:.3g} benign windows for each attack"
        return (f"{there}: the ratio rises to that, not to mode.end_ratio={wanted:g}",)


@dataclass(frozen=True, eq=False)
class CurriculumEpoch:
    """A curriculum in one epoch.

    Attributes:
        task: Whose epoch.
        composition: Its windows.
    """

    task: CurriculumTask
    composition: Composition

    @property
    def train_rows(self) -> NDArray[np.int64]:
        """[R] the windows of the epoch, ascending."""
        return self.composition.rows

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> ClassifierBatch:
        """Prepares a logical batch, in which all windows weigh the same."""
        return ClassifierBatch(
            rows, self.task.gather_to(device, dtype), np.ones(len(rows)), benign_offset=self.composition.log_prior
        )
