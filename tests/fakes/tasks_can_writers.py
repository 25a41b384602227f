"""Writers of every log format that is read: the property tests read back what they write; they wrote the fixtures."""

import base64
import bz2
import gzip
import lzma
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
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


def syncan(messages: Sequence[Message]) -> str:
    return "Label,Time,ID,Signal1_of_ID,Signal2_of_ID,Signal3_of_ID,Signal4_of_ID\n" + syncan_rows(messages)


def syncan_rows(messages: Sequence[Message]) -> str:
    """Most training files have no header."""
    signals = [[word / 65535 for (word,) in struct.iter_unpack(">H", m.payload)] for m in messages]
    rows = [f"{m.attack:d},{m.milliseconds},id{m.can_id},{','.join(map(str, values)) + ',' * (4 - len(values))}"
            for m, values in zip(messages, signals, strict=True)]  # fmt: skip
    return "\n".join([*rows, ""])


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


def busmaster(messages: Sequence[Message]) -> str:
    """Hexadecimal numbers, times since the recording began."""
    return _busmaster("HEX", "ABSOLUTE", messages, [m.microseconds for m in messages])


def busmaster_decimal(messages: Sequence[Message]) -> str:
    """Decimal numbers, times since the line before."""
    times = [0, *(m.microseconds for m in messages)]
    return _busmaster("DEC", "RELATIVE", messages, [after - before for before, after in pairwise(times)])


def _busmaster(base: str, mode: str, messages: Sequence[Message], times: Sequence[int]) -> str:
    rows = [
        f"{_clock(time, ':')[:-2]} Rx 1 {_busmaster_id(m, base)} {'x' if m.can_id > 0x7FF else 's'}"
        f"{'r' if m.remote else '-fd' if m.is_fd else ''} {8 if m.remote else len(m.payload)} "
        + " ".join(f"{byte:03d}" if base == "DEC" else f"{byte:02X}" for byte in m.payload)
        for m, time in zip(messages, times, strict=True)
    ]
    return "\n".join(["***BUSMASTER Ver 3.2.2***", "***PROTOCOL CAN***", "***[START LOGGING SESSION]***",
                      "***START DATE AND TIME 1:1:1970 0:0:0:0***", f"***{base}***", f"***{mode} MODE***",
                      "***START DATABASE FILES***", "C:\\databases\\drive.dbf", "***END DATABASE FILES***",
                      "***<Time><Tx/Rx><Channel><CAN ID><Type><DLC><DataBytes>***", *rows,
                      "***END DATE AND TIME 1:1:1970 0:0:9:0***", "***[STOP LOGGING SESSION]***", ""])  # fmt: skip


def _busmaster_id(m: Message, base: str) -> str:
    return f"{m.can_id:03d}" if base == "DEC" else f"0x{m.hex_id}"


def _clock(microseconds: int, mark: str) -> str:
    """Hours, minutes, seconds and their fraction behind a mark."""
    seconds, fraction = divmod(microseconds, 10**6)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{mark}{fraction:06d}"


def car_hacking_resaved(messages: Sequence[Message]) -> str:
    """What pandas writes of a Car-Hacking log: the label of a short row stands in the column of a byte."""
    names = ["", "Timestamp", "CAN ID", "DLC", *(f"DATA[{i}]" for i in range(8)), "Flag"]
    rows = [
        ",".join([str(i), *_head(m), *(f"{byte:02x}" for byte in m.payload), "T" if m.attack else "R",
                  *[""] * (8 - len(m.payload))])
        for i, m in enumerate(messages)
    ]  # fmt: skip
    return "\n".join([",".join(names), *rows, ""])


def cabana(messages: Sequence[Message]) -> str:
    rows = [f"{m.time},0x{m.can_id:x},1,0x{m.payload.hex().upper()}" for m in messages]
    return "\n".join(["time,addr,bus,data", *rows, ""])


def panda(messages: Sequence[Message]) -> str:
    rows = [f"0,{hex(m.can_id)},0x{m.payload.hex()},{len(m.payload)},{m.time}" for m in messages]
    return "\n".join(["Bus,MessageID,Message,MessageLength,Time", *rows, ""])


