import gc
import math
import random
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train.errors import ArgumentError
from can_train.fit.cost_model import ProbeFit, SearchResult
from can_train.fit.explore import ProbeBounds, fit_by_probes
from can_train.fit.factor_rule import RememberedLimit
from can_train.fit.packing import BatchCosts
from can_train.fit.search import (
    Peak,
    SearchBounds,
    SizeSearch,
    confirm_limit,
    find_max_size,
    find_phase_limit,
    pack_worst_case,
)
from can_train.task import Feature

CAPACITY = 16 * 2**30

Trial = Callable[[int], object]
Law = Callable[[float], float]
"""Share of a limit → share of the capacity; 1 at 1."""


def spread_limits(count: int = 284, largest: int = 20_000) -> list[int]:
    """Exactly `count` distinct limits from 1 to `largest`, spread evenly on a logarithmic scale."""
    points = count
    while len(limits := sorted({round(largest ** (i / (points - 1))) for i in range(points)})) < count:
        points += 1
    return limits


def affine(base: float) -> Law:
    return lambda share: base + (1 - base) * share


def bending(base: float, bend: float) -> Law:
    return lambda share: base + (1 - base) * ((1 - bend) * share + bend * share**2)


ORDINARY = affine(0.2)


def device(limit: int, law: Law = ORDINARY) -> Trial:
    """A trial that fits up to `limit` and returns its peak in bytes."""

    def trial(size: int) -> int:
        if size > limit:
            raise MemoryError
        return int(CAPACITY * law(size / (limit + 0.5)))

    return trial


def without_readings(limit: int) -> Trial:
    trial = device(limit)
    return lambda size: trial(size) and None


def searched(law: Law) -> list[tuple[float, SizeSearch]]:
    """Every spread limit searched with readings: (share of the true maximum found, search)."""
    searches = [(limit, find_max_size(device(limit, law), capacity=CAPACITY)) for limit in spread_limits()]
    return [(search.size / limit, search) for limit, search in searches]


@pytest.mark.parametrize(
    "law",
    [affine(0.05), affine(0.2), affine(0.4), bending(0.05, 0.2), bending(0.3, 0.3)],
    ids=["base 5 %", "base 20 %", "base 40 %", "mild bend", "bend"],
)
def test_with_readings_the_search_jumps_to_the_limit(law: Law) -> None:
    results = searched(law)
    assert mean(share for share, _ in results) >= 0.97
    assert mean(search.trials for _, search in results) <= 6
    assert mean(search.ooms for _, search in results) <= 0.5


def test_an_exactly_affine_law_is_found_exactly() -> None:
    assert all(share == 1 for share, _ in searched(affine(0.2)))


def test_without_readings_the_search_is_cheaper_than_a_binary_search_to_the_end() -> None:
    searches = [(limit, find_max_size(without_readings(limit))) for limit in spread_limits()]
    assert mean(search.size / limit for limit, search in searches) >= 0.97
    assert mean(search.trials for _, search in searches) < 15.2
    assert mean(search.ooms for _, search in searches) < 3.6


@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["without readings", "with readings"])
@given(limit=st.integers(0, 30_000), start=st.integers(1, 40_000), upper=st.integers(1, 40_000))
def test_the_size_found_was_tried_and_fits(capacity: int | None, limit: int, start: int, upper: int) -> None:
    tried: list[int] = []
    run = device(limit)

    def trial(size: int) -> object:
        tried.append(size)
        return run(size)

    search = find_max_size(trial, start=start, upper=upper, capacity=capacity)
    assert search.size in [0, *tried]
    assert all(1 <= size <= upper for size in tried)
    assert (search.size, search.trials) == (max([0, *(s for s in tried if s <= limit)]), len(tried))
    assert search.ooms == sum(size > limit for size in tried)
    assert search.size >= 0.9 * min(limit, upper) - 1


@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["without readings", "with readings"])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 7, 8, 9, 4_097, 6_000, 8_191, 8_192, 8_193, 50_000])
def test_awkward_limits_are_found(limit: int, capacity: int | None) -> None:
    search = find_max_size(device(limit), capacity=capacity)
    assert 0.92 * limit <= search.size <= limit


