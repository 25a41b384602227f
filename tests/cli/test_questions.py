"""Commands that ask before they act: a no is no error, and changes nothing."""

import sys
from pathlib import Path

import pytest
import typer

from can_train.cli.main import main
from can_train.cli.output import ask
from can_train.errors import ConfigError
from can_train.factors.observations import write_record
from fakes.made_runs import RESULT, Runs
from fakes.samples import observation


@pytest.fixture
def no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: False)


@pytest.mark.usefixtures("no")
def test_a_no_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(tmp_path)
    path = runs.add(1, RESULT)
    write_record(runs.state_dir, observation(1))
    for line, answer in (
        (["delete", "last", *runs.flags], "Nothing was deleted.\n"),
        (["archive", "last", str(tmp_path / "copies"), *runs.flags], "Nothing was deleted.\n"),
        (["factors", "--reset", "--state-dir", str(runs.state_dir)], "Nothing was reset.\n"),
    ):
        assert main(line) == 0
        assert capsys.readouterr().err.endswith(answer)
    assert path.is_dir()


@pytest.mark.parametrize(("on_terminal", "can_ask"), [(False, True), (True, False)])
def test_where_nobody_can_answer_the_error_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, *, on_terminal: bool, can_ask: bool
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: on_terminal, raising=False)
    with pytest.raises(ConfigError, match=r"Nothing was sent, since send asks first .*: 1 run\.\nAdd --yes"):
        ask("Send it?", command="send", otherwise="Nothing was sent", value="1 run", can_ask=can_ask)
