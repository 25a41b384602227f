"""Compares predictions with peaks of GPU memory that other people measured and published.

Each row's training loop is recorded as CUDA would run it, and its allocations are replayed under PyTorch's own settings
on the row's card. Its prediction is `device_bytes` of `predict_peak`, the context of the catalogue included.
"""

import csv
import hashlib
import math
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
from bench.harness import Table, environment, render, versions_of
from bench.published_peaks import NoDefinitionError, Program, Row, allow_foreign_torchvision, program_of
from can_train import predict_peak
from can_train.errors import CanTrainError
from can_train.fit.cost_model import Spread
from can_train.fit.peak_prediction import SPREADS, PeakPrediction, loaded_kernels, operations_of, price_trace
from can_train.memory import cuda_dispatch
from can_train.memory.allocation_trace import AllocationTrace
from can_train.memory.catalogue import Card, find_card
from can_train.memory.cuda_dispatch import record_on_cuda
from can_train.memory.simulated.allocator import PLAIN

MIB: Final = 2**20
FEW: Final = 4  # estimates of other tools that a constant is fitted for
BEFORE_MOST: Final = 8  # rows of a family that are predicted from small batches, too: each takes half a minute
BEFORE_EVERY: Final = 10  # so many rows apart
NAMED: Final = 12  # models that a reason for leaving out names
NOT_RECORDED: Final = "not recorded"
NO_WHOLE_STEP: Final = "less was measured than FakeTensor estimates of the tensors alone, so no whole step ran"
FEWEST: Final = 10  # measurements that a spread is computed of
FOLDS: Final = 5
HELD: Final = 0.965  # of the measurements that a spread is computed of: of others it holds somewhat less
FAR: Final = 0.15  # relative error of rows that are named
# Kinds of timm's networks, by words in their names; the first match counts.
KINDS: Final = {
    "CNN and attention": "coat|botnet|halo|mobilevit|vit_.*_r[25]|levit|fastvit|nextvit|efficientvit|maxvit|hybrid",
    "ViT, Mixer": "vit|deit|mixer|mlp|davit|swin|pvt|volo|caformer|hiera|twins|cait|tnt|beit",
    "EfficientNet, MobileNet": "efficientnet|mobilenet|mnasnet|fbnet|lcnet|mixnet|tinynet|rexnet|repghost",
}


