"""Reads air showers from files.

A file is parquet, CSV or HDF5 with one line for each muon; parquet or HDF5 with one event for each shower, as cr_muons
writes them; or the HDF5 of CORSIKA's ground particles. Every value that is read is checked; an error names the file and
the line. Files of events are read part by part, all others one at a time.

Shapes: M muons, S showers.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DataError, MissingDataError, StateError
from can_train.io.records import expanded, open_atomic
from can_train_tasks.muon.settings import POSITIONS, VARIABLES, ShowerDatasetSettings

Floats = NDArray[np.float64]
Columns = dict[str, NDArray[Any]]
"""Numbers in float64; numbers of events may be whole numbers of 64 bits."""

ENERGY, ZENITH, PRIMARY, DEPTH = "primary_E_GeV", "primary_zenith_rad", "primary_id", "depth_g_cm2"
EVENT, PARTICLE = "event", "muon_id"
VARIABLE_COLUMNS: Final = {"x": "x_m", "y": "y_m", "energy": "muon_E_GeV", "time": "t_ns"}
"""Column of each variable of a muon."""
MUON_TABLE: Final = "muons"
"""HDF5 dataset that has one line for each muon."""
MUON_IDS: Final = (5, 6)
"""CORSIKA's particle numbers of μ+ and μ−."""
_GROUND_TABLE: Final = "groundparticles"  # HDF5 dataset of CORSIKA's particles, as HiSPARC's tools write it
_GROUND_COLUMNS: Final = (PARTICLE, *VARIABLE_COLUMNS.values(), EVENT, PRIMARY, ENERGY, ZENITH)
_SHOWER_COLUMNS: Final = (EVENT, PRIMARY, ENERGY, ZENITH)
_OPTIONAL: Final = (DEPTH, PARTICLE)
_MUON_MASS_EV: Final = 105.6583755e6
_EV_PER_GEV: Final = 1e9
_NUCLEON_GEV: Final = 0.93149  # Mass of a nucleon in a nucleus
_WHOLE: Final = 1e-3  # A mass that is no further from a whole number is a number of nucleons; masses in GeV are further
_MAX_NUCLEONS: Final = 300
_NUCLEON_IDS: Final = (13, 14, 15, 25)  # CORSIKA's neutron, proton and their antiparticles
_FIRST_NUCLEUS_ID: Final = 200  # CORSIKA numbers a nucleus 100 · A + Z
_PDG_IDS: Final = (2112, 2212)  # PDG's neutron and proton; as CORSIKA's numbers, nuclei that live for seconds
_PROTON_ID: Final = 14

# The columns of cr_muons' events by their number; empty: a number that is not used. Identifiers come first where there
# are any.
_MASS: Final = "mass"
_PRIMARY_LAYOUTS: Final[Mapping[int, Sequence[str]]] = {
    4: (ENERGY, ZENITH, _MASS, DEPTH),
    5: (ENERGY, ZENITH, _MASS, "", DEPTH),
    6: ("", "", ENERGY, ZENITH, _MASS, DEPTH),
    7: ("", "", ENERGY, ZENITH, _MASS, "", DEPTH),
}
_MUON_LAYOUTS: Final[Mapping[int, Sequence[str]]] = {
    3: ("muon_E_GeV", "x_m", "y_m"),
    4: ("muon_E_GeV", "x_m", "y_m", "t_ns"),
    5: ("", "", "muon_E_GeV", "x_m", "y_m"),
    6: ("", "", "muon_E_GeV", "x_m", "y_m", "t_ns"),
}
_WITH_RADIUS: Final = ("muon_E_GeV", "", "x_m", "y_m")  # Four numbers whose second is the distance from the axis
_RADIUS_TOLERANCE: Final = 1e-3  # Relative, of numbers in float32
_PART_EVENTS: Final = 2**16  # Most events that are read at a time,
_PART_MUONS: Final = 2**17  # and most muons, if an event has no more: about 30 MiB while they are checked
_PART_BYTES: Final = 2**22  # Of a parquet file, which does not tell how many muons its events have
PRIMARY_LIST: Final = "primary"  # Parquet column
PRIMARY_ARRAYS: Final = ("primaries", "conditions")  # HDF5 datasets
_MATRIX: Final = 2  # Dimensions of the primaries and of the muons
_LINE: Final = "line of the file"  # Name of a column that no file has
_ABOVE_ZERO: Final = "must be greater than 0"
_WHOLE_FLOATS: Final = 2.0**53  # Larger whole numbers are rounded in float64
EVENT_RULE: Final = "must be less than 2^53, or be stored as a whole number of 64 bits"
_PRIMARY_RULE: Final = ("must be CORSIKA's number of a nucleon or nucleus, not PDG's: 14 is a proton, 100·A + Z a "
                        "nucleus")  # fmt: skip
