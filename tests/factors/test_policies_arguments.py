import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ArgumentError
from can_train.factors.policies import (
    MOST_SHARE,
    AffinePolicy,
    FactorPoint,
    FactorPolicy,
    MomentumPolicy,
    RegressionPrior,
)

NO_NUMBERS = (math.nan, math.inf, -math.inf)

any_shares = st.floats(0, MOST_SHARE) | st.floats(0, 1.2)
any_points = st.builds(
    FactorPoint,
    used=any_shares,
    peak=st.none() | any_shares,
    after_rescue=st.none() | st.tuples(any_shares, any_shares),
    reserved=st.none() | any_shares,
)
any_factors = st.floats(0, 1, exclude_min=True)
deviations = st.floats(1e-4, 100)
priors = st.builds(
    RegressionPrior, base=st.floats(-10, 10), base_sd=deviations, full=st.floats(-10, 10), full_sd=deviations,
    noise=deviations, noise_runs=st.floats(2, 1e9),
)  # fmt: skip
affine = {
    "target": any_factors, "half_life": st.floats(0, 1e9, exclude_min=True), "z": st.floats(0, 10),
    "step_up": st.floats(1, MOST_SHARE), "oom_share": any_factors, "prior": priors,
}  # fmt: skip
momentum = {"target": any_factors, **dict.fromkeys(("momentum", "oom_cut", "learns_from"), st.floats(0, 1))}
bounds = st.tuples(any_factors, any_factors).map(sorted)
policies = st.builds(
    lambda limits, options: AffinePolicy(minimum=limits[0], maximum=limits[1], **options),
    bounds, st.fixed_dictionaries({}, optional=affine),
) | st.builds(
    lambda limits, options: MomentumPolicy(minimum=limits[0], maximum=limits[1], **options),
    bounds, st.fixed_dictionaries({}, optional=momentum),
)  # fmt: skip


@given(policy=policies, history=st.lists(any_points, max_size=12), first=any_factors)
def test_every_history_of_numbers_gives_a_factor_within_the_bounds(
    policy: FactorPolicy, history: list[FactorPoint], first: float
) -> None:
    decision = policy.decide(history, first=first)
    assert policy.minimum <= decision.factor <= policy.maximum
    assert math.isfinite(decision.aim)
    assert 0 <= decision.interval <= 1


@pytest.mark.parametrize("name", ["used", "peak", "reserved"])
@pytest.mark.parametrize("number", [*NO_NUMBERS, -0.5, 2 * MOST_SHARE])
def test_a_point_has_shares(name: str, number: float) -> None:
    with pytest.raises(ArgumentError, match=f"{name} is at least 0 and at most 1,000,000") as caught:
        FactorPoint(**{"used": 0.5, "peak": 0.6, name: number})
    assert caught.value.remedy


@pytest.mark.parametrize("pair", [(0.4, math.nan), (-0.1, 0.5), (0.4,), (0.4, 0.5, 0.6), (0.4, "0.5"), ()])
def test_a_point_has_two_shares_after_a_rescue(pair: Any) -> None:
    with pytest.raises(ArgumentError, match="after_rescue"):
        FactorPoint(0.5, None, after_rescue=pair)


@pytest.mark.parametrize("policy", [AffinePolicy(), MomentumPolicy()])
@pytest.mark.parametrize("first", [*NO_NUMBERS, 0.0, -0.5, 1.01])
def test_a_first_factor_is_a_factor(policy: FactorPolicy, first: float) -> None:
    for decides in (policy.next_factor, policy.decide):
        with pytest.raises(ArgumentError, match="first is above 0 and at most 1"):
            decides([FactorPoint(0.5, 0.6)], first=first)


SHARED = {"target": 0.0, "minimum": 0.0, "maximum": 1.5}
REFUSED: list[tuple[Any, dict[str, float]]] = [
    (AffinePolicy, {**SHARED, "half_life": 0, "z": -1, "step_up": 0.5, "oom_share": 0}),
    (MomentumPolicy, {**SHARED, "momentum": 2, "oom_cut": -0.1, "learns_from": 3}),
    (RegressionPrior, {"base": 1e7, "base_sd": 0, "full": -1e7, "full_sd": 0, "noise": 0, "noise_runs": 1}),
]


@pytest.mark.parametrize(
    ("kind", "name", "refused"), [(kind, *each) for kind, options in REFUSED for each in options.items()]
)
def test_options_out_of_their_range_are_refused(kind: Any, name: str, refused: float) -> None:
    for number in (refused, *NO_NUMBERS):
        with pytest.raises(ArgumentError, match=rf"{name} is (?:above|at least)"):
            kind(**{name: number})


def test_the_bounds_of_a_factor_may_be_equal_and_no_more() -> None:
    assert AffinePolicy(minimum=0.4, maximum=0.4).next_factor([FactorPoint(0.5, 0.6)], first=0.5) == 0.4
    with pytest.raises(ArgumentError, match=r"The smallest factor .*: minimum 0\.9, maximum 0\.1"):
        MomentumPolicy(minimum=0.9, maximum=0.1)


def test_the_search_for_a_safe_factor_ends_without_a_smallest_one() -> None:
    full = [FactorPoint(used, 5.0) for used in (0.1, 0.2, 0.3)]
    assert 0 < AffinePolicy(minimum=5e-324).next_factor(full, first=0.5) <= 1e-6


def test_a_prior_is_a_prior() -> None:
    with pytest.raises(ArgumentError, match="prior is a prior of the regression"):
        AffinePolicy(prior=0.3)  # type: ignore[arg-type]
