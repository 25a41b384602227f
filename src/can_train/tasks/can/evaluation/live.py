"""Live detection: windows are scored as soon as their last frame has arrived, and alarms told while they begin.

The windows and their scores are those that evaluating a log of the same frames has. Memory stays bounded.

Shapes: R windows of a block, N their nodes, E edges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np

from can_train.config.resolved import FinishedModel
from can_train.errors import CheckpointError, RunError
from can_train.fit.packing import members
from can_train.task import AlarmRule, LiveDetection, LiveEvent
from can_train.tasks.can.data.behaviour import BEHAVIOUR
from can_train.tasks.can.data.graphs import (
    BENIGN,
    EDGE_FEATURES,
    NODE_FEATURES,
    FlatGraphs,
    Floats,
    GraphBlock,
    GraphBuilder,
    Ints,
    SourceFile,
)
from can_train.tasks.can.evaluation.alarms import LEAST_USUAL_WINDOWS, TOLD_SHARE, Cause, Explainer
from can_train.tasks.can.evaluation.bursts import EACH_WINDOW, JOIN_S, Hold
from can_train.tasks.can.evaluation.calibration import (
    LEAST_CALIBRATION_WINDOWS,
    BenignScores,
    ScoreScale,
    calibrated_scale,
)
from can_train.tasks.can.evaluation.live_input import SILENCE_S, FrameInput, open_input
from can_train.tasks.can.evaluation.metrics import Threshold
from can_train.tasks.can.fusion.agent import FinishedFusion
from can_train.tasks.can.reference_models import AUTOENCODER, CLASSIFIER, FinishedNetwork, WindowModel
from can_train.tasks.can.settings import ColumnSettings, FusionAgentSettings

USUAL_WINDOWS: Final = 64  # the latest calm ones, from which an alarm's reasons tell what is usual; half a megabyte
USUAL_EVERY: Final = 16  # calm windows of which one is kept, so that they span a minute and not a second
# Windows that are scored at a time, of those that arrived together. With more, a teacher's tensors leave the cache (256
# take half as long again); with fewer, a student's calls take longer than what they compute.
SCORED_WINDOWS: Final = 32
TOLD_IDS: Final = 2  # of an alarm, in words
LIVE: Final = "live"  # name of the input where a log's would stand

# Computes raw scores, and contributions, as `Evaluation` has them.
Compute = Callable[[WindowModel, Ints], Floats]


def make_live_detection(
    finished: FinishedModel, load_model: Callable[[str], FinishedModel], source: str, rule: AlarmRule, *, explain: bool
) -> LiveDetector:
    """Opens an input for a finished run; `load_model` loads the models that it builds on.

    Raises:
        ConfigError: The input cannot be opened.
        CheckpointError: The run's result does not tell what the rule asks for.
    """
    judgement = finished.result.get("judgement", {})
    if "threshold" not in judgement:
        raise CheckpointError("A run's result holds its threshold", value=finished.run_id, remedy="Train anew")
    hold = Hold(*(rule.hold or EACH_WINDOW))
    threshold = Threshold(value=judgement["threshold"], rule=f"{judgement['threshold_rule']}")
    if rule.threshold is not None:
        threshold = Threshold(value=rule.threshold, rule="as given")
    elif rule.alarms_per_hour is not None:
        threshold = BenignScores.from_result(judgement, finished.run_id).threshold(rule.alarms_per_hour, hold)
    calibration = None
    if rule.calibrate_s is not None:
        calibration = Calibration(rule.calibrate_s, BenignScores.from_result(judgement, finished.run_id).scale)
    nothing = _flat_of(_empty_block(), finished.run.dataset.window)
    model: WindowModel
    if isinstance(finished.run.model, FusionAgentSettings):
        model = FinishedFusion(finished, nothing, {role: load_model(role) for role in (AUTOENCODER, CLASSIFIER)})
    else:
        model = FinishedNetwork(finished, nothing)
    # How the training log was written says nothing about what is piped in.
    dataset = replace(finished.run.dataset, format="auto", id_base="auto", columns=ColumnSettings())
    alarms = AlarmState(hold=hold, threshold=threshold)
    return LiveDetector(model, open_input(source, dataset), alarms, calibration, explain=explain)


class Calibration:
    """The first windows, which are taken for benign: they tell where the scores of this bus lie."""

    def __init__(self, seconds: float, validation: ScoreScale) -> None:
        self._seconds = seconds
        self._validation = validation
        self._scores: list[float] = []
        self._until_s: float | None = None
        self._scale: ScoreScale | None = None
        self.last_frame = -1  # of the windows that were calibrated on

    def take(self, block: GraphBlock, score: Floats) -> int:
        """Takes those of a block's windows that are still to be calibrated on; returns how many."""
        if self._scale is not None:
            return 0
        if self._until_s is None:
            self._until_s = float(block.start_time[0]) + self._seconds
        within = block.end_time <= self._until_s
        count = len(within) if within.all() else int(np.argmin(within))
        # A slow bus takes longer to show enough windows.
        count = min(len(within), max(count, LEAST_CALIBRATION_WINDOWS - len(self._scores)))
        self._scores += score[:count].tolist()
        if count:
            self.last_frame = int(block.first_frame[count - 1])
        if count < len(within):
            self._scale = calibrated_scale(np.array(self._scores), self._validation, where="the input")
        return count

    @property
    def windows(self) -> int:
        """Windows that were taken so far."""
        return len(self._scores)

    @property
    def done(self) -> bool:
        """Whether all windows that it needs have arrived."""
        return self._scale is not None

    def adapt(self, score: Floats) -> Floats:
        """Returns scores [R] as if this bus were like validation."""
        assert self._scale is not None, "windows are judged after the calibration"
        return self._scale.to(self._validation, score)


