"""Action distributions, as functions of their parameters ``[..., K]``.

Each has sample (from given noise, so that it can be drawn for a whole rollout at once), mode, log_prob, entropy and kl;
the last three are summed over the event to ``[...]``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# below any logit of a network, and finite, since 0 · −∞ is NaN; its exp is exactly 0
MASKED = -1e38
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# six-component mixture of zero-mean normals that approximates the logistic distribution of scale ½; the error of
# E|u + X| is at most 7e-8 for any u
LOGISTIC_STD = [0.42682338, 0.58304888, 0.79028762, 1.07035148, 1.44318584, 1.95040387]
LOGISTIC_WEIGHT = [0.02756704, 0.21775330, 0.39473939, 0.27845247, 0.07675131, 0.00473649]


def gumbel(uniform: Tensor) -> Tensor:
    """Convert uniform noise in [0, 1] to Gumbel noise −log(−log u), finite also at 0 and 1."""
    info = torch.finfo(uniform.dtype)
    return -uniform.clamp(info.tiny, 1 - info.eps / 2).log().neg().log()


# Categorical: logits [..., K], action [...] int64.


def mask_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Mask choices where ``mask`` is 0: their probability, entropy term and gradient are exactly 0."""
    return torch.where(mask.bool(), logits, MASKED)


def categorical_sample(logits: Tensor, gumbel: Tensor) -> Tensor:
    """Sample with the Gumbel-max trick: argmax(logits + Gumbel noise ``[..., K]``) (Gumbel 1954)."""
    return (logits + gumbel).argmax(-1)


def straight_through_sample(logits: Tensor, gumbel: Tensor, temperature: float) -> Tensor:
    """Sample a one-hot vector ``[..., K]`` whose gradient is that of softmax((logits + gumbel) / τ).

    Straight-through Gumbel-softmax (Jang et al. 2017, §2.2).
    """
    soft = ((logits + gumbel) / temperature).softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard + (soft - soft.detach())


def categorical_mode(logits: Tensor) -> Tensor:
    """Return the most likely choice."""
    return logits.argmax(-1)


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Return log p(action)."""
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Return −Σ p log p."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def categorical_terms(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(action) and the entropy −Σ p log p ``[...]``, from one softmax."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def categorical_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """Return KL(p‖q) = Σ p (log p − log q)."""
    log_p = logits_p.log_softmax(-1)
    return (log_p.exp() * (log_p - logits_q.log_softmax(-1))).sum(-1)


def pad_choices(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Pad k choices ``[..., Σ sizes]`` to ``[..., k, max(sizes)]``, which makes them one categorical of k rows.

    ``x`` are logits, or noise for ``categorical_sample``; the padding is never chosen.
    """
    longest = max(sizes)
    if min(sizes) == longest:
        return x.reshape(*x.shape[:-1], len(sizes), longest)
    rows = [F.pad(part, (0, longest - part.shape[-1]), value=MASKED) for part in torch.split(x, list(sizes), -1)]
    return torch.stack(rows, -2)


def ordinal_logits(x: Tensor) -> Tensor:
    """Return the logits of ordered choices, in which neighbours share terms (Tang & Agrawal 2020, eq. 4).

    Logit i is Σ_{j≤i} log σ(x_j) + Σ_{j>i} log(1 − σ(x_j)).
    """
    above = F.logsigmoid(-x)
    return F.logsigmoid(x).cumsum(-1) + above.sum(-1, keepdim=True) - above.cumsum(-1)


# Bernoulli: K independent bits; logits [..., K], action [..., K] of any dtype with 0 and 1.


def mask_bernoulli_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Fix the bits for which ``mask`` ``[..., K, 2]`` allows only one value; their entropy and gradient are 0.

    The last dimension of the mask is whether 0 and whether 1 is allowed.
    """
    zero, one = mask.bool().unbind(-1)
    return torch.where(one, torch.where(zero, logits, -MASKED), MASKED)


def bernoulli_sample(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample bits as int64 from uniform noise in [0, 1)."""
    return (uniform < logits.sigmoid()).long()


