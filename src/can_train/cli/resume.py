"""`can-train resume RUN`: continues a run from its last checkpoint, where it ran before, or here; for longer, on
another device, with a log that has moved. Several runs, or a sweep, continue where each ran before.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli.cancel import check_answer
from can_train.cli.output import (
    Quiet,
    Verbose,
    Verbosity,
    make_reporter,
    print_aside,
    print_json,
    print_note,
    print_starting,
    print_text,
)
from can_train.cli.run_locator import AsJson, RunLocator, RunsDir, StateDir, TrustCode
from can_train.cli.train_options import with_request_flags
from can_train.errors import ConfigError, RunError, with_command_name
from can_train.io.units import counted
from can_train.report.run_facts import line_to_go_on, run_json
from can_train.runs.run_folder import RunFolder, name_to_type, new_run_id, place_in_sweep
from can_train.runs.run_state import FAILURES, FINISHED, live_row
from can_train.runs.sweep_runs import can_go_on, has_failed
from can_train.slurm import client as slurm
from can_train.slurm.launchers import check_started_once, find_launch

if TYPE_CHECKING:
    from can_train.config.settings import ClusterSettings
    from can_train.runs.registry import JobRecord
    from can_train.runs.status import RunStatus
    from can_train.slurm.script import Submission

_LISTED: Final = 10  # resumed runs that are listed


def make_resume_command(_words: Sequence[str]) -> Callable[..., None]:
    """Makes the command `resume`, with the flags of a job's request."""
    return with_request_flags(resume)


_REPLACES: Final[Mapping[str, Mapping[str, Any]]] = {
    "mem": {"mem_per_gpu": ""}, "mem_per_gpu": {"mem": ""}, "cpus": {"cpus_per_gpu": 0}, "cpus_per_gpu": {"cpus": 0},
}  # fmt: skip
"""Settings of a job that a flag takes the place of."""


def resume(  # noqa: PLR0913 - Typer makes an option of each argument
    runs: Annotated[
        list[str] | None, typer.Argument(help="A run, as in can-train show; or several, or a sweep.", metavar="RUN...")
    ] = None,
    *,
    all_failed: Annotated[
        bool,
        typer.Option(
            "--all-failed", help="The failed runs of RUN..., else of the list; not those cancelled, or diverged."
        ),
    ] = False,
    here: Annotated[bool, typer.Option("--here", help="Train in this process, wherever the run was before.")] = False,
    epochs: Annotated[
        str | None, typer.Option(help="Go on until so many epochs are done, also after the end.", metavar="INTEGER")
    ] = None,
    max_time: Annotated[
        str | None, typer.Option(help="Time of training, over all attempts, after which the run ends.", metavar="TIME")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Go on with another device. The batch stays, and is cut as that one needs.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Where the run's data are now; their content is compared.", metavar="PATH")
    ] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
    request: Mapping[str, Any],
) -> None:
    """Continue a run from its last checkpoint, where it ran before: in SLURM, in the background, or here."""
    verbosity = Verbosity.of(quiet=quiet, verbose=verbose)
    launch = find_launch()
    # Rank 0 speaks for all.
    quiet = quiet or (launch is not None and launch.rank > 0)
    locator = RunLocator(runs_dir, state_dir)
    if all_failed or (chosen := _several(locator, runs or ())):
        given = {"--here": here, "--epochs": epochs, "--max-time": max_time, "--device": device, "--dataset": dataset}
        if flag := next((flag for flag, value in given.items() if value), ""):
            raise ConfigError(f"{flag} goes with a single run", value=" ".join(runs or ["--all-failed"]),
                              remedy="Leave it out, or resume each run by itself")  # fmt: skip
        statuses = _failed(locator, runs) if all_failed else chosen
        _resume_all(statuses, locator, request, trusts_all=trust_code, as_json=as_json)
        return
    if not runs:
        raise ConfigError("RUN is missing", remedy="Name one: can-train runs lists them; or give --all-failed")
    (run,) = runs
    status = locator.status(locator.find(run))
    _check_state(status, run)
    jobs = status.facts.jobs
    in_slurm = not here and bool(jobs) and jobs[-1].executor == "slurm"
    in_job = in_slurm or (not here and bool(jobs) and jobs[-1].executor == "local")
    if in_job:
        check_started_once("A submission", "To train in the processes of a launcher, add --here")
    if in_slurm:
        check_answer(status)
    # Before the code of the run is imported, here or in a job.
    locator.trust(trusts_all=trust_code).config(status.known.folder, has_code=in_job)
    if not status.state.certain and not quiet:
        print_note(str(status.state))
    print_starting(Verbosity.QUIET if quiet else verbosity)
    from can_train.training.resume import ChangeUndo, change_request, change_run, longer_line

    folder = status.known.folder
    if device is not None and not in_job:
        from can_train.memory.meters import resolve_device

        resolve_device(device)
    settings = _checked_request(folder, _without_begin(status, request), in_slurm=in_slurm)
    make_changes = partial(change_run, folder, make_reporter(verbosity),
                           epochs=epochs, max_time=max_time, device=device, dataset=dataset)  # fmt: skip
    if in_job:
        _print_changes([*make_changes(), *change_request(folder, settings)], quiet=quiet)
        goes_on = status.facts.result is not None and folder.result() is None
        if goes_on or status.state.state != FINISHED:
            # Of two that resume it at once, the second one finds the first one's job.
            with folder.locked(doing="submitted"):
                _check_state(locator.status(status.known), run)
                job = (
                    _submit_again(status, locator, keeps_memory="cluster.mem" not in settings)
                    if in_slurm
                    else _start_again(folder, locator)
                )
                if as_json:
                    from can_train.cli.submit import job_json

                    print_json({"submitted": [job_json(job, folder)], "identical": []})
                else:
                    print_text(f"Run {job.run_id} goes on as {_place(job)}.")
                    print_text(with_command_name(f"Log:   can-train logs {name_to_type(folder)} -f"))
            return
    from can_train.cli.train import continue_run, launched_ranks

    with launched_ranks(device or folder.config()["device"], verbosity) as ranks:
        undo: AbstractContextManager[None] = nullcontext()
        if not in_job:
            before = ChangeUndo(folder)
            changes = ranks.on_rank0(make_changes)
            _print_changes(changes, quiet=quiet)
            if changes and ranks.is_first:
                undo = before.if_refused(is_alone=ranks.size == 1)
        if not quiet and (result := folder.result()) is not None:
            ended = "The run's time of training is up" if result.get("time_is_up") else "The run has finished"
            print_note(f"{ended}, and nothing is left to train. For longer:\n  {longer_line(folder, result)}")
        continue_run(folder, ranks, verbosity, as_json=as_json, undo=undo)


