"""The text of logs: however it is compressed or encoded, the same lines are read."""

import bz2
import gzip
import lzma
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError
from can_train_tasks.can.data.log_text import MAX_BLOCK_LINES, MAX_LINE_BYTES, WINDOW_BYTES, LogText
from fakes.tasks_can_writers import COMPRESSORS, Message, candump, write_log

TEXT = candump([Message(1_000_000 + 500 * i, 0x100 + i % 7, bytes([i % 256, 7])) for i in range(2000)])

# Reads the first block of a log, and prints how much memory that took. VmHWM begins anew with a program, ru_maxrss does
# not.
PEAK = """
import sys
from pathlib import Path
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings
frames = next(iter(LogReader(Path(sys.argv[1]), CanDatasetSettings(max_malformed=1.0)).blocks()))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(len(frames), peak.split()[1])
"""
FRAME = b"(1436509052.249713) can0 044#2A366C2BBA\n"
PEAK_BYTES = 512 * 2**20  # that docs/can-data.md states


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").compress(data))


def lines_of(path: Path, block_bytes: int = 1 << 20) -> list[str]:
    return [line for _, lines in LogText(path, block_bytes).blocks() for line in lines]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_log_is_recognised_by_its_content(suffix: str, tmp_path: Path) -> None:
    compressed = {**COMPRESSORS, ".zst": zstd}[suffix](TEXT.encode())
    (tmp_path / "log.txt").write_bytes(compressed)
    assert lines_of(tmp_path / "log.txt", 1000) == TEXT.splitlines()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_truncated_log_is_refused_whatever_compressed_it(suffix: str, tmp_path: Path) -> None:
    compressed = {**COMPRESSORS, ".zst": zstd}[suffix](TEXT.encode())
    (tmp_path / "log").write_bytes(compressed[:-20])
    with pytest.raises(DataError, match=r"is no whole (gzip|bzip2|xz|zstd) file"):
        lines_of(tmp_path / "log")


