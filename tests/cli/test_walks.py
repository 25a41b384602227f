"""Three people's first hour with a fresh clone, in a terminal of 80 columns: everything that stays on the screen.

`CAN_TRAIN_RECORD=1 scripts/test tests/cli/test_walks.py` records the walks anew, in walks/.
"""

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pexpect
import pytest

from can_train.reporter import SilentReporter
from can_train_tasks.can.settings import SyntheticSettings
from can_train_tasks.can.synthetic.writing import write_synthetic
from fakes.slurm_clusters import one_node
from guards.sources import PACKAGE

pytestmark = pytest.mark.slow

ROOT: Final = PACKAGE.parents[1]
RECORDS: Final = ROOT / "tests" / "cli" / "walks"
ROWS: Final = 24
COLUMNS: Final = 80
PROMPT: Final = "\x1b]133;A\x07$ "
LONGEST_S: Final = 60
SECONDS: Final = 10  # of a simulated drive
DRIVES: Final = {
    "drives/monday.csv": "train_02_with_attacks/DoS-1",
    "drives/tuesday.csv": "train_02_with_attacks/fuzzing-1",
    "later.csv": "test_01_known_vehicle_known_attack/DoS-1",
}
"""Logs of one vehicle."""
RECORDS_ANEW: Final = "CAN_TRAIN_RECORD" in os.environ
FIRST: Final = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
"""The task that README.md shows."""

VARYING: Final = (
    # As long as before, since lines are broken by their length.
    (r"\d{8}-\d{6}-(\w+)-[0-9a-f]{4}\b", r"20260102-030405-\1-0000"),
    (r"\b\d{4}-\d{6}-[0-9a-f]{4}", "0102-030405-0000"),
    (
        r"(?m)^(loading|training|judging|scoring|explaining|finding what fits in memory|(?:Check|Read)ing logs)  .*",
        r"\1  ━━",
    ),
    # Speed and time left of an epoch; the columns of a wide table leave no room for its speed.
    (r"(?m)^( *\d+/\d+  .*?)( {2,}[\d,.]+)?( +[\d.]+ [KM]iB) +\d+:\d\d$", r"\1  N\3  T:TT"),
    (r"\d+ trials?", "N trials"),
    (r"(?m)^time( +)\d.*", r"time\1T"),
    (r"\b\d+\.\d s\b", "T s"),
    (r"step \d+/(\d+), epoch \d+/(\d+)", r"step N/\1, epoch N/\2"),
    (r"(saved|Continuing) at step \d+", r"\1 at step N"),
    (r"(?m)^loss +[\d.]+ at best", "loss      N at best"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-01-02 03:04:05"),
    (r"(?<![\d.])[ \d]\d s\b", " T s"),
    # A log has more of these lines where a machine is slow.
    (r"(?m)^(training|judging|finding what fits in memory): .*\n|^Waiting .*\n", ""),
    # A run that is stopped soon after its first epoch may have another one.
    (r"(?m)^ *(?!1/)(\d+)/(?!\1 )\d+  .*\n", ""),
)
"""What differs from run to run: ids, times, speeds, and the step in which Ctrl-C arrives."""


class Screen:
    """The lines of a terminal, and of its scrollback."""

    def __init__(self) -> None:
        self.lines, self._row, self._column = [""], 0, 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\][^\x07]*\x07|\x1b\[[\d;?]*[a-zA-Z]|[^\x1b]", text):
            if len(part) == 1:
                self._put(part)
            elif part.startswith("\x1b["):
                self._move(part[2:-1], part[-1])

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\b":
            self._column = max(self._column - 1, 0)
        elif letter == "\n":
            self._to_row(self._row + 1)
        elif letter >= " ":
            if self._column == COLUMNS:
                self._to_row(self._row + 1)
                self._column = 0
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
            self._column += 1

    def _to_row(self, row: int) -> None:
        self._row = max(row, 0)
        self.lines += [""] * (self._row + 1 - len(self.lines))

    def _move(self, number: str, letter: str) -> None:
        if letter == "A":
            self._to_row(self._row - int(number or 1))
        elif letter == "B":
            self._to_row(self._row + int(number or 1))
        elif letter == "C":
            self._column += int(number or 1)
        elif letter == "K":
            kept = {"": (0, self._column), "1": (self._column, None), "2": (0, 0)}[number.strip("0")]
            self.lines[self._row] = self.lines[self._row][slice(*kept)]


@dataclass(frozen=True)
class Typed:
    """A line that a person types, and the text on the screen at which the person presses Ctrl-C."""

    line: str
    stopped_at: str = ""


@pytest.fixture
def clone() -> Iterator[Path]:
    """A folder as a fresh clone of the repository. Its path is always as long: lines are broken by their length."""
    folder = Path(tempfile.mkdtemp(prefix="clone-", dir="/tmp"))
    for name in ("can-train", "README.md", "docs"):
        (folder / name).symlink_to(ROOT / name)
    yield folder
    shutil.rmtree(folder)


def walk(folder: Path, lines: Sequence[Typed], python: Path, *, programs: Path | None = None) -> str:
    """Types lines in a clone; returns everything on the screen, as it is everywhere."""
    left_out = ("COLUMNS", "LINES", "NO_COLOR", "CAN_TRAIN_COMMAND")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"CAN_TRAIN_PYTHON": str(python), "CAN_TRAIN_HOME": str(folder / "state"), "TERM": "xterm",
                    "PATH": os.pathsep.join([*([str(programs)] if programs else []), os.environ["PATH"]]),
                    "PYTHONPATH": str(PACKAGE.parent), "PS1": r"\[\e]133;A\a\]$ ", "INPUTRC": os.devnull}  # fmt: skip
    shell = pexpect.spawn("bash", ["--norc", "--noprofile"], cwd=str(folder), env=environment,
                          dimensions=(ROWS, COLUMNS), encoding="utf-8", timeout=LONGEST_S)  # fmt: skip
    screen = Screen()

    def see(text: str) -> None:
        shell.expect_exact(text)
        screen.write(shell.before + shell.after)

    see(PROMPT)
    for typed in lines:
        shell.sendline(typed.line)
        if typed.stopped_at:
            see(typed.stopped_at)
            shell.sendcontrol("c")
        see(PROMPT)
    shell.close(force=True)
    return same_everywhere("\n".join(line.rstrip() for line in screen.lines), folder)


