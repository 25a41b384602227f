"""Settings that a person gives on a command line or in a file: each becomes an `Override`, and `apply_overrides` is the
only code that applies one.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from can_train.config.settings import canonical_name, split_list, without_brackets
from can_train.config.sweeps import UNREADABLE, may_sweep, parser
from can_train.errors import ConfigError, SettingError, nearest_first, unknown_name

# People name the group `settings` by the task, whose name is the setting `task`.
_TASK, SETTINGS = "task.", "settings."
_OPEN_GROUP: Final = "cluster.additional"  # takes any key: options of sbatch
OPEN_GROUPS: Final = (_OPEN_GROUP, "training.optimizer_args")
_ALL_SETTINGS: Final = "--dry-run --show-config"
_WRITE_IT: Final = "Write it as --set training.lr=0.01; text that is more than a word: --set 'group.key=\"text\"'"
# The expected value, by the type that OmegaConf could not convert a value to.
KINDS: Final = {"Integer": "a whole number", "Float": "a number", "bool": "true or false", "String": "text",
                 "List": "a list, as [1,2]", "Dict": "settings, as {a:1,b:2}"}  # fmt: skip
_SUGGESTIONS: Final = 5
# The switch scheduler_after_batch says yes or no where scheduler_interval names the interval.
TRANSLATIONS: Final = {"training.scheduler_interval": {"true": "step", "false": "epoch"}}
_WORD: Final = re.compile(r"[\w.*/:-]+")  # Text that needs no quotes
_COMMA_OUTSIDE_BRACKETS: Final = re.compile(r",(?![^\[({]*[\])}])")


@dataclass(frozen=True, kw_only=True)
class Override:
    """One setting given by a person."""

    key: str  # canonical and dotted, `training.lr`
    value: Any  # text in Hydra's grammar if `grammar`, else the value itself
    spelling: str  # how it was written, for messages
    grammar: bool  # whether `value` must still be parsed

    def __post_init__(self) -> None:
        if isinstance(self.value, str):
            value = TRANSLATIONS.get(self.key, {}).get(self.value.strip().lower(), self.value)
            object.__setattr__(self, "value", value)


def from_set(text: str) -> Override:
    """Reads one `--set group.key=value`.

    Raises:
        ConfigError: There is no key or no `=`.
    """
    name, separator, value = text.partition("=")
    name = name.strip()
    if not separator or not name:
        raise ConfigError("--set takes group.key=value", value=repr(text), remedy="Write it as --set training.lr=0.01")
    # Hydra's `+` and `++` add a setting where there is none; here every setting is there.
    key = name.lstrip("+")
    group, _, last = key.rpartition(".")
    # The mode decides which settings exist, so its name is a choice, not a setting.
    key = f"training.{canonical_name(last)}" if group == "training" else "mode" if key == "mode.name" else key
    return Override(key=as_stored(key), value=value, spelling=f"--set {name}", grammar=True)


def from_model_args(text: str, groups: Mapping[str, type]) -> list[Override]:
    """Reads `--model-args k=v,k=v`.

    Args:
        text: The value of `--model-args`.
        groups: Settings class of each group that may have a setting k; the first group that has it gets the value.

    Raises:
        ConfigError: A part has no `=`, or no group has its name; the message lists the nearest.
    """
    group_of = {field.name: group for group, cls in reversed(list(groups.items())) for field in fields(cls)}
    found = []
    for part in filter(None, _COMMA_OUTSIDE_BRACKETS.split(text)):
        name, separator, value = part.partition("=")
        if not separator:
            raise ConfigError("--model-args takes k=v,k=v", value=repr(part), remedy="Write it as hidden=32,lr=0.01")
        key, spelling = canonical_name(name.strip()), f"--model-args {name.strip()}"
        if key not in group_of:
            raise unknown_name("name in --model-args", name.strip(), group_of)
        found.append(Override(key=f"{group_of[key]}.{key}", value=value, spelling=spelling, grammar=True))
    return found


def as_given(key: str) -> str:
    """Returns the key of a setting as a person writes it."""
    return f"{_TASK}{key.removeprefix(SETTINGS)}" if key.startswith(SETTINGS) else key


def as_stored(key: str) -> str:
    """Returns the key of a setting as configurations have it; the inverse of `as_given`."""
    return f"{SETTINGS}{key.removeprefix(_TASK)}" if key.startswith(_TASK) else key


def check_contradictions(overrides: Iterable[Override]) -> None:
    """Raises ConfigError if a setting is given under two spellings with different values."""
    first: dict[str, Override] = {}
    for new in overrides:
        old = first.setdefault(new.key, new)
        if old.spelling != new.spelling and str(old.value) != str(new.value):
            raise ConfigError(f"{as_given(new.key)} is given twice, with different values", remedy="Give it once",
                              value=f"{old.spelling} {old.value} and {new.spelling} {new.value}")  # fmt: skip


def parsed_value(override: Override) -> Any:
    """Reads an override's value as Hydra does; one of a flag is the value itself."""
    if not override.grammar:
        return override.value
    text = f"{override.key}={override.value}"
    try:
        parsed = parser().parse_override(text)
    except UNREADABLE as error:
        raise ConfigError("A value cannot be read", value=text, remedy=_WRITE_IT) from error
    if parsed.is_sweep_override():
        raise _several_values(override)
    return parsed.value()


