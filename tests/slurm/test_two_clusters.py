"""Two clusters with one home: each counts its jobs from 1, so that both have a job 12, and only one is the run's."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.resolved import plain_to_yaml
from can_train.runs.attempts import Attempts, SlurmContext
from can_train.runs.registry import Registry
from can_train.runs.run_folder import RunFolder
from can_train.runs.scheduler import SchedulerAnswer
from can_train.slurm.client import find_jobs, query_jobs
from can_train.slurm.job import after_job
from fakes.made_runs import KEY, Runs, begin, end
from fakes.run_facts import slurm_job
from fakes.slurm_clusters import Clusters

Machine = Callable[..., Clusters]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes a machine of a cluster, and this process one of it."""

    def make(local: str, *reachable: str) -> Clusters:
        clusters = Clusters(tmp_path, local, *reachable)
        monkeypatch.setenv("PATH", f"{clusters.bin}:/usr/bin:/bin")
        return clusters

    return make


def state_of(runs: Runs, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, bool]:
    capsys.readouterr()
    assert main(["status", "last", "--json", *runs.flags]) == 0
    said = json.loads(capsys.readouterr().out)
    return said["state"], said["why"], said["certain"]


def test_a_run_of_a_cluster_that_cannot_be_asked_is_not_called_failed(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12")
    begin(path, job_id="12")
    clusters = machine("beta")
    clusters.write("beta", "queue", "12|COMPLETED|None|n7|N/A|1:00:00|other\n")
    clusters.write("beta", "accounts", "12|FAILED|1:0|||n7|||\n")
    assert state_of(runs, capsys) == (
        "running",
        (
            "as far as its files say; cluster alpha, which has its job 12, does not answer here "
            "(No cluster 'alpha' known by database); ask on a login node of alpha"
        ),
        False,
    )


def test_a_run_of_another_cluster_has_the_state_that_its_cluster_says(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12")
    begin(path, job_id="12")
    clusters = machine("beta", "alpha")
    clusters.write("beta", "queue", "12|PENDING|Priority||N/A|1:00:00|other\n")
    clusters.queue("alpha", "12", "RUNNING", name=KEY, log=path / "log.out")
    assert state_of(runs, capsys) == ("running", "on n7", True)


def test_the_attempts_of_a_run_on_two_clusters_are_told_apart(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12", time="2026-01-01T00:00:01+00:00")
    begin(path, job_id="12", start_time="2026-01-01T00:00:02+00:00")
    runs.submit(path, "12", time="2026-01-01T00:00:03+00:00", cluster="beta", reason="resumed")
    begin(path, 2, job_id="12", cluster="beta", start_time="2026-01-01T00:00:04+00:00")
    clusters = machine("beta", "alpha")
    clusters.write("alpha", "accounts", "12|NODE_FAIL|1:0|||a1|||\n")
    clusters.queue("beta", "12", "RUNNING", name=KEY, log=path / "log.out")
    capsys.readouterr()
    assert main(["status", "last", *runs.flags]) == 0
    said = capsys.readouterr().out
    assert "running: on n7" in said
    rows = [line.split() for line in said.splitlines() if " on alpha " in line or " on beta " in line]
    assert [(row[row.index("on") + 1], row[-3:]) for row in rows[-2:]] == [
        ("alpha", ["failure:", "of", "a1"]),
        ("beta", rows[-1][-3:]),
    ]
    assert rows[-1][-1] == "running"


def test_cancel_leaves_the_job_that_has_the_number_on_this_cluster(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12")
    clusters = machine("beta")
    clusters.queue("beta", "12", "RUNNING", name=KEY, log=Path("/elsewhere/log.out"))
    assert main(["cancel", "last", *runs.flags]) == 2
    assert capsys.readouterr().err == (
        "error: The state of the job is unknown: cluster alpha, which has its job 12, does not answer "
        "here (No cluster 'alpha' known by database); the run's files say: queued.\n"
        "Give the same line on a login node of alpha.\n"
    )
    assert clusters.cancelled("beta") == []
    assert runs.registry.cancels(path.name) == []


def test_cancel_asks_the_cluster_that_has_the_job(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12")
    clusters = machine("beta", "alpha")
    clusters.queue("alpha", "12", "PENDING", name=KEY, log=path / "log.out")
    clusters.queue("beta", "12", "RUNNING", name=KEY, log=Path("/elsewhere/log.out"))
    assert main(["cancel", "last", *runs.flags]) == 0
    assert (clusters.cancelled("alpha"), clusters.cancelled("beta")) == (["12"], [])


def test_a_job_that_slurm_counted_anew_is_neither_shown_nor_cancelled(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12")
    begin(path, job_id="12")
    end(path, "failed", message="no such data")
    clusters = machine("alpha")
    clusters.queue("alpha", "12", "RUNNING", name="somebody", log=Path("/elsewhere/log.out"))
    assert state_of(runs, capsys) == ("failed", "no such data", True)
    # A job of the run's own name is looked at before it is cancelled.
    clusters.queue("alpha", "12", "RUNNING", name=KEY, log=Path("/elsewhere/log.out"))
    assert main(["cancel", "last", *runs.flags]) == 2
    error = capsys.readouterr().err
    assert f"job 12 on alpha, named {KEY}, does not log into {path}" in error
    assert "If it is yours and should end: scancel 12" in error
    assert clusters.cancelled("alpha") == []
    assert runs.registry.cancels(path.name) == []


def test_a_job_that_a_person_has_renamed_is_still_the_runs(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12")
    machine("alpha").queue("alpha", "12", "RUNNING", name="mine | long", log=path / "log.out")
    assert state_of(runs, capsys) == ("running", "starting on n7", True)


def test_a_job_whose_record_names_no_cluster_is_looked_for_here_by_its_log(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12", cluster="")
    begin(path, job_id="12", cluster="")
    clusters = machine("beta")
    clusters.queue("beta", "12", "RUNNING", name=KEY, log=path / "log.out")
    assert state_of(runs, capsys) == ("running", "on n7", True)
    clusters.queue("beta", "12", "RUNNING", name=KEY, log=Path("/elsewhere/log.out"))
    assert state_of(runs, capsys) == (
        "running",
        (
            "as far as its files say; SLURM cannot be asked about its job 12: its record does not name the cluster, "
            "and beta has no job 12 of this run; ask on the cluster where it was submitted"
        ),
        False,
    )
    assert main(["cancel", "last", *runs.flags]) == 2
    assert clusters.cancelled("beta") == []


def test_a_job_that_the_controller_forgot_is_recognized_by_the_line_that_submitted_it(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12", cluster="")
    begin(path, job_id="12", cluster="")
    clusters = machine("beta")
    clusters.write("beta", "accounts", "12|NODE_FAIL|1:0|||n7|||\n")
    clusters.write("beta", "12.line", "sbatch /elsewhere/.submission_file_1.sh\n")
    assert state_of(runs, capsys)[2] is False
    clusters.write("beta", "12.line", f"sbatch {path}/.submission_file_1.sh\n")
    assert state_of(runs, capsys) == ("node failure", "of n7", True)


def test_after_job_writes_only_into_the_run_of_its_own_cluster(
    runs: Runs, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = runs.add(1), runs.add(2)
    for path in (there, here):
        (path / "config.yaml").write_text(plain_to_yaml({"cluster": {"max_restarts": 0}}))
    runs.submit(here, "12", cluster="beta")
    runs.submit(there, "12", cluster="alpha")
    machine("beta").write("beta", "queue", "12|RUNNING|None|n7|N/A|1:00:00|x\n")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    after_job(_never, runs.state_dir, status=1, environment=b"")
    ends = {path.name: RunFolder(path).attempts.end(1) for path in (there, here)}
    assert ends[there.name] is None
    assert (ends[here.name].ending, ends[here.name].message) == ("failed", "exit status 1")  # type: ignore[union-attr]


def _never(*_: object) -> None:  # type: ignore[misc]
    raise AssertionError


def test_a_job_of_the_same_number_on_another_cluster_is_another_job(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    contexts = [SlurmContext(job=slurm_job("12", cluster)) for cluster in ("alpha", "beta")]
    first, second = (Attempts(tmp_path, context) for context in contexts)
    assert (first.current, second.current) == (1, 2)
    assert first.is_superseded()
    assert second.supersedes(first.this_process())
    second.record_end("time_limit", "", {})
    assert second.count_restarts(slurm_job("12", "alpha")) == 0


def test_a_run_does_not_wait_for_a_job_of_another_cluster(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    runs.submit(path, "12")
    clusters = machine("beta", "alpha")
    clusters.queue("alpha", "12", "RUNNING", name=KEY, log=path / "log.out")
    line = ("--model", "gat", "--dataset", "synthetic", "--submit", "--after", path.name)
    assert main([*line, *runs.flags]) == 2
    assert capsys.readouterr().err == (
        f"error: The run to wait for is on another cluster: {path.name} is job 12 on alpha.\n"
        "Submit on a login node of alpha, or when that run has finished.\n"
    )
    assert main([*line, "--clusters", "beta,alpha", *runs.flags]) == 2
    assert "Submit with --clusters alpha, or when that run has finished" in capsys.readouterr().err
    clusters.write("alpha", "queue", "")
    runs.submit(path, "12", cluster="gamma", time="2026-01-01T00:00:30+00:00")
    assert main([*line, *runs.flags]) == 2
    assert capsys.readouterr().err == (
        f"error: The cluster of the run to wait for does not answer: {path.name} is queued as far as its files say; "
        "cluster gamma, which has its job 12, does not answer here (No cluster 'gamma' known by database).\n"
        "Submit on a login node of gamma, or when that run has finished.\n"
    )


@pytest.mark.parametrize(
    ("answer", "cluster"),
    [("Submitted batch job 12\n", "beta"), ("Submitted batch job 12 on cluster gamma\n", "gamma")],
)
def test_a_submission_records_the_cluster_that_took_the_job(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str], answer: str, cluster: str
) -> None:
    machine("beta").write("beta", "sbatch", answer)
    for sweep in ((), ("--set", "training.seed=1,2")):
        line = ("--model", "gat", "--dataset", "synthetic", "--submit", "--json", "--force", *sweep)
        assert main([*line, *runs.flags]) == 0
        submitted = json.loads(capsys.readouterr().out)["submitted"]
        assert {job["cluster"] for job in submitted} == {cluster}
        registry = Registry(runs.state_dir)
        jobs = [registry.jobs(job["run_id"])[0].slurm_job for job in submitted]
        assert jobs == [slurm_job(job["job_id"], cluster) for job in submitted]


def test_a_submission_to_one_of_several_clusters_names_the_one_that_took_the_job(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("beta", "alpha").write("beta", "sbatch", "Submitted batch job 12 on cluster alpha\n")
    line = ("--model", "gat", "--dataset", "synthetic", "--submit", "--clusters", "beta,alpha", *runs.flags)
    assert main(line) == 0
    (run,) = runs.registry.runs()
    assert capsys.readouterr().out.splitlines()[0] == f"{run.run_id}  job 12 on alpha"
    assert runs.registry.jobs(run.run_id)[0].cluster == "alpha"


@pytest.mark.parametrize(
    ("clusters", "partition", "fact"),
    [
        ("beta,alhpa", "main", "Unknown cluster: 'alhpa'. Valid, nearest first: alpha, beta"),
        ("beta,alpha", "short", "Unknown partition of the cluster alpha: 'short'. Valid: main."),
        ("all", "short", "Unknown partition of the cluster beta: 'short'. Valid: "),
    ],
)
def test_each_of_several_clusters_must_exist_and_have_the_partition(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str], clusters: str, partition: str, fact: str
) -> None:
    others = machine("beta", "alpha")
    others.write("beta" if clusters == "all" else "alpha", "partitions", "PartitionName=main State=UP\n")
    line = ("--model", "gat", "--dataset", "synthetic", "--submit", "--clusters", clusters, "--partition", partition)
    assert main([*line, *runs.flags]) == 2
    assert fact in " ".join(capsys.readouterr().err.split())
    assert runs.registry.runs() == []


def give(clusters: Clusters, name: str, gpus: str) -> None:
    """Gives a cluster one partition and one node."""
    clusters.write(name, "partitions", "PartitionName=main Default=YES State=UP MaxTime=UNLIMITED\n")
    node = "NodeName=n1 CPUTot=8 RealMemory=32000 State=IDLE Partitions=main"
    clusters.write(name, "nodes", f"{node} Gres={gpus}\n")


@pytest.mark.parametrize("gpus", ["h100:1", "a100:1"])
def test_of_several_clusters_one_must_have_the_kind_of_gpu(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str], gpus: str
) -> None:
    clusters = machine("beta", "alpha")
    give(clusters, "beta", "gpu:a100:2")
    give(clusters, "alpha", "gpu:h100:2")
    line = ("--model", "gat", "--dataset", "synthetic", "--submit", "--clusters", "beta,alpha", *runs.flags)
    assert main([*line, "--gpus", gpus]) == 0, capsys.readouterr().err
    (run,) = runs.registry.runs()
    assert runs.registry.jobs(run.run_id)[0].resources["gpus-per-node"] == gpus
    assert main([*line, "--gpus", "v100:1"]) == 2
    assert " ".join(capsys.readouterr().err.split()) == (
        "error: None of these clusters could ever start the job: beta: Partition main has no GPU of this kind "
        "('v100'); alpha: Partition main has no GPU of this kind ('v100'). beta: It has: a100; alpha: It has: h100."
    )
    assert main([*line, "--gpus", "a100:3"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "beta: Partition main would never start this job. A node has at most 2 GPUs (asked for a100:3); alpha" in told
    )


STARTS = """#!/bin/sh
# Of several clusters, the answer is one cluster's.
case "$*" in *--help*) exit 1;; *--test-only*) ;; *) exec cat "@folder@/sent";; esac
case $(grep -- --clusters "$2") in
    *=alpha) echo "sbatch: Job 3 to start at 2030-01-01T10:00:00 using 1 processors on nodes n1 in partition main" >&2;;
    *=beta) echo "sbatch: Job 3 to start at 2030-01-01T12:00:00 using 1 processors on nodes n1 in partition main" >&2;;
    *) exit 1;;
esac
"""


def test_the_places_of_several_clusters_are_compared(
    runs: Runs, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters = machine("beta", "alpha")
    give(clusters, "beta", "gpu:a100:2")
    give(clusters, "alpha", "gpu:t4:2")
    (tmp_path / "sent").write_text("Submitted batch job 12 on cluster alpha\n")
    (clusters.bin / "sbatch").write_text(STARTS.replace("@folder@", str(tmp_path)))
    model = ("--model", "gat", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5")
    line = (*model, "--submit", "--clusters", "all", "--partition", "auto", "--yes", *runs.flags)
    assert main(line) == 0, capsys.readouterr().err
    told = " ".join(capsys.readouterr().out.split())
    assert told.index("main of alpha 1 × t4") < told.index("main of beta 1 × a100")
    assert "The run is expected to start first on main of alpha with t4" in told
    (run,) = runs.registry.runs()
    (job,) = runs.registry.jobs(run.run_id)
    asked = {name: job.resources[name] for name in ("clusters", "partition", "gpus-per-node")}
    assert (job.cluster, asked) == ("alpha", {"clusters": "alpha", "partition": "main", "gpus-per-node": "t4:1"})


def test_a_job_whose_answer_was_lost_is_looked_for_on_each_of_several_clusters(
    machine: Machine, tmp_path: Path
) -> None:
    clusters = machine("beta", "alpha")
    for cluster, folder in (("alpha", tmp_path), ("beta", Path("/elsewhere"))):
        clusters.queue(cluster, "12", "PENDING", name=KEY, log=folder / "log.out")
        clusters.write(cluster, "mine", f"12|{KEY}\n")
    assert find_jobs(KEY, tmp_path, "beta,alpha") == [slurm_job("12", "alpha")]
    assert find_jobs(KEY, tmp_path, "beta") == []


def test_an_identical_run_of_a_cluster_that_cannot_be_asked_is_not_surely_running(
    runs: Runs, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("alpha")
    line = ("--model", "gat", "--dataset", "synthetic", "--submit", *runs.flags)
    assert main(line) == 0
    (run,) = runs.registry.runs()
    shutil.rmtree(tmp_path / "clusters" / "alpha")
    machine("beta")
    capsys.readouterr()
    assert main(line) == 0
    assert capsys.readouterr().out == (
        f"{run.run_id}  is the same, and is queued as far as its files say\n"
        f"  its state: can-train status {run.run_id}\n"
        "Not submitted again; --force does so all the same.\n"
    )


def test_a_job_that_another_cluster_may_have_taken_unseen_is_not_sent_twice(
    runs: Runs, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("alpha")
    assert main(["--model", "gat", "--dataset", "synthetic", "--submit", *runs.flags]) == 0
    (run,) = runs.registry.runs()
    (Path(run.path) / "slurm" / ".submission_file_0123.sh").touch()
    machine("beta", "alpha").write("alpha", "queue", "")
    capsys.readouterr()
    assert main(["resume", "last", *runs.flags]) == 2
    assert capsys.readouterr().err.removeprefix("starting: loading PyTorch\n") == (
        "error: Another cluster may have taken a job for the run without an answer: alpha.\n"
        "Submit on a login node of alpha, where that job is taken back.\n"
    )


def test_the_variable_that_sends_programs_to_another_cluster_does_not_change_which_is_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = machine("beta", "alpha")
    shown = shlex.quote(str(clusters.bin / "variables"))
    (clusters.bin / "squeue").write_text(f"#!/bin/sh\nenv > {shown}\n")
    monkeypatch.setenv("SLURM_CLUSTERS", "alpha")
    assert query_jobs([slurm_job("12", "beta")]) == SchedulerAnswer(queue=[], accounts=[], local="beta")
    assert "SLURM_CLUSTERS" not in (clusters.bin / "variables").read_text()
