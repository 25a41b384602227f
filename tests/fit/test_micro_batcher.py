"""What a loop of one's own may give to MicroBatcher, and what it is told otherwise."""

import pickle
from copy import copy, deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from can_train.errors import ArgumentError, CanTrainError
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.packing import SplitRules
from can_train.memory.meters import SimulatedMeter
from can_train.memory.simulated.allocator import EXPANDABLE

MIB = 2**20
X = torch.arange(32.0).reshape(16, 2)


def batcher(**rules: Any) -> MicroBatcher:
    torch.manual_seed(0)
    return MicroBatcher(nn.Linear(2, 1), rules=SplitRules(**rules))


def losses(made: MicroBatcher, start: int, stop: int) -> Losses:
    return {"loss": (made._model(X[start:stop]).square().sum(), float(stop - start))}


@pytest.mark.parametrize("batch", [16, np.int64(16), torch.tensor(16), [1.0] * 16, np.ones(16), (2,) * 16])
def test_a_batch_is_a_number_of_samples_or_their_costs(batch: Any) -> None:
    made = batcher()
    assert made.run(lambda start, stop: losses(made, start, stop), batch).micro_batches == (16,)


@pytest.mark.parametrize("batch", [16.0, None, "16", torch.tensor(16.0), [[1.0]], {"samples": 16}])
def test_anything_else_is_refused(batch: Any) -> None:
    made = batcher()
    with pytest.raises(ArgumentError, match="A batch is a number of samples, or"):
        made.run(lambda start, stop: losses(made, start, stop), batch)


@pytest.mark.parametrize("batch", [0, -1, [], np.ones(0)])
def test_a_batch_has_a_sample(batch: Any) -> None:
    made = batcher()
    with pytest.raises(ArgumentError, match="at least one sample"):
        made.run(lambda start, stop: losses(made, start, stop), batch)


@pytest.mark.parametrize("share", [0, [], np.ones(0)])
def test_a_ranks_share_may_have_none(share: Any) -> None:
    made = batcher()
    result = made.run_share(lambda start, stop: losses(made, start, stop), share, denominators={"loss": 16.0})
    assert result.micro_batches == ()


@pytest.mark.parametrize("cost", [float("nan"), -1.0, float("inf")])
def test_costs_are_finite_and_not_negative(cost: float) -> None:
    made = batcher()
    with pytest.raises(ArgumentError, match=r"A batch is a number of samples, or .* finite and not negative"):
        made.run(lambda start, stop: losses(made, start, stop), [1.0, cost])


@pytest.mark.parametrize("computed", [{}, torch.ones(()), {"loss": torch.ones(())}, None, 3.0])
def test_losses_are_sums_with_denominators(computed: Any) -> None:
    with pytest.raises(ArgumentError, match="losses_of returns"):
        batcher().run(lambda start, stop: computed, 4)


@pytest.mark.parametrize(("given", "message"), [("denominators", "has a denominator"), ("weights", "has a weight")])
def test_every_term_is_known(given: str, message: str) -> None:
    made = batcher()
    with pytest.raises(ArgumentError, match=message):
        made.run(lambda start, stop: losses(made, start, stop), 16, **{given: {"other": 16.0}})


class CountedParts(SimulatedMeter):
    """Counts the micro-batches that are about to be made."""

    begun = 0

    def begin_part(self) -> None:
        self.begun += 1


def test_the_meter_hears_of_each_micro_batch_before_its_inputs_are_made() -> None:
    meter, model, begun = CountedParts(64 * MIB, settings=EXPANDABLE), nn.Linear(2, 1), list[tuple[int, int]]()
    made = MicroBatcher(model, meter=meter, rules=SplitRules(samples=8))

    def losses_of(start: int, stop: int) -> Losses:
        begun.append((meter.begun, stop - start))
        if meter.begun == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return losses(made, start, stop)

    made.run(losses_of, 16)
    # The second one is tried again in halves. Then the effect of the split is measured, once.
    assert begun[:4] == [(1, 8), (2, 8), (3, 4), (4, 4)]


def test_a_model_has_parameters() -> None:
    with pytest.raises(ArgumentError, match=r"A model to be trained has parameters: ReLU"):
        MicroBatcher(nn.ReLU())


