"""`can-train --model ... --dataset ...`: trains new runs here, submits them, or prints their plans (`--dry-run`). And
`can-train resubmit RUN`: a new run with the settings of another run, but for those that flags change.

Also one attempt of a run, from a command line or in a job: connects its ranks, trains it and prints its result; and the
command that follows the end of a job.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from can_train.cli import output
from can_train.cli.output import Verbosity
from can_train.cli.run_locator import RunLocator, RunOrSweep, flag_values
from can_train.cli.train_options import (
    OPTIONS,
    Flags,
    Option,
    check_flags,
    check_targets,
    make_command,
    make_request,
    resolve_runs,
    split_names,
    without_repeats,
)
from can_train.config.resolved import user_file
from can_train.config.settings import split_list
from can_train.config.task_settings import task_names
from can_train.errors import (
    RUN_FAILED,
    CanTrainError,
    ConfigError,
    DoesNotFitError,
    FailedRunError,
    with_command_name,
)
from can_train.reporter import LineReporter, SilentReporter, TextTable
from can_train.slurm.launchers import check_started_once, find_launch, launched_place

if TYPE_CHECKING:
    from can_train.cli.search import PlannedSearch
    from can_train.cli.submit import Placement, PlannedJob
    from can_train.config.resolved import ResolvedRun
    from can_train.config.settings import ClusterSettings
    from can_train.reporter import Reporter
    from can_train.runs.attempts import StopRequests
    from can_train.runs.registry import JobRecord
    from can_train.runs.run_folder import Changed, RunFolder
    from can_train.slurm.script import Submission
    from can_train.training.distributed import RankPlace, Ranks
    from can_train.training.dry_run import Plans
    from can_train.training.train import Outcome


def make_train_command(words: Sequence[str], act: Callable[[Any, Flags], None] | None = None) -> Callable[..., None]:
    """Makes the command, with the options of the task that its words name.

    Args:
        words: The line.
        act: Gets a function that resolves the line's runs from flags and the runs to wait for, and the flags; None:
            the runs are started.
    """
    act = act or _start
    given, options = flag_values(words), {**OPTIONS, **_SEARCH_OPTIONS, "config": _CONFIG}
    if given.get("--config"):
        file = RunFile.read(given["--config"])
        act_on_file = partial(act, partial(resolve_file, file))
        return make_command({**options, **FILE_OPTIONS}, act_on_file, words=file.completed(words))
    # The class of a task of one's own, which imports torch, tells its options.
    if ":" in given.get("--task", ""):
        output.print_starting(Verbosity.QUIET if {"-q", "--quiet"} & {*words} else Verbosity.NORMAL)
    return make_command(options, partial(act, resolve_runs), words=words)


def _start(resolve: "Callable[[Flags, Sequence[str]], list[ResolvedRun]]", flags: Flags) -> None:
    after = _check_train_flags(flags)
    _check_search_flags(flags)
    _print_starting(flags)
    if flags["trials"] is not None:
        _search(flags, after, lambda each: resolve(each, after))
    else:
        start_runs(resolve(flags, after), flags, after)


# A run as a file

_RANKS: Final = "The job starts a rank on each GPU: --gpus N --nodes M"
_CONFIG: Final = (
    str | None, None, "File of a run, which other flags change: can-train show RUN --config. -: standard input.",
)  # fmt: skip
_TASK_LINE: Final = re.compile(r"(?m)^task:[ \t]*(\S.*?)[ \t]*$")


@dataclass(frozen=True)
class RunFile:
    """The text of a file with the settings of a run, and its name for messages."""

    text: str
    name: str
    folder: Path

    @classmethod
    def read(cls, name: str) -> Self:
        """Reads a file; `-` is standard input."""
        from can_train.io.records import expanded, read_text

        try:
            text = sys.stdin.read() if name == "-" else read_text(expanded(name))
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text in UTF-8"
            raise ConfigError("The file of --config cannot be read", value=f"{name}: {why}",
                              remedy="can-train show RUN --config > run.yaml writes one") from error  # fmt: skip
        is_input = name == "-"
        return cls(text, "standard input" if is_input else name, Path() if is_input else expanded(name).parent)

    @property
    def task(self) -> str:
        """The task that it names, found without parsing it; empty: none."""
        found = _TASK_LINE.search(self.text)
        return found[1] if found is not None else ""

    def completed(self, words: Sequence[str]) -> Sequence[str]:
        """Adds the file's task to the words of a line that names none: it decides which options there are."""
        is_named = "--task" in flag_values(words) or self.task not in task_names()
        return words if is_named else [*words, "--task", self.task]


