"""A3C: asynchronous advantage actor-critic (Mnih et al. 2016): workers compute gradients, applied as they arrive."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ludus.agents.actor_critic import ActorCritic
from ludus.core.batch import Batch, Learned
from ludus.core.cache import Unroll
from ludus.core.rows import Rows
from ludus.core.types import Tensors
from ludus.core.updater import Updater, total_loss
from ludus.experience.rollout_unroll import RolloutUnroll

GRADIENT, LOSSES = "gradient", "losses"  # tensors of an unroll: the flat gradient, and the losses
NAMES = ("policy", "value", "entropy")  # of the losses


class GradientUnroll(RolloutUnroll):
    """A rollout that a worker sends with its gradient; for the learner, each one is a batch."""

    compute: Callable[[Batch], Tensors]  # returns GRADIENT and LOSSES of a rollout
    size: int  # of the gradient
    received: Tensors | None = None  # GRADIENT and LOSSES of the last unroll; None in a worker

    def submit(self) -> Unroll:
        """Return the unroll with its gradient and losses."""
        unroll = super().submit()
        for name, x in self.compute(self.read()).items():
            unroll.tensors[name] = self.memory[name].copy_(x) if self.memory else x
        return unroll

    def outline(self, rows: int) -> Tensors:
        """Add the gradient and the losses."""
        sent = {GRADIENT: torch.zeros(self.size, device="meta"), LOSSES: torch.zeros(len(NAMES), device="meta")}
        return super().outline(rows) | sent

    def receive(self, unroll: Unroll) -> None:
        """Receive an unroll, which makes a batch."""
        self.received = {name: unroll.tensors[name].to(self.device, copy=True) for name in (GRADIENT, LOSSES)}
        rest = {name: x for name, x in unroll.tensors.items() if name not in self.received}
        super().receive(unroll._replace(tensors=rest))
        self.finish()

    def read(self) -> Batch:
        """Return the rollout; the learner's has the gradient and losses in its experience."""
        batch = super().read()
        if self.received is not None:
            batch.experience |= self.received
        return batch


class A3C(ActorCritic):
    """A2C whose workers compute the gradient of their unrolls; in one process it is A2C."""

    corrects_old_unrolls = True  # gradients of older weights are applied as they are, as in the paper
    learns_from_single_unrolls = True

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters of the gradient, in its order."""
        return [p for p in self.parameters() if p.requires_grad]

    def make_cache(self, rows: Rows) -> GradientUnroll:
        """Make the cache that receives unrolls with gradients."""
        return self.make_unroll(rows)

    def make_unroll(self, rows: Rows, memory: Tensors | None = None) -> GradientUnroll:
        """Make the rollout that a worker fills and submits with its gradient."""
        config = self.config
        unroll = GradientUnroll(config.rollout, rows, self.given_gamma, self.device, config.normalize_reward, memory)
        unroll.compute, unroll.size = self.gradient, sum(p.numel() for p in self.trainable())
        return unroll

    def gradient(self, batch: Batch) -> Tensors:
        """Return the flat gradient of the weighted losses of a rollout, and the losses."""
        losses, _ = self.compute_loss(self.with_shares(self.prepare(batch).without_last_observation()))
        total, parameters = total_loss(losses, self.loss_coefficients()), self.trainable()
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if x is None else x for p, x in zip(parameters, found, strict=True)]
        values = torch.stack([losses[name].detach() for name in NAMES])
        return {GRADIENT: torch.cat([x.flatten() for x in parts]), LOSSES: values}

    def received_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return a linear function of the parameters whose gradient is the received one."""
        flat = torch.cat([p.flatten() for p in self.trainable()])
        return {GRADIENT: torch.dot(flat, batch.experience[GRADIENT])}, {}

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Take a step with the received gradient, and update the running statistics."""
        if GRADIENT not in batch.experience:
            return super().learn(batch, updater)
        self.scaled_reward(batch, updater.sum)  # updates the scale
        metrics = updater.step(self.received_loss, batch, "all")
        self.update_statistics(batch, updater.sum)
        losses: Tensor = batch.experience[LOSSES]
        named = {f"loss/{name}": x for name, x in zip(NAMES, losses.unbind(), strict=True)}
        return Learned(named | {"gradient_norm": metrics["gradient_norm"]})
