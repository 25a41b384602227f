"""Runs `tests/cuda` and reads what became of each test."""

import os
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from gpu.processes import run_limited


def run_cuda_tests(root: Path) -> dict[str, Any]:
    """Returns each test's outcome, their counts, and under `error` what went wrong."""
    # Plugins that happen to be installed may warn, and warnings are errors here.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-P", "-m", "pytest", str(root / "tests" / "cuda"), "--rootdir", str(root),
                   "--config-file", str(root / "pyproject.toml"), "-p", "no:cacheprovider", "-q", "-rs",
                   "--junit-xml", str(report)]  # fmt: skip
        error = run_limited(command, environment=environment)
        cases = read_report(report.read_text(encoding="utf-8")) if report.exists() else []
    found = {"counts": dict(Counter(case["outcome"] for case in cases)), "cases": cases}
    return found | {"error": error} if error else found


def read_report(xml: str) -> list[dict[str, str]]:
    """Reads pytest's JUnit report: of each test its name, its outcome, and why where it did not pass."""
    cases = []
    for case in ET.fromstring(xml).iter("testcase"):
        verdict = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if verdict is None else verdict.tag
        why = "" if verdict is None else verdict.get("message", "")
        cases.append({"name": case.get("name", ""), "outcome": outcome, "why": why})
    return cases
