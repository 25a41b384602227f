"""A resolved configuration with some settings changed: values in Hydra's grammar, names checked against those that the
configuration has.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from can_train.config.assignments import Assignment, check_contradictions, from_set
from can_train.config.compose import from_plain
from can_train.config.resolved import ResolvedRun
from can_train.errors import ConfigError, nearest_first

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
