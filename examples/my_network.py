"""A custom network: any torch module with observation names as arguments of forward.

In this folder:

ludus train CartPole-v1 --network my_network:Residual
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two residual blocks; Ludus adds a linear layer per output (policy, value)."""

    def __init__(self, inputs: dict[str, tuple[int, ...]], width: int = 64) -> None:
        super().__init__()
        (features,) = inputs["observation"]
        self.embed = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(2)
        )

    def forward(self, observation: Tensor) -> Tensor:  # [N, F] → [N, width]
        x = torch.tanh(self.embed(observation))
        for block in self.blocks:
            x = x + block(x)
        return x