class _Flagged(NamedTuple):
    """A flagged window."""

    start_s: float
    end_s: float
    score: float


@dataclass(kw_only=True)
class LiveAlarm:
    """An alarm that is raised, with the flagged windows from which it was raised on.

    Attributes:
        windows: How many.
        score: The highest.
        raised_until_s: End of the last window in which it was raised.
    """

    start_s: float
    end_s: float
    windows: int
    score: float
    raised_until_s: float

    @classmethod
    def of(cls, flagged: Sequence[_Flagged], end_s: float) -> Self:
        """Raises an alarm with the window that ends at a time."""
        score = max(one.score for one in flagged)
        return cls(start_s=flagged[0].start_s, end_s=flagged[-1].end_s, windows=len(flagged), score=score,
                   raised_until_s=end_s)  # fmt: skip

    def extend(self, flagged: Sequence[_Flagged], end_s: float) -> None:
        """Adds the flagged windows since it was last raised, which it is again."""
        self.windows += len(flagged)
        self.score = max([self.score, *(one.score for one in flagged)])
        self.end_s = max([self.end_s, *(one.end_s for one in flagged)])
        self.raised_until_s = end_s


class AlarmState:
    """Which alarm is raised at the moment: windows come in one by one, and alarms go out."""

    def __init__(self, *, hold: Hold, threshold: Threshold) -> None:
        self.hold = hold
        self.threshold = threshold
        self._recent: deque[_Flagged | None] = deque(maxlen=hold.of)  # the last windows; None: not flagged
        self._since: list[_Flagged] = []  # flagged since the alarm was last raised
        self._alarm: LiveAlarm | None = None
        self.alarms = 0

    def see(self, start_s: float, end_s: float, score: float) -> tuple[LiveAlarm | None, LiveAlarm | None]:
        """Takes the next window; returns the alarm that ended before it, and the one that it raised, if any."""
        one = _Flagged(start_s, end_s, score) if score > self.threshold.value else None
        self._recent.append(one)
        ended = None
        if self._alarm is not None and start_s - self._alarm.raised_until_s >= JOIN_S:
            ended, self._alarm = self._alarm, None
        if self._alarm is not None and one is not None:
            self._since.append(one)
        raising = [each for each in self._recent if each is not None]
        if len(raising) < self.hold.needed:
            return ended, None
        since, self._since = self._since, []
        if self._alarm is not None:
            self._alarm.extend(since, end_s)
            return ended, None
        self._alarm = LiveAlarm.of(raising, end_s)
        self.alarms += 1
        return ended, self._alarm

    def finish(self) -> LiveAlarm | None:
        """Returns the alarm that is still raised."""
        ended, self._alarm = self._alarm, None
        return ended


