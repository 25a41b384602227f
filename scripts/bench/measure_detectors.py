"""Compares the detectors that can-train makes with the baselines: on the simulated bus, folder by folder, and from one
benign real log to another one with attacks.
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

REAL_LOGS: Final = Path(__file__).parents[3] / "shared" / "data" / "can"
BENIGN_LOG, ATTACKED_LOG = "normal.log", "labeled_TSC1.csv"

NOTES: Final = """\
MCC: mean and range over {seeds} seeds of the simulated bus (`--dataset synthetic --size student`, with the other
defaults); thresholds come from validation. The baselines see the same training windows, the random forest the same
features as the GAT; it is the mean of three fits. *GAT − …*: in how many seeds the 95 % interval of the difference (a
block bootstrap over bursts) lies above 0, has both signs, or lies below. Masquerade frames stand where the victim's
stood, with its rhythm and plausible values: hardly anything is to be found there."""

REAL_NOTES: Final = """\
A VGAE (`--size student`) is trained on a benign log alone and judges another drive of the car, with attacks."""


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md."""
    parser = argparse.ArgumentParser(prog="scripts/bench/detectors", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--size", choices=("student", "teacher"), default="student")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    sections = []
    with tempfile.TemporaryDirectory() as folder:
        judged = {
            name: [trained(Path(folder), seed, ("--size", options.size, *more)) for seed in options.seeds]
            for name, more in DETECTORS.items()
        }
        sections.append(table(judged) + "\n\n" + NOTES.format(seeds=len(options.seeds)))
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


def trained(folder: Path, seed: int, more: Sequence[str]) -> dict[str, Any]:
    """Trains a GAT on the simulated bus of a seed and returns its judgement of each test folder."""
    runs = folder / f"{'-'.join(more).replace('/', '')}-{seed}"
    line = ("--model", "gat", "--dataset", "synthetic", "--set", f"dataset.synthetic.seed={seed}", "--device", "cpu")
    run_python("-m", "can_train", *line, *more, "--runs-dir", str(runs), "--state-dir", str(folder / "state"))
    (result,) = runs.glob("*/result.json")
    tests: dict[str, Any] = json.loads(result.read_text())["judgement"]["test"]
    return tests


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
    train = ("--model", "vgae", "--size", "student", "--dataset", str(REAL_LOGS / BENIGN_LOG), "--device", "cpu")
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
