"""Summaries of each configuration on each kind of device: pure functions of observations and events."""

import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from math import fsum
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from can_train import __version__
from can_train.config.task_settings import installed_sizes
from can_train.errors import ConfigError, unknown_name
from can_train.factors.observations import ANY_DEVICE, ActiveEvents, Event, Imported, Observation, Records, without_size
from can_train.factors.policies import MOST_SHARE, POLICIES, AimLimit, FactorPoint, FactorPolicy, make_policy
from can_train.fit.factor_rule import UNUSED
from can_train.io.index import INDEX_FROM, index_folder, recall, remember
from can_train.memory.catalogue import CARDS, DEVICE_KEY, cards_named

# Outcomes whose peak counts. An interrupted attempt has measured real steps; a failed one may have failed at anything.
LEARNABLE_OUTCOMES: Final = ("ok", "rescued", "interrupted")


def history_of(runs: Sequence[Observation]) -> list[FactorPoint]:
    """Returns the points that runs add to the history, oldest first.

    An out-of-memory excludes every run that overlaps it in time: those began before its factor was corrected, so their
    success at the old factor must not undo the correction, nor their failure repeat it. Runs without a search, or that
    ended by an error or before a peak was measured, or that leaked memory, add nothing; nor do peaks that no device
    can have.

    Args:
        runs: One configuration's runs on one kind of device, by the time their attempts began.
    """
    # Of several out-of-memories that overlap, the one that began first counts.
    ooms: list[Observation] = []
    # The ranks of an attempt train one run: the one whose memory peaked highest counts. An out-of-memory counts on any.
    highest: dict[tuple[str, int], Observation] = {}
    for run in runs:
        if run.teaches_out_of_memory and (not ooms or run.started >= ooms[-1].ended):
            ooms.append(run)
        if (run.peak or 0.0) > (highest.setdefault((run.run_id, run.attempt), run).peak or 0.0):
            highest[run.run_id, run.attempt] = run
    starts, counted, points = [oom.started for oom in ooms], {id(oom) for oom in ooms}, []
    for run in runs:
        if id(run) in counted:
            points.append(FactorPoint(run.oom_used or run.used or run.factor, None, _after_rescue(run)))
        elif not run.teaches_out_of_memory and highest[run.run_id, run.attempt] is run:
            # The counted ones do not overlap: of those that began before this run ended, the last also ended last.
            begun = bisect_left(starts, run.ended)
            overlaps = begun > 0 and run.started < ooms[begun - 1].ended
            is_usable = run.outcome in LEARNABLE_OUTCOMES and not (overlaps or run.leaked_bytes)
            peak = _believed(run.peak)
            if is_usable and run.used is not None and peak is not None:
                points.append(FactorPoint(run.used, peak, reserved=_believed(run.reserved)))
    return points


def _after_rescue(run: Observation) -> tuple[float, float] | None:
    """Returns the used share and the peak after a run's last out-of-memory; None where they were not measured."""
    if run.used_after_rescue is None or run.peak_bytes_after_rescue is None:
        return None
    peak = _believed(run.peak_bytes_after_rescue / run.capacity_bytes)
    return None if peak is None else (run.used_after_rescue, peak)


def _believed(share: float | None) -> float | None:
    """Returns a share of the capacity; None where it is too large to be one. A damaged record may name any bytes."""
    return share if share is not None and share <= MOST_SHARE else None


