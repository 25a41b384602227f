"""Binary logs, which packages of others read: BLF (python-can) and MF4 (asammdf).

Shapes: M frames.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import CanTrainError, DataError
from can_train.tasks.can.data.grammar import FD_LENGTHS, LATE_TIMESTAMP, MAX_CAN_ID, MAX_TIME_S, ParsedRows
from can_train.tasks.can.data.graphs import FD_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from can_train.tasks.can.data.log_text import missing_package

BLOCK_FRAMES: Final = 2**17

# By their first bytes.
_UNFINISHED: Final = b"UnFinMF 4"  # of an MF4 file that its logger did not finalise, since it lost power
_MAGIC: Final = {b"LOGG": "blf", b"MDF     4": "mf4", _UNFINISHED: "mf4"}
_PACKAGES: Final = {"blf": "can", "mf4": "asammdf"}


class FrameNames(Sequence[str]):
    """Stands for the lines of a recording, which has none."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __len__(self) -> int:
        return BLOCK_FRAMES

    def __getitem__(self, position: Any) -> Any:
        return f"frame {self._first + position}"


class _Columns(NamedTuple):
    timestamp: NDArray[Any]  # [M] seconds
    can_id: NDArray[Any]  # [M]
    length: NDArray[Any]  # [M]
    payload: NDArray[Any]  # [M, 64] bytes
    channel: NDArray[Any]  # [M]


def recording_format(path: Path) -> str:
    """Returns `blf` or `mf4` where a file begins like one; empty for any other."""
    try:
        with path.open("rb") as file:
            start = file.read(max(map(len, _MAGIC)))
    except OSError:
        return ""  # whoever reads it raises the error
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")


