"""Frames that arrive on a pipe, from a file or on a bus."""

import bz2
import gzip
import lzma
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from can_train.errors import ConfigError, DataError
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.evaluation import live_input
from can_train_tasks.can.evaluation.live_input import (
    BusErrors,
    BusFrames,
    BusInput,
    FrameInput,
    TextInput,
    error_text,
    open_input,
)
from can_train_tasks.can.settings import CanDatasetSettings
from fakes.candump import candump
from fakes.random_bus import injected_frames, random_frames, write_log

SETTINGS = CanDatasetSettings()
FRAMES = random_frames(300, seed=3)


class Pipe:
    """Writes parts into a pipe, one after another; the input reads the other end. Between them it waits for so many
    seconds, or for an event.
    """

    def __init__(self, parts: Sequence[bytes | float | threading.Event]) -> None:
        self.reading, self._writing = os.pipe()
        self._parts = parts
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        for part in self._parts:
            if isinstance(part, float):
                time.sleep(part)
            elif isinstance(part, threading.Event):
                part.wait()
            else:
                os.write(self._writing, part)
        os.close(self._writing)


def read(text: str | bytes, tmp_path: Path) -> tuple[Frames, FrameInput]:
    path = tmp_path / "input"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    source = open_input(str(path), SETTINGS)
    found = frames_of(source)
    source.close()
    return found, source


def frames_of(source: FrameInput) -> Frames:
    return Frames.concatenate([batch.frames for batch in source.batches() if isinstance(batch, BusFrames)])


def same(found: Frames, expected: Frames = FRAMES) -> None:
    assert len(found) == len(expected)
    np.testing.assert_allclose(
        found.timestamp - found.timestamp[0], expected.timestamp - expected.timestamp[0], atol=2e-4
    )
    np.testing.assert_array_equal(found.can_id, expected.can_id & 0x7FF)
    np.testing.assert_array_equal(found.payload, expected.payload)


@pytest.mark.parametrize("style", ["-L", "-ta", "-td"])
def test_what_candump_prints_is_read_whatever_its_options(style: str, tmp_path: Path) -> None:
    found, source = read(candump(FRAMES, style), tmp_path)
    same(found)
    assert source.frames == 300
    assert source.malformed_text() == ""
    assert any("candump -td" in note for note in source.notes) == (style == "-td")


def test_times_of_day_run_on_over_midnight_and_those_from_line_to_line_add_up(tmp_path: Path) -> None:
    clock = "".join(f"{at} 110 1 30\n" for at in ("23:59:59.9", "23:59:59.95", "00:00:00.1", "00:00:00.2"))
    found, _ = read(clock, tmp_path)
    assert found.timestamp.tolist() == [86399.9, 86399.95, 86400.1, 86400.2]
    steps = "***HEX***\n***RELATIVE MODE***\n" + "00:00:00:5000 Rx 1 0x110 s 1 30\n" * 3
    found, _ = read(steps, tmp_path)
    assert found.timestamp.tolist() == [0.5, 1.0, 1.5]


def test_lines_without_times_get_those_of_their_arrival(tmp_path: Path) -> None:
    before = time.time()
    found, source = read(candump(FRAMES, ""), tmp_path)
    assert (found.can_id == FRAMES.can_id & 0x7FF).all()
    assert (np.diff(found.timestamp) >= 0).all()
    assert before - 1 <= found.timestamp[0] <= found.timestamp[-1] <= time.time()
    assert "candump -ta or -L prints times" in source.notes[0]


def test_a_log_with_a_header_is_read_as_a_file_is(tmp_path: Path) -> None:
    found, _ = read(write_log(tmp_path / "log.csv", FRAMES).read_text(), tmp_path)
    same(found)
    assert found.label.sum() == 0


@pytest.mark.parametrize("rows", [60, 300])
@pytest.mark.parametrize(("heading", "setting"), [("timestamp", "auto"), ("timestamp", "ms"), ("time [ms]", "auto")])
def test_the_unit_of_times_is_that_of_a_file_and_is_said_where_it_is_guessed(
    heading: str, setting: str, rows: int
) -> None:
    frames = injected_frames(rows)
    text = "".join(f"{time * 1000:.3f},0x{can_id:03X},{bytes(data).hex()}\n" for time, can_id, data in
                   zip(frames.timestamp, frames.can_id, frames.payload, strict=True)).encode()  # fmt: skip
    parts = [f"{heading},arbitration_id,data_field\n".encode(), 0.02, text[:700], 0.02, text[700:]]
    source = TextInput(Pipe(parts).reading, replace(SETTINGS, time_unit=setting))
    same(frames_of(source), frames)
    assert any("taken for ms" in note for note in source.notes) == (heading == "timestamp" and setting == "auto")
    source.close()


