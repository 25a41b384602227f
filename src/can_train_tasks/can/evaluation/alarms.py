"""Flagged windows as alarms: the place of an alarm in its log, and the CAN IDs and properties that drove its score.

Shapes: R windows, I IDs of windows (for each window its nodes, then its absences), P properties, K distinct CAN IDs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from can_train.fit.packing import members
from can_train_tasks.can.contributions import (
    BYTES,
    CHANGE,
    CHECKSUM,
    CONTEXTS,
    COUNTER,
    FRAMES,
    GAP,
    IDENTITY,
    JUMPS,
    LAST,
    LATENT,
    NEIGHBOURS,
    PERIOD,
    PROPERTIES,
    SILENCE,
)
from can_train_tasks.can.data.behaviour import BEHAVIOUR, WORDS, word_values
from can_train_tasks.can.data.database import Database, DatabaseMessage
from can_train_tasks.can.data.graphs import (
    EDGE_FEATURES,
    NODE_FEATURES,
    Bools,
    FlatGraphs,
    Floats,
    Ints,
    id_text,
    named_id,
)
from can_train_tasks.can.evaluation.bursts import Timeline, held_scores
from can_train_tasks.can.evaluation.options import Hold

# Most windows without a flag that give the usual values of a log: they take seconds on a CPU. With fewer than
# `LEAST_USUAL_WINDOWS`, no value is called usual.
USUAL_WINDOWS: Final = 256
LEAST_USUAL_WINDOWS: Final = 20
WINDOWS_AT_A_TIME: Final = 2048  # windows whose contributions are in memory together: 14 MB with 20 IDs each
KNOWN_SHARE: Final = 0.5  # a model that knows a larger share of a log's IDs knows the bus
NAMED_IDS: Final = 3  # IDs that a record names for a window
TOLD_IDS: Final = 2  # IDs that the text of an alarm names
TOLD_SHARE: Final = 0.2  # a second ID with at least this share of the cause is named
NAMED_PROPERTIES: Final = 2  # properties that are named for an ID
NAMED_SIGNALS: Final = 3  # signals that are named for a property

USUAL_NOTE: Final = "Usually: the median of this ID over windows of the same log that are not flagged"


def _value_name(word: str) -> str:
    """Names a value in a payload by its bytes, of which `WORDS` has the most significant byte first."""
    first, _, second = word.partition("-")
    if not second:
        return f"payload byte {first}"
    return f"payload bytes {word}" if first < second else f"payload bytes {second}-{first} (little-endian)"


def _bits(word: str) -> list[int]:
    """Returns the bits of a value in a payload, the most significant bit first (see `DatabaseSignal.bits`)."""
    return [bit for byte in word.split("-") for bit in range(8 * int(byte) - 8, 8 * int(byte))]


# The word of each property that is about a value in a payload.
_WORD_OF: Final = {name: word for names in (JUMPS, CONTEXTS) for name, word in zip(names, WORDS, strict=True)}
_SUBJECTS: Final = {
    **{name: f"payload byte {number}" for number, name in enumerate(BYTES, 1)},
    **{name: _value_name(word) for name, word in _WORD_OF.items()},
}
# The bits of each property that is about bytes of a payload.
_BITS: Final = {
    **{name: _bits(str(number)) for number, name in enumerate(BYTES, 1)},
    **{name: _bits(word) for name, word in _WORD_OF.items()},
}
# Words for each property. The identity of a new ID is told as "not in benign training data".
_WORDS: Final = {
    IDENTITY: "the ID itself",
    **{name: f"{_SUBJECTS[name]} averages {{:.0f}}" for name in BYTES},
    FRAMES: "{:.0f} frames",
    LAST: "last seen at {:.0%} of the window",
    GAP: "{:.3g} ms from the frames beside it",
    PERIOD: "every {:.3g} ms",
    SILENCE: "silent for {:.3g} ms at the end",
    CHANGE: "{:.1f} bits change from frame to frame",
    NEIGHBOURS: "{:.0f} other IDs beside it",
    LATENT: "its pattern as a whole",
    COUNTER: "its counter misses a step",
    CHECKSUM: "its checksum is wrong",
    **{name: f"{_SUBJECTS[name]} jump{'' if '-' in _WORD_OF[name] else 's'} by {{:,.0f}}" for name in JUMPS},
    **{name: f"{_SUBJECTS[name]} {'are' if '-' in _WORD_OF[name] else 'is'} {{:,.0f}}" for name in CONTEXTS},
}
_USUAL_WORDS: Final = {
    **dict.fromkeys((*BYTES, FRAMES, NEIGHBOURS), "{:.0f}"),
    **dict.fromkeys((GAP, PERIOD, SILENCE), "{:.3g} ms"),
    LAST: "{:.0%}",
    CHANGE: "{:.1f}",
    **dict.fromkeys((*JUMPS, *CONTEXTS), "{:,.0f}"),
}
_ACTIONS: Final = {
    **dict.fromkeys(BYTES, "averages"), **dict.fromkeys(JUMPS, "jumps by"), **dict.fromkeys(CONTEXTS, "is")
}  # fmt: skip


# Conversions of the columns of `BEHAVIOUR`, which are logarithms, to the units that a person reads.
_OF_BEHAVIOUR: Final[Mapping[str, tuple[str, Callable[[float], float]]]] = {
    PERIOD: ("gap_mean", lambda value: 1000 * 2.0**value),
    SILENCE: ("silence", lambda value: 1000 * 2.0**value),
    CHANGE: ("bits_changed", lambda value: 2.0**value - 1),
}


@dataclass(frozen=True, kw_only=True)
class NamedSignals:
    """The signals of a database in the bytes of a property.

    Attributes:
        names: Names of the signals.
        unit: Unit of the physical values; empty: none.
        value: Physical value of the property; None where the bytes are not exactly one signal.
        usual: Usual physical value of the property; None where it is not known.
    """

    names: Sequence[str]
    unit: str = ""
    value: float | None = None
    usual: float | None = None

    @classmethod
    def of(cls, message: DatabaseMessage | None, name: str, values: Sequence[float | None]) -> "NamedSignals | None":
        """Names the signals of a property with a value and a usual value; None where there are no signals."""
        signals = [] if message is None or name not in _BITS else message.signals_in(_BITS[name])
        if not signals:
            return None
        first, is_jump = signals[0], name in JUMPS
        # The mean of a byte says nothing about the mean of a signed value, and values are read without a sign.
        if not first.is_exactly(_BITS[name]) or (first.signed and not is_jump):
            return cls(names=[each.name for each in signals])
        scale, offset = (abs(first.scale), 0.0) if is_jump else (first.scale, first.offset)
        value, usual = (None if each is None else scale * each + offset for each in values)
        return cls(names=[first.name], unit=first.unit, value=value, usual=usual)

    def plain(self) -> dict[str, Any]:
        """Returns the signals as strict JSON."""
        return {**vars(self), "names": list(self.names)}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class Property:
    """A property of an ID in a window; `value` or `usual` is None where it does not exist or is not known.

    The usual value of a property of `CONTEXTS` is the value that follows from other IDs.
    """

    name: str
    value: float | None
    usual: float | None
    signals: NamedSignals | None = None  # in the bytes of the property, if a database names them

    def text(self) -> str:
        """Tells the property in words, with the usual value if it is known."""
        value, usual = self.figures()
        told = _WORDS[self.name].format(self.value)
        if self.signals is not None and self.signals.value is not None:
            told = " ".join(filter(None, [self.signals.names[0], _ACTIONS[self.name], value, self.signals.unit]))
        elif self.signals is not None:
            names = self.signals.names[:NAMED_SIGNALS]
            of = " of " + ", ".join(names) + (", …" if len(names) < len(self.signals.names) else "")
            told = told.replace(_SUBJECTS[self.name], _SUBJECTS[self.name] + of, 1)
        if self.usual is None:
            return told
        return f"{told} ({usual} expected from other IDs)" if self.name in CONTEXTS else f"{told} (usually {usual})"

    def figures(self) -> tuple[str, str]:
        """Writes the value and the usual value, in physical units where the property is of one signal."""
        if self.signals is not None and self.signals.value is not None:
            return _number(self.signals.value), _number(self.signals.usual)
        words = _USUAL_WORDS.get(self.name, "")
        value, usual = ("" if each is None else words.format(each) for each in (self.value, self.usual))
        return value, usual

    def plain(self) -> dict[str, Any]:
        """Returns the property as strict JSON; only with a database it has `signal`."""
        own = {"name": self.name, "value": self.value, "usual": self.usual}
        return own if self.signals is None else {**own, "signal": self.signals.plain()}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A CAN ID that drove the score of a window."""

    can_id: int
    known: bool  # whether a benign training window has the ID
    seconds: float  # length of the window
    frames: Property  # number of the ID's frames in the window
    share: float  # the ID's share of the rise of the score above the usual score
    properties: Sequence[Property]  # properties that drove the score most, in descending order
    message: str = ""  # name of the ID's message; empty: no database has it

    def text(self, *, decimal: bool) -> str:
        """Tells the cause in words; `decimal` if the log has decimal IDs."""
        name = ", ".join(filter(None, [self.message, named_id(self.can_id, decimal=decimal)]))
        if not self.known:
            name += ", not in benign training data"
        # The number of frames is always told: a person who looks the ID up in the log needs it.
        frames = self.frames.text().replace("frames", f"frames in {self.seconds:.3g} s", 1)
        frames = frames.replace("1 frames", "1 frame") if self.frames.value == 1 else frames
        told = [frames]
        for each in self.properties:
            value, usual = each.figures()
            looks_usual = None not in (each.value, each.usual) and value == usual
            if each.name not in ((FRAMES,) if self.known else (FRAMES, IDENTITY)) and not looks_usual:
                told.append(each.text())
        return f"{name}: " + "; ".join(told)

    def plain(self) -> dict[str, Any]:
        """Returns the cause as strict JSON."""
        named = {"message": self.message} if self.message else {}
        return {"id": id_text(self.can_id), **named, "known": self.known, "frames": self.frames.value,
                "share": round(self.share, 4),
                "properties": [each.plain() for each in self.properties]}  # fmt: skip


