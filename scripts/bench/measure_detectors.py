"""Compares the detectors that can-train makes with the baselines: on the simulated bus, folder by folder, and from one
benign real log to another one with attacks; and counts the false events of thresholds that were asked to raise so many.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.measure_data import run_python
from bench.results_file import environment, markdown, write_section

SEEDS: Final = (0, 1, 2)
"""Seeds of the simulated bus, which are for judging only: settings were chosen on others."""

DETECTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "GAT": (),
    "without IDs": ("--set", "dataset.identity=false"),
    "classic features": ("--set", "dataset.features=classic", "--set", "dataset.id_dropout=0"),
}
BASELINES: Final = ("random_forest", "gap_lookup", "silence", "id_lookup")
RIVALS: Final = ("random_forest", "gap_lookup")
"""Baselines whose difference to the model is shown."""

ALARM_SEEDS: Final = tuple(range(10))
"""Seeds whose false events are counted: those of three of them scatter by their square root."""

ALARMS_PER_HOUR: Final = (15, 60, 240)
ALARM_NOTES: Final = """\
False events an hour that `evaluate --alarms-per-hour` was asked for, and those that it raised in a quarter of an hour
of benign windows of other drives of the vehicles in training: mean and range over {seeds} seeds."""

REAL_LOGS: Final = Path(__file__).parents[3] / "shared" / "data" / "can"
BENIGN_LOG, ATTACKED_LOG = "normal.log", "labeled_TSC1.csv"

NOTES: Final = """\
MCC: mean and range over {seeds} seeds of the simulated bus (`--dataset synthetic`, with the defaults); thresholds come
from validation. The baselines see the same training windows, the random forest the same features as the GAT; it is the
mean of three fits. *GAT − …*: in how many seeds the 95 % interval of the difference (a block bootstrap over bursts)
lies above 0, has both signs, or lies below. Masquerade frames stand where the victim's stood, with its rhythm and
plausible values: hardly anything is to be found there."""

REAL_NOTES: Final = """\
A VGAE is trained on a benign log alone and judges another drive of the car, with attacks."""


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md."""
    parser = argparse.ArgumentParser(prog="scripts/bench/detectors", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--alarm-seeds", nargs="+", type=int, default=ALARM_SEEDS)
    parser.add_argument("--size", choices=("student", "teacher"), default="student")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    sections = []
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: [trained(Path(folder), seed, ("--model", "gat", "--size", options.size, *more))
                   for seed in options.seeds]
            for name, more in DETECTORS.items()
        }  # fmt: skip
        judged = {name: [tests_of(json.loads((run / "result.json").read_text())) for run in several]
                  for name, several in runs.items()}  # fmt: skip
        sections.append(table(judged) + "\n\n" + NOTES.format(seeds=len(options.seeds)))
        print(sections[-1], flush=True)
        alarmed = {
            name: [trained(Path(folder), seed, ("--model", name.lower(), "--size", options.size))
                   for seed in options.alarm_seeds]
            for name in ("GAT", "VGAE")
        }  # fmt: skip
        sections.append(ALARM_NOTES.format(seeds=len(options.alarm_seeds)) + "\n\n" + alarm_table(alarmed))
        print(sections[-1], flush=True)
        if (REAL_LOGS / BENIGN_LOG).exists():
            sections.append(REAL_NOTES + "\n\n" + real_table(Path(folder)))
        else:
            sections.append(f"Not measured: {BENIGN_LOG} and {ATTACKED_LOG} are not in {REAL_LOGS.name}.")
        print(sections[-1], flush=True)
    if not options.no_write:
        head = environment({"torch": version("torch"), "torch_geometric": version("torch_geometric")})
        heading = "Detectors beside baselines (`scripts/bench/detectors`)"
        write_section("detectors", heading, "\n\n".join([head, *sections]))


