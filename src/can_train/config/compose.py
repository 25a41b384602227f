"""Composes a run from presets, settings classes and overrides. The only module that imports Hydra.

    presets (configs/)  ──Hydra──┐
                                 ├─> typed config ──overrides──> settings objects, which check their values
    config.yaml of a run ────────┘

Every value that a person gives becomes an `Override`, and `_apply` is the only code that applies one.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra_zen import ZenStore, builds, make_config
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from can_train.config.overrides import Override, check_contradictions, from_flags, from_model_args, from_set
from can_train.config.resolved import PathSettings, ResolvedRun
from can_train.config.settings import ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings
from can_train.config.task_settings import ModelSpec, TaskSettings, load_task_settings
from can_train.errors import ConfigError, nearest_first, unknown_name

MOST_RUNS: Final = 1000
"""Runs of one sweep: what a scheduler's array holds by default, and far more than anybody intends."""

_SCALARS: Final = ("task", "model_name", "size", "device")
_CHOSEN_GROUPS: Final = ("dataset", "model", "mode", "cluster")
_OPEN_GROUP: Final = "cluster.additional"
"""The group that takes any key: options of sbatch."""
_WRONG_FORM: Final = "A setting does not have the right form"
_SUGGESTIONS: Final = 5


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run as a command line requests it.

    Attributes:
        model: Name of the model.
        dataset: Name of a preset, or a path.
        task: Name of the task; None: the one in `configs/config.yaml`.
        mode: Name of the mode; None: the model's default.
        size: Name of the size; None: the model's default.
        cluster: Name of a preset in `configs/cluster/`.
        memory: Name of a preset in `configs/memory/`; None: the defaults.
        device: auto, cpu, cuda[:i], sim:SIZE.
        sets: Overrides in Hydra's grammar, `group.key=value`. One of a field above, as `memory=tight`, replaces it.
        model_args: `k=v,k=v`.
        values: Values of flags by dotted key, taken literally.
    """

    model: str
    dataset: str
    task: str | None = None
    mode: str | None = None
    size: str | None = None
    cluster: str = "local"
    memory: str | None = None
    device: str = "auto"
    sets: tuple[str, ...] = ()
    model_args: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


_CHOICES: Final = ("model", "dataset", "task", "mode", "size", "cluster", "memory", "device")


def config_folder() -> Path:
    """Returns the folder of presets: inside the installed package, or at the root of the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def presets(group: str) -> list[str]:
    """Lists the presets of a group in `configs/`."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def resolve(request: RunRequest) -> ResolvedRun:
    """Composes presets, settings classes and overrides into a run.

    Raises:
        ConfigError: An unknown name (the valid ones are listed, nearest first), a value of the wrong type or out of
            range, or settings that contradict each other.
    """
    sets = [from_set(text) for text in request.sets]
    request = replace(request, **{choice.key: _parsed(choice) for choice in sets if choice.key in _CHOICES})
    task_name = request.task or str(OmegaConf.load(config_folder() / "config.yaml").task)
    task = load_task_settings(task_name)
    spec = _model_spec(task, request.model)
    mode = _mode(task, request.model, spec, request.mode)
    size = _size(task, request, spec, mode)
    dataset, named = _dataset(request.dataset)
    for group, name in (("cluster", request.cluster), ("memory", request.memory)):
        if name is not None and name not in presets(group):
            raise unknown_name(f"{group} preset", name, presets(group))
    classes = _classes(task, spec, mode)
    overrides = [
        *(override for override in sets if override.key not in _CHOICES),
        *from_model_args(request.model_args, {group: classes[group] for group in ("training", "model", "mode")}),
        *from_flags(request.values),
    ]
    check_contradictions(overrides)
    _check_roles(task, request.model, mode, overrides)
    model_preset = f"{request.model}_{size}" if size else request.model
    choices = {"dataset": dataset, "model": model_preset, "mode": mode, "cluster": request.cluster}
    config = _compose(classes, choices | ({"memory": request.memory} if request.memory else {}))
    scalars = {"task": task_name, "model_name": request.model, "size": size, "device": request.device}
    for key, value in (scalars | named).items():
        OmegaConf.update(config, key, _escaped(value))
    return _make_run(_apply(config, overrides), classes)


def from_plain(plain: Mapping[str, Any]) -> ResolvedRun:
    """Makes a run from the plain values of its `config.yaml`.

    Raises:
        ConfigError: The values do not fit the settings of this version.
    """
    return _make_run(*_load(plain))


def with_changes(plain: Mapping[str, Any], sets: Sequence[str], values: Mapping[str, Any]) -> ResolvedRun:
    """Makes a run from the plain values of another one, with some of them changed.

    Args:
        plain: The other run's `config.yaml`.
        sets: `group.key=value`, in Hydra's grammar.
        values: Further values by dotted key, taken literally.

    Raises:
        ConfigError: A setting is unknown (the nearest are listed), has two values, or does not fit.
    """
    overrides = [*map(from_set, sets), *from_flags(values)]
    check_contradictions(overrides)
    config, classes = _load(plain)
    for follower, leader in load_task_settings(config.task).follows.items():
        # The file has the resolved value: if both are equal, a change of the leader must move the follower too.
        if config.dataset[follower] == config.dataset[leader]:
            config.dataset[follower] = 0
    return _make_run(_apply(config, overrides), classes)


def evaluation_dataset(run: ResolvedRun, dataset: str | None, sets: Sequence[str]) -> Any:
    """Returns the task's settings of the data set that a finished run is evaluated on.

    Args:
        run: The finished run.
        dataset: Name of a preset, or a path; None: the run's own.
        sets: `dataset.key=value`, in Hydra's grammar.

    Raises:
        ConfigError: An unknown name, a value that does not fit, or a setting of another group.
    """
    for text in sets:
        if not from_set(text).key.startswith("dataset."):
            raise ConfigError("For a finished run, only how data are read can be set", value=f"--set {text}",
                              remedy="Give --set dataset.KEY=VALUE")  # fmt: skip
    plain = dict(run.config)
    if dataset is not None:
        request = RunRequest(
            task=run.task, model=run.model_name, mode=run.mode.name, size=run.size or None, dataset=dataset
        )
        inherited = {name: plain["dataset"][name] for name in load_task_settings(run.task).inherited}
        plain["dataset"] = {**resolve(request).config["dataset"], **inherited}
    return with_changes(plain, sets, {}).dataset


def expand(requests: Sequence[RunRequest]) -> list[RunRequest]:
    """Expands sweeps into single requests, the last setting changing fastest.

    Args:
        requests: Each of `sets` may be `group.key=1,2,3`, `choice(…)` or `range(…)`.

    Raises:
        ConfigError: A sweep has no countable values, or there are more than `MOST_RUNS` combinations.
    """
    found = []
    for request in requests:
        choices = [_swept(text) for text in request.sets]
        if (count := math.prod(map(len, choices))) > MOST_RUNS:
            raise ConfigError(f"A sweep has at most {MOST_RUNS} runs", value=f"{count}", remedy="Sweep fewer values")
        found += [replace(request, sets=sets) for sets in product(*choices)]
    return found


@cache
def _parser() -> OverridesParser:
    # Making one takes as long as a whole composition.
    return OverridesParser.create()


def _swept(text: str) -> Sequence[str]:
    """Lists the single assignments that one `--set` means."""
    try:
        override = _parser().parse_override(text)
    except HydraException:
        # Composition reports the error.
        return [text]
    if not override.is_sweep_override():
        return [text]
    if not override.is_discrete_sweep():
        raise ConfigError(
            "A sweep tries each of its values, so they must be countable",
            value=text,
            remedy="Write them out, as 0.1,0.01, or as range(0,3)",
        )
    values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError("A sweep has at least one value", value=text)
    return [f"{text.partition('=')[0]}={value}" for value in values]


def _parsed(override: Override) -> Any:
    """Reads an override's value as Hydra does; one of a flag is the value itself."""
    if not override.grammar:
        return override.value
    text = f"{override.key}={override.value}"
    try:
        parsed = _parser().parse_override(text)
    except HydraException as error:
        raise ConfigError(_WRONG_FORM, value=text) from error
    if parsed.is_sweep_override():
        raise ConfigError("A run takes one value of each setting", value=text,
                          remedy="Sweep with a training command: can-train --model … --set key=1,2")  # fmt: skip
    return parsed.value()


