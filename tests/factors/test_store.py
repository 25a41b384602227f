import doctest
import errno
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ConfigError, StateError
from can_train.factors import store as store_module
from can_train.factors.observations import Observation, read_records, write_record
from can_train.factors.observing import write_observation
from can_train.factors.policies import Decision, FactorPoint, MomentumPolicy
from can_train.factors.store import experience_factor, get_safety_factor_db
from can_train.factors.summary import history_of, summarize
from can_train.fit.factor_rule import NO_AIM, EarlierSearch, FactorRule, OtherDevice, RememberedLimit, RememberedLimits
from fakes.samples import A100, KEY, at, observation, out_of_memory

MIB = 2**20


def remember(state: Path, *observations: Observation) -> None:
    for record in observations:
        write_record(state, record)


def converging(**changed: Any) -> list[Observation]:
    law = ((0.66, 7_310), (0.75, 8_200), (0.81, 8_790), (0.83, 9_000), (0.83, 9_010), (0.83, 8_990))
    return [
        observation(n, used=used, peak_allocated_bytes=peak, **({"factor": 0.8} | changed))
        for n, (used, peak) in enumerate(law)
    ]


def test_nothing_is_known_before_the_first_run(tmp_path: Path) -> None:
    assert get_safety_factor_db(tmp_path).learned_rule(KEY, "v100-16gb") == FactorRule(
        decided=None, aim=NO_AIM, times=[]
    )


def test_the_next_run_has_what_was_learned(tmp_path: Path) -> None:
    remember(tmp_path, observation())
    choice = get_safety_factor_db(tmp_path).learned_rule(KEY, "v100-16gb").decided
    assert choice is not None
    assert (round(choice.value, 4), choice.reason) == (0.5142, "learned from 1 run")


def test_devices_and_configurations_learn_apart(tmp_path: Path) -> None:
    remember(tmp_path, observation(1), out_of_memory(2, device=A100), observation(3, key="set_01_gat_teacher_normal"))
    db = get_safety_factor_db(tmp_path)
    assert db.get_factor(KEY, "v100-16gb") == pytest.approx(0.5142, abs=5e-5)
    assert db.get_factor(KEY, "a100-40gb") == pytest.approx(0.339)


def test_without_a_device_the_one_seen_last_is_meant(tmp_path: Path) -> None:
    remember(tmp_path, out_of_memory(2, device=A100), observation(1))
    assert get_safety_factor_db(tmp_path).get_factor(KEY) == pytest.approx(0.339)


def test_the_policy_given_is_the_policy_used(tmp_path: Path) -> None:
    remember(tmp_path, out_of_memory())
    db = get_safety_factor_db(tmp_path, policy=MomentumPolicy(oom_cut=0.1))
    assert db.get_factor(KEY) == pytest.approx(0.389)


def test_a_key_without_its_size_is_understood_if_it_is_unique(tmp_path: Path) -> None:
    remember(tmp_path, observation(size="teacher"))
    db = get_safety_factor_db(tmp_path)
    assert db.get_factor("hcrl_ch_gat_normal") == db.get_factor(KEY)
    remember(tmp_path, observation(2, size="student", key="hcrl_ch_gat_student_normal"))
    with pytest.raises(ConfigError, match="must name one: hcrl_ch_gat_normal"):
        db.get_factor("hcrl_ch_gat_normal")


def test_an_unknown_key_or_device_is_an_error_that_lists_those_there_are(tmp_path: Path) -> None:
    remember(tmp_path, observation())
    db = get_safety_factor_db(tmp_path)
    with pytest.raises(ConfigError, match=f"Unknown configuration key: 'hcrl_gat'.*\n.*{KEY}"):
        db.get_factor("hcrl_gat")
    with pytest.raises(ConfigError, match=r"Unknown device: 'h100-80gb'.*\n.*v100-16gb"):
        db.get_factor(KEY, "h100-80gb")


def test_a_key_is_unknown_to_an_empty_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Nothing has been learned yet"):
        get_safety_factor_db(tmp_path).get_factor(KEY)


def test_stats_are_shares_of_the_capacity(tmp_path: Path) -> None:
    remember(tmp_path, observation(1), observation(2, peak_allocated_bytes=8_000))
    stats = get_safety_factor_db(tmp_path).get_stats(KEY)
    assert stats == {
        "num_runs": 2, "avg_memory_pct": pytest.approx(0.71), "max_memory_pct": 0.8, "factor_variance": 0.0,
        "converged": False,
    }  # fmt: skip


