"""Presets of published data sets read small generated files with the names, channels and annotations of real ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.errors import DataError, MissingDataError
from can_train.reporter import SilentReporter
from can_train_tasks.bendr.recordings import Recording, find_recordings, open_recordings
from can_train_tasks.bendr.settings import RecordingSettings
from can_train_tasks.bendr.subjects import split_subjects, subjects_of
from fakes.published_eeg import bci_iv_2a, ern, erpbci, mmidb, sleep_edf, write

TINY = {"model.hidden": 8, "model.layers": 1, "model.heads": 2, "model.feedforward": 8, "model.groups": 2,
        "model.position_kernel": 5, "training.epochs": 1}  # fmt: skip
# Writes the tree; further settings, so that a trial is short; channels; windows of a recording and their classes.
PRESETS: dict[str, tuple[Callable[[Path], None], list[str], list[str], list[int]]] = {
    "mmidb": (mmidb, ["sampling_hz=40"], ["Fc5.", "Cz..", "Oz.."], [0, 1, 0, 1, 0, 1, 0]),
    "bci_iv_2a": (bci_iv_2a, ["sampling_hz=50"], ["EEG-Fz", "EEG-Cz"], [0, 1, 2, 3, 0, 1, 2, 3]),
    "ern": (ern, [], ["Fp1", "Cz"], [int(at % 3 > 0) for at in range(15)]),
    "sleep_edf": (sleep_edf, ["sampling_hz=20"], ["EEG Fpz-Cz", "EEG Pz-Oz", "EOG horizontal"],
                  [0, 0, 0, 0, 0, 1, 2, 3, 3, 4, 0, 1, 2, 3, 3, 4]),
    "erpbci": (erpbci, ["sampling_hz=64"], ["Fz", "Cz"], [int(at % 4 in (1, 2)) for at in range(100)]),
}  # fmt: skip
TESTED = {"mmidb": {"S001"}, "bci_iv_2a": {"A01"}, "ern": {"S01", "S03"}, "sleep_edf": {"00"}, "erpbci": {"s01"}}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    for make, *_ in PRESETS.values():
        make(root)
    return root


def settings(name: str, *sets: str) -> RecordingSettings:
    run = resolve(RunRequest(task="bendr", dataset=name, sets=tuple(f"dataset.{text}" for text in sets)))
    assert isinstance(run.dataset, RecordingSettings)
    return run.dataset


def first_recording(name: str, trees: Path, cache: Path) -> Recording:
    dataset = settings(name, *PRESETS[name][1])
    path = find_recordings(dataset, trees)[0]
    (recording,) = open_recordings(dataset, [path], cache, SilentReporter())
    return recording


@pytest.mark.parametrize("name", PRESETS)
def test_files_are_read_with_their_channels_events_and_subjects(name: str, trees: Path, tmp_path: Path) -> None:
    _, sets, channels, classes = PRESETS[name]
    recording = first_recording(name, trees, tmp_path)
    assert list(recording.channels) == channels
    labels = [label for _, label in recording.events]
    assert labels == classes
    dataset = settings(name, *sets)
    place = trees / dataset.published
    split = split_subjects(dataset, subjects_of(dataset, find_recordings(dataset, trees), place))
    assert {subject for subject, of in split.items() if of == "test"} == TESTED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_without_its_files_says_which_files_it_needs(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="does not exist") as caught:
        find_recordings(settings(name), tmp_path)
    assert caught.value.remedy.startswith(f"{name} is ")
    assert "--set dataset.path=FOLDER" in caught.value.remedy


def test_batches_epochs_and_rates_are_those_of_the_published_configuration() -> None:
    figures = {}
    for name in PRESETS:
        run = resolve(RunRequest(task="bendr", dataset=name))
        training, dataset = run.training, run.dataset
        figures[name] = (training.batch_size * training.gradient_accumulation_steps, training.epochs, training.lr,
                         dataset.window_s, dataset.offset_s, dataset.folds, dataset.balance)  # fmt: skip
    assert figures == {
        "mmidb": (4, 7, 1e-5, 6, 0, 5, "none"),
        "bci_iv_2a": (60, 15, 5e-5, 6, -2, 9, "none"),
        "ern": (32, 15, 1e-5, 2, -0.7, 4, "undersample"),
        "sleep_edf": (80, 40, 5e-5, 30, 0, 10, "undersample"),
        "erpbci": (64, 20, 1e-5, 0.7, -0.1, 9, "undersample"),
    }


def test_the_stages_three_and_four_are_one_class_and_movements_are_of_none(trees: Path, tmp_path: Path) -> None:
    recording = first_recording("sleep_edf", trees, tmp_path)
    epochs = [int(label) for label in recording.labels[0 : 17 * 600][300::600]]
    assert epochs == [0, 0, 0, 0, 0, 1, 2, 3, 3, 4, 0, 1, 2, 3, 3, 4, -1]
    assert recording.classes == (0, 1, 2, 3, 4)


def test_a_night_without_its_stages_is_named(tmp_path: Path) -> None:
    write(tmp_path / "SC4001E0-PSG.edf", 60, 20, ["EEG Fpz-Cz"], [(0.0, 1.0, "x")], 0)
    dataset = settings("sleep_edf", f"path={tmp_path}", "sampling_hz=20")
    with pytest.raises(DataError, match=r"there is no SC4001E\*-Hypnogram\.edf beside it"):
        open_recordings(dataset, find_recordings(dataset, tmp_path), tmp_path / "cache", SilentReporter())


def test_feedback_events_without_a_table_have_no_class(trees: Path, tmp_path: Path) -> None:
    path = next((trees / "ern").glob("train/*.csv"))
    (tmp_path / "train").mkdir()
    copy = tmp_path / "train" / path.name
    copy.write_bytes(path.read_bytes())
    dataset = settings("ern", f"path={tmp_path}")
    (recording,) = open_recordings(dataset, [copy], tmp_path / "cache", SilentReporter())
    assert recording.events == [(at, -1) for at in range(300, 6000, 400)]
    table = tmp_path / "TrainLabels.csv"
    table.write_text("IdFeedBack,Prediction\nS02_Sess01_FB001,2\n")
    with pytest.raises(DataError, match=r"TrainLabels\.csv, line 2: 'S02_Sess01_FB001,2'"):
        open_recordings(dataset, [copy], tmp_path / "cache", SilentReporter())


def test_a_recording_without_its_target_is_named(tmp_path: Path) -> None:
    write(tmp_path / "s01" / "rc01.edf", 20, 64, ["Fz"], [(1.0, 0.1, "ABCDEF")], 0)
    dataset = settings("erpbci", f"path={tmp_path}", "sampling_hz=64")
    with pytest.raises(DataError, match=r"as dataset\.target says: .*rc01\.edf: it has ABCDEF"):
        open_recordings(dataset, find_recordings(dataset, tmp_path), tmp_path / "cache", SilentReporter())


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_by_a_line(name: str, trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    words += [word for text in PRESETS[name][1] for word in ("--set", f"dataset.{text}")]
    line = ["--task", "bendr", "--mode", "classify", "--dataset", name, "--data-root", str(trees), *words,
            "--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state")]  # fmt: skip
    assert main([*line, "--dry-run"]) == 0
    assert main([*line, "--device", "cpu", "-q"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    assert "balanced_accuracy" in result["judgement"]["test"]["test"]["model"]
    tested = find_recordings(settings(name, *PRESETS[name][1]), trees)[:1]
    assert main(["predict", str(run), "--dataset", str(tested[0]), "--out", str(tmp_path / "out.csv"), "--device",
                 "cpu", "-q"]) == 0  # fmt: skip
    assert (tmp_path / "out.csv").read_text().startswith("recording,start_s,end_s,class,probability")
