"""The factor store: finds the next run's factor from one state folder's observations and events, and records a person's
decisions. It stores nothing else; the export is remade from those files. A run calls `factor_rule`.
"""

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from numbers import Real
from pathlib import Path
from typing import Any, Final, Literal

from can_train.config.resolved import ResolvedRun, plain_settings, state_dir, state_folder
from can_train.errors import ArgumentError, ConfigError, StateError, check_kinds, remedy_for, shown
from can_train.factors import observations
from can_train.factors.exchange import make_export, read_import
from can_train.factors.observations import ALLOCATOR, ActiveEvents, Event, Observation, Records, read_records
from can_train.factors.policies import FactorPolicy, make_policy
from can_train.factors.summary import (
    LEARNABLE_OUTCOMES,
    FactorFigures,
    FactorSummary,
    devices_named,
    find_summaries,
    history_of,
    read_figures,
    separating,
    summarize,
    summarize_runs,
)
from can_train.fit.factor_rule import NO_AIM, STATIC, Aim, EarlierSearch, FactorRule, OtherDevice, SafetyFactor
from can_train.fit.step_time import SizeCandidate, Times, choose_size, is_same_size
from can_train.io.records import write_json_atomic
from can_train.memory.allocator_settings import allocator_settings
from can_train.reporter import Reporter

# Last runs on another device whose median ratio of measured to predicted peak stands for that device.
_OTHER_DEVICE_RUNS: Final = 10
_TIMED_RUNS: Final = 20  # Last runs whose times of micro-batches decide


