"""Composes a run from presets, settings classes and the command line. The only module that imports Hydra."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra_zen import ZenStore, builds, make_config
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from can_train.config.overrides import Assignment, check_contradictions, from_model_args, from_set
from can_train.config.resolved import PathSettings, ResolvedRun
from can_train.config.settings import ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings
from can_train.config.task_settings import ModelSpec, TaskSettings, load_task_settings
from can_train.errors import ConfigError, nearest_first, unknown_name
from can_train.reporter import Reporter

_SCALARS = ("task", "model_name", "size", "device")


_OPEN = "cluster.additional."
"""Beginning of the keys that a person may add to."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What one run was asked to be, as a command line says it.

    Attributes:
        model: Name of the model.
        dataset: Name of a preset, or a path.
        task: Name of the task; None: the one in `configs/config.yaml`.
        mode, size: Names; None: the model's defaults.
        cluster: Name of a preset in `configs/cluster/`.
        memory: Name of a preset in `configs/memory/`; None: the defaults.
        device: auto, cpu, cuda[:i], sim:SIZE.
        sets: Overrides in Hydra's grammar, `group.key=value`.
        model_args: `k=v,k=v`.
        values: Dotted key to value, from flags; applied after composition, so that a value is never parsed.
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
    task_name = request.task or str(OmegaConf.load(config_folder() / "config.yaml").task)
    task = load_task_settings(task_name)
    spec = _model_spec(task, request.model)
    mode = _mode(task, request.model, spec, request.mode)
    size = _size(task, request, spec, mode)
    dataset, dataset_values = _dataset(request.dataset)
    values = {**dataset_values, "task": task_name, "model_name": request.model, "size": size, "device": request.device}
    model_preset = f"{request.model}_{size}" if size else request.model
    if request.cluster not in presets("cluster"):
        raise unknown_name("cluster", request.cluster, presets("cluster"))
    choices = {"dataset": dataset, "model": model_preset, "mode": mode, "cluster": request.cluster}
    if request.memory is not None:
        choices["memory"] = request.memory
    given = [*map(from_set, request.sets), *from_model_args(request.model_args, spec.settings, task.modes[mode])]
    flags = [
        Assignment(key=key, value=value, spelling=f"--{key.rpartition('.')[2].replace('_', '-')}", grammar=False)
        for key, value in request.values.items()
    ]
    check_contradictions([*given, *flags])
    _check_roles(task, request.model, mode, [*given, *flags])
    _check_memory([request.memory, *(str(a.value) for a in given if a.key == "memory")])
    overrides = [f"{group}={choice}" for group, choice in choices.items()]
    overrides += [f"{_adding(assignment.key)}{assignment.key}={assignment.value}" for assignment in given]
    classes = _classes(task, spec, mode)
    config = _compose(classes, overrides)
    return _instantiated(_with_values(config, {**values, **request.values}), classes)


def from_plain(plain: Mapping[str, Any]) -> ResolvedRun:
    """Rebuilds a run from the plain values that were written into its folder.

    Raises:
        ConfigError: The values do not fit the settings of this version.
    """
    task = load_task_settings(str(plain.get("task")))
    spec = _model_spec(task, str(plain.get("model_name")))
    saved_mode = plain.get("mode")
    mode = str(saved_mode.get("name")) if isinstance(saved_mode, Mapping) else ""
    classes = _classes(task, spec, _mode(task, str(plain.get("model_name")), spec, mode))
    groups = {group: OmegaConf.structured(builds_of(cls)) for group, cls in classes.items()}
    schema = OmegaConf.create(dict.fromkeys(_SCALARS, "") | groups)
    OmegaConf.set_struct(schema, True)
    OmegaConf.set_struct(schema.cluster.additional, False)
    try:
        merged = OmegaConf.merge(schema, _literal(dict(plain)))
    except OmegaConfBaseException as error:
        raise ConfigError("The saved configuration does not fit this version", value=_named_line(error)) from error
    assert isinstance(merged, DictConfig)
    return _instantiated(merged, classes)