def resolve_file(file: RunFile, flags: Flags, after: Sequence[str]) -> "list[ResolvedRun]":
    """Resolves the run of a file with the changes that flags give: several runs where they are swept. A person's own
    defaults do not change it: the file has all settings.
    """
    from can_train.config.compose import expand, from_file, resolve_again
    from can_train.config.resolved import with_absolute_paths

    request = make_request({**flags, "device": flags["device"] or "auto"}, model="", dataset="", mode=None, size=None)
    base, chosen = from_file(file.text, file.name, beside=file.folder), _chosen(flags)
    if flags["submit"] and base.cluster.executor == "local":
        # A run that was trained where it was started names no cluster.
        chosen.setdefault("cluster", request.cluster)
    if base.paths.code_dir and not flags["quiet"]:
        output.print_note(f"{file.name} names code, which runs: {base.task} in {base.paths.code_dir}")
    requests = expand([replace(request, user_file=None)])
    runs = [with_absolute_paths(resolve_again(base.config, each, chosen)) for each in requests]
    return [_with_prerequisites(run, flags, after) for run in without_repeats(runs, requests, flags)[0]]


def _chosen(flags: Flags) -> dict[str, str]:
    return {name: flags[name] for name in _CHOICES if flags[name]}


def _with_prerequisites(run: "ResolvedRun", flags: Flags, after: Sequence[str]) -> "ResolvedRun":
    """Finds the runs that a run builds on: they may have been changed, or be gone."""
    from can_train.config.compose import preset_request
    from can_train.config.resolved import state_dir
    from can_train.runs.past_runs import PastRuns, resolve_prerequisites
    from can_train.slurm import client as slurm

    if not (run.prerequisites or run.training.start_from):
        return run
    past = PastRuns(state_dir(run.paths), run.runs_dir, slurm, after)
    complete, notices = resolve_prerequisites(run, replace(preset_request(run.config), device=run.device), past)
    for notice in () if flags["quiet"] else notices:
        output.print_note(notice)
    return complete


def _print_starting(flags: Flags) -> None:
    """Says that PyTorch is loaded next, before the second that Hydra takes; a submission needs no PyTorch."""
    launch = find_launch()
    # Rank 0 speaks for all.
    is_shown = (flags["dry_run"] or not flags["submit"]) and (launch is None or launch.rank == 0)
    output.print_starting(Verbosity.of(quiet=flags["quiet"] or not is_shown, verbose=False))


def _check_train_flags(flags: Flags) -> Sequence[str]:
    """Returns the runs to wait for.

    Raises:
        ConfigError: A flag of a training line has an empty value, or does not go with the others.
    """
    check_flags(flags)
    for name in ("target_gpu", "target_memory", "show_config"):
        if flags[name] and not flags["dry_run"]:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --dry-run", remedy="Add --dry-run")
    check_targets(flags["target_gpu"])
    Verbosity.of(quiet=flags["quiet"], verbose=flags["verbose"])
    return split_names(flags["after"]) if flags["after"] else ()


def start_runs(runs: Sequence["ResolvedRun"], flags: Flags, after: Sequence[str]) -> None:
    """Plans, submits or trains new runs, whichever the flags of a training line ask for."""
    _check_yes(runs, flags)
    verbosity = Verbosity.of(quiet=flags["quiet"], verbose=flags["verbose"])
    if flags["dry_run"]:
        check_started_once("A plan")
        _print_dry_runs(_placed(runs, flags, verbosity), flags, after, verbosity)
    elif flags["submit"]:
        check_started_once("A submission", _RANKS)
        from can_train.cli.submit import submit_runs

        placement = _placed(runs, flags, verbosity)
        submit_runs(continue_in_job, placement, after=after, force=flags["force"], as_json=flags["json"])
    else:
        _train_here(runs, verbosity, as_json=flags["json"])


def _check_yes(runs: Sequence["ResolvedRun"], flags: Flags) -> None:
    if flags["yes"] and (not flags["submit"] or not any(run.cluster.wants_place for run in runs)):
        raise ConfigError("--yes has no effect without --partition auto", remedy="Leave it out")


