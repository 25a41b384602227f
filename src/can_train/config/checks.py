"""The one checker that every settings dataclass calls from `__post_init__`."""

import math
from collections.abc import Collection

from can_train.errors import ConfigError, unknown_name


def check_range(
    name: str, value: float, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> None:
    """Checks that a number lies in [low, high], and strictly above `above`.

    Raises:
        ConfigError: It does not (not-a-number never does).
    """
    bounds = []
    if above is not None:
        bounds.append((value > above, f"greater than {above:g}"))
    if low is not None:
        bounds.append((value >= low, f"at least {low:g}"))
    if high is not None:
        bounds.append((value <= high, f"at most {high:g}"))
    if not all(holds for holds, _ in bounds):
        raise ConfigError(f"{name} must be {' and '.join(text for _, text in bounds)}", value=f"{value!r}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Checks that a value is one of a few names.

    Raises:
        ConfigError: It is not; the message lists them, nearest first.
    """
    if value not in choices:
        raise unknown_name(f"value of {name}", value, choices)


def number_or_off(name: str, text: str, *, on: float | None = None) -> float:
    """Reads a setting that is a positive number or a word.

    Args:
        name: Of the setting.
        text: A number, `off` (also spelt 0, false or none), or `on` where that has a meaning.
        on: What `on` means; None: nothing.

    Returns:
        The number; infinite for `off`.

    Raises:
        ConfigError: It is neither.
    """
    word = text.strip().lower()
    if word in ("off", "false", "none", "0"):
        return math.inf
    if on is not None and word in ("on", "true"):
        return on
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        words = "or off" if on is None else f", on ({on:g}) or off"
        raise ConfigError(f"{name} must be a positive number {words}".replace(" ,", ","), value=repr(text))
    return value
