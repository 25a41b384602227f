"""The stages of a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Final

from can_train.config.compose import RunRequest, config_folder, presets
from can_train.config.resolved import ResolvedRun, plain_from_yaml
from can_train.config.task_settings import Prerequisite
from can_train.errors import ConfigError, unknown_name
from can_train.slurm.duplicates import data_files, identity_config
from can_train.slurm.prerequisites import PastRuns, chosen, is_whole, misfits, settled_prerequisites, with_folders
from can_train.slurm.run_state import RunState
from can_train.slurm.status import KnownRun

_GROUP: Final = "pipeline"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run of a pipeline.

    Attributes:
        name: What it is called.
        model: Model.
        mode: Training mode; empty: the model's first.
        size: Size of the model; empty: its first.
        needs: By role, the stages whose runs it may build on, the best one first.
        sets: Settings of its own, in Hydra's grammar.
    """

    name: str
    model: str
    mode: str = ""
    size: str = ""
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sets: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Its name with its model."""
        return f"{self.name} ({' '.join(filter(None, (self.model, self.size)))})"


def load_stages(preset: str) -> list[Stage]:
    """Reads the stages of a preset, each after those that it needs.

    Raises:
        ConfigError: There is no such preset, or its stages are not as they should be.
    """
    if preset not in presets(_GROUP):
        raise unknown_name("preset of a pipeline", preset, presets(_GROUP))
    path = config_folder() / _GROUP / f"{preset}.yaml"
    try:
        stages = [Stage(**plain) for plain in plain_from_yaml(path.read_text())["stages"]]
    except (ValueError, TypeError, KeyError) as error:
        known = ", ".join(one.name for one in fields(Stage))
        raise ConfigError("A pipeline is a list of stages", value=f"{path}: {error}",
                          remedy=f"Of each: {known}") from error  # fmt: skip
    _check_order(stages)
    return stages


def selected(stages: Sequence[Stage], names: Sequence[str]) -> list[Stage]:
    """Picks stages by name, in the pipeline's order.

    Raises:
        ConfigError: There is no such stage; the message lists them, nearest first.
    """
    known = [stage.name for stage in stages]
    for name in names:
        if name not in known:
            raise unknown_name("stage", name, known)
    return [stage for stage in stages if stage.name in names]


def split_sets(sets: Sequence[str], stages: Sequence[Stage]) -> dict[str, list[str]]:
    """Sorts settings by stage: `group.key=value` is for every stage, `STAGE:group.key=value` for one.

    Args:
        sets: As a person gave them.
        stages: Those that are asked for.

    Returns:
        By stage its settings, in their order.

    Raises:
        ConfigError: No such stage is asked for.
    """
    found: dict[str, list[str]] = {stage.name: [*stage.sets] for stage in stages}
    for text in sets:
        name, colon, own = text.partition(":")
        if not colon or "=" in name:
            for mine in found.values():
                mine.append(text)
        elif name.strip() in found:
            found[name.strip()].append(own)
        else:
            raise unknown_name("stage in --set", name.strip(), found)
    return found


def _check_order(stages: Sequence[Stage]) -> None:
    seen: set[str] = set()
    for stage in stages:
        late = [name for names in stage.needs.values() for name in names if name not in seen]
        if late or stage.name in seen:
            value = f"{stage.name} needs {', '.join(late)}" if late else f"{stage.name} is there twice"
            raise ConfigError("A stage has a name of its own, and comes after those that it needs", value=value)
        seen.add(stage.name)


REUSED: Final = "reused"


GOES_ON: Final = "goes on"


AT_WORK: Final = "at work"


NEW: Final = "new"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A stage as it is asked for.

    Attributes:
        stage: The stage.
        request: What its run is to be.
        run: The same, resolved, its paths settled.
    """

    stage: Stage
    request: RunRequest
    run: ResolvedRun


