"""What `resume` changes of a run (more epochs, another device, a log that moved), and what it refuses."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from can_train.cli.main import main
from can_train.runs.run_folder import RunFolder, name_to_type
from can_train.training.train import make_session
from fakes.line_fit import fixed, line_parts, train_line
from fakes.own_tasks import CLASSIFIER
from fakes.trained_runs import bus_log, finished_run, own_log

SLOW = """

class Timed(MyTask):
    def before_step(self, model, rows, progress, generator):
        import time

        time.sleep(0.03)
"""
LEVEL = {"scheduler": "constant", "warmup_share": 0.0, "micro_batch_size": 8}


def lengthen(folder: Path, epochs: int) -> None:
    """Does what `resume --epochs` does before training goes on."""
    run = RunFolder(next((folder / "runs").iterdir()))
    step = json.loads((run.checkpoints_path / "manifest.json").read_text())["checkpoints"][0]["step"]
    config = run.config()
    before = config["training"]["epochs"]
    config["training"]["epochs"] = epochs
    run.change(config, {"training.epochs": {"before": before, "after": epochs}}, step=step)


@pytest.mark.parametrize("changes", [LEVEL, {**LEVEL, "optimizer": "sgd"}])
def test_a_run_with_a_level_rate_goes_on_for_longer_as_if_it_had_been_that_long_from_the_start(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    train_line(tmp_path / "short", epochs=2, **changes)
    lengthen(tmp_path / "short", 4)
    longer = train_line(tmp_path / "short", epochs=4, **changes)
    fresh = train_line(tmp_path / "fresh", epochs=4, **changes)
    assert (longer.progress.epoch, longer.progress.step) == (4, fresh.progress.step)
    for mine, theirs in zip(longer.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_from_there_on_the_learning_rate_is_that_of_a_run_of_the_new_length(tmp_path: Path) -> None:
    train_line(tmp_path / "short", epochs=2, micro_batch_size=8)
    lengthen(tmp_path / "short", 4)
    train_line(tmp_path / "fresh", epochs=4, micro_batch_size=8)
    (metrics,) = (tmp_path / "fresh").glob("runs/*/metrics.jsonl")
    rates = [lr for line in metrics.read_text().splitlines() if (lr := json.loads(line).get("lr")) is not None]
    longer = make_session(line_parts(tmp_path / "short", epochs=4, micro_batch_size=8), fixed(0.5))
    assert longer.engine.optimization.lr == rates[1] > 0


def test_a_run_that_stopped_for_want_of_a_better_loss_goes_on_if_that_is_asked_for(tmp_path: Path) -> None:
    stopped = train_line(tmp_path, epochs=9, patience=1, lr=1e-12, micro_batch_size=8)
    done = stopped.progress.epoch
    assert done < 9
    assert train_line(tmp_path, epochs=9, patience=1, lr=1e-12, micro_batch_size=8).progress.epoch == done
    lengthen(tmp_path, 9)
    assert train_line(tmp_path, epochs=9, patience=1, lr=1e-12, micro_batch_size=8).progress.epoch > done


def test_what_another_device_ran_out_of_memory_at_limits_nothing_here(tmp_path: Path) -> None:
    batcher = make_session(line_parts(tmp_path, micro_batch_size=8), fixed(0.5)).engine.batcher
    state = batcher.state_dict()
    state = {**state, "ooms_rescued": 3, "backoff": {**state["backoff"], "limit": 5.0}}
    for same_device, limit in ((True, 5.0), (False, math.inf)):
        batcher.load_state_dict(state, same_device=same_device)
        assert batcher.state_dict()["backoff"]["limit"] == limit
        assert batcher.state_dict()["ooms_rescued"] == 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of a finished run of one epoch, and of its log."""
    source = finished_run("gat")
    shutil.copy(own_log(source), tmp_path)
    return shutil.copytree(source, tmp_path / "runs" / source.name)


