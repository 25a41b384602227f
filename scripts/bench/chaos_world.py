"""The folder that is attacked, with a task, two finished runs of it and their observations; and how a command line is
judged there.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import stat
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.chaos_cases import escaped
from can_train.cli.main import main
from can_train.errors import DOES_NOT_FIT, GREW

TASK: Final = """
import torch
from torch import nn

import can_train


class Tiny(can_train.Task):
    training = {"lr": 0.01, "lr_batch_size": 8, "epochs": 2, "checkpoint_every": 2}

    def datasets(self):
        points = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        samples = [(point, int(point[0] > 0)) for point in points]
        return {"train": samples[:24], "validation": samples[24:32], "test": samples[32:]}

    def model(self):
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def loss(self, model, batch):
        points, labels = batch
        return {"class": (nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels))}

    def metrics(self, model, batch):
        points, labels = batch
        return {"accuracy": ((model(points).argmax(1) == labels).sum(), len(labels))}
"""
WORDS: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("chaos.toml").read_text(encoding="utf-8"))
TRAIN: Final = ("--task", "tiny.py:Tiny", "--device", "sim:64MiB")
KEY: Final = "tiny"
HANG_S: Final = 20
"""Seconds of processor time after which a command line hangs."""
WAIT_S: Final = 6 * HANG_S
"""Seconds after which a waiting command line hangs: other processes may have the processors meanwhile."""

_SCHEDULERS: Final = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "srun")
_TRACEBACK: Final = "Traceback (most recent call last)"
_TIMERS: Final = ((signal.SIGPROF, signal.ITIMER_PROF, HANG_S), (signal.SIGALRM, signal.ITIMER_REAL, WAIT_S))
_SIGNALS: Final = range(129, 193)


class Answer(NamedTuple):
    """The outcome of a command line."""

    words: Sequence[str]
    code: int
    out: str
    err: str
    escaped: str = ""  # the error that left the program, and would have been a traceback

    @property
    def failure(self) -> str:
        """Why the outcome is wrong for any command line; empty if it is not."""
        if self.escaped:
            return f"{self.escaped} of {list(self.words)}"
        if wrong := self._wrong():
            return f"{wrong} of {list(self.words)}: {self.err[-300:]!r}"
        return ""

    def _wrong(self) -> str:
        if _TRACEBACK in self.err + self.out:
            return "traceback"
        if self.code not in (0, 2, 3, GREW, DOES_NOT_FIT, *_SIGNALS):
            return f"exit code {self.code}"
        # Problems are the result of `doctor`.
        has_sentence = "error: " in self.err or "doctor" in self.words[:1]
        if self.code in (2, 3, GREW, DOES_NOT_FIT) and not has_sentence:
            return f"exit code {self.code} without a sentence"
        return "" if self._is_json_where_asked() else "no JSON on standard output"

    def _is_json_where_asked(self) -> bool:
        is_asked = "--json" in self.words and not {"-h", "--help", "--help-all", "--version"} & {*self.words}
        if not is_asked or not self.out.strip():
            return True
        try:
            json.loads(self.out)
        except ValueError:
            return False
        return True


class _Hang(BaseException):
    """Ends a command line that takes too long; no part of can-train catches it."""


def call(words: Sequence[str]) -> Answer:
    """Runs a command line in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="replace") for _ in range(2))
    code, wrong = 0, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for number, timer, seconds in _TIMERS:
            signal.signal(number, _raise_hang)
            signal.setitimer(timer, seconds)
        try:
            code = main(words)
        except BaseException as error:  # noqa: BLE001 - any of them would be a traceback
            wrong = escaped(error)
        finally:
            for _, timer, _ in _TIMERS:
                signal.setitimer(timer, 0)
    return Answer(words, code, _text(out), _text(err), wrong)


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


def _raise_hang(*_: object) -> None:
    raise _Hang(f"more than {HANG_S} s of processor time, or {WAIT_S} s")


