"""`can-train compare`: runs side by side."""

import json
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.resolved import differences
from fakes.finished_runs import Shelf


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    # No SLURM, whichever this machine may have.
    monkeypatch.setenv("PATH", str(tmp_path))
    return Shelf(tmp_path)


def judged(mcc: float, alarms: float) -> dict[str, object]:
    model = {"mcc": mcc, "false_alarms_per_hour": alarms}
    return {"status": "finished", "parameters": 1000, "peak_memory_bytes": 2**20, "ooms_rescued": 3,
            "judgement": {"test": {"test_01": {"model": model}}}}  # fmt: skip


def two_runs(shelf: Shelf) -> list[str]:
    first = shelf.put(1, shelf.resolved("gat", "normal"), judged(0.5, 7.0))
    second = shelf.put(2, shelf.resolved("gat", "normal", sets=("training.lr=0.5",)), judged(0.25, 3.0))
    return [first.run_id, second.run_id]


def test_settings_that_are_equal_in_all_runs_are_left_out() -> None:
    assert differences([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}]) == {"b": [2, 3, None]}


def test_runs_are_shown_side_by_side_with_the_best_of_each_row_marked(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("compare", *two_runs(shelf), *shelf.flags)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["training.lr", "0.001", "0.5"] in rows
    assert ["test_01", "0.5000*", "0.2500"] in rows
    assert ["test_01", "7", "3*"] in rows
    assert ["rescues", "3", "3"] in rows
    assert ["setting", "0101-000001-0001", "0101-000002-0002"] in rows


@pytest.mark.parametrize("setting", ["dataset.window=50", "mode=curriculum"])
def test_a_loss_of_other_data_or_of_another_mode_is_not_called_the_best(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    result = {"status": "finished", "best_validation_loss": 0.5}
    for number, sets in enumerate([(), (setting,)], start=1):
        shelf.put(number, shelf.resolved("gat", "normal", sets=sets), result | {"best_validation_loss": 1 / number})
    assert main(("compare", "000001", "000002", *shelf.flags)) == 0
    shown = capsys.readouterr().out
    assert "no best value is marked: the runs have different" in shown
    assert "*" not in shown


def test_the_same_comparison_as_json(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    names = two_runs(shelf)
    assert main(("compare", *names, "--json", *shelf.flags)) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["run_id"] for each in found["runs"]] == names
    assert found["settings"] == {"training.lr": [0.001, 0.5]}
    assert [each["scores"]["mcc"] for each in found["runs"]] == [{"test_01": 0.5}, {"test_01": 0.25}]


def test_one_run_is_not_compared_with_itself(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    names = two_runs(shelf)
    assert main(("compare", names[1], "last", *shelf.flags)) == 2
    assert "Only one run to compare" in capsys.readouterr().err
