"""A finished student or agent is judged once more beside what it was judged beside at its end: the same rows, on its
own data and on other logs, by thresholds that its run decided; what is gone is said.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from can_train.reporter import SilentReporter
from can_train.runs.run_folder import RunFolder
from can_train.training.evaluate import Evaluated, EvaluationRequest, evaluate
from can_train.training.loading import Checkpoints
from can_train_tasks.can.evaluation.options import EvaluationOptions
from fakes.random_bus import injected_frames, write_log
from fakes.trained_runs import bus_log, finished_run

TEACHERS = {"gat": {"model__hidden": 8, "model__layers": 2, "model__heads": 2}, "vgae": {"model__hidden": (800, 400)}}
"""Of each model how its teacher differs from the preset."""

QUICK = {"training__micro_batch_size": 64, "mode__baselines": False}
"""No search for what fits, no forests."""

WAY = {"mode__teacher_placement": "device"}

OTHERS = {"teacher", "without_teacher"}
HUGE = 1e30
FITTED = {"logistic", "small_mlp"}
MIXES = ["autoencoder", "classifier", "even_mix", "best_mix", *sorted(FITTED)]


def teacher_of(model: str) -> Path:
    return finished_run(model, size="teacher", **TEACHERS[model], **QUICK)


def plain(model: str) -> Path:
    return finished_run(model, **QUICK)


def student(model: str) -> Path:
    """A student that was trained for a moment, beside its teacher and itself without one."""
    others = {"mode__teacher": str(teacher_of(model)), "mode__without_teacher": str(plain(model))}
    return finished_run(model, "knowledge_distillation", **others, **WAY, **QUICK)


def agent() -> Path:
    models = {"mode__autoencoder": str(plain("vgae")), "mode__classifier": str(plain("gat"))}
    return finished_run("fusion", training__epochs=3, training__micro_batch_size=64, **models)


def counted_log(path: Path) -> Path:
    """Writes a log in which each ID counts its frames in byte 8, and bursts of frames have other payloads there."""
    frames = injected_frames(12_000)
    place = np.arange(len(frames))
    forged = frames.label > 0
    payload = frames.payload.copy()
    payload[:, 7] = np.where(forged, payload[:, 7] + 100, place // 10)
    return write_log(path, replace(frames, can_id=(0x200 + place % 10).astype(np.uint32), payload=payload))


def ruled_agent() -> Path:
    """An agent of networks that have learned next to nothing, on a bus whose counters are broken by attacks."""
    on = {"log": counted_log, **QUICK}
    models = {"mode__autoencoder": str(finished_run("vgae", **on)), "mode__classifier": str(finished_run("gat", **on))}
    return finished_run("fusion", **on, **models)


def evaluated(run: Path, dataset: Path | None = None, **more: Any) -> Evaluated:
    named = None if dataset is None else str(dataset)
    return evaluate(EvaluationRequest(run=run, dataset=named, **{"device": "cpu", **more}), SilentReporter())


def judgement_of(run: Path, *where: Path, **more: Any) -> dict[str, Any]:
    return dict(evaluated(run, *where, **more).document["judgement"])


def result_of(run: Path) -> dict[str, Any]:
    result = RunFolder(run).result()
    assert result is not None
    return dict(result["judgement"])


def without_speeds(judgement: Mapping[str, Any]) -> dict[str, Any]:
    still = {
        name: {key: told[key] for key in ("run", "parameters")} for name, told in judgement.get("compared", {}).items()
    }
    return {**judgement, "compared": still}


def copied(run: Path, folder: Path, **changed: str) -> Path:
    """The run with other texts in its configuration."""
    place = folder / run.name
    shutil.copytree(run, place)
    config = (place / "config.yaml").read_text()
    for before, after in changed.items():
        config = config.replace(before, after)
    (place / "config.yaml").write_text(config)
    return place


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return bus_log(tmp_path / "other.csv", seed=1)


@pytest.mark.parametrize(
    ("make", "beside"),
    [
        (lambda: student("gat"), OTHERS),
        (lambda: student("vgae"), OTHERS),
        (agent, {*MIXES}),
        (ruled_agent, {*MIXES} - FITTED),
    ],
)
def test_on_its_own_data_a_run_is_beside_what_it_was_at_its_end_bit_by_bit(make: Any, beside: set[str]) -> None:
    run = make()
    again = evaluated(run)
    assert without_speeds(again.document["judgement"]) == without_speeds(result_of(run))
    assert set(again.document["judgement"]["test"]["drive.csv"]["references"]) == beside


def test_rules_raise_the_scores_of_an_agent_and_of_the_mixes_beside_it() -> None:
    judgement = result_of(ruled_agent())
    assert all("rule_scale" in record for record in (judgement, *judgement["references"].values()))


def test_a_teacher_is_asked_in_full_precision_whatever_its_student_computes_in(other: Path) -> None:
    teacher = str(teacher_of("gat"))
    run = finished_run(
        "gat", "knowledge_distillation", mode__teacher=teacher, training__precision="bf16", **WAY, **QUICK
    )
    assert without_speeds(judgement_of(run)) == without_speeds(result_of(run))
    threshold = result_of(run)["references"]["teacher"]["threshold"]
    alone = judgement_of(Path(teacher), other, options=EvaluationOptions(threshold=threshold))["test"]["other.csv"][
        "model"
    ]
    assert judgement_of(run, other)["test"]["other.csv"]["references"]["teacher"] == alone


@pytest.mark.parametrize("model", TEACHERS)
def test_on_another_log_a_student_is_beside_its_teacher_and_itself_without_one(model: str, other: Path) -> None:
    run = student(model)
    judgement = judgement_of(run, other)
    for role, alone in (("teacher", teacher_of(model)), ("without_teacher", plain(model))):
        threshold = result_of(run)["references"][role]["threshold"]
        assert judgement["references"][role]["threshold"] == threshold
        assert judgement["references"][role]["threshold_rule"].endswith("on validation, in drive")
        # As a run of its own it is judged by another way through the code.
        expected = judgement_of(alone, other, options=EvaluationOptions(threshold=threshold))["test"]["other.csv"][
            "model"
        ]
        assert judgement["test"]["other.csv"]["references"][role] == expected
    assert judgement["test"]["other.csv"]["references"]["teacher"] != judgement["test"]["other.csv"]["model"]


def test_sizes_and_speeds_stand_in_a_table_of_their_own(other: Path) -> None:
    run = student("vgae")
    again = evaluated(run, other)
    compared = again.document["judgement"]["compared"]
    assert all(told["windows_per_second"] > 0 for told in compared.values())
    assert [row[0] for row in again.tables[-1].rows] == ["model", "teacher", "without_teacher"]
    assert [row[1] for row in again.tables[-1].rows] == [
        f"{told['parameters']:,}" for told in result_of(run)["compared"].values()
    ]


def test_a_teacher_that_is_gone_is_said_and_all_else_is_as_with_it(tmp_path: Path, other: Path) -> None:
    run, gone = student("gat"), teacher_of("gat")
    orphan = copied(run, tmp_path, **{str(gone): str(tmp_path / "gone")})
    whole, left = judgement_of(run, other), evaluated(orphan, other)
    judgement = left.document["judgement"]
    assert "teacher" in judgement["absent"]
    assert any(
        "Missing from the tables: teacher" in note and f"{tmp_path / 'gone'} is gone" in note
        for note in left.verdict.notes
    )
    del (
        whole["test"]["other.csv"]["references"]["teacher"],
        whole["references"]["teacher"],
        whole["compared"]["teacher"],
    )
    assert judgement["test"]["other.csv"]["references"] == whole["test"]["other.csv"]["references"]
    assert without_speeds(judgement)["compared"] == without_speeds(whole)["compared"]
    assert judgement["test"]["other.csv"]["model"] == whole["test"]["other.csv"]["model"]


def test_a_teacher_is_judged_by_the_units_that_its_student_found(tmp_path: Path, other: Path) -> None:
    older = copied(teacher_of("vgae"), tmp_path / "older")
    result = json.loads((older / "result.json").read_text())
    del result["judgement"]["error_units"]
    (older / "result.json").write_text(json.dumps(result))
    run = copied(student("vgae"), tmp_path, **{str(teacher_of("vgae")): str(older)})
    assert judgement_of(run, other)["test"] == judgement_of(student("vgae"), other)["test"]


def test_a_teacher_that_says_no_number_is_left_out(tmp_path: Path, other: Path) -> None:
    broken = copied(teacher_of("gat"), tmp_path / "broken")
    checkpoints = Checkpoints(broken / "checkpoints")
    state = checkpoints.newest()
    assert state is not None
    # Finite numbers, as weights must be, and so large that what follows from them is not.
    best = {name: value * HUGE if value.is_floating_point() else value for name, value in state["best"].items()}
    checkpoints.save({**state, "best": best}, step=99)
    run = copied(student("gat"), tmp_path, **{str(teacher_of("gat")): str(broken)})
    judgement = judgement_of(run, other)
    assert set(judgement["references"]) == {"without_teacher"}
    assert "not finite numbers" in judgement["absent"]["teacher"]


def test_a_teacher_that_does_not_fit_on_the_device_stops_nobody(other: Path) -> None:
    judgement = judgement_of(student("vgae"), other, device="sim:3MiB")
    assert "teacher" not in judgement["references"]
    assert "out of memory" in judgement["absent"]["teacher"]
    assert list(judgement["compared"]) == ["model", "without_teacher"]


def test_on_another_log_an_agent_is_beside_the_mixes_of_its_run(other: Path) -> None:
    run = agent()
    result, judgement = result_of(run), judgement_of(run, other)
    references = judgement["test"]["other.csv"]["references"]
    assert set(references) == set(MIXES)
    assert {name: told["threshold"] for name, told in judgement["references"].items()} == {
        name: told["threshold"] for name, told in result["references"].items()
    }
    assert judgement["mixing"]["mixes"] == result["mixing"]["mixes"]
    # Each score alone ranks windows as the model that it comes from does.
    for role, model in (("autoencoder", "vgae"), ("classifier", "gat")):
        alone = judgement_of(plain(model), other)["test"]["other.csv"]["model"]
        assert references[role]["roc_auc"] == pytest.approx(alone["roc_auc"], abs=1e-3)
    assert any("weights chosen for the classifier" in remark for remark in judgement["test"]["other.csv"]["remarks"])


@pytest.mark.parametrize("make", [lambda: student("gat"), agent])
def test_nothing_is_decided_by_the_labels_of_what_is_judged(make: Any, tmp_path: Path, other: Path) -> None:
    rows = other.read_text().splitlines()
    unlabelled = tmp_path / "unlabelled" / "other.csv"
    unlabelled.parent.mkdir()
    unlabelled.write_text("\n".join(line.rpartition(",")[0] for line in rows) + "\n")
    labelled, presumed = (judgement_of(make(), path) for path in (other, unlabelled))
    assert labelled["references"] == presumed["references"]
    flagged = [
        {name: told["flagged_share"] for name, told in judgement["test"]["other.csv"]["references"].items()}
        for judgement in (labelled, presumed)
    ]
    assert flagged[0] == flagged[1]