_EVENTS_REMEDY: Final = "Write the events as cr_muons does, or one line a muon: docs/muon.md"


@dataclass(frozen=True, kw_only=True, eq=False)
class Showers:
    """Showers and their muons; the muons of a shower are in succession.

    Attributes:
        energy_gev: [S] energy of the primary particle.
        zenith_rad: [S] zenith angle of the primary's direction.
        primary_id: [S] CORSIKA's number of the primary.
        depth_g_cm2: [S] depth of the atmosphere above the observer.
        counts: [S] number of muons.
        muons: [M] values of each variable: x and y in m, energy in GeV, time in ns since the shower's first muon.
        empty: Events of the files that have no muon, which are left out.
        returning: Numbers of events that return after rows of another event: their rows are taken for one shower.
        returns_at: File and row of the first of them.
    """

    energy_gev: Floats
    zenith_rad: Floats
    primary_id: Floats
    depth_g_cm2: Floats
    counts: NDArray[np.int64]
    muons: Mapping[str, Floats]
    empty: int = 0
    returning: int = 0
    returns_at: str = ""

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def mass(self) -> Floats:
        """[S] numbers of nucleons of the primaries."""
        return mass_of(self.primary_id)

    def select(self, chosen: NDArray[np.bool_]) -> "Showers":
        """Returns some of the showers; `chosen` [S] tells which."""
        of_muons = np.repeat(chosen, self.counts)
        conditions = {name: getattr(self, name)[chosen] for name in _OF_SHOWERS}
        return Showers(**conditions, muons={name: values[of_muons] for name, values in self.muons.items()})


_OF_SHOWERS: Final = ("energy_gev", "zenith_rad", "primary_id", "depth_g_cm2", "counts")


def shower_files(dataset: ShowerDatasetSettings, data_root: Path) -> list[Path]:
    """Lists the files of a data set, sorted; the list is empty for simulated showers.

    Raises:
        MissingDataError: The path does not exist, or it holds no showers in a known format.
    """
    if dataset.is_synthetic:
        return []
    suffixes = ", ".join(sorted(READERS))
    path = expanded(dataset.path) if dataset.path else data_root / dataset.name
    if not path.is_absolute() and not path.exists():
        path = data_root / path
    paths = path.rglob("*") if path.is_dir() else [path]
    files = sorted(file for file in paths if file.suffix.lower() in READERS and file.is_file())
    if not files:
        what = "is no file of showers" if path.exists() else "is missing"
        what = "holds no file of showers" if path.is_dir() else what
        raise MissingDataError(f"Showers are read from files that end in {suffixes}", value=f"{path} {what}",
                               remedy="Check the path, or try --dataset synthetic")  # fmt: skip
    return files


def read_showers(files: Sequence[Path], dataset: ShowerDatasetSettings) -> Showers:
    """Reads showers as a whole. Event numbers count within a file: equal numbers in two files are two showers.

    Raises:
        DataError: A file cannot be read or breaks a rule; the message names file and line.
    """
    reader = ShowerReader(files, dataset)
    showers = joined([*reader])
    return replace(showers, empty=reader.empty, returning=reader.returning, returns_at=reader.returns_at)


def joined(parts: Sequence[Showers]) -> Showers:
    """Joins parts of showers, of which there is one at least."""
    of_showers: dict[str, Any] = {
        name: np.concatenate([getattr(showers, name) for showers in parts]) for name in _OF_SHOWERS
    }
    muons = {name: np.concatenate([showers.muons[name] for showers in parts]) for name in parts[0].muons}
    return Showers(**of_showers, muons=muons)


class ShowerReader:
    """Reads files of showers part by part; a shower is in one part.

    Args:
        files: The files.
        dataset: Its `variables` are read; where there are none, those that all files have.

    Attributes:
        variables: Variables of the muons.
        empty: Events without a muon among those that were read so far; they are left out.

    Raises:
        DataError: As in `read_showers`; here or while it is iterated.
    """

    def __init__(self, files: Sequence[Path], dataset: ShowerDatasetSettings) -> None:
        self._sources = [_open(path) for path in files]
        if not dataset.variables:
            dataset = replace(dataset, variables=_common_variables([source.columns for source in self._sources]))
        self._dataset, self.variables, self.empty = dataset, list(dataset.variables), 0
        self.returning, self.returns_at = 0, ""

    def __iter__(self) -> Iterator[Showers]:
        self.empty, self.returning, self.returns_at = 0, 0, ""
        for source in self._sources:
            is_empty = True
            for table in source:
                if not len(table.lines):
                    self.empty += table.empty
                    continue
                is_empty, showers = False, _showers_of(table, self._dataset)
                self.empty += showers.empty
                self.returning += showers.returning
                self.returns_at = self.returns_at or showers.returns_at
                yield showers
            if is_empty:
                raise _without_muons(source.path)


