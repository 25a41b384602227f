"""Subjects of recordings are split into sets without a leak, in folds that test each subject once."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.cli.main import main
from can_train.errors import ConfigError, DataError
from can_train_tasks.bendr.class_metrics import classification_metrics
from can_train_tasks.bendr.recording_windows import Windows
from can_train_tasks.bendr.settings import RecordingSettings
from can_train_tasks.bendr.subjects import split_subjects, subjects_of
from can_train_tasks.bendr.task import Bendr
from fakes.eeg import CLASSIFY, PRETRAIN, SYNTHETIC, eeg_task, noise, write_recording

HZ, SECONDS = 32, 30
MODEL = {"model.hidden": 8, "model.layers": 1, "model.heads": 2, "model.feedforward": 8, "model.groups": 2,
         "model.position_kernel": 5}  # fmt: skip
some_names = st.sets(st.text("abcS019", min_size=1, max_size=4), min_size=4, max_size=40)


def settings(**more: Any) -> RecordingSettings:
    return RecordingSettings(**{"path": "x", "subject": "folder", **more})


def members(split: dict[str, str], name: str) -> set[str]:
    return {subject for subject, of in split.items() if of == name}


@given(some_names, st.data())
def test_folds_test_each_subject_once_and_share_no_subject_between_sets(names: set[str], data: st.DataObject) -> None:
    folds = data.draw(st.integers(3, len(names)))
    splits = [split_subjects(settings(folds=folds, fold=fold), names) for fold in range(folds)]
    tested = [subject for split in splits for subject in members(split, "test")]
    validated = [subject for split in splits for subject in members(split, "validation")]
    assert sorted(tested) == sorted(validated) == sorted(names)
    for split in splits:
        assert split.keys() == names
        assert set(split.values()) == {"train", "validation", "test"}
    sizes = [len(members(split, "test")) for split in splits]
    assert max(sizes) - min(sizes) <= 1
    again = split_subjects(settings(folds=folds), [*sorted(names, reverse=True), *names])
    assert again == splits[0]


@given(some_names)
def test_each_subject_can_be_left_out_and_as_many_folds_as_subjects_do_the_same(names: set[str]) -> None:
    for fold, name in enumerate(sorted(names)):
        split = split_subjects(settings(leave_out=name), names)
        assert members(split, "test") == {name}
        assert len(members(split, "validation")) == 1
        assert split == split_subjects(settings(folds=len(names), fold=fold), names)


@given(some_names, st.floats(0.01, 0.4), st.floats(0.01, 0.4))
def test_without_folds_the_shares_decide(names: set[str], validation: float, test: float) -> None:
    split = split_subjects(settings(validation_share=validation, test_share=test), names)
    sizes = {name: len(members(split, name)) for name in ("train", "validation", "test")}
    assert min(sizes.values()) >= 1
    for name, share in (("validation", validation), ("test", test)):
        if sizes["train"] > 1:
            assert sizes[name] == max(1, round(share * len(names)))


def test_subjects_that_are_named_are_tested_in_every_fold() -> None:
    names = [f"S{number:02}" for number in range(12)]
    splits = [split_subjects(settings(folds=4, fold=fold, test_subjects=["S03", "S07"]), names) for fold in range(4)]
    assert all(members(split, "test") == {"S03", "S07"} for split in splits)
    validated = [subject for split in splits for subject in members(split, "validation")]
    assert sorted(validated) == [name for name in names if name not in ("S03", "S07")]


@pytest.mark.parametrize(
    ("rule", "path", "subject"),
    [
        (r"S\d\d\d", "S001/S001R04.edf", "S001"),
        (r"SC4(\d\d)", "sleep-cassette/SC4001E0-PSG.edf", "00"),
        ("folder", "s01/rc02.edf", "s01"),
        ("file", "s01/rc02.edf", "s01/rc02"),
        ("file", "v1.0/s1.csv", "v1.0/s1"),
    ],
)
def test_a_subject_is_read_from_the_path_inside_the_data_set(rule: str, path: str, subject: str) -> None:
    place = Path("/data/S999SC499")
    assert subjects_of(settings(subject=rule), [place / path], place) == [subject]


def test_folders_of_the_same_name_in_several_places_are_no_subject() -> None:
    files = [Path(f"data/sub-{person}/ses-{session}/eeg.csv") for person in (1, 2) for session in (1, 2)]
    with pytest.raises(DataError, match="data/sub-1/ses-1 and data/sub-2/ses-1") as caught:
        subjects_of(settings(subject="folder"), files, Path("data"))
    assert caught.value.remedy is not None
    rule = caught.value.remedy.partition("dataset.subject=")[2].strip("'\"")
    assert subjects_of(settings(subject=rule), files, Path("data")) == ["sub-1", "sub-1", "sub-2", "sub-2"]


def test_a_path_without_a_subject_is_named() -> None:
    with pytest.raises(DataError, match=r"'S\\\\d' and night/one.edf") as caught:
        subjects_of(settings(subject=r"S\d"), [Path("/data/night/one.edf")], Path("/data"))
    assert "'dataset.exclude=[one.edf]'" in caught.value.remedy


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"folds": 2}, "dataset.folds must leave subjects to train on: 2"),
        ({"folds": 4, "fold": 4}, "dataset.fold counts the folds of dataset.folds from 0: 4 of 4 folds"),
        ({"fold": 1}, "dataset.fold counts the folds of dataset.folds from 0: 1 of 0 folds"),
        ({"subject": "off", "folds": 4}, "dataset.folds needs the subjects of recordings: dataset.subject is off"),
        ({"subject": "off", "leave_out": "a"}, "dataset.leave_out needs the subjects of recordings"),
        ({"subject": "S(.)(.)"}, "dataset.subject must be a regular expression with 0 or 1 groups: 'S(.)(.)'"),
        ({"subject": "S("}, "dataset.subject must be a regular expression: 'S('"),
        ({"leave_out": "a", "folds": 5, "fold": 1}, "dataset.leave_out names the subject that is tested: dataset.fold"),
    ],
)
def test_settings_of_subjects_that_contradict_each_other_are_refused(more: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**more)
    assert str(caught.value).startswith(rule)


def test_the_word_off_of_a_yaml_file_is_read_as_it_is_meant() -> None:
    assert settings(subject="False") == settings(subject="off")


def test_too_few_subjects_are_told() -> None:
    with pytest.raises(DataError, match=r"2 subjects: a, b\.") as caught:
        split_subjects(settings(), ["a", "b"])
    assert "dataset.subject=off" in caught.value.remedy
    with pytest.raises(DataError, match=r"4 subjects: a, b, c, d; 6 folds\.") as caught:
        split_subjects(settings(folds=6, fold=5), "abcd")
    assert "dataset.folds=4" in caught.value.remedy
    assert (
        "split by time: --set 'dataset.subject=off' --set 'dataset.folds=0' --set 'dataset.fold=0'"
        in caught.value.remedy
    )
    with pytest.raises(ConfigError, match="Unknown subject: 'S1'"):
        split_subjects(settings(leave_out="S1"), ["S01", "S02", "S03"])


def person(path: Path, seed: int, *, labelled: bool = True) -> Path:
    """A recording whose class changes every five seconds, and whose first channel swings more in one of them."""
    labels = np.arange(SECONDS * HZ) // (5 * HZ) % 2
    signal = noise(len(labels), 3, seed) * (1 + 2 * labels[:, None] * [1, 0, 0]) * (1 + seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_recording(path, signal, labels if labelled else None)


def people(folder: Path, number: int = 5) -> RecordingSettings:
    """Recordings of persons `P1`, `P2`, …, two of each."""
    for who in range(1, number + 1):
        for session in range(2):
            person(folder / f"P{who}" / f"session{session}.csv", 10 * who + session)
    return RecordingSettings(name="people", path=str(folder), subject="folder", sampling_hz=HZ, window_s=1.0)


def persons(task: Bendr, name: str) -> set[str]:
    windows = task.sets[name]
    assert isinstance(windows, Windows)
    return {windows.recordings[of].path.parent.name for of in windows.of.tolist()}


def test_a_recording_is_in_the_set_of_its_subject_from_its_first_window_to_its_last(tmp_path: Path) -> None:
    task = eeg_task(CLASSIFY, tmp_path / "cache", replace(people(tmp_path / "data"), folds=5, fold=2))
    assert (persons(task, "test"), persons(task, "validation")) == ({"P3"}, {"P2"})
    assert persons(task, "train") == {"P1", "P4", "P5"}
    assert [len(task.sets[name]) for name in ("train", "validation", "test")] == [180, 60, 60]
    assert task.notices()[0] == ("Split by subject, fold 2 of 5: train 3 (P1, P4, P5); validation 1 (P2); test 1 (P3)")


def test_what_trains_does_not_depend_on_the_tested_subjects(tmp_path: Path) -> None:
    dataset = replace(people(tmp_path / "data"), leave_out="P4")
    before = eeg_task(CLASSIFY, tmp_path / "cache", dataset)
    first = [before.sets["train"][at]["signal"] for at in range(0, 180, 7)]
    person(tmp_path / "data" / "P4" / "session0.csv", 77)
    after = eeg_task(CLASSIFY, tmp_path / "cache", dataset)
    assert all(
        (after.sets["train"][at]["signal"] == one).all() for at, one in zip(range(0, 180, 7), first, strict=True)
    )
    # Each recording is scaled by itself: without that, a person whose signal is larger looks different.
    spread = {name: float(np.mean([after.sets[name][at]["signal"].std() for at in range(0, 60, 7)]))
              for name in ("train", "test")}  # fmt: skip
    assert spread["test"] == pytest.approx(spread["train"], rel=0.2)


def test_a_plan_reads_recordings_of_each_set(tmp_path: Path) -> None:
    dataset = replace(people(tmp_path / "data"), folds=5)
    sampled = eeg_task(CLASSIFY, tmp_path / "nothing", dataset, sampling=True)
    assert (persons(sampled, "test"), persons(sampled, "validation")) == ({"P1"}, {"P5"})
    whole = eeg_task(CLASSIFY, tmp_path / "cache", dataset)
    assert (sampled.estimated_train_rows or len(sampled.train_rows)) == pytest.approx(len(whole.train_rows), rel=0.1)
    assert not (tmp_path / "nothing").exists()


def test_simulated_people_are_subjects_too(tmp_path: Path) -> None:
    synthetic = replace(SYNTHETIC.synthetic, recordings=4, seconds=12.0)
    dataset = replace(SYNTHETIC, subject="file", folds=4, fold=3, synthetic=synthetic)
    whole, sampled = (eeg_task(PRETRAIN, tmp_path, dataset, sampling=sampling) for sampling in (False, True))
    for task in (whole, sampled):
        assert [path.name for path in {recording.path for recording in task.sets["test"].recordings}]  # type: ignore[attr-defined]
        assert task.notices()[0].endswith(
            "train 2 (recording_001, recording_002); validation 1 (recording_003); test 1 (recording_004)"
        )


def line(folder: Path, *more: str) -> list[str]:
    words = [word for name, value in MODEL.items() for word in ("--set", f"{name}={value}")]
    return ["--task", "bendr", "--mode", "classify", "--dataset", str(folder / "data"), "--epochs", "2", "--lr", "0.01",
            "--set", "dataset.subject=folder", "--set", f"dataset.sampling_hz={HZ}", "--set", "dataset.window_s=1",
            *words, "--device", "cpu", "-q", "--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state"),
            *more]  # fmt: skip


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that tests P2 of the recordings in the folder `data` beside its runs."""
    folder = tmp_path_factory.mktemp("subjects")
    people(folder / "data", 4)
    assert main(line(folder, "--set", "dataset.folds=4", "--set", "dataset.fold=1")) == 0
    (made,) = (folder / "runs").iterdir()
    return made


