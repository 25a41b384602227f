import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import StateError
from can_train.io.records import SCHEMA
from can_train.memory.catalogue import GpuConstants, _parse, read_gpu_constants, write_gpu_constants
from can_train.reporter import SilentReporter

CONSTANTS = GpuConstants(
    key="v100-16gb",
    total_bytes=16 * 10**9,
    outside_bytes=4 * 10**8,
    workspace_bytes=10**7,
    date="2026-01-31",
    driver="580.1",
    torch="2.11.0",
)


class Listener(SilentReporter):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def test_what_was_written_is_read_back_and_what_is_written_later_replaces_it(tmp_path: Path) -> None:
    listener = Listener()
    for constants in (CONSTANTS, replace(CONSTANTS, outside_bytes=5 * 10**8)):
        path = write_gpu_constants(tmp_path / "state", constants)
        assert read_gpu_constants(tmp_path / "state", "v100-16gb", listener) == constants
    assert path == tmp_path / "state" / "gpus" / "v100-16gb.json"
    assert listener.notices == []


def test_of_a_card_that_nobody_measured_nothing_is_known_and_nothing_is_written(tmp_path: Path) -> None:
    listener = Listener()
    assert read_gpu_constants(tmp_path / "state", "a100-40gb", listener) is None
    assert not (tmp_path / "state").exists()
    assert listener.notices == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("{", "Input data was truncated"),
        ("[1]", "not a record of can-train"),
        ('{"total_bytes": 1}', "not a record of can-train"),
        (json.dumps({"schema": SCHEMA + 1}), "written by a newer can-train"),
        (
            json.dumps({"schema": SCHEMA, **asdict(CONSTANTS), "total_bytes": 1.5}),
            "Expected `int`, got `float` - at `$.total_bytes`",
        ),
        (json.dumps({"schema": SCHEMA, **asdict(CONSTANTS), "date": None}), "Expected `str`, got `null` - at `$.date`"),
        (json.dumps({"schema": SCHEMA, **asdict(CONSTANTS), "key": "t4-16gb"}), "it is of t4-16gb"),
        (json.dumps({"schema": SCHEMA, **asdict(CONSTANTS), "workspace_bytes": -1}), "Expected `int` >= 0"),
        (
            json.dumps({"schema": SCHEMA, **asdict(CONSTANTS), "outside_bytes": 16 * 10**9}),
            "16000000000 of 16000000000 bytes are in use",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_passed_over_and_named(tmp_path: Path, text: str, reason: str) -> None:
    path = write_gpu_constants(tmp_path, CONSTANTS)
    path.write_text(text)
    listener = Listener()
    assert read_gpu_constants(tmp_path, "v100-16gb", listener) is None
    (notice,) = listener.notices
    assert f"{path} is passed over: {reason}" in notice
    assert path.read_text() == text


@given(st.binary() | st.text().map(str.encode) | st.recursive(st.integers(), st.lists).map(lambda x: str(x).encode()))
def test_whatever_is_in_a_file_nothing_but_its_own_error_is_raised(data: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        _parse(data, "v100-16gb")


def test_what_a_later_version_adds_is_passed_over(tmp_path: Path) -> None:
    path = write_gpu_constants(tmp_path, CONSTANTS)
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": [1]}))
    assert read_gpu_constants(tmp_path, "v100-16gb", SilentReporter()) == CONSTANTS


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text("a file")
    with pytest.raises(StateError, match=r"cannot be written: .*gpus"):
        write_gpu_constants(tmp_path, CONSTANTS)
