"""The equations of ``ludus.ops`` in float64 numpy: slow and close to the papers' notation.

Everything is ``[T, B]``; ``discount`` is γ(1 − terminated), ``continues`` is 0 where a trace is cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def linear_scan(x: Array, decay: Array, last: Array) -> Array:
    y = np.empty_like(x)
    later = last
    for t in reversed(range(len(x))):
        y[t] = later = x[t] + np.where(decay[t] == 0, 0, decay[t] * later)
    return y


def reach(continues: Array, t: int, b: int) -> int:
    """How many steps can be summed from row t on: up to and with the first cut, or the end of the rollout."""
    k = 1
    while t + k < len(continues) and continues[t + k - 1, b] != 0:
        k += 1
    return k


def n_step(reward: Array, discount: Array, continues: Array, value_t: Array, n: int, t: int, b: int) -> float:
    k = min(n, reach(continues, t, b))
    total = 0.0
    for i in range(k):
        total += np.prod(discount[t : t + i, b]) * reward[t + i, b]
    weight = np.prod(discount[t : t + k, b])
    return float(total + (weight * value_t[t + k - 1, b] if weight else 0))


def n_step_returns(reward: Array, discount: Array, continues: Array, value_t: Array, n: int) -> Array:
    time, batch = reward.shape
    return np.array(
        [[n_step(reward, discount, continues, value_t, n, t, b) for b in range(batch)] for t in range(time)]
    )


def lambda_returns(reward: Array, discount: Array, continues: Array, value_t: Array, lambda_: float) -> Array:
    """(1 − λ) Σ_{n<N} λⁿ⁻¹ G⁽ⁿ⁾ + λᴺ⁻¹ G⁽ᴺ⁾, N being the longest that can be reached."""
    result = np.empty_like(reward)
    for t, b in np.ndindex(*reward.shape):
        longest = reach(continues, t, b)
        g = [n_step(reward, discount, continues, value_t, n, t, b) for n in range(1, longest + 1)]
        mixed = (1 - lambda_) * sum(lambda_ ** (n - 1) * g[n - 1] for n in range(1, longest))
        result[t, b] = mixed + lambda_ ** (longest - 1) * g[-1]
    return result


def gae(reward: Array, discount: Array, continues: Array, value_tm1: Array, value_t: Array, lambda_: float) -> Array:
    result = np.zeros_like(reward)
    for t, b in np.ndindex(*reward.shape):
        for i in range(reach(continues, t, b)):
            s = t + i
            bootstrap = discount[s, b] * value_t[s, b] if discount[s, b] else 0.0
            delta = reward[s, b] + bootstrap - value_tm1[s, b]
            result[t, b] += lambda_**i * np.prod(discount[t:s, b]) * delta
    return result


def vtrace(
    log_ratio: Array,
    reward: Array,
    discount: Array,
    continues: Array,
    value_tm1: Array,
    value_t: Array,
    rho_bar: float,
    c_bar: float,
    lambda_: float,
    pg_rho_bar: float,
) -> dict[str, Array]:
    """Espeholt et al. 2018, eq. 1: v_s = V(s) + Σ_t γᵗ⁻ˢ (Π_{s≤i<t} c_i) ρ_t (r_t + γV(s_{t+1}) − V(s_t))."""
    ratio = np.exp(log_ratio)
    rho, c = np.minimum(rho_bar, ratio), lambda_ * np.minimum(c_bar, ratio)
    target = value_tm1.copy()
    for s, b in np.ndindex(*reward.shape):
        for i in range(reach(continues, s, b)):
            t = s + i
            delta = rho[t, b] * (reward[t, b] + discount[t, b] * value_t[t, b] - value_tm1[t, b])
            target[s, b] += np.prod(discount[s:t, b]) * np.prod(c[s:t, b]) * delta
    later = value_t.copy()  # v_{s+1}, which is V(s_{t+1}) behind a cut
    later[:-1] = np.where(continues[:-1] != 0, target[1:], value_t[:-1])
    mixed = (1 - lambda_) * value_t + lambda_ * later
    advantage = np.minimum(pg_rho_bar, ratio) * (reward + discount * mixed - value_tm1)
    return {"target": target, "error": target - value_tm1, "advantage": advantage, "rho": rho}


def ppo_clip_loss(ratio: float, advantage: float, clip: float) -> float:
    """Schulman et al. 2017, figure 1, case by case."""
    if advantage >= 0:
        return -min(ratio, 1 + clip) * advantage
    return -max(ratio, 1 - clip) * advantage


def rollout(seed: int, time: int, batch: int, gamma: float = 0.97, ends: float = 0.3) -> dict[str, Any]:
    """Random experience with terminations, truncations and unreal rows, and values that agree with each other."""
    rng = np.random.default_rng(seed)
    terminated = rng.random((time, batch)) < ends / 3
    truncated = rng.random((time, batch)) < ends / 3
    unreal = rng.random((time, batch)) < ends / 3
    value = rng.normal(size=(time + 1, batch))
    continues = 1.0 - (terminated | truncated | unreal)
    value_t = np.where(continues == 1, value[1:], rng.normal(size=(time, batch)))
    return {
        "reward": rng.normal(size=(time, batch)),
        "discount": gamma * (1.0 - terminated),
        "continues": continues,
        "value_tm1": value[:-1],
        "value_t": value_t,
    }
