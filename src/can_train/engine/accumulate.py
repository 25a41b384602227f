"""The gradient of one logical batch, computed in micro-batches. The parts' sums are divided by the whole batch's
denominators, so the accumulated gradient is the full batch's, whatever the parts' sizes.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

Losses = Mapping[str, tuple[Tensor, float]]
"""Loss terms of a part: the sum over the part, and the part's own denominator."""


def accumulate_gradients(
    losses_of: Callable[[int, int], Losses],
    micro_batches: Sequence[int],
    denominators: Mapping[str, float],
    weights: Mapping[str, float],
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> dict[str, float]:
    r"""Accumulates :math:`\nabla \sum_t w_t \cdot S_t / D_t` over micro-batches, where S and D belong to the whole
    batch.

    Args:
        losses_of: Computes the losses of samples `start:stop` of the logical batch.
        micro_batches: Sizes in samples, summing to the logical batch.
        denominators: Per term, of the whole logical batch; terms that do not occur are ignored.
        weights: Per term.
        scale: Applied to each part's loss before backward (a gradient scaler).

    Returns:
        Each term's mean over the logical batch.
    """
    means: dict[str, float] = {}
    start = 0
    for size in micro_batches:
        losses = losses_of(start, start + size)
        # A term whose denominator is zero has nothing in this batch: its sum is zero too.
        parts = {term: total / (denominators[term] or 1.0) for term, (total, _) in losses.items()}
        weighted = [weights[term] * part for term, part in parts.items()]
        scale(sum(weighted[1:], start=weighted[0])).backward()
        for term, part in parts.items():
            means[term] = means.get(term, 0.0) + float(part.detach())
        start += size
    return means
