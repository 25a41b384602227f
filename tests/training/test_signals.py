import os
import signal
from collections.abc import Callable

import pytest

from can_train.training.attempts import StopRequests


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def run_deferred(stops: StopRequests, *actions: Callable[[], object]) -> None:
    """Does one thing after another in a block that defers signals."""
    with stops.installed(), stops.deferred():
        for action in actions:
            action()


def fail() -> None:
    raise ValueError("its own")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR2, 140)])
def test_a_signal_ends_the_process_at_once(number: int, status: int) -> None:
    with pytest.raises(SystemExit) as stop, StopRequests().installed():
        send(number)
    assert stop.value.code == status


def test_a_deferred_signal_waits_until_it_is_asked_for() -> None:
    stops = StopRequests()
    seen: list[int | None] = []
    with pytest.raises(SystemExit) as stop:
        run_deferred(stops, lambda: send(signal.SIGTERM), lambda: seen.append(stops.received), stops.exit, fail)
    assert seen == [signal.SIGTERM]
    assert stop.value.code == 143


def test_a_deferred_signal_that_nobody_asked_for_ends_the_process_after_the_block() -> None:
    reached: list[str] = []
    with pytest.raises(SystemExit) as stop:
        run_deferred(StopRequests(), lambda: send(signal.SIGTERM), lambda: reached.append("the block's end"))
    assert stop.value.code == 143
    assert reached == ["the block's end"]


def test_an_error_of_the_block_is_not_hidden_by_a_signal() -> None:
    with pytest.raises(ValueError, match="its own"):
        run_deferred(StopRequests(), lambda: send(signal.SIGTERM), fail)


@pytest.mark.parametrize(("first", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR2, 140)])
def test_a_scheduler_that_says_it_twice_cuts_nothing_short(first: int, status: int) -> None:
    stops = StopRequests()
    reached: list[str] = []
    with pytest.raises(SystemExit) as stop:
        run_deferred(
            stops, lambda: send(first), lambda: send(signal.SIGTERM), lambda: reached.append("saved"), stops.exit
        )
    assert (stop.value.code, reached, stops.terminated) == (status, ["saved"], True)


def test_a_signal_during_the_exit_for_another_changes_nothing() -> None:
    reached: list[str] = []

    def leave() -> None:
        try:
            send(signal.SIGUSR2)
        finally:
            send(signal.SIGTERM)
            reached.append("recorded")

    with pytest.raises(SystemExit) as stop, StopRequests().installed():
        leave()
    assert (stop.value.code, reached) == (140, ["recorded"])


def test_a_block_within_a_deferring_one_does_not_end_the_process() -> None:
    stops = StopRequests()
    reached: list[str] = []

    def record() -> None:
        with stops.deferred():
            send(signal.SIGTERM)

    with pytest.raises(SystemExit):
        run_deferred(stops, record, lambda: reached.append("the outer block's end"))
    assert reached == ["the outer block's end"]


def test_a_second_ctrl_c_does_not_wait() -> None:
    with pytest.raises(SystemExit) as stop:
        run_deferred(StopRequests(), lambda: send(signal.SIGTERM), lambda: send(signal.SIGINT), fail)
    assert stop.value.code == 130


def test_after_the_block_a_signal_ends_the_process_at_once_again() -> None:
    stops = StopRequests()
    with stops.deferred():
        pass
    with pytest.raises(SystemExit), stops.installed():
        send(signal.SIGINT)


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests().installed():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
