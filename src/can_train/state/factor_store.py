"""The learned safety factors: which observations count for a configuration on a kind of device, in which order, and what
the policy makes of them. Nothing here is stored but observations; the export is remade from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Final

from can_train.errors import StateError, unknown_name
from can_train.policy.factors import FactorPoint, MomentumPolicy
from can_train.state.atomic import write_json_atomic
from can_train.state.folders import state_folder
from can_train.state.observations import Observation, ObservationLog, read_observations

EXPORT_NAME: Final = "batch_size_factors.json"

_SETTLED_RUNS: Final = 5
"""Runs before a factor can have converged, and runs whose factors its variance is taken over."""

_IN_BAND_RUNS: Final = 3
"""Last runs whose peaks must lie in the band."""

_BAND: Final = 0.05
"""Distance of a peak from the target that counts as in band: within it the momentum rule only makes its small steps."""

_SETTLED_VARIANCE: Final = 0.01
"""Variance of the factors below which they count as settled."""


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
class FactorRecord:
    """All that is known of one configuration on one kind of device.

    Attributes:
        key: Configuration key.
        device: Kind of device.
        factor: Factor of the next run.
        reason: Where the first run's factor came from, in words.
        runs: Observations, oldest first; at least one.
        peaks: Peak ÷ capacity of the runs that measured one, oldest first.
        ooms: Runs in which memory ran out.
        factor_variance: Variance of the last runs' factors.
        converged: Whether peaks and factors have settled.
    """

    key: str
    device: str
    factor: float
    reason: str
    runs: tuple[Observation, ...]
    peaks: tuple[float, ...]
    ooms: int
    factor_variance: float
    converged: bool


class FactorStore:
    """The learned factors of one state folder. Reading writes nothing; every call sees what others have written.

    Args:
        state: The state folder.
        policy: How observations become the next factor.
    """

    def __init__(self, state: Path, policy: MomentumPolicy | None = None) -> None:
        self._state = state
        self._policy = policy or MomentumPolicy()

    @property
    def db_path(self) -> Path:
        """The export, in the shape that earlier tools read."""
        return self._state / EXPORT_NAME

    def log(self) -> ObservationLog:
        """Reads everything in the state folder.

        Raises:
            StateError: The folder cannot be read.
        """
        return read_observations(self._state)

    def records(self) -> list[FactorRecord]:
        """Every configuration on every kind of device, by key, then by device.

        Raises:
            StateError: The folder cannot be read.
        """
        return records_of(self.log().finished, self._policy)

    def get_factor(self, key: str, device: str | None = None) -> float:
        """The factor of the next run.

        Args:
            key: Configuration key `{dataset}_{model}_{size}_{mode}`; without its size where that is unambiguous.
            device: Kind of device; None means the one seen last.

        Raises:
            ConfigError: Nothing was learned under that key on that device; the message lists what was.
            StateError: The folder cannot be read.
        """
        return find_record(self.records(), key, device).factor

    def get_stats(self, key: str, device: str | None = None) -> dict[str, Any]:
        """Figures of past runs: `num_runs`, `avg_memory_pct`, `max_memory_pct` (shares of the capacity, None before any
        peak was measured), `factor_variance`, `converged`. Arguments and errors are those of `get_factor`.
        """
        record = find_record(self.records(), key, device)
        return {
            "num_runs": len(record.runs),
            "avg_memory_pct": fmean(record.peaks) if record.peaks else None,
            "max_memory_pct": max(record.peaks, default=None),
            "factor_variance": record.factor_variance,
            "converged": record.converged,
        }

    def choose_factor(self, key: str, device: str, *, prior: FactorChoice) -> FactorChoice:
        """The factor of the next run, and why; the prior where nothing was learned yet.

        Raises:
            StateError: The folder cannot be read.
        """
        for record in self.records():
            if (record.key, record.device) == (key, device):
                count = len(record.runs)
                return FactorChoice(record.factor, f"learned from {count} run{'s' if count > 1 else ''}")
        return prior

    def refresh_export(self) -> None:
        """Remakes the export from the observations.

        Raises:
            StateError: It cannot be written. No reason to stop a training.
        """
        try:
            write_json_atomic(self.db_path, export_of(self.records()))
        except OSError as error:
            raise StateError(
                "The export of learned factors cannot be written",
                value=f"{self.db_path}: {error}",
                remedy="Choose another state folder with --state-dir, or mend this one",
            ) from error


def get_safety_factor_db(state_dir: str | Path | None = None) -> FactorStore:
    """Opens the learned factors.

    Args:
        state_dir: State folder; None finds the user's own (`can_train.state.folders.state_folder`).
    """
    return FactorStore(state_folder(None if state_dir is None else Path(state_dir)))


def find_record(records: Sequence[FactorRecord], key: str, device: str | None = None) -> FactorRecord:
    """Finds a configuration on a device, or on the one seen last.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    found = find_records(records, key)
    if device is not None:
        found = [record for record in found if record.device == device] or _unknown_device(found, device)
    return max(found, key=lambda record: record.runs[-1].ended)


