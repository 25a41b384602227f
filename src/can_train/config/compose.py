"""Composes a run from presets, settings classes and overrides. Only this module and `sweeps` import Hydra.

    presets (configs/)  ──Hydra──┐
                                 ├─> typed config ──overrides──> settings objects, which check their values
    config.yaml of a run ────────┘

`overrides` reads the values that a person gives, and applies them.
"""

import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from hydra_zen import ZenStore, make_config, make_custom_builds_fn
from hydra_zen.errors import HydraZenUnsupportedPrimitiveError
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from can_train.config import resolved
from can_train.config.overrides import (
    KINDS,
    OPEN_GROUPS,
    SETTINGS,
    TRANSLATIONS,
    Override,
    apply_overrides,
    as_given,
    as_stored,
    as_typed,
    check_contradictions,
    escaped,
    from_model_args,
    from_set,
    open_dicts,
    parsed_value,
    plain_value,
    reason_of,
    setting_keys,
)
from can_train.config.resolved import PathSettings, ResolvedRun, UserFile
from can_train.config.settings import ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings, canonical_name
from can_train.config.sweeps import may_sweep, values_of
from can_train.config.task_settings import ModelSpec, TaskSettings, load_task_settings, locate, locate_optimizer
from can_train.errors import CanTrainError, ConfigError, SettingError, nearest_first, unknown_name
from can_train.io.records import expanded, is_file
from can_train.io.units import parse_device

MOST_RUNS: Final = 1000
"""Most runs of one sweep: the default size of a scheduler's array, and far more than anybody intends."""

_SCALARS: Final = ("task", "model_name", "size", "device")
_CHOSEN_GROUPS: Final = ("dataset", "model", "mode", "cluster")

