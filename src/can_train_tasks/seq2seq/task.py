"""The seq2seq task: pairs of symbol sequences, padded anew for each micro-batch.

Shapes: N pairs in a batch, S symbols of its longest source, T symbols of its longest target, V symbols of the
vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from can_train.task import Feature
from can_train.training.sample_task import TEST, TRAIN, VALIDATION, Losses, Task
from can_train_tasks.seq2seq import pair_tables
from can_train_tasks.seq2seq.encoder_decoders import AttentiveLstm, Seq2seqModel, Transformer, write
from can_train_tasks.seq2seq.pair_tables import PAD, START, Pair, Symbols, Tables, Vocabulary
from can_train_tasks.seq2seq.scoring import SuffixRules, score
from can_train_tasks.seq2seq.settings import TASK
from can_train_tasks.seq2seq.synthetic import synthetic_tables

_TERM: Final = "cross_entropy"
_SETS: Final = {pair_tables.TRAIN: TRAIN, pair_tables.DEV: VALIDATION, pair_tables.TEST: TEST}
# Symbols that a written target may have beyond the longest target of the training pairs.
_SPARE: Final = 5

# Memory grows with padded symbols. The decoder attends from every symbol of the longest target to every symbol of the
# longest source; the two may belong to different pairs.
_SOURCE, _TARGET = Feature("source symbols", padding=1), Feature("target symbols", padding=1)
_CROSS: Final = Feature("source × target", padding=1, factors=(_SOURCE.name, _TARGET.name))
_SOURCE_SQUARED, _TARGET_SQUARED = Feature("source symbols", padding=2), Feature("target symbols", padding=2)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A pair and the numbers of its symbols."""

    pair: Pair
    source: Tensor  # [S] features, symbols and end of the source
    target: Tensor  # [T] symbols and end of the target


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Pairs, padded to the longest source and the longest target."""

    source: Tensor  # [N, S]
    before: Tensor  # [N, T] the start, then the symbols of the target: the decoder's input
    target: Tensor  # [N, T] the symbols of the target, then the end: the decoder's true output


class Seq2seq(Task):
    """Learns to write targets from sources and their features."""

    Settings = TASK.settings
    DatasetSettings = TASK.dataset
    models = {name: spec.settings for name, spec in TASK.models.items()}  # noqa: RUF012 - as declared by the base class

    def datasets(self) -> Mapping[str, Sequence[Sample]]:
        """Reads the tables; the vocabulary holds the symbols of the training pairs only."""
        numbers = self.vocabulary
        return {
            _SETS[name]: [
                Sample(pair=pair, source=torch.tensor(numbers.source(pair)), target=torch.tensor(numbers.target(pair)))
                for pair in pairs
            ]
            for name, pairs in self._pairs.items()
        }

    def model(self) -> nn.Module:
        """Makes the network that `--model` names."""
        symbols = len(self.vocabulary)
        if self.context.model_name == "transformer":
            return Transformer(self.model_settings, symbols)
        return AttentiveLstm(self.model_settings, symbols)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Pads sources to the longest source, and targets to the longest target."""
        before = [torch.cat([sample.target.new_tensor([START]), sample.target[:-1]]) for sample in samples]
        sequences = ([sample.source for sample in samples], before, [sample.target for sample in samples])
        source, shifted, target = (pad_sequence(one, batch_first=True, padding_value=PAD) for one in sequences)
        return Batch(source=source, before=shifted, target=target)

    def loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Computes the cross-entropy of every symbol of the targets, their ends included."""
        return {_TERM: self._cross_entropy(model, batch, smoothing=self.settings.label_smoothing)}

    def validation_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Computes the cross-entropy without label smoothing."""
        return {_TERM: self._cross_entropy(model, batch, smoothing=0.0)}

    def denominators(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Counts the symbols of the targets, their ends included."""
        return {_TERM: float(sum(len(sample.target) for sample in samples))}

    def features(self, sample: Sample) -> Mapping[str | Feature, float]:
        """Counts the symbols, and the pairs of symbols that attention compares."""
        source, target = float(len(sample.source)), float(len(sample.target))
        counted: dict[str | Feature, float] = {_SOURCE: source, _TARGET: target, _CROSS: source * target}
        if self.context.model_name == "transformer":
            counted |= {_SOURCE_SQUARED: source, _TARGET_SQUARED: target}
        return counted

    def predict(self, model: nn.Module, batch: Batch) -> list[Symbols]:
        """Writes the targets of a batch by beam search."""
        assert isinstance(model, Seq2seqModel)
        longest = max(len(pair.target) for pair in self._train) + _SPARE
        numbers = write(model, batch.source, width=self.settings.beam_width, longest=longest)
        return [self.vocabulary.written(row) for row in numbers.tolist()]

    def measure(self, samples: Sequence[Sample], predictions: Sequence[Symbols]) -> Mapping[str, float]:
        """Computes the share of targets that are written exactly, and the character error rate."""
        return score([sample.pair for sample in samples], [tuple(one) for one in predictions])

    def baselines(self, samples: Sequence[Sample]) -> Mapping[str, Mapping[str, float]]:
        """Scores copies of the sources, and the most frequent suffix rule for the same features."""
        pairs, rules = [sample.pair for sample in samples], SuffixRules(self._train)
        return {
            "copy of the source": score(pairs, [pair.source for pair in pairs]),
            "most frequent suffix rule": score(pairs, [rules.write(pair) for pair in pairs]),
        }

    def notices(self) -> Sequence[str]:
        """Names the symbols that the training data lack, and tells how the sets were made."""
        unknown = {name: self.vocabulary.unknown(pairs) for name, pairs in self._pairs.items()}
        told = [f"{len(symbols)} symbols of {name} are not in the training data: {' '.join(sorted(symbols)[:10])}"
                for name, symbols in unknown.items() if symbols]  # fmt: skip
        return (*super().notices(), *told)

    def data_digest(self) -> str:
        """Returns the digest of the tables."""
        return pair_tables.digest_of(self._tables)

    def describe(self, row: int) -> str:
        """Names a pair in a message by its source."""
        sample = self.sample(row)
        return f"{super().describe(row)} ({pair_tables.joined(sample.pair.source, self.dataset.source_sep):.40})"

    @classmethod
    def files(cls, dataset: Any, data_root: Path) -> Sequence[Path]:
        """Lists the tables."""
        return pair_tables.data_files(dataset, data_root)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The symbols that the model was trained on: from the run's state if there is one, else the training pairs."""
        known = self.context.state
        return Vocabulary(known["symbols"], known["features"]) if known else Vocabulary.of(self._train)

    def state(self) -> Mapping[str, Any]:
        """Returns the vocabulary."""
        return self.vocabulary.to_plain()

    @property
    def _train(self) -> list[Pair]:
        return self._pairs[pair_tables.TRAIN]

    @cached_property
    def _tables(self) -> Tables:
        if self.dataset.is_synthetic:
            return synthetic_tables(self.context.cache, self.dataset.synthetic)
        return pair_tables.find_tables(self.dataset, self.context.data_root)

    @cached_property
    def _pairs(self) -> Mapping[str, list[Pair]]:
        tables = self._tables
        dataset = pair_tables.with_features_column(self.dataset, tables.train)
        return {name: pair_tables.read_table(path, dataset) for name, path in tables.by_name.items()}

    def _cross_entropy(self, model: nn.Module, batch: Batch, *, smoothing: float) -> tuple[Tensor, Tensor]:
        logits = model(batch.source, batch.before)
        total = cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=PAD, reduction="sum",
                              label_smoothing=smoothing)  # fmt: skip
        return total, (batch.target != PAD).sum()
