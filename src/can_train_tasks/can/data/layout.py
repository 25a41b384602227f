"""Finds the logs of a data set, and the copies among the logs.

This module imports quickly: a submission uses it to look for duplicate runs.
"""

import codecs
import hashlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

from can_train.errors import DataError, MissingDataError, unknown_name
from can_train.io.records import expanded
from can_train.reporter import Reporter
from can_train_tasks.can.data.sidecars import find_sidecar
from can_train_tasks.can.settings import CanDatasetSettings

# The parts of can-train-and-test, the HCRL logs among them.
CAN_TRAIN_AND_TEST: Final = ("hcrl_ch", "hcrl_sa", "set_01", "set_02", "set_03", "set_04")
# Folders of other published data sets below the data root, and their addresses.
OTHER_SETS: Final = {
    "can_mirgu": (("CAN-MIRGU", "can_mirgu"), "https://github.com/sampathrajapaksha/CAN-MIRGU"),
    "road": (("road", "ROAD"), "https://zenodo.org/records/10462796"),
    "syncan": (("SynCAN", "syncan"), "https://github.com/etas/SynCAN"),
    "x_canids": (("X-CANIDS", "x_canids"), "https://doi.org/10.21227/epsj-y384"),
}
NAMED_SETS: Final = (*CAN_TRAIN_AND_TEST, *OTHER_SETS)

# Roles of a log.
TRAIN: Final = "train"
TEST: Final = "test"
LOG: Final = "log"  # a log for training and for testing

UNNAMED_ATTACK: Final = "attack"  # the kind of attacks where the log's name gives no kind

