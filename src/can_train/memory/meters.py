"""Meters: the capacity of a device and the peak memory of a span of work."""

import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from can_train.errors import ConfigError, DeviceError, nearest_first
from can_train.io.units import exact_size, parse_size
from can_train.memory import host
from can_train.memory.allocator import no_contention
from can_train.memory.catalogue import Usable, gpu_key
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.memory.simulated_gpu import LiveStorageTracker, SimulatedGpu, simulated_contention

_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The user's own settings, the first that is set before the others; torch reads the first since 2.9."""


_SETTING: Final = "expandable_segments:True"


def segments_expand(environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether segments expand under the user's settings, or under can-train's where there are none."""
    own = _own_settings(environment)
    return own is None or re.search(r"\bexpandable_segments\s*:\s*True\b", own) is not None


def settings_in_force(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the user's settings, or can-train's where there are none."""
    own = _own_settings(environment)
    return _SETTING if own is None else own


def expand_cuda_segments(environment: Mapping[str, str] = os.environ) -> None:
    """Makes CUDA's segments expand unless the user has settings of their own; comes before the first allocation.

    Only this process is changed: the variables would be inherited by whatever it starts.
    """
    if _own_settings(environment) is None:
        # The first is torch 2.9's and later; the second warns there that it is deprecated.
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        apply = newer or torch.cuda.memory._set_allocator_settings
        apply(_SETTING)


def _own_settings(environment: Mapping[str, str]) -> str | None:
    return next((environment[name] for name in _VARIABLES if name in environment), None)


_OWN_MOST_BYTES: Final = 2**30
"""Most that this process's own context and kernels take of a GPU outside the allocator: what is missing beyond that,
others hold. The driver counts both alike."""


class Meter(Protocol):
    """Reads one device.

    Attributes:
        device: The torch device.
        name: What the driver calls it.
        key: Kind of device in the factor store, `h100-80gb`.
        total_bytes: Its whole memory.
        capacity_bytes: What PyTorch's allocator may use of it.
        taken_bytes: What others held of it at the start, which is not in the capacity; as far as one can tell.
        driver: Version of the driver; empty where there is none.
        counts_always: Whether a peak is that of everything since the last reset; else of measured spans alone.
    """

    device: torch.device
    name: str
    key: str
    total_bytes: int
    capacity_bytes: int
    taken_bytes: int
    driver: str
    counts_always: bool

    def active(self) -> AbstractContextManager[None]:
        """Makes the device work as it should; open for a whole attempt."""

    def host(self) -> AbstractContextManager[None]:
        """Opens a span whose new tensors are host memory, data sets and copies that leave the device."""

    def measuring(self, resident: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Opens a span whose peak counts; `resident` tensors are already on the device."""

    def reset_peak(self) -> None:
        """Forgets the peaks; only probes, finder and monitor may call it."""

    def peak_bytes(self) -> int:
        """Returns the largest allocated bytes since the last reset."""

    def peak_reserved_bytes(self) -> int:
        """Returns the largest reserved bytes since the last reset; 0 where nothing is reserved."""

    def allocated_bytes(self) -> int:
        """Returns the bytes allocated now; 0 where only measured spans are counted."""

    def retries(self) -> int:
        """Returns how often the allocator has released its cache because an allocation did not fit."""

    def available_bytes(self) -> int:
        """Returns what this process could have in use now: what it has reserved, and what the device has free."""

    def free_bytes(self) -> int:
        """Returns what nobody holds now, this process's cache included in what is held."""

    def foreign_bytes(self) -> int:
        """Returns how much of the capacity others hold now."""

    def release(self, *, collect: bool = True) -> None:
        """Returns cached memory to the device; `collect` looks for garbage in cycles first, which takes longer."""


class CpuMeter:
    """Counts live storages on measured spans only, against the host memory available at the start."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "cpu"
        self.driver = ""
        self.total_bytes = host.total_bytes()
        self.capacity_bytes = host.available_bytes()
        self.taken_bytes = 0
        self.key = f"cpu-{_gigabytes(self.total_bytes)}gb"
        self.counts_always = False
        self._open: list[LiveStorageTracker] = []
        self._peak_bytes = 0

    @property
    def _limit_bytes(self) -> int:
        """What a measured span may have live."""
        return self.capacity_bytes

    def active(self) -> AbstractContextManager[None]:
        """Does nothing: spans are measured, not attempts."""
        return nullcontext()

    def host(self) -> AbstractContextManager[None]:
        """Does nothing: the device is the host."""
        return nullcontext()

    @contextmanager
    def measuring(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """Counts storages inside the block; more than the capacity raises `torch.OutOfMemoryError`."""
        tracker = LiveStorageTracker(self._limit_bytes, resident)
        self._open.append(tracker)
        try:
            with tracker:
                yield
        finally:
            self._open.remove(tracker)
            self._peak_bytes = max(self._peak_bytes, tracker.peak_bytes)

    def reset_peak(self) -> None:
        """Forgets the peak, also that of a span that is still open."""
        self._peak_bytes = 0
        for tracker in self._open:
            tracker.forget_peak()

    def peak_bytes(self) -> int:
        """Returns the largest live bytes of the measured spans since the last reset."""
        return max([self._peak_bytes, *(tracker.peak_bytes for tracker in self._open)])

    def peak_reserved_bytes(self) -> int:
        """Returns 0: the CPU's allocator reserves nothing."""
        return 0

    def allocated_bytes(self) -> int:
        """Returns 0: between measured spans nothing is counted."""
        return 0

    def retries(self) -> int:
        """Returns 0: there is no cache to release."""
        return 0

    def available_bytes(self) -> int:
        """Returns the capacity."""
        return self.capacity_bytes

    def free_bytes(self) -> int:
        """Returns the host memory that is available now."""
        return host.available_bytes()

    def foreign_bytes(self) -> int:
        """Returns 0: what others took before the start is not in the capacity."""
        return 0

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage: the CPU's allocator caches nothing."""
        _drop_failed_backward()
        if collect:
            gc.collect()


class AbsentGpuMeter(CpuMeter):
    """Stands for a GPU that is not here, where a plan is made for it: key and sizes are the GPU's, what is measured is
    counted on the CPU and has the host's memory.

    Args:
        target: The GPU, and what of it can be used.

    Attributes:
        host_bytes: What measured spans may use.
    """

    def __init__(self, target: Usable) -> None:
        super().__init__()
        self.host_bytes = self.capacity_bytes
        self.name = target.name
        self.key = target.key
        self.total_bytes = target.total_bytes
        self.capacity_bytes = target.capacity_bytes

    @property
    def _limit_bytes(self) -> int:
        # A probe that the GPU could not hold still tells what it costs.
        return self.host_bytes

    @contextmanager
    def host(self) -> Iterator[None]:
        """Leaves what is made inside the block out of measured spans: it would not be on the GPU."""
        with ExitStack() as stack:
            for tracker in self._open:
                stack.enter_context(tracker.host())
            yield

    def free_bytes(self) -> int:
        """Returns the capacity: nobody is known to use the GPU."""
        return self.capacity_bytes


class CudaMeter:
    """Reads PyTorch's caching allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.name = properties.name
        self.driver = host.nvidia_driver_version()
        _, self.total_bytes = torch.cuda.mem_get_info(device)
        obtainable = self._obtainable_bytes()
        self.capacity_bytes = min(obtainable, int(_memory_fraction(device) * self.total_bytes))
        self.taken_bytes = max(0, self.total_bytes - obtainable - _OWN_MOST_BYTES)
        self.key = gpu_key(properties.name, self.total_bytes)
        self.counts_always = True

    def active(self) -> AbstractContextManager[None]:
        """Does nothing: the device is there."""
        return nullcontext()

    def host(self) -> AbstractContextManager[None]:
        """Does nothing: a tensor knows its device."""
        return nullcontext()

    def measuring(self, resident: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Does nothing: the allocator counts always."""
        return nullcontext()

    def reset_peak(self) -> None:
        """Resets the allocator's peak counters."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Returns the allocator's largest allocated bytes since the last reset."""
        return torch.cuda.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int:
        """Returns the allocator's largest reserved bytes since the last reset."""
        return torch.cuda.max_memory_reserved(self.device)

    def allocated_bytes(self) -> int:
        """Returns the allocator's allocated bytes."""
        return torch.cuda.memory_allocated(self.device)

    def retries(self) -> int:
        """Returns the allocator's count of retries."""
        return int(torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))

    def available_bytes(self) -> int:
        """Returns what is reserved and what is free, at most the capacity."""
        return min(self.capacity_bytes, self._obtainable_bytes())

    def free_bytes(self) -> int:
        """Returns what the driver has free."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def foreign_bytes(self) -> int:
        """Returns what has gone from the capacity since the start: other processes, or libraries of this one."""
        return self.capacity_bytes - self.available_bytes()

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage, then empties the allocator's cache."""
        if collect:
            gc.collect()
        torch.cuda.empty_cache()

    def _obtainable_bytes(self) -> int:
        # What this process has reserved is not free to the driver, but it is to the process.
        return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)


