"""Logs of several interfaces: said with a remedy that works, and one of them can be chosen."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError
from can_train.reporter import SilentReporter
from can_train_tasks.can.data import formats
from can_train_tasks.can.data.dataset import prepare
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.layout import LOG, LogFile
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings

# Rows of each format with a place for time, channel and a byte.
FORMATS = {
    "candump": "({:.6f}) {} 123#{:02X}",
    "candump_screen": " ({:.6f})  {}  123   [1]  {:02X}",
    "asc": "{:.6f} {}  123  Rx  d 1 {:02X}",
    "trc": "1) {:.3f} {} Rx 0123 - 1 {:02X}",
    "columns": '{:.6f},"{}",0x123,{:02X}',
}
HEADS = {"columns": "time,interface,id,data\n"}
NAMES = {"candump": ("can0", "can1"), "candump_screen": ("vcan0", "slcan.1")}


def write(path: Path, name: str, channels: list[int]) -> list[str]:
    """Writes one frame on each of the channels, and returns the channels' names."""
    names = NAMES.get(name, ("1", "2"))
    used = [names[channel] for channel in channels]
    rows = [FORMATS[name].format(1 + i / 1000, channel, i % 256) for i, channel in enumerate(used)]
    path.write_text(HEADS.get(name, "") + "\n".join(rows) + "\n")
    return used


def read(path: Path, block_bytes: int = 1 << 20, **wanted: object) -> tuple[LogReader, Frames]:
    reader = LogReader(path, CanDatasetSettings(**wanted), block_bytes=block_bytes)  # type: ignore[arg-type]
    return reader, Frames.concatenate(list(reader.blocks()))


@pytest.mark.parametrize("name", FORMATS)
def test_two_interfaces_are_said_with_a_remedy_that_works(name: str, tmp_path: Path) -> None:
    used = write(tmp_path / "log", name, [0, 0, 1, 0, 1] * 20)
    reader, frames = read(tmp_path / "log")
    note = reader.report.summary()[0]
    assert len(frames) == 100
    assert f"{used[0]} (60 frames), {used[2]} (40 frames)" in note
    chosen = note.partition("--set dataset.channel=")[2].rstrip("`")
    reader, frames = read(tmp_path / "log", channel=chosen)
    assert frames.payload[:, 0].tolist() == [i for i, channel in enumerate(used) if channel == chosen]
    assert f"only {chosen} was read" in reader.report.summary()[0]


@settings(max_examples=15)
@given(channels=st.lists(st.integers(0, 1), min_size=3, max_size=40), block_bytes=st.sampled_from([1, 90, 1 << 20]))
def test_a_second_interface_is_noticed_wherever_it_begins(
    channels: list[int], block_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("logs") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "RECOGNISED_LINES", 10)
        # Behind the lines by which a format is recognised.
        used = write(path, "candump", [0] * 11 + channels)
        reader, frames = read(path, block_bytes)
    assert frames.payload[:, 0].tolist() == [i % 256 for i in range(len(used))]
    assert dict(reader.report.channels) == {name: used.count(name) for name in set(used)}


def test_one_interface_is_not_worth_a_word(tmp_path: Path) -> None:
    write(tmp_path / "log", "candump", [0] * 100)
    assert read(tmp_path / "log")[0].report.summary() == []


def test_an_interface_that_a_log_has_not_is_refused_with_those_it_has(tmp_path: Path) -> None:
    write(tmp_path / "log", "candump", [0, 1, 1])
    with pytest.raises(DataError, match=r"can7; .* has can1 \(2 frames\), can0 \(1 frame\).*\n.*channel=can1"):
        read(tmp_path / "log", channel="can7")


