"""Prepares a CAN data set: which logs are read, their graphs, and the split."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train.io.arrays import FolderDamageError, discard_folder
from can_train.reporter import Reporter, Stage
from can_train.tasks.can.data.cache import SCHEMA, CacheContent, CacheWriter, finished_ns, read_cache, read_content
from can_train.tasks.can.data.graphs import FlatGraphs, GraphBuilder, SourceFile
from can_train.tasks.can.data.layout import HashedLog, LogFile, drop_duplicates, find_logs, hash_logs
from can_train.tasks.can.data.reading import KindTable, LogReader
from can_train.tasks.can.settings import CanDatasetSettings
from can_train.tasks.can.synthetic.writing import synthetic_folder

MIN_PHASE_WINDOWS: Final = 10
"""Windows. A shorter run of benign or attack windows is not cut by itself: a fifth of it would be a window or none."""


_PART_NAMES: Final = ("training", "validation", "test")


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Rows of `FlatGraphs`, ascending in every part.

    Attributes:
        train: [R] int64.
        validation: [R] int64, for thresholds and early stopping.
        test: [R] int64 for every test group, each judged by itself.
    """

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: dict[str, NDArray[np.int64]]


def split_rows(flat: FlatGraphs, validation_share: float, test_share: float) -> tuple[Split, list[str]]:
    """Splits all windows by the roles of their logs (see `SourceFile`).

    A log's last `test_share` is judged, and the last `validation_share` of what remains validates. Where that leaves a
    part with one class only although the log has both, every benign and every attack phase of the log is cut so.

    Args:
        flat: All windows.
        validation_share: Share of the training time, in (0, 1).
        test_share: Share of a single log's time, in (0, 1).

    Returns:
        The split, and notices about logs that were not cut plainly.

    Raises:
        DataError: A part would be empty.
    """
    train: list[NDArray[np.int64]] = []
    validation: list[NDArray[np.int64]] = []
    test: dict[str, list[NDArray[np.int64]]] = {}
    notices: list[str] = []
    for index, source in enumerate(flat.sources):
        rows = np.flatnonzero(flat.source == index)
        if source.role == "test":
            test.setdefault(source.group, []).append(rows)
            continue
        shares = (validation_share, test_share) if source.role == "log" else (validation_share,)
        parts, log_notices = _cut_log(flat, rows, shares)
        notices += [f"{source.path}: {notice}" for notice in log_notices]
        train.append(parts[0])
        validation.append(parts[1])
        if source.role == "log":
            test.setdefault(source.group, []).append(parts[2])
    split = Split(
        train=_joined(train),
        validation=_joined(validation),
        test={group: _joined(rows) for group, rows in test.items()},
    )
    _check_not_empty(split)
    return split, notices


def test_only_split(flat: FlatGraphs) -> Split:
    """Makes the split in which every window is judged, each group by itself: none was trained on."""
    groups: dict[str, list[NDArray[np.int64]]] = {}
    for index, source in enumerate(flat.sources):
        groups.setdefault(source.group, []).append(np.flatnonzero(flat.source == index))
    test = {group: _joined(rows) for group, rows in groups.items()}
    return Split(train=_joined([]), validation=_joined([]), test=test)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _check_not_empty(split: Split) -> None:
    named = {"training": split.train, "validation": split.validation}
    named |= {f"test ({group})": rows for group, rows in split.test.items()}
    empty = [name for name, rows in named.items() if not len(rows)]
    if empty:
        raise DataError(
            "Every part of a data set needs at least one window",
            value=f"none for {', '.join(empty)}",
            remedy="Use longer logs, smaller windows (--set dataset.window=…) or other shares "
            "(--set dataset.validation_share=…, --set dataset.test_share=…)",
        )


def _cut_log(
    flat: FlatGraphs, rows: NDArray[np.int64], shares: Sequence[float]
) -> tuple[list[NDArray[np.int64]], list[str]]:
    """Cuts one log into training, validation and, where `shares` has a second share, test; says what was unusual."""
    is_attack = flat.label[rows] > 0
    plain = _cut_phases(flat, rows, np.array([0]), shares)
    if is_attack.all() or not is_attack.any() or _all_have_both(flat, plain):
        return plain, []
    by_phase = _cut_phases(flat, rows, find_phase_starts(is_attack), shares)
    if _all_have_both(flat, by_phase):
        return by_phase, ["a plain cut of its time leaves a part with one class only, so each phase is cut by itself"]
    poor = [name for name, part in zip(_PART_NAMES, plain, strict=False) if not _has_both(flat, part)]
    return plain, [f"its attacks lie so that one class is missing from {' and '.join(poor)}"]


def _all_have_both(flat: FlatGraphs, parts: Sequence[NDArray[np.int64]]) -> bool:
    return all(_has_both(flat, part) for part in parts)


