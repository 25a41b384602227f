"""Rules beside a network: a known ID is silent or late, a known bus has a new ID, a counter misses a step, a checksum
is wrong, or a value in a payload jumps, or disagrees with the values of other IDs.

A network that has learned from floods and forged frames overlooks frames that are missing, and frames of a forger who
has silenced the real sender and keeps its rhythm. But a forger who takes a value over, and leaves it again, makes the
value jump, and meanwhile the value disagrees with the other messages (see `Context`). A rule measures how rare a window
is among benign windows, and raises the network's score where the window is rarer than one in a million. Counters and
checksums are checked exactly: an ID has the checks that it never breaks in benign windows.

Shapes: V IDs of the vocabulary, K IDs of a data set, R windows, N nodes and A absences of the windows, I = N + A, J
words of a payload (`WORDS`), C checks of a payload (`CHECKS`), P parts of the training logs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from can_train.errors import CheckpointError
from can_train.fit.packing import Members, members
from can_train_tasks.can.data.behaviour import BEHAVIOUR, HIGH_BYTES, LOW_BYTES, PAIRS, WORDS
from can_train_tasks.can.data.graphs import LEAST_VALIDATION, Bools, FlatGraphs, Floats, Ints
from can_train_tasks.can.data.payload_fields import CHECKS, CHECKSUM_BITS, COUNTER_BITS, COUNTERS, MAX_PAYLOAD_BYTES
from can_train_tasks.can.evaluation.calibration import ScoreScale
from can_train_tasks.can.evaluation.context import Context, calm_windows
from can_train_tasks.can.inputs import LEAST_KNOWN_SHARE, PUNCTUAL, PUNCTUAL_LOGS, SETTLED_WINDOWS, known_ids

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Split

SILENT, LATE, NEW, COUNTER, CHECKSUM = "silent", "late", "new", "counter", "checksum"
JUMP, CONTEXT = "jump", "context"
RULES: Final = (SILENT, LATE, NEW, COUNTER, CHECKSUM, JUMP, CONTEXT)
# Decimal logarithms of benign windows for each window that a rule takes for benign. On other drives of 18 simulated
# vehicles, rules that flag one window in 100,000 raise five times as many false alarms, and find as many attacks.
FLAGGED: Final = 6.0
TOLD: Final = 3.0  # windows that are less rare keep the network's score
TAIL_SHARE: Final = 0.03  # share of the benign windows that the tail is fitted to
LEAST_SCALE: Final = 0.1  # binary orders of magnitude: least scale of a tail, for IDs that never deviate
AGREEMENT: Final = 0.5  # largest binary logarithm of an ID's mean gap in a log ÷ its mean gap in training
# A word of a payload is a steady value if its largest jump in benign training is at most this many times its median
# largest jump in a log. Other words are several values, statuses, or noise.
STEADY: Final = 3.0
# Jumps that add to the largest jump, so that a value of few levels is no sign by its rounding.
LEVELS: Final = 2.0
# Binary logarithm of seconds: longest mean gap of an ID whose values are compared. After an attack that also forges
# slow IDs, the next true value jumps when the attack is long over.
LONGEST_PERIOD: Final = -2.0
LEAST_MOVES: Final = 2  # windows in each log, in which a word must jump to be a value
# Two bytes are one value if the pair jumps by less than this share of the jumps of its high byte.
CARRIED: Final = 0.5
LARGEST_JUMP: Final = 0.25  # of the range of a word: beyond it, words are statuses or checksums
# A word whose jumps in validation exceed those of training by more than this factor is left out.
UNSTEADY: Final = 1.2
# Share of known IDs, up to which a bus may be another vehicle: by a standard such as J1939, many IDs are the same
# there, with values of other ranges.
SAME_VEHICLE: Final = 0.9
BROKEN: Final = math.inf  # rarity of an ID that breaks a check: in benign windows no ID breaks any
_BROKEN_DECADES: Final = 1.0  # distance of a window with a broken check from the threshold
LEAST_CHECKED: Final = 50  # undisturbed benign training windows with an ID, without which it has no checks
MOST_BROKEN: Final = 0.001  # of these windows: logs lack frames
# Different payloads, without which a checksum may fit by chance: two payloads fit one of the 16 checks of checksums at
# every 16th ID.
LEAST_PAYLOADS: Final = 8
_WHOLE: Final = 1e-3  # largest distance of a mean of bytes from a whole number, where all bytes are equal
_BYTE: Final = 256.0
_RANGES: Final = np.array([_BYTE**2] * (2 * PAIRS) + [_BYTE] * (PAIRS + 1))  # [J]
# [2 * PAIRS] the word that is the most significant byte of each pair
_HIGH_BYTES: Final = 2 * PAIRS + HIGH_BYTES[: 2 * PAIRS]
# The words whose most significant byte is a byte, for each byte.
_BEGIN_WITH: Final = [[word for word, name in enumerate(WORDS) if name.split("-")[0] == str(byte + 1)]
                      for byte in range(PAIRS + 1)]  # fmt: skip
_NODES_AT_A_TIME: Final = 2**16  # whose jumps are in memory at a time: 12 MB as 8-byte numbers
_TIMES: Final = ("gap", "longest_gap", "longest_silence")  # arrays of `Rules`
_ROUNDED: Final = 1000.0  # parts of an octave that times are rounded to, so that a result file stays small
_GAP_MEAN, _SILENCE, _BITS_CHANGED = (BEHAVIOUR.index(name) for name in ("gap_mean", "silence", "bits_changed"))


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


class RareWindows(NamedTuple):
    """What the rules tell of windows."""

    rarity: Floats  # [R] by the rules that know a tail of benign windows, and by new IDs
    is_broken: Bools  # [R] whether an ID breaks a counter or a checksum
    is_foreign: Bools  # [R] whether the bus is another vehicle's, of whose values the rules know nothing


_NO_TAIL: Final = Tail(0.0, 0.0, LEAST_SCALE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rules:
    """The usual timing of a bus's IDs, and how far other benign windows deviate from it.

    Attributes:
        ids: [V] CAN IDs of benign training windows, ascending.
        gap: [V] mean over benign windows of the mean gap between frames; like all times, a binary logarithm of seconds.
        longest_gap: [V] largest mean gap of a benign window; NaN for an ID that is not punctual.
        longest_silence: [V] longest silence up to the end of a benign window; NaN for an ID that is not punctual.
        largest_jump: [V, J] largest jump of each word to be expected in a benign window (see `_steady_jumps`); NaN for
            a word that is no steady value.
        silent: Tail of silence ÷ longest silence.
        late: Tail of mean gap ÷ largest mean gap.
        jump: Tail of the binary logarithm of jump ÷ largest jump.
        lines: Values that follow from values of other IDs.
        context: Tail of the binary logarithm of deviation ÷ largest deviation from these lines.
        checks: [V] bits of the `CHECKS` that the ID keeps in benign windows.
        new: Rarity of a benign window with an ID outside `ids`.
    """

    ids: Ints
    gap: Floats
    longest_gap: Floats
    longest_silence: Floats
    largest_jump: Floats
    checks: NDArray[np.uint64]
    silent: Tail = _NO_TAIL
    late: Tail = _NO_TAIL
    jump: Tail = _NO_TAIL
    lines: Context = field(default_factory=Context.none)
    context: Tail = _NO_TAIL
    new: float = 0.0

    @classmethod
    def fit(cls, flat: FlatGraphs, split: Split) -> Self | None:
        """Measures the benign windows of training, and the deviations of the benign windows of validation.

        Returns:
            The rules; None where validation has too few benign windows.
        """
        validation = split.validation[flat.label[split.validation] == 0]
        if len(validation) < LEAST_VALIDATION:
            return None
        timing = _timing(flat, split.train)
        num_ids = len(timing["ids"])
        trained, later = (_Undisturbed.of(flat, rows, timing["ids"]) for rows in (split.train, split.validation))
        parts = _parts_of_logs(flat, split.train)
        jumps = _steady_jumps(flat, trained, later, parts, num_ids)
        jumps[~(timing["gap"] <= LONGEST_PERIOD)] = np.nan
        checks = _kept_checks(flat, trained, later, num_ids)
        lines = _kept_lines(flat, split, parts[0], timing["ids"], jumps)
        usual = cls(**timing, largest_jump=jumps, checks=checks, lines=lines)
        values = usual._values(flat, validation)
        num_new = int(np.count_nonzero(values.of_windows(values.new)))
        rare = FLAGGED + 1 if not num_new else math.log10(len(validation) / num_new)
        return cls(
            **timing,
            largest_jump=usual.largest_jump,
            checks=checks,
            lines=lines,
            silent=Tail.of(values.of_windows(values.silent, values.absent)),
            late=Tail.of(values.of_windows(values.late)),
            jump=Tail.of(values.of_windows(np.where(_undisturbed(flat, validation), values.jump, -np.inf))),
            context=Tail.of(np.where(calm_windows(flat, validation), values.of_windows(values.context), -np.inf)),
            new=rare,
        )

    def rarities(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the rarity [I, 7] of each ID of the windows by each of `RULES`.

        Window after window; in each window the nodes, then the absences.
        """
        return self._rarities(self._values(flat, rows))

    def window_rarities(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the rarity [R, 7] of each window by each of `RULES`."""
        return self._of_windows(self._values(flat, rows))

    def windows(self, flat: FlatGraphs, rows: Ints) -> RareWindows:
        """Returns how rare windows [R] are by the rule that finds them rarest."""
        values = self._values(flat, rows)
        rarities = self._of_windows(values)
        is_broken = rarities == BROKEN
        rarity = np.where(is_broken, 0.0, rarities).max(axis=1)
        return RareWindows(rarity, is_broken.any(axis=1), ~values.same_vehicle)

    def _of_windows(self, values: _Values) -> Floats:
        """Returns the rarity [R, 7] of each window."""
        num_ids = values.nodes.sizes + values.absences.sizes
        if not len(num_ids):
            return np.empty((0, len(RULES)))
        return np.maximum.reduceat(self._rarities(values), np.cumsum(num_ids) - num_ids)

    def plain(self) -> dict[str, Any]:
        """Returns the rules as strict JSON."""
        times = {name: _plain(getattr(self, name)) for name in _TIMES}
        index, word = np.nonzero(~np.isnan(self.largest_jump))
        jumps = [index.tolist(), word.tolist(), self.largest_jump[index, word].tolist()]
        tails = {name: list(getattr(self, name)) for name in (SILENT, LATE, JUMP, CONTEXT)}
        checked = np.flatnonzero(self.checks)
        checks = [checked.tolist(), self.checks[checked].tolist()]
        return {"ids": self.ids.tolist(), **times, "largest_jump": jumps, "checks": checks, "lines": self.lines.plain(),
                **tails, NEW: self.new}  # fmt: skip

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Reads what `plain` wrote.

        Raises:
            CheckpointError: Another version of can-train wrote it.
        """
        tails = (SILENT, LATE, JUMP, CONTEXT)
        _check_keys("rules", plain, {"ids", *_TIMES, "largest_jump", "checks", "lines", *tails, NEW})
        times = {name: np.array(plain[name], np.float64) for name in _TIMES}
        ids = np.array(plain["ids"], np.int64)
        largest_jump = np.full((len(ids), len(WORDS)), np.nan)
        index, word, largest = plain["largest_jump"]
        largest_jump[index, word] = largest
        checks = np.zeros(len(ids), np.uint64)
        index, checks_of_ids = plain["checks"]
        checks[np.array(index, np.int64)] = np.array(checks_of_ids, np.uint64)
        silent, late, jump, context = (Tail(*plain[name]) for name in tails)
        return cls(ids=ids, **times, largest_jump=largest_jump, checks=checks, silent=silent, late=late, jump=jump,
                   lines=Context.from_plain(plain["lines"]), context=context, new=plain[NEW])  # fmt: skip

    def _rarities(self, values: _Values) -> Floats:
        table = np.zeros((len(values.silent) + len(values.absent), len(RULES)))
        of_nodes, of_absences = values.places()
        table[of_nodes] = np.column_stack(
            [self.silent.rarities(values.silent), self.late.rarities(values.late), self.new * (values.new > 0),
             *(np.where(values.broken & bits > 0, BROKEN, 0.0) for bits in (COUNTER_BITS, CHECKSUM_BITS)),
             self.jump.rarities(values.jump), self.context.rarities(values.context)]
        )  # fmt: skip
        table[of_absences, 0] = self.silent.rarities(values.absent)
        return table

    def rarities_by_word(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the rarities [I, 5 + 2 J], in which jumps and context have a column for each word of a payload.

        The word that jumps most, or deviates most, in units of its largest usual jump or deviation, has the rarity.
        """
        values = self._values(flat, rows)
        table = self._rarities(values)
        of_nodes, _ = values.places()
        by_word = np.zeros((len(table), 2 * len(WORDS)))
        for place, (rule, word) in enumerate(((JUMP, values.word), (CONTEXT, values.context_word))):
            by_word[of_nodes, place * len(WORDS) + word] = table[of_nodes, RULES.index(rule)]
        return np.concatenate([table[:, : RULES.index(JUMP)], by_word], axis=1)

    def _values(self, flat: FlatGraphs, rows: Ints) -> _Values:
        nodes, absences = members(flat.node_ptr, rows), members(flat.absent_ptr, rows)
        index, known = self._find(flat)
        code = flat.node_code[nodes.positions]
        at, is_known = index[code], known[code]
        # An ID that has just appeared says nothing about the bus: a fuzzer makes up most IDs of a window.
        settled = flat.past_windows[nodes.positions] >= SETTLED_WINDOWS
        shares = [_share(is_known & chosen, chosen, nodes) for chosen in (settled, np.ones_like(settled))]
        share = np.where(np.isnan(shares[0]), shares[1], shares[0])
        on_known_bus = share > LEAST_KNOWN_SHARE
        known_bus = np.repeat(on_known_bus, nodes.sizes)
        now = flat.behaviour[nodes.positions].astype(np.float64)
        # In another vehicle, an ID of the same number is another message, of another period.
        past = flat.past[nodes.positions, _GAP_MEAN]
        agrees = is_known & settled & (np.abs(past - self.gap[at]) <= AGREEMENT)
        absent = flat.absent_code[absences.positions]
        silence = flat.absent_silence[absences.positions] - self.longest_silence[index[absent]]
        counts = known[absent] & np.repeat(on_known_bus, absences.sizes)
        jump, word = self._jumps(flat, nodes, at)
        deviation, context_word = self.lines.of_nodes(flat, rows)
        on_same_vehicle = share > SAME_VEHICLE
        same_vehicle = np.repeat(on_same_vehicle, nodes.sizes)
        return _Values(
            nodes=nodes,
            absences=absences,
            silent=_or_nothing(now[:, _SILENCE] - self.longest_silence[at], agrees),
            late=_or_nothing(now[:, _GAP_MEAN] - self.longest_gap[at], agrees),
            new=(known_bus & ~is_known).astype(np.float64),
            jump=_or_nothing(jump, agrees & same_vehicle),
            word=word,
            context=_or_nothing(deviation, agrees & same_vehicle),
            context_word=context_word,
            broken=np.where(agrees & same_vehicle, self.checks[at] & flat.broken_checks[nodes.positions], np.uint64(0)),
            absent=_or_nothing(silence, counts),
            same_vehicle=on_same_vehicle,
        )

    def _jumps(self, flat: FlatGraphs, nodes: Members, at: Ints) -> tuple[Floats, Ints]:
        """Returns the binary logarithm [N] of the largest jump ÷ `largest_jump`, and its word [N]; `at` [N] in `ids`.

        NaN where the ID has no steady value.
        """
        jumps, word = np.full(len(at), np.nan), np.zeros(len(at), np.int64)
        with np.errstate(divide="ignore"):
            for part in _parts(len(at)):
                largest = self.largest_jump[at[part]]
                ratios = np.where(np.isnan(largest), -1.0, flat.jumps[nodes.positions[part]] / largest)
                word[part] = ratios.argmax(axis=1)
                ratio = ratios[np.arange(len(ratios)), word[part]]
                jumps[part] = np.where(ratio >= 0, np.log2(np.maximum(ratio, 0.0)), np.nan)
        return jumps, word

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
    jump: Floats  # [N]
    word: Ints  # [N] the word that jumps
    context: Floats  # [N]
    context_word: Ints  # [N] the word that deviates
    broken: NDArray[np.uint64]  # [N] the ID's checks that the node breaks
    absent: Floats  # [A]
    same_vehicle: Bools  # [R]

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
        threshold: The network's own threshold: score of a window that is rarer than one in 10 ** `FLAGGED`.
        decade: Difference of scores for ten times as few windows.
        chosen: The threshold of the raised scores. Windows with a broken check have higher scores; on the bus of
            another vehicle, where no rule finds an attack, a score at the network's own threshold becomes `chosen`.
            None: no threshold is chosen yet.
    """

    threshold: float
    decade: float
    chosen: float | None = None

    @classmethod
    def of(cls, benign: Floats, threshold: float) -> Self:
        """Measures a network's scores [R] of benign validation windows, at least one."""
        # Each median excess halves the number of windows.
        scale = ScoreScale.of(benign).scale
        return cls(threshold=threshold, decade=scale / math.log10(2) if scale > 0 else 1.0)

    def raised(self, score: Floats, rare: RareWindows) -> Floats:
        """Returns scores [R], higher where a rule finds the window rare."""
        by_rule = self.threshold + self.decade * (rare.rarity - FLAGGED)
        # Just above: a threshold flags what is above it.
        by_rule = np.where(rare.rarity >= FLAGGED, np.maximum(by_rule, np.nextafter(self.threshold, np.inf)), by_rule)
        raised: Floats = np.where(rare.rarity >= TOLD, np.maximum(score, by_rule), score)
        if self.chosen is None:
            return raised
        raised = np.where(rare.is_foreign, raised + (self.chosen - self.threshold), raised)
        by_check = max(self.chosen + _BROKEN_DECADES * self.decade, np.nextafter(self.chosen, np.inf))
        return np.where(rare.is_broken, np.maximum(raised, by_check), raised)

    def plain(self) -> dict[str, float | None]:
        """Returns the scale as strict JSON."""
        return dict(vars(self))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Reads what `plain` wrote.

        Raises:
            CheckpointError: Another version of can-train wrote it.
        """
        _check_keys("rule_scale", plain, {field.name for field in fields(cls)})
        return cls(**plain)


@dataclass(frozen=True, kw_only=True, eq=False)
class RaisedScores:
    """The rules of a finished run, applied to the scores of one of its networks."""

    rules: Rules
    scale: RuleScale

    @classmethod
    def from_judgement(cls, judgement: Mapping[str, Any]) -> Self | None:
        """Reads the rules from the judgement of a run; None for a run without rules.

        Raises:
            CheckpointError: Another version of can-train wrote the scale.
        """
        if "rules" not in judgement or "rule_scale" not in judgement:
            return None
        scale = RuleScale.from_plain(judgement["rule_scale"])
        return cls(rules=Rules.from_plain(judgement["rules"]), scale=scale)

    def __call__(self, flat: FlatGraphs, rows: Ints, score: Floats) -> Floats:
        """Raises the network's scores [R] of windows that a rule finds rare."""
        return self.scale.raised(score, self.rules.windows(flat, rows))

    def contributions(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns what each ID of the windows adds to the scores, [I, 5 + 2 J]; 0 where no rule flags.

        `Rules.rarities_by_word` names the columns.
        """
        rarities = self.rules.rarities_by_word(flat, rows)
        finite = np.where(rarities == BROKEN, FLAGGED + _BROKEN_DECADES, rarities)
        added: Floats = np.where(rarities >= FLAGGED, self.scale.decade * finite, 0.0)
        return added


def learned(rules: Rules | None, flat: FlatGraphs, split: Split) -> dict[str, int]:
    """Counts the windows, logs and IDs that the rules learn from, as strict JSON.

    Returns:
        `windows`: benign validation windows. `logs`: benign training logs. `ids`: IDs of benign training. `checked`:
        IDs with a counter or a checksum. `values`: IDs with a value whose jumps are known; `lines`: those with a value
        that follows from other IDs. Of the other IDs, `slow` come too seldom, and `constant` never change.
    """
    benign = split.train[flat.label[split.train] == 0]
    counts = {"windows": int(np.count_nonzero(flat.label[split.validation] == 0)),
              "logs": len(np.unique(flat.source[benign]))}  # fmt: skip
    if rules is None:
        return counts
    nodes = members(flat.node_ptr, benign).positions
    changes = np.zeros(len(flat.ids), np.bool_)
    changes[flat.node_code[nodes[flat.behaviour[nodes, _BITS_CHANGED] > 0]]] = True
    others = np.logical_and.reduce(np.isnan(rules.largest_jump), axis=1)
    constant = others & ~changes[np.searchsorted(flat.ids, rules.ids)]
    slow = others & ~constant & ~(rules.gap <= LONGEST_PERIOD)
    return {**counts, "ids": len(others), "checked": int(np.count_nonzero(rules.checks)),
            "values": int(np.count_nonzero(~others)), "lines": rules.lines.num_ids, "slow": int(np.count_nonzero(slow)),
            "constant": int(np.count_nonzero(constant))}  # fmt: skip


def learned_notes(counts: Mapping[str, int]) -> list[str]:
    """Tells, in a sentence, which rules training was too short for; no sentence where it was long enough."""
    if counts["windows"] < LEAST_VALIDATION:
        return [
            f"No rule raises a score: that takes {LEAST_VALIDATION} benign validation windows, not {counts['windows']}"
        ]
    if counts["logs"] >= PUNCTUAL_LOGS:
        return []
    reasons = {f"slower than {2**LONGEST_PERIOD} s": counts["slow"], "constant": counts["constant"]}
    why = ", ".join(f"{reason}: {count}" for reason, count in reasons.items() if count)
    jumps = f"Jumps are judged in {counts['values']} of {counts['ids']} IDs" + (f" ({why})" if why else "")
    checks = f"counters and checksums in {counts['checked']}"
    judged = f"{jumps}, {checks}, values that follow from other IDs in {counts['lines']}"
    return [
        f"No rule judges silent or late IDs: that takes {PUNCTUAL_LOGS} benign logs, not {counts['logs']}. {judged}"
    ]


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


class _Undisturbed(NamedTuple):
    """The undisturbed nodes [N] of known IDs in windows [R] (see `_undisturbed`)."""

    node: Ints  # [N]
    at: Ints  # [N] place of the node's ID in the vocabulary
    window: Ints  # [N] position of the node's window among the windows

    @classmethod
    def of(cls, flat: FlatGraphs, rows: Ints, ids: Ints) -> Self:
        """Finds the nodes in windows `rows` [R], which ascend; `ids` [V] is the vocabulary."""
        nodes = members(flat.node_ptr, rows)
        place = np.where(np.isin(flat.ids, ids), np.searchsorted(ids, flat.ids), -1)[flat.node_code[nodes.positions]]
        chosen = _undisturbed(flat, rows) & (place >= 0)
        return cls(nodes.positions[chosen], place[chosen], np.repeat(np.arange(len(rows)), nodes.sizes)[chosen])


def _steady_jumps(
    flat: FlatGraphs, train: _Undisturbed, validation: _Undisturbed, parts: tuple[Ints, int], num_ids: int
) -> Floats:
    """Returns `Rules.largest_jump` from benign windows; `parts` has the part of each window of training."""
    part, num_parts = parts
    maxima, moves = _jumps_by_part(flat, train, part[train.window] * num_ids + train.at, num_parts, num_ids)
    there = maxima >= 0
    in_parts = there.sum(axis=0)
    largest = maxima.max(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a median of nothing
        median = np.nanmedian(np.where(there, maxima, np.nan), axis=0)
    is_value = (in_parts >= PUNCTUAL_LOGS) & (moves >= LEAST_MOVES * in_parts) & (largest <= LARGEST_JUMP * _RANGES)
    is_value &= largest <= STEADY * median + LEVELS
    # Two bytes are one value if the second byte carries over into the first. Otherwise the first byte says as much.
    is_value[:, : 2 * PAIRS] &= largest[:, : 2 * PAIRS] < _BYTE * np.maximum(largest[:, _HIGH_BYTES], 1)
    # The low byte of a value is none of its own: it runs over its end the faster the value changes.
    for pair in range(2 * PAIRS):
        high = _HIGH_BYTES[pair]
        carries = (moves[:, high] > 0) & (largest[:, pair] < CARRIED * _BYTE * largest[:, high])
        is_value[np.ix_(carries, _BEGIN_WITH[LOW_BYTES[pair]])] = False
    # The next log may exceed the largest jump as the largest jump exceeds the median.
    spread = largest / np.maximum(median, 1.0)
    usual = np.where(is_value, largest * np.maximum(spread, 1.0) + LEVELS, np.nan)
    later, _ = _jumps_by_part(flat, validation, validation.at, 1, num_ids)
    # A comparison with NaN is false.
    usual[later[0] > UNSTEADY * usual] = np.nan
    return usual


def _kept_checks(flat: FlatGraphs, train: _Undisturbed, validation: _Undisturbed, num_ids: int) -> NDArray[np.uint64]:
    """Returns `Rules.checks` from benign windows."""
    tried = np.bincount(train.at, minlength=num_ids)
    broken, later = (_times_broken(flat, nodes, num_ids) for nodes in (train, validation))
    kept = (tried[:, None] >= LEAST_CHECKED) & (broken <= MOST_BROKEN * tried[:, None]) & (later == 0)
    # Where an ID counts, it has enough payloads that differ.
    varied = kept[:, : len(COUNTERS)].any(axis=1) | (_num_payloads(flat, train, num_ids) >= LEAST_PAYLOADS)
    kept[~varied, len(COUNTERS) :] = False
    checks: NDArray[np.uint64] = np.packbits(kept, axis=1, bitorder="little").view(np.uint64)[:, 0]
    return checks


def _kept_lines(flat: FlatGraphs, split: Split, part: Ints, ids: Ints, largest_jump: Floats) -> Context:
    """Returns `Rules.lines` from benign windows: of steady values, and without lines that validation contradicts."""
    at, word = np.nonzero(~np.isnan(largest_jump))
    lines = Context.fit(flat, split.train, part, (ids[at], word))
    later = split.validation[calm_windows(flat, split.validation)]
    return lines.keep(lines.largest_deviations(flat, later) <= math.log2(UNSTEADY))


def _times_broken(flat: FlatGraphs, nodes: _Undisturbed, num_ids: int) -> Ints:
    """Counts the nodes that break each check, [V, C]."""
    broken, one = flat.broken_checks[nodes.node], np.uint64(1)
    breaking = (nodes.at[broken >> np.uint64(check) & one > 0] for check in range(len(CHECKS)))
    return np.column_stack([np.bincount(at, minlength=num_ids) for at in breaking])


def _num_payloads(flat: FlatGraphs, nodes: _Undisturbed, num_ids: int) -> Ints:
    """Counts the different payloads [V] of each ID, among the nodes whose frames are all equal."""
    means = 255.0 * flat.node_features[nodes.node, :MAX_PAYLOAD_BYTES].astype(np.float64)
    payload = np.rint(means)
    equal = (np.abs(means - payload) < _WHOLE).all(axis=1)
    different = np.unique(np.column_stack([nodes.at[equal], payload[equal].astype(np.int64)]), axis=0)
    return np.bincount(different[:, 0], minlength=num_ids)


def _parts_of_logs(flat: FlatGraphs, rows: Ints) -> tuple[Ints, int]:
    """Returns the part of the logs that each of the rows [R] belongs to, and the number of parts.

    A part is a log. Where there are fewer than `PUNCTUAL_LOGS` logs, each log is cut by time into parts of one size.
    """
    _, log, sizes = np.unique(flat.source[rows], return_inverse=True, return_counts=True)
    pieces = -(-PUNCTUAL_LOGS // max(len(sizes), 1))
    rank = np.arange(len(rows)) - (np.cumsum(sizes) - sizes)[log]
    part: Ints = (log * pieces + rank * pieces // sizes[log]).astype(np.int64)
    return part, len(sizes) * pieces


def _jumps_by_part(
    flat: FlatGraphs, nodes: _Undisturbed, group: Ints, num_parts: int, num_ids: int
) -> tuple[Floats, Ints]:
    """Measures nodes [N]; `group` [N] is the number of the node's part · V + the place of its ID.

    Returns:
        The largest jumps [P, V, J], -1 where a part lacks the ID; and the number of nodes [V, J] in which a word jumps.
    """
    maxima, moves = np.full((num_parts * num_ids, len(WORDS)), -1.0), np.zeros((num_ids, len(WORDS)), np.int64)
    for some in _parts(len(group)):
        own = np.argsort(group[some], kind="stable") + some.start
        jumps, groups = flat.jumps[nodes.node[own]], group[own]
        first = np.flatnonzero(np.diff(groups, prepend=-1))
        at = groups[first]
        maxima[at] = np.maximum(maxima[at], np.maximum.reduceat(jumps, first))
        np.add.at(moves, at % num_ids, np.add.reduceat(jumps > 0, first, dtype=np.int64))
    return maxima.reshape(num_parts, num_ids, len(WORDS)), moves


def _undisturbed(flat: FlatGraphs, rows: Ints) -> NDArray[np.bool_]:
    """Returns whether the drive has no attack in the last four windows with the ID of a node, nor between them, [N].

    A node has the jumps of two windows, and a jump compares three frames of the ID, so benign frames after an attack
    jump, too. `rows` ascend.
    """
    nodes = members(flat.node_ptr, rows)
    code, row = flat.node_code[nodes.positions], np.repeat(rows, nodes.sizes)
    order = np.argsort(code, kind="stable")
    code, row = code[order], row[order]
    drive = flat.drive[row]
    before = np.roll(row, 3)
    is_first = np.ones(len(row), np.bool_)
    is_first[3:] = (code[3:] != code[:-3]) | (drive[3:] != drive[:-3])
    attacks = np.concatenate([[0], np.cumsum(flat.label != 0)])
    undisturbed = np.empty(len(row), np.bool_)
    undisturbed[order] = ~is_first & (attacks[row + 1] == attacks[np.where(is_first, row, before)])
    return undisturbed


def _parts(size: int) -> Iterator[slice]:
    for begin in range(0, size, _NODES_AT_A_TIME):
        yield slice(begin, min(begin + _NODES_AT_A_TIME, size))


def _share(part: Any, whole: Any, nodes: Members) -> Floats:
    """Returns the share [R] of `part` in `whole` [N] in each window; NaN where a window has nothing of the whole."""
    sums = [np.add.reduceat(each.astype(np.float64), nodes.starts) for each in (part, whole)]
    shares: Floats = np.divide(sums[0], sums[1], out=np.full(len(sums[0]), np.nan), where=sums[1] > 0)
    return shares


def _or_nothing(values: Floats, counts: Any) -> Floats:
    compared: Floats = np.where(counts & ~np.isnan(values), values, -np.inf)
    return compared


def _check_keys(name: str, plain: Mapping[str, Any], keys: Set[str]) -> None:
    """Raises CheckpointError where values in a result have other names than this version writes."""
    if other := ", ".join(sorted(plain.keys() ^ keys)):
        raise CheckpointError("The rules of the run are of another version of can-train",
                              value=f"{name} differs in {other}", remedy="Train anew")  # fmt: skip


def _plain(values: Floats) -> list[float | None]:
    """Returns None for NaN, which JSON has no number for."""
    return [None if math.isnan(value) else value for value in values.tolist()]
