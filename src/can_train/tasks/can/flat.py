"""Window graphs as flat arrays: every graph's nodes and edges one after another, with offsets. The builder makes them,
the cache keeps them memory-mapped, the gatherer slices batches out of them; nothing holds one Python object per graph.

Shapes: G windows (graphs), N nodes, E directed edges, K distinct CAN IDs, S source files.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

NODE_FEATURES: Final = (*(f"byte_{i}_mean" for i in range(1, 9)), "count", "last_position")
"""Stored per node. The ID index is the eleventh feature; it depends on the vocabulary, so it is added by the model."""

EDGE_FEATURES: Final = (
    "count", "count_share", "interval_mean_ms", "interval_std_ms", "regularity",
    "first_position", "last_position", "spread", "reverse_exists", "degree_product", "degree_ratio",
)  # fmt: skip
"""Stored per directed edge between the IDs of consecutive frames."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One log that contributed windows.

    Attributes:
        path: As it was found.
        role: "train" (its time is cut into training and validation), "test" (all of it is judged) or "log" (its time
        is cut
            into training, validation and test).
        group: The test folder it belongs to; for a log, its own name.
        frames: Frames read, malformed rows left out.
        labelled: Whether the log says which frames are attacks.
        sha256: Hash of its content.
    """

    path: str
    role: str
    group: str
    frames: int
    labelled: bool
    sha256: str


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatGraphs:
    """All windows of a data set.

    Attributes:
        node_ptr: [G + 1] int64, the nodes of graph g are node_ptr[g]:node_ptr[g + 1].
        edge_ptr: [G + 1] int64, likewise for edges.
        node_code: [N] int32, index into `ids`.
        node_features: [N, 10] float32, columns `NODE_FEATURES`, unscaled.
        edge_index: [2, E] int32, source and destination as node positions inside their own graph.
        edge_features: [E, 11] float32, columns `EDGE_FEATURES`, unscaled.
        label: [G] uint8, index into `kinds`: the attack kind most frequent in the window, 0 where no frame is an
        attack.
        source: [G] int32, index into `sources`.
        first_frame: [G] int64, position of the window's first frame in its file.
        start_time: [G] float64, seconds, of the window's first frame.
        end_time: [G] float64, seconds, of its last frame.
        ids: [K] int64, the distinct CAN IDs, ascending.
        kinds: Names of the label codes; kinds[0] is "benign".
        sources: The files, in reading order.
        window: Frames in a window.
    """

    node_ptr: NDArray[np.int64]
    edge_ptr: NDArray[np.int64]
    node_code: NDArray[np.int32]
    node_features: NDArray[np.float32]
    edge_index: NDArray[np.int32]
    edge_features: NDArray[np.float32]
    label: NDArray[np.uint8]
    source: NDArray[np.int32]
    first_frame: NDArray[np.int64]
    start_time: NDArray[np.float64]
    end_time: NDArray[np.float64]
    ids: NDArray[np.int64]
    kinds: tuple[str, ...]
    sources: tuple[SourceFile, ...]
    window: int

    def __len__(self) -> int:
        return len(self.label)

    @property
    def num_nodes(self) -> NDArray[np.int64]:
        """[G] nodes of each graph."""
        return np.diff(self.node_ptr)

    @property
    def num_edges(self) -> NDArray[np.int64]:
        """[G] directed edges of each graph, self-loops included."""
        return np.diff(self.edge_ptr)
