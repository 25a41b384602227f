"""What `--dry-run` prints: configuration and plan, for one device in full, for several as a table, or as JSON."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from can_train.cli.reporters import make_reporter
from can_train.cli.tables import TextTable, print_tables
from can_train.config.assignments import split_list
from can_train.errors import ConfigError

if TYPE_CHECKING:
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
    from can_train.training.dry_report import dry_json
    from can_train.training.dry_run import dry_plans, nothing_left_behind
    from can_train.training.targets import find_targets

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
    from can_train.launch.order import Wanted

    return scripts(runs, Wanted(after=awaited))


def _print_scripts(runs: Sequence["ResolvedRun"], scripts: Sequence[str | None]) -> None:
    """Prints each script once: an array has one for all of its runs."""
    for script in dict.fromkeys(scripts):
        if script is not None:
            print(f"\nScript that --submit would send:\n\n{script}")
    for executor in sorted({run.cluster.executor for run in runs} - {"slurm"}):
        place = "the background of this machine" if executor == "local" else "this process"
        print(f"\nNo script: --cluster {executor} trains in {place}.")


def _print_plans(run: "ResolvedRun", plans: Sequence["DryPlan"]) -> None:
    from can_train.config.plain_text import plain_to_yaml
    from can_train.training.dry_report import COLUMNS, data_text, dry_lines, dry_row, warnings_of

    lines = dry_lines(run.key, plans[0]) if len(plans) == 1 else []
    print(plain_to_yaml(run.config))
    if lines:
        print("\n".join(lines))
        return
    notes = list(dict.fromkeys(note for dry in plans for note in warnings_of(dry)))
    sources = list(dict.fromkeys(f"{dry.target.key}: {dry.target.source}" for dry in plans))
    rows = [dry_row(dry) for dry in plans]
    print_tables([TextTable(f"Plans of {run.key}", COLUMNS, rows, [data_text(plans[0]), *sources, *notes])])
