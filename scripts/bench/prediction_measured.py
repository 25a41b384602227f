"""Compares predictions with peaks of GPU memory that other people measured and published.

Each row's training loop is recorded as CUDA would run it, and its allocations are replayed under PyTorch's own settings
on the row's card. What the driver shows beyond the allocator, the context, is one constant a source and family: fitted
on every second row, and judged on the others.
"""

import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch

from bench import published_peaks
from bench.published_peaks import NoDefinitionError, Program, Row, allow_foreign_torchvision, program_of
from bench.results_file import markdown
from can_train import predict_peak
from can_train.errors import CanTrainError
from can_train.fit.prediction import price_trace
from can_train.memory import cuda_dispatch
from can_train.memory.catalogue import (
    ALL_KERNELS,
    CUBLAS_KERNELS,
    CUDNN_KERNELS,
    Card,
    context_bytes,
    find_card,
)
from can_train.memory.cuda_dispatch import AllocationTrace, record_on_cuda
from can_train.memory.simulated.allocator import PLAIN, CachingAllocator

MIB: Final = 2**20
# Fewer rows of a family tell no constant of their own: it is that of the first family on the same card, or where there
# is none the largest that the catalogue has for cuBLAS alone.
FEW: Final = 4
BEFORE_MOST: Final = 8  # rows of a family that are predicted from small batches, too: each takes half a minute
BEFORE_EVERY: Final = 10  # so many rows apart
# What a context takes more than without cuDNN, in MiB, as was published of that A100: 1,429, 1,679 and 1,721.
MORE_CONTEXT: Final = {CUBLAS_KERNELS: 0, CUDNN_KERNELS: 250, ALL_KERNELS: 292}
WITHOUT_CUDNN: Final = ("mlp", "bert", "xlnet", "gpt2")  # families
NAMED: Final = 12  # models that a reason for leaving out names
NOT_RECORDED: Final = "not recorded"
NO_WHOLE_STEP: Final = "less was measured than FakeTensor estimates of the tensors alone, so no whole step ran"
FAR: Final = 0.15  # relative error of rows that are named
# Kinds of timm's networks, by words in their names; the first one that matches counts.
KINDS: Final = {
    "CNN and attention": "coat|botnet|halo|mobilevit|vit_.*_r[25]|levit|fastvit|nextvit|efficientvit|maxvit|hybrid",
    "ViT, Mixer": "vit|deit|mixer|mlp|davit|swin|pvt|volo|caformer|hiera|twins|cait|tnt|beit",
    "EfficientNet, MobileNet": "efficientnet|mobilenet|mnasnet|fbnet|lcnet|mixnet|tinynet|rexnet|repghost",
}
NOTES: Final = """\
*Rows*: those that were judged, of those with a measurement; the others fitted the context, or are left out: their model
is not at hand, they are marked as suspect, or the recording failed. *Error*: of the recorded loop, and the constant.
*Under*: share of the rows whose measurement is above the prediction by more than 2 %. *Context*: the constant, which
all kinds of timm's networks have in common; on that A100 the kernels of cuDNN add 250 MiB to it, and those of its batch
norm another 42, as was published with the measurements (timm's networks are all taken to have both). *Below*, *above*:
share of the rows with a measurement below and above the interval that `predict_peak` states for a card. *FakeTensor*:
the error of its estimates of these rows, published with the measurements, and a constant fitted on half of them.
Horus's estimates were published for other rows only.
*Before*: what `predict_peak` predicts without a target of up to 8 rows, and a constant that is fitted on half of them.
*Two-sided*: a batch that trained is predicted to fit (`fits_card`), and the next larger one, which did not, not to.
What cuDNN takes was chosen by those generated CNNs that fitted the context, the ends of the interval by all CNNs.
The loop of timm's rows on the A100 is not published, and taken to be that of timm's train.py: its loader has a stream
of its own, weights decay, and `cudnn.benchmark` empties the allocator's cache in the first step."""
GUESSES: Final = """\
A guess, which nothing here confirms: what algorithms take that cuDNN tries in the first step of timm's loop is the peak
of some (mobilevitv2); definitions have changed since (coatnet); where generated CNNs are deep and their channels many,
cuDNN takes other algorithms by rules of its own; XLNet is 7 % above the prediction, and its loop is not published."""


