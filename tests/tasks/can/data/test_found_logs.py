"""Logs as people have them, each against a truth written by hand: what tools wrote, and what was saved again."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from can_train.errors import DataError
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings

Row = tuple[float, int, str, int]  # time, ID, payload, label

BUSMASTER_HEADER = """***BUSMASTER Ver 2.4.0***
***PROTOCOL CAN***
***NOTE: PLEASE DO NOT EDIT THIS DOCUMENT***
***[START LOGGING SESSION]***
***START DATE AND TIME 8:8:2014 23:59:59:65***
***{base}***
***{mode} MODE***
***START CHANNEL BAUD RATE***
***CHANNEL 1 - Kvaser - Kvaser Leaf Light HS #0 (Channel 0), Serial Number- 0 - 500000 bps***
***END CHANNEL BAUD RATE***
***START DATABASE FILES (DBF/DBC)***
C:\\databases\\drive.dbf
***END OF DATABASE FILES (DBF/DBC)***
***<Time><Tx/Rx><Channel><CAN ID><Type><DLC><DataBytes>***
"""
BUSMASTER_FOOTER = "***END DATE AND TIME 9:8:2014 0:0:9:0***\n***[STOP LOGGING SESSION]***\n"
MIDNIGHT_S = 1_407_542_400.0  # 2014-08-09, before which the recording begins
BEGUN_S = MIDNIGHT_S - 0.935


def busmaster(rows: str, base: str, mode: str) -> str:
    return BUSMASTER_HEADER.format(base=base, mode=mode) + rows + BUSMASTER_FOOTER


def read(text: str, tmp_path: Path, *, block_bytes: int = 1 << 20, **wanted: object) -> tuple[LogReader, list[Row]]:
    (tmp_path / "log").write_text(text)
    reader = LogReader(tmp_path / "log", CanDatasetSettings(**wanted), block_bytes=block_bytes)  # type: ignore[arg-type]
    frames = Frames.concatenate(list(reader.blocks()))
    columns = (frames.timestamp, frames.can_id, frames.payload, frames.length, frames.label)
    return reader, [
        (round(float(at), 6), int(can_id), bytes(payload[:size]).hex(), int(label))
        for at, can_id, payload, size, label in zip(*columns, strict=True)
    ]


def test_a_busmaster_log_of_another_protocol_is_refused_by_its_name(tmp_path: Path) -> None:
    row = "11:49:12:9420 1 0x18FEF100 0x0FEF1 BROADCAST 00 FF 006 Rx 8 00 11 22 33 44 55 66 77\n"
    with pytest.raises(DataError) as caught:
        read(busmaster(row * 9, "HEX", "SYSTEM").replace("PROTOCOL CAN", "PROTOCOL J1939"), tmp_path)
    assert str(caught.value).startswith(f"The BUSMASTER log is of the protocol J1939: {tmp_path / 'log'}.")


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_busmaster_with_system_times_runs_on_over_midnight(block_bytes: int, tmp_path: Path) -> None:
    rows = """23:59:59:9420 Rx 1 0x023 s 1 40
23:59:59:9999 Tx 1 0x18FEF100 x 8 00 01 02 03 04 05 06 07
00:00:00:0001 Rx 1 0x123 sr 8
00:00:00:0002 Rx 1 0x123 s-fd 12 00 01 02 03 04 05 06 07 08 09 0A 0B
00:00:00:0003 Rx 1 0x000 ERR Stuff Error Rx
00:00:00:0004 Rx 1 0x123 s 0
"""
    reader, frames = read(busmaster(rows, "HEX", "SYSTEM"), tmp_path, block_bytes=block_bytes)
    assert frames == [
        (MIDNIGHT_S - 0.058, 0x23, "40", 0),
        (MIDNIGHT_S - 0.0001, 0x18FEF100, "0001020304050607", 0),
        (MIDNIGHT_S + 0.0001, 0x123, "", 0),
        (MIDNIGHT_S + 0.0002, 0x123, "000102030405060708090a0b", 0),
        (MIDNIGHT_S + 0.0004, 0x123, "", 0),
    ]
    assert (reader.format, reader.report.error_frames, reader.report.malformed) == ("busmaster", 1, 0)


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_a_second_recording_in_a_busmaster_log_counts_from_its_own_date(block_bytes: int, tmp_path: Path) -> None:
    rows = "00:00:00:0012 Rx 1 035 s 2 064 255\n25:00:01:5 Rx 1 035 x 2 008 009\n"
    first = busmaster(rows, "DEC", "ABSOLUTE")
    _, frames = read(first + first.replace("8:8:2014", "11:8:2014"), tmp_path, block_bytes=block_bytes)
    later_s = BEGUN_S + 3 * 86_400
    assert frames == [
        (round(begin + at, 6), 35, payload, 0)
        for begin in (BEGUN_S, later_s)
        for at, payload in ((0.0012, "40ff"), (90_001.5, "0809"))
    ]


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_relative_times_of_busmaster_add_up_over_events_too(block_bytes: int, tmp_path: Path) -> None:
    rows = """00:00:00:0000 Rx 1 0x023 s 2 64 FF
