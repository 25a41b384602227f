"""Measures how fast samples are read that take time: can-train against PyTorch's DataLoader in a bare loop, Lightning
and the Trainer of Hugging Face, with as many worker processes each.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from bench.harness import Benchmark, Table, say
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
PICTURES: Final = 512
TIMED: Final = ("waits", "computes", "a stream that waits")
"""Kinds of samples whose time is given."""
TOO_LARGE: Final = 2**28
"""Numbers that a simulated GPU of 256 MiB has no room for."""
GOAL: Final = 0.95
"""Least share of the best of the others."""

PICTURE_PX: Final = 256
"""Width and height of a picture, which is read from a file, decoded and made smaller."""
ROWS: Final = "rows of Hugging Face"
FILES: Final = 8
"""Files of rows that are streamed."""
RESCUE_EVERY: Final = 32
"""Calls of the loss between two for which memory is too small."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Samples that take time to read.

    Attributes:
        kind: They wait, as for a disk, compute, as for decoding, come from a stream, or from files: see `KINDS`.
        cost_ms: Time of a sample that waits or computes.
        size: Their number.
        folder: Folder of their files.
        rescues: Whether memory is too small for some batches of can-train, on a simulated GPU.
    """

    kind: str = "waits"
    cost_ms: int = 0
    size: int = MOST
    folder: str = ""
    rescues: bool = False

    @property
    def name(self) -> str:
        """The name of its rows."""
        return self.kind + f" {self.cost_ms} ms" * (self.kind in TIMED) + ", with rescues" * self.rescues

    def open(self) -> Any:
        """Returns the data set."""
        return KINDS[self.kind](self)


Measure = Callable[[Source, int, str], float]
"""Trains two epochs with workers, with files in a folder; returns the samples per second of the second epoch."""


class Data(Dataset[dict[str, Tensor]]):
    """A data set whose samples take time: they wait, as for a disk, or compute, as for decoding."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self._source.size:
            raise IndexError(index)
        cost_s = self._source.cost_ms / 1000
        if self._source.kind != "computes" and cost_s:
            time.sleep(cost_s)
        stop = time.thread_time() + cost_s
        while self._source.kind == "computes" and time.thread_time() < stop:
            pass
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(FEATURES, generator=draw), "labels": torch.tensor(index % 10)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The samples of `Data`, in order, divided among workers."""

    def __init__(self, source: Source) -> None:
        self._data = Data(source)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return map(self._data.__getitem__, range(first, len(self._data), step))


class Pictures(Dataset[dict[str, Tensor]]):
    """Pictures in files, half of them JPEG and half PNG."""

    def __init__(self, source: Source) -> None:
        self._files = sorted(Path(source.folder).glob("*.*"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with Image.open(self._files[index]) as picture:
            small = picture.convert("L").resize((8, FEATURES // 8))
        return {"x": torch.from_numpy(np.array(small, np.float32).ravel() / 255), "labels": torch.tensor(index % 10)}


def rows(source: Source) -> Any:
    """Streams rows with Hugging Face `datasets`."""
    datasets = import_module("datasets")
    files = sorted(map(str, Path(source.folder).glob("*.parquet")))
    cache = str(Path(source.folder) / "cache")
    return datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=cache
    ).with_format("torch")


KINDS: Final[Mapping[str, Callable[[Source], Any]]] = {
    "waits": Data,
    "computes": Data,
    "a stream that waits": Stream,
    "pictures": Pictures,
    ROWS: rows,
}


def write_pictures(folder: Path, size: int) -> None:
    """Writes smooth pictures with some noise, as photographs are."""
    draw = np.random.default_rng(0)
    for number in range(size):
        coarse = Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((PICTURE_PX, PICTURE_PX), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + draw.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number:05}.{'jpg' if number % 2 else 'png'}")


def write_rows(folder: Path, size: int) -> None:
    """Writes rows of numbers into Parquet files."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    draw = np.random.default_rng(0)
    for number in range(FILES):
        values = draw.normal(size=(size // FILES, FEATURES)).astype(np.float32)
        columns = {"x": list(values), "labels": np.arange(len(values)) % 10}
        parquet.write_table(arrow.table(columns), folder / f"{number}.parquet")


def network() -> nn.Module:
    """Makes the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 10))


def sources(folder: Path) -> list[tuple[Source, Sequence[int]]]:
    """Makes the sources, with files in a folder, and returns each with the numbers of its workers."""
    # A batch for each worker at least: the others give a whole batch to one.
    made: list[tuple[Source, Sequence[int]]] = [
        (Source(kind=kind, cost_ms=cost, size=size_of(cost)), WORKERS)
        for kind in ("waits", "computes")
        for cost in COSTS_MS
    ]
    pictures, table = folder / "pictures", folder / "rows"
    for place in (pictures, table):
        place.mkdir()
    write_pictures(pictures, PICTURES)
    made += [
        (Source(kind="waits", cost_ms=5, size=size_of(5), rescues=True), WORKERS[1:]),
        (Source(kind="pictures", size=PICTURES, folder=str(pictures)), WORKERS),
        (Source(kind="a stream that waits", cost_ms=5, size=size_of(5)), WORKERS),
    ]
    if importlib.util.find_spec("datasets") is None:
        say("datasets is not installed, so its streams are left out: pip install datasets")
        return made
    write_rows(table, MOST)
    return [*made, (Source(kind=ROWS, folder=str(table)), WORKERS)]


def size_of(cost_ms: int) -> int:
    """Returns the number of samples that take about `EPOCH_S` seconds, a multiple of the batch."""
    return int(min(MOST, max(EPOCH_S * 1000 / max(cost_ms, 0.1), max(WORKERS) * BATCH))) // BATCH * BATCH


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if can-train is slower."""
    parser = BENCHMARK.parser()
    parser.add_argument("--only", default="", help="text in the names of rows; writes nothing (default: all rows)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="of all tools, whose best is taken (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    table, missed = Table("a sample", "workers", *(name for name in TOOLS), "can-train ÷ best of the others"), []
    with tempfile.TemporaryDirectory() as made:
        cells = [(source, workers) for source, several in sources(Path(made)) for workers in several]
        for source, workers in cells[8:10] if options.quick else cells:
            if options.only not in source.name:
                continue
            rates = dict.fromkeys(TOOLS, 0.0)
            for name, measure in chain.from_iterable([TOOLS.items()] * options.rounds):
                with tempfile.TemporaryDirectory() as folder:
                    rates[name] = max(rates[name], measure(source, workers, folder))
            best = max(rate for name, rate in rates.items() if name != OURS)
            say(f"{source.name}, {workers} workers: {rates[OURS] / best:.2f}")
            table.add(
                source.name, str(workers), *(f"{rate:,.0f}" for rate in rates.values()), f"{rates[OURS] / best:.2f}"
            )
            if rates[OURS] < GOAL * best:
                missed.append(f"{source.name}, {workers} workers: {rates[OURS] / best:.2f}")
    conditions = f"The machine's load in the last 15 minutes was {os.getloadavg()[2]:.1f}."
    BENCHMARK.finish(options, missed, table=table, write=not options.only, conditions=conditions)


class ReadTask(Task):
    """The task of can-train."""

    Settings = Source
    calls = 0

    def datasets(self) -> Mapping[str, Any]:
        """Returns the samples."""
        return {"train": self.settings.open(), "validation": [Data(Source(size=2))[0]]}

    def model(self) -> nn.Module:
        """Makes the model."""
        return network()

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, float]]:
        """Computes the sum of the loss."""
        self.calls += 1
        if self.settings.rescues and len(batch["labels"]) > 1 and self.calls % RESCUE_EVERY == 0:
            batch["x"].new_empty(TOO_LARGE)
        total = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
        return {"loss": (total, float(len(batch["labels"])))}


def in_can_train(source: Source, workers: int, folder: str) -> float:
    """Trains with the command line."""
    command = [
        *(sys.executable, "-P", "-m", "can_train", "--task", f"{Path(__file__)}:ReadTask"),
        *("--device", "sim:256MiB" if source.rescues else "cpu"),
        *("--epochs", "2", "--batch-size", str(BATCH), "--micro-batch-size", str(BATCH), "--num-workers", str(workers)),
        *("--runs-dir", f"{folder}/runs", "--state-dir", f"{folder}/state", "--quiet"),
        *chain(*(("--set", f"task.{name}={json.dumps(value)}") for name, value in asdict(source).items())),
    ]
    if source.kind == ROWS:  # it does not tell its length
        command += ["--set", f"training.steps_per_epoch={source.size // BATCH}"]
    # One thread, as the others have.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
    (log,) = Path(folder).glob("runs/*/metrics.jsonl")
    if source.rescues and not json.loads((log.parent / "result.json").read_text())["ooms_rescued"]:
        sys.exit("memory was never too small, although the row is about rescues")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return float([record["samples_per_second"] for record in records if "samples_per_second" in record][-1])


def loader(data: Any, workers: int) -> DataLoader[Any]:
    """Makes a loader, whose workers live for both epochs."""
    return DataLoader(data, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)


def in_bare_loop(source: Source, workers: int, folder: str) -> float:
    """Trains in a loop of one's own."""
    model, batches, seconds = network(), loader(source.open(), workers), list[float]()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        started = time.perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["x"]), batch["labels"]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    return source.size / seconds[-1]


def in_lightning(source: Source, workers: int, folder: str) -> float:
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
    quiet_trainer(folder, callbacks=[clock], max_epochs=2).fit(Module(), loader(source.open(), workers))
    return source.size / (clock.times[3] - clock.times[2])


def in_trainer(source: Source, workers: int, folder: str) -> float:
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
        folder, per_device_train_batch_size=BATCH, max_steps=2 * source.size // BATCH, dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=Network(), args=arguments, train_dataset=source.open(), callbacks=[clock])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return source.size / (clock.times[3] - clock.times[2])


OURS: Final = "can-train"
TOOLS: Final[Mapping[str, Measure]] = {
    OURS: in_can_train,
    "DataLoader in a bare loop": in_bare_loop,
    "Lightning": in_lightning,
    "Trainer": in_trainer,
}

if __name__ == "__main__":
    main()
