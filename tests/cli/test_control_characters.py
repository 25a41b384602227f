"""Names of files, and what stands in them, change nothing of the terminal that they are printed to."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from can_train.cli.main import main
from fakes.made_runs import RESULT, Runs
from fakes.trained_runs import bus_log, finished_run

TITLE, CLEAR, REVERSED = "\x1b]0;taken\x07", "\x9b2J\x1b[2J", "\u202e"
EVIL = f"a{TITLE}b{CLEAR}{REVERSED}c"
"""A name that sets the title of a terminal, clears it, and turns the direction of writing."""

RAW = re.compile(r"[^\n\t\x20-\x7e\u00a0-\u200d\u2010-\u2027\u202f-\u2065\u2070-\ud7ff\ue000-\uffff]")
"""Characters that nothing prints of its own accord."""


def raw(text: str) -> list[str]:
    return RAW.findall(text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of such a name, with a finished run and a log that have such names, too."""
    folder = tmp_path_factory.mktemp("place") / EVIL
    run = finished_run("gat")
    shutil.copytree(run, folder / "runs" / run.name)
    bus_log(folder / "logs" / f"{EVIL}.csv", seed=1, frames=400)
    (folder / "logs.txt").write_text(EVIL)
    return folder


LINES = [
    ["evaluate", "RUN", "--dataset", "logs", "--threshold", "-1e9", "--flagged-only"],
    ["evaluate", "RUN", "--dataset", "logs", "-v", "--scores", "scores.csv"],
    ["evaluate", "RUN", "--dataset", f"logs/{EVIL}.csv", "--json"],
    ["evaluate", "RUN", "--dataset", f"no{EVIL}"],
    ["detect", "RUN", "--input", f"logs/{EVIL}.csv", "--threshold", "-1e9"],
    ["--model", "gat", "--dataset", "logs", "--dry-run", "--device", "cpu"],
    ["--model", "gat", "--dataset", "logs.txt", "--device", "cpu"],
    ["--model", EVIL, "--dataset", "logs"],
    ["--task", f"{EVIL}.py:Task", "--dataset", "logs"],
    ["show", "RUN"], ["status", "RUN"], ["runs"], ["logs", "RUN"], ["report", "RUN", "--output", "report.html"],
    ["compare", "RUN", "RUN"], ["resubmit", "RUN", "--dry-run", "--dataset", "logs"], ["factors", EVIL],
    ["factors", "--export", f"{EVIL}/none"], ["show", EVIL], [EVIL], [f"--{EVIL}"],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES, ids=lambda line: ascii(" ".join(line)))
def test_no_command_prints_a_control_character_of_a_name(
    place: Path, line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_STATE_HOME", str(place))
    run = next((place / "runs").iterdir())
    main([str(run) if word == "RUN" else word for word in line])
    printed = capsys.readouterr()
    assert printed.out + printed.err
    assert (raw(printed.out), raw(printed.err)) == ([], [])
    if "--json" in line:
        assert EVIL in json.loads(printed.out)["dataset"]


def in_terminal(*arguments: str) -> str:
    """What a command prints into a terminal."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-P", "-m", "can_train", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer) as process:
        os.close(writer)
        parts = []
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while part := os.read(reader, 2**16):
                parts.append(part)
    os.close(reader)
    assert process.returncode == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


LOG = f"\x1b[1;32mgood\x1b[0m\r1/2\r2/2\r\n{TITLE}{CLEAR}a\tb\n"
"""Colours, a progress bar, and what a log has no business with."""
ESCAPED = "\\x1b]0;taken\\x07\\x9b2J\\x1b[2Ja\tb\n"


@pytest.mark.slow
def test_of_a_log_colours_alone_reach_a_terminal_and_not_even_these_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(tmp_path)
    (runs.add(1, RESULT) / "log.txt").write_bytes(LOG.encode())
    assert main(("logs", "last", *runs.flags)) == 0
    assert capsys.readouterr().out == f"good\n1/2\n2/2\n{ESCAPED}"
    assert in_terminal("logs", "last", *runs.flags) == f"\x1b[1;32mgood\x1b[0m\n1/2\n2/2\n{ESCAPED}\x1b[m"
