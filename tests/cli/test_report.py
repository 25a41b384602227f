"""`can-train report`: one file with what a run recorded, whatever is missing, and nothing that reaches out."""

import json
import re
import shutil
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from can_train.cli.main import main
from can_train.report.figures import (
    calibration_chart,
    confusion_table,
    extremes_table,
    has_both_classes,
    memory_charts,
    precision_recall_chart,
    roc_chart,
    timeline_chart,
)
from can_train.runs.recording import (
    MemoryLimits,
    StepLog,
    StepRecord,
    read_predictions,
    steps_path,
    write_predictions,
)
from can_train.runs.run_folder import RunFolder
from can_train.task import Predictions
from can_train.training.sample_task import Task
from fakes.finished_runs import Shelf
from fakes.trained_runs import finished_run

STEP = StepRecord(step=1, loss=0.5, allocated_bytes=60 << 20, reserved_bytes=80 << 20, micro_batches=2,
                  micro_batch_size=4)  # fmt: skip
LIMITS = MemoryLimits(from_step=1, device="sim-100mib", capacity_bytes=100 << 20, safe_bytes=70 << 20,
                      predicted_bytes=(58 << 20, 62 << 20))  # fmt: skip
NASTY = "<img src=x onerror=alert(1)>&\"'"
VOID = ("meta", "link", "img", "wbr")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    # No SLURM, whichever this machine may have; and several runs' report goes to the folder that one works in.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Shelf(tmp_path)


def predictions(seed: int = 0, **values: Any) -> Predictions:
    drawn = np.random.default_rng(seed)
    positive = drawn.random(200) < 0.3
    score = drawn.normal(size=200) + positive
    return Predictions(**{"score": score, "positive": positive, "flagged": score > 1, "time_s": np.arange(200) / 4,
                          "words": ("window", "attack", "benign"), **values})  # fmt: skip


def record(folder: RunFolder, sets: dict[str, Predictions] | None = None) -> None:
    """Writes what a training of 30 steps records, with a rescue in step 7."""
    log = StepLog(steps_path(folder.path, 0), 30)
    log.limit(LIMITS)
    for step in range(1, 31):
        log.add(replace(STEP, step=step, loss=1 / step, ooms_rescued=2 * (step == 7)))
    log.flush()
    folder.metrics_path.write_text(json.dumps({"step": 30, "epoch": 1, "validation_loss": 0.25}) + "\n")
    write_predictions(folder.predictions_path, {"test_01": predictions()} if sets is None else sets)


def reported(shelf: Shelf, *arguments: str) -> Path:
    """Makes a report, and returns its file where it was announced."""
    assert main(("report", *arguments, *shelf.flags)) == 0
    return shelf.folder / "report.html"


def page(run: RunFolder, shelf: Shelf) -> str:
    reported(shelf, run.run_id)
    return (run.path / "report.html").read_text()


