"""Synthetic windows for tests of the fusion agent. In half of the windows the score of the autoencoder is right, in the
other half the score of the classifier; the third error term shows which half a window belongs to.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from can_train_tasks.can.fusion.agent import FusionAgent, MixingProblem
from can_train_tasks.can.fusion.mixing import WindowScores, mixing_weights, next_windows
from can_train_tasks.can.settings import FusionAgentSettings

WINDOWS = 600
WEIGHTS = 21


def divided_problem(windows: int = WINDOWS, seed: int = 0) -> MixingProblem:
    """Windows of three logs, all of one part."""
    rng = np.random.default_rng(seed)
    is_attack = rng.random(windows) < 0.4
    autoencoder_knows = rng.random(windows) < 0.5
    knowing = np.where(is_attack, 0.8, 0.2) + rng.uniform(-0.15, 0.15, windows)
    guessing = rng.uniform(0.05, 0.95, windows)
    errors = rng.random((windows, 3))
    errors[:, 2] = np.where(autoencoder_knows, 0.8, 0.2)
    source = np.sort(rng.integers(0, 3, windows)).astype(np.int32)
    return MixingProblem(
        scores=WindowScores(
            anomaly=np.where(autoencoder_knows, knowing, guessing),
            attack=np.where(autoencoder_knows, guessing, knowing),
            errors=errors,
        ),
        is_attack=is_attack,
        following=next_windows(np.arange(windows), source),
        weights=mixing_weights(WEIGHTS),
        discount=0.9,
    )


def small_agent(*, replay_size: int = 1000, hidden: int = 64, seed: int = 0) -> FusionAgent:
    torch.manual_seed(seed)
    return FusionAgent(FusionAgentSettings(hidden=hidden, layers=2), mixing_weights=WEIGHTS, replay_size=replay_size)


def remember_at_random(agent: FusionAgent, problem: MixingProblem, choices: int, seed: int = 0) -> None:
    """Fills an agent's memory with random choices about random windows."""
    rng = np.random.default_rng(seed)
    windows = len(problem.is_attack)
    agent.memory.push(rng.integers(windows, size=choices), rng.integers(WEIGHTS, size=choices))


def mean_reward(problem: MixingProblem, rows: NDArray[np.int64], actions: NDArray[np.int64]) -> float:
    return float(problem.rewards(rows, actions).mean())
