"""`can-train diff`: what a change of the settings, or of the code, does to the memory of a training."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from can_train.cli.output import Quiet, print_aside, print_json, print_tables, print_text
from can_train.cli.run_locator import AsJson, RunLocator, RunsDir, StateDir, TrustCode
from can_train.cli.train_options import check_targets
from can_train.config.resolved import plain_to_yaml
from can_train.config.settings import CHOICES
from can_train.errors import CanTrainError, ConfigError, GrewError
from can_train.io.units import size_text
from can_train.reporter import TextTable

_PROGRAMS: Final = ("can-train", "./can-train")  # that a line may begin with
_MIB: Final = 2**20
_CONFIG: Final = "run.yaml"
_BATCH: Final = "--batch-size"
_SPLIT: Final = "split"  # The rung of a step that is only split
_OF_RUNG: Final = ("rung", "rung_is_asked", "computed")  # An earlier revision's plan has none of them


def make_diff_command(words: list[str]) -> Any:
    """Makes the command. A line in one argument may begin with its first option, which is no option of `diff`."""
    for position, word in enumerate(words):
        if word.startswith("-") and " " in word.strip():
            words[position] = f"{_PROGRAMS[0]} {word}"
    return diff


def diff(  # noqa: PLR0913 - Typer makes an option of each argument
    sides: Annotated[
        list[str],
        typer.Argument(
            help='Two of them, each the line of a training in quotes ("--task my_file.py:MyTask --batch-size 64"), or '
            "a run as in can-train show; one line with --against.",
            metavar="LINE-or-RUN...",
        ),
    ],
    *,
    against: Annotated[
        str | None,
        typer.Option(help="Compare the line with itself at this commit, branch or tag of git.", metavar="REV"),
    ] = None,
    fail_above: Annotated[
        str | None,
        typer.Option(help="End with exit code 4 where a peak grows by more: 5%.", metavar="PERCENT"),
    ] = None,
    target_gpu: Annotated[
        str | None,
        typer.Option(help="GPUs to compare on: h100-80gb. Several: a100-40gb,t4. [the device]", metavar="TARGET-GPU"),
    ] = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Compare the memory of two trainings, or of one at two commits: peak, its parts and the largest batch of each GPU.
    Nothing is trained, and no GPU is needed.
    """
    allowed = None if fail_above is None else _share(fail_above)
    if len(sides) != (2 if against is None else 1):
        needed = "two lines or runs" if against is None else "one line, beside --against"
        raise ConfigError(f"diff compares {needed}", value=f"{len(sides)} given",
                          remedy='Quote a line: can-train diff "--task my_file.py:MyTask" RUN')  # fmt: skip
    check_targets(target_gpu)
    common = [*(["--target-gpu", target_gpu] if target_gpu else []), *(["--state-dir", state_dir] if state_dir else [])]
    with TemporaryDirectory(prefix="can-train-diff-") as folder:
        locator = RunLocator(runs_dir, state_dir)
        read = [
            _Side.read(side, locator, Path(folder) / str(number), trusts_all=trust_code)
            for number, side in enumerate(sides)
        ]
        if against is None:
            before, after = read
            plans = _explained([before, after], common, quiet=quiet)
        else:
            (after,) = read
            with _checked_out(against, Path(folder) / "tree") as tree:
                before = after.at(against, tree)
                plans = _explained([before, after], common, quiet=quiet)
    compared = [_Compared.of(*pair) for pair in zip(*plans, strict=True)]
    if as_json:
        print_json({"before": before.name, "after": after.name, "devices": [each.to_plain() for each in compared]})
    else:
        print_text(f"before: {before.name}\nafter:  {after.name}")
        print_tables([each.table() for each in compared])
    if allowed is not None and (grown := [each for each in compared if each.grew_above(allowed)]):
        worst = max(grown, key=lambda each: each.growth)
        raise GrewError(f"The predicted peak may grow by {fail_above} at most", value=worst.sentence(),
                        remedy="can-train explain names the parts of a peak, and changes that shrink it")  # fmt: skip


