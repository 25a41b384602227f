"""Thresholds from benign windows: for alarms an hour, and for logs whose scores lie elsewhere."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from can_train.errors import CheckpointError, ConfigError, DataError
from can_train_tasks.can.evaluation.bursts import EACH_WINDOW, USUAL_HOLD, Timeline, held_scores
from can_train_tasks.can.evaluation.calibration import (
    LEAST_CALIBRATION_WINDOWS,
    BenignScores,
    Calibration,
    ScoreScale,
    calibrate_logs,
    calibration_notes,
)
from can_train_tasks.can.evaluation.options import Hold
from fakes.windows_by_hand import source_file, windows_of

HOUR = 1_800  # windows, one every two seconds
UNIT = ScoreScale(centre=0.0, scale=1.0)


def drive(size):
    flat = windows_of([[1, 2]] * size, start_time=2.0 * np.arange(size))
    return Timeline.of(flat, np.arange(size))


def benign(size, seed=0):
    timeline = drive(size)
    score = np.random.default_rng(seed).exponential(size=size)
    return timeline, score


def events(traffic, threshold, hold):
    timeline, score = traffic
    hours = timeline.benign_s.sum() / 3600
    return timeline.count_events(held_scores(score, timeline.segment, hold) > threshold) / hours


@pytest.mark.parametrize("hold", [EACH_WINDOW, USUAL_HOLD], ids=str)
@pytest.mark.parametrize("per_hour", [2, 6, 60])
def test_about_as_many_false_events_an_hour_are_found_as_were_asked_for(per_hour, hold):
    threshold = BenignScores.of(*benign(10 * HOUR)).threshold(per_hour, hold)
    found = events(benign(40 * HOUR, seed=1), threshold.value, hold)
    assert per_hour / 2 <= found <= 2 * per_hour
    assert f"{per_hour:g} false events an hour expected with --hold {hold}, by 10 h" in threshold.rule


def test_fewer_events_than_the_benign_time_can_show_are_extrapolated_and_said_to_be():
    record = BenignScores.of(*benign(HOUR // 10))
    assert "extrapolated" not in record.threshold(20, EACH_WINDOW).rule
    threshold = record.threshold(1, EACH_WINDOW)
    assert "by 5.98 min of benign validation windows, from which it is extrapolated" in threshold.rule
    assert threshold.value > benign(HOUR // 10)[1].max()
    assert 1 / 4 <= events(benign(100 * HOUR, seed=2), threshold.value, EACH_WINDOW) <= 4


def test_more_alarms_have_a_lower_threshold():
    record = BenignScores.of(*benign(HOUR))
    values = [record.threshold(per_hour, USUAL_HOLD).value for per_hour in (0.01, 0.5, 1, 3, 7.9, 8, 30, 100, 1e6)]
    assert values == sorted(values, reverse=True)
    assert "which have fewer at any threshold" in record.threshold(1e6, USUAL_HOLD).rule


def test_scores_that_do_not_differ_have_a_threshold_that_none_exceeds():
    threshold = BenignScores.of(drive(50), np.full(50, 3.0)).threshold(6, EACH_WINDOW)
    assert threshold.value == 3.0
    assert "do not differ" in threshold.rule


def test_the_record_survives_json():
    record = BenignScores.of(*benign(HOUR))
    plain = json.loads(json.dumps({"benign": record.plain()}, allow_nan=False))
    again = BenignScores.from_result(plain, "a run")
    assert again.plain() == record.plain()
    assert again.threshold(6, USUAL_HOLD) == record.threshold(6, USUAL_HOLD)
    assert len(json.dumps(plain)) < 40_000


def test_what_a_record_does_not_tell_is_refused():
    with pytest.raises(ConfigError, match="a hold of up to 5 windows: --hold 2/7"):
        BenignScores.of(*benign(100)).threshold(6, Hold(2, 7))
    with pytest.raises(CheckpointError, match="The result of a run does not tell"):
        BenignScores.from_result({}, "a run")


def bus(size, *, ids=(1, 2), source=None, label=None, frame_s=0.5):
    """Windows of as many frames as there are IDs, one a second, in one or two logs."""
    windows = [list(ids)] * size if isinstance(ids, tuple) else ids
    sources = (source_file("a"), source_file("b"))
    flat = windows_of(windows, start_time=1.0 * np.arange(size), source=source, label=label, sources=sources)
    return replace(flat, end_time=flat.start_time + frame_s * flat.window)


def calibrated(score, *, seconds, validation=UNIT, source=None, label=None, rows=None):
    flat, score = bus(len(score), source=source, label=label), np.asarray(score, float)
    rows = np.arange(len(score)) if rows is None else rows
    make = partial(Calibration, seconds, record(validation), threshold=5.0, vocabulary=np.array([1, 2]))
    return calibrate_logs(flat, rows, score[rows], make, lambda own: score[own])


def record(scale=UNIT):
    """What validation taught: windows that last a second at least."""
    return BenignScores(scale=scale, hours=1.0, shortest_s=1.0, levels={})


def notes(found, flat, *, tested=None):
    rows = np.arange(len(flat)) if tested is None else tested
    return calibration_notes(flat, [found], tested=rows, threshold=0.4)


def test_a_log_whose_scores_lie_higher_is_brought_back_to_validation():
    score = np.random.default_rng(0).exponential(size=200)
    validation = ScoreScale.of(score)
    found = calibrated(10 + 3 * score, seconds=100.0, validation=validation)
    assert found.score[found.judged] == pytest.approx(score[100:], abs=0.5)
    assert found.rows.tolist() == [*range(100)]
    assert found.judged.tolist() == [False] * 100 + [True] * 100


def test_each_log_is_calibrated_by_its_own_beginning():
    score = np.concatenate([np.tile([0.0, 1.0], 50), np.tile([100.0, 101.0], 50)])
    found = calibrated(score, seconds=40.0, source=[0] * 100 + [1] * 100)
    assert found.score[:100] == pytest.approx(found.score[100:])
    assert found.rows.tolist() == [*range(40), *range(100, 140)]
    assert found.judged.sum() == 120


def test_a_log_begins_with_its_first_frame_where_windows_there_are_not_judged():
    score = np.concatenate([np.tile([0.0, 1.0], 40), np.full(60, 50.0)])
    fresh = np.arange(70, 140)
    found = calibrated(score, seconds=30.0, rows=fresh)
    assert found.rows.tolist() == [*range(30)]
    assert found.judged.all()
    # The median of the beginning is that much higher than validation's.
    assert found.score == pytest.approx(score[fresh] - 0.5)
    assert "trained on 30 of these 30 windows" in notes(found, bus(140), tested=fresh)[-1]


def test_a_log_with_few_windows_is_calibrated_on_for_longer():
    found = calibrated(np.tile([0.0, 1.0], 40), seconds=3.0)
    assert found.rows.tolist() == [*range(LEAST_CALIBRATION_WINDOWS)]
    assert "on its first 20: up to 20 s" in notes(found, bus(80))[1]


def test_a_calm_beginning_is_not_believed_to_be_all_there_is():
    calm = np.tile([0.0, 0.1], 40)
    assert calibrated(calm - 0.5, seconds=40.0).score == pytest.approx(calm - 0.5)
    far = calibrated(calm - 5.0, seconds=40.0).score
    assert np.median(far) == pytest.approx(-1.0)
    assert np.ptp(far) == pytest.approx(0.1)


def test_attacks_in_what_is_taken_for_benign_are_counted():
    label = [0] * 30 + [1] * 20 + [0] * 30
    found = calibrated(np.tile([0.0, 1.0], 40), seconds=40.0, label=label)
    first, *_, last = notes(found, bus(80, label=label))
    assert "40 windows, which tell where its scores lie and are not judged; 20 of them are flagged" in first
    assert last == "Warning: by their labels 10 of these windows are attacks, so the calibration is wrong"


@pytest.mark.parametrize(
    ("size", "said"),
    [(19, "19 windows in the first 30 s of a: a calibration needs 20"), (30, "30 windows in the first 30 s of a, and")],
)
def test_a_log_that_is_too_short_to_calibrate_on_is_refused(size, said):
    with pytest.raises(DataError, match=said):
        calibrated(np.zeros(size), seconds=30.0)


def suspicions(flat, score, vocabulary=(1, 2)):
    calibration = Calibration(1e9, record(), threshold=5.0, vocabulary=np.array(vocabulary))
    rows = np.arange(len(flat))
    for part in np.array_split(rows, 7):
        assert calibration.wanted(flat, part) == len(part)
        calibration.add(flat, part, np.asarray(score, float)[part])
    return {one.kind: one for one in calibration.suspicions()}


CALM = np.tile([0.0, 1.0], 30)


def test_a_benign_beginning_raises_no_suspicion():
    assert suspicions(bus(60), CALM) == {}


def test_a_flood_in_what_is_taken_for_benign_is_named():
    flat = bus(60)
    end = flat.end_time.copy()
    end[20:30] = flat.start_time[20:30] + 0.2
    found = suspicions(replace(flat, end_time=end), CALM)
    assert {*found} == {"rate"}
    assert found["rate"].text() == (
        "10 of the 60 windows that are taken for benign look like an attack, from 20.00 to 29.20 s after the first "
        "frame: up to 10 frames a second, where benign validation has up to 2"
    )


def test_a_flood_is_named_where_it_is_most_of_what_is_taken_for_benign():
    flat = bus(60)
    found = suspicions(replace(flat, end_time=flat.start_time + np.where(np.arange(60) < 50, 0.2, 1.0)), CALM)
    assert found["rate"].windows == 50


def test_a_faster_bus_that_training_did_not_see_is_no_flood():
    flat = bus(60, frame_s=0.05)
    assert suspicions(flat, CALM, vocabulary=(7, 8)) == {}
    assert {*suspicions(flat, CALM)} == {"rate"}


@pytest.mark.parametrize("made_up", [[9] * 8, [*range(100, 108)]], ids=["one ID", "IDs drawn at random"])
def test_ids_that_training_did_not_see_are_named_on_a_bus_that_it_knows(made_up):
    ids = [[1, 2]] * 30 + [[1, own] for own in made_up] + [[1, 2]] * 22
    found = suspicions(bus(60, ids=ids), CALM)
    assert {*found} == {"unseen_ids"}
    assert (found["unseen_ids"].windows, found["unseen_ids"].from_s, found["unseen_ids"].to_s) == (8, 30.0, 38.0)
    assert found["unseen_ids"].why.startswith("the ID 009, " if made_up[0] == 9 else "8 IDs (064, 065, 066, …), ")


def test_scores_far_out_are_named():
    found = suspicions(bus(60), [*CALM[:59], 80.0])
    assert {*found} == {"score"}
    assert found["score"].why == "scores of up to 80, where benign validation has 0 (median)"
