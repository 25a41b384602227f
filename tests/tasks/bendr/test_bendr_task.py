"""However a batch is computed, its gradient is that of the whole batch; and what is learned starts from what was."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from can_train import predict_peak
from can_train.errors import ConfigError, DataError
from can_train.memory.simulated.gpu import LiveStorageTracker
from can_train_tasks.bendr.settings import BendrSettings
from can_train_tasks.bendr.task import Bendr, draw_mask, draw_negatives
from fakes.eeg import CLASSIFY, PRETRAIN, SMALL, SYNTHETIC, eeg_task, finished, write_recording
from fakes.eeg import noise as noise_of

CPU = torch.device("cpu")
EXACT = 1e-12  # relative L2 error in float64
MODES = (PRETRAIN, CLASSIFY)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: mode.name)
def task(request: pytest.FixtureRequest, cache: Path) -> Bendr:
    return eeg_task(request.param, cache)


def batch_of(task: Bendr, size: int, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).choice(task.train_rows, size, replace=False)
    return task.logical_batch(rows, CPU, torch.float64, torch.Generator().manual_seed(seed))


def network(task: Bendr) -> nn.Module:
    torch.manual_seed(0)
    return task.build_model().double().train()


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def accumulated(model: nn.Module, batch: Any, sizes: Sequence[int]) -> tuple[float, Tensor]:
    """Loss and gradient in parts, each over the denominator of the whole batch."""
    (whole,), total, start = batch.denominators.values(), 0.0, 0
    model.zero_grad()
    for size in sizes:
        ((part, _),) = batch.losses(model, start, start + size).values()
        (part / whole).backward()
        total, start = total + float(part.detach()) / whole, start + size
    return total, flat_gradient(model)


def averaged(model: nn.Module, batch: Any, sizes: Sequence[int]) -> tuple[float, Tensor]:
    """What loops do that divide each part's mean by the number of parts."""
    total, start = 0.0, 0
    model.zero_grad()
    for size in sizes:
        ((part, own),) = batch.losses(model, start, start + size).values()
        (part / own / len(sizes)).backward()
        total, start = total + float(part.detach()) / own / len(sizes), start + size
    return total, flat_gradient(model)


def error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (8, 8, 8, 3), (1,) * 11, (5, 1, 13)])
def test_batches_of_eight_accumulate_to_the_large_batch_with_a_remainder_too(
    task: Bendr, sizes: tuple[int, ...]
) -> None:
    model, batch = network(task), batch_of(task, sum(sizes))
    (loss, gradient), (whole_loss, whole) = accumulated(model, batch, sizes), accumulated(model, batch, (sum(sizes),))
    assert abs(loss - whole_loss) <= EXACT * abs(whole_loss)
    assert error(gradient, whole) <= EXACT


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(0, 1000))
@settings(max_examples=15)
def test_any_cut_of_a_batch_has_the_gradient_of_the_whole(cache: Path, sizes: list[int], seed: int) -> None:
    task = eeg_task(PRETRAIN, cache)
    model, batch = network(task), batch_of(task, sum(sizes), seed)
    assert error(accumulated(model, batch, sizes)[1], accumulated(model, batch, (sum(sizes),))[1]) <= EXACT


def test_dividing_by_the_number_of_parts_would_be_noticed(task: Bendr) -> None:
    """The mutant: the described system's way, whose remainder counts as much as a full batch."""
    model, batch = network(task), batch_of(task, 27)
    (loss, gradient), (whole_loss, whole) = averaged(model, batch, (8, 8, 8, 3)), accumulated(model, batch, (27,))
    assert error(gradient, whole) > 1e-3
    assert abs(loss - whole_loss) > 1e-5


def test_drawing_for_each_part_anew_would_be_noticed(cache: Path) -> None:
    """The mutant: masks and negatives of a part that depend on how the batch is cut."""
    task = eeg_task(PRETRAIN, cache)
    model, rows = network(task), task.train_rows[:16]
    parts = [task.logical_batch(rows[start : start + 8], CPU, torch.float64, torch.Generator().manual_seed(0))
             for start in (0, 8)]  # fmt: skip
    whole = task.logical_batch(rows, CPU, torch.float64, torch.Generator().manual_seed(0))
    _, expected = accumulated(model, whole, (16,))
    model.zero_grad()
    for part in parts:
        ((total, _),) = part.losses(model, 0, 8).values()
        (total / sum(sum(one.denominators.values()) for one in parts)).backward()
    assert error(flat_gradient(model), expected) > 1e-2


def test_denominators_are_those_of_the_loss(task: Bendr) -> None:
    batch = batch_of(task, 9)
    losses = batch.losses(network(task), 0, 9)
    assert dict(batch.denominators) == {name: own for name, (_, own) in losses.items()}


