"""scripts/gpu-check, as far as it can be tried without a GPU."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from can_train.fit.packing import BatchCosts
from can_train.memory.catalogue import MEASURED, read_gpu_constants
from can_train.reporter import SilentReporter
from gpu.configurations import GIB
from gpu.main import CATALOGUE, ROOT, choose, gpu_constants, proposed_change, read_arguments, remember
from gpu.measurements import BEYOND_PROBES, CLOSE, true_limit
from gpu.processes import read_report, run_limited
from gpu.tables import markdown
from gpu.tasks import OTHER_FIELDS
from gpu.trainer import Explored, limited_device

MIB = 2**20

DEVICE = {
    "name": "NVIDIA X", "simulated": False, "total_bytes": 80 * GIB, "cuda": "13.0", "cudnn": 91000, "driver": "580.1",
    "torch": "2.11.0", "torch_geometric": "2.8", "python": "3.12",
}  # fmt: skip

POINT = {
    "samples": 100, "beyond_probes": 7.2, "predicted_bytes": 99 * MIB, "corrected_bytes": 101 * MIB,
    "half_width_bytes": MIB / 2, "measured_bytes": 100 * MIB, "reserved_bytes": 110 * MIB,
}  # fmt: skip

CONFIGURATION = {"model": "gat", "capacity_bytes": 8 * GIB, "precision": "bf16"}

ROW = {
    "configuration": CONFIGURATION, "relative_residual": 1e-4, "trials": 3, "ooms": 1, "evaluation_trials": 2,
    "evaluation_ooms": 0, "tuned_limit_bytes": 7 * GIB, "capped": False, "true_limit_bytes": 7.25 * GIB,
    "points": [POINT], "capacity_bytes": 200 * MIB, "ceiling_bytes": 190 * MIB,
}  # fmt: skip


def written(*rows: dict[str, Any], **parts: Any) -> str:
    models = {f"row {index}": row for index, row in enumerate(rows)}
    return markdown({"device": DEVICE, "commit": "c", "models": models, **parts})


def test_the_heading_names_device_driver_and_versions() -> None:
    assert written().splitlines()[:3] == [
        "# gpu-check: NVIDIA X",
        "",
        "80.00 GiB, driver 580.1, CUDA 13.0, cuDNN 91000, torch 2.11.0, torch_geometric 2.8, Python 3.12, can-train c.",
    ]


def test_a_row_stands_with_its_errors_and_its_fill() -> None:
    text = written(ROW | {"compiled_points": [POINT | {"predicted_bytes": 100 * MIB}]})
    assert "| gat | 8 | bf16 | no | 100 | 7 | 99.0 | 100.0 | 110.0 | -1.00% | +1.00% | too low |" in text
    assert "| gat | 8 | bf16 | yes | 100 | 7 | 100.0 | 100.0 | 110.0 | +0.00% | +1.00% | yes |" in text
    assert "| gat | 8 | bf16 | 1.00e-04 | 3 | 1 | 2 | 0 | 7168.0 | 7424.0 | 0.966 |" in text


def test_allocated_over_reserved_stands_beside_where_memory_ends() -> None:
    assert "| gat | 8 | bf16 | 50.0% | 90.9% | 95.0% | +4.1% |" in written(ROW)
    for unknown in (ROW | {"ceiling_bytes": None}, ROW | {"points": [POINT | {"reserved_bytes": 0}]}):
        assert "| 90.9% |" not in written(unknown)


def test_the_summary_counts_what_was_measured_without_compilation_only() -> None:
    points = [POINT | {"predicted_bytes": 103 * MIB}, POINT, POINT | {"measured_bytes": None}]
    text = written(ROW | {"points": points, "compiled_points": [POINT]})
    assert "Not compiled, 2 points: median error 2.00%, largest 3.00%; 0 inside the interval." in text
    assert "| out of memory |" in text


def test_what_nobody_measured_is_no_number() -> None:
    text = written(ROW | {"true_limit_bytes": None, "points": []})
    assert "No point was measured." in text
    assert "| 7168.0 | not met |  |" in text


def test_a_failed_measurement_is_named_with_its_error_beside_what_it_had_found() -> None:
    text = written({"error": "took longer than 9 s\nmore"}, ROW | {"error": "Unsupported: that"})
    assert "- row 0: took longer than 9 s\n- row 1: Unsupported: that\n" in text
    assert "| gat | 8 | bf16 | no | 100 |" in text


def test_speeds_stand_beside_their_share_of_the_best() -> None:
    speeds = [
        {"share": 0.5, "samples": 5, "samples_per_second": 200.0},
        {"share": 0.9, "samples": 9, "samples_per_second": 150.0},
        {"share": 1.0, "samples": 10, "samples_per_second": None},
    ]
    text = written(ROW | {"speeds": speeds})
    assert "| gat | 8 | bf16 | 0.900 | 9 | 150 | 0.750 |" in text
    assert "| gat | 8 | bf16 | 1.000 | 10 | out of memory |  |" in text


def test_what_cuda_takes_stands_step_by_step() -> None:
    step = {"after": "context", "outside_bytes": 500 * MIB, "reserved_bytes": 0, "kept_bytes": 0, "transient_bytes": 0}
    assert "| context | 500.0 | 0.0 | 0.0 | 0.0 |" in written(constants={"steps": [step]})


def test_tests_that_did_not_pass_are_named() -> None:
    outcomes = [("passed", ""), ("skipped", "no GPU"), ("skipped", "no GPU"), ("failure", "1 != 2\nmore")]
    cases = [{"name": f"test {index}", "outcome": one, "why": why} for index, (one, why) in enumerate(outcomes)]
    text = written(tests={"counts": {"skipped": 2, "passed": 1, "failure": 1}, "cases": cases})
    assert "1 failure, 1 passed, 2 skipped.\n\n- 2 skipped: no GPU\n- failure: test 3: 1 != 2\n" in text


def test_a_report_of_pytest_is_read() -> None:
    xml = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="m">x</failure></testcase>
    <testcase name="c"><skipped message="no GPU"/></testcase></testsuite></testsuites>"""
    assert [(case["name"], case["outcome"], case["why"]) for case in read_report(xml)] == [
        ("a", "passed", ""),
        ("b", "failure", "m"),
        ("c", "skipped", "no GPU"),
    ]


