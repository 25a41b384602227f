import doctest

from can_train.factors import resolve
from can_train.factors.resolve import experience_factor


def test_the_examples_in_the_docstring_hold() -> None:
    result = doctest.testmod(resolve)
    assert (result.attempted, result.failed) == (2, 0)


def test_adjustments_multiply() -> None:
    assert experience_factor(0.5, "base", [(0.5, "half"), (0.8, "more")])[0] == 0.2
