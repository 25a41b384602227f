"""Captures (pcap, pcapng) and databases of python-can: their frames are read, and what is no frame is told."""

import gzip
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from can_train.errors import ConfigError, DataError
from can_train_tasks.can.data import recordings
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.reading import LogReader, decide_bases
from can_train_tasks.can.settings import CanDatasetSettings
from fakes.tasks_can_writers import (
    WRITERS,
    Message,
    candump,
    pcap_file,
    pcapng_interface,
    pcapng_packet,
    pcapng_section,
)

AT_US = 1_700_000_000_123_456
CLASSICAL = struct.pack(">IBBxx", 0x12A, 2, 0) + b"\x01\x02".ljust(8, b"\0")
EXTENDED = struct.pack(">IBBxx", 0x98FE_F100, 8, 0) + bytes(range(8))
TRAFFIC = [Message(1_000_000 + 500 * i, 0x100 + i % 7, bytes([i % 256, 7])) for i in range(200)]


def read(path: Path, **wanted: object) -> tuple[LogReader, Frames]:
    reader = LogReader(path, CanDatasetSettings(**wanted))  # type: ignore[arg-type]
    return reader, Frames.concatenate(list(reader.blocks()))


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("ticks", [10**6, 10**9])
def test_a_capture_of_any_byte_order_and_resolution_is_read(order: str, ticks: int, tmp_path: Path) -> None:
    packets = [(AT_US, CLASSICAL), (AT_US + 1, EXTENDED)]
    _, frames = read(written(tmp_path / "log", pcap_file(packets, order=order, ticks=ticks)))
    assert np.round(frames.timestamp * 1e6).astype(int).tolist() == [AT_US, AT_US + 1]
    assert frames.can_id.tolist() == [0x12A, 0x18FEF100]
    assert [row[:size].tolist() for row, size in zip(frames.payload, frames.length, strict=True)] == [
        [1, 2], [*range(8)],
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_id_of_a_cooked_capture_is_in_the_byte_order_of_the_file(order: str, tmp_path: Path) -> None:
    frame = struct.pack(f"{order}IBBxx", 0x12A, 1, 0) + b"\x07".ljust(8, b"\0")
    first = struct.pack(">HHH8sH", 1, 280, 0, b"", 0xC) + frame
    assert read(written(tmp_path / "1", pcap_file([(1, first)], order=order, link_type=113)))[1].can_id.tolist() == [
        0x12A
    ]
    second = struct.pack(">HHIHBB8s", 0xC, 0, 5, 280, 0, 0, b"") + frame
    reader, frames = read(written(tmp_path / "2", pcap_file([(1, second)], order=order, link_type=276)))
    assert (frames.can_id.tolist(), list(reader.report.channels)) == ([0x12A], ["5"])


def test_packets_of_other_protocols_are_no_frames(tmp_path: Path) -> None:
    ip = struct.pack(">HHH8sH", 1, 1, 6, b"", 0x0800) + bytes(60)
    can = struct.pack(">HHH8sH", 1, 280, 0, b"", 0xC) + CLASSICAL
    reader, frames = read(written(tmp_path / "log", pcap_file([(1, ip), (2, can)], order=">", link_type=113)))
    assert (len(frames), reader.report.malformed) == (1, 0)


def test_error_xl_and_remote_frames_of_a_capture_are_told_apart(tmp_path: Path) -> None:
    error = struct.pack(">IBBxx", 0x2000_0004, 8, 0) + bytes(8)
    remote = struct.pack(">IBBxx", 0x4000_012A, 8, 0) + bytes(8)
    xl = struct.pack(">IBBH", 0x12A, 0x80, 0, 4) + bytes(8)
    packets = [(at, packet) for at, packet in enumerate([CLASSICAL, error, remote, xl])]
    reader, frames = read(written(tmp_path / "log", pcap_file(packets)))
    assert (frames.can_id.tolist(), frames.length.tolist()) == ([0x12A, 0x12A], [2, 0])
    assert (reader.report.error_frames, reader.report.xl_frames, reader.report.malformed) == (1, 1, 0)


@pytest.mark.parametrize("flags", [0, 4])
def test_a_frame_of_can_fd_is_known_by_its_size_or_its_flag(flags: int, tmp_path: Path) -> None:
    packet = struct.pack(">IBBxx", 0x12A, 12, flags) + bytes(range(64))
    packet = packet if flags == 0 else packet[:20]
    _, frames = read(written(tmp_path / "log", pcap_file([(1, packet), (2, CLASSICAL)])))
    assert frames.length.tolist() == [12, 2]
    assert frames.payload[0, :12].tolist() == [*range(12)]
    assert not frames.payload[0, 12:].any()


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (CLASSICAL[:9], "the frame was cut off"),
        (CLASSICAL[:5], "the frame was cut off"),
        (struct.pack(">IBBxx", 1, 9, 0) + bytes(9), "the payload is longer than 8 bytes"),
        (struct.pack(">IBBxx", 1, 13, 4) + bytes(64), "no CAN FD frame has a payload of this length"),
    ],
)
def test_a_wrong_frame_of_a_capture_is_left_out_and_told_why(packet: bytes, why: str, tmp_path: Path) -> None:
    packets = [(at, CLASSICAL) for at in range(200)]
    reader, frames = read(written(tmp_path / "log", pcap_file([*packets, (200, packet)])))
    assert (len(frames), reader.report.reasons) == (200, {why: 1})


