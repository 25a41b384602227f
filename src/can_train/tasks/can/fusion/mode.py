"""Fusion: an agent learns, window by window, how to weigh a classifier's attack probability against an autoencoder's
anomaly score. Both are finished models; their outputs are computed once, before training.

Shapes: R rows (windows), A mixing weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from can_train.errors import ConfigError
from can_train.task import Feature, Outputs
from can_train.tasks.can.fusion.agent import (
    FusionAgent,
    MixingProblem,
    PolicyBatch,
    ReplayBatch,
    act,
    decide,
    exploration,
    scale_errors,
    scale_logits,
)
from can_train.tasks.can.fusion.scores import WindowScores, mixing_weights, next_windows
from can_train.tasks.can.losses import numpy_generator
from can_train.tasks.can.modes.classifier import check_classes
from can_train.tasks.can.modes.windows import WindowTask
from can_train.tasks.can.reference_models import AUTOENCODER, CLASSIFIER, WindowReferenceModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.config.resolved import FinishedModel, ResolvedRun
    from can_train.tasks.can.data.dataset import CanData
    from can_train.tasks.can.evaluation.judging import Score

# Windows whose outputs are read at a time: a megabyte, wherever the outputs are.
WINDOWS_AT_A_TIME: Final = 2**16


class FusionTask(WindowTask):
    """Labelled windows, scored by two finished models.

    Raises:
        DataError: There are no labels, or windows of one class only.
        CheckpointError: A model does not fit the windows.
        ConfigError: The run is to start from the weights of another one.
    """

    features = (Feature("windows"),)
    loss_weights: Mapping[str, float] = {"value": 1.0}

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data, train_rows=data.split.train, validation_rows=data.split.validation)
        check_classes(data, self._is_attack(self.train_rows))
        if run.training.start_from:
            # The weights of another agent bring its memory, perhaps of windows of other data.
            raise ConfigError("A fusion agent starts with a memory of its own", value=run.training.start_from,
                              remedy="Leave out --start-from")  # fmt: skip
        split = data.split
        self._scored_rows = np.unique(np.concatenate([split.train, split.validation, *split.test.values()]))
        self._autoencoder, self._classifier = (
            WindowReferenceModel(role, finished[role], data, self._scored_rows, output=output)
            for role, output in ((AUTOENCODER, "errors"), (CLASSIFIER, "logits"))
        )
        self._problem = MixingProblem(
            scores=WindowScores.blank(len(data.flat)),
            is_attack=data.flat.label > 0,
            following=next_windows(split.train, data.flat.source),
            weights=mixing_weights(run.mode.mixing_weights),
            discount=run.mode.discount,
        )

    def reference_models(self) -> Sequence[WindowReferenceModel]:
        """Returns the autoencoder and the classifier."""
        return (self._autoencoder, self._classifier)

    def bind_outputs(self, role: str, outputs: Outputs) -> None:
        """Fills in the scores of one model, for every window that trains, validates or is judged.

        Raises:
            RunError: An output is not a finite number.
        """
        rows, scores = self._scored_rows, self._problem.scores
        if role == AUTOENCODER:
            errors = _read(outputs, rows, "errors")
            scores.anomaly[rows], scores.errors[rows] = scale_errors(self._autoencoder, errors)
        else:
            logits = _read(outputs, rows, "logits")
            scores.attack[rows] = scale_logits(self._classifier, logits[:, 1:] - logits[:, :1])

    def build_model(self) -> FusionAgent:
        """Makes an agent with fresh weights and an empty memory."""
        mode = self._run.mode
        return FusionAgent(self._run.model, mixing_weights=mode.mixing_weights, replay_size=mode.replay_size)

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 1] ones: the agent sees seven numbers of any window."""
        return np.ones((len(rows), 1))

    def before_step(
        self, model: nn.Module, rows: NDArray[np.int64], progress: float, generator: torch.Generator
    ) -> None:
        """Lets the agent choose weights for the windows of the step, and adds the choices to its memory."""
        assert isinstance(model, FusionAgent)
        mode = self._run.mode
        model.begin_step(mode.target_every)
        epsilon = exploration(progress, start=mode.epsilon_start, end=mode.epsilon_end)
        model.memory.push(rows, act(model, self._problem, rows, epsilon, numpy_generator(generator)))

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> ReplayBatch | PolicyBatch:
        """Prepares as many remembered choices as there are rows; in validation, the rows themselves."""
        if generator is None:
            return PolicyBatch(problem=self._problem, rows=rows)
        return ReplayBatch.draw(self._problem, len(rows), generator)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 2] float64: the fused score, and the mixing weight that the agent chose for it."""
        return torch.from_numpy(decide(model, self._problem.scores, rows, self._problem.weights))

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges each test folder by itself, together with simple mixes of the same scores and the usual baselines."""
        from can_train.tasks.can.fusion.mixes import judge_agent

        return judge_agent(score, self._data, self._problem, self._judging_options())


def _read(outputs: Outputs, rows: NDArray[np.int64], name: str) -> NDArray[np.float64]:
    parts = np.split(rows, range(WINDOWS_AT_A_TIME, len(rows), WINDOWS_AT_A_TIME))
    return np.concatenate([np.asarray(outputs(part)[name].double().cpu()) for part in parts])
