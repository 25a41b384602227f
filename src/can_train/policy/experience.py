"""The factor of a configuration that nobody has run yet, from what is known of its like. Which share belongs to what is
each task's own table.
"""

from collections.abc import Sequence


def experience_factor(base: float, base_reason: str, adjustments: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Multiplies a base factor by its adjustments, and says so.

    >>> experience_factor(0.65, "small dataset", [(0.95, "reconstruction")])
    (0.6175, 'small dataset 0.65 × reconstruction 0.95 = 0.6175')
    >>> experience_factor(0.6, "other dataset", [])
    (0.6, 'other dataset 0.6')

    Args:
        base: Share of the tuned limit, in (0, 1].
        base_reason: What the base stands for, in words.
        adjustments: (multiplier in (0, 1], its reason in words).

    Returns:
        The factor, and its reason in words.
    """
    factor = base
    terms = [f"{base_reason} {base:g}"]
    for multiplier, reason in adjustments:
        factor *= multiplier
        terms.append(f"{reason} {multiplier:g}")
    # Rounded, so that the factor recorded is the one that the reason states.
    factor = round(factor, 4)
    result = f" = {factor:g}" if adjustments else ""
    return factor, " × ".join(terms) + result
