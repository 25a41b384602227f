import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ConfigError, StateError
from can_train.io.records import SCHEMA
from can_train.memory.catalogue import (
    ALL_KERNELS,
    ASSUMED,
    CARDS,
    CUBLAS_KERNELS,
    CUDNN_KERNELS,
    GIB,
    MEASURED,
    MIB,
    ROCM,
    SLICES,
    Card,
    GpuConstants,
    cards_that_hold,
    context_bytes,
    find_card,
    gpu_key,
    other_card,
    predicted_room,
    read_gpu_constants,
    shares_workspaces,
    split_count,
    usable,
    write_gpu_constants,
)
from can_train.reporter import SilentReporter

BY_KEY = {card.key: card for card in CARDS}

CONSTANTS = GpuConstants(
    key="h100-80gb",
    total_bytes=85 * 10**9,
    outside_bytes=600 * MIB,
    workspace_bytes=40 * MIB,
    date="2026-01-31",
    driver="580.1",
    torch="2.11.0",
)


@pytest.mark.parametrize(
    ("need_gib", "cards"),
    [
        (1, "rtx-3070-8gb, rtx-3080-10gb, rtx-2080-ti-11gb"),
        (14, "v100-16gb, p100-16gb, quadro-rtx-6000-24gb"),
        (60, "a100-80gb, h100-80gb, h100-94gb"),
        (150, "b200-180gb, gb200-186gb, b300-288gb"),
        (260, "no common GPU"),
    ],
)
def test_the_smallest_cards_that_hold_it_are_named(need_gib: float, cards: str) -> None:
    assert cards_that_hold(need_gib * GIB) == cards


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_a_card_holds_as_much_as_it_can_use_and_no_more(card: Card) -> None:
    capacity_bytes = usable(card).capacity_bytes
    assert 0.73 * card.nominal_gb < capacity_bytes / GIB < 1.02 * card.nominal_gb
    room_bytes = predicted_room(capacity_bytes)
    smallest = cards_that_hold(room_bytes).split(", ")[0]
    if card.common:
        assert usable(BY_KEY[smallest]).capacity_bytes == capacity_bytes
    assert card.key not in cards_that_hold(room_bytes + 1)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_what_is_left_and_what_is_taken_are_the_whole(card: Card) -> None:
    what = usable(card)
    assert what.capacity_bytes + sum(use.num_bytes for use in what.subtracted) == what.total_bytes == card.total_bytes
    assert all(use.num_bytes > 0 and use.what for use in what.subtracted)
    assert what.source == ASSUMED


def test_keys_are_unique_and_say_the_size() -> None:
    assert len(BY_KEY) == len(CARDS)
    assert all(card.key.endswith(f"-{card.nominal_gb}gb") for card in CARDS)


