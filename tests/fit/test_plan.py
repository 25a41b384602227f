import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.packing import BatchCosts, SplitRules
from can_train.fit.plan import PlanRequest, costliest, resolve_plan, search_upper, spare_room
from can_train.fit.run_plan import limits_notices
from fakes.device_limits import limits


def request(**changed: Any) -> PlanRequest:
    return PlanRequest(**{"mode": "max", "requested_batch": None, "preset_batch": 64, **changed})


def uniform(size: int = 10_000) -> BatchCosts:
    return BatchCosts.uniform(size)


requests = st.builds(
    PlanRequest,
    mode=st.sampled_from(["max", "opt"]),
    requested_batch=st.none() | st.integers(1, 500),
    preset_batch=st.integers(1, 500),
    min_steps_per_epoch=st.integers(1, 200),
    ranks=st.integers(1, 4),
    rules=st.builds(SplitRules, equal=st.booleans()),
)
sample_costs = st.lists(st.floats(0.5, 50.0), min_size=1, max_size=300)


@pytest.mark.parametrize(
    ("room", "max_batch", "reason"),
    [
        (4096, 640, "as large as 50 steps an epoch allow"),
        (300, 300, "as large as fits"),
    ],
)
def test_a_preset_batch_says_what_the_device_would_hold(room: int, max_batch: int, reason: str) -> None:
    (notice,) = spare_room(request(mode="opt"), 64, 32_000, room)
    assert notice == (
        f"The device would hold about {room:,} samples at once; "
        f"--find-batch-size max trains with {max_batch:,}, {reason}"
    )
    assert spare_room(request(mode="opt"), 64, 32_000, 64) == []
    assert spare_room(request(mode="opt"), 64, 1_200, room) == []
    assert spare_room(request(mode="opt", requested_batch=64), 64, 32_000, room) == []
    assert spare_room(request(mode="max"), 64, 32_000, room) == []


def test_a_room_for_the_whole_data_set_is_named() -> None:
    (notice,) = spare_room(request(mode="opt", min_steps_per_epoch=1), 64, 200, 4096)
    assert notice.endswith("--find-batch-size max trains with 200, the whole data set")


def test_max_takes_the_safe_share_of_what_fits() -> None:
    plan = resolve_plan(request(preset_batch=32), uniform(), tuned_limit=101, factor=0.5)
    assert (plan.logical_batch, plan.rules.safe_limit, plan.most_parts) == (50, 50.5, 1)
    assert (plan.binding_limit, plan.steps_per_epoch, plan.largest_cost) == ("memory", 200, 50)


def test_max_takes_what_all_ranks_together_hold() -> None:
    plan = resolve_plan(request(ranks=3), uniform(), tuned_limit=101, factor=0.5)
    assert (plan.logical_batch, plan.binding_limit) == (150, "memory")
    assert (plan.most_parts, plan.largest_micro_batch, plan.largest_cost) == (1, 50, 50)


def test_ranks_that_share_a_batch_cut_it_less() -> None:
    asked = request(mode="opt", requested_batch=64)
    parts = [resolve_plan(replace(asked, ranks=ranks), uniform(), tuned_limit=20).most_parts for ranks in (1, 2, 4)]
    assert parts == [4, 2, 1]


def test_max_leaves_enough_steps_in_an_epoch() -> None:
    plan = resolve_plan(request(min_steps_per_epoch=50, preset_batch=16), uniform(1_000), tuned_limit=10_000)
    assert (plan.logical_batch, plan.steps_per_epoch, plan.binding_limit) == (20, 50, "min_steps")


def test_max_takes_no_less_than_the_presets_batch_and_says_which_bound_would() -> None:
    of_steps = resolve_plan(request(preset_batch=32), uniform(1_000), tuned_limit=10_000)
    assert (of_steps.logical_batch, of_steps.steps_per_epoch, of_steps.binding_limit) == (32, 32, "preset")
    kept = "find_batch_size=max takes no less than the preset's batch, "
    assert of_steps.notices == (f"{kept}32 samples: 32 steps an epoch, fewer than min_steps_per_epoch=50",)
    of_memory = resolve_plan(request(), uniform(), tuned_limit=40, factor=0.5)
    assert (of_memory.logical_batch, of_memory.most_parts, of_memory.binding_limit) == (64, 4, "preset")
    assert of_memory.notices == (f"{kept}64 samples, of which 20 fit at once: it is computed in parts",)
    assert of_memory.lr_factor == 1


