import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.rescue import MAX_QUIET_STEPS, QUIET_STEPS, RETREAT, Backoff

FACTOR = 2.0
PLANNED = 1_000.0


def failed_at(cost: float, *, proven: float = 0.0, before: Backoff | None = None) -> Backoff:
    return (before or Backoff()).after_oom(cost, factor=FACTOR, proven=proven)


def quiet(backoff: Backoff, steps: int) -> Backoff:
    for _ in range(steps):
        backoff = backoff.after_step(planned=PLANNED, factor=FACTOR)
    return backoff


@dataclass
class Training:
    """Steps whose largest micro-batch costs all that it may, on a device that holds some cost."""

    factor: float = FACTOR
    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen
    ooms: int = 0
    used: float = 0.0

    def step(self, capacity: float) -> None:
        while (cost := min(self.backoff.limit, PLANNED)) > capacity:
            self.backoff = self.backoff.after_oom(cost, factor=self.factor)
            self.ooms += 1
        self.used += cost / min(capacity, PLANNED)
        self.backoff = self.backoff.after_step(planned=PLANNED, factor=self.factor)


def test_a_run_that_never_ran_out_is_not_limited() -> None:
    assert quiet(Backoff(), 1_000) == Backoff()
    assert Backoff().limit == math.inf


def test_an_out_of_memory_halves_what_failed() -> None:
    once = failed_at(100)
    assert (once.limit, once.failed, once.quiet) == (50, 100, 0)
    assert failed_at(50, before=once).limit == 25
    assert Backoff().after_oom(100, factor=4).limit == 25


def test_what_did_fit_once_shrinks_by_a_tenth_then_by_more_each_time_then_by_the_factor() -> None:
    backoff, shares = Backoff(), []
    for _ in range(5):
        cost = min(backoff.limit, 100)
        backoff = failed_at(cost, proven=100, before=backoff)
        shares.append(backoff.limit / cost)
    assert shares == pytest.approx([0.9, 0.8, 0.6, 0.5, 0.5])
    assert failed_at(101, proven=100).limit == 50.5


def test_a_growth_that_goes_well_makes_the_next_surprise_a_first_one() -> None:
    backoff = quiet(failed_at(80, proven=100, before=failed_at(100, proven=100)), QUIET_STEPS)
    assert failed_at(backoff.limit, proven=100, before=backoff).limit == pytest.approx(0.9 * backoff.limit)


def test_a_failure_of_something_smaller_than_the_limit_never_raises_it() -> None:
    assert failed_at(100, before=failed_at(60)).limit == 30
    assert failed_at(100, before=failed_at(60)).failed == 60


def test_after_a_quiet_stretch_the_limit_grows_half_way_to_what_failed() -> None:
    backoff = failed_at(100)
    assert quiet(backoff, QUIET_STEPS - 1).limit == 50
    assert quiet(backoff, QUIET_STEPS).limit == 75
    assert quiet(backoff, 2 * QUIET_STEPS).limit == 87.5


def test_a_growth_that_fails_falls_back_to_what_had_held() -> None:
    backoff = failed_at(75, before=quiet(failed_at(100), QUIET_STEPS))
    assert (backoff.limit, backoff.failed) == (50, 75)
    assert failed_at(50, before=backoff).limit == 25


def test_what_failed_is_tried_again_after_twice_the_wait_each_time() -> None:
    backoff = Backoff(limit=98, failed=100)
    waiting_notice = []
    for _ in range(9):
        waiting_notice.append(0)
        while backoff.limit == 98:
            backoff = quiet(backoff, 1)
            waiting_notice[-1] += 1
        backoff = failed_at(100, before=backoff)
        assert backoff.limit == 98
    assert waiting_notice == [min(QUIET_STEPS * 2**n, MAX_QUIET_STEPS) for n in range(9)]


def test_above_what_failed_the_limit_grows_by_the_factor_without_further_waits() -> None:
    backoff = quiet(Backoff(limit=98, failed=100, patience=160), 160)
    assert (backoff.limit, backoff.patience) == (196, 320)
    backoff = quiet(backoff, 320)
    assert (backoff.limit, backoff.patience) == (392, QUIET_STEPS)
    assert quiet(backoff, QUIET_STEPS).limit == 784
    assert quiet(backoff, 2 * QUIET_STEPS).limit == math.inf


def test_growth_ends_at_what_is_planned() -> None:
    assert quiet(failed_at(PLANNED * 2), QUIET_STEPS).limit == math.inf
    assert quiet(failed_at(PLANNED), QUIET_STEPS).limit < PLANNED


def test_pressure_makes_the_next_micro_batches_a_little_smaller() -> None:
    pressed = Backoff().after_pressure(100)
    assert (pressed.limit, pressed.failed) == (100 * RETREAT, 100)
    again = quiet(pressed, QUIET_STEPS - 1).after_pressure(90)
    assert (again.limit, again.failed, again.quiet) == (90 * RETREAT, 90, 0)
    assert failed_at(81, before=again).limit == 40.5


@given(
    capacities=st.lists(st.floats(1.0, 2 * PLANNED), min_size=1, max_size=30),
    stretch=st.integers(1, 100),
    factor=st.floats(1.1, 8.0),
)
def test_every_step_gets_through_whatever_memory_comes_and_goes(
    capacities: list[float], stretch: int, factor: float
) -> None:
    training = Training(factor)
    for capacity in capacities:
        before = training.ooms
        for _ in range(stretch):
            training.step(capacity)
            assert training.backoff.limit > 0
            assert training.backoff.held < training.backoff.failed
        assert training.ooms - before <= math.log(2 * PLANNED, factor) + 2 + stretch / QUIET_STEPS * 2


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("capacity", [900.0, 510.0, 500.0, 260.0, 10.0, 0.1])
def test_in_a_lasting_shortage_the_room_is_filled_and_failures_get_rare(capacity: float, factor: float) -> None:
    training = Training(factor)
    for _ in range(5_000):
        training.step(capacity)
    assert training.used >= 0.95 * 5_000
    early = training.ooms
    for _ in range(5_000):
        training.step(capacity)
    assert early <= 60
    assert training.ooms - early <= 10


def test_when_the_memory_comes_back_the_limit_goes() -> None:
    training = Training()
    for _ in range(500):
        training.step(10.0)
    before = training.ooms
    for _ in range(1_500):
        training.step(2 * PLANNED)
    assert training.backoff.limit == math.inf
    assert training.ooms == before
