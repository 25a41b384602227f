"""Scores predicted targets against true targets; and the suffix rules, a baseline for a model's score."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from can_train_tasks.seq2seq.pair_tables import Pair, Symbols

EXACT_MATCH, ERROR_RATE = "exact_match", "character_error_rate"


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Counts the insertions, deletions and substitutions that turn one sequence into the other.

    >>> edit_distance("kitten", "sitting")
    3

    Source: Wagner & Fischer 1974.
    """
    row = list(range(len(second) + 1))
    for number, symbol in enumerate(first, start=1):
        left = [number]
        for (diagonal, above), other in zip(pairwise(row), second, strict=True):
            left.append(min(above + 1, left[-1] + 1, diagonal + (symbol != other)))
        row = left
    return row[-1]


def score(pairs: Sequence[Pair], written: Sequence[Symbols]) -> dict[str, float]:
    """Returns the share of targets that are written exactly, and the edits ÷ the symbols of the true targets."""
    exact = sum(pair.target == answer for pair, answer in zip(pairs, written, strict=True))
    edits = sum(edit_distance(answer, pair.target) for pair, answer in zip(pairs, written, strict=True))
    symbols = sum(len(pair.target) for pair in pairs)
    return {EXACT_MATCH: exact / len(pairs), ERROR_RATE: edits / symbols}


class SuffixRule(NamedTuple):
    """Turns a source into a target: takes the symbols `taken` from its end and adds the symbols `added`."""

    taken: Symbols
    added: Symbols

    @classmethod
    def of(cls, pair: Pair) -> "SuffixRule":
        """Returns the rule that turns the source into the target and takes the fewest symbols."""
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(pair.source, pair.target, strict=False))
        kept = sum(1 for _ in alike)
        return cls(pair.source[kept:], pair.target[kept:])

    def apply(self, source: Symbols) -> Symbols | None:
        """Returns the target that the rule makes of a source; None if the source does not end with `taken`."""
        kept = len(source) - len(self.taken)
        return source[:kept] + self.added if source[kept:] == self.taken else None


class SuffixRules:
    """Writes targets by the rule that is most frequent among the training pairs with the same features."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        rules: Mapping[Symbols, Counter[SuffixRule]] = defaultdict(Counter)
        for pair in pairs:
            # The order of features has no meaning.
            rules[tuple(sorted(pair.features))][SuffixRule.of(pair)] += 1
        self._rules = {features: [rule for rule, _ in counted.most_common()] for features, counted in rules.items()}

    def write(self, pair: Pair) -> Symbols:
        """Returns the target that the most frequent applicable rule makes; the source itself where no rule applies."""
        rules = self._rules.get(tuple(sorted(pair.features)), [])
        targets = (rule.apply(pair.source) for rule in rules)
        return next((target for target in targets if target is not None), pair.source)
