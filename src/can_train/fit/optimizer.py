"""The optimizer of a phase, the parameters that it trains, and its step: clipping, noise, schedule and scaler."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from can_train.config.settings import CLOSURE_REASON, SPARSE_REASON, is_code
from can_train.config.task_settings import load_optimizer
from can_train.errors import (
    ConfigError,
    TaskError,
    first_sentence,
    nearest_first,
    unknown_name,
)
from can_train.fit.offloaded_state import OffloadedState, parameters_on_host
from can_train.fit.random_state import step_generator
from can_train.fit.schedules import Plateau, as_plain, schedule, task_schedule
from can_train.memory.sharded_tensors import load_sharded_optimizer, shard_like, shard_of
from can_train.task import Phase

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings

_DEFAULTS: Final[dict[str, dict[str, Any]]] = {"sgd": {"momentum": 0.9}}  # that differ from the class's defaults
_BETAS: Final = [0.9, 0.999]  # of `training.betas`: PyTorch's own; an optimizer of another package may have others
_FUSED: Final = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)  # that PyTorch has a kernel of on GPUs
_NORM_ROUNDING: Final = 1e-6  # That `clip_grad_norm_` adds to a norm, against a division by zero
_SUGGESTIONS: Final = 5  # Names that an error lists


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Gaussian noise of the gradients: in step t, counted from 0, of standard deviation σ / (1 + t)^(γ / 2).

    Source: Neelakantan et al., Adding Gradient Noise Improves Learning for Very Deep Networks, 2015: variance
    η / (1 + t)^γ, with γ = 0.55 and η = σ² among 0.01, 0.3 and 1.
    """

    deviation: float  # σ; 0: no noise
    decay: float  # γ; 0: the same in all steps
    seed: int

    def add(self, parameters: Iterable[nn.Parameter], *, step: int, update: int) -> None:
        """Adds the noise of a step's optimizer update to all gradients.

        Raises:
            ConfigError: A gradient is sparse.
        """
        # On the host: the numbers that a GPU draws depend on its kind, and all ranks need equal numbers.
        generator = step_generator(seed=self.seed, step=step, update=update, noise=True)
        deviation = self.deviation / (1 + step) ** (self.decay / 2)
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise ConfigError("Gradient noise is added to dense gradients, and one of the model is sparse",
                                  value=f"of shape {tuple(gradient.shape)}", remedy="Give --grad-noise 0")  # fmt: skip
            drawn = torch.randn(gradient.shape, dtype=gradient.dtype, generator=generator)
            if shard_of(gradient) is not gradient:
                gradient, drawn = shard_of(gradient), shard_of(shard_like(drawn, gradient))
            gradient.add_(drawn.to(gradient.device), alpha=deviation)


