"""Mutated CAN logs of every format: refused with a sentence, or read as frames and windows of finite numbers."""

import bz2
import gzip
import importlib.util
import json
import lzma
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from bench.chaos_cases import Attack, escaped
from can_train.errors import CanTrainError
from can_train.reporter import SilentReporter
from can_train_tasks.can.data.dataset import prepare
from can_train_tasks.can.data.grammar import MAX_CAN_ID, MAX_TIME_S
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.layout import LOG, LogFile
from can_train_tasks.can.data.payload_fields import FD_PAYLOAD_BYTES
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.evaluation.live_input import BusFrames, open_input
from can_train_tasks.can.settings import CanDatasetSettings

FIXTURES: Final = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "can"
LINES: Final = 100  # of a log

_BINARY_SHARE: Final = 0.02
_WINDOWS_SHARE: Final = 0.15  # of the logs that become windows too
_LIVE_SHARE: Final = 0.1  # of the logs that arrive as if from a bus
_ODD: Final = (
    "", " ", ",", ",,,,", "\t", "nan", "inf", "-inf", "1e308", "1e309", "-1", "-0.0", "0", "1e-320", "9" * 30,
    "9" * 400, "0x", "0xFFFFFFFF", "1FFFFFFF", "20000000", "FFFFFFFFFF", "G1", "\ufeff", "\u202e", "١٢٣", "é", "\x00",
    "\x1b[2J", '"', '""', "'", "\\", "(", ")", "[8]", "[99]", "#", "##", "##1", "#R", "#R9", "R", "T", "1.2.3", "1,5",
    "1e11", "1e12", "2026-01-01 00:00:00", "9999-12-31T23:59:59", "0000-00-00", "00" * 64, "0" * 15, "F" * 129, "zz",
    "can0", "can" * 200, "Rx", "Tx", "ErrorFrame", "d 8", "l 64",
)  # fmt: skip
_ENCODINGS: Final = ("utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "utf-32", "latin-1", "utf-7")
_PACKERS: Final[Sequence[tuple[str, Callable[[bytes], bytes]]]] = (
    (".gz", gzip.compress),
    (".bz2", bz2.compress),
    (".xz", lzma.compress),
)
_ENDINGS: Final = (b"\n", b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b"\x0b", b"\x00", b"")


@cache
def _fixtures() -> tuple[tuple[str, list[bytes]], ...]:
    paths = [path for path in sorted(FIXTURES.iterdir()) if path.suffix != ".gz"]
    return tuple((path.suffix, path.read_bytes().splitlines()) for path in paths)


@cache
def _recordings(place: Path) -> tuple[tuple[str, bytes], ...]:
    """Makes binary logs, if python-can is installed."""
    made = []
    if importlib.util.find_spec("can"):
        import can

        path = place / "whole.blf"
        with can.BLFWriter(str(path)) as writer:
            for number in range(300):
                message = can.Message(timestamp=1e9 + number / 100, arbitration_id=number % 7, data=bytes(8))
                writer.on_message_received(message)
        made.append((".blf", path.read_bytes()))
    return tuple(made)


def draw_log(dice: Random, place: Path) -> Path:
    """Writes a mutated log."""
    if dice.random() < _BINARY_SHARE and (recordings := _recordings(place)):
        suffix, data = dice.choice(recordings)
        return _written(place / f"log{suffix}", _damaged(data, dice))
    suffix, lines = dice.choice(_fixtures())
    # A header is the first line; only with an unmutated header can the other lines be read.
    rows = [lines[0], *(dice.choice(lines) for _ in range(LINES - 1))]
    share = dice.choice((0.01, 0.1, 0.5, 1.0))
    rows = [_mutated(row, dice) if dice.random() < share and (number or dice.random() < 0.2) else row
            for number, row in enumerate(rows)]  # fmt: skip
    if dice.random() < 0.2:
        rows = _in_time(rows, dice)
    end = dice.choice(_ENDINGS) if dice.random() < 0.2 else b"\n"
    data = end.join(rows) + dice.choice((end, b""))
    if dice.random() < 0.1:
        data = data.decode(errors="replace").encode(dice.choice(_ENCODINGS), errors="replace")
    if dice.random() < 0.1:
        packing, pack = dice.choice(_PACKERS)
        suffix, data = suffix + packing, pack(data)
    if dice.random() < 0.15:
        data = _damaged(data, dice)
    return _written(place / f"log{suffix}", data)


def _mutated(row: bytes, dice: Random) -> bytes:
    match dice.randrange(8):
        case 0:
            return row[: dice.randrange(len(row) + 1)]
        case 1:
            return _damaged(row, dice)
        case 2:
            other = dice.choice(dice.choice(_fixtures())[1])
            return row[: dice.randrange(len(row) + 1)] + other[dice.randrange(len(other) + 1) :]
        case 3:
            return row * dice.choice((2, 3, 50))
        case 4:
            return bytes(dice.randrange(256) for _ in range(dice.randrange(40)))
        case _:
            separator = dice.choice((b",", b" ", b"#", b"\t", b";"))
            fields = row.split(separator)
            fields[dice.randrange(len(fields))] = dice.choice(_ODD).encode()
            return separator.join(fields)


def _in_time(rows: Sequence[bytes], dice: Random) -> list[bytes]:
    """Puts the lines of a log without a header into a random order of time."""
    return [row.replace(b"1", str(dice.randrange(10)).encode(), 1) for row in rows]


def _damaged(data: bytes, dice: Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 20))):
        place = dice.randrange(len(damaged) + 1)
        match dice.randrange(4):
            case 0:
                damaged[place : place + 1] = bytes([dice.randrange(256)])
            case 1:
                del damaged[place : place + dice.choice((1, 2, 100))]
            case 2:
                damaged[place:place] = damaged[: dice.randrange(200)]
            case _:
                damaged[place : place + 8] = bytes(8)
    return bytes(damaged[: dice.randrange(len(damaged) + 1)] if dice.random() < 0.1 else damaged)


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _add_sidecar(log: Path, dice: Random) -> None:
    """Writes labels beside a log, with one odd value."""
    name = log.name.partition(".")[0]
    entry: dict[str, Any] = {"injection_id": "0x2", "injection_interval": [0.0, 5.0], "injection_data_str": "XXXXFF"}
    odd: tuple[Any, ...] = (
        None, [], {}, "", "X" * 300, "F" * 300, 10**40, -1, [[1, 2], [3, float("nan")]], [1e308, float("inf")],
        [10**30, 1], "12345678901234567890",
    )  # fmt: skip
    entry[dice.choice([*entry])] = dice.choice(odd)
    text = json.dumps({name: entry})
    if dice.random() < 0.3:
        cut = text[: dice.randrange(len(text))]
        broken = (cut, "[" * 5_000, "{", "", '{"log": ' + "9" * 5_000 + "}", "\ufeff" + text, "[1]")
        text = dice.choice(broken)
    (log.parent / "capture_metadata.json").write_text(text)


