"""What both soft actor-critics do with their losses, of continuous actions and of choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ludus.agents import replayed
from ludus.agents.off_policy import with_experience
from ludus.core.batch import Batch, Learned
from ludus.core.types import Tensors
from ludus.core.updater import Updater
from ludus.ops.q_learning import temperature_loss

if TYPE_CHECKING:
    from ludus.agents.sac import SAC
    from ludus.agents.sac_discrete import DiscreteSAC

EXCESS = "excess_entropy"  # what an actor's loss tells: the policy's entropy, less what it should keep


def targets(agent: SAC | DiscreteSAC, batch: Batch, value: Tensor, bonus: Tensor) -> Tensor:
    """What the critics should say: n-step returns collect the entropy bonus at every state that they pass.

    ``value`` and ``bonus`` are those of the states that transitions lead to, ``[T, B]``.
    """
    if agent.config.n_step == 1:
        return replayed.targets(batch, value, agent.config)
    passed = bonus if agent.config.sequence else agent.bonus_passed(batch)
    return replayed.targets(batch, value, agent.config, passed)


def alpha_loss(agent: SAC | DiscreteSAC, batch: Batch) -> tuple[Tensors, Tensors]:
    """The temperature rises where the policy has less than the entropy that it should keep."""
    return {"alpha": temperature_loss(agent.log_alpha, -batch.experience[EXCESS], 0.0)}, {}


def all_losses(agent: SAC | DiscreteSAC, batch: Batch) -> tuple[Tensors, Tensors]:
    """The losses of critics, actor and temperature together."""
    losses, metrics = agent.critic_loss(batch)
    more, found = agent.actor_loss(batch)
    if agent.config.learn_alpha:
        more |= agent.alpha_loss(with_experience(batch, **found))[0]
    return losses | more, metrics | found


def learn(agent: SAC | DiscreteSAC, batch: Batch, updater: Updater) -> Learned:
    """A step each of critics, actor and temperature, all with the temperature of before."""
    metrics = updater.step(agent.critic_loss, batch, "critic")
    priority = metrics.pop("priority", None)
    found = updater.step(agent.actor_loss, batch, "actor")
    metrics |= {"loss/actor": found["loss/actor"], "entropy": found["entropy"]}
    metrics["alpha"] = agent.log_alpha.detach().exp()
    if agent.config.learn_alpha:
        more = with_experience(batch, **{EXCESS: found[EXCESS]})
        metrics["loss/alpha"] = updater.step(agent.alpha_loss, more, "alpha")["loss/alpha"]
    agent.follow()
    return Learned(metrics, priority)