def test_stats_of_runs_that_measured_nothing_are_empty(tmp_path: Path) -> None:
    remember(tmp_path, out_of_memory(peak_allocated_bytes=None))
    stats = get_safety_factor_db(tmp_path).get_stats(KEY)
    assert (stats["avg_memory_pct"], stats["max_memory_pct"]) == (None, None)


def test_a_factor_converges_after_five_runs_the_last_three_in_band() -> None:
    def converged(runs: list[Observation]) -> bool:
        return summarize(runs, policy=MomentumPolicy())[0].converged

    runs = converging()
    assert converged(runs)
    assert not converged(runs[2:])
    assert not converged([*runs, observation(9, peak_allocated_bytes=8_400)])
    assert not converged([*runs, out_of_memory(9, peak_allocated_bytes=9_000)])
    assert not converged([observation(n, peak_allocated_bytes=9_000, factor=0.3 + 0.1 * n) for n in range(5)])


@dataclass(frozen=True)
class Unsure(MomentumPolicy):
    half_width: float = 0.0

    def decide(self, history: Sequence[FactorPoint], *, first: float) -> Decision:
        return replace(super().decide(history, first=first), factor=0.5, interval=self.half_width)


def test_a_factor_whose_interval_is_wide_has_not_converged() -> None:
    runs = converging()
    sure, unsure = (summarize(runs, policy=Unsure(half_width=width))[0] for width in (0.009, 0.011))
    assert (sure.interval, sure.converged) == (0.009, True)
    assert (unsure.interval, unsure.converged) == (0.011, False)


def settings(**changed: Any) -> dict[str, Any]:
    return {"model": {"hidden": 64}, "compiled": False, **changed}


def test_runs_of_other_settings_that_change_memory_teach_apart(tmp_path: Path) -> None:
    wide = observation(2, fingerprint=settings(model={"hidden": 128}), peak_allocated_bytes=9_000)
    runs = [out_of_memory(1, fingerprint=settings()), wide, observation(3, fingerprint=settings())]
    (record,) = summarize(runs)
    assert ([run.run_id for run in record.runs], record.fingerprint) == (["run-1", "run-3"], settings())
    assert [[run.run_id for run in other.runs] for other in record.other_settings] == [["run-2"]]
    remember(tmp_path, *runs)
    store = get_safety_factor_db(tmp_path)
    assert store.get_stats(KEY)["num_runs"] == 2
    factors = [store.learned_rule(KEY, "v100-16gb", run.fingerprint).decided for run in runs[:2]]
    assert [choice and choice.value for choice in factors] == [record.factor, record.other_settings[0].factor]
    assert store.learned_rule(KEY, "v100-16gb", settings(compiled=True)).decided is None


def test_a_fingerprint_is_compared_as_it_is_read_back_and_without_the_version_of_torch(tmp_path: Path) -> None:
    remember(tmp_path, observation(1, fingerprint=settings(sizes=(1, 2), torch_version="2.6")))
    store = get_safety_factor_db(tmp_path)
    assert store.learned_rule(KEY, "v100-16gb", settings(sizes=(1, 2), torch_version="2.7")).decided is not None
    with pytest.raises(StateError, match="A fingerprint cannot be written as JSON"):
        store.learned_rule(KEY, "v100-16gb", settings(sizes=object()))


def predicted(number: int, peak: int, **changed: Any) -> Observation:
    return observation(number, peak_allocated_bytes=peak, predicted_peak_bytes=5_000, **changed)


def test_a_new_device_hears_what_the_one_seen_last_has_measured(tmp_path: Path) -> None:
    unclean = [
        predicted(20, 9_000, outcome="rescued", ooms_rescued=1), predicted(21, 9_000, foreign_bytes=1),
        predicted(22, 9_000, outcome="error"), predicted(23, 9_000, fingerprint=settings()), observation(24),
    ]  # fmt: skip
    remember(tmp_path, predicted(1, 9_000, device=A100), *(predicted(n, 4_000 + n) for n in range(2, 5)), *unclean)
    store = get_safety_factor_db(tmp_path)
    rule = store.learned_rule(KEY, "h100-80gb")
    assert (rule.decided, rule.other_device) == (None, OtherDevice(ratio=4_003 / 5_000, runs=3, device="v100-16gb"))
    assert store.learned_rule(KEY, "a100-40gb").other_device is None
    assert store.learned_rule("another", "h100-80gb").other_device is None
    store.reset(KEY, "v100-16gb")
    assert store.learned_rule(KEY, "h100-80gb").other_device == OtherDevice(
        ratio=9_000 / 5_000, runs=1, device="a100-40gb"
    )