def test_a_capture_that_ends_inside_a_frame_is_read_up_to_it_and_says_so(tmp_path: Path) -> None:
    whole = pcap_file([(at, CLASSICAL) for at in range(200)])
    reader, frames = read(written(tmp_path / "log", whole[:-5]))
    assert (len(frames), reader.report.reasons) == (199, {"the frame was cut off": 1})


def test_a_capture_whose_records_cannot_be_is_refused(tmp_path: Path) -> None:
    damaged = pcap_file([(1, CLASSICAL)]) + struct.pack("<IIII", 1, 1, 2**30, 2**30)
    with pytest.raises(DataError, match=r"is no whole PCAP file.*a record of 1,073,741,824 bytes"):
        read(written(tmp_path / "log", damaged))


def test_a_capture_of_another_kind_of_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is of no CAN interface: .* is of link type 1\b") as caught:
        read(written(tmp_path / "log", pcap_file([(1, bytes(60))], link_type=1)))
    assert "tcpdump -i can0 -w drive.pcap" in caught.value.remedy


@pytest.mark.parametrize("order", ["<", ">"])
def test_interfaces_of_a_capture_have_names_resolutions_and_an_order_in_time(order: str, tmp_path: Path) -> None:
    blocks = [
        pcapng_section(order), pcapng_interface("can0", order), pcapng_interface("can1", order, resolution=6),
        pcapng_packet(AT_US * 1000, CLASSICAL, order), pcapng_packet(AT_US + 10, EXTENDED, order, interface=1),
        pcapng_packet((AT_US + 20) * 1000, CLASSICAL, order),
        pcapng_section(order), pcapng_interface("can2", order, resolution=0x80 | 20),
        pcapng_packet((AT_US + 30) * 2**20 // 10**6 + 1, EXTENDED, order),
    ]  # fmt: skip
    path = written(tmp_path / "log", b"".join(blocks))
    reader, frames = read(path)
    assert np.round(frames.timestamp * 1e5).astype(int).tolist() == [
        round(us / 10) for us in (AT_US, AT_US + 10, AT_US + 20, AT_US + 30)
    ]
    assert frames.can_id.tolist() == [0x12A, 0x18FEF100, 0x12A, 0x18FEF100]
    assert reader.report.channels == {"can0": 2, "can1": 1, "can2": 1}
    assert read(path, channel="can1")[1].can_id.tolist() == [0x18FEF100]


def test_a_format_that_was_asked_for_must_be_that_of_the_log(tmp_path: Path) -> None:
    capture = written(tmp_path / "drive.pcap", pcap_file([(1, CLASSICAL)]))
    text = written(tmp_path / "drive.log", candump(TRAFFIC).encode())
    assert read(capture, format="pcap")[0].format == "pcap"
    with pytest.raises(DataError, match=r"is pcap, and candump was asked for: .*drive\.pcap"):
        read(capture, format="candump")
    with pytest.raises(DataError, match=r"is text, and sqlite was asked for: .*drive\.log"):
        read(text, format="sqlite")
    with pytest.raises(ConfigError):
        CanDatasetSettings(format="pcapp")


def test_what_python_can_reads_of_its_database_is_read(tmp_path: Path) -> None:
    can = pytest.importorskip("can")
    path = tmp_path / "drive.db"
    with can.Logger(str(path)) as logger:
        for i in range(60):
            logger.on_message_received(
                can.Message(timestamp=1_700_000_000 + i / 1000, arbitration_id=0x100 + i * 99_999 % 0x1FFF_0000,
                            is_extended_id=True, data=bytes(range(i % 9)), is_remote_frame=i == 7, dlc=i % 9,
                            is_error_frame=i == 20)
            )  # fmt: skip
    reader, frames = read(path)
    with can.LogReader(str(path)) as log:
        messages = [message for message in log if not message.is_error_frame]
    assert (reader.format, reader.report.error_frames, reader.report.malformed) == ("sqlite", 1, 0)
    assert frames.timestamp.tolist() == [message.timestamp for message in messages]
    assert frames.can_id.tolist() == [message.arbitration_id for message in messages]
    assert [bytes(row[:size]) for row, size in zip(frames.payload, frames.length, strict=True)] == [
        b"" if message.is_remote_frame else bytes(message.data) for message in messages
    ]


def test_wrong_rows_of_a_database_are_left_out_and_told_why(tmp_path: Path) -> None:
    sqlite = WRITERS["sqlite"].write
    path = written(tmp_path / "drive.db", bytes(sqlite(TRAFFIC)))  # type: ignore[arg-type]
    rows = [(None, 1, 0, 1, b"x"), (1.2, 2**30, 0, 1, b"x"), (1.2, 1, 0, 2, b"x"), (1.2, "words", 0, 1, b"x"),
            (1.2, 1, 0, 1, None), (1.2, 1, 0, 65, bytes(65))]  # fmt: skip
    with closing(sqlite3.connect(path)) as database:
        database.executemany("INSERT INTO messages VALUES (?, ?, 0, ?, 0, ?, ?)", rows)
        database.commit()
    reader, frames = read(path, max_malformed=0.1)
    assert len(frames) == len(TRAFFIC)
    assert reader.report.reasons == {
        "a field is missing": 3, "the ID does not fit into 29 bits": 1, "the DLC disagrees with the payload": 1,
        "no CAN FD frame has a payload of this length": 1,
    }  # fmt: skip


def test_a_database_of_another_program_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE songs (name TEXT)")
        database.commit()
    with pytest.raises(DataError, match=r"python-can's table: .*other.db has the tables songs.\n.*messages \(ts, "):
        read(tmp_path / "other.db")
    damaged = bytes(WRITERS["sqlite"].write(TRAFFIC))[:6000]  # type: ignore[arg-type]
    with pytest.raises(DataError, match="is no whole SQLITE file"):
        read(written(tmp_path / "drive.db", damaged))


def frames_table(size: int) -> pl.DataFrame:
    """Frames as X-CANIDS has them in parquet."""
    return pl.DataFrame({
        "arbitration_id": [0x110 + i % 3 for i in range(size)], "dlc": [i % 9 for i in range(size)],
        "data": [bytes(range(i % 9)) for i in range(size)], "label": [int(i % 10 == 0) for i in range(size)],
        "timestamp": pl.Series([i * 1_000_000 for i in range(size)]).cast(pl.Duration("ns")),
    })  # fmt: skip


def test_frames_in_parquet_are_read_with_their_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_TABLE_ROWS", 7)
    table = frames_table(100)
    table.write_parquet(tmp_path / "dump6-fabr-110h.parquet")
    reader, frames = read(tmp_path / "dump6-fabr-110h.parquet")
    assert (reader.format, reader.labelled, reader.kinds) == ("parquet", True, ["benign", "attack"])
    np.testing.assert_allclose(frames.timestamp, np.arange(100) / 1000)
    assert frames.can_id.tolist() == table["arbitration_id"].to_list()
    assert frames.label.tolist() == table["label"].to_list()
    payloads = [bytes(row[:size]) for row, size in zip(frames.payload, frames.length, strict=True)]
    assert payloads == table["data"].to_list()


IDS = [0x110, 0x316, 0x545]


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([f"0x{can_id:X}" for can_id in IDS], {}),
        ([f"{can_id:04x}" for can_id in IDS], {}),
        ([f"{can_id:X}" for can_id in IDS], {"id_base": "hex"}),
        ([str(can_id) for can_id in IDS], {"id_base": "dec"}),
        ([*map(float, IDS)], {"id_base": "hex"}),  # a base of texts
        (IDS, {"id_base": "auto_hex"}),
    ],
)
def test_ids_of_a_table_are_read_as_those_of_csv(ids: list[object], wanted: dict[str, str], tmp_path: Path) -> None:
    table = frames_table(99).with_columns(arbitration_id=pl.Series(ids * 33))
    table.write_parquet(tmp_path / "log.parquet")
    reader, frames = read(tmp_path / "log.parquet", **wanted)
    assert frames.can_id.tolist() == IDS * 33
    assert (reader.report.malformed, reader.report.summary()) == (0, [])


