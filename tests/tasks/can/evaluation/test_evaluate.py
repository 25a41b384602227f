"""What an evaluation makes of windows and their scores, without a network: scores are given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from can_train.config.compose import RunRequest, evaluation_dataset, resolve
from can_train.config.resolved import EvaluationData, FinishedModel, ResolvedRun
from can_train.errors import CheckpointError, ConfigError, MissingDataError
from can_train.reporter import Reporter, SilentReporter
from can_train_tasks.can.data.graphs import Frames, id_text
from can_train_tasks.can.evaluation.evaluate import FITTED_BASELINES, WindowEvaluation, make_evaluation
from can_train_tasks.can.evaluation.options import AlarmRule, EvaluationOptions
from can_train_tasks.can.inputs import InputEncoder, InputStatistics
from can_train_tasks.can.models import build_network
from fakes.line_fit import Notices
from fakes.random_bus import random_frames, write_log

RESULT = {"judgement": {"threshold": 0.5, "threshold_rule": "max F1 on validation"}}


def run_on(path: Path, **values: object) -> ResolvedRun:
    settings = {"dataset.window": 20, "dataset.stride": 20, "paths.runs_dir": "runs", **values}
    return resolve(RunRequest(model="gat", size="student", dataset=str(path), values=settings))


def finished_on(path: Path, **values: object) -> FinishedModel:
    """A run whose network is as it was made."""
    run = run_on(path, **values)
    inputs = InputEncoder(InputStatistics.empty(3), embedding=run.model.embedding, dataset=run.dataset)
    weights = build_network(run.model, inputs).state_dict()
    return FinishedModel(run_id="a run", run=run, weights=weights, result=RESULT, sha256="")


def evaluation_of(
    finished: FinishedModel, place: Path, dataset: Path | None, *sets: str, reporter: Reporter | None = None
) -> WindowEvaluation:
    asked = EvaluationData(
        dataset=evaluation_dataset(finished.run, None if dataset is None else str(dataset), sets),
        own=dataset is None,
        data_root=place,
        cache=place / "cache",
        reporter=reporter or SilentReporter(),
        options=EvaluationOptions(),
    )
    return make_evaluation(finished, {}.__getitem__, asked)


def log(path: Path, seed: int = 0, frames: int = 1_000) -> Path:
    return write_log(path, random_frames(frames, seed))


def by_row(windows: Any, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Every third window is above the threshold."""
    return (rows % 3 == 0).astype(np.float64)[:, None]


