"""An optimizer whose state waits on the host moves the weights as one whose state stays on the device, bit by bit."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from can_train.errors import ArgumentError
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.offloaded_state import OffloadedState, in_chunks, parameters_on_host, refusal
from can_train.fit.optimizer_memory import measure_optimizer
from can_train.fit.rescue import RescueSettings
from can_train.fit.rungs import Rung
from can_train.memory.meters import simulated_gpu
from can_train.memory.out_of_memory import CatchOutOfMemory

STEPS: Final = 4
WIDTH: Final = 64
Make = Callable[[Any], Optimizer]
OPTIMIZERS: Final[dict[str, Make]] = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AMSGrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    **{name: partial(getattr(torch.optim, name), lr=0.01)
       for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")},
}  # fmt: skip


class Norm(torch.optim.SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        torch._foreach_div_(gradients, torch.stack(torch._foreach_norm(gradients)).norm())
        super().step()


class Counting(torch.optim.SGD):
    """Takes smaller steps with every call."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.5
        super().step()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])


class Training:
    """Some steps of a model of two groups on a simulated GPU."""

    def __init__(self, make: Make, *, on_host: bool, kind: type[OffloadedState] = OffloadedState) -> None:
        self.model = layers()
        groups = [{"params": self.model[:3].parameters()}, {"params": self.model[3:].parameters(), "lr": 0.003}]
        with simulated_gpu("16MiB", self.model) as self.meter:
            with parameters_on_host([*self.model.parameters()]) if on_host else nullcontext():
                self.optimizer = make(groups)
            self.state = kind(self.optimizer)
            if on_host:
                self.state.begin()
            self.train(STEPS)
            self.between_steps = self.meter.allocated_bytes()

    def train(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(steps)
        for _ in range(steps):
            self.model(torch.randn(8, WIDTH, generator=generator)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def go_on(self, steps: int = 2) -> None:
        with self.meter.active():
            self.train(steps)

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def are_equal(one: Training, other: Training) -> bool:
    return all(map(torch.equal, one.weights, other.weights))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_saved_state_are_those_of_a_plain_step(name: str) -> None:
    plain, offloaded = (Training(OPTIMIZERS[name], on_host=on_host) for on_host in (False, True))
    assert are_equal(plain, offloaded)
    assert not refusal(OPTIMIZERS[name])
    one, other = (training.optimizer.state_dict()["state"] for training in (plain, offloaded))
    assert one.keys() == other.keys()
    for number, values in one.items():
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(other[number][key]))
                   for key, value in values.items())  # fmt: skip


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_between_steps_only_small_parts_of_the_state_are_on_the_device(name: str) -> None:
    plain, offloaded = (Training(OPTIMIZERS[name], on_host=on_host) for on_host in (False, True))
    large = sum(value.nbytes for state in plain.optimizer.state.values() for value in state.values()
                if isinstance(value, Tensor) and value.dim() > 1)  # fmt: skip
    assert plain.between_steps - offloaded.between_steps == pytest.approx(large, abs=2**13)
    assert offloaded.state.host_bytes == large
    # Counters of steps may be there, too.
    assert offloaded.meter.gpu.host_bytes == pytest.approx(large, abs=64)
    assert plain.state.host_bytes == 0


class Forgetful(OffloadedState):
    """Leaves the state that a step has changed on the device, and keeps the state of before."""

    def _leave(self, chunk: Any, ready: Any) -> Any:
        for parameter in chunk.parameters if ready.hosts else ():
            for name in self._optimizer.state[parameter]:
                if (host := ready.hosts.get((id(parameter), name))) is not None:
                    self._optimizer.state[parameter][name] = host
        return super()._leave(chunk, ready)


def test_a_mutant_that_loses_the_state_of_a_step_moves_the_weights_otherwise() -> None:
    plain = Training(OPTIMIZERS["AdamW"], on_host=False)
    assert not are_equal(plain, Training(OPTIMIZERS["AdamW"], on_host=True, kind=Forgetful))


@pytest.mark.parametrize("kind", [Norm, Counting])
def test_an_optimizer_that_treats_parameters_together_is_refused(kind: Any) -> None:
    assert refusal(partial(kind, lr=0.1, momentum=0.9)) == "its step of a parameter depends on other parameters"


