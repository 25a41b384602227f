import json
import os
import re
import resource
import signal
import socket
import stat
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import StateError
from can_train.factors.observations import Observation, read_records, without_size, write_record
from can_train.io.records import SCHEMA, utc_now
from fakes.samples import at, observation, out_of_memory, started

text = st.text(st.characters(codec="utf-8"))
counts = st.integers(0, 2**60)
some_observations = st.builds(
    observation,
    run_id=text, attempt=counts, rank=counts, key=text, size=text, factor=st.floats(0.01, 1.0), factor_reason=text,
    outcome=st.sampled_from(["ok", "rescued", "oom", "interrupted", "error"]),
    capacity_bytes=st.integers(1, 2**60), peak_allocated_bytes=st.none() | counts, used=st.none() | st.floats(0, 9),
    tuned_limit=st.none() | counts, fingerprint=st.dictionaries(text, st.none() | text | counts | st.booleans()),
)  # fmt: skip


def damaged(state: Path, content: bytes | str, name: str = "foreign.json") -> str:
    """The reason for which a file beside a good one is set aside."""
    write_record(state, observation())
    path = state / "observations" / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    log = read_records(state)
    assert log.finished == [observation()]
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert [aside.path for aside in log.set_aside] == [path]
    return log.set_aside[0].reason


def as_json(**changed: Any) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(observation()), **changed})


def test_each_rank_of_an_attempt_has_files_of_its_own(tmp_path: Path) -> None:
    for rank in range(3):
        write_record(tmp_path, started(rank=rank))
    for rank in range(2):
        write_record(tmp_path, observation(rank=rank))
    log = read_records(tmp_path)
    assert sorted(one.rank for one in log.finished) == [0, 1]
    assert [one.rank for one in log.unfinished] == [2]


def test_a_file_from_before_there_were_ranks_is_of_rank_0(tmp_path: Path) -> None:
    path = write_record(tmp_path, observation(rank=0))
    old = {name: value for name, value in json.loads(path.read_text()).items() if name != "rank"}
    path.unlink()
    path.write_text(json.dumps(old))
    assert read_records(tmp_path).finished == [observation()]


@given(record=some_observations)
def test_what_is_written_is_read_back(record: Observation, tmp_path_factory: pytest.TempPathFactory) -> None:
    state = tmp_path_factory.mktemp("state")
    write_record(state, record)
    assert read_records(state).finished == [record]


def test_a_folder_that_does_not_exist_is_empty_and_stays_so(tmp_path: Path) -> None:
    log = read_records(tmp_path / "none")
    assert (log.finished, log.unfinished, log.set_aside) == ([], [], [])
    assert not (tmp_path / "none").exists()


def test_observations_come_in_the_order_in_which_their_attempts_began(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        write_record(tmp_path, observation(number, run_id=f"z{9 - number}"))
    assert [record.run_id for record in read_records(tmp_path).finished] == ["z8", "z7", "z6"]


def test_an_attempt_that_began_and_left_nothing_is_unfinished(tmp_path: Path) -> None:
    for number in (1, 2):
        write_record(tmp_path, started(number))
    write_record(tmp_path, observation(2))
    log = read_records(tmp_path)
    assert log.unfinished == [started(1)]
    assert log.finished == [observation(2)]


def test_an_observation_is_never_overwritten(tmp_path: Path) -> None:
    write_record(tmp_path, observation())
    with pytest.raises(StateError, match="a file of this name exists, and stays"):
        write_record(tmp_path, out_of_memory())
    assert read_records(tmp_path).finished == [observation()]


def test_attempts_of_one_run_and_runs_of_one_moment_have_files_of_their_own(tmp_path: Path) -> None:
    records = [observation(), observation(attempt=2), observation(run_id="other"), observation(start_time=at(10.5))]
    for record in records:
        write_record(tmp_path, record)
    assert len(read_records(tmp_path).finished) == 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "empty"),
        (as_json()[:-40], "truncated"),
        (b"\x80\x81", "malformed"),
        ("[1, 2]", "not a record of can-train"),
        ('{"safety_factor": 0.5}', "not a record of can-train"),
        ("[" * 100_000, "recursion|not a record"),
        (as_json(schema=2), "newer can-train"),
        (as_json(factor=7.0), "<= 1.0 - at `\\$.factor"),
        (as_json(factor="0.5"), "got `str` - at `\\$.factor"),
        (as_json(attempt=True), "got `bool` - at `\\$.attempt"),
        (as_json(capacity_bytes=0), ">= 1 - at `\\$.capacity_bytes"),
        (as_json(outcome="fine"), "Invalid enum value 'fine'"),
        (as_json(start_time="yesterday"), "isoformat"),
        (as_json(end_time="2026-01-01T00:00:00"), "time zone"),
        (as_json(used=-1.0), ">= 0.0 - at `\\$.used"),
        (as_json(device={"key": "x"}), "missing required field `name`"),
        (json.dumps({"schema": 1, "run_id": "x"}), "missing required field `attempt`"),
    ],
)
def test_a_file_that_is_no_observation_is_set_aside_and_left_alone(
    content: bytes | str, reason: str, tmp_path: Path
) -> None:
    assert re.search(reason, damaged(tmp_path, content))


