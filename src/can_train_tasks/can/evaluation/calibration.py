"""Thresholds from benign windows: for a number of false events an hour, and for a log with other benign scores.

Shapes: R windows, ascending by log and time; L levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np

from can_train.errors import CheckpointError, ConfigError, DataError
from can_train.fit.packing import members
from can_train.io.units import counted
from can_train_tasks.can.data.graphs import Bools, FlatGraphs, Floats, Ints, id_text
from can_train_tasks.can.evaluation.bursts import SECONDS_PER_HOUR, Timeline, held_scores
from can_train_tasks.can.evaluation.metrics import Threshold
from can_train_tasks.can.evaluation.options import Hold
from can_train_tasks.can.inputs import LEAST_KNOWN_SHARE

LONGEST_HOLD: Final = 5  # windows; a run's result has the number of events by level for each hold up to this one
# The levels of a hold are scores of benign windows, from the highest down: first every score, then fewer and fewer.
DENSE_LEVELS: Final = 32
SPARSE_LEVELS: Final = 32
# With fewer expected events in the benign time, single events would decide the threshold: a smooth tail replaces them.
FEW_EVENTS: Final = 8
TAIL_EVENTS: Final = 16  # events that the tail is fitted to
LEAST_CALIBRATION_WINDOWS: Final = 20  # with fewer, centre and scale are guesses

# Kinds of suspicion that a window of a calibration is an attack.
RATE, UNSEEN, SCORE = "rate", "unseen_ids", "score"
SHORT_SHARE: Final = 0.01  # share of benign validation windows that are shorter than `BenignScores.shortest_s`
FLOOD: Final = 1.25  # suspicious frame rate ÷ highest benign frame rate
FOREIGN_FLOOD: Final = 2.0  # suspicious frame rate ÷ median rate, for an unknown bus, whose highest rate is not known
# A score this many scales above the centre of benign validation scores is suspicious. The scale is a median excess:
# with an exponential tail, one score in 4,000 lies further out.
FAR: Final = 12.0
REGULAR_SHARE: Final = 0.1  # an ID in a larger share of the windows belongs to the bus
SHORTEST_S: Final = 1e-6  # least length of a window, for windows whose frames have equal times
NAMED_IDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class ScoreScale:
    """Centre and scale of benign scores.

    Attributes:
        centre: Median of the scores.
        scale: Median excess over the centre, of the scores above it. A single odd window would stretch a mean.
    """

    centre: float
    scale: float

    @classmethod
    def of(cls, score: Floats) -> Self:
        """Measures benign scores [R], at least one."""
        centre = float(np.median(score))
        above = score[score > centre]
        return cls(centre=centre, scale=float(np.median(above)) - centre if len(above) else 0.0)

    def to(self, other: Self, score: Floats) -> Floats:
        """Converts scores [R] from this scale to the scale `other`."""
        ratio = other.scale / self.scale if self.scale > 0 else 1.0
        converted: Floats = (score - self.centre) * ratio + other.centre
        return converted


@dataclass(frozen=True, kw_only=True)
class BenignScores:
    """The distribution of scores over the benign validation windows of a run.

    Attributes:
        scale: Centre and scale of the scores.
        hours: Hours of bus traffic in the windows.
        shortest_s: Length in seconds that nearly all windows exceed.
        levels: For each hold, level and number of events above the level [L, 2], from the highest level down.
    """

    scale: ScoreScale
    hours: float
    shortest_s: float
    levels: Mapping[str, Floats]

    @classmethod
    def of(cls, timeline: Timeline, score: Floats) -> Self:
        """Counts the events of benign windows [R], at least one, at every level and for every hold."""
        holds = [Hold(needed, of) for of in range(1, LONGEST_HOLD + 1) for needed in range(1, of + 1)]
        return cls(
            scale=ScoreScale.of(score),
            hours=float(timeline.benign_s.sum()) / SECONDS_PER_HOUR,
            shortest_s=float(np.quantile(timeline.end_s - timeline.start_s, SHORT_SHARE)),
            levels={str(hold): _event_levels(timeline, score, hold) for hold in holds},
        )

    @classmethod
    def from_result(cls, judgement: Mapping[str, Any], run_id: str) -> Self:
        """Reads the benign scores from the judgement of a run.

        Raises:
            CheckpointError: The judgement has no benign scores.
        """
        plain = judgement.get("benign", {})
        if not {"centre", "scale", "hours", "shortest_s", "levels"} <= plain.keys():
            raise CheckpointError(f"The result of {run_id} does not tell how benign windows score",
                                  remedy="Train anew, or choose with --threshold")  # fmt: skip
        levels = {hold: np.array(rows, np.float64).reshape(-1, 2) for hold, rows in plain["levels"].items()}
        scale = ScoreScale(centre=plain["centre"], scale=plain["scale"])
        return cls(scale=scale, hours=plain["hours"], shortest_s=plain["shortest_s"], levels=levels)

    def plain(self) -> dict[str, Any]:
        """Returns the benign scores as strict JSON."""
        levels = {hold: rows.tolist() for hold, rows in self.levels.items()}
        return {"centre": self.scale.centre, "scale": self.scale.scale, "hours": self.hours,
                "shortest_s": self.shortest_s, "levels": levels}  # fmt: skip

    def threshold(self, per_hour: float, hold: Hold) -> Threshold:
        """Chooses the threshold that about `per_hour` false events an hour exceed.

        With fewer than `FEW_EVENTS` expected events in the benign time, the highest events are taken for the tail of an
        exponential distribution. The threshold lies on this tail, which reaches beyond the highest score.

        Raises:
            ConfigError: The hold is longer than `LONGEST_HOLD`.
        """
        if str(hold) not in self.levels:
            raise ConfigError(f"--alarms-per-hour needs a hold of up to {LONGEST_HOLD} windows", value=f"--hold {hold}",
                              remedy="Use --hold 2/3")  # fmt: skip
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
        # The mean excess over the level is the area under the curve of the number of events by level, above this level.
        excess = float((events[1 : tail + 1] * -np.diff(level[: tail + 1])).sum() / events[tail])
        # The benign drives of a data set may be too short for a single event at this rate.
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
    # At lower levels alarms run together, and their number falls again.
    most = int(np.argmax(events)) + 1 if len(events) else 0
    table: Floats = np.column_stack([levels, np.maximum.accumulate(events) if len(events) else events])[:most]
    return table


class Calibration:
    """The scores in the first seconds of a bus, counted from its first frame and taken for benign.

    Args:
        seconds: Length; a slow bus is calibrated on for longer, until it has `LEAST_CALIBRATION_WINDOWS`.
        benign: The benign scores of validation.
        threshold: The run flags windows with higher scores.
        vocabulary: CAN IDs of benign training windows.
    """

    def __init__(self, seconds: float, benign: BenignScores, *, threshold: float, vocabulary: Ints) -> None:
        self.seconds = seconds
        self._benign = benign
        self._threshold = threshold
        self._vocabulary = vocabulary
        self._windows: list[_Window] = []
        self._window = 0  # frames
        self._start_s: float | None = None
        self._passed = False  # whether a window ended later than the seconds
        self._scale: ScoreScale | None = None
        self.last_frame = -1  # first frame of the last window that was calibrated on

    def wanted(self, flat: FlatGraphs, rows: Ints) -> int:
        """Returns the number of windows that the calibration still needs from the log's next windows `rows`."""
        if self._scale is not None:
            return 0
        if self._start_s is None:
            self._start_s = float(flat.start_time[rows[0]])
        beyond = flat.end_time[rows] > self._start_s + self.seconds
        # A clock that steps back makes no second beginning.
        count = 0 if self._passed else int(np.argmax(beyond)) if beyond.any() else len(rows)
        self._passed |= bool(beyond.any())
        return min(len(rows), max(count, LEAST_CALIBRATION_WINDOWS - self.windows))

    def add(self, flat: FlatGraphs, rows: Ints, score: Floats) -> None:
        """Calibrates on the log's next windows `rows` [R], with scores `score` [R]."""
        self._window = flat.window
        nodes = members(flat.node_ptr, rows)
        ids = np.split(flat.ids[flat.node_code[nodes.positions]], nodes.starts)[1:]  # none of no windows
        for row, ids_of_window, value in zip(rows, ids, score, strict=True):
            start_s, end_s = float(flat.start_time[row]), float(flat.end_time[row])
            rate = flat.window / max(end_s - start_s, SHORTEST_S)
            self._windows.append(_Window(start_s, end_s, float(value), rate, ids_of_window))
            self.last_frame = int(flat.first_frame[row])

    def finish(self, *, where: str) -> None:
        """Measures the scale of the scores, after the last window of the calibration.

        A beginning is calmer than the drive after it. So the log's scores are taken to spread at least as far as the
        scores of validation. Their centre is taken to lie above the centre of the beginning, by one such spread at
        most, but not above the centre of validation.

        Raises:
            DataError: There are too few windows.
        """
        if self.windows < LEAST_CALIBRATION_WINDOWS:
            count = counted(self.windows, "window")
            raise DataError(f"{count} in {where}: a calibration needs {LEAST_CALIBRATION_WINDOWS}",
                            remedy="Calibrate on more seconds, or leave it out")  # fmt: skip
        # On simulated drives of 60 to 300 s, calibrated on 10 s, centre and scale of the beginning without this
        # correction gave 2.5 times as many false alarms, and an equal MCC.
        beginning, validation = ScoreScale.of(self._scores()), self._benign.scale
        centre = max(beginning.centre, min(validation.centre, beginning.centre + validation.scale))
        self._scale = ScoreScale(centre=centre, scale=max(beginning.scale, validation.scale))

    def _scores(self) -> Floats:
        return np.array([window.score for window in self._windows])

    @property
    def windows(self) -> int:
        """Number of windows in the calibration so far."""
        return len(self._windows)

    @property
    def end_s(self) -> float:
        """End of the calibration's last window, in seconds after the bus's first frame."""
        return self._windows[-1].end_s - (self._start_s or 0.0)

    @property
    def done(self) -> bool:
        """Whether the calibration has all windows that it needs."""
        return self._scale is not None

    @property
    def score(self) -> Floats:
        """Adapted scores [R] of the calibration's windows."""
        return self.adapt(self._scores())

    def adapt(self, score: Floats) -> Floats:
        """Returns scores [R] as if this bus were like validation."""
        assert self._scale is not None, "windows are judged after the calibration"
        return self._scale.to(self._benign.scale, score)

    def suspicions(self) -> list[Suspicion]:
        """Names the windows that look like an attack, which would spoil the calibration, by kind of suspicion."""
        # Regular IDs are in many windows: an attack rarely sends a made-up ID twice.
        ids, counts = np.unique(np.concatenate([window.ids for window in self._windows]), return_counts=True)
        regular = ids[counts >= REGULAR_SHARE * self.windows]
        known_bus = bool(np.isin(regular, self._vocabulary).mean() > LEAST_KNOWN_SHARE) if len(regular) else False
        usual = self._window / max(self._benign.shortest_s, SHORTEST_S)
        usual = usual if known_bus else float(np.median([window.rate for window in self._windows]))
        most = FLOOD * usual if known_bus else FOREIGN_FLOOD * usual
        far = max(self._benign.scale.centre + FAR * self._benign.scale.scale, self._threshold)
        whose = "benign validation has up to" if known_bus else "half of these windows have at most"
        flood = [window for window in self._windows if window.rate > most]
        fresh = [window for window in self._windows if known_bus and not np.isin(window.ids, self._vocabulary).all()]
        high = [window for window in self._windows if window.score > far]
        suspicions = []
        if flood:
            fastest = max(window.rate for window in flood)
            told = f"up to {fastest:,.0f} frames a second, where {whose} {usual:,.0f}"
            suspicions.append(self._suspicion(RATE, flood, told))
        if fresh:
            new = np.setdiff1d(np.concatenate([window.ids for window in fresh]), self._vocabulary)
            names = ", ".join(map(id_text, new[:NAMED_IDS].tolist())) + (", …" if len(new) > NAMED_IDS else "")
            which = f"the ID {names}" if len(new) == 1 else f"{len(new):,} IDs ({names})"
            suspicions.append(self._suspicion(UNSEEN, fresh, f"{which}, not in benign training data"))
        if high:
            highest, centre = max(window.score for window in high), self._benign.scale.centre
            told = f"scores of up to {highest:.3g}, where benign validation has {centre:.3g} (median)"
            suspicions.append(self._suspicion(SCORE, high, told))
        return suspicions

    def _suspicion(self, kind: str, windows: Sequence[_Window], text: str) -> Suspicion:
        assert self._start_s is not None, "there are windows"
        return Suspicion(
            kind=kind,
            windows=len(windows),
            of=self.windows,
            from_s=round(windows[0].start_s - self._start_s, 6),
            to_s=round(max(window.end_s for window in windows) - self._start_s, 6),
            why=text,
        )


