"""Recorder of the allocations that PyTorch would make on a CUDA GPU, without the GPU.

PyTorch dispatches operations on fake CUDA tensors, which have shapes and no memory, as it does those on real ones: with
CUDA's autocast lists, its fused kernels and their byte masks, and the tensors that these keep for the backward pass. It
does so without a GPU once cuda_dispatch.cpp is loaded. That changes a process for good, so it happens in a child
process, which has the model from its parent by `fork` and ends with the recording.
"""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from itertools import accumulate, chain
from multiprocessing import get_context
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.attention import SDPBackend
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from can_train.memory import cuda_workspaces
from can_train.memory.allocation_trace import AllocationRecorder, AllocationTrace
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.compiled_graphs import GraphRunner, record_compiled
from can_train.memory.cuda_library import (
    MAX_QUOTED_CHARACTERS,
    NoCudaDispatchError,
    ValuesNeededError,
    compiled_library,
)
from can_train.memory.cuda_operators import AttentionCall, composed_attention, recurrent_kernels, register
from can_train.memory.cuda_workspaces import AMPERE, CUBLAS, CUDNN, TENSORS, Capability, is_on_gpu
from can_train.memory.host import die_with_parent
from can_train.memory.meters import Meter
from can_train.memory.out_of_memory import error_chain
from can_train.memory.simulated.allocator import CachingAllocator
from can_train.memory.simulated.gpu import storages_of
from can_train.memory.value_sizes import INDEXING, ValueSizes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from can_train.memory.simulated.allocator import Block

A100_THREADS: Final = 108 * 2048
# Errors of fake tensors whose values are read.
_VALUE_ERRORS: Final = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
_ENTRIES: Final = "can_train_entries"  # of a sparse tensor whose copy has none
FLEX_ATTENTION: Final = "flex_attention"
_TIMEOUT_S: Final = 600.0  # a step of the largest networks takes less than a minute
_UNLIMITED: Final = 2**50
_REPLAYED: Final = (TENSORS, CUDNN)
_SMALL_PAGE_BYTES: Final = 2**21
_HALVINGS: Final = 7  # of reserved − allocated bytes: the least capacity is then known to 1 % of them
Result = TypeVar("Result")


_aten: Final = torch.ops.aten
_PRODUCTS: Final = frozenset(
    getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot")
)
# Operations that take tensors of two devices as they are.
_ACROSS_DEVICES: Final = frozenset({_aten.copy_.default, _aten._to_copy.default, torch.ops.prim.device.default})
# Fused steps of optimizers that PyTorch does not run on fake tensors. They change weights and state in place.
_UPDATES: Final = frozenset(
    getattr(packet, overload)
    for packet in (getattr(_aten, f"_fused_{name}_") for name in ("sgd", "adam", "adamw", "adagrad"))
    for overload in packet.overloads()
    if not getattr(packet, overload).has_kernel_for_dispatch_key(DispatchKey.Meta)
)
# Operations with a kernel of CUDA's that a build without CUDA takes apart. No kernel is run on fake tensors, but where
# one is registered they stay whole.
_FUSED_ON_CUDA: Final = [
    getattr(_aten, name).default
    for name in ("silu_backward", "mish_backward", "_fused_rms_norm")
    if hasattr(_aten, name)
]


