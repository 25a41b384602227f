"""The training programs whose reserved memory their authors published, each with its loop and its allocator: predicted
by `predict_peak`, as a caller would.

The table has the columns program, definition, batch, precision, gpu, allocator, kind, mib and source. torchvision is
taken where it is installed.
"""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.harness import Table, environment, render, versions_of
from bench.published_peaks import NoDefinitionError, Row, allow_foreign_torchvision, import_vision
from can_train import predict_peak
from can_train.fit.peak_prediction import PeakPrediction

MIB: Final = 2**20
WIDTH: Final = 768
HEADS: Final = 12
LAYERS: Final = 12
WORDS: Final = 50_257
WORDS_OF_64: Final = 50_304  # a multiple of 64
LENGTH: Final = 1_024
DROPOUT: Final = 0.1
_CLASSES: Final = 10
_SIDE: Final = 224


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """The memory that PyTorch reserves for a program, in MiB."""

    predicted: float
    least: float
    most: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measurement lies in the stated interval."""
        return self.least <= self.measured <= self.most


def measure_programs(rows: Sequence[Row]) -> str:
    """Predicts all programs; returns the text of the section."""
    allow_foreign_torchvision()
    table, errors, inside, left_out = (
        Table("program", "measured", "predicted", "error", "interval", "as it ran"),
        [],
        0,
        [],
    )
    for row in rows:
        try:
            reserved = reserved_by(row)
        except NoDefinitionError as error:
            left_out.append(f"- {row['program']}: {error}")
            continue
        errors.append(abs(reserved.error))
        inside += reserved.is_inside
        sizes = [f"{size:,.0f}" for size in (reserved.measured, reserved.predicted)]
        interval = f"{reserved.least:,.0f} to {reserved.most:,.0f}"
        table.add(row["program"], *sizes, f"{reserved.error:+.2%}", interval, _as_it_ran(row))
    total = f"median {median(errors):.2%}, largest {max(errors):.2%}; inside the interval: {inside} of {len(errors)}"
    fields = {"table": table, "total": total, "left_out": "\n".join(["", *left_out])}
    return render("prediction-programs", {"environment": environment(versions_of("torch")), **fields})


def _as_it_ran(row: Row) -> str:
    """Returns the error of a prediction with the attention of the PyTorch that a program ran with, where that takes
    other memory.
    """
    if not row["program"].startswith("vit") or row["precision"] == "fp32":
        return ""
    with first_flash_attention():
        return f"{reserved_by(row).error:+.2%}"


@contextmanager
def first_flash_attention() -> Iterator[None]:
    """Opens a span whose attention gives results in the memory layout of FlashAttention 1, as PyTorch had it until 2.1:
    the projection after it then keeps a copy of them.
    """
    attention = F.scaled_dot_product_attention

    def with_copy(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = attention(*args, **kwargs)
        return result.transpose(1, 2).contiguous().transpose(1, 2)

    F.scaled_dot_product_attention = with_copy
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention


def reserved_by(row: Row) -> Reserved:
    """Predicts the memory that PyTorch reserves for a program; raises NoDefinitionError."""
    predicted = predict_program(row)
    terms = (predicted.tensors, *predicted.workspaces, predicted.fragmentation, predicted.spread)
    least, most = sum(term.least_bytes for term in terms), sum(term.most_bytes for term in terms)
    sizes = (size / MIB for size in (predicted.reserved_bytes, least, most))
    return Reserved(**dict(zip(("predicted", "least", "most"), sizes, strict=True)), measured=float(row["mib"]))


def predict_program(row: Row) -> PeakPrediction:
    """Predicts a program from its row; raises NoDefinitionError."""
    return (_vit if row["program"].startswith("vit") else _gpt)(row)


def read_programs(path: Path) -> list[dict[str, str]]:
    """Returns the rows of the table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _vit(row: Row) -> PeakPrediction:
    with torch.device("meta"):
        model = import_vision("torchvision.models").vit_l_16()
        model.heads.head = nn.Linear(model.hidden_dim, _CLASSES)
    is_half, precision = row["precision"] == "bf16", row["precision"] if row["precision"].startswith("amp") else "fp32"
    model = model.to(torch.bfloat16) if is_half else model

    def loss_of(rows: Any) -> Tensor:
        images = torch.zeros(len(rows), 3, _SIDE, _SIDE, dtype=torch.bfloat16 if is_half else torch.float32)
        return F.cross_entropy(model(images), torch.zeros(len(rows), dtype=torch.int64))

    return predict_peak(
        model, int(row["batch"]), loss_of=loss_of, optimizer=torch.optim.Adam, precision=precision, zero_grad="after",
        target=row["gpu"], allocator="",
    )  # fmt: skip


