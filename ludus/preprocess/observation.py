"""Preprocess observations for networks: float32, features first, rank 1 to 4.

An op is a module that maps tensors ``[T, B, *shape]``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs, network_inputs
from ludus.core.types import Tensors
from ludus.preprocess.chain import check_names, make_chain

CHANNELS = (1, 3, 4)  # sizes of the last dimension of an image that are taken for channels


class ToFloat(nn.Module):
    """Convert any dtype to float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class ScaleImage(nn.Module):
    """Scale uint8 0…255 to float32 0…1 on the network's device; buffers hold uint8."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 255.0


class ChannelsFirst(nn.Module):
    """Move channels first without a copy: ``[…, H, W, C]`` → ``[…, C, H, W]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, -3)


class StackFrames(nn.Module):
    """Merge stacked frames ``[S, C, H, W]`` into one image ``[S·C, H, W]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(-4, -3)  # copies uint8 if channels were last, which is faster than a channels-last image


class ScalarToVector(nn.Module):
    """Convert a scalar to a vector of size 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1)


class OneHot(nn.Module):
    """Concatenate the one-hot vectors of all elements."""

    def __init__(self, sizes: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.choice: Tensor  # of each output
        self.element: Tensor
        self.register_buffer("choice", torch.cat([torch.arange(n) for n in sizes]), persistent=False)
        element = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes), output_size=sum(sizes))
        self.register_buffer("element", element, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._rank == 0:
            return (x.unsqueeze(-1) == self.choice).float()
        flat = x if self._rank == 1 else x.flatten(-self._rank)
        return (flat.index_select(-1, self.element) == self.choice).float()


class ObsPreprocessor(nn.Module):
    """Applies ops to every observation except action masks; ``outputs`` and ``shapes`` are those of the results.

    First come the ops of the settings (``Spec.ops``), which may rename, join and drop observations, then those that
    make a float tensor with features first of what they return.
    """

    def __init__(self, observation: Specs) -> None:
        super().__init__()
        self.specs = specs = network_inputs(observation)
        chains = {name: chain for name, spec in specs.items() if (chain := make_chain(name, spec)).name}
        check_names(chains)
        self.names = [(name, chain.name) for name, chain in chains.items()]  # of observations and results
        self.ops = nn.ModuleList(
            nn.ModuleList([*chain.ops, *make_ops(chain.name, chain.output)]) for chain in chains.values()
        )
        empty = {name: torch.zeros((1, 0, *spec.shape)) for name, spec in specs.items()}
        self.masks: dict[str, str] = {}  # a padded list → its mask
        self.categories: dict[str, int] = {}  # an observation of integers 0 to n − 1, for an embedding → n
        self.shapes = {name: tuple(x.shape[2:]) for name, x in self(empty).items()}
        kinds = {chain.name: chain.output for chain in chains.values()}
        self.outputs: Specs = {name: Spec(shape, "float32", kinds[name].kind) for name, shape in self.shapes.items()}

    def forward(self, observation: Tensors) -> Tensors:
        result: Tensors = {}
        for (source, name), ops in zip(self.names, self.ops, strict=True):
            x = observation[source]
            for op in ops:  # type: ignore[attr-defined]
                x = op(x)
            result[name] = torch.cat([result[name], x], -1) if name in result else x
        return result


def make_ops(name: str, spec: Spec) -> list[nn.Module]:
    """Return the ops for one observation; none for a float32 vector."""
    if spec.kind == "categorical":
        return [OneHot(spec.sizes, len(spec.shape))]
    if len(spec.shape) > 4:
        raise UserError(
            f'Observation "{name}" has shape {spec.shape}: networks take ranks 0 to 4, so flatten some dimensions.'
        )
    ops: list[nn.Module] = []
    image = spec.kind == "continuous" and spec.dtype == "uint8" and len(spec.shape) >= 2 and spec.high == 255
    frame = _frame(spec) if image else spec
    if is_channels_last(frame):
        ops.append(ChannelsFirst())
    if frame is not spec:
        ops.append(StackFrames())
    if image:
        ops.append(ScaleImage())
    elif spec.dtype != "float32":
        ops.append(ToFloat())
    if not spec.shape:
        ops.append(ScalarToVector())
    return ops


def is_channels_last(spec: Spec) -> bool:
    """Return whether an observation is an image ``[H, W, C]``, judging by its shape."""
    if spec.kind != "continuous" or len(spec.shape) != 3:
        return False
    height, width, channels = spec.shape
    return channels in CHANNELS and height not in CHANNELS and min(height, width) > channels


def _frame(spec: Spec) -> Spec:
    """Return the spec of one frame if the observation is a stack of images, else ``spec`` itself."""
    frame = replace(spec, shape=spec.shape[1:], stack=1)
    stacked = len(spec.shape) == 4 and 1 < spec.stack == spec.shape[0]
    return frame if stacked and (is_channels_last(frame) or frame.shape[0] <= max(CHANNELS)) else spec