# Folders under the data root: none, or the clone of either release's repository.
_COLLECTIONS: Final = ("", "can-train-and-test-v1.5", "can-train-and-test")
_LOG_NAME: Final = re.compile(
    r"(?P<stem>[^.].*)\.(?:(?:csv|tsv|txt|dat|log|asc|trc|pcap|pcapng)(?:\.(?:gz|bz2|xz|zst))?|blf|mf4|db|parquet)",
    re.IGNORECASE,
)
_RAW: Final = "raw"  # X-CANIDS: frames in raw, signals in signal
_ROAD: Final = ("ambient", "attacks")
# X-CANIDS: dump6-susp-2B0h.
_XCANIDS_KIND: Final = re.compile(r"dump\d+-(?P<kind>[a-z]+)(?:-.*)?", re.IGNORECASE)
_SYNCAN_KIND: Final = re.compile(r"test_(?P<kind>continuous|flooding|plateau|playback|suppress)")
# Endings of files that lie beside logs and are none, so that nobody expects them to be read.
_BESIDE_LOGS: Final = frozenset(
    {".json", ".md", ".rst", ".pdf", ".html", ".htm", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".dbc", ".kcd",
     ".py", ".ipynb", ".m", ".sh", ".bat", ".png", ".jpg", ".jpeg", ".svg", ".gif", ".doc", ".docx", ".odt", ".tex",
     ".bib", ".md5", ".sha1", ".sha256", ".sig"}
)  # fmt: skip
_SNIFFED_BYTES: Final = 2**16
_MAX_NAMED: Final = 4  # files that a note names
_DOCUMENT: Final = re.compile(r"(?:read[-_]?me|licen[cs]e)(?![a-z])", re.IGNORECASE)  # .txt files beside the logs
# can-train-and-test: DoS-1, force-neutral-2, fuzzing-train.
_NUMBERED_KIND: Final = re.compile(r"(?P<kind>[a-z]+(?:-[a-z]+)*?)(?:-train|-test)?(?:-\d+)?", re.IGNORECASE)
# HCRL: DoS_dataset, Fuzzy_attack_dataset, Flooding_dataset_KIA_Soul, Malfunction1st_dataset_KIA_Soul.
_HCRL_KIND: Final = re.compile(r"(?P<kind>[a-z]+?)_?(?:\d(?:st|nd|rd|th))?(?:_attack)?_dataset(?:_.*)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One log of a data set."""

    path: Path
    role: str  # `TRAIN`, `TEST` or `LOG`
    group: str  # the test folder of a `TEST` log; the name of a `LOG`
    kind: str  # kind of the attacks whose labels name no kind


def find_logs(dataset: CanDatasetSettings, data_root: Path) -> list[LogFile]:
    """Finds the logs of a data set, training logs first, in an order that does not depend on the machine.

    Raises:
        MissingDataError: The file or folder does not exist, it holds no logs, or a published data set has another
            layout.
        ConfigError: No data set has this name.
    """
    return _find(dataset, data_root, (TRAIN, TEST))


def find_training_logs(dataset: CanDatasetSettings, data_root: Path) -> list[LogFile]:
    """Finds the logs of a data set's training folders, or all logs without a layout. Raises as `find_logs` does."""
    return _find(dataset, data_root, (TRAIN,))


def find_evaluation_logs(dataset: CanDatasetSettings, data_root: Path) -> list[LogFile]:
    """Finds the logs of a data set that no training saw. Raises as `find_logs` does.

    In a published layout these are the logs of the test folders; otherwise all logs, each as a separate group.
    """
    return [replace(log, role=TEST) for log in _find(dataset, data_root, (TEST,))]


def data_files(dataset: CanDatasetSettings, data_root: Path) -> list[Path]:
    """Lists the files of a data set; the list is empty for simulated logs. Raises as `find_logs` does."""
    return [] if dataset.is_synthetic else [log.path for log in find_logs(dataset, data_root)]


def data_digest(dataset: CanDatasetSettings, data_root: Path, reporter: Reporter) -> str:
    """Computes the digest of the contents of a data set's logs. Raises as `find_logs` does."""
    logs, _ = drop_duplicates(hash_logs(find_logs(dataset, data_root), reporter))
    return digest_of_logs((hashed.log.role, hashed.log.group, hashed.sha256) for hashed in logs)


def digest_of_logs(logs: Iterable[tuple[str, str, str]]) -> str:
    """Computes the digest of logs from the role, the group and the hash of each log; paths do not enter."""
    # The group of a log without a layout is its name, which is not part of its content.
    content = [(role, "" if role == LOG else group, sha256) for role, group, sha256 in logs]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _find(dataset: CanDatasetSettings, data_root: Path, wanted: Sequence[str]) -> list[LogFile]:
    """Finds the logs in a layout's folders with the wanted roles, or all logs without a layout."""
    place = _place(dataset, data_root)
    folders = {role: sorted(folder for folder in place.glob(f"{role}_*") if folder.is_dir()) for role in (TRAIN, TEST)}
    if (dataset.path or dataset.name in OTHER_SETS) and not any(folders.values()):
        root, paths = (place, _logs_below(place)) if place.is_dir() else (place.parent, [place])
        logs = [each for each in _by_file_names(paths) if each[1] in wanted] or [
            (path, LOG, path.relative_to(root).as_posix()) for path in paths
        ]
    else:
        if lacking := [role for role in wanted if not folders[role]]:
            raise MissingDataError(f"{place} holds no folder named {lacking[0]}_…", remedy="The published layout is "
                                   "train_01_attack_free and train_02_with_attacks (or one train_01) and test_01_…, "
                                   "test_02_…, with logs in each")  # fmt: skip
        wanted_folders = [(role, folder) for role in wanted for folder in folders[role]]
        logs = [(path, role, folder.name) for role, folder in wanted_folders for path in _logs_below(folder)]
    return [LogFile(path=path, role=role, group=group, kind=attack_kind(path.name)) for path, role, group in logs]


def _by_file_names(paths: Sequence[Path]) -> list[tuple[Path, str, str]]:
    """Returns path, role and group of logs that are all named train_… or test_…, as in SynCAN; else nothing."""
    roles = [path.name.partition("_")[0] for path in paths]
    if {*roles} != {TRAIN, TEST}:
        return []
    logs = zip(paths, roles, strict=True)
    return [(path, role, path.name.partition(".")[0]) for path, role in sorted(logs, key=lambda log: log[1] != TRAIN)]


def _place(dataset: CanDatasetSettings, data_root: Path) -> Path:
    if dataset.path:
        path = expanded(dataset.path)
        if path.is_file() or path.is_dir():
            return path
        raise MissingDataError("--dataset names no file or folder that exists", value=str(path), remedy="Give another "
                               f"path, or a data set: {', '.join(NAMED_SETS)}, synthetic")  # fmt: skip
    if dataset.name not in NAMED_SETS:
        raise unknown_name("data set", dataset.name, (*NAMED_SETS, "synthetic"))
    data_root = expanded(data_root)
    if dataset.name in OTHER_SETS:
        return _place_of_other(dataset.name, data_root)
    # The published folders have a hyphen; people who make a folder by hand copy the underscore of the name.
    spellings = dict.fromkeys((dataset.name.replace("_", "-"), dataset.name))
    for collection in _COLLECTIONS:
        for spelling in spellings:
            if (data_root / collection / spelling).is_dir():
                return data_root / collection / spelling
    raise MissingDataError(
        f"Data set {dataset.name} is not below the data root",
        value=f"no folder {' or '.join(spellings)} in {data_root}, nor in {' or '.join(_COLLECTIONS[1:])} there",
        remedy=_folder_here(dataset.name)
        or "Download it from https://bitbucket.org/brooke-lampe/can-train-and-test-v1.5 into the data root, or "
        "name another with --data-root DIR. Any log works with --dataset PATH, and --dataset synthetic needs no files",
    )


def _place_of_other(name: str, data_root: Path) -> Path:
    folders, address = OTHER_SETS[name]
    for folder in folders:
        if (data_root / folder).is_dir():
            return data_root / folder
    raise MissingDataError(f"Data set {name} is not below the data root",
                           value=f"no folder {' or '.join(folders)} in {data_root}",
                           remedy=_folder_here(name) or f"Download it from {address} into the data root, or name "
                                                        "another with --data-root DIR")  # fmt: skip


def _folder_here(name: str) -> str:
    """Returns the remedy where the current folder has one of the name of a data set; empty where it has none."""
    return f"The folder here is read with --dataset ./{name}" if Path(name).is_dir() else ""


def attack_kind(file_name: str) -> str:
    """Returns the kind of attack in a log's name; `UNNAMED_ATTACK` where the name follows no known pattern."""
    named = _LOG_NAME.fullmatch(file_name)
    stem = named["stem"] if named else file_name
    numbered = _NUMBERED_KIND.fullmatch(stem)
    # A name of letters only may be any word: only a number or a suffix makes it a kind.
    match = (
        _HCRL_KIND.fullmatch(stem)
        or _XCANIDS_KIND.fullmatch(stem)
        or _SYNCAN_KIND.fullmatch(stem)
        or (numbered if numbered and numbered["kind"] != stem else None)
    )
    return UNNAMED_ATTACK if match is None or match["kind"].lower() == "attack-free" else match["kind"]


def _places_of_logs(folder: Path) -> list[Path]:
    """Returns the folders whose logs are read: in ROAD and X-CANIDS, tables of signals lie beside the logs."""
    if any((folder / _RAW).glob("dump*.parquet")):
        return [folder / _RAW]
    is_road = (folder / _ROAD[1] / "capture_metadata.json").is_file()
    return [folder / name for name in _ROAD] if is_road else [folder]


def _logs_below(folder: Path) -> list[Path]:
    logs = [path for path in _files_below(folder) if _is_log(path)]
    if not logs:
        raise MissingDataError(
            f"{folder} holds no logs",
            value="files named *.csv, *.tsv, *.txt, *.dat, *.log, *.asc, *.trc, *.pcap or *.pcapng, or these with .gz, "
            ".bz2, .xz or .zst, or *.blf, *.mf4, *.parquet or *.db",
            remedy="Put the logs there, or give --dataset the path of another folder or of one file",
        )
    return sorted(logs, key=lambda log: log.relative_to(folder).as_posix())


def _files_below(folder: Path) -> Iterator[Path]:
    """Yields the files that are not hidden; each folder is visited once, through a link only if it lies elsewhere."""
    seen: set[Path] = set()
    pending, links = deque(_places_of_logs(folder)), deque[Path]()
    while pending or links:
        place = (pending or links).popleft()
        real = place.resolve()
        if real in seen:
            continue
        seen.add(real)
        with suppress(OSError):  # a folder that the person may not read
            for path in sorted(place.iterdir()):
                if path.name.startswith("."):
                    continue
                if path.is_dir():
                    (links if path.is_symlink() else pending).append(path)
                elif path.is_file():
                    yield path


def _is_log(path: Path) -> bool:
    if not _LOG_NAME.fullmatch(path.name) or _DOCUMENT.match(path.name):
        return False
    if path.suffix.lower() not in (".db", ".dat"):
        return True
    # Other programs leave databases and data in folders, too. The beginning of a database has the names of the columns
    # of python-can's table, and text has no null bytes. The reader raises the error if the file cannot be read.
    with suppress(OSError), path.open("rb") as file:
        start = file.read(_SNIFFED_BYTES)
        if path.suffix.lower() == ".db":
            return b"arbitration_id" in start
        return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" not in start
    return True


def unread_notes(dataset: CanDatasetSettings, data_root: Path) -> list[str]:
    """Names, in a sentence, the files in a data set's folders that are not read; no sentence without such files.

    Files that usually lie beside logs, such as documents, are not named. Raises as `find_logs` does.
    """
    place = _place(dataset, data_root)
    if place.is_file():
        return []
    parts = sorted(part for role in (TRAIN, TEST) for part in place.glob(f"{role}_*") if part.is_dir())
    files = chain.from_iterable(map(_files_below, parts or [place]))
    unread = [path for path in files if not _is_log(path) and not _lies_beside_logs(path)]
    if not unread:
        return []
    named = ", ".join(path.relative_to(place).as_posix() for path in unread[:_MAX_NAMED])
    more = f" and {len(unread) - _MAX_NAMED:,} more" if len(unread) > _MAX_NAMED else ""
    files_were = "1 file was" if len(unread) == 1 else f"{len(unread):,} files were"
    return [f"{files_were} not read as logs: {named}{more}; a file of any name is read where --dataset names it"]


def _lies_beside_logs(path: Path) -> bool:
    return path.suffix.lower() in _BESIDE_LOGS or bool(_DOCUMENT.match(path.name))


@dataclass(frozen=True, kw_only=True)
class HashedLog:
    """A log with a hash.

    Attributes:
        sha256: Hash of the log's content and of its labels in a JSON file.
        size: Size in bytes when the log was hashed.
        modified_ns: Modification time when the log was hashed.
    """

    log: LogFile
    sha256: str
    size: int
    modified_ns: int

    @property
    def place(self) -> tuple[str, str]:
        """The place in which a second log is a copy: the test group, empty in the training part, and the hash."""
        return self.log.group if self.log.role == TEST else "", self.sha256

    def is_unchanged(self) -> bool:
        """Returns whether size and modification time of the file are unchanged since it was hashed."""
        try:
            status = self.log.path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns)


