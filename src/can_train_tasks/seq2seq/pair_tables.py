"""Finds and reads tables of pairs, and numbers their symbols. This module does without torch.

A table is a file of tab-separated values with one pair on each line. Columns are named by their number.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Final

from can_train.errors import DataError, MissingDataError
from can_train.io.units import counted
from can_train.reporter import Reporter
from can_train_tasks.seq2seq.settings import Seq2seqDatasetSettings

Symbols = tuple[str, ...]
TRAIN, DEV, TEST = "train", "dev", "test"
# Numbers of the symbols that no table contains.
PAD, START, END, UNKNOWN = range(4)
_OWN: Final = ("<pad>", "<start>", "<end>", "<unknown>")
_TRAINING: Final = (TRAIN, "trn")  # words in the file name of a training table
# Words that replace such a word in the file names of the development and the test table.
_BESIDE: Final = {DEV: ("dev", "valid", "validation", "val"), TEST: ("test", "tst")}
# A size that only the training tables have in their names: turkish-train-low, ang_small.train.
_SIZE: Final = re.compile(r"[-_](?:low|medium|high|small|large)(?=[.-]|$)")
_WORDS: Final = {"space": " "}  # names of separators that a command line would lose
_FEATURES_COLUMN: Final = 3  # usual column of the features in inflection tables


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One line of a table."""

    source: Symbols
    target: Symbols
    features: Symbols = ()


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The files of a data set; `covered` is a test table without targets, which only `can-train predict` reads."""

    train: Path
    dev: Path | None = None
    test: Path | None = None
    covered: Path | None = None

    @property
    def by_name(self) -> dict[str, Path]:
        """The tables that exist, the training table first."""
        paths = {TRAIN: self.train, DEV: self.dev, TEST: self.test}
        return {name: path for name, path in paths.items() if path}


def find_tables(dataset: Seq2seqDatasetSettings, data_root: Path) -> Tables:
    """Finds the files of a data set that is not synthetic.

    Raises:
        MissingDataError: A table that the settings name, or the training table, does not exist.
    """
    train = Path(dataset.path) if dataset.path else data_root / dataset.name
    remedy = "Name the training table itself: --dataset path/to/train.tsv"
    if not train.exists():
        raise MissingDataError("A data set is a table of tab-separated values, or a folder of them",
                               value=f"{train} does not exist", remedy=remedy)  # fmt: skip
    if train.is_dir():
        tables = sorted(path for path in train.glob("*.tsv") if TRAIN in path.name)
        if len(tables) != 1:
            names = ", ".join(path.name for path in tables) or "none"
            raise MissingDataError(f"{train} must hold one training table, …train….tsv", value=names, remedy=remedy)
        (train,) = tables
    paths: dict[str, Path | None] = {}
    for name, given in ((DEV, dataset.dev), (TEST, dataset.test)):
        if given and not Path(given).is_file():
            raise MissingDataError(f"dataset.{name} is a table", value=f"{given} does not exist",
                                   remedy=f"Correct the path, or leave dataset.{name} away")  # fmt: skip
        paths[name] = Path(given) if given else next(_tables_beside(train, name), None)
    covered, test = None, paths[TEST]
    if test and not dataset.test and _columns_of(test) < _columns_of(train):
        # A shared task publishes its test table without targets first.
        covered, paths[TEST] = test, None
    return Tables(train=train, **paths, covered=covered)


def _tables_beside(train: Path, name: str) -> Iterator[Path]:
    """Yields the files that are the development or the test table by their names: beside the training table, or in a
    folder `dev` or `test` beside its folder `train`.
    """
    word = next((word for word in _TRAINING if word in train.name), "")
    before, _, after = train.name.rpartition(word) if word else ("", "", "")
    for other in _BESIDE[name] if word else ():
        for file in dict.fromkeys((f"{before}{other}{after}", _SIZE.sub("", f"{before}{other}{after}"))):
            for folder in (train.parent, train.parent.parent / other):
                if (folder / file).is_file():
                    yield folder / file


def _columns_of(path: Path) -> int:
    return next((line for line in _lines(path) if line), "").count("\t") + 1


def data_files(dataset: Seq2seqDatasetSettings, data_root: Path) -> list[Path]:
    """Lists the files of a data set; the list is empty where the data are synthetic.

    Raises:
        MissingDataError: As in `find_tables`.
    """
    return [] if dataset.is_synthetic else list(find_tables(dataset, data_root).by_name.values())


def data_digest(dataset: Seq2seqDatasetSettings, data_root: Path, reporter: Reporter) -> str:
    """Computes the digest of the contents of a data set's files.

    Raises:
        MissingDataError: As in `find_tables`.
    """
    return digest_of(find_tables(dataset, data_root))


def digest_of(tables: Tables) -> str:
    """Computes the digest of the contents of tables; their paths do not enter."""
    hashes = [f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in tables.by_name.items()]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def with_features_column(dataset: Seq2seqDatasetSettings, train: Path) -> Seq2seqDatasetSettings:
    """Sets `features_col` by the first line of the training table, where the settings leave it open (-1)."""
    if dataset.features_col >= 0:
        return dataset
    there = _columns_of(train) >= _FEATURES_COLUMN not in (dataset.source_col, dataset.target_col)
    return replace(dataset, features_col=_FEATURES_COLUMN if there else 0)


def columns_as_trained(dataset: Seq2seqDatasetSettings, *, has_features: bool) -> Seq2seqDatasetSettings:
    """Sets `features_col` of a table for a finished run by whether the run's model reads features, whatever the table
    has.
    """
    return replace(dataset, features_col=(max(dataset.features_col, 0) or _FEATURES_COLUMN) if has_features else 0)


def without_target_column(dataset: Seq2seqDatasetSettings, path: Path, *, has_features: bool) -> Seq2seqDatasetSettings:
    """Returns where the columns of a table are whose targets may be missing: the column may be empty, or cut off, so
    that those behind it have moved up.

    Args:
        dataset: Columns of the training table.
        path: The table.
        has_features: Whether the model reads features.
    """
    dataset = columns_as_trained(dataset, has_features=has_features)
    columns = (dataset.source_col, dataset.target_col, dataset.features_col)
    if _columns_of(path) >= max(columns):
        return dataset
    source, features = (column - (column > dataset.target_col) for column in (dataset.source_col, dataset.features_col))
    # A column that no line has: there are no targets.
    return replace(dataset, source_col=source, features_col=features, target_col=max(columns) + 1)


def read_table(path: Path, dataset: Seq2seqDatasetSettings, *, with_targets: bool = True) -> list[Pair]:
    """Reads the pairs of a table; empty lines are skipped.

    Args:
        path: The table.
        dataset: Where its columns are.
        with_targets: Whether each line must have a target.

    Raises:
        DataError: The table is empty, is not UTF-8 or cannot be read; or a line lacks a column, has more or fewer
            columns than the first line, or its source or target is empty. The message names file and line.
    """
    pairs, expected = list[Pair](), _columns_of(path)
    for number, line in enumerate(_lines(path), start=1):
        if not line:
            continue
        cells, parts = line.split("\t"), dict[str, Symbols]()
        if len(cells) != expected:
            # The columns are told apart by the first line: a target would be read as features.
            raise DataError("All lines of a table have as many columns as the first line",
                            value=f"{path}:{number}: {counted(len(cells), 'column')}, not {expected}",
                            remedy="Separate columns by one tab each, also where a cell is empty")  # fmt: skip
        for name in ("source", "target", "features"):
            column = getattr(dataset, f"{name}_col")
            if name == "target" and not with_targets:
                parts[name] = ()
                continue
            if column > len(cells):
                raise DataError(f"Every line has a column {column}, the {name}", remedy=f"Set dataset.{name}_col, and "
                                "see that columns are separated by tabs",
                                value=f"{path}:{number}: {counted(len(cells), 'column')}")  # fmt: skip
            parts[name] = _split(cells[column - 1] if column else "", getattr(dataset, f"{name}_sep"))
            if not parts[name] and name != "features":
                raise DataError(f"Every line has a {name}", value=f"{path}:{number}: column {column} is empty",
                                remedy=f"Fill it in, or set dataset.{name}_col to another column")  # fmt: skip
        pairs.append(Pair(**parts))
    if not pairs:
        raise DataError("A table has at least one pair", value=f"{path} is empty",
                        remedy="Name a table with a pair of texts on each line")  # fmt: skip
    return pairs


def _lines(path: Path) -> Sequence[str]:
    try:
        # Not splitlines(), which also splits at characters that may be symbols, such as U+0085.
        return re.split(r"\r?\n", path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        data = path.read_bytes()
        line = data[: error.start].count(b"\n") + 1
        if b"\0" in data:
            raise DataError("Tables are text", value=f"{path} is a binary file", remedy="Name a table of tab-separated "
                            "values") from error  # fmt: skip
        raise DataError("Tables are text in UTF-8", value=f"{path}:{line}: {error.reason}",
                        remedy=f"Convert it: iconv -f LATIN1 -t UTF-8 {path.name}") from error  # fmt: skip
    except OSError as error:
        raise DataError("The table cannot be read", value=f"{path}: {error.strerror}",
                        remedy="Name a file that exists and may be read") from error  # fmt: skip


def pair_of(source: str, features: str, dataset: Seq2seqDatasetSettings) -> Pair:
    """Makes a pair without a target of texts as a table has them."""
    return Pair(source=_split(source, dataset.source_sep), target=(), features=_split(features, dataset.features_sep))


def _split(cell: str, separator: str) -> Symbols:
    separator = _WORDS.get(separator, separator)
    return tuple(part for part in cell.split(separator) if part) if separator else tuple(cell)


def joined(symbols: Sequence[str], separator: str) -> str:
    """Joins symbols into the text of a table's cell."""
    return _WORDS.get(separator, separator).join(symbols)


