"""What a mixed score is worth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.tasks.can.fusion.agent import rewards

SCORES = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=20)


@given(SCORES)
def test_right_is_worth_one_and_more_and_wrong_costs_one_and_more(scores: list[tuple[float, bool]]) -> None:
    fused, truth = np.array([score for score, _ in scores]), np.array([is_attack for _, is_attack in scores])
    earned = rewards(fused, truth)
    right = (fused > 0.5) == truth
    assert ((earned >= 1) == right).all()
    assert ((earned <= -1) == ~right).all()
    assert (np.abs(earned) <= 1.5).all()


@given(st.floats(1e-9, 0.5), st.floats(1e-9, 0.5), st.booleans(), st.booleans())
def test_confidence_raises_what_is_at_stake(one: float, other: float, above: bool, is_attack: bool) -> None:
    near, far = sorted((one, other))
    side = 1 if above else -1
    doubtful, firm = rewards(np.array([0.5 + side * near, 0.5 + side * far]), np.array([is_attack] * 2))
    assert abs(firm) >= abs(doubtful)
    assert np.sign(firm) == np.sign(doubtful)


@pytest.mark.parametrize(
    ("fused", "is_attack", "earned"),
    [(1.0, True, 1.5), (0.75, True, 1.25), (0.0, False, 1.5), (0.5, False, 1.0), (0.0, True, -1.3), (1.0, False, -1.3)],
)
def test_rewards_are_those_of_the_settings_table(fused: float, is_attack: bool, earned: float) -> None:
    assert rewards(np.array([fused]), np.array([is_attack])) == pytest.approx(earned)
