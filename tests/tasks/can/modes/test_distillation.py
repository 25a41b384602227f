"""Knowledge distillation from end to end: a student learns from a teacher wherever its answers come from, is killed and
goes on, takes what was predicted, and is judged beside its teacher.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import FinishedModel
from can_train.reporter import SilentReporter
from can_train_tasks.can.task import make_task
from fakes.bitwise import assert_ends_like
from fakes.killed_runs import finish, finish_killed, only_run
from fakes.random_bus import random_frames, write_log

DATA = ("--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5", "--no-baselines")
MODELS = {"gat": "hidden=8,layers=2,heads=2", "vgae": "hidden=[32,16],latent=8"}
"""Of each model the settings of a small teacher."""


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one finished teacher of each model."""
    folder = tmp_path_factory.mktemp("teachers")
    for model, small in MODELS.items():
        finish(
            folder / model, folder / "state", "--model", model, "--size", "teacher", *DATA, "--model-args", small,
            "--epochs", "1", "--device", "cpu",
        )  # fmt: skip
    return folder


def student(teachers: Path, model: str, *more: str) -> tuple[str, ...]:
    teacher = str(only_run(teachers / model))
    chosen = ("--model", model, "--mode", "knowledge_distillation", "--size", "student", "--teacher", teacher)
    return (*chosen, *DATA, *more)


def placed(way: str) -> tuple[str, str]:
    return ("--set", f"mode.teacher_placement={way}")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "way"), [("gat", "device"), ("vgae", "cache")])
def test_a_student_that_is_killed_ends_with_the_same_weights(
    tmp_path: Path, teachers: Path, model: str, way: str
) -> None:
    words = student(teachers, model, *placed(way), "--epochs", "2", "--checkpoint-every", "4", "--device", "cpu",
                    "--batch-size", "32")  # fmt: skip
    finish(tmp_path / "whole", teachers / "state", *words)
    finish_killed(tmp_path / "cut", teachers / "state", words, at=(4, 16))
    assert_ends_like(only_run(tmp_path / "cut"), only_run(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("gat", "device"),
        ("gat", "offload"),
        ("vgae", "device"),
        ("vgae", "cache"),
    ],
)
def test_the_peak_of_a_student_is_predicted_teacher_and_cache_included(
    tmp_path: Path, teachers: Path, model: str, way: str
) -> None:
    more = ("--epochs", "1", "--device", "sim:1GiB", "--batch-size", "300")
    finish(tmp_path, teachers / "state", *student(teachers, model, *placed(way), *more))
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert result["micro_batch_size"] == 300
    assert result["peak_memory_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.03)
    assert result["reference_models"][0]["placement"] == way


@pytest.mark.slow
def test_a_student_is_compared_with_its_teacher_and_itself_without_one(
    tmp_path: Path, teachers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ("--model", "gat", "--size", "student", *DATA, "--epochs", "1", "--device", "cpu")
    finish(tmp_path / "alone", teachers / "state", *alone)
    words = student(teachers, "gat", "--without-teacher", str(only_run(tmp_path / "alone")), "--epochs", "1")
    said = finish(tmp_path / "taught", teachers / "state", *words, "--device", "sim:256MiB", "-v")
    assert all(f"    {way} " in said for way in ("device", "cache", "offload"))
    run = only_run(tmp_path / "taught")
    judgement = json.loads((run / "result.json").read_text())["judgement"]
    assert list(judgement["compared"]) == ["model", "teacher", "without_teacher"]
    assert all(told["windows_per_second"] > 0 for told in judgement["compared"].values())
    assert judgement["compared"]["model"]["parameters"] == judgement["compared"]["without_teacher"]["parameters"]
    assert_judged_like(judgement, "teacher", only_run(teachers / "gat"))
    assert_judged_like(judgement, "without_teacher", only_run(tmp_path / "alone"))
    assert main(["evaluate", str(run), "-v", "--device", "cpu", "--state-dir", str(teachers / "state")]) == 0
    out = capsys.readouterr().out
    assert "test_06_masquerade" in out
    named = [line.split()[0] for line in out.splitlines() if line.strip()]
    # Each in both tables of all folders, and in that of sizes and speeds.
    assert {named.count(name) for name in judgement["compared"]} == {2 * len(judgement["test"]) + 1}


@pytest.mark.parametrize("model", ["gat", "vgae"])
def test_a_teacher_computes_with_the_inputs_of_its_student_if_both_have_the_same_statistics(
    tmp_path: Path, model: str
) -> None:
    log = write_log(tmp_path / "drive.csv", random_frames(20 * 150))

    def task_in(mode: str | None, **finished: FinishedModel) -> Any:
        values = {"dataset.window": 20, "dataset.stride": 20, "mode.baselines": False}
        run = resolve(RunRequest(model=model, mode=mode, size="student", dataset=str(log), values=values))
        return make_task(run, finished, tmp_path, tmp_path / "cache", SilentReporter())

    plain = task_in(None)
    weights = plain.build_model().state_dict()
    teacher = FinishedModel(run_id="teacher", run=plain._run, weights=weights, result={}, sha256="0")
    other = replace(teacher, weights={**weights, "inputs.node_mean": weights["inputs.node_mean"] + 1})
    for finished, shares in ((teacher, True), (other, False)):
        task = task_in("knowledge_distillation", teacher=finished)
        (reference,) = task.reference_models()
        arguments = (reference.model, task.train_rows[:9], torch.device("cpu"), torch.float32)
        before = reference.outputs(*arguments)
        task.build_model()
        assert (reference._prepared is not None) == shares
        after = reference.outputs(*arguments)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def assert_judged_like(judgement: Any, name: str, run: Path) -> None:
    """Beside the student a model is what it was when its own run judged it."""
    own = json.loads((run / "result.json").read_text())["judgement"]["test"]
    for folder, judged in judgement["test"].items():
        assert judged["references"][name]["roc_auc"] == pytest.approx(own[folder]["model"]["roc_auc"], abs=1e-6)
