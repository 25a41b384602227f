"""`can-train pipeline`: trains the stages of a preset, here one after another or on SLURM as a chain of jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from can_train.cli import output
from can_train.cli.output import Verbosity
from can_train.cli.train_options import OPTIONS, Flags, check_flags, make_command, make_request
from can_train.config.resolved import presets as preset_names
from can_train.config.resolved import state_dir
from can_train.config.settings import split_list
from can_train.errors import ConfigError, FailedRunError, RunError, with_command_name
from can_train.io.units import duration, finite, seconds_between, shortened
from can_train.report.scores import by_test_set
from can_train.reporter import TextTable
from can_train.runs.registry import JobRecord, Registry
from can_train.runs.run_folder import RunFolder, make_run, short_name
from can_train.runs.status import find_run, known_runs, run_statuses
from can_train.slurm import client as slurm

if TYPE_CHECKING:
    from pathlib import Path

    from can_train.runs.pipeline import PipelineStage, PlannedStage, StageRequest
    from can_train.slurm.snapshot import Code
    from can_train.slurm.submission_plan import SubmissionPlan

_OF_ONE_RUN: Final = (
    "model", "mode", "size", "model_args", "max_parallel", "pack", "after", "target_gpu", "target_memory",
    "show_config",
)  # fmt: skip
"""Options of a training line that a pipeline decides itself, or that mean nothing to several runs."""

_OPTIONS: Final[dict[str, tuple[Any, Any, str]]] = {
    **{name: option for name, option in OPTIONS.items() if name not in _OF_ONE_RUN},
    "submit": (bool, False, "Send the stages to SLURM, as a chain of jobs."),
    "cluster": (str | None, None, "Preset of the cluster that --submit sends them to. [slurm]"),
    "force": (bool, False, "Train anew also what has been trained already."),
    "dry_run": (bool, False, "Say which stages would be trained and which used again, write nothing, and stop."),
    "json": (bool, False, "Print JSON."),
    "set": (list[str] | None, None, "Any setting: training.lr=0.01; of one stage: STAGE:model.hidden=32. Repeatable."),
    "preset": (str, "standard", "Preset of the pipeline."),
    "verbose": (bool, False, "Print also every baseline, and what the plans rest on."),
    "stages": (str | None, None, "Stages by name: autoencoder,normal. [all]"),
    "show": (bool, False, "Print the table of what there is, and stop."),
}  # fmt: skip

_METRIC: Final = "mcc"
_UNDEFINED: Final = "-"  # cell of a missing figure


def make_pipeline_command(_words: Sequence[str]) -> Callable[..., None]:
    """Makes the command."""
    return make_command(_OPTIONS, _pipeline)


def _pipeline(flags: Flags) -> None:
    """Train the stages of a pipeline; a stage builds on the runs of earlier stages.

    Finished stages are used again, and interrupted stages continue: to continue, give the same line again. Flags hold
    for every stage.
    """
    check_flags({name: value for name, value in flags.items() if name != "force"})
    verbosity = Verbosity.of(quiet=flags["quiet"], verbose=flags["verbose"])
    # Composition imports Hydra: a line that is wrong before it does not pay for it.
    from can_train.config.compose import RunRequest, folders_of
    from can_train.runs.pipeline import load_stages

    presets = folders_of(RunRequest(task=flags["task"], config_dir=flags["config_dir"] or ""))
    if not flags["dataset"] and len(names := preset_names("dataset", presets)) > 1:
        raise ConfigError("--dataset is missing", remedy=f"Its data sets: {', '.join(names)}")
    stages, as_json = load_stages(flags["preset"], presets), flags["json"]
    steps = _plan(stages, _requests(stages, flags), force=flags["force"])
    for step in () if flags["quiet"] else steps:
        for notice in step.notices:
            output.print_note(f"{step.name}: {notice}")
    if flags["submit"]:
        steps = _placed(steps, flags, verbosity)
    elif flags["yes"]:
        raise ConfigError("--yes has no effect without --submit", remedy="Leave it out")
    if flags["dry_run"]:
        _print_plan(steps, flags)
    elif flags["show"]:
        folders = {step.name: step.known.folder for step in steps if step.known is not None}
        notes = {step.name: str(step.state) if step.state is not None else "not trained yet" for step in steps}
        _print(results := _results(steps, folders, notes), _summary_table(results), as_json=as_json)
    elif flags["submit"]:
        sent = _submit_stages(steps)
        rows = [(stage["stage"], stage["run_id"], f"job {stage['job_id']}" if stage["job_id"] else stage["what"],
                 ", ".join(stage["after"])) for stage in sent]  # fmt: skip
        _print(sent, TextTable("Pipeline", ("stage", "run", "job", "after"), rows), as_json=as_json)
        if not as_json:
            output.print_text(
                with_command_name("Table of what there is: the same line with --show; one stage: can-train status RUN")
            )
    else:
        # With --json, standard output is for the JSON alone.
        results = _train_stages(steps, sys.stderr if as_json else None, verbosity)
        _print(results, _summary_table(results), as_json=as_json)
        failed = [stage["stage"] for stage in results if stage["told"]]
        if failed:
            error = FailedRunError("Some stages have not finished", value=", ".join(failed),
                                   remedy="Their errors are above; the same line again goes on from there")  # fmt: skip
            error.in_json = as_json
            raise error


def _requests(stages: Sequence[PipelineStage], flags: Flags) -> list[StageRequest]:
    """Resolves the run of each selected stage."""
    from can_train.config.compose import expand, resolve
    from can_train.config.resolved import with_absolute_paths
    from can_train.runs.pipeline import StageRequest, select_stages, split_sets

    names = split_list(flags["stages"]) if flags["stages"] else [stage.name for stage in stages]
    if not names:
        raise ConfigError("--stages names no stage", value=repr(flags["stages"]),
                          remedy=f"Stages: {', '.join(stage.name for stage in stages)}")  # fmt: skip
    selected = select_stages(stages, names)
    sets = split_sets(flags["set_"] or (), selected)
    requests = []
    for stage in selected:
        request = make_request(
            flags, model=stage.model, dataset=flags["dataset"], mode=stage.mode or None, size=stage.size or None
        )
        request = replace(request, sets=tuple(sets[stage.name]))
        try:
            if len(expand([request])) > 1:
                raise ConfigError("A stage cannot be a sweep", value=" ".join(request.sets),
                                  remedy="Give each setting one value")  # fmt: skip
            run = with_absolute_paths(resolve(request))
        except ConfigError as error:
            for_one = f"For one stage only, give --set {stage.name}:group.key=value" if request.sets else ""
            remedy = ".\n".join(filter(None, (error.remedy, for_one)))
            raise ConfigError(f"Stage {stage.name}. {error.rule}", value=error.value, remedy=remedy) from error
        requests.append(StageRequest(stage=stage, request=request, run=run))
    if flags["submit"] and (other := requests[0].run.cluster.executor) != "slurm":
        raise ConfigError(
            "Stages can only be submitted to SLURM", value=f"--cluster {flags['cluster']} is of executor {other}",
            remedy="Leave out --submit and --cluster: the stages then train here, one after another",
        )  # fmt: skip
    return requests


def _plan(stages: Sequence[PipelineStage], requests: Sequence[StageRequest], *, force: bool) -> list[PlannedStage]:
    """Plans the stages."""
    from can_train.runs.past_runs import PastRuns
    from can_train.runs.pipeline import PipelineContext, plan_stages

    run = requests[0].run
    past = PastRuns(state_dir(run.paths), run.runs_dir, slurm)
    context = PipelineContext(
        stages={stage.name: stage for stage in stages},
        past=past,
        state_of=lambda known_run: run_statuses([known_run], past.registry, slurm)[0].state,
        force=force,
    )
    return plan_stages(requests, context)


# Training here


def _train_stages(steps: Sequence[PlannedStage], stream: TextIO | None, verbosity: Verbosity) -> list[dict[str, Any]]:
    """Trains the stages that need it, each in a process of its own.

    A stage that fails stops those that build on it. Ctrl-C stops the current one, which saves itself, and the pipeline.

    Args:
        steps: The stages; each follows those that it builds on.
        stream: Where results are printed; None for standard output.
        verbosity: How much is printed beside them.

    Raises:
        RunError: Another process is training a stage already.
        SystemExit: A signal arrived; the current stage is saved.
    """
    from can_train.config.compose import changed_settings
    from can_train.runs.past_runs import with_folders
    from can_train.runs.pipeline import REUSED, RUNNING_ALREADY

    for step in steps:
        if step.what == RUNNING_ALREADY and step.known is not None and step.state is not None:
            run_id = step.known.run_id
            raise RunError(f"Stage {step.name} is being trained already", value=f"{run_id}, {step.state}",
                           remedy=f"Wait for its end (can-train logs {run_id} -f) and give the same line again, "
                                  f"or end it: can-train cancel {run_id}")  # fmt: skip
    folders: dict[str, RunFolder] = {}
    failures: dict[str, str] = {}
    for number, step in enumerate(steps, start=1):
        title = f"stage {number} of {len(steps)}: {step.stage.title}"
        missing = [name for name in dict.fromkeys(step.sources.values()) if name in failures]
        if missing:
            failures[step.name] = f"not trained: it builds on {' and '.join(missing)}"
            output.print_aside(f"{title}: {failures[step.name]}")
            continue
        if step.known is not None:
            folders[step.name] = step.known.folder
        else:
            run = with_folders(step.run, {role: folders[name].path for role, name in step.sources.items()})
            folders[step.name] = make_run(run, output.make_reporter(verbosity), changed_settings(run.config))
        if verbosity != Verbosity.QUIET:
            output.print_aside(f"{title}: {step.what}, run {folders[step.name].run_id}")
        if step.what != REUSED and not _train_stage(folders[step.name], step, stream, verbosity):
            failures[step.name] = "failed"
    return _results(steps, folders, failures)


def _train_stage(folder: RunFolder, step: PlannedStage, stream: TextIO | None, verbosity: Verbosity) -> bool:
    """Trains a run and returns whether it finished.

    Raises:
        SystemExit: It was stopped.
    """
    from can_train.runs.past_runs import is_whole
    from can_train.slurm.submit import run_line

    places = ("--runs-dir", step.run.paths.runs_dir, "--state-dir", step.run.paths.state_dir)
    amount = {Verbosity.QUIET: ["--quiet"], Verbosity.VERBOSE: ["--verbose"]}.get(verbosity, [])
    status, was_stopped = run_line(["resume", str(folder.path.resolve()), "--here", *amount, *places], stream)
    if was_stopped:
        output.print_aside(f"Stopped in stage {step.name}. The same line again goes on from there.")
        raise SystemExit(status)
    return status == 0 and is_whole(folder)


# Submitting to SLURM


def _placed(steps: list[PlannedStage], flags: Flags, verbosity: Verbosity) -> list[PlannedStage]:
    """Returns the stages, new ones at the place that `--partition auto` chooses for all of them.

    Raises:
        typer.Exit: The person who is asked does not agree.
    """
    from can_train.cli.submit import ask_to_submit, place_runs, print_places
    from can_train.runs.pipeline import REUSED, RUNNING_ALREADY

    new = [step for step in steps if step.what not in (REUSED, RUNNING_ALREADY) and step.run.cluster.wants_place]
    if not new:
        if flags["yes"] and not any(step.run.cluster.wants_place for step in steps):
            raise ConfigError("--yes has no effect without --partition auto", remedy="Leave it out")
        return steps
    placement = place_runs([step.run for step in new], output.make_reporter(verbosity))
    if not flags["json"]:
        print_places(placement, f"Places for {len(new)} stages")
    if not (flags["dry_run"] or flags["yes"]):
        ask_to_submit(placement)
    placed = {step.name: run for step, run in zip(new, placement.runs, strict=True)}
    return [replace(step, run=placed.get(step.name, step.run)) for step in steps]


def _submit_stages(steps: Sequence[PlannedStage]) -> list[dict[str, Any]]:
    """Submits the stages that have not been trained and are not running. All are checked before the first is sent.

    Args:
        steps: The stages; each follows those that it builds on.

    Returns:
        The JSON object of each stage; `job_id` is None where it has finished, or is at work already.

    Raises:
        CanTrainError: A stage cannot be submitted. Those before it have been, and the same line continues after them.
    """
    from can_train.cli.submit import print_notices, read_cluster, start_group
    from can_train.cli.train import continue_in_job
    from can_train.runs.past_runs import with_folders
    from can_train.runs.pipeline import REUSED, RUNNING_ALREADY
    from can_train.runs.scheduler import NoControllerError
    from can_train.slurm.client import where_to_submit
    from can_train.slurm.snapshot import code_of_runs, keep
    from can_train.slurm.submission_plan import plan_submission

    state, code = state_dir(steps[0].run.paths), code_of_runs([step.run for step in steps])
    try:
        partitions = read_cluster([step.run for step in steps])
    except NoControllerError as error:
        # The error's own remedy is another --cluster, but only SLURM can chain the stages.
        remedy = f"{where_to_submit()}; or leave out --submit to train the stages here"
        raise NoControllerError(error.rule, value=error.value, remedy=remedy) from error
    new = [step for step in steps if step.what not in (REUSED, RUNNING_ALREADY)]
    if new:
        print_notices(plan_submission([step.run for step in new], code.digest, partitions, force=True).notices)
        keep(code, state)
    sent, folders, live = [], {}, set()
    for step in steps:
        if step.what in (REUSED, RUNNING_ALREADY):
            assert step.known is not None, "it is somewhere"
            folders[step.name], job, after = step.known.folder, None, []
        else:
            after = [name for name in dict.fromkeys(step.sources.values()) if name in live]
            run = with_folders(step.run, {role: folders[name].path for role, name in step.sources.items()})
            run_ids = [folders[name].run_id for name in after]
            plan = plan_submission([run], code.digest, partitions, after=run_ids, force=True)
            if step.known is not None:
                folders[step.name], job = step.known.folder, _submit_again(step.known.folder, plan, code, state)
            else:
                (job,) = start_group(continue_in_job, plan.groups[0], plan, code)
                folders[step.name] = RunFolder(run.runs_dir / job.run_id)
        if step.what != REUSED:
            live.add(step.name)
        job_id, log = (job.job_id, job.log_path) if job else (None, None)
        stage = _stage_json(step, folders[step.name].run_id)
        sent.append({**stage, "job_id": job_id, "log": log, "after": after})
    return sent


def _submit_again(folder: RunFolder, plan: SubmissionPlan, code: Code, state: Path) -> JobRecord:
    """Submits an interrupted run again, with the snapshot of its code if it has one that is the user's own."""
    from can_train.cli.submit import submit_again
    from can_train.cli.train import continue_in_job
    from can_train.runs.trust import CodeTrust
    from can_train.slurm.script import Submission
    from can_train.slurm.snapshot import code_of, describe

    ((planned,),) = plan.groups
    folder = RunFolder(folder.path.resolve())
    try:
        CodeTrust(state=state).config(folder, has_code=True)
        code_of(folder.path)
    except RunError:
        describe(code, state, folder.path)
    submission = Submission(name=planned.run.key, state_dir=state, dependency=plan.dependency, reason="resumed")
    return submit_again(continue_in_job, folder, planned.run, submission)


