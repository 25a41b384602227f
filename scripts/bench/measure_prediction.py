"""Compares predicted with measured peaks for the models of scripts/gpu-check on simulated GPUs of several sizes. Peaks
are predicted from tiny probes and measured at five times their size and more. Other tools, which are installed into an
environment of their own on first use, predict these peaks, too. Then again with a hidden allocation: every batch that
is larger than a probe takes another 12 % of the GPU, which no probe shows.

`measured --data FILE` compares predictions with a table of published peaks of real GPUs (published_peaks.py has its
columns). timm and torchvision, for rows of their models, come from the package index:
`pip install --no-deps timm torchvision`. `programs --data FILE` compares `predict_peak` with a table of published
programs, each with its loop and its allocator (published_programs.py).
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from bench.harness import Benchmark, Table, run_peers, versions_of, write_section
from can_train import Feature, predict_peak, simulated_gpu
from can_train.fit.cost_model import EXPLAINED
from can_train.task import BatchTask
from gpu.configurations import MODELS, SIMULATED, Configuration
from gpu.measurements import draw_rows, points
from gpu.trainer import Explored, Trainer, open_trainer

BENCHMARK: Final = Benchmark(
    __name__, packages=("torch", "torch_geometric"), quick="simulated: an LSTM on the smallest"
)
MIB: Final = 2**20
CAPACITIES: Final = (128 * MIB, 256 * MIB, 512 * MIB)
SHARES: Final = (0.25, 0.5, 0.9)
"""Peaks are measured at these shares of the tuned limit."""

HIDDEN: Final = 0.12
"""The hidden allocation of large batches, as a share of the capacity."""

GOAL: Final = 0.01
"""Largest median error, relative to the measured peak."""

FAMILIES: Final = ["mlp", "bert", "xlnet", "gpt2", "cnn", "cnn-generated", "torchvision", "timm"]
"""Families of the published peaks, in the order of their table."""

BEFORE: Final = ["mlp", "cnn-generated", "timm"]
"""Families with rows that are predicted from small batches, too: other families have few rows, or no single peaks."""

OWN: Final = "can-train, from probes"

SENTENCES: Final = 3000
WORDS: Final = 2000
WIDTH: Final = 64


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if a goal is missed."""
    parser = BENCHMARK.parser()
    parser.add_argument("on", nargs="?", choices=("simulated", "measured", "programs"), default="simulated")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="simulated: models of gpu-check")
    parser.add_argument("--data", type=Path, help="measured, programs: the published table, CSV")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="measured: some families; all by default")
    parser.add_argument("--most", type=int, default=10_000, help="measured: rows of each source and family")
    parser.add_argument("--save", type=Path, help="measured: folder that keeps recordings, for another run")
    parser.add_argument("--only-saved", action="store_true", help="measured: no rows without a saved recording")
    parser.add_argument("--before", nargs="*", choices=FAMILIES, default=BEFORE, help="measured: from the CPU, too")
    options = parser.parse_args()
    if options.on == "simulated":
        measure_simulated(options)
    elif options.data is None or not options.data.exists():
        parser.error(f"{options.on} needs --data FILE, a table of published peaks")
    elif options.on == "programs":
        compare_programs(options)
    else:
        measure_published(options)


def measure_simulated(options: argparse.Namespace) -> None:
    """Measures on simulated GPUs; exit status 1 if a goal is missed."""
    chosen, capacities = (["lstm"], CAPACITIES[:1]) if options.quick else (options.models, CAPACITIES)
    table = Table("model", "GPU", "beyond probes", "error", "largest", "hidden", "its fill")
    errors, unnoticed, batches = list[float](), [], list[Batch]()
    for model in chosen:
        for capacity in capacities:
            measured = measure(model, capacity)
            batches += measured["batches"]
            errors += [batch.error for batch in measured["batches"]]
            if measured["hidden_ratio"] <= 1 + EXPLAINED:
                unnoticed.append(f"{model} at {capacity // MIB} MiB")
            table.add(*cells(model, capacity, measured))
    total = f"Over all {len(errors)} batches the median error is {median(errors):.2%}, the largest {max(errors):.2%}."
    versions = versions_of(*BENCHMARK.packages)
    own = Table("model", "counts given", "predicted", "measured", "error", "explained")
    peers = Table("tool", *chosen, "median", "largest", "batches", "CPU, s")
    if not options.quick:
        for row in own_rows():
            own.add(*row)
        answer = predicted_by_peers(batches)
        versions = answer["versions"] | versions
        for row in peer_rows(chosen, batches, answer):
            peers.add(*row)
    missed = [f"median error {median(errors):.2%}"] if median(errors) > GOAL else []
    missed += [f"not noticed: {unnoticed}"] if unnoticed else []
    BENCHMARK.finish(options, missed, write=chosen == MODELS, versions=versions, table=table, total=total,
                     explained=1 + EXPLAINED, own=own, peers=peers)  # fmt: skip


