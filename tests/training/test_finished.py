"""What a finished run has trained is read whole, or an error says what is wrong with it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.errors import CheckpointError
from can_train.training.loading import Checkpoints, load_finished
from fakes.finished_runs import Shelf


def saved(folder: Path, state: dict[str, Any]) -> Path:
    """A finished run whose last checkpoint holds a state."""
    shelf = Shelf(folder)
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    (run.checkpoints_path / "manifest.json").unlink()
    if state:
        Checkpoints(run.checkpoints_path).save(state, step=1)
    return run.path


def test_the_best_weights_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path, {"best": {"weight": torch.ones(2)}})
    assert torch.equal(load_finished(path).weights["weight"], torch.ones(2))


@pytest.mark.parametrize("state", [{}, {"model": 1}, {"best": [1]}, {"best": {}}, {"best": {"weight": 1}}])
def test_a_checkpoint_without_weights_is_an_error_with_a_remedy(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"A finished run has weights: .*checkpoints.*\nCopy the run once more"):
        load_finished(saved(tmp_path, state))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    weights = {"good": torch.ones(2), "count": torch.tensor(1), "bad": torch.tensor([1, value])}
    with pytest.raises(CheckpointError, match=r"finite numbers: .*: bad\."):
        load_finished(saved(tmp_path, {"best": weights}))
