"""Recognises logs by their content and decides which copies are left out: no log is judged that was trained on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from can_train.errors import DataError
from can_train.reporter import Reporter
from can_train.tasks.can.layout import TEST, LogFile


@dataclass(frozen=True, kw_only=True)
class HashedLog:
    """A log and what it held when it was hashed.

    Attributes:
        log: The log.
        sha256: Hash of its content.
        size: Its bytes.
        modified_ns: Its modification time.
    """

    log: LogFile
    sha256: str
    size: int
    modified_ns: int

    def is_unchanged(self) -> bool:
        """Says whether the file is still the one that was hashed, as far as its size and time tell."""
        try:
            status = self.log.path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns)


def hash_logs(logs: Sequence[LogFile], reporter: Reporter) -> list[HashedLog]:
    """Hashes logs.

    Raises:
        DataError: One cannot be read.
    """
    with reporter.stage("Checking logs", total=len(logs), unit="logs") as stage:
        hashed = []
        for log in logs:
            hashed.append(_hash_log(log))
            stage.advance()
    return hashed


def _hash_log(log: LogFile) -> HashedLog:
    try:
        status = log.path.stat()
        with log.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError("A log must be a file that can be read", value=f"{log.path} ({error.strerror})") from error
    return HashedLog(log=log, sha256=digest, size=status.st_size, modified_ns=status.st_mtime_ns)


def without_duplicates(logs: Sequence[HashedLog]) -> tuple[list[HashedLog], list[str]]:
    """Leaves out every copy of a log that is trained on, and copies inside one test group. The same log in two test
    groups stays in both: each is judged by itself.

    Returns:
        The logs that stay, in their order, and notices that name the others.
    """
    trained = {hashed.sha256 for hashed in logs if hashed.log.role != TEST}
    seen: set[tuple[str, str]] = set()
    kept: list[HashedLog] = []
    leaked: list[HashedLog] = []
    copies: list[HashedLog] = []
    for hashed in logs:
        is_test = hashed.log.role == TEST
        place = (hashed.log.group if is_test else "", hashed.sha256)
        if is_test and hashed.sha256 in trained:
            leaked.append(hashed)
        elif place in seen:
            copies.append(hashed)
        else:
            kept.append(hashed)
            seen.add(place)
    return kept, _notices(leaked, copies, {hashed.log.group for hashed in kept})


def _notices(leaked: list[HashedLog], copies: list[HashedLog], groups: set[str]) -> list[str]:
    notices = []
    if leaked:
        notices.append(f"Left out of judging, since identical to training logs: {_listed(leaked)}")
    if copies:
        notices.append(f"Left out as copies of other logs: {_listed(copies)}")
    lost = sorted({hashed.log.group for hashed in leaked} - groups)
    if lost:
        notices.append(f"Nothing is left to judge of {', '.join(lost)}")
    return notices


def _listed(logs: list[HashedLog]) -> str:
    names = [f"{hashed.log.path.parent.name}/{hashed.log.path.name}" for hashed in logs]
    return f"{', '.join(names)} ({len(names)} in all)" if len(names) > 1 else names[0]
