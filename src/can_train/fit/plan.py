"""The resolved decision of a run: its logical batch, how it is cut, and which limit decided.

Arithmetic only: the caller has searched for the tuned limit, priced the samples and looked the safety factor up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from can_train.fit.packing import BatchCosts, SplitRules, cut, largest_typical_batch, optimizer_batches, share_out
from can_train.fit.step_time import SPLIT, SizeCandidate
from can_train.io.units import counted

# Optimizer steps per epoch below which schedules, early stopping and averages over an epoch lose their meaning.
_FEW_STEPS: Final = 5
_BUCKET_BATCHES: Final = 50  # Batches whose samples are sorted by their size, where they are bucketed
_SAMPLED_BATCHES: Final = 32  # Logical batches whose cuts stand for all of them where sizes are compared
_SAME_SIZE: Final = 0.02  # Sizes of micro-batches that differ by less are taken as one
_MOST_OCTAVES: Final = 12  # A micro-batch is at most so often halved
Mode = Literal["max", "opt", "off"]
BindingLimit = Literal["requested", "preset", "memory", "dataset", "min_steps"]
LrScale = Literal["auto", "none", "sqrt", "linear"]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The request that a plan is resolved from."""

    mode: Mode  # `max`: the largest batch that fits; `opt`: the requested batch, cut to fit; `off`: as requested, uncut
    requested_batch: int | None  # Logical batch in samples that the user gave; None where the user gave none
    preset_batch: int  # Logical batch in samples that the learning rate was chosen for
    loader_batch: int = 0  # Samples of one loader batch; several of them make a logical batch
    batches_per_step: int = 1  # Loader batches that make it
    min_steps_per_epoch: int = 50  # With `max`, an epoch has at least so many optimizer steps where the data set allows
    micro_batch_size: int = 0  # Fixed micro-batch in samples, without a search; 0 searches
    # Learning rate against logical ÷ preset batch; `auto` is `sqrt` under `max`, else `none`.
    lr_scale: LrScale = "auto"
    rules: SplitRules = field(default_factory=SplitRules)  # The accumulation options, still without limits
    ranks: int = 1  # Processes that share a logical batch, each on a device of its own
    # A batch of more units of the main feature becomes several optimizer steps; infinite: never.
    preflight_threshold: float = math.inf
    # Samples of each epoch ÷ samples of the epoch that is planned: the last one where the task differs from epoch to
    # epoch, else the first one. A single share where epochs are alike.
    epoch_shares: tuple[float, ...] = (1.0,)
    bucketed: bool = False  # Whether batches hold samples of about the same size

    @property
    def searches(self) -> bool:
        """Whether the plan needs a tuned limit."""
        return self.mode != "off" and self.micro_batch_size == 0

    @property
    def takes_what_fits(self) -> bool:
        """Whether the device decides the logical batch."""
        return self.mode == "max" and self.searches

    def epoch_sizes(self, dataset_size: int) -> list[int]:
        """Returns the samples of each epoch."""
        return [max(1, round(share * dataset_size)) for share in self.epoch_shares]

    def least_batch(self, dataset_size: int) -> int:
        """Returns the smallest logical batch that a device may decide: the preset's, no larger than any epoch."""
        return min(self.preset_batch, *self.epoch_sizes(dataset_size))

    def batch_within(self, dataset_size: int) -> int:
        """Returns the given or the preset's logical batch, no larger than the data set."""
        return min(self.requested_batch or self.preset_batch, dataset_size)


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The resolved decision for one phase."""

    logical_batch: int  # Samples that one optimizer step sees
    rules: SplitRules  # How it is cut, limits included
    # Optimizer steps of the longest epoch; the last step may see fewer samples.
    steps_per_epoch: int
    # Fewest and mean optimizer steps over all epochs.
    fewest_steps_per_epoch: int
    mean_steps_per_epoch: float
    # Micro-batches of a step on one device, over the epochs that the plan is made for.
    fewest_parts: int
    most_parts: int
    largest_micro_batch: int  # Samples of the largest micro-batch of these epochs
    largest_cost: float  # Cost of the costliest micro-batch
    # Cost of the costliest that is not the first of its step, so that gradients exist beside it; 0 where each step has
    # only one.
    largest_later_cost: float
    binding_limit: BindingLimit  # The limit that decided the logical batch
    batches_per_step: int = 1  # Loader batches that make a logical batch, where these decided it
    lr_factor: float  # Multiplier of the learning rate
    safety_factor: float | None  # Share of the tuned limit in use; None without a search
    notices: tuple[str, ...]  # Sentences for the user
    batch_cost: float = 0.0  # Cost of the costliest logical batch, or of a rank's share of it, where it is not split


def search_upper(request: PlanRequest, order: BatchCosts, *, factor: float) -> float:
    """Returns the largest cost that a device's search need try: beyond it memory no longer decides anything."""
    needed = request.batch_within(len(order))
    if request.takes_what_fits:
        most, _ = min(_limits_beside_memory(request, len(order)))
        needed = max(most, request.least_batch(len(order)))
    largest, ranks = float(order.each().max()), request.ranks
    # Shares are made of whole samples: the costliest may exceed the mean by all but an equal part of one.
    share = costliest(order, needed) / ranks + (1 - 1 / ranks) * largest
    # Trials are made of whole samples too: up to one may be missing from the cost to be tried.
    return share / factor + largest


