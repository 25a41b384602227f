"""The catalogue of GPUs: names, memory sizes, and how much of each a training can use."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from can_train.errors import ConfigError, StateError, unknown_name
from can_train.io.records import SCHEMA, Count, parse_document, read_bytes, write_json_atomic
from can_train.io.units import parse_size, size_text
from can_train.reporter import Reporter

MIB: Final = 2**20
GIB: Final = 2**30
# Several GPUs of a kind: 2xrtx-4090.
_SEVERAL: Final = re.compile(r"(?P<count>[1-9]\d*) ?[x×*] ?(?P<name>\D.+|\d+ ?[KMGT]i?B)", re.IGNORECASE)
UNKNOWN: Final = "unknown"  # generation of a GPU that is not in the catalogue
UNKNOWN_CAVEAT: Final = (
    "A GPU that is named by its memory may be of any generation: the plan is for the one whose kernels take most"
)


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
    common: bool = True  # whether it is proposed where memory is short

    @property
    def key(self) -> str:
        """Its name in plans and in the factor store, `a100-80gb`."""
        return f"{self.name.lower().replace(' ', '-')}-{self.nominal_gb}gb"


_PRO_6000: Final = tuple(
    f"rtxpro6000{more}"
    for more in ("", "blackwell", "blackwellworkstationedition", "blackwellserveredition",
                 "blackwellmaxqworkstationedition")
)  # fmt: skip

# Source of the sizes: the least that PyTorch's out-of-memory messages ("has a total capacity of …") and the start lines
# of training programs ("CUDA:0 (Tesla T4, 14912MiB)") show in public logs and issues, rounded down; newer drivers keep
# more for themselves than older ones. Cards with error correction have it on, as they are delivered. No log shows the
# A16, the Quadros, the A2, P40, A800, L20, H20, H800, GB200, B300, the TITANs, the RTX 20xx and the RTX 5070s: their
# sizes are nvidia-smi's, or fifteen sixteenths of the size on the box, less the memory that the driver keeps of similar
# cards.
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
    # Logs show the RTX PRO 6000 (94.97 GiB) and the RTX 5060 Ti (15,816 MiB). All other cards have the size of their
    # data sheet and of nvidia-smi, less the memory that drivers keep of the most similar card above.
    Card("A2", 16, 14_860 * MIB, "ampere", 10 * 1536, ("a2",), common=False),
    Card("P40", 24, 22_900 * MIB, "pascal", 30 * 2048, ("p40",), common=False),
    Card("A800", 40, 40_320 * MIB, "ampere", 108 * 2048, ("a800", "a80040gbactive"), common=False),
    Card("A800", 80, 81_000 * MIB, "ampere", 108 * 2048, ("a800",), common=False),
    Card("L20", 48, 45_370 * MIB, "ada", 92 * 1536, ("l20",), common=False),
    Card("H20", 96, 97_250 * MIB, "hopper", 78 * 2048, ("h20",), common=False),
    Card("H20", 141, 143_070 * MIB, "hopper", 78 * 2048, ("h20", "h203e"), common=False),
    Card("H800", 80, 80_990 * MIB, "hopper", 132 * 2048, ("h800",), common=False),
    Card("GB200", 186, 188_700 * MIB, "blackwell", 152 * 2048, ("gb200",)),
    Card("B300", 288, 273_900 * MIB, "blackwell", 148 * 2048, ("b300", "b300ac")),
    Card("RTX PRO 6000", 96, 97_240 * MIB, "blackwell", 188 * 1536, _PRO_6000, desktop=True),
    Card("TITAN Xp", 12, 12_180 * MIB, "pascal", 30 * 2048, ("titanxp",), desktop=True, common=False),
    Card("TITAN V", 12, 12_050 * MIB, "volta", 80 * 2048, ("titanv",), desktop=True, common=False),
    Card("TITAN RTX", 24, 24_100 * MIB, "turing", 72 * 1024, ("titanrtx",), desktop=True, common=False),
    *(
        Card(
            f"RTX {name}",
            size,
            shown * MIB,
            generation,
            threads,
            tuple(f"{start}{name.lower().replace(' ', '')}" for start in ("rtx", "")),
            desktop=True,
            common=False,
        )
        for name, size, shown, generation, threads in (
            ("2060", 6, 5_900, "turing", 30 * 1024),
            ("2060", 12, 11_890, "turing", 34 * 1024),
            ("2060 Super", 8, 7_780, "turing", 34 * 1024),
            ("2070", 8, 7_780, "turing", 36 * 1024),
            ("2070 Super", 8, 7_780, "turing", 40 * 1024),
            ("2080", 8, 7_780, "turing", 46 * 1024),
            ("2080 Super", 8, 7_780, "turing", 48 * 1024),
            ("3060 Ti", 8, 7_780, "ampere", 38 * 1536),
            ("3070 Ti", 8, 7_780, "ampere", 48 * 1536),
            ("3080 Ti", 12, 11_740, "ampere", 80 * 1536),
            ("3090 Ti", 24, 24_070, "ampere", 84 * 1536),
            ("4060", 8, 7_680, "ada", 24 * 1536),
            ("4060 Ti", 8, 7_680, "ada", 34 * 1536),
            ("4060 Ti", 16, 15_830, "ada", 34 * 1536),
            ("4070 Super", 12, 11_740, "ada", 56 * 1536),
            ("4070 Ti Super", 16, 15_830, "ada", 66 * 1536),
            ("4080 Super", 16, 15_830, "ada", 80 * 1536),
            ("5060", 8, 7_660, "blackwell", 30 * 1536),
            ("5060 Ti", 8, 7_660, "blackwell", 36 * 1536),
            ("5060 Ti", 16, 15_810, "blackwell", 36 * 1536),
            ("5070", 12, 11_700, "blackwell", 48 * 1536),
            ("5070 Ti", 16, 15_800, "blackwell", 70 * 1536),
        )
    ),
)

# Slices of a GPU (MIG): the GPU, its generation, the threads of all its compute slices and their number, and for each
# profile the gigabytes in its name and the MiB that `nvidia-smi mig -lgip` shows, or 0. Sources: NVIDIA's MIG User
# Guide for profiles, and listings in public issues (NVIDIA/mig-parted#101, NVIDIA/gpu-operator#1303; an A100's 2g.20gb
# shows 19,968 MiB). The sizes of an A30's and of the other slices of A100 and GH200 were seen in no listing. An H100's
# slices are taken to have what an A100's have. A profile without a listing is taken to
# have the least share of the size in its name that a listing shows: a GB200's 1g.24gb has 20.0 GiB.
_UNLISTED: Final = 0.83
_H100_SLICES: Final = ((1, 10, 9_728), (1, 20, 19_968), (2, 20, 19_968), (3, 40, 40_192), (4, 40, 40_192),
                       (7, 80, 80_640))  # fmt: skip
_SLICED: Final = (
    ("A30", "ampere", 56 * 2048, 4, ((1, 6, 5_940), (2, 12, 11_960), (4, 24, 23_990))),
    ("A100", "ampere", 108 * 2048, 7, ((1, 5, 4_864), (1, 10, 9_728), (2, 10, 9_856), (3, 20, 20_096), (4, 20, 20_096),
     (7, 40, 40_320), *_H100_SLICES[1:])),
    ("H100", "hopper", 132 * 2048, 7, (*_H100_SLICES, (1, 12, 11_008), (1, 24, 22_144), (2, 24, 22_144),
     (3, 47, 47_488), (3, 48, 47_488), (4, 47, 47_488), (4, 48, 47_488), (7, 94, 95_230), (7, 96, 95_230))),
    ("GH200", "hopper", 132 * 2048, 7, ((1, 12, 11_008), (1, 24, 22_144), (2, 24, 22_144), (3, 48, 47_488),
     (4, 48, 47_488), (7, 96, 95_230))),
    ("H200", "hopper", 132 * 2048, 7, ((1, 18, 0), (1, 35, 0), (2, 35, 0), (3, 71, 0), (4, 71, 0), (7, 141, 0))),
    ("B200", "blackwell", 148 * 2048, 7, ((1, 23, 0), (1, 45, 0), (2, 45, 0), (3, 90, 0), (4, 90, 0), (7, 180, 0))),
    ("GB200", "blackwell", 152 * 2048, 7, ((1, 24, 20_480), (1, 47, 46_592), (2, 47, 46_592), (3, 95, 0), (4, 95, 0),
     (7, 189, 0))),
    ("RTX PRO 6000", "blackwell", 188 * 1536, 4, ((1, 24, 0), (2, 48, 0), (4, 96, 0))),
)  # fmt: skip
SLICES: Final = tuple(
    Card(
        f"{gpu} MIG {parts}g",
        size,
        (shown or int(_UNLISTED * size * GIB / MIB)) * MIB,
        generation,
        -(-threads * parts // whole),
        common=False,
    )
    for gpu, generation, threads, whole, profiles in _SLICED
    for parts, size, shown in profiles
)
"""Slices of GPUs, with the keys that their drivers' names have: `a100-mig-3g-40gb`."""

