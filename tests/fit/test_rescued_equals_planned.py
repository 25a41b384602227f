"""A run that ran out of memory is bit by bit the run that was cut as finely from the start."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.packing import BatchCosts, SplitRules
from can_train.fit.pass_state import Snapshot
from can_train.fit.rescue import RescueSettings, Undo
from can_train.memory.meters import Meter, SimulatedMeter
from can_train.memory.simulated.allocator import EXPANDABLE
from fakes.costly import Costly
from fakes.ragged import cut_at

pytestmark = pytest.mark.filterwarnings("ignore:Samples depend on the rest of their batch")

STEPS = 6
SAMPLES = 48
INPUTS = 16
AMPLE_BYTES = 2**30
TIGHT_BYTES = (45 * 2**20, 64 * 2**20, 100 * 2**20)
SAMPLE_BYTES = 2**20
"""What a sample takes on average in the forward pass; the backward pass takes as much again for a while."""

Splits = list[tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """How a run trains."""

    dtype: torch.dtype = torch.float32
    half: bool = False
    norm: bool = True
    dropout: float = 0.3


CASES = {
    "fp32, dropout and BatchNorm": Case(),
    "fp64, dropout and BatchNorm": Case(dtype=torch.float64),
    "fp32, neither": Case(norm=False, dropout=0.0),
    "fp16 with a GradScaler": Case(half=True),
}


class Network(nn.Module):
    """Memory runs out at its inner layer: in forward, or in backward when the outer ones have their gradients."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, 32)
        self.norm = nn.BatchNorm1d(32) if case.norm else nn.Identity()
        self.outer = nn.Linear(32, 1)
        self.dropout = case.dropout

    def forward(self, x: Tensor, num_bytes: int) -> Tensor:
        hidden = self.norm(Costly.apply(self.inner(x), num_bytes))
        out: Tensor = self.outer(F.dropout(torch.relu(hidden), self.dropout, self.training))
        return out


@dataclass
class Trained:
    """What a run left behind."""

    state: dict[str, Tensor]
    splits: Splits
    ooms: int
    drawn: Tensor


def pareto_needs(step: int) -> Any:
    """Draws [SAMPLES] shares of memory of mean 1, a few of them large."""
    drawn = np.minimum(np.random.default_rng(step).pareto(2.0, SAMPLES), 3.0)
    return drawn / drawn.mean()


def train(capacity_bytes: int, case: Case, splits: Splits | None = None) -> Trained:
    """Trains some steps; cut as `splits` says where they are given, else only as memory demands."""
    meter = SimulatedMeter(capacity_bytes, settings=EXPANDABLE)
    torch.manual_seed(7)
    sizes: Splits = []
    with meter.active():
        model = Network(case).to(case.dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", enabled=case.half, init_scale=2.0**10)
        # BatchNorm refuses a single sample.
        batcher = MicroBatcher(model, meter=meter, rescue=RescueSettings(floor=2))
        for step in range(STEPS):
            x = torch.randn(SAMPLES, INPUTS, dtype=case.dtype)
            needs = SAMPLE_BYTES * pareto_needs(step)
            costs, batcher.rules = (
                (BatchCosts.of_samples(needs), SplitRules()) if splits is None else cut_at(splits[step])
            )

            def losses_of(start: int, stop: int, x: Tensor = x, needs: Any = needs) -> Losses:
                autocast = torch.autocast("cpu", torch.float16) if case.half else nullcontext()
                with autocast:
                    return {
                        "error": (
                            (model(x[start:stop], int(needs[start:stop].sum())) - 1).square().float().sum(),
                            stop - start,
                        )
                    }

            result = batcher.run(losses_of, costs, scale=scaler.scale)
            sizes.append(result.micro_batches)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            batcher.stepped()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return Trained(state, sizes, batcher.ooms_rescued, torch.rand(1))


def differing(one: Trained, other: Trained) -> list[str]:
    """Names what is not bit by bit the same."""
    names = [name for name in one.state if not torch.equal(one.state[name], other.state[name])]
    return names + ([] if torch.equal(one.drawn, other.drawn) else ["random numbers"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("capacity_bytes", TIGHT_BYTES)
def test_a_rescued_run_equals_the_run_with_the_same_splits(case: Case, capacity_bytes: int) -> None:
    rescued = train(capacity_bytes, case)
    assert rescued.ooms > 0
    planned = train(AMPLE_BYTES, case, rescued.splits)
    assert planned.ooms == 0
    assert planned.splits == rescued.splits
    assert differing(rescued, planned) == []


def forget_generators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "set_rng_state", lambda state: None)


def forget_buffers(patch: pytest.MonkeyPatch) -> None:
    restore = Snapshot.restore

    def without_buffers(self: Snapshot) -> None:
        self._buffers, self._has_buffers = [], False
        restore(self)

    patch.setattr(Snapshot, "restore", without_buffers)


def keep_half_gradients(patch: pytest.MonkeyPatch) -> None:
    make = Undo.__init__

    def make_without(self: Undo, model: nn.Module, meter: Meter, *gradients: object) -> None:
        # Nothing is set aside: what the failed backward has added stays, on top of what was there.
        make(self, model, meter)

    patch.setattr(Undo, "__init__", make_without)
    patch.setattr(Undo, "_drop_unknown", lambda self: None)


@pytest.mark.parametrize("mutant", [forget_generators, forget_buffers, keep_half_gradients])
def test_a_rescue_that_forgets_something_leads_elsewhere(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for capacity_bytes in TIGHT_BYTES:
        with monkeypatch.context() as patch:
            mutant(patch)
            rescued = train(capacity_bytes, Case())
        assert rescued.ooms > 0
        found += differing(rescued, train(AMPLE_BYTES, Case(), rescued.splits))
    assert found
