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
from torch import Tensor, nn
from torch.nn import functional

from can_train.errors import ConfigError, DataError
from can_train.training.sample_task import Losses, Task
from can_train_tasks.bendr import class_metrics
from can_train_tasks.bendr.network import BendrNetwork
from can_train_tasks.bendr.recording_windows import PlacedWindow, Windows, cut, every_window
from can_train_tasks.bendr.recordings import Recording, digest_of, find_recordings, open_recordings, read_beginnings
from can_train_tasks.bendr.settings import CLASSIFY, PRETRAIN, PRETRAINED, RecordingSettings
from can_train_tasks.bendr.simulated_eeg import synthetic_folder, write_recording

_CONTRAST: Final = "contrast"
_CLASS: Final = "class"
_SAMPLED_WINDOWS: Final = 64  # least number of windows that a plan reads from a recording


class Bendr(Task):
    """Learns to recognise masked steps of recordings (pretraining), or the class of a window (classification)."""

    prediction_parts = ("recording", "{}")

    def datasets(self) -> Mapping[str, Windows]:
        """Reads the recordings into the cache, and returns the windows of each set."""
        files = find_recordings(self.dataset, self.context.data_root)
        if self.dataset.is_synthetic:
            files = sorted(synthetic_folder(self.context.cache, self.dataset).glob("*.csv"))
        recordings = open_recordings(self.dataset, files, self.context.cache, self.context.reporter)
        return self._checked(self._cut(recordings))

    def _cut(self, recordings: Sequence[Recording]) -> dict[str, Windows]:
        return cut(recordings, self.dataset, self.context.state.get("classes", ()),
                   labelled_only=self.mode.name == CLASSIFY)  # fmt: skip

    def sample_datasets(self) -> Mapping[str, Windows]:
        """Reads the beginnings of a few recordings into memory, and returns their windows."""
        dataset = self.dataset
        # Long enough that every set gets a window and a gap in each cycle.
        seconds = max(_SAMPLED_WINDOWS * dataset.stride_s, 10 * dataset.cycles * (dataset.window_s + dataset.gap_s))
        with tempfile.TemporaryDirectory() as folder:
            files = find_recordings(dataset, self.context.data_root)
            if not files:
                files = [Path(folder) / "recording_001.csv"]
                write_recording(files[0], dataset, 0)
            recordings, times = read_beginnings(dataset, files, dataset.samples(seconds))
        if dataset.is_synthetic:
            times *= dataset.synthetic.recordings
        sets = self._checked(self._cut(recordings))
        if times > 1:
            self.estimated_train_rows = round(len(sets["train"]) * times)
            self.sample_note = f"Planned from the beginning of {len(recordings)} of the recordings"
        return sets

    def _checked(self, sets: dict[str, Windows]) -> dict[str, Windows]:
        windows = sets["train"]
        if self.mode.name == CLASSIFY:
            for recording in windows.recordings:
                if not recording.classes:
                    raise DataError("Classification needs a label for each sample", value=f"{recording.path} has none",
                                    remedy="Name it: --set dataset.label=NAME; --mode pretrain needs none"
                                    )  # fmt: skip
            classes = {label for recording in windows.recordings for label in recording.classes}
            if len(classes) < 2:
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
        dataset = replace(self.dataset, channels=list(self._channels), label="", aligned=False, events=[])
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
        """Returns the channels and the classes of the training recordings."""
        return {"channels": [*self._channels], "classes": [*self._classes]}

    @cached_property
    def _channels(self) -> Sequence[str]:
        channels: Sequence[str] = self.context.state.get("channels") or self._train.recordings[0].channels
        return channels

    @cached_property
    def _classes(self) -> Sequence[int]:
        """The classes, ascending: a prediction has a probability for each."""
        if "classes" in self.context.state:
            return [*self.context.state["classes"]]
        return sorted({label for recording in self._train.recordings for label in recording.classes})

    @property
    def _train(self) -> Windows:
        windows = self.sets["train"]
        assert isinstance(windows, Windows)
        return windows

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
        return {_CLASS: (functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))}

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

    def measure(self, samples: Sequence[Any], predictions: Sequence[Any]) -> Mapping[str, float]:
        """Computes balanced accuracy, Matthews' correlation coefficient and the area under the ROC curve."""
        truth = np.array([int(sample["label"]) for sample in samples])
        probabilities = np.stack([np.asarray(prediction, np.float64) for prediction in predictions])
        return class_metrics.classification_metrics(truth, probabilities)

    def baselines(self, samples: Sequence[Any]) -> Mapping[str, Mapping[str, float]]:
        """Returns the accuracy of chance in pretraining, the metrics of two simple classifiers in classification."""
        if self.mode.name == PRETRAIN:
            return {"chance": {"contrastive_accuracy": 1 / (1 + self.mode.negatives)}}
        return class_metrics.baselines(self._train, samples, len(self._classes), self.dataset.sampling_hz)

    def notices(self) -> Sequence[str]:
        """Returns, in classification, the number of windows of each class in each set."""
        if self.mode.name == PRETRAIN:
            return ()
        counts = [f"{name} {np.bincount(windows.labels, minlength=len(self._classes)).tolist()}"
                  for name, windows in self.sets.items() if isinstance(windows, Windows)]  # fmt: skip
        return (f"Windows of each class: {', '.join(counts)}",)

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
