"""Simple ways to mix the two scores, to be judged beside the agent: what does not beat them has learned nothing. They
are chosen on validation, or fitted on training windows; test windows are scored and never looked at.

Shapes: R windows, A mixing weights.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from can_train.tasks.can.flat import FlatGraphs
from can_train.tasks.can.floors import sample_by_class
from can_train.tasks.can.fusion.states import WindowScores
from can_train.tasks.can.judging import ModelScores
from can_train.tasks.can.metrics import detector_metrics
from can_train.tasks.can.splits import Split
from can_train.tasks.can.thresholds import choose_threshold

BEST_MIX: Final = "best_mix"
"""Name of the constant mix whose weight is the best one on validation."""

EVEN_WEIGHT: Final = 0.5

MAX_FITTED_WINDOWS: Final = 20_000
"""Training windows that a small model is fitted on: seconds, and far more than seven numbers need."""

HIDDEN: Final = (32,)
"""Widths of the small network."""

LOGISTIC_ROUNDS: Final = 1000
NETWORK_ROUNDS: Final = 100
"""Most iterations of each fit; on this few inputs both have settled long before."""

Scorer = Callable[[NDArray[np.int64]], NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class ConstantMixes:
    """Mixes with one weight for all windows.

    Attributes:
        scores: By name, in the order they are shown.
        best_weight: Of `BEST_MIX`; None where validation cannot tell.
        absent: Why any is missing, by name.
    """

    scores: Mapping[str, ModelScores]
    best_weight: float | None
    absent: Mapping[str, str]


def constant_mixes(
    table: WindowScores, flat: FlatGraphs, split: Split, weights: NDArray[np.float64], fpr: float
) -> ConstantMixes:
    """Mixes with one weight for all windows: each score alone, half of each, and the weight that validation likes best.

    Args:
        table: The two scores.
        flat: All windows.
        split: Which of them validate and are judged.
        weights: [A] to choose from.
        fpr: Share of the benign validation windows that may be flagged where there are no attacks.
    """
    named = {"autoencoder": 0.0, "classifier": 1.0, "even_mix": EVEN_WEIGHT}
    absent: dict[str, str] = {}
    is_attack = flat.label[split.validation] > 0
    best = None
    if 0 < is_attack.sum() < len(is_attack):
        best = named[BEST_MIX] = best_weight(table, split.validation, is_attack, weights, fpr)
    else:
        absent[BEST_MIX] = "the validation windows are of one class only"
    scores = {
        name: _scored(split, lambda rows, weight=weight: table.fused(rows, weight))  # type: ignore[misc]
        for name, weight in named.items()
    }
    return ConstantMixes(scores=scores, best_weight=best, absent=absent)


def best_weight(
    table: WindowScores,
    rows: NDArray[np.int64],
    is_attack: NDArray[np.bool_],
    weights: NDArray[np.float64],
    fpr: float,
) -> float:
    """Returns the weight with the highest MCC on validation; of equally good ones, the one closest to an even mix.

    Args:
        table: The two scores.
        rows: [R] validation windows.
        is_attack: [R] of both classes.
        weights: [A] to choose from.
        fpr: As for `choose_threshold`.
    """

    def merit(weight: float) -> tuple[float, float]:
        score = table.fused(rows, weight)
        threshold = choose_threshold(is_attack, score, supervised=True, fpr=fpr)
        reached = detector_metrics(is_attack, score, score > threshold.value, benign_hours=0.0)["mcc"]
        return reached or 0.0, -abs(weight - EVEN_WEIGHT)

    return max(map(float, weights), key=merit)


def fitted_mixes(table: WindowScores, flat: FlatGraphs, split: Split, seed: int) -> dict[str, ModelScores]:
    """Mixes that small models learn from training windows, of the same seven numbers that the agent sees.

    Args:
        table: What they see.
        flat: All windows; those that train are of both classes.
        split: Which of them train, validate and are judged.
        seed: Of sampling and weights.
    """
    rows = sample_by_class(flat, split.train, most=MAX_FITTED_WINDOWS, seed=seed)
    models = {
        "logistic": LogisticRegression(class_weight="balanced", max_iter=LOGISTIC_ROUNDS),
        "small_mlp": MLPClassifier(HIDDEN, max_iter=NETWORK_ROUNDS, random_state=seed),
    }
    scores = {}
    for name, model in models.items():
        fitted = make_pipeline(StandardScaler(), model)
        with warnings.catch_warnings():
            # That the last digits still move is of no account.
            warnings.simplefilter("ignore", ConvergenceWarning)
            fitted.fit(table.states(rows), flat.label[rows] > 0)
        scores[name] = _scored(split, _predictor(fitted, table))
    return scores


def _predictor(fitted: Any, table: WindowScores) -> Scorer:
    return lambda rows: np.asarray(fitted.predict_proba(table.states(rows))[:, 1], dtype=np.float64)


def _scored(split: Split, scorer: Scorer) -> ModelScores:
    return ModelScores(
        validation=scorer(split.validation), test={group: scorer(rows) for group, rows in split.test.items()}
    )
