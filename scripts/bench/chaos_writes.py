"""Trainings and commands whose n-th write, rename or flush fails or is their last: a resumed training ends with the
weights of an undisturbed training, every acknowledged record is there, and nothing torn is read.
"""

import builtins
import errno
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from bench.chaos_cases import Attack, NoMoreCases
from bench.chaos_world import HANG_S, KEY, TRAIN, WAIT_S, Answer, World, call, world_at
from can_train.cli.main import main
from can_train.factors import observations
from can_train.factors.observations import Observation, read_records
from can_train.io.records import parse_document, write_document

_LINE: Final = (*TRAIN, "--micro-batch-size", "8")  # without a search for the largest batch, which writes nothing
_KILL: Final = "killed"
_TEAR: Final = "killed inside"
_ACTS: Final = (_KILL, _TEAR, errno.EIO, errno.ENOSPC, errno.EROFS)
"""Faults of an operation; the last two affect all later operations."""
_LASTING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_LINES: Final = (
    TRAIN, ("factors", "--reset", "--yes"), ("factors", KEY, "--pin", "0.5"), ("factors", KEY, "--unpin"),
    ("factors", "--export", "out.json"), ("factors", "--import", "state/batch_size_factors.json"),
    ("factors", KEY, "--plot", "out.svg"), ("report", "last"), ("evaluate", "last"), ("resume", "last"),
    ("resume", "last", "--epochs", "3"), ("resubmit", "last"), ("cancel", "last"), ("runs",), ("show", "last"),
    ("factors",), ("doctor",), (*TRAIN, "--dry-run"), (*TRAIN, "--submit", "--cluster", "debug"),
)  # fmt: skip
_MOST_OPERATIONS: Final = 60


