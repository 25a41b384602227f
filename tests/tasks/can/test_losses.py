"""The CAN losses are sums: cut anywhere, they give the gradient of the whole logical batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.fit.micro_batcher import Losses
from can_train_tasks.can.data.batches import Gatherer, GraphBatch
from can_train_tasks.can.data.graphs import FlatGraphs
from can_train_tasks.can.inputs import InputEncoder, InputStatistics
from can_train_tasks.can.losses import (
    AutoencoderBatch,
    ClassifierBatch,
    DistilledAutoencoderBatch,
    DistilledClassifierBatch,
)
from can_train_tasks.can.models import GatClassifier, Vgae
from can_train_tasks.can.settings import CanDatasetSettings, GatSettings, VgaeSettings
from fakes.random_bus import cached_graphs, random_blocks
from fakes.split_gradients import gradient, relative_error

WINDOWS = 23
CUTS = (3, 11, 1, 8)
WEIGHTS = {
    "classification": 1.0, "node": 1.0, "edge": 1.0, "can_id": 0.1, "kl": 0.01,
    "distillation": 11.2, "teacher_latent": 0.5, "teacher_node": 0.25, "teacher_edge": 0.25,
}  # fmt: skip


@pytest.fixture
def flat(tmp_path: Path) -> FlatGraphs:
    return cached_graphs(tmp_path / "graphs", [random_blocks(WINDOWS)])


def inputs(flat: FlatGraphs) -> InputEncoder:
    statistics = InputStatistics.fit(flat, np.arange(len(flat)))
    return InputEncoder(statistics, embedding=4, dataset=CanDatasetSettings(identity=True))


def gatherer(flat: FlatGraphs) -> Callable[[NDArray[np.int64]], GraphBatch]:
    gather = Gatherer(flat)
    return lambda rows: gather(rows).to("cpu", torch.float64)


def classifier(flat: FlatGraphs) -> tuple[nn.Module, ClassifierBatch]:
    model = GatClassifier(GatSettings(hidden=4, layers=2, heads=2, dropout=0.0), inputs(flat)).double()
    weights = np.where(flat.label > 0, 20.0, 0.5)
    return model, ClassifierBatch(np.arange(WINDOWS), gatherer(flat), weights)


def autoencoder(flat: FlatGraphs) -> tuple[nn.Module, AutoencoderBatch]:
    model = Vgae(VgaeSettings(hidden=[16, 8], latent=3, heads=2, dropout=0.0), inputs(flat)).double()
    counts = (flat.num_nodes, flat.num_edges)
    generator = torch.Generator().manual_seed(3)
    return model, AutoencoderBatch.draw(np.arange(WINDOWS), gatherer(flat), counts, 3, generator)


def distilled_classifier(flat: FlatGraphs) -> tuple[nn.Module, DistilledClassifierBatch]:
    model, _ = classifier(flat)
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 3, (WINDOWS, 2)))
    weights = np.where(flat.label > 0, 20.0, 0.5)
    return model, DistilledClassifierBatch(
        np.arange(WINDOWS), gatherer(flat), weights, lambda rows: {"logits": logits[rows]}, 4.0
    )


def distilled_autoencoder(flat: FlatGraphs) -> tuple[nn.Module, DistilledAutoencoderBatch]:
    model = Vgae(VgaeSettings(hidden=[16, 8], latent=3, heads=2, dropout=0.0), inputs(flat), projected=5).double()
    teacher = Vgae(VgaeSettings(hidden=[24, 8], latent=5, heads=2, dropout=0.0), inputs(flat)).double().eval()
    gather = gatherer(flat)

    def answers(rows: NDArray[np.int64]) -> dict[str, Tensor]:
        with torch.no_grad():
            told = teacher.decode(teacher.prepared(gather(rows)), None)
        return {"latent": told.mean, "node": told.node, "edge": told.edge}

    _, own = autoencoder(flat)
    return model, DistilledAutoencoderBatch(**vars(own), teacher=answers)


MADE = [classifier, autoencoder, distilled_classifier, distilled_autoencoder]


@pytest.mark.parametrize("make", MADE)
def test_a_split_batch_has_the_gradient_of_the_whole(
    flat: FlatGraphs, make: Callable[[FlatGraphs], tuple[nn.Module, ClassifierBatch]]
) -> None:
    model, batch = make(flat)
    whole = gradient(model, batch, (WINDOWS,), WEIGHTS)
    assert whole.norm() > 0
    assert relative_error(gradient(model, batch, CUTS, WEIGHTS), whole) <= 1e-12


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("share", [lambda size: 1 / len(CUTS), lambda size: size / WINDOWS], ids=["parts", "samples"])
def test_means_of_the_parts_by_number_of_parts_or_of_samples_give_another_gradient(
    flat: FlatGraphs,
    make: Callable[[FlatGraphs], tuple[nn.Module, ClassifierBatch]],
    share: Callable[[int], float],
) -> None:
    model, batch = make(flat)
    whole = gradient(model, batch, (WINDOWS,), WEIGHTS)

    class Mutant:
        denominators = batch.denominators

        @staticmethod
        def losses(model: nn.Module, start: int, stop: int) -> Losses:
            terms = batch.losses(model, start, stop)
            scale = share(stop - start)
            return {term: (total / own * batch.denominators[term] * scale, own) for term, (total, own) in terms.items()}

    assert relative_error(gradient(model, Mutant(), CUTS, WEIGHTS), whole) > 1e-3


@pytest.mark.parametrize("make", MADE)
def test_denominators_are_the_sums_of_the_parts(
    flat: FlatGraphs, make: Callable[[FlatGraphs], tuple[nn.Module, ClassifierBatch]]
) -> None:
    model, batch = make(flat)
    parts = [batch.losses(model, 0, 9), batch.losses(model, 9, WINDOWS)]
    for term, whole in batch.denominators.items():
        assert sum(part[term][1] for part in parts) == pytest.approx(whole)


def test_noise_drawn_again_for_each_part_is_another_gradient(flat: FlatGraphs) -> None:
    model, batch = autoencoder(flat)
    whole = gradient(model, batch, (WINDOWS,), WEIGHTS)
    assert batch.noise is not None
    rolled = replace(batch, noise=np.roll(batch.noise, 1, axis=0))
    assert relative_error(gradient(model, rolled, CUTS, WEIGHTS), whole) > 1e-3


def test_a_students_loss_is_hintons(flat: FlatGraphs) -> None:
    model, batch = distilled_classifier(flat)
    model.eval()
    mine, its = model(gatherer(flat)(np.arange(WINDOWS))), batch.teacher(np.arange(WINDOWS))["logits"]
    expected = F.kl_div(F.log_softmax(mine / 4, 1), F.softmax(its / 4, 1), reduction="batchmean")
    total, count = batch.losses(model, 0, WINDOWS)["distillation"]
    assert count == WINDOWS
    assert float(total.detach() / count) == pytest.approx(float(expected.detach()))


def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(flat: FlatGraphs) -> None:
    model, own = autoencoder(flat)
    assert isinstance(model, Vgae)
    model.projection = nn.Linear(3, 3).double()
    nn.init.eye_(model.projection.weight)
    nn.init.zeros_(model.projection.bias)
    gather = gatherer(flat)

    def answers(rows: NDArray[np.int64]) -> dict[str, Tensor]:
        told = model.decode(model.prepared(gather(rows)), None)
        return {"latent": told.mean, "node": told.node, "edge": told.edge}

    terms = DistilledAutoencoderBatch(**vars(replace(own, noise=None)), teacher=answers).losses(model, 0, WINDOWS)
    assert all(float(terms[f"teacher_{part}"][0].detach()) == 0 for part in ("latent", "node", "edge"))
    assert float(terms["node"][0].detach()) > 0


def test_a_teachers_answers_for_other_windows_are_another_gradient(flat: FlatGraphs) -> None:
    model, batch = distilled_classifier(flat)
    whole, answers = gradient(model, batch, (WINDOWS,), WEIGHTS), batch.teacher
    other = replace(batch, teacher=lambda rows: answers(np.arange(len(rows))))
    assert relative_error(gradient(model, other, CUTS, WEIGHTS), whole) > 1e-3


def test_without_an_identity_there_is_no_term_for_it(flat: FlatGraphs) -> None:
    statistics = InputStatistics.fit(flat, np.arange(len(flat)))
    encoder = InputEncoder(statistics, embedding=4, dataset=CanDatasetSettings(identity=False))
    model = Vgae(VgaeSettings(hidden=[8], latent=2, heads=2), encoder).double()
    _, batch = autoencoder(flat)
    assert set(replace(batch, noise=None).losses(model, 0, 4)) == {"node", "edge", "kl"}


def test_an_autoencoders_scores_are_means_over_each_windows_own_parts(flat: FlatGraphs) -> None:
    model, _ = autoencoder(flat)
    gather = gatherer(flat)
    model.eval()
    alone = torch.cat([AutoencoderBatch.scores(model, gather(np.array([row]))) for row in range(6)])
    assert torch.allclose(AutoencoderBatch.scores(model, gather(np.arange(6))), alone, rtol=1e-5)
