"""The arithmetic of the claims' tables, without the measurements."""

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench import measure_claims
from bench.measure_claims import (
    Trained,
    batches_to_oom,
    described_divisor,
    doubling_finder,
    lost_share,
    remainder_weight,
)

MIB = 2**20


def test_the_examples_of_the_algorithms_hold() -> None:
    done = doctest.testmod(measure_claims)
    assert done.attempted
    assert not done.failed


@given(st.integers(2, 5_000), st.integers(2, 20_000))
def test_doubling_returns_the_largest_power_of_two_that_was_seen_to_fit(limit: int, upper: int) -> None:
    found = doubling_finder(lambda size: size <= limit, upper=upper)
    assert found.size <= min(limit, upper) < 2 * found.size
    assert found.trials <= found.size.bit_length()


def test_nothing_fits_where_two_do_not() -> None:
    assert doubling_finder(lambda size: False, upper=100) == (0, 1)


@given(st.integers(2, 5_000), st.integers(1, 200))
def test_the_described_divisor_keeps_the_batch_and_may_be_one_too_large(batch: int, largest: int) -> None:
    size, parts = described_divisor(batch, largest)
    assert size * parts == batch
    assert size <= largest + 1


def test_a_remainder_weighs_as_many_of_the_usual_micro_batches_as_it_has() -> None:
    assert [remainder_weight(samples, 8, 4) for samples in (32, 33, 41, 57, 64)] == [1.0, 0.25, 0.5, 1.0, 1.0]


def test_a_card_that_one_batch_in_a_hundred_exceeds_runs_out_after_a_hundred() -> None:
    peaks = np.arange(1_000.0)
    assert batches_to_oom(peaks, 989.0) == 100.0
    assert measure_claims.never_or_count(batches_to_oom(peaks, 999.0)) == "never"


def test_lost_samples_are_those_of_batches_that_do_not_fit() -> None:
    assert lost_share([(10, True), (10, True)]) == 0.0
    assert lost_share([(10, False), (30, True)]) == 0.25


def test_the_divisor_table_shows_the_prime_and_the_one_too_many() -> None:
    rows = {row[0]: row[1:] for row in measure_claims.divisors()}
    assert rows["127"] == ["127 × 1", "2 of 64 or 63"]
    assert rows["130"][0] == "2 × 65 (does not fit)"


def test_a_way_to_accumulate_is_compared_with_never() -> None:
    def trained(*peaks: int) -> Trained:
        result = {"judgement": {"test": {"test": {"model": {"w1_mean": 0.25}}}}}
        return Trained(died=False, steps=2, samples_per_second=9.0, parts=(1, 1), peaks=peaks, result=result)

    cells = measure_claims.muon_cells(trained(5 * MIB, 6 * MIB), trained(10 * MIB, 8 * MIB), 40.0, 50.0)
    assert cells == ["6.0", "-40%", "40", "-20%", "0.250000"]