@pytest.mark.parametrize("setting", ["auto", "us"])
@pytest.mark.parametrize("row", ["{us},{can_id:04x},8,{bytes},R\n", "{us}  {can_id:04x}  000  8  {bytes}\n",
                                 "Timestamp: {us}  ID: {can_id:04x}  000  DLC: 8  {bytes}\n"])  # fmt: skip
def test_the_unit_of_times_without_a_header_is_guessed_or_set(row: str, setting: str) -> None:
    frames = injected_frames(300)
    separator = "," if "," in row else " "
    lines = [row.format(us=round(time * 1e6), can_id=can_id, bytes=bytes(data).hex(separator)) for time, can_id, data in
             zip(frames.timestamp, frames.can_id, frames.payload, strict=True)]  # fmt: skip
    parts = ["".join(lines[:7]).encode(), 0.02, "".join(lines[7:]).encode()]
    source = TextInput(Pipe(parts).reading, replace(SETTINGS, time_unit=setting))
    same(frames_of(source), frames)
    assert source.notes == ([] if setting == "us" else [
        "No heading tells the unit of the times, which are taken for us because of how often IDs repeat"])  # fmt: skip
    source.close()


@pytest.mark.parametrize("style", ["-L", "-ta"])
def test_times_that_candump_prints_are_seconds_and_are_not_waited_for(style: str) -> None:
    goes_on = threading.Event()
    text = candump(FRAMES, style).encode().splitlines(keepends=True)
    source = TextInput(Pipe([b"".join(text[:30]), goes_on]).reading, replace(SETTINGS, time_unit="us"))
    batch = next(source.batches())
    assert isinstance(batch, BusFrames)
    np.testing.assert_allclose(np.diff(batch.frames.timestamp), np.diff(FRAMES.timestamp[:30]), atol=2e-4)
    goes_on.set()
    source.close()


def test_a_slow_pipe_is_not_waited_for_to_guess_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_input, "SILENCE_S", 0.05)
    rows = b"".join(b"%d,%03X,00FF\n" % (number * 10, 0x100 + number % 2) for number in range(60))
    header, goes_on = b"timestamp,arbitration_id,data_field\n", threading.Event()
    source = TextInput(Pipe([header + rows, goes_on, rows]).reading, SETTINGS)
    batches = source.batches()
    counts = [batch and len(batch.frames) for batch in islice(batches, 2)]
    assert counts == [60, None]
    goes_on.set()
    assert sum(len(batch.frames) for batch in batches if batch) == 60
    source.close()


def test_lines_may_arrive_in_pieces_and_the_last_one_may_lack_its_end() -> None:
    text = candump(FRAMES).encode().rstrip(b"\n")
    source = TextInput(Pipe([text[:1], 0.02, text[1:70], 0.02, text[70:5000], 0.02, text[5000:]]).reading, SETTINGS)
    found = [batch.frames for batch in source.batches() if batch is not None]
    assert len(found) > 1
    same(Frames.concatenate(found))
    source.close()


def test_a_mark_of_the_byte_order_hides_no_frame(tmp_path: Path) -> None:
    found, source = read(b"\xef\xbb\xbf" + candump(FRAMES).encode(), tmp_path)
    same(found)
    assert source.malformed_text() == ""


@pytest.mark.parametrize("style", ["-L", "-ta", ""])
def test_an_error_frame_before_all_others_blinds_no_session(style: str) -> None:
    screen = "  can0  20000004   [8]  00 04 00 00 00 00 00 00   ERRORFRAME\n\tcontroller-problem{rx-error-warning}\n"
    error = {"-L": "(1.5) can0 20000004#0004000000000000\n", "-ta": f" (1.5){screen}", "": screen}[style]
    source = TextInput(Pipe([error.encode(), 0.02, candump(FRAMES, style).encode()]).reading, SETTINGS)
    found = frames_of(source)
    assert (found.can_id == FRAMES.can_id & 0x7FF).all()
    assert (source.frames, source.errors, source.malformed.total()) == (300, 1, 0)
    source.close()