class SimulatedMeter:
    """Reads a simulated GPU, whose memory PyTorch's allocator may use as far as others leave it.

    Args:
        total_bytes: Its memory.
        expandable: Whether the allocator's segments expand.
        others: Tells what other processes hold of it.

    Attributes:
        gpu: The simulated GPU.
    """

    def __init__(self, total_bytes: int, *, expandable: bool, contention: Callable[[], int] = no_contention) -> None:
        self.device = torch.device("cpu")
        self.name = "Simulated GPU"
        self.driver = ""
        self.total_bytes = total_bytes
        self.gpu = SimulatedGpu(total_bytes, expandable=expandable, contention=contention)
        self.capacity_bytes = self.gpu.allocator.available_bytes
        self.taken_bytes = total_bytes - self.capacity_bytes
        self.key = f"sim-{exact_size(total_bytes)}"
        self.counts_always = True
        self._is_active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Puts what is made inside the block on the simulated GPU; a block within it changes nothing."""
        if self._is_active:
            yield
            return
        self._is_active = True
        try:
            with self.gpu:
                yield
        finally:
            self._is_active = False

    def host(self) -> AbstractContextManager[None]:
        """Leaves what is made inside the block off the simulated GPU, then and later."""
        return self.gpu.host()

    @contextmanager
    def measuring(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """Puts `resident` on the simulated GPU where it is not there yet, and makes sure that it is active."""
        self.gpu.seed_resident(resident)
        with self.active():
            yield

    def reset_peak(self) -> None:
        """Resets the allocator's peaks."""
        self.gpu.allocator.reset_peaks()

    def peak_bytes(self) -> int:
        """Returns the allocator's largest allocated bytes since the last reset."""
        return self.gpu.allocator.peak_allocated_bytes

    def peak_reserved_bytes(self) -> int:
        """Returns the allocator's largest reserved bytes since the last reset."""
        return self.gpu.allocator.peak_reserved_bytes

    def allocated_bytes(self) -> int:
        """Returns the allocator's allocated bytes."""
        return self.gpu.allocator.allocated_bytes

    def retries(self) -> int:
        """Returns the allocator's count of retries."""
        return self.gpu.allocator.num_alloc_retries

    def available_bytes(self) -> int:
        """Returns what is reserved and what is free."""
        return self.gpu.allocator.available_bytes

    def free_bytes(self) -> int:
        """Returns what the allocator has not reserved and others have not taken."""
        return self.gpu.allocator.free_bytes

    def foreign_bytes(self) -> int:
        """Returns what has gone from the capacity."""
        return self.capacity_bytes - self.available_bytes()

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage, then gives the allocator's cache back."""
        with self.host():
            _drop_failed_backward()
        if collect:
            gc.collect()
        self.gpu.allocator.release_cached()


