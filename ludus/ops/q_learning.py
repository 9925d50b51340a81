"""Targets, losses and priorities of DQN and its variants, DDPG, TD3 and SAC.

Any leading dimensions; A is the number of actions, E of critics, n of atoms or quantiles. ``reward``, ``discount`` and
``continues`` are as in ``ludus.ops.returns``. A ``mask`` ``[..., A]`` is 0 for invalid actions, whose values may be
NaN. Targets and temperatures are detached.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ludus.ops.distributions import mask_logits
from ludus.ops.returns import n_step_returns

# Action selection.


def gather_action(q: Tensor, action: Tensor) -> Tensor:
    """Return Q(s_t, a_t): ``[...]`` of q ``[..., A]``, or ``[..., E]`` of q ``[..., E, A]``, for action ``[...]``."""
    if q.dim() == action.dim() + 1:
        return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    index = action[..., None, None].expand(*q.shape[:-1], 1)
    return q.gather(-1, index).squeeze(-1)


def greedy(q: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return argmax_a Q(s, a) over valid actions, as int64."""
    return (q if mask is None else q.masked_fill(mask == 0, -torch.inf)).argmax(-1)


def max_q_value(q_t: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return max_a Q(s_{t+1}, a) over valid actions (Watkins 1989; DQN, Mnih et al. 2015).

    If no action is valid, as in a terminal state, the result is arbitrary; the discount is 0 then.
    """
    q_t = q_t.detach()
    return q_t.amax(-1) if mask is None else gather_action(q_t, greedy(q_t, mask))


@torch.no_grad()
def double_q_value(q_target_t: Tensor, q_online_t: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return Q_target(s_{t+1}, argmax_a Q_online(s_{t+1}, a)) (Double DQN, van Hasselt et al. 2016, eq. 4)."""
    return gather_action(q_target_t, greedy(q_online_t, mask))


def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """Return Q = V + A − mean_a A (Wang et al. 2016, eq. 9).

    ``value`` is ``[..., 1]`` and ``advantage`` ``[..., A]``; or, with atoms, ``[..., 1, n]`` and ``[..., A, n]``.
    """
    last = advantage.shape[-1]
    one_choice = value.shape == advantage.shape and last == 1
    choices = -1 if value.shape[-1] != last or one_choice else -2
    return advantage + (value - advantage.mean(choices, keepdim=True))


# Targets.


def td_target(reward: Tensor, discount: Tensor, value_t: Tensor) -> Tensor:
    """Return r_t + discount_t · V(s_{t+1}), with broadcasting; the value may be NaN where the discount is 0."""
    return torch.addcmul(reward, discount, torch.where(discount.bool(), value_t, discount)).detach()


def rescale(x: Tensor, eps: float = 1e-3) -> Tensor:
    """Return h(x) = sign(x)(√(|x| + 1) − 1) + εx (Pohlen et al. 2018, prop. A.2; R2D2, Kapturowski et al. 2019).

    Computed as x / (√(|x| + 1) + 1) + εx, which has no cancellation for small x.
    """
    return torch.add(x / ((x.abs() + 1).sqrt() + 1), x, alpha=eps)


def unrescale(y: Tensor, eps: float = 1e-3) -> Tensor:
    """Return h⁻¹(y), the inverse of ``rescale``.

    With w = √(|x| + 1) − 1, |y| = εw² + (1 + 2ε)w and |x| = w(w + 2); the quadratic is solved without cancellation. In
    float32, the common form with √(1 + 4ε(|y| + 1 + ε)) − 1 has an error of 1e-4 at 1 and of 5e-2 at 1e-3.
    """
    slope = 1 + 2 * eps
    w = 2 * y / ((4 * eps * y.abs() + slope * slope).sqrt() + slope)  # with the sign of y
    return w * (w.abs() + 2)


@torch.no_grad()
def n_step_targets(
    reward: Tensor, discount: Tensor, continues: Tensor, value_t: Tensor, n: int, eps: float | None = None
) -> Tensor:
    """Return n-step targets of sequences ``[T, B]``; see ``n_step_returns``.

    With ``eps``, values are rescaled: h(n-step return of h⁻¹(values)) (R2D2, Kapturowski et al. 2019, §2.3).
    """
    if eps is None:
        return n_step_returns(reward, discount, continues, value_t, n)
    return rescale(n_step_returns(reward, discount, continues, unrescale(value_t, eps), n), eps)


@torch.no_grad()
def soft_n_step_targets(
    reward: Tensor, discount: Tensor, continues: Tensor, value_t: Tensor, bonus_t: Tensor, n: int
) -> Tensor:
    """Return n-step targets of sequences ``[T, B]`` for soft values V(s) = E[Q(s, a)] + b(s).

    The bonus b(s_{t+1}), such as −α log π, is added to the reward of every step before the bootstrap state, for which
    V(s_{t+1}) includes it.
    """
    bonus = (discount * bonus_t).masked_fill_(discount == 0, 0)
    return n_step_returns(reward + bonus, discount, continues, value_t - bonus_t, n)


@torch.no_grad()
def policy_entropy(log_p: Tensor) -> Tensor:
    """Return −Σ_a π(a|s) log π(a|s) ``[...]`` for log π ``[..., A]``, finite where π is 0."""
    return -(log_p.exp() * log_p).sum(-1)


def soft_log_policy(q: Tensor, temperature: float, mask: Tensor | None = None) -> Tensor:
    """Return log π(·|s) ``[..., A]`` of π = softmax(Q / τ) over valid actions."""
    return _masked_logits(q, temperature, mask).log_softmax(-1)


@torch.no_grad()
def munchausen_reward(
    q_tm1: Tensor, action: Tensor, temperature: float, alpha: float, clip: float, mask: Tensor | None = None
) -> Tensor:
    """Return the reward bonus α · clip(τ log π(a_t|s_t), l₀, 0) (Munchausen DQN, Vieillard et al. 2020, eq. 2).

    π = softmax(Q / τ) with the target network's Q; ``clip`` is l₀ < 0 (the paper: τ = 0.03, α = 0.9, l₀ = −1).
    """
    log_policy = gather_action(soft_log_policy(q_tm1, temperature, mask), action)
    return (temperature * log_policy).clamp(clip, 0).mul_(alpha)


@torch.no_grad()
def munchausen_value(q_t: Tensor, temperature: float, mask: Tensor | None = None) -> Tensor:
    """Return Σ_a π(a|s_{t+1})(Q(s_{t+1}, a) − τ log π(a|s_{t+1})), which is τ log Σ_a exp(Q / τ) (ibid., eq. 1)."""
    return temperature * _masked_logits(q_t, temperature, mask).logsumexp(-1)


def _masked_logits(q: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    return q / temperature if mask is None else mask_logits(q / temperature, mask)


# TD errors and priorities.


def huber(prediction: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    """Return ½x² where |x| ≤ δ, else δ(|x| − ½δ), for the error x (Huber 1964); both have the same shape."""
    none: Any = 0  # no reduction
    loss: Tensor = torch._C._nn.huber_loss(prediction, target.detach(), none, delta)
    return loss


@torch.no_grad()
def mixed_priority(td: Tensor, weight: Tensor, eta: float = 0.9) -> Tensor:
    """Return η max_t |δ_t| + (1 − η) mean_t |δ_t| ``[B]`` of sequences ``[T, B]`` (R2D2, §2.3).

    Steps with weight 0 are ignored and may be NaN; a sequence with no other steps gives 0.
    """
    padding = weight == 0
    error = td.abs().masked_fill_(padding, 0)
    count = (td.shape[0] - padding.sum(0)).clamp_(min=1)
    return eta * error.amax(0) + (1 - eta) * error.sum(0) / count


@torch.no_grad()
def hysteretic_weight(td: Tensor, *, increase: float = 1.0, decrease: float) -> Tensor:
    """Return the weight of each TD error (target − prediction): ``decrease`` if negative, else ``increase``.

    Hysteretic Q-learning for concurrent learners (Matignon et al. 2007: α for δ ≥ 0, β < α otherwise). Use as
    ``hysteretic_weight(td, decrease=0.1) * td.square()``.
    """
    return torch.ones_like(td).mul_(increase).masked_fill_(td < 0, decrease)  # both may be tensors


# Actor-critic methods.


def min_over_critics(q: Tensor) -> Tensor:
    """Return the minimum over critics ``[..., E]``, against overestimation (TD3, Fujimoto et al. 2018, eq. 10)."""
    return q.min(-1).values


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Return Σ_e (Q_e − y)² for q ``[..., E]`` and y ``[...]`` (DDPG, Lillicrap et al. 2016; TD3)."""
    return (q - target.detach().unsqueeze(-1)).square().sum(-1)


@torch.no_grad()
def smoothed_action(action: Tensor, normal: Tensor, sigma: float, clip: float) -> Tensor:
    """Return clip(a + clip(σε, −c, c), −1, 1) with standard normal ε (TD3, Fujimoto et al. 2018, §5.3)."""
    return (action + (sigma * normal).clamp_(-clip, clip)).clamp_(-1, 1)


def ddpg_actor_loss(q: Tensor) -> Tensor:
    """Return −Q(s, μ(s)) (Silver et al. 2014; DDPG, Lillicrap et al. 2016)."""
    return -q


@torch.no_grad()
def sac_value(q_t: Tensor, log_prob: Tensor, alpha: float | Tensor) -> Tensor:
    """Return min_e Q_e(s_{t+1}, a) − α log π(a|s_{t+1}) for q ``[..., E]`` (SAC, Haarnoja et al. 2018b, eq. 3)."""
    return min_over_critics(q_t) - alpha * log_prob


def sac_critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Return ½ Σ_e (Q_e − y)² for q ``[..., E]`` and y ``[...]`` (SAC, Haarnoja et al. 2018b, eq. 5)."""
    return 0.5 * critic_loss(q, target)


def sac_actor_loss(q: Tensor, log_prob: Tensor, alpha: float | Tensor) -> Tensor:
    """Return α log π(a|s) − min_e Q_e(s, a) for q ``[..., E]``, a = f(s, ε) (SAC, Haarnoja et al. 2018b, eq. 9)."""
    return _detach(alpha) * log_prob - min_over_critics(q)


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return −log α · (log π(a|s) + H̄): eq. 18 of SAC (Haarnoja et al. 2018b) with log α in place of α.

    For discrete actions, ``log_prob`` is the expectation Σ_a π log π, and H̄ = c·log A with 0 < c < 1.
    """
    return -log_alpha * (log_prob.detach() + target_entropy)


@torch.no_grad()
def sac_discrete_value(q_t: Tensor, log_p: Tensor, alpha: float | Tensor) -> Tensor:
    """Return Σ_a π(a|s)(min_e Q_e(s, a) − α log π(a|s)) (discrete SAC, Christodoulou 2019, eq. 10).

    ``q_t`` is ``[..., E, A]`` or ``[..., A]``, ``log_p`` ``[..., A]``. Where π is 0, Q may be NaN; log π must be finite
    (see ``mask_logits``).
    """
    return -sac_discrete_actor_loss(q_t, log_p, alpha)


def sac_discrete_actor_loss(q: Tensor, log_p: Tensor, alpha: float | Tensor) -> Tensor:
    """Return Σ_a π(a|s)(α log π(a|s) − min_e Q_e(s, a)) (discrete SAC, Christodoulou 2019, eq. 12).

    Shapes are as in ``sac_discrete_value``. Q is detached.
    """
    p = log_p.exp()
    min_q = q.detach() if q.dim() == log_p.dim() else q.detach().amin(-2)
    return (p * (_detach(alpha) * log_p - min_q.masked_fill(p == 0, 0))).sum(-1)


def _detach(x: float | Tensor) -> float | Tensor:
    return x.detach() if isinstance(x, Tensor) else x
