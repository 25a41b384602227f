"""`can-train show`: a run as a whole, finished, interrupted, and damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from can_train.cli.main import main
from can_train.config.compose import changed_settings
from fakes.databases import TRUCK_DBC
from fakes.finished_runs import Shelf
from fakes.trained_runs import finished_run


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    # No SLURM, whichever this machine may have.
    monkeypatch.setenv("PATH", str(tmp_path))
    return Shelf(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(("show", *line)) == 0
    return capsys.readouterr().out


def test_the_settings_that_differ_from_the_presets_are_shown_with_the_default(shelf: Shelf) -> None:
    preset = shelf.resolved("gat", "normal")
    assert changed_settings(preset.config) == {}
    other = shelf.resolved("gat", "normal", sets=("training.lr=0.5", "dataset.synthetic.seconds=5"), device="cpu")
    assert changed_settings(other.config) == {
        "training.lr": {"value": 0.5, "default": preset.training.lr},
        "dataset.synthetic.seconds": {"value": 5.0, "default": 0.0},
    }


def test_a_setting_with_the_content_of_a_file_is_cut_where_it_is_shown(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "truck.dbc").write_text(TRUCK_DBC)
    sets = (f"dataset.dbc={tmp_path / 'truck.dbc'}",)
    runs = [shelf.put(number, shelf.resolved("gat", "normal", sets=each)) for number, each in enumerate(((), sets))]
    lines = shown(capsys, str(runs[1].path), *shelf.flags).splitlines()
    assert [line.split() for line in lines if "dataset.dbc" in line] == [
        ["dataset.dbc", "truck.dbc;zlib,eNrNk0tv2…", "(default:", "none)"]
    ]
    assert main(("compare", *(str(run.path) for run in runs), *shelf.flags)) == 0
    printed = capsys.readouterr().out
    assert "truck.dbc;zlib,eNrNk0tv2…" in printed
    assert max(map(len, printed.splitlines())) < 200


def test_the_folder_of_a_run_that_another_one_builds_on_is_a_setting_that_differs(shelf: Shelf) -> None:
    teacher = shelf.put(1, shelf.resolved("gat", "normal"))
    values = {"mode.teacher": str(teacher.path)}
    run = shelf.resolved("gat", "knowledge_distillation", "student", values=values)
    changed = changed_settings(run.config)
    assert changed is not None
    assert changed["mode.teacher"] == {"value": str(teacher.path), "default": ""}


@pytest.mark.parametrize("config", [{}, {"task": "no"}, {"task": "can", "model_name": "no", "mode": []}])
def test_a_run_of_another_version_has_settings_that_cannot_be_compared(config: dict[str, Any]) -> None:
    assert changed_settings(config) is None


def test_a_run_that_was_interrupted_is_shown_with_the_line_that_continues_it(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shelf.put(1, shelf.resolved("gat", "normal", sets=("training.lr=0.5",)), None)
    lines = [{"step": 10 * epoch, "epoch": epoch, "micro_batches": 20, "micro_batch_size": 7, "ooms_rescued": 1,
              "peak_memory_pct": epoch / 4} for epoch in (1, 2)]  # fmt: skip
    folder.metrics_path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 2')
    text = shown(capsys, "last", *shelf.flags)
    assert f"run     {folder.run_id}\n" in text
    assert "  peak           50.0% of what is usable\n" in text
    assert "  micro-batches  2 a step on average, of up to 7 samples\n" in text
    assert "  rescues        2 (" in text
    assert "  training.lr  0.5  (default: 0.001)\n" in text
    assert f"  can-train resume {folder.path}\n" in text
    facts = json.loads(shown(capsys, "last", "--json", *shelf.flags))
    assert facts["memory"]["micro_batches_per_step"] == 2.0
    assert facts["changed_settings"]["training.lr"]["value"] == 0.5
    assert (facts["scores"], facts["plan"]) == (None, None)


def test_the_memory_of_a_run_that_ended_within_an_epoch_is_that_of_its_steps_too(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shelf.put(1, shelf.resolved("gat", "normal"), None)
    epoch = {"step": 10, "epoch": 1, "micro_batches": 10, "micro_batch_size": 7, "ooms_rescued": 1,
             "peak_memory_pct": 0.25}  # fmt: skip
    step = {"step": 10, "steps": 1, "loss": 1.0, "allocated_bytes": 90, "reserved_bytes": 99, "micro_batches": 4,
            "micro_batch_size": 5, "ooms_rescued": 1}  # fmt: skip
    limits = {"from_step": 1, "device": "gpu", "capacity_bytes": 100, "safe_bytes": None, "predicted_bytes": None}
    steps = [limits, step, {**step, "step": 12, "steps": 2, "allocated_bytes": 50, "ooms_rescued": 2}]
    (folder.path / "steps.jsonl").write_text("\n".join(map(json.dumps, steps)) + '\n{"step": 13')
    facts = json.loads(shown(capsys, "last", "--json", *shelf.flags))["memory"]
    assert (facts["rescues"], facts["peak_share"], facts["micro_batches_per_step"]) == (3, 0.9, 1.0)
    folder.metrics_path.write_text(json.dumps(epoch))
    facts = json.loads(shown(capsys, "last", "--json", *shelf.flags))["memory"]
    assert (facts["rescues"], facts["peak_share"], facts["largest_micro_batch"]) == (3, 0.5, 7)
    assert facts["micro_batches_per_step"] == (10 + 8) / 12


def test_the_memory_of_a_run_is_that_of_all_its_attempts(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    last = {"peak_memory_bytes": 2**20, "peak_memory_pct": 0.125, "micro_batch_size": 3, "ooms_rescued": 1}
    folder = shelf.put(1, shelf.resolved("gat", "normal"), last)
    first = {"step": 10, "epoch": 1, "micro_batches": 20, "micro_batch_size": 7, "ooms_rescued": 2,
             "peak_memory_pct": 0.5}  # fmt: skip
    lines = [first, {**first, "step": 20, "epoch": 2, "ooms_rescued": 0, "peak_memory_pct": 0.125}]
    folder.metrics_path.write_text("\n".join(map(json.dumps, lines)))
    facts = json.loads(shown(capsys, "last", "--json", *shelf.flags))["memory"]
    assert (facts["peak_share"], facts["peak_bytes"]) == (0.5, None)
    assert (facts["largest_micro_batch"], facts["rescues"]) == (7, 2)


def test_the_peak_of_the_last_attempt_is_known_though_metrics_have_it_rounded(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {"peak_memory_bytes": 2**20, "peak_memory_pct": 0.1234567}
    folder = shelf.put(1, shelf.resolved("gat", "normal"), last)
    folder.metrics_path.write_text(json.dumps({"step": 10, "epoch": 1, "peak_memory_pct": 0.12346}))
    facts = json.loads(shown(capsys, "last", "--json", *shelf.flags))["memory"]
    assert (facts["peak_share"], facts["peak_bytes"]) == (0.1234567, 2**20)


@pytest.mark.parametrize("name", ["plan.json", "memory_parts.json", "metrics.jsonl", "result.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"plan": {}}', '{"judgement": {"test": 1}}', "\x00"])
def test_a_damaged_file_keeps_no_run_from_being_shown(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    folder = shelf.put(1, shelf.resolved("gat", "normal"), None)
    (folder.path / name).write_text(text)
    assert folder.run_id in shown(capsys, "last", *shelf.flags)
    assert json.loads(shown(capsys, "last", "--json", *shelf.flags))["run_id"] == folder.run_id


@pytest.mark.parametrize("odd", ["x", [1], {"a": 1}, True, float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_not_known(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], odd: object
) -> None:
    names = (
        "peak_memory_bytes",
        "peak_memory_pct",
        "predicted_peak_bytes",
        "micro_batch_size",
        "ooms_rescued",
        "parameters",
    )
    damaged, whole = (shelf.put(n, shelf.resolved("gat", "normal"), {"status": "finished"} | extra)
                      for n, extra in ((1, dict.fromkeys(names, odd)), (2, {})))  # fmt: skip
    epoch = dict.fromkeys(("step", "micro_batches", "peak_memory_pct", "micro_batch_size", "ooms_rescued"), odd)
    damaged.metrics_path.write_text(json.dumps(epoch))
    memory = json.loads(shown(capsys, damaged.run_id, "--json", *shelf.flags))["memory"]
    assert {*memory.values()} <= {None, 0}
    assert main(("compare", damaged.run_id, whole.run_id, *shelf.flags)) == 0


@pytest.mark.slow
def test_a_finished_run_is_shown_with_scores_plan_memory_and_the_next_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = finished_run("gat")
    places = ("--state-dir", str(run.parents[1] / "state"))
    text = shown(capsys, str(run), *places)
    assert "state   finished: best validation loss" in text
    assert "recall by kind" in text
    parts = [line for line in text.splitlines() if line in ("Plan", "Memory", "To go on")]
    assert parts == ["Plan", "Memory", "To go on"]
    assert "  dataset.window" in text
    assert f"  can-train evaluate {run} --dataset path/to/data\n" in text
    facts = json.loads(shown(capsys, str(run), "--json", *places))
    assert facts["scores"]["test"]
    assert facts["plan"]["plan"]["logical_batch"] > 0
    assert facts["memory"]["peak_bytes"] == json.loads((run / "result.json").read_text())["peak_memory_bytes"]
