"""Which weights a run ends with: the best by any figure of the validation, the last, or their average."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from can_train.config.compose import RunRequest, resolve
from can_train.config.settings import TrainingSettings, metric_direction
from can_train.errors import CheckpointError, ConfigError
from can_train.runs.run_state import best_text
from can_train.training import train as training_loop
from can_train.training.chosen_weights import AVERAGED, AveragedWeights, BestWeights, Criterion, Validation, choose
from can_train.training.chosen_weights import TRAINED as OWN
from can_train.training.judgement import judge_best
from can_train.training.session import Session
from can_train.training.train import make_session, train_new
from fakes.line_fit import LineTask, Notices, StoppedTask, fixed, line_parts, train_line
from fakes.sample_tasks import Measured
from fakes.several_ranks import run_ranks
from fakes.training_ranks import fit_samples

TRAINED = {"precision": "fp64", "batch_size": 13, "micro_batch_size": 13, "find_batch_size": "off", "lr": 0.02}


class TwoValidationSets(Measured):
    def datasets(self) -> Mapping[str, Any]:
        sets = super().datasets()
        return {**sets, "validation": {"near": sets["validation"][:4], "far": [3 * x for x in sets["validation"][4:]]}}


def lines(folder: Path) -> list[dict[str, Any]]:
    text = next(folder.glob("runs/*/metrics.jsonl")).read_text()
    return [record for record in map(json.loads, text.splitlines()) if "validation_loss" in record]


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("own", "averaged", "kind"),
    [
        ((0.9, 5), (0.9, 4), AVERAGED),
        ((0.9, 4), (0.9, 5), OWN),
        ((0.9, 4), (0.9, 4), OWN),
        ((0.8, 3), (0.9, 4), AVERAGED),
        ((0.9, 4), (None, 0), OWN),
    ],
)
def test_of_equal_weights_the_first_are_the_best(own: Any, averaged: Any, kind: str) -> None:
    bests = {OWN: BestWeights(value=own[0], epoch=own[1]), AVERAGED: BestWeights(value=averaged[0], epoch=averaged[1])}
    assert choose(bests) == kind


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_the_average_is_that_of_pytorch(decay: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    # With `use_buffers`, PyTorch's plain mean fails at the counter of BatchNorm.
    function = get_swa_multi_avg_fn() if decay == 1 else get_ema_multi_avg_fn(decay)
    reference = AveragedModel(model, multi_avg_fn=function, use_buffers=decay < 1)
    average = AveragedWeights(model, decay=decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 6):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        reference.update_parameters(model)
        average.after_step(step)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with average.in_model():
        for name, value in reference.module.named_parameters():
            assert torch.equal(model.get_parameter(name), value)
        assert decay == 1 or torch.allclose(model[1].running_var, reference.module[1].running_var)  # type: ignore[union-attr,arg-type]
    assert same(trained, model.state_dict())


def test_the_average_begins_after_its_share_of_the_training() -> None:
    model = nn.Linear(1, 1, bias=False)
    average = AveragedWeights(model, decay=1.0)
    average.first_step = 2
    for step, value in enumerate((1.0, 2.0, 5.0, 7.0), start=1):
        nn.init.constant_(model.weight, value)
        average.after_step(step)
    assert average.count == 2
    assert average.tensors[0].item() == 6.0


@pytest.mark.parametrize("ema", ["0.8", "equal"])
def test_a_run_that_is_stopped_and_resumed_has_the_same_average_and_the_same_best(tmp_path: Path, ema: str) -> None:
    settings = {**TRAINED, "epochs": 4, "ema": ema, "ema_start": 0.2, "checkpoint_every": 3}
    whole = train_line(tmp_path / "whole", **settings)
    with pytest.raises(SystemExit):
        train_line(tmp_path / "stopped", StoppedTask(after=12), **settings)
    resumed = train_line(tmp_path / "stopped", **settings)
    assert whole.average is not None
    assert resumed.average is not None
    assert whole.average.count == 20 - 4
    assert all(map(torch.equal, whole.average.tensors, resumed.average.tensors))
    assert whole.bests.keys() == {"trained", "averaged"}
    for kind, best in whole.bests.items():
        assert same(best.weights, resumed.bests[kind].weights)
        assert (best.value, best.loss, best.epoch) == tuple(
            getattr(resumed.bests[kind], name) for name in ("value", "loss", "epoch")
        )


def test_the_average_is_judged_beside_the_trained_weights_and_the_better_ones_are_kept(tmp_path: Path) -> None:
    session = train_line(tmp_path, **TRAINED, epochs=4, ema="0.5")
    records = lines(tmp_path)
    assert session.bests["trained"].loss == min(record["validation_loss"] for record in records)
    assert session.bests["averaged"].loss == min(record["averaged/loss"] for record in records)
    better = min(session.bests.values(), key=lambda best: best.loss)
    assert session.best is better.weights
    result = judge_best(session)
    assert result["best_validation_loss"] == better.loss
    assert {result["weights"], *result["beside"]} == {"trained", "averaged"}
    (other,) = result["beside"].values()
    assert other["judgement"] != result["judgement"]


def test_weights_that_are_trained_beside_an_average_are_those_without_it(tmp_path: Path) -> None:
    plain, averaged = (train_line(tmp_path / ema, **TRAINED, epochs=3, ema=ema) for ema in ("off", "0.9"))
    assert same(plain.model.state_dict(), averaged.model.state_dict())


def test_a_plan_leaves_room_for_the_average(tmp_path: Path) -> None:
    plans = []
    for ema in ("off", "0.9"):
        session = make_session(line_parts(tmp_path / ema, precision="fp64", ema=ema), fixed(0.5))
        limits = session.engine.run_plan.limits
        assert limits is not None
        plans.append(limits.training.model.base_bytes)
    # The simulated GPU's allocator rounds each tensor up to 512 bytes.
    assert plans[1] - plans[0] == pytest.approx(512 * len(list(session.model.parameters())), rel=0.01)


def test_a_measure_of_all_predictions_chooses_the_best_weights(tmp_path: Path) -> None:
    session = train_line(tmp_path, Measured(), **TRAINED, epochs=5, best_by="mae")  # type: ignore[arg-type]
    values = [record["validation/mae"] for record in lines(tmp_path)]
    assert session.criterion.figure(session.bests["trained"]) == min(values)
    assert session.progress.best_epoch == values.index(min(values)) + 1


def test_the_direction_of_a_figure_decides(tmp_path: Path) -> None:
    session = train_line(tmp_path, Measured(), **TRAINED, epochs=4, best_by="largest:max", patience=9)  # type: ignore[arg-type]
    values = [record["validation/largest"] for record in lines(tmp_path)]
    assert session.progress.best_epoch == values.index(max(values)) + 1


def test_patience_counts_validations_by_the_same_figure(tmp_path: Path) -> None:
    session = train_line(tmp_path, Measured(), **TRAINED, epochs=30, best_by="largest:max", patience=2)  # type: ignore[arg-type]
    values = [record["validation/largest"] for record in lines(tmp_path)]
    assert len(values) == values.index(max(values)) + 3 < 30
    assert isinstance(session.reporter, Notices)
    assert any(text.startswith("No better largest in validation in 2 epochs") for text in session.reporter.texts)


class Infinite(Measured):
    """Its second measure is infinite up to a number of validations."""

    finite_from = 99
    validations = 0

    def measure(self, samples: Sequence[Any], predictions: Sequence[Any]) -> Mapping[str, float]:
        self.validations += 1
        limit = self.validations if self.validations >= self.finite_from else math.inf
        return {**super().measure(samples, predictions), "limit": limit}


def strict(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics, as a reader takes them that knows JSON alone."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = next(folder.glob("runs/*/metrics.jsonl")).read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize("best_by", ["undefined:max", "limit:max", "limit:min"])
def test_by_a_figure_that_is_never_finite_the_last_weights_are_kept(tmp_path: Path, best_by: str) -> None:
    session = train_line(tmp_path, Infinite(), **TRAINED, epochs=3, best_by=best_by)  # type: ignore[arg-type]
    assert session.progress.best_epoch == session.bests["trained"].epoch == 3
    assert session.criterion.figure(session.bests["trained"]) is None
    name = best_by.partition(":")[0]
    assert [line[f"validation/{name}"] for line in strict(tmp_path) if "validation_loss" in line] == [None] * 3
    assert isinstance(session.reporter, Notices)
    (told,) = (text for text in session.reporter.texts if "Not a finite number" in text)
    assert "after epoch 1: undefined is nan, limit is inf; metrics.jsonl has null" in told
    assert f"While {name} is none, no epoch is the best by it, and the last weights are kept" in told


def test_a_figure_that_becomes_finite_is_the_best_from_then_on(tmp_path: Path) -> None:
    task = Infinite()
    task.finite_from = 3
    session = train_line(tmp_path, task, **TRAINED, epochs=5, best_by="limit:min")  # type: ignore[arg-type]
    values = [line["validation/limit"] for line in strict(tmp_path) if "validation_loss" in line]
    first = next(number for number, value in enumerate(values, start=1) if value is not None)
    assert session.progress.best_epoch == session.bests["trained"].epoch == first > 1


def test_a_result_says_that_no_epoch_is_the_best() -> None:
    result = {"best_by": "auc", "best_value": None, "best_validation_loss": 0.5, "best_epoch": 3}
    assert best_text(result) == "no best auc, which was never a finite number: validation loss 0.5 after epoch 3"
    assert best_text({**result, "best_value": 0.75}) == "best auc 0.75 after epoch 3"
    assert best_text({**result, "best_by": "loss"}) == "best validation loss 0.5 after epoch 3"


@pytest.mark.parametrize("best_by", ["mai:min", "near/mae"])
def test_a_figure_that_the_validation_lacks_is_an_error_before_the_first_step(tmp_path: Path, best_by: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_session(line_parts(tmp_path, Measured(), **TRAINED, best_by=best_by), fixed(0.5))  # type: ignore[arg-type]
    names = "mae, error loss, largest, loss, undefined"
    assert str(caught.value).splitlines() == [
        f"Unknown figure of the validation: training.best_by={best_by.partition(':')[0]}.", f"Nearest of 6: {names}.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("best_by", "of"), [("loss", "mean"), ("mae", "mean"), ("far/mae", "far"), ("near/loss", "near")]
)
def test_one_of_several_validation_sets_or_their_mean_decides(tmp_path: Path, best_by: str, of: str) -> None:
    session = train_line(tmp_path, TwoValidationSets(), **TRAINED, epochs=4, best_by=best_by)  # type: ignore[arg-type]
    figure, records = best_by.rpartition("/")[2], lines(tmp_path)
    by_set = [[record[f"validation/{name}/{figure}"] for record in records] for name in ("near", "far")]
    wanted = {"near": by_set[0], "far": by_set[1], "mean": [sum(pair) / 2 for pair in zip(*by_set, strict=True)]}[of]
    assert session.criterion.figure(session.bests["trained"]) == min(wanted)
    assert [record["validation_loss"] for record in records] == [
        (record["validation/near/loss"] + record["validation/far/loss"]) / 2 for record in records
    ]


def test_each_validation_set_is_judged_and_none_counts_as_a_test_set(tmp_path: Path) -> None:
    judgement = judge_best(train_line(tmp_path, TwoValidationSets(), **TRAINED, epochs=1))["judgement"]  # type: ignore[arg-type]
    assert judgement.keys() == {"validation", "validation_sets", "test"}
    assert judgement["validation_sets"].keys() == {"near", "far"}
    assert judgement["test"].keys() == {"test"}
    largest = [scores["largest"] for scores in judgement["validation_sets"].values()]
    assert judgement["validation"]["largest"] == max(largest)


def test_the_last_weights_are_kept_where_they_are_wanted(tmp_path: Path) -> None:
    settings = {**TRAINED, "epochs": 4, "best_by": "largest:max"}
    best, last = (train_line(tmp_path / keep, Measured(), **settings, keep=keep) for keep in ("best", "last"))  # type: ignore[arg-type]
    assert same(last.best, last.model.state_dict())
    assert best.progress.best_epoch < last.progress.best_epoch == 4
    assert not same(best.best, last.best)


def test_weights_of_every_second_epoch_are_files_that_pytorch_reads(tmp_path: Path) -> None:
    session = train_line(tmp_path, **TRAINED, epochs=5, keep="2", ema="0.5")
    folder = session.folder.weights_path
    assert sorted(file.name for file in folder.iterdir()) == [
        "epoch-0002-averaged.pt", "epoch-0002.pt", "epoch-0004-averaged.pt", "epoch-0004.pt",
    ]  # fmt: skip
    longer = train_line(tmp_path / "four", **TRAINED, epochs=5, keep="4", ema="0.5")
    for name in ("epoch-0004.pt", "epoch-0004-averaged.pt"):
        first, second = (torch.load(each.folder.weights_path / name, weights_only=True) for each in (session, longer))
        assert same(first, second)
    assert not same(first, torch.load(folder / "epoch-0002-averaged.pt", weights_only=True))


def test_weights_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, **TRAINED, epochs=2, keep="1")
    parts.folder.weights_path.write_text("in the way")
    session = make_session(parts, fixed(0.5))
    with pytest.raises(CheckpointError, match=r"weights of an epoch cannot be written: .*epoch-0001\.pt"):
        training_loop.train(session)


def test_training_ends_validated_when_its_time_is_up_and_its_time_counts_over_attempts(tmp_path: Path) -> None:
    settings = {**TRAINED, "epochs": 10**6, "max_time": "1s"}
    with pytest.raises(SystemExit):
        train_line(tmp_path, StoppedTask(after=2), **settings)
    session = train_line(tmp_path, **settings)
    assert 2 < session.progress.step < session.total_steps
    assert session.progress.trained
    assert session.progress.seconds >= 1
    assert lines(tmp_path)[-1]["step"] == session.progress.step
    assert isinstance(session.reporter, Notices)
    assert any(text.startswith("The training time of 1s is up: stopping at") for text in session.reporter.texts)
    again = train_line(tmp_path, **settings)
    assert again.progress.step == session.progress.step


class LateTask(LineTask):
    """Its training takes too long when it prepares training batch `at`, counted from 1."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left, self.sessions = at, list[Session]()

    def logical_batch(self, *args: Any) -> Any:
        if self.sessions:
            self.left -= args[-1] is not None
            if self.left == 0:
                self.sessions[0]._max_seconds = 0.0
        return super().logical_batch(*args)


