"""Parameter space noise: a perturbed copy of the policy acts for an episode (Plappert et al. 2018)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class ParameterNoise(nn.Module):
    """A copy of a module with θ̃ = θ + σ·ε, where σ adapts to keep its actions at a target distance.

    ``perturbed`` acts, ``resample`` redraws it from the module's current parameters, and ``adapt`` changes σ. The state
    dict has σ and the copy, but not the module, which belongs to the agent. LayerNorm parameters get no noise.

    All environments share one perturbation. It is redrawn when row 0 starts an episode, so it may change during the
    episodes of other rows. If rows step in groups, the first row of each group counts.
    """

    sigma: Tensor

    def __init__(self, module: nn.Module, sigma_init: float = 0.1, target: float = 0.1, rate: float = 1.01) -> None:
        super().__init__()
        self.target, self.rate = target, rate
        self._module = (module,)  # in a tuple, so that PyTorch does not register it
        self.perturbed = copy.deepcopy(module).requires_grad_(False)
        self.register_buffer("sigma", torch.tensor(sigma_init, dtype=torch.float64))
        norms = {id(p) for m in self.perturbed.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
        self._noisy: list[Tensor] = [
            p for p in self.perturbed.parameters() if p.is_floating_point() and id(p) not in norms
        ]

    @torch.no_grad()
    def resample(self, generator: torch.Generator) -> None:
        """Copy the module's current parameters and add new noise to them."""
        torch._foreach_copy_(_tensors(self.perturbed), _tensors(*self._module))
        sizes = [p.numel() for p in self._noisy]
        flat = torch.randn(sum(sizes), generator=generator, device=generator.device).to(self.sigma.device)
        parts = torch.split(flat.mul_(self.sigma), sizes)
        noise = [part.view_as(p).to(p.dtype) for part, p in zip(parts, self._noisy, strict=True)]
        torch._foreach_add_(self._noisy, noise)

    def resample_on_reset(self, first: Tensor, generator: torch.Generator) -> None:
        """Resample if row 0 starts an episode (``first``: ``[B]``)."""
        if bool(first[0]):
            self.resample(generator)

    @torch.no_grad()
    def adapt(self, distance: Tensor) -> None:
        """Increase σ by the factor ``rate`` if the distance of the actions is within the target, else decrease it."""
        self.sigma.copy_(torch.where(distance <= self.target, self.sigma * self.rate, self.sigma / self.rate))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def rms_distance(action: Tensor, perturbed: Tensor) -> Tensor:
    """Return √(mean (a − ã)²), which equals σ for Gaussian action noise of that σ."""
    return (action - perturbed).square().mean().sqrt()
