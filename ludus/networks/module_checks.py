"""Checks on modules: hooks, overridden methods, and layers that depend on the training mode."""

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
_MODE_INDEPENDENT = (nn.Linear, nn.Conv2d, nn.LSTMCell, nn.ModuleList, nn.ModuleDict)  # used by Ludus's own networks


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether calling a module would run more than its class's ``forward``.

    That is the case for registered hooks, a ``forward`` set on the instance, and compiled modules.
    """
    if any(_GLOBAL_HOOKS):
        return True
    for module in modules:
        attributes = module.__dict__
        if (
            attributes["_forward_hooks"]
            or attributes["_forward_pre_hooks"]
            or attributes["_backward_hooks"]
            or attributes["_backward_pre_hooks"]
            or "forward" in attributes
            or attributes.get("_compiled_call_impl") is not None
        ):
            return True
    return False


def uses_methods_of(instance: object, cls: type, names: Iterable[str]) -> bool:
    """Return whether neither a subclass of ``cls`` nor the instance itself overrides one of the named methods."""
    return all(
        getattr(type(instance), name, None) is getattr(cls, name) and name not in vars(instance) for name in names
    )


def depends_on_training_mode(module: nn.Module) -> bool:
    """Return whether ``train()`` may change the module's output, as with BatchNorm and Dropout.

    Ludus's own modules and the layers they use do not depend on the mode; any other class is assumed to.
    """
    return any(
        type(m) not in _MODE_INDEPENDENT and type(m).__module__.split(".")[0] != "ludus" for m in module.modules()
    )
