"""The index of observations changes nothing but the time that reading takes."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from can_train.factors.observations import Event, Observation, Records, next_time, read_records, write_record
from can_train.factors.store import FactorStore
from can_train.factors.summary import read_figures
from can_train.io.index import Kind, read_folder
from can_train.io.records import write_document
from fakes.samples import A100, KEY, V100, at, observation, out_of_memory, started

NEVER = 10**9
KEYS = (KEY, "hcrl_sa_vgae_student_autoencoder")
DEVICES = (V100, A100)


def add(state: Path, number: int) -> None:
    key, device = KEYS[number % 2], DEVICES[number // 2 % 2]
    make = out_of_memory if number % 5 == 0 else observation
    # Numbers from elsewhere may be larger than any that MessagePack has.
    fingerprint = {"precision": "fp32", "large": 2**70 if number % 7 == 0 else number % 3}
    write_record(state, make(number, run_id=f"run-{number}", key=key, device=device, fingerprint=fingerprint))


def begin(state: Path, number: int) -> None:
    write_record(state, started(number, run_id=f"run-{number}"))


def damage(state: Path, number: int) -> None:
    (state / "observations").mkdir(exist_ok=True)
    (state / "observations" / f"damaged-{number}.json").write_bytes(b"{}"[: number % 3])


def decide(state: Path, number: int) -> None:
    kinds: tuple[dict[str, Any], ...] = ({"kind": "pin", "value": 0.5}, {"kind": "unpin"}, {"kind": "reset"})
    write_record(state, Event(time=at(number), key=KEYS[number % 2], **kinds[number % 3]))


def delete(state: Path, number: int) -> None:
    files = sorted((state / "observations").glob("*"))
    if files:
        files[number % len(files)].unlink()


def damage_index(state: Path, number: int) -> None:
    for path in sorted((state / "index").glob("*")):
        data = bytearray(path.read_bytes())
        if data:
            data[number % len(data)] ^= 1 + number % 255
            path.write_bytes(bytes(data))


def cut_index(state: Path, number: int) -> None:
    for path in sorted((state / "index").glob("*")):
        os.truncate(path, number % (path.stat().st_size + 1))


def remove_index(state: Path, number: int) -> None:
    shutil.rmtree(state / "index", ignore_errors=True)


def look(state: Path, number: int) -> None:
    read_figures(state, read_records(state, index_from=1 + number % 3), remember_from=1)


OPERATIONS = (add, add, add, begin, damage, decide, delete, damage_index, cut_index, remove_index, look, look)


def contents(records: Records) -> tuple[Any, ...]:
    aside = [(one.path.name, one.reason, one.is_read) for one in records.set_aside]
    of_keys = [records.of_keys([key]) for key in (*KEYS, "unknown")]
    return records.finished, records.unfinished, records.events, aside, of_keys, records.keys, records.latest


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 10_000)), max_size=15))
def test_whatever_happens_to_files_and_index_the_answer_is_that_without_an_index(
    steps: list[tuple[Callable[[Path, int], None], int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    state, plain = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("plain")
    for name in ("observations", "events"):
        (plain / name).symlink_to(state / name)
    used = set[str]()
    for index, (operation, number) in enumerate(steps):
        # Records are never written twice.
        operation(state, index * 10_001 + number if operation in (add, begin, damage, decide) else number)
        with_index, without = read_records(state, index_from=2), read_records(plain, index_from=NEVER)
        assert contents(with_index) == contents(without)
        figures = read_figures(state, with_index, remember_from=1)
        assert figures == read_figures(plain, without, remember_from=NEVER)
        used |= {path.name for path in (state / "index").glob("*")}
    assert not (plain / "index").exists()
    assert used or sum(operation is add for operation, _ in steps) < 4


def filled(state: Path, count: int) -> list[Observation]:
    for number in range(1, count + 1):
        write_record(state, observation(number, key=KEYS[number % 2]))
    records = read_records(state, index_from=1).finished
    assert list((state / "index").glob("observations-*"))
    return records


def test_files_that_are_in_the_index_are_not_read_again(tmp_path: Path) -> None:
    before = filled(tmp_path, 4)
    for path in (tmp_path / "observations").iterdir():
        path.write_bytes(b"")
    assert read_records(tmp_path).finished == before


def test_a_key_is_looked_up_without_the_records_of_others(tmp_path: Path) -> None:
    before = filled(tmp_path, 4)
    assert read_records(tmp_path).of_keys([KEY]) == [run for run in before if run.key == KEY]


def test_a_few_observations_get_no_index(tmp_path: Path) -> None:
    for number in range(1, 5):
        write_record(tmp_path, observation(number))
    FactorStore(tmp_path).find(None)
    assert not (tmp_path / "index").exists()


def test_an_index_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    write_record(tmp_path, observation())
    (tmp_path / "index").write_text("a file where a folder should be")
    records = read_records(tmp_path, index_from=1)
    assert records.finished == [observation()]
    assert len(read_figures(tmp_path, records, remember_from=1)) == 1


def test_an_index_of_records_of_another_shape_does_not_count(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    (index,) = (tmp_path / "index").glob("observations-*")
    index.rename(index.with_name("observations-00000000"))
    for path in (tmp_path / "observations").iterdir():
        path.unlink()
    assert read_records(tmp_path).finished == []


def test_the_latest_time_is_also_that_of_an_indexed_run(tmp_path: Path) -> None:
    write_record(tmp_path, observation(end_time="2400-01-01T00:00:00.000000+00:00"))
    (path,) = (tmp_path / "observations").iterdir()
    os.utime(path, (13569465600, 13569465600))  # written in that year, too
    assert next_time(tmp_path) == "2400-01-01T00:00:00.000001+00:00"
    read_records(tmp_path, index_from=1)
    assert list((tmp_path / "index").iterdir())
    assert next_time(tmp_path) == "2400-01-01T00:00:00.000001+00:00"


def test_the_latest_time_is_not_that_of_a_deleted_run_that_no_index_can_hold(tmp_path: Path) -> None:
    for number, size in enumerate((1, 1, 2**70)):
        write_record(tmp_path, observation(number, run_id=f"run-{number}", fingerprint={"size": size}))
    before = read_records(tmp_path, index_from=1)
    (tmp_path / "observations" / max(path.name for path in (tmp_path / "observations").iterdir())).unlink()
    after = read_records(tmp_path)
    assert (len(before.finished), len(after.finished)) == (3, 2)
    assert after.latest == max(run.ended for run in after.finished)


OF_RUN = Kind(Observation, group=lambda run: run.key, latest=lambda run: run.ended)


def test_a_folder_that_was_left_alone_is_not_listed_again(tmp_path: Path) -> None:
    folder, index = tmp_path / "records", tmp_path / "index" / "records"
    write_document(folder / "a.json", observation())
    read_folder(folder, index, OF_RUN)[0].extend({"a.json": observation()})
    (folder / "b.json").write_text("")
    time.sleep(0.05)
    assert read_folder(folder, index, OF_RUN, settled_s=0.02)[1] == ["b.json"]
    assert len(list(index.parent.glob("*.listing"))) == 1
    folder.rename(tmp_path / "moved")
    # What it remembers is of the folder as it was left: another one in its place is listed.
    folder.mkdir()
    assert read_folder(folder, index, OF_RUN)[1] == []
    folder.rmdir()
    (tmp_path / "moved").rename(folder)
    (folder / "c.json").write_text("")
    assert read_folder(folder, index, OF_RUN)[1] == ["b.json", "c.json"]


def test_a_folder_that_has_just_changed_is_listed_again(tmp_path: Path) -> None:
    folder, index = tmp_path / "records", tmp_path / "index" / "records"
    write_document(folder / "a.json", observation())
    read_folder(folder, index, OF_RUN)[0].extend({"a.json": observation()})
    read_folder(folder, index, OF_RUN)
    assert not list(index.parent.glob("*.listing"))
