"""The catalogue of NVIDIA GPUs: names, memory sizes, and how much of each a training can use."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from can_train.errors import ConfigError, StateError, unknown_name
from can_train.io.records import SCHEMA, Count, parse_document, read_bytes, write_json_atomic
from can_train.reporter import Reporter

MIB: Final = 2**20
UNKNOWN: Final = "unknown"  # generation of a GPU that is not in the catalogue


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str  # common name
    nominal_gb: int  # the gigabytes on the box
    total_bytes: int  # the least that a driver was seen to show of it
    generation: str  # its architecture, which its overheads follow
    resident_threads: int  # that run at once: multiprocessors, and the threads of each, as NVIDIA's data sheets say
    spellings: tuple[str, ...] = ()  # names without a size that mean it, in letters and digits alone
    desktop: bool = False  # whether it is sold to have a screen attached
    also_gb: tuple[int, ...] = ()  # other sizes in its names, of memory that is not the GPU's

    @property
    def key(self) -> str:
        """Its name in plans and in the factor store, `a100-80gb`."""
        return f"{self.name.lower().replace(' ', '-')}-{self.nominal_gb}gb"


# Source of the sizes: the least that PyTorch's out-of-memory messages ("has a total capacity of …") and the start lines
# of training programs ("CUDA:0 (Tesla T4, 14912MiB)") show in public logs and issues, rounded down; newer drivers keep
# more for themselves than older ones. Cards with error correction have it on, as they are delivered. No log
# shows the A16 and the Quadros: their sizes are nvidia-smi's, or fifteen sixteenths of the size on the box, less the
# memory that the driver keeps of similar cards.
CARDS: Final = (
    Card("P100", 16, 16_280 * MIB, "pascal", 56 * 2048, ("p100",)),
    Card("V100", 16, 16_128 * MIB, "volta", 80 * 2048, ("v100",)),
    Card("V100", 32, 32_490 * MIB, "volta", 80 * 2048, ("v100", "v100s")),
    Card("T4", 16, 14_905 * MIB, "turing", 40 * 1024, ("t4",)),
    Card("A10", 24, 22_485 * MIB, "ampere", 72 * 1536, ("a10",)),
    Card("A10G", 24, 22_485 * MIB, "ampere", 80 * 1536, ("a10g",)),
    Card("A16", 16, 14_880 * MIB, "ampere", 10 * 1536, ("a16",)),
    Card("A30", 24, 24_060 * MIB, "ampere", 56 * 2048, ("a30",)),
    Card("A40", 48, 45_400 * MIB, "ampere", 84 * 1536, ("a40",)),
    Card("A100", 40, 40_320 * MIB, "ampere", 108 * 2048, ("a100",)),
    Card("A100", 80, 81_000 * MIB, "ampere", 108 * 2048, ("a100",)),
    Card("L4", 24, 22_555 * MIB, "ada", 58 * 1536, ("l4",)),
    Card("L40", 48, 45_370 * MIB, "ada", 142 * 1536, ("l40",)),
    Card("L40S", 48, 45_370 * MIB, "ada", 142 * 1536, ("l40s",)),
    Card("H100", 80, 80_990 * MIB, "hopper", 132 * 2048, ("h100",)),
    Card("H100", 94, 95_230 * MIB, "hopper", 132 * 2048, ("h100nvl",)),
    Card("H200", 141, 143_070 * MIB, "hopper", 132 * 2048, ("h200", "h200nvl")),
    # The size in its name is the processor's memory.
    Card("GH200", 96, 96_760 * MIB, "hopper", 132 * 2048, ("gh200",), also_gb=(120, 480)),
    Card("B200", 180, 182_630 * MIB, "blackwell", 148 * 2048, ("b200",)),
    Card("Quadro RTX 6000", 24, 22_500 * MIB, "turing", 72 * 1024, ("quadrortx6000", "rtx6000"), desktop=True),
    Card("Quadro RTX 8000", 48, 45_400 * MIB, "turing", 72 * 1024, ("quadrortx8000", "rtx8000"), desktop=True),
    Card("RTX A4000", 16, 15_970 * MIB, "ampere", 48 * 1536, ("rtxa4000", "a4000"), desktop=True),
    Card("RTX A5000", 24, 24_110 * MIB, "ampere", 64 * 1536, ("rtxa5000", "a5000"), desktop=True),
    Card("RTX A6000", 48, 48_400 * MIB, "ampere", 84 * 1536, ("rtxa6000", "a6000"), desktop=True),
    Card("RTX 6000 Ada", 48, 48_400 * MIB, "ada", 142 * 1536, ("rtx6000ada", "6000ada", "rtx6000"), desktop=True),
    Card("GTX 1080 Ti", 11, 11_165 * MIB, "pascal", 28 * 2048, ("gtx1080ti", "1080ti"), desktop=True),
    Card("RTX 2080 Ti", 11, 10_810 * MIB, "turing", 68 * 1024, ("rtx2080ti", "2080ti"), desktop=True),
    Card("RTX 3060", 12, 11_890 * MIB, "ampere", 28 * 1536, ("rtx3060", "3060"), desktop=True),
    Card("RTX 3070", 8, 7_780 * MIB, "ampere", 46 * 1536, ("rtx3070", "3070"), desktop=True),
    Card("RTX 3080", 10, 9_850 * MIB, "ampere", 68 * 1536, ("rtx3080", "3080"), desktop=True),
    Card("RTX 3080", 12, 11_760 * MIB, "ampere", 70 * 1536, ("rtx3080", "3080"), desktop=True),
    Card("RTX 3090", 24, 24_110 * MIB, "ampere", 82 * 1536, ("rtx3090", "3090"), desktop=True),
    Card("RTX 4070", 12, 11_760 * MIB, "ada", 46 * 1536, ("rtx4070", "4070"), desktop=True),
    Card("RTX 4070 Ti", 12, 11_760 * MIB, "ada", 60 * 1536, ("rtx4070ti", "4070ti"), desktop=True),
    Card("RTX 4080", 16, 15_940 * MIB, "ada", 76 * 1536, ("rtx4080", "4080"), desktop=True),
    Card("RTX 4090", 24, 24_070 * MIB, "ada", 128 * 1536, ("rtx4090", "4090"), desktop=True),
    Card("RTX 5080", 16, 15_830 * MIB, "blackwell", 84 * 1536, ("rtx5080", "5080"), desktop=True),
    Card("RTX 5090", 32, 32_080 * MIB, "blackwell", 170 * 1536, ("rtx5090", "5090"), desktop=True),
)


@dataclass(frozen=True, kw_only=True)
class GpuConstants:
    """One measurement of one kind of GPU."""

    key: str
    total_bytes: Count  # that the driver shows
    outside_bytes: Count  # in use outside the allocator once all libraries are: context, their kernels, driver
    workspace_bytes: Count  # that the libraries keep inside the allocator
    date: str  # 2026-01-31
    driver: str  # version; empty where it is not known
    torch: str  # version

    @property
    def source(self) -> str:
        """Where the figures come from, as a sentence has it."""
        return f"measured on {self.date} with driver {self.driver or 'unknown'}, torch {self.torch}"


# Measurements that come with can-train, by key. There is none yet: every plan for a card that nobody has measured on
# the same cluster uses assumed figures, and says so.
MEASURED: Final[Mapping[str, GpuConstants]] = {}
GIB: Final = 2**30
ASSUMED: Final = "assumed, on the safe side"  # source of figures that nobody has measured


# Overheads of each generation of GPUs: bytes outside the allocator (the CUDA context and the kernels that PyTorch and
# its libraries load), and bytes inside it (workspaces of cuBLAS and cuBLASLt, in the forward and the backward thread).
# Sources: PyTorch's issues report 270 to 430 MiB for the context since CUDA 11.7 loads kernels when they are first
# used. Each library adds its own, so that is rounded up by half and more: an H100 and an H200 showed 527 MiB for the
# context, and 695 with all libraries (scripts/bench/gpu-check-*.md). PyTorch's source (CublasHandlePool.cpp) gives
# cuBLAS 8.1 MiB for each thread, and 32 MiB from Hopper on, and cuBLASLt up to 32 MiB.
_OVERHEADS: Final = {
    **dict.fromkeys(("pascal", "volta", "turing"), (512 * MIB, 32 * MIB)),
    **dict.fromkeys(("ampere", "ada"), (640 * MIB, 32 * MIB)),
    "hopper": (768 * MIB, 128 * MIB),
    **dict.fromkeys(("blackwell", UNKNOWN), (1024 * MIB, 128 * MIB)),
}

# Libraries whose kernels a training loads into the context.
CUBLAS_KERNELS: Final = "cuBLAS"
CUDNN_KERNELS: Final = "cuBLAS and cuDNN"
ALL_KERNELS: Final = "cuBLAS, cuDNN and its batch norm"

# Bounds of the context's size. Least: the smallest report above. Most, by the libraries loaded: sizes that GPUMemNet's
# MLPs, CNNs and CNNs with batch norm show on an A100, where all kernels of a library were loaded at once.
_CONTEXT_LEAST_BYTES: Final = 270 * MIB
_CONTEXT_MOST_BYTES: Final = {CUBLAS_KERNELS: 1429 * MIB, CUDNN_KERNELS: 1679 * MIB, ALL_KERNELS: 1721 * MIB}

# In torch 2.11 the two libraries were seen to use one workspace together. Earlier versions are taken to have one for
# each.
_SHARED_SINCE: Final = (2, 11)
_SHARED_WORKSPACE_BYTES: Final = 64 * MIB  # the most of both threads together

# Memory of a card that draws a desktop: 459 and 507 MiB of two RTX 4090 without a job, in a public report.
_SCREEN_BYTES: Final = 512 * MIB

# Share of a capacity that the allocator cannot hand out: gaps between blocks in use, and a last page that must fit
# whole. It is not subtracted from the capacity, since peaks are shares of the capacity, but from predicted room. With
# expanding segments, which can-train turns on, the finder left 3.4 % (GAT) and 5.2 % (VGAE) of a simulated GPU of 1
# GiB; gaps grow little with the batch, so larger GPUs lose a smaller share (and one of 0.5 GiB up to 12 %).
FRAGMENTATION: Final = 0.05
_MOST_THREADS: Final = max(card.resident_threads for card in CARDS)


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a device that a training's tensors cannot have."""

    what: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class UsableMemory:
    """Memory of a device that a training can use."""

    key: str  # kind of device
    name: str
    total_bytes: int  # that its driver shows
    subtracted: tuple[MemoryUse, ...]  # in this order
    source: str  # where the figures come from: `ASSUMED`, or "measured on …"
    generation: str = UNKNOWN  # its architecture
    resident_threads: int = 0  # threads that it runs at once; 0 where it is no NVIDIA GPU that a plan is made for

    @property
    def capacity_bytes(self) -> int:
        """Memory for weights, gradients, optimizer state and batches."""
        return self.total_bytes - sum(use.num_bytes for use in self.subtracted)


