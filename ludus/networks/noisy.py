"""Noisy linear layers for exploration: NoisyNet (Fortunato et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

SIGMA = 0.5  # σ₀ of the paper; initial standard deviations are σ₀/√inputs


class NoisyLinear(nn.Module):
    """A linear layer with learned parameter noise: w = μ + σ ⊙ f(ε_out)f(ε_in)ᵀ, b = μ + σ ⊙ f(ε_out).

    The noise is factorised, with f(x) = sign(x)√|x|. It is stored in buffers until ``resample_noise`` redraws it, and
    left out while ``use_noise`` is false.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_noise = inputs, outputs, True
        bound = 1 / sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), SIGMA * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), SIGMA * bound))
        self.eps_in: Tensor
        self.eps_out: Tensor
        self.register_buffer("eps_in", scale_noise(torch.randn(inputs)))
        self.register_buffer("eps_out", scale_noise(torch.randn(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.use_noise:
            return functional.linear(x, self.weight, self.bias)
        # building the noisy weights is faster than multiplying x twice, except for a few rows
        weight = torch.addcmul(self.weight, self.weight_sigma, self.eps_out.unsqueeze(1) * self.eps_in)
        return functional.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.eps_out))


def scale_noise(normal: Tensor) -> Tensor:
    """Return f(x) = sign(x)√|x|."""
    return normal.sign() * normal.abs().sqrt()


def noisy_layers(module: nn.Module) -> list[NoisyLinear]:
    """Return all noisy layers in a module."""
    return [layer for layer in module.modules() if isinstance(layer, NoisyLinear)]


def resample_noise(module: nn.Module, generator: torch.Generator) -> None:
    """Redraw the noise of all noisy layers in a module, in one call to the generator."""
    noise = [eps for layer in noisy_layers(module) for eps in (layer.eps_in, layer.eps_out)]
    if not noise:
        return
    sizes = [len(eps) for eps in noise]
    drawn = scale_noise(torch.randn(sum(sizes), generator=generator, device=generator.device)).to(noise[0].device)
    with torch.no_grad():
        torch._foreach_copy_(noise, torch.split(drawn, sizes))


@contextmanager
def without_noise(module: nn.Module) -> Iterator[None]:
    """Disable the noise of a module's layers inside a ``with`` block, for evaluation."""
    layers = [layer for layer in noisy_layers(module) if layer.use_noise]
    for layer in layers:
        layer.use_noise = False
    try:
        yield
    finally:
        for layer in layers:
            layer.use_noise = True
