"""Writers of every log format that is read: the property tests read back what they write; they wrote the fixtures."""

import base64
import bz2
import gzip
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path


@dataclass(frozen=True)
class Message:
    """One frame, as a test wants it written; a remote frame has no payload, a CAN FD frame one of up to 64 bytes."""

    microseconds: int
    can_id: int
    payload: bytes = b""
    attack: bool = False
    remote: bool = False

    @property
    def time(self) -> str:
        return f"{self.microseconds // 10**6}.{self.microseconds % 10**6:06d}"

    @property
    def milliseconds(self) -> str:
        return f"{self.microseconds // 1000}.{self.microseconds % 1000:03d}"

    @property
    def date(self) -> str:
        return (datetime(1970, 1, 1) + timedelta(microseconds=self.microseconds)).isoformat(" ", "microseconds")

    @property
    def is_fd(self) -> bool:
        return len(self.payload) > 8

    @property
    def hex_bytes(self) -> str:
        return self.payload.hex(" ").upper()

    @property
    def hex_id(self) -> str:
        """Three digits for 11 bits, eight for 29."""
        return f"{self.can_id:03X}" if self.can_id < 0x800 else f"{self.can_id:08X}"


def can_train_and_test(messages: Sequence[Message]) -> str:
    rows = [f"{m.time},{m.hex_id},{m.payload.hex().upper()},{m.attack:d}" for m in messages]
    return "\n".join(["timestamp,arbitration_id,data_field,attack", *rows, ""])


def can_train_and_test_unlabelled(messages: Sequence[Message]) -> str:
    rows = [f"{m.time},{m.hex_id},{m.payload.hex().upper()}" for m in messages]
    return "\n".join(["timestamp,arbitration_id,data_field", *rows, ""])


def car_hacking(messages: Sequence[Message]) -> str:
    return "".join(
        ",".join([*_head(m), *(f"{byte:02x}" for byte in m.payload), "T" if m.attack else "R"]) + "\n" for m in messages
    )


def car_hacking_padded(messages: Sequence[Message]) -> str:
    return "".join(
        ",".join([*_head(m), *(f"{byte:02x}" for byte in m.payload), *[""] * (8 - len(m.payload))])
        + f",{'T' if m.attack else 'R'}\n"
        for m in messages
    )


def car_hacking_unlabelled(messages: Sequence[Message]) -> str:
    return "".join(",".join([*_head(m), *(f"{byte:02x}" for byte in m.payload)]) + "\n" for m in messages)


def hcrl_text(messages: Sequence[Message]) -> str:
    return "".join(
        f"Timestamp: {m.time:>17}        ID: {m.can_id:04x}    {'100' if m.remote else '000'}    "
        f"DLC: {len(m.payload)}    {m.payload.hex(' ')}".rstrip()
        + "\n"
        for m in messages
    )


def hcrl_challenge(messages: Sequence[Message]) -> str:
    rows = [
        f"{m.time},{m.can_id:03X},{len(m.payload)},{m.payload.hex(' ').upper()},"
        + ("Attack,Flooding" if m.attack else "Normal,Normal")
        for m in messages
    ]
    return "\n".join(["Timestamp,Arbitration_ID,DLC,Data,Class,SubClass", *rows, ""])


def candump(messages: Sequence[Message]) -> str:
    return "".join(_candump_line(m) + "\n" for m in messages)


def candump_codes(messages: Sequence[Message]) -> str:
    """What can-utils write of frames of 8 bytes with a DLC above 8, which classical CAN allows."""
    return "".join(
        f"{_candump_line(m)}{f'_{9 + m.microseconds % 7:X}' if len(m.payload) == 8 else ''}\n" for m in messages
    )


def candump_labelled_attacks(messages: Sequence[Message]) -> str:
    return "".join(f"{_candump_line(m)}{' 1' if m.attack else ''}\n" for m in messages)


def candump_spaced(messages: Sequence[Message]) -> str:
    return "".join(
        f" ({m.time})  can0  {m.hex_id}   [{len(m.payload)}]  "
        + ("remote request" if m.remote else m.payload.hex(" ").upper())
        + "\n"
        for m in messages
    )


def candump_direction(messages: Sequence[Message]) -> str:
    return "".join(f"{_candump_line(m)} {'RT'[m.microseconds % 2]}\n" for m in messages)


def candump_extra(messages: Sequence[Message]) -> str:
    """What `candump -t A -a -x` prints."""
    return "".join(
        f" ({m.date})  can0  {'RX B' if m.is_fd else 'TX -'} -  {m.hex_id}   [{len(m.payload):02d}]  "
        + ("remote request" if m.remote else f"{m.hex_bytes}   '{_characters(m.payload)}'")
        + "\n"
        for m in messages
    )


