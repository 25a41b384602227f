"""Sentences of a plan about its limits and about options that have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch

from can_train.fit.cost_model import EXPLAINED, DeviceLimits
from can_train.fit.packing import ROUNDING
from can_train.fit.plan import PhasePlan
from can_train.fit.precision import has_images
from can_train.fit.search import SEARCH_SECONDS, SEARCH_SHARE
from can_train.io.units import size_text
from can_train.memory.catalogue import UNKNOWN
from can_train.memory.cuda_workspaces import AMPERE, Capability, capability_of
from can_train.memory.meters import AbsentGpuMeter, Meter, SimulatedMeter

if TYPE_CHECKING:
    from torch import nn

    from can_train.config.settings import TrainingSettings

_SMALL_SHARE: Final = 0.01  # of the device; of less memory no notice says how well it was predicted
_PADDED_SHARE: Final = 0.02  # Share of a mean sample's cost below which padded lengths do not matter: noise of a fit


def too_large_notices(plan: PhasePlan, limits: DeviceLimits, training: TrainingSettings) -> list[str]:
    """Warns where the user's options make micro-batches too large."""
    if limits.training.capped or plan.largest_cost <= limits.training.tuned_limit * (1 + ROUNDING):
        return []
    need, there = size_text(limits.training.peak_bytes(plan.largest_cost)), size_text(limits.capacity_bytes)
    needs = f"one of {plan.largest_micro_batch} samples is predicted to need {need} ({there} usable)"
    if training.micro_batch_size:
        option = f"micro_batch_size={training.micro_batch_size} is more than fits"
    elif training.min_micro_batch_size > 1:
        option = f"min_micro_batch_size={training.min_micro_batch_size} forbids micro-batches that fit"
    else:
        option = "The micro-batches are more than fits"
    can_split = training.adaptive_micro_batch and plan.largest_micro_batch > training.min_micro_batch_size
    outcome = "it will run out of memory and be split" if can_split else "the run will fail for lack of memory"
    return [f"{option}: {needs}; {outcome}"]


def limits_notices(limits: DeviceLimits) -> Iterator[str]:
    """Says where the features do not account for the measured memory, where samples take the same memory whatever
    their padded lengths, and where a search ended for lack of time.
    """
    phases = (("training", limits.training), ("evaluation", limits.evaluation))
    for mode, phase in phases:
        names = ", ".join(dict.fromkeys(feature.name for feature in phase.model.features))
        # Of a hundredth of the device, the allocator's rounding is a large part, and no size depends on it.
        if phase.peak_bytes(phase.tuned_limit) < _SMALL_SHARE * limits.capacity_bytes:
            continue
        if not phase.model.explains:
            basis = "sizes rest on trials" if phase.trials else "a run tries the sizes that are only predicted here"
            residual = f"the probes lie up to {phase.model.relative_residual:.0%} off"
            yield f"The memory of {mode} does not follow its features ({names}): {residual}; {basis}"
        elif not limits.recorded and abs(phase.measured_ratio - 1) > EXPLAINED:
            took = f"{phase.measured_ratio:.1%} of the memory predicted from small batches ({names})"
            yield f"A full batch of {mode} took {took}; the sizes rest on the full batch"
    features, shares = limits.training.model.features, limits.training.mean_shares
    padded = dict.fromkeys(feature.name for feature in features if feature.padding)
    of_lengths = sum(share for feature, share in zip(features, shares, strict=True) if feature.name in padded)
    if padded and of_lengths <= _PADDED_SHARE * sum(shares):
        names = ", ".join(padded)
        fixed = f"Memory does not grow with the lengths of samples ({names}): they seem to be padded to a fixed length"
        yield f"{fixed}; padded to the longest of the samples that are collated, short ones would take less"
    for mode, phase in phases:
        if phase.untried and phase.capped:
            known = "was tried" if phase.trials else "is predicted to fit in half of the device"
            tried = f"The largest batch of {mode} that {known} takes {size_text(phase.tuned_limit)}"
            more = f"a search keeps to {SEARCH_SHARE:.0%} of an epoch or {SEARCH_SECONDS:g} s"
            yield f"{tried}; one of {size_text(phase.untried)} was not tried for lack of time ({more})"


def format_notices(training: TrainingSettings, model: nn.Module, meter: Meter) -> Iterator[str]:
    """Says where TF32 or the format of images has no effect, and how TF32 changes products."""
    if training.channels_last and not has_images(model):
        yield "training.channels_last has no effect: no weight has four dimensions, as those of convolutions of images"
    if not training.tf32:
        return
    without = "training.tf32 has no effect"
    if training.precision == "fp64":
        yield f"{without} in fp64"
    elif meter.is_host or isinstance(meter, SimulatedMeter):
        yield f"{without} on a {'processor' if meter.is_host else 'simulated GPU'}"
    elif _capability(meter) < AMPERE:
        yield f"{without} on {meter.name}: NVIDIA GPUs have it from Ampere on"
    else:
        yield "training.tf32: products of single precision are computed with 10 of their 23 bits after the point"


def _capability(meter: Meter) -> Capability:
    if isinstance(meter, AbsentGpuMeter):
        generation = meter.target.generation
        return AMPERE if generation == UNKNOWN else capability_of(generation)
    return torch.cuda.get_device_capability(meter.device)
