"""The learned safety factors: which observations count for a configuration on a kind of device, in which order, and
what the policy makes of them. Nothing here is stored but observations; the export is remade from them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Final

from can_train.errors import ConfigError, StateError, unknown_name
from can_train.policy.factors import FactorPoint, FactorPolicy
from can_train.policy.policies import POLICIES, make_policy
from can_train.state.atomic import write_json_atomic
from can_train.state.folders import state_folder
from can_train.state.observations import Observation, read_observations

EXPORT_NAME: Final = "batch_size_factors.json"

_TEACHING: Final = ("ok", "rescued", "interrupted")
"""Outcomes whose peak is believed: an attempt that was interrupted had measured real steps, one that failed may have
failed at anything."""

_SETTLED_RUNS: Final = 5
"""Runs before a factor can have converged, and runs whose factors its variance is taken over."""

_IN_BAND_RUNS: Final = 3
"""Last runs whose peaks must lie in the band."""

_BAND: Final = 0.05
"""Distance of a peak from the target that counts as in band: within it the momentum rule only makes its small steps."""

_LOWERED: Final = 0.01
"""Distance of the aim from the target that is worth a word."""

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
class Elsewhere:
    """What another device taught of a configuration."""

    ratio: float
    runs: int
    device: str


@dataclass(frozen=True)
class Known:
    """What is known of a configuration on a device."""

    choice: FactorChoice | None
    target: float
    aim: float
    elsewhere: Elsewhere | None


@dataclass(frozen=True)
class FactorRecord:
    """All that is known of one configuration on one kind of device.

    Attributes:
        key: Configuration key.
        device: Kind of device.
        factor: Factor of the next run.
        target: Peak that the user wants.
        aim: Peak that the policy goes for: less than the target where that is too great a risk.
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
    target: float
    aim: float
    reason: str
    runs: tuple[Observation, ...]
    peaks: tuple[float, ...]
    ooms: int
    factor_variance: float
    converged: bool

    @property
    def mean_peak(self) -> float | None:
        """Mean peak ÷ capacity; None where nothing was measured."""
        return fmean(self.peaks) if self.peaks else None

    @property
    def max_peak(self) -> float | None:
        """Largest peak ÷ capacity; None where nothing was measured."""
        return max(self.peaks, default=None)

    @property
    def last_peak(self) -> float | None:
        """Latest peak ÷ capacity; None where nothing was measured."""
        return self.peaks[-1] if self.peaks else None


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
        return records_of(read_observations(self.state).finished, self.policy)

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
            "avg_memory_pct": record.mean_peak,
            "max_memory_pct": record.max_peak,
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
                return FactorChoice(record.factor, _learned(record))
        return prior

    def known(self, key: str, device: str, fingerprint: Mapping[str, Any] = {}) -> Known:
        for record in self.records():
            if (record.key, record.device) == (key, device) and history_of(record.runs):
                return Known(FactorChoice(record.factor, _learned(record)), record.target, record.aim, None)
        return Known(None, 0.9, 0.9, None)

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


def get_safety_factor_db(state_dir: str | Path | None = None, *, policy: FactorPolicy | None = None) -> FactorStore:
    """Opens the learned factors.

    Args:
        state_dir: State folder; None finds the user's own (`can_train.state.folders.state_folder`).
        policy: How observations become the next factor; None: as each configuration's latest run had it.
    """
    return FactorStore(state_folder(None if state_dir is None else Path(state_dir)), policy)


