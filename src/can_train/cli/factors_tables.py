"""Draws a configuration's factor and peak over its runs with plain characters, so that every terminal, pipe and file
shows them alike.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

from can_train.cli.output import TextTable
from can_train.factors.events import ANY_DEVICE, EventLog
from can_train.factors.observations import Observation, ObservationLog
from can_train.factors.records import FactorSummary
from can_train.factors.store import Replay, run_notes

PLOT_COLUMNS: Final = 76
"""Widest line: with the two columns by which notes are indented, a little less than the narrowest terminal in use."""


_LABEL: Final = "{:>4.0%} |"


_LABEL_COLUMNS: Final = 6


_STEP: Final = 0.05
"""Share of the capacity, or of the tuned limit, that one line stands for."""


_WIDEST_RUN: Final = 4
"""Columns for a run where there is room: a few runs should not lie at the ends of a long line."""


_FACTOR, _PEAK, _BOTH, _OUT_OF_MEMORY, _TARGET = "f", "o", "*", "X", "-"


@dataclass(frozen=True)
class PlotPoint:
    """One run.

    Attributes:
        factor: Safety factor in force.
        peak: Peak ÷ capacity; None where nothing was measured.
        ran_out: Whether memory ran out.
    """

    factor: float
    peak: float | None
    ran_out: bool


def plot_lines(points: Sequence[PlotPoint], *, target: float, columns: int = PLOT_COLUMNS) -> list[str]:
    """Draws the runs from left to right, no line longer than `columns`.

    A history too long for the line is thinned: each column then stands for several runs and shows their last factor,
    their highest peak, and an out-of-memory if there was one.

    Args:
        points: The runs, oldest first; none give no lines.
        target: Peak to reach, as a share of the capacity.
        columns: Characters of the longest line.
    """
    if not points:
        return []
    room = columns - _LABEL_COLUMNS
    thinned = _thinned(points, room)
    spacing = max(min(room // len(thinned), _WIDEST_RUN), 1)
    lowest = min([target, *(share for point in thinned for share in (point.factor, point.peak or 1.0))])
    rows = range(_row(1.0), _row(lowest) - 1, -1)
    lines = [_line(row, thinned, _row(target), spacing) for row in rows]
    run_lines = f"{len(points)} runs, oldest first" if len(points) > 1 else "1 run"
    shared = f"; up to {-(-len(points) // len(thinned))} of them in a column" if len(thinned) < len(points) else ""
    legend = (
        f"{_PEAK} peak  {_FACTOR} factor  {_BOTH} both  {_OUT_OF_MEMORY} out of memory  {_TARGET} target {target:.0%}"
    )
    return [*lines, " " * (_LABEL_COLUMNS - 1) + "+" + "-" * (len(thinned) * spacing),
            *(" " * _LABEL_COLUMNS + text for text in (run_lines + shared, legend))]  # fmt: skip


def _thinned(points: Sequence[PlotPoint], most: int) -> list[PlotPoint]:
    if len(points) <= most:
        return list(points)
    bounds = [index * len(points) // most for index in range(most + 1)]
    return [_together(points[begin:end]) for begin, end in pairwise(bounds)]


def _together(points: Sequence[PlotPoint]) -> PlotPoint:
    peak = max((point.peak for point in points if point.peak is not None), default=None)
    return PlotPoint(points[-1].factor, peak, any(point.ran_out for point in points))


def _row(share: float) -> int:
    return round(min(share, 1.0) / _STEP)


def _line(row: int, points: Sequence[PlotPoint], target: int, spacing: int) -> str:
    empty = _TARGET if row == target else " "
    cells = [_mark(point, row).replace(" ", empty).ljust(spacing, empty) for point in points]
    return (_LABEL.format(row * _STEP) + "".join(cells)).rstrip()


def _mark(point: PlotPoint, row: int) -> str:
    # An out-of-memory is a peak above everything, whatever was measured before it.
    peak = _row(1.0) if point.ran_out else None if point.peak is None else _row(point.peak)
    if row == peak:
        return _OUT_OF_MEMORY if point.ran_out else _BOTH if row == _row(point.factor) else _PEAK
    return _FACTOR if row == _row(point.factor) else " "


_COLUMNS: Final = (
    "key",
    "device",
    "factor",
    "runs",
    "mean peak",
    "max peak",
    "last peak",
    "OOMs",
    "converged",
    "reason",
)


_RUN_COLUMNS: Final = ("run", "attempt", "ended", "factor", "used", "peak", "batch", "micro-batch", "outcome", "notes")


_FORGOTTEN: Final = "before the reset"


def factors_table(records: Sequence[FactorSummary], notes: Sequence[str] = ()) -> TextTable:
    """Makes the overview: one row a configuration and kind of device."""
    rows = [
        (
            record.key,
            shown_device(record.device),
            _factor(record),
            str(len(record.runs)),
            _percent(record.mean_peak),
            _percent(record.max_peak),
            _percent(record.last_peak),
            str(record.ooms),
            "yes" if record.converged else "no",
            "; ".join([_reason(record), *_hidden(record)]),
        )
        for record in records
    ]
    return TextTable("Safety factors of the next runs", _COLUMNS, rows, notes)


def runs_tables(record: FactorSummary) -> list[TextTable]:
    """Makes the list of a configuration's runs on one kind of device, oldest first, with their plot; then those of
    other settings. Without a run there is no list.
    """
    if not (record.runs or record.forgotten or record.others):
        return []
    plot = plot_lines([_plot_point(run) for run in record.runs], target=record.aim)
    name = f"{record.key} on {named_device(record.device)}"
    if record.aim_reason:
        plot.append(f"aims at {record.aim:.1%} instead of {record.target:.1%}: {record.aim_reason}")
    *settings, last = settings_apart([other.fingerprint for other in record.others] + [record.fingerprint])
    tables = [TextTable(f"{name}{f', {last}' if last else ''}", _RUN_COLUMNS, _run_rows(record), plot)]
    for other, differing in zip(record.others, settings, strict=True):
        tables.append(TextTable(f"{name}, {differing}", _RUN_COLUMNS, _run_rows(other), [_learned(other)]))
    return tables


def settings_apart(fingerprints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describes each of several groups of settings by those in which they differ."""
    flat = [dict(_flat(fingerprint)) for fingerprint in fingerprints]
    names = [name for name in dict.fromkeys(name for one in flat for name in one)
             if any(one.get(name) != flat[0].get(name) for one in flat)]  # fmt: skip
    return [" ".join(f"{name}={one[name]}" if name in one else f"no {name}" for name in names) for one in flat]


