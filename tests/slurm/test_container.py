"""Containers: the command that trains in one, run with a stand-in for the program, and the folders that it gets."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError
from can_train.slurm import container
from can_train.slurm.container import check_image, needed_paths
from can_train.slurm.script import Submission, parameters, python_command, script
from fakes.apptainer import installed


def job(tmp_path: Path, **settings: Any) -> list[str]:
    """The lines that a job prints whose Python shows its import path and its arguments."""
    programs = {
        "srun": '#!/bin/bash\nwhile [ "$1" != apptainer ]; do shift; done\n"$@"\n',
        "python3": '#!/bin/bash\necho "$PYTHONPATH $PWD $*"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    installed(tmp_path)
    cluster = ClusterSettings(time="9", container="/images/my.sif", container_runtime="apptainer", **settings)
    code, runs = tmp_path / "code", tmp_path / "a run's"
    code.mkdir()
    runs.mkdir()
    paths = needed_paths([{"paths": {"data_root": str(runs / "x")}}], code, runs)
    of_job = parameters(cluster, Submission(name="n", state_dir=tmp_path), code, paths)
    text = script(runs, of_job, 1, python_command(cluster, code, paths)).partition("# teardown")[0]
    ended = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True,
                           env={"PATH": f"{tmp_path}:/usr/bin:/bin"})  # fmt: skip
    return ended.stdout.splitlines()


def test_apptainer_gets_the_folders_of_the_run_and_python_the_code_of_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    *before, last = job(tmp_path, gpus="1", container_mounts=[f"{work}:/scratch"])
    folders = [tmp_path / "a run's", tmp_path / "code", work]
    binds = [*(f"bind {folder}:{folder}" for folder in folders), f"bind {work}:/scratch"]
    assert before == ["nv", *binds, "image /images/my.sif"]
    code, runs = tmp_path / "code", tmp_path / "a run's"
    assert last == f"{code}/src:/of/the/image {work} -u -m submitit.core._submit {runs}"


@pytest.mark.parametrize(
    "mount", ["/scratch:/scratch", "/scratch", "/:/node", "/data/my set:/d:ro", "tmpfs:/tmp", "/a:/b:ro+rprivate"]
)
def test_a_mount_is_an_absolute_path_in_the_node_and_in_the_container(mount: str) -> None:
    assert ClusterSettings(container_mounts=[mount]).container_mounts == [mount]


@pytest.mark.parametrize(
    "mounts", ["/a:/b", ["scratch"], ["/a:b"], ["a:/b"], ["/a:"], [":/b"], [""], ["/"], ["/a:/"], ["/a:/b:"],
               ["/a:/b,/c:/d"], ["$SCRATCH:/b"], ["~/x:/b"], [3], ["/a:/b", "c"]]
)  # fmt: skip
def test_any_other_mount_is_refused(mounts: Any) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.container_mounts must") as refused:
        ClusterSettings(container_mounts=mounts)
    assert "[/on/the/node:/in/the/container" in refused.value.remedy


def test_apptainer_has_no_mounts_that_only_pyxis_knows() -> None:
    with pytest.raises(ConfigError, match="one mount an item: 'tmpfs:/tmp'"):
        ClusterSettings(container_mounts=["tmpfs:/tmp"], container_runtime="apptainer")


def test_a_job_without_gpus_asks_apptainer_for_none(tmp_path: Path) -> None:
    assert "nv" not in job(tmp_path, gpus="0")


def test_pyxis_gets_its_arguments_through_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = ClusterSettings(container="nvcr.io#nvidia/pytorch:25.01-py3", container_runtime="pyxis", python="python")
    arguments = parameters(cluster, Submission(name="n", state_dir=tmp_path), tmp_path, [tmp_path])["srun_args"]
    assert arguments[-3:] == [f"--container-image={cluster.container}", f"--container-mounts={tmp_path}:{tmp_path}",
                              f"--container-workdir={tmp_path}"]  # fmt: skip
    assert python_command(cluster, tmp_path, [tmp_path]).endswith(" python")


def test_each_path_of_a_run_is_mounted_once_with_the_target_of_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data/deep", "real", "work"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "work")
    config = {
        "dataset": {"path": str(tmp_path / "data/deep"), "root": str(tmp_path / "data")},
        "mode": [str(tmp_path / "link"), str(tmp_path / "gone"), "no/path", 3],
        "cluster": {"container": str(tmp_path)},
    }
    names = [path.relative_to(tmp_path).as_posix() for path in needed_paths([config])]
    assert names == ["data", "link", "real", "work"]


def test_a_folder_that_a_mount_cannot_name_is_refused(tmp_path: Path) -> None:
    cluster = ClusterSettings(container="x", container_runtime="apptainer")
    with pytest.raises(ConfigError, match="comma or colon"):
        container.command(cluster, [Path("/a:b")], tmp_path, "/code")


def test_an_image_is_a_file_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.sif").touch()
    monkeypatch.chdir(tmp_path)
    assert check_image("my.sif") == str(tmp_path / "my.sif")
    for name in ("docker://python:3.12", "nvcr.io#nvidia/pytorch:25.01-py3"):
        assert check_image(name) == name
    with pytest.raises(ConfigError, match="does not exist"):
        check_image("./other")
