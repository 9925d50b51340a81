"""Parts of networks on devices of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError

PLACED = "placed"  # attribute of parameters that stay where they are


class OnDevices(nn.Module):
    """Runs a module, whose parts may be on several devices, on inputs of any device.

    Inputs are moved to ``input_device`` and outputs to ``output_device``, by default that of the first input. The
    module stays where it is: ``to``, ``cuda`` or ``double`` of a network that contains it leave it as it is.
    """

    def __init__(
        self, module: nn.Module, input_device: torch.device | str, output_device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.input_device = torch.device(input_device)
        self.output_device = None if output_device is None else torch.device(output_device)
        self._mark()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Move the inputs, call the module and move its outputs."""
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        back = self.output_device or (given[0].device if given else self.input_device)
        return move(self.module(*move(args, self.input_device), **move(kwargs, self.input_device)), back)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._mark()  # parameters of a deep copy lack the mark
        return self

    def _mark(self) -> None:
        for p in self.module.parameters():
            setattr(p, PLACED, True)


def move(value: Any, device: torch.device) -> Any:
    """Move all tensors in nested dicts, tuples and lists to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return type(value)({name: move(x, device) for name, x in value.items()})  # type: ignore[call-arg]
    if hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(move(x, device) for x in value))
    if isinstance(value, tuple | list):
        return type(value)(move(x, device) for x in value)
    return value


def is_placed(p: nn.Parameter) -> bool:
    """Return whether a parameter belongs to an ``OnDevices``."""
    return hasattr(p, PLACED)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters, except for those that were placed elsewhere."""
    for p in module.parameters():
        if not is_placed(p):
            return p.device
    raise UserError(
        f"All parameters of {type(module).__name__} are in an OnDevices, so it has no device of its own; leave the "
        "last layer of the network outside, or return features."
    )