def usable(card: Card, measured: GpuConstants | None = None) -> UsableMemory:
    """Subtracts the memory that a training on one GPU cannot use from a card's memory.

    Workspaces are inside the allocator, so a peak measured on a GPU contains them; one predicted from probes on a CPU
    does not, so they are subtracted here. Where nothing was measured of a card, figures are assumed.
    """
    total_bytes, source, uses = card.total_bytes, ASSUMED, []
    if measured is None:
        context, workspace_bytes = _OVERHEADS[card.generation]
        if shares_workspaces(version("torch")):
            workspace_bytes = min(workspace_bytes, _SHARED_WORKSPACE_BYTES)
        uses.append(MemoryUse("CUDA context and the libraries' kernels", context))
        if card.desktop:
            uses.append(MemoryUse("a screen and its programs", screen_bytes(card)))
    else:
        total_bytes, source, workspace_bytes = measured.total_bytes, measured.source, measured.workspace_bytes
        uses.append(MemoryUse("CUDA context, the libraries' kernels and the driver", measured.outside_bytes))
    uses.append(MemoryUse("the libraries' workspaces, which probes on a CPU do not show", workspace_bytes))
    return UsableMemory(
        key=card.key, name=card.name, total_bytes=total_bytes, subtracted=tuple(uses), source=source,
        generation=card.generation, resident_threads=card.resident_threads,
    )  # fmt: skip


