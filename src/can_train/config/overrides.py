"""Overrides: the settings that a person gives, with canonical names, whichever way they are given."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

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
"""Alias to field of `TrainingSettings`; the names come from the projects that can-train unites."""

# The switch scheduler_after_batch says yes or no where scheduler_interval names the interval.
_TRANSLATIONS: Final = {"training.scheduler_interval": {"true": "step", "false": "epoch"}}

_COMMA_OUTSIDE_BRACKETS: Final = re.compile(r",(?![^\[({]*[\])}])")


@dataclass(frozen=True, kw_only=True)
class Override:
    """One setting given by a person.

    Attributes:
        key: Canonical dotted key, `training.lr`.
        value: Text in Hydra's grammar if `grammar`, else the value itself.
        spelling: How it was written, for messages.
        grammar: Whether `value` must still be parsed.
    """

    key: str
    value: Any
    spelling: str
    grammar: bool

    def __post_init__(self) -> None:
        if isinstance(self.value, str):
            value = _TRANSLATIONS.get(self.key, {}).get(self.value.strip().lower(), self.value)
            object.__setattr__(self, "value", value)


def canonical_name(name: str) -> str:
    """Resolves the name of a training setting: `-` and `_` are equivalent, and an alias gives its canonical name."""
    plain = name.replace("-", "_")
    return ALIASES.get(plain, plain)


def from_set(text: str) -> Override:
    """Reads one `--set group.key=value`.

    Raises:
        ConfigError: There is no key or no `=`.
    """
    name, separator, value = text.partition("=")
    name = name.strip()
    if not separator or not name:
        raise ConfigError("--set takes group.key=value", value=repr(text))
    group, _, last = name.rpartition(".")
    key = f"training.{canonical_name(last)}" if group == "training" else name
    return Override(key=key, value=value, spelling=f"--set {name}", grammar=True)


def from_model_args(text: str, groups: Mapping[str, type]) -> list[Override]:
    """Reads `--model-args k=v,k=v`.

    Args:
        text: What was given.
        groups: Settings class of each group that may have a setting k; the first group that has it gets the value.

    Raises:
        ConfigError: A part has no `=`, or no group has its name; the message lists the nearest.
    """
    group_of = {field.name: group for group, cls in reversed(list(groups.items())) for field in fields(cls)}
    found = []
    for part in filter(None, _COMMA_OUTSIDE_BRACKETS.split(text)):
        name, separator, value = part.partition("=")
        name = name.strip()
        if not separator:
            raise ConfigError("--model-args takes k=v,k=v", value=repr(part))
        key = canonical_name(name)
        if key not in group_of:
            raise unknown_name("name in --model-args", name, group_of)
        found.append(Override(key=f"{group_of[key]}.{key}", value=value, spelling=f"--model-args {name}", grammar=True))
    return found


def from_flags(values: Mapping[str, Any]) -> list[Override]:
    """Makes overrides of flags' values, by dotted key; they are taken literally."""
    return [
        Override(key=key, value=value, spelling=f"--{key.rpartition('.')[2].replace('_', '-')}", grammar=False)
        for key, value in values.items()
    ]


def check_contradictions(overrides: Iterable[Override]) -> None:
    """Raises ConfigError if a setting is given under two spellings with different values."""
    first: dict[str, Override] = {}
    for new in overrides:
        old = first.setdefault(new.key, new)
        if old.spelling != new.spelling and str(old.value) != str(new.value):
            raise ConfigError(
                f"{new.key} is given twice, with different values",
                value=f"{old.spelling} {old.value} and {new.spelling} {new.value}",
                remedy="Give it once",
            )


def split_list(text: str, *, existing: Collection[str] = ()) -> Sequence[str]:
    """Splits a comma-separated flag, unless the whole text is one of the `existing` names (a path may hold commas)."""
    return [text] if text in existing else [part for part in text.split(",") if part]
