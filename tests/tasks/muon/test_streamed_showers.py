"""Files of events and of primaries are read part by part: memory does not grow with a file beyond the arrays of its
muons.
"""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import polars
import pytest

from can_train.config.compose import RunRequest, resolve
from can_train.errors import DataError
from can_train.training.sample_task import TaskContext
from can_train.training.streams import is_stream
from can_train_tasks.muon import event_table, primaries, showers
from can_train_tasks.muon import task as muon
from can_train_tasks.muon.event_table import EventTable
from can_train_tasks.muon.primaries import PrimaryFile
from can_train_tasks.muon.settings import MuonGanSettings, MuonSettings, ShowerDatasetSettings
from can_train_tasks.muon.showers import ShowerReader, read_showers, shower_files
from can_train_tasks.muon.task import MuonTask
from fakes.muon_tasks import muon_task

COUNTS = [3, 0, 1, 7, 0, 0, 2, 5, 1, 4, 2, 6]
MIB = 2**20


def write_events(path: Path, counts: Any, *, width: int = 4, bad: int | None = None) -> Path:
    """Writes events of random primaries and muons as cr_muons does; the mass of the primary number `bad` is wrong."""
    rng = np.random.default_rng(0)
    counts = np.asarray(counts)
    mass = rng.choice([1.0, 4.0, 56.0], len(counts))
    if bad is not None:
        mass[bad - 1] = 0.1
    of_primary = np.stack([rng.uniform(1e5, 1e6, len(counts)), rng.uniform(0, 1, len(counts)), mass,
                           rng.uniform(700, 1000, len(counts))], axis=1)  # fmt: skip
    muons = rng.uniform(1, 100, (counts.sum(), width))
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["primaries"], file["muons"], file["counts"] = of_primary, muons, counts
        return path
    row = polars.List(polars.Float64)
    events = polars.DataFrame({"event": np.arange(len(counts)), "primary": polars.Series(of_primary).cast(row)})
    of_muons = polars.DataFrame(
        {"event": np.repeat(np.arange(len(counts)), counts), "muons": polars.Series(muons).cast(row)}
    )
    lists = of_muons.group_by("event", maintain_order=True).agg("muons")
    frame = events.join(lists, on="event", how="left", maintain_order="left").select(
        "primary", polars.col("muons").fill_null([])
    )
    frame.write_parquet(path, row_group_size=4000)
    return path


def smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_PART_EVENTS", 3), ("_PART_MUONS", 6), ("_PART_BYTES", 1)):
        monkeypatch.setattr(showers, name, size)
    monkeypatch.setattr(primaries, "_PART_ROWS", 3)


@pytest.mark.parametrize("ending", ["h5", "parquet"])
def test_parts_have_the_showers_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    path, dataset = write_events(tmp_path / f"a.{ending}", COUNTS), ShowerDatasetSettings(path="a")
    whole = read_showers([path], dataset)
    smaller_parts(monkeypatch)
    reader = ShowerReader([path], dataset)
    assert len([*reader]) > 3
    again = read_showers([path], dataset)
    assert (whole.empty, again.empty, reader.empty) == (3, 3, 3)
    assert whole.counts.tolist() == [count for count in COUNTS if count]
    for name in ("energy_gev", "zenith_rad", "mass", "depth_g_cm2", "counts"):
        assert np.array_equal(getattr(whole, name), getattr(again, name))
    assert all(np.array_equal(whole.muons[name], again.muons[name]) for name in whole.muons)


@pytest.mark.parametrize("ending", ["h5", "parquet"])
def test_an_event_of_a_later_part_is_named_by_its_number_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    smaller_parts(monkeypatch)
    path = write_events(tmp_path / f"a.{ending}", COUNTS, bad=11)
    with pytest.raises(DataError, match="event 11: mass must be"):
        read_showers([path], ShowerDatasetSettings(path="a"))
    with pytest.raises(DataError, match="event 11: mass must be"):
        PrimaryFile(path, 1.0)