_CONVERGED_RUNS: Final = 5  # runs before a factor can have converged, and last runs whose factors' variance is taken
_CONVERGED_VARIANCE: Final = 0.01  # variance of those factors below which the factor may have converged
_CONVERGED_INTERVAL: Final = 0.02  # half-width of the factor's interval ÷ the factor, below which it may have converged
_IN_BAND_RUNS: Final = 3  # last runs whose peaks must lie in the band
# Distance of a peak from the aim, ÷ capacity, that is in band: there the momentum rule makes only its small steps.
_BAND: Final = 0.05
_LOWERED: Final = 0.01  # an aim further than this below the target, ÷ capacity, is given with its reason
# Options of a policy that are taken from observations: those that users set, all of them shares.
_POLICY_OPTIONS: Final = ("target", "momentum", "oom_cut", "minimum", "maximum")
_DEFAULT_POLICY: Final = next(iter(POLICIES))
# The part of a fingerprint that does not separate runs: memory drifts slowly with versions, and a policy forgets.
TORCH_VERSION: Final = "torch_version"

_AIM_REASONS: Final[Mapping[AimLimit, str]] = {
    "target": "",
    "noise": "the next peak is not known well enough",
    "ceiling": "memory ran out below the capacity",
    "reserved": "part of the memory that PyTorch reserves is not in use",
    "maximum": "the factor is at its largest value",
}

# `pinned` by hand; `learned` from runs; `imported`, nothing learned since; `first`, nothing learned yet; `reset`, no
# run since.
State = Literal["pinned", "learned", "imported", "first", "reset"]


@dataclass(frozen=True, kw_only=True)
class NextFactor:
    """The factor of the next run of a configuration on one kind of device. Peaks are shares of the capacity."""

    key: str  # configuration key
    device: str  # kind of device, or ANY_DEVICE
    state: State
    # Factor of the next run; None where its plan decides: after a reset, or where no run has had a factor.
    factor: float | None
    learned_factor: float | None  # factor that would hold without the pin
    interval: float | None  # half-width of its 95 % interval; None where nothing was learned
    target: float  # peak that the user wants
    aim: float  # peak that the policy works towards, at most the target
    aim_reason: str  # why it is less; empty where it is not
    initial_reason: str  # where the first run's factor came from
    reason: str  # where the next run's factor comes from


@dataclass(frozen=True, kw_only=True)
class FactorFigures(NextFactor):
    """The figures of a summary without its runs: fields as in `FactorSummary`, and numbers of runs."""

    size: str
    runs: int
    runs_before_reset: int
    runs_with_other_settings: int
    imported_runs: int
    mean_peak: float | None
    max_peak: float | None
    last_peak: float | None
    ooms: int
    factor_variance: float
    converged: bool

    @property
    def has_runs(self) -> bool:
        """Whether there is a run, learned from or not."""
        return self.runs + self.runs_before_reset > 0


