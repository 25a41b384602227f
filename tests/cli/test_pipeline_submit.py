"""`can-train pipeline --submit` on a SLURM of a few scripts: which jobs are sent, and what each waits for."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from can_train.cli.main import main
from can_train.config.resolved import plain_from_yaml
from can_train.runs.registry import Registry

LINE = ("pipeline", "--dataset", "synthetic", "--submit", "--json")
COMMANDS = {
    # Each job has the next number, and all of them wait in the queue.
    "sbatch": 'case $* in *--help) exit 1;; esac; cat "$1" >> sent; echo x >> count; '
    "echo Submitted batch job $((40 + $(wc -l < count)))",
    "scontrol": 'cat "{records}/$2s.txt"',
    "squeue": 'for job in 41 42 43 44 45 46; do echo "$job|PENDING|Dependency|||"; done',
    "srun": "exit 1",
}


@pytest.fixture
def slurm(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its `bin` is all of PATH; `sent` is what sbatch got."""
    (tmp_path / "bin").mkdir()
    for name in ("cat", "git", "wc"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    for name, script in COMMANDS.items():
        command = tmp_path / "bin" / name
        records = str(repository / "tests/fixtures/slurm")
        command.write_text("#!/bin/sh\n" + script.replace("{records}", records))
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sent(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert main((*LINE, *arguments)) == 0, capsys.readouterr().err
    return {each["stage"]: each for each in json.loads(capsys.readouterr().out)}


def test_each_stage_waits_for_the_jobs_of_all_that_it_builds_on(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sent(capsys)
    assert [each["job_id"] for each in found.values()] == ["41", "42", "43", "44", "45", "46", "47"]
    assert re.findall(r"--dependency=(\S+)", (slurm / "sent").read_text()) == [
        "afterok:41",
        "afterok:43,afterok:44",
        "afterok:41,afterok:46",
    ]
    after = {run.run_id: run.after for run in Registry(slurm / "state").runs()}
    ids = {stage: each["run_id"] for stage, each in found.items()}
    assert after[ids["knowledge_distillation"]] == f"{ids['curriculum']},{ids['student']}"


def test_each_run_builds_on_the_folders_of_those_to_come_and_starts_from_fresh_weights(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sent(capsys, "--stages", "normal,student,knowledge_distillation")
    config = plain_from_yaml((slurm / "runs" / found["knowledge_distillation"]["run_id"] / "config.yaml").read_text())
    assert config["mode"]["teacher"] == str(slurm / "runs" / found["normal"]["run_id"])
    assert config["mode"]["without_teacher"] == str(slurm / "runs" / found["student"]["run_id"])
    assert config["training"]["start_from"] == ""


def test_every_stage_gets_the_place_that_is_chosen_for_all(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch = slurm / "bin" / "sbatch"
    # The job would start first on scavenge.
    starts = 'case "$(cat "$1")" in *partition=scavenge*) hour=10;; *) hour=11;; esac; '
    starts += "echo sbatch: Job 1 to start at 2026-01-02T$hour:00:00 using 1 processors on nodes n1 >&2; exit 0"
    sbatch.write_text(
        sbatch.read_text().replace("esac;", f"esac; case $* in *--test-only*) shift $(($# - 1)); {starts};; esac;", 1)
    )
    line = ("--stages", "normal,student", "--device", "cpu", "--partition", "auto")
    assert main((*LINE, *line)) == 2
    assert "since --partition auto asks first" in capsys.readouterr().err
    assert not (slurm / "sent").exists()
    found = sent(capsys, *line, "--yes")
    assert re.findall(r"--partition=(\S+)", (slurm / "sent").read_text()) == ["scavenge"] * 2
    jobs = [Registry(slurm / "state").jobs(each["run_id"])[0] for each in found.values()]
    assert [job.resources["partition"] for job in jobs] == ["scavenge"] * 2


def test_what_is_queued_is_not_sent_again_but_waited_for(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = sent(capsys, "--stages", "autoencoder")
    second = sent(capsys, "--stages", "autoencoder,curriculum")
    assert (second["autoencoder"]["what"], second["autoencoder"]["job_id"]) == ("at work", None)
    assert second["autoencoder"]["run_id"] == first["autoencoder"]["run_id"]
    assert (second["curriculum"]["job_id"], second["curriculum"]["after"]) == ("42", ["autoencoder"])
    assert "--dependency=afterok:41\n" in (slurm / "sent").read_text()


def test_what_was_interrupted_is_sent_again_in_its_folder(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = sent(capsys, "--stages", "autoencoder")["autoencoder"]
    (slurm / "bin" / "squeue").write_text('#!/bin/sh\necho "42|PENDING|Priority|||"\n')
    again = sent(capsys, "--stages", "autoencoder,curriculum")
    assert (again["autoencoder"]["what"], again["autoencoder"]["job_id"]) == ("goes on", "42")
    assert again["autoencoder"]["run_id"] == first["run_id"]
    assert [job.reason for job in Registry(slurm / "state").jobs(first["run_id"])] == ["", "resumed"]


def test_what_a_stage_would_never_get_is_said_before_anything_is_sent(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main((*LINE, "--set", "student:cluster.mem=900G")) == 2
    assert "would never start this job" in capsys.readouterr().err
    assert {path.name for path in slurm.iterdir()} == {"bin"}


def test_a_person_is_told_each_stage_with_its_job(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*LINE[:-1], "--stages", "autoencoder,curriculum")) == 0
    said = capsys.readouterr().out
    assert re.search(r"curriculum +\S+ +job 42 +autoencoder", said)
    assert "the same line with --show" in said
