"""What a run records of itself: one record a step or of several, across resumes and ranks, and its predictions."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.io.arrays import FolderDamageError
from can_train.runs import recording
from can_train.runs.recording import (
    MOST_RECORDS,
    MemoryLimits,
    StepLog,
    StepRecord,
    read_predictions,
    read_steps,
    rewind_steps,
    steps_path,
    write_predictions,
)
from can_train.task import Predictions
from fakes.line_fit import LineTask, StoppedTask, train_line

STEP = StepRecord(step=1, loss=0.5, allocated_bytes=10, reserved_bytes=20, micro_batches=1, micro_batch_size=4)
LIMITS = MemoryLimits(from_step=1, device="sim-64mib", capacity_bytes=100, safe_bytes=90, predicted_bytes=(70, 80))


def write_steps(path: Path, steps: list[StepRecord], total: int = 1) -> None:
    log = StepLog(path, total)
    log.limit(LIMITS)
    for one in steps:
        log.add(one)
    log.flush()


def test_each_step_of_a_short_run_has_a_record_after_its_limits(tmp_path: Path) -> None:
    steps = [replace(STEP, step=1), replace(STEP, step=2, allocated_bytes=None, ooms_rescued=3)]
    write_steps(steps_path(tmp_path, 0), steps)
    assert read_steps(tmp_path) == (steps, [LIMITS])


@given(rescued=st.sets(st.integers(1, 200)), total=st.integers(200, 50_000))
def test_steps_that_share_a_record_are_all_counted_and_a_rescue_keeps_its_step(
    tmp_path_factory: pytest.TempPathFactory, rescued: set[int], total: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    steps = [replace(STEP, step=step, loss=float(step), allocated_bytes=step, micro_batches=step % 7,
                     ooms_rescued=int(step in rescued)) for step in range(1, 201)]  # fmt: skip
    write_steps(steps_path(folder, 0), steps, total)
    found, _ = read_steps(folder)
    assert {one.step for one in found if one.ooms_rescued} == rescued
    assert sum(one.steps for one in found) == 200
    assert sum(one.loss * one.steps for one in found) == pytest.approx(sum(range(1, 201)))
    assert [one.allocated_bytes for one in found] == [one.step for one in found]
    assert len(found) <= 200 / max(1, total / (2 * MOST_RECORDS)) + len(rescued) + 1


def test_a_resumed_run_continues_the_record_where_its_checkpoint_was(tmp_path: Path) -> None:
    options = {"batch_size": 10, "micro_batch_size": 5, "checkpoint_every": 4}
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    train_line(alone, **options)
    with pytest.raises(SystemExit):
        train_line(stopped, StoppedTask(after=7), **options)
    [folder] = (stopped / "runs").glob("*")
    # What a process that was killed had written after its checkpoint, down to half a line.
    with steps_path(folder, 0).open("a") as file:
        file.write(json.dumps({**vars(STEP), "step": 99}) + '\n{"step": 100, "st')
    train_line(stopped, LineTask(), **options)
    steps, limits = read_steps(folder)
    assert [one.step for one in steps] == list(range(1, 13))
    assert [one.loss for one in steps] == [one.loss for one in read_steps(next((alone / "runs").glob("*")))[0]]
    assert [(one.micro_batches, one.micro_batch_size) for one in steps] == [(2, 5)] * 12
    assert [one.from_step for one in limits] == [1, 8]


def test_a_step_that_ran_out_of_memory_is_recorded_with_its_rescues(tmp_path: Path) -> None:
    session = train_line(tmp_path, LineTask(fail_above=3), batch_size=10, micro_batch_size=10, epochs=1)
    steps, _ = read_steps(session.folder.path)
    [epoch] = [
        line for line in map(json.loads, session.folder.metrics_path.read_text().splitlines()) if "train" in line
    ]
    assert sum(one.ooms_rescued for one in steps) == epoch["ooms_rescued"] > 0
    assert max(one.micro_batch_size for one in steps) <= 3


def test_of_several_ranks_the_highest_peak_of_a_step_counts(tmp_path: Path) -> None:
    write_steps(steps_path(tmp_path, 0), [STEP, replace(STEP, step=2)])
    write_steps(steps_path(tmp_path, 1), [replace(STEP, allocated_bytes=None, reserved_bytes=50)])
    assert [(one.allocated_bytes, one.reserved_bytes) for one in read_steps(tmp_path)[0]] == [(10, 50), (10, 20)]
    rewind_steps(tmp_path, 0)
    assert read_steps(tmp_path) == ([], [])


@pytest.mark.parametrize(
    "line",
    ["", "[]", "{", '{"step": 1}', json.dumps({**vars(STEP), "loss": "no"}), "\x00",
     json.dumps({**vars(STEP), "loss": "\ud800"})],
)  # fmt: skip
def test_a_damaged_line_hides_nothing_but_itself(tmp_path: Path, line: str) -> None:
    path = steps_path(tmp_path, 0)
    write_steps(path, [STEP])
    path.write_text(f"{line}\n{path.read_text()}{line}")
    assert read_steps(tmp_path) == ([STEP], [LIMITS])


def test_few_records_are_written_one_by_one(tmp_path: Path) -> None:
    log, path = StepLog(steps_path(tmp_path, 0), 1), steps_path(tmp_path, 0)
    for step in range(1, recording._WRITTEN_TOGETHER):
        log.add(replace(STEP, step=step))
    assert not path.exists()
    log.add(STEP)
    assert len(path.read_text().splitlines()) == recording._WRITTEN_TOGETHER


def predictions(count: int, *, timed: bool = True) -> Predictions:
    drawn = np.random.default_rng(count)
    return Predictions(
        score=drawn.normal(size=count),
        positive=drawn.random(count) < 0.5,
        flagged=drawn.random(count) < 0.5,
        time_s=np.arange(count) / 4 if timed else np.empty(0),
        words=("window", "attack", "benign"),
    )


def test_predictions_are_read_as_they_were_written_in_single_precision(tmp_path: Path) -> None:
    sets = {"a b/ä": predictions(5), "empty": predictions(0), "untimed": predictions(3, timed=False)}
    write_predictions(tmp_path / "p", {"before": predictions(9)})
    write_predictions(tmp_path / "p", sets)
    found = read_predictions(tmp_path / "p")
    assert list(found) == list(sets)
    for name, one in sets.items():
        assert found[name].words == one.words
        assert np.array_equal(found[name].score, one.score.astype(np.float32))
        assert np.array_equal(found[name].positive, one.positive)
        assert np.array_equal(found[name].flagged, one.flagged)
        assert np.array_equal(found[name].time_s, one.time_s)


def test_no_predictions_leave_no_file(tmp_path: Path) -> None:
    write_predictions(tmp_path / "p", {"before": predictions(9)})
    write_predictions(tmp_path / "p", {})
    assert read_predictions(tmp_path / "p") == {}
    assert list(tmp_path.iterdir()) == []


def test_predictions_of_which_a_byte_was_altered_are_read_as_they_were_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "p"
    write_predictions(path, {"set": predictions(9)})
    whole, before, damaged = path.read_bytes(), read_predictions(path)["set"], 0
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            found = read_predictions(path)["set"]
        except FolderDamageError:
            damaged += 1
        else:
            assert all(np.array_equal(getattr(found, name), getattr(before, name)) for name in ("score", "time_s"))
    assert damaged > len(whole) // 6
