"""The factor store: one state folder's observations and events, asked what the next run's factor is, told what a person
decides. Nothing is stored but those files; the export is remade from them.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from can_train.config.resolved import state_folder
from can_train.errors import ArgumentError, ConfigError, DataError, StateError
from can_train.factors.events import ANY_DEVICE, Event, Imported, entries_of, read_events, standing, write_event
from can_train.factors.observations import Observation, read_observations
from can_train.factors.policies import FactorPolicy
from can_train.factors.records import (
    LEARNABLE_OUTCOMES,
    FactorSummary,
    find_record,
    history_of,
    record_of,
    records_of,
    variant_like,
)
from can_train.fit.factor_rule import Elsewhere, FactorChoice
from can_train.io.atomic import write_json_atomic
from can_train.io.records import check_depth, utc_text

EXPORT_NAME: Final = "batch_size_factors.json"


_ELSEWHERE_RUNS: Final = 10
"""Last runs on another device whose measured-to-predicted ratio is asked; their median stands for them."""


@dataclass(frozen=True)
class Known:
    """What planning may know before a run.

    Attributes:
        choice: The factor that was pinned, learned here or imported; None where nothing of that is there.
        target: Peak that the user wants, as a share of the capacity.
        aim: Peak that the policy goes for, less than the target where that cannot or must not be reached; None where
            no run here has taught.
        aim_reason: Why it is less, in words; empty where it is not.
        elsewhere: Without a choice, what the device seen last has taught; None where none has.
        pinned: Whether a person has fixed the factor, so that it aims at nothing.
    """

    choice: FactorChoice | None
    target: float
    aim: float | None
    aim_reason: str
    elsewhere: Elsewhere | None
    pinned: bool = False


@dataclass(frozen=True)
class FactorStore:
    """The learned factors of one state folder. Reading writes nothing; every call sees what others have written.

    Attributes:
        state: The state folder.
        policy: How observations become the next factor; None: as each configuration's latest run had it.
    """

    state: Path
    policy: FactorPolicy | None = None

    @property
    def db_path(self) -> Path:
        """The export, in the shape that earlier tools read."""
        return self.state / EXPORT_NAME

    def records(self) -> list[FactorSummary]:
        """Every configuration on every kind of device, by key, then by device.

        Raises:
            StateError: The folder cannot be read.
        """
        return records_of(read_observations(self.state).finished, read_events(self.state).events, self.policy)

    def get_factor(self, key: str, device: str | None = None) -> float:
        """The factor of the next run.

        Args:
            key: Configuration key `{dataset}_{model}_{size}_{mode}`; without its size where that is unambiguous.
            device: Kind of device; None means the one seen last.

        Raises:
            ConfigError: Nothing was learned under that key on that device; the message lists what was. Or it was reset,
                and no run has begun since.
            StateError: The folder cannot be read.
        """
        record = find_record(self.records(), key, device)
        if record.factor is None:
            raise ConfigError("The factor was reset", value=record.key, remedy="Train: the next run is a first one")
        return record.factor

    def get_stats(self, key: str, device: str | None = None) -> dict[str, Any]:
        """Figures of past runs: `num_runs`, `avg_memory_pct`, `max_memory_pct` (shares of the capacity, None before any
        peak was measured), `factor_variance`, `converged`. Arguments and errors are those of `get_factor`, which a
        reset does not stop here.
        """
        record = find_record(self.records(), key, device)
        return {
            "num_runs": len(record.runs),
            "avg_memory_pct": record.mean_peak,
            "max_memory_pct": record.max_peak,
            "factor_variance": record.factor_variance,
            "converged": record.converged,
        }

    def known(self, key: str, device: str, fingerprint: Mapping[str, Any] = {}) -> Known:
        """What is known before a run of a configuration on a kind of device.

        Args:
            key: Configuration key.
            device: Kind of device.
            fingerprint: The settings that change memory, as the run's observation will have them.

        Raises:
            StateError: The folder cannot be read, or the fingerprint is nothing that an observation can hold.
        """
        events = read_events(self.state).events
        of_key = [run for run in read_observations(self.state).finished if run.key == key]
        runs = variant_like(of_key, _plain(fingerprint))
        here = [run for run in runs if run.device.key == device]
        record = record_of((key, device), here, standing(events, key, device), self.policy)
        if record.factor is None or record.state == "first":
            others = [run for run in runs if run.device.key != device and _counts(run, events)]
            return Known(None, record.target, None, "", _elsewhere(others))
        aim = None if record.interval is None else record.aim
        choice, pinned = FactorChoice(record.factor, record.why), record.state == "pinned"
        return Known(choice, record.target, aim, record.aim_reason, None, pinned)

    def reset(self, key: str | None, device: str | None = None) -> Path:
        """Lets the runs so far teach nothing any more; they stay. Both None: of every key, on every device.

        Raises:
            StateError: The event cannot be written.
        """
        return self._write(Event(kind="reset", time=next_time(self.state), key=key, device=device))

    def pin(self, key: str, value: float, device: str | None = None) -> Path:
        """Fixes the factor, whatever was learned and will be.

        Args:
            key: Configuration key; no run need have it.
            value: The factor, in (0, 1].
            device: Kind of device; None means all of them.

        Raises:
            ArgumentError: The value is none.
            StateError: The event cannot be written.
        """
        if not 0 < value <= 1:
            remedy = "Give a share of the tuned limit: 0.5 is half of it"
            raise ArgumentError("A factor lies in (0, 1]", value=f"{value:g}", remedy=remedy)
        return self._write(Event(kind="pin", time=next_time(self.state), key=key, device=device, value=value))

    def unpin(self, key: str, device: str | None = None) -> Path:
        """Lets the learned factor hold again.

        Raises:
            StateError: The event cannot be written.
        """
        return self._write(Event(kind="unpin", time=next_time(self.state), key=key, device=device))

    def import_file(self, file: Path) -> tuple[Path, list[str]]:
        """Takes over the factors of a file, all of them or none: for each key and device in it, earlier runs teach
        nothing any more, and the imported factor is the first.

        Args:
            file: In one of the shapes that `can_train.factors.store.read_import` reads, or several of them.

        Returns:
            The event's file, and the keys.

        Raises:
            DataError: The file cannot be read as factors.
            StateError: The event cannot be written.
        """
        entries = entries_of(read_import(file))
        source = os.fsencode(file).decode(errors="replace")
        event = Event(kind="import", time=next_time(self.state), source=source, entries=entries)
        return self._write(event), list(entries)

    def refresh_export(self) -> None:
        """Remakes the export from observations and events.

        Raises:
            StateError: It cannot be written. No reason to stop a training.
        """
        records, events = self.records(), read_events(self.state).events
        try:
            write_json_atomic(self.db_path, export_of(records, events))
        except (OSError, ValueError) as error:
            raise StateError(
                "The export of learned factors cannot be written",
                value=f"{self.db_path}: {error}",
                remedy="Choose another state folder with --state-dir, or mend this one",
            ) from error

    def _write(self, event: Event) -> Path:
        return write_event(self.state, event)


def get_safety_factor_db(state_dir: str | Path | None = None, *, policy: FactorPolicy | None = None) -> FactorStore:
    """Opens the learned factors.

    Args:
        state_dir: State folder; None finds the user's own (`can_train.config.resolved.state_folder`).
        policy: How observations become the next factor; None: as each configuration's latest run had it.
    """
    return FactorStore(state_folder(None if state_dir is None else Path(state_dir)), policy)


def next_time(state: Path) -> str:
    """The time for a new record: the clock's, or just after the latest that the folder holds.

    What comes later must not look earlier, or a clock that was set back would put an out-of-memory before the runs that
    led to it, and a reset before what it resets. Where the folder cannot be read, the clock has to do.
    """
    now = datetime.now(UTC)
    try:
        log, events = read_observations(state), read_events(state).events
    except StateError:
        return utc_text(now)
    times = [run.ended for run in log.finished]
    times += [started.started for started in log.unfinished] + [event.moment for event in events]
    return utc_text(max([now, *(time + timedelta(microseconds=1) for time in times)]))


def _plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint as it is read back from an observation: tuples are lists there."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(fingerprint), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError("A fingerprint holds what JSON can hold", value=str(error)) from error
    return plain


def _counts(run: Observation, events: Iterable[Event]) -> bool:
    """Whether a run's measured and predicted peaks can be compared, and nothing since has reset it."""
    since = standing(events, run.key, run.device.key).since
    clean = (
        run.outcome in LEARNABLE_OUTCOMES
        and not run.ran_out_of_memory
        and not run.ooms_rescued
        and not run.foreign_bytes
    )
    return clean and bool(run.peak_allocated_bytes and run.predicted_peak_bytes) and (
        since is None or run.started >= since.moment
    )  # fmt: skip


