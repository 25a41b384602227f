import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import ArgumentError, ConfigError, DataError
from can_train.factors.exchange import parse_import
from can_train.factors.observations import Imported, write_record
from can_train.factors.store import FactorStore, get_safety_factor_db
from fakes.samples import A100, KEY, observation, out_of_memory

OLD = {"config_key": KEY, "safety_factor": 0.5142, "initial_factor_reason": "small dataset", "runs": [{"run_id": "a"}]}
TAKEN = Imported(safety_factor=0.5142, initial_factor_reason="small dataset", runs=[{"run_id": "a"}])

names = st.text(st.characters(codec="utf-8", exclude_characters="_"), min_size=1, max_size=8)
keys = st.tuples(names, names, names).map("_".join)
kinds = st.just("") | st.sampled_from(["v100-16gb", "t4-16gb", "rtx-3080-laptop-gpu-16gb", "cpu-64gb", "sim-512mib"])
factors = st.floats(0, 1, exclude_min=True) | st.just(1)
records = st.fixed_dictionaries({"safety_factor": factors})
devices = st.dictionaries(kinds, factors, min_size=1)
shapes = factors | devices | records | st.builds(
    lambda top, all_devices: {**top, "devices": all_devices}, records, st.dictionaries(kinds, records)
)  # fmt: skip


def test_the_four_shapes_are_read_in_any_mix() -> None:
    mix = {"a": {**OLD, "devices": {"v100-16gb": OLD}}, "b": OLD, "c": {"v100-16gb": 0.5, "a100-40gb": 1}, "d": 0.25}
    assert parse_import(mix) == {
        "a": {"v100-16gb": TAKEN},
        "b": {"": TAKEN},
        "c": {"v100-16gb": Imported(safety_factor=0.5), "a100-40gb": Imported(safety_factor=1)},
        "d": {"": Imported(safety_factor=0.25)},
    }


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "truncated"), ("{", "truncated"), ("\udcff", "malformed"), ("[0.5]", "no object"), ("{}", "no object"),
        ('{"k": 0}', "k, any device|k: safety_factor 0 is not in"), ('{"k": 1.01}', "not in"),
        ('{"k": NaN}', "malformed"),
        ('{"k": "0.5"}', 'k: safety_factor is "0.5", not a number'), ('{"k": true}', "true, not a number"),
        ('{"k": null}', "null, not a number"), ('{"k": {}}', "k: no factor"), ('{"": 0.5}', "key is empty"),
        ('{"a": 0.5, "k": {"v100": "x"}}', 'k, v100: safety_factor is "x"'), ('{"k": {"devices": 3}}', "devices is 3"),
        ('{"k": {"v100": {"x": 1}}}', "no safety_factor"),
        ('{"k": {"safety_factor": 0.5, "runs": 3}}', "Expected `array`, got `int`"),
        ('{"k": {"safety_factor": 0.5, "initial_factor_reason": 3}}', "Expected `str`, got `int`"),
        ("[" * 100_000, "nested|recursion"),
        ('{"k": {"safety_factor": 0.5, "runs": [{"x": NaN}]}}', "malformed"), ('{"\\ud800": 0.5}', "surrogate"),
        ('{"a_b_c": 0.5, "a_b_c": 0.9}', "a_b_c is there twice, as 0.5 and as 0.9"),
        ('{"a_b_c": {"v100": 0.5, "t4": 0.5, "v100": 0.5}}', "v100 is there twice"),
        ('{"a_b_c": {"safety_factor": 0.5, "runs": [{"run_id": "a", "run_id": "b"}]}}', "run_id is there twice"),
        ('{"a_b_c": {"safety_factor": 0.5, "safety\\u005ffactor": 0.9}}', "safety_factor is there twice"),
        ('{"k": ' + "9" * 5000 + "}", "out of range"), ('{"k": 1e999}', "out of range"),
    ],
)  # fmt: skip
def test_a_file_is_taken_whole_or_not_at_all(content: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=found):
        get_safety_factor_db(tmp_path / "state").import_file(file)
    assert not (tmp_path / "state").exists()


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        get_safety_factor_db(tmp_path / "state").import_file(tmp_path / "none.json")


def known(state: Path) -> dict[tuple[str, str], float | None]:
    return {(record.key, record.device): record.factor for record in get_safety_factor_db(state).records()}


def moved(state: Path) -> Path:
    """Another state folder, with what the export of this one says."""
    store, other = get_safety_factor_db(state), get_safety_factor_db(state / "other")
    store.refresh_export()
    other.import_file(store.db_path)
    other.refresh_export()
    return other.state


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(DataError, match="not a regular file"):
        get_safety_factor_db(tmp_path / "state").import_file(tmp_path / "pipe.json")


