"""Measures how fast samples are read that take time: can-train against PyTorch's DataLoader in a bare loop, Lightning
and the Trainer of Hugging Face, with as many worker processes each.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from bench.harness import Benchmark, Table
from can_train import Task

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "lightning", "transformers"), quick="two rows")
COSTS_MS: Final = (0, 1, 5, 20)
"""Time to read a sample."""
WORKERS: Final = (0, 2, 4, 8)
BATCH: Final = 16
FEATURES: Final = 64
EPOCH_S: Final = 1.5
"""About as long an epoch takes that is read in line."""
MOST: Final = 2048
"""Most samples of an epoch."""
GOAL: Final = 0.95
"""Least share of the best of the others."""

Measure = Callable[["Data", int, str], float]
"""Trains two epochs with workers, with files in a folder; returns the samples per second of the second epoch."""


class Data:
    """A data set whose samples take time: they wait, as for a disk, or compute, as for decoding."""

    def __init__(self, cost_ms: int, kind: str, size: int) -> None:
        self._cost_s, self._kind, self._size = cost_ms / 1000, kind, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self._size:
            raise IndexError(index)
        if self._kind == "waits" and self._cost_s:
            time.sleep(self._cost_s)
        stop = time.thread_time() + self._cost_s
        while self._kind == "computes" and time.thread_time() < stop:
            pass
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(FEATURES, generator=draw), "labels": torch.tensor(index % 10)}


def network() -> nn.Module:
    """Makes the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 10))


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if can-train is slower."""
    options = BENCHMARK.parser().parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    table, missed = Table("a sample", "workers", *(name for name in TOOLS), "can-train ÷ best of the others"), []
    cells = [(kind, cost, workers) for kind in ("waits", "computes") for cost in COSTS_MS for workers in WORKERS]
    for kind, cost_ms, workers in cells[8:10] if options.quick else cells:
        # A batch for each worker at least: the others give a whole batch to one.
        size = int(min(MOST, max(EPOCH_S * 1000 / max(cost_ms, 0.1), max(WORKERS) * BATCH))) // BATCH * BATCH
        rates = {}
        for name, measure in TOOLS.items():
            with tempfile.TemporaryDirectory() as folder:
                rates[name] = measure(Data(cost_ms, kind, size), workers, folder)
        best = max(rate for name, rate in rates.items() if name != OURS)
        row = f"{kind} {cost_ms} ms"
        table.add(row, str(workers), *(f"{rate:,.0f}" for rate in rates.values()), f"{rates[OURS] / best:.2f}")
        if rates[OURS] < GOAL * best:
            missed.append(f"{row}, {workers} workers: {rates[OURS] / best:.2f}")
    BENCHMARK.finish(options, missed, table=table)


class ReadTask(Task):
    """The task of can-train."""

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        """Time, kind and number of its samples."""

        cost_ms: int = 0
        kind: str = "waits"
        size: int = MOST

    def datasets(self) -> Mapping[str, Any]:
        """Returns the samples."""
        settings = self.settings
        validation = [Data(0, "waits", 2)[0]]
        return {"train": Data(settings.cost_ms, settings.kind, settings.size), "validation": validation}

    def model(self) -> nn.Module:
        """Makes the model."""
        return network()

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, float]]:
        """Computes the sum of the loss."""
        total = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
        return {"loss": (total, float(len(batch["labels"])))}


def in_can_train(data: Data, workers: int, folder: str) -> float:
    """Trains with the command line."""
    command = [
        *(sys.executable, "-P", "-m", "can_train", "--task", f"{Path(__file__)}:ReadTask", "--device", "cpu"),
        *("--epochs", "2", "--batch-size", str(BATCH), "--micro-batch-size", str(BATCH), "--num-workers", str(workers)),
        *("--runs-dir", f"{folder}/runs", "--state-dir", f"{folder}/state", "--quiet"),
        *("--set", f"task.cost_ms={round(data._cost_s * 1000)}"),
        *("--set", f"task.kind={data._kind}", "--set", f"task.size={data._size}"),
    ]
    # One thread, as the others have.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
    (log,) = Path(folder).glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return float([record["samples_per_second"] for record in records if "samples_per_second" in record][-1])


def loader(data: Any, workers: int) -> DataLoader[Any]:
    """Makes a loader, whose workers live for both epochs."""
    return DataLoader(data, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)


def in_bare_loop(data: Data, workers: int, folder: str) -> float:
    """Trains in a loop of one's own."""
    model, batches, seconds = network(), loader(data, workers), []
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        started = time.perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["x"]), batch["labels"]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    return len(data) / seconds[-1]


def in_lightning(data: Data, workers: int, folder: str) -> float:
    """Trains with Lightning's Trainer."""
    from lightning.pytorch import Callback, LightningModule

    from bench.finder_peers import quiet_trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(self.network(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Clock(Callback):
        times: tuple[float, ...] = ()

        def on_train_epoch_start(self, *arguments: Any) -> None:
            self.times += (time.perf_counter(),)

        def on_train_epoch_end(self, *arguments: Any) -> None:
            self.times += (time.perf_counter(),)

    clock = Clock()
    quiet_trainer(folder, callbacks=[clock], max_epochs=2).fit(Module(), loader(data, workers))
    return len(data) / (clock.times[-1] - clock.times[-2])


def in_trainer(data: Data, workers: int, folder: str) -> float:
    """Trains with transformers' Trainer."""
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    from bench.equivalence_peers import quiet_arguments

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.network(x), labels)}

    class Clock(TrainerCallback):
        times: tuple[float, ...] = ()

        def on_epoch_begin(self, *arguments: Any, **options: Any) -> None:
            self.times += (time.perf_counter(),)

        on_epoch_end = on_epoch_begin

    clock = Clock()
    arguments = quiet_arguments(
        folder, per_device_train_batch_size=BATCH, num_train_epochs=2, dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0, dataloader_pin_memory=False,
    )  # fmt: skip
    trained: Any = data
    trainer = Trainer(model=Network(), args=arguments, train_dataset=trained, callbacks=[clock])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return len(data) / (clock.times[-1] - clock.times[-2])


OURS: Final = "can-train"
TOOLS: Final[Mapping[str, Measure]] = {
    OURS: in_can_train,
    "DataLoader in a bare loop": in_bare_loop,
    "Lightning": in_lightning,
    "Trainer": in_trainer,
}

if __name__ == "__main__":
    main()
