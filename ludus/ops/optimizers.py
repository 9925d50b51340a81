"""Update rules on one flat block of parameters, in place.

What changes from step to step (``step`` and ``lr``, 0-dimensional float tensors on the block's device) is a tensor, so
that a compiled update is never compiled again. Who calls has turned gradients off (``torch.no_grad``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

KL_STEP, KL_FLOOR, KL_CAP = 1.5, 1e-5, 1e-2  # how the KL-adaptive learning rate moves, and its limits


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
    """Take a step of Adam, eps outside the root (Kingma & Ba 2015, algorithm 1); ``step`` counts itself.

    m ← β₁m + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  θ ← θ − lr · (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε). Both averages start at 0.
    """
    step.add_(1)
    # expm1: in float32, 1 − β₂ᵗ would lose five of its eight digits at the first steps.
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
    """Do what ``adam_`` does as one operation of PyTorch's, for where nothing is compiled: operations are the cost."""
    step.add_(1)
    torch._fused_adam_(
        [parameter],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def rmsprop_(
    parameter: Tensor, gradient: Tensor, square_avg: Tensor, lr: Tensor, alpha: float = 0.99, eps: float = 1e-5
) -> None:
    """Take a step of RMSprop as PyTorch does it: eps outside the root; ``square_avg`` starts at 0.

    s ← αs + (1−α)g²;  θ ← θ − lr · g / (√s + ε).
    """
    square_avg.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
    parameter.addcmul_(gradient / square_avg.sqrt().add_(eps), lr, value=-1)


def rmsprop_tf_(
    parameter: Tensor, gradient: Tensor, square_avg: Tensor, lr: Tensor, alpha: float = 0.99, eps: float = 1e-5
) -> None:
    """Take a step of RMSprop as TensorFlow does it, which is what published A2C results were tuned with.

    s ← αs + (1−α)g²;  θ ← θ − lr · g / √(s + ε). It differs from PyTorch's in two choices: ε is inside the root, and
    the caller starts ``square_avg`` at 1, not 0, which keeps the steps of about the first 900 updates small.
    """
    square_avg.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
    parameter.addcmul_(gradient * (square_avg + eps).rsqrt_(), lr, value=-1)


def sgd_(parameter: Tensor, gradient: Tensor, lr: Tensor) -> None:
    """Take a step of gradient descent: θ ← θ − lr · g."""
    parameter.addcmul_(gradient, lr, value=-1)


def clip_norm_(gradient: Tensor, max_norm: float, looks: bool = False) -> Tensor:
    """Scale ``gradient`` down to length ``max_norm`` if it is longer (0: never) and return the norm that it had.

    ``looks``: see first whether it is, which gives the same and saves time on a CPU, but makes a GPU wait.
    """
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if max_norm > 0 and not (looks and float(norm) + 1e-6 <= max_norm):
        gradient.div_((norm + 1e-6).div_(max_norm).clamp_(min=1))
    return norm


def kl_adaptive_lr(learning_rate: float, kl: float, target: float) -> float:
    """Lower the step size where the policy moved too far, raise it where it hardly moved."""
    if kl > 2 * target:
        return max(learning_rate / KL_STEP, KL_FLOOR)
    if 0 < kl < target / 2:
        return min(learning_rate * KL_STEP, KL_CAP)
    return learning_rate