def _share(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise ConfigError("--fail-above is a percentage", value=repr(text), remedy="Give --fail-above 5%")
    return share


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two trainings: the words of its line, and where they are run."""

    name: str
    words: Sequence[str]
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, locator: RunLocator, config_folder: Path, *, trusts_all: bool) -> "_Side":
        """Reads a line, or finds a run."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError("The quotes of a line are in pairs", value=text, remedy="Close them") from error
        if words[:1] and words[0] in _PROGRAMS:
            return cls(name=shlex.join(words[1:]), words=words[1:])
        record = locator.find(text)
        config_folder.mkdir()
        path = config_folder / _CONFIG
        path.write_text(plain_to_yaml(locator.trust(trusts_all=trusts_all).config(record.folder)), encoding="utf-8")
        return cls(name=record.run_id, words=["--config", str(path)])

    def at(self, revision: str, tree: Path) -> "_Side":
        """Returns the same line in a checkout of another revision. Files that git does not have, such as data, are
        taken from the working tree.
        """
        here, top = Path.cwd(), _git("rev-parse", "--show-toplevel")
        folder = tree / here.relative_to(Path(top).resolve())
        if not folder.is_dir():
            raise ConfigError("The current folder is not in that revision", value=f"{revision}: {here}",
                              remedy="Name a later revision")  # fmt: skip
        environment = {"CAN_TRAIN_DATA": os.environ.get("CAN_TRAIN_DATA") or str(here / "data")}
        if paths := os.environ.get("PYTHONPATH"):
            moved = [str(tree / Path(path).resolve().relative_to(Path(top).resolve()))
                     if Path(path).resolve().is_relative_to(Path(top).resolve()) else path
                     for path in paths.split(os.pathsep)]  # fmt: skip
            environment["PYTHONPATH"] = os.pathsep.join(moved)
        words = [_of_working_tree(word, here, folder) for word in self.words]
        return _Side(name=f"{self.name} at {revision}", words=words, folder=folder, environment=environment)

    def spelling(self, flag: str) -> str:
        """Returns a flag as the line spells it; given twice, the later one counts."""
        spelt = (word.partition("=")[0] for word in self.words)
        return next((word for word in spelt if word.replace("_", "-") == flag), flag)

    def start(self, more: Sequence[str]) -> "subprocess.Popen[str]":
        """Starts to plan and to record the training."""
        command = [sys.executable, "-P", "-m", "can_train", "explain", *self.words, *more,
                   "--no-changes", "--json", "--quiet"]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
                                env={**os.environ, **self.environment})  # fmt: skip


