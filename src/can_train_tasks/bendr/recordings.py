"""Reads recordings: CSV files with a header and a row for each sample; EDF, BDF and FIF files by MNE.

A file is read once, block by block, into arrays on disk. After that, memory holds only the windows that are trained on,
for any number of recordings.

Shapes: T samples of a recording, C channels.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from can_train.errors import CanTrainError, ConfigError, DataError, MissingDataError, first_sentence
from can_train.io.arrays import ArrayWriter, FolderDamageError, StoredArray, discard_folder, read_arrays
from can_train.reporter import Reporter
from can_train_tasks.bendr.settings import MOST_CLASSES, RecordingSettings

# Raise it whenever the same file gives other arrays, so that folders of an earlier version are not used.
_READER_VERSION: Final = 1

UNLABELLED: Final = -1
_BLOCK_LINES: Final = 8192  # lines read at a time: a few MiB of text
_SEPARATORS: Final = (",", ";", "\t")
_LABEL_NAMES: Final = ("label", "labels", "class", "target", "y", "state", "stage", "eye_detection", "eyedetection")
_TIME_NAMES: Final = ("", "time", "time_s", "timestamp", "t", "index", "sample")
_MNE_SUFFIXES: Final = (".edf", ".bdf", ".fif", ".fif.gz")
_SUFFIXES: Final = (".csv", *_MNE_SUFFIXES)
_HYPNOGRAM: Final = "-hypnogram"  # Sleep-EDF has the stages of SC4001E0-PSG.edf in SC4001EC-Hypnogram.edf
_SLEEP_NAME: Final = 7  # Characters of a name that both files have
_MICROVOLTS: Final = 1e6  # In a volt, the unit of MNE
_SAMPLED_FILES: Final = 4  # a plan reads the beginnings of this many files


class SampleRows(Protocol):
    """Samples of a recording, read by slice: an array in memory or on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> NDArray[Any]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One recording, as it is read from a file.

    Attributes:
        path: The file.
        channels: C names.
        signal: [T, C] float32, in the file's unit.
        labels: [T] int8; `UNLABELLED` where the file has no labels.
        classes: Labels that occur, ascending; empty where the file has no labels.
        sha256: Digest of the file; empty where only its beginning was read.
        events: First sample and class of each event, in the order of time; empty where the file has no events.
    """

    path: Path
    channels: tuple[str, ...]
    signal: SampleRows
    labels: SampleRows
    classes: tuple[int, ...]
    sha256: str = ""
    events: Sequence[tuple[int, int]] = ()


def find_recordings(dataset: RecordingSettings, data_root: Path) -> list[Path]:
    """Lists the files of a data set, sorted; the list is empty for simulated recordings.

    Raises:
        MissingDataError: The path does not exist, or the folder holds no recording.
    """
    if dataset.is_synthetic:
        return []
    place = Path(dataset.path) if dataset.path else data_root / (dataset.published or dataset.name)
    files = [place] if place.is_file() else sorted(path for path in place.glob("**/*") if _is_recording(path))
    if not files:
        found = f"holds no file that ends in {', '.join(_SUFFIXES)}" if place.is_dir() else "does not exist"
        raise MissingDataError("A data set is a recording or a folder of them", value=f"{place} {found}",
                               remedy="Check --dataset, and --data-root where the data set has a name; "
                               "--dataset synthetic needs no files")  # fmt: skip
    return files


def _is_recording(path: Path) -> bool:
    name = path.name.lower()
    return name.endswith(_SUFFIXES) and _HYPNOGRAM not in name and path.is_file()


def _hypnogram(path: Path) -> Path | None:
    """Returns the file with the sleep stages of a recording of Sleep-EDF; None: there is none."""
    start = path.name[:_SLEEP_NAME].lower()
    beside = (each for each in sorted(path.parent.glob("*.edf"))
              if _HYPNOGRAM in each.name.lower() and each.name.lower().startswith(start))  # fmt: skip
    return next(beside, None) if "-psg" in path.name.lower() else None


def data_digest(dataset: RecordingSettings, data_root: Path, reporter: Reporter) -> str:
    """Computes the digest of a data set's files; empty for simulated recordings, which the settings fully describe."""
    return digest_of([_digest(path) for path in find_recordings(dataset, data_root)])