def context_bytes(card: Card, kernels: str = ALL_KERNELS) -> tuple[int, int, int]:
    """Returns the bytes of CUDA's context and the libraries' kernels on a card: least, assumed and most. The assumed
    bytes are enough for all libraries.
    """
    assumed, _ = _OVERHEADS[card.generation]
    return _CONTEXT_LEAST_BYTES, assumed, max(_CONTEXT_MOST_BYTES[kernels], assumed)


def screen_bytes(card: Card) -> int:
    """Returns the bytes that a screen and its programs take of a card that may have one."""
    return _SCREEN_BYTES if card.desktop else 0


def shares_workspaces(torch_version: str) -> bool:
    """Tells whether cuBLAS and cuBLASLt share a workspace in a version of torch, `2.13.0+cpu`."""
    return tuple(int(number) for number in re.findall(r"\d+", torch_version)[:2]) >= _SHARED_SINCE


def predicted_room(capacity_bytes: float) -> float:
    """Returns the bytes of a capacity that are predicted to hold tensors before memory runs out."""
    return (1 - FRAGMENTATION) * capacity_bytes


def other_card(total_bytes: int) -> Card:
    """Makes a card of a GPU that the catalogue does not have, with the overheads of the generation with most, and a
    screen.
    """
    return Card("GPU", max(1, round(total_bytes / GIB)), total_bytes, UNKNOWN, _MOST_THREADS, desktop=True)


