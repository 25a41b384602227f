"""The HTML page of runs, which needs no network: reads the records of each run, and writes the page as one text."""

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from can_train import __version__
from can_train.errors import StateError, with_command_name
from can_train.io.records import text_or_nothing
from can_train.io.units import counted, size_text, value_text
from can_train.report import figures
from can_train.report.charts import Chart, figure_html, read_style, treemap_html
from can_train.report.run_facts import (
    ComparedRun,
    full_plan,
    head_facts,
    legend_names,
    memory_lines,
    read_memory_parts,
    read_plan,
    score_tables,
    trial_of,
)
from can_train.reporter import TextTable
from can_train.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from can_train.factors.summary import FactorSummary
    from can_train.runs.recording import MemoryLimits, StepRecord
    from can_train.task import Predictions

_LEAST_FACTOR_RUNS: Final = 3  # of a chart of safety factors: fewer are no course
_LARGEST_PARTS: Final = 12  # rows of the table
_MOST_RESCUES: Final = 200  # lines of a log
_RESCUE: Final = re.compile(r"note: step (\d{1,18}): memory ran out ")
_NUMBER: Final = re.compile(r"[-+−±]?\.?\d|[–-]$")  # begins a number; or stands for one that is missing
_TEXT_LETTERS: Final = 24  # a longer cell is a text, which may be wrapped


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A run with its records.

    Attributes:
        run: The run as a comparison has it.
        config: Its configuration.
        steps: Its recorded steps.
        limits: The memory limits of its plans.
        validation: Step and loss of each validation.
        training: Step and loss of training samples, computed as in validation.
        predictions: Predictions on its test sets, by name.
        damage: Why the predictions cannot be read; empty if they can.
        history: Earlier runs of its configuration; None: unknown.
    """

    run: ComparedRun
    config: Mapping[str, Any]
    steps: "Sequence[StepRecord]" = ()
    limits: "Sequence[MemoryLimits]" = ()
    validation: Sequence[tuple[int, float]] = ()
    training: Sequence[tuple[int, float]] = ()
    predictions: "Mapping[str, Predictions]" = field(default_factory=dict)
    damage: str = ""
    history: "FactorSummary | None" = None

    @property
    def folder(self) -> RunFolder:
        """Its folder."""
        return self.run.status.known.folder

    @property
    def anchor(self) -> str:
        """The name of its section in the page's links."""
        return escape(f"run-{self.run.status.known.run_id}")


def read_run(run: ComparedRun, state_folder: Path) -> ReportedRun:
    """Reads the records of a run; missing or damaged ones are left out.

    Raises:
        RunError: Its configuration cannot be read.
    """
    from can_train.factors.store import get_safety_factor_db
    from can_train.io.arrays import FolderDamageError
    from can_train.runs.recording import read_predictions, read_steps

    folder = run.status.known.folder
    steps, limits = read_steps(folder.path)
    predictions, damage = {}, ""
    try:
        predictions = read_predictions(folder.predictions_path)
    except FolderDamageError as error:
        damage = str(error)
    lines = folder.metrics()
    validation, training = (
        [(line["step"], line[name]) for line in lines
         if isinstance(line.get(name), float) and isinstance(line.get("step"), int)]
        for name in ("validation_loss", "training_loss")
    )  # fmt: skip
    # The history of the factor that the run taught; if it taught none, the newest of its configuration.
    try:
        summaries = get_safety_factor_db(str(state_folder)).of_key(run.status.known.record.key)
    except StateError:
        summaries = []
    variants = [variant for summary in summaries for variant in (*summary.other_settings, summary)]
    taught = [variant for variant in variants
              if any(observed.run_id == run.status.known.run_id for observed in variant.runs)]  # fmt: skip
    return ReportedRun(run=run, config=folder.config(), steps=steps, limits=limits, validation=validation,
                       training=training, predictions=predictions, damage=damage,
                       history=next(iter([*taught, *reversed(summaries)]), None))  # fmt: skip


