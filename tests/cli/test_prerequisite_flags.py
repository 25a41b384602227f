"""`--teacher` and its like as a person meets them: before anything is planned, trained or submitted."""

from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.resolved import plain_from_yaml
from can_train.runs.registry import Registry
from fakes.finished_runs import Shelf

DISTILL = ("--model", "gat", "--size", "student", "--mode", "knowledge_distillation", "--dataset", "synthetic")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_help_has_a_flag_for_each_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("--help-all",)) == 0
    text = capsys.readouterr().out
    assert all(f"--{role} RUN" in text for role in ("teacher", "autoencoder", "classifier", "without-teacher"))


@pytest.mark.parametrize(
    "way", [("--teacher", "some-run"), ("--set", "mode.teacher=some-run"), ("--model-args", "teacher=some-run")]
)
def test_a_role_that_a_mode_does_not_have_is_an_error_that_names_those_that_do(
    capsys: pytest.CaptureFixture[str], way: tuple[str, str]
) -> None:
    text = said(capsys, "--model", "gat", "--dataset", "synthetic", *way)
    if way[0] == "--model-args":
        assert "Unknown name in --model-args: 'teacher'" in text
    else:
        assert "Modes that do: knowledge_distillation of gat, knowledge_distillation of vgae" in text


@pytest.mark.parametrize("what", [(), ("--dry-run",), ("--submit", "--cluster", "local")])
def test_a_missing_run_is_said_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, what: tuple[str, ...]
) -> None:
    shelf = Shelf(tmp_path)
    text = said(capsys, *DISTILL, *shelf.flags, "--data-root", "data", "--epochs", "1", *what)
    command = "can-train --model gat --dataset synthetic --mode normal --size teacher"
    assert f"\n  {command} --runs-dir {tmp_path}/runs --data-root data --state-dir {tmp_path}/state\n" in text
    assert list(tmp_path.iterdir()) == []


def test_the_same_run_given_twice_is_one_and_two_are_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "mode.teacher is given twice" in said(capsys, *DISTILL, "--teacher", "a", "--set", "mode.teacher=b")
    assert "There is no such run: 'a'" in said(
        capsys, *DISTILL, *Shelf(tmp_path).flags, "--teacher", "a", "--set", "mode.teacher=a"
    )


def test_a_resubmission_may_build_on_another_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    teacher = shelf.put(1, shelf.resolved("gat", "normal"))
    run = shelf.put(2, shelf.resolved("gat", "knowledge_distillation", "student"))
    vgae = shelf.put(3, shelf.resolved("vgae", "autoencoder"))
    text = said(capsys, "resubmit", run.run_id, "--set", f"mode.teacher={vgae.run_id}", *shelf.flags)
    assert "model is vgae, not gat" in text
    assert len(Registry(tmp_path / "state").runs()) == 3
    assert plain_from_yaml((teacher.path / "config.yaml").read_text())["mode"]["name"] == "normal"
