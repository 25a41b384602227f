"""Thresholds and figures of one detector on one set of windows.

Shapes: V validation windows, W judged windows, R windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train_tasks.can.data.graphs import Bools, Floats, Ints

# False-positive rate of `recall_at_fpr_1pct`. It is customary, and means hundreds of alarms an hour.
FIXED_FPR: Final = 0.01
# Terms of an autoencoder's anomaly score: mean errors of a window's nodes, edges and latents, the mean error of its
# worst nodes, and the suspicion from unknown and overdue IDs, which no reconstruction shows.
ERROR_TERMS: Final = ("node", "edge", "latent", "worst", "ids")
# The first three weights are this detector's usual weights.
ERROR_WEIGHTS: Final = (0.40, 0.35, 0.25, 0.5, 1.0)
RECONSTRUCTION_TERMS: Final = 3
ODD: Final = 3.0  # a score further out than this multiple of the usual reach of benign scores is odd
# Factor for the larger scores of another drive. MCC on other drives of six simulated vehicles, trained on 27 and 60 s
# of one drive: 0.41 and 0.58 with a factor of 1, 0.44 and 0.64 with this factor.
SHORT_DRIVE_MARGIN: Final = 1.75
LEAST_IDS: Final = 0.02  # unit of the last term where benign windows have no such IDs: one ID then weighs 50 units


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A threshold, and a sentence about the rule that chose it; windows with higher scores are flagged."""

    value: float
    rule: str

    @property
    def text(self) -> str:
        """The threshold and its rule, as a sentence without its full stop."""
        return f"A window is flagged if it scores more than {self.value:.6g}: {self.rule}"


def choose_threshold(is_attack: Bools, score: Floats, *, supervised: bool, fpr: float) -> Threshold:
    """Chooses the threshold of a detector from validation windows [V].

    A supervised detector gets the threshold with the best F1, if there are attacks. Any other detector may flag a share
    `fpr` of the benign windows.

    Raises:
        DataError: There is no benign window to measure the rate on.
    """
    if supervised and is_attack.any():
        rule = "max F1 on validation" + (" (which holds attacks only)" if is_attack.all() else "")
        return Threshold(value=threshold_max_f1(is_attack, score), rule=rule)
    if is_attack.all():
        raise DataError(f"None of the {len(is_attack)} validation windows is benign: a threshold needs some",
                        remedy="Use a longer log, or raise dataset.validation_share")  # fmt: skip
    benign = score[~is_attack]
    where = "on validation" + (" (which holds no attacks)" if supervised else "")
    if fpr * len(benign) >= 1:
        rule = f"at most {100 * fpr:g} % of benign windows flagged {where}"
        return Threshold(value=threshold_at_fpr(benign, fpr), rule=rule)
    # Few windows cannot show the rate: their threshold is the largest score, which a single odd window may decide. And
    # they are minutes of one drive: another drive has larger scores.
    usual = without_odd(benign, fpr)
    middle = float(np.median(benign))
    # The tail is taken for exponential: each median of it halves the rate. `beyond` is the distance of the threshold
    # from the median ÷ the distance of the highest score.
    beyond = math.log2(0.5 / fpr) / max(math.log2(len(benign) / 2), 1.0)
    margin = SHORT_DRIVE_MARGIN * beyond
    value = middle + margin * (threshold_at_fpr(usual, fpr) - middle)
    rule = f"{margin:.2g} times as far above the median as the highest of {len(benign)} benign windows"
    if left_out := len(benign) - len(usual):
        rule += f", without {left_out} far above the others"
    return Threshold(value=value, rule=f"{rule}, too few for {100 * fpr:g} %, {where}")


def without_odd(benign_score: Floats, fpr: float) -> Floats:
    """Leaves out scores that lie `ODD` times as far above the median as an exponential tail would reach at `fpr`."""
    middle = float(np.median(benign_score))
    above = benign_score[benign_score > middle] - middle
    if not len(above):
        return benign_score
    reach = float(np.median(above)) * math.log2(0.5 / fpr)
    return benign_score[benign_score <= middle + ODD * reach]


