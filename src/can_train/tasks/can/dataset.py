"""Prepares a CAN data set: which logs are read, their graphs from the cache or built into it, and the split. Reading a
log, building graphs and keeping them are done by `reading`, `graphs` and `cache`.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from can_train.errors import DataError
from can_train.reporter import Reporter, Stage
from can_train.state.array_folder import FolderDamageError, discard_folder
from can_train.tasks.can.cache import (
    SCHEMA,
    CacheContent,
    CacheWriter,
    finished_ns,
    read_cache,
    read_content,
)
from can_train.tasks.can.duplicates import HashedLog, hash_logs, without_duplicates
from can_train.tasks.can.flat import FlatGraphs, SourceFile
from can_train.tasks.can.graphs import GraphBuilder
from can_train.tasks.can.labels import KindTable
from can_train.tasks.can.layout import LogFile
from can_train.tasks.can.reading import LogReader
from can_train.tasks.can.settings import CanDatasetSettings
from can_train.tasks.can.splits import Split, judge_all, split_rows

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


def prepare_judged(
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
    return _prepared(dataset, logs, cache_dir, reporter, lambda flat: (judge_all(flat), []))


def recall(dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter) -> CanData | None:
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
    kept, notices = without_duplicates(hash_logs(logs, reporter))
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
