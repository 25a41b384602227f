"""The CAN task: window graphs of a log, and the modes that learn from the graphs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.reporter import Reporter
from can_train_tasks.can.data.dataset import CanData, load_data
from can_train_tasks.can.data.sampling import sample_data
from can_train_tasks.can.fusion.agent import FusionTask
from can_train_tasks.can.modes.curriculum import CurriculumTask
from can_train_tasks.can.modes.distillation import DistilledAutoencoderTask, DistilledClassifierTask
from can_train_tasks.can.modes.windows import AutoencoderTask, ClassifierTask, WindowTask
from can_train_tasks.can.settings import GatSettings

Finished = Mapping[str, FinishedModel]

_MODES: Final[Mapping[str, Callable[[ResolvedRun, CanData, Finished], WindowTask]]] = {
    "normal": lambda run, data, finished: ClassifierTask(run, data),
    "autoencoder": lambda run, data, finished: AutoencoderTask(run, data),
    "fusion": FusionTask,
    "curriculum": CurriculumTask,
    "knowledge_distillation": lambda run, data, finished: (
        DistilledClassifierTask if isinstance(run.model, GatSettings) else DistilledAutoencoderTask
    )(run, data, finished),
}


def make_task(run: ResolvedRun, finished: Finished, data_root: Path, cache: Path, reporter: Reporter) -> WindowTask:
    """Makes the task with all of its data; `finished` has the finished models that the mode needs, by role.

    Raises:
        DataError: The log cannot be read, is too short, or lacks the labels that the mode learns from.
    """
    return _MODES[run.mode.name](run, load_data(run.dataset, data_root, cache, reporter), finished)


def sample_task(run: ResolvedRun, finished: Finished, data_root: Path, cache: Path, reporter: Reporter) -> WindowTask:
    """Makes the task for a plan, with a sample of its data that takes seconds to read; not even the cache is written.

    Raises:
        DataError: A log cannot be read, or the data lack the labels that the mode learns from.
    """
    return _MODES[run.mode.name](run, sample_data(run.dataset, data_root, cache, reporter), finished)