def digest_of(hashes: Sequence[str]) -> str:
    """Joins the digests of files into one digest; empty without files."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else ""


def open_recordings(
    dataset: RecordingSettings, files: Sequence[Path], cache: Path, reporter: Reporter
) -> list[Recording]:
    """Opens recordings. A recording that the cache lacks is first read into a folder of the cache.

    Raises:
        DataError: A file cannot be read as a recording, or its channels differ from the first file's channels.
        StateError: The cache cannot be written.
    """
    recordings = []
    with reporter.stage("reading recordings", total=len(files), unit="files") as stage:
        for path in files:
            recordings.append(_open(dataset, path, cache, reporter))
            stage.advance(1)
    _check_alike(recordings)
    return recordings


def read_beginnings(dataset: RecordingSettings, files: Sequence[Path], samples: int) -> tuple[list[Recording], float]:
    """Reads the beginnings of a few recordings into memory.

    Returns:
        The recordings, and the ratio of all samples (estimated) to the samples that were read.

    Raises:
        DataError: As in `open_recordings`.
    """
    chosen, recordings, read_bytes = files[:_SAMPLED_FILES], [], 0
    for path in chosen:
        with _reader(dataset, path) as reader:
            blocks = list(reader.blocks(samples))
            read_bytes += reader.read_bytes
        signal = np.concatenate([block for block, _ in blocks])
        labels = np.concatenate([block for _, block in blocks])
        recordings.append(Recording(path=path, channels=reader.channels, signal=signal, labels=labels,
                                    classes=_classes(labels), events=reader.events))  # fmt: skip
    _check_alike(recordings)
    return recordings, max(1.0, sum(path.stat().st_size for path in files) / read_bytes)


def _open(dataset: RecordingSettings, path: Path, cache: Path, reporter: Reporter) -> Recording:
    sha256 = _digest(path)
    identity = json.dumps([_READER_VERSION, sha256, dataset.label, dataset.channels, *_of_events(dataset, path)])
    folder = cache / f"recording-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
    if folder.exists():
        try:
            return _stored(folder, path, sha256)
        except FolderDamageError as damage:
            reporter.notice(f"The prepared recording in {folder} is damaged and is made again: {damage}")
            discard_folder(folder)
    with _reader(dataset, path) as reader:
        kinds = {"signal": ("<f4", (len(reader.channels),)), "labels": ("|i1", ())}
        classes: set[int] = set()
        with ArrayWriter(folder, kinds) as writer:
            for signal, labels in reader.blocks():
                writer.append({"signal": signal, "labels": labels})
                classes.update(_classes(labels))
            if _digest(path) != sha256:
                raise DataError("A recording must not change while it is read", value=str(path), remedy="Start again")
            writer.finish({"channels": list(reader.channels), "classes": sorted(classes),
                           "events": [list(event) for event in reader.events]})  # fmt: skip
    return _stored(folder, path, sha256)


def _of_events(dataset: RecordingSettings, path: Path) -> list[Any]:
    """Returns the settings that decide the events of a file, and its rate; none for a CSV file."""
    is_read_by_mne = path.name.lower().endswith(_MNE_SUFFIXES)
    return [list(dataset.events), dataset.event_s, dataset.sampling_hz] if is_read_by_mne else []


def _stored(folder: Path, path: Path, sha256: str) -> Recording:
    _, meta = read_arrays(folder, ["signal", "labels"])
    return Recording(path=path, channels=tuple(meta["channels"]), classes=tuple(meta["classes"]), sha256=sha256,
                     events=[(onset, label) for onset, label in meta["events"]],
                     signal=StoredArray(folder, "signal"), labels=StoredArray(folder, "labels"))  # fmt: skip


Block = tuple[NDArray[np.float32], NDArray[np.int8]]
"""Values [B, C] and labels [B] of B samples."""


class _Reader(Protocol):
    """Reads the names of a recording's channels, then its samples block by block.

    Attributes:
        channels: C names.
        events: First sample and class of each event; known once the blocks have been read.
        read_bytes: Bytes of the file that have been read.
    """

    channels: tuple[str, ...]
    events: Sequence[tuple[int, int]]

    @property
    def read_bytes(self) -> int: ...

    def blocks(self, most: int | None = None) -> Iterator[Block]:
        """Yields the samples in blocks; stops after about `most` samples, if given."""


@contextmanager
def _reader(dataset: RecordingSettings, path: Path) -> Iterator[_Reader]:
    """Opens a recording; raises DataError where it cannot be read as one."""
    if path.name.lower().endswith(_MNE_SUFFIXES):
        yield _MneReader(dataset, path)
        return
    with _opened(path) as file:
        yield _CsvReader(dataset, path, file)


class _MneReader:
    """Reads EDF, BDF or FIF by MNE, resampled to the data set's rate; annotations are events."""

    def __init__(self, dataset: RecordingSettings, path: Path) -> None:
        self._dataset, self._path = dataset, path
        self.events: Sequence[tuple[int, int]] = ()
        self._mne = _mne()
        with self._reading():
            self._raw = self._mne.io.read_raw(path, preload=False, verbose="error")
            if (stages := _hypnogram(path)) is not None:
                self._raw.set_annotations(self._mne.read_annotations(stages), emit_warning=False)
            names = list(self._raw.ch_names)
            picked = [names[number] for number in self._mne.pick_types(self._raw.info, eeg=True, exclude=())]
        for name in dataset.channels:
            if name not in names:
                raise DataError("Every channel is one of a recording", value=f"{path}: {name!r}",
                                remedy=f"Its channels: {_list(names)}")  # fmt: skip
        self.channels = tuple(dataset.channels or picked)
        if not self.channels:
            raise DataError("A recording has at least one EEG channel", value=f"{path}: {_list(names)}",
                            remedy="Name them: --set 'dataset.channels=[Fz,Cz]'")  # fmt: skip
        self._read_share = 0.0

    @property
    def read_bytes(self) -> int:
        return round(self._read_share * self._path.stat().st_size)

    def blocks(self, most: int | None = None) -> Iterator[Block]:
        hz, raw = self._dataset.sampling_hz, self._raw
        whole_s = len(raw.times) / raw.info["sfreq"]
        with self._reading():
            raw.pick(list(self.channels), verbose="error").reorder_channels(list(self.channels))
            if most is not None and most / hz < whole_s:
                raw.crop(tmax=most / hz, include_tmax=False, verbose="error")
            self._read_share = len(raw.times) / raw.info["sfreq"] / whole_s
            if raw.info["sfreq"] != hz:
                raw.load_data(verbose="error").resample(hz, verbose="error")
            labels = self._labels(raw)
        for start in range(0, len(labels), _BLOCK_LINES):
            stop = min(start + _BLOCK_LINES, len(labels))
            with self._reading():
                values = raw.get_data(start=start, stop=stop, verbose="error").T * _MICROVOLTS
            yield values.astype(np.float32), labels[start:stop]

    def _labels(self, raw: Any) -> NDArray[np.int8]:
        """Returns the class of each sample, and notes the events."""
        labels, classes = np.full(len(raw.times), UNLABELLED, np.int8), self._dataset.class_of_event
        annotations, hz = raw.annotations, self._dataset.sampling_hz
        names = [str(name) for name in annotations.description]
        if classes and not set(names) & {*classes}:
            there = f"it has {_list(sorted(set(names)))}" if names else "it has no annotations"
            raise DataError("A recording has events of dataset.events", value=f"{self._path}: {there}",
                            remedy="Name events that it has: --set 'dataset.events=[T1:0,T2:1]'")  # fmt: skip
        onsets = raw.time_as_index(annotations.onset, use_rounding=True, origin=annotations.orig_time)
        events = []
        for name, onset, duration_s in zip(names, onsets.tolist(), annotations.duration.tolist(), strict=True):
            if name in classes and 0 <= onset < len(labels):
                stop = onset + max(1, round((self._dataset.event_s or duration_s) * hz))
                labels[onset:stop] = classes[name]
                events.append((onset, classes[name]))
        self.events = sorted(events)
        return labels

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except CanTrainError:
            raise
        except Exception as error:
            # MNE raises whatever the bytes of a file lead it to.
            raise DataError("A recording cannot be read", value=f"{self._path}: {first_sentence(error)}",
                            remedy="Check the file") from error  # fmt: skip