def _several_values(override: Override) -> ConfigError:
    """Makes the error for a list of values where there is one value."""
    text = f"{as_given(override.key)}={override.value}"
    if may_sweep(override.key):
        return ConfigError("One run cannot have several values of a setting", value=text,
                           remedy="Sweep with a training command: can-train --model … --set key=1,2")  # fmt: skip
    return ConfigError("Only settings of task, model, dataset, mode and training can be swept", value=text,
                       remedy=f"Give {as_given(override.key)} one value")  # fmt: skip


def as_typed(error: ConfigError, overrides: Sequence[Override], before: Mapping[str, Any]) -> ConfigError:
    """Writes an error about a setting as the person gave the setting.

    Args:
        error: Of a settings class, or of OmegaConf.
        overrides: The settings that the person gave.
        before: Their values in the presets.
    """
    for override in overrides:
        if error.value == repr(override.value) and error.rule.startswith("This is no "):
            return _changed(error, error.rule.replace("This", override.spelling, 1), error.remedy)
        key = as_given(override.key)
        name = re.compile(rf"(?<![\w.-]){re.escape(key)}(?![\w.])")
        if name.search(error.rule):
            # Text of --set is Hydra's, and its settings are known by their keys.
            rule = error.rule if override.grammar else override.spelling.join(name.split(error.rule))
            is_word = override.grammar and _WORD.fullmatch(str(override.value))
            in_list = (
                f"Write it as --set '{key}=[{override.value}]'" if rule.endswith(KINDS["List"]) and is_word else ""
            )
            remedy = error.remedy or in_list or _preset_value(override, before.get(override.key))
            return _changed(error, rule, remedy)
    return _changed(error, error.rule, error.remedy or "Mend it in the preset or the file that has it")


def _changed(error: ConfigError, rule: str, remedy: str) -> ConfigError:
    return ConfigError(rule, value=error.value, remedy=remedy)


def plain_value(node: Any) -> Any:
    """Returns a value of a config as Python's own types."""
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node


def _preset_value(override: Override, value: Any) -> str:
    """Returns a remedy: the value that the presets have, as a person writes it in place of the wrong one."""
    if (not value and not isinstance(value, bool | int | float)) or isinstance(value, dict):
        return f"Leave it out: can-train {_ALL_SETTINGS} shows how settings are written"
    if isinstance(value, list):
        text = f"[{','.join(map(str, value))}]"
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    link = "=" if override.grammar else " "
    return f"Leave it out, or write it as {override.spelling}{link}{shlex.quote(text)}"


