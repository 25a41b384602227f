"""The simulated showers behind `--dataset synthetic`, and their files, which the reader of real showers reads back.

The numbers depend on the settings only.

Shapes: S showers, M muons.
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.io.arrays import writing_folder
from can_train.reporter import Reporter
from can_train_tasks.muon.settings import SyntheticShowerSettings
from can_train_tasks.muon.showers import (
    DEPTH,
    ENERGY,
    EVENT,
    MUON_IDS,
    MUON_TABLE,
    PARTICLE,
    PRIMARY,
    VARIABLE_COLUMNS,
    ZENITH,
    Columns,
    Floats,
)

# Raise it whenever the same settings give other numbers, so that folders of an earlier version are not used.
GENERATOR_VERSION: Final = 1

_PRIMARIES: Final = (14, 402, 1407, 2814, 5626)  # CORSIKA's numbers of proton, helium, nitrogen, silicon, iron
_PROTON: Final = 14
_DEPTHS_G_CM2: Final = (700.0, 1036.0)  # Depths of observers in the mountains and at sea level
_MAX_ZENITH_RAD: Final = np.pi / 3  # At larger angles the ground differs too much from the shower's plane
_SEA_LEVEL_G_CM2: Final = 1036.0
_PEV_GEV: Final = 1e6
# The number of muons grows as A^0.1 · E^0.9: each of A nucleons makes a shower of energy E/A.
_MASS_EXPONENT: Final = 0.1
_ENERGY_EXPONENT: Final = 0.9
_ATTENUATION_G_CM2: Final = 1500.0  # Slant depth over which 1 - 1/e of the muons decay or stop
_SPREAD: Final = 0.16  # Spread of ln n of a proton shower; the showers of A nucleons average to a smaller spread
_SPREAD_FREEDOM: Final = 5  # Degrees of freedom of Student's t: a few showers have far more muons than the mean
_MAX_SPREADS: Final = 6.0
# Greisen's lateral distribution of muons, as r ~ r0 · Beta'(a, b): dN/dr ∝ r^0.25 (1 + r/r0)^-4.75
_LATERAL: Final = (1.25, 3.5)
_LATERAL_M: Final = 1100.0  # r0 at sea level: half of the muons are within 300 m of the core
_MAX_RADIUS_M: Final = 10_000.0
_CORE_ENERGY_GEV: Final = 20.0  # Typical energy of a muon near the core; it falls by a power of the distance
_MIN_ENERGY_GEV: Final = 0.3  # CORSIKA's usual cut
_DELAY_NS: Final = 35.0  # Delay of the shower's front at 300 m from the core, compared with the core
_ARRIVAL_NS: Final = 160_000.0  # Time from the first interaction to the front's arrival at the core


def synthetic_files(cache: Path, settings: SyntheticShowerSettings, reporter: Reporter) -> list[Path]:
    """Returns the files of the simulated data set under `cache`; simulates and writes them if they are missing.

    Raises:
        StateError: The files cannot be written.
    """
    identity = json.dumps([GENERATOR_VERSION, asdict(settings)])
    folder = cache / f"showers-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        with (
            writing_folder(folder) as staged,
            reporter.stage("simulating showers", total=settings.files, unit="files") as stage,
        ):
            for number in range(settings.files):
                _write(staged, number, settings)
                stage.advance()
    return sorted(folder.iterdir())


def simulate_showers(settings: SyntheticShowerSettings, number: int, showers: int) -> Columns:
    """Simulates `showers` showers of the file `number`; returns its columns, one line for each muon."""
    rng = np.random.default_rng(np.random.SeedSequence(settings.seed, spawn_key=(number,)))
    primary = rng.choice(_PRIMARIES, showers).astype(np.float64)
    mass = np.where(primary == _PROTON, 1.0, primary // 100)
    energy = np.exp(rng.uniform(np.log(settings.min_energy_gev), np.log(settings.max_energy_gev), showers))
    # An isotropic flux through a horizontal plane is uniform in sin² of the zenith angle.
    zenith = np.arcsin(np.sqrt(rng.uniform(0.0, np.sin(_MAX_ZENITH_RAD) ** 2, showers)))
    depth = rng.uniform(*_DEPTHS_G_CM2, showers)
    slant = depth / np.cos(zenith)
    expected = settings.muons_per_pev * mass**_MASS_EXPONENT * (energy / _PEV_GEV) ** _ENERGY_EXPONENT
    expected *= np.exp(-(slant - _SEA_LEVEL_G_CM2) / _ATTENUATION_G_CM2)
    spreads = np.clip(rng.standard_t(_SPREAD_FREEDOM, showers), -_MAX_SPREADS, _MAX_SPREADS)
    counts = np.maximum(rng.poisson(expected * np.exp(_SPREAD / np.sqrt(mass) * spreads)), 1)
    conditions = {EVENT: np.arange(1.0, showers + 1), PRIMARY: primary, ENERGY: energy, ZENITH: zenith, DEPTH: depth}
    lines = {name: np.repeat(values, counts) for name, values in conditions.items()}
    return lines | _muons(rng, np.repeat(slant, counts), np.repeat(zenith, counts))


def _muons(rng: np.random.Generator, slant: Floats, zenith: Floats) -> Columns:
    """Simulates muons at the ground.

    Args:
        rng: Source of randomness.
        slant: [M] slant depth of the shower, in g/cm².
        zenith: [M] zenith angle of the shower, in rad.
    """
    share = rng.beta(*_LATERAL, len(slant))
    # Showers that began higher above the ground are wider.
    radius = np.minimum(_LATERAL_M * slant / _SEA_LEVEL_G_CM2 * share / (1.0 - share), _MAX_RADIUS_M)
    angle = rng.uniform(-np.pi, np.pi, len(slant))
    energy = _CORE_ENERGY_GEV * (1.0 + radius / 50.0) ** -0.8 * np.exp(rng.normal(0.0, 0.8, len(slant)))
    delay = _DELAY_NS * (radius / 300.0) ** 1.75 * np.exp(rng.normal(0.0, 0.4, len(slant)))
    return {
        PARTICLE: rng.choice(MUON_IDS, len(slant)).astype(np.float64),
        VARIABLE_COLUMNS["energy"]: np.maximum(energy, _MIN_ENERGY_GEV),
        # The shower comes from +x: its plane meets the ground stretched along x.
        VARIABLE_COLUMNS["x"]: radius * np.cos(angle) / np.cos(zenith),
        VARIABLE_COLUMNS["y"]: radius * np.sin(angle),
        VARIABLE_COLUMNS["time"]: _ARRIVAL_NS + delay,
    }


def showers_in_file(settings: SyntheticShowerSettings, number: int) -> int:
    """Returns the number of showers in a file: showers ÷ files, and one more in the first files if there is a rest."""
    whole, more = divmod(settings.showers, settings.files)
    return whole + (number < more)


def _write(folder: Path, number: int, settings: SyntheticShowerSettings) -> None:
    columns = simulate_showers(settings, number, showers_in_file(settings, number))
    path = folder / f"showers-{number:04d}.{'parquet' if settings.format == 'parquet' else 'h5'}"
    if settings.format == "parquet":
        write_parquet(path, columns)
    else:
        write_hdf5(path, columns)
    # Flushed before the folder's rename: after a power failure a complete folder must not hold empty files.
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_parquet(path: Path, columns: Columns) -> None:
    """Writes a parquet file with one line for each muon."""
    import polars

    polars.DataFrame(_typed(columns)).write_parquet(path)


def write_hdf5(path: Path, columns: Columns) -> None:
    """Writes an HDF5 table with one line for each muon."""
    import h5py

    typed = _typed(columns)
    table = np.empty(len(columns[EVENT]), dtype=[(name, values.dtype) for name, values in typed.items()])
    for name, values in typed.items():
        table[name] = values
    with h5py.File(path, "w") as file:
        file.create_dataset(MUON_TABLE, data=table, compression="gzip")


def _typed(columns: Columns) -> dict[str, NDArray[np.int64] | Floats]:
    whole = (EVENT, PRIMARY, PARTICLE)
    return {name: values.astype(np.int64) if name in whole else values for name, values in columns.items()}