@dataclass
class Judged:
    """The rows of a source and family, in MiB."""

    rows: int
    models: list[str] = field(default_factory=list)  # of the measured rows, with their batches
    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)  # the driver's figure, as `predict_peak` states it
    ends: list[tuple[float, float]] = field(default_factory=list)  # of its interval
    # Operations of `SPREADS`, and the bytes that the allocator was predicted to reserve and that it reserved
    reserved: list[tuple[str, float, float]] = field(default_factory=list)
    fake: list[float] = field(default_factory=list)  # FakeTensor's estimates; NaN where there is none
    before: list[tuple[float, float]] = field(default_factory=list)  # predicted from small batches, and measured
    fits: list[bool] = field(default_factory=list)  # of batches that trained
    fits_next: list[bool] = field(default_factory=list)  # of batches that did not
    left_out: dict[str, str] = field(default_factory=dict)  # model to reason

    def table_rows(self, name: str) -> list[list[str]]:
        """Returns the family's rows of the table."""
        kinds = [next((kind for kind, words in KINDS.items() if re.search(words, model)), "other CNNs")
                 for model in self.models if name.endswith("timm")]  # fmt: skip
        rows = [self._table_row(name, np.arange(len(self.measured)))]
        for kind in dict.fromkeys(kinds):
            of_kind = np.array([index for index, each in enumerate(kinds) if each == kind], dtype=int)
            rows.append([*self._table_row(f"… {kind}", of_kind)[:6], "", "", ""])
        return rows

    def _table_row(self, name: str, chosen: np.ndarray) -> list[str]:
        cells = [name, f"{len(chosen)} of {self.rows}"]
        if len(chosen):
            measured, (least, most) = np.array(self.measured)[chosen], np.array(self.ends)[chosen].T
            errors = np.array(self.predicted)[chosen] - measured
            cells += [*_errors(errors, measured), f"{(errors < -0.02 * measured).mean():.0%}"]
            outside = (measured < least).mean(), (measured > most).mean()
            cells.append(f"{1 - sum(outside):.1%}; {outside[0]:.1%}, {outside[1]:.1%}")
        else:
            cells += [""] * 4
        fake = np.array(list(zip(self.fake, self.measured, strict=True))).reshape(-1, 2)
        cells.append(", ".join(_held_out(fake[~np.isnan(fake[:, 0])])))
        cells.append(", ".join(_held_out(np.array(self.before).reshape(-1, 2))))
        verdicts = (self.fits, [not fits for fits in self.fits_next])
        cells.append("; ".join(f"{sum(right)} of {len(right)}" for right in verdicts if right))
        return cells

    def far(self) -> list[str]:
        """Names the rows that the prediction misses by far."""
        return [
            f"{model} ({predicted:,.0f} MiB, measured {measured:,.0f})"
            for model, predicted, measured in zip(self.models, self.predicted, self.measured, strict=True)
            if abs(predicted - measured) > FAR * measured
        ]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The allocations of a program, the libraries whose kernels it loads, and the operations that decide its memory, as
    `predict_peak` reads them from its model.
    """

    trace: AllocationTrace
    kernels: str
    operations: str

    def priced(self, card: Card) -> PeakPrediction:
        """Returns the memory that it takes of a card."""
        return price_trace(self.trace, card, PLAIN, self.kernels, self.operations)


def recorded_on(program: Program, card: Card) -> AllocationTrace:
    """Records the allocations of a program on a card."""
    return record_on_cuda(
        program.model, program.run, generation=card.generation, resident_threads=card.resident_threads
    )


def _held_out(pairs: np.ndarray) -> list[str]:
    """Returns the errors of every second pair of a prediction and a measurement; the other pairs fit a constant."""
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

    def record(self, row: Row, card: Card, batch: int | None = None) -> Recording:
        """Returns a row's recording, with a batch of its own where one is given; raises NoDefinitionError."""
        path = (self.folder or Path()) / f"{_key(row, batch)}.npz"
        if self.folder and path.exists():
            saved = np.load(path)
            if saved["reason"]:
                raise NoDefinitionError(str(saved["reason"]))
            kinds = dict(zip(saved["numbers"].tolist(), saved["kinds"].tolist(), strict=True))
            trace = AllocationTrace(events=saved["events"].tolist(), workspaces=kinds)
            return Recording(trace=trace, kernels=str(saved["kernels"]), operations=str(saved["operations"]))
        if self.only_saved:
            raise NoDefinitionError(NOT_RECORDED)
        trace, kernels, operations, reason = AllocationTrace(events=[(0, 0)], workspaces={}), "", "", ""
        try:
            program = program_of(row, batch)
            trace, kernels = recorded_on(program, card), loaded_kernels(program.model)
            operations = operations_of(program.model)
        except (NoDefinitionError, CanTrainError) as error:
            reason = str(error)
        if self.folder:
            np.savez_compressed(
                path, reason=reason, kernels=kernels, operations=operations, events=np.array(trace.events),
                numbers=np.array(list(trace.workspaces)), kinds=np.array(list(trace.workspaces.values()), dtype="U32"),
            )  # fmt: skip
        if reason:
            raise NoDefinitionError(reason)
        return Recording(trace=trace, kernels=kernels, operations=operations)


def _key(row: Row, batch: int | None) -> str:
    code = [Path(module.__file__ or "").read_bytes() for module in (published_peaks, cuda_dispatch)]
    return hashlib.sha256(b"".join([*code, repr((sorted(row.items()), batch)).encode()])).hexdigest()[:24]