@pytest.mark.parametrize("error", [ValueError("corrupt sample"), KeyboardInterrupt()])
def test_an_error_in_a_loss_loses_no_gradient_that_was_there(error: BaseException) -> None:
    made = batcher(samples=4)
    weight = made._model.weight
    made.run(lambda start, stop: losses(made, start, stop), 16)
    assert isinstance(weight.grad, torch.Tensor)
    before = weight.grad.clone()

    def corrupt(start: int, stop: int) -> Losses:
        raise error

    with pytest.raises(type(error)):
        made.run(corrupt, 16)
    assert torch.equal(weight.grad, before)


class Buffered(nn.Module):
    """Has a buffer that is large beside the memory there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("table", torch.zeros(12 * MIB // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def test_setting_buffers_aside_may_run_out_of_memory_too() -> None:
    meter = SimulatedMeter(60 * MIB, settings=EXPANDABLE)
    with meter.active():
        model = Buffered()
        made = MicroBatcher(model, meter=meter, fit="split")
        kept = [torch.empty(20 * MIB, dtype=torch.uint8)]

        def losses_of(start: int, stop: int) -> Losses:
            kept.clear()
            return {"loss": (model(torch.ones(stop - start, 64)).square().sum(), float(stop - start))}

        rescue = made._rescue
        rescue.wait = lambda seconds: kept.clear()
        result = made.run(losses_of, 1)
    assert result.ooms_rescued == 1
    assert result.micro_batches == (1,)


class FullWhileAdding(TorchDispatchMode):
    """Memory runs out some times where sparse gradients are added up, which takes memory."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left and func is torch.ops.aten.add.Tensor and args[0].is_sparse:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def sparse_batcher() -> MicroBatcher:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Linear(3, 1))
    return MicroBatcher(model, rules=SplitRules(samples=4))


def sparse_losses(made: MicroBatcher, start: int, stop: int) -> Losses:
    return {"loss": (made._model(torch.arange(start, stop)).square().sum(), float(stop - start))}


@pytest.mark.parametrize("times", [1, 3])
def test_sums_of_sparse_gradients_that_do_not_fit_undo_their_part(times: int) -> None:
    gradients, ooms = [], []
    for failures in (0, times):
        made = sparse_batcher()
        with FullWhileAdding(failures) as full:
            result = made.run(lambda start, stop, made=made: sparse_losses(made, start, stop), 16)
        assert not full.left
        ooms.append(result.ooms_rescued)
        gradients.append([one.grad.to_dense() for one in made._parameters if one.grad is not None])
    assert ooms == [0, times]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_sparse_gradients_of_all_parts_take_no_more_rows_than_the_table_has() -> None:
    model = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Linear(3, 1))
    words = torch.randint(0, 20, (1000,))
    MicroBatcher(model, rules=SplitRules(samples=10)).run(
        lambda start, stop: {"loss": (model(words[start:stop]).square().sum(), float(stop - start))}, 1000
    )
    assert model[0].weight.grad._nnz() <= 20


@pytest.mark.parametrize("reduction", ["samples", "tokens"])
def test_a_mean_that_is_given_as_a_sum_is_told_at_the_first_split_batch(reduction: str) -> None:
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    tokens = torch.tensor([1.0, 5.0, 2.0, 2.0, 3.0, 1.0, 1.0, 4.0])
    weights = torch.ones(8) if reduction == "samples" else tokens

    def losses_of(start: int, stop: int) -> Losses:
        own = weights[start:stop]
        return {"loss": ((model(x[start:stop])[:, 0].square() * own).sum() / own.sum(), float(own.sum()))}

    batcher = MicroBatcher(model, limits=4)
    batcher.run(losses_of, 4, denominators={"loss": float(weights[:4].sum())})
    with pytest.raises(ArgumentError, match=r"The sum of 'loss' is a mean[^\n]*\nGive the sum"):
        batcher.run(losses_of, 8, denominators={"loss": float(weights.sum())})


@pytest.mark.parametrize("model", [3, None])
def test_a_micro_batcher_of_no_module_is_refused_in_words(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"MicroBatcher computes the steps of a torch\.nn\.Module: (int|NoneType)"):
        MicroBatcher(model)