def case(number: int, dice: Random, place: Path) -> str:
    """Reads a mutated log in every way that can-train reads logs."""
    folder = place / "logs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = draw_log(dice, folder)
    if dice.random() < 0.05:
        _add_sidecar(log, dice)
    malformed, window = dice.choice((0.01, 1.0, 1.0)), dice.choice((2, 10, 50))
    settings = CanDatasetSettings(path=str(log), max_malformed=malformed, window=window)
    ways: list[Callable[[], None]] = [lambda: _read(log, settings, dice)]
    if dice.random() < _WINDOWS_SHARE:
        ways.append(lambda: _prepare(log, settings, place / "cache"))
    if dice.random() < _LIVE_SHARE:
        ways.append(lambda: _hear(log, settings))
    for way in ways:
        try:
            with suppress(CanTrainError):
                way()
        except Exception as error:  # noqa: BLE001 - the attack looks for any error
            return escaped(error)
    return ""


def _read(log: Path, settings: CanDatasetSettings, dice: Random) -> None:
    reader = LogReader(log, settings, block_bytes=dice.choice((200, 2_000, 2**20)))
    for frames in reader.blocks():
        _check(frames)
        assert (np.abs(frames.timestamp) <= MAX_TIME_S * 1.01).all(), "times of no clock"


def _hear(log: Path, settings: CanDatasetSettings) -> None:
    heard = open_input(str(log), settings)
    try:
        for batch in heard.batches():
            if isinstance(batch, BusFrames):
                _check(batch.frames)
    finally:
        heard.close()


def _prepare(log: Path, settings: CanDatasetSettings, cache: Path) -> None:
    source = LogFile(path=log, role=LOG, group=log.name, kind="DoS")
    flat = prepare(settings, [source], cache, SilentReporter()).flat
    arrays = {name: value for name, value in vars(flat).items()
              if isinstance(value, np.ndarray) and value.dtype.kind == "f"}  # fmt: skip
    # The behaviour of an ID without an earlier frame is NaN.
    wrong = [name for name, value in arrays.items()
             if not (np.isfinite(value) | (name == "behaviour") & np.isnan(value)).all()]  # fmt: skip
    assert not wrong, f"not finite: {wrong}"


def _check(frames: Frames) -> None:
    assert np.isfinite(frames.timestamp).all(), "times are not finite"
    assert (frames.can_id <= MAX_CAN_ID).all(), "IDs of no frame"
    assert (frames.length <= FD_PAYLOAD_BYTES).all(), "payloads of no frame"
    beyond = np.arange(frames.payload.shape[1]) >= frames.length[:, None]
    assert not frames.payload[beyond].any(), "bytes beyond the payload"


def _quiet(place: Path) -> None:
    # Packages that read binary logs print warnings about damaged logs.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


ATTACKS: Final = (Attack("logs", f"mutated logs of {LINES} lines each", case, 10_000, 80, _quiet, inputs=LINES),)