def test_a_later_generation_is_not_assumed_to_take_less() -> None:
    card = BY_KEY["h100-80gb"]
    eras = ("pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "unknown")
    capacities = [usable(replace(card, generation=era)).capacity_bytes for era in eras]
    assert capacities == sorted(capacities, reverse=True)


def test_a_screen_takes_memory_of_a_card_for_desktops() -> None:
    card = BY_KEY["rtx-4090-24gb"]
    assert usable(replace(card, desktop=False)).capacity_bytes > usable(card).capacity_bytes


@pytest.mark.parametrize(
    ("torch_version", "shares"),
    [("2.6.0", False), ("2.10.1+cu126", False), ("2.11.0+cu130", True), ("2.13.0+cpu", True), ("3.0.0", True)],
)
def test_the_libraries_share_a_workspace_in_newer_versions_of_torch(torch_version: str, shares: bool) -> None:
    assert shares_workspaces(torch_version) is shares


def test_a_shared_workspace_counts_once() -> None:
    each_mib = 64 if shares_workspaces(torch.__version__) else 128
    workspaces = {card.generation: usable(card).subtracted[-1].num_bytes // MIB for card in CARDS}
    assert (workspaces["hopper"], workspaces["blackwell"], workspaces["ampere"]) == (each_mib, each_mib, 32)


def test_what_was_measured_replaces_what_is_assumed() -> None:
    what = usable(BY_KEY["h100-80gb"], CONSTANTS)
    assert what.total_bytes == CONSTANTS.total_bytes
    assert [use.num_bytes for use in what.subtracted[:2]] == [600 * MIB, 40 * MIB]
    assert what.source == "measured on 2026-01-31 with driver 580.1, torch 2.11.0"


def test_a_card_that_nobody_knows_is_not_trusted_with_more_than_any_other() -> None:
    card = other_card(24 * GIB)
    assert (card.key, card.name) == ("gpu-24gb", "GPU")
    assert usable(card).capacity_bytes <= min(
        usable(replace(known, total_bytes=24 * GIB)).capacity_bytes for known in CARDS
    )


def test_a_small_card_has_nothing_left_and_no_less() -> None:
    what = usable(other_card(GIB))
    assert what.capacity_bytes <= 0


def test_measurements_that_come_with_can_train_are_of_cards_in_the_catalogue() -> None:
    assert all(key == found.key and key in BY_KEY for key, found in MEASURED.items())


DRIVER_NAMES = {
    "p100-16gb": ("Tesla P100-PCIE-16GB", "Tesla P100-SXM2-16GB"),
    "v100-16gb": ("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB", "Tesla V100-FHHL-16GB"),
    "v100-32gb": ("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "Tesla V100S-PCIE-32GB", "Tesla V100-DGXS-32GB"),
    "t4-16gb": ("Tesla T4", "NVIDIA T4"),
    "a10-24gb": ("NVIDIA A10",),
    "a10g-24gb": ("NVIDIA A10G",),
    "a16-16gb": ("NVIDIA A16",),
    "a30-24gb": ("NVIDIA A30",),
    "a40-48gb": ("NVIDIA A40",),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-SXM4-40GB"),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    "l4-24gb": ("NVIDIA L4",),
    "l40-48gb": ("NVIDIA L40",),
    "l40s-48gb": ("NVIDIA L40S",),
    "h100-80gb": ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"),
    "h100-94gb": ("NVIDIA H100 NVL",),
    "h200-141gb": ("NVIDIA H200", "NVIDIA H200 NVL"),
    "gh200-96gb": ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
    "b200-180gb": ("NVIDIA B200",),
    "quadro-rtx-6000-24gb": ("Quadro RTX 6000",),
    "quadro-rtx-8000-48gb": ("Quadro RTX 8000",),
    "rtx-a4000-16gb": ("NVIDIA RTX A4000",),
    "rtx-a5000-24gb": ("NVIDIA RTX A5000",),
    "rtx-a6000-48gb": ("NVIDIA RTX A6000",),
    "rtx-6000-ada-48gb": ("NVIDIA RTX 6000 Ada Generation",),
    "gtx-1080-ti-11gb": ("NVIDIA GeForce GTX 1080 Ti", "GeForce GTX 1080 Ti"),
    "rtx-2080-ti-11gb": ("NVIDIA GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti"),
    "rtx-3060-12gb": ("NVIDIA GeForce RTX 3060",),
    "rtx-3070-8gb": ("NVIDIA GeForce RTX 3070",),
    "rtx-3080-10gb": ("NVIDIA GeForce RTX 3080",),
    "rtx-3080-12gb": ("NVIDIA GeForce RTX 3080",),
    "rtx-3090-24gb": ("NVIDIA GeForce RTX 3090",),
    "rtx-4070-12gb": ("NVIDIA GeForce RTX 4070",),
    "rtx-4070-ti-12gb": ("NVIDIA GeForce RTX 4070 Ti",),
    "rtx-4080-16gb": ("NVIDIA GeForce RTX 4080",),
    "rtx-4090-24gb": ("NVIDIA GeForce RTX 4090",),
    "rtx-5080-16gb": ("NVIDIA GeForce RTX 5080",),
    "rtx-5090-32gb": ("NVIDIA GeForce RTX 5090",),
    "a2-16gb": ("NVIDIA A2",),
    "p40-24gb": ("Tesla P40",),
    "a800-40gb": ("NVIDIA A800 40GB Active",),
    "a800-80gb": ("NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe"),
    "l20-48gb": ("NVIDIA L20",),
    "h20-96gb": ("NVIDIA H20",),
    "h20-141gb": ("NVIDIA H20-3e",),
    "h800-80gb": ("NVIDIA H800", "NVIDIA H800 PCIe"),
    "gb200-186gb": ("NVIDIA GB200",),
    "b300-288gb": ("NVIDIA B300 SXM6 AC",),
    "rtx-pro-6000-96gb": (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    ),
    "titan-xp-12gb": ("NVIDIA TITAN Xp", "TITAN Xp"),
    "titan-v-12gb": ("NVIDIA TITAN V",),
    "titan-rtx-24gb": ("NVIDIA TITAN RTX", "TITAN RTX"),
    "rtx-2060-6gb": ("NVIDIA GeForce RTX 2060",),
    "rtx-2060-12gb": ("NVIDIA GeForce RTX 2060",),
    "rtx-2060-super-8gb": ("NVIDIA GeForce RTX 2060 SUPER",),
    "rtx-2070-8gb": ("NVIDIA GeForce RTX 2070",),
    "rtx-2070-super-8gb": ("NVIDIA GeForce RTX 2070 SUPER",),
    "rtx-2080-8gb": ("NVIDIA GeForce RTX 2080",),
    "rtx-2080-super-8gb": ("NVIDIA GeForce RTX 2080 SUPER",),
    "rtx-3060-ti-8gb": ("NVIDIA GeForce RTX 3060 Ti",),
    "rtx-3070-ti-8gb": ("NVIDIA GeForce RTX 3070 Ti",),
    "rtx-3080-ti-12gb": ("NVIDIA GeForce RTX 3080 Ti",),
    "rtx-3090-ti-24gb": ("NVIDIA GeForce RTX 3090 Ti",),
    "rtx-4060-8gb": ("NVIDIA GeForce RTX 4060",),
    "rtx-4060-ti-8gb": ("NVIDIA GeForce RTX 4060 Ti",),
    "rtx-4060-ti-16gb": ("NVIDIA GeForce RTX 4060 Ti",),
    "rtx-4070-super-12gb": ("NVIDIA GeForce RTX 4070 SUPER",),
    "rtx-4070-ti-super-16gb": ("NVIDIA GeForce RTX 4070 Ti SUPER",),
    "rtx-4080-super-16gb": ("NVIDIA GeForce RTX 4080 SUPER",),
    "rtx-5060-8gb": ("NVIDIA GeForce RTX 5060",),
    "rtx-5060-ti-8gb": ("NVIDIA GeForce RTX 5060 Ti",),
    "rtx-5060-ti-16gb": ("NVIDIA GeForce RTX 5060 Ti",),
    "rtx-5070-12gb": ("NVIDIA GeForce RTX 5070",),
    "rtx-5070-ti-16gb": ("NVIDIA GeForce RTX 5070 Ti",),
}
"""What drivers call each card of the catalogue."""

SCHEDULER_NAMES = {
    "v100-16gb": ("tesla_v100-sxm2-16gb", "v100-16gb", "v100_16gb", "v100-16g"),
    "v100-32gb": ("v100-32gb", "gpu:v100s:2", "v100_32"),
    "t4-16gb": ("t4", "gpu:tesla_t4:1"),
    "p100-16gb": ("p100", "gres:gpu:p100:2"),
    "a100-40gb": ("nvidia_a100-pcie-40gb", "a100_40gb"),
    "a100-80gb": ("nvidia_a100-sxm4-80gb", "gres/gpu:nvidia_a100-sxm4-80gb=1", "a100-80", "a100-sxm-80gb"),
    "h100-80gb": ("gpu:h100:4", "nvidia_h100_80gb_hbm3", "nvidia_h100_pcie", "gpu:h100:4(S:0-1)", "h100"),
    "h100-94gb": ("nvidia_h100_nvl", "h100nvl", "h100_94gb"),
    "h200-141gb": ("nvidia_h200", "nvidia_h200_141gb_hbm3e", "gres/gpu:nvidia_h200=1"),
    "gh200-96gb": ("nvidia_gh200_120gb", "nvidia_gh200_480gb", "gh200"),
    "rtx-3090-24gb": ("rtx3090", "nvidia_geforce_rtx_3090", "3090", "geforce_rtx_3090"),
    "rtx-3080-12gb": ("rtx3080-12gb",),
    "rtx-a6000-48gb": ("a6000", "nvidia_rtx_a6000", "rtxa6000"),
    "rtx-6000-ada-48gb": ("nvidia_rtx_6000_ada_generation", "rtx6000ada"),
    "quadro-rtx-6000-24gb": ("quadro_rtx_6000",),
    "rtx-2080-ti-11gb": ("rtx_2080_ti", "2080ti", "geforce_rtx_2080_ti"),
    "a10-24gb": ("a10", "nvidia_a10"),
    "l40s-48gb": ("l40s", "nvidia_l40s"),
}
"""What schedulers and people call some of them."""

SIZELESS = {*(f"NVIDIA GeForce RTX {name}" for name in ("2060", "3080", "4060 Ti", "5060 Ti")), "NVIDIA H20"}
"""Names of drivers that several cards have."""

SPELLINGS = [(key, name) for names in (DRIVER_NAMES, SCHEDULER_NAMES) for key in names for name in names[key]]


def shown_sizes(card: Card) -> st.SearchStrategy[int]:
    """What drivers may show of a card: what the newest do, up to what is on the box, in GiB."""
    return st.integers(card.total_bytes, card.nominal_gb * GIB if card.nominal_gb != 180 else int(179.5 * GIB))


def test_every_card_has_a_name_from_its_driver() -> None:
    assert DRIVER_NAMES.keys() == BY_KEY.keys()


@given(st.data())
def test_a_card_has_one_key_whatever_its_driver_calls_it_and_keeps_of_it(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(BY_KEY)))
    total_bytes = data.draw(shown_sizes(BY_KEY[key]))
    for name in (*DRIVER_NAMES[key], key):
        assert gpu_key(name, total_bytes) == key


@given(name=st.text() | st.sampled_from([name for _, name in SPELLINGS]), total_bytes=st.integers(1, 2**40))
def test_a_key_is_its_own_key(name: str, total_bytes: int) -> None:
    key = gpu_key(name, total_bytes)
    assert gpu_key(key, total_bytes) == key


@pytest.mark.parametrize(("key", "name"), [pair for pair in SPELLINGS if pair[1] not in SIZELESS])
def test_a_card_is_found_by_what_drivers_schedulers_and_people_call_it(key: str, name: str) -> None:
    for spelling in (name, name.upper(), f" {name} ", name.lower().replace(" ", "_"), name.replace("_", "-")):
        assert find_card(spelling) is BY_KEY[key]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_a_card_is_found_by_its_key_alone_and_in_a_request(card: Card) -> None:
    for text in (card.key, f"gpu:{card.key}:4", f"gres/gpu:{card.key}=2", card.key.replace("-", "_")):
        assert find_card(text) is card


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("a100", "a100-40gb or a100-80gb"),
        ("gpu:v100:4", "v100-16gb or v100-32gb"),
        ("rtx3080", "rtx-3080-10gb or rtx-3080-12gb"),
        ("rtx_6000", "quadro-rtx-6000-24gb or rtx-6000-ada-48gb"),
    ],
)
def test_a_name_of_several_cards_names_them(text: str, candidates: str) -> None:
    with pytest.raises(ConfigError, match=rf"several sizes: '{text}'\.\nSay {candidates}"):
        find_card(text)


