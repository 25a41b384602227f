"""Trainings whose optimizer state does not fit on the device: it waits on the host, and the weights are the same."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import with_absolute_paths
from can_train.fit.rungs import Rung
from can_train.reporter import SilentReporter
from can_train.training.train import train_new
from fakes.bitwise import assert_same, final_state, losses

WIDE: Final = """
import torch
from torch import nn

import can_train


class Wide(can_train.Task):
    training = {"lr_batch_size": 4, "epochs": 2, "min_steps_per_epoch": 1}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(256, generator=generator),) for _ in range(12)]
        return {"train": samples[:8], "validation": samples[8:10], "test": samples[10:]}

    def model(self):
        return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(40)])

    def loss(self, model, batch):
        return {"square": (model(batch[0]).square().mean(1).sum(), len(batch[0]))}
"""
"""Weights take 10 MiB, as do gradients and each moment of AdamW."""

ALONE: Final = "80MiB"


def task_file(folder: Path, text: str = WIDE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wide.py").write_text(text)
    return folder / "wide.py"


def train(folder: Path, device: str, text: str = WIDE, **settings: Any) -> Path:
    """Trains, and returns the folder of the run."""
    values = {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state"),
              "training.num_workers": "0", "training.accumulation_splits": 4}  # fmt: skip
    named = {f"training.{name}": value for name, value in settings.items()}
    request = RunRequest(task=f"{task_file(folder, text)}:Wide", device=f"sim:{device}", values=values | named)
    return train_new(with_absolute_paths(resolve(request)), SilentReporter()).folder.path


def plan_of(run: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return plan


def assert_same_training(one: Path, other: Path) -> None:
    states = [final_state(path) for path in (one, other)]
    for part in ("model", "optimization", "randomness"):
        assert_same(states[0][part], states[1][part])
    assert [line["train"] for line in losses(one)] == [line["train"] for line in losses(other)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_whose_state_does_not_fit_trains_to_the_same_weights(tmp_path: Path, optimizer: str) -> None:
    alone, on_host = (train(tmp_path / size, size, optimizer=optimizer) for size in (ALONE, "32MiB"))
    assert not plan_of(alone)["rung"]["offload_optimizer"]
    assert plan_of(on_host)["rung"] == {**asdict(Rung(offload_optimizer=True)), "recompute": []}
    assert_same_training(alone, on_host)
    result = json.loads((on_host / "result.json").read_text())
    assert result["peak_memory_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.01)
