"""Contributions of each CAN ID, and of each property of the ID, to a window's score.

Shapes: B windows of the batch, N nodes, E edges, A absences, I = N + A IDs (window after window; in each window the
nodes, then the absences), C input columns, P properties that networks know (`NETWORK_PROPERTIES`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from can_train_tasks.can.data.batches import GraphBatch, scatter
from can_train_tasks.can.data.behaviour import BEHAVIOUR, WORDS
from can_train_tasks.can.data.graphs import EDGE_FEATURES
from can_train_tasks.can.data.payload_fields import MAX_PAYLOAD_BYTES
from can_train_tasks.can.evaluation.metrics import ERROR_TERMS, ERROR_WEIGHTS
from can_train_tasks.can.inputs import with_self_loops
from can_train_tasks.can.models import MISSING_ID, GatClassifier, Vgae, worst_nodes

# Properties of a CAN ID in a window that a person can look up in the log. Several columns of a network's input may
# describe one property.
IDENTITY: Final = "identity"  # the ID itself
FRAMES: Final = "frames"  # number of the ID's frames in the window
LAST: Final = "last"  # position of the ID's last frame in the window
GAP: Final = "gap"  # time between a frame of the ID and the frames of other IDs before and after it
PERIOD: Final = "period"  # time between frames of the ID, and its frames per second
SILENCE: Final = "silence"  # time since the ID's last frame
CHANGE: Final = "change"  # changes of the payload from frame to frame
NEIGHBOURS: Final = "neighbours"  # IDs that come before and after the ID, and how often
COUNTER: Final = "counter"  # a counter in the payload that misses a step
CHECKSUM: Final = "checksum"  # a checksum in the payload that is wrong
LATENT: Final = "latent"  # all properties together, as an autoencoder encodes them
BYTES: Final = tuple(f"byte_{number}" for number in range(1, MAX_PAYLOAD_BYTES + 1))  # means of payload bytes
JUMPS: Final = tuple(f"jump_{word}" for word in WORDS)  # jumps of values in the payload
CONTEXTS: Final = tuple(f"context_{word}" for word in WORDS)  # values in the payload that disagree with other IDs
NETWORK_PROPERTIES: Final = (IDENTITY, *BYTES, FRAMES, LAST, GAP, PERIOD, SILENCE, CHANGE, NEIGHBOURS, LATENT)
RULE_PROPERTIES: Final = (COUNTER, CHECKSUM, *JUMPS, *CONTEXTS)  # known to the rules alone
PROPERTIES: Final = (*NETWORK_PROPERTIES, *RULE_PROPERTIES)

_GAP_FEATURES: Final = ("interval_mean_ms", "interval_std_ms", "regularity")
_CHANGE_FEATURES: Final = ("bits_changed", "unchanged")
_LAST_FEATURES: Final = ("first_position", "last_position", "spread")
_OF_NODE: Final = [*BYTES, FRAMES, LAST]  # in the order of `NODE_FEATURES`
_OF_BEHAVIOUR: Final = [
    SILENCE if name == "silence" else CHANGE if name in _CHANGE_FEATURES else PERIOD for name in BEHAVIOUR
]
_OF_EDGE: Final = [
    GAP if name in _GAP_FEATURES else LAST if name in _LAST_FEATURES else NEIGHBOURS for name in EDGE_FEATURES
]


def classifier_contributions(model: GatClassifier, batch: GraphBatch) -> Tensor:
    """Returns the contributions [I, P] to a classifier's score.

    The contribution of a node is gradient × input of the attack logit minus the benign logit, where it is positive. The
    contribution of an overdue ID is its addition to the score.
    """
    # On the synthetic test folders attention names an injected ID less often: attention weights show which messages a
    # layer reads, and not their effect on the score. Negative products are left out: they do not explain an alarm, and
    # would cancel the positive products that do.
    prepared = model.inputs.prepared(batch)
    node, edge = (part.detach().requires_grad_() for part in (model.inputs(prepared), model.inputs.scaled(batch)[1]))
    with torch.enable_grad():
        ends, messages = with_self_loops(batch, edge)
        logits = model.classify(node, replace(prepared, ends=ends, edge=messages))
        by_node, by_edge = torch.autograd.grad((logits[:, 1] - logits[:, 0]).sum(), (node, edge))
    # The last column, `strangeness`, is part of an ID's identity.
    deviations = [*_OF_BEHAVIOUR * 3, IDENTITY] if model.inputs.behaviour else []
    known = [*_OF_NODE, *_OF_EDGE, *_OF_EDGE, *deviations]
    columns = [*[IDENTITY] * (node.shape[1] - len(known)), *known]
    raising_node, raising_edge = (by_node * node).clamp(min=0), (by_edge * edge).clamp(min=0)
    shares = _sums(raising_node, columns) + _at_ends(_sums(raising_edge, _OF_EDGE), batch)
    return _with_absences(shares, model.inputs.overdue(batch) * MISSING_ID, batch)


def autoencoder_contributions(model: Vgae, batch: GraphBatch, units: Sequence[float]) -> Tensor:
    """Returns the terms [I, P] of the anomaly score, which is their sum, with its `units` (see `anomaly_scores`)."""
    prepared = model.prepared(batch)
    decoded = model.decode(prepared, None)
    node, edge = prepared.features.node, prepared.features.edge
    errors = model.errors(prepared, decoded)
    weights = dict(zip(ERROR_TERMS, (w / unit for w, unit in zip(ERROR_WEIGHTS, units, strict=True)), strict=True))
    graph_of_edge = batch.batch[batch.edge_index[0]]
    worst = worst_nodes(errors.node, batch.batch)
    nodes, edges, worsts = (
        torch.bincount(graph, minlength=batch.num_graphs) for graph in (batch.batch, graph_of_edge, batch.batch[worst])
    )
    of_node = weights["node"] / nodes[batch.batch]
    of_node[worst] += weights["worst"] / worsts[batch.batch[worst]]
    node_error = (decoded.node - node).square() * of_node[:, None] * model.inputs.target_weights.to(node.dtype)
    edge_error = (decoded.edge - edge).square() * (weights["edge"] / edge.shape[1]) / edges[graph_of_edge][:, None]
    columns = [*_OF_NODE, *(_OF_BEHAVIOUR if model.inputs.behaviour else [])]
    shares = _sums(node_error, columns) + _at_ends(_sums(edge_error, _OF_EDGE), batch)
    shares[:, NETWORK_PROPERTIES.index(LATENT)] = errors.kl * weights["latent"] / nodes[batch.batch]
    strange = model.inputs.strangeness(batch, model.inputs.id_index(batch))
    shares[:, NETWORK_PROPERTIES.index(IDENTITY)] = strange * weights["ids"]
    return _with_absences(shares, model.inputs.overdue(batch) * weights["ids"], batch)


def _with_absences(nodes: Tensor, overdue: Tensor, batch: GraphBatch) -> Tensor:
    """Inserts the contributions of overdue IDs [A] after the contributions [N, P] of their window's nodes: [I, P]."""
    absences = nodes.new_zeros(len(overdue), len(NETWORK_PROPERTIES))
    absences[:, NETWORK_PROPERTIES.index(SILENCE)] = overdue.to(nodes.dtype)
    order = torch.argsort(torch.cat([batch.batch, batch.absent_batch]), stable=True)
    return torch.cat([nodes, absences])[order]