@dataclass(kw_only=True)
class Optimization:
    """Optimizer, schedule and gradient scaler, which step together."""

    optimizer: Optimizer
    scheduler: LRScheduler  # The schedule of the settings, or a task's own
    ticks: int  # Moves of the schedule in the whole run
    scaler: torch.amp.GradScaler  # Scales losses under fp16; otherwise disabled
    clip_norm: float  # Largest gradient norm; 0: gradients are not clipped
    clip_value: float  # Largest absolute value of an entry of the gradient; 0: as above
    noise: GradientNoise
    plateau: Plateau | None  # Of the schedule `plateau`
    is_lazy: bool  # Whether the first step of a parameter makes its state; Adagrad makes it at once, and never again
    # Of the phase. A frozen one has no gradient, so the optimizer passes over it until it is thawed.
    parameters: list[nn.Parameter]
    offloaded: OffloadedState | None = None  # The state that waits on the host; None: it never has

    @property
    def device_state_bytes(self) -> int:
        """Bytes of the optimizer's state that are on the device."""
        return state_bytes(self.optimizer) if self.offloaded is None else self.offloaded.device_bytes

    def keep_state(self, on_host: bool) -> None:
        """Keeps the optimizer's state on the host from now on, or on the device, where memory may run out."""
        if on_host:
            self.offloaded = self.offloaded or OffloadedState(self.optimizer)
        if self.offloaded is not None:
            self.offloaded.keep(on_host)

    def step(self, number: int = 0, update: int = 0) -> bool:
        """Unscales and clips the gradients, adds noise, steps, and clears them; the caller moves the schedule.

        Args:
            number: Steps of the run that are done; the noise of the gradients depends on it.
            update: Optimizer steps of this step that are done, where it has several.

        Returns:
            Whether the weights moved: under fp16 the scaler skips a step whose gradients overflowed.
        """
        coalesce_gradients(self.parameters)
        scale = self.scaler.get_scale()
        if self.clip_norm > 0 or self.clip_value > 0 or self.noise.deviation > 0:
            self.scaler.unscale_(self.optimizer)
        if self.clip_value > 0:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip_value)
        if self.clip_norm > 0:
            clip_norm(self.parameters, self.clip_norm)
        if self.noise.deviation > 0:
            self.noise.add(self.parameters, step=number, update=update)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self.scaler.get_scale() >= scale

    @property
    def trainable(self) -> tuple[bool, ...]:
        """For each parameter, whether it is trained now."""
        return tuple(parameter.requires_grad for parameter in self.parameters)

    def set_trainable(self, trainable: Iterable[bool]) -> None:
        """Freezes and thaws the parameters, in the order of `trainable`."""
        for parameter, is_trained in zip(self.parameters, trainable, strict=True):
            parameter.requires_grad_(is_trained)

    def forget_frozen(self) -> None:
        """Drops the state of frozen parameters: old moments would push into an old direction once these are thawed."""
        state = self.optimizer.state
        for parameter in list(state):
            if self.is_lazy and not parameter.requires_grad:
                del state[parameter]

    @property
    def lr(self) -> float:
        """The current learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def move_schedule(self) -> None:
        """Moves the schedule by a step, or by an epoch."""
        # Validations move it.
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            self._keep_plain()

    def validated(self, loss: float) -> None:
        """Tells a schedule that follows the validation loss about it; does nothing for any other."""
        if self.plateau is not None:
            self.plateau.validated(loss)
            self.follow_schedule()
        elif isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
            self._keep_plain()

    def _keep_plain(self) -> None:
        # A scheduler of somebody's own may compute with numpy, whose numbers no checkpoint is read back with.
        for group in self.optimizer.param_groups:
            group["lr"] = as_plain(group["lr"])

    def follow_schedule(self) -> None:
        """Sets the learning rate to the schedule's at the current tick: a restored state may have been trained by
        another schedule.
        """
        if type(self.scheduler) is not LambdaLR:
            return
        for group, base_lr, share in zip(
            self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base_lr * share(self.scheduler.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs to continue bit by bit."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        return {**state, "scheduler": as_plain(state["scheduler"]), "ticks": self.ticks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`.

        Raises:
            ValueError: It belongs to other parameters, or a part of it is something else.
        """
        with nullcontext() if self.offloaded is None else self.offloaded.loading():
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        own = {name: part.state_dict() for name, part in self._parts.items()}
        fresh = [{**group, "params": None} for group in self.optimizer.param_groups]
        for name, part in self._parts.items():
            if part is self.scheduler and type(part) is not LambdaLR:
                self._restore_own_schedule(state, fresh)
                continue
            if part is self.optimizer:
                load_sharded_optimizer(self.optimizer, state[name])
            else:
                part.load_state_dict(state[name])
            # PyTorch copies most of it unseen, and fails in the next step.
            now = part.state_dict()
            _check_form(own[name].get("param_groups", own[name]), now.get("param_groups", now))
        saved = state["optimizer"]["state"]
        is_torch = type(self.optimizer).__module__.startswith("torch.optim.")
        # A state numbers the parameters in the order of the groups.
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            values = self.optimizer.state.get(parameter, {})
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    continue
                # Adafactor's means of rows and columns have 1 in the place of a size.
                if is_torch and not _broadcasts(value.shape, parameter.shape):
                    raise ValueError(f"a moment is {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
                # PyTorch gives each number the type of its parameter: NAdam's product of momenta would be rounded in
                # another way from here on, and moments of 8 bits would become floats.
                before = saved.get(number, {}).get(name)
                if isinstance(before, Tensor) and before.dtype != value.dtype:
                    values[name] = before.to(value.device, copy=True)

    def _restore_own_schedule(self, state: dict[str, Any], fresh: Sequence[dict[str, Any]]) -> None:
        """Restores a task's own scheduler, whose state knows the length of its run. Where the run is longer by now, the
        new scheduler is moved from the start, where the groups of the optimizer were `fresh`.
        """
        saved = state["scheduler"]
        if state["ticks"] == self.ticks or isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.load_state_dict(saved)
            return
        for group, before in zip(self.optimizer.param_groups, fresh, strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})
        with warnings.catch_warnings():
            # The steps of the optimizer were taken in an earlier process.
            warnings.simplefilter("ignore")
            for _ in range(saved["last_epoch"]):
                self.move_schedule()

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return parts if self.plateau is None else {**parts, "plateau": self.plateau}