# Groups that every run has once: a preset of another group may have a block of them.
_SIDE_GROUPS: Final = ("training", "factor", "monitor")
_RESOLVER: Final = re.compile(r"\$\{\s*[\w.]+\s*:")
_PACKAGE: Final = re.compile(r"\s*#\s*@package\s+(\S+)")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run as a command line requests it."""

    model: str | None = None  # None: the task's default
    dataset: str | None = None  # name of a preset, or a path; None: the task's only one
    task: str | None = None  # None: the one in `configs/config.yaml`
    code_dir: str | None = None  # folder of the task's code; None: it is looked for
    config_dir: str = ""  # folder of a person's own presets
    mode: str | None = None  # None: the model's default
    size: str | None = None  # None: the model's default
    cluster: str = "local"  # name of a preset in `configs/cluster/`
    memory: str | None = None  # name of a preset in `configs/memory/`; None: the defaults
    device: str = "auto"  # auto, cpu, cuda[:i], sim:SIZE
    # Overrides in Hydra's grammar, `group.key=value`. One of a field above, as `memory=tight`, replaces it.
    sets: tuple[str, ...] = ()
    model_args: str = ""  # `k=v,k=v`
    values: Mapping[str, Any] = field(default_factory=dict)  # of flags by dotted key, taken literally
    user_file: UserFile | None = None  # the user's own settings; of its folders only runs_dir is read here


_CHOICES: Final = ("model", "dataset", "task", "mode", "size", "cluster", "memory", "device")


def resolve(request: RunRequest) -> ResolvedRun:
    """Composes presets, settings classes and overrides into a run.

    Raises:
        ConfigError: An unknown name (the valid ones are listed, nearest first), a value of the wrong type or out of
            range, or settings that contradict each other.
    """
    sets = [from_set(text) for text in request.sets]
    request = replace(request, **_chosen(sets))
    # Here, since a job would tell of it hours later.
    parse_device(request.device)
    task_name, code_dir, task = _task(request)
    folders = resolved.preset_folders(task.derived_from or task_name, task.configs, request.config_dir)
    if request.config_dir and not Path(request.config_dir).is_dir():
        raise ConfigError("--config-dir is not a folder", value=request.config_dir,
                          remedy="Make it, with folders such as dataset/ and model/ in it")  # fmt: skip
    model = request.model or _default(task, "model", [task.default_model] if task.default_model else [*task.models])
    spec, mode = _spec_and_mode(task, model, request.mode)
    size = _size(task, replace(request, model=model), spec, mode)
    dataset, named = _dataset(task, request.dataset, folders)
    for group, name in (("cluster", request.cluster), ("memory", request.memory)):
        if name is not None and name not in resolved.presets(group, folders):
            raise unknown_name(f"{group} preset", name, resolved.presets(group, folders))
    classes, settings = _classes(task, spec, mode), [override for override in sets if override.key not in _CHOICES]
    overrides = _overrides(task, classes, settings, replace(request, model=model, mode=mode))
    model_preset = f"{model}_{size}" if size else model
    named_presets = {"dataset": dataset, "model": model_preset, "mode": mode, "cluster": request.cluster}
    # A group with the defaults of its class needs no preset.
    choices = {
        group: name if name in resolved.presets(group, folders) else "schema" for group, name in named_presets.items()
    }
    choices |= {"memory": request.memory} if request.memory else {}
    config = deepcopy(_compose(_Composition.of(task, classes, choices, folders)))
    open_dicts(config)
    scalars = {"task": task_name, "model_name": model, "size": size, "device": request.device,
               "paths.code_dir": code_dir, "paths.config_dir": request.config_dir}  # fmt: skip
    for key, value in (scalars | {"mode.name": mode} | named).items():
        OmegaConf.update(config, key, escaped(value))
    if request.user_file is not None:
        _apply_user_file(config, request.user_file, classes)
    return _make_changed(config, overrides, classes)


def folders_of(request: RunRequest) -> list[Path]:
    """Lists the folders of presets for the task of a request; a later folder wins."""
    name, _, task = _task(request)
    return resolved.preset_folders(task.derived_from or name, task.configs, request.config_dir)


def _task(request: RunRequest) -> tuple[str, str, TaskSettings]:
    """Returns the task of a request as a run has it: its name, the folder of its code, its description."""
    name = request.task or resolved.default_task()
    name, code_dir = (name, request.code_dir) if request.code_dir is not None else locate(name)
    return name, code_dir, load_task_settings(name, code_dir)


def _task_of(plain: Mapping[str, Any]) -> TaskSettings:
    """Returns the description of the task of a run with these plain values."""
    if "task" not in plain:
        found = f"its keys are {', '.join(map(str, plain)) or 'none'}"
        raise ConfigError(
            "A configuration names its task", value=found, remedy="Give all values of a run's config.yaml"
        )
    paths = plain.get("paths")
    code_dir = str(paths.get("code_dir", "")) if isinstance(paths, Mapping) else ""
    return load_task_settings(str(plain.get("task")), code_dir)


def _overrides(
    task: TaskSettings, classes: Mapping[str, type], sets: Sequence[Override], request: RunRequest
) -> list[Override]:
    """Returns the settings that a request gives, each with the key that it has in this task. The request has a model
    and a mode; a finished run in a role that the mode does not have is refused.
    """
    groups = ("training", "model", "mode", "settings")
    overrides = [*sets, *from_model_args(request.model_args, {group: classes[group] for group in groups})]
    for key, value in request.values.items():
        spelling = f"--{key.rpartition('.')[2].replace('_', '-')}"
        overrides.append(Override(key=as_stored(key), value=value, spelling=spelling, grammar=False))
    keys = {f"training.{alias}": f"training.{name}" for alias, name in task.aliases.items()}
    if not fields(classes["model"]):
        # A task whose only model has no settings keeps the model's settings in its own.
        keys |= {f"model.{field.name}": f"settings.{field.name}" for field in fields(classes["settings"])}
    renamed = [replace(override, key=keys.get(override.key, override.key)) for override in overrides]
    check_contradictions(renamed)
    prerequisites = task.models[str(request.model)].prerequisites.get(str(request.mode), ())
    foreign = {f"mode.{needed.role}": needed.role for needed in task.prerequisites}
    for needed in prerequisites:
        foreign.pop(f"mode.{needed.role}")
    for override in renamed:
        if override.key in foreign:
            having = ", ".join(f"{mode} of {model}" for model, spec in task.models.items()
                               for mode, builds_on in spec.prerequisites.items()
                               if any(needed.role == foreign[override.key] for needed in builds_on))  # fmt: skip
            raise ConfigError(f"Mode {request.mode} of {request.model} builds on no such run", value=override.spelling,
                              remedy=f"Modes that do: {having}\n{task.table()}")  # fmt: skip
    return renamed


def from_plain(plain: Mapping[str, Any]) -> ResolvedRun:
    """Makes a run from the plain values of its `config.yaml`.

    Raises:
        ConfigError: The values do not fit the settings of this version.
    """
    return _make_run(*_load(plain))


def from_file(text: str, name: str, *, beside: Path | None = None) -> ResolvedRun:
    """Makes a run from a file that `can-train show RUN --config` printed, or that a person wrote in its form. The
    presets give the settings that the file leaves out.

    Args:
        text: YAML.
        name: Of the file, for messages.
        beside: Folder of the file, where the code of a task of one's own lies if it is not where the file says.

    Raises:
        ConfigError: The file is not YAML, or has an unknown setting or a value that does not fit; the error has the
            line.
    """
    try:
        plain = resolved.plain_from_yaml(text)
        lines = _lines_of(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{name} is no configuration of a run", value=" ".join(str(error).split()),
                          remedy="can-train show RUN --config prints one") from error  # fmt: skip
    given = {as_stored(key): value for key, value in resolved.flat(plain)}
    choices = {key: str(given.get(key) or "") for key in (*_SCALARS, "mode.name", "paths.code_dir", "paths.config_dir")}
    task = choices["task"] or resolved.default_task()
    # The folder of the code may be on another machine.
    if choices["paths.code_dir"] and not Path(choices["paths.code_dir"]).is_dir():
        choices["paths.code_dir"] = given["paths.code_dir"] = str((beside or Path()).absolute())
    try:
        config, classes = _config_for(task, choices, given)
    except ConfigError as error:
        key = next((key for word, key in _CHOSEN_BY.items() if word in error.rule.lower()), "task")
        raise _with_line(error, name, lines, key) from error
    overrides = [
        Override(key=key, value=value, spelling=f"{name} line {lines.get(key, 1)}: {as_given(key)}", grammar=False)
        for key, value in given.items()
        # An empty group has no settings.
        if key not in ("task", "model_name", "size", "mode.name")
        and value != {}
        and not (key in classes and value is None)
    ]
    for override in overrides:
        if override.key in classes:
            no_group = SettingError(f"{as_given(override.key)} must be {KINDS['Dict']}", value=repr(override.value))
            raise _with_line(no_group, name, lines, override.key)
        try:
            apply_overrides(config, [override])
        except ConfigError as error:
            raise _with_line(error, name, lines, override.key) from error
    try:
        return _make_run(config, classes)
    except ConfigError as error:
        raise _with_line(error, name, lines) from error


_CHOSEN_BY: Final = {"has no mode": "mode.name", "size": "size", "data set": "dataset.name", "model": "model_name"}
"""Setting that chose a preset which is not there, by words of the error."""


def _config_for(
    task: str, choices: Mapping[str, str], given: Mapping[str, Any]
) -> tuple[DictConfig, Mapping[str, type]]:
    """Returns the settings of a file's presets, which its own settings replace, with the settings classes."""
    places = {name: choices[f"paths.{name}"] for name in ("code_dir", "config_dir")}
    if "paths.code_dir" not in given:
        task, places["code_dir"] = locate(task)
    description = load_task_settings(task, places["code_dir"])
    model = choices["model_name"] or _default(description, "model", [*description.models])
    mode = _spec_and_mode(description, model, choices["mode.name"] or None)[1]
    plain = {"task": task, "model_name": model, "size": choices["size"], "device": choices["device"] or "auto",
             "mode": {"name": mode}, "paths": places}  # fmt: skip
    config, classes = _load(plain)
    wanted = {
        key
        for key in setting_keys(OmegaConf.to_container(config))
        if not OmegaConf.is_dict(OmegaConf.select(config, key))
    }
    if wanted <= given.keys() | {"paths.code_dir"}:
        return config, classes
    path, dataset = given.get("dataset.path"), given.get("dataset.name")
    request = RunRequest(task=task, model=model, mode=mode, size=choices["size"] or None,
                         dataset=str(path or dataset) if path or dataset else None,
                         code_dir=places["code_dir"], config_dir=places["config_dir"])  # fmt: skip
    return _load({**resolve(request).config, "device": plain["device"]})