_ALLOCATED: Final = (("SLURM_JOB_GPUS", ("",)), ("SLURM_STEP_GPUS", ("",)), ("SLURM_GPUS_ON_NODE", ("", "0")))
"""Variables in which a scheduler says which GPUs it gave a job, and their values that mean none: the first two list
indices, and GPU 0 is one; the last counts."""


_FORMS: Final = ("auto", "cpu", "cuda", "cuda:1", "sim:2GiB")
"""What `--device` may read, an example of each kind."""


def resolve_device(text: str, *, environment: Mapping[str, str] = os.environ) -> torch.device:
    """Turns `auto`, `cpu`, `cuda[:i]` or `sim:<size>` into a torch device: tensors of a simulated GPU are the CPU's.

    Raises:
        DeviceError: There is no such device, or a GPU is there and torch cannot use it.
    """
    if text == "cpu" or is_simulated(text):
        return torch.device("cpu")
    if text == "auto":
        return _automatic(environment)
    if not re.fullmatch(r"cuda(:\d+)?", text):
        raise DeviceError("Unknown device", value=repr(text), remedy=f"Valid: {', '.join(nearest_first(text, _FORMS))}")
    if not torch.cuda.is_available():
        raise DeviceError("torch sees no CUDA GPU", value=f"--device {text}", remedy=_cuda_remedy())
    device = torch.device(text)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise DeviceError("There is no such GPU", value=text, remedy=f"torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", device.index or 0)


