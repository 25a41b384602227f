"""Which rows of a Trainer's batches are samples (TRL stacks k views of the samples, packs several sequences into a row,
and gives batches without tensors), why batches are not split, and the remedies where they do not fit.

Shapes: R samples, k views of each sample, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from can_train.errors import ArgumentError, DataError
from can_train.fit.collate import Rows, leaves, samples_in, select_samples
from can_train.fit.micro_batcher import Counts, unsplittable_because

# Views that TRL's collators and trainers stack, by the names of their classes: R rows of the chosen answers, and below
# them R rows of the rejected ones.
_STACKED: Final = {
    "DataCollatorForPreference": 2,
    "DataCollatorForVisionPreference": 2,
    "DataCollatorForTriplePreference": 3,
    "DPOTrainer": 2,
    "RewardTrainer": 2,
}
_STACKED_NAME: Final = "input_ids"  # Name of the stacked rows; older releases of TRL have a tensor for each view
# Losses of TRL's DPOTrainer that sort the samples of a batch, or compare them with the batch's mean. At the first step,
# where policy and reference are equal, a comparison would not see it.
_COUPLED_LOSSES: Final = frozenset({"aot", "aot_unpaired", "bco_pair"})
_PACKED: Final = ("cu_seq_lens", "cu_seqlens", "seq_idx", "packed_seq")  # In names of tensors that bound sequences

# Losses of sentence-transformers that compare each sample with all others of the batch, and have a cached variant.
_CACHED_LOSSES: Final = frozenset({
    "MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss", "GISTEmbedLoss", "SpladeLoss",
})  # fmt: skip
_AS_SUM: Final = (
    "compute_loss_func=lambda outputs, labels, num_items_in_batch: total(outputs, labels) / num_items_in_batch"
)


@dataclass(frozen=True)
class TrainerRows:
    """Takes samples out of the batches of a Trainer.

    Attributes:
        trainer: The Trainer.
        counts_of_rows: Counts of each row of a batch that memory grows with.
    """

    trainer: Any
    counts_of_rows: Callable[[Any], Counts]

    def views(self, batch: Any) -> int:
        """Returns k, the number of rows of each sample."""
        if not isinstance(batch, Mapping) or _STACKED_NAME not in batch:
            return 1
        kinds = [*type(self.trainer).__mro__, *type(getattr(self.trainer, "data_collator", None)).__mro__]
        stacked = next((_STACKED[kind.__name__] for kind in kinds if kind.__name__ in _STACKED), 1)
        # TRL's triples may come without their references.
        has_references = getattr(self.trainer.data_collator, "include_reference", True)
        return stacked if has_references else min(stacked, 2)

    def reason(self, batch: Any) -> str:
        """Returns why rows of a batch are not samples that could be computed alone, as a clause; empty: they are."""
        names = list(batch) if isinstance(batch, Mapping) else []
        if not any(True for _ in leaves(batch)):
            return f"it holds no tensors (a {type(batch).__name__})"
        if packed := next((name for name in names if any(part in str(name) for part in _PACKED)), ""):
            return f"its rows hold several sequences ({packed})"
        if _several_sequences(batch.get("position_ids") if names else None):
            return "its rows hold several sequences (position_ids)"
        if "KL_input_ids" in names:
            return "each loss depends on the mean over the batch (KL_input_ids)"
        coupled = _COUPLED_LOSSES & set(getattr(self.trainer, "loss_types", ()))
        return f"each loss depends on the rest of the batch (loss_type={sorted(coupled)})" if coupled else ""

    def counts(self, batch: Any) -> Counts:
        """Returns counts of each sample that memory grows with; raises DataError where rows are no samples."""
        if reason := self.reason(batch):
            raise DataError("A batch is split where its rows are samples", value=reason,
                            remedy="Choose a per_device_train_batch_size that fits")  # fmt: skip
        views = self.views(batch)
        if views == 1:
            return self.counts_of_rows(batch)
        samples = self._stacked_samples(batch, views)
        return {"numbers": np.full(samples, sum(leaf.numel() for leaf in leaves(batch)) / samples)}

    def samples(self, batch: Any) -> int:
        """Returns the number of samples of a batch, as `select` takes them; raises DataError where nobody knows."""
        views = self.views(batch)
        return samples_in(batch) if views == 1 else self._stacked_samples(batch, views)

    def select(self, batch: Any, rows: Rows) -> Any:
        """Returns the batch of some samples, with all their views."""
        views = self.views(batch)
        if views == 1:
            return select_samples(batch, rows)
        samples = self._stacked_samples(batch, views)
        chosen = torch.arange(samples)[rows]
        stacked = torch.cat([chosen + view * samples for view in range(views)])
        parts = {name: _rows_of(value, samples, chosen, stacked) for name, value in batch.items()}
        return type(batch)(parts)  # Of the same class where that takes a dict

    def _stacked_samples(self, batch: Any, views: int) -> int:
        stacked, rest = divmod(len(batch[_STACKED_NAME]), views)
        sizes = {len(leaf) for leaf in leaves(batch) if leaf.dim()}
        if rest or not sizes <= {stacked, stacked * views}:
            raise DataError("Tensors have a row for each sample, or one for each of its views",
                            value=f"tensors of {', '.join(map(str, sorted(sizes)))} rows, {views} views",
                            remedy="Mend the collator, which stacks the views of each sample")  # fmt: skip
        return stacked


def _rows_of(value: Any, samples: int, chosen: Tensor, stacked: Tensor) -> Any:
    if isinstance(value, Tensor) and value.dim():
        return value[(chosen if len(value) == samples else stacked).to(value.device)]
    return value


def _several_sequences(positions: Any) -> bool:
    """Tells whether the positions of a batch of a single row begin anew within it, or do not belong to rows."""
    if not isinstance(positions, Tensor):
        return False
    return positions.dim() != 2 or (len(positions) == 1 and bool((positions[0, 1:] <= positions[0, :-1]).any()))


def remedy_of(trainer: Any, *, trains: bool = True) -> str:
    """Returns a sentence with all that makes a batch fit that is not split."""
    name = "per_device_train_batch_size" if trains else "per_device_eval_batch_size"
    size = int(getattr(trainer.args, name))
    measures = [*_loss_measures(getattr(trainer, "loss", None)), *_model_measures(trainer, trains=trains)]
    measures.append(f"choose {name}={size // 2}" if size > 1 else "choose shorter samples or a smaller model")
    if trainer.compute_loss_func is not None:
        measures.append(f"give a loss that is a mean over items as {_AS_SUM}")
    return _sentence(measures)


def remedy_of_sample(trainer: Any, remedy: str, *, trains: bool = True, recomputes: bool = False) -> str:
    """Returns a sentence with all that makes a single sample fit; `remedy` is a sentence about device and model.
    `recomputes`: activations are recomputed already.
    """
    measures = _model_measures(trainer, trains=trains and not recomputes)
    return _sentence([*measures, f"{remedy[:1].lower()}{remedy[1:]}"])


def _sentence(measures: Sequence[str]) -> str:
    text = ", or ".join(measures)
    return f"{text[:1].upper()}{text[1:]}"


def _model_measures(trainer: Any, *, trains: bool) -> list[str]:
    """Returns clauses that tell how a sample takes less memory."""
    measures, arguments = [], trainer.args
    new_name = "activation_checkpointing"
    checkpoints = new_name if hasattr(arguments, new_name) else "gradient_checkpointing"
    has_way = hasattr(trainer.model, "gradient_checkpointing_enable")
    is_able = getattr(trainer.model, "supports_gradient_checkpointing", has_way)
    if trains and is_able and not getattr(arguments, checkpoints, False):
        measures.append(f"give the TrainingArguments {checkpoints}=True")
    # The Trainers of TRL cut, and pack, samples by it.
    if (length := getattr(arguments, "max_length", None)) and length > 1:
        measures.append(f"give them max_length={length // 2}" if measures else f"choose max_length={length // 2}")
    return measures


def why_whole(trainer: Any) -> str:
    """Returns why no batch of a Trainer is split, as a clause; empty: batches are split."""
    spreading = _spread(trainer)
    if spreading:
        return next(iter(spreading))
    is_made = not any(map(is_lazy, trainer.model.parameters()))
    if is_made and (refusal := unsplittable_because(trainer.model)) is not None:
        return f"{refusal.rule[0].lower()}{refusal.rule[1:]} ({refusal.value})"
    waits = [type(loss).__name__ for loss in modules_of(getattr(trainer, "loss", None))
             if getattr(loss, "gather_across_devices", False)]  # fmt: skip
    if waits and dist.is_initialized() and dist.get_world_size() > 1:
        return f"{waits[0]}(gather_across_devices=True) waits for other ranks"
    return ""


def refuse_conflicts(trainer: Any) -> None:
    """Raises ArgumentError where something else changes batches when memory runs out, or where limits are given for
    batches that are not split.
    """
    rule = "MicroBatchTrainerMixin computes the gradient of a loader's whole batch, in parts"
    if trainer.args.auto_find_batch_size:
        raise ArgumentError(rule, value="auto_find_batch_size=True", remedy="Leave it out: batches are made to fit")
    settings = trainer._loop_settings
    for conflict, remedy in _spread(trainer).items() if settings.limits is not None or settings.search else ():
        raise ArgumentError(f"{rule}, where limits are given", value=conflict, remedy=remedy)


def _loss_measures(loss: Any) -> list[str]:
    """Returns clauses that tell how a loss of sentence-transformers takes less memory with the same batch."""
    measures = []
    for module in modules_of(loss):
        name = type(module).__name__
        if (size := getattr(module, "mini_batch_size", 0)) and size > 1:
            measures.append(f"give {name} mini_batch_size={size // 2}")
        elif name in _CACHED_LOSSES:
            measures.append(f"train with Cached{name}(model, mini_batch_size=8)")
    return measures


def _spread(trainer: Any) -> dict[str, str]:
    """Returns why batches of a Trainer are not split, each reason with a remedy: the model is spread over devices."""
    arguments, whole = trainer.args, "Keep the whole model on each GPU"
    launched = "Start one process a GPU (torchrun), or show one GPU (CUDA_VISIBLE_DEVICES=0)"
    conflicts = {
        f"n_gpu={arguments.n_gpu}, on which DataParallel spreads each batch": (arguments.n_gpu > 1, launched),
        "FSDP, whose passes wait for other ranks": (
            trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled, f"{whole} (leave fsdp out)"),
        "DeepSpeed, which accumulates gradients by itself": (
            trainer.is_deepspeed_enabled, f"{whole} (leave deepspeed out)"),
        "parallelism_config, which spreads the model or its samples over GPUs": (
            getattr(trainer.accelerator, "parallelism_config", None) is not None, f"{whole} (leave it out)"),
        f"optim={str(arguments.optim)!r}, which steps in the midst of backward": (
            "lomo" in str(arguments.optim).lower(), "Choose an optimizer that steps after it, such as adamw_torch"),
    }  # fmt: skip
    return {conflict: remedy for conflict, (is_there, remedy) in conflicts.items() if is_there}


def modules_of(loss: Any) -> list[nn.Module]:
    """Returns the modules among the losses of a Trainer: sentence-transformers has one, or one for each data set."""
    losses = loss.values() if isinstance(loss, Mapping) else [loss]
    return [module for module in losses if isinstance(module, nn.Module)]