def _lines_of(text: str) -> dict[str, int]:
    """Returns the line of each setting in a YAML file, by its dotted key."""
    return dict(_lines_below(yaml.compose(text, Loader=yaml.SafeLoader), ""))


def _lines_below(node: Any, before: str) -> Iterator[tuple[str, int]]:
    """Yields the settings of a part of a file, with their lines; `before`: the part's own key, and a dot."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = as_stored(f"{before}{key.value}")
        yield name, key.start_mark.line + 1
        yield from _lines_below(value, f"{name}.")


def _with_line(error: ConfigError, name: str, lines: Mapping[str, int], key: str = "") -> ConfigError:
    """Adds to an error the file, and the line of the setting that it is about, if there is such a line."""
    key = key or as_stored(error.rule.partition(" ")[0])
    place = f"{name} line {lines[key]}" if key in lines else name
    return ConfigError(f"{place}: {error.rule}", value=error.value, remedy=error.remedy)


def with_changes(
    plain: Mapping[str, Any], sets: Sequence[str], values: Mapping[str, Any], model_args: str = ""
) -> ResolvedRun:
    """Makes a run from the plain values of another one, with some of them changed.

    Args:
        plain: The other run's `config.yaml`.
        sets: `group.key=value`, in Hydra's grammar.
        values: Further values by dotted key, taken literally.
        model_args: `k=v,k=v`.

    Raises:
        ConfigError: A setting is unknown (the nearest are listed), has two values, or does not fit.
    """
    config, classes = _load(plain)
    task = _task_of(plain)
    request = RunRequest(values=values, model_args=model_args, model=config.model_name, mode=config.mode.name)
    overrides = _overrides(task, classes, [from_set(text) for text in sets], request)
    # A file has resolved values: where two settings are equal, a change of the leader moves the follower too.
    for follower, leader in task.follows.items():
        if config.dataset[follower] == config.dataset[leader]:
            config.dataset[follower] = 0
    return _make_changed(config, overrides, classes)


def preset_request(plain: Mapping[str, Any]) -> RunRequest:
    """Returns the request for a run with the presets of the run whose configuration is `plain`."""
    paths, dataset, task, mode = plain["paths"], plain["dataset"], plain["task"], plain["mode"]["name"] or None
    return RunRequest(task=task, code_dir=paths["code_dir"], config_dir=paths["config_dir"], mode=mode,
                      model=plain["model_name"] or None, size=plain["size"] or None,
                      dataset=dataset.get("path") or dataset["name"] or None)  # fmt: skip


def changed_settings(plain: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Returns the settings of a run that differ from the presets of its model, mode and data, each with its `value` and
    the `default`. Folders, cluster and device are left out. None: this version has no such presets.
    """
    try:
        request, settings = preset_request(plain), resolved.flat_settings(plain)
        defaults = _preset_settings(**{name: getattr(request, name) for name in _PRESET_FIELDS})
        # A setting that follows another by itself was not set.
        following = {f"dataset.{follower}" for follower, leader in _task_of(plain).follows.items()
                     if settings[f"dataset.{follower}"] == settings[f"dataset.{leader}"]}  # fmt: skip
    except (CanTrainError, KeyError, TypeError, AttributeError):
        return None
    return {name: {"value": value, "default": defaults.get(name)} for name, value in settings.items()
            if value != defaults.get(name) and name not in following}  # fmt: skip


