"""What the loops of training frameworks may be given, and what they are told otherwise."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from can_train import CanTrainError, LoopSettings, MemoryMonitorCallback, MicroBatchCallback, MicroBatchTrainerMixin
from can_train.adapters.framework_loop import FrameworkLoop
from can_train.errors import ArgumentError, DoesNotFitError
from can_train.fit.packing import counts_of

WRONG: tuple[Any, ...] = (3, 2.5, [3], torch.ones(3), object())
FIELDS = ("device", "limits", "select", "counts", "key", "learn", "state_dir", "search", "fit")


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_setting_is_told_where_it_is_written(name: str) -> None:
    for wrong in WRONG[name == "limits" :]:
        with pytest.raises(CanTrainError, match=r"\n"):
            LoopSettings(**{name: wrong})


@pytest.mark.parametrize("field", [{"device": torch.device("cpu")}, {"limits": np.int64(4)}, {"fit": "offload"}])
def test_a_setting_is_taken_as_micro_batcher_takes_it(field: dict[str, Any]) -> None:
    LoopSettings(**field)


class Trainer:
    """Stands for the Trainer of transformers."""

    def __init__(self, model: Any = None) -> None:
        self.model = model

    def training_step(self, model: Any, inputs: Any) -> None:
        """Is there."""


class Splitting(MicroBatchTrainerMixin, Trainer):
    """A Trainer whose batches fit."""


@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        ("sim:64MiB", 'device="sim:64MiB"'),
        (torch.device("cuda", 1), 'device="cuda:1"'),
        (64, "limits=64"),
        (True, ""),
        ({"limits": 64}, ""),
        (LoopSettings, ""),
    ],
    ids=str,
)
def test_settings_that_are_none_are_answered_with_a_line_that_works(settings: Any, inside: str) -> None:
    with pytest.raises(ArgumentError, match=r"The settings of a loop are a LoopSettings") as of_lightning:
        MicroBatchCallback(settings)
    assert of_lightning.value.remedy == f"Give MicroBatchCallback(LoopSettings({inside}))"
    with pytest.raises(ArgumentError) as of_trainer:
        Splitting(None, loop_settings=settings)
    assert of_trainer.value.remedy == f"Give Splitting(..., loop_settings=LoopSettings({inside}))"


@pytest.mark.parametrize("name", ["interval", "warmup", "device", "safety_factor"])
def test_a_wrong_argument_of_the_monitors_callback_is_told(name: str) -> None:
    for wrong in ([3], "x" if name != "device" else 3, torch.ones(3), object()):
        with pytest.raises(ArgumentError, match=r"\nGive "):
            MemoryMonitorCallback(**{name: wrong})


def model_of(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(width, 2).double()


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def gradient(model: nn.Module, batch: Any, loss_of: Callable[[nn.Module, Any], Tensor], **settings: Any) -> Tensor:
    """Trains on a batch in a framework's loop, in parts where it must; returns the gradient."""
    loop = FrameworkLoop(framework="own", model=model, optimizers=[],
                         settings=LoopSettings(**{"learn": False, **settings}))  # fmt: skip

    def whole() -> None:
        loss_of(model, batch).backward()

    loop.step(batch, whole, lambda: loop.run_parts(batch, lambda part: (loss_of(model, part.batch), None)) and None)
    loop.close()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


BAGS = torch.randn(12, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12)


@pytest.mark.parametrize(
    "counts",
    [
        lambda batch: {"crops": [4.0] * batch[0].shape[1]},
        lambda batch: {"crops": torch.full((batch[0].shape[0] * batch[0].shape[1],), 4)},
        lambda batch: [1.0] * 11,
    ],
    ids=["a second dimension", "two dimensions", "one too few"],
)
@pytest.mark.parametrize("settings", [{"limits": 5}, {}], ids=["limits", "no limits"])
def test_counts_of_other_samples_than_select_takes_are_refused(counts: Any, settings: dict[str, Any]) -> None:
    number = len(counts_of(counts((BAGS, LABELS)))[1])
    with pytest.raises(ArgumentError, match=rf"counts {number} samples .* finds 12\.\nReturn .* select= as well"):
        gradient(model_of(), (BAGS, LABELS), mean_loss, counts=counts, **settings)


