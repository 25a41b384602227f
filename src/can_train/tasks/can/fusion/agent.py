"""The fusion agent, a deep Q-network that chooses a mixing weight for each window: network, replay memory, rewards,
losses, exploration, and the finished agent on other windows.

Shapes: G windows of a data set, R rows (windows), B of a micro-batch, A mixing weights, C remembered choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.errors import CheckpointError
from can_train.tasks.can.fusion.scores import (
    NO_WINDOW,
    STATE_WIDTH,
    THRESHOLD,
    WindowScores,
    attack_probability,
    bounded_anomaly,
    bounded_errors,
    confidence,
    mixing_weights,
)
from can_train.tasks.can.losses import Losses, numpy_generator
from can_train.tasks.can.reference_models import AUTOENCODER, CLASSIFIER, FinishedNetwork, WindowModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.config.resolved import FinishedModel
    from can_train.tasks.can.data.graphs import FlatGraphs
    from can_train.tasks.can.settings import FusionAgentSettings

# Reward that full confidence adds to a right decision.
RIGHT_SHARE: Final = 0.5

# Reward that full confidence takes from a wrong decision. With these shares, confidence pays as soon as more than three
# in eight decisions are right.
WRONG_SHARE: Final = 0.3

# Rewards are clipped to ± this, the reward of a right decision with full confidence. A limit of 1 would leave no room
# for the confidence.
MAX_REWARD: Final = 1.5

# Windows whose weights are chosen at a time. That happens between steps, when there are no gradients, and so few need
# less memory than the gradients will.
WINDOWS_PER_PASS: Final = 64

# Columns of the fused score and of the chosen mixing weight in an agent's `scores`.
FUSED: Final = 0
WEIGHT: Final = 1


class ReplayMemory(nn.Module):
    """The last C choices: of each the window and the position of the mixing weight."""

    # State, reward and next state are functions of these two, so they need no memory.
    rows: Tensor
    actions: Tensor
    pushed: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(capacity, dtype=torch.int64))
        self.register_buffer("actions", torch.zeros(capacity, dtype=torch.int64))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        return min(int(self.pushed), len(self.rows))

    def push(self, rows: NDArray[np.int64], actions: NDArray[np.int64]) -> None:
        """Adds [R] choices; in a full memory each replaces the oldest one."""
        pushed, capacity = int(self.pushed), len(self.rows)
        # Choices that the same push would overwrite are left out: the order of writes to one place is undefined.
        newest = np.arange(max(0, len(rows) - capacity), len(rows))
        places = torch.from_numpy((pushed + newest) % capacity).to(self.rows.device)
        self.rows[places] = torch.from_numpy(rows[newest]).to(self.rows)
        self.actions[places] = torch.from_numpy(actions[newest]).to(self.actions)
        self.pushed.add_(len(rows))

    def recall(self, uniform: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns [R] windows and [R] positions of mixing weights; [R] numbers in [0, 1) select them."""
        # An empty memory returns the zeros it is made of: planning computes a batch before the first choice.
        known = max(len(self), 1)
        # The product stays below `known`: a double below 1 is more than half a unit in the last place away from it.
        at = torch.from_numpy((uniform * known).astype(np.int64)).to(self.rows.device)
        return self.rows[at].cpu().numpy(), self.actions[at].cpu().numpy()


class FusionAgent(nn.Module):
    """A deep Q-network over mixing weights (DQN: Mnih et al., 2015), with A weights and C remembered choices.

    Shapes:
        [B, 7] states → [B, A] values.
    """

    steps: Tensor

    # The target network and the memory are buffers: the optimizer does not touch them, and checkpoints, snapshots and
    # rescues include them as they include all buffers.
    def __init__(self, settings: FusionAgentSettings, *, mixing_weights: int, replay_size: int) -> None:
        super().__init__()
        widths = [STATE_WIDTH, *[settings.hidden] * settings.layers, mixing_weights]
        layers: list[nn.Module] = []
        for wide, out in pairwise(widths):
            layers += [nn.Linear(wide, out), nn.ReLU()]
        self.online = nn.Sequential(*layers[:-1])
        self.target = _in_buffers(deepcopy(self.online))
        self.memory = ReplayMemory(replay_size)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @property
    def weight(self) -> Tensor:
        """A weight of the network; states take its number format and device."""
        return next(self.online.parameters())

    def forward(self, states: Tensor) -> Tensor:
        """Values every mixing weight."""
        values: Tensor = self.online(states)
        return values

    def best_actions(self, states: NDArray[np.float32]) -> NDArray[np.int64]:
        """Returns [B] the positions of the most valued mixing weights."""
        values: Tensor = self(torch.from_numpy(states).to(self.weight))
        return values.argmax(dim=1).cpu().numpy()

    @torch.no_grad()
    def begin_step(self, target_every: int) -> None:
        """Counts an optimizer step; in every `target_every`th the target network becomes a copy of the online one."""
        if int(self.steps) % target_every == 0:
            for buffer, parameter in zip(self.target.buffers(), self.online.parameters(), strict=True):
                buffer.copy_(parameter)
        self.steps.add_(1)