def _adding(key: str) -> str:
    """What lets a key be new: any option of the scheduler's may be given."""
    return "++" if key.startswith(_OPEN) else ""


def builds_of(settings: type) -> Any:
    """Makes the structured config of a settings class (`store()` of hydra-zen refuses a frozen instance)."""
    return builds(settings, populate_full_signature=True)


def _classes(task: TaskSettings, spec: ModelSpec, mode: str) -> dict[str, type]:
    return {"dataset": task.dataset, "model": spec.settings, "mode": task.modes[mode], "training": TrainingSettings,
            "factor": FactorSettings, "monitor": MonitorSettings, "cluster": ClusterSettings,
            "paths": PathSettings}  # fmt: skip


def _root(classes: Mapping[str, type]) -> Any:
    chosen = ("dataset", "model", "mode", "cluster")
    always = {name: builds_of(cls) for name, cls in classes.items() if name not in chosen}
    # A memory preset changes training settings, so it stands behind them, and there need be none.
    defaults: list[Any] = ["_self_", *({name: "???"} for name in chosen), {"optional memory": None}]
    values: dict[str, Any] = {**dict.fromkeys(_SCALARS, ""), **dict.fromkeys(chosen), **always}
    return make_config(hydra_defaults=defaults, **values)


def _compose(classes: Mapping[str, type], overrides: list[str]) -> DictConfig:
    store = ZenStore(overwrite_ok=True)
    for group in ("dataset", "model", "mode", "cluster"):
        store(builds_of(classes[group]), group=group, name="schema")
    store(_root(classes), name="root")
    store.add_to_hydra_store(overwrite_ok=True)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return compose("root", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise _composition_error(error, classes) from error


def _composition_error(error: Exception, classes: Mapping[str, type]) -> ConfigError:
    text = str(error)
    missing = re.search(r"Could not override '([\w.]+)'", text)
    if missing is None:
        cause = f"{text} {error.__cause__ or ''}"
        key = re.search(r"full_key: (\S+)", cause)
        reason = _first_line(error.__cause__ or error)
        return ConfigError(
            "A setting does not have the right form", value=f"{key.group(1)}: {reason}" if key else reason
        )
    name = missing.group(1)
    known = [f"{group}.{f.name}" for group, cls in classes.items() for f in fields(cls)]
    names = nearest_first(name, known)[:5]
    return ConfigError("Unknown setting", value=repr(name), remedy=f"Nearest: {', '.join(names)}")


def _with_values(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    for key, value in values.items():
        try:
            OmegaConf.update(config, key, _literal(value), merge=False)
        except OmegaConfBaseException as error:
            raise ConfigError("A setting does not have the right form", value=f"{key}: {_first_line(error)}") from error
    return config


def _literal(value: Any) -> Any:
    """Escapes what OmegaConf would take for an interpolation: a value given by a flag is meant as it stands."""
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_literal(inner) for inner in value]
    if not isinstance(value, str):
        return value
    # Backslashes before `${` escape it and each other; all others stand for themselves.
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)


def _instantiated(config: DictConfig, classes: Mapping[str, type]) -> ResolvedRun:
    """Makes the settings objects, which check their values."""
    plain = _plain(config)
    groups = {name: _made(cls, plain[name]) for name, cls in classes.items()}
    scalars = {name: str(plain[name]) for name in _SCALARS}
    values: dict[str, Any] = {**scalars, **groups}
    return ResolvedRun(**values, config=plain)


def _made(cls: Any, plain: Mapping[str, Any]) -> Any:
    """Makes a settings object of plain values; unlike Hydra's own way, it resolves no text a second time."""
    kinds = get_type_hints(cls)
    values = {name: _made(kinds[name], value) if is_dataclass(kinds[name]) else value for name, value in plain.items()}
    return cls(**values)


def _plain(node: Any) -> Any:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if key != "_target_"}
        return value

    return clean(OmegaConf.to_container(node, resolve=True))


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