def test_a_step_takes_the_memory_of_three_chunks() -> None:
    parameters = [nn.Parameter(torch.zeros(256, 256)) for _ in range(40)]
    needs = measure_optimizer(parameters, OPTIMIZERS["SGD"], offloaded=True)
    assert needs.state_bytes == 0
    assert needs.host_bytes == needs.parameter_bytes == 40 * 2**18
    assert needs.transient_bytes == 3 * 2**18


def test_chunks_have_all_parameters_in_order() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (4, 4, 20, 1, 1, 1)]
    chunks = [*in_chunks(parameters, 40.0)]
    assert [len(chunk) for chunk in chunks] == [2, 1, 3]
    assert [id(one) for chunk in chunks for one in chunk] == [*map(id, parameters)]


def test_the_size_of_each_parameter_is_read_once_for_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[Tensor]()

    def part(parameter: Tensor) -> Tensor:
        read.append(parameter)
        return parameter

    monkeypatch.setattr("can_train.fit.offloaded_state.shard_of", part)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(100)]
    assert [len(chunk) for chunk in in_chunks(parameters, 4.0 * 60)] == [60, 40]
    assert len(read) == 100


def test_the_state_of_a_plain_step_is_loaded_to_the_host_and_back() -> None:
    plain, offloaded = (Training(OPTIMIZERS["AdamW, fused"], on_host=on_host) for on_host in (False, True))
    plain.go_on()
    offloaded.model.load_state_dict(plain.model.state_dict())
    state = deepcopy(plain.optimizer.state_dict())
    with offloaded.meter.active(), offloaded.state.loading():
        offloaded.optimizer.load_state_dict(state)
    assert offloaded.meter.allocated_bytes() <= offloaded.between_steps
    for training in (plain, offloaded):
        training.go_on()
    assert are_equal(plain, offloaded)


def test_the_state_returns_to_the_device_where_it_fits() -> None:
    plain, offloaded = (Training(OPTIMIZERS["AdamW"], on_host=on_host) for on_host in (False, True))
    with offloaded.meter.active():
        offloaded.state.end()
    assert offloaded.meter.allocated_bytes() == plain.between_steps
    assert offloaded.state.host_bytes == 0
    for training in (plain, offloaded):
        training.go_on()
    assert are_equal(plain, offloaded)


def test_a_state_that_does_not_fit_on_the_device_stays_on_the_host() -> None:
    plain, offloaded = (Training(OPTIMIZERS["AdamW"], on_host=on_host) for on_host in (False, True))
    host_bytes = offloaded.state.host_bytes
    with offloaded.meter.active():
        taken = []
        with CatchOutOfMemory():
            while True:
                taken.append(torch.empty(2**14, dtype=torch.uint8))
        # A part of the state fits.
        del taken[:4]
        with pytest.raises(torch.OutOfMemoryError):
            offloaded.state.end()
        taken.clear()
    assert (offloaded.state.is_on, offloaded.state.host_bytes) == (True, host_bytes)
    for training in (plain, offloaded):
        training.go_on()
    assert are_equal(plain, offloaded)