def _placed(runs: Sequence["ResolvedRun"], flags: Flags, verbosity: Verbosity) -> "Placement":
    """Returns the runs at the place that `--partition auto` chooses, as they are without it.

    Raises:
        DoesNotFitError: A run does not fit the kind of GPU that its job asks for.
        typer.Exit: The person who is asked does not agree.
    """
    from can_train.cli.submit import Placement, ask_to_submit, check_fits, pack_runs, place_runs, print_places

    if not flags["submit"]:
        return Placement(runs=runs)
    reporter, wants_place = output.make_reporter(verbosity), any(run.cluster.wants_place for run in runs)
    if wants_place:
        placement = place_runs(runs, reporter)
    else:
        # A dry run prints the plan, or the error.
        placement = Placement(runs=runs) if flags["dry_run"] else check_fits(runs, reporter)
    placement = pack_runs(placement, reporter)
    if wants_place and not flags["json"]:
        print_places(placement, f"Places for {_title(runs[0], runs) if len(runs) == 1 else f'{len(runs)} runs'}")
    if wants_place and not (flags["dry_run"] or flags["yes"]):
        ask_to_submit(placement)
    return placement


def _train_here(runs: Sequence["ResolvedRun"], verbosity: Verbosity, *, as_json: bool) -> None:
    """Trains one run after another; after one that fails, the others are trained all the same. A single run is trained
    by all processes that a launcher has started.
    """
    if len(runs) > 1:
        check_started_once(f"A line of {len(runs)} runs", "Each run then trains in one process, or with "
                                                          "--submit --gpus N on N GPUs")  # fmt: skip
    from can_train.training.train import train_new

    with launched_ranks(runs[0].device, verbosity) as ranks:
        _check_alike(runs[0], ranks)
        if ranks.is_first:
            _train_runs(runs, ranks, verbosity, as_json=as_json)
        else:
            train_new(runs[0], SilentReporter(), ranks)


def _train_runs(runs: Sequence["ResolvedRun"], ranks: "Ranks", verbosity: Verbosity, *, as_json: bool) -> None:
    from can_train.runs.run_folder import SweepRun, make_run
    from can_train.runs.sweep_runs import describe_sweep

    failed, places = [], describe_sweep([run.config for run in runs]) if len(runs) > 1 else [SweepRun()]
    more = f"show {places[0].name}" if len(runs) > 1 else ""
    with RunPrinter(verbosity, as_json=as_json, more=more) as printer:
        for number, run in enumerate(runs, start=1):
            if len(runs) > 1 and verbosity != Verbosity.QUIET:
                output.print_aside(f"run {number} of {len(runs)}: {_title(run, runs)}")
            try:
                make_folder = partial(make_run, sweep=places[number - 1])
                printer.print(partial(_train_new, run, ranks, verbosity, printer, make_folder))
            except CanTrainError as error:
                if len(runs) == 1:
                    raise
                output.print_error(error)
                failed.append(number)
    if failed:
        numbers = f"run{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
        some = FailedRunError("Some runs failed", value=f"{len(failed)} of {len(runs)}: {numbers}",
                               remedy="Their errors are above")  # fmt: skip
        some.in_json = as_json
        raise some


def _train_new(
    run: "ResolvedRun",
    ranks: "Ranks",
    verbosity: Verbosity,
    printer: "RunPrinter",
    make_folder: "Callable[[ResolvedRun, Reporter, Changed], RunFolder]",
) -> "Outcome":
    """Trains a new run, whose folder the printer gets."""
    from can_train.training.train import train_new

    def make_and_tell(run: "ResolvedRun", reporter: "Reporter", changed: "Changed") -> "RunFolder":
        printer.folder = make_folder(run, reporter, changed)
        return printer.folder

    outcome = train_new(run, output.make_reporter(verbosity), ranks, make_folder=make_and_tell)
    _log_outcome(outcome)
    return outcome


def _title(run: "ResolvedRun", runs: Sequence["ResolvedRun"]) -> str:
    """Returns a run's key, and beside it the settings that differ between the runs of that key."""
    from can_train.config.resolved import differences, flat_settings

    settings = flat_settings(run.config)
    differing = differences([flat_settings(other.config) for other in runs if other.key == run.key])
    return " ".join([run.key, *(f"{name}={settings.get(name)}" for name in differing)])


def _check_alike(run: "ResolvedRun", ranks: "Ranks") -> None:
    """Refuses processes whose lines differ: they were not meant to train one run."""
    from can_train.config.resolved import differences, flat_settings

    configs = ranks.gather(lambda: run.config)
    # Where each happens is compared too: all ranks write into the folder of rank 0.
    differing = differences([{**flat_settings(config), **config["paths"]} for config in configs])
    if not differing:
        return
    if not ranks.is_first:
        raise SystemExit(ConfigError.exit_code)
    name, values = next(iter(differing.items()))
    raise ConfigError("The launcher's processes have different settings, so they cannot train one run",
                      value=f"{name} is {', '.join(map(str, dict.fromkeys(map(str, values))))}",
                      remedy="Start each run by itself: srun --ntasks 1, or without a launcher")  # fmt: skip


# --trials


