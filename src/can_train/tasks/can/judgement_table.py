"""A judgement as text cells: one table a test folder, its detectors below each other. Drawing is left to the command
line; with two spaces between columns a row fits 80 characters.
"""

from dataclasses import dataclass
from typing import Final

from can_train.tasks.can.judging import FolderJudgement, Judgement
from can_train.tasks.can.metrics import Metrics

COLUMNS: Final = ("detector", "f1", "prec", "recall", "mcc", "pr_auc", "roc_auc", "r@1%", "alarm/h")
"""Headings; `r@1%` is recall at 1 % false positives, `alarm/h` are false alarms per hour."""

UNDEFINED: Final = "-"
"""What stands for a figure that the folder does not define."""

_MANY: Final = 100.0
"""Alarms per hour from which a decimal is noise."""


@dataclass(frozen=True, kw_only=True)
class FolderTable:
    """One test folder's figures as text.

    Attributes:
        title: The folder and what is in it.
        rows: Cells under `COLUMNS`, the model first, then what it is to be seen beside, then the floors.
        notes: Recall by attack kind, and remarks.
        columns: The headings.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    columns: tuple[str, ...] = COLUMNS


def judgement_table(judgement: Judgement) -> list[FolderTable]:
    """Writes a judgement as one table a test folder."""
    return [_folder_table(folder, judged) for folder, judged in judgement["test"].items()]


def _folder_table(folder: str, judged: FolderJudgement) -> FolderTable:
    model = judged["model"]
    # Results of older versions have nothing beside the model.
    detectors = {"model": model, **judged.get("beside", {}), **judged["floors"]}
    kinds = [f"{kind} {told['recall']:.3f} of {told['windows']:,}" for kind, told in judged["recall_by_kind"].items()]
    return FolderTable(
        title=f"{folder}: {model['windows']:,} windows, {model['attack_windows']:,} attacks",
        rows=tuple((name, *_cells(figures)) for name, figures in detectors.items()),
        notes=(*([f"recall by kind: {', '.join(kinds)}"] if kinds else []), *judged["remarks"]),
    )


def _cells(figures: Metrics) -> tuple[str, ...]:
    return (
        _rate(figures["f1"]),
        _rate(figures["precision"]),
        _rate(figures["recall"]),
        _rate(figures["mcc"]),
        _rate(figures["pr_auc"]),
        _rate(figures["roc_auc"]),
        _rate(figures["recall_at_fpr_1pct"]),
        _alarms(figures["false_alarms_per_hour"]),
    )


def _rate(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.3f}"


def _alarms(value: float | None) -> str:
    if value is None:
        return UNDEFINED
    return f"{value:.1f}" if value < _MANY else f"{value:,.0f}"