def test_runs_that_taught_nothing_leave_the_choice_to_the_prior(tmp_path: Path) -> None:
    remember(tmp_path, observation(outcome="error"))
    store = get_safety_factor_db(tmp_path)
    assert (store.learned_rule(KEY, "v100-16gb").decided, store.get_factor(KEY)) == (None, 0.489)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), "0.5", None])
@pytest.mark.parametrize("name", ["target", "minimum", "maximum", "half_life", "noise"])
def test_a_policy_that_a_hand_has_written_breaks_no_arithmetic(name: str, value: Any) -> None:
    run = observation(policy={"name": "affine", "options": {name: value}})
    assert 0 < (summarize([run])[0].factor or 0) <= 1


def test_bounds_of_a_policy_that_contradict_each_other_are_left_out() -> None:
    options = {"minimum": 0.9, "maximum": 0.1}
    (contradicted,) = summarize([observation(policy={"name": "affine", "options": options})])
    (unbounded,) = summarize([observation(policy={"name": "affine"})])
    assert contradicted.factor == unbounded.factor


def test_a_peak_that_no_device_can_have_teaches_nothing() -> None:
    damaged = observation(1, capacity_bytes=1, peak_allocated_bytes=2**40)
    assert history_of([damaged, observation(2)]) == [FactorPoint(0.489, 0.62)]
    rescued = out_of_memory(capacity_bytes=1, used_after_rescue=0.35, peak_bytes_after_rescue=2**40)
    assert history_of([rescued]) == [FactorPoint(0.489, None)]


@given(order=st.permutations(range(10)))
def test_nine_successes_that_began_before_an_out_of_memory_ended_do_not_undo_it(order: list[int]) -> None:
    last = out_of_memory(0, start_time=at(5), end_time=at(8))
    successes = [observation(n, start_time=at(n / 2), end_time=at(60 + order[n])) for n in range(1, 10)]
    runs = sorted([last, *successes], key=lambda run: run.started)
    assert summarize(runs, policy=MomentumPolicy())[0].factor == pytest.approx(0.489 - 0.15)


def test_out_of_memories_of_one_moment_are_one_lesson() -> None:
    runs = [out_of_memory(n, start_time=at(n), end_time=at(100 + n)) for n in range(8)]
    assert history_of(runs) == [FactorPoint(0.489, None)]


def test_a_run_that_began_after_the_lesson_teaches_again() -> None:
    runs = [out_of_memory(1), observation(2, used=0.339), out_of_memory(3, used=0.36)]
    assert history_of(runs) == [FactorPoint(0.489, None), FactorPoint(0.339, 0.62), FactorPoint(0.36, None)]


def test_a_run_that_ended_before_the_out_of_memory_began_counts() -> None:
    assert history_of([observation(1), out_of_memory(2)]) == [FactorPoint(0.489, 0.62), FactorPoint(0.489, None)]


@pytest.mark.parametrize(
    "silent",
    [
        observation(outcome="error"), observation(peak_allocated_bytes=None), observation(used=None, tuned_limit=None),
        out_of_memory(foreign_bytes=2**30), out_of_memory(used=None, tuned_limit=None),
    ],
    ids=["error", "nothing measured", "no search", "other processes", "out of memory without a search"],
)  # fmt: skip
def test_some_runs_teach_nothing(silent: Observation) -> None:
    assert history_of([silent]) == []


@pytest.mark.parametrize(
    ("settings", "reserved"),
    [
        ("expandable_segments:True", 0.7),
        ("expandable_segments:False", None),
        ("max_split_size_mb:64", None),
        (None, None),
    ],
)
def test_reserved_memory_teaches_where_segments_expand(settings: str | None, reserved: float | None) -> None:
    fingerprint = {} if settings is None else {"allocator": settings}
    measured = {"capacity_bytes": 10_000 * MIB, "peak_allocated_bytes": 6_200 * MIB}
    run = observation(1, **measured, peak_reserved_bytes=7_020 * MIB, fingerprint=fingerprint)
    assert history_of([run]) == [FactorPoint(0.489, 0.62, reserved=reserved)]
    # Less than a page beyond what is in use shows nothing.
    for shows_nothing in (None, 6_220 * MIB):
        assert history_of([replace(run, peak_reserved_bytes=shows_nothing)]) == [FactorPoint(0.489, 0.62)]


