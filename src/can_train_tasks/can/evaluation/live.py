"""Live detection: a window is scored as soon as its last frame has arrived, and an alarm is reported when it begins.

An evaluation of a log with the same frames gives the same windows and scores. Memory stays bounded.

Shapes: R windows of a block, N nodes, E edges, A absences.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from can_train.config.resolved import FinishedModel
from can_train.errors import CheckpointError, ConfigError, DataError, RunError
from can_train.io.units import counted
from can_train.runs.trust import CodeTrust
from can_train.training.evaluate import Scorer
from can_train.training.loading import finished_model, load_finished
from can_train_tasks.can.data.database import Database
from can_train_tasks.can.data.graphs import (
    BENIGN,
    PAUSE_S,
    FlatGraphs,
    Floats,
    Frames,
    GraphBlock,
    GraphBuilder,
    Ints,
    SourceFile,
    WindowGraphs,
    no_graphs,
)
from can_train_tasks.can.evaluation.alarms import LEAST_USUAL_WINDOWS, Cause, Explainer, named_causes
from can_train_tasks.can.evaluation.bursts import EACH_WINDOW, JOIN_S, alarm_hold
from can_train_tasks.can.evaluation.calibration import LEAST_CALIBRATION_WINDOWS, BenignScores, Calibration
from can_train_tasks.can.evaluation.live_input import SILENCE_S, BusErrors, FrameInput, Unread, error_text, open_input
from can_train_tasks.can.evaluation.metrics import Threshold
from can_train_tasks.can.evaluation.options import AlarmRule, Hold
from can_train_tasks.can.evaluation.self_check import ClockCheck, Finding, IdCheck, LineCheck, LoadCheck, StepCheck
from can_train_tasks.can.fusion.agent import FinishedFusion
from can_train_tasks.can.inputs import new_id_gaps, new_id_notes, rare_id_notes, read_as_trained
from can_train_tasks.can.reference_models import AUTOENCODER, CLASSIFIER, FinishedNetwork, WindowModel
from can_train_tasks.can.settings import CanDatasetSettings, FusionAgentSettings

LATEST_WINDOWS: Final = 64  # latest calm windows, the source of usual values in alarms; half a megabyte
USUAL_EVERY: Final = 16  # every 16th calm window is kept, so that the kept windows span a minute and not a second
# Windows that are scored at a time, if they arrived together. With more windows, a teacher's tensors leave the cache
# (256 windows take half as long again); with fewer, a student's calls take longer than their arithmetic.
SCORED_WINDOWS: Final = 32
MOST_NEW_GAPS: Final = 10_000  # new IDs of a bus whose gaps are kept: fuzzing makes up millions of IDs
MOST_BUSES: Final = 64  # buses that can be watched: more names than this are no names of interfaces
ERRORS_S: Final = 1.0  # least seconds between two events about the error frames of a bus, which come by thousands
LIVE: Final = "live"  # stands for the name of a log

# Computes the raw scores of windows, or the contributions to the scores.
Compute = Callable[[WindowModel, Ints], Floats]


@dataclass(frozen=True, kw_only=True)
class LiveEvent:
    """An event of live detection."""

    text: str  # for a person
    record: Mapping[str, Any]  # strict JSON; `event` is its kind


@dataclass(frozen=True, kw_only=True)
class DetectionRequest:
    """An input that a finished run watches, and the rule for alarms."""

    run: Path  # folder of the finished run
    source: str  # `-` for standard input, a file, or a CAN interface
    channel: str = ""  # the only interface that is watched; empty: all interfaces of the input, separately
    rule: AlarmRule = field(default_factory=AlarmRule)
    explain: bool = False  # whether alarms name their causes
    device: str = "cpu"
    trust: CodeTrust = field(default_factory=CodeTrust)  # decides whether the run's code may run


class LiveRun:
    """A finished run that watches an input.

    Raises:
        ConfigError: The run is of another task, or the input cannot be opened.
    """

    def __init__(self, request: DetectionRequest) -> None:
        finished = load_finished(request.run, request.trust.config)
        run = finished.run
        if not isinstance(run.dataset, CanDatasetSettings):
            raise ConfigError("This task detects nothing live", value=run.task, remedy="Use can-train evaluate")
        self._scorer = Scorer.open(run.training, request.device)
        self._detector = make_live_detector(finished, partial(finished_model, run), request)
        self.finish, self.summary, self.close = self._detector.finish, self._detector.summary, self._detector.close

    def events(self) -> Iterator[LiveEvent]:
        """Yields events, as `LiveDetector.events`."""
        # The tensors are so small that threads would wait for each other longer than they compute.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with self._scorer.device.meter.active():
                yield from self._detector.events(self._scorer, self._scorer.contributions)
        finally:
            torch.set_num_threads(threads)


def make_live_detector(
    finished: FinishedModel, load_model: Callable[[str], FinishedModel], request: DetectionRequest
) -> LiveDetector:
    """Opens an input for a finished run; `load_model` loads the run's prerequisite models by role.

    Raises:
        ConfigError: The input cannot be opened.
        CheckpointError: The run's result lacks a figure that the rule needs.
    """
    rule = request.rule
    judgement = finished.result.get("judgement", {})
    if "threshold" not in judgement:
        raise CheckpointError(f"The result of {finished.run_id} has no threshold", remedy="Train anew")
    hold = alarm_hold(rule) or EACH_WINDOW
    threshold = Threshold(value=judgement["threshold"], rule=f"{judgement['threshold_rule']}")
    if rule.threshold is not None:
        threshold = Threshold(value=rule.threshold, rule="as given")
    elif rule.alarms_per_hour is not None:
        threshold = BenignScores.from_result(judgement, finished.run_id).threshold(rule.alarms_per_hour, hold)
    benign = None if rule.calibrate_s is None else BenignScores.from_result(judgement, finished.run_id)
    nothing = no_graphs(finished.run.dataset.window)
    model: WindowModel
    if isinstance(finished.run.model, FusionAgentSettings):
        model = FinishedFusion(finished, nothing, {role: load_model(role) for role in (AUTOENCODER, CLASSIFIER)})
    else:
        model = FinishedNetwork(finished, nothing)
    # The input may have another format than the training log; the same recorder gives it the same names of columns and
    # the same unit of times. Each bus is watched by itself, whichever the run was trained on.
    dataset = replace(finished.run.dataset, format="auto", id_base="auto", byte_base="auto", channel=request.channel)
    dataset = read_as_trained(dataset, judgement)
    watch = Watch(hold=hold, threshold=threshold, calibrate_s=rule.calibrate_s, benign=benign, explain=request.explain,
                  database=Database.unpack(finished.run.dataset.dbc))  # fmt: skip
    return LiveDetector(model, open_input(request.source, dataset), watch)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The rules for watching a bus.

    Attributes:
        hold: Flagged windows that raise an alarm.
        threshold: Windows with higher scores are flagged.
        calibrate_s: Seconds at the beginning of the bus that are taken for benign; None: no calibration.
        benign: The benign scores of validation, which a calibration needs.
        explain: Whether an alarm names its causes.
        database: Names the messages and signals of causes.
    """

    hold: Hold
    threshold: Threshold
    calibrate_s: float | None
    benign: BenignScores | None
    explain: bool
    database: Database = field(default_factory=Database)


