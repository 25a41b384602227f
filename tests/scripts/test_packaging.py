"""What `pip install` gets: a source archive that builds, and a wheel with everything in it."""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def build(project: Path, target: str, folder: Path) -> Path:
    """Builds with the installed hatchling: no network, no second environment."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The wheel, built from the source archive, as an installer without the checkout does."""
    folder = tmp_path_factory.mktemp("packaging")
    with tarfile.open(build(repository, "sdist", folder / "sdist")) as archive:
        archive.extractall(folder / "sources", filter="data")
    (sources,) = (folder / "sources").iterdir()
    return build(sources, "wheel", folder / "wheel")


@pytest.fixture(scope="module")
def unpacked_wheel(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parents[1] / "unpacked")
    return wheel.parents[1] / "unpacked"


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The Python of a new environment, which finds the packages of this one but not can-train; no network is needed."""
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path / "venv" / "bin" / "python"


def install(python: Path, wanted: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-m", "pip", "--python", str(python), "install", "--no-index", wanted]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_wheel_with_every_extra_installs_into_a_fresh_environment(
    repository: Path, wheel: Path, fresh: Path, tmp_path: Path
) -> None:
    names = runpy.run_path(str(repository / "scripts" / "release-check"))
    installed = install(fresh, f"can-train[{names['EXTRAS']}] @ {wheel.as_uri()}")
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "small.py").write_text(names["TASK"])
    folders = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": ""}
    for line in ("--version", "--task small.py:Small --dry-run --device sim:64MiB"):
        command = [str(fresh.with_name("can-train")), *line.split()]
        ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, **folders}, capture_output=True, text=True,
                               check=False)  # fmt: skip
        assert ended.returncode == 0, ended.stderr


def test_an_extra_that_nothing_provides_is_noticed(wheel: Path, fresh: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(tmp_path / wheel.name, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("METADATA"):
                content = content.replace(b"optuna>=5", b"no-such-package>=5")
            changed.writestr(name, content)
    installed = install(fresh, f"can-train[search] @ {(tmp_path / wheel.name).as_uri()}")
    assert "no-such-package" in installed.stderr
    assert installed.returncode == 1


def test_the_wheel_has_every_module_and_every_preset(repository: Path, unpacked_wheel: Path) -> None:
    for package in ("can_train", "can_train_tasks"):
        modules = relative_files(repository / "src" / package, "*.py")
        assert modules
        assert relative_files(unpacked_wheel / package, "*.py") == modules
    presets = relative_files(repository / "configs", "*.yaml")
    assert relative_files(unpacked_wheel / "can_train" / "configs", "*.yaml") == presets
    assert presets


def test_release_check_installs_every_extra_and_tries_every_python(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = runpy.run_path(str(repository / "scripts" / "release-check"))
    installed = set(names["EXTRAS"].split(","))
    assert installed | set(re.findall(r"\w+", extras["all"][0].partition("[")[2])) == extras.keys()
    assert [f"Programming Language :: Python :: {python}" for python in names["PYTHONS"]] == [
        one for one in project["classifiers"] if one.startswith("Programming Language :: Python :: 3.")
    ]


def relative_files(folder: Path, pattern: str) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob(pattern))


def test_the_wheel_names_the_console_script_tasks_commands_and_the_licence(
    repository: Path, unpacked_wheel: Path
) -> None:
    (information,) = unpacked_wheel.glob("*.dist-info")
    declared = ConfigParser()
    declared.read(information / "entry_points.txt")
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert dict(declared["console_scripts"]) == {"can-train": "can_train.__main__:main"}
    for group, entries in project["entry-points"].items():
        assert dict(declared[group]) == entries
        assert all((unpacked_wheel / f"{entry.partition(':')[0].replace('.', '/')}.py").exists()
                   for entry in entries.values())  # fmt: skip
    assert "MIT License" in (information / "licenses" / "LICENSE").read_text()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["detect", "--help"], ["--model", "gat", "--dataset", "synthetic", "--dry-run"]]
)
def test_the_wheel_runs_away_from_the_checkout(unpacked_wheel: Path, tmp_path: Path, arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "can_train", *arguments],
        env={**os.environ, "PYTHONPATH": str(unpacked_wheel), "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
