"""What holds of the benchmarks without running them: each has its section of results, and what is judged as right."""

import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import measure_all
from bench.harness import RESULTS, Benchmark, template
from bench.harness import SECTIONS as TEMPLATES
from bench.measure_all import ARGUMENTS, Outcome, benchmarks, run
from bench.measure_bus import (
    LOGGED,
    Figures,
    benign_drive,
    cells,
    columns,
    figures,
    not_tied,
    out_of_range,
    ratio,
    tree_finds,
    windows_of,
)
from bench.measure_data import prepare_log
from bench.measure_reasons import COLUMNS, explained
from bench.picture import PICTURE, picture, read_blocks, spans
from bench.summary import AbsentError, read_lines, summary
from bench.ties import ties
from can_train_tasks.can.contributions import PROPERTIES
from can_train_tasks.can.data.graphs import FlatGraphs
from can_train_tasks.can.settings import SyntheticSettings
from fakes.random_bus import INJECTED, injected_frames, write_log

SECTIONS = RESULTS.read_text(encoding="utf-8")
LINKS = sorted(file for file in RESULTS.parent.iterdir() if file.is_symlink())


def test_every_benchmark_has_its_module_and_its_section() -> None:
    assert LINKS
    modules = sorted(file.stem.removeprefix("measure_") for file in RESULTS.parent.glob("measure_*.py"))
    assert [link.name for link in LINKS] == modules
    assert [link.name for link in LINKS if f"<!-- {link.name}:begin -->" not in SECTIONS] == []


def between(name: str) -> str:
    return SECTIONS.partition(f"<!-- {name}:begin -->\n")[2].partition(f"\n<!-- {name}:end -->")[0]


@pytest.mark.parametrize("name", sorted(file.stem for file in TEMPLATES.glob("*.md")))
def test_a_section_has_the_words_of_its_template(name: str) -> None:
    body = re.split(r"\{[^{}]*\}", template(name)[1])
    section = between(name.partition("-")[0] if name.startswith("claims-") else name)
    assert re.search(".*?".join(map(re.escape, body)), section, re.DOTALL)


def test_the_summary_and_the_picture_are_what_the_sections_say() -> None:
    assert between("all") == summary(SECTIONS)
    assert PICTURE.read_text(encoding="utf-8") == picture(SECTIONS)


def test_every_section_has_its_line_in_the_summary() -> None:
    sections = set(re.findall(r"<!-- ([\w-]+):begin -->", SECTIONS)) - {"all"}
    lines = set(read_lines())
    assert sections - lines == set()
    assert (lines - sections) & set(benchmarks()) == set()


def test_a_changed_cell_changes_the_summary_and_the_picture() -> None:
    changed = SECTIONS.replace("| can-train, with readings | 1.000 |", "| can-train, with readings | 0.500 |")
    assert "| 0.500; 3.9; 0 |" in summary(changed)
    assert picture(changed) != picture(SECTIONS)


@pytest.mark.parametrize(("old", "new"), [
    ("| can-train, with readings | 1.000 |", "| can-train, with readings |  |"),
    ("| proportional | 92% |", "| proportionate | 92% |"),
    ("<!-- engine:begin -->", ""),
    (", the largest ", ", at most "),
])  # fmt: skip
def test_a_cell_that_is_not_there_is_an_error(old: str, new: str) -> None:
    assert old in SECTIONS
    with pytest.raises(AbsentError):
        summary(SECTIONS.replace(old, new))


def test_the_picture_has_each_tool_by_name_and_with_its_value() -> None:
    section = """<!-- survival:begin -->
| tool | runs that end | fill | speed |
|---|---|---|---|
""" + "".join(f"| {tool} | 2,{row}00 (step 3) | {row}.5% | 7% |\n" for row, tool in enumerate(read_blocks()[0].tools))
    drawn = picture(f"{SECTIONS.replace('<!-- survival:', '<!-- ')}{section}<!-- survival:end -->")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert {tool.replace("`", "") for block in read_blocks() for tool in block.tools} <= set(texts)
    assert {"2,000", "2,700", "0.5", "7.5", "0.425"} <= set(texts)


def test_a_bar_of_nothing_is_not_drawn() -> None:
    assert [spans(0.0), spans(0.1)] == [[], [(0.0, 0.1)]]


def test_all_runs_every_benchmark_but_itself() -> None:
    assert benchmarks() == [link.name for link in LINKS if link.name != "all"]
    assert set(ARGUMENTS) <= set(benchmarks())


def test_a_quick_run_of_some_percent_is_in_the_help() -> None:
    text = Benchmark("bench.measure_all", quick="the GAN with 50 %").parser().format_help()
    assert "the GAN with 50 %; writes nothing" in text