_PRESET_FIELDS: Final = ("task", "code_dir", "config_dir", "model", "size", "mode", "dataset")


# A listing asks for the same settings over and over, and a composition takes a tenth of a second.
@lru_cache(maxsize=64)
def _preset_settings(**fields: Any) -> Mapping[str, Any]:
    return resolved.flat_settings(resolve(RunRequest(**fields)).config)


def resolve_again(plain: Mapping[str, Any], request: RunRequest, chosen: Mapping[str, str]) -> ResolvedRun:
    """Makes a run like another run, with changes.

    Settings of the other run stay, except the settings of a replaced preset: another model has its own settings.

    Args:
        plain: The other run's `config.yaml`.
        request: Its `sets`, `model_args` and `values` are the changed settings.
        chosen: New choices: model, size, mode, dataset, task, cluster, memory or device, by name.

    Raises:
        ConfigError: As `resolve` does.
    """
    chosen = {**chosen, **_chosen([from_set(text) for text in request.sets])}
    if not chosen.keys() <= {"device"}:
        plain = _on_other_presets(plain, chosen, request.user_file)
    plain = {**plain, "device": chosen.get("device", plain["device"])}
    sets = [text for text in request.sets if from_set(text).key not in _CHOICES]
    return with_changes(plain, sets, request.values, request.model_args)


def _on_other_presets(
    plain: Mapping[str, Any], chosen: Mapping[str, Any], user_file: UserFile | None
) -> Mapping[str, Any]:
    """Returns a configuration with other presets, and the settings that differed from the earlier presets."""
    old = preset_request(plain)
    # The code of another task lies elsewhere.
    places: dict[str, Any] = {"code_dir": None} if "task" in chosen else {}
    request = replace(old, **chosen, **places, user_file=user_file)
    if request.model != old.model:
        # Another model has modes of its own, and may come in one size.
        spec = _task(request)[2].models.get(chosen["model"])
        size = old.size if spec is not None and old.size in spec.sizes else None
        request = replace(request, mode=chosen.get("mode"), size=chosen.get("size", size))
    new, without = resolve(request).config, resolved.flat_settings(resolve(replace(request, memory=None)).config)
    by_memory = {name for name, value in resolved.flat_settings(new).items() if value != without[name]}
    decided_by = {
        "model.": {"model", "size", "task"},
        "mode.": {"model", "mode", "task"},
        "dataset.": {"dataset", "task"},
    }
    gone = tuple(group for group, choices in decided_by.items() if chosen.keys() & choices)
    inherited = {f"dataset.{name}" for name in _task_of(new).inherited}
    kept = {
        name: setting["value"] for name, setting in (changed_settings(plain) or {}).items()
        if "." in name and name not in by_memory and (name in inherited or not name.startswith(gone))
        and not name.endswith((".name", ".path"))
    }  # fmt: skip
    places = {"paths": {**plain["paths"], "code_dir": new["paths"]["code_dir"]}, "device": plain["device"]}
    places |= {} if "cluster" in chosen else {"cluster": plain["cluster"]}
    return with_changes({**new, **places}, (), kept).config


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
            raise ConfigError("A finished run keeps all settings but its data's", value=f"--set {text}",
                              remedy="Give --set dataset.KEY=VALUE")  # fmt: skip
    return _on_data(run, dataset, sets).dataset


def prediction_run(run: ResolvedRun, dataset: str | None, sets: Sequence[str]) -> ResolvedRun:
    """Returns a finished run with the data that it predicts; has the arguments of `evaluation_dataset`, and settings of
    the task itself in `sets`, too.
    """
    for text in sets:
        if not from_set(text).key.startswith(("dataset.", SETTINGS)):
            raise ConfigError("A finished run keeps all settings but its data's and its task's", value=f"--set {text}",
                              remedy="Give --set dataset.KEY=VALUE, or --set task.KEY=VALUE")  # fmt: skip
    return _on_data(run, dataset, sets)


def _on_data(run: ResolvedRun, dataset: str | None, sets: Sequence[str]) -> ResolvedRun:
    plain = dict(run.config)
    if dataset is not None:
        request = replace(preset_request(plain), dataset=dataset)
        inherited = {name: plain["dataset"][name] for name in run.task_settings.inherited}
        plain["dataset"] = {**resolve(request).config["dataset"], **inherited}
    return with_changes(plain, sets, {})


def expand(requests: Sequence[RunRequest]) -> list[RunRequest]:
    """Expands sweeps into single requests, the last setting changing fastest.

    Args:
        requests: Each of `sets` may be `group.key=1,2,3`, `choice(…)` or `range(…)`, in the groups that sweep.

    Raises:
        ConfigError: A sweep has no countable values, or there are more than `MOST_RUNS` combinations.
    """
    found = []
    for request in requests:
        choices = [values_of(text) if may_sweep(text) else [text] for text in request.sets]
        if (count := math.prod(map(len, choices))) > MOST_RUNS:
            raise ConfigError(f"The sweep has {count} runs, more than {MOST_RUNS}", remedy="Sweep fewer values")
        found += [replace(request, sets=sets) for sets in product(*choices)]
    return found


