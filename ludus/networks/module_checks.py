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
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# used by Ludus's own networks
_MODE_INDEPENDENT = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTMCell, nn.GRUCell, nn.LayerNorm, nn.GroupNorm, nn.Identity),
    *(nn.Embedding, nn.ModuleList, nn.ModuleDict),
)


class NoHooks:
    """Tells whether calling one of some modules would run just the ``forward`` of its class.

    That is not the case with registered hooks, a ``forward`` set on the instance, and compiled modules. The dicts of
    hooks are collected once, since this is asked before every action.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = [module.__dict__ for module in dict.fromkeys(modules)]
        self._hooks = [*_GLOBAL_HOOKS, *(attributes[name] for attributes in self._attributes for name in _HOOKS)]

    def __call__(self) -> bool:
        """Return whether none of them has a hook now."""
        return not (any(self._hooks) or any(["forward" in x or "_compiled_call_impl" in x for x in self._attributes]))


def uses_methods_of(instance: object, cls: type, names: Iterable[str]) -> bool:
    """Return whether neither a subclass of ``cls`` nor the instance itself overrides one of the named methods."""
    return all(
        getattr(type(instance), name, None) is getattr(cls, name) and name not in vars(instance) for name in names
    )


def depends_on_training_mode(module: nn.Module) -> bool:
    """Return whether ``train()`` may change the module's output, as with BatchNorm and Dropout.

    Ludus's own modules, unless they say so by ``depends_on_training_mode``, and the layers they use do not; any other
    class is assumed to.
    """
    return any(_depends_on_training_mode(m) for m in module.modules())


def layers_with_modes(module: nn.Module) -> list[str]:
    """Return the names of the layers within a module that are known to differ in training: batch norms and dropout."""
    return [type(m).__name__ for m in module.modules() if _has_modes(m)]


def _has_modes(m: nn.Module) -> bool:
    if isinstance(m, nn.modules.batchnorm._NormBase):
        return m.track_running_stats
    if isinstance(m, nn.modules.dropout._DropoutNd):
        return m.p > 0
    if isinstance(m, nn.RNNBase):
        return m.dropout > 0
    return bool(getattr(m, "depends_on_training_mode", False))


def _depends_on_training_mode(module: nn.Module) -> bool:
    if type(module).__module__.split(".")[0] == "ludus":
        return bool(getattr(module, "depends_on_training_mode", False))
    return type(module) not in _MODE_INDEPENDENT
