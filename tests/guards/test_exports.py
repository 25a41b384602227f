"""What `from can_train import …` promises is there, explained, and costs nothing until it is used."""

import inspect

import pytest

import can_train

EXPORTS = sorted(set(can_train.__all__) - {"__version__"})


def test_no_name_is_promised_twice() -> None:
    assert len(can_train.__all__) == len(set(can_train.__all__))


def test_completion_offers_what_is_promised() -> None:
    assert set(can_train.__all__) <= set(dir(can_train))


@pytest.mark.parametrize("name", EXPORTS)
def test_a_promised_name_is_there_and_explained(name: str) -> None:
    assert inspect.getdoc(getattr(can_train, name))
    assert name in (can_train.__doc__ or ""), "the package's own docstring lists what it promises"


def test_a_name_nobody_promised_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = can_train.no_such_name