def test_a_damaged_started_file_is_set_aside(tmp_path: Path) -> None:
    assert damaged(tmp_path, "", "x.started.json") == "empty"


def test_files_still_being_written_and_other_files_are_passed_over(tmp_path: Path) -> None:
    write_record(tmp_path, observation())
    (tmp_path / "observations" / ".0123456789abcdef.tmp").write_text("{")
    (tmp_path / "observations" / "README").write_text("?")
    log = read_records(tmp_path)
    assert (len(log.finished), log.set_aside) == (1, [])


def test_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    path = write_record(tmp_path, observation())
    path.write_text(as_json(temperature=41))
    assert read_records(tmp_path).finished == [observation()]


def test_whole_numbers_are_read_where_fractions_are_meant(tmp_path: Path) -> None:
    path = write_record(tmp_path, observation())
    path.write_text(as_json(factor=1, used=1))
    assert read_records(tmp_path).finished[0].factor == 1.0


@pytest.mark.parametrize("run_id", ["../../escape", "a/b", "näme", "x" * 400, "", "-"])
def test_no_run_id_leads_out_of_the_folder(run_id: str, tmp_path: Path) -> None:
    path = write_record(tmp_path, observation(run_id=run_id))
    assert path.parent == tmp_path / "observations"
    assert read_records(tmp_path).finished[0].run_id == run_id


def test_a_place_that_is_no_folder_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StateError, match="cannot be written"):
        write_record(tmp_path / "state", observation())
    with pytest.raises(StateError, match="cannot be read"):
        read_records(tmp_path / "state")


def test_a_fingerprint_that_json_does_not_know_is_a_state_error(tmp_path: Path) -> None:
    for value in (object(), float("inf")):
        with pytest.raises(StateError, match="cannot be written"):
            write_record(tmp_path, observation(fingerprint={"x": value}))
    assert read_records(tmp_path).finished == []


def test_files_of_a_shared_folder_can_be_read_by_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = write_record(tmp_path, observation())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def write_many(state: Path, worker: int) -> None:
    for number in range(25):
        write_record(state, observation(number, run_id=f"{worker}"))


