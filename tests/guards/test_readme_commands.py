"""What README.md and docs/ show works: their commands, their Python and the files that they name."""

import ast
import contextlib
import fcntl
import io
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.memory.catalogue import find_card
from fakes.databases import TRUCK_DBC
from fakes.lightning_warnings import QUIET_LIGHTNING
from fakes.random_bus import random_frames, write_candump, write_log
from guards.sources import PACKAGE

ROOT = PACKAGE.parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
DATASETS = {file.stem for file in (ROOT / "configs").glob("*/dataset/*.yaml")}

RUN = "RUN"
"""What stands for a run on the pages."""

SMALL = ["--set", "dataset.synthetic.seconds=5"]
"""The simulated bus with little driving."""

OPENING = 12
"""Lines in which a page shows its first command."""

NEEDS_A_LIVE_RUN = ("logs", "cancel", "resume", "resubmit")
"""Commands that only a run at work or a submitted one can be given to: their words and options are read, no more."""

PROGRAMS = (".pt2", ".onnx")
"""Endings of programs. tests/training/test_export.py exports a classifier as both, which takes a minute."""


def blocks(markdown: str, *languages: str) -> list[str]:
    pattern = rf"^```(?:{'|'.join(languages)})\n(.*?)^```"
    return re.findall(pattern, markdown, flags=re.MULTILINE | re.DOTALL)


def typed(lines: list[str]) -> list[str]:
    """The lines of a block that a person types: in one with prompts, the others are what is printed."""
    return [line for line in lines if line.startswith("$ ")] or lines


def command_lines(markdown: str) -> list[list[str]]:
    """The arguments of every can-train line in a text's blocks of shell lines, each once."""
    shell = blocks(markdown, "console", "sh", "bash")
    lines = [line for block in shell for line in typed(block.replace("\\\n", " ").splitlines())]
    pattern = re.compile(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\./)?can-train(?: (.*))?$")
    matches = [match for line in lines if (match := pattern.match(line))]
    words = [shlex.split(match[1] or "", comments=True) for match in matches]
    found = [[*takewhile(lambda word: word not in ("|", ">"), line)] for line in words]
    return [line for index, line in enumerate(found) if line not in found[:index]]


FILES = {match[1]: block for text in TEXTS.values() for block in blocks(text, "python")
         if (match := re.match(r"# (\w+\.py)\n", block))}  # fmt: skip
"""The Python files that pages show, by the name in their first line."""

LINES = command_lines("\n".join(TEXTS.values()))

COMPARED = command_lines("\n".join(block for text in TEXTS.values() for block in re.findall(
    r"<!-- (?:[\w-]+):begin -->\n(.*?)<!-- [\w-]+:end -->", text, flags=re.DOTALL)))  # fmt: skip
"""The lines that tests/scripts/test_examples.py runs as they are, and whose output it compares."""


