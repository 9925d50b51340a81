"""A custom agent: PPO with an additional loss.

In this folder:

ludus train CartPole-v1 --agent my_agent:CalmPPO --preset cartpole/ppo --agent.calm-coef 0.01
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ludus.agents.ppo import PPO, PPOConfig
from ludus.core.batch import Batch
from ludus.core.types import Tensors
from ludus.ops.policy_gradient import share_sum


@dataclass(frozen=True)
class CalmConfig(PPOConfig):
    """Settings of PPO, and the weight of the loss ``calm``."""

    calm_coef: float = 0.001  # raise to keep the policy outputs (logits) smaller


class CalmPPO(PPO):
    """PPO with a penalty on large policy outputs."""

    Config: type[Any] = CalmConfig

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Add a loss by adding a key; it is weighted by ``<key>_coef``."""
        losses, metrics = super().compute_loss(batch)
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first)
        policy = torch.cat([x for name, x in outputs.items() if name.startswith("policy/")], dim=-1)  # [T, B, k]
        losses["calm"] = share_sum(policy.square().mean(-1), batch.share)
        return losses, metrics
