"""`--trials`: a search that trains here, is stopped, goes on, and is looked at."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.cli.search import PlannedSearch, TrialHere
from can_train.config.axis import SearchAxis
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import plain_from_yaml
from can_train.runs.registry import Registry
from can_train.runs.run_folder import RunFolder
from can_train.runs.trials import SearchFolder, SettingsSearch, TrialRun
from fakes.own_tasks import CLASSIFIER, write_task
from fakes.processes import Command

AXES = ("--set", "training.lr=interval(1e-5,1e-1)", "--set", "task.hidden=interval(4,32)")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    write_task(tmp_path / "mine")
    return ("--task", "mine/my_file.py:MyTask", "--device", "cpu", "--epochs", "3")


def trials(folder: Path) -> dict[int, TrialRun]:
    """The trials in a folder of runs, by number."""
    runs = [TrialRun.of(RunFolder(path)) for path in (folder / "runs").iterdir()]
    return {trial.trial.number: trial for trial in runs if trial is not None}


def search_name(folder: Path) -> str:
    (path,) = (folder / "state" / "searches").iterdir()
    return path.name


def test_each_trial_is_a_run_with_its_values(own: tuple[str, ...], tmp_path: Path, capsys) -> None:
    assert main((*own, *AXES, "--trials", "4", "--no-asha")) == 0
    out = capsys.readouterr().out
    made = trials(tmp_path)
    assert {*made} == {1, 2, 3, 4}
    for trial in made.values():
        config = plain_from_yaml((trial.folder.path / "config.yaml").read_text())
        assert trial.trial.values == {"training.lr": config["training"]["lr"],
                                      "task.hidden": config["settings"]["hidden"]}  # fmt: skip
        assert trial.has_finished
        assert sorted(trial.curve) == [1, 2, 3]
        assert json.loads((trial.folder.path / "changed_settings.json").read_text())["training.lr"]
    labels = {run.run_id: run.label for run in Registry(tmp_path / "state").runs()}
    assert labels == {
        trial.folder.run_id: f"lr={trial.trial.values['training.lr']} hidden={trial.trial.values['task.hidden']}"
        for trial in made.values()
        if trial.trial.values
    }
    assert len({trial.trial.values["training.lr"] for trial in made.values() if trial.trial.values}) == 4
    assert "4 trials for the lowest validation loss, Bayesian (tpe)\n  training.lr: 1e-05 to 0.1, logarithmic" in out
    # The table: the best first.
    lines = out[out.index("4 trials, the best first") :].splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdigit() and "finished" in line]
    losses = [float(row[-1]) for row in rows]
    assert losses == sorted(losses)
    assert losses[0] == pytest.approx(min(min(trial.curve.values()) for trial in made.values()), rel=1e-3)


def test_the_same_line_trains_only_the_trials_that_are_missing(own: tuple[str, ...], tmp_path: Path, capsys) -> None:
    line = (*own, *AXES, "--no-asha")
    assert main((*line, "--trials", "2")) == 0
    before = trials(tmp_path)
    assert main((*line, "--trials", "2")) == 0
    assert {*trials(tmp_path)} == {1, 2}
    assert main((*line, "--trials", "3")) == 0
    after = trials(tmp_path)
    assert {*after} == {1, 2, 3}
    assert {number: after[number].trial for number in before} == {number: each.trial for number, each in before.items()}
    # Another seed is another search.
    assert main((*line, "--trials", "1", "--seed", "5")) == 0
    assert len([*(tmp_path / "state" / "searches").iterdir()]) == 2


def test_a_process_that_comes_second_leaves_the_number_to_the_first(tmp_path: Path) -> None:
    folders = {"paths.runs_dir": str(tmp_path / "runs"), "paths.state_dir": str(tmp_path / "state")}
    base = resolve(RunRequest(model="vgae", dataset="synthetic", values=folders))
    search = SettingsSearch(name="a", axes=(SearchAxis(key="training.lr", low=1e-4, high=1e-1),), objective="loss",
                            is_higher_better=False, epochs=3, seed=1)  # fmt: skip
    planned = PlannedSearch(folder=SearchFolder.make(tmp_path / "state", search), base=base, trials=2)
    first, second = TrialHere(planned, 1), TrialHere(planned, 1)
    assert (first.claim(), second.claim()) == (True, False)
    second.release()
    assert [*planned.folder.runs()] == [1]
    first.release()
    assert planned.missing() == [1, 2]


def test_compare_and_report_take_the_name_of_a_search(own: tuple[str, ...], tmp_path: Path, capsys) -> None:
    assert main((*own, *AXES, "--trials", "6", "--no-asha", "--epochs", "1")) == 0
    name = search_name(tmp_path)
    capsys.readouterr()
    assert main(("compare", name)) == 0
    shown = capsys.readouterr().out
    assert "6 trials, the best first" in shown
    assert "loss: lower is better" in shown
    assert main(("compare", name, "--json")) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 6
    assert main(("report", name, "--output", "page.html")) == 0
    page = (tmp_path / "page.html").read_text()
    assert "6 trials, the best first" in page
    assert page.count("<h2 id=") == 6
    for setting in ("training.lr", "task.hidden"):
        chart = next(part for part in page.split("<figure")[1:] if setting in part)
        for number in range(1, 7):
            assert f"trial {number}: {setting.rpartition('.')[2]} " in chart
    # Not on the page of one trial.
    assert main(("report", "last", "--output", "one.html")) == 0
    assert "loss by lr" not in (tmp_path / "one.html").read_text()


def test_trials_that_lose_end_early_and_count_as_ended(own: tuple[str, ...], tmp_path: Path, capsys) -> None:
    assert main((*own, *AXES, "--trials", "7", "--epochs", "9")) == 0
    made, printed = trials(tmp_path), capsys.readouterr()
    stopped = {number: each.trial.stopped_after for number, each in made.items() if each.trial.stopped_after}
    assert stopped
    for number, each in made.items():
        assert max(each.curve) == stopped.get(number, 9)
        assert stopped.get(number, 1) in (1, 3)
    number = next(iter(stopped))
    assert f"Trial {number} ends after {stopped[number]} of 9 epochs: its validation loss" in printed.err
    assert f"ended after {stopped[number]}" in printed.out


def test_a_trial_whose_loss_is_not_finite_leaves_the_search_going(own: tuple[str, ...], tmp_path: Path, capsys) -> None:
    text = CLASSIFIER.replace('"sum")', '"sum") * (float("nan") if self.settings.hidden == 8 else 1.0)')
    write_task(tmp_path / "mine", text)
    line = (*own, "--set", "task.hidden=8,16", "--search", "random", "--trials", "6", "--no-asha")
    assert main(line) == 0
    err = capsys.readouterr().err
    made = trials(tmp_path)
    failed = {number for number, each in made.items() if (each.trial.values or {})["task.hidden"] == "8"}
    assert failed
    assert {number for number, each in made.items() if not each.has_finished} == failed
    assert err.count("error: The loss is not finite before the first update") == len(failed)
    # One that failed does not go on when the line is typed again.
    assert main(line) == 0
    assert "is not finite" not in capsys.readouterr().err


def test_a_trial_whose_model_does_not_fit_leaves_the_search_going(own: tuple[str, ...], tmp_path: Path, capsys) -> None:
    line = (*own, "--device", "sim:4MiB", "--set", "task.hidden=8,300000", "--search", "random", "--trials", "4")
    assert main((*line, "--no-asha")) == 0
    err = capsys.readouterr().err
    made = trials(tmp_path)
    large = {number for number, each in made.items() if (each.trial.values or {})["task.hidden"] == "300000"}
    assert large
    assert {*made} - large == {number for number, each in made.items() if each.has_finished}
    assert err.count("error: The weights of the model must fit on the device") == len(large)


def test_a_search_of_which_every_trial_fails_says_so_and_how_few_combinations_there_are(
    own: tuple[str, ...], tmp_path: Path, capsys
) -> None:
    line = (*own, "--device", "sim:4MiB", "--set", "task.hidden=300000,400000", "--search", "random", "--trials", "3")
    assert main((*line, "--no-asha")) == 3
    shown = capsys.readouterr()
    assert "error: No trial has finished: 3 failed.\n" in shown.err
    assert "  These are 2 combinations: some are trained more than once.\n" in shown.out


def test_a_search_that_was_killed_goes_on_with_the_values_of_its_trial(own: tuple[str, ...], tmp_path: Path) -> None:
    line = (*own, *AXES, "--trials", "2", "--no-asha", "--epochs", "60", "--checkpoint-every", "5")
    folders = ("--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state"))
    with Command(*line, *folders) as process:
        while not [*(tmp_path / "runs").glob("*/checkpoints/manifest.json")]:
            assert process.is_alive, process.stderr
            time.sleep(0.01)
        process.kill()
    before = trials(tmp_path)
    assert {number: each.has_finished for number, each in before.items()} == {1: False}
    with Command(*line, *folders) as process:
        assert process.wait() == 0, process.stderr
        said = process.stderr
    assert "trial 1 of 2: goes on" in said
    assert "Continuing at step" in said
    after = trials(tmp_path)
    assert after[1].trial == before[1].trial
    assert all(each.has_finished for each in after.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trials", "3"), "--trials has no setting to search"),
        (("--trials", "0", *AXES), "A search has 1 to 1000 trials: --trials 0"),
        (("--search", "random", *AXES), "--search has no effect without --trials"),
        (("--no-asha",), "--asha has no effect without --trials"),
        (("--trials", "3", "--search", "grid", *AXES), "Unknown value of --search: 'grid'"),
        (("--set", "training.lr=interval(1e-4,1e-2)"), "The values of the sweep cannot be listed"),
        (("--trials", "3", "--set", "training.lr=interval(1e-2,1e-4)"), "An interval needs a low and a higher end"),
        (("--trials", "3", "--set", "training.lr=interval(1e-4)"), "An interval needs a low and a higher end"),
        (("--trials", "3", "--set", "training.lr=tag(log,interval(0,1))"), "A logarithmic scale begins above 0"),
        (("--trials", "3", "--set", "task.hidden=interval(0.5,8)"), "task.hidden is a whole number"),
        (("--trials", "3", "--set", "training.lr=interval(-1,1)"), "training.lr"),
        (("--trials", "3", "--set", "task.hiden=interval(1,8)"), "Unknown setting: 'task.hiden'"),
        (("--trials", "3", "--set", "memory=tight,muon"), "A search chooses values of settings, not presets"),
        (("--trials", "3", *AXES, "--set", "training.lr=0.1,0.2"), "training.lr is searched twice"),
        (
            ("--trials", "3", *AXES, "--submit", "--cluster", "local"),
            "Trials in the background would all train at once",
        ),
    ],
)
def test_a_search_that_cannot_be_is_an_error_with_a_remedy(
    own: tuple[str, ...], tmp_path: Path, capsys, words: tuple[str, ...], message: str
) -> None:
    assert main((*own, *words)) == 2
    err = capsys.readouterr().err
    assert err.startswith((f"error: {message}", f"starting: loading PyTorch\nerror: {message}"))
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_a_plan_shows_the_axes_and_writes_nothing(own: tuple[str, ...], tmp_path: Path, capsys) -> None:
    assert main((*own, *AXES, "--trials", "9", "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "task.hidden: 4 to 32, whole numbers, linear" in out
    assert "The plan is for the middle of each setting:" in out
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "state" / "searches").exists()


@pytest.mark.parametrize(("more", "array"), [((), "0-8%3"), (("--max-parallel", "5"), "0-8%5")])
def test_the_script_that_would_be_sent_is_an_array_of_the_trials(
    own: tuple[str, ...], tmp_path: Path, capsys, more: tuple[str, ...], array: str
) -> None:
    assert main((*own, *AXES, "--trials", "9", "--dry-run", "--submit", "--cluster", "slurm", *more)) == 0
    out = capsys.readouterr().out
    assert out.count("#SBATCH --array=") == 1
    assert f"#SBATCH --array={array}\n" in out
    assert not (tmp_path / "runs").exists()


def test_the_objective_is_the_figure_that_chooses_the_weights(own: tuple[str, ...], tmp_path: Path, capsys) -> None:
    assert main((*own, *AXES, "--trials", "2", "--no-asha", "--best-by", "accuracy", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in found] == ["finished", "finished"]
    for trial in trials(tmp_path).values():
        lines = [json.loads(line) for line in trial.folder.metrics_path.read_text().splitlines()]
        accuracies = [line["validation/accuracy"] for line in lines if "validation/accuracy" in line]
        assert list(trial.curve.values()) == accuracies


def test_an_agent_of_wandb_writes_each_value_as_a_set(tmp_path: Path, repository: Path) -> None:
    page = (repository / "docs" / "search.md").read_text(encoding="utf-8")
    sweep = plain_from_yaml(page.partition("```yaml\n")[2].partition("```")[0])
    (tmp_path / "can-train").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "can-train").chmod(0o755)
    # As the agent of wandb replaces the macro: a word for each parameter, without hyphens.
    values = [f"{name}=1 2" for name in sweep["parameters"]]
    command = [each for word in sweep["command"] for each in (values if word == "${args_no_hyphens}" else [word])]
    printed = subprocess.run(
        command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert printed.stdout.splitlines()[-2:] == [f"--set={value}" for value in values]
    assert sweep["metric"]["name"] == "validation_loss"
