"""The frames of binary logs; and a reader of network captures of CAN interfaces from tcpdump and Wireshark.

A capture is a pcap or pcapng file.

Shapes: M packets or frames, P payload bytes (8, or 64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train_tasks.can.data.grammar import MAX_CAN_ID
from can_train_tasks.can.data.graphs import Floats, Ints
from can_train_tasks.can.data.log_text import unpacked
from can_train_tasks.can.data.payload_fields import FD_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES

# The faults of a frame, by index in `Recorded.wrong`; 0: none.
WRONG: Final = (
    "",
    "the frame was cut off",
    f"the payload is longer than {MAX_PAYLOAD_BYTES} bytes",
    "no CAN FD frame has a payload of this length",
    "the DLC disagrees with the payload",
    "the ID does not fit into 29 bits",
    "a field is missing",
)
GOOD, CUT_OFF, TOO_LONG, NO_LENGTH, OTHER_LENGTH, LARGE_ID, MISSING = range(len(WRONG))


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """The frames in a part of a binary log."""

    timestamp: NDArray[Any]  # [M] seconds
    can_id: NDArray[Any]  # [M]
    length: NDArray[Any]  # [M]
    payload: NDArray[Any]  # [M, P] bytes
    channel: NDArray[Any]  # [M] numbers or names
    wrong: NDArray[Any]  # [M] indices of `WRONG`
    error_frames: int = 0  # error frames that are left out
    xl_frames: int = 0  # CAN XL frames that are left out

    def select(self, chosen: NDArray[Any]) -> Recorded:
        """Returns the frames that a mask or positions choose; the counts stay."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in _ARRAYS})

    @classmethod
    def concatenate(cls, parts: Sequence[Recorded]) -> Recorded:
        """Joins the frames of at least one part."""
        width = max(part.payload.shape[1] for part in parts)
        wide = [
            replace(part, payload=np.pad(part.payload, ((0, 0), (0, width - part.payload.shape[1])))) for part in parts
        ]
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in wide]) for name in _ARRAYS},
            error_frames=sum(part.error_frames for part in parts),
            xl_frames=sum(part.xl_frames for part in parts),
        )


_ARRAYS: Final = ("timestamp", "can_id", "length", "payload", "channel", "wrong")

# Byte order of numbers, and ticks per second, by the first four bytes of a pcap file.
_PCAP: Final = {
    b"\xa1\xb2\xc3\xd4": (">", 10**6),
    b"\xd4\xc3\xb2\xa1": ("<", 10**6),
    b"\xa1\xb2\x3c\x4d": (">", 10**9),
    b"\x4d\x3c\xb2\xa1": ("<", 10**9),
}
_PCAPNG: Final = b"\x0a\x0d\x0d\x0a"
CAPTURE_MAGIC: Final = (*_PCAP, _PCAPNG)

_READ_BYTES: Final = 2**22  # bytes read at once
_MAX_PACKET_BYTES: Final = 2**18  # largest record that programs write; a file with a larger record is damaged
_FILE_HEADER_BYTES: Final = 24
_RECORD_HEADER_BYTES: Final = 16

# Types of blocks of pcapng.
_SECTION: Final = 0x0A0D0D0A
_INTERFACE: Final = 1
_OLD_PACKET: Final = 2
_UNTIMED_PACKET: Final = 3
_PACKET: Final = 6
# Numbers before a packet's bytes, the packet's length last; and the size of these numbers in bytes.
_PACKETS: Final = {_OLD_PACKET: ("HxxIII", 20), _UNTIMED_PACKET: ("I", 4), _PACKET: ("IIII", 20)}
_NAME: Final = 2  # codes of an interface's options
_RESOLUTION: Final = 9
_OFFSET: Final = 14

# Bytes before the frame, and the place of the protocol in these bytes (None: always CAN), by the link layer's number.
_SOCKETCAN: Final = 227  # has IDs in network byte order; other link layers have the writing computer's byte order
_COOKED: Final = 276  # has the number of the interface in bytes 4 to 8
_LINKS: Final = {_SOCKETCAN: (0, None), 113: (16, 14), _COOKED: (20, 0)}
_NO_LINK: Final = -1  # stands for the beginning of a section of pcapng
_CAN, _CAN_FD, _CAN_XL = 0x000C, 0x000D, 0x000E  # protocols
_EXTENDED, _REMOTE, _ERROR = 0x8000_0000, 0x4000_0000, 0x2000_0000  # flags in the bits above an ID
_STANDARD_ID: Final = 0x7FF
_FD_FLAG, _XL_FLAG = 0x04, 0x80
_HEADER_BYTES: Final = 8  # ID, length, flags, two reserved bytes
_MAX_HEAD_BYTES: Final = 20 + _HEADER_BYTES
_FD_BYTES: Final = 72  # size of a CAN FD frame; a classical frame has 16


