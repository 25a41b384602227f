"""The figures of every configuration, without its runs: an overview that needs no run again once it was summarized.

Like the index of the observations, what is remembered can be deleted at any time.
"""

import zlib
from pathlib import Path
from typing import Final

import msgspec

from can_train import __version__
from can_train.factors.observations import Records
from can_train.factors.summary import FactorFigures, summarize
from can_train.io.index import INDEX_FROM, index_folder, recall, remember

_FILE: Final = "figures"


class _Remembered(msgspec.Struct):
    made_by: str  # the version, and the events in force
    keys: dict[str, tuple[int, list[FactorFigures]]]  # with the digest of the observations that the figures are of


def read_figures(state: Path, records: Records, *, remember_from: int = INDEX_FROM) -> list[FactorFigures]:
    """Returns the figures of every configuration on every kind of device, by key, then by device.

    Args:
        state: The state folder.
        records: Its records.
        remember_from: Least number of runs whose summary is worth remembering.
    """
    path, made_by = index_folder(state) / _FILE, _made_by(records)
    earlier = recall(path, _Remembered)
    remembered = earlier.keys if earlier is not None and earlier.made_by == made_by else {}
    known = {key: figures for key, (digest, figures) in remembered.items() if records.keys.get(key) == digest}
    runs = records.of_keys(records.keys.keys() - known.keys())
    found: dict[str, list[FactorFigures]] = {}
    for summary in summarize(runs, records.events):
        # Events alone make figures of the keys that they name, also where those of their runs are known.
        found.setdefault(summary.key, []).append(summary.figures)
    found |= known
    if len(runs) >= remember_from:
        remember(path, _Remembered(made_by, {key: (digest, found[key]) for key, digest in records.keys.items()}))
    return [one for key in sorted(found) for one in found[key]]


def _made_by(records: Records) -> str:
    # The arithmetic may change without the version while someone works on it.
    changed = max(path.stat().st_mtime_ns for path in Path(__file__).parent.glob("*.py"))
    return f"{__version__} {changed} {zlib.crc32(repr(records.events).encode(errors='replace'))}"
