"""The values of a batch, made of the values of its parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from can_train.adapters.part_values import ATTRIBUTE, Combination, Kinds, UnjoinableError

SIZES = (2, 4, 3)
VALUES = torch.tensor([3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.5, 6.0, 5.5], dtype=torch.float64)
TOKENS = torch.tensor([1.0, 5.0, 2.0, 2.0, 3.0, 1.0, 1.0, 4.0, 2.0], dtype=torch.float64)
PLACE = ("logged", ("name", 0))


def of_tokens(values: Tensor) -> float:
    tokens = TOKENS[torch.isin(VALUES, values)]
    return float((values * tokens).sum() / tokens.sum())


def learned(compute: Any, *, by_tokens: bool = False) -> Kinds:
    """The kinds, learned from six samples that are computed whole and in parts of two and four."""
    kinds, few = Kinds(), VALUES[:6]
    kinds.learn(PLACE, compute(few), [compute(few[:2]), compute(few[2:])], SIZES[:2])
    kinds.judge([float(TOKENS[:2].sum()), float(TOKENS[2:6].sum())] if by_tokens else None)
    return kinds


def combined(compute: Any, kinds: Kinds, *, by_tokens: bool = False) -> Any:
    weights = [float(part.sum()) for part in TOKENS.split(SIZES)] if by_tokens else list(SIZES)
    values = [compute(part) for part in VALUES.split(SIZES)]
    return Combination(SIZES, [weight / sum(weights) for weight in weights], kinds).combine(values, PLACE)


@pytest.mark.parametrize(
    "compute",
    [
        lambda values: float(values.sum()),
        lambda values: float(values.mean()),
        lambda values: float(values.max()),
        lambda values: float(values.min()),
        lambda values: values.sum(),
        lambda values: torch.stack([values.mean(), 2 * values.mean()]),
        lambda values: values.max(),
        lambda values: 2 * values,
        lambda values: values.expand(5, len(values)),
        lambda values: (values.expand(1, 2, len(values)), values[None, :, None] * torch.ones(4, 1, 3)),
        lambda values: values.repeat_interleave(2)[:, None] * torch.ones(1, 3),
        lambda values: {"n": len(values), "mean": values.mean()},
        lambda values: int(values.max()),
        lambda values: 7,
        lambda values: 0.25,
    ],
)
@pytest.mark.parametrize("by_tokens", [False, True])
def test_a_value_whose_kind_was_learned_is_the_batchs(compute: Any, by_tokens: bool) -> None:
    kinds = learned(compute, by_tokens=by_tokens)
    torch.testing.assert_close(combined(compute, kinds, by_tokens=by_tokens), compute(VALUES))
    assert not kinds.newly_averaged()


def test_a_mean_over_tokens_has_their_weights() -> None:
    kinds = learned(of_tokens, by_tokens=True)
    assert combined(of_tokens, kinds, by_tokens=True) == pytest.approx(of_tokens(VALUES))
    assert not kinds.newly_averaged()


@pytest.mark.parametrize(
    "compute",
    [
        lambda values: float(values.square().mean().sqrt()),
        lambda values: values.std(),
        lambda values: int(values.sum()) ** 2,
        of_tokens,
    ],
)
def test_a_value_that_no_arithmetic_makes_is_averaged_and_named_once(compute: Any) -> None:
    kinds = learned(compute)
    for _ in range(2):
        combined(compute, kinds)
    assert kinds.newly_averaged() == ["'name'"]
    combined(compute, kinds)
    assert not kinds.newly_averaged()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(75, 125), (3, 5)])
def test_means_that_were_rounded_are_means(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    for seed in range(50):
        torch.manual_seed(seed)
        values = 2.3 + 0.1 * torch.rand(sum(sizes), dtype=torch.float64)
        whole, *parts = (each.mean().to(dtype) for each in (values, *values.split(sizes)))
        kinds = Kinds()
        kinds.learn(PLACE, whole, parts, sizes)
        kinds.judge()
        Combination(sizes, sizes, kinds).combine(parts, PLACE)
        assert not kinds.newly_averaged()
        assert not kinds.newly_guessed()


def test_a_value_of_unknown_kind_is_averaged_without_a_word() -> None:
    kinds = Kinds()
    assert combined(lambda values: float(values.mean()), kinds) == pytest.approx(float(VALUES.mean()))
    assert not kinds.newly_averaged()


@pytest.mark.parametrize("place", [("output",), (ATTRIBUTE, 0, "hidden")])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_equal_parts_are_joined_along_the_one_dimension_that_has_their_samples(place: Any, dim: int) -> None:
    whole = torch.arange(8.0 * 3 * 2).view(8, 3, 2).movedim(0, dim)
    assert torch.equal(Combination((4, 4), (4, 4)).combine(whole.split(4, dim), place), whole)
    assert torch.equal(Combination((5, 3), (5, 3)).combine(whole.split((5, 3), dim), place), whole)


@pytest.mark.parametrize(
    ("shapes", "sizes", "told"),
    [
        ([(4, 4), (4, 4)], (4, 4), "may be joined along dimensions 0 and 1 \\(shapes \\[4, 4\\]\\)"),
        ([(3, 3), (5, 5)], (3, 5), "cannot be joined \\(shapes \\[3, 3\\] and \\[5, 5\\]\\)"),
        ([(2, 7), (2, 6)], (3, 5), "cannot be joined"),
        ([(3,), (3, 1)], (3, 3), "cannot be joined"),
    ],
)
def test_tensors_that_do_not_follow_each_other_in_one_way_are_refused(
    shapes: list[tuple[int, ...]], sizes: tuple[int, int], told: str
) -> None:
    with pytest.raises(UnjoinableError, match=told):
        Combination(sizes, sizes).combine([torch.ones(shape) for shape in shapes], ("output",))


def test_a_comparison_tells_which_of_two_dimensions_has_the_samples_and_that_none_has() -> None:
    kinds, place = Kinds(), ("output",)
    kinds.learn(place, torch.zeros(4, 8), [torch.zeros(4, 3), torch.zeros(4, 5)], (3, 5))
    assert Combination((4, 4), (4, 4), kinds).combine([torch.ones(4, 4)] * 2, place).shape == (4, 8)
    kinds.learn(place, torch.zeros(8, 8), [torch.zeros(3, 3), torch.zeros(5, 5)], (3, 5))
    with pytest.raises(UnjoinableError):
        Combination((4, 4), (4, 4), kinds).combine([torch.ones(4, 4)] * 2, place)


def test_single_samples_are_rows_of_an_output_and_a_buffer_of_one_number_has_none() -> None:
    combination = Combination((1, 1), (1, 1))
    assert combination.combine([torch.ones(1, 1, 5)] * 2, ("output",)).shape == (2, 1, 5)
    pointer = [torch.tensor([3]), torch.tensor([3])]
    assert combination.combine(pointer, (ATTRIBUTE, -1, "pointer"), torch.tensor([2])).shape == (1,)


def test_a_tensor_of_unknown_kind_is_averaged_and_named() -> None:
    kinds = Kinds()
    found = Combination((4, 4), (4, 4), kinds).combine([torch.zeros(3), torch.ones(3)], ("output", "spread"))
    assert torch.equal(found, torch.full((3,), 0.5))
    assert kinds.newly_guessed() == ["'spread'"]


KEPT: dict[str, Callable[[float, Tensor], float]] = {
    "a total": lambda earlier, values: earlier + float(values.sum()),
    "a sum of means": lambda earlier, values: earlier + float(values.mean()),
    "an average": lambda earlier, values: 0.9 * earlier + 0.1 * float(values.mean()),
    "a maximum": lambda earlier, values: max(earlier, float(values.max())),
    "a minimum": lambda earlier, values: min(earlier, float(values.min())),
    "the latest mean": lambda earlier, values: float(values.mean()),
    "the latest sum": lambda earlier, values: float(values.sum()),
    "a count": lambda earlier, values: earlier + len(values),
    "the latest count": lambda earlier, values: len(values),
    "a count of steps": lambda earlier, values: earlier + 1,
}
KEPT_PLACE = (ATTRIBUTE, 0, "kept")


@pytest.mark.parametrize("begins", [0.0, -1e9, 1e9, 0, 3])
@pytest.mark.parametrize("kept", KEPT)
def test_a_value_that_a_step_keeps_is_the_batchs(kept: str, begins: float) -> None:
    step, earlier, kinds = KEPT[kept], begins, Kinds()
    batch = torch.tensor([-1.0, 3.5, 0.5, -2.5, 1.0, 5.0, 4.0, 6.0, -4.0], dtype=torch.float64)
    for values in (batch, batch.flip(0) * 2 - 5, batch * 3 - 7):
        few = values[:6]
        kinds.learn(
            KEPT_PLACE, step(earlier, few), [step(earlier, few[:2]), step(earlier, few[2:])], SIZES[:2], earlier
        )
        kinds.judge()
        parts = [step(earlier, part) for part in values.split(SIZES)]
        found = Combination(SIZES, SIZES, kinds).combine(parts, KEPT_PLACE, earlier)
        earlier = step(earlier, values)
        assert found == pytest.approx(earlier, rel=1e-12, abs=1e-12)
    assert not kinds.newly_averaged()
    assert not kinds.newly_guessed()


def test_a_best_mean_that_a_part_does_not_reach_is_named() -> None:
    kinds = Kinds()
    kinds.learn(KEPT_PLACE, 4.0, [3.0, 5.0], (4, 4), 9.0)
    kinds.judge()
    Combination((4, 4), (4, 4), kinds).combine([2.0, 1.0], KEPT_PLACE, 4.0)
    assert not kinds.newly_guessed()
    Combination((4, 4), (4, 4), kinds).combine([1.5, 1.0], KEPT_PLACE, 1.5)
    assert kinds.newly_guessed() == ["'kept'"]


@pytest.mark.parametrize(
    ("earlier", "values", "whole", "is_certain"),
    [
        (10, [15, 15], 20, True),
        (10.0, [15.0, 15.0], 20.0, True),
        (10, [11, 11], 11, True),
        (10, [5, 5], 10, True),
        (10, [12, 13], 15, False),
        (1.0, [1.5, 2.0], 1.75, False),
        (1.0, [1.0, 2.0], 2.0, True),
    ],
)
def test_of_a_kept_value_of_unknown_kind_counts_are_added_and_guesses_are_named(
    earlier: float, values: list[float], whole: float, is_certain: bool
) -> None:
    kinds = Kinds()
    assert Combination((5, 5), (5, 5), kinds).combine(values, KEPT_PLACE, earlier) == whole
    assert kinds.newly_guessed() == ([] if is_certain else ["'kept'"])


def test_a_total_whose_parts_have_other_random_numbers_is_added_up_and_named() -> None:
    kinds = Kinds()
    kinds.learn(KEPT_PLACE, 17.0, [13.1, 14.4], (3, 5), 10.0)
    kinds.judge()
    assert Combination((5, 5), (5, 5), kinds).combine([25.0, 26.0], KEPT_PLACE, 20.0) == 31.0
    assert kinds.newly_guessed() == ["'kept'"]


def test_entries_of_samples_follow_each_other_and_entries_of_steps_are_joined() -> None:
    place, kinds = ("list", 0, "entries"), Kinds()
    parts = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    combination = Combination((3, 3), (3, 3), kinds)
    assert combination.entries(parts, place) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    kinds.learn_entries(place, [0.0, 0.0, 0.0], parts, (3, 5))
    assert combination.entries(parts, place) == [2.5, 3.5, 4.5]
    kinds.learn_entries(place, [0.0] * 6, parts, (3, 5))
    assert combination.entries(parts, place) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@given(
    st.lists(st.integers(-1000, 1000).map(float), min_size=2, max_size=2),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_means_over_samples_are_judged_by_sizes(means: list[float], sizes: tuple[int, int]) -> None:
    whole = (means[0] * sizes[0] + means[1] * sizes[1]) / sum(sizes)
    kinds = Kinds()
    kinds.learn((ATTRIBUTE, 0, "mean"), whole, means, sizes)
    # The loss has other weights.
    kinds.judge([1.0, 5.0])
    weights = [1 / 6, 5 / 6]
    found = Combination(sizes, weights, kinds).combine(means, (ATTRIBUTE, 0, "mean"))
    assert found == pytest.approx(whole, rel=2e-3, abs=2e-3 * max(map(abs, means)))


@pytest.mark.parametrize("place", [("output",), ("output", "f1"), (ATTRIBUTE, 3, "sums", "f1"), ("list", 0, "f1", 2)])
def test_a_value_is_named_by_the_last_name_of_its_place(place: tuple[Any, ...]) -> None:
    kinds = Kinds()
    kinds.average(place)
    assert kinds.newly_averaged() == ["the output" if place == ("output",) else "'f1'"]
