"""Thousands of runs are listed from an index, which changes nothing but the time that it takes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from can_train.runs.registry import Registry, RunRecord
from can_train.runs.status import find_run, known_runs
from fakes.made_runs import Runs, at

NEVER = 10**9


def enter(state: Path, number: int) -> None:
    Registry(state).add(RunRecord(run_id=f"run-{number}", path=f"/runs/run-{number}", key="key", time=at(number)))


def damage(state: Path, number: int) -> None:
    folder = state / "runs" / f"damaged-{number}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")


def enter_from_a_clock_ahead(state: Path, number: int) -> None:
    time = f"{9000 - number % 9}-01-01T00:00:00+00:00"
    Registry(state).add(RunRecord(run_id=f"ahead-{number}", path="/runs/ahead", key="key", time=time))


def delete(state: Path, number: int) -> None:
    folders = sorted((state / "runs").glob("*"))
    if folders:
        shutil.rmtree(folders[number % len(folders)])


def damage_index(state: Path, number: int) -> None:
    for path in sorted((state / "index").glob("*")):
        data = path.read_bytes()
        place = number % (len(data) + 1)
        path.write_bytes(data[:place] + b"?" + data[place + number % 3 :])


def remove_index(state: Path, number: int) -> None:
    shutil.rmtree(state / "index", ignore_errors=True)


OPERATIONS = (enter, enter, enter, damage, enter_from_a_clock_ahead, delete, damage_index, remove_index)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 10_000)), max_size=12))
def test_whatever_happens_to_entries_and_index_the_runs_are_those_without_an_index(
    steps: list[tuple[Callable[[Path, int], None], int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    state, plain = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("plain")
    (plain / "runs").symlink_to(state / "runs")
    for index, (operation, number) in enumerate(steps):
        operation(state, index * 10_001 + number if operation not in (delete, damage_index) else number)
        assert Registry(state).runs(index_from=2) == Registry(plain).runs(index_from=NEVER)
    assert not (plain / "index").exists()


def test_an_entry_in_the_index_is_not_read_again(tmp_path: Path) -> None:
    for number in range(3):
        enter(tmp_path, number)
    before = Registry(tmp_path).runs(index_from=3)
    assert len(before) == 3
    for path in (tmp_path / "runs").glob("*/run.json"):
        path.write_text("")
    assert Registry(tmp_path).runs() == before


def test_a_run_is_found_in_a_folder_of_runs_that_is_named_by_a_link(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    path = runs.add(1)
    (tmp_path / "link").symlink_to(runs.runs_dir)
    (known,) = known_runs(runs.registry, tmp_path / "link")
    assert known.folder.path.samefile(path)
    assert find_run([known], str(tmp_path / "link" / path.name)) is known


def test_a_part_of_a_short_name_that_is_no_part_of_the_id_finds_the_run(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add(1)
    runs.add(2)
    assert find_run(runs.known(), "000001-0001").run_id.endswith("-0001")
