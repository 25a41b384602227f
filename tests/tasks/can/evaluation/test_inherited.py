"""Which settings of a run say how other logs are read."""

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from can_train.reporter import SilentReporter
from can_train.training.evaluate import EvaluationRequest, evaluate
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.evaluation.live import DetectionRequest, LiveRun
from can_train_tasks.can.evaluation.options import EvaluationOptions
from can_train_tasks.can.evaluation.scored_windows import as_recorded
from can_train_tasks.can.settings import CanDatasetSettings, ColumnSettings
from fakes.candump import candump
from fakes.random_bus import injected_frames
from fakes.trained_runs import finished_run

USUAL = CanDatasetSettings()
COLUMNS = ColumnSettings(timestamp="Zeit", id="ECU", data="Daten", label="Art")


def rows(frames: Frames, header: str, benign: str = "0", attack: str = "1", ticks: int = 1_000_000) -> str:
    columns = frames.timestamp, frames.can_id, frames.payload, frames.label
    lines = [f"{at * ticks:.0f};0x{can_id:X};{bytes(data).hex()};{attack if label else benign}\n"
             for at, can_id, data, label in zip(*columns, strict=True)]  # fmt: skip
    return f"{header}\n{''.join(lines)}"


def adapted(path: Path, **trained: Any) -> tuple[CanDatasetSettings, list[str]]:
    return as_recorded(replace(USUAL, **trained), USUAL, [path])


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ({"columns": COLUMNS}, "the header of drive.csv does not name them; the columns are recognised by their names"),
        ({"time_unit": "s"}, "in s, the IDs of drive.csv would repeat as on no bus; the unit was guessed"),
        ({"channel": "can1"}, "drive.csv names no interface; all interfaces were read"),
        ({"benign_values": ["calm"]}, "drive.csv has none of them among its labels; the usual ones were used"),
    ],
)
def test_a_setting_that_does_not_fit_a_log_is_not_used_and_named(
    trained: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "drive.csv"
    path.write_text(rows(injected_frames(400), "timestamp;id;data;label", ticks=1_000_000_000))
    (name,) = trained
    assert adapted(path, **trained) == (USUAL, [f"The run's dataset.{name} was not used: {said}"])


def test_settings_that_fit_a_log_stay(tmp_path: Path) -> None:
    path = tmp_path / "drive.csv"
    path.write_text(rows(injected_frames(400), "Zeit;ECU;Daten;Art", benign="calm", attack="bad"))
    trained = {"columns": COLUMNS, "time_unit": "us", "benign_values": ["calm"]}
    assert adapted(path, **trained) == (replace(USUAL, **trained), [])
    set_anew = replace(USUAL, time_unit="ms")
    assert as_recorded(replace(USUAL, time_unit="us"), set_anew, [path]) == (set_anew, [])


def test_the_columns_and_the_unit_of_a_table_stay(tmp_path: Path) -> None:
    path = tmp_path / "drive.parquet"
    text = rows(injected_frames(400), "Zeit;ECU;Daten;Art", ticks=1_000)
    pl.read_csv(io.StringIO(text), separator=";").write_parquet(path)
    trained = {"columns": COLUMNS, "time_unit": "ms"}
    assert adapted(path, **trained) == (replace(USUAL, **trained), [])
    assert [note.partition(":")[0] for note in adapted(path, columns=ColumnSettings(id="Steuer"))[1]] == [
        "The run's dataset.columns was not used"
    ]


def test_only_an_interface_of_the_log_is_read_unless_the_command_line_names_another(tmp_path: Path) -> None:
    lines = candump(injected_frames(400)).splitlines()
    path = tmp_path / "drive.log"
    path.write_text("\n".join([*lines[:300], *(line.replace("can0", "can1") for line in lines[300:]), ""]))
    trained = replace(USUAL, channel="can1")
    assert as_recorded(trained, USUAL, [path]) == (trained, [])
    assert as_recorded(trained, USUAL, [path], ["channel"]) == (USUAL, [])
    assert as_recorded(replace(USUAL, channel="can7"), USUAL, [path]) == (
        USUAL, ["The run's dataset.channel was not used: drive.log has no interface can7; all interfaces were read"]
    )  # fmt: skip


def test_formats_that_tell_the_unit_need_no_note(tmp_path: Path) -> None:
    path = tmp_path / "drive.log"
    path.write_text(candump(injected_frames(400)))
    assert adapted(path, time_unit="us") == (USUAL, [])


def test_a_run_whose_benign_value_means_an_attack_elsewhere_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "drive.csv"
    path.write_text(rows(injected_frames(400), "timestamp;id;data;label", benign="0", attack="0"))
    assert adapted(path, benign_values=["1"])[0].benign_values == ["1"]


def recorded_log(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rows(injected_frames(4_000), "Zeit;ECU;Daten;Art", benign="calm", attack="bad"))
    return path


def test_a_log_of_the_same_recorder_is_evaluated_and_watched_with_the_runs_settings(tmp_path: Path) -> None:
    columns = {f"dataset__columns__{role}": name for role, name in vars(COLUMNS).items() if name}
    # Without its cache: a list has no hash.
    run = finished_run.__wrapped__("gat", log=recorded_log, mode__baselines=False, dataset__time_unit="us",
                                   dataset__benign_values=["calm"], **columns)  # fmt: skip
    log = tmp_path / "other.csv"
    log.write_text(rows(injected_frames(800, seed=1), "Zeit;ECU;Daten;Art", benign="calm", attack="bad"))
    document = evaluate(EvaluationRequest(run=run, dataset=str(log), device="cpu", options=EvaluationOptions()),
                        SilentReporter()).document  # fmt: skip
    assert 0 < document["judgement"]["test"]["other.csv"]["model"]["attack_windows"] < document["windows"]
    live = LiveRun(DetectionRequest(run=run, source=str(log)))
    assert not [event for event in live.events() if event.record["event"] in ("note", "unreadable")]
    assert live.summary()[0].startswith("800 frames in 0.")
    live.close()
