"""One run on two nodes of two ranks each, started by a real SLURM, trains what one process trains."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from can_train.runs.attempts import Attempts
from fakes.bitwise import final_state
from slurm.real.on_slurm import Slurm

TRAIN = ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=8",
         "--set", "model.dropout=0", "--precision", "fp64", "--optimizer", "sgd", "--batch-size", "96",
         "--no-baselines",
         "--epochs", "3")  # fmt: skip
FOUR = ("--submit", "--nodes", "2", "--gpus", "2", "--cpus", "1", "--mem", "3000M", "--time", "20", "--json")

SMALL = ("--device", "sim:24MiB", "--cuda-empty-cache-interval", "1")
"""Nobody else can take what the allocator keeps, so it keeps nothing from step to step."""

ONE_RANK_ONLY = """\
import os
if os.environ.get("SLURM_PROCID") == "2":
    os.environ["CAN_TRAIN_SIM_FOREIGN"] = {path!r}
"""
"""Shows one of the ranks what others hold of the GPU."""


def submitted(slurm: Slurm, *arguments: str) -> dict[str, Any]:
    (run,) = json.loads(slurm.can_train(*TRAIN, *FOUR, *arguments).stdout)["submitted"]
    return {**run, "path": slurm.folder / "runs" / run["run_id"]}


def weights(path: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for value in final_state(path)["model"].values() if value.is_floating_point()])


def alone(slurm: Slurm) -> torch.Tensor:
    slurm.can_train(*TRAIN, "--device", "cpu", "--runs-dir", "alone")
    (path,) = (slurm.folder / "alone").glob("2*")
    return weights(path)


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_ranks_on_two_nodes_train_the_weights_of_one_process_though_one_rank_runs_out_of_memory(slurm: Slurm) -> None:
    crowd, site = slurm.folder / "crowd", slurm.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ONE_RANK_ONLY.format(path=str(crowd)))
    run = submitted(
        slurm, *SMALL, "--set", f"cluster.setup=['export PYTHONPATH={site}:$PYTHONPATH']",
    )  # fmt: skip
    slurm.wait_for((run["path"] / "checkpoints" / "manifest.json").exists)
    crowd.write_text("18MiB")
    assert slurm.ended(run["job_id"]) == "COMPLETED", Path(run["log"]).read_text()
    result = json.loads((run["path"] / "result.json").read_text())
    assert result["ooms_rescued"] > 0, Path(run["log"]).read_text()
    assert relative_error(weights(run["path"]), alone(slurm)) <= 1e-12
    told = json.loads(slurm.can_train("status", run["run_id"], "--json").stdout)
    assert told["state"] == "finished"


def test_samples_that_fit_on_one_rank_no_more_end_all_with_the_cause(slurm: Slurm) -> None:
    crowd, site = slurm.folder / "crowd", slurm.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ONE_RANK_ONLY.format(path=str(crowd)))
    run = submitted(
        slurm, *SMALL, "--set", f"cluster.setup=['export PYTHONPATH={site}:$PYTHONPATH']",
        # A part of one window may fit into the gaps of the memory that the rank keeps.
        "--set", "cluster.oom_resubmits=0", "--oom-retries", "1", "--min-micro-batch-size", "8",
    )  # fmt: skip
    slurm.wait_for((run["path"] / "checkpoints" / "manifest.json").exists)
    crowd.write_text("24MiB")
    assert slurm.ended(run["job_id"]) == "FAILED", Path(run["log"]).read_text()
    told = json.loads(slurm.can_train("status", run["run_id"], "--json").stdout)
    assert told["state"] == "CUDA out-of-memory"
    assert not (run["path"] / "result.json").exists()


def rank_process(job: str, rank: int) -> psutil.Process | None:
    """The process of a rank of a job of this machine, once it trains."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ() if "submitit" in " ".join(process.cmdline()) else {}
            if (variables.get("SLURM_JOB_ID"), variables.get("SLURM_PROCID")) == (job, str(rank)):
                return process
    return None


def test_a_job_of_which_any_rank_is_killed_is_put_back_and_goes_on(slurm: Slurm) -> None:
    line = (*TRAIN, *FOUR, "--nodes", "1", "--epochs", "8", "--checkpoint-every", "4", "--device", "cpu")
    (run,) = json.loads(slurm.can_train(*line).stdout)["submitted"]
    attempts = Attempts(slurm.folder / "runs" / run["run_id"])
    manifest = slurm.folder / "runs" / run["run_id"] / "checkpoints" / "manifest.json"
    saved = ""
    for rank in (1, 0):
        slurm.wait_for(lambda seen=saved: manifest.exists() and manifest.read_text() != seen)  # type: ignore[misc]
        process = rank_process(run["job_id"], rank)
        assert process is not None
        process.kill()
        slurm.kick(run["job_id"])
        saved = manifest.read_text()
    assert slurm.ended(run["job_id"]) == "COMPLETED", Path(run["log"]).read_text()
    ends = [attempts.end(start.attempt) for start in attempts.starts()]
    assert [end.ending for end in ends if end] == ["killed", "killed", "finished"]
    assert slurm.attempts(run["job_id"]) == ["REQUEUED", "REQUEUED", "COMPLETED"]
    assert "killed process: put back into the queue" in Path(run["log"]).read_text()