def test_no_other_name_is_that_of_several_cards() -> None:
    names = [name for card in CARDS for name in {*card.spellings}]
    assert sorted({name for name in names if names.count(name) > 1}) == [
        *("2060", "3080", "4060ti", "5060ti", "a100", "a800", "h20"),
        *("rtx2060", "rtx3080", "rtx4060ti", "rtx5060ti", "rtx6000", "v100"),
    ]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("h100-90gb", "h100-94gb|h100-80gb"),
        ("rtx4099", "rtx-4090-24gb"),
        ("nvidia_l40x_48gb", "l40s-48gb|l40-48gb"),
        ("a100-64gb", "a100-40gb|a100-80gb"),
    ],
)
def test_an_unknown_card_lists_the_nearest_first(text: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"Unknown GPU: '{text}'\.\nNearest of 82: ({nearest}), .*-gpu 16GiB"):
        find_card(text)


@pytest.mark.parametrize("text", ["", "gpu", "gpu:4", "nvidia", "a100_3g.41gb", "a40_1g.10gb", "8g.80gb", "3g", "Δ"])
def test_what_is_no_card_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="Unknown GPU"):
        find_card(text)


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, "a100-mig-1g-10gb"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.4, "h100-mig-3g-40gb"),
        ("NVIDIA GeForce RTX 3060", 7.9, "rtx-3060-8gb"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 15.7, "rtx-3080-laptop-gpu-16gb"),
        ("NVIDIA GeForce RTX 4080 SUPER", 15.6, "rtx-4080-super-16gb"),
        ("GRID A100-40C", 39.9, "grid-a100-40c-40gb"),
        ("NVIDIA TITAN V", 11.8, "titan-v-12gb"),
        ("NVIDIA", 8.0, "gpu-8gb"),
    ],
)
def test_a_card_that_nobody_listed_has_a_key_of_its_own(name: str, gib: float, key: str) -> None:
    assert gpu_key(name, int(gib * GIB)) == key


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (
            "a100-mig-3g-40gb",
            (
                "a100_3g.40gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "nvidia_a100-sxm4-80gb_3g.40gb",
                "gpu:a100_3g.40gb:2",
                "gres/gpu:nvidia_a100_80gb_pcie_3g.40gb=1", "a100-mig-3g-40gb", "A100 3g.40gb", "nvidia_a100_3g.39gb",
                "a100-mig-1c.3g.40gb", "a100_3g.40gb+me",
            ),
        ),
        ("a100-mig-1g-5gb", ("1g.5gb", "nvidia.com/mig-1g.5gb", "gpu:1g.5gb:7", "a100_1g.5gb.me", "mig-1g.5gb")),
        ("h100-mig-1g-10gb", ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100_1g.10gb", "nvidia_h100_80gb_hbm3_1g.10gb")),
        ("h100-mig-1g-12gb", ("NVIDIA H100 NVL MIG 1g.12gb", "h100_1g.12gb")),
        ("gh200-mig-1g-12gb", ("NVIDIA GH200 480GB MIG 1g.12gb",)),
        ("h200-mig-1g-18gb", ("1g.18gb", "NVIDIA H200 MIG 1g.18gb")),
        ("b200-mig-1g-23gb", ("NVIDIA B200 MIG 1g.23gb",)),
        ("a30-mig-2g-12gb", ("NVIDIA A30 MIG 2g.12gb", "a30_2g.12gb")),
        ("rtx-pro-6000-mig-2g-48gb", ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 2g.48gb",)),
    ],
)  # fmt: skip
def test_a_slice_is_found_by_what_drivers_schedulers_and_people_call_it(key: str, names: Sequence[str]) -> None:
    for name in (*names, *(name.upper() for name in names)):
        assert find_card(name).key == key