def test_validation_draws_the_same_however_it_is_cut(cache: Path) -> None:
    task = eeg_task(PRETRAIN, cache)
    model, rows = network(task).eval(), task.validation_rows
    whole = task.logical_batch(rows, CPU, torch.float64, None).losses(model, 0, len(rows))
    single = [task.logical_batch(rows[at : at + 1], CPU, torch.float64, None).losses(model, 0, 1)
              for at in range(len(rows))]  # fmt: skip
    assert whole["contrast"][1] == sum(one["contrast"][1] for one in single)
    assert float(whole["contrast"][0].detach()) == pytest.approx(
        sum(float(one["contrast"][0].detach()) for one in single), rel=1e-12
    )


@given(st.integers(11, 300), st.integers(1, 10), st.floats(0.001, 0.3), st.integers(0, 2**31))
def test_masks_are_whole_spans_and_negatives_are_other_steps(steps: int, span: int, rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    masked, negatives = draw_mask(steps, rate, span, generator), draw_negatives(steps, 20, generator)
    runs = "".join(str(int(one)) for one in masked).split("0")
    assert all(not run or len(run) >= span for run in runs)
    assert span <= int(masked.sum()) <= span * max(1, round(rate * steps))
    assert negatives.shape == (steps, 20)
    assert not (negatives == torch.arange(steps)[:, None]).any()
    assert 0 <= int(negatives.min()) <= int(negatives.max()) < steps


def test_negatives_are_all_other_steps_alike() -> None:
    drawn = draw_negatives(5, 20_000, torch.Generator().manual_seed(0))
    for step in range(5):
        shares = torch.bincount(drawn[step], minlength=5) / 20_000
        assert float(shares[step]) == 0
        assert (torch.cat([shares[:step], shares[step + 1 :]]) - 0.25).abs().max() < 0.02


@given(st.integers(1, 200), st.lists(st.integers(1, 4), min_size=1, max_size=3))
@settings(max_examples=25)
def test_the_encoder_makes_as_many_steps_as_are_counted(samples: int, strides: list[int]) -> None:
    model = replace(SMALL, strides=strides)
    with torch.no_grad():
        encoded = _network(model).encode(torch.zeros(1, 2, samples))
    assert encoded.shape == (1, model.steps(samples), SMALL.hidden)


def _network(model: BendrSettings) -> Any:
    from can_train_tasks.bendr.network import BendrNetwork

    return BendrNetwork(model, channels=2)


def test_the_loss_is_the_cross_entropy_of_cosine_similarities_at_masked_steps(cache: Path) -> None:
    """By the definition, step by step."""
    task = eeg_task(PRETRAIN, cache)
    model, batch = network(task), batch_of(task, 3)
    collated = batch.collated(0, 3)
    with torch.no_grad():
        encoded = model.encode(collated["signal"])  # type: ignore[operator]
        guessed = model.contextualizer(encoded, collated["masked"])  # type: ignore[operator]
        total = 0.0
        for n, step in collated["masked"].nonzero():
            others = torch.cat([encoded[n, step][None], encoded[n, collated["negatives"][n, step]]])
            similar = nn.functional.cosine_similarity(guessed[n, step][None], others) / PRETRAIN.temperature
            total -= float(similar.log_softmax(0)[0])
        assert float(batch.losses(model, 0, 3)["contrast"][0]) == pytest.approx(total, rel=1e-10)


def test_masked_steps_are_hidden_from_what_guesses_them(cache: Path) -> None:
    model = network(eeg_task(PRETRAIN, cache)).eval()
    encoded, masked = torch.randn(1, 40, SMALL.hidden, dtype=torch.float64), torch.zeros(1, 40, dtype=torch.bool)
    masked[0, 10:20] = True
    changed = encoded.clone()
    changed[0, 10:20] *= -1
    assert torch.equal(model.contextualizer(encoded, masked), model.contextualizer(changed, masked))  # type: ignore[operator]
    assert not torch.allclose(model.contextualizer(encoded), model.contextualizer(changed))  # type: ignore[operator]


def test_a_classifier_starts_from_the_weights_of_a_pretrained_run(cache: Path) -> None:
    pretrained = network(eeg_task(PRETRAIN, cache)).float()
    with torch.no_grad():
        for one in pretrained.parameters():
            one.add_(1.0)
    task = eeg_task(CLASSIFY, cache, finished={"pretrained": finished(pretrained.state_dict())})
    weights = task.build_model().state_dict()
    assert all(torch.equal(weights[name], value) for name, value in pretrained.state_dict().items())
    assert set(weights) - set(pretrained.state_dict()) == {"head.weight", "head.bias"}
    other = eeg_task(CLASSIFY, cache, model=replace(SMALL, hidden=32), finished=task.context.finished)
    with pytest.raises(ConfigError, match="the same channels and model"):
        other.build_model()


def test_windows_that_are_shorter_than_a_masked_span_are_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match="more steps than a masked span"):
        _ = eeg_task(PRETRAIN, cache, replace(SYNTHETIC, window_s=0.5)).sets


