"""Reads a log while it grows, across the jobs of a run: a job that is put back into the queue appends to its log, a run
that is submitted again gets a new one. Whether the run goes on, the caller finds out.
"""

import codecs
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from can_train.errors import RunError
from can_train.launch.survey import KnownRun, log_of
from can_train.state.registry import JobRecord

_RANK: Final = re.compile(r"_(\d+)_log\.(out|err)$")
"""submitit's names of logs end in the rank."""

_READ_BYTES: Final = 2**20


class GrowingLog:
    """A file that something else appends to.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def new_text(self) -> str:
        """Returns what has been appended since the last call; empty: nothing."""
        try:
            with self.path.open("rb") as handle:
                handle.seek(self._read)
                data = handle.read(_READ_BYTES)
        except OSError:
            return ""
        self._read += len(data)
        return self._decoder.decode(data)


def logs_of(jobs: Sequence[JobRecord], known: KnownRun, rank: int) -> list[Path]:
    """Names the logs of a run's jobs, the first one first, as one rank writes them.

    Raises:
        RunError: No job of the run has a log, or none has this rank.
    """
    paths = [log_of(job, known) for job in jobs if job.log_path]
    if not paths:
        raise RunError(
            "Only a submitted run has a log",
            value=known.run_id,
            remedy="What a run prints that trains in a terminal stays there; can-train status shows its state",
        )
    if not rank:
        return paths
    ranks = ranks_of(paths[-1])
    if rank not in ranks:
        listed = ", ".join(map(str, ranks)) or "0"
        raise RunError("No such rank has written a log yet", value=str(rank), remedy=f"Those that have: {listed}")
    return [path.with_name(_RANK.sub(rf"_{rank}_log.\2", path.name)) for path in paths]


def ranks_of(path: Path) -> list[int]:
    """Lists the ranks that write logs beside that of rank 0, and that one where it is there."""
    found = _RANK.search(path.name)
    if found is None:
        return [0] if path.is_file() else []
    beginning = path.name[: found.start()]
    others = [each.name for each in path.parent.glob("*_log.*") if each.name.startswith(f"{beginning}_")]
    matches = [_RANK.fullmatch(name.removeprefix(beginning)) for name in others]
    return sorted({int(match[1]) for match in matches if match})