# AMD's GPUs are memory with a name. Source of the sizes: AMD's data sheets; rocm-smi shows 196,592 MiB of an MI300X, in
# a public issue, and as much less is taken of the others. Half an MI250 or MI250X is one device.
ROCM: Final = "rocm"  # in place of a generation
ROCM_CAVEAT: Final = (
    "An AMD GPU is planned as memory with a name: ROCm's kernels, MIOpen's workspaces and HIP's context are taken to "
    "be as large as CUDA's, which nobody has measured"
)
_INSTINCT: Final = (("MI210", 64), ("MI250", 64), ("MI250X", 64), ("MI300A", 128), ("MI300X", 192), ("MI325X", 256),
                    ("MI350X", 288), ("MI355X", 288))  # fmt: skip
AMD_CARDS: Final = tuple(
    Card(f"AMD Instinct {name}", size, int(0.98 * size * 1024) * MIB, ROCM, 0,
         tuple(f"{maker}{name.lower()}" for maker in ("", "amd", "instinct", "amdinstinct")),
         common=False)
    for name, size in _INSTINCT
)  # fmt: skip

# Bandwidth of the memory, GB/s. Source: the data sheets of NVIDIA and AMD; of the A100 and A800 with 80 GB for PCIe, of
# the H100 and H800 for SXM. Slices have none here.
_BANDWIDTH_GB_S: Final = {
    "p100-16gb": 732, "v100-16gb": 900, "v100-32gb": 900, "t4-16gb": 320, "a10-24gb": 600, "a10g-24gb": 600,
    "a16-16gb": 200, "a30-24gb": 933, "a40-48gb": 696, "a100-40gb": 1555, "a100-80gb": 1935, "l4-24gb": 300,
    "l40-48gb": 864, "l40s-48gb": 864, "h100-80gb": 3350, "h100-94gb": 3900, "h200-141gb": 4800, "gh200-96gb": 4000,
    "b200-180gb": 8000, "quadro-rtx-6000-24gb": 672, "quadro-rtx-8000-48gb": 672, "rtx-a4000-16gb": 448,
    "rtx-a5000-24gb": 768, "rtx-a6000-48gb": 768, "rtx-6000-ada-48gb": 960, "gtx-1080-ti-11gb": 484,
    "rtx-2080-ti-11gb": 616, "rtx-3060-12gb": 360, "rtx-3070-8gb": 448, "rtx-3080-10gb": 760, "rtx-3080-12gb": 912,
    "rtx-3090-24gb": 936, "rtx-4070-12gb": 504, "rtx-4070-ti-12gb": 504, "rtx-4080-16gb": 717, "rtx-4090-24gb": 1008,
    "rtx-5080-16gb": 960, "rtx-5090-32gb": 1792, "a2-16gb": 200, "p40-24gb": 346, "a800-40gb": 1555,
    "a800-80gb": 1935, "l20-48gb": 864, "h20-96gb": 4000, "h20-141gb": 4800, "h800-80gb": 3350, "gb200-186gb": 8000,
    "b300-288gb": 8000, "rtx-pro-6000-96gb": 1792, "titan-xp-12gb": 548, "titan-v-12gb": 653, "titan-rtx-24gb": 672,
    "rtx-2060-6gb": 336, "rtx-2060-12gb": 336, "rtx-2060-super-8gb": 448, "rtx-2070-8gb": 448,
    "rtx-2070-super-8gb": 448, "rtx-2080-8gb": 448, "rtx-2080-super-8gb": 496, "rtx-3060-ti-8gb": 448,
    "rtx-3070-ti-8gb": 608, "rtx-3080-ti-12gb": 912, "rtx-3090-ti-24gb": 1008, "rtx-4060-8gb": 272,
    "rtx-4060-ti-8gb": 288, "rtx-4060-ti-16gb": 288, "rtx-4070-super-12gb": 504, "rtx-4070-ti-super-16gb": 672,
    "rtx-4080-super-16gb": 736, "rtx-5060-8gb": 448, "rtx-5060-ti-8gb": 448, "rtx-5060-ti-16gb": 448,
    "rtx-5070-12gb": 672, "rtx-5070-ti-16gb": 896, "amd-instinct-mi210-64gb": 1638, "amd-instinct-mi250-64gb": 1638,
    "amd-instinct-mi250x-64gb": 1638, "amd-instinct-mi300a-128gb": 5300, "amd-instinct-mi300x-192gb": 5300,
    "amd-instinct-mi325x-256gb": 6000, "amd-instinct-mi350x-288gb": 8000, "amd-instinct-mi355x-288gb": 8000,
}  # fmt: skip


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


