"""What is known of each configuration on each kind of device."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import fsum
from typing import Any, Final, Literal

from can_train.errors import ConfigError, unknown_name
from can_train.factors.events import ANY_DEVICE, Event, Imported, Standing, standing
from can_train.factors.observations import Observation
from can_train.factors.policies import POLICIES, FactorPoint, FactorPolicy, Holds, make_policy

LEARNABLE_OUTCOMES: Final = ("ok", "rescued", "interrupted")
"""Outcomes whose peak is believed: an attempt that was interrupted had measured real steps, one that failed may have
failed at anything."""


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
    identities = {id(lesson) for lesson in lessons}
    points = []
    for run in _once_an_attempt(runs):
        if id(run) in identities:
            points.append(_lesson(run))
            continue
        # Lessons do not overlap one another: the last that began before the run ended is also the last of those to end.
        begun = bisect_left(starts, run.ended)
        if not begun or run.started >= lessons[begun - 1].ended:
            points += _success(run)
    return points


def _once_an_attempt(runs: Sequence[Observation]) -> list[Observation]:
    """Leaves out the ranks of an attempt whose memory peaked lower than another one's: they trained one run together,
    which says one thing. An out-of-memory counts on any of them.
    """
    highest: dict[tuple[str, int], Observation] = {}
    for run in runs:
        before = highest.setdefault((run.run_id, run.attempt), run)
        if (run.peak or 0.0) > (before.peak or 0.0):
            highest[run.run_id, run.attempt] = run
    return [run for run in runs if run.teaches_out_of_memory or highest[run.run_id, run.attempt] is run]


def _lessons(runs: Sequence[Observation]) -> list[Observation]:
    """The runs whose out-of-memory counts: of several that overlap, the one that began first."""
    lessons: list[Observation] = []
    for run in runs:
        if run.teaches_out_of_memory and (not lessons or run.started >= lessons[-1].ended):
            lessons.append(run)
    return lessons


def _lesson(run: Observation) -> FactorPoint:
    settled = None
    if run.used_after_rescue is not None and run.peak_bytes_after_rescue is not None:
        settled = (run.used_after_rescue, run.peak_bytes_after_rescue / run.capacity_bytes)
    return FactorPoint(used=run.oom_used or run.used or run.factor, peak=None, settled=settled)


def _success(run: Observation) -> list[FactorPoint]:
    if run.outcome not in LEARNABLE_OUTCOMES or run.teaches_out_of_memory or run.used is None or run.peak is None:
        return []
    return [FactorPoint(used=run.used, peak=run.peak)]


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


_SETTLED_INTERVAL: Final = 0.02
"""Half-width of the factor's interval ÷ the factor, below which it counts as known."""


_POLICY_OPTIONS: Final = ("target", "momentum", "oom_cut", "minimum", "maximum")
"""Options of a policy that are taken from observations: those that users set, all of them shares."""


_DEFAULT_POLICY: Final = next(iter(POLICIES))


TORCH_VERSION: Final = "torch_version"
"""The part of a fingerprint that is recorded and makes no difference: memory laws drift slowly with versions, and a
policy forgets."""


_AIM_REASONS: Final[Mapping[Holds, str]] = {
    "target": "",
    "noise": "the next peak is not known well enough",
    "ceiling": "memory ran out below the capacity",
    "maximum": "the largest factor leads no further",
}


State = Literal["pinned", "learned", "imported", "first", "reset"]


@dataclass(frozen=True)
class FactorSummary:
    """All that is known of one configuration on one kind of device, of the settings that were seen last.

    Attributes:
        key: Configuration key.
        device: Kind of device; `ANY_DEVICE` for all those without a record of their own.
        fingerprint: The settings that change memory; runs of other settings obey another memory law.
        state: `pinned` by hand; `learned` from runs; `imported`, nothing learned since; `first`, nothing learned yet;
            `reset`, no run since.
        factor: Factor of the next run; None after a reset, when it is a first run again.
        learned: The same without the pin.
        interval: Half-width of the 95 % interval of `learned`; None where nothing was learned.
        target: Peak that the user wants.
        aim: Peak that the policy goes for: less than the target where that cannot or must not be reached.
        aim_reason: Why it is less, in words; empty where it is not.
        reason: Where the first run's factor came from, in words.
        why: Where the next run's factor comes from, in words.
        updated: When the last run ended, or else the last event was.
        runs: Runs since the last reset or import, oldest first.
        forgotten: Runs that began before it: they teach nothing.
        factor_variance: Variance of the last runs' factors.
        converged: Whether peaks and factors have settled.
        others: The same configuration and device with other settings, oldest first.
    """

    key: str
    device: str
    fingerprint: Mapping[str, Any]
    state: State
    factor: float | None
    learned: float | None
    interval: float | None
    target: float
    aim: float
    aim_reason: str
    reason: str
    why: str
    updated: datetime
    runs: tuple[Observation, ...]
    forgotten: tuple[Observation, ...]
    factor_variance: float
    converged: bool
    others: tuple["FactorSummary", ...] = ()

    @property
    def peaks(self) -> tuple[float, ...]:
        """Peak ÷ capacity of the runs that measured one, oldest first."""
        return tuple(run.peak for run in self.runs if run.peak is not None)

    @property
    def ooms(self) -> int:
        """Runs in which memory ran out."""
        return sum(run.ran_out_of_memory for run in self.runs)

    @property
    def mean_peak(self) -> float | None:
        """Mean peak ÷ capacity; None where nothing was measured."""
        return fsum(self.peaks) / len(self.peaks) if self.peaks else None

    @property
    def max_peak(self) -> float | None:
        """Largest peak ÷ capacity; None where nothing was measured."""
        return max(self.peaks, default=None)

    @property
    def last_peak(self) -> float | None:
        """Latest peak ÷ capacity; None where nothing was measured."""
        return self.peaks[-1] if self.peaks else None

    @property
    def last_seen(self) -> tuple[bool, datetime]:
        """Orders records: those with runs of their own after those that only a file or a hand has set."""
        return bool(self.runs or self.forgotten), self.updated


