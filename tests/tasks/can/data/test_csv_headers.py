"""CSV files with a header: which column is what, and in which base IDs are written."""

from collections.abc import Iterable

import polars as pl
import pytest

from can_train.errors import ConfigError, DataError
from can_train_tasks.can.data.formats import header_grammars, looks_hexadecimal, too_large_for_hexadecimal
from can_train_tasks.can.data.grammar import Grammar, parse_rows
from can_train_tasks.can.data.reading import LabelEncoder
from can_train_tasks.can.settings import CanDatasetSettings, ColumnSettings

CANEDGE = "TimestampEpoch;BusChannel;ID;IDE;DLC;DataLength;Dir;EDL;BRS;ESI;RTR;DataBytes"


def grammars(text: str, **settings: object) -> list[Grammar]:
    return header_grammars(pl.Series(text.splitlines()), CanDatasetSettings(**settings))  # type: ignore[arg-type]


def first_frame(text: str, **settings: object) -> tuple[float, int, str, str | None]:
    """Time, ID, payload and label text of the first row, read through a column mapping."""
    rows = parse_rows(pl.Series(text.splitlines()), grammars(text, **settings)[-1])
    assert rows.malformed["reason"].to_list() == []
    payload = rows.payload[0, : rows.length[0]].tobytes().hex()
    return rows.timestamp[0], int(rows.can_id[0]), payload, None if rows.label is None else rows.label[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timestamp,can_id,dlc,data,label\n1.5,0x12A,2,00FF,normal", (1.5, 0x12A, "00ff", "normal")),
        ("Time,ID,Payload\n1.5,12A,00 ff", (1.5, 0x12A, "00ff", None)),
        ("ts;Arbitration ID;Length;Data Field;Attack\n1.5;0316;1;0xAA;1", (1.5, 0x316, "aa", "1")),
        ("ts\tarb_id\tdata\tflag\n1.5\t12A\t00-ff\tT", (1.5, 0x12A, "00ff", "T")),
        ('time,name,id,data,class\n1.5,"a, ""b""",12A,"00:ff",""', (1.5, 0x12A, "00ff", '""')),
        ("id,timestamp,data_1,data_2,data_3\n12A,1.5,0,ff,", (1.5, 0x12A, "00ff", None)),
        ("timestamp,id,data\n1.5,0x12A,", (1.5, 0x12A, "", None)),
        (
            "TimestampEpoch;BusChannel;ID;IDE;DLC;DataLength;Dir;DataBytes\n1.5;1;12A;0;9;12;0;" + "0A" * 12,
            (1.5, 0x12A, "0a" * 12, None),
        ),
        ("Time [s],Bus,ID,LEN,D1,D2\n1.5,0,12A,2,0,ff", (1.5, 0x12A, "00ff", None)),
        (f"{CANEDGE}\n1.5;1;12A;0;8;8;0;0;0;0;1;", (1.5, 0x12A, "", None)),  # a remote frame asks for 8 bytes
        (f"{CANEDGE}\n1.5;1;12A;0;2;2;0;0;0;0;0;00FF", (1.5, 0x12A, "00ff", None)),
        ("time,id,dlc,remote,b0,b1\n1.5,12A,2,True,,", (1.5, 0x12A, "", None)),
    ],
)
def test_columns_are_recognised_by_their_names(text: str, expected: tuple[float, int, str, str | None]) -> None:
    assert first_frame(text) == expected


def test_named_columns_go_before_recognised_ones() -> None:
    text = "timestamp,id,real_id,data,other,verdict\n1.5,7,12A,00,ff,bad"
    columns = ColumnSettings(id="real_id", data="other", label="verdict")
    assert first_frame(text, columns=columns) == (1.5, 0x12A, "ff", "bad")