def _characters(payload: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in payload)


ASC_HEAD = """date Sat Jan 31 12:00:00.000 pm 2026
base hex  timestamps absolute
internal events logged
// version 9.0.0
Begin Triggerblock Sat Jan 31 12:00:00.000 pm 2026
   0.000000 Start of measurement"""
ASC_TAIL = """   9.5 CAN 1 Status:chip status error active
   9.6 1  Statistic: D 3 R 0 XD 0 XR 0 E 0 O 0 B 0.10%
End TriggerBlock
"""


def asc(messages: Sequence[Message]) -> str:
    return "\n".join([ASC_HEAD, *map(_asc_line, messages), ASC_TAIL])


def _asc_line(m: Message, code_of_eight: str = "8") -> str:
    can_id = f"{m.can_id:X}{'x' if m.can_id > 0x7FF else ''}"
    if m.is_fd:
        code = (12, 16, 20, 24, 32, 48, 64).index(len(m.payload)) + 9
        return (
            f"{m.time:>13} CANFD   1 Rx   {can_id:>8}  {'Name':>32} 1 0 {code:x} {len(m.payload):>2} {m.hex_bytes}   "
            "130000  13 200000 00 460a0250 460a0250 20011736 20010205"
        )
    if m.remote:
        return f"{m.time:>13} 1  {can_id:<15} Rx   r 8"
    code = code_of_eight if len(m.payload) == 8 else len(m.payload)
    return f"{m.time:>13} 1  {can_id:<15} Rx   d {code} {m.hex_bytes}  Length = 240000 BitCount = 124 ID = 291x"


def asc_codes(messages: Sequence[Message]) -> str:
    """ASC with DLCs above 8, which are hexadecimal letters, and with the lines of other events between the frames."""
    event = "   0.000000 1  J1939TP FEE3p        6    0  0   -   Rx   d 23 A0 A0 A0 A0 A0 A0 A0 A0 A0"
    rows = [_asc_line(m, "9ABCDEF"[m.microseconds % 7]) for m in messages]
    return "\n".join([ASC_HEAD, *(line for row in rows for line in (row, event)), ASC_TAIL])


def asc_decimal(messages: Sequence[Message]) -> str:
    rows = [
        f"{m.time:>13} 1  {m.can_id}{'x' if m.can_id > 0x7FF else ''} Rx   d {len(m.payload)} "
        + " ".join(f"{byte:3d}".replace(" ", "0") for byte in m.payload)
        for m in messages
    ]
    return "\n".join([ASC_HEAD.replace("base hex", "base dec"), *rows, ASC_TAIL])


def trc_1_0(messages: Sequence[Message]) -> str:
    rows = [f"{i:6}) {m.milliseconds:>12} {_trc_id(m)} {_trc_data(m)}" for i, m in enumerate(messages, 1)]
    return "\r\n".join([";########", ";   Start time: 31.01.2026 12:00:00.000.0", *rows, ""])


def trc_1_1(messages: Sequence[Message]) -> str:
    rows = [f"{i:6}) {m.milliseconds:>12}  Rx     {_trc_id(m)}  {_trc_data(m)}" for i, m in enumerate(messages, 1)]
    warning = "     9)  1.5  Warng  FFFFFFFF  4  00 00 00 08"
    return "\n".join([";$FILEVERSION=1.1", ";$STARTTIME=46053.5", ";", *rows, warning, ""])


def trc_1_3(messages: Sequence[Message]) -> str:
    rows = [
        f"{i:6}) {m.milliseconds:>12} 1  Tx     {_trc_id(m)} -  {_trc_data(m, 4)}" for i, m in enumerate(messages, 1)
    ]
    return "\n".join([";$FILEVERSION=1.3", ";$STARTTIME=46053.5", *rows, ""])


def trc_2_0(messages: Sequence[Message]) -> str:
    rows = [
        f"{i:7} {m.milliseconds:>12} {_trc_type(m)} {_trc_id(m)} Rx {len(m.payload):<2} {m.hex_bytes}".rstrip()
        for i, m in enumerate(messages, 1)
    ]
    return "\n".join([";$FILEVERSION=2.0", ";$STARTTIME=46053.5", ";$COLUMNS=N,O,T,I,d,l,D", *rows, ""])


def trc_2_1(messages: Sequence[Message]) -> str:
    lengths = (*range(9), 12, 16, 20, 24, 32, 48, 64)
    rows = [
        f"{i:7} {m.milliseconds:>12} {_trc_type(m)} 1  {_trc_id(m)} Rx -  "
        f"{lengths.index(len(m.payload)):<4} {m.hex_bytes}"
        for i, m in enumerate(messages, 1)
    ]
    return "\n".join([";$FILEVERSION=2.1", ";$STARTTIME=46053.5", ";$COLUMNS=N,O,T,B,I,d,R,L,D", *rows,
                      "      9        2.5 ST 1         Rx -  4    00 00 00 08", ""])  # fmt: skip


