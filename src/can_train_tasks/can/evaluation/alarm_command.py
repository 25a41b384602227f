"""The command that `can-train detect --alarm-command` starts for each alarm and each end of an alarm.

The detector never waits for the command: events wait in a queue of bounded length, which a thread works off.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Final

from can_train.errors import ConfigError
from can_train.io.units import counted

KINDS: Final = ("alarm", "alarm_end")  # events that start the command
WAITING: Final = 64  # most events that wait for the command
TIMEOUT_S: Final = 10.0  # after this time, the command and its children are killed
LAST_S: Final = 1.0  # time in which the thread notices that its command was killed
_STANDARD_ERROR: Final = 2  # standard output has the events, which programs read


class AlarmCommand:
    """Starts a command for events, one process at a time; the event is JSON on the command's standard input.

    No shell reads the command, and nothing of the bus is in its arguments.

    Args:
        argv: The program and its arguments.
        tell: Prints a sentence for the user.
    """

    def __init__(self, argv: Sequence[str], tell: Callable[[str], None]) -> None:
        self._argv = argv
        self._tell = tell
        self._queue: Queue[Mapping[str, Any] | None] = Queue(WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        self.started = self.failed = self.dropped = 0
        # A command that hangs must not keep the detector from ending.
        self._thread = threading.Thread(target=self._work, name="alarm command", daemon=True)
        self._thread.start()

    def see(self, record: Mapping[str, Any]) -> None:
        """Takes an event, and returns at once; other events than alarms and their ends are left out."""
        if record["event"] not in KINDS:
            return
        try:
            self._queue.put_nowait(record)
        except Full:
            self.dropped += 1
            if self.dropped == 1:
                self._tell(f"--alarm-command is too slow: {WAITING} events wait for it, and further events are dropped")

    def close(self) -> None:
        """Waits at most `TIMEOUT_S` for the events in the queue, kills a command that is left, and drops the rest."""
        until_s = time.monotonic() + TIMEOUT_S
        try:
            with suppress(Full):
                self._queue.put(None, timeout=TIMEOUT_S)
            self._thread.join(max(0.0, until_s - time.monotonic()))
        finally:
            self._stopped.set()
            self._kill()
            self._thread.join(LAST_S)
            with suppress(Empty):
                while True:
                    self.dropped += self._queue.get_nowait() is not None

    def summary(self) -> list[str]:
        """Counts the processes and the events that were dropped, in sentences."""
        told = f"--alarm-command ran {counted(self.started, 'time')}"
        number = "all" if self.failed == self.started else f"{self.failed:,}"
        failed = f", {number} of them without success" if self.failed else ""
        dropped = f"; {counted(self.dropped, 'event')} did not reach it" if self.dropped else ""
        return [f"{told}{failed}{dropped}"]

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            if self._stopped.is_set():
                self.dropped += 1
                return
            if why := self._run(record):
                self.failed += 1
                if self.failed == 1:
                    self._tell(f"--alarm-command failed: {why}; further failures are counted, and told at the end")

    def _run(self, record: Mapping[str, Any]) -> str:
        """Runs the command for an event; returns why it failed, empty if it did not."""
        self.started += 1
        try:
            # Ctrl-C is for the detector: it reaches all processes of its session.
            self._process = process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=_STANDARD_ERROR, start_new_session=True
            )
        except OSError as error:
            return f"{self._argv[0]}: {error.strerror}"
        try:
            process.communicate(json.dumps(record, allow_nan=False).encode() + b"\n", timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            process.wait()
            return f"it took longer than {TIMEOUT_S:g} s and was killed"
        if process.returncode < 0:
            return f"signal {-process.returncode} ended it"
        return f"exit status {process.returncode}" if process.returncode else ""

    def _kill(self) -> None:
        """Kills the command and its children."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def alarm_argv(text: str) -> Sequence[str]:
    """Splits a command as a shell does.

    Raises:
        ConfigError: The text is no command, or names no program that can be started.
    """
    remedy = "Write it like --alarm-command '/path/to/program --option'"
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise ConfigError("--alarm-command is no command", value=f"{text!r}: {error}", remedy=remedy) from error
    if not argv:
        raise ConfigError("--alarm-command is empty", remedy=remedy)
    if shutil.which(argv[0]) is None:
        is_file = Path(argv[0]).is_file()
        what = "a file that cannot be executed" if is_file else "no program"
        raise ConfigError(f"--alarm-command begins with {what}", value=argv[0],
                          remedy=f"chmod +x {shlex.quote(argv[0])}" if is_file else remedy)  # fmt: skip
    return argv