def test_a_slice_without_its_gpu_names_the_gpus_that_have_it() -> None:
    with pytest.raises(
        ConfigError, match=r"slices of several GPUs: '1g\.10gb'\.\nSay a100-mig-1g-10gb or h100-mig-1g-10gb"
    ):
        find_card("1g.10gb")


@pytest.mark.parametrize("card", SLICES, ids=lambda card: card.key)
def test_a_slice_has_less_memory_than_its_name_says_and_threads_of_its_gpu(card: Card) -> None:
    # Profiles of a whole GPU are named by the size on the box.
    assert 0.82 * card.nominal_gb <= card.total_bytes / GIB <= 1.01 * card.nominal_gb
    whole = [known for known in CARDS if known.name == card.name.partition(" MIG ")[0]]
    assert card.resident_threads <= max(known.resident_threads for known in whole)
    assert {known.generation for known in whole} == {card.generation}
    assert find_card(card.key) is card
    assert card.key not in cards_that_hold(1)


def test_slices_have_the_memory_that_listings_of_drivers_show() -> None:
    shown = {"a100-mig-2g-20gb": 19_968, "h100-mig-1g-12gb": 10.75 * 1024, "gb200-mig-1g-24gb": 20 * 1024}
    for key, mib in shown.items():
        assert find_card(key).total_bytes == mib * MIB
    assert usable(find_card("a100_1g.5gb")).capacity_bytes == (4_864 - 640 - 32) * MIB


