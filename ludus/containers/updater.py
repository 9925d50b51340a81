"""The updater of one process: backward, clipping and optimizer step on one flat block of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.config import OF_OPTIMIZER
from ludus.core.errors import UserError
from ludus.core.schedule import Schedule
from ludus.core.types import State, Tensors
from ludus.core.updater import Group, LossFunction, NonFiniteError, Updater, total_loss
from ludus.networks.module_checks import depends_on_training_mode
from ludus.networks.placement import is_placed
from ludus.ops.optimizers import ONE, adam_, clip_norm_, fused_adam_, rmsprop_, rmsprop_tf_, sgd_

ALIGN = 16  # elements: parameters start at multiples of 64 bytes, for vector instructions
BETA2, RMSPROP_ALPHA = 0.999, 0.99
KEPT = 31 * 2**20  # bytes; glibc ignores blocks of more than 32 MiB
Place = tuple[str, int, torch.Size, tuple[int, ...]]  # name, start in the block, shape and stride


class FlatParameters:
    """All trainable parameters as views of one flat block, and their gradients as views of another.

    Clipping and the optimizer step then take a few operations, whatever the number of layers. Parameters that were
    placed on devices of their own (``OnDevices``) stay there, and ``publish`` copies their values to them.
    """

    def __init__(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        first = next((p for _, p in parameters if not is_placed(p)), parameters[0][1])
        device, dtype = first.device, first.dtype
        self.placed: list[tuple[nn.Parameter, Tensor]] = []  # with their views
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
                if is_placed(p):
                    self.placed.append((p, value))
                else:
                    p.data, p.grad = value, gradient  # views keep strides (channels_last)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the block to the placed parameters."""
        for p, value in self.placed:
            p.copy_(value)

    @torch.no_grad()
    def collect(self) -> None:
        """Copy the placed parameters to the block."""
        for p, value in self.placed:
            value.copy_(p)

    def views(self, block: Tensor, places: list[Place] | None = None, start: int = 0) -> list[Tensor]:
        """Return ``block``, which begins at ``start``, as views of the parameters' shapes."""
        return [torch.as_strided(block, shape, stride, at - start) for _, at, shape, stride in places or self.places]


class ParameterBlock(NamedTuple):
    """The parameters of one group: a range of the block, with its step count and learning rate."""

    name: str
    group: Group
    rows: slice
    whole: bool  # the only group
    places: list[Place]
    gradients: list[Tensor]  # views of the gradient block
    steps: Tensor
    lr: Tensor

    def of(self, block: Tensor) -> Tensor:
        """Return the group's range of a block."""
        return block if self.whole else block[self.rows]


class TrainingMode:
    """A context in which the networks are in training mode, and denormal numbers are flushed to 0.

    The moments of dead units are denormal, and would make Adam three times slower. Frozen modules stay in evaluation
    mode.
    """

    def __init__(self, agent: Agent) -> None:
        # only modules that behave differently in training mode are switched, since a switch visits every layer; the
        # agent's own flag is False only in evaluations and loaded policies
        modules = [module.eval() for module in agent.children()]
        learning = [module for module in modules if any(p.requires_grad for p in module.parameters())]
        self._modal = [module for module in learning if depends_on_training_mode(module)]
        self._frozen = [part for module in self._modal for part in frozen_modules(module)]
        self._flushed = bool(torch.tensor(2e-38).mul(0.1) == 0)  # the user's setting

    def __enter__(self) -> None:
        torch.set_flush_denormal(True)
        for module in self._modal:
            module.train()
        for module in self._frozen:
            module.eval()

    def __exit__(self, *_: object) -> None:
        for module in self._modal:
            module.eval()
        torch.set_flush_denormal(self._flushed)


StepWatcher = Callable[[LossFunction, Batch, ParameterBlock, Callable[[], Tensors]], Tensors]


