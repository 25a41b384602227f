"""Prepares a CAN data set: the graphs of its logs, from the cache or made anew, and what each of them is for.

Shapes: G windows of the data set, R of one log or part.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from can_train.errors import DataError
from can_train.io.arrays import META, FolderDamageError, discard_folder
from can_train.tasks.can.data.cache import SCHEMA, CacheContent, CacheWriter, read_cache, read_content
from can_train.tasks.can.data.frames import BENIGN, Frames
from can_train.tasks.can.data.graphs import FlatGraphs, GraphBuilder, SourceFile
from can_train.tasks.can.data.layout import LOG, TEST, HashedLog, LogFile, drop_duplicates, find_logs, hash_logs
from can_train.tasks.can.data.reading import LogReader, changed_log, merge_kinds
from can_train.tasks.can.synthetic.writing import synthetic_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from can_train.reporter import Reporter
    from can_train.tasks.can.settings import CanDatasetSettings

    Rows = NDArray[np.int64]

# Windows. A shorter run of benign or attack windows is not cut by itself: a fifth of it would be a window or none.
MIN_PHASE_WINDOWS: Final = 10

_KEY_LENGTH: Final = 24  # hexadecimal digits of a cache's name: 96 bits, so that two data sets never meet
_PART_NAMES: Final = ("training", "validation", "test")


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Rows of `FlatGraphs`, ascending in every part.

    Attributes:
        train: [R] int64.
        validation: [R] int64, for thresholds and early stopping.
        test: [R] int64 for every test group; each group is tested by itself.
    """

    train: Rows
    validation: Rows
    test: dict[str, Rows]


@dataclass(frozen=True, kw_only=True)
class DataSample:
    """The data set behind a sample.

    Attributes:
        train_windows: Estimate of the training windows of the whole data set.
        every_log: Whether all logs for training were sampled.
        note: What was sampled, as a sentence.
    """

    train_windows: int
    every_log: bool
    note: str


@dataclass(frozen=True, kw_only=True, eq=False)
class CanData:
    """A data set that is ready for training and testing.

    Attributes:
        flat: Its graphs, mapped from the cache.
        split: Which of them train, validate and test.
        notices: What the user should know about the data; the reporter has them already.
        sample: The data set that the graphs are a sample of; None where they are all graphs.
    """

    flat: FlatGraphs
    split: Split
    notices: tuple[str, ...]
    sample: DataSample | None = None


def load_data(dataset: CanDatasetSettings, data_root: Path, cache_dir: Path, reporter: Reporter) -> CanData:
    """Finds a data set's logs, or simulates them, and prepares them for training.

    Raises:
        DataError: A log cannot be read, or is too short.
    """
    logs = find_logs(simulate_if_synthetic(dataset, cache_dir, reporter), data_root)
    return prepare(dataset, logs, cache_dir, reporter)


def simulate_if_synthetic(dataset: CanDatasetSettings, cache_dir: Path, reporter: Reporter) -> CanDatasetSettings:
    """Returns the data set with the path of its logs, which are simulated first if it is synthetic and not cached."""
    if not dataset.is_synthetic:
        return dataset
    return replace(dataset, path=str(synthetic_folder(cache_dir, dataset.synthetic, reporter)))


def prepare(dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter) -> CanData:
    """Makes the graphs of logs, or finds them in the cache, and splits them.

    Args:
        dataset: How logs are read, windowed and split.
        logs: The logs, those for training first.
        cache_dir: Folder of prepared data sets, each a folder of its own.
        reporter: Receives progress and notices.

    Raises:
        DataError: A log cannot be read, changed meanwhile, or is too short.
        StateError: The cache folder cannot be written.
    """
    return _prepare(dataset, logs, cache_dir, reporter, _by_shares(dataset))


def prepare_for_evaluation(
    dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter
) -> CanData:
    """Does what `prepare` does for logs that no training saw: all of their windows are for testing."""
    return _prepare(dataset, logs, cache_dir, reporter, lambda flat: (_evaluation_split(flat), []))


