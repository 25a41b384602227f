"""Windows of different sets share nothing, not even a neighbour, and a window shows what its labels say."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import ConfigError, DataError
from can_train.reporter import SilentReporter
from can_train_tasks.bendr.recording_windows import cut, stretches, window_starts
from can_train_tasks.bendr.recordings import Recording, open_recordings
from can_train_tasks.bendr.settings import RecordingSettings
from can_train_tasks.bendr.subjects import SETS
from fakes.eeg import EYE_STATE, noise

TEN_HZ = RecordingSettings(name="own", path="x", sampling_hz=10.0, window_s=1.0, gap_s=0.5)
any_settings = st.builds(
    RecordingSettings, path=st.just("x"), sampling_hz=st.sampled_from([10.0, 128.0]), gap_s=st.floats(0, 3),
    cycles=st.integers(1, 6), validation_share=st.floats(0.01, 0.4), test_share=st.floats(0.01, 0.4),
)  # fmt: skip


def in_memory(signal: np.ndarray, labels: np.ndarray | None = None) -> Recording:
    own = np.full(len(signal), -1, np.int8) if labels is None else labels.astype(np.int8)
    return Recording(path=Path("one.csv"), channels=tuple(map(str, range(signal.shape[1]))), signal=signal, labels=own,
                     classes=tuple(int(label) for label in np.unique(own) if label >= 0))  # fmt: skip


@given(any_settings, st.integers(0, 20_000))
def test_stretches_follow_each_other_with_a_gap(dataset: RecordingSettings, samples: int) -> None:
    found = list(stretches(samples, dataset))
    assert all(0 <= start < stop <= samples for _, start, stop in found)
    gap = dataset.samples(dataset.gap_s)
    for (_, _, stop), (_, start, _) in pairwise(found):
        assert start - stop >= gap
    if samples > 100 * (gap + 1) * dataset.cycles:
        assert [name for name, _, _ in found] == list(SETS) * dataset.cycles
        trained = sum(stop - start + gap for name, start, stop in found if name == "train")
        share = 1 - dataset.validation_share - dataset.test_share
        assert trained == pytest.approx(share * samples, abs=2 * dataset.cycles)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 60), st.integers(1, 60))
def test_windows_lie_within_their_stretch_and_none_is_missing(
    start: int, length: int, window: int, stride: int
) -> None:
    starts = window_starts(start, start + length, window, stride)
    assert all(start <= one and one + window <= start + length for one in starts)
    following = int(starts[-1]) + stride if len(starts) else start
    assert following + window > start + length


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 4))
@settings(max_examples=25)
def test_a_window_has_the_class_that_most_of_its_samples_have(seed: int, stride: int, classes: int) -> None:
    labels = np.random.default_rng(seed).integers(0, classes + 1, 400) * 2
    dataset = replace(TEN_HZ, window_s=0.9, stride_s=stride / 10)
    for windows in cut([in_memory(noise(400), labels)], dataset).values():
        for position in range(0, len(windows), 5):
            at = windows.starts[position]
            expected = np.bincount(labels[at : at + 9]).argmax()
            assert np.unique(labels)[windows[position]["label"]] == expected


def test_a_model_sees_nothing_of_other_sets() -> None:
    signal = noise(1000)
    changed = signal.copy()
    bounds = {name: (start, stop) for name, start, stop in stretches(1000, TEN_HZ)}
    for name in ("validation", "test"):
        changed[slice(*bounds[name])] += 1e6 * noise(1000)[slice(*bounds[name])]
    one, other = cut([in_memory(signal)], TEN_HZ), cut([in_memory(changed)], TEN_HZ)
    assert all((one["train"][at]["signal"] == other["train"][at]["signal"]).all() for at in range(len(one["train"])))
    changed[slice(*bounds["train"])] *= 2
    other = cut([in_memory(changed)], TEN_HZ)
    assert np.allclose(other["train"].scales[0], 2 * one["train"].scales[0]), "the scale is that of the training"


def test_drift_is_taken_off_and_artefacts_are_cut_off() -> None:
    signal = noise(1000) + 4000 + np.linspace(0, 500, 1000)[:, None]
    signal[105] = 700_000
    windows = cut([in_memory(signal.astype(np.float32))], TEN_HZ)["train"]
    first, struck = windows[0]["signal"], windows[10]["signal"]
    assert first.shape == (2, 10)
    assert abs(float(first.median())) < 1
    assert float(struck.max()) == TEN_HZ.clip
    assert float(struck[:, :5].abs().max()) < TEN_HZ.clip


def test_a_flat_channel_stays_finite() -> None:
    windows = cut([in_memory(np.zeros((1000, 2), np.float32))], TEN_HZ)["train"]
    assert float(windows[0]["signal"].abs().max()) == 0


def test_recordings_that_are_too_short_are_refused_with_what_to_do() -> None:
    with pytest.raises(DataError, match="long enough") as caught:
        cut([in_memory(noise(40))], TEN_HZ)
    assert "dataset.window_s" in caught.value.remedy
    # A short one beside a long one has windows where it can.
    assert set(cut([in_memory(noise(1000)), in_memory(noise(12))], TEN_HZ)["train"].of) == {0}


@pytest.mark.parametrize("wrong", [{"window_s": 0.0}, {"test_share": 0.9}, {"cycles": 0}, {"clip": 0.0}, {"gap_s": -1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"dataset.{next(iter(wrong))}"):
        RecordingSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(not EYE_STATE.exists(), reason="the real sample, ../shared/data, is not here")
def test_the_real_sample_has_fourteen_channels_whose_spikes_are_cut_off(tmp_path: Path) -> None:
    dataset = RecordingSettings(name="eye_state", path=str(EYE_STATE), window_s=1.0, cycles=4)
    (recording,) = open_recordings(dataset, [EYE_STATE], tmp_path, SilentReporter())
    assert (len(recording.signal), len(recording.channels), recording.classes) == (14_980, 14, (0, 1))
    assert int((recording.labels[0:14_980] == 1).sum()) == 6_723
    assert float(recording.signal[0:14_980].max()) > 700_000
    sets = cut([recording], dataset)
    assert all(len(windows) > 10 for windows in sets.values())
    assert all(float(windows[at]["signal"].abs().max()) <= dataset.clip
               for windows in sets.values() for at in range(len(windows)))  # fmt: skip
