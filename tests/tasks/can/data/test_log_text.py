"""The text of logs: however it is compressed or encoded, the same lines are read."""

import gzip
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError
from can_train.tasks.can.data.log_text import LogText
from fakes.tasks_can_writers import COMPRESSORS, Message, candump, write_log

TEXT = candump([Message(1_000_000 + 500 * i, 0x100 + i % 7, bytes([i % 256, 7])) for i in range(2000)])


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
    with pytest.raises(DataError, match=r"must be a whole (gzip|bzip2|xz|zstd) file"):
        lines_of(tmp_path / "log")


@pytest.mark.parametrize("magic", [b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"])
def test_a_damaged_log_is_refused_whatever_compressed_it(magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    (tmp_path / "log").write_bytes(magic + bytes(range(250)))
    with pytest.raises(DataError, match=r"must be a whole (bzip2|xz|zstd) file"):
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
