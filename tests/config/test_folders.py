from pathlib import Path

import pytest

from can_train.config.resolved import state_folder


@pytest.mark.parametrize(
    ("explicit", "environ", "found"),
    [
        (Path("/given"), {"CAN_TRAIN_HOME": "/home", "XDG_STATE_HOME": "/xdg"}, "/given"),
        (None, {"CAN_TRAIN_HOME": "/home", "XDG_STATE_HOME": "/xdg"}, "/home"),
        (None, {"CAN_TRAIN_HOME": "", "XDG_STATE_HOME": "/xdg"}, "/xdg/can-train"),
        (None, {"XDG_STATE_HOME": "relative"}, "~/.local/state/can-train"),
        (None, {}, "~/.local/state/can-train"),
        (None, {"CAN_TRAIN_HOME": "~/state"}, "~/state"),
        (Path("here"), {}, "here"),
    ],
)
def test_the_first_place_that_is_named_wins(explicit: Path | None, environ: dict[str, str], found: str) -> None:
    assert state_folder(explicit, environ) == Path(found).expanduser().absolute()
