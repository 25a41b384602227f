"""Which card a text means, however a driver, a scheduler or a person spells it. One kind of card has one key, so that
what was learned of it is found again, and no GPU is left without one.
"""

import re
from collections.abc import Iterator
from typing import Final

from can_train.errors import ConfigError, nearest_first
from can_train.policy.card_catalogue import CARDS, Card
from can_train.policy.cards import GIB

_NO_NAME: Final = re.compile(
    r"nvidia|geforce|tesla|graphics|tensor|core|gpu|generation|hgx|dgxs?|fhhl|pcie|sxm\d*|hbm\d*e?"
)
"""Words that stand in names and tell no kind of card: makers, families, plugs."""

_NO_KIND: Final = re.compile(r"nvidia|geforce|tesla|pcie|sxm\d*|hbm\d*e?|\d+gb")
"""Words that stand in no key of a card that the catalogue does not have. Never more than these: keys are in use."""

_REQUEST: Final = re.compile(r"(?:gres[/:])?(?:gpus?[:/])?(?P<name>.*?)(?:[:=]\d+)?(?:\([^)]*\))?")
"""A scheduler's request, `gres/gpu:a100=1`, `gpu:h100:4` or `gpu:a100:2(S:0-1)`, around the name of a card."""

_GIGABYTE: Final = ("gb", "g", "gib", "")
"""How the unit behind a size is spelt."""

_SHOWN: Final = (0.87, 1.03)
"""What a driver shows of a card's gigabytes, least and most: error correction takes a sixteenth, the driver some more;
sizes that are counted in thousands are a little above one."""


def find_card(text: str) -> Card:
    """Finds the card that somebody means: a key, or what a driver, a scheduler or a person calls it.

    >>> find_card("gpu:nvidia_h100_80gb_hbm3:4").key, find_card("Tesla V100-SXM2-16GB").key, find_card("rtx3090").key
    ('h100-80gb', 'v100-16gb', 'rtx-3090-24gb')

    Raises:
        ConfigError: No card of the catalogue has this name, or several have and it takes their size to tell.
    """
    request = _REQUEST.fullmatch(text.strip().lower())
    words = _words(request["name"] if request else text)
    found = _spelled(words)
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(card.key for card in found)
        raise ConfigError("This name stands for cards of several sizes", value=repr(text), remedy=f"Say {names}")
    valid = ", ".join(nearest_first("-".join(words), (card.key for card in CARDS)))
    raise ConfigError(
        "Unknown GPU",
        value=repr(text),
        remedy=f"Valid, nearest first: {valid}; or the memory of another one, or of a slice: --target-memory 16GiB",
    )


def gpu_key(name: str, total_bytes: int) -> str:
    """Names a kind of GPU: `h100-80gb`.

    The catalogue's key where the driver's name and size are of one of its cards. Else the name with a size: the one in
    the driver's name where it has one, since what can be used of 80 GB reads 79.1 or 79.6 GiB, by driver, and a
    learned factor must survive a new driver. A slice of a GPU has its own size last in its name.

    Args:
        name: What the driver calls it.
        total_bytes: What it shows of it.
    """
    least, most = _SHOWN
    found = [
        card
        for card in _spelled(_words(name))
        if least * card.nominal_gb <= total_bytes / GIB <= most * card.nominal_gb
    ]
    if len(found) == 1:
        return found[0].key
    sizes = re.findall(r"(\d+)gb\b", name.lower())
    return f"{_slug(name)}-{int(sizes[-1]) if sizes else max(1, round(total_bytes / GIB))}gb"


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if not _NO_NAME.fullmatch(word)]


def _spelled(words: list[str]) -> list[Card]:
    """Finds the cards whose name these words are, with a size or without."""
    compact = "".join(words)
    return [card for card in CARDS if compact in _spellings(card)]


def _spellings(card: Card) -> Iterator[str]:
    yield "".join(re.findall(r"[a-z0-9]+", card.key))
    for name in card.spellings:
        yield name
        yield from (f"{name}{size}{unit}" for size in (card.nominal_gb, *card.also_gb) for unit in _GIGABYTE)


def _slug(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if not _NO_KIND.fullmatch(word)) or "gpu"
