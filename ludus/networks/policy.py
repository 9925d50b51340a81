"""From a network's outputs to actions: all that an agent knows of distributions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.network import Shapes
from ludus.core.spec import Spec, Specs, mask_name
from ludus.core.types import Tensors
from ludus.networks.heads import (
    Bernoulli,
    Beta,
    Categorical,
    Gaussian,
    Head,
    MultiCategorical,
    Parameters,
    TanhGaussian,
)
from ludus.networks.modular import module_key

Distribution = Literal["gaussian", "tanh", "beta"]


class _Name(NamedTuple):
    action: str
    output: str  # the network output that it comes from
    mask: str  # the observation that masks it, if there is one
    shape: tuple[int, ...] | None  # the shape of the action, where it is not what the head gives


class Policy(nn.Module):
    """A distribution over all actions together: log-probabilities, entropies and KLs are sums over action names.

    Everything works on any leading dimensions. Actions are in policy space: ``action_transform`` says, by name, what
    the environment side does to them. ``outputs`` is what a network has to give.
    """

    def __init__(self, action: Specs, distribution: Distribution = "gaussian", log_std_init: float = 0.0) -> None:
        super().__init__()
        heads = {f"policy/{name}": make_head(spec, distribution, log_std_init) for name, spec in action.items()}
        self.action, self.distribution_name = action, distribution
        self.heads = nn.ModuleDict({module_key(name): head for name, head in heads.items()})
        self.outputs: Shapes = {name: (head.size,) for name, head in heads.items()}
        self.action_transform = {name: heads[f"policy/{name}"].action_transform for name in action}
        self._names = [
            _Name(name, f"policy/{name}", mask_name(name, action), None if _natural(spec) else spec.shape)
            for name, spec in action.items()
        ]

    @property
    def log_std(self) -> dict[str, nn.Parameter]:
        """The log-deviations that are parameters, by action name: those of Gaussians."""
        return {name.action: head.log_std for name, head in self._heads() if isinstance(head, Gaussian)}

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensors:
        """The random numbers of ``steps`` samples of ``batch`` rows, ``[steps, batch, …]`` by action name."""
        return {name.action: head.noise((steps, batch), generator) for name, head in self._heads()}

    def sample(self, outputs: Tensors, observation: Tensors, noise: Tensors | None) -> tuple[Tensors, Tensor]:
        """Return actions (the mode without ``noise``) and their log-probability; masks lie in ``observation``."""
        actions: Tensors = {}
        log_probs = []
        for name, head in self._heads():
            p = self._decode(name, head, outputs, observation)
            flat = head.mode(p) if noise is None else head.sample(p, noise[name.action])
            log_probs.append(head.log_prob(p, flat))
            actions[name.action] = flat if name.shape is None else flat.reshape(*flat.shape[:-1], *name.shape)
        return actions, _sum(log_probs)

    def evaluate(self, outputs: Tensors, action: Tensors, observation: Tensors) -> Tensors:
        """The ``log_prob`` of actions and the ``entropy`` of the distribution."""
        terms = []
        for name, head in self._heads():
            p = self._decode(name, head, outputs, observation)
            flat = action[name.action]
            if name.shape is not None:
                flat = flat.reshape(*p[0].shape[:-1], -1)
            terms.append(head.evaluate(p, flat))
        log_probs, entropies = zip(*terms, strict=True)
        return {"log_prob": _sum(log_probs), "entropy": _sum(entropies)}

    def distribution(self, outputs: Tensors, observation: Tensors) -> Tensors:
        """The parameters by output name, one tensor each: what to store for an exact KL."""
        return {name.output: head.pack(self._decode(name, head, outputs, observation)) for name, head in self._heads()}

    def describe(self, outputs: Tensors, observation: Tensors) -> dict[str, Tensors]:
        """Each action's distribution in plain numbers, by action name; in the shape of the action where it has one."""
        described = {}
        for name, head in self._heads():
            found = head.describe(self._decode(name, head, outputs, observation))
            if name.shape is not None and not isinstance(head, MultiCategorical):
                found = {key: x.reshape(*x.shape[:-1], *name.shape) for key, x in found.items()}
            described[name.action] = found
        return described

    def kl(self, old: Tensors, outputs: Tensors, observation: Tensors) -> Tensor:
        """KL(old‖new), where ``old`` is what ``distribution`` gave."""
        return _sum(
            [
                head.kl(head.unpack(old[name.output]), self._decode(name, head, outputs, observation))
                for name, head in self._heads()
            ]
        )

    def _heads(self) -> Iterator[tuple[_Name, Head]]:
        return zip(self._names, self.heads.values(), strict=True)  # type: ignore[arg-type]

    def _decode(self, name: _Name, head: Head, outputs: Tensors, observation: Tensors) -> Parameters:
        return head.decode(outputs[name.output], observation.get(name.mask))


def make_head(spec: Spec, distribution: Distribution, log_std_init: float) -> Head:
    """The distribution for one action."""
    if spec.kind == "categorical":
        return MultiCategorical(spec) if spec.shape else Categorical(spec)
    if spec.kind == "binary":
        return Bernoulli(spec)
    if distribution == "beta":
        return Beta(spec)
    return (Gaussian if distribution == "gaussian" else TanhGaussian)(spec, log_std_init)


def _natural(spec: Spec) -> bool:
    """Whether the head's own shape is the action's: a vector, or a single choice."""
    return len(spec.shape) == 1 or (spec.kind == "categorical" and not spec.shape)


def _sum(terms: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return reduce(torch.add, terms)
