"""Metrics of classifiers, and the baselines for a classifier's result.

Shapes: W windows, K classes, C channels, L samples of a window, F features.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import rankdata

from can_train_tasks.bendr.recording_windows import Windows

# Delta, theta, alpha, beta and gamma, in Hz.
BANDS: Final = ((1.0, 4.0), (4.0, 8.0), (8.0, 13.0), (13.0, 30.0), (30.0, 45.0))
_LEAST_POWER: Final = 1e-6  # added before the logarithm: a flat channel has no power
_PENALTY: Final = 1.0  # factor of half the squared weights of standardised features; 1 is scikit-learn's C=1
# Training windows that a baseline learns from, spread evenly: more windows change little, and each is read from disk.
_MOST_WINDOWS: Final = 5000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def classification_metrics(truth: Ints, probabilities: Floats) -> dict[str, float]:
    """Computes metrics that show no merit in a model that always answers one class.

    Args:
        truth: [W] true classes.
        probabilities: [W, K].

    Returns:
        `balanced_accuracy` (mean recall of the classes that occur), `mcc` (Matthews' correlation coefficient), and
        `auroc` (area under the ROC curve) where there are two classes and both occur.
    """
    classes = probabilities.shape[1]
    table = np.zeros((classes, classes))
    np.add.at(table, (truth, probabilities.argmax(axis=1)), 1.0)
    metrics = {"balanced_accuracy": balanced_accuracy(table), "mcc": matthews(table)}
    if classes == 2 and 0 < truth.sum() < len(truth):
        metrics["auroc"] = area_under_roc(truth == 1, probabilities[:, 1])
    return metrics


def balanced_accuracy(table: Floats) -> float:
    """Computes the mean recall of the classes that occur, from [K, K] counts of (truth, answer)."""
    occur = table.sum(axis=1)
    return float((np.diag(table)[occur > 0] / occur[occur > 0]).mean())


def matthews(table: Floats) -> float:
    """Computes Matthews' correlation coefficient from [K, K] counts of (truth, answer); 0 where either never varies.

    Source: Gorodkin, "Comparing two K-category assignments by a K-category correlation coefficient", 2004.
    """
    total, right = table.sum(), np.trace(table)
    truth, answer = table.sum(axis=1), table.sum(axis=0)
    spread = (total**2 - answer @ answer) * (total**2 - truth @ truth)
    return float((right * total - truth @ answer) / np.sqrt(spread)) if spread > 0 else 0.0


def area_under_roc(positive: NDArray[np.bool_], score: Floats) -> float:
    """Computes the share of (positive, negative) pairs whose positive scores higher; equal scores count half."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    ranks = rankdata(score)[positive].sum()
    return float((ranks - positives * (positives + 1) / 2) / (positives * negatives))


def baselines(train: Windows, tests: Sequence[Mapping[str, Any]], classes: int, hz: float) -> dict[str, Any]:
    """Computes the metrics of two baselines: the most frequent class, and logistic regression on band powers."""
    chosen = np.unique(np.linspace(0, len(train) - 1, min(len(train), _MOST_WINDOWS)).astype(int))
    features, targets = _table([train[int(one)] for one in chosen], hz)
    inputs, truth = _table(tests, hz)
    majority = np.eye(classes)[np.full(len(truth), np.bincount(targets, minlength=classes).argmax())]
    centre, spread = features.mean(axis=0), features.std(axis=0)
    standard = (features - centre) / np.where(spread > 0, spread, 1.0)
    weights = fit_logistic(standard, targets, classes)
    answers = logistic((inputs - centre) / np.where(spread > 0, spread, 1.0), weights)
    return {
        "most frequent class": classification_metrics(truth, majority),
        "logistic regression on band powers": classification_metrics(truth, answers),
    }


def _table(samples: Sequence[Mapping[str, Any]], hz: float) -> tuple[Floats, Ints]:
    powers = [band_powers(np.asarray(sample["signal"], dtype=np.float64), hz) for sample in samples]
    return np.stack(powers), np.array([int(sample["label"]) for sample in samples])


def band_powers(signal: Floats, hz: float) -> Floats:
    """Computes the logarithm of a window's mean power in each channel and band: [C · bands] from [C, L]."""
    length = signal.shape[1]
    power = np.abs(np.fft.rfft(signal * np.hanning(length), axis=1)) ** 2 / length
    frequency = np.fft.rfftfreq(length, 1 / hz)
    inside = [(frequency >= low) & (frequency < high) for low, high in BANDS]
    means = [power[:, one].mean(axis=1) if one.any() else np.zeros(len(power)) for one in inside]
    return np.log(np.concatenate(means) + _LEAST_POWER)


def fit_logistic(features: Floats, targets: Ints, classes: int) -> Floats:
    """Fits the weights [F + 1, K] of a multinomial logistic regression; the last row, the offsets, has no penalty."""
    inputs = np.column_stack([features, np.ones(len(features))])
    shape, wanted = (inputs.shape[1], classes), np.eye(classes)[targets]

    def loss(flat: Floats) -> tuple[float, Floats]:
        weights = flat.reshape(shape)
        penalised = np.vstack([weights[:-1], np.zeros((1, classes))])
        probabilities = logistic(features, weights)
        total = -np.log((probabilities * wanted).sum(axis=1).clip(1e-300)).sum()
        slope = inputs.T @ (probabilities - wanted) + _PENALTY * penalised
        return float(total + _PENALTY * (penalised**2).sum() / 2), slope.ravel()

    found: Floats = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B").x
    return found.reshape(shape)


def logistic(features: Floats, weights: Floats) -> Floats:
    """Computes probabilities [W, K] from features [W, F] and weights [F + 1, K]."""
    logits = features @ weights[:-1] + weights[-1]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Floats = powers / powers.sum(axis=1, keepdims=True)
    return probabilities