def test_amd_gpus_are_memory_with_a_name() -> None:
    for name in ("mi300x", "AMD Instinct MI300X", "gpu:mi300x:8", "amd_instinct_mi300x", "amd-instinct-mi300x-192gb"):
        card = find_card(name)
        assert (card.key, card.generation, card.resident_threads) == ("amd-instinct-mi300x-192gb", ROCM, 0)
    what = usable(card)
    assert what.capacity_bytes <= usable(other_card(card.total_bytes)).capacity_bytes + 512 * MIB
    assert what.subtracted[0].what.startswith("HIP")
    assert card.total_bytes <= 196_592 * MIB
    assert all("amd" not in known.key for known in CARDS)


MEASUREMENT = GpuConstants(
    key="v100-16gb",
    total_bytes=16 * 10**9,
    outside_bytes=4 * 10**8,
    workspace_bytes=10**7,
    date="2026-01-31",
    driver="580.1",
    torch="2.11.0",
)


class Listener(SilentReporter):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def test_what_was_written_is_read_back_and_what_is_written_later_replaces_it(tmp_path: Path) -> None:
    listener = Listener()
    for constants in (MEASUREMENT, replace(MEASUREMENT, outside_bytes=5 * 10**8)):
        path = write_gpu_constants(tmp_path / "state", constants)
        assert read_gpu_constants(tmp_path / "state", "v100-16gb", listener) == constants
    assert path == tmp_path / "state" / "gpus" / "v100-16gb.json"
    assert listener.notices == []