def is_simulated(text: str) -> bool:
    """Tells whether a device is a simulated GPU, `sim:<size>`.

    Raises:
        DeviceError: It is one without a size that can be read.
    """
    return text.partition(":")[0] == "sim" and simulated_bytes(text) > 0


def simulated_bytes(text: str) -> int:
    """Reads the memory of a simulated GPU, in bytes.

    Raises:
        DeviceError: It has none that can be read.
    """
    try:
        return parse_size(text.removeprefix("sim:"))
    except ConfigError:
        raise DeviceError(
            "A simulated GPU is written sim:<size>", value=repr(text), remedy="Give it memory: sim:512MiB, sim:2GiB"
        ) from None


def _automatic(environment: Mapping[str, str]) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    promised = _promised_gpu(environment)
    if promised:
        raise DeviceError("A GPU is here but torch cannot use it", value=promised, remedy=_cuda_remedy())
    return torch.device("cpu")


def _promised_gpu(environment: Mapping[str, str]) -> str:
    """Says what shows that a GPU was given to this process; empty where nothing does."""
    for name, none in _ALLOCATED:
        if environment.get(name, "") not in none:
            return f"{name}={environment[name]}"
    if environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return ""
    gpus = Path("/proc/driver/nvidia/gpus")
    return (
        f"the NVIDIA driver lists {len(list(gpus.iterdir()))} GPU(s)" if gpus.is_dir() and any(gpus.iterdir()) else ""
    )


def _cuda_remedy() -> str:
    if torch.version.cuda is None:
        return (
            "This torch was built without CUDA: install a CUDA build, or set CAN_TRAIN_PYTHON to an environment that "
            "has one; --device cpu trains without a GPU"
        )
    built = f"torch was built for CUDA {torch.version.cuda}"
    return f"{built}: check the driver (nvidia-smi); --device cpu trains without a GPU"


def open_meter(text: str) -> Meter:
    """Makes the meter of what `--device` reads: `auto`, `cpu`, `cuda[:i]` or `sim:<size>`.

    Raises:
        DeviceError: There is no such device, or it cannot be used.
    """
    device = resolve_device(text)
    if is_simulated(text):
        return SimulatedMeter(simulated_bytes(text), expandable=segments_expand(), contention=simulated_contention())
    if device.type == "cpu":
        return CpuMeter()
    expand_cuda_segments()
    return CudaMeter(device)


def _drop_failed_backward() -> None:
    """Has the CPU's autograd engine let go of a backward pass that failed.

    What of it had not run yet waits in a queue of the thread, with all that its forward pass has saved, until the next
    backward pass there. Nodes on a GPU run in a thread of their own, which empties its queue.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()


def _memory_fraction(device: torch.device) -> float:
    """The share of the GPU that this process was given with `torch.cuda.set_per_process_memory_fraction`."""
    # Torch 2.6 can set it but not tell it.
    tell = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(tell(device)) if tell is not None else 1.0


def _gigabytes(size: int) -> int:
    return max(1, round(size / 2**30))


FRAGMENTATION_PROBE_BYTES: Final = 256 * 2**20
"""Largest cost of a batch that shows the gaps: larger ones take longer to show about the same share. Of much smaller
ones they are mostly the last page of 20 MiB, as they are on a device that holds no more."""


_ENDLESS: Final = 2**50


def simulate_peak(run: Callable[[], None], resident: Iterable[Tensor]) -> tuple[int, int]:
    """Runs a batch on an endless simulated GPU.

    Args:
        run: Runs the batch on the host.
        resident: Tensors that are there before.
    """
    meter = SimulatedMeter(_ENDLESS, expandable=segments_expand())
    with meter.measuring(resident):
        run()
    return meter.peak_bytes(), meter.peak_reserved_bytes()


def simulate_fit(run: Callable[[], None], resident: Iterable[Tensor], capacity_bytes: int) -> bool:
    """Tells whether a batch runs on a simulated GPU of a capacity, also once its allocator's cache is full.

    Args:
        run: Runs the batch on the host.
        resident: Tensors that are there before.
        capacity_bytes: What the allocator may use.
    """
    with CatchOutOfMemory():
        meter = SimulatedMeter(capacity_bytes, expandable=segments_expand())
        with meter.measuring(resident):
            run()
            run()
        return True
    return False
