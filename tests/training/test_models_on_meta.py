"""A model without values, on meta, is planned for cards as the same model with values, and is not trained."""

from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import can_train
from can_train.config.compose import RunRequest, resolve
from can_train.errors import ConfigError
from can_train.fit.optimizer_memory import measure_optimizer
from can_train.reporter import SilentReporter
from can_train.training.train import train_new

TASK: Final = """
import torch
from torch import nn

import can_train


class Layers(can_train.Task):
    training = {"lr_batch_size": 4}

    def datasets(self):
        samples = [(torch.zeros(64, 512),) for _ in range(16)]
        return {"train": samples, "validation": samples[:2], "test": samples[:2]}

    def model(self):
        with torch.device(DEVICE):
            return nn.Sequential(
                *[nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8)]
            )

    def loss(self, model, batch):
        return {"square": (model(batch[0]).square().mean((1, 2)).sum(), len(batch[0]))}
"""
CARDS: Final = ("rtx-4090", "2560MiB")


def task_on(device: str, folder: Path) -> str:
    path = folder / f"{device}_layers.py"
    path.write_text(TASK.replace("DEVICE", repr(device)))
    return f"{path}:Layers"


def test_a_model_without_values_is_planned_as_with_values(tmp_path: Path) -> None:
    plans = [can_train.plan(f"--task {task_on(device, tmp_path)}", CARDS).cards for device in ("cpu", "meta")]
    for with_values, without in zip(*plans, strict=True):
        assert with_values.plan is not None
        assert without.plan is not None
        assert without.plan.fullest.rung == with_values.plan.fullest.rung
        assert without.peak_bytes == pytest.approx(with_values.peak_bytes, rel=0.02)
        assert any("is on meta and has no values" in notice for notice in without.plan.all_notices)


def test_a_model_without_values_is_not_trained(tmp_path: Path) -> None:
    run = resolve(RunRequest(task=task_on("meta", tmp_path), device="cpu", values={"paths.runs_dir": str(tmp_path)}))
    with pytest.raises(ConfigError, match="The weights of a model have values"):
        train_new(run, SilentReporter())


@pytest.mark.parametrize("offloaded", [False, True])
def test_the_memory_of_its_optimizer_is_that_of_weights_with_values(offloaded: bool) -> None:
    measured = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(40)])
        measured.append(measure_optimizer(model.parameters(), torch.optim.AdamW, offloaded=offloaded))
    assert measured[0] == measured[1]
    assert measured[0].parameter_bytes > 0
