"""A submitted run outlives the process that submitted it: real processes, through submitit's local executor."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from can_train.errors import RunError
from can_train.runs.registry import Registry
from can_train.runs.run_folder import RunFolder
from can_train.slurm import submit
from can_train.slurm.snapshot import describe, keep, read_code
from can_train.slurm.submit import start_process

pytestmark = pytest.mark.slow

TIMEOUT_S = 300
SYNTHETIC = ("synthetic", "--set", "dataset.synthetic.seconds=5")


def submitted(folder: Path, *arguments: str) -> tuple[Path, Path]:
    """Submits a run; returns its log and where its result will be."""
    command = [sys.executable, "-m", "can_train", "--model", "gat", "--size", "student", "--device", "cpu",
               "--epochs", "1", "--no-baselines", "--min-steps-per-epoch", "3", "--submit", "--runs-dir",
               str(folder / "runs"), "--state-dir", str(folder / "state"), "--dataset", *arguments]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = Registry(folder / "state").runs()
    (job,) = Registry(folder / "state").jobs(run.run_id)
    assert job.executor in arguments
    return Path(job.log_path), Path(run.path) / "result.json"


def wait_for(path: Path, text: str = "") -> str:
    limit = time.monotonic() + TIMEOUT_S
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < limit, path.read_text() if path.exists() else f"{path} did not appear"
        time.sleep(0.1)
    return path.read_text()


def test_a_submitted_run_finishes_after_its_submitter_has_gone(tmp_path: Path) -> None:
    log, result = submitted(tmp_path, *SYNTHETIC, "--cluster", "local")
    assert json.loads(wait_for(result))["status"] == "finished"
    assert "Result: " in wait_for(log, "Result: ")


def test_a_job_that_cannot_run_says_why_in_its_log(tmp_path: Path) -> None:
    log_file = tmp_path / "drive.csv"
    log_file.write_text("no log at all\n")
    log, result = submitted(tmp_path, str(log_file), "--cluster", "local")
    assert "drive.csv" in wait_for(log, "error: ")
    assert not result.exists()


def test_to_be_looked_at_a_job_runs_in_the_process_that_submits_it(tmp_path: Path) -> None:
    _, result = submitted(tmp_path, *SYNTHETIC, "--cluster", "debug")
    assert json.loads(result.read_text())["status"] == "finished"
    assert (result.parent / "code.json").exists()


@pytest.mark.parametrize(
    "visible", ["MIG-5f5d1a3e-7b1f-5c1c-9a3e-4c5b8a6d2f10", "GPU-8932f937,GPU-1b2c", "0,2", "", None]
)
def test_a_job_sees_the_gpus_that_its_submitter_sees(
    visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An enclosing job of SLURM, whose GPUs are the process's, too.
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    code = read_code()
    keep(code, tmp_path / "state")
    describe(code, tmp_path / "state", folder.path)

    def entry(run: RunFolder, stops: object) -> None:
        (run.path / "seen").write_text(json.dumps(os.environ.get("CUDA_VISIBLE_DEVICES")))

    job = start_process(entry, folder, lambda jobs: None)
    assert job.executor == "local"
    assert json.loads(wait_for(folder.path / "seen", "l" if visible is None else '"')) == visible


def test_a_child_that_fails_before_it_submits_ends_and_leaves_the_error_to_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, parent = RunFolder(tmp_path / "run"), os.getpid()
    folder.path.mkdir()
    code = read_code()
    keep(code, tmp_path / "state")
    describe(code, tmp_path / "state", folder.path)

    def fail(source: Path) -> None:
        raise OSError

    monkeypatch.setattr(submit, "job_environment", fail)
    try:
        with pytest.raises(RunError, match="The job could not be started"):
            start_process(print, folder, lambda jobs: None)
    finally:
        if os.getpid() != parent:
            (tmp_path / "child").touch()
            os._exit(0)
    assert not (tmp_path / "child").exists()
