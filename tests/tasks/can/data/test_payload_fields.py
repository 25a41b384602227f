import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from can_train_tasks.can.data.payload_fields import (
    CHECKS,
    CHECKSUM,
    CHECKSUMS,
    COUNTER,
    COUNTERS,
    FLAG,
    LEAST_FRAMES,
    MULTIPLEXER,
    OPAQUE,
    VALUE,
    Field,
    broken_checks,
    find_fields,
)
from can_train_tasks.can.synthetic.vehicles import Checksum, Message, SendType, write_checksum
from fakes.simulated_drives import benign_drive, frames_of

FRAMES = 600


def wave(low, high, frames=FRAMES, seed=0):
    """A value that swings between two ends once in a few hundred frames."""
    rng = np.random.default_rng(seed)
    phases, periods = rng.random(3) * 2 * np.pi, rng.uniform(300, 900, size=3)
    course = sum(
        np.sin(2 * np.pi * np.arange(frames) / period + phase) for phase, period in zip(phases, periods, strict=True)
    )
    course = (course - course.min()) / np.ptp(course)
    return (low + np.round(course * (high - low))).astype(np.int64)


def payloads(**columns):
    """Payloads of 8 bytes; `b3=values` sets byte 3."""
    frames = max(len(values) for values in columns.values())
    table = np.zeros((frames, 8), np.uint8)
    for name, values in columns.items():
        table[:, int(name[1:])] = values
    return table


def the_field(fields, kind):
    (field,) = [field for field in fields if field.kind == kind]
    return field


