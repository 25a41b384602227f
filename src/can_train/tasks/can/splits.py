"""Decides which windows train, which validate and which are judged. Time is cut, not windows: a window belongs to a
part only if all of its frames do, so parts share no frame however much windows overlap. Which files are read at all is
decided in `duplicates`.

Shapes: G windows of a data set, R windows of one log or one part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train.tasks.can.flat import FlatGraphs

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


def judge_all(flat: FlatGraphs) -> Split:
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
    by_phase = _cut_phases(flat, rows, phase_starts(is_attack), shares)
    if _all_have_both(flat, by_phase):
        return by_phase, ["a plain cut of its time leaves a part with one class only, so each phase is cut by itself"]
    poor = [name for name, part in zip(_PART_NAMES, plain, strict=False) if not _has_both(flat, part)]
    return plain, [f"its attacks lie so that one class is missing from {' and '.join(poor)}"]


def _all_have_both(flat: FlatGraphs, parts: Sequence[NDArray[np.int64]]) -> bool:
    return all(_has_both(flat, part) for part in parts)


def _has_both(flat: FlatGraphs, rows: NDArray[np.int64]) -> bool:
    return len(np.unique(flat.label[rows] > 0)) > 1


def phase_starts(is_attack: NDArray[np.bool_]) -> NDArray[np.int64]:
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
