"""The launcher, run for real on a small project that needs no network: its package says what it was called with."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "can-train"
version = "0"
dependencies = []
"""

BACKEND = """
import pathlib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    info = "can_train-0.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder, "can_train-0-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("can_train.pth", str(pathlib.Path("src").resolve()))
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: can-train\\nVersion: 0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "can_train-0-py3-none-any.whl"
"""

FIRST_USE = "first use: making .venv"
REPAIR = "the last set-up was interrupted"
UPDATE = "something changed or is missing"


class Checkout:
    """A checkout of the small project; calls its launcher with no network."""

    def __init__(self, root: Path, repository: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        (root / "scripts").mkdir(parents=True)
        for name in ("can-train", "scripts/environment.py"):
            shutil.copy2(repository / name, root / name)
        (root / "scripts" / "constraints.txt").touch()
        (root / "backend.py").write_text(BACKEND)
        self.ask_for("[]")
        package = root / "src" / "can_train"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text("import json, sys\nprint(json.dumps([sys.executable, *sys.argv[1:]]))\n")

    def ask_for(self, dependencies: str) -> None:
        (self.root / "pyproject.toml").write_text(
            PYPROJECT.replace("dependencies = []", "dependencies = " + dependencies)
        )

    def start(self, *arguments: str, launcher: Path | None = None, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, str(launcher or self.root / "can-train"), *arguments],
            env={**os.environ, "PIP_NO_INDEX": "1", **variables},
            cwd=self.root.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str, launcher: Path | None = None, **variables: str) -> tuple[int, str, str]:
        process = self.start(*arguments, launcher=launcher, **variables)
        output, messages = process.communicate()
        return process.returncode, output, messages


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Checkout:
    return Checkout(tmp_path / "a check out", repository)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("ready") / "a check out", repository)
    code, _, messages = checkout.call()
    assert code == 0, messages
    assert FIRST_USE in messages
    assert "GB on disk" in messages
    return checkout


def test_a_second_call_through_a_link_passes_its_arguments_on_in_silence(ready: Checkout, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(ready.root / "can-train")
    code, output, messages = ready.call("--set", "a b", launcher=tmp_path / "link")
    assert (code, json.loads(output), messages) == (0, [str(ready.venv / "bin" / "python"), "--set", "a b"], "")


def test_a_changed_pyproject_is_noticed_once(ready: Checkout) -> None:
    with (ready.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    code, _, messages = ready.call()
    assert (code, UPDATE in messages, FIRST_USE in messages) == (0, True, False)
    assert ready.call()[2] == ""


def test_what_pip_cannot_install_is_a_short_error_that_touches_nothing(ready: Checkout) -> None:
    ready.ask_for('["no-such-package"]')
    code, output, messages = ready.call()
    assert (code, output) == (2, "")
    assert "No matching distribution found for no-such-package" in messages
    assert "If no package index could be reached" in messages
    assert "Traceback" not in messages
    ready.ask_for("[]")
    code, _, messages = ready.call()
    assert (code, UPDATE in messages) == (0, True)


def test_an_environment_whose_python_is_gone_is_made_anew(checkout: Checkout) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    (checkout.venv / "bin" / "python").symlink_to("/nonexistent/python3")
    (checkout.venv / "can-train.stamp").write_text("0123abcd" * 8)
    code, output, messages = checkout.call("x")
    assert (code, REPAIR in messages) == (0, True)
    assert json.loads(output)[1:] == ["x"]


def test_an_environment_that_somebody_else_made_is_installed_into(checkout: Checkout) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(checkout.venv)], check=True)
    (checkout.venv / "notes.txt").touch()
    code, _, messages = checkout.call()
    assert (code, UPDATE in messages) == (0, True)
    assert (checkout.venv / "notes.txt").exists()
    assert checkout.call()[2] == ""


def test_a_set_up_that_was_killed_is_repaired_after_its_last_command_has_ended(checkout: Checkout) -> None:
    killed = checkout.start()
    while not (checkout.venv / "bin").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()  # for the launcher alone: what it started goes on
    code, _, messages = checkout.call()
    killed.communicate()
    assert (code, REPAIR in messages, "waiting for it to end" in messages) == (0, True, True)
    assert checkout.call()[2] == ""


def test_a_set_up_that_is_interrupted_says_so_in_a_line(checkout: Checkout) -> None:
    interrupted = checkout.start()
    while not (checkout.venv / "bin").exists():
        assert interrupted.poll() is None
        time.sleep(0.01)
    interrupted.send_signal(signal.SIGINT)
    _, messages = interrupted.communicate()
    assert interrupted.returncode == 130
    assert "interrupted; the next call repairs what is unfinished" in messages
    assert "Traceback" not in messages


def test_of_two_calls_at_once_one_sets_up_and_the_other_waits(checkout: Checkout) -> None:
    both = [checkout.start("a"), checkout.start("b")]
    outputs, messages = zip(*(process.communicate() for process in both), strict=True)
    assert [process.returncode for process in both] == [0, 0]
    assert [json.loads(output)[1:] for output in outputs] == [["a"], ["b"]]
    assert "".join(messages).count(FIRST_USE) == 1
    assert "".join(messages).count("waiting for it to end") == 1


def test_a_named_interpreter_is_used_as_it_is(checkout: Checkout) -> None:
    code, output, messages = checkout.call("x", CAN_TRAIN_PYTHON=sys.executable)
    assert (code, json.loads(output), messages) == (0, [sys.executable, "x"], "")
    assert not checkout.venv.exists()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("/nonexistent/python", "names nothing that can be run"),
        (shutil.which("true") or "true", "names no Python that works"),
        (sys.executable, "no-such-package>=3"),
    ],
)
def test_a_named_interpreter_that_will_not_do_is_a_short_error(checkout: Checkout, named: str, message: str) -> None:
    checkout.ask_for('["no-such-package>=3"]')
    code, output, messages = checkout.call(CAN_TRAIN_PYTHON=named)
    assert (code, output) == (2, "")
    assert message in messages
    assert "Traceback" not in messages


def test_an_old_python_is_told_so(checkout: Checkout) -> None:
    old = f"import runpy, sys; sys.version_info = (3, 6, 8); runpy.run_path({str(checkout.root / 'can-train')!r})"
    result = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, check=False)
    assert (result.returncode, "needs Python 3.11 or newer" in result.stderr) == (2, True)
    assert "Traceback" not in result.stderr
