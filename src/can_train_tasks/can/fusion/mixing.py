"""The two scores that fusion mixes, on one scale: in [0, 1], with each model's threshold at 0.5.

Shapes: G windows of a data set, R rows (windows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from can_train_tasks.can.data.graphs import Floats, Ints

if TYPE_CHECKING:
    from can_train_tasks.can.evaluation.judging import ModelScores

# Numbers of a window that the agent sees: anomaly score, attack probability, the confidence of both, and the node, edge
# and latent error of the autoencoder.
STATE_WIDTH: Final = 7

NO_WINDOW: Final = -1  # stands for a next window that does not exist
THRESHOLD: Final = 0.5  # threshold of a fused score, and of each of its two scores

# Columns of the fused score and of the chosen mixing weight in an agent's `scores`.
FUSED: Final = 0
WEIGHT: Final = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowScores:
    """Scores of windows by an autoencoder and a classifier, all in [0, 1]."""

    anomaly: Floats  # [G] anomaly score of the autoencoder; 0.5 is its threshold
    attack: Floats  # [G] attack probability of the classifier; 0.5 is its threshold
    errors: Floats  # [G, 3] node, edge and latent errors; 0.5 is the mean benign window of validation

    def states(self, rows: Ints) -> NDArray[np.float32]:
        """Returns the numbers [R, 7] that the agent sees."""
        scores = np.stack([self.anomaly[rows], self.attack[rows]], axis=1)
        return np.concatenate([scores, confidence(scores), self.errors[rows]], axis=1, dtype=np.float32)

    def fused(self, rows: Ints, weights: Floats | float) -> Floats:
        """Returns (1 − α) · anomaly + α · attack, [R], with weights α [R] or one weight for all windows."""
        fused: Floats = (1 - weights) * self.anomaly[rows] + weights * self.attack[rows]
        return fused


def mixing_weights(count: int) -> Floats:
    """Returns the weights α [count] that the agent chooses from, evenly spaced in [0, 1]."""
    return np.linspace(0.0, 1.0, count)


def confidence(score: Floats) -> Floats:
    """Returns the distance of scores in [0, 1] from the threshold: 0 at the threshold, 1 at 0 and 1."""
    distance: Floats = np.abs(score - THRESHOLD) * 2
    return distance


def bounded_anomaly(score: Floats, threshold: float) -> Floats:
    """Maps anomaly scores s ≥ 0, [R], to s / (s + threshold): the order stays, the threshold becomes 0.5."""
    # With a threshold of 0, every score above it becomes 1.
    bounded: Floats = score / (score + max(threshold, np.finfo(np.float64).tiny))
    return bounded


def attack_probability(logit_difference: Floats, threshold: float) -> Floats:
    """Returns the logistic function of logit differences [R] (attack minus benign), with the threshold at 0.5."""
    # A classifier that is trained with equal class weights flags too many windows at 0.5 where attacks are rare.
    # Without the shift, the agent would have to outvote the classifier even where its score is right.
    return logistic(logit_difference - threshold)


def logistic(logit_difference: Floats) -> Floats:
    """Returns the probabilities of logit differences."""
    # 1 / (1 + exp(-x)) overflows for large negative x; the equivalent hyperbolic tangent does not.
    probability: Floats = 0.5 * (1 + np.tanh(logit_difference / 2))
    return probability


def log_odds(probability: Floats) -> Floats:
    """Returns the logit differences of probabilities [R], also of 0 and 1: finite, in the same order."""
    # Rules raise a score by a multiple of its spread, which a score between 0 and 1 has no room for.
    least = np.finfo(np.float64).epsneg
    bounded = np.clip(probability, least, 1 - least)
    odds: Floats = np.log(bounded) - np.log1p(-bounded)
    return odds


def as_log_odds(scores: ModelScores) -> ModelScores:
    """Returns scores in [0, 1] as log odds."""
    test = {folder: log_odds(score) for folder, score in scores.test.items()}
    return replace(scores, validation=log_odds(scores.validation), test=test)


def bounded_errors(errors: Floats, units: Sequence[float]) -> Floats:
    """Maps error terms e [R, 3] to e / (e + unit), in [0, 1]; the mean of benign validation windows becomes 0.5."""
    bounded: Floats = errors / (errors + np.asarray(units))
    return bounded


def next_windows(rows: Ints, source: NDArray[np.int32]) -> Ints:
    """Returns the next window [G] after each window of a part of the data set, within the same log and part.

    Without a next window, and for windows of other parts, it is `NO_WINDOW`.

    Args:
        rows: [R] the windows of the part.
        source: [G] log of each window; the windows of a log are adjacent and in time order.
    """
    following = np.full(len(source), NO_WINDOW, dtype=np.int64)
    # A window of another part is no next window: training must not see validation or test, even as a next state.
    in_part = np.zeros(len(source) + 1, dtype=np.bool_)
    in_part[rows] = True
    same_log = np.append(source[1:] == source[:-1], False)
    continued = rows[in_part[rows + 1] & same_log[rows]]
    following[continued] = continued + 1
    return following