def _has_both(flat: FlatGraphs, rows: NDArray[np.int64]) -> bool:
    return len(np.unique(flat.label[rows] > 0)) > 1


def find_phase_starts(is_attack: NDArray[np.bool_]) -> NDArray[np.int64]:
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


def _cut_phases(
    flat: FlatGraphs, rows: NDArray[np.int64], starts: NDArray[np.int64], shares: Sequence[float]
) -> list[NDArray[np.int64]]:
    """Cuts every phase of a log chronologically, where a window begins: none is lost unless windows overlap.

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
    part = np.searchsorted(cut_frames, first, side="right") - 1
    last_part = np.searchsorted(cut_frames, first + flat.window - 1, side="right") - 1
    whole = part == last_part
    return [rows[whole & (part % num_parts == index)] for index in range(num_parts)]


_KEY_LENGTH: Final = 24
"""Hexadecimal digits of a cache's name: 96 bits, so that two data sets never meet."""


_Cut = Callable[[FlatGraphs], tuple[Split, list[str]]]
"""Decides what windows are for, and says what was unusual."""


@dataclass(frozen=True, kw_only=True)
class DataSample:
    """What the graphs of a sample stand for.

    Attributes:
        train_windows: Windows of the training part of the whole data set, as the sample suggests.
        every_log: Whether every log that is trained on was looked at.
        note: What was sampled of what, as a sentence.
    """

    train_windows: int
    every_log: bool
    note: str


@dataclass(frozen=True, kw_only=True, eq=False)
class CanData:
    """A data set that is ready to train and to be judged.

    Attributes:
        flat: Its graphs, mapped from the cache.
        split: Which of them train, validate and are judged.
        notices: What a person should know about the data; said to the reporter already.
        sample: What the graphs are a sample of; None where they are all there are.
    """

    flat: FlatGraphs
    split: Split
    notices: tuple[str, ...]
    sample: DataSample | None = None


def prepare(dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter) -> CanData:
    """Turns logs into graphs, or finds the graphs they became before, and splits them.

    Args:
        dataset: How logs are read, windowed and split.
        logs: The logs, those for training first.
        cache_dir: Where prepared data sets are kept, each in a folder of its own.
        reporter: Where progress and notices go.

    Raises:
        DataError: A log cannot be read, changed meanwhile, or is too short.
        StateError: The cache folder cannot be written.
    """
    return _prepared(dataset, logs, cache_dir, reporter, _by_shares(dataset))


def prepare_for_evaluation(
    dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter
) -> CanData:
    """Does the same for logs that were not trained on: all of their windows are judged, each group by itself.

    Args:
        dataset: How logs are read and windowed.
        logs: The logs, all of them to be judged.
        cache_dir: As for `prepare`.
        reporter: Likewise.

    Raises:
        DataError: As `prepare` does.
        StateError: Likewise.
    """
    return _prepared(dataset, logs, cache_dir, reporter, lambda flat: (test_only_split(flat), []))


def find_prepared(
    dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter
) -> CanData | None:
    """Finds the graphs that logs became before without reading the logs: by where they lie, and by their times, which
    say that nobody has touched them since. Writes nothing, and does not look for damage in what it finds.

    Returns:
        The data set; None where there are no such graphs, or none that can be sure to be these logs'.
    """
    for folder in sorted(cache_dir.glob("[!.]*/")):
        kept = _recorded(folder, logs)
        if kept and cache_key(dataset, kept) == folder.name:
            try:
                graphs = read_cache(folder, verify=False)
            except FolderDamageError:
                return None
            return _split(kept, graphs, [], reporter, _by_shares(dataset))
    return None


def _recorded(folder: Path, logs: Sequence[LogFile]) -> list[HashedLog]:
    """Returns those of the logs that a cache was made of, with the hashes that it recorded; none where one is missing
    or has been touched since, or where another can be no copy of these.
    """
    try:
        finished, sources = finished_ns(folder), read_content(folder).sources
        states = {log: log.path.stat() for log in logs}
    except (OSError, FolderDamageError):
        return []
    # No program can set the time of a change: a log that was replaced by an older one has changed, too.
    if any(max(state.st_mtime_ns, state.st_ctime_ns) > finished for state in states.values()):
        return []
    places = {(log.path.resolve(), log.role, log.group): log for log in logs}
    found = [(places.get((Path(source.path).resolve(), source.role, source.group)), source) for source in sources]
    kept = [
        HashedLog(log=log, sha256=source.sha256, size=states[log].st_size, modified_ns=states[log].st_mtime_ns)
        for log, source in found
        if log is not None
    ]
    sizes = {hashed.size for hashed in kept}
    return kept if all(state.st_size in sizes for state in states.values()) else []


def _by_shares(dataset: CanDatasetSettings) -> _Cut:
    return lambda flat: split_rows(flat, dataset.validation_share, dataset.test_share)


