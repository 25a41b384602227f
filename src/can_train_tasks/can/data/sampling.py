"""Samples a data set for a dry run, in seconds, and without writing anything that stays.

The graphs come from the cache if a training has left them there. Otherwise a small data set is read completely, and for
a large data set parts of some logs are read.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from can_train.reporter import Reporter, SilentReporter
from can_train_tasks.can.data.dataset import (
    CanData,
    DataSample,
    default_test_share,
    find_prepared,
    prepare,
    source_of,
    too_short,
)
from can_train_tasks.can.data.graphs import FlatGraphs, GraphBuilder, GraphWriter, Split, writing_graphs
from can_train_tasks.can.data.layout import LOG, TEST, LogFile, find_logs, find_training_logs
from can_train_tasks.can.data.log_text import COMPRESSIONS
from can_train_tasks.can.data.reading import LogReader, LogSample, decide_bases, one_of
from can_train_tasks.can.settings import CanDatasetSettings, SyntheticSettings
from can_train_tasks.can.synthetic.writing import synthetic_folder_name, write_synthetic

# Training logs with a total size up to this one are read completely: at 60 MB/s, in less than half a second.
WHOLE_BYTES: Final = 24 * 2**20
COMPRESSION: Final = 8  # text size ÷ file size assumed of a compressed log before it is read; CAN logs reach 4 to 7
SAMPLED_LOGS: Final = 12  # logs in a sample; recognising the format takes 0.03 s for each log
SAMPLE_BYTES: Final = 9 * 2**20  # text in a sample: a fifth of a million frames, parsed in 0.2 s
PART_BYTES: Final = 256 * 2**10  # text in a part: some 5,000 frames, 50 windows
MIN_PARTS: Final = 3  # parts of each log: an attack may lie at its beginning, in its middle or at its end
MIN_PART_WINDOWS: Final = 2  # least windows' length of a part: room for a complete window with any first frame
# Text of all compressed logs together that is decompressed to reach the parts, in 0.3 s.
REACH_BYTES: Final = 64 * 2**20
SYNTHETIC_SECONDS: Final = 5.0  # length of the simulated drives of a sample, the shortest allowed
_COMPARED_BYTES: Final = 2**14  # bytes compared at both ends of logs of equal size, to recognise copies


def sample_data(dataset: CanDatasetSettings, data_root: Path, cache_dir: Path, reporter: Reporter) -> CanData:
    """Samples a data set in a few seconds. Test logs must exist, and are not read; `cache_dir` need not exist.

    Raises:
        DataError: A training log cannot be read, or is too short.
    """
    if dataset.is_synthetic:
        folder = cache_dir / synthetic_folder_name(dataset.synthetic)
        if not folder.is_dir():
            return _simulate_shorter(dataset, reporter)
        dataset = replace(dataset, path=str(folder))
    logs = find_logs(dataset, data_root)
    if (prepared := find_prepared(dataset, logs, cache_dir, reporter)) is not None:
        return prepared
    training = [log for log in logs if log.role != TEST]
    compressed = {".blf", ".mf4", ".parquet", *(compression.suffix for compression in COMPRESSIONS)}
    factors = {log: COMPRESSION if log.path.suffix.lower() in compressed else 1 for log in training}
    if sum(log.path.stat().st_size * factor for log, factor in factors.items()) <= WHOLE_BYTES:
        return _prepare_in_memory(dataset, training, reporter)
    return _sample_logs(dataset, drop_probable_duplicates(training), reporter)


def _simulate_shorter(dataset: CanDatasetSettings, reporter: Reporter) -> CanData:
    wanted_s = dataset.synthetic.drive_s
    short = replace(dataset.synthetic, seconds=min(wanted_s, SYNTHETIC_SECONDS))
    data = _simulated(_Drives(repr(replace(dataset, synthetic=short)), dataset, short, reporter))
    if short.drive_s == wanted_s:
        return data
    sampled = len(data.split.train)
    windows = round(sampled * wanted_s / short.drive_s)
    note = (
        f"simulated drives of {short.drive_s:g} s in place of {wanted_s:g} s: {sampled:,} training windows of about "
        f"{windows:,}"
    )
    return replace(data, sample=DataSample(train_windows=windows, every_log=True, note=note))


@dataclass(frozen=True)
class _Drives:
    """Simulated drives, which are the same where `text` is."""

    text: str  # all settings
    dataset: CanDatasetSettings = field(compare=False)
    short: SyntheticSettings = field(compare=False)
    reporter: Reporter = field(compare=False)


# A process may plan many runs on one data set: those of a sweep, or a run and then its changes.
@lru_cache(maxsize=1)
def _simulated(drives: _Drives) -> CanData:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / synthetic_folder_name(drives.short)
        write_synthetic(folder, drives.short, drives.reporter, tests=False)
        logs = find_training_logs(replace(drives.dataset, path=str(folder)), folder)
        # Silent: a notice about these short drives need not be true for the drives of the training.
        return _prepare_in_memory(drives.dataset, logs, SilentReporter())


def _prepare_in_memory(dataset: CanDatasetSettings, logs: Sequence[LogFile], reporter: Reporter) -> CanData:
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare(dataset, logs, Path(scratch), reporter)
        return replace(data, flat=_copy_to_memory(data.flat))


def _sample_logs(dataset: CanDatasetSettings, logs: Sequence[LogFile], reporter: Reporter) -> CanData:
    chosen = choose_logs(logs)
    with (
        tempfile.TemporaryDirectory() as scratch,
        writing_graphs(Path(scratch) / "sample", dataset.window) as writer,
        reporter.stage("Reading a sample of the logs", total=len(chosen), unit="logs") as stage,
    ):
        samples, left_out = {}, {}
        # Only the first lines of logs: a dry run must take seconds.
        settings, notes = decide_bases([log.path for log in chosen], dataset, whole=False)
        for log in chosen:
            with one_of([*settings]):
                samples[log], left_out[log.path.name] = _sample_log(settings[log.path], log, len(chosen), writer)
            stage.advance()
        flat = _copy_to_memory(writer.finish())
    flat = replace(flat, notices=(*notes, *flat.notices))
    for notice in flat.notices:
        reporter.notice(notice)
    if not len(flat):
        rows = ", ".join(f"{name}: {told}" for name, told in left_out.items() if told)
        fact = f"None of {len(chosen)} logs has a window of {dataset.window} frames in the parts that were read"
        raise too_short(fact, min(sample.expected_frames for sample in samples.values()), rows)
    has_attacks = bool((flat.label > 0).any())
    if (flat.label > 0).all():
        # Models learn a vehicle from its benign windows, and fail without such a window. The labels can be changed
        # here: a window's memory does not depend on its label.
        flat = replace(flat, label=np.zeros_like(flat.label))
    sizes = {log: log.path.stat().st_size for log in logs}
    frames_per_byte = sum(sample.expected_frames for sample in samples.values()) / sum(sizes[log] for log in samples)
    windows_by_role = Counter[str]()
    for log, size in sizes.items():
        frames = samples[log].expected_frames if log in samples else round(frames_per_byte * size)
        windows_by_role[log.role] += max(0, (frames - dataset.window) // dataset.stride + 1)
    cut = windows_by_role.pop(LOG, 0)
    test_share = dataset.test_share
    if test_share is None:
        test_share = default_test_share(cut, dataset.validation_share, has_attacks=has_attacks)
    estimate = (1 - dataset.validation_share) * (cut * (1 - test_share) + windows_by_role.total())
    train_windows = max(1, round(estimate))
    read_mib = sum(sample.text.read_bytes for sample in samples.values()) / 2**20
    mib = sum(sizes.values()) / 2**20
    note = (
        f"a sample of {len(flat):,} windows from {len(chosen)} of {len(logs)} training logs "
        f"({read_mib:.1f} MiB of text; {mib:,.0f} MiB of logs): about {train_windows:,} training windows in all"
    )
    # A sample shows the size of windows, not the split: all windows serve for training and for validation.
    windows = np.arange(len(flat))
    split = Split(train=windows, validation=windows, test={})
    sample = DataSample(train_windows=train_windows, every_log=len(chosen) == len(logs), note=note)
    return CanData(flat=flat, split=split, notices=flat.notices, sample=sample)


def choose_logs(logs: Sequence[LogFile]) -> list[LogFile]:
    """Chooses the logs that are sampled: one log of every folder and kind, then a second log, and so on."""
    earlier: Counter[tuple[str, str]] = Counter()
    turns = []
    for index, log in enumerate(logs):
        # A log that is given by path is a separate group, which is no information about its content.
        family = ("" if log.role == LOG else log.group, log.kind)
        turns.append((earlier[family], index))
        earlier[family] += 1
    return [logs[index] for index in sorted(index for _, index in sorted(turns)[:SAMPLED_LOGS])]


def drop_probable_duplicates(logs: Sequence[LogFile]) -> list[LogFile]:
    """Leaves out logs with the size, the beginning and the end of an earlier log."""
    # Training recognises copies by the hash of the whole log, which would take minutes here.
    sizes = Counter(log.path.stat().st_size for log in logs)
    first_by_ends: dict[tuple[int, bytes], LogFile] = {}
    for log in logs:
        size, ends = log.path.stat().st_size, b""
        if sizes[size] > 1:
            ends = os.fsencode(log.path)  # equals no other log's bytes; the reader will raise an error
            with suppress(OSError), log.path.open("rb") as file:
                begin = file.read(_COMPARED_BYTES)
                file.seek(-len(begin), os.SEEK_END)
                ends = begin + file.read()
        first_by_ends.setdefault((size, ends), log)
    return list(first_by_ends.values())


def _sample_log(dataset: CanDatasetSettings, log: LogFile, num_logs: int, writer: GraphWriter) -> tuple[LogSample, str]:
    reader = LogReader(log.path, dataset, kind=log.kind)
    part_bytes = max(PART_BYTES, round(MIN_PART_WINDOWS * dataset.window * reader.line_bytes))
    num_parts = max(MIN_PARTS, SAMPLE_BYTES // num_logs // part_bytes)
    sample = reader.sample(num_parts, part_bytes, REACH_BYTES // num_logs)
    for frames in sample.frames:
        # A builder for each part: no window reaches from one part into another part.
        for block in GraphBuilder(dataset.window, dataset.stride).feed(frames):
            writer.append(block, reader.kinds)
        writer.end_drives()
    notices = [f"{log.path.name}: {note}" for note in reader.report.notes]
    # Not an error: a part may have a larger share of bad rows than the whole log.
    if not sample.text.complete and reader.report.bad_share > dataset.max_malformed:
        notices.append(
            f"{log.path.name}: {reader.report.bad_share:.1%} of the sampled rows are malformed or run backwards in "
            f"time; training refuses the log if more than {dataset.max_malformed:.2%} of all its rows are"
        )
    writer.end_log(source_of(log, reader, frames=sample.expected_frames, sha256=""), notices)
    return sample, reader.report.left_out()


def _copy_to_memory(flat: FlatGraphs) -> FlatGraphs:
    # The arrays are copied: the files are deleted, and a network file system may not keep deleted, mapped files.
    names = (field.name for field in fields(FlatGraphs) if isinstance(getattr(flat, field.name), np.ndarray))
    copies: dict[str, Any] = {name: getattr(flat, name).copy() for name in names}
    for copy in copies.values():
        copy.flags.writeable = False  # as mapped files are: several tasks may share them
    return replace(flat, **copies)