class _Window(NamedTuple):
    """A window that is calibrated on."""

    start_s: float
    end_s: float
    score: float
    rate: float  # frames a second
    ids: Ints


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """Windows of a calibration that look like an attack.

    Attributes:
        kind: `RATE`, `UNSEEN` or `SCORE`.
        windows: Number of suspicious windows.
        of: Number of windows of the calibration.
        from_s: Beginning of the first suspicious window, in seconds after the bus's first frame.
        to_s: End of the last suspicious window, in seconds after the bus's first frame.
        why: The suspicious property of the windows, in words.
    """

    kind: str
    windows: int
    of: int
    from_s: float
    to_s: float
    why: str

    def text(self) -> str:
        """Tells the suspicion as a sentence."""
        looks = "looks" if self.windows == 1 else "look"
        return (f"{self.windows:,} of the {self.of:,} windows that are taken for benign {looks} like an attack, "
                f"from {self.from_s:.2f} to {self.to_s:.2f} s after the first frame: {self.why}")  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibratedScores:
    """Scores of one test folder, with each log adapted to validation.

    Attributes:
        score: [R] adapted scores of all windows of the folder.
        judged: [R] whether the window shares no frame with the calibration's windows.
        calibrations: Calibration of each log, by index of `FlatGraphs.sources`.
        rows: The windows of the calibrations; they need not belong to the folder.
    """

    score: Floats
    judged: Bools
    calibrations: Mapping[int, Calibration]
    rows: Ints