def _prepared(
    dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter, cut: _Cut
) -> CanData:
    kept, notices = drop_duplicates(hash_logs(logs, reporter))
    graphs = _cached(cache_dir / cache_key(dataset, kept), reporter) or _built(dataset, kept, cache_dir, reporter)
    return _split(kept, graphs, notices, reporter, cut)


def _split(
    kept: Sequence[HashedLog],
    graphs: tuple[FlatGraphs, CacheContent],
    notices: Sequence[str],
    reporter: Reporter,
    cut: _Cut,
) -> CanData:
    flat, content = graphs
    here = [replace(source, path=str(log.log.path)) for source, log in zip(flat.sources, kept, strict=True)]
    flat = replace(flat, sources=tuple(here))
    split, split_notices = cut(flat)
    notices = [*notices, *content.notices, *split_notices]
    for notice in notices:
        reporter.notice(notice)
    return CanData(flat=flat, split=split, notices=tuple(notices))


def cache_key(dataset: CanDatasetSettings, logs: Sequence[HashedLog]) -> str:
    """Names the graphs of these logs under these settings: the same name, the same graphs."""
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


def _cached(folder: Path, reporter: Reporter) -> tuple[FlatGraphs, CacheContent] | None:
    """Opens the cache; removes a damaged one."""
    if not folder.exists():
        return None
    try:
        return read_cache(folder)
    except FolderDamageError as damage:
        reporter.notice(f"The prepared graphs in {folder} are damaged and are made again: {damage}")
        discard_folder(folder)
        return None


def _built(
    dataset: CanDatasetSettings, logs: Sequence[HashedLog], cache_dir: Path, reporter: Reporter
) -> tuple[FlatGraphs, CacheContent]:
    size = sum(log.size for log in logs)
    with (
        CacheWriter(cache_dir / cache_key(dataset, logs)) as writer,
        reporter.stage("Reading logs", total=size, unit="bytes") as stage,
    ):
        build = _Build(dataset, writer, stage)
        for log in logs:
            build.add(log)
        content = build.content()
        return writer.finish(content), content


class _Build:
    """Feeds logs, one after another, through reader and builder into the cache."""

    def __init__(self, dataset: CanDatasetSettings, writer: CacheWriter, stage: Stage) -> None:
        self._dataset = dataset
        self._writer = writer
        self._stage = stage
        self._kinds = KindTable()
        self._sources: list[SourceFile] = []
        self._notices: list[str] = []
        self._frames = 0

    def add(self, hashed: HashedLog) -> None:
        log = hashed.log
        reader = LogReader(log.path, self._dataset, kind=log.kind)
        builder = GraphBuilder(self._dataset.window, self._dataset.stride)
        for frames in reader.blocks():
            for block in builder.feed(frames):
                label = self._kinds.codes(reader.kinds)[block.label]
                self._writer.append(replace(block, label=label), len(self._sources))
            self._frames += len(frames)
            self._stage.advance(0, frames=self._frames)
        self._check(hashed, builder.frames_seen)
        self._notices += reader.report.summary()
        self._sources.append(
            SourceFile(
                path=str(log.path),
                role=log.role,
                group=log.group,
                frames=builder.frames_seen,
                labelled=reader.labelled,
                sha256=hashed.sha256,
            )
        )
        self._stage.advance(hashed.size)

    def content(self) -> CacheContent:
        return CacheContent(
            kinds=tuple(self._kinds.names),
            sources=tuple(self._sources),
            window=self._dataset.window,
            notices=tuple(self._notices),
        )

    def _check(self, hashed: HashedLog, num_frames: int) -> None:
        if not hashed.is_unchanged():
            raise DataError(
                "A log must not change while it is read",
                value=str(hashed.log.path),
                remedy="Wait until the recording has ended, or read a copy",
            )
        if num_frames < self._dataset.window:
            raise DataError(
                "A log must hold at least one window of frames",
                value=f"{hashed.log.path} has {num_frames}, a window {self._dataset.window}",
                remedy="Use a longer log or smaller windows: --set dataset.window=…",
            )


def load_data(dataset: CanDatasetSettings, data_root: Path, cache: Path, reporter: Reporter) -> CanData:
    """Prepares a data set to train on.

    Args:
        dataset: Its settings.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data.
        reporter: Where progress and notices go.

    Raises:
        DataError: A log cannot be read, or is too short.
    """
    return prepare(dataset, find_logs(simulate_if_synthetic(dataset, cache, reporter), data_root), cache, reporter)


def simulate_if_synthetic(dataset: CanDatasetSettings, cache: Path, reporter: Reporter) -> CanDatasetSettings:
    """Says where a data set's logs are, which simulates a synthetic one."""
    if not dataset.is_synthetic:
        return dataset
    return replace(dataset, path=str(synthetic_folder(cache, dataset.synthetic, reporter)))
