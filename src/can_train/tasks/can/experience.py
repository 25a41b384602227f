"""What is known, before the first run, of the share of a tuned limit that CAN models may use: larger data sets hold
larger graphs, and some modes keep more in memory than a trial step shows.
"""

from typing import Final

_DATASETS: Final = (
    (("set_02", "set_03", "set_04"), 0.45, "large dataset (set_02/03/04)"),
    (("hcrl_sa",), 0.55, "medium dataset (hcrl_sa)"),
    (("hcrl_ch", "set_01"), 0.65, "small dataset (hcrl_ch/set_01)"),
)
"""(names, share of the tuned limit, reason)."""

_OTHER_DATASET: Final = (0.60, "other dataset")

_MODES: Final = {
    "knowledge_distillation": (0.75, "knowledge distillation (teacher caching)"),
    "fusion": (0.80, "fusion (two models in memory)"),
    "curriculum": (0.90, "curriculum (VGAE scoring)"),
    "autoencoder": (0.95, "autoencoder (reconstruction)"),
}
"""Multiplier and reason of each mode that has one."""


def experience(dataset: str, mode: str) -> tuple[float, str, list[tuple[float, str]]]:
    """Looks up the arguments of `can_train.policy.experience.experience_factor`.

    Args:
        dataset: Name of the data set.
        mode: Name of the mode.

    Returns:
        The base share, its reason in words, and the mode's adjustments.
    """
    base, reason = next(((share, why) for names, share, why in _DATASETS if dataset in names), _OTHER_DATASET)
    return base, reason, [_MODES[mode]] if mode in _MODES else []
