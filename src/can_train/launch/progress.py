"""How far a run has come, from what is in its folder; whatever is missing or damaged there is simply not known."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from can_train.training.run_folder import CONFIG, RunFolder

_EPOCHS: Final = re.compile(r"^training:\n(?:  .*\n)*?  epochs: (\d+)$", re.MULTILINE)
"""The setting, as `plain_to_yaml` writes it."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come; None: not known.

    Attributes:
        step: Optimizer steps done.
        steps: Of how many.
        epoch: Epochs done, the one at work among them.
        epochs: Of how many.
        saved_step: Step of the newest checkpoint.
        best_validation_loss: So far.
        peak_share: Memory peak ÷ capacity.
        safety_factor: Of the plan.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    saved_step: int | None = None
    best_validation_loss: float | None = None
    peak_share: float | None = None
    safety_factor: float | None = None


def read_progress(folder: RunFolder, result: Mapping[str, Any] | None) -> Progress:
    """Reads how far a run has come.

    Args:
        folder: Of the run.
        result: What its `result.json` holds; None: it has not finished.
    """
    if result is not None:
        return _of_result(result)
    metrics = [line for line in _lines(folder.metrics_path) if isinstance(line, dict)]
    last = metrics[-1] if metrics else {}
    measured = next((line for line in reversed(metrics) if "peak_memory_pct" in line), {})
    losses = [loss for line in metrics if (loss := _number(line.get("validation_loss"))) is not None]
    plan = _nested(_read(folder.plan_path), "plan")
    saved = _saved_step(folder.checkpoints_path)
    done = [step for step in (_whole(last.get("step")), saved) if step is not None]
    epochs = _epochs(folder) if plan else None
    per_epoch = _number(plan.get("mean_steps_per_epoch", plan.get("steps_per_epoch")))
    return Progress(
        step=max(done, default=None),
        steps=round(per_epoch * epochs) if per_epoch and epochs else None,
        epoch=_whole(last.get("epoch")),
        epochs=epochs,
        saved_step=saved,
        best_validation_loss=min(losses, default=None),
        peak_share=_number(measured.get("peak_memory_pct")),
        safety_factor=_number(plan.get("safety_factor")),
    )


def _of_result(result: Mapping[str, Any]) -> Progress:
    steps, epochs = _whole(result.get("steps")), _whole(result.get("epochs"))
    return Progress(
        step=steps,
        steps=steps,
        epoch=epochs,
        epochs=epochs,
        saved_step=steps,
        best_validation_loss=_number(result.get("best_validation_loss")),
        peak_share=_number(result.get("peak_memory_pct")),
        safety_factor=_number(_nested(result.get("plan"), "plan").get("safety_factor")),
    )


def _epochs(folder: RunFolder) -> int | None:
    """Finds the one number in the configuration; reading all of it takes as long as all else of a run together."""
    try:
        found = _EPOCHS.search((folder.path / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    return int(found[1]) if found else None


def _saved_step(checkpoints: Path) -> int | None:
    entries = _read(checkpoints / "manifest.json")
    listed = entries.get("checkpoints") if isinstance(entries, dict) else None
    newest = listed[0] if isinstance(listed, list) and listed else None
    return _whole(newest.get("step")) if isinstance(newest, dict) else None


def _lines(path: Path) -> Iterator[Any]:
    """Reads JSON lines; the last may be half-written."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _nested(values: Any, name: str) -> Mapping[str, Any]:
    inner = values.get(name) if isinstance(values, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
