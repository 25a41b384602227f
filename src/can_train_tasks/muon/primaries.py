"""Reads the primaries whose showers are drawn, and writes drawn showers.

Files are read part by part: their primaries need not fit into memory.

Shapes: P primaries of a part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train.training.prediction_files import Columns, Write
from can_train_tasks.muon.showers import (
    DEPTH,
    ENERGY,
    EVENT,
    EVENT_RULE,
    MUON_TABLE,
    PRIMARY,
    PRIMARY_ARRAYS,
    PRIMARY_LIST,
    ZENITH,
    are_told_apart,
    mass_of,
    matrix_of_lists,
    parquet_parts,
    primary_columns,
    readable,
    rules_of_primaries,
)

Floats = NDArray[np.float64]

_MATRIX: Final = 2  # Dimensions of the primaries of cr_muons
_PART_ROWS: Final = 2**15  # Lines that are read at a time
_NEEDED: Final = (ENERGY, ZENITH, PRIMARY)
_TABLES: Final = ("primaries", MUON_TABLE)  # HDF5 tables whose columns have names
_REMEDY: Final = "Name the columns as docs/muon.md does: primary_E_GeV, primary_zenith_rad, primary_id"


@dataclass(frozen=True, kw_only=True, eq=False)
class Primaries:
    """Primary particles, with the numbers of their showers.

    Attributes:
        event: [P] number of the shower in its file; whole numbers of 64 bits, or floating-point.
        energy_gev, zenith_rad, primary_id, depth_g_cm2: [P] as in `Showers`; CORSIKA's number of the particle.
    """

    event: NDArray[Any]
    energy_gev: Floats
    zenith_rad: Floats
    primary_id: Floats
    depth_g_cm2: Floats

    def __len__(self) -> int:
        return len(self.event)

    @property
    def mass(self) -> Floats:
        """[P] numbers of nucleons."""
        return mass_of(self.primary_id)

    def select(self, chosen: NDArray[np.bool_]) -> "Primaries":
        """Returns some of the primaries; `chosen` [P] tells which."""
        return Primaries(**{name: values[chosen] for name, values in vars(self).items()})


class PrimaryFile:
    """A file of primaries, one line each; of a file with a line for each muon, the first line of each shower.

    The file is read once to count and check them, and anew each time that it is iterated.

    Args:
        path: Parquet, CSV or HDF5.
        depth_g_cm2: Depth of the atmosphere where the file does not give it.

    Raises:
        DataError: The file cannot be read, lacks a column, or has a value that breaks a rule; the message names it.
    """

    def __init__(self, path: Path, depth_g_cm2: float) -> None:
        self._path, self._depth_g_cm2, self._ascends = path, depth_g_cm2, True
        try:
            self._total = sum(map(len, self))
        except _DescendingError:
            self._ascends = False
            self._total = sum(map(len, self))

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[Primaries]:
        """Yields them part by part, in the order of the file."""
        first_of = _FirstLines() if self._ascends else _FirstLinesOfAny()
        before = 0
        for columns in _parts(self._path):
            part = _primaries(self._path, columns, before, self._depth_g_cm2)
            before += len(part)
            if (rows := first_of(part.event)).any():
                yield part.select(rows)


class _DescendingError(Exception):
    """The lines of a shower may be anywhere in the file."""


class _FirstLines:
    """Tells which line is the first of a shower, in a file whose events are in ascending order."""

    def __init__(self) -> None:
        self._last: Any = None

    def __call__(self, event: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns it for the lines that follow; raises _DescendingError if their events do not ascend."""
        if not len(event):
            return np.zeros(0, bool)
        is_first = self._last is None or event[0] > self._last
        if (event[1:] < event[:-1]).any() or (not is_first and event[0] < self._last):
            raise _DescendingError
        self._last = event[-1]
        return np.concatenate([[is_first], event[1:] > event[:-1]])