# Several runs


def _several(locator: RunLocator, names: Sequence[str]) -> "list[RunStatus]":
    """Returns the runs of a line that can go on; none where the line names a single run."""
    if not names or (len(names) == 1 and not locator.find_any(names[0])[0]):
        return []
    statuses = locator.statuses(names)
    if going := [status for status in statuses if can_go_on(status)]:
        return going
    named = counted(len(statuses), "run")
    raise RunError("None of these runs can go on", value=f"{named}, all queued, running or finished",
                   remedy=f"can-train status {names[0]} shows their states")  # fmt: skip


def _failed(locator: RunLocator, names: Sequence[str] | None) -> "list[RunStatus]":
    """Returns the failed runs of a line, or of the whole list."""
    if names:
        statuses = [status for status in locator.statuses(names) if has_failed(status)]
    else:
        from can_train.report.run_list import RunFilter, RunList

        listed = RunList(locator.runs(), locator.state_folder, slurm).select(RunFilter(states=FAILURES))
        statuses = listed.statuses(listed.runs)
    failed = [status for status in statuses if can_go_on(status)]
    if not failed:
        raise RunError(
            "No run has failed", value=" ".join(names or ["--all-failed"]), remedy="can-train runs lists the runs"
        )
    diverged = [status for status in failed if status.lower_lr is not None]
    if len(diverged) == len(failed):
        raise RunError("Each of the failed runs has diverged, and would again", value=counted(len(failed), "run"),
                       remedy=f"Train with a lower learning rate: {line_to_go_on(diverged[0])}")  # fmt: skip
    if diverged:
        print_note(f"{counted(len(diverged), 'run')} diverged, would again, and {'is' if len(diverged) == 1 else 'are'}"
                   f" left out. With a lower learning rate:\n  {line_to_go_on(diverged[0])}")  # fmt: skip
    return [status for status in failed if status not in diverged]