@pytest.mark.parametrize("label", [" T", " attack", " 1", " R"])
@pytest.mark.parametrize("style", ["-L", "-ta"])
def test_labels_on_the_first_lines_only_lose_no_line(style: str, label: str) -> None:
    lines = candump(FRAMES, style).splitlines()
    lines[:40] = [line + label for line in lines[:40]]
    parts = ["\n".join([*lines[:30], ""]).encode(), 0.02, "\n".join([*lines[30:], ""]).encode()]
    source = TextInput(Pipe(parts).reading, SETTINGS)
    same(frames_of(source))
    assert source.malformed_text() == ""
    source.close()


def test_first_lines_of_another_format_are_given_up(tmp_path: Path) -> None:
    # The first 250 IDs look decimal; then letters tell that all are hexadecimal.
    rows = [f"{number / 100:.2f},{name},00FF\n" for number, name in
            enumerate([*[str(1500 + number % 40) for number in range(250)], *["1A0"] * 300])]  # fmt: skip
    found, source = read("timestamp,can_id,data\n" + "".join(rows[:250]), tmp_path)
    assert set(found.can_id.tolist()) == set(range(1500, 1540))
    parts = ["".join(["timestamp,can_id,data\n", *rows[:250]]).encode(), 0.02, "".join(rows[250:]).encode()]
    source = TextInput(Pipe(parts).reading, SETTINGS)
    assert frames_of(source).can_id[250:].tolist() == [0x1A0] * 300
    assert source.malformed_text() == ""
    source.close()


def test_a_stretch_of_another_format_among_many_lines_is_left_out() -> None:
    lines = candump(FRAMES).encode().splitlines(keepends=True) * 10
    odd = b"1483093132.049669  0380  000  2  30 bb\n" * 1500
    source = TextInput(Pipe([b"".join(lines[:100]), 0.05, b"".join([*lines, odd, *lines])]).reading, SETTINGS)
    assert len(frames_of(source)) >= 6_000
    source.close()


def test_a_few_odd_lines_change_no_format() -> None:
    lines = candump(FRAMES).encode().splitlines(keepends=True)
    odd = b"1483093132.049669  0380  000  2  30 bb\n"  # a frame, in another format
    parts = [b"".join(lines[:100]), 0.02, odd, 0.02, odd, 0.02, b"".join(lines[100:])]
    source = TextInput(Pipe(parts).reading, SETTINGS)
    same(frames_of(source))
    assert source.malformed.total() == 2
    source.close()


def test_a_header_may_arrive_long_before_the_first_row() -> None:
    header, _, rows = b"timestamp,arbitration_id,data_field,attack\n", 0, b"1.5,123,00FF,0\n1.6,124,00FF,0\n"
    source = TextInput(Pipe([header, 0.05, rows]).reading, SETTINGS)
    assert len(frames_of(source)) == 2
    assert source.malformed_text() == ""


def test_silence_is_told_and_loses_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_input, "SILENCE_S", 0.05)
    text, goes_on = candump(FRAMES).encode(), threading.Event()
    source = TextInput(Pipe([text[:5010], goes_on, text[5010:]]).reading, SETTINGS)
    found = []
    for batch in source.batches():
        found.append(batch)
        if batch is None:
            goes_on.set()
    assert None in found[1:-1]
    same(Frames.concatenate([batch.frames for batch in found if batch is not None]))


def test_malformed_lines_are_counted_with_their_reasons(tmp_path: Path) -> None:
    lines = candump(FRAMES).splitlines(keepends=True)
    bad = ["interface = can0\n", "(1.0) can0 12A#0\n", "\xff\x00\n", "(x) can0 12A#00\n"]
    found, source = read("".join([*lines[:100], *bad, *lines[100:]]), tmp_path)
    same(found)
    assert source.malformed_text().startswith("4 lines are malformed and left out: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "The input ended without a frame"),
        (b"# a comment\n\n", "The input ended without a frame"),
        (b"hello\nworld\n\n", "none of the first 2 lines is; the first is 'hello'"),
        (b"\0" * 300_000, "binary data have none"),
    ],
)
def test_an_input_that_ends_without_a_frame_is_refused(text: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        read(text, tmp_path)


def test_an_input_of_which_nothing_is_a_frame_is_refused_before_it_ends() -> None:
    goes_on = threading.Event()
    source = TextInput(Pipe([b"% a comment of another tool\n" * 100, goes_on]).reading, SETTINGS)
    with pytest.raises(DataError, match="none of the first 100 lines is; the first is '% a comment"):
        next(source.batches())
    goes_on.set()
    source.close()


def test_a_few_lines_that_are_no_frames_are_told_of_while_more_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_input, "SILENCE_S", 0.05)
    goes_on = threading.Event()
    source = TextInput(Pipe([b"usage: candump\n", goes_on, candump(FRAMES).encode()]).reading, SETTINGS)
    batches = source.batches()
    assert next(batches) is None
    assert source.notes == ["No line is a frame so far: the only line is 'usage: candump'"]
    goes_on.set()
    assert sum(len(batch.frames) for batch in batches if isinstance(batch, BusFrames)) == 300
    source.close()


