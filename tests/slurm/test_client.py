"""SLURM's programs: what they print, as recorded from SLURM 22.05 and 21.08 or of any other form, and how they fail."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.runs.scheduler import AccountRow, JobStep, NoControllerError, QueueRow, SchedulerAnswer, reason_in_words
from can_train.slurm.client import (
    SUBMIT_TIMEOUT_S,
    Partition,
    expected_start,
    limited,
    moved_dependency,
    parse_partitions,
    parse_sacct,
    parse_squeue,
    query_cluster,
    query_jobs,
    refused_option,
    run_command,
)
from fakes.run_facts import CLUSTER, JOBS, RECORDED, slurm_job


def accounts(example: str, element: str = "") -> list[AccountRow]:
    rows = parse_sacct((RECORDED / "sacct.txt").read_text(), CLUSTER)
    return [row for row in rows if row.job == slurm_job(JOBS[example] + element)]


def queued(example: str, element: str = "") -> QueueRow:
    rows = parse_squeue((RECORDED / "squeue.txt").read_text(), CLUSTER)
    return next(row for row in rows if row.job == slurm_job(JOBS[example] + element))


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
    assert row.steps[-1] == JobStep(name="0", state="OUT_OF_MEMORY", exit_code="0:125")


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
    (row,) = parse_sacct("1|FAILED|1:0|||n1|||\n2.0|OUT_OF_MEMORY|0:125|||n1|||\n", CLUSTER)
    assert row.steps == ()


@given(st.text())
def test_no_text_is_more_than_the_parsers_can_take(text: str) -> None:
    parse_squeue(text, CLUSTER)
    parse_sacct(text, CLUSTER)


CELLS = st.lists(st.text(st.characters(exclude_characters="|", categories=("L", "N", "P", "Z"))), max_size=10)


@given(st.lists(CELLS))
def test_lines_of_another_form_are_passed_over(lines: list[list[str]]) -> None:
    text = "\n".join("|".join(cells) for cells in lines)
    assert all(row.job.number for row in parse_squeue(text, CLUSTER))
    assert all(row.job.number for row in parse_sacct(text, CLUSTER))


@given(st.text())
def test_an_unknown_reason_stays_as_it_is(reason: str) -> None:
    assert reason_in_words(f"Odd{reason}") == f"Odd{reason}".strip().strip("()")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("PartitionTimeLimit", "its time limit is above the partition's, and it can never start"),
        ("(Resources)", "it waits for free nodes"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "a node that it needs is down, drained or reserved"),
        ("AssocGrpGRESMinutes", "a limit of its account is reached (AssocGrpGRESMinutes)"),
        ("QOSMaxJobsPerUserLimit",
         "a limit of a user under its quality of service is reached (QOSMaxJobsPerUserLimit)"),
        ("launch failed requeued held",
         "it could not be started on its nodes, and is held (scontrol release lets it go)"),
        ("AssocMaxNodePerJobLimit",
         "it asks for more than its account gives one job, and can never start (AssocMaxNodePerJobLimit)"),
        ("QOSMaxGRESPerNode",
         "it asks for more than its quality of service gives one job, and can never start (QOSMaxGRESPerNode)"),
        ("QOSMinGRES", "it asks for less than its quality of service demands, and can never start (QOSMinGRES)"),
        ("QOSGrpNodeLimit", "a limit of its quality of service is reached (QOSGrpNodeLimit)"),
        ("MaxGRESPerAccount", "a limit of its account under its quality of service is reached (MaxGRESPerAccount)"),
    ],
)  # fmt: skip
def test_reasons_are_said_in_words(reason: str, words: str) -> None:
    assert reason_in_words(reason) == words


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def answering(folder: Path, cluster: str = CLUSTER) -> None:
    """Makes a SLURM that knows its cluster's name."""
    program(folder, "scontrol", f"echo 'ClusterName             = {cluster}'")
    program(folder, "sbatch", "")


def test_jobs_are_asked_about_once_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answering(tmp_path)
    for name in ("squeue", "sacct"):
        program(tmp_path, name, f'echo "$0 $@" >> {tmp_path}/calls')
    answer = query_jobs([slurm_job(number) for number in ("12", "13_4", "13_5", "no job", "")])
    assert answer == SchedulerAnswer(queue=[], accounts=[], local=CLUSTER)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert all("--jobs=12,13 " in call for call in calls)


@pytest.mark.parametrize("script", ["exit 1", "echo Slurm accounting storage is disabled >&2; exit 1"])
def test_an_accounting_that_does_not_work_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answering(tmp_path)
    program(tmp_path, "squeue", "echo '12|PENDING|Priority||N/A|5:00|a|b'")
    program(tmp_path, "sacct", script)
    answer = query_jobs([slurm_job("12")])
    row = QueueRow(job=slurm_job("12"), state="PENDING", reason="Priority", time_limit="5:00", name="a|b")
    assert answer == SchedulerAnswer(queue=[row], accounts=[], local=CLUSTER)


