"""`can-train --model ... --dataset ...`: trains runs here, submits them, or prints their plans (`--dry-run`)."""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

from can_train.cli.command import make_command
from can_train.cli.output import TextTable, make_reporter, print_tables
from can_train.cli.train_options import (
    OPTIONS,
    Flags,
    check_flags,
    make_request,
    option_parameters,
    prerequisite_parameters,
    split_names,
    training_parameters,
)
from can_train.config.overrides import split_list
from can_train.errors import CanTrainError, ConfigError, RunError

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest
    from can_train.config.resolved import ResolvedRun
    from can_train.training.dry_run import DryPlan


def make_train_command() -> Callable[..., None]:
    """Makes the command."""
    return make_command([*option_parameters(OPTIONS), *prerequisite_parameters(), *training_parameters()], _train)


def _train(flags: Flags) -> None:
    for name in ("model", "dataset"):
        if not flags[name]:
            raise ConfigError(f"--{name} is missing", remedy="Try: can-train --model gat --dataset synthetic")
    check_flags(flags)
    _check_dry_run_flags(flags)
    after = split_names(flags["after"]) if flags["after"] else ()
    runs = _resolve_runs(flags, after)
    if flags["dry_run"]:
        _print_dry_runs(runs, flags, after)
    elif flags["submit"]:
        from can_train.cli.attempt import continue_in_job
        from can_train.cli.submit import submit_runs
        from can_train.slurm.submission_plan import SubmitOptions

        options = SubmitOptions(after=after, force=flags["force"])
        submit_runs(continue_in_job, runs, options, as_json=flags["json"])
    else:
        _train_here(runs)


def _check_dry_run_flags(flags: Flags) -> None:
    for name in ("target_gpu", "target_memory", "json"):
        if flags[name] and not flags["dry_run"] and not (name == "json" and flags["submit"]):
            raise ConfigError(f"--{name.replace('_', '-')} plans and does not train", remedy="Add --dry-run")
    gpus = flags["target_gpu"]
    if gpus is not None and not split_list(gpus):
        raise ConfigError("--target-gpu names no GPU", value=repr(gpus), remedy="Name one: --target-gpu h100-80gb")


def _resolve_runs(flags: Flags, after: Sequence[str]) -> list["ResolvedRun"]:
    """Resolves one run for each combination of listed and swept values, and the finished runs that they build on."""
    # Composition imports Hydra: a command line that is wrong before it does not wait for that.
    from can_train.config.compose import expand, resolve
    from can_train.config.resolved import state_dir, with_absolute_paths
    from can_train.slurm.prerequisites import PastRuns, settled_prerequisites

    modes = split_names(flags["mode"]) if flags["mode"] else [None]
    requests: list[RunRequest] = expand(
        [
            make_request(flags, model=model, dataset=dataset, mode=mode, size=flags["size"])
            for model, dataset, mode in product(split_names(flags["model"]), split_names(flags["dataset"]), modes)
        ]
    )
    runs = [with_absolute_paths(resolve(request)) for request in requests]
    if not any(run.prerequisites for run in runs):
        return runs
    past = PastRuns(state_dir(runs[0].paths), runs[0].runs_dir, after)
    found = [settled_prerequisites(run, request, past) for run, request in zip(runs, requests, strict=True)]
    # A sweep's runs mostly build on the same one, which is said once.
    for notice in dict.fromkeys(notice for _, notices in found for notice in notices):
        print(f"note: {notice}", file=sys.stderr)
    return [run for run, _ in found]


def _train_here(runs: Sequence["ResolvedRun"]) -> None:
    """Trains one run after another; after one that fails, the others are trained all the same."""
    from can_train.cli.attempt import train_run

    if len(runs) == 1:
        train_run(runs[0])
        return
    failed = []
    for number, run in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {run.key}", file=sys.stderr)
        try:
            train_run(run)
        except CanTrainError as error:
            print(f"error: {error}", file=sys.stderr)
            failed.append(number)
    if failed:
        raise RunError("Some runs failed", value=f"{', '.join(map(str, failed))} of {len(runs)}",
                       remedy="Their errors stand above")  # fmt: skip


def _print_dry_runs(runs: Sequence["ResolvedRun"], flags: Flags, after: Sequence[str]) -> None:
    """Plans each run and prints what would be done, in full for one device and as a table for several."""
    from can_train.training.dry_run import dry_plans, find_targets, nothing_left_behind
    from can_train.training.report import dry_json

    # Before the plans: they take seconds, and an error in a job is known at once.
    scripts = _scripts(runs, after) if flags["submit"] else None
    reporter, found = make_reporter(), []
    for run in runs:
        with nothing_left_behind():
            targets = find_targets(run, split_list(flags["target_gpu"] or ""), flags["target_memory"], reporter)
            plans = dry_plans(run, targets, reporter)
        if flags["json"]:
            found.append(dry_json(run.config, run.key, plans))
        else:
            _print_plans(run, plans)
    if flags["json"]:
        if scripts is not None:
            found = [plan | {"script": script} for plan, script in zip(found, scripts, strict=True)]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=2, ensure_ascii=False))
    elif scripts is not None:
        _print_scripts(runs, scripts)


def _print_plans(run: "ResolvedRun", plans: Sequence["DryPlan"]) -> None:
    from can_train.config.resolved import plain_to_yaml
    from can_train.training.report import COLUMNS, data_text, dry_lines, dry_row

    # Before anything is printed: a plan that does not fit is an error.
    lines = dry_lines(run.key, plans[0]) if len(plans) == 1 else []
    print(plain_to_yaml(run.config))
    if lines:
        print("\n".join(lines))
        return
    warnings = list(dict.fromkeys(warning for dry in plans for warning in dry.warnings))
    sources = list(dict.fromkeys(f"{dry.target.key}: {dry.target.source}" for dry in plans))
    notes = [data_text(plans[0]), *sources, *warnings]
    print_tables([TextTable(f"Plans of {run.key}", COLUMNS, [dry_row(dry) for dry in plans], notes)])


def _scripts(runs: Sequence["ResolvedRun"], after: Sequence[str]) -> list[str | None]:
    from can_train.cli.submit import scripts
    from can_train.slurm.submission_plan import SubmitOptions

    return scripts(runs, SubmitOptions(after=after))


def _print_scripts(runs: Sequence["ResolvedRun"], scripts: Sequence[str | None]) -> None:
    # An array has one script for all of its runs.
    for script in dict.fromkeys(scripts):
        if script is not None:
            print(f"\nScript that --submit would send:\n\n{script}")
    for executor in sorted({run.cluster.executor for run in runs} - {"slurm"}):
        place = "the background of this machine" if executor == "local" else "this process"
        print(f"\nNo script: --cluster {executor} trains in {place}.")
