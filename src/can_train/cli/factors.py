"""`can-train factors [KEY]`: shows what past runs taught. Imports neither torch nor Hydra, so that it answers at
once.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.cli.tables import TextTable, print_tables
from can_train.state.factor_store import FactorRecord, find_records, get_safety_factor_db, records_of, run_notes
from can_train.state.observations import ObservationLog, read_observations

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
    "first factor",
)
_RUN_COLUMNS: Final = ("run", "attempt", "ended", "factor", "used", "peak", "batch", "micro-batch", "outcome", "notes")
_NEXT: Final = "Every training run teaches: can-train --help shows how to start one."


def factors(
    key: Annotated[
        str | None,
        typer.Argument(help="Configuration key, with or without its size; all of them without.", metavar="[KEY]"),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="List every run; with a KEY that is done anyway.")] = False,
    device: Annotated[str | None, typer.Option(help="Kind of device, as v100-16gb.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    state_dir: Annotated[
        Path | None, typer.Option(help="State folder. [$CAN_TRAIN_HOME, else the user's state directory]")
    ] = None,
) -> None:
    """Show the safety factors that were learned, and from which runs."""
    store = get_safety_factor_db(state_dir)
    log = read_observations(store.state)
    records = records_of(log.finished, store.policy)
    if records or key is not None:
        records = find_records(records, key, device)
    show = show or key is not None
    if as_json:
        print(json.dumps(factors_json(records, log, show=show), indent=2, ensure_ascii=False))
    elif not records:
        print("\n".join([f"Nothing has been learned yet in {store.state}.", *log_notes(log), _NEXT]))
    else:
        tables = [factors_table(records, log)]
        print_tables(tables + [runs_table(record) for record in records if show])


def factors_table(records: Sequence[FactorRecord], log: ObservationLog) -> TextTable:
    """Makes the overview: one row a configuration and kind of device."""
    rows = [
        (
            record.key,
            record.device,
            f"{record.factor:.4f}",
            str(len(record.runs)),
            _percent(record.mean_peak),
            _percent(record.max_peak),
            _percent(record.last_peak),
            str(record.ooms),
            "yes" if record.converged else "no",
            record.reason,
        )
        for record in records
    ]
    return TextTable("Safety factors of the next runs", _COLUMNS, rows, log_notes(log))


def runs_table(record: FactorRecord) -> TextTable:
    """Makes the list of a configuration's runs on one kind of device, oldest first."""
    rows = [
        (
            run.run_id,
            str(run.attempt),
            f"{run.ended:%Y-%m-%d %H:%M} UTC",
            f"{run.factor:.4f}",
            "–" if run.used is None else f"{run.used:.3f}",
            _percent(run.peak),
            str(run.logical_batch),
            str(run.largest_micro_batch),
            run.outcome,
            run_notes(run),
        )
        for run in record.runs
    ]
    return TextTable(f"{record.key} on {record.device}", _RUN_COLUMNS, rows)


def log_notes(log: ObservationLog) -> list[str]:
    """Says what the state folder holds beside observations."""
    unfinished = [
        f"no result: {started.run_id} (attempt {started.attempt}, {started.key}), begun {started.start_time[:16]}, "
        "still runs or was killed"
        for started in log.unfinished
    ]
    return unfinished + [f"set aside: {aside.path}: {aside.reason}" for aside in log.set_aside]


def factors_json(records: Sequence[FactorRecord], log: ObservationLog, *, show: bool) -> dict[str, Any]:
    """Makes the same as plain values; peaks are shares of the capacity."""
    return {
        "factors": [_record_json(record, show=show) for record in records],
        "unfinished": [asdict(started) for started in log.unfinished],
        "set_aside": [{"path": str(aside.path), "reason": aside.reason} for aside in log.set_aside],
    }


def _record_json(record: FactorRecord, *, show: bool) -> dict[str, Any]:
    figures = {
        "config_key": record.key,
        "device": record.device,
        "safety_factor": record.factor,
        "initial_factor_reason": record.reason,
        "num_runs": len(record.runs),
        "avg_memory_pct": record.mean_peak,
        "max_memory_pct": record.max_peak,
        "last_memory_pct": record.last_peak,
        "ooms": record.ooms,
        "factor_variance": record.factor_variance,
        "converged": record.converged,
    }
    runs = [{**asdict(run), "peak_memory_pct": run.peak} for run in record.runs]
    return {**figures, "runs": runs} if show else figures


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
