"""`--submit` as a person meets it, on a SLURM of three scripts: what is printed, what is refused, what is imported."""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.resolved import plain_from_yaml
from can_train.config.settings import ClusterSettings
from can_train.errors import DOES_NOT_FIT
from can_train.runs.registry import Registry
from can_train.runs.run_folder import RunFolder
from can_train.runs.trials import TrialRun
from can_train.slurm.job import name_job
from fakes.made_runs import begin, end

TRAIN = ("--model", "gat", "--dataset", "synthetic")
DRY = ("--dry-run", "--size", "student", "--target-gpu", "t4", "--set", "dataset.synthetic.seconds=5")
COMMANDS = {
    "sbatch": 'case $* in *--help) exit 1;; esac; cat "$1" >> "{folder}/sent"; echo Submitted batch job 41',
    "scontrol": 'cat "{records}/$2s.txt"',
    "squeue": "echo '41|PENDING|Priority||N/A|1:30:00'",
    "srun": "exit 1",
}


@pytest.fixture
def slurm(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its `bin` is all of PATH, so that no real SLURM is found; `sent` is what sbatch got."""
    (tmp_path / "bin").mkdir()
    for name in ("cat", "git"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    for name, script in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.write_text("#!/bin/sh\n" + script.format(folder=tmp_path, records=repository / "tests/fixtures/slurm"))
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main((*TRAIN, "--submit", *arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_submission_says_its_run_first_and_how_to_follow_it(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = submit(capsys, "--time", "90min").splitlines()
    (run,) = Registry(slurm / "state").runs()
    assert said == [
        f"{run.run_id}  job 41",
        "  asked for  1 × GPU, 2 processors a rank, 2000M, at most 1:30:00",
        "  expected   No such run has finished yet: the job plans it on its device",
        f"State: can-train status {run.run_id}",
        f"Log:   can-train logs {run.run_id} -f",
    ]
    assert max(map(len, said)) <= 80
    (job,) = Registry(slurm / "state").jobs(run.run_id)
    assert (job.job_id, job.executor, job.resources["time"], job.resources["gpus-per-node"]) == ("41", "slurm", 90, "1")
    assert f"#SBATCH --output={job.log_path.replace('41_0', '%j_0')}" in (slurm / "sent").read_text()


def test_a_run_of_another_process_that_has_the_same_id_stays(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = "20260101-000000-key-0001", "20260101-000000-key-0002"
    ours, theirs = (RunFolder(slurm / "runs" / run_id) for run_id in ids)
    theirs.make({})
    monkeypatch.setattr("can_train.cli.submit.new_folders", lambda runs: [ours, theirs])
    assert main((*TRAIN, "--submit", "--set", "training.lr=0.1,0.2")) == 2
    assert "File exists" in capsys.readouterr().err
    assert (theirs.config(), ours.path.exists()) == ({}, False)


def test_a_job_that_may_not_go_back_into_the_queue_is_named_when_it_is_submitted(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = slurm / "bin" / "scontrol"
    scontrol.write_text(f"""{scontrol.read_text()}; test "$2" != job || echo "JobId=41 Requeue=0 Restarts=0" """)
    (slurm / "jobs.txt").touch()
    scontrol.write_text(scontrol.read_text().replace("cat ", "test $2 = job || cat "))
    submit(capsys, "--cluster", "slurm", "--set", "cluster.max_restarts=0")
    assert main((*TRAIN, "--submit", "--force")) == 0
    (_, run) = Registry(slurm / "state").runs()
    assert " ".join(capsys.readouterr().err.split()) == (
        "note: SLURM does not let job 41 on alpha go back into the queue (Requeue=0): at its time limit the run saves "
        f"and ends. Then go on: can-train resume {run.run_id}"
    )


def test_a_job_whose_memory_ran_out_is_submitted_again_with_more(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(capsys, "--time", "90min", "--mem", "400M")
    registry = Registry(slurm / "state")
    (run,) = registry.runs()
    Path(registry.jobs(run.run_id)[0].log_path).write_text(
        "slurmstepd: error: Exceeded job memory limit at some point."
    )
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\necho '41|RUNNING|None|n1||'\n")
    variables = b"".join(os.fsencode(f"{name}={os.environ[name]}") + b"\0" for name in ("PATH", "CAN_TRAIN_HOME"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(base64.b64encode(variables))))
    for name, value in {
        "SLURM_JOB_ID": "41",
        "SLURM_CLUSTER_NAME": "alpha",
        "SLURM_MEM_PER_NODE": "400",
        "SLURM_JOB_PARTITION": "main",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(("after-job", "--state-dir", str(slurm / "state"), "--status", "1")) == 0
    said = "host out-of-memory: 600M instead of 400M"
    assert capsys.readouterr().out == f"can-train: {said}: submitted again as job 41\n"
    again = registry.jobs(run.run_id)[-1]
    assert (again.reason, again.resources["mem"]) == (said, "600M")
    assert (slurm / "sent").read_text().count("#SBATCH --mem=600M") == 1


@pytest.mark.parametrize(("status", "requeued"), [("137", True), ("143", True), ("3", False)])
def test_a_job_one_rank_of_which_was_killed_goes_back_into_the_queue(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: str, requeued: bool
) -> None:
    submit(capsys)
    (run,) = Registry(slurm / "state").runs()
    begin(Path(run.path), job_id="41")
    end(Path(run.path), "rank_gone", message="Every process must stay: another one has ended")
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\necho '41|RUNNING|None|n1||'\n")
    (slurm / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$*" >> {slurm}/asked\n')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")
    assert main(("after-job", "--state-dir", str(slurm / "state"), "--status", status)) == 0
    asked = (slurm / "asked").read_text() if (slurm / "asked").exists() else ""
    assert ("requeue 41" in asked) == requeued
    capsys.readouterr()
    assert main(("status", "last", "--json")) == 0
    (attempt,) = json.loads(capsys.readouterr().out)["attempts"]
    assert ("SIGKILL" in attempt["why"]) == requeued


def test_the_saved_configuration_finds_everything_from_anywhere(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "data").mkdir()
    given = ("--runs-dir", "my runs", "--cache", "scratch", "--tracker", "tensorboard", "--cpus", "1")
    submit(capsys, *given, "--set", "cluster.additional.mail-type=END")
    (run,) = Registry(slurm / "state").runs()
    config = plain_from_yaml((Path(run.path) / "config.yaml").read_text())
    assert config["paths"] == {
        "runs_dir": str(slurm / "my runs"), "data_root": str(slurm / "data"), "state_dir": str(slurm / "state"),
        "cache": str(slurm / "scratch"), "tracker": "tensorboard", "code_dir": "", "config_dir": "",
    }  # fmt: skip
    assert (config["cluster"]["cpus"], config["cluster"]["mem"]) == (1, "2000M")
    assert config["cluster"]["additional"] == {"mail-type": "END"}
    assert Path(run.path).parent == slurm / "my runs"


def test_json_names_run_job_log_and_script(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = json.loads(submit(capsys, "--json"))
    (run,) = first["submitted"]
    assert (run["job_id"], run["executor"]) == ("41", "slurm")
    assert Path(run["script"]).read_text() == (slurm / "sent").read_text()
    again = json.loads(submit(capsys, "--json"))
    assert again["submitted"] == []
    assert [(duplicate_run["run_id"], duplicate_run["state"]) for duplicate_run in again["identical"]] == [
        (run["run_id"], "queued")
    ]


def test_an_identical_run_is_pointed_out_and_the_others_of_its_sweep_go_on(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = submit(capsys).split()[0]
    said = submit(capsys, "--model", "gat,vgae").splitlines()
    assert said[0] == f"{first}  is the same, and is queued"
    assert "--force" in said[2]
    assert "vgae" in said[3]
    assert len(Registry(slurm / "state").runs()) == 2


def test_several_runs_are_one_array(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = submit(capsys, "--model", "gat,vgae", "--max-parallel", "1").splitlines()
    assert [line.split()[2:4] for line in said[:2]] == [["41_0", "model=gat"], ["41_1", "model=vgae"]]
    runs = Registry(slurm / "state").runs()
    assert len({run.sweep for run in runs}) == 1
    assert all(run.sweep and Path(run.path, "config.yaml").exists() for run in runs)
    assert "#SBATCH --array=0-1%1" in (slurm / "sent").read_text()


def test_each_flag_for_a_job_reaches_sbatch_whole(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"exclude": "n1,g[1-2]", "nodelist": "n2", "reservation": "lab", "comment": "a,b", "job-name": "mine",
             "mail-user": "me@lab", "mail-type": "END,FAIL", "begin": "now+1hour", "nice": "7"}  # fmt: skip
    submit(capsys, "--exclusive", *(word for name, value in flags.items() for word in (f"--{name}", value)))
    sent = (slurm / "sent").read_text().splitlines()
    directives = [line.removeprefix("#SBATCH --").replace("'", "") for line in sent if line.startswith("#SBATCH --")]
    assert {*directives} >= {"exclusive", *(f"{name}={value}" for name, value in flags.items())}


def test_a_list_of_nodes_is_one_job(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit(capsys, "--set", "cluster.exclude=n1,n2", "--set", "cluster.additional.licenses=[a:1,b:2]")
    assert len(Registry(slurm / "state").runs()) == 1
    sent = (slurm / "sent").read_text()
    assert "#SBATCH --exclude=n1,n2\n" in sent
    assert "#SBATCH --licenses=a:1,b:2\n" in sent


ACCOUNTING = """case "$4" in
qos) echo 'normal||02:00:00|cpu=1,node=1||||||||||' ;;
user) echo lab ;;
assoc) case "$*" in *user=\\ *) echo 'lab||||normal|||||||||' ;; *) echo 'lab|me|||normal|||||||||' ;; esac
esac"""


def test_a_default_above_the_limit_of_a_job_is_cut_and_what_was_asked_for_is_refused(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "bin" / "sacctmgr").write_text(f"#!/bin/sh\n{ACCOUNTING}\n")
    (slurm / "bin" / "sacctmgr").chmod(0o755)
    config = "AccountingStorageEnforce = associations,limits,qos\nClusterName = c"
    answer = (slurm / "bin" / "scontrol").read_text().replace("#!/bin/sh\n", "")
    (slurm / "bin" / "scontrol").write_text(f'#!/bin/sh\n[ $2 = config ] && echo "{config}" || {answer}')
    assert main((*TRAIN, "--submit")) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "note: QOS normal gives a job at most 2:00:00: it asks for --time 2:00:00",
        "note: QOS normal gives a job at most 1 processor: it asks for --cpus 1",
    ]
    assert "asked for  1 × GPU, 1 processor a rank, 2000M, at most 2:00:00" in shown.out
    assert main((*TRAIN, "--submit", "--nodes", "2", "--seed", "2")) == 2
    assert capsys.readouterr().err == (
        "error: This job can never start. QOS normal gives a job at most 1 node: asked for 2 nodes.\n"
        "Give --nodes 1 or less, or another --qos or --account.\n"
    )
    assert len(Registry(slurm / "state").runs()) == 1


def test_an_array_that_the_cluster_would_not_take_is_refused_with_its_limit(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "MaxArraySize = 3\nClusterName = c"
    answer = (slurm / "bin" / "scontrol").read_text().replace("#!/bin/sh\n", "")
    (slurm / "bin" / "scontrol").write_text(f'#!/bin/sh\n[ $2 = config ] && echo "{config}" || {answer}')
    assert main((*TRAIN, "--submit", "--set", "training.seed=range(0,4)")) == 2
    assert capsys.readouterr().err == (
        "error: SLURM would not take an array of so many jobs: 4, and the cluster's MaxArraySize is 3.\n"
        "Sweep at most 3 values at once.\n"
    )
    assert main((*TRAIN, "--submit", "--set", "training.seed=range(0,3)")) == 0


def test_a_run_waits_for_another_job_and_only_for_one(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = submit(capsys).split()[0]
    second = submit(capsys, "--seed", "1", "--after", first).split()[0]
    assert "#SBATCH --dependency=afterok:41\n" in (slurm / "sent").read_text()
    assert {run.run_id: run.after for run in Registry(slurm / "state").runs()} == {first: "", second: first}
    assert main((*TRAIN, "--submit", "--cluster", "local", "--seed", "2", "--after", first)) == 2
    assert "The run cannot be waited for" in capsys.readouterr().err


def test_a_dry_run_prints_the_script_and_leaves_nothing(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = submit(capsys, *DRY)
    script = said.partition("Script that --submit would send:\n\n")[2]
    assert script.startswith("#!/bin/bash\n")
    assert 'exit "$status"' in script
    assert {path.name for path in slurm.iterdir()} == {"bin"}


SMALL = ("--dry-run", "--size", "student", "--set", "dataset.synthetic.seconds=5")


def test_a_dry_run_plans_for_the_gpus_that_the_job_asks_for(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / "bin" / "scontrol").unlink()
    told = json.loads(submit(capsys, *SMALL, "--device", "cuda", "--gpus", "v100:2", "--json"))
    assert [plan["target"]["key"] for plan in told["plans"]] == ["v100-16gb", "v100-32gb"]
    assert any("each of 2 processes" in warning for plan in told["plans"] for warning in plan["warnings"])
    assert "#SBATCH --gpus-per-node=v100:2" in told["script"]


def test_a_dry_run_says_which_gpu_it_does_not_know_and_prints_the_script(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main((*TRAIN, "--submit", *SMALL)) == 0
    shown = capsys.readouterr()
    assert shown.err == (
        "note: No plan is made. The catalogue has no GPU called fake; --target-gpu or\n"
        "      --target-memory says what else to plan for\n"
    )
    assert shown.out.startswith("\nScript that --submit would send:\n\n#!/bin/bash\n")


def test_a_dry_run_prints_the_script_of_a_job_that_does_not_fit(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main((*TRAIN, "--submit", *SMALL, "--device", "sim:1MiB")) == DOES_NOT_FIT
    shown = capsys.readouterr()
    assert "The weights of the model must fit on the device: they take " in shown.err
    first = "synthetic_gat_student_normal: 399 training samples\n"
    assert shown.out.startswith(f"{first}\nScript that --submit would send:\n\n#!/bin/bash\n")


def test_a_dry_run_tells_the_memory_of_the_host_that_offloading_needs(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offloads = (*TRAIN, "--submit", *SMALL, "--device", "sim:64MiB", "--fit", "offload-optimizer")
    assert main((*offloads, "--mem", "1G")) == 0
    told = " ".join(capsys.readouterr().err.replace("note: ", "").split())
    assert "of the host for tensors of its GPU: the job asks for --mem 1G. Give --mem 3G" in told
    assert main((*offloads, "--mem", "3500M")) == 0
    assert "--mem 3500M\n" in capsys.readouterr().err


def test_a_dry_run_prints_the_script_where_torch_cannot_be_imported(slurm: Path, repository: Path) -> None:
    (slurm / "broken").mkdir()
    (slurm / "broken" / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')\n")
    variables = {**os.environ, "PYTHONPATH": f"{slurm / 'broken'}:{repository / 'src'}"}
    line = (*TRAIN, "--submit", *SMALL, "--gpus", "fake:1", "--target-gpu", "t4")
    done = subprocess.run([sys.executable, "-P", "-m", "can_train", *line], env=variables, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.stderr == (
        "starting: loading PyTorch\n"
        "note: No plan is made here: torch cannot be imported (libcudart.so.12: cannot\n"
        "      open). The job plans on its device\n"
    )
    assert done.returncode == 0
    assert done.stdout.startswith("\nScript that --submit would send:\n\n#!/bin/bash\n")


@pytest.mark.parametrize("words", [("--dry-run",), ("--quiet",)])
def test_a_torch_that_cannot_be_imported_is_an_error_without_a_traceback(
    tmp_path: Path, repository: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open')\n")
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path / 'broken'}:{repository / 'src'}"}
    line = ("--model", "gat", "--dataset", "synthetic", "--state-dir", str(tmp_path), *words)
    done = subprocess.run([sys.executable, "-P", "-m", "can_train", *line], env=variables, capture_output=True,
                          text=True, check=False, cwd=tmp_path)  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    starting = "" if "--quiet" in words else "starting: loading PyTorch\n"
    assert done.stderr == (
        f"{starting}error: PyTorch cannot be imported: libcudart.so.12: cannot open.\n"
        "Install a PyTorch that works here, or name a Python that has one: export CAN_TRAIN_PYTHON=/path/to/python.\n"
    )


def test_a_dry_run_needs_no_slurm(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("sbatch", "scontrol", "srun", "squeue"):
        (slurm / "bin" / command).rename(slurm / f"no-{command}")
    assert main((*TRAIN, "--submit", *DRY)) == 0
    shown = capsys.readouterr()
    assert "its limits are not checked" in shown.err
    assert "#SBATCH --time=1440" in shown.out


@pytest.mark.parametrize(("cluster", "place"), [("local", "background"), ("debug", "this process")])
def test_a_dry_run_without_a_scheduler_says_what_would_be_started(
    slurm: Path, capsys: pytest.CaptureFixture[str], cluster: str, place: str
) -> None:
    said = submit(capsys, "--cluster", cluster, *DRY)
    assert f"No script: --cluster {cluster} trains in" in said
    assert place in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--partition", "main"), "--partition has no effect without --submit"),
        (("--max-parallel", "2"), "Add --submit"),
        (("--cluster", "slurm"), "Add --submit"),
        (("--force",), "Add --submit"),
        (("--submit", "--partition", "mian"), "nearest first: main"),
        (("--submit", "--time", "soon"), "Write it as 90, 1:30:00 or 2-12"),
        (("--submit", "--gpus", "many"), "--gpus must be a number"),
        (("--submit", "--mem", "much"), "Write it as 900M or 16G"),
        (("--submit", "--nodes", "0"), "--nodes must be at least 1"),
        (("--submit", "--partition", "short"), "signal_delay_s=15"),
        (("--submit", "--partition", "big", "--gpus", "t4:1"), "It has: "),
        (("--submit", "--runs-dir", "50%"), "Give another folder with --runs-dir"),
        (("--submit", "--account", "a\nb"), "not a line of printable characters"),
        (("--submit", "--after", "nothing"), "There is no such run"),
        (("--dry-run", "--start-from", "nothing"), "There is no such run"),
        (("--submit", "--device", "cuda", "--gpus", "0"), "Give --gpus 1"),
        (("--submit", "--dataset", "hcrl_ch"), "hcrl_ch is not below the data root"),
    ],
)
def test_what_cannot_be_submitted_is_said_and_leaves_nothing(
    slurm: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main((*TRAIN, *arguments)) == 2
    assert message in capsys.readouterr().err
    assert not (slurm / "sent").exists()
    assert not (slurm / "runs").exists() or not [*(slurm / "runs").iterdir()]
    assert Registry(slurm / "state").runs() == []


def test_what_slurm_refuses_is_said_in_its_words_once(slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (slurm / "bin" / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: No' >&2; exit 1"
    )
    assert main((*TRAIN, "--submit")) == 2
    assert capfd.readouterr().err == (
        "error: SLURM refused the job: Batch job submission failed: No.\n"
        "Change what the job asks for; can-train doctor shows what the partitions grant.\n"
    )
    assert [*(slurm / "runs").iterdir()] == []


def test_a_submitted_run_goes_on_as_another_job_with_what_is_changed(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(capsys, "--time", "90min")
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\n")
    (run,) = Registry(slurm / "state").runs()
    assert main(("resume", "last", "--epochs", "9", "--device", "cuda", "--json")) == 0
    (job,) = json.loads(capsys.readouterr().out)["submitted"]
    assert [job[name] for name in ("run_id", "path", "job_id", "executor")] == [run.run_id, run.path, "41", "slurm"]
    config = plain_from_yaml((Path(run.path) / "config.yaml").read_text())
    assert (config["training"]["epochs"], config["device"]) == (9, "cuda")
    assert (slurm / "sent").read_text().count("#SBATCH --time=90\n") == 2


def chained(slurm: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Two runs of which the second waits for the first, as jobs 41 and 42, of which the queue knows neither."""
    first = submit(capsys).split()[0]
    (slurm / "bin" / "sbatch").write_text(f'#!/bin/sh\ncat "$1" >> {slurm}/sent; echo Submitted batch job 42\n')
    second = submit(capsys, "--set", "training.seed=3", "--after", first).split()[0]
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\n")
    (slurm / "sent").unlink()
    return first, second


