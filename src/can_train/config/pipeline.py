"""The stages of a pipeline, as a preset in `configs/pipeline/` lists them. What a stage comes to, `launch.pipeline`
decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from can_train.config.compose import config_folder, presets
from can_train.config.plain_text import plain_from_yaml
from can_train.errors import ConfigError, unknown_name

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
