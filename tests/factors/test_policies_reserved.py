"""What runs had reserved, and heavy tails: how they lower the aim before memory runs out."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policy_laws import Law, Oracle, draw_laws, fragmented, simulate, simulate_all, varied
from can_train.factors.policies import (
    DEFAULT_PRIOR,
    AffinePolicy,
    FactorPoint,
    MomentumPolicy,
    fit_with_ceiling,
    readings_of,
)

POLICY = AffinePolicy()
SHARES = st.floats(0.0, 1.2)
POINTS = st.builds(
    FactorPoint,
    used=st.floats(0.0, 2.0),
    peak=st.none() | SHARES,
    after_rescue=st.none() | st.tuples(SHARES, SHARES),
    reserved=st.none() | SHARES,
)
HISTORIES = st.lists(POINTS, min_size=1, max_size=30)


BENCH = Path(__file__).parents[2] / "scripts" / "bench"
CARDS = ("h100-80gb", "h200-141gb")


def measured_on(card: str) -> Iterator[tuple[str, float, float, float]]:
    """Peaks that fitted on a card: name, peak and reserved bytes ÷ capacity, and the ceiling seen there."""
    for name, row in json.loads((BENCH / f"gpu-check-{card}.json").read_text())["models"].items():
        capacity_bytes = row["capacity_bytes"]
        for kind in ("points", "compiled_points"):
            for point in row.get(kind, []) if row["ceiling_bytes"] else []:
                if point["measured_bytes"] and point["reserved_bytes"]:
                    shares = [point[what] / capacity_bytes for what in ("measured_bytes", "reserved_bytes")]
                    label = f"{card}, {name}, {kind}, {shares[0]:.1%}"
                    yield label, shares[0], shares[1], row["ceiling_bytes"] / capacity_bytes


MEASURED = [row for card in CARDS for row in measured_on(card)]


def along(ratio: float | None, *used: float) -> list[FactorPoint]:
    """Runs on the line 0.1 + used, of which a share of what was reserved was in use."""
    return [FactorPoint(u, 0.1 + u, None, None if ratio is None else (0.1 + u) / ratio) for u in used]


def without_reserved(history: list[FactorPoint]) -> list[FactorPoint]:
    return [replace(point, reserved=None) for point in history]


@pytest.mark.parametrize(
    ("peak", "reserved", "ceiling"), [row[1:] for row in MEASURED], ids=[row[0] for row in MEASURED]
)
def test_the_ceiling_of_one_run_is_near_the_ceiling_of_the_card(peak: float, reserved: float, ceiling: float) -> None:
    history = [FactorPoint(used=peak, peak=peak, reserved=reserved)]
    fitted = fit_with_ceiling(readings_of(history), DEFAULT_PRIOR).ceiling
    assert ceiling - 0.065 < fitted < ceiling + 0.02
    # Far below the capacity, bytes that are reserved and not in use are cached.
    assert peak > 0.4 or fitted > 0.95


def test_ceilings_of_cards_are_a_quarter_as_far_off_as_the_plain_ratio() -> None:
    fits = [fit_with_ceiling(readings_of([FactorPoint(p, p, reserved=r)]), DEFAULT_PRIOR) for _, p, r, _ in MEASURED]
    by_fit = fmean(abs(ceiling - fit.ceiling) for fit, (*_, ceiling) in zip(fits, MEASURED, strict=True))
    by_ratio = fmean(abs(ceiling - peak / reserved) for _, peak, reserved, ceiling in MEASURED)
    assert by_fit < 0.25 * by_ratio


@given(history=HISTORIES, first=st.floats(0.05, 1.0), data=st.data())
def test_more_reserved_never_raises_the_factor(history: list[FactorPoint], first: float, data: st.DataObject) -> None:
    more = [
        point if point.reserved is None else replace(point, reserved=point.reserved + data.draw(st.floats(0.0, 0.5)))
        for point in history
    ]
    # 0 says that nothing is reserved.
    more = [new if old.reserved else old for old, new in zip(history, more, strict=True)]
    assert POLICY.next_factor(more, first=first) <= POLICY.next_factor(history, first=first)


@given(history=HISTORIES)
def test_what_was_reserved_never_changes_the_line(history: list[FactorPoint]) -> None:
    fits = [fit_with_ceiling(readings_of(one), DEFAULT_PRIOR) for one in (history, without_reserved(history))]
    assert fits[0].line == fits[1].line


@given(history=HISTORIES, first=st.floats(0.05, 1.0))
def test_the_momentum_rule_does_not_look_at_what_was_reserved(history: list[FactorPoint], first: float) -> None:
    known, unknown = (MomentumPolicy().decide(one, first=first) for one in (history, without_reserved(history)))
    assert known == unknown


@given(history=HISTORIES, first=st.floats(0.05, 1.0), used=st.floats(0.0, 2.0), reserved=SHARES)
def test_an_out_of_memory_after_reserved_peaks_never_raises_the_factor(
    history: list[FactorPoint], first: float, used: float, reserved: float
) -> None:
    failed = FactorPoint(used, None, None, reserved)
    assert POLICY.next_factor([*history, failed], first=first) <= POLICY.next_factor(history, first=first)


def test_a_fragmented_run_that_fitted_lowers_the_aim_before_memory_runs_out() -> None:
    decision = POLICY.decide(along(0.84, 0.5, 0.65, 0.7), first=0.5)
    assert decision.limited_by == "reserved"
    assert 0.74 < decision.aim < 0.84
    assert POLICY.decide(along(None, 0.5, 0.65, 0.7), first=0.5).aim == POLICY.target


@pytest.mark.parametrize("reserved", [0.0, None])
def test_a_device_that_reserves_nothing_shows_no_ceiling(reserved: float | None) -> None:
    history = [replace(point, reserved=reserved) for point in along(None, 0.5, 0.65, 0.7)]
    assert POLICY.decide(history, first=0.5) == POLICY.decide(without_reserved(history), first=0.5)


def test_what_is_always_in_use_holds_no_aim_down() -> None:
    assert POLICY.decide(along(0.99, 0.5, 0.65, 0.7, 0.75), first=0.5).aim == POLICY.target


def test_many_runs_that_fitted_above_it_raise_the_ceiling() -> None:
    readings = readings_of([*along(0.85, *[0.6] * 3), *along(None, *[0.82] * 20)])
    assert fit_with_ceiling(readings, DEFAULT_PRIOR).ceiling >= 0.9


def test_the_last_page_of_a_small_run_does_not_hold_the_factor_down() -> None:
    # Each run reserves 6 % of the capacity that it does not use, whatever its size: the ceiling is 94 %.
    history: list[FactorPoint] = []
    for _ in range(8):
        used = POLICY.next_factor(history, first=0.2)
        history.append(FactorPoint(used, 0.1 + used, None, 0.16 + used))
    assert 0.82 < 0.1 + history[-1].used < 0.91


def test_on_fragmented_laws_reserved_memory_spares_most_out_of_memories_for_little_fill() -> None:
    laws = [
        replace(law, ceiling_sd=0.01, overstated=0.055)
        for law in fragmented(draw_laws(60, noise=0.02, bend=0.15, seed=1), ceilings=(0.82, 0.94))
    ]

    class Blind(AffinePolicy):
        def next_factor(self, history, *, first):  # type: ignore[no-untyped-def]
            return super().next_factor(without_reserved(history), first=first)

    known, unknown = (simulate_all(policy, laws, runs=40) for policy in (POLICY, Blind()))
    assert sum(one.ooms for one in known) <= 0.4 * sum(one.ooms for one in unknown)
    late = [fmean(fmean(one.peaks[10:]) for one in runs) for runs in (known, unknown)]
    assert late[0] > late[1] - 0.015


TAILED = [replace(law, tails=3.0) for law in draw_laws(80, noise=0.025, bend=0.15, seed=2)]
SCATTERED = draw_laws(80, noise=0.08, bend=0.15, seed=2)


@pytest.mark.parametrize(("laws", "one_in"), [(TAILED, 80), (SCATTERED, 55)])
def test_out_of_memories_are_as_rare_as_stated_where_peaks_scatter(laws: list[Law], one_in: int) -> None:
    simulated = simulate_all(POLICY, laws, runs=40)
    assert sum(one.ooms for one in simulated) * one_in <= 40 * len(laws)


def test_the_oracle_runs_the_risk_that_it_is_given() -> None:
    oracle = Oracle(varied(SCATTERED[:40], ceiling=(0.85, 0.95)), 40)
    assert oracle.ooms(oracle.peaks(0.005)) == pytest.approx(0.2, rel=0.05)
    assert oracle.risk_of(0.2) == pytest.approx(0.005, rel=0.05)
    drifting = Oracle([replace(law, drift=0.002) for law in oracle.laws], 40)
    assert drifting.ooms(drifting.peaks(0.005)) == pytest.approx(0.2, rel=0.05)


def test_a_quantised_law_uses_equal_parts_of_its_batch() -> None:
    law = Law(base=0.1, fill=1.0, bend=0.0, noise=0.0, first=0.6, batch=2.0)
    assert [law.used(factor) for factor in (0.4, 0.5, 0.6, 0.7, 1.0)] == [0.4, 0.5, 0.5, 2 / 3, 1.0]
    assert simulate(POLICY, law, runs=10).peaks[-1] == pytest.approx(0.1 + 0.9 * 2 / 3)