@pytest.mark.parametrize(
    ("line", "mebibytes"),
    [
        ("", [8192, 16384, 24576, 40960]),
        ("--quick", [8192, 24576]),
        ("--device sim:96MiB", [96]),
        ("--capacities 2GiB 512MiB", [512, 2048]),
    ],
)
def test_every_model_is_measured_at_every_capacity_and_its_speed_at_the_largest(
    line: str, mebibytes: list[int]
) -> None:
    chosen = choose(read_arguments([*line.split(), "--models", "gat", "unet"]))
    sizes = [(one.capacity_bytes // MIB, one.model, one.swept) for one in chosen]
    assert sizes == [(size, model, size == mebibytes[-1]) for size in mebibytes for model in ("gat", "unet")]
    assert len({one.label for one in chosen}) == len(chosen)


@pytest.mark.parametrize("name", OTHER_FIELDS)
def test_the_parts_of_a_batch_have_its_sum_and_its_denominator(name: str) -> None:
    task = OTHER_FIELDS[name](True)
    model = task.build_model().double().eval()
    rows = task.train_rows[:7]
    batch = task.logical_batch(rows, torch.device("cpu"), torch.float64, None)
    (whole, denominator), *parts = (batch.losses(model, *part)["loss"] for part in ((0, 7), (0, 3), (3, 7)))
    assert denominator == batch.denominators["loss"] == sum(own for _, own in parts)
    assert torch.allclose(sum(total for total, _ in parts), whole, rtol=1e-12)
    assert task.batch_features(rows).shape == (7, len(task.memory_features))


def test_a_simulated_device_has_the_capacity_it_is_given() -> None:
    with limited_device("sim", 40 * MIB) as meter:
        assert meter.capacity_bytes == 40 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(41 * MIB, dtype=torch.uint8)


class CountedTrainer:
    """Up to so many samples fit."""

    def __init__(self, fitting: int) -> None:
        self.fitting = fitting
        self.task = SimpleNamespace(train_rows=np.arange(10_000))

    def fits(self, rows: NDArray[np.int64]) -> bool:
        return len(rows) <= self.fitting


@pytest.mark.parametrize("tuned", [3000, 4000, 5000])
def test_the_true_limit_is_found_from_below_and_from_above(tuned: float) -> None:
    limits = SimpleNamespace(training=SimpleNamespace(tuned_limit=tuned))
    explored = Explored(limits, BatchCosts.uniform(10_000), probe_cost=16.0, probe_s=0.0)
    assert true_limit(CountedTrainer(4000), explored) == pytest.approx(4000, rel=CLOSE)
    assert true_limit(CountedTrainer(10_000), explored) is None


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_ended_with_what_it_started() -> None:
    sleeper = "import time; time.sleep(60)"
    child = f"import subprocess, sys; print('here', flush=True); subprocess.run([sys.executable, '-c', {sleeper!r}])"
    assert run_limited([sys.executable, "-c", child], limit_s=2.0) == "took longer than 2 s\nhere"


@pytest.mark.slow
def test_a_command_that_fails_leaves_the_end_of_its_output() -> None:
    said = run_limited([sys.executable, "-c", "raise SystemExit('no such thing')"], limit_s=60.0)
    assert said == "ended with status 1\nno such thing"


def check(repository: Path, python: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script; what it keeps between runs stays in the folder of the results."""
    own = {"CAN_TRAIN_PYTHON": str(python), "CAN_TRAIN_HOME": str(out / "home"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(repository / "scripts" / "gpu-check"), "--out", str(out), *arguments],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_run_goes_on_where_an_earlier_one_ended_and_records_what_failed(
    tmp_path: Path, repository: Path, warm_python: Path
) -> None:
    arguments = ("--device", "sim:64MiB", "--quick", "--models", "gat", "--parts", "constants", "models")
    done = check(repository, warm_python, tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    first = json.loads((tmp_path / "gpu-check-sim-64mib.json").read_text())
    assert first["device"]["simulated"]
    failed = check(repository, warm_python, tmp_path, *arguments, "--resume", "--capacities", "64MiB", "1MiB")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    both = json.loads((tmp_path / "gpu-check-sim-64mib.json").read_text())["models"]
    ((label, row),) = first["models"].items()
    assert both.pop(label) == row
    (point,) = row["points"]
    assert point["beyond_probes"] >= BEYOND_PROBES
    assert point["measured_bytes"] == pytest.approx(point["predicted_bytes"], rel=0.02)
    assert 0.8 * row["true_limit_bytes"] <= row["tuned_limit_bytes"] <= 1.01 * row["true_limit_bytes"]
    # A device of what a peak had reserved would have held it. The larger one may end within a page of 20 MiB.
    ceiling = row["ceiling_bytes"] / row["capacity_bytes"]
    assert point["measured_bytes"] / row["capacity_bytes"] <= ceiling <= 1
    assert (
        ceiling - 0.15
        <= point["measured_bytes"] / point["reserved_bytes"]
        <= ceiling + 20 * MIB / row["capacity_bytes"]
    )
    assert any(speed["samples_per_second"] for speed in row["speeds"])
    (other,) = both.values()
    assert "OutOfMemoryError" in other["error"]
    text = (tmp_path / "gpu-check-sim-64mib.md").read_text()
    assert "no figure here says anything of a real GPU" in text
    assert "- gat, 0.0009766 GiB, fp32: OutOfMemoryError: CUDA out of memory." in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", "gpu-check: torch sees no CUDA GPU"),
        ("sim:much", "gpu-check: The memory of a simulated GPU, sim:<size>, cannot be read"),
        ("cpu", "gpu-check: The device is no GPU: cpu"),
    ],
)
def test_a_device_that_is_not_there_ends_the_run_at_once(
    tmp_path: Path, repository: Path, warm_python: Path, device: str, said: str
) -> None:
    done = check(repository, warm_python, tmp_path, "--device", device)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_of_a_gpu_is_kept_where_plans_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path))
    step = {"after": "context", "outside_bytes": 500 * MIB, "kept_bytes": 8 * MIB}
    device = DEVICE | {"key": "h100-80gb"}
    change = tmp_path / "change.diff"
    remember({"device": device, "constants": {"error": "no"}}, change)
    assert list(tmp_path.iterdir()) == []
    remember({"device": device, "constants": {"steps": [step]}}, change)
    assert '+            driver="580.1"' in change.read_text()
    found = read_gpu_constants(tmp_path, "h100-80gb", SilentReporter())
    assert found is not None
    assert (found.outside_bytes, found.workspace_bytes, found.driver) == (500 * MIB, 8 * MIB, "580.1")


def test_constants_are_what_gpu_check_found_last_outside_and_all_that_was_kept_inside() -> None:
    steps = [
        {"outside_bytes": 400, "kept_bytes": 0},
        {"outside_bytes": 600, "kept_bytes": 32},
        {"outside_bytes": 590, "kept_bytes": 8},
    ]
    device = {"key": "t4-16gb", "total_bytes": 10_000, "driver": "", "torch": "2.11.0"}
    found = gpu_constants(device, steps, date="2026-01-31")
    assert (found.outside_bytes, found.workspace_bytes) == (600, 40)
    assert found.source == "measured on 2026-01-31 with driver unknown, torch 2.11.0"


@pytest.mark.parametrize("key", sorted(MEASURED))
def test_the_constants_that_are_shipped_are_those_of_the_cards_file(key: str) -> None:
    results = json.loads((ROOT / f"scripts/bench/gpu-check-{key}.json").read_text())
    shipped = MEASURED[key]
    assert gpu_constants(results["device"], results["constants"]["steps"], date=shipped.date) == shipped
    assert proposed_change(shipped, (ROOT / CATALOGUE).read_text()) == ""


@pytest.mark.parametrize("key", ["t4-16gb", "a100-40gb", "h200-141gb"])
def test_the_change_that_ships_constants_can_be_applied(key: str, tmp_path: Path) -> None:
    constants = replace(MEASURED["h100-80gb"], key=key, outside_bytes=500 * MIB, driver="595.1")
    path = tmp_path / CATALOGUE
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / CATALOGUE).read_text())
    change = proposed_change(constants, path.read_text())
    subprocess.run(["git", "apply", "-"], input=change, text=True, check=True, cwd=tmp_path)
    subprocess.run([sys.executable, "-P", "-m", "ruff", "format", "--check", str(path)], check=True, cwd=ROOT)
    changed: dict[str, Any] = runpy.run_path(str(path))
    assert vars(changed["MEASURED"][key]) == vars(constants)
    assert list(changed["MEASURED"]) == sorted({*MEASURED, key})
