"""Cuts recordings into windows for training, validation and test, and normalises the windows.

A recording is split by time, with a gap between the sets, because neighbouring windows are alike. A normalised window
depends only on the window and on the training windows of its recording. Where subjects are split, all windows of a
recording are in one set, and a normalised window depends on all signals of its recording.

Shapes: T samples of a recording, C channels, W windows, L samples of a window.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train_tasks.bendr.recordings import UNLABELLED, Recording
from can_train_tasks.bendr.settings import RecordingSettings
from can_train_tasks.bendr.subjects import SETS

# Training windows that a recording's scale is computed from: more windows change only the third digit of the quartiles.
_SCALE_WINDOWS: Final = 256
_IQR_OF_NORMAL: Final = 1.349  # interquartile range of a normal distribution ÷ its standard deviation
_COUNTED: Final = 4096  # windows whose labels are counted at a time


def stretches(samples: int, dataset: RecordingSettings) -> Iterator[tuple[str, int, int]]:
    """Yields (set, first sample, sample after the last) of each stretch of a recording, in time order."""
    gap = dataset.samples(dataset.gap_s)
    train = 1.0 - dataset.validation_share - dataset.test_share
    ends = np.cumsum([0.0, train, dataset.validation_share, dataset.test_share]) / dataset.cycles
    for cycle in range(dataset.cycles):
        bounds = np.round((cycle / dataset.cycles + ends) * samples).astype(int)
        for name, start, stop in zip(SETS, bounds[:-1], bounds[1:], strict=True):
            # The gap is taken from the end of each stretch that another stretch follows.
            stop = int(stop) if stop == samples else int(stop) - gap
            if stop > start:
                yield name, int(start), stop


def window_starts(start: int, stop: int, length: int, stride: int) -> NDArray[np.int64]:
    """Returns the first samples of the whole windows of a stretch; the rest at its end is in no window."""
    return np.arange(start, stop - length + 1, stride, dtype=np.int64)


class PlacedWindow(dict[str, Any]):
    """A window's `signal` and `label`, which are collated; `columns` of a file of predictions also need its place.

    Attributes:
        recording: Its recording.
        start: Its first sample.
    """

    recording: Recording
    start: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows(Sequence[Mapping[str, Any]]):
    """Windows of one set, read from disk one by one.

    Attributes:
        recordings: All recordings.
        scales: Robust standard deviation [C] of the training windows of each recording.
        of: [W] position of the window's recording in `recordings`.
        starts: [W] first sample of the window.
        labels: [W] position of the window's class among the classes; `UNLABELLED` where there are no labels.
        length: L.
        clip: Largest absolute value of a normalised window.
        weights: Weight of each class in the loss; empty: windows have no weights.
    """

    recordings: Sequence[Recording]
    scales: Sequence[NDArray[np.float64]]
    of: NDArray[np.int32]
    starts: NDArray[np.int64]
    labels: NDArray[np.int64]
    length: int
    clip: float
    weights: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, position: int) -> PlacedWindow:  # type: ignore[override]  # no slices
        if not 0 <= position < len(self):
            raise IndexError(position)
        of, start = int(self.of[position]), int(self.starts[position])
        window = centred(self.recordings[of], start, self.length) / self.scales[of]
        signal = np.clip(window, -self.clip, self.clip).astype(np.float32)
        label = int(self.labels[position])
        window_of = PlacedWindow(signal=torch.from_numpy(np.ascontiguousarray(signal.T)), label=label)
        if self.weights:
            window_of["weight"] = self.weights[label]
        window_of.recording, window_of.start = self.recordings[of], start
        return window_of


def centred(recording: Recording, start: int, length: int) -> NDArray[np.float64]:
    """Reads a window [L, C] and subtracts each channel's median, since amplifiers drift."""
    window = np.asarray(recording.signal[start : start + length], dtype=np.float64)
    centre: NDArray[np.float64] = np.median(window, axis=0)
    return window - centre