def bernoulli_mode(logits: Tensor) -> Tensor:
    """Return the most likely bits as int64."""
    return (logits > 0).long()


def bernoulli_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Return Σ (a·l − log(1 + eˡ))."""
    return (action * logits - F.softplus(logits)).sum(-1)


def perplexity(entropy: Tensor) -> Tensor:
    """Return exp(H), the number of equally likely choices that would have this entropy."""
    return entropy.exp()


def bernoulli_entropy(logits: Tensor) -> Tensor:
    """Return Σ (log(1 + eˡ) − l·σ(l))."""
    return (F.softplus(logits) - logits * logits.sigmoid()).sum(-1)


def bernoulli_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """Return Σ (σ(p)·(p − q) − log(1 + eᵖ) + log(1 + e^q))."""
    return (logits_p.sigmoid() * (logits_p - logits_q) - F.softplus(logits_p) + F.softplus(logits_q)).sum(-1)


# Diagonal Gaussian: mean [..., K]; log_std [..., K], or [K] for all rows; action [..., K].


def gaussian_sample(mean: Tensor, log_std: Tensor, normal: Tensor) -> Tensor:
    """Return μ + σ·ε with standard normal noise ε."""
    return torch.addcmul(mean, log_std.exp(), normal)


def gaussian_mode(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the mean."""
    return mean


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Return −Σ (½((a − μ)/σ)² + log σ + ½ log 2π)."""
    z = (action - mean) * torch.exp(-log_std)
    return -torch.add(log_std + HALF_LOG_2PI, z.square(), alpha=0.5).sum(-1)


def gaussian_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return Σ (log σ + ½ log 2πe)."""
    return (log_std + (HALF_LOG_2PI + 0.5)).expand_as(mean).sum(-1)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """Return KL(p‖q) = Σ (½(σp²/σq² + (μp − μq)²/σq² − 1) − log(σp/σq))."""
    log_ratio = log_std_p - log_std_q
    z = (mean_p - mean_q) * torch.exp(-log_std_q)
    return (0.5 * (torch.expm1(2 * log_ratio) + z.square()) - log_ratio).sum(-1)


# Tanh-squashed Gaussian: the environment gets tanh(u); samples, actions and modes here are u, to keep precision. They
# are those of the Gaussian (tanh of its mode is the median), and so is the KL, which is invariant under bijections.


def tanh_gaussian_log_prob(mean: Tensor, log_std: Tensor, u: Tensor) -> Tensor:
    """Return the log-density of tanh(u): log N(u; μ, σ) − Σ log(1 − tanh²u)."""
    log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))  # log(1 − tanh²u), stable for large |u|
    return gaussian_log_prob(mean, log_std, u) - log_slope.sum(-1)


