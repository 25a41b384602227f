"""An axis of a search: a setting, and the values that it may have. A listing reads axes without importing Hydra."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SearchAxis:
    """A setting that a search chooses values for: of an interval, or of a list.

    Attributes:
        key: The setting, as it is typed.
        low: Lowest value of an interval.
        high: Highest value of an interval.
        step: Distance of the values of an interval; 0: all values.
        is_logarithmic: Whether the interval is searched on a logarithmic scale.
        is_integer: Whether the values of the interval are whole numbers.
        choices: The values of a list, as they are typed; empty: an interval.
    """

    key: str
    low: float = 0.0
    high: float = 0.0
    step: int = 0
    is_logarithmic: bool = False
    is_integer: bool = False
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return f"{self.key}: {', '.join(self.choices)}"
        kind = "whole numbers, " if self.is_integer else ""
        scale = f"in steps of {self.step}" if self.step > 1 else f"{'logarithmic' if self.is_logarithmic else 'linear'}"
        return f"{self.key}: {self.low:g} to {self.high:g}, {kind}{scale}"

    @property
    def middle(self) -> float | str:
        """The value in the middle, for a plan before the first trial."""
        if self.choices:
            return self.choices[len(self.choices) // 2]
        middle = math.sqrt(self.low * self.high) if self.is_logarithmic else (self.low + self.high) / 2
        if self.step:
            return int(self.low + self.step * ((middle - self.low) // self.step))
        # A whole number is a value of every setting.
        return round(middle) if self.low <= round(middle) <= self.high else middle

    def assignment(self, value: float | str) -> str:
        """Returns the argument of `--set` for a value."""
        return f"{self.key}={value!r}" if isinstance(value, float) else f"{self.key}={value}"
