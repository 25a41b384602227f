"""The command scripts/gpu-check. It writes the results after every measurement, so that an interrupted run
keeps its measurements, and `--resume` measures the rest.
"""

import argparse
import difflib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

from can_train.config.resolved import state_folder
from can_train.config.settings import PRECISIONS
from can_train.errors import CanTrainError, DeviceError, StateError
from can_train.io.records import write_json_atomic, write_text_atomic
from can_train.io.units import parse_size
from can_train.memory.catalogue import MEASURED, GpuConstants, write_gpu_constants
from can_train.memory.meters import is_simulated, resolve_device
from gpu.configurations import CAPACITIES, MODELS, QUICK_CAPACITIES, SIMULATED, Configuration
from gpu.processes import measure, run_cuda_tests
from gpu.tables import markdown

ROOT: Final = Path(__file__).resolve().parents[2]
CATALOGUE: Final = "src/can_train/memory/catalogue.py"
# The measurements in the catalogue's source.
_ENTRIES: Final = re.compile(r"(    for measured in \(\n)        GpuConstants\(.*?(    \)\n\}\n)", re.DOTALL)
_LONG_NUMBER: Final = re.compile(r"(?<==)\d{4,}$")
PARTS: Final = ("tests", "constants", "models")


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns its exit status: 1 if a measurement or a test failed, 2 if nothing could be run."""
    given = read_arguments(arguments)
    try:
        _check_is_gpu(given.device)
        configurations = choose(given)
    except CanTrainError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return error.exit_code
    # In a process of its own: a CUDA context here would take memory from the measurements.
    device = measure({"part": "device", "device": given.device})
    if "error" in device:
        print(f"gpu-check: {device['error']}", file=sys.stderr)
        return 2
    path = given.out / f"gpu-check-{device['key']}"
    results = (
        {"models": {}}
        | (_earlier(path) if given.resume else {})
        | {"device": device, "commit": _commit(), "jobs": given.jobs}
    )
    if "tests" in given.parts:
        results["tests"] = _printed("tests", run_cuda_tests(ROOT))
        _save(results, path)
    if "constants" in given.parts and not is_simulated(given.device):
        results["constants"] = _printed("constants", measure({"part": "constants", "device": given.device}))
        _save(results, path)
        remember(results, path.with_name(f"{path.name}.diff"))
    measured = results["models"]
    wanted = configurations if "models" in given.parts else ()
    wanted = [each for each in wanted if "error" in measured.get(each.label, {"error": "not measured yet"})]
    with ThreadPoolExecutor(given.jobs) as pool:
        labels = {
            pool.submit(measure, {"part": "models", "configuration": asdict(each)}): each.label for each in wanted
        }
        try:
            for done in as_completed(labels):
                measured[labels[done]] = _printed(labels[done], done.result())
                _save(results, path)
        except KeyboardInterrupt:
            # It reaches neither the threads nor their processes, which have groups of their own.
            pool.shutdown(wait=False, cancel_futures=True)
            for child in psutil.Process().children():
                child.kill()
            raise
    print(f"gpu-check: wrote {path}.json and {path}.md")
    parts = [results.get("tests", {}), results.get("constants", {}), *results["models"].values()]
    return int(any("error" in part for part in parts))


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check",
        description="Runs the CUDA tests and compares can-train's predictions of memory with measurements.",
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, or a simulated GPU with small models: sim:256MiB"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--capacities", nargs="+", help="8GiB 16GiB …: what PyTorch may use of a GPU")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["fp32"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer capacities, and fewer sizes at each")
    parser.add_argument("--jobs", type=int, default=1, help="configurations at once; speeds then say nothing")
    parser.add_argument("--resume", action="store_true", help="keep what is in the files already, measure what lacks")
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "bench", help="folder of the results")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs is at least 1, not {given.jobs}")
    return given


def choose(given: argparse.Namespace) -> list[Configuration]:
    """Lists the configurations to measure, small capacities first. Speeds are measured at the largest capacity.

    Raises:
        CanTrainError: A size cannot be parsed.
    """
    simulated = is_simulated(given.device)
    if given.capacities:
        capacities = sorted({parse_size(size) for size in given.capacities})
    elif simulated:
        capacities = [parse_size(given.device.removeprefix(f"{SIMULATED}:"))]
    else:
        capacities = list(QUICK_CAPACITIES if given.quick else CAPACITIES)
    return [
        Configuration(
            device=SIMULATED if simulated else given.device,
            model=model,
            capacity_bytes=capacity,
            precision=precision,
            quick=given.quick,
            swept=capacity == capacities[-1],
        )
        for capacity in capacities
        for precision in given.precision
        for model in given.models
    ]


def _check_is_gpu(device: str) -> None:
    if resolve_device(device).type != "cuda" and not is_simulated(device):
        raise DeviceError("The device is no GPU", value=device, remedy="Valid: cuda, cuda:1, sim:256MiB")


def _printed(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Prints whether a measurement succeeded, and returns it."""
    outcome = next(iter(result["error"].splitlines())) if "error" in result else "done"
    print(f"{name}: {outcome}", flush=True)
    return result


