"""What the networks see of a window: CAN IDs as embeddings, counts and times standardised, and how each ID behaves
compared with its benign training windows and with its own past.

Vocabulary and scale are fitted on training windows and saved with the weights: a checkpoint scores any log by itself.

Shapes: B graphs, N nodes, E edges, A absences, V known CAN IDs, C columns of `BEHAVIOUR`, D of `deviations`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.utils import scatter

from can_train.fit.packing import members
from can_train_tasks.can.data.batches import GraphBatch
from can_train_tasks.can.data.behaviour import BEHAVIOUR
from can_train_tasks.can.data.graphs import (
    EDGE_FEATURES,
    MAX_PAYLOAD_BYTES,
    NODE_FEATURES,
    Bools,
    FlatGraphs,
    Floats,
    Ints,
    id_text,
)
from can_train_tasks.can.settings import BEHAVIOUR_FEATURES, CanDatasetSettings

UNKNOWN_ID: Final = 0  # vocabulary index of an ID that training did not see, or that is hidden
MIN_VARIANCE: Final = 1e-12  # below which a column counts as constant
WINDOWS_AT_A_TIME: Final = 4096  # whose features are summed, which bounds the memory of the float64 copy
# Least spread of each column of `BEHAVIOUR`, in its units: an ID with a precise clock is not alarming because it once
# was late by a hundredth of its period.
LEAST_STD: Final = np.array([0.05, 0.05, 0.02, 0.05, 1.0, 0.1, 0.05])
POOLED_WINDOWS: Final = 10  # of all IDs, that the spread of one ID is shrunk towards
SETTLED_WINDOWS: Final = 10  # of an ID in a log, from which its past tells what is usual of it
YOUNG_WINDOWS: Final = 4.0  # of an ID in a log, at which a difference from its past counts half
# Weights of features whose errors depend on what the driver does, or on where in a window a frame happens to be. The
# others weigh 1: an injected frame disturbs an ID's rhythm in any drive.
WEAK_TARGETS: Final = {
    **dict.fromkeys(NODE_FEATURES[:MAX_PAYLOAD_BYTES], 0.1), "last_position": 0.1, "bits_changed": 0.2, "unchanged": 0.2
}  # fmt: skip
LEAST_KNOWN_SHARE: Final = 0.5  # of a bus's IDs, up to which it is none that training saw
# Only a punctual ID is missed: it was in this many benign logs, and its longest silence is at most this far above its
# mean gap (a binary logarithm). What depends on the driver or the state of the vehicle is silent in another drive: on
# those of four simulated vehicles, IDs that were punctual in 1, 2, 4 and 5 drives of a minute were found overdue in
# 18, 4, 2 and 0.2 % of the benign windows; in one drive of three minutes, in 11 %.
PUNCTUAL_LOGS: Final = 5
PUNCTUAL: Final = 1.0
ENDLESS: Final = 100.0  # binary logarithm of a silence that none exceeds
# Binary logarithm of an absent ID's silence ÷ its longest one in benign training windows: from where to where suspicion
# rises. On other drives of six simulated vehicles, 0.2 % of the benign windows lack an ID for 1.7 times as long, and
# none for twice as long.
OVERDUE: Final = (1.0, 1.5)
# Gaps between an ID's frames in benign training windows, from which its timing is known. With fewer, a longer gap than
# any of them is nothing odd.
LEAST_GAPS: Final = 3
MOST_RARE_IDS: Final = 10  # that are named
MOST_NEW_IDS: Final = 5  # that are named
SAME_FRAME_S: Final = 0.001  # two frames of so rare an ID lie further apart; times are rounded by less
LEAST_SILENCE: Final = -3.0  # binary logarithm of silence ÷ period: when exactly in a period a window ends says nothing
_GAP_MIN, _GAP_MEAN, _SILENCE = (BEHAVIOUR.index(name) for name in ("gap_min", "gap_mean", "silence"))
_TIMING: Final = [BEHAVIOUR.index(name) for name in ("gap_min", "gap_mean", "gap_spread", "silence")]


class InputStatistics(NamedTuple):
    """Vocabulary and scale of the training windows."""

    # [V] CAN IDs of benign training windows, ascending. An ID that occurs in attacks only is no part of the vehicle: it
    # is unknown, in training too.
    vocabulary: Ints
    node_mean: Floats  # [10]
    node_std: Floats  # [10]
    edge_mean: Floats  # [11]
    edge_std: Floats  # [11]
    behaviour_mean: Floats  # [C] over all IDs of benign windows
    behaviour_std: Floats  # [C]
    # [V + 1, C] of each ID in benign windows; `ENDLESS` where that is not known of its timing. The mean gap in row
    # `UNKNOWN_ID` is the length of the longest benign log: an ID that comes less often may well be new.
    id_mean: Floats
    id_std: Floats  # [V + 1, C]
    past_std: Floats  # [C] of the difference between an ID in a benign window and its past
    # [V + 1] longest silence of each ID at the end of a benign window, binary logarithm of seconds; `ENDLESS` where
    # it is not `PUNCTUAL`
    id_silence: Floats

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints) -> Self:
        """Fits vocabulary and scale on the windows `rows`."""
        node = _mean_and_std(flat.node_features, flat.node_ptr, rows)
        edge = _mean_and_std(flat.edge_features, flat.edge_ptr, rows)
        vocabulary = known_ids(flat, rows)
        usual = _usual_behaviour(flat, rows, vocabulary)
        silences = _longest_silences(flat, rows, vocabulary, usual[2])
        few = 1 + np.flatnonzero(~has_timing(flat, rows)[np.searchsorted(flat.ids, vocabulary)])
        usual[2][few[:, None], _TIMING] = ENDLESS
        silences[few] = ENDLESS
        log_s = longest_log_s(flat, rows)
        usual[2][UNKNOWN_ID, _GAP_MEAN] = np.log2(log_s) if log_s > 0 else ENDLESS
        return cls(vocabulary, *node, *edge, *usual, silences)

    @classmethod
    def empty(cls, vocabulary_size: int) -> Self:
        """Returns statistics of the right shapes, which a checkpoint overwrites."""
        node, edge, columns = len(NODE_FEATURES), len(EDGE_FEATURES), len(BEHAVIOUR)
        table = (vocabulary_size + 1, columns)
        return cls(
            np.arange(vocabulary_size), np.zeros(node), np.ones(node), np.zeros(edge), np.ones(edge),
            np.zeros(columns), np.ones(columns), np.zeros(table), np.ones(table), np.ones(columns), np.zeros(table[0]),
        )  # fmt: skip


def target_weights(dataset: CanDatasetSettings) -> Floats:
    """Returns how much of a node's reconstruction error each of its features makes up; they sum up to 1."""
    named = dict.fromkeys(NODE_FEATURES, 1.0)
    if dataset.features == BEHAVIOUR_FEATURES:
        named = dict.fromkeys((*NODE_FEATURES, *BEHAVIOUR), 1.0) | WEAK_TARGETS
    weights: Floats = np.array(list(named.values()))
    return weights / sum(named.values())


