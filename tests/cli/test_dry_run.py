"""`--dry-run`: plans for the device here and for GPUs elsewhere, on real data, as text and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from can_train.cli.main import main
from can_train.errors import DOES_NOT_FIT
from can_train.factors.store import get_safety_factor_db
from can_train.memory.catalogue import GpuConstants, write_gpu_constants

KEY = "synthetic_gat_student_normal"
LINE = ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--dry-run")
GIB = 2**30


def planned(capsys: pytest.CaptureFixture[str], state: Path, *flags: str) -> dict[str, Any]:
    """Plans and returns the JSON."""
    assert main((*LINE, "--state-dir", str(state), "--json", *flags)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_names_every_figure_and_the_figures_add_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = planned(capsys, tmp_path, "--batch-size", "64", "--target-gpu", "h100-80gb")
    assert (found["config_key"], found["config"]["training"]["batch_size"]) == (KEY, 64)
    assert found["data"]["is_estimate"]
    assert found["data"]["num_train_samples"] > 1000
    (plan,) = found["plans"]
    target = plan["target"]
    assert target["capacity_bytes"] == target["total_bytes"] - sum(taken["bytes"] for taken in target["subtracted"])
    assert (target["key"], target["source"][:22]) == ("h100-80gb", "measured on 2026-11-24")
    assert (plan["fits"], plan["logical_batch"], plan["binding_limit"]) == (True, 64, "requested")
    data = plan["data"]
    assert (data["on_device"], data["reason"]) == (True, "micro-batches stay as large")
    assert 0 < data["num_bytes"] < plan["cost_model"]["base_bytes"]
    parts = plan["micro_batches"]
    assert (parts["fewest"], parts["most"], parts["largest_samples"]) == (1, 1, 64)
    assert 0 < parts["largest_cost_bytes"] < plan["safe_limit_bytes"]
    assert plan["safe_limit_bytes"] == pytest.approx(plan["safety_factor"] * plan["tuned_limit_bytes"], abs=1)
    low, high = plan["predicted_peak_interval_bytes"]
    assert low < plan["predicted_peak_bytes"] < high < target["capacity_bytes"]
    assert plan["cost_model"]["relative_error"] < 0.01
    assert set(plan["cost_model"]["bytes_per_unit"]) == {"nodes", "edges", "graphs"}


def test_the_allocators_settings_hold_for_the_plan_of_a_simulated_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync,per_process_memory_fraction:0.5")
    assert main((*LINE, "--state-dir", str(tmp_path), "--device", "sim:1GiB", "--json")) == 0
    shown = capsys.readouterr()
    (plan,) = json.loads(shown.out)["plans"]
    assert (plan["target"]["total_bytes"], plan["target"]["capacity_bytes"]) == (GIB, GIB // 2)
    assert "ignores these allocator settings: backend:cudaMallocAsync" in " ".join(shown.err.split())


def test_each_plan_of_a_sweep_stands_below_its_own_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = ("--set", "training.batch_size=32,64", "--target-gpu", "t4", "--state-dir", str(tmp_path))
    assert main((*LINE, *sweep)) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [f"Run {number} of 2: {KEY} training.batch_size={size}" for number, size in ((1, 32), (2, 64))]
    plans = [next(line for line in lines[lines.index(heading) :] if line.startswith("Plan: ")) for heading in headings]
    assert [plan.split()[1] for plan in plans] == ["32", "64"]


def test_several_targets_share_one_look_at_the_data_and_make_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gpus = ("--target-gpu", "v100-16gb,a100-40gb,h100-80gb", "--find-batch-size", "max")
    runs = ("--runs-dir", str(tmp_path / "r"), "--tracker", "tensorboard")
    # Other data than those of other tests, which this process may still have.
    data = ("--set", "dataset.synthetic.seed=7")
    assert main((*LINE, *data, *runs, "--state-dir", str(tmp_path / "s"), *gpus)) == 0
    shown = capsys.readouterr()
    rows = [
        line.split() for line in shown.out.splitlines() if line.startswith(("v100", "a100", "h100")) and "GiB" in line
    ]
    assert [row[0] for row in rows] == ["v100-16gb", "a100-40gb", "h100-80gb"]
    assert all(row[-1] == "min_steps" for row in rows)
    assert shown.err.count("simulating the synthetic data set") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_same_line_means_the_same_batch_on_every_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ("--target-gpu", "v100-16gb,h100-80gb", "--set", "training.min_steps_per_epoch=1")
    plans = planned(capsys, tmp_path, *line)["plans"]
    assert [plan["logical_batch"] for plan in plans] == [64, 64]
    assert {plan["lr_factor"] for plan in plans} == {1.0}
    held = [text for plan in plans for text in plan["warnings"] if "would hold about" in text]
    assert len(set(held)) == 2, "what each card would hold, and how to ask for it"


def test_memory_decides_on_a_small_gpu_and_what_was_learned_there_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--batch-size", "512", "--device", "sim:128MiB")
    (first,) = planned(capsys, tmp_path, *flags)["plans"]
    assert first["micro_batches"]["most"] > 1
    assert first["safety_factor_reason"].startswith("from the probes")
    get_safety_factor_db(tmp_path).pin(KEY, 0.4, "sim-128mib")
    (pinned,) = planned(capsys, tmp_path, *flags)["plans"]
    assert (pinned["safety_factor"], pinned["safety_factor_reason"][:13]) == (0.4, "pinned at 0.4")
    assert pinned["micro_batches"]["most"] > first["micro_batches"]["most"]


def test_a_training_that_does_not_fit_is_an_error_and_in_a_table_a_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = (*LINE, "--state-dir", str(tmp_path), "--model-args", "hidden=512,layers=1", "--fit", "split")
    assert main((*line, "--target-memory", "2400MiB")) == DOES_NOT_FIT
    said = capsys.readouterr()
    assert "must fit" in said.err
    assert "Traceback" not in said.err
    # The first line comes before anything is measured.
    assert said.out.startswith(f"{KEY}: ")
    assert "Plan:" not in said.out
    assert main((*line, "--target-memory", "2400MiB", "--target-gpu", "h100")) == 0
    assert "does not fit" in capsys.readouterr().out
    assert main((*line, "--target-gpu", "sim:1MiB,sim:2MiB", "--json")) == DOES_NOT_FIT
    said = capsys.readouterr()
    assert [plan["fits"] for plan in json.loads(said.out)["plans"]] == [False, False]
    assert "The training fits none of the devices: sim-1mib, sim-2mib" in said.err


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--accumulation-splits", "2"), 2),
        (("--set", "training.accumulation_splits=3"), 3),
        (("--memory", "muon"), 1),
        (("--memory", "muon", "--accumulation-threshold", "100"), 2),
    ],
)
def test_splits_leave_the_batch_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...], parts: int
) -> None:
    (plan,) = planned(capsys, tmp_path, "--batch-size", "64", "--target-gpu", "h100-80gb", *flags)["plans"]
    assert (plan["logical_batch"], plan["micro_batches"]["fewest"], plan["micro_batches"]["most"]) == (64, parts, parts)


def test_a_micro_batch_that_is_more_than_fits_is_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--batch-size", "512", "--micro-batch-size", "512", "--device", "sim:128MiB")
    (plan,) = planned(capsys, tmp_path, *flags)["plans"]
    (warning,) = [text for text in plan["warnings"] if "is predicted to need" in text]
    assert warning.startswith("micro_batch_size=512 is more than fits: one of 512 samples")
    assert plan["predicted_peak_bytes"] > plan["target"]["capacity_bytes"]


def test_what_gpu_check_measured_replaces_what_is_assumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = GpuConstants(
        key="t4-16gb", total_bytes=15 * GIB, outside_bytes=GIB // 2, workspace_bytes=GIB // 4,
        date="2026-01-31", driver="550.54", torch="2.6.0",
    )  # fmt: skip
    write_gpu_constants(tmp_path, measured)
    (plan,) = planned(capsys, tmp_path, "--target-gpu", "Tesla T4")["plans"]
    assert plan["target"]["capacity_bytes"] == 15 * GIB - 3 * GIB // 4
    assert plan["target"]["source"] == "measured on 2026-01-31 with driver 550.54, torch 2.6.0"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dry-run", "--target-gpu", "h1000"), "h100-80gb"),
        (("--dry-run", "--target-gpu", "a100"), "a100-40gb"),
        (("--dry-run", "--target-memory", "16"), "number above zero with its unit"),
        (("--target-gpu", "h100"), "Add --dry-run"),
        (("--target-memory", "16GiB"), "Add --dry-run"),
    ],
)
def test_a_target_that_is_none_is_said_in_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    assert main(("--model", "gat", "--dataset", "synthetic", "--state-dir", str(tmp_path), *flags)) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert not said.out