_SEARCH_OPTIONS: Final[dict[str, Option]] = {
    "trials": (int | None, None, "Search the settings that have several values, by so many runs."),
    "search": (str | None, None, "With --trials: values are chosen by tpe (Bayesian) or random. [tpe]"),
    "asha": (bool | None, None, "With --trials: end trials early that lose against the others. [yes]"),
}


def _check_search_flags(flags: Flags) -> None:
    """Raises ConfigError if a flag of a search is given without `--trials`."""
    for name in ("search", "asha"):
        if flags[name] is not None and flags["trials"] is None:
            raise ConfigError(f"--{name} has no effect without --trials", remedy="Add --trials 20")


def _search(flags: Flags, after: Sequence[str], resolve: "Callable[[Flags], Sequence[ResolvedRun]]") -> None:
    """Plans, submits or trains the trials of a search."""
    from can_train.cli.search import plan_search, print_search, submit_trials
    from can_train.cli.submit import Placement

    planned = plan_search(flags, resolve)
    _check_yes([planned.base], flags)
    verbosity = Verbosity.of(quiet=flags["quiet"], verbose=flags["verbose"])
    if flags["dry_run"]:
        if not flags["json"]:
            print_search(planned)
            output.print_wrapped("The plan is for the middle of each setting:")
        check_started_once("A plan")
        # Of the array all jobs have one script.
        runs = planned.jobs(len(planned.missing())) if flags["submit"] else []
        placement = _placed(runs, flags, verbosity) if runs else Placement(runs=[planned.base])
        _print_dry_runs(placement, flags, after, verbosity, alike=True)
    elif flags["submit"]:
        check_started_once("A submission", _RANKS)
        numbers = planned.missing()
        placement = _placed(planned.jobs(len(numbers)), flags, verbosity)
        submit_trials(continue_in_job, planned, placement, after=after, as_json=flags["json"])
    else:
        check_started_once("A search", "Its trials then train in one process each, or with --submit --gpus N on N GPUs")
        if verbosity != Verbosity.QUIET and not flags["json"]:
            print_search(planned)
        _train_trials(planned, verbosity, as_json=flags["json"])


def _train_trials(planned: "PlannedSearch", verbosity: Verbosity, *, as_json: bool) -> None:
    """Trains the trials of a search one after another, from where an earlier command stopped."""
    from can_train.cli.search import TrialHere, print_trials, unfinished
    from can_train.runs.attempts import StopRequests

    failed = list[int]()

    def train(number: int, title: str, attempt: "Callable[[], Outcome | None]", folder: "RunFolder | None") -> None:
        if verbosity != Verbosity.QUIET:
            output.print_aside(f"trial {number} of {planned.trials}: {title}")
        try:
            printer.print(attempt, folder)
        except CanTrainError as error:
            # A loss that is no longer finite, a model that does not fit: the other trials may be good.
            does_not_fit = isinstance(error, DoesNotFitError) and printer.folder is not None
            if error.exit_code != RUN_FAILED and not does_not_fit:
                raise
            output.print_error(error)
            failed.append(number)

    planned.make()
    more = f"compare {planned.search.name}"
    several = RunPrinter(verbosity, as_json=as_json, more=more)
    with launched_ranks(planned.base.device, verbosity) as ranks, several as printer, _search_goes_on(verbosity):
        for number, folder in unfinished(planned).items():
            goes_on = partial(_continue, folder, output.make_reporter(verbosity), StopRequests(), lambda _: ranks)
            train(number, "goes on", goes_on, folder)
        while number := next(iter(planned.missing()), 0):
            trial = TrialHere(planned, number)
            try:
                if trial.claim():
                    new = partial(_train_new, trial.run, ranks, verbosity, printer, trial.make)
                    train(number, " ".join(trial.assignments), new, None)
            finally:
                trial.release()
        if not as_json:
            print_trials(planned)
    if failed and not planned.has_finished:
        none = FailedRunError("No trial has finished", value=f"{len(failed)} failed", remedy="Their errors are above")
        none.in_json = as_json
        raise none


@contextmanager
def _search_goes_on(verbosity: Verbosity) -> Iterator[None]:
    """Says how a search goes on that a signal ends in the block."""
    try:
        yield
    except SystemExit:
        if verbosity != Verbosity.QUIET:
            output.print_note("The same line continues the search")
        raise


# --dry-run