def _common_variables(tables: Sequence[frozenset[str]]) -> list[str]:
    """Returns x and y, then the variables that all tables have, of which the columns are given."""
    return [name for name in VARIABLES
            if name in POSITIONS or all(VARIABLE_COLUMNS[name] in columns for columns in tables)]  # fmt: skip


def showers_of_columns(columns: Columns, dataset: ShowerDatasetSettings) -> Showers:
    """Makes showers from columns in memory, one line for each muon, with the checks for files."""
    table = _Table(path=Path(dataset.name), columns=columns, lines=np.arange(1, len(columns[EVENT]) + 1))
    return _showers_of(table, replace(dataset, variables=dataset.variables or _common_variables([frozenset(columns)])))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Table:
    """Columns of a file, a row for each muon."""

    path: Path
    columns: Columns
    lines: NDArray[np.int64]  # Number of each line in the file, or of its event
    line: str = "row"  # Word for a line in messages
    empty: int = 0  # Events without a muon

    def check(self, holds: NDArray[np.bool_], name: str, rule: str) -> None:
        """Raises DataError for the first line where `holds` is False."""
        if not holds.all():
            row = int(np.argmin(holds))
            where, value = f"{self.path}, {self.line} {self.lines[row]}", self.columns[name][row]
            raise DataError(f"{where}: {name} {rule}", value=f"{value:.12g}", remedy="Correct the line or leave it out")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Source:
    """A file of showers.

    Attributes:
        columns: Columns of its tables.
        read: Reads them.
    """

    path: Path
    columns: frozenset[str]
    read: Callable[[], Iterator[_Table]]

    def __iter__(self) -> Iterator[_Table]:
        with readable(self.path):
            yield from self.read()


