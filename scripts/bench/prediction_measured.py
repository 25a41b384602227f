"""Compares predictions with peaks of GPU memory that other people measured and published.

Each row's training loop is recorded as CUDA would run it, and its allocations are replayed under PyTorch's own settings
on the row's card. What the driver shows beyond the allocator, the context, is one constant a source and family: fitted
on every second row, and judged on the others.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch

from bench.published_peaks import NoDefinitionError, Program, Row, allow_foreign_torchvision, program_of
from bench.results_file import markdown
from can_train import predict_peak
from can_train.errors import CanTrainError
from can_train.fit.prediction import price_trace
from can_train.memory.allocator import PLAIN, CachingAllocator
from can_train.memory.catalogue import Card, context_bytes, find_card
from can_train.memory.cuda_dispatch import record_on_cuda

MIB: Final = 2**20
FEW: Final = 4  # rows of a family that tell no constant of their own: it is that of the first family on the same card
BEFORE_MOST: Final = 8  # rows of a family that are predicted from small batches, too: each takes half a minute
NOTES: Final = """\
*Rows*: those that were judged, of those with a measurement; the others fitted the context, or are left out: their model
is not at hand, they are marked as suspect, or the recording failed. *After*: the recorded loop, and the constant.
*Below*: share of the rows whose measurement is above the prediction by more than 2 %. *Context*: the constant.
*Before*: what `predict_peak` predicts without a target of up to 8 rows, and a constant that is fitted on half of them.
*Two-sided*: a batch that trained is predicted to fit, and the next larger one, which did not, not to. What cuDNN takes
is assumed as it suits every tenth generated CNN and the named ones, so their rows are not held out for it."""


@dataclass
class Judged:
    """The rows of a source and family, in MiB."""

    rows: int
    measured: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)  # reserved, without a context
    before: list[tuple[float, float]] = field(default_factory=list)  # predicted from small batches, and measured
    fits: list[bool] = field(default_factory=list)  # of batches that trained
    fits_next: list[bool] = field(default_factory=list)  # of batches that did not
    left_out: dict[str, str] = field(default_factory=dict)  # model to reason

    def table_row(self, name: str, contexts: dict[str, float], card: str) -> list[str]:
        """Returns the family's row of the table; `contexts` has the constants of cards so far."""
        found, measured = np.array(self.after), np.array(self.measured)
        if len(found) >= FEW:
            context, judged = float(median(measured[::2] - found[::2])), slice(1, None, 2)
            contexts.setdefault(card, context)
        else:
            context, judged = contexts.get(card, 0.0), slice(None)
        if name.startswith("xMem"):
            context, judged = 0.0, slice(None)
        cells = [name, f"{len(measured[judged])} of {self.rows}"]
        if len(found):
            errors = found[judged] + context - measured[judged]
            cells += [*_errors(errors, measured[judged]), f"{(errors < -0.02 * measured[judged]).mean():.0%}"]
            cells.append(f"{context:,.0f} MiB")
        else:
            cells += ["", "", "", ""]
        if self.before:
            predicted, shown = np.array(self.before).T
            constant = float(median(shown[::2] - predicted[::2]))
            cells += _errors((predicted + constant - shown)[1::2], shown[1::2])
        else:
            cells += ["", ""]
        pairs = [one for one in (self.fits, [not fits for fits in self.fits_next]) if one]
        cells.append("; ".join(f"{sum(one)} of {len(one)}" for one in pairs))
        return cells


def _errors(errors: np.ndarray, measured: np.ndarray) -> list[str]:
    """Returns the median and the 95th percentile of absolute errors, each relative and in MiB."""
    return [
        f"{np.quantile(np.abs(errors / measured), share):.1%}, {np.quantile(np.abs(errors), share):,.0f} MiB"
        for share in (0.5, 0.95)
    ]


