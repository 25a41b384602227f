"""Files of predictions: their columns, and CSV, JSON lines and Parquet that are written as predictions come, whole or
not at all.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol, Self

import numpy as np
from torch import Tensor

from can_train.errors import ConfigError, DataError, StateError
from can_train.io.records import writing_path, writing_place
from can_train.io.units import finite

Columns = Mapping[str, Any]
"""Columns by name: sequences, arrays or tensors, with a cell for each row."""
Write = Callable[[Columns], object]
"""Appends rows, given as columns."""
Watcher = Callable[[Sequence[Any], Sequence[Any]], object]
"""Is called with the samples and the predictions of a portion."""

SET: Final = "set"
SAMPLE: Final = "sample"
PREDICTION: Final = "prediction"
STDOUT: Final = "-"
_MOST_PARTS: Final = 1000  # columns of one prediction; longer ones are a list in one cell
_MOST_CLASSES: Final = 100  # classes whose probabilities have a column each
_SUM_ERROR: Final = 1e-2  # of the sum of shares, which is 1 in theory: half precision has three digits
_PIECE_ROWS: Final = 1 << 16  # rows of a row group of Parquet
_DIFFER: Final = "Predictions differ in their form"
_OWN_COLUMNS: Final = "Write Task.columns; see docs/tasks.md"


class Writable(Protocol):
    """A file of text."""

    def write(self, text: str, /) -> int:
        """Appends text."""


class Format(Protocol):
    """Opens a file of predictions for writing."""

    def __call__(self, path: Path) -> AbstractContextManager[Write]:
        """Opens a file that does not exist yet; it is complete when the block ends."""


@dataclass(frozen=True, kw_only=True)
class FolderFiles:
    """The files of a folder of predictions: one for each recording, or clip.

    Attributes:
        column: Column that names the part of a row; a file lacks it.
        file: Pattern of the name of a part's file, without the ending.
        only: Name of the part where the predictions have no such column.
    """

    column: str
    file: str = "{}"
    only: str = "predictions"


class DefaultColumns:
    """Columns of predictions that a task does not name. The first predictions decide which columns there are."""

    def __init__(self) -> None:
        self._parts: Division | None = None

    def __call__(self, first: int, predictions: Sequence[Any]) -> Columns:
        """Returns the columns of predictions of the samples from number `first` on.

        Raises:
            DataError: The predictions have another form than the first ones.
        """
        values = [_plain(each) for each in predictions]
        self._parts = self._parts or _division(values)
        try:
            columns = self._parts(values)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise DataError(_DIFFER, value=f"{values[0]!r:.60}",
                            remedy=_OWN_COLUMNS) from error  # fmt: skip
        return {SAMPLE: range(first, first + len(values)), **columns}


def in_set(name: str, columns: Columns) -> Columns:
    """Puts a column with the name of a set before the columns of its predictions; a column of that name stays."""
    rows = len(next(iter(columns.values()), ()))
    return {SET: [name] * rows, **columns}


Division = Callable[[list[Any]], dict[str, list[Any]]]
"""Divides predictions into columns, by name."""


def _plain(value: Any) -> Any:
    """Returns a prediction as numbers, text, lists and dicts."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _division(values: list[Any]) -> Division:
    """Decides by the first predictions how a prediction is divided into columns."""
    first = values[0]
    if isinstance(first, dict):
        return partial(_by_name, [*first])
    if not isinstance(first, list) or not 0 < len(first) <= _MOST_PARTS:
        return _undivided
    parts = len(first)
    if not all(isinstance(value, list) and len(value) == parts and all(map(_is_single, value)) for value in values):
        return _undivided
    return partial(_classes if parts > 1 and all(map(_are_shares, values)) else _by_number, parts)


def _by_name(names: list[str], values: list[Any]) -> dict[str, list[Any]]:
    return {name: [value[name] for value in values] for name in names}


def _by_number(parts: int, values: list[Any]) -> dict[str, list[Any]]:
    return {f"{PREDICTION}_{number}": column for number, column in enumerate(_transposed(parts, values))}