def find_prepared(
    dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter
) -> CanData | None:
    """Finds the graphs of logs in the cache without reading the logs: by their paths, and by their times, which tell
    whether they changed since. Writes nothing, and does not verify the graphs.

    Returns:
        The data set; None where the cache has none that is surely of these logs.
    """
    for folder in sorted(cache_dir.glob("[!.]*/")):
        remaining = _recorded_logs(folder, logs)
        if remaining and cache_key(dataset, remaining) == folder.name:
            try:
                graphs = read_cache(folder, verify=False)
            except FolderDamageError:
                return None
            return _assemble(remaining, graphs, [], reporter, _by_shares(dataset))
    return None


def _recorded_logs(folder: Path, logs: Sequence[LogFile]) -> list[HashedLog]:
    """Returns the logs that a cache was made of, with the recorded hashes; none where one is missing or changed since,
    or where a log that was left out can be no copy of these.
    """
    try:
        finished_ns, sources = (folder / META).stat().st_mtime_ns, read_content(folder).sources
        states = {log: log.path.stat() for log in logs}
    except (OSError, FolderDamageError):
        return []
    # No program can set the time of a change (ctime): a log that was replaced by an older one shows by it.
    if any(max(state.st_mtime_ns, state.st_ctime_ns) > finished_ns for state in states.values()):
        return []
    places = {(log.path.resolve(), log.role, log.group): log for log in logs}
    found = [(places.get((Path(source.path).resolve(), source.role, source.group)), source) for source in sources]
    remaining = [
        HashedLog(log=log, sha256=source.sha256, size=states[log].st_size, modified_ns=states[log].st_mtime_ns)
        for log, source in found
        if log is not None
    ]
    sizes = {hashed.size for hashed in remaining}
    return remaining if all(state.st_size in sizes for state in states.values()) else []


def _by_shares(dataset: CanDatasetSettings) -> Callable[[FlatGraphs], tuple[Split, list[str]]]:
    return lambda flat: split_rows(flat, dataset.validation_share, dataset.test_share)


def _prepare(
    dataset: CanDatasetSettings,
    logs: Sequence[LogFile],
    cache_dir: Path,
    reporter: Reporter,
    split: Callable[[FlatGraphs], tuple[Split, list[str]]],
) -> CanData:
    remaining, notices = drop_duplicates(hash_logs(logs, reporter))
    folder = cache_dir / cache_key(dataset, remaining)
    graphs = _read_or_discard(folder, reporter) or _build(dataset, remaining, folder, reporter)
    return _assemble(remaining, graphs, notices, reporter, split)


def _assemble(
    logs: Sequence[HashedLog],
    graphs: tuple[FlatGraphs, CacheContent],
    notices: Sequence[str],
    reporter: Reporter,
    split: Callable[[FlatGraphs], tuple[Split, list[str]]],
) -> CanData:
    flat, content = graphs
    # The cache may have been made when the same logs lay elsewhere.
    here = [replace(source, path=str(log.log.path)) for source, log in zip(flat.sources, logs, strict=True)]
    flat = replace(flat, sources=tuple(here))
    parts, split_notices = split(flat)
    notices = (*notices, *content.notices, *split_notices)
    for notice in notices:
        reporter.notice(notice)
    return CanData(flat=flat, split=parts, notices=notices)


def cache_key(dataset: CanDatasetSettings, logs: Sequence[HashedLog]) -> str:
    """Names the graphs of these logs under these settings."""
    content = {
        "schema": SCHEMA,
        "window": dataset.window,
        "stride": dataset.stride,
        "format": dataset.format,
        "columns": asdict(dataset.columns),
        "id_base": dataset.id_base,
        "benign_values": sorted(dataset.benign_values),
        "max_malformed": dataset.max_malformed,
        "logs": [(hashed.sha256, hashed.log.role, hashed.log.group, hashed.log.kind) for hashed in logs],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_KEY_LENGTH]


def _read_or_discard(folder: Path, reporter: Reporter) -> tuple[FlatGraphs, CacheContent] | None:
    if not folder.exists():
        return None
    try:
        return read_cache(folder)
    except FolderDamageError as damage:
        reporter.notice(f"The prepared graphs in {folder} are damaged and are made again: {damage}")
        discard_folder(folder)
        return None


