"""What is found out about runs: on disk, wherever their folders are, and what a person may call them."""

import json
import shutil
from pathlib import Path

import pytest

from can_train.errors import RunError
from can_train.io.records import utc_now
from can_train.runs import status
from can_train.runs.attempts import Attempts, SlurmContext
from can_train.runs.run_folder import short_name, split_run_id
from can_train.runs.scheduler import AccountRow, QueueRow, SchedulerAnswer
from can_train.runs.status import find_run, read_tail, run_statuses
from fakes.made_runs import KEY, RESULT, FakeScheduler, Runs, at, begin, end
from fakes.run_facts import slurm_job


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_run_that_is_deleted_while_runs_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path)
    path = runs.add(1)
    for name in ("renamed", "renamed-too"):
        shutil.copytree(path, runs.runs_dir / name)

    def deletes_first(run_id: str) -> object:
        if run_id == "renamed":
            shutil.rmtree(runs.runs_dir / run_id)
        return split_run_id(run_id)

    monkeypatch.setattr(status, "split_run_id", deletes_first)
    assert {known.run_id for known in runs.known()} == {path.name, "renamed-too"}


def test_runs_are_listed_the_newest_first_also_those_that_the_registry_does_not_know(runs: Runs) -> None:
    paths = [runs.add(1, RESULT), runs.add(2, entered=False), runs.add(3)]
    known = runs.known()
    assert {each.run_id for each in known} == {path.name for path in paths}
    assert {each.record.key for each in known} == {KEY}
    assert known[0].run_id == max(known, key=lambda each: each.record.time).run_id


def test_a_run_is_found_by_id_any_part_of_it_and_folder(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    path = runs.add(1)
    runs.add(2)
    monkeypatch.chdir(path.parent)
    parts = (short_name(path.name), path.name[:15], path.name[13:20], path.name[-4:], short_name(path.name)[-6:])
    for name in (path.name, *parts, str(path), path.name + "/", str(path / "config.yaml")):
        assert find_run(runs.known(), name).run_id == path.name


def test_last_is_the_newest_run(runs: Runs) -> None:
    newest = [runs.add(number) for number in (2, 3, 1)][1]
    assert find_run(runs.known(), "last").run_id == newest.name
    with pytest.raises(RunError, match="no such run"):
        find_run([], "last")


def test_a_whole_name_is_that_run_also_where_others_contain_it(runs: Runs) -> None:
    path = runs.add(1)
    longer = path.with_name(f"{path.name}-copy")
    shutil.copytree(path, longer)
    assert find_run(runs.known(), path.name).run_id == path.name
    assert find_run(runs.known(), "copy").run_id == longer.name


def test_of_many_runs_with_a_part_in_their_names_the_five_newest_are_listed(runs: Runs) -> None:
    paths = [runs.add(number) for number in range(1, 8)]
    with pytest.raises(RunError, match="7 runs match this name: 'gat'") as error:
        find_run(runs.known(), "gat")
    listed = [line.strip() for line in str(error.value).splitlines() if line.startswith("  ")]
    assert listed == [path.name for path in reversed(paths[2:])]


def test_a_path_outside_any_run_is_no_name_of_one(runs: Runs, tmp_path: Path) -> None:
    runs.add(1)
    (tmp_path / "alone.pt").touch()
    with pytest.raises(RunError, match="not in the folder of a run"):
        find_run(runs.known(), str(tmp_path / "alone.pt"))
    with pytest.raises(RunError, match="no such run"):
        find_run(runs.known(), str(tmp_path / "nowhere"))


def test_a_run_that_the_registry_does_not_know_was_made_when_its_first_attempt_began(runs: Runs) -> None:
    path = runs.add(1, RESULT, entered=False)
    # The name has the local time of another machine.
    begin(path, start_time="2026-01-01T09:00:00+09:00")
    (known,) = runs.known()
    assert known.record.time == "2026-01-01T00:00:00.000000+00:00"


def test_a_folder_that_nobody_knows_is_a_run_too(runs: Runs, tmp_path: Path) -> None:
    path = runs.add(1, RESULT, entered=False)
    elsewhere = tmp_path / "elsewhere" / "copy"
    shutil.move(path, elsewhere)
    assert find_run(runs.known(), str(elsewhere)).folder.path == elsewhere


@pytest.mark.parametrize(
    ("name", "message"), [("2026", "2 runs match this name"), ("x", "no such run"), ("", "no such run")]
)
def test_a_name_of_several_runs_or_of_none_is_an_error_that_lists_runs(runs: Runs, name: str, message: str) -> None:
    path = runs.add(1)
    runs.add(2)
    with pytest.raises(RunError, match=message) as error:
        find_run(runs.known(), name)
    assert path.name in str(error.value)


def test_a_folder_that_has_moved_into_the_folder_of_runs_is_found_there(runs: Runs, tmp_path: Path) -> None:
    path = runs.add(1, RESULT)
    moved = Runs(tmp_path / "new")
    moved.registry = runs.registry
    shutil.move(runs.runs_dir, moved.runs_dir)
    (found,) = moved.look()
    assert found.state.state == "finished"
    assert found.known.folder.path == moved.runs_dir / path.name


def test_a_folder_that_is_gone_is_said_to_be(runs: Runs) -> None:
    shutil.rmtree(runs.add(1))
    (found,) = runs.look()
    assert "is gone" in found.state.sentence


def test_a_process_that_is_there_runs_and_one_whose_number_was_used_before_does_not(runs: Runs) -> None:
    begin(runs.add(1), start_time=utc_now())
    begin(runs.add(2))  # before this process had started
    begin(runs.add(3), host="another machine")
    states = {each.known.run_id[13:15]: (each.state.state, each.state.certain) for each in runs.look()}
    assert states == {"01": ("running", True), "02": ("failed", True), "03": ("running", False)}


def test_what_an_attempt_waits_for_is_said_until_it_trains(runs: Runs) -> None:
    path = runs.add(1)
    runs.submit(path, "7")
    begin(path, job_id="7")
    answer = SchedulerAnswer(queue=[QueueRow(job=slurm_job("7"), state="RUNNING", nodes="n1")])
    attempts = Attempts(path, SlurmContext(job=slurm_job("7"), restarts=1))
    with attempts.waiting("it waits for process 5"):
        assert [each.state.sentence for each in runs.look(answer)] == ["on n1; it waits for process 5"]
    assert [each.state.sentence for each in runs.look(answer)] == ["on n1"]


def test_each_run_gets_what_slurm_said_of_its_own_jobs(runs: Runs) -> None:
    for number, job_id in enumerate(["7_0", "7_1", "8"], start=1):
        runs.submit(runs.add(number), job_id)
    answer = SchedulerAnswer(
        queue=[
            QueueRow(job=slurm_job("7_0"), state="RUNNING", nodes="n1"),
            QueueRow(job=slurm_job("8"), state="PENDING"),
        ],
        accounts=[AccountRow(job=slurm_job("7_1"), state="CANCELLED", by_person=True)],
    )
    states = {each.facts.jobs[0].job_id: each.state.state for each in runs.look(answer)}
    assert states == {"7_0": "running", "7_1": "cancelled", "8": "queued"}


def test_slurm_is_asked_once_and_only_about_runs_that_have_not_finished(runs: Runs) -> None:
    scheduler = FakeScheduler()
    for number in (1, 2, 3):
        runs.submit(runs.add(number, RESULT if number == 2 else None), str(number))

    run_statuses(runs.known(), runs.registry, scheduler)
    assert scheduler.asked == [[slurm_job("1"), slurm_job("3")]]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"attempt": 1}', "\x00"])
