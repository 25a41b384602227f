import doctest
from dataclasses import replace
from statistics import fmean, median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.policy_laws import Law, draw_laws, fragmented, simulate, simulate_all, with_hidden
from can_train.factors import policies
from can_train.factors.policies import AffinePolicy, FactorPoint, MomentumPolicy

PEAKS = st.floats(0.0, 3.0)
AFTER_RESCUE = st.none() | st.tuples(st.floats(0.0, 10.0), PEAKS)
POINTS = st.builds(FactorPoint, used=st.floats(0.0, 10.0), peak=st.none() | PEAKS, after_rescue=AFTER_RESCUE)
HISTORIES = st.lists(POINTS, max_size=40)
FIRSTS = st.floats(0.05, 1.0)
POLICY = AffinePolicy()


def along(base: float, slope: float, *used: float) -> list[FactorPoint]:
    return [FactorPoint(u, base + slope * u) for u in used]


def test_the_worked_examples_in_the_docstring_hold() -> None:
    result = doctest.testmod(policies)
    assert (result.attempted, result.failed) == (19, 0)


def test_without_a_past_the_first_factor_stands() -> None:
    assert POLICY.next_factor([], first=0.6) == 0.6
    assert POLICY.decide([], first=0.6).aim == POLICY.target


def test_on_400_laws_the_target_is_reached_in_3_runs_and_kept_without_an_out_of_memory() -> None:
    simulated = simulate_all(POLICY, draw_laws(400, noise=0.02, bend=0.15))
    settled = [one.runs_to_target(POLICY.target) for one in simulated]
    reached = [run for run in settled if run is not None]
    assert len(reached) >= 0.95 * len(simulated)
    assert median(reached) <= 3
    assert fmean(one.ooms for one in simulated) <= 0.1


def test_the_momentum_rule_takes_longer() -> None:
    simulated = simulate_all(MomentumPolicy(), draw_laws(40, noise=0.02, bend=0.15))
    assert median(one.runs_to_target(0.9) or 61 for one in simulated) > 10


def test_at_much_noise_the_target_is_lowered_instead_of_risked() -> None:
    laws = draw_laws(60, noise=0.05, bend=0.15)
    simulated = simulate_all(POLICY, laws)
    assert fmean(fmean(one.peaks[20:]) for one in simulated) < 0.89
    assert fmean(one.ooms for one in simulated) <= 0.6
    scattered = [FactorPoint(0.7, peak) for peak in (0.80, 0.95, 0.88, 0.99, 0.83)]
    decision = POLICY.decide(scattered, first=0.7)
    assert decision.aim < 0.88
    assert decision.limited_by == "noise"


def test_under_hard_laws_at_most_1_run_in_80_runs_out_of_memory() -> None:
    tails = [replace(law, tails=3) for law in draw_laws(60, noise=0.025, bend=0.15, seed=6)]
    simulated = simulate_all(POLICY, draw_laws(60, noise=0.08, bend=0.15, seed=5), runs=40, seed=5)
    simulated += simulate_all(POLICY, tails, runs=40, seed=6)
    assert fmean(each.ooms for each in simulated) <= 40 / 80


def test_where_peaks_do_not_scatter_the_aim_is_the_target() -> None:
    line = [FactorPoint(used, 0.1 + used) for used in (0.4, 0.6, 0.7, 0.75, 0.79, 0.8, 0.8, 0.8)]
    assert POLICY.decide(line, first=0.4).aim == POLICY.target
    assert POLICY.next_factor(line, first=0.4) == pytest.approx(0.8, abs=0.01)


def test_an_out_of_memory_goes_back_by_more_than_a_little() -> None:
    history = [FactorPoint(0.6, 0.7), FactorPoint(0.85, None)]
    assert POLICY.next_factor(history, first=0.6) <= 0.85 * 0.85
    assert POLICY.next_factor(history, first=0.6) > 0.6


def test_a_run_that_used_little_teaches_too() -> None:
    assert POLICY.next_factor([FactorPoint(0.3, 0.35)] * 3, first=0.6) > 0.6


def test_where_the_largest_factor_leads_no_further_that_is_the_aim() -> None:
    decision = POLICY.decide(along(0.04, 0.8, 0.6, 0.8, 0.9, 1.0, 1.0, 1.0), first=0.6)
    assert (decision.factor, decision.limited_by, decision.aim) == (1.0, "maximum", pytest.approx(0.84, abs=0.005))


def test_where_memory_is_fragmented_few_runs_fail_and_the_aim_is_what_fits() -> None:
    laws = fragmented(draw_laws(30, noise=0.02, bend=0.15), ceilings=(0.86, 0.92))
    simulated = simulate_all(POLICY, laws)
    assert fmean(one.ooms for one in simulated) <= 3
    assert 0.82 < fmean(fmean(one.peaks[20:]) for one in simulated) < 0.87


def test_a_ceiling_holds_the_aim_below_what_ran_out_of_memory() -> None:
    history = [*along(0.1, 1.0, 0.5, 0.7, 0.78), FactorPoint(0.8, None), *along(0.1, 1.0, 0.68, 0.7)]
    decision = POLICY.decide(history, first=0.5)
    assert decision.limited_by == "ceiling"
    assert 0.8 < decision.aim < 0.9
    assert decision.factor == pytest.approx(decision.aim - 0.1, abs=0.01)


def test_a_lone_out_of_memory_is_forgotten() -> None:
    history = [*along(0.1, 1.0, 0.5, 0.7, 0.78), FactorPoint(0.8, None), *along(0.1, 1.0, *[0.75] * 60)]
    assert POLICY.decide(history, first=0.5).limited_by == "target"
    assert POLICY.next_factor(history, first=0.5) == pytest.approx(0.8, abs=0.005)


