"""Judges a finished run on its own data or on other data, and writes the scores of single samples.

Shapes: R samples, by their rows in the data.
"""

import csv
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from can_train.config.compose import evaluation_dataset
from can_train.config.resolved import EvaluationData, PathSettings, data_root, with_folders_of
from can_train.config.settings import TrainingSettings
from can_train.config.task_settings import load_object
from can_train.errors import ConfigError, StateError
from can_train.fit.precision import Precision, tf32
from can_train.io.records import open_atomic, place_refusal
from can_train.memory.meters import open_meter
from can_train.reporter import Reporter, SilentReporter, TextTable
from can_train.runs.trust import CodeTrust
from can_train.training.inference import BatchedInference, InferenceDevice, Rows, compute_as_trained
from can_train.training.loading import finished_model, load_finished, with_cache
from can_train.training.prediction_files import check_parquet

T = TypeVar("T")

_ENDINGS: Final = (".csv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """A finished run that is judged once more.

    Attributes:
        run: Folder of the run.
        dataset: Name of a preset, or a path; None: the run's own data.
        sets: `dataset.key=value`: how the data are read.
        options: Evaluation options of the task, an instance of `TaskSettings.evaluation`; None: their defaults.
        scores: File for the scores of single samples; None: they are not written.
        weights: File of weights, as `epoch-0010`; empty: the weights that the run ended with.
        verbose: Whether everything is printed that the task has to say.
        device: Where samples are scored: auto, cpu, cuda[:i], sim:SIZE.
        paths: Folders; empty ones are the run's, if they are on this machine.
        trust: Decides whether the run's code may run.
    """

    run: Path
    dataset: str | None = None
    sets: tuple[str, ...] = ()
    options: Any = None
    scores: Path | None = None
    weights: str = ""
    verbose: bool = False
    device: str = "auto"
    paths: PathSettings = field(default_factory=PathSettings)
    trust: CodeTrust = field(default_factory=CodeTrust)


@dataclass
class Scorer:
    """Scores samples with finished models; copies each model to the device once."""

    training: TrainingSettings
    device: InferenceDevice
    reporter: Reporter = field(default_factory=SilentReporter)
    seconds: float = 0.0  # spent on scoring so far
    _advance: Callable[[int], object] = lambda samples: None
    _inference: dict[nn.Module, BatchedInference] = field(default_factory=dict)

    @classmethod
    def open(cls, training: TrainingSettings, device: str, reporter: Reporter | None = None) -> Self:
        """Opens a device, with the number formats of a run's training settings."""
        inference = InferenceDevice(meter=open_meter(device), precision=Precision.named(training.precision))
        return cls(training, inference, reporter or SilentReporter())

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Opens a block that computes on the device, and shows its samples as progress."""
        meter = self.device.meter
        with meter.active(), tf32(self.training, meter.device), self.reporter.stage(title, unit="samples") as stage:
            self._advance = stage.advance
            yield

    def __call__(self, samples: Any, rows: Rows) -> NDArray[np.float64]:
        """Returns [R, …] raw scores of some samples, in their order.

        Args:
            samples: Has `model`, in evaluation mode and on the CPU; `scores`, as `BatchTask.scores`; and `describe`,
                which names a sample in a message.
            rows: [R] the samples.
        """
        return self._timed(samples, lambda inference: inference.scores(samples, rows))

    def again(self, samples: Any, rows: Rows) -> NDArray[np.float64]:
        """Returns the scores of samples that another call scores, too; progress counts them once, there."""
        advance, self._advance = self._advance, lambda samples: None
        try:
            return self(samples, rows)
        finally:
            self._advance = advance

    def contributions(self, samples: Any, rows: Rows) -> NDArray[np.float64]:
        """Returns the contributions of the parts of samples to their scores. `samples.contributions`, which has the
        arguments of `scores`, computes them with gradients enabled.
        """
        return self._timed(samples, lambda inference: inference.contributions(samples, rows))

    def parts(self, samples: Any, rows: Rows) -> list[Any]:
        """Returns the results of `samples.outcome`, which has the arguments of `scores`, part by part."""
        return self._timed(samples, lambda inference: inference.parts(samples.outcome, rows))

    def _timed(self, samples: Any, compute: Callable[[BatchedInference], T]) -> T:
        began = time.perf_counter()
        if samples.model not in self._inference:
            self._inference[samples.model] = BatchedInference.of_copy(samples.model, self.device, self.training)
        # Two sets of samples may share a model, each with names of its own.
        inference = replace(self._inference[samples.model], describe=samples.describe, advance=self._advance)
        computed = compute(inference)
        self.seconds += time.perf_counter() - began
        return computed


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The conclusions of a task about the samples of an evaluation.

    Attributes:
        judgement: As in a run's result; strict JSON.
        samples: Columns of the file of scores, by name.
        notes: How the samples were judged, in sentences.
        record: Further entries of the JSON document.
        seconds: Further durations, by name.
        paragraphs: Texts that are printed below the tables.
        has_tables: Whether the tables of the judgement are printed.
    """

    judgement: Mapping[str, Any]
    samples: Mapping[str, Any]
    notes: Sequence[str] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    paragraphs: Sequence[str] = ()
    has_tables: bool = True


class Evaluation(ABC):
    """A finished model and prepared data, ready to be judged.

    Attributes:
        dataset: Name or path of the data.
        own_split: Whether the samples are those that the run had set apart of its own data.
        counted: Number of judged things, by their name.
        model: The network with the run's weights, in evaluation mode, on the CPU.
        rows: [R] the judged samples.
    """

    dataset: str
    own_split: bool
    counted: Mapping[str, int]
    model: nn.Module
    rows: Rows

    @abstractmethod
    def evaluate(self, score: Scorer) -> Verdict:
        """Judges the model by its scores, which it computes in the stage `scoring`."""

    @abstractmethod
    def call_model(self, rows: Rows) -> None:
        """Calls the model with some samples, as its users do: `can-train export` records the call."""

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[TextTable]:
        """Writes all of a judgement as tables of text."""
        return ()

    def summary_tables(self, judgement: Mapping[str, Any]) -> Sequence[TextTable]:
        """Writes the tables of a judgement that are printed by default."""
        return self.tables(judgement)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The result of an evaluation: as strict JSON, and as text, in short and in full."""

    document: Mapping[str, Any]
    verdict: Verdict
    counted: Mapping[str, int]
    summary_tables: Sequence[TextTable]
    tables: Sequence[TextTable]


def evaluate(request: EvaluationRequest, reporter: Reporter) -> Evaluated:
    """Judges a finished run."""
    if request.scores is not None:
        check_score_file(request.scores)
    finished = load_finished(request.run, request.trust.config, request.weights)
    run, task = finished.run, finished.run.task_settings
    scorer = Scorer.open(run.training, request.device, reporter)
    paths = with_folders_of(run, request.paths)
    dataset = evaluation_dataset(run, request.dataset, request.sets)
    if request.scores is not None:
        check_score_file(request.scores, task.data_files(dataset, data_root(paths)))
    compute_as_trained(run.training)

    def judge(cache: Path) -> tuple[Evaluation, Verdict, float]:
        options = load_object(task.evaluation)() if request.options is None else request.options
        data = EvaluationData(dataset=dataset, own=request.dataset is None, data_root=data_root(paths), cache=cache,
                              reporter=reporter, options=options, verbose=request.verbose,
                              writes_samples=request.scores is not None)  # fmt: skip
        began = time.perf_counter()
        evaluation: Evaluation = load_object(task.evaluator)(finished, partial(finished_model, run), data)
        reading_s = time.perf_counter() - began
        return evaluation, evaluation.evaluate(scorer), reading_s

    evaluation, verdict, reading_s = with_cache(paths, reporter, judge)
    if request.scores is not None:
        if not verdict.samples:
            raise ConfigError("This task makes no predictions of single samples", value=f"--scores {request.scores}",
                              remedy="Leave it out; a task of your own predicts with Task.predict")  # fmt: skip
        write_score_file(request.scores, verdict.samples)
    document = {
        "run_id": finished.run_id,
        "key": run.key,
        "dataset": evaluation.dataset,
        "own_split": evaluation.own_split,
        **evaluation.counted,
        "seconds": {"reading": round(reading_s, 3), "scoring": round(scorer.seconds, 3), **verdict.seconds},
        "scores": None if request.scores is None else str(request.scores),
        "notes": list(verdict.notes),
        "judgement": verdict.judgement,
        **verdict.record,
    }
    return Evaluated(
        document=document,
        verdict=verdict,
        counted=evaluation.counted,
        summary_tables=evaluation.summary_tables(verdict.judgement),
        tables=evaluation.tables(verdict.judgement),
    )


def check_score_file(path: Path, data: Iterable[Path] = ()) -> None:
    """Makes sure, before anything is scored, that scores can be written to a file, which is none of the data's."""
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--scores {path} is no CSV or Parquet file",
                          remedy=f"Name a file that ends in {' or '.join(_ENDINGS)}")  # fmt: skip
    if path.suffix.lower() == ".parquet":
        check_parquet(str(path), "Name a file that ends in .csv")
    if refusal := place_refusal(path):
        raise ConfigError(f"{refusal}: scores need a file in a writable folder",
                          remedy="Make the folder, or name another file with --scores")  # fmt: skip
    if path.exists() and any(path.samefile(file) for file in data):
        raise ConfigError("The file of the scores is one of the data files", value=str(path),
                          remedy="Name another file with --scores")  # fmt: skip


def write_score_file(path: Path, columns: Mapping[str, Any]) -> None:
    """Writes cells by the column's name to a CSV or Parquet file, whole or not at all; None is an empty cell."""
    write = _write_parquet if path.suffix.lower() == ".parquet" else _write_csv
    try:
        with open_atomic(path) as file:
            write(file, columns)
    except OSError as error:
        raise StateError("The scores cannot be written", value=f"{path}: {error.strerror or error}",
                         remedy="Make room there, or name another file with --scores") from error  # fmt: skip


def _write_csv(file: BinaryIO, columns: Mapping[str, Any]) -> None:
    text = TextIOWrapper(file, encoding="utf-8", newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    for cells in zip(*columns.values(), strict=True):
        lines.writerow([str(cell).lower() if isinstance(cell, bool | np.bool_) else cell for cell in cells])
    # The caller closes the file, after it has reached the disk.
    text.detach()


def _write_parquet(file: BinaryIO, columns: Mapping[str, Any]) -> None:
    import polars as pl

    try:
        pl.DataFrame(columns).write_parquet(file)
    except pl.exceptions.PolarsError as error:
        # Polars raises errors of its own where the system refuses a write.
        raise OSError(str(error)) from error
