"""The pictures of README.md and docs/ show the figures of today. Their figures stand as text on a page, whose outputs
test_examples.py compares with those of the commands, or in RESULTS.md.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.demo_picture import RECORD, pictures, read_record
from bench.picture import PICTURE, picture
from scripts.test_examples import example, same_everywhere

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
RESULTS: Final = (ROOT / "scripts" / "bench" / "RESULTS.md").read_text(encoding="utf-8")

MARKERS: Final = {"demo": RECORD, "show": example.REPORTED}
"""Where a page shows as text what the record of pictures has."""


def page_and_record(marker: str) -> tuple[str, Mapping[str, Any]]:
    """The output on the page, and the record that pictures were made with."""
    return example.shown(marker), json.loads(MARKERS[marker].read_text(encoding="utf-8"))


def shows(page: str, record: Mapping[str, Any]) -> bool:
    """Whether every line that was printed for pictures is on the page."""
    lines = same_everywhere(page).splitlines()
    return all(line in lines for line in same_everywhere("\n".join(record["printed"])).splitlines())


def old_pictures() -> list[str]:
    """Names each picture whose figures are others than those of the text, and the line that remakes it."""
    demo, report = (page_and_record(marker) for marker in MARKERS)
    old = []
    if PICTURE.read_text(encoding="utf-8") != picture(RESULTS):
        old.append(f"{PICTURE.name}: RESULTS.md has changed; scripts/bench/all --summary")
    for name, drawn in pictures(read_record()).items():
        if not shows(*demo) or (DOCS / name).read_text(encoding="utf-8") != drawn:
            old.append(f"{name}, {made(demo[1])}: scripts/bench/example demo picture")
    for name, digest in report[1]["sha256"].items():
        if not shows(*report) or hashlib.sha256((DOCS / name).read_bytes()).hexdigest() != digest:
            old.append(f"{name}, {made(report[1])}: scripts/bench/example start report")
    return old


def made(record: Mapping[str, Any]) -> str:
    return f"made on {record['date']} at {record['commit']}"


def test_every_picture_shows_the_figures_of_today() -> None:
    assert old_pictures() == []


def test_every_picture_is_compared() -> None:
    compared = {PICTURE.name, *pictures(read_record()), *page_and_record("show")[1]["sha256"]}
    assert {file.name for file in DOCS.iterdir() if file.suffix in (".svg", ".png")} == compared


def test_a_picture_of_another_run_is_noticed() -> None:
    for marker in MARKERS:
        _, record = page_and_record(marker)
        page = "\n".join(record["printed"])
        figure = re.findall(r"\d+\.\d+%", page)[-1]
        assert shows(page, record)
        assert not shows(page.replace(figure, "12.3%"), record)
