"""A task that is described by its samples trains on several ranks as on one, whatever only its loss can tell."""

from pathlib import Path
from typing import Any

import pytest
import torch

from can_train import Task
from fakes.sample_tasks import RareTerm, TwoPhases, TwoTerms, Words
from fakes.several_ranks import run_ranks
from fakes.streams import ShardedWords
from fakes.training_ranks import fit_samples

pytestmark = pytest.mark.slow

# 40 samples: 13 a step leave one for the last, of which the second rank has nothing.
EXACT = {"precision": "fp64", "batch_size": 13, "micro_batch_size": 13, "find_batch_size": "off", "epochs": 3}


def fitted(folder: Path, ranks: int, kind: type[Task], **options: Any) -> list[dict[str, Any]]:
    """Returns what each of so many ranks came to."""
    folder.mkdir()
    assert run_ranks(ranks, fit_samples, folder, kind=kind, **EXACT, **options) == [0] * ranks
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("kind", [Words, TwoTerms, RareTerm, TwoPhases, ShardedWords])
@pytest.mark.parametrize("limited_rank", [None, 0, 1])
def test_two_ranks_train_the_weights_of_one_process_though_memory_runs_out_on_one(
    tmp_path: Path, kind: type[Task], limited_rank: int | None
) -> None:
    (alone,) = fitted(tmp_path / "alone", 1, kind)
    several = fitted(tmp_path / "several", 2, kind, limited_rank=limited_rank)
    error = (several[0]["weights"] - alone["weights"]).norm() / alone["weights"].norm()
    assert float(error) <= 1e-12
    assert torch.equal(several[0]["weights"], several[1]["weights"])
    assert several[0]["best"] == pytest.approx(alone["best"], rel=1e-12)
    assert [rank["ooms"][0] > 0 for rank in several] == [rank == limited_rank for rank in (0, 1)]
    ran_out = "memory ran out" in "\n".join(several[0]["notices"])
    assert ran_out == (limited_rank is not None)


@pytest.mark.parametrize("kind", [Words, TwoTerms, RareTerm, TwoPhases, ShardedWords])
def test_shards_train_the_weights_of_one_process_though_memory_runs_out_on_a_rank(
    tmp_path: Path, kind: type[Task]
) -> None:
    (alone,) = fitted(tmp_path / "alone", 1, kind)
    several = fitted(tmp_path / "several", 2, kind, limited_rank=1, fit="shard")
    error = (several[0]["weights"] - alone["weights"]).norm() / alone["weights"].norm()
    assert float(error) <= 1e-12
    assert several[0]["best"] == pytest.approx(alone["best"], rel=1e-12)
    assert [rank["ooms"][0] > 0 for rank in several] == [False, True]


@pytest.mark.parametrize("kind", [Words, TwoPhases])
def test_the_noise_of_gradients_is_added_once_and_alike_on_all_ranks(tmp_path: Path, kind: type[Task]) -> None:
    (plain,) = fitted(tmp_path / "plain", 1, kind)
    (alone,) = fitted(tmp_path / "alone", 1, kind, grad_noise=0.3)
    several = fitted(tmp_path / "several", 2, kind, limited_rank=1, grad_noise=0.3)
    error = (several[0]["weights"] - alone["weights"]).norm() / alone["weights"].norm()
    assert float(error) <= 1e-12
    assert torch.equal(several[0]["weights"], several[1]["weights"])
    assert float((plain["weights"] - alone["weights"]).norm()) > 1e-6