def test_of_a_card_that_nobody_measured_nothing_is_known_and_nothing_is_written(tmp_path: Path) -> None:
    listener = Listener()
    assert read_gpu_constants(tmp_path / "state", "a100-40gb", listener) is None
    assert not (tmp_path / "state").exists()
    assert listener.notices == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("{", "Input data was truncated"),
        ("[1]", "not a record of can-train"),
        ('{"total_bytes": 1}', "not a record of can-train"),
        (json.dumps({"schema": SCHEMA + 1}), "written by a newer can-train"),
        (
            json.dumps({"schema": SCHEMA, **asdict(MEASUREMENT), "total_bytes": 1.5}),
            "Expected `int`, got `float` - at `$.total_bytes`",
        ),
        (
            json.dumps({"schema": SCHEMA, **asdict(MEASUREMENT), "date": None}),
            "Expected `str`, got `null` - at `$.date`",
        ),
        (json.dumps({"schema": SCHEMA, **asdict(MEASUREMENT), "key": "t4-16gb"}), "its key is t4-16gb"),
        (json.dumps({"schema": SCHEMA, **asdict(MEASUREMENT), "workspace_bytes": -1}), "Expected `int` >= 0"),
        (
            json.dumps({"schema": SCHEMA, **asdict(MEASUREMENT), "outside_bytes": 16 * 10**9}),
            "16000000000 of 16000000000 bytes are in use",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_passed_over_and_named(tmp_path: Path, text: str, reason: str) -> None:
    path = write_gpu_constants(tmp_path, MEASUREMENT)
    path.write_text(text)
    listener = Listener()
    assert read_gpu_constants(tmp_path, "v100-16gb", listener) is None
    (notice,) = listener.notices
    assert f"{path} is passed over: {reason}" in notice
    assert path.read_text() == text


@given(st.binary() | st.text().map(str.encode) | st.recursive(st.integers(), st.lists).map(lambda x: str(x).encode()))
def test_whatever_is_in_a_file_it_is_passed_over(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    state = tmp_path_factory.mktemp("state")
    (state / "gpus").mkdir()
    (state / "gpus" / "v100-16gb.json").write_bytes(data)
    assert read_gpu_constants(state, "v100-16gb", SilentReporter()) is None


def test_what_a_later_version_adds_is_passed_over(tmp_path: Path) -> None:
    path = write_gpu_constants(tmp_path, MEASUREMENT)
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": [1]}))
    assert read_gpu_constants(tmp_path, "v100-16gb", SilentReporter()) == MEASUREMENT


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text("a file")
    with pytest.raises(StateError, match=r"cannot be written: .*gpus"):
        write_gpu_constants(tmp_path, MEASUREMENT)


@pytest.mark.parametrize(
    ("card", "kernels", "loading", "mib"),
    [
        ("a100-40gb", CUBLAS_KERNELS, "", 1429),
        ("a100-80gb", CUDNN_KERNELS, "", 1679),
        ("a100-80gb", ALL_KERNELS, "LAZY", 1721),
        ("a100_3g.40gb", ALL_KERNELS, "LAZY", 640),
        ("h100-80gb", CUBLAS_KERNELS, "", 685),
        ("rtx3090", ALL_KERNELS, "", 640),
        ("rtx3090", CUBLAS_KERNELS, "eager", 1429),
    ],
)
def test_a_context_follows_from_the_card_the_libraries_and_how_kernels_are_loaded(
    card: str, kernels: str, loading: str, mib: int
) -> None:
    least, assumed, most = context_bytes(find_card(card), kernels, environment={"CUDA_MODULE_LOADING": loading})
    assert assumed == mib * MIB
    assert least < assumed <= most


def test_a_plan_subtracts_the_context_that_a_prediction_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    for card in CARDS:
        assert usable(card).subtracted[0].num_bytes == context_bytes(card)[1]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("2xt4", (2, "t4")),
        ("2 x 16GiB", (2, "16GiB")),
        ("8×h100", (8, "h100")),
        ("15XB", (1, "15XB")),
        ("t4", (1, "t4")),
    ],
)
def test_a_count_in_front_of_a_name_is_no_part_of_a_mistyped_size(text: str, read: tuple[int, str]) -> None:
    assert split_count(text) == read