def calibrate_logs(
    flat: FlatGraphs, rows: Ints, score: Floats, make: Callable[[], Calibration], compute: Callable[[Ints], Floats]
) -> CalibratedScores:
    """Takes the beginning of each log for benign; `rows` [R] are the windows to judge.

    A log begins with its first frame, even if the windows there were trained on and are not judged: live detection
    cannot know training windows either.

    Args:
        flat: The graphs.
        rows: The windows to judge.
        score: [R] scores of `rows`.
        make: Makes the calibration of one log.
        compute: Scores the windows at the beginning of a log.

    Raises:
        DataError: The beginning of a log has too few windows, or no windows are left after it.
    """
    scores, judged = score.copy(), np.zeros(len(rows), np.bool_)
    calibrations: dict[int, Calibration] = {}
    taken = [rows[:0]]
    for source in np.unique(flat.source[rows]).tolist():
        calibration, of_log = make(), np.flatnonzero(flat.source == source)
        beginning = of_log[: calibration.wanted(flat, of_log)]
        where = f"the first {calibration.seconds:g} s of {flat.sources[source].path}"
        calibration.add(flat, beginning, compute(beginning))
        calibration.finish(where=where)
        of_rows = np.flatnonzero(flat.source[rows] == source)
        scores[of_rows] = calibration.adapt(score[of_rows])
        judged[of_rows] = flat.first_frame[rows[of_rows]] >= calibration.last_frame + flat.window
        if not judged[of_rows].any():
            raise DataError(f"{counted(calibration.windows, 'window')} in {where}, and no window to judge follows",
                            remedy="Calibrate on fewer seconds, or leave --calibrate out")  # fmt: skip
        calibrations[source] = calibration
        taken.append(beginning)
    return CalibratedScores(score=scores, judged=judged, calibrations=calibrations, rows=np.concatenate(taken))


