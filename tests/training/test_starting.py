"""A run may start from the best weights of a finished one, and from nothing else."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from can_train.errors import CheckpointError
from can_train.io.records import write_json_atomic
from can_train.runs.run_folder import RunFolder
from can_train.training.loading import Checkpoints, start_from


def finished_run(path: Path, model: nn.Module) -> Path:
    Checkpoints(RunFolder(path).checkpoints_path.absolute()).save({"best": model.state_dict()}, step=1)
    write_json_atomic(RunFolder(path).result_path, {"status": "finished"})
    return path


def test_training_starts_from_the_best_weights(tmp_path: Path) -> None:
    teacher, fresh = nn.Linear(3, 2), nn.Linear(3, 2)
    start_from(fresh, finished_run(tmp_path, teacher))
    assert torch.equal(fresh.weight, teacher.weight)


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    path = finished_run(tmp_path, nn.Linear(3, 2))
    RunFolder(path).result_path.unlink()
    with pytest.raises(CheckpointError, match=r"finished run.*\n.*can-train resume"):
        start_from(nn.Linear(3, 2), path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="finished run"):
        start_from(nn.Linear(3, 2), tmp_path / "nowhere")


def test_a_run_whose_last_checkpoint_is_damaged_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = finished_run(tmp_path, nn.Linear(3, 2))
    checkpoints = RunFolder(path).checkpoints_path
    Checkpoints(checkpoints).save({"best": nn.Linear(3, 2).state_dict()}, step=2)
    newest, manifest = checkpoints / "step-00000002.pt", (checkpoints / "manifest.json").read_bytes()
    newest.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"damaged: .*step-00000002\.pt"):
        start_from(nn.Linear(3, 2), path)
    assert (checkpoints / "manifest.json").read_bytes() == manifest


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = nn.Linear(3, 2)
    nn.init.constant_(broken.bias, math.nan)
    with pytest.raises(CheckpointError, match=r"finite numbers: .*: bias"):
        start_from(nn.Linear(3, 2), finished_run(tmp_path, broken))


def test_another_model_is_refused_field_by_field(tmp_path: Path) -> None:
    other = nn.ModuleDict({"weight": nn.Linear(3, 4), "head": nn.Linear(1, 1)})
    path = finished_run(tmp_path, other)
    mine = nn.ModuleDict({"weight": nn.Linear(3, 2), "tail": nn.Linear(1, 1)})
    with pytest.raises(CheckpointError, match=r"Missing key.*tail.weight.*Unexpected key.*head.weight"):
        start_from(mine, path)
    with pytest.raises(CheckpointError, match=r"size mismatch for weight\.weight: .*\[4, 3\].*\[2, 3\]"):
        start_from(nn.ModuleDict({"weight": nn.Linear(3, 2), "head": nn.Linear(1, 1)}), path)
