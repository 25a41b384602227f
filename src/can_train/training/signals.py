"""SIGTERM, SIGINT and SIGUSR2 (a scheduler's warning) as orderly exits: during training they wait until the step is
done and saved, elsewhere they stop the process at once. A second signal does not wait.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequests:
    """Turns signals into `SystemExit(128 + signal)`: 143 for SIGTERM, 130 for SIGINT, 140 for SIGUSR2."""

    def __init__(self) -> None:
        self.received: int | None = None
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
        """Inside the block the first signal is only noted in `received`; it ends the process at the block's end.

        Raises:
            SystemExit: A signal arrived that the block left unanswered.
        """
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self.received is not None:
            self.exit()

    def exit(self) -> None:
        """Leaves the process for the signal received.

        Raises:
            SystemExit: Always, with 128 + the signal's number.
        """
        raise SystemExit(128 + (self.received or 0))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        self.received = number
        if not (self._deferring and first):
            self.exit()
