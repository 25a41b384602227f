"""Reference models on several ranks: one rank decides the placement, all ranks get the same outputs, and a fault of one
rank while it requests outputs ends all ranks.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.reference_model_ranks import train_with_reference_model
from fakes.several_ranks import error_text, run_ranks

pytestmark = pytest.mark.slow

WAYS = ("device", "offload")


def results_of(folder: Path, ranks: int, **options: Any) -> list[dict[str, Any]]:
    """Returns the results of each rank."""
    folder.mkdir(exist_ok=True)
    assert run_ranks(ranks, train_with_reference_model, folder, **options) == [0] * ranks
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("way", ["device", "cache", "offload"])
def test_two_ranks_learn_from_answers_as_one_does_wherever_they_come_from(tmp_path: Path, way: str) -> None:
    (alone,), shared = (results_of(tmp_path / str(ranks), ranks, placements=(way,)) for ranks in (1, 2))
    assert relative_error(shared[0]["weights"], alone["weights"]) <= 1e-10
    assert torch.equal(shared[1]["weights"], shared[0]["weights"])


@pytest.mark.parametrize(("slow", "taken"), [(0, "offload"), (1, "device")])
def test_the_first_rank_decides_for_all_where_answers_come_from(tmp_path: Path, slow: int, taken: str) -> None:
    ranks = results_of(tmp_path, 2, placements=WAYS, capacities_mib=(64, 64), fault=(slow, "slow"))
    assert [rank["plans"][0]["placement"] for rank in ranks] == [taken, taken]
    (kept,) = tmp_path.glob("runs/*/reference_models.json")
    assert json.loads(kept.read_text())[0]["placement"] == taken


def test_what_is_taken_fits_on_the_device_that_holds_least(tmp_path: Path) -> None:
    ranks = results_of(tmp_path, 2, placements=WAYS, capacities_mib=(64, 4), numbers=2**20)
    assert {cost["placement"] for cost in ranks[0]["plans"][0]["costs"]} == {"device", "offload"}
    assert [rank["plans"][0]["placement"] for rank in ranks] == ["offload", "offload"]


def test_what_one_rank_has_written_down_no_other_asks(tmp_path: Path) -> None:
    ranks = results_of(tmp_path, 3)
    assert [rank["num_requested"] > 0 for rank in ranks] == [True, False, False]
    assert ranks[0]["plans"][0]["peak_bytes"] > 0


def test_ranks_that_are_told_different_things_train_on_the_same_samples(tmp_path: Path) -> None:
    (alone,) = results_of(tmp_path / "alone", 1, largest_first=True, own_cache=True)
    several = results_of(tmp_path / "several", 2, largest_first=True, own_cache=True)
    assert all(rank["num_requested"] > 0 for rank in several)
    assert relative_error(several[1]["weights"], alone["weights"]) <= 1e-10


@pytest.mark.parametrize("victim", [0, 1])
def test_memory_that_runs_out_on_one_rank_while_it_asks_ends_all_with_the_cause(tmp_path: Path, victim: int) -> None:
    codes = run_ranks(2, train_with_reference_model, tmp_path, fault=(victim, "no memory"), own_cache=True)
    # The rank that ran out of memory had not begun to train; the other one lost it.
    assert sorted(codes) == [2, 3]
    assert error_text(tmp_path, victim).startswith("DoesNotFitError")
    assert error_text(tmp_path, 1 - victim).startswith(
        f"RankFailedError: Every process of a run must get through: rank {victim}: "
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_it_asks_takes_the_others_along_and_the_run_goes_on(
    tmp_path: Path, victim: int
) -> None:
    codes = run_ranks(2, train_with_reference_model, tmp_path, fault=(victim, "kill"), own_cache=True)
    assert (codes[victim], codes[1 - victim]) == (-9, 3)
    assert "another one has ended" in error_text(tmp_path, 1 - victim)
    assert [rank["step"] for rank in results_of(tmp_path, 2, own_cache=True)] == [12, 12]
