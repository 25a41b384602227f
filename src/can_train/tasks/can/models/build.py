"""Makes networks from their settings. A GAT sees torch_geometric, which takes seconds to import: each is imported where
it is made.
"""

from typing import Any

from torch import nn

from can_train.tasks.can.models.inputs import InputEncoder
from can_train.tasks.can.settings import GatSettings


def build_network(settings: Any, inputs: InputEncoder, *, projected: int = 0) -> nn.Module:
    """Makes a classifier or an autoencoder, whichever the settings are of.

    Args:
        settings: Of the model.
        inputs: Encoder of IDs and features.
        projected: Of an autoencoder that learns from a teacher: the width of the teacher's latent.
    """
    if isinstance(settings, GatSettings):
        from can_train.tasks.can.models.gat import GatClassifier

        return GatClassifier(settings, inputs)
    from can_train.tasks.can.models.vgae import Vgae

    return Vgae(settings, inputs, projected=projected)