@dataclass
class Judged:
    """The rows of a source and family, in MiB."""

    rows: int
    models: list[str] = field(default_factory=list)  # of the measured rows, with their batches
    measured: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)  # reserved, and what kernels of cuDNN add to the context
    ends: list[tuple[float, float]] = field(default_factory=list)  # of the interval
    fake: list[float] = field(default_factory=list)  # FakeTensor's estimates; NaN where there is none
    before: list[tuple[float, float]] = field(default_factory=list)  # predicted from small batches, and measured
    fits: list[bool] = field(default_factory=list)  # of batches that trained
    fits_next: list[bool] = field(default_factory=list)  # of batches that did not
    left_out: dict[str, str] = field(default_factory=dict)  # model to reason

    def table_rows(self, name: str, contexts: dict[str, float], card: str) -> list[list[str]]:
        """Returns the family's rows of the table; `contexts` has the constants of cards so far."""
        found, measured = np.array(self.after), np.array(self.measured)
        context, chosen = 0.0, np.arange(len(found))
        if len(found) and not name.startswith("xMem"):
            context = contexts.get(card, context_bytes(find_card(card), CUBLAS_KERNELS)[2] / MIB)
            if len(found) >= FEW:
                context, chosen = float(median(measured[::2] - found[::2])), chosen[1::2]
                contexts.setdefault(card, context)
        kinds = [_kind(model) for model in self.models] if name.endswith("timm") else []
        rows = [self._table_row(name, context, chosen)]
        for kind in dict.fromkeys(kinds):
            of_kind = np.array([index for index in chosen if kinds[index] == kind], dtype=int)
            rows.append(self._table_row(f"… {kind}", context, of_kind)[:7] + [""] * 3)
        return rows

    def _table_row(self, name: str, context: float, chosen: np.ndarray) -> list[str]:
        cells = [name, f"{len(chosen)} of {self.rows}"]
        if len(chosen):
            measured, (least, most) = np.array(self.measured)[chosen], np.array(self.ends)[chosen].T
            errors = np.array(self.after)[chosen] + context - measured
            cells += [*_errors(errors, measured), f"{(errors < -0.02 * measured).mean():.0%}"]
            cells += [f"{context:,.0f} MiB", f"{(measured < least).mean():.1%}, {(measured > most).mean():.1%}"]
        else:
            cells += [""] * 5
        fake = np.array(list(zip(self.fake, self.measured, strict=True))).reshape(-1, 2)
        cells.append(", ".join(_held_out(fake[~np.isnan(fake[:, 0])])))
        cells.append(", ".join(_held_out(np.array(self.before).reshape(-1, 2))))
        pairs = [one for one in (self.fits, [not fits for fits in self.fits_next]) if one]
        cells.append("; ".join(f"{sum(one)} of {len(one)}" for one in pairs))
        return cells

    def far(self, context: float) -> list[str]:
        """Names the rows that the prediction misses by far."""
        return [
            f"{model} ({found + context:,.0f} MiB, measured {measured:,.0f})"
            for model, found, measured in zip(self.models, self.after, self.measured, strict=True)
            if abs(found + context - measured) > FAR * measured
        ]


def recorded_on(program: Program, card: Card) -> AllocationTrace:
    """Records what a program allocates on a card."""
    return record_on_cuda(
        program.model, program.run, generation=card.generation, resident_threads=card.resident_threads
    )


def _kind(model: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, model)), "other CNNs")


def _held_out(pairs: np.ndarray) -> list[str]:
    """Returns the errors of every second pair of a prediction and a measurement; the others fit a constant."""
    if len(pairs) < FEW:
        return []
    predicted, measured = pairs.T
    constant = float(median(measured[::2] - predicted[::2]))
    return _errors((predicted + constant - measured)[1::2], measured[1::2])


