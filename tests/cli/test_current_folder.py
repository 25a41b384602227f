"""No Python that can-train starts runs the modules of the folder that somebody works in."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from can_train.cli.main import main

TRAPS = ("json", "torch", "typer", "numpy", "submitit", "signal", "socket", "selectors", "pickle", "can_train",
         "sitecustomize", "usercustomize", "tensorboard", "sklearn", "hydra")  # fmt: skip
"""Modules that a Python which looks into the current folder imports from there."""

TRAP = 'import os\nopen(os.environ["MARK"], "a").write(f"{__file__}\\n")\nraise ImportError("a trap")\n'

TASK = """
import torch
from torch import nn
import can_train

class Small(can_train.Task):
    def datasets(self):
        samples = [(torch.rand(4), torch.tensor(1)) for _ in range(64)]
        return {"train": samples, "validation": samples[:8], "test": samples[:8]}
    def model(self):
        return nn.Linear(4, 2)
    def loss(self, model, batch):
        points, labels = batch
        return {"class": (nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels))}
"""

SMALL = ("--task", "../task/small.py:Small", "--epochs", "1", "--device", "cpu")
TIMEOUT_S = 300


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder of such modules, with a task, and the console script as it is installed."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "can-train"
    script.write_text(f"#!{sys.executable}\nfrom can_train.cli.main import run\nrun()\n")
    script.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    for name in TRAPS:
        (folder / f"{name}.py").write_text(TRAP)
    # A task's own folder is the task's code: modules beside it are its own.
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "small.py").write_text(TASK)
    return folder


def give(folder: Path, program: Path, *arguments: str, **variables: str) -> str:
    """Gives a command in the folder; returns what it prints."""
    source = str(Path(main.__code__.co_filename).parents[2])
    # Its C++ library would else be compiled anew for each folder.
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    variables = {"MARK": str(folder / "MARK"), "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"),
                 "XDG_CACHE_HOME": cache, "PYTHONPATH": source, **variables}  # fmt: skip
    done = subprocess.run([program, *arguments], cwd=folder, env={**os.environ, **variables}, text=True, check=False,
                          capture_output=True, timeout=TIMEOUT_S)  # fmt: skip
    assert not (folder / "MARK").exists(), (folder / "MARK").read_text()
    assert done.returncode == 0 or arguments[0] == "doctor", done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        ("doctor",),
        (*SMALL, "--tracker", "tensorboard"),
        ("pipeline", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5", "--no-baselines", "--epochs",
         "1", "--device", "cpu", "--min-steps-per-epoch", "3", "--stages", "student"),
    ],
    ids=lambda line: line[0].removeprefix("--"),
)  # fmt: skip
def test_no_process_of_a_command_imports_from_the_current_folder(trapped: Path, line: tuple[str, ...]) -> None:
    give(trapped, trapped.parent / "bin" / "can-train", *line)


@pytest.mark.slow
def test_no_job_imports_from_the_current_folder(trapped: Path) -> None:
    give(trapped, trapped.parent / "bin" / "can-train", *SMALL, "--submit", "--cluster", "local")
    limit = time.monotonic() + TIMEOUT_S
    while not [*trapped.glob("runs/*/result.json")]:
        assert time.monotonic() < limit
        assert not (trapped / "MARK").exists(), (trapped / "MARK").read_text()
        time.sleep(0.2)
    give(trapped, trapped.parent / "bin" / "can-train", "status", "last")


def test_the_python_that_a_variable_names_imports_nothing_from_the_current_folder(
    trapped: Path, repository: Path
) -> None:
    give(trapped, repository / "can-train", "--version", CAN_TRAIN_PYTHON=sys.executable)


@pytest.mark.slow
def test_a_trap_is_noticed(trapped: Path) -> None:
    with pytest.raises(AssertionError, match=r"json\.py"):
        give(trapped, Path(sys.executable), "-c", "import json", PYTHONSAFEPATH="")