def known_ids(flat: FlatGraphs, rows: Ints) -> Ints:
    """Returns [V] the vocabulary of the windows `rows` (see `InputStatistics`)."""
    known = np.zeros(len(flat.ids), dtype=bool)
    for start, stop in _contiguous(rows[flat.label[rows] == 0]):
        known[flat.node_code[flat.node_ptr[start] : flat.node_ptr[stop]]] = True
    return flat.ids[known]


def longest_log_s(flat: FlatGraphs, rows: Ints) -> float:
    """Returns for how many seconds the benign ones of the windows `rows` observe a log, at most."""
    benign = rows[flat.label[rows] == 0]
    begin, end = np.full(len(flat.sources), np.inf), np.full(len(flat.sources), -np.inf)
    np.minimum.at(begin, flat.source[benign], flat.start_time[benign])
    np.maximum.at(end, flat.source[benign], flat.end_time[benign])
    return float(np.max(end - begin, where=end > begin, initial=0.0))


def rare_ids(flat: FlatGraphs, rows: Ints) -> dict[str, Any]:
    """Returns, as strict JSON, of which IDs the windows `rows` are too short to tell the timing, with the frames of
    each; and for how many seconds they observe a benign log, at most: they may lack an ID that comes less often.
    """
    frames, logs = count_frames(flat, rows)
    few = np.flatnonzero((logs > 0) & (frames - logs < LEAST_GAPS))
    return {"log_s": longest_log_s(flat, rows), "frames": {str(flat.ids[code]): int(frames[code]) for code in few}}


