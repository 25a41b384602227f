"""The charts of a report, as pure functions of the records of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log10
from typing import TYPE_CHECKING, Any, Final

from can_train.io.units import counted, size_text
from can_train.report.charts import (
    Axis,
    Chart,
    Point,
    Series,
    Tiles,
    Treemap,
    byte_axis,
    decade_axis,
    focused_axis,
    mean,
    number_axis,
    share_axis,
    thinned,
)
from can_train.reporter import TextTable

if TYPE_CHECKING:
    from can_train.factors.summary import FactorSummary
    from can_train.runs.recording import MemoryLimits, StepRecord
    from can_train.runs.trials import SettingsSearch, TrialRun
    from can_train.task import Predictions

_STEP: Final = "optimizer step"
# Most points of a curve, which has one for each distinct score.
_CURVE_POINTS: Final = 300
# Stretches of time that are told apart in a chart of a log.
_TIME_BINS: Final = 600
_HEADROOM: Final = 1.05
_REACH: Final = 20  # limits above this many times the peak are not drawn
_FEW: Final = 30  # up to this many measured steps, each is marked
_SMALL: Final = 220  # pixels, the height of charts that stand side by side
_COLORS: Final = 7
_RUN_COLORS: Final = 6  # without grey
_STRETCHES: Final = 100  # points of the training loss of each of several runs
_BINS: Final = 10  # of scores, in a calibration
_EXTREMES: Final = 5  # samples at each end of the scores
_SMALLEST: Final = 0.004  # share of a peak: parts below it are added up
_SECONDS: Final = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))  # from, unit, its name


def loss_chart(
    steps: Sequence[StepRecord], validation: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]] = ()
) -> Chart | None:
    """Draws the loss of each step, and the losses of training and validation samples after each epoch; None where
    nothing is known.

    Args:
        steps: Recorded steps.
        validation: Step and loss of each validation.
        training: Step and loss of training samples, computed as in validation.
    """
    train: list[Point] = [(step.step, step.loss) for step in steps]
    points = [*train, *validation, *training]
    values = [loss for _, loss in points if loss is not None]
    if not values:
        return None
    last = max(step for step, _ in points)
    best = min(validation, key=lambda point: point[1], default=None)
    # The means of stretches of a fortieth of the line, at their middles.
    size = max(1, len(train) // 40)
    stretches = [train[start : start + size] for start in range(0, len(train), size)]
    means = [(part[len(part) // 2][0], mean([loss for _, loss in part if loss is not None])) for part in stretches]
    lowest = "" if best is None else f"; the lowest validation loss is {best[1]:.4g}, after step {best[0]}"
    return Chart(
        title="Training and validation loss",
        description=f"Training and validation over {last} steps{lowest}.",
        x=number_axis(0, last, _STEP, whole=True),
        y=focused_axis(values, "loss"),
        series=[
            Series(name="training, each step", color=1, points=thinned(train, mean), faint=True),
            Series(name="training, mean", color=1, points=means),
            Series(name="training, as in validation", color=3, points=training),
            Series(name="validation", color=2, points=validation, dashed=True),
            Series(name="", color=2, kind="dots", points=validation,
                   texts=[f"step {step}: validation loss {loss:.4g}" for step, loss in validation]),
        ],
        is_zoomable=True,
    )  # fmt: skip


def losses_chart(runs: Mapping[str, Sequence[tuple[int, float]]]) -> Chart | None:
    """Draws the validation losses of several runs, by name."""
    values = [loss for points in runs.values() for _, loss in points]
    if not values:
        return None
    last = max(step for points in runs.values() for step, _ in points)
    series = []
    for index, (name, points) in enumerate(runs.items()):
        series += [_run_line(index, name, points), Series(name="", color=_color(index), points=points, kind="dots")]
    return Chart(
        title="Validation loss",
        description=f"The validation loss of {len(runs)} runs by step.",
        x=number_axis(0, last, _STEP, whole=True),
        y=focused_axis(values, "validation loss"),
        series=series,
        is_zoomable=True,
    )


def overlaid_charts(runs: Mapping[str, Sequence[StepRecord]]) -> list[Chart]:
    """Draws the loss and the memory of each step of several runs, by name; nothing where no run has recorded any."""
    last = max((steps[-1].step for steps in runs.values() if steps), default=0)
    lines: dict[str, dict[str, list[Point]]] = {"loss": {}, "memory": {}}
    for name, steps in runs.items():
        # The means of stretches: a loss jumps from step to step.
        size = max(1, len(steps) // _STRETCHES)
        parts = [steps[start : start + size] for start in range(0, len(steps), size)]
        lines["loss"][name] = [(part[-1].step, mean([step.loss for step in part])) for part in parts]
        lines["memory"][name] = thinned([(step.step, step.allocated_bytes) for step in steps if step.allocated_bytes])
    charts = []
    for kind, title in (("loss", "Training loss"), ("memory", "Memory of each step")):
        drawn = {name: points for name, points in lines[kind].items() if points}
        values = [value for points in drawn.values() for _, value in points if value is not None]
        if values:
            y = focused_axis(values, "loss") if kind == "loss" else byte_axis(_HEADROOM * max(values), "memory")
            charts.append(Chart(
                title=title,
                description=f"{title} of {len(drawn)} runs.",
                x=number_axis(0, last, _STEP, whole=True),
                y=y,
                series=[_run_line(index, name, drawn[name]) for index, name in enumerate(runs) if name in drawn],
                is_zoomable=True,
            ))  # fmt: skip
    return charts


def _run_line(index: int, name: str, points: Sequence[Point]) -> Series:
    """Draws the line of one of several runs, told apart from its neighbours by colour and by the kind of line."""
    style = (index + index // _RUN_COLORS) % 3
    return Series(name=name, color=_color(index), points=points, dashed=style == 1, dotted=style == 2)


def search_charts(search: SettingsSearch, trials: Sequence[TrialRun]) -> list[Chart]:
    """Draws the best objective of each trial of a search over each of its numeric settings."""
    best = [(trial.trial, value) for trial in trials if (value := search.best(trial.curve)) is not None]
    kinds = (("trained to its end", 1, [each for each in best if not each[0].stopped_after]),
             ("ended early", 2, [each for each in best if each[0].stopped_after]))  # fmt: skip
    charts = []
    for axis in (each for each in search.axes if best and not each.choices):
        name, place = axis.key.rpartition(".")[2], log10 if axis.is_logarithmic else float
        series = []
        for kind, color, ended in kinds:
            values = [(trial.number, (trial.values or {})[axis.key], value) for trial, value in ended]
            texts = [f"trial {number}: {name} {x}, {search.objective} {value:.4g}" for number, x, value in values]
            points = [(place(float(x)), value) for _, x, value in values]
            series += [Series(name=kind, color=color, kind="dots", points=points, texts=texts)] if values else []
        charts.append(Chart(
            title=f"{search.objective} by {name}",
            description=f"The best validation of {len(best)} trials; {axis}.",
            x=(decade_axis if axis.is_logarithmic else number_axis)(axis.low, axis.high, axis.key),
            y=focused_axis([value for _, value in best], f"best validation {search.objective}"),
            series=series,
            height=_SMALL,
        ))  # fmt: skip
    return charts


def _color(index: int) -> int:
    return 1 + index % _RUN_COLORS


# Memory


def memory_charts(
    steps: Sequence[StepRecord], limits: Sequence[MemoryLimits], links: Mapping[int, str] | None = None
) -> list[Chart]:
    """Draws memory by step beside the planned limits, and micro-batches by step; no chart without steps.

    Args:
        steps: Recorded steps.
        limits: Planned limits.
        links: Place in the page of the log's line about a rescue, by step.
    """
    if not steps:
        return []
    x = number_axis(0, steps[-1].step, _STEP, whole=True)
    rescues = [step for step in steps if step.ooms_rescued]
    texts = []
    for step in rescues:
        times = "once" if step.ooms_rescued == 1 else f"{step.ooms_rescued} times"
        texts.append(f"step {step.step}: memory ran out {times}; finished in {step.micro_batches} micro-batches")
    marks = Series(name="out of memory, rescued", color=2, kind="crosses", texts=texts,
                   links=[(links or {}).get(step.step, "") for step in rescues])  # fmt: skip
    most, ooms = max(step.micro_batches for step in steps), sum(step.ooms_rescued for step in rescues)
    parts = Chart(
        title="Micro-batches and rescues",
        description=f"A step had at most {most} micro-batch{'es' if most > 1 else ''}; "
        + (f"memory ran out {counted(ooms, 'time')}, and was rescued." if ooms else "memory never ran out."),
        x=x,
        y=number_axis(0, most + 1, "micro-batches of a step", whole=True),
        height=140,
        is_zoomable=True,
        series=[
            Series(name="micro-batches", color=4, kind="steps",
                   points=thinned([(step.step, step.micro_batches) for step in steps])),
            replace(marks, points=[(step.step, step.micro_batches) for step in rescues]),
        ],
    )  # fmt: skip
    memory = _memory_chart(steps, limits, x, marks)
    return [parts] if memory is None else [memory, parts]


def _memory_chart(steps: Sequence[StepRecord], limits: Sequence[MemoryLimits], x: Axis, marks: Series) -> Chart | None:
    allocated: list[Point] = [(step.step, step.allocated_bytes) for step in steps if step.allocated_bytes is not None]
    if not allocated:
        return None
    reserved: list[Point] = [(step.step, step.reserved_bytes) for step in steps if step.reserved_bytes is not None]
    levels = {
        name: _held(limits, steps[-1].step, value_of)
        for name, value_of in (
            ("capacity", lambda limit: limit.capacity_bytes),
            ("safe limit", lambda limit: limit.safe_bytes),
            ("lowest", lambda limit: limit.predicted_bytes and limit.predicted_bytes[0]),
            ("predicted peak", lambda limit: limit.predicted_bytes and limit.predicted_bytes[1]),
        )
    }
    peak = max(value for _, value in allocated if value is not None)
    values = [value for points in (allocated, reserved, *levels.values()) for _, value in points if value is not None]
    # On the host a run takes a small part of the memory: the run's memory would be a line at the bottom.
    y = byte_axis(_HEADROOM * max(value for value in values if value <= _REACH * peak), "memory")
    shown = {name: [(at, value if (value or 0) <= y.high else None) for at, value in points]
             for name, points in levels.items()}  # fmt: skip
    capacity = max((limit.capacity_bytes for limit in limits), default=0)
    return Chart(
        title="Memory of each step",
        description=f"The peak was {size_text(peak)}, and {size_text(capacity)} may be used.",
        x=x,
        y=y,
        height=300,
        is_zoomable=True,
        series=[
            Series(name="predicted peak", color=3, kind="area", points=shown["predicted peak"], base=shown["lowest"]),
            Series(name="capacity", color=0, points=shown["capacity"]),
            Series(name="safe limit", color=5, dashed=True, points=shown["safe limit"]),
            Series(name="reserved", color=4, points=thinned(reserved), dotted=True),
            Series(name="allocated", color=1, points=thinned(allocated)),
            # On the CPU few steps are measured.
            Series(name="", color=1, kind="dots", points=allocated if len(allocated) <= _FEW else ()),
            replace(marks, points=[(step.step, y.high) for step in steps if step.ooms_rescued]),
        ],
    )


def _held(limits: Sequence[MemoryLimits], last: int, value_of: Any) -> list[Point]:
    """Returns the value of each stretch of steps between two changes of the limits, at both of its ends."""
    ends = [*(limit.from_step for limit in limits[1:]), *([last] if limits else [])]
    points: list[Point] = []
    for limit, end in zip(limits, ends, strict=True):
        begin = 0 if limit is limits[0] else limit.from_step
        points += [(begin, value_of(limit)), (end, value_of(limit))]
    return points if any(y is not None for _, y in points) else []


# The safety factor


def factor_chart(summary: FactorSummary, run_id: str = "") -> Chart | None:
    """Draws the factor of each run and the peak that it reached; `run_id` is pointed out. None without runs."""
    runs = summary.runs
    if not runs:
        return None
    factors: list[Point] = [(number, run.factor) for number, run in enumerate(runs, 1)]
    peaks: list[Point] = [(number, run.peak) for number, run in enumerate(runs, 1) if run.peak is not None]
    ooms: list[Point] = [(number, 1.0) for number, run in enumerate(runs, 1) if run.ran_out_of_memory]
    this_run = [(number, run.factor) for number, run in enumerate(runs, 1) if run_id and run.run_id == run_id]
    return Chart(
        title=f"Safety factor of {summary.key} on {summary.device}",
        description=f"{len(runs)} runs, oldest first; the target is a peak of {summary.aim:.0%} of the capacity.",
        x=number_axis(0.5, len(runs) + 0.5, "run, oldest first", whole=True),
        y=share_axis("share of tuned limit (factor) or capacity (peak)", high=_HEADROOM),
        series=[
            Series(name=f"target {summary.aim:.0%}", color=0, kind="level", points=[(0, summary.aim)], dashed=True),
            Series(name="safety factor", color=1, points=factors),
            Series(name="", color=1, kind="dots", points=factors,
                   texts=[f"{run.run_id}: factor {run.factor:.3f}" for run in runs]),
            Series(name="peak", color=3, kind="dots", points=peaks,
                   texts=[f"peak {value:.1%}" for _, value in peaks if value is not None]),
            Series(name="out of memory", color=2, kind="crosses", points=ooms),
            Series(name="this run", color=4, kind="dots", points=this_run),
        ],
    )  # fmt: skip


# How well samples are told apart


def has_both_classes(predictions: Predictions) -> bool:
    """Tells whether curves are defined."""
    return bool(predictions.positive.any() and not predictions.positive.all())


def precision_recall_chart(title: str, runs: Mapping[str, Predictions]) -> Chart:
    """Draws precision by recall of one test set, for one run or for several by name."""
    share = float(next(iter(runs.values())).positive.mean())
    curves = {}
    for name, predictions in runs.items():
        hits, alarms, (hit, alarm), num_positive, _ = _counts(predictions)
        # As the judgement has it: the precision is 0 where nothing is flagged.
        chosen = (hit / num_positive, hit / max(hit + alarm, 1))
        curves[name] = (_few(hits / num_positive, hits / (hits + alarms)), chosen)
    base = Series(name=f"flagging everything, {share:.0%}", color=0, kind="level", points=[(0, share)], dashed=True)
    return _curve_chart(title, "Precision and recall", ("recall", "precision"), base, curves)


def roc_chart(title: str, runs: Mapping[str, Predictions]) -> Chart:
    """Draws the true-positive rate by the false-positive rate of one test set, for one run or for several by name."""
    curves = {}
    for name, predictions in runs.items():
        hits, alarms, (hit, alarm), num_positive, num_negative = _counts(predictions)
        points: list[Point] = [(0.0, 0.0), *_few(alarms / num_negative, hits / num_positive)]
        curves[name] = (points, (alarm / num_negative, hit / num_positive))
    labels = ("false-positive rate", "true-positive rate")
    base = Series(name="chance", color=0, points=[(0, 0), (1, 1)], dashed=True)
    return _curve_chart(title, "True-positive rate by false-positive rate", labels, base, curves)


def calibration_chart(title: str, predictions: Predictions) -> Chart | None:
    """Draws the share of positive samples by their mean score, in ten stretches of scores; None where scores are no
    probabilities.
    """
    import numpy as np

    score, positive = predictions.score.astype(np.float64), predictions.positive
    if not len(score) or not (score >= 0).all() or not (score <= 1).all():
        return None
    sample, positive_word, _ = predictions.words
    name = f"{positive_word} {sample}"
    bins = np.minimum((score * _BINS).astype(np.int64), _BINS - 1)
    counts = np.bincount(bins, minlength=_BINS)
    means = np.bincount(bins, weights=score, minlength=_BINS)[counts > 0] / counts[counts > 0]
    shares = np.bincount(bins, weights=positive, minlength=_BINS)[counts > 0] / counts[counts > 0]
    error = float((np.abs(means - shares) * counts[counts > 0]).sum() / len(score))
    points: list[Point] = [(float(x), float(y)) for x, y in zip(means, shares, strict=True)]
    texts = [f"{count:,} {sample}s with a mean score of {x:.1%}: {y:.1%} are {name}s"
             for count, x, y in zip(counts[counts > 0], means, shares, strict=True)]  # fmt: skip
    return Chart(
        title=title,
        description=f"Share of {name}s by mean score, in {len(points)} stretches of scores.",
        x=share_axis("mean score"),
        y=share_axis(f"share of {name}s"),
        height=_SMALL,
        series=[
            Series(name="calibrated", color=0, points=[(0, 0), (1, 1)], dashed=True),
            Series(name=f"model, expected calibration error {error:.1%}", color=1, points=points),
            Series(name="", color=1, kind="dots", points=points, texts=texts),
        ],
    )


def confusion_table(predictions: Predictions) -> TextTable:
    """Counts positive and negative samples, flagged and not; the samples of each class by predicted class."""
    sample, positive, negative = predictions.words
    rows: list[tuple[str, ...]] = []
    if predictions.confusion:
        for number, counts in enumerate(predictions.confusion):
            share = f"{counts[number] / sum(counts):.1%}" if sum(counts) else "-"
            rows.append((f"class {number}", *(f"{count:,}" for count in counts), share))
        columns = ("", *(f"predicted {number}" for number in range(len(predictions.confusion))), "right")
        return TextTable("Confusion matrix", columns, rows)
    for noun, mask in ((positive, predictions.positive), (negative, ~predictions.positive)):
        flagged, total = int((predictions.flagged & mask).sum()), int(mask.sum())
        share = f"{flagged / total:.1%}" if total else "-"
        rows.append((noun, f"{flagged:,}", f"{total - flagged:,}", share))
    return TextTable("Confusion matrix", (sample, "flagged", "not flagged", "share flagged"), rows)


def extremes_table(predictions: Predictions) -> TextTable:
    """Lists the samples at the ends of the scores where the labels are least expected: the positive samples with the
    lowest scores, and the negative samples with the highest.
    """
    import numpy as np

    sample, positive, negative = predictions.words
    # Of several classes, each sample has a prediction, which is right or wrong.
    has_flags = not predictions.confusion
    rows = []
    for noun, mask, sign in ((positive, predictions.positive, 1), (negative, ~predictions.positive, -1)):
        numbers = np.flatnonzero(mask)
        order = numbers[np.argsort(sign * predictions.score[numbers], kind="stable")][:_EXTREMES]
        rows += [
            (f"{sample} {number}", *([f"{predictions.time_s[number]:.2f}"] if len(predictions.time_s) else []), noun,
             f"{predictions.score[number]:.4g}",
             *([("no", "yes")[int(predictions.flagged[number])]] if has_flags else []))
            for number in order.tolist()
        ]  # fmt: skip
    times = ("time s",) if len(predictions.time_s) else ()
    title = f"{positive.capitalize()} {sample}s with the lowest scores, {negative} {sample}s with the highest"
    columns = ("label", "score", "flagged") if has_flags else ("outcome", "probability")
    return TextTable(title, (sample, *times, *columns), rows)


def ends_table(predictions: Predictions) -> TextTable:
    """Lists the samples with the lowest and the highest scores, of samples without classes."""
    import numpy as np

    sample, name = predictions.words[0], predictions.score_name
    order = np.argsort(predictions.score, kind="stable").tolist()
    ends = dict.fromkeys([*order[:_EXTREMES], *order[-_EXTREMES:]])
    rows = [(f"{sample} {number}", f"{predictions.score[number]:.4g}") for number in ends]
    return TextTable(f"{sample.capitalize()}s with the lowest and the highest {name}", (sample, name), rows)


def _curve_chart(
    title: str,
    what: str,
    labels: tuple[str, str],
    base: Series,
    curves: Mapping[str, tuple[Sequence[Point], tuple[float, float]]],
) -> Chart:
    """Draws the points of each run's curve, with the place of its chosen threshold."""
    series, several = [base], len(curves) > 1
    for index, (name, (points, (x, y))) in enumerate(curves.items()):
        color = _color(index)
        series += [
            _run_line(index, name, points),
            Series(name="" if several else "chosen threshold", color=color if several else 2, kind="dots",
                   points=[(x, y)], texts=[f"{name}: {y:.1%} at {x:.1%}"]),
        ]  # fmt: skip
    description = f"{what} of {len(curves)} run(s), with the chosen thresholds."
    return Chart(title=title, description=description, x=share_axis(labels[0]), y=share_axis(labels[1]),
                 height=_SMALL, series=series)  # fmt: skip


