"""Synthetic limits of a device, without a search."""

from can_train.fit.cost_model import CostModel, DeviceLimits, SearchResult
from can_train.task import Feature

CAPACITY = 10**9


def limits(
    base: float, fills: float, *, measured_ratio: float = 1.0, capped: bool = False, trials: int = 1
) -> DeviceLimits:
    """Limits of a device: weights take the share `base` of the capacity, the tuned limit fills it up to `fills`."""
    model = CostModel(
        features=(Feature("units"),), coefficients=(1.0,), base_bytes=base * CAPACITY, sigma_bytes=512.0,
        covariance=((1.0, 0.0), (0.0, 0.0)), relative_residual=0.0,
    )  # fmt: skip
    tuned = (fills - base) * CAPACITY / measured_ratio
    phase = SearchResult(
        model=model,
        tuned_limit=tuned,
        capped=capped,
        trials=trials,
        ooms=0,
        measured_ratio=measured_ratio,
        mean_totals=(1.0,),
    )
    return DeviceLimits(
        device_key="gpu", capacity_bytes=CAPACITY, training=phase, evaluation=phase, optimizer_peak_bytes=0
    )
