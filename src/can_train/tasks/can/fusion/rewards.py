"""What a choice of the fusion agent is worth: whether the window it mixed a score for is called what it is, and how
firmly.

Shapes: R windows.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.tasks.can.fusion.states import THRESHOLD, confidence

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
