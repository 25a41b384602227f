"""Predicts samples, which need no targets, with a finished run's model: `can_train.load`, and `can-train predict`.

Shapes: R samples of a portion, which are read, predicted and written before the next ones are read.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from can_train.config.compose import prediction_run
from can_train.config.resolved import FinishedModel, PathSettings, ResolvedRun, data_root, state_folder, with_folders_of
from can_train.config.task_settings import load_object, load_task_settings, task_names
from can_train.errors import (
    ArgumentError,
    CanTrainError,
    CheckpointError,
    ConfigError,
    DataError,
    RunError,
    TaskError,
    UntrustedCodeError,
    check_flags,
    check_kinds,
    shown,
)
from can_train.fit.packing import MicroBatchLimit
from can_train.fit.pass_state import load_weights
from can_train.fit.precision import Precision, tf32
from can_train.io.records import is_file
from can_train.memory.meters import device_name, open_meter
from can_train.reporter import Reporter, SilentReporter
from can_train.runs.registry import Registry
from can_train.runs.run_folder import CONFIG
from can_train.runs.status import find_run, known_runs
from can_train.runs.trust import CodeTrust
from can_train.task import UpcomingBatch
from can_train.training.inference import PART_SAMPLES, BatchedInference, InferenceDevice, Rows, compute_as_trained
from can_train.training.loading import finished_model, load_finished, with_cache
from can_train.training.prediction_files import (
    SET,
    Columns,
    DefaultColumns,
    FolderFiles,
    Format,
    Watcher,
    guarded,
    in_set,
)
from can_train.training.read_ahead import SampleReader, is_in_memory
from can_train.training.sample_task import Task, make_task, make_unread
from can_train.training.seeded_samples import read_seeded, seeded_host
from can_train.training.streams import is_stream, length_of

_OTHER_DATA: Final = "Name data that have samples: --dataset FILE"
_IN_LINE: Final = "0"  # value of `training.num_workers`: no other process reads


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a finished run is loaded.

    Attributes:
        device: Where it computes: auto, cpu, cuda[:i], sim:SIZE.
        weights: File of weights, as `epoch-0010`; empty: the weights that the run ended with.
        batch_size: SamplesToPredict that are computed at a time; fewer where memory runs out.
        num_workers: Processes that read samples ahead, as `training.num_workers`; empty: the run's.
        paths: Folders; empty ones are the run's, if they are on this machine.
        trust: Decides whether the run's code may run.
    """

    device: str = "auto"
    weights: str = ""
    batch_size: int = PART_SAMPLES
    num_workers: str = _IN_LINE
    paths: PathSettings = field(default_factory=PathSettings)
    trust: CodeTrust = field(default_factory=CodeTrust)
    reporter: Reporter = field(default_factory=SilentReporter)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError("A batch has at least one sample", value=f"--batch-size {self.batch_size}",
                              remedy="Write it as --batch-size 256")  # fmt: skip


class LoadedModel(ABC):
    """A finished run's model, ready to predict.

    Attributes:
        run_id: Id of the run.
        task: Its task. Its data are read only if the model depends on more than `Task.state`.
        module: The network with the weights that validation chose, on the device and in evaluation mode.
        formats: Formats of files of predictions, beside those of every task.
        has_preview: Whether `preview` shows predictions.
        counted: Word for samples, in the plural.
    """

    run_id: str
    task: Any
    module: nn.Module
    formats: Mapping[str, Format] = {}
    has_preview: bool = False
    counted: str = "samples"

    @abstractmethod
    def read(self, dataset: str | None = None, sets: Sequence[str] = ()) -> Any:
        """Returns the samples of a data set, which may lack their targets.

        Args:
            dataset: Name of a preset, or a path; None: the run's own test samples.
            sets: `dataset.key=value` and `task.key=value`.
        """

    @abstractmethod
    def predict(self, samples: Any) -> list[Any]:
        """Returns the predictions of some samples, in their order.

        Args:
            samples: Values as the task's `collate` or `as_sample` takes them; or the value of `read`.
        """

    @abstractmethod
    def tables(self, samples: Any, *watchers: Watcher) -> Iterator[tuple[int, Columns]]:
        """Yields, portion by portion of the value of `read`, the number of samples that are predicted and the columns
        of their predictions.

        Args:
            samples: The value of `read`.
            watchers: Functions that are called with the samples and the predictions of each portion.
        """

    def parts(self, samples: Any) -> FolderFiles | None:
        """Returns the files of a folder of predictions of the value of `read`; None: predictions are one file."""
        return None

    def preview(self, samples: Any, path: Path) -> AbstractContextManager[Watcher]:
        """Opens a preview of predictions of the value of `read`.

        Args:
            samples: The value of `read`.
            path: An empty folder, or a file that does not exist yet.
        """
        raise NotImplementedError