class _Flagged(NamedTuple):
    """A flagged window."""

    start_s: float
    end_s: float
    score: float


@dataclass(kw_only=True)
class LiveAlarm:
    """An alarm and its flagged windows.

    Attributes:
        start_s: Start of the first flagged window.
        end_s: End of the last flagged window.
        windows: Number of flagged windows.
        score: Highest score of a flagged window.
        raised_until_s: End of the last window that fulfilled the hold.
    """

    start_s: float
    end_s: float
    windows: int
    score: float
    raised_until_s: float


class AlarmState:
    """The alarm that is raised at the moment; takes the windows of a bus one by one.

    As in a log, an alarm, and the hold of one, ends with its drive, and where the clock is set back.

    Args:
        hold: Flagged windows that raise an alarm.
        threshold: A score above it flags a window.
    """

    def __init__(self, *, hold: Hold, threshold: Threshold) -> None:
        self.hold = hold
        self.threshold = threshold
        self._last: tuple[int, float] | None = None  # the last window's drive, and the time of its first frame
        self._recent: deque[_Flagged | None] = deque(maxlen=hold.of)  # the last windows; None: not flagged
        self._since: list[_Flagged] = []  # flagged windows since the alarm was last raised
        self._alarm: LiveAlarm | None = None
        self.alarms = 0

    def see(
        self, start_s: float, end_s: float, score: float, *, drive: int = 0
    ) -> tuple[LiveAlarm | None, LiveAlarm | None]:
        """Takes the next window; returns the alarm that ended before the window, and the alarm that it raised."""
        flagged = _Flagged(start_s, end_s, score) if score > self.threshold.value else None
        ended = None
        if self._last is not None and (drive != self._last[0] or start_s < self._last[1]):
            ended = self.finish()
            self._recent.clear()
        self._last = drive, start_s
        self._recent.append(flagged)
        if self._alarm is not None and start_s - self._alarm.raised_until_s >= JOIN_S:
            ended = self.finish()
        if self._alarm is not None and flagged is not None:
            self._since.append(flagged)
        raising = [window for window in self._recent if window is not None]
        if len(raising) < self.hold.needed:
            return ended, None
        since, self._since = self._since, []
        until_s = max(start_s, end_s)  # the clock may be set back inside the window
        if (alarm := self._alarm) is not None:
            alarm.windows += len(since)
            alarm.score = max([alarm.score, *(window.score for window in since)])
            alarm.end_s = max([alarm.end_s, *(window.end_s for window in since)])
            alarm.raised_until_s = until_s
            return ended, None
        self._alarm = LiveAlarm(start_s=raising[0].start_s, windows=len(raising),
                                end_s=max(raising[0].start_s, *(window.end_s for window in raising)),
                                score=max(window.score for window in raising), raised_until_s=until_s)  # fmt: skip
        self.alarms += 1
        return ended, self._alarm

    def finish(self) -> LiveAlarm | None:
        """Ends and returns the alarm that is raised; None without an alarm."""
        ended, self._alarm = self._alarm, None
        self._since.clear()
        return ended