def _in_buffers(network: nn.Module) -> nn.Module:
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return network


def rewards(fused: NDArray[np.float64], is_attack: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns [R] rewards for flagging windows above 0.5: +1 if right, −1 if wrong, with a share of the confidence."""
    # Every window counts the same, so where attacks are rare the agent learns mostly from benign windows. The threshold
    # of its alarms is chosen afterwards, on validation.
    right = (fused > THRESHOLD) == is_attack
    firmness = confidence(fused)
    reward = np.where(right, 1 + RIGHT_SHARE * firmness, -1 - WRONG_SHARE * firmness)
    return np.clip(reward, -MAX_REWARD, MAX_REWARD)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixingProblem:
    """The decisions that the agent makes, and their rewards."""

    scores: WindowScores
    is_attack: NDArray[np.bool_]  # [G] the truth
    following: NDArray[np.int64]  # [G] the window after each one, `NO_WINDOW` where there is none
    weights: NDArray[np.float64]  # [A] the mixing weights
    discount: float  # of the next window's value

    def rewards(self, rows: NDArray[np.int64], actions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R] the rewards of choices."""
        return rewards(self.scores.fused(rows, self.weights[actions]), self.is_attack[rows])

    def states(self, rows: NDArray[np.int64], like: Tensor) -> Tensor:
        """Returns [R, 7] the agent's input, in the number format and on the device of `like`."""
        return torch.from_numpy(self.scores.states(rows)).to(like)

    def best_actions(self, agent: FusionAgent, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [R] the positions of the mixing weights that the agent values most."""
        return agent.best_actions(self.scores.states(rows))


@torch.no_grad()
def act(
    agent: FusionAgent,
    problem: MixingProblem,
    rows: NDArray[np.int64],
    epsilon: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Chooses [R] positions of mixing weights: at random for a share `epsilon` of the windows, else by value."""
    actions = rng.integers(len(problem.weights), size=len(rows))
    greedy = np.flatnonzero(rng.random(len(rows)) >= epsilon)
    for part in np.split(greedy, range(WINDOWS_PER_PASS, len(greedy), WINDOWS_PER_PASS)):
        actions[part] = problem.best_actions(agent, rows[part])
    return actions


def exploration(progress: float, *, start: float, end: float) -> float:
    """Returns the share of random choices, which changes linearly with the progress in [0, 1]."""
    return start + (end - start) * progress


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayBatch:
    r"""Huber errors of past choices: :math:`Q(s, a)` against :math:`r + \gamma \max_b Q_\mathrm{target}(s', b)`."""

    problem: MixingProblem
    # [R] selects the choices. It is drawn once for the logical batch, so that a split changes none of them.
    uniform: NDArray[np.float64]

    @classmethod
    def draw(cls, problem: MixingProblem, size: int, generator: torch.Generator) -> ReplayBatch:
        """Draws a logical batch of `size` choices."""
        return cls(problem=problem, uniform=numpy_generator(generator).random(size))

    @property
    def denominators(self) -> dict[str, float]:
        """Choices in the whole batch."""
        return {"value": float(len(self.uniform))}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the sum over choices `start:stop`."""
        assert isinstance(model, FusionAgent)
        problem, like = self.problem, model.weight
        rows, actions = model.memory.recall(self.uniform[start:stop])
        values = model(problem.states(rows, like))
        chosen = values.gather(1, torch.from_numpy(actions).to(like.device).unsqueeze(1)).squeeze(1)
        targets = torch.from_numpy(problem.rewards(rows, actions)).to(like)
        targets = targets + problem.discount * self._next_values(model, rows).to(like)
        # Mixed precision may have computed the values in another format than the targets.
        errors = F.smooth_l1_loss(chosen.to(like.dtype), targets, reduction="none")
        return {"value": (errors.sum(), float(stop - start))}

    @torch.no_grad()
    def _next_values(self, agent: FusionAgent, rows: NDArray[np.int64]) -> Tensor:
        """Returns [B] the target network's best value of the next window; 0 where there is none."""
        following, like = self.problem.following[rows], agent.weight
        best: Tensor = agent.target(self.problem.states(np.maximum(following, 0), like)).amax(dim=1)
        return best * torch.from_numpy(following != NO_WINDOW).to(like)


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyBatch:
    """Minus the reward of the agent's choices on [R] windows, for validation."""

    # The weights with the highest reward are the best ones. Errors of values cannot decide that: they grow with the
    # values themselves.
    problem: MixingProblem
    rows: NDArray[np.int64]

    @property
    def denominators(self) -> dict[str, float]:
        """Windows in the whole batch."""
        return {"value": float(len(self.rows))}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the sum over windows `start:stop`."""
        assert isinstance(model, FusionAgent)
        rows = self.rows[start:stop]
        earned = self.problem.rewards(rows, self.problem.best_actions(model, rows))
        return {"value": (torch.tensor(-earned.sum()), float(len(rows)))}


def decide(
    agent: nn.Module, table: WindowScores, rows: NDArray[np.int64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns [R, 2] the fused score of each window, and the mixing weight that the agent chooses for it."""
    assert isinstance(agent, FusionAgent)
    chosen = weights[agent.best_actions(table.states(rows))]
    return np.stack([table.fused(rows, chosen), chosen], axis=1)


def scale_errors(
    autoencoder: FinishedNetwork, errors: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns [R] anomaly scores and [R, 3] error terms, all in [0, 1], from [R, 3] errors.

    Raises:
        RunError: An error is not a finite number.
    """
    assert autoencoder.error_units is not None
    autoencoder.check_finite(errors)
    scores = bounded_anomaly(autoencoder.combine(errors), autoencoder.threshold)
    return scores, bounded_errors(errors, autoencoder.error_units)


def scale_logits(classifier: FinishedNetwork, difference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [R] attack probabilities from [R, 1] logit differences, attack minus benign.

    Raises:
        RunError: A difference is not a finite number.
    """
    classifier.check_finite(difference)
    return attack_probability(classifier.combine(difference), classifier.threshold)


class FinishedFusion(WindowModel):
    """A finished agent and the two models that it mixes, by role, on the windows of a data set.

    Raises:
        CheckpointError: The weights do not fit the settings of a run.
    """

    def __init__(
        self, finished: FinishedModel, flat: FlatGraphs, reference_models: Mapping[str, FinishedModel]
    ) -> None:
        networks = {
            role: FinishedNetwork(reference_models[role], flat, full_precision=True)
            for role in (AUTOENCODER, CLASSIFIER)
        }
        models = {"agent": _agent(finished), **{role: network.model for role, network in networks.items()}}
        super().__init__(finished, flat, nn.ModuleDict(models))
        self._autoencoder, self._classifier = networks[AUTOENCODER], networks[CLASSIFIER]
        self._weights = mixing_weights(finished.run.mode.mixing_weights)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 7] float64 on the CPU: fused score, chosen mixing weight, anomaly score, attack probability, and
        the three error terms.
        """
        assert isinstance(model, nn.ModuleDict)
        errors = self._autoencoder.scores(model[AUTOENCODER], rows, device, dtype)
        difference = self._classifier.scores(model[CLASSIFIER], rows, device, dtype)
        anomaly, bounded = scale_errors(self._autoencoder, np.asarray(errors.double().cpu()))
        attack = scale_logits(self._classifier, np.asarray(difference.double().cpu()))
        table = WindowScores(anomaly=anomaly, attack=attack, errors=bounded)
        decisions = decide(model["agent"], table, np.arange(len(rows)), self._weights)
        return torch.from_numpy(np.column_stack([decisions, anomaly, attack, bounded]))

    def combine(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [R] the fused scores."""
        return scores[:, FUSED]


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
