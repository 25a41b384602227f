import os
import pty
import sys

import pytest

from can_train.errors import ConfigError
from can_train.slurm.launchers import FIRST_PORT, PORTS, check_started_once, find_launch, launched_place
from can_train.training.distributed import RankPlace

ADDRESS = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4711"}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = TORCH | ADDRESS | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
                              "TORCHELASTIC_RESTART_COUNT": "3"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "1", "PMIX_NAMESPACE": "1176109057"}  # fmt: skip
MVAPICH = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
           "MV2_COMM_WORLD_LOCAL_SIZE": "4"}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}  # fmt: skip


def place_of(environment: dict[str, str]) -> RankPlace:
    launch = find_launch(environment)
    assert launch is not None
    return launched_place(launch, environment)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, RankPlace(rank=1, size=2, local_rank=1, address="10.0.0.7", port=4711, store_prefix="can-train/3")),
        (TORCH | ADDRESS, RankPlace(rank=1, size=2, local_rank=1, address="10.0.0.7", port=4711)),
        (MVAPICH | ADDRESS, RankPlace(rank=1, size=4, local_rank=1, address="10.0.0.7", port=4711)),
        (HYDRA | ADDRESS, RankPlace(rank=1, size=4, local_rank=1, address="10.0.0.7", port=4711)),
        (STEP, RankPlace(rank=1, size=2, local_rank=0, address="n1", port=FIRST_PORT + 7)),
        (STEP | ADDRESS, RankPlace(rank=1, size=2, local_rank=0, address="10.0.0.7", port=4711)),
    ],
    ids=["torchrun", "another launcher of PyTorch", "MVAPICH", "Hydra", "srun", "srun with an address"],
)
def test_a_rank_has_the_place_that_its_launcher_gives_it(environment: dict[str, str], place: RankPlace) -> None:
    assert place_of(environment) == place


def test_the_ranks_of_one_mpirun_meet_and_those_of_another_elsewhere() -> None:
    places = [place_of(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": rank}) for rank in "0123"]
    other = place_of(OPEN_MPI | {"PMIX_NAMESPACE": "1176109058"})
    assert {(place.address, place.port) for place in places} == {("127.0.0.1", places[0].port)}
    assert FIRST_PORT <= places[0].port < FIRST_PORT + PORTS
    assert other.port != places[0].port


def test_two_steps_of_a_job_meet_at_different_ports() -> None:
    assert place_of(STEP | {"SLURM_STEP_ID": "1"}).port != place_of(STEP).port


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4", **ADDRESS},
    ],
    ids=["no launcher", "the script or the shell of a job", "one task", "torchrun of one", "a size without a rank"],
)
def test_a_process_that_was_started_once_is_alone(environment: dict[str, str]) -> None:
    assert find_launch(environment) is None
    check_started_once("A plan", environment=environment)


@pytest.mark.parametrize(
    ("environment", "launcher", "size"),
    [
        (STEP | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN | {"WORLD_SIZE": "4"}, "torchrun", 4),
        (STEP | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun", 4),
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "7.0"}, "srun", 2),
        (STEP | {"RANK": "1", "WORLD_SIZE": "2"}, "srun", 2),
    ],
    ids=["torchrun in srun", "mpirun over the nodes of a job", "srun --mpi=pmi2", "ranks exported by a script"],
)
def test_of_launchers_within_launchers_the_one_that_numbers_all_processes_counts(
    environment: dict[str, str], launcher: str, size: int
) -> None:
    launch = find_launch(environment)
    assert launch is not None
    assert (launch.launcher, launch.size) == (launcher, size)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (STEP | TORCHRUN, "srun started 2 processes (SLURM_STEP_NUM_TASKS=2), and torchrun in each of them 2"),
        (STEP | OPEN_MPI, "srun started 2 processes (SLURM_STEP_NUM_TASKS=2), and mpirun in each of them 4"),
        (STEP | HYDRA | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}, "mpiexec in each of them 1"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is set, and no size"),
        (TORCH | {"RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
        (TORCH | {"RANK": "first"}, "RANK is not a whole number: 'first'"),
    ],
)
def test_launchers_that_contradict_each_other_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_launch(environment)
    assert said in str(refused.value)


def test_ranks_that_cannot_find_rank_0_are_refused_with_a_line_that_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["can-train", "--model", "gat", "--set", "dataset.path=a b"])
    with pytest.raises(ConfigError) as refused:
        place_of(HYDRA)
    assert str(refused.value) == (
        "The address of rank 0 is unknown: mpiexec started 4 processes (PMI_SIZE=4), and MASTER_ADDR "
        "and MASTER_PORT are not both set.\nSet both:\n"
        "  MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 mpiexec -n 4 can-train --model gat --set 'dataset.path=a b'\n"
        "Any free port will do."
    )
    with pytest.raises(ConfigError, match="machine of rank 0"):
        place_of(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_what_one_process_does_is_refused_by_rank_0_and_the_others_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["can-train", "evaluate", "last"])
    with pytest.raises(ConfigError) as refused:
        check_started_once("`can-train evaluate`", environment=TORCHRUN | {"RANK": "0"})
    assert str(refused.value) == (
        "`can-train evaluate` is work for one process: torchrun started 2 processes (WORLD_SIZE=2).\n"
        "Type it without torchrun:\n  can-train evaluate last\nSeveral processes are for training one run."
    )
    with pytest.raises(SystemExit) as stopped:
        check_started_once("`can-train evaluate`", environment=TORCHRUN)
    assert stopped.value.code == 2


def test_the_shell_of_srun_with_a_terminal_is_one_process_of_however_many_tasks() -> None:
    child, terminal = pty.fork()
    if child == 0:
        os._exit(0 if find_launch(STEP | {"SLURM_PTY_PORT": "4000"}) is None else 1)
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
