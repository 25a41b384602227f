"""Makes what a run trains from its configuration: the task with its data, and the model with fresh weights."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from torch import nn

from can_train.config.resolved import PathSettings, ResolvedRun
from can_train.config.task_settings import load_object, load_task_settings
from can_train.errors import StateError
from can_train.memory.meters import Meter
from can_train.reporter import Reporter
from can_train.training import randomness
from can_train.training.finished import finished_models
from can_train.training.folders import cache_folder, data_root
from can_train.training.optimization import Precision
from can_train.training.task import SampledTask, Task

T = TypeVar("T")


def load_task(run: ResolvedRun, reporter: Reporter) -> Task:
    """Makes the task of a run, its data prepared; where they cannot be kept for later runs, for this one alone.

    Raises:
        StateError: Nor can they be written to the folder of temporary files.
        CheckpointError: A model that it builds on is not there, or does not fit.
    """
    factory: Callable[..., Task] = load_object(load_task_settings(run.task).factory)
    finished = finished_models(run)
    return with_cache(run.paths, reporter, lambda cache: factory(run, finished, data_root(run.paths), cache, reporter))


def with_cache(paths: PathSettings, reporter: Reporter, make: Callable[[Path], T]) -> T:
    """Makes something of prepared data; where they cannot be kept for later, of some that are there for this alone.

    Args:
        paths: Where they are kept.
        reporter: Is told where they cannot be.
        make: Makes it, given the folder of prepared data.

    Raises:
        StateError: Nor can they be written to the folder of temporary files.
    """
    try:
        return make(cache_folder(paths))
    except StateError as error:
        try:
            scratch = TemporaryDirectory(prefix="can-train-")
        except OSError:
            raise error from None
        reporter.notice(f"Prepared data are not kept. {error}")
    # What is made maps what it reads: that stays readable after its files are gone.
    with scratch as folder:
        return make(Path(folder))


def sample_task(run: ResolvedRun, reporter: Reporter) -> SampledTask:
    """Makes the task of a run from a bounded sample of its data, for a plan; writes nothing."""
    sampler: Callable[..., SampledTask] = load_object(load_task_settings(run.task).sampler)
    return sampler(run, finished_models(run), data_root(run.paths), cache_folder(run.paths), reporter)


def fresh_model(run: ResolvedRun, task: Task, meter: Meter) -> nn.Module:
    """Makes the model of a run on its device; generators start from the run's seed."""
    # Preparing data may or may not have drawn random numbers (a cache): weights start from here.
    randomness.seed_everything(run.training.seed)
    return task.build_model().to(meter.device, Precision.named(run.training.precision).dtype)
