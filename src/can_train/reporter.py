"""What lower layers tell a person while they work. The command line passes in a reporter that draws it on a terminal or
writes plain lines; everything below `cli` only calls these methods.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Stage(Protocol):
    """One piece of work in progress."""

    def advance(self, amount: int = 1, **figures: float) -> None:
        """Moves on by `amount` of the stage's unit; `figures` (a loss, say) are shown beside the progress."""


class Reporter(Protocol):
    """Where notices and progress go."""

    def notice(self, text: str) -> None:
        """Says one thing a person should know, once."""

    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> AbstractContextManager[Stage]:
        """Opens a piece of work of `total` units (None: unknown); it ends with the `with` block."""


class _SilentStage:
    def advance(self, amount: int = 1, **figures: float) -> None:
        pass


class SilentReporter:
    """A reporter that says nothing: the default of the Python API."""

    def notice(self, text: str) -> None:
        """Drops the notice."""

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Yields a stage that shows nothing."""
        yield _SilentStage()
