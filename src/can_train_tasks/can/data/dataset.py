"""Prepares a CAN data set: the graphs of its logs, from the cache or made anew, and their split into parts.

Shapes: G windows of the data set, R windows of one log or part.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from can_train.errors import DataError
from can_train.io.arrays import META, FolderDamageError, discard_folder, noticing_damage, read_meta
from can_train.io.units import counted
from can_train.reporter import Reporter
from can_train_tasks.can.data import graphs
from can_train_tasks.can.data.digests import LogDigest, known_windows
from can_train_tasks.can.data.graphs import LEAST_VALIDATION, PAUSE_S, Bools, FlatGraphs, Ints, SourceFile, Split
from can_train_tasks.can.data.layout import (
    LOG,
    TEST,
    HashedLog,
    LogFile,
    drop_duplicates,
    find_logs,
    hash_logs,
    unread_notes,
)
from can_train_tasks.can.data.log_text import changed_log
from can_train_tasks.can.data.reading import LogReader, decide_bases, one_of
from can_train_tasks.can.data.sidecars import find_sidecar
from can_train_tasks.can.settings import CanDatasetSettings
from can_train_tasks.can.synthetic.writing import synthetic_folder

# Windows. A shorter run of benign or attack windows is not cut: a fifth of it would be one window or no window.
MIN_PHASE_WINDOWS: Final = 10

LEAST_DRIVES: Final = 3  # with at least this many benign logs, whole logs are held out for validation

_LEAST_WINDOWS: Final = 10  # windows of a log that is long enough for training, validation and test

_TEST_SHARE: Final = 0.2  # of each log that is not too short

_MAX_NAMED: Final = 3  # logs that a notice names


@dataclass(frozen=True, kw_only=True)
class DataSample:
    """The data set behind a sample."""

    train_windows: int  # estimate of the training windows of the whole data set
    every_log: bool  # whether all logs for training were sampled
    note: str  # a sentence that describes the sample


@dataclass(frozen=True, kw_only=True, eq=False)
class CanData:
    """A data set that is ready for training and testing."""

    flat: FlatGraphs  # graphs of the data set, mapped from the cache
    split: Split  # graphs for training, validation and test
    notices: tuple[str, ...]  # notices about the data, which the reporter has printed already
    sample: DataSample | None = None  # the data set behind a sample; None where the graphs are complete
    folder: Path | None = None  # the graphs in the cache; None where nothing is kept


def load_data(dataset: CanDatasetSettings, data_root: Path, cache_dir: Path, reporter: Reporter) -> CanData:
    """Finds a data set's logs, or simulates them, and prepares them for training.

    Raises:
        DataError: A log cannot be read, or is too short.
    """
    placed = simulate_if_synthetic(dataset, cache_dir, reporter)
    logs = find_logs(placed, data_root)
    return with_notices(prepare(dataset, logs, cache_dir, reporter), unread_notes(placed, data_root), reporter)


def with_notices(data: CanData, notices: Sequence[str], reporter: Reporter) -> CanData:
    """Prints notices, and adds them to the notices of the data."""
    for notice in notices:
        reporter.notice(notice)
    return replace(data, notices=(*data.notices, *notices))


def simulate_if_synthetic(dataset: CanDatasetSettings, cache_dir: Path, reporter: Reporter) -> CanDatasetSettings:
    """Returns the data set with the path of its logs; the logs of a synthetic data set are simulated if not cached."""
    if not dataset.is_synthetic:
        return dataset
    return replace(dataset, path=str(synthetic_folder(cache_dir, dataset.synthetic, reporter)))


def prepare(dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter) -> CanData:
    """Makes the graphs of logs, or finds them in the cache, and splits them.

    Args:
        dataset: Settings for reading, windowing and splitting logs.
        logs: The logs, training logs first.
        cache_dir: Folder with a folder for each prepared data set.
        reporter: Receives progress and notices.

    Raises:
        DataError: A log cannot be read, changed meanwhile, or is too short.
        StateError: The cache folder cannot be written.
    """
    remaining, notices = drop_duplicates(hash_logs(logs, reporter))
    folder = cache_dir / cache_key(dataset, remaining)
    flat = None
    if folder.exists():
        try:
            flat = graphs.read_graphs(folder)
        except FolderDamageError as damage:
            reporter.notice(f"The prepared graphs in {folder} are damaged and are made again: {damage}")
            discard_folder(folder)
    if flat is None:
        flat = _build(dataset, remaining, folder, reporter)
    data = _split(dataset, remaining, replace(flat, notices=(*notices, *flat.notices)), reporter)
    return replace(data, folder=folder)


def find_prepared(
    dataset: CanDatasetSettings, logs: Sequence[LogFile], cache_dir: Path, reporter: Reporter
) -> CanData | None:
    """Finds the graphs of logs in the cache without reading the logs: by their paths and modification times.

    Nothing is written, and the graphs are not verified.

    Returns:
        The data set; None where the cache has no graphs that certainly belong to these logs.
    """
    for folder in sorted(cache_dir.glob("[!.]*/")):
        remaining = _recorded_logs(folder, logs)
        if remaining and cache_key(dataset, remaining) == folder.name:
            try:
                flat = graphs.read_graphs(folder, verify=False)
            except FolderDamageError:
                return None
            return _split(dataset, remaining, flat, reporter)
    return None


def _recorded_logs(folder: Path, logs: Sequence[LogFile]) -> list[HashedLog]:
    """Returns the logs behind a cache folder, with the recorded hashes.

    The list is empty where a log is missing or has changed since, or where a log outside the record cannot be a copy of
    a recorded log.
    """
    try:
        finished_ns = (folder / META).stat().st_mtime_ns
        with noticing_damage():
            sources = [SourceFile(**source) for source in read_meta(folder)["sources"]]
        states = {log: log.path.stat() for log in logs}
        sidecars = {sidecar.path: sidecar.path.stat() for log in logs if (sidecar := find_sidecar(log.path))}
    except (OSError, FolderDamageError):
        return []
    # No program can set the change time (ctime), so it reveals a log that was replaced by an older file.
    seen = (*states.values(), *sidecars.values())
    if any(max(state.st_mtime_ns, state.st_ctime_ns) > finished_ns for state in seen):
        return []
    places = {(log.path.resolve(), log.role, log.group): log for log in logs}
    remaining = [
        HashedLog(log=log, sha256=source.sha256, size=states[log].st_size, modified_ns=states[log].st_mtime_ns)
        for source in sources
        if (log := places.get((Path(source.path).resolve(), source.role, source.group)))
    ]
    sizes = {hashed.size for hashed in remaining}
    return remaining if all(state.st_size in sizes for state in states.values()) else []


def _split(dataset: CanDatasetSettings, logs: Sequence[HashedLog], flat: FlatGraphs, reporter: Reporter) -> CanData:
    # The cache may have been made when the logs had other paths.
    here = [replace(source, path=str(log.log.path)) for source, log in zip(flat.sources, logs, strict=True)]
    flat = replace(flat, sources=tuple(here))
    # Logs with equal frames in different notations are copies, too. The copy whose labels mark most attacks is taken:
    # some copies of published recordings have no labels.
    by_frames = [replace(log, sha256=source.frames_digest) for log, source in zip(logs, here, strict=True)]
    attacks = np.bincount(flat.source[flat.label > 0], minlength=len(here))
    ranked = sorted(range(len(here)), key=lambda index: (-attacks[index], not here[index].labelled))
    unique, copied = drop_duplicates([by_frames[index] for index in ranked])
    remaining = sorted(by_frames.index(log) for log in unique)
    copied += _other_labels(by_frames, [int(count) for count in attacks])
    split, cut = split_rows(flat, dataset.validation_share, dataset.test_share, remaining)
    split, repeated = leave_out_known(flat, split, flat, np.concatenate([split.train, split.validation]))
    notices = [*flat.notices, *copied, *cut, *repeated]
    unlabelled = [flat.sources[index].path for index in remaining if not flat.sources[index].labelled]
    if 0 < len(unlabelled) < len(remaining):
        without = f"{len(unlabelled)} of {len(remaining)} logs without labels"
        notices.append(f"{without}: their frames count as benign ({_first_names(unlabelled)})")
    for notice in notices:
        reporter.notice(notice)
    return CanData(flat=flat, split=split, notices=tuple(notices))


def _other_labels(logs: Sequence[HashedLog], attacks: Sequence[int]) -> list[str]:
    """Names the copies whose labels mark other numbers of attack windows than the copy that is taken."""
    by_frames: dict[tuple[str, str], list[int]] = {}
    for index, hashed in enumerate(logs):
        by_frames.setdefault(hashed.place, []).append(index)
    sentences = []
    for copies in by_frames.values():
        taken = max(copies, key=lambda index: attacks[index])
        marked = [f"{logs[each].log.path.name} {attacks[each]:,}" for each in copies if attacks[each] != attacks[taken]]
        if marked:
            name = logs[taken].log.path.name
            fact = f"{name} was taken, whose labels mark {counted(attacks[taken], 'attack window')}"
            sentences.append(f"Copies of one recording have different labels: {fact}; {', '.join(marked)}")
    return sentences


def _first_names(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(Path(path).name for path in paths[:_MAX_NAMED]) + more


def leave_out_known(flat: FlatGraphs, split: Split, trained: FlatGraphs, trained_rows: Ints) -> tuple[Split, list[str]]:
    """Leaves test windows out that occur in training.

    If all test windows of a log that was cut by time occur in training, they stay: the bus repeats itself.

    Args:
        flat: The graphs with the test windows.
        split: Split of `flat`.
        trained: The graphs of training; may be `flat`.
        trained_rows: Windows of `trained` that were trained or validated on.

    Returns:
        The split, and notices.

    Raises:
        DataError: No test window is left.
    """
    cut_by_time = {source.group for source in flat.sources if source.role == LOG}
    test: dict[str, Ints] = {}
    notices: list[str] = []
    lost: dict[str, int] = {}
    for group, rows in split.test.items():
        fresh = rows[~known_windows(flat, rows, trained, trained_rows)]
        if not len(fresh) and group in cut_by_time:
            fresh = rows
            occur = "the only test window occurs" if len(rows) == 1 else f"all {len(rows):,} test windows occur"
            notices.append(f"{group}: {occur} in training, so its figures are too good")
        if len(fresh) < len(rows):
            lost[group] = len(rows) - len(fresh)
        if len(fresh):
            test[group] = fresh
    if count := sum(lost.values()):
        total = counted(sum(map(len, split.test.values())), "test window")
        occur = "occurs in training and is" if count == 1 else "occur in training and are"
        named = ", ".join(f"{group} ({windows:,})" for group, windows in list(lost.items())[:_MAX_NAMED])
        notices.append(f"{count:,} of {total} {occur} left out: {named}" + (", …" if len(lost) > _MAX_NAMED else ""))
    if gone := [group for group in lost if group not in test]:
        notices.append(f"Nothing is left to test of {', '.join(gone)}")
    if split.test and not test:
        raise DataError("No window is left to test that was not trained on", value=notices[0],
                        remedy="Test on other logs")  # fmt: skip
    return replace(split, test=test), notices


def cache_key(dataset: CanDatasetSettings, logs: Sequence[HashedLog]) -> str:
    """Returns the name of the cache folder for the graphs of these logs under these settings."""
    names = ("window", "stride", "format", "id_base", "byte_base", "time_unit", "channel", "max_malformed")
    content = {
        **{name: getattr(dataset, name) for name in names},
        "schema": graphs.SCHEMA,
        "columns": asdict(dataset.columns),
        "benign_values": sorted(dataset.benign_values),
        "logs": [(hashed.sha256, hashed.log.role, hashed.log.group, hashed.log.kind) for hashed in logs],
    }
    # 24 hexadecimal digits are 96 bits: no two data sets share a name.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _build(dataset: CanDatasetSettings, logs: Sequence[HashedLog], folder: Path, reporter: Reporter) -> FlatGraphs:
    settings, notes = decide_bases([hashed.log.path for hashed in logs], dataset)
    with (
        graphs.writing_graphs(folder, dataset.window) as writer,
        reporter.stage("Reading logs", total=sum(log.size for log in logs), unit="bytes") as stage,
    ):
        num_frames = 0
        for hashed in logs:
            log = hashed.log
            with one_of([*settings]):
                reader = LogReader(log.path, settings[log.path], kind=log.kind)
            builder, digest = graphs.GraphBuilder(dataset.window, dataset.stride), LogDigest()
            for frames in reader.blocks():
                digest.update(frames)
                for block in builder.feed(frames):
                    writer.append(block, reader.kinds)
                num_frames += len(frames)
                stage.advance(0, frames=num_frames)
            if not hashed.is_unchanged():  # compared with the file's state when it was hashed, before it was opened
                raise changed_log(log.path)
            if not builder.windows:
                fact = f"{log.path} has {counted(builder.frames_seen, 'frame')}, a window needs {dataset.window:,}"
                fact += f" without a pause of {PAUSE_S:g} s" if builder.drives > 1 else ""
                raise too_short(fact, builder.frames_seen, reader.report.left_out())
            source = source_of(log, reader, frames=builder.frames_seen, sha256=hashed.sha256)
            notes += reader.report.summary()
            left_over, attacks = builder.left_over
            if attacks:
                last = f"the last {counted(left_over, 'frame')} of the log fill no window"
                if builder.drives > 1:
                    last = f"{counted(left_over, 'frame')} before pauses and at the end of the log fill no window"
                notes.append(
                    f"{log.path.name}: {last}, and with them {counted(attacks, 'attack frame', 'are')} left out"
                )
            writer.end_log(replace(source, frames_digest=digest.hexdigest()), notes)
            notes = []
            stage.advance(hashed.size)
        return writer.finish()


def source_of(log: LogFile, reader: LogReader, *, frames: int, sha256: str) -> SourceFile:
    """Describes a log that was read."""
    return SourceFile(str(log.path), log.role, log.group, frames, reader.labelled, sha256,
                      id_base=reader.id_base, byte_base=reader.byte_base)  # fmt: skip


def too_short(fact: str, frames: int, left_out: str) -> DataError:
    """Makes the error for logs that are too short for a window.

    `frames` are the frames of the shortest log; `left_out` counts the rows that were not read, and may be empty.
    """
    fact += f"; left out: {left_out}" if left_out else ""
    return DataError(fact, remedy=_longer_logs(frames))


def _longer_logs(frames: int) -> str:
    # Smaller windows help only if each part of the log then has windows; a finished run cannot change its window.
    window = frames // _LEAST_WINDOWS
    return "Use longer logs" + (f", or train with smaller windows: --set dataset.window={window}" if window > 1 else "")


def split_rows(
    flat: FlatGraphs, validation_share: float, test_share: float | None, sources: Sequence[int] | None = None
) -> tuple[Split, list[str]]:
    """Splits all windows of `sources`, which are indices of logs, by the roles of the logs (see `SourceFile`).

    The last `test_share` of a log is for testing (0: none; None: see `default_test_share`), and the last
    `validation_share` of the rest for validation. If a part then has one class only although the log has both, each
    benign and each attack phase of the log is cut this way. Of several benign logs, some are held out for validation
    (see `find_held_out_logs`). If all logs are for testing, the other parts are empty.

    Returns:
        The split, and notices about logs that were cut by phases or lack a class.

    Raises:
        DataError: A part would be empty.
    """
    # The split is by time, never at random: windows that overlap or follow one another are nearly equal, and a random
    # split would test on trained windows.
    train: list[Ints] = []
    validation: list[Ints] = []
    test: dict[str, list[Ints]] = {}
    paths_by_notice: dict[str, list[str]] = {}
    present = range(len(flat.sources)) if sources is None else sources
    held_out = find_held_out_logs(flat, validation_share, present)
    notices = []
    if test_share is None:
        cut = [index for index in present if flat.sources[index].role == LOG]
        cut_rows = np.flatnonzero(np.isin(flat.source, cut))
        has_attacks = bool(flat.label[cut_rows].any())
        test_share = default_test_share(len(cut_rows), validation_share, has_attacks=has_attacks)
        if cut and not test_share:
            notices.append(
                f"All {counted(len(cut_rows), 'window')} are for training and validation. A test part would leave "
                f"fewer than {LEAST_VALIDATION} for validation; --set dataset.test_share={_TEST_SHARE} keeps "
                "a test part"
            )
    for index in present:
        source = flat.sources[index]
        rows = np.flatnonzero(flat.source == index)
        if source.role == TEST:
            test.setdefault(source.group, []).append(rows)
            continue
        tests = source.role == LOG and test_share > 0
        shares = (validation_share, test_share) if tests else (validation_share,)
        parts, log_notices = _cut_log(flat, rows, shares)
        if index in held_out:
            parts[:2] = [parts[0][:0], np.concatenate(parts[:2])]
            log_notices = [*log_notices, "kept whole for validation, as a drive that training does not see"]
        for notice in log_notices:
            paths_by_notice.setdefault(notice, []).append(source.path)
        train.append(parts[0])
        validation.append(parts[1])
        if tests:
            test.setdefault(source.group, []).append(parts[2])
    none = np.empty(0, dtype=np.int64)
    split = Split(
        train=np.concatenate([none, *train]),
        validation=np.concatenate([none, *validation]),
        test={group: np.concatenate(rows) for group, rows in test.items()},
    )
    needed = {f"test ({group})": rows for group, rows in split.test.items()}
    if train:
        needed = {"training": split.train, "validation": split.validation, **needed}
    if empty := [name for name, rows in needed.items() if not len(rows)]:
        raise DataError(f"The data set has no window for {', '.join(empty)}",
                        remedy=_longer_logs(min(source.frames for source in flat.sources)))  # fmt: skip
    return split, notices + [
        f"{paths[0] if len(paths) == 1 else f'Each of {len(paths)} logs ({_first_names(paths)})'}: {notice}"
        for notice, paths in paths_by_notice.items()
    ]


def default_test_share(num_windows: int, validation_share: float, *, has_attacks: bool) -> float:
    """Returns the share of each log that is kept for testing where the settings name none.

    Benign logs too short for `LEAST_VALIDATION` validation windows are not tested. The false alarms in a few windows
    say little, and a CAN ID that only these windows have would be unknown to the model.
    """
    validation = num_windows * (1 - _TEST_SHARE) * validation_share
    return _TEST_SHARE if has_attacks or validation >= LEAST_VALIDATION else 0.0


def find_held_out_logs(flat: FlatGraphs, validation_share: float, sources: Sequence[int]) -> set[int]:
    """Finds the benign logs that are held out for validation as wholes.

    Thresholds do not carry over from drives that a model was trained on to other drives. With at least `LEAST_DRIVES`
    benign logs among `sources`, a share `validation_share` is held out: the last logs whose CAN IDs the other benign
    logs have, so that their vehicles also have drives in training.
    """
    benign = []
    for index in sources:
        rows = np.flatnonzero(flat.source == index)
        if flat.sources[index].role != TEST and len(rows) and not flat.label[rows].any():
            benign.append((index, np.unique(flat.node_code[flat.node_ptr[rows[0]] : flat.node_ptr[rows[-1] + 1]])))
    held_out: set[int] = set()
    wanted = max(1, round(validation_share * len(benign))) if len(benign) >= LEAST_DRIVES else 0
    for index, codes in reversed(benign):
        in_training = [each for log, each in benign if log != index and log not in held_out]
        if len(held_out) < wanted and np.isin(codes, np.concatenate(in_training)).all():
            held_out.add(index)
    return held_out


def _cut_log(flat: FlatGraphs, rows: Ints, shares: Sequence[float]) -> tuple[list[Ints], list[str]]:
    """Cuts one log into training, validation and, if `shares` has two shares, test; also returns notices."""

    def has_both_classes(part: Ints) -> bool:
        return len(np.unique(flat.label[part] > 0)) > 1

    is_attack = flat.label[rows] > 0
    plain = _cut_phases(flat, rows, np.array([0]), shares)
    names = ("training", "validation", "test")
    lacking = [name for name, part in zip(names, plain, strict=False) if not has_both_classes(part)]
    if not lacking or not has_both_classes(rows):
        return plain, []
    by_phase = _cut_phases(flat, rows, find_phase_starts(is_attack), shares)
    if all(has_both_classes(part) for part in by_phase):
        return by_phase, ["benign and attack phases are cut separately, since a part would have one class only"]
    return plain, [f"its attacks lie so that one class is missing from {' and '.join(lacking)}"]


def find_phase_starts(is_attack: Bools) -> Ints:
    """Finds the beginnings of the benign and the attack phases in the windows [R] of one log, ascending from 0.

    A run shorter than `MIN_PHASE_WINDOWS` belongs to the previous phase; at the beginning, to the next phase.
    """
    run_start = np.flatnonzero(np.diff(is_attack, prepend=~is_attack[:1]))
    run_length = np.diff(run_start, append=len(is_attack))
    long_run = run_start[run_length >= MIN_PHASE_WINDOWS]
    changes = np.diff(is_attack[long_run], prepend=~is_attack[long_run[:1]])
    return np.concatenate([[0], long_run[changes][1:]])


def _cut_phases(flat: FlatGraphs, rows: Ints, starts: Ints, shares: Sequence[float]) -> list[Ints]:
    """Cuts every phase of a log's windows `rows` [R] by time; the phases begin at `starts`.

    `shares` are validation's share and then test's share, each of the time up to the end of its part.
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
    # Cuts lie at the beginning of a window: only windows that overlap a cut are left out.
    part = np.searchsorted(cut_frames, first, side="right") - 1
    last_part = np.searchsorted(cut_frames, first + flat.window - 1, side="right") - 1
    whole = part == last_part
    return [rows[whole & (part % num_parts == index)] for index in range(num_parts)]