def tanh_gaussian_draw(mean: Tensor, log_std: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sample u and the log-density of tanh(u); cheaper than two calls, since (u − μ)/σ is the noise ε.

    Gradients are the same: those through (u − μ)/σ cancel.
    """
    u = gaussian_sample(mean, log_std, normal)
    inside = torch.add(log_std, normal.square(), alpha=0.5)
    slope = torch.add(inside, u + F.softplus(-2 * u), alpha=-2)  # log(1 − tanh²u) as above, without its constant
    return u, -mean.shape[-1] * (HALF_LOG_2PI + 2 * math.log(2)) - slope.sum(-1)


def tanh_gaussian_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return H(N) + Σ E[log(1 − tanh²u)], with an error of at most 2e-7 per element for any mean and std.

    log(1 − tanh²u) = −2 log cosh u, and log cosh u = E|u + X| − log 2 for a logistic X of scale ½: both sides have the
    second derivative sech²u and the same limits. With a mixture of normals for X, u + X is normal with variance σ² + s²
    in each component, and the mean of its absolute value has a closed form. Quadrature over u would need more nodes as
    σ grows.
    """
    std = torch.sqrt((2 * log_std).exp().unsqueeze(-1) + mean.new_tensor(LOGISTIC_STD).square())  # [..., K, 6]
    mu = mean.unsqueeze(-1)
    z = mu / std
    absolute = math.sqrt(2 / math.pi) * std * (-0.5 * z.square()).exp() + mu * torch.erf(z * math.sqrt(0.5))
    log_cosh = absolute @ mean.new_tensor(LOGISTIC_WEIGHT) - math.log(2)
    return gaussian_entropy(mean, log_std) - 2 * log_cosh.sum(-1)


# Beta on [0, 1]: alpha, beta [..., K] > 0 (≥ 1, unimodal, for samples and modes), action [..., K].


def beta_sample(alpha: Tensor, beta: Tensor, noise: Tensor) -> Tensor:
    """Sample X/(X+Y), X ~ Gamma(α), Y ~ Gamma(β), by rejection with a fixed number of tries (Marsaglia & Tsang 2000).

    ``noise`` is ``[..., K, 2, tries, 2]``: standard normal, then uniform. A try is accepted with a probability of at
    least 95%, so 8 tries all fail once in 10¹⁰ samples; the first is used then. Samples are clipped away from 0 and 1,
    where the log-density may be infinite.
    """
    normal, uniform = noise.unbind(-1)
    d = torch.stack([alpha, beta], -1).unsqueeze(-1) - 1 / 3  # [..., K, 2, 1]
    v = (1 + normal / (9 * d).sqrt()) ** 3
    accepted = uniform.log() < 0.5 * normal.square() + d * (1 - v + v.log())  # NaN, so rejected, if v ≤ 0
    first = accepted.byte().argmax(-1, keepdim=True)
    x, y = (d * v.gather(-1, first)).squeeze(-1).clamp(min=torch.finfo(v.dtype).tiny).unbind(-1)
    eps = torch.finfo(v.dtype).eps
    return (x / (x + y)).clamp(eps, 1 - eps)


def beta_mode(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return (α − 1)/(α + β − 2), or the mean ½ where α = β = 1."""
    total = alpha + beta - 2
    return torch.where(total > 0, (alpha - 1) / total, 0.5)


def _log_beta(alpha: Tensor, beta: Tensor) -> Tensor:
    return alpha.lgamma() + beta.lgamma() - (alpha + beta).lgamma()


def beta_log_prob(alpha: Tensor, beta: Tensor, action: Tensor) -> Tensor:
    """Return Σ ((α−1) log a + (β−1) log(1−a) − log B(α, β))."""
    inside: Tensor = torch.xlogy(alpha - 1, action) + torch.special.xlog1py(beta - 1, -action)
    return (inside - _log_beta(alpha, beta)).sum(-1)


def beta_entropy(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return Σ (log B(α, β) − (α−1)ψ(α) − (β−1)ψ(β) + (α+β−2)ψ(α+β))."""
    total = (alpha + beta).digamma()
    inside = (alpha - 1) * (total - alpha.digamma()) + (beta - 1) * (total - beta.digamma())
    return (inside + _log_beta(alpha, beta)).sum(-1)


def beta_kl(alpha_p: Tensor, beta_p: Tensor, alpha_q: Tensor, beta_q: Tensor) -> Tensor:
    """Return Σ (log B(q) − log B(p) + (αp−αq)(ψ(αp)−ψ(αp+βp)) + (βp−βq)(ψ(βp)−ψ(αp+βp)))."""
    total = (alpha_p + beta_p).digamma()
    moved = (alpha_p - alpha_q) * (alpha_p.digamma() - total) + (beta_p - beta_q) * (beta_p.digamma() - total)
    return (_log_beta(alpha_q, beta_q) - _log_beta(alpha_p, beta_p) + moved).sum(-1)