class LiveBus:
    """The state of one bus: its windows, its alarm, and whether it is silent.

    Attributes:
        name: The interface; empty where the input names no interface.
        windows: Number of scored windows.
        flagged: Number of flagged windows.
        alarms: The alarm that is raised, and the number of alarms.
        arrived_s: Arrival of the last frame, by `time.monotonic`.
        is_silent: Whether the bus has been reported silent.
    """

    def __init__(self, name: str, model: WindowModel, watch: Watch) -> None:
        dataset = model.finished.run.dataset
        self.name = name
        self._model = model
        self._watch = watch
        self._calibration: Calibration | None = None
        if watch.calibrate_s is not None and watch.benign is not None:
            self._calibration = Calibration(watch.calibrate_s, watch.benign, threshold=watch.threshold.value,
                                            vocabulary=model.vocabulary)  # fmt: skip
        self._window = int(dataset.window)
        self._builder = GraphBuilder(dataset.window, dataset.stride)
        self._usual: deque[GraphBlock] = deque(maxlen=LATEST_WINDOWS)
        self.alarms = AlarmState(hold=watch.hold, threshold=watch.threshold)
        self.windows = self.flagged = 0
        self.arrived_s = time.monotonic()
        self.is_silent = False
        self._first_s: float | None = None
        self._last_s = 0.0
        self._errors = self._bus_offs = 0  # error frames so far, and bus-off frames so far
        self._told_s: dict[str, float] = {}  # time of the last event about error frames, by kind of event
        self._untold = self._classes = 0  # error frames since the last event about error frames, and their classes
        self._failed_s = 0.0  # time of the last error frame
        self._clock, self._ids = ClockCheck(), IdCheck(model.vocabulary)
        judgement = model.finished.result.get("judgement", {})
        self._load, self._steps = LoadCheck(judgement.get("bus_load")), StepCheck(judgement.get("clock_us"))
        self._new_gaps: dict[int, float] = {}  # shortest time in seconds between frames of each new ID

    def see(self, frames: Frames, score: Compute, contribute: Compute) -> Iterator[LiveEvent]:
        """Takes the next frames of the bus; yields the events that they cause."""
        if self.is_silent:
            yield LiveEvent(text=f"{frames.timestamp[0]:.6f} s: frames arrive again",
                            record={"event": "resumed", "time": float(frames.timestamp[0])})  # fmt: skip
        self.is_silent, self.arrived_s = False, time.monotonic()
        self._first_s = float(frames.timestamp[0]) if self._first_s is None else self._first_s
        checks = (self._clock.see(frames.timestamp, self.arrived_s), self._ids.see(frames),
                  self._load.see(frames.timestamp), self._steps.see(frames.timestamp))  # fmt: skip
        findings = list(chain.from_iterable(checks))
        self._last_s = float(frames.timestamp[-1])
        judged = (self._judge(block, score, contribute) for block in self._builder.feed(frames))
        yield from _by_time(findings, chain.from_iterable(judged))

    def silence(self) -> Iterator[LiveEvent]:
        """Marks the bus as silent, and ends the alarm that is raised, if one is."""
        self.is_silent = True
        # The next window may never be full: a bus is often dead after a flood.
        if (ended := self.alarms.finish()) is not None:
            yield _ended(ended)
        yield _silence(None if self._first_s is None else self._last_s)

    def fail(self, errors: BusErrors) -> Iterator[LiveEvent]:
        """Takes error frames; yields an event for the first one, and then one event each `ERRORS_S`."""
        self._errors += errors.error_frames
        self._bus_offs += errors.bus_offs
        self._untold += errors.error_frames
        self._classes |= errors.classes
        self._failed_s = time_s = self._last_s if errors.time_s is None else errors.time_s
        if errors.bus_offs and self._is_new("bus_off", time_s):
            yield LiveEvent(text=f"{time_s:.6f} s: BUS OFF, the controller takes no part in the bus",
                            record={"event": "bus_off", "time": time_s})  # fmt: skip
        if self._is_new("error_frames", time_s):
            yield self._tell_errors()

    def _tell_errors(self) -> LiveEvent:
        """Counts the error frames since the last such event."""
        count, text, self._untold, self._classes = self._untold, error_text(self._classes), 0, 0
        why = f" ({text})" if text else ""
        record = {"event": "error_frames", "time": self._failed_s, "count": count, "text": text}
        return LiveEvent(text=f"{self._failed_s:.6f} s: {counted(count, 'error frame')}{why}", record=record)

    def _is_new(self, kind: str, time_s: float) -> bool:
        """Returns whether the last event of this kind is `ERRORS_S` ago, and then notes the new event's time."""
        if abs(time_s - self._told_s.get(kind, -np.inf)) < ERRORS_S:
            return False
        self._told_s[kind] = time_s
        return True

    def finish(self) -> Iterator[LiveEvent]:
        """Counts the error frames that no event has counted, and ends the alarm that is raised, if one is."""
        if self._untold:
            yield self._tell_errors()
        if (ended := self.alarms.finish()) is not None:
            yield _ended(ended)

    def summary(self) -> list[str]:
        """Counts frames, windows and alarms, in sentences."""
        frames = self._builder.frames_seen
        seconds = max(0.0, self._last_s - self._first_s - self._clock.jumped_s) if self._first_s is not None else 0.0
        seen = f"{counted(frames, 'frame')} in {seconds:,.1f} s, {counted(self.windows, 'window')}"
        sentences = [f"{seen}, {self.flagged:,} of them flagged, {counted(self.alarms.alarms, 'alarm')}"]
        if self._errors:
            off = f", {self._bus_offs:,} of them bus off" if self._bus_offs else ""
            sentences.append(f"{counted(self._errors, 'error frame')}{off}")
        if self._calibration is not None:
            sentences += _calibration_summary(self._calibration)
        left, _ = self._builder.left_over
        if left:
            fill, were = ("fills", "was") if left == 1 else ("fill", "were")
            last = f"The last {'frame' if left == 1 else counted(left, 'frame')}"
            if self._builder.drives > 1:
                last = f"{counted(left, 'frame')} before pauses of {PAUSE_S:g} s and at the end"
            sentences.append(f"{last} {fill} no window and {were} not judged")
        sentences += new_id_notes(self._model.finished.result.get("judgement", {}), self._new_gaps)
        return sentences

    def _judge(self, block: GraphBlock, score: Compute, contribute: Compute) -> Iterator[LiveEvent]:
        if not len(block):
            return
        flat = _flat_of(block, self._window)
        model = self._model.on(flat)
        parts = np.split(np.arange(len(block)), range(SCORED_WINDOWS, len(block), SCORED_WINDOWS))
        scores = model.combine(np.concatenate([score(model, rows) for rows in parts]), np.arange(len(block)))
        if not np.isfinite(scores).all():
            raise RunError(f"The score of {model.describe(0)} is not a finite number",
                           remedy="The model has diverged: train it anew with a lower learning rate")  # fmt: skip
        self.windows += len(block)
        for can_id, gap in new_id_gaps(flat, np.arange(len(block)), model.vocabulary).items():
            if can_id in self._new_gaps or len(self._new_gaps) < MOST_NEW_GAPS:
                self._new_gaps[can_id] = min(gap, self._new_gaps.get(can_id, np.inf))
        first = 0
        if self._calibration is not None:
            first = yield from self._calibrate(self._calibration, flat, scores)
            if first == len(block):
                return
            scores = self._calibration.adapt(scores)
        for row in range(first, len(block)):
            start_s, end_s = float(block.start_time[row]), float(block.end_time[row])
            # A window that shares frames with the calibration is not judged.
            if self._calibration is not None and block.first_frame[row] < self._calibration.last_frame + self._window:
                continue
            self.flagged += bool(scores[row] > self.alarms.threshold.value)
            ended, raised = self.alarms.see(start_s, end_s, float(scores[row]), drive=int(block.drive[row]))
            if ended is not None:
                yield _ended(ended)
            if raised is not None:
                causes = self._causes(block, row, contribute) if self._watch.explain else []
                yield _raised(raised, end_s, self.alarms.threshold.value, causes)
            elif self._watch.explain and scores[row] <= self.alarms.threshold.value and row % USUAL_EVERY == 0:
                self._usual.append(_select(block, row))

    def _calibrate(self, calibration: Calibration, flat: FlatGraphs, scores: Floats) -> Generator[LiveEvent, None, int]:
        """Calibrates on the next windows; yields an event at the calibration's end, returns the windows it took."""
        rows = np.arange(len(flat))
        count = calibration.wanted(flat, rows)
        calibration.add(flat, rows[:count], scores[:count])
        if count < len(rows) and not calibration.done:
            calibration.finish(where="the input")
            suspicions, at_s, windows = calibration.suspicions(), float(flat.start_time[count]), calibration.windows
            told = f"calibrated on {counted(windows, 'window')}, taken for benign; alarms from here on"
            yield LiveEvent(text=f"{at_s:.6f} s: {told}", record={"event": "calibrated", "time": at_s,
                            "windows": windows, "suspicions": [vars(each) for each in suspicions]})  # fmt: skip
            for suspicion in suspicions:
                record = {"event": "warning", "text": suspicion.text(), **vars(suspicion)}
                yield LiveEvent(text=f"warning: {suspicion.text()}", record=record)
        return count

    def _causes(self, block: GraphBlock, row: int, contribute: Compute) -> Sequence[Cause]:
        """Names the CAN IDs that drove the score of a window, with their usual values in earlier calm windows."""
        usual = list(self._usual) if len(self._usual) >= LEAST_USUAL_WINDOWS else []
        blocks = [*usual, _select(block, row)]
        parts = {name: np.concatenate([getattr(part, name) for part in blocks], axis=1 if name == "edge_index" else 0)
                 for name in vars(block)}  # fmt: skip
        flat = _flat_of(GraphBlock(**parts), self._window)
        model = self._model.on(flat)
        explainer = Explainer(flat=flat, contribute=lambda rows: contribute(model, rows), vocabulary=model.vocabulary,
                              usual_rows=np.arange(len(usual)), expect=model.expected,
                              database=self._watch.database)  # fmt: skip
        return next(explainer.causes(np.array([len(usual)])))


