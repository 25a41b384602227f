"""Baselines: simple detectors that a model is compared with, and the table of window features that the forests see.

Shapes: R chosen windows, F features of a member (a node or an edge), C columns of the table, K CAN IDs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import IsolationForest, RandomForestClassifier

from can_train.fit.packing import Members, members
from can_train.tasks.can.data.graphs import FlatGraphs, Floats, Ints
from can_train.tasks.can.evaluation.metrics import Threshold, choose_threshold

# Frames whose windows are expanded at a time. A window has no more nodes or edges than frames, so the temporary arrays
# of a chunk stay below about 60 MB.
FRAMES_PER_CHUNK: Final = 200_000
MAX_FOREST_WINDOWS: Final = 20_000  # that a forest is fitted on: at worst, on noise, that takes 15 s on two cores
FOREST_TREES: Final = 100  # scikit-learn's default
FOREST_JOBS: Final = 2  # threads that fit a forest: the cores of the smallest machine in use
UNSEEN_ID_SCORE: Final = 1.0  # of a CAN ID that training did not see: as suspicious as one only seen in attacks

# Returns [R] scores of chosen windows, higher is more attack-like.
WindowScorer = Callable[[FlatGraphs, Ints], Floats]


@dataclass(frozen=True)
class Baseline:
    """A simple detector with its threshold."""

    name: str
    score: WindowScorer
    threshold: Threshold


@dataclass(frozen=True)
class Baselines:
    """The baselines of one data set; `absent` has the reason for each usual one that is missing, by name."""

    fitted: tuple[Baseline, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)


def fit_baselines(flat: FlatGraphs, train: Ints, validation: Ints, *, seed: int, fpr: float) -> Baselines:
    """Fits every baseline that the training windows allow; thresholds come from validation.

    Raises:
        DataError: Validation allows no threshold.
    """
    is_attack = flat.label[train] > 0
    scorers: dict[str, WindowScorer] = {"id_lookup": IdLookup.fit(flat, train).score}
    absent = {}
    if not is_attack.any():
        scorers["isolation_forest"] = fit_isolation_forest(flat, train, seed)
        absent["random_forest"] = "the training windows hold no attacks; isolation_forest stands in"
    elif is_attack.all():
        absent["random_forest"] = "the training windows hold attacks only"
    else:
        scorers["random_forest"] = fit_random_forest(flat, train, seed)
    baselines, truth, supervised = constant_baselines(), flat.label[validation] > 0, bool(is_attack.any())
    for name, score in scorers.items():
        threshold = choose_threshold(truth, score(flat, validation), supervised=supervised, fpr=fpr)
        baselines.append(Baseline(name, score, threshold))
    return Baselines(tuple(baselines), absent)


def constant_baselines() -> list[Baseline]:
    """Returns the two baselines that need no fit."""

    def constant(name: str, score: float) -> Baseline:
        return Baseline(name, lambda flat, rows: np.full(len(rows), score), Threshold(value=0.5, rule="fixed"))

    return [constant("flag_everything", 1.0), constant("flag_nothing", 0.0)]


@dataclass(frozen=True, eq=False)
class IdLookup:
    """Scores a window by the most suspicious CAN ID in it.

    Attributes:
        id_score: [K] share of the training windows with this ID that are attacks; `UNSEEN_ID_SCORE` if there are none.
    """

    id_score: Floats

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints) -> Self:
        """Counts how many training windows have each ID, and how many of these are attacks."""
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
        """Returns [R] the largest score of each window's IDs."""
        parts = [np.empty(0)]
        for chunk in in_chunks(flat, rows):
            nodes = members(flat.node_ptr, chunk)
            parts.append(np.maximum.reduceat(self.id_score[flat.node_code[nodes.positions]], nodes.starts))
        return np.concatenate(parts)


def fit_random_forest(flat: FlatGraphs, rows: Ints, seed: int) -> WindowScorer:
    """Fits a random forest to training windows of both classes; its scores are attack probabilities."""
    rows = sample_by_class(flat, rows, most=MAX_FOREST_WINDOWS, seed=seed)
    forest = RandomForestClassifier(FOREST_TREES, class_weight="balanced", n_jobs=FOREST_JOBS, random_state=seed)
    forest.fit(window_features(flat, rows), flat.label[rows] > 0)
    # Threads add up the trees' votes in the order in which they finish, which changes the last bits from run to run.
    forest.set_params(n_jobs=1)
    return _over_table(lambda table: forest.predict_proba(table)[:, 1])


def fit_isolation_forest(flat: FlatGraphs, rows: Ints, seed: int) -> WindowScorer:
    """Fits an isolation forest to training windows; its scores are anomaly scores in (0, 1]."""
    rows = sample_by_class(flat, rows, most=MAX_FOREST_WINDOWS, seed=seed)
    forest = IsolationForest(n_estimators=FOREST_TREES, n_jobs=1, random_state=seed)
    forest.fit(window_features(flat, rows))
    return _over_table(lambda table: -forest.score_samples(table))


def _over_table(predict: Callable[[NDArray[np.float32]], Floats]) -> WindowScorer:
    def score(flat: FlatGraphs, rows: Ints) -> Floats:
        parts = [predict(window_features(flat, chunk)) for chunk in in_chunks(flat, rows)]
        return np.concatenate([np.empty(0), *parts])

    return score


def sample_by_class(flat: FlatGraphs, rows: Ints, *, most: int, seed: int) -> Ints:
    """Draws at most `most` of the windows `rows`, in order.

    Each class may fill half of them and what the other one leaves free, so that rare attacks remain.
    """
    is_attack = flat.label[rows] > 0
    attacks, benign = rows[is_attack], rows[~is_attack]
    num_attacks = min(len(attacks), max(most // 2, most - len(benign)))
    num_benign = min(len(benign), most - num_attacks)
    rng = np.random.default_rng(seed)
    wanted = ((attacks, num_attacks), (benign, num_benign))
    drawn = [rng.choice(windows, count, replace=False, shuffle=False) for windows, count in wanted]
    return np.sort(np.concatenate(drawn))


def window_features(flat: FlatGraphs, rows: Ints) -> NDArray[np.float32]:
    """Makes a table of chosen windows, without CAN IDs and absolute times.

    Returns:
        [R, C]: mean, standard deviation, minimum and maximum of each node feature, the same of each edge feature, the
        number of nodes, the number of edges, and the duration in seconds.
    """
    columns = 4 * (flat.node_features.shape[1] + flat.edge_features.shape[1]) + 3
    # Chunks are written into the table: a list of them would hold the table twice when it is joined.
    table = np.empty((len(rows), columns), np.float32)
    done = 0
    for chunk in in_chunks(flat, rows):
        nodes, edges = members(flat.node_ptr, chunk), members(flat.edge_ptr, chunk)
        summaries = _summaries(flat.node_features, nodes), _summaries(flat.edge_features, edges)
        duration = flat.end_time[chunk] - flat.start_time[chunk]
        table[done : done + len(chunk)] = np.column_stack([*summaries, nodes.sizes, edges.sizes, duration])
        done += len(chunk)
    return table


def _summaries(features: NDArray[np.float32], of: Members) -> Floats:
    """Returns [R, 4 · F]: means, standard deviations, minima and maxima over the members of each window."""
    # Every window has a node and an edge: an empty one would get the sum of the window after it.
    values = features[of.positions].astype(np.float64)
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
