"""Reads the primaries whose showers are drawn, and writes drawn showers.

Shapes: S showers.
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
    MUON_TABLE,
    PRIMARY,
    PRIMARY_ARRAYS,
    PRIMARY_LIST,
    ZENITH,
    mass_of,
    matrix_of_lists,
    primary_columns,
)

Floats = NDArray[np.float64]

_MATRIX: Final = 2  # Dimensions of the primaries of cr_muons
_NEEDED: Final = (ENERGY, ZENITH, PRIMARY)
_TABLES: Final = ("primaries", MUON_TABLE)  # HDF5 tables whose columns have names
_REMEDY: Final = "Name the columns as docs/muon.md does: primary_E_GeV, primary_zenith_rad, primary_id"


@dataclass(frozen=True, kw_only=True, eq=False)
class Primaries:
    """Primary particles, with the numbers of their showers.

    Attributes:
        event: [S] number of the shower in its file.
        energy_gev, zenith_rad, primary_id, depth_g_cm2: [S] as in `Showers`; CORSIKA's number of the particle.
    """

    event: Floats
    energy_gev: Floats
    zenith_rad: Floats
    primary_id: Floats
    depth_g_cm2: Floats

    def __len__(self) -> int:
        return len(self.event)

    @property
    def mass(self) -> Floats:
        """[S] numbers of nucleons."""
        return mass_of(self.primary_id)


def read_primaries(files: Sequence[Path], depth_g_cm2: float) -> Primaries:
    """Reads primaries, one line each; of files with a line for each muon, the first line of each shower.

    Args:
        files: Parquet, CSV or HDF5.
        depth_g_cm2: Depth of the atmosphere where a file does not give it.

    Raises:
        DataError: A file cannot be read, lacks a column, or has a value that breaks a rule; the message names them.
    """
    read = [_primaries(path, _columns(path), depth_g_cm2) for path in files]
    return Primaries(**{name: np.concatenate([getattr(each, name) for each in read]) for name in vars(read[0])})


def _columns(path: Path) -> Mapping[str, Any]:
    names = (EVENT, *_NEEDED, DEPTH)
    try:
        if path.suffix.lower() not in (".csv", ".parquet"):
            return _hdf5_columns(path, names)
        import polars

        if path.suffix.lower() == ".parquet" and PRIMARY_LIST in polars.read_parquet_schema(path):
            lists = polars.read_parquet(path, columns=[PRIMARY_LIST])[PRIMARY_LIST]
            return primary_columns(path, matrix_of_lists(path, lists, PRIMARY_LIST))
        frame = polars.read_csv(path) if path.suffix.lower() == ".csv" else polars.read_parquet(path)
        return {name: frame[name].to_numpy() for name in names if name in frame.columns}
    except Exception as error:
        # h5py raises OSError for damaged files, too.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("polars"):
            raise
        reason = str(error).strip().partition("\n")[0][:200]
        raise DataError(f"{path} must be readable", value=reason, remedy="Check the file") from error


def _hdf5_columns(path: Path, names: Sequence[str]) -> Mapping[str, Any]:
    import h5py

    with h5py.File(path) as file:
        for table in _TABLES:
            if isinstance(file.get(table), h5py.Dataset) and file[table].dtype.names:
                return {name: file[table][name] for name in names if name in file[table].dtype.names}
        for name in PRIMARY_ARRAYS:
            if isinstance(file.get(name), h5py.Dataset) and file[name].ndim == _MATRIX:
                return primary_columns(path, file[name][:].astype(np.float64))
    raise DataError(f"{path} must hold a table '{_TABLES[0]}' with a line for each primary", value="it is not there",
                    remedy=_REMEDY)  # fmt: skip


def _primaries(path: Path, columns: Mapping[str, Any], depth_g_cm2: float) -> Primaries:
    if missing := [name for name in _NEEDED if name not in columns]:
        raise DataError(f"{path} must have the columns {', '.join(_NEEDED)}", value=f"without {', '.join(missing)}",
                        remedy=_REMEDY)  # fmt: skip
    try:
        numbers = {name: np.asarray(values).astype(np.float64) for name, values in columns.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: a column of primaries has numbers", value=f"{error}", remedy=_REMEDY) from error
    size = len(numbers[ENERGY])
    numbers = {EVENT: np.arange(1.0, size + 1), DEPTH: np.full(size, depth_g_cm2)} | numbers
    for name, holds, rule in (
        (ENERGY, numbers[ENERGY] > 0, "must be greater than 0"),
        (ZENITH, (numbers[ZENITH] >= 0) & (numbers[ZENITH] < np.pi / 2), "must be at least 0 and less than π/2"),
        (PRIMARY, mass_of(numbers[PRIMARY]) > 0, "must be CORSIKA's number of a nucleon or nucleus (100·A + Z)"),
        (DEPTH, numbers[DEPTH] > 0, "must be greater than 0"),
    ):
        finite = np.isfinite(numbers[name]) & holds
        if not finite.all():
            row = int(np.argmin(finite))
            raise DataError(f"{path}, primary {row + 1}: {name} {rule}", value=f"{numbers[name][row]:.12g}",
                            remedy="Correct it or leave it out")  # fmt: skip
    _, first = np.unique(numbers[EVENT], return_index=True)
    # In the order of the file.
    rows = np.sort(first)
    return Primaries(event=numbers[EVENT][rows], energy_gev=numbers[ENERGY][rows], zenith_rad=numbers[ZENITH][rows],
                     primary_id=numbers[PRIMARY][rows], depth_g_cm2=numbers[DEPTH][rows])  # fmt: skip


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
