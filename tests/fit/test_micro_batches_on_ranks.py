"""`MicroBatcher` in a loop of one's own on several ranks, as docs/python.md shows it."""

from pathlib import Path

import pytest
import torch

from fakes.micro_batcher_ranks import (
    SIZES,
    gradient,
    inputs,
    make_model,
    share_a_batch,
    use_sync_batch_norm,
    wrap_in_ddp,
    wrap_in_fsdp,
)
from fakes.several_ranks import RankFunction, error_text, run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("fails_above", [100, 3])
def test_ranks_that_cut_differently_have_the_gradient_of_the_whole_batch(tmp_path: Path, fails_above: int) -> None:
    assert run_ranks(2, share_a_batch, tmp_path, fails_above=fails_above) == [0, 0]
    model = make_model()
    model(inputs()).square().mean().backward()
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in SIZES]
    assert len(saved[0]["parts"]) != len(saved[1]["parts"])
    for one in saved:
        assert (one["gradient"] - gradient(model)).norm() <= 1e-12 * gradient(model).norm()


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "says"), [
    (wrap_in_ddp, "run_share"), (wrap_in_fsdp, "whole model on each rank"), (use_sync_batch_norm, "GroupNorm"),
])  # fmt: skip
def test_a_model_whose_ranks_wait_for_each_other_in_every_pass_is_refused(
    tmp_path: Path, wrap: RankFunction, says: str
) -> None:
    assert run_ranks(2, wrap, tmp_path) == [2, 2]
    assert says in error_text(tmp_path, 0)