class LiveDetector:
    """A finished model on frames as they arrive; each bus is judged separately."""

    def __init__(self, model: WindowModel, source: FrameInput, watch: Watch) -> None:
        self._model = model
        self._input = source
        self._watch = watch
        self._buses: dict[str, LiveBus] = {}
        self._lines = LineCheck()
        self._told = 0  # notes of the input that were reported
        self._is_silent = False  # whether the input was reported silent before its first frame

    def events(self, score: Compute, contribute: Compute) -> Iterator[LiveEvent]:
        """Yields the events of the input: alarms and their ends, error frames, silence and its end, faults, notes.

        Raises:
            RunError: A score is not a finite number.
            DataError: The input fails, or has no frames.
        """
        for batch in self._input.batches():
            yield from self._notes()
            yield from map(_found, self._lines.see(self._input.channels.total(), self._input.malformed.total()))
            if batch is None:
                yield from self._silences(0.0)
            elif isinstance(batch, Unread):
                yield from self._silences(SILENCE_S)
            elif isinstance(batch, BusErrors):
                bus = self._bus(batch.channel)
                yield from self._named(bus, bus.fail(batch))
            elif len(batch.frames):
                bus = self._bus(batch.channel)
                yield from self._named(bus, bus.see(batch.frames, score, contribute))
                yield from self._silences(SILENCE_S)
        yield from self._notes()
        yield from self.finish()

    def finish(self) -> Sequence[LiveEvent]:
        """Ends the alarms that are raised, and counts the last error frames."""
        return [event for bus in self._buses.values() for event in self._named(bus, list(bus.finish()))]

    def summary(self) -> Sequence[str]:
        """Counts frames, windows, alarms and malformed lines, in sentences."""
        if not self._buses:
            return ["0 frames in 0.0 s, 0 windows", *filter(None, [self._input.malformed_text()])]
        several = len(self._buses) > 1
        sentences = [f"{bus.name}: {sentence}" if several else sentence
                     for bus in self._buses.values() for sentence in bus.summary()]  # fmt: skip
        sentences.append(self._watch.threshold.text)
        sentences += rare_id_notes(self._model.finished.result.get("judgement", {}))
        return [*sentences, *filter(None, [self._input.malformed_text()])]

    def close(self) -> None:
        """Closes the input."""
        self._input.close()

    def _notes(self) -> Iterator[LiveEvent]:
        for note in self._input.notes[self._told :]:
            yield LiveEvent(text=f"note: {note}", record={"event": "note", "text": note})
        self._told = len(self._input.notes)

    def _bus(self, name: str) -> LiveBus:
        if name not in self._buses:
            if len(self._buses) == MOST_BUSES:
                raise DataError(f"The input has more than {MOST_BUSES} interfaces", value=name,
                                remedy="Name the one to watch with --channel")  # fmt: skip
            bus = LiveBus(name, self._model, self._watch)
            bus.is_silent = self._is_silent and not self._buses
            self._buses[name] = bus
        return self._buses[name]

    def _named(self, bus: LiveBus, events: Iterable[LiveEvent]) -> Iterator[LiveEvent]:
        """Adds the name of their bus to events."""
        several = len(self._input.channels) > 1 and not self._input.channel
        for event in events:
            prefix = f"{bus.name}: " if several else ""
            yield LiveEvent(text=prefix + event.text, record={**event.record, "bus": bus.name or None})

    def _silences(self, least_s: float) -> Iterator[LiveEvent]:
        """Reports the buses that have sent nothing for `least_s` seconds, and an input without any frame."""
        if not self._buses and not self._is_silent:
            self._is_silent = True
            yield _silence(None)
        now_s = time.monotonic()
        for bus in self._buses.values():
            if not bus.is_silent and now_s - bus.arrived_s >= least_s:
                yield from self._named(bus, bus.silence())