def test_an_epoch_that_the_time_cuts_short_leaves_the_files_of_whole_epochs_and_is_counted(tmp_path: Path) -> None:
    settings = {**TRAINED, "epochs": 5, "keep": "1"}
    whole = train_line(tmp_path / "whole", **settings)
    task = LateTask(at=13)
    session = make_session(line_parts(tmp_path / "cut", task, **settings, max_time="1h"), fixed(0.5))
    task.sessions.append(session)
    training_loop.train(session)
    assert (session.progress.step, session.progress.epoch) == (13, 2)
    assert sorted(file.name for file in session.folder.weights_path.iterdir()) == ["epoch-0001.pt", "epoch-0002.pt"]
    kept, expected = (torch.load(each.folder.weights_path / "epoch-0002.pt") for each in (session, whole))
    assert same(kept, expected)
    result = judge_best(session)
    assert (result["epochs"], result["best_epoch"]) == (3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"ema": "0.8", "best_by": "mae"}, {"max_time": "0.05s"}])
def test_two_ranks_choose_the_weights_of_one_process(tmp_path: Path, settings: Mapping[str, Any]) -> None:
    told = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        every = {**TRAINED, "epochs": 3, **settings}
        assert run_ranks(ranks, fit_samples, folder, kind=Measured, **every) == [0] * ranks
        told.append([torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)])
    (alone,), several = told
    assert torch.equal(several[0]["weights"], several[1]["weights"])
    assert several[0]["best"] == several[1]["best"]
    if "max_time" not in settings:
        assert several[0]["best"] == pytest.approx(alone["best"], rel=1e-12)
        assert float((several[0]["weights"] - alone["weights"]).norm() / alone["weights"].norm()) <= 1e-12


