"""Trainings by the command line, in this process, for the claims' benchmark, and their outcomes."""

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from can_train.cli.main import main as can_train
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun

OUT_OF_MEMORY: Final = 3  # exit status
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of a training."""

    died: bool  # of out-of-memory
    steps: int  # done
    samples_per_second: float  # median; 0 where no step was done
    parts: tuple[int, ...]  # micro-batches of each step
    peaks: tuple[int, ...]  # allocated bytes of each step
    result: Mapping[str, Any]  # result.json; empty where the run died

    @property
    def outcome(self) -> str:
        """The outcome as a cell of a table."""
        return f"dies in step {self.steps + 1:,}" if self.died else f"finishes ({self.steps:,} steps)"


def plain(batch: int) -> list[str]:
    """Returns words that turn the engine off: each batch is computed whole, and an out-of-memory ends the run."""
    return ["--micro-batch-size", str(batch), "--set", "training.adaptive_micro_batch=false"]


def train(folder: Path, words: Sequence[str]) -> Trained:
    """Trains with a command line's words in a new folder below `folder`; data are cached for all.

    Raises:
        RuntimeError: It ended with another error than out-of-memory.
    """
    runs, printed = folder / f"runs-{next(_numbers)}", io.StringIO()
    # A state folder of its own: knowledge of a device would help the next run.
    place = ["--runs-dir", str(runs), "--state-dir", str(runs / "state")]
    with redirect_stdout(printed), redirect_stderr(printed):
        status = can_train([*words, *place])
    if status not in (0, OUT_OF_MEMORY):
        raise RuntimeError(f"can-train {' '.join(words)}\n{printed.getvalue()}")
    (run,) = (path.parent for path in runs.glob("*/config.yaml"))
    lines = [line for line in json_lines(run / "metrics.jsonl") if "train" in line]
    steps = [line for line in json_lines(run / "steps.jsonl") if "step" in line]
    return Trained(
        died=status == OUT_OF_MEMORY,
        steps=max((line["step"] for line in steps), default=0),
        samples_per_second=median([line["samples_per_second"] for line in lines] or [0.0]),
        parts=tuple(line["micro_batches"] for line in steps),
        peaks=tuple(line["allocated_bytes"] for line in steps),
        result={} if status else json.loads((run / "result.json").read_text()),
    )


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; returns no lines if it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compose(folder: Path, task: str, *sets: str, dataset: str = "synthetic") -> ResolvedRun:
    """Composes a run of a task with settings, for the CPU; its caches lie in `folder`."""
    values = {"paths.state_dir": str(folder / "state")}
    return resolve(RunRequest(task=task, dataset=dataset, device="cpu", sets=sets, values=values))