def _errors(errors: np.ndarray, measured: np.ndarray) -> list[str]:
    """Returns the median and the 95th percentile of absolute errors, each relative and in MiB."""
    return [
        f"{np.quantile(np.abs(errors / measured), share):.1%} ({np.quantile(np.abs(errors), share):,.0f} MiB)"
        for share in (0.5, 0.95)
    ]


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Records programs of rows, once for each version of this code where there is a folder to save recordings in."""

    folder: Path | None = None
    only_saved: bool = False  # whether a row without a recording is left out

    def trace(self, row: Row, card: Card, batch: int | None = None) -> AllocationTrace:
        """Returns a row's recording, with a batch of its own where one is given."""
        path = (self.folder or Path()) / f"{_key(row, batch)}.npz"
        if self.folder and path.exists():
            saved = np.load(path)
            if saved["reason"]:
                raise NoDefinitionError(str(saved["reason"]))
            kinds = dict(zip(saved["numbers"].tolist(), saved["kinds"].tolist(), strict=True))
            return AllocationTrace(events=saved["events"].tolist(), workspaces=kinds)
        if self.only_saved:
            raise NoDefinitionError(NOT_RECORDED)
        trace, reason = AllocationTrace(events=[(0, 0)], workspaces={}), ""
        try:
            program = program_of(row, batch)
            trace = recorded_on(program, card)
        except (NoDefinitionError, CanTrainError) as error:
            reason = str(error)
        if self.folder:
            np.savez_compressed(
                path, reason=reason, events=np.array(trace.events), numbers=np.array(list(trace.workspaces)),
                kinds=np.array(list(trace.workspaces.values()), dtype="U32"),
            )  # fmt: skip
        if reason:
            raise NoDefinitionError(reason)
        return trace


def _key(row: Row, batch: int | None) -> str:
    code = [Path(module.__file__ or "").read_bytes() for module in (published_peaks, cuda_dispatch)]
    return hashlib.sha256(b"".join([*code, repr((sorted(row.items()), batch)).encode()])).hexdigest()[:24]


def read_rows(path: Path, families: Sequence[str], *, more: bool) -> list[Row]:
    """Returns the measurements of some families, in this order; `more`: those of all others after them."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    order = dict.fromkeys([*families, *(row["family"] for row in rows if more)])
    places = {family: place for place, family in enumerate(order)}
    chosen = [row for row in rows if row["family"] in places]
    return sorted(chosen, key=lambda row: (places[row["family"]], _source(row)))


def measure(rows: Sequence[Row], most: int, before: Sequence[str], recorder: Recorder) -> str:
    """Predicts at most so many rows of each source and family; returns the tables and notes as text. `before` names the
    families that are predicted from small batches on the CPU, too, which takes long for large models.
    """
    allow_foreign_torchvision()
    table, contexts, left_out, far = [], dict[str, float](), [], []
    for (_, source), group in groupby(rows, key=lambda row: (row["family"], _source(row))):
        own = list(group)
        judged = judge(own[:: -(-len(own) // most)], recorder, before=own[0]["family"] in before)
        table += (added := judged.table_rows(f"{source}, {own[0]['family']}", contexts, own[0]["gpu"]))
        print("\n".join(" | ".join(cells) for cells in added), flush=True)
        far += judged.far(float((added[0][5] or "0").split()[0].replace(",", "")))
        left_out += [f"{source}, {own[0]['family']}: {told}" for told in _told(judged.left_out)]
    head = ["rows of", "rows", "error: median", "p95", "under", "context", "below, above", "FakeTensor", "before"]
    sampled = f"At most {most:,} rows of each source and family, evenly spaced, of {len(rows):,} in all"
    sampled += ", as far as they were recorded (`--only-saved`).\n\n" if recorder.only_saved else ".\n\n"
    lists = [f"Left out:\n\n{_listed(left_out)}", f"Missed by more than {FAR:.0%}:\n\n{_listed(far)}", GUESSES]
    return "\n\n".join([f"{sampled}{markdown([[*head, 'two-sided'], *table])}", NOTES, *lists])


def _told(left_out: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason, with the first models that it is true of."""
    models = defaultdict[str, list[str]](list)
    for model, reason in left_out.items():
        models[reason].append(model)
    return [
        f"{reason}: {len(found)}" + (f" ({', '.join(found[:NAMED])})" if reason != NOT_RECORDED else "")
        for reason, found in models.items()
    ]


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _source(row: Row) -> str:
    """Names a source as the table does: its repository, and what it measured on."""
    name = row["source"].partition("@")[0].split("/")[-1]
    return f"{'xMem' if 'xMem' in row['source'] else name} {row['gpu']}"


