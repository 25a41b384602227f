"""Command lines in real processes, forked from one that has imported already what takes seconds to import."""

import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from can_train.cli import output
from can_train.cli.main import run

TIMEOUT_S = 300
"""Longest training, on a machine that does other things too."""

_COSTLY = [
    "can_train.cli.train", "can_train.config.compose", "can_train.report.page", "can_train.slurm.submit",
    "can_train.training.train", "can_train_tasks.can.models", "pydantic", "rich.progress", "sklearn.ensemble",
    "sklearn.pipeline", "torch._dynamo", "torch.distributed", "torch.onnx", "torch.profiler", "typer.completion",
]  # fmt: skip
"""Not polars: it has threads once it is imported, and a fork has none of them."""


def quick_context() -> ForkServerContext:
    """Processes that begin at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_COSTLY)
    return context


def keep_imports() -> None:
    """Has no garbage collection of this process look at all that was imported, which takes a fifth of a second each
    time: there is one after each out-of-memory and each trial of a search.
    """
    gc.freeze()


class Command:
    """`can-train` with some words, at work until it ends or is killed.

    Args:
        words: The command line.
        folder: Where it works; the current folder by default.
        variables: Its environment; that of this process by default.
        streams: Descriptors of its standard input, output and error, where they are not to be read at its end.
        entry: What is called in place of `can-train`, a function of a module below `fakes`.
        python: The Python that it starts others with; that of this process by default.
    """

    def __init__(
        self,
        *words: str,
        folder: Path | None = None,
        variables: dict[str, str] | None = None,
        streams: dict[int, int] | None = None,
        entry: Callable[[], None] = run,
        python: Path | None = None,
    ) -> None:
        self._streams = TemporaryDirectory(prefix="can-train-streams-")
        given = {number: _Descriptor(descriptor) for number, descriptor in (streams or {}).items()}
        place = (self._streams.name, given, folder or Path.cwd(), dict(variables or os.environ), python)
        self._process = quick_context().Process(target=_run, args=(entry, words, *place))
        self._process.start()

    def __enter__(self) -> "Command":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._streams.cleanup()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait(self) -> int:
        """Waits for its end; returns the exit status, that of a signal negative."""
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode is not None, f"still at work after {TIMEOUT_S} s\n{self.stderr}"
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def stdout(self) -> str:
        return self._written("stdout")

    @property
    def stderr(self) -> str:
        return self._written("stderr")

    def _written(self, name: str) -> str:
        path = Path(self._streams.name, name)
        return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class _Descriptor:
    """A descriptor on its way to a new process, where it is the number of its duplicate."""

    number: int

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _duplicate, (DupFd(self.number),)


def _duplicate(received: Any) -> int:
    return int(received.detach())


def run_job() -> None:
    """Does what the script of a job does: goes on with the run whose folder is the only word."""
    from can_train.cli.train import continue_in_job
    from can_train.slurm.job import Job

    Job(continue_in_job, sys.argv[1])()


def _run(
    entry: Callable[[], None], words: tuple[str, ...], streams: str, given: dict[int, int], folder: Path,
    variables: dict[str, str], python: Path | None,
) -> None:  # fmt: skip
    keep_imports()
    sys.executable = str(python or sys.executable)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if number not in given:
            opened = os.open(Path(streams, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, number)
            os.close(opened)
    for number, descriptor in given.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    # Streams that know what they are now: the server's were a file's, or a terminal's.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = ["can-train", *words]
    entry()


# A program in place of Python


PYTHON = """#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1:3] != ["-P", "-m"] or not sys.argv[3:]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
forwarded = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[3:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
answers = server.makefile()
pid = int(answers.readline())
for number in forwarded:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
status = int(answers.readline())
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
"""Asks the server for a module that is called as `-P -m MODULE WORDS`, and ends as that process does."""


_SERVER = "python with imports"


def running_children() -> list[BaseProcess]:
    """The processes that this one has started, without the server of `python_with_imports`."""
    return [child for child in multiprocessing.active_children() if child.name != _SERVER]


@contextmanager
def python_with_imports() -> Iterator[Path]:
    """A program that runs `-P -m MODULE` as Python does, in a process that has imported already, and anything else with
    Python itself.
    """
    with TemporaryDirectory(prefix="python-") as folder:
        program, address = Path(folder, "python"), Path(folder, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(64)
            given = _Descriptor(listener.fileno())
            server = quick_context().Process(name=_SERVER, target=_serve, args=(given, program))
            server.start()
        program.write_text(PYTHON.format(python=sys.executable, address=str(address)))
        program.chmod(0o700)
        yield program
        server.terminate()
        server.join()


def _serve(number: int, program: Path) -> None:
    """Answers calls, each in a process that waits for the one that does the work."""
    keep_imports()
    with socket.socket(fileno=number) as listener:
        listener.settimeout(5.0)
        parent = os.getppid()
        # The tests may have been killed.
        while os.getppid() == parent:
            with suppress(TimeoutError):
                call, _ = listener.accept()
                with call:
                    multiprocessing.get_context("fork").Process(target=_answer, args=(call, program)).start()


def _answer(call: socket.socket, program: Path) -> None:
    length, streams, _, _ = socket.recv_fds(call, 8, 3)
    with call.makefile("rb") as request:
        words, folder, variables = json.loads(request.read(int.from_bytes(length, "big")))
    given = dict(enumerate(streams))
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(_run_module, words, "", given, Path(folder), variables, program)
    )
    process.start()
    for stream in streams:
        os.close(stream)
    call.sendall(f"{process.pid}\n".encode())
    if call in wait([call, process.sentinel]):
        # Who called has been killed.
        process.kill()
    process.join()
    with suppress(BrokenPipeError):
        call.sendall(f"{process.exitcode}\n".encode())


def _run_module() -> None:
    del sys.argv[0]
    output.print_starting = _without_torch(output.print_starting)
    # As in a new process; `_run` has read the variables.
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _without_torch(print_starting: Callable[[output.Verbosity], None]) -> Callable[[output.Verbosity], None]:
    """Prints the line that a new process prints before it loads PyTorch."""

    def print_as_new(verbosity: output.Verbosity = output.Verbosity.NORMAL) -> None:
        output.print_starting = print_starting
        torch = sys.modules.pop("torch")
        print_starting(verbosity)
        sys.modules["torch"] = torch

    return print_as_new