def _apply(config: DictConfig, overrides: Sequence[Override]) -> DictConfig:
    """Sets the values in a config, whose types they must fit."""
    known = list(_keys(OmegaConf.to_container(config)))
    for override in overrides:
        key, is_open = override.key, override.key.startswith(f"{_OPEN_GROUP}.")
        if key not in known and not is_open:
            nearest = ", ".join(nearest_first(key, known)[:_SUGGESTIONS])
            raise ConfigError("Unknown setting", value=repr(key), remedy=f"Nearest: {nearest}")
        value = _parsed(override)
        try:
            # Of a group within a group only the given keys change, as in Hydra.
            OmegaConf.update(config, key, _escaped(value), merge=isinstance(value, dict), force_add=is_open)
        except OmegaConfBaseException as error:
            raise ConfigError(_WRONG_FORM, value=_reason(error, key)) from error
    return config


def _keys(node: Any, before: str = "") -> Iterator[str]:
    """Lists the dotted keys that may be set; task, model and size decide what the others are, and may not."""
    for name, value in node.items():
        key = f"{before}{name}"
        if name != "_target_" and (before or name == "device"):
            yield key
        if isinstance(value, Mapping) and key != _OPEN_GROUP:
            yield from _keys(value, f"{key}.")


def _classes(task: TaskSettings, spec: ModelSpec, mode: str) -> dict[str, type]:
    return {"dataset": task.dataset, "model": spec.settings, "mode": task.modes[mode], "cluster": ClusterSettings,
            "training": TrainingSettings, "factor": FactorSettings, "monitor": MonitorSettings,
            "paths": PathSettings}  # fmt: skip