@pytest.mark.parametrize("name", ["attempts/0001-began.json", "result.json", "plan.json", "metrics.jsonl",
                                  "checkpoints/manifest.json", "config.yaml"])  # fmt: skip
def test_a_damaged_file_keeps_no_run_from_being_listed(runs: Runs, name: str, text: str) -> None:
    path = runs.add(1)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text(text)
    (found,) = runs.look()
    assert found.known.run_id == path.name


def test_progress_is_read_from_what_is_there(runs: Runs) -> None:
    path = runs.add(1)
    begin(path)
    end(path, "failed", message="no more disk")
    (path / "plan.json").write_text(json.dumps({"plan": {"steps_per_epoch": 10, "safety_factor": 0.7}}))
    lines = [
        {"step": 10, "epoch": 1, "peak_memory_pct": 0.5}, {"step": 10, "epoch": 1, "validation_loss": 0.4},
        {"step": 20, "epoch": 2, "peak_memory_pct": 0.6}, {"step": 20, "epoch": 2, "validation_loss": 0.6},
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 2')
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "manifest.json").write_text(json.dumps({"checkpoints": [{"step": 25}, {"step": 20}]}))
    (found,) = runs.look()
    shown = found.progress
    assert (shown.step, shown.steps, shown.epoch, shown.epochs, shown.saved_step) == (25, 40, 2, 4, 25)
    assert (shown.best_validation_loss, shown.peak_share, shown.safety_factor) == (0.4, 0.6, 0.7)
    assert (found.state.state, found.state.sentence) == ("failed", "no more disk")


def test_short_names_tell_runs_of_the_same_second_apart() -> None:
    assert short_name(f"20260101-000001-{KEY}-00a1") == "0101-000001-00a1"
    assert short_name("something-else") == "something-else"


def test_the_log_of_a_moved_run_has_moved_with_it(runs: Runs, tmp_path: Path) -> None:
    path = runs.add(1)
    runs.submit(path, "7", time=at(1))
    (path / "log.out").write_text("error: no such data\n")
    moved = Runs(tmp_path / "new")
    moved.registry = runs.registry
    shutil.move(runs.runs_dir, moved.runs_dir)
    (found,) = moved.look()
    assert found.state.sentence == "error: no such data"


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 2**20 + b"\nthe end\n")
    assert read_tail(log).endswith("\nthe end\n")
    assert len(read_tail(log)) <= 2**16
    assert read_tail(tmp_path / "none") == ""