def _build(
    dataset: CanDatasetSettings, logs: Sequence[HashedLog], folder: Path, reporter: Reporter
) -> tuple[FlatGraphs, CacheContent]:
    with (
        CacheWriter(folder) as writer,
        reporter.stage("Reading logs", total=sum(log.size for log in logs), unit="bytes") as stage,
    ):
        graphs = GraphWriter(dataset, writer)
        num_frames = 0
        for hashed in logs:
            reader = LogReader(hashed.log.path, dataset, kind=hashed.log.kind)
            builder = GraphBuilder(dataset.window, dataset.stride)
            for frames in reader.blocks():
                graphs.write(frames, builder, reader)
                num_frames += len(frames)
                stage.advance(0, frames=num_frames)
            if not hashed.is_unchanged():  # since it was hashed, which was before it was opened
                raise changed_log(hashed.log.path)
            if builder.frames_seen < dataset.window:
                found = f"{hashed.log.path} has {builder.frames_seen}, a window {dataset.window}"
                raise too_short(found, dataset.window)
            graphs.end_log(hashed.log, reader, builder.frames_seen, hashed.sha256, reader.report.summary())
            stage.advance(hashed.size)
        content = graphs.content()
        return writer.finish(content), content


def too_short(found: str, window: int) -> DataError:
    """Makes the error for logs without a single window."""
    return DataError("A log must hold at least one window of frames", value=found, remedy=_longer_logs(window))


def _longer_logs(window: int) -> str:
    return f"Use longer logs, or smaller windows: --set dataset.window={max(2, window // 5)}"


class GraphWriter:
    """Makes graphs of the frames of several logs, one log after another, and writes them to a cache."""

    def __init__(self, dataset: CanDatasetSettings, writer: CacheWriter) -> None:
        self._window = dataset.window
        self._writer = writer
        self._kinds = [BENIGN]
        self._sources: list[SourceFile] = []
        self.notices: list[str] = []

    def write(self, frames: Frames, builder: GraphBuilder, reader: LogReader) -> None:
        """Writes the windows that the next frames of the current log complete."""
        for block in builder.feed(frames):
            label = merge_kinds(self._kinds, reader.kinds)[block.label]
            self._writer.append(replace(block, label=label), len(self._sources))

    def end_log(self, log: LogFile, reader: LogReader, num_frames: int, sha256: str, notices: Iterable[str]) -> None:
        """Records the log that the last frames came from, with the reader's notices."""
        self.notices += notices
        source = SourceFile(
            path=str(log.path), role=log.role, group=log.group, frames=num_frames, labelled=reader.labelled,
            sha256=sha256,
        )  # fmt: skip
        self._sources.append(source)

    def content(self) -> CacheContent:
        """Returns what the cache records beside the graphs."""
        return CacheContent(
            kinds=tuple(self._kinds), sources=tuple(self._sources), window=self._window, notices=tuple(self.notices)
        )


def split_rows(flat: FlatGraphs, validation_share: float, test_share: float) -> tuple[Split, list[str]]:
    """Splits all windows by the roles of their logs (see `SourceFile`).

    The last `test_share` of a log is for testing, and the last `validation_share` of what remains for validation. Where
    that leaves a part with one class only although the log has both, every benign and every attack phase of the log is
    cut so.

    Args:
        flat: All windows.
        validation_share: Share of the training time, in (0, 1).
        test_share: Share of a single log's time, in (0, 1).

    Returns:
        The split, and notices about logs that were cut by phases or lack a class.

    Raises:
        DataError: A part would be empty.
    """
    # In time, never at random: windows that overlap or follow one another are nearly equal, and a random split would
    # test on what was trained on.
    train: list[Rows] = []
    validation: list[Rows] = []
    test: dict[str, list[Rows]] = {}
    notices: list[str] = []
    for source, rows in _rows_by_source(flat):
        if source.role == TEST:
            test.setdefault(source.group, []).append(rows)
            continue
        shares = (validation_share, test_share) if source.role == LOG else (validation_share,)
        parts, log_notices = _cut_log(flat, rows, shares)
        notices += [f"{source.path}: {notice}" for notice in log_notices]
        train.append(parts[0])
        validation.append(parts[1])
        if source.role == LOG:
            test.setdefault(source.group, []).append(parts[2])
    split = Split(
        train=_concatenate(train),
        validation=_concatenate(validation),
        test={group: _concatenate(rows) for group, rows in test.items()},
    )
    named = {"training": split.train, "validation": split.validation}
    named |= {f"test ({group})": rows for group, rows in split.test.items()}
    if empty := [name for name, rows in named.items() if not len(rows)]:
        raise DataError(
            "Every part of a data set needs at least one window",
            value=f"none for {', '.join(empty)}",
            remedy=f"{_longer_logs(flat.window)}; or change dataset.validation_share and dataset.test_share",
        )
    return split, notices


