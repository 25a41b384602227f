"""Small finished runs on logs of a made-up bus, for the tests of what is done with them."""

import atexit
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import with_absolute_paths
from can_train.reporter import SilentReporter
from can_train.training.train import train_new
from fakes.random_bus import injected_frames, random_frames, write_log

WINDOW = 20

_SETTINGS = {
    "training.epochs": 1, "training.min_steps_per_epoch": 2, "dataset.window": WINDOW, "dataset.stride": WINDOW,
}  # fmt: skip


def bus_log(path: Path, seed: int = 0, frames: int = 4_000) -> Path:
    """Writes a log with some attacks, the same IDs whatever the seed."""
    return write_log(path, random_frames(frames, seed))


def injected_log(path: Path, seed: int = 0, frames: int = 4_000) -> Path:
    """Writes a log of a regular bus into which the ID `INJECTED` is sent in bursts."""
    return write_log(path, injected_frames(frames, seed))


@cache
def finished_run(
    model: str, mode: str | None = None, size: str = "student", log: Callable[[Path], Path] = bus_log, **more: object
) -> Path:
    """The folder of a run, trained for a moment: `drive.csv` beside its runs folder is its log, alike for all."""
    place = Path(mkdtemp(prefix=f"finished-{model}-"))
    atexit.register(rmtree, place, ignore_errors=True)
    folders = {"paths.runs_dir": str(place / "runs"), "paths.state_dir": str(place / "state")}
    settings = {name.replace("__", "."): value for name, value in more.items()}
    run = resolve(
        RunRequest(
            model=model,
            dataset=str(log(place / "drive.csv")),
            mode=mode,
            size=size,
            device="cpu",
            values=_SETTINGS | folders | settings,
        )
    )
    return train_new(with_absolute_paths(run), SilentReporter()).folder.path


_INJECTED: dict[str, Any] = {
    "log": injected_log, "training__epochs": 12, "training__micro_batch_size": 64, "mode__baselines": False,
}  # fmt: skip


def injected_run(kind: str, **more: object) -> Path:
    """The folder of a `gat`, `vgae` or `fusion` run on `injected_log`, trained until it finds the injected ID."""
    if kind != "fusion":
        return finished_run(kind, **{**_INJECTED, **more})
    models = {"mode__autoencoder": str(injected_run("vgae")), "mode__classifier": str(injected_run("gat"))}
    return finished_run("fusion", **{**_INJECTED, "training__epochs": 3}, **models)


def own_log(run: Path) -> Path:
    """The log that a run of `finished_run` was trained on."""
    return run.parent.parent / "drive.csv"