0:0:1:5000 Rx 1 23 s 2 06 25
00:00:00:2500 Rx 1 0x000 ERR Stuff
00:00:00:2500 Rx 1 023 s 2 06 26
"""
    _, frames = read(busmaster(rows, "HEX", "RELATIVE"), tmp_path, block_bytes=block_bytes)
    assert frames == [
        (BEGUN_S, 0x23, "64ff", 0), (BEGUN_S + 1.5, 0x23, "0625", 0), (BEGUN_S + 2.0, 0x23, "0626", 0),
    ]  # fmt: skip


def test_a_wrong_row_of_busmaster_is_told_why(tmp_path: Path) -> None:
    good = "23:59:59:9420 Rx 1 0x023 s 1 40\n" * 3
    reader, frames = read(busmaster(good + good.replace("40", "4"), "HEX", "SYSTEM"), tmp_path, max_malformed=1.0)
    assert (len(frames), reader.report.reasons) == (3, {"the payload is not made of whole hexadecimal bytes": 3})


CAR_HACKING = [
    (1478198376.389427, 0x316, "052168092121006f", 0),
    (1478198376.389636, 0x18F, "fe5b", 0),
    (1478198376.39, 0x5F0, "0100", 1),
]
SAVED = """{index}1478198376.389427,0316,8,05,21,68,09,21,21,00,6f,R
{index}1478198376.389636,018f,2,fe,5b,R,,,,,,
{index}1478198376.390000,05f0,2,01,00,{short}
"""
NAMES = "Timestamp,CAN ID,DLC," + ",".join(f"DATA[{i}]" for i in range(8)) + ",Flag\n"


@pytest.mark.parametrize("short", ["T,,,,,,", ",,,,,,T", "T,nan,nan,nan,nan,nan,nan", "NaN,NaN,NaN,NaN,NaN,NaN,T"])
@pytest.mark.parametrize("header", ["", NAMES, ",".join(map(str, range(12))) + "\n"])
@pytest.mark.parametrize("index", ["", "7,"])
def test_a_car_hacking_log_that_pandas_saved_keeps_its_labels(
    index: str, header: str, short: str, tmp_path: Path
) -> None:
    text = ("," if index and header else "") + header + SAVED.format(index=index, short=short)
    reader, frames = read(text, tmp_path)
    assert frames == CAR_HACKING
    assert (reader.format, reader.labelled, reader.report.malformed) == ("car_hacking", True, 0)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("order", [range(7, -1, -1), (1, 0, 2, 3, 4, 5, 6, 7)])
def test_byte_columns_in_another_order_are_read_by_their_numbers(
    order: Iterable[int], first: int, tmp_path: Path
) -> None:
    cells = ["05", "21", "68", "09", "21", "21", "00", "6f"]
    head = ",".join(f"B{byte + first}" for byte in order)
    _, frames = read(f"time,ID,DLC,{head},Label\n1.5,31a,8,{','.join(cells[byte] for byte in order)},R\n", tmp_path)
    assert frames == [(1.5, 0x31A, "052168092121006f", 0)]


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        # cabana, of today and of its first years
        ("time,addr,bus,data\n15.46,0x440,1,0x4000\n", [(15.46, 0x440, "4000", 0)]),
        ("time,addr,bus,data\n0.0619,308,0,08007c630a00d064\n", [(0.0619, 308, "08007c630a00d064", 0)]),
        ("Bus,MessageID,Message,MessageLength,Time\n0,0x292,0x040000001068,6,1.5\n", [(1.5, 0x292, "040000001068", 0)]),
        ("time;id;data\n12,345678;110h;00 01\n", [(12.345678, 0x110, "0001", 0)]),
        ('time,id,data\n"12,345678","18FEF100x","00 01"\n', [(12.345678, 0x18FEF100, "0001", 0)]),
        ("time;id;data\n31.01.2026 23:59:59,5;0x110;01\n", [(1769903999.5, 0x110, "01", 0)]),
        ("time;id;data\n2026/1/31 23:59:59.5;0x110;01\n", [(1769903999.5, 0x110, "01", 0)]),
        ("time,id,data\n2026-01-31T23:59:59.5+01:00,0x110,01\n", [(1769900399.5, 0x110, "01", 0)]),
        (
            "23:59:59.9 110h 2 30 bb\n00:00:00.1 110h 2 30 bb\n",
            [(86399.9, 0x110, "30bb", 0), (86400.1, 0x110, "30bb", 0)],
        ),
        (
            "(23:59:59.9) can0 110#30\n(00:00:00.1) can0 110#31\n",
            [(86399.9, 0x110, "30", 0), (86400.1, 0x110, "31", 0)],
        ),
        ("1.5,0x316,1,05,R\n1.6,0x0316,1,05,T\n", [(1.5, 0x316, "05", 0), (1.6, 0x316, "05", 1)]),
        (
            "base hex timestamps relative\n 0,001000 1 123 Rx d 1 01\n 0,002000 1 123 Rx d 1 02\n",
            [(0.001, 0x123, "01", 0), (0.003, 0x123, "02", 0)],
        ),
    ],
)
def test_numbers_are_read_however_a_tool_writes_them(text: str, frames: list[Row], tmp_path: Path) -> None:
    assert read(text, tmp_path)[1] == frames


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_clocks_that_jitter_at_midnight_do_not_lose_a_day(block_bytes: int, tmp_path: Path) -> None:
    times = ["23:59:59.999", "23:59:59.9995", "00:00:00.001", "23:59:59.998", "00:00:00.5", "23:00:00", "0:00:00"]
    text = "time,id,data\n" + "".join(f"{time},0x100,00\n" for time in times)
    _, frames = read(text, tmp_path, block_bytes=block_bytes)
    assert [at for at, *_ in frames] == [86399.999, 86399.9995, 86400.001, 86399.998, 86400.5, 169200.0, 172800.0]


@pytest.mark.parametrize("time", ["12:60:00", "12:00:61", "31.02.2026 12:00:00", "00.01.2026 12:00:00"])
def test_a_time_that_no_clock_shows_is_malformed(time: str, tmp_path: Path) -> None:
    good = "12:00:00" if time[2] == ":" else "31.01.2026 12:00:00"
    text = "time;id;data\n" + f"{good};0x100;00\n" * 3 + f"{time};0x100;00\n"
    reader, frames = read(text, tmp_path, max_malformed=1.0)
    assert (len(frames), reader.report.reasons) == (3, {"the timestamp is not a number": 1})


CANDUMP_ROW = "({time:.6f}) can0 12A#0001\n"
ERROR_ROW = "({time:.6f}) can0 20000080#0000000000000000\n"
ASC_ROW = " {time:.6f} 1  12A             Rx   d 2 00 01\n"
ASC_EVENT = " {time:.6f} 1  Statistic: D 10 R 0 XD 0 XR 0 E 0 O 0 B 4.3%\n"
TRC_ROW = " {number:5d}) {time:11.1f}  Rx     012A  2  00 01\n"
TRC_EVENT = " {number:5d}) {time:11.1f}  Warng  FFFFFFFF  4  00 00 00 08 BUSHEAVY\n"


@pytest.mark.parametrize("lines", [990, 1500, 4000, 60_000])
@pytest.mark.parametrize(
    ("head", "event", "between", "row", "name"),
    [
        ("", ERROR_ROW, "", CANDUMP_ROW, "candump"),
        ("", "# a comment\n", "time,id,data\n", "{time},12A,0001\n", "columns"),
        ("base hex  timestamps absolute\n", ASC_EVENT, "", ASC_ROW, "asc"),
        (";$FILEVERSION=1.1\n", TRC_EVENT, "", TRC_ROW, "trc"),
        ("", "# a comment\n", "", "Timestamp: {time:.6f}  ID: 012a  000  DLC: 2  00 01\n", "hcrl_text"),
    ],
)
def test_a_log_may_begin_with_many_lines_that_are_no_frames(
    head: str, event: str, between: str, row: str, name: str, lines: int, tmp_path: Path
) -> None:
    begin = "".join(event.format(number=i, time=0.1) for i in range(lines))
    rows = "".join(row.format(number=lines + i, time=1.0 + i) for i in range(60))
    reader, frames = read(head + begin + between + rows, tmp_path)
    assert (reader.format, len(frames), reader.report.malformed) == (name, 60, 0)
    assert frames[0][1:] == (0x12A, "0001", 0)
