"""Runs each measurement, and the CUDA tests, in a process of its own with a time limit: whatever state one leaves CUDA
in, and however it ends, the next one starts clean.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

LIMIT_S: Final = 400.0
"""Time limit of one process. Compiling a model may take minutes."""

TAIL_CHARACTERS: Final = 2000
"""How much of a failed process's output is kept. The error is at its end."""


def measure(job: Mapping[str, Any], *, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Runs a job of `gpu.worker` and returns its result.

    If the job or its process fails, the result has the reason under `error`, and the earlier measurements.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        error = run_limited([sys.executable, "-P", "-m", "gpu.worker", json.dumps(job), str(result)],
                            environment=environment)  # fmt: skip
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    return measured | ({"error": error} if error else {}) | {"seconds": round(time.monotonic() - started, 1)}


def run_limited(
    command: list[str], *, limit_s: float = LIMIT_S, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Runs a command. Returns None on success, otherwise the reason and the end of its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        # Processes that the command starts (a compiler's) may outlive it. They would keep a pipe open, so the output
        # goes to a file; and they would hold the GPU, so all of its process group are killed.
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


def run_cuda_tests(root: Path) -> dict[str, Any]:
    """Runs `tests/cuda`. Returns each test's outcome, their counts, and under `error` why the run failed."""
    # Warnings are errors in the tests, and plugins that happen to be installed may warn.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-P", "-m", "pytest", str(root / "tests" / "cuda"), "--rootdir", str(root),
                   "--config-file", str(root / "pyproject.toml"), "-p", "no:cacheprovider", "-q", "-rs",
                   "--junit-xml", str(report)]  # fmt: skip
        error = run_limited(command, environment=environment)
        cases = read_report(report.read_text(encoding="utf-8")) if report.exists() else []
    result = {"counts": dict(Counter(case["outcome"] for case in cases)), "cases": cases}
    return result | {"error": error} if error else result


def read_report(xml: str) -> list[dict[str, str]]:
    """Reads pytest's JUnit report: each test's name, its outcome, and why it did not pass."""
    cases = []
    for case in ET.fromstring(xml).iter("testcase"):
        verdict = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if verdict is None else verdict.tag
        why = "" if verdict is None else verdict.get("message", "")
        cases.append({"name": case.get("name", ""), "outcome": outcome, "why": why})
    return cases
