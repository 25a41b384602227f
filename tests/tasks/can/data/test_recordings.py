"""Binary logs: what python-can and asammdf write is what is read, and without the packages an error names them."""

import gc
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings

FD_LENGTHS = (12, 16, 20, 24, 32, 48, 64)
START_S = 1_700_000_000.0
# Frames as (gap in microseconds, ID, payload, whether it is an error frame).
FRAMES = st.lists(
    st.tuples(
        st.integers(1, 10**6),
        st.integers(0, 0x7FF) | st.integers(0x800, 0x1FFF_FFFF),
        st.binary(max_size=8)
        | st.sampled_from(FD_LENGTHS).flatmap(lambda size: st.binary(min_size=size, max_size=size)),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
).filter(lambda frames: not all(is_error for *_, is_error in frames))
TRAFFIC = [(500, 0x100 + i % 5, bytes([i, 7]), i % 20 == 3) for i in range(200)]


def write(path: Path, frames: list[tuple[int, int, bytes, bool]], channels: int = 1) -> Path:
    """Writes a log with python-can in the format of its suffix."""
    can = pytest.importorskip("can")
    if path.suffix == ".mf4":
        pytest.importorskip("asammdf")
    time_us = 0
    with can.Logger(str(path)) as logger:
        for index, (gap_us, can_id, payload, is_error) in enumerate(frames):
            time_us += gap_us
            logger.on_message_received(
                can.Message(
                    timestamp=START_S + time_us / 1e6, arbitration_id=can_id, is_extended_id=can_id > 0x7FF,
                    data=payload, is_error_frame=is_error, is_fd=len(payload) > 8, channel=index % channels,
                )
            )  # fmt: skip
    return path


def read(path: Path, **wanted: object) -> tuple[LogReader, Frames]:
    reader = LogReader(path, CanDatasetSettings(**wanted))  # type: ignore[arg-type]
    return reader, Frames.concatenate(list(reader.blocks()))


@pytest.mark.parametrize("suffix", [".blf", ".mf4", ".asc", ".log", ".csv"])
@settings(max_examples=15, deadline=None)
@given(written=FRAMES)
def test_what_python_can_writes_is_read_back(
    suffix: str, written: list[tuple[int, int, bytes, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader, frames = read(write(tmp_path_factory.mktemp("logs") / f"drive{suffix}", written))
    times_us = np.cumsum([gap_us for gap_us, *_ in written])[[not is_error for *_, is_error in written]]
    good = [frame for frame in written if not frame[3]]
    assert reader.report.malformed == 0
    assert reader.report.error_frames == len(written) - len(good)
    assert frames.can_id.tolist() == [can_id for _, can_id, *_ in good]
    assert [bytes(row[:size]) for row, size in zip(frames.payload, frames.length, strict=True)] == [
        payload for _, _, payload, _ in good
    ]
    np.testing.assert_allclose(np.diff(frames.timestamp), np.diff(times_us) / 1e6, atol=2e-6)


@pytest.mark.parametrize("suffix", [".blf", ".mf4"])
def test_a_recording_can_be_sampled_and_its_frames_be_numbered(suffix: str, tmp_path: Path) -> None:
    reader = LogReader(write(tmp_path / f"drive{suffix}", TRAFFIC), CanDatasetSettings())
    sample = reader.sample(3, 1000, 10**6)
    assert sample.text.complete
    assert (sample.expected_frames, sum(map(len, sample.frames))) == (190, 190)
    assert reader.line_numbers(np.array([0, 150])).tolist() == [1, 151]


@pytest.mark.parametrize("suffix", [".blf", ".mf4", ".asc"])
def test_remote_frames_are_in_their_place_and_have_no_payload(suffix: str, tmp_path: Path) -> None:
    can = pytest.importorskip("can")
    if suffix == ".mf4":
        pytest.importorskip("asammdf")
    path = tmp_path / f"drive{suffix}"
    with can.Logger(str(path)) as logger:
        for i in range(40):
            is_remote = i % 3 == 1
            data = None if is_remote else bytes([i])
            logger.on_message_received(
                can.Message(timestamp=START_S + i / 1000, arbitration_id=0x100 + i, is_extended_id=False, data=data,
                            dlc=1, is_remote_frame=is_remote, channel=0)
            )  # fmt: skip
    _, frames = read(path)
    assert frames.can_id.tolist() == [0x100 + i for i in range(40)]
    assert frames.length.tolist() == [int(i % 3 != 1) for i in range(40)]


@pytest.mark.parametrize("suffix", [".blf", ".mf4"])
def test_a_channel_of_a_recording_can_be_chosen(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"drive{suffix}", TRAFFIC, channels=2)
    reader, frames = read(path)
    assert len(frames) == 190
    assert "its frames are of" in reader.report.summary()[0]
    assert len(read(path, channel="1")[1]) < 190


@pytest.mark.parametrize("share", [0.2, 0.95, 0.999])
def test_a_blf_file_that_was_cut_off_is_refused_and_one_that_was_not_closed_is_read(
    share: float, tmp_path: Path
) -> None:
    path = write(tmp_path / "drive.blf", TRAFFIC)
    whole, (_, whole_frames) = path.read_bytes(), read(path)
    kept = int(share * len(whole))
    path.write_bytes(whole[:kept])
    with pytest.raises(DataError, match=rf"no whole BLF file: .*drive\.blf: {kept:,} of {len(whole):,} bytes"):
        read(path)
    sizes = slice(16, 36)  # Of the header: bytes, bytes without compression, objects
    path.write_bytes(whole[:16] + bytes(sizes.stop - sizes.start) + whole[sizes.stop :])
    _, frames = read(path)
    assert len(frames) == len(whole_frames)


# asammdf's files complain when they are collected before they were opened: here, and not in a later test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("start", [b"LOGG\x90\0\0\0", b"MDF     4.10    ", b"UnFinMF 4.10    "])
def test_a_damaged_recording_is_refused(start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("can")
    pytest.importorskip("asammdf")
    (tmp_path / "drive").write_bytes(start + bytes(range(200)))
    with pytest.raises(DataError, match=r"is no whole (BLF|MF4) file|did not finalise.*\n.*mdf2finalized"):
        read(tmp_path / "drive")
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_mf4_file_ends_with_an_error_and_no_traceback(tmp_path: Path) -> None:
    pytest.importorskip("asammdf")
    (tmp_path / "drive.mf4").write_bytes(b"UnFinMF 4.11    " + bytes(range(200)))
    program = (
        "import sys\nfrom pathlib import Path\nfrom can_train.errors import DataError\n"
        "from can_train_tasks.can.data.reading import LogReader\n"
        "from can_train_tasks.can.settings import CanDatasetSettings\n"
        "try:\n    list(LogReader(Path(sys.argv[1]), CanDatasetSettings()).blocks())\n"
        "except DataError as error:\n    print(error.rule)\n"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path / "drive.mf4")], capture_output=True,
                           text=True, check=True)  # fmt: skip
    assert (ended.stdout, ended.stderr) == (
        "asammdf cannot read the MF4 file, which its logger did not finalise\n", "",
    )  # fmt: skip


def unfinished(path: Path) -> Path:
    """Makes a copy of an MF4 file as a logger leaves it that loses power: no counter and no length is written."""
    from asammdf import MDF

    with MDF(str(path)) as mdf:
        whole = mdf.save(path.with_name("uncompressed.mf4"), compression=0)
    content = bytearray(Path(whole).read_bytes())

    def links(place: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{struct.unpack_from('<Q', content, place + 16)[0]}Q", content, place + 24)

    data_group = links(64)[0]
    while data_group:
        following, channel_group, data, *_ = links(data_group)
        if data:
            struct.pack_into("<Q", content, channel_group + 24 + 8 * len(links(channel_group)) + 8, 0)
            struct.pack_into("<Q", content, data + 8, 24)
        data_group = following
    content[:8] = b"UnFinMF "
    struct.pack_into("<H", content, 60, 0b101)  # counters and the last length are to be updated
    target = path.with_name("unfinished.mf4")
    target.write_bytes(content)
    return target


def test_an_mf4_file_that_its_logger_did_not_finalise_is_read_like_the_whole_one(tmp_path: Path) -> None:
    path = write(tmp_path / "drive.mf4", [frame for frame in TRAFFIC if not frame[3]])
    (_, whole), (reader, rest) = read(path), read(unfinished(path))
    assert (reader.format, len(rest)) == ("mf4", 190)
    for name in ("timestamp", "can_id", "length", "payload"):
        assert getattr(rest, name).tolist() == getattr(whole, name).tolist()


def test_a_whole_mf4_file_with_the_mark_of_an_unfinished_one_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "drive.mf4", TRAFFIC)
    path.write_bytes(b"UnFinMF " + path.read_bytes()[8:])
    assert len(read(path)[1]) == 190


@pytest.mark.parametrize(("start", "package"), [(b"LOGG", "can"), (b"MDF     4.10", "asammdf")])
def test_without_the_package_the_error_names_the_extra(
    start: bytes, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "drive.bin").write_bytes(start + bytes(100))
    with pytest.raises(DataError) as caught:
        LogReader(tmp_path / "drive.bin", CanDatasetSettings())
    assert 'pip install "can-train[logs]"' in caught.value.remedy
