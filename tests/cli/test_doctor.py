"""`can-train doctor`: each check on what it may find, and the whole of it on this machine."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from can_train.cli import doctor as module
from can_train.cli.doctor import (
    Finding,
    Folder,
    Gpu,
    check_allocator,
    check_data,
    check_disks,
    check_gpu,
    check_kind,
    check_python,
    check_slurm,
    check_state_folder,
    check_torch,
    check_versions,
    look_at,
)
from can_train.cli.main import main
from can_train.errors import StateError
from can_train.slurm.client import Partition

GIB = 2**30
GPU = Gpu(device="cuda:0", name="NVIDIA A10", total_bytes=22 * GIB, free_bytes=22 * GIB, capability=(8, 6))
FOLDER = Folder(path=Path("/home/me/state"), file_system="nfs4", free_bytes=100 * GIB)


@pytest.mark.parametrize(
    ("python", "status"), [((3, 10), "problem"), ((3, 11), "ok"), ((3, 14), "ok"), ((3, 15), "note")]
)
def test_a_python_that_is_not_tested_is_said(python: tuple[int, int], status: str) -> None:
    assert check_python(python, "3.x", "/usr/bin/python3").status == status


@pytest.mark.parametrize(
    ("built_for", "driver", "status", "said"),
    [
        ("", "", "ok", "no NVIDIA driver"),
        ("", "535.104.05", "problem", "cannot use the GPU"),
        ("CUDA 12.8", "535.104.05", "ok", "535.104.05"),
        ("CUDA 12.8", "470.57.02", "problem", "needs driver 525.60.13 or newer"),
        ("CUDA 12.8", "525.53", "problem", "needs driver 525.60.13 or newer"),
        ("CUDA 12.8", "525.60.13", "ok", "525.60.13"),
        ("CUDA 11.8", "450.51.06", "problem", "needs driver 450.80.02 or newer"),
        ("CUDA 13.0", "535.104.05", "problem", "needs driver 580 or newer"),
        ("CUDA 12.8", "", "ok", "no NVIDIA driver"),
        ("CUDA 99.0", "535.104.05", "ok", "CUDA 99.0"),
    ],
)
def test_torch_and_the_driver_must_fit_each_other(built_for: str, driver: str, status: str, said: str) -> None:
    found = check_torch("2.13.0", built_for, driver)
    assert found.status == status
    assert said in found.found
    assert bool(found.remedy) == (status == "problem")


def test_a_gpu_that_another_process_uses_is_noted() -> None:
    assert check_gpu(GPU).status == "ok"
    shared = check_gpu(replace(GPU, free_bytes=10 * GIB))
    assert shared.status == "note"
    assert "10.00 GiB of 22.00 GiB free" in shared.found


def test_a_gpu_that_torch_has_no_code_for_is_a_problem() -> None:
    found = check_gpu(replace(GPU, capability=(7, 0), architectures=["sm_75", "sm_80", "compute_90"]))
    assert found.status == "problem"
    assert "7.0" in found.found


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["compute_80"], True),
        ((10, 0), ["sm_90", "sm_100"], True),
        ((12, 0), ["sm_120a"], True),
    ],
)
def test_code_runs_on_later_cards_of_the_same_generation(
    capability: tuple[int, int], architectures: Sequence[str], runs: bool
) -> None:
    gpu = replace(GPU, capability=capability, architectures=architectures)
    assert check_gpu(gpu).status == ("ok" if runs else "problem")


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, "ok"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "ok"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "note"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "note"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "note"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:many"}, "problem"),
    ],
)
def test_allocator_settings_that_cost_memory_are_noted(environment: dict[str, str], status: str) -> None:
    found = check_allocator(environment)
    assert found.status == status
    assert bool(found.remedy) == (status != "ok")


def test_the_remedy_for_segments_keeps_what_was_set() -> None:
    found = check_allocator({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    line = "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True"
    assert found.remedy.endswith(line)


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("h200", "ok", "h200-141gb"),
        ("a100", "note", "a100-40gb or a100-80gb"),
        ("bigone", "note", "does not know the cluster's bigone"),
    ],
)
def test_the_clusters_gpus_are_looked_up_where_none_is_here(kind: str, status: str, said: str) -> None:
    found = check_kind(kind)
    assert (found.status, said in found.found, bool(found.remedy)) == (status, True, status == "note")


@pytest.mark.parametrize(
    ("partitions", "status", "said"),
    [
        (None, "note", "--cluster local"),
        ([], "problem", "no partition is up"),
        ([Partition(name="gpu", is_up=False)], "problem", "no partition is up"),
        ([Partition(name="gpu", is_default=True)], "ok", "gpu (the default)"),
        ([Partition(name="gpu")], "note", "none is the default"),
    ],
)
def test_partitions_decide_whether_a_job_can_go_somewhere(
    partitions: list[Partition] | None, status: str, said: str
) -> None:
    found = check_slurm(partitions)
    assert found.status == status
    assert said in found.found


@pytest.mark.parametrize(
    ("folder", "on_cluster", "status"),
    [
        (FOLDER, True, "ok"),
        (replace(FOLDER, file_system="ext4"), False, "ok"),
        (replace(FOLDER, file_system="ext4"), True, "note"),
        (replace(FOLDER, ahead_s=1.5), True, "ok"),
        (replace(FOLDER, ahead_s=-90.0), True, "problem"),
        (replace(FOLDER, error="/home/me: Permission denied"), True, "problem"),
    ],
)
def test_a_state_folder_is_writable_shared_and_in_time(folder: Folder, on_cluster: bool, status: str) -> None:
    assert check_state_folder(folder, on_cluster=on_cluster).status == status


def test_a_clock_that_is_behind_is_said_to_be() -> None:
    assert "is 90 s behind this machine's" in check_state_folder(replace(FOLDER, ahead_s=-90.0), on_cluster=False).found


def test_each_disk_is_named_once_and_a_full_one_is_a_problem() -> None:
    runs = replace(FOLDER, path=Path("/scratch/runs"))
    (one,) = check_disks([runs, FOLDER])
    assert (one.status, "/scratch/runs" in one.found) == ("ok", True)
    full = check_disks([replace(runs, disk=1, free_bytes=GIB // 2), replace(FOLDER, free_bytes=5 * GIB)])
    assert {finding.status for finding in full} == {"problem", "note"}


def test_data_that_were_named_and_are_not_there_are_a_problem() -> None:
    root = Path("/data")
    assert check_data(root, "", exists=True, names=["set_01"]).status == "ok"
    assert check_data(root, "", exists=False, names=[]).status == "note"
    assert check_data(root, "$CAN_TRAIN_DATA", exists=True, names=[]).status == "note"
    assert check_data(root, "$CAN_TRAIN_DATA", exists=False, names=[]).status == "problem"


@pytest.mark.parametrize(
    ("installed", "status", "said"),
    [
        ("2.13.0", "ok", "as they are tested"),
        ("2.13.0+cu128", "ok", "as they are tested"),
        ("2.6.0", "note", "torch 2.6.0 (tested: 2.13.0)"),
        ("2.5.1", "problem", "torch 2.5.1 (needs 2.6)"),
        ("", "problem", "torch is missing"),
    ],
)
def test_versions_are_compared_with_the_least_and_with_the_tested_ones(installed: str, status: str, said: str) -> None:
    found = check_versions({"torch": installed}, {"torch": "2.6"}, {"torch": "2.13.0"}, Path("constraints.txt"))
    assert found.status == status
    assert said in found.found


def test_a_folder_is_judged_by_what_is_above_it_and_is_not_made(tmp_path: Path) -> None:
    found = look_at(tmp_path / "a" / "b")
    assert found.error == ""
    assert found.file_system
    assert abs(found.ahead_s) < 2
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in look_at(tmp_path).error


STRANGER = 65534  # nobody


def permissions(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, str]]:
    main(("doctor", "--json", *flags))
    return [one for one in json.loads(capsys.readouterr().out)["checks"] if one["subject"] == "permissions"]


def test_places_that_nobody_else_may_change_are_said_to_be_so(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path
) -> None:
    (found,) = permissions(capsys)
    assert (found["status"], found["found"]) == (
        "ok", "nobody else may change your state, your runs, your settings or can-train's code"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["state", "state/code", "state/runs", "runs", "own.yaml", "cache/can-train", "."])
def test_a_place_that_every_user_may_write_to_is_a_problem_with_the_line_that_closes_it(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("CAN_TRAIN_CONFIG", str(tmp_path / "own.yaml"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("state/code", "state/runs", "runs", "cache/can-train"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "own.yaml").write_text("tracker: off\n")
    flags = ("--state-dir", str(tmp_path / "state"), "--runs-dir", str(tmp_path / "runs"))
    place = (tmp_path / name).resolve()
    before = place.stat().st_mode
    place.chmod(before | 0o022)
    (found,) = permissions(capsys, *flags)
    assert found["status"] == "problem"
    assert f": {place}: every user may write to it" in found["found"]
    subprocess.run(["bash", "-c", found["remedy"]], check=True)
    assert permissions(capsys, *flags)[0]["status"] == "ok"
    # Of a folder on the way the sticky bit is enough, since nobody replaces another user's folder there.
    place.chmod(before | 0o1022)
    assert permissions(capsys, *flags)[0]["status"] == ("ok" if name == "." else "problem")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user, which needs root")
def test_a_folder_of_another_user_is_a_problem(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", STRANGER, -1)
    (found,) = permissions(capsys, "--state-dir", str(tmp_path / "state"))
    assert found["found"] == f"state folder: {tmp_path / 'state'}: it belongs to nobody"
    assert found["remedy"] == "Choose another: --state-dir FOLDER"


def test_a_group_without_another_member_is_noted_alone(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quiet_machine / "state").mkdir()
    monkeypatch.setattr(module, "is_private_group", lambda *_: True)
    (found,) = permissions(capsys)
    assert found["status"] == "note"
    begins = f"your own group, which has no other member, may write to {quiet_machine / 'state'}"
    assert found["found"].startswith(begins)


def test_a_finding_is_a_line_with_its_remedy_below(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Finding("disk", "problem", "too " + "very " * 20 + "full", "rm --recursive /scratch/old")
    monkeypatch.setattr(module, "examine", lambda *_: [full])
    assert main(["doctor"]) == 2
    *lines, empty, last = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("problem  disk         too very")
    assert max(map(len, lines)) <= 80
    assert lines[-1].strip() == "rm --recursive /scratch/old"
    assert (empty, last) == ("", "1 problem found; what to do about each is below it.")


SUBJECTS = ["Python", "settings", "torch", "GPU", "allocator", "SLURM", "--target-gpu", "data",
            "state folder", "cache", "permissions", "disk", "versions"]  # fmt: skip


@pytest.fixture
def quiet_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, on a machine that belongs to no cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(module, "is_installed", lambda: False)
    return tmp_path


def test_the_doctor_makes_every_check_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path
) -> None:
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(dict.fromkeys(check["subject"] for check in found["checks"])) == SUBJECTS
    assert {check["status"] for check in found["checks"]} <= {"ok", "note", "problem"}
    assert status == (2 if found["problems"] else 0)
    assert list(quiet_machine.iterdir()) == []


def test_published_data_are_found_and_named(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAN_TRAIN_DATA", str(quiet_machine / "none"))
    assert main(["doctor"]) == 2
    assert re.search(r"^problem  data", capsys.readouterr().out, re.MULTILINE)


def test_cards_that_are_named_are_looked_up(capsys: pytest.CaptureFixture[str], quiet_machine: Path) -> None:
    main(["doctor", "--target-gpu", "t4,h100-80gb"])
    shown = capsys.readouterr().out
    assert "knows t4-16gb" in shown
    assert "knows h100-80gb" in shown
    assert main(["doctor", "--target-gpu", "a100"]) == 2
    assert "a100-40gb or a100-80gb" in capsys.readouterr().out


def test_a_check_that_fails_itself_is_a_problem_and_the_others_are_made(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StateError("The state folder cannot be read", value="/s", remedy="Mend it")

    monkeypatch.setattr(module, "look_at", fails)
    assert main(["doctor"]) == 2
    shown = capsys.readouterr().out
    assert "The state folder cannot be read: /s" in shown
    assert re.search(r"^ok       versions", shown, re.MULTILINE)


def test_a_wrong_settings_file_is_said_once(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAN_TRAIN_HOME")
    (quiet_machine / "mine.yaml").write_text("acount: a")
    monkeypatch.setenv("CAN_TRAIN_CONFIG", "mine.yaml")
    assert main(["doctor"]) == 2
    assert capsys.readouterr().out.count("acount") == 1


def test_what_a_person_always_sets_is_shown(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quiet_machine / "mine.yaml").write_text("account: project42")
    monkeypatch.setenv("CAN_TRAIN_CONFIG", "mine.yaml")
    main(["doctor"])
    assert "your own in mine.yaml: account project42" in capsys.readouterr().out.replace("\n" + " " * 22, " ")


def test_trackers_are_looked_at_where_a_person_always_uses_one(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quiet_machine / "mine.yaml").write_text("tracker: tensorboard,wandb")
    monkeypatch.setenv("CAN_TRAIN_CONFIG", "mine.yaml")
    main(["doctor"])
    assert f"ok       trackers     tensorboard {version('tensorboard')}, wandb " in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["doctor"]) == 2
    assert "problem  trackers     --tracker wandb needs packages that are" in capsys.readouterr().out


def test_help_lists_the_doctors_own_flags_and_what_is_trained_with_gradients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in ("--json", "--state-dir", "--target-gpu", "--model", "--set") if name not in text] == []
    assert [name for name in ("--lr", "--epochs", "--find-batch-size") if name in text] == []
    assert len(text.splitlines()) <= 40
    assert main(["doctor", "--help-all"]) == 0
    assert "--lr " in capsys.readouterr().out


def test_gpus_that_torch_sees_are_looked_at_one_by_one(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")
        return 20 * GIB, 23_580_770_304 if index == 0 else 20 * GIB

    for name, value in {"is_available": True, "device_count": 3,
                        "get_device_capability": (8, 6), "get_arch_list": ["sm_80"]}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=value: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A10" if index == 0 else "New Card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert main(["doctor"]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "built for CUDA 12.8" in shown
    assert "ok GPU cuda:0, NVIDIA A10: 20.00 GiB of 21.96 GiB free" in shown
    assert "problem GPU cuda:1 does not answer: CUDA error: all CUDA-capable devices are busy" in shown
    assert "ok --target-gpu knows a10-24gb" in shown
    assert "note --target-gpu does not know new-card-20gb, which is here" in shown
    assert "with --target-memory 20480MiB" in shown


def test_a_torch_that_does_not_load_is_a_problem_and_not_a_traceback(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(module, "_examine_torch", fails)
    assert main(["doctor"]) == 2
    assert "problem  torch        cannot be looked at: libcudart.so.12" in capsys.readouterr().out


SECRET = "zebra"
"""Part of every text of the machine in the next tests that tells of its owner."""


@pytest.fixture
def machine_of_a_person(quiet_machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose names, paths, variables, settings and versions all have the secret in them."""
    home = quiet_machine / f"home-{SECRET}"
    home.mkdir()
    (home / "mine.yaml").write_text(
        f"account: {SECRET}\ncomment: 4211\nmail_user: {SECRET}@example.org\nnodes: 2\ndata_root: /srv/{SECRET}\n"
        f"nodelist: {SECRET}[1-2]\npartition: {SECRET}\nexclusive: true\n"
    )
    for name in ("USER", "LOGNAME", "HOSTNAME", "WANDB_API_KEY", "HF_TOKEN", "SLURM_JOB_ID", f"MY_{SECRET.upper()}"):
        monkeypatch.setenv(name, f"{SECRET}-token")
    for name in ("HOME", "CAN_TRAIN_HOME", "CAN_TRAIN_CACHE", "CAN_TRAIN_DATA", "CAN_TRAIN_PYTHON", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("CAN_TRAIN_CONFIG", str(home / "mine.yaml"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"max_split_size_mb:{SECRET}")
    monkeypatch.setattr(platform, "node", lambda: SECRET)
    monkeypatch.setattr(platform, "release", lambda: f"6.1.0-18-amd64-{SECRET}")
    monkeypatch.setattr(torch, "__version__", f"2.13.0a0+{SECRET}")
    monkeypatch.setattr(module, "is_installed", lambda: True)
    monkeypatch.setattr(module, "read_version", lambda: f"23.11.4-{SECRET}")
    monkeypatch.chdir(home)
    return home


def report_of_a_bug(capsys: pytest.CaptureFixture[str], home: Path) -> str:
    assert main(["doctor", "--report", "--json", "--state-dir", str(home), "--runs-dir", str(home / "runs")]) == 0
    return capsys.readouterr().out


def test_a_report_of_a_bug_has_versions_and_nothing_about_the_person(
    capsys: pytest.CaptureFixture[str], machine_of_a_person: Path
) -> None:
    text = report_of_a_bug(capsys, machine_of_a_person)
    assert [word for word in (SECRET, "4211", "@", "/", "token") if word in text.lower()] == []
    report = json.loads(text)
    assert report["torch"].startswith("2.13.0a0, built for ")
    assert report["system"].startswith("Linux 6.1.0-18-amd64, ")
    assert report["SLURM"] == "23.11.4"
    # Names in the order of the file; values of numbers that name nobody.
    assert "account, comment, mail_user, nodes 2, data_root, nodelist, partition, exclusive true" in report["settings"]
    assert report["variables"].startswith(
        "CAN_TRAIN_PYTHON, CAN_TRAIN_HOME, CAN_TRAIN_CACHE, CAN_TRAIN_DATA, CAN_TRAIN_CONFIG, PYTORCH"
    )
    assert "problem: " in report["checks"]


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_public", str), ("_PUBLIC_KERNEL", re.compile(".*")), ("_reported_setting", "{} {}".format)],
)
def test_a_report_that_shows_a_secret_is_noticed(
    capsys: pytest.CaptureFixture[str], machine_of_a_person: Path, monkeypatch: pytest.MonkeyPatch, name: str,
    broken: object,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, name, broken)
    assert SECRET in report_of_a_bug(capsys, machine_of_a_person)


def test_a_report_of_a_bug_fits_a_terminal_and_is_printed_where_torch_does_not_load(
    capsys: pytest.CaptureFixture[str], quiet_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(module, "_examine_torch", fails)
    assert main(["doctor", "--report"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^torch          [\d.]+.*, which does not load$", shown, re.MULTILINE)
    assert re.search(r"^checks         problem: torch", shown, re.MULTILINE)
