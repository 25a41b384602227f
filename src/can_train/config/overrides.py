"""Settings given on a command line: canonical names, aliases and contradictions."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError, unknown_name

ALIASES: Final[Mapping[str, str]] = {
    "max_epochs": "epochs",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "global_accum_steps": "gradient_accumulation_steps",
    "accum_steps": "gradient_accumulation_steps",
    "accumulation_muon_threshold": "accumulation_threshold",
    "preflight_muon_threshold": "preflight_threshold",
    "mb_backoff_factor": "backoff_factor",
    "gradient_clip_val": "grad_clip_norm",
    "scheduler_after_batch": "scheduler_interval",
}
"""Alias to canonical field of `TrainingSettings`; the names come from the projects that can-train unites."""


def canonical(name: str) -> str:
    """Resolves a setting's name: `-` and `_` are equivalent, and an alias gives its canonical name."""
    plain = name.replace("-", "_")
    return ALIASES.get(plain, plain)


_COMMA_OUTSIDE_BRACKETS: Final = re.compile(r",(?![^\[({]*[\])}])")


_SCHEDULER_AFTER_BATCH: Final = {"true": "step", "false": "epoch"}
"""The older switch `scheduler_after_batch` said yes or no where `scheduler_interval` names the interval."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One setting given by a person.

    Attributes:
        key: Canonical dotted key, `training.lr`.
        value: Text in Hydra's grammar where `grammar`, else the value itself.
        spelling: How it was written, for messages.
        grammar: Whether `value` is still to be parsed.
    """

    key: str
    value: Any
    spelling: str
    grammar: bool


def from_set(text: str) -> Assignment:
    """Reads one `--set group.key=value`.

    Raises:
        ConfigError: There is no `=`.
    """
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError("--set takes group.key=value", value=repr(text))
    name = name.strip()
    group, _, last = name.rpartition(".")
    key = f"{group}.{canonical(last)}" if group == "training" else name
    return Assignment(key=key, value=_translated(last, value), spelling=f"--set {name}", grammar=True)


def from_model_args(text: str, model_settings: type, mode_settings: type) -> list[Assignment]:
    """Reads `k=v,k=v`: each k is a setting of the training, the model or the mode, the first that knows it.

    Raises:
        ConfigError: A part has no `=`, or nobody knows its name; the message lists the nearest.
    """
    groups = {"training": TrainingSettings, "model": model_settings, "mode": mode_settings}
    # The first that knows a name has it.
    owner = {field.name: group for group, cls in reversed(groups.items()) for field in fields(cls)}
    found = []
    for part in filter(None, _COMMA_OUTSIDE_BRACKETS.split(text)):
        name, separator, value = part.partition("=")
        if not separator:
            raise ConfigError("--model-args takes k=v,k=v", value=repr(part))
        key = canonical(name.strip())
        if key not in owner:
            raise unknown_name("name in --model-args", name.strip(), owner)
        value = _translated(name.strip(), value)
        spelling = f"--model-args {name.strip()}"
        found.append(Assignment(key=f"{owner[key]}.{key}", value=value, spelling=spelling, grammar=True))
    return found


def check_contradictions(assignments: Iterable[Assignment]) -> None:
    """Checks that no setting is given twice under different spellings with different values.

    Raises:
        ConfigError: One is; the message names both spellings.
    """
    seen: dict[str, Assignment] = {}
    for new in assignments:
        old = seen.setdefault(new.key, new)
        if old.spelling != new.spelling and str(old.value) != str(new.value):
            raise ConfigError(
                f"{new.key} is given twice, with different values",
                value=f"{old.spelling} {old.value} and {new.spelling} {new.value}",
                remedy="Give it once",
            )


def split_list(text: str, *, existing: Collection[str] = ()) -> Sequence[str]:
    """Splits a comma-separated flag, unless the whole text is one of the `existing` names (a path may hold commas)."""
    return [text] if text in existing else [part for part in text.split(",") if part]


def _translated(name: str, value: str) -> str:
    if name.replace("-", "_") == "scheduler_after_batch":
        return _SCHEDULER_AFTER_BATCH.get(value.strip().lower(), value)
    return value