def test_resume_changes_the_request_of_a_job_and_keeps_the_rest(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = submit(capsys, "--partition", "big", "--time", "90", "--cpus", "1").split()[0]
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\n")
    (slurm / "sent").unlink()
    before = (slurm / "runs" / run_id / "config.yaml").read_text()
    assert main(("resume", run_id, "--time", "3-0")) == 2
    assert "Its time limit is" in capsys.readouterr().err
    assert (slurm / "runs" / run_id / "config.yaml").read_text() == before
    assert not (slurm / "sent").exists()
    assert main(("resume", run_id, "--time", "3h", "--mem-per-gpu", "900M", "--exclude", "g1")) == 0
    sent = (slurm / "sent").read_text()
    assert all(f"#SBATCH --{option}\n" in sent for option in ("time=180", "mem-per-gpu=900M", "cpus-per-task=1"))
    assert "--mem=" not in sent
    assert plain_from_yaml((slurm / "runs" / run_id / "config.yaml").read_text())["cluster"]["mem_per_gpu"] == "900M"
    assert main(("resume", run_id, "--here", "--time", "1h")) == 2
    assert "--time changes a job of SLURM" in capsys.readouterr().err


def test_a_run_that_has_trained_goes_on_without_the_time_when_it_was_to_begin(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = submit(capsys, "--begin", "now+2hours").split()[0]
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\n")
    begin(slurm / "runs" / run_id)
    end(slurm / "runs" / run_id, "terminated")
    (slurm / "sent").unlink()
    assert main(("resume", run_id)) == 0
    assert "cluster.begin is not set from here on, in place of now+2hours" in capsys.readouterr().err
    assert "--begin" not in (slurm / "sent").read_text()


def test_a_later_stage_is_not_resumed_before_the_one_that_it_waits_for(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = chained(slurm, capsys)
    assert main(("resume", second)) == 2
    assert f"can-train resume {first}" in capsys.readouterr().err
    assert not (slurm / "sent").exists()
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\necho '41|RUNNING|None|n1|N/A|1:30:00'\n")
    assert main(("resume", second)) == 0
    assert "#SBATCH --dependency=afterok:41\n" in (slurm / "sent").read_text()


def test_a_later_stage_is_resumed_at_once_where_the_one_before_it_has_finished(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = chained(slurm, capsys)
    (slurm / "runs" / first / "result.json").write_text("{}")
    assert main(("resume", second)) == 0
    assert "--dependency" not in (slurm / "sent").read_text()


def test_a_run_that_is_resumed_twice_is_submitted_once(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit(capsys)
    (slurm / "bin" / "squeue").write_text(
        f"#!/bin/sh\ntest -e {slurm}/again && echo '43|PENDING|Priority||N/A|1:30:00'; exit 0\n"
    )
    slow = (
        f'#!/bin/sh\n/bin/sleep 1; /bin/touch {slurm}/again; cat "$1" >> {slurm}/twice; echo Submitted batch job 43\n'
    )
    (slurm / "bin" / "sbatch").write_text(slow)
    line = [sys.executable, "-m", "can_train", "resume", "last"]
    both = [subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert sorted(one.wait() for one in both) == [0, 2]
    assert main(("resume", "last")) == 2
    assert "is queued or running already" in capsys.readouterr().err
    assert (slurm / "twice").read_text().count("#!/bin/bash") == 1


@pytest.mark.parametrize("state", ["NEVER", "PENDING"])
def test_a_run_whose_job_waits_in_vain_is_not_submitted_beside_it(
    slurm: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    submit(capsys)
    reason = "DependencyNeverSatisfied" if state == "NEVER" else "Priority"
    (slurm / "bin" / "squeue").write_text(f"#!/bin/sh\necho '41|PENDING|{reason}||N/A|1:30:00'\n")
    assert main(("resume", "last")) == 2
    assert "can-train cancel last" in capsys.readouterr().err


def test_a_submitted_run_is_submitted_anew_with_the_flags_of_a_training_line(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = submit(capsys, "--time", "90min", "--set", "training.lr=0.5").split()[0]
    changes = ("--epochs", "9", "--batch-size", "32", "--seed", "7", "--device", "cuda", "--time", "30min",
               "--size", "student", "--set", "dataset.window=50", "--model-args", "hidden=8")  # fmt: skip
    assert main(("resubmit", first, *changes, "--json")) == 0
    (job,) = json.loads(capsys.readouterr().out)["submitted"]
    assert job["run_id"] != first
    config = plain_from_yaml(Path(job["path"], "config.yaml").read_text())
    training = config["training"]
    assert [training[name] for name in ("epochs", "batch_size", "seed", "lr")] == [9, 32, 7, 0.5]
    assert (config["size"], config["model"]["hidden"], config["dataset"]["window"]) == ("student", 8, 50)
    assert (slurm / "sent").read_text().count("#SBATCH --time=30\n") == 1
    assert main(("resubmit", first)) == 0
    assert "is the same, and is queued" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epoch", "3"), "Nearest: --epochs"),
        (("--epochs", "three"), "--epochs must be a whole number: 'three'"),
        (("--model", "gta"), "Unknown model: 'gta'"),
        (("--partition", "mian"), "nearest first: main"),
        (("--start-from", "nothing"), "There is no such run"),
        (("-q",), "--quiet has no effect with --submit"),
    ],
)
def test_what_a_run_cannot_be_submitted_anew_with_is_said(
    slurm: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    first = submit(capsys, "--time", "90min").split()[0]
    assert main(("resubmit", first, *arguments)) == 2
    assert message in capsys.readouterr().err
    assert len(Registry(slurm / "state").runs()) == 1


@pytest.mark.slow
def test_a_submission_does_not_wait_for_torch(slurm: Path, repository: Path) -> None:
    statement = (
        "import sys; from can_train.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", statement, *TRAIN, "--submit"],
        env={**os.environ, "PYTHONPATH": str(repository / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["exec /bin/sleep 60", "echo 'Unable to contact slurm controller' >&2; exit 1"])
def test_without_an_answer_of_slurm_what_is_known_is_said_in_time(
    slurm: Path, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    submit(capsys)
    (run,) = Registry(slurm / "state").runs()
    # As far as its files say it has ended; its job may have been put back since.
    begin(Path(run.path), job_id="41")
    end(Path(run.path), "failed", message="no such data")
    for program in ("squeue", "sacct", "scontrol", "sbatch", "scancel"):
        (slurm / "bin" / program).write_text(f"#!/bin/sh\n{script}\n")
        (slurm / "bin" / program).chmod(0o755)
    for command in ("cancel", "resume"):
        begun = time.monotonic()
        assert main((command, "last")) == 2
        assert time.monotonic() - begun < 30  # a program would answer after 60 s
        message = capsys.readouterr().err
        assert "cluster alpha, which has its job 41, does not answer here" in message
        assert "the run's files say: failed: no such data" in message
        assert "Give the same line on a login node of alpha, or here in a minute" in message
    begun = time.monotonic()
    assert main(("status", "last")) == 0
    assert time.monotonic() - begun < 30  # a program would answer after 60 s


def hanging_sbatch(slurm: Path, monkeypatch: pytest.MonkeyPatch, *, taken: str, label: str = "") -> None:
    """An sbatch that never answers; the queue then has a job 77 that writes its log where `taken` says, and whose first
    element has started and given itself a label.
    """
    monkeypatch.setattr("can_train.slurm.client.SUBMIT_TIMEOUT_S", 0.5)
    monkeypatch.setattr("can_train.slurm.submit.SUBMIT_TIMEOUT_S", 0.5)
    partitions = (slurm / "bin" / "scontrol").read_text().splitlines()[1]
    scripts = {
        "sbatch": f"""case $* in *--help) exit 1;; esac
            echo "$1" > {slurm}/script; cat "$1" >> {slurm}/sent; exec /bin/sleep 60""",
        "scontrol": f"""test "$2" = job || {{ {partitions}; exit; }}
            read -r script < {slurm}/script; echo "JobId=$4 Command=x StdOut={taken}/$4_0_log.out" """,
        "squeue": f"""case $* in *%F*) while read -r line; do
            case $line in *--job-name=*) echo "77|{label}${{line#*=}}";; esac; done < {slurm}/sent;; esac""",
        "scancel": f'echo "$*" >> {slurm}/cancelled',
    }
    for name, script in scripts.items():
        (slurm / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (slurm / "bin" / name).chmod(0o755)


def test_a_job_that_slurm_took_without_an_answer_is_found_by_its_name(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging_sbatch(slurm, monkeypatch, taken="${script%/*}")
    assert "job 77" in submit(capsys)
    (run,) = Registry(slurm / "state").runs()
    (job,) = Registry(slurm / "state").jobs(run.run_id)
    assert (job.job_id, Path(job.log_path).name) == ("77", "77_0_log.out")
    assert (Path(run.path) / "slurm" / "77_submitted.pkl").exists()
    assert (slurm / "sent").read_text().count("#!/bin/bash") == 1


def test_an_array_that_slurm_took_without_an_answer_is_found_too(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging_sbatch(slurm, monkeypatch, taken="${script%/*}", label="seed=1_")
    submit(capsys, "--set", "training.seed=1,2")
    registry = Registry(slurm / "state")
    assert [registry.jobs(run.run_id)[0].job_id for run in registry.runs()] == ["77_0", "77_1"]


def test_a_job_of_the_same_name_that_is_another_run_is_not_taken_for_it(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging_sbatch(slurm, monkeypatch, taken="/elsewhere")
    assert main((*TRAIN, "--submit")) == 2
    assert "SLURM did not answer sbatch: no answer within 0.5 s; it did not take the job" in capsys.readouterr().err
    assert [*(slurm / "runs").iterdir()] == []


def test_a_job_that_was_taken_unseen_is_taken_back_before_its_run_is_submitted_again(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(capsys)
    (run,) = Registry(slurm / "state").runs()
    (Path(run.path) / "slurm" / ".submission_file_0123.sh").touch()
    sbatch = (slurm / "bin" / "sbatch").read_text()
    hanging_sbatch(slurm, monkeypatch, taken=f"{run.path}/slurm")
    (slurm / "script").touch()
    (slurm / "bin" / "sbatch").write_text(sbatch)
    assert main(("resume", "last")) == 0
    assert (slurm / "cancelled").read_text() == "77\n"


def test_the_trials_of_a_search_get_one_place(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch = slurm / "bin" / "sbatch"
    # The job would start first on scavenge.
    starts = 'case "$(cat "$2")" in *partition=scavenge*) hour=10;; *) hour=11;; esac; '
    starts += "echo sbatch: Job 1 to start at 2026-01-02T$hour:00:00 using 1 processors on nodes n1 >&2; exit 0"
    sbatch.write_text(sbatch.read_text().replace("esac;", f"esac; case $* in --test-only*) {starts};; esac;", 1))
    search = ("--set", "training.lr=interval(1e-4,1e-1)", "--trials", "2", "--device", "cpu", "--partition", "auto")
    assert main((*TRAIN, "--submit", *search)) == 2
    assert "since --partition auto asks first" in capsys.readouterr().err
    assert not (slurm / "sent").exists()
    submit(capsys, *search, "--yes")
    assert (slurm / "sent").read_text().count("--partition=scavenge\n") == 1
    registry = Registry(slurm / "state")
    jobs = [job for run in registry.runs() for job in registry.jobs(run.run_id)]
    assert [job.resources["partition"] for job in jobs] == ["scavenge"] * 2


@pytest.mark.parametrize(
    ("words", "seeds", "named"),
    [
        (("--set", "training.seed=1,1,2"), [1, 2], "training.seed=1"),
        (("--set", "training.seed=1,1"), [1], "training.seed=1"),
        (("--model", "gat,gat", "--set", "training.seed=1,2"), [1, 2],
         "--model gat training.seed=1; --model gat training.seed=2"),
        (("--set", "training.seed=3,2,1,0,3,2,1,0"), [3, 2, 1, 0],
         "training.seed=3; training.seed=2; training.seed=1; and 1 more"),
        (("--set", "training.seed=1,2"), [1, 2], ""),
    ],
)  # fmt: skip
def test_a_value_that_is_given_twice_is_trained_once_and_named(
    slurm: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], seeds: list[int], named: str
) -> None:
    notice = f"note: Given more than once, trained once: {named}" if named else ""
    assert main((*TRAIN, "--submit", *words)) == 0
    assert " ".join(capsys.readouterr().err.split()) == notice
    runs = Registry(slurm / "state").runs()
    assert [RunFolder(Path(run.path)).config()["training"]["seed"] for run in runs] == seeds
    # The same of the file of a run, where another setting makes the runs new ones.
    file = ("--config", str(Path(runs[0].path) / "config.yaml"), "--submit", "--set", "training.lr=0.5")
    assert main((*file, *words[-2:])) == 0
    if named and "--model" not in named:
        assert notice in " ".join(capsys.readouterr().err.split())
    assert len(Registry(slurm / "state").runs()) == 2 * len(seeds)


@pytest.mark.parametrize(
    ("words", "variable", "remedy"),
    [
        ("Invalid feature specification", "", "Change --constraint ib, or leave it out"),
        ("Invalid feature specification", "a100",
         "Change --constraint a100, or leave it out. SBATCH_CONSTRAINT=a100 names it"),
        ("Requested node configuration is not available", "", "Compare the request with the partitions: sinfo -o"),
    ],
)  # fmt: skip
def test_partition_auto_tells_which_request_every_partition_refuses(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, variable: str,
    remedy: str,
) -> None:  # fmt: skip
    sbatch = slurm / "bin" / "sbatch"
    refused = f"echo 'allocation failure: {words}' >&2; exit 1"
    sbatch.write_text(sbatch.read_text().replace("esac;", f"esac; case $* in --test-only*) {refused};; esac;", 1))
    flags = () if variable else ("--constraint", "ib")
    if variable:
        monkeypatch.setenv("SBATCH_CONSTRAINT", variable)
    assert main((*TRAIN, "--submit", "--device", "cpu", "--partition", "auto", "--yes", *flags)) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"No partition takes the run: main, scavenge: {words}; short: The job may be warned of its end" in told
    assert f"main, scavenge: {remedy}" in told
    assert "; short: A job starts within 30 s" in told
    assert "shrink the model" not in told


@pytest.mark.parametrize(("shows", "partition"), [("--dry-run", "main"), ("--yes", "auto")])
def test_a_constraint_that_no_node_has_is_refused_before_sbatch_is_asked(
    slurm: Path, capsys: pytest.CaptureFixture[str], shows: str, partition: str
) -> None:
    words = ("--submit", "--device", "cpu", "--constraint", "ibb")
    assert main((*TRAIN, *words, shows, "--partition", partition)) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "Unknown feature of nodes (--constraint)" in told
    assert "Valid, nearest first: ib, a100." in told


def test_a_trial_names_its_job_when_its_values_are_chosen(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = submit(capsys, "--set", "training.lr=interval(1e-4,1e-1)", "--trials", "2", "--time", "90min")
    assert "asked for  1 × GPU, 2 processors a rank, 2000M, at most 1:30:00" in told
    assert "At most 1 train at once (--max-parallel)" in told
    run = Registry(slurm / "state").runs()[0]
    folder = RunFolder(Path(run.path))
    trial = TrialRun.of(folder)
    assert trial is not None
    TrialRun(folder, replace(trial.trial, values={"training.lr": 0.01})).write()
    (slurm / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$*" >> {slurm}/asked\n')
    environment = {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": run.sweep, "SUBMITIT_EXECUTOR": "slurm"}
    named_by_label = f"update JobId=41 JobName=lr=0.01_{run.sweep}\n"
    # The variables that the job has, and its name after its start.
    for changed, asked in (
        ({}, named_by_label),
        ({"SLURM_JOB_NAME": f"lr=0.01_{run.sweep}"}, ""),
        ({"SUBMITIT_EXECUTOR": "local"}, ""),
        ({"CAN_TRAIN_PACKED": "2"}, ""),
    ):
        for name, value in (environment | changed).items():
            monkeypatch.setenv(name, value)
        (slurm / "asked").write_text("")
        name_job(folder, ClusterSettings(), slurm / "state")
        assert (slurm / "asked").read_text() == asked, changed
    monkeypatch.delenv("CAN_TRAIN_PACKED")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    name_job(folder, ClusterSettings(job_name="mine"), slurm / "state")
    assert (slurm / "asked").read_text() == ""
    assert main(("runs", "--columns", "sweep,label")) == 0
    assert f"{run.sweep} lr=0.01" in capsys.readouterr().out


def test_runs_of_a_sweep_share_a_gpu_and_are_cancelled_together(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "--cluster",
        "slurm",
        "--device",
        "sim:64MiB",
        "--set",
        "training.seed=range(0,3)",
        "--pack",
        "2",
        "--cpus",
        "1",
    )
    assert "job 41" in submit(capsys, *line)
    sent = (slurm / "sent").read_text()
    assert "#SBATCH --ntasks-per-node=2" in sent
    assert "--kill-on-bad-exit=0 --wait=0" in sent
    registry = Registry(slurm / "state")
    jobs = {run.label: registry.jobs(run.run_id)[0] for run in registry.runs()}
    assert [(job.job_id, job.packed_with) for job in jobs.values()] == [("41_0", 2), ("41_0", 2), ("41_1", 1)]
    assert len({job.log_path for job in jobs.values()}) == 3
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\necho '41_0|RUNNING|None|n1||'\n")
    assert main(("cancel", jobs["seed=0"].run_id)) != 0
    assert "Cancel them together: can-train cancel" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--device", "cpu"), "--pack puts runs of a sweep on one GPU of a job of SLURM: --device cpu"),
        (("--gpus", "1"), "--pack auto plans for the kind of GPU that a job asks for: 1"),
    ],
)
def test_runs_are_packed_where_a_gpu_is_known(
    slurm: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert main((*TRAIN, "--submit", "--pack", "auto", *words)) == 2
    assert told in " ".join(capsys.readouterr().err.split())
