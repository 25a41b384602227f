"""Tensors whose shards are on the ranks of a run: the shard of this rank, and whole tensors in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


def shard_of(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that is on this rank: of a sharded tensor its shard, any other tensor as it is."""
    # Most tensors are plain, and are asked often.
    if type(tensor) is Tensor:
        return tensor
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def padded_numel(parameter: Tensor, ranks: int) -> int:
    """Returns the elements of a shard: some ranks fill theirs up with zeros."""
    return prod(_largest_sizes(parameter, ranks))


def largest_shard(parameter: Tensor, ranks: int) -> Tensor:
    """Makes a tensor without memory that has the sizes of a parameter's largest shard."""
    sizes = _largest_sizes(parameter, ranks) if parameter.dim() else []
    return torch.empty(sizes, dtype=parameter.dtype, device="meta")


def _largest_sizes(parameter: Tensor, ranks: int) -> list[int]:
    return [-(-parameter.shape[0] // ranks), *parameter.shape[1:]]


def padded(local: Tensor, parameter: Tensor, ranks: int) -> Tensor:
    """Returns this rank's shard of a parameter as a row, filled up with zeros."""
    flat = local.detach().reshape(-1)
    return torch.nn.functional.pad(flat, (0, padded_numel(parameter, ranks) - flat.numel()))


def sharded_like(local: Tensor, parameter: DTensor) -> Tensor:
    """Makes a sharded tensor of this rank's shard, which may wait on the host."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    # `from_local` would move it to the device of the mesh.
    return DTensor(local, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)


def whole(state: T, *, keep: bool) -> T:
    """Returns a nested state with whole tensors on the host in the place of shards; all ranks call it alike. `keep`
    tells whether this rank wants them: elsewhere they are empty.
    """
    from torch.distributed.tensor import DTensor

    def gathered(value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value.detach().cpu()
        local = shard_of(value.detach())
        # The ranks exchange tensors of the device.
        sharded: Any = sharded_like(local.to(value.device_mesh.device_type), value)
        full: Tensor = sharded.full_tensor()
        return full.cpu() if keep else torch.empty(0)

    gathered_state: T = tree_map_only(Tensor, gathered, state)
    return gathered_state


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's shard of a whole tensor, sharded as another tensor is; a tensor whose like is whole stays."""
    local = shard_of(like)
    if local is like:
        return value
    sharded: Any = like
    parts = torch.chunk(value, sharded.device_mesh.size(), dim=0)
    rank = sharded.device_mesh.get_local_rank()
    own = parts[rank] if rank < len(parts) else value[:0]
    return sharded_like(own.to(local.device, copy=True), sharded)


@dataclass(frozen=True)
class _Held:
    """A value that `Optimizer.load_state_dict` takes as it is: it moves tensors to the device of their parameter."""

    value: Tensor


def load_sharded_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads a state of an optimizer, with shards in the place of whole tensors that have a parameter's shape. They are
    where the shards of the parameters are, which may be the host.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(shard_of(one) is one for one in parameters):
        # An optimizer may keep a state of its own beside those of parameters.
        optimizer.load_state_dict(state)
        return

    def of_parameter(number: int, values: dict[str, Any]) -> dict[str, Any]:
        like = parameters[number]
        return {
            name: _Held(shard_like(value, like))
            if isinstance(value, Tensor) and value.shape == like.shape and shard_of(like) is not like
            else value
            for name, value in values.items()
        }

    held = {number: of_parameter(number, values) for number, values in state["state"].items()}
    optimizer.load_state_dict({**state, "state": held})
    for values in optimizer.state.values():
        values |= {name: value.value for name, value in values.items() if isinstance(value, _Held)}


def sharded_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state of a model with shards in the place of the whole tensors of parameters that are sharded."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: shard_like(value, parameters[name]) if name in parameters else value for name, value in state.items()}
