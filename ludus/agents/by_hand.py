"""PPO's loss with its gradient by hand, for the plainest and commonest case: one Discrete action without a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.agent import LossFunction
from ludus.core.types import Batch, Tensors
from ludus.networks.heads import Categorical
from ludus.networks.policy import Policy
from ludus.ops.by_hand import ppo_categorical

if TYPE_CHECKING:
    from ludus.agents.ppo import PPO


def loss_by_hand(agent: PPO, known: type[PPO]) -> LossFunction | None:
    """The same as ``compute_loss``, which leaves gradients at the outputs and no graph; None where it does not apply.

    A subclass of ``known`` that computes its outputs or its loss in a way of its own is left alone.
    """
    own = any(getattr(type(agent), name) is not getattr(known, name) for name in ("compute_loss", "outputs"))
    choice = type(agent.policy) is Policy and [type(x) for x in agent.policy.heads.values()] == [Categorical]
    if own or not choice or agent.masked or agent.config.value_clip or agent.keeps_distribution:
        return None
    coefficients = dict(agent.loss_coefficients())

    def loss(batch: Batch) -> tuple[Tensors, Tensors]:
        old = (batch if "share" in batch.experience else agent.weigh(batch)).experience
        outputs, _ = agent.outputs(batch.observation, batch.state, batch.first)
        ((name, action),) = batch.action.items()
        logits, value = outputs[f"policy/{name}"], outputs["value"]
        given = logits.detach(), value.detach(), action, old, agent.clip, coefficients
        losses, metrics, logits.grad, value.grad = ppo_categorical(*given)
        return losses, metrics

    return loss
