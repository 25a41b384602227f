"""Sweeps: one request whose settings have several values becomes one request for every combination of them. What a list
of values looks like is Hydra's grammar; what a value means is left to composition.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from can_train.config.compose import RunRequest
from can_train.errors import ConfigError

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
