"""The scores of single samples as a file that a person opens: CSV or Parquet, whole or not at all."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.config.compose import evaluation_dataset
from can_train.config.resolved import EvaluationData, FinishedModel, PathSettings, ResolvedRun, data_root
from can_train.config.task_settings import load_object, load_task_settings
from can_train.errors import ConfigError, DoesNotFitError, StateError
from can_train.fit.optimizer import Precision
from can_train.fit.rescue import PartDoesNotFitError
from can_train.io.atomic import open_atomic
from can_train.memory.meters import open_meter
from can_train.reporter import Reporter
from can_train.task import Table
from can_train.training.inference import Place, Scored, Scoring
from can_train.training.loading import finished_model, load_finished, with_cache

_ENDINGS: Final = (".csv", ".parquet")


def check_score_file(path: Path) -> None:
    """Makes sure, before anything is scored, that scores can be written to a file.

    Raises:
        ConfigError: Its name has another ending, or its folder cannot be written.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError("Scores are written as CSV or Parquet, by the file's ending", value=str(path),
                          remedy=f"Name a file that ends in {' or '.join(_ENDINGS)}")  # fmt: skip
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is a folder" if path.is_dir() else "cannot be written" if folder.is_dir() else "is not there"
        raise ConfigError("The folder of the scores must be there, and writable",
                          value=f"{path if path.is_dir() else folder} {why}",
                          remedy="Make it, or name another file with --scores")  # fmt: skip


def check_is_no_data(path: Path, data: Iterable[Path]) -> None:
    """Makes sure that scores are not written over what they are scores of.

    Raises:
        ConfigError: The file is one of the data's.
    """
    if path.exists() and any(path.samefile(file) for file in data):
        raise ConfigError("Scores are not written over the data that are judged", value=str(path),
                          remedy="Name another file with --scores")  # fmt: skip


def write_score_file(path: Path, columns: Mapping[str, Any]) -> None:
    """Writes scores.

    Args:
        path: Ends in .csv or .parquet.
        columns: Cells by the column's name, None for one that is empty.

    Raises:
        StateError: The file cannot be written.
    """
    import polars as pl

    table = pl.DataFrame(columns)
    try:
        with open_atomic(path) as file:
            table.write_parquet(file) if path.suffix.lower() == ".parquet" else table.write_csv(file)
    # Polars tells in words of its own what the system refuses.
    except (OSError, pl.exceptions.PolarsError) as error:
        raise StateError("The scores cannot be written", value=f"{path}: {getattr(error, 'strerror', None) or error}",
                         remedy="Make room there, or name another file with --scores") from error  # fmt: skip


class Named(Scored, Protocol):
    """Samples with names."""

    def describe(self, row: int) -> str:
        """Names a sample in a message."""


class Verdict(Protocol):
    """What a task says of the samples."""

    @property
    def judgement(self) -> Mapping[str, Any]:
        """As in a run's result; strict JSON."""

    @property
    def samples(self) -> Mapping[str, Any]:
        """Columns by name, a cell for each sample that was judged."""

    @property
    def notes(self) -> Sequence[str]:
        """How it was judged, in sentences."""


