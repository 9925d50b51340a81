"""The values of choices, from a network's outputs: one class per kind, as ``heads`` for policies.

Everything works on any leading dimensions: outputs ``[..., F]``, actions ``[...]``. A is the number of choices, n of
atoms or quantiles. Forbidden actions are the agent's affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.network import Shapes
from ludus.core.step import Episode
from ludus.core.types import Tensors
from ludus.networks.noisy import NoisyLinear
from ludus.networks.streams import Stream
from ludus.ops import distributional as ops
from ludus.ops.q_learning import dueling as combine
from ludus.ops.q_learning import gather_action, huber, td_target

Kind = Literal["expected", "categorical", "quantile", "implicit"]
COSINES = 64  # in the embedding of a quantile's level (IQN)
LEVELS = 32  # quantiles by which a choice is judged in acting (IQN)


class ValueHead(nn.Module, ABC):
    """What a network's ``outputs`` say about the return of each choice.

    ``evaluate`` is the prediction for the choice that was taken, ``target`` what it should have been, ``loss`` how far
    they are apart. ``streams``: the outputs want a hidden layer each. Only with ``needs_taus`` does ``taus``
    ``[..., n]`` mean something: the levels of the quantiles asked for, uniform in [0, 1), which an agent draws.
    """

    outputs: Shapes
    needs_taus = False

    def __init__(self, actions: int, dueling: bool, atoms: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.actions, self.streams = actions, dueling
        size = prod(atoms)
        self.outputs = {"value": (size,), "advantage": (actions * size,)} if dueling else {"q": (actions * size,)}
        self._atoms = atoms

    def spread(self, outputs: Tensors) -> Tensor:
        """What the network says of every choice: ``[..., A]``, or ``[..., A, n]`` with atoms."""
        each = outputs["advantage" if self.streams else "q"]
        if self._atoms:
            each = each.reshape(*each.shape[:-1], self.actions, *self._atoms)
        if not self.streams:
            return each
        return combine(outputs["value"].unsqueeze(-2) if self._atoms else outputs["value"], each)

    def episode_warning(self, episodes: list[Episode], gamma: float) -> str:
        """A warning if the returns of episodes are such as cannot be told."""
        return ""

    @abstractmethod
    def q(self, outputs: Tensors, taus: Tensor | None = None) -> Tensor:
        """The expected return of every choice, ``[..., A]``."""

    def evaluate(self, outputs: Tensors, action: Tensor, taus: Tensor | None = None) -> Tensor:
        """What is predicted for ``action``: its value ``[...]``, its logits or its quantiles ``[..., n]``."""
        return gather_action(self.spread(outputs).mT, action)

    @abstractmethod
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        """What ``evaluate`` should give, if ``action`` follows after ``reward`` and has these outputs; a constant."""

    @abstractmethod
    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss ``[...]``, and the surprise ``[...]`` by which a replay sets priorities, without a graph."""


class Expected(ValueHead):
    """The expected return, as in DQN, with Huber's loss."""

    def __init__(self, actions: int, dueling: bool = False, kappa: float = 1.0) -> None:
        super().__init__(actions, dueling)
        self._kappa = kappa

    def q(self, outputs: Tensors, taus: Tensor | None = None) -> Tensor:
        return self.spread(outputs)

    def evaluate(self, outputs: Tensors, action: Tensor, taus: Tensor | None = None) -> Tensor:
        return gather_action(self.q(outputs), action)

    @torch.no_grad()
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        return td_target(reward, discount, self.evaluate(outputs, action))

    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return huber(prediction, target, self._kappa), (prediction.detach() - target).abs()


class Categorical(ValueHead):
    """The probabilities of returns at fixed atoms from ``v_min`` to ``v_max`` (C51, Bellemare et al. 2017)."""

    support: Tensor

    def __init__(self, actions: int, atoms: int, v_min: float, v_max: float, dueling: bool = False) -> None:
        if atoms < 2:
            raise UserError(f"agent.atoms is {atoms}, but a support has 2 or more; 51 is usual.")
        if not v_min < v_max:
            raise UserError(f"agent.v_min is {v_min:g}, but must be less than agent.v_max, {v_max:g}.")
        super().__init__(actions, dueling, (atoms,))
        self.v_min, self.v_max, self._told = v_min, v_max, False
        self.register_buffer("support", ops.c51_support(v_min, v_max, atoms), persistent=False)

    def episode_warning(self, episodes: list[Episode], gamma: float) -> str:
        """Say so, once and with figures, if a return lies outside of the atoms, as near as its mean reward tells."""
        for _, total, length, *_ in [] if self._told else episodes:
            steps = length if gamma == 1 else (1 - gamma**length) / (1 - gamma)
            value = total / max(length, 1) * steps
            if not self.v_min <= value <= self.v_max:
                self._told = True
                return (
                    f"An episode of {length} steps had a discounted return of about {value:.4g}, which the atoms from "
                    f"{self.v_min:g} to {self.v_max:g} cannot tell; set agent.v_min and agent.v_max further apart."
                )
        return ""

    def q(self, outputs: Tensors, taus: Tensor | None = None) -> Tensor:
        return self.spread(outputs).softmax(-1) @ self.support

    @torch.no_grad()
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        discount = discount.unsqueeze(-1)
        logits = self.evaluate(outputs, action).masked_fill(discount == 0, 0)  # an ending has no successor
        places, probabilities = td_target(reward.unsqueeze(-1), discount, self.support), logits.softmax(-1)
        return ops.c51_project(places, probabilities, self.support)

    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> tuple[Tensor, Tensor]:
        loss = ops.c51_cross_entropy(prediction, target)
        # the surprise is KL(target‖prediction), as in Rainbow: 0 where the prediction is right, which the loss is not
        return loss, (loss.detach() - torch.special.entr(target.detach()).sum(-1)).clamp(min=0)


