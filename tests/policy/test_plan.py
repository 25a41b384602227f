import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import DoesNotFitError
from can_train.policy.plan import PlanRequest, resolve_mode, resolve_plan, search_upper


def request(**changed: Any) -> PlanRequest:
    defaults = {"mode": "max", "requested_batch": None, "preset_batch": 64, "dataset_size": 10_000, "factor": 0.5}
    return PlanRequest(**{**defaults, **changed})


requests = st.builds(
    PlanRequest,
    mode=st.sampled_from(["max", "opt"]),
    requested_batch=st.none() | st.integers(1, 5_000),
    preset_batch=st.integers(1, 5_000),
    dataset_size=st.integers(1, 50_000),
    min_steps_per_epoch=st.integers(1, 200),
    divisor=st.booleans(),
    factor=st.floats(0.05, 1.0),
)


@pytest.mark.parametrize(
    ("asked", "given", "mode"),
    [("auto", True, "opt"), ("auto", False, "max"), ("max", True, "max"), ("opt", False, "opt"), ("off", True, "off")],
)
def test_auto_keeps_a_given_batch_and_otherwise_takes_what_fits(asked: str, given: bool, mode: str) -> None:
    assert resolve_mode(asked, batch_size_given=given) == mode


def test_max_takes_the_safe_share_of_what_fits() -> None:
    plan = resolve_plan(request(), tuned_limit=101)
    assert (plan.logical_batch, plan.safe_limit, plan.micro_batches) == (50, 50, (50,))
    assert (plan.binding_limit, plan.steps_per_epoch) == ("memory", 200)
    assert plan.used == pytest.approx(50 / 101)


def test_max_leaves_enough_steps_in_an_epoch() -> None:
    plan = resolve_plan(request(dataset_size=1_000, min_steps_per_epoch=50), tuned_limit=search_upper(request()))
    assert (plan.logical_batch, plan.steps_per_epoch, plan.binding_limit) == (20, 50, "min_steps")


def test_max_takes_a_small_data_set_whole() -> None:
    small = request(dataset_size=7, min_steps_per_epoch=1)
    plan = resolve_plan(small, tuned_limit=search_upper(small))
    assert (plan.logical_batch, plan.binding_limit) == (7, "dataset")


def test_more_steps_than_samples_leave_one_sample_a_step() -> None:
    plan = resolve_plan(request(dataset_size=7, min_steps_per_epoch=50), tuned_limit=100)
    assert (plan.logical_batch, plan.steps_per_epoch) == (1, 7)


def test_max_ignores_a_batch_size_aloud() -> None:
    plan = resolve_plan(request(requested_batch=512), tuned_limit=100)
    assert plan.logical_batch == 50
    assert plan.notices == ("find_batch_size=max chose a batch of 50; the batch size of 512 was ignored",)


def test_opt_keeps_the_batch_and_cuts_it() -> None:
    plan = resolve_plan(request(mode="opt", requested_batch=127), tuned_limit=128)
    assert (plan.logical_batch, plan.micro_batches, plan.binding_limit) == (127, (64, 63), "requested")
    assert plan.used == 0.5


def test_a_search_that_memory_did_not_end_says_nothing_of_what_is_used() -> None:
    asked = request(mode="opt", requested_batch=100)
    assert resolve_plan(asked, tuned_limit=search_upper(asked)).used is None
    assert resolve_plan(asked, tuned_limit=search_upper(asked) - 1).used is not None


def test_opt_with_divisors_says_what_they_cost() -> None:
    plan = resolve_plan(request(mode="opt", requested_batch=127, divisor=True), tuned_limit=128)
    assert plan.micro_batches == (1,) * 127
    assert plan.notices == (
        "accumulation=divisor cuts a batch of 127 into 127 micro-batches; accumulation=even needs 2",
    )


def test_a_batch_larger_than_the_data_set_is_the_data_set() -> None:
    plan = resolve_plan(request(mode="off", requested_batch=512, dataset_size=100), tuned_limit=None)
    assert (plan.logical_batch, plan.binding_limit, plan.steps_per_epoch) == (100, "dataset", 1)
    assert plan.notices == ("The data set has 100 samples: a batch of 512 is the whole of it",)


def test_off_runs_the_batch_uncut_and_has_no_limit_to_learn_from() -> None:
    plan = resolve_plan(request(mode="off"), tuned_limit=None)
    assert plan.micro_batches == (64,)
    assert (plan.tuned_limit, plan.safety_factor, plan.used) == (None, None, None)


def test_a_fixed_micro_batch_needs_no_search_even_under_max() -> None:
    fixed = request(micro_batch_size=24)
    plan = resolve_plan(fixed, tuned_limit=None)
    assert not fixed.searches
    assert plan.micro_batches == (22, 21, 21)
    assert "has nothing to search" in plan.notices[0]


def test_a_tiny_factor_still_allows_one_sample() -> None:
    assert resolve_plan(request(factor=0.05), tuned_limit=3).logical_batch == 1


def test_a_device_that_holds_no_sample_is_an_error() -> None:
    with pytest.raises(DoesNotFitError, match="At least one training sample must fit"):
        resolve_plan(request(), tuned_limit=0)


def test_the_factor_times_the_limit_is_not_lost_to_rounding() -> None:
    assert resolve_plan(request(factor=0.29), tuned_limit=100).safe_limit == 29


@pytest.mark.parametrize(
    ("mode", "lr_scale", "lr_factor"),
    [("max", "auto", 2.0), ("opt", "auto", 1.0), ("max", "none", 1.0), ("max", "linear", 4.0), ("opt", "sqrt", 2.0)],
)
def test_the_learning_rate_follows_the_batch_as_asked(mode: Any, lr_scale: Any, lr_factor: float) -> None:
    asked = request(mode=mode, requested_batch=256, lr_scale=lr_scale, dataset_size=100_000)
    assert resolve_plan(asked, tuned_limit=512).lr_factor == lr_factor


@given(asked=requests, true_limit=st.integers(1, 10**6))
def test_every_plan_fits_and_searching_further_would_not_change_it(asked: PlanRequest, true_limit: int) -> None:
    plan = resolve_plan(asked, tuned_limit=min(true_limit, search_upper(asked)))
    unbounded = resolve_plan(asked, tuned_limit=true_limit)
    assert plan.micro_batches == unbounded.micro_batches
    assert plan.binding_limit == unbounded.binding_limit
    assert sum(plan.micro_batches) == plan.logical_batch <= asked.dataset_size
    assert plan.micro_batches[0] <= max(1.0, asked.factor * true_limit + 1e-6)
    assert plan.steps_per_epoch == math.ceil(asked.dataset_size / plan.logical_batch)


@given(asked=requests, true_limit=st.integers(1, 10**6))
def test_max_never_starves_an_epoch_of_steps(asked: PlanRequest, true_limit: int) -> None:
    plan = resolve_plan(asked, tuned_limit=true_limit)
    if asked.takes_what_fits:
        assert plan.steps_per_epoch >= min(asked.min_steps_per_epoch, asked.dataset_size)