@dataclass(frozen=True, kw_only=True)
class _Link:
    """An interface of a capture."""

    order: str  # byte order of numbers, in the notation of `struct`
    link_type: int
    ticks: float = 1e6  # per second
    start_s: float = 0.0
    name: str = "0"


# Packets in a part of a file, four numbers each: position of the first byte, number of bytes, time in seconds, index of
# the interface. In one flat list: the garbage collector would follow a tuple for each packet.
_Packets = list[float]


def read_capture(path: Path) -> Iterator[Recorded]:
    """Yields the CAN frames of a capture; a record that the file's end cuts off becomes a wrong frame.

    Raises:
        DataError: No interface of the capture is a CAN interface.
        ValueError: The file is damaged.
    """
    links: list[_Link] = []
    find, rest, num_frames = _pcapng_packets, b"", 0
    with unpacked(path) as (stream, _):
        if (magic := stream.peek(4)[:4]) != _PCAPNG:
            find = _pcap_packets
            order, ticks = _PCAP[magic]
            (link_type,) = struct.unpack_from(f"{order}I", stream.read(_FILE_HEADER_BYTES), _FILE_HEADER_BYTES - 4)
            links.append(_Link(order=order, link_type=link_type & 0x0FFF_FFFF, ticks=ticks))
        while part := stream.read(_READ_BYTES):
            buffer = rest + part
            numbers, end = find(buffer, links)
            rest, packets = buffer[end:], np.array(numbers, np.float64).reshape(-1, 4)
            used = [index for index in np.unique(packets[:, 3]).astype(int) if links[index].link_type in _LINKS]
            if used:
                of_links = (_frames(buffer, packets[packets[:, 3] == index], links[index]) for index in used)
                begins, parts = zip(*of_links, strict=True)
                # Frames of several interfaces get the order of the file.
                frames = Recorded.concatenate(parts).select(np.argsort(np.concatenate(begins), kind="stable"))
                num_frames += len(frames.timestamp) + frames.error_frames + frames.xl_frames
                yield frames
    if rest:  # stands for the record that the file's end cuts off
        none, payload = np.zeros(1, np.int64), np.zeros((1, MAX_PAYLOAD_BYTES), np.uint8)
        yield Recorded(timestamp=none, can_id=none, length=none, payload=payload, channel=none, wrong=none + CUT_OFF)
    if not num_frames and links and not any(link.link_type in _LINKS for link in links):
        link_type = max(link.link_type for link in links)
        raise DataError("The capture is of no CAN interface", value=f"{path} is of link type {link_type}",
                        remedy="Capture one: tcpdump -i can0 -w drive.pcap")  # fmt: skip


def _pcap_packets(buffer: bytes, links: list[_Link]) -> tuple[_Packets, int]:
    """Returns the packets in a part of a file, and the end of its last whole record."""
    packets, position, link = _Packets(), 0, links[0]
    record = struct.Struct(f"{link.order}III")
    while position + _RECORD_HEADER_BYTES <= len(buffer):
        second, ticks, size = record.unpack_from(buffer, position)
        begin = position + _RECORD_HEADER_BYTES
        if begin + _checked(size) > len(buffer):
            break
        packets += (begin, size, (second * int(link.ticks) + ticks) / link.ticks, 0)
        position = begin + size
    return packets, position


def _pcapng_packets(buffer: bytes, links: list[_Link]) -> tuple[_Packets, int]:
    """Reads the packets of a pcapng file; adds the interfaces that it describes to `links`."""
    packets, position = _Packets(), 0
    while position + 12 <= len(buffer):
        order = links[-1].order if links else "<"
        kind, size = struct.unpack_from(f"{order}II", buffer, position)
        if kind == _SECTION:
            order = "<" if buffer[position + 8 : position + 12] == b"\x4d\x3c\x2b\x1a" else ">"
            (size,) = struct.unpack_from(f"{order}I", buffer, position + 4)
        end = position + _checked(size)
        if size < 12:
            raise ValueError(f"a block of {size} bytes")
        if end > len(buffer):
            break
        if kind == _SECTION:
            links.append(_Link(order=order, link_type=_NO_LINK))
        elif kind == _INTERFACE:
            links.append(_interface(buffer[position + 8 : end - 4], order, name=str(len(links) - _section(links) - 1)))
        elif kind in _PACKETS:
            packets += _pcapng_packet(links, kind, buffer[position + 8 : end - 4], position + 8)
        position = end
    return packets, position


def _section(links: list[_Link]) -> int:
    """Returns the index of the entry that begins the last section."""
    return max(i for i, link in enumerate(links) if link.link_type == _NO_LINK)


