"""Writes the results as Markdown. A failed measurement is listed with its error."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from gpu.configurations import GIB

MIB: Final = 2**20
Row = Mapping[str, Any]

SIMULATED: Final = "**Simulated on a CPU, with small models: no figure here says anything of a real GPU.**"
PEAKS: Final = """\
Batches cost at least 5 times as much as the largest probe; each optimizer step has two micro-batches. The error is
predicted over measured peak, minus 1: first from the probes alone, then as corrected by the finder's trials."""
FINDER: Final = """\
Fill is the tuned limit over the true limit, which was found by whole optimizer steps on worst-case batches."""
RECORDED: Final = """\
The lines that a process without a GPU has recorded, each confirmed by one trial, as a run begins on a card; beside them
the base of the probes' line, and the finder's fill. Trial: its measured peak, and that ÷ the recorded one; empty where
it did not confirm the line, for the reason."""
FRAGMENTATION: Final = """\
A factor policy takes allocated ÷ reserved at the peak of a step that fits for the ceiling, the share of the capacity at
which memory really ends: the peak of the largest worst-case batch that fits, over the capacity. Too low a ratio wastes
memory; one above the ceiling risks an out-of-memory error."""
THROUGHPUT: Final = """\
Samples per second in steps of one micro-batch, by its share of the tuned limit. The last column is relative to the best
of the sweep."""
CONSTANTS: Final = """\
Outside: memory used on the GPU outside this process's allocator, so far. At most: the step's peak in the allocator,
without its input and result. Kept: memory that the step left allocated."""


def markdown(results: Mapping[str, Any]) -> str:
    """Returns the document. Parts that have not run are left out."""
    blocks = _heading(results)
    if "tests" in results:
        blocks += ["## CUDA tests", *_tests(results["tests"])]
    if results["models"]:
        measured = [row for row in results["models"].values() if "points" in row]
        blocks += ["## Predicted and measured peaks", PEAKS, *_peaks(measured), "## Finder", FINDER, _finder(measured)]
        blocks += ["## Recorded limits", RECORDED, _recorded([row for row in measured if "recorded" in row])]
        blocks += ["## Fragmentation", FRAGMENTATION, _fragmentation(measured)]
        blocks += ["## Throughput", *_throughput(measured, results.get("jobs", 1)), *_failures(results["models"])]
    if "constants" in results:
        blocks += ["## Constants", *_constants(results["constants"])]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _heading(results: Mapping[str, Any]) -> list[str]:
    device = results["device"]
    drivers = f", driver {device['driver'] or 'unknown'}, CUDA {device['cuda']}, cuDNN {device['cudnn']}"
    packages = f"torch {device['torch']}, torch_geometric {device['torch_geometric']}, Python {device['python']}"
    described = f"{device['total_bytes'] / GIB:.2f} GiB{'' if device['simulated'] else drivers}, {packages}"
    blocks = [f"# gpu-check: {device['name']}", f"{described}, can-train {results['commit'] or 'unknown'}."]
    return [*blocks, SIMULATED] if device["simulated"] else blocks


def _tests(run: Row) -> list[str]:
    counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(run["counts"].items())) or "none ran"
    skipped = Counter(_first_line(case["why"]) for case in run["cases"] if case["outcome"] == "skipped")
    failed = [case for case in run["cases"] if case["outcome"] not in ("passed", "skipped")]
    lines = [f"- {number} skipped: {why}" for why, number in skipped.items()]
    lines += [f"- {case['outcome']}: {case['name']}: {_first_line(case['why'])}" for case in failed]
    return [f"{counts}.", "\n".join(lines), *([_quoted(run["error"])] if "error" in run else [])]


def _peaks(rows: Sequence[Row]) -> list[str]:
    series = [("no", row, point) for row in rows for point in row["points"]]
    series += [("yes", row, point) for row in rows for point in row.get("compiled_points", [])]
    eager = [point for compiled, _, point in series if compiled == "no" and point["measured_bytes"]]
    columns = ("model", "GiB", "precision", "compiled", "samples", "× probe", "predicted MiB", "measured MiB",
               "reserved MiB", "error", "corrected", "in interval")  # fmt: skip
    cells = ([*_names(row), compiled, *_peak_cells(point)] for compiled, row, point in series)
    return [_summary(eager), _table(columns, cells)]


def _summary(points: Sequence[Row]) -> str:
    if not points:
        return "No point was measured."
    errors = sorted(abs(_error(point, "predicted_bytes")) for point in points)
    within = sum(_side(point) == "yes" for point in points)
    return (
        f"Not compiled, {len(points)} points: median error {statistics.median(errors):.2%}, largest {errors[-1]:.2%}; "
        f"{within} inside the interval."
    )


def _peak_cells(point: Row) -> list[str]:
    cells = [str(point["samples"]), f"{point['beyond_probes']:.0f}", _mib(point["predicted_bytes"])]
    if not point["measured_bytes"]:
        return [*cells, "out of memory", "", "", "", ""]
    errors = [f"{_error(point, name):+.2%}" for name in ("predicted_bytes", "corrected_bytes")]
    return [*cells, _mib(point["measured_bytes"]), _mib(point["reserved_bytes"]), *errors, _side(point)]


