"""Ops from raw observations to what a network takes: float32, features first, of rank 1 to 4.

An op takes tensors ``[T, B, *shape]``, and its method ``shape`` says what becomes of the shape of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs, network_inputs
from ludus.core.types import Tensors

Shape = tuple[int, ...]
CHANNELS = (1, 3, 4)  # what the last dimension of an image may be for it to be taken as channels


class Float(nn.Module):
    """Any dtype → float32."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class UnitImage(nn.Module):
    """Bytes 0…255 → float32 0…1, on the network's device at the moment of use: caches hold bytes."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, x: Tensor) -> Tensor:
        return x / 255.0


class ChannelsFirst(nn.Module):
    """``[H, W, C]`` → ``[C, H, W]``, also of every image in a stack, without a copy."""

    def shape(self, shape: Shape) -> Shape:
        return (*shape[:-3], shape[-1], *shape[-3:-1])

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, -3)


class Frames(nn.Module):
    """A stack of images ``[S, C, H, W]`` → one image ``[S·C, H, W]``, frame after frame."""

    def shape(self, shape: Shape) -> Shape:
        return (shape[0] * shape[1], *shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(-4, -3)  # copies bytes if channels were behind: quicker than to end channels-last


class Vector(nn.Module):
    """A number → a vector of one."""

    def shape(self, shape: Shape) -> Shape:
        return (1,)

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1)


class OneHot(nn.Module):
    """Choices of any shape → their one-hot vectors, one after another."""

    def __init__(self, sizes: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.choice: Tensor
        self.owner: Tensor
        self.register_buffer("choice", torch.cat([torch.arange(n) for n in sizes]), persistent=False)
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes), output_size=sum(sizes))
        self.register_buffer("owner", owner, persistent=False)

    def shape(self, shape: Shape) -> Shape:
        return tuple(self.choice.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self._rank == 0:
            return (x.unsqueeze(-1) == self.choice).float()
        flat = x if self._rank == 1 else x.flatten(-self._rank)
        return (flat.index_select(-1, self.owner) == self.choice).float()


class ObsPreprocessor(nn.Module):
    """The ops of every observation that a network sees, by name; ``shapes`` says what comes out. Masks are left out."""

    def __init__(self, observation: Specs) -> None:
        super().__init__()
        self.specs = specs = network_inputs(observation)
        self.ops = nn.ModuleList(nn.ModuleList(make_ops(name, spec)) for name, spec in specs.items())
        self.shapes = {name: _out(spec.shape, make_ops(name, spec)) for name, spec in specs.items()}

    def forward(self, observation: Tensors) -> Tensors:
        result: Tensors = {}
        for name, ops in zip(self.specs, self.ops, strict=True):
            x = observation[name]
            for op in ops:  # type: ignore[attr-defined]
                x = op(x)
            result[name] = x
        return result


def make_ops(name: str, spec: Spec) -> list[nn.Module]:
    """The ops for one observation; none for a float32 vector."""
    if spec.kind == "categorical":
        return [OneHot(spec.sizes, len(spec.shape))]
    if len(spec.shape) > 4:
        raise UserError(
            f'Observation "{name}" has shape {spec.shape}: networks take ranks 0 to 4, so flatten some of it.'
        )
    ops: list[nn.Module] = []
    image = spec.kind == "continuous" and spec.dtype == "uint8" and len(spec.shape) >= 2 and spec.high == 255
    frame = _frame(spec) if image else spec
    if is_channels_last(frame):
        ops.append(ChannelsFirst())
    if frame is not spec:
        ops.append(Frames())
    if image:
        ops.append(UnitImage())
    elif spec.dtype != "float32":
        ops.append(Float())
    if not spec.shape:
        ops.append(Vector())
    return ops


def is_channels_last(spec: Spec) -> bool:
    """Whether an observation is an image ``[H, W, C]``: few channels behind, and not few in front."""
    if spec.kind != "continuous" or len(spec.shape) != 3:
        return False
    height, width, channels = spec.shape
    return channels in CHANNELS and height not in CHANNELS and min(height, width) > channels


def _frame(spec: Spec) -> Spec:
    """One image of what is a stack of them for sure; anything else as it is."""
    frame = replace(spec, shape=spec.shape[1:], stack=1)
    stacked = len(spec.shape) == 4 and 1 < spec.stack == spec.shape[0]
    return frame if stacked and (is_channels_last(frame) or frame.shape[0] <= max(CHANNELS)) else spec


def _out(shape: Shape, ops: list[nn.Module]) -> Shape:
    for op in ops:
        shape = op.shape(shape)  # type: ignore[operator]
    return shape
