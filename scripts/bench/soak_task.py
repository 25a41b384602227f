"""The task of the soak test: a tiny classifier, whose data are a file in the working folder. A node is broken while
there is a file `broken-NODE`: its jobs end with the error of a GPU whose memory has failed.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import can_train

WIDTH = 4
STEP_S = 0.05
"""Wait of each loss, so that a run lasts some seconds in which it takes no processor."""


class Points(can_train.Task):
    """Points on two sides of a plane."""

    training: ClassVar = {"lr": 0.01, "lr_batch_size": 4, "batch_size": 4, "epochs": 2}

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        """The settings of the task."""

        data: str = "points-0.pt"

    def datasets(self) -> Mapping[str, Any]:
        """Reads the points."""
        points = torch.load(Path(self.settings.data), weights_only=True)
        samples = [(point, int(point[0] > 0)) for point in points]
        return {"train": samples[:-16], "validation": samples[-16:-8], "test": samples[-8:]}

    def model(self) -> nn.Module:
        """Makes a linear classifier."""
        return nn.Linear(WIDTH, 2)

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Computes the cross entropy; fails on a broken node."""
        if Path(f"broken-{os.environ.get('SLURMD_NODENAME')}").exists():
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        time.sleep(STEP_S)
        points, labels = batch
        return {"class": (nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels))}
