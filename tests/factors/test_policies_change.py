from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.factors.policies import DEFAULT_PRIOR, AffinePolicy, FactorPoint, Reading, since_change


def kept(readings: list[Reading]) -> int:
    return len(since_change(readings, DEFAULT_PRIOR.fit([r for r in readings if r.peak is not None])))


def shifted(seed: int, before: int, after: int, shift: float, noise: float = 0.02) -> list[Reading]:
    draw = Random(seed)
    uses = [draw.uniform(0.6, 0.8) for _ in range(before + after)]
    return [Reading(u, 0.1 + u + shift * (i >= before) + draw.gauss(0, noise)) for i, u in enumerate(uses)]


@pytest.mark.parametrize("shift", [-0.12, 0.12])
def test_what_came_before_a_change_is_dropped_after_a_few_runs(shift: float) -> None:
    found = [kept(shifted(seed, 20, 4, shift)) for seed in range(50)]
    assert sum(3 <= count <= 5 for count in found) >= 45


def test_noise_is_no_change() -> None:
    assert all(kept(shifted(seed, 60, 0, 0.0, noise)) == 60 for seed in range(100) for noise in (0.005, 0.02, 0.05))


def test_two_outliers_are_no_change() -> None:
    assert kept([*shifted(0, 20, 0, 0.0), *[Reading(0.7, 1.0)] * 2]) == 22


def test_a_small_shift_is_left_to_forgetting() -> None:
    assert kept(shifted(0, 20, 20, 0.02, noise=0.001)) == 40


@given(peaks=st.lists(st.none() | st.floats(0.0, 3.0), max_size=30))
def test_any_history_keeps_its_end(peaks: list[float | None]) -> None:
    readings = [Reading(0.7, peak) for peak in peaks]
    assert (
        readings[len(readings) - kept(readings) :]
        == list(since_change(readings, DEFAULT_PRIOR.fit([])))[-kept(readings) :]
    )


def test_the_policy_is_back_at_the_target_soon_after_a_change() -> None:
    policy, history, peaks = AffinePolicy(), [], []
    for run in range(30):
        factor = policy.next_factor(history, first=0.6)
        peaks.append(0.2 + 0.9 * factor - 0.1 * (run >= 20))
        history.append(FactorPoint(factor, peaks[-1]))
    assert peaks[20] == pytest.approx(0.8, abs=0.01)
    assert peaks[24:] == pytest.approx([0.9] * 6, abs=0.02)
