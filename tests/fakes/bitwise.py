"""Compares what two runs ended with, bit by bit: the weights with all that belongs to them, and the losses."""

import json
import math
from pathlib import Path
from typing import Any

import torch

PLANNED = "/largest_planned"
"""A cost by a fitted law: one that is fitted anew, on another node, may differ by the order in which sums were formed.
"""


def final_state(run_path: Path) -> dict[str, Any]:
    """The newest checkpoint, without the kind of device that it was written on."""
    manifest = run_path / "checkpoints" / "manifest.json"
    newest = json.loads(manifest.read_text())["checkpoints"][0]["file"]
    state: dict[str, Any] = torch.load(manifest.parent / newest, weights_only=True)
    del state["device"]
    return state


def losses(run_path: Path) -> list[dict[str, Any]]:
    """The metrics, without those that time and the machine decide."""
    lines = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "epoch", "train", "lr", "validation_loss")} for line in lines]


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Compares two checkpoints bit by bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    elif where.endswith(PLANNED):
        assert math.isclose(one, other, rel_tol=1e-12), where
    else:
        assert one == other, where


def assert_ends_like(run_path: Path, undisturbed: Path, *, same_device: bool = True) -> None:
    states = [final_state(path) for path in (run_path, undisturbed)]
    if not same_device:
        # Masks of dropout take a byte an element on a GPU, and more on a processor: costs differ.
        for limits in [one for state in states for one in state["micro_batches"]]:
            del limits["largest_planned"]
    assert_same(*states)
    assert losses(run_path) == losses(undisturbed)
