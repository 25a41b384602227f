"""Runs that have finished, as they lie on disk, without a training: real configurations, made-up results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from can_train.config.compose import RunRequest, changed_settings, resolve
from can_train.config.resolved import ResolvedRun, with_absolute_paths
from can_train.runs.registry import Registry, RunRecord
from can_train.runs.run_folder import RunFolder

RESULT = {"status": "finished", "epochs": 2, "parameters": 1000}


class Shelf:
    """A folder of runs and a state folder.

    Args:
        folder: Where both are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = ("--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state"))

    def request(self, model: str, mode: str, size: str | None = "teacher", **more: Any) -> RunRequest:
        places = {"paths.runs_dir": str(self.folder / "runs"), "paths.state_dir": str(self.folder / "state")}
        values = {**places, **more.pop("values", {})}
        return RunRequest(
            **{"model": model, "mode": mode, "size": size, "dataset": "synthetic", **more, "values": values}
        )

    def resolved(self, model: str, mode: str, size: str | None = "teacher", **more: Any) -> ResolvedRun:
        return with_absolute_paths(resolve(self.request(model, mode, size, **more)))

    def put(self, number: int, run: ResolvedRun, result: Mapping[str, Any] | None = RESULT) -> RunFolder:
        """Lays a run down; those of higher number are newer."""
        run_id = f"20260101-0000{number:02d}-{run.key}-{number:04x}"
        folder = RunFolder(self.folder / "runs" / run_id)
        folder.make(run.config, changed_settings(run.config))
        if result is not None:
            folder.result_path.write_text(json.dumps({"run_id": run_id, "key": run.key, **result}))
            folder.checkpoints_path.mkdir()
            (folder.checkpoints_path / "manifest.json").write_text("{}")
        time = f"2026-01-01T00:00:{number:02d}+00:00"
        Registry(self.folder / "state").add(RunRecord(run_id=run_id, path=str(folder.path), key=run.key, time=time))
        return folder