class _FirstLinesOfAny:
    """Tells which line is the first of a shower, in a file whose events are in any order: it remembers each event."""

    def __init__(self) -> None:
        self._seen: NDArray[Any] | None = None

    def __call__(self, event: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns it for the lines that follow."""
        first = np.zeros(len(event), bool)
        first[np.unique(event, return_index=True)[1]] = True
        seen = event[:0] if self._seen is None else self._seen
        first &= ~np.isin(event, seen)
        self._seen = np.concatenate([seen, event[first]])
        return first


def _parts(path: Path) -> Iterator[Mapping[str, Any]]:
    """Reads the columns of some thousand primaries at a time."""
    names = (EVENT, *_NEEDED, DEPTH)
    with readable(path):
        if path.suffix.lower() not in (".csv", ".parquet"):
            yield from _hdf5_parts(path, names)
            return
        import polars

        parts: Iterator[Any]
        if path.suffix.lower() == ".csv":
            frame = polars.scan_csv(path)
            columns = frame.collect_schema().names()
            # Numbers above 2^63 are taken for numbers of 128 bits.
            frame = frame.select(each for each in names if each in columns).cast({polars.Int128: polars.UInt64})
            parts = frame.collect_batches(chunk_size=_PART_ROWS)
        elif PRIMARY_LIST in (columns := [*polars.read_parquet_schema(path)]):
            first = 0
            for each in parquet_parts(path, [PRIMARY_LIST], _PART_ROWS):
                yield primary_columns(path, matrix_of_lists(path, each[PRIMARY_LIST], PRIMARY_LIST), first)
                first += len(each)
            return
        else:
            parts = parquet_parts(path, [name for name in names if name in columns], _PART_ROWS)
        for each in parts:
            yield {name: each[name].to_numpy() for name in each.columns}


def _hdf5_parts(path: Path, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    import h5py

    with h5py.File(path) as file:
        for name in (*_TABLES, *PRIMARY_ARRAYS):
            table = file.get(name)
            if not isinstance(table, h5py.Dataset):
                continue
            parts = (slice(start, start + _PART_ROWS) for start in range(0, max(len(table), 1), _PART_ROWS))
            if table.dtype.names and name in _TABLES:
                used = [each for each in names if each in table.dtype.names]
                yield from ({each: table[part][each] for each in used} for part in parts)
                return
            if table.ndim == _MATRIX and name in PRIMARY_ARRAYS:
                yield from (primary_columns(path, table[part].astype(np.float64), part.start) for part in parts)
                return
    raise DataError(f"{path} must hold a table '{_TABLES[0]}' with a line for each primary", value="it is not there",
                    remedy=_REMEDY)  # fmt: skip


def _primaries(path: Path, columns: Mapping[str, Any], first: int, depth_g_cm2: float) -> Primaries:
    """Makes the primaries of a part, before which the file has `first` lines."""
    if missing := [name for name in _NEEDED if name not in columns]:
        raise DataError(f"{path} must have the columns {', '.join(_NEEDED)}", value=f"without {', '.join(missing)}",
                        remedy=_REMEDY)  # fmt: skip
    try:
        numbers = {name: _numbers(name, np.asarray(values)) for name, values in columns.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: a column of primaries has numbers", value=f"{error}", remedy=_REMEDY) from error
    size = len(numbers[ENERGY])
    numbers = {EVENT: np.arange(1, size + 1) + first, DEPTH: np.full(size, depth_g_cm2)} | numbers
    event = numbers[EVENT]
    of_event = (EVENT, np.isfinite(event), "must be a number"), (EVENT, are_told_apart(event), EVENT_RULE)
    for name, holds, rule in (*of_event, *rules_of_primaries(numbers)):
        finite = np.isfinite(numbers[name]) & holds
        if not finite.all():
            row = int(np.argmin(finite))
            raise DataError(f"{path}, primary {first + row + 1}: {name} {rule}", value=f"{numbers[name][row]:.12g}",
                            remedy="Correct it or leave it out")  # fmt: skip
    return Primaries(event=numbers[EVENT], energy_gev=numbers[ENERGY], zenith_rad=numbers[ZENITH],
                     primary_id=numbers[PRIMARY], depth_g_cm2=numbers[DEPTH])  # fmt: skip


def _numbers(name: str, values: NDArray[Any]) -> NDArray[Any]:
    if name == EVENT and values.dtype.kind in "iu":
        return values  # float64 would round numbers of 64 bits
    numbers = values.astype(np.float64)
    return numbers.astype(np.int64) if name == EVENT and _is_whole(numbers) else numbers


def _is_whole(numbers: Floats) -> bool:
    return bool((np.isfinite(numbers) & are_told_apart(numbers) & (numbers == np.rint(numbers))).all())


@contextmanager
def open_hdf5(path: Path) -> Iterator[Write]:
    """Opens an HDF5 file for drawn showers: a table `muons`, which the reader of showers takes."""
    import h5py

    with h5py.File(path, "w") as file:

        def write(columns: Columns) -> None:
            kind = np.dtype([(name, np.asarray(values).dtype) for name, values in columns.items()])
            rows = np.empty(len(next(iter(columns.values()))), kind)
            for name, values in columns.items():
                rows[name] = values
            if MUON_TABLE not in file:
                file.create_dataset(MUON_TABLE, data=rows, maxshape=(None,), chunks=True)
                return
            table = file[MUON_TABLE]
            table.resize(len(table) + len(rows), axis=0)
            table[-len(rows) :] = rows

        yield write