def _open(path: Path) -> _Source:
    with readable(path):
        return READERS[path.suffix.lower()](path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Opens a block that reads a file, and raises DataError where the file is damaged."""
    try:
        yield
    except Exception as error:
        # h5py raises OSError for damaged files, too.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("polars"):
            raise
        reason = str(error).strip().partition("\n")[0][:200]
        raise DataError(f"{path} must be readable", value=reason, remedy="Check the file") from error


def _columns_file(path: Path) -> _Source:
    """Opens CSV or parquet."""
    import polars

    if path.suffix.lower() == ".csv":
        names = polars.scan_csv(path, infer_schema=False).collect_schema().names()
    else:
        names = [*polars.read_parquet_schema(path)]
        if {PRIMARY_LIST, MUON_TABLE} & {*names}:
            return _events_file(path, _parquet_parts)
    return _Source(path=path, columns=frozenset(_used(names)), read=lambda: iter([_read_columns(path)]))


def _read_columns(path: Path) -> _Table:
    """Reads CSV or parquet; raises DataError for a cell of a used column that is not a number."""
    import polars

    is_csv = path.suffix.lower() == ".csv"
    line, first = ("line", 2) if is_csv else ("row", 1)  # the header of CSV is line 1
    if is_csv:
        frame = polars.read_csv(path, infer_schema=False)
    else:
        # Other columns may be lists of other lengths.
        frame = polars.read_parquet(path, columns=_used([*polars.read_parquet_schema(path)]))
    used, showers, empty = _used(frame.columns), len(frame), 0
    frame = frame.with_columns(polars.int_range(first, showers + first).alias(_LINE))
    if lists := [name for name in used if frame.schema[name].is_nested()]:
        # The file has one line for each shower, with its muons in lists.
        frame = _with_muons(path, frame.with_columns(polars.col(polars.Array).arr.to_list()), lists)
        empty, frame = showers - len(frame), frame.explode(lists)
    columns, lines = {}, frame[_LINE].to_numpy()
    for name in used:
        numbers = _whole(frame[name]) if name == EVENT else None
        if numbers is None:
            numbers = frame[name].cast(polars.Float64, strict=False)
        if numbers.null_count():
            row = int(numbers.is_null().arg_max() or 0)
            raise DataError(f"{path}, {line} {lines[row]}: {name} must be a number", value=repr(frame[name][row]),
                            remedy="Correct the line or leave it out")  # fmt: skip
        columns[name] = numbers.to_numpy()
    return _Table(path=path, columns=columns, lines=lines, line=line, empty=empty)


def _whole(column: Any) -> Any:
    """Returns a column as whole numbers, as which numbers of 64 bits differ; None if it has other cells."""
    import polars

    kinds = () if column.dtype.is_float() else (polars.Int64, polars.UInt64)
    casts = (column.cast(kind, strict=False) for kind in kinds)
    return next((numbers for numbers in casts if not numbers.null_count()), None)


def _with_muons(path: Path, frame: Any, lists: Sequence[str]) -> Any:
    """Leaves out showers whose lists are empty or missing; raises DataError where only some of them are as long."""
    import polars

    lengths = frame.select(polars.col(lists).list.len().fill_null(0))
    unequal = lengths.max_horizontal() != lengths.min_horizontal()
    if unequal.any():
        row = int(unequal.arg_max())
        raise DataError(f"{path}, row {frame[_LINE][row]}: the lists of a shower have a number for each muon",
                        value=", ".join(f"{name} has {count}" for name, count in lengths.row(row, named=True).items()),
                        remedy="Correct the line or leave it out")  # fmt: skip
    return frame.filter(lengths.max_horizontal() > 0)


def _hdf5_file(path: Path) -> _Source:
    import h5py

    with h5py.File(path) as file:
        for name, read in ((MUON_TABLE, _muon_table), (_GROUND_TABLE, _ground_particles)):
            if isinstance(file.get(name), h5py.Dataset) and file[name].dtype.names:
                columns = [*_GROUND_COLUMNS] if name == _GROUND_TABLE else _used(file[name].dtype.names)
                return _Source(path=path, columns=frozenset(columns), read=partial(_hdf5_table, path, name, read))
        arrays = {name for name in file if isinstance(file[name], h5py.Dataset)}
        if {MUON_TABLE, "counts", *PRIMARY_ARRAYS} & arrays:
            return _events_file(path, _hdf5_parts)
        names = ", ".join(sorted(file)) or "nothing"
    raise DataError(f"{path} must hold a table '{MUON_TABLE}', '{_GROUND_TABLE}', or events ('primaries', 'muons', "
                    "'counts')", value=f"it holds {names}",
                    remedy=f"Write one line a muon into '{MUON_TABLE}', with the columns of docs/muon.md")  # fmt: skip


def _hdf5_table(path: Path, name: str, read: Callable[[Any, Path], Columns]) -> Iterator[_Table]:
    import h5py

    with h5py.File(path) as file:
        yield _Table(path=path, columns=read(file, path), lines=np.arange(1, len(file[name]) + 1))


class _Part(NamedTuple):
    """Some events of a file of cr_muons, in succession."""

    first: int  # Number of events before them
    primaries: Floats  # [S, 4 to 7]
    muons: Floats  # [M, 3 to 6]
    counts: NDArray[np.int64]  # [S]


_Parts = Callable[[Path], Iterator[_Part]]


def _events_file(path: Path, parts: _Parts) -> _Source:
    """Opens a file of events."""
    layout = _layout(path, parts)
    first = next(parts(path), None)
    of_primaries = () if first is None else primary_columns(path, first.primaries)
    columns = frozenset([*of_primaries, EVENT, *layout]) - {""}
    return _Source(path=path, columns=columns, read=lambda: (_events(path, part, layout) for part in parts(path)))


def _layout(path: Path, parts: _Parts) -> Sequence[str]:
    """Decides which number of a muon is which: read until a muon comes; four numbers are looked at in all muons that
    may have a distance from the axis in the place of a time.
    """
    layout, is_radius, is_told = None, False, False
    for part in parts(path):
        if not len(part.muons):
            continue
        if layout is None and (layout := _MUON_LAYOUTS.get(part.muons.shape[1])) is None:
            raise DataError(f"{path}: a muon has 3 to 6 numbers", value=f"{part.muons.shape[1]}",
                            remedy=_EVENTS_REMEDY)  # fmt: skip
        if part.muons.shape[1] != len(_WITH_RADIUS):
            break
        radius, position = part.muons[:, 1], np.hypot(part.muons[:, 2], part.muons[:, 3])
        is_radius = np.allclose(radius, position, rtol=_RADIUS_TOLERANCE, atol=_RADIUS_TOLERANCE)
        if not is_radius:
            break
        # Muons without a time that lie on a diagonal have equal numbers there, too.
        is_told |= bool((part.muons[:, 2:] != 0).all(axis=1).any())
    return _WITH_RADIUS if is_radius and is_told else layout or _MUON_LAYOUTS[3]


def _hdf5_parts(path: Path) -> Iterator[_Part]:
    """Reads the events of cr_muons: `primaries` [S, 4 to 7], `muons` [M, 3 to 6] and `counts` [S]."""
    import h5py

    with h5py.File(path) as file:
        arrays = {name: file[name] for name in file if isinstance(file[name], h5py.Dataset)}
        primaries, muons, counts = _event_arrays(path, arrays)
        ends = np.cumsum(counts, dtype=np.int64)
        start, muon = 0, 0
        while start < len(counts):
            stop = int(np.searchsorted(ends, muon + _PART_MUONS, side="right"))
            stop = min(max(stop, start + 1), start + _PART_EVENTS)
            rows, of_muons = slice(start, stop), slice(muon, int(ends[stop - 1]))
            yield _Part(start, primaries[rows].astype(np.float64), muons[of_muons].astype(np.float64), counts[rows])
            start, muon = stop, of_muons.stop


def _event_arrays(path: Path, arrays: Mapping[str, Any]) -> tuple[Any, Any, NDArray[np.int64]]:
    """Returns the primaries and muons of a file of events, which are not read yet, and the number of muons of each."""
    primaries = next((arrays[name] for name in PRIMARY_ARRAYS if name in arrays), None)
    missing = [name for name, array in ((PRIMARY_ARRAYS[0], primaries), (MUON_TABLE, arrays.get(MUON_TABLE)),
                                        ("counts", arrays.get("counts"))) if array is None]  # fmt: skip
    if missing or primaries is None:
        raise DataError(f"{path}: events have the arrays 'primaries', 'muons' and 'counts'",
                        value=f"without {', '.join(missing)}", remedy=_EVENTS_REMEDY)  # fmt: skip
    counts, muons = arrays["counts"][:], arrays[MUON_TABLE]
    if counts.dtype.kind not in "iu" or counts.ndim != 1 or (counts < 0).any():
        raise DataError(f"{path}: 'counts' has the number of muons of each event",
                        value=f"{counts.dtype} {counts.shape}", remedy=_EVENTS_REMEDY)  # fmt: skip
    sizes = (len(primaries), len(muons), int(counts.sum()))
    if sizes[0] != len(counts) or sizes[1] != sizes[2]:
        raise DataError(f"{path}: the arrays of events must belong together",
                        value=f"{sizes[0]} primaries, {len(counts)} counts, whose sum is {sizes[2]}, {sizes[1]} muons",
                        remedy="Write the file once more; its writer was perhaps stopped")  # fmt: skip
    for name, array in (("primaries", primaries), (MUON_TABLE, muons)):
        if array.ndim != _MATRIX or array.dtype.kind not in "fiu":
            raise DataError(f"{path}: '{name}' must have a row of numbers for each of them",
                            value=f"{array.dtype} {array.shape}", remedy=_EVENTS_REMEDY)  # fmt: skip
    return primaries, muons, counts


def _parquet_parts(path: Path) -> Iterator[_Part]:
    """Reads the events of cr_muons: the column `primary` has a list of numbers, `muons` a list of such lists."""
    import polars

    schema = polars.read_parquet_schema(path)
    missing = [name for name in (PRIMARY_LIST, MUON_TABLE) if name not in schema]
    if missing:
        raise DataError(f"{path}: events have the columns '{PRIMARY_LIST}' and '{MUON_TABLE}'",
                        value=f"without {', '.join(missing)}", remedy=_EVENTS_REMEDY)  # fmt: skip
    numbers, first = polars.List(polars.Float64), 0
    for frame in parquet_parts(path, [PRIMARY_LIST, MUON_TABLE], _events_at_a_time(path)):
        try:
            primary = frame[PRIMARY_LIST].cast(numbers)
            muons = frame[MUON_TABLE].cast(polars.List(numbers))
        except polars.exceptions.PolarsError as error:
            kinds = ", ".join(f"{name} is {schema[name]}" for name in (PRIMARY_LIST, MUON_TABLE))
            raise DataError(f"{path}: '{PRIMARY_LIST}' is a list of numbers, '{MUON_TABLE}' a list of such lists",
                            value=kinds, remedy=_EVENTS_REMEDY) from error  # fmt: skip
        counts = muons.list.len().fill_null(0).to_numpy().astype(np.int64)
        # An empty list of muons becomes a null.
        rows = matrix_of_lists(path, muons.explode().drop_nulls(), MUON_TABLE)
        yield _Part(first, matrix_of_lists(path, primary, PRIMARY_LIST), rows, counts)
        first += len(frame)


def parquet_parts(path: Path, columns: Sequence[str], rows: int) -> Iterator[Any]:
    """Yields frames of some columns of a parquet file, of so many rows."""
    import polars

    yield from polars.scan_parquet(path).select(columns).collect_batches(chunk_size=rows, maintain_order=True)


def _events_at_a_time(path: Path) -> int:
    """Returns how many events of a parquet file have some MiB of it."""
    import polars

    events = int(polars.scan_parquet(path).select(polars.len()).collect().item())
    return min(max(events * _PART_BYTES // max(path.stat().st_size, 1), 1), _PART_EVENTS)


def matrix_of_lists(path: Path, lists: Any, name: str) -> Floats:
    """Makes a matrix of lists of equal length."""
    lengths = lists.list.len().fill_null(0)
    if lengths.n_unique() > 1:
        raise _unequal(path, name, lengths.min(), lengths.max())
    values: Floats = lists.explode().to_numpy().astype(np.float64)
    return values.reshape(len(lists), -1) if len(lists) else np.zeros((0, 3))


def _unequal(path: Path, name: str, shortest: int, longest: int) -> DataError:
    return DataError(f"{path}: all lists of '{name}' have the same length",
                     value=f"lengths from {shortest} to {longest}", remedy=_EVENTS_REMEDY)  # fmt: skip


def primary_columns(path: Path, primaries: Floats, first: int = 0) -> Columns:
    """Names the numbers of primaries [S, 4 to 7] of events, before which the file has `first` events.

    Raises:
        DataError: There are more or fewer numbers, or a mass is neither a number of nucleons nor in GeV.
    """
    layout = _PRIMARY_LAYOUTS.get(primaries.shape[1])
    if layout is None:
        raise DataError(f"{path}: a primary has 4 to 7 numbers", value=f"{primaries.shape[1]}", remedy=_EVENTS_REMEDY)
    columns = {name: primaries[:, column] for column, name in enumerate(layout) if name}
    mass = columns[_MASS]
    whole = np.abs(mass - np.rint(mass)) <= _WHOLE
    nucleons = np.rint(np.where(whole, mass, mass / _NUCLEON_GEV))
    table = _Table(path=path, columns=columns, lines=np.arange(1, len(mass) + 1) + first, line="event")
    rule = "must be the primary's number of nucleons, or its mass in GeV"
    table.check((nucleons >= 1) & (nucleons <= _MAX_NUCLEONS), _MASS, rule)
    # Half of the nucleons are taken for protons: CORSIKA's numbers have two digits for them.
    nucleus = 100 * nucleons + np.minimum(nucleons // 2, 99)
    return columns | {PRIMARY: np.where(nucleons == 1, _PROTON_ID, nucleus)}


def _events(path: Path, part: _Part, layout: Sequence[str]) -> _Table:
    """Makes one row for each muon of events."""
    of_primaries, counts, muons = primary_columns(path, part.primaries, part.first), part.counts, part.muons
    if not len(muons):
        muons = np.zeros((0, len(layout)))
    if muons.shape[1] != len(layout):
        raise _unequal(path, MUON_TABLE, *sorted((muons.shape[1], len(layout))))
    event = np.repeat(np.arange(len(counts)), counts)
    columns = {name: muons[:, column] for column, name in enumerate(layout) if name}
    # An event without muons is written with one muon of zeros.
    real = np.stack([*columns.values()]).any(axis=0)
    of_events: Columns = {**of_primaries, EVENT: np.arange(1.0, len(counts) + 1)}
    columns |= {name: values[event] for name, values in of_events.items()}
    return _Table(path=path, columns={name: values[real] for name, values in columns.items()},
                  lines=event[real] + 1 + part.first, line="event",
                  empty=len(counts) - len(np.unique(event[real])))  # fmt: skip


def _muon_table(file: Any, path: Path) -> Columns:
    table = file[MUON_TABLE][:]
    for name in _used(table.dtype.names):
        if table.dtype[name].kind not in "fiu" or table.dtype[name].shape:
            raise DataError(f"{path}: {name} must be a column of numbers", value=str(table.dtype[name]),
                            remedy="Store it as float64")  # fmt: skip
    return {name: table[name] if name == EVENT else table[name].astype(np.float64)
            for name in _used(table.dtype.names)}  # fmt: skip


def _ground_particles(file: Any, path: Path) -> Columns:
    table = file[_GROUND_TABLE][:]
    missing = [name for name in ("particle_id", "x", "y", "t", "p_x", "p_y", "p_z") if name not in table.dtype.names]
    if missing:
        raise DataError(f"{path}: the ground particles must have all columns", value=f"without {', '.join(missing)}",
                        remedy="Name a file of CORSIKA 7 in the form of corsikaio, or of pandas")  # fmt: skip
    header = file.attrs.get("event_header")
    header = bytes(header) if isinstance(header, bytes) else b""
    primary = {
        PRIMARY: _header_number(header, "particle_id", path),
        ENERGY: _header_number(header, "energy", path) / _EV_PER_GEV,
        ZENITH: _header_number(header, "zenith", path),
    }
    momentum = np.stack([table[name].astype(np.float64) for name in ("p_x", "p_y", "p_z")])
    muons = {
        PARTICLE: table["particle_id"].astype(np.float64),
        "x_m": table["x"].astype(np.float64),
        "y_m": table["y"].astype(np.float64),
        "muon_E_GeV": np.sqrt((momentum**2).sum(axis=0) + _MUON_MASS_EV**2) / _EV_PER_GEV,
        "t_ns": table["t"].astype(np.float64),
    }
    shower = {name: np.full(len(table), value) for name, value in (primary | {EVENT: 1.0}).items()}
    return shower | muons


def _header_number(header: bytes, name: str, path: Path) -> float:
    """Finds a number in the pickled header of a shower by its text: unpickling would run code from the file."""
    match = re.search(rb"S'%s'\np\d+\n[FI]([-+.\deE]+)\n" % name.encode(), header)
    if match is None:
        raise DataError(f"{path}: the attribute 'event_header' must give the primary's {name}", value="not found",
                        remedy="Convert the file to parquet, with the columns of docs/muon.md")  # fmt: skip
    return float(match[1])


READERS: Final[Mapping[str, Callable[[Path], _Source]]] = {
    ".parquet": _columns_file, ".csv": _columns_file, ".h5": _hdf5_file, ".hdf5": _hdf5_file,
}  # fmt: skip
"""Readers by the suffix of a file's name."""


def _used(names: Sequence[str]) -> list[str]:
    columns = {*_SHOWER_COLUMNS, *_OPTIONAL, *VARIABLE_COLUMNS.values()}
    return [name for name in names if name in columns]


def _showers_of(table: _Table, dataset: ShowerDatasetSettings) -> Showers:
    table = _muons_of(_complete(table, dataset), dataset)
    columns = table.columns
    _, first, shower = np.unique(columns[EVENT], return_index=True, return_inverse=True)
    for name in (PRIMARY, ENERGY, ZENITH, DEPTH):
        same = columns[name] == columns[name][first][shower]
        table.check(same, name, "must be the same for all muons of an event")
    order = np.argsort(shower, kind="stable")
    counts = np.bincount(shower, minlength=len(first)).astype(np.int64)
    begins = np.flatnonzero(np.diff(shower, prepend=-1))
    again = begins[begins != first[shower[begins]]]
    muons = {name: columns[VARIABLE_COLUMNS[name]][order] for name in dataset.variables}
    if "time" in muons:
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        muons["time"] = muons["time"] - np.repeat(np.minimum.reduceat(muons["time"], starts), counts)
    return Showers(
        energy_gev=columns[ENERGY][first], zenith_rad=columns[ZENITH][first], primary_id=columns[PRIMARY][first],
        depth_g_cm2=columns[DEPTH][first], counts=counts, muons=muons, empty=table.empty,
        returning=len(np.unique(shower[again])),
        returns_at=f"{table.path}, {table.line} {table.lines[again[0]]}" if len(again) else "",
    )  # fmt: skip


def _complete(table: _Table, dataset: ShowerDatasetSettings) -> _Table:
    """Fills in the optional columns that a table lacks; raises DataError if it lacks a required column."""
    needed = [*_SHOWER_COLUMNS, *(VARIABLE_COLUMNS[name] for name in dataset.variables)]
    missing = [name for name in needed if name not in table.columns]
    if missing:
        learned = {VARIABLE_COLUMNS[name] for name in VARIABLES if name not in POSITIONS}
        there = ",".join(name for name in dataset.variables if VARIABLE_COLUMNS[name] not in missing)
        remedy = (f"Learn less of each muon: --set dataset.variables=[{there}]" if set(missing) <= learned
                  else "Name the columns as docs/muon.md does")  # fmt: skip
        raise DataError(f"{table.path} must have the columns {', '.join(needed)}",
                        value=f"without {', '.join(missing)}", remedy=remedy)  # fmt: skip
    size = len(table.lines)
    defaults = {DEPTH: np.full(size, dataset.depth_g_cm2), PARTICLE: np.full(size, float(MUON_IDS[0]))}
    return replace(table, columns=defaults | table.columns)


def _muons_of(table: _Table, dataset: ShowerDatasetSettings) -> _Table:
    """Returns the muons of a table of particles; raises DataError for a value that breaks a rule."""
    is_muon = np.isin(table.columns[PARTICLE], MUON_IDS)
    columns = {name: values[is_muon] for name, values in table.columns.items()}
    # Showers may have other particles alone.
    empty = 0 if is_muon.all() else len(np.unique(table.columns[EVENT])) - len(np.unique(columns[EVENT]))
    table = replace(table, columns=columns, lines=table.lines[is_muon], empty=table.empty + empty)
    if not len(table.lines):
        raise _without_muons(table.path)
    for name in (*_SHOWER_COLUMNS, DEPTH, *(VARIABLE_COLUMNS[name] for name in dataset.variables)):
        table.check(np.isfinite(columns[name]), name, "must be finite")
    table.check(are_told_apart(columns[EVENT]), EVENT, EVENT_RULE)
    for name, holds, rule in rules_of_primaries(columns):
        table.check(holds, name, rule)
    if "energy" in dataset.variables:
        table.check(columns["muon_E_GeV"] > 0, "muon_E_GeV", _ABOVE_ZERO)
    return table


def _without_muons(path: Path) -> DataError:
    return DataError(f"{path} must hold muons, which are the particles {MUON_IDS[0]} and {MUON_IDS[1]}",
                     value="none of its particles is one", remedy="Leave the file out")  # fmt: skip


def are_told_apart(event: NDArray[Any]) -> NDArray[np.bool_]:
    """Tells which numbers of events are not rounded to another one's."""
    return np.abs(event) < _WHOLE_FLOATS if event.dtype.kind == "f" else np.ones(len(event), bool)


def rules_of_primaries(columns: Mapping[str, Floats]) -> Iterator[tuple[str, NDArray[np.bool_], str]]:
    """Yields the name of each column of primaries, where its rule holds, and the rule in words."""
    energy, zenith, primary, depth = (columns[name] for name in (ENERGY, ZENITH, PRIMARY, DEPTH))
    yield ENERGY, energy > 0, _ABOVE_ZERO
    yield ZENITH, (zenith >= 0) & (zenith < np.pi / 2), "must be at least 0 and less than π/2"
    yield PRIMARY, mass_of(primary) > 0, _PRIMARY_RULE
    yield DEPTH, depth > 0, _ABOVE_ZERO


def mass_of(primary_id: Floats) -> Floats:
    """Returns the number of nucleons; 0 for a number that CORSIKA has for no nucleus."""
    nucleons, protons = np.divmod(primary_id, 100)
    is_nucleus = (primary_id >= _FIRST_NUCLEUS_ID) & (nucleons <= _MAX_NUCLEONS) & (protons <= nucleons)
    nucleus = np.where(is_nucleus & ~np.isin(primary_id, _PDG_IDS), nucleons, 0.0)
    return np.where(np.isin(primary_id, _NUCLEON_IDS), 1.0, nucleus)


def write_events(path: Path, showers: Showers) -> None:
    """Writes showers to a parquet file as cr_muons does, whole or not at all: `primary` has energy in GeV, zenith angle
    in rad, number of nucleons and depth; a muon has energy in GeV, x and y in m, and time in ns where it is known.

    Raises:
        StateError: The file cannot be written.
    """
    import polars

    names = [name for name in ("energy", "x", "y", "time") if name in showers.muons]
    primary = np.stack([showers.energy_gev, showers.zenith_rad, showers.mass, showers.depth_g_cm2], axis=1)
    muons = np.stack([showers.muons[name] for name in names], axis=1)
    lists = np.split(muons, np.cumsum(showers.counts)[:-1])
    frame = polars.DataFrame({PRIMARY_LIST: primary.tolist(), MUON_TABLE: [each.tolist() for each in lists]},
                             schema={PRIMARY_LIST: polars.List(polars.Float64),
                                     MUON_TABLE: polars.List(polars.List(polars.Float64))})  # fmt: skip
    try:
        with open_atomic(path) as file:
            frame.write_parquet(file)
    except OSError as error:
        raise StateError("Showers that are left out cannot be written", value=f"{path}: {error.strerror or error}",
                         remedy="Name another file: --set dataset.outliers=FILE.parquet") from error  # fmt: skip
