import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ConfigError
from can_train.io import units
from can_train.io.units import exact_size, parse_size

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
    with pytest.raises(ConfigError, match=r"number above zero with its unit: '.*\n.*512MiB"):
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
