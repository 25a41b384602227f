import copy
from typing import Any

import pytest
import torch
from torch import nn

from can_train.config.settings import TrainingSettings
from can_train.fit.optimizer import Optimization, make_optimization

CPU = torch.device("cpu")


def optimization(**training: Any) -> tuple[nn.Linear, Optimization]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    settings = TrainingSettings(**{"epochs": 2, "scheduler": "constant", "warmup_share": 0.0} | training)
    return model, make_optimization(model, settings, lr=0.1, total_steps=20, device=CPU)


def rates(optimizer: Optimization, ticks: int) -> list[float]:
    found = []
    for _ in range(ticks):
        found.append(optimizer.lr)
        optimizer.optimizer.step()
        optimizer.scheduler.step()
    return found


def test_the_schedule_is_as_long_as_the_optimizer_steps() -> None:
    _, optimizer = optimization(scheduler="cosine")
    found = rates(optimizer, 20)
    assert found[0] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)
    assert optimizer.lr == pytest.approx(0.0)


def test_a_schedule_by_epoch_has_as_many_ticks_as_epochs() -> None:
    _, optimizer = optimization(scheduler="cosine", scheduler_interval="epoch")
    assert rates(optimizer, 3) == pytest.approx([0.1, 0.05, 0.0])


def test_the_warm_up_rises_to_the_full_rate() -> None:
    _, optimizer = optimization(warmup_share=0.2)
    assert rates(optimizer, 6) == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])


def test_a_gradient_is_clipped_to_its_norm_once_after_unscaling() -> None:
    model, optimizer = optimization(optimizer="sgd", weight_decay=0.0, grad_clip_norm=0.5, precision="fp16")
    before = model.weight.detach().clone()
    loss = (model.weight * torch.tensor([3.0, 4.0, 0.0])).sum()
    optimizer.scaler.scale(loss).backward()
    assert optimizer.step()
    assert (before - model.weight.detach()).tolist()[0] == pytest.approx([0.03, 0.04, 0.0], abs=1e-6)
    assert model.weight.grad is None


def test_a_step_whose_gradients_overflowed_is_skipped_and_said() -> None:
    model, optimizer = optimization(precision="fp16")
    before = model.weight.detach().clone()
    optimizer.scaler.scale(model.weight.sum() * float("inf")).backward()
    assert not optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_restored_optimization_goes_on_as_it_would_have(name: str) -> None:
    model, optimizer = optimization(optimizer=name, scheduler="cosine")
    other_model, other = optimization(optimizer=name, scheduler="cosine")

    def step(one: nn.Linear, by: Optimization) -> None:
        one(torch.ones(2, 3)).square().sum().backward()
        by.step()
        by.scheduler.step()

    step(model, optimizer)
    other_model.load_state_dict(model.state_dict())
    # Torch's optimizers keep the very tensors they are given.
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    step(other_model, other)
    assert torch.equal(model.weight, other_model.weight)
    assert optimizer.lr == other.lr
