from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train.errors import DoesNotFitError
from can_train.fit.cost_model import OUT_OF_ROOM, OUT_OF_TIME, UNWANTED, CostModel, ProbeFit, SearchResult
from can_train.fit.explore import (
    LATER_ROUNDS,
    PROBE_SHARE,
    ROUNDS,
    SMALLEST_PROBE,
    ProbeBounds,
    extreme_samples,
    fit_by_probes,
    model_does_not_fit,
)
from can_train.fit.packing import batch_totals
from can_train.fit.run_plan import limits_notices
from can_train.task import Feature
from fakes.device_limits import limits

GIB = 2**30
GRAPHS = (Feature("nodes"), Feature("edges"))
TEXTS = (Feature("tokens", padding=1), Feature("attention", padding=2))
BASE, A_NODE, AN_EDGE = 40e6, 20_000.0, 3_000.0

Positions = NDArray[np.int64]


def drawn(size: int = 2_000) -> NDArray[np.float64]:
    """Nodes and edges of graphs, or twice the tokens of texts."""
    rng = np.random.default_rng(0)
    nodes = rng.integers(10, 60, size).astype(np.float64)
    return np.stack([nodes, np.round(nodes * rng.uniform(1.5, 4.0, size))], axis=1)


COUNTS = drawn()
TOKENS = np.repeat(COUNTS[:, :1], 2, axis=1)


class Device:
    """Runs batches under a law, out of memory above its capacity."""

    def __init__(self, law: Callable[[Positions], float], capacity: float = 16 * GIB) -> None:
        self._law = law
        self._capacity = capacity
        self.peaks: list[float] = []
        self.sizes: list[int] = []
        self.fitting: set[int] = set()

    def __call__(self, positions: Positions) -> int:
        self.sizes.append(len(positions))
        peak = self._law(positions)
        if peak > self._capacity:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.peaks.append(peak)
        self.fitting.add(len(positions))
        return int(peak)

    def probed(
        self, features: tuple[Feature, ...] = GRAPHS, counts: NDArray[np.float64] = COUNTS, kernel_bytes: float = 0.0
    ) -> ProbeFit:
        return fit_by_probes(
            self, features, counts, ProbeBounds(capacity_bytes=self._capacity, kernel_bytes=kernel_bytes)
        )


def straight(positions: Positions) -> float:
    nodes, edges = COUNTS[positions].sum(axis=0)
    return float(BASE + A_NODE * nodes + AN_EDGE * edges)


def uneven(sizes: NDArray[np.float64], positions: Positions) -> float:
    return BASE + A_NODE * float(sizes[positions].sum())


def assert_law_found(probed: ProbeFit, base: float = BASE) -> None:
    assert probed.model.explains
    assert probed.model.base_bytes == pytest.approx(base, rel=1e-3)
    assert probed.model.coefficients == pytest.approx((A_NODE, AN_EDGE), rel=1e-3)


def test_two_rounds_that_agree_are_enough() -> None:
    device = Device(straight)
    assert_law_found(device.probed())
    assert set(device.sizes) == {SMALLEST_PROBE, 2 * SMALLEST_PROBE, 4 * SMALLEST_PROBE}
    assert len(device.sizes) <= 18


def test_padded_features_are_found_too() -> None:
    device = Device(lambda positions: 5e6 + float(batch_totals(TEXTS, TOKENS[positions]) @ [2_000.0, 100.0]))
    probed = device.probed(TEXTS, TOKENS)
    assert probed.model.coefficients == pytest.approx((2_000, 100), rel=1e-3)


@pytest.mark.parametrize("plateau", [43e6, 45e6, 50e6, 60e6, 100e6], ids=lambda peak: f"{peak / 1e6:.0f} MB")
def test_memory_that_hides_the_law_of_small_batches_is_left_behind(plateau: float) -> None:
    device = Device(lambda positions: max(plateau, straight(positions)))
    assert_law_found(device.probed())
    assert min(device.peaks) == plateau


@pytest.mark.parametrize("plateau", [50e6, 60e6, 100e6], ids=lambda peak: f"{peak / 1e6:.0f} MB")
def test_batches_too_small_for_the_law_have_the_peaks_of_such_probes(plateau: float) -> None:
    device = Device(lambda positions: max(plateau, straight(positions)))
    model = device.probed().model
    for size in (1, 4, 16, 64, 256, 1024):
        positions = np.arange(size)
        truth = max(plateau, straight(positions))
        predicted = model.peak_bytes(model.cost(COUNTS[positions]))
        assert 0.999 * truth <= predicted <= 1.25 * truth
        assert predicted == pytest.approx(truth, rel=1e-3) or straight(positions) < 1.5 * plateau


