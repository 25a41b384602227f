import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ConfigError, DeviceError
from can_train.io import units
from can_train.io.units import (
    duration,
    exact_size,
    memory_text,
    parse_device,
    parse_memory_mib,
    parse_size,
    parse_time_min,
    time_text,
)

UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2gib", 2**31),
        ("2GB", 2 * 10**9),
        ("2G", 2**31),
        ("128m", 2**27),
        ("1.5MB", 1_500_000),
        ("64KiB", 2**16),
        ("1TiB", 2**40),
        (" 2 GiB ", 2**31),
        ("0.1KB", 100),
        ("1.KiB", 1024),
    ],
)
def test_a_size_is_a_number_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "huge", "GiB", "512", "0MiB", "0.0GiB", "0.0001KiB", "-1GiB", "+1GiB", "1e3MiB", "1,5GiB", "2GiBs", "2PiB",
     "2 G iB", "inf GiB", "nan", "٢GiB", "2B", "2i", "9" * 5000 + "GiB"],
)  # fmt: skip
def test_anything_else_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"This is no size: '.*\n.*number above zero with its unit.*512MiB"):
        parse_size(text)


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_a_bare_letter_and_a_binary_unit_are_the_same_and_a_decimal_one_is_less(number: int, letter: str) -> None:
    size = number * 2 ** UNITS[letter]
    assert parse_size(f"{number}{letter}") == parse_size(f"{number}{letter.lower()}iB") == size
    assert parse_size(f"{number}{letter}B") == number * 10 ** (3 * UNITS[letter] // 10) < size


@given(st.integers(1, 2**50))
def test_equal_sizes_are_written_alike_and_read_back(size: int) -> None:
    text = exact_size(size)
    assert text.islower()
    if not text.endswith("ib"):
        assert text == f"{size}b"
    else:
        assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"), [(2**31, "2gib"), (3 * 2**29, "1536mib"), (2**40, "1tib"), (2 * 10**9, "1953125kib"), (7, "7b")]
)
def test_a_size_is_written_in_the_largest_unit_that_divides_it(size: int, text: str) -> None:
    assert exact_size(size) == text


def test_the_examples_in_the_docstrings_are_true() -> None:
    found = doctest.testmod(units)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (754, "12 min"), (3600, "1 h"), (90_000, "1 d 1 h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


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


@given(st.integers(0, 10**9 - 1))
def test_the_number_of_a_gpu_is_read_whole(number: int) -> None:
    assert parse_device(f"cuda:{number}") == ("cuda", number)


@pytest.mark.parametrize(
    "text", ["cuda:", "cuda:-1", "cuda:+1", "cuda:1.0", "cuda: 1", "cuda:9999999999", "cuda:१", "cpu:0", "auto:1"]
)
def test_a_device_that_has_no_such_name_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(DeviceError, match="Unknown device"):
        parse_device(text)
