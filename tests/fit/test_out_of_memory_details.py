import pytest

from can_train.errors import OutOfMemoryDetails
from can_train.fit.rescue import describe_out_of_memory
from can_train.memory.meters import CpuMeter, SimulatedMeter

MIB = 2**20


def gpu(*, at_start: int = 0, later: int = 0) -> SimulatedMeter:
    """A GPU of 100 MiB with others on it."""
    meter = SimulatedMeter(100 * MIB, expandable=True, contention=lambda: at_start * MIB)
    meter.gpu.allocator.foreign_bytes = (at_start + later) * MIB
    return meter


@pytest.mark.parametrize(
    ("at_start", "later", "need_mib", "one_sample"),
    [
        (0, 0, 120, True),
        (0, 0, 80, False),
        (0, 0, None, True),  # it had the device to itself, and failed
        (30, 0, None, False),
        (0, 30, None, False),
        (30, 0, 90, False),  # it would have fit before they came
        (30, 30, 120, True),  # nor does it fit when they have left
    ],
)
def test_what_does_not_fit_alone_is_told_from_what_others_leave_no_room_for(
    at_start: int, later: int, need_mib: int | None, one_sample: bool
) -> None:
    found = describe_out_of_memory(gpu(at_start=at_start, later=later), None if need_mib is None else need_mib * MIB)
    assert (found.one_sample, found.should_fit) == (one_sample, not one_sample)
    assert found.foreign_bytes == (at_start + later) * MIB
    assert bool(found.cards) == one_sample
    assert not found.of_host


def test_what_should_fit_by_what_is_known_still_does() -> None:
    found = describe_out_of_memory(gpu(), None, known=OutOfMemoryDetails(should_fit=True))
    assert (found.one_sample, found.should_fit, found.capacity_bytes) == (False, True, 100 * MIB)


def test_on_the_cpu_it_is_the_hosts_memory() -> None:
    assert describe_out_of_memory(CpuMeter(), None).of_host