def test_a_single_optimizer_stands_for_a_list_of_one() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for given in (optimizer, [optimizer], (optimizer,), iter([optimizer])):
        made = MicroBatcher(model, meter="sim:64MiB", optimizers=given, fit="offload-optimizer")
        assert made.ladder.rung.offload_optimizer


class Coupled(torch.optim.SGD):
    """Steps by the norm of all gradients, as no optimizer can that sees a part of the parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        super().step(closure)


def test_the_remedy_for_a_state_that_cannot_leave_is_not_what_was_given() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match=r"none is given\.\nGive optimizers=\[optimizer\] to MicroBatcher"):
        MicroBatcher(model, fit="offload-optimizer")
    with pytest.raises(ArgumentError, match=r"depends on other parameters\.\nGive fit='offload', or another"):
        MicroBatcher(model, fit="offload-optimizer", optimizers=Coupled(model.parameters(), lr=0.1))


WRONG: tuple[Any, ...] = (3, "x", True, [3], torch.ones(3), object())


@pytest.mark.parametrize("name", ["meter", "limits", "rescue", "rules", "fit", "optimizers"])
def test_a_wrong_argument_of_a_batcher_is_told(name: str) -> None:
    for wrong in WRONG[name == "limits" :]:
        with pytest.raises(CanTrainError, match=r"\n"):
            MicroBatcher(nn.Linear(2, 1), **{name: wrong})


@pytest.mark.parametrize("name", ["losses_of", "denominators", "weights", "scale"])
def test_a_wrong_argument_of_a_batch_is_told_by_its_name(name: str) -> None:
    made = batcher()
    more: tuple[Any, ...] = () if name in ("losses_of", "scale") else ({"loss": "x"}, {"loss": torch.ones(2)})
    for wrong in (*WRONG, *more):
        with pytest.raises(ArgumentError, match=rf"{name} is a .*\nGive "):
            made.run(**{"losses_of": lambda start, stop: losses(made, start, stop), "batch": 16, name: wrong})


@pytest.mark.parametrize("own", [torch.ones(4), "4", None, True])
def test_a_denominator_is_a_number(own: Any) -> None:
    made = batcher()
    with pytest.raises(ArgumentError, match=r"the denominator of 'loss' is .*\nA denominator is a number"):
        made.run(lambda start, stop: {"loss": (losses(made, start, stop)["loss"][0], own)}, 4)


def test_a_scale_that_returns_no_loss_is_told() -> None:
    made = batcher()
    with pytest.raises(ArgumentError, match="scale returns the loss that it was given, scaled: None"):
        made.run(lambda start, stop: losses(made, start, stop), 16, scale=lambda loss: None)


def test_other_functions_of_a_batcher_are_functions() -> None:
    made = batcher()
    for wrong in WRONG:
        with pytest.raises(ArgumentError, match="compute is a function"):
            made.evaluate(wrong, 4)
        with pytest.raises(ArgumentError, match="on_oom is a function"):
            made.watch(wrong)


def test_a_state_of_something_else_changes_nothing() -> None:
    made = batcher()
    before = made.state_dict()
    for wrong in (*WRONG, {}, None, {**before, "backoff": 3}, {**before, "trainable": None}):
        with pytest.raises(ArgumentError, match=r"is what its state_dict\(\) returned"):
            made.load_state_dict(wrong)
    assert made.state_dict() == before
    made.load_state_dict(before)


def test_what_to_save_of_a_batcher_is_told() -> None:
    made = MicroBatcher(nn.Linear(2, 1), meter="sim:64MiB")
    for copied in (pickle.dumps, copy):
        with pytest.raises(ArgumentError, match=r"Save batcher\.state_dict\(\)"):
            copied(made)
    made.run(lambda start, stop: losses(made, start, stop), 16)
    with pytest.raises(ArgumentError, match=r"Save batcher\.state_dict\(\)"):
        deepcopy(made)


def test_a_copy_of_a_model_has_a_batcher_of_its_own() -> None:
    model = nn.Linear(2, 1)
    model.batcher = MicroBatcher(model)
    copied = deepcopy(model)
    assert copied.batcher._model is copied
    copied.batcher.run(lambda start, stop: losses(copied.batcher, start, stop), 16)
    assert model.weight.grad is None
    assert copied.weight.grad is not None
