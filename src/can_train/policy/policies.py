"""The policies by the names that settings and observations know them by."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from can_train.policy.affine import AffinePolicy
from can_train.policy.factors import FactorPolicy, MomentumPolicy

POLICIES: Final[Mapping[str, type[AffinePolicy] | type[MomentumPolicy]]] = {
    "affine": AffinePolicy,
    "momentum": MomentumPolicy,
}


def make_policy(name: str, options: Mapping[str, Any]) -> FactorPolicy:
    """Makes a policy; options that it does not have are another one's, and are passed over.

    >>> make_policy("momentum", {"target": 0.8, "half_life": 5.0}).target
    0.8

    Args:
        name: A key of `POLICIES`.
        options: Values of its attributes.
    """
    kind = POLICIES[name]
    known = {item.name for item in fields(kind)}
    return kind(**{option: value for option, value in options.items() if option in known})