# Measurements that come with can-train, by key, in its order; `scripts/gpu-check` prints the difference that a new one
# makes here. A plan for a card without one uses assumed figures, and says so.
MEASURED: Final[Mapping[str, GpuConstants]] = {
    measured.key: measured
    for measured in (
        GpuConstants(
            key="h100-80gb",
            total_bytes=85_017_493_504,
            outside_bytes=728_563_712,
            workspace_bytes=34_603_008,
            date="2026-11-24",
            driver="580.159.04",
            torch="2.11.0+cu130",
        ),
        GpuConstants(
            key="h200-141gb",
            total_bytes=150_109_880_320,
            outside_bytes=728_563_712,
            workspace_bytes=34_603_008,
            date="2026-11-24",
            driver="580.159.04",
            torch="2.11.0+cu130",
        ),
    )
}
ASSUMED: Final = "assumed, on the safe side"  # source of figures that nobody has measured


# Libraries whose kernels a training loads into the context.
CUBLAS_KERNELS: Final = "cuBLAS"
CUDNN_KERNELS: Final = "cuBLAS and cuDNN"
ALL_KERNELS: Final = "cuBLAS, cuDNN and its batch norm"

# Size of CUDA's context with the kernels of these libraries, in MiB, where all kernels of a library are loaded at once:
# fitted on every second published row of an A100 (scripts/bench/prediction measured). CUDA loads them so before 11.7,
# with older drivers than 515, and where $CUDA_MODULE_LOADING is EAGER.
_AT_ONCE: Final = {CUBLAS_KERNELS: 1429, CUDNN_KERNELS: 1679, ALL_KERNELS: 1721}
# And where each kernel is loaded when it is first used: measured on an H100 and an H200 with driver 580 and CUDA 13.0,
# 527 of them for the context alone (scripts/bench/gpu-check-*.json).
_WHEN_USED: Final = {CUBLAS_KERNELS: 685, CUDNN_KERNELS: 693, ALL_KERNELS: 695}
# Cards whose published rows show a context: their kernels were loaded at once.
_SHOWN_AT_ONCE: Final = ("A100", "A800")
# Sizes of the contexts of other generations, in MiB, which nobody has measured. PyTorch's issues report 270 to 430 MiB
# for the context since CUDA 11.7; each library adds its own, so that is rounded up by half and more.
_ASSUMED_CONTEXT: Final = {
    **dict.fromkeys(("pascal", "volta", "turing"), 512),
    **dict.fromkeys(("ampere", "ada"), 640),
    "blackwell": 1024,
}
_LEAST_CONTEXT: Final = 270  # the smallest report

