import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train_tasks.seq2seq import scoring
from can_train_tasks.seq2seq.pair_tables import Pair
from can_train_tasks.seq2seq.scoring import SuffixRules, edit_distance, score

TEXTS = st.text("abc", max_size=8)


def pair(source: str, target: str, *features: str) -> Pair:
    return Pair(source=tuple(source), target=tuple(target), features=features)


def slow_distance(first: str, second: str) -> int:
    if not first or not second:
        return len(first) + len(second)
    changed = slow_distance(first[1:], second[1:]) + (first[0] != second[0])
    return min(changed, slow_distance(first[1:], second) + 1, slow_distance(first, second[1:]) + 1)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(scoring).failed == 0


@given(st.text("abc", max_size=4), st.text("abc", max_size=4))
def test_the_distance_is_that_of_the_definition(first: str, second: str) -> None:
    assert edit_distance(first, second) == slow_distance(first, second)


@given(TEXTS, TEXTS, TEXTS)
def test_the_distance_is_a_metric(first: str, second: str, third: str) -> None:
    assert edit_distance(first, second) == edit_distance(second, first)
    assert (edit_distance(first, second) == 0) == (first == second)
    assert edit_distance(first, third) <= edit_distance(first, second) + edit_distance(second, third)


def test_scores_count_exact_targets_and_edits_for_each_symbol_of_the_true_ones() -> None:
    pairs = [pair("a", "abcd"), pair("b", "xy")]
    assert score(pairs, [tuple("abcd"), tuple("yy")]) == {"exact_match": 0.5, "character_error_rate": 1 / 6}


def test_the_most_frequent_rule_of_the_same_features_that_applies_is_taken() -> None:
    train = [pair("kedi", "kediler", "PL"), pair("anne", "anneler", "PL"), pair("oda", "odalar", "PL"),
             pair("gelmek", "geldi", "PST"), pair("koşmak", "koştu", "PST")]  # fmt: skip
    rules = SuffixRules(train)
    assert rules.write(pair("deve", "", "PL")) == tuple("develer")
    assert rules.write(pair("bulmak", "", "PST")) == tuple("bultu")
    assert rules.write(pair("deve", "", "PST")) == tuple("deve")
    assert rules.write(pair("deve", "", "ABL")) == tuple("deve")


@pytest.mark.parametrize("features", [("V", "PST"), ("PST", "V")])
def test_the_order_of_features_says_nothing(features: tuple[str, str]) -> None:
    assert SuffixRules([pair("a", "ab", "V", "PST")]).write(pair("c", "", *features)) == tuple("cb")