def measure_published(options: argparse.Namespace) -> None:
    """Prints the comparison with published peaks; writes it into RESULTS.md if all families were compared."""
    from bench import prediction_measured

    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
    recorder = prediction_measured.Recorder(folder=options.save, only_saved=options.only_saved)
    rows = prediction_measured.read_rows(options.data, options.families or FAMILIES, more=not options.families)
    text = prediction_measured.measure(rows, options.most, options.before, recorder)
    print(text)
    if not options.families and not options.no_write:
        write_section("prediction-measured", text)


def compare_programs(options: argparse.Namespace) -> None:
    """Prints the comparison with published programs and writes it into RESULTS.md."""
    from bench.published_programs import measure_programs, read_programs

    text = measure_programs(read_programs(options.data))
    print(text)
    if not options.no_write:
        write_section("prediction-programs", text)


class Batch(NamedTuple):
    """A batch whose peak was measured.

    Attributes:
        model: Name of the model.
        rows: Positions of its samples.
        predicted_bytes: Its peak, as predicted from probes.
        measured_bytes: Its peak.
        beyond_probes: Its cost over the cost of the largest probe.
        probe_s: CPU time of the probes, over the batches that they predict.
    """

    model: str
    rows: list[int]
    predicted_bytes: float
    measured_bytes: int
    beyond_probes: float
    probe_s: float

    @property
    def error(self) -> float:
        """Relative to the measured peak."""
        return self.error_of(self.predicted_bytes)

    def error_of(self, predicted_bytes: float) -> float:
        """Returns the relative error of another prediction."""
        return abs(predicted_bytes / self.measured_bytes - 1)


def measure(model: str, capacity: int) -> dict[str, Any]:
    """Measures one model on one GPU, without and with a hidden allocation."""
    configuration = Configuration(
        device=SIMULATED, model=model, capacity_bytes=capacity, precision="fp32", quick=False, swept=False
    )
    with open_trainer(configuration) as trainer:
        explored = trainer.explore()
        batches = list(measured_batches(model, trainer, explored))
    with open_trainer(configuration) as trainer:
        hide(trainer, explored)
        limit = trainer.explore().limits.training
    return {
        "batches": [batch._replace(probe_s=explored.probe_s / len(batches)) for batch in batches],
        "hidden_ratio": limit.measured_ratio,
        "hidden_fill": limit.peak_bytes(limit.tuned_limit) / capacity,
    }


def measured_batches(model: str, trainer: Trainer, explored: Explored) -> Iterator[Batch]:
    """Measures batches at shares of the tuned limit, as far as they are larger than probes and fit."""
    for share in SHARES:
        for point in points(trainer, explored, (share,)):
            if point["measured_bytes"]:
                rows = draw_rows(trainer, explored, share).tolist()
                predicted, measured = point["predicted_bytes"], point["measured_bytes"]
                yield Batch(model, rows, predicted, measured, point["beyond_probes"], probe_s=0.0)


def predicted_by_peers(batches: Sequence[Batch]) -> dict[str, Any]:
    """Returns the predictions of other tools for batches, as prediction_peers.py returns them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batches.json"
        file.write_text(json.dumps([(batch.model, batch.rows) for batch in batches]), encoding="utf-8")
        answer: dict[str, Any] = run_peers("prediction_peers", str(file))
    return answer


def peer_rows(models: Sequence[str], batches: Sequence[Batch], answer: Mapping[str, Any]) -> list[list[str]]:
    """Returns the rows of the table of tools, can-train's first."""
    peaks = {OWN: [batch.predicted_bytes for batch in batches], **answer["peaks"]}
    seconds = {OWN: [batch.probe_s for batch in batches], **answer["cpu_s"]}
    return [peer_row(tool, models, batches, peaks[tool], seconds[tool]) for tool in peaks]


def peer_row(
    tool: str, models: Sequence[str], batches: Sequence[Batch], peaks: Sequence[float | str], seconds: Sequence[float]
) -> list[str]:
    """Returns the row of a tool: errors by model, over all, and CPU time; a peak may be the name of a raised error."""
    each = list(zip(batches, peaks, strict=True))
    errors = [[batch.error_of(peak) for batch, peak in each if batch.model == model and not isinstance(peak, str)]
              for model in models]  # fmt: skip
    raised = [next((peak for batch, peak in each if batch.model == model and isinstance(peak, str)), "")
              for model in models]  # fmt: skip
    by_model = [f"{median(each):.2%}" if each else f"raises {why}" for each, why in zip(errors, raised, strict=True)]
    every = [error for each in errors for error in each]
    return [
        tool,
        *by_model,
        f"{median(every):.2%}" if every else "",
        f"{max(every):.2%}" if every else "",
        f"{len(every)} of {len(each)}",
        f"{fmean(seconds):.2f}",
    ]


