"""Logs that grow, of several jobs and ranks."""

from pathlib import Path

import pytest

from can_train.cli.logs import GrowingLog, log_paths, ranks_with_logs
from can_train.errors import RunError
from fakes.made_runs import Runs


def test_a_log_is_read_on_from_where_it_was_left_also_within_a_character(tmp_path: Path) -> None:
    log = GrowingLog(tmp_path / "log")
    assert log.new_text() == ""
    whole = "a × b".encode()
    log.path.write_bytes(whole[:3])
    first = log.new_text()
    log.path.write_bytes(whole)
    assert first + log.new_text() == "a × b"
    assert log.new_text() == ""


def test_each_rank_has_a_log_beside_the_first(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    path = runs.add(1)
    job = runs.submit(path, "7_3", log_path=str(path / "slurm" / "7_3_0_log.out"))
    (path / "slurm").mkdir()
    for name in ("7_3_0_log.out", "7_3_1_log.out", "7_30_0_log.out", "7_3_0_result.pkl"):
        (path / "slurm" / name).touch()
    (known,) = runs.known()
    assert ranks_with_logs(path / "slurm" / "7_3_0_log.out") == [0, 1]
    assert log_paths([job], known, 1) == [path / "slurm" / "7_3_1_log.out"]
    with pytest.raises(RunError, match=r"No such rank(.|\n)*0, 1"):
        log_paths([job], known, 2)


def test_a_run_of_a_terminal_has_no_log(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add(1)
    with pytest.raises(RunError, match="Only a submitted run has a log"):
        log_paths([], runs.known()[0], 0)