def same_everywhere(text: str, folder: Path) -> str:
    # The folder's path may be broken at the end of a line.
    path = "\n?".join(map(re.escape, str(folder)))
    for pattern, word in ((path, "/home/ada/can-train"), *VARYING):
        text = re.sub(pattern, word, text)
    text = re.sub(r"(?m)^Attempts\n(?:[^$\n].*\n)+", _same_attempts, text)
    return text.strip("\n").removesuffix("\n$") + "\n"


def _same_attempts(table: re.Match[str]) -> str:
    """The name of this machine, and the columns that are as wide as it."""
    return re.sub(r"─.*\n", "", re.sub(r" {2,}", "  ", table[0].replace(socket.gethostname(), "HOST")))


def compare(name: str, folder: Path, python: Path, lines: Sequence[Typed], *, programs: Path | None = None) -> None:
    path, seen = RECORDS / f"{name}.txt", walk(folder, lines, python, programs=programs)
    if RECORDS_ANEW:
        path.write_text(seen, encoding="utf-8")
    assert seen == path.read_text(encoding="utf-8")


def test_a_person_with_a_task_in_pytorch(clone: Path, warm_python: Path) -> None:
    (clone / "first.py").write_text(FIRST)
    compare("pytorch", clone, warm_python, [
        Typed("./can-train --task first.py"),
        Typed("./can-train --task first.py:Digits --dry-run --target-gpu t4"),
        Typed("./can-train --task first.py:Digits --device sim:64MiB --batch-size 600", stopped_at="  1/6 "),
        Typed("./can-train resume"),
        Typed("./can-train resume last"),
        Typed("./can-train resume last --set task.hidden=32"),
        Typed("./can-train show last"),
        Typed("./can-train report last"),
    ])  # fmt: skip


def test_a_person_with_logs_of_a_vehicle(clone: Path, warm_python: Path) -> None:
    made = clone / "state" / "drives"
    write_synthetic(made, SyntheticSettings(seconds=SECONDS), SilentReporter())
    (clone / "drives").mkdir()
    for name, drive in DRIVES.items():
        shutil.copy(made / f"{drive}.csv", clone / name)
    compare("can", clone, warm_python, [
        Typed("./can-train signals drives/monday.csv --id 244"),
        Typed("./can-train --model gat --dataset drvies"),
        Typed("./can-train --model gat --size student --dataset drives --device sim:64MiB", stopped_at="  1/6 "),
        Typed("./can-train resume last"),
        Typed("./can-train show lsat"),
        Typed("./can-train show last"),
        Typed("./can-train evaluate last --dataset later.csv --flagged-only"),
    ])  # fmt: skip


def test_a_person_on_a_cluster(clone: Path, warm_python: Path, tmp_path: Path) -> None:
    (clone / "first.py").write_text(FIRST)
    line = "./can-train --task first.py:Digits --batch-size 600 --device sim:64MiB --submit"
    compare("cluster", clone, warm_python, [
        Typed("./can-train --task first.py:Digits --submit --partition gpu"),
        Typed(f"{line} --time 8 hours"),
        Typed(f"{line} --time 2h --epochs 20"),
        Typed("./can-train logs last -f", stopped_at=" 1/20 "),
        Typed("./can-train cancel last"),
        Typed("./can-train status last"),
        Typed("./can-train resume last --time 10min"),
        Typed("./can-train logs last -f"),
        Typed("./can-train runs"),
    ], programs=one_node(tmp_path))  # fmt: skip
