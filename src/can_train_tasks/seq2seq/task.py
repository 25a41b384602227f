"""The seq2seq task: pairs of symbol sequences, padded anew for each micro-batch.

Shapes: N pairs in a batch, S symbols of its longest source, F features of the pair that has most, T symbols of its
longest target, V symbols of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from can_train.errors import ConfigError
from can_train.io.units import counted
from can_train.task import Feature
from can_train.training.sample_task import Task
from can_train.training.task_values import TEST, TRAIN, VALIDATION, Losses
from can_train_tasks.seq2seq import pair_tables
from can_train_tasks.seq2seq.encoder_decoders import AttentiveLstm, Seq2seqModel, Transformer, write
from can_train_tasks.seq2seq.pair_tables import END, PAD, START, Pair, Symbols, Tables, Vocabulary
from can_train_tasks.seq2seq.scoring import SuffixRules, score
from can_train_tasks.seq2seq.settings import TASK
from can_train_tasks.seq2seq.synthetic import synthetic_tables

_TERM: Final = "cross_entropy"
_SETS: Final = {pair_tables.TRAIN: TRAIN, pair_tables.DEV: VALIDATION, pair_tables.TEST: TEST}
# Symbols that a written target may have beyond the longest target of the training pairs.
_SPARE: Final = 5
_NAMED: Final = 10  # unknown symbols that a notice names

# Memory grows with padded symbols. The decoder attends from every symbol of the longest target to every symbol of the
# longest source; the two may belong to different pairs.
_SOURCE, _TARGET = Feature("source symbols", padding=1), Feature("target symbols", padding=1)
_CROSS: Final = Feature("source × target", padding=1, factors=(_SOURCE.name, _TARGET.name))
_SOURCE_SQUARED, _TARGET_SQUARED = Feature("source symbols", padding=2), Feature("target symbols", padding=2)
# Features that an encoder of their own reads are padded by themselves, and the decoder attends to them, too.
_FEATURES, _FEATURES_SQUARED = Feature("features", padding=1), Feature("features", padding=2)
_FEATURES_CROSS: Final = Feature("features × target", padding=1, factors=(_FEATURES.name, _TARGET.name))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A pair and the numbers of its symbols."""

    pair: Pair
    source: Tensor  # [S] symbols and end of the source; before them the features, where it is read with them
    target: Tensor | None  # [T] symbols and end of the target; None where it is to be predicted
    features: Tensor | None = None  # [F] features and an end, where an encoder of their own reads them


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Pairs, padded to the longest source and the longest target."""

    source: Tensor  # [N, S]
    before: Tensor  # [N, T] the start, then the symbols of the target: the decoder's input
    target: Tensor  # [N, T] the symbols of the target, then the end: the decoder's true output. T is 0 without targets
    features: Tensor | None = None  # [N, F] features, where an encoder of their own reads them


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A target that a model wrote."""

    symbols: Symbols
    text: str
    log_likelihood: float  # natural logarithm of its probability, its end included


class Hypotheses(tuple[Hypothesis, ...]):
    """Targets that a model wrote for a source, the best first."""

    __slots__ = ()

    def __str__(self) -> str:
        return self[0].text


