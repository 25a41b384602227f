"""Rung 4: weights, gradients and optimizer state live as shards on the ranks of a run, by PyTorch's `fully_shard`.

A pass gathers the weights of one block after the other, and adds up the gradients of each over the ranks. Ranks may
have different numbers of micro-batches, and memory may run out on any rank, but all must enter the collectives of a
pass. So a pass is rehearsed once without the other ranks, which shows its collectives. From then on each pass enters
exactly these: a rank without samples enters them alone, and so does a rank whose pass fails, from there to the end.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from can_train.errors import ConfigError, RankGoneError
from can_train.fit.cost_model import ShardedWeights
from can_train.fit.optimizer_memory import state_share
from can_train.fit.pass_state import Snapshot
from can_train.fit.rescue import RepeatedError
from can_train.fit.rungs import candidates, gathered_weights, modules_of_segment, sharded_parameters
from can_train.memory.catalogue import predicted_room
from can_train.memory.out_of_memory import CatchOutOfMemory, is_out_of_memory
from can_train.memory.sharded_tensors import padded, padded_numel, shard_of, sharded_like
from can_train.memory.simulated.gpu import look_again

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.fit.rescue import Ladder, Try
    from can_train.fit.rungs import Rung
    from can_train.memory.meters import Meter

T = TypeVar("T")
# Optimizers that update an entry of a weight by the same entry of its gradient and its moments alone.
ELEMENTWISE: Final = ("adamw", "adam", "sgd", "adadelta", "adagrad", "adamax", "nadam", "radam", "rmsprop", "rprop")
# From torch 2.13 on, the older names are deprecated.
_GATHER: Final = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE: Final = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class SharingRanks(Protocol):
    """The ranks that share a model."""

    rank: int
    size: int

    @property
    def tensor_group(self) -> ProcessGroup:
        """The group that exchanges tensors of the device."""

    def exchange(self, result: T) -> list[T]:
        """Returns the small picklable objects of all ranks, by rank."""

    def collective(self, call: Callable[[], object]) -> None:
        """Runs a collective of tensors, which all ranks enter."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a pass: the weights of a module are gathered, or its gradients are added up.

    Attributes:
        module: Name of the module.
        is_gather: Whether weights are gathered.
        numel: Elements of one rank's shard.
        dtype: Name of their type.
    """

    module: str
    is_gather: bool
    numel: int
    dtype: str


@dataclass(frozen=True)
class Passage:
    """The collectives of a pass, in order, and the parameters that it gives gradients to."""

    collectives: tuple[Collective, ...]
    trained: frozenset[str]  # Names


class ShardingError(RuntimeError):
    """A pass enters other collectives than its rehearsal."""


@dataclass(kw_only=True)
class Passes:
    """The passes of one batch, or of one evaluation, on this rank.

    Attributes:
        kind: All that their collectives depend on, beside the rung.
        run: Runs a pass of samples start:stop.
        undo_scope: Opens the span of a pass, which is undone where it fails.
        use_rung: Called with the rung of `ladder` after another rank has climbed to it.
    """

    kind: object
    run: Callable[[int, int], object]
    undo_scope: Callable[[], AbstractContextManager[None]]
    model: nn.Module
    meter: Meter
    ladder: Ladder
    use_rung: Callable[[Rung], object]


class _Gather:
    """Gathers the weights of a module, as `FSDPModule.set_custom_all_gather` takes it."""

    def __init__(self, shards: Shards, module: str) -> None:
        self._shards, self._module = shards, module

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        del group, async_op
        self._shards.gather(self._module, output_tensor, input_tensor)


class _Reduce(_Gather):
    """Adds up the gradients of a module, as `FSDPModule.set_custom_reduce_scatter` takes it."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        del group, op, async_op
        self._shards.reduce(self._module, output_tensor, input_tensor)


