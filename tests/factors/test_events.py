import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from can_train.errors import ArgumentError, ConfigError, StateError
from can_train.factors.observations import Event, Imported, Observation, next_time, read_records, write_record
from can_train.factors.policies import MomentumPolicy
from can_train.factors.store import FactorStore, get_safety_factor_db
from can_train.factors.summary import FactorSummary, summarize
from can_train.io.records import SCHEMA, utc_text
from fakes.samples import A100, KEY, V100, at, observation, out_of_memory, started

OTHER = "set_01_vgae_student_autoencoder"


def reset(minute: float, **changed: Any) -> Event:
    return Event(**{"kind": "reset", "time": at(minute), "key": KEY, **changed})


def pin(minute: float, value: float = 0.5, **changed: Any) -> Event:
    return Event(**{"kind": "pin", "time": at(minute), "key": KEY, "value": value, **changed})


def imported(minute: float, **devices: float) -> Event:
    entries = {KEY: {name.replace("_", "-"): Imported(safety_factor=factor) for name, factor in devices.items()}}
    return Event(kind="import", time=at(minute), source="old.json", entries=entries)


def only(runs: list[Observation], *events: Event) -> FactorSummary:
    return next(record for record in summarize(runs, events, MomentumPolicy()) if record.device == V100.key)


def store_with(state: Path, *runs: Observation) -> FactorStore:
    for run in runs:
        write_record(state, run)
    return get_safety_factor_db(state)


def test_after_a_reset_the_next_run_is_a_first_one_and_the_history_stays() -> None:
    record = only([observation(1), out_of_memory(2)], reset(30))
    assert (record.state, record.factor, record.interval) == ("reset", None, None)
    assert (len(record.runs), len(record.runs_before_reset), record.ooms) == (0, 2, 0)
    assert record.reason == "reset on 2026-01-01; the next run is a first one"


def test_a_run_that_was_under_way_at_the_reset_teaches_nothing() -> None:
    assert only([observation(1)], reset(12)).state == "reset"
    assert only([observation(1)], reset(10)).state == "learned"


def test_runs_after_a_reset_teach_from_a_first_factor_of_their_own() -> None:
    record = only([out_of_memory(1), observation(2, factor=0.6, used=0.6)], reset(15))
    assert (record.factor, record.state) == (pytest.approx(0.6 + 0.3 * 0.3 * 0.28), "learned")
    assert (len(record.runs), len(record.runs_before_reset)) == (1, 1)


@pytest.mark.parametrize(
    ("event", "concerned"),
    [
        (reset(99), True), (reset(99, key=None), True), (reset(99, device="v100-16gb"), True),
        (reset(99, key=OTHER), False), (reset(99, device="a100-40gb"), False),
    ],
)  # fmt: skip
def test_a_reset_concerns_its_key_and_device(event: Event, concerned: bool) -> None:
    assert (only([observation(1)], event).state == "reset") is concerned


def test_a_pin_holds_whatever_is_learned_beneath_it() -> None:
    free, pinned = only([observation(1)]), only([observation(1)], pin(12))
    assert (pinned.factor, pinned.state) == (0.5, "pinned")
    assert pinned.reason == "pinned at 0.5 by hand on 2026-01-01"
    assert (pinned.learned_factor, pinned.interval) == (free.factor, free.interval)
    assert only([observation(1)], pin(12), reset(13)).factor == 0.5


def test_an_unpin_lets_the_learned_factor_hold_again() -> None:
    unpin = Event(kind="unpin", time=at(13), key=KEY)
    assert only([observation(1)], pin(12), unpin) == only([observation(1)])
    assert only([observation(1)], pin(12), unpin, pin(14, 0.3)).factor == 0.3
    assert summarize([], [pin(12), unpin]) == []


def test_a_pin_may_come_before_the_first_run(tmp_path: Path) -> None:
    store = get_safety_factor_db(tmp_path)
    store.pin(KEY, 0.4)
    choice = store.learned_rule(KEY, "never-seen").decided
    assert (store.get_factor(KEY), choice.value if choice else None) == (0.4, 0.4)
    assert store.learned_rule(OTHER, "never-seen").decided is None
    assert store.get_stats(KEY)["num_runs"] == 0


def test_a_pin_of_one_device_leaves_the_others_alone(tmp_path: Path) -> None:
    store = store_with(tmp_path, observation(1), observation(2, device=A100))
    free = store.get_factor(KEY, "a100-40gb")
    store.pin(KEY, 0.4, "v100-16gb")
    assert (store.get_factor(KEY, "v100-16gb"), store.get_factor(KEY, "a100-40gb")) == (0.4, free)


def test_an_import_is_a_first_factor_that_runs_teach_on_from() -> None:
    record = only([out_of_memory(1)], imported(30, v100_16gb=0.7))
    assert (record.state, record.factor, record.reason) == ("imported", 0.7, "imported from old.json")
    assert only([], imported(30, v100_16gb=0.01)).factor == 0.01
    record = only([out_of_memory(1), observation(4, used=0.7)], imported(30, v100_16gb=0.7))
    assert (record.state, record.factor) == ("learned", pytest.approx(0.7 + 0.3 * 0.3 * 0.28))
    assert record.initial_reason == "imported from old.json"


def test_an_import_without_a_device_holds_for_those_without_an_entry() -> None:
    event = imported(30, **{"": 0.7, "a100_40gb": 0.3})
    runs = [observation(1), observation(2, device=A100)]
    factors = {record.device: record.factor for record in summarize(runs, [event])}
    assert factors == {"": 0.7, "a100-40gb": 0.3, "v100-16gb": 0.7}


