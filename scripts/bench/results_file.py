"""RESULTS.md, of which every benchmark writes a section of its own."""

from pathlib import Path
from typing import Final

RESULTS: Final = Path(__file__).with_name("RESULTS.md")


def write_section(name: str, heading: str, text: str) -> None:
    """Puts a text between the markers called `name`, and leaves what other benchmarks wrote alone.

    Args:
        name: Of the markers `<!-- name:begin -->` and `<!-- name:end -->`.
        heading: What stands above them where there are none yet.
        text: What stands between them from now on.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    document = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Measured\n"
    if begin not in document:
        document += f"\n## {heading}\n\n{begin}\n{end}\n"
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    RESULTS.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
