"""Finished models on the windows of a data set: what scores as each kind of run does. How windows are scored in parts
that fit is left to the caller.

Shapes: R windows of one call, S columns of raw scores.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import FinishedModel
from can_train.tasks.can.companions import AUTOENCODER, CLASSIFIER, FinishedNetwork
from can_train.tasks.can.dataset import CanData
from can_train.tasks.can.fusion.finished import FinishedFusion
from can_train.tasks.can.gather import Gatherer
from can_train.tasks.can.settings import FusionAgentSettings

Companion = Callable[[str], FinishedModel]
"""Reads the finished model of a role that a run builds on."""


class Scorer(Protocol):
    """A finished run's model on the windows of a data set.

    Attributes:
        finished: What the run has trained; its result says the units of errors.
        model: In evaluation mode, on the CPU.
    """

    finished: FinishedModel
    model: nn.Module

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, S] raw scores, by the model or its copy on a device."""

    def combine(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Makes of them [R] final scores, higher is more attack-like."""


def scorer_of(finished: FinishedModel, data: CanData, companion: Companion) -> Scorer:
    """Makes what scores windows as a finished run does.

    Args:
        finished: What the run has trained.
        data: The windows.
        companion: Reads the models that the run builds on, for modes that need them to score.

    Raises:
        RunError: A model that is needed is gone.
        CheckpointError: The weights are not those of the run's settings.
    """
    if isinstance(finished.run.model, FusionAgentSettings):
        return FinishedFusion(finished, data.flat, {role: companion(role) for role in (AUTOENCODER, CLASSIFIER)})
    return FinishedNetwork(finished, data.flat)


class Windows:
    """The windows of a data set, with what scores them.

    Args:
        data: The windows.
        scorer: What scores them.
    """

    def __init__(self, data: CanData, scorer: Scorer) -> None:
        self.data = data
        self.scorer = scorer
        self.model = scorer.model
        self.scores = scorer.scores
        self._gather = Gatherer(data.flat)

    def describe(self, row: int) -> str:
        """Names a window in a message."""
        flat = self.data.flat
        return f"the window at frame {flat.first_frame[row]:,} of {flat.sources[flat.source[row]].path}"

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self._gather.batch_features(rows)
