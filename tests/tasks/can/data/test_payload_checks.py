"""Checks of payloads against slow references, byte by byte."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train_tasks.can.data.payload_checks import CHECKS, CHECKSUMS, COUNTERS, broken_checks
from can_train_tasks.can.data.payload_fields import CHECKSUMS as DIFFERENCES

PAYLOADS = st.binary(min_size=0, max_size=8)


def broken(now: bytes, then: bytes) -> set[str]:
    words = [np.frombuffer(payload.ljust(8, b"\0"), np.int64) for payload in (now, then)]
    lengths = [np.array([len(payload)], np.uint8) for payload in (now, then)]
    (bits,) = broken_checks(words[0], lengths[0], words[1], lengths[1]).tolist()
    assert len(CHECKS) == 64
    return {name for check, name in enumerate(CHECKS) if bits >> check & 1}


def counts(now: int, then: int, size: int) -> bool:
    return (now - then) % size == 1 or (size, then, now) == (16, 14, 0)


@given(PAYLOADS, PAYLOADS)
def test_a_counter_goes_up_or_down_by_one(now: bytes, then: bytes) -> None:
    wrong = broken(now, then)
    pairs = [(now, then, "up"), (then, now, "down")]
    for byte, (first, second, way) in itertools.product(range(8), pairs):
        new, old = (payload.ljust(8, b"\0")[byte] for payload in (first, second))
        assert (f"byte {byte + 1}, {way}" in wrong) != counts(new, old, 256)
        assert (f"high half of byte {byte + 1}, {way}" in wrong) != counts(new >> 4, old >> 4, 16)
        assert (f"low half of byte {byte + 1}, {way}" in wrong) != counts(new & 15, old & 15, 16)


@given(st.integers(2, 8).flatmap(lambda size: st.tuples(*[st.binary(min_size=size, max_size=size)] * 2)))
def test_a_checksum_differs_from_the_checksum_of_the_other_bytes_by_a_constant(pair: tuple[bytes, bytes]) -> None:
    wrong = broken(*pair)
    payloads = np.array([list(payload) for payload in pair], np.uint8)
    for place, where in ((payloads.shape[1] - 1, "last byte"), (0, "byte 1")):
        others = np.delete(payloads, place, axis=1)
        for kind in CHECKSUMS:
            now, then = DIFFERENCES[kind](others, payloads[:, place]).tolist()
            assert (f"{kind}, {where}" in wrong) == (now != then)


@pytest.mark.parametrize("lengths", [(0, 0), (1, 1)])
def test_a_payload_of_less_than_two_bytes_has_no_checksum(lengths: tuple[int, int]) -> None:
    wrong = broken(b"\1" * lengths[0], b"\1" * lengths[1])
    assert wrong >= set(CHECKS) - set(COUNTERS)


def test_payloads_of_two_lengths_break_no_checksum() -> None:
    assert broken(b"\1\2\3", b"\1\2") <= set(COUNTERS)
