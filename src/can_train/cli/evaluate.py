"""`can-train evaluate RUN`: judges a finished run once more, on its own data or on other data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from can_train.cli import output
from can_train.cli.output import Verbosity
from can_train.cli.run_locator import (
    AsJson,
    Device,
    Run,
    RunDataRoot,
    RunLocator,
    RunsDir,
    StateDir,
    TrustCode,
    WeightsFile,
)
from can_train.config.task_settings import NoSettings, described_tasks, load_object, load_task_settings
from can_train.errors import CanTrainError, ConfigError
from can_train.io.records import expanded


def evaluate(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    *,
    dataset: Annotated[
        str | None,
        typer.Option(help="Other data: a known data set, a file or a folder. [the run's own test part]"),
    ] = None,
    scores: Annotated[
        str | None, typer.Option(help="Write each sample's score to a .csv or .parquet file.", metavar="FILE")
    ] = None,
    device: Device = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="How the data are read: dataset.NAME=VALUE. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    weights: WeightsFile = "",
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: output.Quiet = False,
    verbose: output.Verbose = False,
    data_root: RunDataRoot = None,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
    options: Any = None,
) -> None:
    """Judge a finished run once more: on its own test data, or on other data."""
    verbosity = Verbosity.of(quiet=quiet, verbose=verbose)
    locator = RunLocator(runs_dir, state_dir)
    record = locator.find_ended(run)
    # Hydra and torch: a line that is wrong does not wait for them.
    output.print_starting(verbosity)
    from can_train.config.resolved import PathSettings
    from can_train.training.evaluate import EvaluationRequest
    from can_train.training.evaluate import evaluate as evaluate_run

    request = EvaluationRequest(
        run=record.folder.path,
        dataset=dataset,
        sets=tuple(set_ or ()),
        options=options,
        scores=expanded(scores) if scores else None,
        verbose=verbosity == Verbosity.VERBOSE,
        device=device,
        paths=PathSettings(data_root=data_root or "", state_dir=state_dir or ""),
        weights=weights,
        trust=locator.trust(trusts_all=trust_code),
    )
    evaluated = evaluate_run(request, output.make_reporter(verbosity))
    document, verdict = evaluated.document, evaluated.verdict
    if as_json:
        output.print_json(document)
        return
    if verdict.has_tables:
        output.print_judgement(evaluated.summary_tables, evaluated.tables, verbosity)
    for paragraph in verdict.paragraphs:
        output.print_text("")
        output.print_wrapped(paragraph)
    output.print_text("")
    for note in verdict.notes:
        output.print_wrapped(f"{note}.")
    seconds = document["seconds"]
    part = ", of which only the run's own test part is judged" if document["own_split"] else ""
    counted = " of ".join(f"{count:,} {name}" for name, count in evaluated.counted.items())
    output.print_wrapped(
        f"Run {document['run_id']} on {document['dataset']}{part}: {counted}; "
        f"reading took {seconds['reading']:.1f} s, scoring {seconds['scoring']:.1f} s"
    )
    if document["scores"]:
        output.print_text(f"Scores: {document['scores']}")


def make_evaluate_command(words: Sequence[str]) -> Callable[..., None]:
    """Makes the command with the evaluation options of the task whose run the words name.

    Where they name no run, as before `--help`, it has the options of every task that is declared with a description.
    """
    described = [load_object(load_task_settings(name).evaluation) for name in described_tasks()]
    settings = _evaluation_settings(words, _valued_flags(_command(described)), _valued_flags(_command(())))
    return _command(described) if settings is None else _command([settings], settings)


def _evaluation_settings(words: Sequence[str], valued: Mapping[str, bool], shared: Container[str]) -> Any:
    """Returns the dataclass of the evaluation options of the task whose run the words name; None: there is no such run.

    Args:
        words: The command line behind `evaluate`.
        valued: Whether a flag takes a value, by flag.
        shared: Flags that every task has.
    """
    flags = [word.partition("=")[0].replace("_", "-") if word.startswith("-") else "" for word in words]
    before = ["", *(flag if "=" not in word else "" for flag, word in zip(flags, words, strict=True))]
    names = [index for index, flag in enumerate(flags) if not flag and not valued.get(before[index])]
    if not names:
        return None
    # A word behind a flag that only the run's task knows may be the flag's value.
    name = words[min(names, key=lambda index: before[index].startswith("--") and before[index] not in valued)]
    locator = RunLocator.of_words(words)
    try:
        record = locator.find(name)
    except CanTrainError:
        return None  # the command itself raises the error, once its flags are read
    task = record.config.get("task", "")
    if task in described_tasks():
        return load_object(load_task_settings(task).evaluation)
    # The class of a task of one's own is imported with torch. Flags that every task has do not need it.
    if all(flag in shared for flag in flags if flag.startswith("--")):
        return NoSettings
    config = locator.trust(trusts_all="--trust-code" in flags).config(record.folder)
    code_dir = dict(config.get("paths") or {}).get("code_dir", "")
    return load_object(load_task_settings(task, code_dir).evaluation)


def _command(kinds: Sequence[Any], settings: Any = None) -> Callable[..., None]:
    """Makes the command with the fields of dataclasses as further options, and passes them on as `settings`."""
    signature = inspect.signature(evaluate, eval_str=True).parameters
    run, dataset, *further = (parameter for name, parameter in signature.items() if name != "options")
    options = {parameter.name: parameter for kind in kinds for parameter in _parameters(kind)}
    if taken := options.keys() & signature.keys():
        raise ConfigError("A task redefines an option of every evaluation", value=", ".join(sorted(taken)),
                          remedy="Rename it in the task's EvaluationSettings")  # fmt: skip

    def command(**flags: Any) -> None:
        given = {name: flags.pop(name) for name in options}
        evaluate(**flags, options=settings(**given) if settings and given else None)

    command.__signature__ = inspect.Signature([run, dataset, *options.values(), *further])  # type: ignore[attr-defined]
    command.__doc__ = evaluate.__doc__
    return command


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        default: Any = field.default if field.default_factory is MISSING else field.default_factory()
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                annotation=hints[field.name])  # fmt: skip


def _valued_flags(command: Callable[..., None]) -> dict[str, bool]:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return {flag: not getattr(parameter, "is_flag", False) for parameter in typer.main.get_command(app).params
            for flag in (*parameter.opts, *parameter.secondary_opts)}  # fmt: skip