@dataclass(frozen=True)
class FactorStore:
    """The learned factors of one state folder. Reading writes nothing; every call reads other processes' new records.

    Attributes:
        state: The state folder.
        policy: How observations become the next factor; None means as each configuration's latest run had it.
    """

    state: Path
    policy: FactorPolicy | None = None

    @property
    def db_path(self) -> Path:
        """The export, in the shape that earlier tools read."""
        return self.state / "batch_size_factors.json"

    def records(self) -> list[FactorSummary]:
        """Summarizes every configuration on every kind of device, by key, then by device.

        Raises:
            StateError: The folder cannot be read.
        """
        records = read_records(self.state)
        return summarize(records.finished, records.events, self.policy)

    def find(self, key: str | None, device: str | None = None) -> list[FactorSummary]:
        """Summarizes a configuration on every kind of device, with the arguments and errors of `find_summaries`.

        Raises:
            StateError: The folder cannot be read.
        """
        records = read_records(self.state)
        return self.of_figures(find_summaries(read_figures(self.state, records), key, device), records)

    def of_figures(self, figures: Iterable[FactorFigures], records: Records) -> list[FactorSummary]:
        """Summarizes the configurations and devices of some figures, with their runs."""
        names = {(row.key, row.device) for row in figures}
        summaries = summarize(records.of_keys({key for key, _ in names}), records.events, self.policy)
        return [summary for summary in summaries if (summary.key, summary.device) in names]

    def of_key(self, key: str) -> list[FactorSummary]:
        """Summarizes a configuration of exactly this key on every kind of device; empty where there is none.

        Raises:
            StateError: The folder cannot be read.
        """
        records = read_records(self.state)
        summaries = summarize(records.of_keys([key]), records.events, self.policy)
        return [summary for summary in summaries if summary.key == key]

    def get_factor(self, key: str, device: str | None = None) -> float:
        """Returns the factor of the next run.

        Args:
            key: Configuration key `{dataset}_{model}_{size}_{mode}`; without its size where that is unambiguous.
            device: Kind of device, or a name of several, as v100; of several, or with None, the device seen last.

        Raises:
            ConfigError: Nothing was learned under that key on that device; the message lists keys or devices. Or the
                factor was reset, and no run has begun since.
            StateError: The folder cannot be read.
        """
        summary = self._seen_last(key, device)
        if summary.factor is None:
            rule = "The factor was reset" if summary.state == "reset" else "No run has had a factor yet"
            raise ConfigError(rule, value=f"{summary.key}: {summary.reason}",
                              remedy="Train: the next run's plan decides it")  # fmt: skip
        return summary.factor

    def _seen_last(self, key: str, device: str | None) -> FactorSummary:
        _check_names(key, device)
        return max(find_summaries(self.records(), key, device), key=lambda summary: summary.last_seen)

    def get_stats(self, key: str, device: str | None = None) -> dict[str, Any]:
        """Returns figures of past runs, imported runs included: `num_runs`, `avg_memory_pct`, `max_memory_pct` (shares
        of the capacity, None before any peak was measured), `factor_variance`, `converged`. Takes the arguments and
        raises the errors of `get_factor`, except that a reset is no error.
        """
        summary = self._seen_last(key, device)
        return {
            "num_runs": summary.num_runs,
            "avg_memory_pct": summary.mean_peak,
            "max_memory_pct": summary.max_peak,
            "factor_variance": summary.factor_variance,
            "converged": summary.converged,
        }

    def learned_rule(
        self, key: str, device: str, fingerprint: Mapping[str, Any] = {}, *, size: str = "", run_id: str = ""
    ) -> FactorRule:
        """Returns the rule of a run's factor as far as earlier runs of the configuration on a kind of device decide it.

        Args:
            key: Configuration key.
            device: Kind of device.
            fingerprint: The settings that change memory, as the run's observation will have them.
            size: The model's size in the key; empty where it has none.
            run_id: Name of the run; empty where it has none yet.

        Raises:
            StateError: The folder cannot be read, or the fingerprint cannot be written as JSON.
        """
        records = read_records(self.state)
        try:
            # As an observation is read: its tuples have become lists.
            plain = json.loads(json.dumps(dict(fingerprint), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise StateError("A fingerprint cannot be written as JSON", value=str(error),
                             remedy="Give it texts, numbers and lists of them") from error  # fmt: skip
        every = records.of_keys([key])
        runs = [run for run in every if separating(run.fingerprint) == separating(plain)]
        here = [run for run in runs if run.device.key == device]
        active = ActiveEvents.of(records.events, key, device, size or (here[-1].size if here else ""))
        summary = summarize_runs((key, device), here, active, self.policy)
        earlier = _earlier_search(here, active)
        times = [run.times for run in here if run.times and active.learn_from(run)][-_TIMED_RUNS:]
        attempts = [run for run in every if run_id and run.run_id == run_id]
        last = max((run.attempt for run in attempts), default=0)
        after_oom = any(run.outcome == "oom" for run in attempts if run.attempt == last)
        if summary.factor is None or summary.state == "first":
            elsewhere = [run for run in runs if run.device.key != device]
            other_device = _other_device(elsewhere, records.events)
            return FactorRule(decided=None, aim=NO_AIM, other_device=other_device, after_oom=after_oom,
                              earlier=earlier, times=times)  # fmt: skip
        is_pinned = summary.state == "pinned"
        aim = NO_AIM if is_pinned else Aim(summary.aim, summary.aim_reason)
        # An import has no aim of its own, so the target stands until the limits lower it.
        is_learned = summary.interval is not None and not is_pinned
        return FactorRule(decided=SafetyFactor(summary.factor, summary.reason), aim=aim, aim_is_learned=is_learned,
                          after_oom=after_oom, earlier=earlier, times=times)  # fmt: skip

    def reset(self, key: str | None, device: str | None = None) -> Path:
        """Excludes the runs so far from learning; they stay in the history. None means every key, or every device.

        Raises:
            StateError: The event cannot be written.
        """
        if key is not None:
            _check_names(key, None)
        return self._write_each("reset", device, key=key)

    def pin(self, key: str, value: float, device: str | None = None) -> Path:
        """Fixes the factor; learned factors have no effect until `unpin`.

        Args:
            key: Configuration key; no run need have it.
            value: The factor, in (0, 1].
            device: Kind of device, or a name of several, as v100; None means all devices.

        Raises:
            ConfigError: There is no such device.
            ArgumentError: The value is not in (0, 1].
            StateError: The event cannot be written.
        """
        _check_names(key, device)
        if not key:
            raise ArgumentError(
                "A pin is of one configuration", value="no key", remedy="can-train factors lists the keys"
            )
        check_kinds("a share of the tuned limit", Real, "Give value=0.5 for half of it", value=value)
        if not 0 < value <= 1:
            remedy = "Give a share of the tuned limit: 0.5 is half of it"
            raise ArgumentError("The factor is not in (0, 1]", value=shown(value), remedy=remedy)
        return self._write_each("pin", device, key=key, value=float(value))

    def unpin(self, key: str, device: str | None = None) -> Path:
        """Removes a pin, so that the learned factor holds again.

        Raises:
            StateError: The event cannot be written.
        """
        _check_names(key, device)
        return self._write_each("unpin", device, key=key)

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
        entries = read_import(file, self.records())
        if not entries:
            return None, []
        source = os.fsencode(file).decode(errors="replace")
        return self._write("import", source=source, entries=entries), list(entries)

    def refresh_export(self) -> None:
        """Remakes the export from observations and events.

        Raises:
            StateError: The export cannot be written. No reason to stop a training.
        """
        export = make_export(self.records())
        try:
            write_json_atomic(self.db_path, export)
        except (OSError, ValueError) as error:
            remedy = remedy_for(error, "Choose another state folder with --state-dir, or make this one writable")
            # In a sticky folder (/tmp), the file of another person cannot be replaced.
            if isinstance(error, OSError) and error.errno == errno.EPERM:
                remedy = "Choose another state folder with --state-dir, or have the owner of the file delete it"
            value = f"{self.db_path}: {getattr(error, 'strerror', None) or error}"
            raise StateError("The export of learned factors cannot be written", value=value, remedy=remedy) from error

    def _write_each(self, kind: Literal["reset", "pin", "unpin"], device: str | None, **fields: Any) -> Path:
        """Writes an event for each kind of device that a name means; returns the last event's file."""
        _check_names("", device)
        devices = [None] if device is None else devices_named(device, {summary.device for summary in self.records()})
        return [self._write(kind, device=name, **fields) for name in devices][-1]

    def _write(self, kind: Literal["reset", "pin", "unpin", "import"], **fields: Any) -> Path:
        event = Event(kind=kind, time=observations.next_time(self.state), **fields)
        return observations.write_record(self.state, event)


def get_safety_factor_db(state_dir: str | Path | None = None, *, policy: FactorPolicy | None = None) -> FactorStore:
    """Opens the learned factors.

    Args:
        state_dir: State folder; None finds the user's own (`can_train.config.resolved.state_folder`).
        policy: How observations become the next factor; None means as each configuration's latest run had it.

    Raises:
        ArgumentError: An argument has the wrong type.
    """
    if state_dir is not None:
        check_kinds("a path", (str, os.PathLike), "Give a text or a Path, or leave it out", state_dir=state_dir)
    if policy is not None:
        check_kinds("a policy", FactorPolicy, "Give policy=AffinePolicy(), or leave it out", policy=policy)
    return FactorStore(state_folder(None if state_dir is None else Path(state_dir)), policy)


def _check_names(key: object, device: object) -> None:
    """Raises ArgumentError unless a configuration and a kind of device are named by texts; a device may be None."""
    check_kinds("the key of a configuration", str, "Give it as a text; can-train factors lists the keys", key=key)
    if device is not None:
        check_kinds("the name of a kind of device", str, 'Give device="t4-16gb", or leave it out', device=device)


def _earlier_search(runs: Sequence[Observation], active: ActiveEvents) -> EarlierSearch | None:
    """Returns the limits of the last run; where memory ran out within them, the rungs alone that it climbed to; None
    where there are none, or they were reset since.
    """
    last = max(runs, key=lambda run: run.ended, default=None)
    if last is None or not active.learn_from(last):
        return None
    # A run that climbed beside other processes teaches nothing of the time without them.
    phases = {name: limits for name, limits in last.limits.items()
              if (last.was_alone if limits.climbed else not last.ran_out_of_memory)}  # fmt: skip
    if not phases:
        return None
    return EarlierSearch(run_id=last.run_id, capacity_bytes=last.capacity_bytes, torch_version=last.torch_version,
                         phases=phases)  # fmt: skip


def _other_device(runs: Iterable[Observation], events: Sequence[Event]) -> OtherDevice | None:
    """Compares measured and predicted peaks on the device seen last, of runs that nothing disturbed or has reset."""
    compared = [
        run for run in runs
        if run.outcome in LEARNABLE_OUTCOMES and run.peak_allocated_bytes and run.predicted_peak_bytes
        and not (run.ran_out_of_memory or run.ooms_rescued or run.foreign_bytes)
        and ActiveEvents.of(events, run.key, run.device.key, run.size).learn_from(run)
    ]  # fmt: skip
    if not compared:
        return None
    device = max(compared, key=lambda run: run.ended).device.key
    recent = [run for run in compared if run.device.key == device][-_OTHER_DEVICE_RUNS:]
    ratios = sorted((run.peak_allocated_bytes or 0) / (run.predicted_peak_bytes or 1) for run in recent)
    return OtherDevice(ratios[len(ratios) // 2], len(ratios), device)


@dataclass(frozen=True)
class Replay:
    """One configuration's runs under another policy."""

    summary: FactorSummary  # with its runs and the factors that they had
    factors: tuple[float, ...]  # that the policy would have set before each of the runs
    next_factor: float | None  # that the policy would set now; None where there is no run to learn from


def replay_runs(summary: FactorSummary, policy: FactorPolicy) -> Replay:
    """Computes a policy's factor for every run, from the runs that had ended when the run began.

    The measurements stay as they were: nobody measured how runs with the policy's factors would have ended.
    """
    runs = summary.runs
    if not runs:
        return Replay(summary, (), None)
    first = runs[0].factor
    histories = [history_of([past for past in runs if past.ended <= run.started and past is not run]) for run in runs]
    factors = tuple(policy.next_factor(history, first=first) for history in histories)
    return Replay(summary, factors, policy.next_factor(history_of(runs), first=first))


@dataclass(frozen=True, kw_only=True)
class ReplayedSize:
    """The size of micro-batches that a run's predecessors have shown to be the fastest, for one phase of the run."""

    phase: str
    own_samples: float  # Of the run's micro-batches, on average
    samples: float  # Of the fastest
    own_rung: str
    rung: str  # Of the fastest
    predicted_seconds: float | None  # Of a sample in that size; None before any run
    measured_seconds: float | None  # In this run; None where it did not have or try that size


def replay_sizes(summary: FactorSummary) -> list[list[ReplayedSize]]:
    """Chooses the fastest of the sizes that were measured, for each run from the runs that had ended when it began."""
    replayed = []
    for run in summary.runs:
        earlier = [past for past in summary.runs if past.ended <= run.started and past is not run]
        replayed.append([_replay_size(phase, times, [past.times.get(phase, ()) for past in earlier])
                         for phase, times in run.times.items()])  # fmt: skip
    return replayed


def _replay_size(phase: str, times: Times, earlier: Sequence[Times]) -> ReplayedSize:
    own, every = times[0], [size for run in (times, *earlier) for size in run]
    # A rung beyond the first one that fits is timed where larger micro-batches fit on it.
    largest = {rung: max(size.samples for size in every if size.rung == rung) for rung in {one.rung for one in times}}
    sizes = {(largest[size.rung], -size.samples, size.rung) for size in every if size.rung in largest}
    candidates = [SizeCandidate(cost=-samples, samples=-samples, rung=rung) for _, samples, rung in sorted(sizes)]
    choice = choose_size(candidates, earlier, total_steps=0)
    measured = [own.seconds * exp(size.log_ratio) for size in times
                if size.rung == choice.rung and is_same_size(size.samples, choice.samples)]  # fmt: skip
    return ReplayedSize(phase=phase, own_samples=own.samples, own_rung=own.rung, samples=choice.samples,
                        rung=choice.rung, predicted_seconds=choice.seconds,
                        measured_seconds=next(iter(measured), None))  # fmt: skip


def last_run_offloaded(run: ResolvedRun) -> bool:
    """Tells whether the last run of a configuration ended with tensors that wait on the host, whatever its device; also
    where the store cannot be read, no.
    """
    try:
        runs = read_records(state_dir(run.paths)).of_keys([run.key])
    except StateError:
        return False
    last = max((one for one in runs if one.limits), key=lambda one: one.ended, default=None)
    return last is not None and any(limits.offload or limits.offload_optimizer for limits in last.limits.values())


def factor_rule(run: ResolvedRun, device_key: str, reporter: Reporter, *, run_id: str = "") -> FactorRule:
    """Finds the rule that decides the safety factor of a run. Where the store cannot be read, the rule of a first run
    is returned, and the reporter gets a notice.

    Args:
        run: The resolved run.
        device_key: Kind of device that it trains on.
        reporter: Where the notice goes.
        run_id: Name of the run; empty where it has none yet.
    """
    try:
        return read_factor_rule(run, device_key, run_id=run_id)
    except StateError as error:
        reporter.notice(f"Factors of earlier runs cannot be read. {error}")
        return _first_rule(run)


def read_factor_rule(run: ResolvedRun, device_key: str, *, run_id: str = "") -> FactorRule:
    """Returns the rule of `factor_rule`, but raises StateError where the store cannot be read."""
    if not run.training.use_adaptive_batch_size_factor:
        static = SafetyFactor(run.training.graph_memory_safety_factor, STATIC)
        return FactorRule(decided=static, aim=NO_AIM)
    store, fingerprint = store_of(run), memory_fingerprint(run)
    learned = store.learned_rule(run.key, device_key, fingerprint, size=run.size, run_id=run_id)
    return rule_after(learned, _first_rule(run))


def rule_after(learned: FactorRule, first: FactorRule) -> FactorRule:
    """Returns the rule of a run's factor from what earlier runs decide of it and from the rule of a first run."""
    if learned.decided is not None:
        return learned
    # A measurement on another device says more than an experience table.
    table = None if learned.other_device else first.decided
    return replace(first, other_device=learned.other_device, decided=table, after_oom=learned.after_oom,
                   earlier=learned.earlier, times=learned.times)  # fmt: skip


def _first_rule(run: ResolvedRun) -> FactorRule:
    factor = run.factor
    decided = None
    if factor.from_table:
        decided = SafetyFactor(*experience_factor(*run.task_settings.experience(run.dataset.name, run.mode.name)))
    return FactorRule(decided=decided, aim=Aim(factor.target), minimum=factor.min, maximum=factor.max)


def experience_factor(base: float, base_reason: str, adjustments: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Multiplies a base factor, a share of the tuned limit, by adjustments in (0, 1]; returns it with its reason.

    >>> experience_factor(0.65, "small dataset", [(0.95, "reconstruction")])
    (0.6175, 'small dataset 0.65 × reconstruction 0.95 = 0.6175')
    >>> experience_factor(0.6, "other dataset", [])
    (0.6, 'other dataset 0.6')
    """
    factor = base
    terms = [f"{base_reason} {base:g}"]
    for multiplier, reason in adjustments:
        factor *= multiplier
        terms.append(f"{reason} {multiplier:g}")
    # Rounded, so that the factor recorded is the one that the reason states.
    factor = round(factor, 4)
    return factor, " × ".join(terms) + (f" = {factor:g}" if adjustments else "")


def store_of(run: ResolvedRun) -> FactorStore:
    """Opens the factor store with the policy of the run's settings."""
    return FactorStore(state_dir(run.paths), make_policy(run.factor.policy, policy_options(run)))


def policy_options(run: ResolvedRun) -> dict[str, float]:
    """Returns the policy's options in the run's settings."""
    factor = run.factor
    return {"target": factor.target, "momentum": factor.momentum, "oom_cut": factor.oom_cut, "minimum": factor.min,
            "maximum": factor.max}  # fmt: skip


def memory_fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """Returns the settings that change how a configuration's memory grows; runs that differ in them learn apart."""
    training = run.training
    return {
        "model": plain_settings(run.model),
        "precision": training.precision,
        "optimizer": training.optimizer,
        # Left out where there are none, as earlier runs have it.
        **({"optimizer_args": dict(training.optimizer_args)} if training.optimizer_args else {}),
        "deterministic": training.deterministic,
        ALLOCATOR: allocator_settings(),
        # A copy of the weights is in the memory of each step.
        **({"averaged": True} if training.averaging is not None else {}),
        # The rung that was chosen by hand; splitting alone leads to no other.
        **({"fit": training.fit} if training.fit not in ("auto", "split", "off") else {}),
        **({"recompute": list(training.recompute)} if training.recompute else {}),
        # As earlier runs have it where nothing is compiled.
        "compiled": training.compile if training.compile != "off" else False,
    }
