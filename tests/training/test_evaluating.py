"""A finished run is judged once more, with the real reader, models and engine: as at its end, and on other logs."""

import gzip
import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import PathSettings
from can_train.config.settings import TrainingSettings
from can_train.errors import CheckpointError, ConfigError, DoesNotFitError
from can_train.fit.precision import Precision
from can_train.memory.meters import open_meter
from can_train.reporter import SilentReporter
from can_train.runs.run_folder import RunFolder
from can_train.training.evaluate import EvaluationRequest, Scorer, evaluate
from can_train.training.inference import InferenceDevice
from can_train.training.loading import Checkpoints, load_finished
from can_train_tasks.can.evaluation.options import EvaluationOptions
from can_train_tasks.can.reference_models import FinishedNetwork
from fakes.line_fit import Notices
from fakes.trained_runs import bus_log, finished_run, own_log
from fakes.windows_by_hand import windows_of

REAL_LOGS = Path(__file__).parents[2] / "../shared/data/can"
MODELS = ("gat", "vgae")


def evaluated(run: Path, dataset: Path | str | None = None, **more: Any) -> Mapping[str, Any]:
    """The document of an evaluation, on the CPU unless said otherwise."""
    request = EvaluationRequest(run=run, dataset=None if dataset is None else str(dataset), **{"device": "cpu", **more})
    return evaluate(request, SilentReporter()).document


def result_of(run: Path) -> dict[str, Any]:
    result = RunFolder(run).result()
    assert result is not None
    return result


def copied(run: Path, folder: Path, *, keep_places: bool = False) -> Path:
    """The run, as it comes to another machine: where it was trained is not there."""
    place = folder / run.name
    shutil.copytree(run, place)
    if keep_places:
        return place
    config = (place / "config.yaml").read_text().replace(str(run.parent.parent), str(folder / "elsewhere"))
    (place / "config.yaml").write_text(config)
    return place


