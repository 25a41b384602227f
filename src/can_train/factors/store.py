"""The factor store: answers what the next run's factor is from one state folder's observations and events, and records
what a person decides. It keeps nothing else; the export is remade from those files.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from can_train.config.resolved import state_folder
from can_train.errors import ArgumentError, ConfigError, StateError
from can_train.factors.events import Event, active_events, read_events, write_event
from can_train.factors.exchange import make_export, read_import
from can_train.factors.observations import Observation, read_observations
from can_train.factors.policies import FactorPolicy
from can_train.factors.summary import (
    LEARNABLE_OUTCOMES,
    FactorSummary,
    find_summary,
    history_of,
    summarize,
    summarize_runs,
    with_settings,
)
from can_train.fit.factor_rule import NO_AIM, Aim, FactorChoice, OtherDevice
from can_train.io.atomic import write_json_atomic
from can_train.io.records import utc_text

EXPORT_NAME: Final = "batch_size_factors.json"

# Last runs on another device whose median ratio of measured to predicted peak stands for that device.
_OTHER_DEVICE_RUNS: Final = 10


@dataclass(frozen=True)
class Known:
    """What the store knows before a run."""

    choice: FactorChoice | None  # pinned, learned on this device or imported
    aim: Aim | None = None  # of the policy; `NO_AIM` under a pin; None where no run on this device was learned from
    other_device: OtherDevice | None = None  # without a choice: what the device seen last has shown


@dataclass(frozen=True)
class FactorStore:
    """The learned factors of one state folder. Reading writes nothing; every call sees what others have written.

    Attributes:
        state: The state folder.
        policy: How observations become the next factor; None means as each configuration's latest run had it.
    """

    state: Path
    policy: FactorPolicy | None = None

    @property
    def db_path(self) -> Path:
        """The export, in the shape that earlier tools read."""
        return self.state / EXPORT_NAME

    def records(self) -> list[FactorSummary]:
        """Summarizes every configuration on every kind of device, by key, then by device.

        Raises:
            StateError: The folder cannot be read.
        """
        return summarize(read_observations(self.state).finished, read_events(self.state).events, self.policy)

    def get_factor(self, key: str, device: str | None = None) -> float:
        """Returns the factor of the next run.

        Args:
            key: Configuration key `{dataset}_{model}_{size}_{mode}`; without its size where that is unambiguous.
            device: Kind of device; None means the one seen last.

        Raises:
            ConfigError: Nothing was learned under that key on that device; the message lists what was. Or it was reset,
                and no run has begun since.
            StateError: The folder cannot be read.
        """
        summary = find_summary(self.records(), key, device)
        if summary.factor is None:
            raise ConfigError("The factor was reset", value=summary.key, remedy="Train: the next run is a first one")
        return summary.factor

    def get_stats(self, key: str, device: str | None = None) -> dict[str, Any]:
        """Returns figures of past runs: `num_runs`, `avg_memory_pct`, `max_memory_pct` (shares of the capacity, None
        before any peak was measured), `factor_variance`, `converged`. Arguments and errors are those of `get_factor`,
        except that a reset is no error.
        """
        summary = find_summary(self.records(), key, device)
        return {
            "num_runs": len(summary.runs),
            "avg_memory_pct": summary.mean_peak,
            "max_memory_pct": summary.max_peak,
            "factor_variance": summary.factor_variance,
            "converged": summary.converged,
        }

    def known(self, key: str, device: str, fingerprint: Mapping[str, Any] = {}, *, size: str = "") -> Known:
        """Returns what is known before a run of a configuration on a kind of device.

        Args:
            key: Configuration key.
            device: Kind of device.
            fingerprint: The settings that change memory, as the run's observation will have them.
            size: The model's size in the key; empty where it has none.

        Raises:
            StateError: The folder cannot be read, or the fingerprint cannot be written as JSON.
        """
        events = read_events(self.state).events
        of_key = [run for run in read_observations(self.state).finished if run.key == key]
        runs = with_settings(of_key, _as_read_back(fingerprint))
        here = [run for run in runs if run.device.key == device]
        active = active_events(events, key, device, size or (here[-1].size if here else ""))
        summary = summarize_runs((key, device), here, active, self.policy)
        if summary.factor is None or summary.state == "first":
            others = [run for run in runs if run.device.key != device and _shows_ratio(run, events)]
            return Known(None, None, _other_device(others))
        aim = None if summary.interval is None else Aim(summary.aim, summary.aim_reason)
        choice = FactorChoice(summary.factor, summary.reason)
        return Known(choice, NO_AIM if summary.state == "pinned" else aim)

    def reset(self, key: str | None, device: str | None = None) -> Path:
        """Excludes the runs so far from learning; they stay in the history. None means every key, or every device.

        Raises:
            StateError: The event cannot be written.
        """
        return self._write("reset", key=key, device=device)

    def pin(self, key: str, value: float, device: str | None = None) -> Path:
        """Fixes the factor, whatever was learned and will be.

        Args:
            key: Configuration key; no run need have it.
            value: The factor, in (0, 1].
            device: Kind of device; None means all of them.

        Raises:
            ArgumentError: The value is not in (0, 1].
            StateError: The event cannot be written.
        """
        if not 0 < value <= 1:
            remedy = "Give a share of the tuned limit: 0.5 is half of it"
            raise ArgumentError("A factor lies in (0, 1]", value=f"{value:g}", remedy=remedy)
        return self._write("pin", key=key, device=device, value=value)

    def unpin(self, key: str, device: str | None = None) -> Path:
        """Removes a pin, so that the learned factor holds again.

        Raises:
            StateError: The event cannot be written.
        """
        return self._write("unpin", key=key, device=device)

    def import_file(self, file: Path) -> tuple[Path | None, list[str]]:
        """Imports the factors of a file, all of them or none. For each key and device whose factor the file changes,
        the imported factor is the first one, and earlier runs are no longer learned from.

        Args:
            file: In one of the shapes of `can_train.factors.exchange.parse_import`, or several of them.

        Returns:
            The event's file, None where nothing changed, and the keys that changed.

        Raises:
            DataError: The file cannot be read as factors.
            StateError: The event cannot be written.
        """
        entries = read_import(file, self.records(), read_events(self.state).events)
        if not entries:
            return None, []
        source = os.fsencode(file).decode(errors="replace")
        return self._write("import", source=source, entries=entries), list(entries)

    def refresh_export(self) -> None:
        """Remakes the export from observations and events.

        Raises:
            StateError: It cannot be written. No reason to stop a training.
        """
        export = make_export(self.records(), read_events(self.state).events)
        try:
            write_json_atomic(self.db_path, export)
        except (OSError, ValueError) as error:
            raise StateError(
                "The export of learned factors cannot be written",
                value=f"{self.db_path}: {error}",
                remedy="Choose another state folder with --state-dir, or make this one writable",
            ) from error

    def _write(self, kind: Literal["reset", "pin", "unpin", "import"], **fields: Any) -> Path:
        return write_event(self.state, Event(kind=kind, time=next_time(self.state), **fields))


def get_safety_factor_db(state_dir: str | Path | None = None, *, policy: FactorPolicy | None = None) -> FactorStore:
    """Opens the learned factors.

    Args:
        state_dir: State folder; None finds the user's own (`can_train.config.resolved.state_folder`).
        policy: How observations become the next factor; None means as each configuration's latest run had it.
    """
    return FactorStore(state_folder(None if state_dir is None else Path(state_dir)), policy)


def next_time(state: Path) -> str:
    """Returns the time for a new record: the clock's, or just after the latest record of the folder."""
    now = datetime.now(UTC)
    # What comes later must not look earlier: a clock that was set back would put an out-of-memory before the runs that
    # led to it, and a reset before what it resets.
    try:
        log, events = read_observations(state), read_events(state).events
    except StateError:
        return utc_text(now)
    times = [run.ended for run in log.finished]
    times += [started.started for started in log.unfinished] + [event.moment for event in events]
    return utc_text(max([now, *(time + timedelta(microseconds=1) for time in times)]))


