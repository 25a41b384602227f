"""Fusion: an agent learns, window by window, how much of a classifier's attack probability and how much of an
autoencoder's anomaly score makes the better alarm. Both are finished models, asked once before training.

Shapes: G windows of the data set, R rows (windows), A mixing weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import ConfigError
from can_train.task import Feature, Outputs
from can_train.tasks.can.data.dataset import CanData
from can_train.tasks.can.evaluation.judging import Score
from can_train.tasks.can.fusion.agent import (
    FusionAgent,
    MixingProblem,
    PolicyBatch,
    ReplayBatch,
    ScorePair,
    act,
    as_agent,
    exploration,
    numpy_generator,
)
from can_train.tasks.can.fusion.scores import WindowScores, mixing_weights, next_windows
from can_train.tasks.can.modes.classifier import check_classes
from can_train.tasks.can.modes.windows import WindowTask
from can_train.tasks.can.reference_models import AUTOENCODER, CLASSIFIER, WindowReferenceModel, reference_model_of

ASKED_AT_ONCE: Final = 2**16
"""Windows whose answers are taken at a time: a megabyte, wherever they lie."""


class FusionTask(WindowTask):
    """Windows as two finished models see them, with labels.

    Args:
        run: The resolved run.
        data: The windows.
        finished: The models, by role.

    Raises:
        DataError: There are no labels, or windows of one class only.
        CheckpointError: A model does not fit the windows.
        ConfigError: The run is to start from another one's weights.
    """

    features = (Feature("windows"),)
    loss_weights: Mapping[str, float] = {"value": 1.0}

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data, train_rows=data.split.train, validation_rows=data.split.validation)
        check_classes(data, self._is_attack(self.train_rows))
        _check_start(run)
        split = data.split
        asked = np.unique(np.concatenate([split.train, split.validation, *split.test.values()]))
        autoencoder = reference_model_of(AUTOENCODER, finished[AUTOENCODER], data, asked, output="errors")
        classifier = reference_model_of(CLASSIFIER, finished[CLASSIFIER], data, asked, output="logits")
        self._reference_models = (autoencoder, classifier)
        self._asked = asked
        self._pair = ScorePair(autoencoder=autoencoder.network, classifier=classifier.network)
        self._problem = MixingProblem(
            scores=WindowScores.unknown(len(data.flat)),
            is_attack=data.flat.label > 0,
            following=next_windows(split.train, data.flat.source),
            weights=mixing_weights(run.mode.mixing_weights),
            discount=run.mode.discount,
        )

    def reference_models(self) -> Sequence[WindowReferenceModel]:
        """Returns the autoencoder and the classifier, asked about every window that trains, validates or is judged."""
        return self._reference_models

    def bind_outputs(self, role: str, outputs: Outputs) -> None:
        """Takes down what a finished model says of all windows.

        Args:
            role: Of the model.
            outputs: What it says of some windows: [R, 3] `errors` or [R, 2] `logits`.

        Raises:
            RunError: Something that it says is not a finite number.
            CheckpointError: Its result does not say in which units its errors are.
        """
        rows, scores = self._asked, self._problem.scores
        if role == AUTOENCODER:
            scores.anomaly[rows], scores.errors[rows] = self._pair.anomaly(_all(outputs, rows, "errors"))
        else:
            logits = _all(outputs, rows, "logits")
            scores.attack[rows] = self._pair.attack(logits[:, 1:] - logits[:, :1])

    def build_model(self) -> FusionAgent:
        """Makes an agent that knows nothing and remembers nothing."""
        mode = self._run.mode
        return FusionAgent(self._run.model, mixing_weights=mode.mixing_weights, replay_size=mode.replay_size)

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 1] ones: to the agent every window is seven numbers."""
        return np.ones((len(rows), 1))

    def before_step(
        self, model: nn.Module, rows: NDArray[np.int64], progress: float, generator: torch.Generator
    ) -> None:
        """Lets the agent act on windows, at first mostly at random, and remember what it did.

        Args:
            model: The agent.
            rows: [R] the windows of the step.
            progress: Share of the training that is done, in [0, 1).
            generator: Where chance comes from.
        """
        agent, mode = as_agent(model), self._run.mode
        agent.begin_step(mode.target_every)
        epsilon = exploration(progress, start=mode.epsilon_start, end=mode.epsilon_end)
        agent.memory.push(rows, act(agent, self._problem, rows, epsilon, numpy_generator(generator)))

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> ReplayBatch | PolicyBatch:
        """Prepares a logical batch: as many remembered choices as there are rows; in validation, the rows."""
        if generator is None:
            return PolicyBatch(problem=self._problem, rows=rows)
        return ReplayBatch.draw(self._problem, len(rows), generator)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 2] float64: the fused score, and the mixing weight that the agent chose for it."""
        weights = self._problem.weights[self._problem.best_actions(as_agent(model), rows)]
        return torch.from_numpy(np.stack([self._problem.scores.fused(rows, weights), weights], axis=1))

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges each test folder by itself, beside simple mixes of the same scores and the usual baselines."""
        # Sees scikit-learn, which takes a second to import: only a run that ends pays.
        from can_train.tasks.can.fusion.mixes import judge_agent

        return judge_agent(score, self._data, self._problem, self._options(supervised=True))


def _all(outputs: Outputs, rows: NDArray[np.int64], output: str) -> NDArray[np.float64]:
    parts = np.split(rows, range(ASKED_AT_ONCE, len(rows), ASKED_AT_ONCE))
    return np.concatenate([np.asarray(outputs(part)[output].double().cpu()) for part in parts])


def _check_start(run: ResolvedRun) -> None:
    """Refuses the weights of another run: with them would come its memory, of windows of other data, perhaps.

    Raises:
        ConfigError: The run is to start from them.
    """
    if run.training.start_from:
        raise ConfigError("A fusion agent starts with a memory of its own", value=run.training.start_from,
                          remedy="Leave out --start-from")  # fmt: skip
