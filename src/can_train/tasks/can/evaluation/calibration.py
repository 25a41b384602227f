"""Thresholds from benign windows: for a number of false events an hour, and for a log whose scores lie elsewhere than
those of validation.

Shapes: R windows, ascending by log and time; L levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from can_train.errors import CheckpointError, ConfigError, DataError
from can_train.tasks.can.data.graphs import Bools, FlatGraphs, Floats, Ints
from can_train.tasks.can.evaluation.bursts import SECONDS_PER_HOUR, Hold, Timeline, held_scores
from can_train.tasks.can.evaluation.metrics import Threshold

LONGEST_HOLD: Final = 5  # windows; for each hold up to it, a run's result has the events by level
# Of the scores of benign windows, from the highest down: each of the first, then fewer and fewer.
DENSE_LEVELS: Final = 32
SPARSE_LEVELS: Final = 32
# Expected events in the benign time below which single ones decide, and a smooth tail is used in place of their count.
FEW_EVENTS: Final = 8
TAIL_EVENTS: Final = 16  # that the tail is fitted to
LEAST_CALIBRATION_WINDOWS: Final = 20  # with fewer, centre and scale are guesses


@dataclass(frozen=True, kw_only=True)
class ScoreScale:
    """Where benign scores lie.

    Attributes:
        centre: Their median.
        scale: The median of how far those above it exceed it. One odd window would stretch a mean.
    """

    centre: float
    scale: float

    @classmethod
    def of(cls, score: Floats) -> Self:
        """Measures [R] benign scores, at least one."""
        centre = float(np.median(score))
        above = score[score > centre]
        return cls(centre=centre, scale=float(np.median(above)) - centre if len(above) else 0.0)

    def to(self, other: Self, score: Floats) -> Floats:
        """Converts scores [R] of this scale to another one."""
        ratio = other.scale / self.scale if self.scale > 0 else 1.0
        converted: Floats = (score - self.centre) * ratio + other.centre
        return converted


@dataclass(frozen=True, kw_only=True)
class BenignScores:
    """What the benign validation windows of a run teach about its scores.

    Attributes:
        scale: Where they lie.
        hours: How long they observed the bus.
        levels: By hold, [L, 2] a level and how many events exceed it, from the highest level down.
    """

    scale: ScoreScale
    hours: float
    levels: Mapping[str, Floats]

    @classmethod
    def of(cls, timeline: Timeline, score: Floats) -> Self:
        """Counts the events of [R] benign windows, at least one, at every level and for every usual hold."""
        holds = [Hold(needed, of) for of in range(1, LONGEST_HOLD + 1) for needed in range(1, of + 1)]
        return cls(
            scale=ScoreScale.of(score),
            hours=float(timeline.benign_s.sum()) / SECONDS_PER_HOUR,
            levels={str(hold): _event_levels(timeline, score, hold) for hold in holds},
        )

    @classmethod
    def from_result(cls, judgement: Mapping[str, Any], run_id: str) -> Self:
        """Reads them from the judgement of a run.

        Raises:
            CheckpointError: It has none.
        """
        if "benign" not in judgement:
            raise CheckpointError("A run's result tells how benign windows score", value=f"that of {run_id} does not",
                                  remedy="Train anew, or choose with --threshold")  # fmt: skip
        plain = judgement["benign"]
        levels = {hold: np.array(rows, np.float64).reshape(-1, 2) for hold, rows in plain["levels"].items()}
        scale = ScoreScale(centre=plain["centre"], scale=plain["scale"])
        return cls(scale=scale, hours=plain["hours"], levels=levels)

    def plain(self) -> dict[str, Any]:
        """Returns them as strict JSON."""
        levels = {hold: rows.tolist() for hold, rows in self.levels.items()}
        return {"centre": self.scale.centre, "scale": self.scale.scale, "hours": self.hours, "levels": levels}

    def threshold(self, per_hour: float, hold: Hold) -> Threshold:
        """Chooses the threshold that about `per_hour` false events an hour exceed.

        Where fewer than `FEW_EVENTS` are expected in the benign time, the highest ones are taken for the tail of an
        exponential distribution, on which the threshold lies, also beyond the highest score that was seen.

        Raises:
            ConfigError: The hold is longer than those that were counted.
        """
        if str(hold) not in self.levels:
            raise ConfigError(f"A threshold for alarms an hour is known for holds of up to {LONGEST_HOLD} windows",
                              value=f"--hold {hold}", remedy="Use --hold 2/3")  # fmt: skip
        level, events = self.levels[str(hold)].T
        wanted = per_hour * self.hours
        seen = f"{self.hours:.3g} h" if self.hours >= 1 else f"{60 * self.hours:.3g} min"
        what = f"{per_hour:g} false events an hour expected with --hold {hold}, by {seen} of benign validation windows"
        if not len(events) or not events[-1]:
            highest = float(level[0]) if len(level) else self.scale.centre
            return Threshold(value=highest, rule=f"{what}, in which scores do not differ")
        if wanted >= FEW_EVENTS:
            enough = np.flatnonzero(events <= wanted)
            more = "" if events[-1] >= wanted else ", which have fewer at any threshold"
            return Threshold(value=float(level[enough[-1]]), rule=what + more)
        tail = min(int(np.searchsorted(events, TAIL_EVENTS)), len(events) - 1)
        # The mean excess over the level is the area below the number of events that exceed each higher one.
        excess = float((events[1 : tail + 1] * -np.diff(level[: tail + 1])).sum() / events[tail])
        # All benign drives of a data set may be shorter than an event takes to come.
        beyond = ", from which it is extrapolated" if wanted < 1 else ""
        wanted = max(wanted, np.finfo(np.float64).tiny)
        value = float(level[tail]) + excess * math.log(events[tail] / wanted)
        return Threshold(value=value, rule=what + beyond)


def _event_levels(timeline: Timeline, score: Floats, hold: Hold) -> Floats:
    held = held_scores(score, timeline.segment, hold)
    levels = np.unique(held[np.isfinite(held)])[::-1]
    count = len(levels)
    sparse = np.geomspace(DENSE_LEVELS, max(count - 1, DENSE_LEVELS), SPARSE_LEVELS).astype(np.int64)
    chosen = np.unique(np.concatenate([np.arange(DENSE_LEVELS), sparse]))
    levels = levels[chosen[chosen < count]]
    events = np.array([timeline.count_events(held > level) for level in levels], np.float64)
    # Further down alarms run together, and their number falls again.
    most = int(np.argmax(events)) + 1 if len(events) else 0
    table: Floats = np.column_stack([levels, np.maximum.accumulate(events) if len(events) else events])[:most]
    return table


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibratedScores:
    """Scores of one test folder, those of each log as if it were like validation.

    Attributes:
        score: [R] all of them.
        judged: [R] whether each window lies wholly behind those that were calibrated on.
        calibration: [R] whether it was calibrated on.
        attacks: Windows, among these, that are labelled as attacks.
    """

    score: Floats
    judged: Bools
    calibration: Bools
    attacks: int

    @property
    def windows(self) -> int:
        """Windows that were calibrated on."""
        return int(np.count_nonzero(self.calibration))

    def count_above(self, threshold: float) -> int:
        """Counts those of them that score more than a threshold."""
        return int(np.count_nonzero(self.score[self.calibration] > threshold))


def calibrate_logs(
    flat: FlatGraphs, rows: Ints, score: Floats, validation: ScoreScale, seconds: float
) -> CalibratedScores:
    """Takes the first seconds of each log, of which windows `rows` [R] are judged, for benign.

    Raises:
        DataError: They have too few windows, or the log no others.
    """
    scores, judged, calibration = score.copy(), np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
    for source in np.unique(flat.source[rows]):
        own = np.flatnonzero(flat.source[rows] == source)
        windows = rows[own]
        within = flat.end_time[windows] <= flat.start_time[windows[0]] + seconds
        # A clock that steps back makes no second beginning.
        count = int(np.argmin(within)) if not within.all() else len(within)
        where = f"the first {seconds:g} s of {flat.sources[source].path}"
        scale = calibrated_scale(score[own[:count]], validation, where=where)
        scores[own] = scale.to(validation, score[own])
        calibration[own[:count]] = True
        judged[own] = flat.first_frame[windows] >= flat.first_frame[windows[count - 1]] + flat.window
        if not judged[own].any():
            raise DataError("A log is longer than what it is calibrated on", value=f"{where} are all of it",
                            remedy="Calibrate on fewer seconds")  # fmt: skip
    attacks = int(np.count_nonzero(flat.label[rows[calibration]] > 0))
    return CalibratedScores(score=scores, judged=judged, calibration=calibration, attacks=attacks)


def calibrated_scale(score: Floats, validation: ScoreScale, *, where: str) -> ScoreScale:
    """Measures where the scores of a log lie by [R] of its beginning, which is taken for benign.

    A beginning is calmer than the drive after it. So the log's scores are taken to spread at least as far as those of
    validation, and to lie lower only by what the beginning is lower than one such spread.

    Raises:
        DataError: There are too few windows.
    """
    if len(score) < LEAST_CALIBRATION_WINDOWS:
        raise DataError(f"A calibration needs at least {LEAST_CALIBRATION_WINDOWS} windows",
                        value=f"{len(score)} in {where}", remedy="Calibrate on more seconds, or leave it out",
                        )  # fmt: skip
    # On simulated drives of 60 to 300 s, calibrated on 10 s, believing both ends as they are gave 2.5 times as many
    # false alarms as this, and the same MCC.
    found = ScoreScale.of(score)
    centre = max(found.centre, min(validation.centre, found.centre + validation.scale))
    return ScoreScale(centre=centre, scale=max(found.scale, validation.scale))
