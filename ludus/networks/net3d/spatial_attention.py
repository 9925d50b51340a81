"""Self-attention between the pixels of a map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.attention import EncoderBlock
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize

MAX_PIXELS = 4096  # the cost grows with the square


class SpatialAttention(SubModule):
    """Self-attention between all pixels and their coordinates (Zambaldi et al. 2019): a map in, ``[width, H, W]`` out.

    The blocks are those of transformer_enc. For maps of up to 64×64 pixels, so put a CNN that keeps a map before it.
    """

    dim = 3

    def __init__(
        self, input_shape: Shape, config: NetworkConfig, *, width: Size = 64, layers: Size = 1, heads: Size = 4
    ) -> None:
        super().__init__(input_shape)
        features, height, columns = input_shape
        if height * columns > MAX_PIXELS:
            raise UserError(
                f"a map of {height}×{columns} has more than {MAX_PIXELS} pixels to compare with each other; put a CNN "
                "before it that keeps a map, such as four_conv."
            )
        self.width = width
        self.input = initialize(nn.Linear(features + 2, width), 1.0, config.orthogonal)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, config) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        rows, columns_at = torch.meshgrid(_coordinates(height), _coordinates(columns), indexing="ij")
        self.coordinates: Tensor
        self.register_buffer("coordinates", torch.stack([rows, columns_at], 2).flatten(0, 1), persistent=False)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.width, *self.input_shape[1:]), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        pixels = x.flatten(2).transpose(1, 2)  # [N, H · W, F]
        y = self.input(torch.cat([pixels, self.coordinates.expand(len(x), -1, -1)], 2))
        for block in self.blocks:
            y = block(y, None)
        return self.norm(y).transpose(1, 2).unflatten(2, x.shape[2:]), state


def _coordinates(size: int) -> Tensor:
    """Return positions from −1 to 1, or 0 for a single one."""
    return torch.linspace(-1, 1, size) if size > 1 else torch.zeros(1)