# Bytes inside the allocator: workspaces of cuBLAS and cuBLASLt, in the forward and the backward thread. PyTorch's
# source (CublasHandlePool.cpp) gives cuBLAS 8.1 MiB for each thread, and 32 MiB from Hopper on, and cuBLASLt up to 32
# MiB.
_OLD_WORKSPACE_BYTES: Final = 32 * MIB
_WORKSPACE_BYTES: Final = 128 * MIB
_OLD_GENERATIONS: Final = ("pascal", "volta", "turing", "ampere", "ada")

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
    count: int = 1  # such devices, each for one rank of a run

    @property
    def label(self) -> str:
        """The key, after the number of devices where they are several: `2xrtx-4090-24gb`."""
        return several_of(self.key, self.count)

    @property
    def capacity_bytes(self) -> int:
        """Memory for weights, gradients, optimizer state and batches."""
        return self.total_bytes - sum(use.num_bytes for use in self.subtracted)


def several_of(key: str, count: int) -> str:
    """Names several devices of a kind: `2xrtx-4090-24gb`; one has the name of its kind."""
    return key if count == 1 else f"{count}x{key}"


@cache
def _torch_version() -> str:
    # Reads a file of 150 KiB: the catalogue's cards would take a second.
    return version("torch")


def usable(card: Card, measured: GpuConstants | None = None) -> UsableMemory:
    """Subtracts the memory that a training on one GPU cannot use from a card's memory.

    Workspaces are inside the allocator, so a peak measured on a GPU contains them; one predicted from probes on a CPU
    does not, so they are subtracted here. Where nothing was measured of a card, figures are assumed.
    """
    total_bytes, source, uses = card.total_bytes, ASSUMED, []
    if measured is None:
        _, context, _ = context_bytes(card)
        workspace_bytes = _OLD_WORKSPACE_BYTES if card.generation in _OLD_GENERATIONS else _WORKSPACE_BYTES
        if shares_workspaces(_torch_version()):
            workspace_bytes = min(workspace_bytes, _SHARED_WORKSPACE_BYTES)
        runtime = "HIP" if card.generation == ROCM else "CUDA"
        uses.append(MemoryUse(f"{runtime} context and the libraries' kernels", context))
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


