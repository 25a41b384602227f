"""Command lines in real processes, forked from one that has imported already what takes seconds to import."""

import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from can_train.cli.main import run

TIMEOUT_S = 300
"""Longest training, on a machine that does other things too."""

_COSTLY = ["torch.distributed", "torch_geometric.nn", "sklearn.pipeline", "can_train.config.compose",
           "can_train.training.train"]  # fmt: skip


def quick_context() -> ForkServerContext:
    """Processes that begin at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_COSTLY)
    return context


class Command:
    """`can-train` with some words, at work until it ends or is killed; its streams are read when it has ended."""

    def __init__(self, *words: str) -> None:
        self._streams = TemporaryDirectory(prefix="can-train-streams-")
        place = (self._streams.name, Path.cwd(), dict(os.environ))
        self._process = quick_context().Process(target=_run, args=(words, *place))
        self._process.start()

    def __enter__(self) -> "Command":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._streams.cleanup()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait(self) -> int:
        """Waits for its end; returns the exit status, that of a signal negative."""
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode is not None, f"still at work after {TIMEOUT_S} s\n{self.stderr}"
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def stderr(self) -> str:
        path = Path(self._streams.name, "stderr")
        return path.read_text() if path.exists() else ""


def _run(words: tuple[str, ...], streams: str, folder: Path, variables: dict[str, str]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(Path(streams, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv[1:] = words
    run()
