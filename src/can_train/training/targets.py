"""Which device a dry run plans for: the one that a run would train on here, or GPUs that need not be here."""

from collections.abc import Sequence

from can_train.config.resolved import ResolvedRun
from can_train.errors import ConfigError
from can_train.memory.devices import is_simulated, simulated_bytes
from can_train.memory.meters import open_meter
from can_train.policy.card_catalogue import Card
from can_train.policy.card_names import find_card
from can_train.policy.cards import Taken, Usable, other_card, usable
from can_train.policy.sizes import parse_size, size_text
from can_train.reporter import Reporter
from can_train.state.gpu_constants import read_gpu_constants
from can_train.training.folders import state_dir

HERE = "as this machine has it now"
"""Source of the figures of a device that is at hand."""


def find_targets(run: ResolvedRun, gpus: Sequence[str], memory: str | None, reporter: Reporter) -> list[Usable]:
    """Finds what is planned for.

    Args:
        run: The resolved run.
        gpus: Names of GPUs, as the catalogue, a driver or a scheduler spells them.
        memory: Whole memory of a GPU that the catalogue does not have; None: there is none such.
        reporter: Is told of measurements that cannot be read.

    Returns:
        The GPUs that were named, else the run's own device.

    Raises:
        ConfigError: A name or a size is not understood.
        DeviceError: The run's device cannot be used.
    """
    cards = [find_card(name) for name in gpus] + ([_other_card(memory)] if memory else [])
    targets = [usable(card, read_gpu_constants(state_dir(run.paths), card.key, reporter)) for card in cards]
    # One card by two spellings is one target.
    return list({target.key: target for target in targets}.values()) or [_device_here(run.device)]


def _other_card(memory: str) -> Card:
    card = other_card(parse_size(memory))
    kept = sum(taken.num_bytes for taken in usable(card).taken)
    if kept >= card.total_bytes:
        raise ConfigError(
            f"--target-memory is the whole memory of a GPU, of which {size_text(kept)} never reach a training",
            value=memory,
            remedy="Give a larger one: 16GiB; --device sim:512MiB is what a training can use",
        )
    return card


def _device_here(device: str) -> Usable:
    if is_simulated(device):
        # Without its meter, which replays an allocator.
        size = simulated_bytes(device)
        return Usable(key=open_meter(device).key, name="Simulated GPU", total_bytes=size, taken=(), source="simulated")
    meter = open_meter(device)
    others = Taken("in use already", meter.total_bytes - meter.capacity_bytes)
    return Usable(key=meter.key, name=meter.name, total_bytes=meter.total_bytes, taken=(others,), source=HERE)