def replay_table(done: Replay, name: str) -> TextTable:
    """Makes the list of a configuration's runs with the factor that another policy would have set before each."""
    record = done.record
    rows = [
        (run.run_id, str(run.attempt), _minute(run.ended), f"{run.factor:.4f}", f"{factor:.4f}", _percent(run.peak),
         run.outcome)
        for run, factor in zip(record.runs, done.factors, strict=True)
    ]  # fmt: skip
    next_factor = "–" if done.next_factor is None else f"{done.next_factor:.4f}"
    in_force = "–" if record.factor is None else f"{record.factor:.4f}"
    note = f"next: {name} {next_factor}; in force {in_force} ({record.why})"
    title = f"{record.key} on {named_device(record.device)}, replayed with {name}"
    return TextTable(title, ("run", "attempt", "ended", "factor", name, "peak", "outcome"), rows, [note])


def log_notes(log: ObservationLog, events: EventLog) -> list[str]:
    """Says what the state folder holds beside observations and events."""
    unfinished = [
        f"no result: {started.run_id} (attempt {started.attempt}, {started.key}), begun {_minute(started.started)}, "
        + ("lost: its process is gone" if started.is_lost() else "still runs or was lost")
        for started in log.unfinished
    ]
    return unfinished + [f"set aside: {aside.shown}: {aside.reason}" for aside in log.set_aside + events.set_aside]


def factors_json(
    records: Sequence[FactorSummary], log: ObservationLog, events: EventLog, *, show: bool
) -> dict[str, Any]:
    """Makes the same as plain values; peaks are shares of the capacity."""
    return {
        "factors": [_record_json(record, show=show) for record in records],
        "unfinished": [{**asdict(started), "lost": started.is_lost()} for started in log.unfinished],
        "set_aside": [{"path": aside.shown, "reason": aside.reason} for aside in log.set_aside + events.set_aside],
    }


