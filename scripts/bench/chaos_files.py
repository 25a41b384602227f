"""Damaged files of runs, of the state folder, of checkpoints, presets and imports: they are refused or set aside with a
sentence, and undamaged files beside them are still listed.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from bench.chaos_cases import Attack
from bench.chaos_world import KEY, WORDS, World, call, world_at
from can_train.factors.observations import Started, read_records, write_record

_ODD: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 1.5, -0.0, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 1e308, float("nan"),
    float("inf"), -float("inf"), "", " ", "x" * 5_000, "[bold]", "[/x]", "\u202e", "\ud800", "\n", "nan", "1",
    "../../..", "/", "~nobody", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59-23:59", "2026-01-01",
    "2026-13-45T99:99:99Z", "finished", "ok", "sim-64mib", [], {}, [[]], [None], {"": None}, [1] * 500,
    {"x": {"y": {}}}, "!!python/object/apply:os.system ['x']", "tiny.py:Tiny", "os:system", "${oc.env:HOME}", "${",
    "null",
)  # fmt: skip
_TEXTS: Final = (
    b"", b" ", b"\n", b"{", b"}", b"[]", b"{}", b"null", b"0", b'"x"', b"nan", b"NaN", b"\xff\xfe", b"\xef\xbb\xbf{}",
    b"\x00" * 100, b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b'{"schema": 1}', b'{"schema": 99}',
    b'{"schema": -1}', b'{"schema": 1e400}', b"&a [*a]", b"a: &a [*a, *a]", b"? : :",
    b"--- !!python/object/apply:os.system ['x']\n", b"- " * 5_000, b"\t\tx: 1", b"%YAML 9.9\n---\n",
    b"PK\x03\x04" + b"\x00" * 50, b"\x80\x02}q\x00.", b"cos\nsystem\n(S'x'\ntR.",
)  # fmt: skip
_IMPORTS: Final = "in.json"
_PRESETS: Final = "presets"


def prepare(place: Path) -> None:
    """Makes a world with the files to damage: two runs, their observations, an event of every kind, presets."""
    world_at(place).make(more=_add_files)


def _add_files() -> None:
    for words in ((KEY, "--pin", "0.7"), (KEY, "--unpin"), ("--export", _IMPORTS), ("--import", _IMPORTS)):
        answer = call(["factors", *words])
        assert answer.code == 0, answer
    state, runs = Path("state"), Path("runs")
    # An attempt of a killed run: it began and left no observation.
    first = read_records(state).finished[0]
    write_record(state, Started(attempt=7, start_time=first.start_time, host="gone", run_id=first.run_id,
                                key=first.key, device=first.device))  # fmt: skip
    assert len(list(runs.iterdir())) > 1
    configs = Path(__file__).resolve().parents[2] / "configs"
    for group in ("cluster", "memory"):
        shutil.copytree(configs / group, Path(_PRESETS, group))
    Path(_PRESETS, "dataset").mkdir()
    Path(_PRESETS, "dataset", "mine.yaml").write_text("defaults:\n  - /dataset/synthetic@_here_\nname: mine\n")


def case(number: int, dice: Random, place: Path) -> str:
    """Damages a file, and runs commands that read it."""
    world = world_at(place)
    world.restore()
    runs = sorted(path.name for path in world.runs.iterdir())
    run, other = dice.sample(runs, 2)
    kind = dice.choice(("run", "run", "run", "state", "state", "state", "checkpoints", "import", "import", "preset"))
    targets = _targets(world, kind, run)
    damaged = dice.choice(targets)
    _damage(damaged, dice)
    for words in _questions(kind, dice):
        line = [word.replace("RUN", str(world.runs / run)).replace("OTHER", other) for word in words]
        if failure := call(line).failure:
            return f"{damaged.relative_to(world.folder)}: {failure}"
    return _unlisted(world, damaged, other)


def _targets(world: World, kind: str, run: str) -> Sequence[Path]:
    folder = {"run": world.runs / run, "checkpoints": world.runs / run / "checkpoints", "state": world.state,
              "preset": world.folder / _PRESETS}.get(kind)  # fmt: skip
    if folder is None:
        return [world.folder / _IMPORTS]
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _questions(kind: str, dice: Random) -> Iterator[Sequence[str]]:
    if kind == "preset":
        presets = (("--cluster", "slurm"), ("--cluster", "local"), ("--memory", "tight"), ("--dataset", "mine"))
        preset = dice.choice(presets)
        submit = ("--submit",) if "--cluster" in preset else ()
        yield ("--model", "gat", "--config-dir", _PRESETS, *preset, *submit, "--epochs", "0")
        return
    if kind == "import":
        yield ("factors", "--import", _IMPORTS)
        yield ("factors",)
        return
    lines = dice.sample(WORDS["on_state" if kind == "state" else "on_runs"], 2)
    if dice.random() < (0.7 if kind == "checkpoints" else 0.15):
        lines.append(dice.choice(WORDS["slow"]))
    yield from map(shlex.split, lines)


def _unlisted(world: World, damaged: Path, other: str) -> str:
    """Says whether a run or an observation that is whole is no longer listed."""
    runs = call(["runs", "--json", "--limit", "0"])
    factors = call(["factors", "--json", "--show"])
    for answer in (runs, factors):
        if answer.failure or answer.code:
            return answer.failure or f"{answer.words} answers {answer.code}: {answer.err[:300]} ({damaged.name})"
    if f'"{other}"' not in runs.out and other not in damaged.parts:
        return f"{other} is no longer listed with {damaged.relative_to(world.folder)} damaged"
    return ""


def _damage(path: Path, dice: Random) -> None:
    data = path.read_bytes()
    match dice.randrange(12):
        case 0:
            path.write_bytes(data[: dice.randrange(len(data) + 1)])
        case 1:
            path.write_bytes(dice.choice(_TEXTS))
        case 2:
            path.write_bytes(_flipped(data, dice))
        case 3:
            path.write_bytes(data + dice.choice((data, dice.choice(_TEXTS))))
        case 4:
            path.unlink()
            kinds: list[Callable[[], Any]] = [path.mkdir, lambda: path.symlink_to(path.name), lambda: None]
            if path.parent.name in ("observations", "events"):
                # Nobody writes into it, and its reader must not wait.
                kinds.append(lambda: os.mkfifo(path))
            dice.choice(kinds)()
        case _:
            _change_value(path, data, dice)


def _flipped(data: bytes, dice: Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(dice.choice((1, 1, 3, 30))):
        if flipped:
            values = (0, 255, dice.randrange(256), ord("9"), ord("{"), ord('"'))
            flipped[dice.randrange(len(flipped))] = dice.choice(values)
    return bytes(flipped)


def _change_value(path: Path, data: bytes, dice: Random) -> None:
    """Puts an odd value into JSON, a line of JSON or YAML, or a checkpoint, and keeps the digest right."""
    if path.suffix == ".pt":
        _change_checkpoint(path, dice)
        return
    lines = data.split(b"\n") if path.suffix in (".jsonl", ".yaml") else [data]
    place = dice.randrange(len(lines))
    if path.suffix == ".yaml":
        name, colon, _ = lines[place].partition(b":")
        value = json.dumps(dice.choice(_ODD)).encode() if dice.random() < 0.7 else dice.choice(_TEXTS[:40])
        lines[place] = name + colon + b" " + value
    else:
        with suppress(ValueError):
            lines[place] = json.dumps(_changed(json.loads(lines[place]), dice)).encode()
    path.write_bytes(b"\n".join(lines))


def _changed(value: Any, dice: Random) -> Any:
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice([*value])
        match dice.randrange(12):
            case 0:
                return {name: each for name, each in value.items() if name != key}
            case 1:
                return {**value, f"{key}x": value[key]}
        return {**value, key: _changed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        return [*value[:place], _changed(value[place], dice), *value[place + 1 :]]
    return dice.choice(_ODD)


def _change_checkpoint(path: Path, dice: Random) -> None:
    """Writes a checkpoint with an odd value under its digest, as somebody who edits one would."""
    import hashlib

    import torch

    state = torch.load(path, weights_only=True)
    values = (*_ODD, torch.tensor(float("nan")), torch.zeros(0), torch.zeros(3, 7), {"x": torch.zeros(1)})
    key = dice.choice([*state])
    if isinstance(state[key], dict) and state[key] and dice.random() < 0.8:
        inner = dice.choice([*state[key]])
        state[key] = {**state[key], inner: dice.choice(values)}
    else:
        state[key] = dice.choice(values)
    torch.save(state, path)
    manifest = path.parent / "manifest.json"
    listed = json.loads(manifest.read_text())
    for entry in listed["checkpoints"]:
        if entry["file"] == path.name:
            entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(listed))


ATTACKS: Final = (
    Attack("files", "damaged files of runs, states, checkpoints, presets and imports", case, 10_000, 20, prepare),
)