def _chosen(sets: Iterable[Override]) -> dict[str, Any]:
    """Reads which presets, model and device are chosen."""
    choices = {override.key: str(parsed_value(override)).strip() for override in sets if override.key in _CHOICES}
    for override in sets:
        if choices.get(override.key) == "":
            raise ConfigError(f"{override.spelling} is empty", remedy="Give a value, or leave it out")
    return choices


def _make_changed(config: DictConfig, overrides: Sequence[Override], classes: Mapping[str, type]) -> ResolvedRun:
    """Makes a run from a config with overrides; an error names the setting as it was given."""
    before = {override.key: plain_value(OmegaConf.select(config, override.key)) for override in overrides}
    try:
        run = _make_run(apply_overrides(config, overrides), classes)
    except ConfigError as error:
        raise as_typed(error, overrides, before) from error
    if any(override.key == "training.optimizer" for override in overrides):
        optimizer, code_dir = locate_optimizer(run.training.optimizer, run.task, run.paths.code_dir)
        run = replace(run, training=replace(run.training, optimizer=optimizer),
                      paths=replace(run.paths, code_dir=code_dir))  # fmt: skip
    # Requests to SLURM for a run that does not go there would be ignored.
    requests = [
        override.spelling for override in overrides if override.key.removeprefix("cluster.") in resolved.CLUSTER_FLAGS
    ]
    if requests and run.cluster.executor != "slurm":
        have = "has" if len(requests) == 1 else "have"
        raise ConfigError(f"{' and '.join(requests)} {have} no effect with --cluster {run.cluster.executor}",
                          remedy="Leave it out, or train with --submit --cluster slurm")  # fmt: skip
    mounts = next((override for override in overrides if override.key == "cluster.container_mounts"), None)
    if mounts is not None and run.cluster.container_mounts and not run.cluster.container:
        raise ConfigError(f"{mounts.spelling} has no effect without --container",
                          remedy="Give --container IMAGE, or leave it out")  # fmt: skip
    for name, value in {**vars(run), **vars(run.paths), **vars(run.dataset)}.items():
        # Surrogates stand for bytes of a file's name; the files of a run are UTF-8.
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise ConfigError("The name of a file or folder in the settings of a run must be UTF-8",
                              value=f"{name} {value!r}", remedy="Rename it")  # fmt: skip
    return run


def _apply_user_file(config: DictConfig, file: UserFile, classes: Mapping[str, type]) -> None:
    """Applies the user's settings file to a config; its requests to SLURM only if the run goes there."""
    of_jobs = resolved.CLUSTER_FLAGS if config.cluster.executor == "slurm" else ()
    groups = {"runs_dir": "paths", "tracker": "paths"} | dict.fromkeys(of_jobs, "cluster")
    for name, value in file.values.items():
        if (group := groups.get(name)) is None:
            continue
        try:
            apply_overrides(config, [Override(key=f"{group}.{name}", value=value, spelling=name, grammar=False)])
            # One after another, so that the error names the one that is wrong.
            plain: Any = OmegaConf.to_container(config[group], resolve=True)
            _make_settings(classes[group], plain, group)
        except ConfigError as error:
            raise ConfigError(f"{file.path}: {name}: {error.rule}", value=error.value, remedy=error.remedy) from error


def _classes(task: TaskSettings, spec: ModelSpec, mode: str) -> dict[str, type]:
    return {"settings": task.settings, "dataset": task.dataset, "model": spec.settings, "mode": task.modes[mode],
            "cluster": ClusterSettings, "training": TrainingSettings, "factor": FactorSettings,
            "monitor": MonitorSettings, "paths": PathSettings}  # fmt: skip


# ZenStore's own wrapping of a class refuses a frozen instance.
_schema: Final[Any] = make_custom_builds_fn(populate_full_signature=True)


_FileState = tuple[Path, int, int, int]  # path, number, time of change and size of a file


@dataclass(frozen=True, kw_only=True)
class _Composition:
    """All that decides a composition. Two that are equal compose alike, so that a sweep composes once.

    Attributes:
        classes: The settings class of each group.
        choices: The preset of each group.
        folders: Folders of presets; a later one wins.
        files: Their files.
        environment: The variables that presets may refer to; empty where none calls a resolver.
        defaults: The task's own defaults of training, and its aliases, as text.
        task: The task.
    """

    classes: Sequence[tuple[str, type]]
    choices: Sequence[tuple[str, str]]
    folders: Sequence[Path]
    files: Sequence[_FileState]
    environment: Sequence[tuple[str, str]]
    defaults: str
    task: TaskSettings = field(compare=False)

    @classmethod
    def of(
        cls, task: TaskSettings, classes: Mapping[str, type], choices: Mapping[str, str], folders: Sequence[Path]
    ) -> "_Composition":
        """Reads the files of presets that have changed.

        Raises:
            ConfigError: A preset would take Hydra for ever.
        """
        paths = sorted(path for folder in folders for path in folder.glob("*/*.yaml") if is_file(path))
        files = [(path, status.st_ino, status.st_mtime_ns, status.st_size) for path in paths if (status := path.stat())]
        try:
            # Each of them is checked.
            calls = [_checked_preset(*file) for file in files]
        except ValueError as error:
            raise _unfit(error, folders) from error
        return cls(classes=tuple(classes.items()), choices=tuple(choices.items()), folders=tuple(folders),
                   files=tuple(files), environment=tuple(os.environ.items()) if any(calls) else (),
                   defaults=repr((sorted(task.training.items()), sorted(task.aliases.items()))), task=task)  # fmt: skip