def hash_logs(logs: Sequence[LogFile], reporter: Reporter) -> list[HashedLog]:
    """Hashes logs.

    Raises:
        DataError: A log cannot be read.
    """
    hashed = []
    with reporter.stage("Checking logs", total=len(logs), unit="logs") as stage:
        for log in logs:
            try:
                status = log.path.stat()
                with log.path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise DataError("The log cannot be read", value=f"{log.path}: {error.strerror}",
                                remedy="Check its permissions") from error  # fmt: skip
            if sidecar := find_sidecar(log.path):
                digest = hashlib.sha256(f"{digest} {sidecar.content}".encode()).hexdigest()
            hashed.append(HashedLog(log=log, sha256=digest, size=status.st_size, modified_ns=status.st_mtime_ns))
            stage.advance()
    return hashed


def drop_duplicates(logs: Sequence[HashedLog]) -> tuple[list[HashedLog], list[str]]:
    """Leaves out copies: test logs that are trained on, and repeated logs of the training part or of one test group.

    Returns:
        The remaining logs, in order, and notices that name the copies.
    """
    # 62 of the 236 files of can-train-and-test are duplicates, and 26 are in training and test folders. A log in two
    # test groups stays in both: each group is tested separately.
    trained = {hashed.sha256 for hashed in logs if hashed.log.role != TEST}
    seen: set[tuple[str, str]] = set()
    remaining: list[HashedLog] = []
    leaked: list[HashedLog] = []
    copies: list[HashedLog] = []
    for hashed in logs:
        is_test = hashed.log.role == TEST
        if is_test and hashed.sha256 in trained:
            leaked.append(hashed)
        elif hashed.place in seen:
            copies.append(hashed)
        else:
            remaining.append(hashed)
            seen.add(hashed.place)
    notices = []
    for why, left_out in {"of testing, since identical to training": leaked, "as copies of other": copies}.items():
        names = ", ".join(f"{hashed.log.path.parent.name}/{hashed.log.path.name}" for hashed in left_out)
        in_all = f" ({len(left_out)} in all)" if len(left_out) > 1 else ""
        notices += [f"Left out {why} logs: {names}{in_all}"] if left_out else []
    if lost := sorted({hashed.log.group for hashed in leaked} - {hashed.log.group for hashed in remaining}):
        notices.append(f"Nothing is left to test of {', '.join(lost)}")
    return remaining, notices
