"""Real processes: what several compute of a batch is what one computes, and none waits for one that failed."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from can_train.errors import ArgumentError
from can_train.training.distributed import RankPlace, Ranks, join_ranks, rank_device
from fakes import rank_functions
from fakes.ragged import OBJECTIVES
from fakes.several_ranks import TIMEOUT_S, error_text, run_ranks, start_ranks

pytestmark = pytest.mark.slow

EXACT = 1e-12
Gradients = tuple[dict[str, Tensor], dict[str, list[int]]]


def gradients(folder: Path, ranks: int, *, samples: int = 50, mutant: str = "", parts: int = 1) -> Gradients:
    """Returns every objective's gradient, and the number of micro-batches of each rank."""
    folder.mkdir()
    if ranks == 1:
        rank_functions.gradients(Ranks(), folder, samples=samples)
    else:
        codes = run_ranks(ranks, rank_functions.gradients, folder, samples=samples, mutant=mutant, parts=parts)
        assert codes == [0] * ranks
    found: Gradients = torch.load(folder / "gradients.pt")
    return found


def errors(one: Gradients, other: Gradients) -> dict[str, float]:
    return {name: float((one[0][name] - other[0][name]).norm() / other[0][name].norm()) for name in other[0]}


def test_four_ranks_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    shared, alone = gradients(tmp_path / "shared", 4), gradients(tmp_path / "alone", 1)
    assert max(errors(shared, alone).values()) <= EXACT
    assert all(parts == [1, 1, 1, 1] for parts in shared[1].values())


def test_ranks_may_need_different_numbers_of_micro_batches(tmp_path: Path) -> None:
    shared, alone = gradients(tmp_path / "shared", 3, parts=4), gradients(tmp_path / "alone", 1)
    assert max(errors(shared, alone).values()) <= EXACT
    assert all(parts[0] == 1 < parts[1] < parts[2] for parts in shared[1].values())


def test_a_rank_without_samples_adds_nothing_and_waits_for_nobody(tmp_path: Path) -> None:
    shared, alone = gradients(tmp_path / "shared", 4, samples=2), gradients(tmp_path / "alone", 1, samples=2)
    assert max(errors(shared, alone).values()) <= EXACT
    assert all(parts == [1, 1, 0, 0] for parts in shared[1].values())


@pytest.mark.parametrize("mutant", ["mean", "own denominators", "own noise"])
def test_another_rule_gives_another_gradient(tmp_path: Path, mutant: str) -> None:
    shared, alone = gradients(tmp_path / "shared", 3, mutant=mutant), gradients(tmp_path / "alone", 1)
    wrong = errors(shared, alone)
    coupled = ("vgae", "gradient penalty")
    assert all(wrong[name] > 1e-3 for name in (coupled if mutant == "own noise" else OBJECTIVES))


def test_a_share_that_nobody_computes_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, rank_functions.lost_share, tmp_path) == [ArgumentError.exit_code] * 2
    assert "must add up to the whole batch's: 2 against 4" in error_text(tmp_path, 1)


def test_ranks_that_read_other_data_end_with_the_first_difference(tmp_path: Path) -> None:
    assert run_ranks(3, rank_functions.unlike_data, tmp_path) == [2, 3, 3]
    told = "The ranks of a run must read the same data: shape: (2, 3) on rank 0, (2, 4) on rank 2"
    assert told in error_text(tmp_path, 0)
    assert f"rank 0: {told}" in error_text(tmp_path, 1)


def test_gradients_add_up_and_missing_ones_count_as_zeros(tmp_path: Path) -> None:
    assert run_ranks(3, rank_functions.some_gradients, tmp_path) == [0, 0, 0]
    for rank in range(3):
        large, some, none, sparse, mixed = torch.load(tmp_path / f"grads-{rank}.pt")
        assert torch.equal(large, torch.full((600, 1000), 6.0))
        assert torch.equal(some, torch.arange(6.0).reshape(2, 3).T)
        assert none is None
        assert (sparse.is_sparse, sparse.is_coalesced(), mixed.is_sparse) == (True, True, False)
        assert sparse.to_dense()[:, 0].tolist() == [0, 4, 1, 1, 0, 0, 0, 0, 0]
        assert mixed[:, 1].tolist() == [0, 6, 2, 1]


def test_buffers_are_those_of_rank_0_where_all_ranks_have_them(tmp_path: Path) -> None:
    assert run_ranks(3, rank_functions.buffers, tmp_path) == [0, 0, 0]
    for rank in range(3):
        held = torch.load(tmp_path / f"buffers-{rank}.pt")
        assert held["mean"].tolist() == [0.0, 0.0, 0.0]
        assert held["count"] == 10
        assert held.get("cache", torch.ones(0)).tolist() == [float(rank)] * (1 + rank) * bool(rank)


def test_small_exchanges(tmp_path: Path) -> None:
    assert run_ranks(3, rank_functions.exchanged, tmp_path) == [0, 0, 0]
    for rank in range(3):
        order, first, own, neighbours, turn = torch.load(tmp_path / f"exchanged-{rank}.pt")
        assert order == ["rank 0", "rank 1", "rank 2"]
        assert (first, own, neighbours, turn) == (0, rank, 3, rank)
    assert (tmp_path / "turns.txt").read_text().split() == ["first", "other", "other"]


@pytest.mark.parametrize(
    ("how", "code", "others"),
    [
        ("does not fit", 2, "RankFailedError: .*rank 1: It must fit: 1 GiB"),
        ("bug", 1, "RankFailedError: .*rank 1: ValueError: a bug"),
        ("leaves", 143, "RankGoneError: .*another one has ended"),
        ("is killed", -9, "RankGoneError: .*another one has ended"),
    ],
)
def test_a_failure_on_one_rank_ends_all(tmp_path: Path, how: str, code: int, others: str) -> None:
    assert run_ranks(3, rank_functions.fail, tmp_path, how=how) == [3, code, 3]
    for rank in (0, 2):
        assert re.match(others, error_text(tmp_path, rank))


def test_a_signal_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    first, other = start_ranks(2, rank_functions.wait_for_a_signal, tmp_path)
    deadline = time.monotonic() + TIMEOUT_S
    while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(first.pid or 0, signal.SIGTERM)
    first.join(TIMEOUT_S)
    assert first.exitcode == 143
    (tmp_path / "ended").touch()
    other.join(TIMEOUT_S)
    assert other.exitcode == 3


def test_a_single_process_talks_to_nobody() -> None:
    alone = join_ranks(None, "cpu")
    assert (alone.rank, alone.size, alone.is_first) == (0, 1, True)
    assert alone.gather(lambda: "done") == ["done"]
    assert (alone.on_rank0(lambda: 1), alone.on_every_rank(lambda: 2), alone.on_rank0_first(lambda: 3)) == (1, 2, 3)
    parameter = nn.Parameter(torch.zeros(2))
    alone.reduce_gradients([parameter])
    assert parameter.grad is None
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("auto", 4, "cuda:2"), ("cuda", 4, "cuda:2"), ("cuda", 1, "cuda:0"), ("cuda:1", 4, "cuda:1"), ("auto", 0, "auto"),
     ("sim:1GiB", 4, "sim:1GiB"), ("cpu", 4, "cpu")],
)  # fmt: skip
def test_each_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    place = RankPlace(rank=6, size=8, local_rank=2, address="n1", port=1)
    assert rank_device(device, place) == expected


def test_objects_of_any_length_reach_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(3, rank_functions.objects, tmp_path) == [0, 0, 0]
