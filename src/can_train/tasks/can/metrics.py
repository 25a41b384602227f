"""How good a detector is on one set of windows, as pure functions of labels, scores and flags; the attack class is the
positive one. Thresholds are chosen elsewhere.

A figure that the windows cannot define (recall without attacks, say) is None, so that results stay strict JSON.

Shapes: W windows.
"""

from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score

from can_train.tasks.can.thresholds import threshold_at_fpr

FIXED_FPR: Final = 0.01
"""False-positive rate at which `recall_at_fpr_1pct` is read: customary, and already hundreds of alarms an hour."""


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


class KindRecall(TypedDict):
    """Share of one attack kind's windows that were flagged, and how many windows that kind has."""

    recall: float
    windows: int


def detector_metrics(
    is_attack: NDArray[np.bool_], score: NDArray[np.float64], flagged: NDArray[np.bool_], *, benign_hours: float
) -> Metrics:
    """Computes every figure of one detector.

    A precision with nothing flagged is 0, as in scikit-learn; so is an MCC if all windows, or none, are flagged. With
    windows of one class only, MCC is undefined for every detector, hence None.

    Args:
        is_attack: [W] the truth.
        score: [W] higher is more attack-like; finite.
        flagged: [W] what the detector calls an attack.
        benign_hours: Observed time without attacks, in hours.
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
        pr_auc=float(average_precision_score(is_attack, score)) if attacks else None,
        roc_auc=float(roc_auc_score(is_attack, score)) if both else None,
        recall_at_fpr_1pct=recall_at_fpr(is_attack, score, FIXED_FPR) if both else None,
        false_positive_rate=_ratio(false_alarms, benign),
        false_alarms_per_hour=_ratio(false_alarms, benign_hours),
        flagged_share=_ratio(hits + false_alarms, len(is_attack)),
        windows=len(is_attack),
        attack_windows=attacks,
    )


def _ratio(part: int, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mcc(hits: int, false_alarms: int, attacks: int, benign: int) -> float:
    """Matthews correlation coefficient from counts, in Python integers: their products exceed 64 bits."""
    flagged = hits + false_alarms
    passed = attacks + benign - flagged
    if not flagged or not passed:
        return 0.0
    covariance = hits * (benign - false_alarms) - false_alarms * (attacks - hits)
    return float(covariance / (flagged * passed * attacks * benign) ** 0.5)


def recall_at_fpr(is_attack: NDArray[np.bool_], score: NDArray[np.float64], fpr: float) -> float:
    """Returns the best recall that any threshold reaches with at most a share `fpr` of the benign windows flagged.

    It says how well the scores rank, whatever threshold was chosen. Both classes must occur.
    """
    threshold = threshold_at_fpr(score[~is_attack], fpr)
    return float(np.mean(score[is_attack] > threshold))


def recall_by_kind(
    label: NDArray[np.uint8], flagged: NDArray[np.bool_], kinds: tuple[str, ...]
) -> dict[str, KindRecall]:
    """Computes the recall of every attack kind that occurs.

    Args:
        label: [W] indices into `kinds`; 0 is benign.
        flagged: [W].
        kinds: Names of the label codes.
    """
    return {
        kinds[code]: KindRecall(
            recall=float(np.mean(flagged[label == code])), windows=int(np.count_nonzero(label == code))
        )
        for code in np.unique(label[label > 0])
    }