def resumed(run: Path, *flags: str) -> int:
    places = ("--runs-dir", str(run.parent), "--state-dir", str(run.parents[1] / "state"))
    return main(("resume", str(run), *flags, *places))


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.mark.slow
def test_a_finished_run_goes_on_on_another_device_with_a_log_that_moved(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = (run.parents[1] / "drive.csv").rename(run.parents[1] / "elsewhere.csv")
    before = json.loads((run / "plan.json").read_text())
    assert resumed(run, "--epochs", "2", "--device", "sim:64MiB", "--dataset", str(log), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [shown[name] for name in ("state", "epoch", "device", "dataset", "dataset_path")] == [
        "finished", 2, "sim-64mib", "drive", str(log),
    ]  # fmt: skip
    after = shown["plan"]
    assert after["plan"]["logical_batch"] == before["plan"]["logical_batch"]
    assert after["limits"]["device_key"] == "sim-64mib"
    (change,) = shown["changes"]
    assert change["settings"]["training.epochs"] == {"before": 1, "after": 2}
    assert change["settings"]["device"] == {"before": "cpu", "after": "sim:64MiB"}
    kept = run / f"result-at-step-{change['step']}.json"
    assert json.loads(kept.read_text())["epochs"] == 1
    assert main(("status", str(run))) == 0
    assert "training.epochs 1 → 2" in capsys.readouterr().out
    # Again there is nothing to do.
    was = contents(run)
    assert resumed(run, "--epochs", "2") == 0
    assert contents(run) == was


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--epochs", "0"), "--epochs must be at least 1"),
        (("--epochs", "three"), "--epochs must be a whole number: 'three'"),
        (("--epochs", ""), "--epochs is empty"),
        (("--device", "cpu"), "trains on no device"),
        (("--device", "gpu", "--epochs", "2"), "Unknown device"),
        (("--device", "sim:much", "--epochs", "2"), "sim:"),
        (("--dataset", "nowhere.csv"), "names no file or folder that exists"),
        (("--dataset", "OTHER", "--epochs", "2"), "A run goes on with the data that it began with"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused_and_nothing_is_lost(
    run: Path, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = bus_log(run.parents[1] / "other.csv", seed=1)
    was = contents(run)
    assert resumed(run, *(str(other) if flag == "OTHER" else flag for flag in flags)) == 2
    assert message in capsys.readouterr().err
    assert contents(run) == was


def test_a_run_whose_time_was_up_goes_on_with_more_time_by_the_schedule_that_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "timed.py"
    module.write_text(f"{CLASSIFIER.replace('WIDTH', '4').replace('from helpers import 4', '')}{SLOW}")
    state = ("--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state"))
    line = ("--task", f"{module}:Timed", "--device", "cpu", "--epochs", "9", "--max-time", "0.5s", *state)
    assert main(line) == 0
    run = next((tmp_path / "runs").iterdir())
    cut = json.loads((run / "result.json").read_text())
    assert cut["time_is_up"]
    assert cut["steps"] < 63
    was = contents(run)
    for flags in (("--epochs", "20"), ("--max-time", "0.1s")):
        assert resumed(run, *flags) == 2
        assert "time of training is up: 0.5s" in capsys.readouterr().err
        assert contents(run) == was
    assert resumed(run) == 0
    assert f"can-train resume {name_to_type(RunFolder(run))} --max-time 0:01:00" in capsys.readouterr().err
    assert resumed(run, "--max-time", "9min") == 0
    said = capsys.readouterr().err
    assert "training.max_time is 9min from here on, in place of 0.5s" in said
    assert "learning rate" not in said
    result = json.loads((run / "result.json").read_text())
    assert (result["epochs"], result["steps"], result["time_is_up"]) == (9, 63, False)
    assert (run / f"result-at-step-{cut['steps']}.json").is_file()
    assert resumed(run, "--max-time", "1h") == 2
    assert "was not ended by its time" in capsys.readouterr().err


def test_fewer_epochs_than_are_done_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_line(tmp_path, epochs=3, micro_batch_size=8)
    run = next((tmp_path / "runs").iterdir())
    was = contents(run)
    assert resumed(run, "--epochs", "2") == 2
    assert "--epochs 2, and 3 are done" in capsys.readouterr().err
    assert contents(run) == was


def test_a_run_whose_judgement_ran_out_of_memory_is_judged_by_the_line_that_evaluate_gives(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "result.json").unlink()
    places = ("--runs-dir", str(run.parent), "--state-dir", str(run.parents[1] / "state"))
    line = f"can-train resume {run}"
    for ending, remedy in (
        ("terminated", f"Finish it first: {line}."),
        ("gpu_oom", f"on the host: {line} --device cpu."),
    ):
        RunFolder(run).attempts.record_end(ending, "", {}, rank=0)
        assert main(("evaluate", str(run), *places)) != 0
        assert remedy in " ".join(capsys.readouterr().err.split())
    assert resumed(run, "--device", "cpu") == 0
    assert (run / "result.json").is_file()


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_device_that_has_no_room_for_the_run_leaves_the_run_as_it_was(
    tmp_path: Path, is_finished: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "wide.py"
    module.write_text(CLASSIFIER.replace("WIDTH", "4").replace("from helpers import 4", ""))
    state = ("--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state"))
    assert main(("--task", f"{module}:MyTask", "--device", "sim:32MiB", "--set", "task.hidden=40000", *state)) == 0
    run = next((tmp_path / "runs").iterdir())
    if not is_finished:
        (run / "result.json").unlink()
    was = contents(run)
    was.pop(log := str(run / "log.txt"))
    assert resumed(run, "--epochs", "4", "--device", "sim:1MiB") == 2
    assert "weights" in capsys.readouterr().err
    now = contents(run)
    now.pop(log)
    assert now == was
    assert resumed(run, "--epochs", "3") == 0
    assert len(RunFolder(run).changes()) == 1
    assert json.loads((run / "result.json").read_text())["epochs"] == 3
