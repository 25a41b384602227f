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
    with pytest.raises(SystemExit) as stop, stops.installed(), stops.deferred():
        send(signal.SIGTERM)
        assert stops.received == signal.SIGTERM
        stops.exit()
    assert stop.value.code == 143


def test_a_deferred_signal_that_nobody_asked_for_ends_the_process_after_the_block() -> None:
    stops = StopRequests()
    reached = []
    with pytest.raises(SystemExit) as stop, stops.installed():
        with stops.deferred():
            send(signal.SIGTERM)
            reached.append("the block's end")
        reached.append("what comes after it")
    assert stop.value.code == 143
    assert reached == ["the block's end"]


def test_an_error_of_the_block_is_not_hidden_by_a_signal() -> None:
    stops = StopRequests()
    with pytest.raises(ValueError, match="its own"), stops.installed(), stops.deferred():
        send(signal.SIGTERM)
        raise ValueError("its own")


def test_after_the_block_a_signal_ends_the_process_at_once_again() -> None:
    stops = StopRequests()
    with pytest.raises(SystemExit), stops.installed():
        with stops.deferred():
            pass
        send(signal.SIGINT)
    assert stops.received == signal.SIGINT


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
