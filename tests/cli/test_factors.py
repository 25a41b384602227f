import json
import math
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from can_train.cli.factors import factors
from can_train.cli.main import Command
from can_train.errors import CanTrainError, ConfigError
from can_train.factors.observations import write_record
from can_train.fit.step_time import TimedSize
from fakes.samples import A100, KEY, observation, out_of_memory, started


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Two runs on one device, an out-of-memory on another, and another configuration."""
    others = [out_of_memory(3, device=A100), observation(4, key="set_01_vgae_student_autoencoder", size="student")]
    for record in [observation(1, size="teacher"), observation(2, size="teacher", peak_allocated_bytes=8_000), *others]:
        write_record(tmp_path, record)
    return tmp_path


def run(state: Path, *arguments: str) -> Result:
    app = typer.Typer()
    app.command(cls=Command)(factors)
    return CliRunner().invoke(app, ["--state-dir", str(state), *arguments])


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
    rows = [line for line in lines if "gb" in " ".join(line)]
    assert [[*line[:4], *line[5:11]] for line in rows] == [
        [KEY, "a100-40gb", "0.339", "±", "1", "99.0%", "99.0%", "99.0%", "1", "no"],
        [KEY, "v100-16gb", "0.517", "±", "2", "71.0%", "80.0%", "80.0%", "0", "no"],
        ["set_01_vgae_student_autoencoder", "v100-16gb", "0.514", "±", "1", "62.0%", "62.0%", "62.0%", "0", "no"],
    ]


def test_nothing_is_cropped_in_a_pipe(state: Path) -> None:
    assert "small dataset (hcrl_ch/set_01) 0.65" in run(state).stdout


def test_a_key_shows_its_runs(state: Path) -> None:
    lines = shown(state, KEY)
    runs = [line[:2] for line in lines if line and line[0].startswith("run-")]
    assert runs == [["run-3", "1"], ["run-1", "1"], ["run-2", "1"]]
    assert "set_01_vgae_student_autoencoder" not in run(state, KEY).stdout


def test_of_many_runs_the_last_fifty_are_listed_and_the_line_that_has_all_of_them(tmp_path: Path) -> None:
    for number in range(53):
        write_record(tmp_path, observation(run_id=f"run-{number}", attempt=1))
    printed = run(tmp_path, KEY).stdout
    assert f"3 earlier runs: can-train factors {KEY} --show --json" in " ".join(printed.split())
    assert len(re.findall(r"^run-\d+", printed, re.MULTILINE)) == 50
    assert "run-52" in printed
    assert len(as_json(tmp_path, KEY, "--show")["factors"][0]["runs"]) == 53


def test_a_key_without_its_size_and_a_device_narrow_it_down(state: Path) -> None:
    found = as_json(state, "hcrl_ch_gat_normal", "--device", "v100-16gb")["factors"]
    assert [(record["config_key"], record["device"]) for record in found] == [(KEY, "v100-16gb")]


def test_json_has_every_figure_by_name(state: Path) -> None:
    record = as_json(state, "--device", "v100-16gb")["factors"][0]
    assert record == {
        "config_key": KEY, "device": "v100-16gb", "state": "learned", "target": 0.9, "aim": 0.9, "aim_reason": "",
        "safety_factor": pytest.approx(0.5172, abs=5e-5), "learned_factor": record["safety_factor"],
        "interval": pytest.approx(0.169, abs=1e-3), "reason": "learned from 2 runs",
        "runs_before_reset": 0, "runs_with_other_settings": 0,
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
    write_record(state, started(9))
    (state / "observations" / "broken.json").write_text("{")
    text = run(state).stdout
    assert "no result: run-9 (attempt 1" in text
    assert "broken.json: Input data was truncated" in " ".join(text.split())
    assert [entry["run_id"] for entry in as_json(state)["unfinished"]] == ["run-9"]


def test_the_command_imports_nothing_heavy() -> None:
    heavy = {"torch", "hydra", "submitit", "numpy", "rich.table"}
    code = f"import sys, can_train.cli.factors; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def done(state: Path, *arguments: str) -> dict[str, Any]:
    """What an action says that it did; the event it wrote, if any, is there."""
    value = as_json(state, *arguments)
    assert Path(value.pop("event")).parent == state / "events"
    return value


def exported(state: Path) -> dict[str, Any]:
    value = json.loads((state / "batch_size_factors.json").read_text())
    assert isinstance(value, dict)
    return value


def test_a_reset_keeps_the_history_and_marks_it(state: Path) -> None:
    values = done(state, "--reset", "hcrl_ch_gat_normal", "--device", "v100-16gb", "--yes")
    assert values == {"action": "reset", "config_keys": [KEY], "device": "v100-16gb", "runs": 2, "notices": []}
    text = run(state, KEY, "--device", "v100-16gb").stdout
    assert text.count("ok before the reset\n") == 2
    assert "reset on" in text
    assert list(exported(state)[KEY]["devices"]) == ["a100-40gb"]


def test_a_reset_of_everything_tells_how_much_it_is(state: Path) -> None:
    assert "4 runs of 2 keys teach nothing any more" in run(state, "--reset", "--yes").stdout
    assert done(state, "--reset", "--yes")["runs"] == 0
    assert exported(state) == {}


def test_a_reset_asks_and_nobody_answers_on_a_pipe(state: Path) -> None:
    result = run(state, "--reset", KEY)
    assert "Add --yes" in str(result.exception)
    assert not (state / "events").exists()


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_reset_asks_on_a_terminal(state: Path, answer: str) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(ours, "w") as keyboard, os.fdopen(theirs) as terminal:
        keyboard.write(f"{answer}\n")
        keyboard.flush()
        command = [sys.executable, "-m", "can_train", "factors", "--reset", KEY, "--state-dir", str(state)]
        ended = subprocess.run(command, stdin=terminal, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert f"Shall 3 runs of {KEY} teach nothing any more? Their history stays." in ended.stderr
    assert (state / "events").exists() is (answer == "y")


def test_a_pin_holds_until_it_is_taken_away(state: Path) -> None:
    before = as_json(state, KEY, "--device", "v100-16gb")["factors"][0]
    assert done(state, "hcrl_ch_gat_normal", "--pin", "0.5", "--device", "v100-16gb")["config_key"] == KEY
    record = as_json(state, KEY, "--device", "v100-16gb")["factors"][0]
    assert (record["safety_factor"], record["state"]) == (0.5, "pinned")
    assert record["learned_factor"] == before["safety_factor"]
    assert exported(state)[KEY]["devices"]["v100-16gb"]["safety_factor"] == 0.5
    done(state, KEY, "--unpin")
    assert as_json(state, KEY, "--device", "v100-16gb")["factors"][0] == before


def test_a_pin_of_a_key_that_nobody_knows_says_so(state: Path) -> None:
    values = done(state, "hcrl_ch_gat_teacher_norm", "--pin", "0.5")
    assert [notice.split(": ")[0] for notice in values["notices"]] == [
        "No run has had the key hcrl_ch_gat_teacher_norm yet. Known keys, nearest first"
    ]
    assert values["config_key"] == "hcrl_ch_gat_teacher_norm"


def test_a_file_goes_out_and_in_again(state: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other, file = tmp_path_factory.mktemp("other"), state / "out.json"
    file.write_text("an older one")
    assert as_json(state, "--export", str(file))["config_keys"] == [KEY, "set_01_vgae_student_autoencoder"]
    assert json.loads(run(state, "--export", "-").stdout) == json.loads(file.read_text())
    assert list(json.loads(run(state, KEY, "--export", "-").stdout)) == [KEY]
    assert len(done(other, "--import", str(file))["config_keys"]) == 2
    records = as_json(other)["factors"]
    here = as_json(state)["factors"]
    assert [record["state"] for record in records] == ["imported"] * 3
    figures = ("num_runs", "avg_memory_pct", "max_memory_pct", "factor_variance", "converged")
    assert [[record[name] for name in figures] for record in records] == [
        [record[name] for name in figures] for record in here
    ]
    assert [record["safety_factor"] for record in records] == [record["safety_factor"] for record in here]


def test_what_another_command_writes_is_imported(tmp_path: Path) -> None:
    words = ("--import", "/dev/stdin", "--state-dir", str(tmp_path), "--json")
    command = [sys.executable, "-m", "can_train", "factors", *words]
    subprocess.run(command, input=json.dumps({KEY: 0.5}), capture_output=True, text=True, check=True)
    assert as_json(tmp_path)["factors"][0]["safety_factor"] == 0.5
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in str(run(tmp_path, "--import", str(tmp_path / "fifo")).exception)


def test_an_import_without_size_and_with_a_short_gpu_name_is_used(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps({"hcrl_ch_gat_normal": {"v100": 0.5}}))
    values = done(tmp_path, "--import", str(tmp_path / "old.json"))
    assert values["config_keys"] == ["hcrl_ch_gat_normal"]
    for key in ("hcrl_ch_gat_normal", KEY):
        found = as_json(tmp_path, key, "--device", "v100-32gb")["factors"]
        assert [(record["safety_factor"], record["state"]) for record in found] == [(0.5, "imported")]


def test_an_import_that_could_never_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"a__b": 1}')
    assert "a__b is not a configuration key" in str(run(tmp_path, "--import", str(tmp_path / "old.json")).exception)
    assert {path.name for path in tmp_path.iterdir()} == {"old.json"}


def test_ones_own_export_is_imported_without_a_change_or_a_warning(state: Path) -> None:
    before = as_json(state, "--show")
    run(state, "--export", str(state / "out.json"))
    values = as_json(state, "--import", str(state / "out.json"))
    assert (values["config_keys"], values["event"], values["notices"]) == ([], None, [])
    result = run(state, "--import", str(state / "out.json"))
    assert (result.stdout, result.stderr) == (f"Nothing changed: {state}/out.json has the factors in force.\n", "")
    assert as_json(state, "--show") == before
    assert not (state / "events").exists()


def test_a_replay_shows_what_another_policy_would_have_set(state: Path) -> None:
    (replayed,) = as_json(state, KEY, "--device", "v100-16gb", "--replay", "affine")["replays"]
    assert [entry["factor"] for entry in replayed["runs"]] == [0.489, 0.489]
    assert replayed["runs"][0]["replayed_factor"] == 0.489 < replayed["runs"][1]["replayed_factor"]
    text = run(state, KEY, "--device", "v100-16gb", "--replay", "affine").stdout
    assert f"next: affine {replayed['replayed_safety_factor']:.4f}; in force 0.5172" in text
    (own,) = as_json(state, KEY, "--device", "v100-16gb", "--replay", "momentum")["replays"]
    assert own["replayed_safety_factor"] == own["safety_factor"]


def test_a_replay_names_the_ranks_of_a_run(tmp_path: Path) -> None:
    for record in (observation(1), observation(2), observation(2, rank=1)):
        write_record(tmp_path, record)
    (replayed,) = as_json(tmp_path, KEY, "--replay", "affine")["replays"]
    ranks = sorted((entry["run_id"], entry["rank"]) for entry in replayed["runs"])
    assert ranks == [("run-1", 0), ("run-2", 0), ("run-2", 1)]
    lines = [words for words in shown(tmp_path, KEY, "--replay", "affine") if words and words[0].startswith("run-")]
    first, *both = sorted(words[:3] for words in lines)
    assert first[:2] == ["run-1", "1"]
    assert both == [["run-2,", "rank", "0"], ["run-2,", "rank", "1"]]


def test_a_replay_shows_the_fastest_micro_batch_and_its_time(tmp_path: Path) -> None:
    own, half = (
        TimedSize(samples=64, steps=200, seconds=2e-4),
        TimedSize(samples=32, steps=40, seconds=1e-4, log_ratio=-0.5),
    )
    first = observation(1, size="teacher", times={"": [own, half]})
    # The second run has half of the size, as the first one has taught, and tries the whole.
    later = [replace(half, log_ratio=0.0), replace(own, log_ratio=0.5)]
    for record in [first, observation(2, size="teacher", times={"": later}), observation(3, size="teacher")]:
        write_record(tmp_path, record)
    (replayed,) = as_json(tmp_path, KEY, "--replay", "affine")["replays"]
    (one,), (other,), none = [entry["micro_batches"] for entry in replayed["runs"]]
    assert (one["own_samples"], one["samples"], one["predicted_seconds"]) == (64, 64, None)
    assert one["measured_seconds"] == pytest.approx(2e-4)
    assert (other["own_samples"], other["samples"], none) == (32, 32, [])
    assert other["predicted_seconds"] == pytest.approx(2e-4 * math.exp(-0.5), rel=0.02)
    assert other["measured_seconds"] == pytest.approx(1e-4)
    lines = shown(tmp_path, KEY, "--replay", "affine")
    assert ["–", "split", "64", "64", "–", "200", "µs"] in [words[-7:] for words in lines]
    assert [words[-6:-4] for words in lines if words[-1:] == ["µs"]][1] == ["32", "32"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--reset", "--unpin"], "--reset and --unpin cannot be combined"),
        ([KEY, "--pin", "0.5", "--show"], "--pin and --show cannot be combined"), (["--pin", "1"], "--pin needs a KEY"),
        (["--unpin"], "--unpin needs a KEY"), ([KEY, "--unpin"], "not pinned"), ([KEY, "--pin", "2"], "not in"),
        ([KEY, "--import", "x"], "takes all of a file"), (["--import", "x", "--device", "d"], "takes all of a file"),
        (["--replay", "affin"], "Unknown policy: 'affin'.\nValid, nearest first: affine"), ([""], "KEY is empty"),
        (["nobody", "--reset", "--yes"], "Unknown configuration key"), (["--device", "v1"], "Unknown device"),
        (["--export", "/dev/null/x"], "export cannot be written"),
        (["--import", "/none"], "cannot be read: /none: No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_an_error_and_changes_nothing(state: Path, arguments: list[str], rule: str) -> None:
    result = run(state, *arguments)
    assert isinstance(result.exception, CanTrainError)
    assert re.search(rule, str(result.exception))
    assert {path.name for path in state.iterdir()} == {"observations"}


def test_an_export_that_cannot_be_refreshed_is_a_notice(state: Path) -> None:
    (state / "batch_size_factors.json").mkdir()
    values = done(state, KEY, "--pin", "0.5")
    assert "batch_size_factors.json is out of date" in values["notices"][0]
    assert as_json(state, KEY)["factors"][0]["safety_factor"] == 0.5


def test_runs_of_other_settings_are_counted_and_listed(state: Path) -> None:
    for number, hidden in ((5, 64), (6, 128)):
        key = "set_01_vgae_student_autoencoder"
        write_record(state, observation(number, key=key, fingerprint={"model": {"hidden": hidden, "layers": 2}}))
    assert "+2 runs with other settings" in run(state).stdout
    text = run(state, key).stdout
    assert f"{key} on v100-16gb, model.hidden=128 model.layers=2" in text
    assert f"{key} on v100-16gb, no model.hidden no model.layers" in text
    assert [len(other["runs"]) for other in as_json(state, key)["factors"][0]["other_settings"]] == [1, 1]


def test_an_attempt_whose_process_is_gone_is_called_lost(state: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_record(state, started(9, host=socket.gethostname(), pid=gone.pid))
    assert "lost: its process is gone" in run(state).stdout
    assert as_json(state)["unfinished"][0]["lost"] is True


def test_an_empty_state_folder_is_an_error_and_not_the_one_at_hand(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(state)
    result = run(state, KEY, "--pin", "0.5", "--state-dir", "")
    assert "--state-dir is empty" in str(result.exception)
    assert {path.name for path in state.iterdir()} == {"observations"}


def test_a_pin_without_a_run_is_exported_with_its_own_reason(state: Path) -> None:
    run(state, "--reset", "--yes")
    done(state, KEY, "--pin", "0.5", "--device", "t4-16gb")
    exported = json.loads(run(state, KEY, "--device", "t4-16gb", "--export", "-").stdout)
    assert exported[KEY]["initial_factor_reason"].startswith("pinned at 0.5 by hand")
    assert "run  attempt" not in run(state, KEY, "--device", "t4-16gb").stdout


def test_a_reset_of_what_was_imported_names_no_runs(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(json.dumps({KEY: 0.5}))
    run(tmp_path, "--import", str(tmp_path / "file.json"))
    said = run(tmp_path, "--reset", "--yes").stdout
    assert said == f"{KEY}: no run teaches; the next run is a first one.\n"


def test_nothing_is_reset_on_a_device_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(json.dumps({KEY: 0.5}))
    done(tmp_path, "--import", str(tmp_path / "file.json"))
    result = run(tmp_path, "--reset", "--device", "nope", "--yes")
    assert "Unknown device: 'nope'" in str(result.exception)


def test_a_history_is_drawn_into_an_svg_file(state: Path) -> None:
    file = state / "history.SVG"
    line = (KEY, "--plot", str(file), "--device", "v100-16gb")
    assert f"2 runs of {KEY} on v100-16gb drawn in" in run(state, *line).stdout
    texts = [text.text for text in ElementTree.parse(file).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert f"Safety factor of {KEY} on v100-16gb" in texts
    assert {"target 90%", "safety factor", "peak", "1", "2"} <= set(texts)
    assert "out of memory" not in texts
    assert as_json(state, *line)["runs"] == 2
    run(state, KEY, "--plot", str(file), "--device", "a100-40gb")
    assert "out of memory" in file.read_text()


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (("--plot", "x.svg"), "--plot needs a KEY"),
        ((KEY, "--plot", "x.png"), "A plot can only be written as SVG: x.png"),
        ((KEY, "--plot", "x"), "A plot can only be written as SVG: x"),
        ((KEY, "--plot", "x.svg"), "Runs on several kinds of device do not share a plot: a100-40gb, v100-16gb"),
        ((KEY, "--plot", "no/where.svg", "--device", "a100-40gb"), "The plot cannot be written: no/where.svg"),
    ],
)
def test_a_drawing_that_cannot_be_made_is_refused(state: Path, line: tuple[str, ...], rule: str) -> None:
    error = run(state, *line).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(rule)
    assert list(state.glob("*.svg")) == []


def test_a_listed_key_without_its_size_is_shown_and_reset_under_that_name(tmp_path: Path) -> None:
    for number, size in enumerate(("student", "teacher"), start=1):
        write_record(tmp_path, observation(number, key=f"hcrl_ch_gat_{size}_normal", size=size))
    (tmp_path / "in.json").write_text(json.dumps({"hcrl_ch_gat_normal": {"v100": 0.7, "a100-40gb": 0.6}}))
    done(tmp_path, "--import", str(tmp_path / "in.json"))
    listed = {record["config_key"] for record in as_json(tmp_path)["factors"]}
    assert listed == {f"hcrl_ch_gat_{part}normal" for part in ("", "student_", "teacher_")}
    shown = as_json(tmp_path, "hcrl_ch_gat_normal", "--show", "--device", "v100")["factors"]
    assert [(one["device"], one["safety_factor"]) for one in shown] == [("v100-16gb", 0.7), ("v100-32gb", 0.7)]
    reset = done(tmp_path, "hcrl_ch_gat_normal", "--reset", "--yes")
    # It is a reset of every size, and says so.
    assert set(reset["config_keys"]) == listed
