"""Check the networks at intervals during training: shapes, NaN, ranges, dead units, gradients, users' own checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludus.containers.resumable import generators
from ludus.containers.updater import LocalUpdater, ParameterBlock, gradients
from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.types import Tensors
from ludus.core.updater import LossFunction
from ludus.networks.inspection import FirstNonFinite, LayerRecorder, ModuleCheck, ModuleShapes, watch_modules
from ludus.settings.settings import NetworkCheckConfig

DEAD = 0.5  # share of a layer's units from which dead or saturated ones are a problem
EXPLODING, VANISHING = 1e3, 1e-8  # norms of a layer's gradient beyond which there is a problem
LARGE_UPDATE = 1.0  # size of a step, relative to the parameters, above which there is a problem
FIRST_UPDATES = 10  # steps are large while parameters that start at 0 grow
COLUMNS = ("mean", "std", "min", "max", "dead", "gradient_norm", "update_ratio")  # of the table in the log
PREFIX = "networks."  # left out of names


class Problem(NamedTuple):
    """Something that a check found."""

    layer: str
    kind: str
    text: str


class NetworkReport(NamedTuple):
    """The result of one check."""

    step: int
    layers: dict[str, dict[str, float]]  # statistics by layer, in the order of the parameters
    shapes: dict[str, str]  # of every module; only in the first report of a process
    problems: list[Problem]

    def metrics(self) -> dict[str, float]:
        """Return the statistics as metrics."""
        return {f"network/{layer}/{key}": x for layer, numbers in self.layers.items() for key, x in numbers.items()}

    def text(self) -> str:
        """Return tables for the log."""
        lines = [f"network check at step {self.step:,}"]
        if self.shapes:
            width = max(map(len, self.shapes))
            lines += [f"  {name:<{width}}  {shapes}" for name, shapes in self.shapes.items()]
        width = max([len("layer"), *map(len, self.layers)])
        lines.append(f"  {'layer':<{width}}" + "".join(f"{column.replace('_', ' '):>15}" for column in COLUMNS))
        for layer, numbers in self.layers.items():
            row = "".join(f"{numbers[column]:>15.3g}" if column in numbers else f"{'':>15}" for column in COLUMNS)
            lines.append(f"  {layer:<{width}}{row}".rstrip())
        return "\n".join([*lines, *(f"  {problem.text}" for problem in self.problems)])


class NetworkCheck:
    """Computes the first step of each loss in an update once more, eagerly and with hooks, before it is taken.

    Neither the hooks nor the extra computation affect training: random states and buffers are restored, gradients are
    not stored, and the update itself is taken by the same engine as always.
    """

    def __init__(self, agent: Agent, updater: LocalUpdater, config: NetworkCheckConfig) -> None:
        self._agent, self._updater, self._every = agent, updater, config.every
        self._functions = {name: _resolve(name) for name in config.functions}
        self.checked_at = 0  # environment step of the last check
        self.last: NetworkReport | None = None
        self._shapes: ModuleShapes | None = ModuleShapes()
        self._seen: set[tuple[str, str]] = set()
        self._layers: dict[str, dict[str, float]] = {}
        self._problems: list[Problem] = []

    @contextmanager
    def watch(self, step: int, updates: int, report: Callable[[NetworkReport], object]) -> Iterator[None]:
        """Check the updates within the context, if that is due; ``report`` is called at its end if there was one."""
        if step // self._every <= self.checked_at // self._every:
            yield
            return
        self._seen, self._layers, self._problems = set(), {}, []
        try:
            with self._updater.watch(self._around):
                yield
        finally:
            if self._seen:
                self._judge(updates > FIRST_UPDATES)
                self.checked_at = step
                self.last = NetworkReport(step, self._layers, dict(self._shapes or {}), self._problems)
                self._shapes = None
                report(self.last)

    def _around(
        self, loss: LossFunction, batch: Batch, part: ParameterBlock, take_step: Callable[[], Tensors]
    ) -> Tensors:
        """Check a step before it is taken, and measure it afterwards; only the first of each loss."""
        key = getattr(loss, "__qualname__", repr(loss)), part.name
        if key in self._seen:
            return take_step()
        self._seen.add(key)
        with self._unchanged():
            self._inspect(loss, batch, part)
        before = [p.detach().clone() for p in part.group.parameters]
        metrics = take_step()
        for layer, (old, new) in _by_layer(part, before, part.group.parameters).items():
            size = float(old.norm())
            self._layers[layer]["update_ratio"] = float((new - old).norm()) / size if size else float("nan")
        return metrics

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore random states and buffers (batch statistics) at the end."""
        agent = self._agent
        buffers = [(buffer, buffer.clone()) for buffer in agent.buffers()]
        states = [(generator, generator.get_state()) for generator in generators(agent).values()]
        devices = {p.device for p in agent.parameters() if p.is_cuda}
        with torch.random.fork_rng(sorted(devices, key=str)):
            yield
        for generator, state in states:
            generator.set_state(state)
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)

    def _inspect(self, loss: LossFunction, batch: Batch, part: ParameterBlock) -> None:
        """Compute loss and gradient with hooks."""
        finite = FirstNonFinite()
        names = {place[0].rpartition(".")[0]: _layer(place[0]) for place in part.places}
        recorder = LayerRecorder(names)
        watchers: list[Any] = [finite, recorder, *(partial(self._call, *item) for item in self._functions.items())]
        if self._shapes is not None:
            watchers.append(self._shapes)
        with watch_modules(self._agent, *watchers), recorder:
            losses, _ = loss(batch)
            found = gradients(self._updater.total(losses), part.group.parameters)
        if finite.finding:
            self._problems.append(Problem("", "not finite", f"{finite.finding}."))
        for name, layer in names.items():
            output = recorder.outputs[name]
            self._layers.setdefault(layer, {}).update(output.numbers())
            if self._layers[layer].get("dead", 0.0) >= DEAD:
                self._problems.append(_dead(layer, output.activation, self._layers[layer]["dead"]))
        reached = [torch.zeros_like(p) if x is None else x for p, x in zip(part.group.parameters, found, strict=True)]
        for layer, (gradient,) in _by_layer(part, reached).items():
            size = gradient.abs()
            numbers = {"norm": size.norm(), "mean": size.mean(), "max": size.max()}
            self._layers[layer] |= {f"gradient_{key}": float(x) for key, x in numbers.items()}

    def _call(
        self, function: str, check: ModuleCheck, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        """Call a check of the user's."""
        try:
            text = check(name, module, inputs, output)
        except Exception as error:
            raise UserError(
                f"network_check.functions has {function}, which raised {type(error).__name__} for the module {name}: "
                f"{error}; fix it or leave it out."
            ) from error
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"network_check.functions has {function}, which returned a {type(text).__name__} for the module "
                f"{name}; return a text for a problem, else None."
            )
        if text:
            self._problems.append(Problem(name, function, f"{name}: {text}"))

    def _judge(self, settled: bool) -> None:
        """Add problems of gradients and updates; those of updates only once training has ``settled``."""
        for layer, numbers in self._layers.items():
            norm, ratio = numbers["gradient_norm"], numbers.get("update_ratio", 0.0)
            if norm > EXPLODING:
                text = (
                    f"the gradient of {layer} explodes (norm {norm:.3g}); lower agent.learning_rate or scale rewards."
                )
                self._problems.append(Problem(layer, "exploding", text))
            elif norm < VANISHING:
                text = f"the gradient of {layer} vanishes (norm {norm:.3g}); it does not learn."
                self._problems.append(Problem(layer, "vanishing", text))
            if settled and ratio > LARGE_UPDATE:
                text = f"one step changed {layer} by {ratio:.3g} times its size; lower agent.learning_rate."
                self._problems.append(Problem(layer, "update", text))


