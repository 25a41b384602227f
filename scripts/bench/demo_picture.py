"""The picture at the top of README.md: the trainings of `can-train demo`, step by step, as they were recorded.

`scripts/bench/example picture` records them anew. The picture is drawn from the record alone.
"""

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Final

from can_train.cli.demo import SMALL, STEPS_TAKEN, TAKEN, TAKEN_AFTER, largest_difference, run_in
from can_train.io.units import parse_size
from can_train.report.charts import Axis, Chart, Series, byte_axis, number_axis, plot_svg, read_style

ROOT: Final = Path(__file__).resolve().parents[2]
RECORD: Final = Path(__file__).with_name("demo.json")

# In pixels.
PANEL_HEIGHT: Final = 300
TOP: Final = 92  # of a panel, above its plot: title, two lines of text, the unit
BOTTOM: Final = 42
LEFT: Final = 46
RIGHT: Final = 16

_HALF_BAR: Final = 0.42  # of the distance between two bars
MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step as it is drawn."""

    loss: float
    peak_bytes: int
    micro_batches: int
    rescued: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """The trainings of the demonstration.

    Attributes:
        printed: What the demonstration printed of them.
        taken: The first and the last step in which another process held `taken_bytes`.
        difference: The largest between a weight after one training and after the other.
    """

    date: str
    commit: str
    printed: Sequence[str]
    capacity_bytes: int
    taken_bytes: int
    taken: tuple[int, int]
    weights: int
    difference: float
    predicted_bytes: int
    batch: int
    whole: Sequence[Step]
    split: Sequence[Step]


def record() -> Record:
    """Runs the demonstration's trainings."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as name, redirect_stdout(printed):
        whole, split = run_in(Path(name))
        first, second, _ = sorted((Path(name) / "runs").iterdir())
        steps = [_steps(first), _steps(second)]
    return Record(
        date=datetime.now(UTC).date().isoformat(),
        commit=commit.stdout.strip(),
        printed=printed.getvalue().splitlines(),
        capacity_bytes=parse_size(SMALL.removeprefix("sim:")),
        taken_bytes=parse_size(TAKEN),
        taken=(TAKEN_AFTER + 1, TAKEN_AFTER + STEPS_TAKEN),
        weights=sum(value.numel() for value in whole.weights.values()),
        difference=largest_difference(whole, split),
        predicted_bytes=split.result["predicted_peak_bytes"],
        batch=split.result["plan"]["plan"]["logical_batch"],
        whole=steps[0],
        split=steps[1],
    )


def _steps(run: Path) -> list[Step]:
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return [Step(loss=line["loss"], peak_bytes=line["allocated_bytes"], micro_batches=line["micro_batches"],
                 rescued=line["ooms_rescued"]) for line in lines if "loss" in line]  # fmt: skip


def read_record() -> Record:
    """Reads the trainings that were recorded last."""
    fields = json.loads(RECORD.read_text(encoding="utf-8"))
    steps = {name: [Step(**step) for step in fields[name]] for name in ("whole", "split")}
    return Record(**{**fields, **steps, "taken": tuple(fields["taken"])})


# The picture


def pictures(of: Record) -> Mapping[str, str]:
    """Returns the SVG files of docs/ by name: panels in a row, and in a column for a narrow screen."""
    row = _file(of, [(0, 0, 250), (250, 0, 386), (636, 0, 264)], (900, PANEL_HEIGHT))
    column = _file(of, [(0, number * PANEL_HEIGHT, 400) for number in range(3)], (400, 3 * PANEL_HEIGHT))
    return {"demo.svg": row, "demo-narrow.svg": column}


def _file(of: Record, places: Sequence[tuple[int, int, int]], size: tuple[int, int]) -> str:
    panels = (_plan, _rescue, _weights)
    drawn = "".join(f'<g transform="translate({left} {top})">{panel(of, width)}</g>'
                    for panel, (left, top, width) in zip(panels, places, strict=True))  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {size[0]} {size[1]}" '
        f'width="{size[0]}" height="{size[1]}"><style>{read_style()}</style>'
        f'<rect width="100%" height="100%" style="fill: var(--page)"/>{drawn}</svg>\n'
    )


def _plan(of: Record, width: int) -> str:
    """Draws the batch whole and as planned, beside the memory of the GPU."""
    whole, parts = max(step.peak_bytes for step in of.whole), of.split[0].micro_batches
    plot = _Plot(
        Axis(low=0.4, high=2.6, ticks=[(1, "whole"), (2, f"{parts} micro-batches")], label=""), _memory(of, "")
    )
    bars = [
        plot.bar(1, (0, whole), "span c2"),
        plot.bar(2, (0, of.predicted_bytes), "span c1"),
        plot.text(1, whole, f"{whole / MIB:.0f}"),
        plot.text(2, of.predicted_bytes, f"{of.predicted_bytes / MIB:.0f} predicted"),
    ]
    text = (
        f"{of.batch} samples take {whole / MIB:.0f} of {of.capacity_bytes / MIB:.0f} MiB. A step",
        f"is computed in {parts} micro-batches.",
    )
    return _panel("1. Plan", text, plot, [*bars, _capacity(of, plot)], width)


