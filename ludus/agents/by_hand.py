"""Losses with their gradient by hand, for the plainest and commonest cases: one Discrete action without a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ludus.core.batch import Batch
from ludus.core.types import Tensors
from ludus.core.updater import LossFunction
from ludus.networks.heads import Categorical
from ludus.networks.numpy_actor import plain_input
from ludus.networks.policy import Policy
from ludus.networks.tape import bare_mlp
from ludus.ops.by_hand import huber_q, ppo_categorical
from ludus.ops.replay import counted

if TYPE_CHECKING:
    from ludus.agents.dqn import DQN
    from ludus.agents.ppo import PPO

DQN_PARTS = ("compute_loss", "run", "make_head", "_aim", "_outputs")


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


def q_loss_by_hand(agent: DQN, known: type[DQN]) -> LossFunction | None:
    """The same for DQN: one network that gives expected values of single transitions, and the largest of the target's.

    Priorities, n-step returns and importance weights are no matter.
    """
    config, own = agent.config, any(getattr(type(agent), name) is not getattr(known, name) for name in DQN_PARTS)
    plain = config.values == "expected" and not (config.dueling or config.noisy or config.sequence or config.rescaled)
    own = own or bool(agent.loss_coefficients())
    if own or not plain or config.double or config.munchausen or agent.mask is not None:
        return None
    network, target = agent.networks["q"], bare_mlp(agent.target.networks["q"], "q")
    if target is None:
        return None
    as_it_is = plain_input(agent.preprocess)

    def loss(batch: Batch) -> tuple[Tensors, Tensors]:
        ((name, x),) = (batch.observation if as_it_is else agent.preprocess(batch.observation)).items()
        q = network({name: x[:1]}, batch.state, batch.first[:1])[0]["q"]
        with torch.no_grad():
            found = q.detach()
            aim = torch.addcmul(batch.reward, batch.discount, target(x[1:]).amax(-1))
            share = counted(batch.weight, batch.real) if config.prioritized else None
            value, q.grad, taken = huber_q(found, batch.action[agent.name], aim, share)
            metrics = {"q": found.mean()}
            if config.prioritized:
                metrics["priority"] = (taken.squeeze(-1) - aim).abs_()[0]
        return {"value": value}, metrics

    return loss