def test_what_is_not_run_or_in_part_says_why() -> None:
    assert [name for name, one in ARGUMENTS.items() if (one.full != "" or one.quick is None) and not one.left_out] == []


@pytest.mark.parametrize(("program", "outcome"), [
    ("print(1)", Outcome("ok")),
    ("exit('missed: 2 of 3')", Outcome("missed", "2 of 3")),
    ("exit(1)", Outcome("missed", "it said nothing")),
    ("exit(2)", Outcome("failed", "it said nothing")),
    ("1 / 0", Outcome("failed", "ZeroDivisionError: division by zero")),
])  # fmt: skip
def test_a_benchmark_that_fails_is_told_from_one_that_misses_its_goal(program: str, outcome: Outcome) -> None:
    assert run([sys.executable, "-c", program]) == outcome


def test_all_goes_on_after_a_failure_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter([Outcome("failed", "why"), Outcome("ok")])
    monkeypatch.setattr(measure_all, "run", lambda command: next(outcomes))
    monkeypatch.setattr(sys, "argv", ["all", "--quick", "--only", "data", "slurm", "engine"])
    with pytest.raises(SystemExit) as ended:
        measure_all.main()
    assert ended.value.code == 1
    lines = [line.split(maxsplit=7) for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], *line[6:]) for line in lines] == [
        ("data", "failed", "why"), ("slurm", "skipped", ARGUMENTS["slurm"].left_out), ("engine", "ok")]  # fmt: skip


def test_no_benchmark_begins_too_late(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure_all, "run", lambda command: Outcome("ok"))
    assert measure_all.timed("data", time.monotonic() + 60, quick=False) == Outcome("ok")
    assert measure_all.timed("data", time.monotonic() - 1, quick=False).status == "skipped"


def test_a_full_run_says_what_it_has_in_part_and_remakes_the_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    monkeypatch.setattr(measure_all, "run", lambda command: Outcome("ok", " ".join(command[1:])))
    monkeypatch.setattr(measure_all, "write_summary", lambda: written.append(True))
    monkeypatch.setattr(sys, "argv", ["all", "--only", "bus", "data"])
    measure_all.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(f"ok       --no-write; in part: {ARGUMENTS['bus'].left_out}")
    assert second.endswith(" ok")
    assert written == [True]