def clip_norm(parameters: Sequence[nn.Parameter], most: float) -> None:
    """Clips the norm of the gradients, as `clip_grad_norm_` does; gradients may be shards on the ranks of a run."""
    sharded: list[Any] = [one.grad for one in parameters if one.grad is not None and shard_of(one) is not one]
    if not sharded:
        torch.nn.utils.clip_grad_norm_(parameters, most)
        return
    whole = [one.grad for one in parameters if one.grad is not None and shard_of(one) is one]
    shards = [shard_of(gradient) for gradient in sharded]
    square = torch.nn.utils.get_total_norm(shards).square()
    torch.distributed.all_reduce(square, group=sharded[0].device_mesh.get_group())
    if whole:
        square += torch.nn.utils.get_total_norm(whole).square()
    torch._foreach_mul_([*shards, *whole], (most / (square.sqrt() + _NORM_ROUNDING)).clamp(max=1.0))


def state_bytes(optimizer: Optimizer) -> int:
    """Returns the bytes of an optimizer's state."""
    states = optimizer.state.values()
    return sum(shard_of(value).nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, whole) for size, whole in pairs)


def _check_form(own: Any, found: Any) -> None:
    """Raises ValueError where a restored setting is missing, or is no number in place of one."""
    if isinstance(own, dict):
        for name, value in own.items():
            _check_form(value, found[name])
    elif isinstance(own, list | tuple):
        for one, other in zip(own, found, strict=True):
            _check_form(one, other)
    elif isinstance(own, int | float) and not isinstance(found, int | float):
        raise ValueError(f"{found!r} is in the place of {own}")


# The parameters that are trained: by the names in settings, and phase by phase. A name stands for a module with all
# that is in it, or for a parameter; a pattern (`*.bias`) for those whose names match.


def named_by(model: nn.Module, names: Sequence[str], setting: str) -> set[str]:
    """Returns the names of the parameters that some names or patterns stand for.

    Args:
        model: The model.
        names: Of modules or parameters, or patterns of them.
        setting: Where they were given, for the error.

    Raises:
        ConfigError: A name stands for no parameter; the message lists the nearest names.
    """
    parameters = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for name in names:
        # A parameter goes by its own name and by the modules' that it is in: a, a.b, a.b.weight.
        own = {one for one in parameters if any(part == name or fnmatchcase(part, name)
               for part in accumulate(one.split("."), "{}.{}".format))}  # fmt: skip
        if not own:
            modules = [one for one, _ in model.named_modules() if one]
            nearest = ", ".join(nearest_first(name, [*modules, *parameters])[:_SUGGESTIONS])
            raise ConfigError(f"{setting} names parts of the model", value=repr(name), remedy=f"Nearest: {nearest}")
        found |= own
    return found


def freeze(model: nn.Module, training: TrainingSettings, *, epoch: int) -> None:
    """Freezes the parameters that `training.freeze` names, or thaws them once its epochs are over."""
    if training.freeze:
        names = named_by(model, training.freeze, "training.freeze")
        is_trained = 0 < training.thaw_epoch <= epoch
        for name, parameter in model.named_parameters():
            if name in names and (parameter.is_floating_point() or parameter.is_complex()):
                parameter.requires_grad_(is_trained)


