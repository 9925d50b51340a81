"""Networks that follow others: targets, and averages of policies."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError


class Target(nn.Module):
    """Frozen copies of modules, in ``networks`` by name, that move towards them when told to.

    The copies never ask for gradients, so that they are no part of what an optimizer moves; they are part of the
    agent's state.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict()
        # lists hide the online modules from PyTorch, which would take them for parts of this one; parameters are the
        # same objects for ever, buffers are not (a move to a device replaces them), so these are looked up
        self._own: list[Tensor] = []
        self._online: list[Tensor] = []
        self._buffers_of: list[tuple[str, nn.Module, nn.Module]] = []
        for name, module in modules.items():
            self.add(name, module)

    def add(self, name: str, module: nn.Module) -> nn.Module:
        """Copy one more module, and return the copy, which is ``networks[name]``."""
        self.networks[name] = copy = frozen_copy(module)
        self._own += copy.parameters()
        self._online += module.parameters()
        for part, online in zip(copy.modules(), module.modules(), strict=True):
            self._buffers_of += [(key, part, online) for key, x in part._buffers.items() if x is not None]
        return copy

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move the parameters by θ' ← θ' + τ(θ − θ') and copy the buffers; with ``tau`` 1 all is copied to the bit."""
        if not 0 < tau <= 1:
            raise UserError(f"tau is {tau}, but a target follows by a share in (0, 1]: 1 copies, 0.005 is usual.")
        if tau == 1:
            torch._foreach_copy_(self._own, self._online)
        else:
            torch._foreach_lerp_(self._own, self._online, tau)
        for name, part, online in self._buffers_of:
            part.get_buffer(name).copy_(online.get_buffer(name))

    def train(self, mode: bool = True) -> Target:
        """Stay in evaluation mode: a target's layers neither drop out nor take statistics of their own."""
        return super().train(False)


def frozen_copy(module: nn.Module) -> nn.Module:
    """A deep copy that never asks for gradients."""
    copy = deepcopy(module)
    for p in copy.parameters():
        p.requires_grad_(False)
        p.grad = None
    return copy.eval()
