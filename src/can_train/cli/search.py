"""`--trials N`: a search over the settings that have several values. Its trials are runs, which train here one after
another, or as an array of jobs (`--submit`); a job chooses the values of its trial when it starts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from can_train.cli.output import print_json, print_tables, print_text, print_wrapped
from can_train.cli.run_locator import RunLocator
from can_train.cli.train_options import Flags
from can_train.config.axis import SearchAxis
from can_train.config.compose import MOST_RUNS, with_changes
from can_train.config.resolved import ResolvedRun, flat_settings, state_dir
from can_train.config.settings import check_choice
from can_train.config.sweeps import split_axes
from can_train.errors import ConfigError, StateError, with_command_name
from can_train.io.records import is_file
from can_train.report.run_facts import compared_runs, sweep_table
from can_train.reporter import COLUMNS, Reporter
from can_train.runs.run_folder import Changed, RunFolder, SweepRun, make_run, new_run_id
from can_train.runs.trials import (
    REDUCTION,
    SAMPLERS,
    SearchFolder,
    SettingsSearch,
    Trial,
    TrialRun,
    assignments,
    import_optuna,
    search_name,
)

if TYPE_CHECKING:
    from can_train.cli.submit import Placement
    from can_train.runs.status import RunStatus
    from can_train.slurm.job import Entry
    from can_train.slurm.submission_plan import PlannedRun

_SHARE_AT_ONCE: Final = 4
"""One trial in so many runs at a time on a cluster, so that most trials learn from earlier ones."""


@dataclass(frozen=True, kw_only=True)
class PlannedSearch:
    """A search as a command line asks for it.

    Attributes:
        folder: Its folder, which need not exist.
        base: The run that its trials change: with the middle of each axis.
        trials: Number of its trials.
    """

    folder: SearchFolder
    base: ResolvedRun
    trials: int

    @property
    def search(self) -> SettingsSearch:
        """The search."""
        return self.folder.search

    def lines(self) -> list[str]:
        """Describes the search, a line for each of its parts."""
        search, rungs = self.search, self.search.rungs
        direction = "highest" if search.is_higher_better else "lowest"
        by = "Bayesian (tpe)" if search.sampler == "tpe" else "random"
        places = " and after ".join(map(str, rungs))
        early = f"; one trial in {REDUCTION} goes on after {places} of {search.epochs} epochs" if rungs else ""
        goal = f"{self.trials} trials for the {direction} validation {search.objective}, {by}{early}"
        combinations = math.prod(len(axis.choices) or math.inf for axis in search.axes)
        twice = [f"  These are {combinations} combinations: some are trained more than once."]
        return [f"Search {search.name}: {goal}", *(f"  {axis}" for axis in search.axes),
                *(twice if self.trials > combinations else [])]  # fmt: skip

    def jobs(self, number: int) -> list[ResolvedRun]:
        """Returns the runs of an array of so many trials: each is the base until its job chooses its values."""
        at_once = self.base.cluster.max_parallel or math.ceil(self.trials / _SHARE_AT_ONCE)
        return [replace(self.base, cluster=replace(self.base.cluster, max_parallel=at_once))] * number

    def make(self) -> None:
        """Makes the folder of the search."""
        SearchFolder.make(state_dir(self.base.paths), self.search)

    @property
    def has_finished(self) -> bool:
        """Whether a trial has finished."""
        return any(is_file(folder.result_path) for folder in self.folder.runs().values())

    def missing(self) -> list[int]:
        """Returns the numbers of the trials that have no run."""
        runs = self.folder.runs()
        return [number for number in range(1, self.trials + 1) if number not in runs]


def plan_search(flags: Flags, resolve: Callable[[Flags], Sequence[ResolvedRun]]) -> PlannedSearch:
    """Plans the search of a training line; nothing is written.

    Args:
        flags: The flags of the line.
        resolve: Resolves the runs of a line.

    Raises:
        ConfigError: There is nothing to search, or a value of an axis does not fit.
    """
    import_optuna()
    trials, sampler = flags["trials"], flags["search"] or SAMPLERS[0]
    check_choice("--search", sampler, SAMPLERS)
    if not 1 <= trials <= MOST_RUNS:
        raise ConfigError(f"A search has 1 to {MOST_RUNS} trials", value=f"--trials {trials}",
                          remedy="Write it as --trials 20")  # fmt: skip
    single, axes = split_axes(flags["set_"] or ())
    if not axes:
        raise ConfigError("--trials has no setting to search",
                          remedy="Add one: --set 'training.lr=interval(1e-4,1e-2)'")  # fmt: skip
    runs = resolve({**flags, "set_": [*single, *(axis.assignment(axis.middle) for axis in axes)]})
    if len(runs) > 1:
        raise ConfigError("A search has one model, mode and data set", value=f"{len(runs)} of them",
                          remedy="Start a search for each")  # fmt: skip
    base = runs[0]
    settings = flat_settings(base.config)
    axes = [_typed(axis, settings.get(axis.key)) for axis in axes]
    for axis in axes:
        for value in axis.choices or (axis.low, axis.high):
            with_changes(base.config, [axis.assignment(int(value) if axis.is_integer else value)], {})
    objective, is_higher_better = base.training.criterion
    search = SettingsSearch(name="", axes=tuple(axes), objective=objective, is_higher_better=is_higher_better,
                    epochs=base.training.epochs, seed=base.training.seed, sampler=sampler,
                    stops_losers=flags["asha"] is not False)  # fmt: skip
    search = replace(search, name=search_name(base, search))
    return PlannedSearch(folder=SearchFolder.at(state_dir(base.paths), search), base=base, trials=trials)


def _typed(axis: SearchAxis, value: object) -> SearchAxis:
    """Makes the values of an interval whole numbers where the setting is one."""
    # The type of an optimizer's argument is not known: int(interval(1,8)) says it.
    is_open = axis.key.startswith("training.optimizer_args.")
    if axis.choices or axis.is_integer or is_open or not isinstance(value, int) or isinstance(value, bool):
        return axis
    if not (axis.low.is_integer() and axis.high.is_integer()):
        remedy = f"Write it as '{axis.key}=interval({math.ceil(axis.low)},{int(axis.high)})'"
        raise ConfigError(f"{axis.key} is a whole number", value=f"interval({axis.low:g},{axis.high:g})", remedy=remedy)
    return replace(axis, is_integer=True)


def print_search(planned: PlannedSearch) -> None:
    """Prints the description of a search."""
    for line in planned.lines():
        print_wrapped(line)


# Here


class TrialHere:
    """A new trial that trains in this process.

    Args:
        planned: The search.
        number: Number of the trial.
    """

    def __init__(self, planned: PlannedSearch, number: int) -> None:
        self._folder, self._number = planned.folder, number
        self._values = planned.folder.suggest(number)
        self.assignments = assignments(planned.search, self._values)
        self.run = with_changes(planned.base.config, self.assignments, {})
        self._run_id = new_run_id(self.run.key)
        self._is_claimed = False

    def claim(self) -> bool:
        """Takes the number of the trial; returns False where another process has taken it.

        Raises:
            StateError: The state folder cannot be written.
        """
        try:
            self._folder.add(self._number, self.run.runs_dir / self._run_id)
        except StateError:
            if self._number not in self._folder.runs():
                raise
            return False
        self._is_claimed = True
        return True

    def make(self, run: ResolvedRun, reporter: Reporter, changed: Changed) -> RunFolder:
        """Makes the folder of its run."""
        trial = Trial(search=str(self._folder.path.absolute()), number=self._number, values=self._values)
        sweep = SweepRun(name=self._folder.search.name, label=trial.label)
        folder = make_run(run, reporter, changed, run_id=self._run_id, sweep=sweep)
        TrialRun(folder, trial).write()
        return folder

    def release(self) -> None:
        """Gives the number back where it was taken and no run has been made."""
        if self._is_claimed and not (self.run.runs_dir / self._run_id).is_dir():
            self._folder.discard(self._number)


_GOES_ON: Final = ("terminated", "interrupted", "time_limit", "killed", "rank_gone")
"""Endings of an attempt after which a trial goes on; one that failed would fail again."""


def unfinished(planned: PlannedSearch) -> dict[int, RunFolder]:
    """Returns the runs of trials that stopped here before their end, by number."""
    statuses = _statuses(planned)
    return {
        number: status.known.folder
        for number, status in statuses.items()
        if not (status.state.live or status.facts.result or status.facts.jobs or status.facts.cancels)
        and not any(attempt.end and attempt.end.ending not in _GOES_ON for attempt in status.facts.attempts[-1:])
    }


def _statuses(planned: PlannedSearch) -> "dict[int, RunStatus]":
    locator = RunLocator(str(planned.base.runs_dir), str(state_dir(planned.base.paths)))
    runs = {number: folder for number, folder in planned.folder.runs().items() if folder.path.is_dir()}
    statuses = locator.statuses([str(folder.path) for folder in runs.values()])
    return dict(zip(runs, statuses, strict=True))


def print_trials(planned: PlannedSearch) -> None:
    """Prints the trials, the best first."""
    print_tables([sweep_table(compared_runs(_statuses(planned).values()))], pipe_columns=COLUMNS)


# On a cluster


def submit_trials(
    entry: "Entry", planned: PlannedSearch, placement: "Placement", *, after: Sequence[str], as_json: bool = False
) -> None:
    """Submits the trials of a search that have no run, as one array; `placement` has a run for each of them.

    Raises:
        CanTrainError: They cannot be submitted; none has been.
    """
    from can_train.cli.submit import job_json, print_jobs, print_notices, read_cluster, start_group
    from can_train.runs.registry import Registry
    from can_train.slurm.snapshot import code_of_runs, keep
    from can_train.slurm.submission_plan import expectation, plan_submission

    base, numbers, state = planned.base, planned.missing(), state_dir(planned.base.paths)
    if base.cluster.executor == "local":
        raise ConfigError("Trials in the background would all train at once", value="--cluster local",
                          remedy="Leave out --submit: they then train here, one after another")  # fmt: skip
    if not as_json:
        print_search(planned)
    if not numbers:
        if not as_json:
            print_wrapped(f"All {planned.trials} trials have runs. Raise --trials for more.")
        _print_next(planned, [], as_json=as_json)
        return
    runs = placement.runs
    code, partitions = code_of_runs(runs), read_cluster(runs)
    plan = plan_submission(runs, code.digest, partitions, after=after, force=True, on_host=placement.on_host)
    plan = replace(plan, sweep=[SweepRun(name=planned.search.name)] * len(runs))
    print_notices(plan.notices)
    (group,) = plan.groups
    expects = expectation(base, Registry(state).runs())
    keep(code, state)
    planned.make()
    folder = planned.folder

    def prepare(submitted: "PlannedRun", run: RunFolder) -> None:
        trial = TrialRun(run, Trial(search=str(folder.path.absolute()), number=numbers[submitted.index]))
        trial.write()
        folder.add(trial.trial.number, run.path)

    try:
        jobs = start_group(entry, group, plan, code, prepare)
    finally:
        # Numbers of runs that were not accepted are free again.
        for number, run in folder.runs().items():
            if number in numbers and not run.path.is_dir():
                folder.discard(number)
    if not as_json:
        print_jobs(group[0].run, jobs, expects)
        at_once = f"At most {group[0].run.cluster.max_parallel} train at once (--max-parallel)"
        print_wrapped(f"{at_once}, so that later trials learn from earlier ones.")
    objects = [job_json(job, RunFolder(base.runs_dir / job.run_id)) for job in jobs]
    _print_next(planned, objects, as_json=as_json)


def _print_next(planned: PlannedSearch, submitted: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json({"search": planned.search.name, "identical": [], "submitted": submitted})
    else:
        print_text(with_command_name(f"Trials: can-train compare {planned.search.name}"))
