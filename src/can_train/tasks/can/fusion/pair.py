"""The two finished models that the fusion agent mixes, and how what they say becomes scores between 0 and 1: by the
units and thresholds that their own runs chose on validation windows, whatever windows are scored.

Shapes: R windows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from can_train.errors import RunError
from can_train.tasks.can.companions import AUTOENCODER, CLASSIFIER, FinishedNetwork
from can_train.tasks.can.fusion.states import attack_probability, bounded_anomaly, bounded_errors


@dataclass(frozen=True, kw_only=True, eq=False)
class ScorePair:
    """Two finished models on the windows of a data set."""

    autoencoder: FinishedNetwork
    classifier: FinishedNetwork

    def anomaly(self, errors: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns [R] anomaly scores and [R, 3] error terms, all in [0, 1].

        Args:
            errors: [R, 3] of the autoencoder.

        Raises:
            RunError: One is not a finite number.
            CheckpointError: The autoencoder's result does not say in which units its errors are.
        """
        network = self.autoencoder
        _check_finite(errors, AUTOENCODER, network)
        scores = bounded_anomaly(network.combine(errors), _threshold(network))
        return scores, bounded_errors(errors, network.error_units)

    def attack(self, difference: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [R] attack probabilities.

        Args:
            difference: [R, 1] logit differences of the classifier, attack minus benign.

        Raises:
            RunError: One is not a finite number.
        """
        network = self.classifier
        _check_finite(difference, CLASSIFIER, network)
        return attack_probability(network.combine(difference), _threshold(network))


def _threshold(network: FinishedNetwork) -> float:
    return float(network.finished.result["judgement"]["threshold"])


def _check_finite(said: NDArray[np.float64], role: str, network: FinishedNetwork) -> None:
    broken = int(np.count_nonzero(~np.isfinite(said).all(axis=1)))
    if broken:
        raise RunError(
            f"What the {role} says of every window must be finite numbers",
            value=f"of {broken} of {len(said)} windows it is not, by {network.finished.run_id}",
            remedy="It has diverged: train it anew with a lower learning rate, or in fp32",
        )
