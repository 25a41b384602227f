"""Writes the benchmarks' sections of RESULTS.md."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from can_train import __version__

RESULTS: Final = Path(__file__).with_name("RESULTS.md")


def write_section(name: str, heading: str, text: str) -> None:
    """Replaces one section of RESULTS.md, and adds it if it is new.

    Args:
        name: The section lies between `<!-- name:begin -->` and `<!-- name:end -->`.
        heading: The heading of a new section.
        text: The new content.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    document = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Measured\n"
    if begin not in document:
        document += f"\n## {heading}\n\n{begin}\n{end}\n"
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    RESULTS.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def environment(versions: Mapping[str, str]) -> str:
    """Returns a line with the machine and the versions that the figures belong to."""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"CPU ({cpu_name()}), {os.cpu_count()} cores; can-train {__version__}, {packages}."


def cpu_name() -> str:
    """Returns the processor's name as Linux reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, with the first row as its head."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
