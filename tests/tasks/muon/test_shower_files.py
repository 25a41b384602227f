"""Files of showers: what is written is read back, and what breaks a rule is named with file and line."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError, MissingDataError
from can_train_tasks.muon.settings import ShowerDatasetSettings
from can_train_tasks.muon.showers import MUON_TABLE, Columns, Showers, read_showers, shower_files
from can_train_tasks.muon.synthetic_showers import write_hdf5, write_parquet
from fakes.muon_tasks import REAL

HEADER = "event,primary_id,primary_E_GeV,primary_zenith_rad,muon_id,muon_E_GeV,x_m,y_m,t_ns"
GOOD = ["1,14,1e5,0.1,5,7.2,-172.5,56.2,1000.5", "2,5626,2e5,0.2,6,3.1,9,10,1001", "1,14,1e5,0.1,6,1,2,3,1004"]


def write_csv(path: Path, columns: Columns) -> None:
    polars.DataFrame(columns).write_csv(path)


WRITERS: dict[str, Callable[[Path, Columns], None]] = {"parquet": write_parquet, "h5": write_hdf5, "csv": write_csv}


def of_file(path: Path, **changed: object) -> Showers:
    return read_showers([path], ShowerDatasetSettings(path=str(path), **changed))


def csv_of(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "showers.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@st.composite
def columns(draw: st.DrawFn) -> Columns:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = np.array(draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    of_showers = {
        "event": rng.permutation(100)[: len(counts)].astype(float),
        "primary_id": rng.choice([13, 14, 402, 5626], len(counts)).astype(float),
        "primary_E_GeV": np.exp(rng.normal(10, 3, len(counts))),
        "primary_zenith_rad": rng.uniform(0, 1.5, len(counts)),
        "depth_g_cm2": rng.uniform(1, 2000, len(counts)),
    }
    of_muons = {
        "muon_id": rng.choice([5, 6], counts.sum()).astype(float),
        "muon_E_GeV": np.exp(rng.normal(1, 2, counts.sum())),
        "x_m": rng.normal(0, 500, counts.sum()),
        "y_m": rng.normal(0, 500, counts.sum()),
        "t_ns": rng.normal(1e5, 100, counts.sum()),
    }
    lines = {name: np.repeat(values, counts) for name, values in of_showers.items()} | of_muons
    # Muons of different showers may take turns.
    order = rng.permutation(counts.sum()) if draw(st.booleans()) else np.arange(counts.sum())
    return {name: values[order] for name, values in lines.items()}


@pytest.mark.parametrize("kind", WRITERS)
@given(written=columns())
@settings(max_examples=25)
def test_what_is_written_is_read_back(kind: str, written: Columns) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"showers.{kind}"
        WRITERS[kind](path, written)
        showers = of_file(path)
    events = np.unique(written["event"])
    assert showers.counts.tolist() == [int((written["event"] == event).sum()) for event in events]
    starts = np.cumsum(showers.counts) - showers.counts
    for event, start, count, energy, mass in zip(
        events, starts, showers.counts, showers.energy_gev, showers.mass, strict=True
    ):
        own = written["event"] == event
        assert energy == written["primary_E_GeV"][own][0]
        assert mass == max(written["primary_id"][own][0] // 100, 1)
        read = {name: values[start : start + count] for name, values in showers.muons.items()}
        assert np.array_equal(read["x"], written["x_m"][own])
        assert np.array_equal(read["y"], written["y_m"][own])
        assert np.array_equal(read["energy"], written["muon_E_GeV"][own])
        assert np.array_equal(read["time"], written["t_ns"][own] - written["t_ns"][own].min())


def test_a_line_a_shower_with_lists_is_read(tmp_path: Path) -> None:
    frame = polars.DataFrame({
        "event": [1, 2], "primary_id": [14, 402], "primary_E_GeV": [1e5, 2e5], "primary_zenith_rad": [0.0, 0.5],
        "x_m": [[1.0, 2.0], [3.0]], "y_m": [[4.0, 5.0], [6.0]],
    })  # fmt: skip
    frame.write_parquet(tmp_path / "showers.parquet")
    showers = of_file(tmp_path / "showers.parquet", variables=["x", "y"])
    assert showers.counts.tolist() == [2, 1]
    assert showers.muons["y"].tolist() == [4.0, 5.0, 6.0]


def test_particles_other_than_muons_are_left_out_and_events_of_each_file_are_its_own(tmp_path: Path) -> None:
    one = csv_of(tmp_path, *GOOD, "1,14,1e5,0.1,3,-1,nan,3,1")
    two = tmp_path / "more.csv"
    two.write_text(one.read_text())
    showers = read_showers([one, two], ShowerDatasetSettings(path=str(tmp_path), depth_g_cm2=700.0))
    assert showers.counts.tolist() == [2, 1, 2, 1]
    assert showers.mass.tolist() == [1, 56, 1, 56]
    assert set(showers.depth_g_cm2.tolist()) == {700.0}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("2,5626,2e5,0.2,6,3.1,abc,10,1001", r"line 5: x_m must be a number: 'abc'"),
        ("2,5626,2e5,0.2,6,3.1,,10,1001", r"line 5: x_m must be a number"),
        ("2,5626,2e5,0.2,6,3.1,inf,10,1001", r"line 5: x_m must be finite: inf"),
        ("2,5626,2e5,0.2,6,3.1,9,nan,1001", r"line 5: y_m must be finite: nan"),
        ("3,14,0,0.2,6,3.1,9,10,1001", r"line 5: primary_E_GeV must be greater than 0: 0"),
        ("3,14,1e5,1.6,6,3.1,9,10,1001", r"line 5: primary_zenith_rad must be at least 0 and less than π/2: 1.6"),
        ("3,1,1e5,0.2,6,3.1,9,10,1001", r"line 5: primary_id must be CORSIKA's number of a nucleon or nucleus"),
        ("3,14,1e5,0.2,6,0,9,10,1001", r"line 5: muon_E_GeV must be greater than 0: 0"),
        ("2,5626,3e5,0.2,6,3.1,9,10,1001", r"line 5: primary_E_GeV must be the same for all muons of an event"),
    ],
)
def test_a_line_that_breaks_a_rule_is_named(tmp_path: Path, line: str, rule: str) -> None:
    path = csv_of(tmp_path, *GOOD, line)
    with pytest.raises(DataError, match=rule) as error:
        of_file(path)
    assert str(path) in str(error.value)
    assert error.value.remedy


def test_the_line_is_the_file_s_where_others_are_left_out_before_it(tmp_path: Path) -> None:
    path = csv_of(tmp_path, GOOD[0], "1,14,1e5,0.1,2,1,2,3,1004", "1,14,2e5,0.1,6,1,2,3,1004")
    with pytest.raises(DataError, match="line 4: primary_E_GeV must be the same"):
        of_file(path)


def test_a_missing_column_is_named_with_what_can_be_done(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "1,14,1e5,0.1,1,2", header="event,primary_id,primary_E_GeV,primary_zenith_rad,x_m,y_m")
    with pytest.raises(DataError, match=r"without muon_E_GeV, t_ns") as error:
        of_file(path)
    assert "dataset.variables=[x,y]" in error.value.remedy
    assert set(of_file(path, variables=["x", "y"]).muons) == {"x", "y"}


@pytest.mark.parametrize("name", ["broken.h5", "broken.parquet", "broken.csv"])
@pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n\x00\x00", b"PAR1\xff\xff", b"\xff\xfe\x00,\n1"])
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        of_file(tmp_path / name)


@pytest.mark.parametrize(
    "lines", [["1,2"], ["1,14,1e5,0.1,5,7.2,-172.5,56.2,1000.5,9,9"], ["1,14,1e5,0,3,1,2,3,4"], []]
)
def test_a_table_without_muons_or_with_lines_of_other_lengths_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(DataError, match=r"showers\.csv"):
        of_file(csv_of(tmp_path, *lines))


def test_hdf5_without_a_known_table_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["other"] = [1, 2]
    with pytest.raises(DataError, match=f"must hold a table '{MUON_TABLE}'"):
        of_file(tmp_path / "a.h5")


def test_a_header_is_searched_and_never_unpickled(tmp_path: Path) -> None:
    names = ("particle_id", "x", "y", "t", "p_x", "p_y", "p_z")
    table = np.array([(5, 1.0, 2.0, 3.0, 1e9, 0.0, 1e9)], dtype=[(name, float) for name in names])
    opened = tmp_path / "opened"
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["groundparticles"] = table
        # Unpickling it makes a folder.
        file.attrs["event_header"] = np.bytes_(f"cos\nmkdir\n(S'{opened}'\ntR.".encode())
    with pytest.raises(DataError, match="event_header"):
        of_file(tmp_path / "a.h5")
    assert not opened.exists()


def test_files_of_a_folder_are_found_and_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.h5", "deep/a.parquet", "c.csv", "readme.md"):
        (tmp_path / name).touch()
    found = shower_files(ShowerDatasetSettings(path=str(tmp_path)), Path("data"))
    assert [path.name for path in found] == ["b.h5", "c.csv", "a.parquet"]
    assert shower_files(ShowerDatasetSettings(), Path("data")) == []
    for path in ("nowhere", str(tmp_path / "readme.md")):
        with pytest.raises(MissingDataError, match=r"\.parquet"):
            shower_files(ShowerDatasetSettings(path=path), Path("data"))
    with pytest.raises(MissingDataError, match="synthetic"):
        shower_files(ShowerDatasetSettings(name="other"), Path("data"))


def test_the_real_sample_is_read_from_both_of_its_files() -> None:
    if not REAL.is_dir():
        pytest.skip("the real sample is not there")
    ground, listed = of_file(REAL / "corsika_1_2.h5"), of_file(REAL / "corsika_muons_from_DAT000000.csv")
    for showers in (ground, listed):
        assert showers.counts.tolist() == [1729]
        assert (showers.energy_gev.tolist(), showers.mass.tolist(), showers.zenith_rad.tolist()) == ([1e5], [1], [0])
    assert np.sort(ground.muons["energy"]) == pytest.approx(np.sort(listed.muons["energy"]), rel=1e-4)
    assert np.sort(ground.muons["time"]) == pytest.approx(np.sort(listed.muons["time"]), abs=0.05)
    radii = [np.sort(np.hypot(showers.muons["x"], showers.muons["y"])) for showers in (ground, listed)]
    assert radii[0] == pytest.approx(radii[1], rel=1e-3, abs=0.05)
