"""One row at a time: what each grammar reads, and why it refuses a row."""

import polars as pl
import pytest

from can_train.tasks.can.data.formats import LINE_GRAMMARS, PUBLISHED_CSV_GRAMMARS, Grammar, parse_rows

CAR_HACKING = "1478198376.389427,0316,8,05,21,68,09,21,21,00,6f,R"
CANDUMP = "(1478198376.389427) can0 12A#00F0"
HCRL_TEXT = "Timestamp: 1479121434.850202  ID: 0350  000  DLC: 2  05 28"


def grammar_of(name: str) -> Grammar:
    return next(grammar for grammar in (*PUBLISHED_CSV_GRAMMARS, *LINE_GRAMMARS) if grammar.name == name)


def reason(name: str, row: str) -> str:
    malformed = parse_rows(pl.Series([row], dtype=pl.String), grammar_of(name)).malformed
    return str(malformed["reason"].item())


def values(name: str, row: str) -> tuple[int, str]:
    """The ID and the payload of a well-formed row."""
    rows = parse_rows(pl.Series([row], dtype=pl.String), grammar_of(name))
    assert len(rows.malformed) == 0
    return int(rows.can_id.item()), rows.payload[0, : rows.length.item()].tobytes().hex()


@pytest.mark.parametrize(
    ("name", "row", "can_id", "payload"),
    [
        ("car_hacking", CAR_HACKING, 0x316, "052168092121006f"),
        ("car_hacking", "1.5,0316,2,05,21,,,,,,,R", 0x316, "0521"),
        ("car_hacking", "1.5,1fffffff,0,,,,,,,,,T", 0x1FFF_FFFF, ""),
        ("car_hacking", "1.5,0316,0,R", 0x316, ""),
        ("hcrl_text", HCRL_TEXT, 0x350, "0528"),
        ("hcrl_text", "Timestamp:          0.001684        ID: 0153    100    DLC: 0", 0x153, ""),
        ("hcrl_text", "Timestamp: 1.5\tID: 0153\t100\tDLC: 8\t", 0x153, ""),
        ("hcrl_text", "Timestamp: 1.5  ID: 0153  100  DLC: 2  05 28", 0x153, ""),
        ("candump", CANDUMP, 0x12A, "00f0"),
        ("candump", "(1.5) vcan0 0CF00331#", 0xCF00331, ""),
        ("candump", "(1.5) can0 12A#R8", 0x12A, ""),
        ("candump", " (000.000000)  can0  0CF00331   [3]  FF FE 01", 0xCF00331, "fffe01"),
        ("candump", " (1.5)  can0  12A   [8]  remote request", 0x12A, ""),
        ("candump_labelled", f"{CANDUMP} False\tTrue", 0x12A, "00f0"),
        ("candump_labelled", "(1.5)  can0  12A   [1]  FA  0 1", 0x12A, "fa"),
        ("whitespace", "1483093132.049669  0380  000  2  30 bb", 0x380, "30bb"),
        ("whitespace", "1483093132.049669 380 0", 0x380, ""),
        ("can_train_and_test", "1.5,0C0,,0", 0xC0, ""),
        ("hcrl_challenge", "1.5,5A2,2,00 FF,Attack,Spoofing", 0x5A2, "00ff"),
    ],
)
def test_a_row_is_read(name: str, row: str, can_id: int, payload: str) -> None:
    assert values(name, row) == (can_id, payload)


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("car_hacking", "1478198376.3894", "truncated or not of this format"),
        ("car_hacking", "1478198376.389427,0316", "truncated or not of this format"),
        ("car_hacking", "1.5,0316,8,05,21,68,09", "the DLC disagrees"),
        ("car_hacking", "1.5,0316,2,05,21", "the label is missing"),
        ("car_hacking", "1.5,0316,2,05,21,X", "the label is unknown"),
        ("car_hacking", "1.5,0316,2,05,2,R", "not made of whole hexadecimal bytes"),
        ("car_hacking", "1.5,0316,2,05,2g,R", "not made of whole hexadecimal bytes"),
        ("car_hacking", "1.5,0316,9,01,02,03,04,05,06,07,08,09,R", "longer than 8 bytes"),
        ("car_hacking", "1.5,20000000,0,R", "does not fit into 29 bits"),
        ("car_hacking", "1.5,123456789012345678901,0,R", "does not fit into 29 bits"),
        ("car_hacking", "1.5,03g6,0,R", "the ID is not a number"),
        ("car_hacking", "yesterday,0316,0,R", "the timestamp is not a number"),
        ("car_hacking", "1.5.6,0316,0,R", "the timestamp is not a number"),
        ("car_hacking", "1e999,0316,0,R", "the timestamp is not a number"),
        ("hcrl_text", HCRL_TEXT[:-3], "the DLC disagrees"),
        ("hcrl_text", HCRL_TEXT[:-1], "not made of whole hexadecimal bytes"),
        ("candump", "(1.5) can0 12A##1AABB", "CAN FD frames are not supported"),
        ("candump", "(1.5) can0 12A#00F", "not made of whole hexadecimal bytes"),
        ("candump", "(1.5) can0 12A#000102030405060708", "longer than 8 bytes"),
        ("candump", "(1.5) can0 20000080#00", "does not fit into 29 bits"),
        ("candump", "(1.5)  can0  12A   [3]  00 F0", "the DLC disagrees"),
        ("candump_labelled", CANDUMP, "the label is missing"),
        ("candump_labelled", "(1.5) can0 12A#1", "not made of whole hexadecimal bytes"),
        ("can_train_and_test", "1.5,0C0,00ff,", "the label is unknown"),
        ("can_train_and_test", "1.5,0C0,00f,0", "not made of whole hexadecimal bytes"),
        ("can_train_and_test", "1.5,0C0,00ff", "truncated or not of this format"),
        ("hcrl_challenge", "1.5,5A2,3,00 FF,Attack,Spoofing", "the DLC disagrees"),
        ("hcrl_challenge", "1.5,5A2,2,00 FF,Attack", "truncated or not of this format"),
        ("whitespace", "1.5 0380 000 3 30 bb", "the DLC disagrees"),
    ],
)
def test_a_malformed_row_is_told_why(name: str, row: str, why: str) -> None:
    assert why in reason(name, row)


def test_blank_lines_comments_and_repeated_headers_are_no_rows() -> None:
    grammar = grammar_of("can_train_and_test")
    rows = parse_rows(pl.Series([None, "  ", "# comment", grammar.header, "1.5,0C0,,1"]), grammar)
    assert (rows.position.tolist(), len(rows.malformed)) == ([4], 0)


def test_positions_tell_good_and_malformed_rows_apart() -> None:
    rows = parse_rows(pl.Series([CAR_HACKING, "rubbish", None, CAR_HACKING]), grammar_of("car_hacking"))
    assert (rows.position.tolist(), rows.malformed["position"].to_list()) == ([0, 3], [1])
