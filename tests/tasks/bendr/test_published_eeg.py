"""Presets of published data sets read small generated files with the names, channels and annotations of real ones."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import mne
import numpy as np
import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.errors import DataError, MissingDataError
from can_train.reporter import SilentReporter
from can_train_tasks.bendr.recordings import Recording, find_recordings, open_recordings
from can_train_tasks.bendr.settings import RecordingSettings
from can_train_tasks.bendr.subjects import split_subjects, subjects_of

Event = tuple[float, float, str]
TINY = {"model.hidden": 8, "model.layers": 1, "model.heads": 2, "model.feedforward": 8, "model.groups": 2,
        "model.position_kernel": 5, "training.epochs": 1}  # fmt: skip


def write(path: Path, seconds: float, hz: float, channels: Sequence[str], events: Sequence[Event], seed: int) -> None:
    drawn = np.random.default_rng(seed).normal(0, 20e-6, (len(channels), round(seconds * hz)))
    raw = mne.io.RawArray(drawn, mne.create_info([*channels], hz, "eeg"), verbose="error")
    raw.set_annotations(mne.Annotations(*zip(*events, strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".fif"):
        raw.save(path, verbose="error")
    else:
        mne.export.export_raw(path, raw, physical_range=(-200e-6, 200e-6), verbose="error")


def mmidb(root: Path) -> None:
    """Five subjects with the runs 3 and 4, and one that the preset leaves out."""
    for number in (1, 2, 3, 4, 5, 88):
        for run in (3, 4):
            events = [(at, 4.1, ("T0", "T1", "T0", "T2")[at // 4 % 4]) for at in range(0, 60, 4)]
            name = f"S{number:03}"
            write(root / "eegmmidb" / name / f"{name}R{run:02}.edf", 62, 160, ["Fc5.", "Cz..", "Oz.."], events, number)


def write_gdf(path: Path, seconds: int, hz: int, channels: Sequence[str], events: Sequence[tuple[int, int]]) -> None:
    """Writes GDF 1.25: 16-bit integers that are tenths of a microvolt, and a table of events (sample, type)."""
    size = len(channels)
    texts = [channels, [""] * size, ["uV"] * size]
    limits = [struct.pack(f"<{size}d", *[limit] * size) for limit in (-3276.8, 3276.7)]
    limits += [struct.pack(f"<{size}q", *[limit] * size) for limit in (-32768, 32767)]
    header = [b"GDF 1.25", b" " * 160, b"2005011910000000", struct.pack("<q", 256 * (1 + size)), bytes(44),
              struct.pack("<qIII", seconds, 1, 1, size),
              *(text.ljust(width).encode() for names, width in zip(texts, (16, 80, 8), strict=True) for text in names),
              *limits, b" " * (80 * size), struct.pack(f"<{size}i", *[hz] * size),
              struct.pack(f"<{size}i", *[3] * size), bytes(32 * size)]  # fmt: skip
    values = np.random.default_rng(0).integers(-200, 200, (seconds, size, hz)).astype("<i2")
    table = struct.pack("<B3BI", 1, hz, 0, 0, len(events))
    table += struct.pack(f"<{len(events)}I", *(sample + 1 for sample, _ in events))
    table += struct.pack(f"<{len(events)}H", *(kind for _, kind in events))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(header) + values.tobytes() + table)


def bci_iv_2a(root: Path) -> None:
    """Nine subjects, with a session whose classes (783) are not in the file, which the preset leaves out."""
    for number in range(1, 10):
        for session in "TE":
            events = [(0, 276), *((800 * at + 400, 769 + at % 4 if session == "T" else 783) for at in range(8))]
            write_gdf(
                root / "bci_iv_2a" / f"A0{number}{session}.gdf", 68, 100, ["EEG-Fz", "EEG-Cz", "EOG-left"], events
            )


def ern(root: Path) -> None:
    """Eight subjects whose classes are in TrainLabels.csv, and two tested subjects with TestLabels.csv."""
    tables: dict[str, list[str]] = {"Train": ["IdFeedBack,Prediction"], "Test": ["IdFeedBack,Prediction"]}
    for number in (2, 6, 7, 11, 12, 13, 14, 16, 1, 3):
        name, kind = f"S{number:02}_Sess01", "Test" if number in (1, 3) else "Train"
        feedback = np.zeros(200 * 30, int)
        feedback[300::400] = 1
        signal = np.random.default_rng(number).normal(0, 20, (len(feedback), 3))
        path = root / "ern" / kind.lower() / f"Data_{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, np.column_stack([np.arange(len(feedback)) / 200, signal, feedback]), delimiter=",",
                   header="Time,Fp1,Cz,EOG,FeedBackEvent", comments="", fmt="%.3f")  # fmt: skip
        tables[kind] += [f"{name}_FB{at + 1:03},{int(at % 3 > 0)}" for at in range(int(feedback.sum()))]
    for kind, lines in tables.items():
        (root / "ern" / f"{kind}Labels.csv").write_text("\n".join(lines) + "\n")
    (root / "ern" / "ChannelsLocation.csv").write_text("Number,Labels\n1,Fp1\n")


STAGES = ("W", "1", "2", "3", "4", "R")


def sleep_edf(root: Path) -> None:
    names = ["EEG Fpz-Cz", "EEG Pz-Oz", "EOG horizontal", "Resp oro-nasal", "EMG submental", "Temp rectal",
             "Event marker"]  # fmt: skip
    for number in range(10):
        folder = root / "sleep-edfx" / "sleep-cassette"
        # A night begins awake, and ends with a movement, which is of no class.
        stages = [*("W" * 4), *STAGES, *STAGES]
        events = [*((30.0 * at, 30.0, f"Sleep stage {stage}") for at, stage in enumerate(stages)),
                  (30.0 * len(stages), 30.0, "Movement time")]  # fmt: skip
        seconds = 30.0 * (len(stages) + 1)
        write(folder / f"SC4{number:02}1E0-PSG.edf", seconds, 20, names, [(0.0, 1.0, "x")], number)
        write(folder / f"SC4{number:02}1EC-Hypnogram.edf", seconds, 20, names[:1], events, number)
    write(root / "sleep-edfx" / "sleep-telemetry" / "ST7011J0-PSG.edf", 60, 20, names[:2], [(0.0, 1.0, "x")], 0)


def erpbci(root: Path) -> None:
    for number in range(1, 13):
        flashes = [(3 + 0.15 * at, 0.1, ("AGMSY5", "ABCDEF", "BHNTZ6", "GHIJKL")[at % 4]) for at in range(100)]
        events = [(0.5, 0.1, "#TgtB_A"), (1.0, 0.1, "#start"), *flashes, (20.0, 0.1, "#end")]
        write(root / "erpbci" / f"s{number:02}" / "rc01.edf", 22, 256, ["Fz", "Cz", "EXG1"], events, number)


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