def test_many_processes_lose_nothing(tmp_path: Path) -> None:
    context = get_context("fork")
    workers = [context.Process(target=write_many, args=(tmp_path, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(read_records(tmp_path).finished) == 100


def test_the_clock_is_written_to_the_microsecond_and_in_utc() -> None:
    record = observation(start_time=utc_now())
    assert record.started.utcoffset() is not None
    assert len(record.start_time) == len(at(0))


def test_an_out_of_memory_beside_other_processes_is_not_the_configurations_fault() -> None:
    assert out_of_memory().ran_out_of_memory
    assert observation(outcome="rescued", ooms_rescued=1).ran_out_of_memory
    assert not out_of_memory(foreign_bytes=101).ran_out_of_memory
    assert out_of_memory(foreign_bytes=100).ran_out_of_memory
    assert not observation().ran_out_of_memory


@pytest.mark.parametrize(
    ("key", "size", "short"),
    [
        ("hcrl_ch_gat_teacher_normal", "teacher", "hcrl_ch_gat_normal"),
        ("my_teacher_log_vgae_teacher_autoencoder", "teacher", "my_teacher_log_vgae_autoencoder"),
        ("muon_wgan_normal", "", "muon_wgan_normal"),
        ("teacher_normal", "teacher", "teacher_normal"),
    ],
)
def test_a_key_is_shortened_by_its_size(key: str, size: str, short: str) -> None:
    assert without_size(key, size) == short


def test_of_two_writers_of_one_attempt_one_succeeds(tmp_path: Path) -> None:
    context = get_context("fork")
    results = context.Queue()
    start = context.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        try:
            write_record(tmp_path, observation(logical_batch=number))
        except StateError:
            results.put(None)
        else:
            results.put(number)

    writers = [context.Process(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    won = [number for number in (results.get() for _ in writers) if number is not None]
    assert [record.logical_batch for record in read_records(tmp_path).finished] == won
    assert [path.suffix for path in (tmp_path / "observations").iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (as_json(capacity_bytes=10**400), "<= 9223372036854775807"), (as_json(peak_allocated_bytes=-1), ">= 0"),
        (as_json(factor=10**300), "<= 1.0"), (as_json(used=1e300), "<= 1000000.0"), (as_json(oom_used=-1.0), ">= 0.0"),
        (as_json(start_time="0001-01-01T00:00:00+23:59"), "not between 1970 and 9000"),
        (as_json(schema=True), "not a record"),
        (as_json(schema=0), "not a record"), (as_json(key="\ud800"), "malformed"), ("\ufeff{}", "malformed"),
        (as_json(fingerprint=json.loads('{"a":' * 200 + "1" + "}" * 200)), "levels deep"),
        (" " * 2**21, "larger than 1 MiB"), (as_json(factor=float("nan")), "malformed"),
    ],
)  # fmt: skip
def test_values_that_would_break_arithmetic_or_printing_are_set_aside(
    content: str, reason: str, tmp_path: Path
) -> None:
    assert re.search(reason, damaged(tmp_path, content))


def test_folders_pipes_and_dangling_links_with_such_names_are_set_aside(tmp_path: Path) -> None:
    write_record(tmp_path, observation())
    folder = tmp_path / "observations"
    (folder / "a.json").mkdir()
    os.mkfifo(folder / "b.json")
    (folder / "c.json").symlink_to(folder / "none")
    (folder / "d.json").symlink_to("/dev/zero")
    Path(os.fsdecode(bytes(folder) + b"/\xff.json")).write_text("{")
    log = read_records(tmp_path)
    assert log.finished == [observation()]
    assert [aside.shown[-6:] for aside in log.set_aside] == ["a.json", "b.json", "c.json", "d.json", "\ufffd.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_set_aside(tmp_path: Path) -> None:
    write_record(tmp_path, observation()).chmod(0)
    assert [aside.reason for aside in read_records(tmp_path).set_aside]


def test_a_damaged_observation_is_never_overwritten(tmp_path: Path) -> None:
    path = write_record(tmp_path, observation())
    path.write_text('{"schema"')
    with pytest.raises(StateError, match="stays"):
        write_record(tmp_path, observation())
    assert path.read_text() == '{"schema"'


def test_an_attempt_is_lost_where_its_process_is_known_to_be_gone() -> None:
    gone = get_context("fork").Process(target=int)
    gone.start()
    gone.join()
    assert started(host="here", pid=gone.pid).is_running("here") is False
    assert started(host="there", pid=gone.pid).is_running("here") is not False
    assert started(host="here", pid=os.getpid(), start_time=utc_now()).is_running("here") is not False
    assert started().is_running("") is not False
    assert started(host="here", pid=2**62).is_running("here") is False
    assert started(host=socket.gethostname(), pid=gone.pid).is_running() is False


def test_an_attempt_is_lost_where_a_later_process_has_its_process_id() -> None:
    assert started(host="here", pid=os.getpid(), start_time="2020-01-01T00:00:00+00:00").is_running("here") is False


def test_a_full_disk_is_a_state_error_and_leaves_nothing(tmp_path: Path) -> None:
    write_record(tmp_path, observation(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(StateError, match="cannot be written"):
            write_record(tmp_path, observation(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(list((tmp_path / "observations").iterdir())) == 1
