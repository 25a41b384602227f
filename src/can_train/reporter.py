"""The interface through which lower layers report notices and progress. The command line passes in a reporter that
draws them on a terminal or writes plain lines.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Stage(Protocol):
    """A piece of work in progress."""

    def advance(self, amount: int = 1, **figures: float) -> None:
        """Advances by `amount` of the stage's unit; `figures`, such as a loss, are shown beside the progress."""


class Reporter(Protocol):
    """Receives notices and progress."""

    def notice(self, text: str) -> None:
        """Shows one sentence that a person should read."""

    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> AbstractContextManager[Stage]:
        """Opens a piece of work of `total` units (None: unknown); it ends with the `with` block."""


class _SilentStage:
    def advance(self, amount: int = 1, **figures: float) -> None:
        pass


class SilentReporter:
    """A reporter that shows nothing: the default of the Python API."""

    def notice(self, text: str) -> None:
        """Drops the notice."""

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Yields a stage that shows nothing."""
        yield _SilentStage()