def _rescue(of: Record, width: int) -> str:
    """Draws the peak of each step, and the memory of the other process."""
    numbers = range(1, len(of.split) + 1)
    x = Axis(low=0.4, high=len(of.split) + 0.6, ticks=[(number, str(number)) for number in numbers], label="step")
    plot = _Plot(x, _memory(of, "; above a bar: its micro-batches"))
    bars = []
    for number, step in enumerate(of.split, 1):
        bars.append(plot.bar(number, (0, step.peak_bytes), "span c1"))
        if of.taken[0] <= number <= of.taken[1]:
            bars.append(plot.bar(number, (of.capacity_bytes - of.taken_bytes, of.capacity_bytes), "area c0"))
        if step.rescued:
            bars.append(plot.bar(number, (0, of.split[number - 2].peak_bytes), "line dashed c2"))
        bars.append(plot.text(number, step.peak_bytes, str(step.micro_batches)))
    ((failed, step),) = [(number, step) for number, step in enumerate(of.split, 1) if step.rescued]
    text = (
        f"Another process takes {of.taken_bytes / MIB:.0f} MiB in steps {of.taken[0]} to {of.taken[1]}. Memory runs",
        f"out {step.rescued} times in step {failed}, which is redone in {step.micro_batches} micro-batches.",
    )
    return _panel("2. Rescue", text, plot, [*bars, _capacity(of, plot)], width)


def _weights(of: Record, width: int) -> str:
    """Draws the losses of both trainings."""
    losses = [[(float(number), step.loss) for number, step in enumerate(steps, 1)] for steps in (of.whole, of.split)]
    highest = max(loss for line in losses for _, loss in line)
    x = Axis(low=0.4, high=len(of.split) + 0.6, ticks=[(number, str(number)) for number in (1, 5, 10)], label="step")
    y = number_axis(0.0, highest * 1.1, "loss: line whole, dots micro-batches")
    dots = Series(name="micro-batches", color=1, points=losses[1], kind="dots")
    plot = _Plot(x, y, [Series(name="whole", color=2, points=losses[0]), dots])
    text = (f"{of.weights:,} weights end as on a larger GPU:", f"they differ by at most {of.difference:.0e}.")
    return _panel("3. Equal weights", text, plot, [], width)


@dataclass(frozen=True)
class _Plot:
    """Axes, and what is drawn in per cent of them."""

    x: Axis
    y: Axis
    series: Sequence[Series] = ()

    def bar(self, at: float, span: tuple[float, float], look: str) -> str:
        left, right = (100 * self.x.share(at + side * _HALF_BAR) for side in (-1, 1))
        bottom, top = (100 * (1 - self.y.share(value)) for value in span)
        size = f'width="{right - left:.2f}%" height="{bottom - top:.2f}%"'
        return f'<rect class="{look}" x="{left:.2f}%" y="{top:.2f}%" {size}/>'

    def text(self, at: float, value: float, text: str) -> str:
        place = f'x="{100 * self.x.share(at):.2f}%" y="{100 * (1 - self.y.share(value)):.2f}%"'
        return f'<text class="name" {place} dy="-5" text-anchor="middle">{escape(text)}</text>'


def _memory(of: Record, more: str) -> Axis:
    axis = byte_axis(1.15 * max(step.peak_bytes for step in of.whole), "memory")
    return replace(axis, label=axis.label + more)


def _capacity(of: Record, plot: _Plot) -> str:
    """Draws the memory of the GPU as a level with its name."""
    level = f"{100 * (1 - plot.y.share(of.capacity_bytes)):.2f}%"
    name = (
        f'<text class="name" x="100%" y="{level}" dy="-5" text-anchor="end">GPU: {of.capacity_bytes / MIB:.0f}</text>'
    )
    return f'<line class="line dashed c0" x1="0" x2="100%" y1="{level}" y2="{level}"/>{name}'


def _panel(title: str, lines: Sequence[str], plot: _Plot, drawn: Sequence[str], width: int) -> str:
    chart = Chart(title=title, description=" ".join(lines), x=plot.x, y=plot.y, series=plot.series)
    place = f'x="{LEFT}" y="{TOP}" width="{width - LEFT - RIGHT}" height="{PANEL_HEIGHT - TOP - BOTTOM}"'
    texts = "".join(f'<text x="2" y="{40 + 16 * number}">{escape(line)}</text>' for number, line in enumerate(lines))
    return (
        f'<text class="title" x="2" y="20">{escape(title)}</text>{texts}{plot_svg(chart, place)}'
        f'<svg {place} overflow="visible">{"".join(drawn)}</svg>'
    )


def main() -> None:
    """Records the trainings, unless `--draw` is given, and draws them."""
    if "--draw" not in sys.argv:
        RECORD.write_text(json.dumps(asdict(record()), indent=1) + "\n", encoding="utf-8")
    for name, text in pictures(read_record()).items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
