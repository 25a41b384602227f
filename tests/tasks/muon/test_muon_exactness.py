"""The gradient of a batch of showers is the same however it is cut; what the mutants do is not."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from can_train.task import LogicalBatch
from can_train.training.sample_task import SampleBatch
from can_train_tasks.muon.point_sets import MuonGan
from can_train_tasks.muon.task import MuonTask
from fakes.muon_tasks import in_phase, muon_task
from fakes.split_gradients import gradient, relative_error

EVENTS = 12
UNEVEN = (2, 5, 1, 4)
CPU = torch.device("cpu")
PHASES = ("critic", "generator")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> MuonTask:
    return muon_task(tmp_path_factory.mktemp("cache"))


def phase_of(task: MuonTask, name: str) -> MuonTask:
    return in_phase(task, next(phase for phase in task.phases() if phase.name == name))


def model_of(task: MuonTask, dtype: torch.dtype = torch.float64) -> MuonGan:
    """A model some steps into its training: fresh ones have layers of zeros."""
    torch.manual_seed(0)
    model = task.build_model().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert isinstance(model, MuonGan)
    return model


def batch_of(task: MuonTask, dtype: torch.dtype = torch.float64, seed: int = 1) -> LogicalBatch:
    return task.logical_batch(task.train_rows[:EVENTS], CPU, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("phase", PHASES)
@given(stops=st.sets(st.integers(1, EVENTS - 1)), seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_any_cut_has_the_gradient_of_the_whole_batch(task: MuonTask, phase: str, stops: set[int], seed: int) -> None:
    task = phase_of(task, phase)
    model, sizes = model_of(task), tuple(b - a for a, b in pairwise([0, *sorted(stops), EVENTS]))
    whole = gradient(model, batch_of(task, seed=seed), (EVENTS,))
    assert whole.norm() > 0
    assert relative_error(gradient(model, batch_of(task, seed=seed), sizes), whole) <= 1e-12


@pytest.mark.parametrize(("phase", "dtype", "rounding"), [
    ("critic", torch.float32, 1e-5), ("generator", torch.float32, 1e-5),
    ("critic", torch.float16, 2e-3), ("generator", torch.float16, 2e-3),
])  # fmt: skip
def test_in_lower_precision_the_difference_is_its_rounding(
    task: MuonTask, phase: str, dtype: torch.dtype, rounding: float
) -> None:
    task = phase_of(task, phase)
    model = model_of(task, torch.float32)
    with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float16):
        whole, cut = (gradient(model, batch_of(task, torch.float32), sizes) for sizes in ((EVENTS,), UNEVEN))
    assert relative_error(cut, whole) <= rounding


def summed(task: MuonTask, model: nn.Module, mutant: Callable[[LogicalBatch, int, int], Tensor]) -> Tensor:
    model.zero_grad()
    batch, start = batch_of(task), 0
    for size in UNEVEN:
        mutant(batch, start, start + size).backward()
        start += size
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("phase", PHASES)
def test_losses_averaged_over_each_part_are_another_gradient(task: MuonTask, phase: str) -> None:
    task = phase_of(task, phase)
    model = model_of(task)

    def by_events(batch: LogicalBatch, start: int, stop: int) -> Tensor:
        return sum(total / EVENTS for total, _ in batch.losses(model, start, stop).values())

    def by_parts(batch: LogicalBatch, start: int, stop: int) -> Tensor:
        return sum(total / own / len(UNEVEN) for total, own in batch.losses(model, start, stop).values())

    whole = gradient(model, batch_of(task), (EVENTS,))
    assert relative_error(summed(task, model, by_events), whole) <= 1e-12
    assert relative_error(summed(task, model, by_parts), whole) > 1e-3


@pytest.mark.parametrize(("phase", "drawn"), [("critic", "alpha"), ("critic", "noise"), ("generator", "noise")])
def test_what_each_part_draws_again_is_another_gradient(task: MuonTask, phase: str, drawn: str) -> None:
    task = phase_of(task, phase)
    model, generator = model_of(task), torch.Generator().manual_seed(9)

    def again(batch: LogicalBatch, start: int, stop: int) -> Tensor:
        assert isinstance(batch, SampleBatch)
        part = batch.collated(start, stop)
        value = getattr(part, drawn)
        fresh = torch.rand if drawn == "alpha" else torch.randn
        # A batch is frozen, for everybody but this mutant.
        object.__setattr__(part, drawn, fresh(value.shape, generator=generator, dtype=value.dtype))
        terms = task.losses_of(model, part, validating=False)
        return sum(total / EVENTS for total, _ in terms.values())

    assert relative_error(summed(task, model, again), gradient(model, batch_of(task), (EVENTS,))) > 1e-3


def weights_after(task: MuonTask, sizes: tuple[int, ...], steps: int) -> Tensor:
    model = model_of(task)
    optimizers = {name: torch.optim.Adam(getattr(model, name).parameters(), 1e-3, (0.0, 0.9)) for name in PHASES}
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for phase in task.phases():
            of_phase = task.in_phase(phase)
            for name, part in model.named_children():
                part.requires_grad_(name in phase.parameters)
            for _ in range(phase.steps):
                batch = of_phase.logical_batch(task.train_rows[:EVENTS], CPU, torch.float64, generator)
                gradient(model, batch, sizes)
                optimizers[phase.name].step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("steps", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_weights_after_steps_of_both_phases_do_not_depend_on_the_cut(task: MuonTask, steps: int) -> None:
    whole = weights_after(task, (EVENTS,), steps)
    assert relative_error(whole, weights_after(task, (EVENTS,), 0)) > 1e-3
    assert relative_error(weights_after(task, UNEVEN, steps), whole) <= 1e-10


def test_the_phases_train_what_they_say_and_the_critic_takes_its_steps(task: MuonTask) -> None:
    critic, generator = task.phases()
    assert (critic.name, critic.steps, generator.name, generator.steps) == ("critic", 3, "generator", 1)
    for phase in (critic, generator):
        of_phase = in_phase(task, phase)
        model = model_of(of_phase)
        assert gradient(model, batch_of(of_phase), (EVENTS,)).isfinite().all()
        moved = {name.split(".")[0] for name, weights in model.named_parameters() if weights.grad is not None}
        assert moved == set(phase.parameters)
        assert all(weights.grad is not None for weights in model.get_submodule(phase.name).parameters())


def test_validation_is_the_same_however_it_is_cut(task: MuonTask) -> None:
    model = model_of(task)
    batch = task.logical_batch(task.validation_rows, CPU, torch.float64, None)
    size = len(task.validation_rows)
    model.requires_grad_(False)
    whole, parts = batch.losses(model, 0, size), [batch.losses(model, row, row + 1) for row in range(size)]
    for term in ("distance", "multiplicity"):
        assert float(sum(part[term][0] for part in parts)) == pytest.approx(float(whole[term][0]), rel=1e-12)
    again = task.logical_batch(task.validation_rows, CPU, torch.float64, None).losses(model, 0, size)
    assert torch.equal(again["distance"][0], whole["distance"][0])