@lru_cache(maxsize=32)
def _compose(composition: _Composition) -> DictConfig:
    """Composes one preset of each group over the defaults of its settings class."""
    task, classes, choices = composition.task, dict(composition.classes), dict(composition.choices)
    folders = composition.folders
    store = ZenStore(overwrite_ok=True)
    for group in _CHOSEN_GROUPS:
        store(_checked_schema(classes[group]), group=group, name="schema")
    always: dict[str, Any] = {name: _checked_schema(cls) for name, cls in classes.items() if name not in _CHOSEN_GROUPS}
    always["training"] = _training_schema(task)
    # The first folder that has a preset wins in Hydra.
    always["hydra"] = {"searchpath": [f"file://{folder.absolute()}" for folder in reversed(folders)]}
    # A memory preset changes training settings, so it stands behind them, and there need be none.
    defaults: list[Any] = ["_self_", *({name: "???"} for name in _CHOSEN_GROUPS), {"optional memory": None}]
    values: dict[str, Any] = {**dict.fromkeys(_SCALARS, ""), **dict.fromkeys(_CHOSEN_GROUPS), **always}
    store(make_config(hydra_defaults=defaults, **values), name="root")
    store.add_to_hydra_store(overwrite_ok=True)
    # A program that plans may have its own Hydra, which goes on as it was.
    hydra, version = copy(GlobalHydra.instance()), copy(VersionBase.instance())
    GlobalHydra.instance().clear()
    try:
        with (
            _rewritten_presets(choices, folders, task.aliases) as first,
            initialize_config_dir(str(first.absolute()), version_base="1.3"),
        ):
            config = compose("root", overrides=[f"{group}={choice}" for group, choice in choices.items()])
        for group in _CHOSEN_GROUPS:
            # A preset that has not begun with the defaults of its settings class is laid over them.
            preset = OmegaConf.select(config, group)
            if not OmegaConf.is_dict(preset) or OmegaConf.get_type(preset) is dict:
                plain = OmegaConf.to_container(preset) if OmegaConf.is_config(preset) else preset or {}
                if not isinstance(plain, dict):
                    raise ValueError(f"{group}: a preset must have a setting on each line")
                merged = OmegaConf.merge(OmegaConf.structured(_checked_schema(classes[group])), plain)
                OmegaConf.update(config, group, merged, merge=False)
        # References to other values and to the environment are read now.
        OmegaConf.to_container(config, resolve=True)
    # A person's file makes YAML's reader, Hydra and OmegaConf stumble each in ways of its own.
    except Exception as error:
        raise _unfit(error.__cause__ or error, folders) from error
    finally:
        GlobalHydra.set_instance(hydra)
        VersionBase.set_instance(version)
    return config


@lru_cache(maxsize=64)
def _checked_schema(cls: type) -> Any:
    """Returns the schema of a settings class; raises ConfigError for a default that does not fit its type."""
    try:
        schema = _schema(cls)
        OmegaConf.structured(schema)
    except Exception as error:  # hydra-zen and OmegaConf raise many kinds
        raise _unfit_default(cls, error) from error
    return schema


def _unfit_default(cls: Any, error: Exception) -> ConfigError:
    hints = get_type_hints(cls)
    for each in fields(cls):
        value = each.default_factory() if each.default_factory is not MISSING else each.default
        try:
            # Neither library names the field in all of its errors.
            OmegaConf.structured(_schema(make_dataclass("Field", [(each.name, hints[each.name], _factory_of(value))])))
        except Exception as reason:  # noqa: BLE001 - they raise many kinds
            line = f"{each.name}: {_type_text(hints[each.name])} = {value!r:.60}"
            where = f"{cls.__module__}.{cls.__qualname__}"
            if isinstance(reason, HydraZenUnsupportedPrimitiveError):
                return ConfigError(f"A setting of {where} must be a number, text, list, dict or dataclass", value=line,
                                   remedy=f'Keep it as text, as in {each.name}: str = "...", '
                                   "and make the object from it in the task")  # fmt: skip
            return ConfigError(f"A default of {where} does not fit its type", value=line,
                               remedy="Write a default of that type, or the type of the default")  # fmt: skip
    return ConfigError(f"The defaults of {cls.__module__}.{cls.__qualname__} must fit their types",
                       value=reason_of(error).rstrip("."), remedy="Mend them in the class")  # fmt: skip


def _factory_of(value: Any) -> Any:
    return field(default_factory=lambda: value)


def _type_text(hint: Any) -> str:
    """Writes a type as in a class: `int`, `torch.dtype`, `list[int]`."""
    if not isinstance(hint, type) or get_args(hint):
        return str(hint).removeprefix("typing.")
    return hint.__qualname__ if hint.__module__ == "builtins" else f"{hint.__module__}.{hint.__qualname__}"


