"""`can-train predict RUN`: writes the predictions of a finished run's model for data without labels."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli import output
from can_train.cli.output import Verbosity
from can_train.cli.run_locator import Device, Run, RunDataRoot, RunLocator, RunsDir, StateDir, TrustCode, WeightsFile
from can_train.errors import CanTrainError, ConfigError, Stopped
from can_train.io.records import expanded
from can_train.reporter import COLUMNS, wrapped

if TYPE_CHECKING:
    from can_train.reporter import Reporter
    from can_train.training.predict import LoadedModel

_STANDARD: Final = "-"
_HEAD_BYTES: Final = 4096
# Where the sign of a binary format begins, the sign, and the ending of such files.
_SIGNS: Final = (
    (0, b"PAR1", ".parquet"), (0, b"\x89HDF", ".h5"), (4, b"ftyp", ".mp4"), (0, b"\x1aE\xdf\xa3", ".mkv"),
    (8, b"AVI ", ".avi"), (0, b"\xffBIOSEMI", ".bdf"), (0, b"0       ", ".edf"),
)  # fmt: skip


def predict(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    *,
    dataset: Annotated[
        str | None,
        typer.Option(help="A file, a folder or a known data set; -: standard input. [the run's own test part]"),
    ] = None,
    out: Annotated[
        str, typer.Option(help="A file; FOLDER/: one for each recording or clip; -: standard output.", metavar="FILE")
    ] = _STANDARD,
    preview: Annotated[
        str,
        typer.Option(
            help="Pictures of the predictions, where a task has them: FOLDER/, or a video FILE.mp4.", metavar="PLACE"
        ),
    ] = "",
    format_: Annotated[
        str, typer.Option("--format", help="The format. [by the file's ending]", metavar="csv|jsonl|parquet")
    ] = "",
    batch_size: Annotated[
        int, typer.Option(help="Samples computed at a time; fewer where memory runs out.", min=1)
    ] = 256,
    device: Device = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="How data are read and predicted: dataset.NAME=VALUE, task.NAME=VALUE. Repeatable.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    weights: WeightsFile = "",
    trust_code: TrustCode = False,
    quiet: output.Quiet = False,
    verbose: output.Verbose = False,
    data_root: RunDataRoot = None,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:  # fmt: skip
    """Write what a finished run's model says of data, which need no labels."""
    verbosity = Verbosity.of(quiet=quiet, verbose=verbose)
    locator = RunLocator(runs_dir, state_dir)
    record = locator.find_ended(run)
    _check_out(out, dataset)
    place = str(expanded(preview)) + "/" * preview.endswith("/") if preview else ""
    if place:
        _check_preview(place, out, dataset)
    # Hydra and torch: a line that is wrong does not wait for them.
    output.print_starting(verbosity)
    from can_train.config.resolved import PathSettings
    from can_train.training.predict import LoadOptions, load_model

    reporter = output.make_reporter(verbosity)
    options = LoadOptions(
        device=device,
        batch_size=batch_size,
        num_workers="",
        paths=PathSettings(data_root=data_root or "", state_dir=state_dir or ""),
        weights=weights,
        trust=locator.trust(trusts_all=trust_code),
        reporter=reporter,
    )
    # The task may print while it is loaded, reads its data, or predicts.
    with output.data_alone(wanted=out == _STANDARD):
        model = load_model(record.folder.path, options)
        if preview and not model.has_preview:
            raise _no_preview(preview)
        with _standard_input(dataset) as data:
            began = time.perf_counter()
            samples = model.read(data, tuple(set_ or ()))
            reading_s = time.perf_counter() - began
            file = out if out == _STANDARD else str(expanded(out)) + "/" * out.endswith("/")
            copy = str(data) if dataset == _STANDARD else ""
            done = _write(model, samples, _Places(out=file, format=format_, preview=place, copy=copy), reporter)
    if verbosity != Verbosity.QUIET:
        shown = "" if out == _STANDARD else f"; predictions: {out}"
        shown += f"; preview: {preview}" if preview else ""
        data = "standard input" if dataset == _STANDARD else dataset or "its own test part"
        told = (f"Run {model.run_id} on {data}: {done:,} {model.counted}; reading took "
                f"{reading_s:.1f} s{shown}")  # fmt: skip
        output.print_aside(wrapped(told, COLUMNS, hang="  "))


def _check_out(out: str, dataset: str | None) -> None:
    """Refuses to write over the data: a folder's files are read as data, too."""
    if out == _STANDARD or dataset in (None, _STANDARD):
        return
    file, place = expanded(out), expanded(str(dataset))
    is_inside = file.is_file() and place.is_dir() and file.resolve().is_relative_to(place.resolve())
    if is_inside or (file.is_file() and place.is_file() and file.samefile(place)):
        raise ConfigError("The file of the predictions is one of the data files", value=f"--out {out}",
                          remedy="Name another file with --out")  # fmt: skip


