"""Reads binary logs: BLF (with python-can), MF4 (with asammdf), captures (pcap), python-can's SQLite databases.
Tables in parquet, as X-CANIDS has them, are written as text.

Shapes: M frames.
"""

from __future__ import annotations

import gc
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import CanTrainError, DataError
from can_train_tasks.can.data.captures import (
    CAPTURE_MAGIC,
    CUT_OFF,
    GOOD,
    LARGE_ID,
    MISSING,
    NO_LENGTH,
    OTHER_LENGTH,
    WRONG,
    Recorded,
    read_capture,
)
from can_train_tasks.can.data.grammar import FD_LENGTHS, LATE_TIMESTAMP, MAX_CAN_ID, MAX_TIME_S, Grammar, ParsedRows
from can_train_tasks.can.data.log_text import (
    TextSample,
    changed_log,
    file_state,
    missing_package,
    split_lines,
    unpacked,
)
from can_train_tasks.can.data.payload_fields import FD_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES

BLOCK_FRAMES: Final = 2**17
_FRAME_BYTES: Final = 40.0  # size of a frame in a binary log, with its header, uncompressed

# First bytes of binary logs.
_UNFINISHED: Final = b"UnFinMF 4"  # an MF4 file that its logger did not finalise, since it lost power
_MAGIC: Final = {
    b"LOGG": "blf",
    b"MDF     4": "mf4",
    _UNFINISHED: "mf4",
    b"SQLite format 3\0": "sqlite",
    b"PAR1": "parquet",
    **dict.fromkeys(CAPTURE_MAGIC, "pcap"),
}
_PACKAGES: Final = {"blf": "can", "mf4": "asammdf"}
_SQLITE_TABLE: Final = "messages"
# Columns with the types of their values, in SQLite's and in polars' names.
_SQLITE_COLUMNS: Final = {
    "ts": ("'real', 'integer'", pl.Float64),
    "arbitration_id": ("'integer'", pl.Int64),
    "remote": ("'integer'", pl.Int64),
    "error": ("'integer'", pl.Int64),
    "dlc": ("'integer'", pl.Int64),
    "data": ("'blob'", pl.Binary),
}
_TABLE: Final = "parquet"
_TABLE_ROWS: Final = 2**17  # rows of a table that are written as text at once, about 10 MiB
_TOLD_ROWS: Final = 2**13  # first rows of a table, which tell its columns, bases and unit
_WHOLE_NUMBERS: Final = r"\.0$"  # pandas turns whole numbers into fractions in a column that lacks any


class FrameNames(Sequence[str]):
    """Stands for the lines of a recording, which has no lines."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __len__(self) -> int:
        return BLOCK_FRAMES

    def __getitem__(self, position: Any) -> Any:
        return f"frame {self._first + position}"


def recording_format(path: Path) -> str:
    """Returns a name of `settings.RECORDINGS` by a file's first bytes; empty where the file is no binary log."""
    try:
        with unpacked(path) as (stream, _):
            start = stream.peek(max(map(len, _MAGIC)))
    except CanTrainError:
        return ""  # the reader of the file raises the error
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")


def _refuse_packed(path: Path, log_format: str) -> None:
    with path.open("rb") as file:
        is_packed = not file.read(max(map(len, _MAGIC))).startswith(tuple(_MAGIC))
    if is_packed:
        raise DataError(f"The log is a {log_format.upper()} file that was compressed, which only logs of text and "
                        "captures may be", value=str(path), remedy="Unpack it, and give the unpacked log"
                        )  # fmt: skip


