"""`can-train --model ... --dataset ...`: trains runs here, submits them, or prints their plans (`--dry-run`). Also what
a job calls: one attempt of its run, and what follows the job's end.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from can_train.cli.output import (
    TextTable,
    Verbosity,
    make_reporter,
    print_aside,
    print_json,
    print_judgement,
    print_note,
    print_tables,
    print_text,
    print_wrapped,
)
from can_train.cli.train_options import OPTIONS, Flags, check_flags, make_command, make_request, split_names
from can_train.config.settings import split_list
from can_train.errors import CanTrainError, ConfigError, FailedRunError, as_typed
from can_train.reporter import LineReporter, SilentReporter
from can_train.runs.run_folder import name_to_type, resume_hint
from can_train.slurm.launchers import check_started_once, find_launch, launched_place

if TYPE_CHECKING:
    from can_train.cli.submit import PlannedJob
    from can_train.config.compose import RunRequest
    from can_train.config.resolved import ResolvedRun
    from can_train.config.settings import ClusterSettings
    from can_train.reporter import Reporter
    from can_train.runs.run_folder import JobRecord, RunFolder, StopRequests
    from can_train.slurm.script import Submission
    from can_train.training.distributed import RankPlace, Ranks
    from can_train.training.dry_run import DryPlan
    from can_train.training.train import Outcome


def make_train_command(words: Sequence[str]) -> Callable[..., None]:
    """Makes the command, with the options of the task that its words name."""
    return make_command(OPTIONS, _train, words=words)


def _train(flags: Flags) -> None:
    check_train_flags(flags)
    after = split_names(flags["after"]) if flags["after"] else ()
    start_runs(resolve_runs(flags, after), flags, after)


def check_train_flags(flags: Flags) -> None:
    """Raises ConfigError if a flag of a training line has an empty value, or does not go with the others."""
    check_flags(flags)
    for name in ("target_gpu", "target_memory", "show_config"):
        if flags[name] and not flags["dry_run"]:
            raise ConfigError(f"--{name.replace('_', '-')} plans and does not train", remedy="Add --dry-run")
    gpus = flags["target_gpu"]
    if gpus is not None and not split_list(gpus):
        raise ConfigError("--target-gpu names no GPU", value=repr(gpus), remedy="Name one: --target-gpu h100-80gb")
    Verbosity.of(quiet=flags["quiet"], verbose=flags["verbose"])


def start_runs(runs: Sequence["ResolvedRun"], flags: Flags, after: Sequence[str]) -> None:
    """Plans, submits or trains new runs, whichever the flags of a training line ask for."""
    verbosity = Verbosity.of(quiet=flags["quiet"], verbose=flags["verbose"])
    if flags["dry_run"]:
        check_started_once("A plan")
        _print_dry_runs(runs, flags, after, verbosity)
    elif flags["submit"]:
        check_started_once("A submission", "The job starts a rank on each GPU: --gpus N --nodes M")
        from can_train.cli.submit import submit_runs

        submit_runs(continue_in_job, runs, after=after, force=flags["force"], as_json=flags["json"])
    else:
        _train_here(runs, verbosity, as_json=flags["json"])


def resolve_runs(flags: Flags, after: Sequence[str]) -> list["ResolvedRun"]:
    """Resolves one run for each combination of listed and swept values, and the finished runs that they build on."""
    # Composition imports Hydra: a command line that is wrong before it does not wait for that.
    from can_train.config.compose import expand, resolve
    from can_train.config.resolved import state_dir, with_absolute_paths
    from can_train.slurm.past_runs import PastRuns, resolve_prerequisites

    models, datasets, modes = ([*split_names(flags[name])] if flags[name] else [None]
                               for name in ("model", "dataset", "mode"))  # fmt: skip
    requests: list[RunRequest] = expand(
        [
            make_request(flags, model=model, dataset=dataset, mode=mode, size=flags["size"])
            for model, dataset, mode in product(models, datasets, modes)
        ]
    )
    runs = [with_absolute_paths(resolve(request)) for request in requests]
    if not any(run.prerequisites or run.training.start_from for run in runs):
        return runs
    past = PastRuns(state_dir(runs[0].paths), runs[0].runs_dir, after)
    found = [resolve_prerequisites(run, request, past) for run, request in zip(runs, requests, strict=True)]
    # A sweep's runs mostly build on the same one, which is said once.
    for notice in () if flags.get("quiet") else dict.fromkeys(notice for _, notices in found for notice in notices):
        print_note(notice)
    return [run for run, _ in found]


def _train_here(runs: Sequence["ResolvedRun"], verbosity: Verbosity, *, as_json: bool) -> None:
    """Trains one run after another; after one that fails, the others are trained all the same. A single run is trained
    by all processes that a launcher has started.
    """
    if len(runs) > 1:
        check_started_once(f"A line of {len(runs)} runs", "Each run then trains in one process, or with "
                                                          "--submit --gpus N on N GPUs")  # fmt: skip
    with launched_ranks(runs[0].device, verbosity) as ranks:
        _check_alike(runs[0], ranks)
        if ranks.is_first:
            _train_runs(runs, ranks, verbosity, as_json=as_json)
        else:
            _train_as_rank(runs[0], ranks)


def _train_as_rank(run: "ResolvedRun", ranks: "Ranks") -> None:
    """Trains as a rank that prints nothing."""
    from can_train.training.train import train_new

    train_new(run, SilentReporter(), ranks)


def _train_runs(runs: Sequence["ResolvedRun"], ranks: "Ranks", verbosity: Verbosity, *, as_json: bool) -> None:
    from can_train.training.train import train_new

    def attempt(run: "ResolvedRun", printer: "_Printer") -> "Outcome":
        outcome = train_new(run, make_reporter(verbosity), ranks, made=printer.begin)
        _log_outcome(outcome)
        return outcome

    printer, failed = _Printer(verbosity, as_json=as_json, of_several=len(runs) > 1), []
    with printer:
        for number, run in enumerate(runs, start=1):
            if len(runs) > 1 and verbosity != Verbosity.QUIET:
                print_aside(f"run {number} of {len(runs)}: {_title(run, runs)}")
            try:
                printer.print(partial(attempt, run, printer))
            except CanTrainError as error:
                if len(runs) == 1:
                    raise
                print_aside(f"error: {error}")
                failed.append(number)
    if failed:
        some = FailedRunError("Some runs failed", value=f"{', '.join(map(str, failed))} of {len(runs)}",
                               remedy="Their errors are above")  # fmt: skip
        some.in_json = as_json
        raise some


# Several processes that a launcher started


@contextmanager
def launched_ranks(device: str, verbosity: Verbosity) -> "Iterator[Ranks]":
    """Connects the processes that a launcher has started, which train one run in the block; one that is alone needs no
    connection. A rank ends silently where another one has failed: that one, and rank 0, say why.

    Raises:
        ConfigError: The launcher does not tell what ranks need.
        RunError: They do not find each other.
    """
    from can_train.training.distributed import RankFailedError, join_ranks

    ranks = join_ranks(_own_place(verbosity), device)
    try:
        yield ranks
    except RankFailedError as error:
        if ranks.is_first:
            raise
        raise SystemExit(error.exit_code) from error
    finally:
        ranks.leave()


def _own_place(verbosity: Verbosity) -> "RankPlace | None":
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
        print_note(f"{launch}: they train one run together")
    return place


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
    raise ConfigError("The processes that a launcher starts train one run, with the same settings",
                      value=f"{name} is {', '.join(map(str, dict.fromkeys(map(str, values))))}",
                      remedy="Start each run by itself: srun --ntasks 1, or without a launcher")  # fmt: skip


def _title(run: "ResolvedRun", runs: Sequence["ResolvedRun"]) -> str:
    """Names one of several runs: its key, and the settings in which runs of that key differ."""
    from can_train.config.resolved import differences, flat_settings

    alike = [flat_settings(one.config) for one in runs if one.key == run.key]
    own = flat_settings(run.config)
    return " ".join([run.key, *(f"{name}={own.get(name)}" for name in differences(alike))])


class _Printer:
    """Prints what becomes of runs, as text or, at the end of the block, as JSON: an object of each run, however it
    ended.

    Args:
        verbosity: How much is printed.
        as_json: Whether standard output is for JSON alone.
        of_several: Whether there are several runs.
    """

    def __init__(self, verbosity: Verbosity, *, as_json: bool, of_several: bool = False) -> None:
        self._verbosity = verbosity
        self._as_json = as_json
        self._of_several = of_several
        self._folder: RunFolder | None = None
        self._found: list[Any] = []

    def begin(self, folder: "RunFolder") -> None:
        """Notes that a run is being trained."""
        self._folder = folder

    def print(self, attempt: Callable[[], "Outcome | None"], folder: "RunFolder | None" = None) -> None:
        """Trains a run by a call of `attempt`, and prints its outcome; `folder` is there if it is not a new run."""
        self._folder, error = folder, None
        try:
            if (outcome := attempt()) is not None:
                with redirect_stdout(sys.stderr) if self._as_json else nullcontext():
                    if not (self._as_json and self._verbosity == Verbosity.QUIET):
                        _print_outcome(outcome, self._verbosity)
                self._print_next(f"show {name_to_type(outcome.folder)}", wanted=not self._of_several)
        except CanTrainError as failure:
            failure.in_json, error = self._as_json, failure
            raise
        except SystemExit:
            if self._verbosity == Verbosity.QUIET and self._folder is not None:
                # The reporter, which says it otherwise, is silent.
                print_note(resume_hint(self._folder))
            raise
        finally:
            if self._as_json:
                self._found.append(_run_object(self._folder, error))

    def _print_next(self, command: str, *, wanted: bool) -> None:
        if wanted and self._verbosity != Verbosity.QUIET and not self._as_json:
            print_text(as_typed(f"More:   can-train {command}"))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._print_next("runs", wanted=self._of_several and kind is None)
        if self._as_json:
            print_json(self._found if self._of_several else self._found[0])


def _run_object(folder: "RunFolder | None", error: CanTrainError | None) -> dict[str, Any]:
    """Makes the JSON object of a run that was trained here: that of `can-train show`, and the error that ended it."""
    from can_train.cli.run_locator import RunLocator
    from can_train.cli.show import run_facts

    facts = {}
    if folder is not None:
        locator = RunLocator(str(folder.path.parent), folder.config()["paths"]["state_dir"] or None)
        facts = run_facts(locator.status(locator.find(str(folder.path))))
    return facts if error is None else {**facts, "error": error.to_plain()}


# One attempt of a run, from a command line or in a job


def continue_run(
    folder: "RunFolder", ranks: "Ranks", verbosity: Verbosity = Verbosity.NORMAL, *, as_json: bool = False
) -> None:
    """Continues a run, or prints the result of one that has finished."""
    from can_train.runs.run_folder import StopRequests

    if not ranks.is_first:
        _continue(folder, SilentReporter(), StopRequests(), lambda device: ranks)
        return
    printer = _Printer(verbosity, as_json=as_json)
    with printer:
        printer.print(lambda: _continue(folder, make_reporter(verbosity), StopRequests(), lambda device: ranks), folder)


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
        print_aside(f"error: {error}")
        raise SystemExit(error.exit_code) from error


def _continue(
    folder: "RunFolder", reporter: "Reporter", stops: "StopRequests", join: Callable[[str], "Ranks"]
) -> "Outcome | None":
    """Trains as one of the processes that `join` connects, given the run's device; the first returns the outcome."""
    from can_train.config.compose import from_plain
    from can_train.runs.run_folder import relocate_prerequisites, without_missing_prerequisites
    from can_train.training.train import train_on

    run, notices = without_missing_prerequisites(relocate_prerequisites(from_plain(folder.config()), folder.path))
    for notice in notices:
        reporter.notice(notice)
    ranks = join(run.device)
    had_finished = folder.result_path.exists()
    outcome = train_on(run, folder, reporter, stops, ranks)
    if not ranks.is_first:
        return None
    if not had_finished:
        _log_outcome(outcome)
    return outcome


