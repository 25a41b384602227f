"""`can-train pipeline` on this machine, as a person meets it: real trainings, real signals."""

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from can_train.cli.main import main
from can_train.io.units import shortened
from fakes.finished_runs import Shelf
from fakes.processes import TIMEOUT_S, Command

LINE = ("pipeline", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5", "--no-baselines", "--device",
        "cpu", "--min-steps-per-epoch", "3")  # fmt: skip
SMALL = ("--set", "autoencoder:model.hidden=[8]")


pytestmark = pytest.mark.usefixtures("data_prepared_once")


@dataclass(frozen=True)
class Pipeline:
    """Calls `can-train pipeline` with folders of its own."""

    folder: Path
    python: Path  # that the stages are started with

    def start(self, *arguments: str) -> Command:
        return Command(*LINE, *Shelf(self.folder).flags, *arguments, python=self.python)

    def __call__(self, *arguments: str, code: int = 0) -> tuple[list[dict[str, Any]], str]:
        """Runs a pipeline to its end; returns its JSON, and what it said beside."""
        with self.start(*arguments, "--json") as process:
            assert process.wait() == code, process.stderr
            out, err = process.stdout, process.stderr
        found: list[dict[str, Any]] = json.loads(out) if out else []
        return found, err


@pytest.fixture
def pipeline(tmp_path: Path, warm_python: Path) -> Pipeline:
    return Pipeline(tmp_path, warm_python)


@pytest.mark.slow
def test_stages_are_trained_one_after_another_and_then_used_again(pipeline: Pipeline) -> None:
    arguments = ("--stages", "student,autoencoder", "--epochs", "1", *SMALL)
    first, said = pipeline(*arguments)
    assert [each["stage"] for each in first] == ["autoencoder", "student"]
    assert [each["state"] for each in first] == ["finished", "finished"]
    assert all(each["epochs"] == 1 and each["seconds"] > 0 and len(each["mcc"]) == 6 for each in first)
    assert "stage 2 of 2: student (gat student): new, run " in said
    again, said = pipeline(*arguments)
    assert [each["run_id"] for each in again] == [each["run_id"] for each in first]
    assert said.count(": reused, run ") == 2
    with pipeline.start(*arguments, "--show") as shown:
        assert shown.wait() == 0, shown.stderr
        out = shown.stdout
    assert "test_01: test_01_known_vehicle_known_attack" in out
    assert all(f"{each['parameters']:,}" in out for each in first)


@pytest.mark.slow
def test_ctrl_c_stops_the_stage_at_work_and_the_same_line_goes_on(tmp_path: Path, pipeline: Pipeline) -> None:
    arguments = ("--stages", "autoencoder,student", "--epochs", "3", *SMALL,
                 "--set", "autoencoder:training.checkpoint_every=1")  # fmt: skip
    with pipeline.start(*arguments) as process:
        limit = time.monotonic() + TIMEOUT_S
        while not (begun := [*tmp_path.glob("runs/*/checkpoints/manifest.json")]):
            assert time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT, process.stderr
        err = process.stderr
    assert "Stopped in stage autoencoder. The same line again goes on from there." in err
    run = begun[0].parents[1]
    assert not (run / "result.json").exists()
    found, said = pipeline(*arguments)
    assert f"stage 1 of 2: autoencoder (vgae teacher): goes on, run {run.name}" in said
    assert found[0]["run_id"] == run.name
    assert len([*(run / "attempts").glob("*-ended.json")]) == 2


@pytest.mark.slow
def test_a_stage_that_fails_stops_those_that_build_on_it_and_no_others(pipeline: Pipeline) -> None:
    stages = ("--stages", "autoencoder,curriculum,student", "--epochs", "1")
    found, said = pipeline(*stages, *SMALL, "--set", "autoencoder:training.lr=1e30", code=3)
    assert {each["stage"]: each["told"] for each in found} == {
        "autoencoder": "failed",
        "curriculum": "not trained: it builds on autoencoder",
        "student": None,
    }
    assert "The loss is no longer finite" in said
    assert said.endswith(
        "error: Some stages have not finished: autoencoder, curriculum.\n"
        "Their errors are above; the same line again goes on from there.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dataset", ""), "--dataset is empty"),
        (("--stages", "curiculum"), "Nearest of 7: curriculum"),
        (("--preset", "standart"), "Valid, nearest first: standard"),
        (("--set", "nrmal:training.lr=1"), "Nearest of 7: normal"),
        (("--set", "student:model.hiden=1"), "Stage student. Unknown setting: 'model.hiden'"),
        (("--set", "training.seed=1,2"), "A stage cannot be a sweep"),
        (("--epochs", "0"), "Stage autoencoder. --epochs must be at least 1"),
        (("--mem", "3G"), "Add --submit"),
        (("--submit", "--cluster", "local"), "Stages can only be submitted to SLURM"),
        (("--stages", ","), "Stages: autoencoder, normal,"),
        (("--submit",), "or leave out --submit"),
        (("--submit", "--cluster", "debug"), "the stages then train here, one after another"),
        (("--dataset", "hcrl_ch"), "hcrl_ch is not below the data root"),
        (("--dataset", "hcrl_ch", "--force"), "hcrl_ch is not below the data root"),
        (("--stages", "fusion"), "can-train --model vgae --dataset synthetic --mode autoencoder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert main((*LINE, *Shelf(tmp_path).flags, "--data-root", str(tmp_path / "data"), *arguments)) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main((*LINE, *Shelf(tmp_path).flags, "--dry-run", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["stage"] for each in found] == [
        "autoencoder", "normal", "curriculum", "student", "student_no_identity", "knowledge_distillation", "fusion",
    ]  # fmt: skip
    assert {each["what"] for each in found} == {"new"}
    assert found[5]["stages_built_on"] == {"teacher": "curriculum", "without_teacher": "student"}
    assert main((*LINE, *Shelf(tmp_path).flags, "--dry-run")) == 0
    assert "teacher: curriculum, without teacher: student" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_help_fits_a_terminal_and_names_stages_settings_and_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("pipeline", "--help")) == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--stages", "--epochs", "--partition", "--show", "STAGE"))
    assert max(map(len, text.splitlines())) <= 80


def test_names_are_shortened_only_where_they_stay_apart() -> None:
    assert shortened(["test_01_dos", "test_02_gear"]) == {"test_01_dos": "test_01", "test_02_gear": "test_02"}
    assert shortened(["test_01_a", "test_01_b"]) == {"test_01_a": "test_01_a", "test_01_b": "test_01_b"}
    assert shortened(["drive_one"]) == {"drive_one": "drive_one"}
    assert shortened([]) == {}
