"""The policy: from a network's outputs to actions, log-probabilities, entropies and KL divergences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.network import Shape, Shapes
from ludus.core.spec import Specs, mask_condition, mask_name
from ludus.core.types import Tensors
from ludus.networks.action_heads import ActionHead, Bernoulli, Categorical, MultiCategorical, Parameters
from ludus.networks.continuous_heads import GSDE, Beta, Discretized, Gaussian, StateGaussian, TanhGaussian
from ludus.networks.policy_config import HeadSetting, PolicyConfig, check_bounds, parse_heads
from ludus.networks.slots import module_key
from ludus.networks.spatial_heads import EntityHead, Pointer, Select, Spatial

DEFAULT = PolicyConfig()


class ActionPart(NamedTuple):
    """One named part of the action."""

    name: str
    head: ActionHead
    output: str  # the network output that its distribution is made from
    shape: tuple[int, ...] | None  # the action's shape where it differs from the head's, else None

    def flatten(self, action: Tensor) -> Tensor:
        """Return the action in the shape that the head uses."""
        return action if self.shape is None else action.reshape(*action.shape[: action.dim() - len(self.shape)], -1)

    def unflatten(self, flat: Tensor) -> Tensor:
        """Undo ``flatten``."""
        return flat if self.shape is None else flat.reshape(*flat.shape[:-1], *self.shape)


class Policy(nn.Module):
    """A distribution over all actions: joint log-probabilities, entropies and KLs are sums over action names.

    All methods take any leading dimensions. Actions are in policy space; ``action_transform`` names, per action, the
    transform that the environment side applies. ``outputs`` are the shapes that the network must provide, and ``over``
    names the observations that maps and lists among them are about. Here names are independent of each other, and the
    ``action`` of ``distribution`` and ``kl`` is not used; see ``ludus.networks.conditional_policy``.
    """

    def __init__(
        self, action: Specs, config: PolicyConfig = DEFAULT, inputs: Mapping[str, Shape] = MappingProxyType({})
    ) -> None:
        super().__init__()
        settings = parse_heads(config.heads, action, inputs)
        heads = {name: make_head(name, action, config, settings.get(name)) for name in action}
        self.action = action
        self.heads = nn.ModuleDict({module_key(f"policy/{name}"): head for name, head in heads.items()})
        self.outputs: Shapes = {f"policy/{name}": head.output_shape for name, head in heads.items()}
        # the observation whose places or entities an output is about
        self.over = {f"policy/{name}": found.observation for name, found in settings.items() if found.observation}
        self.action_transform = {name: head.action_transform for name, head in heads.items()}
        # steps for which one call of ``draw`` must be used, since its noise is the same for all of them; 0: any number
        self.noise_steps = config.gsde_interval if any(isinstance(head, GSDE) for head in heads.values()) else 0
        self._parts = []  # in a list, so that PyTorch does not register the heads twice
        for name, spec in action.items():
            same_shape = len(spec.shape) == 1 or (spec.kind == "categorical" and not spec.shape)
            self._parts.append(ActionPart(name, heads[name], f"policy/{name}", None if same_shape else spec.shape))

    def initialize(self) -> None:
        """Set orthogonal weights of layers between the network's outputs and the distributions; here are none."""
        return

    def rename_masks(self, masks: Mapping[str, str]) -> None:
        """Use the names that padding masks have among raw observations; ``masks`` are by the names of their lists."""
        for head in self.heads.values():
            if isinstance(head, EntityHead):
                head.padding = masks.get(head.padding.removesuffix("/mask"), head.padding)

    def find_conditional_masks(self, observation: Specs) -> None:
        """Find the masks that depend on the choice of another part."""
        for name in self.action:
            if other := mask_condition(name, self.action, observation):
                self.set_mask_condition(name, other)

    def set_mask_condition(self, name: str, other: str) -> None:
        """Let the mask of a part depend on the choice of another; refused, since here no part is sampled before one."""
        raise UserError(
            f'The mask of action "{name}" depends on the choice of "{other}", which must be sampled first; name both '
            f'in agent.autoregressive (ppo, a2c, vtrace and acer have it), "{other}" first.'
        )

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensors:
        """Draw the noise for ``steps`` samples of ``batch`` rows: ``[steps, batch, …]`` by action name."""
        return {part.name: part.head.draw_noise((steps, batch), generator) for part in self._parts}

    def sample(self, outputs: Tensors, observation: Tensors, noise: Tensors | None) -> tuple[Tensors, Tensor]:
        """Return actions (the mode without ``noise``) and their log-probability; ``observation`` has the masks."""
        actions, log_probs = dict[str, Tensor](), dict[str, Tensor]()
        for part, p in self._decode(outputs, {}, observation):
            flat = part.head.mode(p) if noise is None else part.head.sample(p, noise[part.name])
            log_probs[part.name] = part.head.log_prob(p, flat)
            actions[part.name] = part.unflatten(flat)
        return actions, self._sum(log_probs, actions)

    def evaluate(self, outputs: Tensors, action: Tensors, observation: Tensors) -> Tensors:
        """Return the ``log_prob`` of actions and the ``entropy`` of the distribution."""
        log_probs, entropies = dict[str, Tensor](), dict[str, Tensor]()
        for part, p in self._decode(outputs, action, observation):
            log_probs[part.name], entropies[part.name] = part.head.evaluate(p, part.flatten(action[part.name]))
        return {"log_prob": self._sum(log_probs, action), "entropy": self._sum(entropies, action)}

    def distribution(self, outputs: Tensors, action: Tensors, observation: Tensors) -> Tensors:
        """Return the parameters of the distribution that ``action`` came from, by output name, to store for ``kl``."""
        return {part.output: part.head.pack(p) for part, p in self._decode(outputs, action, observation)}

    def kl(self, old: Tensors, outputs: Tensors, action: Tensors, observation: Tensors) -> Tensor:
        """Return KL(old‖new), with ``old`` as returned by ``distribution`` for the same ``action``."""
        terms: Tensors = {}
        for part, p in self._decode(outputs, action, observation):
            terms[part.name] = part.head.kl(part.head.unpack(old[part.output]), p)
        return self._sum(terms, action)

    def log_prob_of(self, distribution: Tensors, action: Tensors) -> Tensor:
        """Return the log-probability of ``action`` from what ``distribution`` returned for it."""
        terms: Tensors = {}
        for part in self._parts:
            p = part.head.unpack(distribution[part.output])
            terms[part.name] = part.head.log_prob(p, part.flatten(action[part.name]))
        return self._sum(terms, action)

    def kl_between(self, old: Tensors, new: Tensors, action: Tensors) -> Tensor:
        """Return KL(old‖new) of what ``distribution`` returned for the same ``action``."""
        terms: Tensors = {}
        for part in self._parts:
            p, q = (part.head.unpack(packed[part.output]) for packed in (old, new))
            terms[part.name] = part.head.kl(p, q)
        return self._sum(terms, action)

    def used_parts(self, action: Tensors) -> Tensors:
        """Return where each part is used, by the names of those that are not always."""
        return {}

    def describe(self, outputs: Tensors, observation: Tensors) -> dict[str, Tensors]:
        """Return each action's distribution by parameter name, in the shape of the action."""
        return {part.name: part.head.describe(p) for part, p in self._decode(outputs, {}, observation)}

    def _decode(self, outputs: Tensors, action: Tensors, observation: Tensors) -> list[tuple[ActionPart, Parameters]]:
        """Return each part with the parameters of its distribution, given the parts of ``action`` before it."""
        return [(part, part.head.decode(outputs[part.output], observation)) for part in self._parts]

    def _sum(self, terms: Tensors, action: Tensors) -> Tensor:
        """Return the sum of a term of each part, without those of parts that ``action`` does not use."""
        return reduce(torch.add, terms.values())


def make_head(name: str, action: Specs, config: PolicyConfig, setting: HeadSetting | None) -> ActionHead:
    """Make the distribution of one action."""
    spec, mask = action[name], mask_name(name, action)
    if setting is not None:
        if setting.kind == "spatial":
            return Spatial(spec, mask, setting.height, setting.width)
        return (Pointer if setting.kind == "pointer" else Select)(spec, mask, f"{setting.observation}/mask")
    if spec.kind == "categorical":
        return MultiCategorical(spec, mask) if spec.shape else Categorical(spec, mask)
    if spec.kind == "binary":
        return Bernoulli(spec, mask)
    check_bounds(name, spec, config.distribution)
    match config.distribution:
        case "gaussian":
            return Gaussian(spec, config.log_std_init)
        case "state_gaussian":
            return StateGaussian(spec, config.log_std_init)
        case "tanh":
            return TanhGaussian(spec, config.log_std_init)
        case "beta":
            return Beta(spec)
        case "discretized":
            return Discretized(spec, config.bins, config.ordinal)
        case "gsde":
            return GSDE(spec, config.log_std_init, config.head_width)