def event_starts(recording: Recording, start: int, stop: int, dataset: RecordingSettings) -> NDArray[np.int64]:
    """Returns the first samples of the windows at the events of a stretch; events at one sample have one window.

    Raises:
        DataError: Events of two classes begin at one sample.
    """
    events = sorted({*recording.events})
    for (onset, label), (following, other) in pairwise(events):
        if onset == following:
            raise DataError("Events that begin at one sample have one class",
                            value=f"{recording.path} at {onset / dataset.sampling_hz:.3f} s: {label} and {other}",
                            remedy="Leave one of them out of dataset.events, or give both one class")  # fmt: skip
    onsets = np.array([onset for onset, _ in events], np.int64) + dataset.samples(dataset.offset_s)
    return onsets[(onsets >= start) & (onsets + dataset.samples(dataset.window_s) <= stop)]


def cut(
    recordings: Sequence[Recording],
    dataset: RecordingSettings,
    trained: Sequence[int] = (),
    *,
    labelled_only: bool = False,
    sets: Sequence[str] = (),
) -> dict[str, Windows]:
    """Cuts recordings into the windows of each set.

    Args:
        recordings: The recordings.
        dataset: How they are cut.
        trained: Classes of the model that is evaluated; empty: the classes of the recordings.
        labelled_only: Whether windows without a class are left out.
        sets: Set of each recording, empty where it is split by time; without sets, all recordings are.

    Returns:
        By set, its windows; where recordings have sets, only the sets that a recording has.

    Raises:
        DataError: A set would have no windows, or the model lacks a class.
    """
    length, stride = dataset.samples(dataset.window_s), max(1, dataset.samples(dataset.stride_s))
    classes = classes_of(recordings, dataset)
    if trained:
        there = {label for each in recordings for label in each.classes}
        if new := [label for label in sorted(there) if label not in trained]:
            raise DataError("The model knows the classes of its training recordings",
                            value=f"class {new[0]}; it knows {', '.join(map(str, trained))}",
                            remedy="Leave recordings with other classes out, or train on them, too")  # fmt: skip
        classes = [*trained]
    sets = sets or [""] * len(recordings)
    found: dict[str, list[tuple[int, NDArray[np.int64]]]] = {name: [] for name in SETS if "" in sets or name in sets}
    for index, recording in enumerate(recordings):
        whole = len(recording.signal)
        for name, start, stop in [(sets[index], 0, whole)] if sets[index] else stretches(whole, dataset):
            starts = (event_starts(recording, start, stop, dataset) if dataset.aligned
                      else window_starts(start, stop, length, stride))  # fmt: skip
            found[name].append((index, starts))
    labels = {name: [_labels_of(recordings[index], starts, dataset, classes) for index, starts in parts]
              for name, parts in found.items()}  # fmt: skip
    if labelled_only:
        # Recordings without any label keep their windows: they are refused by name.
        chosen = {name: [(each != UNLABELLED) | (not recordings[index].classes)
                         for (index, _), each in zip(found[name], parts, strict=True)]
                  for name, parts in labels.items()}  # fmt: skip
        found = {name: [(index, starts[there]) for (index, starts), there in zip(parts, chosen[name], strict=True)]
                 for name, parts in found.items()}  # fmt: skip
        labels = {name: [each[there] for each, there in zip(parts, chosen[name], strict=True)]
                  for name, parts in labels.items()}  # fmt: skip
    scales = [_scale(one, _scaling_windows(one, dataset) if sets[position] else
                     [starts for index, starts in found["train"] if index == position], length)
              for position, one in enumerate(recordings)]  # fmt: skip
    for name, parts in found.items():
        if not sum(len(starts) for _, starts in parts):
            longest = max(len(one.signal) for one in recordings) / dataset.sampling_hz
            raise DataError(f"Recordings must be long enough for a window of the {name} set",
                            value=f"the longest has {longest:.1f} s, a window {dataset.window_s:g} s, a gap "
                            f"{dataset.gap_s:g} s; {dataset.cycles} cycle{'s' if dataset.cycles > 1 else ''}"
                            + (", windows at events of its classes" if dataset.events else ""),
                            remedy="Give longer recordings, or a shorter --set dataset.window_s=1")  # fmt: skip
    return {name: Windows(recordings=recordings, scales=scales, length=length, clip=dataset.clip,
                          of=np.concatenate([np.full(len(starts), index, np.int32) for index, starts in parts]),
                          starts=np.concatenate([starts for _, starts in parts]),
                          labels=np.concatenate(labels[name]))
            for name, parts in found.items()}  # fmt: skip


def classes_of(recordings: Sequence[Recording], dataset: RecordingSettings) -> list[int]:
    """Returns the classes, ascending: the classes that the settings name, else those that occur in the recordings."""
    # A fold without windows of a rare class has the same model as the others.
    return dataset.declared_classes or sorted({label for each in recordings for label in each.classes})


