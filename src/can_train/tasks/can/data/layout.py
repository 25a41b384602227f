"""Where the logs of a data set lie, and which are copies."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from can_train.errors import DataError, MissingDataError, unknown_name
from can_train.reporter import Reporter
from can_train.tasks.can.settings import CanDatasetSettings

NAMED_SETS: Final = ("hcrl_ch", "hcrl_sa", "set_01", "set_02", "set_03", "set_04")
"""Data sets known by name: the parts of can-train-and-test, the HCRL logs among them."""


TRAIN: Final = "train"


TEST: Final = "test"


LOG: Final = "log"


UNNAMED_ATTACK: Final = "attack"
"""The kind of a log whose name tells none."""


_COLLECTIONS: Final = ("", "can-train-and-test-v1.5", "can-train-and-test")
"""Folders below the data root that may hold the sets: none, or the clone of either release's repository."""


_LOG_NAME: Final = re.compile(r"(?P<stem>[^.].*)\.(?:csv|txt|log)(?:\.gz)?", re.IGNORECASE)


_DOCUMENT: Final = re.compile(r"(?:read[-_]?me|licen[cs]e)(?![a-z])", re.IGNORECASE)
"""Text files that come beside logs."""


_NUMBERED_KIND: Final = re.compile(r"(?P<kind>[a-z]+(?:-[a-z]+)*?)(?:-train|-test)?(?:-\d+)?", re.IGNORECASE)
"""can-train-and-test: DoS-1, force-neutral-2, fuzzing-train."""


_HCRL_KIND: Final = re.compile(r"(?P<kind>[a-z]+?)_?(?:\d(?:st|nd|rd|th))?(?:_attack)?_dataset(?:_.*)?", re.IGNORECASE)
"""HCRL: DoS_dataset, Fuzzy_attack_dataset, Flooding_dataset_KIA_Soul, Malfunction1st_dataset_KIA_Soul."""


_LAYOUT: Final = (
    "A data set has folders train_01_attack_free and train_02_with_attacks (or one train_01), test_01_…, test_02_…,\n"
    "with logs (.csv, .txt or .log, also .gz) in each. Lampe and Meng publish the sets (can-train-and-test) at\n"
    "  https://bitbucket.org/brooke-lampe/can-train-and-test-v1.5\n"
    "and the HCRL logs in them were first published at\n"
    "  https://ocslab.hksecurity.net/Datasets\n"
    "Give the folder above that of the data set with --data-root. Or train on any log or folder of logs with\n"
    "--dataset PATH, or without data with --dataset synthetic"
)


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One log of a data set.

    Attributes:
        path: Where it lies.
        role: `TRAIN`, `TEST`, or `LOG` for one that must serve as both.
        group: For `TEST` the name of its folder, judged by itself; for `LOG` its own name.
        kind: What its attack frames are called where the log itself does not say.
    """

    path: Path
    role: str
    group: str
    kind: str


def find_logs(dataset: CanDatasetSettings, data_root: Path) -> list[LogFile]:
    """Finds the logs of a data set.

    Args:
        dataset: Gives a path or a name.
        data_root: Where named data sets are looked for.

    Returns:
        The logs, those for training first, in an order that does not depend on the machine.

    Raises:
        MissingDataError: There is no such file or folder, or it holds no logs, or not the layout it must have.
        ConfigError: No data set has this name.
    """
    place = _place(dataset, data_root)
    return _by_layout(place, (TRAIN, TEST)) if _is_layout(dataset, place) else _single_logs(place)


def find_evaluation_logs(dataset: CanDatasetSettings, data_root: Path) -> list[LogFile]:
    """Finds the logs of a data set that was not trained on: those of a published layout's test folders; any other log
    is a group of its own, whole.

    Raises:
        MissingDataError: As `find_logs` does.
        ConfigError: Likewise.
    """
    place = _place(dataset, data_root)
    if _is_layout(dataset, place):
        return _by_layout(place, (TEST,))
    return [replace(log, role=TEST) for log in _single_logs(place)]


def data_files(dataset: CanDatasetSettings, data_root: Path) -> list[Path]:
    """Lists the files of a data set, by which a submission recognises a duplicate run; none where they are simulated.

    Raises:
        MissingDataError: They are not there.
        ConfigError: No data set has this name.
    """
    return [] if dataset.is_synthetic else [log.path for log in find_logs(dataset, data_root)]


def _is_layout(dataset: CanDatasetSettings, place: Path) -> bool:
    return not dataset.path or any(_split_folders(place, role) for role in (TRAIN, TEST))


def _place(dataset: CanDatasetSettings, data_root: Path) -> Path:
    """Finds the file or folder of a data set."""
    if dataset.path:
        path = Path(dataset.path).expanduser()
        if path.is_file() or path.is_dir():
            return path
        raise MissingDataError(
            "--dataset must name a file or folder that exists, or a known data set",
            value=str(path),
            remedy=f"Known: {', '.join(NAMED_SETS)}, synthetic",
        )
    if dataset.name not in NAMED_SETS:
        raise unknown_name("data set", dataset.name, (*NAMED_SETS, "synthetic"))
    candidates = _candidates(dataset.name, data_root.expanduser())
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        looked = "".join(f"\n  {folder}" for folder in candidates) + "\nNone of them exists"
        raise MissingDataError(f"Data set {dataset.name} must be in one of these folders", value=looked, remedy=_LAYOUT)
    return found


def attack_kind(file_name: str) -> str:
    """Tells the kind of attack from a log's name; `UNNAMED_ATTACK` where the name follows no known pattern."""
    named = _LOG_NAME.fullmatch(file_name)
    stem = named["stem"] if named else file_name
    numbered = _NUMBERED_KIND.fullmatch(stem)
    match = _HCRL_KIND.fullmatch(stem) or (numbered if numbered and numbered["kind"] != stem else None)
    return UNNAMED_ATTACK if match is None or match["kind"].lower() == "attack-free" else match["kind"]


