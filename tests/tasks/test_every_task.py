"""What holds for a task of any kind: it dies of its batch where nothing rescues it, and ends with the weights of an
unlimited device where it is split.
"""

import json
from pathlib import Path

import pytest
import torch

from can_train.cli.main import main
from fakes.bitwise import final_state
from fakes.killed_runs import only_run

TASKS = {
    "seq2seq": (
        "sim:4MiB",
        ["--epochs", "13", "--batch-size", "64", "--set", "dataset.synthetic.words=220"],
        ["hidden=24", "embedding=16", "dropout=0"],
    ),
    "transformer": (
        "sim:3MiB",
        ["--epochs", "13", "--batch-size", "64", "--set", "dataset.synthetic.words=220", "--model", "transformer"],
        ["hidden=32", "embedding=16", "layers=1", "heads=2", "dropout=0"],
    ),
    "muon": (
        "sim:6MiB",
        ["--epochs", "20", "--batch-size", "32", "--set", "dataset.synthetic.showers=120"],
        [],
    ),
}  # fmt: skip
"""By name: a simulated GPU that is too small for a batch, a training of 50 steps or more, settings of a small model."""

TOLERANCE = 1e-10  # of weights after 50 steps in float64


def words(name: str) -> list[str]:
    _, options, model = TASKS[name]
    task = "seq2seq" if name == "transformer" else name
    settings = [word for setting in model for word in ("--set", f"model.{setting}")]
    return ["--task", task, "--dataset", "synthetic", *options, *settings, "--precision", "fp64"]


def trained(folder: Path, name: str, *more: str) -> Path:
    place = ["--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]
    assert main([*words(name), *more, *place]) == 0
    return only_run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_gpu_too_small_for_the_batch_ends_a_plain_training_and_not_this_one(name: str, tmp_path: Path) -> None:
    small = ["--device", TASKS[name][0]]
    place = ["--runs-dir", str(tmp_path / "off"), "--state-dir", str(tmp_path / "off-state")]
    plain = ["--set", "training.micro_batch_size=1000", "--set", "training.adaptive_micro_batch=false"]
    assert main([*words(name), *plain, *small, *place]) == 3
    whole = trained(tmp_path / "whole", name, "--device", "cpu", "--micro-batch-size", "1000")
    split = trained(tmp_path / "split", name, *small)
    result = json.loads((split / "result.json").read_text())
    plans = [result["plan"], *result["plan"]["later"]]
    assert result["steps"] >= 50
    assert max(one["plan"]["most_parts"] for one in plans) > 1
    own, other = (final_state(run)["model"] for run in (split, whole))
    for weight in own:
        torch.testing.assert_close(own[weight], other[weight], rtol=TOLERANCE, atol=TOLERANCE)
