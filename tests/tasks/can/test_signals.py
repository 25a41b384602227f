import json

import pytest

from can_train.cli.main import main
from can_train_tasks.can.synthetic.writing import format_rows
from fakes.simulated_drives import benign_drive


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


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["gone.log"], "There is no such log: gone.log"),
        (["LOG", "--id", "zz"], "--id is no hexadecimal CAN ID: 'zz'"),
        (["LOG", "--id", "7ff"], "The logs have no such CAN ID: 7FF"),
    ],
)
def test_a_mistake_is_told_in_two_lines(log, words, error, capsys):
    assert main(["signals", *(str(log) if word == "LOG" else word for word in words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: {error}."
    assert len(lines) == 2
