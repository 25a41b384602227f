"""Labels in a JSON file beside a log: as ROAD and CAN-MIRGU have them."""

import gzip
import json
from hashlib import sha256
from pathlib import Path

import pytest

from can_train.reporter import SilentReporter
from can_train_tasks.can.data.dataset import find_prepared, prepare
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.layout import LOG, TEST, LogFile, hash_logs
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings

START_S = 1_030_000_000.0
FULL = "FFFFFFFFFFFFFFFF"
SPEED = {"injection_id": "0xd0", "injection_data_str": "XXXXXXXXXXFFXXXX", "injection_interval": [2.0, 4.0],
         "elapsed_sec": 6.0, "on_dyno": True, "description": "a speedometer"}  # fmt: skip


def write(path: Path, label: str = "") -> Path:
    """A drive of 6 s: 0D0 has FF in its sixth byte from second 1 on; 123 is full of FF in every other frame."""
    rows = []
    for i in range(60):
        time, spoofed = START_S + i * 0.1, "FF" if i >= 10 else "00"
        rows.append(f"({time:.6f}) can0 0D0#0011223344{spoofed}6677{label}")
        rows.append(f"({time + 0.05:.6f}) can0 123#{FULL if i % 2 else FULL[:-2] + '00'}{label}")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ("\n".join(rows) + "\n").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(path: Path, channel: str = "") -> tuple[LogReader, Frames, list[tuple[float, int]]]:
    """Reads a log, and lists the attacks' frames by second and ID."""
    reader = LogReader(path, CanDatasetSettings(channel=channel), block_bytes=1000)
    frames = Frames.concatenate(list(reader.blocks()))
    marked = frames.label > 0
    times = (frames.timestamp[marked] - START_S).round(3)
    return reader, frames, list(zip(times.tolist(), frames.can_id[marked].tolist(), strict=True))


@pytest.mark.parametrize("suffix", [".log", ".log.gz", ".txt.gz"])
def test_frames_of_the_injected_id_and_payload_are_attacks_inside_the_interval(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / "attacks" / f"max_speedometer_attack_1{suffix}")
    (path.parent / "capture_metadata.json").write_text(json.dumps({"max_speedometer_attack_1": SPEED}))
    reader, _, attacks = read(path)
    assert attacks == [(round(2 + i * 0.1, 3), 0xD0) for i in range(21)]
    assert reader.labelled
    assert reader.kinds == ["benign", "max_speedometer"]
    assert "its labels come from attacks/capture_metadata.json" in reader.report.summary()[0]


def test_an_interval_counts_from_the_first_frame_of_all_interfaces(tmp_path: Path) -> None:
    path = write(tmp_path / "max_speedometer_attack_1.log")
    lines = path.read_text().splitlines()
    late = [line.replace("can0", "can1") for line in lines if float(line[1:18]) > START_S + 1]
    path.write_text("\n".join(lines[:20] + late) + "\n")
    (tmp_path / "capture_metadata.json").write_text(json.dumps({path.stem: SPEED}))
    assert read(path, channel="can1")[2] == read(path)[2] == [(round(2 + i * 0.1, 3), 0xD0) for i in range(21)]


def test_any_digit_and_any_id_may_be_left_open(tmp_path: Path) -> None:
    path = write(tmp_path / "fuzzing_attack_2.log")
    entry = {**SPEED, "injection_id": "XXX", "injection_data_str": FULL}
    (tmp_path / "capture_metadata.json").write_text(json.dumps({"fuzzing_attack_2": entry}))
    _, _, attacks = read(path)
    assert attacks == [(round(2.05 + i * 0.1, 3), 0x123) for i in range(1, 20, 2)]


def test_no_frame_holds_a_payload_that_is_longer_than_any(tmp_path: Path) -> None:
    path = write(tmp_path / "max_speedometer_attack_1.log")
    entry = {**SPEED, "injection_data_str": "X" * 128 + "F"}
    (tmp_path / "capture_metadata.json").write_text(json.dumps({path.stem: entry}))
    assert read(path)[2] == []


def test_a_masquerade_is_named_and_needs_no_payload(tmp_path: Path) -> None:
    path = write(tmp_path / "max_speedometer_attack_1_masquerade.log")
    entry = {"injection_id": "0xd0", "injection_interval": [0.0, 0.45]}
    (tmp_path / "capture_metadata.json").write_text(json.dumps({path.stem: entry}))
    reader, _, attacks = read(path)
    assert [time for time, _ in attacks] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert reader.kinds[1] == "max_speedometer_masquerade"


def test_an_ambient_capture_is_benign_and_one_without_an_interval_is_unlabelled(tmp_path: Path) -> None:
    ambient, unknown = write(tmp_path / "ambient_drive.log"), write(tmp_path / "accelerator_attack_drive_1.log")
    nothing = {"injection_id": None, "injection_data_str": None, "injection_interval": None}
    entries = {"ambient_drive": {"elapsed_sec": 6.0}, "accelerator_attack_drive_1": nothing}
    (tmp_path / "capture_metadata.json").write_text(json.dumps(entries))
    assert LogReader(ambient, CanDatasetSettings()).labelled
    reader, _, attacks = read(unknown)
    assert not reader.labelled
    assert attacks == []
    assert "does not say when the log's attacks were" in reader.report.summary()[0]


