"""Size and speed of a model beside others that were judged with it.

Shapes: R rows (windows).
"""

import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.tasks.can.judgement_table import UNDEFINED, FolderTable, judgement_table
from can_train.tasks.can.modes.windows import Score

STUDENT: Final = "model"
"""Name of what was trained, in tables and results."""


class TimedScore:
    """Scores windows, and sees how long that takes; the first time for each model is not counted, in which it is moved
    to the device and its limits are found.

    Args:
        score: Scores windows.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._taken: dict[str, tuple[int, float]] = {}

    def __call__(self, rows: NDArray[np.int64], *role: str) -> NDArray[np.float64]:
        """Scores windows with the model, or with the companion of a role."""
        name = "".join(role)
        started = time.perf_counter()
        scores = self._score(rows, *role)
        seconds = time.perf_counter() - started
        windows, before = self._taken.get(name, (-len(rows), -seconds))
        self._taken[name] = windows + len(rows), before + seconds
        return scores

    def warm_up(self, rows: NDArray[np.int64], *role: str) -> None:
        """Scores the first of some windows, so that none that follow are the first time."""
        self(rows[:1], *role)

    def speed(self, role: str) -> float | None:
        """Returns windows a second; None where nothing was timed."""
        windows, seconds = self._taken.get(role, (0, 0.0))
        return round(windows / seconds, 1) if seconds > 0 else None


def tables_of(judgement: Mapping[str, Any]) -> list[FolderTable]:
    """Writes a judgement as one table a test folder, and one of sizes and speeds where they are compared."""
    tables = judgement_table(judgement)  # type: ignore[arg-type]
    return [*tables, comparison_table(judgement)] if "compared" in judgement else tables


def comparison_table(judgement: Mapping[str, Any]) -> FolderTable:
    """Writes sizes and speeds as a table."""
    compared: Mapping[str, Mapping[str, Any]] = judgement["compared"]
    rows = tuple(
        (
            name,
            UNDEFINED if told["parameters"] is None else f"{told['parameters']:,}",
            UNDEFINED if told["windows_per_second"] is None else f"{told['windows_per_second']:,.0f}",
            told["run"] or "",
        )
        for name, told in compared.items()
    )
    alone = "no student without a teacher is beside it: --without-teacher RUN"
    return FolderTable(
        title="size and speed, windows a second as they were judged",
        columns=("detector", "parameters", "windows/s", "run"),
        rows=rows,
        notes=() if "without_teacher" in {*compared, *judgement["absent_floors"]} else (alone,),
    )