def _calibration_summary(calibration: Calibration) -> list[str]:
    count, seconds = calibration.windows, calibration.seconds
    first = "window was" if count == 1 else f"{count:,} windows were"
    if calibration.done:
        told = [f"The first {first} taken for benign, and not judged"]
        return [*told, *(f"Warning: {suspicion.text()}" for suspicion in calibration.suspicions())]
    if count < LEAST_CALIBRATION_WINDOWS:
        return [f"The first {first} too few to calibrate on, so none was judged"]
    judged = "its only window was not judged" if count == 1 else f"none of its {count:,} windows was judged"
    return [f"The input ended within the {seconds:g} s that it was calibrated on: {judged}"]


def _raised(alarm: LiveAlarm, end_s: float, threshold: float, causes: Sequence[Cause]) -> LiveEvent:
    text = f"{end_s:.6f} s: ALARM since {alarm.start_s:.6f} s, score {alarm.score:.3g} (> {threshold:.3g})"
    return LiveEvent(
        text="\n  ".join([text, *(cause.text(decimal=False) for cause in named_causes(causes))]),
        record={
            "event": "alarm", "time": end_s, "start_time": alarm.start_s, "score": alarm.score,
            "threshold": threshold, "reasons": [cause.plain() for cause in causes],
        },
    )  # fmt: skip