def trained(folder: Path, seed: int, more: Sequence[str]) -> Path:
    """Trains a model on the simulated bus of a seed, once, and returns the folder of its run."""
    runs = folder / f"{'-'.join(more).replace('/', '')}-{seed}"
    if not any(runs.glob("*/result.json")):
        line = ("--dataset", "synthetic", "--set", f"dataset.synthetic.seed={seed}", "--device", "cpu")
        run_python("-m", "can_train", *line, *more, "--runs-dir", str(runs), "--state-dir", str(folder / "state"))
    (run,) = (path.parent for path in runs.glob("*/result.json"))
    return run


def tests_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the judgement of each test folder, of a result or of what `evaluate --json` prints."""
    tests: dict[str, Any] = document["judgement"]["test"]
    return tests


def alarm_table(runs: Mapping[str, Sequence[Path]]) -> str:
    """Returns how many false events an hour the runs of each model raise, by how many were asked for."""
    rows = [["asked for", *runs]]
    for asked in ALARMS_PER_HOUR:
        several = [[false_events_per_hour(run, asked) for run in each] for each in runs.values()]
        rows.append([str(asked), *(f"{mean(each):.0f} ({min(each):.0f} to {max(each):.0f})" for each in several)])
    return markdown(rows)


def false_events_per_hour(run: Path, asked: int) -> float:
    """Returns the false events of a run an hour of benign windows in drives of vehicles that training saw."""
    line = ("evaluate", str(run), "--alarms-per-hour", str(asked), "--device", "cpu", "--json")
    tests = tests_of(json.loads(run_python("-m", "can_train", *line)))
    known = [tests[name] for name in tests if "unknown_vehicle" not in name]
    events = sum(one["bursts"]["model"]["false_events"] for one in known)
    everything = [one["baselines"]["flag_everything"] for one in known]
    hours = sum((one["windows"] - one["attack_windows"]) / one["false_alarms_per_hour"] for one in everything)
    return float(events / hours)


def table(judged: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns a table with a row for each test folder."""
    rows = [["test folder", *judged, *BASELINES, *(f"GAT − {rival}" for rival in RIVALS)]]
    own = judged["GAT"]
    for name in own[0]:
        models = [spread([tests[name]["model"]["mcc"] for tests in several]) for several in judged.values()]
        baselines = [spread([tests[name]["baselines"][each]["mcc"] for tests in own]) for each in BASELINES]
        compared = [signs([tests[name]["differences"].get(rival) for tests in own]) for rival in RIVALS]
        rows.append([name, *models, *baselines, *compared])
    return markdown(rows)


def spread(values: Sequence[float]) -> str:
    """Returns the mean with its range."""
    if min(values) == max(values):
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def signs(differences: Sequence[Mapping[str, Any] | None]) -> str:
    """Returns in how many seeds a difference is above 0, open, or below, by its interval."""
    bounds = [(one["low"], one["high"]) for one in differences if one and one.get("low") is not None]
    above, below = sum(low > 0 for low, _ in bounds), sum(high < 0 for _, high in bounds)
    return f"{above} above, {len(differences) - above - below} open, {below} below"


def real_table(folder: Path) -> str:
    """Returns the figures of a model of one benign log on another one with attacks."""
    runs = folder / "real"
    places = ("--runs-dir", str(runs), "--state-dir", str(folder / "state"))
    train = ("--model", "vgae", "--dataset", str(REAL_LOGS / BENIGN_LOG), "--device", "cpu")
    run_python("-m", "can_train", *train, *places)
    (run,) = (path.parent for path in runs.glob("*/result.json"))
    rows = [["threshold", "MCC", "recall", "false-positive rate", "ROC-AUC", "id_lookup"]]
    for name, more in (("the run's own", ()), ("--calibrate 10s", ("--calibrate", "10s"))):
        line = ("evaluate", str(run), "--dataset", str(REAL_LOGS / ATTACKED_LOG), "--device", "cpu", "--json", *more)
        (judged,) = json.loads(run_python("-m", "can_train", *line))["judgement"]["test"].values()
        figures = [judged["model"][each] for each in ("mcc", "recall", "false_positive_rate", "roc_auc")]
        rows.append([name, *(f"{value:.3f}" for value in figures), f"{judged['baselines']['id_lookup']['mcc']:.3f}"])
    return markdown(rows)


if __name__ == "__main__":
    main()
