from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train.fit.cost_model import PhaseLimit
from can_train.fit.packing import BatchCosts
from can_train.fit.probe import fit_by_probes
from can_train.fit.search import Peak, find_phase_limit, pack_worst_case
from can_train.task import Feature

MIB, GIB = 2**20, 2**30
GRAPHS = (Feature("nodes"), Feature("edges"))
BASE, A_NODE, AN_EDGE = 40.0 * MIB, 20_000.0, 3_000.0

Positions = NDArray[np.int64]


def drawn(size: int = 5_000) -> NDArray[np.float64]:
    """Nodes and edges of graphs, a few of them much larger than most."""
    rng = np.random.default_rng(0)
    nodes = np.ceil(20 * rng.lognormal(0, 0.8, size))
    return np.stack([nodes, np.round(nodes * rng.uniform(1.5, 4.0, size))], axis=1)


COUNTS = drawn()


def straight(positions: Positions) -> float:
    nodes, edges = COUNTS[positions].sum(axis=0)
    return float(BASE + A_NODE * nodes + AN_EDGE * edges)


@dataclass
class Device:
    """Runs batches under a law of what is in use, holding some more; out of memory above its capacity."""

    capacity: float = 2 * GIB
    law: Callable[[Positions], float] = straight
    gaps: float = 1.0
    fitted: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)

    def __call__(self, positions: Positions) -> Peak:
        used = self.law(positions)
        cost = straight(positions) - BASE
        if used * self.gaps > self.capacity:
            self.failed.append(cost)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.fitted.append(cost)
        return Peak(int(used), int(used * self.gaps))

    def find(self, *, upper: float = 1_000 * GIB, slack: float = 0.0) -> PhaseLimit:
        """Fits to what the probes show of the straight law, then searches; only trials are in `fitted`."""
        probed = fit_by_probes(lambda p: int(straight(p)), GRAPHS, COUNTS, capacity_bytes=self.capacity)
        self.probed_cost = probed.largest_cost
        order = BatchCosts(COUNTS, GRAPHS, probed.model.coefficients)
        probed = replace(probed, slack_bytes=slack)
        return find_phase_limit(probed, self, order, upper=upper, capacity_bytes=self.capacity)

    def filled(self, limit: PhaseLimit) -> float:
        """Share of the capacity that a batch at the limit takes, were there one of exactly its cost."""
        return (BASE + limit.tuned_limit) / self.capacity


def assert_tried(device: Device, limit: PhaseLimit) -> None:
    assert limit.trials == len(device.fitted) + len(device.failed)
    assert limit.ooms == len(device.failed)
    assert limit.tuned_limit == pytest.approx(max([device.probed_cost, *device.fitted]), rel=1e-6)
    assert not any(device.probed_cost < cost <= limit.tuned_limit for cost in device.failed)


@pytest.mark.parametrize("capacity_mib", [256, 512, 2_048, 16_384])
def test_a_law_that_holds_is_followed_to_the_edge_without_a_failure(capacity_mib: int) -> None:
    device = Device(capacity_mib * MIB)
    limit = device.find()
    assert_tried(device, limit)
    assert (limit.trials <= 3, limit.ooms, limit.capped) == (True, 0, False)
    assert 0.95 <= device.filled(limit) <= 1
    assert limit.measured_ratio == pytest.approx(1, abs=0.001)


@pytest.mark.parametrize("capacity_mib", [256, 2_048, 16_384])
def test_an_allocation_that_the_probes_did_not_show_is_noticed_by_the_trials(capacity_mib: int) -> None:
    capacity = capacity_mib * MIB
    device = Device(capacity, law=lambda positions: straight(positions) + 0.12 * capacity)
    limit = device.find()
    assert_tried(device, limit)
    assert limit.measured_ratio > 1.1
    assert 0.95 <= limit.peak_bytes(limit.tuned_limit) / capacity <= 1
    assert limit.trials <= 6


def test_a_law_that_bends_up_beyond_the_probes_is_refined() -> None:
    device = Device(law=lambda positions: straight(positions) * (1 + 0.1 * straight(positions) / GIB))
    limit = device.find()
    assert_tried(device, limit)
    assert limit.ooms <= 2
    assert 0.9 <= limit.peak_bytes(limit.tuned_limit) / device.capacity <= 1
    assert limit.measured_ratio > 1.1


