"""The natural gradient step of TRPO: conjugate gradients, the step to a KL bound, and the line search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # v → Fv, of a symmetric positive definite matrix F


def surrogate_loss(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return −r_t A_t, r_t = exp(``log_ratio``) = π(a_t|s_t) / π_old(a_t|s_t) (TRPO, Schulman et al. 2015, eq. 14)."""
    return -log_ratio.exp() * advantage.detach()


@torch.no_grad()
def conjugate_gradient(product: Product, b: Tensor, iterations: int, tolerance: float = 1e-10) -> Tensor:
    """Solve Fx = b approximately, starting from x = 0 (Hestenes & Stiefel 1952).

    It ends before ``iterations`` where the squared residual falls below ``tolerance`` · ‖b‖²: further steps would only
    add rounding errors.
    """
    x, residual = torch.zeros_like(b), b.clone()
    direction, squared = residual.clone(), residual.dot(residual)
    smallest = tolerance * squared
    for _ in range(iterations):
        if squared <= smallest:
            break
        image = product(direction)
        step = squared / direction.dot(image)
        x.add_(step * direction)
        residual.sub_(step * image)
        before, squared = squared, residual.dot(residual)
        direction = residual + (squared / before) * direction
    return x


@torch.no_grad()
def step_to_kl(direction: Tensor, product: Product, delta: float) -> Tensor:
    """Return βx with β = √(2δ / xᵀFx): the KL of the step is δ in its quadratic approximation (ibid., appendix C).

    Zero where xᵀFx is, as for a policy gradient of 0.
    """
    curvature = direction.dot(product(direction))
    return direction * torch.where(curvature > 0, (2 * delta / curvature).sqrt(), 0.0)


def line_search(accepts: Callable[[float], bool], shrink: float, steps: int) -> float:
    """Return the first of 1, ``shrink``, ``shrink``², … that is accepted; 0 if none of ``steps`` is."""
    fraction = 1.0
    for _ in range(steps):
        if accepts(fraction):
            return fraction
        fraction *= shrink
    return 0.0
