import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from can_train.fit.cost_model import (
    AGREED,
    ALLOCATION_QUANTUM,
    UNSEEN,
    CostModel,
    fit_cost_model,
    nonnegative_least_squares,
)
from can_train.fit.packing import BatchCosts, batch_totals
from can_train.task import SAMPLES, Feature

MIB = 2**20
Counts = NDArray[np.float64]
GRAPHS = (Feature("nodes"), Feature("edges"))
THREE = (*GRAPHS, Feature("graphs"))

# Eight probes of nodes, edges and graphs: sparse and dense ones, small and large ones.
TOTALS = np.array(
    [[40, 80, 4], [40, 400, 4], [200, 300, 4], [200, 4_000, 4],
     [80, 160, 8], [400, 600, 8], [90, 500, 8], [900, 9_000, 16]],
    dtype=np.float64,
)  # fmt: skip

rows_of_two = st.tuples(st.floats(1.0, 10**4), st.floats(1.0, 10**4))
coefficients = st.just(0.0) | st.floats(10.0, 10**6)
laws = st.tuples(coefficients, coefficients, coefficients)


def fitted(base: float, law: tuple[float, ...], noise: ArrayLike = 0.0) -> CostModel:
    totals = TOTALS[:, : len(law)]
    return fit_cost_model(THREE[: len(law)], totals, (base + totals @ np.array(law)) * (1 + np.asarray(noise)))


def simple(peaks: Sequence[float], totals: Sequence[float]) -> CostModel:
    return fit_cost_model((Feature("tokens"),), np.array(totals)[:, None], np.array(peaks))


@given(st.data(), st.integers(1, 12), st.integers(1, 5))
def test_least_squares_without_negative_values_are_scipys(data: st.DataObject, rows: int, columns: int) -> None:
    entries = st.integers(-4, 4)
    matrix = data.draw(arrays(np.float64, (rows, columns), elements=entries))
    target = data.draw(arrays(np.float64, rows, elements=entries))
    solution = nonnegative_least_squares(matrix, target)
    _, distance = nnls(matrix, target)
    assert solution.min() >= 0
    assert np.linalg.norm(matrix @ solution - target) == pytest.approx(distance, abs=1e-9)


@given(base=st.floats(0.0, 10**9), law=laws.filter(any))
def test_a_straight_line_is_recovered(base: float, law: tuple[float, ...]) -> None:
    model = fitted(base, law)
    largest = base + float((TOTALS @ np.array(law)).max())
    assert model.base_bytes == pytest.approx(base, abs=1e-8 * largest)
    assert (np.array(model.coefficients) * TOTALS.max(axis=0)).tolist() == pytest.approx(
        (np.array(law) * TOTALS.max(axis=0)).tolist(), abs=1e-7 * largest
    )
    assert model.sigma_bytes == pytest.approx(ALLOCATION_QUANTUM, abs=1e-8 * largest)


@given(
    base=st.floats(0.0, 10**9),
    law=laws,
    noise=st.lists(st.floats(-0.5, 0.5), min_size=len(TOTALS), max_size=len(TOTALS)),
)
def test_no_coefficient_is_negative_whatever_the_peaks(base: float, law: tuple[float, ...], noise: list[float]) -> None:
    model = fitted(base + 1, law, noise)
    assert min(model.base_bytes, *model.coefficients) >= 0
    assert max(model.coefficients) > 0


@given(base=st.floats(1.0, 10**9), law=laws.filter(any), noise=st.lists(st.floats(-0.5, 0.5), min_size=8, max_size=8))
def test_no_other_law_without_negative_coefficients_fits_better(
    base: float, law: tuple[float, ...], noise: list[float]
) -> None:
    peaks = (base + TOTALS @ np.array(law)) * (1 + np.array(noise))
    model = fit_cost_model(THREE, TOTALS, peaks)
    assume(model.coefficients != (1.0, 1.0, 1.0))  # what stands for nothing that grows
    scale = TOTALS.max(axis=0)
    rows = np.column_stack([np.ones(len(TOTALS)), TOTALS / scale])
    solution = np.array([model.base_bytes, *(np.array(model.coefficients) * scale)]) / peaks.max()
    uphill = rows.T @ (rows @ solution - peaks / peaks.max())
    # Karush, Kuhn and Tucker: no direction goes down, and along what is in use there is none that goes up either.
    assert (uphill > -1e-6).all()
    assert (np.abs(uphill[solution > 1e-6]) < 1e-6).all()


