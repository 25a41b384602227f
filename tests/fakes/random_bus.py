"""Frames of a made-up bus, and the graphs they become."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from can_train_tasks.can.data.graphs import FlatGraphs, Frames, GraphBlock, GraphBuilder, SourceFile, writing_graphs

KINDS = ("benign", "DoS")


def random_frames(size: int, seed: int = 0, num_ids: int = 12) -> Frames:
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(2**29, num_ids, replace=False)).astype(np.uint32)
    return Frames(
        timestamp=np.cumsum(rng.exponential(5e-4, size)),
        can_id=rng.choice(ids, size, p=rng.dirichlet(np.ones(num_ids))),
        length=np.full(size, 8, np.uint8),
        payload=rng.integers(0, 256, (size, 8), dtype=np.uint8),
        label=(rng.random(size) < 0.01).astype(np.uint8),
    )


INJECTED = 0x123
"""The ID that attackers send."""


def injected_frames(size: int, seed: int = 0) -> Frames:
    """A bus of ten IDs in turn, into which `INJECTED` is sent every third frame during bursts of 80 frames."""
    rng = np.random.default_rng(seed)
    position = np.arange(size)
    attack = (position // 80 % 4 == 3) & (position % 3 == 0)
    return Frames(
        timestamp=np.cumsum(rng.uniform(4e-4, 6e-4, size)),
        can_id=np.where(attack, INJECTED, 0x200 + position % 10).astype(np.uint32),
        length=np.full(size, 8, np.uint8),
        payload=rng.integers(0, 40, (size, 8), dtype=np.uint8),
        label=attack.astype(np.uint8),
    )


def write_log(path: Path, frames: Frames) -> Path:
    """Writes frames as can-train-and-test does, their IDs cut to 11 bits."""
    rows = zip(frames.timestamp, frames.can_id & 0x7FF, frames.payload, frames.label, strict=True)
    text = "".join(
        f"{time:.6f},{can_id:03X},{bytes(data).hex().upper()},{label}\n" for time, can_id, data, label in rows
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("timestamp,arbitration_id,data_field,attack\n" + text)
    return path


def write_candump(path: Path, frames: Frames, names: Mapping[int, int]) -> Path:
    """Writes frames as candump does, with 29-bit IDs; `names` gives the n-th smallest ID another name."""
    known = np.unique(frames.can_id)
    renamed = {int(known[index]): name for index, name in names.items()}
    rows = zip(frames.timestamp, frames.can_id.tolist(), frames.payload, strict=True)
    text = "".join(f"({time:.6f}) can0 {renamed.get(i, i):08X}#{bytes(data).hex().upper()}\n" for time, i, data in rows)
    path.write_text(text)
    return path


def random_blocks(num_windows: int, seed: int = 0, window: int = 20) -> list[GraphBlock]:
    return list(GraphBuilder(window, window).feed(random_frames(num_windows * window, seed)))


def source_file(role: str = "log", group: str = "drive.log") -> SourceFile:
    return SourceFile(path=f"data/{group}", role=role, group=group, frames=0, labelled=True, sha256="00")


def cached_graphs(folder: Path, logs: Sequence[Sequence[GraphBlock]], window: int = 20) -> FlatGraphs:
    """Puts the blocks of each log through a cache in `folder`."""
    with writing_graphs(folder, window) as writer:
        for index, blocks in enumerate(logs):
            for block in blocks:
                writer.append(block, KINDS)
            writer.end_log(replace(source_file(), path=f"data/{index}.log"), [f"{index} rows left out"])
        return writer.finish()
