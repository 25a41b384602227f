"""What errors say: the command as it can be typed where it was typed."""

import ast
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from can_train import errors, solve_accumulation
from can_train.cli.main import main
from can_train.errors import (
    COMMAND_VARIABLE,
    ArgumentError,
    CanTrainError,
    ConfigError,
    TaskError,
    errors_of_steps,
    first_sentence,
    from_os_error,
    with_command_name,
)
from can_train.fit.collate import Column
from can_train.io.records import unusable, write_text_atomic
from can_train.reporter import wrapped
from fakes.finished_runs import Shelf
from guards.sources import TASKS, Source, package_sources, parse


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("See can-train runs --help", "See ./can-train runs --help"),
        ("Try:\n  can-train --model gat", "Try:\n  ./can-train --model gat"),
        ("rm a; can-train resume /home/can-train/runs/x", "rm a; ./can-train resume /home/can-train/runs/x"),
        ("can-train -h", "./can-train -h"),
        ("./can-train resume x", "./can-train resume x"),
        ("/opt/can-train resume x", "/opt/can-train resume x"),
        ("another version of can-train.", "another version of can-train."),
        ("can-train 0.1", "can-train 0.1"),
    ],
)
def test_command_lines_are_written_as_they_can_be_typed(monkeypatch: pytest.MonkeyPatch, text: str, typed: str) -> None:
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    assert with_command_name(text) == text
    monkeypatch.setenv(COMMAND_VARIABLE, "./can-train")
    assert with_command_name(text) == typed
    assert with_command_name(typed) == typed


def test_a_name_cannot_change_what_a_terminal_shows() -> None:
    error = ConfigError("A log must be readable", value="a\x1b[2J\rb\x9b1m.csv", remedy="Name\nanother\tone")
    assert str(error) == "A log must be readable: a\\x1b[2J\\x0db\\x9b1m.csv.\nName\nanother\tone."


def test_errors_and_notices_write_them_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "./can-train")
    error = ConfigError("A rule", value="x", remedy="Try: can-train runs")
    assert str(error) == "A rule: x.\nTry: ./can-train runs."
    assert error.to_plain() == {"rule": "A rule", "value": "x", "remedy": "Try: ./can-train runs", "exit_code": 2}
    long = f"can-train resume {'x' * 90} --epochs 3"
    assert wrapped(f"Go on:\n  {long}", 80) == f"Go on:\n  ./{long}"


@pytest.mark.parametrize(("typed", "named"), [("./can-train", "./can-train"), ("here/can-train", "here/can-train"),
                                              ("can-train", "can-train")])  # fmt: skip
def test_the_launcher_says_how_it_was_called(tmp_path: Path, repository: Path, typed: str, named: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "environment.py").write_text(
        "import sys\ndef project_python(root): return sys.executable\n"
    )
    shutil.copy2(repository / "can-train", tmp_path)
    (tmp_path / "here" / "can-train").symlink_to(tmp_path / "can-train")
    on_path = f"{tmp_path}{os.pathsep}" if "/" not in typed else ""
    variables = {**os.environ, "PATH": f"{on_path}{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin",
                 "PYTHONPATH": str(repository / "src")}  # fmt: skip
    variables.pop(COMMAND_VARIABLE, None)
    line = [typed, "status"]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert re.search(r"^Name one: (\S+) runs lists them", done.stderr, re.MULTILINE)[1] == named, done.stderr