def _save(results: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path.with_name(f"{path.name}.json"), results)
    write_text_atomic(path.with_name(f"{path.name}.md"), markdown(results))


def remember(results: Mapping[str, Any], diff_path: Path) -> None:
    """Writes the measured constants to the state folder, where plans for this kind of GPU find them; and prints the
    change that ships them with can-train, which it writes to a file, too.
    """
    if "error" in results["constants"]:
        return
    steps, date = results["constants"]["steps"], datetime.now(UTC).date().isoformat()
    constants = gpu_constants(results["device"], steps, date=date)
    try:
        path = write_gpu_constants(state_folder(), constants)
    except StateError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
    else:
        print(f"gpu-check: plans for {results['device']['key']} use {path} from now on")
    change = proposed_change(constants, (ROOT / CATALOGUE).read_text(encoding="utf-8"))
    if change:
        write_text_atomic(diff_path, change)
        print(f"gpu-check: git apply {diff_path} ships them with can-train:\n{change}", end="")


def gpu_constants(device: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], *, date: str) -> GpuConstants:
    """Makes the constants of a card from the memory of the libraries, one after another, on some day."""
    return GpuConstants(
        key=device["key"],
        total_bytes=device["total_bytes"],
        outside_bytes=max(step["outside_bytes"] for step in steps),
        workspace_bytes=sum(max(step["kept_bytes"], 0) for step in steps),
        date=date,
        driver=device["driver"],
        torch=device["torch"],
    )


def proposed_change(constants: GpuConstants, catalogue: str) -> str:
    """Returns the difference that ships the constants of a card with can-train, of the catalogue's source; empty where
    they are in it already.
    """
    shipped = {**MEASURED, constants.key: constants}
    entries = "".join(_source(shipped[key]) for key in sorted(shipped))
    changed = _ENTRIES.sub(lambda match: f"{match[1]}{entries}{match[2]}", catalogue, count=1)
    before, after = (text.splitlines(keepends=True) for text in (catalogue, changed))
    return "".join(difflib.unified_diff(before, after, f"a/{CATALOGUE}", f"b/{CATALOGUE}"))


def _source(constants: GpuConstants) -> str:
    """Writes the constants of a card as the catalogue has them."""
    values = [f"{each.name}={getattr(constants, each.name)!r}" for each in fields(constants)]
    values = [_LONG_NUMBER.sub(lambda match: f"{int(match[0]):_}", value) for value in values]
    lines = "".join(f"            {value},\n" for value in values).replace("'", '"')
    return f"        GpuConstants(\n{lines}        ),\n"


def _earlier(path: Path) -> dict[str, Any]:
    try:
        earlier: dict[str, Any] = json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return earlier


def _commit() -> str:
    """Returns the checkout's commit, with `-dirty` if files have changed, or "" if git cannot tell."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
