"""Files of showers: what is written is read back, and what breaks a rule is named with file and line."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError, MissingDataError
from can_train.training.sample_task import TaskContext
from can_train_tasks.muon.event_table import EventTable
from can_train_tasks.muon.primaries import PrimaryFile
from can_train_tasks.muon.settings import MuonGanSettings, MuonSettings, ShowerDatasetSettings
from can_train_tasks.muon.showers import MUON_TABLE, Columns, Showers, read_showers, shower_files, write_events
from can_train_tasks.muon.synthetic_showers import write_hdf5, write_parquet
from can_train_tasks.muon.task import MuonTask
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
    for event, start, count, energy, mass, primary in zip(
        events, starts, showers.counts, showers.energy_gev, showers.mass, showers.primary_id, strict=True
    ):
        own = written["event"] == event
        assert energy == written["primary_E_GeV"][own][0]
        assert mass == max(written["primary_id"][own][0] // 100, 1)
        assert primary == written["primary_id"][own][0]
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


LARGE = [2**63 + 3, 2**60 + 1, 2**60 + 2, 2**60 + 1]  # 2^60 + 1 and 2^60 + 2 are equal in float64


@pytest.mark.parametrize("ending", ["csv", "parquet", "h5"])
def test_events_are_told_apart_by_all_64_bits_of_their_numbers(tmp_path: Path, ending: str) -> None:
    columns: dict[str, Any] = {"event": np.array(LARGE, np.uint64), "primary_id": np.full(4, 14),
                               "primary_E_GeV": np.full(4, 1e5), "primary_zenith_rad": np.zeros(4),
                               "x_m": np.arange(4.0), "y_m": np.zeros(4)}  # fmt: skip
    path, frame = tmp_path / f"showers.{ending}", polars.DataFrame(columns)
    if ending == "h5":
        with h5py.File(path, "w") as file:
            file[MUON_TABLE] = frame.to_numpy(structured=True)
    else:
        frame.write_csv(path) if ending == "csv" else frame.write_parquet(path)
    assert of_file(path).counts.tolist() == [2, 1, 1]
    (part,) = PrimaryFile(path, 1000.0)
    assert part.event.tolist() == LARGE[:3]


def test_events_whose_numbers_were_rounded_are_refused(tmp_path: Path) -> None:
    lines = ["1,14,1e5,0.1,5,7.2,1,2,1000.5", "1e18,14,1e5,0.1,5,7.2,1,2,1000.5"]
    with pytest.raises(DataError, match=r"line 3: event must be less than 2\^53, or .*: 1e\+18"):
        of_file(csv_of(tmp_path, *lines))


def showers_with_lists(folder: Path, **lists: list[Any]) -> Path:
    frame = polars.DataFrame({
        "event": [1, 2, 3], "primary_id": [14, 402, 14], "primary_E_GeV": [1e5, 2e5, 1e5],
        "primary_zenith_rad": [0.0, 0.5, 0.1], "x_m": [[1.0, 2.0], [], [3.0]], "y_m": [[4.0, 5.0], [], [6.0]], **lists,
    })  # fmt: skip
    frame.write_parquet(folder / "showers.parquet")
    return folder / "showers.parquet"


@pytest.mark.parametrize("cells", [[[None, 1.0], [], [2.0]], [[1.0, 2.0, 3.0], [], [None]], [None, [7.0], None]])
def test_lists_that_are_not_read_take_no_muon_away(tmp_path: Path, cells: list[Any]) -> None:
    showers = of_file(showers_with_lists(tmp_path, p_z=cells))
    assert showers.muons["y"].tolist() == [4.0, 5.0, 6.0]
    assert (showers.counts.tolist(), showers.empty) == ([2, 1], 1)


@pytest.mark.parametrize(
    ("cells", "said"),
    [([[0.0, 1.0], [], [None]], "t_ns must be a number: None"),
     ([[0.0, 1.0], None, None], "the lists of a shower have a number for each muon: x_m has 1, y_m has 1, t_ns has 0")],
)  # fmt: skip
def test_a_missing_number_in_a_list_is_refused_with_its_shower(tmp_path: Path, cells: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"showers\.parquet, row 3: {said}"):
        of_file(showers_with_lists(tmp_path, t_ns=cells))


def test_events_keep_the_numbers_of_their_primaries(tmp_path: Path) -> None:
    table = EventTable(["x", "y"])
    table.append(of_file(csv_of(tmp_path, *GOOD), variables=["x", "y"]))
    assert table.primaries[:, 2].tolist() == [14, 5626]


def test_showers_without_a_muon_are_counted(tmp_path: Path) -> None:
    showers = of_file(csv_of(tmp_path, *GOOD, "3,14,1e5,0.1,3,1,2,3,1", "1,14,1e5,0.1,3,1,2,3,1"))
    assert (showers.counts.tolist(), showers.empty) == ([2, 1], 1)


def test_an_event_number_that_returns_is_told_with_its_first_row(tmp_path: Path) -> None:
    file = csv_of(tmp_path, *[f"{number},14,1e5,0.1,5,1,2,3,1" for number in (2, 2, 1, 3, 2, 1)])
    showers = of_file(file)
    assert (showers.counts.tolist(), showers.returning) == ([2, 3, 1], 2)
    assert showers.returns_at == f"{file}, line 6"
    task = MuonTask(TaskContext(settings=MuonSettings(), dataset=ShowerDatasetSettings(path=str(file), parts=9),
                                model=MuonGanSettings()))  # fmt: skip
    assert any(notice.startswith("2 event numbers of a file stand in rows apart") for notice in task.notices())
    assert of_file(csv_of(tmp_path, *GOOD[:2])).returning == 0


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
        *(
            (f"3,{number},1e5,0.2,6,3.1,9,10,1001", rf"line 5: primary_id .*, not PDG's: .*nucleus: {number}")
            for number in (211, 2112, 2212, 1000260560)
        ),
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


@pytest.mark.parametrize(
    ("columns", "missing", "there"),
    [("x_m,y_m", "muon_E_GeV, t_ns", ["x", "y"]), ("x_m,y_m,muon_E_GeV", "t_ns", ["x", "y", "energy"])],
)
def test_a_missing_column_is_named_with_what_can_be_done_and_not_learned_unless_asked(
    tmp_path: Path, columns: str, missing: str, there: list[str]
) -> None:
    header = f"event,primary_id,primary_E_GeV,primary_zenith_rad,{columns}"
    path = csv_of(tmp_path, "1,14,1e5,0.1," + ",".join("2" for _ in there), header=header)
    with pytest.raises(DataError, match=f"without {missing}") as error:
        of_file(path, variables=["x", "y", "energy", "time"])
    assert error.value.remedy == f"Learn less of each muon: --set dataset.variables=[{','.join(there)}]"
    assert [*of_file(path, variables=there).muons] == [*of_file(path).muons] == there


LIST = polars.List(polars.Float64)


@st.composite
def events(draw: st.DrawFn) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Primaries [energy, zenith, nucleons, depth], and the muons [energy, x, y, time] of each."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
    primaries = [[float(10 ** rng.uniform(2, 8)), float(rng.uniform(0, 1.5)), float(rng.integers(1, 57)),
                  float(rng.uniform(1, 3000))] for _ in counts]  # fmt: skip
    muons = [np.exp(rng.normal(0, 2, (count, 4))).tolist() for count in counts]
    return primaries, muons


def write_parquet_events(path: Path, primaries: Sequence[Sequence[float]], muons: Sequence[Sequence[Any]]) -> None:
    columns = {"primary": list(primaries), "muons": list(muons)}
    polars.DataFrame(columns, {"primary": LIST, "muons": polars.List(LIST)}).write_parquet(path)


def write_hdf5_events(path: Path, primaries: Sequence[Sequence[float]], muons: Sequence[Sequence[Any]]) -> None:
    """As cr_muons writes them: with identifiers, and a muon of zeros for an event without muons."""
    with h5py.File(path, "w") as file:
        file["primaries"] = [[1, 2, *each[:3], 0.5, each[3]] for each in primaries]
        rows = [[1, 2, *muon] for of_event in muons for muon in (of_event or [[0, 0, 0, 0]])]
        file["muons"] = np.array(rows)
        file["counts"] = np.array([max(len(of_event), 1) for of_event in muons], np.int32)


@pytest.mark.parametrize(("suffix", "write"), [("parquet", write_parquet_events), ("h5", write_hdf5_events)])
@given(written=events(), in_gev=st.booleans())
@settings(max_examples=25)
def test_events_of_cr_muons_are_read_bit_by_bit(suffix: str, write: Any, written: Any, in_gev: bool) -> None:
    primaries, muons = written
    unit = 0.9315 if in_gev else 1.0
    stored = [[energy, zenith, nucleons * unit, depth] for energy, zenith, nucleons, depth in primaries]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"events.{suffix}"
        write(path, stored, muons)
        showers = of_file(path)
    kept = [number for number, of_event in enumerate(muons) if of_event]
    assert showers.empty == len(muons) - len(kept)
    assert showers.counts.tolist() == [len(muons[number]) for number in kept]
    read = (showers.energy_gev, showers.zenith_rad, showers.mass, showers.depth_g_cm2)
    assert np.stack(read, axis=1).tolist() == [primaries[number] for number in kept]
    every = np.array([muon for number in kept for muon in muons[number]])
    assert [*showers.muons] == ["x", "y", "energy", "time"]
    assert np.array_equal(np.stack([showers.muons[name] for name in ("energy", "x", "y")], axis=1), every[:, :3])


def test_the_distance_from_the_axis_is_no_time(tmp_path: Path) -> None:
    muons = [[[2.0, 5.0, 3.0, 4.0], [1.0, 13.0, -5.0, 12.0]]]
    write_parquet_events(tmp_path / "a.parquet", [[1e5, 0.1, 0.938272, 1500.0]], muons)
    showers = of_file(tmp_path / "a.parquet")
    assert {name: values.tolist() for name, values in showers.muons.items()} == {
        "x": [3.0, -5.0], "y": [4.0, 12.0], "energy": [2.0, 1.0],
    }  # fmt: skip
    assert showers.mass.tolist() == [1.0]


EVENT = ([[1e5, 0.1, 1.0, 1500.0]], [[[2.0, 3.0, 4.0]]])
THREE = "events have the arrays 'primaries', 'muons' and 'counts'"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("primaries", None, f": {THREE}: without primaries"),
        ("counts", None, f": {THREE}: without counts"),
        ("muons", None, f": {THREE}: without muons"),
        ("counts", [2], ": the arrays of events must belong together: 1 primaries, 1 counts, whose sum is 2, 1 muons"),
        ("counts", [0.5], ": 'counts' has the number of muons of each event: float64 (1,)"),
        ("muons", [1.0], ": 'muons' must have a row of numbers for each of them: float64 (1,)"),
        ("primaries", [[1.0, 2.0, 3.0]], ": a primary has 4 to 7 numbers: 3"),
        ("primaries", [[1e5, 0.1, 0.1, 9.0]],
         ", event 1: mass must be the primary's number of nucleons, or its mass in GeV: 0.1"),
        ("primaries", [[-1e5, 0.1, 1.0, 9.0]], ", event 1: primary_E_GeV must be greater than 0: -100000"),
    ],
)  # fmt: skip
def test_events_that_break_a_rule_are_told_by_it(tmp_path: Path, name: str, value: Any, rule: str) -> None:
    arrays = {"primaries": EVENT[0], "muons": EVENT[1][0], "counts": [1]} | {name: value}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for key, array in arrays.items():
            if array is not None:
                file[key] = array
    with pytest.raises(DataError) as error:
        of_file(tmp_path / "a.h5")
    assert str(error.value).startswith(f"{tmp_path / 'a.h5'}{rule}.")


KINDS = "'primary' is a list of numbers, 'muons' a list of such lists"


@pytest.mark.parametrize(
    ("frame", "rule"),
    [
        ({"muons": [[[1.0, 2.0, 3.0]]]}, "events have the columns 'primary' and 'muons': without primary"),
        ({"primary": [[1.0]], "muons": [1.0]}, f"{KINDS}: primary is List(Float64), muons is Float64"),
        ({"primary": [[1e5, 0.1, 1.0, 9.0]] * 2, "muons": [[[1.0, 2.0, 3.0]], [[1.0, 2.0]]]},
         "all lists of 'muons' have the same length: lengths from 2 to 3"),
    ],
)  # fmt: skip
def test_columns_of_events_that_break_a_rule_are_told_by_it(tmp_path: Path, frame: Any, rule: str) -> None:
    polars.DataFrame(frame).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError) as error:
        of_file(tmp_path / "a.parquet")
    assert str(error.value).startswith(f"{tmp_path / 'a.parquet'}: {rule}.")


@given(written=columns())
@settings(max_examples=25)
def test_events_that_are_written_are_read_back(written: Columns) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder) / "lines.parquet", written)
        showers = of_file(Path(folder) / "lines.parquet")
        write_events(Path(folder) / "events.parquet", showers)
        again = of_file(Path(folder) / "events.parquet")
    for name in ("energy_gev", "zenith_rad", "mass", "depth_g_cm2", "counts"):
        assert np.array_equal(getattr(showers, name), getattr(again, name))
    assert all(np.array_equal(showers.muons[name], again.muons[name]) for name in showers.muons)


@pytest.mark.parametrize("y", [3.0, -3.0])
def test_muons_at_time_zero_on_a_diagonal_have_no_radius(tmp_path: Path, y: float) -> None:
    write_hdf5_events(tmp_path / "a.h5", [[1e5, 0.1, 0.938272, 1500.0]], [[[2.0, 3.0, y, 0.0]]])
    muons = of_file(tmp_path / "a.h5").muons
    assert (muons["x"].tolist(), muons["y"].tolist()) == ([3.0], [y])


@pytest.mark.parametrize(("suffix", "write"), [("parquet", write_parquet_events), ("h5", write_hdf5_events)])
def test_the_primaries_of_events_are_read_without_their_muons(tmp_path: Path, suffix: str, write: Any) -> None:
    path = tmp_path / f"events.{suffix}"
    write(path, [[1e5, 0.1, 0.938272, 1500.0], [2e5, 0.2, 56.0, 1600.0]], [[], [[1.0, 2.0, 3.0, 4.0]]])
    if suffix == "parquet":
        polars.read_parquet(path).drop("muons").write_parquet(path)
    (primaries,) = PrimaryFile(path, 1.0)
    assert primaries.mass.tolist() == [1.0, 56.0]
    assert primaries.depth_g_cm2.tolist() == [1500.0, 1600.0]
    assert primaries.energy_gev.tolist() == [1e5, 2e5]


def muons_of(sets: Any) -> list[int]:
    return sorted(len(event.muons) for events in sets.values() for event in events)


def test_showers_of_too_many_muons_are_left_out_and_are_a_data_set_of_their_own(tmp_path: Path) -> None:
    counts = [*range(1, 25), 90, 50]
    muons = [[[1.0, 2.0, 3.0]] * count for count in counts]
    write_parquet_events(tmp_path / "a.parquet", EVENT[0] * len(counts), muons)
    outliers = tmp_path / "large.parquet"
    limited = ShowerDatasetSettings(
        path=str(tmp_path / "a.parquet"), max_muons_per_event=40, outliers=str(outliers), parts=1
    )
    task = MuonTask(TaskContext(settings=MuonSettings(), dataset=limited, model=MuonGanSettings()))
    assert muons_of(task.sets) == counts[:24]
    assert of_file(outliers).counts.tolist() == [90, 50]
    assert task.notices()[-1] == (
        f"Showers of more than 40 muons are left out: 2 of 26. They are in {outliers}, a data set for a larger card"
    )


def test_a_limit_that_leaves_no_shower_is_an_error_with_one_that_leaves_some(tmp_path: Path) -> None:
    write_parquet_events(tmp_path / "a.parquet", EVENT[0] * 12, [[[1.0, 2.0, 3.0]] * 7] * 12)
    limited = ShowerDatasetSettings(path=str(tmp_path / "a.parquet"), max_muons_per_event=3)
    task = MuonTask(TaskContext(settings=MuonSettings(), dataset=limited, model=MuonGanSettings()))
    with pytest.raises(DataError, match=r"leaves no shower: 3; the smallest shower has 7 muons\.\nGive at least 7"):
        _ = task.sets


def test_a_finished_run_reads_the_variables_that_it_learned(tmp_path: Path) -> None:
    for name, width in (("without_time", 3), ("with_time", 4)):
        muons = [[[1.0, 2.0, 3.0, 4.0 * (k + 1)][:width] for k in range(5)] for _ in range(20)]
        write_parquet_events(tmp_path / f"{name}.parquet", EVENT[0] * 20, muons)

    def task_of(name: str, state: Mapping[str, Any]) -> MuonTask:
        dataset = ShowerDatasetSettings(path=str(tmp_path / f"{name}.parquet"))
        context = TaskContext(settings=MuonSettings(), dataset=dataset, model=MuonGanSettings(), state=state)
        return MuonTask(context)

    trained = task_of("without_time", {})
    _ = trained.sets
    assert trained.state()["variables"] == ["x", "y", "energy"]
    other = task_of("with_time", trained.state())
    assert {event.muons.shape[1] for events in other.sets.values() for event in events} == {3}


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
    with pytest.raises(DataError, match=f"must hold a table '{MUON_TABLE}'.*it holds other"):
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
