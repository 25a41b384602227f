"""The graph attention classifier of windows.

Shapes: B graphs, N nodes, E edges.
"""

from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, JumpingKnowledge, global_mean_pool

from can_train.tasks.can.data.batches import GraphBatch
from can_train.tasks.can.data.graphs import EDGE_FEATURES
from can_train.tasks.can.models.inputs import InputEncoder
from can_train.tasks.can.settings import GatSettings

NUM_CLASSES = 2


class GatClassifier(nn.Module):
    r"""Graph attention over a window's ID graph; the outputs of all layers are joined, mean-pooled and classified.

    Each layer is :math:`h_i' = \Vert_k \mathrm{ELU}\left(\sum_{j \in N(i) \cup i} \alpha^k_{ij} W^k h_j\right)`, whose
    attention :math:`\alpha` sees edge features (GAT: Veličković et al., 2018; jumping knowledge: Xu et al., 2018).

    Shapes:
        batch of N nodes and E edges in B graphs → logits [B, 2] (benign, attack).
    """

    def __init__(self, settings: GatSettings, inputs: InputEncoder) -> None:
        super().__init__()
        self.inputs = inputs
        self.dropout = settings.dropout
        width = settings.hidden * settings.heads
        widths = [inputs.width] + [width] * settings.layers
        self.layers = nn.ModuleList(
            GATConv(wide, settings.hidden, heads=settings.heads, dropout=settings.dropout, edge_dim=len(EDGE_FEATURES))
            for wide in widths[:-1]
        )
        self.jump = JumpingKnowledge("cat")
        self.head = _classifier(width * settings.layers, settings)

    def forward(self, batch: GraphBatch) -> Tensor:
        """Returns logits [B, 2]."""
        x, edge_attr = self.inputs(batch)
        outputs = []
        for layer in self.layers:
            x = F.elu(layer(x, batch.edge_index, edge_attr=edge_attr))
            x = F.dropout(x, self.dropout, self.training)
            outputs.append(x)
        pooled = global_mean_pool(self.jump(outputs), batch.batch, batch.num_graphs)
        logits: Tensor = self.head(pooled)
        return logits


def _classifier(width: int, settings: GatSettings) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(settings.head_layers - 1):
        layers += [nn.Linear(width, width), nn.ELU(), nn.Dropout(settings.dropout)]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))
