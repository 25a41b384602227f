"""Compares GATs that are trained on the synthetic bus with and without CAN IDs as inputs, by test folder. One vehicle
occurs only in the tests: a detector that relies on known IDs fails there.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.measure_data import run_python
from bench.results_file import environment, markdown, write_section

SEEDS: Final = (42, 1, 2)
"""Seeds of the training; the first is the default. The data are the same for all."""

UNSEEN: Final = "unknown_vehicle"
"""In the names of folders with an unseen vehicle. There, every run without IDs must have an MCC above 0, which flagging
everything has."""

NOTES: Final = """\
MCC: mean and range over {seeds} trainings with different seeds on the same simulated data (`--dataset synthetic`, with
the other defaults). Thresholds come from validation. *Flag everything* has an MCC of 0 wherever both classes occur. The
random forest gets no IDs."""


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench/identity", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=("student", "teacher"), default=["student"])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    sections, missed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            judged = {
                identity: [trained(Path(folder), size, identity, seed) for seed in options.seeds]
                for identity in (True, False)
            }
            sections.append(f"GAT, {size}:\n\n{table(judged)}")
            print(sections[-1], flush=True)
            missed += [f"{size}: {name}" for name in unbeaten(judged[False])]
    if not options.no_write:
        head = environment({"torch": version("torch"), "torch_geometric": version("torch_geometric")})
        text = "\n\n".join([head, *sections, NOTES.format(seeds=len(options.seeds))])
        write_section("identity", "CAN IDs and unseen vehicles (`scripts/bench/identity`)", text)
    if missed:
        sys.exit(f"missed: flags no better than everything without IDs in {', '.join(missed)}")


def trained(folder: Path, size: str, identity: bool, seed: int) -> dict[str, Any]:
    """Trains a run and returns its evaluation for each test folder."""
    runs = folder / f"{size}-{identity}-{seed}"
    settings = ("--dataset", "synthetic", "--set", f"dataset.identity={identity}", "--seed", str(seed))
    places = ("--runs-dir", str(runs), "--state-dir", str(folder / "state"))
    run_python("-m", "can_train", "--model", "gat", "--size", size, "--device", "cpu", *settings, *places)
    (result,) = runs.glob("*/result.json")
    tests: dict[str, Any] = json.loads(result.read_text())["judgement"]["test"]
    return tests


def table(judged: dict[bool, list[dict[str, Any]]]) -> str:
    """Returns a table with a row for each test folder."""
    rows = [["test folder", "with IDs", "without IDs", "flag everything", "random forest"]]
    for name in judged[True][0]:
        models = [spread([tests[name]["model"]["mcc"] for tests in judged[identity]]) for identity in (True, False)]
        baselines = [
            spread([tests[name]["baselines"][baseline]["mcc"] for tests in judged[False]])
            for baseline in ("flag_everything", "random_forest")
        ]
        rows.append([name, *models, *baselines])
    return markdown(rows)


def spread(values: Sequence[float]) -> str:
    """Returns the mean with its range."""
    if min(values) == max(values):
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def unbeaten(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the folders with unseen vehicles in which some run is no better than flagging everything."""
    unseen = [name for name in runs[0] if UNSEEN in name]
    return [name for name in unseen if any(not beats_flagging(tests[name]) for tests in runs)]


def beats_flagging(folder: dict[str, Any]) -> bool:
    """Returns whether the model's MCC is above that of flagging everything."""
    return bool(folder["model"]["mcc"] > folder["baselines"]["flag_everything"]["mcc"])


if __name__ == "__main__":
    main()
