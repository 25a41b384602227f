from itertools import pairwise

import pytest

from can_train.policy.cards import GIB, cards_that_hold


@pytest.mark.parametrize(
    ("need_gib", "cards"),
    [
        (1, "rtx-3060-12gb, t4-16gb, v100-16gb"),
        (11.1, "t4-16gb, v100-16gb, a30-24gb"),
        (40, "l40s-48gb, a6000-48gb, a100-80gb"),
        (150, "b200-180gb"),
        (170, "no common GPU"),
    ],
)
def test_the_smallest_cards_that_hold_it_are_named(need_gib: float, cards: str) -> None:
    assert cards_that_hold(need_gib * GIB) == cards


def test_no_card_is_named_that_has_less_than_what_is_needed_and_something_over() -> None:
    for need_gib in range(1, 160):
        sizes = [int(name.rsplit("-", 1)[1].removesuffix("gb")) for name in cards_that_hold(need_gib * GIB).split(", ")]
        assert sizes[0] > need_gib
        assert all(smaller <= larger for smaller, larger in pairwise(sizes))
