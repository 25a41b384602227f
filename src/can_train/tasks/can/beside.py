"""The detectors that a run's model was judged beside, to be judged with it once more: a student's teacher and the same
student without one, an agent's simple mixes. What they are and what they flag was decided in that run, on validation
windows; which of them are no longer there is said.

Shapes: R windows of a folder, S columns of raw scores.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.config.resolved import FinishedModel
from can_train.errors import CanTrainError
from can_train.tasks.can.companions import AskedNetwork
from can_train.tasks.can.comparison import STUDENT, TimedScore
from can_train.tasks.can.dataset import CanData
from can_train.tasks.can.fusion.comparing import with_choices
from can_train.tasks.can.fusion.finished import WEIGHT, seen
from can_train.tasks.can.fusion.mixes import BEST_MIX, mix_from_plain
from can_train.tasks.can.judging import Judgement, ModelScores, check_scores
from can_train.tasks.can.scoring import Companion, Windows
from can_train.tasks.can.settings import DistillationSettings, FusionSettings

Scores = Mapping[str, NDArray[np.float64]]
"""Of each folder's windows: [R] final scores, or [R, S] raw ones."""

_OLDER: Final = "an older version made the run's result, without their thresholds"


class Alone:
    """A model that is judged beside nothing but floors.

    Args:
        result: The run's own judgement.
        absent: Why any detector is missing, by name.

    Attributes:
        asked: Windows with other models that score them, by role.
        absent: As given, and what is missed on the way.
    """

    def __init__(self, result: Mapping[str, Any], absent: Mapping[str, str]) -> None:
        self._result = result
        self.asked: dict[str, Windows] = {}
        self.absent = dict(absent)

    def scores(self, told: Scores, ask: Callable[[str], Scores]) -> dict[str, Scores]:
        """Returns the final scores of the detectors that are beside it, by name.

        Args:
            told: Raw scores of the model.
            ask: Returns those of another one, by role.
        """
        return {}

    def completed(self, judgement: Judgement, told: Scores, timed: TimedScore) -> dict[str, Any]:
        """Adds to a judgement what a run's own one has beyond it.

        Args:
            judgement: Of the model and these detectors.
            told: As for `scores`.
            timed: What scored all of them.
        """
        return dict(judgement)


class Taught(Alone):
    """A student, beside its teacher and the same student without one, as far as their runs are still there.

    Args:
        result: The run's own judgement.
        data: The windows.
        companion: Reads the other models.
    """

    def __init__(self, result: Mapping[str, Any], data: CanData, companion: Companion) -> None:
        super().__init__(result, {})
        for role, decided in result["beside"].items():
            with self._missed(role):
                # Judged as beside the student then, whatever its own run decided.
                finished = replace(companion(role), result={"judgement": decided})
                self.asked[role] = Windows(data, AskedNetwork(finished, data.flat))

    def scores(self, told: Scores, ask: Callable[[str], Scores]) -> dict[str, Scores]:
        """Returns the final scores of the others, by role."""
        found: dict[str, Scores] = {}
        for role, windows in self.asked.items():
            with self._missed(role):
                final = {folder: windows.scorer.combine(raw) for folder, raw in ask(role).items()}
                check_scores(ModelScores(validation=np.empty(0), test=final))
                found[role] = final
        return found

    def completed(self, judgement: Judgement, told: Scores, timed: TimedScore) -> dict[str, Any]:
        """Adds everyone's size and speed."""
        beside = {role: {**self._result["beside"][role], **decided} for role, decided in judgement["beside"].items()}
        compared = {
            name: {**known, "windows_per_second": timed.speed("" if name == STUDENT else name)}
            for name, known in self._result["compared"].items()
            if name == STUDENT or name in beside
        }
        return {**judgement, "beside": beside, "compared": compared}

    @contextmanager
    def _missed(self, role: str) -> Iterator[None]:
        """Goes on without a model that cannot be had."""
        try:
            yield
        except CanTrainError as error:
            self.absent[role] = ": ".join(filter(None, (error.rule, error.value)))


class Mixed(Alone):
    """An agent, beside the simple mixes of the two scores that it sees.

    Args:
        result: The run's own judgement.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        super().__init__(result, {name: why for name, why in result["absent_floors"].items() if name == BEST_MIX})

    def scores(self, told: Scores, ask: Callable[[str], Scores]) -> dict[str, Scores]:
        """Returns the scores of the mixes, by name."""
        mixes = {name: mix_from_plain(plain) for name, plain in self._result["mixing"]["mixes"].items()}
        return {
            name: {folder: mix.score(seen(raw), np.arange(len(raw))) for folder, raw in told.items()}
            for name, mix in mixes.items()
        }

    def completed(self, judgement: Judgement, told: Scores, timed: TimedScore) -> dict[str, Any]:
        """Adds which weights the agent chose."""
        return with_choices(judgement, self._result["mixing"], {folder: raw[:, WEIGHT] for folder, raw in told.items()})


def beside_of(finished: FinishedModel, data: CanData, companion: Companion) -> Alone:
    """Makes ready what a run's model was judged beside.

    Args:
        finished: What the run has trained.
        data: The windows.
        companion: Reads the models that the run builds on.
    """
    result, mode = finished.result["judgement"], finished.run.mode
    if "beside" not in result:
        shown = [name for judged in result.get("test", {}).values() for name in judged.get("beside", {})]
        return Alone(result, dict.fromkeys(shown, _OLDER))
    if isinstance(mode, DistillationSettings):
        return Taught(result, data, companion)
    return Mixed(result) if isinstance(mode, FusionSettings) else Alone(result, {})
