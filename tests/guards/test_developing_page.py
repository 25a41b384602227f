"""docs/developing.md by doing what it says: its additions are made in a copy of the repository, and their tests run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from guards.sources import PACKAGE
from guards.test_readme_commands import TEXTS, blocks

ROOT = PACKAGE.parents[1]
PAGE = TEXTS["docs/developing.md"]
NAMED = ("src", "tests", "configs", "scripts", "docs")
TRACKED = """
import sys
from pathlib import Path
from can_train.reporter import SilentReporter
from can_train.runs.trackers import TrackedRun, tracked
from fakes.tracked_runs import read_back
run = TrackedRun(run_id="a", folder=str(Path("a").absolute()), dataset="d", key="k", settings={"lr": 1})
Path("a").mkdir()
with tracked(run, ["lines"], SilentReporter()) as (tracker,):
    tracker.track(1, {"loss": 0.5})
read = read_back("lines", Path("a"))
assert (read.figures, read.settings) == ({"loss": [(1, 0.5)]}, {"lr": 1}), read
"""
"""What takes the place of the trackers' own tests, which train a model."""


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def run(command: list[str], copy: Path, given: str = "") -> str:
    paths = os.pathsep.join(str(copy / name) for name in ("src", "tests", "scripts"))
    done = subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": paths}, input=given, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in NAMED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def apply(text: str, copy: Path) -> None:
    (difference,) = blocks(text, "diff")
    # Lines may have moved since the page was written.
    run(["git", "apply", "-C1", "-"], copy, difference)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["policy", "log format", "tracker", "flag", "command"])
def test_an_addition_passes_the_tests_that_the_page_names(copy: Path, what: str) -> None:
    text = section(f"Add a {what}")
    apply(text, copy)
    if what == "tracker":
        run([sys.executable, "-c", TRACKED], copy)
        return
    for line in "".join(blocks(text, "console")).splitlines():
        program, *words = shlex.split(line)
        if program == "scripts/test":
            shown = run([*PYTEST, *words], copy)
            assert re.search(r"\d passed", shown)
        elif program == "awk":
            run(["bash", "-c", line], copy)
        else:
            assert program == "can-train"


def without(text: str, *lines: str) -> str:
    """The text whose difference adds empty lines in the place of some lines."""
    for line in lines:
        assert f"+{line}\n" in text
        text = text.replace(f"+{line}\n", "+\n")
    return text


@pytest.mark.slow
def test_a_step_that_the_page_leaves_out_is_noticed(copy: Path) -> None:
    apply(without(section("Add a policy"), '    "step": StepPolicy,'), copy)
    with pytest.raises(AssertionError, match="KeyError: 'step'"):
        run([*PYTEST, "tests/factors/test_policies_step.py"], copy)


@pytest.mark.slow
def test_a_command_that_nothing_loads_is_noticed(copy: Path) -> None:
    apply(section("Add a command"), copy)
    (copy / "src" / "can_train" / "cli" / "cards.py").unlink()
    with pytest.raises(AssertionError, match=r"cards: No module named 'can_train\.cli\.cards'"):
        run([*PYTEST, "tests/guards/test_command_tables.py"], copy)