def test_a_law_that_flattens_beyond_the_probes_is_followed() -> None:
    device = Device(law=lambda positions: BASE + 0.5 * (straight(positions) - BASE))
    limit = device.find()
    assert_tried(device, limit)
    assert limit.measured_ratio == pytest.approx(0.5, abs=0.01)
    assert 0.95 <= limit.peak_bytes(limit.tuned_limit) / device.capacity <= 1


@pytest.mark.parametrize("gaps", [1.04, 1.12, 1.3])
def test_what_the_allocator_holds_decides_whether_more_fits(gaps: float) -> None:
    device = Device(gaps=gaps)
    limit = device.find()
    assert_tried(device, limit)
    assert (limit.trials <= 3, limit.ooms <= 1) == (True, True)
    assert 0.95 <= gaps * device.filled(limit) <= 1
    assert limit.measured_ratio == pytest.approx(1, abs=0.001)


def test_gaps_that_are_expected_cost_no_failure() -> None:
    assert Device(gaps=1.12).find(slack=0.12 * 2 * GIB).ooms == 0
    assert Device(gaps=1.12).find(slack=0).ooms == 1


def test_the_search_ends_where_memory_no_longer_decides() -> None:
    device = Device()
    limit = device.find(upper=500 * MIB)
    assert_tried(device, limit)
    assert (limit.capped, limit.trials, limit.ooms) == (True, 1, 0)
    assert limit.tuned_limit == pytest.approx(500 * MIB, rel=0.01)


def test_a_limit_below_that_of_the_probes_is_the_probes_own() -> None:
    device = Device()
    limit = device.find(upper=5 * MIB)
    assert limit.capped
    assert_tried(device, limit)


def test_where_no_trial_fits_the_probes_limit_stands() -> None:
    device = Device(law=lambda positions: 1e18)
    limit = device.find()
    assert device.fitted == []
    assert limit.tuned_limit == pytest.approx(device.probed_cost)
    assert_tried(device, limit)
    assert limit.measured_ratio == pytest.approx(1, abs=0.001)


@given(
    capacity=st.floats(64.0 * MIB, 40.0 * GIB),
    slope=st.floats(0.3, 3.0),
    hidden=st.floats(0.0, 0.3),
    upper=st.floats(0.1 * MIB, 100.0 * GIB),
)
def test_no_limit_is_given_that_was_not_tried(capacity: float, slope: float, hidden: float, upper: float) -> None:
    device = Device(capacity, law=lambda p: BASE + slope * (straight(p) - BASE) + hidden * capacity)
    limit = device.find(upper=upper)
    assert_tried(device, limit)
    assert limit.trials <= 30


@given(costs=st.lists(st.integers(50, 100), min_size=1, max_size=60), limit=st.integers(0, 3_000))
def test_a_worst_case_batch_is_within_its_cost_and_near_it(costs: list[int], limit: int) -> None:
    order = BatchCosts.of_samples(costs)
    positions = pack_worst_case(order, limit)
    packed = [costs[position] for position in positions]
    fitting = [cost for cost in costs if cost <= limit]
    assert limit - max(fitting, default=limit + 1) < sum(packed) <= limit
    assert packed[:1] == sorted(fitting)[-1:]


def test_a_worst_case_batch_holds_the_costliest_samples_and_is_filled_up() -> None:
    costs = np.array([1.0, 7.0, 5.0, 3.0])
    order = BatchCosts.of_samples(costs)
    assert costs[pack_worst_case(order, 13.0)].tolist() == [7, 5, 1]
    assert costs[pack_worst_case(order, 6.0)].tolist() == [5, 1]
    assert costs[pack_worst_case(order, 30.0)].sum() == 30
    assert pack_worst_case(order, 0.5).size == 0


def test_a_worst_case_batch_of_padded_samples_is_of_the_longest() -> None:
    tokens = np.array([[10.0], [90.0], [100.0], [20.0]])
    order = BatchCosts(tokens, (Feature("tokens", padding=1),), (1.0,))
    assert tokens[pack_worst_case(order, 305.0), 0].tolist() == [100, 90, 20]
