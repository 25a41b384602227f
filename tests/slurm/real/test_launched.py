"""srun starts can-train itself in several tasks: they train one run, and steps side by side do not meet."""

import json

from slurm.real.on_slurm import Slurm

LINE = ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=8",
        "--device", "cpu", "--epochs", "1", "--no-baselines")  # fmt: skip


def test_two_tasks_of_srun_on_two_nodes_train_one_run(slurm: Slurm) -> None:
    done = slurm.launched("srun", "-N2", "-n2", "--mem=3000M", words=LINE)
    assert done.returncode == 0, done.stderr
    assert "note: srun started 2 processes (SLURM_STEP_NUM_TASKS=2): they train one run" in done.stderr
    (result,) = [json.loads(path.read_text()) for path in slurm.folder.glob("runs/*/result.json")]
    assert result["status"] == "finished"
    assert {path.name for path in slurm.folder.glob("runs/*/steps*")} == {"steps-rank-1.jsonl", "steps.jsonl"}


def test_a_script_that_calls_it_once_in_a_job_of_two_tasks_trains_alone(slurm: Slurm) -> None:
    done = slurm.launched("salloc", "-n2", "--mem=3000M", words=(*LINE, "--dry-run"))
    assert done.returncode == 0, done.stderr
    refused = slurm.launched("srun", "-n2", "--mem=3000M", words=(*LINE, "--dry-run"))
    assert "error: A plan is work for one process: srun started 2 processes (SLURM_STEP_NUM_TASKS=2)" in refused.stderr