def training_bases(flat: FlatGraphs, rows: Ints) -> dict[str, str]:
    """Returns, as strict JSON, in which bases the logs of the windows `rows` write CAN IDs (`id`) and payload bytes
    (`byte`): `hex` or `dec`; empty where they tell none, or both.
    """
    sources = [flat.sources[index] for index in np.unique(flat.source[rows])]
    bases = {"id": {source.id_base for source in sources}, "byte": {source.byte_base for source in sources}}
    return {name: "".join(written) if len(written) == 1 else "" for name, written in bases.items()}


def read_as_trained(dataset: CanDatasetSettings, judgement: Mapping[str, Any]) -> CanDatasetSettings:
    """Returns how a finished run reads other logs: where these do not tell the bases of their numbers, those of its
    training data hold.
    """
    trained = judgement.get("bases", {"id": "", "byte": ""})  # older runs have none
    wanted = {"id": dataset.id_base, "byte": dataset.byte_base}
    id_base, byte_base = (
        f"auto_{trained[name]}" if base == "auto" and trained[name] else base for name, base in wanted.items()
    )
    return replace(dataset, id_base=id_base, byte_base=byte_base)


def rare_id_notes(judgement: Mapping[str, Any]) -> list[str]:
    """Tells of which CAN IDs training was too short to tell the timing, as a sentence; none if there is none."""
    rare = judgement.get("rare_ids")
    if not rare or not rare["frames"]:
        return []
    told = [f"{id_text(int(can_id))} ({count})" for can_id, count in rare["frames"].items()]
    more = f" and {len(told) - MOST_RARE_IDS:,} more" if len(told) > MOST_RARE_IDS else ""
    log = f"The longest benign training log is {rare['log_s']:.3g} s long"
    why = "too short to tell how often these CAN IDs come, whose gaps raise no alarm"
    return [f"{log}, {why} (frames in brackets): {', '.join(told[:MOST_RARE_IDS])}{more}"]


def new_id_gaps(flat: FlatGraphs, rows: Ints, vocabulary: Ints) -> dict[int, float]:
    """Returns, by each ID of the windows `rows` that is not in the vocabulary, the shortest time between two of its
    frames in seconds; infinity: it came once.
    """
    nodes = members(flat.node_ptr, rows).positions
    nodes = nodes[~np.isin(flat.ids, vocabulary)[flat.node_code[nodes]]]
    shortest = np.full(len(flat.ids), np.inf)
    np.fmin.at(shortest, flat.node_code[nodes], np.exp2(flat.behaviour[nodes, _GAP_MIN].astype(np.float64)))
    codes = np.unique(flat.node_code[nodes])
    return dict(zip(flat.ids[codes].tolist(), shortest[codes].tolist(), strict=True))


def new_id_notes(judgement: Mapping[str, Any], gaps: Mapping[int, float]) -> list[str]:
    """Tells of the new CAN IDs that training may have been too short to see, as sentences; `gaps` has the shortest
    time between two frames of each new ID.
    """
    if "rare_ids" not in judgement:
        return []
    log_s = judgement["rare_ids"]["log_s"]
    once = sorted(can_id for can_id, gap in gaps.items() if gap == np.inf)
    slow = sorted(can_id for can_id, gap in gaps.items() if log_s <= gap < np.inf)
    log = f"the {log_s:.3g} s of the longest benign training log"
    told = {
        f"New, but expected to be, since they come less often than once in {log}": slow,
        f"New, and came once, which does not tell whether {log} were too short to see them": once,
    }
    return [f"{why}: {_named(ids)}" for why, ids in told.items() if ids]


