"""Counters that miss a step and checksums that do not fit, in payloads whose fields nobody has declared.

Every place of a counter and every kind of checksum (`CHECKS`) is tried with each frame and its ID's previous frame: a
counter goes up or down by 1, and a checksum differs from the other bytes' checksum by a constant. Most fields break
these checks all the time. The checks that an ID never breaks in benign traffic are its own (see `Rules`).

A counter of 16 bits has a byte that is a counter, and some counters of 4 bits leave 15 out (AUTOSAR's E2E profile 1).

Shapes: M frames, C checks (`CHECKS`).
"""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train_tasks.can.data.digests import CRC8_GENERATORS, crc8

_PARTS: Final = ("byte", "high half of byte", "low half of byte")
_NUM_BYTES: Final = 8
COUNTERS: Final = tuple(f"{part} {byte}, {way}" for way in ("up", "down") for part in _PARTS
                        for byte in range(1, _NUM_BYTES + 1))  # fmt: skip
CHECKSUMS: Final = (*CRC8_GENERATORS, "XOR", "sum", "negative sum")
# Bit c of a number that has broken checks is check c.
CHECKS: Final = (*COUNTERS, *(f"{kind}, last byte" for kind in CHECKSUMS), *(f"{kind}, byte 1" for kind in CHECKSUMS))
COUNTER_BITS: Final = np.uint64((1 << len(COUNTERS)) - 1)
CHECKSUM_BITS: Final = np.uint64(((1 << len(CHECKS)) - 1) ^ ((1 << len(COUNTERS)) - 1))

Numbers = NDArray[np.uint64]


def broken_checks(
    words: NDArray[np.int64], length: NDArray[np.uint8], before: NDArray[np.int64], length_before: NDArray[np.uint8]
) -> Numbers:
    """Returns the checks [M] that frames break.

    Args:
        words: [M] first eight bytes of each payload, with the first byte in the lowest bits.
        length: [M] bytes of each payload.
        before: [M] payload of the previous frame of the same ID.
        length_before: [M] its length.
    """
    now, then = (np.ascontiguousarray(each).view(np.uint8).reshape(-1, _NUM_BYTES) for each in (words, before))
    counters, checksums = _tables()
    broken = np.zeros(len(words), np.uint64)
    for byte in range(_NUM_BYTES):
        pair = then[:, byte].astype(np.intp) << 8 | now[:, byte]
        broken |= counters.take(pair) << np.uint64(byte)
    by_place = broken.view(np.uint8).reshape(-1, 8)[:, 2 * len(_PARTS) :]
    shift = (_NUM_BYTES - np.clip(length, 1, _NUM_BYTES)).astype(np.uint64)
    flips = (words ^ before).view(np.uint64)
    for column, change in enumerate(_changed_differences(flips, now - then, shift, checksums)):
        by_place[:, column] = np.packbits(change.view(np.uint8).reshape(-1, 8) != 0, axis=1, bitorder="little")[:, 0]
    # A payload of another length has another constant.
    by_place[length != length_before] = 0
    by_place[(length < 2) | (length > _NUM_BYTES)] = 0xFF
    return broken


def _changed_differences(
    flips: Numbers, steps: NDArray[np.uint8], shift: Numbers, tables: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns changes of the difference of the last byte, and of the first byte, from each checksum of the other bytes.

    Byte k of a number [M] is for kind k of `CHECKSUMS`. CRCs and XOR of two payloads differ by those of `flips` [M],
    the bits that differ; sums differ by sums of `steps` [M, 8]. Payloads are `shift` [M] bytes shorter than 8.
    """
    # Ends are aligned. Zeros before a payload leave a CRC that begins with 0 as it is.
    aligned = (flips << (8 * shift)).view(np.uint8).reshape(-1, _NUM_BYTES)
    own_first, own_last = flips.view(np.uint8).reshape(-1, _NUM_BYTES)[:, 0], aligned[:, -1]
    last = tables[-1].take(own_last)
    first = tables[-1].take(own_first) ^ tables[shift, own_first] ^ tables[7].take(own_last)
    total = steps[:, 0].copy()
    for place in range(_NUM_BYTES - 1):
        last ^= tables[place + 1].take(aligned[:, place])
        first ^= tables[place].take(aligned[:, place])
        total += steps[:, place + 1]
    step_of_last = np.take_along_axis(steps, (_NUM_BYTES - 1 - shift.astype(np.intp))[:, None], axis=1)[:, 0]
    for change, own in ((last, step_of_last), (first, steps[:, 0])):
        by_kind = change.view(np.uint8).reshape(-1, 8)
        by_kind[:, CHECKSUMS.index("sum")] = 2 * own - total
        by_kind[:, CHECKSUMS.index("negative sum")] = total
    return last, first


@cache
def _tables() -> tuple[Numbers, Numbers]:
    """Returns tables of counters and of checksums.

    Returns:
        Counters that the first byte of a payload breaks, by 256 · byte before + byte, [65,536]. And what a byte adds to
        checksums, [9, 256]: with 7 to 0 bytes after it, and as the checksum itself.
    """
    values = np.arange(256, dtype=np.uint8)
    then, now = (each.ravel() for each in np.meshgrid(values, values, indexing="ij"))
    counters = np.zeros((len(now), 8), np.uint8)
    for way, (new, old) in enumerate(((now, then), (then, now))):
        counters[:, len(_PARTS) * way] = new - old != 1
        for part, (high, low) in enumerate(((new >> 4, old >> 4), (new & 15, old & 15)), start=1):
            counters[:, len(_PARTS) * way + part] = ((high - low) & 15 != 1) & ~((low == 14) & (high == 0))
    checksums = np.zeros((_NUM_BYTES + 1, 256, 8), np.uint8)
    for kind, generator in enumerate(CRC8_GENERATORS.values()):
        for after in range(_NUM_BYTES):
            columns = [values, *[np.zeros_like(values)] * after]
            checksums[_NUM_BYTES - 1 - after, :, kind] = crc8(columns, generator)
        checksums[-1, :, kind] = values
    checksums[:, :, CHECKSUMS.index("XOR")] = values
    return counters.view(np.uint64)[:, 0], checksums.view(np.uint64)[:, :, 0]