@dataclass(frozen=True, kw_only=True)
class FactorSummary(NextFactor):
    """A configuration on one kind of device, with its last run's settings."""

    fingerprint: Mapping[str, Any]  # the settings that change memory; other settings are summarized apart
    updated: datetime  # when the last run ended; without runs, when the last event was
    runs: tuple[Observation, ...]  # since the last reset or import, oldest first
    runs_before_reset: tuple[Observation, ...]  # not learned from
    imported: Imported | None  # entry of an imported file, which holds until the next reset
    other_settings: tuple["FactorSummary", ...] = ()  # the same configuration and device, oldest first

    @property
    def imported_runs(self) -> tuple[Mapping[str, Any], ...]:
        """The runs that an import brought along, without those that happened here."""
        here = {(run.run_id, run.end_time) for run in self.all_runs}
        runs = self.imported.runs if self.imported else ()
        return tuple(run for run in runs if (run.get("run_id"), run.get("timestamp")) not in here)

    @property
    def all_runs(self) -> tuple[Observation, ...]:
        """Every run, oldest first."""
        return self.runs_before_reset + self.runs

    @property
    def has_runs(self) -> bool:
        """Whether there is a run, learned from or not."""
        return bool(self.all_runs)

    @property
    def size(self) -> str:
        """The model's size in the key; empty where it has none."""
        return _size_in(self.key, self.all_runs)

    @property
    def figures(self) -> FactorFigures:
        """All but the runs."""
        values: dict[str, Any] = {
            "runs": len(self.runs),
            "runs_before_reset": len(self.runs_before_reset),
            "runs_with_other_settings": sum(len(summary.all_runs) for summary in self.other_settings),
            "imported_runs": len(self.imported_runs),
        }
        names = [field.name for field in fields(FactorFigures) if field.name not in values]
        return FactorFigures(**{name: getattr(self, name) for name in names}, **values)

    @property
    def num_runs(self) -> int:
        """Number of runs since the last reset, imported runs included."""
        return len(self.runs) + len(self.imported_runs)

    @property
    def peaks(self) -> tuple[float, ...]:
        """Peaks of the runs that measured one, oldest first."""
        peaks = (*self._imported("peak_memory_pct"), *(run.peak for run in self.runs))
        return tuple(peak for peak in peaks if peak is not None)

    def _imported(self, name: str) -> list[float]:
        # Other programs write files, too.
        values = [run.get(name) for run in self.imported_runs]
        return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]

    @property
    def mean_peak(self) -> float | None:
        """Mean peak; None where nothing was measured."""
        return fsum(self.peaks) / len(self.peaks) if self.peaks else None

    @property
    def max_peak(self) -> float | None:
        """Largest peak; None where nothing was measured."""
        return max(self.peaks, default=None)

    @property
    def last_peak(self) -> float | None:
        """Latest peak; None where nothing was measured."""
        return self.peaks[-1] if self.peaks else None

    @property
    def ooms(self) -> int:
        """Number of runs that ran out of memory."""
        return sum(run.ran_out_of_memory for run in self.runs)

    @property
    def factor_variance(self) -> float:
        """Variance of the last runs' factors."""
        if not self.runs and self.imported and self.imported.factor_variance is not None:
            return self.imported.factor_variance
        # Not the statistics module, whose import takes a tenth of the command line's start.
        last = [*self._imported("safety_factor"), *(run.factor for run in self.runs)][-_CONVERGED_RUNS:]
        mean = fsum(last) / max(len(last), 1)
        return fsum((factor - mean) ** 2 for factor in last) / max(len(last), 1)

    @property
    def converged(self) -> bool:
        """Whether the last peaks lie near the aim, at a factor that hardly moves and is well known. For imported
        runs, the file decides where it has an entry for it.
        """
        if self.runs or not self.imported:
            aim, num_runs = self.aim, len(self.runs)
            last = [(run.peak, not (run.teaches_out_of_memory or run.outcome == "oom"))
                    for run in self.runs[-_IN_BAND_RUNS:]]  # fmt: skip
            if self.learned_factor is None or self.interval is None:
                return False
            if self.interval >= _CONVERGED_INTERVAL * self.learned_factor:
                return False
        elif self.imported.converged is not None:
            return self.imported.converged
        else:
            aim, num_runs = self.target, self.num_runs
            fitted = (run.get("success") is not False for run in self.imported_runs[-_IN_BAND_RUNS:])
            last = list(zip(self._imported("peak_memory_pct")[-_IN_BAND_RUNS:], fitted, strict=False))
        in_band = [peak is not None and fits and abs(peak - aim) <= _BAND for peak, fits in last]
        is_steady = num_runs >= _CONVERGED_RUNS and self.factor_variance < _CONVERGED_VARIANCE
        return is_steady and len(in_band) == _IN_BAND_RUNS and all(in_band)

    @property
    def last_seen(self) -> tuple[bool, datetime]:
        """Sorts summaries by time; summaries without a run, set by an import or a pin alone, come first."""
        return bool(self.all_runs), self.updated