def replay_json(done: Replay, name: str) -> dict[str, Any]:
    """Makes a replay as plain values."""
    runs = [
        {"run_id": run.run_id, "attempt": run.attempt, "end_time": run.end_time, "factor": run.factor,
         "replayed_factor": factor, "peak_memory_pct": run.peak, "outcome": run.outcome}
        for run, factor in zip(done.record.runs, done.factors, strict=True)
    ]  # fmt: skip
    return {"config_key": done.record.key, "device": done.record.device, "policy": name,
            "safety_factor": done.record.factor, "replayed_safety_factor": done.next_factor, "runs": runs}  # fmt: skip


def shown_device(device: str) -> str:
    """A kind of device as people read it."""
    return "any other" if device == ANY_DEVICE else device


def named_device(device: str) -> str:
    """The same within a sentence or a title."""
    return "any other device" if device == ANY_DEVICE else device


def _record_json(record: FactorSummary, *, show: bool) -> dict[str, Any]:
    figures = {
        "config_key": record.key,
        "device": record.device,
        "state": record.state,
        "safety_factor": record.factor,
        "learned_factor": record.learned,
        "interval": record.interval,
        "target": record.target,
        "aim": record.aim,
        "aim_reason": record.aim_reason,
        "reason": record.why,
        "initial_factor_reason": record.reason,
        "num_runs": len(record.runs),
        "runs_before_reset": len(record.forgotten),
        "runs_with_other_settings": _other_runs(record),
        "avg_memory_pct": record.mean_peak,
        "max_memory_pct": record.max_peak,
        "last_memory_pct": record.last_peak,
        "ooms": record.ooms,
        "factor_variance": record.factor_variance,
        "converged": record.converged,
    }
    if not show:
        return figures
    others = [_record_json(other, show=True) for other in record.others]
    return {**figures, "fingerprint": record.fingerprint, "runs": _runs_json(record), "other_settings": others}


def _runs_json(record: FactorSummary) -> list[dict[str, Any]]:
    parts = ((record.forgotten, True), (record.runs, False))
    return [
        {**asdict(run), "peak_memory_pct": run.peak, "before_reset": forgotten}
        for runs, forgotten in parts
        for run in runs
    ]


def _run_rows(record: FactorSummary) -> list[tuple[str, ...]]:
    return [_run_row(run, [_FORGOTTEN]) for run in record.forgotten] + [_run_row(run, []) for run in record.runs]


def _run_row(run: Observation, marks: list[str]) -> tuple[str, ...]:
    return (
        run.run_id,
        str(run.attempt),
        _minute(run.ended),
        f"{run.factor:.4f}",
        "–" if run.used is None else f"{run.used:.3f}",
        _percent(run.peak),
        str(run.logical_batch),
        str(run.largest_micro_batch),
        run.outcome,
        "; ".join(marks + [note for note in [run_notes(run)] if note]),
    )


def _plot_point(run: Observation) -> PlotPoint:
    return PlotPoint(run.factor, run.peak, run.ran_out_of_memory)


def _factor(record: FactorSummary) -> str:
    if record.factor is None:
        return "–"
    if record.state == "pinned" or record.interval is None:
        return f"{record.factor:.3f}"
    return f"{record.factor:.3f} ± {record.interval:.3f}"


def _learned(record: FactorSummary) -> str:
    return f"factor {_factor(record)}, {record.why}"


def _reason(record: FactorSummary) -> str:
    if record.state == "learned":
        return f"{record.why}; first: {record.reason}"
    if record.state == "pinned" and record.interval is not None:
        return f"{record.why}; learned: {record.learned:.3f} ± {record.interval:.3f}"
    return record.why


def _hidden(record: FactorSummary) -> Iterable[str]:
    """What a row says nothing of but how much it is."""
    if record.forgotten:
        yield f"+{_runs(len(record.forgotten))} {_FORGOTTEN}"
    if record.others:
        yield f"+{_runs(_other_runs(record))} with other settings"


def _other_runs(record: FactorSummary) -> int:
    return sum(len(other.runs) + len(other.forgotten) for other in record.others)


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _minute(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
