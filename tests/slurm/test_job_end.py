"""What is found out after a job: how much memory it had, and whether that ran out; and what is done then."""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from can_train.config.resolved import plain_to_yaml
from can_train.config.settings import ClusterSettings
from can_train.errors import RunError
from can_train.io.records import utc_now
from can_train.memory.host import PACKED
from can_train.memory.meters import open_meter
from can_train.runs.attempts import Attempts, SlurmContext
from can_train.runs.registry import CancelRecord, JobRecord
from can_train.runs.run_folder import RunFolder
from can_train.runs.scheduler import AccountRow, SchedulerAnswer
from can_train.slurm.job import PackedJob, _is_over, after_job, host_memory_ran_out, job_memory_mib
from can_train.slurm.launchers import rank_place
from can_train.slurm.script import Submission
from fakes.made_runs import Runs, at, end, write
from fakes.run_facts import CLUSTER, slurm_job

SLURM = """#!/bin/sh
echo "$(basename "$0") $*" >> "{calls}"
[ "$(basename "$0")" != squeue ] || echo "7|{state}|None|n1||"
"""


@pytest.mark.parametrize(
    ("environment", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "1500"}, 1500),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}, 400),
        ({"SLURM_MEM_PER_GPU": "100", "SLURM_GPUS_ON_NODE": "2"}, 200),
        ({}, None),
    ],
)
def test_what_a_job_has_of_a_node_is_read_off_its_variables(environment: dict[str, str], mib: int | None) -> None:
    assert job_memory_mib(environment) == mib


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=30.0. Some of your processes may",
        "srun: error: n1: task 0: Out Of Memory",
        "slurmstepd-n1: error: StepId=1.0 exceeded memory limit (413884416 > 104857600), being killed",
        "slurmstepd: error: Exceeded job memory limit at some point.",
    ],
)
def test_a_process_killed_for_memory_shows_in_the_log(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert host_memory_ran_out(slurm_job("30"), f"training\n{line}\nmore\n")


def test_without_a_sign_of_it_no_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not host_memory_ran_out(slurm_job("30"), "error: CUDA out of memory. Tried to allocate 2.00 MiB\n")


def test_the_accounting_tells_of_a_step_that_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\nprintf '30|FAILED|||||||\\n30.0|OUT_OF_MEMORY|||||||\\n'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert host_memory_ran_out(slurm_job("30"), "")


def test_what_an_attempt_before_this_one_ran_out_of_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("30|FAILED|||||||", "30.0|OUT_OF_MEMORY|||||||", "30|RUNNING|||||||", "30.0|FAILED|||||||")
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\nprintf '" + "\\n".join(rows) + "\\n'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert not host_memory_ran_out(slurm_job("30"), "")


class EndedJob:
    """Job 7, whose training has ended, with a SLURM that says how it is and notes what it is asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, state: str = "RUNNING") -> None:
        self.runs = Runs(folder)
        self.path = self.runs.add(1)
        self._calls_path = folder / "calls"
        (self.path / "config.yaml").write_text(plain_to_yaml({"cluster": {"max_restarts": 3}}))
        self.runs.submit(self.path, "7")
        self.begin(restarts=0)
        for program in ("scontrol", "squeue", "sacct"):
            (folder / program).write_text(SLURM.format(calls=self._calls_path, state=state))
            (folder / program).chmod(0o755)
        # It is all of PATH, so that no real SLURM is found.
        (folder / "basename").symlink_to(shutil.which("basename") or "")
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_CLUSTER_NAME", CLUSTER)

    def begin(self, *, restarts: int) -> int:
        return Attempts(self.path, SlurmContext(job=slurm_job("7"), restarts=restarts)).current

    def after(self, status: int) -> str:
        def resubmit(*_: object) -> None:
            raise AssertionError

        return after_job(resubmit, self.runs.state_dir, status=status, environment=b"")  # type: ignore[arg-type]

    @property
    def calls(self) -> str:
        return self._calls_path.read_text()

    @property
    def is_requeued(self) -> bool:
        return "scontrol requeue 7" in self.calls

    @property
    def ending(self) -> str:
        found = RunFolder(self.path).attempts.end(1)
        return found.ending if found else ""

    @property
    def message(self) -> str:
        found = RunFolder(self.path).attempts.end(1)
        return found.message if found else ""


def test_a_run_whose_folder_is_gone_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    shutil.rmtree(job.path)
    assert job.after(status=3) == f"{job.path} is gone, so the run is not started again"
    assert not job.path.exists()


@pytest.mark.parametrize(
    ("scontrol", "reason"),
    [
        ("echo Requested operation is presently disabled for job 7 >&2; exit 1",
         "Requested operation is presently disabled for job 7"),
        (None, "scontrol is not on the PATH"),
    ],
)  # fmt: skip
def test_a_job_that_is_not_put_back_as_promised_says_so_in_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str | None, reason: str
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    end(job.path, "time_limit")
    (tmp_path / "scontrol").unlink()
    if scontrol:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{scontrol}\n")
        (tmp_path / "scontrol").chmod(0o755)
    failure = f"its job could not be put back into the queue ({reason})"
    assert job.after(140) == f"{failure}. Go on: can-train resume {job.path.name}"
    (found,) = job.runs.look()
    assert str(found.state) == f"time limit: warned and saved; {failure}"
    # SLURM itself may call that the time limit, too.
    row = AccountRow(job=slurm_job("7"), state="TIMEOUT", nodes="n1", time_limit="1:00")
    (found,) = job.runs.look(SchedulerAnswer(accounts=[row]))
    assert str(found.state) == f"time limit: its limit of 1:00 was up, warned and saved; {failure}"


def test_a_job_that_cannot_ask_slurm_says_that_its_run_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    (tmp_path / "squeue").unlink()
    assert "(squeue is not on the PATH)" in job.after(137)
    assert job.message == (
        "A process was killed (SIGKILL); its job could not be put back into the queue (squeue is not on the PATH)"
    )


def test_a_job_waits_for_a_controller_that_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    squeue, asked = tmp_path / "squeue", tmp_path / "asked"
    squeue.write_text(squeue.read_text().replace("\n", f"\n[ -e {asked} ] || {{ : > {asked}; exit 1; }}\n", 1))
    (tmp_path / "sbatch").symlink_to(tmp_path / "scontrol")
    monkeypatch.setattr("can_train.slurm.job._CONTROLLER_LOOK_S", 0.0)
    assert job.after(137) == "a killed process: put back into the queue"
    assert job.is_requeued


def test_a_run_that_cannot_be_submitted_again_says_so_in_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RunError("SLURM refused the job", remedy="", value="no such account")

    job = EndedJob(tmp_path, monkeypatch)
    (job.path / "log.out").write_text("slurmstepd: error: Exceeded job memory limit at some point.\n")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "400")
    failure = "it could not be submitted again (SLURM refused the job: no such account)"
    said = after_job(refuse, job.runs.state_dir, status=1, environment=b"")
    assert said == f"{failure}. Go on: can-train resume {job.path.name}"
    (found,) = job.runs.look()
    assert str(found.state) == (f"host out-of-memory: The system killed a process for want of memory; {failure}")


@pytest.mark.parametrize("status", [137, 143])
def test_a_job_whose_training_was_killed_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    if status == 143:  # while srun terminated the other ranks
        end(job.path, "rank_gone")
    assert job.after(status) == "a killed process: put back into the queue"
    assert (job.ending, job.is_requeued) == ("killed", True)


def test_a_job_whose_run_an_earlier_attempt_trains_is_put_back_until_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    end(job.path, "in_use", message="process 5 of n2 did not end")
    assert job.after(2) == "an earlier attempt still trains the run: put back into the queue"
    assert job.is_requeued
    for restarts in (1, 2, 3):
        end(job.path, "in_use", job.begin(restarts=restarts), "process 5 of n2 did not end")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert "after 3 times back into the queue" in job.after(2)


def test_what_is_left_of_a_job_that_was_started_again_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    job.begin(restarts=1)
    assert job.after(137) == ""
    assert (job.ending, (tmp_path / "calls").exists()) == ("", False)


def test_a_job_that_comes_back_and_ends_before_it_trains_is_not_taken_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    end(job.path, "terminated")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (job.path / "log.out").write_text("error: cluster.setup ended with exit status 2: ls /scratch\n")
    assert job.after(2) == ""
    (found,) = job.runs.look()
    assert str(found.state) == "failed: error: cluster.setup ended with exit status 2: ls /scratch"
    # The attempts before the submission of another job are earlier ones, too.
    another = Attempts(job.path, SlurmContext(job=slurm_job("8")))
    assert (another.is_superseded(since=utc_now()), another.is_superseded()) == (False, True)


def test_a_finished_run_whose_job_comes_back_to_a_broken_node_stays_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    end(job.path, "terminated")
    (job.path / "result.json").write_text('{"epochs": 1}')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (job.path / "log.out").write_text(
        "error: cluster.setup ended with exit status 2: ls; it printed: ls: /scratch: Stale file handle\n"
    )
    assert job.after(2) == ""
    assert ([*(job.path / "attempts").glob("0002-*")], (tmp_path / "calls").exists()) == ([], False)


@pytest.mark.parametrize(("state", "ending"), [("RUNNING", "failed"), ("PENDING", "")])
def test_a_job_whose_node_slurm_has_lost_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, ending: str
) -> None:
    """It waits already to be started elsewhere when srun fails for want of the node."""
    job = EndedJob(tmp_path, monkeypatch, state=state)
    assert job.after(1) == ""
    assert (job.ending, job.is_requeued) == (ending, False)


def test_runs_that_share_a_job_end_each_by_itself_and_the_job_goes_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    others = [job.runs.add(number) for number in (2, 3)]
    for path in (job.path, *others):
        job.runs.submit(path, "7", packed_with=3)
    for path in others:
        (path / "config.yaml").write_text(plain_to_yaml({"cluster": {"max_restarts": 3}}))
        assert Attempts(path, SlurmContext(job=slurm_job("7"), restarts=0)).current
    end(job.path, "time_limit")
    end(others[0], "failed")
    end(others[1], "time_limit")
    assert job.after(140) == "the time limit: put back into the queue"
    assert job.calls.count("scontrol requeue 7") == 1
    # What a requeue does not mend is over. A preempted run is not.
    end(others[1], "terminated")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    over = [_is_over(RunFolder(path)) for path in (job.path, *others)]
    assert over == [False, True, False]
    # The job comes back for the others, and one of them kills it: the run that was over has no other ending.
    for path in (job.path, others[1]):
        assert Attempts(path).current
    assert job.after(137) == "a killed process: put back into the queue"
    last = Attempts(others[0]).end(len(Attempts(others[0]).starts()))
    assert last is not None
    assert last.ending == "failed"
    assert _is_over(RunFolder(others[0]))


@pytest.mark.parametrize("ending", ["", "failed", "time_limit", "terminated"])
def test_a_failed_run_of_a_pack_that_was_resumed_in_another_job_is_not_trained_by_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    end(job.path, "failed")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert _is_over(RunFolder(job.path))
    resumed = Attempts(job.path, SlurmContext(job=slurm_job("8"))).current
    if ending:
        end(job.path, ending, resumed)
    assert _is_over(RunFolder(job.path))


def test_a_run_that_was_resumed_while_its_job_trained_on_is_not_started_by_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EndedJob(tmp_path, monkeypatch)
    # Records of the same time are read in any order.
    job.runs.submit(job.path, "7", packed_with=2, time=at(2))
    end(job.path, "time_limit")
    job.runs.submit(job.path, "8", time=utc_now())
    assert job.after(140) == ""
    assert not (tmp_path / "calls").exists()


def test_each_process_of_a_shared_job_trains_its_run_and_knows_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path)
    paths, trained = [runs.add(1), runs.add(2)], []

    def entry(folder: RunFolder, _: object) -> None:
        trained.append((folder.path, open_meter("sim:64MiB").capacity_bytes, rank_place(os.environ)))

    for number in ("1", "2"):
        for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", PACKED):
            monkeypatch.setenv(name, number)
        PackedJob(entry, tuple(map(str, paths)))()
    # The third process has no run.
    assert trained == [(paths[1], 32 * 2**20, None)]


def test_runs_that_failed_before_their_node_was_suspect_are_retried_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The runs of the fake are of one day.
    monkeypatch.setattr("can_train.slurm.job._RECENT_DAYS", 100_000)
    job = EndedJob(tmp_path, monkeypatch)
    runs, now = job.runs, utc_now()

    def failed(number: int, slurm_id: str, host: str = "bad", ending: str = "failed") -> Path:
        path = runs.add(number)
        (path / "config.yaml").write_text(plain_to_yaml({"cluster": {}}))
        record = runs.submit(path, slurm_id)
        context = SlurmContext(job=record.slurm_job)
        start = Attempts(path, context).current
        if ending:
            values = {"attempt": start, "ending": ending, "message": "", "details": {}, "time": now, "host": host}
            write(path, f"{start:04d}-ended.json", values)
        return path

    end_values = {"attempt": 1, "ending": "failed", "message": "", "details": {}, "time": now, "host": "bad"}
    write(job.path, "0001-ended.json", end_values)
    earlier = failed(2, "8")
    failed(3, "9", host="good", ending="finished")
    # A person has cancelled this run since, that one has another environment, and this one failed elsewhere.
    runs.registry.add(CancelRecord(run_id=failed(4, "10").name, time=utc_now()))
    (failed(5, "11") / "environment.json").write_text('{"python": "3.9"}')
    failed(6, "12", host="n3")
    sent: list[tuple[str, str, str]] = []

    def resubmit(folder: RunFolder, cluster: ClusterSettings, submission: Submission) -> JobRecord:
        sent.append((folder.run_id, cluster.exclude, submission.reason))
        return runs.submit(folder.path, str(50 + len(sent)), reason=submission.reason, time=utc_now())

    def after() -> str:
        return after_job(resubmit, runs.state_dir, status=1, environment=b"")

    told = after()
    reason = "fault of the node: 4 runs failed on bad at once; another node"
    # The fake of scontrol shows no node for the first one.
    assert [(run_id, exclude) for run_id, exclude, _ in sent] == [(job.path.name, ""), (earlier.name, "bad")]
    assert told.splitlines()[1] == f"{earlier.name}: {reason}: submitted again as job 52"
    # The job of the earlier run comes to the same conclusion a moment later.
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert after() == ""
    assert len(sent) == 2
