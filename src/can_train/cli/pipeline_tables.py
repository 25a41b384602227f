"""A pipeline as tables and as JSON: what would become of its stages, and what has become of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from can_train.cli.output import TextTable, duration, finite, seconds_between
from can_train.cli.ranking import by_test_set
from can_train.slurm.status import RunStatus, short_name
from can_train.training.run_folder import JobRecord

if TYPE_CHECKING:
    from can_train.slurm.pipeline import PlannedStage

_METRIC: Final = "mcc"


_UNDEFINED: Final = "-"
"""What stands for a figure that there is none of."""


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What has become of a stage.

    Attributes:
        step: The stage.
        found: All about its run; None: there is none.
        told: How it stands, where it has not finished.
    """

    step: PlannedStage
    found: RunStatus | None
    told: str = ""

    @property
    def result(self) -> Mapping[str, Any]:
        """What came of it; nothing where it has not finished."""
        return (self.found.facts.result if self.found else None) or {}


@dataclass(frozen=True, kw_only=True)
class SentStage:
    """What has been sent of a stage.

    Attributes:
        step: The stage.
        run_id: Its run.
        job: Its new job; None: it has finished, or is at work already.
        after: Stages that it waits for.
    """

    step: PlannedStage
    run_id: str
    job: JobRecord | None
    after: Sequence[str]


def steps_table(steps: Sequence[PlannedStage]) -> TextTable:
    """Makes the table of what would become of stages."""
    rows = [(step.name, step.run.key, step.what, _run(step), _sources(step)) for step in steps]
    return TextTable("Pipeline", ("stage", "configuration", "what", "run", "builds on"), rows)


def sent_table(sent: Sequence[SentStage]) -> TextTable:
    """Makes the table of what has been sent."""
    rows = [
        (
            each.step.name,
            each.run_id,
            f"job {each.job.job_id}" if each.job else each.step.what,
            ", ".join(each.after),
        )
        for each in sent
    ]
    return TextTable("Pipeline", ("stage", "run", "job", "after"), rows)


def sent_json(each: SentStage) -> dict[str, Any]:
    """Makes the JSON object of what has been sent of a stage."""
    return {
        "stage": each.step.name,
        "key": each.step.run.key,
        "what": each.step.what,
        "run_id": each.run_id,
        "job_id": each.job.job_id if each.job else None,
        "log": each.job.log_path if each.job else None,
        "after": list(each.after),
    }


def summary_table(results: Sequence[StageResult]) -> TextTable:
    """Makes the table of what has become of stages: a column for each test folder."""
    scores = [by_test_set(each.result, _METRIC) for each in results]
    folders = sorted({*chain.from_iterable(scores)})
    short = shortened(folders)
    rows = [
        (
            each.step.name,
            short_name(each.found.known.run_id) if each.found else _UNDEFINED,
            *_figures(each),
            *(f"{mine[folder]:.3f}" if folder in mine else _UNDEFINED for folder in folders),
        )
        for each, mine in zip(results, scores, strict=True)
    ]
    named = [f"{short[folder]}: {folder}" for folder in folders if short[folder] != folder]
    notes = [f"{each.step.name}: {each.told}" for each in results if each.told]
    notes += (
        [f"The columns of test folders have each one's {_METRIC}, which is never pooled", *named] if folders else []
    )
    columns = ("stage", "run", "parameters", "epochs", "time", *(short[folder] for folder in folders))
    return TextTable("Pipeline", columns, rows, notes)


def step_json(step: PlannedStage) -> dict[str, Any]:
    """Makes the JSON object of what would become of a stage."""
    return {
        "stage": step.name,
        "key": step.run.key,
        "what": step.what,
        "run_id": step.known.run_id if step.known else None,
        "builds_on": {needed.role: getattr(step.run.mode, needed.role) or None for needed in step.run.prerequisites},
        "stages_built_on": dict(step.sources),
    }


def result_json(each: StageResult) -> dict[str, Any]:
    """Makes the JSON object of what has become of a stage."""
    result, found = each.result, each.found
    return {
        "stage": each.step.name,
        "key": each.step.run.key,
        "what": each.step.what,
        "run_id": found.known.run_id if found else None,
        "path": str(found.known.folder.path.resolve()) if found else None,
        "state": found.state.state if found else None,
        "told": each.told or None,
        "parameters": result.get("parameters"),
        "epochs": result.get("epochs"),
        "seconds": finite(_seconds(found)) if found else None,
        _METRIC: finite(by_test_set(result, _METRIC)),
    }


def shortened(names: Sequence[str]) -> dict[str, str]:
    """Shortens names to as many of their first words as tell them all apart.

    Example:
        >>> shortened(["test_01_known_vehicle", "test_02_unknown_vehicle"])
        {'test_01_known_vehicle': 'test_01', 'test_02_unknown_vehicle': 'test_02'}
    """
    words = {name: name.split("_") for name in names}
    for count in range(1, max(map(len, words.values()), default=0)):
        short = {name: "_".join(each[:count]) for name, each in words.items()}
        if 1 < len({*short.values()}) == len(names):
            return short
    return {name: name for name in names}


def _figures(each: StageResult) -> tuple[str, str, str]:
    parameters = each.result.get("parameters")
    seconds = _seconds(each.found) if each.found and each.result else None
    return (
        f"{parameters:,}" if isinstance(parameters, int) else _UNDEFINED,
        str(each.result.get("epochs", _UNDEFINED)),
        duration(seconds) if seconds is not None else _UNDEFINED,
    )


def _seconds(found: RunStatus) -> float | None:
    """Returns how long a run's attempts took together; None: nothing tells."""
    spans = [
        seconds_between(facts.start.start_time, facts.end.time)
        for facts in found.facts.attempts
        if facts.end is not None
    ]
    return sum(spans) if spans else None


def _run(step: PlannedStage) -> str:
    return short_name(step.known.run_id) if step.known else ""


def _sources(step: PlannedStage) -> str:
    """Names the stage or the run of each role."""
    named = []
    for needed in step.run.prerequisites:
        folder = getattr(step.run.mode, needed.role)
        found = step.sources.get(needed.role) or short_name(folder.rpartition("/")[2])
        named += [f"{needed.role.replace('_', ' ')}: {found}"] if found else []
    return ", ".join(named)
