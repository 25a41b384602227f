"""The catalogue of common NVIDIA GPUs: what each is called and how many bytes a driver shows of it. Plain data; what of
it a training can use is decided in `cards`, which card a text means in `card_names`.
"""

from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20

UNKNOWN: Final = "unknown"
"""Generation of a GPU that is not in the catalogue."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of GPU.

    Attributes:
        key: Its name in plans and in the factor store, `a100-80gb`.
        name: What people call it.
        nominal_gb: The gigabytes on the box.
        total_bytes: The least that a driver was seen to show of it.
        generation: Its architecture, which its overheads follow.
        desktop: Whether it is sold to have a screen attached.
        spellings: Names without size that mean it, in letters and digits alone.
        also_gb: Other sizes that stand in its names, of memory that is not the GPU's.
    """

    key: str
    name: str
    nominal_gb: int
    total_bytes: int
    generation: str
    desktop: bool = False
    spellings: tuple[str, ...] = ()
    also_gb: tuple[int, ...] = ()


def _card(name: str, nominal_gb: int, total_mib: int, generation: str, spellings: str, **more: object) -> Card:
    key = f"{name.lower().replace(' ', '-')}-{nominal_gb}gb"
    return Card(
        key=key,
        name=name,
        nominal_gb=nominal_gb,
        total_bytes=total_mib * MIB,
        generation=generation,
        spellings=tuple(spellings.split()),
        **more,  # type: ignore[arg-type]  # the optional fields
    )


_DATA_CENTRE: Final = (
    _card("P100", 16, 16_280, "pascal", "p100"),
    _card("V100", 16, 16_128, "volta", "v100"),
    _card("V100", 32, 32_490, "volta", "v100 v100s"),
    _card("T4", 16, 14_905, "turing", "t4"),
    _card("A10", 24, 22_485, "ampere", "a10"),
    _card("A10G", 24, 22_485, "ampere", "a10g"),
    _card("A16", 16, 14_880, "ampere", "a16"),
    _card("A30", 24, 24_060, "ampere", "a30"),
    _card("A40", 48, 45_400, "ampere", "a40"),
    _card("A100", 40, 40_320, "ampere", "a100"),
    _card("A100", 80, 81_000, "ampere", "a100"),
    _card("L4", 24, 22_555, "ada", "l4"),
    _card("L40", 48, 45_370, "ada", "l40"),
    _card("L40S", 48, 45_370, "ada", "l40s"),
    _card("H100", 80, 80_990, "hopper", "h100"),
    _card("H100", 94, 95_230, "hopper", "h100nvl"),
    _card("H200", 141, 143_070, "hopper", "h200 h200nvl"),
    # The size in its name is that of the processor beside it.
    _card("GH200", 96, 96_760, "hopper", "gh200", also_gb=(120, 480)),
    _card("B200", 180, 182_630, "blackwell", "b200"),
)

_DESKTOP: Final = (
    _card("Quadro RTX 6000", 24, 22_500, "turing", "quadrortx6000 rtx6000", desktop=True),
    _card("Quadro RTX 8000", 48, 45_400, "turing", "quadrortx8000 rtx8000", desktop=True),
    _card("RTX A4000", 16, 15_970, "ampere", "rtxa4000 a4000", desktop=True),
    _card("RTX A5000", 24, 24_110, "ampere", "rtxa5000 a5000", desktop=True),
    _card("RTX A6000", 48, 48_400, "ampere", "rtxa6000 a6000", desktop=True),
    _card("RTX 6000 Ada", 48, 48_400, "ada", "rtx6000ada 6000ada rtx6000", desktop=True),
    _card("GTX 1080 Ti", 11, 11_165, "pascal", "gtx1080ti 1080ti", desktop=True),
    _card("RTX 2080 Ti", 11, 10_810, "turing", "rtx2080ti 2080ti", desktop=True),
    _card("RTX 3060", 12, 11_890, "ampere", "rtx3060 3060", desktop=True),
    _card("RTX 3070", 8, 7_780, "ampere", "rtx3070 3070", desktop=True),
    _card("RTX 3080", 10, 9_850, "ampere", "rtx3080 3080", desktop=True),
    _card("RTX 3080", 12, 11_760, "ampere", "rtx3080 3080", desktop=True),
    _card("RTX 3090", 24, 24_110, "ampere", "rtx3090 3090", desktop=True),
    _card("RTX 4070", 12, 11_760, "ada", "rtx4070 4070", desktop=True),
    _card("RTX 4070 Ti", 12, 11_760, "ada", "rtx4070ti 4070ti", desktop=True),
    _card("RTX 4080", 16, 15_940, "ada", "rtx4080 4080", desktop=True),
    _card("RTX 4090", 24, 24_070, "ada", "rtx4090 4090", desktop=True),
    _card("RTX 5080", 16, 15_830, "blackwell", "rtx5080 5080", desktop=True),
    _card("RTX 5090", 32, 32_080, "blackwell", "rtx5090 5090", desktop=True),
)

CARDS: Final = (*_DATA_CENTRE, *_DESKTOP)
"""Every card of the catalogue.

Source of the sizes: the least that PyTorch's out-of-memory messages ("has a total capacity of …") and the start lines
of training programs ("CUDA:0 (Tesla T4, 14912MiB)") show in public logs and issues, rounded down; newer drivers keep
more for themselves than older ones. Cards with error correction have it on, as they are delivered. Nobody's log was
found of the A16 and the Quadros: theirs are the sizes of nvidia-smi, or fifteen sixteenths of what is on the box, less
as much as the driver keeps of cards like them.
"""
