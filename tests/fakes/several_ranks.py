"""Several real processes on this machine that train together, connected by gloo over loopback."""

import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from can_train.errors import CanTrainError
from can_train.training.distributed import RankPlace, Ranks, join_ranks
from fakes.processes import TIMEOUT_S, keep_imports, quick_context

RankFunction = Callable[..., None]
"""A function that each rank runs, with its ranks and a folder."""


def run_ranks(size: int, function: RankFunction, folder: Path, **options: Any) -> list[int]:
    """Runs a function on `size` ranks; returns their exit codes. Text of an error is in `error-<rank>.txt`."""
    processes = start_ranks(size, function, folder, **options)
    deadline = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not stuck, f"ranks {stuck} waited for ever"
    return [process.exitcode if process.exitcode is not None else 0 for process in processes]


def start_ranks(size: int, function: RankFunction, folder: Path, **options: Any) -> list[BaseProcess]:
    """Starts them. They come from a process that has imported torch already, which takes seconds."""
    context = quick_context()
    port = free_port()
    processes = []
    for rank in range(size):
        place = RankPlace(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port)
        processes.append(context.Process(target=_rank, args=(place, function, folder, options)))
        processes[-1].start()
    return list(processes)


def error_text(folder: Path, rank: int) -> str:
    return (folder / f"error-{rank}.txt").read_text()


def _rank(place: RankPlace, function: RankFunction, folder: Path, options: dict[str, Any]) -> None:
    keep_imports()
    try:
        function(join_ranks(place, "cpu") if place.size > 1 else Ranks(), folder, **options)
    except CanTrainError as error:
        # As the command line does.
        (folder / f"error-{place.rank}.txt").write_text(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