@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["without readings", "with readings"])
def test_a_limit_beyond_the_upper_end_ends_at_the_upper_end(capacity: int | None) -> None:
    search = find_max_size(device(10**6), upper=777, capacity=capacity)
    assert (search.size, search.ooms) == (777, 0)


def test_a_start_above_the_upper_end_is_the_upper_end() -> None:
    assert find_max_size(device(100), start=64, upper=5, confirm=1) == SizeSearch(size=5, trials=1, ooms=0)


def test_nothing_fits_on_a_device_without_memory() -> None:
    assert find_max_size(device(0)) == SizeSearch(size=0, trials=3, ooms=3)


def test_a_start_far_above_the_limit_comes_down_in_few_trials() -> None:
    search = find_max_size(device(3), start=4_096, capacity=CAPACITY)
    assert search.size == 3
    assert search.ooms <= 7


@given(readings=st.lists(st.floats(allow_nan=True) | st.none() | st.text(), min_size=1), limit=st.integers(0, 2**20))
def test_the_search_ends_soon_whatever_the_readings(readings: list[object], limit: int) -> None:
    def trial(size: int) -> object:
        if size > limit:
            raise MemoryError
        return readings[size % len(readings)]

    search = find_max_size(trial, capacity=1.0)
    assert search.size <= limit
    assert search.trials <= 50


@pytest.mark.parametrize("hidden", [0.5, 0.9, 0.985], ids=lambda share: f"{share:.1%} hidden")
def test_memory_that_does_not_grow_at_first_does_not_stall_the_search(hidden: float) -> None:
    search = find_max_size(device(20_000, lambda share: max(hidden, affine(0.1)(share))), capacity=CAPACITY)
    assert search.size >= 0.9 * 20_000
    assert search.trials <= 20


