"""can-train's ways to choose batches, for `scripts/bench/survival`."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bench.survival_steps import SimulatedMachine
from bench.survival_world import SEED, Choice, Machine, Replay, Rows, shuffled
from can_train import Feature, MicroBatcher, find_max_size, predict_peak
from can_train.errors import DoesNotFitError
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.explore import ProbeBounds, fit_by_probes
from can_train.fit.factor_rule import PROVISIONAL, Aim, FactorRule
from can_train.fit.packing import BatchCosts, SplitRules
from can_train.fit.plan import costliest
from can_train.fit.search import Peak, SearchBounds, find_phase_limit
from can_train.memory.meters import Meter

AIM: Final = 0.9
"""can-train's default of `factor.target`."""


class ModelledMeter(Meter):
    """The device of a modelled machine, which nobody else uses."""

    device = torch.device("cpu")
    name = key = "modelled"

    def __init__(self, capacity_bytes: int) -> None:
        self.total_bytes = self.capacity_bytes = capacity_bytes

    def reset_peak(self) -> None:
        """The machine counts."""

    def peak_bytes(self) -> int:
        """The machine counts."""
        return 0

    def free_bytes(self) -> int:
        """Returns the capacity."""
        return self.capacity_bytes

    def release(self, *, collect: bool = True) -> None:
        """Nothing is held."""


def by_plan(machine: Machine, *, logical: int) -> Choice:
    """Probes and searches as the command line does in a configuration's first run, and cuts batches by cost."""
    features, counts = (Feature("nodes"), Feature("edges")), machine.graphs.counts
    within = ProbeBounds(capacity_bytes=machine.capacity_bytes)
    fit = fit_by_probes(lambda rows: int(machine.compute(rows)), features, counts, within)
    order = BatchCosts.priced(fit.model, counts)
    upper = costliest(order, logical) / PROVISIONAL + float(order.each().max())
    bounds = SearchBounds(upper=upper, capacity_bytes=machine.capacity_bytes)
    found = find_phase_limit(fit, lambda rows: Peak(int(machine.compute(rows)), 0), order, bounds)
    limits = DeviceLimits(
        device_key="modelled",
        capacity_bytes=machine.capacity_bytes,
        training=found,
        evaluation=found,
        optimizer_peak_bytes=0,
    )
    factor = FactorRule(decided=None, aim=Aim(AIM)).decide(limits).value
    rules = SplitRules(safe_limit=factor * found.tuned_limit, tuned_limit=found.tuned_limit)
    batcher = MicroBatcher(machine.model, meter=ModelledMeter(machine.capacity_bytes), limits=limits, rules=rules)
    return own_choice(machine, batcher, logical, lambda rows: BatchCosts.priced(fit.model, counts[rows]))


def by_prediction(machine: Machine, *, logical: int) -> Choice:
    """Predicts the peak on the CPU, and cuts batches by cost, as in docs/python.md."""
    assert isinstance(machine, SimulatedMachine)
    counts = machine.graphs.counts
    with machine.meter.host():
        found = predict_peak(machine.model, counts, loss_of=machine.bare_loss)
    batcher = MicroBatcher(machine.model, meter=machine.meter, limits=found)
    return own_choice(machine, batcher, logical, lambda rows: counts[rows])


def by_search(machine: Machine, *, logical: int) -> Choice:
    """Searches for the number of graphs that fit, and rescues what does not all the same."""
    rng = np.random.default_rng(SEED)
    found = find_max_size(
        lambda size: machine.compute(rng.permutation(len(machine.graphs.nodes))[:size]),
        upper=logical,
        capacity=machine.capacity_bytes,
    )
    meter = machine.meter if isinstance(machine, SimulatedMachine) else ModelledMeter(machine.capacity_bytes)
    return own_choice(machine, MicroBatcher(machine.model, meter=meter, limits=found), logical, len)


def own_choice(machine: Machine, batcher: MicroBatcher, logical: int, batch_of: Callable[[Rows], Any]) -> Choice:
    """Trains on batches of `logical` graphs; `batch_of` says what the batcher is given of them."""

    def train(steps: int) -> Replay:
        batches, ends, first_end = shuffled(machine.graphs, logical), 0, 0
        for step in range(1, steps + 1):
            rows = next(batches)
            try:
                batcher.run(partial(losses_of, machine, rows), batch_of(rows))
            except DoesNotFitError:
                ends, first_end = ends + 1, first_end or step
            machine.step()
            batcher.stepped()
        return Replay(ends, first_end)

    batcher.watch(machine.failed)
    return Choice(f"{logical} graphs in parts", train, keeps_batch=True)


def losses_of(machine: Machine, rows: Rows, start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
    """Computes graphs `start:stop` of a batch."""
    return {"loss": (machine.loss(rows[start:stop]), stop - start)}
