"""`can-train pipeline`: trains the stages of a preset, here one after another or on SLURM as a chain of jobs."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from can_train.cli.command import make_command
from can_train.cli.output import TextTable, print_tables
from can_train.cli.pipeline_tables import (
    StageResult,
    result_json,
    sent_json,
    sent_table,
    step_json,
    steps_table,
    summary_table,
)
from can_train.cli.train_options import (
    Flags,
    check_flags,
    make_request,
    option_parameters,
    options_without,
    training_parameters,
)
from can_train.config.overrides import split_list
from can_train.errors import ConfigError, RunError

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest
    from can_train.config.resolved import ResolvedRun
    from can_train.slurm.pipeline import PipelineStage, PlannedStage, StageRequest


_OF_ONE_RUN: Final = (
    "model", "mode", "size", "model_args", "max_parallel", "after", "target_gpu", "target_memory",
)  # fmt: skip
"""Options of a training line that a pipeline decides itself, or that mean nothing to several runs."""


_OPTIONS: Final[dict[str, tuple[Any, Any, str]]] = {
    **options_without(_OF_ONE_RUN),
    "submit": (bool, False, "Send the stages to SLURM, as a chain of jobs."),
    "cluster": (str | None, None, "Preset of the cluster that --submit sends them to. [slurm]"),
    "force": (bool, False, "Train anew also what has been trained already."),
    "dry_run": (bool, False, "Say which stages would be trained and which used again, write nothing, and stop."),
    "json": (bool, False, "Print JSON."),
    "set": (list[str] | None, None, "Any setting: dataset.window=50; of one stage: STAGE:model.hidden=32. Repeatable."),
    "preset": (str, "standard", "Preset of the pipeline."),
    "stages": (str | None, None, "Stages by name: autoencoder,normal. [all]"),
    "show": (bool, False, "Print the table of what there is, and stop."),
}  # fmt: skip


def make_pipeline_command() -> Callable[..., None]:
    """Makes the command; its signature is made of the options above and the training settings."""
    return make_command([*option_parameters(_OPTIONS), *training_parameters()], _pipeline)


def _pipeline(flags: Flags) -> None:
    """Train the stages of a pipeline, each on what those before it have trained.

    What has been trained already is used again, and what was interrupted goes on: the same line again is how to
    continue. Flags hold for every stage.
    """
    if not flags["dataset"]:
        raise ConfigError("--dataset is missing", remedy="Try: can-train pipeline --dataset synthetic")
    check_flags({name: value for name, value in flags.items() if name != "force"})
    # Composition imports Hydra: a line that is wrong before it does not pay for it.
    from can_train.slurm.pipeline import load_stages

    stages = load_stages(flags["preset"])
    steps = _planned(stages, _requests(stages, flags), force=flags["force"])
    as_json = flags["json"]
    if flags["dry_run"]:
        _print([step_json(step) for step in steps], steps_table(steps), as_json=as_json)
    elif flags["show"]:
        from can_train.cli.pipeline_stages import current_results

        _print_results(current_results(steps), as_json=as_json)
    elif flags["submit"]:
        _submit(steps, as_json=as_json)
    else:
        _train(steps, as_json=as_json)


def _requests(stages: Sequence["PipelineStage"], flags: Flags) -> list["StageRequest"]:
    """Resolves the run of each selected stage."""
    from can_train.slurm.pipeline import StageRequest, selected, split_sets

    names = split_list(flags["stages"]) if flags["stages"] else [stage.name for stage in stages]
    if not names:
        raise ConfigError("--stages names no stage", value=repr(flags["stages"]),
                          remedy=f"Stages: {', '.join(stage.name for stage in stages)}")  # fmt: skip
    chosen = selected(stages, names)
    sets = split_sets(flags["set_"] or (), chosen)
    found = []
    for stage in chosen:
        request = make_request(
            flags, model=stage.model, dataset=flags["dataset"], mode=stage.mode or None, size=stage.size or None
        )
        request = replace(request, sets=tuple(sets[stage.name]))
        found.append(StageRequest(stage=stage, request=request, run=_resolved(stage, request)))
    if flags["submit"] and (other := found[0].run.cluster.executor) != "slurm":
        raise ConfigError(
            "Only SLURM has a stage wait for another", value=f"--cluster {flags['cluster']} is of executor {other}",
            remedy="Leave out --submit and --cluster: the stages then train here, one after another",
        )  # fmt: skip
    return found


def _resolved(stage: "PipelineStage", request: "RunRequest") -> "ResolvedRun":
    from can_train.config.compose import expand, resolve
    from can_train.config.resolved import with_absolute_paths

    try:
        if len(expand([request])) > 1:
            raise ConfigError("A stage is one run", value=" ".join(request.sets), remedy="Give each setting one value")
        return with_absolute_paths(resolve(request))
    except ConfigError as error:
        own = f"For one stage only, give --set {stage.name}:group.key=value" if request.sets else ""
        remedy = ".\n".join(filter(None, (error.remedy, own)))
        raise ConfigError(f"Stage {stage.name}. {error.rule}", value=error.value, remedy=remedy) from error


def _planned(
    stages: Sequence["PipelineStage"], requests: Sequence["StageRequest"], *, force: bool
) -> list["PlannedStage"]:
    """Plans the stages and prints what they build on."""
    from can_train.config.resolved import state_dir
    from can_train.slurm.pipeline import PipelineContext, plan_stages
    from can_train.slurm.prerequisites import PastRuns
    from can_train.slurm.status import run_statuses

    run = requests[0].run
    past = PastRuns(state_dir(run.paths), run.runs_dir)
    context = PipelineContext(
        stages={stage.name: stage for stage in stages},
        past=past,
        state_of=lambda known: run_statuses([known], past.registry)[0].state,
        force=force,
    )
    steps = plan_stages(requests, context)
    for step in steps:
        for notice in step.notices:
            print(f"note: {step.name}: {notice}", file=sys.stderr)
    return steps


def _train(steps: Sequence["PlannedStage"], *, as_json: bool) -> None:
    from can_train.cli.pipeline_stages import train_stages

    # With --json, standard output is for the JSON alone.
    results = train_stages(steps, sys.stderr if as_json else None)
    _print_results(results, as_json=as_json)
    failed = [each.step.name for each in results if not each.result]
    if failed:
        raise RunError("Some stages have not finished", value=", ".join(failed),
                       remedy="Their errors stand above; the same line again goes on from there")  # fmt: skip


def _submit(steps: Sequence["PlannedStage"], *, as_json: bool) -> None:
    from can_train.cli.pipeline_stages import submit_stages

    sent = submit_stages(steps)
    _print([sent_json(each) for each in sent], sent_table(sent), as_json=as_json)
    if not as_json:
        print("Table of what there is: the same line with --show; one stage: can-train status RUN")


def _print_results(results: Sequence[StageResult], *, as_json: bool) -> None:
    _print([result_json(each) for each in results], summary_table(results), as_json=as_json)


def _print(values: Any, table: TextTable, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        print_tables([table])
