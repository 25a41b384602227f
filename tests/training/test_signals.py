import os
import signal

import pytest

from can_train.training.signals import StopRequests


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_process_at_once(number: int, status: int) -> None:
    with pytest.raises(SystemExit) as stop, StopRequests().installed():
        send(number)
    assert stop.value.code == status


def test_a_deferred_signal_waits_until_it_is_asked_for() -> None:
    stops = StopRequests()
    with stops.installed(), stops.deferred():
        send(signal.SIGTERM)
    assert stops.received == signal.SIGTERM
    with pytest.raises(SystemExit) as stop:
        stops.exit()
    assert stop.value.code == 143


def test_a_second_signal_does_not_wait() -> None:
    stops = StopRequests()
    with stops.installed(), stops.deferred():
        send(signal.SIGTERM)
        with pytest.raises(SystemExit) as stop:
            send(signal.SIGINT)
    assert stop.value.code == 130


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests().installed():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