def test_a_distance_from_the_axis_that_a_later_part_does_not_have_is_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller_parts(monkeypatch)
    path = tmp_path / "a.h5"
    rows = [[2.0, 5.0, 3.0, 4.0]] * 12
    for last, learned in (
        ([2.0, 5.0, 3.0, 4.0], ["x", "y", "energy"]),
        ([2.0, 9.0, 3.0, 4.0], ["x", "y", "energy", "time"]),
    ):
        with h5py.File(path, "w") as file:
            file["primaries"], file["counts"] = [[1e5, 0.1, 1.0, 700.0]] * 12, [1] * 12
            file["muons"] = [*rows[:-1], last]
        assert ShowerReader([path], ShowerDatasetSettings(path="a")).variables == learned


def test_a_file_of_events_that_are_all_empty_is_refused(tmp_path: Path) -> None:
    path = write_events(tmp_path / "a.h5", [0, 0, 0])
    with pytest.raises(DataError, match="must hold muons"):
        read_showers([path], ShowerDatasetSettings(path="a"))


def test_moments_are_the_same_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = muon_task(tmp_path)
    task.datasets()
    monkeypatch.setattr(event_table, "_BLOCK", 7)
    again = muon_task(tmp_path)
    again.datasets()
    for name, values in vars(task._moments).items():
        assert np.allclose(values, getattr(again._moments, name), rtol=1e-9, atol=0)


def grown(measure: Callable[[Path], Any], small: Path, large: Path) -> tuple[Any, Any]:
    """What reading returns of two files, and the peaks of memory of Python and numpy meanwhile, in bytes."""
    results, peaks = [], []
    measure(small)
    for path in (small, large):
        tracemalloc.start()
        results.append(measure(path))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return results, peaks


def table_of(path: Path) -> EventTable:
    reader = ShowerReader([path], ShowerDatasetSettings(path=str(path)))
    task = MuonTask(TaskContext(settings=MuonSettings(), dataset=ShowerDatasetSettings(path=str(path)),
                                model=MuonGanSettings()))  # fmt: skip
    table = task._read_within_limit(reader, [path])
    task._sets_of(table)
    return table


def test_reading_a_file_of_events_takes_the_memory_of_its_arrays_once(tmp_path: Path) -> None:
    small, large = (write_events(tmp_path / f"{size}.h5", np.full(size, 20)) for size in (15_000, 60_000))
    tables, peaks = grown(table_of, small, large)
    arrays = tables[1].nbytes - tables[0].nbytes
    assert arrays > 15 * MIB
    assert peaks[1] - peaks[0] <= 1.2 * arrays
    # The mutant: the file as a whole.
    _, peaks = grown(lambda path: read_showers([path], ShowerDatasetSettings(path="a")), small, large)
    assert peaks[1] - peaks[0] > 2 * arrays


