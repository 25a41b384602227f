"""Simulated recordings, in the format of real recordings.

People open and close their eyes, and the alpha rhythm at the back of the head shows it, under noise, drift, blinks and
the jumps of a loose electrode. The bytes depend on the settings only.

Shapes: T samples, C channels, from the front of the head to its back.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.io.arrays import writing_folder
from can_train_tasks.bendr.settings import RecordingSettings

# Raise it whenever the same settings give other bytes, so that folders of an earlier version are not used.
GENERATOR_VERSION: Final = 1

_OPEN_S: Final = (2.0, 8.0)  # shortest and longest time between opening and closing the eyes
_ALPHA_HZ: Final = (8.5, 11.5)  # range of people's mean alpha frequency
_ALPHA_UV: Final = 12.0  # alpha amplitude with eyes closed, at the back of the head
_NOISE_UV: Final = 10.0
_OFFSET_UV: Final = 4200.0  # offset of the amplifier, as in Emotiv's recordings
_BLINKS_HZ: Final = 0.3  # blinks per second with eyes open
_BLINK_UV: Final = 90.0
_BLINK_S: Final = 0.3
_JUMPS_HZ: Final = 0.02
_JUMP_UV: Final = 20_000.0

Floats = NDArray[np.float64]


def synthetic_folder(cache: Path, dataset: RecordingSettings) -> Path:
    """Returns the folder of simulated recordings in `cache`; writes it if it is missing.

    Raises:
        StateError: The folder cannot be written.
    """
    identity = f"{GENERATOR_VERSION}:{dataset.sampling_hz!r}:{sorted(asdict(dataset.synthetic).items())}"
    folder = cache / f"synthetic-eeg-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        with writing_folder(folder) as staged:
            for number in range(dataset.synthetic.recordings):
                write_recording(staged / f"recording_{number + 1:03}.csv", dataset, number)
    return folder


def write_recording(path: Path, dataset: RecordingSettings, number: int) -> None:
    """Simulates person `number` and writes the recording."""
    signal, closed = simulate(dataset, number)
    header = ",".join([f"E{channel + 1}" for channel in range(signal.shape[1])] + ["label"])
    np.savetxt(path, np.column_stack([signal, closed]), delimiter=",", header=header, comments="",
               fmt=["%.2f"] * signal.shape[1] + ["%d"])  # fmt: skip


def simulate(dataset: RecordingSettings, number: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Simulates the signal [T, C] in microvolts, and whether the eyes are closed [T]."""
    settings, hz = dataset.synthetic, dataset.sampling_hz
    rng = np.random.default_rng([settings.seed, number])
    samples = max(1, dataset.samples(settings.seconds))
    back = np.linspace(0.1, 1.0, settings.channels)
    closed = _closed(rng, samples, hz)
    phase = 2 * np.pi * np.cumsum(rng.uniform(*_ALPHA_HZ) + rng.normal(0.0, 1.0, samples)) / hz
    rhythm = _ALPHA_UV * np.sin(phase) * np.where(closed, 1.0, 0.15)
    signal = _noise(rng, samples, settings.channels) + np.outer(rhythm, back)
    signal += np.outer(_blinks(rng, closed, hz), 1.1 - back)
    for at in np.flatnonzero(rng.random(samples) < _JUMPS_HZ / hz):
        signal[at, rng.integers(settings.channels)] += rng.choice((-1.0, 1.0)) * _JUMP_UV
    return signal + _OFFSET_UV + rng.normal(0.0, 50.0, settings.channels), closed


def _closed(rng: np.random.Generator, samples: int, hz: float) -> NDArray[np.bool_]:
    changes = np.zeros(samples, dtype=np.int64)
    at = 0
    while (at := at + max(1, round(rng.uniform(*_OPEN_S) * hz))) < samples:
        changes[at] = 1
    closed: NDArray[np.bool_] = (np.cumsum(changes) + rng.integers(2)) % 2 == 1
    return closed


def _noise(rng: np.random.Generator, samples: int, channels: int) -> Floats:
    """Makes noise [T, C] whose power falls as 1/frequency, so that it also drifts slowly."""
    spectrum = np.fft.rfft(rng.normal(size=(samples, channels)), axis=0)
    spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), 1.0))[:, None]
    noise = np.fft.irfft(spectrum, n=samples, axis=0)
    scaled: Floats = noise / noise.std() * _NOISE_UV
    return scaled


def _blinks(rng: np.random.Generator, closed: NDArray[np.bool_], hz: float) -> Floats:
    begins = (rng.random(len(closed)) < _BLINKS_HZ / hz) & ~closed
    shape = np.hanning(max(3, round(_BLINK_S * hz))) * _BLINK_UV
    blinks: Floats = np.convolve(begins.astype(float), shape)[: len(closed)]
    return blinks
