"""Action distributions, one class each, over actions flattened to ``[…, K]``: the interface, and discrete actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.network import Shape
from ludus.core.spec import Spec
from ludus.core.types import Tensors
from ludus.networks.action_embeddings import ChoiceEmbedding, NumberEmbedding
from ludus.ops import distributions as ops

Parameters = tuple[Tensor, ...]


class Functions(NamedTuple):
    """The functions of a distribution; their first arguments are its parameters."""

    sample: Callable[..., Tensor]
    mode: Callable[..., Tensor]
    log_prob: Callable[..., Tensor]
    entropy: Callable[..., Tensor]
    kl: Callable[..., Tensor]


CATEGORICAL = Functions(
    ops.categorical_sample, ops.categorical_mode, ops.categorical_log_prob, ops.categorical_entropy, ops.categorical_kl
)
BERNOULLI = Functions(
    ops.bernoulli_sample, ops.bernoulli_mode, ops.bernoulli_log_prob, ops.bernoulli_entropy, ops.bernoulli_kl
)


class ActionHead(nn.Module):
    """The distribution of one action, made from a network output of shape ``output_shape``.

    ``mask`` names the observation that is the action's mask, if there is one.
    """

    functions: Functions
    action_transform = "none"  # applied before the action goes to the environment
    parameter_count = 1
    outputs = 1  # of the network, per element of a continuous or binary action
    unused_value: float = 0  # of an action that another choice does not use: the centre of a Box
    embeds_entities = False  # whether ``make_embedding`` is of the features of a list

    def __init__(self, spec: Spec, mask: str = "") -> None:
        super().__init__()
        self.spec, self.mask = spec, mask
        self.size = sum(spec.sizes) if spec.kind == "categorical" else self.outputs * spec.size
        self.output_shape: Shape = (self.size,)

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        """Return the parameters of the distribution from the network's output and the masks in ``observation``."""
        mask = observation.get(self.mask)
        return (output if mask is None else ops.mask_logits(output, mask),)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw the noise for ``sample``, with ``leading`` dimensions."""
        return ops.gumbel(torch.rand(*leading, self.size, generator=generator, device=generator.device))

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        """Return the action that ``noise`` selects."""
        return self.functions.sample(*p, noise)

    def mode(self, p: Parameters) -> Tensor:
        """Return the most likely action."""
        return self.functions.mode(*p)

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        """Return the log-probability of ``action``."""
        return self.functions.log_prob(*p, action)

    def entropy(self, p: Parameters) -> Tensor:
        """Return the entropy."""
        return self.functions.entropy(*p)

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        """Return KL(p‖q)."""
        return self.functions.kl(*p, *q)

    def evaluate(self, p: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of ``action`` and the entropy."""
        return self.log_prob(p, action), self.entropy(p)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        """Return the parameters by name, in the shape of the action; probabilities for discrete actions."""
        return {"probabilities": p[0].softmax(-1)}

    def pack(self, p: Parameters) -> Tensor:
        """Concatenate the parameters, to store them."""
        return p[0] if len(p) == 1 else torch.cat([p[0], p[1].expand_as(p[0])], -1)

    def unpack(self, packed: Tensor) -> Parameters:
        """Undo ``pack``."""
        return packed.chunk(self.parameter_count, -1)

    def make_embedding(self, width: int) -> nn.Module:
        """Make the embedding of the action on which later parts of an autoregressive action depend."""
        if self.spec.kind == "categorical":
            return ChoiceEmbedding(self.spec.sizes, width, single=not self.spec.shape)
        return NumberEmbedding(self.spec.size, width)

    def _shaped(self, x: Tensor) -> Tensor:
        """Reshape ``x`` ``[…, K]`` to the shape of the action."""
        return x.reshape(*x.shape[:-1], *self.spec.shape)


class Categorical(ActionHead):
    """One choice out of n."""

    functions = CATEGORICAL

    def evaluate(self, p: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        return ops.categorical_terms(p[0], action)


class MultiCategorical(ActionHead):
    """k independent choices, out of ``sizes[i]`` each: one categorical ``[…, k, max(sizes)]``, padded."""

    functions = CATEGORICAL

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        return (ops.pad_choices(super().decode(output, observation)[0], self.spec.sizes),)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return super().sample(p, ops.pad_choices(noise, self.spec.sizes))

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return super().log_prob(p, action).sum(-1)

    def entropy(self, p: Parameters) -> Tensor:
        return super().entropy(p).sum(-1)

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return super().kl(p, q).sum(-1)

    def pack(self, p: Parameters) -> Tensor:
        choices = zip(p[0].unbind(-2), self.spec.sizes, strict=True)
        return torch.cat([logits[..., :size] for logits, size in choices], -1)

    def unpack(self, packed: Tensor) -> Parameters:
        return (ops.pad_choices(packed, self.spec.sizes),)


class Bernoulli(ActionHead):
    """Independent bits."""

    functions = BERNOULLI

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        mask = observation.get(self.mask)
        return (
            output if mask is None else ops.mask_bernoulli_logits(output, mask.reshape(*mask.shape[:-1], self.size, 2)),
        )

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(*leading, self.size, generator=generator, device=generator.device)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"probabilities": self._shaped(p[0].sigmoid())}
