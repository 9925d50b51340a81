"""Losses with their gradients by hand: on a few hundred rows, the bookkeeping of autograd costs more than the maths."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Named = dict[str, Tensor]
NONE, MEAN = 0, 1  # how PyTorch's own operations name reductions
aten = torch.ops.aten


@torch.no_grad()
def ppo_categorical(
    logits: Tensor, value: Tensor, action: Tensor, old: Named, clip: Tensor, coefficients: Mapping[str, float]
) -> tuple[Named, Named, Tensor, Tensor]:
    """PPO for one categorical action: losses and metrics by name, and the gradient of their total: logits', value's.

    ``logits`` are ``[…, K]``, ``value`` is ``[…]`` or ``[…, 1]``, the rest ``[…]``. ``old`` has ``log_prob``,
    ``return``, each row's ``share`` of a mean and the advantage ``weighted`` by it. The losses are those of
    ``policy_gradient``, their weights in the total ``coefficients`` (1 where there is none).
    """
    policy_coef, value_coef, entropy_coef = (coefficients.get(name, 1.0) for name in ("policy", "value", "entropy"))
    names = ("log_prob", "weighted", "return", "share")
    old_log_prob, advantage, target, share = (old[name].flatten() for name in names)
    log_p = logits.flatten(0, -2).log_softmax(-1)
    p, chosen = log_p.exp(), action.reshape(-1, 1)
    log_ratio = log_p.gather(-1, chosen).squeeze(-1) - old_log_prob
    change = log_ratio.expm1()  # r − 1
    gain, limit = (change + 1) * advantage, advantage + clip * advantage.abs()
    order = (p * log_p).sum(-1)  # −H
    error = value.flatten() - target
    pull = error * share
    losses = {
        "policy": -torch.minimum(gain, limit).sum(),
        "value": torch.dot(error, pull),
        "entropy": torch.dot(order, share),
    }
    metrics = {
        "kl": torch.dot(change - log_ratio, share),
        "clip_fraction": torch.dot((change.abs() > clip).to(share.dtype), share),
    }
    slope = gain.mul_(gain <= limit).unsqueeze(-1)  # ∂gain/∂log π, 0 where the clip holds
    if policy_coef != 1:
        slope *= policy_coef
    to_logits = (p * slope).scatter_add_(-1, chosen, -slope)  # ∂log π/∂logits = onehot − p
    if entropy_coef:
        to_logits += p * (log_p - order.unsqueeze(-1)) * (entropy_coef * share).unsqueeze(-1)
    return losses, metrics, to_logits.view_as(logits), (pull * (2 * value_coef)).view_as(value)


def huber_q(q: Tensor, action: Tensor, target: Tensor, share: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Huber's loss of the values that were taken: the loss, its gradient by ``q``, and those values ``[…, 1]``.

    ``q`` is ``[…, A]``, the rest ``[…]``; ``share`` is each row's share of the loss, without one it is the mean. As
    ``q_learning.huber`` at δ = 1, and nothing here may need a gradient.
    """
    chosen = action.unsqueeze(-1)
    taken = q.gather(-1, chosen)
    given = taken, target.unsqueeze(-1), MEAN if share is None else NONE, 1.0
    loss = aten.smooth_l1_loss.default(*given)
    each = torch.ones_like(loss) if share is None else share.unsqueeze(-1)
    slope = aten.smooth_l1_loss_backward.default(each, *given)
    gradient = torch.zeros_like(q).scatter_(-1, chosen, slope)
    return loss if share is None else torch.dot(loss.flatten(), share.flatten()), gradient, taken
