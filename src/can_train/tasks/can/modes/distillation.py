"""A student learns from a teacher's outputs beside its own loss: a classifier from softened logits, an autoencoder from
latents and reconstructions.

Shapes: R rows (windows).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.tasks.can.companions import WindowCompanion, companion_of
from can_train.tasks.can.dataset import CanData
from can_train.tasks.can.losses import Answers, DistilledAutoencoderBatch, DistilledClassifierBatch
from can_train.tasks.can.models.building import build_network
from can_train.tasks.can.modes.autoencoder import AutoencoderTask
from can_train.tasks.can.modes.classifier import ClassifierTask
from can_train.tasks.can.modes.windows import Score, WindowTask
from can_train.tasks.can.settings import DistillationSettings, GatSettings

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
        companion: The teacher.
        others: All that can be asked, the teacher first.
        answers: Where its outputs come from, once that is known.
        student_parameters: Weights of the student, once it is made; what projects to the teacher is no part of it.
    """

    companion: WindowCompanion
    others: list[WindowCompanion]
    answers: Answers | None = None
    student_parameters: int = 0

    def ask(self) -> Answers:
        """Returns where its outputs come from."""
        assert self.answers is not None, "training tells the answers before it asks for a batch"
        return self.answers

    def judged(self, judge: Callable[[Score, Sequence[str]], dict[str, Any]], score: Score) -> dict[str, Any]:
        """Judges the student beside the others, and adds everyone's size and speed.

        Args:
            judge: Judges by scores, beside some roles.
            score: Scores windows.
        """
        from can_train.tasks.can.comparison import STUDENT, TimedScore

        timed = TimedScore(score)
        judgement = judge(timed, [other.role for other in self.others])
        sizes = {"": self.student_parameters, **{other.role: num_weights(other.model) for other in self.others}}
        runs = {other.role: other.name for other in self.others}
        compared = {
            role or STUDENT: {"run": runs.get(role), "parameters": size, "windows_per_second": timed.speed(role)}
            for role, size in sizes.items()
        }
        return judgement | {"compared": compared}


def _teacher(
    run: ResolvedRun, data: CanData, finished: Mapping[str, FinishedModel], rows: NDArray[np.int64], output: str
) -> _Teacher:
    teacher = companion_of("teacher", finished["teacher"], data, np.unique(rows), output=output)
    teacher.placements = _placements(run.mode)
    others = [teacher]
    if "without_teacher" in finished:
        rival = companion_of("without_teacher", finished["without_teacher"], data, np.unique(rows), output=output)
        # It is asked for scores alone.
        rival.placements = ()
        others.append(rival)
    return _Teacher(companion=teacher, others=others)


def _placements(mode: DistillationSettings) -> tuple[str, ...]:
    if mode.offload_teacher_to_cpu:
        return ("offload",)
    return _WAYS if mode.teacher_placement == "auto" else (mode.teacher_placement,)


class DistilledClassifierTask(ClassifierTask):
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
        rows = np.concatenate([self.train_rows, self.validation_rows])
        self._teacher = _teacher(run, data, finished, rows, "logits")
        self.companions = self._teacher.others
        mode = run.mode
        self.loss_weights = {"classification": 1 - mode.alpha, "distillation": mode.alpha * mode.temperature**2}

    def build_model(self) -> nn.Module:
        """Makes the network."""
        model = super().build_model()
        self._teacher.student_parameters = num_weights(model)
        return model

    def listen(self, role: str, answers: Answers) -> None:
        """Learns where the teacher's logits come from."""
        self._teacher.answers = answers

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges the student as any classifier, beside its teacher and beside itself without one."""
        return self._teacher.judged(self._judgement, score)

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> DistilledClassifierBatch:
        """Prepares a logical batch."""
        return DistilledClassifierBatch(
            rows, self._gatherer_to(device, dtype), self._weights(rows), self._teacher.ask(), self._run.mode.temperature
        )


class DistilledAutoencoderTask(AutoencoderTask):
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
        rows = np.concatenate([self.train_rows, self.validation_rows])
        self._teacher = _teacher(run, data, finished, rows, "reconstruction")
        self.companions = self._teacher.others
        self.loss_weights = {
            **self.loss_weights,
            "teacher_latent": LATENT_SHARE,
            "teacher_node": RECONSTRUCTION_SHARE,
            "teacher_edge": RECONSTRUCTION_SHARE,
        }

    def build_model(self) -> nn.Module:
        """Makes the network, with a projection to the teacher's latent."""
        projected = self._teacher.companion.widths["latent"]
        model = build_network(self._run.model, self._inputs(), projected=projected)
        self._teacher.student_parameters = num_weights(model) - (self._run.model.latent + 1) * projected
        return model

    def listen(self, role: str, answers: Answers) -> None:
        """Learns where the teacher's latents and reconstructions come from."""
        self._teacher.answers = answers

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges the student as any autoencoder, beside its teacher and beside itself without one."""
        return self._teacher.judged(self._judgement, score)

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> DistilledAutoencoderBatch:
        """Prepares a logical batch; the noise is drawn for all of it."""
        own = super().logical_batch(rows, device, dtype, generator)
        return DistilledAutoencoderBatch(**vars(own), answers=self._teacher.ask())


def num_weights(model: nn.Module) -> int:
    """Counts a model's weights."""
    return sum(weights.numel() for weights in model.parameters())