class LiveDetector(LiveDetection):
    """A finished model on frames as they arrive."""

    def __init__(
        self, model: WindowModel, source: FrameInput, alarms: AlarmState, calibration: Calibration | None, *,
        explain: bool,
    ) -> None:  # fmt: skip
        dataset = model.finished.run.dataset
        self._model = model
        self._input = source
        self._alarms = alarms
        self._calibration = calibration
        self._explain = explain
        self._window, self._stride = int(dataset.window), int(dataset.stride)
        self._builder = GraphBuilder(dataset.window, dataset.stride)
        self._usual: deque[GraphBlock] = deque(maxlen=USUAL_WINDOWS)
        self._windows = self._flagged = 0
        self._first_s: float | None = None
        self._last_s = 0.0
        self._is_silent = False

    def events(self, score: Compute, contribute: Compute) -> Iterator[LiveEvent]:
        """Yields alarms when they are raised and when they have ended, and when the bus falls silent and speaks again.

        Raises:
            RunError: A score is not a finite number.
            DataError: The input fails.
        """
        told = 0
        for frames in self._input.batches():
            if frames is None:
                if not self._is_silent:
                    yield _silence(None if self._first_s is None else self._last_s)
                self._is_silent = True
                continue
            if not len(frames):
                continue
            for note in self._input.notes[told:]:
                yield LiveEvent(text=f"note: {note}", record={"event": "note", "text": note})
            told = len(self._input.notes)
            if self._is_silent:
                yield LiveEvent(text=f"{frames.timestamp[0]:.6f} s: frames arrive again",
                                record={"event": "resumed", "time": float(frames.timestamp[0])})  # fmt: skip
            self._is_silent = False
            self._first_s = float(frames.timestamp[0]) if self._first_s is None else self._first_s
            self._last_s = float(frames.timestamp[-1])
            for block in self._builder.feed(frames):
                yield from self._judge(block, score, contribute)
        if (alarm := self._alarms.finish()) is not None:
            yield _ended(alarm)

    def summary(self) -> Sequence[str]:
        """Tells what was seen: frames, windows, alarms, and what was left out."""
        left = self._builder.frames_seen - self._windows_end()
        seconds = self._last_s - (self._first_s or 0.0) if self._first_s is not None else 0.0
        counted = f"{self._input.frames:,} frames in {seconds:,.1f} s, {self._windows:,} windows"
        alarms = "1 alarm" if self._alarms.alarms == 1 else f"{self._alarms.alarms:,} alarms"
        sentences = [f"{counted}, {self._flagged:,} of them flagged, {alarms}"]
        threshold = self._alarms.threshold
        sentences.append(f"A window is flagged if it scores more than {threshold.value:.6g}: {threshold.rule}")
        if self._calibration is not None:
            state = "were taken for benign" if self._calibration.done else "were too few to calibrate on"
            sentences.append(f"The first {self._calibration.windows:,} windows {state} and are not judged")
        if left:
            sentences.append(f"The last {left:,} frames fill no window and were not judged")
        return [*sentences, *filter(None, [self._input.malformed_text()])]

    def close(self) -> None:
        """Closes the input."""
        self._input.close()

    def _windows_end(self) -> int:
        """Returns how many of the frames lie in windows that were scored."""
        if not self._windows:
            return 0
        return (self._windows - 1) * self._stride + self._window

    def _judge(self, block: GraphBlock, score: Compute, contribute: Compute) -> Iterator[LiveEvent]:
        if not len(block):
            return
        model = self._model.on(_flat_of(block, self._window))
        parts = np.split(np.arange(len(block)), range(SCORED_WINDOWS, len(block), SCORED_WINDOWS))
        scores = model.combine(np.concatenate([score(model, rows) for rows in parts]))
        if not np.isfinite(scores).all():
            raise RunError("Every window's score must be a finite number", value=f"that of {model.describe(0)} is not",
                           remedy="The model has diverged: train it anew with a lower learning rate")  # fmt: skip
        self._windows += len(block)
        first = 0
        if self._calibration is not None:
            first = self._calibration.take(block, scores)
            if first == len(block):
                return
            if first:
                yield _calibrated(self._calibration.windows, float(block.start_time[first]))
            scores = self._calibration.adapt(scores)
        for row in range(first, len(block)):
            start_s, end_s = float(block.start_time[row]), float(block.end_time[row])
            # It shares frames with those that are taken for benign.
            if self._calibration is not None and block.first_frame[row] < self._calibration.last_frame + self._window:
                continue
            self._flagged += bool(scores[row] > self._alarms.threshold.value)
            ended, raised = self._alarms.see(start_s, end_s, float(scores[row]))
            if ended is not None:
                yield _ended(ended)
            if raised is not None:
                causes = self._causes(block, row, contribute) if self._explain else []
                yield _raised(raised, end_s, self._alarms.threshold.value, causes)
            elif self._explain and scores[row] <= self._alarms.threshold.value and row % USUAL_EVERY == 0:
                self._usual.append(_select(block, row))

    def _causes(self, block: GraphBlock, row: int, contribute: Compute) -> Sequence[Cause]:
        """Names the CAN IDs that drove the score of a window, beside what is usual in the calm ones before it."""
        usual = list(self._usual) if len(self._usual) >= LEAST_USUAL_WINDOWS else []
        flat = _flat_of(_joined([*usual, _select(block, row)]), self._window)
        model = self._model.on(flat)
        explainer = Explainer(flat=flat, contribute=lambda rows: contribute(model, rows), vocabulary=model.vocabulary,
                              usual_rows=np.arange(len(usual)))  # fmt: skip
        return next(explainer.causes(np.array([len(usual)])))


