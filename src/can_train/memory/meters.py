"""Meters: the capacity of a device, and the peak memory of a span of work on it."""

import gc
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from can_train.errors import ArgumentError, ConfigError, DeviceError, shown
from can_train.io.units import count_of, exact_size, parse_device, parse_size
from can_train.memory.allocator_settings import OWN_SETTINGS, SETTINGS_VARIABLES, read_allocator_settings
from can_train.memory.catalogue import UsableMemory, gpu_key, recordable
from can_train.memory.cuda_workspaces import SUM_BYTES_PER_THREAD, Capability, capability_of
from can_train.memory.host import PACKED, available_bytes
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.memory.sharded_tensors import shard_of
from can_train.memory.simulated.allocator import PLAIN, AllocatorSettings, no_contention
from can_train.memory.simulated.gpu import LiveStorageTracker, SimulatedGpu, StorageTracker
from can_train.memory.value_sizes import watching_numbers

# Most bytes that this process's own CUDA context and kernels take of a GPU outside the allocator. The driver does not
# tell whose memory is whose, so bytes beyond this that are missing at the start count as held by other processes.
_CONTEXT_MOST_BYTES: Final = 2**30
# SLURM's variables for the GPUs of a job, each with its values for none. "0" in the first two is the GPU with index 0;
# the last is a count.
_ALLOCATED: Final = (("SLURM_JOB_GPUS", ("",)), ("SLURM_STEP_GPUS", ("",)), ("SLURM_GPUS_ON_NODE", ("", "0")))
_NAMES_GPU: Final = re.compile(r"\s*(\d|GPU-|MIG-)")  # the beginning of a list that names a GPU
# Variable with the path of a file that stands for other processes on a simulated GPU. The file holds a size, `200MiB`;
# without a file, or with an empty one, there are none.
FOREIGN: Final = "CAN_TRAIN_SIM_FOREIGN"
# Variable that lets a training on a simulated GPU begin with recorded lines, as on a card. By default it begins with
# probes, which show no less on a simulated GPU and take less time than the recorder's process.
RECORDED: Final = "CAN_TRAIN_SIM_RECORDED"
# Largest cost of a batch that shows how fragmented an allocator's memory becomes. Larger batches take longer and show
# about the same share; in much smaller ones the last page of 20 MiB dominates, as it does on a device of that size.
FRAGMENTATION_PROBE_BYTES: Final = 256 * 2**20
_UNLIMITED: Final = 2**50
# A smaller copy to a GPU takes less than 45 µs at 25 GB/s, and a stream for it takes time of the host.
_LARGE_COPY_BYTES: Final = 2**20
Resident = nn.Module | Optimizer | Iterable[Tensor]  # has tensors on the device between steps


