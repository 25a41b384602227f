"""Recordings and tasks of EEG for tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from can_train.config.task_settings import NoSettings
from can_train.training.sample_task import TaskContext
from can_train_tasks.bendr.settings import (
    BendrSettings,
    ClassifySettings,
    PretrainSettings,
    RecordingSettings,
    SimulatedRecordings,
)
from can_train_tasks.bendr.task import Bendr

EYE_STATE = Path(__file__).parents[2] / "../shared/data/eeg/EEG_Eye_State.csv"
SMALL = BendrSettings(hidden=16, layers=1, heads=2, feedforward=32, groups=4, position_kernel=5, dropout=0.0)
SYNTHETIC = RecordingSettings(
    window_s=1.0, stride_s=0.5, synthetic=SimulatedRecordings(recordings=2, seconds=30.0, channels=4)
)
PRETRAIN, CLASSIFY = PretrainSettings(), ClassifySettings()


def eeg_task(mode: Any, cache: Path, dataset: RecordingSettings = SYNTHETIC, **more: Any) -> Bendr:
    """The task as a run makes it."""
    context = {"settings": NoSettings(), "model": SMALL, **more}
    return Bendr(TaskContext(mode=mode, dataset=dataset, cache=cache, **context))


def write_recording(
    path: Path, signal: NDArray[Any], labels: NDArray[Any] | None = None, *, separator: str = ",", end: str = "\n"
) -> Path:
    """Writes [T, C] numbers as a recording; `repr` of a float is read back exactly."""
    names = [f"E{number}" for number in range(signal.shape[1])] + (["label"] if labels is not None else [])
    rows = [[repr(float(value)) for value in row] for row in signal]
    if labels is not None:
        rows = [[*row, str(int(label))] for row, label in zip(rows, labels, strict=True)]
    text = end.join(separator.join(row) for row in [names, *rows]) + end
    path.write_bytes(text.encode())
    return path


def noise(samples: int, channels: int = 2, seed: int = 0) -> NDArray[np.float32]:
    """[T, C] normal numbers."""
    return np.random.default_rng(seed).normal(size=(samples, channels)).astype(np.float32)


def finished(weights: Any) -> Any:
    """A pretrained run."""
    return SimpleNamespace(run_id="pretrained-run", weights=weights)