def apply_overrides(config: DictConfig, overrides: Sequence[Override]) -> DictConfig:
    """Sets the values in a config, whose types they must fit."""
    known = list(setting_keys(OmegaConf.to_container(config)))
    for override in overrides:
        key, is_open = override.key, override.key.startswith(tuple(f"{group}." for group in OPEN_GROUPS))
        if key not in known and not is_open and not _is_in_dict(config, key):
            nearest = ", ".join(map(as_given, _nearest_settings(key, known)[:_SUGGESTIONS]))
            if key.startswith(SETTINGS) and not any(name.startswith(SETTINGS) for name in known):
                raise ConfigError("This task has no settings of its own", value=as_given(key),
                                  remedy="Write them as fields of its class Settings; see docs/tasks.md")  # fmt: skip
            raise ConfigError("Unknown setting", value=repr(as_given(key)), remedy=f"Nearest: {nearest}")
        value, node = _value(config, override, is_open=is_open), OmegaConf.select(config, key)
        if OmegaConf.is_dict(node) and not override.grammar and isinstance(value, str):
            # A flag gives settings by name: --optimizer-args momentum=0.95,nesterov=true.
            value = parsed_value(
                replace(override, value=f"{{{without_brackets(value, '{}').replace('=', ':')}}}", grammar=True)
            )
        if OmegaConf.is_list(node) and not override.grammar and isinstance(value, str):
            # A flag lists values as they are: --freeze encoder,head. In brackets they may have the quotes of --set.
            value = [_unquoted(part) for part in split_list(value) if part.strip()]
        for kind, is_wanted, types in (("Dict", OmegaConf.is_dict, dict), ("List", OmegaConf.is_list, (list, tuple))):
            if is_wanted(node) and not isinstance(value, types):
                raise SettingError(f"{as_given(key)} must be {KINDS[kind]}", value=repr(value))
        try:
            # Of a group within a group only the given keys change, as in Hydra.
            OmegaConf.update(config, key, escaped(value), merge=isinstance(value, dict),
                             force_add=is_open or key in OPEN_GROUPS or _is_in_dict(config, key))  # fmt: skip
            # `${…}` is accepted for any type, and converted only when it is read.
            if OmegaConf.is_config(found := OmegaConf.select(config, key)):
                OmegaConf.to_container(found, resolve=True)
        except OmegaConfBaseException as error:
            raise misfit(error, key, value) from error
    return config


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def open_dicts(config: DictConfig) -> None:
    """Lets settings of a task that are dicts take new keys."""
    for key in setting_keys(OmegaConf.to_container(config)):
        if _is_dict_setting(config, key):
            OmegaConf.set_struct(OmegaConf.select(config, key), False)


def _is_in_dict(config: DictConfig, key: str) -> bool:
    """Tells whether a key is one of a setting that is a dict, whose keys nobody has declared."""
    return _is_dict_setting(config, key.rpartition(".")[0])


def _is_dict_setting(config: DictConfig, key: str) -> bool:
    node = OmegaConf.select(config, key) if "." in key else None
    return OmegaConf.is_dict(node) and OmegaConf.get_type(node) is dict


def _value(config: DictConfig, override: Override, *, is_open: bool) -> Any:
    """Reads the value of a setting; `is_open` tells that it is an option of sbatch, which may also be a switch, a list
    or empty. In a text that cannot be swept, Hydra's grammar counts where it reads a text, which may be quoted; all
    else is meant literally: `n[1-3,7]`, `END,FAIL`, `007`.
    """
    node, raw = OmegaConf.select(config, override.key), str(override.value).strip()
    if not override.grammar or may_sweep(override.key) or not (is_open or isinstance(node, str)):
        try:
            return parsed_value(override)
        except ConfigError as error:
            if OmegaConf.is_list(node) and not may_sweep(override.key):
                error.remedy = (
                    f"""Write its lines as a list: --set '{override.key}=["module load a,b","ulimit -c 0"]'"""
                )
            raise
    try:
        parsed = parser().parse_override(f"{override.key}={raw}")
    except UNREADABLE:
        return raw
    if parsed.is_sweep_override():
        # Values without a function (`choice(…)`, `range(…)`) are a text with commas.
        if re.match(r"\w+\(", raw):
            raise _several_values(override)
        return raw
    value = parsed.value()
    as_read = isinstance(value, str) or str(value) == raw or (is_open and isinstance(value, bool | list | None))
    return value if as_read else raw