def in_own_loop(memory: str, extra: int = 0, **given: Any) -> tuple[MicroBatcher, list[Tensor]]:
    """Trains in a loop of one's own, whose passes hold some blocks of 64 KiB from the third step on."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(20)])
    with simulated_gpu(memory, model) as meter:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batcher = MicroBatcher(model, meter=meter, optimizers=[optimizer], **given)
        for step in range(5):
            x = torch.randn(2, 128, generator=torch.Generator().manual_seed(step))

            def losses_of(start: int, stop: int, step: int = step, x: Tensor = x) -> Any:
                held = [torch.empty(2**16, dtype=torch.uint8) for _ in range(extra * (step > 1))]
                loss = model(x[start:stop]).square().sum()
                del held
                return {"loss": (loss, stop - start)}

            batcher.run(losses_of, 2)
            optimizer.step()
            optimizer.zero_grad()
            batcher.stepped()
    return batcher, [parameter.detach() for parameter in model.parameters()]


def test_the_state_of_a_loop_of_ones_own_leaves_where_memory_runs_out() -> None:
    plain, weights = in_own_loop("16MiB", limits=1)
    tight, others = in_own_loop("16MiB", 190, limits=1, rescue=RescueSettings(retries=0))
    assert not plain.ladder.rung.offload_optimizer
    assert tight.ladder.rung.offload_optimizer
    assert all(map(torch.equal, weights, others))


def test_the_state_of_a_loop_of_ones_own_leaves_by_hand() -> None:
    _, weights = in_own_loop("16MiB", limits=1)
    by_hand, others = in_own_loop("16MiB", limits=1, fit="offload-optimizer")
    assert by_hand.ladder.rung == Rung(offload_optimizer=True)
    assert all(map(torch.equal, weights, others))


def test_a_loop_without_an_optimizer_has_no_state_to_offload() -> None:
    with pytest.raises(ArgumentError, match=r"fit='offload-optimizer': none is given"):
        MicroBatcher(layers(), meter="sim:16MiB", fit="offload-optimizer")


def test_closures_and_hooks_are_called_once_a_step() -> None:
    training, calls = Training(OPTIMIZERS["SGD"], on_host=True), list[str]()

    def closure() -> Tensor:
        calls.append("closure")
        loss: Tensor = training.model(torch.ones(2, WIDTH)).square().sum()
        loss.backward()
        return loss

    training.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    training.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with training.meter.active():
        loss: Any = training.optimizer.step(closure)
    assert loss.item() > 0
    assert sorted(calls) == ["after", "before", "closure"]


class Leaving(Training):
    """Steps once more on the device. Meanwhile the state leaves: in the step's closure, or in a hook."""

    def __init__(self, make: Make, place: str) -> None:
        super().__init__(make, on_host=False)
        self.place = place
        self.calls: list[str] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.called("hook"))
        # A framework's hooks are there before the state is watched.
        hooks: Any = self.optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(next(reversed(hooks)), last=False)
        self.optimizer.register_step_post_hook(lambda *_: self.called("after"))
        with self.meter.active():
            loss: Any = self.optimizer.step(self.closure)
            self.loss = loss.item()
        self.go_on()

    def called(self, where: str) -> None:
        self.calls.append(where)
        if where == self.place:
            self.state.begin()

    def closure(self) -> Tensor:
        loss: Tensor = self.model(torch.ones(2, WIDTH)).square().sum()
        loss.backward()
        self.called("closure")
        return loss.detach()


@pytest.mark.parametrize("place", ["closure", "hook"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_state_may_leave_once_a_step_has_been_called(name: str, place: str) -> None:
    plain, left = (Leaving(OPTIMIZERS[name], where) for where in ("nowhere", place))
    assert (plain.state.host_bytes, left.state.host_bytes > 0) == (0, True)
    assert are_equal(plain, left)
    assert left.loss == plain.loss
    assert left.calls[:3] == plain.calls[:3] == ["hook", "closure", "after"]


def test_a_scheduler_and_a_scaler_step_it_as_any_optimizer() -> None:
    trained = []
    for on_host in (False, True):
        training = Training(OPTIMIZERS["AdamW"], on_host=on_host)
        scheduler, scaler = LambdaLR(training.optimizer, lambda step: 0.5**step), torch.amp.GradScaler("cpu")
        with training.meter.active():
            for _ in range(3):
                scaler.scale(training.model(torch.ones(2, WIDTH)).square().sum()).backward()
                scaler.step(training.optimizer)
                scaler.update()
                scheduler.step()
        trained.append(training)
    assert are_equal(*trained)


def test_an_optimizer_that_accelerate_has_wrapped_is_taken_out() -> None:
    AcceleratedOptimizer = import_module("accelerate.optimizer").AcceleratedOptimizer
    import_module("accelerate").Accelerator(cpu=True)
    found = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = layers()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = AcceleratedOptimizer(optimizer) if wraps else optimizer
        batcher = MicroBatcher(model, meter="sim:16MiB", limits=1, fit="offload-optimizer", optimizers=optimizer)
        for _ in range(3):
            x = torch.ones(2, next(model.parameters()).shape[1])
            batcher.run(lambda start, stop, x=x, model=model: {"loss": (model(x[start:stop]).sum(), stop - start)}, 2)
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*found)


def test_an_optimizer_that_a_gradient_scaler_steps_is_refused_with_the_reason() -> None:
    AcceleratedOptimizer = import_module("accelerate.optimizer").AcceleratedOptimizer
    import_module("accelerate").Accelerator(cpu=True)
    model = layers()
    optimizer = AcceleratedOptimizer(torch.optim.AdamW(model.parameters()), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ArgumentError, match="accelerate's gradient scaler calls a step of its own"):
        MicroBatcher(model, meter="sim:16MiB", fit="offload-optimizer", optimizers=[optimizer])
