"""The finished runs that a run builds on: which are found, which fit, and what is said of the others."""

import shlex
import shutil
from pathlib import Path

import pytest

from can_train.config.resolved import ResolvedRun
from can_train.errors import CheckpointError, ConfigError, RunError
from can_train.runs.past_runs import PastRuns, identity, resolve_prerequisites
from can_train.slurm import client as slurm
from fakes.finished_runs import Shelf

DISTILLED = ("gat", "knowledge_distillation", "student")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def resolve(shelf: Shelf, *what: str, awaited: tuple[str, ...] = (), **more: object) -> tuple[ResolvedRun, list[str]]:
    past = PastRuns(shelf.folder / "state", shelf.folder / "runs", slurm, awaited)
    return resolve_prerequisites(shelf.resolved(*what, **more), shelf.request(*what, **more), past)


def test_the_newest_finished_run_that_fits_is_taken_and_named(shelf: Shelf) -> None:
    teacher = shelf.resolved("gat", "normal")
    shelf.put(1, teacher)
    chosen = shelf.put(2, teacher)
    shelf.put(3, shelf.resolved("gat", "normal", "student"))
    shelf.put(4, shelf.resolved("gat", "normal", sets=("dataset.window=50",)))
    shelf.put(5, teacher, None)
    shelf.put(6, shelf.resolved("vgae", "autoencoder"))
    run, notices = resolve(shelf, *DISTILLED)
    assert run.mode.teacher == run.config["mode"]["teacher"] == str(chosen.path)
    assert f"teacher: {chosen.run_id} (the newest finished run that fits)" in notices


@pytest.mark.parametrize("share", ["0.2", "0.0"])
def test_a_setting_that_the_data_decide_fits_the_value_of_any_run(shelf: Shelf, share: str) -> None:
    chosen = shelf.put(1, shelf.resolved("gat", "normal", sets=(f"dataset.test_share={share}",)))
    assert resolve(shelf, *DISTILLED)[0].mode.teacher == str(chosen.path)
    with pytest.raises(ConfigError, match="no finished run fits"):
        resolve(shelf, *DISTILLED, sets=("dataset.test_share=0.3",))


def test_a_run_of_the_same_model_only_is_one_to_be_compared_with(shelf: Shelf) -> None:
    shelf.put(1, shelf.resolved("gat", "normal"))
    same = shelf.put(2, shelf.resolved("gat", "normal", "student"))
    shelf.put(3, shelf.resolved("gat", "normal", "student", sets=("model.hidden=16",)))
    assert resolve(shelf, *DISTILLED)[0].mode.without_teacher == str(same.path)
    shutil.rmtree(same.path)
    assert resolve(shelf, *DISTILLED)[0].mode.without_teacher == ""


def test_a_pretrained_run_is_built_on_only_where_it_is_named_or_awaited(shelf: Shelf) -> None:
    made = shelf.put(1, shelf.resolved("", "pretrain", None, task="bendr"))
    classifier = ("", "classify", None)
    assert resolve(shelf, *classifier, task="bendr")[0].mode.pretrained == ""
    named = resolve(shelf, *classifier, task="bendr", values={"mode.pretrained": made.run_id})[0]
    awaited = resolve(shelf, *classifier, task="bendr", awaited=(made.run_id,))[0]
    assert named.mode.pretrained == awaited.mode.pretrained == str(made.path)


def test_a_folder_that_was_copied_here_under_another_name_is_found_too(shelf: Shelf) -> None:
    elsewhere = Shelf(shelf.folder / "elsewhere")
    path = elsewhere.put(1, elsewhere.resolved("gat", "normal")).path
    (shelf.folder / "runs").mkdir()
    copy = shutil.copytree(path, shelf.folder / "runs" / "my-teacher")
    assert resolve(shelf, *DISTILLED)[0].mode.teacher == str(copy)


def test_a_run_that_builds_on_nothing_reads_nothing(shelf: Shelf) -> None:
    run, notices = resolve(shelf, "gat", "normal")
    assert (run, notices) == (shelf.resolved("gat", "normal"), [])


def test_damaged_files_of_other_runs_do_not_break_the_search(shelf: Shelf) -> None:
    teacher = shelf.resolved("gat", "normal")
    good = shelf.put(1, teacher)
    shelf.put(2, teacher).result_path.write_text("{")
    (shelf.put(3, teacher).path / "config.yaml").write_text(": : :")
    (shelf.put(4, teacher).path / "config.yaml").write_text("dataset: none\n")
    (shelf.put(5, teacher).checkpoints_path / "manifest.json").unlink()
    shelf.put(6, teacher).result_path.write_bytes(b"\xff")
    assert resolve(shelf, *DISTILLED)[0].mode.teacher == str(good.path)