FIGURES = st.dictionaries(st.sampled_from(["accuracy", "mae"]), st.floats(-1e6, 1e6), min_size=2)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.tuples(st.floats(0, 1e6), FIGURES), min_size=1))
def test_a_figure_is_that_of_its_set_and_without_a_set_the_mean(
    sets: dict[str, tuple[float, dict[str, float]]],
) -> None:
    validation = Validation.of(
        {key: loss for key, (loss, _) in sets.items()}, {key: of for key, (_, of) in sets.items()}
    )
    for name in ("accuracy", "mae"):
        assert validation.figure(name) == pytest.approx(sum(of[name] for _, of in sets.values()) / len(sets))
        for key, (_, of) in sets.items():
            assert len(sets) == 1 or validation.figure(f"{key}/{name}") == of[name]
    assert validation.figure("loss") == pytest.approx(sum(loss for loss, _ in sets.values()) / len(sets))
    assert validation.figure("f1") is None
    assert all(validation.figure(name) is not None for name in validation.names())
    higher, lower = (Criterion("mae", is_higher).value(validation) for is_higher in (True, False))
    assert higher == -lower


@pytest.mark.parametrize(
    ("best_by", "criterion"),
    [("loss", ("loss", False)), ("accuracy", ("accuracy", True)), ("far/mean recall", ("far/mean recall", True)),
     ("false_positive_rate", ("false_positive_rate", False)), ("width:max", ("width", True)),
     ("f1:min", ("f1", False))],
)  # fmt: skip
def test_the_direction_of_known_figures_needs_no_word(best_by: str, criterion: tuple[str, bool]) -> None:
    assert TrainingSettings(best_by=best_by).criterion == criterion


