"""The fusion agent's loss on remembered choices, as a sum with the denominator of the whole logical batch, and what its
policy is worth on windows.

Shapes: R samples of the logical batch, B of a part, A mixing weights, G windows of the data set.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.tasks.can.fusion.agent import FusionAgent, as_agent, best_actions
from can_train.tasks.can.fusion.rewards import rewards
from can_train.tasks.can.fusion.states import NO_WINDOW, WindowScores

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
