import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ConfigError
from can_train.io import units
from can_train.io.units import memory_text, parse_memory_mib, parse_time_min, time_text

TIMES = {
    "90": 90, "90:00": 90, "90:01": 91, "0:30": 1, "1:30:00": 90, "1:30:01": 91, "2-12": 3600, "2-12:30": 3630,
    "1-00:00:30": 1441, "90min": 90, "12h": 720, "1.5h": 90, "2d": 2880, "90 s": 2, " 5 ": 5,
}  # fmt: skip


@pytest.mark.parametrize(("text", "minutes"), TIMES.items())
def test_a_time_is_read_as_slurm_reads_it(text: str, minutes: int) -> None:
    assert parse_time_min(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "0:00", "-5", "abc", "1:2:3:4", "1-2-3", "1.5", "5 weeks", "1-", "٣"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="A time limit is"):
        parse_time_min(text)


@given(st.integers(1, 10**6))
def test_a_time_that_was_written_is_read_back(minutes: int) -> None:
    assert parse_time_min(time_text(minutes)) == minutes == parse_time_min(str(minutes))


@given(st.integers(0, 10**6))
def test_memory_that_was_written_is_read_back(mib: int) -> None:
    assert parse_memory_mib(memory_text(mib)) == mib == parse_memory_mib(str(mib))


@pytest.mark.parametrize("text", ["", "lots", "-1G", "1.5G", "5X", "G", "1 G"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Memory is a whole number"):
        parse_memory_mib(text)


def test_the_examples_run() -> None:
    result = doctest.testmod(units)
    assert result.attempted > 0
    assert result.failed == 0
