"""An agent of your own: PPO with one more loss.

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
from ludus.ops.policy_gradient import weighted_mean


@dataclass(frozen=True)
class CalmConfig(PPOConfig):
    """Settings of PPO, and one more: a loss called ``calm`` is weighted by ``calm_coef``."""

    calm_coef: float = 0.001  # raise to keep the policy's outputs small, so that it never becomes too sure


class CalmPPO(PPO):
    """PPO that also pays for large policy outputs."""

    Config: type[Any] = CalmConfig

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Add a loss by adding a key."""
        losses, metrics = super().compute_loss(batch)
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first)
        policy = torch.cat([x for name, x in outputs.items() if name.startswith("policy/")], dim=-1)  # [T, B, k]
        losses["calm"] = weighted_mean(policy.square().mean(-1), batch.weight)
        return losses, metrics