def recordable(key: str, capacity_bytes: int) -> UsableMemory | None:
    """Returns the card of a key with a capacity, for the recorder of CUDA's dispatch; None where the catalogue has no
    NVIDIA GPU of this key.
    """
    card = next((card for card in (*CARDS, *SLICES) if card.key == key), None)
    if card is None:
        return None
    return UsableMemory(key=key, name=card.name, total_bytes=capacity_bytes, subtracted=(), source="of this machine",
                        generation=card.generation, resident_threads=card.resident_threads)  # fmt: skip


def context_bytes(
    card: Card, kernels: str = ALL_KERNELS, *, environment: Mapping[str, str] = os.environ
) -> tuple[int, int, int]:
    """Returns the bytes of CUDA's context and the libraries' kernels on a card: least, assumed and most. They depend
    most on whether the driver loads all kernels of a library at once.
    """
    at_once = _AT_ONCE[kernels]
    is_eager = environment.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
    if is_eager or card.name in _SHOWN_AT_ONCE or card.generation in (UNKNOWN, ROCM):
        assumed = at_once
    else:
        assumed = _ASSUMED_CONTEXT.get(card.generation, _WHEN_USED[kernels])
    return _LEAST_CONTEXT * MIB, assumed * MIB, max(at_once, assumed) * MIB


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