def calibration_notes(
    flat: FlatGraphs, folders: Sequence[CalibratedScores], *, tested: Ints, threshold: float
) -> list[str]:
    """Describes the calibration of the test folders, in sentences.

    `tested` are the windows that training did not see; windows with scores above `threshold` are flagged.
    """
    rows = np.concatenate([folder.rows for folder in folders])
    logs = {flat.sources[source].path: log for folder in folders for source, log in folder.calibrations.items()}
    flagged = sum(int(np.count_nonzero(log.score > threshold)) for log in logs.values())
    attacks, trained = (int(np.count_nonzero(each)) for each in (flat.label[rows] > 0, ~np.isin(rows, tested)))
    seconds = next(iter(logs.values())).seconds
    are = "is" if flagged == 1 else "are"
    taken = f"The first {seconds:g} s of each log are taken for benign: {counted(len(rows), 'window')}"
    notes = [f"{taken}, which tell where its scores lie and are not judged; {flagged:,} of them {are} flagged"]
    longest_s = max(log.end_s for log in logs.values())
    if longest_s > seconds:
        least = LEAST_CALIBRATION_WINDOWS
        notes.append(f"A log with fewer than {least} windows in that time is calibrated on its first {least}: "
                     f"up to {longest_s:.3g} s")  # fmt: skip
    for path, log in logs.items():
        named = f"{path}: " if len(logs) > 1 else ""
        notes += [f"Warning: {named}{suspicion.text()}" for suspicion in log.suspicions()]
    if attacks:
        are = "is an attack" if attacks == 1 else "are attacks"
        notes.append(f"Warning: by their labels {attacks:,} of these windows {are}, so the calibration is wrong")
    if trained:
        notes.append(f"The run was trained on {trained:,} of these {len(rows):,} windows, and such windows score lower "
                     "than others of the same bus")  # fmt: skip
    return notes
