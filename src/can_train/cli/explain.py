"""`can-train explain LINE` and `can-train explain RUN`: which parts make the peak of a training step."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli import output
from can_train.cli.output import Verbosity
from can_train.cli.run_locator import AsJson, RunLocator, RunsDir, StateDir, TrustCode, flag_values
from can_train.cli.train import FILE_OPTIONS, RunFile, resolve_file
from can_train.cli.train_options import OPTIONS, Flags, check_flags, check_targets, make_command, resolve_runs
from can_train.config.settings import split_list
from can_train.errors import ConfigError

if TYPE_CHECKING:
    from can_train.config.resolved import ResolvedRun
    from can_train.fit.run_plan import RunPlan
    from can_train.runs.run_folder import RunFolder

_CHANGES: Final = "Record also changes that would shrink the peak."
# Options of a training line that only a training has.
_NOT_HERE = ("submit", "dry_run", "show_config", "force", "after", "yes", "target_memory")


def make_explain_command(words: Sequence[str]) -> Callable[..., None]:
    """Makes the command: of a run where the first word names one, else of a training line."""
    if not words or not words[0].startswith("-") or words[0] in ("-h", "--help"):
        return explain
    given = flag_values(words)
    options = {**OPTIONS, "config": (str | None, None, "File of a run: can-train show RUN --config.")}
    options["target_gpu"] = (str | None, None, "The GPU to explain it on: h100-80gb. Several: a100-40gb,t4.")
    options["changes"] = (bool | None, None, f"{_CHANGES} [yes]")
    if not given.get("--config"):
        return make_command(options, _explain_line, words=words)
    file = RunFile.read(given["--config"])
    return make_command({**options, **FILE_OPTIONS}, partial(_explain_file, file), words=file.completed(words))


def explain(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Annotated[
        str, typer.Argument(help="A run, as in can-train show; or the flags of a training line.", metavar="RUN-or-LINE")
    ],
    *,
    target_gpu: Annotated[
        str | None, typer.Option(help="The GPU to explain it on: h100-80gb. [the run's device]", metavar="TARGET-GPU")
    ] = None,
    changes: Annotated[bool, typer.Option(help=_CHANGES)] = True,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
    quiet: output.Quiet = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Show which parts make the peak of a training step, and changes that shrink it: of a run, or of a training line,
    as in can-train explain --task my_file.py.
    """
    check_targets(target_gpu)
    locator = RunLocator(runs_dir, state_dir)
    folder = locator.find(run).folder
    output.print_starting(Verbosity.of(quiet=quiet, verbose=False))
    from can_train.config.compose import from_plain
    from can_train.fit.run_plan import RunPlan
    from can_train.report.run_facts import read_plan

    resolved = from_plain(locator.trust(trusts_all=trust_code).config(folder))
    plain = read_plan(folder)
    plan = RunPlan.from_plain(plain) if plain else None
    if plan is not None and target_gpu and not _is_for(plan, target_gpu):
        plan = None
    _print([resolved], target_gpu, as_json=as_json, quiet=quiet, plan=plan, changes=changes, folder=folder)


def _is_for(plan: "RunPlan", target_gpu: str) -> bool:
    """Tells whether a plan is for a GPU. Micro-batches whose size was given are the same on each."""
    from can_train.memory.catalogue import find_card

    with suppress(ConfigError):
        return plan.limits is None or plan.limits.device_key == find_card(target_gpu).key
    return False


def _explain_line(flags: Flags) -> None:
    """Show which parts make the peak of a training step, and changes that shrink it."""
    _check(flags)
    output.print_starting(Verbosity.of(quiet=flags["quiet"], verbose=False))
    _print_flags(resolve_runs(flags, ()), flags)


def _explain_file(file: RunFile, flags: Flags) -> None:
    """Show which parts make the peak of a training step, and changes that shrink it."""
    _check(flags)
    output.print_starting(Verbosity.of(quiet=flags["quiet"], verbose=False))
    _print_flags(resolve_file(file, flags, ()), flags)


def _check(flags: Flags) -> None:
    for name in _NOT_HERE:
        if flags.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect with can-train explain", remedy="Leave it out")
    check_flags(flags)
    check_targets(flags["target_gpu"])


def _print_flags(runs: "Sequence[ResolvedRun]", flags: Flags) -> None:
    _print(
        runs, flags["target_gpu"], as_json=flags["json"], quiet=flags["quiet"], changes=flags["changes"] is not False
    )


def _print(  # noqa: PLR0913 - what is explained, and how it is printed
    runs: "Sequence[ResolvedRun]",
    target_gpu: str | None,
    *,
    as_json: bool,
    quiet: bool,
    changes: bool,
    plan: "RunPlan | None" = None,
    folder: "RunFolder | None" = None,
) -> None:
    from can_train.training.dry_run import explain_run
    from can_train.training.explain import explanation_tables

    gpus = split_list(target_gpu or "")
    reporter = output.make_reporter(Verbosity.of(quiet=quiet, verbose=False))
    explained = [each for run in runs for each in explain_run(run, gpus, reporter, plan=plan, changes=changes)]
    if folder is not None and (plan is not None or not gpus):
        # For its report.
        explained[0].write(folder)
    if as_json:
        objects: list[Any] = [each.to_plain() for each in explained]
        output.print_json(objects[0] if len(objects) == 1 else objects)
        return
    for each in explained:
        output.print_tables(explanation_tables(each))
        for notice in each.notices:
            output.print_wrapped(f"{notice}.")
