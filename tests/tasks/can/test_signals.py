import json
from pathlib import Path

import numpy as np
import pytest

from can_train.cli.main import main
from can_train.config.compose import from_plain
from can_train.reporter import SilentReporter
from can_train.runs.run_folder import RunFolder
from can_train_tasks.can.data.dataset import load_data
from can_train_tasks.can.synthetic.writing import format_rows
from fakes.databases import TRUCK_DBC
from fakes.simulated_drives import benign_drive
from fakes.trained_runs import WINDOW, finished_run, own_log


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("logs") / "drive.csv"
    _, traffic = benign_drive(2, seed=5)
    path.write_bytes(b"timestamp,arbitration_id,data_field,attack\n" + format_rows(traffic, 10**15))
    return path


def test_every_id_of_a_log_is_told_as_json(log, capsys):
    vehicle, traffic = benign_drive(2, seed=5)
    assert main(["signals", str(log), "--json"]) == 0
    told = {int(each["id"], 16): each for each in json.loads(capsys.readouterr().out)}
    assert sorted(told) == sorted(set(traffic.can_id.tolist()))
    for message in vehicle.messages:
        if message.counter_byte is not None and told[message.can_id]["frames"] > 200:
            counters = [field["start"] // 8 for field in told[message.can_id]["fields"] if field["kind"] == "counter"]
            assert message.counter_byte in counters
    assert any(field["as"] for each in told.values() for field in each["fields"])


def test_the_table_of_one_id_has_its_fields(log, capsys):
    vehicle, _ = benign_drive(2, seed=5)
    message = next(each for each in vehicle.messages if each.counter_byte is not None and each.period_us <= 50_000)
    assert main(["signals", str(log), "--id", f"0x{message.can_id:x}"]) == 0
    title, head, first, *_ = [line for line in capsys.readouterr().out.splitlines() if line]
    assert title == "Signals of 1 CAN ID"
    assert head.split()[:4] == ["ID", "every", "ms", "bits"]
    assert int(first.split()[0], 16) == message.can_id


def test_several_ids_are_shown_that_are_named(log, capsys):
    ids = sorted(message.can_id for message in benign_drive(2, seed=5)[0].messages)[:2]
    assert main(["signals", str(log), "--json", *(word for each in ids for word in ("--id", f"{each:x}"))]) == 0
    assert [int(each["id"], 16) for each in json.loads(capsys.readouterr().out)] == ids


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["gone.log"], "There is no such log: gone.log"),
        (["LOG", "--id", "zz"], "--id is no hexadecimal CAN ID: 'zz'"),
        (["LOG", "--dbc", "gone.dbc"], "The DBC file cannot be read: gone.dbc (No such file or directory)"),
        (["LOG", "--id", "7ff"], "Unknown CAN ID: '7FF'"),
    ],
)
def test_a_mistake_is_told_in_two_lines(log, words, error, capsys):
    assert main(["signals", *(str(log) if word == "LOG" else word for word in words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: {error}."
    assert len(lines) == 2


def test_the_table_of_a_database_has_physical_values_and_what_it_lacks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("truck.dbc").write_text(TRUCK_DBC)
    # Speeds of 1,000, 1,100 and 8,159.88 revolutions a minute; the last byte moves, and belongs to no signal.
    frames = ["0CF00400#F17D8C401FFFFF00", "0CF00400#F17D8C6022FFFF01", "0CF00400#F17D8CFFFEFFFF02", "123#00", "7FF#"]
    Path("drive.log").write_text("".join(f"(0.{index}00000) can0 {each}\n" for index, each in enumerate(frames)))
    assert main(["signals", "drive.log", "--dbc", "truck.dbc"]) == 0
    printed = capsys.readouterr()
    assert [line.rstrip() for line in printed.out.splitlines()] == [
        "",
        "Signals of 1 CAN ID, as truck.dbc declares them",
        "signal                unit  from       to    declared notes",
        "0CF00400 EEC1                                         every 100 ms, no signal for moving bits 62-63",
        "  EngineTorqueMode             1        1       0..15 never moves",
        "  DriversDemandTorque    %     0        0   -125..125 never moves",
        "  ActualEngineTorque     %    15       15   -125..125 never moves",
        "  EngineSpeed          rpm 1,000 8,159.88 0..8,031.88 33.3 % outside",
        "  bits: counted from 0, the first byte's most significant bit",
        "  outside: share of the frames with a value outside the declared range",
    ]
    assert printed.err.splitlines() == [
        "2 IDs are not in truck.dbc: 123, 7FF",
        "1 message of truck.dbc never occurs: 18FEF1FE CCVS1",
    ]
    assert main(["signals", "drive.log", "--dbc", "truck.dbc", "--id", "CF00400", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["messages"][0]["moving_bits_without_signal"] == [62, 63]
    assert told["messages"][0]["signals"][-1] == {
        "name": "EngineSpeed", "unit": "rpm", "frames": 3, "from": 1000.0, "to": 8159.875, "declared_from": 0.0,
        "declared_to": 8031.875, "outside": 0.333333, "multiplexer": None, "pages": [],
    }  # fmt: skip
    assert (told["unknown_ids"], told["unseen_messages"]) == ([], [])


def test_the_signals_of_a_run_are_those_of_its_benign_training_windows(capsys):
    run, log = finished_run("gat"), own_log(finished_run("gat"))
    assert main(["show", str(run), "--signals", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    dataset = from_plain(RunFolder(run).config()).dataset
    data = load_data(dataset, run, run.parents[1] / "state" / "cache", SilentReporter())
    benign = np.count_nonzero(data.flat.label[data.split.train] == 0)
    assert 0 < benign < len(data.split.train)
    assert sum(each["frames"] for each in told) == benign * WINDOW
    assert main(["signals", str(log), "--json"]) == 0
    every = {each["id"]: each for each in json.loads(capsys.readouterr().out)}
    assert all(each["bytes"] == every[each["id"]]["bytes"] for each in told)
    assert main(["show", str(run), "--signals"]) == 0
    assert capsys.readouterr().out.startswith(f"\nSignals of {len(told)} CAN IDs\n")


@pytest.mark.parametrize(
    ("cut", "error"),
    [
        (40, "The data have changed since the run was trained on them: LOG"),
        (None, "--dataset names no file or folder that exists: LOG"),
    ],
)
def test_a_run_whose_data_are_gone_or_others_shows_no_signals(cut, error, capsys):
    run, log = finished_run("gat"), own_log(finished_run("gat"))
    kept = log.rename(log.with_suffix(".kept"))
    try:
        if cut is not None:
            log.write_bytes(kept.read_bytes()[:-cut])
        status = main(["show", str(run), "--signals"])
    finally:
        kept.replace(log)
    assert status == 2
    assert f"error: {error.replace('LOG', str(log))}.\n" in capsys.readouterr().err


def test_a_run_of_another_task_has_no_signals(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task: muon\n")
    assert main(["show", str(run), "--signals"]) == 2
    assert capsys.readouterr().err == (
        "error: The data of this task have no signals: muon.\n--signals goes with runs of: can.\n"
    )


def test_a_file_that_is_no_log_gets_a_remedy_that_the_command_takes(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("no log at all\n")
    assert main(["signals", str(tmp_path / "notes.txt")]) == 2
    fact, remedy = capsys.readouterr().err.splitlines()
    assert fact.startswith("error: The log is in none of the formats")
    assert remedy == "Save the log in one of these formats, as candump -l does."