def page_html(runs: Sequence[ReportedRun], comparison: "Sequence[TextTable]") -> str:
    """Makes the page; text that may come from a user is escaped.

    Args:
        runs: The runs.
        comparison: The tables that begin a page of several runs.
    """
    is_single = len(runs) == 1
    title = f"Run {runs[0].run.status.known.run_id}" if is_single else f"{len(runs)} runs compared"
    parts = [] if is_single else [_comparison(runs, comparison)]
    parts += [_run_section(run, alone=is_single) for run in runs]
    links = "" if is_single else "".join(f'<a href="#{run.anchor}">{escape(run.run.name)}</a>' for run in runs)
    written = f"Written by can-train {escape(__version__)} on {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}."
    style, script = f"{read_style()}{read_style('page.css')}", read_style("page.js")
    # A browser shows the page in this style, runs this script, and loads nothing.
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{f"<nav>{links}</nav>" if links else ""}
{"".join(parts)}
<footer>{written}</footer>
</main>
<script>{script}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _comparison(runs: Sequence[ReportedRun], tables: "Sequence[TextTable]") -> str:
    names = legend_names([run.run for run in runs])
    losses = figures.losses_chart({name: run.validation for name, run in zip(names, runs, strict=True)
                                   if run.validation})  # fmt: skip
    overlaid = figures.overlaid_charts({name: run.steps for name, run in zip(names, runs, strict=True)})
    curves, charts = [], _search_charts(runs)
    for test_set in dict.fromkeys(name for run in runs for name in run.predictions):
        predictions = {name: run.predictions[test_set] for name, run in zip(names, runs, strict=True)
                       if test_set in run.predictions
                       and not run.predictions[test_set].confusion
                       and figures.has_both_classes(run.predictions[test_set])}  # fmt: skip
        if len(predictions) > 1:
            curves.append(figures.precision_recall_chart(test_set, predictions))
    return "\n".join([
        "<section>",
        _tables(tables),
        f'<div class="grid">{_figures(charts)}</div>' if charts else "",
        _figures([losses]) if losses else _missing("None of the runs has a validation loss yet."),
        f'<div class="grid">{_figures(overlaid)}</div>' if overlaid else "",
        f'<h3>Precision and recall by test set</h3><div class="grid">{_figures(curves)}</div>' if curves else "",
        "</section>",
    ])  # fmt: skip


def _search_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Draws the search whose trials the runs are; none where they are of several, or no trials."""
    trials = [trial for run in runs if (trial := trial_of(run.run)) is not None]
    if len({trial.trial.search for trial in trials}) != 1:
        return []
    with suppress(StateError):
        return figures.search_charts(trials[0].search.search, trials)
    return []


def _run_section(run: ReportedRun, *, alone: bool) -> str:
    known_run = run.run.status.known
    heading = "" if alone else f'<h2 id="{run.anchor}">Run {escape(known_run.run_id)}</h2>'
    facts = [(name, text) for name, text in head_facts(run.run.status, run.config) if name != "run"]
    verdict = _tables(score_tables(run.run.result, summary=True))
    loss = figures.loss_chart(run.steps, run.validation, run.training)
    unjudged = "The run's judgement is empty, or its result.json has no tables."
    if not run.run.result:
        unjudged = f"The run has not been judged. It is {run.run.status.state}."
    parts = {
        "Verdict": verdict or _missing(unjudged),
        "Loss": _figures([loss]) if loss else _missing("No step has been recorded yet."),
        "Memory": _memory(run),
        "Parts of the memory": _memory_parts(run.folder),
        "Plan": _plan(run),
        "Safety factor over runs": _factor(run),
        "Curves by test set": _curves(run),
        "Scores in full": _tables(score_tables(run.run.result)),
        "Settings that differ from the defaults": _settings(run.folder) if alone else "",
    }
    texts = [f"<h3>{title}</h3>\n{body}" if body else "" for title, body in parts.items()]
    return "\n".join(
        ["<section>", heading, _facts([("configuration", known_run.record.key), *facts]), *texts, "</section>"]
    )


def _memory(run: ReportedRun) -> str:
    lines = _rescue_lines(run)
    links = {step: f"{run.anchor}-step-{step}" for step in lines}
    charts = figures.memory_charts(run.steps, run.limits, links)
    missing = [] if charts else ["No step has been recorded yet."]
    if charts and len(charts) == 1:
        missing = ["No step's memory has been measured: on the CPU only one step in monitor.interval is."]
    limits = run.limits[-1:]
    if limits and limits[0].device.startswith("cpu"):
        missing.append("On the CPU only one step in monitor.interval is measured, and nothing is reserved.")
    if limits and len(charts) > 1 and (axis := charts[0].y) and limits[0].capacity_bytes > axis.high:
        missing.append(f"The capacity, {size_text(limits[0].capacity_bytes)}, lies far above what was used.")
    items = "".join(f'<li id="{links[step]}">{line}: {escape(text)}</li>' for step, (line, text) in lines.items())
    log = f'<h4>Rescues in log.txt, with the number of the line</h4><ul class="log">{items}</ul>' if items else ""
    return _facts(memory_lines(run.run.memory)) + "".join(map(_missing, missing)) + _figures(charts) + log


def _rescue_lines(run: ReportedRun) -> dict[int, tuple[int, str]]:
    """Returns number and text of the log's last notice of each recorded rescue, by step."""
    rescued = {step.step for step in run.steps if step.ooms_rescued}
    lines = text_or_nothing(run.folder.log_path).splitlines() if rescued else []
    found = {}
    for number, line in enumerate(lines, start=1):
        match = _RESCUE.match(line)
        if match and int(match[1]) in rescued:
            rest = takewhile(lambda each: each.startswith("  "), lines[number:])
            found[int(match[1])] = number, " ".join([line, *map(str.strip, rest)])
    return dict(list(found.items())[:_MOST_RESCUES])