def columns_clock(messages: Sequence[Message]) -> str:
    """Times of day, IDs with an h behind them."""
    rows = [f"{_clock(m.microseconds, '.')},{m.hex_id}h,{m.payload.hex(' ')}" for m in messages]
    return "\n".join(["Time,ID,Data", *rows, ""])


def columns_comma(messages: Sequence[Message]) -> str:
    """Decimal commas, IDs with an x behind those of 29 bits."""
    rows = [
        f'"{m.time.replace(".", ",")}";0x{m.hex_id}{"x" if m.can_id > 0x7FF else ""};{m.payload.hex(" ")};{m.attack:d}'
        for m in messages
    ]
    return "\n".join(["Time;ID;Data;Attack", *rows, ""])


def columns_day_first(messages: Sequence[Message]) -> str:
    moments = [datetime(1970, 1, 1) + timedelta(microseconds=m.microseconds) for m in messages]
    rows = [
        f"{moment:%d.%m.}{moment.year:04d} {moment:%H:%M:%S,%f};0x{m.can_id:X};{m.payload.hex()}"
        for moment, m in zip(moments, messages, strict=True)
    ]
    return "\n".join(["time;id;data", *rows, ""])


def _frame(m: Message, order: str = ">") -> bytes:
    """A frame as SocketCAN has it."""
    bits = (0x8000_0000 if m.can_id > 0x7FF else 0) | (0x4000_0000 if m.remote else 0)
    size = 64 if m.is_fd else 8
    head = struct.pack(f"{order}IBBxx", m.can_id | bits, 8 if m.remote else len(m.payload), 4 if m.is_fd else 0)
    return head + m.payload.ljust(size, b"\0")


def pcap(messages: Sequence[Message]) -> bytes:
    return pcap_file([(m.microseconds, _frame(m)) for m in messages])


def pcap_file(
    packets: Sequence[tuple[int, bytes]], *, order: str = "<", ticks: int = 10**6, link_type: int = 227
) -> bytes:
    """Writes packets, each with its time in microseconds."""
    magic = 0xA1B2C3D4 if ticks == 10**6 else 0xA1B23C4D
    records = [
        struct.pack(f"{order}IIII", us // 10**6, us % 10**6 * ticks // 10**6, len(packet), len(packet)) + packet
        for us, packet in packets
    ]
    return struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, 262144, link_type) + b"".join(records)


def pcap_cooked(messages: Sequence[Message]) -> bytes:
    """As `tcpdump -i any` writes it, on a computer that is big-endian."""
    packets = [
        (m.microseconds, struct.pack(">HHH8sH", 1, 280, 0, b"", 0xD if m.is_fd else 0xC) + _frame(m)) for m in messages
    ]
    return pcap_file(packets, order=">", link_type=113)


def pcapng(messages: Sequence[Message]) -> bytes:
    """Nanoseconds."""
    blocks = [pcapng_section(), pcapng_interface("can0")]
    return b"".join([*blocks, *(pcapng_packet(m.microseconds * 1000, _frame(m)) for m in messages)])


def pcapng_section(order: str = "<") -> bytes:
    return _block(order, 0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1))


def pcapng_interface(name: str, order: str = "<", resolution: int = 9, link_type: int = 227) -> bytes:
    options = [(2, name.encode()), (9, bytes([resolution])), (0, b"")]
    written = [struct.pack(f"{order}HH", code, len(value)) + _to_four(value) for code, value in options]
    return _block(order, 1, struct.pack(f"{order}HxxI", link_type, 0) + b"".join(written))


def pcapng_packet(ticks: int, packet: bytes, order: str = "<", interface: int = 0) -> bytes:
    head = struct.pack(f"{order}IIIII", interface, ticks >> 32, ticks & 0xFFFF_FFFF, len(packet), len(packet))
    return _block(order, 6, head + _to_four(packet))


