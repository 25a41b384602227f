from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.factors.policies import DEFAULT_PRIOR, Reading, RegressionPrior, fit_with_ceiling

VAGUE = RegressionPrior(base_sd=100.0, full_sd=100.0)


def scattered(seed: int, runs: int, *, noise: float) -> list[Reading]:
    draw = Random(seed)
    uses = [draw.uniform(0.5, 0.9) for _ in range(runs)]
    return [Reading(used, 0.2 + 0.85 * used + draw.gauss(0, noise)) for used in uses]


@given(base=st.floats(0.0, 0.5), slope=st.floats(0.3, 1.5))
def test_readings_on_a_line_are_fitted_by_it(base: float, slope: float) -> None:
    line = VAGUE.fit([Reading(used, base + slope * used) for used in (0.2, 0.5, 0.9)])
    assert (line.base, line.slope) == pytest.approx((base, slope), abs=1e-3)
    assert line.used_for(0.9) == pytest.approx((0.9 - base) / slope, abs=1e-2)


def test_without_readings_the_line_is_what_is_believed() -> None:
    line = DEFAULT_PRIOR.fit([])
    assert (line.peak(0), line.peak(1)) == pytest.approx((DEFAULT_PRIOR.base, DEFAULT_PRIOR.full))
    assert (line.uncertainty(0), line.uncertainty(1)) == pytest.approx((DEFAULT_PRIOR.base_sd, DEFAULT_PRIOR.full_sd))


def test_an_out_of_memory_below_the_line_raises_it_and_one_above_does_not() -> None:
    measured = [Reading(used, 0.1 + used) for used in (0.5, 0.6, 0.7)]
    line = DEFAULT_PRIOR.fit(measured)

    def raised(used: float, ceiling: float = 1.0) -> float:
        return DEFAULT_PRIOR.fit([*measured, Reading(used, None)], start=line, ceiling=ceiling).peak(0.8) - line.peak(
            0.8
        )

    assert raised(0.8) > 0.01
    assert raised(1.0) == pytest.approx(0, abs=1e-3)
    assert raised(0.8, ceiling=0.85) == pytest.approx(0, abs=1e-3)


def test_the_noise_is_that_of_the_readings() -> None:
    assert DEFAULT_PRIOR.fit(scattered(0, 200, noise=0.03)).noise == pytest.approx(0.03, rel=0.15)


def test_the_interval_holds_the_truth_in_19_of_20_cases() -> None:
    truth, held = 0.7 / 0.85, 0
    for seed in range(400):
        line = DEFAULT_PRIOR.fit(scattered(seed, 12, noise=0.02))
        held += abs(line.used_for(0.9) - truth) <= line.half_width(line.used_for(0.9))
    assert 0.90 <= held / 400 <= 0.99


def test_a_line_does_not_fall_with_use_nor_begin_below_zero() -> None:
    falling = VAGUE.fit([Reading(used, 0.9 - used) for used in (0.2, 0.5, 0.8)])
    assert (falling.base, falling.slope) == (pytest.approx(0.4, abs=0.01), 0.0)
    steep = VAGUE.fit([Reading(used, 2 * used - 0.4) for used in (0.3, 0.5, 0.65)])
    assert (steep.base, steep.peak(0.5)) == (0.0, pytest.approx(0.6, abs=0.05))


def test_where_use_does_not_show_in_the_peak_nothing_is_known_of_the_factor() -> None:
    line = VAGUE.fit([Reading(used, 0.5) for used in (0.2, 0.5, 0.9)] + [Reading(0.95, 0.3)])
    assert line.slope == 0
    assert line.half_width(1.0) == 1.0


FITTED = [Reading(used, 0.1 + used) for used in (0.4, 0.6, 0.7, 0.75, 0.76)]


def ceiling(*readings: Reading) -> float:
    return fit_with_ceiling([*FITTED, *readings], DEFAULT_PRIOR).ceiling


def test_without_an_out_of_memory_the_ceiling_is_the_capacity() -> None:
    assert ceiling() == 1.0
    assert fit_with_ceiling([Reading(0.8, None)], DEFAULT_PRIOR).ceiling == 1.0


def test_an_out_of_memory_that_the_line_foresaw_leaves_the_ceiling() -> None:
    assert ceiling(Reading(0.95, None)) == 1.0
    assert ceiling(Reading(0.88, None)) > 0.95


def test_one_that_ought_to_have_fitted_is_about_the_ceiling() -> None:
    assert 0.86 <= ceiling(Reading(0.8, None)) <= 0.90


def test_the_ceiling_is_not_below_what_many_runs_reached() -> None:
    many = [Reading(0.78, 0.88)] * 10
    assert ceiling(*many, Reading(0.7, None)) >= 0.88


def test_a_second_out_of_memory_backs_the_first() -> None:
    old = Reading(0.8, None, 0.2)
    assert ceiling(old) == 1.0
    assert ceiling(old, Reading(0.8, None, 0.2)) < 0.91


def test_one_without_an_explanation_does_not_raise_the_line() -> None:
    line = fit_with_ceiling(FITTED, DEFAULT_PRIOR).line
    with_it, level, _ = fit_with_ceiling([*FITTED, *[Reading(0.78, 0.88)] * 10, Reading(0.6, None)], DEFAULT_PRIOR)
    assert level > 0.85
    assert abs(with_it.peak(0.6) - line.peak(0.6)) < 0.005
