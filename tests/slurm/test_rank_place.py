import pytest

from can_train.slurm.launchers import FIRST_PORT, PORTS, rank_place
from can_train.training.distributed import RankPlace

STEP = {
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[07-08,12],login1",
}


def test_a_place_is_read_off_the_job_step() -> None:
    port = FIRST_PORT + 1234567 % PORTS
    assert rank_place(STEP) == RankPlace(rank=5, size=8, local_rank=1, address="gpu07", port=port)


def test_all_ranks_of_a_job_meet_at_one_place() -> None:
    places = [rank_place(STEP | {"SLURM_PROCID": str(rank)}) for rank in range(8)]
    assert len({(place.address, place.port) for place in places if place}) == 1


def test_a_step_on_some_of_the_nodes_meets_on_the_first_of_its_own() -> None:
    place = rank_place(STEP | {"SLURM_STEP_NODELIST": "gpu[08,12]"})
    assert place is not None
    assert place.address == "gpu08"


def test_what_the_user_sets_wins() -> None:
    place = rank_place(STEP | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4711"})
    assert place is not None
    assert (place.address, place.port) == ("10.0.0.7", 4711)


@pytest.mark.parametrize("job", [1, 16_999, 17_000, 2**31])
def test_ports_are_free_for_everybody_and_given_to_nobody(job: int) -> None:
    place = rank_place(STEP | {"SLURM_JOB_ID": str(job)})
    assert place is not None
    assert 1024 < place.port < 32_768


@pytest.mark.parametrize(
    "environment",
    [{}, {"PATH": "/bin"}, STEP | {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}],
    ids=["none", "no scheduler", "one task", "the shell of a job"],
)
def test_a_process_by_itself_has_no_place(environment: dict[str, str]) -> None:
    assert rank_place(environment) is None
