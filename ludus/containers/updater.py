"""From a loss to a step of the parameters, on one flat block, eager or as one compiled function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.types import State, Tensors
from ludus.core.updater import LossFunction, NonFiniteError, Updater
from ludus.networks.mode import depends_on_mode
from ludus.ops.fused import gradients
from ludus.ops.optimizers import adam_, clip_norm_, fused_adam_, rmsprop_, rmsprop_tf_

ALIGN = 16  # parameters start at multiples of 64 bytes, as vector instructions like it
BETA1, BETA2, RMSPROP_ALPHA = 0.9, 0.999, 0.99
Place = tuple[str, int, torch.Size, tuple[int, ...]]  # name, start in the block, shape and stride


class FlatParameters:
    """All trainable parameters as views of one block, and their gradients as views of another.

    Clip, optimizer, averaging and publishing then are a few calls whatever the number of layers.
    """

    def __init__(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        device, dtype = parameters[0][1].device, parameters[0][1].dtype
        self.places: list[Place] = []
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

    def views(self, block: Tensor, places: list[Place] | None = None, start: int = 0) -> list[Tensor]:
        """``block`` seen as the parameters, or as those at some places; ``start``: where it begins."""
        return [torch.as_strided(block, shape, stride, at - start) for _, at, shape, stride in places or self.places]


class Part(NamedTuple):
    """The parameters of one group: a range of the block, with a step count and a step size of its own."""

    rows: slice
    whole: bool  # it is all there is
    places: list[Place]
    parameters: tuple[nn.Parameter, ...]
    gradients: list[Tensor]  # as views of the gradient's block
    steps: Tensor
    lr: Tensor
    rate: float  # the step size at first

    def of(self, block: Tensor) -> Tensor:
        """Its own range of a block."""
        return block if self.whole else block[self.rows]


class LocalUpdater(Updater):
    """One process: backward, clip and optimizer step on the flat blocks; ``mean`` is the identity.

    ``rates`` are the learning rates of groups that have one of their own.
    """

    def __init__(
        self,
        agent: Agent,
        optimizer: Literal["adam", "rmsprop", "rmsprop_tf"],
        learning_rate: float,
        eps: float,
        max_grad_norm: float,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self.agent, self.optimizer, self.eps, self.max_grad_norm = agent, optimizer, eps, max_grad_norm
        groups = {name: list(own) for name, own in agent.parameter_groups().items()}
        names = {p: name for name, p in agent.named_parameters()}
        self.flat = FlatParameters([(names[p], p) for own in groups.values() for p in own])
        value = self.flat.value
        self._rate = self._first_rate = learning_rate
        self._moments = {"square": torch.ones_like(value) if optimizer == "rmsprop_tf" else torch.zeros_like(value)}
        if optimizer == "adam":
            self._moments["mean"] = torch.zeros_like(value)
        self.parts = _parts(self.flat, groups, {name: (rates or {}).get(name, learning_rate) for name in groups})
        self._coefficients = dict(agent.loss_coefficients())
        self._norms: list[Tensor] = []
        self._step: Callable[[LossFunction, Batch, Part], Tensors] = self._eager
        # modules are switched between training and evaluation mode only if they learn and the modes differ: a switch
        # visits every layer
        parts = [module.eval() for module in agent.children()]
        learning = [module for module in parts if any(p.requires_grad for p in module.parameters())]
        self._modal = [module for module in learning if depends_on_mode(module)]
        self._flushed = bool(torch.tensor(2e-38).mul(0.1) == 0)  # whether the user has turned that on for all

    @property
    def learning_rate(self) -> float:
        """The step size; tensors behind it, so that a change never recompiles. Groups keep their proportions."""
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._rate = rate
            for part in self.parts.values():
                part.lr.fill_(rate if part.rate == self._first_rate else part.rate * rate / self._first_rate)

    def step(self, loss: LossFunction, batch: Batch, group: str = "all") -> Tensors:
        """Take one step and return losses, metrics and the gradient's norm as 0-dimensional tensors.

        The loss runs with the networks in training mode; at all other times they are in evaluation mode.
        Numbers too small to be normal count as 0 in it: the moments of dead units would make Adam three times slower.
        """
        torch.set_flush_denormal(True)
        self.train(True)
        try:
            metrics = self._step(loss, batch, self.parts[group])
        finally:
            self.train(False)
            torch.set_flush_denormal(self._flushed)
        norm = metrics["gradient_norm"]
        if not norm.is_cpu:
            self._norms.append(norm)
        elif not math.isfinite(norm):
            raise NonFiniteError(loss, batch, group, metrics)
        return metrics

    def take_norms(self) -> list[Tensor]:
        """The norms of gradients on a GPU since the last call, to be looked at in one wait."""
        norms, self._norms = self._norms, []
        return norms

    def train(self, mode: bool) -> None:
        """Put the networks in training mode (BatchNorm, Dropout), or in evaluation mode.

        The agent's own flag stays: it tells a training run from an evaluation.
        """
        for module in self._modal:
            module.train(mode)

    def mean(self, x: Tensor) -> Tensor:
        """One rank: ``x`` itself."""
        return x

    def compile(
        self, on_failure: Callable[[str], object], during: Callable[[Callable[[], Any]], Any] = lambda build: build()
    ) -> None:
        """From now on run forward, backward, clip and optimizer as one compiled function.

        Compilation happens at the first step, within ``during``. Where it fails, ``on_failure`` gets a sentence and all
        goes on eagerly.
        """
        from ludus.containers.compiled import CompiledStep  # imports the compiler, which takes a second

        compiled: dict[Any, CompiledStep] = {}

        def run(loss: LossFunction, batch: Batch, part: Part) -> Tensors:
            key = getattr(loss, "__func__", loss), part.rows.start
            if key not in compiled:
                compiled[key] = CompiledStep(self, loss, part, during)
            step = compiled[key]
            try:
                graph, inputs = step.prepare(batch)
            except Exception as error:  # the compiler and what it traces may raise anything; nothing has run yet
                reason = " ".join(str(error).split())[:200]
                on_failure(f"The update cannot be compiled ({type(error).__name__}: {reason}); it runs eagerly.")
                self._step = self._eager
                return self._eager(loss, batch, part)
            return step.run(graph, inputs)

        self._step = run

    def _eager(self, loss: LossFunction, batch: Batch, part: Part) -> Tensors:
        losses, metrics = loss(batch)
        # no gradient is taken of what another group holds, though the loss depends on it
        found = gradients(self.total(losses), part.parameters)
        with torch.no_grad():
            gradient = part.of(self.flat.gradient)
            if any(x is None for x in found):
                gradient.zero_()
            torch._foreach_copy_(
                [view for view, x in zip(part.gradients, found, strict=True) if x is not None],
                [x for x in found if x is not None],
            )
            return self.report(losses, metrics, self.move(gradient, self.moving(part), part, eager=True))

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

    def moving(self, part: Part) -> Tensors:
        """All that a step changes or depends on beside the gradient: parameters, moments, step count and step size."""
        return {"value": self.flat.value, "steps": part.steps, "lr": part.lr} | self._moments

    def move(self, gradient: Tensor, at: Tensors, part: Part, eager: bool = False) -> Tensor:
        """Clip the gradient and step what ``moving`` names, in place; return the norm that it had.

        Parameters stay as they are where the norm is not finite.
        """
        looks = eager and gradient.is_cpu
        norm = clip_norm_(gradient, self.max_grad_norm, looks)
        if looks:
            if not math.isfinite(norm):
                return norm
        else:
            finite = torch.isfinite(norm)
            gradient, at = gradient.where(finite, 0.0), at | {"lr": at["lr"] * finite}
        value, square = part.of(at["value"]), part.of(at["square"])
        if self.optimizer == "adam":
            adam = fused_adam_ if eager else adam_
            adam(value, gradient, part.of(at["mean"]), square, at["steps"], at["lr"], BETA1, BETA2, self.eps)
        else:
            rmsprop = rmsprop_tf_ if self.optimizer == "rmsprop_tf" else rmsprop_
            rmsprop(value, gradient, square, at["lr"], RMSPROP_ALPHA, self.eps)
        return norm

    @staticmethod
    def report(losses: Tensors, metrics: Tensors, norm: Tensor) -> Tensors:
        """The metrics of a step: losses by name, the agent's own, and the gradient's norm."""
        return {f"loss/{name}": x.detach() for name, x in losses.items()} | metrics | {"gradient_norm": norm}

    def state_dict(self) -> State:
        """The optimizer's name, its moments, its step counts and the learning rate."""
        steps = torch.stack([part.steps for part in self.parts.values()])
        moments = dict(self._moments)
        return {"optimizer": self.optimizer, "moments": moments, "steps": steps, "learning_rate": self._rate}

    def load_state_dict(self, state: State) -> None:
        """Take them over, in place; refuse those of another optimizer."""
        saved = state.get("optimizer")
        if saved is None and self.optimizer == "rmsprop":
            raise UserError(
                "agent.optimizer is rmsprop, and was TensorFlow's before 0.2.0, when the checkpoint was saved; "
                'write optimizer = "rmsprop_tf" into the config.toml of its run.'
            )
        if saved not in (None, self.optimizer):
            raise UserError(
                f"agent.optimizer is {self.optimizer}, but the checkpoint was saved with {saved!r:.40}; set it back."
            )
        with torch.no_grad():
            for name, x in self._moments.items():
                x.copy_(state["moments"][name])
            for part, steps in zip(self.parts.values(), state["steps"], strict=True):
                part.steps.copy_(steps)
        self.learning_rate = state["learning_rate"]


def _parts(
    flat: FlatParameters, groups: Mapping[str, list[nn.Parameter]], rates: Mapping[str, float]
) -> dict[str, Part]:
    """The range of each group in the block, in their order."""
    parts: dict[str, Part] = {}
    device, places = flat.value.device, list(flat.places)
    for name, own in groups.items():
        mine, places = places[: len(own)], places[len(own) :]
        rows = slice(mine[0][1], places[0][1] if places else len(flat.value))
        counters = torch.zeros((), device=device), torch.tensor(rates[name], device=device)
        parts[name] = Part(
            rows, len(groups) == 1, mine, tuple(own), flat.views(flat.gradient, mine), *counters, rates[name]
        )
    return parts