def test_peaks_that_never_grow_are_given_up_after_the_last_round() -> None:
    device = Device(lambda positions: 500e6)
    probed = device.probed()
    assert max(device.sizes) == 2 * SMALLEST_PROBE * ROUNDS[-1]
    assert (*probed.model.coefficients, probed.model.base_bytes) == pytest.approx((1.0, 1.0, 500e6))


def test_gradients_that_hide_the_law_of_a_thousand_samples_are_left_behind() -> None:
    hidden = 800 * A_NODE * float(COUNTS[:, 0].mean())
    device = Device(lambda positions: max(straight(positions), BASE + hidden + 0.1 * (straight(positions) - BASE)))
    assert device.probed().model.base_bytes != pytest.approx(BASE, rel=0.01)
    bounds = ProbeBounds(capacity_bytes=16 * GIB, gradient_bytes=hidden / 3)
    assert_law_found(fit_by_probes(device, GRAPHS, COUNTS, bounds))
    assert max(device.sizes) <= 2 * SMALLEST_PROBE * LATER_ROUNDS[-1]


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("kernel_bytes", [20e6, 138e6], ids=["T4", "H100"])
def test_memory_of_kernels_that_grows_with_small_batches_only_is_left_behind(share: float, kernel_bytes: float) -> None:
    large = np.resize(np.arange(len(COUNTS)), 20_000)
    truth = straight(large) + kernel_bytes

    def predicted(kernel_bytes: float) -> float:
        model = device.probed(kernel_bytes=kernel_bytes).model
        assert model.explains
        return model.peak_bytes(model.cost(COUNTS[large]))

    device = Device(lambda positions: straight(positions) + min(share * (straight(positions) - BASE), kernel_bytes))
    assert predicted(0.0) > (1 + 0.8 * share) * truth
    assert predicted(kernel_bytes) == pytest.approx(truth, rel=1e-3)
    assert max(device.peaks) <= PROBE_SHARE * 16 * GIB


@pytest.mark.parametrize("spread", [0.5, 1.5])
@pytest.mark.parametrize("highest", [1, 60], ids=["samples alone", "anything"])
def test_features_that_do_not_explain_the_peaks_are_found(spread: float, highest: int) -> None:
    found = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sizes = np.ceil(20 * rng.lognormal(0, spread, 2_000))
        device = Device(partial(uneven, sizes))
        lie = rng.integers(1, highest, (2_000, 1), endpoint=True).astype(np.float64)
        found += not device.probed((Feature("nodes"),), lie).model.explains
        assert device.probed((Feature("nodes"),), sizes[:, None]).model.explains
    assert found >= 18


def test_a_law_that_the_features_lack_a_power_of_is_not_explained() -> None:
    device = Device(lambda positions: 5e6 + 100 * len(positions) * TOKENS[positions, 0].max() ** 2)
    assert not device.probed((Feature("tokens", padding=1),), TOKENS[:, :1]).model.explains
    assert device.probed((Feature("attention", padding=2),), TOKENS[:, :1]).model.explains


def test_slow_probes_of_an_unexplained_law_end_where_larger_ones_would_show_no_more() -> None:
    sizes = np.ceil(20 * np.random.default_rng(0).lognormal(0, 1, 2_000))
    gradients = A_NODE * float(sizes.mean())

    def largest(*, has_time: bool) -> int:
        device = Device(partial(uneven, sizes))
        bounds = ProbeBounds(capacity_bytes=16 * GIB, gradient_bytes=gradients, has_time=lambda: has_time)
        assert not fit_by_probes(device, (Feature("samples"),), np.ones((2_000, 1)), bounds).model.explains
        assert max(device.peaks) > BASE + 32 * gradients
        return max(device.sizes)

    assert largest(has_time=True) == 2 * SMALLEST_PROBE * ROUNDS[-1]
    assert largest(has_time=False) <= 2 * SMALLEST_PROBE * ROUNDS[3]


@pytest.mark.parametrize("wanted", [1, 8, 33])
def test_probes_are_no_larger_than_the_batches_that_are_wanted_where_weights_hide_the_line(wanted: int) -> None:
    device = Device(lambda positions: max(500e6, straight(positions)))
    bounds = ProbeBounds(
        capacity_bytes=16 * GIB, gradient_bytes=100e6, wanted=lambda model: model.cost(COUNTS[:wanted])
    )
    model = fit_by_probes(device, GRAPHS, COUNTS, bounds).model
    assert max(device.sizes) <= max(2 * wanted, 4 * SMALLEST_PROBE)
    assert (model.hidden, model.explains) == (UNWANTED, True)
    assert model.peak_bytes(model.cost(COUNTS[:wanted])) == pytest.approx(500e6, rel=1e-3)


