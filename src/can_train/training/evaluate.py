"""Judges a finished run on its own data or on others, writes the scores of single samples, and watches live input."""

import csv
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.compose import evaluation_dataset
from can_train.config.resolved import EvaluationData, PathSettings, data_root
from can_train.config.settings import TrainingSettings
from can_train.config.task_loading import load_object
from can_train.errors import ConfigError, StateError
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.optimizer import Precision
from can_train.io.records import open_atomic
from can_train.memory.meters import open_meter
from can_train.reporter import Reporter
from can_train.runs.run_folder import CodeTrust
from can_train.task import (
    Alarm,
    AlarmRule,
    Evaluation,
    Explanation,
    LiveDetection,
    LiveEvent,
    LiveSource,
    Table,
    Verdict,
)
from can_train.training.inference import BatchedInference, InferenceDevice, Rows, copy_to_device, rescue_settings
from can_train.training.loading import finished_model, load_finished, with_cache

T = TypeVar("T")

_ENDINGS: Final = (".csv", ".parquet")


def check_score_file(path: Path, data: Iterable[Path] = ()) -> None:
    """Makes sure, before anything is scored, that scores can be written to a file, which is none of the data's."""
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError("Scores are written as CSV or Parquet, by the file's ending", value=str(path),
                          remedy=f"Name a file that ends in {' or '.join(_ENDINGS)}")  # fmt: skip
    if path.suffix.lower() == ".parquet" and find_spec("polars") is None:
        raise ConfigError("Parquet is written by polars, which is not installed", value=str(path),
                          remedy="Name a file that ends in .csv, or: pip install polars")  # fmt: skip
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is a folder" if path.is_dir() else "cannot be written" if folder.is_dir() else "is not there"
        raise ConfigError("The folder of the scores must be there, and writable",
                          value=f"{path if path.is_dir() else folder} {why}",
                          remedy="Make it, or name another file with --scores")  # fmt: skip
    if path.exists() and any(path.samefile(file) for file in data):
        raise ConfigError("Scores are not written over the data that are judged", value=str(path),
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
        # Polars has errors of its own for what the system refuses.
        raise OSError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What is to be judged, and how."""

    run: Path  # folder of the finished run
    dataset: str | None = None  # name of a preset, or a path; None: the run's own data
    sets: tuple[str, ...] = ()  # `dataset.key=value`: how the data are read
    rule: AlarmRule = field(default_factory=AlarmRule)  # when samples are flagged; by default, as the run has found
    scores: Path | None = None  # file for the scores of single samples; None: they are not written
    flagged_only: bool = False  # whether only flagged samples are written, and alarms are explained
    explain: bool = False  # whether what drove the scores of all samples is written with them
    device: str = "auto"  # where to score: auto, cpu, cuda[:i], sim:SIZE
    paths: PathSettings = field(default_factory=PathSettings)  # empty ones are the run's, where they are still there
    trust: CodeTrust = field(default_factory=CodeTrust)  # decides whether the run's code may run


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The result of an evaluation: as strict JSON, and its judgement as text, in short and in full."""

    document: Mapping[str, Any]
    summary_tables: Sequence[Table]
    tables: Sequence[Table]
    notes: Sequence[str]
    counted: Mapping[str, int]
    alarms: Sequence[Alarm] = ()


@dataclass
class Scorer:
    """Scores samples with the finished models that belong to them; copies each model to the device once."""

    training: TrainingSettings
    device: InferenceDevice
    advance: Callable[[int], object] = lambda samples: None
    seconds: float = 0.0  # spent so far
    _inference: dict[nn.Module, BatchedInference] = field(default_factory=dict)

    def __call__(self, samples: Any, rows: Rows) -> NDArray[np.float64]:
        """Returns [R, …] raw scores of some samples, in their order (see `Evaluation.judge`)."""
        return self._timed(BatchedInference.scores, samples, rows)

    def contributions(self, samples: Any, rows: Rows) -> NDArray[np.float64]:
        """Returns what the parts of some samples contribute to their scores (see `Evaluation.explain`)."""
        return self._timed(BatchedInference.contributions, samples, rows)

    def parts(self, samples: Any, rows: Rows) -> list[Any]:
        """Returns what `samples.outcome` computes of each part of some samples."""
        return self._timed(BatchedInference.parts, samples, rows)

    def _timed(self, compute: Callable[[BatchedInference, Any, Rows], T], samples: Any, rows: Rows) -> T:
        began = time.perf_counter()
        if samples.model not in self._inference:
            model = copy_to_device(samples.model, self.device)
            batcher = MicroBatcher(model, meter=self.device.meter, rescue=rescue_settings(self.training))
            self._inference[samples.model] = BatchedInference(batcher=batcher, model=model, device=self.device)
        # Two sets of samples may share a model, each with names of its own.
        inference = replace(self._inference[samples.model], describe=samples.describe, advance=self.advance)
        found = compute(inference, samples, rows)
        self.seconds += time.perf_counter() - began
        return found


def evaluate(request: EvaluationRequest, reporter: Reporter) -> Evaluated:
    """Judges a finished run."""
    if request.scores is not None:
        check_score_file(request.scores)
    finished, meter = load_finished(request.run, request.trust.config), open_meter(request.device)
    run, task = finished.run, finished.run.task_settings
    # Folders that are not given are those of the run that are on this machine.
    known = {"data_root": run.paths.data_root, "state_dir": run.paths.state_dir}
    paths = replace(request.paths, **{name: path for name, path in known.items()
                                      if not getattr(request.paths, name) and Path(path).is_dir()})  # fmt: skip
    dataset = evaluation_dataset(run, request.dataset, request.sets)
    if request.scores is not None:
        check_score_file(request.scores, task.data_files(dataset, data_root(paths)))
    # As in training, so that scores of the same samples are the same bits.
    torch.use_deterministic_algorithms(run.training.deterministic)

    def judge(cache: Path) -> tuple[Evaluation, Verdict, Explanation | None, dict[str, float]]:
        data = EvaluationData(dataset=dataset, own=request.dataset is None, data_root=data_root(paths), cache=cache,
                              reporter=reporter)  # fmt: skip
        began = time.perf_counter()
        evaluation: Evaluation = load_object(task.evaluator)(finished, partial(finished_model, run), data)
        reading_s = time.perf_counter() - began
        device = InferenceDevice(meter=meter, precision=Precision.named(run.training.precision))
        with meter.active(), reporter.stage("scoring", unit="samples") as stage:
            scorer = Scorer(run.training, device, stage.advance)
            verdict = evaluation.judge(scorer, request.rule)
        seconds = {"reading": round(reading_s, 3), "scoring": round(scorer.seconds, 3)}
        if not (request.flagged_only or request.explain):
            return evaluation, verdict, None, seconds
        # What drove samples that are not flagged is written into the file of scores only.
        every = request.explain and request.scores is not None and not request.flagged_only
        began = time.perf_counter()
        with meter.active(), reporter.stage("explaining", unit="samples") as stage:
            scorer.advance = stage.advance
            explanation = evaluation.explain(scorer.contributions, verdict, every=every)
        return evaluation, verdict, explanation, {**seconds, "explaining": round(time.perf_counter() - began, 3)}

    evaluation, verdict, explanation, seconds = with_cache(paths, reporter, judge)
    notes = [*verdict.notes, *(_no_explanation(request) if explanation is None else explanation.notes)]
    if request.flagged_only and "flagged" not in verdict.samples:
        raise ConfigError("This task flags no samples", value="--flagged-only", remedy="Leave it out")
    if request.scores is not None and not verdict.samples:
        raise ConfigError("This task predicts nothing of single samples", value=f"--scores {request.scores}",
                          remedy="Leave it out; a task of your own predicts with Task.predict")  # fmt: skip
    if request.scores is not None:
        columns = {**verdict.samples, **({} if explanation is None else explanation.columns)}
        write_score_file(request.scores, _flagged(columns) if request.flagged_only else columns)
    document = {
        "run_id": finished.run_id,
        "key": run.key,
        "dataset": evaluation.dataset,
        "own_split": evaluation.own_split,
        **{name: verdict.judgement[name] for name in ("threshold", "threshold_rule") if name in verdict.judgement},
        **evaluation.counted,
        "seconds": seconds,
        "scores": None if request.scores is None else str(request.scores),
        "notes": notes,
        "judgement": verdict.judgement,
    }
    if explanation is not None:
        document["alarms"] = [alarm.record for alarm in explanation.alarms]
    return Evaluated(
        document=document,
        summary_tables=evaluation.summary_tables(verdict.judgement),
        tables=evaluation.tables(verdict.judgement),
        notes=notes,
        counted=evaluation.counted,
        alarms=() if explanation is None else explanation.alarms,
    )


@dataclass(frozen=True, kw_only=True)
class DetectionRequest:
    """What a finished run watches, and when it raises alarms."""

    run: Path  # folder of the finished run
    source: str  # `-` for standard input, or what else the task reads
    channel: str = ""  # the one that is watched, of an input that has several; empty: all of them
    rule: AlarmRule = field(default_factory=AlarmRule)
    explain: bool = False  # whether alarms tell what drove them
    device: str = "cpu"
    trust: CodeTrust = field(default_factory=CodeTrust)  # decides whether the run's code may run


class LiveRun:
    """A finished run that watches an input.

    Raises:
        ConfigError: The task detects nothing live, or the input cannot be opened.
    """

    def __init__(self, request: DetectionRequest) -> None:
        finished = load_finished(request.run, request.trust.config)
        run = finished.run
        if not run.task_settings.detector:
            raise ConfigError("This task detects nothing live", value=run.task, remedy="Use can-train evaluate")
        self._meter = open_meter(request.device)
        device = InferenceDevice(meter=self._meter, precision=Precision.named(run.training.precision))
        self._scorer = Scorer(run.training, device)
        make: Callable[..., LiveDetection] = load_object(run.task_settings.detector)
        models = partial(finished_model, run)
        source = LiveSource(name=request.source, channel=request.channel)
        self._detection = make(finished, models, source, request.rule, explain=request.explain)

    def events(self) -> Iterator[LiveEvent]:
        """Yields what happens until the input ends."""
        # The parts are so small that threads would wait for each other longer than they compute.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with self._meter.active():
                yield from self._detection.events(self._scorer, self._scorer.contributions)
        finally:
            torch.set_num_threads(threads)

    def finish(self) -> Sequence[LiveEvent]:
        """Ends what goes on, where the events were interrupted."""
        return self._detection.finish()

    def summary(self) -> Sequence[str]:
        """Tells what was seen so far, in sentences."""
        return self._detection.summary()

    def close(self) -> None:
        """Gives the input back."""
        self._detection.close()


def _no_explanation(request: EvaluationRequest) -> list[str]:
    asked = request.flagged_only or request.explain
    return ["This task does not tell what drives its scores"] if asked else []


def _flagged(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cells of flagged samples."""
    flagged = np.flatnonzero(columns["flagged"])
    return {name: [cells[index] for index in flagged] for name, cells in columns.items()}