def _pcapng_packet(links: list[_Link], kind: int, body: bytes, begin: int) -> tuple[int, int, float, int]:
    layout, head_bytes = _PACKETS[kind]
    *place, size = struct.unpack_from(f"{links[-1].order}{layout}", body)
    number, high, low = place or (0, 0, 0)
    index = _section(links) + 1 + number
    if index >= len(links):
        raise ValueError(f"a packet of the interface {number}, which it does not describe")
    if kind == _UNTIMED_PACKET:
        return begin + head_bytes, min(size, len(body) - head_bytes), np.nan, index
    seconds = ((high << 32) | low) / links[index].ticks + links[index].start_s
    return begin + head_bytes, size, seconds, index


def _interface(body: bytes, order: str, name: str) -> _Link:
    (link_type,) = struct.unpack_from(f"{order}H", body)
    options: dict[int, bytes] = {}
    position = 8
    while position + 4 <= len(body):
        code, size = struct.unpack_from(f"{order}HH", body, position)
        options[code] = body[position + 4 : position + 4 + size]
        position += 4 + (size + 3) // 4 * 4
    exponent = options.get(_RESOLUTION, b"\x06")[0]
    ticks = 2.0 ** (exponent & 0x7F) if exponent & 0x80 else 10.0**exponent
    (start_s,) = struct.unpack(f"{order}q", options.get(_OFFSET, bytes(8)))
    name = options.get(_NAME, b"").decode(errors="replace").rstrip("\0") or name
    return _Link(order=order, link_type=link_type, ticks=ticks, start_s=float(start_s), name=name)


def _checked(size: int) -> int:
    if size > _MAX_PACKET_BYTES:
        raise ValueError(f"a record of {size:,} bytes")
    return size


def _frames(buffer: bytes, packets: Floats, link: _Link) -> tuple[Ints, Recorded]:
    """Decodes the packets of an interface that are frames; also returns the position of each frame."""
    # Zeros at the end: a payload is read in full width, even at the end of the buffer.
    data = np.frombuffer(buffer + bytes(_MAX_HEAD_BYTES + FD_PAYLOAD_BYTES), np.uint8)
    head, place = _LINKS[link.link_type]
    (begin, size), seconds = packets[:, :2].astype(np.int64).T, packets[:, 2]
    protocol = np.full(len(begin), _CAN) if place is None else _numbers(data, begin + place, ">u2")
    is_can = np.isin(protocol, (_CAN, _CAN_FD, _CAN_XL))
    begin, size, seconds, protocol = begin[is_can], size[is_can], seconds[is_can], protocol[is_can]
    start, captured = begin + head, size - head - _HEADER_BYTES
    word = _numbers(data, start, ">u4" if link.link_type == _SOCKETCAN else f"{link.order}u4")
    length, flags = data[start + 4].astype(np.int64), data[start + 5]
    is_xl = (protocol == _CAN_XL) | (length >= _XL_FLAG)
    is_fd = (protocol == _CAN_FD) | ((flags & _FD_FLAG) > 0) | (size - head == _FD_BYTES)
    is_error = ((word & _ERROR) > 0) & ~is_xl
    length = np.where(((word & _REMOTE) > 0) & ~is_fd, 0, length)
    wrong = np.select([captured < 0, (length > MAX_PAYLOAD_BYTES) & ~is_fd, captured < length],
                      [CUT_OFF, TOO_LONG, CUT_OFF], GOOD)  # fmt: skip
    length[wrong != GOOD] = 0
    width = FD_PAYLOAD_BYTES if (length > MAX_PAYLOAD_BYTES).any() else MAX_PAYLOAD_BYTES
    payload = data[start[:, None] + _HEADER_BYTES + np.arange(width)]
    payload[np.arange(width) >= length[:, None]] = 0
    can_id = np.where(word & _EXTENDED, word & MAX_CAN_ID, word & _STANDARD_ID)
    channel = _numbers(data, begin + 4, ">u4").astype(str) if link.link_type == _COOKED else [link.name] * len(begin)
    is_frame = ~is_xl & ~is_error
    recorded = Recorded(
        timestamp=seconds,
        can_id=can_id,
        length=length,
        payload=payload,
        channel=np.array(channel, object),
        wrong=wrong,
        error_frames=int(is_error.sum()),
        xl_frames=int(is_xl.sum()),
    )
    return begin[is_frame], recorded.select(is_frame)


def _numbers(data: NDArray[np.uint8], begin: Ints, kind: str) -> Ints:
    """Returns the numbers of format `kind` at the positions `begin` of the data."""
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(data[begin[:, None] + np.arange(size)]).view(kind)[:, 0].astype(np.int64)