@pytest.fixture(scope="module")
def desk(shared: Path, prepared: Path) -> Path:
    """A folder with logs, a classifier, an autoencoder, and what they taught. The first process to need it makes it."""
    folder, mark = shared / "desk", shared / "desk-is-made"
    with (shared / "desk.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make_desk(folder, prepared)
            mark.touch()
    return folder


def make_desk(folder: Path, prepared: Path) -> None:
    (folder / "path" / "to" / "folder").mkdir(parents=True)
    for number, name in enumerate(("log.csv", "folder/one.csv", "folder/two.csv")):
        write_log(folder / "path" / "to" / name, random_frames(4_000, number))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("drive.log", "monday.log", "tuesday.log"):
        write_candump(folder / name, random_frames(4_000), {0: 0x0CF00400})
    (folder / "car.dbc").write_text(TRUCK_DBC)
    log = (folder / "path" / "to" / "log.csv").read_text()
    (folder / "path" / "to" / "other.csv").write_text(log.replace("arbitration_id", "ecu_address", 1))
    once = ["--dataset", "synthetic", *SMALL, "--epochs", "1", "--batch-size", "64", "--no-baselines"]
    with at(folder, prepared):
        for size in ("student", "teacher"):
            small = ["--size", size, "--model-args", "hidden=4,layers=1,heads=1"]
            said(["--model", "gat", *small, "--device", "sim:64MiB", *once])
        said(["--model", "vgae", "--set", "model.hidden=[8]", "--device", "cpu", *once])
        (folder / "run.yaml").write_text(said(["show", "last", "--config"]))
        said(["factors", "--export", "factors.json"])
        said(["factors", "synthetic_gat_student_normal", "--pin", "0.7"])


@pytest.fixture
def here(
    desk: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: Path
) -> Iterator[Path]:
    """The desk's state and runs, for one command to change."""
    monkeypatch.setattr(sys, "executable", str(warm_python))
    # The desk's runs know the desk's cache, and a command of another process may just write a file there.
    folder = shutil.copytree(desk, tmp_path / "desk", ignore=shutil.ignore_patterns(".*"))
    with at(folder, prepared):
        yield folder


@contextlib.contextmanager
def at(folder: Path, prepared: Path) -> Iterator[None]:
    """Works in a folder that is a person's home, too; prepared data and the compiled library lie elsewhere."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.setenv("CAN_TRAIN_CACHE", str(prepared))
        patch.chdir(folder)
        yield


def said(line: list[str]) -> str:
    """Gives a command line; returns what it prints."""
    output, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(complaints):
        status = main(line)
    # The doctor may well find a problem of the machine that runs this.
    assert status == 0 or (line[0] == "doctor" and output.getvalue()), complaints.getvalue()
    return output.getvalue()


def with_known_data(line: list[str]) -> list[str]:
    """The same line for data that everybody has, and little of it: published sets are not at hand. A line of another
    task than CAN names small data itself.
    """
    if "--task" in line:
        return line
    at_data = [index + 1 for index, word in enumerate(line) if word == "--dataset"]
    named = [line[index] for index in at_data]
    known = [*line]
    for index in at_data:
        known[index] = line[index] if "/" in line[index] else "synthetic"
    return [*known, *([] if any("/" in name for name in named) else SMALL)]


def for_run(line: list[str], run: Path) -> list[str]:
    return [run.name if word == RUN else word for word in line]


def for_one_gpu(line: list[str]) -> list[str]:
    """The line for the first of its GPUs: a step is recorded for each, which takes seconds."""
    return [word.partition(",")[0] if before == "--target-gpu" else word for before, word in pairwise(["", *line])]


def classifier(folder: Path) -> Path:
    return next((folder / "runs").glob("*_gat_teacher_*"))


def as_tried(line: list[str]) -> list[str]:
    """The line as it is run here: for little data, and without what takes minutes."""
    if "--help" in line:
        return line
    line = for_one_gpu(line)
    if line[0].startswith("-"):
        # A student is probed in half the time.
        size = [] if "--size" in line or "--task" in line else ["--size", "student"]
        return [*without_dry_run(with_known_data(line)), *size, "--dry-run"]
    if line[0] in NEEDS_A_LIVE_RUN or (line[0] == "export" and line[-1].endswith(PROGRAMS)):
        return [*line, "--help"]
    if line[0] == "pipeline":
        return [*without_dry_run(with_known_data(line)), *([] if "--show" in line else ["--dry-run"])]
    if line[0] == "explain" and "--model" in line:
        # tests/training/test_explain.py has the changes.
        return [*line, *SMALL, "--no-changes"]
    if line[0] == "diff":
        return [shlex.join([*shlex.split(word), *SMALL]) if word.startswith("--model") else word for word in line]
    return [*line, *SMALL] if "--model" in line else line


def without_dry_run(line: list[str]) -> list[str]:
    return [word for word in line if word != "--dry-run"]


RUN_HERE = [line for line in LINES if line and line not in COMPARED]
TRIED = [*{tuple(as_tried(line)): line for line in RUN_HERE}.values()]
"""A line each for the lines that are run alike."""


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in TRIED if line[0].startswith("-")], ids=shlex.join)
def test_a_training_line_resolves(here: Path, line: list[str]) -> None:
    assert said(for_run(as_tried(line), classifier(here)))


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in TRIED if not line[0].startswith("-")], ids=shlex.join)
def test_a_command_does_what_it_is_shown_for(here: Path, line: list[str]) -> None:
    said(for_run(as_tried(line), classifier(here)))
    if "--scores" in line:
        assert (here / line[line.index("--scores") + 1]).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("line", [["runs", "--bets", "mcc"], ["resume", RUN, "--hre", "--help"], ["factors", "a", "b"],
                                  ["--model", "gat", "--dataset", "synthetic", "--epoch", "3", "--dry-run"]],
                         ids=shlex.join)  # fmt: skip
def test_a_line_that_is_wrong_is_noticed(here: Path, line: list[str]) -> None:
    with pytest.raises(AssertionError):
        said(line)


def test_every_gpu_that_a_line_names_is_known() -> None:
    named = {line[line.index("--target-gpu") + 1] for line in LINES if "--target-gpu" in line}
    assert named
    for name in ",".join(named).split(","):
        assert find_card(name)


def test_a_data_set_is_a_known_name_or_a_path() -> None:
    named = [(line[index + 1], line) for line in LINES for index, word in enumerate(line) if word == "--dataset"]
    assert named
    assert [
        line for names, line in named if not all(name in DATASETS or "/" in name for name in names.split(","))
    ] == []


SNIPPETS = [(page, number, block) for page, text in TEXTS.items()
            for number, block in enumerate(blocks(text, "python"), 1)]  # fmt: skip


@QUIET_LIGHTNING
@pytest.mark.parametrize("snippet", [block for _, _, block in SNIPPETS],
                         ids=[f"{page}-{number}" for page, number, _ in SNIPPETS])  # fmt: skip
def test_a_snippet_runs_and_prints_what_its_comments_say(snippet: str) -> None:
    for package in re.findall(r"^(?:from|import) (webdataset|datasets)\b", snippet, re.MULTILINE):
        pytest.importorskip(package, reason=f"{package} is not installed")
    assert [pair for pair in printed_and_shown(snippet) if pair[0] != pair[1]] == []


def test_a_snippet_that_shows_something_else_is_noticed() -> None:
    assert printed_and_shown("print(1 + 1)  # 3") == [("2", "3")]


def printed_and_shown(snippet: str) -> list[tuple[str, str]]:
    """What each printing statement of a snippet prints, beside what the comment after it shows."""
    names: dict[str, object] = {}
    pairs = []
    for statement in ast.parse(snippet).body:
        source = ast.get_source_segment(snippet, statement, padded=True) or ""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(source, "snippet", "exec"), names)
        if output.getvalue():
            last = snippet.splitlines()[(statement.end_lineno or 0) - 1]
            pairs.append((output.getvalue().strip(), last.rpartition("  # ")[2]))
    return pairs


def test_the_readme_is_short_and_begins_with_three_commands_and_the_tests() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150
    lines = command_lines(TEXTS["README.md"])
    assert [line[:2] for line in lines[:2]] == [["--task", "first.py:Digits"], ["--model", "gat"]]
    assert "--target-gpu" in lines[2]
    assert re.search(r"^scripts/test\b", "".join(blocks(TEXTS["README.md"], "console")), re.MULTILINE)
    code = [line for line in FILES["first.py"].splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 15


def test_an_output_in_the_readme_is_short() -> None:
    shown = [block.splitlines() for block in blocks(TEXTS["README.md"], "console") if block.startswith("$ ")]
    assert len(shown) == 3
    assert max(len(lines) - 1 for lines in shown) <= 15


@pytest.mark.parametrize("page", TEXTS)
def test_a_link_leads_to_a_page_and_a_heading(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", TEXTS[page])
    for path, _, heading in (link.partition("#") for link in links):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not heading or heading in anchors(target.read_text(encoding="utf-8")), heading


def anchors(markdown: str) -> list[str]:
    """The names that GitHub gives headings."""
    headings = re.findall(r"^#+ (.*)$", markdown, flags=re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", TEXTS)
def test_scripts_and_presets_that_a_page_names_are_there(page: str) -> None:
    named = re.findall(r"`((?:scripts|configs)/[\w./-]+)`", TEXTS[page])
    missing = [name for name in named if not (ROOT / name).exists() and not name.endswith("/mine.yaml")]
    assert missing == []


def test_every_page_is_linked_from_the_front_page_and_comes_with_the_sources() -> None:
    pages = {page.removeprefix("docs/") for page in TEXTS if page.startswith("docs/")} - {"index.md"}
    assert pages - {*re.findall(r"\]\(([\w.-]+)", TEXTS["docs/index.md"])} == set()
    assert "(docs/index.md)" in TEXTS["README.md"]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "/docs" in settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def opens_with_something_to_type(text: str) -> bool:
    """Whether the first lines of a page have a block of shell lines or of Python."""
    return bool(blocks("\n".join(text.splitlines()[:OPENING]) + "\n```\n", "console", "sh", "python"))


def test_every_page_opens_with_something_to_type() -> None:
    assert [page for page, text in TEXTS.items() if "docs/" in page and not opens_with_something_to_type(text)] == []


def test_a_page_that_opens_with_prose_is_noticed() -> None:
    assert not opens_with_something_to_type("# A\n" + "Prose.\n" * OPENING + "```console\ncan-train demo\n```\n")
    assert opens_with_something_to_type("# A\n\n```console\ncan-train demo\n```\n")


def test_every_dependency_says_what_it_is_for() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {re.split(r"[^\w-]", requirement)[0] for requirement in settings["project"]["dependencies"]}
    explained = set(re.findall(r"^\| ([\w-]+) \|", TEXTS["docs/reference.md"], flags=re.MULTILINE))
    assert needed - explained == set()


def test_the_page_for_developers_maps_every_folder_of_the_package() -> None:
    drawn = blocks(TEXTS["docs/developing.md"], "text")[0]
    mapped = re.findall(r"^  ([\w.]+)(?=/? )", drawn.partition("src/can_train/")[2], flags=re.MULTILINE)
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {name for name in mapped if not name.endswith(".py")} == folders


def test_command_lines_are_found_in_blocks_of_shell_lines_only() -> None:
    block = "$ ./can-train --model gat \\\n  --set a='b c'  # why\ncan-trainer x\n"
    block += "$ CAN_X=1 can-train factors\ncan-train is printed\n"
    text = f"can-train no\n```text\ncan-train makes .venv\n```\n```sh\n{block}```\n"
    assert command_lines(text) == [["--model", "gat", "--set", "a=b c"], ["factors"]]
