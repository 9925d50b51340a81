"""A custom network for Graph observations: messages along the edges. docs/observations.md explains its inputs.

In this folder:

ludus train ludus.environments.entity_toy:NeighbourEnv --env.max-length 6 --network my_graph_network:MessagePassing
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MessagePassing(nn.Module):
    """Each edge sends a message to the node that it leaves; the features are the sum over all nodes."""

    def __init__(self, inputs: dict[str, tuple[int, ...]], width: int = 32, rounds: int = 2) -> None:
        super().__init__()
        node_features, self.nodes = inputs["observation/nodes"]
        edge_features, _ = inputs["observation/edges"]
        self.embed = nn.Linear(node_features, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width + edge_features, width) for _ in range(rounds))

    def forward(
        self,
        observation_nodes: Tensor,  # [N, F, nodes]
        observation_edges: Tensor,  # [N, F, edges]
        observation_edge_links: Tensor,  # [N, 2 · nodes, edges]: one-hot vectors of both ends, zero for padding
        observation_nodes_mask: Tensor,  # [N, nodes]
    ) -> Tensor:
        start, end = observation_edge_links.mT.split(self.nodes, -1)  # [N, edges, nodes] each
        x = torch.relu(self.embed(observation_nodes.mT))  # [N, nodes, width]
        for layer in self.messages:
            message = torch.relu(layer(torch.cat([start @ x, end @ x, observation_edges.mT], -1)))
            x = x + start.mT @ message  # padding has no start, so it sends nothing
        return (x * observation_nodes_mask.unsqueeze(-1)).sum(1)