def _schema(settings: type) -> Any:
    # ZenStore's own wrapping of a class refuses a frozen instance.
    return builds(settings, populate_full_signature=True)


def _compose(classes: Mapping[str, type], choices: Mapping[str, str]) -> DictConfig:
    """Composes one preset of each group over the defaults of its settings class."""
    store = ZenStore(overwrite_ok=True)
    for group in _CHOSEN_GROUPS:
        store(_schema(classes[group]), group=group, name="schema")
    always = {name: _schema(cls) for name, cls in classes.items() if name not in _CHOSEN_GROUPS}
    # A memory preset changes training settings, so it stands behind them, and there need be none.
    defaults: list[Any] = ["_self_", *({name: "???"} for name in _CHOSEN_GROUPS), {"optional memory": None}]
    values: dict[str, Any] = {**dict.fromkeys(_SCALARS, ""), **dict.fromkeys(_CHOSEN_GROUPS), **always}
    store(make_config(hydra_defaults=defaults, **values), name="root")
    store.add_to_hydra_store(overwrite_ok=True)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return compose("root", overrides=[f"{group}={choice}" for group, choice in choices.items()])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("A preset does not fit the settings", value=_reason(error.__cause__ or error)) from error


def _load(plain: Mapping[str, Any]) -> tuple[DictConfig, dict[str, type]]:
    """Reads the plain values of a run as a typed config; returns it with the settings class of each group."""
    task = load_task_settings(str(plain.get("task")))
    model = str(plain.get("model_name"))
    spec, saved_mode = _model_spec(task, model), plain.get("mode")
    mode = str(saved_mode.get("name")) if isinstance(saved_mode, Mapping) else None
    classes = _classes(task, spec, _mode(task, model, spec, mode))
    groups = {group: OmegaConf.structured(_schema(cls)) for group, cls in classes.items()}
    schema = OmegaConf.create(dict.fromkeys(_SCALARS, "") | groups)
    OmegaConf.set_struct(schema, True)
    OmegaConf.set_struct(OmegaConf.select(schema, _OPEN_GROUP), False)
    try:
        merged = OmegaConf.merge(schema, _escaped(dict(plain)))
    except OmegaConfBaseException as error:
        raise ConfigError("The saved configuration does not fit this version", value=_reason(error)) from error
    assert isinstance(merged, DictConfig)
    return merged, classes


