"""Records how the memory of a run grows before the run trains: in a process that sees no GPU, beside the reading of the
data. Its lines then become limits by one trial on the device (`fit/search.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch

from can_train.config.compose import from_plain
from can_train.config.resolved import cache_folder
from can_train.errors import CanTrainError
from can_train.factors.store import read_factor_rule
from can_train.fit.planner import Planner, Planners, plan_request
from can_train.fit.search import NO_RECORDING, Recording
from can_train.memory.catalogue import UsableMemory
from can_train.memory.host import die_with_parent
from can_train.memory.meters import AbsentGpuMeter
from can_train.reporter import SilentReporter
from can_train.training.chosen_weights import average_tensors
from can_train.training.loading import fresh_model, sample_task

if TYPE_CHECKING:
    from can_train.config.resolved import ResolvedRun
    from can_train.memory.meters import Meter
    from can_train.reporter import Reporter
    from can_train.task import BatchTask
    from can_train.training.reference_models import ReferenceModelPlan, ReferenceModels

# Longest wait of a run that is ready to plan. The built-in tasks need 6 to 16 s of a processor, most of which pass
# while data and model are read; probes take about as long as the rest.
_WAIT_S: Final = 15.0
# Seconds after which the process gives up. It outlives the wait: the first one on a machine compiles a library for half
# a minute, which later ones find.
_LIMIT_S: Final = 180
_MAX_REASON_CHARACTERS: Final = 300


class LimitRecorder:
    """The process that records a run for its device."""

    def __init__(self, run: ResolvedRun, meter: Meter) -> None:
        self._run, self._meter = run, meter
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the process, unless nothing is searched for, the device cannot be recorded, or an earlier run's limits
        are to be confirmed.
        """
        target, request = self._meter.recordable, plan_request(self._run.training)
        if target is None or not (request.searches or request.rules.target < np.inf):
            return
        earlier = read_factor_rule(self._run, self._meter.key).earlier
        if earlier is not None and earlier.torch_version == torch.__version__:
            return
        job = {"config": self._run.config, "target": asdict(target)}
        with tempfile.TemporaryFile() as given:
            given.write(msgspec.json.encode(job, enc_hook=str))
            given.seek(0)
            # A session of its own: Ctrl-C reaches the training, which ends this process.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, text=True, start_new_session=True,
            )  # fmt: skip

    def result(self) -> Recording:
        """Waits for the process, some seconds at most; returns what it recorded, or the reason why it did not."""
        if self._process is None:
            return NO_RECORDING
        try:
            answer, _ = self._process.communicate(timeout=_WAIT_S)
            return msgspec.json.decode(answer, type=Recording)
        except subprocess.TimeoutExpired:
            return Recording(reason=f"recording the task takes longer than {_WAIT_S:g} s")
        except msgspec.MsgspecError:
            return Recording(reason="the process that records the task has died")

    def close(self) -> None:
        """Ends the process, and the processes that it started."""
        # The number of a process that has been waited for may be another one's by now.
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@dataclass(frozen=True, kw_only=True)
class AbsentRun:
    """A run that is planned for devices that are not at hand, from a sample of its data."""

    planner: Planner
    references: ReferenceModels
    decided: Sequence[ReferenceModelPlan]  # Plans of the reference models, on no device yet

    @classmethod
    def of_sample(cls, run: ResolvedRun, sampled: BatchTask, largest: UsableMemory, reporter: Reporter) -> AbsentRun:
        """Makes the model on the host; `largest` is the largest of the devices."""
        # Of the runs that are at work, only the process that records needs it.
        from can_train.training.reference_models import ReferenceModels

        # A copy: planning gives the task rows and outputs of reference models that differ from a training's.
        task = copy(sampled)
        # The sample is repeated to the length of the data set, so that an epoch has as many steps as in training.
        task.train_rows = np.resize(sampled.train_rows, sampled.estimated_train_rows or len(sampled.train_rows))
        meter = AbsentGpuMeter(largest)
        model = fresh_model(run, task, meter)
        planner = Planner(run=run, task=task, model=model, meter=meter, reporter=reporter, verify=False)
        references = ReferenceModels(task=task, training=run.training, meter=meter, reporter=reporter,
                                     cache=cache_folder(run.paths), verify=False)  # fmt: skip
        return cls(planner=planner, references=references, decided=references.decide(model))

    def placed_on(self, target: UsableMemory) -> tuple[ReferenceModelPlan, ...]:
        """Decides where the outputs of the reference models are computed for a device."""
        samples = len(self.planner.task.train_rows) * self.planner.run.training.epochs
        return tuple(plan.on(target.capacity_bytes, samples=samples) for plan in self.decided)

    def planners(self, target: UsableMemory, placed: Sequence[ReferenceModelPlan], *, ranks: int = 1) -> Planners:
        """Makes the planners of all phases for a device of each rank, beside reference models that are placed."""
        average = average_tensors(self.planner.model, self.planner.run.training)
        resident = [*self.references.bind_placeholders(placed), *average]
        planner = replace(self.planner, meter=AbsentGpuMeter(target), reference_tensors=resident, ranks=ranks)
        return Planners.of_phases(planner)


def record(run: ResolvedRun, target: UsableMemory) -> Recording:
    """Records the lines of every phase of a run on a device that is not at hand."""
    reporter = SilentReporter()
    absent = AbsentRun.of_sample(run, sample_task(run, reporter), target, reporter)
    planners = absent.planners(target, absent.placed_on(target))
    phases = {planner.phase.name: planner.record() for planner in planners.phases}
    return Recording(phases=phases, seconds=sum(os.times()[:4]))


def _answer(job: Mapping[str, Any]) -> Recording:
    try:
        return record(from_plain(job["config"]), msgspec.convert(job["target"], UsableMemory))
    except CanTrainError as error:
        reason = f"{error.rule}: {error.value}"
    # The code of a task may fail where it sees no GPU.
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}"
    return Recording(reason=f"{reason[:1].lower()}{reason[1:_MAX_REASON_CHARACTERS]}")


def main() -> None:
    """Reads a job from standard input, and writes its recording to standard output."""
    die_with_parent()
    signal.alarm(_LIMIT_S)
    # Whatever a task prints is no answer.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        torch.set_num_threads(1)
        answers.write(msgspec.json.encode(_answer(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