def cells(model: str, capacity: int, measured: Mapping[str, Any]) -> list[str]:
    """Returns a row of the table."""
    errors = [batch.error for batch in measured["batches"]]
    beyond = [batch.beyond_probes for batch in measured["batches"]]
    return [
        model,
        f"{capacity // MIB} MiB",
        f"{min(beyond):.0f}-{max(beyond):.0f}" if beyond else "",
        f"{median(errors):.2%}" if errors else "",
        f"{max(errors):.2%}" if errors else "",
        f"{measured['hidden_ratio']:.2f}",
        f"{measured['hidden_fill']:.2f}",
    ]


class Sentences(nn.Module):
    """Self-attention over words, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, words: Tensor) -> Tensor:
        """Returns [N, T, C] features of N sentences of T words, [N, T]."""
        hidden = self.drop(self.words(words))
        attention = torch.softmax(self.query(hidden) @ hidden.transpose(1, 2), dim=2)
        features: Tensor = torch.relu(self.drop(attention @ self.value(hidden)))
        return features


def own_rows() -> Iterator[list[str]]:
    """Predicts and measures a user's models; yields the rows of their table."""
    lengths = torch.randint(2, 81, (SENTENCES,), generator=torch.Generator().manual_seed(0))

    def of_sentences(model: nn.Module, rows: Any) -> Tensor:
        chosen = lengths[rows]
        total: Tensor = model(torch.zeros(len(chosen), int(chosen.max()), dtype=torch.int64)).square().sum()
        return total

    def of_pairs(model: nn.Module, rows: Any) -> Tensor:
        first, second = model(torch.zeros(2, len(rows), WIDTH))
        return torch.softmax(first @ second.T, dim=1).square().sum()

    tokens, pairs = Feature("tokens", padding=1), Feature("pairs", padding=2)
    cases = (
        ("sentences", "words of each", Sentences, of_sentences, lengths),
        ("sentences", "padded words", Sentences, of_sentences, {tokens: lengths}),
        ("sentences", "padded words and pairs", Sentences, of_sentences, {tokens: lengths, pairs: lengths}),
        ("contrastive", "a number", lambda: nn.Linear(WIDTH, WIDTH), of_pairs, SENTENCES),
    )
    for name, given, make, loss_of, batch in cases:
        torch.manual_seed(0)
        model = make()
        predicted = predict_peak(model, cast(Any, batch), loss_of=partial(loss_of, model))
        state = [torch.zeros_like(parameter) for parameter in model.parameters() for _ in range(2)]
        with simulated_gpu("1TiB", model, state) as gpu:
            loss_of(model, range(SENTENCES)).backward()
        error = predicted.peak_bytes / gpu.peak_bytes() - 1
        sizes = [f"{num_bytes / MIB:,.0f} MiB" for num_bytes in (predicted.peak_bytes, gpu.peak_bytes())]
        yield [name, given, *sizes, f"{error:+.1%}", "yes" if predicted.explains else "no"]


class Held(torch.autograd.Function):
    """An identity that holds memory until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_bytes: int) -> Tensor:
        """Allocates the memory and returns x."""
        ctx.save_for_backward(torch.empty(num_bytes, dtype=torch.uint8))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient unchanged."""
        return gradients[0], None


def hide(trainer: Trainer, explored: Explored) -> None:
    """Adds the hidden allocation to batches that are larger than the probes."""
    task, model = trainer.task, explored.limits.training.model
    num_bytes = int(HIDDEN * trainer.meter.capacity_bytes)
    prepare = task.logical_batch

    def with_hidden(rows: Any, *placement: Any) -> Any:
        batch = prepare(rows, *placement)
        if model.cost(task.batch_features(rows)) <= 1.01 * explored.probe_cost:
            return batch
        compute = batch.losses

        def losses(model: nn.Module, start: int, stop: int) -> Any:
            # Made first, so the backward pass frees it last.
            scalar = next(model.parameters()).flatten()[:1].sum()
            held = Held.apply(scalar, num_bytes)  # type: ignore[no-untyped-call]
            terms = dict(compute(model, start, stop))
            term, (total, denominator) = next(iter(terms.items()))
            return terms | {term: (total + 0 * held, denominator)}

        return SimpleNamespace(losses=losses, denominators=batch.denominators or {})

    trainer.task = cast(BatchTask, Hiding(task, with_hidden))


class Hiding:
    """A task with another function for its logical batches."""

    def __init__(self, task: Any, logical_batch: Any) -> None:
        self._task = task
        self.logical_batch = logical_batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)
