"""Losses and rewards of adversarial imitation.

``logit`` is that of D(s, a), the probability that a pair comes from the expert.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

ImitationReward = Literal["logit", "positive", "negative"]


def discriminator_loss(logit: Tensor, expert: Tensor) -> Tensor:
    """Return −log D(s, a) of expert pairs and −log(1 − D(s, a)) of others (Ho & Ermon 2016, eq. 17).

    ``expert`` is 1 for pairs of the expert and 0 for those of the policy, whose roles are swapped in the paper.
    """
    return functional.softplus((1 - 2 * expert) * logit)


def gradient_penalty(gradient: Tensor) -> Tensor:
    """Return ‖∇_x logit‖² of gradients ``[…, K]`` (Thanh-Tung et al. 2019).

    Its minimum is a flat discriminator, as it should be where policy and expert agree; (‖∇_x logit‖ − 1)² (Gulrajani
    et al. 2017) asks for slopes of 1 there too.
    """
    return gradient.square().sum(-1)


def imitation_reward(logit: Tensor, kind: ImitationReward) -> Tensor:
    """Return the reward of a pair.

    ``logit``: log D − log(1 − D) (Fu et al. 2018). ``positive``: −log(1 − D) > 0 (Ho & Ermon 2016), which rewards long
    episodes. ``negative``: log D < 0, which rewards short ones.
    """
    if kind == "positive":
        return functional.softplus(logit)
    if kind == "negative":
        return -functional.softplus(-logit)
    return logit