def _as_read_back(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fingerprint as it is read from an observation: tuples are lists there."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(fingerprint), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError("A fingerprint holds what JSON can hold", value=str(error)) from error
    return plain


def _shows_ratio(run: Observation, events: Iterable[Event]) -> bool:
    """Whether a run's measured and predicted peaks can be compared, and nothing since has reset it."""
    cutoff = active_events(events, run.key, run.device.key, run.size).cutoff
    disturbed = run.ran_out_of_memory or run.ooms_rescued or run.foreign_bytes
    measured = run.peak_allocated_bytes and run.predicted_peak_bytes
    is_after = cutoff is None or run.started >= cutoff.moment
    return run.outcome in LEARNABLE_OUTCOMES and bool(measured) and not disturbed and is_after


def _other_device(runs: Sequence[Observation]) -> OtherDevice | None:
    if not runs:
        return None
    device = max(runs, key=lambda run: run.ended).device.key
    recent = [run for run in runs if run.device.key == device][-_OTHER_DEVICE_RUNS:]
    ratios = sorted((run.peak_allocated_bytes or 0) / (run.predicted_peak_bytes or 1) for run in recent)
    return OtherDevice(ratios[len(ratios) // 2], len(ratios), device)


@dataclass(frozen=True)
class Replay:
    """One configuration's runs under another policy.

    Attributes:
        summary: The configuration, with its runs and the factors that they had.
        factors: What the policy would have set before each of the runs.
        next_factor: What it would set now; None where there is no run to learn from.
    """

    summary: FactorSummary
    factors: tuple[float, ...]
    next_factor: float | None


def replay_runs(summary: FactorSummary, policy: FactorPolicy) -> Replay:
    """Computes a policy's factor for every run, from what was known when the run began.

    The runs are those that happened: what the policy's own factors would have led to, nobody measured.
    """
    runs = summary.runs
    if not runs:
        return Replay(summary, (), None)
    first = runs[0].factor
    before = [[other for other in runs if other.ended <= run.started and other is not run] for run in runs]
    factors = tuple(policy.next_factor(history_of(known), first=first) for known in before)
    return Replay(summary, factors, policy.next_factor(history_of(runs), first=first))
