"""Fusion: an agent, a deep Q-network, learns to weigh a classifier's attack probability against an anomaly score.

The agent chooses a mixing weight for each window. The classifier and the autoencoder are finished models; their outputs
are computed once, before training. This module has the network, replay memory, rewards, losses, exploration, the mode,
and the finished agent on other windows.

Shapes: G windows of a data set, R rows (windows), B windows of a micro-batch, A mixing weights, C remembered choices,
I IDs and P properties (see `contributions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import CheckpointError, ConfigError
from can_train.task import Feature, Outputs
from can_train_tasks.can.contributions import shares_of_windows
from can_train_tasks.can.data.dataset import CanData
from can_train_tasks.can.data.graphs import Bools, FlatGraphs, Floats, Ints
from can_train_tasks.can.evaluation.metrics import RECONSTRUCTION_TERMS
from can_train_tasks.can.fusion import mixing
from can_train_tasks.can.losses import Losses, numpy_generator
from can_train_tasks.can.modes.windows import WindowTask, check_classes
from can_train_tasks.can.reference_models import (
    AUTOENCODER,
    CLASSIFIER,
    FinishedNetwork,
    WindowModel,
    WindowReferenceModel,
)
from can_train_tasks.can.settings import FusionAgentSettings

if TYPE_CHECKING:
    from can_train_tasks.can.evaluation.judging import ModelScores, Score

# A right decision earns 1 + RIGHT_SHARE · confidence, a wrong decision -1 - WRONG_SHARE · confidence. So confidence
# pays as soon as more than three in eight decisions are right.
RIGHT_SHARE: Final = 0.5
WRONG_SHARE: Final = 0.3
# Rewards are clipped to ± this, the reward of a right decision with full confidence. A limit of 1 would leave no room
# for the confidence.
MAX_REWARD: Final = 1.5

# Windows whose weights are chosen at a time. The choice happens between steps, without gradients; so few windows need
# less memory than a step's gradients, so the choice does not raise the peak.
WINDOWS_PER_PASS: Final = 64
WINDOWS_PER_READ: Final = 2**16  # windows whose outputs are read at a time: a megabyte


class ReplayMemory(nn.Module):
    """The last C choices: the window and the position of the mixing weight for each choice."""

    # State, reward and next state are functions of window and mixing weight, so they are not stored.
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

    def push(self, rows: Ints, actions: Ints) -> None:
        """Adds R choices; in a full memory each choice replaces the oldest."""
        pushed, capacity = int(self.pushed), len(self.rows)
        # Choices that the same push would overwrite are left out: the order of writes to one place is undefined.
        newest = np.arange(max(0, len(rows) - capacity), len(rows))
        places = torch.from_numpy((pushed + newest) % capacity).to(self.rows.device)
        self.rows[places] = torch.from_numpy(rows[newest]).to(self.rows)
        self.actions[places] = torch.from_numpy(actions[newest]).to(self.actions)
        self.pushed.add_(len(rows))

    def recall(self, uniform: Floats) -> tuple[Ints, Ints]:
        """Returns windows [R] and positions of mixing weights [R]; `uniform` [R] in [0, 1) selects the choices."""
        # An empty memory returns its initial zeros: planning computes a batch before the first choice.
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

    # The target network and the memory are buffers: the optimizer does not change buffers, and checkpoints, snapshots
    # and rescues include all buffers.
    def __init__(self, settings: FusionAgentSettings, *, mixing_weights: int, replay_size: int) -> None:
        super().__init__()
        widths = [mixing.STATE_WIDTH, *[settings.hidden] * settings.layers, mixing_weights]
        layers: list[nn.Module] = []
        for wide, out in pairwise(widths):
            layers += [nn.Linear(wide, out), nn.ReLU()]
        self.online = nn.Sequential(*layers[:-1])
        self.target = deepcopy(self.online)
        for module in self.target.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, parameter.detach())
        self.memory = ReplayMemory(replay_size)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @property
    def weight(self) -> Tensor:
        """A weight of the network, for the dtype and the device of states."""
        return next(self.online.parameters())

    def forward(self, states: Tensor) -> Tensor:
        """Returns the values [B, A] of all mixing weights for states [B, 7]."""
        values: Tensor = self.online(states)
        return values

    def best_actions(self, scores: mixing.WindowScores, rows: Ints) -> Ints:
        """Returns the positions [R] of the mixing weights with the highest values."""
        values: Tensor = self(torch.from_numpy(scores.states(rows)).to(self.weight))
        return values.argmax(dim=1).cpu().numpy()

    @torch.no_grad()
    def begin_step(self, target_every: int) -> None:
        """Counts an optimizer step; every `target_every`th step copies the online network to the target network."""
        if int(self.steps) % target_every == 0:
            for buffer, parameter in zip(self.target.buffers(), self.online.parameters(), strict=True):
                buffer.copy_(parameter)
        self.steps.add_(1)


def rewards(fused: Floats, is_attack: Bools) -> Floats:
    """Returns the rewards [R] for flagging windows above 0.5: +1 if right, −1 if wrong, plus a share of confidence."""
    # All windows count equally, so where attacks are rare the agent learns mostly from benign windows. The threshold of
    # its alarms is chosen after training, on validation.
    right = (fused > mixing.THRESHOLD) == is_attack
    firmness = mixing.confidence(fused)
    reward = np.where(right, 1 + RIGHT_SHARE * firmness, -1 - WRONG_SHARE * firmness)
    return np.clip(reward, -MAX_REWARD, MAX_REWARD)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixingProblem:
    """The decisions that the agent makes, and their rewards."""

    scores: mixing.WindowScores
    is_attack: Bools  # [G] the truth
    following: Ints  # [G] the next window in the log, or `mixing.NO_WINDOW`
    weights: Floats  # [A] the mixing weights
    discount: float  # factor of the next window's value

    def rewards(self, rows: Ints, actions: Ints) -> Floats:
        """Returns the rewards [R] of choices."""
        return rewards(self.scores.fused(rows, self.weights[actions]), self.is_attack[rows])

    def states(self, rows: Ints, like: Tensor) -> Tensor:
        """Returns the agent's input [R, 7], with the dtype and the device of `like`."""
        return torch.from_numpy(self.scores.states(rows)).to(like)