def summarize(
    observations: Iterable[Observation], events: Sequence[Event] = (), policy: FactorPolicy | None = None
) -> list[FactorSummary]:
    """Summarizes every configuration on every kind of device, by key, then by device.

    Args:
        observations: By the time their attempts began.
        events: By their time.
        policy: How runs become the next factor; None means as each configuration's latest run had it.
    """
    groups: defaultdict[tuple[str, str], list[Observation]] = defaultdict(list)
    for observation in observations:
        groups[observation.key, observation.device.key].append(observation)
    for event in events:
        # A pin and an import give a factor without any run.
        pinned = [(event.key, event.device or ANY_DEVICE)] if event.kind == "pin" and event.key is not None else []
        for name in pinned + [(key, device) for key, devices in event.entries.items() for device in devices]:
            groups.setdefault(name, [])
    summaries = []
    for (key, device), runs in sorted(groups.items(), key=lambda group: group[0]):
        active = ActiveEvents.of(events, key, device, _size_in(key, runs))
        variants = [summarize_runs((key, device), variant, active, policy) for variant in by_settings(runs) or [[]]]
        if runs or variants[-1].factor is not None:
            summaries.append(replace(variants[-1], other_settings=tuple(variants[:-1])))
    return summaries


def summarize_runs(
    name: tuple[str, str], all_runs: Sequence[Observation], active: ActiveEvents, policy: FactorPolicy | None
) -> FactorSummary:
    """Summarizes one configuration on one kind of device with one set of settings.

    Args:
        name: Configuration key and kind of device.
        all_runs: Its runs, by the time their attempts began; may be empty.
        active: The events in force.
        policy: How runs become the next factor; None means as the latest run had it.
    """
    policy = policy or (policy_of(all_runs[-1]) if all_runs else make_policy(_DEFAULT_POLICY, {}))
    cutoff = active.cutoff
    runs = tuple(filter(active.learn_from, all_runs))
    history = history_of(runs)
    imported = active.imported
    if imported:
        first: float | None = imported.safety_factor
    else:
        # Learning starts from the first factor that a run applied, else from the first that a run would have applied.
        decided = [run.factor for run in runs if run.factor_reason != UNUSED.reason]
        first = next((run.factor for run in runs if run.tuned_limit is not None), next(iter(decided), None))
    # The latest run's predictions are the policy's prior.
    for run in reversed(runs):
        if run.predicted_base_bytes is not None and run.predicted_full_bytes is not None:
            capacity = run.capacity_bytes
            policy = policy.with_prior(run.predicted_base_bytes / capacity, run.predicted_full_bytes / capacity)
            break
    decision = None if first is None else policy.decide(history, first=first)
    # An import holds as it is, outside the policy's bounds too, until a run adds to the history.
    learned = first if decision is None or (imported and not history) else decision.factor
    interval = decision.interval if history and decision else None
    aim, limited_by = (decision.aim, decision.limited_by) if decision else (policy.target, "target")
    reasons = [run.factor_reason for run in runs]
    initial_reason = next((reason for reason in reasons if reason != UNUSED.reason), next(iter(reasons), ""))
    if imported and cutoff:
        reason = f": {imported.initial_factor_reason}" if imported.initial_factor_reason else ""
        initial_reason = f"imported from {cutoff.source}{reason}"
    elif cutoff and not runs:
        initial_reason = f"reset on {cutoff.moment:%Y-%m-%d}; the next run is a first one"
    times = [run.ended for run in all_runs] or [event.moment for event in (active.pin, cutoff) if event]
    summary = FactorSummary(
        key=name[0],
        device=name[1],
        fingerprint=separating(all_runs[-1].fingerprint) if all_runs else {},
        state="learned" if history else "imported" if imported else "first" if runs else "reset",
        factor=learned,
        learned_factor=learned,
        interval=interval,
        target=policy.target,
        aim=aim,
        aim_reason=_AIM_REASONS[limited_by] if aim < policy.target - _LOWERED else "",
        initial_reason=initial_reason,
        reason=f"learned from {len(history)} run{'s' if len(history) > 1 else ''}" if history else initial_reason,
        updated=max(times, default=datetime.fromtimestamp(0, UTC)),
        runs=runs,
        runs_before_reset=tuple(all_runs[: len(all_runs) - len(runs)]),
        imported=imported,
    )
    if (pin := active.pin) is None:
        return summary
    reason = f"pinned at {pin.value:g} by hand on {pin.moment:%Y-%m-%d}"
    # Without runs or an import, the export gives the pin as the reason.
    initial_reason = reason if summary.state == "reset" else initial_reason
    return replace(summary, state="pinned", factor=pin.value, initial_reason=initial_reason, reason=reason)


