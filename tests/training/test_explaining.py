"""What an evaluation names as the reason of an alarm: the ID that was injected, by every kind of model; and what that
costs: no other score, and no more memory than there is.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from can_train.reporter import SilentReporter
from can_train.training.evaluate import EvaluationRequest, evaluate
from can_train.training.loading import load_finished
from can_train_tasks.can.contributions import autoencoder_contributions
from can_train_tasks.can.data.batches import Gatherer
from can_train_tasks.can.evaluation.options import EvaluationOptions
from can_train_tasks.can.reference_models import FinishedNetwork
from fakes.random_bus import INJECTED, injected_frames
from fakes.trained_runs import WINDOW, injected_log, injected_run
from fakes.windows_by_hand import windows_of

KINDS = ("gat", "vgae", "fusion")


@pytest.fixture(scope="module")
def other_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return injected_log(tmp_path_factory.mktemp("other") / "other.csv", seed=1)


def explained(
    run: Path, log: Path, *, flagged_only: bool = True, explain: bool = False, **more: Any
) -> Mapping[str, Any]:
    options = EvaluationOptions(flagged_only=flagged_only, explain=explain)
    asked = {"device": "cpu", "options": options, **more}
    return evaluate(EvaluationRequest(run=run, dataset=str(log), **asked), SilentReporter()).document


def first_reasons(document: Mapping[str, Any]) -> list[str]:
    """The ID that each alarm at a true attack names first."""
    return [alarm["reasons"][0]["id"] for alarm in document["alarms"] if alarm["label"] == "attack"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_injected_id_is_the_first_that_an_alarm_names(kind: str, other_log: Path) -> None:
    document = explained(injected_run(kind), other_log)
    named = first_reasons(document)
    assert len(named) > 5
    assert named.count(f"{INJECTED:03X}") >= 0.9 * len(named)
    assert not document["alarms"][0]["reasons"][0]["known"]


def test_gradients_of_the_other_sign_name_other_ids(other_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = FinishedNetwork.contributions
    monkeypatch.setattr(FinishedNetwork, "contributions", lambda *arguments: -right(*arguments))
    assert f"{INJECTED:03X}" not in first_reasons(explained(injected_run("gat"), other_log))


def test_an_alarm_has_the_lines_and_times_of_its_frames(other_log: Path) -> None:
    alarms = explained(injected_run("gat"), other_log)["alarms"]
    lines, frames = other_log.read_text().splitlines(), injected_frames(4_000, seed=1)
    for alarm in alarms:
        assert alarm["last_line"] - alarm["first_line"] == alarm["windows"] * WINDOW - 1
        first, last = lines[alarm["first_line"] - 1], lines[alarm["last_line"] - 1]
        assert (first.split(",")[0], last.split(",")[0]) == (f"{alarm['start_time']:.6f}", f"{alarm['end_time']:.6f}")
        own = slice(alarm["first_frame"], alarm["last_frame"] + 1)
        assert alarm["label"] == ("attack" if frames.label[own].any() else "benign")


def test_a_file_of_what_was_flagged_has_only_that_and_the_reasons(other_log: Path, tmp_path: Path) -> None:
    run, path, whole = injected_run("gat"), tmp_path / "flagged.csv", tmp_path / "all.parquet"
    document = explained(run, other_log, scores=path)
    flagged = pl.read_csv(path)
    assert flagged["flagged"].all()
    assert len(flagged) == sum(alarm["windows"] for alarm in document["alarms"])
    explained(run, other_log, scores=whole, flagged_only=False, explain=True)
    windows = pl.read_parquet(whole)
    assert len(windows) == 200
    assert windows["reason"].null_count() == 0
    assert windows.filter("flagged")["reason"].to_list() == flagged["reason"].to_list()
    assert flagged["reason"].str.starts_with(f"ID {INJECTED:03X}, not in benign training data: ").sum() > 0.5 * len(
        flagged
    )


# Three models need more memory than one.
@pytest.mark.parametrize(("kind", "little"), [("gat", "sim:3MiB"), ("vgae", "sim:3MiB"), ("fusion", "sim:8MiB")])
def test_little_memory_changes_neither_scores_nor_reasons(kind: str, little: str, other_log: Path) -> None:
    whole, scarce = (explained(injected_run(kind), other_log, device=device) for device in ("cpu", little))
    assert [alarm["first_line"] for alarm in scarce["alarms"]] == [alarm["first_line"] for alarm in whole["alarms"]]
    assert first_reasons(scarce) == first_reasons(whole)


def test_a_score_is_the_same_whether_it_is_explained_or_not(other_log: Path) -> None:
    run = injected_run("gat")
    judgements = [explained(run, other_log, flagged_only=asked)["judgement"] for asked in (True, False)]
    assert judgements[0] == judgements[1]


def test_what_raises_an_anomaly_score_adds_up_to_it() -> None:
    finished = load_finished(injected_run("vgae"))
    flat = windows_of([[0x200, 0x201, 0x202], [0x200, INJECTED, 0x201, INJECTED], [0x203, 0x203]])
    network, rows = FinishedNetwork(finished, flat), np.arange(3)
    score = partial(network.scores, network.model, rows, torch.device("cpu"), torch.float32)
    assert network.error_units is not None
    found = autoencoder_contributions(network.model, Gatherer(flat)(rows), network.error_units)  # type: ignore[arg-type]
    total = np.add.reduceat(found.sum(dim=1).numpy(), flat.node_ptr[:-1])
    assert total == pytest.approx(network.network_scores(score().double().numpy()), rel=1e-5)
    assert not (found < 0).any()