def files(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("model", MODELS)
def test_a_run_judged_on_its_own_data_gets_the_figures_of_its_end_bit_by_bit(model: str) -> None:
    run = finished_run(model)
    assert evaluated(run)["judgement"] == result_of(run)["judgement"]


@pytest.mark.parametrize("model", MODELS)
def test_weights_that_are_off_by_a_hundredth_get_other_figures(model: str, tmp_path: Path) -> None:
    run = finished_run(model)
    mutant = copied(run, tmp_path, keep_places=True)
    checkpoints = Checkpoints(mutant / "checkpoints")
    state = checkpoints.newest()
    assert state is not None
    best = {name: 1.01 * value if value.is_floating_point() else value for name, value in state["best"].items()}
    checkpoints.save({**state, "best": best}, step=99)
    assert evaluated(mutant)["judgement"] != result_of(run)["judgement"]


def test_a_run_in_double_precision_loses_no_digit() -> None:
    run = finished_run("gat", training__precision="fp64")
    assert evaluated(run)["judgement"] == result_of(run)["judgement"]
    finished = load_finished(run)
    rebuilt = FinishedNetwork(finished, windows_of([[1, 2, 1]])).model.state_dict()
    assert all(torch.equal(rebuilt[name], value) for name, value in finished.weights.items())


def test_the_folder_of_the_run_is_never_touched() -> None:
    run = finished_run("gat")
    before = files(run)
    evaluated(run)
    assert files(run) == before


def test_a_damaged_checkpoint_is_an_error_that_leaves_the_folder_alone(tmp_path: Path) -> None:
    run = copied(finished_run("gat"), tmp_path)
    newest = json.loads((run / "checkpoints/manifest.json").read_text())["checkpoints"][0]["file"]
    (run / "checkpoints" / newest).write_bytes(b"torn")
    before = files(run)
    with pytest.raises(CheckpointError, match="The last checkpoint of this run is damaged"):
        evaluated(run)
    assert files(run) == before


def test_a_run_that_has_not_finished_is_refused_with_what_finishes_it(tmp_path: Path) -> None:
    run = copied(finished_run("gat"), tmp_path)
    (run / "result.json").unlink()
    with pytest.raises(CheckpointError, match=f"can-train resume {run}"):
        evaluated(run)


def test_the_whole_of_another_log_is_judged_by_the_threshold_of_validation(tmp_path: Path) -> None:
    run = finished_run("gat")
    document = evaluated(run, bus_log(tmp_path / "other.csv", seed=1))
    assert (document["windows"], document["frames"], document["own_split"]) == (200, 4_000, False)
    assert document["threshold"] == result_of(run)["judgement"]["threshold"]
    assert document["threshold_rule"] == "max F1 on validation, in drive"
    folder = document["judgement"]["test"]["other.csv"]
    assert list(folder["baselines"]) == ["flag_everything", "flag_nothing", "id_lookup"]
    assert set(document["judgement"]["absent"]) == {"gap_lookup", "silence", "random_forest"}


def test_a_copied_run_judges_without_the_machine_that_trained_it(tmp_path: Path) -> None:
    run, other = finished_run("vgae"), bus_log(tmp_path / "other.csv", seed=1)
    paths = PathSettings(state_dir=str(tmp_path / "state"))
    assert evaluated(copied(run, tmp_path), other, paths=paths)["judgement"] == evaluated(run, other)["judgement"]


def test_a_given_threshold_decides_and_is_said(tmp_path: Path) -> None:
    document = evaluated(
        finished_run("gat"), bus_log(tmp_path / "other.csv", seed=1), options=EvaluationOptions(threshold=1e6)
    )
    assert (document["threshold"], document["threshold_rule"]) == (1e6, "as given")
    assert document["judgement"]["test"]["other.csv"]["model"]["flagged_share"] == 0


def test_the_runs_own_log_named_by_its_path_is_judged_on_its_own_split() -> None:
    run = finished_run("gat")
    document = evaluated(run, own_log(run))
    assert document["own_split"]
    assert document["judgement"] == result_of(run)["judgement"]


@pytest.mark.parametrize("compressed", [False, True])
def test_what_was_trained_on_is_left_out_of_a_copy(compressed: bool, tmp_path: Path) -> None:
    run, notices = finished_run("gat"), Notices()
    copy = tmp_path / ("copy.csv.gz" if compressed else "copy.csv")
    content = own_log(run).read_bytes()
    copy.write_bytes(gzip.compress(content) if compressed else content)
    bus_log(tmp_path / "other.csv", seed=1)
    whole = len(content.splitlines()) // 20
    document = evaluate(EvaluationRequest(run=run, dataset=str(tmp_path), device="cpu"), notices).document
    told = [text for text in notices.texts if "trained on 1 of these 2 logs" in text]
    assert len(told) == 1
    assert str(copy) in told[0]
    judged = document["judgement"]["test"]
    assert judged["other.csv"]["model"]["windows"] == 200
    assert judged[copy.name]["model"]["windows"] == pytest.approx(whole / 5, abs=1)


def test_the_test_folders_of_a_layout_are_judged_each_by_itself(tmp_path: Path) -> None:
    for number, folder in enumerate(("train_01", "test_01", "test_02")):
        bus_log(tmp_path / folder / "DoS-1.csv", seed=number, frames=1_000)
    document = evaluated(finished_run("gat"), tmp_path)
    assert list(document["judgement"]["test"]) == ["test_01", "test_02"]
    assert document["windows"] == 100


def test_memory_that_runs_out_changes_what_is_flagged_in_nothing(tmp_path: Path) -> None:
    run, other = finished_run("gat"), bus_log(tmp_path / "other.csv", seed=1, frames=20_000)
    whole = evaluated(run, other)["judgement"]["test"]["other.csv"]["model"]
    scarce = evaluated(run, other, device="sim:3MiB")["judgement"]["test"]["other.csv"]["model"]
    assert {name: scarce[name] for name in ("recall", "precision", "windows")} == {
        name: whole[name] for name in ("recall", "precision", "windows")
    }


@pytest.mark.parametrize(
    ("sets", "rule"),
    [
        ("dataset.window=10", "dataset.window cannot be changed, since the model is bound to it"),
        ("dataset.identity=false", "dataset.identity cannot be changed"),
        ("training.lr=1", "keeps all settings but its data's"),
        ("dataset.winow=10", "Unknown setting"),
    ],
)
def test_what_the_model_is_bound_to_cannot_be_set(sets: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rule):
        evaluated(finished_run("gat"), bus_log(tmp_path / "other.csv"), sets=(sets,))


@pytest.mark.parametrize("sets", ["dataset.stride=10", "dataset.test_share=0.4", "dataset.synthetic.seed=3"])
def test_what_cuts_the_runs_own_data_cannot_be_set(sets: str) -> None:
    with pytest.raises(ConfigError, match="it tells what the run was trained on"):
        evaluated(finished_run("gat"), sets=(sets,))


def test_windows_of_another_log_may_overlap(tmp_path: Path) -> None:
    other = bus_log(tmp_path / "other.csv", seed=1, frames=1_000)
    document = evaluated(finished_run("gat"), other, sets=("dataset.stride=10",))
    assert (document["windows"], document["frames"]) == (99, 1_000)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_scores_of_single_windows_say_what_was_flagged_and_when(ending: str, tmp_path: Path) -> None:
    run, path = finished_run("vgae"), tmp_path / f"scores.{ending}"
    for name, seed in (("b.csv", 1), ("a.csv", 2)):
        bus_log(tmp_path / "logs" / name, seed=seed, frames=1_000)
    document = evaluated(run, tmp_path / "logs", scores=path)
    table = (pl.read_csv if ending == "csv" else pl.read_parquet)(path)
    assert table.columns == [
        "log", "folder", "window", "first_frame", "start_time", "end_time", "score", "flagged", "label",
    ]  # fmt: skip
    assert table["log"].to_list() == sorted(table["log"])
    for name, judged in document["judgement"]["test"].items():
        own = table.filter(pl.col("folder") == name)
        assert own["window"].to_list() == list(range(50))
        assert own["first_frame"].to_list() == list(range(0, 1_000, 20))
        assert own["flagged"].mean() == pytest.approx(judged["model"]["flagged_share"])
        assert (own["label"] != "benign").sum() == judged["model"]["attack_windows"]
    assert (table["flagged"] == (table["score"] > document["threshold"])).all()
    assert (table["end_time"] > table["start_time"]).all()


def test_windows_of_a_log_without_labels_have_none(tmp_path: Path) -> None:
    log = bus_log(tmp_path / "plain.csv", frames=1_000)
    rows = [line.rpartition(",")[0] for line in log.read_text().splitlines()]
    log.write_text("\n".join(rows) + "\n")
    document = evaluated(finished_run("gat"), log, scores=tmp_path / "scores.csv")
    assert pl.read_csv(tmp_path / "scores.csv")["label"].null_count() == 50
    assert "labels absent" in document["judgement"]["test"]["plain.csv"]["remarks"][0]


@pytest.mark.parametrize(
    ("name", "rule"), [("scores.txt", "CSV or Parquet"), ("no/scores.csv", "is not there"), ("f.csv", "is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(name: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "f.csv").mkdir()
    with pytest.raises(ConfigError, match=rule):
        evaluated(tmp_path / "no such run", scores=tmp_path / name)


@pytest.mark.parametrize("name", ["labeled_TSC1.csv", "normal.log", "Attack_free_dataset_10k.txt"])
def test_a_real_log_is_judged(name: str) -> None:
    log = REAL_LOGS / name
    if not log.exists():
        pytest.skip(f"{log} is not here")
    document = evaluated(finished_run("gat"), log)
    assert document["windows"] == document["frames"] // 20
    assert np.isfinite(document["threshold"])
    json.dumps(dict(document), allow_nan=False)


def test_a_short_benign_log_of_a_truck_finds_the_attack_in_another_without_a_false_alarm() -> None:
    benign, attacked = REAL_LOGS / "normal.log", REAL_LOGS / "labeled_TSC1.csv"
    if not attacked.exists():
        pytest.skip(f"{attacked} is not here")
    whole = {"dataset__window": 100, "dataset__stride": 100, "training__epochs": 6}
    run = finished_run("vgae", log=lambda place: Path(shutil.copy(benign, place.with_name(benign.name))), **whole)
    assert [table["title"] for table in result_of(run)["summary_tables"]] == ["Nothing was judged"]
    (judged,) = evaluated(run, attacked)["judgement"]["test"].values()
    assert judged["model"]["mcc"] >= 0.95


def test_a_device_that_does_not_hold_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="A model must fit on the device"):
        evaluated(finished_run("gat"), bus_log(tmp_path / "other.csv"), device="sim:1KiB")


class Greedy:
    """Samples of which the fourth never fits."""

    model = nn.Linear(1, 1)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        if 3 in rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.from_numpy(rows)[:, None].to(dtype)

    def describe(self, row: int) -> str:
        return f"sample {row} of the greedy"


def test_a_sample_that_does_not_fit_is_named_and_all_others_are_scored() -> None:
    device = InferenceDevice(meter=open_meter("cpu"), precision=Precision.named("fp32"))
    score = Scorer(TrainingSettings(oom_retries=0), device)
    with pytest.raises(DoesNotFitError, match="sample 3 of the greedy"):
        score(Greedy(), np.arange(8))
    assert score(Greedy(), np.arange(4, 900)).ravel().tolist() == list(range(4, 900))
