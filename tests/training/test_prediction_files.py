"""Columns of predictions that a task does not name, and the files that they are written to."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import CanTrainError, DataError, StateError
from can_train.training.prediction_files import DefaultColumns, FolderFiles, format_of, open_predictions

FORMS: list[tuple[list[Any], dict[str, Any]]] = [
    ([1.5, 2.0], {"prediction": [1.5, 2.0]}),
    ([torch.tensor(3), torch.tensor(4)], {"prediction": [3, 4]}),
    (["a", "b"], {"prediction": ["a", "b"]}),
    ([np.array([1.0, 5.0]), np.array([2.0, 6.0])], {"prediction_0": [1.0, 2.0], "prediction_1": [5.0, 6.0]}),
    ([(1, "a"), (2, "b")], {"prediction_0": [1, 2], "prediction_1": ["a", "b"]}),
    ([torch.tensor([0.25, 0.75]), torch.tensor([1.0, 0.0])],
     {"class": [1, 0], "probability": [0.75, 1.0], "probability_0": [0.25, 1.0], "probability_1": [0.75, 0.0]}),
    ([{"x": torch.tensor(1.0), "y": [2]}, {"x": 3.0, "y": [4]}], {"x": [1.0, 3.0], "y": [[2], [4]]}),
    ([torch.zeros(1, 2), torch.ones(1, 2)], {"prediction": [[[0.0, 0.0]], [[1.0, 1.0]]]}),
    ([torch.zeros(1), torch.ones(2)], {"prediction": [[0.0], [1.0, 1.0]]}),
]  # fmt: skip


@pytest.mark.parametrize(("predictions", "expected"), FORMS)
def test_a_prediction_is_divided_into_its_parts(predictions: list[Any], expected: dict[str, Any]) -> None:
    columns = dict(DefaultColumns()(7, predictions))
    assert list(columns.pop("sample")) == [7, 8]
    assert columns == expected


def test_shares_of_very_many_classes_are_the_class_and_its_probability() -> None:
    shares = torch.full((2, 500), 1 / 500)
    assert list(DefaultColumns()(0, list(shares))) == ["sample", "class", "probability"]


@pytest.mark.parametrize(
    ("first", "later"),
    [([1.0, 2.0], [1.0]), ([0.5, 0.5], [0.5, 0.25, 0.25]), ({"x": 1}, {"y": 1}), ({"x": 1}, 5.0)],
)
def test_predictions_of_another_form_are_refused(first: Any, later: Any) -> None:
    columns = DefaultColumns()
    columns(0, [first])
    with pytest.raises(DataError, match="Predictions differ in their form"):
        columns(1, [later])


CELLS = st.one_of(st.none(), st.booleans(), st.text(st.characters(codec="utf-8", exclude_characters="\x00\r")),
                  st.floats(allow_nan=False, allow_infinity=False), st.lists(st.integers(-5, 5)))  # fmt: skip


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=1, max_size=5), st.integers(1, 4))
def test_json_lines_have_the_cells_whatever_the_portions(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[Any]], size: int
) -> None:
    path = tmp_path_factory.mktemp("files") / "out.jsonl"
    with open_predictions(str(path), "jsonl", {}) as write:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            write({"a": [row[0] for row in part], "b": [row[1] for row in part]})
    assert [list(json.loads(line).values()) for line in path.read_text().split("\n")[:-1]] == rows


def test_csv_has_lists_as_json_and_nothing_for_none(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with open_predictions(str(path), "csv", {}) as write:
        write({"a": [None, True], "b": [[1, [math.nan]], 'x,"y"'], "c": np.array([0.1, 2.0])})
    with path.open() as file:
        assert list(csv.reader(file)) == [["a", "b", "c"], ["", "[1, [null]]", "0.1"], ["true", 'x,"y"', "2.0"]]


def test_parquet_has_all_portions_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    polars = pytest.importorskip("polars")
    # Several pieces of a file.
    monkeypatch.setattr("can_train.training.prediction_files._PIECE_ROWS", 4)
    path = tmp_path / "out.parquet"
    with open_predictions(str(path), "parquet", {}) as write:
        for start in range(0, 30, 3):
            numbers = range(start, start + 3)
            write({"n": numbers, "text": [f"t{n}" for n in numbers], "empty": [None] * 3,
                   "list": [[float(n)] for n in numbers]})  # fmt: skip
    frame = polars.read_parquet(path)
    assert frame["n"].to_list() == list(range(30))
    assert frame["list"].to_list() == [[float(n)] for n in range(30)]
    assert frame["empty"].null_count() == 30
    assert [file.name for file in tmp_path.iterdir()] == ["out.parquet"]


def test_a_folder_has_a_file_for_each_part(tmp_path: Path) -> None:
    files = FolderFiles(column="clip", file="{}_ball")
    with open_predictions(f"{tmp_path}/balls/", "csv", {}, files) as write:
        write({"clip": ["a", "a", "b/c"], "n": [1, 2, 3]})
        write({"clip": ["b/c", "d"], "n": [4, 5]})
    texts = {path.name: path.read_text() for path in (tmp_path / "balls").iterdir()}
    assert texts == {"a_ball.csv": "n\n1\n2\n", "b-c_ball.csv": "n\n3\n4\n", "d_ball.csv": "n\n5\n"}


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_file_without_predictions_is_written(tmp_path: Path, ending: str) -> None:
    with open_predictions(str(tmp_path / f"out.{ending}"), ending, {}):
        pass
    assert (tmp_path / f"out.{ending}").is_file()


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_the_name_of_a_recording_that_is_not_utf_8_is_written_as_an_escape(tmp_path: Path, ending: str) -> None:
    with open_predictions(str(tmp_path / f"out.{ending}"), ending, {}) as write:
        write({"recording": ["caf\udce9"]})
    assert "caf\\udce9" in (tmp_path / f"out.{ending}").read_text(encoding="utf-8")


def test_parts_of_like_names_do_not_replace_each_other(tmp_path: Path) -> None:
    with open_predictions(f"{tmp_path}/", "csv", {}, FolderFiles(column="clip")) as write:
        write({"clip": ["a/b", "a-b", "a-b-2", "a-b/2"], "n": [1, 2, 3, 4]})
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {"a-b.csv": "n\n1\n", "a-b-2.csv": "n\n2\n", "a-b-2-2.csv": "n\n3\n", "a-b-2-3.csv": "n\n4\n"}


def test_a_part_that_comes_back_is_refused_before_its_earlier_rows_are_lost(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"clip a comes again after b\..*\n.*predictions\.csv"),
        open_predictions(f"{tmp_path}/", "csv", {}, FolderFiles(column="clip")) as write,
    ):
        write({"clip": ["a", "b", "a"], "n": [1, 2, 3]})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.csv": "n\n1\n"}


def test_a_folder_keeps_the_parts_that_were_complete_before_an_error(tmp_path: Path) -> None:
    def stopped() -> None:
        with open_predictions(f"{tmp_path}/", "csv", {}, FolderFiles(column="clip")) as write:
            write({"clip": ["a", "b"], "n": [1, 2]})
            raise OverflowError

    with pytest.raises(OverflowError):
        stopped()
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_a_disk_that_refuses_a_write_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(StateError, match="The predictions cannot be written"),
        open_predictions("/dev/full/out.csv", "csv", {}),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "out", "expected"),
    [("", "-", "csv"), ("jsonl", "-", "jsonl"), ("", "a.PARQUET", "parquet"), ("csv", "a.txt", "csv"),
     ("", "folder/", "csv"), ("", "a.h5", "h5")],
)  # fmt: skip
def test_the_format_is_the_one_that_is_named_or_the_ending(name: str, out: str, expected: str) -> None:
    assert format_of(name, out, {"h5": open_predictions}) == expected  # type: ignore[dict-item] # never opened


def test_a_format_of_another_task_is_refused() -> None:
    with pytest.raises(CanTrainError, match="names no format of predictions"):
        format_of("", "a.h5", {})
