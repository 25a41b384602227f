from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policy_laws import draw_laws, live_all
from can_train.policy.affine import AffinePolicy
from can_train.policy.factors import FactorPoint, MomentumPolicy

POINTS = st.builds(FactorPoint, st.floats(0.01, 1.0), st.one_of(st.none(), st.floats(0.01, 1.0)))
POLICY = AffinePolicy()


def test_without_a_past_the_first_factor_stands() -> None:
    assert POLICY.next_factor([], first=0.6) == 0.6
    assert POLICY.aim([], first=0.6) == POLICY.target


def test_on_400_laws_the_target_is_reached_in_3_runs_and_kept_without_an_out_of_memory() -> None:
    lives = live_all(POLICY, draw_laws(400, noise=0.02, bend=0.15))
    settled = [life.settled_after(POLICY.target) for life in lives]
    reached = [run for run in settled if run is not None]
    assert len(reached) >= 0.95 * len(lives)
    assert median(reached) <= 3
    assert fmean(life.ooms for life in lives) <= 0.1


def test_the_momentum_rule_takes_longer() -> None:
    lives = live_all(MomentumPolicy(), draw_laws(40, noise=0.02, bend=0.15))
    assert median(life.settled_after(0.9) or 61 for life in lives) > 10


def test_at_much_noise_the_target_is_lowered_instead_of_risked() -> None:
    laws = draw_laws(60, noise=0.05, bend=0.15)
    lives = live_all(POLICY, laws)
    assert fmean(fmean(life.peaks[20:]) for life in lives) < 0.895
    assert fmean(life.ooms for life in lives) <= 1.0
    scattered = [FactorPoint(0.7, peak) for peak in (0.80, 0.95, 0.88, 0.99, 0.83)]
    assert POLICY.aim(scattered, first=0.7) < 0.88


def test_where_peaks_do_not_scatter_the_aim_is_the_target() -> None:
    line = [FactorPoint(used, 0.1 + used) for used in (0.4, 0.6, 0.7, 0.75, 0.79, 0.8, 0.8, 0.8)]
    assert POLICY.aim(line, first=0.4) == POLICY.target
    assert POLICY.next_factor(line, first=0.4) == pytest.approx(0.8, abs=0.01)


def test_an_out_of_memory_goes_back_by_more_than_a_little() -> None:
    history = [FactorPoint(0.6, 0.7), FactorPoint(0.85, None)]
    assert POLICY.next_factor(history, first=0.6) <= 0.85 * 0.85
    assert POLICY.next_factor(history, first=0.6) > 0.6


def test_a_run_that_used_little_teaches_too() -> None:
    assert POLICY.next_factor([FactorPoint(0.3, 0.35)] * 3, first=0.6) > 0.6


@given(history=st.lists(POINTS, max_size=40), first=st.floats(0.05, 1.0))
def test_the_factor_stays_in_its_bounds_and_steps_are_bounded(history: list[FactorPoint], first: float) -> None:
    factor = POLICY.next_factor(history, first=first)
    assert POLICY.minimum <= factor <= POLICY.maximum
    highest = max([first, *(point.used for point in history if point.peak is not None)])
    assert factor <= max(POLICY.step_up * highest, POLICY.minimum)
    assert 0 <= POLICY.aim(history, first=first) <= POLICY.target


@given(history=st.lists(POINTS, min_size=1, max_size=40), first=st.floats(0.05, 1.0))
def test_the_past_is_a_pure_function_of_its_last_half_lives(history: list[FactorPoint], first: float) -> None:
    long_ago = [FactorPoint(1.0, None)] * 200
    recent = history * 160
    assert POLICY.next_factor(long_ago + recent, first=first) == POLICY.next_factor(recent, first=first)
