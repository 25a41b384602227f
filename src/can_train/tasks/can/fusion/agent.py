"""The fusion agent: its network, memory, rewards and loss."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.config.resolved import FinishedModel
from can_train.errors import CheckpointError, RunError
from can_train.tasks.can.data.graphs import FlatGraphs
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
from can_train.tasks.can.reference_models import AUTOENCODER, CLASSIFIER, AskedNetwork, FinishedNetwork
from can_train.tasks.can.settings import FusionAgentSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class ScorePair:
    """Two finished models on the windows of a data set."""

    autoencoder: FinishedNetwork
    classifier: FinishedNetwork

    def anomaly(self, errors: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns [R] anomaly scores and [R, 3] error terms, all in [0, 1].

        Args:
            errors: [R, 3] of the autoencoder.

        Raises:
            RunError: One is not a finite number.
            CheckpointError: The autoencoder's result does not say in which units its errors are.
        """
        network = self.autoencoder
        _check_finite(errors, AUTOENCODER, network)
        scores = bounded_anomaly(network.combine(errors), _threshold(network))
        return scores, bounded_errors(errors, network.error_units)

    def attack(self, difference: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [R] attack probabilities.

        Args:
            difference: [R, 1] logit differences of the classifier, attack minus benign.

        Raises:
            RunError: One is not a finite number.
        """
        network = self.classifier
        _check_finite(difference, CLASSIFIER, network)
        return attack_probability(network.combine(difference), _threshold(network))


def _threshold(network: FinishedNetwork) -> float:
    return float(network.finished.result["judgement"]["threshold"])


def _check_finite(said: NDArray[np.float64], role: str, network: FinishedNetwork) -> None:
    broken = int(np.count_nonzero(~np.isfinite(said).all(axis=1)))
    if broken:
        raise RunError(
            f"What the {role} says of every window must be finite numbers",
            value=f"of {broken} of {len(said)} windows it is not, by {network.finished.run_id}",
            remedy="It has diverged: train it anew with a lower learning rate, or in fp32",
        )


class ReplayMemory(nn.Module):
    """The last C choices: which window, which mixing weight. State, reward and next state are functions of the two.

    Args:
        capacity: C.
    """

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
        """Remembers choices, each in the place of the oldest one where the memory is full.

        Args:
            rows: [R] windows.
            actions: [R] which mixing weight was chosen for each.
        """
        pushed, capacity = int(self.pushed), len(self.rows)
        # Those that the same push would overwrite are left out: the order of writing to one place is not defined.
        kept = np.arange(max(0, len(rows) - capacity), len(rows))
        places = torch.from_numpy((pushed + kept) % capacity).to(self.rows.device)
        self.rows[places] = torch.from_numpy(rows[kept]).to(self.rows)
        self.actions[places] = torch.from_numpy(actions[kept]).to(self.actions)
        self.pushed.add_(len(rows))

    def recall(self, uniform: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns remembered choices, [R] windows and [R] mixing weights.

        A memory without any has the first weight for the first window, so that what a batch takes can be seen before
        the first step.

        Args:
            uniform: [R] numbers in [0, 1), each naming a choice by its share of the memory.
        """
        known = max(len(self), 1)
        # Of a double below 1, the product stays below: it is more than half a unit in the last place away.
        at = torch.from_numpy((uniform * known).astype(np.int64)).to(self.rows.device)
        return self.rows[at].cpu().numpy(), self.actions[at].cpu().numpy()


RIGHT_SHARE: Final = 0.5
"""What full confidence adds where the agent is right."""


WRONG_SHARE: Final = 0.3
"""What full confidence takes away where it is wrong. It pays for who is right more than three times in eight."""


LIMIT: Final = 1.5
"""Rewards are clipped to ± this, which is as far as a right choice of full confidence gets: at ± 1 no share of
confidence would count."""


def rewards(fused: NDArray[np.float64], is_attack: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns [R] rewards: +1 where a window is called what it is, −1 where it is not, and a share of the confidence.

    Every window counts the same, so where attacks are rare the agent mostly learns to leave benign windows alone; the
    threshold that alarms are judged by is chosen afterwards, on validation.

    Args:
        fused: [R] scores in [0, 1]; a window is flagged above 0.5.
        is_attack: [R] the truth.
    """
    right = (fused > THRESHOLD) == is_attack
    firmly = confidence(fused)
    reward = np.where(right, 1 + RIGHT_SHARE * firmly, -1 - WRONG_SHARE * firmly)
    return np.clip(reward, -LIMIT, LIMIT)


class FusionAgent(nn.Module):
    """A deep Q-network over mixing weights (DQN: Mnih et al., 2015).

    The target network and the memory are buffers: the optimizer has no part in them, and whatever saves, restores or
    undoes a model's buffers takes them along.

    Args:
        settings: Widths.
        mixing_weights: A.
        replay_size: Choices that are remembered.

    Attributes:
        online: The network that is trained: [B, 7] states → [B, A] values.
        target: Its copy.
        memory: What was chosen.

    Shapes:
        [B, 7] states → [B, A] values.
    """

    steps: Tensor

    def __init__(self, settings: FusionAgentSettings, *, mixing_weights: int, replay_size: int) -> None:
        super().__init__()
        self.online = _network([STATE_WIDTH, *[settings.hidden] * settings.layers, mixing_weights])
        self.target = _in_buffers(deepcopy(self.online))
        self.memory = ReplayMemory(replay_size)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @property
    def weight(self) -> Tensor:
        """Some weight of the trained network: states have its type, and are where it is."""
        return next(self.online.parameters())

    def forward(self, states: Tensor) -> Tensor:
        """Values every mixing weight."""
        values: Tensor = self.online(states)
        return values

    @torch.no_grad()
    def begin_step(self, target_every: int) -> None:
        """Counts an optimizer step; every so many, the target network becomes a copy of the trained one."""
        if int(self.steps) % target_every == 0:
            for buffer, parameter in zip(self.target.buffers(), self.online.parameters(), strict=True):
                buffer.copy_(parameter)
        self.steps.add_(1)


def as_agent(model: nn.Module) -> FusionAgent:
    """Takes a model for the agent that the fusion task has made."""
    assert isinstance(model, FusionAgent)
    return model


def best_actions(agent: FusionAgent, states: NDArray[np.float32]) -> NDArray[np.int64]:
    """Returns [B] the mixing weights that an agent values most, by position, for [B, 7] states."""
    values: Tensor = agent(torch.from_numpy(states).to(agent.weight))
    return values.argmax(dim=1).cpu().numpy()


def _network(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, out in pairwise(widths):
        layers += [nn.Linear(wide, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _in_buffers(network: nn.Module) -> nn.Module:
    """Makes every parameter of a network a buffer of the same name."""
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return network


Losses = dict[str, tuple[Tensor, float]]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixingProblem:
    """What the agent decides about.

    Attributes:
        scores: Of all windows.
        is_attack: [G] the truth.
        following: [G] the window after each one, `NO_WINDOW` where there is none.
        weights: [A] the mixing weights.
        discount: Worth of the next window's value.
    """

    scores: WindowScores
    is_attack: NDArray[np.bool_]
    following: NDArray[np.int64]
    weights: NDArray[np.float64]
    discount: float

    def rewards(self, rows: NDArray[np.int64], actions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [B] what choices are worth."""
        return rewards(self.scores.fused(rows, self.weights[actions]), self.is_attack[rows])

    def states(self, rows: NDArray[np.int64], like: Tensor) -> Tensor:
        """Returns [B, 7] what the agent sees, where and as what its weights are."""
        return torch.from_numpy(self.scores.states(rows)).to(like)

    def best_actions(self, agent: FusionAgent, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [B] the mixing weights that the agent values most."""
        return best_actions(agent, self.scores.states(rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayBatch:
    r"""Huber errors of remembered choices: :math:`Q(s, a)` against :math:`r + \gamma \max_b Q_\mathrm{target}(s', b)`.

    Attributes:
        problem: What is decided about.
        uniform: [R] which choices are remembered, drawn once for the whole logical batch, so that its split changes
            none.
    """

    problem: MixingProblem
    uniform: NDArray[np.float64]

    @classmethod
    def draw(cls, problem: MixingProblem, size: int, generator: torch.Generator) -> "ReplayBatch":
        """Draws a logical batch of so many choices."""
        return cls(problem=problem, uniform=numpy_generator(generator).random(size))

    @property
    def denominators(self) -> dict[str, float]:
        """Samples of the whole batch."""
        return {"value": float(len(self.uniform))}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the sum over samples `start:stop`."""
        agent, problem = as_agent(model), self.problem
        rows, actions = agent.memory.recall(self.uniform[start:stop])
        like = agent.weight
        values = agent(problem.states(rows, like))
        chosen = values.gather(1, torch.from_numpy(actions).to(like.device).unsqueeze(1)).squeeze(1)
        aims = torch.from_numpy(problem.rewards(rows, actions)).to(like)
        aims = aims + problem.discount * self._worth_of_next(agent, rows).to(like)
        errors = F.smooth_l1_loss(chosen.to(like.dtype), aims, reduction="none")
        return {"value": (errors.sum(), float(stop - start))}

    @torch.no_grad()
    def _worth_of_next(self, agent: FusionAgent, rows: NDArray[np.int64]) -> Tensor:
        """Returns [B] the target network's best value of the next window; 0 where there is none."""
        following = self.problem.following[rows]
        like = agent.weight
        worth: Tensor = agent.target(self.problem.states(np.maximum(following, 0), like)).amax(dim=1)
        return worth * torch.from_numpy(following != NO_WINDOW).to(like)


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyBatch:
    """What the agent's choices are worth on windows, as a loss: minus the reward. The best weights of a run are those
    that earn most; errors of values would not tell, since they grow with the values themselves.

    Attributes:
        problem: What is decided about.
        rows: [R] windows.
    """

    problem: MixingProblem
    rows: NDArray[np.int64]

    @property
    def denominators(self) -> dict[str, float]:
        """Windows of the whole batch."""
        return {"value": float(len(self.rows))}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the sum over windows `start:stop`."""
        rows = self.rows[start:stop]
        earned = self.problem.rewards(rows, self.problem.best_actions(as_agent(model), rows))
        return {"value": (torch.tensor(-earned.sum()), float(len(rows)))}


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """Makes a numpy generator whose seed a torch generator draws: its arrays take no device memory."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))


ACTED_AT_ONCE: Final = 64
"""Windows that the agent values weights for at a time. It acts between steps, when there are no gradients, and so few
take less memory than those will."""


def exploration(progress: float, *, start: float, end: float) -> float:
    """Returns the share of random choices, which falls along a line.

    Args:
        progress: Share of the training that is done, in [0, 1].
        start: In the first step.
        end: In the last one.
    """
    return start + (end - start) * progress


@torch.no_grad()
def act(
    agent: FusionAgent,
    problem: MixingProblem,
    rows: NDArray[np.int64],
    epsilon: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Chooses a mixing weight for each window.

    Args:
        agent: Whose values decide where chance does not.
        problem: What is decided about.
        rows: [R] the windows.
        epsilon: Share of random choices.
        rng: Where chance comes from.

    Returns:
        [R] positions among the mixing weights.
    """
    actions = rng.integers(len(problem.weights), size=len(rows))
    greedy = np.flatnonzero(rng.random(len(rows)) >= epsilon)
    for part in np.split(greedy, range(ACTED_AT_ONCE, len(greedy), ACTED_AT_ONCE)):
        actions[part] = problem.best_actions(agent, rows[part])
    return actions


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
        reference models: The models that it mixes, by role.

    Attributes:
        finished: As given.
        model: The three networks, frozen and in evaluation mode, on the CPU.

    Raises:
        CheckpointError: The weights are not those of the runs' settings.
    """

    def __init__(
        self, finished: FinishedModel, flat: FlatGraphs, reference_models: Mapping[str, FinishedModel]
    ) -> None:
        self.finished = finished
        networks = {role: AskedNetwork(reference_models[role], flat) for role in (AUTOENCODER, CLASSIFIER)}
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
