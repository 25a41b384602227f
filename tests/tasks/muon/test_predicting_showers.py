"""Showers that a trained model draws for primaries without muons."""

import json
from pathlib import Path

import h5py
import numpy as np
import polars as pl
import pytest

import can_train
from can_train.cli.main import main
from can_train.reporter import SilentReporter
from can_train_tasks.muon.settings import VARIABLES, ShowerDatasetSettings, SyntheticShowerSettings
from can_train_tasks.muon.shower_metrics import wasserstein_distances
from can_train_tasks.muon.showers import read_showers
from can_train_tasks.muon.synthetic_showers import synthetic_files

PRIMARIES = ["event", "primary_id", "primary_E_GeV", "primary_zenith_rad", "depth_g_cm2"]
MUON = {"x": "x_m", "y": "y_m", "energy": "muon_E_GeV", "time": "t_ns"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on 40 simulated showers in `showers.parquet` beside its runs; `primaries.*` lack the muons."""
    folder = tmp_path_factory.mktemp("showers")
    settings = SyntheticShowerSettings(showers=40, files=1, muons_per_pev=30.0)
    (file,) = synthetic_files(folder / "cache", settings, SilentReporter())
    frame = pl.read_parquet(file)
    frame.write_parquet(folder / "showers.parquet")
    lists = [name for name, kind in frame.schema.items() if isinstance(kind, pl.List)]
    primaries = (frame.drop(lists) if lists else frame).select(name for name in PRIMARIES if name in frame.columns)
    primaries = primaries.unique("event", maintain_order=True)
    primaries.write_csv(folder / "primaries.csv")
    primaries.write_parquet(folder / "primaries.parquet")
    with h5py.File(folder / "primaries.h5", "w") as written:
        written["primaries"] = primaries.to_numpy(structured=True)
    line = ["--task", "muon", "--dataset", str(folder / "showers.parquet"), "--epochs", "2", "--set", "model.hidden=8",
            "--device", "cpu", "-q", "--runs-dir", str(folder / "runs"),
            "--state-dir", str(folder / "state")]  # fmt: skip
    assert main(line) == 0
    (made,) = (folder / "runs").iterdir()
    return made


def predict(run: Path, *words: str | Path) -> None:
    assert main(["predict", str(run), *map(str, words), "--device", "cpu", "-q"]) == 0


def normalised(frame: pl.DataFrame) -> np.ndarray:
    """The muons [n, V] of a shower as the task has them."""
    x, y, energy, time = (frame[name].to_numpy() for name in MUON.values())
    return np.stack([x / 500.0, y / 500.0, np.log10(energy), np.log10(time + 1.0)], axis=1)


def test_showers_drawn_without_the_real_ones_have_the_score_of_an_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run.parent.parent
    predict(run, "--dataset", folder / "primaries.csv", "--out", tmp_path / "drawn.parquet")
    drawn = pl.read_parquet(tmp_path / "drawn.parquet").partition_by("event", maintain_order=True)
    real = read_showers([folder / "showers.parquet"], ShowerDatasetSettings(path="showers.parquet"))
    assert len(drawn) == len(real) == 40
    # The test showers: the last of those that are shuffled for validation and test.
    shuffled = np.random.default_rng(0).permutation(40)
    tested = np.sort(shuffled[4:12])
    starts = np.cumsum(real.counts) - real.counts
    columns = [real.muons["x"] / 500.0, real.muons["y"] / 500.0, np.log10(real.muons["energy"]),
               np.log10(real.muons["time"] + 1.0)]  # fmt: skip
    muons = np.stack(columns, axis=1).astype(np.float32).astype(np.float64)
    truth = [muons[starts[row] : starts[row] + real.counts[row]] for row in tested]
    names = ["w1_x_m", "w1_y_m", "w1_log10_energy", "w1_log10_delay"]
    scored = wasserstein_distances(truth, [normalised(drawn[row]) for row in tested], names, [500.0, 500.0, 1.0, 1.0])
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--device", "cpu"]) == 0
    judged = json.loads(capsys.readouterr().out)["judgement"]["test"]["test"]["model"]
    # The file has single precision, which some processors round otherwise in batches of another size.
    for name, value in scored.items():
        assert value == pytest.approx(judged[name], rel=1e-6), name


@pytest.mark.parametrize("ending", ["parquet", "csv", "h5"])
def test_each_format_is_read_back_as_showers(run: Path, tmp_path: Path, ending: str) -> None:
    folder = run.parent.parent
    predict(run, "--dataset", folder / f"primaries.{ending}", "--out", tmp_path / f"drawn.{ending}")
    predict(run, "--dataset", folder / "primaries.parquet", "--out", tmp_path / "reference.parquet")
    settings = ShowerDatasetSettings(path="drawn")
    drawn, reference, real = (
        read_showers([path], settings)
        for path in (tmp_path / f"drawn.{ending}", tmp_path / "reference.parquet", folder / "showers.parquet")
    )
    assert np.array_equal(drawn.counts, reference.counts)
    for name in VARIABLES:
        assert np.array_equal(drawn.muons[name], reference.muons[name])
    for name in ("energy_gev", "zenith_rad", "mass", "depth_g_cm2"):
        assert np.array_equal(getattr(drawn, name), getattr(real, name))


@pytest.mark.parametrize("ending", ["parquet", "csv", "h5"])
def test_drawn_showers_keep_numbers_of_64_bits(run: Path, tmp_path: Path, ending: str) -> None:
    event = [2**63 + 3, 2**60 + 1, 2**60 + 2]
    columns = {"event": pl.Series(event, dtype=pl.UInt64), "primary_E_GeV": 1e6, "primary_zenith_rad": 0.1,
               "primary_id": 14}  # fmt: skip
    pl.DataFrame(columns).write_parquet(tmp_path / "primaries.parquet")
    out = tmp_path / f"drawn.{ending}"
    predict(run, "--dataset", tmp_path / "primaries.parquet", "--out", out)
    if ending == "h5":
        with h5py.File(out) as file:
            drawn = file["muons"]["event"].tolist()
    else:
        drawn = (pl.read_csv(out) if ending == "csv" else pl.read_parquet(out))["event"].to_list()
    assert [*dict.fromkeys(map(int, drawn))] == event


def test_another_seed_draws_other_showers(run: Path, tmp_path: Path) -> None:
    data = run.parent.parent / "primaries.csv"
    seeds = {"first.csv": "0", "again.csv": "0", "other.csv": "1"}
    for name, seed in seeds.items():
        predict(run, "--dataset", data, "--out", tmp_path / name, "--set", f"task.draw_seed={seed}")
    first, again, other = ((tmp_path / name).read_text() for name in seeds)
    assert first == again != other
    # A shower is the same where no others follow it.
    few = tmp_path / "few.csv"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:6]))
    predict(run, "--dataset", few, "--out", tmp_path / "few_drawn.csv", "--set", "task.draw_seed=1")
    sizes = pl.read_csv(tmp_path / "other.csv").group_by("event", maintain_order=True).len()["len"].to_list()
    assert (
        pl.read_csv(tmp_path / "few_drawn.csv").group_by("event", maintain_order=True).len()["len"].to_list()
        == sizes[:5]
    )


def test_a_shower_does_not_depend_on_the_batch_that_it_is_drawn_in(run: Path, tmp_path: Path) -> None:
    data = run.parent.parent / "primaries.csv"
    predict(run, "--dataset", data, "--out", tmp_path / "one.parquet", "--batch-size", "3")
    predict(run, "--dataset", data, "--out", tmp_path / "all.parquet")
    one, every = (pl.read_parquet(tmp_path / name) for name in ("one.parquet", "all.parquet"))
    assert one["event"].equals(every["event"])
    assert np.allclose(one["x_m"], every["x_m"], rtol=1e-4, atol=1e-2)


def test_a_primary_that_is_no_nucleus_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photon.csv").write_text("primary_E_GeV,primary_zenith_rad,primary_id\n1e5,0.1,14\n1e5,0.1,1\n")
    assert main(["predict", str(run), "--dataset", str(tmp_path / "photon.csv"), "--device", "cpu"]) == 2
    assert "photon.csv, primary 2: primary_id must be CORSIKA's number" in " ".join(capsys.readouterr().err.split())


def test_the_training_showers_may_be_gone(run: Path, tmp_path: Path) -> None:
    folder = run.parent.parent
    moved = (folder / "showers.parquet").rename(tmp_path / "moved.parquet")
    try:
        model = can_train.load(run, device="cpu")
        drawn = model.predict(model.read(str(folder / "primaries.csv")))
    finally:
        moved.rename(folder / "showers.parquet")
    assert [muons.shape[1] for muons in drawn] == [4] * 40


@pytest.mark.parametrize("ending", ["csv", "parquet", "h5"])
def test_primaries_come_through_a_pipe_in_each_format(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    file = run.parent.parent / f"primaries.{ending}"
    predict(run, "--dataset", file, "--out", tmp_path / "of_file.csv")
    with file.open() as piped:
        monkeypatch.setattr("sys.stdin", piped)
        predict(run, "--dataset", "-", "--out", tmp_path / "of_pipe.csv")
    assert (tmp_path / "of_pipe.csv").read_text() == (tmp_path / "of_file.csv").read_text()
