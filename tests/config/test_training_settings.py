from typing import Any

import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError


@pytest.mark.parametrize(("text", "splits"), [("off", 1), ("0", 1), ("1", 1), ("2", 2), ("16", 16)])
def test_splits_are_a_number_or_off(text: str, splits: int) -> None:
    assert TrainingSettings(accumulation_splits=text).splits == splits


@pytest.mark.parametrize("text", ["1.5", "-2", "many", "0.5"])
def test_splits_that_are_no_number_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="accumulation_splits must be a"):
        TrainingSettings(accumulation_splits=text)


def test_a_threshold_for_splitting_and_steps_that_multiply_the_batch_are_refused_with_both_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"multiplies the batch.*gradient_accumulation_steps 2.*250000") as caught:
        TrainingSettings(accumulation_threshold=250_000, gradient_accumulation_steps=2)
    assert "--accumulation-splits 2 --gradient-accumulation-steps 1" in caught.value.remedy
    assert "--accumulation-threshold 0" in caught.value.remedy


@pytest.mark.parametrize(
    "flags",
    [
        ("--accumulation-muon-threshold", "250000", "--gradient-accumulation-steps", "2"),
        ("--memory", "muon", "--accumulate-grad-batches", "2"),
    ],
)
def test_so_they_are_on_a_line(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "gat", "--dataset", "synthetic", "--dry-run", *flags]) == 2
    assert "cannot be combined" in " ".join(capsys.readouterr().err.split())


def resolved(**training: Any) -> TrainingSettings:
    values = {f"training.{name}": value for name, value in ({"batch_size": 64} | training).items()}
    return resolve(RunRequest(model="gat", dataset="synthetic", values=values, memory="muon")).training


def test_both_ways_out_are_open() -> None:
    assert resolved(accumulation_splits="2", gradient_accumulation_steps=1).splits == 2
    assert resolved(accumulation_threshold=0, gradient_accumulation_steps=2).gradient_accumulation_steps == 2


def test_the_muon_preset_splits_a_batch_and_does_not_multiply_it() -> None:
    training = resolved()
    assert (training.gradient_accumulation_steps, training.splits, training.accumulation_threshold) == (1, 2, 250_000)
    assert (training.preflight_units, training.cuda_empty_cache_interval) == (350_000, 500)
    assert training.free_threshold_mib == 1536