@pytest.mark.parametrize("counts", [lambda batch: "many", lambda batch: None, lambda batch: {"a": [1], "b": [1, 2]}])
def test_counts_that_are_none_are_refused(counts: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"counts\(batch\) returns the counts of each sample, by name: .*\nGive Loop"
    ):
        gradient(model_of(), (BAGS, LABELS), mean_loss, counts=counts, limits=5)


def test_counts_may_be_a_tensor_of_a_graph() -> None:
    weights = torch.ones(12, requires_grad=True)
    whole = gradient(model_of(), (BAGS, LABELS), mean_loss)
    cut = gradient(model_of(), (BAGS, LABELS), mean_loss, limits=5, counts=lambda batch: {"crops": weights * 2})
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-14)


def test_with_a_select_of_ones_own_the_counts_define_the_samples() -> None:
    def select(batch: Any, rows: Any) -> Any:
        return batch[0][:, rows], batch[1]

    whole = gradient(model_of(), (BAGS, LABELS), mean_loss)
    cut = gradient(model_of(), (BAGS, LABELS), mean_loss, limits=2, select=select,
                   counts=lambda batch: {"crops": np.full(batch[0].shape[1], 12)})  # fmt: skip
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-14)


def full(samples: int) -> Callable[[nn.Module, Any], Tensor]:
    """A step that runs out of memory with more samples."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        if isinstance(x, list | tuple):
            x = torch.stack([*x])
        elif x.is_nested or x.layout is not torch.strided:
            x = (torch.nested.to_padded_tensor(x, 0.0) if x.is_nested else x).to_dense()
        if len(x) > samples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return model(x).square().mean()

    return loss_of


ROWS = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor([*x[:, None]], layout=torch.jagged),
        lambda x: x[:-1],
    ],
    ids=["COO", "CSR", "nested", "other rows"],
)
@pytest.mark.parametrize("settings", [{}, {"limits": 16}], ids=["no limits", "limits"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state", "ignore:The PyTorch API of nested")
def test_a_batch_whose_samples_nobody_knows_is_refused_only_where_it_must_be_split(
    make: Callable[[Tensor], Any], settings: dict[str, Any]
) -> None:
    batch = make(ROWS), torch.arange(40)
    assert gradient(model_of(), batch, full(40), **settings).isfinite().all()
    with pytest.raises(DoesNotFitError, match=r"no common rows \(.*\nGive LoopSettings\(select=..., counts=...\)"):
        gradient(model_of(), batch, full(20), **settings)


@pytest.mark.parametrize("make", [list, tuple], ids=["lists", "tuples"])
def test_lists_of_samples_are_split_by_samples(make: Callable[[Tensor], Any]) -> None:
    batch = [make(ROWS), make(torch.arange(40))]
    whole = gradient(model_of(), batch, full(40))
    torch.testing.assert_close(gradient(model_of(), batch, full(20)), whole, rtol=0, atol=1e-14)


class Unsliceable(Tensor):
    """A tensor whose rows cannot be taken out."""

    def __getitem__(self, rows: Any) -> Tensor:
        raise NotImplementedError("not of this class")


def test_an_error_of_the_default_select_is_the_reason_of_a_refusal() -> None:
    batch = ROWS.as_subclass(Unsliceable), torch.arange(40)
    with (
        pytest.warns(UserWarning, match="Batches are not split: its samples cannot be taken out"),
        pytest.raises(DoesNotFitError, match=r"(?s)taken out \(NotImplementedError: not of this class\).*select="),
    ):
        gradient(model_of(), batch, full(20))


def test_counts_that_fail_are_the_reason_of_a_refusal() -> None:
    with pytest.raises(DoesNotFitError, match=r"counts\(batch\) failed \(KeyError: 'lengths'\).*\nGive LoopSettings"):
        gradient(model_of(), (ROWS, torch.arange(40)), full(20), counts=lambda batch: {"a": {}["lengths"]})
    with pytest.raises(DoesNotFitError, match=r"counts\(batch\) failed \(.*\nMend the counts of LoopSettings"):
        gradient(model_of(), (ROWS,), full(20), select=lambda batch, rows: batch, counts=lambda batch: batch[1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("SGD", "Muon", "AdamW", "Rprop", "RMSprop", "ASGD", "Adadelta", "NAdam")),
        ("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("RMSprop", {"momentum": 0.9, "centered": True}),
    ],
)  # fmt: skip
def test_room_is_expected_for_the_state_that_an_optimizer_of_pytorch_makes(name: str, options: dict[str, Any]) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    settings = LoopSettings(device="sim:64MiB", learn=False)
    loop = FrameworkLoop(framework="test", model=model, optimizers=[optimizer], settings=settings)
    assert loop.engine is not None
    expected_bytes = loop.engine.reserve.missing_bytes
    model.weight.grad = torch.ones(64, 64)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert expected_bytes == pytest.approx(sum(value.nbytes for value in values), rel=0.01)
    loop.close()


@pytest.mark.parametrize("trains", [True, False])
def test_limits_that_are_not_kept_for_a_batch_whose_samples_nobody_knows_are_said_once(trains: bool) -> None:
    model, told = model_of(), list[str]()
    loop = FrameworkLoop(framework="test", model=model, optimizers=[], notice=told.append,
                         settings=LoopSettings(limits=5, learn=False))  # fmt: skip
    for _ in range(2):
        assert loop.step((ROWS[:-1], torch.arange(40)), lambda: 3, lambda: 4, trains=trains) == 3
    loop.close()
    assert told == ["Batches are not split, in spite of limits: its tensors have no common rows (tensors of 39, 40)."]


def test_a_small_loss_in_half_precision_is_split_as_its_scaler_scales_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    batch, scaler = (torch.randn(64, 16), torch.randint(3, (64,))), torch.amp.GradScaler("cpu")
    loop = FrameworkLoop(framework="own", model=model, optimizers=[], settings=LoopSettings(limits=24, learn=False))
    sizes = list[int]()

    def loss_of(points: Tensor, classes: Tensor) -> Tensor:
        sizes.append(len(points))
        with torch.autocast("cpu", dtype=torch.float16):
            made = model(points)
        return 1e-5 * F.cross_entropy(made.float(), classes)

    def parts() -> None:
        loop.run_parts(batch, lambda part: (loss_of(*part.batch), None), scale=scaler.scale)

    loop.step(batch, lambda: scaler.scale(loss_of(*batch)).backward(), parts)
    loop.close()
    # A warning would be an error.
    assert sizes[:3] == [22, 21, 21]
    assert not loop.refused


def test_an_optimizer_whose_history_grows_is_named_and_no_container_of_the_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    model.kept = [torch.ones(2)]  # type: ignore[assignment]  # a list of the user's
    points, targets = torch.randn(32, 64), torch.randn(32, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    settings = LoopSettings(device="sim:8MiB", learn=False)
    loop = FrameworkLoop(framework="own", model=model, optimizers=[optimizer], settings=settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(points), targets)
        loss.backward()
        return loss

    def step() -> None:
        if len(optimizer.state_dict()["state"].get(0, {}).get("old_dirs", ())) > 40:
            loop.refused = "its loss compares samples"
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        optimizer.step(closure)

    grown = r"The state of the optimizer LBFGS has grown by [\d.]+ MiB in \d+ steps"
    for _ in range(11):
        loop.step((points, targets), step, step)
    with pytest.raises(DoesNotFitError, match=grown) as raised:
        loop.step((points, targets), step, step)
    loop.close()
    assert "kept" not in str(raised.value)
    assert re.fullmatch(r"Give it history_size=2\d, in place of 100", raised.value.remedy or "")


Numbers = Callable[[int], Tensor]
OUTPUTS = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
TOKENS = torch.arange(40) % 7 + 1


def by_torch(samples: int) -> Tensor:
    return 0.01 * torch.randn(samples, 4, dtype=torch.float64)


def by_numpy(samples: int) -> Tensor:
    return torch.from_numpy(0.01 * np.random.default_rng().standard_normal((samples, 4)))


class NoisyStep:
    """Computes a loss of noisy inputs, with a number of items where the step returns one."""

    def __init__(self, how: str, draw: Numbers, *layers: nn.Module) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*layers, nn.Linear(4, 2)).double()
        self.how, self.draw = how, draw

    def loss(self, batch: Any) -> tuple[Tensor, float | None]:
        x, y, tokens = batch
        out = self.model(x + self.draw(len(x)))
        each = (out - y).square().sum(1)
        if self.how == "contrastive":
            return F.cross_entropy(out @ out.T, torch.arange(len(x))), None
        if self.how == "masked":
            kept = torch.rand(len(x)) < 0.6
            return (each * kept).sum() / kept.sum(), None
        if "tokens" in self.how:
            items = float(tokens.sum())
            return (each * tokens).sum() / items, items if self.how == "tokens and their number" else None
        return each.sum() if self.how == "sum" else each.mean(), float(len(x)) if self.how == "mean of n" else None

    def gradient(self, steps: int = 1, **settings: Any) -> Tensor:
        loop = FrameworkLoop(framework="own", model=self.model, optimizers=[],
                             settings=LoopSettings(learn=False, **settings))  # fmt: skip
        batch = ROWS, OUTPUTS, TOKENS

        def whole() -> None:
            self.loss(batch)[0].backward()

        for _ in range(steps):
            self.model.zero_grad()
            loop.step(batch, whole, lambda: loop.run_parts(batch, lambda part: self.loss(part.batch)) and None)
        loop.close()
        self.loop = loop
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()
                          if parameter.grad is not None])  # fmt: skip


@pytest.mark.parametrize("how", ["mean", "sum", "tokens and their number"])
@pytest.mark.parametrize("layers", [(), (nn.BatchNorm1d(4),)], ids=["", "BatchNorm"])
def test_a_loss_that_draws_noise_adds_up_as_without_it_and_is_told(how: str, layers: tuple[nn.Module, ...]) -> None:
    whole, cut = NoisyStep(how, by_torch, *layers).gradient(), NoisyStep(how, by_torch, *layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = cut.gradient(steps=4, limits=9)
    told = (
        "Samples depend on the rest of their batch through 0" if layers else "The step draws random numbers, and others"
    )
    assert [str(one.message).startswith(told) for one in caught] == [True]
    assert not cut.loop.refused
    # Another way would make it as many times too large, or too small, as there are parts.
    assert float((found - whole).norm() / whole.norm()) < 0.3


@pytest.mark.parametrize(
    ("how", "draw", "reason"),
    [
        ("contrastive", lambda samples: 100 * by_torch(samples), "cutting one changes its gradient by"),
        ("tokens", by_torch, "cutting one changes its gradient by"),
        ("masked", by_torch, "cutting one changes its gradient by"),
        ("mean", by_numpy, "its step draws random numbers that can-train cannot repeat"),
    ],
)
def test_noise_hides_no_dependence_and_what_it_hides_is_not_split(how: str, draw: Numbers, reason: str) -> None:
    step = NoisyStep(how, draw)
    with pytest.warns(UserWarning, match=f"Batches are not split: {reason}") as caught:
        step.gradient(limits=9)
    assert len(caught) == 1


def test_a_step_that_tells_the_items_of_its_mean_is_split_whatever_it_draws() -> None:
    whole, cut = NoisyStep("mean of n", by_numpy).gradient(), NoisyStep("mean of n", by_numpy)
    with pytest.warns(UserWarning, match="numbers that can-train cannot repeat: .* is not known") as caught:
        found = cut.gradient(limits=9)
    assert len(caught) == 1
    assert float((found - whole).norm() / whole.norm()) < 0.1