@given(st.integers(0, 5), st.booleans(), st.integers(0, 99))
@settings(max_examples=30)
def test_a_value_of_two_bytes_is_one_field_in_its_byte_order(byte, little_endian, seed):
    value = wave(1_000, 9_000, seed=seed)
    ends = (value & 255, value >> 8) if little_endian else (value >> 8, value & 255)
    assume(np.count_nonzero(np.abs(np.diff(value & 255)) > 128) >= 10)
    (field,) = find_fields([payloads(**{f"b{byte}": ends[0], f"b{byte + 1}": ends[1]})])
    assert (field.start // 8, field.stop, field.little_endian) == (byte, 8 * byte + 16, little_endian)
    assert field.read(payloads(**{f"b{byte}": ends[0], f"b{byte + 1}": ends[1]})).tolist() == value.tolist()
    assert (field.low, field.high) == (value.min(), value.max())


@given(st.sampled_from([4, 8]), st.integers(1, 3), st.booleans(), st.integers(0, 7))
@settings(max_examples=30)
def test_a_counter_is_told_with_its_step_also_where_frames_are_lost(width, step, backwards, byte):
    count = np.arange(FRAMES) * (-step if backwards else step)
    count = np.delete(count, np.random.default_rng(0).integers(FRAMES, size=FRAMES // 40)) % (1 << width)
    assume(len(np.unique(count)) == 1 << width)
    (field,) = find_fields([payloads(**{f"b{byte}": count})])
    assert (field.kind, field.stop, field.width) == (COUNTER, 8 * byte + 8, width)
    assert field.note == f"steps of {-step if backwards else step}"


@pytest.mark.parametrize(("last", "width"), [(14, 4), (250, 8), (254, 8)])
@pytest.mark.parametrize("step", [1, -1])
def test_a_counter_may_begin_anew_before_its_bits_are_full(last, width, step):
    (field,) = find_fields([payloads(b3=step * np.arange(FRAMES) % (last + 1))])
    assert (field.kind, field.width, field.note) == (COUNTER, width, f"steps of {step}")
    assert field.high - field.low == last


@given(st.integers(2, 9), st.integers(0, 62), st.sampled_from([1, -1]), st.integers(0, 99))
@settings(max_examples=30)
def test_a_counter_of_a_few_bits_may_stand_anywhere_beside_values(width, start, step, seed):
    assume(start + width <= 64)
    bits = np.zeros((FRAMES, 64), np.uint8)
    count = step * np.arange(FRAMES) % (1 << width)
    bits[:, start : start + width] = (count[:, None] >> np.arange(width)[::-1]) & 1
    # A measured value in the eight bits after it, or before it.
    place = start + width if start + width <= 56 else start - 8
    bits[:, place : place + 8] = np.unpackbits(wave(0, 255, seed=seed).astype(np.uint8)[:, None], axis=1)
    field = the_field(find_fields([np.packbits(bits, axis=1)]), COUNTER)
    assert (field.start, field.width, field.note) == (start, width, f"steps of {step}")


@pytest.mark.parametrize("width", [6, 8])
def test_a_flag_in_front_of_a_counter_is_not_its_first_bit(width):
    flag = (np.arange(2_000) // 700 % 2) << width
    first, second = find_fields([payloads(b6=flag >> 8, b7=(flag | np.arange(2_000) % (1 << width)) & 255)])
    assert (first.kind, first.width) == (FLAG, 1)
    assert (second.kind, second.stop, second.width) == (COUNTER, 64, width)


def test_a_counter_has_as_many_bits_as_have_moved():
    count = np.arange(5_000)
    (field,) = find_fields([payloads(b2=count >> 8, b3=count & 255)])
    assert (field.kind, field.start, field.stop, field.high) == (COUNTER, 19, 32, 4_999)


def test_a_bit_that_alternates_is_no_counter():
    (field,) = find_fields([payloads(b3=14 + np.arange(FRAMES) % 2)])
    assert field.kind == FLAG


@pytest.mark.parametrize("kind", [Checksum.XOR, Checksum.CRC8])
def test_a_checksum_is_told_by_its_kind_though_the_id_enters_it(kind):
    message = Message(can_id=0x123, period_us=10_000, length=8, send_type=SendType.CYCLIC, constants=(0,) * 8,
                      signals=(), counter_byte=None, checksum=kind)  # fmt: skip
    table = payloads(b0=wave(0, 255), b3=wave(0, 255, seed=1), b6=np.arange(FRAMES) % 16)
    write_checksum(message, table)
    field = the_field(find_fields([table]), CHECKSUM)
    assert (field.start, field.stop) == (56, 64)
    assert field.note == {Checksum.XOR: "XOR", Checksum.CRC8: "CRC-8 SAE J1850"}[kind]
    # One wrong frame in ten is no checksum.
    table[::10, 7] ^= np.arange(len(table[::10]), dtype=np.uint8) | 1
    assert CHECKSUM not in {field.kind for field in find_fields([table])}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_each_kind_of_checksum_differs_from_the_others(name):
    others = np.random.default_rng(0).integers(256, size=(200, 7), dtype=np.uint8)
    observed = (0 - CHECKSUMS[name](others, np.zeros(200, np.uint8))).astype(np.uint8)
    if name not in ("sum", "negative sum"):
        observed = CHECKSUMS[name](others, np.zeros(200, np.uint8))
    elif name == "sum":
        observed = others.sum(axis=1, dtype=np.uint8)
    else:
        observed = (0 - others.sum(axis=1, dtype=np.uint8)).astype(np.uint8)
    assert [kind for kind, of in CHECKSUMS.items() if len(np.unique(of(others, observed))) == 1] == [name]


def test_a_multiplexer_is_told_and_its_pages_have_their_own_values():
    page = np.arange(FRAMES) % 3
    first, second = wave(0, 200), wave(50, 220, seed=1)
    table = payloads(
        b0=page, b1=np.where(page == 0, first, 0), b2=np.where(page == 1, second, 0), b5=wave(0, 90, seed=2)
    )
    fields = find_fields([table])
    assert the_field(fields, MULTIPLEXER).stop == 8
    assert {(field.start // 8, field.page) for field in fields if field.kind == VALUE} == {(1, 0), (2, 1), (5, None)}


def test_flags_signed_values_and_noise_are_told_apart():
    rng = np.random.default_rng(0)
    level = np.round(90 * np.sin(np.arange(FRAMES) / 30)).astype(np.int64) & 255
    table = payloads(b0=rng.integers(256, size=FRAMES), b2=np.arange(FRAMES) // 200 % 2, b4=level)
    kinds = {field.start // 8: field for field in find_fields([table])}
    assert (kinds[0].kind, kinds[2].kind, kinds[4].kind) == (OPAQUE, FLAG, VALUE)
    assert kinds[4].signed
    assert (kinds[4].low, kinds[4].high) == (-90, 90)


def test_constant_bits_and_ids_with_few_frames_have_no_fields():
    assert find_fields([np.full((FRAMES, 8), 0xA5, np.uint8)]) == []
    assert find_fields([payloads(b0=np.arange(LEAST_FRAMES - 1))]) == []
    assert find_fields([]) == []


def test_the_end_of_one_log_and_the_beginning_of_the_next_are_no_step():
    halves = [payloads(b0=np.arange(start, start + 300) % 256) for start in (0, 77)]
    (field,) = find_fields(halves)
    assert field.note == "steps of 1"


def test_a_field_reads_the_bits_that_it_names():
    table = np.array([[0b1010_1100, 0xFF, 0x01, 0x82]], np.uint8)
    assert Field(start=2, stop=6, kind=VALUE).read(table).tolist() == [0b1011]
    assert Field(start=2, stop=6, kind=VALUE, signed=True).read(table).tolist() == [0b1011 - 16]
    little = Field(start=16, stop=32, kind=VALUE, little_endian=True)
    assert little.read(table).tolist() == [0x8201]
    assert Field(start=16, stop=32, kind=VALUE, little_endian=True, skipped=1).read(table).tolist() == [0x0201]


def test_the_signals_of_a_simulated_vehicle_are_in_the_fields():
    vehicle, log = benign_drive(2, seed=5)
    checked = 0
    for message in vehicle.messages:
        table = frames_of(log, message).payload[:, : message.length]
        if len(table) < 200 or message.pages:
            continue
        fields = find_fields([table])
        if message.counter_byte is not None:
            assert any(field.kind == COUNTER and field.start // 8 == message.counter_byte for field in fields)
            checked += 1
        if message.checksum is not Checksum.NONE and len(np.unique(table, axis=0)) > 16:
            assert the_field(fields, CHECKSUM).stop == 8 * message.length
            checked += 1
    assert checked > 5


def test_engine_speed_is_where_sae_j1939_has_it():
    log = Path(__file__).parents[5] / "shared" / "data" / "can" / "labeled_TSC1.csv"
    if not log.exists():
        pytest.skip(f"{log.name} is not beside this checkout, in shared/data/can")
    from can_train_tasks.can.data.reading import LogReader
    from can_train_tasks.can.settings import CanDatasetSettings

    blocks = LogReader(log, CanDatasetSettings(path=str(log))).blocks()
    table = np.concatenate([frames.payload[(frames.can_id == 0x0CF00400) & (frames.label == 0)] for frames in blocks])
    fields = {field.start: field for field in find_fields([table])}
    # SPN 190: bytes 4 and 5, the least significant first, an eighth of a revolution a minute. Byte 3 is the torque.
    speed = fields[24]
    assert (speed.stop, speed.little_endian) == (40, True)
    assert 600 < speed.low / 8 < speed.high / 8 < 2_000
    assert (fields[16].stop, fields[16].little_endian) == (24, False)


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
            now, then = CHECKSUMS[kind](others, payloads[:, place]).tolist()
            assert (f"{kind}, {where}" in wrong) == (now != then)


@pytest.mark.parametrize("lengths", [(0, 0), (1, 1)])
def test_a_payload_of_less_than_two_bytes_has_no_checksum(lengths: tuple[int, int]) -> None:
    wrong = broken(b"\1" * lengths[0], b"\1" * lengths[1])
    assert wrong >= set(CHECKS) - set(COUNTERS)


def test_payloads_of_two_lengths_break_no_checksum() -> None:
    assert broken(b"\1\2\3", b"\1\2") <= set(COUNTERS)