def _error(point: Row, name: str) -> float:
    return float(point[name] / point["measured_bytes"] - 1)


def _side(point: Row) -> str:
    beyond = point["measured_bytes"] - point["predicted_bytes"]
    if abs(beyond) <= point["half_width_bytes"]:
        return "yes"
    return "too low" if beyond > 0 else "too high"


def _finder(rows: Sequence[Row]) -> str:
    columns = ("model", "GiB", "precision", "residual", "trials", "OOMs", "trials (evaluation)", "OOMs (evaluation)",
               "tuned MiB", "true MiB", "fill")  # fmt: skip
    cells = ([*_names(row), f"{row['relative_residual']:.2e}", str(row["trials"]), str(row["ooms"]),
              str(row["evaluation_trials"]), str(row["evaluation_ooms"]),
              _mib(row["tuned_limit_bytes"]) + (" (capped)" if row["capped"] else ""), *_fill_cells(row)]
             for row in rows)  # fmt: skip
    return _table(columns, cells)


def _fill_cells(row: Row) -> list[str]:
    true = row["true_limit_bytes"]
    return ["not met", ""] if true is None else [_mib(true), f"{row['tuned_limit_bytes'] / true:.3f}"]


def _recorded(rows: Sequence[Row]) -> str:
    columns = ("model", "GiB", "precision", "seconds", "base MiB", "probes' base MiB", "trial MiB", "÷ recorded",
               "trials", "OOMs", "fill", "finder's trials", "finder's fill", "reason")  # fmt: skip
    return _table(columns, ([*_names(row), *_recorded_cells(row)] for row in rows))


def _recorded_cells(row: Row) -> list[str]:
    of, finder = row["recorded"], [str(row["trials"]), _fill_cells(row)[1]]
    if "error" in of:
        return [*[""] * 8, *finder, _first_line(of["error"])]
    share = f"{of['measured_share']:.2%}" if of["measured_share"] else ""
    sizes = [_mib(of["base_bytes"]), _mib(row["base_bytes"]), _mib(of["peak_bytes"]), share]
    counts = [str(of["trials"]), str(of["ooms"]), _fill_cells(of)[1]]
    return [f"{of['seconds']:.0f}", *sizes, *counts, *finder, "; ".join(of["reasons"])]


def _fragmentation(rows: Sequence[Row]) -> str:
    with_ceiling = [row for row in rows if row.get("ceiling_bytes")]
    points = [(row, point) for row in with_ceiling for point in row["points"] if point["measured_bytes"]]
    columns = ("model", "GiB", "precision", "peak ÷ capacity", "allocated ÷ reserved", "ceiling", "too low by")
    cells = ([*_names(row), *_fragmentation_cells(row, point)] for row, point in points if point["reserved_bytes"])
    return _table(columns, cells)


def _fragmentation_cells(row: Row, point: Row) -> list[str]:
    ratio, ceiling = point["measured_bytes"] / point["reserved_bytes"], row["ceiling_bytes"] / row["capacity_bytes"]
    return [f"{point['measured_bytes'] / row['capacity_bytes']:.1%}", f"{ratio:.1%}", f"{ceiling:.1%}",
            f"{ceiling - ratio:+.1%}"]  # fmt: skip


def _throughput(rows: Sequence[Row], jobs: int) -> list[str]:
    swept = [row for row in rows if row.get("speeds")]
    columns = ("model", "GiB", "precision", "share", "samples", "samples/s", "of the best")
    table = _table(columns, ([*_names(row), *cells] for row in swept for cells in _speed_cells(row["speeds"])))
    crowd = f" {jobs} configurations were measured at once, so the speeds say nothing." if jobs > 1 else ""
    return [THROUGHPUT + crowd, table]


def _speed_cells(speeds: Sequence[Row]) -> Iterator[list[str]]:
    best = max((point["samples_per_second"] or 0.0 for point in speeds), default=0.0)
    for point in speeds:
        speed = point["samples_per_second"]
        reached = ["out of memory", ""] if speed is None else [f"{speed:.0f}", f"{speed / best:.3f}"]
        yield [f"{point['share']:.3f}", str(point["samples"]), *reached]


def _constants(measured: Row) -> list[str]:
    if "error" in measured:
        return [_quoted(measured["error"])]
    columns = ("after", "outside MiB", "reserved MiB", "at most MiB", "kept MiB")
    names = ("outside_bytes", "reserved_bytes", "transient_bytes", "kept_bytes")
    return [
        CONSTANTS,
        _table(columns, ([step["after"], *(_mib(step[name]) for name in names)] for step in measured["steps"])),
    ]


def _failures(rows: Mapping[str, Row]) -> list[str]:
    failed = [f"- {label}: {_first_line(row['error'])}" for label, row in rows.items() if "error" in row]
    return ["Errors, which left the rest of their rows unmeasured:", "\n".join(failed)] if failed else []


def _names(row: Row) -> list[str]:
    configuration = row["configuration"]
    return [configuration["model"], f"{configuration['capacity_bytes'] / GIB:.4g}", configuration["precision"]]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([_line(columns), _line(["---"] * len(columns)), *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mib(size: float) -> str:
    return f"{size / MIB:.1f}"


def _quoted(text: str) -> str:
    return "\n".join(["```text", *text.splitlines(), "```"])


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")