def _resume_all(
    statuses: "Sequence[RunStatus]", locator: RunLocator, request: Mapping[str, Any], *, trusts_all: bool, as_json: bool
) -> None:
    """Continues runs: in SLURM, equal requests as an array, or in the background; at last the runs without a job, one
    after another in child processes.

    Raises:
        CanTrainError: A run cannot go on; those before it in the list may have been started.
        typer.Exit: A run that trained here was stopped, or failed.
    """
    from can_train.cli.submit import job_json

    for status in statuses:
        check_answer(status)
        in_job = _executor(status) != "here"
        locator.trust(trusts_all=trusts_all).config(status.known.folder, submits=in_job, has_code=in_job)
    keeps_memory = _change_requests(statuses, request)
    jobs = [_start_again(RunFolder(status.known.folder.path), locator)
            for status in statuses if _executor(status) == "local"]  # fmt: skip
    on_slurm = [status for status in statuses if _executor(status) == "slurm"]
    for group in _alike([_request_again(status, locator, keeps_memory=keeps_memory) for status in on_slurm]):
        jobs += _submit_group(group, locator)
    if not as_json:
        for job in jobs[:_LISTED]:
            print_text(f"{job.run_id} goes on as {_place(job)}")
        if len(jobs) > _LISTED:
            print_text(f"... and {len(jobs) - _LISTED} more")
        if jobs:
            print_text(f"{counted(len(jobs), 'run')} {'goes' if len(jobs) == 1 else 'go'} on.")
    exit_code = _train_all([status for status in statuses if _executor(status) == "here"], locator,
                           ["--trust-code"] if trusts_all else [], as_json=as_json)  # fmt: skip
    if as_json:
        folders = {status.known.run_id: status.known.folder for status in statuses}
        trained = [run_json(locator.status(status.known)) for status in statuses if _executor(status) == "here"]
        print_json({"submitted": [job_json(job, folders[job.run_id]) for job in jobs], "identical": [],
                    "trained": trained})  # fmt: skip
    if exit_code:
        raise typer.Exit(exit_code)


def _place(job: "JobRecord") -> str:
    """Returns `job 5`, or `job 5 on CLUSTER` where a cluster was named: two may have a job of the same number."""
    if job.executor != "slurm":
        return f"process {job.job_id}"
    return f"job {job.slurm_job if job.resources.get('clusters') else job.job_id}"


def _executor(status: "RunStatus") -> str:
    """Returns where a run was last trained: slurm, local (in the background), or here (in a terminal)."""
    last = status.facts.jobs[-1].executor if status.facts.jobs else "here"
    return "here" if last == "debug" else last


def _train_all(statuses: "Sequence[RunStatus]", locator: RunLocator, options: Sequence[str], *, as_json: bool) -> int:
    """Trains runs one after another in child processes; returns the exit status of the last one that failed, or of the
    one that a person stopped, after which no other begins.
    """
    from can_train.slurm.submit import run_line

    if statuses:
        check_started_once(f"A line of {len(statuses)} runs", "Resume each by itself")
    places = ("--runs-dir", str(locator.runs_dir), "--state-dir", str(locator.state_folder))
    exit_code = 0
    for number, status in enumerate(statuses, start=1):
        folder = status.known.folder
        print_aside(f"Run {number} of {len(statuses)}: {folder.run_id} {status.known.label}".rstrip())
        code, was_stopped = run_line(["resume", str(folder.path.resolve()), "--here", *options, *places],
                                     sys.stderr if as_json else None)  # fmt: skip
        if was_stopped:
            return code
        exit_code = code or exit_code
    return exit_code


@dataclass(frozen=True, kw_only=True)
class _Again:
    """The request of a run that goes on; `sweep` is the name of its sweep or search, or its key."""

    folder: RunFolder
    sweep: str
    cluster: "ClusterSettings"
    submission: "Submission"
    code: Path

    def asks_like(self, other: "_Again") -> bool:
        """Returns whether two runs can be elements of one array."""
        return (self.cluster, self.code, self.submission.dependency) == (
            other.cluster, other.code, other.submission.dependency,
        )  # fmt: skip


def _change_requests(statuses: "Sequence[RunStatus]", request: Mapping[str, Any]) -> bool:
    """Changes the requests of runs' jobs; returns whether they keep the memory of their last jobs.

    Raises:
        ConfigError: A request cannot be met. None has been changed then.
    """
    from can_train.training.resume import change_request

    changes = [_checked_request(status.known.folder, _without_begin(status, request),
                                in_slurm=_executor(status) == "slurm") for status in statuses]  # fmt: skip
    for status, settings in zip(statuses, changes, strict=True):
        if settings:
            change_request(status.known.folder, settings)
    return not any("cluster.mem" in settings for settings in changes)


def _alike(requests: Sequence[_Again]) -> list[list[_Again]]:
    """Groups runs by equal requests and equal code."""
    groups: list[list[_Again]] = []
    for again in requests:
        group = next((each for each in groups if each[0].asks_like(again)), None)
        if group is None:
            groups.append(group := [])
        group.append(again)
    return groups


def _submit_group(group: "Sequence[_Again]", locator: RunLocator) -> "list[JobRecord]":
    from can_train.cli.train import continue_in_job
    from can_train.slurm.submit import start_jobs

    submission = group[0].submission
    if len(group) > 1:
        # The elements of an array begin with one name.
        submission = replace(submission, name=group[0].sweep, sweep=new_run_id("sweep"))
    with ExitStack() as locks:
        for again in group:
            locks.enter_context(again.folder.locked(doing="submitted"))
        folders = [again.folder for again in group]
        return start_jobs(continue_in_job, folders, group[0].cluster, submission, partial(_record, locator))