class Shards:
    """A model whose weights are shards on the ranks of a run.

    Args:
        model: The model, whole, with the same weights on all ranks; it is changed.
        ranks: The ranks.
        device: Device of the shards.
        called: Modules that the loss calls, from outside of any other.
        used: Parameters that it computes with outside of them.

    Attributes:
        replicated: Parameters that each rank keeps whole: those without a dimension, and those that the loss computes
            with outside of the modules that it calls.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: SharingRanks,
        device: torch.device,
        called: Sequence[nn.Module],
        used: Sequence[nn.Parameter] = (),
    ) -> None:
        self.model, self._ranks = model, ranks
        self._is_live = False
        self._seen: list[Collective] = []
        self._expected: tuple[Collective, ...] = ()
        self._passages: dict[tuple[object, int], Passage] = {}
        self._passage_now = Passage((), frozenset())
        self._is_unsettled = False  # Whether a pass of this rank has begun whose end the other ranks wait for
        self._names = {module: name for name, module in model.named_modules()}
        roots = _outermost(model, called)
        # The weights of a module are freed after its call, and the loss may call a part of it then.
        parts = [module for module in called if module not in roots]
        uses = _uses(model)
        shared = {one for part in parts if not _is_alone(part, uses) for one in part.parameters()}
        kept = {*used, *shared, *(one for one in model.parameters() if one.dim() == 0)}
        self._modules = _fully_shard(model, [*roots, *parts], ranks, device, kept)
        self._roots: list[Any] = [module for module in roots if module in self._modules]
        for module in self._modules:
            name = self._names[module]
            module.set_custom_all_gather(_Gather(self, name))
            module.set_custom_reduce_scatter(_Reduce(self, name))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            for one in sharded_parameters(module):
                _tell_resizes(one)
        for root in self._roots:
            root._get_fsdp_state()._lazy_init()
        for module in self._modules:
            # Made in inference, the gathered weights could not be trained.
            module.unshard()
            module.reshard()
        self.replicated = [parameter for parameter in model.parameters() if shard_of(parameter) is parameter]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    # Collectives.

    def passes(self, **given: Any) -> Passes:
        """Describes the passes of one batch, or of one evaluation, on this rank."""
        return Passes(**given)

    def gather(self, module: str, whole: Tensor, shard: Tensor) -> None:
        """Gathers the shards of all ranks; in a rehearsal, copies of this rank's shard are in the place of others'."""
        if self._enter(module, shard, is_gather=True):
            group = self._ranks.tensor_group
            self._ranks.collective(lambda: _GATHER(whole, shard, group=group))
        else:
            whole.view(self.size, -1).copy_(shard.view(1, -1).expand(self.size, -1))

    def reduce(self, module: str, shard: Tensor, whole: Tensor) -> None:
        """Adds up gradients over the ranks; in a rehearsal, this rank's are taken alone."""
        if self._enter(module, shard, is_gather=False):
            group = self._ranks.tensor_group
            self._ranks.collective(lambda: _REDUCE(shard, whole, group=group))
        else:
            shard.copy_(whole.view(self.size, -1)[self._ranks.rank])

    def _enter(self, module: str, shard: Tensor, *, is_gather: bool) -> bool:
        """Notes a collective; tells whether the other ranks enter it, too."""
        entered = Collective(module=module, is_gather=is_gather, numel=shard.numel(), dtype=str(shard.dtype)[6:])
        if self._is_live and self._next != entered:
            # Before it is entered: other ranks would take it for another one.
            raise ShardingError(f"a pass calls {module or 'the model'} where its rehearsal did not")
        self._seen.append(entered)
        return self._is_live

    @property
    def _next(self) -> Collective | None:
        return self._expected[len(self._seen)] if len(self._seen) < len(self._expected) else None

    # Passes.

    def rehearse(self, run: Callable[[], object]) -> Passage:
        """Runs a pass without the other ranks, whose weights are taken to be this rank's; returns its collectives. The
        gradients of the pass are dropped.
        """
        aside = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        for parameter, _ in aside:
            parameter.grad = None
        self._seen = []
        try:
            run()
            trained = frozenset(name for name, one in self.model.named_parameters() if one.grad is not None)
            return Passage(tuple(self._seen), trained)
        finally:
            self.reset()
            for parameter, earlier in aside:
                parameter.grad = earlier

    def rounds(self, tries: Iterator[Try], passes: Passes) -> Iterator[Try]:
        """Yields the micro-batches of this rank in rounds. In each round all ranks run one pass in a block of
        `together`, or enter its collectives alone. A pass that fails on one rank is repeated by all of them.
        """
        part = next(tries, None)
        while True:
            reports = self._ranks.exchange((part is not None, passes.ladder.level))
            if not any(has_part for has_part, _ in reports):
                return
            # Ranks may have other rungs, but all of them rehearse at the same time.
            level = max(level for _, level in reports)
            if passes.ladder.go_to(level):
                passes.use_rung(passes.ladder.rung)
            passage = self._passage(part, passes, level)
            if part is None:
                self._enter_alone(passage, passes)
                continue
            if passage is None:
                part.message = "a pass of one sample does not fit"
            else:
                yield part
                self._settle(passes)
            part = next(tries, None)

    def _passage(self, part: Try | None, passes: Passes, level: int) -> Passage | None:
        """Returns the collectives of a pass, rehearsed where they are not known; None where no rank has room for it."""
        key = passes.kind, level
        if key not in self._passages:
            rehearsed = None if part is None else self._rehearsed(passes, part.start)
            known = [one for one in self._ranks.exchange(rehearsed) if one is not None]
            if len(set(known)) > 1:
                raise ShardingError("samples of ranks go through other modules: their collectives differ")
            if not known:
                return None
            self._passages[key] = known[0]
        self._passage_now = self._passages[key]
        return self._passage_now

    def _rehearsed(self, passes: Passes, sample: int) -> Passage | None:
        snapshot, passage = Snapshot(passes.model, passes.meter.device), None
        with CatchOutOfMemory():
            passage = self.rehearse(lambda: passes.run(sample, sample + 1))
        snapshot.restore()
        snapshot.release()
        if passage is None:
            passes.meter.release()
        return passage

    def forget(self, kind: object) -> None:
        """Rehearses passes of a kind anew."""
        self._passages = {key: one for key, one in self._passages.items() if key[0] != kind}

    def _enter_alone(self, passage: Passage | None, passes: Passes) -> None:
        if passage is None:
            return
        with suppress(RepeatedError), passes.undo_scope(), self.together():
            pass

    @contextmanager
    def together(self) -> Iterator[None]:
        """Opens a block in which this rank runs its pass of a round.

        Raises:
            RepeatedError: The pass failed on another rank: it is to be undone, and repeated.
        """
        passage = self._passage_now
        self._seen, self._expected = [], passage.collectives
        self._is_live = self._is_unsettled = True
        try:
            yield
            self._join(passage)
        except Exception as error:
            self.reset()
            # Where memory ran out, it is released first.
            if not is_out_of_memory(error):
                with suppress(RankGoneError):
                    self._abandon()
            raise
        finally:
            self._is_live = False
        self.reset()
        self._is_unsettled = False
        if not all(self._ranks.exchange(True)):
            raise RepeatedError

    def _settle(self, passes: Passes) -> None:
        """Tells the other ranks of a pass that failed here, once they have come to its end."""
        if self._is_unsettled:
            self._is_unsettled = False
            passes.meter.release()
            self._abandon()
            self._ranks.exchange(False)

    def _abandon(self) -> None:
        """Enters the collectives that a failed pass has left; their results are dropped on all ranks."""
        self._is_live = True
        try:
            while (entered := self._next) is not None:
                self._take_part(entered, self._empty(entered, 1).zero_(), self._empty(entered, self.size).zero_())
        finally:
            self._is_live = False

    def _join(self, passage: Passage) -> None:
        """Enters the collectives that are left with this rank's weights, and gradients of zero."""
        while (entered := self._next) is not None:
            parameters = self._of_module(entered.module)
            if entered.is_gather:
                pieces = [padded(shard_of(one), one, self.size) for _, one in parameters]
                self._take_part(entered, torch.cat(pieces), self._empty(entered, self.size))
                continue
            shard = self._empty(entered, 1)
            self._take_part(entered, shard, self._empty(entered, self.size).zero_())
            self._add_gradients([one for name, one in parameters if name in passage.trained], shard)

    def _take_part(self, entered: Collective, shard: Tensor, whole: Tensor) -> None:
        if entered.is_gather:
            self.gather(entered.module, whole, shard)
        else:
            self.reduce(entered.module, shard, whole)

    def _empty(self, entered: Collective, shards: int) -> Tensor:
        device = next(shard_of(one) for _, one in self._of_module(entered.module)).device
        return torch.empty(shards * entered.numel, dtype=getattr(torch, entered.dtype), device=device)

    def _add_gradients(self, parameters: Sequence[Any], summed: Tensor) -> None:
        start = 0
        for parameter in parameters:
            local = shard_of(parameter)
            gradient = summed[start : start + local.numel()].view_as(local)
            start += padded_numel(parameter, self.size)
            if parameter.grad is None:
                parameter.grad = sharded_like(gradient, parameter)
            else:
                shard_of(parameter.grad).add_(gradient)
        if start != summed.numel():
            raise ShardingError("a pass has gradients of other parameters than its rehearsal")

    def reset(self) -> None:
        """Frees the gathered weights, and the gradients that are not added up."""
        for root in self._roots:
            root.reset_iter_state()
        for weight in gathered_weights(self.model):
            weight.grad = None

    def _of_module(self, module: str) -> list[tuple[str, Any]]:
        """Returns the names and parameters of a module, in the order of its collectives."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        states = sharded_parameters(self.model.get_submodule(module))
        return [(names[id(one.sharded_param)], one.sharded_param) for one in states]


def _fully_shard(
    model: nn.Module,
    roots: Sequence[nn.Module],
    ranks: SharingRanks,
    device: torch.device,
    kept: set[nn.Parameter],
) -> list[Any]:
    """Shards the blocks of a model, and the modules that the loss calls, but for the parameters `kept`; returns the
    sharded modules, blocks first.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(ranks.tensor_group, device.type)
    inside = {part for root in roots for part in root.modules()}
    blocks = [block for block in blocks_of(model) if block in inside]
    sharded = []
    # A module comes after its parts.
    for module in sorted(dict.fromkeys([*blocks, *roots]), key=lambda each: sum(1 for _ in each.modules())):
        if any(one not in kept and shard_of(one) is one for one in module.parameters()):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
            _gather_below_views(module)
            sharded.append(module)
    for parameter in model.parameters():
        if shard_of(parameter) is parameter:
            parameter.data = parameter.data.to(device)
    return sharded