def split_count(text: str) -> tuple[int, str]:
    """Splits the number of GPUs off the name of a target: `2xrtx-4090`."""
    several = _SEVERAL.fullmatch(text.strip())
    return (int(several["count"]), several["name"]) if several is not None else (1, text)


def target_card(text: str) -> Card:
    """Finds the card of the name of a target, which may be the whole memory of another GPU: `16GiB`.

    Raises:
        ConfigError: There is no such card, or its memory is less than any training needs.
    """
    try:
        card = other_card(parse_size(text))
    except ConfigError:
        return find_card(text)
    reserved = sum(use.num_bytes for use in usable(card).subtracted)
    if reserved >= card.total_bytes:
        rule = f"A training cannot use {size_text(reserved)} of a GPU's memory, and this GPU has less in all"
        remedy = "Give a larger one: 16GiB; or give what a training can use: --device sim:512MiB"
        raise ConfigError(rule, value=text, remedy=remedy)
    return card


def bandwidth_gb_s(key: str) -> int:
    """Returns the bandwidth of the memory of a kind of device in GB/s; 0: not known."""
    return _BANDWIDTH_GB_S.get(key, 0)


def cards_that_hold(need_bytes: float) -> str:
    """Names the three smallest common GPUs that would hold `need_bytes`, as text."""
    capacities = sorted((usable(card).capacity_bytes, card.key) for card in CARDS if card.common)
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


def find_card(text: str, *, by_memory: str = "--target-gpu 16GiB") -> Card:
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
        of_several = "slices of several GPUs" if cards[0] in SLICES else "cards of several sizes"
        raise ConfigError(f"This name stands for {of_several}", value=repr(text), remedy=f"Say {names}")
    more = f"; or the memory of another GPU, or of a slice: {by_memory}"
    unknown = unknown_name("GPU", "-".join(_words(text)), (card.key for card in (*CARDS, *AMD_CARDS)), more=more)
    raise ConfigError(unknown.rule, value=repr(text), remedy=unknown.remedy)


def cards_named(text: str) -> list[Card]:
    """Finds all cards that a name may mean, one for each memory size where it names none.

    >>> [card.key for card in cards_named("v100")]
    ['v100-16gb', 'v100-32gb']
    """
    request = _REQUEST.fullmatch(text.strip().lower())
    name = request["name"] if request else text
    return _spelled(name, (*CARDS, *AMD_CARDS)) or _slices(name)


# The name of a slice: `1g.10gb`, `mig-1g.10gb`, `a100_3g.40gb`, `NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb+me`.
_SLICE: Final = re.compile(
    r"(?P<gpu>.*?)(?:mig)?[ ._-]*(?:[1-7]c[ ._-])?(?P<parts>[1-7])g[ ._-]?(?P<size>\d+)(?:gb?)?"
    r"(?:[ .+_-]?me(?:[ .+_-]?all)?)?"
)
_SIZE_OF_GPU: Final = re.compile(r"\d+gb|nvl|blackwell|workstation|server|edition|com")


def _slices(text: str) -> list[Card]:
    """Finds the slices of GPUs that a name may mean. Drivers round a size down by 1, as in `a100_3g.39gb`."""
    match = _SLICE.fullmatch(text.strip().lower())
    if match is None:
        return []
    gpu = "".join(word for word in _words(match["gpu"]) if not _SIZE_OF_GPU.fullmatch(word))
    size, start = int(match["size"]), f" MIG {match['parts']}g"
    cards = [
        card for card in SLICES if card.name.endswith(start) and gpu in ("", _compact(card.name.removesuffix(start)))
    ]
    exact = [card for card in cards if card.nominal_gb == size]
    return exact or [card for card in cards if card.nominal_gb == size + 1]


def _compact(name: str) -> str:
    return name.lower().replace(" ", "")


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


def _spelled(text: str, cards: Sequence[Card] = CARDS) -> list[Card]:
    """Finds the cards that have this name, with a size or without."""
    compact = "".join(_words(text))
    return [
        card
        for card in cards
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
