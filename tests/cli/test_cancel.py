"""What is stopped for a run: its live jobs, or the one process that works on it, and nothing else."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from can_train.cli.cancel import cancel, check_own_jobs, stop
from can_train.errors import RunError
from can_train.io.records import JobId, utc_now
from can_train.runs.run_state import RunFacts
from can_train.runs.scheduler import QueueRow, SchedulerAnswer
from fakes.made_runs import Runs, begin
from fakes.run_facts import CLUSTER, JOBS, RUN, attempt, job, minute, of_job, slurm_job


class Asked:
    """What was asked to end; `answer` is what scancel says."""

    def __init__(self, answer: str = "") -> None:
        self.jobs: list[JobId] = []
        self.processes: list[int] = []
        self.answer = answer

    def cancel(self, jobs: Sequence[JobId]) -> str:
        self.jobs += jobs
        return self.answer

    def terminate(self, pid: int, noted: str) -> bool:
        self.processes.append(pid)
        return True


def stop_here(facts: RunFacts, asked: Asked) -> bool:
    return stop(facts, asked.cancel, asked.terminate, host="here")


@pytest.mark.parametrize("example", ["held", "child2", "preempt"])
def test_a_job_that_is_in_the_queue_is_cancelled(example: str) -> None:
    asked = Asked()
    assert stop(of_job(example), asked.cancel, asked.terminate)
    assert (asked.jobs, asked.processes) == ([slurm_job(JOBS[example])], [])


@pytest.mark.parametrize("resumed", ["10", ""])
def test_the_job_of_a_pack_is_left_to_its_other_runs_where_a_run_was_resumed_elsewhere(resumed: str) -> None:
    rows = [QueueRow(job=slurm_job(each), state="RUNNING", nodes="n1") for each in filter(None, ("9", resumed))]
    jobs = [job("9", packed_with=2), job(resumed) if resumed else job("7", executor="local")]
    attempts = [attempt(1, "9", "failed"), attempt(2, resumed) if resumed else attempt(2)]
    asked = Asked()
    assert stop_here(RunFacts(run=RUN, jobs=jobs, attempts=attempts, answer=SchedulerAnswer(queue=rows)), asked)
    assert (asked.jobs, asked.processes) == (([slurm_job(resumed)], []) if resumed else ([], [7]))


def test_of_a_job_that_has_ended_nothing_is_cancelled() -> None:
    asked = Asked()
    assert not stop(of_job("ok"), asked.cancel, asked.terminate)
    assert asked.jobs == []


def test_a_process_that_trains_is_terminated_and_not_what_started_it() -> None:
    asked = Asked()
    assert stop_here(RunFacts(run=RUN, jobs=[job("5", executor="local")], attempts=[attempt(1)]), asked)
    assert asked.processes == [7]


def test_a_process_that_has_not_begun_is_stopped_by_what_controls_it() -> None:
    asked = Asked()
    assert stop_here(RunFacts(run=RUN, jobs=[job("5", executor="local")]), asked)
    assert asked.processes == [5]


def test_a_process_that_has_ended_is_not_terminated() -> None:
    asked = Asked()
    assert not stop_here(RunFacts(run=RUN, attempts=[attempt(1, ending="failed")]), asked)
    assert asked.processes == []


def test_a_process_of_another_machine_cannot_be_reached_from_here() -> None:
    asked = Asked()
    with pytest.raises(RunError, match="process of another machine"):
        stop(RunFacts(run=RUN, attempts=[attempt(1, host="there")]), asked.cancel, asked.terminate)


def entered(state: str, start: str) -> RunFacts:
    """A run that a person started in a job of their own."""
    row = QueueRow(job=slurm_job("9"), state=state, start=start, name="bash")
    return RunFacts(run=RUN, attempts=[attempt(1, "9")], answer=SchedulerAnswer(queue=[row], local=CLUSTER))


def test_a_job_that_a_person_started_is_the_runs_where_it_runs_since_before_the_attempt() -> None:
    began = datetime.fromisoformat(minute(10)).astimezone()
    before, after = (f"{began + timedelta(hours=hours):%Y-%m-%dT%H:%M:%S}" for hours in (-1, 1))
    check_own_jobs(entered("RUNNING", before), _never)
    for facts in (entered("RUNNING", after), entered("PENDING", "")):
        with pytest.raises(RunError, match=r"job 9 on alpha, named bash, was not submitted by can-train"):
            check_own_jobs(facts, _never)


def _never(*_: object) -> NoReturn:
    raise AssertionError


def test_what_scancel_refuses_is_an_error() -> None:
    with pytest.raises(RunError, match="refuses to cancel the job: Access denied"):
        stop(of_job("held"), Asked("Access denied").cancel, Asked().terminate)


def test_a_cancel_that_is_refused_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tmp_path)
    for number in range(3):
        begin(runs.add(number), start_time=utc_now())
    (first, refused, _) = statuses = runs.look()
    assert all(status.state.live for status in statuses)

    def stop_first(facts: RunFacts) -> bool:
        if facts.run.run_id == refused.known.run_id:
            raise RunError("The run is another user's process", value="process 7", remedy="Ask that user to stop it")
        return True

    monkeypatch.setattr("can_train.cli.cancel.stop", stop_first)
    with pytest.raises(RunError, match="another user's process"):
        cancel([status.known.run_id for status in statuses], runs.runs_dir, runs.state_dir)
    cancelled = [status.known.run_id for status in statuses if runs.registry.cancels(status.known.run_id)]
    assert cancelled == [first.known.run_id]