def _check_preview(place: str, out: str, dataset: str | None) -> None:
    """Refuses to write a preview over files, or into the data: its pictures would be read as data the next time."""
    path = Path(place)
    if place == _STANDARD or path.resolve() == expanded(out).resolve():
        raise ConfigError("A preview needs a place of its own", value=f"--preview {place}",
                          remedy="Name a folder or a video with --preview")  # fmt: skip
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError("The folder of the preview has files, which are not replaced", value=f"--preview {place}",
                          remedy="Name a new folder with --preview")  # fmt: skip
    if place.endswith("/") and path.exists() and not path.is_dir():
        raise ConfigError("The place of the preview is a file", value=f"--preview {place}",
                          remedy="Name another folder with --preview")  # fmt: skip
    if dataset in (None, _STANDARD):
        return
    data = expanded(str(dataset)).resolve()
    if path.resolve() == data or (data.is_dir() and path.resolve().is_relative_to(data)):
        raise ConfigError("The preview would lie in the data", value=f"--preview {place}",
                          remedy="Name a place outside of --dataset")  # fmt: skip


def _no_preview(preview: str) -> ConfigError:
    from can_train.training.predict import tasks_with_preview

    remedy = (f"Leave --preview out; tasks with a preview: {', '.join(tasks_with_preview())}, and a task of your own "
              "that has Task.preview: see docs/predict.md")  # fmt: skip
    return ConfigError("The task of this run has no preview", value=f"--preview {preview}", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where predictions are written; an empty `preview`: there is none. `copy` is the file that standard input was
    copied to; empty where the data set is another.
    """

    out: str
    format: str
    preview: str
    copy: str


def _write(model: LoadedModel, samples: object, places: _Places, reporter: Reporter) -> int:
    """Predicts samples and writes their predictions; returns the number of samples."""
    from can_train.training.prediction_files import format_of, open_predictions, open_preview, stream_predictions

    out, done = places.out, 0
    chosen = format_of(places.format, out, model.formats)
    opened = (nullcontext(stream_predictions(output.DataOutput(), chosen)) if out == _STANDARD else
              open_predictions(out, chosen, model.formats, model.parts(samples)))  # fmt: skip
    with _cleaning_up(), ExitStack() as stack:
        # The preview may lie in a folder of predictions, which is made first.
        write, opens = stack.enter_context(opened), partial(model.preview, samples)
        watchers = [stack.enter_context(open_preview(places.preview, opens))] if places.preview else []
        stage = stack.enter_context(
            reporter.stage("predicting", total=getattr(samples, "total", None), unit=model.counted)
        )
        for count, columns in model.tables(samples, *watchers):
            write({name: _without_copy(cells, places.copy) for name, cells in columns.items()})
            stage.advance(count)
            done += count
    return done


def _without_copy(cells: Sequence[Any], copy: str) -> Sequence[Any]:
    """Names standard input in the cells that name its copy, which is gone afterwards."""
    if not copy or not len(cells) or not isinstance(cells[0], str):
        return cells
    return [_STANDARD if cell == copy else cell for cell in cells]


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that files that are half written are deleted."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _standard_input(dataset: str | None) -> Iterator[str | None]:
    """Copies standard input, where it is the data set, to a file: readers go back in theirs, and ask for its name."""
    if dataset != _STANDARD:
        yield dataset
        return
    if sys.stdin.isatty():
        raise ConfigError("--dataset - reads a pipe, and standard input is a terminal",
                          remedy="Send a file through it: cat FILE | can-train predict RUN --dataset -")  # fmt: skip
    with TemporaryDirectory(prefix="can-train-") as folder:
        head = sys.stdin.buffer.read(_HEAD_BYTES)
        path = Path(folder) / f"standard_input{_ending(head)}"
        with path.open("wb") as file:
            file.write(head)
            shutil.copyfileobj(sys.stdin.buffer, file)
        try:
            yield str(path)
        except CanTrainError as error:
            error.value, error.remedy = (text.replace(str(path), _STANDARD) for text in (error.value, error.remedy))
            raise


def _ending(head: bytes) -> str:
    """Returns the ending that a file of such a beginning has: some readers know a format by it."""
    known = (ending for start, sign, ending in _SIGNS if head[start : start + len(sign)] == sign)
    return next(known, ".csv" if b"," in head.partition(b"\n")[0] else "")
