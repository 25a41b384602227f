"""Judges a finished run once more, on its own data or on others: reads what it has trained, scores through the engine,
and writes scores sample by sample. The run's folder is read, and never written.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.judged import JudgedData, judged_dataset
from can_train.config.resolved import FinishedModel, PathSettings, ResolvedRun
from can_train.config.task_settings import load_object, load_task_settings
from can_train.config.training import TrainingSettings
from can_train.engine.micro_batcher import MicroBatcher
from can_train.engine.rescue import PartDoesNotFitError, RescueSettings
from can_train.errors import DoesNotFitError
from can_train.memory.meters import Meter, open_meter
from can_train.memory.out_of_memory import headline, is_out_of_memory
from can_train.memory.shortage import shortage_on
from can_train.policy.packing import PartLimit
from can_train.reporter import Reporter, Stage
from can_train.training.finished import finished_models, load_finished
from can_train.training.folders import data_root
from can_train.training.loading import with_cache
from can_train.training.optimization import Precision
from can_train.training.score_file import check_is_no_data, check_score_file, write_score_file
from can_train.training.task import Table

PART_SAMPLES: Final = 256
"""Samples that are scored at a time: twice as fast on a processor as 2,048, whose tensors leave its cache. Where memory
runs out they are fewer."""


class Scored(Protocol):
    """Samples with a model that scores them.

    Attributes:
        model: In evaluation mode, on the CPU.
    """

    model: nn.Module

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the raw scores of samples, by the model or its copy on a device."""

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
    dataset = judged_dataset(run, request.dataset, request.sets)
    if request.scores is not None:
        files: Callable[..., Sequence[Path]] = load_object(load_task_settings(run.task).files)
        check_is_no_data(request.scores, files(dataset, data_root(paths)))
    torch.use_deterministic_algorithms(run.training.deterministic)
    prepare: Callable[..., Evaluation] = load_object(load_task_settings(run.task).evaluator)

    def judged(cache: Path) -> tuple[Evaluation, Verdict, dict[str, float]]:
        asked = JudgedData(
            dataset=dataset, own=request.dataset is None, data_root=data_root(paths), cache=cache, reporter=reporter
        )
        began = time.perf_counter()
        evaluation = prepare(finished, lambda: finished_models(run), asked)
        reading_s = time.perf_counter() - began
        with meter.active(), reporter.stage("scoring", unit="samples") as stage:
            scoring = Scoring(run.training, meter, stage)
            verdict = evaluation.judge(scoring, request.threshold)
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


class Scoring:
    """Scores samples through the engine, in parts that fit.

    Args:
        training: Settings of the run.
        meter: Of the device, active.
        stage: Moves on with the samples.

    Attributes:
        seconds: Spent so far.
    """

    def __init__(self, training: TrainingSettings, meter: Meter, stage: Stage) -> None:
        self._precision = Precision.named(training.precision)
        self._rescue = RescueSettings(
            factor=training.backoff_factor, floor=training.min_micro_batch_size, retries=training.oom_retries
        )
        self._meter = meter
        self._stage = stage
        self._batchers: dict[nn.Module, tuple[nn.Module, MicroBatcher]] = {}
        self.seconds = 0.0

    def __call__(self, scored: Scored, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the raw scores of samples, in their order."""
        began = time.perf_counter()
        model, batcher = self._on_device(scored.model)
        device, precision = self._meter.device, self._precision

        def scores_of(start: int, stop: int) -> NDArray[np.float64]:
            with torch.inference_mode(), precision.context(device):
                scores = scored.scores(model, rows[start:stop], device, precision.dtype)
            found = np.asarray(scores.double().cpu())
            self._stage.advance(stop - start)
            return found

        try:
            parts = batcher.evaluate(scores_of, len(rows), PartLimit(samples=PART_SAMPLES))
        except PartDoesNotFitError as error:
            where = scored.describe(int(rows[error.part[0]]))
            raise DoesNotFitError(
                error.rule, value=f"{where}; {error.value}", remedy=error.remedy, shortage=error.shortage
            ) from None
        self.seconds += time.perf_counter() - began
        return np.concatenate(parts)

    def _on_device(self, model: nn.Module) -> tuple[nn.Module, MicroBatcher]:
        """Copies a model to the device, once."""
        if model not in self._batchers:
            try:
                copy = deepcopy(model).to(self._meter.device, self._precision.dtype).eval()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                message = headline(error)
            else:
                batcher = MicroBatcher(copy, meter=self._meter, rescue=self._rescue)
                return self._batchers.setdefault(model, (copy, batcher))
            raise DoesNotFitError("A model must fit on the device", value=message,
                                  remedy="Choose another with --device: cpu has the host's memory",
                                  shortage=shortage_on(self._meter, None))  # fmt: skip
        return self._batchers[model]


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