def _print_dry_runs(
    placement: "Placement", flags: Flags, after: Sequence[str], verbosity: Verbosity, *, alike: bool = False
) -> None:
    """Plans each run and prints the plan, in full for one device and as a table for several; runs that are alike have
    one plan.
    """
    from can_train.config.resolved import plain_to_yaml

    runs = placement.runs
    jobs: list[PlannedJob | None] = [None] * len(runs)
    if flags["submit"]:
        # Before the plans: they take seconds, and an error in a job is known at once.
        from can_train.cli.submit import plan_jobs
        from can_train.slurm.submission_plan import host_memory_notice

        jobs = [*plan_jobs(placement, after, quiet=flags["quiet"])]
    if alike:
        runs, jobs = runs[:1], jobs[:1]
    reporter, objects = output.make_reporter(verbosity), list[Any]()
    failures: list[CanTrainError] = []
    for number, (run, job) in enumerate(zip(runs, jobs, strict=True), start=1):
        script = {} if job is None else {"script": job.script, **placement.json_field}
        if not flags["json"]:
            output.print_text("", end="\n" if number > 1 else "")
            if len(runs) > 1:
                output.print_wrapped(f"Run {number} of {len(runs)}: {_title(run, runs)}")
            if flags["show_config"]:
                output.print_text(plain_to_yaml(run.config))
        try:
            plans = _dry_plans(run, job, flags, reporter)
            objects.append({**plans.to_plain(), **script})
            if not flags["json"]:
                _print_plans(run, plans, verbosity, reporter)
            if job is not None and job.script and plans.on_host_bytes and not placement.places:
                job = _with_host_memory(run, job, plans.on_host_bytes, after)
                jobs[number - 1] = job
                reporter.notice(host_memory_notice(plans.on_host_bytes, job.cluster))
            failures += [] if plans.fits else [plans.error]
        except _NoPlanError as unknown:
            objects.append({"config_key": run.key, "data": None, "plans": [], "unknown": str(unknown),
                            "config": dict(run.config), **script})  # fmt: skip
            if not flags["json"]:
                output.print_note(str(unknown))
        except CanTrainError as error:
            if job is None:
                raise
            # The script is printed all the same: it does not depend on the plan.
            failures.append(error)
            objects.append({"config_key": run.key, "error": error.to_plain(), **script})
    if flags["json"]:
        output.print_json(objects[0] if len(objects) == 1 else objects)
    else:
        _print_scripts(runs, jobs)
    for failure in failures[:1]:
        failure.in_json = flags["json"]
        raise failure


def _with_host_memory(run: "ResolvedRun", job: "PlannedJob", on_host_bytes: int, after: Sequence[str]) -> "PlannedJob":
    """Plans the job of a run anew, whose tensors wait on the host; the submission of a kind of GPU that is not named
    knows no plan.
    """
    from can_train.cli.submit import Placement, plan_jobs

    if not run.cluster.gpu_kinds:
        return job
    return plan_jobs(Placement(runs=[run], on_host=[on_host_bytes]), after, quiet=True)[0]


class _NoPlanError(Exception):
    """A plan cannot be made here, for a reason that is no error of the user's."""


def _print_scripts(runs: Sequence["ResolvedRun"], jobs: Sequence["PlannedJob | None"]) -> None:
    # An array has one script for all of its runs.
    for script in dict.fromkeys(job.script for job in jobs if job is not None and job.script is not None):
        output.print_text(f"\nScript that --submit would send:\n\n{script}")
    processes = {run.cluster.executor for run, job in zip(runs, jobs, strict=True) if job is not None}
    for executor in sorted(processes - {"slurm"}):
        place = "the background of this machine" if executor == "local" else "this process"
        output.print_text(f"\nNo script: --cluster {executor} trains in {place}.")


def _dry_plans(run: "ResolvedRun", job: "PlannedJob | None", flags: Flags, reporter: "Reporter") -> "Plans":
    """Plans a run for the targets that are named, else for the device of its job, else for its device here; raises
    _NoPlanError where the job's device is not known, or torch is missing.
    """
    names = target_names(flags)
    device = None if job is None or job.script is None else job.device
    if device is not None and not names:
        remedy = "--target-gpu or --target-memory says what else to plan for"
        if device.unknown and not device.cards:
            raise _NoPlanError(f"No plan is made. {device.unknown}; {remedy}")
        if device.unknown:
            reporter.notice(f"{device.unknown}; {remedy}")
    if job is not None:
        try:
            import torch  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            # As on many login nodes.
            problem = f"torch cannot be imported ({' '.join(str(error).split())})"
            raise _NoPlanError(f"No plan is made here: {problem}. The job plans on its device") from error
    from can_train.training.dry_run import dry_plans, find_targets, host_target
    from can_train.training.loading import nothing_left_behind, sample_task
    from can_train.training.report import data_line

    with nothing_left_behind():
        if device is not None and device.memory_mib and not names and not run.device.startswith("sim:"):
            targets = [host_target(device.memory_mib)]
        else:
            targets = find_targets(run, names or (() if device is None else device.cards), reporter)
        sampled = sample_task(run, reporter)
        if not flags["json"]:
            # The first line: the others take seconds.
            output.print_wrapped(data_line(run.key, sampled.estimated_train_rows or len(sampled.train_rows),
                                           sampled.sample_note))  # fmt: skip
        return dry_plans(run, targets, reporter, sampled=sampled, ranks=1 if device is None else device.ranks)