def judge(rows: Sequence[Row], recorder: Recorder, *, before: bool) -> Judged:
    """Predicts the rows of one family."""
    judged = Judged(rows=len(rows))
    for row in rows:
        try:
            if "SUSPECT" in row["notes"] or "leave out" in row["notes"]:
                raise NoDefinitionError("marked as suspect")
            if row["measured_mib"] and float(row["measured_mib"]) < fake_tensor_mib(row):
                raise NoDefinitionError(NO_WHOLE_STEP)
            card = find_card(row["gpu"])
            if row["measured_mib"]:
                judge_measured(row, card, recorder.trace(row, card), judged)
                is_next = len(judged.measured) % BEFORE_EVERY == 0 and len(judged.before) < BEFORE_MOST
                if before and is_next:
                    predicted = before_mib(program_of(row), int(row["batch"]))
                    judged.before.append((predicted, float(row["measured_mib"])))
            else:
                judge_two_sided(row, card, recorder, judged)
        except (NoDefinitionError, CanTrainError) as error:
            judged.left_out[f"{row['model']} at {row['batch']}"] = _reason(error, row)
    return judged


def _reason(error: Exception, row: Row) -> str:
    return str(error).splitlines()[0].replace(row["model"], "such a model")


def judge_measured(row: Row, card: Card, trace: AllocationTrace, judged: Judged) -> None:
    """Adds what a row's recording takes of a card, and the interval that is stated for it."""
    kernels = kernels_of(row)
    found = price_trace(trace, card, PLAIN, kernels)
    # xMem has taken the context off.
    has_context = "context not in it" not in row["measured_kind"]
    taken_off = (0, 0) if has_context else (found.context.least_bytes, found.context.most_bytes)
    ends = [(end - context) / MIB for end, context in zip(found.interval_bytes, taken_off, strict=True)]
    judged.models.append(f"{row['model']} at {row['batch']}")
    judged.measured.append(float(row["measured_mib"]))
    judged.after.append(replayed_mib(trace, card) + has_context * MORE_CONTEXT[kernels])
    judged.ends.append((ends[0], ends[1]))
    judged.fake.append(fake_tensor_mib(row))


def fake_tensor_mib(row: Row) -> float:
    """Returns FakeTensor's estimate of a row's tensors, published with its measurement; NaN where there is none."""
    estimate = re.search(r"FakeTensor estimate (\d+)", row["notes"])
    return float(estimate[1]) if estimate else float("nan")


def kernels_of(row: Row) -> str:
    """Returns the libraries whose kernels the training of a row loads, as far as the row tells."""
    if row["family"] in WITHOUT_CUDNN:
        return CUBLAS_KERNELS
    plain = "batchnorm:False" in row["model"] or re.match("vgg|convnext", row["model"], re.IGNORECASE)
    return CUDNN_KERNELS if plain and row["family"] != "timm" else ALL_KERNELS


def judge_two_sided(row: Row, card: Card, recorder: Recorder, judged: Judged) -> None:
    """Predicts whether a batch that trained fits, and the next larger one, which did not."""
    judged.fits.append(price_trace(recorder.trace(row, card), card, PLAIN).fits_card)
    if following := re.search(r"next larger tried (\d+)", row["notes"]):
        trace = recorder.trace(row, card, int(following[1]))
        judged.fits_next.append(price_trace(trace, card, PLAIN).fits_card)


def reserved_mib(program: Program, card: Card) -> float:
    """Returns what PyTorch would reserve of a card, in MiB."""
    return replayed_mib(recorded_on(program, card), card)


def replayed_mib(trace: AllocationTrace, card: Card) -> float:
    """Returns what PyTorch would reserve of a card for a recording, in MiB."""
    allocator = CachingAllocator(card.total_bytes - context_bytes(card)[1], settings=PLAIN)
    trace.replay(allocator)
    return allocator.peak_reserved_bytes / MIB


def before_mib(program: Program, batch: int) -> float:
    """Returns the peak that is predicted from small batches on the CPU, in MiB."""
    model = program.model.to_empty(device="cpu")
    for buffer in model.buffers():
        # Some are positions, of which what was in memory before is none.
        buffer.zero_()

    def loss_of(rows: np.ndarray) -> torch.Tensor:
        inputs, labels = program.batch_of(len(rows))
        return program.loss(model(inputs), labels)

    return predict_peak(model, batch, loss_of=loss_of, optimizer=program.optimizer).peak_bytes / MIB