class Seq2seq(Task):
    """Learns to write targets from sources and their features."""

    Settings = TASK.settings
    DatasetSettings = TASK.dataset
    models = {name: spec.settings for name, spec in TASK.models.items()}  # noqa: RUF012 - as declared by the base class

    def datasets(self) -> Mapping[str, Sequence[Sample]]:
        """Reads the tables; the vocabulary holds the symbols of the training pairs only."""
        if self._separates_features and not self.vocabulary.has_features:
            raise ConfigError("model.features_encoder reads a column of features",
                              value="the training table has none",
                              remedy="Name it: --set dataset.features_col=3, or leave model.features_encoder away"
                              )  # fmt: skip
        return {
            _SETS[name]: [
                replace(self._unlabelled(pair), target=torch.tensor(self.vocabulary.target(pair))) for pair in pairs
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
        targets = [sample.source[:0] if sample.target is None else sample.target for sample in samples]
        before = [torch.cat([target.new_tensor([START])[: len(target)], target[:-1]]) for target in targets]
        features = [sample.features for sample in samples if sample.features is not None]
        source, shifted, target = map(_padded, ([sample.source for sample in samples], before, targets))
        return Batch(source=source, before=shifted, target=target, features=_padded(features) if features else None)

    def loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Computes the cross-entropy of every symbol of the targets, their ends included."""
        return {_TERM: self._cross_entropy(model, batch, smoothing=self.settings.label_smoothing)}

    def validation_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Computes the cross-entropy without label smoothing."""
        return {_TERM: self._cross_entropy(model, batch, smoothing=0.0)}

    def denominators(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Counts the symbols of the targets, their ends included."""
        return {_TERM: float(sum(map(_target_length, samples)))}

    def features(self, sample: Sample) -> Mapping[str | Feature, float]:
        """Counts the symbols, and the pairs of symbols that attention compares."""
        source, target = float(len(sample.source)), float(_target_length(sample))
        counted: dict[str | Feature, float] = {_SOURCE: source, _TARGET: target, _CROSS: source * target}
        if self.context.model_name == "transformer":
            counted |= {_SOURCE_SQUARED: source, _TARGET_SQUARED: target}
        if sample.features is not None:
            features = float(len(sample.features))
            counted |= {_FEATURES: features, _FEATURES_CROSS: features * target}
            if self.context.model_name == "transformer":
                counted |= {_FEATURES_SQUARED: features}
        return counted

    def call_model(self, model: nn.Module, batch: Batch) -> None:
        """Computes the logits of each next symbol. An exported recurrent network has fixed lengths: PyTorch unrolls
        its loop. The batch is padded to the longest source and the longest target of the data.
        """
        inputs = [batch.source, batch.before, *([] if batch.features is None else [batch.features])]
        if not isinstance(model, Transformer):
            samples = [sample for name in self.sets for sample in self.sets[name]]
            longest = (max(len(each.source) for each in samples), max(map(_target_length, samples)),
                       max(map(_features_length, samples)))  # fmt: skip
            inputs = [pad(each, (0, length - each.shape[1]), value=PAD)
                      for each, length in zip(inputs, longest, strict=False)]  # fmt: skip
        model(*inputs)

    def predict(self, model: nn.Module, batch: Batch) -> list[Hypotheses]:
        """Writes the targets of a batch by beam search."""
        assert isinstance(model, Seq2seqModel)
        written = write(model, batch.source, batch.features, width=self.settings.beam_width,
                        longest=self._longest + _SPARE, symbols=self.vocabulary.writable)  # fmt: skip
        symbols, likelihoods = (values[:, : self.settings.n_best].tolist() for values in written)
        return [Hypotheses(map(self._hypothesis, *of_source)) for of_source in zip(symbols, likelihoods, strict=True)]

    def _hypothesis(self, numbers: Sequence[int], log_likelihood: float) -> Hypothesis:
        symbols = self.vocabulary.written(numbers)
        text = pair_tables.joined(symbols, self.dataset.target_sep)
        return Hypothesis(symbols=symbols, text=text, log_likelihood=log_likelihood)

    def measure(self, samples: Sequence[Sample], predictions: Sequence[Hypotheses]) -> Mapping[str, float]:
        """Computes the share of targets that are written exactly, and the character error rate."""
        return score([sample.pair for sample in samples], [written[0].symbols for written in predictions])

    def samples_to_predict(self) -> Sequence[Sample]:
        """Reads a table, or the test table of a folder; its targets are not looked at."""
        if self.dataset.path and Path(self.dataset.path).is_file():
            path = Path(self.dataset.path)
        else:
            path = [*self._tables.by_name.values()][-1]
        columns = pair_tables.without_target_column(self.dataset, path, has_features=self.vocabulary.has_features)
        pairs = pair_tables.read_table(path, columns, with_targets=False)
        for sentence in self._told_of_unknown(path.name, pairs):
            self.context.reporter.notice(sentence)
        return [self._unlabelled(pair) for pair in pairs]

    def as_sample(self, value: Any) -> Sample:
        """Makes a sample of a source, or of a source and its features, each as text."""
        if isinstance(value, Sample):
            return value
        source, features = (value, "") if isinstance(value, str) else value
        features = features if self.vocabulary.has_features else ""
        return self._unlabelled(pair_tables.pair_of(source, features, self.dataset))

    @property
    def _separates_features(self) -> bool:
        """Whether an encoder of their own reads the features. A model of a subclass need not have the setting."""
        return bool(getattr(self.model_settings, "features_encoder", False))

    def _unlabelled(self, pair: Pair) -> Sample:
        source, features = self.vocabulary.source(pair), self.vocabulary.features(pair)
        if not self._separates_features:
            return Sample(pair=pair, source=torch.tensor([*features, *source]), target=None)
        # With an end no pair is without features: an encoder that attends to nothing has no result.
        return Sample(pair=pair, source=torch.tensor(source), target=None, features=torch.tensor([*features, END]))

    def columns(self, samples: Sequence[Sample], predictions: Sequence[Hypotheses]) -> Mapping[str, Sequence[Any]]:
        """Returns each source and its features, with the targets, their rank and their log-likelihood."""
        rows = [(sample.pair, rank, hypothesis) for sample, written in zip(samples, predictions, strict=True)
                for rank, hypothesis in enumerate(written, start=1)]  # fmt: skip
        columns: dict[str, Sequence[Any]] = {
            "source": [pair_tables.joined(pair.source, self.dataset.source_sep) for pair, *_ in rows],
            "prediction": [hypothesis.text for *_, hypothesis in rows],
            "log_likelihood": [hypothesis.log_likelihood for *_, hypothesis in rows],
        }
        if self.vocabulary.has_features:
            columns["features"] = [pair_tables.joined(pair.features, self.dataset.features_sep) for pair, *_ in rows]
        if self.settings.n_best > 1:
            columns["rank"] = [rank for _, rank, _ in rows]
        return columns

    def baselines(self, samples: Sequence[Sample]) -> Mapping[str, Mapping[str, float]]:
        """Scores copies of the sources, and the most frequent suffix rule for the same features."""
        pairs, rules = [sample.pair for sample in samples], SuffixRules(self._train)
        return {
            "copy of the source": score(pairs, [pair.source for pair in pairs]),
            "most frequent suffix rule": score(pairs, [rules.write(pair) for pair in pairs]),
        }

    def notices(self) -> Sequence[str]:
        """Names the symbols and features that the training data lack, and tells how the sets were made."""
        told = [sentence for name, pairs in self._pairs.items() for sentence in self._told_of_unknown(name, pairs)]
        if covered := self._tables.covered:
            told.append(f"{covered.name} has no targets and is left out; can-train predict RUN --dataset {covered} "
                        "writes them")  # fmt: skip
        copies = len(self._train) - len({*self._train})
        if copies and pair_tables.DEV not in self._pairs:
            told.append(f"{counted(copies, 'training pair', 'are')} a copy of another: a pair may be in training and "
                        "in validation, for which a tenth is kept; --set dataset.dev=FILE validates on a table"
                        )  # fmt: skip
        return (*super().notices(), *told)

    def _told_of_unknown(self, name: str, pairs: Sequence[Pair]) -> list[str]:
        unknown = {"symbol": self.vocabulary.unknown(pairs), "feature": self.vocabulary.unknown_features(pairs)}
        return [f"{counted(len(those), noun)} of {name} {'is' if len(those) == 1 else 'are'} not in the training data: "
                f"{' '.join(sorted(those)[:_NAMED])}" for noun, those in unknown.items() if those]  # fmt: skip

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
        """Returns the vocabulary, and the length of the longest training target."""
        return {**self.vocabulary.to_plain(), "longest": self._longest}

    @cached_property
    def _longest(self) -> int:
        """Symbols of the longest target of the training pairs."""
        longest = self.context.state.get("longest")
        return int(max(len(pair.target) for pair in self._train) if longest is None else longest)

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
        if self.context.state:
            dataset = pair_tables.columns_as_trained(self.dataset, has_features=self.vocabulary.has_features)
        else:
            dataset = pair_tables.with_features_column(self.dataset, tables.train)
        return {name: pair_tables.read_table(path, dataset) for name, path in tables.by_name.items()}

    def _cross_entropy(self, model: nn.Module, batch: Batch, *, smoothing: float) -> tuple[Tensor, Tensor]:
        features = () if batch.features is None else (batch.features,)
        logits = model(batch.source, batch.before, *features)
        total = cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=PAD, reduction="sum",
                              label_smoothing=smoothing)  # fmt: skip
        return total, (batch.target != PAD).sum()


def _target_length(sample: Sample) -> int:
    return 0 if sample.target is None else len(sample.target)


def _features_length(sample: Sample) -> int:
    return 0 if sample.features is None else len(sample.features)


def _padded(sequences: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(sequences), batch_first=True, padding_value=PAD)