class LocalUpdater(Updater):
    """Steps the parameter groups of an agent in one process, eagerly or compiled."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        with agent.given_config():  # learning rates may be schedules
            groups = agent.parameter_groups()
        names = {p: name for name, p in agent.named_parameters()}
        self.flat = FlatParameters([(names[p], p) for group in groups.values() for p in group.parameters])
        self.parts = _parts(self.flat, groups)
        self._rate = self._first_rate = next(iter(groups.values())).learning_rate
        rates = {name: group.learning_rate for name, group in groups.items()}
        self._schedules = {name: rate for name, rate in rates.items() if isinstance(rate, Schedule)}
        self._returns: list[float] = []  # of evaluations, if a schedule needs them
        optimizers = {group.optimizer for group in groups.values()}
        self._moments: Tensors = {}
        if optimizers != {"sgd"}:
            self._moments["square"] = torch.zeros_like(self.flat.value)
        if optimizers & {"adam", "adamw"}:
            self._moments["mean"] = torch.zeros_like(self.flat.value)
        for part in self.parts.values():
            if part.group.optimizer == "rmsprop_tf":
                part.of(self._moments["square"]).fill_(1)
        self._optimizer_tensors = {
            name: {"value": self.flat.value, "steps": part.steps, "lr": part.lr} | self._moments | self._scheduled(part)
            for name, part in self.parts.items()
        }
        self.read_coefficients()
        self.schedule(0.0)
        self._norms: list[Tensor] = []
        self._step: Callable[[LossFunction, Batch, ParameterBlock], Tensors] = self._eager
        self._learning = TrainingMode(agent)
        # glibc keeps free memory up to twice the largest block that was freed, and returns the rest to the system,
        # which would have to map the intermediate results of every update again, at hundreds of page faults
        torch.empty(KEPT, dtype=torch.uint8)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group; the groups hold it as tensors, so that a change does not recompile."""
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._rate = rate
            for part in () if self._schedules else self.parts.values():  # a schedule sets its own
                own = part.group.learning_rate
                part.lr.fill_(rate if own == self._first_rate else own * rate / self._first_rate)

    def _scheduled(self, part: ParameterBlock) -> Tensors:
        """Return the settings of a group's optimizer that are schedules, as tensors with the current values."""
        names = [name for name in OF_OPTIMIZER if isinstance(getattr(part.group, name), Schedule)]
        return {name: self.agent.scheduled_tensor(name) for name in names}

    def read_coefficients(self) -> None:
        """Take the weights of losses from the agent's current settings."""
        self._coefficients = dict(self.agent.loss_coefficients())

    def schedule(self, progress: float) -> dict[str, float]:
        """Set what the agent's schedules give; return the learning rates of groups, if there are several."""
        if not self.agent.is_scheduled:
            return {}
        self.read_coefficients()
        rates = {name: schedule.at(progress, self._returns) for name, schedule in self._schedules.items()}
        for name, rate in rates.items():
            self.parts[name].lr.fill_(rate)
        self._rate = rates.get(next(iter(self.parts)), self._rate)
        return {f"learning_rate/{name}": rate for name, rate in rates.items()} if len(self.parts) > 1 else {}

    def add_return(self, mean: float) -> None:
        """Keep the mean return of an evaluation, if a schedule needs it."""
        if any(schedule.needs_returns for schedule in self._schedules.values()):
            self._returns.append(mean)

    def step(self, loss: LossFunction, batch: Batch, group: str) -> Tensors:
        """Take one step; return losses, metrics and the gradient norm as 0-dimensional tensors."""
        part = self._part(group)
        with self._learning:
            metrics = self._step(loss, batch, part)
        norm = metrics["gradient_norm"]
        if not norm.is_cpu:
            self._norms.append(norm)
        elif not math.isfinite(norm):
            raise NonFiniteError(loss, batch, group, metrics)
        return metrics

    def gradient(self, loss: LossFunction, batch: Batch, group: str) -> tuple[Tensor, Tensors]:
        """Return a copy of the flat gradient, and the metrics."""
        with self._learning:
            gradient, metrics = self._gradient(loss, batch, self._part(group))
        return gradient.clone(), metrics

    @torch.no_grad()
    def apply(self, gradient: Tensor, group: str) -> Tensors:
        """Clip the gradient and take the optimizer step; the norm is checked after ``learn``."""
        part = self._part(group)
        with self._learning:
            norm = self.optimize(gradient.clone(), self.optimizer_tensors(part), part, eager=True)
        self.flat.publish()
        self._norms.append(norm)
        return {"gradient_norm": norm}

    def parameters(self, group: str) -> Tensor:
        """Return the group's flat block; it has unused padding between parameters."""
        part = self._part(group)
        return part.of(self.flat.value)

    @torch.no_grad()
    def assign(self, values: Tensor, group: str) -> None:
        """Copy the values to the group's block."""
        self.parameters(group).copy_(values)
        self.flat.publish()

    def split(self, flat: Tensor, group: str) -> list[Tensor]:
        """Return the views; ``flat`` may itself be a view, and have any dtype."""
        part = self._part(group)
        return self.flat.views(flat, part.places, part.rows.start - flat.storage_offset())

    def _part(self, group: str) -> ParameterBlock:
        if group not in self.parts:
            known = ", ".join(f'"{name}"' for name in self.parts)
            raise UserError(
                f'{type(self.agent).__name__} has no parameter group "{group}", only {known}: its parameter_groups '
                "and the group named in updater.step must agree."
            )
        return self.parts[group]

    def pop_gradient_norms(self) -> list[Tensor]:
        """Return the gradient norms since the last call that were not checked yet."""
        norms, self._norms = self._norms, []
        return norms

    @contextmanager
    def watch(self, watcher: StepWatcher) -> Iterator[None]:
        """Within the context, call ``watcher(loss, batch, part, take_step)`` instead of each step, which it takes."""
        step = self._step
        self._step = lambda loss, batch, part: watcher(loss, batch, part, lambda: step(loss, batch, part))
        try:
            yield
        finally:
            self._step = step

    def compile(
        self, on_failure: Callable[[str], object], during: Callable[[Callable[[], Any]], Any] = lambda build: build()
    ) -> None:
        """Compile forward, backward, clipping and optimizer step as one function per loss.

        A loss is compiled at its first step, by ``during``. If that fails, ``on_failure`` gets a message, the loss runs
        eagerly, and the others stay compiled.
        """
        from ludus.containers.compiled import CompiledSteps  # imports the compiler, which takes a second

        self._step = CompiledSteps(self, self._eager, on_failure, during)

    def _eager(self, loss: LossFunction, batch: Batch, part: ParameterBlock) -> Tensors:
        gradient, metrics = self._gradient(loss, batch, part)
        metrics["gradient_norm"] = self.optimize(gradient, self.optimizer_tensors(part), part, eager=True)
        if self.flat.placed:
            self.flat.publish()
        return metrics

    def _gradient(self, loss: LossFunction, batch: Batch, part: ParameterBlock) -> tuple[Tensor, Tensors]:
        """Compute the gradient of one group into the block; return it and the metrics."""
        losses, metrics = loss(batch)
        found = gradients(self.total(losses), part.group.parameters)
        gradient, views = part.of(self.flat.gradient), part.gradients
        reached = [x for x in found if x is not None]
        if len(reached) < len(found):
            gradient.zero_()
            views = [view for view, x in zip(views, found, strict=True) if x is not None]
        if reached:
            torch._foreach_copy_(views, reached)
        return gradient, self.reduce(gradient, self.report(losses, metrics))

    def reduce(self, gradient: Tensor, metrics: Tensors, traced: bool = False) -> Tensors:
        """Sum the gradient, in place, and the 0-dimensional metrics over ranks; return the metrics.

        ``traced``: as a part of a graph that is compiled.
        """
        return metrics

    def total(self, losses: Tensors, coefficients: Mapping[str, float] | None = None) -> Tensor:
        """Return the weighted sum of the losses."""
        return total_loss(losses, self._coefficients if coefficients is None else coefficients)

    def optimizer_tensors(self, part: ParameterBlock) -> Tensors:
        """Return the optimizer's tensors: parameters, moments, step count, learning rate and scheduled settings."""
        return self._optimizer_tensors[part.name]

    def optimize(self, gradient: Tensor, at: Tensors, part: ParameterBlock, eager: bool = False) -> Tensor:
        """Clip the gradient and take the optimizer step in place; return the norm before clipping.

        If the norm is not finite, the parameters are not changed.
        """
        group, check = part.group, eager and gradient.is_cpu
        norm = clip_norm_(gradient, at.get("max_grad_norm", group.max_grad_norm), check)
        if check:
            if not math.isfinite(norm):
                return norm
        else:
            finite = torch.isfinite(norm)
            gradient, at = gradient.where(finite, 0.0), at | {"lr": at["lr"] * finite}
        value, lr, decay = part.of(at["value"]), at["lr"], at.get("weight_decay", group.weight_decay)
        if group.weight_decay and group.optimizer == "adamw":
            value.mul_(1 - lr * decay)
        elif group.weight_decay:
            gradient = gradient + value * decay
        if group.optimizer == "sgd":
            sgd_(value, gradient, lr)
        elif group.optimizer in ("adam", "adamw"):
            adam, moments = fused_adam_ if eager else adam_, (part.of(at["mean"]), part.of(at["square"]))
            adam(value, gradient, *moments, at["steps"], lr, group.beta1, BETA2, group.eps)
        else:
            rmsprop = rmsprop_tf_ if group.optimizer == "rmsprop_tf" else rmsprop_
            rmsprop(value, gradient, part.of(at["square"]), lr, RMSPROP_ALPHA, group.eps)
        return norm

    @staticmethod
    def report(losses: Tensors, metrics: Tensors) -> Tensors:
        """Return losses and metrics by name."""
        return {f"loss/{name}": x.detach() for name, x in losses.items()} | metrics

    def state_dict(self) -> State:
        """Return the optimizers' names, moments and step counts, and what learning rates depend on."""
        return {
            "optimizer": {name: part.group.optimizer for name, part in self.parts.items()},
            "moments": dict(self._moments),
            "steps": torch.stack([part.steps for part in self.parts.values()]),
            "learning_rate": self._rate,
            **({"returns": list(self._returns)} if self._returns else {}),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore them in place; refuse other groups or another optimizer."""
        saved, ours = state.get("optimizer"), {name: part.group.optimizer for name, part in self.parts.items()}
        if not isinstance(saved, dict) or list(saved) != list(ours):
            raise UserError(
                f"The checkpoint's optimizer has other parameter groups than the agent ({', '.join(ours)}): it is of "
                "an older version of Ludus or of another agent; train anew, with --init-from for its parameters."
            )
        for name, optimizer in ours.items():
            if saved[name] != optimizer:
                raise UserError(
                    f"agent.optimizer is {optimizer}, but the checkpoint was saved with {saved[name]!r:.40}; set it "
                    "back."
                )
        self.flat.collect()
        with torch.no_grad():
            for name, x in self._moments.items():
                x.copy_(state["moments"][name])
            for part, steps in zip(self.parts.values(), state["steps"], strict=True):
                part.steps.copy_(steps)
        self._returns = list(state.get("returns", ()))
        self.learning_rate = state["learning_rate"]


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules within ``module`` that have parameters, all frozen; they stay in evaluation mode."""
    trainable = [p.requires_grad for p in module.parameters()]
    if not trainable or all(trainable):
        return []
    if not any(trainable):
        return [module]
    return [part for child in module.children() for part in frozen_modules(child)]


def gradients(total: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a scalar, as ``torch.autograd.grad`` without its checks, which are slow.

    None for parameters that ``total`` does not depend on.
    """
    if not total.requires_grad:
        raise UserError("The loss does not depend on any trainable parameter, so there is no gradient.")
    one = ONE if total.is_cpu and total.dtype == ONE.dtype else torch.ones_like(total)
    found: tuple[Tensor | None, ...] = torch.autograd.Variable._execution_engine.run_backward(
        (total,), (one,), False, False, parameters, allow_unreachable=True, accumulate_grad=False
    )
    return found


def _parts(flat: FlatParameters, groups: Mapping[str, Group]) -> dict[str, ParameterBlock]:
    """Return the range of each group in the block."""
    parts: dict[str, ParameterBlock] = {}
    device, places = flat.value.device, list(flat.places)
    for name, group in groups.items():
        mine, places = places[: len(group.parameters)], places[len(group.parameters) :]
        rows = slice(mine[0][1], places[0][1] if places else len(flat.value))
        counters = torch.zeros((), device=device), torch.tensor(group.learning_rate, device=device)
        parts[name] = ParameterBlock(
            name, group, rows, len(groups) == 1, mine, flat.views(flat.gradient, mine), *counters
        )
    return parts
