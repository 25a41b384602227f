"""Live detection finds, window by window, what evaluating a log of the same frames finds."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import CheckpointError
from can_train.reporter import LineReporter, SilentReporter
from can_train.training.evaluate import EvaluationRequest, evaluate
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.evaluation import live as live_module
from can_train_tasks.can.evaluation import live_input
from can_train_tasks.can.evaluation.alarms import FlaggedLog
from can_train_tasks.can.evaluation.bursts import EACH_WINDOW
from can_train_tasks.can.evaluation.live import AlarmState, DetectionRequest, LiveEvent, LiveRun, make_live_detector
from can_train_tasks.can.evaluation.live_input import BusFrames, Unread
from can_train_tasks.can.evaluation.metrics import Threshold
from can_train_tasks.can.evaluation.options import AlarmRule, EvaluationOptions, Hold
from fakes.candump import candump
from fakes.random_bus import INJECTED, injected_frames, write_log
from fakes.trained_runs import WINDOW, finished_run, injected_run
from fakes.windows_by_hand import windows_of


def drive(size: int = 4_000, pause_s: float = 1.5) -> Frames:
    """A bus with bursts of attacks, with a pause after each, so that each is an alarm of its own."""
    frames = injected_frames(size, seed=1)
    return replace(frames, timestamp=frames.timestamp + np.arange(size) // 320 * pause_s)


def bus(frames: Frames, name: str = "can0") -> BusFrames:
    return BusFrames(name, frames)


class Watched:
    """What a run told of an input, until its end."""

    def __init__(self, run: Path, text: str, place: Path, rule: AlarmRule | None = None, **more: Any) -> None:
        path = place / "input.txt"
        path.write_text(text)
        live = LiveRun(DetectionRequest(run=run, source=str(path), rule=rule or AlarmRule(), **more))
        self.events: list[LiveEvent] = list(live.events())
        self.summary = " ".join(live.summary())
        live.close()

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [event.record for event in self.events if event.record["event"] == kind]


def offline(run: Path, log: Path, rule: AlarmRule) -> Mapping[str, Any]:
    request = EvaluationRequest(run=run, dataset=str(log), device="cpu",
                                options=EvaluationOptions(**vars(rule), flagged_only=True))  # fmt: skip
    return evaluate(request, SilentReporter()).document


@pytest.mark.parametrize("kind", ["gat", "vgae", "fusion"])
@pytest.mark.parametrize(
    "rule", [AlarmRule(hold=(1, 1)), AlarmRule(hold=(2, 3)), AlarmRule(hold=(2, 3), calibrate_s=2.0)], ids=str
)
def test_alarms_are_those_of_the_same_frames_in_a_log(kind: str, rule: AlarmRule, tmp_path: Path) -> None:
    frames = drive()
    expected = offline(injected_run(kind), write_log(tmp_path / "other.csv", frames), rule)["alarms"]
    found = Watched(injected_run(kind), candump(frames), tmp_path, rule).of("alarm_end")
    assert len(expected) >= (0 if rule.calibrate_s else 5)
    ends = [(alarm["start_time"], alarm["end_time"], alarm["windows"]) for alarm in found]
    assert ends == [(alarm["start_time"], alarm["end_time"], alarm["windows"]) for alarm in expected]
    scores = [alarm["score"] for alarm in found]
    assert scores == pytest.approx([alarm["score"] for alarm in expected], rel=1e-5)


@pytest.mark.parametrize("hold", [(1, 1), (2, 3)])
def test_drives_in_one_log_are_judged_as_in_logs_of_their_own(hold: tuple[int, int], tmp_path: Path) -> None:
    run, rule, frames = injected_run("vgae"), AlarmRule(hold=hold), drive()
    begins = [0, 410, 1_777, len(frames)]
    drives = [frames[begin:end] for begin, end in pairwise(begins)]
    shifted = [replace(each, timestamp=each.timestamp + 1_800.0 * number) for number, each in enumerate(drives)]
    expected = []
    for number, each in enumerate(shifted):
        expected += offline(run, write_log(tmp_path / f"{number}.csv", each), rule)["alarms"]
    joined = Frames.concatenate(shifted)
    logged = offline(run, write_log(tmp_path / "joined.csv", joined), rule)["alarms"]
    live = Watched(run, candump(joined), tmp_path, rule)
    spans = [(alarm["start_time"], alarm["end_time"], alarm["windows"]) for alarm in expected]
    assert len(spans) > 3
    assert [(alarm["start_time"], alarm["end_time"], alarm["windows"]) for alarm in logged] == spans
    assert [(alarm["start_time"], alarm["end_time"], alarm["windows"]) for alarm in live.of("alarm_end")] == spans
    assert "20 frames before pauses of 10 s and at the end fill no window" in live.summary


def test_a_threshold_for_so_many_alarms_an_hour_raises_the_alarms_of_a_log_and_live_with_one_hold(
    tmp_path: Path,
) -> None:
    rule, frames = AlarmRule(alarms_per_hour=60.0), drive()
    expected = offline(injected_run("gat"), write_log(tmp_path / "other.csv", frames), rule)["alarms"]
    found = Watched(injected_run("gat"), candump(frames), tmp_path, rule).of("alarm_end")
    assert found
    spans = [(alarm["start_time"], alarm["end_time"], alarm["windows"]) for alarm in found]
    assert spans == [(alarm["start_time"], alarm["end_time"], alarm["windows"]) for alarm in expected]


def test_the_summary_tells_the_time_without_a_step_of_the_clock(tmp_path: Path) -> None:
    frames = injected_frames(4_000, seed=1)
    stepped = replace(frames, timestamp=frames.timestamp + np.where(np.arange(4_000) < 2_000, 3600.0, 0.0))
    usual, seconds = (Watched(injected_run("gat"), candump(each), tmp_path).summary for each in (frames, stepped))
    assert seconds.split(" s, ")[0] == usual.split(" s, ")[0]


def test_progress_counts_each_window_once(tmp_path: Path) -> None:
    shown, log = io.StringIO(), write_log(tmp_path / "other.csv", drive(400))
    evaluate(EvaluationRequest(run=injected_run("gat"), dataset=str(log), device="cpu"), LineReporter(shown))
    assert f"scoring: {400 // WINDOW} samples" in shown.getvalue()


def table(frames: Frames) -> str:
    """Writes frames as a CSV log with hexadecimal numbers and a column for each byte."""
    rows = zip(frames.timestamp, frames.can_id, frames.payload, frames.label, strict=True)
    lines = [f"{time:.6f},{can_id:X},{bytes(data).hex(',')},{label}\n" for time, can_id, data, label in rows]
    return f"timestamp,id,{','.join(f'b{i}' for i in range(8))},label\n{''.join(lines)}"


def lettered_log(path: Path) -> Path:
    """Writes a log whose numbers tell their base: the IDs 20A to 213."""
    frames = injected_frames(4_000)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(replace(frames, can_id=frames.can_id + np.uint32(10))))
    return path


def test_numbers_that_do_not_tell_their_base_are_read_as_in_the_training_data(tmp_path: Path) -> None:
    run, fresh = finished_run("gat", log=lettered_log, mode__baselines=False), injected_frames(800, seed=1)
    position = np.arange(800)
    # Numbers of digits alone: the IDs 210 to 213, and bytes of 10 to 19.
    frames = replace(fresh, can_id=(0x210 + position % 4).astype(np.uint32), payload=0x10 + fresh.payload % 10,
                     label=np.zeros(800, np.uint8))  # fmt: skip
    scores, alarms = [], []
    for name, text in (("drive.log", candump(frames)), ("drive.csv", table(frames))):
        (tmp_path / name).write_text(text)
        request = EvaluationRequest(run=run, dataset=str(tmp_path / name), device="cpu",
                                    scores=tmp_path / "scores.csv")  # fmt: skip
        evaluate(request, SilentReporter())
        scores.append(pl.read_csv(tmp_path / "scores.csv")["score"].to_list())
        watched = Watched(run, text, tmp_path, AlarmRule(threshold=-1e9), explain=True)
        alarms.append(watched.of("alarm") + watched.of("alarm_end"))
    assert scores[0] == scores[1]
    assert {reason["id"] for reason in alarms[0][0]["reasons"]} <= {"210", "211", "212", "213"}
    assert alarms[0][0]["reasons"] == alarms[1][0]["reasons"]
    assert alarms[0][1]["score"] == alarms[1][1]["score"]


def test_a_run_names_messages_and_signals_of_its_database_without_the_file(tmp_path: Path) -> None:
    file = tmp_path / "car.dbc"
    file.write_text('VERSION ""\nBU_: A\nBO_ 291 Forged: 8 A\n SG_ Torque : 0|16@1+ (0.5,0) [0|99] "Nm" A\n')
    run = injected_run("gat", dataset__dbc=str(file))
    file.unlink()
    frames = drive()
    expected = offline(run, write_log(tmp_path / "other.csv", frames), AlarmRule())["alarms"]
    watched = Watched(run, candump(frames), tmp_path, explain=True)
    for alarms in (expected, watched.of("alarm")):
        assert {each["message"] for alarm in alarms for each in alarm["reasons"] if each["id"] == "123"} == {"Forged"}
    assert "\n  Forged, ID 123, not in benign training data: " in " ".join(event.text for event in watched.events)


COPIED_S = 1.0  # the copy in `copied_drive` is shorter
RULES = [
    AlarmRule(),
    AlarmRule(threshold=2.0),
    AlarmRule(alarms_per_hour=60.0, hold=(2, 3)),
    AlarmRule(calibrate_s=COPIED_S),
    AlarmRule(calibrate_s=0.001, alarms_per_hour=60.0),
]


def copied_drive(size: int = 1_200) -> Frames:
    """A drive that begins with a copy of what `injected_run` was trained on, and later has several new IDs."""
    own, fresh = injected_frames(4_000)[:size], injected_frames(size, seed=1)
    can_id = fresh.can_id.copy()
    can_id[size // 2 :: 50] = 0x600 + np.arange(len(can_id[size // 2 :: 50])) % 5
    later = replace(fresh, timestamp=fresh.timestamp + own.timestamp[-1] + 5e-4, can_id=can_id)
    return Frames.concatenate([own, later])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("make", "stride"), [(drive, WINDOW), (drive, 50), (copied_drive, WINDOW), (copied_drive, 7)])
def test_windows_scores_and_flags_are_those_of_the_same_frames_in_a_log(
    make: Callable[[int], Frames], stride: int, rule: AlarmRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, frames = injected_run("vgae", dataset__stride=stride), make(1_200)
    request = EvaluationRequest(run=run, dataset=str(write_log(tmp_path / "other.csv", frames)),
                                options=EvaluationOptions(**vars(rule)),
                                scores=tmp_path / "scores.csv", device="cpu")  # fmt: skip
    document = evaluate(request, SilentReporter()).document
    offline = pl.read_csv(tmp_path / "scores.csv")
    live: dict[float, float] = {}
    see = AlarmState.see

    def seen(self: AlarmState, start_s: float, end_s: float, score: float, **more: int) -> object:
        live[start_s] = score
        return see(self, start_s, end_s, score, **more)

    monkeypatch.setattr(AlarmState, "see", seen)
    watched = Watched(run, candump(frames), tmp_path, rule)
    assert f"scores more than {document['threshold']:.6g}: " in watched.summary
    if make is drive:
        assert [*live] == offline["start_time"].to_list()
    scores = np.array([live[start] for start in offline["start_time"]])
    np.testing.assert_allclose(scores, offline["score"], rtol=1e-5, atol=1e-6)
    assert (scores > document["threshold"]).tolist() == offline["flagged"].to_list()
    assert offline["flagged"].any() or rule.calibrate_s is not None
    # Live, nobody knows which windows the run was trained on.
    copied = [start for start in live if start not in {*offline["start_time"]}]
    assert all(start < frames.timestamp[1_200] for start in copied)
    assert bool(copied) == (make is copied_drive and rule.calibrate_s != COPIED_S)


def test_an_alarm_is_told_with_the_window_that_raises_it(tmp_path: Path) -> None:
    frames = drive()
    watched = Watched(injected_run("gat"), candump(frames), tmp_path)
    ends = frames.timestamp[WINDOW - 1 :: WINDOW].round(6)
    raised = watched.of("alarm")
    assert all(alarm["time"] in ends for alarm in raised)
    # An event that is raised is told before the frames after it are.
    kinds = [event.record["event"] for event in watched.events]
    assert kinds == ["alarm", "alarm_end"] * len(raised)
    assert json.loads(json.dumps([event.record for event in watched.events], allow_nan=False))


def test_an_alarm_names_ids_of_its_window_where_it_is_asked_to(tmp_path: Path) -> None:
    frames = drive()
    on_bus = {f"{can_id:03X}": can_id == INJECTED for can_id in np.unique(frames.can_id).tolist()}
    raised = Watched(injected_run("gat"), candump(frames), tmp_path, explain=True).of("alarm")
    for alarm in raised:
        assert len(alarm["reasons"]) == 3
        assert all(reason["known"] != on_bus[reason["id"]] for reason in alarm["reasons"])
    assert Watched(injected_run("gat"), candump(frames), tmp_path).of("alarm")[0]["reasons"] == []


def test_the_summary_counts_frames_windows_and_what_was_left_out(tmp_path: Path) -> None:
    watched = Watched(injected_run("gat"), candump(drive(1_007)) + "nonsense\n", tmp_path, AlarmRule(threshold=1e9))
    assert watched.events == []
    assert "1,007 frames in 5.0 s, 50 windows, 0 of them flagged, 0 alarms" in watched.summary
    assert "scores more than 1e+09: as given" in watched.summary
    assert "The last 7 frames fill no window" in watched.summary
    assert "1 line is malformed and left out" in watched.summary


def test_a_clock_of_coarser_steps_than_in_training_is_told_as_evaluate_tells_it(tmp_path: Path) -> None:
    frames = injected_frames(4_000, seed=1)
    coarse = replace(frames, timestamp=np.round(frames.timestamp, 3))
    notes = offline(injected_run("gat"), write_log(tmp_path / "other.csv", coarse), AlarmRule())["notes"]
    (note,) = Watched(injected_run("gat"), candump(coarse), tmp_path).of("note")
    assert note["text"].startswith("The clock has steps of 1 ms, and in the training logs of 1 µs: ")
    assert any(f"other.csv: t{note['text'][1:]}" in each for each in notes)
    assert not Watched(injected_run("gat"), candump(frames), tmp_path).of("note")


def test_a_new_id_that_came_once_is_named_at_the_end_as_evaluate_names_it(tmp_path: Path) -> None:
    frames = drive()
    can_id = frames.can_id.copy()
    can_id[2_000] = 0x6AA
    frames, run = replace(frames, can_id=can_id), injected_run("vgae")
    summary = Watched(run, candump(frames), tmp_path).summary
    notes = offline(run, write_log(tmp_path / "other.csv", frames), AlarmRule())["notes"]
    (said,) = [note for note in notes if note.startswith("New, and came once")]
    assert said.endswith(" were too short to see them: 6AA")
    assert said in summary


def test_a_calibration_takes_the_beginning_for_benign_and_says_so(tmp_path: Path) -> None:
    frames = drive()
    watched = Watched(injected_run("vgae"), candump(frames), tmp_path, AlarmRule(calibrate_s=2.0))
    (calibrated,) = watched.of("calibrated")
    within = frames.timestamp[WINDOW - 1 :: WINDOW] <= frames.timestamp[0] + 2.0
    assert calibrated["windows"] == within.sum()
    assert f"The first {within.sum()} windows were taken for benign" in watched.summary
    assert all(alarm["start_time"] >= calibrated["time"] for alarm in watched.of("alarm"))


def test_a_calibration_is_the_same_where_the_input_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, rule = candump(drive()), AlarmRule(calibrate_s=2.0)
    whole = Watched(injected_run("vgae"), text, tmp_path, rule)
    monkeypatch.setattr(live_input, "READ_BYTES", 1_000)
    pieces = Watched(injected_run("vgae"), text, tmp_path, rule)
    assert [event.record["event"] for event in pieces.events] == [event.record["event"] for event in whole.events]
    assert pieces.of("calibrated") == whole.of("calibrated")
    assert pieces.summary == whole.summary


def test_a_slow_bus_is_calibrated_on_for_longer(tmp_path: Path) -> None:
    (calibrated,) = Watched(injected_run("vgae"), candump(drive()), tmp_path, AlarmRule(calibrate_s=0.001)).of(
        "calibrated"
    )
    assert calibrated["windows"] == 20
    watched = Watched(injected_run("vgae"), candump(drive(WINDOW * 5)), tmp_path, AlarmRule(calibrate_s=10))
    assert watched.events == []
    assert "The first 5 windows were too few to calibrate on" in watched.summary


def test_alarms_an_hour_choose_the_threshold(tmp_path: Path) -> None:
    watched = Watched(injected_run("vgae"), candump(drive()), tmp_path, AlarmRule(alarms_per_hour=6, hold=(2, 3)))
    assert "6 false events an hour expected with --hold 2/3" in watched.summary


def two_buses(frames: Frames) -> str:
    """The drive on can0; on can1 its beginning, which is calm."""
    other = [line.replace("can0", "can1") for line in candump(frames[:200]).splitlines(keepends=True)]
    lines = candump(frames).splitlines(keepends=True)
    return "".join(line + (other[number] if number < len(other) else "") for number, line in enumerate(lines))


def test_two_buses_on_one_pipe_have_windows_and_alarms_of_their_own(tmp_path: Path) -> None:
    frames = drive()
    alone = Watched(injected_run("gat"), candump(frames), tmp_path)
    watched = Watched(injected_run("gat"), two_buses(frames), tmp_path)
    assert [event for event in watched.of("alarm_end") if event["bus"] == "can0"] == alone.of("alarm_end")
    assert [event for event in watched.of("alarm") if event["bus"] == "can0"] == alone.of("alarm")
    assert "each watched by itself: can0, can1; --channel can0 watches one" in watched.of("note")[0]["text"]
    assert all(event.text.startswith("can0: ") for event in watched.events if event.record["event"] == "alarm")
    assert "can0: 4,000 frames in" in watched.summary
    assert "can1: 200 frames in" in watched.summary
    chosen = Watched(injected_run("gat"), two_buses(frames), tmp_path, channel="can0")
    assert [event.text for event in chosen.events] == [event.text for event in alone.events]


def test_error_frames_and_a_bus_that_is_off_raise_events(tmp_path: Path) -> None:
    frames = drive(1_000)
    error = "({:.6f}) can0 {:08X}#0000000000000000\n"
    burst = "".join(error.format(2.0 + number / 1000, 0x20000008) for number in range(500))
    text = candump(frames) + burst + error.format(3.5, 0x20000040) + error.format(3.6, 0x20000100)
    watched = Watched(injected_run("gat"), text, tmp_path, AlarmRule(threshold=1e9))
    assert [event.text for event in watched.events] == [
        "2.000000 s: 1 error frame (protocol violation)",
        "3.500000 s: BUS OFF, the controller takes no part in the bus",
        "3.500000 s: 500 error frames (protocol violation, bus off)",
        "3.600000 s: 1 error frame (controller restarted)",
    ]
    assert watched.of("bus_off") == [{"event": "bus_off", "time": 3.5, "bus": "can0"}]
    assert "502 error frames, 1 of them bus off" in watched.summary
    assert "malformed" not in watched.summary


@pytest.mark.parametrize("read_bytes", [500, 2**20])
def test_error_frames_are_counted_each_second_however_many_arrive_together(
    read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_input, "READ_BYTES", read_bytes)
    errors = "".join(f"({10 + number / 10:.6f}) can0 20000080#0000000000000000\n" for number in range(35))
    events = Watched(injected_run("gat"), candump(drive(100)) + errors, tmp_path).of("error_frames")
    assert [(event["time"], event["count"]) for event in events] == [(10.0, 1), (11.0, 10), (12.0, 10), (13.0, 10),
                                                                     (13.4, 4)]  # fmt: skip


def test_faults_of_the_input_are_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_input, "READ_BYTES", 20_000)
    calm, busy, strange = (drive(size, pause_s=0.0) for size in (1_200, 9_000, 6_000))
    calm = replace(calm, timestamp=calm.timestamp + 10_000.0)
    busy = replace(busy, timestamp=busy.timestamp / 3 + calm.timestamp[-1])
    strange = replace(strange, timestamp=strange.timestamp + busy.timestamp[-1],
                      can_id=np.full(6_000, 0x700, np.uint32))  # fmt: skip
    again = replace(calm, timestamp=calm.timestamp - 5_000.0)
    (tmp_path / "input.txt").write_text(
        "".join([*map(candump, (calm, busy, strange)), "(1.0) can0 12A#0\n" * 2_000, candump(again)])
    )
    live = LiveRun(
        DetectionRequest(run=injected_run("gat"), source=str(tmp_path / "input.txt"), rule=AlarmRule(threshold=1e9))
    )
    detector: Any = live._detector
    detector._model.finished.result["judgement"]["bus_load"] = 2_000.0
    events = list(live.events())
    live.close()
    assert [event.record["event"] for event in events] == ["bus_load", "unknown_ids", "unreadable", "clock_jump"]
    assert json.dumps([event.record for event in events], allow_nan=False)
    assert "no ID that training knew in" in events[1].text


def test_events_of_one_block_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    calm = drive(3_000, pause_s=0.0)
    strange = replace(calm, timestamp=3 * calm.timestamp + calm.timestamp[-1] + 0.001,
                      can_id=np.full(3_000, 0x700, np.uint32))  # fmt: skip
    watched = Watched(injected_run("gat"), candump(calm) + candump(strange), tmp_path, AlarmRule(threshold=-1e9))
    kinds = [event.record["event"] for event in watched.events]
    assert kinds == ["alarm", "unknown_ids", "alarm_end"]
    alarm, unknown, end = (event.record for event in watched.events)
    assert alarm["time"] < unknown["time"] < end["end_time"]


def test_a_bus_from_which_only_garbage_comes_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "SILENCE_S", 0.0)
    live = LiveRun(DetectionRequest(run=injected_run("gat"), source=str(Path(__file__))))
    detector: Any = live._detector
    detector._input.batches = lambda: iter([bus(drive(WINDOW - 1)), Unread(50), Unread(50)])
    assert [event.record["event"] for event in live.events()][-1:] == ["silence"]
    live.close()


def test_an_alarm_ends_where_the_watching_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text(candump(drive()))
    live = LiveRun(DetectionRequest(run=injected_run("gat"), source=str(tmp_path / "input.txt")))
    raised = next(live.events()).record
    assert raised["event"] == "alarm"
    (ended,) = live.finish()
    assert (ended.record["event"], ended.record["start_time"]) == ("alarm_end", raised["start_time"])
    assert live.finish() == []
    live.close()


def test_silence_and_its_end_are_told_and_leave_the_windows_as_they_are(tmp_path: Path) -> None:
    frames = drive(1_000)
    (tmp_path / "input.txt").write_text(candump(frames))
    live = LiveRun(DetectionRequest(run=injected_run("gat"), source=str(tmp_path / "input.txt")))
    detector: Any = live._detector
    detector._input.batches = lambda: iter([None, bus(frames[:50]), None, None, bus(frames[50:]), None])
    kinds = [(event.record["event"], event.text) for event in live.events() if "alarm" not in event.record["event"]]
    assert [kind for kind, _ in kinds] == ["silence", "resumed", "silence", "resumed", "silence"]
    assert kinds[0][1] == "the bus is silent, no frame for 2 s"
    assert kinds[-1][1] == f"{frames.timestamp[-1]:.6f} s: the bus is silent, no frame for 2 s"
    assert "50 windows" in " ".join(live.summary())
    live.close()


def test_an_alarm_ends_while_the_bus_is_silent(tmp_path: Path) -> None:
    frames = drive(1_000)
    (tmp_path / "input.txt").write_text(candump(frames))
    live = LiveRun(DetectionRequest(run=injected_run("gat"), source=str(tmp_path / "input.txt")))
    detector: Any = live._detector
    detector._input.batches = lambda: iter([bus(frames[:305]), None, None, bus(frames[305:])])
    kinds = [event.record["event"] for event in live.events()]
    until = kinds.index("resumed")
    assert kinds[:until] == ["alarm", "alarm_end", "silence"]
    assert kinds.count("alarm") == kinds.count("alarm_end")
    live.close()


def test_a_can_interface_is_watched_as_a_pipe_is() -> None:
    can = pytest.importorskip("can", reason="python-can is not installed")
    source = "virtual:test-live"
    live = LiveRun(
        DetectionRequest(run=injected_run("gat"), source=source, rule=AlarmRule(threshold=-1e9), explain=True)
    )
    with can.Bus(interface="virtual", channel="test-live") as bus:
        for number in range(WINDOW):
            bus.send(can.Message(arbitration_id=0x200 + number % 10, data=[number] * 8, is_extended_id=False))
        events = live.events()
        alarm = next(events).record
        events.close()  # type: ignore[attr-defined]
    assert alarm["event"] == "alarm"
    assert [reason["known"] for reason in alarm["reasons"]] == [True] * 3
    assert f"{WINDOW} frames in " in " ".join(live.summary())
    live.close()


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    frames = drive(40_000, pause_s=0.0)
    live = LiveRun(DetectionRequest(run=injected_run("gat"), source=str(Path(__file__)), explain=True))
    detector: Any = live._detector
    detector._input.batches = lambda: (bus(frames[start : start + 333]) for start in range(0, 40_000, 333))
    events = live.events()
    next(events)
    watched = detector._buses["can0"]
    held = [(len(watched._usual), len(watched._builder._pending)) for _ in events]
    assert max(pending for _, pending in held) < WINDOW
    assert max(usual for usual, _ in held) <= 64
    live.close()


@pytest.mark.parametrize("rule", [AlarmRule(calibrate_s=1.0), AlarmRule(alarms_per_hour=6.0)], ids=str)
def test_a_run_without_a_record_of_benign_scores_is_refused(rule: AlarmRule) -> None:
    from can_train.training.loading import load_finished

    finished = load_finished(injected_run("gat"))
    judgement = {name: value for name, value in finished.result["judgement"].items() if name != "benign"}
    bare = replace(finished, result={"judgement": judgement})
    with pytest.raises(CheckpointError, match="how benign windows score"):
        make_live_detector(bare, {}.__getitem__, DetectionRequest(run=Path("run"), source="-", rule=rule))


def states(hold: Hold, flags: str, *, seconds: float) -> list[str]:
    """What each window does to the alarm: `+` raises it, `-` ends it before the window."""
    state = AlarmState(hold=hold, threshold=Threshold(value=0.5, rule=""))
    found = []
    for number, flag in enumerate(flags):
        ended, raised = state.see(number * seconds, number * seconds + 0.01, float(flag))
        found.append(("-" if ended else "") + ("+" if raised else ""))
    return [*found, "-" if state.finish() else ""]


@pytest.mark.parametrize(
    ("hold", "flags", "expected"),
    [
        (EACH_WINDOW, "0110", ["", "+", "-+", "-", ""]),
        (Hold(2, 3), "01100", ["", "", "+", "-+", "-", ""]),
        (Hold(2, 2), "010101", [""] * 7),
        (EACH_WINDOW, "01", ["", "+", "-"]),
    ],
)
def test_an_alarm_begins_once_and_ends_when_a_second_has_passed(hold: Hold, flags: str, expected: list[str]) -> None:
    assert states(hold, flags, seconds=2.0) == expected


def test_flags_less_than_a_second_apart_are_one_alarm() -> None:
    assert states(EACH_WINDOW, "1010010", seconds=0.3) == ["+", "", "", "", "", "", "", "-"]


@given(
    windows=st.lists(
        st.tuples(st.sampled_from((0.01, 0.3, -5.0)), st.sampled_from((0.01, 0.5, 2.0, 40.0, -5.0, -50.0)),
                  st.sampled_from((True, True, False))),
        min_size=2, max_size=30,
    ),
    hold=st.sampled_from((Hold(1, 1), Hold(2, 3), Hold(3, 3))),
)  # fmt: skip
def test_alarms_are_those_of_the_same_windows_in_a_log_whatever_the_clock_does(
    windows: Sequence[tuple[float, float, bool]], hold: Hold
) -> None:
    lasting, gaps, flagged = map(np.array, zip(*windows, strict=True))
    start = np.cumsum(np.append(1e3, (lasting + gaps)[:-1]))
    drive = np.cumsum(np.append(0, np.abs(gaps[:-1]) > 10)).tolist()
    flat = windows_of([[0x100]] * len(start), start_time=start, end_time=start + lasting, drive=drive)
    rows, score = np.arange(len(start)), flagged.astype(float)
    log = FlaggedLog(flat=flat, rows=rows, score=score, flagged=flagged, threshold=0.5, lines=np.stack([rows, rows]),
                     causes=dict.fromkeys(rows.tolist(), ()), decimal=False, hold=hold)  # fmt: skip
    state = AlarmState(hold=hold, threshold=Threshold(value=0.5, rule=""))
    ends = [state.see(*window, drive=number)[0]
            for *window, number in zip(start, start + lasting, score, drive, strict=True)]  # fmt: skip
    live = [(alarm.start_s, alarm.end_s, alarm.windows) for alarm in (*ends, state.finish()) if alarm is not None]
    logged = [alarm.record for alarm in log.alarms()]
    assert live == [(record["start_time"], record["end_time"], record["windows"]) for record in logged]
