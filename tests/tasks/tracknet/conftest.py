from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from can_train.training.sample_task import TaskContext
from can_train_tasks.tracknet.settings import (
    SyntheticVideoSettings,
    TrackNetDatasetSettings,
    TrackNetSettings,
    UNetSettings,
)
from can_train_tasks.tracknet.task import TrackNetTask

RALLIES = Path(__file__).parents[3] / "../shared/data/tracknet"
needs_rallies = pytest.mark.skipif(not RALLIES.is_dir(), reason=f"{RALLIES} is not there")
VIDEO = SyntheticVideoSettings(seed=7, games=3, clips=1, frames=24, width=64)
DATASET = TrackNetDatasetSettings(width=32, height=16, synthetic=VIDEO)
MakeTask = Callable[..., TrackNetTask]


@pytest.fixture(scope="session")
def make_task(tmp_path_factory: pytest.TempPathFactory) -> MakeTask:
    """Makes a task with a small network, on simulated games or on another data set."""
    cache = tmp_path_factory.mktemp("cache")

    def make(dataset: TrackNetDatasetSettings = DATASET, *, sampling: bool = False, **settings: Any) -> TrackNetTask:
        context = TaskContext(settings=replace(TrackNetSettings(), **settings), dataset=dataset, cache=cache,
                              model=UNetSettings(width=4, levels=2, groups=2), sampling=sampling)  # fmt: skip
        return TrackNetTask(context)

    return make