def test_an_older_event_that_arrives_later_undoes_nothing(tmp_path: Path) -> None:
    write_record(tmp_path, pin(12, 0.3))
    write_record(tmp_path, pin(11, 0.9))
    assert [event.value for event in read_records(tmp_path).events] == [0.9, 0.3]
    assert get_safety_factor_db(tmp_path).get_factor(KEY) == 0.3


def test_a_clock_that_was_set_back_does_not_keep_a_reset_from_what_it_resets(tmp_path: Path) -> None:
    future = "2200-01-01T00:00:00.000000+00:00"
    store = store_with(tmp_path, observation(1, start_time=future, end_time=future))
    store.reset(KEY)
    with pytest.raises(ConfigError, match="The factor was reset"):
        store.get_factor(KEY)
    assert store.learned_rule(KEY, "v100-16gb").decided is None


def test_after_a_clock_was_set_back_by_years_decisions_still_follow_what_they_are_about(tmp_path: Path) -> None:
    future = "2200-01-01T00:00:00.000000+00:00"
    path = write_record(tmp_path, observation(1, start_time=future, end_time=future))
    os.utime(path, (datetime.fromisoformat(future).timestamp(),) * 2)  # its file system had the same clock
    store = get_safety_factor_db(tmp_path)
    for decide, state in ((lambda: store.pin(KEY, 0.3, V100.key), "pinned"), (lambda: store.unpin(KEY), "learned"),
                          (lambda: store.reset(KEY), "reset")):  # fmt: skip
        decide()
        assert [summary.state for summary in store.records()] == [state]
    assert read_records(tmp_path).set_aside == []


def test_what_comes_later_never_looks_earlier(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    soon, later = now + timedelta(hours=2), now + timedelta(hours=3)
    assert next_time(tmp_path / "none") < utc_text(soon)
    write_record(tmp_path, started(1, start_time=utc_text(soon)))
    assert next_time(tmp_path) == utc_text(soon + timedelta(microseconds=1))
    write_record(tmp_path, Event(kind="reset", time=utc_text(later)))
    assert next_time(tmp_path) == utc_text(later + timedelta(microseconds=1))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kind": "boost"}, "Invalid enum value 'boost'"), ({"time": "now"}, "isoformat"),
        ({"value": 2.0}, r"not in \(0, 1]"),
        ({"value": None}, r"not in \(0, 1]"), ({"key": None}, "key of pin is missing"), ({"schema": 9}, "newer"),
        ({"entries": {"k": 3}}, "got `int` - at `\\$.entries"),
        ({"entries": {"k": {"d": {"safety_factor": 0}}}}, "> 0.0"),
        ({"entries": {"k": {"d": {"safety_factor": "x"}}}}, "got `str` - at .*safety_factor"),
        ({"device": 3}, "got `int` - at `\\$.device"),
        ({"entries": {"k": {"d": {"factor": 0.5}}}}, "safety_factor"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_event_is_set_aside(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write_record(tmp_path, pin(1))
    values = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps(values))
    log = read_records(tmp_path)
    assert (log.events, [aside.path for aside in log.set_aside]) == ([], [path])
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(log.set_aside[0].reason)
    assert json.loads(path.read_text()) == values


def test_a_pin_that_is_no_share_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    for value in (0.0, 1.1, -1.0, float("nan")):
        with pytest.raises(ArgumentError, match=r"The factor is not in \(0, 1]"):
            get_safety_factor_db(tmp_path).pin(KEY, value)
    assert not (tmp_path / "events").exists()


def test_an_events_folder_that_is_a_file_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("")
    store = get_safety_factor_db(tmp_path)
    for act in (
        store.records,
        lambda: store.pin(KEY, 0.5),
        lambda: store.learned_rule(KEY, V100.key),
        store.refresh_export,
    ):
        with pytest.raises(StateError):
            act()


def test_schema_is_written(tmp_path: Path) -> None:
    assert json.loads(write_record(tmp_path, pin(1)).read_text())["schema"] == SCHEMA


@pytest.mark.parametrize("year", ["8999", "9000", "2400"])
def test_a_record_of_the_far_future_counts_from_when_its_file_was_written(tmp_path: Path, year: str) -> None:
    late = f"{year}-12-31T23:59:59.999999+00:00"
    late_event = Event(kind="pin", time=late, key=KEY, value=0.3)
    for record in (
        observation(1, start_time=late, end_time=late),
        late_event,
        started(2, run_id="later", start_time=late),
    ):
        # As where another host's clock is ahead, and not that of the folder's server.
        os.utime(write_record(tmp_path, record))
    store = get_safety_factor_db(tmp_path)
    assert len(read_records(tmp_path).set_aside) == 3
    assert all(aside.is_read and late in aside.reason for aside in read_records(tmp_path).set_aside)
    store.unpin(KEY)
    store.pin(KEY, 0.5)
    assert next_time(tmp_path) < "2400"
    assert store.get_factor(KEY) == 0.5
    store.unpin(KEY)
    store.reset(KEY)
    with pytest.raises(ConfigError, match="was reset"):
        store.get_factor(KEY)
    store.refresh_export()


def test_a_clock_a_few_hours_ahead_is_believed(tmp_path: Path) -> None:
    soon = utc_text(datetime.now(UTC) + timedelta(hours=5))
    write_record(tmp_path, observation(1, start_time=soon, end_time=soon))
    log = read_records(tmp_path)
    assert (log.finished[0].end_time, log.set_aside) == (soon, [])
