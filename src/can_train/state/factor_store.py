"""The factor store: one state folder's observations and events, asked what the next run's factor is, told what a person
decides. Nothing is stored but those files; the export is remade from them.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from can_train.errors import ArgumentError, ConfigError, StateError
from can_train.policy.factors import FactorPolicy
from can_train.state.atomic import write_json_atomic
from can_train.state.documents import utc_text
from can_train.state.events import Event, entries_of, read_events, standing, write_event
from can_train.state.export import export_of
from can_train.state.folders import state_folder
from can_train.state.history import TEACHING
from can_train.state.importing import read_import
from can_train.state.observations import Observation, read_observations
from can_train.state.records import FactorRecord, find_record, record_of, records_of, variant_like

EXPORT_NAME: Final = "batch_size_factors.json"

_ELSEWHERE_RUNS: Final = 10
"""Last runs on another device whose measured-to-predicted ratio is asked; their median stands for them."""


@dataclass(frozen=True)
class FactorChoice:
    """The factor of the next run.

    Attributes:
        factor: Share of the tuned limit, in (0, 1].
        reason: Where it comes from, in words.
    """

    factor: float
    reason: str


@dataclass(frozen=True)
class Elsewhere:
    """What another kind of device taught of a configuration.

    Attributes:
        ratio: Measured ÷ predicted peak, in bytes.
        runs: Runs that say so.
        device: Where they ran.
    """

    ratio: float
    runs: int
    device: str


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

    def records(self) -> list[FactorRecord]:
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
            file: In one of the shapes that `can_train.state.importing` reads, or several of them.

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
        state_dir: State folder; None finds the user's own (`can_train.state.folders.state_folder`).
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
    clean = run.outcome in TEACHING and not run.ran_out_of_memory and not run.ooms_rescued and not run.foreign_bytes
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
