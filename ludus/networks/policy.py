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
        self._actions = []
        for name, spec in action.items():
            same_shape = len(spec.shape) == 1 or (spec.kind == "categorical" and not spec.shape)
            shape = None if same_shape else spec.shape
            self._actions.append(_Action(name, f"policy/{name}", mask_name(name, action), shape))

    @property
    def log_std(self) -> dict[str, nn.Parameter]:
        """Return the learned, state-independent log standard deviations of Gaussians, by action name."""
        return {action.name: head.log_std for action, head in self._heads() if isinstance(head, Gaussian)}

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensors:
        """Draw the noise for ``steps`` samples of ``batch`` rows: ``[steps, batch, …]`` by action name."""
        return {action.name: head.draw_noise((steps, batch), generator) for action, head in self._heads()}

    def sample(self, outputs: Tensors, observation: Tensors, noise: Tensors | None) -> tuple[Tensors, Tensor]:
        """Return actions (the mode without ``noise``) and their log-probability; ``observation`` has the masks."""
        actions: Tensors = {}
        log_probs = []
        for action, head, p in self._decode(outputs, observation):
            flat = head.mode(p) if noise is None else head.sample(p, noise[action.name])
            log_probs.append(head.log_prob(p, flat))
            actions[action.name] = flat if action.shape is None else flat.reshape(*flat.shape[:-1], *action.shape)
        return actions, reduce(torch.add, log_probs)

    def evaluate(self, outputs: Tensors, action: Tensors, observation: Tensors) -> Tensors:
        """Return the ``log_prob`` of actions and the ``entropy`` of the distribution."""
        terms = []
        for part, head, p in self._decode(outputs, observation):
            flat = action[part.name]
            if part.shape is not None:
                flat = flat.reshape(*flat.shape[: flat.dim() - len(part.shape)], -1)
            terms.append(head.evaluate(p, flat))
        log_probs, entropies = zip(*terms, strict=True)
        return {"log_prob": reduce(torch.add, log_probs), "entropy": reduce(torch.add, entropies)}

    def distribution(self, outputs: Tensors, observation: Tensors) -> Tensors:
        """Return the distribution's parameters as one tensor per output name, to store for ``kl``."""
        return {action.output: head.pack(p) for action, head, p in self._decode(outputs, observation)}

    def kl(self, old: Tensors, outputs: Tensors, observation: Tensors) -> Tensor:
        """Return KL(old‖new), with ``old`` as returned by ``distribution``."""
        decoded = self._decode(outputs, observation)
        return reduce(torch.add, [head.kl(head.unpack(old[action.output]), p) for action, head, p in decoded])

    def describe(self, outputs: Tensors, observation: Tensors) -> dict[str, Tensors]:
        """Return each action's distribution by parameter name, in the shape of the action."""
        described = {}
        for action, head, p in self._decode(outputs, observation):
            parameters = head.describe(p)
            if action.shape is not None and not isinstance(head, MultiCategorical):
                parameters = {key: x.reshape(*x.shape[:-1], *action.shape) for key, x in parameters.items()}
            described[action.name] = parameters
        return described

    def _heads(self) -> list[tuple[_Action, ActionHead]]:
        return list(zip(self._actions, self.heads.values(), strict=True))  # type: ignore[arg-type]

    def _decode(self, outputs: Tensors, observation: Tensors) -> list[tuple[_Action, ActionHead, Parameters]]:
        """Return each action with its head and the parameters of its distribution."""
        return [
            (action, head, head.decode(outputs[action.output], observation.get(action.mask)))
            for action, head in self._heads()
        ]


def make_head(spec: Spec, distribution: Distribution, log_std_init: float) -> ActionHead:
    """Make the distribution of one action."""
    if spec.kind == "categorical":
        return MultiCategorical(spec) if spec.shape else Categorical(spec)
    if spec.kind == "binary":
        return Bernoulli(spec)
    if distribution == "beta":
        return Beta(spec)
    return (Gaussian if distribution == "gaussian" else TanhGaussian)(spec, log_std_init)
