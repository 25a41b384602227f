"""The resolved decision of a run: its logical batch, its micro-batches, and which limit decided. Arithmetic only: the
caller has searched for the tuned limit and looked the safety factor up. Cost is uniform: one unit is one sample.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from can_train.errors import DoesNotFitError
from can_train.policy.accumulation import solve_accumulation

Mode = Literal["max", "opt", "off"]
BindingLimit = Literal["requested", "memory", "dataset", "min_steps"]
LrScale = Literal["auto", "none", "sqrt", "linear"]

_ROUNDING: Final = 1e-9
"""Samples. Keeps 0.29 × 100 at 29, where floating point has 28.999…"""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is resolved from.

    Attributes:
        mode: `max`: the largest batch that fits; `opt`: the batch asked for, cut to fit; `off`: as asked, uncut.
        requested_batch: Logical batch asked for, in samples; None where nobody asked.
        preset_batch: Logical batch that the learning rate was chosen for, in samples.
        dataset_size: Training samples, at least 1.
        min_steps_per_epoch: With `max`, an epoch has at least so many optimizer steps where the data set allows.
        divisor: Micro-batches all equal, rather than the fewest.
        micro_batch_size: Fixed micro-batch in samples, without a search; 0 searches.
        lr_scale: Learning rate against logical ÷ preset batch; `auto` is `sqrt` under `max`, else `none`.
        factor: Safety factor, in (0, 1].
    """

    mode: Mode
    requested_batch: int | None
    preset_batch: int
    dataset_size: int
    min_steps_per_epoch: int = 50
    divisor: bool = False
    micro_batch_size: int = 0
    lr_scale: LrScale = "auto"
    factor: float = 1.0

    @property
    def searches(self) -> bool:
        """Whether the plan needs a tuned limit."""
        return self.mode != "off" and self.micro_batch_size == 0

    @property
    def takes_what_fits(self) -> bool:
        """Whether the device decides the logical batch."""
        return self.mode == "max" and self.searches


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The resolved decision.

    Attributes:
        logical_batch: Samples that one optimizer step sees.
        safe_limit: Samples that one micro-batch may hold.
        micro_batches: Sizes in samples, largest first; their sum is `logical_batch`.
        steps_per_epoch: Optimizer steps, the last one perhaps on fewer samples.
        binding_limit: What decided the logical batch.
        lr_factor: Multiplier of the learning rate.
        tuned_limit: Largest size in samples that was tried and fits; None without a search.
        search_capped: Whether the search stopped where memory no longer mattered, so that more may fit than was tried.
        safety_factor: Share of the tuned limit in use; None without a search.
        notices: What the user should know, as sentences.
    """

    logical_batch: int
    safe_limit: int
    micro_batches: tuple[int, ...]
    steps_per_epoch: int
    binding_limit: BindingLimit
    lr_factor: float
    tuned_limit: int | None
    search_capped: bool
    safety_factor: float | None
    notices: tuple[str, ...]

    @property
    def used(self) -> float | None:
        """Largest micro-batch ÷ tuned limit; None where that limit was not searched for, or not reached: such a run
        says nothing of what a share of it leads to.
        """
        if not self.tuned_limit or self.search_capped:
            return None
        return self.micro_batches[0] / self.tuned_limit


def resolve_mode(find_batch_size: str, *, batch_size_given: bool) -> Mode:
    """Decides what `auto` means: `opt` where a batch size was given, else `max`. The other modes mean themselves."""
    if find_batch_size == "auto":
        return "opt" if batch_size_given else "max"
    modes: dict[str, Mode] = {"max": "max", "opt": "opt", "off": "off"}
    return modes[find_batch_size]


def search_upper(request: PlanRequest) -> int:
    """The largest size in samples that the finder need try: from there on memory no longer decides anything."""
    if request.takes_what_fits:
        needed = min(limit for limit, _ in _limits_beside_memory(request))
    else:
        needed = _asked_batch(request)
    return math.ceil(needed / request.factor - _ROUNDING)


def resolve_plan(request: PlanRequest, *, tuned_limit: int | None) -> Plan:
    """Resolves a plan.

    Args:
        request: What was asked for, and the safety factor.
        tuned_limit: Largest size in samples that fits, searched for up to `search_upper(request)`; None without a
            search.

    Raises:
        DoesNotFitError: Not even one sample fits.
    """
    safe_limit = _safe_limit(request, tuned_limit)
    logical, binding = _logical_batch(request, safe_limit)
    micro_batches = solve_accumulation(logical, safe_limit, divisor=request.divisor)
    return Plan(
        logical_batch=logical,
        safe_limit=safe_limit,
        micro_batches=micro_batches,
        steps_per_epoch=-(-request.dataset_size // logical),
        binding_limit=binding,
        lr_factor=_lr_factor(request, logical),
        tuned_limit=tuned_limit,
        search_capped=tuned_limit is not None and tuned_limit >= search_upper(request),
        safety_factor=None if tuned_limit is None else request.factor,
        notices=tuple(_notices(request, logical) + _divisor_notices(micro_batches, safe_limit)),
    )


def _safe_limit(request: PlanRequest, tuned_limit: int | None) -> int:
    if tuned_limit is None:
        return request.micro_batch_size or _asked_batch(request)
    if tuned_limit < 1:
        raise DoesNotFitError(
            "At least one training sample must fit on the device",
            value="a batch of one sample ran out of memory",
            remedy="Choose a smaller model (--size student), smaller samples or a larger device",
        )
    return max(1, math.floor(request.factor * tuned_limit + _ROUNDING))


def _logical_batch(request: PlanRequest, safe_limit: int) -> tuple[int, BindingLimit]:
    if request.takes_what_fits:
        limits = _limits_beside_memory(request)
        # Memory comes last: a search that stopped at its upper end ties with what bounded it, and did not bind.
        return min([*limits, (safe_limit, "memory")], key=lambda limit: limit[0])
    logical = _asked_batch(request)
    wanted = request.requested_batch or request.preset_batch
    return logical, "dataset" if logical < wanted else "requested"


def _limits_beside_memory(request: PlanRequest) -> list[tuple[int, BindingLimit]]:
    by_steps = max(1, request.dataset_size // request.min_steps_per_epoch)
    # The data set ties with min_steps only where a single step is asked for: then it is the data set that binds.
    return [(request.dataset_size, "dataset"), (by_steps, "min_steps")]


def _asked_batch(request: PlanRequest) -> int:
    return min(request.requested_batch or request.preset_batch, request.dataset_size)


def _lr_factor(request: PlanRequest, logical_batch: int) -> float:
    scale = request.lr_scale
    if scale == "auto":
        scale = "sqrt" if request.takes_what_fits else "none"
    ratio = logical_batch / request.preset_batch
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scale]


def _notices(request: PlanRequest, logical_batch: int) -> list[str]:
    if request.takes_what_fits:
        if request.requested_batch is None:
            return []
        ignored = f"the batch size of {request.requested_batch} was ignored"
        return [f"find_batch_size=max chose a batch of {logical_batch}; {ignored}"]
    notices = []
    if request.mode == "max":
        fixed = f"micro_batch_size={request.micro_batch_size} is fixed"
        notices.append(f"{fixed}, so find_batch_size=max has nothing to search; the batch is {logical_batch}")
    if logical_batch < (wanted := request.requested_batch or request.preset_batch):
        notices.append(f"The data set has {logical_batch} samples: a batch of {wanted} is the whole of it")
    return notices


def _divisor_notices(micro_batches: tuple[int, ...], safe_limit: int) -> list[str]:
    logical_batch = sum(micro_batches)
    fewest = -(-logical_batch // safe_limit)
    if len(micro_batches) == fewest:
        return []
    cut = f"accumulation=divisor cuts a batch of {logical_batch} into {len(micro_batches)} micro-batches"
    return [f"{cut}; accumulation=even needs {fewest}"]