@dataclass(frozen=True, kw_only=True)
class Step:
    """What becomes of a stage.

    Attributes:
        stage: The stage.
        run: Its run; the folders of runs that are yet to be made are missing.
        sources: By role, the stages of this pipeline whose runs it builds on.
        what: `REUSED`, `GOES_ON`, `AT_WORK` or `NEW`.
        known: The run that is there already; None: it is new.
        state: How that run stands; None where it has finished, or is new.
        notices: What was chosen, as sentences.
    """

    stage: Stage
    run: ResolvedRun
    sources: Mapping[str, str]
    what: str
    known: KnownRun | None = None
    state: RunState | None = None
    notices: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Of the stage."""
        return self.stage.name


@dataclass(frozen=True, kw_only=True)
class Lookout:
    """What steps are decided on, beside what is asked for.

    Attributes:
        stages: All stages of the pipeline by name, also those that are not asked for.
        past: The runs there are.
        state_of: Finds out how a run stands.
        force: Whether every stage is to be trained anew.
    """

    stages: Mapping[str, Stage]
    past: PastRuns
    state_of: Callable[[KnownRun], RunState]
    force: bool = False


def make_steps(asked: Sequence[Asked], lookout: Lookout) -> list[Step]:
    """Decides what becomes of each stage.

    Args:
        asked: Each after those that it needs.
        lookout: What is known of earlier runs.

    Raises:
        CanTrainError: A stage builds on a run that is not there, does not fit, or has not finished.
    """
    steps: dict[str, Step] = {}
    for one in asked:
        steps[one.stage.name] = _step(one, steps, lookout)
    return list(steps.values())


def _step(asked: Asked, before: Mapping[str, Step], lookout: Lookout) -> Step:
    run, sources, notices = asked.run, {}, []
    for needed in run.prerequisites:
        if getattr(run.mode, needed.role):
            continue
        source = _source(asked, needed, before, lookout)
        if isinstance(source, Step):
            _check(source, run, needed)
            sources[needed.role] = source.name
        elif source is not None:
            run = with_folders(run, {needed.role: source.folder.path})
            notices.append(chosen(needed, source))
    run, others = settled_prerequisites(run, asked.request, lookout.past, later=sources)
    made = {role: known for role, name in sources.items() if (known := before[name].known) is not None}
    run = with_folders(run, {role: known.folder.path for role, known in made.items()})
    step = Step(stage=asked.stage, run=run, sources=sources, what=NEW, notices=[*notices, *others])
    since = _data_changed(run)
    return step if lookout.force or len(made) < len(sources) else _again(step, since, lookout)


def _source(asked: Asked, needed: Prerequisite, before: Mapping[str, Step], lookout: Lookout) -> Step | KnownRun | None:
    """Finds where the run of a role comes from: the first of the stages that may supply it which is asked for, or which
    has been trained before; None: anything else that fits may do.
    """
    for name in asked.stage.needs.get(needed.role, ()):
        if name in before:
            return before[name]
        found = lookout.past.newest(asked.run, _narrowed(needed, lookout.stages[name]))
        if found is not None:
            return found
    return None


def _narrowed(needed: Prerequisite, stage: Stage) -> Prerequisite:
    """The same as a certain stage makes it."""
    modes, sizes = (stage.mode,) if stage.mode else needed.modes, (stage.size,) if stage.size else needed.sizes
    return replace(needed, models=(stage.model,), modes=modes, sizes=sizes)


def _check(source: Step, run: ResolvedRun, needed: Prerequisite) -> None:
    """Checks that what a stage makes can be built on."""
    different = misfits(source.run.config, run, needed)
    if different:
        raise ConfigError(f"What stage {source.name} makes does not fit as {needed.what}", value="; ".join(different),
                          remedy="Give both stages the same data and settings")  # fmt: skip


def _again(step: Step, since: float, lookout: Lookout) -> Step:
    """Finds the run that has done the same since a time, or was about to."""
    roles = [needed.role for needed in step.run.prerequisites]
    wanted = identity_config(step.run.config, roles)
    same = [
        known
        for known in lookout.past.known
        if known.record.key == step.run.key
        and datetime.fromisoformat(known.record.time).timestamp() >= since
        and identity_config(lookout.past.config(known), roles) == wanted
    ]
    finished = next((known for known in same if is_whole(known.folder)), None)
    if finished is not None:
        return replace(step, what=REUSED, known=finished)
    begun = next((known for known in same if not known.folder.result_path.exists()), None)
    if begun is None:
        return step
    state = lookout.state_of(begun)
    return replace(step, what=AT_WORK if state.live else GOES_ON, known=begun, state=state)


def _data_changed(run: ResolvedRun) -> float:
    """Returns when a data set's files last changed, in seconds of the epoch; 0 where they are made.

    Raises:
        MissingDataError: They are not there.
    """
    return max((file.stat().st_mtime for file in data_files(run)), default=0.0)
