"""The linear recurrence that every return, advantage and trace is made of."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_scan(x: Tensor, decay: Tensor, last: Tensor | None = None) -> Tensor:
    """Solve y_t = x_t + decay_t · y_{t+1} backwards from y_T = ``last`` (zeros if None).

    ``x``, ``decay`` and the result are ``[T, …]``, ``last`` is ``[…]``. Instead of T steps it takes log₂ T doublings,
    since affine maps compose associatively (Hillis & Steele 1986; Blelloch 1990): after a doubling, y_t holds the terms
    of twice as many steps and decay_t the product over them.

    A decay of 0 is a cut: neither value (not even NaN) nor gradient passes it.
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