def records_of(
    observations: Iterable[Observation], events: Sequence[Event] = (), policy: FactorPolicy | None = None
) -> list[FactorSummary]:
    """Makes the records, by key, then by device.

    Args:
        observations: By the time their attempts began.
        events: By their time.
        policy: How runs become the next factor; None: as each configuration's latest run had it.
    """
    groups: defaultdict[tuple[str, str], list[Observation]] = defaultdict(list)
    for observation in observations:
        groups[observation.key, observation.device.key].append(observation)
    for event in events:
        for name in event.named():
            groups.setdefault(name, [])
    records = []
    for (key, device), runs in sorted(groups.items(), key=lambda group: group[0]):
        in_force = standing(events, key, device)
        variants = [record_of((key, device), variant, in_force, policy) for variant in variants_of(runs) or [[]]]
        if runs or variants[-1].factor is not None:
            records.append(replace(variants[-1], others=tuple(variants[:-1])))
    return records


def record_of(
    name: tuple[str, str], all_runs: Sequence[Observation], in_force: Standing, given: FactorPolicy | None
) -> FactorSummary:
    """Makes the record of one configuration on one device with one set of settings.

    Args:
        name: Configuration key and kind of device.
        all_runs: Its runs, by the time their attempts began; may be empty.
        in_force: What a person decided.
        given: How runs become the next factor; None: as the latest run had it.
    """
    policy = given or (policy_of(all_runs[-1]) if all_runs else make_policy(_DEFAULT_POLICY, {}))
    runs = tuple(run for run in all_runs if in_force.since is None or run.started >= in_force.since.moment)
    history, imported = history_of(runs), _imported(in_force, name)
    first = imported.safety_factor if imported else _first_factor(runs)
    decision = None if first is None else _informed(policy, runs).decide(history, first=first)
    learned = first if decision is None or (imported and not history) else decision.factor
    interval = decision.interval if history and decision else None
    aim, holds = (decision.aim, decision.holds) if decision else (policy.target, "target")
    variance = _variance([run.factor for run in runs[-_SETTLED_RUNS:]])
    state: State = "learned" if history else "imported" if imported else "first" if runs else "reset"
    record = FactorSummary(
        key=name[0],
        device=name[1],
        fingerprint=_without_torch(all_runs[-1].fingerprint) if all_runs else {},
        state=state,
        factor=learned,
        learned=learned,
        interval=interval,
        target=policy.target,
        aim=aim,
        reason=_first_reason(in_force, imported, runs),
        aim_reason=_AIM_REASONS[holds] if aim < policy.target - _LOWERED else "",
        why=f"learned from {len(history)} run{'s' if len(history) > 1 else ''}" if history else "",
        updated=_updated(all_runs, in_force),
        runs=runs,
        forgotten=tuple(all_runs[: len(all_runs) - len(runs)]),
        factor_variance=variance,
        converged=_settled(runs, aim, variance) and _known(learned, interval),
    )
    return _pinned(replace(record, why=record.why or record.reason), in_force.pin)


def variants_of(runs: Iterable[Observation]) -> list[list[Observation]]:
    """Parts runs by the settings that change memory; the part that was seen last is the last."""
    variants: list[tuple[dict[str, Any], list[Observation]]] = []
    for run in runs:
        fingerprint = _without_torch(run.fingerprint)
        # Runs mostly go on as the last one did.
        found = next((index for index in range(len(variants) - 1, -1, -1) if variants[index][0] == fingerprint), None)
        variant = (fingerprint, []) if found is None else variants.pop(found)
        variant[1].append(run)
        variants.append(variant)
    return [part for _, part in variants]


def variant_like(runs: Iterable[Observation], fingerprint: Mapping[str, Any]) -> list[Observation]:
    """Picks the runs of the same settings.

    Args:
        runs: Where to look.
        fingerprint: The settings that change memory, as plain JSON values.
    """
    wanted = _without_torch(fingerprint)
    return [run for run in runs if _without_torch(run.fingerprint) == wanted]


