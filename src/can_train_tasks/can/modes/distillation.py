"""Knowledge distillation: a student learns from a teacher's outputs in addition to its usual loss.

A classifier learns from the teacher's softened logits, an autoencoder from the teacher's latents and reconstructions.

Shapes: R rows (windows).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import CheckpointError
from can_train.task import Outputs
from can_train_tasks.can.data.dataset import CanData
from can_train_tasks.can.data.graphs import Floats, Ints
from can_train_tasks.can.losses import DistilledAutoencoderBatch, DistilledClassifierBatch
from can_train_tasks.can.models import build_network
from can_train_tasks.can.modes.windows import AutoencoderTask, ClassifierTask, WindowTask
from can_train_tasks.can.reference_models import WindowReferenceModel
from can_train_tasks.can.settings import DistillationSettings

# Weights of the distances from the teacher. Latents weigh as much as nodes and edges together.
TEACHER_WEIGHTS: Final = {"teacher_latent": 0.5, "teacher_node": 0.25, "teacher_edge": 0.25}


class _Student(WindowTask):
    """Common base of both kinds of students; it precedes the task of the plain model in their bases."""

    _teacher: WindowReferenceModel
    _references: Sequence[WindowReferenceModel]
    _outputs: Outputs | None = None
    _projected = 0  # width of the teacher's latent, where the student projects its latent to it
    _parameters = 0  # parameters of the student, without the projection, which only training needs

    def build_model(self) -> nn.Module:
        """Makes the network."""
        inputs = self._inputs()
        self.prepare(inputs)
        if self._prepared is not None:
            self._teacher.share(self._prepared, inputs)
        model = build_network(self._run.model, inputs, projected=self._projected)
        named = model.named_parameters()
        self._parameters = sum(weight.numel() for name, weight in named if not name.startswith("projection."))
        return model

    def reference_models(self) -> Sequence[WindowReferenceModel]:
        """Returns the teacher and, if `without_teacher` names it, the student that was trained without a teacher."""
        return self._references

    def bind_outputs(self, role: str, outputs: Outputs) -> None:
        """Receives the source of the teacher's outputs."""
        self._outputs = outputs

    def judge(self, score: Callable[..., Floats]) -> Mapping[str, Any]:
        """Judges the student as a plain model, and compares it in size and speed with the reference models."""
        from can_train_tasks.can.evaluation.judging import TRAINED, TimedScore

        timed = TimedScore(score)
        judgement = super().judge(timed)
        sizes: dict[str, tuple[str | None, int]] = {TRAINED: (None, self._parameters)}
        for reference in self._references:
            sizes[reference.role] = (reference.name, sum(weight.numel() for weight in reference.model.parameters()))
        compared = {
            role: {"run": run, "parameters": size, "windows_per_second": timed.speed("" if role == TRAINED else role)}
            for role, (run, size) in sizes.items()
        }
        return {**judgement, "compared": compared}

    def _learn_from(self, finished: Mapping[str, FinishedModel], output: str) -> None:
        rows = np.unique(np.concatenate([self.train_rows, self.validation_rows]))
        self._references = [
            WindowReferenceModel(role, finished[role], self._data, rows, output=output)
            for role in ("teacher", "without_teacher")
            if role in finished
        ]
        self._teacher, *others = self._references
        mode: DistillationSettings = self._run.mode
        placement = "offload" if mode.offload_teacher_to_cpu else mode.teacher_placement
        self._teacher.placements = ("device", "cache", "offload") if placement == "auto" else (placement,)
        for other in others:
            other.placements = ()  # training does not use its outputs: it is only scored, for the comparison
        self.reference_roles = [reference.role for reference in self._references]

    def _teacher_outputs(self) -> Outputs:
        assert self._outputs is not None, "training binds the outputs before it asks for a batch"
        return self._outputs


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

    def logical_batch(
        self, rows: Ints, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> DistilledClassifierBatch:
        """Prepares a logical batch."""
        gather, temperature = self.gather_to(device, dtype), self._run.mode.temperature
        teacher, hidden = self._teacher_outputs(), self.hidden_ids(rows, generator)
        called: list[Tensor] | None = [] if generator is None else None
        return DistilledClassifierBatch(rows, gather, self._weights(rows), teacher, temperature, hidden=hidden,
                                        called=called)  # fmt: skip


class DistilledAutoencoderTask(_Student, AutoencoderTask):
    """An autoencoder learns from a teacher's latents and reconstructions; its latents are projected to the teacher's.

    Raises:
        DataError: No window is benign.
        CheckpointError: The teacher does not fit the windows, or has other `dataset.features`.
    """

    def __init__(self, run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel]) -> None:
        super().__init__(run, data)
        theirs, ours = finished["teacher"].run.dataset.features, run.dataset.features
        if theirs != ours:
            raise CheckpointError("A student reconstructs what its teacher does",
                                  value=f"dataset.features={theirs} of the teacher and {ours} of the student",
                                  remedy=f"Add --set dataset.features={theirs}")  # fmt: skip
        self._learn_from(finished, "reconstruction")
        self._projected = self._teacher.widths["latent"]
        self.loss_weights = {**self.loss_weights, **TEACHER_WEIGHTS}

    def logical_batch(
        self, rows: Ints, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> DistilledAutoencoderBatch:
        """Prepares a logical batch, with noise for all of its nodes."""
        plain = super().logical_batch(rows, device, dtype, generator)
        return DistilledAutoencoderBatch(**vars(plain), teacher=self._teacher_outputs())
