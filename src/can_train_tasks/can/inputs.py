"""Inputs of the networks: CAN IDs as embeddings, standardised counts and times, and the behaviour of each ID.

The behaviour of an ID is compared with its benign training windows and with its past in the log. Vocabulary and scale
are fitted on training windows and saved with the weights, so a checkpoint scores any log without the training data.

Shapes: B graphs, N nodes, E edges, A absences, K CAN IDs of a data set, V CAN IDs of the vocabulary, C columns of
`BEHAVIOUR`, D columns of `deviations`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from can_train.fit.packing import members
from can_train_tasks.can.data.batches import Batch, GraphBatch, PreparedBatch, Reconstructed, scatter
from can_train_tasks.can.data.behaviour import BEHAVIOUR
from can_train_tasks.can.data.graphs import EDGE_FEATURES, NODE_FEATURES, Bools, FlatGraphs, Floats, Ints, id_text
from can_train_tasks.can.data.payload_fields import MAX_PAYLOAD_BYTES
from can_train_tasks.can.settings import BEHAVIOUR_FEATURES, CanDatasetSettings

UNKNOWN_ID: Final = 0  # vocabulary index of an ID that training did not see, or that is hidden
MIN_VARIANCE: Final = 1e-12  # a column with a smaller variance counts as constant
WINDOWS_AT_A_TIME: Final = 4096  # windows whose features are summed at a time, to bound the float64 copy
# Least standard deviation of each column of `BEHAVIOUR`, in the column's unit: an ID with a precise clock must not
# raise an alarm by being late by a hundredth of its period.
LEAST_STD: Final = np.array([0.05, 0.05, 0.02, 0.05, 1.0, 0.1, 0.05])
POOLED_WINDOWS: Final = 10  # weight, in windows, of the spread of all IDs in the spread of one ID
SETTLED_WINDOWS: Final = 10  # windows of an ID in a log after which its past is a measure of its usual behaviour
YOUNG_WINDOWS: Final = 4.0  # with this many earlier windows in a log, an ID's difference from its past counts half
# Weights of features whose errors depend on the driver, or on the chance position of a frame in its window. Other
# features weigh 1: an injected frame disturbs an ID's rhythm in any drive.
WEAK_TARGETS: Final = {
    **dict.fromkeys(NODE_FEATURES[:MAX_PAYLOAD_BYTES], 0.1), "last_position": 0.1, "bits_changed": 0.2, "unchanged": 0.2
}  # fmt: skip
LEAST_KNOWN_SHARE: Final = 0.5  # a bus with no larger share of known IDs counts as a bus that training did not see
# Only a punctual ID can be overdue: it was in `PUNCTUAL_LOGS` benign logs, and the binary logarithm of its longest
# silence ÷ its mean gap is at most `PUNCTUAL`. IDs whose frames depend on the driver or the vehicle's state may be
# silent in another drive: on other drives of four simulated vehicles, IDs that were punctual in 1, 2, 4 and 5 drives of
# a minute were overdue in 18, 4, 2 and 0.2 % of the benign windows; with one drive of three minutes, in 11 %.
PUNCTUAL_LOGS: Final = 5
PUNCTUAL: Final = 1.0
ENDLESS: Final = 100.0  # binary logarithm of a silence that no ID exceeds
# Suspicion rises from 0 to 1 between these binary logarithms of an absent ID's silence ÷ its longest silence in benign
# training windows. On other drives of six simulated vehicles, 0.2 % of the benign windows lack an ID for 1.7 times its
# longest silence, and no window for twice that time.
OVERDUE: Final = (1.0, 1.5)
# Least number of gaps between an ID's frames in benign training windows for its timing to be known. With fewer gaps, a
# longer gap is no sign of an attack.
LEAST_GAPS: Final = 3
MOST_RARE_IDS: Final = 10  # IDs with unknown timing that a note names
MOST_NEW_IDS: Final = 5  # new IDs that a note names
SAME_FRAME_S: Final = 0.001  # frames of a rare ID lie further apart than this; the rounding of times is smaller
LEAST_SILENCE: Final = -3.0  # binary logarithm of silence ÷ period; smaller values depend only on where a window ends
_GAP_MIN, _GAP_MEAN, _SILENCE = (BEHAVIOUR.index(name) for name in ("gap_min", "gap_mean", "silence"))
_TIMING: Final = [BEHAVIOUR.index(name) for name in ("gap_min", "gap_mean", "gap_spread", "silence")]


class InputStatistics(NamedTuple):
    """Vocabulary and scale of the training windows."""

    # [V] CAN IDs of benign training windows, ascending. An ID that occurs only in attacks is not the vehicle's: it is
    # unknown, in training too.
    vocabulary: Ints
    node_mean: Floats  # [10]
    node_std: Floats  # [10]
    edge_mean: Floats  # [11]
    edge_std: Floats  # [11]
    behaviour_mean: Floats  # [C] over all IDs of benign windows
    behaviour_std: Floats  # [C]
    # [V + 1, C] mean behaviour of each ID in benign windows; `ENDLESS` in columns of timing that is not known. The mean
    # gap in row `UNKNOWN_ID` is the length of the longest benign log: training may have missed an ID with longer gaps.
    id_mean: Floats
    id_std: Floats  # [V + 1, C]
    past_std: Floats  # [C] root mean square difference between an ID in a benign window and its past
    # [V + 1] longest silence of each ID at the end of a benign window, binary logarithm of seconds; `ENDLESS` for an
    # ID that is not punctual
    id_silence: Floats

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints) -> Self:
        """Fits vocabulary and scale to the windows `rows`."""
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
    """Returns the weight of each node feature in a node's reconstruction error; the weights sum up to 1."""
    named = dict.fromkeys(NODE_FEATURES, 1.0)
    if dataset.features == BEHAVIOUR_FEATURES:
        named = dict.fromkeys((*NODE_FEATURES, *BEHAVIOUR), 1.0) | WEAK_TARGETS
    weights: Floats = np.array(list(named.values()))
    return weights / sum(named.values())


