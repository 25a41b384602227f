"""Runs submitted to a real SLURM: what is sent, what is refused, what is the same, and what a job runs."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from can_train.factors.observations import read_records
from can_train.runs.scheduler import reason_in_words
from fakes.apptainer import installed
from fakes.bitwise import assert_same, final_state
from fakes.own_tasks import write_task
from slurm.real.on_slurm import Slurm

TRAIN = ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=8",
         "--epochs", "1", "--no-baselines", "--device", "cpu")  # fmt: skip
JOB = ("--mem", "1500M", "--time", "10")
ODD = "a b'c\"d$(touch x)#é"


def submitted(slurm: Slurm, *arguments: str) -> list[dict[str, Any]]:
    """Submits; returns what the JSON says of each run."""
    found: list[dict[str, Any]] = json.loads(slurm.can_train(*arguments, "--submit", "--json").stdout)["submitted"]
    return found


def shown(slurm: Slurm, job: str, field: str) -> str:
    """A field of `scontrol show job`."""
    found = re.search(rf"\b{field}=(.*?)(?:\s\w+(?::\w+)?=|\n)", slurm.command("scontrol", "show", "job", job))
    return found[1].strip() if found else ""


def test_a_run_with_awkward_names_trains_without_its_users_variables_and_no_name_is_executed(slurm: Slurm) -> None:
    runs, state = slurm.folder / ODD, slurm.folder / f"state {ODD}"
    places = ("--runs-dir", str(runs), "--state-dir", str(state))
    (run,) = submitted(slurm, *TRAIN, *JOB, *places, "--set", "cluster.additional.comment='a b $(touch y)'",
                       "--set", "cluster.additional.export=NONE")  # fmt: skip
    assert shown(slurm, run["job_id"], "Comment") == "a b $(touch y)"
    assert slurm.ended(run["job_id"]) == "COMPLETED", Path(run["log"]).read_text()
    assert json.loads((runs / run["run_id"] / "result.json").read_text())["status"] == "finished"
    assert "Result: " in Path(run["log"]).read_text()
    assert not [*slurm.folder.rglob("x"), *slurm.folder.rglob("y")]


def test_what_a_dry_run_prints_is_what_is_sent(slurm: Slurm) -> None:
    line = (*TRAIN, "--time", "12h", "--gpus", "fake:1", "--qos", "normal", "--set", "cluster.setup=['module list']")
    planned = json.loads(slurm.can_train(*line, "--submit", "--dry-run", "--json").stdout)["script"]
    assert not (slurm.folder / "runs").exists()
    assert not (slurm.folder / "state").exists()
    (run,) = submitted(slurm, *line, "--set", "cluster.additional.hold=true")
    sent = Path(run["script"]).read_text().replace("#SBATCH --hold\n", "")
    slurm.command("scancel", run["job_id"])
    (name,) = {*re.findall(r"/runs/([^/]+)/", planned)}
    assert planned.replace(name, run["run_id"]) == sent


def test_a_request_reaches_slurm_and_a_nonsense_is_refused_in_the_words_of_sbatch(slurm: Slurm) -> None:
    first, second = slurm.nodes
    request = ("--gpus", "fake:1", "--mem-per-gpu", "700M", "--cpus-per-gpu", "2", "--begin", "now+1hour", "--nice",
               "7", "--exclude", first, "--job-name", "mine", "--comment", "a b", "--mail-type", "END", "--mail-user",
               "me@host", "--clusters", "sandbox", "--account", "root", "--time", "10")  # fmt: skip
    (run,) = submitted(slurm, *TRAIN, *request)
    fields = {"Nice": "7", "JobName": "mine", "Comment": "a b", "ExcNodeList": first, "MailType": "END",
              "Account": "root", "MailUser": "me@host", "CpusPerTres": "gres:gpu:2"}  # fmt: skip
    assert {name: shown(slurm, run["job_id"], name) for name in fields} == fields
    slurm.command("scancel", run["job_id"])
    refused = {"--begin noon-ish": "Invalid --begin", "--set cluster.additional.foo=1": "unrecognized option '--foo=1'",
               "--clusters moon": "Unknown cluster: 'moon'", f"--nodelist {second}x": "Unknown node",
               "--tmp 1G": "at most 0M of temporary disk"}  # fmt: skip
    for words, error in refused.items():
        ended = slurm.can_train(*TRAIN, "--submit", "--dry-run", *words.split(), check=False)
        assert ended.returncode == 2
        assert error in ended.stderr


def test_a_job_trains_in_a_container_and_one_whose_setup_fails_says_why(slurm: Slurm) -> None:
    image, programs = slurm.folder / "my.sif", installed(slurm.folder / "bin").parent
    image.touch()
    here = ("--container", str(image), "--set", f"cluster.python={sys.executable}", "--seed", "1")
    path = f"cluster.setup=['export PATH={programs}:$PATH']"
    failing = "cluster.setup=['echo loading','module load nothing']"
    (first,) = submitted(slurm, *TRAIN, *JOB, *here, "--set", path)
    (second,) = submitted(slurm, *TRAIN, *JOB, "--set", failing)
    assert slurm.ended(first["job_id"]) == "COMPLETED", Path(first["log"]).read_text()
    assert f"image {image}" in Path(first["log"]).read_text()
    assert json.loads((Path(first["path"]) / "result.json").read_text())["status"] == "finished"
    assert slurm.ended(second["job_id"]) == "FAILED"
    status = json.loads(slurm.can_train("status", second["run_id"], "--json").stdout)
    assert status["state"] == "failed"
    assert "cluster.setup ended with exit status 127: module load nothing" in status["why"]


def test_a_job_asks_for_no_more_than_its_quality_of_service_gives_it(slurm: Slurm) -> None:
    # A name of its own: the accounting outlives a test that was killed.
    brief = f"brief{uuid4().hex[:8]}"
    slurm.command("sacctmgr", "--immediate", "add", "qos", brief, "MaxWall=2:00:00")
    slurm.command("sacctmgr", "--immediate", "modify", "user", "root", "set", f"qos+={brief}")
    try:
        (run,) = submitted(slurm, *TRAIN, "--qos", brief, "--set", "cluster.additional.hold=true")
        assert shown(slurm, run["job_id"], "TimeLimit") == "02:00:00"
        refused = slurm.can_train(*TRAIN, "--submit", "--qos", brief, "--time", "3h", check=False)
        assert (refused.returncode, refused.stderr) == (2, (
            f"error: This job can never start. QOS {brief} gives a job at most 2:00:00: asked for 3:00:00.\n"
            "Give --time 2:00:00 or less, or another --qos or --account.\n"
        ))  # fmt: skip
        job = slurm.sbatch("true", f"--qos={brief}", "--time=180")
        reason = slurm.wait_for(lambda: next((one for one in slurm.queue(job, "%r") if one.startswith("QOS")), ""))
        assert "can never start" in reason_in_words(reason)
    finally:
        slurm.command("scancel", "--user=root")
        slurm.command("sacctmgr", "--immediate", "delete", "qos", brief)


def test_a_job_trains_the_task_with_the_code_that_was_submitted_whatever_is_edited_later(
    slurm: Slurm, repository: Path
) -> None:
    tree = slurm.folder / "tree"
    for part in ("src", "configs"):
        shutil.copytree(repository / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    slurm.variables["PYTHONPATH"] = str(tree / "src")
    task = write_task(slurm.folder / "mine")
    words = ("--task", f"{task}:MyTask", "--epochs", "1", "--device", "cpu")
    (run,) = submitted(slurm, *words, *JOB, "--set", "cluster.additional.hold=true")
    task.write_text("raise SystemExit('edited')\n")
    for file in (tree / "src").rglob("*.py"):
        file.write_text("raise SystemExit('edited')\n")
    shutil.rmtree(tree / "configs")
    # Neither does what lies in the folder that the job starts in.
    (slurm.folder / "can_train.py").write_text("raise SystemExit('shadowed')\n")
    slurm.command("scontrol", "release", run["job_id"])
    assert slurm.ended(run["job_id"]) == "COMPLETED", Path(run["log"]).read_text()


def test_an_identical_run_is_pointed_out_while_it_waits_and_a_finished_one_is_not_waited_for(slurm: Slurm) -> None:
    (run,) = submitted(slurm, *TRAIN, *JOB, "--set", "cluster.additional.hold=true")
    said = slurm.can_train(*TRAIN, "--submit").stdout
    assert said.startswith(f"{run['run_id']}  is the same, and is queued")
    slurm.command("scontrol", "release", run["job_id"])
    assert slurm.ended(run["job_id"]) == "COMPLETED"
    assert "has finished" in slurm.can_train(*TRAIN, "--submit").stdout
    after = ("--after", run["run_id"])
    (other,) = submitted(slurm, *TRAIN, "--epochs", "2", *after, "--set", "cluster.additional.hold=true")
    assert shown(slurm, other["job_id"], "Dependency") == "(null)"
    (again,) = submitted(slurm, *TRAIN, "--force", "--set", "cluster.additional.hold=true")
    slurm.command("scancel", other["job_id"], again["job_id"])
    assert len({run["run_id"], other["run_id"], again["run_id"]}) == 3


def test_a_cancelled_run_is_no_reason_not_to_submit(slurm: Slurm) -> None:
    (run,) = submitted(slurm, *TRAIN, *JOB, "--set", "cluster.additional.hold=true")
    slurm.command("scancel", run["job_id"])
    slurm.wait_for(lambda: not slurm.command("squeue", "--noheader", f"--jobs={run['job_id']}"))
    (again,) = submitted(slurm, *TRAIN, *JOB, "--set", "cluster.additional.hold=true")
    slurm.command("scancel", again["job_id"])


def test_a_sweep_is_one_array_of_runs_with_a_log_each(slurm: Slurm) -> None:
    line = ["--model", "gat,vgae", *TRAIN[2:], "--set", "training.seed=range(0,2)"]
    runs = submitted(slurm, *line, *JOB, "--cpus", "1", "--max-parallel", "2")
    array = runs[0]["job_id"].partition("_")[0]
    assert [run["job_id"] for run in runs] == [f"{array}_{index}" for index in range(4)]
    assert "%2" in Path(runs[0]["script"]).read_text()
    assert slurm.ended(array) == "COMPLETED"
    assert slurm.attempts(array) == ["COMPLETED"] * 4
    for run in runs:
        assert f"Run {run['run_id']}: 1 epoch," in Path(run["log"]).read_text()
    assert read_records(slurm.folder / "state").unfinished == []
    assert len(read_records(slurm.folder / "state").finished) == 4
    slurm.can_train("--model", "vgae", *TRAIN[2:], "--seed", "1", "--runs-dir", "alone")
    (alone,) = (slurm.folder / "alone").glob("2*")
    assert_same(final_state(slurm.folder / "runs" / runs[3]["run_id"]), final_state(alone))


def test_runs_of_a_sweep_share_a_job_and_one_that_fails_ends_no_other(slurm: Slurm) -> None:
    # The second learning rate is no longer finite after the first step.
    line = [*TRAIN, "--device", "sim:512MiB", "--set", "training.lr=1e-3,1e30,2e-3"]
    runs = submitted(slurm, *line, *JOB, "--cpus", "1", "--pack", "auto")
    (number,) = {run["job_id"] for run in runs}
    assert slurm.ended(number) == "FAILED"
    folders = [slurm.folder / "runs" / run["run_id"] for run in runs]
    assert [(folder / "result.json").is_file() for folder in folders] == [True, False, True]
    states = [json.loads(slurm.can_train("status", run["run_id"], "--json").stdout)["state"] for run in runs]
    assert states == ["finished", "failed", "finished"]
    assert len({Path(run["log"]).read_text() for run in runs}) == 3


def test_a_run_waits_for_another_and_is_cancelled_with_it(slurm: Slurm) -> None:
    bad = slurm.folder / "bad.csv"
    bad.write_text("no log at all\n")
    line = ["--model", "gat", "--device", "cpu", *JOB]
    (parent,) = submitted(slurm, *line, "--dataset", str(bad), "--set", "cluster.additional.hold=true")
    (child,) = submitted(slurm, *TRAIN, *JOB, "--after", parent["run_id"][:-2])
    assert shown(slurm, child["job_id"], "Dependency") == f"afterok:{parent['job_id']}(unfulfilled)"
    slurm.command("scontrol", "release", parent["job_id"])
    assert slurm.ended(parent["job_id"]) == "FAILED"
    assert slurm.ended(child["job_id"]).startswith("CANCELLED")
    refused = slurm.can_train(*TRAIN, "--submit", "--after", parent["run_id"], check=False)
    assert refused.returncode == 2
    assert f"can-train resume {parent['run_id']}" in refused.stderr


def test_a_run_is_submitted_from_inside_a_job_without_anything_of_it(slurm: Slurm) -> None:
    inner = shlex.join([sys.executable, "-P", "-m", "can_train", *TRAIN, *JOB, "--submit", "--json"])
    outer = slurm.sbatch(f"{inner} > submitted.json", "--mem=500", "--job-name=outer", "--ntasks=2", "--export=ALL")
    assert slurm.ended(outer) == "COMPLETED", slurm.log(outer)
    (run,) = json.loads((slurm.folder / "submitted.json").read_text())["submitted"]
    assert slurm.ended(run["job_id"]) == "COMPLETED", Path(run["log"]).read_text()


def test_variables_of_sbatch_do_not_beat_what_was_asked_for(slurm: Slurm) -> None:
    slurm.variables |= {"SBATCH_TIMELIMIT": "1", "SBATCH_PARTITION": "scavenge", "SBATCH_JOB_NAME": "mine"}
    (run,) = submitted(slurm, *TRAIN, *JOB, "--set", "cluster.additional.hold=true")
    job = run["job_id"]
    assert shown(slurm, job, "TimeLimit") == "00:10:00"
    assert shown(slurm, job, "JobName") == "mine", "no other name was asked for"
    assert shown(slurm, job, "Partition") == "scavenge", "a default of the user's own"
    (other,) = submitted(slurm, *TRAIN, *JOB, "--partition", "main", "--force", "--set", "cluster.additional.hold=true")
    assert shown(slurm, other["job_id"], "Partition") == "main"
    slurm.command("scancel", job, other["job_id"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--partition", "mian"), "Valid, nearest first: main"),
        (("--partition", "short", "--time", "5"), "Its time limit is 0:02:00"),
        (("--nodes", "3"), "A job has at most 2 nodes"),
        (("--mem", "5G"), "A node has at most 4000M"),
        (("--gpus", "3"), "A node has at most 2 GPUs"),
        (("--gpus", "a100:1"), "Partition main has no GPU of this kind"),
        (("--set", "cluster.additional.no-such-option=1"), "unrecognized option"),
        (("--account", "nobody"), "nobody"),
        (("--after", "nothing"), "There is no such run"),
    ],
)
def test_what_slurm_would_refuse_or_never_start_is_refused_and_leaves_nothing(
    slurm: Slurm, arguments: tuple[str, ...], message: str
) -> None:
    refused = slurm.can_train(*TRAIN, "--submit", *arguments, check=False)
    assert refused.returncode == 2, refused.stdout
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not [*(slurm.folder / "runs").glob("*")]
    assert not [*(slurm.folder / "state" / "runs").glob("*")]


def test_where_no_controller_answers_it_says_so_and_names_the_alternatives(slurm: Slurm) -> None:
    conf = slurm.folder / "slurm.conf"
    text = Path(slurm.variables["SLURM_CONF"]).read_text()
    conf.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", text))
    refused = subprocess.run(
        [sys.executable, "-P", "-m", "can_train", *TRAIN, "--submit"],
        env={**slurm.variables, "SLURM_CONF": str(conf)}, cwd=slurm.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "No SLURM answers on this machine" in refused.stderr
    assert "--cluster local" in refused.stderr
    assert [path.name for path in slurm.folder.iterdir()] == ["slurm.conf"]


def test_the_partition_is_chosen_among_those_that_take_the_job(slurm: Slurm) -> None:
    line = (*TRAIN, "--partition", "auto", "--mem", "1500M", "--time", "10")
    places = json.loads(slurm.can_train(*line, "--submit", "--dry-run", "--json").stdout)["places"]
    assert [(place["partition"], bool(place["start"])) for place in places] == [
        ("main", True), ("scavenge", True), ("short", False)
    ]  # fmt: skip
    assert places[2]["refusal"].startswith("Partition short would never start this job. Its time limit is 0:02:00")
    of_gpus = slurm.can_train(*line, "--device", "auto", "--gpus", "fake:2", "--submit", "--dry-run").stdout
    assert "main      2 × fake no plan" in of_gpus
    assert "#SBATCH --gpus-per-node=fake:2" in of_gpus
    unasked = slurm.can_train(*line, "--submit", check=False)
    assert unasked.returncode == 2
    assert unasked.stderr.endswith(
        "Nothing was submitted, since --partition auto asks first and nobody can answer here: main.\nAdd --yes.\n"
    )
    (run,) = submitted(slurm, *line, "--yes", "--set", "cluster.additional.hold=true")
    assert shown(slurm, run["job_id"], "Partition") == "main"
    slurm.command("scancel", run["job_id"])