PEAK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tasks.muon.test_streamed_showers import table_of, write_events
table_of(Path(sys.argv[1]).with_name("warm.parquet"))
table = table_of(Path(sys.argv[1]))
# Not getrusage: its peak has that of the process that started this one.
(peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(table.nbytes, int(peak) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_reads_parquet_grows_by_the_arrays_of_the_events(tmp_path: Path) -> None:
    write_events(tmp_path / "warm.parquet", np.full(1000, 20))
    peaks, arrays, files = [], [], []
    for size in (20_000, 120_000):
        path = write_events(tmp_path / f"{size}.parquet", np.full(size, 20))
        tests = Path(__file__).parents[2]
        line = [sys.executable, "-P", "-c", PEAK, str(path), str(tests)]
        shown = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
        arrays.append(int(shown[0]))
        peaks.append(int(shown[1]))
        files.append(path.stat().st_size)
    # The pages of the file count, too: polars maps it into memory.
    assert peaks[1] - peaks[0] <= 1.3 * (arrays[1] - arrays[0]) + files[1] - files[0]


STATE = {"expectation": [1.0, 0.0, 0.0, 0.0, 0.0], "mean": [0.0] * 3, "deviation": [1.0] * 3, "parts": 1,
         "variables": ["x", "y", "energy"]}  # fmt: skip


def primaries_of(path: Path, seed: int = 0) -> Any:
    context = TaskContext(settings=MuonSettings(draw_seed=seed), dataset=ShowerDatasetSettings(path=str(path)),
                          model=MuonGanSettings(), state=STATE)  # fmt: skip
    return MuonTask(context).samples_to_predict()


@pytest.mark.parametrize("seed", [0, 1])
def test_primaries_are_streamed_in_flat_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(muon, "_MOST_NUMBERED", 1000)
    monkeypatch.setattr(primaries, "_PART_ROWS", 2**10)
    paths = [tmp_path / f"{size}.h5" for size in (6_000, 24_000)]
    for path in paths:
        with h5py.File(path, "w") as file:
            file["primaries"] = np.tile([1e5, 0.1, 1.0, 700.0], (int(path.stem), 1))
    counts, peaks = grown(lambda path: sum(1 for _ in primaries_of(path, seed)), *paths)
    assert counts == [6_000, 24_000]
    assert peaks[1] - peaks[0] < 0.1 * MIB
    # The mutant: all of them in a list take a kibibyte each.
    _, peaks = grown(lambda path: [*primaries_of(path, seed)], *(paths[0], paths[0]))
    assert peaks[0] > 2 * MIB
    assert is_stream(primaries_of(paths[0]))


@pytest.mark.parametrize("ending", ["csv", "parquet", "h5"])
@pytest.mark.parametrize("ascends", [True, False])
def test_the_first_line_of_each_shower_counts_in_whatever_part_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, ascends: bool
) -> None:
    event = [1, 1, 1, 1, 2, 3, 3, 3, 5, 6, 6] if ascends else [3, 1, 3, 3, 1, 2, 2, 3, 5, 1, 4]
    frame = polars.DataFrame({"event": event, "primary_E_GeV": [1e5 + line for line in range(len(event))],
                              "primary_zenith_rad": 0.1, "primary_id": 14})  # fmt: skip
    path = tmp_path / f"a.{ending}"
    if ending == "h5":
        with h5py.File(path, "w") as file:
            file["muons"] = frame.to_numpy(structured=True)
    else:
        frame.write_csv(path) if ending == "csv" else frame.write_parquet(path)
    smaller_parts(monkeypatch)
    file_of = PrimaryFile(path, 1000.0)
    read = [
        (int(number), energy) for part in file_of for number, energy in zip(part.event, part.energy_gev, strict=True)
    ]
    first = {number: 1e5 + event.index(number) for number in dict.fromkeys(event)}
    assert read == [*first.items()]
    assert len(file_of) == len(first)


def test_showers_above_a_million_are_numbered_as_the_files_number_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_events(tmp_path / "a.h5", np.ones(20, int))
    few = [event.seed for event in primaries_of(path)]
    assert sorted(few) == list(range(20)) != few
    monkeypatch.setattr(muon, "_MOST_NUMBERED", 19)
    assert [event.seed for event in primaries_of(path)] == list(range(20))


def test_the_recipe_of_cr_muons_is_a_data_set_under_the_data_root(tmp_path: Path) -> None:
    (tmp_path / "cr_muons").mkdir()
    path = write_events(tmp_path / "cr_muons/a.parquet", COUNTS)
    run = resolve(RunRequest(task="muon", dataset="cr_muons"))
    assert shower_files(run.dataset, tmp_path) == [path]
    assert (run.settings.critic_steps, run.settings.gradient_penalty) == (5, 0.0)
    training = run.training
    assert (training.batch_size, training.optimizer, training.lr, training.tf32) == (48_000, "sgd", 2e-5, True)
    assert (dict(training.optimizer_args), training.grad_clip_norm) == ({"momentum": 0.5}, 1e7)
    other = resolve(RunRequest(task="muon", dataset="cr_muons", sets=(f"dataset.path={path}",)))
    assert shower_files(other.dataset, tmp_path / "elsewhere") == [path]
