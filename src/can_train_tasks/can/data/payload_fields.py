"""The fields of payloads, without a database: counters, checksums, multiplexers, flags and measured values are found,
and frames are named in which a counter misses a step or a checksum does not fit.

Bits of a value flip the more often the less significant they are, so a value ends where the next bit flips far less
often. Source: Marchetti and Stabili, "READ: Reverse Engineering of Automotive Data Frames", IEEE TIFS 14(4), 2019.

Every place of a counter and every kind of checksum (`CHECKS`) is tried with each frame and its ID's previous frame: a
counter goes up or down by 1, and a checksum differs from the other bytes' checksum by a constant. Most fields break
these checks all the time. The checks that an ID never breaks in benign traffic are its own (see `Rules`). A counter of
16 bits has a byte that is a counter, and some counters of 4 bits leave 15 out (AUTOSAR's E2E profile 1).

Bits are counted from 0, the most significant bit of the first byte. Shapes: M frames (of one ID, where fields are
found), B payload bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Floats, Ints

COUNTER, CHECKSUM, MULTIPLEXER, FLAG, VALUE, OPAQUE = "counter", "checksum", "multiplexer", "flag", "value", "opaque"
LEAST_FRAMES: Final = 20  # frames of an ID, without which no field is told
# A bit that flips less than this share of the flips of the bit before it begins another value. Within a value the
# share is 1 at least; noise of a thousand frames stays above a half.
NEW_VALUE: Final = 0.45
NEW_BYTE: Final = 0.8  # the same for the first bit of a byte, where most values begin
CERTAIN: Final = 0.95  # share of the frames that a counter must fit: a bus loses frames
MAX_COUNTER_BITS: Final = 16
ALTERNATING: Final = 0.9  # flips per frame of a counter's last bit: of 15 values, as many as 14 do
VALID: Final = 0.99  # share of the frames that a checksum must fit
LEAST_PAYLOADS: Final = 8  # different payloads that a checksum must fit
MOST_PAGES: Final = 16
MULTIPLEXED_FRAMES: Final = 100  # frames of an ID, without which no multiplexer is told
LEAST_TURNS: Final = 0.2  # least share of frames with another page than the frame before
# A bit is the multiplexer's if it flips inside a page at most this share as often as from page to page.
PAGED: Final = 0.5
LEAST_PAGED: Final = 4  # bits, without which a field is no multiplexer
RANDOM: Final = 0.2  # mean step of a value ÷ its range, above which it is no measurement
MOST_OF_FLAG: Final = 2  # different values of a flag
LEAST_CROSSINGS: Final = 2  # of zero, without which a sign cannot be told
LEAST_WRAPS: Final = 3  # carries, without which the order of two bytes cannot be told
CARRIED: Final = 0.8  # share of the carries that the other byte, or the first bit of a counter, must follow

# Generators of CRC-8: SAE J1850, AUTOSAR's 0x2F, CCITT, Maxim's 0x31, and WCDMA's 0x9B.
CRC8_GENERATORS: Final = {"CRC-8 SAE J1850": 0x1D, "CRC-8 AUTOSAR": 0x2F, "CRC-8": 0x07, "CRC-8 0x31": 0x31,
                          "CRC-8 0x9B": 0x9B}  # fmt: skip
# Limits of CAN frames.
LARGEST_SHORT_ID: Final = 0x7FF  # 11 bits
MAX_PAYLOAD_BYTES: Final = 8  # most payload bytes of a classical CAN frame
FD_PAYLOAD_BYTES: Final = 64  # most payload bytes of a CAN FD frame

Payloads = NDArray[np.uint8]  # [M, B]


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of the payloads of an ID.

    Attributes:
        start: First bit.
        stop: The bit after the last bit.
        kind: `COUNTER`, `CHECKSUM`, `MULTIPLEXER`, `FLAG`, `VALUE` or `OPAQUE`.
        page: Value of the multiplexer in the frames with this field; None for fields of all frames.
        little_endian: Whether the least significant byte comes first.
        skipped: Bits of the last byte, from its left, that are not of a value with the least significant byte first.
        signed: Whether the value is a two's complement.
        low: Smallest value.
        high: Largest value.
        note: The step of a counter, or the kind of a checksum.
    """

    start: int
    stop: int
    kind: str
    page: int | None = None
    little_endian: bool = False
    skipped: int = 0
    signed: bool = False
    low: int = 0
    high: int = 0
    note: str = ""

    def read(self, payloads: Payloads) -> Ints:
        """Returns the values [M] of payloads."""
        if self.little_endian:
            own = payloads[:, self.start // 8 : self.stop // 8].astype(np.int64)
            own[:, -1] &= (1 << (8 - self.skipped)) - 1
            value: Ints = own @ (1 << 8 * np.arange(own.shape[1]))
        else:
            bits = np.unpackbits(payloads, axis=1)[:, self.start : self.stop].astype(np.int64)
            value = bits @ (1 << np.arange(self.width)[::-1])
        return value - ((value >= 1 << (self.width - 1)) << self.width) if self.signed else value

    @property
    def width(self) -> int:
        """Number of bits."""
        return self.stop - self.start - self.skipped


class _Bits(NamedTuple):
    """The bits of the payloads of several logs, and how often each bit flips from frame to frame."""

    payloads: Sequence[Payloads]
    bits: Sequence[Payloads]  # [M, 8 * B] of each log
    flips: Floats  # [8 * B] flips ÷ pairs of frames
    moves: NDArray[np.bool_]  # [8 * B]

    @classmethod
    def of(cls, payloads: Sequence[Payloads]) -> _Bits:
        bits = [np.unpackbits(part, axis=1) for part in payloads]
        flips = sum((np.count_nonzero(part[1:] != part[:-1], axis=0) for part in bits), np.zeros(bits[0].shape[1]))
        pairs = max(sum(len(part) - 1 for part in bits), 1)
        return cls(payloads, bits, flips / pairs, flips > 0)


def find_fields(payloads: Sequence[Payloads]) -> list[Field]:
    """Finds the fields of one ID.

    Args:
        payloads: The payloads [M, B] of the ID in each log, in the order of time, all of one length.

    Returns:
        The fields by their first bit; bits that never change belong to none. Nothing where there are too few frames.
    """
    payloads = [part for part in payloads if len(part) > 1]
    if sum(map(len, payloads)) < LEAST_FRAMES:
        return []
    seen = _Bits.of(payloads)
    free = seen.moves.copy()
    fields = []
    for find in (_counters, _checksums):
        for field in find(seen, free):
            fields.append(field)
            free[field.start : field.stop] = False
    multiplexer = _multiplexer(seen, free)
    if multiplexer is None:
        return sorted([*fields, *_values(seen, free)], key=lambda field: field.start)
    free[multiplexer.start : multiplexer.stop] = False
    return sorted([*fields, multiplexer, *_paged(seen, free, multiplexer)],
                  key=lambda field: (field.start, field.page or 0))  # fmt: skip


def _paged(seen: _Bits, free: NDArray[np.bool_], multiplexer: Field) -> list[Field]:
    """Finds the values of each page; a value that all pages have in the same place is a value of all frames."""
    pages = {}
    for page in np.unique(np.concatenate([multiplexer.read(part) for part in seen.payloads])).tolist():
        own = [part[multiplexer.read(part) == page] for part in seen.payloads]
        own = [part for part in own if len(part) > 1]
        if sum(map(len, own)) >= LEAST_FRAMES:
            of_page = _Bits.of(own)
            pages[page] = {(each.start, each.stop): each for each in _values(of_page, free & of_page.moves, page)}
    common = set.intersection(*map(set, pages.values())) if pages else set()
    of_all = [_described(seen, replace(next(iter(pages.values()))[place], page=None)) for place in common]
    return [*of_all, *(each for of_page in pages.values() for place, each in of_page.items() if place not in common)]


def _counters(seen: _Bits, free: NDArray[np.bool_]) -> Iterator[Field]:
    taken = ~free
    # The last bit of a counter flips from frame to frame. Its last bits count, too, so wide fields are tried first.
    stops = (1 + np.flatnonzero(seen.flips >= ALTERNATING)).tolist()
    for width, stop in itertools.product(range(MAX_COUNTER_BITS, 1, -1), stops):
        start = stop - width
        if start < 0 or taken[start:stop].any():
            continue
        field = Field(start=start, stop=stop, kind=COUNTER, high=(1 << width) - 1)
        values = [field.read(part) for part in seen.payloads]
        low, high = min(int(part.min()) for part in values), max(int(part.max()) for part in values)
        # Some counters begin anew before their bits are full: from 14, or from 250.
        field = replace(field, low=low, high=high) if high - low > field.high // 2 else field
        size = field.high - field.low + 1
        steps = np.concatenate([np.diff(part) % size for part in values])
        step, counts = np.unique(steps, return_counts=True)
        usual = int(step[counts.argmax()])
        # A slow value in front of a counter would be its first bits, if the counter had to carry into them nowhere.
        carried = steps[np.concatenate([bits[1:, start] != bits[:-1, start] for bits in seen.bits])] == usual
        if usual and counts.max() >= CERTAIN * len(steps) and np.count_nonzero(carried) >= CARRIED * len(carried):
            taken[start:stop] = True
            yield replace(field, note=f"steps of {usual - size if 2 * usual > size else usual}")


def _checksums(seen: _Bits, free: NDArray[np.bool_]) -> Iterator[Field]:
    whole = np.unique(np.concatenate(list(seen.payloads)), axis=0)
    num_bytes = whole.shape[1]
    # Most checksums are in the last byte, the others in the first.
    for place in (num_bytes - 1, 0, *range(1, num_bytes - 1)):
        if num_bytes < 2 or not free[8 * place : 8 * place + 8].any():
            continue
        others = np.delete(whole, place, axis=1)
        if len(np.unique(others, axis=0)) < LEAST_PAYLOADS:
            continue
        for name, computed in CHECKSUMS.items():
            # An unknown ID or an unknown initial value enters the same constant into every checksum of one length.
            difference = computed(others, whole[:, place])
            counts = np.bincount(difference, minlength=256)
            if counts.max() >= VALID * len(whole):
                yield Field(start=8 * place, stop=8 * place + 8, kind=CHECKSUM, high=255, note=name)
                return


def _xor(others: Payloads, observed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    difference: NDArray[np.uint8] = np.bitwise_xor.reduce(others, axis=1) ^ observed
    return difference


def _sum(others: Payloads, observed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    difference: NDArray[np.uint8] = observed - others.sum(axis=1, dtype=np.uint8)
    return difference


def _negative_sum(others: Payloads, observed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    difference: NDArray[np.uint8] = observed + others.sum(axis=1, dtype=np.uint8)
    return difference


def _crc8(generator: int) -> Callable[[Payloads, NDArray[np.uint8]], NDArray[np.uint8]]:
    return lambda others, observed: crc8([*others.T], generator) ^ observed


CHECKSUMS: Final[dict[str, Callable[[Payloads, NDArray[np.uint8]], NDArray[np.uint8]]]] = {
    "XOR": _xor,
    "sum": _sum,
    "negative sum": _negative_sum,
    **{name: _crc8(generator) for name, generator in CRC8_GENERATORS.items()},
}
"""The difference [M] of a checksum from the checksum of the other bytes, which is constant for the right kind."""


def _multiplexer(seen: _Bits, free: NDArray[np.bool_]) -> Field | None:
    """Finds the field that other bits depend on: they flip where it changes, and seldom where it is equal."""
    best, most = None, LEAST_PAGED - 1
    if sum(map(len, seen.payloads)) < MULTIPLEXED_FRAMES:
        return best
    for start, stop in _moving_runs(seen, free):
        field = Field(start=start, stop=stop, kind=MULTIPLEXER)
        values = [field.read(part) for part in seen.payloads]
        pages = np.unique(np.concatenate(values))
        turns = np.mean(np.concatenate([np.diff(part) != 0 for part in values]))
        if not 2 <= len(pages) <= MOST_PAGES or turns < LEAST_TURNS:
            continue
        of_pages = [part[own == page] for part, own in zip(seen.payloads, values, strict=True) for page in pages]
        inside = _Bits.of([part for part in of_pages if len(part) > 1] or [seen.payloads[0][:2]])
        between = _flips_between(seen, values)
        paged = free & (between >= LEAST_TURNS / 2) & (inside.flips <= PAGED * between)
        paged[start:stop] = False
        if np.count_nonzero(paged) > most:
            best = Field(start=start, stop=stop, kind=MULTIPLEXER, low=int(pages[0]), high=int(pages[-1]))
            most = int(np.count_nonzero(paged))
    return best


def _flips_between(seen: _Bits, pages: Sequence[Ints]) -> Floats:
    """Returns the share of the changes of page at which each bit flips."""
    flips, changes = np.zeros(seen.bits[0].shape[1]), 0
    for bits, page in zip(seen.bits, pages, strict=True):
        changed = np.flatnonzero(np.diff(page))
        flips += np.count_nonzero(bits[changed + 1] != bits[changed], axis=0)
        changes += len(changed)
    shares: Floats = flips / max(changes, 1)
    return shares


def _values(seen: _Bits, free: NDArray[np.bool_], page: int | None = None) -> list[Field]:
    """Cuts the free bits into values, flags and opaque fields."""
    runs = _joined(seen, list(_moving_runs(seen, free)))
    return [
        _described(seen, Field(start=start, stop=stop, kind=VALUE, page=page, little_endian=skipped is not None,
                               skipped=skipped or 0))
        for start, stop, skipped in runs
    ]  # fmt: skip


def _moving_runs(seen: _Bits, free: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields the runs of free bits, cut where the next bit flips far less often than the bit before it."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]]).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        start = begin
        for bit in range(begin + 1, end):
            least = NEW_BYTE if bit % 8 == 0 else NEW_VALUE
            if seen.flips[bit] < least * seen.flips[bit - 1]:
                yield start, bit
                start = bit
        yield start, end


def _joined(seen: _Bits, runs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int | None]]:
    """Joins a byte with the byte after it where the second carries over from the first: least significant byte first.

    Yields first bit, end, and `Field.skipped`; None for values with the most significant byte first.
    """
    joins = False
    followers: list[tuple[int, int] | None] = [*runs[1:], None]
    for (start, stop), after in zip(runs, followers, strict=False):
        if joins:
            joins = False
            continue
        low = (stop - 8, stop)
        if (
            stop % 8 == 0
            and start <= stop - 8
            and after is not None
            and after[1] == stop + 8
            and _carries(seen, low, after)
        ):
            joins = True
            if start < stop - 8:
                # The low byte flips more often than the value before it, and looked like that value's end.
                yield start, stop - 8, None
            yield stop - 8, after[1], after[0] - stop
        else:
            yield start, stop, None


def _carries(seen: _Bits, low: tuple[int, int], high: tuple[int, int]) -> bool:
    first, second = (Field(start=start, stop=stop, kind=VALUE) for start, stop in (low, high))
    steps = [np.concatenate([np.diff(field.read(part)) for part in seen.payloads]) for field in (first, second)]
    wraps = np.abs(steps[0]) > 1 << (first.width - 1)
    if np.count_nonzero(wraps) < LEAST_WRAPS or wraps.all():
        return False
    follows = np.mean(np.sign(steps[1][wraps]) == -np.sign(steps[0][wraps]))
    return bool(follows >= CARRIED and np.mean(steps[1][~wraps] == 0) >= CARRIED)


def _described(seen: _Bits, field: Field) -> Field:
    """Tells the range of a value, and whether it is signed, a flag, or no measurement at all."""
    values = [field.read(part) for part in seen.payloads]
    whole = np.concatenate(values)
    if len(np.unique(whole)) <= MOST_OF_FLAG:
        return replace(field, kind=FLAG, low=int(whole.min()), high=int(whole.max()))
    as_signed = replace(field, signed=True)
    signed_values = [as_signed.read(part) for part in seen.payloads]
    steps, signed_steps = (np.abs(np.concatenate([np.diff(part) for part in each])) for each in (values, signed_values))
    jumps, signed_jumps = (int(np.count_nonzero(each > 1 << (field.width - 1))) for each in (steps, signed_steps))
    # A signed value jumps over the whole range where it crosses zero, if it is read without its sign.
    signed = field.width >= 4 and jumps >= LEAST_CROSSINGS and signed_jumps <= jumps / 4
    if signed:
        whole, steps = np.concatenate(signed_values), signed_steps
    low, high = int(whole.min()), int(whole.max())
    kind = OPAQUE if field.width >= 4 and steps.mean() > RANDOM * (high - low) else VALUE
    return replace(field, kind=kind, signed=signed, low=low, high=high)


def crc8(columns: Sequence[NDArray[np.uint8]], generator: int, start: int = 0) -> NDArray[np.uint8]:
    """Returns the CRC-8 [M] of rows of bytes, given as columns [M], from the initial value `start`."""
    table = np.arange(256)
    for _ in range(8):
        table = (table << 1) ^ np.where(table & 0x80, 0x100 | generator, 0)
    steps = table.astype(np.uint8)
    value = np.full(len(columns[0]), start, np.uint8)
    for column in columns:
        value = steps[value ^ column]
    return value


_PARTS: Final = ("byte", "high half of byte", "low half of byte")
_KINDS: Final = tuple(CHECKSUMS)
COUNTERS: Final = tuple(f"{part} {byte}, {way}" for way in ("up", "down") for part in _PARTS
                        for byte in range(1, MAX_PAYLOAD_BYTES + 1))  # fmt: skip
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
    now, then = (np.ascontiguousarray(each).view(np.uint8).reshape(-1, MAX_PAYLOAD_BYTES) for each in (words, before))
    counters, checksums = _tables()
    broken = np.zeros(len(words), np.uint64)
    for byte in range(MAX_PAYLOAD_BYTES):
        pair = then[:, byte].astype(np.intp) << 8 | now[:, byte]
        broken |= counters.take(pair) << np.uint64(byte)
    by_place = broken.view(np.uint8).reshape(-1, 8)[:, 2 * len(_PARTS) :]
    shift = (MAX_PAYLOAD_BYTES - np.clip(length, 1, MAX_PAYLOAD_BYTES)).astype(np.uint64)
    flips = (words ^ before).view(np.uint64)
    for column, change in enumerate(_changed_differences(flips, now - then, shift, checksums)):
        by_place[:, column] = np.packbits(change.view(np.uint8).reshape(-1, 8) != 0, axis=1, bitorder="little")[:, 0]
    # A payload of another length has another constant.
    by_place[length != length_before] = 0
    by_place[(length < 2) | (length > MAX_PAYLOAD_BYTES)] = 0xFF
    return broken


def _changed_differences(
    flips: Numbers, steps: NDArray[np.uint8], shift: Numbers, tables: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns changes of the difference of the last byte, and of the first byte, from each checksum of the other bytes.

    Byte k of a number [M] is for kind k of `CHECKSUMS`. CRCs and XOR of two payloads differ by those of `flips` [M],
    the bits that differ; sums differ by sums of `steps` [M, 8]. Payloads are `shift` [M] bytes shorter than 8.
    """
    # Ends are aligned. Zeros before a payload leave a CRC that begins with 0 as it is.
    aligned = (flips << (8 * shift)).view(np.uint8).reshape(-1, MAX_PAYLOAD_BYTES)
    own_first, own_last = flips.view(np.uint8).reshape(-1, MAX_PAYLOAD_BYTES)[:, 0], aligned[:, -1]
    last = tables[-1].take(own_last)
    first = tables[-1].take(own_first) ^ tables[shift, own_first] ^ tables[7].take(own_last)
    total = steps[:, 0].copy()
    for place in range(MAX_PAYLOAD_BYTES - 1):
        last ^= tables[place + 1].take(aligned[:, place])
        first ^= tables[place].take(aligned[:, place])
        total += steps[:, place + 1]
    step_of_last = np.take_along_axis(steps, (MAX_PAYLOAD_BYTES - 1 - shift.astype(np.intp))[:, None], axis=1)[:, 0]
    for change, own in ((last, step_of_last), (first, steps[:, 0])):
        by_kind = change.view(np.uint8).reshape(-1, 8)
        by_kind[:, _KINDS.index("sum")] = 2 * own - total
        by_kind[:, _KINDS.index("negative sum")] = total
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
    checksums = np.zeros((MAX_PAYLOAD_BYTES + 1, 256, 8), np.uint8)
    for name, generator in CRC8_GENERATORS.items():
        kind = _KINDS.index(name)
        for after in range(MAX_PAYLOAD_BYTES):
            columns = [values, *[np.zeros_like(values)] * after]
            checksums[MAX_PAYLOAD_BYTES - 1 - after, :, kind] = crc8(columns, generator)
        checksums[-1, :, kind] = values
    checksums[:, :, _KINDS.index("XOR")] = values
    return counters.view(np.uint64)[:, 0], checksums.view(np.uint64)[:, :, 0]
