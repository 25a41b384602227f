"""Reads recordings: CSV files with a header and a row for each sample; EDF, BDF and FIF files by MNE.

A file is read once, block by block, into arrays on disk. After that, memory holds only the windows that are trained on,
for any number of recordings.

Shapes: T samples of a recording, C channels.
"""

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
_READER_VERSION: Final = 4

UNLABELLED: Final = -1
_BLOCK_LINES: Final = 8192  # lines read at a time: a few MiB of text
_SEPARATORS: Final = (",", ";", "\t")
_LABEL_NAMES: Final = ("label", "labels", "class", "target", "y", "state", "stage", "eye_detection", "eyedetection")
# Names of columns that count time, with their unit or a format: "Time (s)", "time_ms", "Time:256Hz", "Sample Index".
_TIME_NAME: Final = re.compile(
    r"|t|index|unnamed: 0|(time|timestamps?|samples?|sample[ _]?(index|number))([ _:(\[].*)?", re.IGNORECASE
)
# Columns that are no channels where dataset.label names another one: a model would read the truth.
_OTHER_LABELS: Final = ("label", "labels", "class", "target", "stage", "eye_detection", "eyedetection")
_MNE_SUFFIXES: Final = (".edf", ".bdf", ".gdf", ".fif", ".fif.gz")
_SUFFIXES: Final = (".csv", *_MNE_SUFFIXES)
_HYPNOGRAM: Final = "-hypnogram"  # Sleep-EDF has the stages of SC4001E0-PSG.edf in SC4001EC-Hypnogram.edf
_SLEEP_NAME: Final = 7  # Characters of a name that both files have
_MARK: Final = "#"  # Begins an annotation that is no event where dataset.target is set
_EVENT_TABLE: Final = "*Labels.csv"  # Table of the classes of events: TrainLabels.csv of Kaggle's BCI challenge
_EVENT_PREFIX: Final = "Data_"  # Of its recordings: the first event of Data_S02_Sess01.csv is S02_Sess01_FB001
_MICROVOLTS: Final = 1e6  # In a volt, the unit of MNE
_CLOCK_LINES: Final = 1_000  # whose times show the rate of a recording
_LEAST_HZ, _MOST_HZ = 16.0, 15_000.0  # rates of EEG: the times of one step give such a rate in one unit alone
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
    place = place_of(dataset, data_root)
    every = [place] if place.is_file() else sorted(path for path in place.glob("**/*") if _is_recording(path))
    files = every if place.is_file() else [path for path in every if _is_chosen(dataset, path, place)]
    if not files:
        raise MissingDataError("A data set is a recording or a folder of them", value=_lack(dataset, place, every),
                               remedy="Check --dataset, and --data-root where the data set has a name; "
                               "--dataset synthetic needs no files" if not dataset.origin else
                               f"{dataset.origin}\nThen give the folder: --set dataset.path=FOLDER")  # fmt: skip
    return files


def place_of(dataset: RecordingSettings, data_root: Path) -> Path:
    """Returns the file or the folder of a data set that is not simulated."""
    return Path(dataset.path) if dataset.path else data_root / (dataset.published or dataset.name)


def _lack(dataset: RecordingSettings, place: Path, every: Sequence[Path]) -> str:
    if every:
        patterns = f"of {_list(dataset.include)}" if dataset.include else "left"
        return f"{place} holds no file {patterns}, without {_list(dataset.exclude) or 'exceptions'}"
    return f"{place} holds no file that ends in {', '.join(_SUFFIXES)}" if place.is_dir() else f"{place} does not exist"


def _is_chosen(dataset: RecordingSettings, path: Path, place: Path) -> bool:
    inside = path.relative_to(place).as_posix()

    def is_of(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns for name in (path.name, inside))

    return (not dataset.include or is_of(dataset.include)) and not is_of(dataset.exclude)


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