def find_record(records: Sequence[FactorRecord], key: str, device: str | None = None) -> FactorRecord:
    """Finds a configuration on a device, or on the one seen last.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    found = find_records(records, key, device)
    return max(found, key=lambda record: record.runs[-1].ended)


def find_records(records: Sequence[FactorRecord], key: str | None, device: str | None = None) -> list[FactorRecord]:
    """Finds a configuration on every device. A key without its size is understood where only one size is known.

    Args:
        records: Where to look.
        key: Configuration key; None means all of them.
        device: Kind of device; None means all of them.

    Raises:
        ConfigError: There is none, or there are several sizes; the message lists those there are.
    """
    if not records:
        raise ConfigError("Nothing has been learned yet", value=key or "", remedy="Train first: every run teaches")
    known = {record.key for record in records}
    keys = known if key is None else {key} & known or {r.key for r in records if r.runs[-1].key_without_size == key}
    if key is not None and len(keys) > 1:
        raise ConfigError("Several sizes were trained, so the key must name one", value=key, remedy=_listed(keys))
    if key is not None and not keys:
        raise unknown_name("configuration key", key, known)
    found = [record for record in records if record.key in keys]
    devices = {record.device for record in found}
    if device is not None and device not in devices:
        raise unknown_name("device", device, devices)
    return [record for record in found if device in (None, record.device)]


def records_of(observations: Sequence[Observation], policy: FactorPolicy | None = None) -> list[FactorRecord]:
    """Groups observations by key and device and learns from each group.

    Args:
        observations: By the time their attempts began.
        policy: How observations become the next factor; None: as each group's latest run had it.
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
    lessons = _lessons(runs)
    starts = [lesson.started for lesson in lessons]
    points = []
    for run in runs:
        # Lessons do not overlap one another: the last that began before the run ended is also the last of those to end.
        begun = bisect_left(starts, run.ended)
        lesson = lessons[begun - 1] if begun else None
        if run is lesson:
            points.append(FactorPoint(used=run.used or run.factor, peak=None))
        elif lesson is None or run.started >= lesson.ended:
            points += _success(run)
    return points


def _lessons(runs: Sequence[Observation]) -> list[Observation]:
    """The runs whose out-of-memory counts: of several that overlap, the one that began first."""
    lessons: list[Observation] = []
    for run in runs:
        if run.ran_out_of_memory and (not lessons or run.started >= lessons[-1].ended):
            lessons.append(run)
    return lessons


def _success(run: Observation) -> list[FactorPoint]:
    if run.outcome not in _TEACHING or run.ran_out_of_memory or run.used is None or run.peak is None:
        return []
    return [FactorPoint(used=run.used, peak=run.peak)]


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


def _record(key: str, device: str, runs: tuple[Observation, ...], given: FactorPolicy | None) -> FactorRecord:
    policy = policy_of(runs[-1]) if given is None else given
    history, first = history_of(runs), runs[0].factor
    aim = policy.aim(history, first=first)
    peaks = tuple(run.peak for run in runs if run.peak is not None)
    variance = pvariance([run.factor for run in runs[-_SETTLED_RUNS:]])
    in_band = [not run.ran_out_of_memory and _in_band(run, aim) for run in runs[-_IN_BAND_RUNS:]]
    return FactorRecord(
        key=key,
        device=device,
        factor=policy.next_factor(history, first=first),
        target=policy.target,
        aim=aim,
        reason=runs[0].factor_reason,
        runs=runs,
        peaks=peaks,
        ooms=sum(run.ran_out_of_memory for run in runs),
        factor_variance=variance,
        converged=len(runs) >= _SETTLED_RUNS and all(in_band) and variance < _SETTLED_VARIANCE,
    )


def policy_of(run: Observation) -> FactorPolicy:
    """The policy that a run was set to; of one that says nothing, or names one that is not known here, the default."""
    name, options = str(run.policy.get("name")), run.policy.get("options")
    numbers = {k: v for k, v in options.items() if isinstance(v, float)} if isinstance(options, dict) else {}
    return make_policy(name if name in POLICIES else next(iter(POLICIES)), numbers)


def _learned(record: FactorRecord) -> str:
    count = len(record.runs)
    said = f"learned from {count} run{'s' if count > 1 else ''}"
    if record.aim > record.target - _LOWERED:
        return said
    return f"{said}; aims at {record.aim:.0%} instead of {record.target:.0%}: the next peak is not known well enough"


def _in_band(run: Observation, target: float) -> bool:
    return run.peak is not None and abs(run.peak - target) <= _BAND


def _listed(keys: Iterable[str]) -> str:
    return f"Valid: {', '.join(sorted(keys))}"


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
