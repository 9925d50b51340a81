"""Layers that explore by themselves: NoisyNet (Fortunato et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

SIGMA = 0.5  # σ₀ of the paper: the deviation of a first weight, times the root of the inputs


class NoisyLinear(nn.Module):
    """A linear layer whose parameters have learned deviations: w = μ + σ ⊙ f(ε_out)f(ε_in)ᵀ, b = μ + σ ⊙ f(ε_out).

    The noise is factorised, with f(x) = sign(x)√|x|, lies in buffers and stays until the next ``resample``. ``quiet``
    leaves it out: means alone.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.quiet = inputs, outputs, False
        bound = 1 / sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), SIGMA * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), SIGMA * bound))
        self.eps_in: Tensor
        self.eps_out: Tensor
        self.register_buffer("eps_in", scaled(torch.randn(inputs)))
        self.register_buffer("eps_out", scaled(torch.randn(outputs)))

    def resample(self, generator: torch.Generator) -> None:
        """Draw other noise."""
        resample_noise(self, generator)

    def forward(self, x: Tensor) -> Tensor:
        if self.quiet:
            return functional.linear(x, self.weight, self.bias)
        # the noisy weights are made, although x could be multiplied twice instead: beyond a few rows that costs more
        weight = torch.addcmul(self.weight, self.weight_sigma, self.eps_out.unsqueeze(1) * self.eps_in)
        return functional.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.eps_out))


def scaled(normal: Tensor) -> Tensor:
    """Return f(x) = sign(x)√|x|, which gives the product of two of them a deviation like that of one normal."""
    return normal.sign() * normal.abs().sqrt()


def noisy_layers(module: nn.Module) -> list[NoisyLinear]:
    """The noisy layers in a module, in their order."""
    return [layer for layer in module.modules() if isinstance(layer, NoisyLinear)]


def resample_noise(module: nn.Module, generator: torch.Generator) -> None:
    """Draw other noise for all noisy layers in a module, all numbers in one call."""
    noise = [eps for layer in noisy_layers(module) for eps in (layer.eps_in, layer.eps_out)]
    if not noise:
        return
    sizes = [len(eps) for eps in noise]
    drawn = scaled(torch.randn(sum(sizes), generator=generator, device=generator.device)).to(noise[0].device)
    with torch.no_grad():
        torch._foreach_copy_(noise, torch.split(drawn, sizes))


@contextmanager
def quiet(module: nn.Module) -> Iterator[None]:
    """Leave the noise out inside ``with``, as an evaluation does."""
    layers = noisy_layers(module)
    before = [layer.quiet for layer in layers]
    for layer in layers:
        layer.quiet = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.quiet = was
