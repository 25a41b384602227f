"""What a dry run sees of the data: as much as training would, or a sample of it, and nothing is written."""

import gzip
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.config.compose import RunRequest, resolve
from can_train.errors import DataError
from can_train.reporter import Reporter, SilentReporter, Stage
from can_train_tasks.can.data.layout import LOG, LogFile
from can_train_tasks.can.data.log_text import LogText
from can_train_tasks.can.data.sampling import SAMPLED_LOGS, WHOLE_BYTES, choose_logs, drop_probable_duplicates
from can_train_tasks.can.modes.windows import WindowTask
from can_train_tasks.can.task import make_task, sample_task
from fakes.random_bus import random_frames, write_log

SHARED_LOGS = Path(__file__).parents[5] / "shared" / "data" / "can"
SEED_FRAMES = 20_000
WINDOW = 100


class Recorder(SilentReporter):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.stages: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Stage]:
        self.stages.append(title)
        with super().stage(title, total=total, unit=unit) as stage:
            yield stage


Factory = Callable[..., Any]


def task_by(factory: Factory, dataset: str, folder: Path, model: str = "gat", reporter: Reporter | None = None,
            **values: object) -> Any:  # fmt: skip
    changed = {"mode.baselines": False, **{name.replace("__", "."): value for name, value in values.items()}}
    run = resolve(RunRequest(model=model, size="student", dataset=dataset, values=changed))
    return factory(run, {}, folder / "data", folder / "state" / "cache", reporter or SilentReporter())


