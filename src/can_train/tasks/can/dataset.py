"""Prepares a CAN data set: which logs are read, their graphs from the cache or built into it, and the split. Reading a
log, building graphs and keeping them are done by `reading`, `graphs` and `cache`.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train.reporter import Reporter, Stage
from can_train.tasks.can.cache import SCHEMA, CacheContent, CacheDamageError, CacheWriter, discard_cache, read_cache
from can_train.tasks.can.duplicates import HashedLog, hash_logs, without_duplicates
from can_train.tasks.can.flat import FlatGraphs, SourceFile
from can_train.tasks.can.frames import BENIGN
from can_train.tasks.can.graphs import GraphBuilder
from can_train.tasks.can.labels import MAX_KINDS
from can_train.tasks.can.layout import LogFile
from can_train.tasks.can.reading import LogReader
from can_train.tasks.can.settings import CanDatasetSettings
from can_train.tasks.can.splits import Split, split_rows

_KEY_LENGTH: Final = 24
"""Hexadecimal digits of a cache's name: 96 bits, so that two data sets never meet."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CanData:
    """A data set that is ready to train and to be judged.

    Attributes:
        flat: Its graphs, mapped from the cache.
        split: Which of them train, validate and are judged.
        notices: What a person should know about the data; said to the reporter already.
    """

    flat: FlatGraphs
    split: Split
    notices: tuple[str, ...]


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
    kept, notices = without_duplicates(hash_logs(logs, reporter))
    flat, content = _cached(cache_dir / cache_key(dataset, kept), reporter) or _built(
        dataset, kept, cache_dir, reporter
    )
    here = [replace(source, path=str(log.log.path)) for source, log in zip(flat.sources, kept, strict=True)]
    flat = replace(flat, sources=tuple(here))
    split, split_notices = split_rows(flat, dataset.validation_share, dataset.test_share)
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
    except CacheDamageError as damage:
        reporter.notice(f"The prepared graphs in {folder} are damaged and are made again: {damage}")
        discard_cache(folder)
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
        self._kinds = [BENIGN]
        self._sources: list[SourceFile] = []
        self._notices: list[str] = []
        self._frames = 0

    def add(self, hashed: HashedLog) -> None:
        log = hashed.log
        reader = LogReader(log.path, self._dataset, kind=log.kind)
        builder = GraphBuilder(self._dataset.window, self._dataset.stride)
        for frames in reader.blocks():
            for block in builder.feed(frames):
                label = self._codes(reader.kinds)[block.label]
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
            kinds=tuple(self._kinds),
            sources=tuple(self._sources),
            window=self._dataset.window,
            notices=tuple(self._notices),
        )

    def _codes(self, reader_kinds: Sequence[str]) -> NDArray[np.uint8]:
        """Returns the data set's code for each of a reader's; kinds not seen before are added."""
        self._kinds += [kind for kind in reader_kinds if kind not in self._kinds]
        if len(self._kinds) > MAX_KINDS:
            raise DataError(
                f"A data set may name at most {MAX_KINDS - 1} kinds of attack",
                value=f"{len(self._kinds) - 1}",
                remedy="Name the column that holds the label: --set dataset.columns.label=…",
            )
        return np.array([self._kinds.index(kind) for kind in reader_kinds], dtype=np.uint8)

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