def test_the_page_has_the_measured_shares_of_named_ids() -> None:
    page = (RESULTS.parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
    alarms = page.partition("## Alarms")[2].partition("\n## ")[0]
    rows = [line for line in alarms.splitlines() if line.startswith("|")]
    assert len(rows) == 5
    assert [row for row in rows if row not in SECTIONS.splitlines()] == []


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> FlatGraphs:
    """Windows of 100 frames; the first attack has 60 frames of the third window and 20 of the fourth."""
    folder = tmp_path_factory.mktemp("bus")
    return prepare_log(write_log(folder / "drive.csv", injected_frames(4_000)), folder / "cache")


def hits_of(flat: FlatGraphs, blamed: int) -> np.ndarray:
    """Explains every attack window by a model that finds them all, and whose reason is always one ID."""

    class Scorer:
        def __call__(self, samples: Any, rows: np.ndarray) -> np.ndarray:
            return flat.label[rows] > 0

        def contributions(self, samples: Any, rows: np.ndarray) -> np.ndarray:
            return np.concatenate([self._of_window(row) for row in rows] or [np.zeros((0, len(PROPERTIES)))])

        def _of_window(self, row: int) -> np.ndarray:
            ids = flat.ids[flat.node_code[flat.node_ptr[row] : flat.node_ptr[row + 1]]]
            found = np.zeros((flat.num_ids[row], len(PROPERTIES)))
            found[: len(ids)] = (ids == blamed)[:, None]
            return found

    vocabulary = flat.ids[flat.ids != INJECTED]
    model = SimpleNamespace(combine=lambda scores, _: scores, threshold=0.5, vocabulary=vocabulary)
    return np.array(list(explained(model, Scorer(), flat, np.arange(len(flat)))))


def test_an_injected_id_is_right_and_another_is_not(bus: FlatGraphs) -> None:
    shown = {name: hits_of(bus, INJECTED)[:2, column].tolist() for column, name in enumerate(COLUMNS)}
    assert shown == {
        "as it is": [1, 1],
        "less the usual": [1, 1],
        "most frames": [1, 0],  # 20 frames of the injected ID and 7, where others have up to 10
        "most above the usual": [1, 1],
        "any ID": [1 / 11, 1 / 11],
    }
    assert not hits_of(bus, 0x200)[:, COLUMNS.index("as it is")].any()


def test_where_nothing_is_injected_nothing_can_be_right(bus: FlatGraphs) -> None:
    assert len(hits_of(replace(bus, kinds=("benign", "suppress")), INJECTED)) == 0


def two_ids() -> tuple[np.ndarray, ...]:
    """A standard ID every 10 ms, each fifth interval 12 ms, that counts in one byte of two; a 29-bit ID that says the
    same every 20 ms.
    """
    gaps = np.where(np.arange(20) % 5 == 4, 0.012, 0.010)
    times = np.concatenate([np.cumsum(gaps), np.arange(20) * 0.02])
    payload = np.zeros((40, 8), np.uint8)
    payload[:20, 1] = np.arange(20) % 2
    ids, length = np.repeat([0x100, 0x18F00400], 20), np.repeat([2, 8], 20)
    order = np.argsort(times, kind="stable")
    return times[order], ids[order], length[order], payload[order]


def test_a_log_is_measured_by_its_ids() -> None:
    found = figures(*two_ids())
    assert (found.ids, found.extended) == (2, 0.5)
    assert found.seconds == pytest.approx(0.38)
    assert found.rate == pytest.approx(40 / 0.38)
    assert found.spread == pytest.approx(0.0, abs=1e-9)  # fewer than half of the intervals are off
    assert (found.same, found.bits, found.static) == (0.5, 0.5, 0.75)


def test_a_late_half_of_the_intervals_is_a_spread() -> None:
    times = np.cumsum(np.where(np.arange(21) % 2, 0.011, 0.010))
    found = figures(times, np.full(21, 1), np.full(21, 8), np.zeros((21, 8), np.uint8))
    assert found.spread == pytest.approx(0.001 / 2 / 0.0105, rel=0.06)


def test_a_window_with_one_attack_frame_is_an_attack() -> None:
    attack = np.zeros(350, bool)
    attack[[100, 349]] = True
    assert windows_of(attack).tolist() == [False, True, False]


def test_figures_out_of_the_range_of_real_logs_are_named() -> None:
    middle = {name: (low + high) / 2 for name, (low, high) in LOGGED.items()}
    good = Figures(ids=50, extended=0, rate=700, seconds=60, **middle)
    rare = np.arange(74) % 37 == 0
    assert ratio(rare) == "1 : 36.0"
    assert out_of_range([good], rare, seed=0) == []
    assert out_of_range([good._replace(bits=9.0)], rare, seed=3) == ["bits 9.0000 with seed 3"]
    assert out_of_range([good], rare[:-1], seed=1) == ["1 : 35.5 with seed 1"]
    assert cells([good])[:4] == ["50", "0%", "700", "60"]
    assert cells([good, good._replace(ids=60)])[0] == "55 (50 to 60)"


def test_ties_of_a_log_are_measured() -> None:
    rng, time_s = np.random.default_rng(0), np.arange(0.0, 20.0, 0.05)
    course = 128 + np.cumsum(rng.integers(-2, 3, len(time_s))).clip(-100, 100)
    one, late, other = (np.zeros((len(time_s), 8), np.uint8) for _ in range(3))
    one[:, 0], one[:, 1] = course, np.arange(len(time_s)) % 16
    one[:, 7] = np.bitwise_xor.reduce(one[:, :7], axis=1) ^ 0x5A
    late[:, 3] = np.concatenate([np.full(4, course[0]), course[:-4]]) / 2
    other[:, 5] = rng.integers(0, 256, len(time_s))
    found = ties(np.tile(time_s, 3), np.repeat([1, 2, 3], len(time_s)), np.full(3 * len(time_s), 8),
                 np.concatenate([one, late, other]))  # fmt: skip
    assert (found.counted, found.checked) == (1 / 3, 1 / 3)
    assert found.tie > 0.99
    assert (found.strong, found.lag_s) == (1.0, pytest.approx(0.2))


@pytest.mark.parametrize("seed", range(2))
def test_version_3_is_tied_as_loosely_as_real_logs(seed: int) -> None:
    settings = SyntheticSettings(version=3, seed=seed)
    assert not_tied([ties(*columns(benign_drive(settings, vehicle))) for vehicle in range(1, 5)], seed) == []
    tight = replace(settings, version=2)
    found = not_tied([ties(*columns(benign_drive(tight, vehicle))) for vehicle in range(1, 5)], seed)
    assert any(each.startswith("tie 0.99") for each in found)


def test_a_tree_finds_dos_and_no_masquerade() -> None:
    settings = SyntheticSettings(seed=20, seconds=20.0)
    assert tree_finds("DoS", settings)[1] > 0.8
    assert 0.3 < tree_finds("masquerade", settings)[1] < 0.7
