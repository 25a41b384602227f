from pathlib import Path

import pytest

from can_train.errors import DataError
from can_train.tasks.can.data.reading import LogReader
from can_train.tasks.can.settings import CanDatasetSettings


def read(path: Path, times: list[float]) -> LogReader:
    path.write_text("".join(f"({time:.6f}) can0 123#00\n" for time in times))
    reader = LogReader(path, CanDatasetSettings())
    for _ in reader.blocks():
        pass
    return reader


def test_a_clock_that_jitters_is_only_reported(tmp_path: Path) -> None:
    reader = read(tmp_path / "drive.log", [10 + index / 1000 - (index % 3 == 2) * 0.003 for index in range(30)])
    assert reader.report.jitter == 10
    assert "time steps back at 10 rows" in reader.report.summary()[0]


def test_a_log_in_reverse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must run forwards: .*drive.log steps back at 29 of 30 frames.*\n.*Sort"):
        read(tmp_path / "drive.log", [10 - index / 1000 for index in range(30)])
