"""Runs other programs for what they print, and reads the ends of logs. A program that is not there, fails or does not
answer in time is an answer: nothing here raises for it.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TAIL_BYTES: Final = 2**16
"""End of a log that is looked through for what ended a run: some thousand lines."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a program said.

    Attributes:
        status: Its exit status; None: it is not there, or did not answer in time.
        output: What it printed.
        complaint: What it printed as errors, or why there is no status.
    """

    status: int | None
    output: str = ""
    complaint: str = ""


def said_by(command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Said:
    """Runs a program.

    Args:
        command: The program and its arguments.
        seconds: How long it may take.
        environment: Its variables; None: this process's.
    """
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Said(status=None, complaint=f"{command[0]} has no answer after {seconds:g} s")
    except OSError as error:
        return Said(status=None, complaint=str(error))
    return Said(status=done.returncode, output=done.stdout, complaint=done.stderr)


def output_of(command: Sequence[str], *, seconds: float) -> str | None:
    """Runs a program and returns what it prints; None where it fails."""
    said = said_by(command, seconds=seconds)
    return said.output if said.status == 0 else None


def tail(path: Path) -> str:
    """Reads the end of a log; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