class World:
    """A folder that command lines may change: it is made anew when they have.

    The process works in it and has its home there; no program of a scheduler is found from there.
    """

    def __init__(self, place: Path) -> None:
        self.folder, self._pristine = place / "world", place / "pristine"
        self.state, self.runs = self.folder / "state", self.folder / "runs"
        self.first_runs: list[Path] = []
        self._marks: dict[str, tuple[int, int, int]] = {}

    def make(self, more: Callable[[], None] = lambda: None) -> None:
        """Trains the runs, adds `more`, and has this process work in the folder."""
        programs = self.folder.parent / "programs"
        for name in _SCHEDULERS:
            programs.mkdir(parents=True, exist_ok=True)
            (programs / name).write_text("#!/bin/sh\nexit 1\n")
            (programs / name).chmod(0o755)
        self.folder.mkdir(exist_ok=True)
        os.environ |= {"HOME": str(self.folder / "home"), "CAN_TRAIN_HOME": str(self.state),
                       "CAN_TRAIN_CONFIG": os.devnull, "OMP_NUM_THREADS": "1",
                       "PATH": f"{programs}:{os.environ['PATH']}"}  # fmt: skip
        os.chdir(self.folder)
        # Nobody answers a question.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if not self._pristine.exists():
            shutil.rmtree(self.folder)
            (self.folder / "home").mkdir(parents=True)
            os.chdir(self.folder)
            (self.folder / "tiny.py").write_text(TASK)
            for seed in ("1", "2"):
                answer = call([*TRAIN, "--seed", seed])
                assert (answer.code, answer.failure) == (0, ""), answer
            self._add_oddities()
            more()
            # Whole or not at all: the process may be ended here, and another one go on.
            _copy(self.folder, self._pristine.with_suffix(".tmp"))
            self._pristine.with_suffix(".tmp").rename(self._pristine)
        self.restore()

    def _add_oddities(self) -> None:
        for name in ("zero", "full", "null"):
            # Links: a command that replaces a file would replace the device, as root.
            (self.folder / name).symlink_to(f"/dev/{name}")
        os.mkfifo(self.folder / "fifo")
        (self.folder / "loop").symlink_to("loop")
        (self.folder / "binary").write_bytes(bytes(range(256)) * 8)

    def restore(self) -> None:
        """Restores the folder, if it has changed."""
        if self._marks and self._marks == _marks(self.folder):
            return
        os.chdir(self._pristine)
        shutil.rmtree(self.folder, ignore_errors=True)
        _copy(self._pristine, self.folder)
        os.chdir(self.folder)
        self._marks = _marks(self.folder)
        self.first_runs = [path for path in self.runs.iterdir() if path.is_dir()]

    def lost(self) -> str:
        """Names an observation, event or checkpoint that has changed since the restore; returns "" if none has."""
        for name, mark in self._marks.items():
            if any(part in name for part in ("/observations/", "/events/", ".pt")):
                path = Path(f"{self.folder}{name}")
                if not path.exists() or _mark(path) != mark:
                    return f"{name} was lost or changed"
        return ""


@cache
def world_at(place: Path) -> World:
    """Returns the world of a worker's folder."""
    return World(place)


def _copy(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            _copy(path, target / path.name)
        elif stat.S_ISFIFO(mode):
            os.mkfifo(target / path.name)
        else:
            shutil.copy2(path, target / path.name, follow_symlinks=False)


def _marks(folder: Path) -> dict[str, tuple[int, int, int]]:
    paths = (Path(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files))
    return {str(path).removeprefix(str(folder)): _mark(path) for path in paths if "__pycache__" not in path.parts}


def _mark(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    # A folder's own time changes with temporary files in it.
    is_folder = stat.S_ISDIR(status.st_mode)
    return (status.st_mode, 0, 0) if is_folder else (status.st_mode, status.st_size, status.st_mtime_ns)
