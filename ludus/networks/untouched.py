"""Whether objects do exactly what our classes say, which an engine that goes around their calls must know."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules import module as torch_module

_GLOBAL_HOOKS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)


def untouched(modules: Iterable[nn.Module]) -> bool:
    """Whether calling these modules runs their class's ``forward`` alone: no hooks, nothing replaced or compiled."""
    if any(_GLOBAL_HOOKS):
        return False
    for module in modules:
        own = module.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or own.get("_compiled_call_impl") is not None
        ):
            return False
    return True


def methods_of(thing: object, kind: type, names: Iterable[str]) -> bool:
    """Whether ``thing`` has these methods from ``kind``: neither a subclass nor the object itself replaced one."""
    return all(getattr(type(thing), name, None) is getattr(kind, name) and name not in vars(thing) for name in names)