def record_on_cuda(  # noqa: PLR0913 - the GPU, and how it is stood in for
    model: nn.Module,
    run: Callable[[], object],
    *,
    generation: str,
    resident_threads: int = A100_THREADS,
    real_host: bool = False,
    fused: bool | None = None,
    sizes: ValueSizes | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> AllocationTrace:
    """Records the allocations of a program, of steps of training for example, on a CUDA GPU. `compute_on_cuda`
    describes arguments and errors.

    With `fused`, the graphs of modules that the program compiles are recorded, as far as they can be fused or without
    fusion; None: modules are computed as they are.
    """

    def record(gpu: RecordedGpu) -> AllocationTrace:
        if fused is None:
            run()
        else:
            gpu.run_compiled(run, fused=fused)
        return gpu.trace

    return compute_on_cuda(
        model,
        record,
        generation=generation,
        resident_threads=resident_threads,
        real_host=real_host,
        sizes=sizes,
        timeout_s=timeout_s,
    )


def compute_on_cuda(  # noqa: PLR0913 - the GPU, and how it is stood in for
    model: nn.Module,
    compute: Callable[[RecordedGpu], Result],
    *,
    generation: str,
    resident_threads: int = A100_THREADS,
    real_host: bool = True,
    sizes: ValueSizes | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> Result:
    """Returns the result of a function that runs a program on a CUDA GPU whose allocations are recorded.

    The model is on the GPU from the start, and so are its inputs. Other modules go there when they are called first,
    with their inputs, and other tensors when an operation first combines them with a tensor on the GPU. Integers have
    values on the GPU, too, and may decide shapes; floating-point numbers have none, apart from single numbers outside
    the GPU.

    Args:
        model: A model on any device, `meta` included; nothing of this process changes.
        compute: Runs in a child process, and returns a result that can be pickled.
        generation: The GPU's, as in the catalogue: kernels of attention and sizes of workspaces follow from it.
        resident_threads: Threads that the GPU runs at once, as in the catalogue: memory of sums follows from it.
        real_host: Whether floating-point numbers outside the GPU have values, and take memory. Otherwise only single
            ones have: a program may make batches that are larger than this machine's memory.
        sizes: Of results on the GPU that depend on values; None: a program that needs one cannot be recorded.
        timeout_s: Seconds after which the child process is given up.

    Raises:
        NoCudaDispatchError: No library can be compiled here, or the program cannot be recorded; ValuesNeededError where
            it needs the values of a tensor.
    """
    library = compiled_library()
    # Dispatch modes import it when they are first used, which takes a second: here once, and not in every child.
    import_module("torch._dynamo")
    # Fork is the only way to hand over any model and any closure. The child computes on one thread of its own and takes
    # no locks of others, as the workers of PyTorch's data loader do; Python 3.12 warns of it all the same.
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_answer, args=(theirs, library, model, compute, (generation, resident_threads, real_host, sizes))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    theirs.close()
    failure, result = "", None
    try:
        # A lock that another thread held when the process was copied is never released in the copy.
        if ours.poll(timeout_s):
            failure, result = ours.recv()
        else:
            failure = f"nothing was heard of it for {timeout_s:.0f} s"
    except EOFError:
        failure = "the process that records has died"
    finally:
        ours.close()
        child.kill()
        child.join()
    if failure:
        # PyTorch's error of `numpy()` is of no kind of its own.
        if result or ".numpy()" in failure:
            raise (ValuesNeededError if result else NoCudaDispatchError)(
                "The program cannot be recorded on tensors without values", value=failure,
                remedy="Let no shape and no branch of the model depend on a tensor's values",
            )  # fmt: skip
        raise NoCudaDispatchError("The program cannot be recorded as CUDA would run it", value=failure)
    return cast("Result", result)


def _answer(
    answers: Connection,
    library: Path,
    model: nn.Module,
    compute: Callable[[RecordedGpu], object],
    gpu: tuple[str, int, bool, ValueSizes | None],
) -> None:
    """Computes in this process, which must be a child, and sends an empty text and the result, or the error as text and
    whether it is for lack of a tensor's values.
    """
    warnings.simplefilter("ignore")
    die_with_parent()
    # Threads of the parent are not here, and a pool of threads would wait for them.
    torch.set_num_threads(1)
    try:
        ctypes.CDLL(str(library)).can_train_start_autograd()
        # The kernels of compiled modules would need a GPU.
        torch.compiler.set_stance("force_eager")
        recorder = _Recorder(model, *gpu)
        result = recorder.record(lambda: compute(RecordedGpu(recorder, torch.device("cuda"))))
        answers.send(("", result))
    except BaseException as error:  # noqa: BLE001 - it is the parent that says so
        # An error of a task's code has the reason as its cause.
        needs_values = any(isinstance(link, _VALUE_ERRORS) for link in error_chain(error, suppressed=True))
        answers.send((f"{type(error).__name__}: {error}"[:MAX_QUOTED_CHARACTERS].rstrip(" ."), needs_values))


class RecordedGpu(Meter):
    """Reads a GPU that is not there, in the process that records its allocations. Workspaces of cuBLAS are left out:
    they do not grow with a batch, and plans subtract them from the capacity.
    """

    def __init__(self, recorder: AllocationRecorder, device: torch.device) -> None:
        self.device = device
        self._recorder = recorder
        self._settings = replace(read_allocator_settings(), memory_fraction=1.0)
        self._allocator = CachingAllocator(_UNLIMITED, settings=self._settings)
        self._blocks: dict[int, Block] = {}
        self._num_replayed = 0

    @property
    def trace(self) -> AllocationTrace:
        """The allocations so far."""
        return self._recorder.trace

    def run_compiled(self, run: Callable[[], object], *, fused: bool) -> None:
        """Runs a program with the graphs that PyTorch's compiler makes, as `compiled_graphs` bounds them; raises
        RuntimeError where it makes none.
        """
        assert isinstance(self._recorder, _Recorder), "only a GPU's graphs are recorded"
        num_graphs = record_compiled(
            partial(
                GraphRunner,
                fused=fused,
                unseen=self._recorder.unseen,
                count=self._recorder.seed_resident,
                label=self._recorder.in_graph,
            )
        )
        run()
        if not num_graphs():
            raise RuntimeError("the compiler made no graph of the model")

    @property
    def depends_on_generation(self) -> bool:
        """Whether the program's tensors so far may differ from one generation of GPUs to another."""
        return not isinstance(self._recorder, _Recorder) or self._recorder.asked_capability

    def host(self) -> AbstractContextManager[None]:
        """Leaves new tensors of the block off a simulated GPU, whose tensors are the CPU's."""
        return self._recorder.host() if self.device.type == "cpu" else nullcontext()

    @contextmanager
    def measuring(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """Puts `resident` on the GPU."""
        self._recorder.put_on_gpu(resident)
        yield

    def reset_peak(self) -> None:
        """Starts the peaks again from the live bytes."""
        self._replayed().reset_peaks()

    def peak_bytes(self) -> int:
        """Returns the largest allocated bytes since the last reset."""
        return self._replayed().peak_allocated_bytes

    def peak_reserved_bytes(self) -> int:
        """Returns the largest reserved bytes since the last reset."""
        return self._replayed().peak_reserved_bytes

    def free_bytes(self) -> int:
        """Returns the memory of a GPU without a limit."""
        return _UNLIMITED

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage, and releases the allocator's cache."""
        if collect:
            gc.collect()
        self._recorder.release_cached()

    def room_share(self, run: Callable[[], object]) -> float:
        """Runs a program twice; returns its peak of allocated bytes ÷ the least capacity that it fits into, apart from
        pages that are used in part: they matter the less, the larger a GPU.
        """
        self._replayed()
        sizes = {number: size for number, size in self._recorder.events if size}
        resident = [(number, sizes[number]) for number in self._blocks]
        start = len(self._recorder.events)
        for _ in range(2):
            run()
        self._recorder.free_dead()
        trace = AllocationTrace(
            events=[*resident, *self._recorder.events[start:]], workspaces=self._recorder.workspaces
        )
        settings = replace(self._settings, large_page_bytes=_SMALL_PAGE_BYTES)
        unlimited = CachingAllocator(_UNLIMITED, settings=settings)
        trace.replay(unlimited, _REPLAYED)
        fails, fits = unlimited.peak_allocated_bytes, unlimited.peak_reserved_bytes
        for _ in range(_HALVINGS):
            middle = (fails + fits) // 2
            has_room = trace.replay(CachingAllocator(middle, settings=settings), _REPLAYED)
            fails, fits = (fails, middle) if has_room else (middle, fits)
        return unlimited.peak_allocated_bytes / max(fits, 1)

    def _replayed(self) -> CachingAllocator:
        """Returns the allocator after all allocations so far."""
        self._recorder.free_dead()
        events = self._recorder.events
        recent = AllocationTrace(events=events[self._num_replayed :], workspaces=self._recorder.workspaces)
        recent.replay(self._allocator, _REPLAYED, self._blocks)
        self._num_replayed = len(events)
        return self._allocator


def compute_on_simulated(model: nn.Module, compute: Callable[[RecordedGpu], Result]) -> Result:
    """Returns the result of a function that runs a program whose allocations are recorded as the simulated GPU counts
    them, on the CPU. Large products are drawn at random.
    """
    recorder = AllocationRecorder(model, cuda=AMPERE, computes=False)
    recorder.seed_resident([*model.parameters(), *model.buffers()])
    with recorder:
        return compute(RecordedGpu(recorder, torch.device("cpu")))


class _FakeGpu(fake_tensor.FakeTensorMode):
    """Fake tensors of a GPU that is not there, although `torch.cuda.is_available()` says that it is: `torch.tensor`
    makes its tensor on the host then, and copies it by an operation that is dispatched.
    """

    avoid_device_init = True


class _Recorder(AllocationRecorder):
    """Records the allocations on a fake GPU, which it puts a model on."""

    def __init__(
        self, model: nn.Module, generation: str, resident_threads: int, real_host: bool, sizes: ValueSizes | None
    ) -> None:
        super().__init__(model, cuda=None)
        self._capability = cuda_workspaces.capability_of(generation)
        self._resident_threads = resident_threads
        self._real_host = real_host
        self._sizes = sizes
        # Kernels that PyTorch runs on a GPU in place of composite operations.
        self.asked_capability = False  # whether the program's operations so far depend on the GPU's generation
        attention = {
            _aten.scaled_dot_product_attention.default: lambda *args, **kwargs: _attention(
                self._capability_asked(), *args, **kwargs
            )
        }
        self._kernels = attention | recurrent_kernels(has_values=False)
        self._span = ""  # library whose memory is made now; empty: tensors
        self._fake = _FakeGpu(allow_non_fake_inputs=True)
        self._on_gpu = WeakIdKeyDictionary()  # tensors outside the GPU to their copies there
        self._values = WeakIdKeyDictionary()  # integers on the GPU, to tensors of the host
        self._has_cublas: set[bool] = set()  # threads with a workspace: the backward pass's (True), the forward's
        self._model = model
        self._known: set[nn.Module] = set()  # modules on the GPU
        # Nodes of a backward pass run in two threads, where some tensors are outside the GPU; all threads share the
        # state of fake tensors.
        self._one_by_one = RLock()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler traces without this mode, and its graphs run in it. They run only where they are recorded."""
        return True

    def _capability_asked(self) -> Capability:
        self.asked_capability = True
        return self._capability

    def holds(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is on the GPU."""
        return tensor.is_cuda

    def unseen(self, compute: Callable[[], Result]) -> Result:
        """Returns the result of operations on the GPU whose allocations are not recorded."""
        with _disable_current_modes(), self._fake:
            return compute()

    def record(self, compute: Callable[[], Result]) -> Result:
        """Puts the model on the GPU, and records the allocations of a program; returns its result. The process must end
        afterwards.
        """

        def never_run(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("a kernel was run on a fake tensor")

        # A library's kernels go with it.
        self._libraries = [
            register("CUDA", dict.fromkeys(_FUSED_ON_CUDA, never_run)), register("AutogradCUDA", self._kernels)
        ]  # fmt: skip
        _pretend_cuda(self._capability_asked)
        torch.cuda.empty_cache = self.release_cached
        with self._fake:
            self._move_tensors(self._model)
        self._model.register_forward_pre_hook(_with_inputs_on_gpu, with_kwargs=True)
        _record_flex_attention()
        self._known = set(self._model.modules())
        register_module_forward_pre_hook(self._take_in)
        self.seed_resident([*self._model.parameters(), *self._model.buffers()])
        with self._fake, self, self.following():
            return compute()

    @contextmanager
    def library(self, name: str) -> Iterator[None]:
        """Opens a span whose new tensors are a library's memory."""
        before, self._span = self._span, name
        try:
            yield
        finally:
            self._span = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation on real numbers, or on fake tensors and then records its allocations."""
        with self._one_by_one:
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        if self._is_real(func, tensors, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _UPDATES:
            return None
        # Some are composed of other operations, which are dispatched in their place.
        parts: Callable[..., Any] | None = None
        if _is_composite(func):
            parts = self._kernels.get(func, func.decompose)
        elif func in _TAKEN_APART:
            parts = _TAKEN_APART[func]
        elif (parts := _FROM_VALUES.get(func)) is not None:
            args = tree_map_only(Tensor, lambda tensor: self._values.get(tensor, tensor), args)
        if parts is not None:
            with self._fake, self:
                return parts(*args, **kwargs)
        values = self._compute(func, args, kwargs, tensors)
        if values is not None and func is _aten._to_copy.default and _device_type(kwargs) == "cpu":
            return values
        if func in INDEXING:
            args = (args[0], self._positions(args[1]), *args[2:])
        if func not in _ACROSS_DEVICES and any(is_on_gpu(tensor) for tensor in tensors):
            self._check_trained(tensors)
            args, kwargs = tree_map_only(Tensor, self.move, (args, kwargs))
        args, kwargs = tree_map_only(
            Tensor,
            lambda tensor: tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor),
            (args, kwargs),
        )
        try:
            result = self._run_counted(func, args, kwargs)
        except _VALUE_ERRORS:
            if values is None:
                return self._from_sizes(func, tensors)
            result = tree_map_only(Tensor, self._copy_to_gpu, values)
        if values is not None:
            for made, value in zip(tree_iter(result), tree_iter(values), strict=True):
                if is_on_gpu(made) and not value.is_floating_point():
                    self._values[made] = value
        elif func._schema.is_mutable:
            self._forget_values(args[:1])
        if func is _aten.clone.default and result.layout is torch.sparse_coo:
            self._keep_entries(args[0], result)
        self._take_workspaces(func, args, result)
        return result

    def _check_trained(self, tensors: Sequence[Tensor]) -> None:
        """Raises RuntimeError for a trained parameter outside the GPU, which autograd has noted: it cannot move now."""
        for tensor in tensors if torch.is_grad_enabled() else ():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and not is_on_gpu(tensor):
                shape = "x".join(map(str, tensor.shape))
                raise RuntimeError(f"the loss trains a parameter of shape {shape} that is in no module")

    def _is_real(self, func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tells whether an operation runs for real: on numbers of the host that have values, or to make them."""
        # In inference mode `tensor.to(device)` comes whole, with the device among its arguments.
        named = next((value for value in args if isinstance(value, torch.device)), torch.device("cpu"))
        if named.type != "cpu" or _device_type(kwargs) not in ("cpu", None):
            return False
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return False
        if self._real_host:
            return True
        if tensors:
            return not any(tensor.is_floating_point() and tensor.dim() for tensor in tensors)
        makes_scalar = bool(args) and isinstance(args[0], list | tuple) and not args[0]
        return makes_scalar or _makes_integers(func, args, kwargs)

    def _compute(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> Any | None:
        """Computes an operation on integers, whose results may decide shapes; None where a value is missing."""
        if not (all(self._has_value(tensor) for tensor in tensors) if tensors else _makes_integers(func, args, kwargs)):
            return None
        args, kwargs = tree_map_only(Tensor, lambda tensor: self._values.get(tensor, tensor), (args, kwargs))
        on_host = {"device": torch.device("cpu")} if "device" in kwargs else {}
        with unset_fake_temporarily():
            return func(*args, **{**kwargs, **on_host})

    def _from_sizes(self, func: Any, tensors: Sequence[Tensor]) -> Any:
        """Returns the result of an operation, in an `except` clause, that depends on values: as the sizes have it, or 1
        for a number that an optimizer reads.
        """
        if func is _aten._local_scalar_dense.default and (optimizer := self._labels.optimizer):
            self._assuming.add(optimizer)
            dtype = tensors[0].dtype
            # A norm or a rate decides the values of weights, and hardly ever memory.
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        use = None if self._sizes is None or not tensors else self._sizes.use(func, tensors[0])
        if use is None:
            raise  # noqa: PLE0704 - the error that is handled
        if not use.shapes:
            return use.value
        with self._fake, self, self.kernel(func._schema.name.removeprefix("aten::")):
            made = [torch.empty(shape, dtype=dtype, device="cuda")
                    for shape, dtype in zip(use.shapes, use.dtypes, strict=True)]  # fmt: skip
        # Whole numbers that nothing has computed are no values.
        self._forget_values(made)
        return made[0] if len(made) == 1 else tuple(made)

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replaces masks that have values by the positions that they choose, as the kernels of indexing do first."""
        positions: list[Tensor | None] = []
        for index in indices:
            is_mask = index is not None and index.dtype is torch.bool
            if index is None or not is_mask or not (self._has_value(index) or self._sizes):
                positions.append(index)
                continue
            with self._fake, self:
                positions += self.move(index).nonzero().unbind(1)
        return positions

    def _has_value(self, tensor: Tensor) -> bool:
        return tensor in self._values or not (isinstance(tensor, FakeTensor) or tensor.is_floating_point())

    def _forget_values(self, tensors: Any) -> None:
        """Forgets the values of tensors that were written to, and of all tensors that share their memory."""
        for changed in tree_iter(tensors):
            if is_on_gpu(changed) and not changed.is_floating_point():
                shared = changed.untyped_storage()._cdata
                for tensor in [tensor for tensor in self._values if tensor.untyped_storage()._cdata == shared]:
                    del self._values[tensor]

    def _keep_entries(self, sparse: Tensor, copy: Tensor) -> None:
        """Keeps the entries of a sparse tensor for as long as its copy lives: the copy that fake tensors make is empty,
        and so is every update by it. A gradient that a backward pass hands to a parameter is moved, not copied.
        """
        entries = getattr(sparse, _ENTRIES, None) or (sparse._indices(), sparse._values())
        if torch._C._current_graph_task_id() == -1:
            with self._fake, self:
                entries = tuple(each.clone() for each in entries)
        setattr(copy, _ENTRIES, entries)

    def _storages(self, tensor: Tensor) -> tuple[UntypedStorage, ...]:
        if not is_on_gpu(tensor):
            return ()
        return tuple(chain.from_iterable(map(storages_of, getattr(tensor, _ENTRIES, None) or (tensor,))))

    def _allocate(self, size: int) -> int:
        number = super()._allocate(size)
        if self._span:
            self.workspaces[number] = self._span
        return number

    def attend(self, attend: Callable[..., Result], *args: Any) -> Result:
        """Returns the result of a kernel of flex attention."""
        with self._fake, self, self.kernel(FLEX_ATTENTION):
            return attend(*args)

    def put_on_gpu(self, tensors: Iterable[Tensor]) -> None:
        """Copies tensors to the GPU that are not there yet."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                self.move(tensor)

    def move(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's copy on the GPU, one for as long as the tensor lives; single values stay on the host."""
        if is_on_gpu(tensor) or (tensor.dim() == 0 and tensor not in self._on_gpu):
            return tensor
        if tensor not in self._on_gpu:
            self._on_gpu[tensor] = self._copy_to_gpu(tensor)
        moved: Tensor = self._on_gpu[tensor]
        return moved

    def _copy_to_gpu(self, tensor: Tensor) -> Tensor:
        with self._fake, self:
            return tensor.detach().to("cuda")

    def _take_in(self, module: nn.Module, args: Any) -> Any:
        """Puts a module beside the model, a teacher for example, on the GPU before it is called, as the program's owner
        does. Where numbers of the host have values, a module without an input on the GPU computes there: it prepares
        data.
        """
        if torch.compiler.is_compiling() or module in self._known:
            return None
        if self._real_host and not any(is_on_gpu(given) for given in tree_iter(args)):
            return None
        self._known.update(module.modules())
        # A compiled module wraps the model.
        if all(map(is_on_gpu, chain(module.parameters(), module.buffers()))):
            return None
        with self._fake:
            self._move_tensors(module)
        self.add_weights(module)
        module.register_forward_pre_hook(_with_inputs_on_gpu, with_kwargs=True, prepend=True)
        return _with_inputs_on_gpu(module, args, {})[0]

    def _move_tensors(self, model: nn.Module) -> None:
        """Makes fake tensors on the GPU of parameters and buffers, which stay the same objects: hooks and optimizers
        refer to them.
        """
        for module in model.modules():
            for tensor in chain(module._parameters.values(), module._buffers.values()):
                if tensor is None or is_on_gpu(tensor):
                    continue
                made = self._on_gpu.pop(tensor, None)
                if made is None:
                    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, tensor.requires_grad)
                has_values = not (tensor.is_floating_point() or tensor.is_meta)
                _swap(tensor, made)
                if has_values:
                    self._values[tensor] = made

    def _take_workspaces(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Records the memory that CUDA's libraries take for an operation in addition to its results."""
        if func in _PRODUCTS and is_on_gpu(result):
            # Nodes of a backward pass run in a thread of their own, whose handle has a workspace of its own.
            is_backward = torch._C._current_graph_task_id() != -1
            if is_backward not in self._has_cublas:
                self._has_cublas.add(is_backward)
                self.workspaces[self._allocate(cuda_workspaces.cublas_bytes(self._capability))] = CUBLAS
        of_kernels = cuda_workspaces.kernel_bytes(func, args, result, resident_threads=self._resident_threads)
        for name, sizes in (("", of_kernels), (CUDNN, cuda_workspaces.cudnn_bytes(func, args, result))):
            with self.library(name):
                for size in filter(None, sizes):
                    self._free(self._allocate(size))


def _with_inputs_on_gpu(module: nn.Module, args: Any, kwargs: Any) -> Any:
    # Autograd must see the move: inputs may need gradients. The sizes in a packed sequence stay on the host.
    def move(given: Any) -> Any:
        return given if isinstance(given, Tensor) and is_on_gpu(given) else given.to("cuda")

    return tree_map_only(
        (Tensor, PackedSequence), move, (args, kwargs), is_leaf=lambda given: isinstance(given, PackedSequence)
    )


def _swap(tensor: Tensor, other: Tensor) -> None:
    """Swaps the contents of two tensors, apart from hooks and attributes, which the first one keeps.

    Source: torch/utils/__init__.py, `swap_tensors`, which refuses tensors with hooks or weak references.
    """
    hooks, later_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    vars(tensor).update({**vars(other), **vars(tensor)})
    torch._C._swap_tensor_impl(tensor, other)
    # Hooks are registered with the content.
    if hooks:
        tensor._backward_hooks = hooks
    if later_hooks:
        tensor._post_accumulate_grad_hooks = later_hooks


def _selected(inputs: Tensor, mask: Tensor) -> Tensor:
    inputs, mask = torch.broadcast_tensors(inputs, mask)
    return inputs[mask]


def _record_flex_attention() -> None:
    """Records flex attention as the kernels that `torch.compile` makes of it: they keep no scores."""

    def record(attend: Callable[..., Any], recorder: _Recorder, *args: Any) -> Any:
        return recorder.attend(attend, *args)

    # PyTorch has them from 2.8 on.
    fakes = getattr(import_module("torch._higher_order_ops.utils"), "registered_hop_fake_fns", {})
    operators: tuple[Any, ...] = (flex_attention, flex_attention_backward)
    for operator in operators:
        if operator in fakes:
            operator.py_impl(_Recorder)(partial(record, fakes[operator]))


# Operations with a replacement; compiled graphs copy to a device by one of their own.
_TAKEN_APART: Final[Mapping[Any, Callable[..., Any]]] = {
    _aten.masked_select.default: _selected,
    torch.ops.prims.device_put.default: lambda given, device, *_options: given.to(device),
}


def _packed(inputs: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Returns the steps of sequences one after the other, and the number of sequences that have each step, on the host.

    Source: aten/src/ATen/native/PackedSequence.cpp, `_pack_padded_sequence`.
    """
    inputs = inputs.transpose(0, 1) if batch_first else inputs
    with unset_fake_temporarily():
        batch_sizes = (lengths.cpu().unsqueeze(1) > torch.arange(int(lengths[0]))).sum(0)
        sizes, counts = (part.tolist() for part in torch.unique_consecutive(batch_sizes, return_counts=True))
    ends = list(accumulate(counts))
    steps = [
        inputs[end - count : end, :size].contiguous().flatten(0, 1)
        for size, count, end in zip(sizes, counts, ends, strict=True)
    ]
    return torch.cat(steps), batch_sizes


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *_options: object
) -> tuple[Tensor, Tensor]:
    """Returns CTC losses of [T, N, C] logarithms, and the tensor that is saved for the backward pass.

    Source: aten/src/ATen/native/cuda/LossCTC.cu, `ctc_loss_gpu_template`.
    """
    steps, batch, _ = log_probs.shape
    with unset_fake_temporarily():
        width = 2 * int(target_lengths.max()) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, width)


def _ctc_loss_backward(gradient: Tensor, log_probs: Tensor, *options: Any) -> Tensor:
    """Returns the gradient of the logarithms; the kernel takes another tensor as large as the saved one for it."""
    saved = options[4]  # after the targets, the two kinds of lengths and the losses
    beta = torch.empty_like(saved)
    result = torch.empty_like(log_probs)
    del beta
    return result


# Operations that read integers on the host, and their replacements.
_FROM_VALUES: Final[Mapping[Any, Callable[..., Any]]] = {
    _aten._pack_padded_sequence.default: _packed,
    # cuDNN's takes targets of 32 bits on the host alone, and MIOpen is AMD's.
    **{
        getattr(_aten, name).Tensor: lambda *args: False
        for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
        if hasattr(_aten, name)
    },
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}


def _device_type(kwargs: Mapping[str, Any]) -> str | None:
    """Returns the type of the device that an operation is given; None where it is given none."""
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def _attention(capability: Capability, *args: Any, **kwargs: Any) -> Tensor:
    """Runs the kernel of attention that CUDA would choose; a build without CUDA has only the composite operation."""
    call = AttentionCall(*args, **kwargs)
    backend = call.backend(capability)
    attended: Tensor
    if backend is SDPBackend.FLASH_ATTENTION:
        attended = _aten._scaled_dot_product_flash_attention(
            *call.padded(), call.dropout_p, call.is_causal, False, scale=call.factor
        )[0]
        return attended[..., : call.query.size(-1)]
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        inputs = (call.query, call.key, call.value)
        needs_sums = any(tensor.requires_grad for tensor in inputs)
        attended = _aten._scaled_dot_product_efficient_attention(
            *inputs, call.bias(), needs_sums, call.dropout_p, call.is_causal, scale=call.scale
        )[0]
        return attended
    # With another kernel to choose from, a build with CUDA would ask the driver for the card.
    return composed_attention(*args, **kwargs)


@cache
def _is_composite(func: OpOverload) -> bool:
    """Tells whether an operation is always composed of other operations on CUDA. Below autograd, and in inference mode,
    it comes whole.
    """
    has_kernel = func.has_kernel_for_dispatch_key
    is_composed = func.namespace == "aten" and has_kernel(DispatchKey.CompositeImplicitAutograd)
    return is_composed and not has_kernel(DispatchKey.CUDA)


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tells whether an operation without tensors makes integers."""
    if (dtype := kwargs.get("dtype")) is not None:
        return not dtype.is_floating_point
    if func is _aten.full.default:
        return isinstance(args[1], int)
    return func._schema.name in ("aten::randint", "aten::randperm") or all(isinstance(value, int) for value in args)


def _pretend_cuda(capability: Callable[[], Capability]) -> None:
    """Lets this process, which must be a child, believe that there is one GPU: models and autocast ask for it, and for
    its capability.
    """
    # A build with CUDA would look for its driver.
    torch.cuda._lazy_init = lambda: None
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda new_state, device=None: None
    torch.cuda.get_device_capability = lambda device=None: capability()
    torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation or capability() >= (8, 0)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
