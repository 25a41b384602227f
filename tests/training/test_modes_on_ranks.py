"""Modes that build on finished runs, trained by two real processes together: they end where one does."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.training.distributed import Ranks
from fakes.bitwise import final_state
from fakes.several_ranks import run_ranks
from fakes.trained_runs import finished_run, own_log
from fakes.training_ranks import train_mode

pytestmark = pytest.mark.slow

SETTINGS = {
    "training.epochs": 2, "training.precision": "fp64", "training.batch_size": 40, "training.micro_batch_size": 40,
    "training.optimizer": "sgd", "training.lr": 0.1, "training.scheduler": "constant", "mode.baselines": False,
    "dataset.window": 20, "dataset.stride": 20,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "gat": {"model.hidden": 8, "model.layers": 2, "model.heads": 2, "model.dropout": 0.0},
    "vgae": {"model.hidden": (32, 16), "model.latent": 8, "model.dropout": 0.0},
    "fusion": {"model.hidden": 16},
}


@cache
def finished(model: str) -> Path:
    return finished_run(model, **{name.replace(".", "__"): value for name, value in SMALL[model].items()})


def settings_of(model: str, mode: str) -> dict[str, Any]:
    builds_on = {
        "knowledge_distillation": {"mode.teacher": model},
        "curriculum": {"mode.autoencoder": "vgae"},
        "fusion": {"mode.autoencoder": "vgae", "mode.classifier": "gat"},
    }
    return {**SETTINGS, **SMALL[model], **{role: str(finished(its)) for role, its in builds_on[mode].items()}}


def trained(folder: Path, model: str, mode: str, **more: Any) -> tuple[Path, Path]:
    """Trains a mode by one process and by two; returns their runs' folders."""
    values = settings_of(model, mode) | more
    asked = {"model": model, "mode": mode, "log": own_log(finished("gat")), "values": values}
    for name in ("alone", "shared"):
        (folder / name).mkdir()
    train_mode(Ranks(), folder / "alone", **asked)
    assert run_ranks(2, train_mode, folder / "shared", **asked) == [0, 0]
    (alone,), (shared,) = ((folder / name / "runs").iterdir() for name in ("alone", "shared"))
    return alone, shared


def result(run: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run / "result.json").read_text())
    return told


def trained_weights(run: Path) -> dict[str, torch.Tensor]:
    """What the optimizer moved: its scale is not that of what a model knows of its inputs."""
    return {name: value for name, value in final_state(run)["model"].items() if not name.startswith("inputs.")}


def assert_same(shared: Path, alone: Path) -> None:
    mine, its = trained_weights(shared), trained_weights(alone)
    assert mine.keys() == its.keys()
    for name, value in its.items():
        assert (mine[name] - value).double().norm() <= 1e-10 * value.double().norm(), name
    assert result(shared)["best_validation_loss"] == pytest.approx(result(alone)["best_validation_loss"], rel=1e-10)
    assert result(shared)["steps"] == result(alone)["steps"]


@pytest.mark.parametrize(("model", "way"), [("gat", "device"), ("vgae", "cache")])
def test_two_ranks_teach_a_student_as_one_does(tmp_path: Path, model: str, way: str) -> None:
    alone, shared = trained(tmp_path, model, "knowledge_distillation", **{"mode.teacher_placement": way})
    assert_same(shared, alone)
    assert result(shared)["reference_models"][0]["placement"] == way
    assert result(shared)["judgement"]["compared"].keys() == {"model", "teacher"}


def test_two_ranks_go_through_a_curriculum_as_one_does(tmp_path: Path) -> None:
    alone, shared = trained(tmp_path, "gat", "curriculum")
    assert_same(shared, alone)


def test_two_ranks_teach_a_fusion_agent_as_one_does(tmp_path: Path) -> None:
    alone, shared = trained(tmp_path, "fusion", "fusion", **{"mode.replay_size": 100, "mode.target_every": 2})
    assert_same(shared, alone)
    state = final_state(shared)["model"]
    assert int(state["steps"]) == result(shared)["steps"]
    for name in ("memory.rows", "memory.actions", "memory.pushed"):
        assert torch.equal(state[name], final_state(alone)["model"][name]), name
