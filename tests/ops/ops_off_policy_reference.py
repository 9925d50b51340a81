"""The equations of off-policy learning in float64 numpy: slow and close to the papers' notation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ops_reference import rollout

Array = NDArray[np.float64]


def log_softmax(x: Array) -> Array:
    x = x - x.max(-1, keepdims=True)
    result: Array = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result


def huber(x: float, delta: float) -> float:
    return 0.5 * x * x if abs(x) <= delta else delta * (abs(x) - 0.5 * delta)


def best(q: Array, mask: Array) -> int:
    """The allowed choice with the largest value."""
    return max((a for a in range(len(q)) if mask[a]), key=lambda a: q[a])


def rescale(x: float, eps: float) -> float:
    """Kapturowski et al. 2019: h(x) = sign(x)(√(|x| + 1) − 1) + εx."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def munchausen(q_tm1: Array, action: int, q_t: Array, mask: Array, tau: float, alpha: float, clip: float) -> Any:
    """Vieillard et al. 2020, eq. 1 and 2: the bonus of s_t and the value of s_{t+1}; ``mask`` is that of both."""
    allowed = [a for a in range(len(q_t)) if mask[a]]
    now = sum(math.exp(q_tm1[a] / tau) for a in allowed)
    bonus = alpha * min(max(tau * math.log(math.exp(q_tm1[action] / tau) / now), clip), 0)
    total = sum(math.exp(q_t[a] / tau) for a in allowed)
    value = 0.0
    for a in allowed:
        p = math.exp(q_t[a] / tau) / total
        value += p * (q_t[a] - tau * math.log(p))
    return bonus, value


def mixed_priority(td: Array, weight: Array, eta: float) -> Array:
    result = np.zeros(td.shape[1])
    for b in range(td.shape[1]):
        sizes = [abs(td[t, b]) for t in range(td.shape[0]) if weight[t, b] > 0]
        if sizes:
            result[b] = eta * max(sizes) + (1 - eta) * sum(sizes) / len(sizes)
    return result


def sac_discrete_value(q: Array, log_p: Array, alpha: float) -> float:
    """Christodoulou 2019, eq. 10, for one state: q is [E, A]."""
    return float(sum(math.exp(x) * (min(q[:, a]) - alpha * x) for a, x in enumerate(log_p)))


def c51_project(target_support: Array, probabilities: Array, support: Array) -> Array:
    """Bellemare et al. 2017, eq. 7, for one distribution."""
    gap = (support[-1] - support[0]) / (len(support) - 1)
    result = np.zeros_like(support)
    for i, z in enumerate(support):
        for target, p in zip(target_support, probabilities, strict=True):
            clipped = min(max(target, support[0]), support[-1])
            result[i] += min(max(1 - abs(clipped - z) / gap, 0), 1) * p
    return result


def quantile_huber(quantiles: Array, target: Array, taus: Array, kappa: float) -> float:
    """Dabney et al. 2018a, eq. 9 and 10, for one state: Σ_i E_j ρ^κ_{τ_i}(target_j − θ_i)."""
    total = 0.0
    for theta, tau in zip(quantiles, taus, strict=True):
        for y in target:
            u = y - theta
            size = huber(u, kappa) if kappa else abs(u)
            total += abs(tau - (1 if u < 0 else 0)) * size / len(target)
    return total


def retrace(
    log_ratio: Array,
    reward: Array,
    discount: Array,
    continues: Array,
    q_tm1: Array,
    value_t: Array,
    lambda_: float,
    c_bar: float,
) -> Array:
    """Munos et al. 2016, eq. 3: Q + Σ_{t≥s} γᵗ⁻ˢ (Π_{s<i≤t} c_i) (r_t + γ E_π Q(s_{t+1}, ·) − Q(s_t, a_t))."""
    c = lambda_ * np.minimum(c_bar, np.exp(log_ratio))
    time, batch = reward.shape
    target = q_tm1.copy()
    for s in range(time):
        for b in range(batch):
            scale = 1.0
            for t in range(s, time):
                delta = reward[t, b] + discount[t, b] * value_t[t, b] - q_tm1[t, b]
                target[s, b] += scale * delta
                if continues[t, b] == 0 or t + 1 == time:
                    break
                scale *= discount[t, b] * c[t + 1, b]
    return target


def acer_gradient(logits: Array, log_mu: Array, action: int, q_ret: float, q: Array, value: float, c: float) -> Array:
    """Wang et al. 2017, eq. 9, in the logits, for one state: ∇log π(a) is onehot(a) − π."""
    p, mu = np.exp(log_softmax(logits)), np.exp(log_mu)
    one = np.eye(len(p))
    g: Array = min(c, p[action] / mu[action]) * (q_ret - value) * (one[action] - p)
    for a in range(len(p)):
        ratio = p[a] / mu[a]
        g = g + p[a] * max((ratio - c) / ratio, 0) * (q[a] - value) * (one[a] - p)
    return g


def off_policy_rollout(seed: int, time: int, batch: int) -> dict[str, Array]:
    """Return a rollout with ratios and action values, for ``retrace``."""
    rng = np.random.default_rng(seed)
    data = rollout(seed, time, batch)
    data["q_tm1"] = data.pop("value_tm1") + rng.normal(size=(time, batch))
    data["log_ratio"] = rng.uniform(-2.5, 2.5, (time, batch))
    return data
