"""`Task`: the class that a person writes to have a model trained. It describes single samples, and implements the
methods that training, planning and evaluation call (`BatchTask`) with them.

Shapes: R samples of a call, named by their rows: the samples of `datasets()` one after another, in the order of sets.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from inspect import getattr_static
from itertools import chain, tee
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, Final, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import ConcatDataset

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.config.task_settings import DatasetSettings, ModeSettings, NoSettings, load_object, missing_extra
from can_train.errors import CanTrainError, ConfigError, DataError, TaskError, is_stop
from can_train.fit.collate import ResidentSamples, bytes_of_samples, host_copies, leaves, pad_and_stack, to_device
from can_train.fit.random_state import capture_generators, restore_generators
from can_train.io.records import sketch
from can_train.io.units import counted, size_text
from can_train.memory.cuda_operators import on_host
from can_train.memory.host import available_bytes
from can_train.memory.out_of_memory import is_out_of_memory
from can_train.reporter import Reporter, SilentReporter, TextTable
from can_train.task import SAMPLES, BatchTask, Feature, LogicalBatch, Phase, Predictions, UpcomingBatch
from can_train.training.read_ahead import Failed, SampleReader, is_in_memory
from can_train.training.seeded_samples import read_seeded, reading, sample_seeds, seeded
from can_train.training.streams import LOOKED, End, StreamParts, StreamReader, TrainingStream, is_stream, length_of
from can_train.training.task_values import (
    TEST,
    TRAIN,
    VALIDATION,
    Losses,
    PartOutcome,
    baseline_numbers,
    check_method,
    check_named,
    check_names,
    checked_counts,
    checked_denominators,
    checked_terms,
    class_numbers,
    class_shares,
    measure_numbers,
    metric_numbers,
    name_taken,
    sampled_rows,
    scored,
)

T = TypeVar("T")

_VALIDATION_SETS: Final = "validation_sets"
MODEL: Final = "model"
_HELD_OUT: Final = 0.1  # Share of the training samples that validate where a task names no such set
_KEPT_SHARE: Final = 0.25  # Of the available host memory, for the samples of a validation or test stream
_SAMPLE_BYTES: Final = 200  # That a sample takes beside its tensors
_PORTION: Final = 256  # Samples that are read ahead as if they were a logical batch, where nothing is trained
_LOOK: Final = 64  # Samples that are looked at to find out whether samples differ in length
_PADDED: Final = 1  # Row lengths of padded batches grow memory linearly,
_SQUARED: Final = 2  # and attention between their positions with the square;
_SUMMED: Final = 0  # packed sequences and concatenated samples have no padding
_LACKS_GRADIENTS: Final = re.compile(r"requires?[ _]grad|[Ii]nference tensor")  # Errors of PyTorch where they are off
_DIGITS: Final = 4  # Significant ones of a figure that is shown
_MOST_COLUMNS: Final = 4  # Of metrics, beside each other within 80 columns

# Methods that are called only where the class has them: else an object may keep data under their names.
_CALLED_IF_WRITTEN: Final = frozenset({"denominators", "draw", "features", "labels", "sampler"})

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """The arguments of a task.

    Attributes:
        settings: An instance of the task's `Settings`: `--set task.name=value`.
        dataset: The data set's settings, among them its `name` and `path`: `--dataset`, `--set dataset.name=value`.
        model_name: The model that was chosen; empty where the task has one.
        model: Its settings: `--set model.name=value`.
        mode: Settings of the mode, among them its `name`: `--mode`, `--set mode.name=value`.
        seed: Of the run.
        data_root: Folder of published data sets.
        cache: Folder of prepared data, which may be deleted at any time.
        finished: The finished models that the run builds on, by role.
        evaluation: An instance of the task's `EvaluationSettings`: the options of `can-train evaluate`.
        state: The value of `Task.state` of the run that is evaluated; empty in training.
        sampling: Whether only a plan is asked for: a sample of the data will do, and nothing is written.
        num_workers: Processes that read samples ahead: a number, or `auto`; `0`: the task's own process reads them.
        epoch_samples: Training samples of an epoch where they come from a stream; 0: as many as the stream says.
    """

    settings: Any
    dataset: Any = field(default_factory=DatasetSettings)
    model_name: str = ""
    model: Any = field(default_factory=NoSettings)
    mode: Any = field(default_factory=ModeSettings)
    seed: int = 42
    data_root: Path = Path("data")
    cache: Path = Path(".cache")
    finished: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Any = field(default_factory=NoSettings)
    state: Mapping[str, Any] = field(default_factory=dict)
    reporter: Reporter = field(default_factory=SilentReporter)
    sampling: bool = False
    num_workers: str = "0"
    epoch_samples: int = 0


class Task(BatchTask):
    """A task that is described by its samples; at least `datasets`, `model` and `loss` are written.

    A subclass may have methods and attributes of any name that begins with an underscore.

    >>> class Digits(Task):
    ...     @dataclass(frozen=True, kw_only=True)
    ...     class Settings:
    ...         hidden: int = 32
    ...
    ...     def datasets(self):
    ...         return {"train": [(torch.randn(64), i % 10) for i in range(100)]}
    ...
    ...     def model(self):
    ...         hidden = self.settings.hidden
    ...         return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    ...
    ...     def loss(self, model, batch):
    ...         images, labels = batch
    ...         total = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    ...         return {"classification": (total, len(labels))}
    >>> len(Digits().train_rows)
    90

    Attributes:
        Settings: Dataclass of the task's settings, frozen and with keyword-only fields.
        DatasetSettings: Dataclass of a data set's settings; has `name` and `path`.
        models: Settings dataclass of each model that `--model` chooses from, the default first; empty: one model.
        modes: Settings dataclass of each mode that `--mode` chooses from; has `name`.
        EvaluationSettings: Dataclass whose fields are options of `can-train evaluate`; `context.evaluation` has their
            values.
        training: Its own defaults of training settings, by name: `{"lr": 1e-4, "lr_batch_size": 32}`.
        prediction_formats: Formats of `can-train predict` beside CSV, JSON lines and Parquet: by the ending of a file,
            a context manager that is given the path and returns a function to append columns.
        prediction_parts: The files of `can-train predict --out FOLDER/`: the column of `columns` that names the part of
            a row, and a pattern for the names of files, `{}_ball`. Empty: predictions are one file.
        only_part: Name of the part of data that are one part, whose rows do not name it.
        settings, dataset, model_settings, mode: Their values in this run.
    """

    Settings: ClassVar[type] = NoSettings
    DatasetSettings: ClassVar[type] = DatasetSettings
    models: ClassVar[Mapping[str, type]] = {}
    modes: ClassVar[Mapping[str, type]] = {}
    EvaluationSettings: ClassVar[type] = NoSettings
    training: ClassVar[Mapping[str, Any]] = {}
    prediction_formats: ClassVar[Mapping[str, Any]] = {}
    prediction_parts: ClassVar[tuple[str, ...]] = ()
    only_part: str = "predictions"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_names(cls, Task)

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr_static(Task, name, None)
        # Rows of a training may be others than the task's.
        if isinstance(own, property) or (isinstance(own, cached_property) and not isinstance(value, np.ndarray)):
            raise name_taken(type(self), name)
        is_called = name not in _CALLED_IF_WRITTEN or getattr_static(type(self), name) is not own
        if isinstance(own, FunctionType) and (callable(value) or is_called):
            check_method(type(self), name, staticmethod(value) if isinstance(value, FunctionType) else value, Task)
        super().__setattr__(name, value)

    def __init__(self, context: TaskContext | None = None) -> None:
        # Private names have two underscores: a subclass may have a `_read` of its own.
        self.context = context or TaskContext(settings=self.Settings(), dataset=self.DatasetSettings(),
                                              evaluation=self.EvaluationSettings())  # fmt: skip
        self.settings, self.dataset = self.context.settings, self.context.dataset
        self.model_settings, self.mode = self.context.model, self.context.mode
        self.__phase = Phase()
        self.__takes_gradients: dict[str, bool] = {}  # By the name of each method that validation has called
        # Copies of the task for phases share both.
        self.__resident = ResidentSamples(self)
        self.__classified: dict[str, Predictions | None] = {}  # by test set, once it is judged
        self.__reader = SampleReader(
            self.__read, str(self.context.num_workers),
            size=lambda: sum(map(len, self.__indexed)), sets=lambda: self.__indexed,
            notice=self.context.reporter.notice,
        )  # fmt: skip

    # Methods that a person writes

    def datasets(self) -> Mapping[str, Sequence[Any] | Iterable[Any]]:
        """Returns the samples, by set: `train`, and where there are any `validation` and `test`. Several test sets are
        a dict by name under `test`, or have names of their own; each is tested by itself. Global random generators are
        seeded meanwhile, alike in all runs.

        A sample is a tensor, a number or text, or a tuple, list, dict or dataclass of them. Without a validation set a
        tenth of the training samples is kept for it. Several validation sets are a dict by name under `validation`: the
        mean of their losses, or the figure that `training.best_by` names, chooses the best weights.

        A set may be a stream, which can only be iterated: an `IterableDataset`, say. Training samples are read as they
        are needed; samples of the other sets are read once, and stay in memory.
        """
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Makes the model with fresh weights, on the CPU."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Computes the loss terms of a batch.

        Args:
            model: On the device.
            batch: Collated samples on the device: a part of a logical batch.

        Returns:
            By term, the sum over the batch and its denominator: the number of samples (or tokens, pixels, …) in this
            batch. The sum over the logical batch is divided by the sum of the denominators. A mean, or a sum divided
            here, would weigh parts wrongly. A term may be left out where a batch has nothing that it is about.
        """
        raise NotImplementedError

    # Methods that a person may write

    def collate(self, samples: Sequence[Any]) -> Any:
        """Makes a batch of samples: tensors and numbers are stacked; tensors whose lengths differ are padded with zeros
        at their ends, to the longest of these samples.

        It is called for each micro-batch anew, so that a micro-batch of short samples is small. A batch that is padded
        to a fixed length, or to the longest sample of the logical batch, takes as much memory as if all were long.
        """
        return pad_and_stack(samples)

    def features(self, sample: Any) -> Mapping[str | Feature, float]:
        """Counts the things that the memory of a batch grows with, by name: `{"nodes": 5, "edges": 9}`.

        The name alone: a batch has the sum over its samples. `Feature("tokens", padding=1)`: samples are padded to the
        longest; `padding=2`: and attention is computed between all pairs. The first one is the main feature. Without an
        override, samples count alike; those with tensors of different lengths count their lengths, padded and summed.
        An override that calls this one gets the lengths.
        """
        return _lengths(sample)

    def denominators(self, samples: Sequence[Any]) -> Mapping[str, float] | None:
        """Returns the denominator of each loss term for some samples without computing the model; None, the default:
        `loss` tells them.

        It is worth writing where `loss` has several terms whose denominators are not the number of samples: a batch
        that is split is then computed twice otherwise.
        """
        return None

    def draw(self, samples: Sequence[Any], generator: torch.Generator) -> Sequence[Any]:
        """Adds to samples their random parts in this step: noise, masks, negatives.

        It is called once for each logical batch, on the CPU and before the batch is split, so that it draws the same
        however the batch is computed. In validation it is called for each sample by itself, with the same draws every
        time. Dropout needs nothing here.

        Returns:
            A sample for each one given, in their order; they are then collated in place of them.
        """
        return samples

    def sampler(self, epoch: int) -> Iterable[int] | Tensor | NDArray[Any] | None:
        """Chooses the training samples of an epoch, counted from 0: their numbers in the set `train`, in order, where
        some may be missing and others come several times; a `Sampler` of PyTorch will do. An array or tensor of
        floating-point numbers is a weight for each sample of the set: as many as the set has are drawn with
        replacement. None, the default: all samples, shuffled.

        Global random generators are seeded by the run's seed and the epoch. Samples that are kept for validation are
        left out. A sampler that remembers something must be made anew in each call.
        """
        return None

    def may_live_on_device(self) -> bool:
        """Tells whether the tensors of samples may live on the device. They may by default where samples are in lists
        or tensors, and `collate`, `draw` and `denominators` are not written.

        With an override that returns True, samples must be the same whenever they are read. `draw` and `denominators`
        leave the tensors of `datasets` alone, and `collate` asks for their lengths, and joins them by
        `can_train.fit.collate.pad_and_stack` or `join`.
        """
        written = (type(self).collate is not Task.collate, type(self).draw is not Task.draw,
                   type(self).denominators is not Task.denominators)  # fmt: skip
        return not any(written) and all(map(is_in_memory, self.__indexed))

    def validation_loss(self, model: nn.Module, batch: Any) -> Losses:
        """Computes the loss terms that choose the best weights, without gradients; the default is `loss`."""
        return self.loss(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | Tensor, float | Tensor]]:
        """Computes metrics that add up over batches, as (sum, denominator): `{"accuracy": (correct, len(labels))}`."""
        return {}

    def predict(self, model: nn.Module, batch: Any) -> Sequence[Any] | Tensor | None:
        """Computes a prediction for each sample of a batch; `measure` computes metrics from them that do not add up.
        None, the default: there are none.
        """
        return None

    def call_model(self, model: nn.Module, batch: Any) -> None:
        """Calls the model with a batch, as the users of an exported model will: `can-train export` records the call,
        whose arguments are tensors, or tuples, lists, dicts and dataclasses of them. The default predicts, and computes
        the validation loss.
        """
        self.predict(model, batch)
        self.validation_loss(model, batch)

    def measure(self, samples: Sequence[Any], predictions: Sequence[Any]) -> Mapping[str, float]:
        """Computes metrics of all predictions of a set: tensors are on the CPU, in the order of the samples."""
        return {}

    def labels(self, samples: Sequence[Any]) -> Sequence[int] | None:
        """Returns the class of each sample, from 0, where `predict` returns the probability of each class. A report has
        the confusion matrix, the calibration and the surest errors. None, the default: there are no classes.
        """
        return None

    def samples_to_predict(self) -> Sequence[Any] | Iterable[Any] | Mapping[str, Sequence[Any] | Iterable[Any]]:
        """Returns the samples of `can-train predict --dataset`, in the order of the data; several sets as a dict by
        name. `self.dataset` has the settings of these data, `self.context.state` the value of `state` in training.

        The samples may lack their targets: `collate` and `predict` alone see them. A stream is read as its samples are
        needed. The default is the test sets of `datasets()`, all of its sets where there is no test set: write this
        method where `datasets()` needs targets.
        """
        sets = _flat_sets(dict(self.datasets()))
        tests = {name: samples for name, samples in sets.items() if name != TRAIN and not _validates(name)}
        return tests or chained([*sets.values()])

    def preview(self, path: Path) -> AbstractContextManager[Callable[[Sequence[Any], Sequence[Any]], object]]:
        """Opens the pictures or the video of `can-train predict --preview`: a context manager, whose value is called
        with the samples and the predictions of each portion, in the order of the data.

        Args:
            path: An empty folder, where the line names a folder; else a file that does not exist yet, with the ending
                of the line. Both appear in their place when all is predicted.
        """
        raise NotImplementedError

    def as_sample(self, value: Any) -> Any:
        """Makes a sample of a value that `can_train.load(RUN).predict` is given; the default is the value."""
        return value

    def columns(self, samples: Sequence[Any], predictions: Sequence[Any]) -> Mapping[str, Sequence[Any]] | None:
        """Returns the columns of the file of predictions for some samples, by name; a sample may have any number of
        rows. None, the default: the sample's number, and its prediction in as many columns as it has parts; for shares
        that add up to 1, the class and its probability, too.
        """
        return None

    def baselines(self, samples: Sequence[Any]) -> Mapping[str, Mapping[str, float]]:
        """Computes the metrics of simple methods on the samples of a test set, by name of the method."""
        return {}

    def sample_datasets(self) -> Mapping[str, Sequence[Any] | Iterable[Any]]:
        """Returns fewer samples than `datasets`, for a plan: read in seconds, and with nothing written. The default
        reads all of them. An override sets `sample_note`, and `estimated_train_rows` where it knows.
        """
        return self.datasets()

    @classmethod
    def files(cls, dataset: Any, data_root: Path) -> Sequence[Path]:
        """Lists the files of a data set by its settings; none where data are made or downloaded."""
        return [Path(dataset.path)] if dataset.path else []

    def data_digest(self) -> str:
        """Returns a digest of the files, or of data without files the numbers of samples. A resumed run refuses
        others.
        """
        counts = {name: len(samples) for name, samples in self.sets.items() if not isinstance(samples, TrainingStream)}
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        return sketch(self.files(self.dataset, self.context.data_root)) or listed

    # Methods that training, planning and evaluation call

    @cached_property
    def sets(self) -> Mapping[str, Sequence[Any]]:
        """The data, as the task names their sets; read when they are first needed."""
        read = self.sample_datasets if self.context.sampling else self.datasets
        # Data that are drawn at random must be the same in every process and every attempt, and for every seed.
        with self.asked(read.__name__), seeded(0):
            given = read()
        if not isinstance(given, Mapping):
            rule = f"{type(self).__name__}.{read.__name__} returned a {type(given).__name__}, and not a dict of sets"
            raise DataError(rule, remedy=_SETS_REMEDY)
        sets = _flat_sets(given)
        _check_sets(type(self).__name__, sets)
        for name in [name for name, samples in sets.items() if is_stream(samples)]:
            # The training stream comes last: the numbers of its samples go on from epoch to epoch.
            stream = sets.pop(name)
            sets[name] = stream if name == TRAIN else self.__read_once(name, stream)
        if TRAIN in sets and is_stream(sets[TRAIN]):
            sets[TRAIN] = self.__training_stream(sets.pop(TRAIN), set(sets))
        return sets

    def __training_stream(self, stream: Any, others: Collection[str]) -> TrainingStream:
        name = f"The stream {TRAIN!r}"
        if not any(map(_validates, others)):
            raise DataError(f"{name} needs a validation set beside it", value=f"{type(self).__name__}.datasets",
                            remedy="Return one under the name 'validation', which may be a stream")  # fmt: skip
        if type(self).sampler is not Task.sampler or type(self).in_epoch is not BatchTask.in_epoch:
            remedy = "Choose samples in the stream's __iter__, or return a data set with an index"
            raise ConfigError("A stream decides the order of its samples itself", remedy=remedy,
                              value=f"{type(self).__name__} has a sampler, or epochs that differ")  # fmt: skip
        samples = self.context.epoch_samples or length_of(stream)
        if samples is None:
            raise ConfigError(f"{name} does not say how many samples it has",
                              value=f"{type(stream).__name__} has no __len__",
                              remedy="Say how many optimizer steps make an epoch: "
                                     "--set training.steps_per_epoch=1000")  # fmt: skip
        if not samples:
            raise DataError(f"{name} has no samples", value=f"the length of {type(stream).__name__} is 0",
                            remedy="Return the number of its samples from __len__")  # fmt: skip
        return TrainingStream(stream=stream, samples=samples, seed=self.context.seed, described=name,
                              asked=self.__streaming)  # fmt: skip

    @contextmanager
    def __streaming(self, what: str) -> Iterator[None]:
        """Opens a block that iterates a stream."""
        # A simulated GPU does not count the work of reading.
        with self.asked(what), reading(), _disable_current_modes():
            yield

    def __read_once(self, name: str, stream: Any) -> list[Any]:
        """Reads a stream of validation or test samples, of which there must be an end; a plan needs the first ones."""
        samples, size, parts = list[Any](), 0, StreamParts(stream, 0, divides=False)
        most, room = LOOKED if self.context.sampling else length_of(stream), _KEPT_SHARE * available_bytes()
        with (
            self.__streaming(f"the stream {name!r}"),
            self.context.reporter.stage(f"reading {name}", unit="samples") as stage,
        ):
            while len(samples) != most and not isinstance(sample := parts.read(0, 0, len(samples)), End):
                samples.append(sample)
                size += sum(tensor.nbytes for tensor in leaves(sample)) + _SAMPLE_BYTES
                if size > room:
                    raise DataError(f"The stream {name!r} does not fit into memory, where its samples are kept",
                                    value=f"{len(samples):,} samples take {size_text(size)}",
                                    remedy="Return fewer, as itertools.islice(stream, 1000) has them, or a data set "
                                           "with an index")  # fmt: skip
                stage.advance(1)
        if not samples:
            raise DataError(f"The stream {name!r} has no samples",
                            remedy="Its __iter__ must begin anew each time that it is called")  # fmt: skip
        return samples

    @property
    def stream(self) -> TrainingStream | None:
        """The training samples, where they come from a stream."""
        samples = self.sets[TRAIN]
        return samples if isinstance(samples, TrainingStream) else None

    @property
    def in_order(self) -> bool:  # type: ignore[override]
        """Whether training samples have to be read in their order."""
        return self.stream is not None

    @property
    def __indexed(self) -> list[Any]:
        """The sets whose samples are read by their index; their rows come first."""
        return [samples for samples in self.sets.values() if not isinstance(samples, TrainingStream)]

    @cached_property
    def __stream_row(self) -> int:
        """The row of the first sample of the stream; there is none before it where there is no stream."""
        indexed = sum(map(len, self.__indexed))
        return indexed if self.in_order else int(np.iinfo(np.int64).max)

    @cached_property
    def set_rows(self) -> Mapping[str, Rows]:
        """Rows of each set, ascending; those kept for validation are not among the training rows."""
        stops = np.cumsum([len(samples) for samples in self.sets.values()])
        rows = {name: np.arange(stop - len(samples), stop, dtype=np.int64)
                for (name, samples), stop in zip(self.sets.items(), stops, strict=True)}  # fmt: skip
        if not any(map(_validates, rows)):
            kept = max(1, round(_HELD_OUT * len(rows[TRAIN])))
            if kept == len(rows[TRAIN]):
                raise DataError(f"The set 'train' has {kept} sample",
                                remedy="Give at least two samples: one trains and one validates")  # fmt: skip
            # The same ones for every seed: runs that differ in their seed are compared.
            shuffled = np.random.default_rng(0).permutation(rows[TRAIN])
            rows |= {TRAIN: np.sort(shuffled[kept:]), VALIDATION: np.sort(shuffled[:kept])}
        return rows

    @cached_property
    def train_rows(self) -> Rows:  # type: ignore[override] # the base declares an attribute, and an instance computes it
        """Rows of the training samples; the first ones of a stream stand for the others in a plan."""
        if self.stream is not None:
            looked = np.arange(len(self.stream.looked.samples), dtype=np.int64)
            return np.resize(self.__stream_row + looked, len(self.stream))
        return self.set_rows[TRAIN]

    @cached_property
    def validation_rows(self) -> Rows:  # type: ignore[override]
        """Rows of the validation samples of all validation sets."""
        return np.concatenate([rows for name, rows in self.set_rows.items() if _validates(name)])

    @cached_property
    def validation_sets(self) -> Mapping[str, Rows]:
        """Rows of each validation set, by the part of its name behind `validation/`."""
        return {name.removeprefix(f"{VALIDATION}/"): rows for name, rows in self.set_rows.items() if _validates(name)}

    @property
    def test_sets(self) -> Mapping[str, Rows]:
        """Rows of each test set; the validation set where there is none."""
        tests = {name: rows for name, rows in self.set_rows.items() if name != TRAIN and not _validates(name)}
        return tests or {VALIDATION: self.validation_rows}

    @cached_property
    def tested_rows(self) -> Rows:
        """Rows of all test sets."""
        tests = [rows for name, rows in self.test_sets.items() if not _validates(name)]
        return np.concatenate(tests) if tests else np.arange(0)

    def sample(self, row: int, *, seed: int = 0) -> Any:
        """Returns one sample; a data set that augments it draws from global generators with this seed."""
        return self.__read([row], [seed])[0]

    def __read(self, rows: Sequence[int], seeds: Sequence[int], failed: Failed | None = None) -> list[Any]:
        """Reads samples, each with its seed. The value of `failed` for an error takes the place of a sample that cannot
        be read; None: the error is raised.
        """
        # No code runs when one of a list is read.
        if all(map(is_in_memory, self.__indexed)) and max(rows, default=0) < self.__stream_row:
            return [self.sets[name][number] for name, number in map(self.__place, rows)]
        return read_seeded(rows, seeds, self.__get, failed)

    def __get(self, row: int) -> Any:
        name, number = self.__place(row)
        try:
            return self.sets[name][number]
        except (Exception, SystemExit):
            with self.asked(f"sample {number} of the set {name!r}"):
                raise

    def describe(self, row: int) -> str:
        """Names a sample in a message."""
        name, number = self.__place(row)
        if self.stream is not None and name == TRAIN:
            epoch, number = divmod(number, len(self.stream))
            return f"sample {number} of {name} in epoch {epoch + 1}"
        return f"sample {number} of {name}"

    def __place(self, row: int) -> tuple[str, int]:
        """Returns the set that has a sample, and its number there."""
        if row >= self.__stream_row:
            return TRAIN, row - self.__stream_row
        for name, samples in self.sets.items():
            if row < len(samples):
                return name, row
            row -= len(samples)
        raise IndexError(row)

    def notices(self) -> Sequence[str]:
        """Returns sentences that are printed with the plan."""
        if self.stream is not None:
            return tuple(self.stream.sentences)
        if any(map(_validates, self.sets)):
            return ()
        kept, total = len(self.validation_rows), len(self.sets[TRAIN])
        meant = next((name for name in self.test_sets if name.lower() in _LIKE_VALIDATION), None)
        rename = f". {meant!r} is a test set; name it {VALIDATION!r} if it is to choose the weights" if meant else ""
        return (f"The task names no validation set: {kept:,} of {total:,} training samples are kept for it{rename}",)

    def build_model(self) -> nn.Module:
        """Makes the model with fresh weights, on the CPU."""
        with self.asked("model"):
            model = self.model()
        if not isinstance(model, nn.Module):
            raise DataError(f"{type(self).__name__}.model did not return an nn.Module", value=type(model).__name__,
                            remedy="Return the model itself: torch.nn.Linear(16, 2)")  # fmt: skip
        if next(model.parameters(), None) is None:
            raise DataError(f"{type(self).__name__}.model returned a model without parameters",
                            value=type(model).__name__,
                            remedy="Assign each layer to an attribute (self.layer = nn.Linear(3, 1)), several as an "
                                   "nn.ModuleList: a list of layers hides their parameters")  # fmt: skip
        return model

    @cached_property
    def __counted(self) -> tuple[Sequence[Feature], NDArray[np.float64] | None]:
        """The features of memory, and their [R, F] counts for all samples; None where all count alike."""
        count = type(self).features is not Task.features
        total = sum(map(len, self.__indexed)) + (len(self.stream.looked.samples) if self.stream is not None else 0)
        if not count:
            looked = np.unique(np.linspace(0, total - 1, min(total, _LOOK)).astype(np.int64))
            if len({tuple(tensor.shape for tensor in leaves(self.sample(int(row)))) for row in looked}) == 1:
                return (SAMPLES,), None
        counted = []
        stage_name = "counting what samples hold"
        indexed = min(total, self.__stream_row)
        portions = (range(start, min(start + _PORTION, indexed)) for start in range(0, indexed, _PORTION))
        requests = ((rows, [0] * len(rows)) for rows in portions)
        with (
            self.context.reporter.stage(stage_name, total=total, unit="samples") as stage,
            self.__reader.ahead(requests),
        ):
            for row in range(total):
                (sample,) = self.take([row], [0])
                counted.append(self.__count(row, sample))
                stage.advance(1)
        kinds = {kind: None for counts in counted for kind in counts}
        features = [*kinds, *([SAMPLES] if SAMPLES not in kinds else [])]
        return tuple(features), _table(counted, features)

    def __count(self, row: int, sample: Any) -> dict[Feature, float]:
        """Counts the features of a sample."""
        with self.asked(f"features of {self.describe(row)}"):
            counts = _lengths(sample) if type(self).features is Task.features else self.features(sample)
        counts = checked_counts(f"{type(self).__name__}.features", counts, self.describe(row))
        return {_feature(kind): number for kind, number in counts.items()}

    def take(self, rows: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        """Returns samples; a stream seeds its samples itself."""
        if self.__resident.is_there:
            return self.__resident.take(rows)
        # On a simulated GPU, too, samples wait on the host for their batch.
        with on_host():
            if self.stream is None or min(rows) < self.__stream_row:
                return self.__reader.take(rows, seeds)
            return self.stream.take([row - self.__stream_row for row in rows])

    @property
    def memory_features(self) -> Sequence[Feature]:  # type: ignore[override]
        """Counts that the memory of a batch grows with, the main feature first."""
        return self.__counted[0]

    def batch_features(self, rows: Rows) -> NDArray[np.float64]:
        """Returns [R, F]: each sample's own count of each feature."""
        features, counts = self.__counted
        if counts is None or not len(rows):
            return np.ones((len(rows), len(features)))
        if rows.max() < len(counts):
            return counts[rows]
        return self.__late_counts(rows, features, counts)

    def __late_counts(
        self, rows: Rows, features: Sequence[Feature], counts: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Counts the features of samples of a stream, beyond its first ones, as they are read."""
        assert self.stream is not None
        self.stream.open((rows - self.__stream_row).tolist())
        samples = self.take(rows.tolist(), [0] * len(rows))
        counted = [self.__count(int(row), sample) for row, sample in zip(rows, samples, strict=True)]
        for row, kinds in zip(rows.tolist(), counted, strict=True):
            if late := [kind.name for kind in kinds if kind not in features]:
                first = f"the first {len(self.stream.looked.samples)} samples"
                raise DataError(f"Task.features returned a name that none of {first} has",
                                value=f"{late[0]!r} for {self.describe(row)}",
                                remedy="Return the same names for each sample, some with a count of 0")  # fmt: skip
        table = _table(counted, features)
        # The first ones were counted before; they may be among the rows of the first batch that goes beyond them.
        early = rows < len(counts)
        table[early] = counts[rows[early]]
        return table

    def epoch_order(self, rows: Rows, *, seed: int, epoch: int) -> Rows:
        """Returns the samples of an epoch in the order of `sampler`, without those that are not among `rows`."""
        if self.stream is not None:
            return self.__stream_row + epoch * len(self.stream) + np.arange(len(self.stream), dtype=np.int64)
        if type(self).sampler is Task.sampler:
            return super().epoch_order(rows, seed=seed, epoch=epoch)
        mixed = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint32)
        with self.asked("sampler"), seeded(int(mixed[0])):
            chosen = self.sampler(epoch)
            if chosen is None:
                return super().epoch_order(rows, seed=seed, epoch=epoch)
            numbers = np.asarray(chosen if isinstance(chosen, Tensor | np.ndarray) else list(chosen))
        first = self.__first_train_row
        return sampled_rows(numbers, first, len(self.sets[TRAIN]), rows, seed=int(mixed[0]))

    def epoch_size(self, rows: Rows) -> int | None:
        """Returns the number of samples of every epoch; None: `sampler` decides."""
        if self.stream is not None:
            return len(self.stream)
        return len(rows) if type(self).sampler is Task.sampler else None

    def planned_order(self, rows: Rows, *, seed: int, epoch: int) -> Rows:
        """Returns the samples of an epoch for a plan; the first ones of a stream stand for the others."""
        return rows if self.in_order else super().planned_order(rows, seed=seed, epoch=epoch)

    def reading_state(self) -> Mapping[str, Any]:
        """Returns the place in the stream, at the beginning of the batch that is trained."""
        return self.stream.place() if self.stream is not None else {}

    def restore_reading(self, state: Mapping[str, Any]) -> None:
        """Goes on from a place in the stream."""
        if self.stream is not None and state:
            self.stream.go_on_from(state)

    def resident_bytes(self) -> int:
        """Returns the bytes of the tensors of all samples, where they may live on the device."""
        if self.in_order or not self.may_live_on_device():
            return 0
        in_memory = all(map(is_in_memory, self.__indexed))
        return bytes_of_samples(self, sum(map(len, self.__indexed)), in_memory=in_memory)

    def resident_data(self) -> Mapping[str, NDArray[Any]]:
        """Returns the tensors of all samples, an array for each tensor of a sample."""
        if not self.resident_bytes():
            return {}
        total = sum(map(len, self.__indexed))
        if all(map(is_in_memory, self.__indexed)):
            with _disable_current_modes():
                return self.__resident.arrays(map(self.sample, range(total)))
        stage_name = "reading data for the device"
        with self.context.reporter.stage(stage_name, total=total, unit="samples") as stage, _disable_current_modes():
            portions = (range(start, min(start + _PORTION, total)) for start in range(0, total, _PORTION))
            with self.__reader.ahead((rows, [0] * len(rows)) for rows in portions):

                def read(row: int) -> Any:
                    stage.advance(1)
                    return self.__reader.take([row], [0])[0]

                return self.__resident.arrays(map(read, range(total)))

    def bind_data(self, data: Mapping[str, Tensor]) -> None:
        """Receives these arrays on the device; without them, samples are read on the host again."""
        if data:
            # A run that is resumed has not counted its samples yet, and rows on the device have no lengths to count.
            _ = self.__counted
        self.__resident.bind(data)

    @property
    def __first_train_row(self) -> int:
        before = list(self.sets)[: list(self.sets).index(TRAIN)]
        return sum(len(self.sets[name]) for name in before)

    def in_phase(self, phase: Phase) -> "Task":
        """Returns the task as it is in a phase."""
        # Read before the copy, so that both share the data.
        _ = (self.set_rows, self.__counted)
        other = copy.copy(self)
        other.__phase = phase
        return other

    def read_ahead(self, batches: Iterable[UpcomingBatch]) -> AbstractContextManager[None]:
        """Reads the samples of batches ahead, by the processes of `training.num_workers`."""
        if self.stream is not None:
            return self.__stream_ahead(self.stream, batches)
        if self.__resident.is_there:
            return nullcontext()
        return self.__reader.ahead(self.__requests(batches))

    def begin_stream(self, rows: Rows) -> None:
        """Opens the training stream at the samples of a batch, if they come from it."""
        if self.stream is not None and len(rows) and rows.min() >= self.__stream_row:
            self.stream.open((rows - self.__stream_row).tolist())

    def span_of_reading(self) -> AbstractContextManager[None]:
        """Opens a span in which samples are made: on the host, unless they live on the device."""
        return nullcontext() if self.__resident.is_there else on_host()

    @contextmanager
    def __stream_ahead(self, stream: TrainingStream, batches: Iterable[UpcomingBatch]) -> Iterator[None]:
        """Reads batches of training ahead from the stream, and the others by their index."""
        from_stream, by_index = tee(batches)
        spans = ((int(batch.rows[0]) - self.__stream_row, int(batch.rows[-1]) + 1 - self.__stream_row)
                 for batch in from_stream if batch.generator is not None)  # fmt: skip
        reader = StreamReader(stream, str(self.context.num_workers), self.context.reporter.notice)
        with stream.ahead(reader, spans), ExitStack() as others:
            if not all(map(is_in_memory, self.__indexed)):
                evaluated = (batch for batch in by_index if batch.rows[0] < self.__stream_row)
                others.enter_context(self.__reader.ahead(self.__requests(evaluated)))
            yield

    def __requests(self, batches: Iterable[UpcomingBatch]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yields the rows and seeds of batches, as they are read."""
        # Drawing needs all samples of the batch on each rank.
        whole = type(self).draw is not Task.draw
        for batch in batches:
            share = slice(None) if whole else batch.share
            rows, seeds = batch.rows.tolist()[share], sample_seeds(batch.rows, batch.generator)[share]
            portion = len(rows) if batch.generator is not None else _PORTION
            for start in range(0, len(rows), max(portion, 1)):
                yield rows[start : start + portion], seeds[start : start + portion]

    def logical_batch(
        self, rows: Rows, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LogicalBatch:
        """Prepares a logical batch; without a generator, one of validation."""
        return SampleBatch(self, rows, device, dtype, generator)

    def objects_of_loss(self) -> tuple[Iterable[Any], Iterable[Any]]:
        """Returns the task with the loss of its phase, and its data sets."""
        return (self, self.__phase.loss or self.loss), (self.sets, *self.sets.values())

    @property
    def loss_name(self) -> str:
        """The name of the method that computes the loss of the current phase."""
        return getattr(self.__phase.loss or self.loss, "__name__", "loss")

    def losses_of(
        self, model: nn.Module, batch: Any, *, validating: bool
    ) -> Mapping[str, tuple[Tensor, float | Tensor]]:
        """Computes the loss terms of collated samples in the current phase, or in validation."""
        of_phase = self.__phase.loss or self.loss
        compute = self.validation_loss if validating else of_phase
        with self.asked(compute.__name__):
            terms = self.__computed(compute, model, batch)
        return checked_terms(f"{type(self).__name__}.{compute.__name__}", terms)

    def outcome(self, model: nn.Module, rows: Rows, device: torch.device, dtype: torch.dtype) -> PartOutcome:
        """Computes losses, metrics and predictions of some samples, and brings them to the CPU.

        Raises:
            DataError: A metric is not (sum, denominator), or predictions are not one for each sample.
        """
        batch = SampleBatch(self, rows, device, dtype, None)
        losses = batch.losses(model, 0, len(rows))
        collated = batch.collated(0, len(rows))
        metrics = self.__checked_metrics(model, collated)
        sums = {_loss_name(term): (float(total), float(count)) for term, (total, count) in losses.items()} | metrics
        return PartOutcome(sums, self.__checked_predictions(model, collated, len(rows)))

    def predicted(
        self, model: nn.Module, rows: Rows, samples: Sequence[Any], device: torch.device, dtype: torch.dtype
    ) -> list[Any]:
        """Computes the predictions of samples, which may lack their targets, and brings them to the CPU.

        Args:
            model: In evaluation mode.
            rows: [R] numbers of the samples: the seeds of `draw`.
            samples: R samples.
            device: Where the model is.
            dtype: Number format of its inputs.

        Raises:
            ConfigError: The task predicts nothing.
            DataError: Predictions are not one for each sample.
        """
        drawn = self.drawn_alone(samples, rows.tolist())
        with self.asked("collate"):
            collated = to_device(self.collate(drawn), device, dtype)
        predictions = self.__checked_predictions(model, collated, len(rows))
        if predictions is None:
            raise ConfigError("This task makes no predictions of single samples", value=type(self).__name__,
                              remedy="Write Task.predict; see docs/tasks.md")  # fmt: skip
        return predictions

    def drawn_alone(self, samples: Sequence[Any], seeds: Sequence[int]) -> Sequence[Any]:
        """Returns samples with their random parts, which each draws by itself, as where nothing is trained: how samples
        are cut depends on the device.
        """
        if type(self).draw is Task.draw:
            return samples
        with self.asked("draw"):
            return [self.draw([sample], torch.Generator().manual_seed(seed))[0]
                    for sample, seed in zip(samples, seeds, strict=True)]  # fmt: skip

    def __checked_predictions(self, model: nn.Module, collated: Any, size: int) -> list[Any] | None:
        with self.asked("predict"):
            predictions = self.__computed(self.predict, model, collated)
        if predictions is None:
            return None
        where = f"{type(self).__name__}.predict"
        if not (hasattr(predictions, "__len__") and hasattr(predictions, "__iter__")):
            raise DataError(f"{where} did not return a prediction for each sample", value=type(predictions).__name__,
                            remedy="Return a tensor or a list, in the order of the batch")  # fmt: skip
        if len(predictions) != size:
            raise DataError(f"{where} returned {len(predictions)} predictions for {size} samples",
                            remedy="Return one for each sample")  # fmt: skip
        # Of a tensor, one copy for all samples.
        return list(host_copies(predictions if isinstance(predictions, Tensor) else list(predictions)))

    def metric_sums(self, model: nn.Module, batch: LogicalBatch, size: int) -> Mapping[str, tuple[float, float]]:
        """Computes the metrics of a batch, for the line of an epoch."""
        if type(self).metrics is Task.metrics or not isinstance(batch, SampleBatch):
            return {}
        return self.__checked_metrics(model, batch.collated(0, size))

    def __checked_metrics(self, model: nn.Module, collated: Any) -> dict[str, tuple[float, float]]:
        with self.asked("metrics"):
            metrics = self.__computed(self.metrics, model, collated)
        return metric_numbers(f"{type(self).__name__}.metrics", metrics)

    def check_outputs(self, model: nn.Module, rows: Rows, device: torch.device, dtype: torch.dtype) -> None:
        """Checks metrics, predictions and measures of a few samples; raises DataError."""
        _ = self.set_rows
        # A copy: a task may note a threshold, say, when it is asked for the first time.
        task = copy.copy(self)
        outcome = task.outcome(model, rows, device, dtype)
        predictions = outcome.predictions
        if not predictions:
            return
        task.__classify(rows, [outcome])
        try:
            with warnings.catch_warnings(), seeded(0):
                warnings.simplefilter("ignore")
                measured = task.measure(Samples(task, rows), predictions)
        except (NameError, ImportError):  # More samples do not mend these.
            with self.asked("measure"):
                raise
        except Exception:  # noqa: BLE001 - so few samples may have no measure: no positive one, say
            return
        measure_numbers(f"{type(self).__name__}.measure", measured)

    def judge(self, score: Any) -> Mapping[str, Any]:
        """Judges the trained model on the validation set and on each test set; baselines on the test sets."""
        validated = self.validation_sets
        with self.read_ahead(UpcomingBatch(rows=rows) for rows in (*validated.values(), *self.test_sets.values())):
            parts = {name: score.parts(rows) for name, rows in validated.items()}
            tests = {}
            for name, rows in self.test_sets.items():
                outcomes = score.parts(rows)
                tests[name] = self.judge_rows(rows, outcomes, self)
                self.__classified[name] = self.__classify(rows, outcomes) or scored(outcomes)
        whole = self.__scores(self.validation_rows, [part for of_set in parts.values() for part in of_set])
        if len(validated) == 1:
            return {VALIDATION: whole, TEST: tests}
        several = {name: self.__scores(rows, parts[name]) for name, rows in validated.items()}
        return {VALIDATION: whole, _VALIDATION_SETS: several, TEST: tests}

    def predictions(self, judgement: Mapping[str, Any], score: Any) -> Mapping[str, Predictions]:
        """Returns the predicted classes, or the scores, of each test set, of which `judge` has the outcomes."""
        return {name: one for name, one in self.__classified.items() if one is not None}

    def __classify(self, rows: Rows, parts: Sequence[PartOutcome]) -> Predictions | None:
        """Compares the predicted with the true classes of a set; None where the task has no classes."""
        predictions = [value for part in parts for value in part.predictions or ()]
        if not predictions or type(self).labels is Task.labels:
            return None
        with self.asked("labels"):
            labels = self.labels(Samples(self, rows))
        if labels is None:
            return None
        where = f"{type(self).__name__}.labels"
        truth = class_numbers(where, labels)
        numbers = class_shares(f"{type(self).__name__}.predict", predictions)
        count = len(numbers[0])
        if len(truth) != len(numbers) or {len(each) for each in numbers} != {count} or count == 1:
            raise DataError(f"{where} and predict do not match", value=f"{len(truth)} labels, {len(numbers)} "
                            f"predictions, the first of {counted(count, 'number')}",
                            remedy="Return a label, and a probability of each class, for each sample")  # fmt: skip
        if truth.min() < 0 or truth.max() >= count:
            raise DataError(f"{where} returned a class without a probability", value=f"{truth.min()} to {truth.max()}",
                            remedy=f"Number the {count} classes from 0")  # fmt: skip
        shares = np.stack(numbers)
        chosen = shares.argmax(1)
        confusion = np.zeros((count, count), np.int64)
        np.add.at(confusion, (truth, chosen), 1)
        return Predictions(score=shares.max(1), positive=chosen == truth, flagged=np.ones(len(truth), bool),
                           time_s=np.empty(0), words=("prediction", "right", "wrong"),
                           confusion=confusion.tolist())  # fmt: skip

    def judge_rows(self, rows: Rows, parts: Sequence[PartOutcome], trained: "Task | None") -> dict[str, Any]:
        """Judges the model on some samples, and the baselines, which learn from the training samples of the task
        `trained`; None: there are none.
        """
        baselines: Mapping[str, Mapping[str, float]] = {}
        if trained is not None:
            with self.asked("baselines"), seeded(0):
                baselines = trained.baselines(Samples(self, rows))
            baselines = baseline_numbers(f"{type(trained).__name__}.baselines", baselines)
        return {"samples": len(rows), MODEL: self.__scores(rows, parts),
                "baselines": baselines}  # fmt: skip

    def __scores(self, rows: Rows, parts: Sequence[PartOutcome]) -> dict[str, float]:
        """Returns the figures of a set: sums of its parts ÷ denominators, then the measures of its predictions."""
        totals: dict[str, list[float]] = {}
        for part in parts:
            for name, (total, count) in part.metrics.items():
                sums = totals.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + total, sums[1] + count
        scores = {name: total / count for name, (total, count) in totals.items() if count}
        predictions = [value for part in parts for value in part.predictions or ()]
        if predictions:
            with self.asked("measure"):
                measured = self.measure(Samples(self, rows), predictions)
            scores |= measure_numbers(f"{type(self).__name__}.measure", measured)
        return scores

    def validation_metrics(self, rows: Rows, score: Any) -> Mapping[str, float]:
        """Computes the metrics and measures of a validation set."""
        return self.__scores(rows, score.parts(rows))

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[TextTable]:
        """Writes a judgement as a table."""
        return tables(judgement)

    def __computed(self, compute: Callable[[nn.Module, Any], T], model: nn.Module, batch: Any) -> T:
        """Calls a method of the task's own. In validation and judging it may need the gradients that are off there: for
        a gradient penalty, or forces, which are an energy's gradient.
        """
        if torch.is_grad_enabled():
            return compute(model, batch)
        takes_gradients = self.__takes_gradients.get(compute.__name__)
        if not takes_gradients:
            # The first call may fail half-way, and nothing may show that it did.
            with on_host():
                generators = capture_generators() if takes_gradients is None else None
            try:
                result = compute(model, batch)
            except RuntimeError as error:
                if generators is None or not _LACKS_GRADIENTS.search(str(error)):
                    raise
                restore_generators(generators)
            else:
                self.__takes_gradients[compute.__name__] = False
                return result
        with torch.enable_grad():
            result = compute(model, batch)
        self.__takes_gradients[compute.__name__] = True
        return cast(T, tree_map_only(Tensor, Tensor.detach, result))

    @contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Turns an error of the task's own code, in the block, into an error that names the call."""
        try:
            yield
        except CanTrainError:
            raise
        # With `sys.exit(0)` a run would end well, without a result.
        except (Exception, SystemExit) as error:
            # Memory that runs out is rescued, wherever it does.
            if is_out_of_memory(error) or is_stop(error):
                raise
            if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(type(self).__module__, error)):
                raise missing from error
            name = type(self).__name__
            rule = f"{name}.{what} failed" if what.isidentifier() else f"{name} failed for {what}"
            raise TaskError(rule, error) from error


class SampleBatch:
    """A logical batch of a `Task`: collates each part of it anew."""

    def __init__(
        self, task: Task, rows: Rows, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> None:
        self._task, self._rows, self._device, self._dtype = task, rows, device, dtype
        self._validating = generator is None
        self._seeds = sample_seeds(rows, generator)
        self._samples: dict[int, Any] = {}
        self._given: Mapping[str, float | Tensor] | None = None  # Denominators, once they were asked for
        task.begin_stream(rows)
        if type(task).draw is not Task.draw:
            self._draw(generator)

    @property
    def denominators(self) -> Mapping[str, float] | None:
        """Denominator of each loss term over the whole batch; None: only computing the losses tells them."""
        if type(self._task).denominators is Task.denominators:
            return None
        with self._task.asked("denominators"):
            given = self._task.denominators(self.samples(0, len(self._rows)))
        self._given = checked_denominators(f"{type(self._task).__name__}.denominators", given)
        # A tensor is a number, too, and only rarely is it one.
        return cast("Mapping[str, float] | None", self._given)

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float | Tensor]]:
        """Computes the sum and the denominator of each loss term over samples `start:stop` of the batch."""
        losses = self._task.losses_of(model, self.collated(start, stop), validating=self._validating)
        if self._given is not None and not self._validating:
            name = type(self._task).__name__
            check_named(f"{name}.{self._task.loss_name}", losses, self._given, f"{name}.denominators")
        return losses

    def collated(self, start: int, stop: int) -> Any:
        """Returns samples `start:stop` as a batch on the device."""
        samples = self.samples(start, stop)
        with self._task.asked("collate"):
            return to_device(self._task.collate(samples), self._device, self._dtype)

    def samples(self, start: int, stop: int) -> list[Any]:
        """Returns samples `start:stop`, read when they are first needed."""
        missing = [position for position in range(start, stop) if position not in self._samples]
        if missing:
            rows, seeds = [int(self._rows[position]) for position in missing], [self._seeds[each] for each in missing]
            self._samples.update(zip(missing, self._task.take(rows, seeds), strict=True))
        return [self._samples[position] for position in range(start, stop)]

    def _draw(self, generator: torch.Generator | None) -> None:
        samples, task = self.samples(0, len(self._rows)), self._task
        if generator is None:
            drawn = list(task.drawn_alone(samples, self._seeds))
        else:
            with task.asked("draw"), task.span_of_reading():
                drawn = list(task.draw(samples, generator))
        if len(drawn) != len(samples):
            raise DataError(f"Task.draw returned {len(drawn)} samples for {len(samples)}",
                            remedy="Return a sample for each one, in their order")  # fmt: skip
        self._samples = dict(enumerate(drawn))


class Samples(Sequence[Any]):
    """The samples of some rows, read when they are asked for."""

    def __init__(self, task: Task, rows: Rows) -> None:
        self._task, self._rows = task, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Samples(self._task, self._rows[index])
        return self._task.sample(int(self._rows[index]))


def chained(sets: Sequence[Sequence[Any] | Iterable[Any]]) -> Sequence[Any] | Iterable[Any]:
    """Joins sets of samples, one behind the other; a stream among them makes a stream of all."""
    if len(sets) == 1:
        return sets[0]
    if any(map(is_stream, sets)):
        return chain.from_iterable(sets)
    return ConcatDataset[Any]([*sets])  # type: ignore[list-item, return-value] # any sequences will do


def make_task(
    run: ResolvedRun,
    finished: Mapping[str, FinishedModel],
    data_root: Path,
    cache: Path,
    reporter: Reporter,
    **further: Any,
) -> Task:
    """Makes the task of a run, with its data read; `further` fields of its context may be given."""
    task = make_unread(run, finished, data_root, cache, reporter, **further)
    # Data that cannot be read end the run before it has a folder.
    _ = task.set_rows
    _check_order(task, run)
    return task


def make_unread(
    run: ResolvedRun,
    finished: Mapping[str, FinishedModel],
    data_root: Path,
    cache: Path,
    reporter: Reporter,
    **further: Any,
) -> Task:
    """Makes the task of a run as `make_task` does; its data are read when something needs them."""
    kind = load_object(run.task_settings.task_class)
    training = run.training
    batch = (training.batch_size or training.lr_batch_size) * training.gradient_accumulation_steps
    further.setdefault("evaluation", load_object(run.task_settings.evaluation)())
    further.setdefault("num_workers", training.num_workers)
    context = TaskContext(settings=run.settings, dataset=run.dataset, model_name=run.model_name, model=run.model,
                          mode=run.mode, seed=run.training.seed, data_root=data_root, cache=cache, finished=finished,
                          reporter=reporter, epoch_samples=training.steps_per_epoch * batch, **further)  # fmt: skip
    try:
        task: Task = kind(context)
    except CanTrainError:
        raise
    except (Exception, SystemExit) as error:
        if is_stop(error):
            raise
        raise TaskError(f"{kind.__name__} failed when it was made", error) from error
    return task


def _check_order(task: Task, run: ResolvedRun) -> None:
    """Refuses settings that data of the task's kind cannot follow."""
    training = run.training
    if not task.in_order:
        if training.steps_per_epoch:
            raise ConfigError("training.steps_per_epoch is for a stream, and the training samples have an index",
                              value=f"{training.steps_per_epoch}",
                              remedy="Leave it out: an epoch has all samples")  # fmt: skip
        return
    for option, is_given in (
        (f"--order {training.order}", training.order != "shuffled"),
        (f"training.preflight_threshold={training.preflight_threshold}", training.preflight_units != np.inf),
        (f"--oversize {training.oversize}", training.oversize != "error"),
    ):
        if is_given:
            rule = "A stream decides the order of its samples, which are counted as they are read"
            raise ConfigError(rule, value=option, remedy="Leave it out, or return a data set with an index")


def make_sample_task(*arguments: Any) -> Task:
    """Makes the task of a run from a sample of its data, for a plan; has the arguments of `make_task`."""
    return make_task(*arguments, sampling=True)


# Names under which others give the set that chooses the weights
_LIKE_VALIDATION: Final = frozenset({"val", "valid", "dev", "eval"})


def _validates(name: str) -> bool:
    """Tells whether a set is a validation set, by its name."""
    return name == VALIDATION or name.startswith(f"{VALIDATION}/")


def _flat_sets(sets: Mapping[str, Any]) -> dict[str, Any]:
    """Names each of several validation sets `validation/NAME`; test sets of a dict have their names in it."""
    flat: dict[str, Any] = {}
    for name, samples in sets.items():
        if name == VALIDATION and isinstance(samples, Mapping):
            flat |= {f"{VALIDATION}/{part}": of_part for part, of_part in samples.items()}
        elif name == TEST and isinstance(samples, Mapping):
            flat |= {part if part not in (TRAIN, VALIDATION) else f"{TEST}/{part}": of_part
                     for part, of_part in samples.items()}  # fmt: skip
        else:
            flat[name] = samples
    return flat


_SETS_REMEDY: Final = "Return {'train': samples}, and 'validation' and 'test' if there are any"


def _check_sets(task: str, sets: Mapping[str, Any]) -> None:
    """Raises DataError where sets lack training samples, or a set can neither be indexed nor iterated again."""
    if TRAIN not in sets:
        raise DataError(f"{task}.datasets returned no set with the name 'train'", value=f"{list(sets)}",
                        remedy=_SETS_REMEDY)  # fmt: skip
    for name, samples in sets.items():
        if is_stream(samples):
            if name == TRAIN and isinstance(samples, Iterator):
                raise DataError(f"{task}.datasets returned a {type(samples).__name__} under the name {name!r}, which "
                                "can be iterated once only",
                                remedy="Return an object whose __iter__ begins anew each time: a class with __iter__, "
                                       "or an IterableDataset")  # fmt: skip
            continue
        if not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
            raise DataError(f"{task}.datasets returned a {type(samples).__name__} under the name {name!r}",
                            remedy="Make a list of it, or an object with __iter__")  # fmt: skip
        if not len(samples):
            kind = "training" if name == TRAIN else "validation" if _validates(name) else "test"
            rest = {TRAIN: "", VALIDATION: "; without a validation set, a tenth of the training samples is kept for it"}
            leave = "" if name == TRAIN else f", or leave the set out{rest.get(name, '')}"
            raise DataError(f"The {kind} set is empty: {task}.datasets returned no sample under the name {name!r}",
                            remedy=f"Check the files and the filters that it reads by{leave}")  # fmt: skip


def _table(counted: Sequence[Mapping[Feature, float]], features: Sequence[Feature]) -> NDArray[np.float64]:
    """Returns [R, F]: the counts of samples. Each sample counts as one."""
    table = [[1.0 if kind == SAMPLES and kind not in counts else float(counts.get(kind, 0.0)) for kind in features]
             for counts in counted]  # fmt: skip
    return np.asarray(table)


def _feature(kind: str | Feature) -> Feature:
    return kind if isinstance(kind, Feature) else Feature(kind)


def _lengths(sample: Any) -> dict[str | Feature, float]:
    """Counts the lengths of a sample's tensors, which are padded, packed or concatenated where samples are collated:
    the probes tell which.
    """
    lengths = [float(tensor.shape[0]) for tensor in leaves(sample) if tensor.ndim]
    names = ["length"] if len(lengths) == 1 else [f"length {number}" for number in range(1, len(lengths) + 1)]
    return {Feature(name, padding): length for padding in (_PADDED, _SQUARED, _SUMMED)
            for name, length in zip(names, lengths, strict=True)}  # fmt: skip


def _loss_name(term: str) -> str:
    """Names a loss term among the metrics."""
    return term if term == "loss" else f"{term} loss"


def tables(judgement: Mapping[str, Any]) -> Sequence[TextTable]:
    """Writes a judgement as a table: the model on each set, and beside it the baselines that know no model."""
    # Without a test set, the validation set is judged in its place.
    is_separate = judgement.get(VALIDATION) and VALIDATION not in judgement.get("test", {})
    scored = [(VALIDATION, MODEL, judgement[VALIDATION])] if is_separate else []
    scored += [(f"{VALIDATION}/{name}", MODEL, of_set) for name, of_set in judgement.get(_VALIDATION_SETS, {}).items()]
    for name, judged in judgement.get("test", {}).items():
        rivals = {MODEL: judged[MODEL], **judged.get("baselines", {})}
        scored += [(name, rival, scores) for rival, scores in rivals.items()]
    metrics = list(dict.fromkeys(metric for *_, scores in scored for metric in scores))
    if len(metrics) <= _MOST_COLUMNS:
        rows = [(name, rival, *(_number(scores.get(metric)) for metric in metrics)) for name, rival, scores in scored]
        return [TextTable("Scores", ("set", "", *metrics), rows)] if metrics else []
    # A table for each set, which is not wider than its methods are many.
    sets = dict.fromkeys(name for name, *_ in scored)
    return [_set_table(key, {rival: scores for name, rival, scores in scored if name == key}, metrics) for key in sets]


def _set_table(name: str, by_rival: Mapping[str, Mapping[str, float]], metrics: Sequence[str]) -> TextTable:
    rows = [(metric, *(_number(scores.get(metric)) for scores in by_rival.values())) for metric in metrics]
    return TextTable(f"Scores on {name}", ("", *by_rival), rows)


def _number(value: float | None) -> str:
    """Writes a score. One that is not finite is null in a run's result, and has no number here either."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{_DIGITS}g}"
