"""The EEG task: contrastive pretraining on long time series without labels, then classification of windows.

Shapes: n windows, C channels, L samples, S steps of the encoded sequence, K negatives.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from can_train.errors import ConfigError, DataError
from can_train.io.units import counted
from can_train.training.sample_task import Task
from can_train.training.task_values import Losses
from can_train_tasks.bendr import class_metrics
from can_train_tasks.bendr.network import BendrNetwork
from can_train_tasks.bendr.recording_windows import PlacedWindow, Windows, classes_of, cut, every_window
from can_train_tasks.bendr.recordings import (
    Recording,
    clock_hz,
    digest_of,
    find_recordings,
    open_recordings,
    place_of,
    read_beginnings,
)
from can_train_tasks.bendr.settings import CLASSIFY, PRETRAIN, PRETRAINED, RecordingSettings
from can_train_tasks.bendr.simulated_eeg import synthetic_folder, write_recording
from can_train_tasks.bendr.subjects import SETS, describe_split, split_subjects, subjects_of

_CONTRAST: Final = "contrast"
_CLASS: Final = "class"
_SETS_OF_RECORDINGS: Final = "sets"  # In the state: set of each recording by its digest, where subjects are split
_OTHER_RATE: Final = 0.05  # Relative difference of a clock's rate that is told
_SPLIT_BY_TIME: Final = "recordings"  # In the state: digests of the recordings that are split by time
_TEST: Final = SETS[2]
_NAMED_CHANNELS: Final = 20  # that a notice names
_SAMPLED_WINDOWS: Final = 64  # least number of windows that a plan reads from a recording


class Bendr(Task):
    """Learns to recognise masked steps of recordings (pretraining), or the class of a window (classification)."""

    prediction_parts = ("recording", "{}")
    _split: Mapping[str, str] = {}  # Set of each subject; empty where recordings are split by time
    _recording_sets: Mapping[str, str] = {}  # Set of each recording, by its digest

    def datasets(self) -> Mapping[str, Windows]:
        """Reads the recordings into the cache, and returns the windows of each set."""
        files = find_recordings(self.dataset, self.context.data_root)
        place = place_of(self.dataset, self.context.data_root)
        if self.dataset.is_synthetic:
            place = synthetic_folder(self.context.cache, self.dataset)
            files = sorted(place.glob("*.csv"))
        subjects = self._subjects(files, place)
        recordings = open_recordings(self.dataset, files, self.context.cache, self.context.reporter)
        channels = self.context.state.get("channels")
        if channels and [*recordings[0].channels] != [*channels]:
            # Other recordings may have more channels than those of the run, or another order.
            dataset = replace(self.dataset, channels=[*channels])
            recordings = open_recordings(dataset, files, self.context.cache, self.context.reporter)
        sets = self._sets_of(recordings, subjects)
        return self._weighted(self._checked(self._cut(recordings, sets)))

    def _subjects(self, files: Sequence[Path], place: Path) -> list[str]:
        """Returns the subject of each file; none where recordings are split by time. Notes the set of each subject."""
        if not self.dataset.by_subject:
            if _SETS_OF_RECORDINGS in self.context.state:
                raise ConfigError("A run that split subjects is evaluated on subjects", value="dataset.subject is off",
                                  remedy="Say which recordings are of one: --set dataset.subject=file")  # fmt: skip
            return []
        subjects = subjects_of(self.dataset, files, place)
        if _SETS_OF_RECORDINGS not in self.context.state:
            self._split = split_subjects(self.dataset, subjects)
        return subjects

    def _sets_of(self, recordings: Sequence[Recording], subjects: Sequence[str]) -> list[str]:
        """Returns the set of each recording; empty where the recording is split by time.

        A run that is evaluated has the sets of its training. New recordings are tested, unless their subject has a
        recording that trained or validated.
        """
        if not subjects:
            earlier = self.context.state.get(_SPLIT_BY_TIME, [recording.sha256 for recording in recordings])
            return ["" if recording.sha256 in earlier else _TEST for recording in recordings]
        if subjects and _SETS_OF_RECORDINGS in self.context.state:
            earlier = self.context.state[_SETS_OF_RECORDINGS]
            used = {subject: earlier[recording.sha256] for recording, subject in zip(recordings, subjects, strict=True)
                    if earlier.get(recording.sha256, _TEST) != _TEST}  # fmt: skip
            self._split = {subject: used.get(subject, _TEST) for subject in subjects}
            if _TEST not in self._split.values():
                raise DataError("A subject that trained or validated a model does not test it",
                                value=f"all {len(recordings)} recordings are of such subjects",
                                remedy="Evaluate on recordings of other subjects")  # fmt: skip
        sets = [self._split[subject] for subject in subjects]
        self._recording_sets = {recording.sha256: name for recording, name in zip(recordings, sets, strict=False)}
        return sets

    def _cut(self, recordings: Sequence[Recording], sets: Sequence[str]) -> dict[str, Windows]:
        return cut(recordings, self.dataset, self.context.state.get("classes", ()), sets=sets,
                   labelled_only=self.mode.name == CLASSIFY)  # fmt: skip

    def _weighted(self, sets: dict[str, Windows]) -> dict[str, Windows]:
        """Gives windows the weights of their classes: an average training window has the weight 1."""
        if self.mode.name != CLASSIFY or self.dataset.balance != "weights":
            return sets
        if not (weights := self.context.state.get("class_weights", ())):
            counts = np.bincount(sets[SETS[0]].labels, minlength=len(self._classes_in(sets[SETS[0]].recordings)))
            there = np.count_nonzero(counts)
            # Rounded as batches have them, so that an evaluation has the same weights.
            weights = (counts.sum() / (there * np.maximum(counts, 1))).astype(np.float32).tolist()
        return {name: replace(windows, weights=weights) for name, windows in sets.items()}

    def sample_datasets(self) -> Mapping[str, Windows]:
        """Reads the beginnings of a few recordings into memory, and returns their windows."""
        dataset = self.dataset
        # Long enough that every set gets a window and a gap in each cycle.
        seconds = max(_SAMPLED_WINDOWS * dataset.stride_s, 10 * dataset.cycles * (dataset.window_s + dataset.gap_s))
        with tempfile.TemporaryDirectory() as folder:
            files, place = find_recordings(dataset, self.context.data_root), Path(folder)
            if not files:
                # By time, one recording stands for all; subjects are split by the names of all.
                files = [place / f"recording_{number + 1:03}.csv"
                         for number in range(dataset.synthetic.recordings if dataset.by_subject else 1)]  # fmt: skip
                for number, path in enumerate(files):
                    write_recording(path, dataset, number)
            else:
                place = place_of(dataset, self.context.data_root)
            subjects = self._subjects(files, place)
            of = {path: self._split[subject] for path, subject in zip(files, subjects, strict=False)}
            parts = [[path for path in files if of.get(path, SETS[0]) == name] for name in SETS]
            beside = [path for part in parts[1:] for path in part[:1]]
            recordings, times = read_beginnings(dataset, parts[0], dataset.samples(seconds), beside=beside)
        if dataset.is_synthetic and not dataset.by_subject:
            times *= dataset.synthetic.recordings
        sets = self._checked(self._cut(recordings, [of[recording.path] for recording in recordings] if of else []))
        if times > 1:
            self.estimated_train_rows = round(len(sets["train"]) * times)
            self.sample_note = f"planned from the beginning of {len(recordings)} of the recordings"
        return self._weighted(sets)

    def _checked(self, sets: dict[str, Windows]) -> dict[str, Windows]:
        # Where new recordings are evaluated, tested windows stand for the windows of sets that need not be there.
        sets = {name: sets.get(name, sets[_TEST]) for name in SETS}
        windows = sets[SETS[0]]
        if self.mode.name == CLASSIFY:
            for recording in windows.recordings:
                if not recording.classes:
                    raise DataError("Classification needs a label for each sample", value=f"{recording.path} has none",
                                    remedy="Name it: --set dataset.label=NAME; --mode pretrain needs none"
                                    )  # fmt: skip
            classes = {label for recording in windows.recordings for label in recording.classes}
            # A night begins awake: its beginning shows one class of those that the settings name.
            expected = self.dataset.declared_classes if self.context.sampling else self.context.state.get("classes", ())
            if len(classes) < 2 and len(expected) < 2:
                raise DataError("Classification needs two classes", value=f"all labels are {min(classes)}",
                                remedy="Give recordings of another class, too")  # fmt: skip
        elif (steps := self.model_settings.steps(windows.length)) <= self.mode.mask_span:
            raise ConfigError("A window must have more steps than a masked span", value=f"{steps} steps with "
                              f"dataset.window_s {self.dataset.window_s:g} and model.strides "
                              f"{self.model_settings.strides}; mode.mask_span {self.mode.mask_span}",
                              remedy=f"Give --set dataset.window_s={4 * self.dataset.window_s:g}")  # fmt: skip
        return sets

    def samples_to_predict(self) -> Windows:
        """Reads recordings, which need no labels; windows follow each other from the beginning of each recording."""
        if self.mode.name == PRETRAIN:
            raise ConfigError("A pretrained run has no classes to predict",
                              remedy="Train a classifier from it: --mode classify --pretrained RUN")  # fmt: skip
        # The channels of the training recordings, by their names, and no labels.
        dataset = replace(self.dataset, channels=list(self._channels), label="", aligned=False, events=[], target="",
                          event_column="")  # fmt: skip
        files = find_recordings(dataset, self.context.data_root)
        return every_window(open_recordings(dataset, files, self.context.cache, self.context.reporter), dataset)

    def columns(self, samples: Sequence[PlacedWindow], predictions: Sequence[Any]) -> Mapping[str, Sequence[Any]]:
        """Returns the place of each window in its recording, in seconds, its class, and the probability of each
        class.
        """
        hz, shares = self.dataset.sampling_hz, np.stack([np.asarray(prediction) for prediction in predictions])
        starts, best = np.array([window.start for window in samples]), shares.argmax(axis=1)
        return {
            "recording": [self._named(window.recording.path) for window in samples],
            "start_s": starts / hz,
            "end_s": (starts + self.dataset.samples(self.dataset.window_s)) / hz,
            "class": [self._classes[position] for position in best],
            "probability": shares[np.arange(len(best)), best],
            **{f"probability_{label}": shares[:, position] for position, label in enumerate(self._classes)},
        }

    def _named(self, path: Path) -> str:
        """Names a recording by its file, in a folder of them by the way to it."""
        place = Path(self.dataset.path)
        inside = self.dataset.path and path.is_relative_to(place) and path != place
        return (path.relative_to(place).with_suffix("").as_posix()) if inside else path.stem

    def state(self) -> Mapping[str, Any]:
        """Returns the channels and the classes of the training recordings; where subjects are split, the set of each
        recording, else the digests of the recordings; the weights of classes, if they have weights.
        """
        state: dict[str, Any] = {"channels": [*self._channels], "classes": [*self._classes]}
        if self._recording_sets:
            state[_SETS_OF_RECORDINGS] = dict(self._recording_sets)
        else:
            state[_SPLIT_BY_TIME] = [recording.sha256 for recording in self._train.recordings]
        return state | ({"class_weights": [*self._train.weights]} if self._train.weights else {})

    @cached_property
    def _channels(self) -> Sequence[str]:
        channels: Sequence[str] = self.context.state.get("channels") or self._train.recordings[0].channels
        return channels

    @cached_property
    def _classes(self) -> Sequence[int]:
        """The classes, ascending: a prediction has a probability for each."""
        return self._classes_in(self._train.recordings if "classes" not in self.context.state else ())

    @property
    def _train(self) -> Windows:
        windows = self.sets["train"]
        assert isinstance(windows, Windows)
        return windows

    def _classes_in(self, recordings: Sequence[Recording]) -> Sequence[int]:
        return [*(self.context.state.get("classes") or classes_of(recordings, self.dataset))]

    def model(self) -> nn.Module:
        """Makes the model; a classifier takes all weights but the head's from the pretrained run, if there is one."""
        channels = len(self._channels)
        if self.mode.name == PRETRAIN:
            return BendrNetwork(self.model_settings, channels)
        network = BendrNetwork(self.model_settings, channels, len(self._classes))
        if pretrained := self.context.finished.get(PRETRAINED):
            _take_over(network, pretrained)
        return network

    def draw(self, samples: Sequence[Any], generator: torch.Generator) -> Sequence[Any]:
        """Draws, in pretraining, the masked steps of each window and the negatives of each step."""
        if self.mode.name != PRETRAIN:
            return samples
        steps = self.model_settings.steps(self._train.length)
        return [{**sample, "masked": draw_mask(steps, self.mode.mask_rate, self.mode.mask_span, generator),
                 "negatives": draw_negatives(steps, self.mode.negatives, generator)}
                for sample in samples]  # fmt: skip

    @property
    def _samples_classes(self) -> bool:
        return self.mode.name == CLASSIFY and self.dataset.balance in ("undersample", "oversample")

    def sampler(self, epoch: int) -> NDArray[np.int64] | None:
        """Draws, with `dataset.balance`, as many windows of each class: of the rarest class or of the most frequent."""
        if not self._samples_classes:
            return None
        classes = [members for label in range(len(self._classes))
                   if len(members := np.flatnonzero(self._train.labels == label))]  # fmt: skip
        size = (min if self.dataset.balance == "undersample" else max)(map(len, classes))
        drawn = []
        for members in classes:
            # Whole rounds of a class, and a part of a round: no window comes twice more often than another.
            rounds = [torch.randperm(len(members)).numpy() for _ in range(-(-size // len(members)))]
            drawn.append(members[np.concatenate(rounds)[:size]])
        windows = np.concatenate(drawn)
        shuffled: NDArray[np.int64] = windows[torch.randperm(len(windows)).numpy()]
        return shuffled

    def planned_order(self, rows: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Returns the windows of an epoch for a plan, which may repeat a sample of the windows to their number."""
        order = super().planned_order(rows, seed=seed, epoch=epoch)
        if not self._samples_classes:
            return order
        return np.resize(order, round(len(order) * len(rows) / len(np.unique(rows))))

    def may_live_on_device(self) -> bool:
        """Returns True: a window is the same each time, and masks and negatives are drawn beside it."""
        return True

    def denominators(self, samples: Sequence[Any]) -> Mapping[str, float]:
        """Counts the masked steps in pretraining, and the windows in classification."""
        if self.mode.name == PRETRAIN:
            return {_CONTRAST: float(sum(int(sample["masked"].sum()) for sample in samples))}
        return {_CLASS: float(len(samples))}

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Computes the cross-entropy: of the true step against its negatives at masked steps, or of the classes."""
        if self.mode.name == PRETRAIN:
            masked = batch["masked"]
            logits = self._contrast(model, batch)
            # Multiplied by the mask, not indexed with it: a varying number of masked steps would vary the memory.
            each = functional.cross_entropy(logits.transpose(1, 2), torch.zeros_like(masked, dtype=torch.long),
                                            reduction="none")  # fmt: skip
            return {_CONTRAST: ((each * masked).sum(), masked.sum())}
        logits = model(batch["signal"])
        each = functional.cross_entropy(logits, batch["label"], reduction="none")
        return {_CLASS: ((each * batch["weight"] if "weight" in batch else each).sum(), len(logits))}

    def _contrast(self, model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, BendrNetwork)
        return model.contrast(batch["signal"], batch["masked"], batch["negatives"], self.mode.temperature)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | Tensor, float | Tensor]]:
        """Computes, in pretraining, the share of masked steps where the true step beats all negatives."""
        if self.mode.name != PRETRAIN:
            return {}
        logits, masked = self._contrast(model, batch), batch["masked"]
        # Strictly greater: a model that gives all steps the same logit has recognised nothing.
        found = (logits[..., 0] > logits[..., 1:].amax(-1)) & masked
        return {"contrastive_accuracy": (found.sum(), masked.sum())}

    def call_model(self, model: nn.Module, batch: Any) -> None:
        """Classifies the windows; after pretraining, relates their steps, of which none is hidden."""
        assert isinstance(model, BendrNetwork)
        if self.mode.name == PRETRAIN:
            model.contextualizer(model.encode(batch["signal"]))
        else:
            model(batch["signal"])

    def predict(self, model: nn.Module, batch: Any) -> Tensor | None:
        """Computes, in classification, the probabilities [n, classes]."""
        return None if self.mode.name == PRETRAIN else model(batch["signal"]).float().softmax(dim=1)

    def labels(self, samples: Sequence[Any]) -> Sequence[int] | None:
        """Returns the class of each window in classification."""
        return None if self.mode.name == PRETRAIN else [int(sample["label"]) for sample in samples]

    def measure(self, samples: Sequence[Any], predictions: Sequence[Any]) -> Mapping[str, float]:
        """Computes balanced accuracy, Matthews' correlation coefficient and the area under the ROC curve."""
        truth = np.array([int(sample["label"]) for sample in samples])
        probabilities = np.stack([np.asarray(prediction, np.float64) for prediction in predictions])
        return class_metrics.classification_metrics(truth, probabilities)

    def baselines(self, samples: Sequence[Any]) -> Mapping[str, Mapping[str, float]]:
        """Returns the accuracy of chance in pretraining, the metrics of two simple classifiers in classification."""
        if self.mode.name == PRETRAIN:
            return {"chance": {"contrastive_accuracy": 1 / (1 + self.mode.negatives)}}
        if self._split and SETS[0] not in self._split.values():
            return {}
        return class_metrics.baselines(self._train, samples, len(self._classes), self.dataset.sampling_hz)

    def notices(self) -> Sequence[str]:
        """Returns the channels where the settings do not name them, the subjects of each set, and in classification
        the number of its windows of each class.
        """
        told = [describe_split(self.dataset, self._split)] if self._split else []
        if not self.dataset.is_synthetic and not self.dataset.channels:
            told.append(f"{counted(len(self._channels), 'channel')}: {', '.join(self._channels[:_NAMED_CHANNELS])}"
                        f"{', …' * (len(self._channels) > _NAMED_CHANNELS)}")  # fmt: skip
        told += self._other_clocks()
        if self.mode.name == PRETRAIN:
            return told
        counts = [f"{name} {np.bincount(windows.labels, minlength=len(self._classes)).tolist()}"
                  for name, windows in self.sets.items() if isinstance(windows, Windows)]  # fmt: skip
        place = " at the beginnings of the recordings" if self.sample_note else ""
        return [*told, f"Windows of each class{place}: {', '.join(counts)}"]

    def _other_clocks(self) -> list[str]:
        """Tells of the first recording whose column of times has another rate than the settings."""
        hz = self.dataset.sampling_hz
        paths = {recording.path: None for windows in self.sets.values() if isinstance(windows, Windows)
                 for recording in windows.recordings}  # fmt: skip
        for path in () if self.dataset.is_synthetic else paths:
            if (rate := clock_hz(path)) is not None and abs(rate / hz - 1) > _OTHER_RATE:
                told = (
                    f"The times of {path.name} are those of {rate:.4g} samples a second; dataset.sampling_hz is {hz:g}"
                )
                return [f"{told}: windows and times in seconds are by the setting"]
        return []

    def describe(self, row: int) -> str:
        """Names a window by its file and its start in seconds."""
        for windows in self.sets.values():
            if row < len(windows):
                assert isinstance(windows, Windows)
                path = windows.recordings[int(windows.of[row])].path
                return f"{path.name} at {windows.starts[row] / self.dataset.sampling_hz:.2f} s"
            row -= len(windows)
        return super().describe(row)

    def data_digest(self) -> str:
        """Returns the digest of the files; empty for simulated recordings."""
        return "" if self.dataset.is_synthetic else digest_of([one.sha256 for one in self._train.recordings])

    @classmethod
    def files(cls, dataset: RecordingSettings, data_root: Path) -> Sequence[Path]:
        """Lists the files of a data set."""
        return find_recordings(dataset, data_root)


def draw_mask(steps: int, rate: float, span: int, generator: torch.Generator) -> Tensor:
    """Draws the mask [S]: `rate` · S spans (at least one) of `span` steps inside the sequence; spans may overlap."""
    starts = torch.randperm(steps - span + 1, generator=generator)[: max(1, round(rate * steps))]
    masked = torch.zeros(steps, dtype=torch.bool)
    masked[(starts[:, None] + torch.arange(span)).flatten()] = True
    return masked


def draw_negatives(steps: int, number: int, generator: torch.Generator) -> Tensor:
    """Draws for each step K = `number` other steps of the sequence, with replacement: [S, K]."""
    return (torch.arange(steps)[:, None] + torch.randint(1, steps, (steps, number), generator=generator)) % steps


def _take_over(network: BendrNetwork, pretrained: Any) -> None:
    """Loads the weights of a pretrained run, except the head.

    Raises:
        ConfigError: A weight is absent from the network or has another shape.
    """
    fresh = network.state_dict()
    weights = {name: value for name, value in pretrained.weights.items() if not name.startswith("head.")}
    different = [name for name, value in weights.items() if name not in fresh or fresh[name].shape != value.shape]
    if different:
        raise ConfigError("A pretrained run must have the same channels and model", value=f"{pretrained.run_id}: "
                          f"{different[0]} differs", remedy="Pretrain on recordings with these channels")  # fmt: skip
    network.load_state_dict(fresh | weights)
