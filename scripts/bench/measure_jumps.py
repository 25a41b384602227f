"""Measures the rule of jumping values alone, without a network, on the simulated bus: the bursts of attacks that it
finds, and its false events.
"""

import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Final

import numpy as np

from bench.harness import Benchmark, markdown
from can_train.reporter import SilentReporter
from can_train_tasks.can.data.dataset import load_data
from can_train_tasks.can.data.graphs import FlatGraphs, Floats, Ints
from can_train_tasks.can.evaluation.bursts import SECONDS_PER_HOUR, USUAL_HOLD, BurstFigures, Timeline, burst_figures
from can_train_tasks.can.evaluation.metrics import detector_metrics
from can_train_tasks.can.evaluation.rules import FLAGGED, JUMP, RULES, Rules
from can_train_tasks.can.settings import CanDatasetSettings, SyntheticSettings

BENCHMARK: Final = Benchmark(__name__, packages=("numpy",))
SEEDS: Final = tuple(range(3, 13))
"""Seeds of the simulated bus. The rule was made on seeds 3 to 8, test folders included."""


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md."""
    parser = BENCHMARK.parser()
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    options = parser.parse_args()
    folders = defaultdict(list)
    for seed in options.seeds:
        for folder, figures in measured(seed).items():
            folders[folder].append(figures)
    BENCHMARK.finish(options, seeds=len(options.seeds), table=table(folders))


def measured(seed: int) -> dict[str, tuple[BurstFigures, float, float]]:
    """Returns burst-level figures, benign hours and MCC of the rule in each test folder of a seed."""
    dataset = CanDatasetSettings(name="synthetic", synthetic=SyntheticSettings(seed=seed))
    with tempfile.TemporaryDirectory() as name:
        data = load_data(dataset, Path(name), Path(name), SilentReporter())
        flat, split = data.flat, data.split
        rules = Rules.fit(flat, split)
        assert rules is not None
        return {folder: judged(flat, rows, flagged(rules, flat, rows)) for folder, rows in split.test.items()}


def flagged(rules: Rules, flat: FlatGraphs, rows: Ints) -> Floats:
    """Returns 1 for each window [R] in which a value jumps, else 0."""
    of_ids = rules.rarities(flat, rows)[:, RULES.index(JUMP)]
    ends = np.cumsum(flat.num_ids[rows])
    jumps: Floats = (np.maximum.reduceat(of_ids, ends - flat.num_ids[rows]) >= FLAGGED).astype(float)
    return jumps


def judged(flat: FlatGraphs, rows: Ints, flags: Floats) -> tuple[BurstFigures, float, float]:
    """Returns burst-level figures, benign hours and MCC of flags [R]."""
    timeline = Timeline.of(flat, rows)
    hours = float(timeline.benign_s.sum()) / SECONDS_PER_HOUR
    mcc = detector_metrics(timeline.is_attack, flags, flags > 0, benign_hours=hours)["mcc"]
    assert mcc is not None
    return burst_figures(timeline, flags, 0.5, USUAL_HOLD), hours, mcc


def table(folders: dict[str, list[tuple[BurstFigures, float, float]]]) -> str:
    """Returns a table with a row for each test folder."""
    rows = [["test folder", "bursts found", "least and most in a seed", "false events an hour", "MCC"]]
    for folder, several in folders.items():
        found = [figures["bursts_found"] for figures, _, _ in several]
        bursts = sum(figures["bursts"] for figures, _, _ in several)
        events = sum(figures["false_events"] for figures, _, _ in several) / sum(hours for _, hours, _ in several)
        scores = [mcc for _, _, mcc in several]
        rows.append([folder, f"{sum(found):.0f} of {bursts}", f"{min(found):.0f} and {max(found):.0f}", f"{events:.1f}",
                     f"{mean(scores):.2f} ({min(scores):.2f} to {max(scores):.2f})"])  # fmt: skip
    return markdown(rows)