def costliest(order: BatchCosts, size: int) -> float:
    """Returns the cost of the costliest batch of `size` samples."""
    return order.chosen(np.argsort(-order.each(), kind="stable")[:size]).total


def resolve_plan(
    request: PlanRequest,
    order: BatchCosts,
    *,
    tuned_limit: float | None = None,
    factor: float = 1.0,
    other_epochs: Sequence[BatchCosts] = (),
) -> PhasePlan:
    """Resolves a plan for the training samples in the first epoch's order, or the last epoch's where epochs differ,
    and in the orders of `other_epochs`. No sample costs more than the tuned limit, which was searched for up to
    `search_upper` (None: without a search).
    """
    if tuned_limit is None:
        rules = replace(request.rules, samples=request.micro_batch_size or request.loader_batch)
    else:
        rules = replace(request.rules, safe_limit=factor * tuned_limit, tuned_limit=tuned_limit)
    logical, binding = _logical_batch(request, order, rules.safe_limit)
    if request.bucketed:
        order, *other_epochs = (epoch.chosen(bucketed(epoch.each(), logical)) for epoch in (order, *other_epochs))
    by_epoch = [_optimizer_steps(epoch, logical, request.preflight_threshold) for epoch in (order, *other_epochs)]
    num_batches, num_steps, ranks = -(-len(order) // logical), len(by_epoch[0]), request.ranks
    of_steps = [_shares(step, ranks, rules.floor) for steps in by_epoch for step in steps]
    shares = [share for of_step in of_steps for share in of_step]
    sizes = [cut(share, rules.limit_for(share)) for share in shares]
    costs = [share.part_costs(parts) for share, parts in zip(shares, sizes, strict=True)]
    # Preflight is taken to split the batches of all epochs alike.
    counts = [round(-(-size // logical) * num_steps / num_batches) for size in request.epoch_sizes(len(order))]
    return PhasePlan(
        logical_batch=logical,
        rules=rules,
        steps_per_epoch=max(counts),
        fewest_steps_per_epoch=min(counts),
        mean_steps_per_epoch=sum(counts) / len(counts),
        fewest_parts=min(len(parts) for parts in sizes),
        most_parts=max(len(parts) for parts in sizes),
        largest_micro_batch=max(max(parts) for parts in sizes),
        largest_cost=max(max(parts) for parts in costs),
        largest_later_cost=max(max(parts[1:], default=0.0) for parts in costs),
        batch_cost=max(share.total for share in shares),
        binding_limit=binding,
        batches_per_step=request.batches_per_step if binding in ("requested", "preset") else 1,
        lr_factor=_lr_factor(request, logical),
        safety_factor=None if tuned_limit is None else factor,
        notices=(
            *_batch_notices(request, order, logical, rules.safe_limit),
            *_epoch_notices(request, by_epoch[0], counts, logical, num_batches),
            *_divisor_notices(sizes, shares, rules),
        ),
    )


def costliest_micro_batch(request: PlanRequest, plan: PhasePlan, order: BatchCosts) -> tuple[NDArray[np.int64], float]:
    """Returns the positions in an epoch's order of the samples of a plan's costliest micro-batch, and its cost."""
    positions = bucketed(order.each(), plan.logical_batch) if request.bucketed else np.arange(len(order))
    order, start, most = order.chosen(positions), 0, (positions[:0], 0.0)
    for step, packing in _steps_and_packings(order, plan.logical_batch, request.preflight_threshold):
        rows = start + packing
        start += len(step)
        for share in _shares(step, request.ranks, plan.rules.floor):
            for part in share.parts(cut(share, plan.rules.limit_for(share))):
                if part.total > most[1]:
                    most = positions[rows[: len(part)]], part.total
                rows = rows[len(part) :]
    return most


def _shares(step: BatchCosts, ranks: int, floor: int) -> list[BatchCosts]:
    """Returns the shares of the ranks in a step, without empty ones: their ranks have nothing to cut."""
    shares = step.parts(share_out(step, min(ranks, len(step)), floor)) if ranks > 1 else [step]
    return [share for share in shares if len(share)]


def size_candidates(
    request: PlanRequest, plan: PhasePlan, order: BatchCosts, *, rung: str = SPLIT
) -> list[SizeCandidate]:
    """Returns the sizes that micro-batches of a plan may have, the plan's own first: with more parts, down to a single
    sample or the floor. Next to the plan's size they are about a fifth apart, else by a factor of about 1.4.
    """
    size, ranks = plan.logical_batch, request.ranks
    if request.bucketed:
        order = order.chosen(bucketed(order.each(), size))
    starts = range(0, max(len(order) - size, 0) + 1, size)[:_SAMPLED_BATCHES]
    batches = [order.part(start, min(start + size, len(order))).packed() for start in starts]
    shares = [share for batch in batches for share in _shares(batch, ranks, plan.rules.floor)]

    def mean_samples(rules: SplitRules) -> float:
        return sum(map(len, shares)) / sum(len(cut(share, rules.limit_for(share))) for share in shares)

    own = mean_samples(plan.rules)
    longest = max(map(len, shares))
    parts = longest / own
    candidates = [SizeCandidate(cost=plan.largest_cost, samples=own, rung=rung)]
    for factor in _size_factors(own / max(plan.rules.floor, 1)):
        number = math.ceil(parts * factor)
        even = order.cost(0, math.ceil(longest / number))
        cost = even if order.is_uniform else plan.largest_cost * parts / number
        samples = mean_samples(replace(plan.rules, fastest=cost))
        if samples < candidates[-1].samples * (1 - _SAME_SIZE):
            candidates.append(SizeCandidate(cost=cost, samples=samples, rung=rung))
    return candidates


def _size_factors(most: float) -> list[float]:
    """Returns the factors by which a plan's micro-batches may become smaller, up to `most`."""
    powers = [power / 4 for power in range(1, 4)] + [power / 2 for power in range(2, 2 * _MOST_OCTAVES + 1)]
    return [2**power for power in powers if 2**power <= most * (1 + _SAME_SIZE)]


def bucketed(sizes: NDArray[np.float64], logical_batch: int, *, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    """Returns an order of samples, as their positions, whose batches hold samples of about the same size: of each fifty
    batches the samples are sorted, and all batches are shuffled. Only the last batch may be shorter.

    Args:
        sizes: [R] sizes of the samples, in the order of the epoch.
        logical_batch: Samples of a batch.
        seed: The run's.
        epoch: Counted from 0.
    """
    window = _BUCKET_BATCHES * logical_batch
    starts = range(0, len(sizes), window)
    order = np.concatenate([start + np.argsort(sizes[start : start + window], kind="stable") for start in starts])
    whole = len(order) // logical_batch
    batches = order[: whole * logical_batch].reshape(whole, logical_batch)
    shuffled = batches[np.random.default_rng([seed, epoch, 1]).permutation(whole)]
    positions: NDArray[np.int64] = np.concatenate([shuffled.ravel(), order[whole * logical_batch :]])
    return positions


def _optimizer_steps(order: BatchCosts, logical: int, preflight_threshold: float) -> list[BatchCosts]:
    """Cuts an epoch into logical batches, and those above the threshold into several steps."""
    return [step for step, _ in _steps_and_packings(order, logical, preflight_threshold)]


def _steps_and_packings(
    order: BatchCosts, logical: int, preflight_threshold: float
) -> Iterator[tuple[BatchCosts, NDArray[np.int64]]]:
    """Yields optimizer steps, each in the order that it is cut in, with the positions of its samples before that."""
    for start in range(0, len(order), logical):
        batch = order.part(start, min(start + logical, len(order)))
        sizes = optimizer_batches(batch, preflight_threshold) if preflight_threshold < math.inf else (len(batch),)
        for step in batch.parts(sizes):
            yield step.packed(), step.packing()


def _logical_batch(request: PlanRequest, order: BatchCosts, safe_limit: float) -> tuple[int, BindingLimit]:
    if request.takes_what_fits:
        limits = _limits_beside_memory(request, len(order))
        upper = min(limit for limit, _ in limits)
        by_memory = largest_typical_batch(order, safe_limit, upper=upper, shares=request.ranks)
        # Memory comes last: a search that stopped at its upper end ties with the bound there, and did not bind.
        largest, binding = min([*limits, (by_memory, "memory")], key=lambda limit: limit[0])
        least = request.least_batch(len(order))
        if largest >= least:
            return largest, binding
        return least, "preset" if least == request.preset_batch else "dataset"
    logical = request.batch_within(len(order))
    if logical < (request.requested_batch or request.preset_batch):
        return logical, "dataset"
    return logical, "requested" if request.requested_batch else "preset"


def _limits_beside_memory(request: PlanRequest, dataset_size: int) -> list[tuple[int, BindingLimit]]:
    smallest = min(request.epoch_sizes(dataset_size))
    by_steps = max(1, smallest // request.min_steps_per_epoch)
    # The data set ties with min_steps only where that is 1: then it is the data set that binds.
    return [(smallest, "dataset"), (by_steps, "min_steps")]


def _lr_factor(request: PlanRequest, logical_batch: int) -> float:
    scale = request.lr_scale
    if scale == "auto":
        scale = "sqrt" if request.takes_what_fits else "none"
    ratio = logical_batch / request.preset_batch
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scale]


def _batch_notices(request: PlanRequest, order: BatchCosts, logical_batch: int, safe_limit: float) -> Iterator[str]:
    """Says where the logical batch is not the one that was asked for, and where the preset's batch is more than the
    bounds of `max` would leave.
    """
    wanted = request.requested_batch or request.preset_batch
    if not request.takes_what_fits:
        if request.mode == "max":
            fixed = f"micro_batch_size={request.micro_batch_size} is fixed"
            yield f"{fixed}, so find_batch_size=max has nothing to search; the batch is {logical_batch}"
        if logical_batch < wanted:
            yield f"The data set has {counted(logical_batch, 'sample')}: a batch of {wanted} is the whole of it"
        return
    if request.requested_batch is not None:
        yield f"find_batch_size=max chose a batch of {logical_batch}; the batch size of {wanted} was ignored"
    if logical_batch > request.least_batch(len(order)):
        return
    smallest, bound = min(request.epoch_sizes(len(order))), request.min_steps_per_epoch
    kept = f"find_batch_size=max takes no less than the preset's batch, {logical_batch} samples"
    if smallest // bound < logical_batch:
        many = counted(-(-smallest // logical_batch), "step")
        yield f"{kept}: {many} an epoch, fewer than min_steps_per_epoch={bound}"
    fits = largest_typical_batch(order, safe_limit, upper=logical_batch, shares=request.ranks)
    if fits < logical_batch:
        yield f"{kept}, of which {fits} fit at once: it is computed in parts"


def spare_room(request: PlanRequest, logical_batch: int, dataset_size: int, room: int) -> list[str]:
    """Says how many samples the device would hold beyond a preset's batch, and how to ask for them.

    Args:
        request: The plan's request.
        logical_batch: The plan's, in samples.
        dataset_size: Samples of an epoch.
        room: Samples that all devices would hold at once.
    """
    if request.mode != "opt" or request.requested_batch is not None or room <= logical_batch:
        return []
    limits = [*_limits_beside_memory(request, dataset_size), (room, "memory")]
    largest, binding = min(limits, key=lambda limit: limit[0])
    if largest <= logical_batch:
        return []
    reasons = {"min_steps": f"as large as {request.min_steps_per_epoch} steps an epoch allow",
               "dataset": "the whole data set", "memory": "as large as fits"}  # fmt: skip
    asked = f"--find-batch-size max trains with {largest:,}, {reasons[binding]}"
    return [f"The device would hold about {room:,} samples at once; {asked}"]


def _epoch_notices(
    request: PlanRequest, steps: list[BatchCosts], counts: list[int], logical_batch: int, num_batches: int
) -> Iterator[str]:
    """Says where weights move only a few times per epoch, by single samples, or by less than a logical batch."""
    if (fewest := min(counts)) < _FEW_STEPS:
        few, epoch = counted(fewest, "optimizer step"), "An epoch" if fewest == max(counts) else "The shortest epoch"
        yield f"{epoch} has only {few}: smaller batches, or more epochs, move the weights more often"
    if logical_batch == 1:
        yield "A batch is a single sample: gradients are noisy, and BatchNorm has no statistics"
    elif len(steps) > 1 and len(steps[-1]) == 1:
        yield "The last step of an epoch sees a single sample"
    if len(steps) != num_batches:
        preflight = f"preflight_threshold={request.preflight_threshold:g}"
        made = f"{preflight} makes {len(steps)} optimizer steps of {num_batches} batches in one epoch"
        yield f"{made}: the optimizer sees smaller batches than the logical batch"


def _divisor_notices(
    sizes: Sequence[tuple[int, ...]], shares: Sequence[BatchCosts], rules: SplitRules
) -> Iterator[str]:
    if rules.equal:
        even = SplitRules(safe_limit=rules.safe_limit, samples=rules.samples, splits=rules.splits)
        fewest = max(len(cut(share, even.limit_for(share))) for share in shares)
        most = max(len(parts) for parts in sizes)
        if most > fewest:
            yield f"accumulation=divisor cuts a batch into up to {most} micro-batches; even needs {fewest}"