@pytest.mark.parametrize("magic", [b"LOGG", b"MDF     4.10    "])
def test_a_binary_log_is_refused_with_the_command_that_reads_it(magic: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can-train evaluate RUN --dataset "):
        read(magic + b"\0" * 100, tmp_path)


PACKED = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "gzip twice": lambda text: gzip.compress(gzip.compress(text)),
    "UTF-16": lambda text: text.decode().encode("utf-16"),
}


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED.keys())
def test_a_file_that_is_compressed_or_in_utf_16_is_read(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    found, source = read(pack(candump(FRAMES).encode()), tmp_path)
    same(found)
    assert source.malformed_text() == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [("gzip", "compressed by gzip.*\n.*gzip -dc FILE"), ("bzip2", "compressed by bzip2"), ("xz", "xz -dc"),
     ("UTF-16", "text in UTF-16.*\n.*iconv -f UTF-16")],
)  # fmt: skip
def test_a_pipe_of_compressed_text_is_refused_with_the_program_that_unpacks_it(name: str, said: str) -> None:
    source = TextInput(Pipe([PACKED[name](candump(random_frames(9_000)).encode())]).reading, SETTINGS)
    with pytest.raises(DataError, match=said):
        list(source.batches())
    source.close()


def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no whole gzip file"):
        read(gzip.compress(candump(random_frames(3_000)).encode())[:-9], tmp_path)


def test_a_named_pipe_is_read_from_its_first_line(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=[candump(FRAMES)], daemon=True).start()
    source = open_input(str(pipe), SETTINGS)
    same(frames_of(source))
    source.close()


def test_a_pipe_of_the_shell_is_read_from_its_first_line() -> None:
    reading = Pipe([candump(FRAMES).encode()]).reading
    source = open_input(f"/dev/fd/{reading}", SETTINGS)
    same(frames_of(source))
    source.close()
    os.close(reading)


def two_buses(style: str) -> str:
    """The frames of FRAMES on can0, and every third one on can1 too."""
    lines = candump(FRAMES, style).splitlines(keepends=True)
    return "".join(
        line + (line.replace("can0", "can1") if number % 3 == 0 else "") for number, line in enumerate(lines)
    )


@pytest.mark.parametrize("style", ["-L", "-ta"])
@pytest.mark.parametrize(("channel", "counts"), [("", {"can0": 300, "can1": 100}), ("can1", {"can1": 100})])
def test_interfaces_on_one_pipe_are_buses_of_their_own(
    style: str, channel: str, counts: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "input").write_text(two_buses(style))
    source = open_input(str(tmp_path / "input"), replace(SETTINGS, channel=channel))
    found: dict[str, list[Frames]] = {}
    for batch in source.batches():
        assert isinstance(batch, BusFrames)
        found.setdefault(batch.channel, []).append(batch.frames)
    assert {name: sum(map(len, parts)) for name, parts in found.items()} == counts
    assert (Frames.concatenate(found["can1"]).payload == FRAMES.payload[::3]).all()
    source.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (two_buses("-L"), "can7; the input has can0 (300 frames), can1 (100 frames).\nUse --channel can0"),
        ("1.5,123,2,00,FF,R\n" * 30, "The input names no interfaces: --channel can7"),
    ],
)
def test_an_interface_that_is_not_there_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "input").write_text(text)
    source = open_input(str(tmp_path / "input"), replace(SETTINGS, channel="can7"))
    with pytest.raises(DataError, match=re.escape(said)):
        list(source.batches())
    source.close()


