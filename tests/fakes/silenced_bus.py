"""Drives of a bus whose messages are sent at a fixed interval; in the last drive, one of them falls silent."""

from pathlib import Path

import numpy as np

from can_train_tasks.can.data.graphs import FlatGraphs, Frames, GraphBuilder
from can_train_tasks.can.inputs import PUNCTUAL_LOGS
from fakes.random_bus import cached_graphs

BUS = [0x100, 0x200, 0x300, 0x400]
PERIODS_S = (0.01, 0.02, 0.02, 0.04)
SILENCED = 0x200
SILENT_S = (2.0, 2.5)
SECONDS = 4.0
WINDOW = 20


def bus_frames(*, silenced: bool) -> Frames:
    times = [np.arange(0.001 * (1 + place), SECONDS, period) for place, period in enumerate(PERIODS_S)]
    time, can_id = np.concatenate(times), np.repeat(BUS, [len(own) for own in times])
    if silenced:
        left = (can_id != SILENCED) | (time < SILENT_S[0]) | (time > SILENT_S[1])
        time, can_id = time[left], can_id[left]
    order = np.argsort(time)
    return Frames(
        timestamp=time[order],
        can_id=can_id[order].astype(np.uint32),
        length=np.full(len(order), 8, np.uint8),
        payload=np.zeros((len(order), 8), np.uint8),
        label=np.zeros(len(order), np.uint8),
    )


def silenced_graphs(folder: Path) -> tuple[FlatGraphs, int]:
    """As many logs as make an ID punctual, and the one in which it falls silent; with the number of that one."""
    drives = [bus_frames(silenced=number == PUNCTUAL_LOGS) for number in range(PUNCTUAL_LOGS + 1)]
    blocks = [list(GraphBuilder(WINDOW, WINDOW).feed(frames)) for frames in drives]
    return cached_graphs(folder, blocks, WINDOW), PUNCTUAL_LOGS