@settings(max_examples=50)
@given(content=st.dictionaries(keys, shapes, min_size=1, max_size=4))
def test_what_is_exported_is_imported_as_the_same_factors(
    content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    state = tmp_path_factory.mktemp("state")
    (state / "old.json").write_text(json.dumps(content))
    write_record(state, observation(1))
    get_safety_factor_db(state).import_file(state / "old.json")
    write_record(state, out_of_memory(2, device=A100))
    write_record(state, observation(3, start_time="2500-01-01T00:00:00+00:00", end_time="2500-01-02T00:00:00Z"))
    assert len(known(state)) >= len(content)
    assert known(moved(state)) == known(state)


def test_the_runs_that_a_file_brings_are_exported_again_once(tmp_path: Path) -> None:
    write_record(tmp_path, observation(1))
    write_record(tmp_path, observation(2))
    other = moved(tmp_path)
    write_record(other, observation(2))
    get_safety_factor_db(other).refresh_export()
    runs = json.loads((other / "batch_size_factors.json").read_text())[KEY]["runs"]
    assert [run["run_id"] for run in runs] == ["run-1", "run-2"]


SHORT = "hcrl_ch_gat_normal"
STUDENT = "hcrl_ch_gat_student_normal"


def importing(state: Path, content: Any) -> FactorStore:
    """The store after an import of some content."""
    state.mkdir(exist_ok=True)
    (state / "file.json").write_text(json.dumps(content))
    store = get_safety_factor_db(state)
    store.import_file(state / "file.json")
    return store


def test_a_key_without_its_size_and_a_short_gpu_name_serve_every_size_and_memory_size(tmp_path: Path) -> None:
    store = importing(tmp_path, {SHORT: {"v100": 0.5}})
    for key in (KEY, STUDENT, SHORT):
        assert [store.get_factor(key, device) for device in ("v100-16gb", "v100-32gb")] == [0.5, 0.5]
    choice = store.learned_rule(KEY, "v100-32gb", size="teacher").decided
    assert choice is not None
    assert choice.value == 0.5
    assert store.learned_rule(KEY, "a100-40gb", size="teacher").decided is None


def test_an_imported_key_without_its_size_is_the_first_factor_of_runs_of_any_size(tmp_path: Path) -> None:
    store = importing(tmp_path, {SHORT: {"v100": 0.7}})
    late = {"start_time": "2500-01-01T00:00:00+00:00", "end_time": "2500-01-01T01:00:00+00:00"}
    write_record(tmp_path, observation(1, size="teacher", used=0.7, factor=0.7, **late))
    assert store.get_factor(KEY, "v100-16gb") == pytest.approx(0.7 + 0.3 * 0.3 * 0.28)
    assert store.get_factor(SHORT, "v100-16gb") == store.get_factor(KEY, "v100-16gb")
    assert store.get_factor(STUDENT, "v100-16gb") == 0.7


def test_a_size_and_a_memory_size_of_its_own_come_before_the_general_ones(tmp_path: Path) -> None:
    store = importing(tmp_path, {SHORT: {"v100": 0.5, "v100-32gb": 0.6}, KEY: {"v100-16gb": 0.7}})
    assert [store.get_factor(KEY, device) for device in ("v100-16gb", "v100-32gb")] == [0.7, 0.6]
    assert [store.get_factor(STUDENT, device) for device in ("v100-16gb", "v100-32gb")] == [0.5, 0.6]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"a__b": 1}, r"a__b is not a configuration key \({dataset}_{model}_{size}_{mode}, or of a task\)"),
        ({SHORT: {"v1000": 0.5}}, f"{SHORT}, v1000: unknown device.*v100-16gb"),
        ({SHORT: {"v100": 0.5, "tesla v100": 0.6}}, "v100 and tesla v100 are both v100-16gb"),
    ],
)
def test_what_could_never_be_used_is_refused(content: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=found):
        importing(tmp_path, content)
    assert not (tmp_path / "events").exists()


def test_importing_ones_own_export_changes_nothing(tmp_path: Path) -> None:
    write_record(tmp_path, observation(1))
    write_record(tmp_path, out_of_memory(2, device=A100))
    importing(tmp_path, {SHORT: {"v100": 0.5}})
    store = get_safety_factor_db(tmp_path)
    store.pin("a", 0.4, "rtx-9090-24gb")
    store.refresh_export()
    before, events = store.records(), len(list((tmp_path / "events").iterdir()))
    assert store.import_file(store.db_path) == (None, [])
    assert store.records() == before
    assert len(list((tmp_path / "events").iterdir())) == events


def test_the_export_of_a_task_of_ones_own_is_imported_elsewhere(tmp_path: Path) -> None:
    own = get_safety_factor_db(tmp_path / "own")
    own.pin("digits", 0.4)
    own.refresh_export()
    other = get_safety_factor_db(tmp_path / "other")
    other.import_file(own.db_path)
    assert other.get_factor("digits") == 0.4


def test_a_pin_of_a_key_without_its_size_holds_for_an_imported_size_and_is_told(tmp_path: Path) -> None:
    store = importing(tmp_path, {KEY: {"v100-16gb": 0.55}})
    assert store.get_factor(SHORT, "v100-16gb") == 0.55
    store.pin(SHORT, 0.3)
    assert (
        store.get_factor(KEY, "v100-16gb") == store.learned_rule(KEY, "v100-16gb", size="teacher").decided.value == 0.3
    )


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_a_pin_takes_numbers_of_any_library(value: Any, tmp_path: Path) -> None:
    store = get_safety_factor_db(tmp_path)
    store.pin("digits", value)
    assert store.get_factor("digits") == 0.5


def test_a_pin_beyond_any_float_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"not in \(0, 1\]"):
        get_safety_factor_db(tmp_path).pin("digits", 10**400)


def test_a_pin_names_its_key_and_a_device_that_nothing_is_known_of_is_said_to_be_unknown(tmp_path: Path) -> None:
    store = get_safety_factor_db(tmp_path)
    with pytest.raises(ArgumentError, match="A pin is of one configuration"):
        store.pin("", 0.4)
    store.pin("digits", 0.4)
    with pytest.raises(ConfigError, match=r"Unknown device: 'nope'\.\nValid: none so far"):
        store.get_factor("digits", "nope")


def test_a_reset_or_pin_of_a_key_without_its_size_holds_for_every_size(tmp_path: Path) -> None:
    store = importing(tmp_path, {SHORT: {"v100": 0.5}})
    store.pin(SHORT, 0.3)
    pinned = store.learned_rule(KEY, "v100-16gb", size="teacher").decided
    assert pinned is not None
    assert pinned.value == 0.3
    store.unpin(SHORT)
    store.reset(SHORT)
    assert store.learned_rule(KEY, "v100-16gb", size="teacher").decided is None