def test_a_rescued_run_at_102_percent_shows_the_next_run_the_target() -> None:
    rescued = FactorPoint(0.87, None, after_rescue=(0.72, 0.89))
    # 102 % at 0.87, 89 % at 0.72
    assert 0.89 + 0.13 / 0.15 * (POLICY.next_factor([rescued], first=0.87) - 0.72) == pytest.approx(0.9, abs=0.03)


def test_what_was_seen_to_fit_may_be_used_again_at_once() -> None:
    fitted = along(0.12, 1.0, 0.6, 0.7, 0.75)
    assert POLICY.next_factor([*fitted, FactorPoint(0.8, None)], first=0.6) <= 0.85 * 0.8
    rescued = FactorPoint(0.8, None, after_rescue=(0.77, 0.89))
    assert POLICY.next_factor([*fitted, rescued], first=0.6) > 0.71


@pytest.mark.parametrize("base", [0.17, 0.3, 0.4])
@pytest.mark.parametrize("share", [0.5, 0.83, None])
def test_a_hidden_constant_is_absorbed_by_the_third_run(base: float, share: float | None) -> None:
    def peak(used: float) -> float:
        return base + (1.02 - base) / 0.87 * used

    settled = (0.87 * share, peak(0.87 * share)) if share else None
    history, peaks = [FactorPoint(0.87, None, settled)], []
    for _ in range(5):
        factor = POLICY.next_factor(history, first=0.87)
        peaks.append(peak(factor))
        history.append(FactorPoint(factor, peaks[-1]))
    assert peaks[0 if settled else 1 :] == pytest.approx([0.9] * (5 if settled else 4), abs=0.03)


def test_hidden_constants_under_noise_are_absorbed_as_soon() -> None:
    simulated = simulate_all(POLICY, with_hidden(draw_laws(40, noise=0.02, bend=0.15), hidden=0.12))
    assert median(one.runs_to_target(POLICY.target) or 61 for one in simulated) <= 3
    assert max(one.ooms for one in simulated) == 1


@pytest.mark.parametrize(("base", "full"), [(0.1, 0.3), (0.05, 0.6), (0.2, 1.4), (0.3, 2.5)])
def test_a_tuned_limit_that_is_far_off_is_found_out(base: float, full: float) -> None:
    law = Law(base=base, fill=(full - base) / (1 - base), bend=0.0, noise=0.01, first=0.6)
    assert simulate(POLICY, law, runs=12).peaks[8:] == pytest.approx([min(full, 0.9)] * 4, abs=0.03)


@pytest.mark.parametrize("base", [0.05, 0.2, 0.4])
def test_a_first_run_at_the_target_is_not_left(base: float) -> None:
    law = Law(base=base, fill=(0.898 - base) / 0.85 / (1 - base), bend=0.0, noise=0.002, first=0.85)
    assert simulate(POLICY, law, runs=20).peaks == pytest.approx([0.9] * 20, abs=0.01)


@pytest.mark.parametrize("base", [0.08, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("first", [0.34, 0.45, 0.6])
def test_without_noise_the_third_run_meets_the_target(base: float, first: float) -> None:
    law = Law(base=base, fill=1.0, bend=0.0, noise=0.002, first=first)
    assert simulate(POLICY, law, runs=12).peaks[2:] == pytest.approx([0.9] * 10, abs=0.03)


def test_the_interval_narrows_as_runs_agree() -> None:
    assert POLICY.decide([], first=0.6).interval > 0.2
    intervals = [POLICY.decide(along(0.1, 1.0, *[0.8] * runs), first=0.6).interval for runs in range(1, 8)]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[-1] < 0.02 * 0.8


@given(history=HISTORIES, first=FIRSTS)
def test_the_factor_stays_in_its_bounds_and_steps_are_bounded(history: list[FactorPoint], first: float) -> None:
    decision = POLICY.decide(history, first=first)
    assert POLICY.minimum <= decision.factor <= POLICY.maximum
    settled = [point.after_rescue[0] for point in history if point.after_rescue]
    highest = max([first, *settled, *(point.used for point in history if point.peak is not None)])
    assert decision.factor <= max(POLICY.step_up * highest, POLICY.minimum)
    assert 0 <= decision.aim <= POLICY.target
    assert 0 < decision.interval <= 1
    assert (decision.aim < POLICY.target) == (decision.limited_by != "target")
    assert decision == POLICY.decide(list(history), first=first)
    assert decision.factor == POLICY.next_factor(history, first=first)


@given(history=HISTORIES, first=FIRSTS, used=st.floats(0.0, 10.0))
def test_an_out_of_memory_never_raises_the_factor(history: list[FactorPoint], first: float, used: float) -> None:
    before = POLICY.next_factor(history, first=first)
    assert POLICY.next_factor([*history, FactorPoint(used, None)], first=first) <= before


@example(used=0.125, peak=0.0625, less=0.0, first=1.0)
@given(used=st.floats(0.05, 1.0), peak=st.floats(0.0, 1.0), less=st.floats(0.0, 1.0), first=FIRSTS)
def test_a_lower_peak_of_the_first_run_never_lowers_the_factor(
    used: float, peak: float, less: float, first: float
) -> None:
    factor, raised = (POLICY.next_factor([FactorPoint(used, p)], first=first) for p in (peak, peak * less))
    assert raised >= factor - 0.03


@given(history=st.lists(POINTS, min_size=1, max_size=40), first=FIRSTS)
def test_the_past_is_a_pure_function_of_its_last_half_lives(history: list[FactorPoint], first: float) -> None:
    long_ago = [FactorPoint(1.0, None)] * 200
    recent = history * 240
    assert POLICY.next_factor(long_ago + recent, first=first) == POLICY.next_factor(recent, first=first)