class Evaluation(Protocol):
    """Prepared data, ready to be judged."""

    @property
    def dataset(self) -> str:
        """Name or path of the data."""

    @property
    def own_split(self) -> bool:
        """Whether what is judged is what the run had set apart of its own data."""

    @property
    def counted(self) -> Mapping[str, int]:
        """How much is judged, by name of what is counted."""

    def judge(self, score: Callable[..., NDArray[np.float64]], threshold: float | None) -> Verdict:
        """Judges a model by its scores.

        Args:
            score: Scores some of the samples: `score(scored, rows)`.
            threshold: Above which samples are flagged; None: the run's own.
        """

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[Table]:
        """Writes a judgement as tables of text."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What is to be judged, and how.

    Attributes:
        run: Folder of the finished run.
        dataset: Name of a preset, or a path; None: the run's own data.
        sets: `dataset.key=value`: how the data are read.
        threshold: Above which samples are flagged; None: the run's own.
        scores: File for the scores of single samples; None: they are not kept.
        device: Where to score: auto, cpu, cuda[:i], sim:SIZE.
        paths: Folders; empty ones are the run's, where they are still there.
    """

    run: Path
    dataset: str | None = None
    sets: tuple[str, ...] = ()
    threshold: float | None = None
    scores: Path | None = None
    device: str = "auto"
    paths: PathSettings = field(default_factory=PathSettings)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What came of an evaluation.

    Attributes:
        document: All of it as strict JSON.
        tables: The judgement as text.
        notes: How it was judged, in sentences.
    """

    document: Mapping[str, Any]
    tables: Sequence[Table]
    notes: Sequence[str]


def evaluate(request: EvaluationRequest, reporter: Reporter) -> Evaluated:
    """Judges a finished run.

    Args:
        request: What, and how.
        reporter: Where progress and notices go.

    Raises:
        CanTrainError: Something that the user can mend.
    """
    if request.scores is not None:
        check_score_file(request.scores)
    finished, meter = load_finished(request.run), open_meter(request.device)
    run, paths = finished.run, _paths(finished.run, request.paths)
    dataset = evaluation_dataset(run, request.dataset, request.sets)
    if request.scores is not None:
        files: Callable[..., Sequence[Path]] = load_object(load_task_settings(run.task).files)
        check_is_no_data(request.scores, files(dataset, data_root(paths)))
    torch.use_deterministic_algorithms(run.training.deterministic)
    prepare: Callable[..., Evaluation] = load_object(load_task_settings(run.task).evaluator)

    def judged(cache: Path) -> tuple[Evaluation, Verdict, dict[str, float]]:
        asked = EvaluationData(
            dataset=dataset, own=request.dataset is None, data_root=data_root(paths), cache=cache, reporter=reporter
        )
        began = time.perf_counter()
        evaluation = prepare(finished, partial(finished_model, run), asked)
        reading_s = time.perf_counter() - began
        with meter.active(), reporter.stage("scoring", unit="samples") as stage:
            place = Place(meter=meter, dtype=Precision.named(run.training.precision).dtype)
            scoring = Scoring(run.training, place, stage.advance)
            verdict = evaluation.judge(partial(scores_of, scoring), request.threshold)
        return evaluation, verdict, {"reading": round(reading_s, 3), "scoring": round(scoring.seconds, 3)}

    evaluation, verdict, seconds = with_cache(paths, reporter, judged)
    if request.scores is not None:
        write_score_file(request.scores, verdict.samples)
    return Evaluated(
        document=_document(request, finished, evaluation, verdict, seconds),
        tables=evaluation.tables(verdict.judgement),
        notes=verdict.notes,
    )


def _paths(run: ResolvedRun, given: PathSettings) -> PathSettings:
    """Takes the folders that are given, else the run's, where it comes from this machine, else the usual ones."""

    def found(name: str) -> str:
        known: str = getattr(run.paths, name)
        return getattr(given, name) or (known if Path(known).is_dir() else "")

    return replace(given, data_root=found("data_root"), state_dir=found("state_dir"))


def scores_of(scoring: Scoring, samples: Named, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the raw scores of samples.

    Raises:
        DoesNotFitError: The model does not fit on the device, or one of them, which is named.
    """
    try:
        return scoring(samples, rows)
    except PartDoesNotFitError as error:
        where = samples.describe(int(rows[error.part[0]]))
        raise DoesNotFitError(
            error.rule, value=f"{where}; {error.value}", remedy=error.remedy, details=error.details
        ) from None


def _document(
    request: EvaluationRequest,
    finished: FinishedModel,
    evaluation: Evaluation,
    verdict: Verdict,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    run, judgement = finished.run, verdict.judgement
    return {
        "run_id": finished.run_id,
        "key": run.key,
        "dataset": evaluation.dataset,
        "own_split": evaluation.own_split,
        "threshold": judgement["threshold"],
        "threshold_rule": judgement["threshold_rule"],
        **evaluation.counted,
        "seconds": dict(seconds),
        "scores": None if request.scores is None else str(request.scores),
        "notes": list(verdict.notes),
        "judgement": judgement,
    }