def test_max_takes_a_small_data_set_whole() -> None:
    plan = resolve_plan(request(min_steps_per_epoch=1), uniform(7), tuned_limit=100)
    assert (plan.logical_batch, plan.binding_limit) == (7, "dataset")


def test_more_steps_than_samples_leave_one_sample_a_step() -> None:
    plan = resolve_plan(request(min_steps_per_epoch=50, preset_batch=1), uniform(7), tuned_limit=100)
    assert (plan.logical_batch, plan.steps_per_epoch) == (1, 7)


def test_max_chooses_a_batch_that_nearly_always_fits_whole() -> None:
    rng = np.random.default_rng(0)
    order = BatchCosts.of_samples(rng.lognormal(0, 1, 20_000))
    plan = resolve_plan(request(), order, tuned_limit=200)
    starts = range(0, 20_000 - plan.logical_batch, plan.logical_batch)
    over = sum(order.cost(start, start + plan.logical_batch) > 200 for start in starts)
    assert over <= 0.05 * len(starts)
    assert plan.most_parts <= 3
    assert plan.logical_batch * float(order.each().mean()) >= 0.6 * 200


def test_max_ignores_a_batch_size_aloud() -> None:
    plan = resolve_plan(request(requested_batch=512, preset_batch=32), uniform(), tuned_limit=100, factor=0.5)
    assert plan.logical_batch == 50
    assert plan.notices == ("find_batch_size=max chose a batch of 50; the batch size of 512 was ignored",)


def test_opt_keeps_the_batch_and_cuts_it() -> None:
    plan = resolve_plan(request(mode="opt", requested_batch=127), uniform(1_270), tuned_limit=128, factor=0.5)
    assert (plan.logical_batch, plan.most_parts, plan.largest_micro_batch) == (127, 2, 64)
    assert plan.binding_limit == "requested"


def test_opt_with_divisors_says_what_they_cost() -> None:
    asked = request(mode="opt", requested_batch=127, rules=SplitRules(equal=True))
    plan = resolve_plan(asked, uniform(1_270), tuned_limit=64)
    assert (plan.most_parts, plan.largest_micro_batch) == (127, 1)
    assert plan.notices == ("accumulation=divisor cuts a batch into up to 127 micro-batches; even needs 2",)


def test_a_batch_larger_than_the_data_set_is_the_data_set() -> None:
    plan = resolve_plan(request(mode="off", requested_batch=512), uniform(100))
    assert (plan.logical_batch, plan.binding_limit, plan.steps_per_epoch) == (100, "dataset", 1)
    assert plan.notices[0] == "The data set has 100 samples: a batch of 512 is the whole of it"


def test_an_epoch_that_is_hardly_one_is_named() -> None:
    def notices(samples: int, batch: int) -> str:
        return "; ".join(resolve_plan(request(mode="off", requested_batch=batch), uniform(samples)).notices)

    assert "only 1 optimizer step:" in notices(100, 100)
    assert "only 4 optimizer steps:" in notices(100, 25)
    assert notices(100, 20) == ""
    assert "A batch is a single sample" in notices(100, 1)
    assert "The last step of an epoch sees a single sample" in notices(101, 10)


def test_off_runs_each_loader_batch_uncut() -> None:
    plan = resolve_plan(request(mode="off"), uniform())
    assert (plan.fewest_parts, plan.most_parts, plan.safety_factor) == (1, 1, None)
    accumulated = resolve_plan(request(mode="off", requested_batch=256, loader_batch=64), uniform(1_024))
    assert (accumulated.logical_batch, accumulated.most_parts, accumulated.largest_micro_batch) == (256, 4, 64)


def test_a_fixed_micro_batch_needs_no_search_even_under_max() -> None:
    fixed = request(micro_batch_size=24)
    plan = resolve_plan(fixed, uniform(640))
    assert not fixed.searches
    assert (plan.most_parts, plan.largest_micro_batch) == (3, 22)
    assert "has nothing to search" in plan.notices[0]


