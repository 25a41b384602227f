"""What SLURM prints becomes rows: as it was recorded from SLURM 22.05, and whatever else a program may print."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.slurm.client import AccountRow, QueueRow, Step, parse_sacct, parse_squeue, query_jobs, reason_in_words

RECORDED = Path(__file__).parents[1] / "fixtures" / "slurm"
JOBS = dict(line.split() for line in (RECORDED / "jobs.txt").read_text().splitlines())
"""Numbers of the recorded jobs, by what they are an example of."""


def accounts(example: str, element: str = "") -> list[AccountRow]:
    rows = parse_sacct((RECORDED / "sacct.txt").read_text())
    return [row for row in rows if row.job_id == JOBS[example] + element]


def queued(example: str, element: str = "") -> QueueRow:
    rows = parse_squeue((RECORDED / "squeue.txt").read_text())
    return next(row for row in rows if row.job_id == JOBS[example] + element)


@pytest.mark.parametrize(
    ("example", "state", "reason"),
    [
        ("ok", "COMPLETED", ""),
        ("fail", "FAILED", "NonZeroExitCode"),
        ("timeout", "TIMEOUT", "TimeLimit"),
        ("ptl", "PENDING", "PartitionTimeLimit"),
        ("held", "PENDING", "JobHeldUser"),
        ("bigcpu", "PENDING", "PartitionConfig"),
        ("child", "CANCELLED", "DependencyNeverSatisfied"),
        ("child2", "PENDING", "DependencyNeverSatisfied"),
        ("node2", "NODE_FAIL", "NodeDown"),
        ("nolog", "FAILED", "JobLaunchFailure"),
    ],
)
def test_squeue_tells_state_and_reason(example: str, state: str, reason: str) -> None:
    row = queued(example)
    assert (row.state, row.reason) == (state, reason)


def test_squeue_has_a_row_for_each_element_of_an_array() -> None:
    assert [queued("array", f"_{index}").state for index in range(4)] == ["COMPLETED", "FAILED"] * 2


def test_sacct_has_the_step_that_the_kernel_killed_under_a_job_that_only_failed() -> None:
    (row,) = accounts("oom")
    assert (row.state, row.exit_code) == ("FAILED", "1:0")
    assert row.steps[-1] == Step(name="0", state="OUT_OF_MEMORY", exit_code="0:125")


@pytest.mark.parametrize(
    ("example", "states"),
    [
        ("requeue", ["REQUEUED", "COMPLETED"]),
        ("preempt", ["PREEMPTED", "PENDING"]),
        ("node", ["NODE_FAIL", "PENDING"]),
    ],
)
def test_sacct_has_a_row_for_each_attempt_of_a_job_that_was_put_back(example: str, states: list[str]) -> None:
    rows = accounts(example)
    assert [row.state for row in rows] == states
    assert rows[0].steps


def test_sacct_tells_who_was_cancelled_by_somebody_and_what_never_started() -> None:
    (pending,), (running,), (child,) = accounts("cpend"), accounts("crun"), accounts("child")
    assert (pending.state, pending.by_person, pending.nodes) == ("CANCELLED", True, "")
    assert (running.state, running.by_person, running.nodes) == ("CANCELLED", True, "n1")
    assert (child.by_person, child.reason) == (False, "Dependency")


def test_a_step_without_its_job_is_nobodys() -> None:
    (row,) = parse_sacct("1|FAILED|1:0|||n1|||\n2.0|OUT_OF_MEMORY|0:125|||n1|||\n")
    assert row.steps == ()


@given(st.text())
def test_no_text_is_more_than_the_parsers_can_take(text: str) -> None:
    parse_squeue(text)
    parse_sacct(text)


CELLS = st.lists(st.text(st.characters(exclude_characters="|", categories=("L", "N", "P", "Z"))), max_size=10)


@given(st.lists(CELLS))
def test_lines_of_another_form_are_passed_over(lines: list[list[str]]) -> None:
    text = "\n".join("|".join(cells) for cells in lines)
    assert all(row.job_id for row in parse_squeue(text))
    assert all(row.job_id for row in parse_sacct(text))


@given(st.text())
def test_an_unknown_reason_stays_as_it_is(reason: str) -> None:
    assert reason_in_words(f"Odd{reason}") == f"Odd{reason}".strip().strip("()")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("PartitionTimeLimit", "its time limit is above the partition's"),
        ("(Resources)", "it waits for free nodes"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "a node that it needs is down, drained or reserved"),
        ("AssocGrpGRESMinutes", "a limit of its account is reached (AssocGrpGRESMinutes)"),
        ("QOSMaxJobsPerUserLimit",
         "a limit of a user under its quality of service is reached (QOSMaxJobsPerUserLimit)"),
        ("launch failed requeued held",
         "it could not be started on its nodes, and is held (scontrol release lets it go)"),
    ],
)  # fmt: skip
def test_reasons_are_said_in_words(reason: str, words: str) -> None:
    assert reason_in_words(reason) == words


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_jobs_are_asked_about_once_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("squeue", "sacct"):
        program(tmp_path, name, f'echo "$0 $@" >> {tmp_path}/calls')
    answer = query_jobs(["12", "13_4", "13_5", "no job", ""])
    assert (answer.queue, answer.accounts) == ([], [])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert all("--jobs=12,13 " in call for call in calls)


@pytest.mark.parametrize("script", ["exit 1", "echo Slurm accounting storage is disabled >&2; exit 1"])
def test_an_accounting_that_does_not_work_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program(tmp_path, "squeue", "echo '12|PENDING|Priority||N/A|5:00'")
    program(tmp_path, "sacct", script)
    answer = query_jobs(["12"])
    assert answer.queue == [QueueRow(job_id="12", state="PENDING", reason="Priority", time_limit="5:00")]
    assert answer.accounts is None


def test_a_job_that_squeue_has_never_heard_of_is_an_empty_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    program(tmp_path, "sacct", "")
    assert query_jobs(["12"]).queue == []


def test_without_slurm_nothing_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_jobs(["12"]).queue is None


def test_without_jobs_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_jobs([]).queue == ()