def target_names(flags: Flags) -> list[str]:
    """Returns the names of the devices that flags name to plan for.

    Raises:
        ConfigError: --target-memory is no size.
    """
    from can_train.io.units import parse_size

    if flags["target_memory"]:
        parse_size(flags["target_memory"], "--target-memory")
    return [*split_list(flags["target_gpu"] or ""), *filter(None, [flags["target_memory"]])]


def _print_plans(run: "ResolvedRun", planned: "Plans", verbosity: Verbosity, reporter: "Reporter") -> None:
    """Prints plans below their first line."""
    from can_train.training.explain import explain_planned
    from can_train.training.report import RECORDED, dry_lines, dry_table

    details, plans = verbosity == Verbosity.VERBOSE, planned.cards
    if len(plans) == 1:
        # A training that does not fit is an error, and nothing more is printed of it.
        if planned.fits:
            parts = explain_planned(run, plans[0], reporter) if details else []
            for line in dry_lines(plans[0], details=details, parts=parts):
                output.print_wrapped(line)
        return
    warnings = dict.fromkeys(warning for dry in plans for warning in dry.warnings)
    sources = dict.fromkeys(f"{dry.target.key}: {dry.target.source}" for dry in plans)
    recorded = [RECORDED] if any(dry.is_recorded for dry in plans) else []
    notes = [*sources, *recorded, *warnings]
    output.print_tables([TextTable(f"Plans of {run.key}", *dry_table(plans, details=details), notes)])


# Like another run


_CHOICES: Final = ("model", "dataset", "mode", "size", "memory", "task", "cluster", "device")
# Options of a line with a run's file whose defaults are the file's.
FILE_OPTIONS: Final = {
    "device": (str | None, None, "auto, cpu, cuda, cuda:1; a simulated GPU: sim:2GiB. [as before]"),
}
_AS_BEFORE: Final = {
    **FILE_OPTIONS,
    "submit": (bool, False, "Train in the background; without, where the other run was trained."),
    "trust_code": (bool, False, "Run the code that the run names, although it is not known to be yours."),
    "runs_dir": (str | None, None, "Folder of run folders: where the other run is, and the new one will be. [runs]"),
}


def make_resubmit_command(_words: Sequence[str]) -> Callable[..., None]:
    """Makes the command `resubmit`."""
    return make_command({**OPTIONS, **_AS_BEFORE}, _resubmit, words=(), run=RunOrSweep)


def _resubmit(flags: Flags) -> None:
    """Start a new run like another run, with the changes that the flags of a training line give.

    It is trained in the place of the other run. Settings of the other run stay, also where the help shows another
    default; but if a flag replaces a preset, the settings of that preset go: another model has its own settings. Of a
    sweep, every run is started anew, as a new sweep.
    """
    locator = RunLocator(flags["runs_dir"] or user_file().values.get("runs_dir", "runs"), flags["state_dir"])
    statuses, trust = locator.statuses([flags["run"]]), locator.trust(trusts_all=flags.pop("trust_code"))
    has_jobs = any(status.facts.jobs for status in statuses)
    is_new_there = flags["submit"] and not has_jobs
    flags["submit"] = flags["submit"] or has_jobs
    after = _check_train_flags(flags)
    _print_starting(flags)
    request = make_request({**flags, "device": flags["device"] or "auto"}, model="", dataset="", mode=None, size=None)
    chosen = _chosen(flags)
    if is_new_there:
        chosen["cluster"] = request.cluster
    from can_train.config.compose import preset_request, resolve_again
    from can_train.config.resolved import with_absolute_paths
    from can_train.runs.past_runs import PastRuns, resolve_prerequisites
    from can_train.slurm import client as slurm

    # Not where it was written down: the registry that was asked is the one that gets the new run.
    values: dict[str, Any] = {**request.values, "paths.state_dir": str(locator.state_folder)}
    past, runs, notices = PastRuns(locator.state_folder, locator.runs_dir, slurm, after), [], dict[str, None]()
    for status in statuses:
        plain = trust.config(status.known.folder, submits=flags["submit"])
        new = with_absolute_paths(resolve_again(plain, replace(request, values=values), chosen))
        # The runs that it builds on may have been changed, or be gone.
        new, told = resolve_prerequisites(new, replace(preset_request(new.config), device=new.device), past)
        runs.append(new)
        notices |= dict.fromkeys(told)
    for notice in () if flags["quiet"] else notices:
        output.print_note(notice)
    start_runs(runs, flags, after)


