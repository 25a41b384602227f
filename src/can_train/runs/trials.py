"""A search over settings: the values of the next trial, by Optuna, and the trials that end early, by ASHA.

A trial is a run. A search keeps nothing that two processes write: its folder has one file that names each trial's run,
and the curve of a trial is in its run's folder. Values and verdicts are functions of these files, so that a search goes
on after any kill, and the jobs of a cluster need neither a lock nor a database.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from can_train.config.axis import SearchAxis
from can_train.errors import ConfigError, RunError, StateError
from can_train.io import records
from can_train.runs.run_folder import RunFolder, label_of

if TYPE_CHECKING:
    import optuna

    from can_train.config.resolved import ResolvedRun

SAMPLERS: Final = ("tpe", "random")
"""How the values of a trial are chosen: by the tree-structured Parzen estimator, or at random."""
SEARCHES: Final = "searches"
"""Folder of all searches in the state folder."""
_SEARCH: Final = "search.json"
_MAX_ENTRY_BYTES: Final = 2**16
_PREPARES_S: Final = 3600.0
"""A trial whose run has no folder after so many seconds was killed while it read its data, or its run was deleted."""
REDUCTION: Final = 3
"""Of so many trials at a rung one goes on, and each rung has so many times the epochs of the last one (ASHA's eta)."""
_RUNGS: Final = 2
"""Rungs before the last epoch: a good run that starts slowly is judged twice, and not in its first steps."""
_DIGITS: Final = 4
"""Digits of a value that count, relative to its size and to the interval: more change no result."""

Value = float | int | str
Curve = Mapping[int, float]
"""The objective by epoch, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class SettingsSearch:
    """A search.

    Attributes:
        name: Its name, which follows from its settings.
        axes: The settings that it chooses values for.
        objective: The figure of the validation that it optimizes: `training.best_by`.
        is_higher_better: Whether higher values of the objective are better.
        epochs: Epochs of a trial that is not stopped.
        seed: Seed of the values.
        sampler: An element of `SAMPLERS`.
        stops_losers: Whether trials that lose end early.
    """

    name: str
    axes: tuple[SearchAxis, ...]
    objective: str
    is_higher_better: bool
    epochs: int
    seed: int
    sampler: str = SAMPLERS[0]
    stops_losers: bool = True

    def best(self, curve: Curve, *, until: float = math.inf) -> float | None:
        """Returns the best objective of a curve up to an epoch; None: there is none."""
        values = [value for epoch, value in curve.items() if epoch <= until]
        return (max if self.is_higher_better else min)(values, default=None)

    def is_better(self, value: float, other: float) -> bool:
        """Returns whether a value of the objective is better than another one."""
        return value > other if self.is_higher_better else value < other

    @property
    def rungs(self) -> list[int]:
        """Epochs after which a trial may end early."""
        rungs = {math.ceil(self.epochs / REDUCTION**power) for power in range(1, _RUNGS + 1)}
        return sorted(rung for rung in rungs if rung < self.epochs) if self.stops_losers else []


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial, as the folder of its run has it.

    Attributes:
        search: Folder of the search, absolute.
        number: Its number, counted from 1.
        values: Its values by setting; None: they are chosen when it starts.
        stopped_after: The epoch after which it ended since it was losing; 0: it was not stopped.
    """

    search: str
    number: int
    values: dict[str, Value] | None = None
    stopped_after: int = 0

    @property
    def label(self) -> str:
        """Label of its run; empty where the values are not chosen yet."""
        return label_of(self.values or {})


class TrialRun:
    """The run of a trial.

    Args:
        folder: Folder of the run.
        trial: The trial.
    """

    def __init__(self, folder: RunFolder, trial: Trial) -> None:
        self.folder, self.trial = folder, trial

    @classmethod
    def of(cls, folder: RunFolder) -> "TrialRun | None":
        """Reads the trial of a run; None: the run is no trial.

        Raises:
            RunError: The file is damaged.
        """
        path = folder.trial_path
        try:
            return cls(folder, msgspec.json.decode(records.read_bytes(path), type=Trial))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            remedy = "Start the run anew without the search: can-train resubmit RUN"
            raise RunError("The run's trial cannot be read", value=f"{path}: {error}", remedy=remedy) from error

    def write(self) -> None:
        """Writes the trial into the folder of its run."""
        records.write_json_atomic(self.folder.trial_path, asdict(self.trial))

    @property
    def title(self) -> str:
        """Says which trial it is, and its values."""
        values = " ".join(assignments(self.search.search, self.trial.values or {}))
        return f"This is trial {self.trial.number} of search {self.search.search.name}: {values}"

    @property
    def has_finished(self) -> bool:
        """Whether the run has a result."""
        return records.is_file(self.folder.result_path)

    @property
    def curve(self) -> Curve:
        """The objective by epoch."""
        points = [(line.get("epoch"), line.get("objective")) for line in self.folder.metrics()]
        return {epoch: float(value) for epoch, value in points
                if isinstance(epoch, int) and isinstance(value, int | float) and math.isfinite(value)}  # fmt: skip

    @cached_property
    def search(self) -> "SearchFolder":
        """The search of the trial."""
        return SearchFolder.open(Path(self.trial.search))

    def decide(self) -> None:
        """Chooses the values of a trial that has none yet, and writes them into the run's configuration."""
        from can_train.config.compose import changed_settings, with_changes

        if self.trial.values is not None:
            return
        values = self.search.suggest(self.trial.number)
        run = with_changes(self.folder.config(), assignments(self.search.search, values), {})
        # The configuration first: after a kill in between, values are chosen once more.
        self.folder.configure(run.config, changed_settings(run.config))
        self.trial = replace(self.trial, values=dict(values))
        self.write()

    def stop_if_losing(self, epoch: int) -> str:
        """Decides after the validation of an epoch whether the trial ends; returns the reason, empty if it goes on."""
        search, own = self.search.search, self.curve
        if not any(min((each for each in own if each >= rung), default=0) == epoch for rung in search.rungs):
            return ""
        rung = max(rung for rung in search.rungs if rung <= epoch)
        curves = {run.trial.number: run.curve for run in self.search.trials()} | {self.trial.number: own}
        reason = losing(search, curves, self.trial.number, rung)
        if reason:
            self.trial = replace(self.trial, stopped_after=epoch)
            # On a full disk the trial counts as one that has trained to its end.
            with suppress(OSError):
                self.write()
        return reason


def losing(search: SettingsSearch, curves: Mapping[int, Curve], number: int, rung: int) -> str:
    """Decides at a rung whether a trial ends: it goes on if its best objective so far is in the best third of all
    trials that have come to the rung, or if fewer than three have.

    Source: L. Li and others, "A System for Massively Parallel Hyperparameter Tuning" (ASHA), 2020, in the variant that
    stops trials where the paper pauses them.

    Args:
        search: The search.
        curves: The curve of each trial, by number.
        number: The trial that has just come to the rung.
        rung: Epochs of the rung.

    Returns:
        The reason in words; empty: it goes on.
    """
    # Where a trial is not validated after each epoch, the first validation from the rung on counts.
    came = {each: min((epoch for epoch in curve if epoch >= rung), default=0) for each, curve in curves.items()}
    at_rung = {each: best for each, epoch in came.items()
               if epoch and (best := search.best(curves[each], until=epoch)) is not None}  # fmt: skip
    own = at_rung.get(number)
    if own is None or len(at_rung) < REDUCTION:
        return ""
    place = 1 + sum(search.is_better(value, own) for value in at_rung.values())
    if place <= len(at_rung) // REDUCTION:
        return ""
    figure = f"validation {search.objective} {own:.4g}"
    return (f"Trial {number} ends after {rung} of {search.epochs} epochs: its {figure} has place {place} of "
            f"{len(at_rung)}, and one trial in {REDUCTION} goes on")  # fmt: skip


def assignments(search: SettingsSearch, values: Mapping[str, Value]) -> list[str]:
    """Returns the arguments of `--set` for the values of a trial."""
    return [axis.assignment(values[axis.key]) for axis in search.axes]


@dataclass(frozen=True, kw_only=True)
class _TrialEntry:
    number: int
    path: str  # folder of its run, absolute


class SearchFolder:
    """The folder of a search.

    Args:
        path: The folder.
        search: The search.
    """

    def __init__(self, path: Path, search: SettingsSearch) -> None:
        self.path, self.search = path, search

    @classmethod
    def at(cls, state_dir: Path, search: SettingsSearch) -> "SearchFolder":
        """Returns the folder of a search in a state folder, which need not exist."""
        return cls(state_dir / SEARCHES / search.name, search)

    @classmethod
    def make(cls, state_dir: Path, search: SettingsSearch) -> "SearchFolder":
        """Opens the folder of a search, which is made where it is not there.

        Raises:
            StateError: It cannot be written.
        """
        folder = cls.at(state_dir, search)
        if not records.is_file(folder.path / _SEARCH):
            try:
                records.write_document(folder.path / _SEARCH, search)
            except StateError:
                # Another process may have made it meanwhile.
                if not records.is_file(folder.path / _SEARCH):
                    raise
        return folder

    @classmethod
    def open(cls, path: Path) -> "SearchFolder":
        """Reads a search.

        Raises:
            StateError: It cannot be read.
        """
        try:
            return cls(path, records.parse_document(records.read_bytes(path / _SEARCH), SettingsSearch))
        except (OSError, ValueError) as error:
            raise records.unusable("read", path / _SEARCH, error) from error

    def _entry(self, number: int) -> Path:
        return self.path / f"trial-{number:04d}{records.DOCUMENT_SUFFIX}"

    def add(self, number: int, run: Path) -> None:
        """Names the run of a trial, whose folder may not exist yet.

        Raises:
            StateError: The trial has a run already, or the file cannot be written.
        """
        # The age is looked at last: another process may have written the entry meanwhile.
        if number not in self.runs() and self._age_s(number) >= _PREPARES_S:
            self.discard(number)
        records.write_document(self._entry(number), _TrialEntry(number=number, path=str(run.absolute())))

    def discard(self, number: int) -> None:
        """Removes the entry of a trial whose run was not made."""
        self._entry(number).unlink(missing_ok=True)

    def runs(self) -> dict[int, RunFolder]:
        """Returns the folder of each trial's run by number; the folder of a trial that is prepared does not exist yet.
        A trial whose run was deleted, or whose process was killed while it prepared, is left out.
        """
        if not self.path.is_dir():
            return {}
        names = [name for name in records.list_names(self.path) if name.startswith("trial-")]
        entries = records.read_documents(self.path, names, _TrialEntry, [], most_bytes=_MAX_ENTRY_BYTES).values()
        runs = {entry.number: RunFolder(Path(entry.path)) for entry in sorted(entries, key=lambda each: each.number)}
        return {number: run for number, run in runs.items() if run.path.is_dir() or self._age_s(number) < _PREPARES_S}

    def _age_s(self, number: int) -> float:
        """Returns the age of the entry of a trial; NaN where there is none."""
        with suppress(OSError):
            return time.time() - self._entry(number).stat().st_mtime
        return math.nan

    def trials(self) -> list[TrialRun]:
        """Reads the trials whose runs exist and can be read, in order."""
        trials = []
        for folder in self.runs().values():
            # One damaged file does not end the others.
            with suppress(RunError):
                trials.append(TrialRun.of(folder))
        return [trial for trial in trials if trial is not None]

    def suggest(self, number: int) -> dict[str, Value]:
        """Chooses the values of a trial from the curves of the trials so far."""
        return suggest(self.search, [trial for trial in self.trials() if trial.trial.number != number], number)


def suggest(search: SettingsSearch, trials: Sequence[TrialRun], number: int) -> dict[str, Value]:
    """Chooses the values of a trial by Optuna.

    Args:
        search: The search.
        trials: The other trials; those without values teach nothing.
        number: Number of the trial, which seeds its choice: jobs that start at the same time differ.

    Returns:
        The value by setting.
    """
    optuna = import_optuna()
    seed = int.from_bytes(sha256(f"{search.seed} {number}".encode()).digest()[:4])
    if search.sampler == "random":
        sampler = optuna.samplers.RandomSampler(seed=seed)
    else:
        # Trials that run, or that failed, count as bad ones: no job repeats the values of another.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="maximize" if search.is_higher_better else "minimize")
    distributions = {axis.key: _distribution(axis) for axis in search.axes}
    study.add_trials([_frozen(search, trial, distributions) for trial in trials if trial.trial.values is not None])
    chosen = study.ask(distributions).params
    return {axis.key: _rounded(axis, chosen[axis.key]) for axis in search.axes}


def import_optuna() -> Any:
    """Imports Optuna, without its messages.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ConfigError("A search needs a package that is not installed", value=str(error.name),
                          remedy="Install it: pip install 'can-train[search]'") from error  # fmt: skip
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(axis: SearchAxis) -> Any:
    from optuna import distributions

    if axis.choices:
        return distributions.CategoricalDistribution(axis.choices)
    if axis.is_integer:
        return distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.is_logarithmic,
                                             step=axis.step or 1)  # fmt: skip
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.is_logarithmic)


def _frozen(search: SettingsSearch, trial: TrialRun, distributions: Mapping[str, Any]) -> "optuna.trial.FrozenTrial":
    """Returns a trial as Optuna has it: complete, pruned, or running."""
    from optuna.trial import TrialState, create_trial

    curve, state, value = trial.curve, TrialState.RUNNING, None
    if trial.trial.stopped_after and curve:
        state = TrialState.PRUNED
    elif trial.has_finished and (value := search.best(curve)) is not None:
        state = TrialState.COMPLETE
    return create_trial(state=state, value=value, params=trial.trial.values, distributions=dict(distributions),
                        intermediate_values=dict(curve))  # fmt: skip


def _rounded(axis: SearchAxis, value: Value) -> Value:
    if axis.choices or axis.is_integer or not isinstance(value, float) or value == 0:
        return value
    digits = _DIGITS - 1 - math.floor(math.log10(min(abs(value), axis.high - axis.low)))
    return min(axis.high, max(axis.low, round(value, digits)))


def search_name(run: "ResolvedRun", search: SettingsSearch) -> str:
    """Returns the name of a search: the key of its configuration, and a digest of all settings that make its trials."""
    from can_train.config.resolved import flat_settings

    searched = {axis.key for axis in search.axes}
    settings = {name: value for name, value in flat_settings(run.config).items() if name not in searched}
    parts = [settings, {**asdict(search), "name": ""}]
    return f"{run.key}-{sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:6]}"
