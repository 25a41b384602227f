"""Pipelines: the stages of a preset in `configs/pipeline/`, and the work that each stage needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from can_train.config.compose import RunRequest
from can_train.config.resolved import ResolvedRun, plain_from_yaml, presets
from can_train.config.task_settings import Prerequisite
from can_train.errors import ConfigError, unknown_name
from can_train.io.records import is_file
from can_train.runs import past_runs
from can_train.runs.run_state import RunState
from can_train.runs.status import KnownRun

_GROUP: Final = "pipeline"


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """One run of a pipeline.

    Attributes:
        name: Unique name.
        model: Name of the model.
        mode: Training mode; empty for the model's default.
        size: Size of the model; empty for its default.
        needs: For each role, the stages whose runs can fill it, the preferred one first.
        sets: The stage's own settings, in Hydra's grammar.
    """

    name: str
    model: str
    mode: str = ""
    size: str = ""
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sets: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The name, with the model in parentheses."""
        return f"{self.name} ({' '.join(filter(None, (self.model, self.size)))})"


def load_stages(preset: str, folders: Sequence[Path]) -> list[PipelineStage]:
    """Reads the stages of a preset from the folders of presets. Each stage follows the stages that it needs.

    Raises:
        ConfigError: The preset does not exist or is malformed.
    """
    if preset not in presets(_GROUP, folders):
        if not presets(_GROUP, folders):
            file = f"{_GROUP}/{preset}.yaml"
            raise ConfigError("This task has no pipelines", value=f"there is no preset {file}",
                              remedy="Train it without the word pipeline, or list its stages in "
                                     f"configs/{file} beside its file")  # fmt: skip
        raise unknown_name("preset of a pipeline", preset, presets(_GROUP, folders))
    path = next(path for folder in reversed(folders) if (path := folder / _GROUP / f"{preset}.yaml").is_file())
    try:
        stages = [PipelineStage(**plain) for plain in plain_from_yaml(path.read_text())["stages"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("The preset of a pipeline is malformed", value=f"{path}: {error}",
                          remedy="A pipeline is a list of stages; each stage has: "
                                 f"{', '.join(field.name for field in fields(PipelineStage))}",
                          ) from error  # fmt: skip
    seen: set[str] = set()
    for stage in stages:
        late = [name for names in stage.needs.values() for name in names if name not in seen]
        if late or stage.name in seen:
            fact = (
                f"Stage {stage.name} does not follow a stage that it needs" if late else "Two stages have the same name"
            )
            raise ConfigError(fact, value=", ".join(late) or stage.name,
                              remedy="Mend the preset: a stage stands after the stages it needs")  # fmt: skip
        seen.add(stage.name)
    return stages


def select_stages(stages: Sequence[PipelineStage], names: Sequence[str]) -> list[PipelineStage]:
    """Returns the named stages, in the pipeline's order.

    Raises:
        ConfigError: A name is unknown.
    """
    stage_names = [stage.name for stage in stages]
    for name in names:
        if name not in stage_names:
            raise unknown_name("stage", name, stage_names)
    return [stage for stage in stages if stage.name in names]


def split_sets(sets: Sequence[str], stages: Sequence[PipelineStage]) -> dict[str, list[str]]:
    """Assigns settings to stages: `group.key=value` to all of them, `STAGE:group.key=value` to one.

    Returns:
        The settings of each stage, after its own from the preset.

    Raises:
        ConfigError: A stage is unknown or was not selected.
    """
    sets_by_stage: dict[str, list[str]] = {stage.name: [*stage.sets] for stage in stages}
    for text in sets:
        name, colon, stage_text = text.partition(":")
        if not colon or "=" in name:
            for stage_sets in sets_by_stage.values():
                stage_sets.append(text)
        elif name.strip() in sets_by_stage:
            sets_by_stage[name.strip()].append(stage_text)
        else:
            raise unknown_name("stage in --set", name.strip(), sets_by_stage)
    return sets_by_stage


REUSED: Final = "reused"
RESUMED: Final = "goes on"
RUNNING_ALREADY: Final = "at work"
NEW: Final = "new"


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """A selected stage, with its request and the resolved run."""

    stage: PipelineStage
    request: RunRequest
    run: ResolvedRun


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage and the work that it needs.

    Attributes:
        stage: The stage.
        run: Its run, without the folders of reference models that have yet to be trained.
        sources: For each role, the stage of this pipeline that trains its run.
        what: The work: REUSED, RESUMED, RUNNING_ALREADY or NEW.
        known: The existing run; None for NEW.
        state: The state of an existing run that has not finished.
        notices: Sentences about the runs that it builds on.
    """

    stage: PipelineStage
    run: ResolvedRun
    sources: Mapping[str, str]
    what: str
    known: KnownRun | None = None
    state: RunState | None = None
    notices: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name


@dataclass(frozen=True, kw_only=True)
class PipelineContext:
    """The context of the plans of stages.

    Attributes:
        stages: All stages of the pipeline by name, including those that were not selected.
        past: The existing runs.
        state_of: Returns the state of a run.
        force: Train every stage anew.
    """

    stages: Mapping[str, PipelineStage]
    past: past_runs.PastRuns
    state_of: Callable[[KnownRun], RunState]
    force: bool = False


def plan_stages(requests: Sequence[StageRequest], context: PipelineContext) -> list[PlannedStage]:
    """Plans each stage; a stage follows those that it needs.

    Raises:
        CanTrainError: A stage needs a run that does not exist, does not fit, or has not finished.
    """
    steps: dict[str, PlannedStage] = {}
    for wanted in requests:
        run, sources, notices = wanted.run, {}, []
        for needed in run.prerequisites:
            source = None if getattr(run.mode, needed.role) else _find_source(wanted, needed, steps, context)
            if isinstance(source, PlannedStage):
                sources[needed.role] = source.name
            elif source is not None:
                run = past_runs.with_folders(run, {needed.role: source.folder.path})
                notices.append(past_runs.source_notice(needed, source))
        run, more = past_runs.resolve_prerequisites(run, wanted.request, context.past, later=sources)
        made = {role: known for role, name in sources.items() if (known := steps[name].known) is not None}
        run = past_runs.with_folders(run, {role: known.folder.path for role, known in made.items()})
        # Called also with `force`: it raises an error if the data do not exist.
        data_time = max((file.stat().st_mtime for file in past_runs.data_files(run)), default=0.0)
        step = PlannedStage(stage=wanted.stage, run=run, sources=sources, what=NEW, notices=[*notices, *more])
        if not context.force and len(made) == len(sources):
            step = _with_earlier_run(step, data_time, context)
        steps[wanted.stage.name] = step
    return list(steps.values())


def _find_source(
    wanted: StageRequest, needed: Prerequisite, before: Mapping[str, PlannedStage], context: PipelineContext
) -> PlannedStage | KnownRun | None:
    """Returns the stage or finished run that fills a role; None leaves the choice to `resolve_prerequisites`.

    The first stage that is selected or was trained earlier is taken.
    """
    for name in wanted.stage.needs.get(needed.role, ()):
        if name in before:
            different = past_runs.misfits(before[name].run.config, wanted.run, needed)
            if different:
                raise ConfigError(f"The run of stage {name} does not fit as {needed.what}",
                                  value="; ".join(different),
                                  remedy="Give both stages the same data and settings")  # fmt: skip
            return before[name]
        stage = context.stages[name]
        modes, sizes = (stage.mode,) if stage.mode else needed.modes, (stage.size,) if stage.size else needed.sizes
        of_stage = replace(needed, models=(stage.model,), modes=modes, sizes=sizes)
        newest = context.past.newest(wanted.run, of_stage)
        if newest is not None:
            return newest
    return None


def _with_earlier_run(step: PlannedStage, since: float, context: PipelineContext) -> PlannedStage:
    """Looks for a finished or unfinished run with the same configuration, begun after the data last changed."""
    roles = [needed.role for needed in step.run.prerequisites]
    wanted = past_runs.identity_config(step.run.config, roles)
    same = [known for known in context.past.known if known.record.key == step.run.key
            and datetime.fromisoformat(known.record.time).timestamp() >= since
            and past_runs.identity_config(known.config, roles) == wanted]  # fmt: skip
    finished = next((known for known in same if past_runs.is_whole(known.folder)), None)
    if finished is not None:
        return replace(step, what=REUSED, known=finished)
    begun = next((known for known in same if not is_file(known.folder.result_path)), None)
    if begun is None:
        return step
    state = context.state_of(begun)
    return replace(step, what=RUNNING_ALREADY if state.live else RESUMED, known=begun, state=state)
