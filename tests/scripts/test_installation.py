"""The decisions behind a set-up, without setting anything up."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import installation
from environment import shortcomings
from installation import INCOMPLETE, UNFINISHED, Need, SetUpError, Stamp

CURRENT = "0123abcd"


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


@pytest.mark.parametrize(
    ("stamp", "tools", "needed"),
    [
        (None, False, Need.INSTALLATION),
        (Stamp(CURRENT, tools=False), False, Need.NOTHING),
        (Stamp(CURRENT, tools=True), False, Need.NOTHING),
        (Stamp(CURRENT, tools=True), True, Need.NOTHING),
        (Stamp(CURRENT, tools=False), True, Need.INSTALLATION),
        (Stamp("of an older pyproject.toml", tools=True), False, Need.INSTALLATION),
        (Stamp(INCOMPLETE, tools=False), False, Need.INSTALLATION),
        (Stamp(UNFINISHED, tools=True), True, Need.REBUILDING),
    ],
)
def test_an_environment_gets_what_its_stamp_says_it_lacks(stamp: Stamp | None, tools: bool, needed: Need) -> None:
    assert installation.need(stamp, CURRENT, tools=tools) is needed


def test_a_stamp_reads_back_as_written(tmp_path: Path) -> None:
    installation.write_stamp(tmp_path, Stamp(CURRENT, tools=True))
    assert installation.read_stamp(tmp_path) == Stamp(CURRENT, tools=True)
    assert [file.name for file in tmp_path.iterdir()] == ["can-train.json"]


@pytest.mark.parametrize("damaged", ["", "{", "[]", "{}", "\x00\x00"])
def test_a_damaged_stamp_counts_as_unfinished(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "can-train.json").write_text(damaged)
    assert installation.read_stamp(tmp_path) == Stamp(UNFINISHED, tools=False)


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/constraints.txt"])
def test_the_fingerprint_follows_what_is_asked_for(project: Path, changed: str) -> None:
    before = installation.fingerprint(project)
    assert installation.fingerprint(project) == before
    (project / changed).write_text("# other")
    assert installation.fingerprint(project) != before


def test_the_fingerprint_follows_the_folder_and_the_interpreter(project: Path) -> None:
    before = installation.fingerprint(project)
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").symlink_to(sys.executable)
    linked = installation.fingerprint(project)
    moved = project.rename(project.with_name("moved"))
    assert len({before, linked, installation.fingerprint(moved)}) == 3


def test_emptying_leaves_the_stamp_and_the_link_to_another_disk(tmp_path: Path) -> None:
    elsewhere = tmp_path / "scratch"
    (elsewhere / "lib").mkdir(parents=True)
    (elsewhere / "lib64").symlink_to("lib")
    (elsewhere / "pyvenv.cfg").touch()
    folder = tmp_path / ".venv"
    folder.symlink_to(elsewhere)
    installation.empty(folder, tools=True)
    assert folder.is_symlink()
    assert [file.name for file in elsewhere.iterdir()] == ["can-train.json"]
    assert installation.read_stamp(folder) == Stamp(UNFINISHED, tools=True)


def test_requirements_are_those_of_pyproject(project: Path) -> None:
    assert installation.requirements(project, tools=False) == ["builder>=1", "torch>=2.6"]
    assert installation.requirements(project, tools=True) == ["builder>=1", "torch>=2.6", "pytest>=8"]
    assert installation.requirements(project, tools=False, building=False) == ["torch>=2.6"]


def test_an_invalid_pyproject_is_a_readable_error(project: Path) -> None:
    (project / "pyproject.toml").write_text("[project")
    with pytest.raises(SetUpError, match=r"pyproject\.toml cannot be read"):
        installation.requirements(project, tools=False)


def test_a_folder_that_somebody_else_filled_is_left_alone(project: Path) -> None:
    (project / ".venv").mkdir()
    (project / ".venv" / "thesis.tex").touch()
    with pytest.raises(SetUpError, match="move it away"):
        installation.make_ready(project, tools=False)
    assert [file.name for file in (project / ".venv").iterdir()] == ["thesis.tex"]


def test_a_python_without_ensurepip_is_named_with_the_remedy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SetUpError, match="python3-venv"):
        installation.make_ready(project, tools=False)
    assert not (project / ".venv").exists()


def test_last_lines_skip_blank_ones_and_cut_long_ones() -> None:
    text = "first\n\nsecond\n   \n" + "x" * 1000 + "\n"
    assert installation.last_lines(text, 2) == "  second\n  " + "x" * installation.LINE_CHARACTERS


def test_a_missing_network_is_named_and_anything_else_is_quoted() -> None:
    retries = "WARNING: Retrying (Retry(total={}, connect=None)) after connection broken\n"
    conflict = "ERROR: ResolutionImpossible\n"
    assert "no package index could be reached" in installation.failure(retries.format(0) + conflict)
    assert installation.failure(retries.format(4) + conflict).endswith("  ERROR: ResolutionImpossible")


def test_the_status_is_what_pip_began_last() -> None:
    output = "Collecting torch\n  Downloading torch.whl (195 MB)\nWARNING: Retrying\n\n"
    assert installation.pip_status(output) == "Downloading torch.whl (195 MB)"
    assert installation.pip_status("WARNING: odd\n") == "working"


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
    required = installation.requirements(repository, tools=True)
    assert [text for text in required if not re.fullmatch(r"[\w.-]+>=[\d.]+", text)] == []


def test_the_constraints_give_every_requirement_one_exact_version(repository: Path) -> None:
    lines = (repository / "scripts" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[\d.]+", pin)] == []
    names = {_normal(pin.partition("==")[0]) for pin in pins}
    required = {_normal(text.partition(">=")[0]) for text in installation.requirements(repository, tools=True)}
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
