"""The scores of single samples as a file that a person opens: CSV or Parquet, whole or not at all."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from can_train.errors import ConfigError, StateError
from can_train.state.atomic import open_atomic

_ENDINGS: Final = (".csv", ".parquet")


def check_score_file(path: Path) -> None:
    """Makes sure, before anything is scored, that scores can be written to a file.

    Raises:
        ConfigError: Its name has another ending, or its folder cannot be written.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError("Scores are written as CSV or Parquet, by the file's ending", value=str(path),
                          remedy=f"Name a file that ends in {' or '.join(_ENDINGS)}")  # fmt: skip
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is a folder" if path.is_dir() else "cannot be written" if folder.is_dir() else "is not there"
        raise ConfigError("The folder of the scores must be there, and writable",
                          value=f"{path if path.is_dir() else folder} {why}",
                          remedy="Make it, or name another file with --scores")  # fmt: skip


def check_is_no_data(path: Path, data: Iterable[Path]) -> None:
    """Makes sure that scores are not written over what they are scores of.

    Raises:
        ConfigError: The file is one of the data's.
    """
    if path.exists() and any(path.samefile(file) for file in data):
        raise ConfigError("Scores are not written over the data that are judged", value=str(path),
                          remedy="Name another file with --scores")  # fmt: skip


def write_score_file(path: Path, columns: Mapping[str, Any]) -> None:
    """Writes scores.

    Args:
        path: Ends in .csv or .parquet.
        columns: Cells by the column's name, None for one that is empty.

    Raises:
        StateError: The file cannot be written.
    """
    import polars as pl

    table = pl.DataFrame(columns)
    try:
        with open_atomic(path) as file:
            table.write_parquet(file) if path.suffix.lower() == ".parquet" else table.write_csv(file)
    # Polars tells in words of its own what the system refuses.
    except (OSError, pl.exceptions.PolarsError) as error:
        raise StateError("The scores cannot be written", value=f"{path}: {getattr(error, 'strerror', None) or error}",
                         remedy="Make room there, or name another file with --scores") from error  # fmt: skip
