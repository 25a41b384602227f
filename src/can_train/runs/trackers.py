"""Shows a run in TensorBoard, MLflow or Weights & Biases, each of them in a process of its own:

    training ──lines of JSON──> python -m can_train.runs.trackers NAME ──> files, a database or a server

The training neither imports a tracker nor waits for it. Figures that a tracker is too slow for are left out and
counted; a failing or hanging tracker is reported once. The clients have queues themselves, but they do not run in the
training's process: a client that hangs in C with Python's lock would stop the training, no thread can be ended, and
importing MLflow takes seconds. The upper half of this file is the training's side, the lower half the tracker's
process.
"""

import json
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Final

from can_train.config.resolved import flat
from can_train.errors import ConfigError
from can_train.io.records import open_to_append, parse_object, text_or_nothing, write_json_atomic
from can_train.reporter import Reporter

_MODULES: Final = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),  # mlflow-skinny lacks the last two, which a local store needs
    "wandb": ("wandb",),
}
"""Packages that each tracker imports."""

_FINISH_S: Final = 5.0  # wait of a training's end for its trackers; a slow tracker then goes on by itself
_POLL_S: Final = 0.05
_END_S: Final = 1.0  # within which a process ends after it has closed its files
_ANSWER_S: Final = 300  # within which a tracker must have written its figures, else its process is ended
_BATCH_S: Final = 1.0  # between two writes: MLflow's database takes as long for one figure as for a thousand
_MOST_UNSENT_BYTES: Final = 4 * 2**20  # that wait for a tracker's process, in addition to the 64 KiB of the pipe
_PIPE_BYTES: Final = 2**16  # for each read from the pipe
_END: Final = "\0"  # end of a message from a tracker's process
_MOST_PARAMETERS: Final = 100  # for each request to MLflow
_MOST_FIGURES: Final = 1000
_INIT_S: Final = 60  # Time in which Weights & Biases tries to reach its server
_FAILED: Final = 4  # exit status of a tracker's process that has reported its failure
_NICENESS: Final = 10  # of a tracker's process, whose work can wait


def check_packages(names: Sequence[str]) -> None:
    """Raises ConfigError if a tracker's packages are missing, with the command that installs them."""
    for name in names:
        missing = [module for module in _MODULES[name] if find_spec(module) is None]
        store = os.environ.get("MLFLOW_TRACKING_URI", "")
        if name == "mlflow" and store and not store.startswith("sqlite"):
            missing = [module for module in missing if module == "mlflow"]
        if missing:
            packages = " ".join(missing)
            # Without an installed package (source on the path), pip would look for the extra on its index.
            with suppress(PackageNotFoundError):
                if name in (distribution("can-train").metadata.get_all("Provides-Extra") or ()):
                    packages = f"'can-train[{name}]'"
            line = f"{sys.executable} -m pip install {packages}"
            raise ConfigError(f"--tracker {name} needs packages that are not installed", value=", ".join(missing),
                              remedy=f"This installs them:\n  {line}\nOr leave it out: --tracker off")  # fmt: skip