def _escaped(value: Any) -> Any:
    """Copies a value, escaping what OmegaConf would read as an interpolation: the shell's `${HOME}` is meant literally.

    Hydra's parser leaves interpolations as text, so overrides have none; presets may.
    """
    if isinstance(value, Mapping):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(inner) for inner in value]
    if not isinstance(value, str):
        return value
    # Backslashes before `${` escape it and each other; all others stand for themselves.
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)


def _make_run(config: DictConfig, classes: Mapping[str, type]) -> ResolvedRun:
    plain: Any = OmegaConf.to_container(config, resolve=True)
    values: dict[str, Any] = {name: str(plain[name]) for name in _SCALARS}
    return ResolvedRun(**values, **{name: _make_settings(cls, plain[name]) for name, cls in classes.items()})


def _make_settings(cls: Any, plain: Mapping[str, Any]) -> Any:
    # hydra_zen.instantiate would resolve texts a second time, and a path may hold `${`.
    kinds = get_type_hints(cls)
    values = {
        name: _make_settings(kinds[name], value) if is_dataclass(kinds[name]) else value
        for name, value in plain.items()
        if name != "_target_"
    }
    return cls(**values)


def _model_spec(task: TaskSettings, name: str) -> ModelSpec:
    if name not in task.models:
        error = unknown_name("model", name, task.models)
        raise ConfigError(error.rule, value=error.value, remedy=f"{error.remedy}\n{task.table()}")
    return task.models[name]


def _mode(task: TaskSettings, model: str, spec: ModelSpec, mode: str | None) -> str:
    mode = mode or spec.modes[0]
    if mode not in spec.modes:
        names = ", ".join(nearest_first(mode, spec.modes))
        raise ConfigError(f"Model {model} has no mode {mode!r}", remedy=f"Its modes: {names}\n{task.table()}")
    return mode


def _size(task: TaskSettings, request: RunRequest, spec: ModelSpec, mode: str) -> str:
    if request.size is not None and request.size not in spec.sizes:
        raise unknown_name("size", request.size, spec.sizes)
    size = request.size or (spec.sizes[0] if spec.sizes else "")
    possible = spec.only_sizes.get(mode, spec.sizes)
    if size not in possible and spec.sizes:
        given = f"--size {size}" if request.size else f"{size}, since no --size is given"
        raise ConfigError(
            f"Model {request.model} in mode {mode} comes in one size only", value=given,
            remedy=f"Add --size {possible[0]}\n{task.table()}",
        )  # fmt: skip
    return size


def _dataset(text: str) -> tuple[str, dict[str, str]]:
    """Decides whether a data set is a preset or a path; returns the preset, and the settings that a path decides."""
    name = text.replace("-", "_")
    if name in presets("dataset") and "/" not in text:
        return name, {}
    path = Path(text).expanduser()
    if "/" in text or path.exists():
        stem = path.resolve().name if path.is_dir() else path.resolve().name.split(".")[0]
        slug = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_") or "log"
        return "path", {"dataset.path": str(path), "dataset.name": slug}
    error = unknown_name("data set", text, [name for name in presets("dataset") if name != "path"])
    raise ConfigError(
        error.rule, value=error.value, remedy=f"{error.remedy}; or give the path of a log or a folder of logs"
    )


def _check_roles(task: TaskSettings, model: str, mode: str, overrides: Sequence[Override]) -> None:
    """Refuses a finished run in a role that the mode does not have."""
    own = {needed.role for needed in task.models[model].prerequisites.get(mode, ())}
    foreign = {f"mode.{needed.role}": needed.role for needed in task.prerequisites if needed.role not in own}
    for override in overrides:
        if override.key in foreign:
            having = ", ".join(f"{name} of {of}" for of, name in task.modes_with(foreign[override.key]))
            raise ConfigError(f"Mode {mode} of {model} builds on no such run", value=override.spelling,
                              remedy=f"Modes that do: {having}\n{task.table()}")  # fmt: skip


def _reason(error: BaseException, key: str = "") -> str:
    """Returns the first line of OmegaConf's message, after the key that it is about."""
    found = re.search(r"full_key: (\S+)", str(error))
    name = found.group(1) if found else key
    line = str(error).strip().splitlines()[0]
    return f"{name}: {line}" if name else line
