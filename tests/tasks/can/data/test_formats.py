"""One row at a time: what each grammar reads, and why it refuses a row."""

import polars as pl
import pytest

from can_train_tasks.can.data.grammar import NO_MATCH, Grammar, parse_rows
from can_train_tasks.can.data.line_formats import LINE_GRAMMARS, PUBLISHED_CSV_GRAMMARS, line_grammars

CAR_HACKING = "1478198376.389427,0316,8,05,21,68,09,21,21,00,6f,R"
CANDUMP = "(1478198376.389427) can0 12A#00F0"
HCRL_TEXT = "Timestamp: 1479121434.850202  ID: 0350  000  DLC: 2  05 28"


def grammar_of(name: str, row: str = "") -> Grammar:
    """The grammar of this name that reads the row, or the first one."""
    named = [grammar for grammar in (*PUBLISHED_CSV_GRAMMARS, *LINE_GRAMMARS) if grammar.name == name]
    return next((grammar for grammar in named if len(parse_rows(pl.Series([row]), grammar).position)), named[0])


def reason(name: str, row: str) -> str:
    """Why the grammar refuses the row: of several with this name, the one that the row is most like."""
    named = [grammar for grammar in (*PUBLISHED_CSV_GRAMMARS, *LINE_GRAMMARS) if grammar.name == name]
    parsed = [parse_rows(pl.Series([row], dtype=pl.String), grammar).malformed["reason"] for grammar in named]
    return str(next((why.item() for why in parsed if why.to_list() not in ([], [NO_MATCH])), NO_MATCH))


def values(name: str, row: str) -> tuple[int, str]:
    """The ID and the payload of a well-formed row."""
    rows = parse_rows(pl.Series([row], dtype=pl.String), grammar_of(name, row))
    assert len(rows.malformed) == 0
    return int(rows.can_id.item()), rows.payload[0, : rows.length.item()].tobytes().hex()


