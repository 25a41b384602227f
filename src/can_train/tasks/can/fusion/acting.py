"""How the fusion agent chooses mixing weights while it trains: at first mostly at random, later mostly what it values
most.

Shapes: R windows, A mixing weights.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.tasks.can.fusion.agent import FusionAgent
from can_train.tasks.can.fusion.batch import MixingProblem

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
