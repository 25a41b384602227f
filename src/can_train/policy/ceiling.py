"""Where memory really runs out, which fragmentation or a neighbour may put below the capacity, and the line through
the runs that takes account of it.
"""

import math
from collections.abc import Sequence
from typing import Final

from can_train.policy.change import since_change
from can_train.policy.line import Line, LinePrior, Reading

_LEVELS: Final = tuple(level / 100 for level in range(100, 49, -1))
"""Ceilings that are considered, as shares of capacity, the one believed in without evidence first."""

_ODDS: Final = 12.0
"""How much less likely a ceiling far below the capacity is, in nats a unit of capacity."""

_SOFTNESS: Final = 0.01
"""Standard deviation of the ceiling from run to run: memory is never fragmented twice alike."""

_UNKNOWN_CAUSES: Final = 0.005
"""Share of runs that run out of memory below the ceiling, for reasons that do not come back."""

_LUCK: Final = 0.2
"""Share of runs that fit above the ceiling. The less, the longer old successes outweigh a ceiling that is new."""

_UNEXPLAINED: Final = 3.0
"""Standard deviations below the ceiling from which on an out-of-memory says nothing of the line."""


def learn(readings: Sequence[Reading], prior: LinePrior) -> tuple[Line, float]:
    """Returns the line through the readings since the law last changed, and the ceiling as a share of capacity.

    An out-of-memory is a reading somewhere above the ceiling. The ceiling is the capacity, unless memory ran out where
    the line through measured peaks lies too far below it for noise to explain that. Then it is the level that makes the
    fates of all runs most likely: about where memory ran out, but not below what many runs reached. Weights fall with
    age, so that a lone out-of-memory is forgotten after some tens of runs, and several back each other for longer.

    Args:
        readings: Oldest first.
        prior: What is believed of the line before any of them.
    """
    line = prior.fit(_measured(readings))
    recent = since_change(readings, line)
    measured = _measured(recent)
    if len(recent) < len(readings):
        line = prior.fit(measured)
    if len(measured) == len(recent):
        return line, 1.0
    ceiling = max(_LEVELS, key=lambda level: _evidence(level, recent, line)) if measured else 1.0
    telling = [r for r in recent if r.peak is not None or _explains(line, r.used, ceiling)]
    return prior.refit(line, telling, ceiling=ceiling), ceiling


def _measured(readings: Sequence[Reading]) -> list[Reading]:
    return [reading for reading in readings if reading.peak is not None]


def _explains(line: Line, used: float, ceiling: float) -> bool:
    return line.peak(used) + _UNEXPLAINED * line.spread(used) >= ceiling


def _evidence(ceiling: float, readings: Sequence[Reading], line: Line) -> float:
    """Returns the logarithm of how likely a ceiling makes the fates of the runs, by their weights, and is itself."""
    evidence = _ODDS * (ceiling - 1)
    for used, peak, weight in readings:
        if peak is None:
            beyond, otherwise = (line.peak(used) - ceiling) / line.spread(used), _UNKNOWN_CAUSES
        else:
            # The capacity itself is not soft: what was measured did fit below it.
            beyond, otherwise = (ceiling - peak) / _SOFTNESS if ceiling < 1 else math.inf, _LUCK
        evidence += weight * math.log(otherwise + (1 - otherwise) * _normal(beyond))
    return evidence


def _normal(deviations: float) -> float:
    return 0.5 * math.erfc(-deviations / math.sqrt(2))
