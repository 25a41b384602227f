"""Measures how often the first CAN ID that is named for a flagged window was injected there. Students are trained on
the synthetic bus. The attack windows that they flag in its test folders are explained as in `can-train evaluate`, and
also without a model, by numbers of frames.
"""

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from bench.harness import Benchmark, markdown, train
from bench.measure_data import read_frames
from can_train.config.resolved import cache_folder, data_root
from can_train.reporter import SilentReporter
from can_train.training.evaluate import Scorer
from can_train.training.loading import load_finished
from can_train_tasks.can.contributions import FRAMES, PROPERTIES
from can_train_tasks.can.data.dataset import load_data
from can_train_tasks.can.data.graphs import BENIGN, NODE_FEATURES, FlatGraphs, Floats, Frames, Ints
from can_train_tasks.can.evaluation.alarms import Explainer, usual_windows
from can_train_tasks.can.reference_models import FinishedNetwork

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "torch_geometric"))
STUDENTS: Final = {
    "student GAT": ("--model", "gat"),
    "student GAT without identity": ("--model", "gat", "--set", "dataset.identity=false"),
    "student VGAE": ("--model", "vgae"),
}

NOTHING_INJECTED: Final = (BENIGN, "suppress")
"""Kinds of windows that are left out: of a suppressed message only the frame after it can be labelled."""

COLUMNS: Final = ("as it is", "less the usual", "most frames", "most above the usual", "any ID")
"""Ways to name an ID: by contributions to the score, in all and less the usual; by frames, in both ways; at random."""
BY_FOLDER: Final = [COLUMNS.index("less the usual"), COLUMNS.index("most above the usual")]


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md."""
    options = BENCHMARK.parser().parse_args()
    data = ("--size", "student", "--dataset", "synthetic", "--no-baselines", "--device", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        hits = {}
        for name, flags in STUDENTS.items():
            runs = Path(tempfile.mkdtemp(dir=folder))
            hits[name] = measure(train(runs, Path(folder) / "state", *flags, *data))
    BENCHMARK.finish(options, students=markdown(whole_table(hits)), folders=markdown(folder_table(hits)))


def measure(path: Path) -> dict[str, Floats]:
    """Returns, by test folder, [R, 5] whether each of the `COLUMNS` is right in the R windows that a run flags."""
    finished = load_finished(path)
    run = finished.run
    data = load_data(run.dataset, data_root(run.paths), cache_folder(run.paths), SilentReporter())
    model = FinishedNetwork(finished, data.flat)
    scorer = Scorer.open(run.training, "cpu")
    hits: dict[str, Floats] = {}
    for folder, tested in data.split.test.items():
        logs = [tested[data.flat.source[tested] == source] for source in np.unique(data.flat.source[tested])]
        parts = [part for rows in logs for part in explained(model, scorer, data.flat, rows)]
        if parts:
            hits[folder] = np.array(parts)
    return hits


def explained(model: FinishedNetwork, scorer: Scorer, flat: FlatGraphs, rows: Ints) -> Iterator[list[float]]:
    """Yields, for each flagged attack window of a log with the windows `rows`, which `COLUMNS` are right."""
    flagged = model.combine(scorer(model, rows), rows) > model.threshold
    left_out = [code for code, kind in enumerate(flat.kinds) if kind in NOTHING_INJECTED]
    wanted = rows[flagged & ~np.isin(flat.label[rows], left_out)]
    explainers = [
        Explainer(flat=flat, contribute=contribute, vocabulary=model.vocabulary, usual_rows=usual)
        for contribute in (partial(scorer.contributions, model), partial(frame_counts, flat))
        for usual in (rows[:0], usual_windows(rows, flagged))
    ]
    named = [[causes[0].can_id for causes in explainer.causes(wanted)] for explainer in explainers]
    injections = injected_ids(Path(flat.sources[flat.source[rows[0]]].path), flat, wanted)
    for row, injected, *firsts in zip(wanted, injections, *named, strict=True):
        present = flat.ids[flat.node_code[flat.node_ptr[row] : flat.node_ptr[row + 1]]]
        yield [*(float(first in injected) for first in firsts), float(np.isin(present, injected).mean())]


def injected_ids(log: Path, flat: FlatGraphs, rows: Ints) -> Iterator[Ints]:
    """Yields the IDs that attackers sent in each of the windows `rows` of a log."""
    frames = Frames.concatenate(list(read_frames(log)))
    for first in flat.first_frame[rows]:
        window = frames[slice(first, first + flat.window)]
        yield np.unique(window.can_id[window.label > 0])


def frame_counts(flat: FlatGraphs, rows: Ints) -> Floats:
    """Returns [I, P] the frames of each ID in some windows, in place of contributions."""
    parts = []
    for row, num_ids in zip(rows, flat.num_ids[rows], strict=True):
        nodes = slice(flat.node_ptr[row], flat.node_ptr[row + 1])
        # An ID that is absent has none.
        part = np.zeros((num_ids, len(PROPERTIES)))
        part[: nodes.stop - nodes.start, PROPERTIES.index(FRAMES)] = flat.node_features[
            nodes, NODE_FEATURES.index("count")
        ]
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros((0, len(PROPERTIES)))


def whole_table(students: Mapping[str, Mapping[str, Floats]]) -> list[list[str]]:
    """Returns a table with a row for each student, over all test folders."""
    hits = {name: np.concatenate([*folders.values()]) for name, folders in students.items()}
    rows = [[name, str(len(each)), *(f"{share:.2f}" for share in each.mean(axis=0))] for name, each in hits.items()]
    return [["", "windows", *COLUMNS], *rows]


def folder_table(students: Mapping[str, Mapping[str, Floats]]) -> list[list[str]]:
    """Returns a table with a row for each test folder."""
    folders = sorted({folder for hits in students.values() for folder in hits})
    rows = [[folder, *(cell(hits.get(folder)) for hits in students.values())] for folder in folders]
    return [["test folder", *students], *rows]


def cell(hits: Floats | None) -> str:
    """Writes the two shares of [R, 5] hits and their number; empty if nothing was flagged."""
    return "" if hits is None else "{:.2f}, {:.2f} of {}".format(*hits[:, BY_FOLDER].mean(axis=0), len(hits))
