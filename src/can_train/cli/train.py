"""`can-train --model ... --dataset ...`: trains new runs here, submits them, or prints their plans (`--dry-run`). And
`can-train resubmit RUN`: a new run with the settings of another run, but for those that flags change.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from can_train.cli.attempt import RunPrinter, continue_in_job, launched_ranks, log_outcome
from can_train.cli.output import (
    Verbosity,
    make_reporter,
    print_aside,
    print_json,
    print_note,
    print_tables,
    print_text,
    print_wrapped,
)
from can_train.cli.run_locator import Run, RunLocator
from can_train.cli.train_options import (
    OPTIONS,
    Flags,
    check_flags,
    make_command,
    make_request,
    resolve_runs,
    split_names,
)
from can_train.config.resolved import user_file
from can_train.config.settings import split_list
from can_train.errors import CanTrainError, ConfigError, FailedRunError
from can_train.report.text import TextTable
from can_train.reporter import SilentReporter
from can_train.slurm import client as slurm
from can_train.slurm.launchers import check_started_once

if TYPE_CHECKING:
    from can_train.cli.submit import PlannedJob
    from can_train.config.resolved import ResolvedRun
    from can_train.reporter import Reporter
    from can_train.training.distributed import Ranks
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
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --dry-run", remedy="Add --dry-run")
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

    def attempt(run: "ResolvedRun", printer: "RunPrinter") -> "Outcome":
        outcome = train_new(run, make_reporter(verbosity), ranks, made=printer.begin)
        log_outcome(outcome)
        return outcome

    printer, failed = RunPrinter(verbosity, as_json=as_json, of_several=len(runs) > 1), []
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


def _title(run: "ResolvedRun", runs: Sequence["ResolvedRun"]) -> str:
    """Names a run among several: its key, and the settings that differ between runs of that key."""
    from can_train.config.resolved import differences, flat_settings

    alike = [flat_settings(one.config) for one in runs if one.key == run.key]
    own = flat_settings(run.config)
    return " ".join([run.key, *(f"{name}={own.get(name)}" for name in differences(alike))])


# --dry-run


def _print_dry_runs(runs: Sequence["ResolvedRun"], flags: Flags, after: Sequence[str], verbosity: Verbosity) -> None:
    """Plans each run and prints the plan, in full for one device and as a table for several."""
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


# Like another run


_CHOICES: Final = ("model", "dataset", "mode", "size", "memory", "task", "cluster", "device")


_AS_BEFORE: Final = {
    "device": (str | None, None, "auto, cpu, cuda, cuda:1; a simulated GPU: sim:2GiB. [as before]"),
    "submit": (bool, False, "Train in the background; without, where the other run was trained."),
    "trust_code": (bool, False, "Run the code that the run names, although it is not known to be yours."),
    "runs_dir": (str | None, None, "Folder of run folders: where the other run is, and the new one will be. [runs]"),
}


def make_resubmit_command() -> Callable[..., None]:
    """Makes the command `resubmit`."""
    return make_command({**OPTIONS, **_AS_BEFORE}, _resubmit, words=(), run=Run)


def _resubmit(flags: Flags) -> None:
    """Start a new run like another run, with the changes that the flags of a training line give.

    It is trained in the place of the other run. Settings of the other run stay, also where the help shows another
    default; but if a flag replaces a preset, the settings of that preset go: another model has its own settings.
    """
    locator = RunLocator(flags["runs_dir"] or user_file().values.get("runs_dir", "runs"), flags["state_dir"])
    found, trust = locator.status(locator.find(flags["run"])), locator.trust(trusts_all=flags.pop("trust_code"))
    is_new_there = flags["submit"] and not found.facts.jobs
    flags["submit"] = flags["submit"] or bool(found.facts.jobs)
    check_train_flags(flags)
    request = make_request({**flags, "device": flags["device"] or "auto"}, model="", dataset="", mode=None, size=None)
    chosen = {name: flags[name] for name in _CHOICES if flags[name]}
    if is_new_there:
        chosen["cluster"] = request.cluster
    from can_train.config.compose import preset_request, resolve_again
    from can_train.config.resolved import with_absolute_paths
    from can_train.runs.past_runs import PastRuns, resolve_prerequisites

    # Not where it was written down: the registry that was asked is the one that gets the new run.
    values: dict[str, Any] = {**request.values, "paths.state_dir": str(locator.state_folder)}
    plain = trust.config(found.known.folder, submits=flags["submit"])
    new = with_absolute_paths(resolve_again(plain, replace(request, values=values), chosen))
    after = split_names(flags["after"]) if flags["after"] else ()
    # The runs that it builds on may have been changed, or be gone.
    data = replace(preset_request(new.config), device=new.device)
    new, notices = resolve_prerequisites(new, data, PastRuns(locator.state_folder, locator.runs_dir, slurm, after))
    for notice in () if flags["quiet"] else notices:
        print_note(notice)
    start_runs([new], flags, after)