def _training_schema(task: TaskSettings) -> Any:
    """Returns the settings of training with the task's own defaults."""
    for name, value in task.training.items():
        if name not in (known := [one.name for one in fields(TrainingSettings)]):
            raise unknown_name("setting among the task's own defaults of training", name, known)
        reason, cause = "it is no number, text, list or dict", None
        if is_plain := isinstance(value, int | float | str | list | tuple | Mapping | None):
            try:
                OmegaConf.structured(_schema(TrainingSettings, **{name: value}))
            except Exception as error:  # noqa: BLE001 - hydra-zen and OmegaConf raise many kinds for members of a list
                reason, cause, is_plain = reason_of(error).rstrip("."), error, False
        if not is_plain:
            raise ConfigError("The task's own defaults of training do not fit the settings",
                              value=f"training = {{{name!r}: {value!r:.60}}}, and {reason}",
                              remedy="Mend `training` in the class of the task") from cause  # fmt: skip
    return _schema(TrainingSettings, **task.training)


def _unfit(error: BaseException, folders: Sequence[Path]) -> ConfigError:
    return ConfigError("A preset does not fit the settings", value=reason_of(error).rstrip("."),
                       remedy=f"Mend it in {' or '.join(map(str, reversed(folders)))}")  # fmt: skip