class Recording:
    """A binary log, read in blocks of up to `BLOCK_FRAMES` frames.

    Raises:
        DataError: The package that reads it is not installed, or it is damaged.
    """

    def __init__(self, path: Path, log_format: str) -> None:
        self.path = path
        self.format = log_format
        try:
            self._package = import_module(_PACKAGES[log_format])
        except ImportError as error:
            raise missing_package(f"{log_format.upper()} files ({_PACKAGES[log_format]})", "logs") from error

    def blocks(self) -> Iterator[tuple[int, FrameNames, ParsedRows]]:
        """Yields the number of a block's first frame, counted from 1, stand-ins for its lines, and the block."""
        read = self._blf_columns if self.format == "blf" else self._mf4_columns
        first = 1
        try:
            for columns, error_frames in read():
                yield first, FrameNames(first), _rows(columns, error_frames)
                first += len(columns.timestamp)
        except CanTrainError:
            raise
        # The packages raise errors of many kinds on a damaged file.
        except Exception as error:  # noqa: BLE001 - raised below, once asammdf's object is gone
            failure = self._unreadable(error)
        else:
            return
        # asammdf's object of a file that it could not open complains, with a traceback, when it is collected.
        with redirect_stderr(StringIO()):
            gc.collect()
        raise failure

    def _unreadable(self, error: Exception) -> DataError:
        if self._is_unfinished():
            return DataError("An MF4 file that its logger did not finalise must be one that asammdf can read",
                             value=f"{self.path}: {error}",
                             remedy="Finalise it with the logger's own tool, such as CANedge's mdf2finalized",
                             )  # fmt: skip
        return DataError(f"A log must be a whole {self.format.upper()} file", value=f"{self.path}: {error}",
                         remedy="Copy or download it again")  # fmt: skip

    def _is_unfinished(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(len(_UNFINISHED)) == _UNFINISHED

    @contextmanager
    def _opened_mf4(self) -> Iterator[Any]:
        if not self._is_unfinished():
            with self._package.MDF(str(self.path)) as mdf:
                yield mdf
            return
        # asammdf finalises a file in place, and prints its traceback where it cannot.
        with TemporaryFile() as copy, redirect_stdout(StringIO()), self.path.open("rb") as file:
            shutil.copyfileobj(file, copy)
            with self._package.MDF(copy) as mdf:
                for group in mdf.groups:
                    # It leaves the counters of groups that have their data for themselves as they are.
                    counted = group.channel_group
                    record_bytes = counted.samples_byte_nr + counted.invalidation_bytes_nr
                    data_bytes = sum(block.original_size for block in group.get_data_blocks())
                    counted.cycles_nr = data_bytes // max(record_bytes, 1)
                yield mdf

    def _blf_columns(self) -> Iterator[tuple[_Columns, int]]:
        # A reader that is given a path leaves a damaged file open.
        with self.path.open("rb") as file:
            messages = iter(self._package.BLFReader(file))
            while block := list(islice(messages, BLOCK_FRAMES)):
                frames = [message for message in block if not message.is_error_frame]
                yield _blf_frames(frames), len(block) - len(frames)

    def _mf4_columns(self) -> Iterator[tuple[_Columns, int]]:
        with self._opened_mf4() as mdf:
            start_s = mdf.header.start_time.timestamp()
            parts: list[_Columns] = []
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
        whole = _Columns(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        # Each group is in the order of time; a bus has one for data and one for remote frames.
        order = np.argsort(whole.timestamp, kind="stable")
        for begin in range(0, len(order), BLOCK_FRAMES):
            part = order[begin : begin + BLOCK_FRAMES]
            yield _Columns(*(array[part] for array in whole)), error_frames if begin == 0 else 0


def _blf_frames(frames: list[Any]) -> _Columns:
    data = [b"" if frame.is_remote_frame else bytes(frame.data) for frame in frames]
    payload = b"".join(one.ljust(FD_PAYLOAD_BYTES, b"\0") for one in data)
    return _Columns(
        timestamp=np.array([frame.timestamp for frame in frames], np.float64),
        can_id=np.array([frame.arbitration_id for frame in frames], np.uint32),
        length=np.array(list(map(len, data)), np.uint8),
        payload=np.frombuffer(payload, np.uint8).reshape(-1, FD_PAYLOAD_BYTES),
        channel=np.array([_number(frame.channel) for frame in frames], np.int64),
    )


def _number(channel: Any) -> int:
    return channel if isinstance(channel, int) else 0


def _mf4_group(signal: Any, name: str, start_s: float) -> _Columns:
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
    return _Columns(
        timestamp=np.asarray(signal.timestamps, np.float64) + start_s,
        can_id=np.asarray(fields["ID"], np.uint32) & np.uint32(MAX_CAN_ID),
        length=length,
        payload=payload,
        channel=np.asarray(fields.get("BusChannel", np.zeros(size)), np.int64),
    )


def _rows(columns: _Columns, error_frames: int) -> ParsedRows:
    is_time = np.abs(columns.timestamp) <= MAX_TIME_S  # false for NaN
    position = np.flatnonzero(is_time)
    untimed = pl.Series(np.flatnonzero(~is_time)).cast(pl.UInt32)
    malformed = pl.DataFrame({"position": untimed}).select(
        "position", line=pl.format("frame {} of its block", pl.col("position") + 1), reason=pl.lit(LATE_TIMESTAMP),
        id=pl.lit(None, dtype=pl.UInt64), label=pl.lit(None, dtype=pl.String),
    )  # fmt: skip
    columns = _Columns(*(array[is_time] for array in columns))
    is_long = bool((columns.length > MAX_PAYLOAD_BYTES).any())
    return ParsedRows(
        position=position,
        timestamp=columns.timestamp,
        can_id=columns.can_id,
        length=columns.length,
        payload=columns.payload if is_long else np.ascontiguousarray(columns.payload[:, :MAX_PAYLOAD_BYTES]),
        label=None,
        kind=None,
        channel=pl.Series(columns.channel).cast(pl.String),
        malformed=malformed,
        error_frames=error_frames,
    )