def known_ids(flat: FlatGraphs, rows: Ints) -> Ints:
    """Returns the vocabulary [V] of the windows `rows` (see `InputStatistics`)."""
    known = np.zeros(len(flat.ids), dtype=bool)
    for start, stop in _contiguous(rows[flat.label[rows] == 0]):
        known[flat.node_code[flat.node_ptr[start] : flat.node_ptr[stop]]] = True
    return flat.ids[known]


def longest_log_s(flat: FlatGraphs, rows: Ints) -> float:
    """Returns the longest time in seconds that the benign windows among `rows` observe of one drive."""
    benign = rows[flat.label[rows] == 0]
    num_drives = int(flat.drive.max(initial=-1)) + 1
    begin, end = np.full(num_drives, np.inf), np.full(num_drives, -np.inf)
    np.minimum.at(begin, flat.drive[benign], flat.start_time[benign])
    np.maximum.at(end, flat.drive[benign], flat.end_time[benign])
    return float(np.max(end - begin, where=end > begin, initial=0.0))


def rare_ids(flat: FlatGraphs, rows: Ints) -> dict[str, Any]:
    """Finds the IDs whose timing the windows `rows` are too short to tell.

    Returns:
        As strict JSON: `frames`, the number of frames of each such ID; `log_s`, the result of `longest_log_s`. The
        windows may lack an ID that comes less often than once in `log_s` seconds.
    """
    frames, logs = count_frames(flat, rows)
    few = np.flatnonzero((logs > 0) & (frames - logs < LEAST_GAPS))
    return {"log_s": longest_log_s(flat, rows), "frames": {str(flat.ids[code]): int(frames[code]) for code in few}}


def training_bases(flat: FlatGraphs, rows: Ints) -> dict[str, str]:
    """Returns, as strict JSON, the number bases of CAN IDs (`id`) and payload bytes (`byte`) in the logs of `rows`.

    A base is `hex` or `dec`; empty where the logs do not tell it, or differ in it.
    """
    sources = [flat.sources[index] for index in np.unique(flat.source[rows])]
    bases = {"id": {source.id_base for source in sources}, "byte": {source.byte_base for source in sources}}
    return {name: "".join(written) if len(written) == 1 else "" for name, written in bases.items()}