@lru_cache(maxsize=1024)
def _checked_preset(path: Path, *_state: int) -> bool:
    """Returns whether a preset calls a resolver of OmegaConf, as for a variable of the environment.

    Raises:
        ValueError: It would take Hydra for ever.
    """
    text = ""
    try:
        text = path.read_text()
        resolved.check_yaml(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        pass  # Hydra's error when it reads the preset is better
    except ValueError as error:
        raise ValueError(f"{path.parent.name}/{path.name}: {error}") from None
    return _RESOLVER.search(text) is not None


@contextmanager
def _rewritten_presets(
    choices: Mapping[str, str], folders: Sequence[Path], aliases: Mapping[str, str]
) -> Iterator[Path]:
    """Yields the folder that Hydra searches first: the last of `folders`, or a folder with copies of the chosen presets
    that Hydra would misread. These have aliases of settings, or a block of settings of another group, as `training:`,
    without `# @package _global_`.
    """
    texts = {}
    for group, name in choices.items():
        paths = [folder / group / f"{name}.yaml" for folder in folders]
        path = next((path for path in reversed(paths) if is_file(path)), None)
        text = "" if path is None else path.read_text()
        plain = yaml.safe_load(text)
        if not isinstance(plain, dict):
            continue
        package = _PACKAGE.match(text)
        blocks = _blocks(group, package[1] if package else group, plain, aliases)
        if blocks is not None:
            texts[f"{group}/{name}.yaml"] = f"# @package _global_\n{resolved.plain_to_yaml(blocks)}"
    if not texts:
        yield folders[-1]
        return
    with TemporaryDirectory(prefix="can-train-presets-") as place:
        for file, text in texts.items():
            (Path(place) / file).parent.mkdir(exist_ok=True)
            (Path(place) / file).write_text(text)
        yield Path(place)


def _blocks(group: str, package: str, plain: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns a preset as blocks by group, with canonical names; None where Hydra reads it as it is meant."""
    defaults, own = plain.get("defaults", []), {name: value for name, value in plain.items() if name != "defaults"}
    blocks = own
    if package != "_global_":
        # A preset of memory changes training.
        target = "training" if group == "memory" else package
        # YAML reads a block whose lines are all comments as null.
        others = {name: own[name] or {} for name in _SIDE_GROUPS if isinstance(own.get(name, False), dict | None)}
        blocks = {**others}
        blocks[target] = {**others.get(target, {}), **{name: own[name] for name in own if name not in others}}
    training = blocks.get("training")
    named = _canonical(training, aliases) if isinstance(training, dict) else training
    if named == training and (package == "_global_" or blocks == {package: own}):
        return None
    blocks = blocks if training is None else {**blocks, "training": named}
    places = [f"{one}@{group}" if isinstance(one, str) and one != "_self_" and package != "_global_" and "@" not in one
              else one for one in defaults]  # fmt: skip
    return {"defaults": places or ["_self_"], **blocks}


def _canonical(training: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Returns settings by their canonical names; raises ValueError where one has two different values."""
    found: dict[str, Any] = {}
    for name, value in training.items():
        key = aliases.get(canonical_name(str(name)), canonical_name(str(name)))
        if key != name:
            value = TRANSLATIONS.get(f"training.{key}", {}).get(str(value).lower(), value)
        if found.setdefault(key, value) != value:
            raise ValueError(f"training.{key} is given twice, as {found[key]} and {value}")
    return found


def _load(plain: Mapping[str, Any]) -> tuple[DictConfig, dict[str, type]]:
    """Reads the plain values of a run as a typed config; returns it with the settings class of each group."""
    task, saved_mode = _task_of(plain), plain.get("mode")
    mode = str(saved_mode.get("name")) if isinstance(saved_mode, Mapping) else None
    classes = _classes(task, *_spec_and_mode(task, str(plain.get("model_name")), mode))
    groups = {group: OmegaConf.structured(_checked_schema(cls)) for group, cls in classes.items()}
    schema = OmegaConf.create(dict.fromkeys(_SCALARS, "") | groups)
    OmegaConf.set_struct(schema, True)
    for group in OPEN_GROUPS:
        OmegaConf.set_struct(OmegaConf.select(schema, group), False)
    open_dicts(schema)
    try:
        merged = OmegaConf.merge(schema, escaped(dict(plain)))
    except OmegaConfBaseException as error:
        raise ConfigError("The saved configuration does not fit this version", value=reason_of(error),
                          remedy="Use the version that made the run, or train anew") from error  # fmt: skip
    assert isinstance(merged, DictConfig)
    return merged, classes


def _make_run(config: DictConfig, classes: Mapping[str, type]) -> ResolvedRun:
    plain: Any = OmegaConf.to_container(config, resolve=True)
    values: dict[str, Any] = {name: str(plain[name]) for name in _SCALARS}
    return ResolvedRun(**values, **{name: _make_settings(cls, plain[name], name) for name, cls in classes.items()})


def _make_settings(cls: Any, plain: Mapping[str, Any], group: str) -> Any:
    # hydra_zen.instantiate would resolve texts a second time, and a path may hold `${`.
    kinds, given = get_type_hints(cls), {}
    for name, value in plain.items():
        if name == "_target_":
            continue
        key = f"{group}.{name}"
        # hydra-zen lets anything stand for a list or a mapping.
        wanted: Any = {Sequence: list, Mapping: dict}.get(get_origin(kinds[name]), object)
        if not isinstance(value, wanted):
            kind = KINDS["List" if wanted is list else "Dict"]
            raise SettingError(f"{as_given(key)} must be {kind}", value=repr(value))
        given[name] = _make_settings(kinds[name], value, key) if is_dataclass(kinds[name]) else (
            _fitted(kinds[name], value, key))  # fmt: skip
    return cls(**given)


def _fitted(kind: Any, value: Any, key: str) -> Any:
    """Returns a value as the type of its setting says, of which OmegaConf knows no `Literal`, and no tuple."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [each for each in arguments if each is not type(None)]
        # Of several types, any may be meant.
        return value if value is None or len(kinds) > 1 else _fitted(kinds[0], value, key)
    if origin is Literal:
        chosen = [choice for choice in arguments if (type(choice), choice) == (type(value), value)]
        # Text of --set that looks like a number is read as one.
        chosen += [choice for choice in arguments if str(choice) == str(value)]
        if not chosen:
            raise unknown_name(f"value of {as_given(key)}", str(value), map(str, arguments))
        return chosen[0]
    return tuple(value) if origin is tuple and isinstance(value, list) else value


def _spec_and_mode(task: TaskSettings, model: str, mode: str | None) -> tuple[ModelSpec, str]:
    if model not in task.models:
        if not any(task.models):
            raise ConfigError("The task has one model, without a name", value=f"--model {model}",
                              remedy="Leave out --model")  # fmt: skip
        raise unknown_name("model", model, task.models, more=f"\n{task.table()}")
    spec = task.models[model]
    mode = mode or spec.modes[0]
    if mode not in spec.modes:
        names = ", ".join(nearest_first(mode, spec.modes))
        raise ConfigError(f"Model {model} has no mode {mode!r}", remedy=f"Its modes: {names}\n{task.table()}")
    return spec, mode


def _size(task: TaskSettings, request: RunRequest, spec: ModelSpec, mode: str) -> str:
    if request.size is not None and request.size not in spec.sizes:
        raise unknown_name("size", request.size, spec.sizes)
    possible = spec.only_sizes.get(mode, spec.sizes)
    size = request.size or next(iter(possible), "")
    if size not in possible and spec.sizes:
        raise ConfigError(f"Model {request.model} in mode {mode} comes in one size only", value=f"--size {size}",
                          remedy=f"Add --size {possible[0]}\n{task.table()}")  # fmt: skip
    return size


def _default(task: TaskSettings, what: str, names: Sequence[str]) -> str:
    """Returns the default of a flag: the only name; None if there is no name."""
    if len(names) > 1:
        listed = f"Name one of {', '.join(names)}: --{what} {names[0]}"
        raise ConfigError(f"--{what} is missing", remedy=f"Try: can-train {task.example}" if task.example else listed)
    return next(iter(names), "")


def _dataset(task: TaskSettings, text: str | None, folders: Sequence[Path]) -> tuple[str, dict[str, str]]:
    """Decides whether a data set is a preset or a path; returns the preset, and the settings that a path decides."""
    named = resolved.presets("dataset", folders)
    if text is None:
        return _default(task, "dataset", named), {}
    name = text.replace("-", "_")
    if name in named and "/" not in text:
        return name, {}
    path = expanded(text)
    if "/" in text or path.exists():
        stem = path.resolve().name if path.is_dir() else path.resolve().name.split(".")[0]
        slug = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_") or "log"
        return "", {"dataset.path": str(path), "dataset.name": slug}
    here = get_close_matches(text, [each.name for each in Path().iterdir()])
    near = f": {', '.join(map(shlex.quote, here))}" if here else ""
    one = f"the path of a file or a folder that exists{near}"
    if not named:
        raise ConfigError("There is no such file or folder", value=repr(text), remedy=f"Give {one}")
    raise unknown_name("data set", text, named, more=f"; or give {one}")