STAIRS: dict[str, Callable[[int, int], int]] = {
    "multiples": lambda size, width: -(-size // width) * width,
    "squares of multiples": lambda size, width: (-(-size // width) * width) ** 2,
    "powers of 2": lambda size, width: max(width, 2 ** (size - 1).bit_length()),
    "a plateau": max,
}


def stairs(kind: str, width: int, limit: int, hidden: float) -> tuple[Trial, int]:
    """A trial whose peaks rise in stairs, and the largest size that fits: the end of the stair that `limit` is on."""
    height = STAIRS[kind]
    base = int(hidden * height(limit, width))
    sizes = range(limit, 2 * limit + 2 * width)
    largest = sizes[bisect_right(sizes, height(limit, width), key=lambda size: height(size, width)) - 1]

    def trial(size: int) -> float:
        if size > largest:
            raise MemoryError
        return float(base + height(size, width))

    return trial, largest


@pytest.mark.parametrize("kind", STAIRS)
@given(
    width=st.sampled_from([2, 7, 64, 128, 512, 4_096]) | st.integers(1, 2_000),
    limit=st.integers(1, 50_000),
    hidden=st.floats(0, 5),
    room=st.floats(1.03, 1.3),
    start=st.sampled_from([1, 8, 32]),
)
def test_peaks_that_rise_in_stairs_do_not_end_the_search_early(
    kind: str, width: int, limit: int, hidden: float, room: float, start: int
) -> None:
    trial, largest = stairs(kind, width, limit, hidden)
    tried: list[int] = []

    def noted(size: int) -> object:
        tried.append(size)
        return trial(size)

    # Where a stair takes exactly the capacity, a curve may lead to it by chance.
    capacity = room * float(str(trial(largest)))
    search = find_max_size(noted, start=start, capacity=capacity)
    assert search.size in tried
    assert 0.93 * largest - 1 <= search.size <= largest
    assert search.trials == len(tried) <= 40


@pytest.mark.parametrize(("capacity", "largest"), [(8, 1_024), (8.5, 1_024), (9, 1_024), (10, 1_024), (16, 2_048)])
def test_peaks_that_double_with_the_size_lead_near_the_end_of_the_stair(capacity: float, largest: int) -> None:
    def trial(size: int) -> float:
        peak = 2.0 ** max(0, math.ceil(math.log2(size)) - 7)
        if peak > capacity:
            raise MemoryError
        return peak

    search = find_max_size(trial, capacity=capacity)
    assert search.size >= 0.97 * largest
    assert search.trials <= 15


def test_stairs_are_no_scatter() -> None:
    def trial(size: int) -> float:
        peak = 1.0 + -(-size // 64) * 0.256
        if peak > 10.0:
            raise MemoryError
        return peak

    # The same peak again: no room is left.
    assert find_max_size(trial, capacity=10.0).size >= 0.97 * 35 * 64


@pytest.mark.parametrize("law", [affine(0.0), affine(0.2), affine(0.8), bending(0.2, 0.3)])
def test_smooth_peaks_cost_no_more_trials_for_the_sake_of_stairs(law: Law) -> None:
    searches = [find_max_size(device(limit, law), capacity=CAPACITY) for limit in spread_limits()]
    assert mean(search.trials for search in searches) <= 4.5
    assert mean(search.ooms for search in searches) <= 0.2


def test_peaks_that_draw_near_the_capacity_without_reaching_it_do_not_stall_the_search() -> None:
    trials: list[int] = []

    def trial(size: int) -> float:
        trials.append(size)
        return CAPACITY * (1 - 0.5 ** len(trials))

    assert find_max_size(trial, capacity=CAPACITY).size == 2**20


def test_peaks_below_the_capacity_may_still_fail() -> None:
    fragmented = device(1_000, lambda share: 0.93 * affine(0.2)(share))
    search = find_max_size(fragmented, capacity=CAPACITY)
    assert 930 <= search.size <= 1_000
    assert search.ooms <= 3


def test_readings_are_ignored_without_a_capacity() -> None:
    assert find_max_size(device(5_000)) == find_max_size(without_readings(5_000))


def test_any_other_error_ends_the_search() -> None:
    def trial(size: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_max_size(trial)


class Tensor:
    """Something that a failed trial still holds."""


def test_what_a_failed_trial_held_is_free_before_the_next_trial() -> None:
    held: list[weakref.ref[Tensor]] = []

    def trial(size: int) -> None:
        assert all(reference() is None for reference in held)
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        if size > 10:
            raise MemoryError

    gc.disable()
    try:
        find_max_size(trial)
    finally:
        gc.enable()
    assert len(held) > 3


@pytest.mark.parametrize("bounds", [{"start": 0}, {"upper": 0}, {"capacity": 0}, {"capacity": math.nan}])
def test_bounds_that_leave_nothing_to_search_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=r"size of at least 1|positive number of bytes"):
        find_max_size(device(10), **bounds)  # type: ignore[arg-type]


def limited(limit: int, readings: Callable[[int, int], object]) -> Callable[[int], object]:
    """A trial that fits up to a limit, and returns something that depends on its size and on how many came before."""
    tried: list[int] = []

    def trial(size: int) -> object:
        tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return readings(size, len(tried))

    return trial


@pytest.mark.parametrize(
    "gives", [lambda n: n == 1, lambda n: n % 2 == 1, lambda n: n != 3, lambda n: False], ids=["1", "odd", "not 3", "-"]
)
@pytest.mark.parametrize("nothing", [None, math.nan, -1.0, 0, True, "1 GiB"])
def test_trials_without_a_reading_do_not_end_the_search(gives: Callable[[int], bool], nothing: object) -> None:
    limit = 18_648
    trial = limited(limit, lambda size, count: 7e6 + 1000 * size if gives(count) else nothing)
    assert find_max_size(trial, capacity=7e6 + 1000 * limit).size >= 0.93 * limit


def test_readings_may_be_numbers_of_numpy() -> None:
    trial = limited(18_648, lambda size, count: np.int64(7_000_000 + 1000 * size))
    found = find_max_size(trial, capacity=7e6 + 1000 * 18_648)
    assert (found.size, found.ooms) == (18_648, 0)
    assert found.trials <= 6


@pytest.mark.parametrize(
    "reading", [np.float32, np.int64, np.asarray, torch.tensor, float], ids=lambda one: one.__name__
)
def test_a_reading_is_a_number_of_any_library(reading: Callable[[int], object]) -> None:
    def trial(size: int) -> object:
        if size > 6000:
            raise MemoryError
        return reading(size * 2**20)

    found = find_max_size(trial, capacity=6000 * 2**20)
    assert found == find_max_size(lambda size: trial(size) and size * 2**20, capacity=6000 * 2**20)
    assert (found.size, found.trials) == (6000, 4)


@pytest.mark.parametrize("nothing", [torch.ones(2), np.ones(1), "5", True, torch.tensor(True), {}, None])
def test_what_is_no_number_is_no_reading(nothing: object) -> None:
    blind = find_max_size(lambda size: None, upper=100)
    assert find_max_size(lambda size: nothing, upper=100, capacity=2**30) == blind


@pytest.mark.parametrize("capacity", [2**33, "8GiB", np.float64(2**33), np.int64(2**33), torch.tensor(2**33)], ids=repr)
def test_a_capacity_is_a_number_of_bytes_or_a_size(capacity: Any) -> None:
    assert find_max_size(lambda size: size * 2**20, upper=2**13, capacity=capacity).size == 2**13
    assert find_max_size(lambda size: size * 2**21, upper=2**12, capacity=capacity).size == 2**12


@pytest.mark.parametrize(
    "capacity", [math.inf, -math.inf, math.nan, -1, 0, True, "8", "much", [8], torch.ones(2), object()]
)
def test_what_is_no_capacity_is_refused(capacity: Any) -> None:
    with pytest.raises(ArgumentError, match=r"A capacity is a positive number of bytes, or a size: .*\nGive capacity="):
        find_max_size(lambda size: size, capacity=capacity)


@pytest.mark.parametrize("trial", [None, 3, "trial", torch.ones(2)])
def test_a_trial_is_a_function(trial: Any) -> None:
    with pytest.raises(ArgumentError, match="trial is a function"):
        find_max_size(trial)


@pytest.mark.parametrize("arguments", [{"upper": 10.5}, {"upper": math.inf}, {"start": 2.5}, {"start": "8"}])
def test_sizes_are_whole_numbers(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="Sizes are whole numbers"):
        find_max_size(lambda size: None, **arguments)


@dataclass
class Scattering:
    """A trial whose need varies from call to call, by a normal share of it; reads its need."""

    limit: int
    noise: float
    base: float = 0.2
    reads: bool = True
    tried: list[tuple[int, bool]] = field(default_factory=list)  # (size, whether it fitted)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.limit)

    def need(self, size: int) -> float:
        """Mean share of the capacity."""
        return affine(self.base)(size / (self.limit + 0.5))

    def __call__(self, size: int) -> float | None:
        need = self.need(size) * (1 + self.chance.gauss(0, self.noise))
        self.tried.append((size, need <= 1))
        if need > 1:
            raise MemoryError
        return need * CAPACITY if self.reads else None


def share_that_mostly_fails(noise: float, *, reads: bool, **options: int) -> float:
    """The share of searches whose size fails in more than half of later trials: its mean need exceeds the capacity."""
    trials = [Scattering(limit, noise, reads=reads) for limit in spread_limits() if limit >= 20]
    found = [find_max_size(trial, capacity=CAPACITY if reads else None, **options) for trial in trials]
    return mean(trial.need(search.size) > 1 for trial, search in zip(trials, found, strict=True))


@pytest.mark.parametrize("reads", [True, False], ids=["with readings", "without readings"])
@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_where_trials_scatter_the_size_leaves_room(noise: float, reads: bool) -> None:
    assert share_that_mostly_fails(noise, reads=reads, confirm=1) > 0.15
    assert share_that_mostly_fails(noise, reads=reads) <= 0.05


@pytest.mark.parametrize("limit", [1, 5, 100, 6_000, 2**21])
def test_without_readings_a_size_is_tried_twice_more(limit: int) -> None:
    once = find_max_size(device(limit), confirm=1)
    assert find_max_size(device(limit)) == replace(once, trials=once.trials + 2)


@pytest.mark.parametrize(("limit", "more"), [(1, 1), (5, 0), (100, 0), (6_000, 0), (2**21, 0)])
def test_a_reading_that_the_others_foretell_is_not_repeated(limit: int, more: int) -> None:
    once = find_max_size(device(limit), capacity=CAPACITY, confirm=1)
    assert find_max_size(device(limit), capacity=CAPACITY) == replace(once, trials=once.trials + more)


def test_an_affine_law_is_found_in_four_trials() -> None:
    trials = [find_max_size(device(limit), capacity=CAPACITY).trials for limit in (20, 100, 1_000, 20_000)]
    assert max(trials) <= 4


def test_readings_on_both_sides_of_their_curve_leave_room_before_memory_runs_out() -> None:
    trials = [Scattering(limit, 0.02) for limit in range(100, 3_000, 100)]
    searches = [find_max_size(trial, capacity=CAPACITY) for trial in trials]
    assert mean(search.ooms for search in searches) < 1.2
    assert mean(search.trials for search in searches) < 9


def test_readings_that_scatter_far_below_the_capacity_take_no_room() -> None:
    search = find_max_size(limited(2**21, lambda size, count: 0.5 + 0.01 * (count % 2)), capacity=1.0)
    assert search.size == 2**20


def test_scatter_at_the_smallest_size_does_not_rule_it_out() -> None:
    assert find_max_size(limited(1, lambda size, count: 0.97 + 0.01 * (count % 2)), capacity=1.0).size == 1


@pytest.mark.parametrize("reads", [True, False], ids=["with readings", "without readings"])
@given(seed=st.integers(0, 2**32), fitting=st.floats(0, 1), confirm=st.integers(1, 6) | st.none())
def test_the_search_ends_at_a_size_that_fitted_in_a_row_however_trials_fail(
    seed: int, fitting: float, reads: bool, confirm: int | None
) -> None:
    chance, tried = random.Random(seed), []

    def trial(size: int) -> float | None:
        tried.append((size, chance.random() < fitting))
        if not tried[-1][1]:
            raise MemoryError
        return chance.random() if reads else None

    search = find_max_size(trial, capacity=1.0, confirm=confirm)
    assert (search.trials, search.ooms) == (len(tried), sum(not fitted for _, fitted in tried))
    assert search.trials <= 100 + 25 * (confirm or 3)
    # A reading may be the one that the others foretell, by chance, and is not repeated then.
    times = confirm or (1 if reads else 3)
    # A search does not try what it knows to fit: the first of them may lie before other sizes.
    if search.size:
        own = [fitted for size, fitted in tried if size == search.size]
        assert own[-times:] == [True] * times
        assert tried[1 - times :] == [(search.size, True)] * (times - 1) or times == 1


def test_a_device_that_others_fill_after_the_search_ends_it_soon() -> None:
    tried: list[int] = []

    def trial(size: int) -> None:
        tried.append(size)
        if 2**20 in tried[:-1]:
            raise MemoryError

    assert find_max_size(trial).size == 0
    assert len(tried) <= 45


@pytest.mark.parametrize("confirm", [0, -1, 1.5, "2"])
def test_a_confirmation_by_no_trial_is_refused(confirm: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        find_max_size(device(10), confirm=confirm)
    assert "confirmed by at least 1 trial" in refused.value.rule
    assert repr(confirm) in refused.value.value
    assert refused.value.remedy


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

    def probed(self, slack: float = 0.0) -> tuple[ProbeFit, BatchCosts]:
        """Fits to what the probes show of the straight law."""
        probed = fit_by_probes(lambda p: int(straight(p)), GRAPHS, COUNTS, ProbeBounds(capacity_bytes=self.capacity))
        self.probed_cost = probed.largest_cost
        return replace(probed, slack_bytes=slack), BatchCosts(COUNTS, GRAPHS, probed.model.coefficients)

    def find(
        self,
        *,
        upper: float = 1_000 * GIB,
        slack: float = 0.0,
        has_time: Callable[[float], bool] = lambda cost: True,
    ) -> SearchResult:
        """Probes, then searches; only trials are in `fitted`."""
        probed, order = self.probed(slack)
        bounds = SearchBounds(upper=upper, capacity_bytes=self.capacity, has_time=has_time)
        return find_phase_limit(probed, self, order, bounds)

    def confirm(self, known: RememberedLimit, *, upper: float = 1_000 * GIB) -> SearchResult | None:
        probed, order = self.probed()
        return confirm_limit(probed, self, order, known, upper=upper)

    def filled(self, limit: SearchResult) -> float:
        """Share of the capacity that a batch at the limit takes, were there one of exactly its cost."""
        return (BASE + limit.tuned_limit) / self.capacity


def assert_tried(device: Device, limit: SearchResult) -> None:
    assert limit.trials == len(device.fitted) + len(device.failed)
    assert limit.ooms == len(device.failed)
    assert limit.tuned_limit == pytest.approx(max([device.probed_cost, *device.fitted]), rel=1e-6)
    assert not any(device.probed_cost < cost <= limit.tuned_limit for cost in device.failed)


@pytest.mark.parametrize("capacity_gib", [0.5, 1.5, 2.2, 64.0])
def test_a_batch_without_time_for_a_trial_is_predicted_up_to_half_of_the_device(capacity_gib: float) -> None:
    device = Device(capacity_gib * GIB)
    limit = device.find(upper=GIB, has_time=lambda cost: False)
    half = 0.5 * device.capacity - BASE
    assert limit.tuned_limit == pytest.approx(min(half, GIB), rel=1e-3)
    assert (limit.capped, limit.trials) == (True, 0)
    assert limit.untried == (pytest.approx(min(0.97 * device.capacity - BASE, GIB), rel=0.05) if half < GIB else 0)


def test_a_search_lets_go_of_what_it_has_measured_without_a_garbage_collection() -> None:
    device = Device()
    gone = weakref.ref(device)
    gc.disable()
    try:
        device.find(upper=GIB)
        del device
        # Else the gradients of training would take memory while evaluation is measured.
        assert gone() is None
    finally:
        gc.enable()


def test_half_of_a_device_that_probes_have_filled_is_not_predicted() -> None:
    device = Device(4 * BASE)
    limit = device.find(upper=GIB, has_time=lambda cost: False)
    assert (limit.tuned_limit, limit.capped) == (pytest.approx(device.probed_cost), True)
    assert limit.untried > limit.tuned_limit


@pytest.mark.parametrize("bend", [1e-9, 4e-9, -3e-10])
def test_the_interval_between_small_and_large_batches_holds_memory_that_bends(bend: float) -> None:
    def peak_of(cost: float) -> float:
        return BASE + cost + bend * cost**2

    device = Device(16 * GIB, law=lambda positions: peak_of(straight(positions) - BASE))
    limit = device.find(upper=GIB)
    assert limit.tuned_limit == pytest.approx(GIB, rel=1e-3)
    assert limit.apart_bytes(limit.tuned_limit) == 0
    for share in (0.1, 0.3, 0.5, 0.9, 1.0):
        cost = share * limit.tuned_limit
        ends = sorted((limit.peak_bytes(cost), limit.peak_bytes(cost) + limit.apart_bytes(cost)))
        assert ends[0] - limit.half_width(cost) <= peak_of(cost) <= ends[1] + limit.half_width(cost)


def test_half_of_a_device_on_which_memory_ran_out_before_is_not_predicted() -> None:
    device = Device(law=lambda positions: straight(positions) * (3 if straight(positions) > 700 * MIB else 1))
    limit = device.find(has_time=lambda cost: not device.failed)
    assert_tried(device, limit)
    assert (limit.ooms, limit.tuned_limit) == (1, pytest.approx(device.probed_cost))


def test_memory_that_features_do_not_explain_is_not_predicted_beyond_the_probes() -> None:
    device = Device(64 * GIB)
    probed, order = device.probed()
    probed = replace(probed, model=replace(probed.model, relative_residual=0.5))
    for upper, untried in ((GIB, GIB), (0.5 * probed.largest_cost, 0.0)):
        bounds = SearchBounds(upper=upper, capacity_bytes=device.capacity, has_time=lambda cost: False)
        limit = find_phase_limit(probed, device, order, bounds)
        assert (limit.tuned_limit, limit.capped, limit.untried) == (probed.largest_cost, True, untried)


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


def test_a_trial_below_the_peak_of_no_batch_keeps_the_slope_of_the_probes() -> None:
    device = Device(law=lambda positions: 0.9 * BASE)
    limit = device.find(upper=500 * MIB)
    assert (limit.trials, limit.measured_ratio) == (1, 1.0)


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


def test_a_search_without_time_for_a_full_batch_tries_smaller_ones_and_names_what_it_left_out() -> None:
    device = Device(512 * MIB)
    limit = device.find(has_time=lambda cost: cost <= 300 * MIB)
    assert_tried(device, limit)
    assert 200 * MIB <= limit.tuned_limit <= 300 * MIB
    assert limit.untried > 390 * MIB
    assert limit.capped


def test_a_search_that_tries_less_than_half_of_the_device_predicts_that_half() -> None:
    device = Device()
    limit = device.find(has_time=lambda cost: cost <= 600 * MIB)
    assert max(device.fitted) <= 600 * MIB
    assert limit.tuned_limit == pytest.approx(GIB - BASE, rel=1e-3)
    assert (limit.capped, limit.untried > GIB) == (True, True)


def test_a_limit_that_is_nearly_found_when_time_runs_out_counts_as_found() -> None:
    device = Device(law=lambda positions: BASE + 1.02 * (straight(positions) - BASE))
    limit = device.find(has_time=lambda cost: not device.fitted)
    assert_tried(device, limit)
    assert limit.trials == 1
    assert limit.tuned_limit < limit.untried < 1.1 * limit.tuned_limit
    assert not limit.capped


@given(seconds=st.lists(st.booleans(), max_size=30), capacity=st.floats(64.0 * MIB, 40.0 * GIB))
def test_however_time_runs_out_no_limit_of_more_than_half_is_given_that_was_not_tried(
    seconds: list[bool], capacity: float
) -> None:
    device, left = Device(capacity), iter(seconds)
    limit = device.find(has_time=lambda cost: next(left, False))
    if limit.trials or limit.tuned_limit == device.probed_cost:
        assert_tried(device, limit)
    else:
        assert device.filled(limit) <= 0.501


def known_of(limit: SearchResult, **changed: Any) -> RememberedLimit:
    known = RememberedLimit(tuned_limit=limit.tuned_limit, capped=limit.capped, base_bytes=limit.model.base_bytes,
                       measured_ratio=limit.measured_ratio)  # fmt: skip
    return replace(known, **changed)


@pytest.mark.parametrize("capacity_mib", [256, 300, 512, 777, 1_000, 2_048])
def test_a_known_limit_is_confirmed_by_one_trial(capacity_mib: int) -> None:
    first = Device(capacity_mib * MIB).find()
    device = Device(capacity_mib * MIB)
    again = device.confirm(known_of(first))
    assert again == replace(first, trials=1, ooms=0, confirmed=True)
    assert len(device.fitted) == 1


def test_of_a_known_limit_no_more_is_tried_than_is_wanted_now() -> None:
    first = Device().find()
    again = Device().confirm(known_of(first), upper=500 * MIB)
    assert again is not None
    assert again.capped
    assert again.tuned_limit == pytest.approx(500 * MIB, rel=0.01)


@pytest.mark.parametrize(
    ("device", "upper", "changed"),
    [
        (Device(law=lambda positions: straight(positions) - 0.1 * GIB), 10 * GIB, {}),
        (Device(law=lambda positions: BASE + 0.9 * (straight(positions) - BASE)), 10 * GIB, {}),
        (Device(capacity=1.5 * GIB), 10 * GIB, {}),
        (Device(), GIB, {"tuned_limit": 500.0 * MIB, "capped": True}),
        (Device(), 10 * GIB, {"tuned_limit": 1.0 * MIB}),
    ],
    ids=["other weights", "other samples", "other memory", "not searched so far", "less than a probe"],
)
def test_a_known_limit_of_something_else_is_not_confirmed(
    device: Device, upper: float, changed: dict[str, Any]
) -> None:
    assert device.confirm(known_of(Device().find(), **changed), upper=upper) is None


def test_numbers_beyond_any_float_are_no_readings() -> None:
    assert find_max_size(lambda size: 10**400, upper=64, capacity=100).size == 64
    with pytest.raises(ArgumentError, match="A capacity is a positive number of bytes"):
        find_max_size(lambda size: None, capacity=10**400)