def read_as_trained(dataset: CanDatasetSettings, judgement: Mapping[str, Any]) -> CanDatasetSettings:
    """Returns a finished run's settings for reading other logs.

    Where a log does not tell the base of its numbers, the base of the training data is used.
    """
    trained = judgement.get("bases", {"id": "", "byte": ""})  # older runs have none
    wanted = {"id": dataset.id_base, "byte": dataset.byte_base}
    id_base, byte_base = (
        f"auto_{trained[name]}" if base == "auto" and trained[name] else base for name, base in wanted.items()
    )
    return replace(dataset, id_base=id_base, byte_base=byte_base)


def rare_id_notes(judgement: Mapping[str, Any]) -> list[str]:
    """Names, in a sentence, the CAN IDs whose timing training was too short to tell; no sentence without such IDs."""
    rare = judgement.get("rare_ids")
    if not rare or not rare["frames"]:
        return []
    told = [f"{id_text(int(can_id))} ({count})" for can_id, count in rare["frames"].items()]
    more = f" and {len(told) - MOST_RARE_IDS:,} more" if len(told) > MOST_RARE_IDS else ""
    log = f"The longest benign training log is {rare['log_s']:.3g} s long"
    why = "too short to tell how often these CAN IDs come, whose gaps raise no alarm"
    return [f"{log}, {why} (frames in brackets): {', '.join(told[:MOST_RARE_IDS])}{more}"]


def new_id_gaps(flat: FlatGraphs, rows: Ints, vocabulary: Ints) -> dict[int, float]:
    """Returns the shortest gap in seconds between frames of each ID of the windows `rows` that the vocabulary lacks.

    The gap of an ID that came only once is infinity.
    """
    nodes = members(flat.node_ptr, rows).positions
    nodes = nodes[~np.isin(flat.ids, vocabulary)[flat.node_code[nodes]]]
    shortest = np.full(len(flat.ids), np.inf)
    np.fmin.at(shortest, flat.node_code[nodes], np.exp2(flat.behaviour[nodes, _GAP_MIN].astype(np.float64)))
    codes = np.unique(flat.node_code[nodes])
    return dict(zip(flat.ids[codes].tolist(), shortest[codes].tolist(), strict=True))