def test_a_fragmented_configuration_tells_why_its_aim_is_lower() -> None:
    runs = [
        observation(
            n, used=used, capacity_bytes=10**11, peak_allocated_bytes=round(1e11 * (0.1 + used)),
            policy={"name": "affine"}, peak_reserved_bytes=round(1e11 * (0.1 + used) / 0.8),
            fingerprint={"allocator": "expandable_segments:True"},
        )
        for n, used in enumerate((0.5, 0.65, 0.7), start=1)
    ]  # fmt: skip
    (summary,) = summarize(runs)
    assert summary.aim_reason == "part of the memory that PyTorch reserves is not in use"
    (blind,) = summarize([replace(run, peak_reserved_bytes=None) for run in runs])
    assert blind.aim_reason == ""


def test_an_out_of_memory_tells_what_ran_out_and_what_ran_after_it() -> None:
    rescued = observation(
        outcome="rescued", ooms_rescued=1, oom_used=0.7, used_after_rescue=0.35, peak_bytes_after_rescue=5_000
    )
    assert history_of([rescued]) == [FactorPoint(0.7, None, after_rescue=(0.35, 0.5))]
    assert history_of([replace(rescued, peak_bytes_after_rescue=None)]) == [FactorPoint(0.7, None)]
    assert history_of([out_of_memory(used=None)]) == [FactorPoint(0.489, None)]


def test_an_out_of_memory_outside_of_the_micro_batches_teaches_nothing_of_their_cost() -> None:
    elsewhere = out_of_memory(3, oom_elsewhere=True)
    assert history_of([observation(1), elsewhere]) == [FactorPoint(0.489, 0.62)]
    assert history_of([replace(elsewhere, ooms_rescued=1)]) == [FactorPoint(0.489, None)]


def test_an_out_of_memory_teaches_though_the_clock_was_set_back_before_its_end() -> None:
    backwards = out_of_memory(3, end_time=at(1))
    assert history_of([observation(1), backwards, observation(4)]) == [
        FactorPoint(0.489, 0.62), FactorPoint(0.489, None), FactorPoint(0.489, 0.62),
    ]  # fmt: skip
    assert history_of([observation(2, end_time=at(1))]) == [FactorPoint(0.489, 0.62)]
    under_way = observation(2, start_time=at(25), end_time=at(40))
    assert history_of([under_way, backwards]) == [FactorPoint(0.489, None)]


def test_rescued_and_interrupted_runs_teach() -> None:
    assert history_of([observation(outcome="rescued", ooms_rescued=2)]) == [FactorPoint(0.489, None)]
    assert history_of([observation(outcome="interrupted")]) == [FactorPoint(0.489, 0.62)]


times = st.floats(0, 100)


@given(spans=st.lists(st.tuples(times, times, st.booleans()), max_size=12))
def test_no_point_of_the_history_overlaps_an_out_of_memory(spans: list[tuple[float, float, bool]]) -> None:
    runs = [
        (out_of_memory if fails else observation)(
            n, start_time=at(begin), end_time=at(begin + 1 + length), used=n / 100
        )
        for n, (begin, length, fails) in enumerate(spans, start=1)
    ]
    runs.sort(key=lambda run: run.started)
    counted = {point.used: point for point in history_of(runs)}
    lessons = [run for run in runs if run.used in counted and run.ran_out_of_memory]
    for run in runs:
        overlapping = [lesson for lesson in lessons if run.started < lesson.ended and lesson.started < run.ended]
        assert (run.used in counted) == (overlapping in ([], [run]))


LIMIT = RememberedLimit(tuned_limit=1_000.0, capped=False, base_bytes=500.0, measured_ratio=1.02)
LIMITS = {"": RememberedLimits(training=LIMIT, evaluation=replace(LIMIT, capped=True))}


def earlier(state: Path) -> EarlierSearch | None:
    return get_safety_factor_db(state).learned_rule(KEY, "v100-16gb").earlier


def test_the_limits_of_the_last_run_are_known(tmp_path: Path) -> None:
    remember(tmp_path, observation(2, limits=LIMITS, torch_version="2.13.0"), observation(1, limits={}))
    assert earlier(tmp_path) == EarlierSearch(run_id="run-2", capacity_bytes=10_000, torch_version="2.13.0",
                                              phases=LIMITS)  # fmt: skip
    assert get_safety_factor_db(tmp_path).learned_rule(KEY, "a100-40gb").earlier is None


