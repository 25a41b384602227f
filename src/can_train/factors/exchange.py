"""Export and import of learned factors, as a file that other tools and other machines read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from can_train.errors import ConfigError, DataError
from can_train.factors.observations import ANY_DEVICE, Imported, Observation
from can_train.factors.summary import FactorSummary, devices_named
from can_train.io.records import read_bytes, utc_text

Entries = dict[str, dict[str, Imported]]  # by configuration key, then by kind of device or `ANY_DEVICE`


def make_export(summaries: Sequence[FactorSummary]) -> dict[str, Any]:
    """Makes the export: per key the figures of the device seen last, and under `devices` the figures of every device.
    A configuration without a factor (reset and not run since, or never run with one) is left out. Imported runs are
    exported again.

    Args:
        summaries: By key.
    """
    export: dict[str, Any] = {}
    with_factor = [summary for summary in summaries if summary.factor is not None]
    for key, group in groupby(with_factor, key=lambda summary: summary.key):
        key_summaries = list(group)
        entries = {summary.device: _export_entry(summary) for summary in key_summaries}
        # Earlier tools do not read variance and convergence, so only the entries under `devices` have them.
        devices = {summary.device: {**entries[summary.device], "factor_variance": summary.factor_variance,
                                    "converged": summary.converged} for summary in key_summaries}  # fmt: skip
        latest = max(key_summaries, key=lambda summary: summary.last_seen)
        export[key] = {"config_key": key, **entries[latest.device], "devices": devices}
    return export


def _export_entry(summary: FactorSummary) -> dict[str, Any]:
    runs = [
        {"run_id": run.run_id, "timestamp": run.end_time, "peak_memory_pct": run.peak, "batch_size": run.logical_batch,
         "success": run.outcome in ("ok", "rescued"), "notes": run_notes(run)}
        for run in summary.all_runs
    ]  # fmt: skip
    return {
        "safety_factor": summary.factor,
        "initial_factor_reason": summary.initial_reason or summary.reason,
        "last_updated": utc_text(summary.updated),
        "runs": [*summary.imported_runs, *runs],
    }


def run_notes(run: Observation) -> str:
    """Describes the events of a run, such as rescues; empty where there were none."""
    notes = [] if run.outcome in ("ok", "rescued") else [run.outcome.replace("oom", "out of memory")]
    if run.ooms_rescued:
        notes.append(f"{run.ooms_rescued} out-of-memory rescued")
    if run.foreign_bytes:
        notes.append(f"other processes took {run.foreign_bytes / 2**20:.0f} MiB")
    return "; ".join(notes)


def read_import(file: Path, summaries: Sequence[FactorSummary] = ()) -> Entries:
    """Reads the factors of a file that differ from this store's export.

    Args:
        file: In one of the shapes of `parse_import`, or several of them.
        summaries: The store's summaries.

    Raises:
        DataError: The file cannot be read, or an entry could never be used; the message names key and value.
    """
    try:
        # The output of another command: /dev/stdin, or `<(...)`.
        is_piped = file.parts[:2] == ("/", "dev") and file.is_fifo()
        data = file.read_bytes() if is_piped else read_bytes(file)
        entries = resolve_names(parse_import(_decoded(data)), summaries)
    except OSError as error:
        rule, remedy = "The file to import cannot be read", "Name a file that can-train factors --export wrote"
        raise DataError(rule, value=f"{file}: {error.strerror or error}", remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            "The file of factors cannot be imported",
            value=f"{file}: {error}",
            remedy="Give an export of can-train factors --export, or {key: {device: factor}}, or {key: factor}, "
            "factors in (0, 1]",
        ) from error
    present = {key: parse_import({key: value})[key] for key, value in make_export(summaries).items()}
    changed = {
        key: {device: entry for device, entry in devices.items() if present.get(key, {}).get(device) != entry}
        for key, devices in entries.items()
    }
    return {key: devices for key, devices in changed.items() if devices}


def _decoded(data: bytes) -> Any:
    """Decodes JSON whose objects have each name once.

    Raises:
        ValueError: It is no JSON, or an object has a name twice.
    """
    values = msgspec.json.decode(data)
    # msgspec takes the last of the values of a name. Python's reader shows them all.
    json.loads(data, object_pairs_hook=_checked_names)
    return values


def _checked_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name, value in pairs:
        if name in names:
            raise ValueError(f"{name} is there twice, as {_shown(names[name])} and as {_shown(value)}")
        names[name] = value
    return names


def parse_import(values: Any) -> Entries:
    """Reads the shapes of an import: an export of `make_export` with or without `devices`, `{key: {device: factor}}`
    and `{key: factor}`.

    Raises:
        ValueError: A part has another shape.
    """
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{_shown(values)} is no object of configuration keys with factors")
    return {key: _parse_devices(key, value) for key, value in values.items()}


def _parse_devices(key: str, value: Any) -> dict[str, Imported]:
    if not key:
        raise ValueError("a configuration key is empty")
    devices = value.get("devices") if isinstance(value, dict) else None
    if devices is not None and not isinstance(devices, dict):
        raise ValueError(f"{key}: devices is {_shown(devices)}, no object")
    if not devices and (not isinstance(value, dict) or devices is not None or "safety_factor" in value):
        return {ANY_DEVICE: _parse_entry(key, value)}
    devices = devices or value
    if not devices:
        raise ValueError(f"{key}: no factor")
    return {device: _parse_entry(f"{key}, {device or 'any device'}", entry) for device, entry in devices.items()}


def _parse_entry(where: str, value: Any) -> Imported:
    fields = value if isinstance(value, dict) else {"safety_factor": value}
    if "safety_factor" not in fields:
        raise ValueError(f"{where}: no safety_factor")
    factor = fields["safety_factor"]
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        raise ValueError(f"{where}: safety_factor is {_shown(factor)}, not a number")
    if not 0 < factor <= 1:
        raise ValueError(f"{where}: safety_factor {factor:g} is not in (0, 1]")
    try:
        return msgspec.convert({name: field for name, field in fields.items() if field is not None}, Imported)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error


def resolve_names(entries: Mapping[str, Mapping[str, Imported]], summaries: Sequence[FactorSummary] = ()) -> Entries:
    """Replaces short names of GPUs (`v100`) by the kinds of device that they stand for, one for each memory size.

    Args:
        entries: By key and device, as a file names them.
        summaries: The store's summaries; their keys and devices are always understood.

    Raises:
        ValueError: No run can have such a key or such a device.
    """
    keys = {summary.key for summary in summaries}
    store_devices = {summary.device for summary in summaries} | {ANY_DEVICE}
    for key in entries:
        # A task of one's own has the name of its class as a key, with or without other parts.
        if key not in keys and not all(key.split("_")):
            raise ValueError(
                f"{key} is not a configuration key ({{dataset}}_{{model}}_{{size}}_{{mode}}, or of a task)"
            )
    return {key: _resolve_devices(key, devices, store_devices) for key, devices in entries.items()}


def _resolve_devices(key: str, entries: Mapping[str, Imported], store_devices: set[str]) -> dict[str, Imported]:
    devices = {}
    for name in entries:
        try:
            devices[name] = devices_named(name, store_devices)
        except ConfigError as error:
            raise ValueError(f"{key}, {name}: unknown device ({error.remedy[:1].lower()}{error.remedy[1:]})") from error
    named_by: dict[str, str] = {}
    # A name for all memory sizes first: a name of a single size then takes its place.
    for name in sorted(entries, key=lambda name: -len(devices[name])):
        for device in devices[name]:
            broader = named_by.get(device)
            if broader is not None and len(devices[broader]) == len(devices[name]):
                raise ValueError(f"{key}: {broader} and {name} are both {device}")
            named_by[device] = name
    return {device: entries[name] for device, name in named_by.items()}


def _shown(value: Any) -> str:
    return f"{msgspec.json.encode(value).decode():.60}"
