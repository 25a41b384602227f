from pathlib import Path

import pytest

from can_train.errors import DeviceError
from can_train.memory.meters import FOREIGN, SimulatedMeter, open_meter, simulated_contention

MIB = 2**20


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what others hold; not there yet."""
    path = tmp_path / "held"
    monkeypatch.setenv(FOREIGN, str(path))
    return path


def open_gpu(mib: int) -> SimulatedMeter:
    meter = open_meter(f"sim:{mib}MiB")
    assert isinstance(meter, SimulatedMeter)
    return meter


def test_where_nobody_is_named_nobody_is_there() -> None:
    assert simulated_contention({})() == 0


@pytest.mark.parametrize(("size", "held_mib"), [("0MiB", 0), ("0gib", 0), ("24MiB", 24)])
def test_the_variable_may_be_a_size_as_well_as_a_file(
    monkeypatch: pytest.MonkeyPatch, size: str, held_mib: int
) -> None:
    monkeypatch.setenv(FOREIGN, size)
    assert open_gpu(64).foreign_bytes_at_start == held_mib * MIB


@pytest.mark.parametrize("text", ["", "\n", "0MiB", None])
def test_a_file_without_a_size_means_nobody(held: Path, text: str | None) -> None:
    if text is not None:
        held.write_text(text)
    assert open_gpu(64).foreign_bytes() == 0


def test_who_was_there_first_leaves_the_rest_as_on_a_gpu(held: Path) -> None:
    held.write_text("24MiB\n")
    meter = open_gpu(64)
    assert (meter.total_bytes, meter.capacity_bytes, meter.foreign_bytes_at_start) == (64 * MIB, 40 * MIB, 24 * MIB)
    assert (meter.foreign_bytes(), meter.key) == (0, "sim-64mib")


def test_who_comes_and_goes_later_takes_and_gives_back(held: Path) -> None:
    meter = open_gpu(64)
    held.write_text("24MiB")
    assert (meter.capacity_bytes, meter.available_bytes(), meter.foreign_bytes()) == (64 * MIB, 40 * MIB, 24 * MIB)
    assert meter.gpu.allocator.malloc(50 * MIB) is None
    held.unlink()
    assert meter.gpu.allocator.malloc(50 * MIB) is not None


def test_a_file_with_something_else_is_named(held: Path) -> None:
    held.write_text("a lot")
    with pytest.raises(DeviceError, match=rf"{FOREIGN}.*a lot"):
        open_gpu(64)
