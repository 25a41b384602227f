"""Classes that a trained model gives windows of recordings without labels."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import can_train
from can_train.cli.main import main
from can_train_tasks.bendr.class_metrics import classification_metrics
from fakes.eeg import EYE_STATE, noise, write_recording

SECONDS, HZ = 60, 32
SETTINGS = {
    "dataset.sampling_hz": HZ, "dataset.window_s": 1, "dataset.gap_s": 0, "model.hidden": 8, "model.layers": 1,
    "model.heads": 2, "model.feedforward": 8, "model.groups": 2, "model.position_kernel": 5,
}  # fmt: skip


def recording(path: Path, seed: int, *, labelled: bool) -> Path:
    """A recording whose class changes every ten seconds, and whose first channel swings more in one of them."""
    labels = np.arange(SECONDS * HZ) // (10 * HZ) % 2
    signal = noise(len(labels), 3, seed) * (1 + 2 * labels[:, None] * [1, 0, 0])
    return write_recording(path, signal, labels if labelled else None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on two recordings in the folder `labelled` beside its runs; `bare` has them without labels."""
    folder = tmp_path_factory.mktemp("classes")
    for name, labelled in (("labelled", True), ("bare", False)):
        (folder / name).mkdir()
        for seed in range(2):
            recording(folder / name / f"night_{seed}.csv", seed, labelled=labelled)
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    line = ["--task", "bendr", "--mode", "classify", "--dataset", str(folder / "labelled"), "--epochs", "3",
            "--lr", "0.01", *settings, "--device", "cpu", "-q", "--runs-dir", str(folder / "runs"),
            "--state-dir", str(folder / "state")]  # fmt: skip
    assert main(line) == 0
    (made,) = (folder / "runs").iterdir()
    return made


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def predict(run: Path, *words: str | Path) -> None:
    assert main(["predict", str(run), *map(str, words), "--device", "cpu", "-q"]) == 0