def _gather_below_views(module: Any) -> None:
    """Gathers the weights of a module in the backward pass also after an operation in place on a view that it returned,
    such as `y = layer(x); y += x`. PyTorch then drops the hook of `fully_shard`, which is one of the view; a hook of
    the tensor that it is a view of stays.
    """
    # It warns of each view.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    state = module._get_fsdp_state()

    def gather(has_gathered: list[bool], gradient: Tensor) -> None:
        if not has_gathered:
            state._pre_backward(gradient)

    def watch(_: nn.Module, args: Any, keywords: Any, output: Any) -> None:
        given = {id(_base(one)) for one in _tensors(args, keywords)}
        for view in _tensors(output):
            base = _base(view)
            # Below an input are the modules before, after whose backward pass nothing is to be gathered.
            if base is not view and view.requires_grad and base.requires_grad and id(base) not in given:
                has_gathered = list[bool]()
                view.register_hook(partial(_note, has_gathered))
                base.register_hook(partial(gather, has_gathered))

    module.register_forward_hook(watch, with_kwargs=True)


def _note(has_gathered: list[bool], _: Tensor) -> None:
    has_gathered.append(True)


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _base(one: Tensor) -> Tensor:
    return one if one._base is None else one._base


def _tell_resizes(parameter: Any) -> None:
    """Lets a simulated GPU see when a weight is gathered and freed: its storage is resized, by no operation."""

    def told(resize: Callable[[], None]) -> Callable[[], None]:
        def resize_and_tell() -> None:
            resize()
            look_again(parameter.all_gather_outputs)

        return resize_and_tell

    parameter.alloc_all_gather_outputs = told(parameter.alloc_all_gather_outputs)
    parameter.free_unsharded_param = told(parameter.free_unsharded_param)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose weights are gathered one after the other: the repeated blocks that could be computed
    again, and parts of long sequences. Modules that share weights with the rest of the model are left out.
    """
    modules = [part for name in candidates(model, by_switch=False) for part in modules_of_segment(model, name)]
    uses = _uses(model)
    return [module for module in modules if _is_alone(module, uses)]


def _is_alone(module: nn.Module, uses: Counter[int]) -> bool:
    """Returns whether a module has weights, and shares none with the rest of a model, by the uses of its weights."""
    own = _uses(module)
    return bool(own) and all(count == uses[key] for key, count in own.items())


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(one) for part in module.modules() for one in part._parameters.values() if one is not None)


def sharded_weights(model: nn.Module, ranks: int) -> ShardedWeights:
    """Returns the sizes of a model that ranks share; allocates nothing, also for a model on the meta device."""
    blocks = blocks_of(model)
    in_blocks = {one: number for number, block in enumerate(blocks) for one in block.parameters()}
    parameters = [*model.parameters()]
    shards = {one: padded_numel(one, ranks) * one.element_size() if one.dim() else one.nbytes for one in parameters}
    gathered = [0] * (len(blocks) + 1)
    for one in parameters:
        gathered[in_blocks.get(one, len(blocks))] += ranks * shards[one] if one.dim() else 0
    trained = [one for one in parameters if one.requires_grad]
    return ShardedWeights(
        ranks=ranks,
        weight_bytes=sum(one.nbytes for one in parameters),
        weight_shard_bytes=sum(shards.values()),
        trained_bytes=sum(one.nbytes for one in trained),
        trained_shard_bytes=sum(shards[one] for one in trained),
        root_bytes=gathered[-1],
        block_bytes=tuple(gathered[:-1]),
    )


def fits_whole(model: nn.Module, training: TrainingSettings, capacity_bytes: float) -> bool:
    """Tells whether weights, gradients and optimizer state leave room on one device; allocates nothing as large."""
    trained = [one for one in model.parameters() if one.requires_grad]
    trained_bytes = sum(one.nbytes for one in trained)
    states = 1 + (state_share(training, trained[0].dtype) if trained else 0.0)
    held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    return held + states * trained_bytes <= predicted_room(capacity_bytes)


def unshardable_because(training: TrainingSettings) -> ConfigError | None:
    """Returns the error of settings that exclude shards; None where there is none."""
    setting = "training.fit=shard"
    if not hasattr(FSDPModule, "reset_iter_state"):
        return ConfigError(f"{setting} needs fully_shard of torch 2.13", value=f"torch {torch.__version__}",
                           remedy="Install a later torch, or give --fit auto")  # fmt: skip
    if training.optimizer not in ELEMENTWISE:
        return ConfigError(f"{setting} updates each weight by itself", value=f"--optimizer {training.optimizer}",
                           remedy=f"Take one of {', '.join(ELEMENTWISE)}")  # fmt: skip
    if training.compile != "off":
        return ConfigError(f"{setting} computes the model as it is", value=f"training.compile={training.compile}",
                           remedy="Leave --compile out")  # fmt: skip
    if training.channels_last:
        return ConfigError(f"{setting} shares weights out that lie in rows", value="training.channels_last=true",
                           remedy="Leave --channels-last out")  # fmt: skip
    return None


def _outermost(model: nn.Module, called: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the called modules that are inside of no other one."""
    parts = {part for module in called for part in module.modules() if part is not module}
    return [module for module in called if module not in parts]
