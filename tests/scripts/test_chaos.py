"""A small part of the random attacks, with a fixed seed; and that an attack sees what is wrong."""

import json
import os
import subprocess
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.chaos_cases import Attack, Bounds, NoMoreCases, Progress, run_attack
from bench.chaos_hosts import _expected
from bench.chaos_lines import draw_line
from bench.chaos_world import Answer
from bench.measure_chaos import ATTACKS, _cells


@pytest.mark.slow
def test_a_minute_of_attacks_finds_nothing(repository: Path, warm_python: Path) -> None:
    command = [str(warm_python), "-P", "-m", "bench", "chaos", "--quick", "--seed", "7"]
    variables = {**os.environ, "PYTHONPATH": str(repository / "scripts"), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    assert len(done.stdout.splitlines()) == len(ATTACKS)


def attacked(
    case: Any, tmp_path: Path, *, count: int = 6, progress: Progress | None = None, most_mib: float = float("inf")
) -> Progress:
    """Runs a small attack, by default with any memory: its processes have all that earlier tests left in this one."""
    progress = progress or Progress()
    hang_s = 1.0 if case is three_never_ends else 60.0
    attack = Attack("small", "", case, count, count, hang_s=hang_s, most_mib=most_mib)
    for _ in run_attack(attack, 0, tmp_path, progress, Bounds(count, float("inf"))):
        pass
    return progress


def odd_is_wrong(number: int, dice: Random, place: Path) -> str:
    return f"{number} is odd" if number % 2 else ""


def three_ends_its_process(number: int, dice: Random, place: Path) -> str:
    if number == 3:
        os._exit(6)
    return ""


def three_never_ends(number: int, dice: Random, place: Path) -> str:
    time.sleep(600 if number == 3 else 0)
    return ""


def four_is_one_too_many(number: int, dice: Random, place: Path) -> str:
    if number >= 4:
        raise NoMoreCases
    return ""


def test_every_case_is_done_once_and_failures_have_their_numbers(tmp_path: Path) -> None:
    progress = attacked(odd_is_wrong, tmp_path)
    assert (progress.done, sorted(progress.failures)) == (6, [(n, f"{n} is odd") for n in (1, 3, 5)])


@pytest.mark.parametrize(
    ("case", "wrong"), [(three_ends_its_process, "exit code 6"), (three_never_ends, "still at work after 1 s")]
)
def test_a_case_that_ends_its_process_or_hangs_is_a_failure_and_the_others_are_done(
    case: Any, wrong: str, tmp_path: Path
) -> None:
    progress = attacked(case, tmp_path)
    ((number, failure),) = progress.failures
    assert (progress.done, number) == (6, 3)
    assert wrong in failure


def test_a_case_of_too_much_memory_is_a_failure(tmp_path: Path) -> None:
    progress = attacked(odd_is_wrong, tmp_path, count=2, most_mib=1.0)
    assert progress.done == 2
    assert [number for number, failure in progress.failures if "MiB of memory" in failure] == [0]


def test_an_attack_may_have_fewer_cases_than_were_asked_for(tmp_path: Path) -> None:
    assert attacked(four_is_one_too_many, tmp_path, count=100).done == 4


def test_an_attack_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = attacked(odd_is_wrong, tmp_path, count=3)
    stored = Progress(**json.loads(json.dumps(vars(first))))
    assert (stored.done, attacked(odd_is_wrong, tmp_path, progress=stored).done) == (3, 6)
    assert sorted(number for number, _ in stored.failures) == [1, 3, 5]
    assert _cells(ATTACKS["logs"], stored)[1:4] == ["6", "600", "3"]


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (Answer(["runs"], 0, "no JSON", ""), ""),
        (Answer(["runs", "--json"], 0, "[]", ""), ""),
        (Answer(["runs", "--json"], 0, "no JSON", ""), "no JSON"),
        (Answer(["runs"], 1, "", ""), "exit code 1"),
        (Answer(["runs"], 2, "", ""), "without a sentence"),
        (Answer(["runs"], 2, "", "error: no."), ""),
        (Answer(["runs"], 143, "", ""), ""),
        (Answer(["runs"], 3, "", "error: no.\nTraceback (most recent call last):"), "traceback"),
        (Answer(["runs"], 0, "", "", "ValueError: x"), "ValueError: x"),
    ],
)
def test_what_no_line_may_do_is_seen(answer: Answer, wrong: str) -> None:
    assert bool(answer.failure) == bool(wrong)
    assert wrong in answer.failure


def test_lines_are_those_of_their_seed_and_train_nothing_where_they_must_not() -> None:
    lines = [draw_line(Random(seed), dry=True) for seed in range(300)]
    assert lines == [draw_line(Random(seed), dry=True) for seed in range(300)]
    trained = [line for line in lines if line and line[0].startswith("-") and "--dataset" in line]
    assert trained
    assert all("--dry-run" in line for line in trained)


def test_a_store_is_to_tell_what_was_decided_last() -> None:
    assert _expected(["run"]) == "learned"
    assert _expected(["run", "pin", "reset"]) == "pinned"
    assert _expected(["run", "pin", "reset", "unpin"]) == "reset"
    assert _expected(["run", "reset", "unpin", "run"]) == "learned"
