"""Distributions over the places of a map and the entities of a list."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.spec import Spec
from ludus.core.types import Tensors
from ludus.networks.action_embeddings import EntityEmbedding
from ludus.networks.action_heads import CATEGORICAL, ActionHead, Bernoulli, Categorical, Parameters
from ludus.ops import distributions as ops


class Spatial(ActionHead):
    """A place on a map of H × W: one categorical over all places, from a network output ``[1, H, W]``.

    The action is a Discrete(H·W), or a MultiDiscrete([H, W]) of row and column, whose mask has H + W entries.
    """

    functions = CATEGORICAL

    def __init__(self, spec: Spec, mask: str, height: int, width: int) -> None:
        super().__init__(spec, mask)
        self.size, self.output_shape = height * width, (1, height, width)
        self._height, self._width = height, width

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        logits, mask = output.flatten(-3), observation.get(self.mask)
        if mask is None:
            return (logits,)
        if self.spec.shape:
            rows, columns = torch.split(mask.bool(), [self._height, self._width], -1)
            mask = (rows.unsqueeze(-1) & columns.unsqueeze(-2)).flatten(-2)
        return (ops.mask_logits(logits, mask),)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return self._action(super().sample(p, noise))

    def mode(self, p: Parameters) -> Tensor:
        return self._action(super().mode(p))

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return super().log_prob(p, self._index(action))

    def evaluate(self, p: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        return ops.categorical_terms(p[0], self._index(action))

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"probabilities": torch.unflatten(p[0].softmax(-1), -1, (self._height, self._width))}

    def _action(self, index: Tensor) -> Tensor:
        return torch.stack([index // self._width, index % self._width], -1) if self.spec.shape else index

    def _index(self, action: Tensor) -> Tensor:
        return action[..., 0] * self._width + action[..., 1] if self.spec.shape else action


class EntityHead(ActionHead):
    """A distribution over the entities of a list, from a network output ``[1, S]``; padding is never chosen.

    ``padding`` names the observation that is True for entities that are present, if the list has one.
    """

    embeds_entities = True

    def __init__(self, spec: Spec, mask: str, padding: str) -> None:
        super().__init__(spec, mask)
        self.output_shape = (1, self.size)
        self.padding = padding

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        (logits,) = super().decode(output.squeeze(-2), observation)
        present = observation.get(self.padding)
        return (logits if present is None else ops.mask_logits(logits, present),)

    def make_embedding(self, width: int) -> nn.Module:
        return EntityEmbedding(self.size, width, index=self.spec.kind == "categorical")


class Pointer(EntityHead, Categorical):
    """One entity out of a list; with an empty list the choice is 0."""


class Select(EntityHead, Bernoulli):
    """Any number of entities out of a list, one bit each."""