def with_rule_columns(contributions: Tensor) -> Tensor:
    """Adds the columns of the rules, with zeros, to a network's contributions [I, P]: [I, columns of `PROPERTIES`]."""
    return functional.pad(contributions, (0, len(RULE_PROPERTIES)))


def shares_of_windows(contributions: Tensor, window: Tensor) -> Tensor:
    """Returns contributions [I, P] as shares of their sum over a window; `window` [I] is the window of each ID."""
    total = scatter(contributions.sum(dim=1), window, int(window.max()) + 1 if len(window) else 0)[window]
    return contributions / total.clamp(min=torch.finfo(total.dtype).tiny)[:, None]


def _sums(columns: Tensor, names: Sequence[str]) -> Tensor:
    """Adds up columns [·, C] to properties [·, P]; `names` gives the property of each column."""
    shares = columns.new_zeros(len(columns), len(NETWORK_PROPERTIES))
    places = torch.tensor([NETWORK_PROPERTIES.index(name) for name in names], device=columns.device)
    return shares.index_add(1, places, columns)


def _at_ends(edges: Tensor, batch: GraphBatch) -> Tensor:
    """Gives half of each edge's contributions [E, P] to each of its two nodes: [N, P]."""
    at_source, at_target = (scatter(edges, end, len(batch.can_id)) for end in batch.edge_index)
    return (at_source + at_target) / 2
