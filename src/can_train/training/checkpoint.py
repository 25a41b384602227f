"""Checkpoints that survive a kill at any moment."""

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from can_train.errors import CheckpointError
from can_train.io.atomic import write_bytes_atomic, write_json_atomic
from can_train.reporter import Reporter

FORMAT_VERSION: Final = 1

MAX_FILES: Final = 2
"""The newest checkpoint, and the previous one in case the newest is damaged on disk."""

REMEDY: Final = "Copy the run once more from where it was trained, or train anew"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    file: str
    sha256: str
    step: int


class Checkpoints:
    """The checkpoints of one run.

    A manifest lists them with their digests, the newest first. It is replaced after the file that it names is written:
    a process that is killed in between leaves a file that nothing names.

    Args:
        folder: Where they are; made at the first save.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = folder / "manifest.json"

    def save(self, state: dict[str, Any], *, step: int) -> None:
        """Writes a checkpoint and makes it the newest.

        Args:
            state: Tensors, numbers, text, and lists, tuples and dicts of them.
            step: Optimizer steps done.

        Raises:
            CheckpointError: It could not be written; the previous one is untouched.
        """
        # Serialized in memory first, so that the digest is of what was meant, whatever reaches the disk.
        buffer = io.BytesIO()
        torch.save({"format": FORMAT_VERSION, **state}, buffer)
        data = buffer.getvalue()
        entries = self._entries()
        # Never the name of a file that the manifest still needs, even when the same step is saved twice.
        taken = {entry.file for entry in entries}
        name = next(n for n in (f"step-{step:08d}{suffix}.pt" for suffix in ("", "-b", "-c")) if n not in taken)
        entries = [_Entry(file=name, sha256=hashlib.sha256(data).hexdigest(), step=step), *entries][:MAX_FILES]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(self._folder / name, data)
            self._write_manifest(entries)
            # Only now, when the manifest no longer names them: a kill at any point leaves a whole checkpoint.
            for path in self._folder.glob("step-*.pt"):
                if path.name not in {entry.file for entry in entries}:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                "The checkpoint cannot be written",
                value=f"{self._folder}: {error.strerror}",
                remedy="Make room or mend the folder's permissions, then resume the run",
            ) from error

    def load(self, reporter: Reporter) -> dict[str, Any] | None:
        """Reads the newest undamaged checkpoint, and drops damaged ones; None where there is none.

        Raises:
            CheckpointError: Every checkpoint is damaged, or is of another version.
        """
        entries = self._entries()
        for position, entry in enumerate(entries):
            data = self._read(entry)
            if data is not None:
                if position > 0:
                    # Else the next save would keep the damaged one as its previous, and drop this one.
                    self._write_manifest(entries[position:])
                return _loaded(data, entry.file)
            reporter.notice(f"Checkpoint {entry.file} is damaged; going back to the one before it")
        if entries:
            raise CheckpointError(
                "No checkpoint of this run is whole",
                value=str(self._folder),
                remedy="Start the run again from the beginning",
            )
        return None

    def newest(self) -> dict[str, Any] | None:
        """Reads the newest checkpoint without changing anything; None where there is none.

        Raises:
            CheckpointError: It is damaged, or of another version.
        """
        entries = self._entries()
        if not entries:
            return None
        data = self._read(entries[0])
        if data is None:
            damaged = self._folder / entries[0].file
            raise CheckpointError("The last checkpoint of this run is damaged", value=str(damaged),
                                  remedy=REMEDY)  # fmt: skip
        return _loaded(data, entries[0].file)

    def _entries(self) -> list[_Entry]:
        try:
            return [_Entry(**entry) for entry in json.loads(self._manifest.read_text())["checkpoints"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                "The checkpoint manifest cannot be read", value=str(self._manifest), remedy=REMEDY
            ) from error

    def _write_manifest(self, entries: list[_Entry]) -> None:
        write_json_atomic(self._manifest, {"checkpoints": [vars(entry) for entry in entries]})

    def _read(self, entry: _Entry) -> bytes | None:
        try:
            data = (self._folder / entry.file).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == entry.sha256 else None


def _loaded(data: bytes, name: str) -> dict[str, Any]:
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # Bytes that are not a checkpoint raise whatever they lead the reader to: no list of errors would be complete.
    except Exception as error:
        raise CheckpointError(
            "A checkpoint holds tensors and plain values only, and no code is run that is in it",
            value=name,
            remedy=REMEDY,
        ) from error
    found = state.get("format") if isinstance(state, dict) else "unknown"
    if found != FORMAT_VERSION:
        raise CheckpointError(
            "The checkpoint is of another version",
            value=f"{name}: format {found}, this version reads {FORMAT_VERSION}",
            remedy=REMEDY,
        )
    return dict(state)
