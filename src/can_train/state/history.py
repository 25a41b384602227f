"""What runs teach: which of a configuration's runs on one kind of device count, and in which order. What a policy makes
of that is the records' matter.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from can_train.policy.factors import FactorPoint
from can_train.state.observations import Observation

TEACHING: Final = ("ok", "rescued", "interrupted")
"""Outcomes whose peak is believed: an attempt that was interrupted had measured real steps, one that failed may have
failed at anything."""


def history_of(runs: Sequence[Observation]) -> list[FactorPoint]:
    """What runs teach, oldest first.

    An out-of-memory silences every run that overlaps it in time: those began before its lesson was known, so that their
    success at the old factor must not undo it, nor their failure repeat it. Runs without a search, or that ended before
    a peak was measured or by an error, teach nothing.

    Args:
        runs: One configuration's runs on one kind of device, by the time their attempts began.
    """
    lessons = _lessons(runs)
    starts = [lesson.started for lesson in lessons]
    identities = {id(lesson) for lesson in lessons}
    points = []
    for run in _once_an_attempt(runs):
        if id(run) in identities:
            points.append(_lesson(run))
            continue
        # Lessons do not overlap one another: the last that began before the run ended is also the last of those to end.
        begun = bisect_left(starts, run.ended)
        if not begun or run.started >= lessons[begun - 1].ended:
            points += _success(run)
    return points


def _once_an_attempt(runs: Sequence[Observation]) -> list[Observation]:
    """Leaves out the ranks of an attempt whose memory peaked lower than another one's: they trained one run together,
    which says one thing. An out-of-memory counts on any of them.
    """
    highest: dict[tuple[str, int], Observation] = {}
    for run in runs:
        before = highest.setdefault((run.run_id, run.attempt), run)
        if (run.peak or 0.0) > (before.peak or 0.0):
            highest[run.run_id, run.attempt] = run
    return [run for run in runs if run.ran_out_of_memory or highest[run.run_id, run.attempt] is run]


def _lessons(runs: Sequence[Observation]) -> list[Observation]:
    """The runs whose out-of-memory counts: of several that overlap, the one that began first."""
    lessons: list[Observation] = []
    for run in runs:
        if run.ran_out_of_memory and (not lessons or run.started >= lessons[-1].ended):
            lessons.append(run)
    return lessons


def _lesson(run: Observation) -> FactorPoint:
    settled = None
    if run.settled_used is not None and run.settled_peak_bytes is not None:
        settled = (run.settled_used, run.settled_peak_bytes / run.capacity_bytes)
    return FactorPoint(used=run.oom_used or run.used or run.factor, peak=None, settled=settled)


def _success(run: Observation) -> list[FactorPoint]:
    if run.outcome not in TEACHING or run.ran_out_of_memory or run.used is None or run.peak is None:
        return []
    return [FactorPoint(used=run.used, peak=run.peak)]
