"""The alarm command never keeps the detector waiting: it runs apart, one process at a time, and within bounds."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from can_train_tasks.can.evaluation import alarm_command
from can_train_tasks.can.evaluation.alarm_command import AlarmCommand

Started = Callable[[str], AlarmCommand]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def started(told: list[str]) -> Iterator[Started]:
    commands = []

    def start(program: str) -> AlarmCommand:
        commands.append(AlarmCommand([sys.executable, "-S", "-c", program], told.append))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_events_that_a_slow_command_leaves_waiting_are_dropped_and_counted(
    started: Started, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm_command, "WAITING", 2)
    monkeypatch.setattr(alarm_command, "TIMEOUT_S", 0.2)
    command = started("import time; time.sleep(60)")
    for number in range(50):
        command.see({"event": "alarm", "number": number})
    command.see({"event": "silence"})
    command.close()
    assert told[0] == "--alarm-command is too slow: 2 events wait for it, and further events are dropped"
    assert command.dropped + command.started == 50
    assert command.started <= 3
    assert command.summary()[0].endswith(f"; {command.dropped} events did not reach it")


def test_a_command_that_hangs_is_killed_with_its_children(
    started: Started, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm_command, "TIMEOUT_S", 3.0)
    child = tmp_path / "child"
    program = (
        "import subprocess, pathlib\nchild = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\nchild.wait()"
    )
    command = started(program)
    command.see({"event": "alarm"})
    until(lambda: bool(told))
    assert "it took longer than 3 s and was killed" in told[0]
    status = Path("/proc") / child.read_text() / "stat"
    until(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_one_process_runs_at_a_time_and_all_events_reach_it(started: Started, tmp_path: Path) -> None:
    lock, got = tmp_path / "lock", tmp_path / "got"
    command = started(
        f"import os, sys; os.mkdir({str(lock)!r}); open({str(got)!r}, 'a').write(sys.stdin.read()); "
        f"os.rmdir({str(lock)!r})"
    )
    for kind in ("alarm", "alarm_end", "alarm"):
        command.see({"event": kind})
    command.close()
    assert got.read_text() == '{"event": "alarm"}\n{"event": "alarm_end"}\n{"event": "alarm"}\n'
    assert command.summary() == ["--alarm-command ran 3 times"]


def test_a_command_that_reads_nothing_or_has_gone_ends_nothing(
    told: list[str], started: Started, tmp_path: Path
) -> None:
    command = started("pass")
    command.see({"event": "alarm", "text": "x" * 10**6})
    command.close()
    assert (command.failed, told) == (0, [])
    gone = AlarmCommand([str(tmp_path / "gone")], told.append)
    gone.see({"event": "alarm"})
    gone.close()
    assert "No such file or directory" in told[0]
