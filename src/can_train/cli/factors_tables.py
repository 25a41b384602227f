"""Tables and JSON of learned factors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from can_train.factors.exchange import run_notes
from can_train.factors.observations import ANY_DEVICE, Records
from can_train.factors.store import Replay
from can_train.factors.summary import FactorFigures, FactorSummary
from can_train.io.units import counted
from can_train.report.text import TextTable

_COLUMNS: Final = (
    "key", "device", "factor", "runs", "mean peak", "max peak", "last peak", "OOMs", "converged", "reason",
)  # fmt: skip
_RUN_COLUMNS: Final = ("run", "attempt", "ended", "factor", "used", "peak", "batch", "micro-batch", "outcome", "notes")
_LISTED_RUNS: Final = 50  # of one configuration and device, the last ones; Rich takes a second for two thousand
_BEFORE_RESET: Final = "before the reset"


def factors_table(factors: Sequence[FactorFigures], notes: Sequence[str] = ()) -> TextTable:
    """Makes the overview: one row for each configuration and kind of device."""
    rows = [
        (row.key, "any other" if row.device == ANY_DEVICE else row.device, _factor(row),
         str(row.runs + row.imported_runs), _percent(row.mean_peak), _percent(row.max_peak), _percent(row.last_peak),
         str(row.ooms), "yes" if row.converged else "no", "; ".join(_reasons(row)))
        for row in factors
    ]  # fmt: skip
    return TextTable("Safety factors of the next runs", _COLUMNS, rows, notes)


def _factor(summary: FactorFigures | FactorSummary) -> str:
    if summary.factor is None:
        return "–"
    if summary.state == "pinned" or summary.interval is None:
        return f"{summary.factor:.3f}"
    return f"{summary.factor:.3f} ± {summary.interval:.3f}"


def _reasons(figures: FactorFigures) -> Iterator[str]:
    yield figures.reason
    if figures.state == "learned":
        yield f"first: {figures.initial_reason}"
    if figures.state == "pinned" and figures.interval is not None:
        yield f"learned: {figures.learned_factor:.3f} ± {figures.interval:.3f}"
    if figures.imported_runs and figures.runs:
        yield f"{counted(figures.imported_runs, 'run')} of a file"
    if figures.runs_before_reset:
        yield f"+{counted(figures.runs_before_reset, 'run')} {_BEFORE_RESET}"
    if figures.runs_with_other_settings:
        yield f"+{counted(figures.runs_with_other_settings, 'run')} with other settings"


def runs_tables(summary: FactorSummary) -> list[TextTable]:
    """Makes the list of a configuration's runs on one kind of device, oldest first; then one list for each of the other
    settings. Without a run there is no list.
    """
    if not (summary.all_runs or summary.other_settings):
        return []
    notes = []
    name = f"{summary.key} on {shown_device(summary.device)}"
    if summary.aim_reason:
        notes.append(f"aims at {summary.aim:.1%} instead of {summary.target:.1%}: {summary.aim_reason}")
    *others, last = settings_apart([other.fingerprint for other in summary.other_settings] + [summary.fingerprint])
    tables = [_runs_table(f"{name}{f', {last}' if last else ''}", summary, notes)]
    for other, settings in zip(summary.other_settings, others, strict=True):
        tables.append(_runs_table(f"{name}, {settings}", other, [f"factor {_factor(other)}, {other.reason}"]))
    return tables


def _runs_table(title: str, summary: FactorSummary, notes: Sequence[str]) -> TextTable:
    before, runs = len(summary.runs_before_reset), list(enumerate(summary.all_runs))
    older = len(runs) - _LISTED_RUNS
    if older > 0:
        notes = [*notes, f"{counted(older, 'earlier run')}: can-train factors {summary.key} --show --json"]
    rows = [
        (run.run_id, str(run.attempt), _minute(run.ended), f"{run.factor:.4f}",
         "–" if run.used is None else f"{run.used:.3f}", _percent(run.peak), str(run.logical_batch),
         str(run.largest_micro_batch), run.outcome,
         "; ".join(filter(None, (_BEFORE_RESET if index < before else "", run_notes(run)))))
        for index, run in runs[-_LISTED_RUNS:]
    ]  # fmt: skip
    return TextTable(title, _RUN_COLUMNS, rows, notes)


def settings_apart(fingerprints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describes each group of settings by the settings that differ between the groups."""
    flat = [dict(_flat(fingerprint)) for fingerprint in fingerprints]
    names = [
        name
        for name in dict.fromkeys(name for settings in flat for name in settings)
        if any(settings.get(name) != flat[0].get(name) for settings in flat)
    ]
    return [
        " ".join(f"{name}={settings[name]}" if name in settings else f"no {name}" for name in names)
        for settings in flat
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def replay_table(replay: Replay, name: str) -> TextTable:
    """Makes the list of a configuration's runs with the factor that another policy would have set before each."""
    summary = replay.summary
    rows = [
        (run.run_id, str(run.attempt), _minute(run.ended), f"{run.factor:.4f}", f"{factor:.4f}", _percent(run.peak),
         run.outcome)
        for run, factor in zip(summary.runs, replay.factors, strict=True)
    ]  # fmt: skip
    next_factor = "–" if replay.next_factor is None else f"{replay.next_factor:.4f}"
    in_force = "–" if summary.factor is None else f"{summary.factor:.4f}"
    note = f"next: {name} {next_factor}; in force {in_force} ({summary.reason})"
    title = f"{summary.key} on {shown_device(summary.device)}, replayed with {name}"
    return TextTable(title, ("run", "attempt", "ended", "factor", name, "peak", "outcome"), rows, [note])


def record_notes(records: Records) -> list[str]:
    """Lists the attempts without a result and the files that could not be read."""
    unfinished = [
        f"no result: {started.run_id} (attempt {started.attempt}, {started.key}), begun {_minute(started.started)}, "
        + ("lost: its process is gone" if started.is_running() is False else "still runs or was lost")
        for started in records.unfinished
    ]
    return unfinished + [
        f"{'clock ahead' if aside.is_read else 'set aside'}: {aside.shown}: {aside.reason}"
        for aside in records.set_aside
    ]


def factors_json(found: Sequence[FactorFigures | FactorSummary], records: Records) -> dict[str, Any]:
    """Makes the overview, with the runs of summaries, as plain values; peaks are shares of the capacity."""
    return {
        "factors": [_figures_json(each) if isinstance(each, FactorFigures) else _summary_json(each) for each in found],
        "unfinished": [{**asdict(started), "lost": started.is_running() is False} for started in records.unfinished],
        "set_aside": [
            {"path": aside.shown, "reason": aside.reason, "is_read": aside.is_read} for aside in records.set_aside
        ],
    }


def _figures_json(figures: FactorFigures) -> dict[str, Any]:
    return {
        "config_key": figures.key,
        "device": figures.device,
        "state": figures.state,
        "safety_factor": figures.factor,
        "learned_factor": figures.learned_factor,
        "interval": figures.interval,
        "target": figures.target,
        "aim": figures.aim,
        "aim_reason": figures.aim_reason,
        "reason": figures.reason,
        "initial_factor_reason": figures.initial_reason,
        "num_runs": figures.runs + figures.imported_runs,
        "runs_before_reset": figures.runs_before_reset,
        "runs_with_other_settings": figures.runs_with_other_settings,
        "avg_memory_pct": figures.mean_peak,
        "max_memory_pct": figures.max_peak,
        "last_memory_pct": figures.last_peak,
        "ooms": figures.ooms,
        "factor_variance": figures.factor_variance,
        "converged": figures.converged,
    }


def _summary_json(summary: FactorSummary) -> dict[str, Any]:
    before = len(summary.runs_before_reset)
    runs = [
        {**asdict(run), "peak_memory_pct": run.peak, "before_reset": index < before}
        for index, run in enumerate(summary.all_runs)
    ]
    figures, others = _figures_json(summary.figures), [_summary_json(other) for other in summary.other_settings]
    return {**figures, "fingerprint": summary.fingerprint, "runs": runs, "other_settings": others}


def replay_json(replay: Replay, name: str) -> dict[str, Any]:
    """Makes a replay as plain values."""
    runs = [
        {"run_id": run.run_id, "attempt": run.attempt, "end_time": run.end_time, "factor": run.factor,
         "replayed_factor": factor, "peak_memory_pct": run.peak, "outcome": run.outcome}
        for run, factor in zip(replay.summary.runs, replay.factors, strict=True)
    ]  # fmt: skip
    return {
        "config_key": replay.summary.key,
        "device": replay.summary.device,
        "policy": name,
        "safety_factor": replay.summary.factor,
        "replayed_safety_factor": replay.next_factor,
        "runs": runs,
    }


def shown_device(device: str) -> str:
    """Returns a kind of device as a sentence names it."""
    return "any other device" if device == ANY_DEVICE else device


def _minute(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
