"""Nothing that the layers below the tasks print speaks of one task: a text of the core is read by people of every one.

`test_task_names.py` finds tasks' own names in code; here it is what help, remedies and notices say.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from can_train.cli.main import main
from fakes.own_tasks import write_task
from guards.sources import Source, package_sources, parse, without_docstrings

ROOMS: Final = ("cli", "report", "slurm", "adapters", "training", "runs", "factors", "fit", "memory", "config", "io")
WORDS: Final = re.compile(
    r"\b(gat|vgae|fusion|can bus|hcrl\w*|students?|teachers?|tracknet|seq2seq|bendr|windows?|log\.csv|frames?"
    r"|(its|same) logs|(?<!false )alarms?)\b|muon",
    re.IGNORECASE,
)
ALLOWED: Final = {
    "cli/demo.py": (".*", "the demo shows the default task, which configs/config.yaml names"),
    "config/settings.py": (
        r"(accumulation|preflight)_muon_threshold",
        "names of a described system, as people type them",
    ),
}
"""By file: a pattern of whole texts, and why they stay."""
HELP_MAY_HAVE: Final = (
    r"--memory MEMORY .*\n.*",  # lists presets by their names, for every task alike
    r"(?s)--threshold NUMBER.*?(?=--scores FILE)",  # options of declared tasks, where no run names its task
    r"can-train --model gat --dataset synthetic",  # the first line to type, of the default task
)


def texts(source: Source) -> Iterator[ast.Constant]:
    """What a file may print: its strings, and in the command line also its docstrings, which are help."""
    nodes = ast.walk(source.tree) if source.room == "cli" else without_docstrings(source.tree)
    yield from (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def task_words(source: Source) -> list[str]:
    pattern, _ = ALLOWED.get(source.path, ("(?!)", ""))
    return [
        f"{source.path}, line {node.lineno}: {found[0]!r} in {node.value!r:.80}"
        for node in texts(source)
        if (found := WORDS.search(str(node.value))) and not re.fullmatch(pattern, str(node.value), re.DOTALL)
    ]


def test_no_text_of_the_core_speaks_of_one_task() -> None:
    sources = [source for source in package_sources() if source.room in ROOMS]
    assert [found for source in sources for found in task_words(source)] == []


def test_what_is_allowed_is_there() -> None:
    sources = {source.path: source for source in package_sources()}
    assert all(any(WORDS.search(str(node.value)) for node in texts(sources[path])) for path in ALLOWED)


@pytest.mark.parametrize(
    "line",
    [
        "remedy = 'Add --size student'",
        "next = f'evaluate {run} --dataset path/to/log.csv'",
        "text = 'each window of a log'",
        "option = 'accumulation_muon_threshold'",
        "title = 'a simulated CAN bus'",
        "note = 'no alarm is raised'",
    ],
)
def test_a_text_about_one_task_is_found(line: str) -> None:
    assert task_words(parse("training/train.py", line))


@pytest.mark.parametrize(
    "line",
    [
        "parser = 'can-train'",
        "text = 'a batch can be split'",
        "text = 'windowed frameset'",
        "heading = 'false alarms'",
        "signal.alarm(3)",
    ],
)
def test_words_that_every_task_has_are_let_pass(line: str) -> None:
    assert not task_words(parse("training/train.py", line))


@pytest.mark.parametrize(
    "words",
    [(), ("doctor",), ("evaluate",), ("show",), ("runs",), ("report",), ("compare",), ("factors",), ("status",)],
)
def test_help_for_a_task_of_ones_own_is_about_it(words: tuple[str, ...], tmp_path: Path, capsys) -> None:
    task = f"{write_task(tmp_path / 'mine')}:MyTask"
    line = (*words, "--task", task, "--help-all") if words in ((), ("doctor",)) else (*words, "--help")
    assert main(line) == 0
    text = capsys.readouterr().out
    for allowed in HELP_MAY_HAVE:
        text = re.sub(allowed, "", text)
    assert WORDS.findall(text) == []
    assert not re.search(r"[ :] *\. Several|model: \.", text)
