"""Whether a run is there already: the duplicate check and `can-train status` must see its job alike."""

import json
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import with_absolute_paths
from can_train.runs.past_runs import find_duplicate_run, identity
from can_train.runs.registry import Registry, RunRecord
from can_train.runs.scheduler import QueueRow, SchedulerAnswer
from can_train.slurm.client import Node, Partition
from can_train.slurm.submission_plan import plan_submission
from fakes.made_runs import RESULT, Runs
from fakes.run_facts import CLUSTER, slurm_job

MAIN = Partition(name="main", is_default=True, nodes=(Node(name="a", cpus=8, memory_mib=8000, gpus={"t4": 2}),))

SQUEUE = """#!/bin/sh
echo "12|$STATE||||"
"""
SCONTROL = f"#!/bin/sh\necho ClusterName = {CLUSTER}\n"


@pytest.mark.parametrize("state", ["PENDING", "RESV_DEL_HOLD", "REQUEUE_HOLD", "RUNNING", "COMPLETING", "STOPPED"])
def test_a_job_in_the_queue_is_seen_alike_by_status_and_by_the_duplicate_check(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(tmp_path)
    path = runs.add(1, entered=False)
    places = {"paths.runs_dir": str(runs.runs_dir), "paths.state_dir": str(runs.state_dir)}
    run = with_absolute_paths(resolve(RunRequest(model="gat", dataset="synthetic", cluster="slurm", values=places)))
    Registry(runs.state_dir).add(
        RunRecord(run_id=path.name, path=str(path), key=run.key, time="2026-01-01T00:00:01+00:00",
                  identity=identity(run, "code", []))
    )  # fmt: skip
    runs.submit(path, "12")
    (tmp_path / "bin").mkdir()
    for name, script in (("squeue", SQUEUE), ("sacct", "#!/bin/sh\n"), ("sbatch", ""), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setenv("STATE", state)
    (found,) = plan_submission([run], "code", [MAIN]).duplicate_runs
    assert main(["status", path.name, "--json", *runs.flags]) == 0
    assert found.state.state == json.loads(capsys.readouterr().out)["state"]


def test_the_newest_run_that_lives_or_has_finished_is_the_duplicate_run(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    finished, queued = runs.add(1, RESULT, identity="x"), runs.add(2, identity="x")
    runs.add(3, identity="x")
    runs.add(4, RESULT, identity="y")
    runs.submit(queued, "7")
    found = find_duplicate_run("x", runs.look(SchedulerAnswer(queue=[QueueRow(job=slurm_job("7"), state="PENDING")])))
    assert found is not None
    assert (found.known.run_id, found.state.state) == (queued.name, "queued")
    found = find_duplicate_run("x", runs.look())
    assert found is not None
    assert (found.known.run_id, found.state.state) == (finished.name, "finished")
    assert find_duplicate_run("z", runs.look()) is None


@pytest.mark.parametrize(
    ("queue", "state"),
    [
        ({"5_3": "PENDING"}, "queued"),
        ({"5_3": "COMPLETING", "2": "PENDING"}, "running"),
        ({"5_2": "RUNNING"}, None),
    ],
)
def test_the_newest_job_of_a_run_decides(tmp_path: Path, queue: dict[str, str], state: str | None) -> None:
    runs = Runs(tmp_path)
    path = runs.add(1, identity="x")
    runs.submit(path, "2")
    runs.submit(path, "5_3", time="2026-01-01T00:00:09+00:00")
    rows = [QueueRow(job=slurm_job(job_id), state=word) for job_id, word in queue.items()]
    found = find_duplicate_run("x", runs.look(SchedulerAnswer(queue=rows)))
    assert (found.state.state if found else None) == state
