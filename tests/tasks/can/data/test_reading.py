"""The readers against writers of every format: what was written is what is read, whatever the blocks and line ends."""

import csv
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError, MissingDataError
from can_train_tasks.can.data.formats import set_option
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.reading import LogReader, decide_bases
from can_train_tasks.can.settings import FORMATS, CanDatasetSettings, ColumnSettings
from fakes.tasks_can_writers import COMPRESSORS, WRITERS, Message, Writer, car_hacking, write_log

AUTO = CanDatasetSettings()
EXAMPLES_PER_FORMAT = 4
FD_LENGTHS = (12, 16, 20, 24, 32, 48, 64)
BLOCK_BYTES = st.sampled_from([1, 30, 200, 1 << 20])
UNPACKED_ONLY = ("sqlite",)  # formats that are not read where they are compressed
FIXTURES = Path(__file__).parents[3] / "fixtures" / "can"
SHARED_LOGS = Path(__file__).parents[5] / "shared" / "data" / "can"
TRAFFIC = [Message(1_000_000 + 500 * i, 0x100 + i % 7, bytes([i % 256, 7]), attack=i % 5 == 0) for i in range(200)]


@st.composite
def traffic(draw: st.DrawFn, writer: Writer) -> list[Message]:
    steps = sorted(draw(st.lists(st.integers(0, writer.last_us // writer.step_us), min_size=1, max_size=8)))
    return [draw(messages(step * writer.step_us, writer)) for step in steps]


@st.composite
def messages(draw: st.DrawFn, microseconds: int, writer: Writer) -> Message:
    is_remote = writer.remote and draw(st.booleans())
    lengths = st.sampled_from(writer.lengths)
    if writer.fd:
        lengths |= st.sampled_from(FD_LENGTHS)
    payload = lengths.flatmap(lambda size: st.binary(min_size=size, max_size=size))
    return Message(
        microseconds,
        draw(st.integers(0, 0x7FF) | st.integers(0x800, 0x1FFF_FFFF)),
        b"" if is_remote else draw(payload),
        attack=draw(st.booleans()),
        remote=is_remote,
    )


@dataclass(frozen=True)
class Read:
    """What a reader made of a log."""

    reader: LogReader
    frames: Frames


def read(path: Path, wanted: CanDatasetSettings = AUTO, *, block_bytes: int = 1 << 20) -> Read:
    reader = LogReader(path, wanted, block_bytes=block_bytes)
    return Read(reader, Frames.concatenate(list(reader.blocks())))


def read_text(text: str | bytes, *, name: str = "log", block_bytes: int = 1 << 20) -> Read:
    with tempfile.TemporaryDirectory() as folder:
        return read(write_log(Path(folder) / name, text), block_bytes=block_bytes)


def assert_read_as_written(done: Read, written: Sequence[Message], writer: Writer) -> None:
    frames, any_attack = done.frames, writer.labelled and any(m.attack for m in written)
    assert done.reader.format == writer.format
    assert done.reader.labelled == (writer.labelled and (any_attack or not writer.attacks_labelled))
    assert done.reader.kinds == list(writer.kinds[: 1 + any_attack])
    assert done.reader.report.malformed == done.reader.report.backwards == 0
    assert np.round(frames.timestamp * 1e6).astype(np.int64).tolist() == [m.microseconds for m in written]
    if writer.exact:
        assert frames.timestamp.tolist() == [float(m.time) for m in written]
    assert frames.can_id.tolist() == [m.can_id for m in written]
    assert frames.length.tolist() == [len(m.payload) for m in written]
    width = 64 if any(len(m.payload) > 8 for m in written) else 8
    assert frames.payload.tolist() == [list(m.payload.ljust(width, b"\0")) for m in written]
    assert frames.label.tolist() == [int(writer.labelled and m.attack) for m in written]
    assert [getattr(frames, name).dtype for name in ("can_id", "length", "payload", "label")] == [
        np.uint32, np.uint8, np.uint8, np.uint8,
    ]  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=EXAMPLES_PER_FORMAT)
@given(data=st.data(), block_bytes=BLOCK_BYTES, suffix=st.sampled_from(["", *COMPRESSORS]))
def test_any_frames_written_in_any_format_are_read_back(
    name: str, data: st.DataObject, block_bytes: int, suffix: str
) -> None:
    writer = WRITERS[name]
    written = data.draw(traffic(writer))
    if writer.format in UNPACKED_ONLY:
        suffix = ""
    text = writer.write(written)
    assert_read_as_written(read_text(text, name=f"log{suffix}", block_bytes=block_bytes), written, writer)


@pytest.mark.parametrize("name", [name for name, writer in WRITERS.items() if writer.text])
@settings(max_examples=EXAMPLES_PER_FORMAT)
@given(data=st.data())
def test_line_ends_blank_lines_comments_and_byte_order_mark_change_nothing(name: str, data: st.DataObject) -> None:
    writer = WRITERS[name]
    written = data.draw(traffic(writer))
    between = st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \r\n", "\n# a comment\n"])
    lines = str(writer.write(written)).splitlines()
    text = "\ufeff" + lines[0] + "".join(data.draw(between) + line for line in lines[1:])
    assert_read_as_written(read_text(text, block_bytes=data.draw(BLOCK_BYTES)), written, writer)


@pytest.mark.parametrize("path", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_every_fixture_reads_without_a_malformed_row(path: Path) -> None:
    done = read(path)
    assert done.reader.format == WRITERS[path.name.partition(".")[0]].format
    assert done.reader.report.malformed == done.reader.report.backwards == 0
    assert 20 <= len(done.frames) <= 60


def test_there_is_a_fixture_for_every_format() -> None:
    assert {LogReader(path, AUTO).format for path in FIXTURES.iterdir()} == {*FORMATS, "pcap", "sqlite"}


@pytest.mark.parametrize(
    ("name", "log_format", "num_frames", "kinds"),
    [
        ("labeled_TSC1.csv", "columns", 21_568, ["benign", "high_torque_command"]),
        ("normal.log", "candump", 19_957, ["benign"]),
        ("Attack_free_dataset_10k.txt", "hcrl_text", 10_000, ["benign"]),
    ],
)
def test_real_logs_read_without_a_malformed_row(name: str, log_format: str, num_frames: int, kinds: list[str]) -> None:
    if not (SHARED_LOGS / name).exists():
        pytest.skip(f"{name} is not beside this checkout, in shared/data/can")
    done = read(SHARED_LOGS / name)
    assert (done.reader.format, len(done.frames), done.reader.kinds) == (log_format, num_frames, kinds)
    assert done.reader.report.malformed == done.reader.report.backwards == 0


def frames_of_python_can(path: Path) -> list[tuple[float, int, str, int]]:
    can = pytest.importorskip("can")
    reader = can.ASCReader(str(path), relative_timestamp=True)
    return [(round(m.timestamp, 6), m.arbitration_id, bytes(m.data).hex(), 0) for m in reader]


def frames_of_csv(path: Path, delimiter: str = ",") -> list[tuple[float, int, str, int]]:
    """Frames as the header of a quirk says: by hand, since python-can reads none of these files."""
    frames = []
    for row in csv.DictReader(path.read_text().splitlines(), delimiter=delimiter):
        if "DataBytes" in row:
            frames.append((float(row["TimestampEpoch"]), int(row["ID"], 16), row["DataBytes"].lower(), 0))
        elif "LEN" in row:
            data = "".join(row[f"D{number}"] for number in range(1, int(row["LEN"]) + 1))
            frames.append((int(row["Time Stamp"]) / 1e6, int(row["ID"], 16), data.lower(), 0))
        else:
            payload = bytes(int(row[f"d{number}"]) for number in range(int(row["dlc"])))
            frames.append((float(row["timestamp"]), int(row["can_id"]), payload.hex(), int(row["label"])))
    return frames


def frames_of_candump(path: Path) -> list[tuple[float, int, str, int]]:
    words = [line.split() for line in path.read_text().splitlines()]
    return [
        (float(time[1:-1]), int(frame.split("#")[0], 16), frame.split("#")[1].lower(), int(bool(label)))
        for time, _, frame, *label in words
    ]


@pytest.mark.parametrize(
    ("name", "truth", "num_attacks"),
    [
        ("asc_dlc_letter_payload_lost.asc", frames_of_python_can, 0),
        ("asc_j1939tp_lines.asc", frames_of_python_can, 0),
        ("canedge_hex_ids_without_letters.csv", partial(frames_of_csv, delimiter=";"), 0),
        ("csv_decimal_bytes_small.csv", frames_of_csv, 0),
        ("savvycan_padded_dlc.csv", frames_of_csv, 0),
        ("labels_only_on_attack_rows.log", frames_of_candump, 5),
    ],
)
def test_logs_as_public_bug_reports_describe_them_are_read_frame_by_frame(
    name: str, truth: Callable[[Path], list[tuple[float, int, str, int]]], num_attacks: int
) -> None:
    path = SHARED_LOGS / "quirks" / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout, in shared/data/can/quirks")
    done = read(path)
    frames = done.frames
    payloads = [bytes(row[:size]).hex() for row, size in zip(frames.payload, frames.length, strict=True)]
    columns = (frames.timestamp.round(6).tolist(), frames.can_id.tolist(), payloads, frames.label.tolist())
    assert list(zip(*columns, strict=True)) == truth(path)
    assert (done.reader.report.malformed, int((frames.label > 0).sum())) == (0, num_attacks)


def test_labels_that_begin_after_the_first_lines_are_read_and_counted(tmp_path: Path) -> None:
    rows = [f"({i / 1000:.6f}) can0 123#{i % 256:02X}{' dos' if i >= 4990 else ''}" for i in range(5000)]
    done = read(write_log(tmp_path / "drive.log", "\n".join(rows) + "\n"), block_bytes=20_000)
    assert (done.reader.labelled, done.reader.kinds, int(done.frames.label.sum())) == (True, ["benign", "dos"], 10)
    assert done.reader.report.summary() == [
        "drive.log: 10 rows have a label; the 4,990 rows without a label are benign"
    ]


def test_a_log_that_begins_with_attacks_may_lack_labels_later(tmp_path: Path) -> None:
    done = read(
        write_log(tmp_path / "log", "".join(f"(1.{i:04}) can0 1#{'' if i > 1500 else ' 1'}\n" for i in range(3000)))
    )
    assert (len(done.frames), int(done.frames.label.sum())) == (3000, 1501)


def test_rows_of_which_each_should_have_a_label_are_no_benign_rows_without_it(tmp_path: Path) -> None:
    rows = [f"(1.{i:03}) can0 1# {i % 2}\n" for i in range(200)]
    report = read(write_log(tmp_path / "log", "".join([*rows, "(2.0) can0 1#\n"]))).reader.report
    assert (report.frames, report.reasons) == (200, {"the label is missing": 1})


def test_a_remedy_that_leaves_rows_out_names_their_ids_and_labels(tmp_path: Path) -> None:
    rows = ["timestamp,arbitration_id,dlc,data,label"]
    rows += [f"{i / 100},0x{0x100 + i % 4:X},2,{'00' if i % 4 == 1 else '0011'},{'dos' if i % 8 == 1 else 'normal'}"
             for i in range(40)]  # fmt: skip
    path = write_log(tmp_path / "drive.csv", "\n".join([*rows, "0.41,0x103,2,001", "rubbish"]))
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.remedy == (
        "Repair the log, or allow more with `--set dataset.max_malformed=0.29`, which leaves out all 10 rows of ID "
        "101, 1 of 11 rows of ID 103, 1 row without a readable ID; the labels of these rows are 5 × 'dos', "
        "5 × 'normal'"
    )
    summary = read(path, CanDatasetSettings(max_malformed=0.29)).reader.report.summary()
    assert summary[1] == (
        "drive.csv: left out are all 10 rows of ID 101, 1 of 11 rows of ID 103, 1 row without a readable ID; the "
        "labels of these rows are 5 × 'dos', 5 × 'normal'"
    )


@pytest.mark.parametrize(("decimal", "name"), [(False, "05D"), (True, "05D (in the log: 93)")])
def test_ids_of_malformed_rows_are_written_as_in_alarms(decimal: bool, name: str, tmp_path: Path) -> None:
    rows = ["timestamp,id,dlc,data", *[f"{i}.5,{93 if decimal else '5d'},{2 if i else 3},0011" for i in range(50)]]
    path = write_log(tmp_path / "drive.csv", "\n".join(rows))
    summary = read(path, CanDatasetSettings(max_malformed=0.1, id_base="dec" if decimal else "hex")).reader.report
    assert f"drive.csv: left out is 1 of 50 rows of ID {name}" in summary.summary()


def test_payloads_that_are_filled_up_are_cut_and_counted(tmp_path: Path) -> None:
    rows = ["timestamp,arbitration_id,dlc,data", *[f"{i}.5,0x1,{i % 9},{bytes(range(8)).hex()}" for i in range(18)]]
    done = read(write_log(tmp_path / "drive.csv", "\n".join(rows)))
    assert done.frames.length.tolist() == [i % 9 for i in range(18)]
    assert [row[size:].any() for row, size in zip(done.frames.payload, done.frames.length, strict=True)] == [False] * 18
    assert done.reader.report.summary() == ["drive.csv: 16 payloads have more bytes than their DLC, and were cut to it"]


def test_what_is_left_out_once_is_told_in_the_singular(tmp_path: Path) -> None:
    rows = [
        "(1.0) can0 123#00 attack", "(1.1) can0 123#00", "(2.0) can0 45123#81:00:12345678#1122",
        "(2.1) can0 20000004#0000000000000000", "(2.0) can0 123#00", "(2.0",
    ]  # fmt: skip
    report = read(write_log(tmp_path / "drive.log", "\n".join(rows)), CanDatasetSettings(max_malformed=1)).reader.report
    assert report.summary() == [
        "drive.log: 1 error frame was left out",
        "drive.log: 1 CAN XL frame was left out: CAN XL has no CAN IDs",
        "drive.log: 1 row has a label; the 2 rows without a label are benign",
        "drive.log: 1 of 4 rows is malformed and left out: 1 × the row is truncated or not of this format",
        "drive.log: left out is 1 row without a readable ID",
        "drive.log, line 6: the row is truncated or not of this format, in '(2.0'",
    ]


def write_csv(path: Path, ids: Sequence[str], late: str = "", header: str = "timestamp,can_id,dlc,data") -> Path:
    """Writes more rows than the first lines have by which a format is recognised; the last ones have the ID `late`."""
    rows = [f"{i / 1000:.3f},{ids[i % len(ids)]},2,{i % 65536:04x}" for i in range(60_000)]
    last = [f"{60 + i / 1000:.3f},{late or ids[0]},2,00ff" for i in range(5)]
    return write_log(path, "\n".join([header, *rows, *last]))


def test_all_logs_of_a_folder_have_ids_of_one_base(tmp_path: Path) -> None:
    plain = write_csv(tmp_path / "a.csv", ["110", "220"])
    telling = write_csv(tmp_path / "b.csv", ["110", "330"], late="7E8")
    labelled = write_csv(tmp_path / "c.csv", ["110", "220"], header="timestamp,can_id,dlc,data,label")
    alone, alone_notes = decide_bases([plain], AUTO)
    together, notes = decide_bases([plain, telling, labelled], AUTO)
    assert [settings.id_base for settings in together.values()] == ["hex"] * 3
    assert (alone[plain].id_base, len(alone_notes), notes) == ("dec", 1, [])
    assert alone_notes[0].startswith("a.csv: CAN IDs were read as decimal numbers")


def test_a_decimal_log_beside_hexadecimal_logs_with_its_header_is_decimal(tmp_path: Path) -> None:
    hexadecimal = [write_csv(tmp_path / name, ["110", "1A0", "7E8"]) for name in ("a.csv", "b.csv")]
    decimal = write_csv(tmp_path / "c.csv", ["272", "416", "2024"])
    bases, notes = decide_bases([*hexadecimal, decimal], AUTO)
    assert [settings.id_base for settings in bases.values()] == ["hex", "hex", "dec"]
    assert notes == [
        "c.csv: CAN IDs were read as decimal numbers, as the log tells, although those of other logs are hexadecimal"
    ]


def test_logs_of_different_sources_in_one_folder_decide_each_for_itself(tmp_path: Path) -> None:
    hexadecimal = write_log(tmp_path / "a.csv", "timestamp,id,data\n1.5,12A,00\n1.6,12B,00\n")
    decimal = write_log(tmp_path / "b.csv", "time,can_id,data\n1.5,419356416,00\n1.6,419356417,00\n")
    bases, _ = decide_bases([hexadecimal, decimal], AUTO)
    assert [bases[path].id_base for path in (hexadecimal, decimal)] == ["hex", "dec"]


def test_a_base_that_was_chosen_is_taken(tmp_path: Path) -> None:
    path = write_log(tmp_path / "a.csv", "timestamp,id,data\n1.5,110,00\n")
    chosen, notes = decide_bases([path], CanDatasetSettings(id_base="hex", byte_base="hex"))
    assert (chosen[path].id_base, notes) == ("hex", [])
    assert read(path, CanDatasetSettings(id_base="hex")).frames.can_id.tolist() == [0x110]


AS_TRAINED = "as in the training data, because the log does not tell"


@pytest.mark.parametrize(
    ("trained", "ids", "base", "why"),
    [
        ("hex", ["110", "220"], "hex", AS_TRAINED),
        ("dec", ["110", "220"], "dec", AS_TRAINED),
        ("hex", [f"{i}" for i in range(100, 150)], "hex", AS_TRAINED),
        ("hex", ["110", "1234"], "dec", "as the log tells, although those of the training data are hexadecimal"),
        ("dec", ["110", "7E8"], "hex", "as the log tells, although those of the training data are decimal"),
        ("hex", ["110", "7E8"], "hex", ""),
    ],
)
def test_the_training_data_tell_the_base_of_a_log_that_does_not_tell(
    trained: str, ids: list[str], base: str, why: str, tmp_path: Path
) -> None:
    rows = [f"{i}.5,{can_id},00" for i, can_id in enumerate(ids)]
    path = write_log(tmp_path / "a.csv", "\n".join(["timestamp,id,data", *rows]))
    decided, notes = decide_bases([path], CanDatasetSettings(id_base=f"auto_{trained}"))
    words = {"hex": "hexadecimal", "dec": "decimal"}
    other = "dec" if base == "hex" else "hex"
    note = (
        f"a.csv: CAN IDs were read as {words[base]} numbers, {why}; "
        f"if they are {words[other]}, use `--set dataset.id_base={other}`"
    )
    assert decided[path].id_base == base
    assert notes == ([note] if why else [])


def test_a_header_that_lacks_one_column_is_told_which_and_the_setting_that_names_it(tmp_path: Path) -> None:
    path = write_log(tmp_path / "a.csv", "time,who,payload,bus\n" + "".join(f"{i},1{i % 3}A,00,0\n" for i in range(9)))
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.value == (
        f"{path} has timestamp in 'time', data in 'payload', and no id; 'who' is not recognised"
    )
    assert caught.value.remedy == "Name the column: `--set dataset.columns.id=who`"
    assert read(path, CanDatasetSettings(columns=ColumnSettings(id="who"))).frames.can_id[0] == 0x10A


@pytest.mark.parametrize(
    ("header", "told", "setting"),
    [
        ("time,can,len,payload", "no id; 'can' is not recognised", "id=can"),
        ("when,id,len,payload", "no timestamp; 'when' is not recognised", "timestamp=when"),
        ("time,id,len,content", "no data; 'content' is not recognised", "data=content"),
    ],
)
def test_a_header_with_an_unknown_column_is_refused_where_its_rows_are_those_of_another_format(
    header: str, told: str, setting: str, tmp_path: Path
) -> None:
    rows = [f"{i}.5,12A,8,{bytes(range(8)).hex()}" for i in range(300)]
    path = write_log(tmp_path / "a.csv", "\n".join([header, *rows]))
    with pytest.raises(DataError) as caught:
        read(path)
    assert told in str(caught.value.value)
    assert caught.value.remedy == f"Name the column: `--set dataset.columns.{setting}`"
    role, _, name = setting.partition("=")
    done = read(path, CanDatasetSettings(columns=ColumnSettings(**{role: name})))
    assert (len(done.frames), done.reader.report.malformed) == (300, 0)
    done = read(write_log(tmp_path / "b.csv", "\n".join(rows)))
    assert (done.reader.format, len(done.frames), done.reader.report.malformed) == ("car_hacking", 300, 0)


@pytest.mark.parametrize("header", ["time,id,size,payload,label", "time,id,len,payload,verdict"])
def test_a_length_or_a_label_of_another_name_is_a_column_of_no_role(header: str, tmp_path: Path) -> None:
    rows = [f"{i}.5,12A,8,{bytes(range(8)).hex()},0" for i in range(300)]
    done = read(write_log(tmp_path / "a.csv", "\n".join([header, *rows])))
    assert (done.reader.format, len(done.frames), done.reader.report.malformed) == ("columns", 300, 0)
    assert done.reader.labelled == header.endswith("label")


def test_a_column_that_holds_something_else_is_told_and_the_setting_that_names_another(tmp_path: Path) -> None:
    path = write_log(tmp_path / "a.csv", "time,id,data,ECU id\n1.5,engine,00,12A\n1.6,brake,00,12B\n")
    with pytest.raises(
        DataError, match=r"The column 'id' does not hold the id of the CSV log's frames: .*'1.5,engine,00,12A'"
    ) as caught:
        read(path)
    assert caught.value.remedy == "Name the column: `--set 'dataset.columns.id=\"ECU id\"'`"


@pytest.mark.parametrize("brackets", ["[]", "()"])
@pytest.mark.parametrize("is_decimal", [True, False])
def test_payloads_that_are_lists_with_commas_are_read(brackets: str, *, is_decimal: bool) -> None:
    payloads = [bytes([i % 256, 200, 7]) if i % 9 else b"" for i in range(50)]
    form, first, last = "d" if is_decimal else "02x", brackets[0], brackets[1]
    # NumPy writes blanks beside the brackets, and pandas an empty cell for a missing list.
    lists = [f"{first} {', '.join(f'{byte:{form}}' for byte in payload)} {last}" for payload in payloads]
    lists[9] = ""
    rows = [f'{i}.5,12A,"{text}",{int(i > 40)}' for i, text in enumerate(lists)]
    done = read_text("\n".join(["time,id,data,label", *rows, ""]))
    assert [bytes(row[:size]) for row, size in zip(done.frames.payload, done.frames.length, strict=True)] == payloads
    assert done.frames.label.astype(bool).tolist() == [i > 40 for i in range(50)]


LABELLED = "timestamp,id,data,{name}\n" + "".join(f"{i}.5,12A,00,{{{i % 2}}}\n" for i in range(20))


@pytest.mark.parametrize("word", ["", "nan", "NULL", "n/a", "-", '"NaN"'])
def test_a_cell_without_a_value_is_no_label(word: str) -> None:
    done = read_text(LABELLED.format(word, word, name="label"))
    assert (done.reader.labelled, done.reader.report.summary()) == (False, [])
    done = read_text(LABELLED.format(word, "DoS", name="label"))
    assert (done.reader.labelled, done.frames.label.tolist()) == (True, [0, 1] * 10)
    assert done.reader.report.summary() == ["log: 10 rows have a label; the 10 rows without a label are benign"]


def test_a_benign_value_that_a_person_names_is_a_label_although_it_looks_missing(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", LABELLED.format("-", "-", name="label"))
    assert read(path, CanDatasetSettings(benign_values=["-"])).reader.labelled


def test_labels_that_are_all_attacks_are_told_with_the_setting_for_benign_ones(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", LABELLED.format("idle", "DoS", name="label"))
    (note,) = read(path).reader.report.summary()
    assert "all 20 frames are attacks by the labels 'DoS' (10), 'idle' (10); " in note
    option = note.partition("`")[2].rstrip("`").replace("LABEL", "idle")
    chosen = CanDatasetSettings(benign_values=typed(option))
    assert read(path, chosen).frames.label.tolist() == [0, 1] * 10


@pytest.mark.parametrize("name", ["y", "verdict", "Befund der Prüfung", "it's bad", 'a "b"'])
def test_a_column_that_may_have_labels_is_told_with_the_setting_that_reads_it(name: str, tmp_path: Path) -> None:
    cell = f'"{name.replace(chr(34), 2 * chr(34))}"'
    path = write_log(tmp_path / "log", LABELLED.format("0", "1", name=cell))
    done = read(path)
    (note,) = done.reader.report.summary()
    assert (done.reader.labelled, f"its column {name!r} is not recognised" in note) == (False, True)
    columns = ColumnSettings(label=typed(note.partition("`")[2].rstrip("`")))
    assert read(path, CanDatasetSettings(columns=columns)).frames.label.tolist() == [0, 1] * 10


def test_several_columns_that_may_have_labels_are_told_and_those_of_known_tools_are_not() -> None:
    text = "index,timestamp,id,data,extended,score,verdict\n" + "".join(f"{i},{i}.5,12A,00,0,1,2\n" for i in range(20))
    (note,) = read_text(text).reader.report.summary()
    assert "its columns 'score', 'verdict' are not recognised" in note
    assert "`--set dataset.columns.label=NAME`" in note
    assert read_text(text.replace(",score,verdict", ",ts,Bus").replace("12A", "0x12A")).reader.report.summary() == []


@pytest.mark.parametrize(
    "name",
    ["Zähler", "It's time", "true", "7", 'a"b', "a\\", 'a\\"b', "$HOME", "`date`", "Time [s], all", "x=y", "a b"],
)
def test_an_option_that_is_told_can_be_typed(name: str) -> None:
    assert typed(set_option("dataset.columns.timestamp", name)) == name
    assert typed(set_option("dataset.benign_values", [name, "b"])) == [name, "b"]


def typed(option: str) -> Any:
    """The value of an option as a shell and Hydra read it."""
    flag, override = shlex.split(option)
    assert flag == "--set"
    return OverridesParser.create().parse_override(override).value()


def test_attacks_without_a_name_are_called_as_the_caller_says(tmp_path: Path) -> None:
    reader = LogReader(write_log(tmp_path / "fuzzy.csv", car_hacking(TRAFFIC)), AUTO, kind="fuzzing")
    assert [frames.label.sum() for frames in reader.blocks()] == [40]
    assert reader.kinds == ["benign", "fuzzing"]


def test_a_log_can_be_read_twice(tmp_path: Path) -> None:
    reader = LogReader(write_log(tmp_path / "log", car_hacking(TRAFFIC)), AUTO)
    first, second = (Frames.concatenate(list(reader.blocks())) for _ in range(2))
    assert first.label.tolist() == second.label.tolist()
    assert reader.report.frames == len(TRAFFIC)


@settings(max_examples=EXAMPLES_PER_FORMAT)
@given(position=st.integers(0, 199), blanks=st.integers(0, 3), block_bytes=st.integers(200, 2_000))
def test_a_malformed_row_is_left_out_and_told_with_its_line(position: int, blanks: int, block_bytes: int) -> None:
    lines = car_hacking(TRAFFIC).splitlines()
    text = "\n".join([*[""] * blanks, *lines[:position], "1.5,0316,8,05,21", *lines[position:]])
    report = read_text(text, block_bytes=block_bytes).reader.report
    assert (report.frames, report.malformed, report.reasons["the DLC disagrees with the payload"]) == (200, 1, 1)
    assert (report.examples[0].line, report.examples[0].text) == (position + blanks + 1, "1.5,0316,8,05,21")
    assert "1 of 201 rows is malformed and left out: 1 × the DLC disagrees" in report.summary()[0]


def test_too_many_malformed_rows_are_refused_with_file_line_reason_and_remedy(tmp_path: Path) -> None:
    lines = car_hacking(TRAFFIC).splitlines()
    path = write_log(tmp_path / "log.csv", "\n".join([*lines[:50], "", *["1.5,0316,2,05,zz,R"] * 3, *lines[50:]]))
    with pytest.raises(DataError, match=r"log\.csv:52: the payload is not made of whole") as caught:
        read(path)
    assert str(caught.value).startswith(
        f"3 of 203 rows of {path} are malformed or run backwards in time, at most 1.00%"
    )
    assert "--set dataset.max_malformed=0.02" in caught.value.remedy
    assert len(read(path, CanDatasetSettings(max_malformed=0.02)).frames) == 200


@pytest.mark.parametrize("time", ["0.000000", "1700000000.000000"])
def test_a_clock_that_stands_still_is_refused(time: str, tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", f"({time}) can0 12A#00\n" * 60)
    with pytest.raises(DataError, match=r"clock of the log stands still: all 60 frames of .* time 1?[07]+\.") as caught:
        read(path, block_bytes=100)
    assert "dataset.columns.timestamp=NAME" in caught.value.remedy
    path.write_text(path.read_text() + "(1700000000.5) can0 12A#00\n")
    assert len(read(path, block_bytes=100).frames) == 61
    assert len(read_text(f"({time}) can0 12A#00\n" * 10).frames) == 10


def test_exactly_the_allowed_share_of_malformed_rows_is_read(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", car_hacking(TRAFFIC[:198]) + "nonsense\n" * 2)
    assert read(path).reader.report.malformed == 2


def test_time_that_runs_backwards_keeps_the_order_and_counts_as_bad(tmp_path: Path) -> None:
    late = [Message(9_000_000, 1), *TRAFFIC]
    done = read(write_log(tmp_path / "log.csv", car_hacking(late)), block_bytes=1)
    assert done.reader.report.backwards == 1
    assert done.frames.timestamp[:2].tolist() == [9.0, 1.0]
    assert "line 2: time runs backwards by more than 10 ms" in done.reader.report.summary()[1]
    with pytest.raises(DataError, match=r"log\.csv:2: time runs backwards"):
        read(tmp_path / "log.csv", CanDatasetSettings(max_malformed=0.001))


def test_bad_rows_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    late = [Message(9_000_000, 1), *TRAFFIC]
    done = read(write_log(tmp_path / "log.csv", car_hacking(late) + "nonsense\n"))
    assert [row.line for row in done.reader.report.examples] == [2, 202]


def test_steps_back_of_ten_milliseconds_are_told_and_not_counted(tmp_path: Path) -> None:
    start = 1_700_000_000_000_000
    saw = [Message(start + 1_000 * i - (i % 2) * 11_000, 1) for i in range(50)]
    done = read(write_log(tmp_path / "log", car_hacking(saw)), CanDatasetSettings(max_malformed=0.0))
    assert (done.reader.report.backwards, done.reader.report.jitter) == (0, 25)
    assert "time steps back at 25 rows, by at most 10.0 ms" in done.reader.report.summary()[0]


@pytest.mark.parametrize("block_bytes", [1, 10**6])
def test_pauses_are_told_with_their_line_and_their_time(block_bytes: int, tmp_path: Path) -> None:
    start = 1_700_000_000_000_000
    drives = [Message(start + day * 86_400_000_000 + 10_000 * i, 1) for day in (0, 1, 3) for i in range(150)]
    done = read(write_log(tmp_path / "log.csv", car_hacking(drives)), block_bytes=block_bytes)
    (told,) = done.reader.report.summary()
    jumps = "log.csv: time jumps ahead by 10 s or more at 2 rows, first at line 151, by 259,197 s in all"
    assert told == f"{jumps}: that time counts as no traffic"


def labelled_rows(*columns: str, rows: int = 200) -> str:
    """Rows of which every fourth is an attack; `{a}` and `{b}` stand for 1 of an attack, and of a benign frame."""
    head = ",".join(column.partition("=")[0] for column in columns)
    lines = [
        ",".join(column.partition("=")[2].format(a=int(i % 4 == 0), b=int(i % 4 > 0)) for column in columns)
        for i in range(rows)
    ]
    frames = [f"{i / 1000:.6f},{0x1A0 + i % 9:03X},01A2" for i in range(rows)]
    return f"timestamp,id,data,{head}\n" + "".join(
        f"{frame},{line}\n" for frame, line in zip(frames, lines, strict=True)
    )


@pytest.mark.parametrize(
    "columns",
    [("label=", "attack={a}"), ("label=NaN", "attack={a}"), ("attack={a}", "label="), ("label={a}", "class=")],
)
def test_of_several_columns_of_labels_the_one_that_has_some_is_read(columns: tuple[str, ...], tmp_path: Path) -> None:
    done = read(write_log(tmp_path / "log.csv", labelled_rows(*columns)))
    assert (done.frames.label > 0).tolist() == [i % 4 == 0 for i in range(200)]


@pytest.mark.parametrize("name", ["is_benign", "Normal", "isNormal", "legitimate"])
@pytest.mark.parametrize("named", [False, True])
def test_a_column_of_benign_frames_marks_the_others_as_attacks(name: str, named: bool, tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", labelled_rows(f"{name}={{b}}"))
    wanted = CanDatasetSettings(columns=ColumnSettings(label=name)) if named else AUTO
    done = read(path, wanted)
    assert (done.frames.label > 0).tolist() == [i % 4 == 0 for i in range(200)]
    assert done.reader.kinds == ["benign", "attack"]
    assert done.reader.report.summary() == [
        f"log.csv: true cells of its column {name!r} mark benign frames, and false ones attacks"
    ]


def test_words_that_are_named_benign_go_before_the_name_of_their_column(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", labelled_rows("normal={a}"))
    done = read(path, CanDatasetSettings(columns=ColumnSettings(label="normal"), benign_values=["0"]))
    assert (done.frames.label > 0).tolist() == [i % 4 == 0 for i in range(200)]


def test_a_clock_of_whole_seconds_is_told(tmp_path: Path) -> None:
    rows = "".join(f"{1_600_000_000 + i // 100},{0x1A0 + i % 9:03X},01A2\n" for i in range(500))
    (told,) = read(write_log(tmp_path / "log.csv", f"timestamp,id,data\n{rows}")).reader.report.summary()
    assert told == (
        "log.csv: 100 frames on average have the same time, so that gaps between frames are lost: record times with "
        "microseconds"
    )


def test_a_slow_bus_has_no_pauses(tmp_path: Path) -> None:
    slow = [Message(30_000_000 * i, 1 + i % 3) for i in range(40)]
    assert read(write_log(tmp_path / "log.csv", car_hacking(slow))).reader.report.summary() == []


def test_more_frames_than_a_bus_carries_are_told(tmp_path: Path) -> None:
    rows = [f"{44087.5 + i * 0.001 / 86400:.12f},{0x1A0 + i % 9:03X},0102\n" for i in range(200)]
    done = read(write_log(tmp_path / "log.csv", "timestamp,id,data\n" + "".join(rows)))
    (told,) = done.reader.report.summary()
    assert told.endswith(
        "frames a second are more than a bus carries (30,000): its times may be in another unit, such as days; write "
        "them in seconds"
    )


@pytest.mark.parametrize(
    "text", ["", "\n\n", "\ufeff", "# only\n# comments\n", "timestamp,arbitration_id,data_field,attack\n"]
)
def test_a_log_without_rows_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"The log (is empty|holds no rows)"):
        LogReader(write_log(tmp_path / "log", text), AUTO)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.bin").write_bytes(b"LOG?\x90\0\0\0" + bytes(range(256)))
    with pytest.raises(DataError, match=r"The log is binary.*log\.bin\.\n.*logconvert FILE log\.asc"):
        LogReader(tmp_path / "log.bin", AUTO)


@pytest.mark.parametrize("rubbish", [b"\x00\x00\x00", b"\x01\x02", b"\xff\xfe", b"\x01\xff\x01"])
def test_binary_rubbish_inside_a_log_is_a_malformed_row(rubbish: bytes, tmp_path: Path) -> None:
    lines = car_hacking(TRAFFIC).encode().splitlines(keepends=True)
    (tmp_path / "log").write_bytes(b"".join([*lines, rubbish, b"\n", *lines]))
    report = read(tmp_path / "log", CanDatasetSettings(max_malformed=0.01)).reader.report
    assert (report.frames, report.backwards) == (2 * len(TRAFFIC), 1)
    assert report.reasons == {"the row is truncated or not of this format": 1}
    assert report.examples[0].line == len(TRAFFIC) + 1


def test_a_remedy_names_the_column_of_times_and_never_the_numbers_of_rows(tmp_path: Path) -> None:
    rows = [f"{i},{i * 0.01:.3f},0.010,{0x1A0 + i % 9:03X},0102\n" for i in range(1, 60)]
    for names, column in (("Line,Abs Time(Sec),Rel Time (Sec)", "Abs Time(Sec)"), ("Line,moment,gap", "moment")):
        with pytest.raises(DataError, match="no timestamp column") as caught:
            LogReader(write_log(tmp_path / "log.csv", f"{names},id,data\n{''.join(rows)}"), AUTO)
        assert column in caught.value.remedy
    with pytest.raises(DataError, match="no timestamp column") as caught:
        LogReader(write_log(tmp_path / "log.csv", "Line,id,data\n" + "".join(re.sub(r",.*?,.*?,", ",", row)
                                                                            for row in rows)), AUTO)  # fmt: skip
    assert caught.value.remedy == "Correct the log, or name the column: `--set dataset.columns.timestamp=NAME`"


def test_labels_behind_the_last_named_column_are_told_with_their_counts(tmp_path: Path) -> None:
    rows = [f"{i / 100},{0x1A0 + i % 9:03X},0102,{int(i % 4 == 0)}\n" for i in range(60)]
    read_late = read(write_log(tmp_path / "log.csv", f"time,id,data\n{''.join(rows)}")).reader
    told = "log.csv: the cells behind the last column were read as labels: '0' (45), '1' (15)"
    assert told in read_late.report.summary()
    named = read(write_log(tmp_path / "log.csv", f"time,id,data,label\n{''.join(rows)}")).reader
    assert (named.report.attacks, named.report.summary()) == (15, [])


@pytest.mark.parametrize("block_bytes", [200, 1 << 20])
def test_r_and_t_behind_all_rows_of_candump_are_told_with_the_setting_that_reads_labels(
    tmp_path: Path, block_bytes: int
) -> None:
    rows = [f"({1600000000 + i / 100:.6f}) can0 1A0#0102 {'T' if i % 5 == 4 else 'R'}\n" for i in range(60)]
    path = write_log(tmp_path / "log", "".join(rows))
    directed = read(path, block_bytes=block_bytes).reader
    (note,) = directed.report.summary()
    assert note.startswith("log: R (48 rows) and T (12 rows) at the end were read as the direction")
    assert not directed.labelled
    (option,) = re.findall("`--set dataset.format=(.*)`", note)
    labelled = read(path, CanDatasetSettings(format=option), block_bytes=block_bytes).reader
    assert (labelled.report.attacks, labelled.report.summary()) == (12, [])
    received = write_log(tmp_path / "log", "".join(rows).replace(" T", " R"))
    assert read(received).reader.report.summary() == []


def test_car_hacking_rows_of_can_fd_are_read(tmp_path: Path) -> None:
    rows = [f"{1.5 + i / 100:.2f},0{0x1A0 + i % 9:03x},{size},{'0a,' * size}{'RT'[i % 7 == 0]}\n"
            for i, size in enumerate((8, 16, 64, 5, 12, 0) * 10)]  # fmt: skip
    done = read(write_log(tmp_path / "log.csv", "".join(rows)))
    assert (done.reader.format, len(done.frames), done.reader.report.malformed) == ("car_hacking", 60, 0)
    assert done.frames.length[:6].tolist() == [8, 16, 64, 5, 12, 0]
    assert done.frames.payload[2].tolist() == [10] * 64
    # A length that no frame has is told by a row that has it, not by the first row.
    bad = [*rows[:20], *[row.replace(",16,", ",13,", 1).replace("0a,", "", 3) for row in rows[1::6] * 6]]
    with pytest.raises(
        DataError, match=r"log\.csv:21: '1\.51,01a1,13,.*: no CAN FD frame has a payload of this length"
    ):
        LogReader(write_log(tmp_path / "log.csv", "".join(bad)), AUTO)


def test_an_unrecognised_log_is_refused_with_the_formats_and_its_first_line(tmp_path: Path) -> None:
    path = write_log(tmp_path / "poem.txt", "\n# a comment\nRoses are red\n")
    with pytest.raises(DataError, match=r"poem\.txt:3: 'Roses are red'") as caught:
        LogReader(path, AUTO)
    assert all(name in str(caught.value) for name in FORMATS)


def test_a_csv_file_whose_rows_do_not_fit_its_header_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", "time,id,data\n2020-01-01,1,00\n2020-01-02,2,00\n")
    with pytest.raises(DataError, match=r"log\.csv:2: '2020-01-01,1,00': the timestamp is not a number"):
        LogReader(path, AUTO)


def test_error_frames_speak_for_the_format_that_knows_them(tmp_path: Path) -> None:
    rows = ["1.5,0x1,0,0,0,0,", *["1.6,0x0,0,0,1,0,"] * 5]
    path = write_log(tmp_path / "log", "\n".join(["timestamp,arbitration_id,extended,remote,error,dlc,data", *rows]))
    done = read(path)
    assert (done.reader.format, len(done.frames), done.reader.report.error_frames) == ("python_can", 1, 5)


def test_a_log_of_another_format_than_was_asked_for_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", car_hacking(TRAFFIC))
    with pytest.raises(DataError, match="in another format than candump, which was asked for"):
        LogReader(path, CanDatasetSettings(format="candump"))
    with pytest.raises(DataError, match="in another format than hcrl_challenge, which was asked for"):
        LogReader(path, CanDatasetSettings(format="hcrl_challenge"))


def test_a_log_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", car_hacking(TRAFFIC))
    blocks = LogReader(path, AUTO, block_bytes=1_000).blocks()
    next(blocks)
    with path.open("a") as log:
        log.write("9.0,0001,0,R\n")
    with pytest.raises(DataError, match="changed while it was read"):
        list(blocks)


def test_a_log_that_is_replaced_by_one_of_the_same_size_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", car_hacking(TRAFFIC))
    blocks = LogReader(path, AUTO, block_bytes=1_000).blocks()
    next(blocks)
    other = write_log(tmp_path / "other", car_hacking(TRAFFIC))
    times = path.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    with pytest.raises(DataError, match="changed while it was read"):
        list(blocks)


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "log.gz", car_hacking(TRAFFIC)).read_bytes()
    (tmp_path / "log.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="is no whole gzip file"):
        LogReader(tmp_path / "log.gz", AUTO)


def test_a_file_that_is_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="The log does not exist"):
        LogReader(tmp_path / "nothing", AUTO)
    with pytest.raises(DataError, match="The log cannot be read"):
        LogReader(tmp_path, AUTO)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", "x" * (3 << 20))
    with pytest.raises(DataError, match="A line of the log is longer than"):
        LogReader(path, AUTO)
    path = write_log(tmp_path / "log", car_hacking(TRAFFIC) + "x" * (3 << 20))
    with pytest.raises(DataError, match="A line of the log is longer than"):
        read(path, block_bytes=1_000)


def read_times(path: Path, times: list[float]) -> LogReader:
    path.write_text("".join(f"({time:.6f}) can0 123#00\n" for time in times))
    reader = LogReader(path, CanDatasetSettings())
    for _ in reader.blocks():
        pass
    return reader


def test_a_clock_that_jitters_is_only_reported(tmp_path: Path) -> None:
    reader = read_times(tmp_path / "drive.log", [10 + index / 1000 - (index % 3 == 2) * 0.003 for index in range(30)])
    assert reader.report.jitter == 10
    assert "time steps back at 10 rows" in reader.report.summary()[0]


def test_a_log_in_reverse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"Time runs backwards in the log: .*drive.log steps back at 29 of 30 frames.*\n.*Sort"
    ):
        read_times(tmp_path / "drive.log", [10 - index / 1000 for index in range(30)])


@pytest.mark.parametrize("block_bytes", [1, 60, 1 << 20])
def test_a_frame_is_found_again_by_the_number_of_its_line(block_bytes: int, tmp_path: Path) -> None:
    rows = ["timestamp,arbitration_id,data_field,attack", "1.0,100,00,0", "", "no frame", "2.0,101,00,0", "3.0,102,,1"]
    (tmp_path / "log.csv").write_text("\n".join([*rows, *[f"{4 + i}.0,103,00,0" for i in range(5)]]) + "\n")
    reader = LogReader(tmp_path / "log.csv", AUTO, block_bytes=block_bytes)
    assert reader.line_numbers(np.array([0, 2, 1, 7])).tolist() == [2, 6, 5, 11]
    assert reader.id_base == "hex"