def _of_working_tree(word: str, here: Path, folder: Path) -> str:
    """Returns a word of a line whose file only the working tree has as that file's whole path."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    is_missing = value and (here / value).exists() and not (folder / value).exists()
    return f"{flag}{equals}{here / value}" if is_missing else word


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("--against needs git", remedy="Install it") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [""]
        raise ConfigError("--against is a revision of the git repository around the current folder",
                          value=f"git {arguments[0]}: {lines[-1]}", remedy="git log lists them")  # fmt: skip
    return done.stdout.strip()


@contextmanager
def _checked_out(revision: str, tree: Path) -> Iterator[Path]:
    """Checks a revision out beside the working tree, which stays as it is, and removes it afterwards."""
    if revision.startswith("-"):
        raise ConfigError("--against is a revision", value=revision, remedy="Give a commit, a branch or a tag")
    commit = _git("rev-parse", "--verify", f"{revision}^{{commit}}")
    _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _explained(sides: Sequence[_Side], common: Sequence[str], *, quiet: bool) -> list[list[dict[str, Any]]]:
    """Plans and records both trainings at once; the second time in batches of as many samples where these differ."""
    if not quiet:
        print_aside("planning and recording both trainings")
    plans = _run(sides, [common] * len(sides))
    sizes = [tuple(plan["samples"] for plan in of_side) for of_side in plans]
    if sizes[0] == sizes[1] or len(sizes[0]) != 1:
        return plans
    # In one micro-batch: in a second one, gradients would be added to the gradients of the first.
    samples = str(min(sizes[0][0], sizes[1][0]))
    alike = _run(sides, [[*common, side.spelling(_BATCH), samples] for side in sides])
    kept = ("whole_batch_peak_bytes", "largest_batch", "fits", *_OF_RUNG)
    return [[{**same, **{name: plan[name] for name in kept if name in plan}} for plan, same in zip(*both, strict=True)]
            for both in zip(plans, alike, strict=True)]  # fmt: skip


def _run(sides: Sequence[_Side], more: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
    started = [side.start(words) for side, words in zip(sides, more, strict=True)]
    try:
        results = [process.communicate() for process in started]
    finally:
        for process in started:
            process.kill()
    for side, process, (_, errors) in zip(sides, started, results, strict=True):
        if process.returncode:
            fact, _, remedy = errors.strip().removeprefix("error: ").partition("\n")
            remedy = remedy.rstrip(".") or f"Try it alone: can-train {side.name} --dry-run"
            error = CanTrainError(
                f"The training {side.name!r} cannot be planned", value=fact.rstrip("."), remedy=remedy
            )
            error.exit_code = process.returncode
            raise error
    read = [json.loads(output) for output, _ in results]
    return [each if isinstance(each, list) else [each] for each in read]


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """The memory of both trainings on one device."""

    device: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @classmethod
    def of(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> "_Compared":
        return cls(device=after["device"], before=before, after=after)

    @property
    def is_alike(self) -> bool:
        """Whether the recorded micro-batches have as many samples."""
        return bool(self.before["samples"] == self.after["samples"])

    @property
    def peaks(self) -> dict[str, tuple[float, float]]:
        """Both peaks of a whole batch, as planned, beside data on the device; and of the recorded micro-batch."""
        names = {"whole batch": "whole_batch_peak_bytes", "micro-batch": "peak_bytes"}
        pairs = {kind: (self.before[name], self.after[name]) for kind, name in names.items()}
        return {kind: pair for kind, pair in pairs.items() if None not in pair}

    @property
    def growth(self) -> float:
        """The larger growth of the two peaks, as a share; infinite where only the training before fits."""
        if self.before["fits"] and not self.after["fits"]:
            return float("inf")
        return max(after / before - 1 for before, after in self._judged.values())

    @property
    def _judged(self) -> dict[str, tuple[float, float]]:
        pairs = {kind: pair for kind, pair in self.peaks.items() if kind != "micro-batch" or self.is_alike}
        return pairs or self.peaks

    def grew_above(self, allowed: float) -> bool:
        """Whether the peak grew by more than a share, or the training needs a further rung than before to fit."""
        return self.growth > allowed or self.climbed

    @property
    def climbed(self) -> bool:
        """Whether the training fits on a further rung alone, which no setting names."""
        # The choices are in the order of trial.
        before, after = (CHOICES["fit"].index(side.get("rung", _SPLIT)) for side in (self.before, self.after))
        return before < after and not self.after.get("rung_is_asked", False)

    def sentence(self) -> str:
        """Writes both peaks."""
        if self.growth == float("inf"):
            return f"{self.device}: it does not fit any more"
        if self.climbed:
            return f"{self.device}: it fits only where {self.after['computed']}, on rung {self.after['rung']}"
        kind, (before, after) = max(self._judged.items(), key=lambda pair: pair[1][1] / pair[1][0])
        return f"{self.device}, {kind}: {size_text(before)} became {size_text(after)}, {self.growth:+.1%}"

    def to_plain(self) -> dict[str, Any]:
        """Returns strict JSON values."""
        names = ("fits", "samples", "largest_batch", "whole_batch_peak_bytes", "peak_bytes", "kinds", *_OF_RUNG)
        return {
            "device": self.device, "growth": self.growth,
            **{side: {name: values[name] for name in names if name in values}
               for side, values in (("before", self.before), ("after", self.after))},
        }  # fmt: skip

    def table(self) -> TextTable:
        """Writes the peak, the parts by kind and the largest batch of both trainings."""
        longest_first = sorted((self.before["kinds"], self.after["kinds"]), key=len, reverse=True)
        kinds = dict.fromkeys(kind for side in longest_first for kind in side)
        samples = self.before["samples"], self.after["samples"]
        size = f", {samples[0]:,} samples" if self.is_alike else ""
        rows = [
            _row(f"peak, {kind}{size if kind == 'micro-batch' else ''}", *pair) for kind, pair in self.peaks.items()
        ]
        rows += [_row(f"  {kind}", float(self.before["kinds"].get(kind, 0)), float(self.after["kinds"].get(kind, 0)))
                 for kind in kinds]  # fmt: skip
        largest = [self.before["largest_batch"], self.after["largest_batch"]]
        if None not in largest:
            before, after = largest
            change = f"{after - before:+,}"
            rows.append(("largest batch, samples", f"{before:,}", f"{after:,}", change, _percent(before, after)))
        notes = (
            [] if samples[0] == samples[1] else [f"The micro-batches have {samples[0]:,} and {samples[1]:,} samples."]
        )
        for name, values in (("before", self.before), ("after", self.after)):
            if values.get("rung", _SPLIT) != _SPLIT:
                notes.append(f"{name}: on rung {values['rung']}, {values['computed']}.")
            notes += [f"{name}: {notice}." for notice in values["notices"]]
        return TextTable(self.device, ("MiB", "before", "after", "change", ""), rows, notes=notes)


def _row(name: str, before: float, after: float) -> tuple[str, str, str, str, str]:
    return (name, f"{before / _MIB:,.2f}", f"{after / _MIB:,.2f}", f"{(after - before) / _MIB:+,.2f}",
            _percent(before, after))  # fmt: skip


def _percent(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""
