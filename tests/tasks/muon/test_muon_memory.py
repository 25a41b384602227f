"""The memory of a batch of showers is bounded and predicted, whatever the generator does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from can_train import predict_peak
from can_train.config.settings import TrainingSettings
from can_train.memory.simulated.gpu import LiveStorageTracker
from can_train_tasks.muon.point_sets import MuonGan
from can_train_tasks.muon.task import MuonTask
from fakes.muon_tasks import in_phase, muon_task

ENDLESS = 2**62
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> MuonTask:
    return muon_task(tmp_path_factory.mktemp("cache"), hidden=32)


def peak_of(task: MuonTask, model: nn.Module, rows: np.ndarray, precision: str = "fp32") -> int:
    """The peak of a step in the middle of a run, as the simulated GPU counts it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = [torch.zeros_like(parameter) for parameter in trained for _ in range(2)]
    tracker = LiveStorageTracker(ENDLESS, [*model.parameters(), *model.buffers(), *state])
    with tracker:
        batch = task.logical_batch(rows, CPU, torch.float32, torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
            terms = batch.losses(model, 0, len(rows))
        sum(total / own for total, own in terms.values()).backward()
    for parameter in trained:
        parameter.grad = None
    return tracker.peak_bytes


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", [0, 1], ids=["critic", "generator"])
def test_a_peak_is_predicted_within_three_per_cent(task: MuonTask, phase: int, precision: str) -> None:
    own = task.phases()[phase]
    task = in_phase(task, own)
    # The other phase's parameters are frozen in its model, and it is the only one.
    task.phases = lambda: (replace(own, parameters=()),)  # type: ignore[method-assign]
    rows = np.random.default_rng(0).choice(task.train_rows, 500)
    found = predict_peak(task, rows, training=TrainingSettings(optimizer="adam", precision=precision))
    # Probes are of a few MiB.
    assert found.explains
    peak = peak_of(task, task.build_model(), rows, precision)
    assert peak > 12 * 2**20
    assert found.peak_bytes == pytest.approx(peak, rel=0.01)


def told_to_make(task: MuonTask, logarithm: float) -> MuonGan:
    model = task.build_model()
    assert isinstance(model, MuonGan)
    with torch.no_grad():
        model.generator.multiplicity.output.bias[0] = logarithm
    return model


@pytest.mark.parametrize("phase", [0, 1], ids=["critic", "generator"])
def test_memory_does_not_depend_on_how_many_muons_the_generator_wants(task: MuonTask, phase: int) -> None:
    task = in_phase(task, task.phases()[phase])
    peaks = {peak_of(task, told_to_make(task, wanted), task.train_rows[:20]) for wanted in (-50.0, 0.0, 50.0)}
    assert len(peaks) == 1


@pytest.mark.parametrize("wanted", [-1e30, -5.0, 0.0, 5.0, 1e30, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("most", [2, 17, 100_000])
def test_no_event_is_given_more_muons_than_its_bound(tmp_path_factory: pytest.TempPathFactory, wanted: float,
                                                     most: int) -> None:  # fmt: skip
    task = muon_task(tmp_path_factory.getbasetemp() / "bounds", most=most)
    model, size = told_to_make(task, wanted), len(task.train_rows)
    batch = task.logical_batch(task.train_rows, CPU, torch.float32, torch.Generator().manual_seed(1))
    generated, counts = model.generator(batch.collated(0, size))
    bounds = torch.tensor([task.sample(int(row)).bound for row in task.train_rows])
    assert len(generated) == int(bounds.sum()) == task.batch_features(task.train_rows)[:, 1].sum()
    assert bool((counts >= 1).all() and (counts <= bounds).all())
    assert int(bounds.max()) <= most
    if wanted == 1e30:
        assert torch.equal(counts, bounds)


def test_the_main_feature_counts_real_and_generated_muons(task: MuonTask) -> None:
    assert [feature.name for feature in task.memory_features] == ["muons", "generated muons", "pairs", "samples"]
    for row, counted in zip(task.train_rows, task.batch_features(task.train_rows), strict=True):
        event = task.sample(int(row))
        assert counted.tolist() == [len(event.muons) + event.bound, event.bound, min(len(event.muons), event.bound), 1]


def test_the_bound_follows_what_the_conditions_let_expect(tmp_path: Path) -> None:
    narrow, wide = (muon_task(tmp_path, bound=bound) for bound in (1.0, 3.0))
    for row in narrow.train_rows:
        one, other = narrow.sample(int(row)), wide.sample(int(row))
        assert one.bound < other.bound <= 3 * one.bound
    counts = np.array([[len(wide.sample(int(row)).muons), wide.sample(int(row)).bound] for row in wide.train_rows])
    assert np.corrcoef(np.log(counts.T))[0, 1] > 0.8