def test_an_interface_cannot_be_chosen_in_a_log_that_names_none(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("timestamp,arbitration_id,data_field\n1.0,123,00\n")
    with pytest.raises(DataError, match=r"The log names no interface"):
        read(tmp_path / "log", channel="can0")


def test_the_lines_of_chosen_frames_are_found(tmp_path: Path) -> None:
    write(tmp_path / "log", "candump", [0, 1, 1, 0, 1])
    reader, _ = read(tmp_path / "log", channel="can1")
    assert reader.line_numbers(np.array([0, 1, 2])).tolist() == [2, 3, 5]


def test_error_frames_are_counted_and_said(tmp_path: Path) -> None:
    write(tmp_path / "log", "candump", [0] * 95)
    with (tmp_path / "log").open("a") as log:
        log.write("(2.0) can0 20000080#0000000000000000\n" * 5)
    reader, frames = read(tmp_path / "log")
    assert (len(frames), reader.report.malformed) == (95, 0)
    assert reader.report.summary() == ["log: 5 error frames were left out"]


@pytest.mark.parametrize("block_bytes", [1 << 20, 150])
def test_a_frame_of_asc_that_is_requested_and_sent_counts_once(tmp_path: Path, block_bytes: int) -> None:
    def row(number: int, can_id: str, direction: str) -> str:
        if number % 2:
            return f"   {number / 100:.6f} 1  {can_id}  {direction}  d 1 {number:02X}\n"
        return f"   {number / 100:.6f} CANFD 1 {direction} {can_id}  1 0 1 1 {number:02X}\n"

    # 100 is sent after it was requested, 200 is requested alone, and 300 is received.
    rows = [row(number, *sent) for number in range(1, 31)
            for sent in (("300", "Rx"), ("100", "TxRq"), ("100", "Tx"), ("200", "TxRq"))]  # fmt: skip
    (tmp_path / "log.asc").write_text("base hex  timestamps absolute\n" + "".join(rows))
    reader, frames = read(tmp_path / "log.asc", block_bytes)
    ids, counts = np.unique(frames.can_id, return_counts=True)
    assert ids.tolist() == [0x100, 0x200, 0x300]
    # A block that ends between a request and the first sent frame cannot know.
    assert counts.tolist() == [30, 30, 30] if block_bytes > 150 else counts[0] in (30, 31)
    assert reader.report.requests == 120 - len(frames)
    assert reader.report.malformed == 0
    assert reader.report.summary()[0].startswith(f"log.asc: {reader.report.requests} requests were to send a frame")
    assert "transmit requests" in reader.report.left_out()
    assert reader.line_numbers(np.arange(len(frames)))[-1] == 121


def test_times_of_asc_that_count_from_the_line_before_are_added_up(tmp_path: Path) -> None:
    head = "base hex  timestamps relative\n   0.500000 Start of measurement\n"
    (tmp_path / "log.asc").write_text(head + "   0.250000 1  123  Rx  d 1 00\n" * 4)
    assert read(tmp_path / "log.asc", 70)[1].timestamp.tolist() == [0.75, 1.0, 1.25, 1.5]


@pytest.mark.parametrize("late", [f"1{'0' * 308}.0", "9" * 400, f"{1e12:.1f}"])
def test_a_time_beyond_any_clock_moves_none_that_count_from_it(tmp_path: Path, late: str) -> None:
    row = "   {} 1  123  Rx  d 1 00\n"
    steps = [*["0.250000"] * 100, late, late, *["0.250000"] * 100]
    (tmp_path / "log.asc").write_text("base hex  timestamps relative\n" + "".join(map(row.format, steps)))
    reader, frames = read(tmp_path / "log.asc", 70)
    assert frames.timestamp.tolist() == [0.25 * number for number in range(1, 201)]
    assert reader.report.malformed == 2


def test_times_that_add_up_to_one_beyond_any_clock_are_an_error(tmp_path: Path) -> None:
    rows = f"   {6e10:.1f} 1  123  Rx  d 1 00\n" * 3
    (tmp_path / "log.asc").write_text("base hex  timestamps relative\n" + rows)
    with pytest.raises(DataError, match="add up to more than any clock"):
        read(tmp_path / "log.asc")


def test_asc_in_decimal_numbers_is_read(tmp_path: Path) -> None:
    (tmp_path / "log.asc").write_text("base dec  timestamps absolute\n0.1 1  291  Rx  d 3 0 255 16  Length = 0\n")
    frames = read(tmp_path / "log.asc")[1]
    assert (frames.can_id.tolist(), frames.payload[0, :3].tolist()) == ([291], [0, 255, 16])


def test_a_data_set_says_what_its_logs_hold_beside_frames(tmp_path: Path) -> None:
    rows = [f"({i / 1000:.6f}) can{i % 2} {0x100 + i % 7:03X}#{i:04X}" for i in range(1000)]
    rows[::20] = [f"({i / 1000:.6f}) can0 20000080#0000000000000000" for i in range(0, 1000, 20)]
    rows[7] = f"(0.007000) can1 123##1{'AB' * 64}"
    path = tmp_path / "drive.log"
    path.write_text("\n".join(rows) + "\n")
    log = LogFile(path=path, role=LOG, group="drive.log", kind="attack")
    wanted = CanDatasetSettings(name="mine", window=20, stride=20)
    data = prepare(wanted, [log], tmp_path / "cache", SilentReporter())
    assert data.flat.sources[0].frames == 950
    assert np.isfinite(data.flat.node_features).all()
    assert "drive.log: its frames are of can1 (500 frames), can0 (450 frames)" in data.notices[0]
    assert data.notices[1] == "drive.log: 50 error frames were left out"
    chosen = prepare(replace(wanted, channel="can1"), [log], tmp_path / "cache", SilentReporter())
    assert chosen.flat.sources[0].frames == 500