@pytest.mark.parametrize(
    ("name", "row", "can_id", "payload"),
    [
        ("car_hacking", CAR_HACKING, 0x316, "052168092121006f"),
        ("car_hacking", "1.5,0316,2,05,21,,,,,,,R", 0x316, "0521"),
        ("car_hacking", "1.5,1fffffff,0,,,,,,,,,T", 0x1FFF_FFFF, ""),
        ("car_hacking", "1.5,0316,0,R", 0x316, ""),
        ("syncan", "1,5.25,id10,0,1,0.5,1.5", 10, "0000ffff8000ffff"),
        ("syncan", "0,5.25,id10,1e-3,,,", 10, "0042"),
        ("syncan", "0,5.25,id10,0.25", 10, "4000"),
        ("hcrl_text", HCRL_TEXT, 0x350, "0528"),
        ("hcrl_text", "Timestamp:          0.001684        ID: 0153    100    DLC: 0", 0x153, ""),
        ("hcrl_text", "Timestamp: 1.5\tID: 0153\t100\tDLC: 8\t", 0x153, ""),
        ("hcrl_text", "Timestamp: 1.5  ID: 0153  100  DLC: 2  05 28", 0x153, ""),
        ("candump", CANDUMP, 0x12A, "00f0"),
        ("candump", "(1.5) vcan0 0CF00331#", 0xCF00331, ""),
        ("candump", "(1.5) can0 12A#R8", 0x12A, ""),
        ("candump", " (000.000000)  can0  0CF00331   [3]  FF FE 01", 0xCF00331, "fffe01"),
        ("candump", " (1.5)  can0  12A   [8]  remote request", 0x12A, ""),
        ("candump", "(1.5) can0 12A##1AABB", 0x12A, "aabb"),
        ("candump", "(1.5) can0 12A#00F0 R", 0x12A, "00f0"),
        ("candump", "(1.5) can0 12A# T", 0x12A, ""),
        ("candump", "(1.5) can0 12A#R8 R", 0x12A, ""),
        ("candump", " (1.5)  can0  12A   [2]  27 41   ''A'", 0x12A, "2741"),
        ("candump", " (1.5)  can0  TX - -  12A   [2]  27 41", 0x12A, "2741"),
        ("candump", "(1.5) can0 12A#0001020304050607_E", 0x12A, "0001020304050607"),
        ("candump", "(1.5) can0 12A#R8_E", 0x12A, ""),
        ("candump", " (1.5)  can0  12A   {B}  00 01 02 03 04 05 06 07", 0x12A, "0001020304050607"),
        ("candump", " (1.5)  can0  12A   {E}  remote request", 0x12A, ""),
        ("candump", "(1.5) can0 12A#AA attack", 0x12A, "aa"),
        ("candump_labelled", "(1.5) can0 12A#AA R 1", 0x12A, "aa"),
        ("trc", "  1)      1059.9  Rx         0300  2  00 F0 ", 0x300, "00f0"),
        ("trc", "  1)      1059 00000300  0", 0x300, ""),
        ("asc", "0.1 1  300x  Rx   d 2 00 F0  Length = 0", 0x300, "00f0"),
        ("asc", "0.1 CANFD 1 Rx 300  1 0 2 2 00 F0   13 00 00", 0x300, "00f0"),
        ("asc", "0.1 CANFD 1 Rx 300  1 0 2 2 00 F0 13 00 ", 0x300, "00f0"),
        ("asc", "0.1 1  300  Rx   r", 0x300, ""),
        ("asc", "0.1 1  300  Rx   r D  Length = 0", 0x300, ""),
        ("asc", "0.1 1  300  Rx   d D 00 01 02 03 04 05 06 07  Length = 0", 0x300, "0001020304050607"),
        ("asc", "0.1 1  300  Rx   d 9 00 01 02 03 04 05 06 07", 0x300, "0001020304050607"),
        ("asc", "0.1 CANFD 1 Rx 300  Engine Data 1 0 a 16 " + "AB " * 16 + " 130000", 0x300, "ab" * 16),
        ("asc", "0.1 CANFD 3 Tx 50005x     0 0 5 0 140000 73 200050 7a60", 0x50005, ""),
        ("candump_labelled", f"{CANDUMP} False\tTrue", 0x12A, "00f0"),
        ("candump_labelled", "(1.5)  can0  12A   [1]  FA  0 1", 0x12A, "fa"),
        ("whitespace", "1483093132.049669  0380  000  2  30 bb", 0x380, "30bb"),
        ("whitespace", "1483093132.049669 380 0", 0x380, ""),
        ("whitespace", "1.5 0380 000 1 30 bb", 0x380, "30"),
        ("whitespace", "1.5 0380 000 1 30 false", 0x380, "30"),
        ("hcrl_text", f"{HCRL_TEXT} 00 00 00", 0x350, "0528"),
        ("savvycan", "5,0000012A,false,Rx,0,2,01,02,00,00,00,00,00,00,", 0x12A, "0102"),
        ("savvycan", "5,0000012A,false,Rx,0,0,00,00,00,00,00,00,00,00,", 0x12A, ""),
        ("car_hacking", "1.5,0316,2,05,21,00,00,00,00,00,00,T", 0x316, "0521"),
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
        ("car_hacking", "1.5,0316,9,01,02,03,04,05,06,07,08,09,R", "no CAN FD frame has a payload of this length"),
        ("car_hacking", "1.5,20000000,0,R", "does not fit into 29 bits"),
        ("car_hacking", "1.5,123456789012345678901,0,R", "does not fit into 29 bits"),
        ("car_hacking", "1.5,03g6,0,R", "the ID is not a number"),
        ("car_hacking", "yesterday,0316,0,R", "the timestamp is not a number"),
        ("car_hacking", "1.5.6,0316,0,R", "the timestamp is not a number"),
        ("car_hacking", "1e999,0316,0,R", "the timestamp is not a number"),
        ("syncan", "2,5.25,id10,0.5,,,", "truncated or not of this format"),
        ("syncan", "0,5.25,id1x,0.5,,,", "the ID is not a number"),
        ("syncan", "0,5.25,id1,,,,", "truncated or not of this format"),
        ("syncan", "0,5.25,id1,0.5,,0.5,", "the payload is not made of numbers"),
        ("syncan", "0,5.25,id1,0.5.5,,,", "the payload is not made of numbers"),
        ("hcrl_text", HCRL_TEXT[:-3], "the DLC disagrees"),
        ("hcrl_text", HCRL_TEXT[:-1], "not made of whole hexadecimal bytes"),
        ("candump", "(1.5) can0 12A##1000102030405060708", "no CAN FD frame has a payload of this length"),
        ("candump", f"(1.5) can0 12A##1{'00' * 65}", "longer than 64 bytes"),
        ("candump", "(1.5) can0 12A#00F", "not made of whole hexadecimal bytes"),
        ("candump", "(1.5) can0 12A#000102030405060708", "longer than 8 bytes"),
        ("candump", "(1.5) can0 40000080#00", "does not fit into 29 bits"),
        ("candump", "(1e308) can0 080#00", "beyond any clock"),
        ("candump", "(-1e308) can0 080#00", "beyond any clock"),
        ("candump", "(1.5)  can0  12A   [3]  00 F0", "the DLC disagrees"),
        ("candump_labelled", CANDUMP, "the label is missing"),
        ("candump_labelled", "(1.5) can0 12A#1", "not made of whole hexadecimal bytes"),
        ("can_train_and_test", "1.5,0C0,00ff,", "the label is unknown"),
        ("can_train_and_test", "1.5,0C0,00f,0", "not made of whole hexadecimal bytes"),
        ("can_train_and_test", "1.5,0C0,00ff", "truncated or not of this format"),
        ("hcrl_challenge", "1.5,5A2,3,00 FF,Attack,Spoofing", "the DLC disagrees"),
        ("hcrl_challenge", "1.5,5A2,2,00 FF,Attack", "truncated or not of this format"),
        ("whitespace", "1.5 0380 000 3 30 bb", "the DLC disagrees"),
        ("asc", "0.1 1 12A Rx", "truncated or not of this format"),
        ("asc", "0.1 1 EngineData Rx d 2 00 01", "the ID is not a number"),
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


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("candump", "(1.5) can0 20000080#0000000000000000"),
        ("candump", "(1.5) can0 20000080#"),
        ("candump", " (1.5)  can0  2000008C   [8]  00 00 00 00 00 00 00 00   ERRORFRAME"),
        ("candump", " (1.5)  can0  RX - -  20000004   [8]  00 04 00 00 00 00 00 00   ERRORFRAME"),
        ("candump_labelled", "(1.5) can0 20000004#0000000000000000 0"),
        ("asc", "   0.100000 1  ErrorFrame"),
        ("asc", "   0.100000 CANFD   1 Rx   ErrorFrame Not Acknowledge error"),
        ("trc", "     7)      1060.0  Error  0008  4  00 19 08 08"),
        ("trc", "      7      1060.0 ER 1         Rx -  5    04 00 02 00 00"),
        ("python_can", "1.5,0x0,1,0,1,0,"),
        ("asc", "   2.501010 1 ErrorFrame ECC: 10100010"),
        ("asc", "  30.8 CANFD   5 Tx ErrorFrame Not Acknowledge error 44 0 0 f 64 00 00"),
    ],
)
def test_an_error_frame_is_counted_and_not_malformed(name: str, row: str) -> None:
    rows = parse_rows(pl.Series([row]), grammar_of(name))
    assert (len(rows.position), len(rows.malformed), rows.error_frames) == (0, 0, 1)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("candump", "(1.5) can0 45123#81:00:12345678#11223344556677"),
        ("candump", " (1.5)  can0  123 [0007] (45|81:00:12345678) 11 22 33 44 55 66 77"),
        ("asc", "   0.1 CANXL   1 Rx 123 0 0 0 0 4 00 01 02 03"),
    ],
)
def test_a_can_xl_frame_is_counted_and_not_malformed(name: str, row: str) -> None:
    rows = parse_rows(pl.Series([row]), grammar_of(name))
    assert (len(rows.position), len(rows.malformed), rows.error_frames, rows.xl_frames) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("candump", "\tcontroller-problem{rx-error-warning}"),
        ("candump", "\tbus-error"),
        ("candump", "DROPCOUNT: dropped 1 CAN frame on 'can0' socket (total drops 1)"),
        ("asc", "base hex  timestamps absolute"),
        ("asc", "   0.000000 Start of measurement"),
        ("asc", "   0.1 CAN 1 Status:chip status error active"),
        ("asc", "   0.1 1  Statistic: D 0 R 0 XD 0 XR 0 E 0 O 0 B 0.00%"),
        ("asc", "   0.1 1  J1939TP FEE3p        6    0  0   -   Rx   d 23 A0 A0 A0"),
        ("asc", "   0.1 SV: 2 0 1 ::Gateway::Speed = 3"),
        ("asc", "   0.1 L1 3C Rx 8 00 01 02 03 04 05 06 07 checksum = 70"),
        ("asc", "   0.1 Fr RMSG  0 0 1 1 10 0 Rx 0 200004 5 20 a2 name 16 16 0 1"),
        ("asc", "   0.1 ETH 1 Rx 60:FF01022345670102030405060708"),
        ("asc", "   0.1 1 OverloadFrame"),
        ("asc", "   0.1 1 BusOff"),
        ("asc", "   0.1 GPS-Device: 1 La:48.8 Lo:9.1"),
        ("asc", "   0.1 SYS: Start"),
        ("asc", "   0.1 log trigger event"),
        ("asc", "// version 9.0.0"),
        ("asc", "Begin Triggerblock Sam Sep 30 15:06:13.191 2017"),
        ("trc", ";   Message   Time    Type    ID"),
        ("trc", "     7)      1060.0  Warng  FFFFFFFF  4  00 00 00 08  BUSHEAVY"),
        ("trc", "      7      1060.0 ST 1         Rx -  4    00 00 00 08"),
    ],
)
def test_events_and_remarks_are_no_rows(name: str, line: str) -> None:
    rows = parse_rows(pl.Series([line]), grammar_of(name))
    assert (len(rows.position), len(rows.malformed), rows.error_frames) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("asc", "   0.100000 1  12A             Rx   d 8 01 02"),
        ("asc", "   0.100000 CANFD   1 Rx   12A  1 0 a 16 01 02"),
        ("asc", "   0.100000 1  12A             Rx   d D 01 02"),
        ("trc", "     7)      1060.0  Rx     012A  8  01 02"),
        ("savvycan", "1000,0000012A,false,Rx,0,8,01,02,"),
        ("python_can", "1.5,0x12a,0,0,0,8,AAA="),
    ],
)
def test_a_row_that_was_cut_off_is_malformed(name: str, row: str) -> None:
    assert "the DLC disagrees" in reason(name, row)


@pytest.mark.parametrize("columns", ["N,O,T", "N,T,I", "N,O,T,I,I", "N,O,I,L,l"])
def test_columns_that_lack_what_a_frame_needs_or_repeat_it_are_those_of_any_other_log(columns: str) -> None:
    damaged = line_grammars(pl.Series([f";$COLUMNS={columns}"]))
    assert damaged == line_grammars(pl.Series([";"]))
