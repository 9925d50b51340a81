"""The policy: from a network's outputs to actions, log-probabilities, entropies and KL divergences."""

from __future__ import annotations

from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.network import Shapes
from ludus.core.spec import Spec, Specs, mask_name
from ludus.core.types import Tensors
from ludus.networks.action_heads import (
    ActionHead,
    Bernoulli,
    Beta,
    Categorical,
    Gaussian,
    MultiCategorical,
    Parameters,
    TanhGaussian,
)
from ludus.networks.modular import module_key

Distribution = Literal["gaussian", "tanh", "beta"]


class _Action(NamedTuple):
    name: str
    head: ActionHead
    output: str  # the network output that its distribution is made from
    mask: str  # the observation that masks it, if there is one
    shape: tuple[int, ...] | None  # the action's shape where it differs from the head's, else None


class Policy(nn.Module):
    """A distribution over all actions: joint log-probabilities, entropies and KLs are sums over action names.

    All methods take any leading dimensions. Actions are in policy space; ``action_transform`` names, per action, the
    transform that the environment side applies. ``outputs`` are the shapes that the network must provide.
    """

    def __init__(self, action: Specs, distribution: Distribution = "gaussian", log_std_init: float = 0.0) -> None:
        super().__init__()
        heads = {name: make_head(spec, distribution, log_std_init) for name, spec in action.items()}
        self.action = action
        self.heads = nn.ModuleDict({module_key(f"policy/{name}"): head for name, head in heads.items()})
        self.outputs: Shapes = {f"policy/{name}": (head.size,) for name, head in heads.items()}
        self.action_transform = {name: head.action_transform for name, head in heads.items()}
        self._actions = []  # in a list, so that PyTorch does not register the heads twice
        for name, spec in action.items():
            same_shape = len(spec.shape) == 1 or (spec.kind == "categorical" and not spec.shape)
            shape = None if same_shape else spec.shape
            self._actions.append(_Action(name, heads[name], f"policy/{name}", mask_name(name, action), shape))

    @property
    def log_std(self) -> dict[str, nn.Parameter]:
        """Return the learned, state-independent log standard deviations of Gaussians, by action name."""
        return {action.name: action.head.log_std for action in self._actions if isinstance(action.head, Gaussian)}

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensors:
        """Draw the noise for ``steps`` samples of ``batch`` rows: ``[steps, batch, …]`` by action name."""
        return {action.name: action.head.draw_noise((steps, batch), generator) for action in self._actions}

    def sample(self, outputs: Tensors, observation: Tensors, noise: Tensors | None) -> tuple[Tensors, Tensor]:
        """Return actions (the mode without ``noise``) and their log-probability; ``observation`` has the masks."""
        actions: Tensors = {}
        log_probs = []
        for action, p in self._decode(outputs, observation):
            flat = action.head.mode(p) if noise is None else action.head.sample(p, noise[action.name])
            log_probs.append(action.head.log_prob(p, flat))
            actions[action.name] = flat if action.shape is None else flat.reshape(*flat.shape[:-1], *action.shape)
        return actions, reduce(torch.add, log_probs)

    def evaluate(self, outputs: Tensors, action: Tensors, observation: Tensors) -> Tensors:
        """Return the ``log_prob`` of actions and the ``entropy`` of the distribution."""
        terms = []
        for part, p in self._decode(outputs, observation):
            flat = action[part.name]
            if part.shape is not None:
                flat = flat.reshape(*flat.shape[: flat.dim() - len(part.shape)], -1)
            terms.append(part.head.evaluate(p, flat))
        log_probs, entropies = zip(*terms, strict=True)
        return {"log_prob": reduce(torch.add, log_probs), "entropy": reduce(torch.add, entropies)}

    def distribution(self, outputs: Tensors, observation: Tensors) -> Tensors:
        """Return the distribution's parameters as one tensor per output name, to store for ``kl``."""
        return {action.output: action.head.pack(p) for action, p in self._decode(outputs, observation)}

    def kl(self, old: Tensors, outputs: Tensors, observation: Tensors) -> Tensor:
        """Return KL(old‖new), with ``old`` as returned by ``distribution``."""
        terms = []
        for action, p in self._decode(outputs, observation):
            terms.append(action.head.kl(action.head.unpack(old[action.output]), p))
        return reduce(torch.add, terms)

    def describe(self, outputs: Tensors, observation: Tensors) -> dict[str, Tensors]:
        """Return each action's distribution by parameter name, in the shape of the action."""
        described = {}
        for action, p in self._decode(outputs, observation):
            parameters = action.head.describe(p)
            if action.shape is not None and not isinstance(action.head, MultiCategorical):
                parameters = {key: x.reshape(*x.shape[:-1], *action.shape) for key, x in parameters.items()}
            described[action.name] = parameters
        return described

    def _decode(self, outputs: Tensors, observation: Tensors) -> list[tuple[_Action, Parameters]]:
        """Return each action with the parameters of its distribution."""
        return [(a, a.head.decode(outputs[a.output], observation.get(a.mask))) for a in self._actions]


def make_head(spec: Spec, distribution: Distribution, log_std_init: float) -> ActionHead:
    """Make the distribution of one action."""
    if spec.kind == "categorical":
        return MultiCategorical(spec) if spec.shape else Categorical(spec)
    if spec.kind == "binary":
        return Bernoulli(spec)
    if distribution == "beta":
        return Beta(spec)
    return (Gaussian if distribution == "gaussian" else TanhGaussian)(spec, log_std_init)