class Quantile(ValueHead):
    """Returns at n levels of probability, (2i + 1) / 2n (QR-DQN, Dabney et al. 2018a)."""

    taus: Tensor

    def __init__(self, actions: int, atoms: int, dueling: bool = False, kappa: float = 1.0) -> None:
        super().__init__(actions, dueling, (atoms,))
        self._kappa = kappa
        self.register_buffer("taus", ops.quantile_midpoints(atoms), persistent=False)

    def q(self, outputs: Tensors, taus: Tensor | None = None) -> Tensor:
        return self.spread(outputs).mean(-1)

    @torch.no_grad()
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        return td_target(reward.unsqueeze(-1), discount.unsqueeze(-1), self.evaluate(outputs, action))

    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return _quantile_loss(prediction, target, self.taus, self._kappa)


class Implicit(ValueHead):
    """Returns at any level of probability that is asked for (IQN, Dabney et al. 2018b).

    The network gives ``features``, which are multiplied by an embedding of the level; the layers that follow are this
    head's own. So a target of it is a copy of network and head. Without ``taus``, ``q`` takes levels at equal
    distances, which is how an evaluation can be repeated.
    """

    needs_taus = True
    taus: Tensor

    def __init__(
        self, actions: int, dueling: bool = False, noisy: bool = False, features: int = 64, kappa: float = 1.0
    ) -> None:
        super().__init__(actions, False)
        self.outputs, self._kappa = {"features": (features,)}, kappa
        kind = NoisyLinear if noisy else nn.Linear
        self.embedding = nn.Linear(COSINES, features)
        self.choices = Stream(kind(features, features), kind(features, actions), "relu")
        self.value = Stream(kind(features, features), kind(features, 1), "relu") if dueling else None
        self.register_buffer("taus", ops.quantile_midpoints(LEVELS), persistent=False)

    def quantiles(self, outputs: Tensors, taus: Tensor) -> Tensor:
        """The returns of all choices at the levels ``taus`` ``[..., n]``: ``[..., n, A]``."""
        level = self.embedding(ops.cosine_embedding(taus, COSINES)).relu()
        x = outputs["features"].relu().unsqueeze(-2) * level
        found: Tensor = self.choices(x)
        return found if self.value is None else combine(self.value(x), found)

    def q(self, outputs: Tensors, taus: Tensor | None = None) -> Tensor:
        return self.quantiles(outputs, self.taus if taus is None else taus).mean(-2)

    def evaluate(self, outputs: Tensors, action: Tensor, taus: Tensor | None = None) -> Tensor:
        return gather_action(self.quantiles(outputs, self._given(taus)), action)

    @torch.no_grad()
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        return td_target(reward.unsqueeze(-1), discount.unsqueeze(-1), self.evaluate(outputs, action, taus))

    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return _quantile_loss(prediction, target, self._given(taus), self._kappa)

    @staticmethod
    def _given(taus: Tensor | None) -> Tensor:
        if taus is None:
            raise ValueError("implicit quantiles are learned at levels that are drawn: give taus")
        return taus


def make_value_head(
    kind: Kind,
    actions: int,
    dueling: bool = False,
    atoms: int = 51,
    v_min: float = -10.0,
    v_max: float = 10.0,
    noisy: bool = False,
) -> ValueHead:
    """The head of one kind; ``noisy`` is for layers of its own, and what else it has no use for is left aside."""
    if kind == "categorical":
        return Categorical(actions, atoms, v_min, v_max, dueling)
    if kind == "quantile":
        return Quantile(actions, atoms, dueling)
    return Implicit(actions, dueling, noisy) if kind == "implicit" else Expected(actions, dueling)


def _quantile_loss(prediction: Tensor, target: Tensor, taus: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """The quantile-Huber loss, and the difference of the means as surprise."""
    surprise = (target.detach().mean(-1) - prediction.detach().mean(-1)).abs()
    return ops.quantile_huber(prediction, target, taus, kappa), surprise