class Faults:
    """Counts the writes, renames and flushes of this process below a folder; one operation goes wrong.

    Args:
        folder: The folder.
        at: Number of the operation, counted from 1; 0: none.
        act: One of `_ACTS`, or an error number.
    """

    def __init__(self, folder: Path, at: int = 0, act: str | int = _KILL) -> None:
        self.folder, self.at, self.act, self.done = str(folder), at, act, 0

    def install(self) -> None:
        """Replaces the functions of this process that write; for a process that ends soon."""
        for name in ("replace", "rename", "link", "fsync", "mkdir", "unlink"):
            setattr(os, name, self._counted(getattr(os, name), any_target=name == "fsync"))
        opened = self._opener(io.open)
        io.open = builtins.open = opened

    def count(self, half: Callable[[], Any] = lambda: None) -> None:
        """Counts an operation; `half` does a part of it."""
        self.done += 1
        if not self.at or self.done < self.at or (self.done > self.at and self.act not in _LASTING):
            return
        if isinstance(self.act, int):
            raise OSError(self.act, os.strerror(self.act), self.folder)
        if self.act == _TEAR:
            half()
        os.kill(os.getpid(), signal.SIGKILL)

    def _counted(self, function: Callable[..., Any], *, any_target: bool) -> Callable[..., Any]:
        def counted(target: Any, *more: Any, **named: Any) -> Any:
            if any_target or str(target).startswith(self.folder):
                self.count()
            return function(target, *more, **named)

        return counted

    def _opener(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        faults = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                faults.count(lambda: io.FileIO.write(self, bytes(data)[: len(data) // 2]))
                return super().write(data)

        def counting(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
            where = str(Path(file).absolute()) if isinstance(file, str | os.PathLike) else ""
            if not set("wax+") & {*mode} or not where.startswith(self.folder):
                return opened(file, mode, buffering, *more, **named)
            self.count()
            raw = Raw(where, mode.replace("b", "").replace("t", ""), opener=named.pop("opener", None))
            buffered: Any = raw if buffering == 0 else (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *more, **named)

        return counting


def run_apart(words: Sequence[str], faults: Faults, place: Path) -> Answer:
    """Runs a command line in a process forked from this one, with faults."""
    streams = [place / name for name in ("stdout", "stderr")]
    if (pid := os.fork()) == 0:
        _run(words, faults, streams, place)
    until = time.monotonic() + WAIT_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Answer(words, 0, "", "", f"still at work after {WAIT_S} s")
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == -signal.SIGPROF:
        return Answer(words, 0, "", "", f"more than {HANG_S} s of processor time")
    out, err = (stream.read_text(errors="replace") for stream in streams)
    return Answer(words, 128 - code if code < 0 else code, out, err)


def _run(words: Sequence[str], faults: Faults, streams: Sequence[Path], place: Path) -> None:
    code = 1
    try:
        for number, stream in enumerate(streams, 1):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until the process ends
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        signal.setitimer(signal.ITIMER_PROF, HANG_S)
        _acknowledge(place / "acknowledged")
        faults.install()
        code = main(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - printed, as Python would
        traceback.print_exc()
    finally:
        (place / "operations").write_text(str(faults.done))
        sys.stdout.flush()
        os._exit(code)


def _acknowledge(file: Path) -> None:
    """Notes each record, in a way that no fault disturbs, once its writer returns."""
    write, descriptor = write_document, os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def written(path: Path, record: Any) -> None:
        write(path, record)
        os.write(descriptor, f"{path}\n".encode())

    setattr(observations, "write_document", written)  # noqa: B010 - the module imported it


def prepare(place: Path) -> None:
    """Trains undisturbed once, and notes the weights and the number of operations."""
    world = world_at(place)
    world.make()
    answer = run_apart(_LINE, Faults(world.folder), place)
    assert (answer.code, answer.failure) == (0, ""), answer
    (place / "total").write_text((place / "operations").read_text())
    (place / "weights").write_text(_weights(_new_run(world)))


def training(number: int, dice: Random, place: Path) -> str:
    """Disturbs a training at one operation, and resumes it."""
    world = world_at(place)
    world.restore()
    cases = [(at, act) for at in range(1, int((place / "total").read_text()) + 1) for act in _ACTS]
    if number >= len(cases):
        raise NoMoreCases
    # Mixed, so that the first few cases are of all kinds.
    at, act = Random(0).sample(cases, len(cases))[number]
    answer = run_apart(_LINE, Faults(world.folder, at, act), place)
    wrong = answer.failure or _damage(world, place) or _resume(world, place, answer)
    return f"operation {at}, {act}: {wrong}" if wrong else ""


def _damage(world: World, place: Path) -> str:
    """Names records that are torn, lost, or no longer listed."""
    records = read_records(world.state)
    if records.set_aside:
        return f"set aside: {records.set_aside}"
    for line in (place / "acknowledged").read_text().splitlines():
        try:
            if not line.endswith(".started.json") and "/observations/" in line:
                parse_document(Path(line).read_bytes(), Observation)
            elif not (Path(line).exists() or Path(line.replace(".started.json", ".json")).exists()):
                return f"{line} was acknowledged and is not there"
        except (OSError, ValueError) as error:
            return f"{line} was acknowledged: {error}"
    for name in ("runs", "factors"):
        words = [name, "--json"]
        answer = call(words)
        if answer.failure or answer.code:
            return answer.failure or f"{words} answers {answer.code}: {answer.err}"
    return world.lost()


def _resume(world: World, place: Path, before: Answer) -> str:
    """Says how the end of a disturbed training differs from an undisturbed training's."""
    run = _new_run(world)
    if run is None or not (run / "config.yaml").exists():
        # Nothing was begun that could be resumed, so the line is typed once more.
        answer = run_apart(_LINE, Faults(world.folder), place)
        run = _new_run(world)
    else:
        answer = run_apart(["resume", str(run)], Faults(world.folder), place)
        if answer.code == 2 and "--trust-code" in answer.err:
            # It ended before it was entered into the list of runs, so its owner is uncertain.
            answer = run_apart(["resume", str(run), "--trust-code"], Faults(world.folder), place)
    if answer.failure or answer.code:
        return f"after {before.code} it does not go on: {answer.failure or answer.err[-300:]}"
    if _weights(run) != (place / "weights").read_text():
        return f"after {before.code} and a resume the weights are others"
    return _damage(world, place)


def _new_run(world: World) -> Path | None:
    """Returns the newest run since the restore, a run with a configuration if there is one."""
    old = {path.name for path in world.first_runs}
    new = sorted(path for path in world.runs.iterdir() if path.name not in old and path.is_dir())
    return max(new, key=lambda path: (path / "config.yaml").exists(), default=None)


def _weights(run: Path | None) -> str:
    """Returns a digest of the weights after the last step and of the best weights."""
    import hashlib

    from can_train.training.loading import Checkpoints

    assert run is not None
    state = Checkpoints(run / "checkpoints").newest()
    assert state is not None
    values = [value.numpy().tobytes() for part in ("model", "best") for _, value in sorted(state[part].items())]
    return hashlib.sha256(b"".join(values)).hexdigest()


def command(number: int, dice: Random, place: Path) -> str:
    """Runs a command on a disk that becomes full or read-only."""
    world = world_at(place)
    world.restore()
    words, act = dice.choice(_LINES), dice.choice(_LASTING)
    at = dice.choice((1, 1, 1, 2, 3, dice.randrange(1, _MOST_OPERATIONS)))
    answer = run_apart(words, Faults(world.folder, at, act), place)
    wrong = answer.failure or _damage(world, place)
    return f"from operation {at} on {os.strerror(act)}: {wrong}" if wrong else ""


ATTACKS: Final = (
    Attack("writes", "a training and one of its writes, renames and flushes: killed, failed, full or read-only from "
           "there; then resumed", training, 10**6, 4, prepare),
    Attack("disk", "commands on a disk that becomes full or read-only", command, 1_000, 8,
           lambda place: world_at(place).make()),
)  # fmt: skip