def _log_outcome(outcome: "Outcome") -> None:
    """Writes to the run's log all that can be printed of its result."""
    from can_train.io.records import open_to_append

    with suppress(OSError), open_to_append(outcome.folder.log_path) as log, redirect_stdout(log):
        _print_outcome(outcome, Verbosity.VERBOSE)


def _print_outcome(outcome: "Outcome", verbosity: Verbosity) -> None:
    folder = outcome.folder
    print_judgement(outcome.summary_tables, outcome.tables, verbosity)
    print_text("")
    print_wrapped(f"Run {folder.run_id}: {outcome.summary}")
    # From here a path that lies below is short enough for a line.
    result, here = folder.result_path.resolve(), Path.cwd()
    print_text(f"Result: {result.relative_to(here) if result.is_relative_to(here) else result}")


def after_job(
    state_dir: Annotated[Path, typer.Option(help="State folder, where the registry is.")],
    status: Annotated[int, typer.Option(help="Exit status of the job step.")],
) -> None:
    """Record how a job ended, and restart its run if that makes sense.

    Standard input has the variables that the job began with.
    """
    from can_train.slurm.job import after_job as restart_after_job

    message = restart_after_job(_resubmit, state_dir, status=status, environment=sys.stdin.buffer.read())
    if message:
        print_text(f"can-train: {message}")