def small_layout(folder: Path) -> Path:
    for seed, name in enumerate(("train_01/DoS-1.csv", "train_01/gear-1.csv", "test_01/DoS-2.csv")):
        write_log(folder / name, random_frames(2_000, seed))
    return folder


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Rows with a few attacks, more than is read whole; every 20,000th runs back in time."""
    log = write_log(tmp_path_factory.mktemp("rows") / "a.csv", random_frames(SEED_FRAMES, num_ids=40))
    header, rows = log.read_bytes().split(b"\n", 1)
    return header + b"\n" + rows * (1 + int(1.2 * WHOLE_BYTES) // len(rows))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, part of the test's own."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def assert_same_task(one: WindowTask, other: WindowTask) -> None:
    np.testing.assert_array_equal(one.batch_features(one.train_rows), other.batch_features(other.train_rows))
    assert one.estimated_train_rows == other.estimated_train_rows == len(one.train_rows)
    assert one.sample_note == other.sample_note == ""


@pytest.mark.parametrize("model", ["gat", "vgae"])
def test_a_small_data_set_is_seen_whole_and_nothing_is_written(tmp_path: Path, scratch: Path, model: str) -> None:
    folder = small_layout(tmp_path / "mine")
    before = tree(tmp_path) | {str(scratch): (scratch.stat().st_mtime_ns, 0)}
    sampled = task_by(sample_task, str(folder), tmp_path, model)
    assert tree(tmp_path).keys() | {str(scratch)} == before.keys()
    assert all(tree(tmp_path)[path] == state for path, state in before.items() if path != str(scratch))
    assert_same_task(sampled, task_by(make_task, str(folder), tmp_path, model))


def test_what_a_training_has_kept_is_found_without_reading_a_log(tmp_path: Path, scratch: Path) -> None:
    folder = small_layout(tmp_path / "mine")
    trained = task_by(make_task, str(folder), tmp_path)
    before, recorder = tree(tmp_path), Recorder()
    assert_same_task(task_by(sample_task, str(folder), tmp_path, reporter=recorder), trained)
    assert recorder.stages == []
    assert tree(tmp_path) == before


def touch(folder: Path) -> None:
    (folder / "train_01" / "DoS-1.csv").touch()


def put_back_older(folder: Path) -> None:
    log = folder / "train_01" / "DoS-1.csv"
    write_log(log, random_frames(2_000, seed=9))
    os.utime(log, (0, 0))


def add(folder: Path) -> None:
    write_log(folder / "train_01" / "new.csv", random_frames(2_000, seed=9))


def move_in_older(folder: Path) -> None:
    (folder.parent / "older").rename(folder / "train_02")


def take_away(folder: Path) -> None:
    (folder / "train_01" / "gear-1.csv").unlink()


@pytest.mark.parametrize("change", [touch, put_back_older, add, move_in_older, take_away])
def test_logs_that_changed_are_not_taken_for_what_was_kept(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = small_layout(tmp_path / "mine")
    write_log(tmp_path / "older" / "rpm-1.csv", random_frames(3_000, seed=8))
    task_by(make_task, str(folder), tmp_path)
    (meta,) = (tmp_path / "state").rglob("meta.json")
    # The clock of a file system ticks every few milliseconds.
    os.utime(meta, ns=(meta.stat().st_atime_ns, max(path.stat().st_ctime_ns for path in tmp_path.rglob("*.csv"))))
    probe = tmp_path / "probe"
    probe.touch()
    while probe.stat().st_ctime_ns <= meta.stat().st_mtime_ns:
        probe.touch()
    change(folder)
    recorder = Recorder()
    sampled = task_by(sample_task, str(folder), tmp_path, reporter=recorder)
    assert "Reading logs" in recorder.stages
    assert_same_task(sampled, task_by(make_task, str(folder), tmp_path / "anew"))


@pytest.mark.parametrize("values", [{"dataset__window": 50, "dataset__stride": 50}, {"dataset__max_malformed": 0.5}])
def test_what_was_kept_under_other_settings_is_not_taken(tmp_path: Path, values: dict[str, object]) -> None:
    folder, recorder = small_layout(tmp_path / "mine"), Recorder()
    task_by(make_task, str(folder), tmp_path)
    task_by(sample_task, str(folder), tmp_path, reporter=recorder, **values)
    assert "Reading logs" in recorder.stages


@pytest.mark.parametrize("name", ["meta.json", "node_ptr.npy"])
def test_what_was_kept_and_is_damaged_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    folder = small_layout(tmp_path / "mine")
    trained = task_by(make_task, str(folder), tmp_path)
    (path,) = (tmp_path / "state").rglob(name)
    path.write_bytes(path.read_bytes()[:-3])
    before = tree(tmp_path)
    assert_same_task(task_by(sample_task, str(folder), tmp_path), trained)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_of_a_long_log_parts_are_read_and_the_rest_is_estimated(
    tmp_path: Path, scratch: Path, long_text: bytes, suffix: str
) -> None:
    log = tmp_path / f"drive.csv{suffix}"
    log.write_bytes(gzip.compress(long_text, 1) if suffix else long_text)
    before = tree(tmp_path).keys()
    task = task_by(sample_task, str(log), tmp_path)
    assert tree(tmp_path).keys() == before
    frames = long_text.count(b"\n") - 1
    assert task.estimated_train_rows == pytest.approx(0.64 * frames / WINDOW, rel=0.02)
    assert 1_000 < len(task.train_rows) < frames / WINDOW / 2
    assert f"a sample of {len(task.train_rows):,} windows from 1 of 1 training logs" in task.sample_note
    rows = task.train_rows[:5]
    batch = task.logical_batch(rows, torch.device("cpu"), torch.float32, None)
    assert batch.losses(task.build_model(), 0, 5)["classification"][0] > 0


def test_of_long_benign_logs_with_few_windows_no_test_part_is_estimated(tmp_path: Path, long_text: bytes) -> None:
    header, *rows = long_text.splitlines()
    log = tmp_path / "drive.csv"
    log.write_bytes(b"\n".join([header, *(row.rpartition(b",")[0] + b",0" for row in rows)]))
    few = {"dataset__window": len(rows) // 200}
    assert task_by(sample_task, str(log), tmp_path, "vgae", **few).estimated_train_rows == pytest.approx(160, abs=3)
    tested = task_by(sample_task, str(log), tmp_path, "vgae", **few, dataset__test_share=0.2)
    assert tested.estimated_train_rows == pytest.approx(128, abs=3)


def test_a_sample_has_windows_of_all_parts_of_a_log(tmp_path: Path, long_text: bytes) -> None:
    """The first third has few IDs and no attack, the last third many IDs."""
    sparse = write_log(tmp_path / "sparse.csv", replace(random_frames(SEED_FRAMES), label=np.zeros(SEED_FRAMES, int)))
    _, rows = sparse.read_bytes().split(b"\n", 1)
    third = int(0.4 * WHOLE_BYTES)
    log = tmp_path / "drive.csv"
    log.write_bytes(long_text[: long_text.index(b"\n") + 1] + rows * (third // len(rows)) + long_text[third:][200:])
    task = task_by(sample_task, str(log), tmp_path)
    nodes = task.batch_features(task.train_rows)[:, 0]
    assert 0.2 < (nodes <= 12).mean() < 0.6


def test_logs_that_were_not_read_count_by_their_size(tmp_path: Path, long_text: bytes) -> None:
    folder = tmp_path / "mine"
    lines = long_text[: 4 * 2**20].splitlines(keepends=True)
    for index in range(SAMPLED_LOGS + 3):
        path = folder / "train_01" / f"DoS-{index}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join([*lines[: len(lines) - 1 - index], lines[1]]))
    write_log(folder / "test_01" / "DoS-1.csv", random_frames(200))
    (folder / "train_01" / "copy.csv").write_bytes((folder / "train_01" / "DoS-1.csv").read_bytes())
    task = task_by(sample_task, str(folder), tmp_path)
    assert f"from {SAMPLED_LOGS} of {SAMPLED_LOGS + 3} training logs" in task.sample_note
    assert task.estimated_train_rows == pytest.approx(0.8 * (SAMPLED_LOGS + 3) * len(lines) / WINDOW, rel=0.02)


@pytest.mark.parametrize("model", ["gat", "vgae"])
@pytest.mark.parametrize("label", [b",0\n", b",1\n"])
def test_classes_that_a_sample_lacks_may_be_in_the_rest(
    tmp_path: Path, long_text: bytes, model: str, label: bytes
) -> None:
    log = tmp_path / "drive.csv"
    log.write_bytes(long_text.replace(b",1\n", label).replace(b",0\n", label))
    task = task_by(sample_task, str(log), tmp_path, model)
    batch = task.logical_batch(task.train_rows[:3], torch.device("cpu"), torch.float32, torch.Generator())
    assert all(torch.isfinite(total) for total, _ in batch.losses(task.build_model(), 0, 3).values())


def test_rows_that_are_bad_in_a_part_are_said_and_no_error_yet(tmp_path: Path, long_text: bytes) -> None:
    log, recorder = tmp_path / "drive.csv", Recorder()
    log.write_bytes(long_text + b"damaged\n" * 30_000)
    task_by(sample_task, str(log), tmp_path, reporter=recorder)
    assert any("of the sampled rows are malformed" in notice for notice in recorder.notices)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "The log is empty"),
        (bytes(range(256)) * 200_000, "The log is binary"),
        (b"one,two\n" * 3_300_000, "is in none of the formats"),
        (b"\x1f\x8b" + bytes(10_000_000), "is no whole gzip file"),
        (b"timestamp,arbitration_id,data_field,attack\n0.1,123,00,0\n", "a window needs 100"),
        (
            b"timestamp,arbitration_id,data_field\n" + b"0.1,123,00\n" * 2_400_000 + b"0.2,123,00\n",
            "no training log has any",
        ),
    ],
    ids=["empty", "binary", "no format", "no gzip", "short", "unlabelled"],
)
def test_a_log_that_cannot_train_is_refused_in_the_same_words(tmp_path: Path, content: bytes, rule: str) -> None:
    log = tmp_path / "drive.csv"
    log.write_bytes(content)
    said = []
    for factory in (sample_task, make_task):
        with pytest.raises(DataError, match=rule) as error:
            task_by(factory, str(log), tmp_path)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("seconds", [5.0, 8.0])
def test_a_bus_is_simulated_for_a_few_seconds_only(tmp_path: Path, scratch: Path, seconds: float) -> None:
    sampled = task_by(sample_task, "synthetic", tmp_path, dataset__synthetic__seconds=seconds)
    assert list(tmp_path.iterdir()) == [scratch]
    assert list(scratch.iterdir()) == []
    trained = task_by(make_task, "synthetic", tmp_path, dataset__synthetic__seconds=seconds)
    assert sampled.estimated_train_rows == pytest.approx(len(trained.train_rows), rel=0.02)
    assert ("5 s in place of 8 s" in sampled.sample_note) == (seconds == 8.0)
    assert_same_task(task_by(sample_task, "synthetic", tmp_path, dataset__synthetic__seconds=seconds), trained)


@pytest.mark.skipif(not SHARED_LOGS.is_dir(), reason=f"{SHARED_LOGS} is not there")
@pytest.mark.parametrize(("name", "model"), [("labeled_TSC1.csv", "gat"), ("normal.log", "vgae"), ("", "vgae")])
def test_real_logs_are_seen_whole(tmp_path: Path, name: str, model: str) -> None:
    sampled = task_by(sample_task, str(SHARED_LOGS / name), tmp_path, model)
    assert_same_task(sampled, task_by(make_task, str(SHARED_LOGS / name), tmp_path, model))


def log_files(families: list[tuple[str, str]]) -> list[LogFile]:
    return [
        LogFile(path=Path(f"{group}/{kind}-{index}.csv"), role="train", group=group, kind=kind)
        for index, (group, kind) in enumerate(families)
    ]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["DoS", "rpm", "attack"])), max_size=40))
def test_every_folder_and_kind_is_sampled_before_one_is_again(families: list[tuple[str, str]]) -> None:
    logs = log_files(families)
    chosen = choose_logs(logs)
    assert chosen == [log for log in logs if log in chosen]
    assert len(chosen) == min(len(logs), SAMPLED_LOGS)
    assert {(log.group, log.kind) for log in chosen} == set(families)


def test_copies_are_told_by_their_size_and_their_ends(tmp_path: Path) -> None:
    contents = {"a": b"1" * 50_000, "b": b"1" * 50_000, "c": b"1" * 49_999 + b"2", "d": b"1" * 9}
    logs = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        logs.append(LogFile(path=tmp_path / name, role=LOG, group=name, kind="attack"))
    assert [log.group for log in drop_probable_duplicates(logs)] == ["a", "c", "d"]


@given(
    lines=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    num_parts=st.integers(1, 6),
    part_bytes=st.integers(1, 300),
    reach_bytes=st.integers(0, 900),
    compressed=st.booleans(),
    ends=st.sampled_from(["", "\n"]),
)
def test_pieces_are_whole_lines_in_order_and_none_twice(
    lines: list[int], num_parts: int, part_bytes: int, reach_bytes: int, compressed: bool, ends: str
) -> None:
    texts = [f"{index}:{'x' * length}" for index, length in enumerate(lines)]
    data = ("\n".join(texts) + ends).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(gzip.compress(data) if compressed else data)
        found = LogText(path).sample(num_parts, part_bytes, reach_bytes)
    read = [line for part in found.parts for line in part.to_list()]
    assert read == [text for text in texts if text in set(read)]
    assert found.read_bytes <= len(data)
    if not compressed:
        assert found.text_bytes == len(data)
    if found.complete and not compressed:
        assert read == texts
    if not compressed and len(data) <= num_parts * part_bytes:
        assert found.complete


def test_the_length_of_a_compressed_text_follows_from_what_was_read_of_it(tmp_path: Path, long_text: bytes) -> None:
    text = long_text[: 4 * 2**20]
    (tmp_path / "log").write_bytes(gzip.compress(text))
    found = LogText(tmp_path / "log").sample(num_parts=3, part_bytes=10_000, reach_bytes=2**20)
    assert not found.complete
    assert found.text_bytes == pytest.approx(len(text), rel=0.05)
