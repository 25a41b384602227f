"""Thresholds from benign windows: for alarms an hour, and for logs whose scores lie elsewhere."""

import json

import numpy as np
import pytest

from can_train.errors import CheckpointError, ConfigError, DataError
from can_train.tasks.can.evaluation.bursts import EACH_WINDOW, USUAL_HOLD, Hold, Timeline, held_scores
from can_train.tasks.can.evaluation.calibration import (
    LEAST_CALIBRATION_WINDOWS,
    BenignScores,
    ScoreScale,
    calibrate_logs,
)
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
    with pytest.raises(ConfigError, match="holds of up to 5 windows: --hold 2/7"):
        BenignScores.of(*benign(100)).threshold(6, Hold(2, 7))
    with pytest.raises(CheckpointError, match="that of a run does not"):
        BenignScores.from_result({}, "a run")


def calibrated(score, *, seconds, validation=UNIT, source=None, label=None):
    size = len(score)
    start = 1.0 * np.arange(size)
    sources = (source_file("a"), source_file("b"))
    flat = windows_of([[1, 2]] * size, start_time=start, source=source, label=label, sources=sources)
    return calibrate_logs(flat, np.arange(size), np.asarray(score, float), validation, seconds)


def test_a_log_whose_scores_lie_higher_is_brought_back_to_validation():
    score = np.random.default_rng(0).exponential(size=200)
    validation = ScoreScale.of(score)
    found = calibrated(10 + 3 * score, seconds=100.0, validation=validation)
    assert found.score[found.judged] == pytest.approx(score[100:], abs=0.5)
    assert found.windows == 100
    assert found.judged.sum() == 100
    assert not found.judged[:100].any()


def test_each_log_is_calibrated_by_its_own_beginning():
    score = np.concatenate([np.tile([0.0, 1.0], 50), np.tile([100.0, 101.0], 50)])
    found = calibrated(score, seconds=40.0, source=[0] * 100 + [1] * 100)
    assert found.score[:100] == pytest.approx(found.score[100:])
    assert (found.windows, found.judged.sum()) == (80, 120)


def test_a_calm_beginning_is_not_believed_to_be_all_there_is():
    calm = np.tile([0.0, 0.1], 40)
    assert calibrated(calm - 0.5, seconds=40.0).score == pytest.approx(calm - 0.5)
    far = calibrated(calm - 5.0, seconds=40.0).score
    assert np.median(far) == pytest.approx(-1.0)
    assert np.ptp(far) == pytest.approx(0.1)


def test_attacks_in_what_is_taken_for_benign_are_counted():
    found = calibrated(np.tile([0.0, 1.0], 40), seconds=40.0, label=[0] * 30 + [1] * 20 + [0] * 30)
    assert found.attacks == 10
    assert found.count_above(0.4) == 20


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (LEAST_CALIBRATION_WINDOWS - 1.0, "at least 20 windows: 19 in the first 19 s of a"),
        (80.0, "longer than what it is calibrated on"),
    ],
)
def test_too_short_and_too_long_calibrations_are_refused(seconds, said):
    with pytest.raises(DataError, match=said):
        calibrated(np.zeros(80), seconds=seconds)
