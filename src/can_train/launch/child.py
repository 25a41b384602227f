"""Runs a can-train line as a process of its own, in the foreground: its output passes through, and a signal that is
sent to this process reaches it once.
"""

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, TextIO

_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""What a person, a closing terminal or a scheduler sends."""

_STOPPED: Final = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2))
"""Exit statuses of a training that was stopped, and has saved itself."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a line ended.

    Attributes:
        status: Its exit status; 128 + the number of a signal that killed it, or that came as it finished.
        stopped: Whether somebody wished its end.
    """

    status: int
    stopped: bool


def run_line(arguments: Sequence[str], output: TextIO | None = None) -> Ended:
    """Runs `can-train` with arguments, and waits for its end.

    Args:
        arguments: Without the program's name.
        output: Where its results go; None: to this process's standard output.
    """
    sys.stdout.flush()
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "can_train", *arguments]
    # In a group of its own: the terminal's Ctrl-C would reach it beside ours, and a second one does not wait.
    with (
        _passing_on() as signals,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, process_group=0) as child,
    ):
        signals.reach(child)
        status = child.wait()
    status = status if status >= 0 else 128 - status
    if signals.first is not None:
        return Ended(status=status or 128 + signals.first, stopped=True)
    return Ended(status=status, stopped=status in _STOPPED)


class _Signals:
    """Signals that came, and the process that they are for."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._waiting: deque[int] = deque()
        self._child: subprocess.Popen[bytes] | None = None

    def handle(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        self._waiting.append(number)
        self._pass_on()

    def reach(self, child: "subprocess.Popen[bytes]") -> None:
        """Passes on those that came while the process was being started, and from now on all."""
        self._child = child
        self._pass_on()

    def _pass_on(self) -> None:
        """Empties the queue: a signal that comes in between is taken from it once, here or there."""
        with suppress(IndexError):
            while self._child is not None:
                self._child.send_signal(self._waiting.popleft())


@contextmanager
def _passing_on() -> Iterator[_Signals]:
    """Takes signals, but for those that this process was told to ignore (nohup)."""
    signals = _Signals()
    heeded = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, signals.handle) for number in heeded}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