@pytest.mark.parametrize("name", ["address", "addr", "can_id"])
@pytest.mark.parametrize("number", ["id", "msg_id", "identifier"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_column_of_row_numbers_is_no_can_id(name: str, number: str, step: int) -> None:
    rows = [f"{row * step},{row}.5,{0x12A + row % 3:x},00" for row in range(20)]
    assert first_frame("\n".join([f"{number},timestamp,{name},data", *rows])) == (0.5, 0x12A, "00", None)


def test_ids_that_grow_are_ids_where_there_is_no_other_column() -> None:
    rows = [f"{row}.5,{row},00" for row in range(20)]
    assert first_frame("\n".join(["timestamp,id,data", *rows]))[:2] == (0.5, 0)


def test_several_data_columns_can_be_named() -> None:
    text = "timestamp,id,first byte,y,x\n1.5,0x1,7,0xff,a"
    assert first_frame(text, columns=ColumnSettings(data="x y")) == (1.5, 1, "0aff", None)


def test_a_hole_between_byte_columns_is_malformed() -> None:
    text = "timestamp,id,b0,b1,b2\n1.5,0x1,01,,03\n1.6,0x1,01,zz,"
    rows = parse_rows(pl.Series(text.splitlines()), grammars(text)[0])
    assert rows.malformed["reason"].to_list() == ["the payload is not made of whole hexadecimal bytes"] * 2


def test_a_row_with_fewer_cells_than_the_header_is_malformed() -> None:
    text = "timestamp,id,data,label,more\n1.5,0x1,01,norm"
    rows = parse_rows(pl.Series(text.splitlines()), grammars(text)[0])
    assert rows.malformed["reason"].to_list() == ["the row is truncated or not of this format"]


@pytest.mark.parametrize(
    ("ids", "hexadecimal"),
    [
        (["100", "12A"], True),
        (["100", "0x100"], True),
        (["0100", "100"], True),
        (["100", "0"], False),
        (["217058307"], False),
    ],
)
def test_letters_and_leading_zeros_make_a_column_hexadecimal(ids: list[str], hexadecimal: bool) -> None:
    assert looks_hexadecimal(pl.Series(ids)) == hexadecimal


def test_an_id_that_would_exceed_29_bits_in_hexadecimal_is_surely_decimal() -> None:
    assert too_large_for_hexadecimal(pl.Series(["100", "20000000"]))
    assert not too_large_for_hexadecimal(pl.Series(["100", "19999999"]))


@pytest.mark.parametrize(("id_base", "can_id"), [("auto", 316), ("dec", 316), ("hex", 0x316)])
def test_the_base_of_ids_can_be_named(id_base: str, can_id: int) -> None:
    assert first_frame("timestamp,id,data\n1.5,316,", id_base=id_base)[1] == can_id


@pytest.mark.parametrize(
    ("cells", "payload", "told"),
    [
        (["0,16", "255,1"], "0010", False),  # three digits
        (["016,099", "255,001"], "1063", False),
        (["5.0,16.0", "7.0,"], "0510", False),  # as pandas writes numbers among empty cells
        (["5.0,171.0", "7.0,"], "05ab", False),
        (["5.0,171.0", "7.0,NaN"], "05ab", False),
        (["16,0a", "10,00"], "160a", False),
        (["16,5", "10,f"], "1605", False),
        (["16,05", "10,00"], "1605", False),  # decimal numbers have no leading zero
        (["0x16,0x5", "0x10,0x7"], "1605", False),
        (["16,5", "10,7"], "1005", True),
        (["6,5", "1,7"], "0605", False),  # the same in either base
        ([f"{number},{99 - number}" for number in range(10, 60)], "0a59", False),  # by chance none has a letter
    ],
)
def test_columns_of_bytes_are_read_in_the_base_that_all_rows_tell(cells: list[str], payload: str, told: bool) -> None:
    text = "\n".join(["timestamp,id,b0,b1", *[f"{number}.5,1024,{row}" for number, row in enumerate(cells)]])
    assert first_frame(text)[2] == payload
    assert ("dataset.byte_base=hex" in grammars(text)[0].assumption) == told


@pytest.mark.parametrize(
    ("cells", "payload"),
    [
        (["0 16 255", "1 2 3"], "0010ff"),
        (["5 16 99", "1 2 3"], "051063"),
        (["05 16", "0a 00"], "0516"),
        (["0516"], "0516"),
    ],
)
def test_a_payload_of_decimal_numbers_between_separators_is_read(cells: list[str], payload: str) -> None:
    text = "\n".join(["timestamp,id,data", *[f"{number}.5,1024,{row}" for number, row in enumerate(cells)]])
    assert first_frame(text)[2] == payload


@pytest.mark.parametrize(("byte_base", "payload"), [("dec", "1005"), ("hex", "1605")])
def test_the_base_of_bytes_can_be_named(byte_base: str, payload: str) -> None:
    assert first_frame("timestamp,id,b0,b1\n1.5,1024,16,5", byte_base=byte_base)[2] == payload


def test_a_decimal_number_beyond_a_byte_is_malformed() -> None:
    text = "timestamp,id,b0,b1\n1.5,1024,16,5\n1.6,1024,256,5"
    rows = parse_rows(pl.Series(text.splitlines()), grammars(text)[0])
    assert rows.malformed["reason"].to_list() == ["the payload is not made of decimal numbers up to 255"]


@pytest.mark.parametrize(
    ("header", "can_id"),
    [
        (CANEDGE, 0x110),
        ("time;can_id_hex;data", 0x110),
        ("time;can_id_dec;data", 110),
        ("time;can_id;data", 110),
    ],
)
def test_a_header_may_tell_the_base_of_ids(header: str, can_id: int) -> None:
    row = "1.5;1;110;0;8;1;0;0;0;0;0;05" if header.startswith("TimestampEpoch") else "1.5;110;05"
    assert first_frame(f"{header}\n{row}")[1:3] == (can_id, "05")


@pytest.mark.parametrize(
    ("ids", "can_id"),
    [
        (["110", "2024"], 110),  # no standard ID has four hexadecimal digits
        ([str(number) for number in range(110, 131)], 110),  # by chance none of many has a letter
        (["0110", "419356416"], 110),
    ],
)
def test_ids_without_letters_may_be_surely_decimal(ids: list[str], can_id: int) -> None:
    text = "\n".join(["timestamp,id,data", *[f"1.5,{one},05" for one in ids]])
    assert (first_frame(text)[1], grammars(text)[0].assumption) == (can_id, "")


@pytest.mark.parametrize(("can_id", "told"), [("316", True), ("419356416", False), ("0316", False)])
def test_a_guess_at_the_base_is_told_to_the_person(can_id: str, told: bool) -> None:
    grammar = grammars(f"timestamp,id,data\n1.5,{can_id},")[0]
    assert ("dataset.id_base=hex" in grammar.assumption) == told


def test_a_published_header_is_its_own_format_unless_columns_are_named() -> None:
    text = "timestamp,arbitration_id,data_field,attack\n1.5,0C0,00,0"
    assert [grammar.name for grammar in grammars(text)] == ["can_train_and_test"] * 2 + ["columns"] * 2
    assert [grammar.name for grammar in grammars(text, columns=ColumnSettings(data="data_field"))] == ["columns"] * 2


def test_a_column_that_the_header_lacks_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Unknown column \(dataset.columns.id\): 'canid'.*\n.*first: can_id"):
        grammars("timestamp,can_id,data\n1.5,1,00", columns=ColumnSettings(id="canid"))


def test_a_named_column_is_not_taken_for_anything_else() -> None:
    text = "timestamp,data,payload\n1.5,12A,00ff"
    assert first_frame(text, columns=ColumnSettings(id="data")) == (1.5, 0x12A, "00ff", None)
    with pytest.raises(DataError, match="'data' was named twice"):
        grammars(text, columns=ColumnSettings(id="data", label="data"))


def test_a_header_without_a_needed_column_is_refused_when_columns_are_asked_for() -> None:
    with pytest.raises(DataError, match=r"no data column: among timestamp, id, x.*\n.*dataset.columns.data="):
        grammars("timestamp,id,x\n1.5,1,00", format="columns")


@pytest.mark.parametrize("line", ["", "Roses are red", "1.5,0316,0,R", '"' + "x" * 200_000])
def test_a_first_line_that_is_no_header_makes_no_grammar(line: str) -> None:
    assert grammars(line) == []


def test_label_words_name_kinds_and_bare_yes_means_the_logs_own_kind() -> None:
    kinds = LabelEncoder(CanDatasetSettings().benign_values, "fuzzing")
    labels = pl.Series(["Normal", "1.0", '"DoS"', "T", " dos", "0.0", "2"])
    names = [kinds.names[code] for code in kinds.codes(labels)]
    assert names == ["benign", "fuzzing", "dos", "fuzzing", "dos", "benign", "2"]


@pytest.mark.parametrize(
    "word",
    ["no", "N", "nan", "null", "N/A", "-", "regular", "attack-free", "attack_free", "Attack free state", "no attack",
     "No_Attack", "legitimate", "clean", "Free", "OK", "genuine", "ambient", "Normal message", "0x0", "00", "", "NA",
     "Normal traffic", "Benign", "none"],
)  # fmt: skip
def test_words_for_no_attack_are_benign(word: str) -> None:
    kinds = LabelEncoder(CanDatasetSettings().benign_values, "attack")
    assert kinds.codes(pl.Series([word, f'"{word}" ', "Injected message"])).tolist() == [0, 0, 1]
    assert kinds.names == ["benign", "attack"]


@pytest.mark.parametrize("word", ["nok", "attack", "force-neutral", "fuzzy", "-1", "2", "free ride", "DoS attack", "x"])
def test_other_words_name_attacks(word: str) -> None:
    assert LabelEncoder(CanDatasetSettings().benign_values, "attack").code(word) == 1


def test_benign_words_of_a_person_replace_the_usual_ones() -> None:
    kinds = LabelEncoder(["All Fine"], "attack")
    assert kinds.codes(pl.Series(["all_fine", "normal", ""])).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "name",
    ["attack_label", "is_malicious", "Malicious", "Is Attack", "attack_type", "ground_truth", "target", "Category"],
)
def test_clear_names_of_label_columns_are_recognised(name: str) -> None:
    text = f"timestamp,id,dlc,data,{name}\n1.5,12A,1,00,Normal\n1.6,12A,1,00,Attack"
    assert first_frame(text)[3] == "Normal"


@pytest.mark.parametrize(
    ("name", "cells", "labelled"),
    [
        ("flag", "SSX", False), ("flag", ["0", "4", "0"], False), ("flag", "RRT", True), ("flag", "001", True),
        ("flag", ["Normal", "DoS", "Normal"], True), ("target", "010", False), ("target", ["ECU", "GW", "ECU"], False),
        ("category", ["benign", "dos", "dos"], True),
    ],
)  # fmt: skip
def test_columns_of_unsure_names_are_labels_by_their_cells(name: str, cells: Iterable[str], labelled: bool) -> None:
    rows = [f"{number}.5,12A,{cell},00" for number, cell in enumerate(cells)]
    text = "\n".join([f"timestamp,id,{name},data", *rows])
    assert (first_frame(text)[3] is not None) == labelled


def test_a_second_column_names_the_attack_and_makes_none() -> None:
    kinds = LabelEncoder(CanDatasetSettings().benign_values, "attack")
    codes = kinds.codes(pl.Series(["Normal", "Attack", "Attack"]), pl.Series(["Replay", "Replay", "Normal"]))
    assert [kinds.names[code] for code in codes] == ["benign", "replay", "attack"]
    assert kinds.names == ["benign", "attack", "replay"]


def test_codes_hold_their_meaning_from_block_to_block() -> None:
    kinds = LabelEncoder(["normal"], "attack")
    assert kinds.codes(pl.Series(["spoof", "normal"])).tolist() == [1, 0]
    assert kinds.codes(pl.Series(["dos", "spoof"])).tolist() == [2, 1]


def test_any_true_word_of_several_labels_is_an_attack() -> None:
    kinds = LabelEncoder(CanDatasetSettings().benign_values, "attack")
    codes = kinds.codes(pl.Series(["False\tTrue", "False\tFalse", "1 0"]), several=True)
    assert codes.tolist() == [1, 0, 1]


def test_a_label_column_with_too_many_values_is_refused() -> None:
    with pytest.raises(DataError, match=r"more than 255 kinds of attack.*\n.*dataset.columns.label"):
        LabelEncoder([], "attack").codes(pl.Series([f"kind {i}" for i in range(300)]))


@pytest.mark.parametrize("name", ["is_error_frame", "error_frame", "IsError", "error"])
@pytest.mark.parametrize(("no", "yes"), [("0", "1"), ("False", "True"), ("", "yes")])
def test_rows_of_error_frames_are_left_out_and_counted(name: str, no: str, yes: str) -> None:
    rows = [f"1.5,1A0,{no},2,0102,0", f"1.6,1A0,{yes},0,,0", f'1.7,1A0,"{yes}",8,0000000000000000,0', "1.8,1A0,x,1,0,0"]
    read = parse_rows(pl.Series(rows), grammars("\n".join([f"time,id,{name},dlc,data,label", *rows[:3]]))[0])
    assert (list(read.position), read.error_frames) == ([0], 2)
    assert read.malformed["position"].to_list() == [3]


def test_a_column_of_numbers_of_errors_marks_no_frame() -> None:
    assert first_frame("time,id,error,data\n1.5,1A0,1,0102\n1.6,1A0,17,0102")[:3] == (1.5, 0x1A0, "0102")


def test_a_frame_that_is_not_remote_must_have_its_bytes() -> None:
    rows = parse_rows(pl.Series([CANEDGE, "1.5;1;12A;0;8;8;0;0;0;0;0;"]), grammars(CANEDGE)[0])
    assert rows.malformed["reason"].to_list() == ["the DLC disagrees with the payload"]