# The tables and the JSON


def _results(
    steps: Sequence[PlannedStage], folders: Mapping[str, RunFolder], notes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Makes the JSON objects of the results of stages. `notes` has the text for those that have not finished."""
    run = steps[0].run
    registry = Registry(state_dir(run.paths))
    all_runs = known_runs(registry, run.runs_dir)
    results = []
    for step in steps:
        stage = {**_stage_json(step, None), "path": None, "state": None, "told": notes.get(step.name) or None}
        result: Mapping[str, Any] = {}
        spans: list[float] = []
        if (folder := folders.get(step.name)) is not None:
            (status,) = run_statuses([find_run(all_runs, str(folder.path))], registry, slurm)
            result = status.facts.result or {}
            spans = [seconds_between(attempt.start.start_time, attempt.end.time)
                     for attempt in status.facts.attempts if attempt.end is not None]  # fmt: skip
            stage |= {"run_id": status.known.run_id, "path": str(folder.path.resolve()), "state": status.state.state}
            stage["told"] = stage["told"] if status.facts.result is None else None
        figures = {"parameters": result.get("parameters"), "epochs": result.get("epochs"),
                   "seconds": finite(sum(spans)) if spans else None,
                   _METRIC: finite(by_test_set(result, _METRIC))}  # fmt: skip
        results.append(stage | figures)
    return results


def _stage_json(step: PlannedStage, run_id: str | None) -> dict[str, Any]:
    return {"stage": step.name, "key": step.run.key, "what": step.what, "run_id": run_id}


def _print(values: Any, table: TextTable, *, as_json: bool) -> None:
    if as_json:
        output.print_json(values)
    else:
        output.print_tables([table])


def _print_plan(steps: Sequence[PlannedStage], flags: Flags) -> None:
    """Prints the plan of each stage, and the batch scripts of those that would be submitted; which jobs these wait for
    is not known yet.
    """
    from can_train.cli.submit import Placement, plan_jobs
    from can_train.runs.pipeline import REUSED, RUNNING_ALREADY

    new = [step for step in steps if flags["submit"] and step.what not in (REUSED, RUNNING_ALREADY)]
    placement = Placement(runs=[step.run for step in new])
    jobs = plan_jobs(placement, (), quiet=flags["quiet"], together=False) if new else []
    scripts = {step.name: job.script for step, job in zip(new, jobs, strict=True)}
    objects, rows = [], []
    for step in steps:
        folders = {needed.role: getattr(step.run.mode, needed.role) or None for needed in step.run.prerequisites}
        run_id = step.known.run_id if step.known else None
        script = {"script": scripts.get(step.name)} if flags["submit"] else {}
        objects.append({**_stage_json(step, run_id), "builds_on": folders, "stages_built_on": dict(step.sources),
                        **script})  # fmt: skip
        sources = {role: step.sources.get(role) or short_name((folder or "").rpartition("/")[2])
                   for role, folder in folders.items()}  # fmt: skip
        builds_on = ", ".join(f"{role.replace('_', ' ')}: {source}" for role, source in sources.items() if source)
        rows.append((step.name, step.run.key, step.what, short_name(run_id or ""), builds_on))
    table = TextTable("Pipeline", ("stage", "configuration", "what", "run", "builds on"), rows)
    _print(objects, table, as_json=flags["json"])
    for step in () if flags["json"] else steps:
        if (script_text := scripts.get(step.name)) is not None:
            after = " and ".join(dict.fromkeys(step.sources.values()))
            waits = f", whose job waits for {after}" if after else ""
            output.print_text(f"\nScript of stage {step.name}{waits}:\n\n{script_text}")


def _summary_table(results: Sequence[Mapping[str, Any]]) -> TextTable:
    """Makes the table of the results of `_results`: a column for each test folder."""
    folders = sorted({folder for stage in results for folder in stage[_METRIC]})
    short = shortened(folders)
    rows = []
    for stage in results:
        parameters, epochs, seconds = stage["parameters"], stage["epochs"], stage["seconds"]
        rows.append((
            stage["stage"],
            short_name(stage["run_id"]) if stage["run_id"] else _UNDEFINED,
            f"{parameters:,}" if isinstance(parameters, int) else _UNDEFINED,
            _UNDEFINED if epochs is None else str(epochs),
            _UNDEFINED if seconds is None or stage["told"] else duration(seconds),
            *(f"{stage[_METRIC][folder]:.3f}" if folder in stage[_METRIC] else _UNDEFINED for folder in folders),
        ))  # fmt: skip
    notes = [f"{stage['stage']}: {stage['told']}" for stage in results if stage["told"]]
    if folders:
        notes.append(f"The columns of test folders have each one's {_METRIC}, which is never pooled")
        notes += [f"{short[folder]}: {folder}" for folder in folders if short[folder] != folder]
    columns = ("stage", "run", "parameters", "epochs", "time", *(short[folder] for folder in folders))
    return TextTable("Pipeline", columns, rows, notes)
