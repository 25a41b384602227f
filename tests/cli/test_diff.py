"""`can-train diff` sees a growth of memory, between two lines and between two commits, and no refactoring."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from can_train.cli.main import main
from can_train.errors import GREW
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library

# Its weights take most of the memory, and 6 % more of them take 6 % more.
TASK = """
from dataclasses import dataclass

import can_train
import torch
from torch import nn


class Sums(can_train.Task):
    '''Signs of sums.'''

    def datasets(self):
        inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        samples = [(row, int(row.sum() > 0)) for row in inputs]
        return {"train": samples, "validation": samples[:8]}

    def model(self):
        return nn.Sequential(nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

    def loss(self, model, batch):
        inputs, signs = batch
        return {"loss": (nn.functional.cross_entropy(model(inputs), signs, reduction="sum"), len(signs))}


WIDTH = 40_000
"""
LINE = "--task sums.py:Sums --batch-size 8"
CARDS = ("--target-gpu", "t4,a100-40gb")


def git(*arguments: str) -> None:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    subprocess.run(["git", *arguments], check=True, capture_output=True, env={**os.environ, **identity})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: Path) -> Path:
    """A repository with the task in a folder of it, in which commands run."""
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "executable", str(warm_python))
    folder = tmp_path / "repository" / "tasks"
    folder.mkdir(parents=True)
    (folder / "sums.py").write_text(dedent(TASK))
    monkeypatch.chdir(folder)
    git("init", "--quiet", "..")
    git("add", "--all")
    git("commit", "--quiet", "--message", "A task")
    return folder


def change(folder: Path, old: str, new: str) -> None:
    path = folder / "sums.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def compared(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(("diff", *words, "--json", "--quiet")) == code
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.slow
def test_a_growth_of_6_percent_since_a_commit_is_an_error_and_a_refactoring_is_none(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(repository, "WIDTH = 40_000", "NUM_HIDDEN = 40_000")
    change(repository, "nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)",
           "nn.Linear(256, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, 2)")  # fmt: skip
    same = compared(capsys, LINE, "--against", "HEAD", *CARDS, "--fail-above", "0.1%")
    assert [device["device"] for device in same["devices"]] == ["t4-16gb", "a100-40gb"]
    assert [device["growth"] for device in same["devices"]] == [0, 0]
    assert all(device["before"] == device["after"] for device in same["devices"])

    change(repository, "NUM_HIDDEN = 40_000", "NUM_HIDDEN = 42_400")
    grown = ("diff", LINE, "--against", "HEAD", "--target-gpu", "t4")
    assert main((*grown, "--fail-above", "5%")) == GREW
    told = capsys.readouterr()
    assert "error: The predicted peak may grow by 5% at most: " in told.err
    assert f"before: {LINE} at HEAD\nafter:  {LINE}\n" in told.out
    assert max(map(len, told.out.splitlines())) <= 80
    assert main((*grown, "--fail-above", "7%")) == 0
    # The checkout has gone, and the working tree is as it was.
    listed = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1
    assert "42_400" in (repository / "sums.py").read_text()


@pytest.mark.slow
def test_micro_batches_of_two_lines_are_compared_with_as_many_samples(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = LINE.replace("--batch-size 8", "--batch-size 16")
    (device,) = compared(capsys, LINE, larger, "--target-gpu", "t4")["devices"]
    assert device["before"]["samples"] == device["after"]["samples"] == 8
    assert device["before"]["kinds"] == device["after"]["kinds"]
    assert sum(device["after"]["kinds"].values()) == device["after"]["peak_bytes"]
    assert device["growth"] == 0


@pytest.mark.slow
def test_a_training_that_fits_on_a_further_rung_alone_is_told_and_is_an_error(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = "nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)"
    change(repository, layers, "*[nn.Linear(256, 256) for _ in range(WIDTH)], nn.Linear(256, 2)")
    code = (repository / "sums.py").read_text()
    (repository / "sums.py").write_text(code.replace("40_000", "8"))
    (repository / "deep.py").write_text(code.replace("40_000", "16"))
    deep = LINE.replace("sums", "deep")
    lines = (LINE, deep, "--target-gpu", "sim:16MiB")
    assert main(("diff", *lines, "--fail-above", "1000%")) == GREW
    told = capsys.readouterr()
    assert "fits only where the optimizer's state waits on the host, on rung offload-optimizer" in told.err
    assert "  after: on rung offload-optimizer, the optimizer's state waits on the host." in told.out
    (device,) = compared(capsys, *lines)["devices"]
    assert (device["before"]["rung"], device["after"]["rung"]) == ("split", "offload-optimizer")
    # A setting that names the rung is a choice.
    asked = (LINE, f"{deep} --fit offload-optimizer", *lines[2:], "--fail-above", "1000%")
    (device,) = compared(capsys, *asked)["devices"]
    assert device["after"]["rung_is_asked"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((LINE,), "diff compares two lines or runs: 1 given."),
        ((LINE, LINE, "--against", "HEAD"), "diff compares one line, beside --against: 2 given."),
        ((LINE, LINE, "--fail-above", "much"), "--fail-above is a percentage: 'much'."),
        ((LINE, "--against", "nowhere"), "git rev-parse: fatal: Needed a single revision"),
        ((LINE, "--against=--all"), "--against is a revision: --all."),
        ((LINE, "no-such-run"), "no-such-run"),
        ((LINE, LINE, "--target-gpu", "t4,h1000"), "error: Unknown GPU: 'h1000'. Nearest of 82: h100-80gb"),
        ((LINE, LINE, "--target-gpu", ","), "error: --target-gpu names no GPU: ','."),
        ((f"{LINE} --lr 'x", LINE), "The quotes of a line are in pairs"),
        ((LINE.replace("Sums", "Sum"), LINE), "cannot be planned: Unknown class of sums.py: 'Sum'"),
    ],
)
def test_a_wrong_comparison_is_an_error_with_the_reason(
    repository: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], error: str
) -> None:
    assert main(("diff", *words)) == 2
    told = capsys.readouterr()
    assert error in " ".join(told.err.split())
    assert "Traceback" not in told.err


def test_against_needs_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main(("diff", LINE, "--against", "HEAD")) == 2
    assert "--against is a revision of the git repository around the current folder" in capsys.readouterr().err