def cards_that_hold(need_bytes: float) -> str:
    """Names the three smallest common GPUs that would hold `need_bytes`, as text."""
    capacities = sorted((usable(card).capacity_bytes, card.key) for card in CARDS)
    names = [key for capacity_bytes, key in capacities if predicted_room(capacity_bytes) >= need_bytes]
    return ", ".join(names[:3]) if names else "no common GPU"


# Words that stand in names and tell no kind of card: makers, families, plugs.
_NO_NAME: Final = re.compile(
    r"nvidia|geforce|tesla|graphics|tensor|core|gpu|generation|hgx|dgxs?|fhhl|pcie|sxm\d*|hbm\d*e?"
)

# Words that stand in no key of a card that the catalogue does not have. Never more than these: keys are in use.
_NO_KIND: Final = re.compile(r"nvidia|geforce|tesla|pcie|sxm\d*|hbm\d*e?|\d+gb")
# A scheduler's request, `gres/gpu:a100=1`, `gpu:h100:4` or `gpu:a100:2(S:0-1)`, around the name of a card.
_REQUEST: Final = re.compile(r"(?:gres[/:])?(?:gpus?[:/])?(?P<name>.*?)(?:[:=]\d+)?(?:\([^)]*\))?")
# A key of a kind of device, in the catalogue or not: `rtx-3080-laptop-gpu-16gb`, `cpu-64gb`, `sim-512mib`.
DEVICE_KEY: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*-\d+(gb|[kmgt]ib|b)")
_GIGABYTE: Final = ("gb", "g", "gib", "")  # how the unit behind a size is spelt
# GiB that a driver shows ÷ gigabytes on the box, least and most: error correction takes a sixteenth, the driver some
# more; sizes that are counted in thousands are a little above 1.
_SHOWN: Final = (0.87, 1.03)


