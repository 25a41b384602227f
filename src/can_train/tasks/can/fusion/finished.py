"""A finished fusion agent at work on windows, together with the two models that it mixes: what scores other logs.

Shapes: R rows (windows).
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import FinishedModel
from can_train.errors import CheckpointError
from can_train.tasks.can.companions import AUTOENCODER, CLASSIFIER, AskedNetwork
from can_train.tasks.can.flat import FlatGraphs
from can_train.tasks.can.fusion.agent import FusionAgent, as_agent, best_actions
from can_train.tasks.can.fusion.pair import ScorePair
from can_train.tasks.can.fusion.states import WindowScores, mixing_weights

FUSED: Final = 0
WEIGHT: Final = 1
"""Columns of what an agent says of a window."""

_SEEN: Final = 2
"""Column from which on there is what it says that of: anomaly score, attack probability, and three error terms."""


class FinishedFusion:
    """A finished agent on the windows of a data set.

    Args:
        finished: The agent.
        flat: The windows.
        companions: The models that it mixes, by role.

    Attributes:
        finished: As given.
        model: The three networks, frozen and in evaluation mode, on the CPU.

    Raises:
        CheckpointError: The weights are not those of the runs' settings.
    """

    def __init__(self, finished: FinishedModel, flat: FlatGraphs, companions: Mapping[str, FinishedModel]) -> None:
        self.finished = finished
        networks = {role: AskedNetwork(companions[role], flat) for role in (AUTOENCODER, CLASSIFIER)}
        self._pair = ScorePair(autoencoder=networks[AUTOENCODER], classifier=networks[CLASSIFIER])
        self._weights = mixing_weights(finished.run.mode.mixing_weights)
        models = {role: network.model for role, network in networks.items()}
        self.model: nn.Module = nn.ModuleDict({"agent": _agent(finished), **models}).eval().requires_grad_(False)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 7] float64 on the CPU: the fused score, the mixing weight that the agent chose for it, and what
        it saw of the window (see `seen`).

        Args:
            model: The three networks, or a copy of them on the device.
            rows: [R] the windows.
            device: Where to compute.
            dtype: Type of the features.
        """
        assert isinstance(model, nn.ModuleDict)
        errors = self._pair.autoencoder.scores(model[AUTOENCODER], rows, device, dtype)
        difference = self._pair.classifier.scores(model[CLASSIFIER], rows, device, dtype)
        anomaly, bounded = self._pair.anomaly(np.asarray(errors.double().cpu()))
        table = WindowScores(
            anomaly=anomaly, attack=self._pair.attack(np.asarray(difference.double().cpu())), errors=bounded
        )
        here = np.arange(len(rows))
        weights = self._weights[best_actions(as_agent(model["agent"]), table.states(here))]
        said = np.stack([table.fused(here, weights), weights, table.anomaly, table.attack], axis=1)
        return torch.from_numpy(np.concatenate([said, table.errors], axis=1))

    def combine(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [R] final scores, higher is more attack-like."""
        return scores[:, FUSED]


def seen(scores: NDArray[np.float64]) -> WindowScores:
    """Returns what the agent saw of R windows, from the [R, 7] that it said of them."""
    anomaly, attack = scores[:, _SEEN], scores[:, _SEEN + 1]
    return WindowScores(anomaly=anomaly, attack=attack, errors=scores[:, _SEEN + 2 :])


def _agent(finished: FinishedModel) -> FusionAgent:
    mode = finished.run.mode
    agent = FusionAgent(finished.run.model, mixing_weights=mode.mixing_weights, replay_size=mode.replay_size)
    try:
        agent.load_state_dict(dict(finished.weights))
    except RuntimeError as error:
        raise CheckpointError(
            "A run's weights are those of its settings", value=f"{finished.run_id}: {error}".splitlines()[0]
        ) from error
    return agent
