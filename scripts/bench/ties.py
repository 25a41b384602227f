"""How tightly the IDs of a log are tied: counters, checksums, and correlation between bytes of different IDs.

Shapes: M frames of an ID, B payload bytes, G moments, S signals.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from can_train_tasks.can.data.graphs import Floats, Ints

SECONDS: Final = 30.0  # of each log: longer logs have weaker ties by chance alone
MIN_FRAMES: Final = 30  # fewest frames of an ID whose counter and checksum are looked for
SIGNAL_FRAMES: Final = 100  # fewest frames of an ID whose signals are compared
LEVELS: Final = 8  # fewest values of a signal, of a counter's payloads, or of a checksum
EXACT: Final = 0.98  # share of frames that a counter or checksum must fit
STRONG: Final = 0.9  # least correlation of a strong tie
STEP_S: Final = 0.05  # between two moments at which signals are compared
MAX_LAG: Final = 20  # steps
POLYNOMIALS: Final = (0x1D, 0x2F, 0x07, 0x31)  # SAE J1850, AUTOSAR's CRC8H2F, SMBus, Maxim

Bytes = NDArray[np.uint8]


class Ties(NamedTuple):
    """Figures of one log.

    Attributes:
        counted: Share of IDs with a counter.
        checked: Share of IDs with a checksum.
        tie: Median over signals: highest correlation with a signal of another ID, at the best lag.
        strong: Share of signals with a strong tie.
        lag_s: Median lag of the strong ties.
        levels: Median number of a signal's values.
    """

    counted: float
    checked: float
    tie: float
    strong: float
    lag_s: float
    levels: float


def ties(time_s: Floats, can_id: Ints, length: Ints, payload: Bytes) -> Ties:
    """Measures the first `SECONDS` of a log."""
    begun = time_s < time_s[0] + SECONDS
    time_s, can_id, length, payload = time_s[begun], can_id[begun], length[begun], payload[begun]
    moments = np.arange(time_s[0] + 0.5, time_s[-1], STEP_S)
    exact, signals, owners, levels = [], list[Floats](), list[int](), list[int]()
    for each_id in np.unique(can_id):
        rows = np.flatnonzero(can_id == each_id)
        if len(rows) < MIN_FRAMES:
            continue
        data = payload[rows][:, : length[rows].max()]
        counters, check = list(counter_bytes(data)), checksum_byte(data)
        exact.append((bool(counters), check is not None))
        if len(rows) < SIGNAL_FRAMES:
            continue
        latest = np.searchsorted(time_s[rows], moments, side="right").clip(min=1) - 1
        for position in {*range(data.shape[1])} - {*counters, check}:
            column = data[:, position].astype(np.float64)
            if is_signal(column) and column[latest].std():
                signals.append(column[latest])
                owners.append(int(each_id))
                levels.append(len(np.unique(column)))
    counted, checked = np.mean(exact, axis=0).tolist()
    best, lags = strongest(np.array(signals), np.array(owners))
    lag_s = float(np.median(lags[best >= STRONG])) * STEP_S if (best >= STRONG).any() else float("nan")
    return Ties(
        counted, checked, float(np.median(best)), float(np.mean(best >= STRONG)), lag_s, float(np.median(levels))
    )


def counter_bytes(data: Bytes) -> Iterator[int]:
    """Yields the bytes of payloads [M, B] of which the whole, or one half, counts the frames."""
    for position, column in enumerate(data.T):
        for values in (column, column & 15, column >> 4):
            if len(np.unique(values)) >= LEVELS and _counts(values.astype(np.int64)):
                yield position
                break


def _counts(values: Ints) -> bool:
    steps = np.diff(values)
    return bool(np.mean((steps == 1) | ((values[:-1] == values.max()) & (values[1:] == values.min()))) >= EXACT)


def checksum_byte(data: Bytes) -> int | None:
    """Returns the first or last byte of payloads [M, B] if it is a checksum of the other bytes; else None.

    A constant that the checksum covers too, such as the ID, makes no difference.
    """
    data = np.unique(data, axis=0)
    for position in (data.shape[1] - 1, 0) if data.shape[1] > 1 else ():
        check, rest = data[:, position], np.delete(data, position, axis=1)
        if min(len(np.unique(check)), len(np.unique(rest, axis=0))) < LEVELS:
            continue
        total = rest.sum(axis=1, dtype=np.uint8)
        halves = (rest >> 4).sum(axis=1, dtype=np.uint8) + (rest & 15).sum(axis=1, dtype=np.uint8)
        left = [check ^ np.bitwise_xor.reduce(rest, axis=1), check - total, check + total]
        # A checksum of four bits, as in Hyundai's DBC, beside four bits of data that it covers.
        left += [((check & 15) + sign * (halves + (check >> 4))) & 15 for sign in (1, 255)]
        left += [check ^ _crc8(rest, polynomial) for polynomial in POLYNOMIALS]
        if any(np.bincount(each).max() >= EXACT * len(each) for each in left):
            return position
    return None


def _crc8(data: Bytes, polynomial: int) -> Bytes:
    table = np.arange(256)
    for _ in range(8):
        table = (table << 1) ^ np.where(table & 0x80, 0x100 | polynomial, 0)
    value = np.zeros(len(data), np.uint8)
    for column in data.T:
        value = table.astype(np.uint8)[value ^ column]
    return value


def is_signal(column: Floats) -> bool:
    """Returns whether a byte [M] has several values and moves smoothly, as a physical quantity does."""
    return len(np.unique(column)) >= LEVELS and bool(np.diff(column).std() < column.std())


def strongest(signals: Floats, owners: Ints) -> tuple[Floats, Floats]:
    """Returns for each signal [S, G] its highest correlation with a signal of another ID, and its lag in steps."""
    num_moments = signals.shape[1]
    best, lags = np.zeros(len(signals)), np.zeros(len(signals))
    for lag in sorted(range(-MAX_LAG, MAX_LAG + 1), key=abs):
        late = signals[:, max(0, lag) : num_moments + min(0, lag)]
        early = signals[:, max(0, -lag) : num_moments + min(0, -lag)]
        late, early = (part - part.mean(axis=1, keepdims=True) for part in (late, early))
        norms = np.linalg.norm(late, axis=1)[:, None] * np.linalg.norm(early, axis=1)
        tie = np.abs(late @ early.T) / np.maximum(norms, 1e-9)
        tie[owners[:, None] == owners] = 0.0
        higher = tie.max(axis=1) > best
        lags[higher], best[higher] = abs(lag), tie.max(axis=1)[higher]
    return best, lags
