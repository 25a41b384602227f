"""Units of time: named by a column or a setting, recognised by how often IDs repeat, and never taken in silence."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ConfigError
from can_train_tasks.can.data.clocks import TICKS_PER_SECOND, guess_unit, unit_of_name
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings

STEMS = ("timestamp", "time", "ts")
# Periods of a car's IDs in seconds.
PERIODS_S = (0.01, 0.01, 0.02, 0.02, 0.05, 0.1, 0.2, 1.0)


def bus(seconds: float, start_s: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Times and IDs of a car's bus."""
    times = [np.arange(0.001 * i, seconds, period) for i, period in enumerate(PERIODS_S)]
    ids = np.repeat(np.arange(len(times)), [len(one) for one in times])
    order = np.argsort(np.concatenate(times))
    return start_s + np.concatenate(times)[order], ids[order].astype(np.uint32)


def read(path: Path, unit: str, *, head: str = "time", start_s: float = 0.0, **wanted: object) -> tuple[Frames, list]:
    """Reads a CSV file whose times are of a unit."""
    times, ids = bus(2.0, start_s)
    ticks = np.round(times * TICKS_PER_SECOND[unit], 6 if unit == "s" else 0)
    rows = [f"{tick:.6f},0x{can_id:03X},00ff" for tick, can_id in zip(ticks, ids, strict=True)]
    path.write_text(f"{head},id,data\n" + "\n".join(rows) + "\n")
    reader = LogReader(path, CanDatasetSettings(**wanted))  # type: ignore[arg-type]
    return Frames.concatenate(list(reader.blocks())), reader.report.summary()


@pytest.mark.parametrize("start_s", [0.0, 5e4, 1.7e9])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_unit_is_recognised_and_said(unit: str, start_s: float, tmp_path: Path) -> None:
    frames, notes = read(tmp_path / "log.csv", unit, start_s=start_s)
    steps = np.diff(frames.timestamp)
    np.testing.assert_allclose(steps, np.diff(bus(2.0)[0]), atol=2e-3 if unit == "ms" else 2e-6)
    said = [note for note in notes if "dataset.time_unit=" in note]
    assert len(said) == (unit != "s")
    assert not said or "times were read as " in said[0]


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        ("time", ""), ("Time Stamp", ""), ("timestamps", ""), ("Time [s]", ""), ("time_ms", "ms"),
        ("timestamp (us)", "us"), ("ts_ns", "ns"), ("Time [µs]", "us"), ("Time [μs]", "us"), ("milliseconds", "ms"),
        ("TimeMicroseconds", "us"),
        ("time_sec", "s"), ("ms", None), ("id", None), ("timeout", None),
    ],
)  # fmt: skip
def test_a_columns_name_tells_its_unit(column: str, unit: str | None) -> None:
    assert unit_of_name(column, STEMS) == unit


def test_a_unit_in_a_name_goes_before_a_guess(tmp_path: Path) -> None:
    frames, notes = read(tmp_path / "log.csv", "s", head="time_ms")
    assert frames.timestamp[-1] < 0.002
    (told,) = notes
    assert "frames a second are more than a bus carries" in told


def test_a_unit_that_was_set_goes_before_anything_else(tmp_path: Path) -> None:
    frames, notes = read(tmp_path / "log.csv", "ms", time_unit="s")
    assert frames.timestamp[-1] > 1000
    assert notes == []
    with pytest.raises(ConfigError, match=r"dataset\.time_unit"):
        CanDatasetSettings(time_unit="minutes")


@given(period=st.floats(1.0, 4.9))
def test_a_slow_bus_is_read_as_seconds_with_a_word_of_doubt(period: float) -> None:
    unit, note = guess_unit(np.arange(100) * period, np.zeros(100, np.uint32), decimals=6)
    assert unit == "s"
    assert "dataset.time_unit=ms" in note


@pytest.mark.parametrize(("unit", "decimals"), [("ms", 3), ("ms", 0), ("us", 0), ("ns", 0)])
def test_a_fast_bus_is_told_from_a_slow_one_by_the_digits_of_its_times(unit: str, decimals: int) -> None:
    ticks = np.arange(200) * 0.0005 * TICKS_PER_SECOND[unit]
    ids = (np.arange(200) % 7).astype(np.uint32)
    assert guess_unit(ticks, ids, decimals)[0] == unit
    assert guess_unit(ticks, ids, decimals=6)[0] != unit


