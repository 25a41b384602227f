import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from cantools.database.can import Message as ReadMessage
from cantools.database.can import Signal as ReadSignal
from cantools.database.conversion import BaseConversion
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.config.resolved import plain_from_yaml, plain_to_yaml
from can_train.errors import ConfigError
from can_train_tasks.can.data import database
from can_train_tasks.can.data.database import Database
from can_train_tasks.can.settings import CanDatasetSettings
from fakes.databases import TRUCK_DBC

BYTES = 8


@st.composite
def _signals(draw, name, begin=0, **multiplexed):
    """A signal anywhere from the bit `begin` on, where a byte begins."""
    length = draw(st.integers(1, 16) | st.integers(1, 8 * BYTES - begin))
    first = draw(st.integers(begin, 8 * BYTES - length))
    little = draw(st.booleans())
    conversion = BaseConversion.factory(
        scale=draw(st.sampled_from([1, 0.125, -2, 0.1])),
        offset=draw(st.integers(-200, 200)),
        is_float=length in (16, 32, 64) and draw(st.booleans()),
    )
    # A DBC counts the bits of a byte from the least significant one.
    return ReadSignal(name, first if little else first ^ 7, length, is_signed=draw(st.booleans()),
                      byte_order="little_endian" if little else "big_endian", conversion=conversion,
                      **multiplexed)  # fmt: skip


@st.composite
def _messages(draw):
    extended = draw(st.booleans())
    signals = [draw(_signals("one"))]
    if draw(st.booleans()):
        paged = [draw(_signals(f"paged_{pages[0]}", 8, multiplexer_ids=pages, multiplexer_signal="pager"))
                 for pages in ([0, 3], [1], [2])]  # fmt: skip
        signals = [ReadSignal("pager", draw(st.sampled_from([0, 3, 6])), 2, is_multiplexer=True), *paged]
    can_id = draw(st.integers(0, 0x1FFF_FFFF if extended else 0x7FF))
    return ReadMessage(can_id, "made", BYTES, signals, is_extended_frame=extended)


@settings(deadline=None, max_examples=60)
@given(_messages(), st.lists(st.binary(min_size=1, max_size=BYTES), min_size=1, max_size=8))
def test_signals_are_decoded_as_cantools_decodes_them(message, payloads):
    table = np.array([list(payload.ljust(BYTES, b"\0")) for payload in payloads], np.uint8)
    length = np.array([len(payload) for payload in payloads], np.uint8)
    decoded = [{} for _ in payloads]
    for signal, frames, values in database.as_message(message).decode(table, length):
        for place, value in zip(np.flatnonzero(frames).tolist(), values.tolist(), strict=True):
            decoded[place][signal.name] = value
    expected = [message.decode(payload, allow_truncated=True) for payload in payloads]
    assert [each.keys() for each in decoded] == [each.keys() for each in expected]
    for ours, theirs in zip(decoded, expected, strict=True):
        assert ours == pytest.approx({name: float(value) for name, value in theirs.items()}, nan_ok=True, rel=1e-9)


def test_any_sender_of_a_j1939_group_has_the_signals_of_its_message():
    truck = Database.parse(TRUCK_DBC, "truck.dbc")
    names = [message and message.name for message in map(truck.message, (0x0CF004FE, 0x0CF00400, 0x18FEF131, 0x123))]
    assert names == ["EEC1", "EEC1", "CCVS1", None]
    # Below format F0, the second byte of an ID is the receiver.
    addressed = Database.parse(TRUCK_DBC.replace("2566844926", str(0x8C000000)), "truck.dbc")
    assert addressed.message(0x0C000B03).name == "CCVS1"
    assert addressed.message(0x0C010B03) is None
    standard = Database.parse(TRUCK_DBC.replace('"J1939PG";\n', '"StandardCAN";\n'), "truck.dbc")
    assert standard.message(0x0CF00400) is None


@pytest.mark.parametrize("text", ["", "nonsense", "\0", 'VERSION ""\nBO_ x'])
def test_a_text_that_is_no_database_is_an_error_with_its_name(text):
    with pytest.raises(ConfigError, match=r"^This is no DBC file: car\.dbc: "):
        Database.parse(text, "car.dbc")


def test_without_cantools_the_error_has_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cantools.database", None)
    with pytest.raises(ConfigError) as error:
        Database.parse(TRUCK_DBC, "car.dbc")
    assert str(error.value) == (
        "DBC files need the package cantools, which is not installed: car.dbc.\n"
        "Install it: pip install 'can-train[dbc]'."
    )


def test_a_file_in_the_code_page_of_windows_is_read(tmp_path):
    file = tmp_path / "car.dbc"
    file.write_bytes(TRUCK_DBC.replace('"rpm"', '"°C"').encode("cp1252"))
    message = Database.read(file).message(0x0CF00400)
    assert message.signals[-1].unit == "°C"


def test_the_setting_of_a_run_has_the_whole_database_and_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("truck.dbc")
    file.write_text(TRUCK_DBC)
    settings = CanDatasetSettings(dbc="truck.dbc")
    file.unlink()
    assert Database.unpack(settings.dbc) == Database.parse(TRUCK_DBC, "truck.dbc")
    assert database.packed_name(settings.dbc) == "truck.dbc"
    # As configurations write and read it.
    plain = plain_from_yaml(plain_to_yaml(asdict(settings)))
    assert plain["dbc"] == settings.dbc
    assert replace(settings, window=50).dbc == settings.dbc
    assert Database.unpack("") == Database()
    with pytest.raises(ConfigError, match=r"^The DBC file cannot be read: truck\.dbc"):
        CanDatasetSettings(dbc="truck.dbc")
    with pytest.raises(ConfigError, match=r"^The database in dataset\.dbc is damaged: truck\.dbc"):
        Database.unpack(settings.dbc[:-9] + "A" * 9)
