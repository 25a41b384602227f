"""A person's settings file: what it may hold, what comes before it and after it, and what is said of a wrong one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import (
    CLUSTER_FLAGS,
    USER_SETTINGS,
    PathSettings,
    cache_folder,
    data_root,
    plain_to_yaml,
    state_dir,
    user_file,
)
from can_train.errors import ConfigError

TRAIN = ("--model", "gat", "--dataset", "synthetic", "--dry-run")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file that the environment names; a test writes it."""
    monkeypatch.setenv("CAN_TRAIN_CONFIG", str(tmp_path / "mine.yaml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "mine.yaml"


def of_file(cluster: str = "slurm", **values: str) -> RunRequest:
    return RunRequest(model="gat", dataset="synthetic", cluster=cluster, user_file=user_file(), values=values)


def test_a_file_that_is_not_there_sets_nothing(tmp_path: Path) -> None:
    found = user_file({"XDG_CONFIG_HOME": str(tmp_path)})
    assert (found.path, found.values) == (tmp_path / "can-train" / "config.yaml", {})


def test_the_file_is_found_in_the_users_configuration_folder(tmp_path: Path) -> None:
    (tmp_path / "can-train").mkdir()
    (tmp_path / "can-train" / "config.yaml").write_text("account: a\n")
    assert user_file({"XDG_CONFIG_HOME": str(tmp_path)}).values == {"account": "a"}
    assert user_file({"HOME": "/", "XDG_CONFIG_HOME": str(tmp_path), "CAN_TRAIN_CONFIG": "/dev/null"}).values == {}


@given(values=st.dictionaries(st.sampled_from(["cluster", *CLUSTER_FLAGS]), st.text("ab12:-", min_size=1)))
def test_values_are_read_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, values: dict[str, str]) -> None:
    path = tmp_path_factory.mktemp("file") / "c.yaml"
    path.write_text(plain_to_yaml(values))
    assert user_file({"CAN_TRAIN_CONFIG": str(path)}).values == values


def test_folders_may_name_the_home_directory_and_variables(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    written.write_text("runs-dir: $SCRATCH/runs\ndata_root: ~/data\naccount: $SCRATCH\n")
    assert user_file().values == {
        "runs_dir": "/scratch/me/runs", "data_root": "/home/me/data", "account": "$SCRATCH",
    }  # fmt: skip


@pytest.mark.parametrize("folder", ["$NOT_SET/runs", "/scratch/${NOT_SET}"])
def test_a_folder_with_a_variable_that_is_not_set_is_refused(written: Path, folder: str) -> None:
    written.write_text(f"cache: {folder}\n")
    with pytest.raises(ConfigError, match=r"cache names a variable that is not set: \$\{?NOT_SET\}?"):
        user_file()


def test_folders_come_after_flags_and_the_environment(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written.write_text("data_root: /file/data\nstate_dir: /file/state\n")
    assert (data_root(PathSettings()), state_dir(PathSettings())) == (Path("/file/data"), Path("/file/state"))
    monkeypatch.setenv("CAN_TRAIN_DATA", "/variable/data")
    monkeypatch.setenv("CAN_TRAIN_HOME", "/variable/state")
    assert (data_root(PathSettings()), state_dir(PathSettings())) == (Path("/variable/data"), Path("/variable/state"))
    given = PathSettings(data_root="/flag/data", state_dir="/flag/state")
    assert (data_root(given), state_dir(given)) == (Path("/flag/data"), Path("/flag/state"))


def test_prepared_data_are_in_a_folder_of_their_own_where_a_folder_is_named(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.write_text("state_dir: /file/state\n")
    assert cache_folder(PathSettings()) == Path("/file/state/cache")
    written.write_text("cache: /file\nstate_dir: /file/state\n")
    assert cache_folder(PathSettings()) == Path("/file/can-train-cache")
    monkeypatch.setenv("CAN_TRAIN_CACHE", "/variable")
    assert cache_folder(PathSettings()) == Path("/variable/can-train-cache")
    assert cache_folder(PathSettings(cache="/flag")) == Path("/flag/can-train-cache")


def test_jobs_ask_for_what_the_file_says_unless_the_line_says_otherwise(written: Path) -> None:
    written.write_text("account: mine\ntime: 1:30:00\nnodes: 2\nruns_dir: /file/runs\n")
    run = resolve(of_file())
    assert (run.cluster.account, run.cluster.time, run.cluster.nodes) == ("mine", "1:30:00", 2)
    assert run.paths.runs_dir == "/file/runs"
    other = resolve(of_file(**{"cluster.account": "other", "paths.runs_dir": "/flag/runs"}))
    assert (other.cluster.account, other.cluster.nodes, other.paths.runs_dir) == ("other", 2, "/flag/runs")


def test_every_run_is_tracked_as_the_file_says_unless_the_line_says_otherwise(written: Path) -> None:
    written.write_text("tracker: mlflow,wandb\n")
    assert resolve(of_file()).paths.trackers == resolve(of_file(cluster="local")).paths.trackers == ["mlflow", "wandb"]
    assert resolve(of_file(**{"paths.tracker": "off"})).paths.trackers == []


def test_a_run_that_is_no_job_has_nothing_of_one(written: Path) -> None:
    written.write_text("account: mine\nruns_dir: /file/runs\n")
    run = resolve(of_file(cluster="local"))
    assert (run.cluster.account, run.paths.runs_dir) == ("", "/file/runs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount: a", "'acount'"),
        ("training.lr: 3", "'training.lr'"),
        ("nodes: two", "nodes: "),
        ("time: abc", "time: "),
        ("cpus: -1", "cpus: "),
        ("account: [a]", "account must have one value"),
        ("account:", "account must have one value"),
        ("cluster: mars", "'mars'"),
        ("tracker: tensorbord", "tracker: Unknown tracker: 'tensorbord'"),
        ("- account", "must have a setting on each line"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(
    capsys: pytest.CaptureFixture[str], written: Path, text: str, said: str
) -> None:
    written.write_text(text)
    assert main((*TRAIN, "--submit")) == 2
    error = capsys.readouterr().err
    assert str(written) in error
    assert said in error
    assert "Traceback" not in error


def test_a_file_that_is_named_and_missing_is_an_error(written: Path) -> None:
    with pytest.raises(ConfigError, match="CAN_TRAIN_CONFIG names does not exist"):
        user_file()


def test_commands_about_runs_look_where_the_file_says(
    capsys: pytest.CaptureFixture[str], written: Path, tmp_path: Path
) -> None:
    written.write_text(f"runs_dir: {tmp_path / 'own'}\n")
    assert main(["runs"]) == 0
    assert str(tmp_path / "own") in capsys.readouterr().out
    assert main(["runs", "--runs-dir", "runs"]) == 0
    assert str(tmp_path / "own") not in capsys.readouterr().out


def test_every_setting_of_the_file_is_a_flag_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help-all"])
    shown = capsys.readouterr().out
    flags = [f"--{name.replace('_', '-')}" for name in USER_SETTINGS]
    assert [flag for flag in flags if flag not in shown] == []