def find_records(records: Sequence[FactorRecord], key: str) -> list[FactorRecord]:
    """Finds a configuration on every device. A key without its size is understood where only one size is known.

    Raises:
        ConfigError: There is none, or there are several sizes; the message lists those there are.
    """
    keys = {record.key for record in records}
    matching = {key} & keys or {known for known in keys if key in _without_size(known)}
    if len(matching) != 1:
        raise unknown_name("configuration key", key, matching or keys)
    return [record for record in records if record.key in matching]


def records_of(observations: Sequence[Observation], policy: MomentumPolicy) -> list[FactorRecord]:
    """Groups observations by key and device and learns from each group.

    Args:
        observations: By the time their attempts began.
        policy: How observations become the next factor.
    """

    def group(observation: Observation) -> tuple[str, str]:
        return observation.key, observation.device.key

    return [
        _record(key, device, tuple(runs), policy)
        for (key, device), runs in groupby(sorted(observations, key=group), key=group)
    ]


def history_of(runs: Sequence[Observation]) -> list[FactorPoint]:
    """What runs teach, oldest first.

    An out-of-memory silences every run that overlaps it in time: those began before its lesson was known, so that their
    success at the old factor must not undo it, nor their failure repeat it. Runs without a search, or that ended before
    a peak was measured or by an error, teach nothing.

    Args:
        runs: One configuration's runs on one kind of device, by the time their attempts began.
    """
    lessons: list[Observation] = []
    for run in runs:
        if run.ran_out_of_memory and not any(_overlap(run, lesson) for lesson in lessons):
            lessons.append(run)
    points = []
    for run in runs:
        if run in lessons:
            points.append(FactorPoint(used=run.used or run.factor, peak=None))
        elif not run.ran_out_of_memory and run.outcome in ("ok", "rescued", "interrupted"):
            if run.used is not None and run.peak is not None and not any(_overlap(run, lesson) for lesson in lessons):
                points.append(FactorPoint(used=run.used, peak=run.peak))
    return points


def export_of(records: Sequence[FactorRecord]) -> dict[str, Any]:
    """The learned factors in the shape that earlier tools read: per key the figures of the device seen last, and beside
    them, under `devices`, those of every device.
    """
    export: dict[str, Any] = {}
    for key, group in groupby(records, key=lambda record: record.key):
        devices = list(group)
        latest = max(devices, key=lambda record: record.runs[-1].ended)
        export[key] = {"config_key": key, **_exported(latest), "devices": {r.device: _exported(r) for r in devices}}
    return export


def _record(key: str, device: str, runs: tuple[Observation, ...], policy: MomentumPolicy) -> FactorRecord:
    peaks = tuple(run.peak for run in runs if run.peak is not None)
    variance = pvariance([run.factor for run in runs[-_SETTLED_RUNS:]])
    in_band = [not run.ran_out_of_memory and _in_band(run, policy.target) for run in runs[-_IN_BAND_RUNS:]]
    return FactorRecord(
        key=key,
        device=device,
        factor=policy.next_factor(history_of(runs), first=runs[0].factor),
        reason=runs[0].factor_reason,
        runs=runs,
        peaks=peaks,
        ooms=sum(run.ran_out_of_memory for run in runs),
        factor_variance=variance,
        converged=len(runs) >= _SETTLED_RUNS and all(in_band) and variance < _SETTLED_VARIANCE,
    )


def _in_band(run: Observation, target: float) -> bool:
    return run.peak is not None and abs(run.peak - target) <= _BAND


def _overlap(one: Observation, other: Observation) -> bool:
    return one.started < other.ended and other.started < one.ended


def _without_size(key: str) -> set[str]:
    """The key with each of its inner parts left out: names may hold underscores, so which part is the size is open."""
    parts = key.split("_")
    return {"_".join(parts[:index] + parts[index + 1 :]) for index in range(1, len(parts) - 1)}


def _unknown_device(records: Sequence[FactorRecord], device: str) -> list[FactorRecord]:
    raise unknown_name(f"device for {records[0].key}", device, [record.device for record in records])


def _exported(record: FactorRecord) -> dict[str, Any]:
    return {
        "safety_factor": record.factor,
        "initial_factor_reason": record.reason,
        "last_updated": max(run.ended for run in record.runs).isoformat(timespec="microseconds"),
        "runs": [
            {
                "run_id": run.run_id,
                "timestamp": run.end_time,
                "peak_memory_pct": run.peak,
                "batch_size": run.logical_batch,
                "success": run.outcome in ("ok", "rescued"),
                "notes": run_notes(run),
            }
            for run in record.runs
        ],
    }


def run_notes(run: Observation) -> str:
    """What is worth knowing of a run beside its figures, in words; empty where nothing is."""
    notes = [] if run.outcome in ("ok", "rescued") else [run.outcome.replace("oom", "out of memory")]
    if run.ooms_rescued:
        notes.append(f"{run.ooms_rescued} out-of-memory rescued")
    if run.foreign_bytes:
        notes.append(f"other processes took {run.foreign_bytes / 2**20:.0f} MiB")
    return "; ".join(notes)
