"""The CAN task: window graphs of a log, and the modes that learn from them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.reporter import Reporter
from can_train.tasks.can.data.dataset import CanData, load_data
from can_train.tasks.can.data.sampling import sample_data
from can_train.tasks.can.fusion.mode import FusionTask
from can_train.tasks.can.modes.autoencoder import AutoencoderTask
from can_train.tasks.can.modes.classifier import ClassifierTask
from can_train.tasks.can.modes.curriculum import CurriculumTask
from can_train.tasks.can.modes.distillation import distillation_task
from can_train.tasks.can.modes.windows import WindowTask


def make_task(
    run: ResolvedRun, finished: Mapping[str, FinishedModel], data_root: Path, cache: Path, reporter: Reporter
) -> WindowTask:
    """Makes the task with all of its data.

    Args:
        run: The resolved run.
        finished: The models that it builds on, by role.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data.
        reporter: Where progress and notices go.

    Raises:
        DataError: The log cannot be read, is too short, or lacks the labels that the mode learns from.
    """
    return _task(run, load_data(run.dataset, data_root, cache, reporter), finished)


def sample_task(
    run: ResolvedRun, finished: Mapping[str, FinishedModel], data_root: Path, cache: Path, reporter: Reporter
) -> WindowTask:
    """Makes the task with what can be known of its data in a few seconds and without writing anything.

    Args:
        run: The resolved run.
        finished: The models that it builds on, by role.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data, looked into.
        reporter: Where progress and notices go.

    Raises:
        DataError: A log that was looked at cannot be read, or all that is there lacks the labels that the mode learns
            from.
    """
    return _task(run, sample_data(run.dataset, data_root, cache, reporter), finished)


Finished = Mapping[str, FinishedModel]


_MODES: Final[Mapping[str, Callable[[ResolvedRun, CanData, Finished], WindowTask]]] = {
    "normal": lambda run, data, finished: ClassifierTask(run, data),
    "autoencoder": lambda run, data, finished: AutoencoderTask(run, data),
    "fusion": FusionTask,
    "curriculum": CurriculumTask,
    "knowledge_distillation": distillation_task,
}
"""What makes the task of each mode."""


def _task(run: ResolvedRun, data: CanData, finished: Finished) -> WindowTask:
    return _MODES[run.mode.name](run, data, finished)
