"""Random command lines: the real commands and flags with hostile values, in this process and as processes."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import can_train.cli.main
import can_train.cli.pipeline
import can_train.cli.train
from bench.chaos_cases import Attack
from bench.chaos_world import HANG_S, KEY, WAIT_S, WORDS, Answer, World, call, world_at
from can_train.cli.main import _ARGUMENTS, _COMMANDS, _parser

_HOSTILE_SHARE: Final = 0.6  # of the values
_FULL_SHARE: Final = 0.05  # of the processes; their standard output is a full disk

HOSTILE: Final = (
    "", " ", "\t", "\n", "a\nb", "a" * 256, "é" * 128, "x" * 5_000, "\udcff\udcfe", "\x01\x1b[31m\x7f",
    "\u202eevil\u202c", "\u200b", "😀", "ﬀ", "İ", "١٢٣", "[bold]", "[/x]", "[/]", "[link=x]y[/link]", "{", "}", "{}",
    "{0}", "{x}", "%s", "%", "%(x)s", "\\", "\\n", ".", "..", "../x", "./", "~", "~nobody", "~/x", "$(id)", "`id`",
    "$HOME", "${HOME}", "*", "?", ";", "|", "&", "#", "!", "'", '"', "-", "--", "-1", "-0", "0", "00", "1", "2",
    "3.5", "1e3", "1e308", "1e309", "-1e308", "1e-320", "nan", "inf", "-inf", "NaN", "1_000", "0x10", "0b1", "1j",
    "9" * 30, "9" * 400, "-" + "9" * 30, "9" * 5_000, str(2**31), str(2**53 + 1), str(2**63), str(2**64), "1,2", ",",
    ",,", "a,", ",a", "1/0", "1:30:00", "99:99:99", "-1:00", "12h", "1e9h", "16G", "-1G", "1e30G", "0", "None",
    "null", "true", "False", "on", "off", "auto", "max", "last", "all", "!!python/object/apply:os.system ['x']",
    "!!binary |", "!!set {a}", "&a *a", "a: b", "- x", "---", "key=value", "=", "a=", "=b", "a==b", "a=[", "a={",
    "a=(", "a='", "${", "${x}", "${training.lr}", "${oc.env:HOME}", "${oc.env:NOBODY}", "${now:%Y}", "choice(1,2)",
    "range(0,10)", "range(0,1000000000)", "interval(0,1)", "glob(*)", "[" * 200, "[" * 3_000, "{a:" * 300,
    "(" * 2_000, "shuffle(1,2,3)", "int(x)", "sort(3,2)", "zero", "full", "null", "loop", "binary", "fifo", "home",
    "runs", "state", "tiny.py", "tiny.py:", "tiny.py:Tiny", "tiny.py:torch", "tiny.py:nothing", "nothing.py:X", ":",
    "::", "os:system", "json:JSONDecoder", "binary:X", "runs:X", "cpu", "cuda", "cuda:99", "cuda:-1", "cuda:1e9",
    "sim:", "sim:0", "sim:-1GiB", "sim:nan", "sim:infGiB", "sim:1e30TiB", "sim:64MiB", "sim:1", "/proc/self/mem",
    "/proc/1/environ", "/nowhere/at/all", "/" + "d/" * 2_000,
)  # fmt: skip

_NUMBERS: Final = ("1", "2", "8", "0.5", "0.001", "64")
_NAMES: Final = ("train", *_COMMANDS, "after-job", "complete-line")


class Flag(NamedTuple):
    """An option of a command."""

    names: tuple[str, ...]
    takes_value: bool


@cache
def flags_of(command: str) -> tuple[Flag, ...]:
    """Reads the options of a command from its parser."""
    options = [option for option in _parser(command).params if option.param_type_name == "option"]
    return tuple(Flag((*option.opts, *option.secondary_opts), not option.is_flag) for option in options)


def draw_line(dice: Random, *, dry: bool) -> list[str]:
    """Draws a command line; with `dry`, a line that trains and submits nothing."""
    weights = [WORDS["weights"].get(name, 7) for name in _NAMES]
    (command,) = dice.choices(_NAMES, weights)
    if command == "complete-line":
        return [command, *(dice.choice((*HOSTILE, *_NAMES, "--mo", "--set")) for _ in range(dice.randrange(4)))]
    words = [] if command == "train" else [command if dice.random() < 0.99 else _misspelt(command, dice)]
    words += _arguments(command, dice)
    if command == "train":
        data, models = ["--dataset", "synthetic"], (["--task", "tiny.py:Tiny"], ["--model", "gat"])
        words += data if dice.random() < 0.3 else dice.choice(models)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 2, 3, 6))):
        words += _option(command, dice)
    if command == "demo":
        words.append(f"no{dice.choice(HOSTILE)}")
    if dice.random() < 0.03 and words:
        dice.shuffle(words)
    if dry and command in ("train", "pipeline", "resubmit"):
        words.append("--dry-run")
    return words


def _arguments(command: str, dice: Random) -> list[str]:
    shown = _ARGUMENTS.get(command, "")
    given = dice.choice((0, 1, 1, 1, 1, 2)) if shown else int(dice.random() < 0.03)
    likely = {"[KEY]": (KEY, "tin"), "SHELL": ("bash", "zsh", "fish")}.get(shown, ("last", "tiny", "2026", "last"))
    return [_value(dice, likely) for _ in range(given)]


def _option(command: str, dice: Random) -> list[str]:
    flags = flags_of(command)
    flag = dice.choice(flags) if flags else Flag(("--help",), False)
    name = dice.choice(flag.names)
    if dice.random() < 0.1:
        name = dice.choice((name.replace("-", "_"), name.upper(), name[:-1], _misspelt(name, dice)))
    if not flag.takes_value:
        return [name if dice.random() < 0.9 else f"{name}={dice.choice(HOSTILE)}"]
    if name == "--set":
        setting = dice.choice(WORDS["settings"])
        value = setting + dice.choice(("=", "=", "=", "", "+=", "==")) + _value(dice, _NUMBERS)
    else:
        value = _value(dice, WORDS["plausible"].get(name, _NUMBERS))
    if dice.random() < 0.02:
        return [name]
    return [f"{name}={value}"] if dice.random() < 0.4 else [name, value]


def _value(dice: Random, likely: Sequence[str]) -> str:
    value = dice.choice(HOSTILE if dice.random() < _HOSTILE_SHARE else likely)
    if dice.random() < 0.05:
        value = _misspelt(value, dice)
    return value


def _misspelt(text: str, dice: Random) -> str:
    place = dice.randrange(len(text) + 1)
    before, after = text[:place], text[place:]
    return dice.choice((before + after[1:], before + dice.choice("-_= ,\u00e9é9") + after, text * 2))


def _waits(words: Sequence[str]) -> bool:
    """Whether a line lasts until somebody ends it: opening a pipe waits for a writer, as with cat."""
    opens_pipe = "detect" in words and any("fifo" in word for word in words)
    return opens_pipe or any(word.startswith("--wat") for word in words)


def prepare(place: Path) -> None:
    """Makes a world for the lines of this process, and keeps it from training and submitting."""
    world_at(place).make()
    for module in (can_train.cli.train, can_train.cli.pipeline):
        for name in ("start_runs", "continue_run", "_train_stages", "_submit_stages"):
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: [])


def in_process(number: int, dice: Random, place: Path) -> str:
    """Runs one line in this process, up to its training, submission or plan."""
    words = draw_line(dice, dry=False)
    if _waits(words):
        return ""
    world = world_at(place)
    world.restore()
    failure = call(words).failure
    return failure or _lost(world, words)


def as_process(number: int, dice: Random, place: Path) -> str:
    """Runs one line as a process."""
    words = draw_line(dice, dry=True)
    # A resumed run trains for as many epochs as the line asks for.
    if _waits(words) or "resume" in words[:1] or any("\0" in word for word in words):
        words = ["runs"]
    world = world_at(place)
    world.restore()
    is_full = dice.random() < _FULL_SHARE
    answer = _run(words, "/dev/full" if is_full else str(place / "stdout"), str(place / "stderr"))
    return answer.failure or _lost(world, words)


def _run(words: Sequence[str], stdout: str, stderr: str) -> Answer:
    encoded = [os.fsencode(word) for word in (sys.executable, "-P", "-m", "can_train", *words)]
    try:
        with Path(stdout).open("wb") as out, Path(stderr).open("wb") as err:
            code = subprocess.run(encoded, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=WAIT_S,
                                  check=False, preexec_fn=_limit_time).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(words, 0, "", "", f"still at work after {WAIT_S} s")
    except OSError as error:
        # The system, not can-train, may refuse a line that is too long.
        return Answer(words, 0, "", "", "" if error.errno == errno.E2BIG else str(error))
    if code == -signal.SIGXCPU:
        return Answer(words, 0, "", "", f"more than {HANG_S} s of processor time")
    printed = Path(stdout).read_text(errors="replace") if stdout != "/dev/full" else ""
    return Answer(words, 128 - code if code < 0 else code, printed, Path(stderr).read_text(errors="replace"))


def _limit_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (HANG_S, HANG_S + 1))


def _lost(world: World, words: Sequence[str]) -> str:
    return f"{lost} by {list(words)}" if (lost := world.lost()) else ""


ATTACKS: Final = (
    Attack("lines", "random command lines, in a process", in_process, 100_000, 300, prepare),
    Attack("processes", "random command lines, as processes; standard output on a full disk in 1 of 20", as_process,
           2_000, 4, lambda place: world_at(place).make()),
)  # fmt: skip