@pytest.mark.parametrize("field", ["attack_interval", "injected_frames", "intervals"])
def test_fields_of_other_names_that_may_tell_of_attacks_leave_a_log_unlabelled(field: str, tmp_path: Path) -> None:
    path = write(tmp_path / "fuzzing_1.log")
    (tmp_path / "drive_metadata.json").write_text(json.dumps({"fuzzing_1": {"vehicle": "a car", field: [2.0, 2.4]}}))
    reader, _, _ = read(path)
    assert not reader.labelled
    assert "does not say when the log's attacks were" in reader.report.summary()[0]


def test_absolute_times_and_several_intervals_are_read_although_commas_trail(tmp_path: Path) -> None:
    path = write(tmp_path / "Real_attacks" / "EMS_replay_attack.log")
    text = f"""{{"EMS_replay_attack": {{
        "injection_interval_1": [{START_S + 1}, {START_S + 1.1}], "injection_id_1": "0x0D0",
        "injection_interval_2": [{START_S + 3}, {START_S + 3.1}], "injection_id_2": "0x123",
        "attack_technique": "flam",
    }},
    }}"""
    (tmp_path / "Attacks_metadata.json").write_text(text)
    assert read(path)[2] == [(1.0, 0xD0), (1.1, 0xD0), (3.05, 0x123)]


def test_every_frame_is_an_attack_while_an_id_is_suspended(tmp_path: Path) -> None:
    path = write(tmp_path / "EMS_suspension_attack.log")
    entry = {"suspension_interval": [1.0, 1.1], "suspension_id": "0x0D0"}
    (tmp_path / "Attacks_metadata.json").write_text(json.dumps({path.stem: entry}))
    assert read(path)[2] == [(1.0, 0xD0), (1.05, 0x123), (1.1, 0xD0)]


def test_a_file_of_the_logs_own_name_says_it_of_this_log(tmp_path: Path) -> None:
    path = write(tmp_path / "drive.log")
    (tmp_path / "drive.json").write_text(json.dumps({"injection_interval": [[1.0, 1.01], [2.0, 2.01]]}))
    assert read(path)[2] == [(1.0, 0xD0), (2.0, 0xD0)]


def test_labels_in_the_log_go_before_those_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path / "max_speedometer_attack_1.log", label=" 0")
    (tmp_path / "capture_metadata.json").write_text(json.dumps({"max_speedometer_attack_1": SPEED}))
    reader, _, attacks = read(path)
    assert (reader.format, reader.labelled, attacks) == ("candump_labelled", True, [])


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"injection_id": "790", "injection_interval": [1.0, 2.0]}, "1 to 2 s, ID 790"),
        ({"injection_id": "0x316", "injection_interval": [1000, 2000]}, "1000 to 2000 s, ID 316"),
        ({"injection_data_str": "XXEE", "injection_interval": [1.0, 2.0]}, "1 to 2 s, payload XXEE"),
    ],
)
def test_an_attack_that_marks_no_frame_is_told(entry: dict[str, object], told: str, tmp_path: Path) -> None:
    path = write(tmp_path / "drive.log")
    (tmp_path / "capture_metadata.json").write_text(json.dumps({"drive": entry}))
    reader, _, attacks = read(path)
    assert attacks == []
    (said,) = reader.report.summary()[1:]
    assert (
        said
        == f"drive.log: 1 attack marks no frame ({told}): correct the times (seconds), IDs (hexadecimal) or payloads"
    )


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"other": {}}', '{"drive": 7}', '{"drive": []}', "[" * 9_000])
def test_other_files_beside_a_log_say_nothing(content: str, tmp_path: Path) -> None:
    path = write(tmp_path / "drive.log")
    (tmp_path / "capture_metadata.json").write_text(content)
    reader, _, _ = read(path)
    assert (reader.labelled, reader.report.summary()) == (False, [])


def test_labels_beside_a_log_are_part_of_its_content(tmp_path: Path) -> None:
    path = write(tmp_path / "max_speedometer_attack_1.log")
    log, sidecar = LogFile(path=path, role=TEST, group="test", kind="attack"), tmp_path / "capture_metadata.json"
    hashes = []
    for begin in (2.0, 3.0):
        entry = {**SPEED, "injection_interval": [begin, 4.0]}
        sidecar.write_text(json.dumps({path.stem: entry, "another": {"elapsed_sec": begin}}, indent=len(hashes)))
        hashes.append(hash_logs([log], SilentReporter())[0].sha256)
    sidecar.write_text(json.dumps({"another": SPEED}))
    hashes.append(hash_logs([log], SilentReporter())[0].sha256)
    assert len(set(hashes)) == 3
    assert hashes[2] == sha256(path.read_bytes()).hexdigest()


def test_labels_that_changed_are_not_found_in_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "max_speedometer_attack_1.log")
    logs = [LogFile(path=path, role=LOG, group=path.name, kind="attack")]
    wanted, cache = CanDatasetSettings(name="road", window=5, stride=5), tmp_path / "cache"
    (tmp_path / "capture_metadata.json").write_text(json.dumps({path.stem: SPEED}))
    first = prepare(wanted, logs, cache, SilentReporter())
    assert find_prepared(wanted, logs, cache, SilentReporter()) is not None
    entry = {**SPEED, "injection_interval": [2.0, 3.0]}
    (tmp_path / "capture_metadata.json").write_text(json.dumps({path.stem: entry}))
    assert find_prepared(wanted, logs, cache, SilentReporter()) is None
    second = prepare(wanted, logs, cache, SilentReporter())
    assert (second.flat.label > 0).sum() < (first.flat.label > 0).sum()