def _nearest_settings(key: str, settings: Sequence[str]) -> list[str]:
    """Returns the settings most like a key, first those that only their group tells from it: `lr`, `model.lr`."""
    last = {name: name.rpartition(".")[2] for name in settings}
    words = [key.rpartition(".")[2]] if "." in key else nearest_first(key, last.values())
    like = [name for word in words for name in settings if last[name] == word]
    return list(dict.fromkeys([*like, *nearest_first(key, settings)]))


def setting_keys(node: Any, before: str = "") -> Iterator[str]:
    """Lists the dotted keys that may be set; task, model and size decide the keys, and are none."""
    for name, value in node.items():
        key = f"{before}{name}"
        if name != "_target_" and key != "mode.name" and (before or name == "device"):
            yield key
        if isinstance(value, Mapping) and key not in OPEN_GROUPS:
            yield from setting_keys(value, f"{key}.")


def escaped(value: Any) -> Any:
    """Copies a value, escaping interpolations of OmegaConf: the shell's `${HOME}` is meant literally.

    Hydra's parser leaves interpolations as text, so overrides have none; presets may.
    """
    if isinstance(value, Mapping):
        return {key: escaped(inner) for key, inner in value.items()}
    if not isinstance(value, str):
        return [escaped(inner) for inner in value] if isinstance(value, list | tuple) else value
    # Backslashes before `${` escape it and each other; all others stand for themselves.
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)


def misfit(error: OmegaConfBaseException, key: str, value: Any) -> ConfigError:
    """Makes the error for a value that a setting does not take."""
    found = re.search(r"full_key: (\S+)", str(error))
    key = as_given(found[1] if found else key)
    if kind := re.search(r"could not be converted to (\w+)|is not a valid (bool)", str(error)):
        shown = re.search(r"Value '(.*)' (of type|is not)", str(error))
        name = kind[1] or kind[2]
        return SettingError(f"{key} must be {KINDS.get(name, name)}", value=repr(shown[1] if shown else value))
    if re.search(r"Key '.*' (is )?not in ", str(error)):
        return ConfigError("Unknown setting", value=repr(key), remedy=f"{_ALL_SETTINGS} prints all of them")
    return ConfigError(f"{key} cannot be {value!r}", value=reason_of(error), remedy=_WRITE_IT)


def reason_of(error: BaseException) -> str:
    """Writes OmegaConf's error in a line that begins with the preset and the key."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, yaml.YAMLError):
        # Where it is wrong comes last.
        lines = [" ".join(" ".join(lines).split())]
    # Hydra's own first line: `In 'memory/tight': ConfigKeyError raised while composing config:`
    preset = re.match(r"In '(.*)': .* raised while composing", lines[0])
    line = lines[1] if preset and len(lines) > 1 else lines[0]
    if re.search(r"Key '.*' (is )?not in ", line):
        line = "there is no such setting"
    elif (kind := re.search(r"(?<=Value )('.*') of type '\w+' could not be converted to (\w+)", line)) is not None:
        line = f"{kind[1]} is not {KINDS.get(kind[2], kind[2])}"
    key = re.search(r"full_key: (\S+)", str(error))
    return ": ".join(filter(None, [f"{preset[1]}.yaml" if preset else "", key[1] if key else "", line]))