def _memory_parts(folder: RunFolder) -> str:
    explained = read_memory_parts(folder)
    if not explained:
        line = with_command_name(f"can-train explain {folder.run_id}")
        return _missing(f"They have not been recorded. This line records them, and the next report shows them: {line}")
    samples, peak = counted(explained["samples"], "sample"), size_text(explained["peak_bytes"])
    where = f"{peak} on {explained['device']}, {explained['basis']}"
    about = f"The costliest micro-batch ({samples}) peaks at {where}."
    rows = [(part["kind"], part["module"] or "-", part["operation"] or "-", size_text(part["num_bytes"]))
            for part in explained["parts"][:_LARGEST_PARTS]]  # fmt: skip
    table = _table(TextTable("Largest parts", ("kind", "module", "operation", "size"), rows))
    return f"<p>{escape(about)}</p>{treemap_html(figures.memory_treemap(explained))}{table}"


def _plan(run: ReportedRun) -> str:
    device = str(run.run.result.get("device") or run.config.get("device"))
    sentences, basis, notices = full_plan(read_plan(run.folder), device)
    if not sentences:
        return _missing("No plan has been made yet.")
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in [*sentences, *notices]) + _facts(basis)


def _factor(run: ReportedRun) -> str:
    history = run.history
    if history is None or not history.runs:
        return _missing("Nothing is known of this configuration's safety factor in the state folder.")
    drawn = len(history.runs) >= _LEAST_FACTOR_RUNS
    chart = figures.factor_chart(history, run.run.status.known.run_id) if drawn else None
    factor = "none" if history.factor is None else f"{history.factor:.3f}"
    return f"<p>The next run's factor is {factor}: {escape(history.reason)}.</p>" + _figures([chart] if chart else [])


def _curves(run: ReportedRun) -> str:
    if run.damage:
        return _missing(f"The recorded scores are damaged, so there are no curves: {run.damage}.")
    parts = []
    for name, predictions in run.predictions.items():
        sample, positive, negative = predictions.words
        of_class = f", {int(predictions.positive.sum()):,} of them {positive}" if predictions.has_classes else ""
        count = f"{len(predictions.score):,} {sample}s{of_class}"
        parts.append(f'<div class="set"><h4>{escape(name)}</h4><p class="muted">{escape(count)}</p>')
        if not predictions.has_classes:
            parts.append(_tables([figures.ends_table(predictions)]) + "</div>")
            continue
        label, charts = {"model": predictions}, list[Chart]()
        if not predictions.confusion and figures.has_both_classes(predictions):
            charts = [figures.precision_recall_chart("Precision and recall", label), figures.roc_chart("ROC", label)]
        elif not predictions.confusion:
            parts.append(_missing(f"Curves need both {positive} and {negative} {sample}s."))
        charts += filter(None, [figures.calibration_chart("Calibration", predictions)])
        timeline = figures.timeline_chart(f"Flagged {sample}s over time", predictions)
        parts.append(f'<div class="grid">{_figures(charts)}</div>{_figures([timeline] if timeline else [])}')
        parts.append(_tables([figures.confusion_table(predictions), figures.extremes_table(predictions)]) + "</div>")
    return "".join(parts) or _missing("The run has recorded no scores of single samples.")


def _settings(folder: RunFolder) -> str:
    changed = folder.changed_settings()
    if changed is None:
        return _missing("Which settings differ is not known: changed_settings.json is missing or damaged.")
    rows = [(name, value_text(setting["value"]), value_text(setting["default"])) for name, setting in changed.items()]
    return _table(TextTable("", ("setting", "value", "default"), rows)) if rows else "<p>None.</p>"


# Elements


def _missing(sentence: str) -> str:
    return f'<p class="missing">{escape(sentence)}</p>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{items}</dl>" if items else ""


def _figures(charts: Iterable[Chart]) -> str:
    return "".join(map(figure_html, charts))


def _tables(tables: "Sequence[TextTable]") -> str:
    if len(tables) < 2:
        return "".join(map(_table, tables))
    return '<div class="tables">' + "".join(f"<div>{_table(table)}</div>" for table in tables) + "</div>"


def _table(table: "TextTable") -> str:
    # Long texts, and columns without a number.
    texts = {index for index in range(1, len(table.columns))
             if any(len(row[index]) > _TEXT_LETTERS for row in table.rows)
             or not any(_NUMBER.match(row[index]) for row in table.rows)}  # fmt: skip
    head = "".join(f'<th scope="col"{" class=text" if index in texts else ""}>{escape(name)}</th>'
                   for index, name in enumerate(table.columns))  # fmt: skip
    rows = ""
    for name, *cells in table.rows:
        # Names are long on a phone, and have no spaces.
        first = escape(name).replace("_", "_<wbr>").replace(".", ".<wbr>")
        rest = "".join(f"<td class=text>{escape(cell)}</td>" if index in texts else f"<td>{escape(cell)}</td>"
                       for index, cell in enumerate(cells, start=1))  # fmt: skip
        rows += f"<tr><td>{first}</td>{rest}</tr>"
    title = f'<h4 class="table">{escape(table.title)}</h4>' if table.title else ""
    label = escape(table.title, quote=True)
    body = f'<table aria-label="{label}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>' if rows else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return f'{title}<div class="scroll">{body}</div>' + (f'<ul class="notes">{notes}</ul>' if notes else "")