DIRECTION = "training.best_by must say whether a higher or a lower"
WIDTH = "Write --best-by width:max, or :min in place of :max"
FIGURE = "Write it as loss, or as a metric of the task: accuracy"
TIME = """A time limit is a number of minutes, or as SLURM writes it. Write it as 90, 1:30:00 or 2-12 (days-hours), or \
with a unit: 90min, 12h, 2d"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"best_by": "width"}, f"{DIRECTION} width is better: 'width'. {WIDTH}"),
        ({"best_by": " "}, f"training.best_by must name a figure of the validation: ' '. {FIGURE}"),
        ({"keep": "some"}, "training.keep must be best, last, or a number of epochs: 'some'"),
        ({"keep": "0"}, "training.keep must be best, last, or a number of epochs: '0'"),
        ({"ema": "2"}, "training.ema must be greater than 0 and at most 1: 2.0"),
        ({"ema": "half"}, "training.ema must be a positive number or off: 'half'"),
        ({"max_time": "soon"}, f"This is no time limit: 'soon'. {TIME}"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_told_with_a_right_one(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingSettings(**settings)  # type: ignore[arg-type]
    assert " ".join(str(caught.value).splitlines()) == f"{said}."


@pytest.mark.parametrize(
    "metric",
    [
        "mcc",
        "pr_auc",
        "recall_at_fpr_1pct",
        "balanced_accuracy",
        "precision",
        "contrastive_accuracy",
        "mean recall",
        "exact_match",
    ],
)
def test_metrics_of_the_built_in_tasks_are_better_where_they_are_higher(metric: str) -> None:
    assert metric_direction(metric) == "max"


@pytest.mark.parametrize(
    "metric",
    ["w1_mean", "multiplicity_error", "character_error_rate", "false_alarms_per_hour", "loss", "best_validation_loss"],
)
def test_errors_of_the_built_in_tasks_are_better_where_they_are_lower(metric: str) -> None:
    assert metric_direction(metric) == "min"


@pytest.mark.parametrize("metric", ["windows", "flagged_share", "threshold", "negative_log_likelihood", "critic loss"])
def test_a_figure_whose_name_does_not_tell_has_no_direction(metric: str) -> None:
    assert metric_direction(metric) == ""


@pytest.mark.parametrize("model", ["gat", "vgae"])
def test_detectors_are_chosen_by_the_metrics_of_their_judgement(tmp_path: Path, model: str) -> None:
    values = {
        "dataset.synthetic.seconds": 5, "training.epochs": 3, "training.best_by": "mcc", "mode.baselines": False,
        "mode.rules": False,  # weights are chosen by the network alone
        "paths.runs_dir": str(tmp_path / "runs"), "paths.state_dir": str(tmp_path / "state"),
    }  # fmt: skip
    request = RunRequest(model=model, dataset="synthetic", size="student", device="cpu", values=values)
    outcome = train_new(resolve(request), Notices())
    result = json.loads(outcome.folder.result_path.read_text())
    assert result["best_value"] == max(record["validation/mcc"] for record in lines(tmp_path))
    assert result["best_value"] == result["judgement"]["validation"]["mcc"]
    assert f"best mcc {result['best_value']:.4g} after epoch {result['best_epoch']}" in outcome.summary
