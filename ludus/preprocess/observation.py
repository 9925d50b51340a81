"""Preprocess observations for networks: float32, features first, rank 1 to 4."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.spec import CHANNELS, Spec, Specs, is_channels_last, network_inputs
from ludus.core.types import Tensors
from ludus.preprocess.chain import make_chains
from ludus.preprocess.config import SETTING

Op = Callable[[Tensor], Tensor]  # a function or a module, on tensors [T, B, *shape]


class OneHot(nn.Module):
    """Concatenate the one-hot vectors of all elements of the last ``rank`` axes."""

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
    """Applies ops to every observation except masks; ``outputs`` and ``shapes`` are those of the results.

    First come the ops of the settings (``Spec.ops``), which may rename, join and drop observations, then those that
    make a float tensor with features first of what they return.

    ``masks`` names the padding mask of each list among the results. It is passed on as bool, and ``outputs`` has it
    too; the padding is zero. Lists to which the op ``pad`` appends entities (``padded``) get a longer or a new mask,
    ``<name>/mask``. ``categories`` are the results that stay integers, with their number of choices.
    """

    def __init__(self, observation: Specs) -> None:
        super().__init__()
        self.specs = specs = network_inputs(observation)
        chains = make_chains({name: spec for name, spec in specs.items() if spec.masks is None})
        self.names = [(name, chain.name) for name, chain in chains.items()]  # of observations and results
        self._chains: list[tuple[str, str, list[Op]]] = [
            (name, chain.name, [*chain.ops, *make_ops(chain.name, chain.output)]) for name, chain in chains.items()
        ]
        # those that are modules, which PyTorch moves to other devices
        self.ops = nn.ModuleList(op for *_, ops in self._chains for op in ops if isinstance(op, nn.Module))
        results = {chain.name: chain.output for chain in chains.values()}
        lists = {name: chain.name for name, chain in chains.items() if chain.output.axes in ("entities", "grid")}
        self.masks = {lists[spec.masks]: name for name, spec in specs.items() if spec.masks in lists}
        padding = {chain.name: chain.padding for chain in chains.values() if chain.padding}
        self.padded = list(padding)
        made = {name: f"{name}/mask" for name in padding if name not in self.masks}
        if taken := [mask for mask in made.values() if mask in specs]:
            raise UserError(
                f'{SETTING} has a pad that makes the mask "{taken[0]}", an observation already; rename that.'
            )
        self.masks |= made
        self._masks = [(name, mask, padding.get(name, 0)) for name, mask in self.masks.items()]
        # of padded lists whose result is no list, such as a flattened one: padding is cleared before the ops
        self._raw_masks = {
            spec.masks: (name, len(specs[spec.masks].shape) - 1)
            for name, spec in specs.items()
            if spec.masks in chains and spec.masks not in lists
        }
        self.categories = {name: spec.sizes[0] for name, spec in results.items() if spec.axes == "grid"}
        dtypes = {name: None if spec.masks is None else torch.bool for name, spec in specs.items()}
        empty = {name: torch.zeros((1, 0, *spec.shape), dtype=dtypes[name]) for name, spec in specs.items()}
        shapes = {name: tuple(x.shape[2:]) for name, x in self(empty).items()}
        self.shapes = {name: shapes[name] for name in results}
        self.outputs: Specs = {}
        for name, spec in results.items():
            if name in self.categories:
                self.outputs[name] = Spec(shapes[name], "int64", "categorical", sizes=spec.sizes, axes="grid")
            else:
                kind = "binary" if spec.kind == "categorical" else spec.kind
                self.outputs[name] = Spec(shapes[name], "float32", kind, axes=spec.axes)
        for name, mask in self.masks.items():
            self.outputs[mask] = Spec(shapes[mask], "bool", "binary", masks=name)

    def select(self, results: Collection[str]) -> ObsPreprocessor:
        """Return a preprocessor that computes only these results, with their masks, from the observations it needs."""
        sources = {source for source, name in self.names if name in results}
        return ObsPreprocessor(
            {name: spec for name, spec in self.specs.items() if name in sources or spec.masks in sources}
        )

    def forward(self, observation: Tensors) -> Tensors:
        result: Tensors = {}
        for source, name, ops in self._chains:
            x = observation[source]
            if source in self._raw_masks:
                mask, trailing = self._raw_masks[source]
                x = torch.where(observation[mask].bool()[(..., *[None] * trailing)], x, 0)
            for op in ops:
                x = op(x)
            result[name] = torch.cat([result[name], x], -1) if name in result else x
        for name, mask, padding in self._masks:
            present = pad_mask(observation.get(mask), result[name], padding) if padding else observation[mask]
            result[mask] = present.bool()
            if name not in self.categories:
                result[name] = clear_padding(result[name], result[mask])
        return result


def pad_mask(mask: Tensor | None, x: Tensor, padding: int) -> Tensor:
    """Return the mask of a list ``x`` ``[…, F, S]`` to which padding was appended; ``mask`` is that before, if any."""
    if mask is None:
        mask = torch.ones((*x.shape[:-2], x.shape[-1] - padding), dtype=torch.bool, device=x.device)
    return nn.functional.pad(mask, (0, padding))


def clear_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Return a list ``[…, F, S]`` with zeros where its mask ``[…, S]`` is False."""
    return torch.where(mask.unsqueeze(-2), x, 0.0)


