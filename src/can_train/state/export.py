"""The learned factors in the shape that earlier tools read: made from records, never read back by the store itself."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from can_train.state.documents import utc_text
from can_train.state.events import Event, standing
from can_train.state.observations import Observation
from can_train.state.records import FactorRecord


def export_of(records: Sequence[FactorRecord], events: Sequence[Event] = ()) -> dict[str, Any]:
    """Makes the export: per key the figures of the device seen last, and beside them, under `devices`, those of every
    device. What was reset and has not run since has no factor, and is left out.

    Args:
        records: By key.
        events: By their time; the runs that an import brought along are exported again.
    """
    export: dict[str, Any] = {}
    with_factor = [record for record in records if record.factor is not None]
    for key, group in groupby(with_factor, key=lambda record: record.key):
        devices = list(group)
        entries = {record.device: _exported(record, events) for record in devices}
        latest = max(devices, key=lambda record: record.last_seen)
        export[key] = {"config_key": key, **entries[latest.device], "devices": entries}
    return export


def run_notes(run: Observation) -> str:
    """What is worth knowing of a run beside its figures, in words; empty where nothing is."""
    notes = [] if run.outcome in ("ok", "rescued") else [run.outcome.replace("oom", "out of memory")]
    if run.ooms_rescued:
        notes.append(f"{run.ooms_rescued} out-of-memory rescued")
    if run.foreign_bytes:
        notes.append(f"other processes took {run.foreign_bytes / 2**20:.0f} MiB")
    return "; ".join(notes)


def _exported(record: FactorRecord, events: Sequence[Event]) -> dict[str, Any]:
    runs = [_run(run) for run in record.forgotten + record.runs]
    own = {(run["run_id"], run["timestamp"]) for run in runs}
    since = standing(events, record.key, record.device).since
    imported = since.imported(record.key, record.device) if since else None
    brought = [run for run in imported.runs if (run.get("run_id"), run.get("timestamp")) not in own] if imported else []
    return {
        "safety_factor": record.factor,
        "initial_factor_reason": record.reason or record.why,
        "last_updated": utc_text(record.updated),
        "runs": brought + runs,
    }


def _run(run: Observation) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "timestamp": run.end_time,
        "peak_memory_pct": run.peak,
        "batch_size": run.logical_batch,
        "success": run.outcome in ("ok", "rescued"),
        "notes": run_notes(run),
    }