def _raised(alarm: LiveAlarm, end_s: float, threshold: float, causes: Sequence[Cause]) -> LiveEvent:
    told = [cause for cause in causes[:TOLD_IDS] if cause is causes[0] or cause.share >= TOLD_SHARE]
    text = f"{end_s:.6f} s: ALARM since {alarm.start_s:.6f} s, score {alarm.score:.3g} (> {threshold:.3g})"
    return LiveEvent(
        text="\n  ".join([text, *(cause.text(decimal=False) for cause in told)]),
        record={
            "event": "alarm", "time": end_s, "start_time": alarm.start_s, "score": alarm.score,
            "threshold": threshold, "reasons": [cause.plain() for cause in causes],
        },
    )  # fmt: skip


def _ended(alarm: LiveAlarm) -> LiveEvent:
    windows = f"{alarm.windows:,} windows" if alarm.windows > 1 else "1 window"
    text = f"{alarm.end_s:.6f} s: alarm ended, since {alarm.start_s:.6f} s, {windows}, score up to {alarm.score:.3g}"
    return LiveEvent(text=text, record={"event": "alarm_end", "start_time": alarm.start_s, "end_time": alarm.end_s,
                                        "windows": alarm.windows, "score": alarm.score})  # fmt: skip


def _silence(last_s: float | None) -> LiveEvent:
    since = "" if last_s is None else f"{last_s:.6f} s: "
    return LiveEvent(text=f"{since}the bus is silent, no frame for {SILENCE_S:g} s",
                     record={"event": "silence", "time": last_s})  # fmt: skip