def scores(judgement: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a judgement: of the model on each test set, of the validation, and without a set."""
    groups: dict[str, Any] = {**judgement, "test": {}}
    for name, test in _mapping(judgement.get("test")).items():
        groups["test"][name] = _mapping(_mapping(test).get("model"))
    groups = {group: values for group, values in groups.items()
              if group in ("test", "validation") or not isinstance(values, Mapping)}  # fmt: skip
    return {name: float(value) for name, value in flat(groups, separator="/")
            if isinstance(value, int | float) and math.isfinite(value)}  # fmt: skip


def _mapping(value: Any) -> Mapping[str, Any]:
    """Returns an empty mapping in place of any other value, which the task of a person may return."""
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The description of a run for a tracker."""

    run_id: str
    folder: str  # absolute
    dataset: str  # empty for a task with a single data set
    key: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of an optimizer step."""

    step: int
    time_s: float  # since 1970
    values: Mapping[str, float]


class Tracker:
    """The training's side of a tracker's process. Only the end of `tracked` waits for the process, for seconds.

    Args:
        name: Name of the tracker.
        run: The tracked run.
        reporter: Gets a single notice if the tracker fails.
    """

    def __init__(self, name: str, run: TrackedRun, reporter: Reporter) -> None:
        self.name = name
        self._reporter = reporter
        self._unsent = bytearray()
        self._left_out = 0
        self._log_path = Path(run.folder, "trackers", f"{name}.log")
        self._log_path.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", __name__, name]
        with open_to_append(self._log_path) as log:
            # A session of its own: a closed terminal or Ctrl-C ends the training, and its trackers finish.
            self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=log, start_new_session=True)  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._messages = self._process.stdin, self._process.stdout
        for stream in (self._input, self._messages):
            os.set_blocking(stream.fileno(), False)
        self._send(asdict(run))

    def track(self, step: int, values: Mapping[str, float]) -> None:
        """Sends figures without waiting; leaves them out if too many are waiting already."""
        if len(self._unsent) > _MOST_UNSENT_BYTES:
            self._left_out += len(values)
        else:
            self._send(asdict(Figures(step=step, time_s=time.time(), values=values)))

    def end(self, status: str) -> None:
        """Sends the run's end: finished, failed or killed (by a signal; the run may be resumed)."""
        self._send({"status": status})

    def is_busy(self) -> bool:
        """Sends the unsent figures, and returns whether the process is still writing."""
        self._flush()
        if not self._unsent and not self._input.closed:
            self._input.close()
        return self._process.poll() is None

    def close(self) -> None:
        """Reports a failure; a busy process goes on by itself."""
        if self._messages.closed:
            return
        self._relay_messages()
        code = self._process.poll()
        if code is None:
            self._say(f"is still busy {_FINISH_S:.0f} s after the run's end, and goes on by itself (process "
                      f"{self._process.pid}); its log is {self._log_path}")  # fmt: skip
            # Nobody waits for the process: without this, subprocess would warn.
            self._process.returncode = 0
        elif code == -signal.SIGALRM:
            self._say(f"did not answer for {_ANSWER_S} s, and the run went on without it")
        elif code not in (0, _FAILED):
            self._say(f"ended with status {code}, and the run went on without it; its log is {self._log_path}")
        elif self._left_out:
            self._say(f"was too slow: {self._left_out:,} figures are missing")
        for stream in (self._input, self._messages):
            stream.close()

    def _send(self, record: Mapping[str, Any]) -> None:
        if not self._messages.closed:
            self._unsent += json.dumps(record).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        """Writes to the pipe until it is full."""
        self._relay_messages()
        try:
            while self._unsent:
                del self._unsent[: os.write(self._input.fileno(), self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            # The other end of the pipe is closed: the process has ended, or is about to.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_S)
            self._unsent.clear()
            self.close()

    def _relay_messages(self) -> None:
        if self._messages.closed:
            return
        with suppress(OSError):
            text = os.read(self._messages.fileno(), _PIPE_BYTES).decode(errors="replace")
            for message in filter(None, text.split(_END)):
                self._say(message)

    def _say(self, text: str) -> None:
        self._reporter.notice(f"The tracker {self.name} {text}")


@contextmanager
def tracked(run: TrackedRun, names: Sequence[str], reporter: Reporter) -> Iterator[Sequence[Tracker]]:
    """Starts the trackers, sends them the end of the block, and waits for them, at most `_FINISH_S` together."""
    trackers = []
    for name in names:
        try:
            trackers.append(Tracker(name, run, reporter))
        except OSError as error:
            reporter.notice(f"The tracker {name} cannot be started: {error}")
    status = "failed"
    try:
        yield trackers
        status = "finished"
    except (SystemExit, KeyboardInterrupt):
        status = "killed"
        raise
    finally:
        for tracker in trackers:
            tracker.end(status)
        deadline = time.monotonic() + _FINISH_S
        while [tracker for tracker in trackers if tracker.is_busy()] and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for tracker in trackers:
            tracker.close()


# The process of a tracker


Say = Callable[[str], None]
"""Sends a message about the tracker to the person, through the training: `is offline`."""


# A class for each tracker: it is made from the run and the state that an attempt leaves for the next one (empty in the
# first attempt), logs figures durably, and ends the run, which a later attempt may resume.


class TensorBoardRun:
    """Event files in `tensorboard/` of the run's folder, one for each attempt."""

    def __init__(self, run: TrackedRun, state: dict[str, Any], say: Say) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import summary_v2 as hparams
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(Path(run.folder, "tensorboard")))
        if not state:
            settings = {name: value if isinstance(value, bool | int | float) else str(value)
                        for name, value in flat(run.settings)}  # fmt: skip
            start = hparams.hparams_pb(settings, trial_id=run.run_id)
            self._writer.add_event(self._event(wall_time=time.time(), summary=start))

    def log(self, points: Sequence[Figures]) -> None:
        """Writes figures as scalars."""
        for point in points:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            event = self._event(wall_time=point.time_s, step=point.step, summary=self._summary(value=values))
            self._writer.add_event(event)
        self._writer.flush()

    def finish(self, status: str) -> None:
        """Closes the file; TensorBoard has no status of a run."""
        self._writer.close()


class MlflowRun:
    """A run at `MLFLOW_TRACKING_URI`, else in `mlflow.db` beside the run's folder."""

    def __init__(self, run: TrackedRun, state: dict[str, Any], say: Say) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        runs_dir = Path(run.folder).parent
        self._metric = Metric
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs_dir / 'mlflow.db'}")
        with suppress(MlflowException, KeyError):
            # The run of an earlier attempt; the store may have changed since.
            self._client.update_run(state["run_id"], status="RUNNING")
            self._run_id = state["run_id"]
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.dataset or run.key
        with suppress(MlflowException):
            # Another run may have created the experiment.
            self._client.create_experiment(experiment, artifact_location=(runs_dir / "mlartifacts").as_uri())
        found = self._client.get_experiment_by_name(experiment)
        assert found is not None
        made = self._client.create_run(found.experiment_id, run_name=run.run_id, tags={"can_train.key": run.key})
        self._run_id = state["run_id"] = made.info.run_id
        parameters = [Param(name, str(value)) for name, value in flat(run.settings)]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MOST_PARAMETERS])

    def log(self, points: Sequence[Figures]) -> None:
        """Writes figures as metrics."""
        metrics = [self._metric(name, value, round(point.time_s * 1000), point.step)
                   for point in points for name, value in point.values.items()]  # fmt: skip
        for start in range(0, len(metrics), _MOST_FIGURES):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_FIGURES])

    def finish(self, status: str) -> None:
        """Sets the run's status."""
        self._client.set_terminated(self._run_id, status.upper())