# Returns the contributions [I, P] to the scores of windows [R].
Contribute = Callable[[Ints], Floats]


def named_causes(causes: Sequence[Cause]) -> list[Cause]:
    """Returns the causes that the text of an alarm names: the first, and a second with a large share."""
    return [cause for cause in causes[:TOLD_IDS] if cause is causes[0] or cause.share >= TOLD_SHARE]


@dataclass(kw_only=True, eq=False)
class Explainer:
    """Names the causes of scores in one log, with the usual values from its windows `usual_rows` [R]."""

    flat: FlatGraphs
    contribute: Contribute
    vocabulary: Ints  # IDs of benign training windows
    usual_rows: Ints
    database: Database = field(default_factory=Database)  # names messages and signals
    # Returns the values of a window that follow from other IDs (see `WindowModel.expected`).
    expect: Callable[[int], Mapping[tuple[int, str], float]] = field(default=lambda row: {})
    _known: Bools = field(init=False)  # [K] whether the ID is in the vocabulary
    _foreign: Bools = field(init=False)  # [K] IDs without usual values
    _usual_sums: Floats = field(init=False)  # [K, P] mean contributions of each ID
    _medians: dict[tuple[int, str], float | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        sums, counts = np.zeros((len(self.flat.ids), len(PROPERTIES))), np.zeros(len(self.flat.ids))
        self._known = np.isin(self.flat.ids, self.vocabulary)
        codes = self._codes(self.usual_rows)
        if len(codes):
            np.add.at(sums, codes, self.contribute(self.usual_rows))
            np.add.at(counts, codes, 1)
        # A weak model does not flag all windows with an injected ID. On a known bus, the windows without a flag do not
        # make such an ID usual.
        present = np.unique(codes)
        knows_bus = len(present) > 0 and self._known[present].mean() > KNOWN_SHARE
        self._foreign = ~self._known & knows_bus
        sums[self._foreign] = 0.0
        self._usual_sums = sums / np.maximum(counts, 1)[:, None]

    def causes(self, rows: Ints) -> Iterator[list[Cause]]:
        """Yields the causes of each window of `rows` [R], the most important cause first."""
        for start in range(0, len(rows), WINDOWS_AT_A_TIME):
            part = rows[start : start + WINDOWS_AT_A_TIME]
            # Some IDs always contribute much. Only the excess over the usual contribution explains a window.
            excess = np.maximum(self.contribute(part) - self._usual_sums[self._codes(part)], 0.0)
            bounds = np.cumsum(self.flat.num_ids[part])[:-1]
            for row, excess_of_ids in zip(part, np.split(excess, bounds), strict=True):
                yield self._window_causes(int(row), excess_of_ids)

    def _window_causes(self, row: int, excess: Floats) -> list[Cause]:
        flat, codes, expected = self.flat, self._codes(np.array([row])), self.expect(row)
        by_id = excess.sum(axis=1)
        whole = max(float(by_id.sum()), np.finfo(np.float64).tiny)
        causes = []
        for position in np.argsort(-by_id, kind="stable")[:NAMED_IDS].tolist():
            code = int(codes[position])
            strongest = np.argsort(-excess[position], kind="stable")[:NAMED_PROPERTIES]
            names = [PROPERTIES[index] for index in strongest if excess[position, index] > 0]
            message = self.database.message(int(flat.ids[code]))
            usuals = [(name, expected.get((position, name)) if name in CONTEXTS else self._usual(code, name))
                      for name in (FRAMES, *names)]  # fmt: skip
            frames, *properties = [
                Property(name=name, value=value, usual=usual, signals=NamedSignals.of(message, name, (value, usual)))
                for name, usual in usuals
                # An ID without an earlier frame has no period and no change.
                if (value := id_value(flat, row, position, name)) is not None or name not in _OF_BEHAVIOUR
            ]
            share, seconds = float(by_id[position]) / whole, float(flat.end_time[row] - flat.start_time[row])
            causes.append(Cause(can_id=int(flat.ids[code]), known=bool(self._known[code]), share=share, seconds=seconds,
                                frames=frames, properties=properties,
                                message="" if message is None else message.name))  # fmt: skip
        return causes

    def _usual(self, code: int, name: str) -> float | None:
        """Returns the median of an ID's property in usual windows; None where no usual window has the property."""
        if self._foreign[code]:
            return None
        if (code, name) not in self._medians:
            flat, values = self.flat, []
            for row in self.usual_rows:
                codes = flat.node_code[flat.node_ptr[row] : flat.node_ptr[row + 1]]
                values += [id_value(flat, int(row), int(node), name) for node in np.flatnonzero(codes == code)]
            numbers = [value for value in values if value is not None]
            # Frames of an ID that is usually absent are usually 0.
            absent = 0.0 if name == FRAMES and len(self.usual_rows) else None
            self._medians[code, name] = float(np.median(numbers)) if numbers else absent
        return self._medians[code, name]

    def _codes(self, rows: Ints) -> Ints:
        flat = self.flat
        nodes, absences = members(flat.node_ptr, rows), members(flat.absent_ptr, rows)
        codes = np.concatenate([flat.node_code[nodes.positions], flat.absent_code[absences.positions]])
        window = np.concatenate([np.repeat(np.arange(len(rows)), part.sizes) for part in (nodes, absences)])
        ordered: Ints = codes[np.argsort(window, kind="stable")].astype(np.int64)
        return ordered


def usual_windows(rows: Ints, flagged: Bools) -> Ints:
    """Chooses windows without a flag, evenly over a log, for usual values; no windows where there are too few."""
    calm = rows[~flagged]
    if len(calm) < LEAST_USUAL_WINDOWS:
        return calm[:0]
    return calm[np.unique(np.linspace(0, len(calm) - 1, USUAL_WINDOWS).astype(np.int64))]


def id_value(flat: FlatGraphs, row: int, node: int, name: str) -> float | None:
    """Returns a property of a window's ID in the unit of the log; None where the property is not a number.

    `node` is the position of the ID among the window's nodes and, after them, its absences.
    """
    absence = node - int(flat.node_ptr[row + 1] - flat.node_ptr[row])
    if absence >= 0 and name == SILENCE:
        return _OF_BEHAVIOUR[SILENCE][1](float(flat.absent_silence[flat.absent_ptr[row] + absence]))
    if absence >= 0:
        return 0.0 if name == FRAMES else None
    features = flat.node_features[flat.node_ptr[row] + node]
    if name in BYTES:
        return float(features[BYTES.index(name)]) * 255
    if name in (FRAMES, LAST):
        return float(features[NODE_FEATURES.index("count" if name == FRAMES else "last_position")])
    if name in JUMPS:
        return float(flat.jumps[flat.node_ptr[row] + node, JUMPS.index(name)])
    if name in CONTEXTS:
        return float(word_values(flat.payload[flat.node_ptr[row] + node], np.array(CONTEXTS.index(name))))
    if name in _OF_BEHAVIOUR:
        column, to_unit = _OF_BEHAVIOUR[name]
        value = float(flat.behaviour[flat.node_ptr[row] + node, BEHAVIOUR.index(column)])
        return None if math.isnan(value) else to_unit(value)
    if name not in (GAP, NEIGHBOURS):
        return None
    edges = slice(flat.edge_ptr[row], flat.edge_ptr[row + 1])
    source, target = flat.edge_index[:, edges]
    touches = (source == node) | (target == node)
    if name == NEIGHBOURS:
        return float(len(np.setdiff1d([source[touches], target[touches]], node)))
    gap, count = (
        flat.edge_features[edges, EDGE_FEATURES.index(each)][touches] for each in ("interval_mean_ms", "count")
    )
    return float(np.average(gap, weights=count))


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Flagged windows that belong together, and the cause of their scores."""

    source: str  # the log
    place: str  # place of the windows in the log, and their score, in words
    reason: str  # the cause of the score, in words
    score: float  # highest score of the windows
    record: Mapping[str, Any]  # strict JSON


MOST_ALARMS: Final = 20  # alarms that are listed without -v, with two to four lines each


def list_alarms(alarms: Sequence[Alarm], *, every: bool) -> list[str]:
    """Lists alarms as a paragraph for each log; without `every`, only the alarms with the highest scores."""
    if not alarms:
        return ["Nothing was flagged."]
    highest = sorted(range(len(alarms)), key=lambda index: alarms[index].score, reverse=True)
    listed = [alarms[index] for index in sorted(highest if every else highest[:MOST_ALARMS])]
    paragraphs = [
        "\n".join([source, *(f"  {alarm.place}\n    {alarm.reason}" for alarm in listed if alarm.source == source)])
        for source in dict.fromkeys(alarm.source for alarm in listed)
    ]
    if len(listed) < len(alarms):
        paragraphs.append(f"These are the {len(listed)} highest of {len(alarms):,} alarms; "
                          "-v prints all, --scores FILE writes them")  # fmt: skip
    return paragraphs


@dataclass(frozen=True, kw_only=True, eq=False)
class FlaggedLog:
    """Judged windows of one log, in its order."""

    flat: FlatGraphs
    rows: Ints  # [R]
    score: Floats  # [R]
    flagged: Bools  # [R]
    threshold: float
    lines: Ints  # [2, R] numbers of the first and the last line of each window
    causes: Mapping[int, Sequence[Cause]]  # causes by position in `rows`, for every flagged window at least
    decimal: bool  # whether the log has decimal IDs
    hold: Hold | None = None  # flagged windows that raise an alarm; None: each flagged window does

    def reason(self, position: int) -> str | None:
        """Tells the causes of a window's score; None for a window without an explanation."""
        return self._told(self.causes[position]) if position in self.causes else None

    def alarms(self) -> list[Alarm]:
        """Joins successive flagged windows to alarms; with a hold, only to alarms that the hold raises.

        An alarm then reaches from its first to its last flagged window, and is raised in a window between them.
        """
        timeline = Timeline.of(self.flat, self.rows)
        if self.hold is None:
            flagged = np.flatnonzero(self.flagged)
            steps = np.diff(self.flat.first_frame[self.rows[flagged]])
            apart = (steps > self.flat.window) | (np.diff(timeline.segment[flagged]) > 0)
            runs = np.split(flagged, np.flatnonzero(apart) + 1)
            return [self._alarm(run) for run in runs if len(run)]
        raised = np.flatnonzero(held_scores(self.flagged.astype(np.float64), timeline.segment, self.hold) > 0.5)
        if not len(raised):
            return []
        begins = np.flatnonzero(np.diff(timeline.groups(raised), prepend=-1))
        alarms = []
        for first, last in zip(raised[begins], raised[np.append(begins[1:], len(raised)) - 1], strict=True):
            # The hold raises the alarm at the window `first`; the hold's other flagged windows lie before it.
            begin = np.searchsorted(timeline.segment, timeline.segment[first])
            event = np.arange(max(begin, first - self.hold.of + 1), last + 1)
            alarms.append(self._alarm(event[self.flagged[event]]))
        return alarms

    def _alarm(self, run: Ints) -> Alarm:
        flat, rows = self.flat, self.rows[run]
        source = flat.sources[flat.source[rows[0]]]
        kinds = [flat.kinds[code] for code in np.unique(flat.label[rows]) if code]
        label = ("attack" if kinds else "benign") if source.labelled else None
        start_s = float(flat.start_time[rows[0]])
        end_s = max(start_s, float(flat.end_time[rows].max()))  # the clock may be set back inside a window
        first_line, last_line = int(self.lines[0][run[0]]), int(self.lines[1][run].max())
        score, causes = float(self.score[run].max()), self._joined(run)
        windows = f"{len(run)} windows" if len(run) > 1 else "1 window"
        truth = "" if label is None else f", {label}" + (f" ({', '.join(kinds)})" if kinds and kinds != [label] else "")
        return Alarm(
            source=source.path,
            place=f"lines {first_line:,}-{last_line:,}, {start_s:.6f}-{end_s:.6f} s, {windows}, "
                  f"score {score:.3g} (> {self.threshold:.3g}){truth}",
            reason=self._told(causes),
            score=score,
            record={
                "log": source.path, "folder": source.group, "windows": len(run), "first_line": first_line,
                "last_line": last_line, "first_frame": int(flat.first_frame[rows[0]]),
                "last_frame": int(flat.first_frame[rows[-1]]) + flat.window - 1, "start_time": start_s,
                "end_time": end_s, "score": score, "label": label, "kinds": kinds,
                "reasons": [cause.plain() for cause in causes],
            },
        )  # fmt: skip

    def _joined(self, run: Ints) -> list[Cause]:
        """Returns an alarm's causes, ordered by mean share; values come from the window where the share is largest."""
        shares: dict[int, float] = {}
        largest: dict[int, Cause] = {}
        for position in run:
            for cause in self.causes[position]:
                shares[cause.can_id] = shares.get(cause.can_id, 0.0) + cause.share / len(run)
                largest[cause.can_id] = max(cause, largest.get(cause.can_id, cause), key=lambda each: each.share)
        return [largest[can_id] for can_id in sorted(shares, key=shares.__getitem__, reverse=True)[:NAMED_IDS]]

    def _told(self, causes: Sequence[Cause]) -> str:
        return ". ".join(cause.text(decimal=self.decimal) for cause in named_causes(causes))