def _dataset(text: str) -> tuple[str, dict[str, Any]]:
    """Decides whether a data set is a preset or a path; returns the preset and the values to set after composition."""
    name = text.replace("-", "_")
    if name in presets("dataset") and "/" not in text:
        return name, {}
    if "/" in text or Path(text).expanduser().exists():
        path = Path(text).expanduser()
        return "path", {"dataset.path": str(path), "dataset.name": _slug(path)}
    error = unknown_name("data set", text, _named(presets("dataset")))
    raise ConfigError(
        error.rule, value=error.value, remedy=f"{error.remedy}; or give the path of a log or a folder of logs"
    )


def _check_roles(task: TaskSettings, model: str, mode: str, given: Iterable[Assignment]) -> None:
    """Refuses a finished run for a mode that builds on none of its kind."""
    mine = {needed.role for needed in task.models[model].prerequisites.get(mode, ())}
    foreign = {f"mode.{needed.role}": needed.role for needed in task.prerequisites if needed.role not in mine}
    for assignment in given:
        if assignment.key in foreign:
            having = ", ".join(f"{name} of {of}" for of, name in task.modes_with(foreign[assignment.key]))
            raise ConfigError(f"Mode {mode} of {model} builds on no such run", value=assignment.spelling,
                              remedy=f"Modes that do: {having}\n{task.table()}")  # fmt: skip


def _check_memory(names: Iterable[str | None]) -> None:
    for name in names:
        if name is not None and name not in presets("memory"):
            raise unknown_name("memory preset", name, presets("memory"))


def _named(names: Iterable[str]) -> list[str]:
    return [name for name in names if name != "path"]


def _slug(path: Path) -> str:
    stem = path.resolve().name.split(".")[0] if not path.is_dir() else path.resolve().name
    return re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_") or "log"


def _named_line(error: BaseException) -> str:
    """What is wrong, with the setting that it is about where the error tells."""
    key = re.search(r"full_key: (\S+)", str(error))
    return f"{key.group(1)}: {_first_line(error)}" if key else _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


_NAMED: Final = 5
"""Settings that a message names."""


def changed(plain: Mapping[str, Any], sets: Sequence[str], values: Mapping[str, Any]) -> ResolvedRun:
    """Makes the run of a configuration with changes.

    Args:
        plain: A run's resolved configuration.
        sets: `group.key=value`, in Hydra's grammar.
        values: Further settings, with their values as they stand.

    Raises:
        ConfigError: A setting is unknown (the nearest are named), is given several values, or does not fit.
    """
    given = [from_set(text) for text in sets]
    flags = [
        Assignment(key=key, value=value, spelling=f"--{key.rpartition('.')[2]}", grammar=False)
        for key, value in values.items()
    ]
    check_contradictions([*given, *flags])
    parser = OverridesParser.create()
    result = _copied(plain)
    for assignment in given:
        _put(result, assignment.key, _parsed(assignment, parser))
    for assignment in flags:
        _put(result, assignment.key, assignment.value)
    try:
        return from_plain(result)
    except ConfigError as error:
        if error.__cause__ is None:
            raise
        # Only what was changed can be of the wrong form: the rest was read before.
        raise ConfigError("A setting does not have the right form", value=error.value) from error


def _parsed(assignment: Assignment, parser: OverridesParser) -> Any:
    text = f"{assignment.key}={assignment.value}"
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        raise ConfigError("A setting does not have the right form", value=text) from error
    if override.is_sweep_override():
        raise ConfigError("A run is submitted again with one value of each setting", value=text,
                          remedy="Sweep with a training line: can-train --model … --set key=1,2")  # fmt: skip
    return _copied(override.value())


def _put(plain: dict[str, Any], key: str, value: Any) -> None:
    """Changes one setting; `cluster.additional` and its like take new names too."""
    if key not in set(_names(plain)) and not _is_open(plain, key.rpartition(".")[0]):
        known = nearest_first(key, _names(plain))[:_NAMED]
        raise ConfigError("Unknown setting", value=repr(key), remedy=f"Nearest: {', '.join(known)}")
    *path, last = key.split(".")
    inner: Any = plain
    for name in path:
        inner = inner[name]
    inner[last] = value


