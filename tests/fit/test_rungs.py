"""On every rung a step has the same gradient, and takes less memory on the next one."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import combinations, count
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from can_train.errors import ConfigError, DoesNotFitError
from can_train.fit import repetitions
from can_train.fit.micro_batcher import BatchResult, MicroBatcher
from can_train.fit.random_state import seed_everything
from can_train.fit.repetitions import Repetitions, is_not_repeatable
from can_train.fit.rescue import QUIET_STEPS, Ladder
from can_train.fit.rungs import (
    SPLIT_ALONE,
    ModuleCost,
    Rung,
    candidates,
    computed_on,
    kept_modules,
    measure_modules,
    rungs_of,
)
from can_train.memory.meters import SimulatedMeter, simulated_gpu
from fakes.rung_models import MODELS, Transformer, double_conv, samples_of

MIB: Final = 2**20

State = dict[str, Tensor]


def made(name: str) -> nn.Module:
    if name == "gpt":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def step(name: str, rung: Rung, *, autocast: bool = False) -> State:
    """Computes gradients and buffers of two batches in a row on a rung."""
    model, (_, shape, loss_of) = made(name), MODELS[name]
    with simulated_gpu("1GiB", model), torch.autocast("cpu", enabled=autocast):
        for _ in range(2):
            with computed_on(rung, model):
                loss_of(model, samples_of(shape)).backward()
    gradients = {f"gradient of {key}": value.grad for key, value in model.named_parameters() if value.grad is not None}
    return gradients | dict(model.named_buffers()) | {"next random number": torch.rand(1)}


def assert_equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    assert not [key for key in one if not torch.equal(one[key], other[key])]


def rung_named(name: str, kind: str) -> Rung:
    names = tuple(candidates(made(name)))
    return {"recompute": Rung(recompute=names), "offload": Rung(offload=True),
            "both": Rung(recompute=names, offload=True)}[kind]  # fmt: skip


KINDS: Final = ("recompute", "offload", "both")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_rung_has_the_same_gradient_buffers_and_random_numbers(name: str, kind: str) -> None:
    assert_equal(step(name, rung_named(name, kind)), step(name, SPLIT_ALONE))


def test_every_rung_has_the_same_gradient_in_mixed_precision() -> None:
    alone = step("transformer", SPLIT_ALONE, autocast=True)
    for kind in KINDS:
        assert_equal(step("transformer", rung_named("transformer", kind), autocast=True), alone)


@contextmanager
def without_random_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forgetful(*args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint.checkpoint(*args, preserve_rng_state=False, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(repetitions, "checkpoint", forgetful)
        yield


@contextmanager
def without_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(repetitions.StateBefore, "contexts", lambda self: (nullcontext(), nullcontext()))
        yield


@contextmanager
def without_comparison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(repetitions, "_compared", lambda left_out: nullcontext())
        yield


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("transformer", without_random_state), ("unet", without_state), ("spectral", without_state)],
)
def test_a_mutant_of_recomputation_has_another_gradient_or_other_buffers(
    name: str, mutant: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = step(name, SPLIT_ALONE)
    with mutant(monkeypatch), without_comparison(monkeypatch), pytest.raises(AssertionError):
        assert_equal(step(name, rung_named(name, "recompute")), alone)


def test_a_module_is_computed_again_in_the_mode_of_its_forward_pass() -> None:
    def gradients(rung: Rung) -> State:
        model = made("transformer")
        with simulated_gpu("64MiB", model), computed_on(rung, model):
            loss = model.eval()(samples_of((40, 32))).square().sum()
            model.train()
            loss.backward()
        assert all(module.training for module in model.modules())
        return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}

    assert_equal(gradients(rung_named("transformer", "recompute")), gradients(SPLIT_ALONE))


def test_a_graph_that_is_kept_is_computed_again_each_time() -> None:
    model = made("unet")
    with computed_on(rung_named("unet", "recompute"), model):
        loss = model(samples_of((3, 16, 16))).sum()
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True) if p.grad is not None)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt"}))
def test_a_model_is_as_it_was_after_a_rung(name: str) -> None:
    model = made(name)
    before = {key: {*vars(module)} for key, module in model.named_modules()}
    with computed_on(rung_named(name, "both"), model):
        pass
    assert {key: {*vars(module)} for key, module in model.named_modules()} == before


@pytest.mark.parametrize("rung", [Rung(recompute=("0",)), Rung(offload=True)], ids=["recompute", "offload"])
def test_derivatives_by_torch_func_are_refused_on_a_rung(rung: Rung) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"in a loss that calls torch\.func") as raised, computed_on(rung, model):
        torch.func.grad(lambda x: model(x).sum())(torch.ones(2))
    assert "--fit split" in raised.value.remedy


def test_the_error_of_a_loss_that_saves_tensors_below_torch_func_by_itself_is_pytorchs() -> None:
    model = nn.Linear(2, 2)

    def saving(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x).sum()

    with pytest.raises(RuntimeError, match="saved tensor hooks") as raised, computed_on(SPLIT_ALONE, model):
        torch.func.grad(saving)(torch.ones(2))
    assert not isinstance(raised.value, ConfigError)


def test_a_step_that_puts_attributes_back_may_end_on_a_rung() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with computed_on(Rung(recompute=("0",)), model):
        assert vars(model[0]).pop("forward")


class Peaks:
    """Peaks of a step on a simulated GPU, which leaves nothing behind."""

    def __init__(self, name: str, samples: int) -> None:
        self.model, (_, shape, self.loss_of) = made(name), MODELS[name]
        self.x = samples_of(shape, samples)

    def on(self, rung: Rung) -> int:
        with simulated_gpu("8GiB", self.model) as meter:
            x = self.x.clone()
            meter.reset_peak()
            with computed_on(rung, self.model):
                self.loss_of(self.model, x).backward()
            self.model.zero_grad()
            gc.collect()
            peak, left = meter.peak_bytes(), meter.allocated_bytes()
        held = sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers(), x))
        assert left <= 1.01 * held + 512 * 200
        return peak


@pytest.mark.parametrize("name", ["transformer", "unet", "recurrent", "sequence", "gpt"])
def test_recomputed_modules_take_less_memory(name: str) -> None:
    peaks = Peaks(name, 60)
    assert peaks.on(rung_named(name, "recompute")) < peaks.on(SPLIT_ALONE)


@pytest.mark.parametrize("name", ["transformer", "unet", "gpt"])
def test_offloaded_tensors_take_less_memory(name: str) -> None:
    peaks = Peaks(name, 60)
    assert peaks.on(Rung(offload=True)) < peaks.on(SPLIT_ALONE)
    assert peaks.on(rung_named(name, "both")) < peaks.on(rung_named(name, "recompute"))


def test_views_of_one_storage_leave_the_device_once() -> None:
    model = nn.Linear(1, 1)
    with simulated_gpu("1GiB", model) as meter, computed_on(Rung(offload=True), model):
        x = torch.ones(1024, 1024, requires_grad=True) * 1.0
        loss = (x[:512] * x[512:]).sum() + x.t().square().sum()
        held = meter.allocated_bytes()
        del x
        meter.reset_peak()
        loss.backward()
    assert meter.peak_bytes() <= held + 20 * MIB


@pytest.mark.parametrize("later", ["whole", "expanded"])
def test_a_small_view_that_has_left_the_device_stands_for_no_other_view(later: str) -> None:
    x = torch.randn(8, 1024)
    gradients = []
    for rung in (SPLIT_ALONE, Rung(offload=True)):
        model = nn.ParameterList([torch.ones(1024), torch.ones(8, 1024)])
        with simulated_gpu("64MiB", model, [x]), computed_on(rung, model):
            loss = (x[3] * model[0]).sum()
            view = x if later == "whole" else x[0].expand(8, 1024)
            loss = loss + (view * model[1]).sum()
            loss.backward()
        gradients.append([parameter.grad for parameter in model])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_a_tensor_that_is_changed_in_place_is_saved_anew() -> None:
    def gradient(rung: Rung) -> Tensor:
        x = torch.ones(64, 64, requires_grad=True)
        model = nn.Linear(1, 1)
        with simulated_gpu("64MiB", model, [x]), computed_on(rung, model):
            y = x * 2
            first = y.detach().square() * x
            y.detach().add_(1)
            (first + y.detach() * x).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(Rung(offload=True)), gradient(SPLIT_ALONE))


def test_conjugated_and_negated_views_of_one_storage_come_back_with_their_values() -> None:
    def gradient(rung: Rung) -> Tensor:
        x = torch.linspace(0, 1, 4096, requires_grad=True)
        model = nn.Linear(1, 1)
        with simulated_gpu("64MiB", model, [x]), computed_on(rung, model):
            z = torch.fft.fft(x)
            power = (z * z.conj()).real.sum() + (z.conj() * z).imag.sum()
            (power + (z.conj().imag * z.imag * z.real).sum() + (z.conj().imag[:1500] * z.real[:1500]).sum()).backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(Rung(offload=True)), gradient(SPLIT_ALONE))


class Block(nn.Module):
    """Adds to its input a function of it, times the result of another function."""

    def __init__(self, factor: Callable[..., Any] = lambda: 1.0) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(16, 16), factor

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return x + torch.tanh(self.linear(x) * self.factor(**options))


class Blocks(nn.Module):
    """Calls blocks one after the other."""

    def __init__(self, *blocks: nn.Module, **options: Any) -> None:
        super().__init__()
        self.blocks, self.options = nn.ModuleList(blocks), options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, **self.options)
        return x


def gradients_of(model: nn.Module, rung: Rung) -> State:
    """Computes the gradients of a model on a rung, from the same weights and random numbers."""
    seed_everything(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
        parameter.grad = None
    with simulated_gpu("64MiB", model), computed_on(rung, model):
        model(torch.randn(4, 16)).square().sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_same_on_rungs(model: nn.Module) -> None:
    alone, names = gradients_of(model, SPLIT_ALONE), tuple(candidates(model))
    assert names
    for rung in (Rung(recompute=names), Rung(recompute=names, offload=True)):
        assert_equal(gradients_of(model, rung), alone)


@pytest.mark.parametrize("draw", [random.random, random.gauss, np.random.random, np.random.standard_normal])
def test_a_module_is_computed_again_with_the_same_numbers_of_pythons_and_numpys_generators(draw: Any) -> None:
    model = Blocks(Block(draw), Block(draw))
    assert_same_on_rungs(model)
    following = []
    for rung in (SPLIT_ALONE, Rung(recompute=("blocks.0", "blocks.1"))):
        gradients_of(model, rung)
        following.append(draw())
    assert following[0] == following[1]


def test_a_model_that_checkpoints_itself_has_the_same_numbers_of_pythons_generator() -> None:
    class Checkpointing(Blocks):
        supports_gradient_checkpointing, is_gradient_checkpointing = True, False

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
            self.call = partial(torch_checkpoint.checkpoint, **gradient_checkpointing_kwargs)

        def gradient_checkpointing_disable(self) -> None:
            del self.call

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.call(block, x) if hasattr(self, "call") else block(x)
            return x

    model = Checkpointing(Block(random.random), Block(random.random))
    assert_equal(gradients_of(model, Rung(recompute=("",))), gradients_of(model, SPLIT_ALONE))


@pytest.mark.parametrize("name", ["forward", "debug", "function", "context_fn", "preserve_rng_state", "owners"])
def test_a_module_is_computed_again_whatever_its_arguments_are_called(name: str) -> None:
    assert_same_on_rungs(Blocks(Block(lambda **options: options[name]), Block(lambda **options: 1), **{name: 2.0}))


def test_a_sequence_is_called_in_segments_with_its_input_by_name() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

        def forward(self, x: Tensor) -> Any:
            return self.net(input=x)

    assert_same_on_rungs(Sequence())


def test_a_small_tensor_that_is_overwritten_after_it_was_saved_is_noticed_on_every_rung() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1.0
            product = y * self.weight
            y.add_(1)
            return product

    for rung in (SPLIT_ALONE, Rung(offload=True)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients_of(Overwrites(), rung)


class Residual(Block):
    """Adds the scores of the block before, which blocks hand on in a dictionary."""

    def __init__(self, state: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: Tensor, given: dict[str, Tensor] | None = None) -> Tensor:  # type: ignore[override]
        state = self.state if given is None else given
        assert state is not None
        scores = self.linear(x) + state.get("before", 0)
        state["before"] = scores
        return x + torch.tanh(scores)


def counted_calls() -> nn.Module:
    class Counted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            self.calls += 1
            return x + torch.tanh(self.linear(x) * (1 + self.calls % 2))

    return Blocks(Counted(), Counted())


def scores_in_a_dictionary() -> nn.Module:
    class Handing(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            self.options = {"given": {}}
            return super().forward(x)

    return Handing(Residual(), Residual(), Residual())


def scores_in_a_shared_attribute() -> nn.Module:
    class Shared(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            state: dict[str, Tensor] = {}
            for block in self.blocks:
                block.state = state
            return super().forward(x)

    return Shared(Residual(), Residual(), Residual())


def losses_in_a_list() -> nn.Module:
    class Listing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            self.losses.append(x.square().sum())
            return x

    class Balanced(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            total = super().forward(x)
            for block in self.blocks:
                total = total + sum(block.losses)
                block.losses.clear()
            return total

    return Balanced(Listing(), Listing())


def generators_of_their_own() -> nn.Module:
    host, numpy, python = torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)
    legacy = np.random.RandomState(0)
    draws = [lambda: torch.rand((), generator=host), numpy.random, python.random, legacy.random_sample]
    blocks = []
    for draw, generator in zip(draws, (host, numpy, python, legacy), strict=True):
        block = Block(draw)
        block.generator = generator  # type: ignore[assignment]
        blocks.append(block)
    return Blocks(*blocks)


HANDED_ON: Final = (counted_calls, scores_in_a_dictionary, scores_in_a_shared_attribute, losses_in_a_list,
                    generators_of_their_own)  # fmt: skip


@pytest.mark.parametrize("make", HANDED_ON)
def test_modules_are_computed_again_with_the_state_that_they_had(make: Callable[[], nn.Module]) -> None:
    passes = []
    for recompute, offload in ((False, False), (True, False), (True, True)):
        model = make()
        names = tuple(candidates(model))
        assert names
        rung = Rung(recompute=names if recompute else (), offload=offload)
        # The state of the first pass is there in the second one, which must not have its repetition's.
        passes.append([gradients_of(model, rung) for _ in range(2)])
    for pair in passes[1:]:
        for one, other in zip(passes[0], pair, strict=True):
            assert_equal(one, other)


def test_a_buffer_that_is_changed_by_data_is_put_back_for_the_repetition_in_every_pass() -> None:
    class Averaging(Block):
        def __init__(self) -> None:
            super().__init__()
            self.average: Tensor
            self.register_buffer("average", torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            y = x * self.average.clone()
            self.average.data.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            return super().forward(y)

    def trained(rung: Rung) -> State:
        torch.manual_seed(0)
        model, repetitions = Blocks(Averaging(), Averaging()), Repetitions()
        with simulated_gpu("64MiB", model):
            for _ in range(3):  # The third pass is not compared
                with computed_on(rung, model, repetitions=repetitions):
                    model(torch.randn(4, 16)).square().sum().backward()
        assert not rung.recompute or not repetitions.is_compared
        gradients = {f"gradient of {name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
        return gradients | dict(model.named_buffers())

    assert_equal(trained(Rung(recompute=("blocks.0", "blocks.1"))), trained(SPLIT_ALONE))


def test_an_error_tells_of_values_that_differ_when_they_are_computed_again() -> None:
    calls = count(1)
    model = Blocks(Block(lambda: float(next(calls))))
    with pytest.raises(RuntimeError, match="Other values") as caught, computed_on(Rung(recompute=("blocks.0",)), model):
        model(torch.randn(4, 16)).square().sum().backward()
    assert is_not_repeatable(caught.value)


def test_the_last_result_of_a_module_is_freed_once_a_pass_replaces_it() -> None:
    class Remembering(Block):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            self.last = super().forward(x)
            return self.last

    model = Blocks(Remembering())
    first = gradients_of(model, SPLIT_ALONE)
    last = weakref.ref(model.blocks[0].last)
    with computed_on(Rung(recompute=("blocks.0",)), model):
        loss = model(torch.randn(4, 16)).sum()
        assert last() is None
        kept = model.blocks[0].last
        loss.backward()
    assert model.blocks[0].last is kept
    assert first


def test_a_failed_pass_of_modules_that_hand_on_a_dictionary_leaves_no_tensors() -> None:
    model = scores_in_a_dictionary()
    rung = Rung(recompute=tuple(candidates(model)))

    def fail() -> None:
        with computed_on(rung, model):
            model(torch.randn(4, 16))
            raise ValueError("the loss failed")

    with simulated_gpu("64MiB", model) as meter:
        before = meter.allocated_bytes()
        with pytest.raises(ValueError, match="the loss failed"):
            fail()
        model.options = {}  # type: ignore[assignment]
        meter.release()
        assert meter.allocated_bytes() == before


def test_losses_that_a_failed_part_has_appended_are_not_added_again() -> None:
    def gradients(*, fails: bool) -> State:
        seed_everything(0)
        model, x, failures = losses_in_a_list(), torch.randn(4, 16), [1] * fails

        def losses_of(start: int, stop: int) -> Any:
            total = Blocks.forward(model, x[start:stop]).sum()  # type: ignore[arg-type]
            if failures:
                failures.clear()
                raise torch.OutOfMemoryError("CUDA out of memory.")
            listed = [block.losses for block in model.blocks]  # type: ignore[union-attr]
            total = total + sum(loss for losses in listed for loss in losses)
            for losses in listed:
                losses.clear()
            return {"loss": (total, stop - start)}

        result = MicroBatcher(model, meter=SimulatedMeter(64 * MIB), fit="split").run(losses_of, 4)
        assert result.ooms_rescued == fails
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    rescued, alone = gradients(fails=True), gradients(fails=False)
    assert all(torch.allclose(rescued[name], alone[name], rtol=1e-3) for name in alone)


def named(model: nn.Module) -> list[str]:
    return list(candidates(model))


def test_the_outermost_repeated_blocks_are_recomputed() -> None:
    assert named(Transformer(blocks=3)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_sequence_of_modules_without_parts_is_recomputed_in_segments() -> None:
    assert named(made("sequence")) == ["[0:3]", "[3:6]", "[6:8]"]


def test_a_segment_does_not_begin_with_a_module_that_overwrites_its_input() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))]
    model, x = nn.Sequential(*layers), torch.rand(2, 4, 16, 16)
    names = named(model)
    assert names == ["[0:4]", "[4:9]", "[9:12]"]
    gradients = []
    for rung in (SPLIT_ALONE, Rung(recompute=tuple(names))):
        with computed_on(rung, model):
            gradients.append(torch.autograd.grad(model(x).sum(), [*model.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_where_nothing_is_repeated_modules_with_parts_are_recomputed() -> None:
    assert named(nn.ModuleDict({"a": double_conv(1, 2), "b": nn.Linear(1, 1)})) == ["a"]


def test_a_model_that_checkpoints_itself_uses_its_own_switch() -> None:
    model = made("gpt")
    assert named(nn.ModuleDict({"net": model})) == ["net"]
    blocks = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    with computed_on(Rung(recompute=("",)), model):
        assert all(block.gradient_checkpointing for block in blocks)
    assert not any(block.gradient_checkpointing for block in blocks)


def test_a_module_whose_parts_have_hooks_is_left_out() -> None:
    model = Transformer(blocks=2)
    model.blocks[0].layer.linear1.register_forward_hook(lambda *_: None)
    assert named(model) == ["blocks.1"]


def test_modules_are_chosen_by_pattern() -> None:
    assert rungs_of(Transformer(blocks=3), "recompute", ["blocks.[02]"]) == (Rung(recompute=("blocks.0", "blocks.2")),)
    assert rungs_of(Transformer(blocks=3), "offload", ["blocks.1"]) == (Rung(recompute=("blocks.1",), offload=True),)


def test_a_module_inside_a_chosen_one_is_not_recomputed_twice() -> None:
    (rung,) = rungs_of(Transformer(blocks=2), "recompute", ["blocks.*"])
    assert rung.recompute == ("blocks.0", "blocks.1")


@pytest.mark.parametrize("pattern", ["blocks", "*", "blocks.*"])
def test_a_list_of_modules_stands_for_its_modules(pattern: str) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    assert rungs_of(model, "recompute", [pattern]) == (Rung(recompute=("blocks.0", "blocks.1")),)


def test_a_pattern_that_names_no_module_lists_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"blocks\.0"):
        rungs_of(Transformer(blocks=2), "auto", ["block.*"])


def test_a_rung_says_which_modules_are_computed_again() -> None:
    rung = Rung(recompute=("inputs", "layers.0", "layers.1", "head[0:3]"), offload=True)
    assert rung.describe() == (
        "inputs, 2 modules (layers.*), head[0:3] are computed again in the backward pass, "
        "and saved tensors wait on the host"
    )
    assert Rung(recompute=("head",)).describe() == "head is computed again in the backward pass"
    assert SPLIT_ALONE.describe() == "batches are split"


@pytest.mark.parametrize("fit", ["offload", "offload-optimizer", "offload-all"])
def test_a_rung_that_is_named_computes_as_the_plan_would_on_it(fit: str) -> None:
    model = Transformer()
    chosen = [rung for rung in rungs_of(model, "auto", state_can_leave=True) if rung.name == fit]
    assert [*rungs_of(model, fit, state_can_leave=True)] == chosen
    assert chosen[-1].recompute == rungs_of(model, "recompute")[0].recompute


def test_nothing_is_offloaded_from_the_host() -> None:
    assert [rung.name for rung in rungs_of(Transformer(), "auto", is_host=True)] == ["split", "recompute"]
    assert [rung.name for rung in rungs_of(Transformer(), "auto")] == ["split", "recompute", "offload"]


costs = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=8)


@given(costs, st.integers(1, 120))
def test_the_modules_that_are_kept_are_those_that_take_longest_within_the_room(
    pairs: list[tuple[int, int]], room: int
) -> None:
    modules = [ModuleCost(name=str(n), saved_bytes=size, seconds=float(time)) for n, (size, time) in enumerate(pairs)]
    by_name = {module.name: module for module in modules}

    def seconds(chosen: Any) -> float:
        return sum(by_name[name].seconds for name in chosen)

    kept = kept_modules(modules, room)
    assert sum(by_name[name].saved_bytes for name in kept) <= room
    # Sizes are rounded up to thousandths of the room.
    tight = 0.99 * room
    best = max(
        seconds(chosen)
        for count in range(len(modules) + 1)
        for chosen in combinations(by_name, count)
        if sum(by_name[name].saved_bytes for name in chosen) <= tight
    )
    assert seconds(kept) >= best


def test_the_measured_bytes_of_modules_are_those_that_recomputing_them_saves() -> None:
    model, x = Transformer(width=64, blocks=4, dropout=0.0), torch.ones(8, 100, 64)
    names = tuple(candidates(model))

    def saved(rung: Rung) -> int:
        with simulated_gpu("1GiB", model) as meter, computed_on(rung, model):
            before = meter.allocated_bytes()
            loss = model(x.clone()).sum()
            held = meter.allocated_bytes() - before
            del loss
        return held

    with simulated_gpu("1GiB", model) as meter:
        measured, seconds = measure_modules(model, names, lambda: model(x.clone()).sum(), meter.seconds)
    difference = saved(SPLIT_ALONE) - saved(Rung(recompute=names))
    # The output of a block is the input of the next one, which stays; the allocator rounds sizes up.
    assert sum(cost.saved_bytes for cost in measured) == pytest.approx(difference, rel=0.02)
    assert seconds >= sum(cost.seconds for cost in measured) > 0


def test_modules_are_measured_where_the_loss_has_a_backward_pass_of_its_own() -> None:
    model, (_, shape, loss_of) = made("critic"), MODELS["critic"]
    with simulated_gpu("64MiB", model) as meter:
        costs, _ = measure_modules(
            model, [*candidates(model)], lambda: loss_of(model, samples_of(shape, 100)), meter.seconds
        )
    assert sum(cost.saved_bytes for cost in costs) > 0


class Named(nn.Sequential):
    """A sequence that cannot be made from modules."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Sigmoid())


