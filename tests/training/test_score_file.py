"""The file of scores: what it may be named, and what is said where it cannot be written."""

from pathlib import Path

import pytest

from can_train.errors import ConfigError, StateError
from can_train.training.evaluate import check_score_file, write_score_file

SCORES = {"log": ["a.csv"] * 3, "score": [0.5, None, 2.0]}


def test_a_log_is_not_overwritten_with_its_scores_by_whatever_name(tmp_path: Path) -> None:
    log, link, other = (tmp_path / name for name in ("log.csv", "link.csv", "other.csv"))
    log.write_text("a log")
    link.symlink_to(log)
    for name in (log, link):
        with pytest.raises(ConfigError, match="is one of the data files"):
            check_score_file(name, [log])
    check_score_file(other, [log])
    other.touch()
    check_score_file(other, [log])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_what_the_system_refuses_is_said_with_a_remedy(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"scores.{ending}"
    # Its temporary file cannot take the place of a folder.
    (path / "inside").mkdir(parents=True)
    with pytest.raises(StateError, match=r"scores cannot be written: .*scores\.\w+: .*\nMake room"):
        write_score_file(path, SCORES)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