@pytest.mark.parametrize("magic", [b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"])
def test_a_damaged_log_is_refused_whatever_compressed_it(magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    (tmp_path / "log").write_bytes(magic + bytes(range(250)))
    with pytest.raises(DataError, match=r"is no whole (bzip2|xz|zstd) file"):
        lines_of(tmp_path / "log")


def test_several_compressed_parts_in_a_row_are_one_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(zstd(TEXT.encode()) + zstd(b"last line\n"))
    assert lines_of(tmp_path / "log")[-2:] == [TEXT.splitlines()[-1], "last line"]


def test_without_the_package_for_zstd_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "log").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    with pytest.raises(DataError) as caught:
        LogText(tmp_path / "log")
    assert 'pip install "can-train[can]"' in caught.value.remedy


@settings(max_examples=20)
@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1), min_size=1, max_size=20),
    encoding=st.sampled_from(["utf-16", "utf-16-le", "utf-16-be"]),
    block_bytes=st.sampled_from([1, 30, 1 << 20]),
    compressed=st.booleans(),
)
def test_utf_16_is_read_as_utf_8_is(
    lines: list[str], encoding: str, block_bytes: int, compressed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = ("" if encoding == "utf-16" else "\ufeff") + "\r\n".join(lines) + "\r\n"
    data = text.encode(encoding)
    path = tmp_path_factory.mktemp("logs") / "log.txt"
    path.write_bytes(gzip.compress(data) if compressed else data)
    assert lines_of(path, block_bytes) == lines


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_parts_of_a_text_are_whole_lines_of_it(suffix: str, encoding: str, tmp_path: Path) -> None:
    log = LogText(write_log(tmp_path / f"log{suffix}", TEXT, encoding))
    sample = log.sample(num_parts=3, part_bytes=2000, reach_bytes=len(TEXT))
    lines = [line for part in sample.parts for line in part]
    assert set(lines) < set(TEXT.splitlines())
    assert len(lines) > 100
    assert not sample.complete
    assert log.sample(num_parts=3, part_bytes=10**6, reach_bytes=10**6).complete


def of_gigabytes(compressor: str) -> bytes:
    """Compresses 1 GiB of frames; 256 MiB by the compressors that are slow."""
    part = FRAME * (2**20 // len(FRAME))
    if compressor == "bzip2":
        return bz2.compress(part) * 256
    if compressor == "zstd":
        frame, parts = pytest.importorskip("zstandard").ZstdCompressor().compressobj(), 1024
    elif compressor == "xz":
        frame, parts = lzma.LZMACompressor(preset=0), 256
    else:
        frame, parts = zlib.compressobj(1, wbits=31), 256
    return b"".join(frame.compress(part) for _ in range(parts)) + bytes(frame.flush())


def peak_bytes(path: Path) -> int:
    done = subprocess.run([sys.executable, "-P", "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    frames, peak_kib = map(int, done.stdout.split())
    assert frames > 1
    return peak_kib * 1024


@pytest.mark.parametrize("compressor", ["gzip", "bzip2", "xz", "zstd"])
def test_a_small_file_of_gigabytes_of_text_is_read_in_bounded_memory(compressor: str, tmp_path: Path) -> None:
    compressed = of_gigabytes(compressor)
    (tmp_path / "log").write_bytes(compressed)
    (tmp_path / "nested").write_bytes(gzip.compress(compressed))
    assert len(compressed) < 2**20 * (1 + 4 * (compressor == "gzip"))
    assert peak_bytes(tmp_path / "log") < PEAK_BYTES
    assert peak_bytes(tmp_path / "nested") < PEAK_BYTES


@pytest.mark.parametrize("line", [b"\n", b"1\n"])
def test_gigabytes_of_short_lines_are_read_in_bounded_memory(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.gz").write_bytes(gzip.compress(FRAME * 1000 + line * (2**24 // len(line))))
    assert peak_bytes(tmp_path / "log.gz") < PEAK_BYTES


def test_short_lines_are_cut_into_blocks_that_count_on(tmp_path: Path) -> None:
    text = "\n" * (2 * MAX_BLOCK_LINES) + "1\n" * MAX_BLOCK_LINES + "last"
    (tmp_path / "log.gz").write_bytes(gzip.compress(("first\n" + text).encode()))
    blocks = list(LogText(tmp_path / "log.gz").blocks())
    assert max(len(lines) for _, lines in blocks) <= MAX_BLOCK_LINES
    number, lines = blocks[-1]
    assert (number + len(lines) - 1, lines[-1]) == (3 * MAX_BLOCK_LINES + 2, "last")


@pytest.mark.parametrize("compressor", ["xz", "zstd"])
def test_a_window_that_takes_too_much_memory_is_refused_with_a_remedy(compressor: str, tmp_path: Path) -> None:
    if compressor == "xz":
        wide = lzma.compress(
            TEXT.encode(), filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2 * WINDOW_BYTES}]
        )
    else:
        zstandard = pytest.importorskip("zstandard")
        log_bytes = (2 * WINDOW_BYTES).bit_length() - 1
        frame = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(window_log=log_bytes)
        ).compressobj()
        wide = frame.compress(TEXT.encode()) + frame.flush()
    (tmp_path / "log").write_bytes(wide)
    with pytest.raises(DataError, match="window of more than 128 MiB") as caught:
        lines_of(tmp_path / "log")
    assert "Unpack it" in caught.value.remedy


def test_a_log_that_is_compressed_twice_is_read_and_one_compressed_more_often_is_refused(tmp_path: Path) -> None:
    twice = lzma.compress(gzip.compress(TEXT.encode()))
    (tmp_path / "log").write_bytes(twice)
    assert lines_of(tmp_path / "log", 1000) == TEXT.splitlines()
    (tmp_path / "log").write_bytes(bz2.compress(twice))
    with pytest.raises(DataError, match="was compressed more than 2 times"):
        LogText(tmp_path / "log")


def test_an_archive_is_refused_with_the_program_that_unpacks_it(tmp_path: Path) -> None:
    (tmp_path / "drive.log").write_text(TEXT)
    with zipfile.ZipFile(tmp_path / "drive.zip", "w") as archive:
        archive.write(tmp_path / "drive.log")
    with tarfile.open(tmp_path / "drive.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "drive.log")
    for name, program in (("drive.zip", "unzip"), ("drive.tar.gz", "tar -xf")):
        with pytest.raises(DataError, match="is an archive of files") as caught:
            LogText(tmp_path / name)
        assert f"{program} {tmp_path / name}" in caught.value.remedy


def test_a_line_of_absurd_length_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(TEXT + "x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(DataError, match="is longer than 1,048,576 bytes") as caught:
        lines_of(tmp_path / "log", 1000)
    assert "Write each frame on a line" in caught.value.remedy


def test_zeros_between_the_streams_of_an_xz_file_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(lzma.compress(b"first\n") + bytes(4000) + lzma.compress(b"second\n") + bytes(8))
    assert lines_of(tmp_path / "log") == ["first", "second"]
