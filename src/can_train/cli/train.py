"""What `--dry-run` prints: configuration and plan, for one device in full, for several as a table, or as JSON."""

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from can_train.cli.options import (
    OPTIONS,
    Flags,
    check_given,
    make_request,
    parameters,
    role_parameters,
    settled_runs,
    split_names,
    training_parameters,
)
from can_train.cli.output import TextTable, make_reporter, print_tables
from can_train.config.overrides import split_list
from can_train.errors import CanTrainError, ConfigError, RunError

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest
    from can_train.config.resolved import ResolvedRun
    from can_train.training.dry_run import DryPlan


def check_planning_flags(flags: dict[str, Any]) -> None:
    """Refuses flags that only plans understand where nothing is planned, and targets that are none.

    Raises:
        ConfigError: There is such a flag.
    """
    for name in ("target_gpu", "target_memory", "json"):
        if flags[name] and not flags["dry_run"] and not (name == "json" and flags["submit"]):
            raise ConfigError(f"--{name.replace('_', '-')} plans and does not train", remedy="Add --dry-run")
    gpus = flags["target_gpu"]
    if gpus is not None and not split_list(gpus):
        raise ConfigError("--target-gpu names no GPU", value=repr(gpus), remedy="Name one: --target-gpu h100-80gb")


def print_dry_runs(runs: Sequence["ResolvedRun"], flags: dict[str, Any], awaited: Sequence[str]) -> None:
    """Plans each run and prints what would be done; writes nothing.

    Args:
        runs: At least one.
        flags: Of the line.
        awaited: Runs that a submission would wait for.

    Raises:
        CanTrainError: A target is unknown, the data cannot be read, or the training does not fit on the only target.
    """
    from can_train.training.dry_run import dry_plans, find_targets, nothing_left_behind
    from can_train.training.report import dry_json

    # First: what is wrong with the job is known at once, a plan takes seconds.
    scripts = _scripts(runs, awaited) if flags["submit"] else None
    reporter, found = make_reporter(), []
    for run in runs:
        gpus = split_list(flags["target_gpu"] or "", existing=[])
        with nothing_left_behind():
            plans = dry_plans(run, find_targets(run, gpus, flags["target_memory"], reporter), reporter)
        if flags["json"]:
            found.append(dry_json(run.config, run.key, plans))
        else:
            _print_plans(run, plans)
    if scripts is not None:
        found = [plan | {"script": script} for plan, script in zip(found, scripts, strict=False)]
    if flags["json"]:
        print(json.dumps(found[0] if len(found) == 1 else found, indent=2, ensure_ascii=False))
    elif scripts is not None:
        _print_scripts(runs, scripts)


def _scripts(runs: Sequence["ResolvedRun"], awaited: Sequence[str]) -> list[str | None]:
    from can_train.cli.submit import scripts
    from can_train.slurm.submission_plan import SubmitOptions

    return scripts(runs, SubmitOptions(after=awaited))


def _print_scripts(runs: Sequence["ResolvedRun"], scripts: Sequence[str | None]) -> None:
    """Prints each script once: an array has one for all of its runs."""
    for script in dict.fromkeys(scripts):
        if script is not None:
            print(f"\nScript that --submit would send:\n\n{script}")
    for executor in sorted({run.cluster.executor for run in runs} - {"slurm"}):
        place = "the background of this machine" if executor == "local" else "this process"
        print(f"\nNo script: --cluster {executor} trains in {place}.")


def _print_plans(run: "ResolvedRun", plans: Sequence["DryPlan"]) -> None:
    from can_train.config.resolved import plain_to_yaml
    from can_train.training.report import COLUMNS, data_text, dry_lines, dry_row

    lines = dry_lines(run.key, plans[0]) if len(plans) == 1 else []
    print(plain_to_yaml(run.config))
    if lines:
        print("\n".join(lines))
        return
    notes = list(dict.fromkeys(note for dry in plans for note in dry.warnings))
    sources = list(dict.fromkeys(f"{dry.target.key}: {dry.target.source}" for dry in plans))
    rows = [dry_row(dry) for dry in plans]
    print_tables([TextTable(f"Plans of {run.key}", COLUMNS, rows, [data_text(plans[0]), *sources, *notes])])


def make_train_command() -> Callable[..., None]:
    """Makes the command; its signature is made of the options and the training settings."""

    def train(**flags: Any) -> None:
        _train(flags)

    ours = [*parameters(OPTIONS), *role_parameters(), *training_parameters()]
    train.__signature__ = inspect.Signature(ours)  # type: ignore[attr-defined]
    return train


def _train(flags: Flags) -> None:
    for name in ("model", "dataset"):
        if not flags[name]:
            raise ConfigError(f"--{name} is missing", remedy="Try: can-train --model gat --dataset synthetic")
    check_given(flags)
    check_planning_flags(flags)
    # Composition imports Hydra, training imports torch: neither is paid for by a line that is wrong before them.
    from can_train.config.compose import expand

    awaited = split_names(flags["after"]) if flags["after"] else ()
    runs = settled_runs(expand(_requests(flags)), awaited)
    if flags["dry_run"]:
        print_dry_runs(runs, flags, awaited)
    elif flags["submit"]:
        _submit(runs, flags, awaited)
    else:
        _run_here(runs)


def _requests(flags: Flags) -> list["RunRequest"]:
    """Spells out the combinations of listed models, data sets and modes."""
    modes = split_names(flags["mode"]) if flags["mode"] else [None]
    return [
        make_request(flags, model=model, dataset=dataset, mode=mode, size=flags["size"])
        for model, dataset, mode in product(split_names(flags["model"]), split_names(flags["dataset"]), modes)
    ]


def _run_here(runs: Sequence["ResolvedRun"]) -> None:
    """Trains one run after another; one that fails does not keep the others from being trained.

    Raises:
        CanTrainError: The only run failed, or some of several.
    """
    from can_train.cli.attempt import start

    if len(runs) == 1:
        start(runs[0])
        return
    failed = []
    for number, run in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {run.key}", file=sys.stderr)
        try:
            start(run)
        except CanTrainError as error:
            print(f"error: {error}", file=sys.stderr)
            failed.append(number)
    if failed:
        raise RunError("Some runs failed", value=f"{', '.join(map(str, failed))} of {len(runs)}",
                       remedy="Their errors stand above")  # fmt: skip


def _submit(runs: Sequence["ResolvedRun"], flags: Flags, awaited: Sequence[str]) -> None:
    from can_train.cli.submit import submit_runs
    from can_train.slurm.submission_plan import SubmitOptions

    submit_runs(runs, SubmitOptions(after=awaited, force=flags["force"]), as_json=flags["json"])