def find_card(text: str, *, by_memory: str = "--target-memory 16GiB") -> Card:
    """Finds the card of a key, or of a driver's, a scheduler's or a person's name for it. Raises ConfigError where the
    catalogue has no card of this name, or has it in several memory sizes; `by_memory` is an example, for the message,
    of a GPU given by its memory.

    >>> find_card("gpu:nvidia_h100_80gb_hbm3:4").key, find_card("Tesla V100-SXM2-16GB").key, find_card("rtx3090").key
    ('h100-80gb', 'v100-16gb', 'rtx-3090-24gb')
    """
    cards = cards_named(text)
    if len(cards) == 1:
        return cards[0]
    if cards:
        names = " or ".join(card.key for card in cards)
        raise ConfigError("This name stands for cards of several sizes", value=repr(text), remedy=f"Say {names}")
    more = f"; or the memory of another GPU, or of a slice: {by_memory}"
    unknown = unknown_name("GPU", "-".join(_words(text)), (card.key for card in CARDS), more=more)
    raise ConfigError(unknown.rule, value=repr(text), remedy=unknown.remedy)


def cards_named(text: str) -> list[Card]:
    """Finds all cards that a name may mean, one for each memory size where it names none.

    >>> [card.key for card in cards_named("v100")]
    ['v100-16gb', 'v100-32gb']
    """
    request = _REQUEST.fullmatch(text.strip().lower())
    return _spelled(request["name"] if request else text)


def gpu_key(name: str, total_bytes: int) -> str:
    """Makes the key of a kind of GPU: `h100-80gb`.

    The catalogue's key where the driver's name and size match one of its cards. Else the name with a size: the size in
    the driver's name where it has one, since the driver's total of 80 GB is 79.1 or 79.6 GiB, by version, and a learned
    factor must survive a new driver. A slice of a GPU has its size last in its name.
    """
    (least, most), shown = _SHOWN, total_bytes / GIB
    cards = [card for card in _spelled(name) if least * card.nominal_gb <= shown <= most * card.nominal_gb]
    if len(cards) == 1:
        return cards[0].key
    sizes = re.findall(r"(\d+)gb\b", name.lower())
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if not _NO_KIND.fullmatch(word)]
    return f"{'-'.join(words) or 'gpu'}-{int(sizes[-1]) if sizes else max(1, round(shown))}gb"


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if not _NO_NAME.fullmatch(word)]


def _spelled(text: str) -> list[Card]:
    """Finds the cards that have this name, with a size or without."""
    compact = "".join(_words(text))
    return [
        card
        for card in CARDS
        if compact in (card.key.replace("-", ""), *card.spellings)
        or any(
            compact == f"{name}{size}{unit}"
            for name in card.spellings
            for size in (card.nominal_gb, *card.also_gb)
            for unit in _GIGABYTE
        )
    ]


def write_gpu_constants(state: Path, constants: GpuConstants) -> Path:
    """Writes a measurement in place of an earlier one of this kind of GPU; returns the file, or raises StateError."""
    path = _path(state, constants.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, {"schema": SCHEMA, **asdict(constants)})
    except OSError as error:
        remedy = "Choose another state folder with $CAN_TRAIN_HOME, or mend this one"
        raise StateError("The state folder cannot be written", value=f"{path}: {error}", remedy=remedy) from error
    return path


def read_gpu_constants(state: Path, key: str, reporter: Reporter) -> GpuConstants | None:
    """Finds the measurement of a kind of GPU, `h100-80gb`: this user's, else can-train's; None where there is none. A
    file that cannot be read is ignored, with a notice.
    """
    path = _path(state, key)
    try:
        constants = parse_document(read_bytes(path), GpuConstants)
        if constants.key != key:
            raise ValueError(f"its key is {constants.key}")
        if constants.total_bytes <= constants.outside_bytes:
            use = f"{constants.outside_bytes} of {constants.total_bytes} bytes"
            raise ValueError(f"{use} are in use outside the allocator")
        return constants
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        reporter.notice(f"The measurement of {key} in {path} is passed over: {error}")
    return MEASURED.get(key)


def _path(state: Path, key: str) -> Path:
    return state / "gpus" / f"{key}.json"