@pytest.mark.parametrize("start_s", [0.0, 1.7e9])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("ids", [1, 300])
def test_a_flood_at_the_beginning_does_not_change_the_unit(unit: str, start_s: float, ids: int, tmp_path: Path) -> None:
    times, of_bus = bus(4.0)
    flood = np.arange(6000) * 0.0003
    both = np.concatenate([flood, times])
    order = np.argsort(both, kind="stable")
    written = np.concatenate([np.arange(6000) % ids, of_bus + 0x400])[order]
    ticks = (start_s + both[order]) * TICKS_PER_SECOND[unit]
    rows = [f"{tick:.6f},0x{can_id:03X},00ff" for tick, can_id in zip(ticks, written, strict=True)]
    (tmp_path / "log").write_text("time,id,data\n" + "\n".join(rows) + "\n")
    reader = LogReader(tmp_path / "log", CanDatasetSettings())
    frames = Frames.concatenate(list(reader.blocks()))
    np.testing.assert_allclose(frames.timestamp - start_s, both[order], atol=2e-5)
    assert (reader.report.summary() != []) == (unit != "s")


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_since_1970_tell_their_unit_in_a_flood_alone(unit: str) -> None:
    ticks = (1.7e9 + np.arange(1000) * 0.0003) * TICKS_PER_SECOND[unit]
    assert guess_unit(ticks, np.zeros(1000, np.uint32), decimals=3)[0] == unit


def test_a_unit_in_which_no_bus_has_the_rate_is_not_guessed() -> None:
    ids = np.tile(np.arange(50, dtype=np.uint32), 20)
    assert guess_unit(np.arange(1000) * 0.02, ids, decimals=2)[0] == "s"  # each ID every second, 50 frames a second


def test_a_few_frames_are_no_reason_to_guess() -> None:
    assert guess_unit(np.arange(10) * 1000.0, np.zeros(10, np.uint32), decimals=0) == ("s", "")


def test_milliseconds_of_candump_are_recognised_too(tmp_path: Path) -> None:
    times, ids = bus(2.0, 1.7e9)
    path = tmp_path / "candump.log"
    path.write_text("".join(f"({t * 1000:.3f}) can0 {i:03X}#00\n" for t, i in zip(times, ids, strict=True)))
    reader = LogReader(path, CanDatasetSettings())
    (frames,) = reader.blocks()
    np.testing.assert_allclose(frames.timestamp, times, atol=1e-6)
    assert "times were read as milliseconds" in reader.report.summary()[0]


@pytest.mark.parametrize("time", ["1e308", "-1e308", "1e400", "nan", "inf", "9e99"])
def test_a_time_that_is_none_is_a_malformed_row(time: str, tmp_path: Path) -> None:
    rows = [f"(1.{i:06d}) can0 123#00" for i in range(0, 300_000, 1000)]
    (tmp_path / "log").write_text("\n".join([*rows[:100], f"({time}) can0 123#00", *rows[100:]]) + "\n")
    reader = LogReader(tmp_path / "log", CanDatasetSettings())
    (frames,) = reader.blocks()
    assert (len(frames), reader.report.malformed) == (300, 1)
    assert np.abs(frames.timestamp).max() < 2


def test_dates_are_seconds_whatever_their_offset(tmp_path: Path) -> None:
    dates = ("2026-01-31T12:00:00.250Z", "2026-01-31 13:00:00.5+01:00", "2026-01-31T10:30:01-0130")
    (tmp_path / "log.csv").write_text("time,id,data\n" + "".join(f"{date},0x1,00\n" for date in dates))
    (frames,) = LogReader(tmp_path / "log.csv", CanDatasetSettings()).blocks()
    assert frames.timestamp.tolist() == [1769860800.25, 1769860800.5, 1769860801.0]


def test_a_date_that_is_none_is_malformed(tmp_path: Path) -> None:
    rows = [f"2026-01-31T12:00:{i // 10:02d}.{i % 10}00,0x1,00" for i in range(100)]
    (tmp_path / "log.csv").write_text("\n".join(["time,id,data", *rows, "2026-02-30T12:00:00,0x1,00"]) + "\n")
    reader = LogReader(tmp_path / "log.csv", CanDatasetSettings(max_malformed=0.1))
    (frames,) = reader.blocks()
    assert (len(frames), dict(reader.report.reasons)) == (100, {"the timestamp is not a number": 1})