def _record(locator: RunLocator, jobs: "Sequence[JobRecord]") -> None:
    for job in jobs:
        locator.registry.add(job)


def _print_changes(sentences: Sequence[str], *, quiet: bool) -> None:
    for sentence in () if quiet else sentences:
        print_note(sentence)


def _check_state(status: "RunStatus", name: str) -> None:
    """Raises RunError where a run cannot go on, or goes on by itself."""
    if not status.facts.has_folder:
        raise RunError("The run's folder is gone", value=str(status.known.folder.path),
                       remedy="Train anew")  # fmt: skip
    if (row := live_row(status.facts)) is not None and not status.state.live:
        raise RunError("The run's job is still in the queue", value=f"job {row.job}",
                       remedy=f"Cancel the job first: can-train cancel {name}")  # fmt: skip
    if status.state.live and status.state.certain:
        remedy = f"Follow it with can-train logs {name} -f, or end it: can-train cancel {name}"
        raise RunError("The run is queued or running already", value=str(status.state), remedy=remedy)


def _start_again(folder: RunFolder, locator: RunLocator) -> "JobRecord":
    """Starts a process for a run in the background, and enters it into the registry."""
    from can_train.cli.train import continue_in_job
    from can_train.slurm.submit import start_process

    return start_process(continue_in_job, RunFolder(folder.path.resolve()), partial(_record, locator))


def _without_begin(status: "RunStatus", request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the request of a run that goes on: it does not wait for the time when it was to begin, once it has."""
    has_begun = _executor(status) == "slurm" and bool(status.facts.attempts)
    waits = has_begun and status.known.folder.config().get("cluster", {}).get("begin")
    return {"begin": "", **request} if waits else request


def _checked_request(folder: RunFolder, request: Mapping[str, Any], *, in_slurm: bool) -> dict[str, Any]:
    """Returns the changes to the request of a run's job, by dotted name.

    Raises:
        ConfigError: The run has no job of SLURM, or the cluster could never start the new request.
    """
    if request and not in_slurm:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in request)
        raise ConfigError(f"{flags} changes a job of SLURM", value="the run goes on without one",
                          remedy="Leave it out, or start a new run: can-train resubmit RUN --submit")  # fmt: skip
    if not request:
        return {}
    from can_train.cli.submit import print_notices, read_cluster
    from can_train.config.compose import with_changes
    from can_train.slurm.submission_plan import check_options, complete

    replaced = {other: value for name in request for other, value in _REPLACES.get(name, {}).items()}
    changes = {f"cluster.{name}": value for name, value in ({**replaced, **request}).items()}
    run = with_changes(folder.config(), (), changes)
    ready, notices = complete(run, read_cluster([run]))
    check_options(ready.cluster)
    print_notices(notices)
    return {**changes, **{name: getattr(ready.cluster, name.removeprefix("cluster.")) for name in changes}}


def _submit_again(status: "RunStatus", locator: RunLocator, *, keeps_memory: bool) -> "JobRecord":
    from can_train.cli.submit import submit_again
    from can_train.cli.train import continue_in_job
    from can_train.config.compose import from_plain

    again = _request_again(status, locator, keeps_memory=keeps_memory)
    run = from_plain(status.known.folder.config())
    return submit_again(continue_in_job, again.folder, run, again.submission, keeps_memory=keeps_memory)


def _request_again(status: "RunStatus", locator: RunLocator, *, keeps_memory: bool) -> _Again:
    from can_train.config.compose import from_plain
    from can_train.runs.status import run_statuses
    from can_train.slurm.script import Submission
    from can_train.slurm.snapshot import code_of
    from can_train.slurm.submission_plan import dependency_on

    settings = from_plain(status.known.folder.config())
    folder = RunFolder(status.known.folder.path.resolve())
    # A parent whose folder is gone is not waited for; the run itself names the missing parent.
    awaited = status.known.record.after.split(",") if status.known.record.after else []
    awaited_runs = [earlier for earlier in locator.runs() if earlier.run_id in awaited] if awaited else []
    parents = run_statuses(awaited_runs, locator.registry, slurm) if awaited else []
    dependency = dependency_on(parents, settings.cluster.executor, settings.cluster.clusters)
    name = place_in_sweep(status.known.record, folder).job_name or settings.key
    submission = Submission(name=name, state_dir=locator.state_folder, dependency=dependency, reason="resumed")
    cluster = settings.cluster
    if keeps_memory and (memory := str(status.facts.jobs[-1].resources.get("mem", ""))):
        # It may have been submitted again with more memory since its configuration was written.
        cluster = replace(cluster, mem=memory, mem_per_gpu="")
    return _Again(folder=folder, cluster=cluster, submission=submission, code=code_of(folder.path),
                  sweep=status.known.record.sweep or settings.key)  # fmt: skip