def test_windows_without_labels_have_the_score_of_an_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predict(run, "--dataset", run.parent.parent / "bare", "--out", tmp_path / "out.csv")
    # The test stretch is the last fifth of each recording.
    rows = [row for row in rows_of(tmp_path / "out.csv") if float(row["start_s"]) >= 0.8 * SECONDS]
    truth = np.array([int(float(row["start_s"]) // 10) % 2 for row in rows])
    shares = np.array([[float(row["probability_0"]), float(row["probability_1"])] for row in rows])
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--device", "cpu"]) == 0
    judged = json.loads(capsys.readouterr().out)["judgement"]["test"]["test"]["model"]
    scored = classification_metrics(truth, shares)
    assert scored == {name: judged[name] for name in scored}
    assert judged["auroc"] != 0.5
    assert [int(row["class"]) for row in rows] == shares.argmax(axis=1).tolist()


def judged_on(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, float]]:
    capsys.readouterr()
    assert main(["evaluate", str(run), "--dataset", str(data), "--json", "--device", "cpu"]) == 0
    document = json.loads(capsys.readouterr().out)
    return document["samples"], document["judgement"]["test"]["test"]["model"]


def test_a_recording_that_the_run_never_saw_is_evaluated_as_a_whole(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = recording(tmp_path / "new.csv", 7, labelled=True)
    samples, judged = judged_on(run, new, capsys)
    assert samples == SECONDS
    predict(run, "--dataset", new, "--out", tmp_path / "out.csv")
    rows = rows_of(tmp_path / "out.csv")
    shares = np.array([[float(row["probability_0"]), float(row["probability_1"])] for row in rows])
    scored = classification_metrics(np.arange(SECONDS) // 10 % 2, shares)
    assert scored == {name: judged[name] for name in scored}
    samples, _ = judged_on(run, run.parent.parent / "labelled" / "night_0.csv", capsys)
    assert samples == SECONDS // 5


def test_an_evaluation_finds_the_channels_of_a_run_by_their_names(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, turned = recording(tmp_path / "new.csv", 7, labelled=True), tmp_path / "turned.csv"
    with new.open() as file, turned.open("w", newline="") as copy:
        csv.writer(copy).writerows([row[3], row[2], "0" if number else "extra", row[0], row[1]]
                                   for number, row in enumerate(csv.reader(file)))  # fmt: skip
    assert judged_on(run, turned, capsys) == judged_on(run, new, capsys)


@pytest.mark.slow
@pytest.mark.skipif(not EYE_STATE.is_file(), reason=f"{EYE_STATE} is not there")
def test_a_published_recording_without_labels_is_cut_from_its_beginning(tmp_path: Path) -> None:
    lines = ["--set", "dataset.cycles=4", *(word for name, value in SETTINGS.items() if name.startswith("model.")
             for word in ("--set", f"{name}={value}"))]  # fmt: skip
    folders = ["--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state"), "--device", "cpu", "-q"]
    line = ["--task", "bendr", "--mode", "classify", "--dataset", str(EYE_STATE), "--epochs", "1", *lines]
    assert main([*line, *folders]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    rows = [row[:-1] for row in csv.reader(EYE_STATE.read_text().splitlines())]
    bare = tmp_path / "bare.csv"
    bare.write_text("".join(",".join(row) + "\n" for row in rows))
    predict(made, "--dataset", bare, "--out", tmp_path / "out.csv")
    windows = rows_of(tmp_path / "out.csv")
    assert [float(row["start_s"]) for row in windows] == list(range(0, 2 * len(windows), 2))
    assert len(windows) == (len(rows) - 1) // 256
    assert {row["class"] for row in windows} <= {"0", "1"}


def test_a_folder_has_a_track_of_each_recording(run: Path, tmp_path: Path) -> None:
    bare = run.parent.parent / "bare"
    predict(run, "--dataset", bare, "--out", f"{tmp_path / 'tracks'}/")
    predict(run, "--dataset", bare, "--out", tmp_path / "out.csv")
    together = rows_of(tmp_path / "out.csv")
    for name in ("night_0", "night_1"):
        track = rows_of(tmp_path / "tracks" / f"{name}.csv")
        assert [float(row["start_s"]) for row in track] == list(range(SECONDS))
        assert [{"recording": name, **row} for row in track] == [row for row in together if row["recording"] == name]


def test_channels_are_found_by_their_names(run: Path, tmp_path: Path) -> None:
    bare = run.parent.parent / "bare" / "night_0.csv"
    turned = tmp_path / "turned.csv"
    with bare.open() as file, turned.open("w", newline="") as copy:
        lines = csv.writer(copy)
        lines.writerows([row[2], "0", row[0], row[1]] if number else ["E2", "extra", "E0", "E1"]
                        for number, row in enumerate(csv.reader(file)))  # fmt: skip
    predict(run, "--dataset", bare, "--out", tmp_path / "one.csv")
    predict(run, "--dataset", turned, "--out", tmp_path / "other.csv")
    first, second = (rows_of(tmp_path / name) for name in ("one.csv", "other.csv"))
    assert [row["probability"] for row in first] == [row["probability"] for row in second]


def test_the_training_recordings_may_be_gone(run: Path, tmp_path: Path) -> None:
    labelled = run.parent.parent / "labelled"
    moved = labelled.rename(tmp_path / "moved")
    try:
        model = can_train.load(run, device="cpu")
        shares = model.predict(model.read(str(run.parent.parent / "bare")))
    finally:
        moved.rename(labelled)
    assert len(shares) == 2 * SECONDS
    assert model.module.training is False


def test_a_class_that_the_model_does_not_know_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = np.arange(SECONDS * HZ) // (10 * HZ) % 3
    other = write_recording(tmp_path / "other.csv", noise(len(labels), 3), labels)
    assert main(["evaluate", str(run), "--dataset", str(other), "--device", "cpu"]) == 2
    assert "class 2; it knows 0, 1" in capsys.readouterr().err
