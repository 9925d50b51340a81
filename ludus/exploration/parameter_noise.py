"""Noise on parameters instead of actions: one perturbed policy acts for an episode (Plappert et al. 2018)."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError, check_ranges


class ParameterNoise(nn.Module):
    """A frozen copy of a module with θ̃ = θ + σ·ε, and the σ that keeps its actions at a desired distance.

    ``perturbed`` acts; ``resample`` makes it anew from the module's parameters of that moment, ``adapt`` moves σ. The
    state dict has both σ and the copy, but not the module, which belongs to the agent. Parameters of LayerNorms are
    copied without noise, as they scale whole layers.

    All environments share one perturbation, which is why ``begin`` makes a new one when row 0 begins an episode: the
    episodes of the other rows may see it change on the way. Of rows that step in groups, each group's first counts.
    """

    sigma: Tensor

    def __init__(self, module: nn.Module, sigma_init: float = 0.1, target: float = 0.1, rate: float = 1.01) -> None:
        super().__init__()
        given = SimpleNamespace(
            parameter_noise_sigma=sigma_init, parameter_noise_target=target, parameter_noise_rate=rate
        )
        check_ranges(given, positive=tuple(vars(given)))
        if rate <= 1:
            raise UserError(f"agent.parameter_noise_rate is {rate}; it must be greater than 1, or σ cannot adapt.")
        self.target, self.rate = target, rate
        self._module = (module,)  # in a tuple, lest the state dict and the optimizer see it twice
        self.perturbed = copy.deepcopy(module).requires_grad_(False)
        self.register_buffer("sigma", torch.tensor(sigma_init, dtype=torch.float64))
        still = {id(p) for m in self.perturbed.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
        self._moved: list[Tensor] = [
            p for p in self.perturbed.parameters() if p.is_floating_point() and id(p) not in still
        ]

    @torch.no_grad()
    def resample(self, generator: torch.Generator) -> None:
        """Perturb the module's current parameters anew, with numbers of ``generator``."""
        torch._foreach_copy_(_tensors(self.perturbed), _tensors(*self._module))
        sizes = [p.numel() for p in self._moved]
        flat = torch.randn(sum(sizes), generator=generator, device=generator.device).to(self.sigma.device)
        parts = torch.split(flat.mul_(self.sigma), sizes)
        noise = [part.view_as(p).to(p.dtype) for part, p in zip(parts, self._moved, strict=True)]
        torch._foreach_add_(self._moved, noise)

    def begin(self, first: Tensor, generator: torch.Generator) -> None:
        """Resample if row 0 begins an episode (``first``: ``[B]``)."""
        if bool(first[0]):
            self.resample(generator)

    @torch.no_grad()
    def adapt(self, distance: Tensor) -> None:
        """Widen σ by ``rate`` where the perturbed actions are within the target of the others, else narrow it."""
        self.sigma.copy_(torch.where(distance <= self.target, self.sigma * self.rate, self.sigma / self.rate))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def rms_distance(action: Tensor, perturbed: Tensor) -> Tensor:
    """Return √(mean (a − ã)²) over rows and elements: its target is the σ of action noise as strong."""
    return (action - perturbed).square().mean().sqrt()
