"""Attacks in a log as bursts, and the burst-level figures of a detector's alarms.

The figures are bursts found, time to the first alarm, false events an hour, and the interval of a difference between
two detectors.

Shapes: R windows of one test folder, ascending by log and time; D detectors; K blocks; B draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, cast

import numpy as np

from can_train_tasks.can.data.graphs import Bools, Floats, Ints
from can_train_tasks.can.evaluation.options import AlarmRule, Hold

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import FlatGraphs

SECONDS_PER_HOUR: Final = 3600.0
# Seconds. Attack windows, or alarms, with a shorter gap belong together: attackers send at intervals, so that a window
# between two injected frames may be benign, and one alarm is enough for all of them.
JOIN_S: Final = 1.0
DRAWS: Final = 1000  # draws of the bootstrap: the ends of an interval then vary by about a twentieth of its width
DRAWS_AT_A_TIME: Final = 100  # draws in memory together, to bound memory where a log has ten thousand blocks
CONFIDENCE: Final = 0.95  # confidence of an interval
# An interval needs at least this many bursts, and benign stretches: with fewer, nearly all draws are alike, and the
# interval would be narrow only because the data are few.
LEAST_BLOCKS: Final = 5


EACH_WINDOW: Final = Hold(1, 1)
USUAL_HOLD: Final = Hold(2, 3)  # hold of burst-level figures: most single flagged windows are false


def alarm_hold(rule: AlarmRule) -> Hold | None:
    """Returns the hold that raises the alarms of a rule; None: each flagged window raises an alarm.

    A threshold for so many alarms an hour is chosen with a hold, which therefore raises them, too.
    """
    if rule.hold is None and rule.alarms_per_hour is None:
        return None
    return Hold(*(rule.hold or USUAL_HOLD))


class BurstFigures(TypedDict):
    """Burst-level figures of one detector on one test folder; a figure that the windows do not define is None."""

    hold: str
    bursts: int
    bursts_found: float  # the mean where a detector is fitted several times
    latency_s: float | None  # median over found bursts: from the start of the first attack window to the alarm
    false_events: float
    false_events_per_hour: float | None
    false_alarm_share: float | None  # share of the benign time with an alarm: an alarm that never ends is one event


class MccDifference(TypedDict):
    """MCC of the model minus the MCC of another detector, and its interval; None where the windows do not define it."""

    mcc: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Windows of one test folder in their order.

    Attributes:
        segment: [R] number of the window's segment, windows of a drive without a gap or a clock that is set back.
        start_s: [R] time of the window's first frame.
        end_s: [R] time of the window's last frame; its start where the clock is set back inside the window.
        is_attack: [R] the truth.
        benign_s: [R] seconds of benign traffic that the window adds; 0 for attacks.
    """

    segment: Ints
    start_s: Floats
    end_s: Floats
    is_attack: Bools
    benign_s: Floats

    @classmethod
    def of(cls, flat: FlatGraphs, rows: Ints) -> Self:
        """Arranges the windows `rows` [R], which are ascending."""
        start, end, steps = flat.start_time[rows], flat.end_time[rows], np.diff(flat.first_frame[rows])
        same_drive = np.diff(flat.drive[rows]) == 0
        # With a stride larger than a window, successive windows have frames between them: that is no gap.
        stride = int(steps[same_drive & (steps > 0)].min(initial=np.iinfo(np.int64).max))
        apart = ~same_drive | (steps > max(flat.window, stride)) | (np.diff(start) < 0)
        adjoining = same_drive & (steps <= flat.window)
        # A window lasts until the next window begins, if that window overlaps it or follows at once; otherwise until
        # its last frame. Some logs step back in time between windows.
        until = np.append(np.where(adjoining, start[1:], end[:-1]), end[-1:])
        return cls(
            segment=np.cumsum(np.append(np.zeros(min(len(rows), 1), np.int64), apart)),
            start_s=start,
            end_s=np.maximum(end, start),
            is_attack=flat.label[rows] > 0,
            benign_s=np.where(flat.label[rows] == 0, np.maximum(until - start, 0.0), 0.0),
        )

    def groups(self, positions: Ints) -> Ints:
        """Numbers groups of windows at ascending positions; gaps inside a group are shorter than `JOIN_S`."""
        before, after = positions[:-1], positions[1:]
        apart = self.start_s[after] - self.end_s[before] >= JOIN_S
        new = apart | (self.segment[after] != self.segment[before])
        return np.cumsum(np.append(np.zeros(min(len(positions), 1), np.int64), new))

    def count_events(self, raised: Bools) -> int:
        """Counts the events that the raised alarms [R] form."""
        groups = self.groups(np.flatnonzero(raised))
        return int(groups[-1]) + 1 if len(groups) else 0

    def after_bursts(self, burst: Ints) -> Ints:
        """Returns the burst that ended less than `JOIN_S` before each window outside all bursts [R]; -1: no burst.

        `burst` [R] is the burst of each window, or -1.
        """
        inside = burst >= 0
        latest = np.maximum.accumulate(np.where(inside, np.arange(len(burst)), -1))
        is_after = ~inside & (latest >= 0)
        is_after &= (self.segment == self.segment[latest]) & (self.start_s - self.end_s[latest] < JOIN_S)
        return np.where(is_after, burst[latest], -1)

    def bursts(self) -> Ints:
        """Returns the number of each window's burst [R], also for benign windows inside a burst; -1: no burst."""
        attacks = np.flatnonzero(self.is_attack)
        groups = self.groups(attacks)
        numbers = np.full(len(self.is_attack), -1)
        first = np.flatnonzero(np.diff(groups, prepend=-1))
        last = np.append(first[1:], len(attacks))[: len(first)] - 1
        for number, (begin, end) in enumerate(zip(attacks[first], attacks[last], strict=True)):
            numbers[begin : end + 1] = number
        return numbers


