from dataclasses import replace

import pytest

from can_train.fit.factor_rule import STATIC, SafetyFactor
from can_train.fit.packing import BatchCosts
from can_train.fit.plan import PlanRequest, resolve_plan
from can_train.fit.run_plan import RunPlan
from can_train.fit.rungs import Rung
from can_train.training.report import plan_summary

ASKED = PlanRequest(mode="opt", requested_batch=None, preset_batch=128, loader_batch=64, batches_per_step=2)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ASKED, "64 samples a batch (the preset's batch), 2 batches a step, 10 steps"),
        (replace(ASKED, requested_batch=128), "64 samples a batch (as asked for), 2 batches a step, 10 steps"),
        (replace(ASKED, preset_batch=64, batches_per_step=1), "64 samples a step (the preset's batch), 20 steps"),
        (replace(ASKED, preset_batch=2_000), "1,280 samples a step (the whole data set), 1 step"),
    ],
)
def test_a_plan_names_the_batch_that_was_given_and_how_many_make_a_step(asked: PlanRequest, words: str) -> None:
    plan = RunPlan(phase_plan=resolve_plan(asked, BatchCosts.uniform(1_280), tuned_limit=5_000), limits=None)
    assert plan_summary(plan, "sim-64mib", 2**26)[0] == f"Plan: {words} an epoch."


def test_a_plan_names_a_static_factor() -> None:
    plan = resolve_plan(ASKED, BatchCosts.uniform(1_280), tuned_limit=500, factor=0.6)
    static = RunPlan(phase_plan=plan, limits=None, factor=SafetyFactor(0.6, STATIC))
    assert "The safety factor is 0.6, as set: nothing is learned." in plan_summary(static, "sim-64mib", 2**26)
    learned = replace(static, factor=SafetyFactor(0.6, "learned from 2 runs"))
    assert not any("safety factor" in line for line in plan_summary(learned, "sim-64mib", 2**26))


def test_a_rung_that_was_asked_for_is_not_told_as_needed() -> None:
    rung = Rung(recompute=("head",))
    needed = RunPlan(phase_plan=resolve_plan(ASKED, BatchCosts.uniform(1_280), tuned_limit=500), limits=None, rung=rung)
    assert f"So that it fits, {rung.describe()}." in plan_summary(needed, "sim-64mib", 2**26)
    assert f"As asked for, {rung.describe()}." in plan_summary(replace(needed, rung_is_asked=True), "sim-64mib", 2**26)
