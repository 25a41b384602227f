"""Rules beside a network: a known ID is silent or late, or a known bus has a new ID.

A network that has learned from floods and forged frames overlooks frames that are missing. A rule measures how rare a
window is among benign windows, and raises the network's score where the window is rarer than one in a million.

Shapes: V IDs of the vocabulary, K IDs of a data set, R windows, N nodes and A absences of the windows, I = N + A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from can_train.fit.packing import Members, members
from can_train_tasks.can.data.behaviour import BEHAVIOUR
from can_train_tasks.can.data.graphs import FlatGraphs, Floats, Ints
from can_train_tasks.can.evaluation.calibration import ScoreScale
from can_train_tasks.can.inputs import LEAST_KNOWN_SHARE, PUNCTUAL, PUNCTUAL_LOGS, SETTLED_WINDOWS, known_ids

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Split

SILENT, LATE, NEW = "silent", "late", "new"
RULES: Final = (SILENT, LATE, NEW)
# Decimal logarithms of benign windows for each window that a rule takes for benign. On other drives of 18 simulated
# vehicles, rules that flag one window in 100,000 raise five times as many false alarms, and find as many attacks.
FLAGGED: Final = 6.0
TOLD: Final = 3.0  # windows that are less rare keep the network's score
LEAST_WINDOWS: Final = 50  # benign validation windows, without which nothing is known about rare windows
TAIL_SHARE: Final = 0.03  # share of the benign windows that the tail is fitted to
LEAST_SCALE: Final = 0.1  # binary orders of magnitude: least scale of a tail, for IDs that never deviate
AGREEMENT: Final = 0.5  # largest binary logarithm of an ID's mean gap in a log ÷ its mean gap in training
_TIMES: Final = ("gap", "longest_gap", "longest_silence")  # arrays of `Rules`
_ROUNDED: Final = 1000.0  # parts of an octave that times are rounded to, so that a result file stays small
_GAP_MEAN, _SILENCE = (BEHAVIOUR.index(name) for name in ("gap_mean", "silence"))


class Tail(NamedTuple):
    """The tail of a rule's values over benign windows, taken for exponential.

    Attributes:
        level: Value where the tail begins.
        rarity: Decimal logarithm of windows for each window above `level`.
        scale: Mean excess over `level`.
    """

    level: float
    rarity: float
    scale: float

    @classmethod
    def of(cls, values: Floats) -> Self:
        """Fits the tail to values [R] of benign windows; values of -inf count as windows only."""
        finite = np.sort(values[np.isfinite(values)])
        if not len(finite):
            return cls(0.0, math.log10(len(values) + 1), LEAST_SCALE)
        level = float(finite[int((1 - TAIL_SHARE) * len(finite))])
        above = finite[finite > level]
        excess = float((above - level).mean()) if len(above) else 0.0
        return cls(level, math.log10((len(values) + 1) / (len(above) + 1)), max(excess, LEAST_SCALE))

    def rarities(self, values: Floats) -> Floats:
        """Returns decimal logarithms of windows for each window with such a value; 0 below the tail."""
        beyond = np.maximum(values - self.level, 0.0)
        rarities: Floats = np.where(values > self.level, self.rarity + beyond / (self.scale * math.log(10)), 0.0)
        return rarities


_NO_TAIL: Final = Tail(0.0, 0.0, LEAST_SCALE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rules:
    """The usual timing of a bus's IDs, and how far other benign windows deviate from it.

    Attributes:
        ids: [V] CAN IDs of benign training windows, ascending.
        gap: [V] mean over benign windows of the mean gap between frames; like all times, a binary logarithm of seconds.
        longest_gap: [V] largest mean gap of a benign window; NaN for an ID that is not punctual.
        longest_silence: [V] longest silence up to the end of a benign window; NaN for an ID that is not punctual.
        silent: Tail of silence ÷ longest silence.
        late: Tail of mean gap ÷ largest mean gap.
        new: Rarity of a benign window with an ID outside `ids`.
    """

    ids: Ints
    gap: Floats
    longest_gap: Floats
    longest_silence: Floats
    silent: Tail = _NO_TAIL
    late: Tail = _NO_TAIL
    new: float = 0.0

    @classmethod
    def fit(cls, flat: FlatGraphs, split: Split) -> Self | None:
        """Measures the benign windows of training, and the deviations of the benign windows of validation.

        Returns:
            The rules; None where validation has too few benign windows.
        """
        validation = split.validation[flat.label[split.validation] == 0]
        if len(validation) < LEAST_WINDOWS:
            return None
        timing = cls(**_timing(flat, split.train))
        values = timing._values(flat, validation)
        num_new = int(np.count_nonzero(values.of_windows(values.new)))
        rare = FLAGGED + 1 if not num_new else math.log10(len(validation) / num_new)
        return cls(
            **{name: getattr(timing, name) for name in ("ids", *_TIMES)},
            silent=Tail.of(values.of_windows(values.silent, values.absent)),
            late=Tail.of(values.of_windows(values.late)),
            new=rare,
        )

    def rarities(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the rarity [I, 3] of each ID of the windows by each of `RULES`.

        Window after window; in each window the nodes, then the absences.
        """
        values = self._values(flat, rows)
        table = np.zeros((len(values.silent) + len(values.absent), len(RULES)))
        of_nodes, of_absences = values.places()
        table[of_nodes] = np.column_stack(
            [self.silent.rarities(values.silent), self.late.rarities(values.late), self.new * (values.new > 0)]
        )
        table[of_absences, 0] = self.silent.rarities(values.absent)
        return table

    def window_rarities(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the rarity [R] of each window by the rule that finds it rarest."""
        ends = np.cumsum(flat.num_ids[rows])
        largest = self.rarities(flat, rows).max(axis=1, initial=0.0)
        return np.maximum.reduceat(largest, ends - flat.num_ids[rows]) if len(rows) else np.empty(0)

    def plain(self) -> dict[str, Any]:
        """Returns the rules as strict JSON."""
        times = {name: _plain(getattr(self, name)) for name in _TIMES}
        return {"ids": self.ids.tolist(), **times, SILENT: list(self.silent), LATE: list(self.late), NEW: self.new}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Reads what `plain` wrote."""
        times = {name: np.array(plain[name], np.float64) for name in _TIMES}
        return cls(ids=np.array(plain["ids"], np.int64), **times, silent=Tail(*plain[SILENT]), late=Tail(*plain[LATE]),
                   new=plain[NEW])  # fmt: skip

    def _values(self, flat: FlatGraphs, rows: Ints) -> _Values:
        nodes, absences = members(flat.node_ptr, rows), members(flat.absent_ptr, rows)
        index, known = self._find(flat)
        code = flat.node_code[nodes.positions]
        at, is_known = index[code], known[code]
        # An ID that has just appeared says nothing about the bus: a fuzzer makes up most IDs of a window.
        settled = flat.past_windows[nodes.positions] >= SETTLED_WINDOWS
        shares = [_share(is_known & chosen, chosen, nodes) for chosen in (settled, np.ones_like(settled))]
        on_known_bus = np.where(np.isnan(shares[0]), shares[1], shares[0]) > LEAST_KNOWN_SHARE
        known_bus = np.repeat(on_known_bus, nodes.sizes)
        now = flat.behaviour[nodes.positions].astype(np.float64)
        # In another vehicle, an ID of the same number is another message, of another period.
        past = flat.past[nodes.positions, _GAP_MEAN]
        agrees = is_known & settled & (np.abs(past - self.gap[at]) <= AGREEMENT)
        absent = flat.absent_code[absences.positions]
        silence = flat.absent_silence[absences.positions] - self.longest_silence[index[absent]]
        counts = known[absent] & np.repeat(on_known_bus, absences.sizes)
        return _Values(
            nodes=nodes,
            absences=absences,
            silent=_or_nothing(now[:, _SILENCE] - self.longest_silence[at], agrees),
            late=_or_nothing(now[:, _GAP_MEAN] - self.longest_gap[at], agrees),
            new=(known_bus & ~is_known).astype(np.float64),
            absent=_or_nothing(silence, counts),
        )

    def _find(self, flat: FlatGraphs) -> tuple[Ints, Any]:
        """Returns, for each ID of a data set [K], its position in `ids`, and whether it is there."""
        index = np.minimum(np.searchsorted(self.ids, flat.ids), max(len(self.ids) - 1, 0))
        return index, self.ids[index] == flat.ids


class _Values(NamedTuple):
    """What the rules compare with their tails; -inf where there is nothing to compare."""

    nodes: Members
    absences: Members
    silent: Floats  # [N]
    late: Floats  # [N]
    new: Floats  # [N] 1 for an unknown ID on a known bus
    absent: Floats  # [A]

    def of_windows(self, of_nodes: Floats, of_absences: Floats | None = None) -> Floats:
        """Returns the largest value of each window [R]."""
        largest = np.maximum.reduceat(of_nodes, self.nodes.starts)
        if of_absences is not None:
            window = np.repeat(np.arange(len(largest)), self.absences.sizes)
            np.maximum.at(largest, window, of_absences)
        return largest

    def places(self) -> tuple[Ints, Ints]:
        """Returns the places of the nodes [N] and of the absences [A] among the IDs of the windows [I]."""
        windows = [np.repeat(np.arange(len(part.sizes)), part.sizes) for part in (self.nodes, self.absences)]
        order = np.argsort(np.concatenate(windows), kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return place[: len(windows[0])], place[len(windows[0]) :]


@dataclass(frozen=True, kw_only=True)
class RuleScale:
    """The place of rarities on the scale of a network's scores.

    Attributes:
        threshold: Score of a window that is rarer than one in 10 ** `FLAGGED`.
        decade: Difference of scores for ten times as few windows.
    """

    threshold: float
    decade: float

    @classmethod
    def of(cls, benign: Floats, threshold: float) -> Self:
        """Measures a network's scores [R] of benign validation windows, at least one."""
        # Each median excess halves the number of windows.
        scale = ScoreScale.of(benign).scale
        return cls(threshold=threshold, decade=scale / math.log10(2) if scale > 0 else 1.0)

    def raised(self, score: Floats, rarity: Floats) -> Floats:
        """Returns scores [R], higher where a rule finds the window rare."""
        by_rule = self.threshold + self.decade * (rarity - FLAGGED)
        # Just above: a threshold flags what is above it.
        by_rule = np.where(rarity >= FLAGGED, np.maximum(by_rule, np.nextafter(self.threshold, np.inf)), by_rule)
        raised: Floats = np.where(rarity >= TOLD, np.maximum(score, by_rule), score)
        return raised

    def plain(self) -> dict[str, float]:
        """Returns the scale as strict JSON."""
        return {"threshold": self.threshold, "decade": self.decade}


@dataclass(frozen=True, kw_only=True, eq=False)
class RaisedScores:
    """The rules of a finished run, applied to the scores of one of its networks."""

    rules: Rules
    scale: RuleScale

    @classmethod
    def from_judgement(cls, judgement: Mapping[str, Any]) -> Self | None:
        """Reads the rules from the judgement of a run; None for a run without rules."""
        if "rules" not in judgement or "rule_scale" not in judgement:
            return None
        return cls(rules=Rules.from_plain(judgement["rules"]), scale=RuleScale(**judgement["rule_scale"]))

    def __call__(self, flat: FlatGraphs, rows: Ints, score: Floats) -> Floats:
        """Raises the network's scores [R] of windows that a rule finds rare."""
        return self.scale.raised(score, self.rules.window_rarities(flat, rows))

    def contributions(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns what each ID of the windows adds to the scores by each of `RULES`, [I, 3]; 0 where no rule flags."""
        rarities = self.rules.rarities(flat, rows)
        added: Floats = np.where(rarities >= FLAGGED, self.scale.decade * rarities, 0.0)
        return added


def _timing(flat: FlatGraphs, train: Ints) -> dict[str, Any]:
    """Measures the timing of the IDs of the benign windows among `train`."""
    benign = train[flat.label[train] == 0]
    nodes, absences = members(flat.node_ptr, benign), members(flat.absent_ptr, benign)
    code, absent = flat.node_code[nodes.positions], flat.absent_code[absences.positions]
    now = flat.behaviour[nodes.positions].astype(np.float64)
    gap, has_gap = now[:, _GAP_MEAN], ~np.isnan(now[:, _GAP_MEAN])
    count = np.bincount(code[has_gap], minlength=len(flat.ids))
    mean = np.bincount(code[has_gap], weights=gap[has_gap], minlength=len(flat.ids)) / np.maximum(count, 1)
    longest_gap, longest_silence = np.full((2, len(flat.ids)), -np.inf)
    np.maximum.at(longest_gap, code[has_gap], gap[has_gap])
    np.maximum.at(longest_silence, code, now[:, _SILENCE])
    np.maximum.at(longest_silence, absent, flat.absent_silence[absences.positions])
    in_log = np.zeros((len(flat.sources), len(flat.ids)), np.bool_)
    in_log[np.repeat(flat.source[benign], nodes.sizes), code] = True
    punctual = (longest_silence <= mean + PUNCTUAL) & (in_log.sum(axis=0) >= PUNCTUAL_LOGS) & (count > 0)
    known = np.isin(flat.ids, known_ids(flat, train))
    longest = [np.where(punctual, each, np.nan) for each in (longest_gap, longest_silence)]
    rounded = [np.ceil(each[known] * _ROUNDED) / _ROUNDED for each in (mean, *longest)]
    return {"ids": flat.ids[known], **dict(zip(_TIMES, rounded, strict=True))}


def _share(part: Any, whole: Any, nodes: Members) -> Floats:
    """Returns the share [R] of `part` in `whole` [N] in each window; NaN where a window has nothing of the whole."""
    sums = [np.add.reduceat(each.astype(np.float64), nodes.starts) for each in (part, whole)]
    shares: Floats = np.divide(sums[0], sums[1], out=np.full(len(sums[0]), np.nan), where=sums[1] > 0)
    return shares


def _or_nothing(values: Floats, counts: Any) -> Floats:
    compared: Floats = np.where(counts & ~np.isnan(values), values, -np.inf)
    return compared


def _plain(values: Floats) -> list[float | None]:
    """Returns None for NaN, which JSON has no number for."""
    return [None if math.isnan(value) else value for value in values.tolist()]
