"""The processors that reading ahead may use."""

import pytest

from can_train.training.read_ahead import available_cores


def test_processes_of_a_machine_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = available_cores()
    for size, cores in (("2", max(alone // 2, 1)), ("0", alone), ("", alone), ("none", alone)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
        assert available_cores() == cores
