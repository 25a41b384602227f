from dataclasses import replace

import pytest

from can_train.memory.catalogue import (
    ASSUMED,
    CARDS,
    GIB,
    MEASURED,
    MIB,
    Card,
    GpuConstants,
    cards_that_hold,
    other_card,
    predicted_room,
    usable,
)

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
        (60, "h100-80gb, a100-80gb, h100-94gb"),
        (150, "b200-180gb"),
        (170, "no common GPU"),
    ],
)
def test_the_smallest_cards_that_hold_it_are_named(need_gib: float, cards: str) -> None:
    assert cards_that_hold(need_gib * GIB) == cards


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_a_card_holds_as_much_as_it_can_use_and_no_more(card: Card) -> None:
    capacity_bytes = usable(card).capacity_bytes
    assert 0.8 * card.nominal_gb < capacity_bytes / GIB < 1.02 * card.nominal_gb
    room_bytes = predicted_room(capacity_bytes)
    smallest = cards_that_hold(room_bytes).split(", ")[0]
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


def test_constants_are_what_gpu_check_found_last_outside_and_all_that_was_kept_inside() -> None:
    steps = [
        {"outside_bytes": 400, "kept_bytes": 0},
        {"outside_bytes": 600, "kept_bytes": 32},
        {"outside_bytes": 590, "kept_bytes": 8},
    ]
    device = {"key": "t4-16gb", "total_bytes": 10_000, "driver": "", "torch": "2.11.0"}
    found = GpuConstants.from_gpu_check(device, steps, date="2026-01-31")
    assert (found.outside_bytes, found.workspace_bytes) == (600, 40)
    assert found.source == "measured on 2026-01-31 with driver unknown, torch 2.11.0"


def test_measurements_that_come_with_can_train_are_of_cards_in_the_catalogue() -> None:
    assert all(key == found.key and key in BY_KEY for key, found in MEASURED.items())