def _resubmit(folder: "RunFolder", cluster: "ClusterSettings", submission: "Submission") -> "JobRecord":
    from can_train.slurm.submit import submit_job

    return submit_job(continue_in_job, folder, cluster, submission)


# --dry-run


def _print_dry_runs(runs: Sequence["ResolvedRun"], flags: Flags, after: Sequence[str], verbosity: Verbosity) -> None:
    """Plans each run and prints what would be done, in full for one device and as a table for several."""
    jobs: Sequence[PlannedJob | None] = [None] * len(runs)
    if flags["submit"]:
        # Before the plans: they take seconds, and an error in a job is known at once.
        from can_train.cli.submit import plan_jobs

        jobs = plan_jobs(runs, after, quiet=flags["quiet"])
    reporter, found, failure = make_reporter(verbosity), [], None
    for run, job in zip(runs, jobs, strict=True):
        try:
            plans, unknown = _dry_plans(run, job, flags, reporter)
            if flags["json"]:
                found.append(_dry_object(run, plans, unknown))
            elif plans:
                _print_plans(run, plans, flags, verbosity)
            else:
                print_note(unknown)
        except CanTrainError as error:
            if job is None:
                raise
            # The script is printed all the same: it does not depend on the plan.
            failure, error.in_json = error, flags["json"]
            found.append({"config_key": run.key, "error": error.to_plain()})
    if flags["json"]:
        scripts = [{} if job is None else {"script": job.script} for job in jobs]
        objects = [plan | script for plan, script in zip(found, scripts, strict=True)]
        print_json(objects[0] if len(objects) == 1 else objects)
    else:
        _print_scripts(runs, jobs)
    if failure is not None:
        raise failure


