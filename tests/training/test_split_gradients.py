"""`doctor --gradients`: on a person's own model and data, splits keep the gradient; where they do not, it is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from can_train.cli.main import main
from can_train.training import split_gradients
from can_train.training.loading import fresh_model
from can_train.training.split_gradients import ROUNDING, Difference, GradientComparison, comparison_lines, splits

SMALL = ("--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5", "--size", "student", "--device", "cpu")
GAT = ("--model", "gat", "--model-args", "hidden=4,layers=1,heads=1")
EQUAL = GradientComparison(key="a_b", device="cpu", samples=8, batch_size=64, parameters=9, drops=True,
                           errors={(3, 5): Difference(2e-16, 0.0), (1,) * 8: Difference(4e-16, 1e-16)},
                           averaged={(3, 5): Difference(0.25, 0.0039), (1,) * 8: Difference(0.125, 0.0)})  # fmt: skip


def compared(capsys: pytest.CaptureFixture[str], state: Path, *line: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--gradients", *line, *SMALL, "--batch-size", "16", "--state-dir", str(state), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, found


@given(samples=st.integers(2, 300), accumulated=st.integers(1, 9))
def test_splits_cover_the_batch_and_some_are_uneven(samples: int, accumulated: int) -> None:
    found = splits(samples, accumulated)
    assert all(sum(sizes) == samples and min(sizes) >= 1 for sizes in found)
    assert samples < 4 or any(len(set(sizes)) > 1 for sizes in found)
    assert found[-1] == (1,) * samples


@pytest.mark.slow
@pytest.mark.parametrize("line", [GAT, ("--model", "vgae", "--set", "model.hidden=[8]")], ids=["gat", "vgae"])
def test_splits_of_ones_own_configuration_keep_the_gradient(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: tuple[str, ...]
) -> None:
    status, found = compared(capsys, tmp_path / "state", *line)
    assert (status, found["equal"], found["samples"]) == (0, True, 16)
    assert max(each["relative_error"] for each in found["errors"]) <= ROUNDING
    assert max(each["averaged_relative_error"] for each in found["errors"]) > 1e-3, (
        "the comparison would show a loop that divides by the number of parts"
    )
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_model_that_depends_on_its_batch_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def centred(*arguments: Any) -> nn.Module:
        model = fresh_model(*arguments)
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        last.register_forward_hook(lambda module, inputs, output: output - 0.5 * output.mean(dim=0))
        return model

    monkeypatch.setattr(split_gradients, "fresh_model", centred)
    status, found = compared(capsys, tmp_path, *GAT)
    assert (status, found["equal"]) == (2, False)
    assert "Samples depend on the rest of their batch" in found["reasons"][0]


def test_a_comparison_says_in_a_sentence_what_it_means() -> None:
    text = "\n".join(comparison_lines(EQUAL))
    assert "2, of 3, 5" in text
    assert "one batch of 8 samples (of the 64 that a step has)" in text
    assert "Split gradients equal the gradient of the whole batch" in text
    assert "off by up to 25.0% of it" in text
    assert "3.9e-03" in text, "the difference of the loss stands beside"
    assert max(map(len, text.splitlines())) <= 80
    other = replace(
        EQUAL, errors={(3, 5): Difference(0.034, 0.0)}, reasons=["Samples depend on each other through norm"]
    )
    text = "\n".join(comparison_lines(other))
    assert "do not equal" in text
    assert "up to 3.4% of its length" in text
    assert text.endswith("through norm.")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--gradients",), "--model is missing"),
        (("--gradients", "--model", "gat"), "--dataset is missing"),
        (("--model", "gat"), "Add --gradients"),
        (("--set", "training.lr=1"), "--set has no effect without --gradients"),
        (("--gradients", "--target-gpu", "t4"), "Leave one out"),
        (("--gradients", *GAT, *SMALL, "--batch-size", "1"), "one sample cannot be split"),
    ],
)
def test_a_line_that_is_wrong_is_said(capsys: pytest.CaptureFixture[str], line: tuple[str, ...], said: str) -> None:
    assert main(["doctor", *line]) == 2
    assert said in capsys.readouterr().err
