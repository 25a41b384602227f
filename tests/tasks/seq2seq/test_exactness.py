"""The gradient of a batch is the sum over its parts, however it is cut."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from can_train.task import LogicalBatch
from can_train_tasks.seq2seq import encoder_decoders
from can_train_tasks.seq2seq.pair_tables import END
from can_train_tasks.seq2seq.task import Sample, Seq2seq
from tasks.seq2seq.conftest import MODELS, MakeTask

CPU, EXACT = torch.device("cpu"), 1e-12
BATCH = 13
WITH_FEATURES = tuple(name for name in MODELS if name.endswith("+"))
CUTS = ((13,), (1,) * 13, (5, 1, 7), (12, 1))


def batch_of(task: Seq2seq) -> LogicalBatch:
    return task.logical_batch(task.train_rows[:BATCH], CPU, torch.float64, torch.Generator().manual_seed(0))


def model_of(task: Seq2seq) -> nn.Module:
    torch.manual_seed(0)
    return task.build_model().double()


def gradient(model: nn.Module, batch: LogicalBatch, cut: Sequence[int], *, mean_of_means: bool = False) -> Tensor:
    assert batch.denominators is not None
    model.zero_grad()
    bounds = torch.tensor([0, *cut]).cumsum(0).tolist()
    for start, stop in pairwise(bounds):
        total, own = batch.losses(model, start, stop)["cross_entropy"]
        whole = len(cut) * own if mean_of_means else batch.denominators["cross_entropy"]
        (total / whole).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", MODELS)
def test_any_cut_has_the_gradient_of_the_whole_batch(make_task: MakeTask, name: str) -> None:
    task = make_task(name, label_smoothing=0.1)
    model, batch = model_of(task), batch_of(task)
    whole = gradient(model, batch, (BATCH,))
    assert all(error(gradient(model, batch, cut), whole) <= EXACT for cut in CUTS)
    # The mutant: what a mean over parts of unequal length gives.
    assert error(gradient(model, batch, (5, 1, 7), mean_of_means=True), whole) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_samples_does_not_change_the_gradient(make_task: MakeTask, name: str) -> None:
    task = make_task(name)
    model, rows = model_of(task), task.train_rows[:BATCH]
    batches = [task.logical_batch(order, CPU, torch.float64, torch.Generator()) for order in (rows, rows[::-1].copy())]
    first, second = (gradient(model, batch, (6, 7)) for batch in batches)
    assert error(first, second) <= EXACT


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_no_logit(make_task: MakeTask, name: str) -> None:
    task = make_task(name)
    model = model_of(task).eval()
    samples = [task.sample(int(row)) for row in task.train_rows[:BATCH]]
    assert padding_error(task, model, samples) <= 1e-12


def padding_error(task: Seq2seq, model: nn.Module, samples: Sequence[Sample]) -> float:
    """The largest difference between the logits of samples in one batch, and of each by itself."""
    together, errors = task.collate(samples), []
    logits = model(together.source, together.before, together.features)
    for position, sample in enumerate(samples):
        alone = task.collate([sample])
        assert sample.target is not None
        found = logits[position, : len(sample.target)]
        errors.append((found - model(alone.source, alone.before, alone.features)[0]).detach().abs().max())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_padding_between_a_source_and_its_features_that_is_attended_to_changes_logits(
    make_task: MakeTask, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(name)
    model = model_of(task).eval()
    samples = [task.sample(int(row)) for row in task.train_rows[:BATCH]]
    assert len({len(sample.features) for sample in samples}) > 1

    def joined(source: tuple[Tensor, Tensor], features: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        # The mutant: padding of features is attended to.
        return torch.cat([source[0], features[0]], dim=1), torch.cat([source[1], features[1] & False], dim=1)

    monkeypatch.setattr(encoder_decoders, "_joined", joined)
    assert padding_error(task, model, samples) > 1e-6


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_a_feature_decides_and_in_a_transformer_its_place_does_not(make_task: MakeTask, name: str) -> None:
    task = make_task(name)
    model = model_of(task).eval()
    batch = task.collate([task.sample(int(row)) for row in task.train_rows[:BATCH]])
    logits = model(batch.source, batch.before, batch.features)
    turned = model(batch.source, batch.before, batch.features.flip(1))
    other = model(batch.source, batch.before, torch.where(batch.features > END, batch.features.max(), batch.features))
    assert (torch.allclose(turned, logits, rtol=0, atol=1e-12)) == name.startswith("transformer")
    assert float((other - logits).detach().abs().max()) > 1e-3


def test_denominators_are_the_symbols_of_the_targets_and_their_ends(make_task: MakeTask) -> None:
    task = make_task()
    batch = batch_of(task)
    samples = [task.sample(int(row)) for row in task.train_rows[:BATCH]]
    assert batch.denominators == {"cross_entropy": sum(len(sample.pair.target) + 1 for sample in samples)}
    assert batch.losses(model_of(task), 2, 5)["cross_entropy"][1] == sum(len(one.target) for one in samples[2:5])
