"""The linear recurrence behind returns, advantages and traces."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_scan(x: Tensor, decay: Tensor, last: Tensor | None = None) -> Tensor:
    """Solve y_t = x_t + decay_t · y_{t+1} backwards from y_T = ``last`` (zeros if None).

    ``x``, ``decay`` and the result are ``[T, …]``, ``last`` is ``[…]``. A parallel scan with log₂ T steps instead of T
    (Hillis & Steele 1986; Blelloch 1990): after each, y_t sums over twice as many time steps, and decay_t is the
    product over these.

    Where decay is 0, neither values (not even NaN) nor gradients pass.
    """
    time = x.shape[0]
    y = x if last is None else torch.cat([x[:-1], _join(x[-1:], decay[-1:], last.unsqueeze(0))])
    span = 1
    while span < time:
        y = torch.cat([_join(y[:-span], decay[: time - span], y[span:]), y[-span:]])
        if 2 * span < time:
            decay = decay[: time - 2 * span] * decay[span : time - span]
        span *= 2
    return y


def _join(y: Tensor, decay: Tensor, later: Tensor) -> Tensor:
    return torch.addcmul(y, decay, later.masked_fill(decay == 0, 0))