def _resolve(name: str) -> ModuleCheck:
    found: Any = resolve(name, {}, "network check")
    if not callable(found) or isinstance(found, type):
        raise UserError(
            f'network_check.functions has "{name}", which is not a function; write one as '
            "check(name, module, inputs, output) that returns a text or None."
        )
    check: ModuleCheck = found
    return check


def _layer(parameter: str) -> str:
    """Return the name of a parameter's layer for the user; that of the parameter if it belongs to no layer."""
    return (parameter.rpartition(".")[0] or parameter).removeprefix(PREFIX)


def _dead(layer: str, activation: str, share: float) -> Problem:
    if activation in ("tanh", "sigmoid"):
        what, advice = f"saturated ({activation})", "lower agent.learning_rate or normalize the observations"
    else:
        what, advice = f"dead ({activation})", "lower agent.learning_rate or change network.activation"
    return Problem(layer, "dead", f"{share:.0%} of the units of {layer} are {what} on the whole batch; {advice}.")


def _by_layer(part: ParameterBlock, *tensors: Sequence[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Join tensors that belong to the group's parameters into one float64 vector per layer, for each sequence."""
    found: dict[str, list[list[Tensor]]] = {}
    for place, *xs in zip(part.places, *tensors, strict=True):
        found.setdefault(_layer(place[0]), []).append([x.detach().flatten().double() for x in xs])
    return {layer: tuple(torch.cat(xs) for xs in zip(*rows, strict=True)) for layer, rows in found.items()}
