"""Compares the detectors that can-train makes with the baselines: on the simulated bus, folder by folder, and from one
benign real log to another log with attacks; and counts the false events of thresholds that aim at a number of events.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.harness import REAL_LOGS, Benchmark, markdown, run_python, train

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "torch_geometric"))
SEEDS: Final = tuple(range(3, 13))
"""Seeds of the simulated bus. The rarity that rules flag was chosen on seeds 3 to 8; nothing else was chosen here."""

DETECTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "GAT": ("--model", "gat"),
    "without rules": ("--model", "gat", "--set", "mode.rules=false"),
    "without IDs": ("--model", "gat", "--set", "dataset.identity=false"),
    "VGAE": ("--model", "vgae"),
}
ALARMED: Final = ("GAT", "VGAE")
"""Detectors whose false events are counted."""
BASELINES: Final = ("random_forest", "gap_lookup", "silence", "id_lookup")
RIVALS: Final = ("random_forest", "gap_lookup")
"""Baselines whose difference to the model is shown."""

ALARMS_PER_HOUR: Final = (15, 60, 240)

BENIGN_LOG, ATTACKED_LOG = "normal.log", "labeled_TSC1.csv"


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md."""
    parser = BENCHMARK.parser()
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--size", choices=("student", "teacher"), default="student")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = ("--size", options.size)
        runs = {name: [trained(folder, seed, (*words, *size)) for seed in options.seeds]
                for name, words in DETECTORS.items()}  # fmt: skip
        judged = {name: [tests_of(json.loads((run / "result.json").read_text())) for run in several]
                  for name, several in runs.items()}  # fmt: skip
        alarms, real = alarm_table({name: runs[name] for name in ALARMED}), real_table(folder)
    bursts = burst_table(judged)
    BENCHMARK.finish(options, seeds=len(options.seeds), table=table(judged), bursts=bursts, alarms=alarms, real=real)


def trained(folder: Path, seed: int, words: Sequence[str]) -> Path:
    """Trains a model on the simulated bus of a seed, once, and returns the folder of its run."""
    runs = folder / f"{'-'.join(words).replace('/', '')}-{seed}"
    for result in runs.glob("*/result.json"):
        return result.parent
    data = ("--dataset", "synthetic", "--set", f"dataset.synthetic.seed={seed}", "--device", "cpu")
    return train(runs, folder / "state", *data, *words)


def tests_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the judgement of each test folder from a result, or from the output of `evaluate --json`."""
    tests: dict[str, Any] = document["judgement"]["test"]
    return tests


def alarm_table(runs: Mapping[str, Sequence[Path]]) -> str:
    """Returns a table of the false events an hour that the runs of each model raise, by the number asked for."""
    rows = [["asked for", *runs]]
    for asked in ALARMS_PER_HOUR:
        several = [[false_events_per_hour(run, asked) for run in each] for each in runs.values()]
        rows.append([str(asked), *(f"{mean(each):.0f} ({min(each):.0f} to {max(each):.0f})" for each in several)])
    return markdown(rows)


def false_events_per_hour(run: Path, asked: int) -> float:
    """Returns the false events of a run an hour of benign windows in drives of vehicles that training saw."""
    line = ("evaluate", str(run), "--alarms-per-hour", str(asked), "--device", "cpu", "--json")
    tests = tests_of(json.loads(run_python("-m", "can_train", *line)))
    trained_vehicles = [test for name, test in tests.items() if "unknown_vehicle" not in name]
    events = sum(test["bursts"]["model"]["false_events"] for test in trained_vehicles)
    flags = [test["baselines"]["flag_everything"] for test in trained_vehicles]
    hours = sum((flag["windows"] - flag["attack_windows"]) / flag["false_alarms_per_hour"] for flag in flags)
    return float(events / hours)


def table(judged: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns a table with a row for each test folder."""
    rows = [["test folder", *judged, *BASELINES, *(f"GAT − {rival}" for rival in RIVALS), "no baseline above"]]
    gat = judged["GAT"]
    for name in gat[0]:
        models = [spread([tests[name]["model"]["mcc"] for tests in several]) for several in judged.values()]
        baselines = [spread([tests[name]["baselines"][each]["mcc"] for tests in gat]) for each in BASELINES]
        compared = [signs([tests[name]["differences"].get(rival) for tests in gat]) for rival in RIVALS]
        rows.append([name, *models, *baselines, *compared, unbeaten([tests[name]["differences"] for tests in gat])])
    return markdown(rows)


def burst_table(judged: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns a table of the bursts of attacks that detectors and baselines find at their own thresholds, over all
    seeds, with the mean number of false events an hour.
    """
    rows = [["test folder", *judged, *BASELINES]]
    for name in judged["GAT"][0]:
        models = [[tests[name]["bursts"]["model"] for tests in several] for several in judged.values()]
        baselines = [[tests[name]["bursts"][each] for tests in judged["GAT"]] for each in BASELINES]
        rows.append([name, *map(bursts_found, [*models, *baselines])])
    return markdown(rows)


def bursts_found(several: Sequence[Mapping[str, Any]]) -> str:
    """Returns the share of the bursts that were found, and the mean of the false events an hour."""
    found, bursts = (sum(each[name] for each in several) for name in ("bursts_found", "bursts"))
    return f"{found:.0f} of {bursts} ({mean(each['false_events_per_hour'] for each in several):.0f})"


def spread(values: Sequence[float]) -> str:
    """Returns the mean with its range."""
    if min(values) == max(values):
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def unbeaten(differences: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """Counts the seeds at which no baseline's MCC is above the model's, by the interval of the difference."""
    counted = [not any(each["high"] is not None and each["high"] < 0 for each in several.values())
               for several in differences]  # fmt: skip
    return f"{sum(counted)} of {len(counted)}"


def signs(differences: Sequence[Mapping[str, Any] | None]) -> str:
    """Counts the seeds whose difference is above 0, open, or below, by its interval."""
    bounds = [(each["low"], each["high"]) for each in differences if each and each.get("low") is not None]
    positive, negative = sum(low > 0 for low, _ in bounds), sum(high < 0 for _, high in bounds)
    return f"{positive} above, {len(differences) - positive - negative} open, {negative} below"


def real_table(folder: Path) -> str:
    """Trains on a benign real log, and returns the figures on another log, with attacks."""
    if not (REAL_LOGS / BENIGN_LOG).exists():
        return f"Not measured: {BENIGN_LOG} and {ATTACKED_LOG} are not in {REAL_LOGS.name}."
    words = ("--model", "vgae", "--dataset", str(REAL_LOGS / BENIGN_LOG), "--device", "cpu")
    run = train(folder / "real", folder / "state", *words)
    rows = [["threshold", "MCC", "recall", "false-positive rate", "ROC-AUC", "id_lookup"]]
    for name, more in (("the run's own", ()), ("--calibrate 10s", ("--calibrate", "10s"))):
        line = ("evaluate", str(run), "--dataset", str(REAL_LOGS / ATTACKED_LOG), "--device", "cpu", "--json", *more)
        (judged,) = json.loads(run_python("-m", "can_train", *line))["judgement"]["test"].values()
        figures = [judged["model"][each] for each in ("mcc", "recall", "false_positive_rate", "roc_auc")]
        rows.append([name, *(f"{value:.3f}" for value in figures), f"{judged['baselines']['id_lookup']['mcc']:.3f}"])
    note = "A VGAE is trained on a benign log alone and judges another drive of the car, with attacks."
    return f"{note}\n\n{markdown(rows)}"
