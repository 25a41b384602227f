"""What `scripts/bench/equivalence` judges loops by: its reference, the errors that it finds, and its goal."""

from functools import partial

import pytest
import torch

from bench.measure_equivalence import (
    EXACT,
    LEARNING_RATE,
    NOT_COUNTED,
    OWN,
    PARTS,
    Errors,
    NextWord,
    Settings,
    batches,
    by_hand,
    collate,
    divided,
    draw_sentences,
    errors,
    missed_by_doors,
    missed_goals,
    own_loop,
    share_text,
    whole,
)

SENTENCES = draw_sentences(52)
"""A batch of 32 and one of 20, whose last micro-batch has 4."""


def test_sentences_differ_in_length_and_an_epoch_ends_with_a_smaller_batch() -> None:
    assert [len(batch) for batch in batches(SENTENCES)] == [32, 20]
    assert len({len(sentence) for sentence in SENTENCES}) > 5


def test_padding_is_not_counted_and_changes_nothing() -> None:
    short, long = sorted(SENTENCES, key=len)[:: len(SENTENCES) - 1]
    model = NextWord()
    both = collate([short, long])
    assert int(both["labels"].ne(NOT_COUNTED).sum()) == len(short) + len(long) - 2
    sums = [model.token_loss(**collate([one]), reduction="sum").item() for one in (short, long)]
    assert model.token_loss(**both, reduction="sum").item() == pytest.approx(sum(sums), rel=1e-12)


def test_each_training_has_a_gradient_for_each_step_and_moves_the_weights() -> None:
    result = by_hand(SENTENCES, Settings(2, LEARNING_RATE), whole)
    assert len(result.gradients) == 4
    start = by_hand(SENTENCES, Settings(1, 0.0), whole).weights
    assert not torch.equal(result.weights, start)


@pytest.mark.parametrize("fails_every", [0, 2])
def test_micro_batches_of_can_train_are_exact_and_means_of_means_are_not(fails_every: int) -> None:
    reference = partial(by_hand, SENTENCES, accumulate=whole)
    own = errors(partial(own_loop, SENTENCES, fails_every=fails_every), reference, 2)
    assert max(own[:-1]) <= EXACT
    for always in (True, False):
        off = errors(partial(by_hand, SENTENCES, accumulate=partial(divided, always=always)), reference, 2)
        assert off.worst_gradient >= off.mean_gradient > 0.01
        assert off.change > off.weights > 1e-4


def test_means_divided_by_four_are_off_by_a_quarter_where_there_are_three() -> None:
    batch = batches(SENTENCES)[1]
    gradients = []
    for always in (True, False):
        model = NextWord()
        divided(model, batch, always=always)
        gradients.append(model.words.bias.grad)
    assert torch.allclose(gradients[0] * PARTS, gradients[1] * 3)


def test_a_loop_of_can_train_that_is_off_misses_the_goal() -> None:
    exact, off = Errors(1e-16, 1e-15, 1e-16, 1e-15, 9.0), Errors(1e-16, 1e-3, 1e-16, 1e-15, 9.0)
    assert missed_goals({OWN: exact, "another": off}) == []
    assert missed_goals({OWN: off}) == [f"{OWN}: 1.0e-03 > 1e-12"]
    assert [share_text(share) for share in (0.0, 2e-16, 0.1234)] == ["0", "2e-16", "12.3%"]


def test_a_script_that_changes_without_a_split_or_silently_misses_the_goal() -> None:
    fine = [["bitwise", "2e-16"], ["bitwise", "18.9%, told 93.1%"], ["bitwise", "refused 25.5%"]]
    assert missed_by_doors({"mean": fine}) == []
    changed = [["3e-17", "2e-16"], ["bitwise", "18.9%"], ["bitwise", "2e-07"]]
    names = ("`MicroBatcher`: 3e-17, 2e-16", "Lightning callback: bitwise, 18.9%", "Trainer mixin: bitwise, 2e-07")
    assert missed_by_doors({"mean": changed}) == [f"mean, {name}" for name in names]
