"""In-place optimizer steps on one flat parameter tensor.

``step`` and ``lr`` are 0-dimensional tensors, so that a compiled update is not recompiled when they change. Call under
``torch.no_grad``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ONE = torch.ones((), device="cpu")  # adding a number takes three times as long, since it is made a tensor first
PLAIN_ADAM: dict[str, Any] = {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
KL_STEP, KL_FLOOR, KL_CAP = 1.5, 1e-5, 1e-2  # factor and limits of the KL-adaptive learning rate


def adam_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """Adam with ε outside the root (Kingma & Ba 2015, algorithm 1); increments ``step``.

    m ← β₁m + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  θ ← θ − lr · (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε). Both averages start at 0.
    """
    step.add_(1)
    # expm1: 1 − β₂ᵗ in float32 would lose most digits at the first steps
    correction1 = torch.expm1(step * math.log(beta1))  # −(1 − β₁ᵗ)
    correction2 = torch.expm1(step * math.log(beta2)).neg().sqrt()
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().add_(eps * correction2)
    parameter.addcmul_(exp_avg / denominator, lr * correction2 / correction1)


def fused_adam_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """``adam_`` as PyTorch's single fused operation, faster when not compiled."""
    step.add_(ONE)
    lists: Any = [parameter], [gradient], [exp_avg], [exp_avg_sq], [], [step]
    torch._fused_adam_(*lists, lr=lr, beta1=beta1, beta2=beta2, eps=eps, **PLAIN_ADAM)


def rmsprop_(
    parameter: Tensor, gradient: Tensor, square_avg: Tensor, lr: Tensor, alpha: float = 0.99, eps: float = 1e-5
) -> None:
    """PyTorch's RMSprop: ε outside the root; ``square_avg`` starts at 0.

    s ← αs + (1−α)g²;  θ ← θ − lr · g / (√s + ε).
    """
    square_avg.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
    parameter.addcmul_(gradient / square_avg.sqrt().add_(eps), lr, value=-1)


def rmsprop_tf_(
    parameter: Tensor, gradient: Tensor, square_avg: Tensor, lr: Tensor, alpha: float = 0.99, eps: float = 1e-5
) -> None:
    """TensorFlow's RMSprop, with which published A2C results were tuned.

    s ← αs + (1−α)g²;  θ ← θ − lr · g / √(s + ε). It differs from PyTorch's in two choices: ε is inside the root, and
    the caller starts ``square_avg`` at 1, not 0, which keeps the steps of about the first 900 updates small.
    """
    square_avg.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
    parameter.addcmul_(gradient * (square_avg + eps).rsqrt_(), lr, value=-1)


def sgd_(parameter: Tensor, gradient: Tensor, lr: Tensor) -> None:
    """Gradient descent: θ ← θ − lr · g."""
    parameter.addcmul_(gradient, lr, value=-1)


def clip_norm_(gradient: Tensor, max_norm: float | Tensor, check_first: bool = False) -> Tensor:
    """Clip the norm of ``gradient`` to ``max_norm`` (0: no clipping; a tensor is above 0) and return the norm before.

    ``check_first``: skip the division if it is not needed, which is faster on a CPU but synchronizes a GPU.
    """
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if (isinstance(max_norm, Tensor) or max_norm > 0) and not (check_first and float(norm) + 1e-6 <= max_norm):
        gradient.div_((norm + 1e-6).div_(max_norm).clamp_(min=1))
    return norm


def kl_adaptive_lr(learning_rate: float, kl: float, target: float) -> float:
    """Return a lower learning rate if the KL exceeds twice the target, a higher one if it is below half."""
    if kl > 2 * target:
        return max(learning_rate / KL_STEP, KL_FLOOR)
    if 0 < kl < target / 2:
        return min(learning_rate * KL_STEP, KL_CAP)
    return learning_rate
