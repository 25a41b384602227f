"""The outputs that README.md and docs/ show are those that their commands print, line by line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]

NOT_COMPARED: Final = {
    "picture": "draws README's picture, whose figures are compared with the page's",
    "report": "makes pictures with Chromium, which tests/cli/test_report_in_chromium.py looks at",
}
"""The groups of scripts/bench/example whose outputs stand on no page as text."""

ELSEWHERE: Final = {"demo": "compared in tests/cli/test_demo.py, which looks at the files that it leaves, too"}
"""The groups that another test compares."""

VARYING: Final = {
    "the id of a run": (r"(\d{8}-\d{6}-\w+-|\d{4}-\d{6}-)[0-9a-f]{4}", "RUN"),
    "the time of a stage": (r" *\b\d+:\d\d(?::\d\d)?\b", " TIME"),
    "the rate of a training": (r" *[\d,.]+/s\b", " N/s"),
    "the rate of an epoch": (r"(?m)^( *\d+/\d+ .*\S) +[\d,.]+(?= +[\d.]+ [KMG]iB TIME$)", r"\1 N"),
    "the bar, for which rate and time leave room": (r"  ━+", ""),
    "the time of a run": (r"(?m)^(time|That took) .*", "TIME"),
    "the memory of this machine": (r"0% of the \d+\.\d+ [GT]iB of cpu-\d+gb", "0% of MEMORY"),
    "the samples that this machine holds": (r"hold about [\d,]+ samples", "hold about N samples"),
    "the rounding of this machine": (r"agree to \d+ decimal places\. The largest\n   difference is [^:]+", "agree"),
    "how long a log is read": (r"reading took [\d.]+ s", "reading took TIME"),
    "the digits of a score that two machines round otherwise": (r"(score (?:up\s+to )?\d+)\.\d+", r"\1"),
    "the digits of a validation loss that two processors round otherwise": (
        r"(finished +[\d.]+ +\d+ +0\.\d\d)\d\d",
        r"\1",
    ),
    "the name of a sweep": (r"(sweep-\w+)-[0-9a-f]{4}", r"\1-NAME"),
    "how often the memory of this machine was tried": (r"\d+ trials?", "N trials"),
}
"""What differs between two machines that print the same, each with its pattern and what stands for it."""

FIGURES: Final = (r"(?<=\s)-?[\d,.]+(?: min \d+ s| min| s)?(?=\s|$)", "#")
"""The figures of a table that is made from shorter trainings than the page shows."""

SHORT_PIPELINE: Final = ("--set", "dataset.synthetic.seconds=5", "--no-baselines", "--epochs", "1",
                         "--min-steps-per-epoch", "3", "--set", "autoencoder:model.hidden=[8]",
                         *(f"--set={stage}:model.{size}" for stage in ("normal", "curriculum")
                           for size in ("hidden=4", "layers=1", "heads=1")))  # fmt: skip
"""Flags with which the pipeline of docs/can-models.md takes a hundredth of its time."""


def load_example() -> ModuleType:
    loader = SourceFileLoader("example", str(ROOT / "scripts" / "bench" / "example"))
    spec = spec_from_loader("example", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


example = load_example()


def same_everywhere(text: str, *more: tuple[str, str]) -> str:
    """The text without what differs between two machines."""
    for pattern, word in (*VARYING.values(), *more):
        text = re.sub(pattern, word, text)
    # What was longer or shorter has moved what stands beside it.
    return re.sub(r"(?m)(?<=\S) +|─+|^ +(?=RUN|#)", " ", text) if more else text


@pytest.fixture(autouse=True)
def quick_python(monkeypatch: pytest.MonkeyPatch, warm_python: Path) -> None:
    monkeypatch.setenv("CAN_TRAIN_PYTHON", str(warm_python))


def differences(group: str, folder: Path) -> Iterator[tuple[str, str]]:
    """What a group prints and what the page shows, where they differ."""
    short = group == "pipeline"
    made = {"learning": example.show_learned, "pipeline": lambda place: example.make_pipeline(place, *SHORT_PIPELINE)}
    more = (FIGURES,) if short else ()
    blocks_of = made.get(group, example.GROUPS[group])(folder)
    assert [*blocks_of] == example.MARKERS[group]
    for marker, blocks in blocks_of.items():
        pair = [same_everywhere(text, *more) for text in (example.on_page(blocks), example.shown(marker))]
        if pair[0] != pair[1]:
            yield pair[0], pair[1]


@pytest.mark.parametrize("group", ["help", "learning"])
def test_a_page_shows_what_a_command_prints(tmp_path: Path, group: str) -> None:
    for made, shown in differences(group, tmp_path):
        assert made == shown


@pytest.mark.slow
@pytest.mark.parametrize("group", [name for name in example.GROUPS
                                   if name not in ("help", "learning", *NOT_COMPARED, *ELSEWHERE)])  # fmt: skip
def test_a_page_shows_what_trainings_print(tmp_path: Path, group: str) -> None:
    for made, shown in differences(group, tmp_path):
        assert made == shown


@contextmanager
def page_with(monkeypatch: pytest.MonkeyPatch, folder: Path, marker: str, old: str, new: str) -> Iterator[None]:
    """Pages on one of which something else stands."""
    pages = []
    for page in example.PAGES:
        begin, found, rest = page.read_text(encoding="utf-8").partition(f"<!-- {marker}:begin -->")
        pages.append(folder / page.name)
        pages[-1].write_text(begin + found + rest.replace(old, new, 1), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(example, "PAGES", pages)
        yield


def test_a_word_on_a_page_that_no_command_prints_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with page_with(monkeypatch, tmp_path, "help", "everyday flags", "daily flags"):
        assert len([*differences("help", tmp_path)]) == 1


def test_only_what_differs_between_machines_is_left_out() -> None:
    line = "note: This is run 20261123-151501-synthetic_gat_student_normal-2337\ntime    42 s\nsteps  114\n"
    assert same_everywhere(line) == "note: This is run RUN\nTIME\nsteps  114\n"
    rows = "stage      run  time  test_01\n─────\nnormal  1123-111649-1417  2 min 12 s  0.988\n"
    assert same_everywhere(rows, FIGURES) == "stage run time test_01\n \nnormal RUN # #\n"


def blocks_with_output(text: str) -> list[str]:
    """The blocks of a page that show a command after a prompt, and what it prints."""
    blocks = re.findall(r"^```(?:console|text|sh|bash)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    typed = re.compile(r"^\$ (?:.*\\\n)*.*\n?", re.MULTILINE)
    return [block for block in blocks if block.startswith("$ ") and typed.sub("", block).strip()]


def unmarked(text: str) -> list[str]:
    """The blocks with output that nothing remakes, since they stand between no markers."""
    marked = "".join(re.findall(r"<!-- (?:[\w-]+):begin -->.*?<!-- [\w-]+:end -->", text, flags=re.DOTALL))
    return [block.partition("\n")[0] for block in blocks_with_output(text) if block not in marked]


def test_every_output_on_a_page_stands_between_markers() -> None:
    assert {page.name: blocks for page in example.PAGES if (blocks := unmarked(page.read_text(encoding="utf-8")))} == {}


def test_an_output_between_no_markers_is_noticed() -> None:
    shown = "```console\n$ can-train factors \\\n    KEY\nlearned\n```\n"
    assert unmarked(shown) == ["$ can-train factors \\"]
    assert unmarked(f"<!-- factors:begin -->\n{shown}<!-- factors:end -->") == []
    assert unmarked("```console\n$ can-train factors \\\n    KEY\n```\n") == []


def test_every_marker_is_one_whose_blocks_are_compared() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in example.PAGES)
    marked = re.findall(r"<!-- ([\w-]+):begin -->", pages)
    assert sorted(marked) == sorted(marker for markers in example.MARKERS.values() for marker in markers)
    assert {group for group, markers in example.MARKERS.items() if not markers} == NOT_COMPARED.keys()
