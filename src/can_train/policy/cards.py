"""How much of a GPU that is not here a training can use: what its driver shows less what never reaches a tensor. The
figures are assumed, on the safe side, until somebody has measured the card.
"""

from dataclasses import dataclass
from typing import Final

from can_train.policy.card_catalogue import CARDS, MIB, UNKNOWN, Card
from can_train.policy.gpu_constants import GpuConstants

GIB: Final = 2**30

ASSUMED: Final = "assumed, on the safe side"
"""Source of figures that nobody has measured."""


@dataclass(frozen=True)
class _Overheads:
    """What a generation of GPUs takes, in bytes.

    Attributes:
        context: Outside the allocator: the CUDA context and the kernels that PyTorch and its libraries load.
        workspace: Inside the allocator: what cuBLAS and cuBLASLt keep, in the forward and in the backward thread.
    """

    context: int
    workspace: int


_OVERHEADS: Final = {
    "pascal": _Overheads(512 * MIB, 32 * MIB),
    "volta": _Overheads(512 * MIB, 32 * MIB),
    "turing": _Overheads(512 * MIB, 32 * MIB),
    "ampere": _Overheads(640 * MIB, 32 * MIB),
    "ada": _Overheads(640 * MIB, 32 * MIB),
    "hopper": _Overheads(768 * MIB, 128 * MIB),
    "blackwell": _Overheads(1024 * MIB, 128 * MIB),
    UNKNOWN: _Overheads(1024 * MIB, 128 * MIB),
}
"""By generation. Sources: PyTorch's issues report 270 to 430 MiB for the context since kernels are loaded when they are
first used (CUDA 11.7), to which each library adds its own: rounded up by half and more. PyTorch's source gives cuBLAS
8.1 MiB for each thread, and 32 MiB from Hopper on, and cuBLASLt up to 32 MiB."""

_SCREEN_BYTES: Final = 512 * MIB
"""What a desktop takes of the card that draws it: 459 and 507 MiB of two RTX 4090 without a job, in a public report."""

FRAGMENTATION: Final = 0.05
"""Share of a capacity that the allocator cannot hand out: gaps between blocks in use, and a last page that must fit
whole. It is not subtracted from the capacity, of which peaks are shares, but bounds what is predicted to fit. With
expanding segments, which can-train turns on, the finder left 3.4 % (GAT) and 5.2 % (VGAE) of a simulated GPU of 1 GiB;
gaps grow little with the batch, so larger GPUs lose a smaller share (and one of 0.5 GiB up to 12 %)."""

_NAMED: Final = 3
"""Cards that a message names."""


@dataclass(frozen=True)
class Taken:
    """Something that takes memory beside a training's tensors.

    Attributes:
        what: In words.
        num_bytes: How much.
    """

    what: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Usable:
    """What a training can use of a card.

    Attributes:
        key: The kind of card.
        name: What people call it.
        total_bytes: What its driver shows.
        taken: What is subtracted, in this order.
        source: Where the figures come from: `ASSUMED`, or "measured on …".
    """

    key: str
    name: str
    total_bytes: int
    taken: tuple[Taken, ...]
    source: str

    @property
    def capacity_bytes(self) -> int:
        """What is left for weights, gradients, optimizer state and batches."""
        return self.total_bytes - sum(taken.num_bytes for taken in self.taken)


def usable(card: Card, measured: GpuConstants | None = None) -> Usable:
    """Subtracts what a card keeps from training on it with one GPU.

    Workspaces are inside the allocator, so a peak measured on a GPU contains them; one predicted from probes on a CPU
    does not, and that is what this is for.

    Args:
        card: The card.
        measured: What was measured of one, in place of what is assumed.
    """
    if measured is None:
        overheads, total_bytes = _OVERHEADS[card.generation], card.total_bytes
        taken = [Taken("CUDA context and the libraries' kernels", overheads.context)]
        taken += [Taken("a screen and its programs", _SCREEN_BYTES)] if card.desktop else []
        workspace_bytes = overheads.workspace
    else:
        total_bytes, workspace_bytes = measured.total_bytes, measured.workspace_bytes
        taken = [Taken("CUDA context, the libraries' kernels and the driver", measured.outside_bytes)]
    taken.append(Taken("the libraries' workspaces, which probes on a CPU do not show", workspace_bytes))
    source = ASSUMED if measured is None else measured.source
    return Usable(key=card.key, name=card.name, total_bytes=total_bytes, taken=tuple(taken), source=source)


def predicted_room(capacity_bytes: float) -> float:
    """Returns how much of a capacity is predicted to hold tensors before memory runs out."""
    return (1 - FRAGMENTATION) * capacity_bytes


def other_card(total_bytes: int) -> Card:
    """Makes a card of a GPU that the catalogue does not have: of any generation, and with a screen.

    Args:
        total_bytes: What its driver shows.
    """
    nominal_gb = max(1, round(total_bytes / GIB))
    return Card(
        key=f"gpu-{nominal_gb}gb",
        name="GPU",
        nominal_gb=nominal_gb,
        total_bytes=total_bytes,
        generation=UNKNOWN,
        desktop=True,
    )


def cards_that_hold(need_bytes: float) -> str:
    """Names the smallest common GPUs that would hold `need_bytes`, in words."""
    capacities = sorted((usable(card).capacity_bytes, card.key) for card in CARDS)
    names = [key for capacity_bytes, key in capacities if predicted_room(capacity_bytes) >= need_bytes]
    return ", ".join(names[:_NAMED]) if names else "no common GPU"