def by_settings(runs: Iterable[Observation]) -> list[list[Observation]]:
    """Groups runs by the settings that change memory; the group that was seen last comes last."""
    groups: list[tuple[dict[str, Any], list[Observation]]] = []
    for run in runs:
        settings = separating(run.fingerprint)
        # From the end, since most runs have the settings of the run before. Settings are dicts, which do not hash.
        same = next((index for index in range(len(groups) - 1, -1, -1) if groups[index][0] == settings), None)
        group = (settings, []) if same is None else groups.pop(same)
        group[1].append(run)
        groups.append(group)
    return [group for _, group in groups]


_Summary = TypeVar("_Summary", FactorSummary, FactorFigures)


def find_summaries(summaries: Sequence[_Summary], key: str | None, device: str | None = None) -> list[_Summary]:
    """Finds a configuration on every kind of device.

    A key without its size is understood where one size only was trained. For a key whose size has no summary, an import
    of the key without its size is returned.

    Args:
        summaries: Where to look.
        key: Configuration key; None means all of them.
        device: Kind of device, or a name of several (`devices_named`); None means all of them.

    Raises:
        ConfigError: There is no such configuration, or it has several sizes; the message lists the keys.
    """
    if not summaries:
        raise ConfigError("Nothing has been learned yet", value=key or "", remedy="Train first: every run teaches")
    groups, devices = [{summary.key for summary in summaries}], set[str]()
    if key is not None:
        sizes = {summary.size for summary in summaries if summary.has_runs} | installed_sizes()
        general = {without_size(key, size) for size in sizes} & groups[0] - {key}
        groups = [keys_like(summaries, key) if general else full_keys(summaries, key), general]
    for keys in groups:
        candidates = [summary for summary in summaries if summary.key in keys]
        present = {summary.device for summary in candidates}
        wanted = present if device is None else _devices_meant(device, present)
        if wanted:
            return [summary for summary in candidates if summary.device in wanted]
        devices |= present
    raise unknown_name("device", device or "", devices)


def _devices_meant(name: str, present: Collection[str]) -> set[str]:
    """Returns the devices of a configuration that a name means; empty where no device has the name."""
    try:
        named = {*present}.intersection(devices_named(name, present))
    except ConfigError:
        return set()
    return named or {*present} & {ANY_DEVICE}


def devices_named(name: str, accepted: Collection[str] = ()) -> list[str]:
    """Returns the kinds of device that a name means: the device of this name, else the GPUs of a short name (`v100`),
    one for each memory size.

    Args:
        name: As a person writes it.
        accepted: Kinds of device whose names are accepted as they are.

    Raises:
        ConfigError: No device has this name; the message lists the nearest names.
    """
    if name in accepted:
        return [name]
    if cards := cards_named(name):
        return [card.key for card in cards]
    if not DEVICE_KEY.fullmatch(name):
        raise unknown_name("device", name, {card.key for card in CARDS} | {*accepted} - {ANY_DEVICE})
    return [name]


def full_keys(summaries: Sequence[FactorSummary | FactorFigures], key: str) -> set[str]:
    """Returns the keys of `keys_like`; raises ConfigError, which lists keys, where there is no such key or it may mean
    several sizes.
    """
    keys = keys_like(summaries, key)
    if len(keys) > 1 and key not in keys:
        listed = f"Valid: {', '.join(sorted(keys))}"
        raise ConfigError("Several sizes were trained, so the key must name one", value=key, remedy=listed)
    if not keys:
        raise unknown_name("configuration key", key, {summary.key for summary in summaries})
    return keys


