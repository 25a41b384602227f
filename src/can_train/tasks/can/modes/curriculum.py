"""Supervised, from few benign windows to many: every attack in every epoch, and ever more of the benign windows that an
autoencoder finds hard. The classes' shares change, what the model learns to mean does not.

Shapes: R rows (windows).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import RunError
from can_train.tasks.can.companions import AUTOENCODER, companion_of
from can_train.tasks.can.curriculum import Composition, Curriculum, RatioSchedule
from can_train.tasks.can.dataset import CanData
from can_train.tasks.can.losses import Answers, ClassifierBatch, Gather
from can_train.tasks.can.modes.classifier import ClassifierTask
from can_train.tasks.can.settings import CurriculumSettings


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
        self._autoencoder = companion_of(AUTOENCODER, finished[AUTOENCODER], data, self._benign, output="errors")
        self.companions = [self._autoencoder]
        self._schedule = self._schedule_of(run.mode)
        # A plan that is made before the autoencoder was asked takes any windows for hard, not the first log's.
        self._rank(np.random.default_rng(run.training.seed).random(len(self._benign)))
        self.notices = self._notices()

    def listen(self, role: str, answers: Answers) -> None:
        """Learns how hard each benign window is.

        Raises:
            RunError: An error is not a finite number.
        """
        errors = answers(self._benign)["errors"].double().cpu().numpy()
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

    def _notices(self) -> tuple[str, ...]:
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
