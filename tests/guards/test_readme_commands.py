"""The README's command lines are ones that can-train knows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from guards.sources import PACKAGE

ROOT = PACKAGE.parents[1]
DATASETS = {file.stem for file in (ROOT / "configs" / "dataset").glob("*.yaml")}


def command_lines(markdown: str) -> list[list[str]]:
    """The arguments of every can-train line in a text's blocks of shell lines, each once."""
    blocks = re.findall(r"^```(?:console|sh|bash)\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    pattern = re.compile(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\./)?can-train(?: (.*))?$")
    matches = [match for line in lines if (match := pattern.match(line))]
    return [shlex.split(text, comments=True) for text in dict.fromkeys(match[1] or "" for match in matches)]


LINES = command_lines((ROOT / "README.md").read_text(encoding="utf-8"))
TRAINING = [line for line in LINES if line and line[0].startswith("-")]
COMMANDS = [line for line in LINES if line and not line[0].startswith("-")]
BUILDING = [line for line in TRAINING if {"knowledge_distillation", "curriculum", "fusion"} & {*line}]
"""Lines that build on a finished run, which nobody has at the beginning."""


def answered(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "can_train", *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "HOME": str(folder), "XDG_STATE_HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def answer(*arguments: str, folder: Path) -> str:
    result = answered(*arguments, folder=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def with_synthetic_data(line: list[str]) -> list[str]:
    """The same line for data that everybody has, and without a run to wait for or to build on, which nobody has."""
    words = _joined(_joined(line, "--after"), "--autoencoder")
    words = [word for word in words if not word.startswith(("--after=", "--autoencoder="))]
    return [re.sub(r"^--dataset=.*", "--dataset=synthetic", word) for word in _joined(words, "--dataset")]


def _joined(line: list[str], flag: str) -> list[str]:
    if flag not in line:
        return line
    at = line.index(flag)
    return [*line[:at], f"{flag}={line[at + 1]}", *line[at + 2 :]]


def planned(line: list[str]) -> list[str]:
    return [*with_synthetic_data(line), *([] if {"--dry-run", "--help"} & {*line} else ["--dry-run"])]


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in TRAINING if line not in BUILDING], ids=shlex.join)
def test_a_training_line_of_the_readme_resolves(tmp_path: Path, line: list[str]) -> None:
    answer(*planned(line), folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("line", BUILDING, ids=shlex.join)
def test_a_line_that_builds_on_a_run_says_what_makes_one(tmp_path: Path, line: list[str]) -> None:
    result = answered(*planned(line), folder=tmp_path)
    assert result.returncode == 2
    assert "This makes one:\n  can-train --model" in result.stderr


@pytest.mark.parametrize("line", TRAINING, ids=shlex.join)
def test_a_data_set_in_the_readme_is_a_known_name_or_a_path(line: list[str]) -> None:
    named = [word.partition("=")[2] for word in _joined(line, "--dataset") if word.startswith("--dataset=")]
    unknown = [name for names in named for name in names.split(",") if name not in DATASETS and "/" not in name]
    assert unknown == []


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS, ids=shlex.join)
def test_a_command_of_the_readme_exists_with_its_options(tmp_path: Path, line: list[str]) -> None:
    explained = answer(line[0], "--help", folder=tmp_path)
    options = {word.partition("=")[0] for word in line if word.startswith("-")}
    assert {option for option in options if not re.search(rf"{option}\b", explained)} == set()


def test_the_readme_shows_training_and_the_factors() -> None:
    assert TRAINING
    assert ["factors"] in [line[:1] for line in COMMANDS]


def test_command_lines_are_found_in_blocks_of_shell_lines_only() -> None:
    block = "$ ./can-train --model gat \\\n  --set a='b c'  # why\ncan-trainer x\nCAN_X=1 can-train factors\n"
    text = f"can-train no\n```text\ncan-train makes .venv\n```\n```sh\n{block}```\n"
    assert command_lines(text) == [["--model", "gat", "--set", "a=b c"], ["factors"]]