def read_rows(path: Path, families: Sequence[str], *, more: bool) -> list[Row]:
    """Returns the measurements of some families, in this order; with `more`, then all other measurements."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    order = dict.fromkeys([*families, *(row["family"] for row in rows if more)])
    places = {family: place for place, family in enumerate(order)}
    chosen = [row for row in rows if row["family"] in places]
    return sorted(chosen, key=lambda row: (places[row["family"]], _source(row)))


def measure(rows: Sequence[Row], most: int, before: Sequence[str], recorder: Recorder) -> str:
    """Predicts at most so many rows of each source and family; returns the text of the section. `before` names the
    families that are predicted from small batches on the CPU, too, which takes long for large models.
    """
    allow_foreign_torchvision()
    table = Table("rows of", "rows", "error: median", "p95", "under", "inside; below, above", "FakeTensor", "before",
                  "two-sided")  # fmt: skip
    left_out, far, reserved = [], [], []
    for (_, source), group in groupby(rows, key=lambda row: (row["family"], _source(row))):
        members = list(group)
        family = members[0]["family"]
        judged = judge(members[:: -(-len(members) // most)], recorder, before=family in before)
        for cells in judged.table_rows(f"{source}, {family}"):
            table.add(*cells)
        far += judged.far()
        reserved += judged.reserved
        left_out += [f"{source}, {family}: {line}" for line in _reasons(judged.left_out)]
    saved = ", as far as they were recorded (`--only-saved`)" if recorder.only_saved else ""
    lists = {name: "\n".join(f"- {line}" for line in lines) for name, lines in (("left_out", left_out), ("far", far))}
    fields = {
        "most": most,
        "rows": len(rows),
        "saved": saved,
        "table": table,
        "spreads": spreads(reserved),
        "FAR": FAR,
        **lists,
    }
    return render("prediction-measured", {"environment": environment(versions_of("torch")), **fields})


def spreads(reserved: Sequence[tuple[str, float, float]]) -> Table:
    """Returns a table of the intervals that the measurements lead to, by operations, beside the shipped ones."""
    table = Table("memory decided by", "rows", "inside, held out", "median width", "below, above", "shipped", "inside")
    for operations, shipped in SPREADS.items():
        pairs = np.array([pair for named, *pair in reserved if named == operations])
        if len(pairs) < FEWEST:
            continue
        held = [is_inside for fold in range(FOLDS) for is_inside in _held_out_of(pairs, fold)]
        spread, inside = spread_of(pairs), _inside(shipped, pairs)
        widths = [(most - least) / predicted for predicted, _ in pairs for least, most in [shipped.around(predicted)]]
        ends = [f"{each.less:.1%}, {each.more:.1%}" for each in (spread, shipped)]
        table.add(
            operations, f"{len(pairs)}", f"{np.mean(held):.1%}", f"{median(widths):.0%}", *ends, f"{inside.mean():.1%}"
        )
    return table


def spread_of(pairs: np.ndarray) -> Spread:
    """Returns the narrowest spread that holds `HELD` of the measurements; pairs are predicted and measured bytes."""
    predicted, measured = pairs.T
    shares = np.sort((measured - predicted) / Spread(less=1.0, more=1.0).unit(predicted))
    count = min(math.ceil(HELD * len(shares)), len(shares))
    first = np.argmin(shares[count - 1 :] - shares[: len(shares) - count + 1])
    return Spread(less=float(max(-shares[first], 0.0)), more=float(max(shares[first + count - 1], 0.0)))


def _inside(spread: Spread, pairs: np.ndarray) -> np.ndarray:
    predicted, measured = pairs.T
    least, most = spread.around(predicted)
    inside: np.ndarray = (measured >= predicted + least) & (measured <= predicted + most)
    return inside


def _held_out_of(pairs: np.ndarray, fold: int) -> np.ndarray:
    """Returns which measurements of a fold lie in the spread of the other folds."""
    is_fold = np.arange(len(pairs)) % FOLDS == fold
    return _inside(spread_of(pairs[~is_fold]), pairs[is_fold])


def _reasons(left_out: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason, with the first models that it applies to."""
    models = defaultdict[str, list[str]](list)
    for model, reason in left_out.items():
        models[reason].append(model)
    return [
        f"{reason}: {len(named)}" + (f" ({', '.join(named[:NAMED])})" if reason != NOT_RECORDED else "")
        for reason, named in models.items()
    ]


