"""Code that a run's folder names runs for the user who started the run, and for others only when they ask for it."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import yaml

from can_train.cli.main import _COMMANDS, main
from can_train.config.task_settings import command_entries
from can_train.runs.run_folder import RunFolder
from fakes.own_tasks import write_task

STRANGER = 65534  # nobody

SMALL = "--dataset synthetic --set dataset.synthetic.seconds=20 --micro-batch-size 8 --dry-run --device cpu"
LINES = {
    "train": [f"--model gat {SMALL} --start-from RUN DIRS",
              f"--model gat {SMALL} --after RUN --submit --cluster local DIRS",
              f"--model gat --mode knowledge_distillation --size student {SMALL} --teacher RUN DIRS"],
    "demo": ["demo --help"],
    "doctor": ["doctor DIRS", "doctor --prune --yes DIRS"],
    "factors": ["factors STATE", "factors my_task --show STATE", "factors --json STATE"],
    "runs": ["runs DIRS", "runs --json DIRS", "runs --best best_validation_loss DIRS",
             "runs --best best_validation_loss --json DIRS", "runs --where training.lr>0 --columns run,why DIRS"],
    "top": ["top DIRS"],
    "sync": ["sync RUN OWN/copies DIRS"],
    "archive": ["archive OTHER OWN/copies --yes DIRS"],
    "tag": ["tag RUN good DIRS"],
    "note": ["note RUN hm DIRS"],
    "delete": ["delete OTHER --yes DIRS"],
    "show": ["show RUN DIRS", "show RUN --config DIRS", "show RUN --json DIRS", "show FOLDER"],
    "compare": ["compare RUN OTHER DIRS", "compare RUN OTHER --json DIRS"],
    "report": ["report RUN --output HTML DIRS", "report RUN OTHER --output HTML DIRS"],
    "status": ["status RUN DIRS", "status RUN --json DIRS"],
    "logs": ["logs RUN DIRS"],
    "cancel": ["cancel RUN DIRS"],
    "resume": ["resume RUN DIRS", "resume RUN --epochs 3 DIRS", "resume FOLDER --here STATE"],
    "evaluate": ["evaluate RUN DIRS", "evaluate FOLDER", "evaluate RUN --dataset synthetic DIRS"],
    "predict": ["predict RUN DIRS", "predict FOLDER"],
    "detect": ["detect RUN DIRS", "detect FOLDER"],
    "signals": ["signals LOG"],
    "export": ["export RUN HTML.pt DIRS", "export FOLDER HTML.pt"],
    "explain": ["explain RUN DIRS", "explain RUN --json DIRS", "explain FOLDER"],
    "diff": ["diff RUN RUN DIRS", "diff RUN OTHER --json DIRS", "diff FOLDER FOLDER"],
    "resubmit": ["resubmit RUN --seed 1 DIRS", "resubmit RUN --submit --cluster local DIRS"],
    "pipeline": [f"pipeline {SMALL} DIRS"],
    "completion": ["completion bash"],
    "after-job": ["after-job --state-dir OWN --status 0"],
    "complete-line": ["complete-line zsh show --runs-dir RUNS ''", "complete-line zsh --model gat --start-from ''"],
}  # fmt: skip
"""Lines of every command, with each way to name a run that it has."""

ABOUT_RUNS = (
    "runs",
    "show",
    "compare",
    "report",
    "resume",
    "evaluate",
    "export",
    "predict",
    "detect",
    "explain",
    "diff",
    "resubmit",
)
NEED_CODE = ("resume", "evaluate", "export", "predict", "detect", "explain", "diff", "resubmit")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/`, in which one run of a task in `code/` has finished, and the `state/` that knows it."""
    folder = tmp_path_factory.mktemp("trained")
    task = write_task(folder / "code")
    line = ["--task", f"{task}:MyTask", "--device", "cpu", "--epochs", "1", "--quiet",
            "--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]  # fmt: skip
    assert main(line) == 0
    return folder


class Place:
    """A copy of the trained run whose code touches `mark`, another one that has not finished, and a state folder."""

    def __init__(self, trained: Path, folder: Path) -> None:
        self.folder, self.mark, self.state = folder, folder / "MARK", folder / "own"
        shutil.copytree(trained / "code", folder / "code", ignore=shutil.ignore_patterns("__pycache__"))
        (first,) = (trained / "runs").iterdir()
        self.run, self.other = folder / "runs" / first.name, folder / "runs" / f"{first.name[:-4]}ffff"
        for run in (self.run, self.other):
            shutil.copytree(first, run)
        (self.other / "result.json").unlink()
        (folder / "code" / "my_file.py").write_text(
            f"import pathlib\npathlib.Path({str(self.mark)!r}).touch()\n{(folder / 'code' / 'my_file.py').read_text()}"
        )
        self.configure(task="my_file.py:MyTask", code_dir=str(folder / "code"))

    def configure(self, *, task: str, code_dir: str, **paths: str) -> None:
        for run in (self.run, self.other):
            config = RunFolder(run).config()
            config["task"] = task
            config["paths"] |= {"code_dir": code_dir, **paths}
            (run / "config.yaml").write_text(yaml.safe_dump(config))

    def register(self) -> None:
        """Enters the runs into the own registry, as if they had been started here."""
        for run in (self.run, self.other):
            entry = self.state / "runs" / run.name
            entry.mkdir(parents=True, exist_ok=True)
            record = {"schema": 1, "run_id": run.name, "path": str(run), "key": "my_task",
                      "time": "2026-01-01T00:00:00+00:00"}  # fmt: skip
            (entry / "run.json").write_text(json.dumps(record))

    def words(self, line: str, run: Path) -> list[str]:
        places = {"RUN": run.name, "FOLDER": f"{run}", "OTHER": self.other.name if run == self.run else self.run.name,
                  "DIRS": f"--runs-dir {run.parent} --state-dir {self.state}", "STATE": f"--state-dir {self.state}",
                  "HTML": str(self.folder / "report.html"), "OWN": str(self.state), "RUNS": str(run.parent),
                  "''": ""}  # fmt: skip
        line = re.sub(r"\b[A-Z]+\b|''", lambda found: places.get(found[0], found[0]), line)
        return line.split(" ")

    def has_run(self) -> bool:
        """Whether the code of the run has run since it was asked last."""
        forget_modules()
        ran = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        return ran


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.startswith(("my_file", "helpers"))]:
        del sys.modules[name]


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"SLURM_JOB_ID=1\0")))
    forget_modules()
    path = [*sys.path]
    yield Place(trained, tmp_path)
    sys.path[:] = path
    forget_modules()


