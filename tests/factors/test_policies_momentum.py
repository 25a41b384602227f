import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.factors.policies import AffinePolicy, FactorPoint, MomentumPolicy

shares = st.floats(0.0, 1.0)
settled = st.none() | st.tuples(shares, shares)
points = st.lists(
    st.builds(FactorPoint, used=shares, peak=st.none() | st.floats(0.0, 1.2), after_rescue=settled), max_size=30
)


def after(peak: float | None, *, old: float) -> float:
    return MomentumPolicy().next_factor([FactorPoint(used=old, peak=peak)], first=old)


@pytest.mark.parametrize(
    ("peak", "gain"),
    [(0.0, 0.5), (0.49, 0.5), (0.50, 0.3), (0.69, 0.3), (0.70, 0.1), (0.84, 0.1), (0.85, 0.2), (0.94, 0.2),
     (0.95, 0.5), (1.0, 0.5)],
)  # fmt: skip
def test_each_zone_of_peaks_has_its_gain(peak: float, gain: float) -> None:
    assert after(peak, old=0.5) == pytest.approx(0.5 + 0.3 * gain * (0.90 - peak))


@pytest.mark.parametrize(("old", "peak", "new"), [(0.489, 0.62, 0.5142), (0.427, None, 0.277), (0.6, 0.9, 0.6)])
def test_known_steps_come_out(old: float, peak: float | None, new: float) -> None:
    assert after(peak, old=old) == pytest.approx(new, abs=5e-5)


def test_the_out_of_memory_cut_is_not_scaled_by_the_momentum() -> None:
    for momentum in (0.0, 0.3, 1.0):
        policy = MomentumPolicy(momentum=momentum)
        assert policy.next_factor([FactorPoint(0.427, None)], first=0.427) == pytest.approx(0.277)


def test_a_run_teaches_from_nine_tenths_of_the_factor_on() -> None:
    assert MomentumPolicy().next_factor([FactorPoint(0.449, 0.5)], first=0.5) == 0.5
    assert MomentumPolicy().next_factor([FactorPoint(0.45, 0.5)], first=0.5) > 0.5


def test_an_out_of_memory_teaches_whatever_was_used() -> None:
    assert MomentumPolicy().next_factor([FactorPoint(0.1, None)], first=0.5) == pytest.approx(0.35)


def test_what_ran_on_after_an_out_of_memory_changes_nothing() -> None:
    rescued = FactorPoint(0.427, None, after_rescue=(0.2, 0.3))
    assert MomentumPolicy().next_factor([rescued], first=0.427) == pytest.approx(0.277)


def test_the_aim_is_the_target_unless_the_largest_factor_leads_no_further() -> None:
    short = [FactorPoint(used, 0.04 + 0.8 * used) for used in (0.6, 0.7, 0.8, 0.9, 1.0, 1.0)]
    decision = MomentumPolicy().decide(short, first=0.6)
    assert (decision.limited_by, decision.aim) == ("maximum", pytest.approx(0.84, abs=0.005))
    assert MomentumPolicy().decide([FactorPoint(0.5, 0.6)], first=0.5).limited_by == "target"
    assert MomentumPolicy(maximum=0.5).decide([], first=0.5).aim == 0.9


@given(history=points, first=st.floats(0.05, 1.0))
def test_both_policies_know_the_factor_equally_well(history: list[FactorPoint], first: float) -> None:
    interval = MomentumPolicy().decide(history, first=first).interval
    assert 0 < interval <= 1
    momentum, affine = MomentumPolicy().decide(history, first=first), AffinePolicy().decide(history, first=first)
    assert (momentum.interval == affine.interval) or affine.limited_by in ("noise", "ceiling")


@given(history=points, first=st.floats(0.01, 1.0))
def test_the_factor_stays_within_its_bounds(history: list[FactorPoint], first: float) -> None:
    assert 0.2 <= MomentumPolicy(minimum=0.2, maximum=0.8).next_factor(history, first=first) <= 0.8


@given(past=points, later=points, first=st.floats(0.05, 1.0))
def test_replaying_in_two_halves_equals_replaying_at_once(
    past: list[FactorPoint], later: list[FactorPoint], first: float
) -> None:
    policy = MomentumPolicy()
    halfway = policy.next_factor(past, first=first)
    assert policy.next_factor(later, first=halfway) == policy.next_factor(past + later, first=first)