class Elements(HTMLParser):
    """Counts the elements of a page, and makes sure that each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.names.append(tag)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.names.append(tag)


def headings(text: str) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", text)


def captions(text: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", text)


CHARTS = ["Training and validation loss", "Memory of each step", "Micro-batches and rescues", "Precision and recall",
          "ROC", "Flagged windows over time"]  # fmt: skip


def test_one_run_is_reported_in_its_folder_with_all_charts(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal", sets=("training.lr=0.5",)))
    record(run)
    text = page(run, shelf)
    assert capsys.readouterr().out.split() == ["Report:", str(run.path / "report.html")]
    assert captions(text) == CHARTS
    assert "memory ran out 2 times; finished in 2 micro-batches" in text
    assert "<td>training.<wbr>lr</td><td>0.5</td><td>0.001</td>" in text
    Elements(text)


def test_a_report_reaches_out_to_nothing(shelf: Shelf) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    record(run)
    text = page(run, shelf)
    assert not re.search(r"https?:", text)
    names = Elements(text).names
    assert names.count("script") == 1
    assert not {"img", "iframe", "object"} & {*names}
    assert re.findall(r"(?:src|href)=\"(?!#)(.*?)\"", text) == ["data:,"]
    assert not re.search(r"url\(|@import", text)


def test_a_browser_is_told_to_run_and_load_nothing_but_style_and_script_of_the_page(shelf: Shelf) -> None:
    text = page(shelf.put(1, shelf.resolved("gat", "normal")), shelf)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    style, script = (b64encode(sha256(part.encode()).digest()).decode() for part in (style, script))
    assert policy.split("; ") == ["default-src 'none'", f"style-src 'sha256-{style}'", f"script-src 'sha256-{script}'",
                                  "img-src data:", "base-uri 'none'", "form-action 'none'"]  # fmt: skip
    assert text.index("Content-Security-Policy") < text.index("<link")
    assert "style=" not in text


def test_several_runs_are_compared_in_the_folder_one_works_in(shelf: Shelf) -> None:
    runs = [shelf.put(number, shelf.resolved("gat", "normal", sets=(f"training.lr=0.{number}",))) for number in (1, 2)]
    for number, run in enumerate(runs):
        record(run, {"test_01": predictions(number)})
    text = reported(shelf, *(run.run_id for run in runs)).read_text()
    overlaid = ["Validation loss", "Training loss", "Memory of each step", "test_01"]
    assert captions(text) == [*overlaid, *CHARTS, *CHARTS]
    # The legends name runs by the setting that differs.
    assert text.count("</svg>lr=0.1</li>") == len(overlaid)
    assert "<td>training.<wbr>lr</td><td>0.1</td><td>0.2</td>" in text
    assert [f'id="run-{run.run_id}"' in text for run in runs] == [True, True]
    Elements(text)


def test_what_is_missing_is_said_in_a_sentence(shelf: Shelf) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal"), None)
    text = page(run, shelf)
    assert captions(text) == []
    for sentence in (
        "The run has not been judged. It is never started",
        "No step has been recorded yet.",
        "No plan has been made yet.",
        "Nothing is known of this configuration&#x27;s safety factor in the state folder.",
        "The run has recorded no scores of single samples.",
    ):
        assert sentence in text
    Elements(text)


PARTS = [
    {"kind": "saved activations", "module": f"layers.{number}", "operation": NASTY, "num_bytes": 2**20 / 2**number}
    for number in range(20)
]
EXPLAINED = {"device": "sim-100mib", "samples": 7, "basis": "run on the CPU", "parts": PARTS,
             "peak_bytes": sum(part["num_bytes"] for part in PARTS)}  # fmt: skip


def test_the_parts_of_the_memory_are_a_treemap_and_a_table(shelf: Shelf) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    record(run)
    assert f"can-train explain {run.run_id}" in page(run, shelf)
    run.memory_parts_path.write_text(json.dumps(EXPLAINED))
    text = page(run, shelf)
    assert "Parts of the peak of 2.0 MiB" in captions(text)
    assert "The costliest micro-batch (7 samples) peaks at 2.0 MiB on sim-100mib, run on the CPU." in text
    # Parts that are too small to be seen are one tile, and the table has the largest.
    assert "saved activations: 2.0 MiB, 100%, 13 smaller parts" in text
    assert "layers.11</td>" in text
    assert "layers.12</td>" not in text
    assert f"can-train explain {run.run_id}" not in text
    Elements(text)


@pytest.mark.parametrize("change", [{"parts": []}, {"peak_bytes": 0}, {"parts": [{}]}, {"samples": "x"}])
def test_parts_that_are_no_parts_are_not_shown(shelf: Shelf, change: dict[str, Any]) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    run.memory_parts_path.write_text(json.dumps(EXPLAINED | change))
    assert f"can-train explain {run.run_id}" in page(run, shelf)


@pytest.mark.parametrize("name", ["steps.jsonl", "metrics.jsonl", "plan.json", "memory_parts.json", "result.json",
                                  "predictions.npz"])  # fmt: skip
@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"judgement": {"test": 1}}', "\x00"])
def test_a_damaged_file_keeps_no_report_from_being_written(shelf: Shelf, name: str, text: str) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    record(run)
    (run.path / name).write_text(text)
    found = page(run, shelf)
    Elements(found)
    if name.startswith("predictions"):
        assert "The recorded scores are damaged, so there are no curves" in found


def test_what_users_wrote_is_escaped(shelf: Shelf) -> None:
    changed = shelf.resolved("gat", "normal", values={"training.start_from": NASTY})
    run = shelf.put(1, changed, {"judgement": {"test": {NASTY: {}}}, "device": NASTY, "epochs": 1})
    record(run, {NASTY: predictions(words=(NASTY, NASTY, NASTY))})
    moved = RunFolder(run.path.with_name("<script>&"))
    shutil.copytree(run.path, moved.path)
    assert main(("report", str(moved.path), "--output", "out.html", *shelf.flags)) == 0
    text = Path("out.html").read_text()
    assert "&lt;img src=x" in text
    names = Elements(text).names
    assert names.count("script") == 1
    assert "img" not in names


def test_a_file_that_cannot_be_written_is_an_error(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.put(1, shelf.resolved("gat", "normal"))
    assert main(("report", "last", "--output", "no/where.html", *shelf.flags)) == 2
    assert "error: The report cannot be written: no/where.html" in capsys.readouterr().err


def test_another_kind_of_file_is_refused(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("report", "last", "--output", "report.pdf", *shelf.flags)) == 2
    assert "error: A report can only be written as HTML: report.pdf" in capsys.readouterr().err


def test_an_unknown_run_is_an_error(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("report", "nope", *shelf.flags)) == 2
    assert "There is no such run" in capsys.readouterr().err


# The charts


def test_the_chosen_threshold_lies_where_the_flags_say() -> None:
    one = predictions()
    hits, flagged = int((one.flagged & one.positive).sum()), int(one.flagged.sum())
    chart = precision_recall_chart("set", {"model": one})
    assert chart.series[-1].points == [(hits / one.positive.sum(), hits / flagged)]
    alarms = (flagged - hits) / int((~one.positive).sum())
    assert roc_chart("set", {"model": one}).series[-1].points == [(alarms, hits / one.positive.sum())]


def test_curves_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import precision_recall_curve, roc_curve

    one = predictions(score=np.round(predictions().score, 1))
    precision, recall, _ = precision_recall_curve(one.positive, one.score)
    drawn = precision_recall_chart("set", {"model": one}).series[1].points
    assert np.allclose(drawn, np.stack([recall, precision], axis=1)[:-1][::-1], atol=1e-4)
    x, y, _ = roc_curve(one.positive, one.score, drop_intermediate=False)
    assert np.allclose(roc_chart("set", {"model": one}).series[1].points, np.stack([x, y], axis=1), atol=1e-4)


def test_a_curve_of_many_samples_is_thinned_and_keeps_its_ends() -> None:
    drawn = np.random.default_rng(0)
    positive = drawn.random(50_000) < 0.1
    many = Predictions(score=drawn.normal(size=50_000) + positive, positive=positive, flagged=positive,
                       time_s=np.empty(0))  # fmt: skip
    points = roc_chart("set", {"model": many}).series[1].points
    assert len(points) <= 301
    assert (points[0], points[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert timeline_chart("set", many) is None


def test_a_rescue_leads_to_its_line_in_the_log(shelf: Shelf) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    record(run)
    assert "<a " not in page(run, shelf)
    notice = f"note: step 7: memory ran out 2 times; finished in 2 {NASTY},\n      with the same gradient\n"
    run.log_path.write_text(f"--- begin\nnote: step 8: memory ran out once\n{notice}note: more\n")
    text = page(run, shelf)
    place = f"run-{run.run_id}-step-7"
    assert text.count(f'<a href="#{place}">') == 2
    (line,) = re.findall(f'<li id="{place}">(.*?)</li>', text)
    assert line.startswith("3: note: step 7: memory ran out 2 times; finished in 2 &lt;img")
    assert line.endswith(", with the same gradient")
    Elements(text)


def test_flags_are_counted_by_label_and_samples_are_listed_where_scores_contradict_labels() -> None:
    one = Predictions(score=np.array([0.9, 0.1, 0.8, 0.2]), positive=np.array([True, True, False, False]),
                      flagged=np.array([True, False, True, False]), time_s=np.array([0.0, 1.0, 2.0, 3.0]),
                      words=("window", "attack", "benign"))  # fmt: skip
    assert confusion_table(one).rows == [("attack", "1", "1", "50.0%"), ("benign", "1", "1", "50.0%")]
    assert [row[0] for row in extremes_table(one).rows] == ["window 1", "window 0", "window 2", "window 3"]
    assert extremes_table(one).rows[0] == ("window 1", "1.00", "attack", "0.1", "no")


def test_a_classifier_of_several_classes_has_a_matrix_of_classes_and_its_surest_errors(shelf: Shelf) -> None:
    one = Predictions(score=np.array([0.9, 0.5, 0.7]), positive=np.array([True, True, False]),
                      flagged=np.ones(3, dtype=bool), time_s=np.empty(0), words=("prediction", "right", "wrong"),
                      confusion=[[1, 0, 0], [0, 1, 1], [0, 0, 0]])  # fmt: skip
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    record(run, {"test": one})
    text = page(run, shelf)
    assert captions(text)[3:] == ["Calibration"]
    assert "<td>class 1</td><td>0</td><td>1</td><td>1</td><td>50.0%</td>" in text
    assert "<td>prediction 2</td><td class=text>wrong</td><td>0.7</td></tr>" in text
    assert extremes_table(one).columns == ("prediction", "outcome", "probability")
    Elements(text)


class Levels(Task):
    """Twelve numbers, of which a prediction is made in one of several forms."""

    form = "number"

    def datasets(self):
        return {"train": [torch.zeros(1)] * 4, "test": [torch.tensor([(7 * n % 12) / 12]) for n in range(12)]}

    def model(self):
        return nn.Identity()

    def loss(self, model, batch):
        return {"error": (batch.sum(), len(batch))}

    def predict(self, model, batch):
        forms = {"number": batch, "shares": torch.cat([batch, 1 - batch], 1).bfloat16(), "vector": batch.repeat(1, 3),
                 "text": ["12"] * len(batch)}  # fmt: skip
        return forms[self.form]


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("number", [(0, "0"), (7, "0.08333"), (2, "0.1667"), (9, "0.25"), (4, "0.3333"),
                    (1, "0.5833"), (8, "0.6667"), (3, "0.75"), (10, "0.8333"), (5, "0.9167")]),
        ("shares", [(6, "0.5"), (1, "0.582"), (11, "0.582"), (4, "0.668"), (8, "0.668"),
                    (2, "0.832"), (10, "0.832"), (5, "0.918"), (7, "0.918"), (0, "1")]),
        ("vector", None),
        ("text", None),
    ],
)  # fmt: skip
def test_predictions_without_classes_are_listed_at_both_ends(
    shelf: Shelf, form: str, shown: list[tuple[int, str]] | None
) -> None:
    task = Levels()
    task.form = form
    parts = SimpleNamespace(parts=lambda rows: [task.outcome(nn.Identity(), rows, torch.device("cpu"), torch.float32)])
    predictions = task.predictions(task.judge(parts), parts)
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    record(run, predictions)
    text = page(run, shelf)
    Elements(text)
    if shown is None:
        assert "The run has recorded no scores of single samples." in text
        return
    name = {"number": "prediction", "shares": "probability"}[form]
    assert f"Samples with the lowest and the highest {name}" in text
    assert '<p class="muted">12 samples</p>' in text
    assert [(number, score) for number, score in re.findall(r"<td>sample (\d+)</td><td>([\d.]+)</td>", text)] == [
        (str(number), score) for number, score in shown
    ]


def test_probabilities_have_a_calibration_like_that_of_scikit_learn_and_other_scores_have_none() -> None:
    from sklearn.calibration import calibration_curve

    one = predictions()
    assert calibration_chart("", one) is None
    shares = replace(one, score=1 / (1 + np.exp(-one.score)))
    chart = calibration_chart("", shares)
    positive, mean = calibration_curve(shares.positive, shares.score, n_bins=10)
    assert np.allclose(chart.series[1].points, np.stack([mean, positive], axis=1))


def test_a_set_of_one_class_has_no_curves() -> None:
    assert not has_both_classes(predictions(positive=np.zeros(200, dtype=bool)))
    assert has_both_classes(predictions())


def test_the_time_of_a_log_is_shared_out_among_what_was_found_missed_and_flagged_wrongly() -> None:
    positive, flagged = np.array([0, 1, 1, 0, 0], dtype=bool), np.array([0, 1, 0, 0, 1], dtype=bool)
    chart = timeline_chart("log", Predictions(score=np.zeros(5), positive=positive, flagged=flagged,
                                              time_s=np.array([0.0, 10.0, 20.0, 30.0, 40.0])))  # fmt: skip
    spans = {name: found for name, _, found in chart.strips}
    assert spans == {"positives": [(10, 30)], "found": [(10, 20)], "missed": [(20, 30)], "false alarms": [(40, 50)]}


def test_memory_is_drawn_with_limits_only_where_they_are_near() -> None:
    steps = [STEP, replace(STEP, step=2, ooms_rescued=1)]
    near, _ = memory_charts(steps, [LIMITS])
    assert near.y.high == pytest.approx(1.05 * LIMITS.capacity_bytes)
    drawn = {series.name: series.points for series in near.series}
    assert drawn["capacity"] == [(0, 100 << 20), (2, 100 << 20)]
    assert drawn["safe limit"][0] == (0, 70 << 20)
    assert drawn["out of memory, rescued"] == [(2, near.y.high)]
    far, _ = memory_charts(steps, [replace(LIMITS, capacity_bytes=100 << 40)])
    assert far.y.high < 100 << 20
    [alone] = memory_charts([replace(STEP, allocated_bytes=None)], [])
    assert alone.title == "Micro-batches and rescues"


def test_limits_that_change_are_drawn_from_the_step_where_they_do() -> None:
    steps = [replace(STEP, step=step) for step in range(1, 21)]
    later = replace(LIMITS, from_step=11, capacity_bytes=90 << 20, safe_bytes=None)
    drawn = {series.name: series.points for series in memory_charts(steps, [LIMITS, later])[0].series}
    assert drawn["capacity"] == [(0, 100 << 20), (11, 100 << 20), (11, 90 << 20), (20, 90 << 20)]
    assert drawn["safe limit"][2:] == [(11, None), (20, None)]


@pytest.mark.slow
def test_the_recorded_scores_of_a_trained_run_are_those_that_were_judged(tmp_path: Path) -> None:
    run = finished_run("gat")
    judgement = json.loads((run / "result.json").read_text())["judgement"]["test"]
    found = read_predictions(run / "predictions.npz")
    assert list(found) == list(judgement)
    for name, one in found.items():
        model, count = judgement[name]["model"], int((one.flagged & one.positive).sum())
        assert (len(one.score), int(one.positive.sum())) == (model["windows"], model["attack_windows"])
        assert count / one.positive.sum() == pytest.approx(model["recall"])
        assert (np.diff(one.time_s) >= 0).all()
    assert main(("report", str(run), "--output", str(tmp_path / "r.html"))) == 0
    text = (tmp_path / "r.html").read_text()
    assert "How well the model finds attacks in each test folder" in text
    assert "safety factor" in text
    assert headings(text) == ["Verdict", "Loss", "Memory", "Parts of the memory", "Plan",
                              "Safety factor over runs", "Curves by test set",
                              "Scores in full", "Settings that differ from the defaults"]  # fmt: skip