def find_record(records: Sequence[FactorSummary], key: str, device: str | None = None) -> FactorSummary:
    """Finds a configuration on a device, or on the one seen last.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    return max(find_records(records, key, device), key=lambda record: record.last_seen)


def find_records(records: Sequence[FactorSummary], key: str | None, device: str | None = None) -> list[FactorSummary]:
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
    keys = {record.key for record in records} if key is None else {full_key(records, key)}
    found = [record for record in records if record.key in keys]
    devices = {record.device for record in found}
    if device is not None and device not in devices and ANY_DEVICE in devices:
        device = ANY_DEVICE
    if device is not None and device not in devices:
        raise unknown_name("device", device, devices)
    return [record for record in found if device in (None, record.device)]


def full_key(records: Sequence[FactorSummary], key: str) -> str:
    """Completes a key that was given without its size.

    Raises:
        ConfigError: Nobody knows it, or there are several sizes; the message lists those there are.
    """
    keys = keys_like(records, key)
    if len(keys) > 1:
        listed = f"Valid: {', '.join(sorted(keys))}"
        raise ConfigError("Several sizes were trained, so the key must name one", value=key, remedy=listed)
    if not keys:
        raise unknown_name("configuration key", key, {record.key for record in records})
    return keys.pop()


def keys_like(records: Sequence[FactorSummary], key: str) -> set[str]:
    """The keys that a key may mean: itself, or else those that it is without their size."""
    if any(record.key == key for record in records):
        return {key}
    return {record.key for record in records if any(run.key_without_size == key for run in _all_runs(record)[-1:])}


def policy_of(run: Observation, name: str | None = None) -> FactorPolicy:
    """The policy that a run was set to; of one that says nothing, or names one that is not known here, the default.

    Args:
        run: The run, whose options hold for every policy that has them.
        name: Another policy's name; None means the run's own.
    """
    wanted, options = name or str(run.policy.get("name")), run.policy.get("options")
    shares = {k: v for k in _POLICY_OPTIONS if isinstance(options, dict) and _is_share(k, v := options.get(k))}
    return make_policy(wanted if wanted in POLICIES else _DEFAULT_POLICY, shares)


def _is_share(name: str, value: Any) -> bool:
    # What a hand or another program wrote must not divide by zero here. Only a cut of nothing means something.
    return isinstance(value, float) and (0 < value <= 1 or (name == "oom_cut" and value == 0))


def _all_runs(record: FactorSummary) -> tuple[Observation, ...]:
    return record.forgotten + record.runs


def _without_torch(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fingerprint.items() if name != TORCH_VERSION}


def _imported(in_force: Standing, name: tuple[str, str]) -> Imported | None:
    return in_force.since.imported(*name) if in_force.since else None


def _updated(runs: Sequence[Observation], in_force: Standing) -> datetime:
    times = [run.ended for run in runs] or [event.moment for event in (in_force.pin, in_force.since) if event]
    return max(times, default=datetime.fromtimestamp(0, UTC))


def _first_reason(in_force: Standing, imported: Imported | None, runs: Sequence[Observation]) -> str:
    if imported and in_force.since:
        told = f": {imported.initial_factor_reason}" if imported.initial_factor_reason else ""
        return f"imported from {in_force.since.source}{told}"
    if runs:
        return runs[0].factor_reason
    return f"reset on {in_force.since.moment:%Y-%m-%d}; the next run is a first one" if in_force.since else ""


def _first_factor(runs: Sequence[Observation]) -> float | None:
    """The factor that learning starts from: of the first run in which one was in use."""
    searched = (run.factor for run in runs if run.tuned_limit is not None)
    return next(searched, runs[0].factor if runs else None)


def _variance(values: Sequence[float]) -> float:
    # The statistics module takes a tenth of the command line's start to import.
    mean = fsum(values) / max(len(values), 1)
    return fsum((value - mean) ** 2 for value in values) / max(len(values), 1)


def _informed(policy: FactorPolicy, runs: Sequence[Observation]) -> FactorPolicy:
    """Tells the policy what the latest run's cost model predicted."""
    lines = (run.predicted_line for run in reversed(runs))
    line = next((line for line in lines if line is not None), None)
    return policy if line is None else policy.with_prior(*line)


def _pinned(record: FactorSummary, pin: Event | None) -> FactorSummary:
    if pin is None:
        return record
    why = f"pinned at {pin.value:g} by hand on {pin.moment:%Y-%m-%d}"
    # Where nothing is known but the pin, it is the reason that an export hands on.
    reason = why if record.state == "reset" else record.reason
    return replace(record, state="pinned", factor=pin.value, reason=reason, why=why)


def _settled(runs: Sequence[Observation], aim: float, variance: float) -> bool:
    in_band = [not run.teaches_out_of_memory and _in_band(run, aim) for run in runs[-_IN_BAND_RUNS:]]
    return len(runs) >= _SETTLED_RUNS and all(in_band) and variance < _SETTLED_VARIANCE


def _known(factor: float | None, interval: float | None) -> bool:
    return factor is not None and interval is not None and interval < _SETTLED_INTERVAL * factor


def _in_band(run: Observation, target: float) -> bool:
    return run.peak is not None and abs(run.peak - target) <= _BAND