@pytest.mark.parametrize(
    "line",
    [("--help",), ("runs",), ("runs", "--help"), ("factors",), ("status", "last"), ("show", "last"), ("logs", "last"),
     ("cancel", "nothing"), ("resume", "last", "--epochs", "0"), ("resubmit", "last", "--epochs", "x"),
     ("--model", "gat"), ("pipeline",), ("evaluate", "last")],
)  # fmt: skip
def test_no_command_names_another_one_in_a_way_that_cannot_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: tuple[str, ...]
) -> None:
    for name, value in {COMMAND_VARIABLE: "./can-train", "CAN_TRAIN_HOME": str(tmp_path / "state"),
                        "PATH": str(tmp_path)}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    if "last" in line:
        shelf = Shelf(tmp_path)
        shelf.put(1, shelf.resolved("gat", "normal"), None)
    main(line)
    output = capsys.readouterr()
    lines = f"{output.out}\n{output.err}".splitlines()
    assert [text for text in lines if re.search(r"(?<![./])can-train (--|-h|[a-z])", text)] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[/__w/pytorch/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:4242",
         "Connection closed by peer [127.0.0.1]:4242"),
        ("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: no memory", "err == 0"),
        ("⚠️ [../gloo/pair.cc:81] Timed out. This may help: set a longer one\nException raised from x", "Timed out"),
        ("No device. Look at it", "No device"),
        ("a file like x.cc is wrong", "a file like x.cc is wrong"),
        ("[/__w/pair.cc:537]", "RuntimeError"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_an_error_of_others_is_its_first_sentence_without_source_positions(text: str, sentence: str) -> None:
    assert first_sentence(RuntimeError(text)) == sentence


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").mkdir()
    with pytest.raises(OSError, match="Is a directory") as raised:
        write_text_atomic(tmp_path / "steps.jsonl", "")
    error = from_os_error(raised.value)
    assert error is not None
    place = f"{tmp_path}/steps.jsonl"
    assert f"A folder is in the place of a file, or a file in the place of a folder: {place}: " in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_said_in_words(number: int) -> None:
    error = from_os_error(OSError(number, os.strerror(number), "runs/x"))
    assert error is not None
    assert "does not answer as it should: runs/x: " in str(error)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "Free some space."), (errno.EDQUOT, "Free some space."),
     (errno.EIO, "Check the disk or the connection."), (errno.EACCES, "make this one readable and writable.")],
)  # fmt: skip
def test_the_remedy_for_a_state_folder_is_that_of_the_error(number: int, remedy: str) -> None:
    error = unusable("written", Path("state"), OSError(number, os.strerror(number)))
    assert str(error).splitlines()[1].endswith(remedy)


TOLD_ELSEWHERE = {"SettingError", "ArgumentError", "TaskError", "UntrustedCodeError"}
"""Errors whose remedy `config.compose` or the class adds, whose rule says how to call a function, or which a task's own
code raised.
"""


def without_remedy(source: Source) -> list[str]:
    """The places of a file where an error of a user's doing is made without a remedy."""
    names = {name for name, kind in vars(errors).items()
             if isinstance(kind, type) and issubclass(kind, CanTrainError)} - TOLD_ELSEWHERE  # fmt: skip
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [f"{source.path}:{call.lineno}" for call in calls if isinstance(call.func, ast.Name)
            and call.func.id in names and {each.arg for each in call.keywords} & {"remedy", None} == set()]  # fmt: skip


def test_every_error_has_a_remedy() -> None:
    sources = [*package_sources(), *package_sources(TASKS)]
    assert [place for source in sources for place in without_remedy(source)] == []


def test_an_error_without_a_remedy_is_noticed() -> None:
    assert without_remedy(parse("a.py", "raise DataError('x', value='y')")) == ["a.py:1"]
    assert without_remedy(parse("a.py", "raise DataError('x', remedy='y')")) == []


def test_an_error_of_can_train_in_a_backward_pass_stays_as_it_is() -> None:
    calls = {
        ArgumentError: lambda: solve_accumulation(0, 1),
        IndexError: lambda: Column(torch.zeros).joined_on_host([]),
    }
    for kind, call in calls.items():
        values = torch.ones(1, requires_grad=True)
        values.register_hook(lambda gradient, call=call: call())  # type: ignore[misc]
        with pytest.raises(kind), errors_of_steps():
            values.sum().backward()
    with pytest.raises(KeyError), errors_of_steps():
        raise KeyError


def test_an_error_of_a_method_that_can_train_calls_names_the_method() -> None:
    def counted(_: object) -> float:
        raise KeyError("weights")

    with pytest.raises(TaskError, match="counted of the task failed: KeyError: 'weights'"), errors_of_steps():
        Column(counted).stacked([0])  # type: ignore[arg-type]
