"""Balls that a trained model reports in pictures without labels, in files like the published ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import can_train
from can_train.cli.main import main
from can_train.reporter import SilentReporter
from can_train_tasks.tracknet.clips import read_clips, read_labels
from can_train_tasks.tracknet.rendering import render_missing, synthetic_folder
from can_train_tasks.tracknet.settings import SyntheticVideoSettings, TrackNetDatasetSettings
from can_train_tasks.tracknet.task import Found, Moment, TrackNetTask, detection_metrics

WIDTH, HEIGHT = 32, 18
VIDEO = SyntheticVideoSettings(seed=7, games=3, clips=2, frames=20, width=64)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on simulated games, which lie in `games` beside its runs; `frames` has the last one's pictures."""
    folder = tmp_path_factory.mktemp("balls")
    shutil.copytree(synthetic_folder(folder / "cache", VIDEO, SilentReporter()), folder / "games")
    shutil.copytree(folder / "games" / "game3", folder / "frames", ignore=shutil.ignore_patterns("*.csv"))
    settings = {"dataset.width": WIDTH, "dataset.height": HEIGHT, "model.width": 4, "model.levels": 2,
                "model.groups": 2, "task.threshold": 0.1}  # fmt: skip
    line = ["--task", "tracknet", "--dataset", str(folder / "games"), "--epochs", "8", "--batch-size", "4",
            "--lr", "0.02", "--precision", "fp32", "--device", "cpu", "-q", "--runs-dir", str(folder / "runs"),
            "--state-dir", str(folder / "state"),
            *(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))]  # fmt: skip
    assert main(line) == 0
    (made,) = (folder / "runs").iterdir()
    return made


def predict(run: Path, *words: str | Path) -> None:
    assert main(["predict", str(run), *map(str, words), "--device", "cpu", "-q"]) == 0


def test_files_without_labels_have_the_score_of_an_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run.parent.parent
    predict(run, "--dataset", folder / "frames", "--out", f"{tmp_path / 'balls'}/")
    samples, positions, reported = [], [], []
    true = read_clips(TrackNetDatasetSettings(path=str(folder / "games" / "game3")), render_missing)
    for clip in true:
        file = tmp_path / "balls" / f"{clip.name.rpartition('/')[2]}_ball.csv"
        assert file.read_text().startswith("Frame,Visibility,X,Y\n")
        # Our own reader takes the file for one of the published ones.
        balls = read_labels(file)
        samples += [Moment(clip=clip, position=at, size=(WIDTH, HEIGHT)) for at in range(len(clip))]
        width, height = clip.size
        positions += [((x + 0.5) * WIDTH / width - 0.5, (y + 0.5) * HEIGHT / height - 0.5)
                      for x, y in zip(balls.x, balls.y, strict=True)]  # fmt: skip
        reported += (balls.visibility == 1).tolist()
    found = Found(positions=np.array(positions), reported=np.array(reported))
    scored = detection_metrics(samples, found, 4.0 * WIDTH / 256)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--device", "cpu"]) == 0
    judged = json.loads(capsys.readouterr().out)["judgement"]["test"]["test"]["model"]
    assert any(reported)
    for name in ("precision", "recall", "f1"):
        assert scored[name] == judged[name]
    assert scored["position_error_px"] == pytest.approx(judged["position_error_px"], rel=1e-12)


def test_a_single_clip_has_the_columns_of_a_published_file(run: Path, tmp_path: Path) -> None:
    clip = next(path for path in sorted((run.parent.parent / "frames").iterdir()) if path.is_dir())
    predict(run, "--dataset", clip, "--out", tmp_path / "one.csv")
    predict(run, "--dataset", run.parent.parent / "frames", "--out", tmp_path / "all.csv")
    head, *rows = (tmp_path / "one.csv").read_text().splitlines()
    assert head == "Frame,Visibility,X,Y"
    assert len(rows) == 20
    every = (tmp_path / "all.csv").read_text().splitlines()
    assert every[0] == f"Clip,{head}"
    assert [f"{clip.name},{row}" for row in rows] == every[1:21]


def test_the_files_of_labelled_rallies_have_the_names_of_their_label_files(run: Path, tmp_path: Path) -> None:
    for number, clip in enumerate(sorted((run.parent.parent / "frames").glob("Clip*")), start=1):
        shutil.copytree(clip, tmp_path / "rallies" / f"1_0{number}_00")
        rows = "".join(f"{at},1,9,9\n" for at in range(20))
        (tmp_path / "rallies" / f"1_0{number}_00_ball.csv").write_text(f"Frame,Visibility,X,Y\n{rows}")
    model = can_train.load(run, device="cpu")
    task = TrackNetTask(replace(model.task.context, dataset=replace(model.task.dataset, path=str(tmp_path / "rallies")),
                                cache=tmp_path / "cache"))  # fmt: skip
    moments = task.sets["test"]
    columns = task.columns(moments, [(0.0, 0.0, 1.0)] * len(moments))
    column, pattern = TrackNetTask.prediction_parts
    assert {pattern.format(name) for name in columns[column]} == {"1_01_00_ball", "1_02_00_ball"}


def test_a_folder_without_pictures_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(run), "--dataset", str(tmp_path), "--device", "cpu"]) == 2
    assert "There are no pictures to predict" in capsys.readouterr().err


def test_a_loaded_model_finds_the_balls_of_a_folder(run: Path) -> None:
    model = can_train.load(run, device="cpu")
    balls = model.predict(model.read(str(run.parent.parent / "frames")))
    assert [ball.shape for ball in balls] == [(3,)] * 40