@pytest.mark.parametrize("names", [("time", "can_id", "payload", "attack"), ("ts", "ID", "Data Field", "Class")])
def test_columns_of_a_table_are_known_by_the_names_of_csv(names: tuple[str, ...], tmp_path: Path) -> None:
    words = pl.Series(["DoS" if i % 10 == 0 else "Normal" for i in range(60)])
    table = frames_table(60).with_columns(label=words, data=pl.col("data").bin.encode("hex"))
    old = ("timestamp", "arbitration_id", "data", "label")
    table.rename(dict(zip(old, names, strict=True))).write_parquet(tmp_path / "log.parquet")
    reader, frames = read(tmp_path / "log.parquet")
    assert (reader.kinds, frames.label.tolist()) == (["benign", "dos"], [int(i % 10 == 0) for i in range(60)])
    assert frames.can_id[:3].tolist() == [0x110, 0x111, 0x112]
    assert frames.length.tolist() == [i % 9 for i in range(60)]


@pytest.mark.parametrize(
    ("data", "name"),
    [([[16, 5, 255]], "data"), (["10 05 ff"], "data"), (["16 5 255"], "data"), ([b"\x10\5\xff"], "data")],
)
def test_payloads_of_a_table_may_be_bytes_numbers_or_texts(data: list[object], name: str, tmp_path: Path) -> None:
    table = frames_table(9).drop("dlc", "data").with_columns(pl.Series(name, data * 9))
    table.write_parquet(tmp_path / "log.parquet")
    assert read(tmp_path / "log.parquet")[1].payload[:, :3].tolist() == [[16, 5, 255]] * 9


