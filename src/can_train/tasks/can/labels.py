"""Which attack a label text means: the tables of attack kinds that grow while a log, and a data set, is read."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train.tasks.can.frames import BENIGN

ATTACK_WORDS: Final = frozenset(
    {"1", "t", "true", "yes", "attack", "attacked", "anomaly", "anomalous", "malicious", "injected"}
)
"""Labels that say that a frame is an attack, and not which one."""

MAX_KINDS: Final = 256
"""Codes are bytes. A label column with more values is no label column."""


class AttackKinds:
    """Turns label texts into codes, and remembers what each code means.

    Args:
        benign_values: Label values that mean: no attack; letter case does not matter.
        unnamed: The kind of attacks whose label does not name one.
    """

    def __init__(self, benign_values: Iterable[str], unnamed: str) -> None:
        self.names = [BENIGN]
        """Kinds by code; 0 is benign."""
        self._benign = {value.casefold() for value in benign_values}
        self._unnamed = unnamed

    def codes(self, labels: pl.Series, names: pl.Series | None = None, *, several: bool = False) -> NDArray[np.uint8]:
        """Looks up codes, and gives new kinds new ones.

        Args:
            labels: [M] texts.
            names: [M] what attacks are called, where a second column says so; it makes no frame an attack.
            several: Whether a label is a list of words, any of which may tell of an attack.

        Returns:
            [M] codes.

        Raises:
            DataError: There are more kinds than codes.
        """
        if names is not None:
            nameless = self._is_benign(labels) | self._is_benign(names)
            labels = names.zip_with(~nameless, labels)
        texts = labels.unique().sort().to_list()
        codes = [max(self._code(word) for word in (text.split() if several else [text])) for text in texts]
        return labels.replace_strict(texts, codes, return_dtype=pl.UInt8).to_numpy()

    def _is_benign(self, texts: pl.Series) -> pl.Series:
        return texts.is_in([text for text in texts.unique().to_list() if _canonical(text) in self._benign])

    def _code(self, text: str) -> int:
        word = _canonical(text)
        if word in self._benign:
            return 0
        name = self._unnamed if word in ATTACK_WORDS else word
        if name not in self.names:
            if len(self.names) == MAX_KINDS:
                raise DataError(
                    f"A log has at most {MAX_KINDS - 1} kinds of attack",
                    value=f"{name!r} would be one more",
                    remedy="Name the label column with `--set dataset.columns.label=...`",
                )
            self.names.append(name)
        return self.names.index(name)


class KindTable:
    """The attack kinds of a data set, met log by log.

    Attributes:
        names: Kinds by code; 0 is benign.
    """

    def __init__(self) -> None:
        self.names = [BENIGN]

    def codes(self, reader_kinds: Sequence[str]) -> NDArray[np.uint8]:
        """Returns the data set's code for each of a reader's; kinds not seen before are added.

        Raises:
            DataError: There are more kinds than codes.
        """
        self.names += [kind for kind in reader_kinds if kind not in self.names]
        if len(self.names) > MAX_KINDS:
            raise DataError(
                f"A data set may name at most {MAX_KINDS - 1} kinds of attack",
                value=f"{len(self.names) - 1}",
                remedy="Name the column that holds the label: --set dataset.columns.label=…",
            )
        return np.array([self.names.index(kind) for kind in reader_kinds], dtype=np.uint8)


def _canonical(text: str) -> str:
    """Letter case, quotes and blanks do not matter, and 1.0 is 1."""
    word = text.strip(' \t\r"').casefold()
    try:
        number = float(word)
    except ValueError:
        return word
    return str(int(number)) if number.is_integer() else word
