"""Whole runs by the command line, on a simulated GPU that is too small for a batch."""

import json
from pathlib import Path

import pytest

from can_train.cli.main import main

BATCH = ["--task", "muon", "--dataset", "synthetic", "--set", "dataset.synthetic.showers=120", "--epochs", "1",
         "--batch-size", "32", "--device", "sim:6MiB"]  # fmt: skip
AT_ONCE = ["--set", "training.micro_batch_size=32", "--set", "training.adaptive_micro_batch=false"]


@pytest.mark.slow
def test_a_run_that_dies_of_its_batch_finishes_where_it_is_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--state-dir", str(tmp_path / "state"), "--runs-dir", str(tmp_path / "runs")]
    assert main([*BATCH, *AT_ONCE, *folders]) != 0
    assert "ran out of memory" in capsys.readouterr().err
    assert main([*BATCH, *folders]) == 0
    finished = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/result.json")]
    scores = capsys.readouterr().out
    assert len(finished) >= 1
    for method in ("model", "nearest training event", "normal distribution"):
        assert method in scores


@pytest.mark.slow
def test_accumulation_steps_split_the_batch_and_leave_it_as_it_is(capsys: pytest.CaptureFixture[str],
                                                                  tmp_path: Path) -> None:  # fmt: skip
    folders = ["--state-dir", str(tmp_path / "state"), "--runs-dir", str(tmp_path / "runs")]
    asked = ["--gradient-accumulation-steps", "3", "--accumulation-muon-threshold", "10", "--dry-run"]
    assert main([*BATCH, "--device", "sim:1GiB", *asked, *folders]) == 0
    plan = capsys.readouterr().out
    assert "32 samples a step" in plan
    assert "3 micro-batches" in plan