def keys_like(summaries: Sequence[FactorSummary | FactorFigures], key: str) -> set[str]:
    """Returns the keys that a key may mean: the key itself, and keys that equal it without their size. A key that has
    a summary means no key with a size where there are several.
    """
    sized = {summary.key for summary in summaries if without_size(summary.key, summary.size) == key} - {key}
    if key not in {summary.key for summary in summaries}:
        return sized
    return {key} | (sized if len(sized) == 1 else set())


def _size_in(key: str, runs: Sequence[Observation]) -> str:
    """Returns the model's size in a key: its last run's. A key without runs may have the size of an installed task."""
    if runs:
        return runs[-1].size
    return next((size for size in sorted(installed_sizes()) if without_size(key, size) != key), "")


def policy_of(run: Observation, name: str | None = None) -> FactorPolicy:
    """Returns the policy that a run was set to, with its options; the default policy where there is none of its name.

    Args:
        run: The run.
        name: Another policy's name; None means the run's policy.
    """
    wanted, given = name or str(run.policy.get("name")), run.policy.get("options")
    options = given if isinstance(given, dict) else {}
    floats = {option: share for option in _POLICY_OPTIONS if isinstance(share := options.get(option), float)}
    # Options that a hand or another program wrote must not divide by zero. Only a cut may be 0.
    shares = {k: share for k, share in floats.items() if 0 < share <= 1 or (k == "oom_cut" and share == 0)}
    if shares.get("minimum", FactorPolicy.minimum) > shares.get("maximum", FactorPolicy.maximum):
        shares = {option: share for option, share in shares.items() if option not in ("minimum", "maximum")}
    return make_policy(wanted if wanted in POLICIES else _DEFAULT_POLICY, shares)


def separating(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a fingerprint that runs are learned apart by."""
    return {name: value for name, value in fingerprint.items() if name != TORCH_VERSION}


class _RememberedFigures(msgspec.Struct):
    """The figures of every configuration, so that its runs need not be read again; may be deleted at any time."""

    made_by: str  # the version, and the events in force
    keys: dict[str, tuple[int, list[FactorFigures]]]  # each with the digest of its observations


def read_figures(state: Path, records: Records, *, remember_from: int = INDEX_FROM) -> list[FactorFigures]:
    """Returns the figures of every configuration on every kind of device, by key, then by device.

    Args:
        state: The state folder.
        records: Its records.
        remember_from: Least number of runs whose summary is worth remembering.
    """
    path, made_by = index_folder(state) / "figures", _made_by(records)
    earlier = recall(path, _RememberedFigures)
    remembered = earlier.keys if earlier is not None and earlier.made_by == made_by else {}
    valid = {key: figures for key, (digest, figures) in remembered.items() if records.keys.get(key) == digest}
    runs = records.of_keys(records.keys.keys() - valid.keys())
    by_key: dict[str, list[FactorFigures]] = {}
    for summary in summarize(runs, records.events):
        # Events alone make figures of the keys that they name; remembered figures, with runs, replace them below.
        by_key.setdefault(summary.key, []).append(summary.figures)
    by_key |= valid
    if len(runs) >= remember_from:
        keys = {key: (digest, by_key[key]) for key, digest in records.keys.items()}
        remember(path, _RememberedFigures(made_by, keys))
    return [figures for key in sorted(by_key) for figures in by_key[key]]


def _made_by(records: Records) -> str:
    # The arithmetic may change without the version while someone works on it.
    changed = max(path.stat().st_mtime_ns for path in Path(__file__).parent.glob("*.py"))
    return f"{__version__} {changed} {zlib.crc32(repr(records.events).encode(errors='replace'))}"