def test_segments_of_a_sequence_with_a_constructor_of_its_own_are_measured() -> None:
    model = Named(32)
    with simulated_gpu("64MiB", model) as meter:
        costs, _ = measure_modules(model, [*candidates(model)], lambda: model(torch.ones(100, 32)).sum(), meter.seconds)
    assert [cost.name for cost in costs] == ["[0:2]", "[2:4]"]


def test_a_module_that_stands_twice_in_a_sequence_is_counted_twice() -> None:
    activation = nn.Tanh()
    model = nn.Sequential(nn.Linear(16, 16), activation, nn.Linear(16, 16), activation)
    names = named(model)
    assert names == ["[0:2]", "[2:4]"]
    with simulated_gpu("64MiB", model) as meter:
        costs, _ = measure_modules(model, names, lambda: model(torch.ones(100, 16)).sum(), meter.seconds)
    assert [cost.name for cost in costs] == names


# In mid-run

BATCH: Final = 3


class Deep(nn.Module):
    """Blocks of 13 MiB a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1))
             for _ in range(10)]
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train(meter: SimulatedMeter, fit: str, *, steps: int = 2) -> tuple[list[BatchResult], MicroBatcher, State]:
    """Trains for some steps in single samples on a simulated GPU."""
    with meter.active():
        torch.manual_seed(0)
        model = Deep()
        batcher = MicroBatcher(model, meter=meter, limits=1, fit=fit)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, results = torch.randn(BATCH, 3000, 64), []
        for _ in range(steps):
            results.append(
                batcher.run(lambda start, stop: {"loss": (model(x[start:stop]).square().mean(2).mean(1).sum(),
                                                         float(stop - start))}, BATCH)
            )  # fmt: skip
            optimizer.step()
            optimizer.zero_grad()
            batcher.stepped()
    return results, batcher, dict(model.state_dict())


CAPACITY: Final = {"recompute": 60, "offload": 30}  # MiB


@pytest.mark.filterwarnings("ignore:A few samples could not be computed both at once and split")
@pytest.mark.parametrize("rung", ["recompute", "offload"])
def test_a_step_that_runs_out_of_memory_at_the_floor_climbs_and_changes_no_bit(rung: str) -> None:
    _, _, alone = train(SimulatedMeter(400 * MIB), "split")
    results, batcher, climbed = train(SimulatedMeter(CAPACITY[rung] * MIB), "auto")
    assert batcher.ladder.rung.name == rung
    assert [result.ooms_rescued for result in results[1:]] == [0]
    assert_equal(climbed, alone)


def test_without_rungs_the_same_step_ends_with_an_error() -> None:
    with pytest.raises(DoesNotFitError):
        train(SimulatedMeter(CAPACITY["recompute"] * MIB), "split")


class Counting(nn.Module):
    """Saves one tensor less in each further forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.passes = count(1)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sigmoid() if next(self.passes) % 2 else x * self.weight