def _is_open(plain: Mapping[str, Any], key: str) -> bool:
    """Whether a setting is a table of any names."""
    return key == "cluster.additional" and isinstance(plain.get("cluster"), Mapping)


def _names(plain: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Lists the settings in groups, by their dotted names; what says which model it is, is no setting."""
    for name, value in plain.items():
        if isinstance(value, Mapping) and f"{before}{name}" != "cluster.additional":
            yield from _names(value, f"{before}{name}.")
        elif before or name == "device":
            yield f"{before}{name}"


def _copied(value: Any) -> Any:
    """Copies plain values deeply, as what can be changed and written."""
    if isinstance(value, Mapping):
        return {str(name): _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


MOST_RUNS: Final = 1000
"""Runs of one sweep: what a scheduler's array holds by default, and far from what anybody means."""


def expand(requests: Sequence[RunRequest]) -> list[RunRequest]:
    """Spells out the combinations of swept settings, the last setting changing fastest.

    Args:
        requests: Each `sets` may hold `group.key=1,2,3`, `choice(…)` and `range(…)`.

    Returns:
        Requests without sweeps, in the order of those given.

    Raises:
        ConfigError: A sweep has no countable values, or there are more than `MOST_RUNS` combinations.
    """
    return [single for request in requests for single in _expanded(request)]


def _expanded(request: RunRequest) -> Iterator[RunRequest]:
    # One parser for them all: making it takes as long as a composition.
    parser = OverridesParser.create()
    choices = [_choices(text, parser) for text in request.sets]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_RUNS:
        raise ConfigError(f"A sweep has at most {MOST_RUNS} runs", value=f"{count}", remedy="Sweep fewer values")
    for sets in product(*choices):
        yield replace(request, sets=sets)


def _choices(text: str, parser: OverridesParser) -> Sequence[str]:
    """Returns the assignments that one `--set` stands for."""
    try:
        override = parser.parse_override(text)
    except HydraException:
        # Composition says what is wrong with it.
        return [text]
    if not override.is_sweep_override():
        return [text]
    return [f"{text.partition('=')[0]}={value}" for value in _values(override, text)]


def _values(override: Override, text: str) -> list[str]:
    if not override.is_discrete_sweep():
        raise ConfigError(
            "A sweep tries each of its values, so they must be countable",
            value=text,
            remedy="Write them out, as 0.1,0.01, or as range(0,3)",
        )
    values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError("A sweep has at least one value", value=text)
    return values


_READING = "dataset."
"""Beginning of the settings that say how data are read."""


@dataclass(frozen=True, kw_only=True)
class JudgedData:
    """Data that a finished run is asked to judge.

    Attributes:
        dataset: The task's settings of them.
        own: Whether they are what the run was trained on, wherever that lies by now.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data.
        reporter: Where progress and notices go.
    """

    dataset: Any
    own: bool
    data_root: Path
    cache: Path
    reporter: Reporter


def judged_dataset(run: ResolvedRun, dataset: str | None, sets: Sequence[str]) -> Any:
    """Settings of the data that a finished run is asked to judge.

    Args:
        run: The finished run.
        dataset: Name of a preset, or a path; None: the run's own.
        sets: `dataset.key=value`, in Hydra's grammar.

    Returns:
        The task's data-set settings.

    Raises:
        ConfigError: An unknown name, a value that does not fit, or a setting that has nothing to do with data.
    """
    for text in sets:
        if not from_set(text).key.startswith(_READING):
            raise ConfigError("A finished run is what it is: only how data are read can be set", value=f"--set {text}",
                              remedy="Give --set dataset.KEY=VALUE")  # fmt: skip
    plain = dict(run.config)
    if dataset is not None:
        request = RunRequest(
            task=run.task, model=run.model_name, mode=run.mode.name, size=run.size or None, dataset=dataset
        )
        carried = {name: plain["dataset"][name] for name in load_task_settings(run.task).carried}
        plain["dataset"] = {**resolve(request).config["dataset"], **carried}
    return changed(plain, sets, {}).dataset
