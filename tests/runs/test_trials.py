"""A search: the values that it chooses, the trials that end early, and its files."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.config.axis import SearchAxis
from can_train.errors import StateError
from can_train.runs.run_folder import RunFolder
from can_train.runs.trials import Curve, SearchFolder, SettingsSearch, Trial, TrialRun, Value, losing, suggest

RATE = SearchAxis(key="training.lr", low=1e-4, high=1e-1, is_logarithmic=True)
WIDTH = SearchAxis(key="task.hidden", low=8.0, high=64.0, step=8, is_integer=True)
KIND = SearchAxis(key="task.kind", choices=("relu", "gelu"))


def a_search(
    *axes: SearchAxis, epochs: int = 9, is_higher_better: bool = False, sampler: str = "tpe"
) -> SettingsSearch:
    axes = axes or (RATE, WIDTH, KIND)
    return SettingsSearch(name="a", axes=axes, objective="loss", is_higher_better=is_higher_better, epochs=epochs,
                          seed=1, sampler=sampler)  # fmt: skip


def a_trial(
    folder: Path, number: int, values: Mapping[str, Value], curve: Curve, *, stopped_after: int = 0
) -> TrialRun:
    """A trial with a run that has finished."""
    path = folder / f"run-{number}"
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps({"epoch": epoch, "objective": value}) + "\n"
                                                for epoch, value in curve.items()))  # fmt: skip
    (path / "result.json").write_text("{}")
    trial = TrialRun(RunFolder(path), Trial(search=str(folder / "a"), number=number, values=dict(values),
                                            stopped_after=stopped_after))  # fmt: skip
    trial.write()
    return trial


def rate_of(values: Mapping[str, Value]) -> float:
    return float(values["training.lr"])


# Values


ends = st.floats(1e-6, 1e6)


@settings(max_examples=30, deadline=None)
@given(ends, ends, st.booleans(), st.sampled_from(["tpe", "random"]))
def test_values_lie_within_their_axes(low: float, high: float, is_logarithmic: bool, sampler: str) -> None:
    low, high = min(low, high), max(low, high) * 1.0001
    axis = SearchAxis(key="task.x", low=low, high=high, is_logarithmic=is_logarithmic)
    for number in (1, 2, 3):
        value = suggest(a_search(axis, WIDTH, KIND, sampler=sampler), [], number)
        assert low <= float(value["task.x"]) <= high
        assert value["task.hidden"] in range(8, 65, 8)
        assert value["task.kind"] in KIND.choices


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_jobs_that_start_at_the_same_time_choose_other_values_and_each_choice_is_repeated(sampler: str) -> None:
    search = a_search(sampler=sampler)
    chosen = [suggest(search, [], number) for number in range(1, 9)]
    assert len({rate_of(values) for values in chosen}) == 8
    assert [suggest(search, [], number) for number in range(1, 9)] == chosen


def test_another_seed_chooses_other_values() -> None:
    other = SettingsSearch(**{**vars(a_search()), "seed": 2})
    assert suggest(other, [], 1) != suggest(a_search(), [], 1)


def test_a_narrow_interval_has_more_than_one_value() -> None:
    axis = SearchAxis(key="training.x", low=0.9999, high=0.99999)
    assert len({suggest(a_search(axis), [], number)["training.x"] for number in range(1, 6)}) == 5


def distances(folder: Path, *, sampler: str, is_higher_better: bool) -> list[float]:
    """The distances of 30 trials from the best rate, in decades; the loss is that distance."""
    search, trials = a_search(RATE, sampler=sampler, is_higher_better=is_higher_better), list[TrialRun]()
    for number in range(1, 31):
        values = suggest(search, trials, number)
        distance = abs(math.log10(rate_of(values)) + 3.5)
        trials.append(a_trial(folder, number, values, {1: -distance if is_higher_better else distance}))
    return [abs(math.log10(rate_of(trial.trial.values or {})) + 3.5) for trial in trials]


@pytest.mark.parametrize("is_higher_better", [False, True])
def test_later_trials_are_better_than_the_first_ones(tmp_path: Path, is_higher_better: bool) -> None:
    searched = distances(tmp_path, sampler="tpe", is_higher_better=is_higher_better)
    assert sum(searched[20:]) < 0.7 * sum(searched[:10])


def test_trials_at_random_do_not_learn(tmp_path: Path) -> None:
    drawn = distances(tmp_path, sampler="random", is_higher_better=False)
    assert sum(drawn[20:]) > 0.7 * sum(drawn[:10])


def spread(folder: Path, first: int, *, low: float, high: float, stopped_after: int = 0) -> list[TrialRun]:
    """Twelve trials with rates between two; the nearer to 10^-2 the better."""
    rates = [10 ** (math.log10(low) + math.log10(high / low) * index / 11) for index in range(12)]
    return [a_trial(folder, first + index, {"training.lr": rate}, {1: abs(math.log10(rate) + 2)},
                    stopped_after=stopped_after) for index, rate in enumerate(rates)]  # fmt: skip


def near_the_best(trials: list[TrialRun]) -> int:
    """Returns how many of 30 suggestions lie within a third of a decade of 10^-2."""
    chosen = [rate_of(suggest(a_search(RATE), trials, number)) for number in range(100, 130)]
    return sum(abs(math.log10(rate) + 2) < 1 / 3 for rate in chosen)


def test_a_trial_that_failed_counts_as_a_bad_one(tmp_path: Path) -> None:
    trials = spread(tmp_path, 1, low=1e-4, high=1e-1)
    failed = spread(tmp_path, 20, low=9e-3, high=1.1e-2)
    for trial in failed:
        trial.folder.result_path.unlink()
        trial.folder.metrics_path.unlink()
    assert near_the_best([*trials, *failed]) < near_the_best(trials) / 2


def test_trials_that_ended_early_teach_by_their_last_values(tmp_path: Path) -> None:
    assert near_the_best(spread(tmp_path, 1, low=1e-4, high=1e-1, stopped_after=1)) > 15


# Trials that end early


def test_trials_end_after_a_ninth_and_a_third_of_their_epochs() -> None:
    assert [a_search(epochs=epochs).rungs for epochs in (1, 2, 3, 9, 30, 100)] == [
        [], [1], [1], [1, 3], [4, 10], [12, 34],
    ]  # fmt: skip
    assert SettingsSearch(**{**vars(a_search()), "stops_losers": False}).rungs == []


@pytest.mark.parametrize("is_higher_better", [False, True])
def test_a_third_of_the_trials_goes_on(is_higher_better: bool) -> None:
    search = a_search(is_higher_better=is_higher_better)
    sign = -1 if is_higher_better else 1
    curves = {number: {1: sign * float(number)} for number in range(1, 10)}
    assert [number for number in curves if not losing(search, curves, number, 1)] == [1, 2, 3]


def test_two_trials_end_nobody() -> None:
    assert not losing(a_search(), {1: {1: 0.1}, 2: {1: 9.0}}, 2, 1)


def test_the_reason_has_the_figures() -> None:
    curves = {1: {1: 0.1}, 2: {1: 0.2}, 3: {1: 0.31234}}
    assert losing(a_search(), curves, 3, 1) == (
        "Trial 3 ends after 1 of 9 epochs: its validation loss 0.3123 has place 3 of 3, and one trial in 3 goes on"
    )


def test_the_best_value_until_the_rung_counts() -> None:
    # The second trial is worse at the rung than before it, and the first one is better after it.
    curves = {1: {1: 5.0, 3: 4.0, 4: 0.1}, 2: {1: 1.0, 3: 9.0}, 3: {1: 3.0, 3: 3.0}}
    assert not losing(a_search(), curves, 2, 3)
    assert losing(a_search(), curves, 1, 3)


def test_a_trial_before_the_rung_is_not_compared() -> None:
    curves = {1: {1: 0.1}, 2: {1: 0.2}, 3: {1: 5.0, 3: 5.0}, 4: {1: 6.0, 3: 4.0}}
    assert not losing(a_search(), curves, 3, 3)


def test_a_trial_is_judged_once_at_a_rung_also_where_validations_are_rare(tmp_path: Path) -> None:
    search = SearchFolder.make(tmp_path, a_search(epochs=18))
    assert search.search.rungs == [2, 6]
    for number in (1, 2, 3):
        search.add(number, a_trial(tmp_path, number, {}, {2: 0.1, 4: 0.1, 6: 0.1}).folder.path)
    own = a_trial(tmp_path, 4, {}, {4: 1.0})
    (tmp_path / "run-4" / "trial.json").write_text(
        (tmp_path / "run-4" / "trial.json").read_text().replace(str(tmp_path / "a"), str(search.path))
    )
    own = TrialRun.of(own.folder) or own
    assert "place 4 of 4" in own.stop_if_losing(4)
    assert json.loads((tmp_path / "run-4" / "trial.json").read_text())["stopped_after"] == 4
    own.folder.metrics_path.write_text('{"epoch": 4, "objective": 1.0}\n{"epoch": 5, "objective": 1.0}\n')
    assert own.stop_if_losing(5) == ""


# Files


def test_a_search_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = SearchFolder.make(tmp_path, a_search())
    assert SearchFolder.open(made.path).search == made.search
    assert SearchFolder.make(tmp_path, a_search()).path == made.path


def test_a_number_has_one_run(tmp_path: Path) -> None:
    search = SearchFolder.make(tmp_path, a_search())
    search.add(1, tmp_path / "first")
    with pytest.raises(StateError):
        search.add(1, tmp_path / "second")
    assert {number: run.run_id for number, run in search.runs().items()} == {1: "first"}
    search.discard(1)
    assert search.runs() == {}


def test_an_entry_that_another_process_writes_at_the_same_moment_stays(tmp_path: Path) -> None:
    first = SearchFolder.make(tmp_path, a_search())

    class Second(SearchFolder):
        def runs(self) -> dict[int, RunFolder]:
            runs = super().runs()
            first.add(1, tmp_path / "first")
            return runs

    with pytest.raises(StateError):
        Second(first.path, first.search).add(1, tmp_path / "second")
    assert first.runs()[1].run_id == "first"


def test_a_number_whose_run_never_came_is_free_again_after_an_hour(tmp_path: Path) -> None:
    search = SearchFolder.make(tmp_path, a_search())
    search.add(1, tmp_path / "first")
    (tmp_path / "second").mkdir()
    search.add(2, tmp_path / "second")
    for entry in search.path.glob("trial-*"):
        os.utime(entry, (0, 0))
    assert [*search.runs()] == [2]
    search.add(1, tmp_path / "third")
    assert search.runs()[1].run_id == "third"


def test_a_damaged_trial_is_left_out(tmp_path: Path) -> None:
    search = SearchFolder.make(tmp_path, a_search())
    for number in (1, 2):
        search.add(number, a_trial(tmp_path, number, {}, {1: 1.0}).folder.path)
    (tmp_path / "run-1" / "trial.json").write_text("{")
    assert [trial.trial.number for trial in search.trials()] == [2]


def test_lines_of_a_curve_that_a_kill_left_unfinished_are_left_out(tmp_path: Path) -> None:
    trial = a_trial(tmp_path, 1, {}, {1: 0.5})
    with trial.folder.metrics_path.open("a") as file:
        file.write('{"epoch": 2, "objective": NaN}\n{"epoch": 3}\n{"epoch": 4, "obj')
    assert trial.curve == {1: 0.5}