def new_id_notes(judgement: Mapping[str, Any], gaps: Mapping[int, float]) -> list[str]:
    """Names, in sentences, the new CAN IDs that training may have been too short to see.

    `gaps` is the result of `new_id_gaps`: seconds by new ID.
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
    """Returns whether each ID [K] has `LEAST_GAPS` gaps in the benign windows among `rows`."""
    frames, logs = count_frames(flat, rows)
    return frames - logs >= LEAST_GAPS


def count_frames(flat: FlatGraphs, rows: Ints) -> tuple[Ints, Ints]:
    """Counts the frames of each ID [K], and the logs that have the ID [K], in the benign windows among `rows`.

    Small counts are exact even where windows overlap; large counts are estimates.
    """
    benign = rows[flat.label[rows] == 0]
    nodes = members(flat.node_ptr, benign)
    code, row = flat.node_code[nodes.positions], np.repeat(benign, nodes.sizes)
    in_window = flat.node_features[nodes.positions, NODE_FEATURES.index("count")].astype(np.int64)
    windows, most = np.bincount(code, minlength=len(flat.ids)), np.zeros(len(flat.ids), np.int64)
    np.maximum.at(most, code, in_window)
    # Each window with the ID gives the time of its last frame there; overlapping windows give the same time.
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
    """Makes a network's inputs from a batch.

    Args:
        statistics: Vocabulary and scale.
        embedding: Width of the embedding of a CAN ID.
        dataset: Settings that decide whether the network sees IDs (`identity`), and the `features` of a node.
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
    of_id: Tensor

    def __init__(self, statistics: InputStatistics, *, embedding: int, dataset: CanDatasetSettings) -> None:
        super().__init__()
        self.identity = dataset.identity
        self.behaviour = dataset.features == BEHAVIOUR_FEATURES
        self.register_buffer("target_weights", torch.from_numpy(target_weights(dataset)).float(), persistent=False)
        self.register_buffer("vocabulary", torch.from_numpy(statistics.vocabulary.copy()))
        for name in statistics._fields[1:]:
            self.register_buffer(name, torch.from_numpy(getattr(statistics, name)).float())
        # The embedding has V + 1 rows: row 0 is the unknown ID.
        self.embedding = nn.Embedding(len(statistics.vocabulary) + 1, embedding) if self.identity else None
        # Columns of `deviations`.
        self.num_deviations = 3 * len(BEHAVIOUR) + 1 if self.behaviour else 0
        width = len(NODE_FEATURES) + 2 * len(EDGE_FEATURES) + self.num_deviations
        self.width = width + (embedding if self.identity else 0)
        # Columns of a node that depend on its ID: payload bytes, deviations from the ID and its past, strangeness.
        of_id = torch.zeros(width, dtype=torch.bool)
        of_id[:MAX_PAYLOAD_BYTES] = True
        of_id[width - self.num_deviations : width - len(BEHAVIOUR) - 1] = of_id[-1] = True
        self.register_buffer("of_id", of_id, persistent=False)

    def id_index(self, batch: GraphBatch) -> Tensor:
        """Returns the index [N] of each node's ID: 1 + position in the vocabulary, or `UNKNOWN_ID`.

        Without `identity` all IDs are unknown. They are also all unknown on a bus where most IDs are: another vehicle
        uses a number of the vocabulary for another message.
        """
        return self._identified(batch)[0]

    def _identified(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Returns the index [N] of each node's ID, and the familiarity [B] of each bus."""
        if not self.identity:
            return torch.zeros_like(batch.can_id), batch.x.new_zeros(batch.num_graphs)
        index = self._look_up(batch.can_id)
        share = _known_share(batch, index != UNKNOWN_ID)
        return torch.where((share > LEAST_KNOWN_SHARE)[batch.batch], index, UNKNOWN_ID), _familiarity(share)

    def _look_up(self, can_id: Tensor) -> Tensor:
        position = torch.searchsorted(self.vocabulary, can_id).clamp(max=len(self.vocabulary) - 1)
        return torch.where(self.vocabulary[position] == can_id, position + 1, UNKNOWN_ID)

    def scaled(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Standardises node features [N, 10] and edge features [E, 11], and compresses large values."""
        # A flooded bus is hundreds of standard deviations from the mean. asinh is the identity near zero and a
        # logarithm far from it: a large value does not dominate the gradient, and differs from other large values.
        node = (batch.x - self.node_mean) / self.node_std
        edge = (batch.edge_attr - self.edge_mean) / self.edge_std
        return torch.asinh(node), torch.asinh(edge)

    def deviations(self, batch: GraphBatch, index: Tensor) -> Tensor:
        """Compares the behaviour of each ID with its usual behaviour; `index` [N] is the ID that the network may see.

        Returns:
            [N, D] with D = 3 C + 1: the deviation from the ID in training (0 for an unknown ID), the deviation from its
            past in this log, the deviation from all IDs in training, and the `strangeness`.
        """
        strange = self.strangeness(batch, index)[:, None]
        own = self._difference(batch, self.id_mean[index], self.id_std[index])
        overall = (batch.behaviour - self.behaviour_mean) / self.behaviour_std
        # On a known bus, an unknown ID is probably an attacker's: its past would make the attack look usual.
        views = [
            torch.where((index != UNKNOWN_ID)[:, None], own, 0.0),
            self._from_past(batch) * (1 - strange),
            overall.nan_to_num(0.0),
        ]
        return torch.cat([*(torch.asinh(view) for view in views), strange], dim=1)

    def strangeness(self, batch: GraphBatch, index: Tensor) -> Tensor:
        """Returns the strangeness [N] of each ID, from 0 to nearly 1.

        It is 0 for a known ID, for an ID on an unknown bus, and for an ID so rare that training may have missed it; and
        nearly 1 for the only unknown ID among many known IDs.
        """
        known = index != UNKNOWN_ID
        # Training may have missed an ID whose gaps are longer than the longest training log.
        expected = batch.behaviour[:, _GAP_MEAN] >= self.id_mean[UNKNOWN_ID, _GAP_MEAN]
        return torch.where(known | expected, 0.0, _familiarity(_known_share(batch, known))[batch.batch])

    def overdue(self, batch: GraphBatch) -> Tensor:
        """Returns the suspicion [A], from 0 to 1, that the absence of each regular ID raises.

        It is 0 for an ID that was silent as long in benign training windows, for an unknown ID, and without `identity`.
        """
        own, (low, high) = self._look_up(batch.absent_id), OVERDUE
        longer = ((batch.absent_silence - self.id_silence[own] - low) / (high - low)).clamp(0, 1)
        if not self.behaviour:
            return torch.zeros_like(longer)
        familiarity = self._identified(batch)[1][batch.absent_batch]
        return torch.where(own != UNKNOWN_ID, longer * familiarity, 0.0)

    def _from_past(self, batch: GraphBatch) -> Tensor:
        """Returns the deviations [N, C] of behaviour from its past, which are smaller where the past is short."""
        young = YOUNG_WINDOWS / (batch.past_windows + YOUNG_WINDOWS)
        return self._difference(batch, batch.past, self.past_std) * (1 - young)[:, None]

    def _difference(self, batch: GraphBatch, usual: Tensor, std: Tensor) -> Tensor:
        """Returns the differences [N, C] of behaviour and `usual`, in units of `std`; 0 where either is not known."""
        difference = torch.where(usual < ENDLESS, (batch.behaviour - usual) / std, 0.0)
        # Silence is measured in periods and not against a usual silence: silence should end before a frame is due.
        overdue = (batch.behaviour[:, _SILENCE] - usual[:, _GAP_MEAN]).clamp(min=LEAST_SILENCE)
        columns = [difference[:, :_SILENCE], overdue[:, None], difference[:, _SILENCE + 1 :]]
        return torch.cat(columns, dim=1).nan_to_num(0.0)

    def prepared(self, batch: Batch, *, reconstructs: bool = False) -> PreparedBatch:
        """Computes all that the graphs and the statistics decide; a batch that is prepared already stays as it is.

        With `reconstructs`, the result has the features that an autoencoder reconstructs: scaled node and edge
        features; with `behaviour`, the node features also have C deviations: a known ID's from its benign training
        windows, an unknown ID's from its past.
        """
        if isinstance(batch, PreparedBatch):
            return batch
        node, edge = self.scaled(batch)
        index = self.id_index(batch)
        deviations = self.deviations(batch, index) if self.behaviour else node[:, :0]
        ends, messages = with_self_loops(batch, edge)
        return PreparedBatch(
            index=index,
            node=torch.cat(self._columns(batch, (node, edge), index, deviations), dim=1),
            past=self._past(batch),
            ends=ends,
            edge=messages,
            batch=batch.batch,
            label=batch.label,
            reconstructed=self._reconstructed(batch, (node, edge), index, deviations) if reconstructs else None,
            hidden=batch.hidden,
        )

    def prepares_as(self, other: "InputEncoder") -> bool:
        """Returns whether both encoders prepare the same inputs: they have the same settings and statistics."""
        if (self.identity, self.behaviour) != (other.identity, other.behaviour):
            return False
        ours, theirs = (dict(encoder.named_buffers(recurse=False)) for encoder in (self, other))
        return all(
            part.dtype == theirs[name].dtype and torch.equal(part.cpu(), theirs[name].cpu())
            for name, part in ours.items()
        )

    def _columns(
        self, batch: GraphBatch, scaled: tuple[Tensor, Tensor], index: Tensor, deviations: Tensor
    ) -> list[Tensor]:
        """Returns the columns of a node's inputs; `scaled` are node features [N, 10] and edge features [E, 11]."""
        node, edge = scaled
        # A node's inputs include the means over its entering and its leaving edges: attention layers use edge features
        # to weigh messages, and never as the content of messages.
        leaving, entering = (scatter(edge, end, node.shape[0], "mean") for end in batch.edge_index)
        if not self.behaviour:
            return [node, entering, leaving]
        # How often IDs follow one another differs between vehicles: the window's mean is subtracted.
        entering, leaving = (_centred(batch, mean) for mean in (entering, leaving))
        # The first columns are the means of payload bytes, which have no meaning for an unknown ID.
        seen = torch.where((index != UNKNOWN_ID)[:, None], node[:, :MAX_PAYLOAD_BYTES], 0.0)
        return [seen, node[:, MAX_PAYLOAD_BYTES:], entering, leaving, deviations.to(node.dtype)]

    def _past(self, batch: GraphBatch) -> Tensor | None:
        if batch.hidden is None or not self.behaviour:
            return None
        return torch.asinh(self._from_past(batch)).to(batch.x.dtype)

    def _reconstructed(
        self, batch: GraphBatch, scaled: tuple[Tensor, Tensor], index: Tensor, deviations: Tensor
    ) -> Reconstructed:
        node, edge = scaled
        if self.behaviour:
            trained, past = deviations[:, : 2 * len(BEHAVIOUR)].split(len(BEHAVIOUR), dim=1)
            node = torch.cat([node, torch.where((index != UNKNOWN_ID)[:, None], trained, past).to(node.dtype)], dim=1)
        return Reconstructed(node=node, edge=edge, ends=batch.edge_index)

    def forward(self, batch: PreparedBatch) -> Tensor:
        """Returns node inputs [N, width]; the deviations are the last columns."""
        index, node = batch.index, batch.node
        if batch.hidden is not None:
            hidden = batch.hidden.index_select(0, batch.batch)
            index = torch.where(hidden, UNKNOWN_ID, index)
            if batch.past is not None:
                node = self._without_ids(node, batch.past, hidden[:, None])
        if self.embedding is None:
            return node
        return torch.cat([self.embedding(index).to(node.dtype), node], dim=1)

    def _without_ids(self, node: Tensor, past: Tensor, hidden: Tensor) -> Tensor:
        """Returns the columns of nodes as on an unknown bus where their IDs are `hidden` [N, 1]."""
        after = len(BEHAVIOUR) + 1  # the deviations from all IDs, and the strangeness
        past = functional.pad(past, (node.shape[1] - past.shape[1] - after, after))
        return torch.where(hidden & self.of_id, past, node)


def with_self_loops(batch: GraphBatch, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces self-loops: each node gets one self-loop, with the mean features of its other entering edges.

    Returns:
        Ends [2, E' + N] and features [E' + N, 11] of the edges: E' edges between nodes, then the self-loops.
    """
    # Not its len(), which would fix the number when a network is exported.
    num_nodes = batch.can_id.shape[0]
    ends, edge = batch.edge_index.index_select(1, batch.between), edge.index_select(0, batch.between)
    loops = torch.arange(num_nodes, device=ends.device).expand(2, -1)
    mean = scatter(edge, ends[1], num_nodes, "mean")
    return torch.cat([ends, loops], dim=1), torch.cat([edge, mean])


def _known_share(batch: GraphBatch, known: Tensor) -> Tensor:
    """Returns the share [B] of each window's IDs that are `known` [N], weighted by the age of an ID."""
    # A flood of made-up IDs must not look like another bus. Made-up IDs are new, the vehicle's IDs are old.
    age = batch.past_windows.to(batch.x.dtype) + 1
    old, whole = (scatter(weight, batch.batch, batch.num_graphs) for weight in (age * known, age))
    return old / whole


def _familiarity(share: Tensor) -> Tensor:
    """Returns the familiarity [B] of a bus with a `share` [B] of known IDs: 0 up to `LEAST_KNOWN_SHARE`, 1 for 1."""
    return ((share - LEAST_KNOWN_SHARE) / (1 - LEAST_KNOWN_SHARE)).clamp(min=0)


def _centred(batch: GraphBatch, features: Tensor) -> Tensor:
    """Subtracts the window's mean from features [N, F]."""
    return features - scatter(features, batch.batch, batch.num_graphs, "mean")[batch.batch]


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
    # A constant column has no scale: it is only centred.
    return mean, np.where(variance > MIN_VARIANCE, np.sqrt(np.maximum(variance, MIN_VARIANCE)), 1.0)


def _usual_behaviour(flat: FlatGraphs, rows: Ints, vocabulary: Ints) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Measures the usual behaviour in the benign windows among `rows`.

    Returns:
        `behaviour_mean`, `behaviour_std`, `id_mean`, `id_std` and `past_std` of `InputStatistics`.
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
    """Returns `InputStatistics.id_silence` for the benign windows among `rows`; `usual` is `id_mean`."""
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
    """Cuts rows into half-open ranges of adjacent rows, each with at most `WINDOWS_AT_A_TIME` rows."""
    ordered = np.sort(rows)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    return [
        (int(part[0]), int(part[-1]) + 1)
        for run in np.split(ordered, breaks)
        for part in np.split(run, range(WINDOWS_AT_A_TIME, len(run), WINDOWS_AT_A_TIME))
        if len(part)
    ]
