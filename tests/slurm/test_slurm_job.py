from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.slurm.client import host_memory_ran_out, last_line, memory_mib, moved_dependency

job_ids = st.integers(1, 99_999).map(str) | st.tuples(st.integers(1, 9_999), st.integers(0, 99)).map(
    lambda pair: f"{pair[0]}_{pair[1]}"
)


@given(st.lists(job_ids, min_size=1, max_size=4, unique=True), job_ids)
def test_only_the_job_that_was_waited_for_is_another(waited: list[str], new: str) -> None:
    shown = ",".join(f"afterok:{job}(unfulfilled)" for job in waited)
    expected = ",".join(f"afterok:{job}" for job in [new, *waited[1:]])
    assert moved_dependency(shown, waited[0], new) == expected


@pytest.mark.parametrize(
    "dependency", ["", "(null)", "afterok:123(unfulfilled)", "afterok:12_3(unfulfilled)", "singleton"]
)
def test_a_job_that_waits_for_others_is_left_alone(dependency: str) -> None:
    assert moved_dependency(dependency, "12", "40") == dependency


@pytest.mark.parametrize(
    ("environment", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "1500"}, 1500),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}, 400),
        ({"SLURM_MEM_PER_GPU": "100", "SLURM_GPUS_ON_NODE": "2"}, 200),
        ({}, None),
    ],
)
def test_what_a_job_has_of_a_node_is_read_off_its_variables(environment: dict[str, str], mib: int | None) -> None:
    assert memory_mib(environment) == mib


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=30.0. Some of your processes may",
        "srun: error: n1: task 0: Out Of Memory",
        "slurmstepd-n1: error: StepId=1.0 exceeded memory limit (413884416 > 104857600), being killed",
        "slurmstepd: error: Exceeded job memory limit at some point.",
    ],
)
def test_a_process_killed_for_memory_shows_in_the_log(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert host_memory_ran_out("30", f"training\n{line}\nmore\n")


def test_without_a_sign_of_it_no_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not host_memory_ran_out("30", "error: CUDA out of memory. Tried to allocate 2.00 MiB\n")


def test_the_accounting_tells_of_a_step_that_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\nprintf '30|FAILED\\n30.0|OUT_OF_MEMORY\\n'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert host_memory_ran_out("30", "")


def test_the_last_line_is_the_trainings_own() -> None:
    log = "note: a\nerror: b\n\nsrun: error: n1: task 0: Exited with exit code 2\nslurmstepd: error: x\ncan-train: y\n"
    assert last_line(log) == "error: b"
    assert last_line("") == ""
