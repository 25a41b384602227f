import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from can_train.errors import ConfigError
from can_train.reporter import LoggedReporter, SilentReporter
from can_train.runs.attempts import Attempts, StopRequests
from can_train.runs.run_folder import RunFolder
from can_train.training.train import logged


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


def test_of_signals_that_arrive_together_the_warning_counts_in_any_order() -> None:
    for numbers in ((signal.SIGUSR2, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR2)):
        stops = StopRequests()
        with pytest.raises(SystemExit) as stop:
            run_deferred(stops, *(partial(send, number) for number in numbers))
        assert (stop.value.code, stops.terminated) == (140, True)


def test_a_warning_does_not_interrupt_the_saving_after_sigterm() -> None:
    stops, done = StopRequests(), list[str]()
    with stops.installed():
        with pytest.raises(SystemExit) as stop:
            send(signal.SIGTERM)
        with stops.deferred():
            send(signal.SIGUSR2)
            done.append("saved")
        done.append("closed")
    assert (stop.value.code, done) == (143, ["saved", "closed"])


def test_a_signal_while_an_extension_module_is_initialized_ends_the_process_after_it() -> None:
    """Raised within it, it would come out as an ImportError."""
    done: list[str] = []

    class ExtensionFileLoader:
        """Stands for importlib's, whose frame is below those of an initialization."""

        def exec_module(self) -> None:
            send(signal.SIGUSR2)
            time.sleep(0.2)
            done.append("initialized")

    ExtensionFileLoader.exec_module.__code__ = ExtensionFileLoader.exec_module.__code__.replace(
        co_qualname="ExtensionFileLoader.exec_module"
    )

    def import_and_wait() -> None:
        ExtensionFileLoader().exec_module()
        time.sleep(10)

    with pytest.raises(SystemExit) as stop, StopRequests().installed():
        import_and_wait()
    assert (stop.value.code, done) == (140, ["initialized"])


def test_a_signal_in_a_destructor_ends_the_process_after_it() -> None:
    """Python ignores an exception that is raised within it: the process would go on until it is killed."""
    done: list[str] = []

    class Freed:
        def __del__(self) -> None:
            send(signal.SIGTERM)
            done.append("freed")

    def free_and_wait() -> None:
        Freed()
        time.sleep(10)

    with pytest.raises(SystemExit) as stop, StopRequests().installed():
        free_and_wait()
    assert (stop.value.code, done) == (143, ["freed"])


@pytest.mark.parametrize(
    ("deferring", "kind", "ending"), [(False, SystemExit, "time_limit"), (True, ValueError, "failed")]
)
def test_what_a_signal_interrupts_may_fail_while_it_cleans_up(
    tmp_path: Path, deferring: bool, kind: type[BaseException], ending: str
) -> None:
    """Nothing that is deferred is interrupted: its errors are its own."""
    stops, attempts = StopRequests(), Attempts(tmp_path)

    def work() -> None:
        with stops.deferred() if deferring else nullcontext():
            try:
                send(signal.SIGUSR2)
            finally:
                fail()

    with pytest.raises(kind), stops.installed(), attempts.recorded(stops):
        work()
    ended = attempts.end(1)
    assert ended is not None
    assert ended.ending == ending


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


def log_of(folder: Path, action: Callable[[], object], ending: type[BaseException]) -> str:
    """Does something as a training of a run does; returns the run's log."""
    stops, reporter = StopRequests(), LoggedReporter(SilentReporter())
    with pytest.raises(ending), stops.installed(), logged(RunFolder(folder), reporter, stops):
        action()
    return (folder / "log.txt").read_text()


@pytest.mark.parametrize(("number", "job", "said"), [(signal.SIGINT, "", True), (signal.SIGTERM, "", True),
                                                     (signal.SIGINT, "7", True), (signal.SIGTERM, "7", False),
                                                     (signal.SIGUSR2, "7", False)])  # fmt: skip
def test_the_log_of_a_run_that_a_person_stopped_ends_with_the_line_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, job: str, said: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    log = log_of(tmp_path, lambda: send(number), SystemExit)
    assert log.splitlines()[0].endswith(f", job {job}") == bool(job)
    assert log.endswith(f"This continues the run:\n        can-train resume {tmp_path}\n") == said


def test_a_run_of_the_registry_is_continued_by_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    run_id = "20260728-101500-hcrl_ch_gat_student_normal-3fa9"
    for folder in (tmp_path / run_id, tmp_path / "state" / "runs" / run_id):
        folder.mkdir(parents=True)
    assert "can-train resume 0728-101500-3fa9\n" in log_of(tmp_path / run_id, lambda: send(signal.SIGINT), SystemExit)


def test_the_log_ends_with_the_error_and_with_a_traceback_where_nobody_expected_it(tmp_path: Path) -> None:
    def wrong() -> None:
        raise ConfigError("It must fit", value="7", remedy="Make it smaller")

    assert log_of(tmp_path, wrong, ConfigError).endswith("\nerror: It must fit: 7.\nMake it smaller.\n")
    assert "Traceback" in log_of(tmp_path, fail, ValueError)
