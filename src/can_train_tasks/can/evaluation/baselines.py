"""Baselines: simple detectors that a model is compared with, and the table of window features that the forests see.

Shapes: R chosen windows, V CAN IDs of benign training windows, F features of a member (a node or an edge), C columns of
the table, K CAN IDs, S forests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.errors import StateError
from can_train.fit.packing import Members, members
from can_train.io.arrays import ArrayWriter, FolderDamageError, discard_folder, read_arrays
from can_train_tasks.can.data.batches import Gatherer
from can_train_tasks.can.data.behaviour import BEHAVIOUR
from can_train_tasks.can.data.graphs import Bools, FlatGraphs, Floats, Ints, Split
from can_train_tasks.can.evaluation.metrics import Threshold, choose_threshold
from can_train_tasks.can.inputs import SETTLED_WINDOWS, InputEncoder, InputStatistics, has_timing
from can_train_tasks.can.settings import BEHAVIOUR_FEATURES, CanDatasetSettings

# Frames whose windows are expanded at a time. A window has no more nodes or edges than frames, so the temporary arrays
# of a chunk stay below about 60 MB.
FRAMES_PER_CHUNK: Final = 200_000
MAX_FOREST_WINDOWS: Final = 20_000  # windows that a forest is fitted to: at worst, on noise, a fit takes half a minute
FOREST_TREES: Final = 100  # scikit-learn's default
FOREST_SEEDS: Final = 3  # forests that are fitted, for mean and range: a single forest may be lucky

# Part of the digest of kept scores. Raise it when the table or a fit changes: older scores are then not found.
SCORES_SCHEMA: Final = 1
UNSEEN_ID_SCORE: Final = 1.0  # score of a CAN ID that training did not see: as for an ID seen only in attacks

# Score of a window without any ID that can be compared, in binary orders of magnitude: below any other.
NOTHING_TO_COMPARE: Final = -32.0
AGREEMENT: Final = 0.5  # largest binary logarithm of an ID's mean gap ÷ its mean gap in training that still agrees
TABLE_ENTRIES: Final = 2**20  # windows · IDs that are processed at a time: 8 MB for each array
_GAP_MIN, _GAP_MEAN, _SILENCE = (BEHAVIOUR.index(name) for name in ("gap_min", "gap_mean", "silence"))

# Returns [R] scores of chosen windows, higher is more attack-like.
WindowScorer = Callable[[FlatGraphs, Ints], Floats]

# Returns the scores of the windows of a table [R, C].
TableScorer = Callable[[NDArray[np.float32]], Floats]


@dataclass(frozen=True)
class Baseline:
    """A simple detector with its threshold; baselines of one name differ in the seed of their fit."""

    name: str
    score: WindowScorer
    threshold: Threshold


@dataclass(frozen=True)
class Baselines:
    """The baselines of one data set; `absent` has the reason for each missing baseline, by name."""

    fitted: tuple[Baseline, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BaselineOptions:
    """The settings of baselines.

    Attributes:
        seed: Seed of the first forest.
        fpr: False-positive rate of thresholds that no attacks decide.
        features: As `dataset.features`.
        prepared: Folder of the prepared data, which keeps the scores of the forests; None: they are not kept.
    """

    seed: int
    fpr: float
    features: str = BEHAVIOUR_FEATURES
    prepared: Path | None = None


def fit_baselines(flat: FlatGraphs, split: Split, options: BaselineOptions) -> Baselines:
    """Fits every baseline that the training windows allow; thresholds come from validation.

    Forests score the windows of validation and test only.

    Raises:
        DataError: Validation allows no threshold.
    """
    train, validation = split.train, split.validation
    is_attack = flat.label[train] > 0
    scorers: list[tuple[str, WindowScorer]] = [
        ("id_lookup", IdLookup.fit(flat, train).score),
        ("gap_lookup", GapLookup.fit(flat, train).score),
        ("silence", SilenceLookup.fit(flat, train).score),
    ]
    absent, forests = {}, None
    if not is_attack.any():
        forests = Forests("isolation_forest", fit_isolation_forest, [options.seed])
        absent["random_forest"] = "the training windows hold no attacks; isolation_forest stands in"
    elif is_attack.all():
        absent["random_forest"] = "the training windows hold attacks only"
    else:
        seeds = range(options.seed, options.seed + FOREST_SEEDS)
        forests = Forests("random_forest", fit_random_forest, seeds)
    if forests is not None:
        scores = ForestScores.load_or_fit(flat, split, options, forests)
        scorers += [(forests.name, score) for score in scores.scorers()]
    baselines, truth, supervised = constant_baselines(), flat.label[validation] > 0, bool(is_attack.any())
    for name, score in scorers:
        threshold = choose_threshold(truth, score(flat, validation), supervised=supervised, fpr=options.fpr)
        baselines.append(Baseline(name, score, threshold))
    return Baselines(tuple(baselines), absent)


def constant_baselines() -> list[Baseline]:
    """Returns the two baselines that need no fit."""

    def constant(name: str, score: float) -> Baseline:
        return Baseline(name, lambda flat, rows: np.full(len(rows), score), Threshold(value=0.5, rule="fixed"))

    return [constant("flag_everything", 1.0), constant("flag_nothing", 0.0)]


def vocabulary_lookup(vocabulary: Ints) -> Baseline:
    """Returns the ID look-up of a finished model: a window is flagged if it has an ID that is not in the vocabulary."""

    def score(flat: FlatGraphs, rows: Ints) -> Floats:
        return IdLookup(np.where(np.isin(flat.ids, vocabulary), 0.0, UNSEEN_ID_SCORE)).score(flat, rows)

    return Baseline("id_lookup", score, Threshold(value=0.5, rule="any ID that benign training windows do not have"))


@dataclass(frozen=True, eq=False)
class IdLookup:
    """Scores a window by the most suspicious CAN ID in it.

    Attributes:
        id_score: [K] share of attacks among the training windows with this ID; `UNSEEN_ID_SCORE` without such windows.
    """

    id_score: Floats

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints) -> Self:
        """Counts the training windows with each ID, and the attack windows with each ID."""
        occurred = np.zeros(len(flat.ids))
        attacked = np.zeros(len(flat.ids))
        for chunk in in_chunks(flat, rows):
            nodes = members(flat.node_ptr, chunk)
            codes = flat.node_code[nodes.positions]
            is_attack = np.repeat(flat.label[chunk] > 0, nodes.sizes)
            occurred += np.bincount(codes, minlength=len(flat.ids))
            attacked += np.bincount(codes, weights=is_attack, minlength=len(flat.ids))
        return cls(np.divide(attacked, occurred, out=np.full(len(occurred), UNSEEN_ID_SCORE), where=occurred > 0))

    def score(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the largest score [R] of each window's IDs."""
        parts = [np.empty(0)]
        for chunk in in_chunks(flat, rows):
            nodes = members(flat.node_ptr, chunk)
            parts.append(np.maximum.reduceat(self.id_score[flat.node_code[nodes.positions]], nodes.starts))
        return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class GapLookup:
    """Scores a window by the ID whose frames follow each other most closely: log2 (shortest benign gap ÷ this gap).

    Attributes:
        shortest: [K] binary logarithm of the shortest gap in seconds in benign training windows; NaN without a gap.
    """

    shortest: Floats

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints) -> Self:
        """Finds each ID's shortest gap in the benign windows among `rows`."""
        nodes = members(flat.node_ptr, rows[flat.label[rows] == 0]).positions
        shortest = np.full(len(flat.ids), np.nan)
        np.fmin.at(shortest, flat.node_code[nodes], flat.behaviour[nodes, _GAP_MIN].astype(np.float64))
        return cls(shortest)

    def score(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the largest ratio [R] of each window's IDs."""
        nodes = members(flat.node_ptr, rows)
        ratio = self.shortest[flat.node_code[nodes.positions]] - flat.behaviour[nodes.positions, _GAP_MIN]
        ratio = np.where(np.isnan(ratio), NOTHING_TO_COMPARE, ratio)
        return np.maximum.reduceat(ratio, nodes.starts) if len(rows) else np.empty(0)


class _Silences(NamedTuple):
    """The silences of IDs at the end of successive windows of a log."""

    rows: Ints  # [R]
    silence: Floats  # [R, V] binary logarithm of seconds; NaN before the ID's first frame
    agrees: Bools  # [R, V] whether the ID's history in this log, when it was last seen, was as in training


@dataclass(frozen=True, eq=False)
class SilenceLookup:
    """Scores a window by the ID that is longest overdue at its end: log2 (silence ÷ longest benign silence).

    Only IDs whose history in the log agrees with training can be overdue: in another vehicle, an ID of the same number
    is another message.

    Attributes:
        index: [K] position among the V known IDs; -1 for unknown IDs.
        gap: [V] binary logarithm of the mean gap in seconds in benign training windows.
        longest: [V] binary logarithm of the longest silence in seconds at the end of a benign training window.
    """

    index: Ints
    gap: Floats
    longest: Floats

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints) -> Self:
        """Finds each ID's mean gap and longest silence in the benign windows among `rows`."""
        benign = rows[flat.label[rows] == 0]
        nodes = members(flat.node_ptr, benign).positions
        nodes = nodes[~np.isnan(flat.behaviour[nodes, _GAP_MEAN])]
        nodes = nodes[has_timing(flat, benign)[flat.node_code[nodes]]]
        codes, index = np.unique(flat.node_code[nodes], return_inverse=True)
        gap = np.bincount(index, weights=flat.behaviour[nodes, _GAP_MEAN]) / np.maximum(np.bincount(index), 1)
        of_id = np.full(len(flat.ids), -1, dtype=np.int64)
        of_id[codes] = np.arange(len(codes))
        lookup = cls(of_id, gap, np.full(len(codes), -np.inf))
        chosen = np.zeros(len(flat), dtype=np.bool_)
        chosen[benign] = True
        for part in lookup._silences(flat, benign):
            silence = np.where(chosen[part.rows, None] & ~np.isnan(part.silence), part.silence, -np.inf)
            np.maximum(lookup.longest, silence.max(axis=0, initial=-np.inf), out=lookup.longest)
        return lookup

    def score(self, flat: FlatGraphs, rows: Ints) -> Floats:
        """Returns the largest ratio [R] of the known IDs at the end of each window."""
        scores = np.full(len(flat), NOTHING_TO_COMPARE)
        for part in self._silences(flat, rows):
            ratio = np.where(part.agrees, part.silence - self.longest, NOTHING_TO_COMPARE)
            scores[part.rows] = ratio.max(axis=1, initial=NOTHING_TO_COMPARE)
        chosen: Floats = scores[rows]
        return chosen

    def _silences(self, flat: FlatGraphs, rows: Ints) -> Iterator[_Silences]:
        """Follows the known IDs through all windows of the logs of `rows`."""
        step = max(1, TABLE_ENTRIES // max(len(self.gap), 1))
        for source in np.unique(flat.source[rows]):
            of_log = np.flatnonzero(flat.source == source)
            last_s, agreed = np.full(len(self.gap), np.nan), np.zeros(len(self.gap), dtype=np.bool_)
            for begin in range(0, len(of_log), step):
                part = of_log[begin : begin + step]
                seen_s, agrees = self._last_seen(flat, part, last_s, agreed)
                last_s, agreed = seen_s[-1], agrees[-1]
                # The silence of an ID in the last frame of a window is 0, which has no logarithm.
                silence_s = np.maximum(flat.end_time[part][:, None] - seen_s, np.finfo(np.float64).tiny)
                yield _Silences(part, np.log2(silence_s), agrees)

    def _last_seen(self, flat: FlatGraphs, rows: Ints, last_s: Floats, agreed: Bools) -> tuple[Floats, Bools]:
        """Returns, for each window and ID [R, V], the time when the ID was last seen, and whether its history agreed.

        `last_s` and `agreed` [V] are the values before the first window.
        """
        nodes = members(flat.node_ptr, rows)
        index = self.index[flat.node_code[nodes.positions]]
        window = np.repeat(np.arange(1, len(rows) + 1), nodes.sizes)[index >= 0]
        positions, index = nodes.positions[index >= 0], index[index >= 0]
        silence_s = np.exp2(flat.behaviour[positions, _SILENCE].astype(np.float64))
        seen_s = np.vstack([last_s, np.full((len(rows), len(last_s)), np.nan)])
        agrees = np.vstack([agreed, np.zeros((len(rows), len(agreed)), dtype=np.bool_)])
        seen_s[window, index] = flat.end_time[rows][window - 1] - silence_s
        close = np.abs(flat.past[positions, _GAP_MEAN] - self.gap[index]) <= AGREEMENT
        agrees[window, index] = close & (flat.past_windows[positions] >= SETTLED_WINDOWS)
        # The row of the window that saw each ID last.
        latest = np.where(np.isnan(seen_s), 0, np.arange(len(rows) + 1)[:, None])
        np.maximum.accumulate(latest, axis=0, out=latest)
        columns = np.arange(len(last_s))
        return seen_s[latest, columns][1:], agrees[latest, columns][1:]


def fit_random_forest(table: WindowTable, flat: FlatGraphs, rows: Ints, seed: int) -> TableScorer:
    """Fits a random forest to training windows of both classes; its scores are attack probabilities."""
    # Imported late: scikit-learn takes a second to import, and kept scores need none of it.
    from sklearn.ensemble import RandomForestClassifier

    rows = sample_by_class(flat, rows, most=MAX_FOREST_WINDOWS, seed=seed)
    # One thread: scikit-learn's threads replace Python's warning filters for each other, and then warn of each tree.
    forest = RandomForestClassifier(FOREST_TREES, class_weight="balanced", n_jobs=1, random_state=seed)
    forest.fit(table.rows(flat, rows), flat.label[rows] > 0)
    return lambda values: forest.predict_proba(values)[:, 1]


def fit_isolation_forest(table: WindowTable, flat: FlatGraphs, rows: Ints, seed: int) -> TableScorer:
    """Fits an isolation forest to training windows; its scores are anomaly scores in (0, 1]."""
    from sklearn.ensemble import IsolationForest

    rows = sample_by_class(flat, rows, most=MAX_FOREST_WINDOWS, seed=seed)
    forest = IsolationForest(n_estimators=FOREST_TREES, n_jobs=1, random_state=seed)
    forest.fit(table.rows(flat, rows))
    return lambda values: -forest.score_samples(values)


class Forests(NamedTuple):
    """Forests that are to be fitted to the same training windows, one for each seed."""

    name: str
    fit: Callable[[WindowTable, FlatGraphs, Ints, int], TableScorer]
    seeds: Sequence[int]

    def scores(self, flat: FlatGraphs, train: Ints, rows: Ints, features: str) -> Floats:
        """Fits the forests to the windows `train`, and returns the scores [R, S] of the windows `rows`."""
        table = WindowTable.fit(flat, train, features)
        fitted = [self.fit(table, flat, train, seed) for seed in self.seeds]
        parts = [np.empty((0, len(fitted)))]
        for chunk in in_chunks(flat, rows):
            values = table.rows(flat, chunk)
            parts.append(np.column_stack([score(values) for score in fitted]))
        return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class ForestScores:
    """The scores of several forests for the windows of a split.

    Attributes:
        rows: [R] the windows of validation and test, ascending.
        scores: [R, S] float64.
    """

    rows: Ints
    scores: Floats

    @classmethod
    def load_or_fit(cls, flat: FlatGraphs, split: Split, options: BaselineOptions, forests: Forests) -> Self:
        """Reads the scores beside the prepared data; where they are missing or damaged, fits the forests."""
        rows = np.unique(np.concatenate([split.validation, *split.test.values()]))
        if options.prepared is None:
            return cls(rows, forests.scores(flat, split.train, rows, options.features))
        folder = options.prepared / f"{forests.name}-{_scores_digest(split.train, rows, options, forests)}"
        with suppress(FolderDamageError):
            scores = read_arrays(folder, ["scores"])[0]["scores"]
            if scores.shape == (len(rows), len(forests.seeds)):
                return cls(rows, scores)
        scores = forests.scores(flat, split.train, rows, options.features)
        # The prepared data may be read-only, or a temporary folder that is gone by now: the next run fits again.
        if options.prepared.is_dir():
            with suppress(StateError):
                discard_folder(folder)
                with ArrayWriter(folder, {"scores": (scores.dtype.str, scores.shape[1:])}) as writer:
                    writer.append({"scores": scores})
                    writer.finish({})
        return cls(rows, scores)

    def scorers(self) -> list[WindowScorer]:
        """Returns a scorer for each forest, of windows in validation and test."""

        def scorer(index: int) -> WindowScorer:
            return lambda flat, rows: self.scores[self._positions(rows), index]

        return [scorer(index) for index in range(self.scores.shape[1])]

    def _positions(self, rows: Ints) -> Ints:
        positions = np.searchsorted(self.rows, rows)
        if not np.isin(rows, self.rows).all():
            raise ValueError("forests were asked about windows outside validation and test")
        return positions


def _scores_digest(train: Ints, rows: Ints, options: BaselineOptions, forests: Forests) -> str:
    """Returns a digest of all that the scores depend on, except for the data, whose folder they are in."""
    content = {
        "schema": SCORES_SCHEMA,
        "features": options.features,
        "forests": [forests.name, FOREST_TREES, MAX_FOREST_WINDOWS, *forests.seeds],
        "versions": [version(package) for package in ("scikit-learn", "numpy", "torch")],
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for part in (train, rows):
        digest.update(len(part).to_bytes(8, "little") + np.ascontiguousarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()[:24]


def sample_by_class(flat: FlatGraphs, rows: Ints, *, most: int, seed: int) -> Ints:
    """Draws at most `most` of the windows `rows`, in order.

    Each class may fill half of the windows, and the half that the other class leaves free, so that rare attacks remain.
    """
    is_attack = flat.label[rows] > 0
    attacks, benign = rows[is_attack], rows[~is_attack]
    num_attacks = min(len(attacks), max(most // 2, most - len(benign)))
    num_benign = min(len(benign), most - num_attacks)
    rng = np.random.default_rng(seed)
    wanted = ((attacks, num_attacks), (benign, num_benign))
    drawn = [rng.choice(windows, count, replace=False, shuffle=False) for windows, count in wanted]
    return np.sort(np.concatenate(drawn))


@dataclass(frozen=True, eq=False)
class WindowTable:
    """Makes a table of windows from the features that a model sees, without CAN IDs and absolute times."""

    inputs: InputEncoder | None  # compares IDs with their usual values; None: the window alone

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints, features: str) -> Self:
        """Learns the usual values of IDs from the windows `rows`, if `features` is `behaviour`."""
        if features != BEHAVIOUR_FEATURES:
            return cls(None)
        dataset = CanDatasetSettings(features=features)
        return cls(InputEncoder(InputStatistics.fit(flat, rows), embedding=1, dataset=dataset).eval())

    def rows(self, flat: FlatGraphs, rows: Ints) -> NDArray[np.float32]:
        """Makes the table of chosen windows.

        Returns:
            [R, C]: mean, standard deviation, minimum and maximum of each node feature and of each edge feature, the
            number of nodes, the number of edges, the duration in seconds; then mean, standard deviation, minimum and
            maximum of each deviation.
        """
        deviations = self.inputs.num_deviations if self.inputs else 0
        columns = 4 * (flat.node_features.shape[1] + flat.edge_features.shape[1] + deviations) + 3
        # Chunks are written into the table: joining a list of chunks would hold the table twice.
        table = np.empty((len(rows), columns), np.float32)
        done = 0
        for chunk in in_chunks(flat, rows):
            nodes, edges = members(flat.node_ptr, chunk), members(flat.edge_ptr, chunk)
            node, edge = flat.node_features[nodes.positions], flat.edge_features[edges.positions]
            parts = [_summaries(node, nodes), _summaries(edge, edges), nodes.sizes, edges.sizes]
            parts.append(flat.end_time[chunk] - flat.start_time[chunk])
            if self.inputs is not None:
                # In another thread: a simulated GPU counts the allocations of its thread, and these are the host's.
                with ThreadPoolExecutor(max_workers=1) as host:
                    compared = host.submit(_deviations, self.inputs, flat, chunk).result()
                parts.append(_summaries(compared, nodes))
            table[done : done + len(chunk)] = np.column_stack(parts)
            done += len(chunk)
        return table


def _deviations(inputs: InputEncoder, flat: FlatGraphs, rows: Ints) -> NDArray[np.float32]:
    batch = Gatherer(flat)(rows)
    with torch.no_grad():
        deviations: NDArray[np.float32] = inputs.deviations(batch, inputs.id_index(batch)).numpy()
    return deviations


def _summaries(features: NDArray[np.float32], of: Members) -> Floats:
    """Returns means, standard deviations, minima and maxima [R, 4 · F] of each window's features."""
    # Every window has a node and an edge: an empty window would get the sum of the next window.
    values = features.astype(np.float64)
    mean = np.add.reduceat(values, of.starts) / of.sizes[:, None]
    deviation = values - np.repeat(mean, of.sizes, axis=0)
    variance = np.add.reduceat(deviation * deviation, of.starts) / of.sizes[:, None]
    low, high = np.minimum.reduceat(values, of.starts), np.maximum.reduceat(values, of.starts)
    return np.hstack([mean, np.sqrt(variance), low, high])


def in_chunks(flat: FlatGraphs, rows: Ints) -> Iterator[Ints]:
    """Cuts chosen windows into parts of at most `FRAMES_PER_CHUNK` frames."""
    step = max(1, FRAMES_PER_CHUNK // flat.window)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
