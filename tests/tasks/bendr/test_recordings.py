"""Recordings are read as they were written, once, and what is wrong with one is said by file and line."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError, MissingDataError
from can_train.io.arrays import StoredArray
from can_train.reporter import SilentReporter
from can_train_tasks.bendr.recordings import clock_hz, data_digest, find_recordings, open_recordings, read_beginnings
from can_train_tasks.bendr.settings import RecordingSettings
from can_train_tasks.bendr.simulated_eeg import simulate, synthetic_folder
from fakes.eeg import PRETRAIN, SYNTHETIC, eeg_task, noise, write_recording
from fakes.line_fit import Notices

OWN = RecordingSettings(name="own", path="x")


def opened(path: Path, cache: Path, dataset: RecordingSettings = OWN):  # type: ignore[no-untyped-def]
    return open_recordings(dataset, [path], cache, SilentReporter())[0]


@given(
    st.integers(1, 40), st.integers(1, 5), st.sampled_from(",;\t"), st.sampled_from(["\n", "\r\n"]), st.booleans(),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=40)
def test_a_recording_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, samples: int, channels: int, separator: str, end: str, labelled: bool,
    seed: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("recordings")
    signal = noise(samples, channels, seed) * 1e4
    labels = np.random.default_rng(seed).integers(0, 3, samples) if labelled else None
    path = write_recording(folder / "one.csv", signal, labels, separator=separator, end=end)
    found = opened(path, folder / "cache")
    assert np.array_equal(found.signal[0:samples], signal)
    assert found.channels == tuple(f"E{number}" for number in range(channels))
    expected = np.full(samples, -1) if labels is None else labels
    assert np.array_equal(found.labels[0:samples], expected)
    assert found.classes == (() if labels is None else tuple(np.unique(labels)))


def test_a_recording_of_several_blocks_keeps_every_sample_in_order(tmp_path: Path) -> None:
    signal = noise(20_001, 1)
    found = opened(write_recording(tmp_path / "long.csv", signal), tmp_path)
    assert np.array_equal(found.signal[0:30_000], signal)
    assert np.array_equal(found.signal[8190:8195], signal[8190:8195])


def test_empty_lines_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "gaps.csv").write_text("\ufeffE0,E1\n1,2\n\n3,4\n\n")
    assert opened(tmp_path / "gaps.csv", tmp_path).signal[0:9].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("name", ["Time (s)", "time_ms", "Time:256Hz", "Sample Index", "Timestamp (Formatted)", ""])
def test_columns_of_time_are_known_with_their_units(tmp_path: Path, name: str) -> None:
    (tmp_path / "one.csv").write_text(f"{name},T3,Sampler\n1,2,3\n")
    assert opened(tmp_path / "one.csv", tmp_path).channels == ("T3", "Sampler")


@pytest.mark.parametrize(
    ("name", "step", "hz"),
    [
        ("time", 1 / 256, 256.0), ("Time (ms)", 4.0, 250.0), ("timestamp", 2e6, 500.0), ("t", 1e-3, 1000.0),
        ("time", 1.0, None), ("time", 0.0, None), ("Sample Index", 1 / 256, None), ("time", float("nan"), None),
    ],
)  # fmt: skip
def test_the_rate_of_a_clock_is_that_of_its_steps(tmp_path: Path, name: str, step: float, hz: float | None) -> None:
    (tmp_path / "one.csv").write_text(f"{name},T3\n" + "".join(f"{1e3 + row * step!r},0\n" for row in range(500)))
    assert clock_hz(tmp_path / "one.csv") == (None if hz is None else pytest.approx(hz, rel=1e-3))


def test_a_column_of_labels_is_no_channel_where_another_column_is_the_label(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("Fz,label,condition\n1,0,0\n2,1,1\n")
    assert opened(tmp_path / "one.csv", tmp_path, replace(OWN, label="condition")).channels == ("Fz",)


def test_a_channel_whose_name_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("EEG,EEG,Cz\n1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match=r"twice\.csv, line 1: 2 columns are named 'EEG'"):
        opened(tmp_path / "twice.csv", tmp_path)
    assert opened(tmp_path / "twice.csv", tmp_path, replace(OWN, channels=["Cz"])).signal[0:1].tolist() == [[3]]


def test_rows_with_more_cells_than_names_are_refused_unless_they_are_empty(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("Fz,Cz\n1,2\n2,0.1,0.2\n")
    with pytest.raises(DataError, match=r"rows\.csv, line 3: 3 cells under 2 names"):
        opened(tmp_path / "rows.csv", tmp_path)
    (tmp_path / "ends.csv").write_text("Fz,Cz\n1,2,\n3,4, \n")
    assert opened(tmp_path / "ends.csv", tmp_path).signal[0:9].tolist() == [[1, 2], [3, 4]]


def test_columns_that_count_time_are_no_channels_and_a_label_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("Time,AF3,Eye_Detection,O1\n0,1,0,5\n1,2,1,6\n")
    found = opened(tmp_path / "one.csv", tmp_path)
    assert (found.channels, found.classes) == (("AF3", "O1"), (0, 1))
    chosen = opened(tmp_path / "one.csv", tmp_path, replace(OWN, channels=["O1"], label="AF3"))
    assert (chosen.channels, chosen.classes, chosen.signal[0:2].tolist()) == (("O1",), (1, 2), [[5], [6]])


@given(st.integers(0, 30), st.sampled_from(["1", "1,x", "nan,2", ",2", "1,inf"]))
def test_a_bad_row_is_named_by_file_and_line(tmp_path_factory: pytest.TempPathFactory, at: int, bad: str) -> None:
    folder = tmp_path_factory.mktemp("bad")
    rows = ["1,2"] * 30
    rows.insert(at, bad)
    (folder / "bad.csv").write_text("\n".join(["E0,E1", *rows]))
    with pytest.raises(DataError, match=f"bad.csv, line {at + 2}: ") as caught:
        opened(folder / "bad.csv", folder / "cache")
    assert caught.value.remedy
    assert not list((folder / "cache").glob("*")), "nothing half read stays"


@pytest.mark.parametrize(
    ("text", "dataset", "rule"),
    [
        ("1,2\n3,4\n", OWN, "The first line of a recording names its columns"),
        ("", OWN, "The first line of a recording names its columns"),
        ("E0,label\n", OWN, "A recording has samples below its header"),
        ("time,label\n1,2\n", OWN, "A recording has at least one channel"),
        ("E0,label\n1,0.5\n", OWN, "A label is a whole number"),
        ("E0,E1\n1,2\n", replace(OWN, label="eyes"), "dataset.label names a column"),
        ("E0,E1\n1,2\n", replace(OWN, channels=["E2"]), "Every channel is a column"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, dataset: RecordingSettings, rule: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(DataError, match=rule):
        opened(tmp_path / "bad.csv", tmp_path, dataset)


def test_recordings_of_one_data_set_have_the_same_channels(tmp_path: Path) -> None:
    paths = [write_recording(tmp_path / f"{width}.csv", noise(5, width)) for width in (2, 3)]
    with pytest.raises(DataError, match="the same channels"):
        open_recordings(OWN, paths, tmp_path, SilentReporter())


def test_data_that_are_not_there_are_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="does not exist"):
        find_recordings(RecordingSettings(name="eye_state", published="eeg/none.csv"), tmp_path)
    with pytest.raises(MissingDataError, match=r"holds no file that ends in \.csv, \.edf"):
        find_recordings(replace(OWN, path=str(tmp_path)), tmp_path)
    assert find_recordings(SYNTHETIC, tmp_path) == []


def test_a_file_is_read_into_the_cache_once_and_another_one_beside_it(tmp_path: Path) -> None:
    cache, dataset = tmp_path / "cache", replace(OWN, path=str(tmp_path))
    write_recording(tmp_path / "a.csv", noise(50, seed=1))
    open_recordings(dataset, find_recordings(dataset, tmp_path), cache, SilentReporter())
    (first,) = cache.iterdir()
    made = first.stat().st_mtime_ns
    write_recording(tmp_path / "b.csv", noise(50, seed=2))
    before = data_digest(dataset, tmp_path, SilentReporter())
    open_recordings(dataset, find_recordings(dataset, tmp_path), cache, SilentReporter())
    assert len(list(cache.iterdir())) == 2
    assert first.stat().st_mtime_ns == made
    write_recording(tmp_path / "b.csv", noise(50, seed=3))
    assert data_digest(dataset, tmp_path, SilentReporter()) != before


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    signal, notices = noise(50), Notices()
    path = write_recording(tmp_path / "a.csv", signal)
    opened(path, tmp_path / "cache")
    (stored,) = (tmp_path / "cache").glob("*/signal.npy")
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    (found,) = open_recordings(OWN, [path], tmp_path / "cache", notices)
    assert np.array_equal(found.signal[0:50], signal)
    assert "damaged" in notices.texts[0]


def test_rows_of_a_stored_array_are_those_that_slicing_gives(tmp_path: Path) -> None:
    signal = noise(50, 3)
    stored = opened(write_recording(tmp_path / "a.csv", signal), tmp_path).signal
    assert isinstance(stored, StoredArray)
    for start, stop in ((0, 50), (7, 9), (49, 80), (60, 70), (5, 5)):
        assert np.array_equal(stored[start:stop], signal[start:stop])


def test_a_plan_reads_the_beginnings_of_recordings(tmp_path: Path) -> None:
    signal = noise(40_000, 2)
    paths = [write_recording(tmp_path / f"{name}.csv", signal) for name in range(6)]
    recordings, times = read_beginnings(OWN, paths, 1000)
    assert len(recordings) == 4
    read = sum(len(one.signal) for one in recordings)
    assert np.array_equal(recordings[0].signal[0:1000], signal[:1000])
    assert times == pytest.approx(6 * len(signal) / read, rel=0.05)


def test_simulated_recordings_are_the_same_bytes_each_time_and_show_alpha_when_eyes_are_closed(tmp_path: Path) -> None:
    one, other = synthetic_folder(tmp_path / "one", SYNTHETIC), synthetic_folder(tmp_path / "other", SYNTHETIC)
    assert [path.read_bytes() for path in sorted(one.iterdir())] == [
        path.read_bytes() for path in sorted(other.iterdir())
    ]
    signal, closed = simulate(SYNTHETIC, 0)
    found = opened(one / "recording_001.csv", tmp_path / "cache")
    assert np.allclose(found.signal[0 : len(signal)], signal, atol=0.01)
    assert np.array_equal(found.labels[0 : len(signal)], closed)
    back = np.diff(signal[:, -1])
    back = back[np.abs(back) < 1000]
    quiet = closed[1:][np.abs(np.diff(signal[:, -1])) < 1000]
    assert back[quiet].std() > 1.2 * back[~quiet].std()


_MEASURED = """
    import sys
    from pathlib import Path
    import numpy as np, torch
    from can_train.io.arrays import read_arrays
    from can_train.reporter import SilentReporter
    from can_train_tasks.bendr import recordings
    from can_train_tasks.bendr.settings import RecordingSettings
    from can_train_tasks.bendr.recording_windows import cut

    def peak():
        return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])

    folder, cache, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if way == "mapped":
        class Mapped:
            def __init__(self, folder, name):
                self.array = read_arrays(folder, [name])[0][name]
            def __len__(self): return len(self.array)
            def __getitem__(self, rows): return self.array[rows]
        recordings.StoredArray = Mapped
    dataset = RecordingSettings(name="own", path=str(folder))
    first = recordings.find_recordings(dataset, folder)[:1]
    # What the first file needs, the others may need again.
    for windows in cut(recordings.open_recordings(dataset, first, cache, SilentReporter()), dataset).values():
        for position in range(len(windows)): windows[position]
    before = peak()
    files = recordings.find_recordings(dataset, folder)
    for windows in cut(recordings.open_recordings(dataset, files, cache, SilentReporter()), dataset).values():
        for position in range(len(windows)): windows[position]
    print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.slow