def _ended(alarm: LiveAlarm) -> LiveEvent:
    windows = counted(alarm.windows, "window")
    text = f"{alarm.end_s:.6f} s: alarm ended, since {alarm.start_s:.6f} s, {windows}, score up to {alarm.score:.3g}"
    return LiveEvent(text=text, record={"event": "alarm_end", "start_time": alarm.start_s, "end_time": alarm.end_s,
                                        "windows": alarm.windows, "score": alarm.score})  # fmt: skip


def _by_time(findings: Iterable[Finding], events: Iterable[LiveEvent]) -> Iterator[LiveEvent]:
    """Puts the faults of a block of frames between the events of its windows."""
    waiting = deque(sorted(findings, key=lambda finding: finding.record["time"]))
    for event in events:
        time_s = event.record.get("time", event.record.get("end_time", -np.inf))
        while waiting and waiting[0].record["time"] < time_s:
            yield _found(waiting.popleft())
        yield event
    yield from map(_found, waiting)


def _found(finding: Finding) -> LiveEvent:
    return LiveEvent(text=finding.text, record=finding.record)


def _silence(last_s: float | None) -> LiveEvent:
    since = "" if last_s is None else f"{last_s:.6f} s: "
    return LiveEvent(text=f"{since}the bus is silent, no frame for {SILENCE_S:g} s",
                     record={"event": "silence", "time": last_s})  # fmt: skip