def test_classification_without_labels_is_refused(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "one.csv", noise_of(5000))
    dataset = replace(SYNTHETIC, name="own", path=str(path))
    with pytest.raises(DataError, match="a label for each sample"):
        _ = eeg_task(CLASSIFY, tmp_path, dataset).sets
    write_recording(path, noise_of(5000), np.ones(5000))
    with pytest.raises(DataError, match="two classes"):
        _ = eeg_task(CLASSIFY, tmp_path, dataset).sets
    assert len(eeg_task(PRETRAIN, tmp_path, dataset).train_rows) > 10


def test_a_plan_needs_a_sample_of_the_data_and_writes_nothing(tmp_path: Path) -> None:
    whole = eeg_task(PRETRAIN, tmp_path / "whole")
    sampled = eeg_task(PRETRAIN, tmp_path / "nothing", sampling=True)
    assert 10 < len(sampled.train_rows) < len(whole.train_rows)
    assert sampled.estimated_train_rows == pytest.approx(len(whole.train_rows), rel=0.1)
    assert sampled.sample_note
    assert not (tmp_path / "nothing").exists()


def test_a_pretrained_model_beats_chance_and_a_classifier_the_most_frequent_class(cache: Path) -> None:
    rng = np.random.default_rng(0)

    def trained(task: Bendr, steps: int) -> nn.Module:
        torch.manual_seed(0)
        model = task.build_model().train()
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for step in range(steps):
            rows = rng.choice(task.train_rows, 16, replace=False)
            batch = task.logical_batch(rows, CPU, torch.float32, torch.Generator().manual_seed(step))
            ((total, own),) = batch.losses(model, 0, 16).values()
            optimizer.zero_grad()
            (total / own).backward()
            optimizer.step()
        return model.eval()

    def judged(task: Bendr, model: nn.Module) -> tuple[dict[str, float], Any]:
        rows = task.set_rows["test"]
        samples = [task.sample(int(row)) for row in rows]
        whole: Any = task.logical_batch(rows, CPU, torch.float32, None)
        batch = whole.collated(0, len(rows))
        with torch.no_grad():
            found = {name: float(total) / float(own) for name, (total, own) in task.metrics(model, batch).items()}
            predictions = task.predict(model, batch)
        measured = {} if predictions is None else task.measure(samples, list(predictions))
        return {**found, **measured}, task.baselines(samples)

    pretrain, classify = eeg_task(PRETRAIN, cache), eeg_task(CLASSIFY, cache)
    found, beside = judged(pretrain, trained(pretrain, 60))
    assert beside["chance"]["contrastive_accuracy"] == pytest.approx(1 / 21)
    assert found["contrastive_accuracy"] > 1.3 / 21
    found, beside = judged(classify, trained(classify, 60))
    assert beside["most frequent class"]["balanced_accuracy"] == 0.5
    assert beside["logistic regression on band powers"]["auroc"] > 0.7
    assert found["auroc"] > 0.6


def measured_peak(task: Bendr, size: int) -> int:
    model = task.build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    optimizer.zero_grad()
    tracker = LiveStorageTracker(2**62, [*model.parameters(), *model.buffers(), *state])
    with tracker:
        rows = np.resize(task.train_rows, size)
        batch = task.logical_batch(rows, CPU, torch.float32, torch.Generator().manual_seed(1))
        ((total, own),) = batch.losses(model, 0, size).values()
        (total / own).backward()
        optimizer.step()
    return int(tracker.peak_bytes)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_memory_is_predicted_from_the_number_of_windows(task: Bendr, cache: Path, dropout: float) -> None:
    one = eeg_task(task.mode, cache, replace(SYNTHETIC, window_s=2.0), model=replace(SMALL, dropout=dropout))
    prediction = predict_peak(one, 300)
    assert prediction.explains
    assert prediction.peak_bytes == pytest.approx(measured_peak(one, 300), rel=0.03)


def test_samples_are_alike_so_that_no_batch_is_padded(task: Bendr) -> None:
    assert [feature.name for feature in task.memory_features] == ["samples"]
    shapes: Callable[[Any], Any] = lambda sample: sample["signal"].shape  # noqa: E731
    assert len({shapes(task.sample(int(row))) for row in task.train_rows}) == 1
    assert task.describe(0) == "recording_001.csv at 0.00 s"
