"""Knowledge distillation: a student learns from a teacher's outputs in addition to its own loss, a classifier from
softened logits, an autoencoder from latents and reconstructions.

Shapes: R rows (windows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from can_train.tasks.can.losses import DistilledAutoencoderBatch, DistilledClassifierBatch
from can_train.tasks.can.models import build_network
from can_train.tasks.can.modes.autoencoder import AutoencoderTask
from can_train.tasks.can.modes.classifier import ClassifierTask
from can_train.tasks.can.modes.windows import WindowTask
from can_train.tasks.can.reference_models import WindowReferenceModel
from can_train.tasks.can.settings import GatSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.config.resolved import FinishedModel, ResolvedRun
    from can_train.task import Outputs
    from can_train.tasks.can.data.dataset import CanData
    from can_train.tasks.can.evaluation.judging import Score
    from can_train.tasks.can.settings import DistillationSettings

# Weight of the distance from the teacher's latents.
LATENT_WEIGHT: Final = 0.5

# Weight of the distance from the teacher's node features, and of that from its edge features: together they weigh as
# much as the latents.
RECONSTRUCTION_WEIGHT: Final = 0.25

_PLACEMENTS: Final = ("device", "cache", "offload")


def distillation_task(run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> WindowTask:
    """Makes the task of a student, which is a classifier or an autoencoder.

    Raises:
        DataError: The windows lack what the student learns from.
        CheckpointError: The teacher does not fit them.
    """
    student = DistilledClassifierTask if isinstance(run.model, GatSettings) else DistilledAutoencoderTask
    return student(run, data, finished)


class _Student(WindowTask):
    """What both kinds of students have in common; it comes before the class of the plain model in their bases."""

    _teacher: WindowReferenceModel
    _references: Sequence[WindowReferenceModel]
    _outputs: Outputs | None = None
    # Parameters of the student without the projection to the teacher, which only training needs.
    _parameters = 0

    def reference_models(self) -> Sequence[WindowReferenceModel]:
        """Returns the teacher and, where one is named, the student that was trained without it."""
        return self._references

    def bind_outputs(self, role: str, outputs: Outputs) -> None:
        """Receives the source of the teacher's outputs."""
        self._outputs = outputs

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges the student as a plain model, and compares it in size and speed with the reference models."""
        from can_train.tasks.can.evaluation.judging import TRAINED, TimedScore

        timed = TimedScore(score)
        judgement = super().judge(timed)
        compared = {TRAINED: _size_and_speed(None, self._parameters, timed.speed())}
        for other in self._references:
            compared[other.role] = _size_and_speed(other.name, num_parameters(other.model), timed.speed(other.role))
        return {**judgement, "compared": compared}

    def _learn_from(self, finished: Mapping[str, FinishedModel], output: str) -> None:
        rows = np.unique(np.concatenate([self.train_rows, self.validation_rows]))
        self._references = [
            WindowReferenceModel(role, finished[role], self._data, rows, output=output)
            for role in ("teacher", "without_teacher")
            if role in finished
        ]
        self._teacher, *others = self._references
        self._teacher.placements = _placements(self._run.mode)
        for other in others:
            # It is only scored, for the comparison.
            other.placements = ()
        self.reference_roles = [one.role for one in self._references]

    def _teacher_outputs(self) -> Outputs:
        assert self._outputs is not None, "training binds the outputs before it asks for a batch"
        return self._outputs


def _placements(mode: DistillationSettings) -> tuple[str, ...]:
    if mode.offload_teacher_to_cpu:
        return ("offload",)
    return _PLACEMENTS if mode.teacher_placement == "auto" else (mode.teacher_placement,)


def _size_and_speed(run: str | None, parameters: int, speed: float | None) -> dict[str, Any]:
    return {"run": run, "parameters": parameters, "windows_per_second": speed}


def num_parameters(model: nn.Module) -> int:
    """Counts the parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


class DistilledClassifierTask(_Student, ClassifierTask):
    r"""A classifier learns from a teacher's softened logits and from labels (Source: Hinton et al., 2015):

    :math:`\alpha T^2 \mathrm{KL}(p_\mathrm{teacher}^{(T)} \| p_\mathrm{student}^{(T)}) + (1 - \alpha) \mathrm{CE}`.

    Raises:
        DataError: There are no labels, or windows of one class only.
        CheckpointError: The teacher does not fit the windows.
    """

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data)
        self._learn_from(finished, "logits")
        mode = run.mode
        # The gradient of the softened term falls with 1/T²; the factor makes α independent of the temperature.
        self.loss_weights = {"classification": 1 - mode.alpha, "distillation": mode.alpha * mode.temperature**2}

    def build_model(self) -> nn.Module:
        """Makes the network."""
        model = super().build_model()
        self._parameters = num_parameters(model)
        return model

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> DistilledClassifierBatch:
        """Prepares a logical batch."""
        gather, temperature = self.gather_to(device, dtype), self._run.mode.temperature
        return DistilledClassifierBatch(rows, gather, self._weights(rows), self._teacher_outputs(), temperature)


class DistilledAutoencoderTask(_Student, AutoencoderTask):
    """An autoencoder learns from a teacher's latents, to which it projects its own, and reconstructions.

    Raises:
        DataError: None of the windows is benign.
        CheckpointError: The teacher does not fit them.
    """

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data)
        self._learn_from(finished, "reconstruction")
        self.loss_weights = {
            **self.loss_weights,
            "teacher_latent": LATENT_WEIGHT,
            "teacher_node": RECONSTRUCTION_WEIGHT,
            "teacher_edge": RECONSTRUCTION_WEIGHT,
        }

    def build_model(self) -> nn.Module:
        """Makes the network, with a projection to the teacher's latent."""
        projected = self._teacher.widths["latent"]
        model = build_network(self._run.model, self._inputs(), projected=projected)
        self._parameters = num_parameters(model) - (self._run.model.latent + 1) * projected
        return model

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> DistilledAutoencoderBatch:
        """Prepares a logical batch with the noise of all its windows."""
        plain = super().logical_batch(rows, device, dtype, generator)
        return DistilledAutoencoderBatch(**vars(plain), teacher=self._teacher_outputs())
