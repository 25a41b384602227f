"""What holds of the benchmarks without running them: each has its section of results, and what is judged as right."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.measure_data import prepare_log
from bench.measure_reasons import COLUMNS, explained
from bench.results_file import RESULTS
from can_train.tasks.can.contributions import PROPERTIES
from can_train.tasks.can.data.graphs import FlatGraphs
from fakes.random_bus import INJECTED, injected_frames, write_log

SECTIONS = RESULTS.read_text(encoding="utf-8")
LINKS = sorted(file for file in RESULTS.parent.iterdir() if file.is_symlink())


def test_every_benchmark_has_its_module_and_its_section() -> None:
    assert LINKS
    modules = sorted(file.stem.removeprefix("measure_") for file in RESULTS.parent.glob("measure_*.py"))
    assert [link.name for link in LINKS] == modules
    assert [link.name for link in LINKS if f"<!-- {link.name}:begin -->" not in SECTIONS] == []


def test_the_page_has_the_measured_shares_of_named_ids() -> None:
    page = (RESULTS.parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
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
            codes = [flat.node_code[flat.node_ptr[row] : flat.node_ptr[row + 1]] for row in rows]
            ids = flat.ids[np.concatenate(codes)]
            return np.tile((ids == blamed)[:, None], len(PROPERTIES)).astype(float)

    vocabulary = flat.ids[flat.ids != INJECTED]
    model = SimpleNamespace(combine=lambda scores: scores, threshold=0.5, vocabulary=vocabulary)
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