def _print_scripts(runs: Sequence["ResolvedRun"], jobs: Sequence["PlannedJob | None"]) -> None:
    # An array has one script for all of its runs.
    for script in dict.fromkeys(job.script for job in jobs if job is not None and job.script is not None):
        print_text(f"\nScript that --submit would send:\n\n{script}")
    processes = {run.cluster.executor for run, job in zip(runs, jobs, strict=True) if job is not None}
    for executor in sorted(processes - {"slurm"}):
        place = "the background of this machine" if executor == "local" else "this process"
        print_text(f"\nNo script: --cluster {executor} trains in {place}.")


def _dry_plans(
    run: "ResolvedRun", job: "PlannedJob | None", flags: Flags, reporter: "Reporter"
) -> "tuple[Sequence[DryPlan], str]":
    """Plans a run for the targets that are named, else for the device of its job, else for its device here; returns
    why there is no plan where the job's device is not known, or torch is missing.
    """
    gpus, memory = split_list(flags["target_gpu"] or ""), flags["target_memory"]
    device = None if job is None or job.script is None else job.device
    if device is not None and not (gpus or memory):
        remedy = "--target-gpu or --target-memory says what else to plan for"
        if device.unknown and not device.cards:
            return [], f"No plan is made. {device.unknown}; {remedy}"
        if device.unknown:
            reporter.notice(f"{device.unknown}; {remedy}")
        gpus = device.cards
    if job is not None and (problem := _torch_problem()):
        return [], f"No plan is made here: {problem}. The job plans on its device"
    from can_train.training.dry_run import dry_plans, find_targets, host_target, nothing_left_behind

    with nothing_left_behind():
        if device is not None and device.memory_mib and not (gpus or memory) and not run.device.startswith("sim:"):
            targets = [host_target(device.memory_mib)]
        else:
            targets = find_targets(run, gpus, memory, reporter)
        return dry_plans(run, targets, reporter, ranks=device.ranks if device is not None else 1), ""


def _torch_problem() -> str:
    """Returns why torch cannot be imported, as on many login nodes; empty where it can."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch cannot be imported ({' '.join(str(error).split())})"
    return ""


def _dry_object(run: "ResolvedRun", plans: "Sequence[DryPlan]", unknown: str) -> dict[str, Any]:
    if not plans:
        return {"config_key": run.key, "data": None, "plans": [], "unknown": unknown, "config": dict(run.config)}
    from can_train.training.report import dry_json

    return dry_json(run.config, run.key, plans)


def _print_plans(run: "ResolvedRun", plans: Sequence["DryPlan"], flags: Flags, verbosity: Verbosity) -> None:
    from can_train.config.resolved import plain_to_yaml
    from can_train.training.report import data_text, dry_lines, dry_table

    details = verbosity == Verbosity.VERBOSE
    # Before anything is printed: a plan that does not fit is an error.
    lines = dry_lines(run.key, plans[0], details=details) if len(plans) == 1 else []
    if flags["show_config"]:
        print_text(plain_to_yaml(run.config))
    if lines:
        for line in lines:
            print_wrapped(line)
        return
    warnings = dict.fromkeys(warning for dry in plans for warning in dry.warnings)
    sources = dict.fromkeys(f"{dry.target.key}: {dry.target.source}" for dry in plans)
    notes = [data_text(plans[0]), *sources, *warnings]
    print_tables([TextTable(f"Plans of {run.key}", *dry_table(plans, details=details), notes)])