def test_preflight_splitting_makes_more_optimizer_steps_aloud() -> None:
    asked = request(mode="off", requested_batch=100, preflight_threshold=40.0)
    plan = resolve_plan(asked, uniform(1_000))
    assert plan.steps_per_epoch == 30
    assert "makes 30 optimizer steps of 10 batches" in plan.notices[0]


@pytest.mark.parametrize(
    ("mode", "lr_scale", "lr_factor"),
    [("max", "auto", 2.0), ("opt", "auto", 1.0), ("max", "none", 1.0), ("max", "linear", 4.0), ("opt", "sqrt", 2.0)],
)
def test_the_learning_rate_follows_the_batch_as_asked(mode: Any, lr_scale: Any, lr_factor: float) -> None:
    asked = request(mode=mode, requested_batch=256, lr_scale=lr_scale)
    assert resolve_plan(asked, uniform(100_000), tuned_limit=256).lr_factor == lr_factor


@given(asked=requests, costs=sample_costs, limit=st.floats(50.0, 10**4), factor=st.floats(0.05, 1.0))
def test_every_plan_fits_and_searching_further_would_not_change_it(
    asked: PlanRequest, costs: list[float], limit: float, factor: float
) -> None:
    order = BatchCosts.of_samples(costs)
    upper = search_upper(asked, order, factor=factor)
    plan = resolve_plan(asked, order, tuned_limit=min(limit, upper), factor=factor)
    unbounded = resolve_plan(asked, order, tuned_limit=limit, factor=factor)
    assert (plan.logical_batch, plan.binding_limit) == (unbounded.logical_batch, unbounded.binding_limit)
    assert (plan.fewest_parts, plan.most_parts) == (unbounded.fewest_parts, unbounded.most_parts)
    # A sample that alone is above the safe limit, yet fits, is a micro-batch by itself.
    assert plan.largest_cost <= max(factor * limit, *costs) * (1 + 1e-6)
    assert plan.steps_per_epoch == math.ceil(len(costs) / plan.logical_batch)
    if asked.takes_what_fits:
        assert plan.logical_batch >= asked.least_batch(len(costs))
        if plan.logical_batch > asked.least_batch(len(costs)):
            assert plan.steps_per_epoch >= min(asked.min_steps_per_epoch, len(costs))


def test_the_costliest_batch_holds_the_costliest_samples() -> None:
    assert costliest(BatchCosts.of_samples([1.0, 5.0, 2.0, 9.0]), 2) == 14.0


def test_of_epochs_that_differ_the_smallest_has_enough_steps() -> None:
    plan = resolve_plan(
        request(min_steps_per_epoch=50, preset_batch=2, epoch_shares=(0.2, 0.6, 1.0)),
        uniform(1_000),
        tuned_limit=10_000,
    )
    assert (plan.logical_batch, plan.binding_limit) == (4, "min_steps")
    assert (plan.fewest_steps_per_epoch, plan.mean_steps_per_epoch, plan.steps_per_epoch) == (50, 150, 250)


def test_of_epochs_that_differ_the_smallest_does_not_cut_a_batch_that_was_asked_for() -> None:
    asked = request(mode="off", requested_batch=300, epoch_shares=(0.2, 1.0))
    plan = resolve_plan(asked, uniform(1_000))
    assert (plan.logical_batch, plan.binding_limit) == (300, "requested")
    assert (plan.fewest_steps_per_epoch, plan.steps_per_epoch) == (1, 4)


def test_the_costliest_micro_batch_of_any_epoch_is_planned_for() -> None:
    heavy, light = BatchCosts.of_samples([10.0] * 20), BatchCosts.uniform(100)
    asked = request(mode="opt", requested_batch=10, epoch_shares=(0.2, 1.0))
    plan = resolve_plan(asked, light, tuned_limit=70, other_epochs=[heavy])
    assert (plan.largest_cost, plan.most_parts) == (50, 2)
    assert plan.steps_per_epoch == 10


def test_a_notice_of_a_full_batch_is_about_the_memory_of_its_samples() -> None:
    (training, evaluation) = limits_notices(limits(0.5, 0.9, measured_ratio=0.5))
    assert training == (
        "The samples of a full batch of training took 50.0% of the memory predicted from small batches (units); the "
        "sizes rest on the full batch"
    )
    assert evaluation == training.replace("training", "evaluation")
