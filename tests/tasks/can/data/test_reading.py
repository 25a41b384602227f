"""The readers against writers of every format: what was written is what is read, whatever the blocks and line ends."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError, MissingDataError
from can_train.tasks.can.data.graphs import Frames
from can_train.tasks.can.data.reading import LogReader
from can_train.tasks.can.settings import FORMATS, CanDatasetSettings
from fakes.tasks_can_writers import COMPRESSORS, WRITERS, Message, Writer, car_hacking, write_log

AUTO = CanDatasetSettings()
EXAMPLES_PER_FORMAT = 25
FD_LENGTHS = (12, 16, 20, 24, 32, 48, 64)
BLOCK_BYTES = st.sampled_from([1, 30, 200, 1 << 20])
FIXTURES = Path(__file__).parents[3] / "fixtures" / "can"
SHARED_LOGS = Path(__file__).parents[5] / "shared" / "data" / "can"
TRAFFIC = [Message(1_000_000 + 500 * i, 0x100 + i % 7, bytes([i % 256, 7]), attack=i % 5 == 0) for i in range(200)]


@st.composite
def traffic(draw: st.DrawFn, writer: Writer) -> list[Message]:
    times = sorted(draw(st.lists(st.integers(0, 2_000_000_000_000_000), min_size=1, max_size=12)))
    return [draw(messages(microseconds, writer)) for microseconds in times]


@st.composite
def messages(draw: st.DrawFn, microseconds: int, writer: Writer) -> Message:
    is_remote = writer.remote and draw(st.booleans())
    payload = st.binary(max_size=8)
    if writer.fd:
        payload |= st.sampled_from(FD_LENGTHS).flatmap(lambda size: st.binary(min_size=size, max_size=size))
    return Message(
        microseconds,
        draw(st.integers(0, 0x7FF) | st.integers(0x800, 0x1FFF_FFFF)),
        b"" if is_remote else draw(payload),
        attack=draw(st.booleans()),
        remote=is_remote,
    )


@dataclass(frozen=True)
class Read:
    """What a reader made of a log."""

    reader: LogReader
    frames: Frames


def read(path: Path, wanted: CanDatasetSettings = AUTO, *, block_bytes: int = 1 << 20) -> Read:
    reader = LogReader(path, wanted, block_bytes=block_bytes)
    return Read(reader, Frames.concatenate(list(reader.blocks())))


def read_text(text: str, *, name: str = "log", block_bytes: int = 1 << 20) -> Read:
    with tempfile.TemporaryDirectory() as folder:
        return read(write_log(Path(folder) / name, text), block_bytes=block_bytes)


def assert_read_as_written(done: Read, written: Sequence[Message], writer: Writer) -> None:
    frames, any_attack = done.frames, writer.labelled and any(m.attack for m in written)
    assert done.reader.format == writer.format
    assert done.reader.labelled == writer.labelled
    assert done.reader.kinds == list(writer.kinds[: 1 + any_attack])
    assert done.reader.report.malformed == done.reader.report.backwards == 0
    assert np.round(frames.timestamp * 1e6).astype(np.int64).tolist() == [m.microseconds for m in written]
    if writer.exact:
        assert frames.timestamp.tolist() == [float(m.time) for m in written]
    assert frames.can_id.tolist() == [m.can_id for m in written]
    assert frames.length.tolist() == [len(m.payload) for m in written]
    width = 64 if any(len(m.payload) > 8 for m in written) else 8
    assert frames.payload.tolist() == [list(m.payload.ljust(width, b"\0")) for m in written]
    assert frames.label.tolist() == [int(writer.labelled and m.attack) for m in written]
    assert [getattr(frames, name).dtype for name in ("can_id", "length", "payload", "label")] == [
        np.uint32, np.uint8, np.uint8, np.uint8,
    ]  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=EXAMPLES_PER_FORMAT)
@given(data=st.data(), block_bytes=BLOCK_BYTES, suffix=st.sampled_from(["", *COMPRESSORS]))
def test_any_frames_written_in_any_format_are_read_back(
    name: str, data: st.DataObject, block_bytes: int, suffix: str
) -> None:
    writer = WRITERS[name]
    written = data.draw(traffic(writer))
    text = writer.write(written)
    assert_read_as_written(read_text(text, name=f"log{suffix}", block_bytes=block_bytes), written, writer)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=EXAMPLES_PER_FORMAT)
@given(data=st.data())
def test_line_ends_blank_lines_comments_and_byte_order_mark_change_nothing(name: str, data: st.DataObject) -> None:
    writer = WRITERS[name]
    written = data.draw(traffic(writer))
    between = st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \r\n", "\n# a comment\n"])
    lines = writer.write(written).splitlines()
    text = "\ufeff" + lines[0] + "".join(data.draw(between) + line for line in lines[1:])
    assert_read_as_written(read_text(text, block_bytes=data.draw(BLOCK_BYTES)), written, writer)


@pytest.mark.parametrize("path", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_every_fixture_reads_without_a_malformed_row(path: Path) -> None:
    done = read(path)
    assert done.reader.format == WRITERS[path.name.partition(".")[0]].format
    assert done.reader.report.malformed == done.reader.report.backwards == 0
    assert 20 <= len(done.frames) <= 60


def test_there_is_a_fixture_for_every_format() -> None:
    assert {LogReader(path, AUTO).format for path in FIXTURES.iterdir()} == set(FORMATS)


@pytest.mark.parametrize(
    ("name", "log_format", "num_frames", "kinds"),
    [
        ("labeled_TSC1.csv", "columns", 21_568, ["benign", "high_torque_command"]),
        ("normal.log", "candump", 19_957, ["benign"]),
        ("Attack_free_dataset_10k.txt", "hcrl_text", 10_000, ["benign"]),
    ],
)
def test_real_logs_read_without_a_malformed_row(name: str, log_format: str, num_frames: int, kinds: list[str]) -> None:
    if not (SHARED_LOGS / name).exists():
        pytest.skip(f"{name} is not beside this checkout, in shared/data/can")
    done = read(SHARED_LOGS / name)
    assert (done.reader.format, len(done.frames), done.reader.kinds) == (log_format, num_frames, kinds)
    assert done.reader.report.malformed == done.reader.report.backwards == 0


def test_attacks_without_a_name_are_called_as_the_caller_says(tmp_path: Path) -> None:
    reader = LogReader(write_log(tmp_path / "fuzzy.csv", car_hacking(TRAFFIC)), AUTO, kind="fuzzing")
    assert [frames.label.sum() for frames in reader.blocks()] == [40]
    assert reader.kinds == ["benign", "fuzzing"]


def test_a_log_can_be_read_twice(tmp_path: Path) -> None:
    reader = LogReader(write_log(tmp_path / "log", car_hacking(TRAFFIC)), AUTO)
    first, second = (Frames.concatenate(list(reader.blocks())) for _ in range(2))
    assert first.label.tolist() == second.label.tolist()
    assert reader.report.frames == len(TRAFFIC)


@settings(max_examples=EXAMPLES_PER_FORMAT)
@given(position=st.integers(0, 199), blanks=st.integers(0, 3), block_bytes=st.integers(200, 2_000))
def test_a_malformed_row_is_left_out_and_told_with_its_line(position: int, blanks: int, block_bytes: int) -> None:
    lines = car_hacking(TRAFFIC).splitlines()
    text = "\n".join([*[""] * blanks, *lines[:position], "1.5,0316,8,05,21", *lines[position:]])
    report = read_text(text, block_bytes=block_bytes).reader.report
    assert (report.frames, report.malformed, report.reasons["the DLC disagrees with the payload"]) == (200, 1, 1)
    assert (report.examples[0].line, report.examples[0].text) == (position + blanks + 1, "1.5,0316,8,05,21")
    assert "1 of 201 rows are malformed and left out: 1 × the DLC disagrees" in report.summary()[0]


def test_too_many_malformed_rows_are_refused_with_file_line_reason_and_remedy(tmp_path: Path) -> None:
    lines = car_hacking(TRAFFIC).splitlines()
    path = write_log(tmp_path / "log.csv", "\n".join([*lines[:50], "", *["1.5,0316,2,05,zz,R"] * 3, *lines[50:]]))
    with pytest.raises(DataError, match=r"log\.csv:52: the payload is not made of whole") as caught:
        read(path)
    assert str(caught.value).startswith("At most 1.00% of a log's rows may be malformed")
    assert "--set dataset.max_malformed=0.02" in caught.value.remedy
    assert len(read(path, CanDatasetSettings(max_malformed=0.02)).frames) == 200


def test_exactly_the_allowed_share_of_malformed_rows_is_read(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", car_hacking(TRAFFIC[:198]) + "nonsense\n" * 2)
    assert read(path).reader.report.malformed == 2


def test_time_that_runs_backwards_keeps_the_order_and_counts_as_bad(tmp_path: Path) -> None:
    late = [Message(9_000_000, 1), *TRAFFIC]
    done = read(write_log(tmp_path / "log.csv", car_hacking(late)), block_bytes=1)
    assert done.reader.report.backwards == 1
    assert done.frames.timestamp[:2].tolist() == [9.0, 1.0]
    assert "line 2: time runs backwards by more than 10 ms" in done.reader.report.summary()[1]
    with pytest.raises(DataError, match=r"log\.csv:2: time runs backwards"):
        read(tmp_path / "log.csv", CanDatasetSettings(max_malformed=0.001))


def test_bad_rows_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    late = [Message(9_000_000, 1), *TRAFFIC]
    done = read(write_log(tmp_path / "log.csv", car_hacking(late) + "nonsense\n"))
    assert [row.line for row in done.reader.report.examples] == [2, 202]


def test_steps_back_of_ten_milliseconds_are_told_and_not_counted(tmp_path: Path) -> None:
    start = 1_700_000_000_000_000
    saw = [Message(start + 1_000 * i - (i % 2) * 11_000, 1) for i in range(50)]
    done = read(write_log(tmp_path / "log", car_hacking(saw)), CanDatasetSettings(max_malformed=0.0))
    assert (done.reader.report.backwards, done.reader.report.jitter) == (0, 25)
    assert "time steps back at 25 rows, by at most 10.0 ms" in done.reader.report.summary()[0]


@pytest.mark.parametrize(
    "text", ["", "\n\n", "\ufeff", "# only\n# comments\n", "timestamp,arbitration_id,data_field,attack\n"]
)
def test_a_log_without_rows_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="A log must hold frames"):
        LogReader(write_log(tmp_path / "log", text), AUTO)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.bin").write_bytes(b"LOG?\x90\0\0\0" + bytes(range(256)))
    with pytest.raises(DataError, match=r"A log must be text.*log\.bin is binary.*\n.*logconvert FILE log\.asc"):
        LogReader(tmp_path / "log.bin", AUTO)


@pytest.mark.parametrize("rubbish", [b"\x00\x00\x00", b"\x01\x02", b"\xff\xfe", b"\x01\xff\x01"])
def test_binary_rubbish_inside_a_log_is_a_malformed_row(rubbish: bytes, tmp_path: Path) -> None:
    lines = car_hacking(TRAFFIC).encode().splitlines(keepends=True)
    (tmp_path / "log").write_bytes(b"".join([*lines, rubbish, b"\n", *lines]))
    report = read(tmp_path / "log", CanDatasetSettings(max_malformed=0.01)).reader.report
    assert (report.frames, report.backwards) == (2 * len(TRAFFIC), 1)
    assert report.reasons == {"the row is truncated or not of this format": 1}
    assert report.examples[0].line == len(TRAFFIC) + 1


def test_an_unrecognised_log_is_refused_with_the_formats_and_its_first_line(tmp_path: Path) -> None:
    path = write_log(tmp_path / "poem.txt", "\n# a comment\nRoses are red\n")
    with pytest.raises(DataError, match=r"poem\.txt:3: 'Roses are red'") as caught:
        LogReader(path, AUTO)
    assert all(name in str(caught.value) for name in FORMATS)


def test_a_csv_file_whose_rows_do_not_fit_its_header_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", "time,id,data\n2020-01-01,1,00\n2020-01-02,2,00\n")
    with pytest.raises(DataError, match=r"log\.csv:2: '2020-01-01,1,00': the timestamp is not a number"):
        LogReader(path, AUTO)


def test_error_frames_speak_for_the_format_that_knows_them(tmp_path: Path) -> None:
    rows = ["1.5,0x1,0,0,0,0,", *["1.6,0x0,0,0,1,0,"] * 5]
    path = write_log(tmp_path / "log", "\n".join(["timestamp,arbitration_id,extended,remote,error,dlc,data", *rows]))
    done = read(path)
    assert (done.reader.format, len(done.frames), done.reader.report.error_frames) == ("python_can", 1, 5)


def test_a_log_of_another_format_than_was_asked_for_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", car_hacking(TRAFFIC))
    with pytest.raises(DataError, match="must be in the format candump, as was asked for"):
        LogReader(path, CanDatasetSettings(format="candump"))
    with pytest.raises(DataError, match="must be in the format hcrl_challenge, as was asked for"):
        LogReader(path, CanDatasetSettings(format="hcrl_challenge"))


def test_a_log_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", car_hacking(TRAFFIC))
    blocks = LogReader(path, AUTO, block_bytes=1_000).blocks()
    next(blocks)
    with path.open("a") as log:
        log.write("9.0,0001,0,R\n")
    with pytest.raises(DataError, match="must not change while it is read"):
        list(blocks)


def test_a_log_that_is_replaced_by_one_of_the_same_size_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", car_hacking(TRAFFIC))
    blocks = LogReader(path, AUTO, block_bytes=1_000).blocks()
    next(blocks)
    other = write_log(tmp_path / "other", car_hacking(TRAFFIC))
    times = path.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    with pytest.raises(DataError, match="must not change while it is read"):
        list(blocks)


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "log.gz", car_hacking(TRAFFIC)).read_bytes()
    (tmp_path / "log.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="must be a whole gzip file"):
        LogReader(tmp_path / "log.gz", AUTO)


def test_a_file_that_is_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="A log must exist"):
        LogReader(tmp_path / "nothing", AUTO)
    with pytest.raises(DataError, match="must be a file that can be read"):
        LogReader(tmp_path, AUTO)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", "x" * (3 << 20))
    with pytest.raises(DataError, match="A line of a log is at most"):
        LogReader(path, AUTO)
    path = write_log(tmp_path / "log", car_hacking(TRAFFIC) + "x" * (3 << 20))
    with pytest.raises(DataError, match="A line of a log is at most"):
        read(path, block_bytes=1_000)


def read_times(path: Path, times: list[float]) -> LogReader:
    path.write_text("".join(f"({time:.6f}) can0 123#00\n" for time in times))
    reader = LogReader(path, CanDatasetSettings())
    for _ in reader.blocks():
        pass
    return reader


def test_a_clock_that_jitters_is_only_reported(tmp_path: Path) -> None:
    reader = read_times(tmp_path / "drive.log", [10 + index / 1000 - (index % 3 == 2) * 0.003 for index in range(30)])
    assert reader.report.jitter == 10
    assert "time steps back at 10 rows" in reader.report.summary()[0]


def test_a_log_in_reverse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must run forwards: .*drive.log steps back at 29 of 30 frames.*\n.*Sort"):
        read_times(tmp_path / "drive.log", [10 - index / 1000 for index in range(30)])


@pytest.mark.parametrize("block_bytes", [1, 60, 1 << 20])
def test_a_frame_is_found_again_by_the_number_of_its_line(block_bytes: int, tmp_path: Path) -> None:
    rows = ["timestamp,arbitration_id,data_field,attack", "1.0,100,00,0", "", "no frame", "2.0,101,00,0", "3.0,102,,1"]
    (tmp_path / "log.csv").write_text("\n".join([*rows, *[f"{4 + i}.0,103,00,0" for i in range(5)]]) + "\n")
    reader = LogReader(tmp_path / "log.csv", AUTO, block_bytes=block_bytes)
    assert reader.line_numbers(np.array([0, 2, 1, 7])).tolist() == [2, 6, 5, 11]
    assert not reader.decimal_ids