def _candidates(name: str, data_root: Path) -> list[Path]:
    spellings = dict.fromkeys((name.replace("_", "-"), name))
    return [data_root / collection / spelling for collection in _COLLECTIONS for spelling in spellings]


def _single_logs(place: Path) -> list[LogFile]:
    """Lists a log, or the logs of a folder that follows no layout."""
    if place.is_file():
        return [_log(place, LOG, place.name)]
    return [_log(log, LOG, log.relative_to(place).as_posix()) for log in _some_logs(place)]


def _by_layout(folder: Path, wanted: Sequence[str]) -> list[LogFile]:
    roles = {role: _split_folders(folder, role) for role in wanted}
    for role, folders in roles.items():
        if not folders:
            raise MissingDataError(f"{folder} must hold folders named {role}_…", remedy=_LAYOUT)
    return [
        _log(log, role, split.name) for role, folders in roles.items() for split in folders for log in _some_logs(split)
    ]


def _split_folders(folder: Path, role: str) -> list[Path]:
    return sorted(split for split in folder.glob(f"{role}_*") if split.is_dir())


def _some_logs(folder: Path) -> list[Path]:
    """Lists the logs in a folder and below it, by path.

    Raises:
        MissingDataError: There is none.
    """
    logs = sorted(_logs(folder), key=lambda log: log.relative_to(folder).as_posix())
    if not logs:
        raise MissingDataError(
            "A folder of logs must hold files named *.csv, *.txt or *.log, or these with .gz",
            value=f"none in {folder}",
            remedy="Put the logs there, or give --dataset the path of another folder or of one file",
        )
    return logs


def _logs(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and _LOG_NAME.fullmatch(path.name) and not _DOCUMENT.match(path.name) and path.is_file():
            yield path


def _log(path: Path, role: str, group: str) -> LogFile:
    return LogFile(path=path, role=role, group=group, kind=attack_kind(path.name))


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


def drop_duplicates(logs: Sequence[HashedLog]) -> tuple[list[HashedLog], list[str]]:
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
