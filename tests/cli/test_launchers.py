"""Real launchers start can-train in several processes: they train one run, or one of them says why not."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from can_train.cli import train
from can_train.training.distributed import RankPlace
from fakes.own_tasks import write_task

pytestmark = pytest.mark.slow

TIMEOUT_S = 300
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MPIRUN = shutil.which("mpirun.openmpi") or shutil.which("mpirun")


def launched(folder: Path, launcher: Sequence[str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [*launcher, *words, "--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]
    # Open MPI does not start as root, and not more processes than there are cores, unless it is told to.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "CAN_TRAIN_COMMAND": "",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "COLUMNS": "80"}  # fmt: skip
    return subprocess.run(command, cwd=folder, env=os.environ | allowed, capture_output=True, text=True,
                          timeout=TIMEOUT_S, check=False)  # fmt: skip


def test_a_process_that_waits_for_the_others_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_SILENT_S", 0.05)
    place = RankPlace(rank=1, size=4, local_rank=1, address="node7", port=29500)
    with train._told_of_waiting(place):
        time.sleep(0.5)
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("note: Process 1 of 4 waits for the others at node7:29500: one of them may not have started")
    with train._told_of_waiting(place):
        pass
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def results(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("runs/*/result.json"))]


def test_torchrun_trains_one_run_which_several_processes_also_resume(tmp_path: Path) -> None:
    line = ("--task", f"{write_task(tmp_path)}:MyTask", "--device", "cpu", "--epochs", "1")
    done = launched(tmp_path, (*TORCHRUN, "-m", "can_train"), *line)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: torchrun started 2 processes (WORLD_SIZE=2): they train one run together") == 1
    assert "The share of each of 2 processes" in done.stderr
    assert done.stdout.count("Result: ") == 1
    assert len(results(tmp_path)) == 1
    (ranks,) = [sorted(path.name for path in run.glob("steps*")) for run in (tmp_path / "runs").glob("*-*")]
    assert ranks == ["steps-rank-1.jsonl", "steps.jsonl"]

    resumed = launched(tmp_path, (*TORCHRUN, "-m", "can_train"), "resume", "last", "--epochs", "2", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["run_id"] == results(tmp_path)[0]["run_id"]
    assert [result["epochs"] for result in results(tmp_path)] == [2]


def test_mpirun_trains_one_run_and_refuses_lines_that_differ(tmp_path: Path) -> None:
    if MPIRUN is None:
        pytest.skip("needs mpirun: install openmpi-bin")
    line = ("--task", f"{write_task(tmp_path)}:MyTask", "--device", "cpu", "--epochs", "1")
    done = launched(tmp_path, (MPIRUN, "-n", "2", sys.executable, "-P", "-m", "can_train"), *line)
    assert done.returncode == 0, done.stderr
    assert len(results(tmp_path)) == 1
    words = ("--seed", "$OMPI_COMM_WORLD_RANK", *line)
    farm = ("sh", "-c", f'exec {sys.executable} -P -m can_train {" ".join(words)} "$@"', "can-train")
    refused = launched(tmp_path, (MPIRUN, "-n", "2", *farm))
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.count("error: ") == 1
    assert "have different settings, so they cannot train one run: training.seed is 0, 1." in refused.stderr
    assert len(results(tmp_path)) == 1