def load(  # noqa: PLR0913 - a person gives few of them
    run: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    weights: str = "",
    trust_code: bool = False,
    runs_dir: str | os.PathLike[str] = "runs",
    state_dir: str | os.PathLike[str] | None = None,
    data_root: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Loads the model that a finished run has trained: `load("last").predict(samples)`.

    Nothing is written, but for data that a task prepares in the state folder. Generators of random numbers, threads and
    other settings of the process stay as they are.

    Args:
        run: Its folder, its id, any part of it that no other run has, or `last`.
        device: Where it computes: auto, cpu, cuda[:i], or a `torch.device`.
        weights: File of weights that `--keep N` wrote, as `epoch-10`; empty: the weights that the run ended with.
        trust_code: Whether the code that the run names may run, although it is not known to be the user's.
        runs_dir: Folder of run folders.
        state_dir: State folder; None: the user's.
        data_root: Folder of published data sets; None: the run's.

    Raises:
        ArgumentError: An argument has the wrong type.
        RunError: There is no such run.
        UntrustedCodeError: Another user may have chosen the run's code.
        CheckpointError: The run has not finished, or has no such file of weights.
        DoesNotFitError: There is no room for the model on the device.
    """
    device = device_name(device)
    folders = {"run": run, "runs_dir": runs_dir, "state_dir": state_dir, "data_root": data_root}
    optional = ("state_dir", "data_root")
    given = {name: path for name, path in folders.items() if path is not None or name not in optional}
    check_kinds("a path", (str, os.PathLike), 'Give a text or a Path: load("last", runs_dir="runs")', **given)
    check_kinds("the name of a file of weights", str, 'Give weights="epoch-10", or leave it out', weights=weights)
    check_flags(trust_code=trust_code)
    state = state_folder(None if state_dir is None else Path(state_dir))
    # A folder needs no list of runs.
    registry = Registry(state)
    runs = [] if is_file(Path(run) / CONFIG) else known_runs(registry, Path(runs_dir))
    paths = PathSettings(data_root=str(data_root or ""), state_dir=str(state_dir or ""))
    trust = CodeTrust(state=state, trusts_all=trust_code)
    options = LoadOptions(device=device, weights=weights, paths=paths, trust=trust)
    try:
        path = find_run(runs, os.fspath(run), registry.set_aside).folder.path
    except RunError as error:
        if not runs and not registry.set_aside:
            error.remedy = "There are no runs yet; runs_dir=... and state_dir=... name other folders"
        raise
    try:
        return load_model(path, options)
    except UntrustedCodeError as error:
        error.remedy = "Read the code first; load(run, trust_code=True) runs it"
        raise


def load_model(path: Path, options: LoadOptions) -> LoadedModel:
    """Loads the model that the run in a folder has trained; raises as `load` does."""
    finished = load_finished(path, options.trust.config, options.weights)
    model: LoadedModel = load_object(finished.run.task_settings.predictor)(finished, options)
    return model


@dataclass(frozen=True, kw_only=True, eq=False)
class Portion:
    """Samples that are computed at a time.

    Attributes:
        rows: [R] numbers of the samples, for messages.
        samples: The R samples.
        first: Number of the first sample in its set.
        set: Name of their set, where there are several sets; else empty.
    """

    rows: Rows
    samples: list[Any]
    first: int
    set: str = ""


class SamplesToPredict(ABC):
    """Samples of a task that are predicted.

    Attributes:
        task: Knows them.
        total: Their number; None: unknown.
        sets: Names of their sets, where there are several.
    """

    task: Task
    total: int | None
    sets: Sequence[str] = ()

    @abstractmethod
    def portions(self, size: int) -> Iterator[Portion]:
        """Yields portions of some size, in order."""

    @abstractmethod
    def describe(self, row: int) -> str:
        """Names a sample in a message."""


class _Looks:
    """Whether the code of a task has looked at the settings of its data: else it would predict data that it makes
    itself for any `--dataset`.
    """

    def __init__(self, task: Task) -> None:
        self._kind, self._dataset, self._names = type(task).__name__, task.dataset, set[str]()
        kind, names = type(task.dataset), self._names

        def seen(settings: Any, name: str) -> Any:
            if not name.startswith("__"):
                names.add(name)
            return object.__getattribute__(settings, name)

        watched: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": seen}))
        vars(watched).update(vars(task.dataset))
        names.clear()
        task.dataset = watched
        task.context = replace(task.context, dataset=watched)

    def check(self) -> None:
        """Raises ConfigError if the settings were not looked at."""
        if not self._names:
            raise ConfigError(f"{self._kind}.datasets does not look at --dataset", value=self._dataset.path,
                              remedy=f"Read self.dataset.path there, or in {self._kind}.samples_to_predict"
                              )  # fmt: skip


class _OwnSamples(SamplesToPredict):
    """Samples of the task's own test sets: rows, set by set."""

    def __init__(self, task: Task) -> None:
        self.task, self._rows = task, task.test_sets
        self.total = sum(map(len, self._rows.values()))
        self.sets = [*self._rows] if len(self._rows) > 1 else ()

    def portions(self, size: int) -> Iterator[Portion]:
        portions = [(name if self.sets else "", start, rows[start : start + size])
                    for name, rows in self._rows.items() for start in range(0, len(rows), size)]  # fmt: skip
        with self.task.read_ahead(UpcomingBatch(rows=rows) for _, _, rows in portions):
            for name, start, rows in portions:
                samples = self.task.take(rows.tolist(), rows.tolist())
                yield Portion(rows=rows, samples=samples, first=start, set=name)

    def describe(self, row: int) -> str:
        return self.task.describe(row)


class _NamedSamples(SamplesToPredict):
    """Samples by their index in a data set."""

    def __init__(self, task: Task, name: str, samples: Sequence[Any]) -> None:
        self.task, self._name, self._samples, self.total = task, name, samples, len(samples)
        context = task.context
        self._reader = SampleReader(self._read, str(context.num_workers), size=lambda: len(samples),
                                    sets=lambda: [samples], notice=context.reporter.notice)  # fmt: skip

    def portions(self, size: int) -> Iterator[Portion]:
        starts = range(0, self.total or 0, size)
        numbers = (range(start, min(start + size, starts.stop)) for start in starts)
        with self._reader.ahead((part, part) for part in numbers):
            for start in starts:
                rows = np.arange(start, min(start + size, starts.stop), dtype=np.int64)
                yield Portion(rows=rows, samples=self._reader.take(rows.tolist(), rows.tolist()), first=start)

    def first(self) -> None:
        """Reads the first sample."""
        self._read([0], [0])

    def _read(self, rows: Sequence[int], seeds: Sequence[int], failed: Any = None) -> list[Any]:
        if is_in_memory(self._samples):
            return [self._samples[row] for row in rows]
        return read_seeded(rows, seeds, self._get, failed)

    def _get(self, row: int) -> Any:
        with self.task.asked(self.describe(row)):
            return self._samples[row]

    def describe(self, row: int) -> str:
        return f"sample {row} of {self._name}"


class _StreamedSamples(SamplesToPredict):
    """Samples of a stream, which is read as far as they are predicted."""

    def __init__(self, task: Task, name: str, stream: Any, looks: _Looks | None) -> None:
        self.task, self._name, self._stream, self.total = task, name, stream, length_of(stream)
        self._looks = looks

    def portions(self, size: int) -> Iterator[Portion]:
        number = 0
        with self.task.asked(f"the samples of {self._name}"):
            samples = iter(self._stream)
        while True:
            with self.task.asked(f"the samples of {self._name} from number {number} on"), seeded_host(number):
                portion = list(islice(samples, size))
            if self._looks is not None and not number:
                self._looks.check()
            if not portion:
                if not number:
                    raise DataError(
                        "There is nothing to predict", value=f"{self._name} has no samples", remedy=_OTHER_DATA
                    )
                return
            rows = np.arange(number, number + len(portion), dtype=np.int64)
            yield Portion(rows=rows, samples=portion, first=number)
            number += len(portion)

    def describe(self, row: int) -> str:
        return f"sample {row} of {self._name}"


class _SeveralSets(SamplesToPredict):
    """Several sets of samples, one after another."""

    def __init__(self, task: Task, sets: Mapping[str, SamplesToPredict]) -> None:
        self.task, self.sets, self._sets, self._current = task, [*sets], sets, next(iter(sets.values()))
        totals = [samples.total for samples in sets.values()]
        self.total = None if None in totals else sum(total or 0 for total in totals)

    def portions(self, size: int) -> Iterator[Portion]:
        for name, samples in self._sets.items():
            self._current = samples
            for portion in samples.portions(size):
                yield replace(portion, set=name)

    def describe(self, row: int) -> str:
        return self._current.describe(row)


class SampleModel(LoadedModel):
    """A finished model of a `Task`."""

    def __init__(self, finished: FinishedModel, options: LoadOptions) -> None:
        self._finished, self._options = finished, options
        run = self._run = finished.run
        self.run_id = finished.run_id
        self._models = _models(run)
        self.task = self._with_cache(lambda cache: self._unread(run, cache))
        with seeded_host(run.training.seed):
            model = self.task.build_model()
        try:
            load_weights(model, finished.weights, finished.made_buffers)
        except RuntimeError as error:
            raise CheckpointError("The weights of the run do not fit its model", value=f"{error}".partition("\n")[0],
                                  remedy="Use the code that trained it, or train anew") from error  # fmt: skip
        self._inference = open_inference(model, run, options)
        self.module = self._inference.model
        self.formats = self.task.prediction_formats
        self.has_preview = has_preview(type(self.task))

    def read(self, dataset: str | None = None, sets: Sequence[str] = ()) -> SamplesToPredict:
        """Returns the samples of a data set, which may lack their targets; without one, the run's test samples."""
        run = prediction_run(self._run, dataset, sets)
        if dataset is None:
            return _OwnSamples(self._with_cache(lambda cache: self._task(make_task, run, cache)))

        def of_data(cache: Path) -> SamplesToPredict:
            task = self._unread(run, cache)
            name = Path(dataset).name if dataset else ""
            looks = _Looks(task) if type(task).samples_to_predict is Task.samples_to_predict else None
            with seeded_host(0), _naming_method(type(task)), task.asked("samples_to_predict"):
                samples = task.samples_to_predict()
            if not isinstance(samples, Mapping):
                return _to_predict(task, name, samples, looks)
            sets = {str(of_set): _to_predict(task, f"{name}, {of_set}" if len(samples) > 1 else name, each, looks)
                    for of_set, each in samples.items()}  # fmt: skip
            if not sets:
                raise DataError(
                    "There is nothing to predict", value=f"{dataset} has no sets of samples", remedy=_OTHER_DATA
                )
            return next(iter(sets.values())) if len(sets) == 1 else _SeveralSets(task, sets)

        samples: SamplesToPredict = self._with_cache(of_data)
        return samples

    def parts(self, samples: SamplesToPredict) -> FolderFiles | None:
        """Returns the files of a folder of predictions: the files of the task, or a file for each of several sets."""
        if self.task.prediction_parts:
            column, file = self.task.prediction_parts
            return FolderFiles(column=column, file=file, only=samples.task.only_part)
        return FolderFiles(column=SET) if samples.sets else None

    @contextmanager
    def preview(self, samples: SamplesToPredict, path: Path) -> Iterator[Watcher]:
        """Opens the preview of the task."""
        task = samples.task
        with guarded(lambda: task.preview(path), lambda: _drawing(task)) as draw:
            yield draw

    def predict(self, samples: Any) -> list[Any]:
        """Returns the predictions of some samples, in their order."""
        if not isinstance(samples, SamplesToPredict):
            try:
                values = iter([samples] if isinstance(samples, str) else samples)
            except TypeError as error:
                raise ArgumentError(
                    "Samples are a list, or another iterable of them",
                    value=shown(samples),
                    remedy="Give a list, also of a single sample: predict([sample])",
                ) from error
            values = [*values]
            with self.task.asked("as_sample"):
                made = [self.task.as_sample(value) for value in values]
            if not made:
                return []
            samples = _NamedSamples(self.task, "the call", made)
        return [prediction for _, predictions in self._predicted(samples) for prediction in predictions]

    def tables(self, samples: SamplesToPredict, *watchers: Watcher) -> Iterator[tuple[int, Columns]]:
        """Yields, portion by portion, the number of samples that are predicted and the columns of their predictions."""
        default = DefaultColumns()
        for portion, predictions in self._predicted(samples):
            with samples.task.asked("columns"):
                columns = samples.task.columns(portion.samples, predictions)
            columns = default(portion.first, predictions) if columns is None else columns
            for watch in watchers:
                watch(portion.samples, predictions)
            yield len(portion.samples), in_set(portion.set, columns) if samples.sets else columns

    def _predicted(self, samples: SamplesToPredict) -> Iterator[tuple[Portion, list[Any]]]:
        """Yields each portion with its predictions."""
        task = samples.task
        inference = replace(self._inference, describe=samples.describe)
        for portion in samples.portions(self._options.batch_size):
            rows, first = portion.rows, int(portion.rows[0])

            def compute(model: nn.Module, part: Rows, device: torch.device, dtype: torch.dtype) -> list[Any]:
                # Rows of a set need not be successive numbers.
                places = np.searchsorted(rows, part)  # noqa: B023 - called before the next portion
                chosen = [portion.samples[place] for place in places]  # noqa: B023
                return task.predicted(model, part, chosen, device, dtype)

            # Nothing stays changed while the caller has the predictions.
            with _drawing_alike(first, inference.device), computing(self._run, inference.device):
                parts = inference.parts(compute, rows)
            yield portion, [prediction for part in parts for prediction in part]

    def _unread(self, run: ResolvedRun, cache: Path) -> Task:
        return self._task(make_unread, run, cache)

    def _task(self, make: Callable[..., Task], run: ResolvedRun, cache: Path) -> Task:
        options = self._options
        workers = options.num_workers or run.training.num_workers
        return make(run, self._models, data_root(with_folders_of(run, options.paths)), cache, options.reporter,
                    state=self._finished.state, num_workers=workers)  # fmt: skip

    def _with_cache(self, make: Callable[[Path], Any]) -> Any:
        return with_cache(with_folders_of(self._run, self._options.paths), self._options.reporter, make)


def _to_predict(task: Task, name: str, samples: Any, looks: _Looks | None) -> SamplesToPredict:
    """Makes the samples of a data set, or of a set of it, ready for prediction."""
    if is_stream(samples) or not isinstance(samples, Sized):
        return _StreamedSamples(task, name, samples, looks)
    if not len(samples):
        raise DataError("There is nothing to predict", value=f"{name} has no samples", remedy=_OTHER_DATA)
    named = _NamedSamples(task, name, samples)  # type: ignore[arg-type] # has an index
    if looks is not None:
        # Some data sets read their file when the first sample is asked for.
        named.first()
        looks.check()
    return named


def has_preview(kind: type) -> bool:
    """Tells whether a class is a task that has written `Task.preview`."""
    return issubclass(kind, Task) and kind.preview is not Task.preview


def tasks_with_preview() -> list[str]:
    """Lists the installed tasks that have a preview of predictions."""
    names = []
    for name in task_names():
        # A task whose packages are not installed, or whose code fails, is no remedy.
        with suppress(CanTrainError, ImportError):
            task_class = load_task_settings(name).task_class
            names += [name] if task_class and has_preview(load_object(task_class)) else []
    return names


@contextmanager
def _drawing(task: Task) -> Iterator[None]:
    """Turns an error of the task's own preview into an error that names the call; a full disk stays an OSError."""
    try:
        with task.asked("preview"):
            yield
    except TaskError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


def _models(run: ResolvedRun) -> dict[str, FinishedModel]:
    """Reads the finished models that a run builds on; a run that began with another one's weights has its own by now,
    so that the other may be gone.
    """
    models = {}
    for needed in run.prerequisites:
        if getattr(run.mode, needed.role):
            with nullcontext() if needed.required else suppress(RunError, CheckpointError):
                models[needed.role] = finished_model(run, needed.role)
    return models


def open_inference(model: nn.Module, run: ResolvedRun, options: LoadOptions) -> BatchedInference:
    """Copies a model to the device, where parts of `options.batch_size` are computed."""
    device = InferenceDevice(meter=open_meter(options.device), precision=Precision.named(run.training.precision))
    with device.meter.active():
        copied = BatchedInference.of_copy(model.eval(), device, run.training)
    return replace(copied, limit=MicroBatchLimit(samples=options.batch_size))


@contextmanager
def computing(run: ResolvedRun, device: InferenceDevice) -> Iterator[None]:
    """Opens a block that computes as the run did, so that the same samples have the same predictions, bit by bit; other
    code of the process computes as before.
    """
    before = torch.get_deterministic_debug_mode()
    compute_as_trained(run.training)
    try:
        with device.meter.active(), tf32(run.training, device.meter.device):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def _drawing_alike(seed: int, device: InferenceDevice) -> Iterator[None]:
    """Seeds the generators for a block whose model may draw, and restores them after it."""
    with ExitStack() as stack:
        stack.enter_context(seeded_host(seed))
        if device.meter.device.type == "cuda":
            stack.enter_context(torch.random.fork_rng([device.meter.device]))
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _naming_method(kind: type[Task]) -> Iterator[None]:
    """Adds to errors of a task's own reading that a method may read data without targets."""
    try:
        yield
    except TaskError as error:
        if kind.samples_to_predict is Task.samples_to_predict:
            error.remedy = (f"{kind.__name__}.datasets may need targets, which these data need not have: write "
                            f"{kind.__name__}.samples_to_predict; see docs/tasks.md")  # fmt: skip
        raise