def test_error_frames_are_told_with_their_bus_and_what_they_mean(tmp_path: Path) -> None:
    errors = (
        "  can1  20000004   [8]  00 04 00 00 00 00 00 00   ERRORFRAME\n\tcontroller-problem{rx-error-warning}\n"
        "  can1  20000040   [8]  00 00 00 00 00 00 00 00   ERRORFRAME\n\tbus-off\n"
    )
    log = candump(FRAMES, "-ta")
    timed = "".join(f" (1.{number})" + line if line.startswith("  can") else line
                    for number, line in enumerate(errors.splitlines(keepends=True)))  # fmt: skip
    for text in (timed, log + timed):
        (tmp_path / "input").write_text(text)
        source = open_input(str(tmp_path / "input"), SETTINGS)
        found = [batch for batch in source.batches() if isinstance(batch, BusErrors)]
        assert found == [BusErrors("can1", 1.0, 1, 0, 0x4), BusErrors("can1", 1.2, 1, 1, 0x40)]
        assert error_text(0x44) == "controller problem, bus off"
        assert (source.errors, source.bus_offs, source.malformed.total()) == (2, 1, 0)
        source.close()


def test_a_line_without_end_is_not_kept_in_memory(tmp_path: Path) -> None:
    text = candump(FRAMES).encode()
    found, source = read(text + b"x" * 3_000_000 + b"\n" + text, tmp_path)
    assert len(found) == 600
    assert source.malformed.total() == 1


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no CAN log"):
        read(np.random.default_rng(0).bytes(100_000), tmp_path)


@pytest.mark.parametrize("name", ["no_such_interface", "nonsense:channel", "/"])
def test_what_cannot_be_opened_is_said(name: str) -> None:
    with pytest.raises(ConfigError, match=r"python-can|CAN interface"):
        open_input(name, SETTINGS)


@pytest.fixture
def buses() -> Iterator[tuple[object, FrameInput]]:
    can = pytest.importorskip("can", reason="python-can is not installed")
    sender = can.Bus(interface="virtual", channel="test-live-input")
    source = open_input("virtual:test-live-input", SETTINGS)
    yield sender, source
    source.close()
    sender.shutdown()


def test_messages_of_a_bus_are_frames(buses, monkeypatch: pytest.MonkeyPatch) -> None:
    import can

    monkeypatch.setattr(live_input, "SILENCE_S", 0.05)
    sender, source = buses
    assert isinstance(source, BusInput)
    sender.send(can.Message(arbitration_id=0x12A, data=[1, 2, 3], is_extended_id=False))
    sender.send(can.Message(is_error_frame=True, arbitration_id=0x40, data=bytes(8)))
    sender.send(can.Message(arbitration_id=0x18FEF100, is_remote_frame=True, dlc=8))
    sender.send(can.Message(arbitration_id=0x7FF, data=range(8), is_extended_id=False))
    batches = source.batches()
    channel, found = next(batches)
    assert channel == "test-live-input"
    assert next(batches)[2:] == (1, 1, 0x40)
    assert next(batches) is None
    assert found.can_id.tolist() == [0x12A, 0x18FEF100, 0x7FF]
    assert found.length.tolist() == [3, 0, 8]
    assert found.payload[0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert (np.diff(found.timestamp) >= 0).all()
    assert (source.errors, source.bus_offs, source.malformed.total()) == (1, 1, 0)


def test_a_bus_has_frames_of_can_fd(buses, monkeypatch: pytest.MonkeyPatch) -> None:
    import can

    monkeypatch.setattr(live_input, "SILENCE_S", 0.05)
    sender, source = buses
    for data, is_fd in ((range(24), True), (range(3), False), (range(64), True)):
        sender.send(can.Message(arbitration_id=0x12A, data=data, is_extended_id=False, is_fd=is_fd))
    assert isinstance(source, BusInput)
    long = can.Message(arbitration_id=0x12A, is_extended_id=False)
    long.data = bytearray(range(9))  # no classical frame
    (tail,) = list(source._frames([long, can.Message(arbitration_id=1, data=[7], is_extended_id=False)]))
    assert tail.frames.payload.shape == (1, 8)
    assert source.malformed == {"more than 8 bytes": 1}
    _, found = next(source.batches())
    assert found.length.tolist() == [24, 3, 64]
    assert found.payload.shape == (3, 64)
    assert bytes(found.payload[0][:25]) == bytes([*range(24), 0])
