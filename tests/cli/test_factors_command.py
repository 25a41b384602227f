import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from can_train.cli.factors import make_factors_command
from can_train.errors import ConfigError
from can_train.state.observations import write_observation, write_started
from state.samples import A100, KEY, observation, out_of_memory, started


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Two runs on one device, an out-of-memory on another, and another configuration."""
    others = [out_of_memory(3, device=A100), observation(4, key="set_01_vgae_student_autoencoder", size="student")]
    for record in [observation(1, size="teacher"), observation(2, size="teacher", peak_allocated_bytes=8_000), *others]:
        write_observation(tmp_path, record)
    return tmp_path


def run(state: Path, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(make_factors_command())
    return CliRunner().invoke(app, [*arguments, "--state-dir", str(state)])


def shown(state: Path, *arguments: str) -> list[list[str]]:
    """The words of every line printed."""
    result = run(state, *arguments)
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines()]


def as_json(state: Path, *arguments: str) -> dict[str, Any]:
    value = json.loads(run(state, *arguments, "--json").stdout)
    assert isinstance(value, dict)
    return value


def test_every_configuration_and_device_has_a_row(state: Path) -> None:
    lines = shown(state)
    assert [line[:9] for line in lines if "gb" in " ".join(line)] == [
        [KEY, "a100-40gb", "0.3390", "1", "99.0%", "99.0%", "99.0%", "1", "no"],
        [KEY, "v100-16gb", "0.5172", "2", "71.0%", "80.0%", "80.0%", "0", "no"],
        ["set_01_vgae_student_autoencoder", "v100-16gb", "0.5142", "1", "62.0%", "62.0%", "62.0%", "0", "no"],
    ]


def test_nothing_is_cropped_in_a_pipe(state: Path) -> None:
    assert "small dataset (hcrl_ch/set_01) 0.65" in run(state).stdout


def test_a_key_shows_its_runs(state: Path) -> None:
    lines = shown(state, KEY)
    runs = [line[:2] for line in lines if line and line[0].startswith("run-")]
    assert runs == [["run-3", "1"], ["run-1", "1"], ["run-2", "1"]]
    assert "set_01_vgae_student_autoencoder" not in run(state, KEY).stdout


def test_a_key_without_its_size_and_a_device_narrow_it_down(state: Path) -> None:
    found = as_json(state, "hcrl_ch_gat_normal", "--device", "v100-16gb")["factors"]
    assert [(record["config_key"], record["device"]) for record in found] == [(KEY, "v100-16gb")]


def test_json_has_every_figure_by_name(state: Path) -> None:
    record = as_json(state, "--device", "v100-16gb")["factors"][0]
    assert record == {
        "config_key": KEY, "device": "v100-16gb", "safety_factor": pytest.approx(0.5172, abs=5e-5),
        "initial_factor_reason": "small dataset (hcrl_ch/set_01) 0.65", "num_runs": 2,
        "avg_memory_pct": pytest.approx(0.71), "max_memory_pct": 0.8, "last_memory_pct": 0.8, "ooms": 0,
        "factor_variance": 0.0, "converged": False,
    }  # fmt: skip


def test_json_shows_runs_when_asked(state: Path) -> None:
    runs = as_json(state, "--show")["factors"][1]["runs"]
    assert [(entry["run_id"], entry["peak_memory_pct"]) for entry in runs] == [("run-1", 0.62), ("run-2", 0.8)]


def test_an_empty_store_says_what_to_do_next(tmp_path: Path) -> None:
    result = run(tmp_path / "none")
    assert result.exit_code == 0
    assert "Nothing has been learned yet" in result.stdout
    assert "can-train --help" in result.stdout
    assert as_json(tmp_path / "none") == {"factors": [], "unfinished": [], "set_aside": []}


def test_an_unknown_key_lists_the_nearest_first(state: Path) -> None:
    result = run(state, "set_01_vgae_student_autoencoded")
    assert isinstance(result.exception, ConfigError)
    assert "Valid, nearest first: set_01_vgae_student_autoencoder" in str(result.exception)


def test_lost_attempts_and_files_set_aside_are_named(state: Path) -> None:
    write_started(state, started(9))
    (state / "observations" / "broken.json").write_text("{")
    text = run(state).stdout
    assert "no result: run-9 (attempt 1" in text
    assert "broken.json: Expecting property name" in text
    assert [entry["run_id"] for entry in as_json(state)["unfinished"]] == ["run-9"]


def test_the_command_imports_nothing_heavy() -> None:
    heavy = {"torch", "hydra", "submitit", "numpy", "rich.table"}
    code = f"import sys, can_train.cli.factors; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