def test_a_job_that_squeue_has_never_heard_of_is_an_empty_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answering(tmp_path)
    program(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    program(tmp_path, "sacct", "")
    assert query_jobs([slurm_job("12")]) == SchedulerAnswer(queue=[], accounts=[], local=CLUSTER)


def test_without_slurm_nothing_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_jobs([slurm_job("12")]).silent == {CLUSTER: "scontrol and sbatch are not both installed"}


@pytest.mark.parametrize(
    ("errors", "refusal"),
    [
        ("", "sbatch fails"),
        ("sbatch: error: \\n\\n", "sbatch fails"),
        ("sbatch: error: No such cluster\\n\\nsbatch: error: Use 'sacctmgr list'\\n", "No such cluster"),
        (
            "allocation failure: Requested node configuration is not available",
            "Requested node configuration is not available",
        ),
    ],
)
def test_a_refused_script_has_the_last_reason_that_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: str, refusal: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program(tmp_path, "sbatch", f'printf "{errors}" >&2; exit 1')
    assert expected_start("#!/bin/sh").refusal == refusal


def test_without_jobs_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_jobs([]) == SchedulerAnswer()


def test_a_command_has_its_output_its_errors_or_why_it_has_no_status() -> None:
    result = run_command("sh", "-c", "echo out; echo why >&2; exit 3", timeout_s=60)
    assert (result.status, result.output, result.errors) == (3, "out\n", "why\n")
    late = run_command("sleep", "60", timeout_s=0.1)
    assert (late.status, late.errors) == (None, "sleep gave no answer after 0.1 s")
    assert run_command("no-such-program", timeout_s=60).errors == "no-such-program is not on the PATH"


job_ids = st.integers(1, 99_999).map(str) | st.tuples(st.integers(1, 9_999), st.integers(0, 99)).map(
    lambda pair: f"{pair[0]}_{pair[1]}"
)


@given(st.lists(job_ids, min_size=1, max_size=4, unique=True), job_ids)
def test_only_the_job_that_was_waited_for_is_another(waited: list[str], new: str) -> None:
    shown = ",".join(f"afterok:{job}(unfulfilled)" for job in waited)
    expected = ",".join(f"afterok:{job}" for job in [new, *waited[1:]])
    assert moved_dependency(shown, slurm_job(waited[0]), slurm_job(new)) == expected


@pytest.mark.parametrize(
    "dependency", ["", "(null)", "afterok:123(unfulfilled)", "afterok:12_3(unfulfilled)", "singleton"]
)
def test_a_job_that_waits_for_others_is_left_alone(dependency: str) -> None:
    assert moved_dependency(dependency, slurm_job("12"), slurm_job("40")) == dependency


@pytest.fixture
def partitions(repository: Path) -> dict[str, Partition]:
    texts = [
        (repository / "tests" / "fixtures" / "slurm" / f"{name}.txt").read_text() for name in ("partitions", "nodes")
    ]
    return {partition.name: partition for partition in parse_partitions(*texts)}


def test_partitions_have_their_limits_and_nodes(partitions: dict[str, Partition]) -> None:
    assert [*partitions] == ["main", "scavenge", "short", "big"]
    assert [p.is_default for p in partitions.values()] == [True, False, False, False]
    assert [p.max_time_min for p in partitions.values()] == [None, None, 2, 2880]
    assert [p.max_nodes for p in partitions.values()] == [None, None, None, 4]
    assert [p.is_up for p in partitions.values()] == [True, True, True, False]
    assert [node.name for node in partitions["main"].nodes] == ["n1", "n2"]


def test_nodes_have_what_jobs_may_use_whatever_their_descriptions_say(partitions: dict[str, Partition]) -> None:
    first, second = partitions["big"].nodes
    assert (first.cpus, first.memory_mib, first.gpus) == (126, 509952, {"a100": 4})
    assert (second.cpus, second.memory_mib, second.gpus) == (128, 256000, {"a100": 2, "v100": 2})
    assert (first.is_up, second.is_up) == (False, True), "the first is drained"
    assert (second.num_gpus(), second.num_gpus("v100"), second.num_gpus("t4")) == (4, 2, 0)


def test_nobody_who_answers_is_an_error_that_names_the_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoControllerError, match="not both installed") as error:
        query_cluster("scontrol", "ping")
    assert "--cluster local" in error.value.remedy
    for name, script in {
        "sbatch": "",
        "scontrol": "echo 'Unable to contact' >&2; exit 1",
        "sinfo": "/bin/sleep 9",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(NoControllerError, match="Unable to contact"):
        query_cluster("scontrol", "ping")
    with pytest.raises(NoControllerError, match=r"no answer after 0\.2 s"):
        query_cluster("sinfo", timeout_s=0.2)


@pytest.mark.parametrize(
    ("help_status", "refusal"), [(0, "unrecognized option '--foo=1'; Invalid --begin specification"), (1, "")]
)
def test_an_option_is_refused_in_the_words_of_the_program_unless_it_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, help_status: int, refusal: str
) -> None:
    words = "sbatch: unrecognized option '--foo=1'\nsbatch: error: Invalid --begin specification"
    (tmp_path / "sbatch").write_text(
        f"""#!/bin/sh
[ "$1" = --help ] && exit {help_status}
[ "$*" = "--foo=1 --help" ] || exit 0
echo "{words}" >&2; echo 'Try "sbatch --help" for more information' >&2; exit 255
"""
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert refused_option("sbatch", ["--foo=1"]) == refusal
    assert refused_option("sbatch", ["--bar=1"]) == ""


def test_a_command_that_hangs_ends_with_all_that_it_has_started() -> None:
    command = limited(["sh", "-c", "echo 5; sleep 600; true"])
    command[command.index(str(SUBMIT_TIMEOUT_S))] = "0.5"
    # Its output ends only when nothing has it open any more.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "5\n")


def test_a_command_that_ends_in_time_keeps_its_status() -> None:
    assert subprocess.run(limited(["sh", "-c", "exit 3"]), check=False).returncode == 3


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_controller_that_is_down_may_be_back_in_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_installed: bool
) -> None:
    for program in ("scontrol", "sbatch") if is_installed else ():
        (tmp_path / program).write_text("#!/bin/sh\necho 'slurm_load_partitions: Connection refused' >&2; exit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoControllerError) as refused:
        query_cluster("scontrol", "show", "partition")
    assert refused.value.remedy.startswith("Try again in a minute; or submit from" if is_installed else "Submit from")