def make_ops(name: str, spec: Spec) -> list[Op]:
    """Return the ops for one observation; none for a float32 vector."""
    rank = len(spec.shape)
    if spec.kind == "categorical":
        if spec.axes == "grid":
            return [Tensor.long] if spec.dtype != "int64" else []  # an embedding takes int64
        if spec.axes == "entities":
            each = len(spec.sizes) // spec.shape[0]
            return [OneHot(spec.sizes[:each], rank - 1), move_axis(-1, -2)]
        return [OneHot(spec.sizes, rank)]
    if rank > 4 and spec.axes != "vector":
        raise UserError(
            f'Observation "{name}" has shape {spec.shape}: networks take ranks 0 to 4, so flatten some dimensions, or '
            f"all with env.axes {name}=vector."
        )
    ops = _axes_ops(spec)
    if spec.holds_pixels:
        ops.append(lambda x: x / 255.0)  # buffers hold uint8
    elif spec.dtype != "float32":
        ops.append(Tensor.float)
    return ops


def _axes_ops(spec: Spec) -> list[Op]:
    """Return the ops that move features first and give the observation the rank of its axes."""
    rank = len(spec.shape)
    channels_last = is_channels_last(spec.shape[-3:])
    if spec.axes == "vector":
        return [] if rank == 1 else [add_axis(-1) if rank == 0 else lambda x: x.flatten(-rank)]
    if spec.axes == "entities":  # [N, F]
        return [move_axis(-1, -2)]
    if spec.axes == "image":
        if rank == 2:
            return [add_axis(-3)]
        ops = [move_axis(-1, -3)] if channels_last else []
        if rank == 4:  # stacked frames [S, C, H, W] become one image [S·C, H, W]
            ops.append(lambda x: x.flatten(-4, -3))  # copies uint8 if channels were last: faster than channels-last
        return ops
    if rank == 3:  # a clip [D, H, W]
        return [add_axis(-4)]
    if channels_last:  # [D, H, W, C]
        return [move_axis(-1, -4)]
    frames_first = spec.holds_pixels and spec.shape[1] in CHANNELS  # [D, C, H, W]
    return [move_axis(-3, -4)] if frames_first else []


def move_axis(source: int, destination: int) -> Op:
    """Return an op that moves the axis of features or channels without a copy."""
    return lambda x: x.movedim(source, destination)


def add_axis(axis: int) -> Op:
    """Return an op that adds an axis for a single feature or channel."""
    return lambda x: x.unsqueeze(axis)