# Fields of a block for nodes [N], edges [E] and absences [A]; the other fields are [R].
_OF_NODES: Final = ("can_id", "node_features", "behaviour", "past", "past_windows", "jumps", "broken_checks", "payload")
_OF_EDGES: Final = ("edge_features",)
_OF_ABSENCES: Final = ("absent_id", "absent_silence", "absent_payload")


def _flat_of(block: GraphBlock, window: int) -> FlatGraphs:
    """Arranges a block as a data set."""
    ids, codes = np.unique(np.concatenate([block.can_id, block.absent_id]), return_inverse=True)
    num_nodes = len(block.can_id)
    return FlatGraphs(
        **{field.name: getattr(block, field.name) for field in fields(WindowGraphs)},
        node_ptr=_bounds(block.num_nodes),
        edge_ptr=_bounds(block.num_edges),
        node_code=codes[:num_nodes].astype(np.int32),
        absent_ptr=_bounds(block.num_absent),
        absent_code=codes[num_nodes:].astype(np.int32),
        source=np.zeros(len(block), np.int32),
        ids=ids.astype(np.int64),
        kinds=(BENIGN,),
        sources=(SourceFile(path=LIVE, role="test", group=LIVE, frames=0, labelled=False, sha256=""),),
        window=window,
    )


def _bounds(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _select(block: GraphBlock, row: int) -> GraphBlock:
    """Copies one window of a block; a view would keep the whole block in memory."""
    nodes, edges, absences = (
        slice(counts[:row].sum(), counts[: row + 1].sum())
        for counts in (block.num_nodes, block.num_edges, block.num_absent)
    )
    places = {
        **dict.fromkeys(_OF_NODES, nodes), **dict.fromkeys(_OF_EDGES, edges), **dict.fromkeys(_OF_ABSENCES, absences)
    }  # fmt: skip
    parts = {name: value[..., edges] if name == "edge_index" else value[places.get(name, slice(row, row + 1))]
             for name, value in vars(block).items()}  # fmt: skip
    return GraphBlock(**{name: part.copy() for name, part in parts.items()})
