"""Weights of experience that was drawn from a replay."""

from __future__ import annotations

from torch import Tensor


def counted(weight: Tensor, real: Tensor) -> Tensor:
    """Return w / max(count of real rows, 1), 0 for padding: a mean over what was drawn is ``(loss * share).sum()``.

    Unlike ``policy_gradient.shares``, importance weights below 1 make the mean smaller. Padding must hold a
    finite loss.
    """
    return weight * real / real.sum().clamp_(min=1)