def threshold_max_f1(is_attack: Bools, score: Floats) -> float:
    """Returns the threshold with the best attack-class F1; if several are best, the one that flags fewest windows.

    It lies midway between the lowest flagged score and the highest score without a flag. There must be an attack.
    """
    # Only the distinct scores can be thresholds. From the highest down, every level flags all windows above it.
    levels = np.unique(-score)
    flagged, hits = _counts_by_level(is_attack, score)
    f1 = 2 * hits / (flagged + hits[-1])
    best = int(np.argmax(f1))
    lowest_flagged = -float(levels[best])
    if best + 1 == len(levels):
        return float(np.nextafter(lowest_flagged, -np.inf))
    highest_passed = -float(levels[best + 1])
    # Between neighbouring or huge numbers, rounding or overflow can put the middle outside.
    middle = (highest_passed + lowest_flagged) / 2
    return middle if highest_passed <= middle < lowest_flagged else highest_passed


def threshold_at_fpr(benign_score: Floats, fpr: float) -> float:
    """Returns the lowest benign score with at most a share `fpr` of the benign scores strictly above it.

    There must be at least one score.
    """
    # Equal scores are flagged together or not at all, so the rate that is reached may be lower, but never higher.
    count = len(benign_score)
    # Rates are compared, not counts: 0.29 · 100 is 28.999999999999996, one window too few.
    rates = np.arange(1, count) / count
    allowed = int(np.searchsorted(rates, fpr, side="right"))
    return float(np.sort(benign_score)[count - 1 - allowed])


class Metrics(TypedDict):
    """Figures of one detector on one set of windows; the rates are in [0, 1], `mcc` in [-1, 1]."""

    f1: float | None
    precision: float | None
    recall: float | None
    mcc: float | None
    pr_auc: float | None
    roc_auc: float | None
    recall_at_fpr_1pct: float | None
    false_positive_rate: float | None
    false_alarms_per_hour: float | None
    flagged_share: float | None
    windows: int
    attack_windows: int


_COUNTS: Final = ("windows", "attack_windows")  # figures that are equal for all detectors


class KindRecall(TypedDict):
    """Share of the windows of one attack kind that were flagged, and the number of its windows."""

    recall: float
    windows: int


def detector_metrics(is_attack: Bools, score: Floats, flagged: Bools, *, benign_hours: float) -> Metrics:
    """Computes every figure of one detector; figures that the windows do not define are None.

    As in scikit-learn, the precision is 0 if no window is flagged, and the MCC is 0 if all windows or no windows are.

    Args:
        is_attack: [W] the truth.
        score: [W] higher is more attack-like; finite.
        flagged: [W] which windows the detector calls attacks.
        benign_hours: Hours of benign traffic in the windows.
    """
    hits = int(np.count_nonzero(is_attack & flagged))
    false_alarms = int(np.count_nonzero(flagged)) - hits
    attacks = int(np.count_nonzero(is_attack))
    benign = len(is_attack) - attacks
    both = attacks > 0 and benign > 0
    return Metrics(
        f1=2 * hits / (hits + false_alarms + attacks) if attacks else None,
        precision=hits / max(hits + false_alarms, 1) if attacks else None,
        recall=_ratio(hits, attacks),
        mcc=_mcc(hits, false_alarms, attacks, benign) if both else None,
        pr_auc=_average_precision(is_attack, score) if attacks else None,
        roc_auc=_roc_auc(is_attack, score) if both else None,
        recall_at_fpr_1pct=recall_at_fpr(is_attack, score, FIXED_FPR) if both else None,
        false_positive_rate=_ratio(false_alarms, benign),
        false_alarms_per_hour=_ratio(false_alarms, benign_hours),
        flagged_share=_ratio(hits + false_alarms, len(is_attack)),
        windows=len(is_attack),
        attack_windows=attacks,
    )


