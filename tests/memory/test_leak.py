import pytest

from can_train.memory.monitor import LEAST_BYTES, RISES, WINDOW_STEPS, LeakWatch

MIB = 2**20


def told(readings: list[int]) -> list[tuple[int, int]]:
    """What the watch said: (step, bytes)."""
    watch = LeakWatch()
    risen = [watch.after_step(reading) for reading in readings]
    return [(step, rise) for step, rise in enumerate(risen, start=1) if rise]


def floors(*floors_bytes: int) -> list[int]:
    """Readings with a window for each floor: all but one step of it lie far above."""
    return [reading for floor in floors_bytes for reading in [floor + 100 * MIB] * (WINDOW_STEPS - 1) + [floor]]


def test_a_floor_that_rises_and_rises_is_told_once() -> None:
    readings = floors(*(window * MIB for window in range(1, 3 * RISES)))
    assert told(readings) == [(WINDOW_STEPS * (RISES + 1), RISES * MIB)]


def test_a_little_more_with_every_step_is_told() -> None:
    assert [rise for _, rise in told([step * MIB for step in range(1_000)])] == [RISES * WINDOW_STEPS * MIB]


@pytest.mark.parametrize("dip", [0, 1], ids=["stays", "falls"])
def test_a_floor_that_pauses_begins_anew(dip: int) -> None:
    rising = [window * MIB for window in range(10, 10 + RISES)]
    assert told(floors(*rising, rising[-1] - dip * MIB, *(floor + MIB for floor in rising))) == []


def test_peaks_that_rise_over_an_even_floor_are_no_leak() -> None:
    assert told([step * MIB if step % 10 else 0 for step in range(1_000)]) == []


def test_a_rise_of_a_few_bytes_is_told_only_when_it_is_worth_a_word() -> None:
    step = LEAST_BYTES // 10
    assert told(floors(*range(0, 10 * step, step))) == []
    assert told(floors(*range(0, 11 * step, step), 2 * LEAST_BYTES)) == [(12 * WINDOW_STEPS, 2 * LEAST_BYTES)]


def test_the_watch_itself_does_not_leak() -> None:
    watch = LeakWatch()
    for step in range(10_000):
        watch.after_step(step * MIB)
    assert len(watch.current) < WINDOW_STEPS
    assert len(watch.floors) <= RISES + 1