def _trc_id(m: Message) -> str:
    return f"{m.can_id:04X}" if m.can_id <= 0x7FF else f"{m.can_id:08X}"


def _trc_type(m: Message) -> str:
    return "RR" if m.remote else "FB" if m.is_fd else "DT"


def _trc_data(m: Message, width: int = 1) -> str:
    return f"{len(m.payload):<{width}} {'RTR' if m.remote else m.hex_bytes}"


def python_can(messages: Sequence[Message]) -> str:
    rows = [
        f"{m.time},{m.can_id:#x},{m.can_id > 0x7FF:d},{m.remote:d},0,{len(m.payload)},"
        f"{base64.b64encode(m.payload).decode()}"
        for m in messages
    ]
    return "\n".join(["timestamp,arbitration_id,extended,remote,error,dlc,data", *rows, ""])


def savvycan(messages: Sequence[Message]) -> str:
    rows = [
        f"{m.microseconds},{m.can_id:08X},{str(m.can_id > 0x7FF).lower()},Rx,0,{len(m.payload)},"
        + "".join(f"{byte:02X}," for byte in m.payload)
        for m in messages
    ]
    return "\n".join(["Time Stamp,ID,Extended,Dir,Bus,LEN,D1,D2,D3,D4,D5,D6,D7,D8", *rows, ""])


def savvycan_padded(messages: Sequence[Message]) -> str:
    rows = [
        f"{m.microseconds},{m.can_id:08X},{str(m.can_id > 0x7FF).lower()},Rx,0,{len(m.payload)},"
        + "".join(f"{byte:02X}," for byte in m.payload.ljust(8, b"\x5a"))
        for m in messages
    ]
    return "\n".join(["Time Stamp,ID,Extended,Dir,Bus,LEN,D1,D2,D3,D4,D5,D6,D7,D8", *rows, ""])


def columns_of_decimal_bytes(messages: Sequence[Message]) -> str:
    rows = [
        ",".join([m.time, str(m.can_id), str(len(m.payload)), *map(str, m.payload.ljust(8, b"\0")), f"{m.attack:d}"])
        for m in messages
    ]
    return "\n".join([f"timestamp,can_id,dlc,{','.join(f'd{i}' for i in range(8))},label", *rows, ""])


def canedge(messages: Sequence[Message]) -> str:
    codes = (*range(9), 12, 16, 20, 24, 32, 48, 64)
    rows = [
        f"{m.time};1;{m.can_id:X};{m.can_id > 0x7FF:d};{codes.index(len(m.payload))};{len(m.payload)};0;"
        f"{m.is_fd:d};0;0;0;{m.payload.hex().upper()}"
        for m in messages
    ]
    head = "TimestampEpoch;BusChannel;ID;IDE;DLC;DataLength;Dir;EDL;BRS;ESI;RTR;DataBytes"
    return "\n".join([head, *rows, ""])


def columns_labelled_attacks(messages: Sequence[Message]) -> str:
    rows = [f"{m.time},0x{m.can_id:X},{m.payload.hex()}{',dos' if m.attack else ''}" for m in messages]
    return "\n".join(["time,id,data,label", *rows, ""])


def columns_dated(messages: Sequence[Message]) -> str:
    rows = [f"0x{m.can_id:X};{_ahead(m)};{m.payload.hex()};{'replay' if m.attack else 'normal'}" for m in messages]
    return "\n".join(["id;time;payload;class", *rows, ""])


def _ahead(m: Message) -> str:
    """The date, an hour ahead of UTC."""
    moment = datetime(1970, 1, 1, 1, tzinfo=UTC) + timedelta(microseconds=m.microseconds)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "+01:00")


def candump_labelled(messages: Sequence[Message]) -> str:
    return "".join(f"{_candump_line(m)} False\t{m.attack}\n" for m in messages)


def whitespace(messages: Sequence[Message]) -> str:
    return "".join(
        f"{m.time}  {m.can_id:04x}  {'100' if m.remote else '000'}  {len(m.payload)}  {m.payload.hex(' ')}".rstrip()
        + "\n"
        for m in messages
    )


def whitespace_without_flags(messages: Sequence[Message]) -> str:
    return "".join(f"{m.time} {m.can_id:04x} {len(m.payload)} {m.payload.hex(' ')}".rstrip() + "\n" for m in messages)


def columns_decimal(messages: Sequence[Message]) -> str:
    rows = [
        f'{m.time},can0,{m.can_id},{len(m.payload)},"{m.payload.hex(":")}","a, b",{"dos" if m.attack else "normal"}'
        for m in messages
    ]
    return "\n".join(["time,iface,can_id,dlc,data,name,label", *rows, ""])