def test_windows_are_listed_log_by_log_in_their_order_with_their_places(tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv"))
    for folder, name in (("test_02", "a.csv"), ("test_01", "b.csv"), ("test_01", "a.csv")):
        log(tmp_path / "set" / folder / name, seed=len(folder + name) + ord(name[0]) + int(folder[-1]), frames=210)
    samples = evaluation_of(finished, tmp_path, tmp_path / "set").judge(by_row, AlarmRule()).samples
    places = [Path(each).relative_to(tmp_path / "set").as_posix() for each in samples["log"]]
    assert places == ["test_01/a.csv"] * 10 + ["test_01/b.csv"] * 10 + ["test_02/a.csv"] * 10
    assert samples["folder"] == ["test_01"] * 20 + ["test_02"] * 10
    assert list(samples["window"]) == [*range(10)] * 3
    assert list(samples["first_frame"]) == [*range(0, 200, 20)] * 3


def test_a_score_stands_beside_the_window_that_has_it(tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv"))
    other = log(tmp_path / "other.csv", seed=1)
    samples = evaluation_of(finished, tmp_path, other).judge(by_row, AlarmRule()).samples
    assert list(samples["score"]) == [float(window % 3 == 0) for window in range(50)]
    assert list(samples["flagged"]) == [window % 3 == 0 for window in range(50)]


@pytest.mark.parametrize(("stride", "windows", "frames"), [(20, 50, 1_000), (7, 141, 1_000), (30, 33, 660)])
def test_frames_that_windows_share_count_once(stride: int, windows: int, frames: int, tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv"))
    evaluation = evaluation_of(finished, tmp_path, log(tmp_path / "other.csv", 1), f"dataset.stride={stride}")
    assert evaluation.counted == {"windows": windows, "frames": frames}


def test_ids_that_the_model_does_not_know_are_told_of(tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv"))
    other = log(tmp_path / "other.csv", seed=1)
    verdict = evaluation_of(finished, tmp_path, other).judge(by_row, AlarmRule())
    assert "knows 0 of the 12 CAN IDs" in verdict.notes[0]
    vocabulary = evaluation_of(finished, tmp_path, other)._data.flat.ids
    weights = {**finished.weights, "inputs.vocabulary": torch.from_numpy(vocabulary.copy())}
    grown = {name: value for name, value in weights.items() if name != "inputs.embedding.weight"}
    for name in ("inputs.id_mean", "inputs.id_std", "inputs.id_silence"):
        grown[name] = weights[name][:1].repeat_interleave(len(vocabulary) + 1, dim=0)
    grown["inputs.embedding.weight"] = torch.zeros(len(vocabulary) + 1, finished.run.model.embedding)
    verdict = evaluation_of(replace(finished, weights=grown), tmp_path, other).judge(by_row, AlarmRule())
    assert not any("CAN IDs" in note for note in verdict.notes)


@pytest.mark.parametrize(("test_share", "late_seed", "told"), [(0.2, 1, 3), (0.2, 2, 0), (0.0, 1, 0)])
def test_ids_that_only_the_windows_kept_for_validation_and_test_have_are_told_of(
    tmp_path: Path, test_share: float, late_seed: int, told: int
) -> None:
    early, late, other = random_frames(800, 0, 4), random_frames(200, 1, 3), random_frames(200, late_seed, 3)
    late.timestamp[:] += early.timestamp[-1]
    own = write_log(tmp_path / "own.csv", Frames.concatenate([early, late]))
    finished = finished_on(own, **{"dataset.validation_share": 0.1, "dataset.test_share": test_share})
    notices = Notices()
    evaluation_of(finished, tmp_path, write_log(tmp_path / "other.csv", other), reporter=notices)
    named = ", ".join(map(id_text, np.unique(other.can_id % 2**11)))
    whole = (
        f"{told} CAN IDs of these logs ({named}) occurred in no training window, but in those that were kept for "
        "validation and test; dataset.test_share=0 trains on more of the log"
    )
    assert notices.texts == [whole] * bool(told)


def test_a_run_that_kept_nothing_for_a_test_is_judged_on_other_logs_only(tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv"), **{"dataset.test_share": 0.0})
    with pytest.raises(ConfigError, match="No part of the log was kept for a test") as error:
        evaluation_of(finished, tmp_path, None)
    assert error.value.remedy == "Name another log: --dataset path/to/log"
    other = evaluation_of(finished, tmp_path, log(tmp_path / "other.csv", seed=1))
    assert other.counted["windows"] == 50


def test_a_model_without_ids_is_not_said_to_know_any(tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv"), **{"dataset.identity": False})
    verdict = evaluation_of(finished, tmp_path, log(tmp_path / "other.csv", 1)).judge(by_row, AlarmRule())
    assert not any("CAN IDs" in note for note in verdict.notes)


def test_baselines_that_need_training_windows_are_fitted_on_the_runs_own(tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv", frames=4_000))
    own = evaluation_of(finished, tmp_path, None).judge(by_row, AlarmRule())
    (judged,) = own.judgement["test"].values()
    assert set(judged["baselines"]) == {*FITTED_BASELINES, "flag_everything", "flag_nothing", "id_lookup"}
    assert "validation" in own.judgement
    other = evaluation_of(finished, tmp_path, log(tmp_path / "other.csv", 1)).judge(by_row, AlarmRule())
    assert "validation" not in other.judgement
    (judged,) = other.judgement["test"].values()
    assert set(judged["baselines"]) == {"flag_everything", "flag_nothing", "id_lookup"}
    assert judged["baselines"]["id_lookup"]["flagged_share"] == 1.0  # the run's vocabulary has none of these IDs
    assert "Missing from the tables: gap_lookup, silence, random_forest (they learn from training" in other.notes[-1]


def test_own_data_that_lie_elsewhere_by_now_keep_their_split(tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv"))
    moved = (tmp_path / "own.csv").rename(tmp_path / "moved.csv")
    evaluation = evaluation_of(finished, tmp_path, None, f"dataset.path={moved}")
    assert evaluation.own_split
    assert evaluation.counted["windows"] == 10


def test_other_data_take_over_windows_and_not_how_files_are_written(tmp_path: Path) -> None:
    columns = {"dataset.columns.id": "arbitration_id", "dataset.id_base": "hex"}
    run = run_on(log(tmp_path / "own.csv"), **columns)
    dataset = evaluation_dataset(run, str(log(tmp_path / "other.csv", 1)), ["dataset.max_malformed=0.5"])
    assert (dataset.window, dataset.stride, dataset.max_malformed) == (20, 20, 0.5)
    assert (dataset.columns.id, dataset.id_base, dataset.name) == ("", "auto", "other")


@pytest.mark.parametrize("sets", ["mode.validation_fpr=0.5", "dataset.windw=3", "window"])
def test_a_setting_that_has_nothing_to_do_with_reading_is_refused(sets: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keeps all settings|Unknown setting|takes group"):
        evaluation_dataset(run_on(log(tmp_path / "own.csv")), None, [sets])


def test_a_result_without_a_threshold_is_refused(tmp_path: Path) -> None:
    finished = replace(finished_on(log(tmp_path / "own.csv")), result={})
    with pytest.raises(CheckpointError, match="has no threshold"):
        evaluation_of(finished, tmp_path, None)


def test_a_layout_without_test_folders_has_nothing_to_judge(tmp_path: Path) -> None:
    finished = finished_on(log(tmp_path / "own.csv"))
    log(tmp_path / "set" / "train_01" / "DoS-1.csv")
    with pytest.raises(MissingDataError, match="holds no folder named test_"):
        evaluation_of(finished, tmp_path, tmp_path / "set")
