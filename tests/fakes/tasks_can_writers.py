"""Writers of every log format that is read: the property tests read back what they write; they wrote the fixtures."""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Message:
    """One frame, as a test wants it written; a remote frame has no payload."""

    microseconds: int
    can_id: int
    payload: bytes = b""
    attack: bool = False
    remote: bool = False

    @property
    def time(self) -> str:
        return f"{self.microseconds // 10**6}.{self.microseconds % 10**6:06d}"

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


def candump_spaced(messages: Sequence[Message]) -> str:
    return "".join(
        f" ({m.time})  can0  {m.hex_id}   [{len(m.payload)}]  "
        + ("remote request" if m.remote else m.payload.hex(" ").upper())
        + "\n"
        for m in messages
    )


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
    return f"({message.time}) can0 {message.hex_id}#{'R' if message.remote else message.payload.hex().upper()}"


@dataclass(frozen=True)
class Writer:
    """How messages are written, and what the reader should make of it.

    Attributes:
        write: Makes the text of a log.
        format: The format's name.
        kinds: The label kinds of a log with attacks; one where the format has no labels.
        remote: Whether the format has remote frames.
    """

    write: Callable[[Sequence[Message]], str]
    format: str
    kinds: tuple[str, ...] = ("benign", "attack")
    remote: bool = False

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
        Writer(candump, "candump", UNLABELLED, remote=True),
        Writer(candump_spaced, "candump", UNLABELLED, remote=True),
        Writer(candump_labelled, "candump_labelled", remote=True),
        Writer(whitespace, "whitespace", UNLABELLED, remote=True),
        Writer(whitespace_without_flags, "whitespace", UNLABELLED),
        Writer(columns_decimal, "columns", ("benign", "dos")),
        Writer(columns_of_bytes, "columns"),
    )
}


def write_log(path: Path, text: str) -> Path:
    """Writes a log, compressed if its name ends in .gz."""
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path