def _named(ids: Sequence[int]) -> str:
    return ", ".join(map(id_text, ids[:MOST_NEW_IDS])) + (", …" if len(ids) > MOST_NEW_IDS else "")


def has_timing(flat: FlatGraphs, rows: Ints) -> Bools:
    """Returns [K] whether each ID has `LEAST_GAPS` gaps in the benign ones of the windows `rows`."""
    frames, logs = count_frames(flat, rows)
    return frames - logs >= LEAST_GAPS


def count_frames(flat: FlatGraphs, rows: Ints) -> tuple[Ints, Ints]:
    """Counts [K] the frames of each ID, and the logs that have it, in the benign ones of the windows `rows`; exactly
    where they are few, however much windows overlap.
    """
    benign = rows[flat.label[rows] == 0]
    nodes = members(flat.node_ptr, benign)
    code, row = flat.node_code[nodes.positions], np.repeat(benign, nodes.sizes)
    in_window = flat.node_features[nodes.positions, NODE_FEATURES.index("count")].astype(np.int64)
    windows, most = np.bincount(code, minlength=len(flat.ids)), np.zeros(len(flat.ids), np.int64)
    np.maximum.at(most, code, in_window)
    # A window that has an ID tells when it was seen last.
    steps = np.diff(flat.first_frame)
    overlap = int(np.ceil(flat.window / steps[steps > 0].min(initial=flat.window)))
    few = np.flatnonzero((windows <= overlap * (LEAST_GAPS + 1))[code])
    code, source = code[few], flat.source[row[few]]
    seen_s = flat.end_time[row[few]] - np.exp2(flat.behaviour[nodes.positions[few], _SILENCE].astype(np.float64))
    order = np.lexsort((seen_s, source, code))
    code, source, seen_s = code[order], source[order], seen_s[order]
    other_log = np.ones(len(code), np.bool_)
    other_log[1:] = (np.diff(code) != 0) | (np.diff(source) != 0)
    other_frame = other_log.copy()
    other_frame[1:] |= np.diff(seen_s) > SAME_FRAME_S
    frames = np.where(windows > overlap * (LEAST_GAPS + 1), windows // overlap, 0)
    frames += np.bincount(code, weights=other_frame, minlength=len(frames)).astype(np.int64) + np.maximum(most - 1, 0)
    return frames, np.bincount(code, weights=other_log, minlength=len(frames)).astype(np.int64)


class InputEncoder(nn.Module):
    """Makes a network's inputs of a batch.

    Args:
        statistics: Vocabulary and scale.
        embedding: Width of the embedding of a CAN ID.
        dataset: Whether IDs are seen (`identity`), and which `features` a node has.
    """

    vocabulary: Tensor
    node_mean: Tensor
    node_std: Tensor
    edge_mean: Tensor
    edge_std: Tensor
    behaviour_mean: Tensor
    behaviour_std: Tensor
    id_mean: Tensor
    id_std: Tensor
    past_std: Tensor
    id_silence: Tensor
    target_weights: Tensor

    def __init__(self, statistics: InputStatistics, *, embedding: int, dataset: CanDatasetSettings) -> None:
        super().__init__()
        self.identity = dataset.identity
        self.behaviour = dataset.features == BEHAVIOUR_FEATURES
        self.register_buffer("target_weights", torch.from_numpy(target_weights(dataset)).float(), persistent=False)
        self.register_buffer("vocabulary", torch.from_numpy(statistics.vocabulary.copy()))
        for name in statistics._fields[1:]:
            self.register_buffer(name, torch.from_numpy(getattr(statistics, name)).float())
        # One row more than IDs: index 0 is the unknown ID.
        self.embedding = nn.Embedding(len(statistics.vocabulary) + 1, embedding) if self.identity else None
        # Columns of `deviations`.
        self.num_deviations = 3 * len(BEHAVIOUR) + 1 if self.behaviour else 0
        width = len(NODE_FEATURES) + 2 * len(EDGE_FEATURES) + self.num_deviations
        self.width = width + (embedding if self.identity else 0)

    def id_index(self, batch: GraphBatch) -> Tensor:
        """Looks up [N] IDs: 1 + position in the vocabulary, or `UNKNOWN_ID`, as all are without `identity`.

        On a bus most of whose IDs are unknown, the others are too: there, such a number names another message.
        """
        if not self.identity:
            return torch.zeros_like(batch.can_id)
        index = self._look_up(batch.can_id)
        known = index != UNKNOWN_ID
        return torch.where(known & (_known_share(batch, known)[batch.batch] > LEAST_KNOWN_SHARE), index, UNKNOWN_ID)

    def _look_up(self, can_id: Tensor) -> Tensor:
        position = torch.searchsorted(self.vocabulary, can_id).clamp(max=len(self.vocabulary) - 1)
        return torch.where(self.vocabulary[position] == can_id, position + 1, UNKNOWN_ID)

    def visible_index(self, batch: GraphBatch) -> Tensor:
        """Looks up [N] IDs; those of hidden windows are unknown."""
        index = self.id_index(batch)
        return index if batch.hidden is None else torch.where(batch.hidden[batch.batch], UNKNOWN_ID, index)

    def scaled(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Standardises [N, 10] node and [E, 11] edge features, and compresses large values."""
        # A flooded bus is hundreds of deviations from the mean. asinh is the identity near zero and a logarithm far
        # from it, so that such a value neither dominates a gradient nor is clipped to look like any other.
        node = (batch.x - self.node_mean) / self.node_std
        edge = (batch.edge_attr - self.edge_mean) / self.edge_std
        return torch.asinh(node), torch.asinh(edge)

    def targets(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Returns what an autoencoder reconstructs: [N, 10] scaled node features, with [N, C] of `deviations` in units
        of each ID's own benign spread (of an unknown ID, from its past), and [E, 11] scaled edge features. No ID is
        hidden.
        """
        node, edge = self.scaled(batch)
        if self.behaviour:
            index, columns = self.id_index(batch), len(BEHAVIOUR)
            own, past = self.deviations(batch, index)[:, : 2 * columns].split(columns, dim=1)
            node = torch.cat([node, torch.where((index != UNKNOWN_ID)[:, None], own, past).to(node.dtype)], dim=1)
        return node, edge

    def deviations(self, batch: GraphBatch, index: Tensor) -> Tensor:
        """Compares each ID with what is usual of it; `index` [N] is the one that the network may see.

        Returns:
            [N, 3 C + 1]: the behaviour compared with the ID's own in training (0 of an unknown ID), with its past in
            this log, and with all IDs in training; and its `strangeness`.
        """
        known = (index != UNKNOWN_ID)[:, None]
        strange = self.strangeness(batch, index)[:, None]
        young = YOUNG_WINDOWS / (batch.past_windows + YOUNG_WINDOWS)
        past = self._difference(batch, batch.past, self.past_std) * (1 - young)[:, None]
        own = torch.where(known, self._difference(batch, self.id_mean[index], self.id_std[index]), 0.0)
        overall = (batch.behaviour - self.behaviour_mean) / self.behaviour_std
        # On a bus that is known, the past of a stranger is the attack's own.
        views = [own, past * (1 - strange), overall.nan_to_num(0.0)]
        return torch.cat([*(torch.asinh(view) for view in views), strange], dim=1)

    def strangeness(self, batch: GraphBatch, index: Tensor) -> Tensor:
        """Returns [N] how much of a stranger each ID is, from 0 (known, on a bus that is not, or so rare that training
        may have missed it) to nearly 1 (the only unknown one of many).
        """
        known = index != UNKNOWN_ID
        # Training was too short to see an ID that comes less often than it is long.
        expected = batch.behaviour[:, _GAP_MEAN] >= self.id_mean[UNKNOWN_ID, _GAP_MEAN]
        return torch.where(known | expected, 0.0, _familiarity(batch, known)[batch.batch])

    def overdue(self, batch: GraphBatch) -> Tensor:
        """Returns [A] how suspicious it is that each regular ID is missing: from 0 (it was silent for as long in benign
        training windows, or is not known, as none is without `identity`) to 1.
        """
        own, (low, high) = self._look_up(batch.absent_id), OVERDUE
        longer = ((batch.absent_silence - self.id_silence[own] - low) / (high - low)).clamp(0, 1)
        if not self.behaviour:
            return torch.zeros_like(longer)
        familiarity = _familiarity(batch, self.id_index(batch) != UNKNOWN_ID)[batch.absent_batch]
        return torch.where(own != UNKNOWN_ID, longer * familiarity, 0.0)

    def _difference(self, batch: GraphBatch, usual: Tensor, std: Tensor) -> Tensor:
        """Returns [N, C] differences from what is usual, in units of `std`; 0 where there is nothing to compare."""
        difference = torch.where(usual < ENDLESS, (batch.behaviour - usual) / std, 0.0)
        # Silence is measured in periods: all that is usual of it is that it ends before the next frame is due.
        overdue = (batch.behaviour[:, _SILENCE] - usual[:, _GAP_MEAN]).clamp(min=LEAST_SILENCE)
        columns = [difference[:, :_SILENCE], overdue[:, None], difference[:, _SILENCE + 1 :]]
        return torch.cat(columns, dim=1).nan_to_num(0.0)

    def forward(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Returns node inputs [N, width] and edge inputs [E, 11]; the deviations are the last columns of a node."""
        node, edge = self.scaled(batch)
        index = self.visible_index(batch)
        # A node also sees the mean of the edges that enter and that leave it: attention layers use an edge's features
        # to weigh messages, and never as their content.
        leaving, entering = (scatter(edge, end, dim_size=len(node), reduce="mean") for end in batch.edge_index)
        parts = [node, entering, leaving]
        if self.behaviour:
            # How often IDs follow one another differs between vehicles: an ID is compared with its window's others.
            entering, leaving = (_centred(batch, mean) for mean in (entering, leaving))
            # The means of payload bytes come first. They say nothing of an ID that is not known.
            seen = torch.where((index != UNKNOWN_ID)[:, None], node[:, :MAX_PAYLOAD_BYTES], 0.0)
            parts = [seen, node[:, MAX_PAYLOAD_BYTES:], entering, leaving, self.deviations(batch, index).to(node.dtype)]
        if self.embedding is not None:
            parts.insert(0, self.embedding(index).to(node.dtype))
        return torch.cat(parts, dim=1), edge


def _known_share(batch: GraphBatch, known: Tensor) -> Tensor:
    """Returns [B] the share of each window's IDs that are `known` [N]; the older an ID is, the more it counts."""
    # Many made-up IDs are no other bus: each of them is new, while those of the vehicle have been there for long.
    age = batch.past_windows.to(batch.x.dtype) + 1
    old, whole = (
        scatter(weight, batch.batch, dim=0, dim_size=batch.num_graphs, reduce="sum") for weight in (age * known, age)
    )
    share: Tensor = old / whole
    return share


def _familiarity(batch: GraphBatch, known: Tensor) -> Tensor:
    """Returns [B] how well the bus is known of which [N] IDs are: from 0 (up to `LEAST_KNOWN_SHARE`) to 1 (all)."""
    return ((_known_share(batch, known) - LEAST_KNOWN_SHARE) / (1 - LEAST_KNOWN_SHARE)).clamp(min=0)


def _centred(batch: GraphBatch, features: Tensor) -> Tensor:
    """Subtracts from features [N, F] their mean over each window."""
    mean = scatter(features, batch.batch, dim=0, dim_size=batch.num_graphs, reduce="mean")
    centred: Tensor = features - mean[batch.batch]
    return centred


def _mean_and_std(features: NDArray[np.float32], ptr: Ints, rows: Ints) -> tuple[Floats, Floats]:
    """Returns mean and standard deviation of each column over the members of the windows `rows`."""
    count, total, squares = 0, np.zeros(features.shape[1]), np.zeros(features.shape[1])
    for start, stop in _contiguous(rows):
        values = features[ptr[start] : ptr[stop]].astype(np.float64)
        count += len(values)
        total += values.sum(axis=0)
        squares += np.square(values).sum(axis=0)
    mean = total / max(count, 1)
    variance = squares / max(count, 1) - mean**2
    # A constant column has no scale: it stays as it is.
    return mean, np.where(variance > MIN_VARIANCE, np.sqrt(np.maximum(variance, MIN_VARIANCE)), 1.0)


def _usual_behaviour(flat: FlatGraphs, rows: Ints, vocabulary: Ints) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Returns what is usual of all IDs and of each, as `InputStatistics` has it: from the benign ones of the windows
    `rows`.
    """
    size, columns = len(vocabulary) + 1, len(BEHAVIOUR)
    index_of = np.zeros(len(flat.ids), dtype=np.int64)
    index_of[np.searchsorted(flat.ids, vocabulary)] = np.arange(1, size)
    count, total, squares = np.zeros((size, 1)), np.zeros((size, columns)), np.zeros((size, columns))
    settled, differences = 0, np.zeros(columns)
    for start, stop in _contiguous(rows[flat.label[rows] == 0]):
        nodes = np.arange(flat.node_ptr[start], flat.node_ptr[stop])
        nodes = nodes[~np.isnan(flat.behaviour[nodes, 0])]
        now, index = flat.behaviour[nodes].astype(np.float64), index_of[flat.node_code[nodes]]
        count += np.bincount(index, minlength=size)[:, None]
        for column, values in enumerate(now.T):
            total[:, column] += np.bincount(index, weights=values, minlength=size)
            squares[:, column] += np.bincount(index, weights=values * values, minlength=size)
        old = flat.past_windows[nodes] >= SETTLED_WINDOWS
        settled += int(old.sum())
        differences += np.square(now[old] - flat.past[nodes][old]).sum(axis=0)
    whole = max(count.sum(), 1.0)
    mean = total / np.maximum(count, 1)
    variance = np.maximum(squares / np.maximum(count, 1) - mean * mean, 0.0)
    within = (variance * count).sum(axis=0) / whole
    id_std = np.sqrt((variance * count + POOLED_WINDOWS * within) / (count + POOLED_WINDOWS))
    overall = total.sum(axis=0) / whole
    overall_std = np.sqrt(np.maximum(squares.sum(axis=0) / whole - overall**2, 0.0))
    past_std = np.sqrt(differences / max(settled, 1))
    spreads = [np.maximum(std, LEAST_STD) for std in (overall_std, id_std, past_std)]
    return overall, spreads[0], mean, spreads[1], spreads[2]


def _longest_silences(flat: FlatGraphs, rows: Ints, vocabulary: Ints, usual: Floats) -> Floats:
    """Returns `InputStatistics.id_silence`, from the benign ones of the windows `rows`; `usual` is `id_mean`."""
    longest = np.full(len(flat.ids), -np.inf)
    in_log = np.zeros((len(flat.sources), len(flat.ids)), np.bool_)
    for start, stop in _contiguous(rows[flat.label[rows] == 0]):
        nodes = slice(flat.node_ptr[start], flat.node_ptr[stop])
        absences = slice(flat.absent_ptr[start], flat.absent_ptr[stop])
        np.maximum.at(longest, flat.node_code[nodes], flat.behaviour[nodes, _SILENCE])
        np.maximum.at(longest, flat.absent_code[absences], flat.absent_silence[absences])
        in_log[np.repeat(flat.source[start:stop], flat.num_nodes[start:stop]), flat.node_code[nodes]] = True
    known = np.searchsorted(flat.ids, vocabulary)
    punctual = (longest[known] <= usual[1:, _GAP_MEAN] + PUNCTUAL) & (in_log.sum(axis=0)[known] >= PUNCTUAL_LOGS)
    return np.concatenate([[ENDLESS], np.where(punctual, longest[known], ENDLESS)])


def _contiguous(rows: Ints) -> list[tuple[int, int]]:
    """Cuts rows into half-open runs of adjacent ones, each of at most `WINDOWS_AT_A_TIME`."""
    ordered = np.sort(rows)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    return [
        (int(part[0]), int(part[-1]) + 1)
        for run in np.split(ordered, breaks)
        for part in np.split(run, range(WINDOWS_AT_A_TIME, len(run), WINDOWS_AT_A_TIME))
        if len(part)
    ]