def columns_of_bytes(messages: Sequence[Message]) -> str:
    rows = [
        ";".join([m.time, f"0x{m.can_id:X}", *(f"{byte:x}" for byte in m.payload), *[""] * (8 - len(m.payload))])
        + f";{m.attack}"
        for m in messages
    ]
    return "\n".join([f"Time [s];CAN ID;{';'.join(f'DATA[{i}]' for i in range(8))};Attack", *rows, ""])


def _head(message: Message) -> list[str]:
    return [message.time, f"{message.can_id:04x}", str(len(message.payload))]


def _candump_line(message: Message) -> str:
    data = "R" if message.remote else f"{'#1' if message.is_fd else ''}{message.payload.hex().upper()}"
    return f"({message.time}) can0 {message.hex_id}#{data}"


@dataclass(frozen=True)
class Writer:
    """How messages are written, and what the reader should make of it.

    Attributes:
        write: Makes the text of a log.
        format: The format's name.
        kinds: The label kinds of a log with attacks; one where the format has no labels.
        remote: Whether the format has remote frames.
        fd: Whether it has CAN FD frames.
        exact: Whether it holds seconds, so that times are read without rounding.
        attacks_labelled: Whether attacks alone have a label, so that a log without any is unlabelled.
    """

    write: Callable[[Sequence[Message]], str]
    format: str
    kinds: tuple[str, ...] = ("benign", "attack")
    remote: bool = False
    fd: bool = False
    exact: bool = True
    attacks_labelled: bool = False

    @property
    def labelled(self) -> bool:
        return len(self.kinds) > 1


UNLABELLED = ("benign",)

WRITERS = {
    writer.write.__name__: writer
    for writer in (
        Writer(can_train_and_test, "can_train_and_test"),
        Writer(can_train_and_test_unlabelled, "can_train_and_test", UNLABELLED),
        Writer(car_hacking, "car_hacking"),
        Writer(car_hacking_padded, "car_hacking"),
        Writer(car_hacking_unlabelled, "car_hacking", UNLABELLED),
        Writer(hcrl_text, "hcrl_text", UNLABELLED, remote=True),
        Writer(hcrl_challenge, "hcrl_challenge", ("benign", "flooding")),
        Writer(candump, "candump", UNLABELLED, remote=True, fd=True),
        Writer(candump_codes, "candump", UNLABELLED, remote=True, fd=True),
        Writer(candump_labelled_attacks, "candump", remote=True, fd=True, attacks_labelled=True),
        Writer(candump_spaced, "candump", UNLABELLED, remote=True, fd=True),
        Writer(candump_direction, "candump", UNLABELLED, remote=True, fd=True),
        Writer(candump_extra, "candump", UNLABELLED, remote=True, fd=True),
        Writer(candump_labelled, "candump_labelled", remote=True, fd=True),
        Writer(asc, "asc", UNLABELLED, remote=True, fd=True),
        Writer(asc_codes, "asc", UNLABELLED, remote=True, fd=True),
        Writer(asc_decimal, "asc", UNLABELLED),
        Writer(trc_1_0, "trc", UNLABELLED, remote=True, exact=False),
        Writer(trc_1_1, "trc", UNLABELLED, remote=True, exact=False),
        Writer(trc_1_3, "trc", UNLABELLED, remote=True, exact=False),
        Writer(trc_2_0, "trc", UNLABELLED, remote=True, fd=True, exact=False),
        Writer(trc_2_1, "trc", UNLABELLED, remote=True, fd=True, exact=False),
        Writer(python_can, "python_can", UNLABELLED, remote=True, fd=True),
        Writer(savvycan, "savvycan", UNLABELLED, fd=True, exact=False),
        Writer(savvycan_padded, "savvycan", UNLABELLED, exact=False),
        Writer(columns_of_decimal_bytes, "columns"),
        Writer(canedge, "columns", UNLABELLED, fd=True),
        Writer(columns_labelled_attacks, "columns", ("benign", "dos"), attacks_labelled=True),
        Writer(columns_dated, "columns", ("benign", "replay"), fd=True),
        Writer(whitespace, "whitespace", UNLABELLED, remote=True),
        Writer(whitespace_without_flags, "whitespace", UNLABELLED),
        Writer(columns_decimal, "columns", ("benign", "dos"), fd=True),
        Writer(columns_of_bytes, "columns"),
    )
}


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def write_log(path: Path, text: str, encoding: str = "utf-8") -> Path:
    """Writes a log, compressed as its suffix says."""
    data = text.encode(encoding)
    path.write_bytes(COMPRESSORS[path.suffix](data) if path.suffix in COMPRESSORS else data)
    return path
