"""Values that follow from the values of other IDs: a speed from the wheel speeds in another message.

A forger who has silenced a sender may keep its rhythm, its counter, its checksum and its range. But the forged value
follows its own course, and the rest of the bus follows the car. So each value of a payload is a line fit of at most
three values of other IDs, if such a fit holds in all benign training drives. Each ID gives the
values of its last frame at the end of a window.

Source: the values of a line are chosen one by one, each time the value that explains most of the rest (orthogonal
matching pursuit: Pati, Rezaiifar and Krishnaprasad, 1993).

Shapes: V IDs of the vocabulary, R windows with N nodes, F values (a word of `WORDS` of an ID) of K IDs, T lines, S
sources of a line, P parts of the training logs, Q judged values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple, Self

import numpy as np

from can_train.fit.packing import members
from can_train_tasks.can.data.behaviour import WORDS, word_values
from can_train_tasks.can.data.graphs import Bools, FlatGraphs, Floats, Ints
from can_train_tasks.can.inputs import PUNCTUAL_LOGS

MOST_SOURCES: Final = 3  # on 8 simulated buses, lines of 8 values find no more attacks
# A further source explains at least this share of the squares that the sources before it leave. Smaller shares are
# chance, and on another drive they are wrong.
LEAST_EXPLAINED: Final = 0.05
# Share of a value's variance that lies inside the parts of the logs. A fuel level, which is constant in a drive, tells
# the drives apart, and so seems to explain all that differs between drives.
LEAST_MOVING: Final = 0.25
PRECISE: Final = 0.25  # of a value's range: a line whose deviations may be larger finds no plausible forgery
CALM_WINDOWS: Final = 20  # windows after an attack, in which a forged frame may still be the last frame of its ID
LEAST_PRESENT: Final = 0.8  # share of a part's windows that have a value; later windows of a drive have all values
LEAST_WINDOWS: Final = 200  # training windows of a line
_RIDGE: Final = 1e-4  # for sources that are copies of each other, in units of their variance
_LEAST_NORM: Final = 1e-3  # a value that its sources explain up to this share of its spread explains nothing more
_ROUNDING: Final = 1.0  # least deviation of a part, since a target and its sources are whole numbers
_MOST_NUMBERS: Final = 2**23  # in the table that lines are fitted to: 64 MB. Of longer logs, every k-th window counts
_WINDOWS_AT_A_TIME: Final = 1024  # whose values are in memory at a time


class Judged(NamedTuple):
    """Values in windows that a line tells."""

    node: Ints  # [Q] position of the value's ID among the nodes of the windows
    line: Ints  # [Q] number of the line
    expected: Floats  # [Q] the value that follows from other IDs
    deviation: Floats  # [Q] binary logarithm of the distance from it ÷ `Context.largest`


class _LastFrames(NamedTuple):
    """The last frames of K IDs at the ends of R windows."""

    payload: Ints  # [R, K] first eight bytes, the first byte in the lowest bits
    is_there: Bools  # [R, K] False for an ID that the window lacks, and that is not regular
    node: Ints  # [R, K] position of the ID among the nodes of the windows; -1: not in the window

    @classmethod
    def of(cls, flat: FlatGraphs, rows: Ints, ids: Ints) -> Self:
        column = np.full(len(flat.ids), -1)
        found = np.isin(flat.ids, ids)
        column[found] = np.searchsorted(ids, flat.ids[found])
        shape = (len(rows), len(ids))
        last = cls(np.zeros(shape, np.int64), np.zeros(shape, np.bool_), np.full(shape, -1))
        nodes, absences = members(flat.node_ptr, rows), members(flat.absent_ptr, rows)
        for part, code, payload in (
            (nodes, flat.node_code, flat.payload),
            (absences, flat.absent_code, flat.absent_payload),
        ):
            own = column[code[part.positions]]
            chosen = np.flatnonzero(own >= 0)
            at = np.repeat(np.arange(len(rows)), part.sizes)[chosen], own[chosen]
            last.payload[at], last.is_there[at] = payload[part.positions[chosen]], True
            if part is nodes:
                last.node[at] = chosen
        return last

    def readings(self, column: Ints, word: Ints) -> Floats:
        """Returns values [R, F] by the column of their ID and their word; NaN where the ID has no last frame."""
        values = word_values(self.payload[:, column], word)
        readings: Floats = np.where(self.is_there[:, column], values, np.nan)
        return readings


class _Part(NamedTuple):
    """Calm windows [R] of a part of a log."""

    has: Bools  # [F] values that the part has
    table: Floats  # [R, F + 1] values in units of their spread, 0 for those that it lacks; and a column of ones


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Values that follow from values of other IDs.

    Attributes:
        can_id: [F] ID of each value.
        word: [F] position of each value in `WORDS`.
        target: [T] the value that a line tells. The targets of one ID have no byte in common.
        source: [T, S] the values that it follows from.
        weight: [T, S] weights of the sources; 0 fills up.
        constant: [T] added to the sum of the weighted sources.
        largest: [T] largest deviation of the target to be expected in a benign window.
    """

    can_id: Ints
    word: Ints
    target: Ints
    source: Ints
    weight: Floats
    constant: Floats
    largest: Floats

    @classmethod
    def none(cls) -> Self:
        """Returns a context without lines."""
        nothing, numbers = np.empty(0, np.int64), np.empty(0)
        wide = (0, MOST_SOURCES)
        return cls(can_id=nothing, word=nothing, target=nothing, source=np.empty(wide, np.int64),
                   weight=np.empty(wide), constant=numbers, largest=numbers)  # fmt: skip

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints, part: Ints, values: tuple[Ints, Ints]) -> Self:
        """Fits the lines to the calm ones of the training windows `rows` [R].

        Args:
            flat: The windows.
            rows: Training windows, ascending.
            part: [R] the part of the logs that each window belongs to (see `_parts_of_logs` of the rules).
            values: IDs [F], ascending, and words [F] of the values that move steadily.
        """
        can_id, word = values
        chosen = np.flatnonzero(calm_windows(flat, rows))
        chosen = chosen[:: 1 + len(chosen) * len(word) // _MOST_NUMBERS]
        if not len(chosen) or not len(word):
            return cls.none()
        ids, column = np.unique(can_id, return_inverse=True)
        readings = _LastFrames.of(flat, rows[chosen], ids).readings(column, word)
        lines = _fitted(readings, part[chosen], can_id)
        kept = _without_overlaps(sorted(lines, key=lambda line: line.imprecision), can_id, word)
        if not kept:
            return cls.none()
        target, source, weight, constant, largest, _ = zip(*kept, strict=True)
        return cls(can_id=can_id, word=word, target=np.array(target), source=np.array(source), weight=np.array(weight),
                   constant=np.array(constant), largest=np.array(largest))  # fmt: skip

    def __len__(self) -> int:
        return len(self.target)

    @property
    def num_ids(self) -> int:
        """Number of IDs with a value that follows from other IDs."""
        return len(np.unique(self.can_id[self.target]))

    def keep(self, lines: Bools) -> Self:
        """Returns the context with the chosen lines [T] only, without the values that no line needs."""
        target, source = self.target[lines], self.source[lines]
        used = np.unique(np.concatenate([target, source.ravel()]))
        return type(self)(can_id=self.can_id[used], word=self.word[used], target=np.searchsorted(used, target),
                          source=np.searchsorted(used, source), weight=self.weight[lines],
                          constant=self.constant[lines], largest=self.largest[lines])  # fmt: skip

    def judge(self, flat: FlatGraphs, rows: Ints) -> Iterator[Judged]:
        """Yields the values of the windows `rows` [R] that lines tell, some windows at a time, with their nodes."""
        if not len(self):
            return
        ids, column = np.unique(self.can_id, return_inverse=True)
        nodes = 0
        for begin in range(0, len(rows), _WINDOWS_AT_A_TIME):
            some = rows[begin : begin + _WINDOWS_AT_A_TIME]
            last = _LastFrames.of(flat, some, ids)
            readings = last.readings(column, self.word)
            # Sums in a fixed order are equal for any cut of a log into blocks.
            expected = self.constant + sum(
                self.weight[:, place] * readings[:, self.source[:, place]] for place in range(self.source.shape[1])
            )
            node = last.node[:, column[self.target]]
            at, line = np.nonzero((node >= 0) & ~np.isnan(expected))
            distance = np.abs(readings[at, self.target[line]] - expected[at, line])
            with np.errstate(divide="ignore"):
                deviation = np.log2(distance / self.largest[line])
            yield Judged(nodes + node[at, line], line, expected[at, line], deviation)
            nodes += int((flat.node_ptr[some + 1] - flat.node_ptr[some]).sum())

    def largest_deviations(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the largest deviation [T] of each line's target in windows; -inf without such a value."""
        largest = np.full(len(self), -np.inf)
        for judged in self.judge(flat, rows):
            np.maximum.at(largest, judged.line, judged.deviation)
        return largest

    def of_nodes(self, flat: FlatGraphs, rows: Ints) -> tuple[Floats, Ints]:
        """Returns the largest deviation [N] of each node's values, -inf without a line, and its word [N]."""
        num_nodes = int((flat.node_ptr[rows + 1] - flat.node_ptr[rows]).sum())
        deviation, word = np.full(num_nodes, -np.inf), np.zeros(num_nodes, np.int64)
        for judged in self.judge(flat, rows):
            np.maximum.at(deviation, judged.node, judged.deviation)
            is_largest = judged.deviation == deviation[judged.node]
            word[judged.node[is_largest]] = self.word[self.target[judged.line[is_largest]]]
        return deviation, word

    def expected(self, flat: FlatGraphs, row: int) -> dict[tuple[int, int], float]:
        """Returns the values of a window that follow from other IDs, by the places of the node and of the word."""
        return {
            (int(node), int(self.word[self.target[line]])): float(value)
            for judged in self.judge(flat, np.array([row]))
            for node, line, value in zip(judged.node, judged.line, judged.expected, strict=True)
        }

    def plain(self) -> dict[str, Any]:
        """Returns the lines as strict JSON."""
        return {name: value.tolist() for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Reads what `plain` wrote."""
        kinds = {name: value.dtype for name, value in vars(cls.none()).items()}
        arrays = {name: np.array(plain[name], kind) for name, kind in kinds.items()}
        wide = {name: arrays[name].reshape(-1, MOST_SOURCES) for name in ("source", "weight")}
        return cls(**{**arrays, **wide})


def calm_windows(flat: FlatGraphs, rows: Ints) -> Bools:
    """Returns whether the drive has no attack in a window nor in the `CALM_WINDOWS` before it, [R]."""
    attacks = np.concatenate([[0], np.cumsum(flat.label != 0)])
    first = np.searchsorted(flat.drive, flat.drive[rows])
    calm: Bools = attacks[rows + 1] == attacks[np.maximum(rows - CALM_WINDOWS, first)]
    return calm


class _Line(NamedTuple):
    """A fitted line; the arrays have S numbers."""

    target: int
    source: Sequence[int]
    weight: Sequence[float]
    constant: float
    largest: float
    imprecision: float  # largest deviation ÷ range of the target


def _fitted(readings: Floats, part: Ints, can_id: Ints) -> Iterator[_Line]:
    """Fits a line to each value [R, F] that moves inside the parts, from values of other IDs in the same parts."""
    there = ~np.isnan(readings)
    counts = np.maximum(there.sum(axis=0), 1)
    mean = np.where(there, readings, 0.0).sum(axis=0) / counts
    centred = np.where(there, readings - mean, 0.0)
    spread = np.sqrt(np.square(centred).sum(axis=0) / counts)
    spread[spread == 0] = 1.0
    parts = [_part_of(centred[rows] / spread, there[rows]) for rows in (part == each for each in np.unique(part))]
    has = np.array([each.has for each in parts])  # [P, F]
    squares: Floats = np.sum([each.table.T @ each.table for each in parts], axis=0)
    moving = _moves(parts, has, squares)
    # Values of the same parts have sums over the same windows.
    _, group = np.unique(has, axis=1, return_inverse=True)
    for target in np.flatnonzero(moving & (has.sum(axis=0) >= PUNCTUAL_LOGS)).tolist():
        own = np.flatnonzero(has[:, target])
        candidates = np.flatnonzero(moving & (group == group[target]) & (can_id != can_id[target]))
        windows = sum(len(parts[each].table) for each in own)
        source = _sources(squares, target, candidates, windows) if windows >= LEAST_WINDOWS else []
        if source:
            line = _line([parts[each].table for each in own], target, source, _ROUNDING / float(spread[target]))
            if line.imprecision < PRECISE:
                yield _in_raw_units(line, mean, spread)


def _part_of(table: Floats, there: Bools) -> _Part:
    has: Bools = there.mean(axis=0) >= LEAST_PRESENT
    whole = there[:, has].all(axis=1)
    has &= whole.any()
    return _Part(has, np.column_stack([np.where(has, table[whole], 0.0), np.ones(np.count_nonzero(whole))]))


def _moves(parts: Sequence[_Part], has: Bools, squares: Floats) -> Bools:
    """Returns whether values [F] differ more inside the parts than between them."""
    counts = np.array([len(each.table) for each in parts])
    sums = np.array([each.table[:, :-1].sum(axis=0) for each in parts])
    whole = np.diag(squares)[:-1]
    inside = whole - np.divide(sums**2, counts[:, None], out=np.zeros_like(sums), where=counts[:, None] > 0).sum(axis=0)
    total = whole - sums.sum(axis=0) ** 2 / np.maximum(counts @ has, 1)
    moves: Bools = (inside >= LEAST_MOVING * total) & (total > 0)
    return moves


def _sources(squares: Floats, target: int, candidates: Ints, windows: int) -> list[int]:
    """Chooses the sources of a line one by one, from sums of squares and products [F + 1, F + 1]."""
    ones = len(squares) - 1
    sums = squares[candidates, ones]
    norm = np.sqrt(np.maximum(squares[candidates, candidates] - sums**2 / windows, 0.0))
    usable = norm > _LEAST_NORM * math.sqrt(windows)
    candidates, norm = candidates[usable], norm[usable]
    chosen = [ones]
    weights = np.array([squares[ones, target] / windows])
    left = float(squares[target, target] - weights[0] * squares[ones, target])
    while len(candidates) and len(chosen) <= MOST_SOURCES:
        explains = np.abs(squares[candidates, target] - squares[candidates[:, None], chosen] @ weights) / norm
        explains[np.isin(candidates, chosen)] = 0.0
        best = int(explains.argmax())
        if explains[best] ** 2 < LEAST_EXPLAINED * left or explains[best] == 0:
            break
        chosen.append(int(candidates[best]))
        own = squares[chosen][:, chosen]
        weights = _solved(own, squares[chosen, target], windows)
        left = float(squares[target, target] - 2 * weights @ squares[chosen, target] + weights @ own @ weights)
    return chosen[1:]


def _line(tables: Sequence[Floats], target: int, source: Sequence[int], rounding: float) -> _Line:
    """Fits a line to the parts [P] of the logs, and measures each part's deviations from a line of the other parts.

    Smaller deviations than `rounding` count as such.
    """
    columns = [-1, *source]
    squares = np.array([table[:, columns].T @ table[:, columns] for table in tables])
    products = np.array([table[:, columns].T @ table[:, target] for table in tables])
    counts = [len(table) for table in tables]
    windows = sum(counts)
    deviations: list[float] = []
    for place, table in enumerate(tables):
        rest, own = squares.sum(axis=0) - squares[place], products.sum(axis=0) - products[place]
        weights = _solved(rest, own, windows - counts[place])
        deviations.append(float(np.abs(table[:, target] - table[:, columns] @ weights).max(initial=rounding)))
    constant, *weight = _solved(squares.sum(axis=0), products.sum(axis=0), windows).tolist()
    largest = max(deviations)
    # The next log may exceed the largest deviation as the largest exceeds the median.
    largest *= largest / median(deviations)
    span = float(np.ptp(np.concatenate([table[:, target] for table in tables])))
    return _Line(target, source, weight, constant, largest, largest / span if span else math.inf)


def _solved(squares: Floats, products: Floats, windows: int) -> Floats:
    """Returns the constant and the weights of the sources, which minimise the squares of the deviations."""
    ridge = np.full(len(squares), _RIDGE * windows)
    ridge[0] = 0.0
    return np.asarray(np.linalg.solve(squares + np.diag(ridge), products), np.float64)


def _in_raw_units(line: _Line, mean: Floats, spread: Floats) -> _Line:
    own = spread[line.target]
    weight = own * np.array(line.weight) / spread[list(line.source)]
    constant = mean[line.target] + own * line.constant - weight @ mean[list(line.source)]
    missing = MOST_SOURCES - len(line.source)
    return line._replace(
        source=[*line.source, *[line.source[0]] * missing],
        weight=[*weight.tolist(), *[0.0] * missing],
        constant=float(constant),
        largest=float(own * line.largest),
    )


def _without_overlaps(lines: Sequence[_Line], can_id: Ints, word: Ints) -> list[_Line]:
    """Leaves out lines whose target shares a byte with the target of an earlier line."""
    taken: dict[int, set[str]] = {}
    kept = []
    for line in lines:
        own = taken.setdefault(int(can_id[line.target]), set())
        own_bytes = set(WORDS[word[line.target]].split("-"))
        if not own & own_bytes:
            kept.append(line)
            own |= own_bytes
    return kept
