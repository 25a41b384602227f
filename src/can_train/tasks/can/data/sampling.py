"""A data set as a dry run sees it: in seconds and without writing a thing. From the graphs that a training has kept
where there are some; whole where it is small; else parts of some training logs, and what the whole would hold.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from can_train.errors import DataError
from can_train.reporter import Reporter, SilentReporter
from can_train.tasks.can.data.cache import CacheContent, CacheWriter
from can_train.tasks.can.data.dataset import CanData, DataSample, Split, find_prepared, prepare
from can_train.tasks.can.data.graphs import FlatGraphs, GraphBuilder, SourceFile
from can_train.tasks.can.data.layout import LOG, TEST, LogFile, find_logs
from can_train.tasks.can.data.reading import KindTable, LogReader, LogSample, SampleSpec
from can_train.tasks.can.settings import CanDatasetSettings
from can_train.tasks.can.synthetic.writing import synthetic_folder_name, write_synthetic

WHOLE_BYTES: Final = 24 * 2**20
"""Training logs up to this size together are read whole: at 60 MB/s, in less than half a second."""


COMPRESSION: Final = 8
"""How many times larger the text of a compressed log is taken to be, before any of it is read; CAN logs reach 4 to 7.
"""


SAMPLED_LOGS: Final = 12
"""Logs that a sample is taken from, at 0.03 s each for recognising the format."""


SAMPLE_BYTES: Final = 9 * 2**20
"""Text of a sample: a fifth of a million frames, parsed in 0.2 s."""


PIECE_BYTES: Final = 256 * 2**10
"""Text of one of its pieces: some 5,000 frames, 50 windows."""


MIN_PIECES: Final = 3
"""Pieces of each log: where an attack lies, at the beginning, in the middle or at the end, nobody knows before."""


MIN_PIECE_WINDOWS: Final = 2
"""Windows that a piece has room for: one, wherever it begins."""


REACH_BYTES: Final = 64 * 2**20
"""Text of all compressed logs together that is decompressed on the way to the pieces: in 0.3 s. A later part of such a
log is out of reach."""


_COMPARED_BYTES: Final = 2**14
"""At either end of logs of one size, to tell copies."""


SYNTHETIC_SECONDS: Final = 5.0
"""Length of the simulated drives of a sample: the shortest there are."""


def sample_data(dataset: CanDatasetSettings, data_root: Path, cache_dir: Path, reporter: Reporter) -> CanData:
    """Looks at a data set for a few seconds. What is written is temporary and gone afterwards.

    Logs for judging are looked for, and not read.

    Args:
        dataset: The data set.
        data_root: Folder of the published ones.
        cache_dir: Where trainings keep prepared data; need not exist.
        reporter: Where progress and notices go.

    Raises:
        DataError: A training log that was read cannot be, or is too short.
    """
    if dataset.is_synthetic:
        folder = cache_dir / synthetic_folder_name(dataset.synthetic)
        if not folder.is_dir():
            return _simulated(dataset, reporter)
        dataset = replace(dataset, path=str(folder))
    logs = find_logs(dataset, data_root)
    prepared = find_prepared(dataset, logs, cache_dir, reporter)
    if prepared is not None:
        return prepared
    training = [log for log in logs if log.role != TEST]
    if sum(map(_text_bytes, training)) <= WHOLE_BYTES:
        return _whole(dataset, training, reporter)
    return _in_pieces(dataset, drop_probable_duplicates(training), reporter)


def _simulated(dataset: CanDatasetSettings, reporter: Reporter) -> CanData:
    """Simulates short drives in place of those that were asked for; what is unusual about them is nothing to say."""
    wanted_s = dataset.synthetic.seconds
    short = replace(dataset.synthetic, seconds=min(wanted_s, SYNTHETIC_SECONDS))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / synthetic_folder_name(short)
        write_synthetic(folder, short, reporter)
        logs = [log for log in find_logs(replace(dataset, path=str(folder)), folder) if log.role != TEST]
        data = _whole(dataset, logs, SilentReporter())
    if short.seconds == wanted_s:
        return data
    sampled = len(data.split.train)
    windows = round(sampled * wanted_s / short.seconds)
    note = (
        f"simulated drives of {short.seconds:g} s in place of {wanted_s:g} s: {sampled:,} training windows of about "
        f"{windows:,}"
    )
    return replace(data, sample=DataSample(train_windows=windows, every_log=True, note=note))


def _whole(dataset: CanDatasetSettings, logs: Sequence[LogFile], reporter: Reporter) -> CanData:
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare(dataset, logs, Path(scratch), reporter)
        return replace(data, flat=_in_memory(data.flat))


def _in_pieces(dataset: CanDatasetSettings, logs: Sequence[LogFile], reporter: Reporter) -> CanData:
    chosen = choose_logs(logs)
    with (
        tempfile.TemporaryDirectory() as scratch,
        CacheWriter(Path(scratch) / "sample") as writer,
        reporter.stage("Reading a sample of the logs", total=len(chosen), unit="logs") as stage,
    ):
        sampling = _Sampling(dataset, writer, len(chosen), reporter)
        for log in chosen:
            sampling.add(log)
            stage.advance()
        flat = _in_memory(writer.finish(sampling.content()))
    if not len(flat):
        raise DataError(
            "A log must hold at least one window of frames",
            value=f"none of {len(chosen)} logs has one of {dataset.window} in the parts that were read",
            remedy="Use longer logs or smaller windows: --set dataset.window=…",
        )
    if (flat.label > 0).all():
        # A model knows a vehicle by its benign windows; what a window takes does not depend on its label.
        flat = replace(flat, label=np.zeros_like(flat.label))
    # A sample tells what windows are like, not which of them train.
    rows = np.arange(len(flat))
    split = Split(train=rows, validation=rows, test={})
    sample = DataSample(
        train_windows=sampling.train_windows(logs),
        every_log=len(chosen) == len(logs),
        note=sampling.note(logs, len(flat)),
    )
    return CanData(flat=flat, split=split, notices=tuple(sampling.notices), sample=sample)


def choose_logs(logs: Sequence[LogFile]) -> list[LogFile]:
    """Chooses the logs that a sample is taken from: one of every folder and kind, then a second one, and so on."""
    earlier: Counter[tuple[str, str]] = Counter()
    turns = []
    for log in logs:
        # Logs given by path are groups of their own, which says nothing of what is in them.
        family = ("" if log.role == LOG else log.group, log.kind)
        turns.append(earlier[family])
        earlier[family] += 1
    order = sorted(range(len(logs)), key=lambda index: turns[index])
    return [logs[index] for index in sorted(order[:SAMPLED_LOGS])]


def drop_probable_duplicates(logs: Sequence[LogFile]) -> list[LogFile]:
    """Leaves out logs that have the size, the beginning and the end of an earlier one: training leaves out copies."""
    sizes = Counter(log.path.stat().st_size for log in logs)
    seen: set[tuple[int, bytes]] = set()
    kept = []
    for log in logs:
        size = log.path.stat().st_size
        mark = (size, _ends(log.path) if sizes[size] > 1 else b"")
        if mark not in seen:
            kept.append(log)
            seen.add(mark)
    return kept


def _ends(path: Path) -> bytes:
    """Returns the first and the last bytes of a file; its name where it cannot be read, which is said elsewhere."""
    try:
        with path.open("rb") as file:
            begin = file.read(_COMPARED_BYTES)
            file.seek(-len(begin), os.SEEK_END)
            return begin + file.read()
    except OSError:
        return os.fsencode(path)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a log's pieces suggest: its size on the disk and the frames that it has."""

    file_bytes: int
    frames: int


