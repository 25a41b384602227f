"""The closed form: the factor whose predicted peak meets the target."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.factor_rule import (
    NO_AIM,
    Aim,
    FactorRule,
    closed_form_factor,
    describe_closed_form,
    lower_aim,
    predicted_half_width,
)
from fakes.device_limits import CAPACITY, limits

shares = st.floats(0.0, 0.6)


@given(base=shares, fills=st.floats(0.7, 1.0), aim=st.floats(0.65, 0.95), ratio=st.floats(0.7, 1.4))
def test_the_factor_of_the_closed_form_meets_the_aim(base: float, fills: float, aim: float, ratio: float) -> None:
    found = limits(base, fills, measured_ratio=1.1)
    factor = closed_form_factor(found, aim, ratio=ratio)
    predicted = found.training.peak_bytes(factor * found.training.tuned_limit)
    assert ratio * predicted == pytest.approx(aim * CAPACITY)


def test_what_was_not_seen_to_fit_is_not_aimed_at() -> None:
    assert lower_aim(limits(0.1, 0.84), Aim(0.9)) == Aim(pytest.approx(0.84), "no more was seen to fit")
    assert lower_aim(limits(0.1, 0.84, trials=0), Aim(0.9)).reason == "no more is predicted to fit"
    lowered = lower_aim(limits(0.1, 0.84), Aim(0.9), margin=0.01)
    assert lowered == Aim(pytest.approx(0.83), "no more was seen to fit")
    reason = "84.0% was seen to fit, and the prediction is not certain enough"
    assert lower_aim(limits(0.1, 0.84), Aim(0.9), margin=0.2) == Aim(pytest.approx(0.64), reason)


@given(base=shares, tried=st.floats(0.05, 0.4), margin=st.floats(0.0, 1.0))
def test_half_of_the_memory_beside_weights_and_state_is_aimed_at_where_it_was_tried(
    base: float, tried: float, margin: float
) -> None:
    found = limits(base, base + tried)
    aim = lower_aim(found, Aim(0.999), margin=margin)
    assert aim.share == pytest.approx(min(base + max(tried - margin, tried / 2), 0.999))
    assert closed_form_factor(found, aim.share) >= 0.5 - 1e-9


def test_a_batch_of_uniform_samples_that_was_tried_needs_no_margin() -> None:
    rule, found = FactorRule(decided=None, aim=Aim(0.9)), limits(0.1, 0.84)
    assert rule.decide(found, is_uniform=True).value == pytest.approx(1.0)
    assert rule.decide(found).value < 0.999
    assert rule.decide(limits(0.1, 0.84, trials=0), is_uniform=True).value < 0.999


def test_where_nobody_aims_nothing_is_lowered() -> None:
    assert lower_aim(limits(0.1, 0.84), NO_AIM) == NO_AIM


def test_a_target_that_fits_stays() -> None:
    assert lower_aim(limits(0.1, 0.97), Aim(0.9), margin=0.01) == Aim(0.9)


def test_a_search_that_stopped_early_has_not_seen_how_much_fits() -> None:
    assert lower_aim(limits(0.1, 0.3, capped=True), Aim(0.9)) == Aim(0.9)


def test_the_interval_is_that_of_the_largest_batch() -> None:
    found = limits(0.1, 0.9)
    assert predicted_half_width(found) == pytest.approx(found.training.half_width(0.8 * CAPACITY) / CAPACITY)


def test_the_words_state_the_arithmetic() -> None:
    found = limits(0.1, 0.9)
    said = describe_closed_form(found, 0.5, closed_form_factor(found, 0.5))
    assert said == "(50.0% − 10.0% of weights and state) ÷ 80.0% of tuned limit"
    assert describe_closed_form(found, 0.95, 1.0).endswith(", within its bounds")
    assert "50.0% ÷ 1.100" in describe_closed_form(found, 0.5, 0.3, ratio=1.1)


def test_a_tuned_limit_of_nothing_divides_nothing_by_zero() -> None:
    nothing = limits(0.1, 0.1)
    training = replace(nothing.training, tuned_limit=0.0)
    assert closed_form_factor(replace(nothing, training=training), 0.9) > 1
