"""A clock that jumps by ten years between operations of the factor store, and two hosts that write into one state
folder and are killed.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any, Final

from bench.chaos_cases import Attack
from can_train.factors.observations import Device, Observation, next_time, read_records, write_record
from can_train.factors.store import FactorStore
from can_train.io import records
from can_train.runs.registry import Registry, RunRecord

_YEARS_S: Final = 10 * 365.25 * 86_400
_JUMPS_S: Final = (
    -_YEARS_S, -_YEARS_S, -86_400.0, -3_600.0, -1.0, 0.0, 0.0, 1.0, 3_600.0, 86_400.0, _YEARS_S, _YEARS_S,
)  # fmt: skip
_JUST_NOW_S: Final = 60.0
_SHIFT_S: Final = 10 * 86_400.0
_OPERATIONS: Final = 8
_KEY: Final = "synthetic_gat_student_normal"
_DEVICE: Final = Device(key="gpu", name="gpu", total_bytes=2**30)
_WRITES: Final = 12  # of a process
_KILLS: Final = 0.1  # of the acknowledged records
_CONTEXT: Final = get_context("fork")


class _Clock(datetime):
    """Replaces `datetime` in can-train's modules: its `now` is shifted."""

    shift_s = 0.0

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(datetime.now(UTC).timestamp() + cls.shift_s, tz)


def prepare_clock(place: Path) -> None:
    """Gives can-train's modules a clock that can be shifted."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("can_train.") and getattr(module, "datetime", None) is datetime:
            vars(module)["datetime"] = _Clock


def clocks(number: int, dice: Random, place: Path) -> str:
    """Does operations of a store at times that jump; each counts as later than all before it."""
    state = place / "state"
    rmtree(state, ignore_errors=True)
    store, done, operations = FactorStore(state), [], []
    for step in range(_OPERATIONS):
        # Never the real time, so that times that a writer set can be told from the file system's.
        _Clock.shift_s = dice.choice(_JUMPS_S) + _SHIFT_S
        operation = "run" if not step else dice.choice(("run", "run", "pin", "unpin", "reset"))
        operations.append(operation)
        done.append(f"{operation} at {_Clock.shift_s - _SHIFT_S:+.0f} s")
        before = {*state.rglob("*.json")}
        _do(operation, store, step)
        for path in {*state.rglob("*.json")} - before:
            # The file system follows the shifted clock, unless the writer set a time.
            if abs(path.stat().st_mtime - time.time()) < _JUST_NOW_S:
                now_s = _Clock.now(UTC).timestamp()
                os.utime(path, (now_s, now_s))
        (summary,) = (record for record in store.records() if record.device == _DEVICE.key)
        if summary.state != (expected := _expected(operations)):
            return f"{summary.state}, not {expected}, after {', '.join(done)}"
        if set_aside := [record for record in read_records(state).set_aside if not record.is_read]:
            return f"set aside: {set_aside}, after {', '.join(done)}"
    return ""


def _do(operation: str, store: FactorStore, step: int) -> None:
    match operation:
        case "run":
            write_record(store.state, _observation(store.state, f"run-{step}"))
        case "pin":
            store.pin(_KEY, 0.25)
        case "unpin":
            store.unpin(_KEY)
        case _:
            store.reset(_KEY)


def _expected(operations: Sequence[str]) -> str:
    """Returns the store's expected state: a pin holds until it is removed; after a reset only a new run teaches."""
    pins = [operation for operation in operations if operation in ("pin", "unpin")]
    if pins[-1:] == ["pin"]:
        return "pinned"
    last = [operation for operation in operations if operation in ("run", "reset")][-1]
    return "learned" if last == "run" else "reset"


def _observation(state: Path, run_id: str) -> Observation:
    moment = next_time(state)
    return Observation(
        run_id=run_id, attempt=1, key=_KEY, size="student", device=_DEVICE, start_time=moment, end_time=moment,
        outcome="ok", factor=0.5, factor_reason="", capacity_bytes=10**9, peak_allocated_bytes=4 * 10**8,
        tuned_limit=10**8, safe_limit=5 * 10**7, used=0.5, logical_batch=8, largest_micro_batch=8,
        binding_limit="requested",
    )  # fmt: skip


def hosts(number: int, dice: Random, place: Path) -> str:
    """Has processes of two hosts write records of all kinds into one folder, and kills some."""
    state = place / "state"
    rmtree(state, ignore_errors=True)
    running = [_start(state, host, writer, dice.random()) for host in ("one", "two") for writer in range(2)]
    acknowledged: list[str] = []
    pipes = dict(running)
    while pipes:
        for pipe in wait([*pipes]):
            assert isinstance(pipe, Connection)
            try:
                acknowledged.append(pipe.recv())
            except EOFError:
                pipes.pop(pipe).join()
                continue
            if dice.random() < _KILLS:
                pipes[pipe].kill()
    log = read_records(state)
    if log.set_aside:
        return f"set aside: {log.set_aside}"
    names = {record.run_id for record in log.finished} | {path.name for path in (state / "runs").glob("*")}
    names |= {path.name for path in (state / "events").glob("*.json")}
    if lost := [name for name in acknowledged if name not in names]:
        return f"acknowledged and lost: {lost}"
    registered = {record.run_id for record in Registry(state).runs()}
    if lost := [name for name in acknowledged if name.startswith("entered") and name not in registered]:
        return f"acknowledged and not listed: {lost}"
    return ""


def _start(state: Path, host: str, writer: int, seed: float) -> tuple[Connection, Any]:
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_write, args=(state, f"{host}-{writer}", host, seed, theirs))
    process.start()
    theirs.close()
    return ours, process


def _write(state: Path, name: str, host: str, seed: float, pipe: Connection) -> None:
    records.this_host = lambda: host
    os.environ |= {"SLURMD_NODENAME": host, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dice, store = random.Random(seed), FactorStore(state)
    for number in range(_WRITES):
        run_id = f"{name}-{number}"
        match dice.randrange(4):
            case 0:
                run_id = store.pin(_KEY, 0.5).name
                store.refresh_export()
            case 1:
                run_id = f"entered-{run_id}"
                Registry(state).add(RunRecord(run_id=run_id, path=str(state / run_id), key=_KEY, time=next_time(state)))
            case _:
                write_record(state, _observation(state, run_id))
        pipe.send(run_id)


ATTACKS: Final = (
    Attack("clocks", f"{_OPERATIONS} operations of the factor store; between them the clock jumps, by up to ten years",
           clocks, 2_000, 100, prepare_clock),
    Attack("hosts", "four processes of two hosts that write into one state folder and are killed", hosts, 100, 5),
)  # fmt: skip