def test_byte_columns_of_a_table_are_numbers(tmp_path: Path) -> None:
    table = frames_table(9).drop("dlc", "data").with_columns(d0=pl.lit(16), d1=pl.lit(5.0), d2=pl.lit(None, pl.Float64))
    table.write_parquet(tmp_path / "log.parquet")
    frames = read(tmp_path / "log.parquet")[1]
    assert (frames.payload[0, :2].tolist(), frames.length[0]) == ([16, 5], 2)


@pytest.mark.parametrize("start_s", [0.0, 1.7e9])
@pytest.mark.parametrize(("unit", "ticks"), [("s", 1), ("ms", 1e3), ("us", 1e6)])
@pytest.mark.parametrize("is_set", [True, False])
def test_times_of_a_table_have_the_unit_that_is_set_or_seen(
    unit: str, ticks: float, start_s: float, is_set: bool, tmp_path: Path
) -> None:
    times = start_s + np.arange(200) / 100
    table = frames_table(200).with_columns(timestamp=pl.Series((times * ticks).round(4)))
    table.write_parquet(tmp_path / "log.parquet")
    reader, frames = read(tmp_path / "log.parquet", time_unit=unit if is_set else "auto")
    np.testing.assert_allclose(frames.timestamp, times, rtol=0, atol=2e-4)
    assert ("times were read" in "".join(reader.report.summary())) == (not is_set and unit != "s")


def test_dates_of_a_table_have_no_unit_to_set(tmp_path: Path) -> None:
    times = pl.Series([1_700_000_000_000_001 + i * 1000 for i in range(60)]).cast(pl.Datetime("us", "UTC"))
    table = frames_table(60).with_columns(timestamp=times.dt.convert_time_zone("Europe/Berlin"))
    table.write_parquet(tmp_path / "log.parquet")
    frames = read(tmp_path / "log.parquet", time_unit="ms")[1]
    assert (frames.timestamp * 1e6).round().astype(int).tolist() == times.cast(pl.Int64).to_list()


def test_logs_of_text_do_not_take_the_bases_of_a_table(tmp_path: Path) -> None:
    frames_table(60).write_parquet(tmp_path / "a.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.csv", tmp_path / "c.csv"]
    paths[1].write_text("timestamp,id,data\n1.5,316,00\n")
    paths[2].write_text("timestamp,id,data\n1.5,31A,00\n")
    decided, notes = decide_bases(paths, CanDatasetSettings())
    assert ([decided[path].id_base for path in paths], notes) == (["dec", "hex", "hex"], [])
    assert read(paths[0])[0].id_base == ""


def test_parts_of_a_table_are_spread_over_it(tmp_path: Path) -> None:
    frames_table(10_000).write_parquet(tmp_path / "log.parquet")
    sample = LogReader(tmp_path / "log.parquet", CanDatasetSettings()).sample(4, 1000, 10**6)
    starts = [part.timestamp[0] for part in sample.frames]
    assert (len(starts), starts[0], sample.text.complete) == (4, 0.0, False)
    assert 9.5 < starts[-1] < 10
    assert abs(sample.expected_frames - 10_000) < 500


def test_a_table_of_signals_and_a_damaged_table_are_refused(tmp_path: Path) -> None:
    frames_table(20).drop("data").write_parquet(tmp_path / "dump1.parquet")
    with pytest.raises(
        DataError, match=r"has no data column: .*dump1.parquet: among .*\n.*columns.data=NAME.*folder raw"
    ):
        read(tmp_path / "dump1.parquet")
    with pytest.raises(DataError, match="is no whole parquet file"):
        read(written(tmp_path / "dump2.parquet", b"PAR1" + bytes(100)))


def test_a_compressed_database_is_refused_with_a_remedy(tmp_path: Path) -> None:
    packed = gzip.compress(bytes(WRITERS["sqlite"].write(TRAFFIC)))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="is a SQLITE file that was compressed") as caught:
        read(written(tmp_path / "drive.db.gz", packed))
    assert "Unpack it" in caught.value.remedy