def _undivided(values: list[Any]) -> dict[str, list[Any]]:
    return {PREDICTION: values}


def _is_single(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _are_shares(values: list[Any]) -> bool:
    numbers = all(isinstance(value, float) and 0.0 <= value <= 1.0 for value in values)
    return numbers and abs(sum(values) - 1.0) <= _SUM_ERROR


def _classes(parts: int, values: list[Any]) -> dict[str, list[Any]]:
    best = [max(range(parts), key=shares.__getitem__) for shares in values]
    columns = {"class": best, "probability": [shares[number] for shares, number in zip(values, best, strict=True)]}
    if parts > _MOST_CLASSES:
        return columns
    each = enumerate(_transposed(parts, values))
    return columns | {f"probability_{number}": column for number, column in each}


def _transposed(parts: int, values: list[list[Any]]) -> list[list[Any]]:
    if any(len(value) != parts for value in values):
        raise ValueError("the number of parts differs")
    return [list(column) for column in zip(*values, strict=True)]


@contextmanager
def open_csv(path: Path) -> Iterator[Write]:
    """Opens a CSV file for predictions."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        yield CsvLines(file)


@dataclass
class CsvLines:
    """Rows of CSV below a line of the columns' names; lists are JSON, and None is an empty cell."""

    file: Writable
    _names: tuple[str, ...] = ()

    def __call__(self, columns: Columns) -> None:
        """Appends rows."""
        lines = csv.writer(self.file, lineterminator="\n")
        if not self._names:
            self._names = tuple(columns)
            lines.writerow(self._names)
        cells = [_cells(columns[name]) for name in self._names]
        lines.writerows(zip(*cells, strict=True))


def _cells(values: Sequence[Any]) -> Sequence[Any]:
    return [_cell(value) for value in _items(values)]


def _items(values: Sequence[Any]) -> Sequence[Any]:
    listed: Sequence[Any] = values.tolist() if isinstance(values, np.ndarray | Tensor) else values
    return listed


def _cell(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    return json.dumps(finite(value), ensure_ascii=False) if isinstance(value, list | tuple | dict) else value


@contextmanager
def open_json_lines(path: Path) -> Iterator[Write]:
    """Opens a file for predictions with an object of JSON on each line."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        yield JsonLines(file)


@dataclass
class JsonLines:
    """Rows as objects of JSON, one on each line; a number that is not finite is null."""

    file: Writable

    def __call__(self, columns: Columns) -> None:
        """Appends rows."""
        names = list(columns)
        for cells in zip(*map(_items, columns.values()), strict=True):
            row = dict(zip(names, map(finite, cells), strict=True))
            self.file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def open_parquet(path: Path) -> Iterator[Write]:
    """Opens a Parquet file for predictions. Polars writes only whole files: pieces of it are joined at the end."""
    import polars as pl

    try:
        with TemporaryDirectory(prefix=".", suffix=".tmp", dir=path.parent) as folder:
            pieces = _ParquetPieces(Path(folder))
            yield pieces
            pieces.write()
            if pieces.paths:
                pl.scan_parquet(pieces.paths).sink_parquet(path)
            else:
                pl.DataFrame().write_parquet(path)
    except pl.exceptions.PolarsError as error:
        # Polars raises errors of its own where the system refuses a write.
        raise OSError(str(error)) from error


@dataclass
class _ParquetPieces:
    folder: Path
    paths: list[Path] = field(default_factory=list)
    _frames: list[Any] = field(default_factory=list)
    _schema: Any = None

    def __call__(self, columns: Columns) -> None:
        import polars as pl

        listed = {name: values if isinstance(values, np.ndarray) else list(_items(values))
                  for name, values in columns.items()}  # fmt: skip
        try:
            self._frames.append(pl.DataFrame(listed, schema=self._schema, strict=False))
        except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
            raise DataError(_DIFFER, value=f"{error}".partition("\n")[0],
                            remedy=f"{_OWN_COLUMNS}; or give --format jsonl") from error  # fmt: skip
        # Columns that are empty at first become text: a type is known when the first piece is written.
        if sum(map(len, self._frames)) >= _PIECE_ROWS:
            self.write()

    def write(self) -> None:
        """Writes the rows so far as a file of their own."""
        import polars as pl

        if not self._frames:
            return
        frame = pl.concat(self._frames, how="vertical_relaxed")
        if self._schema is None:
            frame = frame.with_columns(pl.col(pl.Null).cast(pl.String))
            self._schema = frame.schema
        self.paths.append(self.folder / f"{len(self.paths):06d}.parquet")
        frame.cast(self._schema).write_parquet(self.paths[-1])
        self._frames = []


FORMATS: Final[Mapping[str, Format]] = {"csv": open_csv, "jsonl": open_json_lines, "parquet": open_parquet}
"""Formats of every task, by name: the ending of a file."""


def format_of(name: str, out: str, further: Mapping[str, Format]) -> str:
    """Chooses the format of predictions, before anything is predicted.

    Args:
        name: Its name; empty: the file's ending decides.
        out: The file, or `-` for standard output.
        further: Formats that the task has beside those of every task.

    Raises:
        ConfigError: There is no such format, or it needs a package or a file.
    """
    formats = (*FORMATS, *further)
    ending = Path(out).suffix.lower().removeprefix(".")
    chosen = name or ("csv" if out == STDOUT or out.endswith("/") or Path(out).is_dir() else ending)
    if chosen not in formats:
        listed = ", ".join(formats)
        if name:
            raise ConfigError("There is no such format of predictions", value=f"--format {name}",
                              remedy=f"Give one of {listed}")  # fmt: skip
        raise ConfigError("The ending of the file names no format of predictions", value=f"--out {out}",
                          remedy=f"Name a file that ends in .csv, .jsonl or .parquet, or give --format ({listed})"
                          )  # fmt: skip
    if out == STDOUT and chosen not in ("csv", "jsonl"):
        raise ConfigError(f"Predictions as {chosen} need a file: standard output takes csv and jsonl",
                          remedy=f"Give --out predictions.{chosen}")  # fmt: skip
    if chosen == "parquet":
        check_parquet(out, "Give --format csv")
    return chosen


def check_parquet(file: str, instead: str) -> None:
    """Raises ConfigError where the package is missing that writes a Parquet file; `instead` begins the remedy."""
    if find_spec("polars") is None:
        raise ConfigError("polars is not installed, which writes Parquet files", value=file,
                          remedy=f"{instead}, or: pip install polars")  # fmt: skip


def stream_predictions(stream: Writable, chosen: str) -> Write:
    """Returns the function that appends rows to a stream of text."""
    return CsvLines(stream) if chosen == "csv" else JsonLines(stream)


@contextmanager
def open_predictions(
    out: str, chosen: str, further: Mapping[str, Format], parts: FolderFiles | None = None
) -> Iterator[Write]:
    """Opens a file or a folder of predictions; each file replaces a file of an earlier call when it is complete.

    Args:
        out: The file, or a folder.
        chosen: The format.
        further: Formats that the task has beside those of every task.
        parts: The files of a folder; None: the predictions of the task are one file.

    Raises:
        ConfigError: A folder is named, and the task has no parts.
        DataError: Rows of a part come after rows of another one.
        StateError: A file cannot be written.
    """
    path, opens = Path(out), {**FORMATS, **further}[chosen]
    try:
        if path.is_dir() or out.endswith("/"):
            if parts is None:
                raise ConfigError("The predictions of this task are one file", value=f"--out {out}",
                                  remedy=f"Name a file: --out {path / f'predictions.{chosen}'}")  # fmt: skip
            path.mkdir(exist_ok=True)
            with _Folder(path, chosen, opens, parts) as write:
                yield write
        else:
            with writing_path(path) as temporary, opens(temporary) as write:
                yield write
    except OSError as error:
        raise StateError("The predictions cannot be written", value=f"{path}: {error.strerror or error}",
                         remedy=f"{_first_aid(error)}, or name another file with --out") from error  # fmt: skip


@contextmanager
def open_preview(place: str, opens: Callable[[Path], AbstractContextManager[Watcher]]) -> Iterator[Watcher]:
    """Opens a preview, a file or a folder, which appears when the block ends without an error; a file of that name is
    replaced.

    Args:
        place: A folder, where it ends with / or has no ending; else a file.
        opens: Opens the preview in an empty folder, or a file that does not exist yet.

    Raises:
        StateError: It cannot be written.
    """

    @contextmanager
    def opened() -> Iterator[Watcher]:
        with writing_place(Path(place), as_folder=is_preview_folder(place)) as staged, opens(staged) as watch:
            yield watch

    # Not around the whole block: the file of predictions may have the error of a full disk.
    with guarded(opened, lambda: _writing_preview(place)) as draw:
        yield draw


@contextmanager
def guarded(
    opens: Callable[[], AbstractContextManager[Watcher]], guard: Callable[[], AbstractContextManager[None]]
) -> Iterator[Watcher]:
    """Opens a preview; its own errors, while it is opened, called and closed, come through a guard, and errors of the
    block do not.
    """
    with ExitStack() as stack:
        with guard():
            watch = stack.enter_context(opens())

        def draw(samples: Sequence[Any], predictions: Sequence[Any]) -> None:
            with guard():
                watch(samples, predictions)

        yield draw
        with guard():
            stack.close()


@contextmanager
def _writing_preview(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError("The preview cannot be written", value=f"{place}: {error.strerror or error}",
                         remedy=f"{_first_aid(error)}, or name another place with --preview") from error  # fmt: skip


def _first_aid(error: OSError) -> str:
    return "Make its folder" if isinstance(error, FileNotFoundError) else "Make room there"


def is_preview_folder(place: str) -> bool:
    """Tells whether the place of a preview is a folder rather than a file."""
    path = Path(place)
    return place.endswith("/") or path.is_dir() or not (path.suffix or path.is_file())


class _Folder:
    """A file for each part of the data: recordings, clips. The rows of a part are in succession."""

    def __init__(self, folder: Path, chosen: str, opens: Format, names: FolderFiles) -> None:
        self._folder, self._chosen, self._opens, self._names = folder, chosen, opens, names
        self._part: str | None = None
        self._write: Write | None = None
        self._file = ExitStack()
        self._parts, self._taken = set[str](), set[str]()  # So far, and the names of their files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __call__(self, columns: Columns) -> None:
        """Appends rows to the files of their parts."""
        rest = {name: _items(values) for name, values in columns.items()}
        of_rows, (size, *_) = rest.pop(self._names.column, None), map(len, rest.values())
        # Data of a single part need no column that names it.
        parts = [self._names.only] * size if of_rows is None else [str(part) for part in of_rows]
        starts = [row for row, part in enumerate(parts) if row == 0 or part != parts[row - 1]]
        for start, stop in zip(starts, [*starts[1:], len(parts)], strict=True):
            self._open(parts[start])
            assert self._write is not None
            self._write({name: values[start:stop] for name, values in rest.items()})

    def _open(self, part: str) -> None:
        if part == self._part:
            return
        if part in self._parts:
            raise DataError("The predictions of a file come one after another",
                            value=f"{self._names.column} {part} comes again after {self._part}",
                            remedy=f"Name one file: --out {self._folder / f'predictions.{self._chosen}'}")  # fmt: skip
        # The file of the part before is complete.
        self._file.close()
        self._part = part
        plain = name = self._names.file.format(part.replace("/", "-"))
        number = 1
        while name in self._taken:
            # The parts a/b and a-b must not replace each other.
            name = f"{plain}-{(number := number + 1)}"
        self._parts.add(part)
        self._taken.add(name)
        path = self._folder / f"{name}.{self._chosen}"
        self._write = self._file.enter_context(self._opens(self._file.enter_context(writing_path(path))))