class Growing(nn.Module):
    """Saves other values in each further forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.passes = count(1)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * next(self.passes)).sigmoid()


class Overwriting(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_() * self.weight


@pytest.mark.parametrize("kind", [Counting, Growing, Overwriting])
def test_modules_that_save_other_tensors_the_second_time_are_not_computed_again(kind: type[nn.Module]) -> None:
    model = nn.ModuleList([kind(), kind()])
    with simulated_gpu("64MiB", model) as meter:
        batcher = MicroBatcher(model, meter=meter)
        batcher.ladder = Ladder((Rung(recompute=("0", "1")), Rung(recompute=("0", "1"), offload=True)))

        def losses_of(start: int, stop: int) -> Any:
            return {"loss": (model[1](model[0](torch.ones(stop - start, 64))).sum(), float(stop - start))}

        with pytest.warns(UserWarning, match="they compute or save something else the second time"):
            result = batcher.run(losses_of, 4)
    assert batcher.ladder.rung == Rung(offload=True)
    assert result.micro_batches == (4,)
    assert all(module.weight.grad is not None for module in model)


def test_after_a_quiet_stretch_the_rung_below_is_tried_and_later_less_often() -> None:
    ladder = Ladder((SPLIT_ALONE, Rung(recompute=("a",))))
    assert ladder.climb()
    assert not ladder.climb()
    levels = []
    for _ in range(QUIET_STEPS):
        levels.append(ladder.level)
        ladder.after_step()
    assert levels == [1] * QUIET_STEPS
    assert ladder.level == 0
    assert ladder.climb()
    for _ in range(2 * QUIET_STEPS - 1):
        ladder.after_step()
    assert ladder.level == 1
    ladder.after_step()
    assert ladder.level == 0


def test_a_ladder_begins_on_the_rung_of_its_plan() -> None:
    some, every, both = Rung(recompute=("a",)), Rung(recompute=("a", "b")), Rung(recompute=("a", "b"), offload=True)
    ladder = Ladder((SPLIT_ALONE, every, both)).on(some)
    assert ladder.rungs == (some, every, both)
    assert Ladder((SPLIT_ALONE, every, both)).on(SPLIT_ALONE).rungs == (SPLIT_ALONE, every, both)


def test_a_ladder_goes_on_where_its_state_was_saved() -> None:
    ladder = Ladder((SPLIT_ALONE, Rung(recompute=("a",))))
    ladder.climb()
    ladder.after_step()
    again = Ladder(ladder.rungs)
    again.load_state_dict(ladder.state_dict())
    assert again == ladder
