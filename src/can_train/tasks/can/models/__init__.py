"""Networks of the CAN task.

torch_geometric takes seconds to import, so a network is imported where it is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from can_train.tasks.can.settings import GatSettings

if TYPE_CHECKING:
    from torch import nn

    from can_train.tasks.can.models.inputs import InputEncoder


def build_network(settings: Any, inputs: InputEncoder, *, projected: int = 0) -> nn.Module:
    """Makes a classifier or an autoencoder, according to the class of the settings.

    Args:
        settings: Of the model.
        inputs: Encoder of IDs and features.
        projected: Width of the teacher's latent, for an autoencoder that learns from a teacher.
    """
    if isinstance(settings, GatSettings):
        from can_train.tasks.can.models.gat import GatClassifier

        return GatClassifier(settings, inputs)
    from can_train.tasks.can.models.vgae import Vgae

    return Vgae(settings, inputs, projected=projected)