def test_a_base_of_nearly_nothing_does_not_cost_the_law_its_slope() -> None:
    model = simple([0.97e6, 1.99e6, 4e6, 8.03e6], [1, 2, 4, 8])
    assert model.base_bytes == 0
    assert model.coefficients[0] == pytest.approx(1e6, rel=0.01)


def test_peaks_that_do_not_grow_leave_a_byte_a_unit() -> None:
    model = simple([50e6, 50e6, 50e6], [10, 20, 30])
    assert (*model.coefficients, model.base_bytes) == pytest.approx((1.0, 50e6))
    assert model.explains


@given(totals=st.lists(rows_of_two, min_size=1, max_size=20), peak=st.integers(1, 10**11))
def test_round_off_is_no_coefficient(totals: list[tuple[float, float]], peak: int) -> None:
    model = fit_cost_model(GRAPHS, np.array(totals), np.full(len(totals), float(peak)))
    shares = np.array(model.coefficients) * np.array(totals).max(axis=0) / peak
    assert model.coefficients == (1.0, 1.0) or (shares[shares > 0] > 1e-9).all()


def test_peaks_that_fall_leave_a_byte_a_unit_and_are_not_explained() -> None:
    model = simple([90e6, 80e6, 70e6], [10, 20, 30])
    assert model.coefficients == (1.0,)
    assert not model.explains


SENTENCES = (Feature("tokens", padding=1), Feature("tokens", padding=2), SAMPLES)
LENGTHS = st.lists(st.integers(3, 200), min_size=4, max_size=40).filter(lambda lengths: len(set(lengths)) > 3)


def batches_of(counts: Counts) -> Counts:
    """Returns the feature totals of some batches of sentences."""
    batches = [counts[order[:size]] for order in (np.argsort(counts[:, 0]), np.arange(len(counts)))
               for size in (1, 2, 3, len(counts))]  # fmt: skip
    return np.stack([batch_totals(SENTENCES, batch) for batch in batches])


def tell_apart(totals: Counts) -> bool:
    """Whether batches tell all features apart, and from the base."""
    scaled = np.column_stack([np.ones(len(totals)), totals / totals.max(axis=0)])
    return bool(np.linalg.matrix_rank(scaled, tol=1e-3) == scaled.shape[1])


def of_sentences(lengths: Sequence[int], *, left_out: float, squared: float = 0.0) -> tuple[CostModel, Counts]:
    """Fits to batches of sentences whose last words are left out; returns the counts of the sentences, too."""
    counts = np.array([[length, length, 1.0] for length in lengths])
    totals = batches_of(counts)
    peaks = MIB + totals @ [10_000.0, squared, -10_000.0 * left_out]
    return fit_cost_model(SENTENCES, totals, peaks), counts


@given(lengths=LENGTHS, left_out=st.floats(1.0, 2.0), squared=st.just(0.0) | st.floats(10.0, 100.0))
def test_words_that_are_left_out_of_each_sentence_are_found(
    lengths: list[int], left_out: float, squared: float
) -> None:
    model, counts = of_sentences(lengths, left_out=left_out, squared=squared)
    assume(tell_apart(batches_of(counts)))
    assert model.relative_residual <= AGREED
    mixed = batch_totals(SENTENCES, counts[::2])
    truth = float(mixed @ [10_000.0, squared, -10_000.0 * left_out])
    assert model.cost(counts[::2]) == pytest.approx(truth, rel=0.02)


