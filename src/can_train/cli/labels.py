"""`can-train tag RUN a b` and `can-train note RUN "…"`: a person's words about runs, which lists show and find."""

import re
from typing import Annotated, Final

import typer

from can_train.cli.output import print_json, print_text
from can_train.cli.run_locator import AsJson, RunLocator, RunOrSweep, RunsDir, StateDir
from can_train.errors import ConfigError
from can_train.io.records import utc_now
from can_train.runs.registry import LabelRecord, RunLabels
from can_train.runs.run_folder import short_name

_TAG: Final = re.compile(r"\w[\w.+@-]{0,63}")
_LONGEST_NOTE: Final = 2000  # characters


def tag(  # noqa: PLR0913 - Typer makes an option of each argument
    run: RunOrSweep,
    tags: Annotated[
        list[str] | None, typer.Argument(help="Tags to add; none: print the tags.", metavar="TAG...")
    ] = None,
    *,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="A tag to take away; repeat it.", metavar="TAG")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Add tags to a run, or to all runs of a sweep: can-train runs --tag TAG lists them."""
    for name in (*(tags or ()), *(remove or ())):
        if not _TAG.fullmatch(name):
            raise ConfigError("A tag has up to 64 letters, digits and _.+@-", value=repr(name),
                              remedy='For a sentence: can-train note RUN "…"')  # fmt: skip
    if both := set(tags or ()) & set(remove or ()):
        raise ConfigError("A tag cannot be added and taken away", value=", ".join(sorted(both)),
                          remedy="Give it once: can-train tag RUN TAG, or can-train tag RUN --remove TAG")  # fmt: skip
    _change(RunLocator(runs_dir, state_dir), run, {"added": tags or [], "removed": remove or []}, as_json=as_json)


def note(  # noqa: PLR0913 - Typer makes an option of each argument
    run: RunOrSweep,
    text: Annotated[
        str | None, typer.Argument(help="The note; without it, the note is printed.", metavar="TEXT")
    ] = None,
    *,
    clear: Annotated[bool, typer.Option("--clear", help="Take the note away.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Write a note about a run, or about all runs of a sweep, in place of an earlier one."""
    if clear and text is not None:
        raise ConfigError("A note cannot be written and taken away", value=repr(text), remedy="Leave out --clear")
    if text is not None and len(text) > _LONGEST_NOTE:
        raise ConfigError(f"A note has up to {_LONGEST_NOTE} characters", value=f"{len(text)} of them",
                          remedy="Shorten it")  # fmt: skip
    new = "" if clear else text
    _change(RunLocator(runs_dir, state_dir), run, {} if new is None else {"note": new}, as_json=as_json)


def _change(locator: RunLocator, name: str, change: dict[str, list[str] | str], *, as_json: bool) -> None:
    """Changes the labels of runs, if there is a change, and prints them."""
    _, runs = locator.find_any(name)
    for run in runs if any(value or value == "" for value in change.values()) else ():
        locator.registry.add(LabelRecord(run_id=run.run_id, time=utc_now(), **change))  # type: ignore[arg-type]
    labels = locator.registry.labels()
    shown = [(run, labels.get(run.run_id, RunLabels())) for run in runs]
    if as_json:
        print_json([{"run_id": run.run_id, "tags": [*each.tags], "note": each.note or None} for run, each in shown])
        return
    for run, each in shown:
        words = [
            f"tags {' '.join(each.tags)}" if each.tags else "no tags",
            f"note: {each.note}" if each.note else "no note",
        ]
        print_text(f"{short_name(run.run_id)}  {'; '.join(words)}")
