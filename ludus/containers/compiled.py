"""One compiled function for forward, backward, clip and optimizer step.

The step is traced as a function of tensors (parameters, moments, buffers, batch) and compiled as a graph. This skips
the guards that ``torch.compile`` checks at every call, up to a third of a small update; graphs are looked up by the
shapes and strides of the batch instead, and losses are pure functions by contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._inductor import compile as compile_graph
from torch.fx.experimental.proxy_tensor import make_fx

from ludus.core.batch import Batch
from ludus.core.types import Tensors
from ludus.core.updater import LossFunction
from ludus.experience.batch_tensors import to_batch, to_tensors

if TYPE_CHECKING:
    from ludus.containers.updater import LocalUpdater, ParameterBlock

Graph = Callable[..., Any]
During = Callable[[Callable[[], Graph]], Graph]
UNUSED = ("last_state", "row_state", "version", "index")  # fields of a batch that losses do not read
FIELDS = [field.name for field in fields(Batch) if field.name not in UNUSED]


class CompiledSteps:
    """Takes the steps of an updater, each loss compiled at its first step; see ``LocalUpdater.compile``."""

    def __init__(
        self,
        updater: LocalUpdater,
        eager: Callable[[LossFunction, Batch, ParameterBlock], Tensors],
        on_failure: Callable[[str], object],
        during: During,
    ) -> None:
        self._updater, self._eager, self._on_failure, self._during = updater, eager, on_failure, during
        self._compiled: dict[Any, CompiledStep | None] = {}  # None: runs eagerly

    def __call__(self, loss: LossFunction, batch: Batch, part: ParameterBlock) -> Tensors:
        """Take a step."""
        key = getattr(loss, "__func__", loss), part.name
        if key not in self._compiled:
            self._compiled[key] = CompiledStep(self._updater, loss, part, self._during)
        step = self._compiled[key]
        if step is None:
            return self._eager(loss, batch, part)
        try:
            graph, inputs = step.prepare(batch)
        except Exception as error:  # compiling may raise anything; no step was taken
            reason, name = " ".join(str(error).split())[:200], getattr(loss, "__qualname__", repr(loss))
            self._on_failure(
                f"The loss {name} cannot be compiled ({type(error).__name__}: {reason}); it runs eagerly, and other "
                "losses stay compiled."
            )
            self._compiled[key] = None
            return self._eager(loss, batch, part)
        return step.run(graph, inputs)


class CompiledStep:
    """The compiled steps of one parameter group on one loss, one graph per shape of batch."""

    def __init__(self, updater: LocalUpdater, loss: LossFunction, part: ParameterBlock, during: During) -> None:
        self._during = during
        self._updater, self._module, self._part = updater, _Loss(updater, loss), part
        self._graphs: dict[Any, Graph] = {}
        own = {f"agent.{place[0]}" for place in part.places}
        others = {name: p.detach() for name, p in self._module.named_parameters() if name not in own}
        self._fixed = dict(self._module.named_buffers()) | others  # read by the loss, not changed by the step
        self._names: list[str] = []

    def prepare(self, batch: Batch) -> tuple[Graph, list[Any]]:
        """Return the graph for this shape of batch, compiled if it is new, and its inputs."""
        given = to_tensors(batch, FIELDS)
        optimizer = self._updater.optimizer_tensors(self._part)
        inputs: list[Any] = [*optimizer.values(), *self._fixed.values(), *given.values()]
        key = (*given, *[x.shape for x in given.values()], *[x.stride() for x in given.values()])
        if key not in self._graphs:
            self._graphs[key] = self._during(lambda: self._compile(list(given), inputs))
        return self._graphs[key], inputs

    def _compile(self, names: list[str], inputs: list[Any]) -> Graph:
        with torch.no_grad():
            on_cpu = self._updater.flat.value.is_cpu
            replaced = {torch.ops.aten.tanh.default: tanh} if on_cpu else None
            # fake tensors have shapes only: tracing computes nothing and sums nothing over ranks
            trace = make_fx(self._step(names), replaced, "fake", _allow_non_fake_inputs=True)
            traced = trace(*inputs)
            graph: Graph = compile_graph(traced, inputs)
            return graph

    def run(self, graph: Graph, inputs: list[Tensor]) -> Tensors:
        """Take the step."""
        with torch.no_grad():
            scalars, *rows = graph(*inputs)
            return dict(zip(self._names, (*scalars.unbind(), *rows), strict=True))

    def _step(self, names: list[str]) -> Callable[..., tuple[Tensor, ...]]:
        """Return the step as a function of optimizer tensors, buffers and the batch's tensors ``names``."""
        updater, flat, part = self._updater, self._updater.flat, self._part

        def total(parameters: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, tuple[Tensors, Tensors]]:
            total, losses, metrics = torch.func.functional_call(self._module, parameters | buffers, (batch,))
            return total, (losses, metrics)

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            rest = iter(inputs)
            at = dict(zip(updater.optimizer_tensors(part), rest, strict=False))
            buffers = dict(zip(self._fixed, rest, strict=False))
            batch = to_batch(dict(zip(names, rest, strict=True)))
            parameters = flat.views(at["value"], part.places)
            views = {f"agent.{place[0]}": x for place, x in zip(part.places, parameters, strict=True)}
            gradients, (losses, metrics) = torch.func.grad(total, has_aux=True)(views, buffers, batch)
            block = torch.zeros_like(part.of(at["value"]))
            for target, gradient in zip(
                flat.views(block, part.places, part.rows.start), gradients.values(), strict=True
            ):
                target.copy_(gradient)
            report = updater.reduce(block, updater.report(losses, metrics), traced=True)
            report = report | {"gradient_norm": updater.optimize(block, at, part)}
            scalars = {name: x for name, x in report.items() if not x.dim()}
            rows = {name: x for name, x in report.items() if x.dim()}  # priorities
            self._names = [*scalars, *rows]
            return torch.stack(list(scalars.values())), *rows.values()

        return step


def tanh(x: Tensor) -> Tensor:
    """Return tanh to within 2e-7; the compiler's own takes three times as long on a CPU."""
    return 1 - 2 / ((2 * x).exp() + 1)


class _Loss(nn.Module):
    """A loss with its weighted sum as a module, for ``functional_call``; scheduled settings are tensors."""

    def __init__(self, updater: LocalUpdater, loss: LossFunction) -> None:
        super().__init__()
        self.agent, self.loss, self._total = updater.agent, loss, updater.total

    def forward(self, batch: Batch) -> tuple[Tensor, Tensors, Tensors]:
        with self.agent.tensor_config():
            losses, metrics = self.loss(batch)
            return self._total(losses, self.agent.loss_coefficients()), losses, metrics
