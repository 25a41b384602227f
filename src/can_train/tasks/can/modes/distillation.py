"""A student learns from a teacher's outputs beside its own loss: a classifier from softened logits, an autoencoder from
latents and reconstructions.

Shapes: R rows (windows).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.task import Outputs
from can_train.tasks.can.data.dataset import CanData
from can_train.tasks.can.evaluation.judging import Score
from can_train.tasks.can.losses import DistilledAutoencoderBatch, DistilledClassifierBatch
from can_train.tasks.can.models.build import build_network
from can_train.tasks.can.modes.autoencoder import AutoencoderTask
from can_train.tasks.can.modes.classifier import ClassifierTask
from can_train.tasks.can.modes.windows import WindowTask
from can_train.tasks.can.reference_models import WindowReferenceModel, reference_model_of
from can_train.tasks.can.settings import DistillationSettings, GatSettings

if TYPE_CHECKING:
    from can_train.tasks.can.evaluation.judging import TimedScore

LATENT_SHARE: Final = 0.5
"""Weight of the difference from the teacher's latents."""


RECONSTRUCTION_SHARE: Final = 0.25
"""Weight of the difference from the teacher's reconstruction of nodes, and again of edges: ½ together."""


_WAYS: Final = ("device", "cache", "offload")


def distillation_task(run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> WindowTask:
    """Makes the task of a student, which is a classifier or an autoencoder.

    Raises:
        DataError: The windows are not what it learns from.
        CheckpointError: The teacher does not fit them.
    """
    student = DistilledClassifierTask if isinstance(run.model, GatSettings) else DistilledAutoencoderTask
    return student(run, data, finished)


@dataclass
class _Teacher:
    """The teacher, and who is judged beside the student.

    Attributes:
        reference model: The teacher.
        others: All that can be asked, the teacher first.
        outputs: Where its outputs come from, once that is known.
        student_parameters: Weights of the student, once it is made; what projects to the teacher is no part of it.
    """

    reference_model: WindowReferenceModel
    others: list[WindowReferenceModel]
    outputs: Outputs | None = None
    student_parameters: int = 0

    def ask(self) -> Outputs:
        """Returns where its outputs come from."""
        assert self.outputs is not None, "training tells the answers before it asks for a batch"
        return self.outputs

    def compared(self, timed: "TimedScore") -> dict[str, Any]:
        """Returns the size and speed of the student and the others, by name.

        Args:
            timed: What scored them.
        """
        from can_train.tasks.can.evaluation.judging import STUDENT

        sizes = {"": self.student_parameters, **{other.role: num_weights(other.model) for other in self.others}}
        runs = {other.role: other.name for other in self.others}
        return {
            role or STUDENT: {"run": runs.get(role), "parameters": size, "windows_per_second": timed.speed(role)}
            for role, size in sizes.items()
        }


def _teacher(
    run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel], rows: NDArray[np.int64], output: str
) -> _Teacher:
    teacher = reference_model_of("teacher", finished["teacher"], data, np.unique(rows), output=output)
    teacher.placements = _placements(run.mode)
    others = [teacher]
    if "without_teacher" in finished:
        rival = reference_model_of("without_teacher", finished["without_teacher"], data, np.unique(rows), output=output)
        # It is asked for scores alone.
        rival.placements = ()
        others.append(rival)
    return _Teacher(reference_model=teacher, others=others)


def _placements(mode: DistillationSettings) -> tuple[str, ...]:
    if mode.offload_teacher_to_cpu:
        return ("offload",)
    return _WAYS if mode.teacher_placement == "auto" else (mode.teacher_placement,)


class _Student(WindowTask):
    """What both kinds of students do alike, before what their models do."""

    _teacher: _Teacher

    def reference_models(self) -> Sequence[WindowReferenceModel]:
        """Returns the teacher and, where one is named, the student that was trained without it."""
        return self._teacher.others

    def bind_outputs(self, role: str, outputs: Outputs) -> None:
        """Learns where the teacher's outputs come from."""
        self._teacher.outputs = outputs

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges the student as any model of its kind, beside its teacher and beside itself without one."""
        from can_train.tasks.can.evaluation.judging import TimedScore

        timed = TimedScore(score)
        return {**super().judge(timed), "compared": self._teacher.compared(timed)}

    def _learn_from(self, finished: Mapping[str, FinishedModel], output: str) -> None:
        """Takes one of the finished models for the teacher, which is asked for some output."""
        rows = np.concatenate([self.train_rows, self.validation_rows])
        self._teacher = _teacher(self._run, self._data, finished, rows, output)
        self.reference_roles = [other.role for other in self._teacher.others]


class DistilledClassifierTask(_Student, ClassifierTask):
    r"""A classifier learns from a teacher's softened logits and from labels (Source: Hinton et al., 2015):

    :math:`\alpha T^2 \mathrm{KL}(p_\mathrm{teacher}^{(T)} \| p_\mathrm{student}^{(T)}) + (1 - \alpha) \mathrm{CE}`.

    Args:
        run: The resolved run.
        data: The windows.
        finished: The teacher, and the student without one where there is one.

    Raises:
        DataError: There are no labels, or windows of one class only.
        CheckpointError: The teacher does not fit the windows.
    """

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data)
        self._learn_from(finished, "logits")
        mode = run.mode
        self.loss_weights = {"classification": 1 - mode.alpha, "distillation": mode.alpha * mode.temperature**2}

    def build_model(self) -> nn.Module:
        """Makes the network."""
        model = super().build_model()
        self._teacher.student_parameters = num_weights(model)
        return model

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> DistilledClassifierBatch:
        """Prepares a logical batch."""
        return DistilledClassifierBatch(
            rows, self._gatherer_to(device, dtype), self._weights(rows), self._teacher.ask(), self._run.mode.temperature
        )


class DistilledAutoencoderTask(_Student, AutoencoderTask):
    """An autoencoder learns from a teacher's latents (its own projected to their width) and reconstructions.

    Args:
        run: The resolved run.
        data: The windows.
        finished: The teacher, and the student without one where there is one.

    Raises:
        DataError: None of the windows is benign.
        CheckpointError: The teacher does not fit them.
    """

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data)
        self._learn_from(finished, "reconstruction")
        self.loss_weights = {
            **self.loss_weights,
            "teacher_latent": LATENT_SHARE,
            "teacher_node": RECONSTRUCTION_SHARE,
            "teacher_edge": RECONSTRUCTION_SHARE,
        }

    def build_model(self) -> nn.Module:
        """Makes the network, with a projection to the teacher's latent."""
        projected = self._teacher.reference_model.widths["latent"]
        model = build_network(self._run.model, self._inputs(), projected=projected)
        self._teacher.student_parameters = num_weights(model) - (self._run.model.latent + 1) * projected
        return model

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> DistilledAutoencoderBatch:
        """Prepares a logical batch; the noise is drawn for all of it."""
        own = super().logical_batch(rows, device, dtype, generator)
        return DistilledAutoencoderBatch(**vars(own), answers=self._teacher.ask())


def num_weights(model: nn.Module) -> int:
    """Counts a model's weights."""
    return sum(weights.numel() for weights in model.parameters())