def _counts(predictions: Predictions) -> tuple[Any, Any, tuple[int, int], int, int]:
    """Returns hits and false alarms at each distinct threshold, from the highest down; those at the chosen threshold;
    and the numbers of positive and of negative samples.
    """
    import numpy as np

    order = np.argsort(-predictions.score, kind="stable")
    score, positive = predictions.score[order], predictions.positive[order]
    # Equal scores are flagged together.
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    hits, num_positive = np.cumsum(positive)[last], int(positive.sum())
    hit = int((predictions.flagged & predictions.positive).sum())
    alarm = int(predictions.flagged.sum()) - hit
    return hits, last + 1 - hits, (hit, alarm), num_positive, len(positive) - num_positive


def _few(x: Any, y: Any) -> list[Point]:
    """Returns the points of a curve, thinned to even distances if there are many."""
    import numpy as np

    indices = np.arange(len(x))
    if len(x) > _CURVE_POINTS:
        length = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
        indices = np.unique(np.searchsorted(length, np.linspace(0, length[-1], _CURVE_POINTS)).clip(max=len(x) - 1))
    return [(round(float(x[index]), 4), round(float(y[index]), 4)) for index in indices]


def timeline_chart(title: str, predictions: Predictions) -> Chart | None:
    """Draws flagged and positive samples over the time of a recording; None without times."""
    if not len(predictions.time_s):
        return None
    sample, positive, _ = predictions.words
    end = float(predictions.time_s.max())
    _, unit, name = next(scale for scale in _SECONDS if end >= scale[0])
    masks = {
        f"{positive}s": (4, predictions.positive),
        "found": (1, predictions.flagged & predictions.positive),
        "missed": (5, ~predictions.flagged & predictions.positive),
        "false alarms": (2, predictions.flagged & ~predictions.positive),
    }
    counts = ", ".join(f"{label} {int(mask.sum()):,}" for label, (_, mask) in masks.items())
    return Chart(
        title=title,
        description=f"{len(predictions.score):,} {sample}s in their time: {counts}.",
        x=number_axis(0.0, end, f"time in the recording ({name})", unit=unit),
        strips=[(label, color, _spans(predictions, mask)) for label, (color, mask) in masks.items()],
        height=4 * 26,
    )