@torch.no_grad()
def act(agent: FusionAgent, problem: MixingProblem, rows: Ints, epsilon: float, rng: np.random.Generator) -> Ints:
    """Chooses positions [R] of mixing weights: at random for a share `epsilon` of the windows, else by value."""
    actions = rng.integers(len(problem.weights), size=len(rows))
    greedy = np.flatnonzero(rng.random(len(rows)) >= epsilon)
    for part in np.split(greedy, range(WINDOWS_PER_PASS, len(greedy), WINDOWS_PER_PASS)):
        actions[part] = agent.best_actions(problem.scores, rows[part])
    return actions


def exploration(progress: float, *, start: float, end: float) -> float:
    """Returns the share of random choices, which changes linearly with `progress` in [0, 1]."""
    return start + (end - start) * progress


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayBatch:
    r"""Huber errors of past choices: :math:`Q(s, a)` against :math:`r + \gamma \max_b Q_\mathrm{target}(s', b)`."""

    problem: MixingProblem
    # [R] selects the choices. It is drawn once for the logical batch, so that a split does not change the choices.
    uniform: Floats

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
        with torch.no_grad():
            following = problem.following[rows]
            best: Tensor = model.target(problem.states(np.maximum(following, 0), like)).amax(dim=1)
            # The target network's best value of the next window; 0 where there is no next window.
            next_values = (best * torch.from_numpy(following != mixing.NO_WINDOW).to(like)).to(like)
        targets = targets + problem.discount * next_values
        # In mixed precision, the values may have another dtype than the targets.
        errors = F.smooth_l1_loss(chosen.to(like.dtype), targets, reduction="none")
        return {"value": (errors.sum(), float(stop - start))}


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyBatch:
    """Minus the reward of the agent's choices on [R] windows, for validation."""

    # The epoch with the highest reward has the best weights. Errors of values cannot compare epochs: they grow with the
    # values.
    problem: MixingProblem
    rows: Ints

    @property
    def denominators(self) -> dict[str, float]:
        """Windows in the whole batch."""
        return {"value": float(len(self.rows))}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the sum over windows `start:stop`."""
        assert isinstance(model, FusionAgent)
        rows = self.rows[start:stop]
        earned = self.problem.rewards(rows, model.best_actions(self.problem.scores, rows))
        return {"value": (torch.tensor(-earned.sum()), float(len(rows)))}


def decide(agent: nn.Module, table: mixing.WindowScores, rows: Ints, weights: Floats) -> Floats:
    """Returns, for each window [R, 2], the fused score and the mixing weight that the agent chooses."""
    assert isinstance(agent, FusionAgent)
    chosen = weights[agent.best_actions(table, rows)]
    return np.stack([table.fused(rows, chosen), chosen], axis=1)


def scale_errors(autoencoder: FinishedNetwork, errors: Floats) -> tuple[Floats, Floats]:
    """Returns anomaly scores [R] and reconstruction errors [R, 3], all in [0, 1], from error terms [R, 5].

    Raises:
        RunError: An error is not a finite number.
    """
    assert autoencoder.error_units is not None
    autoencoder.check_finite(errors)
    scores = mixing.bounded_anomaly(autoencoder.network_scores(errors), autoencoder.threshold)
    terms = slice(RECONSTRUCTION_TERMS)
    return scores, mixing.bounded_errors(errors[:, terms], autoencoder.error_units[terms])


def scale_logits(classifier: FinishedNetwork, difference: Floats) -> Floats:
    """Returns attack probabilities [R] from logit differences [R, 1], attack minus benign.

    Raises:
        RunError: A difference is not a finite number.
    """
    classifier.check_finite(difference)
    return mixing.attack_probability(classifier.network_scores(difference), classifier.threshold)


class FusionTask(WindowTask):
    """An agent learns from labelled windows, which two finished models have scored.

    Raises:
        DataError: There are no labels, or windows of one class only.
        CheckpointError: A model does not fit the windows.
        ConfigError: The settings ask for the weights of another run (`start_from`).
    """

    memory_features = (Feature("windows"),)
    loss_weights: Mapping[str, float] = {"value": 1.0}

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data, data.split.train, data.split.validation)
        check_classes(data, data.flat.label[self.train_rows] > 0)
        if run.training.start_from:
            # The weights of another agent include its memory, perhaps with windows of other data.
            raise ConfigError("A fusion agent starts with a memory of its own", value=run.training.start_from,
                              remedy="Leave out --start-from")  # fmt: skip
        split = data.split
        self._scored_rows = np.unique(np.concatenate([split.train, split.validation, *split.test.values()]))
        self._autoencoder, self._classifier = (
            WindowReferenceModel(role, finished[role], data, self._scored_rows, output=output)
            for role, output in ((AUTOENCODER, "errors"), (CLASSIFIER, "score"))
        )
        size = len(data.flat)
        self._problem = MixingProblem(
            # Zeros until `bind_outputs` fills the scores in.
            scores=mixing.WindowScores(anomaly=np.zeros(size), attack=np.zeros(size), errors=np.zeros((size, 3))),
            is_attack=data.flat.label > 0,
            following=mixing.next_windows(split.train, data.flat.source),
            weights=mixing.mixing_weights(run.mode.mixing_weights),
            discount=run.mode.discount,
        )

    def reference_models(self) -> Sequence[WindowReferenceModel]:
        """Returns the autoencoder and the classifier."""
        return (self._autoencoder, self._classifier)

    def bind_outputs(self, role: str, outputs: Outputs) -> None:
        """Fills in the scores of one model for all windows of training, validation and test.

        Raises:
            RunError: An output is not a finite number.
        """
        rows, scores = self._scored_rows, self._problem.scores
        if role == AUTOENCODER:
            errors = _read(outputs, rows, "errors")
            scores.anomaly[rows], scores.errors[rows] = scale_errors(self._autoencoder, errors)
        else:
            scores.attack[rows] = scale_logits(self._classifier, _read(outputs, rows, "score"))

    def build_model(self) -> FusionAgent:
        """Makes an agent with fresh weights and an empty memory."""
        mode = self._run.mode
        return FusionAgent(self._run.model, mixing_weights=mode.mixing_weights, replay_size=mode.replay_size)

    def batch_features(self, rows: Ints) -> Floats:
        """Returns ones [R, 1]: the agent sees seven numbers of a window of any size."""
        return np.ones((len(rows), 1))

    def before_step(self, model: nn.Module, rows: Ints, progress: float, generator: torch.Generator) -> None:
        """Lets the agent choose weights for the windows of the step, and adds the choices to its memory."""
        assert isinstance(model, FusionAgent)
        mode = self._run.mode
        model.begin_step(mode.target_every)
        epsilon = exploration(progress, start=mode.epsilon_start, end=mode.epsilon_end)
        model.memory.push(rows, act(model, self._problem, rows, epsilon, numpy_generator(generator)))

    def logical_batch(
        self, rows: Ints, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> ReplayBatch | PolicyBatch:
        """Prepares as many remembered choices as there are rows; in validation, without a generator, the rows."""
        if generator is None:
            return PolicyBatch(problem=self._problem, rows=rows)
        return ReplayBatch.draw(self._problem, len(rows), generator)

    def scores(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns fused scores and chosen mixing weights, float64 [R, 2]."""
        return torch.from_numpy(decide(model, self._problem.scores, rows, self._problem.weights))

    def judge(self, score: Callable[..., Floats]) -> Mapping[str, Any]:
        """Judges each test folder separately, together with simple mixes of the two scores and the usual baselines."""
        from can_train_tasks.can.evaluation.judging import JudgingOptions
        from can_train_tasks.can.fusion.mixes import judge_agent

        options = JudgingOptions.of(self._run, self._data, supervised=True)
        return judge_agent(score, self._data, self._problem.scores, self._problem.weights, options)

    def _final_scores(self, score: Score, *role: str) -> ModelScores:
        return mixing.as_log_odds(super()._final_scores(score, *role))