class _Sampling:
    """Feeds pieces of logs through reader and builder into a temporary cache."""

    def __init__(self, dataset: CanDatasetSettings, writer: CacheWriter, num_logs: int, reporter: Reporter) -> None:
        self._dataset = dataset
        self._writer = writer
        self._num_logs = num_logs
        self._reporter = reporter
        self._kinds = KindTable()
        self._sources: list[SourceFile] = []
        self._seen: dict[LogFile, _Seen] = {}
        self._read_bytes = 0
        self.notices: list[str] = []

    def add(self, log: LogFile) -> None:
        reader = LogReader(log.path, self._dataset, kind=log.kind)
        piece_bytes = max(PIECE_BYTES, round(MIN_PIECE_WINDOWS * self._dataset.window * reader.line_bytes))
        pieces = max(MIN_PIECES, SAMPLE_BYTES // self._num_logs // piece_bytes)
        reach_bytes = REACH_BYTES // self._num_logs
        read = reader.pieces(SampleSpec(pieces=pieces, piece_bytes=piece_bytes, reach_bytes=reach_bytes))
        for frames in read.pieces:
            # A builder for each: no window reaches from one piece into another.
            for block in GraphBuilder(self._dataset.window, self._dataset.stride).feed(frames):
                label = self._kinds.codes(reader.kinds)[block.label]
                self._writer.append(replace(block, label=label), len(self._sources))
        self._say(log, reader, read)
        self._read_bytes += read.read_bytes
        self._seen[log] = _Seen(file_bytes=log.path.stat().st_size, frames=read.expected_frames)
        self._sources.append(
            SourceFile(
                path=str(log.path),
                role=log.role,
                group=log.group,
                frames=read.expected_frames,
                labelled=reader.labelled,
                sha256="",
            )
        )

    def content(self) -> CacheContent:
        return CacheContent(
            kinds=tuple(self._kinds.names),
            sources=tuple(self._sources),
            window=self._dataset.window,
            notices=tuple(self.notices),
        )

    def train_windows(self, logs: Sequence[LogFile]) -> int:
        """Estimates the windows of the training part of all logs."""
        dataset = self._dataset
        trained = 1 - dataset.validation_share
        shares = {log: trained * (1 - dataset.test_share) if log.role == LOG else trained for log in logs}
        windows = (
            max(0, (self._frames(log) - dataset.window) // dataset.stride + 1) * share for log, share in shares.items()
        )
        return max(1, round(sum(windows)))

    def note(self, logs: Sequence[LogFile], num_windows: int) -> str:
        mib = sum(log.path.stat().st_size for log in logs) / 2**20
        return (
            f"a sample of {num_windows:,} windows from {len(self._seen)} of {len(logs)} training logs "
            f"({self._read_bytes / 2**20:.1f} MiB of text; {mib:,.0f} MiB of logs): about "
            f"{self.train_windows(logs):,} training windows in all"
        )

    def _frames(self, log: LogFile) -> int:
        if log in self._seen:
            return self._seen[log].frames
        per_byte = sum(seen.frames for seen in self._seen.values()) / sum(
            seen.file_bytes for seen in self._seen.values()
        )
        return round(per_byte * log.path.stat().st_size)

    def _say(self, log: LogFile, reader: LogReader, read: LogSample) -> None:
        """Says what is unusual; that a part has more bad rows than a whole log may have is no error yet."""
        said = [f"{log.path.name}: {note}" for note in reader.report.notes]
        if not read.whole and reader.report.bad_share > self._dataset.max_malformed:
            said.append(
                f"{log.path.name}: {reader.report.bad_share:.1%} of the sampled rows are malformed or run backwards in "
                f"time; training refuses the log if more than {self._dataset.max_malformed:.2%} of all its rows are"
            )
        self.notices += said
        for notice in said:
            self._reporter.notice(notice)


def _text_bytes(log: LogFile) -> int:
    size = log.path.stat().st_size
    return size * COMPRESSION if log.path.suffix.lower() == ".gz" else size


def _in_memory(flat: FlatGraphs) -> FlatGraphs:
    """Copies graphs off the disk: the files may then go, on a network file system too."""
    names = (field.name for field in fields(FlatGraphs) if isinstance(getattr(flat, field.name), np.ndarray))
    copies: dict[str, Any] = {name: getattr(flat, name).copy() for name in names}
    return replace(flat, **copies)
