"""Look into modules while they compute: outputs that are not finite, their range, and dead units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from ludus.networks.ensemble import BatchedLinear

ModuleCheck = Callable[[str, nn.Module, tuple[Any, ...], Any], str | None]  # (name, module, inputs, output) → problem
CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)  # layers whose units are on axis 1
SATURATED = 0.99  # of the bound of an activation


def all_finite(value: Any) -> bool:
    """Return whether all floating-point tensors in a nested value are finite."""
    return all(bool(x.isfinite().all()) for x in tensors_in(value) if x.is_floating_point())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return all tensors in nested mappings, tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    for item in inner:
        yield from tensors_in(item)


@contextmanager
def watch_modules(
    root: nn.Module, *watchers: Callable[[str, nn.Module, tuple[Any, ...], Any], object]
) -> Iterator[None]:
    """Call each watcher as ``(name, module, inputs, output)`` after every forward of a module within ``root``."""

    def call(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for watcher in watchers:
            watcher(name, module, (*args, *kwargs.values()), output)

    modules = [(name, module) for name, module in root.named_modules() if name]
    handles = [module.register_forward_hook(partial(call, name), with_kwargs=True) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class FirstNonFinite:
    """Watches modules for the first output with a NaN or Inf, and describes it in ``finding``."""

    finding = ""

    def __call__(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Look at an output."""
        if self.finding or all_finite(output):
            return
        given = "finite" if all_finite(inputs) else "not finite"
        weights = "finite" if all_finite(list(module.parameters())) else "not finite"
        self.finding = (
            f"the output of {name} ({type(module).__name__}) is the first with NaN or Inf; its inputs are {given}, its "
            f"parameters are {weights}"
        )


class ModuleShapes(dict[str, str]):
    """Watches modules for the shapes of inputs and outputs, of the first call of each."""

    def __call__(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Note the shapes of a call."""
        if name not in self:
            given, made = (", ".join(str(tuple(x.shape)) for x in tensors_in(value)) for value in (inputs, output))
            self[name] = f"{type(module).__name__}: {given or 'nothing'} -> {made or 'nothing'}"


@dataclass
class LayerOutput:
    """Statistics of a layer's output over all rows of all calls, and of the activation function after it."""

    count: int = 0
    sum: Tensor | float = 0.0
    square: Tensor | float = 0.0
    min: Tensor | float = float("inf")
    max: Tensor | float = float("-inf")
    activation: str = ""
    flat: Tensor | None = None  # bool by unit: the activation had no slope on any row

    def numbers(self) -> dict[str, float]:
        """Return mean, std, min and max, and the share of ``dead`` units if an activation follows."""
        if not self.count:
            return {}
        mean = float(self.sum) / self.count
        std = max(float(self.square) / self.count - mean * mean, 0.0) ** 0.5
        found = {"mean": mean, "std": std, "min": float(self.min), "max": float(self.max)}
        return found if self.flat is None else found | {"dead": float(self.flat.double().mean())}

    def add(self, y: Tensor) -> None:
        """Add an output."""
        y64 = y.detach().double()
        self.count += y.numel()
        self.sum, self.square = self.sum + y64.sum(), self.square + y64.square().sum()
        self.min, self.max = y64.min().clamp(max=self.min), y64.max().clamp(min=self.max)

    def add_activation(self, name: str, flat: Tensor, unit_axes: Collection[int]) -> None:
        """Add where an activation function has no slope, with the axes of its units."""
        rows = [axis for axis in range(flat.dim()) if axis not in unit_axes]
        flat = flat.all(rows) if rows else flat
        same = self.flat is not None and self.flat.shape == flat.shape
        self.activation, self.flat = name, self.flat & flat if same else flat  # type: ignore[operator]


class LayerRecorder(TorchFunctionMode):
    """Records the outputs of layers, given as a watcher, and of activation functions called after them.

    An activation belongs to the last layer with parameters that was called before it, whether it is a module or a
    function. A unit is dead on a batch if the slope of its activation is 0, or nearly so, on every row.
    """

    def __init__(self, layers: Collection[str]) -> None:
        super().__init__()
        self.outputs = {name: LayerOutput() for name in layers}
        self._last: tuple[str, nn.Module] | None = None

    def __call__(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Record a layer's output."""
        if not module._parameters:
            return
        self._last = (name, module)
        y = next(tensors_in(output), None)
        if name in self.outputs and y is not None and y.is_floating_point() and y.numel():
            self.outputs[name].add(y)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the output of an activation function."""
        y = func(*args, **(kwargs or {}))
        if func in ACTIVATIONS and self._last is not None and self._last[0] in self.outputs and y.numel():
            name, layer = self._last
            kind = ACTIVATIONS[func]
            self.outputs[name].add_activation(kind, FLAT[kind](y.detach()), unit_axes(layer, y.dim()))
        return y


def unit_axes(layer: nn.Module, rank: int) -> set[int]:
    """Return the axes of a layer's output that number its units: channels of a convolution, else features."""
    if isinstance(layer, BatchedLinear):
        return {0, rank - 1}
    return {1} if isinstance(layer, CHANNELS_FIRST) and rank > 2 else {rank - 1}


ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys((torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, functional.relu), "relu"),
    **dict.fromkeys((torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_, functional.tanh), "tanh"),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, functional.sigmoid), "sigmoid"),
    functional.elu: "elu",
    functional.gelu: "gelu",
    functional.silu: "silu",
}
FLAT: dict[str, Callable[[Tensor], Tensor]] = {  # where the activation function with this output has (almost) no slope
    "relu": lambda y: y <= 0,
    "tanh": lambda y: y.abs() >= SATURATED,
    "sigmoid": lambda y: (y - 0.5).abs() >= SATURATED / 2,
    "elu": lambda y: y <= -SATURATED,
    "gelu": lambda y: y.abs() <= 1e-3,
    "silu": lambda y: y.abs() <= 1e-3,
}