def _mne() -> Any:
    try:
        import mne
    except ImportError as error:
        raise ConfigError("EDF, BDF and FIF files are read by MNE, which is not installed",
                          remedy="Install it: pip install 'can-train[eeg]'") from error  # fmt: skip
    return mne


class _CsvReader:
    """Reads the header of a recording, then its rows block by block."""

    events: Sequence[tuple[int, int]] = ()

    def __init__(self, dataset: RecordingSettings, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        header = file.readline().rstrip("\r\n")
        self._separator = max(_SEPARATORS, key=header.count)
        names = [name.strip().strip('"') for name in header.split(self._separator)]
        if not any(names) or all(_is_number(name) for name in names):
            _refuse(path, 1, "The first line of a recording names its columns", header[:80], "Write a header above it")
        self._names = names
        if dataset.label and dataset.label not in names:
            _refuse(path, 1, "dataset.label names a column", repr(dataset.label), f"Its columns: {_list(names)}")
        self._label = dataset.label or next((name for name in names if name.lower() in _LABEL_NAMES), None)
        self.channels = tuple(dataset.channels) or tuple(
            name for name in names if name != self._label and name.lower() not in _TIME_NAMES
        )
        for name in self.channels:
            if name not in names:
                _refuse(path, 1, "Every channel is a column of a recording", repr(name), f"Its columns: {_list(names)}")
        if not self.channels:
            _refuse(path, 1, "A recording has at least one channel", f"columns {_list(names)}",
                    "Name them: --set 'dataset.channels=[AF3,F7]'")  # fmt: skip

    @property
    def read_bytes(self) -> int:
        return self._file.buffer.tell()

    def blocks(self, most: int | None = None) -> Iterator[Block]:
        """Yields the samples in blocks; stops after about `most` samples, if given."""
        line, columns = 2, [self._names.index(name) for name in self.channels]
        if self._label is not None:
            columns.append(self._names.index(self._label))
        while (most is None or line - 2 < most) and (lines := list(islice(self._file, _BLOCK_LINES))):
            values = self._numbers(lines, line, columns)
            labels = np.full(len(values), UNLABELLED, dtype=np.int8)
            if self._label is not None:
                values, column = values[:, :-1], values[:, -1]
                for row in np.flatnonzero((column != np.round(column)) | (column < 0) | (column >= MOST_CLASSES))[:1]:
                    _refuse(self._path, line + int(row), f"A label is a whole number from 0 to {MOST_CLASSES - 1}",
                            f"{column[row]:g} in column {self._label!r}",
                            "Name the column of labels: --set dataset.label=NAME")  # fmt: skip
                labels = column.astype(np.int8)
            if len(values):
                yield values.astype(np.float32), labels
            line += len(lines)
        if line == 2:
            _refuse(self._path, 2, "A recording has samples below its header", "none", "Give a whole recording")

    def _numbers(self, lines: list[str], first: int, columns: list[int]) -> NDArray[np.float64]:
        filled = [text for text in lines if text.strip()]
        try:
            values = np.loadtxt(filled, delimiter=self._separator, comments=None, ndmin=2, usecols=columns)
        except ValueError:
            values = np.full((1, len(columns)), np.nan)
        if not filled or np.isfinite(values).all():
            return values.reshape(len(filled), len(columns))
        for number, text in enumerate(lines, start=first):
            cells = text.rstrip("\r\n").split(self._separator)
            complete = len(cells) > max(columns) and all(_is_number(cells[one]) for one in columns)
            if text.strip() and not complete:
                _refuse(self._path, number, "Every sample of a recording is a row of finite numbers, one a column",
                        repr(text.rstrip()[:60]), "Mend or remove the row; gaps are not filled")  # fmt: skip
        raise AssertionError("a line that numpy refuses is one that is refused here")


def _refuse(path: Path, line: int, rule: str, value: str, remedy: str) -> NoReturn:
    raise DataError(rule, value=f"{path}, line {line}: {value}", remedy=remedy)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:20])


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _classes(labels: NDArray[np.int8]) -> tuple[int, ...]:
    return tuple(int(label) for label in np.unique(labels) if label != UNLABELLED)


def _opened(path: Path) -> Any:
    # utf-8-sig: a byte order mark would become part of the first column's name. replace: bytes that are no text reach
    # the check of their row, whose error names the line.
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def _digest(path: Path) -> str:
    """Computes the digest of a recording, and of its sleep stages if they are in another file."""
    stages = _hypnogram(path)
    return _sha256(path) if stages is None else digest_of([_sha256(path), _sha256(stages)])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_alike(recordings: Sequence[Recording]) -> None:
    first = recordings[0]
    for other in recordings[1:]:
        if other.channels != first.channels:
            raise DataError("All recordings of a data set have the same channels, in one order",
                            value=f"{_list(first.channels)} in {first.path}; {_list(other.channels)} in {other.path}",
                            remedy="Name those that all have: --set 'dataset.channels=[AF3,F7]'")  # fmt: skip