class Vocabulary:
    """Numbers symbols and features.

    A symbol has the same number in sources and targets, since many targets copy a part of their source. Features have
    separate numbers: a feature may be spelled like a symbol.
    """

    def __init__(self, symbols: Sequence[str], features: Sequence[str]) -> None:
        self._symbols = (*_OWN, *symbols)
        self._numbers = {symbol: number for number, symbol in enumerate(symbols, start=len(_OWN))}
        self._features = {feature: number for number, feature in enumerate(features, start=len(self._symbols))}

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Vocabulary":
        """Numbers the symbols and the features of pairs."""
        symbols = sorted(set(chain.from_iterable((*pair.source, *pair.target) for pair in pairs)))
        return cls(symbols, sorted(set(chain.from_iterable(pair.features for pair in pairs))))

    def to_plain(self) -> dict[str, list[str]]:
        """Returns the symbols and the features, in the order of their numbers."""
        return {"symbols": [*self._symbols[len(_OWN) :]], "features": [*self._features]}

    def __len__(self) -> int:
        return len(self._symbols) + len(self._features)

    @property
    def writable(self) -> int:
        """The number behind the last symbol that a target may have: features follow."""
        return len(self._symbols)

    @property
    def has_features(self) -> bool:
        """Whether the training pairs have features."""
        return bool(self._features)

    def source(self, pair: Pair) -> list[int]:
        """Returns the numbers of the source's symbols, and the end."""
        return [*self._numbered(pair.source), END]

    def features(self, pair: Pair) -> list[int]:
        """Returns the numbers of the features."""
        return [self._features.get(feature, UNKNOWN) for feature in pair.features]

    def target(self, pair: Pair) -> list[int]:
        """Returns the numbers that a model should write: the symbols of the target, and the end."""
        return [*self._numbered(pair.target), END]

    def unknown(self, pairs: Iterable[Pair]) -> set[str]:
        """Returns the symbols of pairs that the vocabulary lacks."""
        seen = chain.from_iterable((*pair.source, *pair.target) for pair in pairs)
        return {symbol for symbol in seen if symbol not in self._numbers}

    def unknown_features(self, pairs: Iterable[Pair]) -> set[str]:
        """Returns the features of pairs that the vocabulary lacks."""
        return {feature for pair in pairs for feature in pair.features if feature not in self._features}

    def written(self, numbers: Iterable[int]) -> Symbols:
        """Returns the symbols before the end; padding, start, unknown symbols and features are left out."""
        before = takewhile(lambda number: number != END, numbers)
        return tuple(self._symbols[number] for number in before if len(_OWN) <= number < len(self._symbols))

    def _numbered(self, symbols: Symbols) -> list[int]:
        return [self._numbers.get(symbol, UNKNOWN) for symbol in symbols]
