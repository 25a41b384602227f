"""How a run comes to its factor: what is known comes first, then what another device taught, then the probes."""

from dataclasses import replace

import pytest

from can_train.fit.factor_rule import NO_AIM, UNUSED, Aim, FactorRule, OtherDevice, SafetyFactor
from fakes.device_limits import CAPACITY, limits

TARGET = Aim(0.9)


def test_what_is_known_needs_no_limits() -> None:
    known = SafetyFactor(0.7, "learned from 3 runs")
    rule = FactorRule(decided=known, aim=TARGET)
    assert rule.provisional == 0.7
    assert replace(rule.decide(None), aim=NO_AIM) == replace(rule.decide(limits(0.1, 0.95)), aim=NO_AIM) == known


def test_what_runs_have_shown_to_fit_is_not_lowered_by_a_search() -> None:
    rule = FactorRule(decided=SafetyFactor(0.7, "learned"), aim=TARGET)
    assert rule.decide(limits(0.1, 0.85)).aim.share == pytest.approx(0.85)
    assert replace(rule, aim_is_learned=True).decide(limits(0.1, 0.85)).aim == TARGET


def test_the_first_factor_meets_the_target_by_prediction() -> None:
    decided = FactorRule(decided=None, aim=TARGET).decide(limits(0.1, 0.98))
    assert decided.value == pytest.approx(0.8 / 0.88)
    assert decided.reason.startswith("from the probes: (90.0% − 10.0%")
    assert decided.aim == TARGET


def test_the_first_factor_stays_below_what_was_seen_to_fit() -> None:
    decided = FactorRule(decided=None, aim=TARGET).decide(limits(0.1, 0.85))
    assert decided.aim.reason == "no more was seen to fit"
    assert 0.83 < decided.aim.share < 0.85
    assert decided.value < 1


def test_an_uncertain_prediction_aims_lower() -> None:
    decided = FactorRule(decided=None, aim=Aim(0.999)).decide(limits(0.1, 1.0, capped=True))
    assert decided.aim.reason == "the prediction is not certain enough"
    assert decided.aim.share == pytest.approx(0.991, abs=0.001)


@pytest.mark.parametrize(("capped", "fills"), [(False, 0.8), (True, 1.0)])
def test_however_wide_the_interval_half_of_the_memory_beside_weights_of_a_tried_batch_is_used(
    capped: bool, fills: float
) -> None:
    found = limits(0.1, 0.8, capped=capped)
    model = replace(found.training.model, sigma_bytes=0.5 * CAPACITY)
    rule = FactorRule(decided=None, aim=TARGET)
    wide = replace(found, training=replace(found.training, model=model))
    assert rule.decide(wide).aim.share == pytest.approx(0.1 + 0.5 * (fills - 0.1))
    assert rule.decide(wide).value == pytest.approx(0.5 * (fills - 0.1) / 0.7)
    untried = replace(wide, training=replace(wide.training, trials=0))
    assert rule.decide(untried).value == rule.minimum


def test_what_another_device_taught_is_rescaled() -> None:
    other_device = OtherDevice(ratio=1.1, runs=4, device="v100-16gb")
    rule = FactorRule(decided=None, aim=TARGET, other_device=other_device)
    decided = rule.decide(limits(0.1, 0.98))
    assert decided.value == pytest.approx((0.9 / 1.1 - 0.1) / 0.88)
    assert "4 runs on v100-16gb" in decided.reason


@pytest.mark.parametrize(("base", "fills", "expected"), [(0.95, 0.99, 0.2), (0.1, 0.2, 0.8)])
def test_the_bounds_hold(base: float, fills: float, expected: float) -> None:
    rule = FactorRule(decided=None, aim=TARGET, minimum=0.2, maximum=0.8)
    assert rule.decide(limits(base, fills, capped=True)).value == expected


def test_without_a_search_no_factor_is_in_use() -> None:
    assert FactorRule(decided=None, aim=TARGET).decide(None) == replace(UNUSED, aim=TARGET)
