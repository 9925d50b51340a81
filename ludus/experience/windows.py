"""n-step returns over windows of a replay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NStep(NamedTuple):
    """What n transitions are as one, ``[M]`` each."""

    reward: Tensor  # Σ_{i<k} γ^i r_i
    discount: Tensor  # γ^k, or 0 if the last of them terminated
    terminated: Tensor
    truncated: Tensor
    steps: Tensor  # k ≤ n: how many there were


def n_step(reward: Tensor, terminated: Tensor, truncated: Tensor, real: Tensor, powers: Tensor) -> NStep:
    """Sum up to n rewards ``[n, M]``; ``powers`` are γ^0 to γ^n.

    The window stops after a transition that terminated or truncated, and before one that is not ``real`` ``[n, M]``
    (padding, or an episode that was lost). The first transition is taken to be real. What lies behind the stop is never
    used, not even multiplied by 0. Sutton 1988; with truncation, the state where it stopped is bootstrapped from.
    """
    n = len(reward)
    stops = torch.zeros(reward.shape, dtype=torch.bool, device=reward.device)  # whether it stopped before this one
    torch.logical_or((terminated | truncated)[:-1], ~real[1:], out=stops[1:])
    for i in range(2, n):
        stops[i] |= stops[i - 1]
    steps = n - stops.sum(0)
    last = (steps - 1).unsqueeze(0)
    over = terminated.gather(0, last)[0]
    return NStep(
        reward=(reward * powers[:n, None]).masked_fill_(stops, 0).sum(0),
        discount=powers.index_select(0, steps).masked_fill_(over, 0),
        terminated=over,
        truncated=truncated.gather(0, last)[0],
        steps=steps,
    )