def held_scores(score: Floats, segment: Ints, hold: Hold) -> Floats:
    """Returns scores [R] that exceed a threshold exactly where the hold raises an alarm.

    `needed` of the last `of` scores exceed a threshold exactly where the `needed`-th largest score does.
    """
    if hold == EACH_WINDOW:
        return score
    recent = np.full((hold.of, len(score)), -np.inf)
    for back in range(min(hold.of, len(score))):
        same = segment[back:] == segment[: len(segment) - back]
        recent[back, back:] = np.where(same, score[: len(score) - back], -np.inf)
    held: Floats = np.sort(recent, axis=0)[hold.of - hold.needed]
    return held


def burst_figures(timeline: Timeline, score: Floats, threshold: float, hold: Hold) -> BurstFigures:
    """Computes the burst-level figures of scores [R].

    A burst is found if the alarm is raised in one of its windows, or less than `JOIN_S` after it: a value that a forger
    leaves again jumps in the first frame after the attack, and an alarm needs several windows. A false event is an
    alarm that the other windows raise alone: an alarm that began in a burst and still holds is no false event.
    """
    burst = timeline.bursts()
    inside = np.flatnonzero(burst >= 0)
    begins = inside[np.unique(burst[inside], return_index=True)[1]]
    count = len(begins)
    burst = np.maximum(burst, timeline.after_bursts(burst))
    outside = burst < 0
    raised = np.flatnonzero((held_scores(score, timeline.segment, hold) > threshold) & ~outside)
    alarmed, first_alarm = np.unique(burst[raised], return_index=True)
    latency = timeline.end_s[raised[first_alarm]] - timeline.start_s[begins[alarmed]]
    alone = held_scores(np.where(outside, score, -np.inf), timeline.segment, hold) > threshold
    false_events = timeline.count_events(alone)
    benign_s = float(timeline.benign_s[outside].sum())
    return BurstFigures(
        hold=str(hold),
        bursts=count,
        bursts_found=len(alarmed),
        latency_s=float(np.median(np.maximum(latency, 0.0))) if len(alarmed) else None,
        false_events=false_events,
        false_events_per_hour=false_events / benign_s * SECONDS_PER_HOUR if benign_s > 0 else None,
        false_alarm_share=float(timeline.benign_s[outside & alone].sum()) / benign_s if benign_s > 0 else None,
    )


