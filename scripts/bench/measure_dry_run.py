"""Measures `can-train --dry-run` of built-in tasks and of a network of 100 million parameters, a task of this file:
processor time until its first line, and until it ends.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil
import torch
from torch import Tensor, nn

import can_train
from bench.harness import Benchmark, Table, say

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "torch_geometric"), quick="the first line alone")
LINES: Final[dict[str, tuple[str, ...]]] = {
    "GAT, teacher": ("--model", "gat", "--size", "teacher", "--dataset", "synthetic"),
    "VGAE": ("--model", "vgae", "--dataset", "synthetic"),
    "muon": ("--task", "muon", "--dataset", "synthetic"),
    "bendr": ("--task", "bendr", "--dataset", "synthetic"),
    "tracknet": ("--task", "tracknet", "--dataset", "synthetic"),
    "seq2seq, LSTM": ("--task", "seq2seq", "--model", "lstm", "--dataset", "synthetic"),
    "seq2seq, transformer": ("--task", "seq2seq", "--model", "transformer", "--dataset", "synthetic"),
    "encoder of 100 M parameters": ("--task", f"{__file__}:Encoder"),
}
DEVICE: Final = ("--device", "sim:8GiB")
FIRST_LINE_S: Final = 3.0
PLAN_S: Final = 30.0
"""Goals: most processor time until the first line of a plan, and until its end."""


class Tokens(Sequence[Any]):
    """Sequences of random tokens, each with a class."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        return torch.randint(1000, (128,), generator=torch.Generator().manual_seed(index)), index % 10


class Classifier(nn.Module):
    """A plain transformer encoder."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns a score for each class."""
        scores: Tensor = self.head(self.encoder(self.embed(tokens)).mean(1))
        return scores


class Encoder(can_train.Task):
    """Classifies sequences."""

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        """Width and layers, which make 100 million parameters."""

        width: int = 768
        layers: int = 14

    def datasets(self) -> dict[str, Tokens]:
        """Returns the parts of the data."""
        return {"train": Tokens(2000), "validation": Tokens(200), "test": Tokens(200)}

    def model(self) -> nn.Module:
        """Returns the network."""
        return Classifier(self.settings.width, self.settings.layers)

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        """Returns the cross-entropy of a batch."""
        tokens, classes = batch
        return {"loss": (nn.functional.cross_entropy(model(tokens), classes, reduction="sum"), len(classes))}


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if a goal is missed."""
    options = BENCHMARK.parser().parse_args()
    table, missed = Table("plan", "first line, s", "plan, s"), []
    for name, words in list(LINES.items())[: 1 if options.quick else None]:
        say(name)
        first_s, whole_s = measure(words)
        table.add(name, f"{first_s:.1f}", f"{whole_s:.1f}")
        if first_s > FIRST_LINE_S or whole_s > PLAN_S:
            missed.append(f"{name}: {first_s:.1f} s until the first line, {whole_s:.1f} s")
    BENCHMARK.finish(options, missed, table=table, load=os.getloadavg()[0])


def measure(words: tuple[str, ...]) -> tuple[float, float]:
    """Plans a line in a process of its own; returns its processor time at its first line, and at its end."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "HOME": folder, "XDG_STATE_HOME": folder}
        process = subprocess.Popen([sys.executable, "-P", "-m", "can_train", *words, *DEVICE, "--dry-run"], cwd=folder,
                                   env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
        assert process.stdout is not None, "it is a pipe"
        process.stdout.readline()
        used = psutil.Process(process.pid).cpu_times()
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(words)} ended with {process.returncode}")
    return used.user + used.system, usage.ru_utime + usage.ru_stime
