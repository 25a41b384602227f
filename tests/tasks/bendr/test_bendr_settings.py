"""What a command line means: the batch of a data set's preset, its accumulation, the learning rate, and what is run."""

import json
import math
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.config.task_settings import load_task_settings
from can_train.fit.planner import plan_request
from fakes.bitwise import assert_ends_like
from fakes.killed_runs import finish, finish_killed, only_run

TINY = ("--set", "model.hidden=16", "--set", "model.layers=1", "--set", "model.feedforward=32",
        "--set", "dataset.synthetic.seconds=40", "--set", "dataset.synthetic.recordings=2")  # fmt: skip


def test_defaults_are_those_of_the_published_training() -> None:
    run = resolve(RunRequest(task="bendr", dataset="eye_state"))
    training = run.training
    assert (training.batch_size, training.gradient_accumulation_steps, training.epochs) == (8, 4, 10)
    assert (training.optimizer, list(training.betas)) == ("adam", [0.9, 0.98])
    assert (run.mode.name, run.mode.mask_rate, run.mode.mask_span, run.mode.negatives) == ("pretrain", 0.065, 10, 20)
    assert load_task_settings("bendr").training["lr"] == 2e-5, "of a data set without a preset"


@pytest.mark.parametrize(("dataset", "batch"), [("eye_state", 32), ("synthetic", 16)])
def test_a_data_set_has_its_own_batch_and_accumulation(dataset: str, batch: int) -> None:
    request = plan_request(resolve(RunRequest(task="bendr", dataset=dataset)).training)
    assert request.requested_batch == request.preset_batch == batch
    assert request.loader_batch == 8


def test_a_learning_rate_is_scaled_by_what_a_step_sees_against_the_presets() -> None:
    doubled = resolve(RunRequest(task="bendr", dataset="eye_state", values={"training.batch_size": 16}))
    request = plan_request(doubled.training)
    assert (request.requested_batch, request.preset_batch) == (64, 32)


def line(*more: str) -> tuple[str, ...]:
    return ("--task", "bendr", "--dataset", "synthetic", *TINY, *more)


def trained(folder: Path, *more: str) -> Path:
    """The run folder of a training of the simulated recordings."""
    place = ("--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state"))
    assert main([*line(*more), *place]) == 0
    return only_run(folder)


@pytest.mark.slow
def test_a_schedule_counts_optimizer_steps_and_the_rate_grows_with_the_root_of_the_batch(tmp_path: Path) -> None:
    run = trained(tmp_path, "--epochs", "2", "--batch-size", "16", "--gradient-accumulation-steps", "2", "--device",
                  "cpu", "--set", "training.lr_scale=sqrt", "--set", "training.warmup_share=0")  # fmt: skip
    result = json.loads((run / "result.json").read_text())
    windows = result["plan"]["plan"]
    assert (windows["logical_batch"], windows["lr_factor"]) == (32, pytest.approx(math.sqrt(32 / 16)))
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    rates, highest = [found["lr"] for found in lines if found.get("lr") is not None], 1e-3 * math.sqrt(2)
    assert result["steps"] == 2 * windows["steps_per_epoch"]
    assert max(rates) <= highest * (1 + 1e-9)
    assert rates[-1] < 0.3 * highest, "a schedule of loader batches would be at its half"


@pytest.mark.slow
def test_a_classifier_that_is_killed_ends_with_the_same_weights_from_a_pretrained_run(tmp_path: Path) -> None:
    finish(tmp_path / "first", tmp_path / "state", *line("--epochs", "1", "--device", "cpu"))
    words = line("--mode", "classify", "--pretrained", str(only_run(tmp_path / "first")), "--epochs", "4",
                 "--checkpoint-every", "2", "--device", "cpu")  # fmt: skip
    finish(tmp_path / "whole", tmp_path / "state", *words)
    finish_killed(tmp_path / "cut", tmp_path / "state", words, at=(2, 6))
    assert_ends_like(only_run(tmp_path / "cut"), only_run(tmp_path / "whole"))
    scores = json.loads((only_run(tmp_path / "whole") / "result.json").read_text())
    assert "logistic regression on band powers" in json.dumps(scores)


@pytest.mark.slow
def test_a_balanced_fold_that_is_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    balanced = ("dataset.subject=file", "dataset.synthetic.recordings=3", "dataset.folds=3", "dataset.fold=1",
                "dataset.balance=undersample")  # fmt: skip
    words = line("--mode", "classify", "--epochs", "4", "--checkpoint-every", "2", "--device", "cpu",
                 *(word for text in balanced for word in ("--set", text)))  # fmt: skip
    finish(tmp_path / "whole", tmp_path / "state", *words)
    finish_killed(tmp_path / "cut", tmp_path / "state", words, at=(2, 6))
    assert_ends_like(only_run(tmp_path / "cut"), only_run(tmp_path / "whole"))
