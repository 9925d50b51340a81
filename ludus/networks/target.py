"""Target networks: copies that track the online networks, by Polyak averaging or hard updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError


class TargetNetworks(nn.Module):
    """Copies of modules without gradients, in ``networks`` by name, that ``update`` moves towards the originals."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict()
        # Lists, so that PyTorch does not register the online modules here. Parameters stay the same objects, but moving
        # a module to a device replaces its buffers, so these are looked up by name at each update.
        self._target_parameters: list[Tensor] = []
        self._online_parameters: list[Tensor] = []
        self._buffer_owners: list[tuple[str, nn.Module, nn.Module]] = []
        for name, module in modules.items():
            self.networks[name] = copy = deepcopy(module).requires_grad_(False)
            copy.zero_grad()
            self._target_parameters += copy.parameters()
            self._online_parameters += module.parameters()
            for part, online in zip(copy.modules(), module.modules(), strict=True):
                self._buffer_owners += [(key, part, online) for key, x in part._buffers.items() if x is not None]
        self._dropouts = [module for module in self.modules() if isinstance(module, nn.Dropout)]
        self.eval()

    @contextmanager
    def with_dropout(self) -> Iterator[None]:
        """Within the context the copies drop units, as the networks do that learn from them (DroQ)."""
        for module in self._dropouts:
            module.train()
        try:
            yield
        finally:
            for module in self._dropouts:
                module.eval()

    @torch.no_grad()
    def update(self, tau: float) -> None:
        """Apply the Polyak update θ' ← θ' + τ(θ − θ') to parameters, and copy buffers; ``tau`` 1 is an exact copy."""
        if not 0 < tau <= 1:
            raise UserError(f"tau is {tau}, but must be greater than 0 and at most 1: 1 copies, 0.005 is usual.")
        if not self.networks:
            return
        if tau == 1:
            torch._foreach_copy_(self._target_parameters, self._online_parameters)
        else:
            torch._foreach_lerp_(self._target_parameters, self._online_parameters, tau)
        for name, part, online in self._buffer_owners:
            part.get_buffer(name).copy_(online.get_buffer(name))

    def train(self, mode: bool = True) -> TargetNetworks:
        """Stay in evaluation mode: targets use no dropout and do not update batch statistics."""
        return super().train(False)
