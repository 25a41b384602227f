from can_train.factors.policies import DEFAULT_PRIOR, Reading, fit_with_ceiling

FITTED = [Reading(used, 0.1 + used) for used in (0.4, 0.6, 0.7, 0.75, 0.76)]


def ceiling(*readings: Reading) -> float:
    return fit_with_ceiling([*FITTED, *readings], DEFAULT_PRIOR)[1]


def test_without_an_out_of_memory_the_ceiling_is_the_capacity() -> None:
    assert ceiling() == 1.0
    assert fit_with_ceiling([Reading(0.8, None)], DEFAULT_PRIOR)[1] == 1.0


def test_an_out_of_memory_that_the_line_foresaw_leaves_the_ceiling() -> None:
    assert ceiling(Reading(0.92, None)) == 1.0
    assert ceiling(Reading(0.88, None)) > 0.95


def test_one_that_ought_to_have_fitted_is_about_the_ceiling() -> None:
    assert 0.86 <= ceiling(Reading(0.8, None)) <= 0.90


def test_the_ceiling_is_not_below_what_many_runs_reached() -> None:
    many = [Reading(0.78, 0.88)] * 10
    assert ceiling(*many, Reading(0.7, None)) >= 0.88


def test_a_second_out_of_memory_backs_the_first() -> None:
    old = Reading(0.8, None, 0.2)
    assert ceiling(old) == 1.0
    assert ceiling(old, Reading(0.8, None, 0.2)) < 0.91


def test_one_without_an_explanation_does_not_raise_the_line() -> None:
    line, _ = fit_with_ceiling(FITTED, DEFAULT_PRIOR)
    with_it, level = fit_with_ceiling([*FITTED, *[Reading(0.78, 0.88)] * 10, Reading(0.6, None)], DEFAULT_PRIOR)
    assert level > 0.85
    assert abs(with_it.peak(0.6) - line.peak(0.6)) < 0.005