def judged(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--device", "cpu", *words]) == 0
    (scores,) = json.loads(capsys.readouterr().out)["judgement"]["test"].values()
    return dict(scores)


def test_predictions_of_the_tested_subject_have_the_score_of_its_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for session in range(2):
        person(tmp_path / "bare" / "P2" / f"session{session}.csv", 20 + session, labelled=False)
    assert main(["predict", str(run), "--dataset", str(tmp_path / "bare"), "--out", str(tmp_path / "out.csv"),
                 "--device", "cpu", "-q"]) == 0  # fmt: skip
    rows = rows_of(tmp_path / "out.csv")
    truth = np.array([int(float(row["start_s"]) // 5) % 2 for row in rows])
    shares = np.array([[float(row["probability_0"]), float(row["probability_1"])] for row in rows])
    scores = judged(capsys, run)
    measured = classification_metrics(truth, shares)
    assert measured == {name: scores["model"][name] for name in measured}
    assert scores["samples"] == len(rows) == 2 * SECONDS
    assert "most frequent class" in scores["baselines"]
    trained = json.loads((run / "result.json").read_text())["judgement"]["test"]["test"]["model"]
    assert {name: trained[name] for name in measured} == measured


def test_new_recordings_are_tested_as_a_whole_and_recordings_of_trained_subjects_are_not(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    person(tmp_path / "new" / "Q9" / "session0.csv", 5)
    scores = judged(capsys, run, "--dataset", str(tmp_path / "new"))
    assert scores["samples"] == SECONDS
    # They learn from the people who trained: the new recordings have no training part.
    assert scores["baselines"]["most frequent class"]["balanced_accuracy"] == 0.5
    # The second recording of P3, who trained, is recognised by the first one.
    for session, seed in ((0, 30), (1, 99)):
        person(tmp_path / "new" / "P3" / f"session{session}.csv", seed)
    assert judged(capsys, run, "--dataset", str(tmp_path / "new"))["samples"] == SECONDS
    (tmp_path / "new" / "Q9" / "session0.csv").unlink()
    assert main(["evaluate", str(run), "--dataset", str(tmp_path / "new"), "--device", "cpu"]) == 2
    assert "all 2 recordings are of such subjects" in capsys.readouterr().err
    by_time = [word for text in ("subject=off", "folds=0", "fold=0") for word in ("--set", f"dataset.{text}")]
    assert main(["evaluate", str(run), *by_time, "--device", "cpu"]) == 2
    assert "A run that split subjects is evaluated on subjects" in capsys.readouterr().err


@pytest.mark.slow
def test_folds_are_swept_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    people(tmp_path / "data", 3)
    assert main(line(tmp_path, "--set", "dataset.folds=3", "--set", "dataset.fold=0,1,2")) == 0
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    capsys.readouterr()
    assert main(["compare", *map(str, runs)]) == 0
    shown = capsys.readouterr().out
    assert "dataset.fold" in shown
    tested = [json.loads((run / "result.json").read_text())["judgement"]["test"]["test"]["samples"] for run in runs]
    assert tested == [2 * SECONDS] * 3
