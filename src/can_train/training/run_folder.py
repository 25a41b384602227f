"""The folder of one run, `runs/<run id>/`: resolved configuration, environment, metrics, checkpoints and result."""

import fcntl
import json
import os
import platform
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from can_train.config.plain_text import plain_from_yaml, plain_to_yaml
from can_train.errors import RunError
from can_train.state.atomic import write_json_atomic, write_text_atomic
from can_train.training.attempts import Attempts

CONFIG: Final = "config.yaml"
"""The file that makes a folder one of a run."""

_LIBRARIES: Final = ("can-train", "torch", "torch_geometric", "numpy", "polars", "scikit-learn", "hydra-core")


class RunFolder:
    """Paths and files of one run.

    Args:
        path: The folder; its name is the run id.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints_path = path / "checkpoints"
        self.result_path = path / "result.json"
        self.plan_path = path / "plan.json"
        self.companions_path = path / "companions.json"
        self.attempts = Attempts(path)

    @classmethod
    def create(cls, runs_dir: Path, key: str, config: Mapping[str, Any]) -> "RunFolder":
        """Makes the folder of a new run and writes its configuration and environment.

        Raises:
            RunError: The folder cannot be written.
        """
        folder = cls(runs_dir / new_run_id(key))
        folder.make(config)
        return folder

    def make(self, config: Mapping[str, Any]) -> None:
        """Makes the folder and writes the run's configuration and environment.

        Raises:
            RunError: It cannot be written.
        """
        try:
            self.path.mkdir(parents=True)
            write_text_atomic(self.path / CONFIG, plain_to_yaml(config))
            write_json_atomic(self.path / "environment.json", _environment())
        except OSError as error:
            raise RunError("The run folder cannot be written", value=f"{self.path}: {error.strerror}",
                           remedy="Give another place with --runs-dir") from error  # fmt: skip

    def config(self) -> dict[str, Any]:
        """Reads the resolved configuration.

        Raises:
            RunError: It cannot be read.
        """
        try:
            return plain_from_yaml((self.path / CONFIG).read_text())
        except (OSError, ValueError) as error:
            raise _unreadable("configuration", self.path / CONFIG, error) from error

    def result(self) -> dict[str, Any] | None:
        """Reads the result; None where the run has not finished.

        Raises:
            RunError: It cannot be read.
        """
        try:
            result = json.loads(self.result_path.read_text())
            if not isinstance(result, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreadable("result", self.result_path, error) from error
        return result

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second process out of the run. The lock is the kernel's: a killed process leaves none behind.

        Raises:
            RunError: Another process is training this run.
        """
        with (self.path / "lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError("The run is being trained by another process", value=self.run_id) from error
            yield


def new_run_id(key: str) -> str:
    """Makes the name of a new run: when, what, and four digits that tell it from others of the same second."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{key}-{secrets.token_hex(2)}"


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = 0

    def append(self, **record: Any) -> None:
        """Adds a line."""
        with self._path.open("a") as handle:
            handle.write(json.dumps(record) + "\n")
        self.lines += 1

    def rewind(self, lines: int) -> None:
        """Keeps the first `lines` lines: what an attempt wrote after its last checkpoint is written again."""
        kept = self._path.read_text().splitlines(keepends=True)[:lines] if self._path.exists() else []
        write_text_atomic(self._path, "".join(kept))
        self.lines = len(kept)


def _unreadable(what: str, path: Path, error: OSError | ValueError) -> RunError:
    why = f": {error.strerror}" if isinstance(error, OSError) else ""
    return RunError(f"The run's {what} cannot be read", value=f"{path}{why}",
                    remedy="Mend its permissions, copy the run once more, or train anew")  # fmt: skip


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "command": sys.argv,
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