def _elsewhere(runs: list[Observation]) -> Elsewhere | None:
    if not runs:
        return None
    device = max(runs, key=lambda run: run.ended).device.key
    recent = [run for run in runs if run.device.key == device][-_ELSEWHERE_RUNS:]
    ratios = [run.peak_allocated_bytes / run.predicted_peak_bytes for run in recent
              if run.peak_allocated_bytes and run.predicted_peak_bytes]  # fmt: skip
    return Elsewhere(sorted(ratios)[len(ratios) // 2], len(ratios), device)


def export_of(records: Sequence[FactorSummary], events: Sequence[Event] = ()) -> dict[str, Any]:
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


def _exported(record: FactorSummary, events: Sequence[Event]) -> dict[str, Any]:
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


_FACTOR: Final = "safety_factor"


_DEVICES: Final = "devices"


_KEPT: Final = ("initial_factor_reason", "runs")
"""What is taken over beside the factor."""


_SHAPES: Final = (
    "Give what can-train factors --export writes, or {key: {device: factor}}, or {key: factor}, factors in (0, 1]"
)


Entries = dict[str, dict[str, Imported]]
"""Configuration key → kind of device, or `ANY_DEVICE` → what the file says."""


def read_import(file: Path) -> Entries:
    """Reads a file of factors.

    Raises:
        DataError: It cannot be read, or not all of it is factors; the message names key and value.
    """
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        rule, remedy = "The file to import must be readable", "Name a file that can-train factors --export wrote"
        raise DataError(rule, value=f"{file}: {error.strerror or error}", remedy=remedy) from error
    except ValueError as error:
        raise _wrong(file, str(error)) from error
    try:
        return parse_import(json.loads(text))
    except RecursionError as error:
        raise _wrong(file, "nested too deeply") from error
    except ValueError as error:
        raise _wrong(file, str(error)) from error


def parse_import(values: Any) -> Entries:
    """Understands the content of such a file.

    Raises:
        ValueError: Not all of it is factors.
    """
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{_shown(values)} is no object of configuration keys with factors")
    check_depth(values)
    # Half of a pair of escapes is text to JSON and cannot be written again.
    json.dumps(values, ensure_ascii=False).encode()
    return {key: _of_key(key, value) for key, value in values.items()}


def _of_key(key: str, value: Any) -> dict[str, Imported]:
    if not key:
        raise ValueError("a configuration key is empty")
    if not isinstance(value, dict):
        return {ANY_DEVICE: _entry(key, value)}
    devices = value.get(_DEVICES)
    if devices is not None and not isinstance(devices, dict):
        raise ValueError(f"{key}: {_DEVICES} is {_shown(devices)}, no object")
    if _FACTOR in value or devices is not None:
        return _of_devices(key, devices) if devices else {ANY_DEVICE: _entry(key, value)}
    return _of_devices(key, value)


def _of_devices(key: str, devices: Mapping[str, Any]) -> dict[str, Imported]:
    if not devices:
        raise ValueError(f"{key}: no factor")
    return {device: _entry(f"{key}, {device or 'any device'}", value) for device, value in devices.items()}


def _entry(where: str, value: Any) -> Imported:
    fields = value if isinstance(value, dict) else {_FACTOR: value}
    if _FACTOR not in fields:
        raise ValueError(f"{where}: no {_FACTOR}")
    factor = fields[_FACTOR]
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        raise ValueError(f"{where}: {_FACTOR} is {_shown(factor)}, not a number")
    kept = {name: fields[name] for name in _KEPT if fields.get(name) is not None}
    if not _is_finite(kept):
        raise ValueError(f"{where}: a figure of its runs is not finite")
    try:
        return Imported(safety_factor=factor, **kept)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_finite(inner) for inner in value.values())
    if isinstance(value, list):
        return all(_is_finite(inner) for inner in value)
    return not isinstance(value, float) or math.isfinite(value)


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.60}"


def _wrong(file: Path, found: str) -> DataError:
    return DataError("A file of factors can be read whole, or nothing of it is taken", value=f"{file}: {found}",
                     remedy=_SHAPES)  # fmt: skip


@dataclass(frozen=True)
class Replay:
    """One configuration's runs under another policy.

    Attributes:
        record: The configuration, with its runs and the factors that they had.
        factors: What the policy would have set before each of the runs.
        next_factor: What it would set now; None where no run is left to learn from.
    """

    record: FactorSummary
    factors: tuple[float, ...]
    next_factor: float | None


def replay(record: FactorSummary, policy: FactorPolicy) -> Replay:
    """Asks a policy for every run's factor, from what was known when the run began.

    Args:
        record: Runs that did happen: what the policy's own factors would have led to, nobody measured.
        policy: The other policy.
    """
    runs = record.runs
    if not runs:
        return Replay(record, (), None)
    start = runs[0].factor
    factors = tuple(policy.next_factor(history_of(_before(run, runs)), first=start) for run in runs)
    return Replay(record, factors, policy.next_factor(history_of(runs), first=start))


def _before(run: Observation, runs: Sequence[Observation]) -> list[Observation]:
    return [other for other in runs if other.ended <= run.started and other is not run]
