"""Recordings in EDF and FIF: their channels, rates and events, and the windows that are cut at events."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mne
import numpy as np
import pytest

from can_train.errors import ConfigError, DataError
from can_train.reporter import SilentReporter
from can_train_tasks.bendr.recording_windows import cut, event_starts
from can_train_tasks.bendr.recordings import (
    UNLABELLED,
    Recording,
    data_digest,
    find_recordings,
    open_recordings,
    read_beginnings,
)
from can_train_tasks.bendr.settings import RecordingSettings

HZ = 100.0
CHANNELS = ["Fz", "Cz", "Pz"]
EVENTS = [(1.0, 2.0, "T1"), (4.0, 2.0, "T2"), (7.0, 1.0, "T0"), (10.0, 2.0, "T1"), (14.0, 0.0, "T2")]


def raw_of(seconds: float = 20.0, hz: float = HZ, events: Any = EVENTS) -> mne.io.RawArray:
    drawn = np.random.default_rng(0)
    info = mne.create_info([*CHANNELS, "ECG"], hz, ["eeg"] * 3 + ["ecg"])
    raw = mne.io.RawArray(drawn.normal(0, 20e-6, (4, round(seconds * hz))), info, verbose="error")
    raw.set_annotations(mne.Annotations(*zip(*events, strict=True)))
    return raw


def write(path: Path, raw: mne.io.RawArray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith((".fif", ".fif.gz")):
        raw.save(path, fmt="double", verbose="error")
    else:
        mne.export.export_raw(path, raw, physical_range=(-200e-6, 200e-6), verbose="error")
    return path


def settings(path: Path, **more: Any) -> RecordingSettings:
    return RecordingSettings(path=str(path), **{"sampling_hz": HZ, "events": ["T1:0", "T2:1"], **more})


def opened(path: Path, cache: Path, **more: Any) -> Recording:
    dataset = settings(path, **more)
    (recording,) = open_recordings(dataset, find_recordings(dataset, path), cache, SilentReporter())
    return recording


@pytest.mark.parametrize("name", ["a_raw.fif", "a_raw.fif.gz"])
def test_samples_are_read_in_microvolts_and_events_are_their_classes(tmp_path: Path, name: str) -> None:
    raw = raw_of()
    recording = opened(write(tmp_path / name, raw), tmp_path / "cache")
    assert recording.channels == tuple(CHANNELS)
    assert np.array_equal(recording.signal[0:2000], (raw.get_data()[:3].T * 1e6).astype(np.float32))
    labels = np.full(2000, UNLABELLED)
    labels[100:300] = labels[1000:1200] = 0
    labels[400:600] = labels[1400:1401] = 1
    assert np.array_equal(recording.labels[0:2000], labels)
    assert recording.classes == (0, 1)
    assert recording.events == [(100, 0), (400, 1), (1000, 0), (1400, 1)]
    again = opened(tmp_path / name, tmp_path / "cache")
    assert (again.events, again.sha256) == (recording.events, recording.sha256)


def test_the_start_of_a_fif_file_that_was_cut_is_its_first_sample(tmp_path: Path) -> None:
    raw = raw_of()
    raw.set_meas_date(datetime(2026, 1, 2, tzinfo=UTC))
    raw.crop(tmin=3.0)
    recording = opened(write(tmp_path / "a_raw.fif", raw), tmp_path / "cache")
    assert recording.events == [(0, 0), (100, 1), (700, 0), (1100, 1)]


def test_another_rate_is_resampled_and_events_keep_their_times(tmp_path: Path) -> None:
    path = write(tmp_path / "a_raw.fif", raw_of(hz=250.0))
    recording = opened(path, tmp_path / "cache")
    assert len(recording.signal) == 2000
    assert recording.events == [(100, 0), (400, 1), (1000, 0), (1400, 1)]
    wanted = raw_of(hz=250.0).pick(CHANNELS).resample(HZ, verbose="error").get_data().T * 1e6
    assert np.allclose(recording.signal[0:2000], wanted, atol=1e-3)


def test_channels_are_those_that_are_named_in_their_order(tmp_path: Path) -> None:
    recording = opened(write(tmp_path / "a_raw.fif", raw_of()), tmp_path / "cache", channels=["ECG", "Cz"])
    assert recording.channels == ("ECG", "Cz")
    assert np.array_equal(recording.signal[0:50], (raw_of().get_data()[[3, 1], :50].T * 1e6).astype(np.float32))


def test_windows_at_events_have_the_class_of_their_event(tmp_path: Path) -> None:
    events = [(float(second), 0.0, "T1" if second % 2 else "T2") for second in range(2, 58, 2)]
    events = [(onset, 0.0, "T1" if number % 3 else "T2") for number, (onset, *_) in enumerate(events)]
    path = write(tmp_path / "a_raw.fif", raw_of(60.0, events=events))
    dataset = settings(path, aligned=True, offset_s=-0.5, window_s=1.0)
    recordings = open_recordings(dataset, [path], tmp_path / "cache", SilentReporter())
    windows = cut(recordings, dataset, labelled_only=True)
    starts = np.concatenate([part.starts for part in windows.values()])
    labels = np.concatenate([part.labels for part in windows.values()])
    class_at = {round((onset - 0.5) * HZ): 0 if name == "T1" else 1 for onset, _, name in events}
    assert {int(start): int(label) for start, label in zip(starts, labels, strict=True)}.items() <= class_at.items()
    # Windows that would reach over the end of their set are left out.
    assert len(starts) >= len(events) - 3


@pytest.mark.parametrize(("second", "starts"), [("T1", [300, 600]), ("T2", None)])
def test_events_at_one_sample_have_one_window_and_one_class(tmp_path: Path, second: str, starts: list[int]) -> None:
    events = [(3.0, 0.0, "T1"), (3.0, 0.5, second), (6.0, 0.0, "T2")]
    path = write(tmp_path / "a_raw.fif", raw_of(60.0, events=events))
    dataset = settings(path, aligned=True, window_s=1.0)
    (recording,) = open_recordings(dataset, [path], tmp_path / "cache", SilentReporter())
    if starts:
        assert event_starts(recording, 0, 6000, dataset).tolist() == starts
        return
    with pytest.raises(DataError, match=r"one class: .*a_raw\.fif at 3\.000 s: 0 and 1"):
        event_starts(recording, 0, 6000, dataset)


def test_windows_without_a_class_are_left_out_of_classification_alone(tmp_path: Path) -> None:
    events = [(float(second), 2.0, "T1" if second % 8 else "T2") for second in range(0, 120, 4)]
    path = write(tmp_path / "a_raw.fif", raw_of(120.0, events=events))
    dataset = settings(path, window_s=1.0)
    recordings = open_recordings(dataset, [path], tmp_path / "cache", SilentReporter())
    classified, every = (cut(recordings, dataset, labelled_only=only)["train"] for only in (True, False))
    assert len(every) > 1.5 * len(classified)
    assert UNLABELLED in every.labels.tolist()
    assert [int(start) // 100 % 4 < 2 for start in classified.starts] == [True] * len(classified)
    assert classified.labels.tolist() == [int(start // 400 % 2 == 0) for start in classified.starts.tolist()]


def test_a_plan_reads_the_beginning_of_a_recording(tmp_path: Path) -> None:
    path = write(tmp_path / "a_raw.fif", raw_of())
    (recording,), times = read_beginnings(settings(path), [path], 500)
    assert len(recording.signal) == 500
    assert times == pytest.approx(4.0, rel=0.01)
    assert recording.events == [(100, 0), (400, 1)]


def test_the_stages_of_sleep_edf_are_read_from_the_file_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path / "SC4001E0-PSG.edf", raw_of(events=[(0.0, 1.0, "x")]))
    awake_first = [(0.0, 8.0, "Sleep stage W"), (8.0, 12.0, "Sleep stage 1")]
    stages = write(tmp_path / "SC4001EC-Hypnogram.edf", raw_of(events=awake_first))
    dataset = settings(tmp_path, events=["Sleep stage W:0", "Sleep stage 1:1"])
    assert find_recordings(dataset, tmp_path) == [path]
    digest = data_digest(dataset, tmp_path, SilentReporter())
    recording = opened(tmp_path, tmp_path / "cache", events=dataset.events)
    assert recording.labels[0:2000].tolist() == [0] * 800 + [1] * 1200
    stages.unlink()
    write(stages, raw_of(events=[(0.0, 4.0, "Sleep stage W"), (4.0, 16.0, "Sleep stage 1")]))
    assert data_digest(dataset, tmp_path, SilentReporter()) != digest
    assert opened(tmp_path, tmp_path / "cache", events=dataset.events).labels[399:401].tolist() == [0, 1]


def test_events_that_a_recording_lacks_are_told_with_those_that_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a_raw.fif", raw_of())
    with pytest.raises(DataError) as caught:
        opened(path, tmp_path / "cache", events=["left:0", "right:1"])
    assert str(caught.value).startswith(
        f"A recording has events of dataset.events: {path}: it has T0, T1, T2.\nName events that it has: "
    )


def test_a_channel_that_a_recording_lacks_is_told_with_those_that_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a_raw.fif", raw_of())
    with pytest.raises(DataError, match=r"'Oz'.\nIts channels: Fz, Cz, Pz, ECG"):
        opened(path, tmp_path / "cache", channels=["Oz"])


@pytest.mark.parametrize("name", ["a.edf", "a_raw.fif", "a.bdf", "a_raw.fif.gz"])
@pytest.mark.parametrize("content", [b"", b"0       " + b"x" * 500, b"\xff" * 300])
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"A recording cannot be read: {path}: "):
        opened(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"events": ["T1"]}, "dataset.events must give each annotation a class from 0 to 99: 'T1'"),
        ({"events": ["T1:100"]}, "dataset.events must give each annotation a class from 0 to 99: 'T1:100'"),
        ({"events": [], "aligned": True}, "dataset.aligned cuts windows at events: dataset.events is empty"),
    ],
)
def test_events_of_another_form_are_refused(tmp_path: Path, more: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, **more)
    assert str(caught.value).splitlines()[0] == f"{rule}."