@given(lengths=LENGTHS, left_out=st.floats(0.0, 4.0), others=st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_no_sample_costs_less_than_nothing_and_no_larger_batch_less(
    lengths: list[int], left_out: float, others: list[int]
) -> None:
    model, _ = of_sentences(lengths, left_out=left_out)
    costs = BatchCosts.priced(model, np.array([[length, length, 1.0] for length in others]))
    assert costs.each().min() >= 0
    growing = [costs.cost(0, stop) for stop in range(len(others) + 1)]
    assert growing == sorted(growing)


def test_a_line_that_holds_has_no_negative_coefficient() -> None:
    model, _ = of_sentences([5, 9, 20, 40, 41], left_out=0.001)
    assert min(model.coefficients) >= 0


def test_a_single_probe_is_priced_as_it_was() -> None:
    model = simple([8e6], [4])
    assert model.base_bytes + 4 * model.coefficients[0] == pytest.approx(8e6)


def test_features_that_cannot_be_told_apart_share_their_coefficient() -> None:
    totals = np.array([[1.0, 1.0], [2.0, 2.0], [5.0, 5.0]])
    model = fit_cost_model(GRAPHS, totals, 7 + totals[:, 0] * 30)
    assert model.coefficients == pytest.approx((15, 15))


def test_a_feature_that_nothing_has_costs_nothing() -> None:
    totals = np.array([[1.0, 0.0], [2.0, 0.0], [5.0, 0.0]])
    assert fit_cost_model(GRAPHS, totals, totals[:, 0] * MIB).coefficients == pytest.approx((MIB, 0))


def test_features_of_very_different_size_are_both_found() -> None:
    totals = np.array([[1e0, 1e9], [2e0, 1e9], [3e0, 5e9], [9e0, 7e9], [4e0, 2e9]])
    model = fit_cost_model(GRAPHS, totals, totals @ [1e8, 0.5])
    assert model.coefficients == pytest.approx((1e8, 0.5))


@pytest.mark.parametrize(("bend", "explains"), [(0.0, True), (0.01, True), (1.0, False)])
def test_a_law_that_bends_is_not_explained(bend: float, explains: bool) -> None:
    sizes = np.array([4.0, 8.0, 16.0, 32.0])
    peaks = MIB * (1 + sizes + bend * sizes**2 / 32)
    assert simple(peaks.tolist(), sizes.tolist()).explains is explains


def test_a_feature_that_says_nothing_is_not_explained() -> None:
    peaks = [10 * MIB, 30 * MIB, 20 * MIB, 40 * MIB]
    assert not simple(peaks, [4, 4, 4, 4]).explains


def test_the_cost_of_a_batch_is_what_its_features_add_to_the_base() -> None:
    padded = (Feature("tokens", padding=1),)
    model = fit_cost_model(padded, np.array([[8.0], [24.0], [64.0]]), np.array([108.0, 124.0, 164.0]))
    assert model.cost(np.array([[3.0], [5.0]])) == pytest.approx(10)
    assert model.cost(np.empty((0, 1))) == 0


def test_the_interval_grows_with_extrapolation() -> None:
    noise = np.random.default_rng(0).normal(0, 0.002, len(TOTALS))
    model = fitted(MIB, (1_000.0, 200.0), noise)
    widths = [model.half_width(scale * TOTALS[0, :2]) for scale in (1, 10, 100, 1_000)]
    unseen = [UNSEEN * scale * TOTALS[0, :2] @ np.array(model.coefficients) for scale in (1, 10, 100, 1_000)]
    beyond = [width - share for width, share in zip(widths, unseen, strict=True)]
    assert beyond == sorted(beyond)
    assert beyond[3] > 50 * beyond[0]


def test_the_interval_holds_what_it_says() -> None:
    target, held, widths = 20 * TOTALS[-1], 0, []
    for seed in range(200):
        model = fitted(50 * MIB, (9e3, 800.0, 3e4), np.random.default_rng(seed).normal(0, 0.001, len(TOTALS)))
        error = model.base_bytes + target @ np.array(model.coefficients) - (50 * MIB + target @ [9e3, 800.0, 3e4])
        widths.append(model.half_width(target))
        held += abs(error) <= widths[-1]
    assert held >= 0.97 * 200
    assert np.mean(widths) <= 0.15 * float(target @ [9e3, 800.0, 3e4])


def test_a_model_survives_its_file() -> None:
    model = replace(fitted(MIB, (1_000.0, 200.0), 0.01 * np.arange(len(TOTALS))), below=((1.0, 2.0), (3.0, 4.0)))
    assert msgspec.convert(json.loads(json.dumps(asdict(model))), CostModel) == model
