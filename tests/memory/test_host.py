from pathlib import Path

import pytest

from can_train.memory.host import _cgroup_room, _meminfo_available, available_bytes, nvidia_driver_version, total_bytes


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_kernel_says_what_is_available_in_kibibytes(tmp_path: Path) -> None:
    text = "MemTotal:       100 kB\nMemFree:  10 kB\nMemAvailable:    64 kB\nHugePages_Total:  0\n"
    assert _meminfo_available(written(tmp_path / "meminfo", text)) == 64 * 1024


@pytest.mark.parametrize("text", ["", "MemTotal: 100 kB\n"])
def test_an_old_kernel_does_not_say_what_is_available(tmp_path: Path, text: str) -> None:
    assert _meminfo_available(written(tmp_path / "meminfo", text)) is None
    assert _meminfo_available(tmp_path / "none") is None


@pytest.mark.parametrize(("limit", "room"), [("1000\n", 400), ("500\n", 0), ("max\n", None), ("", None)])
def test_a_control_group_leaves_what_it_does_not_use(tmp_path: Path, limit: str, room: int | None) -> None:
    usage = written(tmp_path / "current", "600\n")
    assert _cgroup_room(written(tmp_path / "max", limit), usage) == room


def test_without_a_control_group_there_is_no_limit(tmp_path: Path) -> None:
    assert _cgroup_room(tmp_path / "max", tmp_path / "current") is None


def test_no_more_is_available_than_there_is() -> None:
    assert 0 < available_bytes() <= total_bytes()


def test_a_driver_has_a_version_or_there_is_none() -> None:
    version = nvidia_driver_version()
    assert version == "" or version[0].isdigit()