def test_probes_that_features_do_not_explain_end_at_a_few_batches_that_are_wanted() -> None:
    device = Device(partial(uneven, np.ceil(20 * np.random.default_rng(0).lognormal(0, 1, 2_000))))
    bounds = ProbeBounds(capacity_bytes=16 * GIB, wanted=lambda model: 10 * model.coefficients[0])
    assert not fit_by_probes(device, (Feature("samples"),), np.ones((2_000, 1)), bounds).model.explains
    assert 40 <= max(device.sizes) <= 80


def test_probes_end_when_their_time_does_and_say_that_no_line_was_seen() -> None:
    device = Device(lambda positions: max(500e6, straight(positions)))
    bounds = ProbeBounds(
        capacity_bytes=16 * GIB, gradient_bytes=100e6, allows=lambda samples: sum(device.sizes) + samples <= 200
    )
    model = fit_by_probes(device, GRAPHS, COUNTS, bounds).model
    assert sum(device.sizes) <= 200
    assert (model.hidden, model.explains) == (OUT_OF_TIME, False)


def test_a_line_that_no_probe_has_room_for_is_told_and_its_figures_are_not_printed() -> None:
    device = Device(lambda positions: max(99.9e6, straight(positions)), capacity=100e6)
    model = device.probed().model
    assert (model.hidden, model.explains, model.grows) == (OUT_OF_ROOM, False, False)
    # The trial of a search measures what the probes did not see.
    training = SearchResult(
        model=model, tuned_limit=30.0, capped=False, trials=3, measured_ratio=8e4, mean_totals=(1, 1)
    )
    (notice,) = limits_notices(replace(limits(0.2, 0.9), training=training))
    assert training.text(training.tuned_limit) == "97.6 MiB with the model"
    assert notice == (
        "How the memory of training grows with batches was not seen: "
        "the device has no room for larger batches; sizes rest on trials"
    )


def test_two_sizes_are_probed_however_long_they_take() -> None:
    device = Device(straight)
    bounds = ProbeBounds(capacity_bytes=16 * GIB, allows=lambda samples: False)
    assert_law_found(fit_by_probes(device, GRAPHS, COUNTS, bounds))
    assert set(device.sizes) == {SMALLEST_PROBE, 2 * SMALLEST_PROBE}


def test_the_largest_probe_is_the_first_reading_of_a_search() -> None:
    device = Device(straight)
    probed = device.probed()
    assert probed.largest_peak == pytest.approx(max(device.peaks), abs=1)
    assert probed.model.base_bytes + probed.largest_cost == pytest.approx(probed.largest_peak, rel=1e-4)


def test_probes_that_find_no_law_end_at_half_of_the_capacity() -> None:
    device = Device(straight, capacity=100e6)
    device.probed(GRAPHS, np.ones_like(COUNTS))
    over = [peak for peak in device.peaks if peak > PROBE_SHARE * 100e6]
    assert max(device.sizes) < 2 * SMALLEST_PROBE * ROUNDS[-1]
    assert 1 <= len(over) <= 3


def test_a_probe_that_runs_out_of_memory_ends_them_and_what_was_seen_counts() -> None:
    device = Device(straight, capacity=46e6)
    probed = device.probed()
    assert_law_found(probed)
    assert len(device.sizes) == len(device.peaks) + 1
    assert probed.largest_peak <= 46e6


def test_where_four_samples_are_too_much_single_ones_are_tried() -> None:
    device = Device(lambda positions: straight(positions) + 0.1 * GIB * len(positions), capacity=0.25 * GIB)
    probed = device.probed()
    assert device.sizes[0] == SMALLEST_PROBE
    assert device.fitting == {1, 2}
    assert probed.largest_peak <= 0.25 * GIB


def test_where_a_few_samples_do_not_fit_the_others_show_the_law() -> None:
    """The length of a batch's longest sample counts, not its square, which single samples could not tell."""
    lengths = np.random.default_rng(0).integers(1, 60, 100).astype(np.float64)
    lengths[::17] = 4_000
    features = tuple(Feature("length", padding=power) for power in (1, 2, 0))

    def padded(positions: Positions) -> float:
        return 30e3 + 3e3 * len(positions) * float(lengths[positions].max())

    for capacity in (4e6, 8e6):
        device = Device(padded, capacity=capacity)
        probed = device.probed(features, np.stack([lengths] * 3, axis=1))
        assert probed.model.explains
        linear, squared, summed = probed.model.coefficients
        assert linear == pytest.approx(3e3, rel=0.02)
        assert squared * 60 + summed <= 60