def means_and_ranges(several: Sequence[Metrics]) -> tuple[Metrics, dict[str, list[float]]]:
    """Returns the means of the figures of several fits on the same windows, and their lowest and highest values.

    A figure that is None for a fit has no range, and its mean is None.
    """
    columns: dict[str, list[Any]] = {name: [dict(fit)[name] for fit in several] for name in several[0]}
    defined = {name: values for name, values in columns.items() if None not in values and name not in _COUNTS}
    means: dict[str, Any] = {name: values[0] if name in _COUNTS else None for name, values in columns.items()}
    means |= {name: sum(values) / len(values) for name, values in defined.items()}
    return cast(Metrics, means), {name: [min(values), max(values)] for name, values in defined.items()}


def _ratio(part: int, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mcc(hits: int, false_alarms: int, attacks: int, benign: int) -> float:
    # Python integers: the product of the four sums exceeds 64 bits at a million windows.
    flagged = hits + false_alarms
    passed = attacks + benign - flagged
    if not flagged or not passed:
        return 0.0
    covariance = hits * (benign - false_alarms) - false_alarms * (attacks - hits)
    return float(covariance / (flagged * passed * attacks * benign) ** 0.5)


# The two areas are computed as in scikit-learn, which takes a second to import.
def _average_precision(is_attack: Bools, score: Floats) -> float:
    """Returns the area under the precision-recall curve, as a sum of steps. There must be an attack."""
    flagged, hits = _counts_by_level(is_attack, score)
    return float(np.sum(np.diff(hits / hits[-1], prepend=0.0) * (hits / flagged)))


def _roc_auc(is_attack: Bools, score: Floats) -> float:
    """Returns the area under the ROC curve, by trapezoids. Both classes must occur."""
    flagged, hits = _counts_by_level(is_attack, score)
    false_alarms = flagged - hits
    recall, fpr = hits / hits[-1], false_alarms / false_alarms[-1]
    return float(np.sum(np.diff(fpr, prepend=0.0) * (recall + np.concatenate([[0.0], recall[:-1]])) / 2))


def _counts_by_level(is_attack: Bools, score: Floats) -> tuple[Ints, Floats]:
    """Counts the flagged windows, and the attacks among them, for each distinct score as threshold, descending."""
    _, level_of = np.unique(-score, return_inverse=True)
    return np.cumsum(np.bincount(level_of)), np.cumsum(np.bincount(level_of, weights=is_attack))


def recall_at_fpr(is_attack: Bools, score: Floats, fpr: float) -> float:
    """Returns the best recall of any threshold that flags at most a share `fpr` of the benign windows.

    It measures how well the scores rank, independently of the chosen threshold. Both classes must occur.
    """
    threshold = threshold_at_fpr(score[~is_attack], fpr)
    return float(np.mean(score[is_attack] > threshold))


def recall_by_kind(label: NDArray[np.uint8], flagged: Bools, kinds: tuple[str, ...]) -> dict[str, KindRecall]:
    """Computes the recall of every attack kind that occurs; `label` [W] indexes `kinds`, and 0 is benign."""
    return {
        kinds[code]: KindRecall(recall=float(np.mean(flagged[label == code])), windows=int(np.sum(label == code)))
        for code in np.unique(label[label > 0])
    }


def error_units(benign_errors: Floats) -> list[float]:
    """Returns the units [5] of `ERROR_TERMS`: means over the errors [R, 5] of benign validation windows."""
    # The smallest positive number replaces a mean of 0, since errors are divided by units.
    least = [np.finfo(np.float64).tiny] * (len(ERROR_TERMS) - 1) + [LEAST_IDS]
    units: list[float] = np.maximum(benign_errors.mean(axis=0), least).tolist()
    return units


def anomaly_scores(errors: Floats, units: Sequence[float]) -> Floats:
    """Returns the weighted sums [R] of `ERROR_TERMS` [R, 5], each in units of its mean over benign windows."""
    scores: Floats = errors @ (np.array(ERROR_WEIGHTS) / np.asarray(units))
    return scores
