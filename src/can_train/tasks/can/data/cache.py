"""Prepared graphs on disk: a folder of arrays, one for every array of `FlatGraphs`. The caller chooses the folder's
name, and makes damaged folders anew.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from can_train.io.arrays import ArrayWriter, noticing_damage, read_arrays, read_meta
from can_train.tasks.can.data.graphs import EDGE_FEATURES, NODE_FEATURES, FlatGraphs, GraphBlock, SourceFile

# Belongs in every key. Raise it when the arrays or the meaning of a column change: older caches are then not found.
SCHEMA: Final = 1

# Type and shape of one row of every array.
_ARRAYS: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "node_ptr": ("int64", ()),
    "edge_ptr": ("int64", ()),
    "node_code": ("int32", ()),
    "node_features": ("float32", (len(NODE_FEATURES),)),
    "edge_index": ("int32", (2,)),  # [E, 2] on disk, so that it can be appended to
    "edge_features": ("float32", (len(EDGE_FEATURES),)),
    "label": ("uint8", ()),
    "source": ("int32", ()),
    "first_frame": ("int64", ()),
    "start_time": ("float64", ()),
    "end_time": ("float64", ()),
    "ids": ("int64", ()),
}
_RECODED_NODES: Final = 2**20  # nodes that get their final code at a time


@dataclass(frozen=True, kw_only=True)
class CacheContent:
    """What a cache records beside its arrays: three fields of `FlatGraphs`, and the notices about its logs."""

    kinds: tuple[str, ...]
    sources: tuple[SourceFile, ...]
    window: int
    notices: tuple[str, ...]


def read_cache(folder: Path, *, verify: bool = True) -> tuple[FlatGraphs, CacheContent]:
    """Verifies a cache and maps it into memory, copy on write: the files cannot be changed through it.

    Args:
        folder: The cache.
        verify: Whether every byte is read, in order to find altered ones; the sizes of files are always compared.

    Raises:
        FolderDamageError: A file is missing, truncated or altered.
    """
    arrays, meta = read_arrays(folder, list(_ARRAYS), verify=verify)
    with noticing_damage():
        content = _content(meta)
    return _flat_graphs(arrays, content), content


def read_content(folder: Path) -> CacheContent:
    """Reads what a cache records beside its arrays.

    Raises:
        FolderDamageError: The file is missing or altered, or the folder is no cache.
    """
    with noticing_damage():
        return _content(read_meta(folder))


class CacheWriter:
    """Writes a cache, as a context manager: leaving it before `finish` leaves nothing behind.

    Memory stays bounded: only the set of distinct CAN IDs grows with the data.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = ArrayWriter(folder, {**_ARRAYS, "can_id": ("uint32", ())})
        self._ids: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self._num_nodes = 0
        self._num_edges = 0

    def __enter__(self) -> Self:
        self._writer.__enter__()
        self._writer.append({"node_ptr": np.zeros(1), "edge_ptr": np.zeros(1)})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, traceback)

    def append(self, block: GraphBlock, source: int) -> None:
        """Adds graphs of source file number `source`; their labels are codes of the whole data set."""
        names = ("can_id", "node_features", "edge_features", "label", "first_frame", "start_time", "end_time")
        self._writer.append({name: getattr(block, name) for name in names})
        self._writer.append(
            {
                "edge_index": block.edge_index.T,
                "source": np.full(len(block), source),
                "node_ptr": self._num_nodes + np.cumsum(block.num_nodes),
                "edge_ptr": self._num_edges + np.cumsum(block.num_edges),
            }
        )
        self._num_nodes += len(block.can_id)
        self._num_edges += block.edge_index.shape[1]
        self._ids = np.union1d(self._ids, block.can_id)

    def finish(self, content: CacheContent) -> FlatGraphs:
        """Completes the cache, moves it to its place (see `ArrayWriter.finish`) and maps it."""
        self._writer.append({"ids": self._ids})
        # The codes of CAN IDs, their positions among all of them, are known only now.
        for can_id in self._writer.take_back("can_id", _RECODED_NODES):
            self._writer.append({"node_code": np.searchsorted(self._ids, can_id)})
        return _flat_graphs(self._writer.finish(asdict(content)), content)


def _content(meta: dict[str, Any]) -> CacheContent:
    return CacheContent(
        kinds=tuple(meta["kinds"]),
        sources=tuple(SourceFile(**source) for source in meta["sources"]),
        window=meta["window"],
        notices=tuple(meta["notices"]),
    )


def _flat_graphs(arrays: dict[str, NDArray[Any]], content: CacheContent) -> FlatGraphs:
    arrays["edge_index"] = arrays["edge_index"].T
    return FlatGraphs(**arrays, kinds=content.kinds, sources=content.sources, window=content.window)
