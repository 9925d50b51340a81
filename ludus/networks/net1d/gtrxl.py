"""The gated transformer over time, GTrXL."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.attention import FeedForward, check_heads, join_heads, split_heads
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize

GATE_BIAS = 2.0  # initial gates mostly pass their input on, as the paper recommends
LONGEST_PERIOD = 10_000.0  # of the sinusoids that encode distances in time


class GTrXL(SubModule):
    """A gated transformer over the last ``memory`` steps of the episode (GTrXL, Parisotto et al. 2020).

    The hidden state holds the inputs of each layer at these steps, ``memory`` ``[B, layers, memory, width]``, the
    newest last, and their number, ``length`` ``[B, 1]``. Each step attends to itself and to what is in memory, by
    relative positions as in Transformer-XL (Dai et al. 2019); a sequence is one call, with ``first`` in the mask.
    """

    dim = 1
    recurrent = True

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        *,
        width: Size = 64,
        layers: Size = 2,
        heads: Size = 4,
        memory: Size = 32,
    ) -> None:
        super().__init__(input_shape)
        self.width, self.memory = width, memory
        self.input = initialize(nn.Linear(input_shape[0], width), 1.0, config.orthogonal)
        self.blocks = nn.ModuleList(_Block(width, heads, config) for _ in range(layers))
        self.sinusoids: Tensor
        self.register_buffer("sinusoids", _sinusoids(memory + 1, width), persistent=False)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.width,), dim)

    def initial_state(self, batch: int) -> HiddenState:
        zeros = self.input.weight.new_zeros
        return HiddenState(memory=zeros(batch, len(self.blocks), self.memory, self.width), length=zeros(batch, 1))

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        start = state.reset(first[0])
        slot = torch.arange(self.memory, device=x.device)
        # episodes are numbered from 0, the one in memory; -1 is an empty slot
        episode = torch.cat([torch.zeros_like(first[:1]), first[1:]]).cumsum(0).T  # [B, T]
        in_memory = torch.where(slot >= self.memory - start["length"], 0, -1)  # [B, M]
        distance = self._distance(len(x), x.device)  # [T, M + T]
        visible = episode.unsqueeze(2) == torch.cat([in_memory, episode], 1).unsqueeze(1)  # [B, T, M + T]
        visible = (visible & (distance >= 0) & (distance <= self.memory)).unsqueeze(1)
        distance = distance.clamp(0, self.memory)

        y, kept = self.input(x).transpose(0, 1), []  # [B, T, W]
        for block, memory in zip(self.blocks, start["memory"].unbind(1), strict=True):
            steps = torch.cat([memory, y], 1)
            kept.append(steps[:, -self.memory :])
            y = block(y, steps, visible, distance, self.sinusoids)
        last = episode[:, -1:]
        length = (episode == last).sum(1, keepdim=True) + start["length"] * (last == 0)
        length = length.clamp(max=self.memory)
        empty = (slot < self.memory - length).view(len(length), 1, -1, 1)
        new_state = HiddenState(memory=torch.stack(kept, 1).masked_fill(empty, 0), length=length)
        return y.transpose(0, 1), new_state

    def _distance(self, time: int, device: torch.device) -> Tensor:
        """Return how many steps each of memory and sequence lies before each step of the sequence ``[T, M + T]``."""
        now = torch.arange(self.memory, self.memory + time, device=device).unsqueeze(1)
        return now - torch.arange(self.memory + time, device=device)


class _Block(nn.Module):
    """Attention over time and a feed-forward network, each on normalized input and joined to it by a gate."""

    def __init__(self, width: int, heads: int, config: NetworkConfig) -> None:
        super().__init__()
        check_heads(width, heads)
        self.heads = heads
        self.norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = initialize(nn.Linear(width, width, bias=False), 1.0, config.orthogonal)
        self.key = initialize(nn.Linear(width, width, bias=False), 1.0, config.orthogonal)
        self.value = initialize(nn.Linear(width, width, bias=False), 1.0, config.orthogonal)
        self.position = initialize(nn.Linear(width, width, bias=False), 1.0, config.orthogonal)
        self.output = initialize(nn.Linear(width, width), 1.0, config.orthogonal)
        self.content_bias = nn.Parameter(torch.zeros(heads, 1, width // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, 1, width // heads))
        self.feed_forward = FeedForward(width, config)
        self.gate, self.feed_forward_gate = _Gate(width, config), _Gate(width, config)

    def forward(self, x: Tensor, steps: Tensor, visible: Tensor, distance: Tensor, sinusoids: Tensor) -> Tensor:
        x = self.gate(x, torch.relu(self._attend(x, self.norm(steps), visible, distance, sinusoids)))
        y: Tensor = self.feed_forward_gate(x, torch.relu(self.feed_forward(self.feed_forward_norm(x))))
        return y

    def _attend(self, x: Tensor, steps: Tensor, visible: Tensor, distance: Tensor, sinusoids: Tensor) -> Tensor:
        query = split_heads(self.query(steps[:, -x.shape[1] :]), self.heads)  # [B, H, T, D]
        key, value = (split_heads(layer(steps), self.heads) for layer in (self.key, self.value))  # [B, H, M + T, D]
        position = split_heads(self.position(sinusoids).unsqueeze(0), self.heads)  # [1, H, M + 1, D]
        score = (query + self.position_bias) @ position.mT / query.shape[-1] ** 0.5  # [B, H, T, M + 1]
        score = score.gather(3, distance.expand(*score.shape[:3], -1)).masked_fill(~visible, -torch.inf)
        found = functional.scaled_dot_product_attention(query + self.content_bias, key, value, score)
        y: Tensor = self.output(join_heads(found))
        return y


class _Gate(nn.Module):
    """The gate of a GRU, with the input of a block as state and its output ``y`` as input."""

    def __init__(self, width: int, config: NetworkConfig) -> None:
        super().__init__()
        self.from_y = initialize(nn.Linear(width, 3 * width), 1.0, config.orthogonal)
        self.from_x = initialize(nn.Linear(width, 2 * width, bias=False), 1.0, config.orthogonal)
        self.candidate = initialize(nn.Linear(width, width, bias=False), 1.0, config.orthogonal)
        self.from_y.bias.data[width : 2 * width] -= GATE_BIAS

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        reset_y, update_y, candidate_y = self.from_y(y).chunk(3, -1)
        reset_x, update_x = self.from_x(x).chunk(2, -1)
        candidate = torch.tanh(candidate_y + self.candidate(torch.sigmoid(reset_y + reset_x) * x))
        return torch.lerp(x, candidate, torch.sigmoid(update_y + update_x))


def _sinusoids(distances: int, width: int) -> Tensor:
    """Return sines and cosines of distances in time, ``[distances, width]``, as in Vaswani et al. (2017)."""
    period = LONGEST_PERIOD ** (torch.arange(0, width, 2) / width)
    angle = torch.arange(distances).unsqueeze(1) / period
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)[:, :width]
