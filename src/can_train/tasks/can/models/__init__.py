"""Networks of the CAN task; `build_network` imports the one that a run trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from can_train.tasks.can.settings import GatSettings

if TYPE_CHECKING:
    from torch import nn

    from can_train.tasks.can.models.inputs import InputEncoder


def build_network(settings: Any, inputs: InputEncoder, *, projected: int = 0) -> nn.Module:
    """Makes a classifier or an autoencoder, which projects its latent to a teacher's width if it learns from one."""
    if isinstance(settings, GatSettings):
        from can_train.tasks.can.models.gat import GatClassifier

        return GatClassifier(settings, inputs)
    from can_train.tasks.can.models.vgae import Vgae

    return Vgae(settings, inputs, projected=projected)