def _read(outputs: Outputs, rows: Ints, name: str) -> Floats:
    parts = np.split(rows, range(WINDOWS_PER_READ, len(rows), WINDOWS_PER_READ))
    return np.concatenate([np.asarray(outputs(part)[name].double().cpu()) for part in parts])


class FinishedFusion(WindowModel):
    """A finished agent and the two models that it mixes, on the windows of a data set; `mixed` has the models by role.

    Raises:
        CheckpointError: The weights do not fit the settings of a run.
    """

    def __init__(self, finished: FinishedModel, flat: FlatGraphs, mixed: Mapping[str, FinishedModel]) -> None:
        mode = finished.run.mode
        agent = FusionAgent(finished.run.model, mixing_weights=mode.mixing_weights, replay_size=mode.replay_size)
        try:
            agent.load_state_dict(dict(finished.weights))
        except RuntimeError as error:
            raise CheckpointError(
                "The weights of a run fit the model of its settings",
                value=f"{finished.run_id}: {error}".splitlines()[0],
                remedy="Train the run anew: can-train resubmit RUN",
            ) from error
        networks = {role: FinishedNetwork(model, flat, full_precision=True) for role, model in mixed.items()}
        models = {role: network.model for role, network in networks.items()}
        super().__init__(finished, flat, nn.ModuleDict({"agent": agent, **models}))
        self._autoencoder, self._classifier = networks[AUTOENCODER], networks[CLASSIFIER]
        self.vocabulary = self._classifier.vocabulary
        self._weights = mixing.mixing_weights(mode.mixing_weights)

    @property
    def trained(self) -> nn.Module:
        """The agent."""
        assert isinstance(self.model, nn.ModuleDict)
        return self.model["agent"]

    def on(self, flat: FlatGraphs) -> Self:
        """Returns the same model, with the same networks, on other windows."""
        other = super().on(flat)
        other._autoencoder, other._classifier = self._autoencoder.on(flat), self._classifier.on(flat)
        return other

    def scores(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Computes the scores of windows.

        Returns:
            [R, 7] float64 on the CPU: fused score, chosen mixing weight, anomaly score, attack probability, and three
            error terms.
        """
        assert isinstance(model, nn.ModuleDict)
        errors = self._autoencoder.scores(model[AUTOENCODER], rows, device, dtype)
        difference = self._classifier.scores(model[CLASSIFIER], rows, device, dtype)
        anomaly, bounded = scale_errors(self._autoencoder, np.asarray(errors.double().cpu()))
        attack = scale_logits(self._classifier, np.asarray(difference.double().cpu()))
        table = mixing.WindowScores(anomaly=anomaly, attack=attack, errors=bounded)
        decisions = decide(model["agent"], table, np.arange(len(rows)), self._weights)
        return torch.from_numpy(np.column_stack([decisions, anomaly, attack, bounded]))

    def contributions(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns both models' contributions [I, P] as shares, weighted with the model's part of the fused score, and
        the contributions of the rules.
        """
        assert isinstance(model, nn.ModuleDict)
        # The agent's weight is a number on the host: no gradient passes through its choice.
        with torch.no_grad():
            _, weight, anomaly, attack, *_ = self.scores(model, rows, device, dtype).T
        found = torch.zeros(())
        for role, network, part in (
            (AUTOENCODER, self._autoencoder, (1 - weight) * anomaly),
            (CLASSIFIER, self._classifier, weight * attack),
        ):
            each = network.network_contributions(model[role], rows, device, dtype).double().cpu()
            window = torch.from_numpy(np.repeat(np.arange(len(rows)), self._flat.num_ids[rows]))
            found = found + shares_of_windows(each, window) * part[window][:, None]
        return self.with_rules(found, rows)

    def combine(self, scores: Floats, rows: Ints) -> Floats:
        """Returns the log odds [R] of the fused scores, raised by the rules."""
        return self.raised_scores(mixing.log_odds(scores[:, mixing.FUSED]), rows)