class TableText:
    """The rows of a parquet file, written as the text of a CSV log: names, bases, units and labels are read as there.

    It has the attributes and methods of `LogText`, and:

    Attributes:
        typed: Settings that the types of the columns decide, such as the base of IDs that are numbers and no texts.

    Raises:
        DataError: The file is no whole parquet file, or it has no rows.
    """

    def __init__(self, path: Path) -> None:
        _refuse_packed(path, _TABLE)
        self._path, self._state = path, file_state(path)
        with self._whole():
            self._table = pl.scan_parquet(path)
            self._schema = self._table.collect_schema()
            self._rows = self._table.select(pl.len()).collect().item()
        if not self._rows:
            raise DataError("The log is empty", value=str(path), remedy="Give another log")
        self.first_lines = self._lines(0, _TOLD_ROWS, header=True)
        self.line_bytes = float(self.first_lines.str.len_bytes().mean() or 0) + 1  # type: ignore[arg-type]

    def typed(self, roles: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Returns the settings that the types of the columns of the roles decide."""
        by_name = {name.strip(): kind for name, kind in self._schema.items()}
        kinds = {role: by_name[names[0]] for role, names in roles.items()}
        decided = {}
        if kinds["timestamp"].is_temporal():
            decided["time_unit"] = "s"
        if kinds["id"].is_numeric():
            decided["id_base"] = "dec"
        if kinds["data"].is_numeric() or kinds["data"].is_nested():
            decided["byte_base"] = "dec"
        elif kinds["data"] == pl.Binary:
            decided["byte_base"] = "hex"
        return decided

    def blocks(self) -> Iterator[tuple[int, pl.Series]]:
        """Yields the number of a block's first row, counted from 1, and its rows."""
        for begin in range(0, self._rows, _TABLE_ROWS):
            yield begin + 1, self._lines(begin, _TABLE_ROWS)
        if file_state(self._path) != self._state:
            raise changed_log(self._path)

    def sample(self, num_parts: int, part_bytes: int, reach_bytes: int) -> TextSample:
        """Reads parts that are evenly spread over the rows; see `LogText.sample`."""
        size = max(1, int(part_bytes / self.line_bytes))
        if self._rows <= num_parts * size:
            num_parts, size = 1, self._rows
        step = max((self._rows - size) // max(num_parts - 1, 1), size)
        parts = [self._lines(begin, size) for begin in range(0, min(num_parts * step, self._rows), step)]
        read = sum(map(len, parts))
        return TextSample(parts, int(read * self.line_bytes), int(self._rows * self.line_bytes))

    def _lines(self, begin: int, size: int, *, header: bool = False) -> pl.Series:
        with self._whole():
            rows = self._table.slice(begin, size).collect()
        written = rows.select(_as_text(pl.col(name), kind).alias(name) for name, kind in self._schema.items())
        return split_lines(written.write_csv(include_header=header).encode())

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError("The log is no whole parquet file", value=f"{self._path}: {error}",
                            remedy="Copy or download it again") from error  # fmt: skip


def _as_text(column: pl.Expr, kind: pl.DataType) -> pl.Expr:
    """Writes a column of a table as a CSV log has it: times in seconds, and bytes in hexadecimal digits."""
    if kind == pl.Duration:
        return column.dt.total_nanoseconds() / 1e9
    if kind == pl.Datetime:
        return column.dt.timestamp("us") / 1e6
    if kind == pl.Time:
        return column.cast(pl.Int64) / 1e9
    if kind == pl.Binary:
        return column.bin.encode("hex")
    if isinstance(kind, pl.List | pl.Array):
        numbers = column.cast(pl.List(pl.String), strict=False) if kind.is_nested() else column
        return numbers.list.join(" ", ignore_nulls=False)
    if kind.is_nested() or kind == pl.Object:
        return pl.lit("")
    if kind.is_float():
        return column.cast(pl.String).str.replace(_WHOLE_NUMBERS, "")
    return column.cast(pl.String).str.replace_all(r"[\r\n]", " ")


class Recording:
    """A binary log, read in blocks of up to `BLOCK_FRAMES` frames.

    Raises:
        DataError: The package that reads the log is not installed, or the log is damaged.
    """

    grammar: Grammar | None = None
    channel = ""
    line_bytes = _FRAME_BYTES

    def __init__(self, path: Path, log_format: str) -> None:
        self.path = path
        self.format = log_format
        if log_format != "pcap":
            _refuse_packed(path, log_format)
        if log_format not in _PACKAGES:
            return
        try:
            self._package = import_module(_PACKAGES[log_format])
        except ImportError as error:
            raise missing_package(f"{log_format.upper()} files ({_PACKAGES[log_format]})", "logs") from error

    def blocks(self) -> Iterator[tuple[int, FrameNames, ParsedRows]]:
        """Yields, for each block, the number of its first frame, counted from 1, stand-ins for its lines, its rows."""
        readers: dict[str, Callable[[], Iterator[Recorded]]] = {
            "blf": self._blf, "mf4": self._mf4, "pcap": partial(read_capture, self.path), "sqlite": self._sqlite,
        }  # fmt: skip
        first = 1
        try:
            for recorded in readers[self.format]():
                yield first, FrameNames(first), _rows(recorded)
                first += len(recorded.timestamp)
        except CanTrainError:
            raise
        # The packages raise errors of many kinds on a damaged file.
        except Exception as error:  # noqa: BLE001 - raised below, once asammdf's object is gone
            fact, remedy = f"The log is no whole {self.format.upper()} file", "Copy or download it again"
            if self._is_unfinished():
                fact = "asammdf cannot read the MF4 file, which its logger did not finalise"
                remedy = "Finalise it with the logger's own tool, such as CANedge's mdf2finalized"
            failure = DataError(fact, value=f"{self.path}: {error}", remedy=remedy)
        else:
            return
        # When asammdf could not open a file, its object prints a traceback as it is garbage-collected.
        with redirect_stderr(StringIO()):
            gc.collect()
        raise failure

    def sample(self, num_parts: int, part_bytes: int, reach_bytes: int) -> tuple[TextSample, list[Any]]:
        """Reads the first blocks, about as many bytes as the parts have in all; see `LogText.sample`."""
        size, log = self.path.stat().st_size, self.blocks()
        blocks = list(islice(log, max(1, int(num_parts * part_bytes / self.line_bytes / BLOCK_FRAMES))))
        ended = next(log, None) is None
        read_bytes = int(sum(len(rows.position) for _, _, rows in blocks) * self.line_bytes)
        return TextSample([], size if ended else min(size, read_bytes), size), blocks

    def _is_unfinished(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(len(_UNFINISHED)) == _UNFINISHED

    @contextmanager
    def _opened_mf4(self) -> Iterator[Any]:
        if not self._is_unfinished():
            with self._package.MDF(str(self.path)) as mdf:
                yield mdf
            return
        # asammdf finalises a file in place, and prints a traceback if that fails: hence a copy, and no output.
        with TemporaryFile() as copy, redirect_stdout(StringIO()), self.path.open("rb") as file:
            shutil.copyfileobj(file, copy)
            with self._package.MDF(copy) as mdf:
                for group in mdf.groups:
                    # asammdf does not correct the counters of groups with separate data.
                    counted = group.channel_group
                    record_bytes = counted.samples_byte_nr + counted.invalidation_bytes_nr
                    data_bytes = sum(block.original_size for block in group.get_data_blocks())
                    counted.cycles_nr = data_bytes // max(record_bytes, 1)
                yield mdf

    def _blf(self) -> Iterator[Recorded]:
        # Given a path, the reader would leave a damaged file open.
        with self.path.open("rb") as file:
            reader = self._package.BLFReader(file)
            # The package ends a file that was cut off as if it were whole. A logger that lost power has no size there.
            if reader.file_size > (there := self.path.stat().st_size):
                raise ValueError(f"{there:,} of {reader.file_size:,} bytes")
            messages = iter(reader)
            while block := list(islice(messages, BLOCK_FRAMES)):
                frames = [message for message in block if not message.is_error_frame]
                data = [b"" if frame.is_remote_frame else bytes(frame.data) for frame in frames]
                channels = [frame.channel if isinstance(frame.channel, int) else 0 for frame in frames]
                yield Recorded(
                    timestamp=np.array([frame.timestamp for frame in frames], np.float64),
                    can_id=np.array([frame.arbitration_id for frame in frames], np.uint32),
                    length=np.array(list(map(len, data)), np.uint8),
                    payload=_padded(data),
                    channel=np.array(channels, np.int64),
                    wrong=np.full(len(frames), GOOD),
                    error_frames=len(block) - len(frames),
                )

    def _mf4(self) -> Iterator[Recorded]:
        with self._opened_mf4() as mdf:
            start_s = mdf.header.start_time.timestamp()
            parts: list[Recorded] = []
            error_frames = 0
            for group, content in enumerate(mdf.groups):
                names = {channel.name for channel in content.channels}
                cycles = content.channel_group.cycles_nr
                if "CAN_ErrorFrame" in names:
                    error_frames += cycles
                parts += [
                    _mf4_group(mdf.get(name, group=group, raw=True), name, start_s)
                    for name in ("CAN_DataFrame", "CAN_RemoteFrame")
                    if name in names and cycles
                ]
        if not parts:
            return
        whole = Recorded.concatenate(parts)
        # Each group is in the order of time; a bus has a group for data frames and a group for remote frames.
        order = np.argsort(whole.timestamp, kind="stable")
        for begin in range(0, len(order), BLOCK_FRAMES):
            part = whole.select(order[begin : begin + BLOCK_FRAMES])
            yield part if begin else replace(part, error_frames=error_frames)

    def _sqlite(self) -> Iterator[Recorded]:
        # Opened read-only, so that a database in a read-only folder can be read.
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            columns = {row[1] for row in database.execute(f"PRAGMA table_info({_SQLITE_TABLE})")}
            if missing := [name for name in _SQLITE_COLUMNS if name not in columns]:
                held = (
                    f"a table {_SQLITE_TABLE} without {missing[0]}"
                    if columns
                    else f"the tables {', '.join(tables) or 'none'}"
                )
                raise DataError("The database lacks python-can's table", value=f"{self.path} has {held}",
                                remedy=f"Give one with {_SQLITE_TABLE} ({', '.join(_SQLITE_COLUMNS)})")  # fmt: skip
            # Columns of SQLite may hold values of any type: values of a wrong type become null.
            cells = [
                f"CASE WHEN typeof({name}) IN ({kinds}) THEN {name} END" for name, (kinds, _) in _SQLITE_COLUMNS.items()
            ]
            cursor = database.execute(f"SELECT {', '.join(cells)} FROM {_SQLITE_TABLE} ORDER BY rowid")
            while rows := cursor.fetchmany(BLOCK_FRAMES):
                yield _sqlite_frames(rows)


def _padded(payloads: Iterable[bytes]) -> NDArray[np.uint8]:
    """Returns payloads as an array [M, `FD_PAYLOAD_BYTES`]."""
    padded = b"".join(payload[:FD_PAYLOAD_BYTES].ljust(FD_PAYLOAD_BYTES, b"\0") for payload in payloads)
    return np.frombuffer(padded, np.uint8).reshape(-1, FD_PAYLOAD_BYTES)


def _mf4_group(signal: Any, name: str, start_s: float) -> Recorded:
    samples = signal.samples
    fields = {field.removeprefix(f"{name}."): samples[field] for field in samples.dtype.names}
    size = len(samples)
    payload = np.zeros((size, FD_PAYLOAD_BYTES), np.uint8)
    length = np.zeros(size, np.uint8)
    if name == "CAN_DataFrame":
        data = fields["DataBytes"].reshape(size, -1)[:, :FD_PAYLOAD_BYTES]
        codes = np.array(FD_LENGTHS, np.uint8)
        length = np.asarray(fields["DataLength"] if "DataLength" in fields else codes[fields["DLC"] & 15], np.uint8)
        payload[:, : data.shape[1]] = data
        payload[np.arange(FD_PAYLOAD_BYTES) >= length[:, None]] = 0
    return Recorded(
        timestamp=np.asarray(signal.timestamps, np.float64) + start_s,
        can_id=np.asarray(fields["ID"], np.uint32) & np.uint32(MAX_CAN_ID),
        length=length,
        payload=payload,
        channel=np.asarray(fields.get("BusChannel", np.zeros(size)), np.int64),
        wrong=np.full(size, GOOD),
    )


def _sqlite_frames(rows: list[tuple[Any, ...]]) -> Recorded:
    table = pl.DataFrame(rows, schema={name: kind for name, (_, kind) in _SQLITE_COLUMNS.items()}, orient="row")
    remote, can_id, size = pl.col("remote").fill_null(0) != 0, pl.col("arbitration_id"), pl.col("data").bin.size()
    frames = table.filter(pl.col("error").fill_null(0) == 0).with_columns(
        data=pl.when(remote).then(pl.lit(b"")).otherwise("data")
    )
    frames = frames.select(
        "ts",
        can_id.fill_null(0).clip(0),
        pl.col("data").fill_null(b"").bin.head(FD_PAYLOAD_BYTES + 1),
        wrong=pl.when(pl.any_horizontal(pl.col("ts", "arbitration_id", "data").is_null())).then(MISSING)
        .when(~can_id.is_between(0, MAX_CAN_ID)).then(LARGE_ID)
        .when(~remote & (pl.col("dlc") != size)).then(OTHER_LENGTH)
        .otherwise(GOOD),
    )  # fmt: skip
    return Recorded(
        timestamp=frames["ts"].fill_null(0.0).to_numpy(),
        can_id=frames["arbitration_id"].to_numpy(),
        length=frames["data"].bin.size().to_numpy().astype(np.int64),
        payload=_padded(frames["data"]),
        channel=np.zeros(len(frames), np.int64),
        wrong=frames["wrong"].to_numpy(),
        error_frames=len(table) - len(frames),
    )


def _rows(recorded: Recorded) -> ParsedRows:
    length = recorded.length.astype(np.int64)
    wrong = np.where((recorded.wrong == GOOD) & ~np.isin(length, FD_LENGTHS), NO_LENGTH, recorded.wrong)
    is_time = np.abs(recorded.timestamp) <= MAX_TIME_S  # false for NaN
    is_good = is_time & (wrong == GOOD)
    bad = np.flatnonzero(~is_good)
    reasons = [WRONG[code] if code else LATE_TIMESTAMP for code in wrong[bad].tolist()]
    # The ID of a frame that was cut off or lacks a field may be a filler.
    has_id = ~np.isin(wrong[bad], (CUT_OFF, MISSING))
    malformed = pl.select(
        position=pl.Series(bad).cast(pl.UInt32),
        line=pl.format("frame {} of its block", pl.Series(bad + 1)),
        reason=pl.Series(reasons, dtype=pl.String),
        id=pl.when(pl.Series(has_id)).then(pl.Series(recorded.can_id[bad].astype(np.uint64))),
        label=pl.lit(None, dtype=pl.String),
    )
    is_long = bool((length[is_good] > MAX_PAYLOAD_BYTES).any())
    payload = recorded.payload if is_long else recorded.payload[:, :MAX_PAYLOAD_BYTES]
    return ParsedRows(
        position=np.flatnonzero(is_good),
        timestamp=recorded.timestamp[is_good].astype(np.float64),
        can_id=recorded.can_id[is_good].astype(np.uint32),
        length=length[is_good].astype(np.uint8),
        payload=np.ascontiguousarray(payload[is_good]),
        label=None,
        kind=None,
        channel=pl.Series(recorded.channel[is_good].astype(str).tolist(), dtype=pl.String),
        malformed=malformed,
        error_frames=recorded.error_frames,
        xl_frames=recorded.xl_frames,
    )
