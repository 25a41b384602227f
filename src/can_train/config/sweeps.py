"""Settings with several values on one line, in Hydra's grammar: the values of a grid, and the axes of a search.

`training.seed=1,2,3` is three runs of a grid, or a choice of a search; `training.lr=interval(1e-4,1e-2)` is an axis of
a search alone (`--trials`).
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, RangeSweep
from hydra.errors import HydraException

from can_train.config.axis import SearchAxis
from can_train.config.settings import canonical_name
from can_train.errors import ConfigError

SWEPT_GROUPS: Final = ("task", "settings", "model", "size", "dataset", "mode", "training", "memory")
"""Groups of settings and choices of presets that a sweep may list values for: they decide the result of a training. A
comma anywhere else belongs to the value: to a list of nodes, or to the path of a folder."""
UNREADABLE: Final = (HydraException, ValueError, RecursionError)
"""The parser's exceptions; the last two for thousands of digits or brackets."""
_DECADE: Final = 10.0
"""An interval whose ends differ by this factor is searched on a logarithmic scale, as rates and decays are."""


@cache
def parser() -> OverridesParser:
    """Returns Hydra's parser. Making one takes as long as a whole composition."""
    return OverridesParser.create()


def may_sweep(text: str) -> bool:
    """Tells of an assignment, or of a key, whether it may have several values."""
    return re.split(r"[.=]", text.strip().lstrip("+"), maxsplit=1)[0].strip() in SWEPT_GROUPS


def values_of(text: str) -> Sequence[str]:
    """Lists the single assignments that one `--set` means.

    Raises:
        ConfigError: It is a sweep without countable values.
    """
    try:
        override = parser().parse_override(text)
    except UNREADABLE:
        # Composition reports the error.
        return [text]
    if not override.is_sweep_override():
        return [text]
    values: list[str] = []
    # interval(0,1) has no values to list; nor has glob(*), which in Hydra stands for the presets of a group, or a range
    # that is empty or has a step of zero.
    with suppress(HydraException, ValueError):
        values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []
    if not values:
        remedy = "Write them out, as 0.1,0.01, or as range(0,3)"
        if isinstance(override.value(), IntervalSweep):
            remedy = f"Search it: --trials 20. Or write values out, as {text.partition('=')[0]}=0.1,0.01"
        raise ConfigError("The values of the sweep cannot be listed", value=text, remedy=remedy)
    return [f"{text.partition('=')[0]}={value}" for value in values]


def split_axes(sets: Sequence[str]) -> tuple[list[str], list[SearchAxis]]:
    """Splits the arguments of `--set` into single values and the axes of a search.

    Raises:
        ConfigError: An axis chooses presets, is empty, or has a setting that another axis has.
    """
    single: list[str] = []
    axes: dict[str, SearchAxis] = {}
    for text in sets:
        axis = _axis(text) if may_sweep(text) else None
        if axis is None:
            single.append(text)
            continue
        if axis.key in axes:
            raise ConfigError(f"{axis.key} is searched twice", value=text, remedy="Give it once")
        axes[axis.key] = axis
    return single, list(axes.values())


def _axis(text: str) -> SearchAxis | None:
    """Reads the axis of an assignment; None: it has one value, or cannot be read, which composition reports."""
    try:
        override = parser().parse_override(text)
    except UNREADABLE as error:
        key, _, value = text.partition("=")
        if value.strip().startswith("interval("):
            raise ConfigError("An interval needs a low and a higher end", value=text,
                              remedy=f"Write it as '{key}=interval(1e-4,1e-2)'") from error  # fmt: skip
        return None
    if not override.is_sweep_override():
        return None
    key, swept = setting_name(text.partition("=")[0]), override.value()
    if "." not in key:
        raise ConfigError("A search chooses values of settings, not presets", value=text,
                          remedy=f"Start a search for each: --{key} NAME --trials …")  # fmt: skip
    if isinstance(swept, IntervalSweep):
        return _interval(key, text, swept)
    if isinstance(swept, RangeSweep) and all(isinstance(each, int) for each in (swept.start, swept.stop, swept.step)):
        numbers = [int(value) for value in override.sweep_string_iterator() if value] if swept.step else []
        if len(numbers) > 1 and not swept.shuffle:
            low, high = min(numbers), max(numbers)
            step = abs(numbers[1] - numbers[0])
            return SearchAxis(key=key, low=float(low), high=float(high), step=step, is_integer=True)
    return SearchAxis(key=key, choices=tuple(each.partition("=")[2] for each in values_of(text)))


def setting_name(typed: str) -> str:
    """Returns the name of a setting, as `resolved.flat_settings` has it, from a name as it is typed."""
    group, _, last = typed.strip().lstrip("+").rpartition(".")
    group = "task" if group == "settings" else group
    return f"{group}.{canonical_name(last) if group == 'training' else last}" if group else last


def _interval(key: str, text: str, swept: Any) -> SearchAxis:
    low, high, tags = swept.start, swept.end, set(swept.tags)
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError("An interval needs a low and a higher end", value=text,
                          remedy=f"Write it as '{key}=interval(1e-4,1e-2)'")  # fmt: skip
    if len(tags) > 1 or tags - {"log", "linear"}:
        raise ConfigError("An interval has one tag, log or linear", value=text,
                          remedy=f"Write it as '{key}=tag(log,interval({low:g},{high:g}))'")  # fmt: skip
    if "log" in tags and low <= 0:
        raise ConfigError("A logarithmic scale begins above 0", value=text,
                          remedy=f"Write '{key}=tag(linear,interval({low:g},{high:g}))'")  # fmt: skip
    is_logarithmic = "log" in tags or ("linear" not in tags and low > 0 and high / low >= _DECADE)
    # int(interval(1,8)) has whole ends; the ends of interval(1,8) are numbers of any kind.
    is_integer = isinstance(low, int) and isinstance(high, int)
    return SearchAxis(key=key, low=float(low), high=float(high), is_logarithmic=is_logarithmic, is_integer=is_integer)
