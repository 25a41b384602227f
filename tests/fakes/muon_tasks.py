"""Small muon tasks for tests."""

from pathlib import Path
from typing import Any

from torch import nn

from can_train.task import Phase
from can_train.training.sample_task import TaskContext
from can_train_tasks.muon.settings import (
    MuonGanSettings,
    MuonSettings,
    ShowerDatasetSettings,
    SyntheticShowerSettings,
)
from can_train_tasks.muon.task import MuonTask

REAL = Path(__file__).parents[2] / "../shared/data/muon"
FEW = SyntheticShowerSettings(showers=60, files=2, muons_per_pev=30.0)


def muon_task(cache: Path, *, hidden: int = 16, bound: float = 1.5, most: int = 100_000, **dataset: Any) -> MuonTask:
    """A task on few simulated showers, or on the data set that the settings name."""
    model = MuonGanSettings(hidden=hidden, bound=bound, max_generated=most)
    settings = ShowerDatasetSettings(**({"synthetic": FEW} | dataset))
    return MuonTask(TaskContext(settings=MuonSettings(), dataset=settings, model=model, cache=cache))


def in_phase(task: MuonTask, phase: Phase) -> MuonTask:
    """The task in a phase, whose model trains only the phase's part, as during training."""
    found = task.in_phase(phase)

    def build_model() -> nn.Module:
        model = task.build_model()
        for name, part in model.named_children():
            part.requires_grad_(name in phase.parameters)
        return model

    found.build_model = build_model  # type: ignore[method-assign]
    return found
