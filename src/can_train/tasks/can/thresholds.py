"""Decides from validation windows alone where a score becomes an alarm: a window is flagged if its score lies strictly
above the threshold. Test windows never come here.

Shapes: V validation windows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A score above which windows are flagged, and the rule that chose it, in words."""

    value: float
    rule: str


def choose_threshold(
    is_attack: NDArray[np.bool_], score: NDArray[np.float64], *, supervised: bool, fpr: float
) -> Threshold:
    """Chooses the threshold for a detector.

    A detector that learned from attacks gets the best F1, if validation holds attacks to measure it on; any other one
    gets a false-positive rate on the benign windows.

    Args:
        is_attack: [V].
        score: [V], higher is more attack-like.
        supervised: Whether the detector learned from attacks.
        fpr: Share of the benign windows that may be flagged where F1 cannot decide.

    Raises:
        DataError: There is no window that the rule could be applied to.
    """
    if supervised and is_attack.any():
        rule = "max F1 on validation" + (" (which holds attacks only)" if is_attack.all() else "")
        return Threshold(value=threshold_max_f1(is_attack, score), rule=rule)
    if is_attack.all():
        raise DataError(
            "The threshold needs benign windows in the validation part",
            value=f"{len(is_attack)} windows, none of them benign",
            remedy="Use a longer log, or raise dataset.validation_share",
        )
    reason = " (which holds no attacks)" if supervised else ""
    return Threshold(
        value=threshold_at_fpr(score[~is_attack], fpr),
        rule=f"at most {100 * fpr:g} % of benign windows flagged on validation{reason}",
    )


def threshold_max_f1(is_attack: NDArray[np.bool_], score: NDArray[np.float64]) -> float:
    """Returns the threshold with the best attack-class F1; of equally good ones, the one that flags fewest windows.

    It lies midway between the lowest flagged score and the highest one that is not.

    Args:
        is_attack: [V], at least one of them true.
        score: [V], finite.
    """
    levels, level_of = np.unique(-score, return_inverse=True)
    flagged = np.cumsum(np.bincount(level_of))
    hits = np.cumsum(np.bincount(level_of, weights=is_attack))
    f1 = 2 * hits / (flagged + hits[-1])
    best = int(np.argmax(f1))
    lowest_flagged = -float(levels[best])
    if best + 1 == len(levels):
        return float(np.nextafter(lowest_flagged, -np.inf))
    return _between(-float(levels[best + 1]), lowest_flagged)


def _between(low: float, high: float) -> float:
    """Returns a number in [low, high): the middle, unless rounding or overflow puts that elsewhere."""
    middle = (low + high) / 2
    return middle if low <= middle < high else low


def threshold_at_fpr(benign_score: NDArray[np.float64], fpr: float) -> float:
    """Returns the lowest of the benign scores that leaves at most a share `fpr` of them strictly above it.

    Equal scores are flagged together or not at all, so the rate that is reached may be lower, but never higher.

    Args:
        benign_score: [V], at least one.
        fpr: In [0, 1].
    """
    count = len(benign_score)
    rates = np.arange(1, count) / count
    allowed = int(np.searchsorted(rates, fpr, side="right"))
    return float(np.sort(benign_score)[count - 1 - allowed])