def read_beginnings(
    dataset: RecordingSettings, files: Sequence[Path], samples: int, *, beside: Sequence[Path] = ()
) -> tuple[list[Recording], float]:
    """Reads the beginnings of a few recordings, and of the recordings `beside` them, into memory. A beginning that has
    no event is replaced by the stretch from the first event on.

    Returns:
        The recordings, and the ratio of the samples of `files` (estimated) to the samples that were read of them.

    Raises:
        DataError: As in `open_recordings`.
    """
    chosen, recordings, read_bytes = files[:_SAMPLED_FILES], [], 0
    for path in [*chosen, *beside]:
        with _reader(dataset, path) as reader:
            blocks = list(reader.blocks(samples))
            read_bytes += reader.read_bytes if path in chosen else 0
        signal = np.concatenate([block for block, _ in blocks])
        labels = np.concatenate([block for _, block in blocks])
        recordings.append(Recording(path=path, channels=reader.channels, signal=signal, labels=labels,
                                    classes=_classes(labels), events=reader.events))  # fmt: skip
    _check_alike(recordings)
    return recordings, max(1.0, sum(path.stat().st_size for path in files) / read_bytes)


def _open(dataset: RecordingSettings, path: Path, cache: Path, reporter: Reporter) -> Recording:
    sha256 = _digest(path)
    identity = json.dumps([_READER_VERSION, sha256, dataset.label, dataset.channels, dataset.exclude_channels,
                           *_of_events(dataset, path)])  # fmt: skip
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
    """Returns the settings that decide the events of a file, and its rate where it is resampled."""
    if path.name.lower().endswith(_MNE_SUFFIXES):
        return [list(dataset.events), dataset.target, dataset.event_s, dataset.sampling_hz]
    return [dataset.event_column] if dataset.event_column else []


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

    @property
    def events(self) -> Sequence[tuple[int, int]]: ...

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
        self.channels = tuple(dataset.channels or _without(picked, dataset.exclude_channels))
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
                start_s = self._sampled_from(raw, most / hz)
                raw.crop(start_s, start_s + most / hz, include_tmax=False, verbose="error")
            self._read_share = len(raw.times) / raw.info["sfreq"] / whole_s
            if raw.info["sfreq"] != hz:
                raw.load_data(verbose="error").resample(hz, verbose="error")
            labels = self._labels(raw)
        for start in range(0, len(labels), _BLOCK_LINES):
            stop = min(start + _BLOCK_LINES, len(labels))
            with self._reading():
                values = raw.get_data(start=start, stop=stop, verbose="error").T * _MICROVOLTS
            yield values.astype(np.float32), labels[start:stop]

    def _sampled_from(self, raw: Any, length_s: float) -> float:
        """Returns the first second of a sample of `length_s` seconds: 0, or where the first event is if it is later."""
        events = [onset_s for onset_s, _, label in self._events(raw) if label is not None and onset_s >= 0]
        first_s = min(events, default=0.0) + min(self._dataset.offset_s, 0.0)
        return max(0.0, min(first_s, raw.times[-1] - length_s)) if first_s > length_s / 2 else 0.0

    def _events(self, raw: Any) -> list[tuple[float, float, int | None]]:
        """Returns the seconds from the recording's beginning, the duration and the class of each annotation."""
        annotations = raw.annotations
        # Without a date, annotations count from the beginning of the recording that this recording was cut from.
        origin, cut_s = annotations.orig_time, raw.first_time if annotations.orig_time is None else 0.0
        onsets = raw.time_as_index(annotations.onset - cut_s, use_rounding=True, origin=origin) / raw.info["sfreq"]
        classes = self._classes_of([str(name) for name in annotations.description])
        return [*zip(onsets.tolist(), annotations.duration.tolist(), classes, strict=True)]

    def _classes_of(self, names: Sequence[str]) -> list[int | None]:
        """Returns the class of each annotation; None: it is no event."""
        there = f"it has {_list(sorted(set(names)))}" if names else "it has no annotations"
        if "-psg" in self._path.name.lower() and _hypnogram(self._path) is None:
            there = f"there is no {self._path.name[:_SLEEP_NAME]}*-Hypnogram.edf beside it"
        if self._dataset.target:
            targets = [match[1] for name in names if (match := re.search(self._dataset.target, name))]
            if not targets:
                raise DataError("An annotation of a recording names its target, as dataset.target says",
                                value=f"{self._path}: {there}",
                                remedy="""Give its form: --set 'dataset.target="#Tgt(.)"'""")  # fmt: skip
            return [None if name.startswith(_MARK) else int(targets[0] in name) for name in names]
        classes = self._dataset.class_of_event
        if classes and not set(names) & {*classes}:
            raise DataError("A recording has events of dataset.events", value=f"{self._path}: {there}",
                            remedy="Name events that it has: --set 'dataset.events=[T1:0,T2:1]'")  # fmt: skip
        return [classes.get(name) for name in names]

    def _labels(self, raw: Any) -> NDArray[np.int8]:
        """Returns the class of each sample, and notes the events."""
        labels, hz = np.full(len(raw.times), UNLABELLED, np.int8), self._dataset.sampling_hz
        events = []
        for onset_s, duration_s, label in self._events(raw):
            onset = round(onset_s * hz)
            if label is not None and 0 <= onset < len(labels):
                labels[onset : onset + max(1, round((self._dataset.event_s or duration_s) * hz))] = label
                events.append((onset, label))
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

    def __init__(self, dataset: RecordingSettings, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._events: list[tuple[int, int]] = []
        self._before = 0.0  # The last value of the column of events
        header = file.readline().rstrip("\r\n")
        self._separator = max(_SEPARATORS, key=header.count)
        names = [name.strip().strip('"') for name in header.split(self._separator)]
        if not any(names) or all(_is_number(name) for name in names):
            _refuse(path, 1, "The first line of a recording names its columns", header[:80], "Write a header above it")
        self._names = names
        if dataset.label and dataset.label not in names:
            _refuse(path, 1, "dataset.label names a column", repr(dataset.label), f"Its columns: {_list(names)}")
        self._label = dataset.label or next((name for name in names if name.lower() in _LABEL_NAMES), None)
        self._event = dataset.event_column
        if self._event and self._event not in names:
            _refuse(path, 1, "dataset.event_column names a column", repr(self._event), f"Its columns: {_list(names)}")
        self._class_of = _event_classes(path) if self._event else {}
        beside = (self._label, self._event)
        self.channels = tuple(dataset.channels) or tuple(_without(
            [name for name in names if name not in beside and not _TIME_NAME.fullmatch(name)
             and not (dataset.label and name.lower() in _OTHER_LABELS)], dataset.exclude_channels
        ))  # fmt: skip
        for name in self.channels:
            if name not in names:
                _refuse(path, 1, "Every channel is a column of a recording", repr(name), f"Its columns: {_list(names)}")
        for name in (*self.channels, *filter(None, beside)):
            if names.count(name) > 1:
                _refuse(path, 1, "Every column that is read has a name of its own",
                        f"{names.count(name)} columns are named {name!r}", "Rename them in the header")  # fmt: skip
        if not self.channels:
            _refuse(path, 1, "A recording has at least one channel", f"columns {_list(names)}",
                    "Name them: --set 'dataset.channels=[AF3,F7]'")  # fmt: skip

    @property
    def events(self) -> Sequence[tuple[int, int]]:
        return self._events

    @property
    def read_bytes(self) -> int:
        return self._file.buffer.tell()

    def blocks(self, most: int | None = None) -> Iterator[Block]:
        """Yields the samples in blocks; stops after about `most` samples, if given."""
        line, columns = 2, [self._names.index(name) for name in self.channels]
        label = self._event or self._label
        if label is not None:
            columns.append(self._names.index(label))
        first = 0
        while (most is None or line - 2 < most) and (lines := list(islice(self._file, _BLOCK_LINES))):
            values = self._numbers(lines, line, columns)
            labels = np.full(len(values), UNLABELLED, dtype=np.int8)
            if self._event:
                values, column = values[:, :-1], values[:, -1]
                labels = self._begun(column, first)
            elif self._label is not None:
                values, column = values[:, :-1], values[:, -1]
                for row in np.flatnonzero((column != np.round(column)) | (column < 0) | (column >= MOST_CLASSES))[:1]:
                    _refuse(self._path, line + int(row), f"A label is a whole number from 0 to {MOST_CLASSES - 1}",
                            f"{column[row]:g} in column {self._label!r}",
                            "Name the column of labels: --set dataset.label=NAME")  # fmt: skip
                labels = column.astype(np.int8)
            if len(values):
                yield values.astype(np.float32), labels
            line, first = line + len(lines), first + len(values)
        if line == 2:
            _refuse(self._path, 2, "A recording has samples below its header", "none", "Give a whole recording")

    def _begun(self, column: NDArray[np.float64], first: int) -> NDArray[np.int8]:
        """Notes the events that begin in a block from sample `first` on. Returns the class of each sample: an event's
        class at its first sample, no class elsewhere.
        """
        labels, active = np.full(len(column), UNLABELLED, np.int8), np.append(self._before, column) != 0
        for row in np.flatnonzero(active[1:] & ~active[:-1]).tolist():
            name = f"{self._path.name.partition('.')[0].removeprefix(_EVENT_PREFIX)}_FB{len(self._events) + 1:03}"
            labels[row] = self._class_of.get(name, UNLABELLED)
            self._events.append((first + row, int(labels[row])))
        self._before = float(column[-1]) if len(column) else self._before
        return labels

    def _numbers(self, lines: list[str], first: int, columns: list[int]) -> NDArray[np.float64]:
        for number, text in enumerate(lines, start=first):
            if text.count(self._separator) >= len(self._names):
                self._check_width(number, text.rstrip("\r\n").split(self._separator))
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

    def _check_width(self, line: int, cells: list[str]) -> None:
        # Separators at the end of a row are no cells. A cell without a name is mostly the first: the row's number.
        if any(cell.strip() for cell in cells[len(self._names) :]):
            _refuse(self._path, line, "Every cell of a row has a name in the header",
                    f"{len(cells)} cells under {len(self._names)} names",
                    "Name the first column, too, such as 'index', or remove it")  # fmt: skip


def _tables(path: Path) -> list[Path]:
    """Lists the tables of event classes in the folder of a recording and in the folder above it."""
    return [table for folder in (path.parent, path.parent.parent) for table in sorted(folder.glob(_EVENT_TABLE))]


def _event_classes(path: Path) -> dict[str, int]:
    """Reads the class of each event by its name: columns IdFeedBack and Prediction of Kaggle's BCI challenge.

    Raises:
        DataError: A table has other columns, or classes other than 0 and 1.
    """
    classes = {}
    for table in _tables(path):
        with _opened(table) as file:
            rows = csv.reader(file)
            if len(next(rows, ())) != 2:
                _refuse(table, 1, "A table of event classes has two columns", "", "Columns: IdFeedBack,Prediction")
            for line, row in enumerate(rows, start=2):
                if len(row) != 2 or row[1].strip() not in ("0", "1"):
                    _refuse(table, line, "The class of an event is 0 or 1", repr(",".join(row)), "Mend the row")
                classes[row[0].strip()] = int(row[1])
    return classes


def _without(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


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


def clock_hz(path: Path) -> float | None:
    """Returns the samples a second by the column of times of a CSV recording, in the unit in which that is a rate of
    EEG; None: it has no such column, or its times are of no such rate.
    """
    if path.name.lower().endswith(_MNE_SUFFIXES):
        return None
    with _opened(path) as file:
        lines = [line.rstrip("\r\n") for line in islice(file, _CLOCK_LINES)]
    separator = max(_SEPARATORS, key=lines[0].count) if lines else ""
    names = [name.strip().strip('"').lower() for name in lines[0].split(separator)] if separator else []
    column = next((number for number, name in enumerate(names) if name == "t" or name.startswith("time")), None)
    if column is None:
        return None
    try:
        times = [float(line.split(separator)[column]) for line in lines[1:] if line.strip()]
    except (ValueError, IndexError):
        return None
    step = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    # Steps of 1 count samples.
    rates = (1 / (step * unit) for unit in (1.0, 1e-3, 1e-6, 1e-9)) if 0 < step < np.inf and step != 1 else ()
    return next((rate for rate in rates if _LEAST_HZ <= rate <= _MOST_HZ), None)


def _digest(path: Path) -> str:
    """Computes the digest of a recording, and of the tables of its sleep stages or of its events beside it."""
    stages = _hypnogram(path)
    beside = [stages] if stages is not None else _tables(path) if path.name.startswith(_EVENT_PREFIX) else []
    return digest_of([_sha256(path), *map(_sha256, beside)]) if beside else _sha256(path)


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