def test_the_limits_of_a_run_that_taught_nothing_are_known(tmp_path: Path) -> None:
    remember(tmp_path, observation(limits=LIMITS, used=None))
    rule = get_safety_factor_db(tmp_path).learned_rule(KEY, "v100-16gb")
    assert (rule.decided, rule.earlier is not None) == (None, True)


@pytest.mark.parametrize(
    "last", [observation(2), out_of_memory(2, limits=LIMITS), observation(2, limits=LIMITS, ooms_rescued=1)]
)
def test_limits_are_not_known_once_a_run_had_none_or_ran_out_of_memory(tmp_path: Path, last: Observation) -> None:
    remember(tmp_path, observation(1, limits=LIMITS), last)
    assert earlier(tmp_path) is None


def test_limits_are_not_known_after_a_reset(tmp_path: Path) -> None:
    remember(tmp_path, observation(limits=LIMITS))
    get_safety_factor_db(tmp_path).reset(KEY)
    assert earlier(tmp_path) is None


def test_the_export_has_the_known_shape(tmp_path: Path) -> None:
    remember(tmp_path, observation(1), out_of_memory(2, device=A100))
    db = get_safety_factor_db(tmp_path)
    db.refresh_export()
    export = json.loads(db.db_path.read_text())
    assert db.db_path == tmp_path / "batch_size_factors.json"
    assert list(export) == [KEY]
    entry = export[KEY]
    assert list(entry) == [
        "config_key", "safety_factor", "initial_factor_reason", "last_updated", "runs", "devices",
    ]  # fmt: skip
    assert entry["safety_factor"] == pytest.approx(0.339)
    assert entry["devices"]["v100-16gb"]["safety_factor"] == pytest.approx(0.5142, abs=5e-5)
    assert entry["devices"]["v100-16gb"]["runs"] == [
        {
            "run_id": "run-1",
            "timestamp": at(15),
            "peak_memory_pct": 0.62,
            "batch_size": 489,
            "success": True,
            "notes": "",
        }
    ]
    assert entry["runs"][0]["success"] is False
    assert entry["runs"][0]["notes"] == "out of memory"


def test_an_export_that_cannot_be_written_is_a_state_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="export of learned factors cannot be written"):
        get_safety_factor_db(tmp_path / "none").refresh_export()


def test_reading_writes_nothing(tmp_path: Path) -> None:
    db = get_safety_factor_db(tmp_path / "none")
    db.learned_rule(KEY, "v100-16gb")
    db.records()
    assert not (tmp_path / "none").exists()


def test_the_order_in_which_files_were_written_does_not_matter(tmp_path: Path) -> None:
    runs = [*converging(), out_of_memory(7)]
    remember(tmp_path / "a", *runs)
    remember(tmp_path / "b", *random.Random(0).sample(runs, len(runs)))
    factors = [get_safety_factor_db(tmp_path / name).get_factor(KEY) for name in ("a", "b")]
    assert factors[0] == factors[1]


def test_ranks_of_one_attempt_teach_once_by_the_highest_peak() -> None:
    ranks = [observation(1, rank=rank, peak_allocated_bytes=6_000 + 100 * (rank % 3)) for rank in range(4)]
    (record,) = summarize([*ranks, observation(2)])
    assert [point.peak for point in history_of([*ranks, observation(2)])] == [0.62, 0.62]
    assert record.reason == "learned from 2 runs"
    oom = out_of_memory(1, rank=3)
    assert [point.peak for point in history_of([*ranks[:3], oom])] == [None]


def test_the_examples_in_the_docstring_hold() -> None:
    result = doctest.testmod(store_module)
    assert (result.attempted, result.failed) == (2, 0)


def test_adjustments_multiply() -> None:
    assert experience_factor(0.5, "base", [(0.5, "half"), (0.8, "more")])[0] == 0.2


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EPERM, "have the owner of the file delete it"), (errno.EACCES, "make this one writ")]
)
def test_a_run_teaches_also_where_the_export_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(path: Path, value: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(store_module, "write_json_atomic", refuse)
    notices: list[str] = []
    store = get_safety_factor_db(tmp_path)
    assert write_observation(store, lambda end_time: observation(1), notices.append)
    assert len(read_records(tmp_path).finished) == 1
    (notice,) = notices
    assert notice.startswith("What this run taught is recorded, but batch_size_factors.json is out of date. ")
    assert remedy in notice