class Meter(ABC):
    """Reads one device. The defaults are for a device that this process has to itself."""

    device: torch.device
    name: str  # the driver's name for it
    key: str  # kind of device in the factor store, `h100-80gb`
    _forgiven_retries = 0
    total_bytes: int  # its whole memory
    capacity_bytes: int  # that PyTorch's allocator may use
    kernel_bytes: int = 0  # the most that one of its kernels takes beside its results, in batches that fill it
    foreign_bytes_at_start: int = 0  # held by other processes, as far as one can tell; not part of the capacity
    driver: str = ""  # version of the driver; empty where there is none
    counts_always: bool = True  # whether a peak covers everything since the last reset; if not, only measured spans
    is_host: bool = False  # whether its memory is the host's
    notices: tuple[str, ...] = ()  # for a plan to print, as sentences without a full stop
    recordable: UsableMemory | None = None  # the device that the recorder stands in for; None: it cannot

    def active(self, resident: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        """Opens a span of work on the device, such as a whole attempt of a run; `resident` tensors are already on the
        device. A span inside another span changes nothing.
        """
        return nullcontext()

    def host(self) -> AbstractContextManager[None]:
        """Opens a span whose new tensors are host memory: data sets, and copies that leave the device."""
        return nullcontext()

    def measuring(self, resident: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Opens a span whose peak counts; `resident` tensors are already on the device."""
        return nullcontext()

    def take_values(self) -> bool:
        """Computes all results from now on if the last span drew results at random that decided a size or that the
        program read. Returns whether that span is to be measured again.
        """
        return False

    @abstractmethod
    def reset_peak(self) -> None:
        """Forgets the peaks, also inside an open span; only probes, search and monitor may call it."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Returns the largest allocated bytes since the last reset."""

    def peak_reserved_bytes(self) -> int:
        """Returns the largest reserved bytes since the last reset; 0 where nothing is reserved."""
        return 0

    def allocated_bytes(self) -> int:
        """Returns the bytes allocated now; 0 where only measured spans are counted."""
        return 0

    def seconds(self) -> float:
        """Reads a clock in seconds once the device has done its work. On the host it is this thread's CPU time, which
        other processes do not lengthen.
        """
        return time.thread_time()

    def moment(self) -> object:
        """Marks a moment in the device's work, without waiting for it; `seconds_between` reads two of them later."""
        return time.perf_counter()

    def seconds_between(self, begun: Any, ended: Any) -> float:
        """Returns the seconds from one `moment` to another, which the device has passed."""
        return float(ended - begun)

    def retries(self) -> int:
        """Returns how often the allocator has released its cache because an allocation did not fit."""
        return self._all_retries() - self._forgiven_retries

    def forgive_retries(self, *, since: int) -> None:
        """Leaves those since an earlier count out: a comparison of batches says nothing of the steps."""
        self._forgiven_retries += self.retries() - since

    def _all_retries(self) -> int:
        return 0

    def utilisation(self) -> float | None:
        """Returns the share of the last second in which kernels ran, from 0 to 1; None where nobody samples it."""
        return None

    def available_bytes(self) -> int:
        """Returns the bytes that this process could have in use now: its reserved bytes, and free bytes."""
        return self.capacity_bytes

    def begin_part(self) -> None:  # noqa: B027 - optional
        """Is called before the inputs of each micro-batch are made. Keeps the host at most one micro-batch ahead of the
        device, so that no more inputs than those of one micro-batch wait there.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Returns the bytes that no process holds now; this process's reserved bytes are held."""

    def foreign_bytes(self) -> int:
        """Returns how much of the capacity has gone to other processes since the start."""
        return self.capacity_bytes - self.available_bytes()

    @abstractmethod
    def release(self, *, collect: bool = True) -> None:
        """Returns cached memory to the device; `collect` looks for garbage in cycles first, which takes longer."""


class CpuMeter(Meter):
    """Counts live storages on measured spans only, against the host memory that is available at the start; `cuda` is
    the capability of the GPU whose operators run on measured spans, for predictions, and None for the CPU's own.
    """

    counts_always = False
    is_host = True
    host_bytes = 0  # that measured spans may use, if not the capacity

    def __init__(self, *, cuda: Capability | None = None) -> None:
        self._cuda = cuda
        # Only memory is read of a GPU's spans, which nothing trains.
        self._computes = cuda is None
        self._has_read_drawn = False
        self.values_decide = False  # Whether values of results decided a size, or were read, in a measured span
        self.device = torch.device("cpu")
        self.name = "cpu"
        self.total_bytes = psutil.virtual_memory().total
        self.capacity_bytes = available_bytes()
        self.key = f"cpu-{max(1, round(self.total_bytes / 2**30))}gb"
        self._open: list[LiveStorageTracker] = []
        self._peak_bytes = 0

    @contextmanager
    def measuring(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """Counts storages inside the block; more than the capacity raises `torch.OutOfMemoryError`."""
        tracker = LiveStorageTracker(
            self.host_bytes or self.capacity_bytes, resident, cuda=self._cuda, computes=self._computes
        )
        self._open.append(tracker)
        try:
            with tracker, nullcontext() if self._computes else watching_numbers(tracker.note_read):
                yield
        finally:
            self._open.remove(tracker)
            self._peak_bytes = max(self._peak_bytes, tracker.peak_bytes)
            self._has_read_drawn = self._has_read_drawn or tracker.has_read_drawn

    def take_values(self) -> bool:
        """Computes the results of a GPU's spans, too, once a size or a number depends on them."""
        if not self._has_read_drawn:
            return False
        self._has_read_drawn, self._computes, self.values_decide = False, True, True
        return True

    def reset_peak(self) -> None:
        """Forgets the peak; open spans start again from their live bytes."""
        self._peak_bytes = 0
        for tracker in self._open:
            tracker.reset_peak()

    def peak_bytes(self) -> int:
        """Returns the largest live bytes of the measured spans since the last reset."""
        return max([self._peak_bytes, *(tracker.peak_bytes for tracker in self._open)])

    def free_bytes(self) -> int:
        """Returns the host memory that is available now."""
        return available_bytes()

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage: the CPU's allocator caches nothing."""
        _drop_failed_backward()
        if collect:
            gc.collect()


class AbsentGpuMeter(CpuMeter):
    """Stands for a GPU of another machine that a plan is made for: its sizes are the GPU's, but measured spans run on
    the CPU, and may use `host_bytes` of the host's memory.
    """

    is_host = False

    def __init__(self, target: UsableMemory) -> None:
        # A device without a generation that is no unknown NVIDIA GPU is simulated with the newest kernels.
        super().__init__(cuda=capability_of(target.generation if target.resident_threads else "blackwell"))
        self.target = target
        # A probe that would not fit on the GPU still gives its cost.
        self.host_bytes = self.capacity_bytes
        self.name = target.name
        self.key = target.key
        self.total_bytes = target.total_bytes
        self.capacity_bytes = target.capacity_bytes

    @contextmanager
    def host(self) -> Iterator[None]:
        """Leaves new tensors of the block out of measured spans: they would not be on the GPU."""
        with ExitStack() as stack:
            for tracker in self._open:
                stack.enter_context(tracker.host())
            yield

    def free_bytes(self) -> int:
        """Returns the capacity: the other machine's processes cannot be seen."""
        return self.capacity_bytes


class CudaMeter(Meter):
    """Reads PyTorch's caching allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.name = properties.name
        self.driver = nvidia_driver_version()
        _, self.total_bytes = torch.cuda.mem_get_info(device)
        obtainable = self._obtainable_bytes()
        # Torch 2.6 can set a fraction (`set_per_process_memory_fraction`) but cannot tell it.
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
        if (runs := packed_runs()) > 1:
            # Each run has a context of its own; no run may take the memory of another one.
            share = (self.total_bytes / runs - _CONTEXT_MOST_BYTES) / self.total_bytes
            fraction = min(fraction, max(share, 0.01))
            torch.cuda.set_per_process_memory_fraction(fraction, device)
        self.capacity_bytes = min(obtainable, int(fraction * self.total_bytes))
        self.foreign_bytes_at_start = max(0, self.total_bytes - obtainable - _CONTEXT_MOST_BYTES)
        self.key = gpu_key(properties.name, self.total_bytes)
        threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
        self.kernel_bytes = threads * SUM_BYTES_PER_THREAD
        self.notices = cudnn_notices()
        self.recordable = recordable(self.key, self.capacity_bytes)
        self._part_begun: torch.cuda.Event | None = None

    def begin_part(self) -> None:
        """Waits until the micro-batch before the last one is computed: the last one is, meanwhile."""
        if self._part_begun is not None:
            self._part_begun.synchronize()
        self._part_begun = torch.cuda.Event()
        self._part_begun.record(torch.cuda.current_stream(self.device))

    def reset_peak(self) -> None:
        """Resets the allocator's peak counters."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Returns the allocator's largest allocated bytes since the last reset."""
        return self._peak("allocated_bytes")

    def peak_reserved_bytes(self) -> int:
        """Returns the allocator's largest reserved bytes since the last reset."""
        return self._peak("reserved_bytes")

    def allocated_bytes(self) -> int:
        """Returns the allocator's allocated bytes."""
        return torch.cuda.memory_allocated(self.device)

    def seconds(self) -> float:
        """Waits for the kernels, which run on after their launch has returned, and reads the clock."""
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def utilisation(self) -> float | None:
        """Returns the share of the last second in which kernels ran, as the driver sampled it: other processes' kernels
        count, too. None without the package nvidia-ml-py, and where the driver does not tell, as for a MIG slice.
        """
        # NVML's errors are classes of that package.
        try:
            return torch.cuda.utilization(self.device) / 100
        except Exception:  # noqa: BLE001
            return None

    def moment(self) -> object:
        """Records an event in the stream of the kernels."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds_between(self, begun: Any, ended: Any) -> float:
        """Returns the seconds between two events; waits for the second one where it has not happened."""
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000

    def _all_retries(self) -> int:
        return int(self._counters().get("num_alloc_retries", 0))

    def available_bytes(self) -> int:
        """Returns reserved and free bytes together, at most the capacity."""
        return min(self.capacity_bytes, self._obtainable_bytes())

    def free_bytes(self) -> int:
        """Returns the driver's free bytes."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage, then empties the allocator's cache."""
        # Tensors in reference cycles are freed into the cache, so the cache is emptied last.
        if collect:
            gc.collect()
        torch.cuda.empty_cache()

    def _peak(self, counter: str) -> int:
        # Without any allocation there is no counter.
        return int(self._counters().get(counter, {}).get("all", {}).get("peak", 0))

    def _counters(self) -> dict[str, Any]:
        # They are read after every step, and `memory_stats` would flatten and sort all of them.
        counters: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.device)
        return counters

    def _obtainable_bytes(self) -> int:
        # This process's reserved bytes are not free to the driver, but the process can use them.
        return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)


def cudnn_notices() -> tuple[str, ...]:
    """Returns notices on cuDNN's settings for a prediction, as sentences without a full stop."""
    if not torch.backends.cudnn.benchmark:
        return ()
    return ("torch.backends.cudnn.benchmark is on: it tries algorithms whose workspaces no interval contains",)


def nvidia_driver_version() -> str:
    """Returns the version of the NVIDIA kernel driver; empty where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version.group() if version else ""


class SimulatedMeter(Meter):
    """Reads a simulated GPU, `gpu`. `contention` returns the bytes that other processes hold of it."""

    def __init__(
        self,
        total_bytes: int,
        settings: AllocatorSettings = PLAIN,
        contention: Callable[[], int] = no_contention,
        *,
        computes: bool = True,
    ) -> None:
        self.device = torch.device("cpu")
        self.name = "Simulated GPU"
        self.total_bytes = total_bytes
        self.gpu = SimulatedGpu(total_bytes, settings, contention=contention, computes=computes)
        if settings.ignored:
            self.notices = (f"The simulated GPU ignores these allocator settings: {', '.join(settings.ignored)}",)
        self.capacity_bytes = self.gpu.allocator.available_bytes
        self.foreign_bytes_at_start = total_bytes - self.capacity_bytes
        self.key = f"sim-{exact_size(total_bytes)}"
        self._is_active = False

    @contextmanager
    def active(self, resident: Iterable[Tensor] = ()) -> Iterator[None]:
        """Puts `resident`, and new tensors of the block, on the simulated GPU."""
        if self._is_active:
            yield
            return
        self.gpu.seed_resident(resident)
        self._is_active = True
        try:
            with self.gpu:
                yield
        finally:
            self._is_active = False

    def host(self) -> AbstractContextManager[None]:
        """Leaves new tensors of the block off the simulated GPU, then and later."""
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

    def _all_retries(self) -> int:
        return self.gpu.allocator.num_alloc_retries

    def available_bytes(self) -> int:
        """Returns reserved and free bytes together."""
        return self.gpu.allocator.available_bytes

    def free_bytes(self) -> int:
        """Returns the bytes that neither the allocator nor other processes hold."""
        return self.gpu.allocator.free_bytes

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage, then releases the allocator's cache."""
        with self.host():
            _drop_failed_backward()
        if collect:
            gc.collect()
        self.gpu.allocator.release_cached()


def _drop_failed_backward() -> None:
    """Makes the CPU's autograd engine let go of a backward pass that failed.

    The nodes that had not run yet wait in a queue of this thread, with everything that their forward pass has saved,
    until the next backward pass. Nodes on a GPU run in a thread of their own, which empties its queue.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()


def packed_runs() -> int:
    """Returns the number of runs that share the GPU of this process, which `cluster.pack` has put there; else 1."""
    return max(1, count_of(os.environ, PACKED, 1))


def open_meter(text: str) -> Meter:
    """Opens the meter of `auto`, `cpu`, `cuda[:i]` or `sim:<size>`; raises DeviceError where it cannot be used."""
    device = resolve_device(text)
    if is_simulated(text):
        return _open_simulated(text)
    if device.type == "cpu":
        return CpuMeter()
    # The user's settings, if any, hold; ours must be made before any allocation. The call changes this process only; a
    # variable would be inherited by every program that it starts. The first function is torch 2.9's, where the second
    # one warns that it is deprecated.
    if not any(name in os.environ for name in SETTINGS_VARIABLES):
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)(OWN_SETTINGS)
    return CudaMeter(device)


def _open_simulated(text: str) -> SimulatedMeter:
    capacity_bytes = parse_device(text)[1] // packed_runs()
    meter = SimulatedMeter(capacity_bytes, read_allocator_settings(), simulated_contention())
    if os.environ.get(RECORDED):
        meter.recordable = UsableMemory(key=meter.key, name=meter.name, total_bytes=meter.capacity_bytes,
                                        subtracted=(), source="simulated")  # fmt: skip
    return meter


def meter_of(meter: Meter | str | torch.device | None, device: str | torch.device) -> Meter:
    """Returns a given meter as it is; opens the meter of a given device, or else of `device`.

    Raises:
        ArgumentError: It is no meter and no device.
        DeviceError: The device cannot be used.
    """
    if isinstance(meter, Meter):
        return meter
    return open_meter(("" if meter is None else device_name(meter)) or device_name(device))


def device_name(device: object, examples: str = '"auto", "cpu", "cuda:0" or "sim:2GiB"') -> str:
    """Returns the name of a device, which a caller of the Python API gave by name or as a `torch.device`.
    `examples` of names are in the message.

    Raises:
        ArgumentError: It is neither.
    """
    if not isinstance(device, str | torch.device):
        raise ArgumentError("A device is its name, or a torch.device", value=shown(device),
                            remedy=f"Give {examples}")  # fmt: skip
    return str(device)


@contextmanager
def simulated_gpu(memory: str, *resident: Resident) -> Iterator[SimulatedMeter]:
    """Puts new tensors of the block on a simulated GPU, and raises `torch.OutOfMemoryError` where they do not fit.

    >>> model = nn.Linear(256, 1)
    >>> with simulated_gpu("64MiB", model) as gpu:
    ...     model(torch.ones(4096, 256)).mean().backward()
    >>> f"{gpu.peak_bytes() / 2**20:.1f} MiB"
    '4.0 MiB'

    Args:
        memory: Its capacity: `1GiB`, or `sim:1GiB` as in `--device`.
        resident: Models, optimizers and tensors that were made before and are on the GPU too. Everything stays on the
            CPU; only memory is counted as a GPU's.

    Yields:
        The meter: `peak_bytes()`, `peak_reserved_bytes()`, `capacity_bytes`; to be given to `MicroBatcher`.

    Raises:
        ArgumentError: The capacity is no text, or nothing that has tensors is resident.
        DeviceError: The capacity cannot be read.
    """
    for holder in resident:
        if not isinstance(holder, nn.Module | Optimizer | Iterable) or isinstance(holder, str | Mapping):
            raise ArgumentError("Models, optimizers and lists of tensors are on a simulated GPU", value=shown(holder),
                                remedy='Give the model: simulated_gpu("64MiB", model)')  # fmt: skip
    size = device_name(memory, '"64MiB" or "sim:64MiB"').removeprefix("sim:")
    meter = _open_simulated(f"sim:{size}")
    with meter.active(tensors_of(resident)):
        yield meter


def resolve_device(text: str, *, environment: Mapping[str, str] = os.environ) -> torch.device:
    """Returns the torch device of `auto`, `cpu`, `cuda[:i]` or `sim:<size>`; tensors of a simulated GPU are the
    CPU's.
    """
    kind, index = parse_device(text)
    if kind in ("cpu", "sim"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        rule, evidence = "torch sees no CUDA GPU", f"--device {text}"
        if kind == "auto":
            # A job that was given a GPU must not train on the CPU for a day before somebody notices.
            rule, evidence = "A GPU is here but torch cannot use it", _promised_gpu(environment)
        if not evidence:
            return torch.device("cpu")
        remedy = f"torch was built for CUDA {torch.version.cuda}: check the driver (nvidia-smi)"
        if torch.version.cuda is None:
            remedy = (
                "This torch was built without CUDA: install a CUDA build, or set CAN_TRAIN_PYTHON to an environment"
            )
            remedy += " that has one"
        raise DeviceError(rule, value=evidence, remedy=f"{remedy}; --device cpu trains without a GPU")
    if index >= torch.cuda.device_count():
        raise DeviceError("There is no such GPU", value=text, remedy=f"torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", index)


def is_simulated(text: str) -> bool:
    """Tells whether a device is a simulated GPU, `sim:<size>`; raises `DeviceError` where no device has the name."""
    return parse_device(text)[0] == "sim"


def _promised_gpu(environment: Mapping[str, str]) -> str:
    """Returns the evidence that this process was given a GPU, as text; empty where there is none."""
    for name, none in _ALLOCATED:
        if environment.get(name, "") not in none:
            return f"{name}={environment[name]}"
    # CUDA reads the list up to the first entry that names no GPU: "", "-1" and SLURM's "NoDevFiles" hide all of them.
    if not _NAMES_GPU.match(environment.get("CUDA_VISIBLE_DEVICES", "0")):
        return ""
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return f"the NVIDIA driver lists {count} GPU(s)" if count else ""


def simulated_contention(environment: Mapping[str, str] = os.environ) -> Callable[[], int]:
    """Returns a function that reads, at each call, the bytes of the simulated GPU that other processes hold.

    The variable is a size, or a file that holds a size, which may change while a run trains.
    """
    path = environment.get(FOREIGN)
    if not path:
        return no_contention
    if not Path(path).exists():
        with suppress(ConfigError):
            held_bytes = parse_size(path, or_zero=True)
            return lambda: held_bytes

    def contention() -> int:
        try:
            text = Path(path).read_text().strip()
        except FileNotFoundError:
            return 0
        try:
            return parse_size(text, or_zero=True) if text else 0
        except ConfigError as error:
            raise DeviceError(f"The file that ${FOREIGN} names does not hold a size", value=f"{path}: {text[:50]!r}",
                              remedy="Write a size into it, as 64MiB") from error  # fmt: skip

    return contention


def _settings_of_a_capacity() -> AllocatorSettings:
    # A capacity is already limited to the fraction of the device that the process may have.
    return replace(read_allocator_settings(), memory_fraction=1.0)


def simulate_peak(run: Callable[[], None], resident: Iterable[Tensor]) -> tuple[int, int]:
    """Runs a batch on a simulated GPU without a limit; returns allocated and reserved bytes at their peaks."""
    meter = SimulatedMeter(_UNLIMITED, _settings_of_a_capacity(), computes=False)
    with meter.measuring(resident):
        run()
    return meter.peak_bytes(), meter.peak_reserved_bytes()


def simulate_fit(run: Callable[[], None], resident: Iterable[Tensor], capacity_bytes: int) -> bool:
    """Tells whether a batch runs on a simulated GPU of a capacity."""
    with CatchOutOfMemory():
        meter = SimulatedMeter(capacity_bytes, _settings_of_a_capacity(), computes=False)
        with meter.measuring(resident):
            run()
            # The cache that the first run leaves may be in the way of the second run.
            run()
        return True
    return False


def is_on_meta(model: nn.Module) -> bool:
    """Tells whether a model has no values, so that it takes no memory, and nothing is computed with it."""
    return any(parameter.is_meta for parameter in model.parameters())


def tensors_of(resident: Iterable[Resident]) -> Iterator[Tensor]:
    """Yields the tensors of models, with their gradients, and of optimizers. A GPU's meter does not read them."""
    for holder in resident:
        if isinstance(holder, nn.Module):
            yield from map(shard_of, holder.parameters())
            yield from holder.buffers()
            yield from (shard_of(one.grad) for one in holder.parameters() if one.grad is not None)
        elif isinstance(holder, Optimizer):
            for state in holder.state.values():
                yield from (shard_of(value) for value in state.values() if isinstance(value, Tensor))
        else:
            yield from holder


def send(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies a tensor to a device, as `dtype`, None: as its own type. On a GPU the host does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_initialized():
        # From other memory than pinned memory, the host would wait for all that the GPU was given before. PyTorch keeps
        # the pinned memory until the copy is done, and uses it again.
        pinned = tensor.to(dtype or tensor.dtype).pin_memory()
        return (
            pinned.to(device, non_blocking=True) if pinned.nbytes < _LARGE_COPY_BYTES else _send_aside(pinned, device)
        )
    moved = tensor.to(device, dtype)
    if device.type == "cpu":
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, StorageTracker):
                moved = mode.arrive(moved)
    return moved


def _send_aside(pinned: Tensor, device: torch.device) -> Tensor:
    """Copies pinned memory to a GPU while the GPU computes what it was given before."""
    computing, copying = torch.cuda.current_stream(device), copy_stream(device)
    with torch.cuda.stream(copying):
        sent = pinned.to(device, non_blocking=True)
    # What is computed from now on waits for the copy, and the copy's memory is not used again before that is computed.
    computing.wait_stream(copying)
    sent.record_stream(computing)
    return sent


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of a GPU that copies run on, beside the computation."""
    return torch.cuda.Stream(device)


def send_positions(parts: Sequence[NDArray[np.int64]], device: torch.device) -> Sequence[Tensor]:
    """Copies arrays of positions to a device in one transfer, with 32 bits each where those suffice. The results are
    views of one tensor.
    """
    joined = np.concatenate(parts)
    fits = not len(joined) or joined.max() <= np.iinfo(np.int32).max
    sent = send(torch.from_numpy(joined.astype(np.int32) if fits else joined), device)
    return [*torch.split(sent, [*map(len, parts)])]
