"""Follows a `can-train` line to its first optimizer step, and prints which files of the package a reader opens on the
way.

Run as a script: `python first_step.py --model gat ...`. The last line printed is JSON: the files that hold the
functions on the call stack at the first step (`stack`), those a reader opens to understand them (`opened`: what these
functions
call, and what is called by those in turn), and all files in which any function ran (`run`).
"""

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from types import CodeType, FrameType

from torch.optim.optimizer import register_optimizer_step_pre_hook

Function = tuple[str, str]
"""File within `src/`, of the launcher without its package, and qualified name."""

SOURCES = f"{os.sep}src{os.sep}"
CO_OPTIMIZED = 1
"""Set in the code of functions, not of modules and class bodies."""

calls: dict[Function | None, set[Function]] = defaultdict(set)


def function_of(code: CodeType) -> Function | None:
    path = code.co_filename.partition(SOURCES)[2].removeprefix(f"can_train{os.sep}")
    # A comprehension outside any function (`<genexpr>`) runs when its module is imported.
    is_function = code.co_flags & CO_OPTIMIZED and not code.co_qualname.startswith("<")
    return (path, code.co_qualname) if path and is_function else None


def callers(frame: FrameType | None) -> Iterable[Function]:
    while frame is not None:
        if found := function_of(frame.f_code):
            yield found
        frame = frame.f_back


def record(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and (called := function_of(frame.f_code)):
        calls[next(iter(callers(frame.f_back)), None)].add(called)


def files(functions: Iterable[Function]) -> list[str]:
    return sorted({path for path, _ in functions})


def report(*_: object) -> None:
    stack = set(callers(sys._getframe()))
    # Probes measure an optimizer before training: theirs is not the first step of the run.
    if not any(path == "training/train.py" for path, _ in stack) or any("measure" in name for _, name in stack):
        return
    sys.setprofile(None)
    opened = set(stack)
    for _ in range(2):
        opened |= {called for function in opened for called in calls[function]}
    everything = {function for found in calls.values() for function in found}
    print("\n" + json.dumps({"stack": files(stack), "opened": files(opened), "run": files(everything)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    register_optimizer_step_pre_hook(report)  # type: ignore[no-untyped-call]
    threading.setprofile(record)
    sys.setprofile(record)
    from can_train.cli.main import run

    run()