def _gpt(row: Row) -> PeakPrediction:
    name = row["program"]
    is_half, is_compiled = "bf16" in name, "compiled" in name
    style = Style(native="native" in name or "flash" in name or is_compiled, flash="flash" in name or is_compiled)
    words = WORDS_OF_64 if is_compiled else WORDS
    with torch.device("meta"):
        model = Gpt(style, words)
    model = model.to(torch.bfloat16) if is_half else model
    if is_compiled:
        model.compile()

    def loss_of(rows: Any) -> Tensor:
        given = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
        return F.cross_entropy(model(given).flatten(0, 1), given.flatten())

    return predict_peak(
        model, int(row["batch"]), loss_of=loss_of, optimizer=partial(torch.optim.AdamW, fused=is_half or None),
        target=row["gpu"], allocator="",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Style:
    """How the parts of a network are written."""

    native: bool  # whether norms and activations are PyTorch's own
    flash: bool  # whether attention is


class Gpt(nn.Module):
    """GPT-2 with 124 million parameters and a head of its own, as people write it by hand."""

    def __init__(self, style: Style, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(_Block(style) for _ in range(LAYERS)))
        self.norm = _norm(style)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        """Returns [N, T, V] scores of [N, T] words."""
        x = self.words(given) + self.places(torch.arange(given.shape[1], device=given.device))
        scores: Tensor = self.head(self.norm(self.blocks(self.drop(x))))
        return scores


class _Block(nn.Module):
    def __init__(self, style: Style) -> None:
        super().__init__()
        self.attention: nn.Module = _Flash() if style.flash else _Masked()
        widen, narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.forward_layers = nn.Sequential(widen, nn.GELU(approximate="tanh") if style.native else _Gelu(), narrow)
        self.first, self.second = _norm(style), _norm(style)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        before = x
        x = self.drop(self.attention(self.first(x))) + before
        before = x
        result: Tensor = self.drop(self.forward_layers(self.second(x))) + before
        return result


class _Masked(nn.Module):
    """Attention whose scores are masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys = keys.view(samples, length, HEADS, -1).transpose(1, 2)
        values = values.view(samples, length, HEADS, -1).transpose(1, 2)
        queries = queries.view(samples, length, HEADS, -1).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:length, :length], -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.drop(weights)
        attended = (weights @ values).transpose(1, 2).reshape(samples, length, WIDTH)
        return self.out(attended)  # type: ignore[no-any-return]


class _Flash(nn.Module):
    """Attention by PyTorch's operation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        qkv = self.qkv(x).view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        attended = F.scaled_dot_product_attention(queries, keys, values, dropout_p=DROPOUT, is_causal=True)
        attended = attended.transpose(1, 2).contiguous().view(samples, length, WIDTH)
        return self.out(attended)  # type: ignore[no-any-return]


def _norm(style: Style) -> nn.Module:
    return nn.LayerNorm(WIDTH) if style.native else _Norm()


class _Norm(nn.Module):
    """A norm from elementary operations."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class _Gelu(nn.Module):
    """An activation from elementary operations."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(slope * (x + 0.044715 * torch.pow(x, 3))))
