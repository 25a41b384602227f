"""The limit that follows from the peaks of batches that were computed anyway: nothing is tried for it. Arithmetic only.

A loop of another framework has no cost model from probes. Costs are in units of its counts (nodes and edges, numbers).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from can_train.fit.cost_model import ALLOCATION_QUANTUM, CostModel, SearchResult
from can_train.fit.factor_rule import RememberedLimit
from can_train.task import Feature

_MOST_READINGS: Final = 32  # Readings that are kept; the smallest costs are dropped
# Least ratio of the largest cost to the smallest, for a line through readings to be more than noise.
_SPREAD: Final = 1.25
_LEAST_SLOPE: Final = 1e-9  # Bytes a unit of cost, in place of zero


@dataclass
class ObservedPeaks:
    """Peaks above the memory that a micro-batch began with, by its cost.

    >>> peaks = ObservedPeaks()
    >>> peaks.add(10.0, peak_bytes=300, start_bytes=100)
    >>> peaks.add(20.0, peak_bytes=500, start_bytes=100)
    >>> round(peaks.limit(1000).tuned_limit, 6)
    45.0
    """

    readings: dict[float, float] = field(default_factory=dict)  # Bytes above the start, by cost
    start_bytes: int = 0  # Most memory that was in use when a micro-batch began
    failed: float = np.inf  # Smallest cost that ran out of memory; infinite: none did
    remembered: RememberedLimit | None = None  # The limit of an earlier run

    @property
    def largest_cost(self) -> float:
        """The largest cost whose peak was read; 0 before the first reading."""
        return max(self.readings, default=0.0)

    def add(self, cost: float, *, peak_bytes: int, start_bytes: int) -> None:
        """Adds the peak of a micro-batch that fitted. One that costs nothing shows no line."""
        if cost <= 0:
            return
        self.start_bytes = max(self.start_bytes, start_bytes)
        self.readings[cost] = max(self.readings.get(cost, 0.0), float(peak_bytes - start_bytes))
        if len(self.readings) > _MOST_READINGS:
            del self.readings[min(self.readings)]

    def line(self) -> tuple[float, float]:
        """Returns the bytes at cost 0 above the start, and the bytes a unit of cost, of a line above all readings."""
        costs = np.array(list(self.readings))
        peaks = np.array([self.readings[cost] for cost in self.readings])
        largest = int(np.argmax(costs))
        slope = peaks[largest] / costs[largest]
        if costs.max() >= _SPREAD * costs.min():
            slope = np.polyfit(costs, peaks, 1)[0]
        slope = max(float(slope), _LEAST_SLOPE)
        # A batch of nothing takes nothing: a line below zero would promise small batches too much memory.
        return max(float(np.max(peaks - slope * costs)), 0.0), slope

    def limit(self, capacity_bytes: float) -> SearchResult | None:
        """Returns the limit on a device: the largest cost that is predicted to fit; None where nothing was read, here
        or in an earlier run.
        """
        if self.readings:
            constant, slope = self.line()
            base = self.start_bytes + constant
        elif self.remembered is not None:
            base, slope = self.remembered.base_bytes, self.remembered.measured_ratio
        else:
            return None
        model = CostModel(features=(Feature("numbers"),), coefficients=(1.0,), base_bytes=base,
                          sigma_bytes=float(ALLOCATION_QUANTUM), covariance=((0.0, 0.0), (0.0, 0.0)),
                          relative_residual=0.0)  # fmt: skip
        tuned = max((capacity_bytes - base) / slope, 0.0)
        return SearchResult(model=model, tuned_limit=tuned, capped=False, measured_ratio=slope, mean_totals=(1.0,))