def a_file(place: Place) -> None:
    """Leaves the configuration as it is: the task is a file."""


def a_module(place: Place) -> None:
    place.configure(task="my_file:MyTask", code_dir=str(place.folder / "code"))


def an_installed_module(place: Place) -> None:
    sys.path.insert(0, str(place.folder / "code"))
    place.configure(task="my_file:MyTask", code_dir="")


def test_each_command_has_lines_that_are_tried() -> None:
    assert LINES.keys() == {*_COMMANDS, *command_entries(), "train", "after-job", "complete-line"}


@pytest.mark.parametrize(
    ("command", "kind"),
    [*((command, a_file) for command in LINES),
     *((command, kind) for command in ABOUT_RUNS for kind in (a_module, an_installed_module))],
)  # fmt: skip
def test_no_command_runs_the_code_of_a_folder_that_was_put_among_the_runs(
    place: Place, command: str, kind: Callable[[Place], None], capsys: pytest.CaptureFixture[str]
) -> None:
    kind(place)
    for line in LINES[command]:
        for run in (place.run, place.other):
            words = place.words(line, run)
            code = main(words)
            assert not place.has_run(), words
            if command in NEED_CODE:
                assert code == 2
                assert f"{run} is not in your list of runs, {place.state}/runs" in capsys.readouterr().err


