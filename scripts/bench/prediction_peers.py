"""Predicts the peaks of batches with accelerate's estimate, PyTorch's MemTracker and torch-kitsune, called as in their
documentation. `scripts/bench/prediction` calls `main` with the Python of `.venv-peers`.
"""

import io
import json
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from kitsune.predict import predict_memory
from numpy.typing import NDArray
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bench.harness import say, versions_of
from can_train.task import BatchTask
from gpu.configurations import MODELS
from gpu.tasks import make_task

Rows = NDArray[np.int64]


def main(file: str) -> dict[str, Any]:
    """Predicts batches with every tool.

    Args:
        file: A JSON file with the batches, each as [model, rows].

    Returns:
        `versions`; `peaks`, for each tool the bytes of each batch, or the name of the error; `cpu_s`, for each tool the
        seconds of each batch.
    """
    warnings.filterwarnings("ignore")
    batches = [(model, np.array(rows)) for model, rows in json.loads(Path(file).read_text(encoding="utf-8"))]
    for model in MODELS:
        task_of(model)
    peaks: dict[str, list[int | str]] = {}
    cpu_s: dict[str, list[float]] = {}
    for name, tool in TOOLS.items():
        say(name)
        pairs = [timed(tool, *batch) for batch in batches]
        peaks[name], cpu_s[name] = [peak for peak, _ in pairs], [seconds for _, seconds in pairs]
    return {"versions": versions_of("accelerate", "torch-kitsune", "torch"), "peaks": peaks, "cpu_s": cpu_s}


def timed(tool: Callable[[str, Rows], int], model: str, rows: Rows) -> tuple[int | str, float]:
    """Returns the prediction of a tool, or the name of its error; and the CPU time."""
    started = time.process_time()
    try:
        peak: int | str = tool(model, rows)
    except Exception as error:  # noqa: BLE001 - any error of a tool is its result
        peak = type(error).__name__
    return peak, time.process_time() - started


@cache
def task_of(model: str) -> BatchTask:
    """Returns the task of a model, which holds its data."""
    return make_task(model, small=True)


def made(model: str) -> nn.Module:
    """Makes a model."""
    return task_of(model).build_model().train()


def by_size(model: str, rows: Rows) -> int:
    """Estimates as `accelerate estimate-memory` does: from the model's size alone, for Adam."""
    total, _ = calculate_maximum_sizes(made(model))
    return int(max(estimate_training_usage(total, "float32").values()))


def by_layers(model: str, rows: Rows) -> int:
    """Estimates with torch-kitsune, from the shape of one sample, which graphs have not."""
    options: dict[str, Any] = {"batch_size": len(rows), "optimizer": "adamw"}
    if model not in ("gat", "vgae"):
        longest = int(task_of(model).batch_features(rows).max())
        options["input_shape"] = (3, 16, 16) if model == "unet" else (longest,)
    with redirect_stderr(io.StringIO()):  # it prints the reason when it falls back to formulas
        return int(predict_memory(made(model), **options).total_bytes)


def tracked(model: str, rows: Rows, *, mode: Callable[[], AbstractContextManager[Any]]) -> int:
    """Runs a training step under MemTracker, the second part of a batch: the first one's gradients are kept."""
    task = task_of(model)
    with mode():
        torch.manual_seed(0)
        net = made(model)
        optimizer = torch.optim.AdamW(net.parameters())

        def gradients() -> list[Any]:
            batch = task.logical_batch(rows, torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))
            terms = batch.losses(net, 0, len(rows))
            losses = [task.loss_weights[name] * total / count for name, (total, count) in terms.items()]
            torch.stack(losses).sum().backward()
            return [parameter.grad for parameter in net.parameters()]

        gradients()
        optimizer.step()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(net, optimizer)
        kept = [torch.zeros_like(parameter) for parameter in net.parameters()]
        tracker.track_external(*kept)
        with tracker:
            gradients()
            optimizer.step()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"])


TOOLS: Final[Mapping[str, Callable[[str, Rows], int]]] = {
    "accelerate, `estimate-memory`": by_size,
    "torch-kitsune, `predict_memory`": by_layers,
    "MemTracker, fake tensors": partial(tracked, mode=partial(FakeTensorMode, allow_non_fake_inputs=True)),
    "MemTracker, the step itself": partial(tracked, mode=nullcontext),
}