def _calibrated(windows: int, at_s: float) -> LiveEvent:
    return LiveEvent(text=f"{at_s:.6f} s: calibrated on {windows:,} windows, taken for benign; alarms from here on",
                     record={"event": "calibrated", "time": at_s, "windows": windows})  # fmt: skip


# Blocks: [N] fields of nodes, [E] of edges, [A] of absences; the others are [R].
_OF_NODES: Final = ("can_id", "node_features", "behaviour", "past", "past_windows")
_OF_EDGES: Final = ("edge_features",)
_OF_ABSENCES: Final = ("absent_id", "absent_silence")


def _flat_of(block: GraphBlock, window: int) -> FlatGraphs:
    """Arranges a block as a data set of its own."""
    ids, codes = np.unique(np.concatenate([block.can_id, block.absent_id]), return_inverse=True)
    num_nodes = len(block.can_id)
    return FlatGraphs(
        node_ptr=_bounds(block.num_nodes),
        edge_ptr=_bounds(block.num_edges),
        node_code=codes[:num_nodes].astype(np.int32),
        node_features=block.node_features,
        behaviour=block.behaviour,
        past=block.past,
        past_windows=block.past_windows,
        absent_ptr=_bounds(block.num_absent),
        absent_code=codes[num_nodes:].astype(np.int32),
        absent_silence=block.absent_silence,
        edge_index=block.edge_index,
        edge_features=block.edge_features,
        label=block.label,
        digest=block.digest,
        source=np.zeros(len(block), np.int32),
        first_frame=block.first_frame,
        start_time=block.start_time,
        end_time=block.end_time,
        ids=ids.astype(np.int64),
        kinds=(BENIGN,),
        sources=(SourceFile(path=LIVE, role="test", group=LIVE, frames=0, labelled=False, sha256=""),),
        window=window,
    )


def _bounds(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _empty_block() -> GraphBlock:
    none, times = np.empty(0, np.int64), np.empty(0)
    return GraphBlock(
        num_nodes=none, num_edges=none, can_id=none.astype(np.uint32), edge_index=np.empty((2, 0), np.int32),
        node_features=np.empty((0, len(NODE_FEATURES)), np.float32),
        behaviour=np.empty((0, len(BEHAVIOUR)), np.float32), past=np.empty((0, len(BEHAVIOUR)), np.float32),
        past_windows=np.empty(0, np.int32), digest=np.empty(0, np.uint64),
        num_absent=none, absent_id=none.astype(np.uint32), absent_silence=np.empty(0, np.float32),
        edge_features=np.empty((0, len(EDGE_FEATURES)), np.float32),
        label=none.astype(np.uint8), first_frame=none, start_time=times, end_time=times,
    )  # fmt: skip


def _select(block: GraphBlock, row: int) -> GraphBlock:
    """Copies one window of a block, which would keep all of it in memory."""
    nodes = members(_bounds(block.num_nodes), np.array([row])).positions
    edges = members(_bounds(block.num_edges), np.array([row])).positions
    absences = members(_bounds(block.num_absent), np.array([row])).positions
    parts: dict[str, Any] = {
        name: getattr(block, name)[positions]
        for names, positions in ((_OF_NODES, nodes), (_OF_EDGES, edges), (_OF_ABSENCES, absences))
        for name in names
    }
    others = {name: value[row : row + 1].copy() for name, value in vars(block).items()
              if name not in (*parts, "edge_index")}  # fmt: skip
    return GraphBlock(**parts, **others, edge_index=block.edge_index[:, edges])


def _joined(blocks: Sequence[GraphBlock]) -> GraphBlock:
    names = vars(blocks[0])
    parts = {name: np.concatenate([getattr(block, name) for block in blocks], axis=1 if name == "edge_index" else 0)
             for name in names}  # fmt: skip
    return GraphBlock(**parts)
