"""Runs one measurement in a process of its own, with a limit on its time: whatever state it leaves CUDA in, or how it
ends, the next one starts clean.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

LIMIT_S: Final = 400.0
"""Longest time of one measurement: a compiler may take minutes."""

TAIL_CHARACTERS: Final = 2000
"""Of a failed process's output that is kept: its error stands at the end."""


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a job of `gpu.worker`; what goes wrong with it, or with its process, is its result, under `error`."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        error = run_limited([sys.executable, "-P", "-m", "gpu.worker", json.dumps(job), str(result)])
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    return found | ({"error": error} if error else {}) | {"seconds": round(time.monotonic() - started, 1)}


def run_limited(
    command: list[str], *, limit_s: float = LIMIT_S, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Runs a command; returns None where it succeeds, else what went wrong, with the end of what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        # A file and a group of its own: processes that the command started (a compiler's) may outlive it, would keep a
        # pipe open, and hold the GPU.
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT, process_group=0)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            wrong = f"took longer than {limit_s:.0f} s"
        else:
            wrong = f"ended with status {status}" if status else ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return f"{wrong}\n{printed.read()[-TAIL_CHARACTERS:]}".rstrip() if wrong else None