class Blocks:
    """Bursts, and the benign stretches between bursts, as the blocks of a bootstrap.

    Blocks are drawn and not windows: successive windows are alike, so drawing windows would give too narrow intervals.
    """

    def __init__(self, timeline: Timeline, seed: int) -> None:
        burst = timeline.bursts()
        new = (np.diff(burst) != 0) | (np.diff(timeline.segment) != 0)
        self._block = np.cumsum(np.append(np.zeros(min(len(burst), 1), np.int64), new))  # [R]
        self._is_burst = burst[np.flatnonzero(np.diff(self._block, prepend=-1))] >= 0  # [K]
        self._is_attack = timeline.is_attack
        self._seed = seed
        self._attacks, self._benign = self._counts(timeline.is_attack), self._counts(~timeline.is_attack)

    def differences(self, model: Bools, others: Mapping[str, Sequence[Bools]]) -> dict[str, MccDifference]:
        """Compares the MCC of the model's flags [R] with other detectors' MCC; several fits count by their mean."""
        if not 0 < self._is_attack.sum() < len(self._is_attack):
            return {}
        flags = {"": [model], **others}
        counts = {name: [(self._counts(flagged & self._is_attack), self._counts(flagged & ~self._is_attack))
                         for flagged in several] for name, several in flags.items()}  # fmt: skip
        whole = np.ones((1, len(self._is_burst)))
        mcc = {name: self._mcc(several, whole) for name, several in counts.items()}
        bursts = int(self._is_burst.sum())
        enough = min(bursts, len(self._is_burst) - bursts) >= LEAST_BLOCKS
        drawn = {name: np.concatenate([self._mcc(several, weights) for weights in self._draws()])
                 for name, several in counts.items()} if enough else {}  # fmt: skip
        differences = {}
        for name in others:
            low, high = None, None
            if drawn:
                ends = np.quantile(drawn[""] - drawn[name], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
                low, high = (float(end) for end in ends)
            differences[name] = MccDifference(mcc=float(mcc[""][0] - mcc[name][0]), low=low, high=high)
        return differences

    def _draws(self) -> list[Floats]:
        """Draws the number of times that each block occurs, [B, K] in parts; numbers of bursts and stretches stay."""
        rng, kinds = np.random.default_rng(self._seed), (self._is_burst, ~self._is_burst)
        parts = []
        for _ in range(0, DRAWS, DRAWS_AT_A_TIME):
            weights = np.zeros((DRAWS_AT_A_TIME, len(self._is_burst)))
            for kind in kinds:
                count = int(kind.sum())
                weights[:, kind] = rng.multinomial(count, np.full(count, 1 / count), size=DRAWS_AT_A_TIME)
            parts.append(weights)
        return parts

    def _counts(self, chosen: Bools) -> Floats:
        return np.bincount(self._block[chosen], minlength=len(self._is_burst)).astype(np.float64)

    def _mcc(self, several: Sequence[tuple[Floats, Floats]], weights: Floats) -> Floats:
        """Returns the mean MCC [B]; a fit that flags all windows or none has MCC 0, as in `detector_metrics`."""
        attacks, benign = weights @ self._attacks, weights @ self._benign
        each = []
        for hits, false_alarms in several:
            hit, false = weights @ hits, weights @ false_alarms
            flagged = hit + false
            scale = np.sqrt(flagged * (attacks + benign - flagged) * attacks * benign)
            covariance = hit * (benign - false) - false * (attacks - hit)
            each.append(np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0))
        mean: Floats = np.mean(each, axis=0)
        return mean


def mean_burst_figures(several: Sequence[BurstFigures]) -> BurstFigures:
    """Returns the means over several fits of a detector; None where a fit has None."""
    columns: dict[str, list[Any]] = {name: [dict(fit)[name] for fit in several] for name in several[0]}
    means: dict[str, Any] = {
        name: values[0] if name in ("hold", "bursts") else None if None in values else float(np.mean(values))
        for name, values in columns.items()
    }
    return cast(BurstFigures, means)
