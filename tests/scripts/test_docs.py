"""The documentation site: links in the repository lead to its pages, and a link that leads nowhere fails its build."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import can_train
from docs_pages import SOURCES, site_link

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("memory.md", "../README.md", "readme.md"),
        ("memory.md", "../scripts/bench/RESULTS.md", "measured/results.md"),
        ("memory.md", "slurm.md", "slurm.md"),
        ("readme.md", "docs/memory.md", "memory.md"),
        ("readme.md", "docs/", "index.md"),
        ("readme.md", "docs/demo.svg", "demo.svg"),
        ("measured/results.md", "../../docs/memory.md", "../memory.md"),
        ("measured/results.md", "gpu-check-h100-80gb.md", "gpu-check-h100-80gb.md"),
    ],
)
def test_a_link_in_the_repository_leads_to_a_page_of_the_site(page: str, link: str, expected: str) -> None:
    assert site_link(page, link) == expected


def test_the_page_of_names_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- docstring: (\w+) -->", page)
    assert shown == re.findall(r"^## (\w+)$", page, flags=re.MULTILINE)
    assert sorted(shown) == can_train.__all__


@pytest.mark.slow
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    for name in ("docs_pages.py", *SOURCES.values()):
        place = tmp_path / (name if name in SOURCES.values() else f"scripts/{name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place.relative_to(tmp_path), place)
    version = tmp_path / "src" / "can_train" / "__init__.py"
    version.parent.mkdir(parents=True)
    shutil.copy(can_train.__file__, version)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[a](memory.md#nothing), [b](nowhere.md)\n")
    (tmp_path / "docs" / "memory.md").write_text("# Memory\n")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 1
    assert "contains a link 'nowhere.md'" in built.stderr
    assert "does not contain an anchor '#nothing'" in built.stderr


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == can_train.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