def _to_four(value: bytes) -> bytes:
    return value + bytes(-len(value) % 4)


def _block(order: str, kind: int, body: bytes) -> bytes:
    size = struct.pack(f"{order}I", len(body) + 12)
    return struct.pack(f"{order}I", kind) + size + body + size


def sqlite(messages: Sequence[Message]) -> bytes:
    """The table that python-can writes."""
    rows = [
        (float(m.time), m.can_id, m.can_id > 0x7FF, m.remote, False, 8 if m.remote else len(m.payload), m.payload)
        for m in messages
    ]
    with tempfile.TemporaryDirectory() as folder:
        with closing(sqlite3.connect(Path(folder) / "log.db")) as database:
            database.execute(
                "CREATE TABLE messages (ts REAL, arbitration_id INTEGER, extended INTEGER, remote INTEGER, "
                "error INTEGER, dlc INTEGER, data BLOB)"
            )
            database.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            database.commit()
        return (Path(folder) / "log.db").read_bytes()


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
        text: Whether it is lines of text.
        last_us: The latest time that it can write, in microseconds.
        step_us: What its times are multiples of.
        lengths: The lengths of its classical payloads, in bytes.
    """

    write: Callable[[Sequence[Message]], str | bytes]
    format: str
    kinds: tuple[str, ...] = ("benign", "attack")
    remote: bool = False
    fd: bool = False
    exact: bool = True
    attacks_labelled: bool = False
    text: bool = True
    last_us: int = 2_000_000_000_000_000
    step_us: int = 1
    lengths: tuple[int, ...] = tuple(range(9))

    @property
    def labelled(self) -> bool:
        return len(self.kinds) > 1


UNLABELLED = ("benign",)
HOUR_US = 3_600_000_000

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
        Writer(syncan, "syncan", exact=False, lengths=(2, 4, 6, 8)),
        Writer(syncan_rows, "syncan", exact=False, lengths=(2, 4, 6, 8)),
        Writer(columns_of_decimal_bytes, "columns"),
        Writer(canedge, "columns", UNLABELLED, fd=True),
        Writer(columns_labelled_attacks, "columns", ("benign", "dos"), attacks_labelled=True),
        Writer(columns_dated, "columns", ("benign", "replay"), fd=True),
        Writer(whitespace, "whitespace", UNLABELLED, remote=True),
        Writer(whitespace_without_flags, "whitespace", UNLABELLED),
        Writer(columns_decimal, "columns", ("benign", "dos"), fd=True),
        Writer(columns_of_bytes, "columns"),
        Writer(car_hacking_resaved, "car_hacking"),
        Writer(cabana, "columns", UNLABELLED, fd=True),
        Writer(panda, "columns", UNLABELLED, fd=True),
        Writer(columns_clock, "columns", UNLABELLED, fd=True, last_us=24 * HOUR_US - 1),
        Writer(columns_comma, "columns", fd=True),
        Writer(columns_day_first, "columns", UNLABELLED, fd=True),
        Writer(busmaster, "busmaster", UNLABELLED, remote=True, fd=True, last_us=999 * HOUR_US, step_us=100),
        Writer(busmaster_decimal, "busmaster", UNLABELLED, remote=True, fd=True, exact=False, last_us=999 * HOUR_US,
               step_us=100),
        Writer(pcap, "pcap", UNLABELLED, remote=True, fd=True, text=False),
        Writer(pcap_cooked, "pcap", UNLABELLED, remote=True, fd=True, text=False),
        Writer(pcapng, "pcap", UNLABELLED, remote=True, fd=True, exact=False, text=False),
        Writer(sqlite, "sqlite", UNLABELLED, remote=True, fd=True, text=False),
    )
}  # fmt: skip


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def write_log(path: Path, log: str | bytes, encoding: str = "utf-8") -> Path:
    """Writes a log, compressed as its suffix says."""
    data = log if isinstance(log, bytes) else log.encode(encoding)
    path.write_bytes(COMPRESSORS[path.suffix](data) if path.suffix in COMPRESSORS else data)
    return path
