"""Real commands on simulated GPUs: a small one finishes what a fixed batch cannot, with the weights of a large one."""

import json
from pathlib import Path

import pytest
import torch

from can_train.cli.main import main

pytestmark = pytest.mark.slow

TRAIN = (
    "--model", "gat", "--size", "teacher", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5",
    "--no-baselines",
)  # fmt: skip
EXACT = ("--precision", "fp64", "--model-args", "dropout=0.0,layers=3", "--batch-size", "64", "--epochs", "1")
SMALL, LARGE = ("--device", "sim:64MiB"), ("--device", "sim:4GiB")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder that all runs here share, so that data is prepared once."""
    return tmp_path_factory.mktemp("state")


def train(folder: Path, state: Path, *arguments: str) -> int:
    return main([*TRAIN, *arguments, "--runs-dir", str(folder), "--state-dir", str(state)])


def weights(folder: Path) -> torch.Tensor:
    newest = max(folder.glob("*/checkpoints/*.pt"))
    state = torch.load(newest, weights_only=True)["model"]
    return torch.cat([value.flatten() for value in state.values() if value.is_floating_point()])


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in next(folder.glob("*/metrics.jsonl")).read_text().splitlines()]


def test_a_small_gpu_leads_to_the_weights_of_a_large_one(tmp_path: Path, state: Path) -> None:
    assert train(tmp_path / "small", state, *EXACT, *SMALL) == 0
    assert train(tmp_path / "large", state, *EXACT, *LARGE) == 0
    small, large = weights(tmp_path / "small"), weights(tmp_path / "large")
    assert float((small - large).norm() / large.norm()) <= 1e-10
    steps = [record for record in records(tmp_path / "small") if "micro_batches" in record]
    assert len(steps) == 1
    assert all(record["micro_batches"] > 2 * 11 for record in steps)
    assert all(0 < record["micro_batch_size"] < 64 for record in steps)


def test_a_fixed_batch_dies_there_with_a_clear_error(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, state, *EXACT, *SMALL, "--find-batch-size", "off", "--no-adaptive-micro-batch") == 3
    said = capsys.readouterr().err
    assert "training.adaptive_micro_batch is off" in said
    assert "Traceback" not in said
    assert list(tmp_path.glob("*/checkpoints/*.pt"))


def test_a_fixed_batch_is_rescued_where_it_may_be(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, state, *EXACT, *SMALL, "--find-batch-size", "off") == 0
    assert "memory ran out" in capsys.readouterr().err
    assert sum(record.get("ooms_rescued", 0) for record in records(tmp_path)) > 0


def test_a_fixed_micro_batch_that_dies_there_was_warned_of(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, state, *EXACT, *SMALL, "--micro-batch-size", "64", "--no-adaptive-micro-batch") == 3
    warned, _, failed = capsys.readouterr().err.partition("micro_batch_size=64 is more than fits")
    assert "training.adaptive_micro_batch is off" in failed
    assert "ran out" not in warned


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("1MiB", "the weights alone take 4.4 MiB, the device has 1.0 MiB"),
        ("5MiB", "take 4.4 MiB, 6.0 MiB in pages of the allocator, the device has 5.0 MiB"),
        ("12MiB", "must fit on the device"),
    ],
)
def test_a_model_that_does_not_fit_is_said_in_words(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str], size: str, message: str
) -> None:
    assert train(tmp_path, state, "--device", f"sim:{size}") == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_one_device_that_cannot_share_a_model_out_leaves_no_run_behind(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "runs", state, *SMALL, "--fit", "shard") == 2
    assert "shares a model out to the ranks of a run" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*"))


def test_a_memory_preset_sets_what_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    line = (*TRAIN, "--memory", "tight", "--device", "cpu", "--dry-run", "--show-config")
    assert main([*line, "--set", "training.oom_retries=7"]) == 0
    printed = capsys.readouterr().out
    assert "min_micro_batch_size: 2" in printed
    assert "backoff_factor: 4" in printed
    assert "oom_retries: 7" in printed
