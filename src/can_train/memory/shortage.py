"""What is known of memory that ran out on a device: whether it would fit there alone, and what others held."""

from dataclasses import replace

from can_train.errors import Shortage
from can_train.memory.meters import CpuMeter, Meter
from can_train.policy.cards import cards_that_hold


def shortage_on(meter: Meter, need_bytes: float | None, *, known: Shortage | None = None) -> Shortage:
    """Looks at a device on which something did not fit.

    Args:
        meter: Of the device.
        need_bytes: What is needed; None: unknown. Then failing is taken for proof, unless others held memory.
        known: What was known already and stays; None: nothing.
    """
    foreign = meter.taken_bytes + meter.foreign_bytes()
    alone = meter.capacity_bytes + meter.taken_bytes
    hopeless = not foreign if need_bytes is None else need_bytes > alone
    if known is not None and known.should_fit:
        hopeless = False
    return replace(
        known or Shortage(),
        one_sample=hopeless,
        should_fit=not hopeless,
        of_host=isinstance(meter, CpuMeter),
        need_bytes=None if need_bytes is None else round(need_bytes),
        capacity_bytes=meter.capacity_bytes,
        foreign_bytes=foreign,
        cards=cards_that_hold(max(need_bytes or 0, alone)) if hopeless else "",
    )