def test_what_is_missing_is_said_with_the_command_that_makes_it(shelf: Shelf) -> None:
    log = shelf.folder / "a b.csv"
    log.touch()
    with pytest.raises(ConfigError, match="no finished run fits") as error:
        resolve(shelf, *DISTILLED, dataset=str(log), sets=("dataset.window=50", "training.lr=0.1"), device="cpu")
    command = error.value.remedy.splitlines()[1]
    assert shlex.split(command) == [
        "can-train", "--model", "gat", "--dataset", str(log), "--mode", "normal", "--size", "teacher",
        "--set", "dataset.window=50", "--device", "cpu", *shelf.flags,
    ]  # fmt: skip


def test_all_runs_that_are_missing_are_said_at_once_and_only_they(shelf: Shelf) -> None:
    with pytest.raises(ConfigError, match="an autoencoder and a classifier, and no finished run fits") as error:
        resolve(shelf, "fusion", "fusion")
    autoencoder, classifier = error.value.remedy.splitlines()[1:-1]
    assert "--model vgae" in autoencoder
    assert "--model gat" in classifier
    shelf.put(1, shelf.resolved("vgae", "autoencoder"))
    with pytest.raises(ConfigError, match="builds on a classifier, and") as error:
        resolve(shelf, "fusion", "fusion")
    assert error.value.remedy.splitlines()[1:-1] == [classifier]


@pytest.mark.parametrize("way", ["name", "short name", "folder", "checkpoint", "copy"])
def test_a_run_is_given_by_name_by_folder_or_by_a_file_of_its_checkpoints(shelf: Shelf, way: str) -> None:
    older = shelf.put(1, shelf.resolved("gat", "normal"))
    shelf.put(2, shelf.resolved("gat", "normal"))
    copy = Path(shutil.copytree(older.path, shelf.folder / "copied"))
    given = {
        "name": older.run_id,
        "short name": "0101-000001-0001",
        "folder": str(older.path),
        "checkpoint": str(older.checkpoints_path / "manifest.json"),
        "copy": str(copy),
    }[way]
    run, notices = resolve(shelf, *DISTILLED, values={"mode.teacher": given})
    assert run.mode.teacher == str(copy if way == "copy" else older.path)
    assert notices == []


@pytest.mark.parametrize("way", ["name", "part", "last", "folder"])
def test_the_run_whose_weights_training_starts_from_is_given_in_the_same_ways(shelf: Shelf, way: str) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal"))
    given = {"name": run.run_id, "part": run.run_id[-4:], "last": "last", "folder": str(run.path)}[way]
    resolved, notices = resolve(shelf, "gat", "normal", values={"training.start_from": given})
    assert resolved.training.start_from == resolved.config["training"]["start_from"] == str(run.path)
    assert notices == [f"weights to start from: {run.run_id}"]


def test_a_run_to_start_from_that_does_not_exist_is_an_error_before_anything_is_trained(shelf: Shelf) -> None:
    with pytest.raises(RunError, match="no such run: 'nope'"):
        resolve(shelf, "gat", "normal", values={"training.start_from": "nope"})


def test_a_run_to_start_from_that_has_not_finished_is_an_error_unless_it_is_waited_for(shelf: Shelf) -> None:
    run = shelf.put(1, shelf.resolved("gat", "normal"), None)
    values = {"training.start_from": run.run_id}
    with pytest.raises(RunError, match=r"(?s)to start from has not finished.*can-train resume /.*20260101"):
        resolve(shelf, "gat", "normal", values=values)
    resolved, _ = resolve(shelf, "gat", "normal", awaited=(run.run_id,), values=values)
    assert resolved.training.start_from == str(run.path)


def test_what_does_not_fit_is_said_setting_by_setting(shelf: Shelf) -> None:
    other = shelf.put(1, shelf.resolved("vgae", "autoencoder", "student"))
    with pytest.raises(ConfigError, match="model is vgae, not gat; mode is autoencoder, not normal or curriculum; "
                       "size is student, not teacher"):  # fmt: skip
        resolve(shelf, *DISTILLED, values={"mode.teacher": other.run_id})
    sets = ("dataset.window=50", "dataset.synthetic.seconds=5")
    data = shelf.put(2, shelf.resolved("gat", "normal", sets=sets))
    said = r"dataset.window is 50, not 100; dataset.synthetic.seconds is 5.0, not 0.0"
    with pytest.raises(ConfigError, match=said) as error:
        resolve(shelf, *DISTILLED, values={"mode.teacher": data.run_id})
    assert "can-train --model gat" in error.value.remedy


