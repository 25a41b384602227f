"""The limit that follows from the peaks of batches that were computed anyway."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.observed_peaks import ObservedPeaks

COSTS = st.lists(st.floats(1, 1e6), min_size=1, max_size=40)


@given(costs=COSTS, slope=st.floats(1, 1e4), constant=st.integers(0, 10**6))
def test_no_reading_lies_above_its_line(costs: list[float], slope: float, constant: int) -> None:
    peaks = ObservedPeaks()
    for cost in costs:
        peaks.add(cost, peak_bytes=1000 + constant + round(slope * cost), start_bytes=1000)
    at_zero, per_unit = peaks.line()
    for cost, peak in peaks.readings.items():
        assert at_zero + per_unit * cost >= peak * (1 - 1e-9)


def test_a_batch_that_costs_nothing_shows_no_line() -> None:
    peaks = ObservedPeaks()
    peaks.add(0.0, peak_bytes=100, start_bytes=50)
    assert peaks.limit(1000) is None
    peaks.add(10.0, peak_bytes=150, start_bytes=50)
    limit = peaks.limit(1050)
    assert limit is not None
    assert limit.tuned_limit == pytest.approx(100)
