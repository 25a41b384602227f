"""The records of a run for its report: metrics, loss and memory step by step, and the scores of test samples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from can_train.errors import StateError
from can_train.io.arrays import noticing_damage
from can_train.io.records import open_atomic, open_to_append, parse_object, text_or_nothing, write_text_atomic
from can_train.io.units import finite

if TYPE_CHECKING:
    from pathlib import Path

    from can_train.fit.run_plan import RunPlan
    from can_train.task import Predictions

# Records of a run without rescues. A chart is not wider, and the file stays below a megabyte.
MOST_RECORDS: Final = 4_000
# Records for each write: a network file system takes milliseconds for a write.
_WRITTEN_TOGETHER: Final = 64
# File in the folder of a run; the file of rank N ends in `-rank-N`.
_STEPS: Final = "steps"
_LOSS_DIGITS: Final = 6
# The columns of predictions, as they are stored.
_ARRAYS: Final = {"score": "float32", "positive": "bool", "flagged": "bool", "time_s": "float32"}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of a step, or in a long run of several consecutive steps.

    Attributes:
        step: Number of the last step, counted from 1.
        steps: Number of steps in the record.
        loss: Mean weighted loss of the steps.
        allocated_bytes: Peak of allocated memory, the highest of all ranks; None: not measured.
        reserved_bytes: Peak of reserved memory, the highest of all ranks; None: not measured.
        micro_batches: Largest number of micro-batches in a step, summed over ranks.
        micro_batch_size: Samples of the largest micro-batch.
        ooms_rescued: Out-of-memories, summed over ranks.
    """

    step: int
    steps: int = 1
    loss: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    micro_batches: int
    micro_batch_size: int
    ooms_rescued: int = 0

    def joined(self, later: StepRecord) -> StepRecord:
        """Returns one record of these and the following steps."""
        steps = self.steps + later.steps
        return replace(later.with_peaks(self), steps=steps, ooms_rescued=self.ooms_rescued + later.ooms_rescued,
                       loss=(self.loss * self.steps + later.loss * later.steps) / steps,
                       micro_batches=max(self.micro_batches, later.micro_batches),
                       micro_batch_size=max(self.micro_batch_size, later.micro_batch_size))  # fmt: skip

    def with_peaks(self, other: StepRecord) -> StepRecord:
        """Returns the record with the higher peaks of two ranks in the same steps."""
        return replace(self, allocated_bytes=_highest(self.allocated_bytes, other.allocated_bytes),
                       reserved_bytes=_highest(self.reserved_bytes, other.reserved_bytes))  # fmt: skip


def _highest(*peaks: int | None) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """The planned memory from a step on: an attempt on another device has other limits.

    Attributes:
        from_step: First step with these limits, counted from 1.
        device: Key of the device.
        capacity_bytes: Bytes that PyTorch's allocator may use.
        safe_bytes: Peak of the largest micro-batch that the plan allows; None without a search.
        predicted_bytes: Lowest and highest predicted peak; None without a cost model.
    """

    from_step: int
    device: str
    capacity_bytes: int
    safe_bytes: int | None = None
    predicted_bytes: tuple[int, int] | None = None


def memory_limits(run_plan: RunPlan, *, device: str, capacity_bytes: int, from_step: int) -> MemoryLimits:
    """Returns the memory limits of a plan."""
    plan, limits, peak = run_plan.phase_plan, run_plan.limits, run_plan.predicted_peak_bytes
    memory = MemoryLimits(from_step=from_step, device=device, capacity_bytes=capacity_bytes)
    if limits is None or peak is None:
        return memory
    least, most = limits.peak_interval(peak, plan.largest_cost)
    memory = replace(memory, predicted_bytes=(round(least), round(most)))
    if plan.safety_factor is None or not math.isfinite(plan.rules.safe_limit):
        return memory
    safe = limits.step_peak_bytes(plan.rules.safe_limit, plan.rules.safe_limit)
    return replace(memory, safe_bytes=round(safe))


def steps_path(folder: Path, rank: int) -> Path:
    """Returns the path of the steps of a rank."""
    return folder / (f"{_STEPS}-rank-{rank}.jsonl" if rank else f"{_STEPS}.jsonl")


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = 0

    def append(self, **record: Any) -> None:
        """Adds a line; a number that is not finite becomes null, since JSON has none."""
        with open_to_append(self._path) as handle:
            handle.write(json.dumps(finite(record)) + "\n")
        self.lines += 1

    def rewind(self, lines: int) -> None:
        """Keeps the first `lines` lines: the steps after the last checkpoint are trained and logged again."""
        kept = text_or_nothing(self._path).splitlines(keepends=True)[:lines]
        write_text_atomic(self._path, "".join(kept))
        self.lines = len(kept)