def _source(row: Row) -> str:
    """Names a source as the table does: its repository and its card."""
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
                judge_measured(row, card, recorder.record(row, card), judged)
                is_next = len(judged.measured) % BEFORE_EVERY == 0 and len(judged.before) < BEFORE_MOST
                if before and is_next:
                    predicted = before_mib(program_of(row), int(row["batch"]))
                    judged.before.append((predicted, float(row["measured_mib"])))
            else:
                judge_two_sided(row, card, recorder, judged)
        except (NoDefinitionError, CanTrainError) as error:
            judged.left_out[f"{row['model']} at {row['batch']}"] = (
                str(error).splitlines()[0].replace(row["model"], "such a model")
            )
    return judged


def judge_measured(row: Row, card: Card, recording: Recording, judged: Judged) -> None:
    """Adds the memory that a row's recording takes on a card, and the interval that is stated for it."""
    priced = recording.priced(card)
    taken_off = (0.0, 0.0, 0.0)
    if "context not in it" in row["measured_kind"] or "max_memory" in row["measured_kind"]:
        # xMem has taken the context off, and PyTorch does not count it.
        taken_off = priced.context.num_bytes, priced.context.least_bytes, priced.context.most_bytes
    stated = (priced.device_bytes, *priced.interval_bytes)
    predicted, least, most = ((size - context) / MIB for size, context in zip(stated, taken_off, strict=True))
    judged.models.append(f"{row['model']} at {row['batch']}")
    judged.measured.append(float(row["measured_mib"]))
    judged.predicted.append(predicted)
    judged.ends.append((least, most))
    reserved = float(row["measured_mib"]) * MIB - (0.0 if taken_off[0] else priced.context.num_bytes)
    judged.reserved.append((recording.operations, priced.reserved_bytes, reserved))
    judged.fake.append(fake_tensor_mib(row))


def fake_tensor_mib(row: Row) -> float:
    """Returns FakeTensor's estimate of a row's tensors, published with its measurement; NaN without an estimate."""
    estimate = re.search(r"FakeTensor estimate (\d+)", row["notes"])
    return float(estimate[1]) if estimate else float("nan")


def judge_two_sided(row: Row, card: Card, recorder: Recorder, judged: Judged) -> None:
    """Predicts whether a batch that trained fits, and the next larger one, which did not."""

    def fits(batch: int | None = None) -> bool:
        recording = recorder.record(row, card, batch)
        return bool(recording.priced(card).fits_card)

    judged.fits.append(fits())
    if following := re.search(r"next larger tried (\d+)", row["notes"]):
        judged.fits_next.append(fits(int(following[1])))


def before_mib(program: Program, batch: int) -> float:
    """Returns the peak that is predicted from small batches on the CPU, in MiB."""
    model = program.model.to_empty(device="cpu")
    for buffer in model.buffers():
        # Some buffers are positions, and uninitialised memory is no valid position.
        buffer.zero_()

    def loss_of(rows: np.ndarray) -> torch.Tensor:
        inputs, labels = program.batch_of(len(rows))
        return program.loss(model(inputs), labels)

    return predict_peak(model, batch, loss_of=loss_of, optimizer=program.optimizer).peak_bytes / MIB
