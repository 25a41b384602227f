"""Measures each rule alone, without a network, on the simulated bus: the bursts of attacks that it finds, and its false
events.
"""

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

import numpy as np
from sklearn.metrics import matthews_corrcoef

from bench.harness import Benchmark, markdown
from can_train.reporter import SilentReporter
from can_train_tasks.can.data.dataset import load_data
from can_train_tasks.can.data.graphs import FlatGraphs, Ints
from can_train_tasks.can.evaluation.bursts import SECONDS_PER_HOUR, USUAL_HOLD, Timeline, burst_figures
from can_train_tasks.can.evaluation.rules import CONTEXT, FLAGGED, RULES, Rules
from can_train_tasks.can.settings import CanDatasetSettings, SyntheticSettings

BENCHMARK: Final = Benchmark(__name__, packages=("numpy",))
SEEDS: Final = tuple(range(3, 13))
"""Seeds of the simulated bus. The rule of jumps was made on seeds 3 to 8, test folders included; the rule of context on
seeds 101 to 108.
"""
TOGETHER, OTHERS = "together", "without context"

Judged = dict[str, tuple[float, float, float]]
"""Bursts that are found, false events and MCC, of each of `RULES`, of all rules, and of all rules but context."""


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


def measured(seed: int) -> dict[str, tuple[int, float, Judged]]:
    """Returns the number of bursts, the benign hours and the figures of the rules in each test folder of a seed."""
    dataset = CanDatasetSettings(name="synthetic", synthetic=SyntheticSettings(seed=seed))
    with tempfile.TemporaryDirectory() as name:
        data = load_data(dataset, Path(name), Path(name), SilentReporter())
        rules = Rules.fit(data.flat, data.split)
        assert rules is not None
        return {folder: judged(rules, data.flat, rows) for folder, rows in data.split.test.items()}


def judged(rules: Rules, flat: FlatGraphs, rows: Ints) -> tuple[int, float, Judged]:
    """Judges the windows [R] that each rule flags."""
    flags = rules.window_rarities(flat, rows) >= FLAGGED  # [R, 7]
    timeline = Timeline.of(flat, rows)
    others = np.delete(flags, RULES.index(CONTEXT), axis=1).any(axis=1)
    several = {**dict(zip(RULES, flags.T, strict=True)), TOGETHER: flags.any(axis=1), OTHERS: others}
    figures = {rule: burst_figures(timeline, own.astype(float), 0.5, USUAL_HOLD) for rule, own in several.items()}
    mcc = {rule: float(matthews_corrcoef(flat.label[rows] > 0, own)) for rule, own in several.items()}
    bursts = next(iter(figures.values()))["bursts"]
    hours = float(timeline.benign_s.sum()) / SECONDS_PER_HOUR
    return int(bursts), hours, {rule: (own["bursts_found"], own["false_events"], mcc[rule])
                                for rule, own in figures.items()}  # fmt: skip


def table(folders: dict[str, list[tuple[int, float, Judged]]]) -> str:
    """Returns a table with a row for each test folder."""
    rows = [["test folder", "bursts", *RULES, TOGETHER, f"MCC {OTHERS}", f"MCC {TOGETHER}"]]
    for folder, several in folders.items():
        hours = sum(hours for _, hours, _ in several)
        sums = {
            rule: np.sum([figures[rule] for _, _, figures in several], axis=0) for rule in (*RULES, TOGETHER, OTHERS)
        }
        rows.append([folder, str(sum(bursts for bursts, _, _ in several)),
                     *(f"{sums[rule][0]:.0f}, {sums[rule][1] / hours:.1f}" for rule in (*RULES, TOGETHER)),
                     *(f"{sums[rule][2] / len(several):.2f}" for rule in (OTHERS, TOGETHER))])  # fmt: skip
    return markdown(rows)