class StepLog:
    """`steps.jsonl`: a JSON object a line for each `StepRecord`, and for the `MemoryLimits` before the first step that
    has them. A rescue ends a record, so that its step is known.

    Args:
        path: The file, which is only appended to.
        total_steps: Steps of the whole run.
    """

    def __init__(self, path: Path, total_steps: int) -> None:
        self._path = path
        self._stride = max(1, math.ceil(total_steps / MOST_RECORDS))
        self._open: StepRecord | None = None
        self._lines: list[str] = []

    def limit(self, limits: MemoryLimits) -> None:
        """Records the limits of the following steps."""
        self._close()
        self._lines.append(json.dumps(asdict(limits)))

    def add(self, record: StepRecord) -> None:
        """Adds a step."""
        self._open = record if self._open is None else self._open.joined(record)
        if record.ooms_rescued or self._open.steps >= self._stride:
            self._close()
        if len(self._lines) >= _WRITTEN_TOGETHER:
            self._write()

    def flush(self) -> None:
        """Writes the pending records; a checkpoint must not be ahead of the file."""
        self._close()
        self._write()

    def _close(self) -> None:
        if self._open is not None:
            self._lines.append(json.dumps(asdict(replace(self._open, loss=round(self._open.loss, _LOSS_DIGITS)))))
            self._open = None

    def _write(self) -> None:
        if self._lines:
            with open_to_append(self._path) as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines.clear()


def rewind_steps(folder: Path, step: int) -> None:
    """Keeps the first steps in the records of all ranks: the steps after the last checkpoint are trained again."""
    for path in folder.glob(f"{_STEPS}*.jsonl"):
        lines = [(line, parse_object(line)) for line in text_or_nothing(path).splitlines()]
        # A line that a killed process left unfinished has no step.
        kept = [line for line, values in lines if values and values.get("step", values.get("from_step", 0)) <= step]
        write_text_atomic(path, "".join(f"{line}\n" for line in kept))


def read_steps(folder: Path) -> tuple[list[StepRecord], list[MemoryLimits]]:
    """Reads a run's steps, with the highest peaks of all ranks, and rank 0's limits. Damaged lines are left out."""
    lines = _objects(steps_path(folder, 0))
    steps = {record.step: record for record in _records(lines, StepRecord)}
    for path in sorted(folder.glob(f"{_STEPS}-rank-*.jsonl")):
        for record in _records(_objects(path), StepRecord):
            if record.step in steps:
                steps[record.step] = steps[record.step].with_peaks(record)
    return sorted(steps.values(), key=lambda record: record.step), _records(lines, MemoryLimits)


def _objects(path: Path) -> list[dict[str, Any]]:
    return [parse_object(line) for line in text_or_nothing(path).splitlines()]


def _records(lines: Iterable[Mapping[str, Any]], kind: type) -> list[Any]:
    import msgspec

    names = {field.name for field in fields(kind)}
    records: list[Any] = []
    for values in lines:
        if values.keys() == names:
            # JSON accepts half a surrogate pair, msgspec does not.
            with suppress(msgspec.ValidationError, UnicodeError):
                records.append(msgspec.convert(values, kind))
    return records


def write_predictions(path: Path, predictions: Mapping[str, Predictions]) -> None:
    """Writes the predictions of a run for its test sets; earlier predictions are replaced. Single precision is enough
    for a chart.

    Raises:
        StateError: The file cannot be written.
    """
    import numpy as np

    columns: dict[str, list[Any]] = {name: [] for name in _ARRAYS}
    for one in predictions.values():
        times = one.time_s if len(one.time_s) else np.full(len(one.score), np.nan)
        classes = (one.positive, one.flagged) if one.has_classes else [np.zeros(len(one.score), bool)] * 2
        for name, values in zip(_ARRAYS, (one.score, *classes, times), strict=True):
            columns[name].append(values)
    sets = [{"name": name, "samples": len(one.score), "words": one.words, "confusion": one.confusion,
             "score_name": one.score_name, "has_classes": one.has_classes}
            for name, one in predictions.items()]  # fmt: skip
    try:
        path.unlink(missing_ok=True)
        if sets:
            arrays: dict[str, Any] = {name: np.concatenate(values, dtype=_ARRAYS[name], casting="unsafe")
                                      for name, values in columns.items()}  # fmt: skip
            with open_atomic(path) as file:
                np.savez(file, **arrays, sets=np.frombuffer(json.dumps(sets).encode(), np.uint8))
    except OSError as error:
        raise StateError("The predictions cannot be written", value=f"{path}: {error.strerror or error}",
                         remedy="Free some space there, or make the folder writable") from error  # fmt: skip


def read_predictions(path: Path) -> dict[str, Predictions]:
    """Reads the predictions of a run by the name of the test set; empty if the run has none.

    Raises:
        FolderDamageError: The file is altered.
    """
    import numpy as np

    from can_train.task import Predictions

    if not path.exists():
        return {}
    # Opened here: NumPy leaves the file of a damaged archive open.
    with noticing_damage(), path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        # NumPy alone does not notice an altered header that asks for fewer bytes.
        if altered := stored.zip.testzip():
            raise ValueError(f"{altered} was altered")
        arrays = {name: stored[name] for name in _ARRAYS}
        sets = json.loads(stored["sets"].tobytes())
    predictions, start = {}, 0
    for test_set in sets:
        columns = {name: array[start : start + test_set["samples"]] for name, array in arrays.items()}
        if np.isnan(columns["time_s"]).any():
            columns["time_s"] = np.empty(0, dtype=np.float32)
        if not test_set["has_classes"]:
            columns |= dict.fromkeys(("positive", "flagged"), np.empty(0, dtype=bool))
        predictions[test_set["name"]] = Predictions(**columns, words=tuple(test_set["words"]),
                                                    confusion=test_set.get("confusion", ()),
                                                    score_name=test_set["score_name"])  # fmt: skip
        start += test_set["samples"]
    return predictions
