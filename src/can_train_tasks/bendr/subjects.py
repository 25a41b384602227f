"""The subjects of recordings, and their split into training, validation and test: one split, folds, or one subject left
out. The split depends on the names of the subjects and on the settings alone.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from can_train.errors import ConfigError, DataError, unknown_name
from can_train_tasks.bendr.settings import FILE, FOLDER, RecordingSettings

SETS: Final = ("train", "validation", "test")
_SHOWN: Final = 8  # Subjects of a set that a sentence names


def subjects_of(dataset: RecordingSettings, files: Sequence[Path], place: Path) -> list[str]:
    """Returns the subject of each file in the data set's folder `place`.

    Raises:
        DataError: `dataset.subject` does not match the path of a file, or folders of the same name in several places
            would be one subject.
    """
    subjects = [_subject(dataset.subject, path, place) for path in files]
    if dataset.subject == FOLDER:
        folders = dict(zip(subjects, (path.parent for path in files), strict=True))
        for subject, path in zip(subjects, files, strict=True):
            if path.parent != folders[subject]:
                # Sessions of a person, say: each would be a subject, of all persons.
                raise DataError("With dataset.subject=folder, each folder of recordings has a name of its own",
                                value=f"{path.parent} and {folders[subject]}",
                                remedy="Say which part of the path is the subject; the first folder, say: --set "
                                "'dataset.subject=\"^([^/]+)/\"'")  # fmt: skip
    return subjects


def _subject(rule: str, path: Path, place: Path) -> str:
    # The path above the data set's folder says nothing about subjects.
    inside = path.relative_to(place).as_posix() if path != place and path.is_relative_to(place) else path.name
    if rule == FOLDER:
        return path.parent.name
    if rule == FILE:
        folder, slash, name = inside.rpartition("/")
        return f"{folder}{slash}{name.partition('.')[0]}"
    match = re.search(rule, inside)
    if match is None or not (subject := match[match.re.groups]):
        raise DataError("dataset.subject must match the path of each recording", value=f"{rule!r} and {inside}",
                        remedy=f"Leave the recording out (--set 'dataset.exclude=[{path.name}]'), or give another "
                        "rule: --set dataset.subject=folder")  # fmt: skip
    return subject


def split_subjects(dataset: RecordingSettings, subjects: Collection[str]) -> dict[str, str]:
    """Decides the set of each subject.

    Raises:
        ConfigError: A subject that is to be tested is not there.
        DataError: There are too few subjects for the sets.
    """
    names = sorted(set(subjects))
    tested = _tested(dataset, names)
    rest = [name for name in names if name not in tested]
    validated = _validated(dataset, names, tested, rest)
    split = {name: SETS[2] if name in tested else SETS[1] if name in validated else SETS[0] for name in names}
    if lacking := [name for name in SETS if name not in split.values()]:
        off = {"subject=off": True, "folds=0": dataset.folds, "fold=0": dataset.fold, "leave_out=": dataset.leave_out,
               "test_subjects=[]": dataset.test_subjects}  # fmt: skip
        by_time = " ".join(f"--set 'dataset.{text}'" for text, is_needed in off.items() if is_needed)
        fewer = f", fewer folds (--set dataset.folds={max(len(names), 3)})" if dataset.folds > len(names) else ""
        remedy = f"Give recordings of more subjects{fewer}, or split by time: {by_time}"
        raise DataError(f"Each set needs a subject; the {lacking[0]} set has none",
                        value=f"{len(names)} subject{'s' * (len(names) != 1)}: {_named(names)}"
                        + (f"; {dataset.folds} folds" if dataset.folds else ""), remedy=remedy)  # fmt: skip
    return split


def _tested(dataset: RecordingSettings, names: Sequence[str]) -> Collection[str]:
    if dataset.leave_out:
        if dataset.leave_out not in names:
            raise unknown_name("subject", dataset.leave_out, names)
        return {dataset.leave_out}
    if dataset.test_subjects:
        there = {name for name in dataset.test_subjects if name in names}
        if not there:
            raise ConfigError("dataset.test_subjects are subjects of the recordings",
                              value=f"{_named(dataset.test_subjects)}; there are {_named(names)}",
                              remedy="Name others, or none: --set 'dataset.test_subjects=[]'")  # fmt: skip
        return there
    if dataset.folds:
        return set(_parts(names, dataset.folds)[dataset.fold])
    return set(names[len(names) - _share(dataset.test_share, names, len(names) - 2) :])


def _validated(
    dataset: RecordingSettings, names: Sequence[str], tested: Collection[str], rest: Sequence[str]
) -> Collection[str]:
    if dataset.leave_out:
        # The first subject is validated by the last one, as in a ring.
        return {names[names.index(dataset.leave_out) - 1]}
    if dataset.folds:
        parts = _parts(rest if dataset.test_subjects else names, dataset.folds)
        return set(parts[dataset.fold if dataset.test_subjects else dataset.fold - 1])
    return set(rest[len(rest) - _share(dataset.validation_share, names, len(rest) - 1) :])


def _parts(names: Sequence[str], folds: int) -> list[list[str]]:
    """Divides names into parts that follow each other, whose sizes differ by at most one."""
    return [[str(name) for name in part] for part in np.array_split(np.array(names, dtype=object), folds)]


def _share(share: float, names: Sequence[str], most: int) -> int:
    """Returns the number of subjects in a share of them: one at least, and few enough that each other set has one."""
    return max(1, min(round(share * len(names)), most))


def describe_split(dataset: RecordingSettings, split: Mapping[str, str]) -> str:
    """Writes the subjects of each set as a sentence."""
    members = {name: [subject for subject, of in split.items() if of == name] for name in SETS}
    sets = "; ".join(f"{name} {len(each)} ({_named(each)})" for name, each in members.items())
    fold = f", fold {dataset.fold} of {dataset.folds}" if dataset.folds and not dataset.leave_out else ""
    return f"Split by subject{fold}: {sets}"


def _named(names: Sequence[str]) -> str:
    return ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])]) or "none"
