"""Trains models on simulated GPUs with 90 % down to 5 % of the memory that a sample needs by splitting alone: the rung
of each run, its predicted and its measured peak, and its weights beside the weights of a large GPU.
"""

import io
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.harness import Benchmark, Table, call_apart, say

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "torch_geometric", "transformers"),
                             quick="the GAN with 50 and 30 %")  # fmt: skip
_TASKS: Final = Path(__file__).with_name("rung_tasks.py")
_COMMON: Final = (
    "--batch-size", "2", "--accumulation-splits", "2", "--lr-scale", "none", "--keep", "last",
    "--data-on-device", "off",
)  # fmt: skip
_LARGE: Final = "sim:2GiB"
_MIB: Final = 2**20
GOAL: Final = 0.01
"""Largest error of a predicted peak."""
LINES: Final[dict[str, tuple[str, ...]]] = {
    "GAN": ("--task", f"{_TASKS}:Gan"),
    "transformer": ("--task", f"{_TASKS}:Transformer"),
    "transformer, bf16": ("--task", f"{_TASKS}:Transformer", "--precision", "bf16"),
    "Llama": ("--task", f"{_TASKS}:Llama"),
    "U-Net": ("--task", f"{_TASKS}:UNet"),
    "GAT": ("--model", "gat", "--dataset", "synthetic"),
    "VGAE": ("--model", "vgae", "--dataset", "synthetic"),
    "seq2seq": ("--task", "seq2seq", "--model", "transformer", "--dataset", "synthetic"),
    "bendr": ("--task", "bendr", "--dataset", "synthetic"),
    "tracknet": ("--task", "tracknet", "--dataset", "synthetic"),
    "muon": ("--task", "muon", "--dataset", "synthetic"),
}
RUNGS: Final = ("split", "recompute", "offload", "offload-optimizer", "offload-all")
SHARES: Final = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
"""Memory of the simulated GPUs as a share of the memory that a sample needs."""


@dataclass(frozen=True)
class Trained:
    """A training that ended: its rung, its peaks in bytes and its weights by their names."""

    rung: str
    predicted_bytes: float
    peak_bytes: float
    weights: dict[str, Any]

    @property
    def error(self) -> float:
        """Predicted over measured peak, minus 1."""
        return self.predicted_bytes / self.peak_bytes - 1


@dataclass(frozen=True)
class Refused:
    """A training that fits on no rung: the peak of a sample on each, in bytes, as the error names it."""

    needs: dict[str, float]


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md; exit status 1 if a goal is missed."""
    parser = BENCHMARK.parser()
    parser.add_argument("--only", nargs="+", choices=[*LINES], default=[*LINES], help="some of the models")
    options = parser.parse_args()
    names = [name for name in LINES if name in options.only]
    names, shares = (names[:1], (0.5, 0.3)) if options.quick else (names, SHARES)
    table, missed = Table("model", "a sample, MiB", *[f"{share:.0%}" for share in shares]), list[str]()
    needs = Table("model", *RUNGS)
    for name in names:
        say(name)
        # In a process of its own: what a training leaves behind does not grow from row to row.
        row = call_apart(__name__, "compare", name, *map(str, shares))
        table.add(name, *row["cells"])
        needs.add(name, *[f"{row['needs'][rung] / _MIB:.1f}" if rung in row["needs"] else "" for rung in RUNGS])
        missed += [f"{name}, {one}" for one in row["missed"]]
    absent = ", ".join(name for name in LINES if name not in names)
    BENCHMARK.finish(options, missed, table=table, needs=needs, absent=absent or "none")


def compare(name: str, *shares: str) -> dict[str, Any]:
    """Trains a model on GPUs of several sizes. Returns the cells of its row, the goals that were missed, and the peak
    of a sample on each rung.
    """
    missed, needs = list[str](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        alone = train(Path(folder) / "alone", LINES[name], _LARGE)
        assert isinstance(alone, Trained), alone
        cells = [f"{alone.peak_bytes / _MIB:.1f}"]
        for share in shares:
            kib = int(alone.peak_bytes * float(share)) // 1024
            trained = train(Path(folder) / share, LINES[name], f"sim:{kib}KiB")
            if isinstance(trained, Refused):
                needs = trained.needs
                # A smaller GPU holds no more.
                cells += ["–"] * (1 + len(shares) - len(cells))
                break
            cells.append(cell(trained, alone))
            is_met = abs(trained.error) <= GOAL and differs(trained, alone) == 0
            missed += [] if is_met else [f"{float(share):.0%}: {cells[-1]}"]
            print(name, share, cells[-1], file=sys.stderr, flush=True)
    return {"cells": cells, "missed": missed, "needs": needs}


def cell(trained: Trained, alone: Trained) -> str:
    """Returns the rung of a training, the error of its predicted peak, and how much its weights differ."""
    by = differs(trained, alone)
    return f"{trained.rung} {trained.error:+.1%}{f', weights differ by {by:.0e}' if by else ''}"


def train(folder: Path, line: Sequence[str], device: str) -> Trained | Refused:
    """Trains by the command line."""
    from can_train.cli.main import main as can_train

    words = [*line, *_COMMON, "--epochs", "1", "--device", device]
    words += ["--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
        status = can_train(words)
    (run,) = (folder / "runs").iterdir()
    if status:
        if not (parts := run / "memory_parts.json").exists():
            sys.exit(errors.getvalue())
        explained = json.loads(parts.read_text())
        return Refused({"split": explained["peak_bytes"], **explained["rungs"]})
    values, plan = (json.loads((run / name).read_text()) for name in ("result.json", "plan.json"))
    rungs = [rung_name(one["rung"]) for one in (plan, *plan["later"])]
    return Trained("/".join(dict.fromkeys(rungs)), values["predicted_peak_bytes"], values["peak_memory_bytes"],
                   weights_of(run))  # fmt: skip


def rung_name(plain: dict[str, Any]) -> str:
    """Names the rung of a plan, with the number of modules that are computed again."""
    from can_train.fit.rungs import Rung

    rung = Rung(**{**plain, "recompute": tuple(plain["recompute"])})
    return f"{rung.name}{f' {len(rung.recompute)}' if rung.recompute else ''}"


def weights_of(run: Path) -> dict[str, Any]:
    """Returns the weights at the end of a run."""
    import torch

    manifest = run / "checkpoints" / "manifest.json"
    newest = json.loads(manifest.read_text())["checkpoints"][0]["file"]
    weights: dict[str, Any] = torch.load(manifest.parent / newest, weights_only=True)["model"]
    return weights


def differs(trained: Trained, alone: Trained) -> float:
    """Returns the largest relative difference of weights; 0 where all bits are equal."""
    pairs = [(trained.weights[name].double(), own.double()) for name, own in alone.weights.items()]
    return max(float((one - own).norm() / own.norm().clamp(min=1e-30)) for one, own in pairs)
