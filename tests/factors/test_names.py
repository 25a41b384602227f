"""Every name that a listing prints is taken by every command, and means the same to all of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import ConfigError
from can_train.factors.observations import write_record
from can_train.factors.store import get_safety_factor_db
from fakes.samples import observation

SHORT = "hcrl_ch_gat_normal"
RUNS = [{"run_id": f"r{number}", "timestamp": f"2025-01-0{number}T00:00:00+00:00", "peak_memory_pct": peak}
        for number, peak in enumerate([0.7, 0.8, 0.88, 0.9, 0.91], start=1)]  # fmt: skip


@settings(max_examples=8)
@given(
    sizes=st.sets(st.sampled_from(["teacher", "student"])),
    imported=st.dictionaries(st.sampled_from(["v100", "a100-40gb", "cpu-64gb"]), st.floats(0.1, 0.9), max_size=2),
    pinned=st.sampled_from([None, SHORT, "set_01_vgae_autoencoder"]),
)
def test_every_listed_key_and_device_is_taken_by_every_command(
    sizes: set[str], imported: dict[str, float], pinned: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state = tmp_path_factory.mktemp("state")
    store = get_safety_factor_db(state)
    for number, size in enumerate(sorted(sizes), start=1):
        write_record(state, observation(number, key=f"hcrl_ch_gat_{size}_normal", size=size))
    if imported:
        (state / "in.json").write_text(json.dumps({SHORT: imported}))
        store.import_file(state / "in.json")
    if pinned is not None:
        store.pin(pinned, 0.5)
    for one in store.records():
        shown = store.find(one.key, one.device or None)
        assert one.key in {found.key for found in shown}
        assert store.get_stats(one.key, one.device or None)["num_runs"] in {found.num_runs for found in shown}
        if one.factor is not None:
            assert 0 < store.get_factor(one.key, one.device or None) <= 1
    for one in store.records():
        store.pin(one.key, 0.4, one.device or None)
        assert one.key in {found.key for found in store.find(one.key) if found.state == "pinned"}
        store.unpin(one.key, one.device or None)
    while listed := [one for one in store.records() if one.state not in ("pinned", "reset")]:
        store.find(listed[0].key, listed[0].device or None)
        store.reset(listed[0].key, listed[0].device or None)


def imported_store(state: Path, content: dict[str, Any]) -> Any:
    (state / "in.json").write_text(json.dumps(content))
    store = get_safety_factor_db(state / "state")
    store.import_file(state / "in.json")
    return store


def test_a_short_name_of_a_gpu_means_all_its_sizes_to_every_call(tmp_path: Path) -> None:
    store = imported_store(tmp_path, {SHORT: {"v100": 0.7}})
    assert store.get_factor(SHORT, device="v100") == store.get_factor(SHORT, "v100-32gb") == 0.7
    assert store.get_stats(SHORT, device="V100")["num_runs"] == 0
    store.pin(SHORT, 0.3, "v100")
    assert {one.device for one in store.find(SHORT, "v100") if one.state == "pinned"} == {"v100-16gb", "v100-32gb"}
    store.unpin(SHORT, "v100")
    assert store.get_factor(SHORT, device="v100") == 0.7
    for call in (store.get_factor, store.get_stats, store.find):
        with pytest.raises(ConfigError, match="Unknown device: 'v101'"):
            call(SHORT, "v101")
    with pytest.raises(ConfigError, match="Unknown device: 'nowhere'"):
        store.pin(SHORT, 0.3, "nowhere")


def test_figures_of_imported_runs_are_those_of_the_file(tmp_path: Path) -> None:
    store = imported_store(tmp_path, {SHORT: {"safety_factor": 0.6, "runs": RUNS}})
    assert store.get_stats(SHORT) == {
        "num_runs": 5, "avg_memory_pct": pytest.approx(0.838), "max_memory_pct": 0.91, "factor_variance": 0.0,
        "converged": True,
    }  # fmt: skip
    store = imported_store(tmp_path, {SHORT: {"safety_factor": 0.5, "runs": [*RUNS, {**RUNS[0], "run_id": "r6"}]}})
    assert store.get_stats(SHORT)["converged"] is False


def test_figures_survive_going_out_and_in_again(tmp_path: Path) -> None:
    here, there = get_safety_factor_db(tmp_path / "here"), get_safety_factor_db(tmp_path / "there")
    for number, factor in enumerate((0.4, 0.6, 0.8), start=1):
        write_record(here.state, observation(number, factor=factor))
    here.refresh_export()
    there.import_file(here.db_path)
    (key,) = {one.key for one in here.records()}
    assert there.get_stats(key) == here.get_stats(key)
    assert there.get_stats(key)["factor_variance"] > 0.02