def every_window(recordings: Sequence[Recording], dataset: RecordingSettings) -> Windows:
    """Cuts recordings into windows from their beginnings on, whose labels are not looked at.

    Raises:
        DataError: A recording is shorter than a window.
    """
    length, stride = dataset.samples(dataset.window_s), max(1, dataset.samples(dataset.stride_s))
    starts, scales = [], []
    for recording in recordings:
        samples = len(recording.signal)
        starts.append(window_starts(0, samples, length, stride))
        if not len(starts[-1]):
            raise DataError("A recording is as long as a window at least",
                            value=f"{recording.path} has {samples / dataset.sampling_hz:.1f} s, a window "
                            f"{dataset.window_s:g} s", remedy="Leave the recording out")  # fmt: skip
        scales.append(_scale(recording, _scaling_windows(recording, dataset), length))
    of = [np.full(len(each), index, np.int32) for index, each in enumerate(starts)]
    return Windows(recordings=recordings, scales=scales, length=length, clip=dataset.clip, of=np.concatenate(of),
                   starts=np.concatenate(starts), labels=np.full(sum(map(len, starts)), UNLABELLED))  # fmt: skip


def _scaling_windows(recording: Recording, dataset: RecordingSettings) -> list[NDArray[np.int64]]:
    """Returns the first samples of the windows that decide the scale of a recording in one set: the windows of its
    training stretches, or all windows where subjects are split or the recording is too short for stretches.
    """
    length, stride = dataset.samples(dataset.window_s), max(1, dataset.samples(dataset.stride_s))
    samples = len(recording.signal)
    parts = [window_starts(start, stop, length, stride) for name, start, stop in stretches(samples, dataset)
             if name == SETS[0] and not dataset.by_subject]  # fmt: skip
    return parts if any(map(len, parts)) else [window_starts(0, samples, length, stride)]


def _scale(recording: Recording, parts: Sequence[NDArray[np.int64]], length: int) -> NDArray[np.float64]:
    """Returns the robust standard deviations [C] of evenly spread training windows; 1 where a channel is flat."""
    starts = np.concatenate([np.zeros(0, np.int64), *parts])
    if not len(starts):
        return np.ones(len(recording.channels))
    chosen = starts[np.unique(np.linspace(0, len(starts) - 1, min(len(starts), _SCALE_WINDOWS)).astype(int))]
    values = np.concatenate([centred(recording, int(start), length) for start in chosen])
    low, high = np.quantile(values, (0.25, 0.75), axis=0)
    scale: NDArray[np.float64] = (high - low) / _IQR_OF_NORMAL
    return np.where(scale > 0, scale, 1.0)


def _labels_of(
    recording: Recording, starts: NDArray[np.int64], dataset: RecordingSettings, classes: Sequence[int]
) -> NDArray[np.int64]:
    if not dataset.aligned:
        return _majority(recording, starts, dataset.samples(dataset.window_s), classes)
    offset = dataset.samples(dataset.offset_s)
    class_at = {onset + offset: UNLABELLED if label == UNLABELLED else classes.index(label)
                for onset, label in recording.events}  # fmt: skip
    return np.array([class_at[start] for start in starts.tolist()], np.int64)


def _majority(
    recording: Recording, starts: NDArray[np.int64], length: int, classes: Sequence[int]
) -> NDArray[np.int64]:
    """Returns, for each window, the position in `classes` of the class that most of its samples have; `UNLABELLED`
    where fewer than half of its samples have a class.
    """
    if not recording.classes:
        return np.full(len(starts), UNLABELLED, dtype=np.int64)
    found = []
    for chosen in (starts[first : first + _COUNTED] for first in range(0, len(starts), _COUNTED)):
        labels = recording.labels[int(chosen[0]) : int(chosen[-1]) + length]
        before = np.zeros((len(labels) + 1, len(classes)), dtype=np.int64)
        np.cumsum(labels[:, None] == np.asarray(classes), axis=0, out=before[1:])
        inside = chosen - chosen[0]
        counts = before[inside + length] - before[inside]
        found.append(np.where(2 * counts.sum(axis=1) >= length, np.argmax(counts, axis=1), UNLABELLED))
    return np.concatenate([np.zeros(0, np.int64), *found])