# One attempt of a run, from a command line or in a job


@contextmanager
def launched_ranks(device: str, verbosity: Verbosity) -> "Iterator[Ranks]":
    """Connects the processes that a launcher has started, which train one run in the block; one that is alone needs no
    connection. A rank ends silently where another one has failed: that one, and rank 0, say why.

    Raises:
        ConfigError: The launcher does not tell its processes their ranks.
        RunError: They do not find each other.
    """
    from can_train.training.distributed import RankFailedError, join_ranks

    place = _launched_place(verbosity)
    with _told_of_waiting(place):
        ranks = join_ranks(place, device)
    try:
        yield ranks
    except RankFailedError as error:
        if ranks.is_first:
            raise
        raise SystemExit(error.exit_code) from error
    finally:
        ranks.leave()


_SILENT_S: Final = 15.0  # that the processes of a launcher may take to start, without a word


@contextmanager
def _told_of_waiting(place: "RankPlace | None") -> Iterator[None]:
    """Says which processes are waited for where the block, in which they find each other, takes long."""
    if place is None:
        yield
        return
    who, where = f"Process {place.rank} of {place.size}", f"{place.address}:{place.port}"
    text = f"{who} waits for the others at {where}: one of them may not have started, and its own output says why"
    timer = Timer(_SILENT_S, output.print_note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _launched_place(verbosity: Verbosity) -> "RankPlace | None":
    launch = find_launch()
    if launch is None:
        return None
    try:
        place = launched_place(launch)
    except ConfigError as error:
        # Rank 0 says it for all.
        if launch.rank > 0:
            raise SystemExit(error.exit_code) from error
        raise
    if launch.rank == 0 and verbosity != Verbosity.QUIET:
        output.print_note(f"{launch}: they train one run together")
    return place


def continue_run(
    folder: "RunFolder",
    ranks: "Ranks",
    verbosity: Verbosity = Verbosity.NORMAL,
    *,
    undo: AbstractContextManager[None],
    as_json: bool = False,
) -> None:
    """Continues a run, or prints the result of one that has finished. `undo` undoes its changes where it is refused."""
    from can_train.runs.attempts import StopRequests

    if not ranks.is_first:
        _continue(folder, SilentReporter(), StopRequests(), lambda device: ranks)
        return
    reporter = output.make_reporter(verbosity)
    with RunPrinter(verbosity, as_json=as_json) as printer:

        def attempt() -> "Outcome | None":
            with undo:
                return _continue(folder, reporter, StopRequests(), lambda device: ranks)

        printer.print(attempt, folder)


def continue_in_job(folder: "RunFolder", stops: "StopRequests") -> None:
    """Starts or continues a run in a job, with plain lines and an exit code for the scheduler."""
    # A job handles signals by now, and one may arrive during the seconds that these imports take.
    from can_train.slurm.launchers import rank_place
    from can_train.training.distributed import join_ranks

    try:
        outcome = _continue(folder, LineReporter(sys.stderr), stops,
                            lambda device: join_ranks(rank_place(os.environ), device))  # fmt: skip
        if outcome is not None:
            _print_outcome(outcome, Verbosity.NORMAL)
    except CanTrainError as error:
        output.print_error(error)
        raise SystemExit(error.exit_code) from error


def _continue(
    folder: "RunFolder", reporter: "Reporter", stops: "StopRequests", join: Callable[[str], "Ranks"]
) -> "Outcome | None":
    """Trains as one of the processes that `join` connects, given the run's device; the first returns the outcome."""
    from can_train.config.compose import from_plain
    from can_train.config.resolved import state_dir
    from can_train.runs.run_folder import relocate_prerequisites, without_missing_prerequisites
    from can_train.slurm.job import name_job
    from can_train.training.train import train_on

    plain = folder.config()
    ranks = join(plain["device"])
    if folder.trial_path.is_file():
        plain = _decided(folder, reporter, ranks)
    run, notices = without_missing_prerequisites(relocate_prerequisites(from_plain(plain), folder.path))
    if ranks.is_first:
        name_job(folder, run.cluster, state_dir(run.paths))
    for notice in notices:
        reporter.notice(notice)
    had_finished = folder.result_path.exists()
    outcome = train_on(run, folder, reporter, stops, ranks)
    if not ranks.is_first:
        return None
    if not had_finished:
        _log_outcome(outcome)
    return outcome


def _decided(folder: "RunFolder", reporter: "Reporter", ranks: "Ranks") -> dict[str, Any]:
    """Chooses the values of a trial that has none yet; returns the configuration of its run."""
    from can_train.runs.trials import TrialRun

    def decide() -> str:
        trial = TrialRun.of(folder)
        if trial is None:
            return ""
        trial.decide()
        return trial.title

    if title := ranks.on_rank0(decide):
        reporter.notice(title)
    return folder.config()


def after_job(
    state_dir: Annotated[Path, typer.Option(help="State folder, where the registry is.")],
    status: Annotated[int, typer.Option(help="Exit status of the job step.")],
) -> None:
    """Record how a job ended, and restart its run if that makes sense.

    Standard input has the variables that the job began with.
    """
    from can_train.slurm.job import after_job as restart_after_job

    def resubmit(folder: "RunFolder", cluster: "ClusterSettings", submission: "Submission") -> "JobRecord":
        from can_train.slurm.submit import submit_job

        return submit_job(continue_in_job, folder, cluster, submission)

    message = restart_after_job(resubmit, state_dir, status=status, environment=sys.stdin.buffer.read())
    if message:
        output.print_text(f"can-train: {message}")


@dataclass
class RunPrinter:
    """Prints the outcomes of runs as text or, at the end of the block, as JSON: an object for each run.

    Attributes:
        verbosity: How much is printed.
        as_json: Whether standard output is for JSON alone.
        more: Command that shows several runs; empty for a single run, which is shown by its own name.
        folder: Folder of the run that is being trained.
    """

    verbosity: Verbosity
    as_json: bool
    more: str = ""
    folder: "RunFolder | None" = None
    _objects: list[Any] = field(default_factory=list)

    @property
    def of_several(self) -> bool:
        """Whether there are several runs."""
        return bool(self.more)

    def print(self, attempt: Callable[[], "Outcome | None"], folder: "RunFolder | None" = None) -> None:
        """Trains a run by a call of `attempt`, and prints its outcome; `folder` is there if it is not a new run."""
        from can_train.runs.run_folder import name_to_type, resume_hint

        self.folder, error = folder, None
        try:
            if (outcome := attempt()) is not None:
                if not (self.as_json and self.verbosity == Verbosity.QUIET):
                    _print_outcome(outcome, self.verbosity)
                self._print_next(f"show {name_to_type(outcome.folder)}", wanted=not self.of_several)
        except CanTrainError as failure:
            failure.in_json, error = self.as_json, failure
            raise
        except SystemExit:
            if self.verbosity == Verbosity.QUIET and self.folder is not None:
                # The reporter, which says it otherwise, is silent.
                output.print_note(resume_hint(self.folder))
            raise
        finally:
            if self.as_json:
                self._add_object(error)

    def _add_object(self, error: CanTrainError | None) -> None:
        from can_train.io.records import is_file
        from can_train.report.run_facts import run_facts
        from can_train.runs.run_folder import CONFIG

        facts = {}
        # Somebody may have deleted the folder while the run trained.
        if self.folder is not None and is_file(self.folder.path / CONFIG):
            path, state_dir = self.folder.path, self.folder.config()["paths"]["state_dir"]
            locator = RunLocator(str(path.parent), state_dir or None)
            facts = run_facts(locator.status(locator.find(str(path))))
        self._objects.append(facts if error is None else {**facts, "error": error.to_plain()})

    def _print_next(self, command: str, *, wanted: bool) -> None:
        if wanted and self.verbosity != Verbosity.QUIET and not self.as_json:
            output.print_text(with_command_name(f"More:   can-train {command}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._print_next(self.more, wanted=self.of_several and kind is None)
        if self.as_json:
            output.print_json(self._objects if self.of_several else self._objects[0])


def _log_outcome(outcome: "Outcome") -> None:
    """Writes to the run's log all that can be printed of its result."""
    from can_train.io.records import open_to_append

    with suppress(OSError), open_to_append(outcome.folder.log_path) as log, redirect_stdout(log):
        _print_outcome(outcome, Verbosity.VERBOSE)


def _print_outcome(outcome: "Outcome", verbosity: Verbosity) -> None:
    output.print_judgement(outcome.summary_tables, outcome.tables, verbosity)
    output.print_text("")
    output.print_wrapped(f"Run {outcome.folder.run_id}: {outcome.summary}")
    # From here a path that lies below is short enough for a line.
    result, here = outcome.folder.result_path.resolve(), Path.cwd()
    output.print_text(f"Result: {result.relative_to(here) if result.is_relative_to(here) else result}")
