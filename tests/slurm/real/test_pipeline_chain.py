"""A pipeline on a real SLURM: a stage starts when those before it have finished, and never where one has failed."""

import json
from pathlib import Path
from typing import Any

from slurm.real.on_slurm import Slurm

LINE = ("pipeline", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=8", "--epochs", "1", "--no-baselines",
        "--device", "cpu", "--min-steps-per-epoch", "3", "--stages", "normal,knowledge_distillation",
        "--set", "normal:model.layers=1")  # fmt: skip
JOB = ("--submit", "--mem", "1500M", "--time", "10", "--json")
HELD = ("--set", "normal:cluster.additional.hold=true")


def stages(slurm: Slurm, *arguments: str) -> dict[str, dict[str, Any]]:
    return {each["stage"]: each for each in json.loads(slurm.can_train(*LINE, *arguments).stdout)}


def test_the_second_stage_is_trained_on_what_the_first_has_trained(slurm: Slurm) -> None:
    sent = stages(slurm, *JOB)
    assert slurm.ended(sent["knowledge_distillation"]["job_id"]) == "COMPLETED", log(sent)
    assert slurm.attempts(sent["normal"]["job_id"]) == ["COMPLETED"]
    shown = stages(slurm, "--show", "--json")
    assert {each["state"] for each in shown.values()} == {"finished"}
    assert {name: each["run_id"] for name, each in shown.items()} == {
        name: each["run_id"] for name, each in sent.items()
    }
    again = stages(slurm, *JOB)
    assert {each["what"] for each in again.values()} == {"reused"}


def test_the_second_stage_never_starts_where_the_first_fails_and_the_same_line_sends_both_again(slurm: Slurm) -> None:
    failing = ("--set", "normal:training.lr=1e30")
    sent = stages(slurm, *JOB, *failing, *HELD)
    slurm.command("scontrol", "release", sent["normal"]["job_id"])
    assert slurm.ended(sent["normal"]["job_id"]) == "FAILED"
    assert slurm.ended(sent["knowledge_distillation"]["job_id"]) == "CANCELLED"
    shown = stages(slurm, *failing, "--show", "--json")
    assert shown["normal"]["state"] == "failed"
    assert shown["knowledge_distillation"]["state"] == "never started"
    assert "the run that it waits for did not finish" in shown["knowledge_distillation"]["told"]
    again = stages(slurm, *JOB, *failing, *HELD)
    assert {name: (each["what"], each["run_id"]) for name, each in again.items()} == {
        name: ("goes on", each["run_id"]) for name, each in sent.items()
    }
    slurm.command("scancel", *(each["job_id"] for each in again.values()))


def log(sent: dict[str, dict[str, Any]]) -> str:
    return "\n".join(Path(each["log"]).read_text() for each in sent.values() if Path(each["log"]).exists())
