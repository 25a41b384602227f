"""What to expect of a run before it has started: what the newest finished run of the same configuration measured, read
from its files. What nobody has run yet is planned in the job.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from can_train.config.plain_text import plain_from_yaml
from can_train.config.resolved import ResolvedRun
from can_train.policy.sizes import size_text
from can_train.state.registry import RunRecord

_LOOKED_AT: Final = 5
"""Runs of the same key whose files are read, the newest first."""

_MEMORY: Final = ("precision", "optimizer", "deterministic")
"""Training settings by which memory differs, beside the model."""

UNKNOWN: Final = "No such run has finished yet: the job plans it on its device"


def expectation(run: ResolvedRun, runs: Sequence[RunRecord]) -> str:
    """Says in one sentence what an earlier run of the same key and memory measured.

    Args:
        run: The new run.
        runs: Of the registry, the oldest first.
    """
    same = [earlier for earlier in reversed(runs) if earlier.key == run.key]
    for earlier in same[:_LOOKED_AT]:
        result = _result(Path(earlier.path))
        if result is not None and _memory(_config(Path(earlier.path))) == _memory(run.config):
            return _sentence(earlier.run_id, result)
    return UNKNOWN


def _sentence(run_id: str, result: Mapping[str, Any]) -> str:
    batch = result["plan"]["plan"]["logical_batch"]
    micro, peak = result.get("micro_batch_size"), result.get("peak_memory_bytes")
    parts = [f"batch {batch:,}"]
    if micro and micro < batch:
        parts.append(f"micro-batches of up to {micro:,}")
    if peak:
        parts.append(f"peak {size_text(peak)} on {result['device']}")
    return f"{run_id} had {', '.join(parts)}"


def _memory(config: Mapping[str, Any]) -> list[Any]:
    training = config.get("training", {})
    return [config.get("model"), *(training.get(name) for name in _MEMORY)]


def _config(path: Path) -> dict[str, Any]:
    try:
        return plain_from_yaml((path / "config.yaml").read_text())
    except (OSError, ValueError):
        return {}


def _result(path: Path) -> dict[str, Any] | None:
    """Reads a result; None where there is none, or one of another version."""
    try:
        result: dict[str, Any] = json.loads((path / "result.json").read_text())
        _sentence("", result)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result
