"""The decisions behind a set-up, without setting anything up."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import environment
from environment import INCOMPLETE, UNFINISHED, SetUpError, shortcomings

WITHOUT_TOOLS, WITH_TOOLS, OLDER = "installed", "installed with tools", "0123abcd" * 8


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "constraints.txt").write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text(
        'build-system = { requires = ["builder>=1"] }\n'
        'project = { dependencies = ["torch>=2.6"] }\n'
        'dependency-groups = { dev = ["pytest>=8"] }\n'
    )
    return tmp_path


@pytest.fixture
def venv(project: Path) -> Path:
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return project / ".venv"


@pytest.mark.parametrize(
    ("stamp", "tools", "current"),
    [
        (None, False, False),
        (WITHOUT_TOOLS, False, True),
        (WITH_TOOLS, False, True),
        (WITH_TOOLS, True, True),
        (WITHOUT_TOOLS, True, False),
        (OLDER, False, False),
        (INCOMPLETE, False, False),
        (UNFINISHED, True, False),
    ],
)
def test_an_environment_is_current_when_its_stamp_says_what_is_asked_for(
    venv: Path, stamp: str | None, tools: bool, current: bool
) -> None:
    made = {
        name: environment.fingerprint(venv.parent, tools=name == WITH_TOOLS) for name in (WITHOUT_TOOLS, WITH_TOOLS)
    }
    if stamp is not None:
        environment.write_stamp(venv, made.get(stamp, stamp))
    assert environment.is_current(venv.parent, tools=tools) is current


@pytest.mark.parametrize("stamp", [OLDER, INCOMPLETE, UNFINISHED])
def test_a_stamp_reads_back_as_written(tmp_path: Path, stamp: str) -> None:
    environment.write_stamp(tmp_path, stamp)
    assert environment.read_stamp(tmp_path) == stamp
    assert [file.name for file in tmp_path.iterdir()] == ["can-train.stamp"]


@pytest.mark.parametrize("damaged", ["", "{", "[]", "{}", "\x00\x00", OLDER[:-1], OLDER + "\n"])
def test_a_damaged_stamp_counts_as_unfinished(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "can-train.stamp").write_text(damaged)
    assert environment.read_stamp(tmp_path) == UNFINISHED


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/constraints.txt"])
def test_the_fingerprint_follows_what_is_asked_for(project: Path, changed: str) -> None:
    before = environment.fingerprint(project, tools=False)
    assert environment.fingerprint(project, tools=False) == before
    (project / changed).write_text("# other")
    assert environment.fingerprint(project, tools=False) != before


def test_the_fingerprint_follows_the_folder_and_the_interpreter(project: Path) -> None:
    before = environment.fingerprint(project, tools=False)
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").symlink_to(sys.executable)
    linked = environment.fingerprint(project, tools=False)
    moved = project.rename(project.with_name("moved"))
    assert len({before, linked, environment.fingerprint(moved, tools=False)}) == 3


def test_emptying_leaves_the_stamp_and_the_link_to_another_disk(tmp_path: Path) -> None:
    elsewhere = tmp_path / "scratch"
    (elsewhere / "lib").mkdir(parents=True)
    (elsewhere / "lib64").symlink_to("lib")
    (elsewhere / "pyvenv.cfg").touch()
    folder = tmp_path / ".venv"
    folder.symlink_to(elsewhere)
    environment.empty(folder)
    assert folder.is_symlink()
    assert [file.name for file in elsewhere.iterdir()] == ["can-train.stamp"]
    assert environment.read_stamp(folder) == UNFINISHED


def test_requirements_are_those_of_pyproject(project: Path) -> None:
    assert environment.requirements(project, tools=False) == ["builder>=1", "torch>=2.6"]
    assert environment.requirements(project, tools=True) == ["builder>=1", "torch>=2.6", "pytest>=8"]
    assert environment.requirements(project, tools=False, building=False) == ["torch>=2.6"]


def test_an_invalid_pyproject_is_a_readable_error(project: Path) -> None:
    (project / "pyproject.toml").write_text("[project")
    with pytest.raises(SetUpError, match=r"pyproject\.toml cannot be read"):
        environment.requirements(project, tools=False)


def test_a_folder_that_somebody_else_filled_is_left_alone(project: Path) -> None:
    (project / ".venv").mkdir()
    (project / ".venv" / "thesis.tex").touch()
    with pytest.raises(SetUpError, match="move it away"):
        environment.venv_python(project, tools=False)
    assert [file.name for file in (project / ".venv").iterdir()] == ["thesis.tex"]


def test_a_python_without_ensurepip_is_named_with_the_remedy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SetUpError, match="python3-venv"):
        environment.venv_python(project, tools=False)
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "installed", "lacking"),
    [
        ((3, 11), {"torch": "2.6.0+cu124", "torch_geometric": "2.7.0"}, []),
        ((3, 12), {"torch": "2.10", "torch_geometric": "2.6"}, []),
        ((3, 11), {"torch": "2.5.1", "torch_geometric": "3"}, ["torch>=2.6 (it has 2.5.1)"]),
        ((3, 11), {"torch": "2.6.0rc1"}, ["torch_geometric>=2.6"]),
        ((3, 9), {}, ["Python 3.11 or newer (it is 3.9)"]),
    ],
)
def test_a_named_interpreter_is_told_what_it_lacks(
    version: tuple[int, int], installed: dict[str, str], lacking: list[str]
) -> None:
    assert shortcomings(version, installed, ["torch>=2.6", "torch_geometric>=2.6"]) == lacking


# What the repository's own files must keep to


def test_every_requirement_is_a_name_with_a_lowest_version(repository: Path) -> None:
    required = environment.requirements(repository, tools=True)
    assert [text for text in required if not re.fullmatch(r"[\w.-]+>=[\d.]+", text)] == []


def test_the_constraints_give_every_requirement_one_exact_version(repository: Path) -> None:
    lines = (repository / "scripts" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[\d.]+(b\d+)?", pin)] == []
    names = {_normal(pin.partition("==")[0]) for pin in pins}
    required = {_normal(text.partition(">=")[0]) for text in environment.requirements(repository, tools=True)}
    assert required <= names
    assert len(names) == len(pins)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_oldest_python_is_the_same_everywhere(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "version_info < (3, 11)" in (repository / "scripts" / "environment.py").read_text()


@pytest.mark.parametrize("name", ["can-train", "scripts/test", "scripts/check", "scripts/environment.py"])
def test_an_old_python_can_parse_what_tells_it_that_it_is_old(repository: Path, name: str) -> None:
    ast.parse((repository / name).read_text(), feature_version=(3, 6))