def coalesce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Adds the entries of sparse gradients that belong to one row.

    A momentum would keep both entries of a row that comes twice in a batch, and more with each step.
    """
    for parameter in parameters:
        if (gradient := parameter.grad) is not None and gradient.layout is torch.sparse_coo:
            parameter.grad = gradient.coalesce()


def check_sparse(model: nn.Module, training: TrainingSettings) -> None:
    """Raises ConfigError where the gradient of a module is sparse, and the optimizer takes dense ones alone."""
    of_pytorch = training.optimizer in ("sgd", "adagrad") and not training.weight_decay
    takes_sparse = of_pytorch or is_code(training.optimizer)
    is_clipped = training.grad_clip_norm > 0 or training.grad_clip_value > 0
    if takes_sparse and not is_clipped:
        return
    clips = "--grad-clip-norm 0 --grad-clip-value 0"
    who, remedy = f"The optimizer {training.optimizer}", "--optimizer sgd --weight-decay 0"
    if is_clipped:
        who, remedy = "Clipping", clips if takes_sparse else f"{remedy} {clips}"
    for name in sparse_weights(model):
        raise ConfigError(f"{who} takes dense gradients alone, as it is set", value=f"{name} has sparse=True",
                          remedy=f"Leave sparse=True out, or give {remedy}")  # fmt: skip


def sparse_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights that get sparse gradients, which no fused optimizer takes, by the names of their modules."""
    return {
        name or type(module).__name__: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    }


def phase_parameters(model: nn.Module, phase: Phase) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of a phase with their names, frozen ones too; integers, which nothing trains, are left
    out.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.is_floating_point() or one.is_complex()]
    if not phase.parameters:
        return named
    names = named_by(model, phase.parameters, f"phase {phase.name}")
    return [(name, parameter) for name, parameter in named if name in names]


def phase_training(training: TrainingSettings, phase: Phase) -> TrainingSettings:
    """Returns the training settings of a phase."""
    return replace(training, **phase.training) if phase.training else training


@contextmanager
def only_trained(model: nn.Module, phase: Phase) -> Iterator[None]:
    """Freezes the parameters of all other phases for the block."""
    if not phase.parameters:
        yield
        return
    own = {id(parameter) for _, parameter in phase_parameters(model, phase)}
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in own]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def by_settings(optimizer: Optimizer, steps: int) -> object:
    """Stands for a task that has no schedule of its own."""


def make_optimization(  # noqa: PLR0913 - the settings of a phase, and a task's own schedule
    model: nn.Module,
    training: TrainingSettings,
    *,
    lr: float,
    total_steps: int,
    phase: Phase = Phase(),  # noqa: B008 - frozen
    schedule_of: Callable[[Optimizer, int], object] = by_settings,
    offloaded: bool = False,
) -> Optimization:
    """Makes optimizer, schedule and scaler for all parameters of a phase, also those that are frozen now and thawed
    later. `lr` is the learning rate at the plan's logical batch, `total_steps` counts optimizer steps, not
    micro-batches. `schedule_of` is `Task.schedule`; `offloaded` tells whether the state waits on the host.
    """
    named = phase_parameters(model, phase)
    groups, device = parameter_groups(model, named, training, lr), named[0][1].device
    with parameters_on_host([parameter for _, parameter in named]) if offloaded else nullcontext():
        optimizer = make_optimizer(groups, training, lr, device, is_sparse=bool(sparse_weights(model)))
    state = OffloadedState(optimizer) if offloaded else None
    if state is not None:
        state.begin()
    ticks = total_steps if training.scheduler_interval == "step" else training.epochs
    is_lazy = not optimizer.state
    scheduler, plateau = task_schedule(schedule_of, optimizer, ticks), None
    if scheduler is None:
        if training.scheduler == "plateau":
            plateau = Plateau(factor=training.schedule_factor, patience=training.schedule_patience)
        scheduler = LambdaLR(optimizer, schedule(training, ticks, plateau))
    return Optimization(
        optimizer=optimizer,
        scheduler=scheduler,
        ticks=ticks,
        scaler=torch.amp.GradScaler(device.type, enabled=training.precision == "fp16"),
        clip_norm=training.grad_clip_norm,
        clip_value=training.grad_clip_value,
        noise=GradientNoise(deviation=training.grad_noise, decay=training.grad_noise_decay, seed=training.seed),
        plateau=plateau,
        is_lazy=is_lazy,
        parameters=[parameter for _, parameter in named],
        offloaded=state,
    )