class WandbRun:
    """A run of Weights & Biases, whose files are in `wandb/` of the run's folder; offline where nobody is logged in."""

    def __init__(self, run: TrackedRun, state: dict[str, Any], say: Say) -> None:
        import wandb

        # The process has no console, and nobody to answer a question.
        settings = wandb.Settings(console="off", silent=True, init_timeout=_INIT_S)
        options: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "can-train"), "id": run.run_id,
                                   "name": run.run_id, "dir": run.folder, "config": dict(run.settings),
                                   "resume": "allow", "settings": settings}  # fmt: skip
        try:
            self._run = wandb.init(**options)
        except wandb.errors.Error as error:
            wandb.teardown()
            self._run = wandb.init(**options, mode="offline")
            files = f"{shlex.quote(run.folder)}/wandb/offline-run-*"
            say(f"is offline: {_first_line(error)} This sends the run later:\n  wandb sync {files}")
        # Steps of the training: Weights & Biases would drop figures that come twice at a step of its own.
        self._run.define_metric("*", step_metric="step")

    def log(self, points: Sequence[Figures]) -> None:
        """Writes figures as rows of the run's history."""
        for point in points:
            self._run.log({"step": point.step, **point.values})

    def finish(self, status: str) -> None:
        """Sends the remaining figures, and closes the run."""
        self._run.finish(exit_code=int(status != "finished"))


_KINDS: Final[Mapping[str, Any]] = {
    "tensorboard": TensorBoardRun,
    "mlflow": MlflowRun,
    "wandb": WandbRun,
}


def serve(name: str, say: Say) -> None:
    """Writes the figures from stdin until its end, and records the last step of each figure in the run's folder."""
    batches = read_batches(sys.stdin.fileno())
    first, *waiting = next(batches)
    run = TrackedRun(**first)
    path = Path(run.folder, "trackers", f"{name}.json")
    state = parse_object(text_or_nothing(path))
    with _in_time():
        tracker = _KINDS[name](run, state, say)
    last_steps, status = state.setdefault("last_steps", {}), "killed"
    for records in chain([waiting], batches):
        points = [Figures(**record) for record in records if "status" not in record]
        status = next((record["status"] for record in records if "status" in record), status)
        with _in_time():
            tracker.log([point for point in (unseen(point, last_steps) for point in points) if point.values])
            write_json_atomic(path, state)
    with _in_time():
        tracker.finish(status)


def read_batches(descriptor: int) -> Iterator[list[dict[str, Any]]]:
    """Reads lines of JSON until the end: the first line at once, then the lines of each second together."""
    unread, due = b"", time.monotonic()
    while True:
        wait_s = max(0.0, due - time.monotonic()) if b"\n" in unread else None
        if select.select([descriptor], [], [], wait_s)[0]:
            unread += (chunk := os.read(descriptor, _PIPE_BYTES))
            if not chunk:
                yield [json.loads(line) for line in unread.splitlines()]
                return
        if b"\n" in unread and time.monotonic() >= due:
            whole, _, unread = unread.rpartition(b"\n")
            yield [json.loads(line) for line in whole.splitlines()]
            due = time.monotonic() + _BATCH_S


def unseen(point: Figures, last_steps: dict[str, int]) -> Figures:
    """Drops figures that were written before: a resumed attempt repeats the steps after the last checkpoint.

    Args:
        point: Figures of a step.
        last_steps: The last step of each figure; updated here.
    """
    values = {name: value for name, value in point.values.items() if point.step > last_steps.get(name, -1)}
    last_steps.update(dict.fromkeys(values, point.step))
    return replace(point, values=values)


@contextmanager
def _in_time() -> Iterator[None]:
    # The kernel ends the process then, also in a hanging C call.
    signal.alarm(_ANSWER_S)
    yield
    signal.alarm(0)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def main(name: str) -> None:
    """Runs a tracker's process; its last message has the reason of a failure."""
    # A scheduler signals every process of a job; this process ends when the training closes its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    messages = os.dup(1)
    os.dup2(2, 1)  # the output of libraries goes to the log

    def say(text: str) -> None:
        with suppress(OSError):  # the training may have ended
            os.write(messages, f"{text}{_END}".encode())

    try:
        serve(name, say)
    except Exception as error:  # noqa: BLE001 - the training goes on without a tracker that fails
        say(f"failed, and the run goes on without it: {_first_line(error)}")
        traceback.print_exc()
        signal.alarm(_ANSWER_S)  # the tracker's code at the process's exit may hang too
        sys.exit(_FAILED)


if __name__ == "__main__":
    main(sys.argv[1])