def _spans(predictions: Predictions, mask: Any) -> list[tuple[float, float]]:
    """Returns the stretches of time of the masked samples; a sample lasts until the next sample begins. Gaps that are
    too short to be seen are closed.
    """
    import numpy as np

    order = np.argsort(predictions.time_s, kind="stable")
    start, chosen = predictions.time_s[order].astype(np.float64), mask[order]
    stop = np.append(start[1:], start[-1] + (start[-1] - start[0]) / max(len(start) - 1, 1))
    start, stop = start[chosen], stop[chosen]
    if not len(start):
        return []
    gaps = np.flatnonzero(start[1:] - stop[:-1] > predictions.time_s.max() / _TIME_BINS) + 1
    firsts, lasts = [0, *gaps.tolist()], [*(gaps - 1).tolist(), len(start) - 1]
    return [(float(start[first]), float(stop[last])) for first, last in zip(firsts, lasts, strict=True)]


def memory_treemap(explained: Mapping[str, Any]) -> Treemap:
    """Draws the parts of a step's peak, as `run_facts.read_memory_parts` returns them, by kind."""
    peak, by_kind = explained["peak_bytes"], dict[str, list[Mapping[str, Any]]]()
    for part in explained["parts"]:
        by_kind.setdefault(part["kind"], []).append(part)
    colors = {kind: (number + 1) % _COLORS for number, kind in enumerate(by_kind)}
    groups = sorted((_tiles(kind, parts, peak, colors[kind]) for kind, parts in by_kind.items()),
                    key=lambda group: -sum(group.sizes))  # fmt: skip
    kinds = ", ".join(group.name for group in groups)
    return Treemap(title=f"Parts of the peak of {size_text(peak)}", description=kinds, groups=groups)


def _tiles(kind: str, parts: Sequence[Mapping[str, Any]], peak: float, color: int) -> Tiles:
    """Makes a tile of each part of a kind, and one of all that are too small to be seen."""
    shown = sorted(
        (part for part in parts if part["num_bytes"] >= _SMALLEST * peak), key=lambda part: -part["num_bytes"]
    )
    sizes = [part["num_bytes"] for part in shown]
    texts = [[*filter(None, (part["module"], part["operation"])), size_text(part["num_bytes"])] for part in shown]
    total = sum(part["num_bytes"] for part in parts)
    if rest := len(parts) - len(shown):
        size = sum(part["num_bytes"] for part in parts if part["num_bytes"] < _SMALLEST * peak)
        sizes.append(size)
        texts.append([counted(rest, "smaller part"), size_text(size)])
        ordered = sorted(zip(sizes, texts, strict=True), key=lambda item: -item[0])
        sizes, texts = [item[0] for item in ordered], [item[1] for item in ordered]
    return Tiles(name=f"{kind}: {size_text(total)}, {total / peak:.0%}", color=color, sizes=sizes, texts=texts)