def test_settings_that_do_not_change_what_a_model_sees_may_differ(shelf: Shelf) -> None:
    sets = ("dataset.stride=50", "training.lr=0.1", "model.hidden=16")
    teacher = shelf.put(1, shelf.resolved("gat", "normal", sets=sets))
    assert resolve(shelf, *DISTILLED)[0].mode.teacher == str(teacher.path)


def test_a_run_that_has_not_finished_is_refused_unless_it_is_waited_for(shelf: Shelf) -> None:
    teacher = shelf.put(1, shelf.resolved("gat", "normal"), None)
    given = {"mode.teacher": teacher.run_id}
    with pytest.raises(RunError, match=r"(?s)An unfinished run cannot be a teacher.*can-train resume /.*20260101"):
        resolve(shelf, *DISTILLED, values=given)
    for values in (given, {}):
        run, _ = resolve(shelf, *DISTILLED, awaited=(teacher.run_id,), values=values)
        assert run.mode.teacher == str(teacher.path)


def test_a_run_that_is_waited_for_comes_before_one_that_has_finished(shelf: Shelf) -> None:
    awaited = shelf.put(1, shelf.resolved("gat", "normal"), None)
    shelf.put(2, shelf.resolved("gat", "normal"))
    run, notices = resolve(shelf, *DISTILLED, awaited=(awaited.run_id,))
    assert run.mode.teacher == str(awaited.path)
    assert notices == [f"teacher: {awaited.run_id} (the run that is waited for)"]


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_result_that_cannot_be_read_is_no_run_that_has_not_finished(shelf: Shelf, text: str) -> None:
    teacher = shelf.put(1, shelf.resolved("gat", "normal"))
    teacher.result_path.write_text(text)
    with pytest.raises(RunError, match=r"(?s)result is damaged: .*result.json.\n.*rm .*result.json"):
        resolve(shelf, *DISTILLED, values={"mode.teacher": teacher.run_id})


def test_the_remedy_for_a_run_that_was_named_does_not_name_it_again(shelf: Shelf) -> None:
    named = {"mode.teacher": shelf.put(1, shelf.resolved("gat", "normal", "student")).run_id}
    with pytest.raises(ConfigError, match=r"(?s)This makes one that does:.*without the run that it names"):
        resolve(shelf, *DISTILLED, values=named)
    shelf.put(2, shelf.resolved("gat", "normal"))
    assert resolve(shelf, *DISTILLED)[0].mode.teacher


@pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/step-00000001.pt", "config.yaml"])
def test_whatever_lies_in_a_folder_of_a_run_names_the_run(shelf: Shelf, inside: str) -> None:
    teacher = shelf.put(1, shelf.resolved("gat", "normal"))
    (teacher.checkpoints_path / "step-00000001.pt").touch()
    run, _ = resolve(shelf, *DISTILLED, values={"mode.teacher": str(teacher.path / inside)})
    assert run.mode.teacher == str(teacher.path)


def test_a_checkpoint_without_its_run_is_refused_as_one(shelf: Shelf) -> None:
    alone = shelf.folder / "alone.pt"
    alone.touch()
    with pytest.raises(RunError, match=r"not in the folder of a run: .*alone.pt.\n.*config.yaml"):
        resolve(shelf, *DISTILLED, values={"mode.teacher": str(alone)})


def test_a_run_without_its_weights_is_refused(shelf: Shelf) -> None:
    teacher = shelf.put(1, shelf.resolved("gat", "normal"))
    shutil.rmtree(teacher.checkpoints_path)
    with pytest.raises(CheckpointError, match="has lost its weights"):
        resolve(shelf, *DISTILLED, values={"mode.teacher": teacher.run_id})


def test_the_identity_is_of_the_runs_that_a_run_builds_on_wherever_they_lie(shelf: Shelf) -> None:
    first, second = (shelf.put(number, shelf.resolved("gat", "normal")) for number in (1, 2))
    copy = shutil.copytree(first.path, shelf.folder / "copied")

    def digest(folder: Path) -> str:
        return identity(resolve(shelf, *DISTILLED, values={"mode.teacher": str(folder)})[0], "code", [])

    assert digest(first.path) == digest(copy) != digest(second.path)
