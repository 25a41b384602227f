"""SIGTERM, SIGINT and SIGUSR2 (a scheduler's warning) as orderly exits: during training they wait until the step is
done and saved, elsewhere they stop the process at once. The first one decides; only a second Ctrl-C does not wait.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

WARNED: Final = 128 + signal.SIGUSR2
"""Exit status of a process that left because its time is nearly up."""

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a process that was asked to leave."""


class StopRequests:
    """Turns signals into `SystemExit(128 + signal)`: 143 for SIGTERM, 130 for SIGINT, 140 for SIGUSR2.

    Attributes:
        received: The first signal; None: none yet.
        terminated: Whether SIGTERM arrived, first or later.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.terminated = False
        self._deferring = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handles the signals inside the block; the handlers of before come back after it."""
        previous: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in _HANDLED}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a signal is only noted in `received`; it ends the process at the block's end.

        Raises:
            SystemExit: A signal arrived that the block left unanswered.
        """
        before, outer = self.received, self._deferring
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = outer
        if self.received != before and not outer:
            self.exit()

    def exit(self) -> None:
        """Leaves the process for the signal received.

        Raises:
            SystemExit: Always, with 128 + the signal's number.
        """
        raise SystemExit(128 + (self.received or 0))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        if first:
            self.received = number
        self.terminated |= number == signal.SIGTERM
        if first and not self._deferring:
            self.exit()
        # A scheduler sends SIGTERM twice, and again after its warning: what is being saved for the first must not be
        # cut short. If it is in earnest it kills. Nobody but a person sends SIGINT.
        if not first and number == signal.SIGINT:
            raise SystemExit(128 + number)
