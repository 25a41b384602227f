"""Real processes: one that is there, one that is gone, and a number that is now another's."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from can_train.io.records import is_running, terminate, utc_now

LONG_AGO = "2020-01-01T00:00:00+00:00"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_a_process_is_alive_if_it_had_started_when_it_was_noted(sleeper: subprocess.Popen[bytes]) -> None:
    assert is_running(sleeper.pid, utc_now())
    assert not is_running(sleeper.pid, LONG_AGO)


def test_a_process_that_has_ended_is_not_alive_even_before_its_parent_has_looked(
    sleeper: subprocess.Popen[bytes],
) -> None:
    sleeper.kill()
    while is_running(sleeper.pid, utc_now()):
        pass
    sleeper.wait()
    assert not is_running(sleeper.pid, utc_now())


def test_the_right_process_is_terminated(sleeper: subprocess.Popen[bytes]) -> None:
    assert terminate(sleeper.pid, utc_now())
    assert sleeper.wait() == -signal.SIGTERM


def test_a_process_that_has_taken_over_a_number_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    assert not terminate(sleeper.pid, LONG_AGO)
    assert sleeper.poll() is None


def test_a_program_that_is_no_python_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert not terminate(process.pid, utc_now())
        assert process.poll() is None
        process.kill()