def parameter_groups(
    model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], training: TrainingSettings, lr: float
) -> list[dict[str, Any]]:
    """Groups parameters, given with their names, by learning rate and weight decay, as optimizers take them.

    Where `training.lr_factors` names a parameter more than once, the last one counts.
    """
    without_decay = named_by(model, training.no_decay, "training.no_decay")
    factors: dict[str, float] = {}
    for pattern, factor in training.lr_factor_of.items():
        factors |= dict.fromkeys(named_by(model, [pattern], "training.lr_factors"), factor)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        decay = 0.0 if name in without_decay else training.weight_decay
        groups.setdefault((factors.get(name, 1.0), decay), []).append(parameter)
    # The learning rate that is reported is the first group's.
    ordered = sorted(groups.items(), key=lambda group: group[0][0] != 1.0)
    return [{"params": own, "lr": lr * factor, "weight_decay": decay} for (factor, decay), own in ordered]


def make_optimizer(
    parameters: Sequence[Any], training: TrainingSettings, lr: float, device: torch.device, *, is_sparse: bool = False
) -> Optimizer:
    """Makes the optimizer alone, for parameters or groups of them; `is_sparse` tells whether a gradient is sparse.

    Raises:
        ConfigError: There is no such optimizer, it does not train as batches are computed here, or it has no such
            argument.
        TaskError: The code of an optimizer that is not PyTorch's failed.
    """
    name, given = training.optimizer, training.optimizer_args
    kind = _optimizer_class(name)
    taken = inspect.signature(kind).parameters
    takes_any = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in taken.values())
    if unknown := [key for key in given if key not in taken and not takes_any]:
        raise unknown_name(f"argument of {kind.__name__}", unknown[0], [key for key in taken if key != "params"])
    arguments = {"lr": lr, "weight_decay": training.weight_decay, **_DEFAULTS.get(name, {})}
    if kind in _FUSED or training.betas != _BETAS:
        arguments["betas"] = tuple(training.betas)
    if device.type == "cuda" and not given.keys() & {"fused", "foreach", "differentiable"}:
        # PyTorch's default on a GPU (foreach) copies the parameters for a moment in every step, which the batch could
        # have used. Where there is nothing else, it is asked for: what is measured on the host then does the same.
        arguments["fused" if kind in _FUSED else "foreach"] = True
    if (is_sparse or _is_partly_sharded(parameters)) and not given.keys() & {"fused", "foreach", "differentiable"}:
        # Fused kernels take dense gradients alone, and these kernels either shards or whole weights.
        arguments |= {"fused": False, "foreach": False}
    arguments = {key: value for key, value in arguments.items() if key in taken}
    arguments |= {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        optimizer: Optimizer = kind(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training.optimizer: {kind.__name__} cannot be made", value=first_sentence(error),
                          remedy="Correct its arguments, or name another: --optimizer adamw") from error  # fmt: skip
    except Exception as error:
        raise TaskError(f"{kind.__name__} failed when it was made", error) from error
    return optimizer


def _is_partly_sharded(parameters: Sequence[Any]) -> bool:
    """Tells whether some parameters, or parameters of groups, are shards and others are whole."""
    groups = [one["params"] if isinstance(one, dict) else [one] for one in parameters]
    return len({shard_of(one) is one for group in groups for one in group}) > 1


def _optimizer_class(name: str) -> Any:
    """Returns the class that `training.optimizer` names; raises ConfigError where it cannot train here."""
    if is_code(name):
        kind = load_optimizer(name)
    else:
        kinds = {key.lower(): kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
        kind = kinds.get(name)
        if kind is None:
            raise ConfigError(f"PyTorch {torch.__version__} has no optimizer {name}", remedy="Take a later one")
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"training.optimizer: {name} does not derive from torch.optim.Optimizer",
                          remedy="Name one of torch.optim (adamw), or a class: package.module.Class")  # fmt: skip
    closure = inspect.signature(kind.step).parameters.get("closure")
    reason = ""
    if closure is not None and closure.default is inspect.Parameter.empty:
        reason = CLOSURE_REASON
    elif issubclass(kind, torch.optim.SparseAdam):
        reason = SPARSE_REASON
    elif hasattr(kind, "eval"):
        reason = "its weights differ in training and evaluation, between which nothing here switches it"
    if reason:
        raise ConfigError(f"training.optimizer cannot be {name}: {reason}", remedy="Try --optimizer adamw")
    return kind