@pytest.mark.parametrize("command", NEED_CODE)
def test_the_code_runs_when_it_is_asked_for_with_the_line_that_the_error_names(
    place: Place, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = place.words(LINES[command][0], place.run)
    assert main(line) == 2
    err = capsys.readouterr().err
    assert err == (
        "error: The code that this run names is not known to be yours, and was not run: "
        f"{place.run} is not in your list of runs, {place.state}/runs; it names {place.folder}/code/my_file.py.\n"
        f"This line runs it:\n  can-train {' '.join(line)} --trust-code\nRead the code first.\n"
    )
    # The task detects nothing live and predicts nothing, which its code has to be imported for.
    assert main([*line, "--trust-code"]) == (2 if command in ("detect", "predict") else 0)
    assert place.has_run()


def test_the_own_run_needs_no_flag_wherever_its_folder_was_moved(place: Place) -> None:
    place.register()
    assert main(["evaluate", str(place.run)]) == 0
    assert place.has_run()
    shutil.move(place.folder / "runs", place.folder / "moved")
    assert main(["evaluate", str(place.folder / "moved" / place.run.name)]) == 0
    assert place.has_run()


def test_a_copy_of_an_own_run_is_not_the_own_run(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.register()
    shutil.copytree(place.run, place.folder / "elsewhere" / place.run.name)
    assert main(["evaluate", str(place.folder / "elsewhere" / place.run.name)]) == 2
    assert not place.has_run()
    assert "is not in your list of runs" in capsys.readouterr().err


def owned(path: Path) -> None:
    os.chown(path, STRANGER, -1)


def open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def open_to_a_group(path: Path) -> None:
    os.chown(path, -1, STRANGER)
    path.chmod(path.stat().st_mode | 0o020)


def open_to_all_but_sticky(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o1777)


PLACES = {
    "the run": lambda place: place.run,
    "config.yaml": lambda place: place.run / "config.yaml",
    "the entry": lambda place: place.state / "runs" / place.run.name / "run.json",
    "the code's folder": lambda place: place.folder / "code",
    "the code": lambda place: place.folder / "code" / "my_file.py",
    "what it imports": lambda place: place.folder / "code" / "helpers.py",
    "what it may import": lambda place: place.folder / "code" / "package" / "inner" / "module.so",
    "a package": lambda place: place.folder / "code" / "package",
    "bytecode": lambda place: place.folder / "code" / "__pycache__" / "helpers.pyc",
    "its folder": lambda place: place.folder / "code" / "__pycache__",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which needs root")
@pytest.mark.parametrize(
    ("what", "change", "words"),
    [*((what, owned, "it belongs to nobody") for what in PLACES),
     *((what, change, words) for what in ("the run", "the code")
       for change, words in [(open_to_all, "every user may write to it"),
                             (open_to_all_but_sticky, "every user may write to it"),
                             (open_to_a_group, "the group nogroup may write to it")])],
)  # fmt: skip
def test_whatever_decides_the_code_must_be_the_users_own(
    place: Place, what: str, change: Callable[[Path], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place.register()
    for name in ("package/inner/module.so", "package/__init__.py", "__pycache__/helpers.pyc"):
        (place.folder / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (place.folder / "code" / name).touch()
    changed = PLACES[what](place)
    change(changed)
    assert main(["evaluate", str(place.run)]) == 2
    assert not place.has_run()
    assert f"{changed}: {words}.\n" in capsys.readouterr().err
    assert main(["evaluate", str(place.run), "--trust-code"]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which needs root")
def test_a_link_on_the_way_to_the_code_must_be_the_users_own(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.register()
    link = place.folder / "link"
    link.symlink_to(place.folder / "code")
    place.configure(task="my_file.py:MyTask", code_dir=str(link))
    assert main(["evaluate", str(place.run)]) == 0
    assert place.has_run()
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    assert main(["evaluate", str(place.run)]) == 2
    assert not place.has_run()
    assert f"{link}: it belongs to nobody" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which needs root")
def test_a_folder_above_the_code_must_be_closed_to_others_or_sticky(place: Place) -> None:
    place.register()
    place.folder.chmod(0o1777)
    assert main(["evaluate", str(place.run)]) == 0
    assert place.has_run()
    place.folder.chmod(0o777)
    assert main(["evaluate", str(place.run)]) == 2
    assert not place.has_run()