def test_host_memory_stays_flat_as_files_are_added(tmp_path: Path) -> None:
    """Eight files after the first one; mapped, their pages would count as memory."""
    samples, channels, files = 50_000, 16, 8
    folder = tmp_path / "data"
    folder.mkdir()
    names, row = ",".join(f"E{one}" for one in range(channels)), ",".join(["1.25"] * channels)
    for number in range(files):
        own = ",".join([str(number)] * channels)
        (folder / f"{number}.csv").write_text(f"{names}\n{own}\n" + f"{row}\n" * samples)
    grown_mib = {}
    for way in ("read", "mapped"):
        command = [sys.executable, "-c", dedent(_MEASURED), str(folder), str(tmp_path / way), way]
        grown_mib[way] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024
    added_mib = (files - 1) * samples * channels * 4 / 2**20
    assert grown_mib["read"] < 0.3 * added_mib, f"{grown_mib} of {added_mib:.0f}"
    assert grown_mib["mapped"] > 0.6 * added_mib, "the test would see memory that grows"


def test_a_clock_of_another_rate_than_the_setting_is_told(tmp_path: Path) -> None:
    rows = [f"{row / 256},{value:.3f},0" for row, value in enumerate(noise(256 * 60, 1)[:, 0])]
    (tmp_path / "one.csv").write_text("\n".join(["time,Fz,label", *rows]))
    for hz, told in ((128.0, 1), (256.0, 0), (250.0, 0)):
        task = eeg_task(PRETRAIN, tmp_path / "cache", RecordingSettings(path=str(tmp_path), sampling_hz=hz))
        notices = [text for text in task.notices() if text.startswith("The times of one.csv are those of 256 samples")]
        assert len(notices) == told