def measure(path: Path, families: Sequence[str], most: int, before: Sequence[str]) -> str:
    """Predicts at most so many rows of each source and family; returns the tables and notes as text. `before` names the
    families that are predicted from small batches on the CPU, too, which takes long for large models.
    """
    allow_foreign_torchvision()
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] in families]
    table, contexts, left_out = [], dict[str, float](), []
    rows.sort(key=lambda row: (families.index(row["family"]), _source(row)))
    for (_, source), group in groupby(rows, key=lambda row: (row["family"], _source(row))):
        own = list(group)
        judged = judge(own[:: -(-len(own) // most)], before=own[0]["family"] in before)
        table.append(judged.table_row(f"{source}, {own[0]['family']}", contexts, own[0]["gpu"]))
        print(" | ".join(table[-1]), flush=True)
        left_out += [f"{source}: {model} ({reason})" for model, reason in judged.left_out.items()]
    head = ["rows of", "rows", "after: median", "after: p95", "below", "context", "before: median", "before: p95"]
    sampled = f"At most {most} rows of each source and family, evenly spaced, of {len(rows):,} in all.\n\n"
    told = "".join(f"\n- {line}" for line in left_out)
    return f"{sampled}{markdown([[*head, 'two-sided'], *table])}\n\n{NOTES}\n\nLeft out:\n{told}"


def _source(row: Row) -> str:
    """Names a source as the table does: its repository, and what it measured on."""
    name = row["source"].partition("@")[0].split("/")[-1]
    return f"{'xMem' if 'xMem' in row['source'] else name} {row['gpu']}"


def judge(rows: Sequence[Row], *, before: bool) -> Judged:
    """Predicts the rows of one family."""
    judged = Judged(rows=len(rows))
    for index, row in enumerate(rows):
        try:
            if "SUSPECT" in row["notes"] or "leave out" in row["notes"]:
                raise NoDefinitionError("marked as suspect")
            card = find_card(row["gpu"])
            if row["measured_mib"]:
                program = program_of(row)
                after = reserved_mib(program, card)
                if before and index % -(-len(rows) // BEFORE_MOST) == 0:
                    predicted = before_mib(program_of(row), int(row["batch"]))
                    judged.before.append((predicted, float(row["measured_mib"])))
                judged.measured.append(float(row["measured_mib"]))
                judged.after.append(after)
            else:
                judge_two_sided(row, card, judged)
        except (NoDefinitionError, CanTrainError) as error:
            judged.left_out[row["model"]] = str(error).splitlines()[0]
    return judged


def judge_two_sided(row: Row, card: Card, judged: Judged) -> None:
    """Predicts whether a batch that trained fits, and the next larger one, which did not."""

    def fits(batch: int | None) -> bool:
        program = program_of(row, batch)
        trace = record_on_cuda(program.model, program.run, generation=card.generation)
        return price_trace(trace, card, PLAIN).fits_card

    _, _, following = row["notes"].partition("next larger tried ")
    judged.fits.append(fits(None))
    if (size := following.split()[0]).isdigit():
        judged.fits_next.append(fits(int(size)))


def reserved_mib(program: Program, card: Card) -> float:
    """Returns what PyTorch would reserve of a card, in MiB."""
    trace = record_on_cuda(program.model, program.run, generation=card.generation)
    allocator = CachingAllocator(card.total_bytes - context_bytes(card)[1], settings=PLAIN)
    trace.replay(allocator)
    return allocator.peak_reserved_bytes / MIB


def before_mib(program: Program, batch: int) -> float:
    """Returns the peak that is predicted from small batches on the CPU, in MiB."""
    model = program.model.to_empty(device="cpu")

    def loss_of(rows: np.ndarray) -> torch.Tensor:
        inputs, labels = program.batch_of(len(rows))
        return program.loss(model(inputs), labels)

    return predict_peak(model, batch, loss_of=loss_of, optimizer=program.optimizer).peak_bytes / MIB