def test_a_device_that_holds_no_sample_is_an_error() -> None:
    with pytest.raises(DoesNotFitError, match="At least one training sample must fit"):
        Device(straight, capacity=BASE).probed()


def test_any_other_error_ends_the_probes() -> None:
    def broken(positions: Positions) -> int:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit_by_probes(broken, GRAPHS, COUNTS, ProbeBounds(capacity_bytes=GIB))


rows = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 400)), min_size=1, max_size=60)
all_counts = rows.map(lambda found: np.array(found, dtype=np.float64))


def graphs(size: int = 1_000) -> NDArray[np.float64]:
    """Nodes and edges that mostly go together, as graphs of traffic do."""
    rng = np.random.default_rng(0)
    nodes = rng.integers(20, 60, size).astype(np.float64)
    return np.stack([nodes, np.round(nodes * rng.uniform(1.8, 2.2, size))], axis=1)


def totals(counts: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    return np.stack([counts[positions].sum(axis=0) for positions in extreme_samples(counts, size)])


@given(counts=all_counts, size=st.integers(1, 20))
def test_probes_are_of_the_size_asked_for_and_one_is_twice_as_large(counts: NDArray[np.float64], size: int) -> None:
    probes = extreme_samples(counts, size)
    assert [len(probe) for probe in probes] == [size] * (len(probes) - 1) + [2 * size]
    assert all(0 <= position < len(counts) for probe in probes for position in probe)


@given(counts=all_counts, size=st.integers(1, 20))
def test_the_extremes_of_every_feature_are_among_them(counts: NDArray[np.float64], size: int) -> None:
    probes = extreme_samples(counts, size)
    for feature in counts.T:
        found = [feature[probe].sum() for probe in probes[:-1]]
        ordered = np.sort(feature)
        assert max(found) == np.resize(ordered[::-1][:size], size).sum()
        assert min(found) == np.resize(ordered[:size], size).sum()


def test_features_that_go_together_can_be_told_apart_by_the_probes_but_hardly_by_ordinary_batches() -> None:
    counts = graphs()
    chosen = totals(counts, SMALLEST_PROBE)
    ordinary = counts.reshape(-1, SMALLEST_PROBE, 2)[: len(chosen)].sum(axis=1)
    sparse_and_dense = np.sort(counts[:, 1] / counts[:, 0])[[SMALLEST_PROBE - 1, -SMALLEST_PROBE]]
    assert min(chosen[:, 1] / chosen[:, 0]) <= sparse_and_dense[0]
    assert max(chosen[:, 1] / chosen[:, 0]) >= sparse_and_dense[1]
    assert np.ptp(ordinary[:, 1] / ordinary[:, 0]) < 0.2
    assert np.linalg.matrix_rank(np.column_stack([np.ones(len(chosen)), chosen])) == 3


def test_padding_that_no_feature_tells_of_is_noticed_in_data_sorted_by_length() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(2, 80, 1_000)).astype(np.float64)

    def padded(positions: NDArray[np.int64]) -> int:
        return round(10_000 + 400 * len(positions) * lengths[positions].max())

    def fitted(feature: Feature) -> CostModel:
        return fit_by_probes(padded, [feature], lengths[:, None], ProbeBounds(capacity_bytes=2**30)).model

    assert not fitted(Feature("words")).explains
    assert fitted(Feature("words", padding=1)).explains


def test_no_probe_is_run_twice() -> None:
    probes = extreme_samples(np.array([[1.0, 1.0], [2.0, 4.0], [3.0, 9.0]]), 3)
    assert [len(probe) for probe in probes] == [3, 3, 6]


def test_a_feature_that_is_the_same_everywhere_asks_for_no_probe() -> None:
    assert len(extreme_samples(np.full((50, 2), 7.0), 4)) == 2


def test_few_samples_come_again() -> None:
    assert [probe.tolist() for probe in extreme_samples(np.array([[5.0]]), 3)] == [[0] * 3, [0] * 6]


@pytest.mark.parametrize(
    ("need_mib", "foreign_mib", "found"),
    [
        (20, 0, "they need 20.0 MiB, the device has 18.0 MiB."),
        (17, 0, "the device has 18.0 MiB, too little for the whole pages in which"),
        (17, 4, "the device has 18.0 MiB, of which other processes hold 4.0 MiB."),
    ],
)
def test_a_model_that_does_not_fit_is_told_why(need_mib: int, foreign_mib: int, found: str) -> None:
    assert found in str(model_does_not_fit(need_mib * 2**20, 18 * 2**20, foreign_mib * 2**20))
