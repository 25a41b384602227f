import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from can_train.memory import host
from can_train.memory.host import (
    _VERSIONS,
    ControlGroup,
    _Files,
    available_bytes,
    control_groups,
    processes_here,
    room_bytes,
)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


VERSION_2 = _VERSIONS[0]


@pytest.mark.parametrize(("limit", "room"), [("1000\n", 450), ("500\n", 0), ("max\n", None), ("", None)])
def test_a_control_group_leaves_what_it_does_not_use_for_good(tmp_path: Path, limit: str, room: int | None) -> None:
    written(tmp_path / "memory.current", "600\n")
    written(tmp_path / "memory.stat", "anon 550\ninactive_file 50\nactive_file 7\n")
    written(tmp_path / "memory.max", limit)
    assert ControlGroup(tmp_path, VERSION_2).available_bytes() == room


def test_without_a_control_group_there_is_no_limit(tmp_path: Path) -> None:
    assert ControlGroup(tmp_path, VERSION_2).available_bytes() is None


def test_a_job_is_bound_by_its_own_group_and_by_those_above(tmp_path: Path) -> None:
    membership = written(tmp_path / "cgroup", "4:memory:/slurm/job_1\n3:cpu:/\n0::/slurm/job_1\n")
    groups = [str(group.path) for group in control_groups(membership)]
    version_2 = ["/sys/fs/cgroup/slurm/job_1", "/sys/fs/cgroup/slurm", "/sys/fs/cgroup"]
    version_1 = ["/sys/fs/cgroup/memory/slurm/job_1", "/sys/fs/cgroup/memory/slurm", "/sys/fs/cgroup/memory"]
    assert groups == version_2 + version_1


def test_a_process_in_no_group_has_the_topmost_limit(tmp_path: Path) -> None:
    assert [group.path for group in control_groups(tmp_path / "none")] == [files.root for files in _VERSIONS]


@pytest.mark.parametrize(("files", "name"), [(_VERSIONS[0], "memory.events"), (_VERSIONS[1], "memory.oom_control")])
def test_a_control_group_knows_whether_a_process_was_killed(tmp_path: Path, files: _Files, name: str) -> None:
    group = ControlGroup(tmp_path, files)
    assert not group.has_killed()
    for count, killed in (("0", False), ("1", True), ("12", True)):
        written(tmp_path / name, f"oom {count}\noom_kill {count}\nunder_oom 1\n")
        assert group.has_killed() is killed


def test_no_more_is_available_than_there_is() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(("environment", "count"), [
    ({}, 1),
    ({"LOCAL_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}, 4),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
    ({"LOCAL_WORLD_SIZE": "many"}, 1),
    ({"SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_TASKS_PER_NODE": "1,4(x2),1"}, 4),
    # The shell of a job of several tasks.
    ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "8"}, 1),
])  # fmt: skip
def test_processes_of_a_launch_on_this_machine_are_counted(environment: dict[str, str], count: int) -> None:
    assert processes_here(environment) == count


def test_processes_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert room_bytes(0.8) == 800
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert room_bytes(0.8) == 200


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    child = (
        "from can_train.memory.host import die_with_parent as d; import time; d(); print(1, flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        process.kill()
        assert process.stdout.read() == b"", "the child has closed the pipe"