def _evaluation_split(flat: FlatGraphs) -> Split:
    """Makes the split of data that no training saw: every window is for testing."""
    groups: dict[str, list[Rows]] = {}
    for source, rows in _rows_by_source(flat):
        groups.setdefault(source.group, []).append(rows)
    test = {group: _concatenate(rows) for group, rows in groups.items()}
    return Split(train=_concatenate([]), validation=_concatenate([]), test=test)


def _rows_by_source(flat: FlatGraphs) -> list[tuple[SourceFile, Rows]]:
    return [(source, np.flatnonzero(flat.source == index)) for index, source in enumerate(flat.sources)]


def _concatenate(parts: list[Rows]) -> Rows:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _cut_log(flat: FlatGraphs, rows: Rows, shares: Sequence[float]) -> tuple[list[Rows], list[str]]:
    """Cuts one log into training, validation and, where `shares` has a second share, test; returns notices too."""

    def has_both_classes(part: Rows) -> bool:
        return len(np.unique(flat.label[part] > 0)) > 1

    is_attack = flat.label[rows] > 0
    plain = _cut_phases(flat, rows, np.array([0]), shares)
    lacking = [name for name, part in zip(_PART_NAMES, plain, strict=False) if not has_both_classes(part)]
    if not lacking or not has_both_classes(rows):
        return plain, []
    by_phase = _cut_phases(flat, rows, find_phase_starts(is_attack), shares)
    if all(has_both_classes(part) for part in by_phase):
        return by_phase, ["a plain cut of its time leaves a part with one class only, so each phase is cut by itself"]
    return plain, [f"its attacks lie so that one class is missing from {' and '.join(lacking)}"]


def find_phase_starts(is_attack: NDArray[np.bool_]) -> Rows:
    """Finds where phases of benign and of attack windows begin.

    Runs shorter than `MIN_PHASE_WINDOWS` belong to the phase before them (at the beginning, to the one after).

    Args:
        is_attack: [R] the windows of one log, at least one.

    Returns:
        [number of phases] int64, ascending, beginning with 0.
    """
    run_start = np.flatnonzero(np.diff(is_attack, prepend=~is_attack[:1]))
    run_length = np.diff(run_start, append=len(is_attack))
    long_run = run_start[run_length >= MIN_PHASE_WINDOWS]
    changes = np.diff(is_attack[long_run], prepend=~is_attack[long_run[:1]])
    return np.concatenate([[0], long_run[changes][1:]])


def _cut_phases(flat: FlatGraphs, rows: Rows, starts: Rows, shares: Sequence[float]) -> list[Rows]:
    """Cuts every phase of a log chronologically.

    Args:
        flat: All windows.
        rows: [R] the log's windows.
        starts: Positions in `rows` where phases begin.
        shares: Share of the time before it that each later part takes: validation's, then test's.

    Returns:
        The rows of each part.
    """
    first = flat.first_frame[rows]
    num_parts = len(shares) + 1
    bounds: list[int] = []
    for begin, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        cuts = [int(end)]
        for share in reversed(shares):
            cuts.append(cuts[-1] - round((cuts[-1] - int(begin)) * share))
        bounds += [int(begin), *reversed(cuts[1:])]
    cut_frames = np.append(first, np.iinfo(np.int64).max)[bounds]  # a part that begins at the end is empty
    # Cuts lie where a window begins: only windows that overlap a cut are left out, and none where they do not overlap.
    part = np.searchsorted(cut_frames, first, side="right") - 1
    last_part = np.searchsorted(cut_frames, first + flat.window - 1, side="right") - 1
    whole = part == last_part
    return [rows[whole & (part % num_parts == index)] for index in range(num_parts)]
