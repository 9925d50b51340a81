"""From a loss to a step of the parameters, on one flat block, eager or as one compiled function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ludus.core.agent import Agent, LossFunction, Updater
from ludus.core.errors import UserError
from ludus.core.types import Batch, State, Tensors
from ludus.networks.tape import Tape
from ludus.ops.optimizers import adam_, clip_norm_, fused_adam_, rmsprop_tf_

ALIGN = 16  # parameters start at multiples of 64 bytes, as vector instructions like it
BETA1, BETA2, RMSPROP_ALPHA = 0.9, 0.999, 0.99


class FlatParameters:
    """All trainable parameters as views of one block, and their gradients as views of another.

    Clip, optimizer, averaging and publishing then are a few calls whatever the number of layers.
    """

    def __init__(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        device, dtype = parameters[0][1].device, parameters[0][1].dtype
        self.places: list[tuple[str, int, torch.Size, tuple[int, ...]]] = []
        size = 0
        for name, p in parameters:
            self.places.append((name, size, p.shape, p.stride()))
            size += -(-p.numel() // ALIGN) * ALIGN
        self.value = torch.zeros(size, dtype=dtype, device=device)
        self.gradient = torch.zeros(size, dtype=dtype, device=device)
        with torch.no_grad():
            for (_, p), value, gradient in zip(
                parameters, self.views(self.value), self.views(self.gradient), strict=True
            ):
                value.copy_(p)
                p.data, p.grad = value, gradient  # strides are kept, so channels_last weights stay so

    def views(self, block: Tensor) -> list[Tensor]:
        """``block`` seen as the parameters."""
        return [torch.as_strided(block, shape, stride, at) for _, at, shape, stride in self.places]


class LocalUpdater(Updater):
    """One process: backward, clip and optimizer step on the flat blocks; ``mean`` is the identity."""

    def __init__(
        self,
        agent: Agent,
        optimizer: Literal["adam", "rmsprop"],
        learning_rate: float,
        eps: float,
        max_grad_norm: float,
    ) -> None:
        self.agent, self.optimizer, self.eps, self.max_grad_norm = agent, optimizer, eps, max_grad_norm
        self.flat = FlatParameters([(n, p) for n, p in agent.named_parameters() if p.requires_grad])
        value = self.flat.value
        self._rate, self._lr = learning_rate, torch.tensor(learning_rate, device=value.device)
        self._moments = {"square": torch.ones_like(value)} if optimizer == "rmsprop" else {}
        if optimizer == "adam":
            self._moments = {k: torch.zeros_like(value) for k in ("mean", "square")}
        self._steps = torch.zeros((), device=value.device)
        self._coefficients = dict(agent.loss_coefficients())
        self._tape = Tape(agent)
        self.by_hand = self._tape.complete  # until all is compiled
        self._step: Callable[[LossFunction, Batch], Tensors] = self._eager

    @property
    def learning_rate(self) -> float:
        """The step size; a tensor behind it, so that a change never recompiles."""
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._rate = rate
            self._lr.fill_(rate)

    def step(self, loss: LossFunction, batch: Batch) -> Tensors:
        """Take one step and return losses, metrics and the gradient's norm as 0-dimensional tensors."""
        return self._step(loss, batch)

    def mean(self, x: Tensor) -> Tensor:
        """One rank: ``x`` itself."""
        return x

    def compile(self, on_failure: Callable[[str], object]) -> None:
        """From now on run forward, backward, clip and optimizer as one compiled function.

        Compilation happens at the first step. Where it fails, ``on_failure`` gets a sentence and all goes on eagerly.
        """
        from ludus.containers.compiled import CompiledStep  # imports the compiler, which takes a second

        compiled: dict[Any, CompiledStep] = {}

        def run(loss: LossFunction, batch: Batch) -> Tensors:
            key = getattr(loss, "__func__", loss)
            if key not in compiled:
                compiled[key] = CompiledStep(self, loss)
            step = compiled[key]
            try:
                graph, inputs = step.prepare(batch)
            except Exception as error:  # the compiler and what it traces may raise anything; nothing has run yet
                reason = " ".join(str(error).split())[:200]
                on_failure(f"The update cannot be compiled ({type(error).__name__}: {reason}); it runs eagerly.")
                self._step, self.by_hand = self._eager, self._tape.complete
                return self._eager(loss, batch)
            return step.run(graph, inputs)

        self._step, self.by_hand = run, False

    def _eager(self, loss: LossFunction, batch: Batch) -> Tensors:
        self.flat.gradient.zero_()
        with self._tape:
            losses, metrics = loss(batch)
        if not self._tape.fed or any(x.requires_grad for x in losses.values()):
            self.total(losses).backward()  # type: ignore[no-untyped-call]
        self._tape.backward()
        with torch.no_grad():
            return self.report(losses, metrics, self.move(self.flat.gradient, self.moving, fused_adam_))

    def total(self, losses: Tensors) -> Tensor:
        """The sum of the losses, each weighted by its coefficient; those of weight 0 are left out."""
        total: Tensor | None = None
        for name, x in losses.items():
            weight = self._coefficients.get(name, 1.0)
            if total is None:
                total = x if weight == 1 else x * weight if weight else None
            elif weight:
                total = torch.add(total, x, alpha=weight)
        if total is None:
            raise UserError("All losses have the weight 0, so there is nothing to learn from; raise a coefficient.")
        return total

    @property
    def moving(self) -> Tensors:
        """All that a step changes or depends on beside the gradient: parameters, moments, step count and step size."""
        return {"value": self.flat.value, "steps": self._steps, "lr": self._lr} | self._moments

    def move(self, gradient: Tensor, at: Tensors, adam: Callable[..., None] = adam_) -> Tensor:
        """Clip the gradient and step what ``moving`` names, in place; return the norm that it had."""
        norm = clip_norm_(gradient, self.max_grad_norm)
        if self.optimizer == "adam":
            adam(at["value"], gradient, at["mean"], at["square"], at["steps"], at["lr"], BETA1, BETA2, self.eps)
        else:
            rmsprop_tf_(at["value"], gradient, at["square"], at["lr"], RMSPROP_ALPHA, self.eps)
        return norm

    @staticmethod
    def report(losses: Tensors, metrics: Tensors, norm: Tensor) -> Tensors:
        """The metrics of a step: losses by name, the agent's own, and the gradient's norm."""
        return {f"loss/{name}": x.detach() for name, x in losses.items()} | metrics | {"gradient_norm": norm}

    def state_dict(self) -> State:
        """The optimizer's moments, its step count and the learning rate."""
        return {"moments": dict(self._moments), "steps": self._steps, "learning_rate": self._rate}

    def load_state_dict(self, state: State) -> None:
        """Take them over, in place."""
        with torch.no_grad():
            for name, x in self._moments.items():
                x.copy_(state["moments"][name])
            self._steps.copy_(state["steps"])
        self.learning_rate = state["learning_rate"]
