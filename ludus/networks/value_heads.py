"""Q-value heads: expected values, C51, QR-DQN and IQN.

All methods take any leading dimensions: outputs ``[..., F]``, actions ``[...]``. A is the number of actions, n the
number of atoms or quantiles. Action masks are applied by the agent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.network import Shapes
from ludus.core.spec import Specs, is_one_discrete
from ludus.core.step import Episode
from ludus.core.types import Tensors
from ludus.networks.noisy import NoisyLinear
from ludus.networks.projection import Stream
from ludus.ops import distributional as ops
from ludus.ops.q_learning import dueling as combine
from ludus.ops.q_learning import gather_action, huber, td_target

ValueKind = Literal["expected", "categorical", "quantile", "implicit"]
COSINES = 64  # size of the embedding of a quantile fraction (IQN)
ACTING_QUANTILES = 32  # quantiles averaged into Q when acting (IQN)


class ValueHead(nn.Module, ABC):
    """Turns a network's ``outputs`` into the value, or the return distribution, of each action.

    ``streams``: each output needs a hidden layer. Heads with ``needs_taus`` take the quantile fractions ``taus``
    ``[..., n]``, uniform in [0, 1), which the agent draws; others ignore them.
    """

    outputs: Shapes
    needs_taus = False

    def __init__(self, actions: int, dueling: bool, atoms: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.actions, self.streams = actions, dueling
        size = prod(atoms)
        self.outputs = {"value": (size,), "advantage": (actions * size,)} if dueling else {"q": (actions * size,)}
        self._atoms = atoms

    def per_action(self, outputs: Tensors) -> Tensor:
        """Return the outputs of every action, with dueling streams combined: ``[..., A]``, or ``[..., A, n]``."""
        x = outputs["advantage" if self.streams else "q"]
        if self._atoms:
            x = x.reshape(*x.shape[:-1], self.actions, *self._atoms)
        if not self.streams:
            return x
        return combine(outputs["value"].unsqueeze(-2) if self._atoms else outputs["value"], x)

    def episode_warning(self, episodes: list[Episode], gamma: float) -> str:
        """Return a warning if the head cannot represent the returns of these episodes, else an empty string."""
        return ""

    def q(self, outputs: Tensors, taus: Tensor | None = None) -> Tensor:
        """Return the expected return of every action, ``[..., A]``."""
        return self.mean(self.per_action(outputs))

    def evaluate(self, outputs: Tensors, action: Tensor, taus: Tensor | None = None) -> Tensor:
        """Return the prediction for ``action``: its value ``[...]``, or its logits or quantiles ``[..., n]``."""
        return gather_action(self.per_action(outputs).mT, action)

    @abstractmethod
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        """Return the target of ``evaluate``, without gradient, from the outputs and the action of the next step."""

    @abstractmethod
    def mean(self, prediction: Tensor) -> Tensor:
        """Return the expected return ``[...]`` of a prediction of ``evaluate``."""

    @abstractmethod
    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> Tensor:
        """Return the loss ``[...]``."""

    def priority(self, prediction: Tensor, target: Tensor, loss: Tensor) -> Tensor:
        """Return the replay priority ``[...]``: the TD error of the means, unless it follows from the loss.

        Call it without gradients.
        """
        return (self.mean(target) - self.mean(prediction)).abs()


class ExpectedValue(ValueHead):
    """The expected return with the Huber loss (DQN, Mnih et al. 2015)."""

    def __init__(self, actions: int, dueling: bool = False, kappa: float = 1.0) -> None:
        super().__init__(actions, dueling)
        self._kappa = kappa

    def evaluate(self, outputs: Tensors, action: Tensor, taus: Tensor | None = None) -> Tensor:
        return gather_action(self.q(outputs), action)

    @torch.no_grad()
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        return td_target(reward, discount, self.evaluate(outputs, action))

    def mean(self, prediction: Tensor) -> Tensor:
        return prediction

    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> Tensor:
        return huber(prediction, target, self._kappa)


class CategoricalValue(ValueHead):
    """A categorical distribution over atoms from ``v_min`` to ``v_max`` (C51, Bellemare et al. 2017)."""

    support: Tensor

    def __init__(self, actions: int, atoms: int, v_min: float, v_max: float, dueling: bool = False) -> None:
        if atoms < 2:
            raise UserError(f"agent.atoms is {atoms}, but must be 2 or more; 51 is usual.")
        if not v_min < v_max:
            raise UserError(f"agent.v_min is {v_min:g}, but must be less than agent.v_max, {v_max:g}.")
        super().__init__(actions, dueling, (atoms,))
        self.v_min, self.v_max, self._warned = v_min, v_max, False
        self.register_buffer("support", ops.c51_support(v_min, v_max, atoms), persistent=False)

    def episode_warning(self, episodes: list[Episode], gamma: float) -> str:
        """Warn once if a return lies outside the atoms; discounted returns are estimated from the mean reward."""
        for _, total, length, *_ in [] if self._warned else episodes:
            steps = length if gamma == 1 else (1 - gamma**length) / (1 - gamma)
            value = total / max(length, 1) * steps
            if not self.v_min <= value <= self.v_max:
                self._warned = True
                return (
                    f"An episode of {length} steps had a discounted return of about {value:.4g}, outside the atoms "
                    f"from {self.v_min:g} to {self.v_max:g}; widen agent.v_min and agent.v_max."
                )
        return ""

    @torch.no_grad()
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        discount = discount.unsqueeze(-1)
        logits = self.evaluate(outputs, action).masked_fill(discount == 0, 0)  # no next state
        atoms = td_target(reward.unsqueeze(-1), discount, self.support)
        return ops.c51_project(atoms, logits.softmax(-1), self.support)

    def mean(self, prediction: Tensor) -> Tensor:
        return prediction.softmax(-1) @ self.support

    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> Tensor:
        return ops.c51_cross_entropy(prediction, target)

    def priority(self, prediction: Tensor, target: Tensor, loss: Tensor) -> Tensor:
        """Return KL(target‖prediction), as in Rainbow, which is 0 for a perfect prediction unlike the loss."""
        entropy: Tensor = torch.special.entr(target).sum(-1)
        return (loss - entropy).clamp(min=0)


class QuantileValue(ValueHead):
    """Quantiles of the return at the fractions (2i + 1) / 2n (QR-DQN, Dabney et al. 2018a)."""

    taus: Tensor

    def __init__(self, actions: int, atoms: int, dueling: bool = False, kappa: float = 1.0) -> None:
        super().__init__(actions, dueling, (atoms,))
        self._kappa = kappa
        self.register_buffer("taus", ops.quantile_midpoints(atoms), persistent=False)

    @torch.no_grad()
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        return td_target(reward.unsqueeze(-1), discount.unsqueeze(-1), self.evaluate(outputs, action))

    def mean(self, prediction: Tensor) -> Tensor:
        return prediction.mean(-1)

    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> Tensor:
        return ops.quantile_huber(prediction, target, self.taus, self._kappa)


class ImplicitQuantileValue(ValueHead):
    """Quantiles of the return at any fraction (IQN, Dabney et al. 2018b).

    The network's ``features`` are multiplied by an embedding of the fraction; the layers after that belong to this
    head, so a target network needs a copy of both. Without ``taus``, ``q`` uses evenly spaced fractions, so that
    evaluation is deterministic.
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
        self.register_buffer("taus", ops.quantile_midpoints(ACTING_QUANTILES), persistent=False)

    def quantiles(self, outputs: Tensors, taus: Tensor) -> Tensor:
        """Return the quantiles of all actions at the fractions ``taus`` ``[..., n]``: ``[..., n, A]``."""
        embedding = self.embedding(ops.cosine_embedding(taus, COSINES)).relu()
        x = outputs["features"].relu().unsqueeze(-2) * embedding
        quantiles: Tensor = self.choices(x)
        return quantiles if self.value is None else combine(self.value(x), quantiles)

    def q(self, outputs: Tensors, taus: Tensor | None = None) -> Tensor:
        return self.quantiles(outputs, self.taus if taus is None else taus).mean(-2)

    def evaluate(self, outputs: Tensors, action: Tensor, taus: Tensor | None = None) -> Tensor:
        return gather_action(self.quantiles(outputs, self._require(taus)), action)

    @torch.no_grad()
    def target(
        self, outputs: Tensors, action: Tensor, reward: Tensor, discount: Tensor, taus: Tensor | None = None
    ) -> Tensor:
        return td_target(reward.unsqueeze(-1), discount.unsqueeze(-1), self.evaluate(outputs, action, taus))

    def mean(self, prediction: Tensor) -> Tensor:
        return prediction.mean(-1)

    def loss(self, prediction: Tensor, target: Tensor, taus: Tensor | None = None) -> Tensor:
        return ops.quantile_huber(prediction, target, self._require(taus), self._kappa)

    @staticmethod
    def _require(taus: Tensor | None) -> Tensor:
        if taus is None:
            raise ValueError("the implicit quantile head needs taus, the fractions of the quantiles")
        return taus


def make_value_head(
    kind: ValueKind,
    actions: int,
    dueling: bool = False,
    atoms: int = 51,
    v_min: float = -10.0,
    v_max: float = 10.0,
    noisy: bool = False,
) -> ValueHead:
    """Make the head of one kind, which ignores the settings of the others; ``noisy`` is used by IQN's own layers."""
    if kind == "categorical":
        return CategoricalValue(actions, atoms, v_min, v_max, dueling)
    if kind == "quantile":
        return QuantileValue(actions, atoms, dueling)
    return ImplicitQuantileValue(actions, dueling, noisy) if kind == "implicit" else ExpectedValue(actions, dueling)


def number_of_choices(action: Specs) -> int:
    """Return the number of choices of the only action; refuse anything but one Discrete action."""
    if is_one_discrete(action):
        return next(iter(action.values())).sizes[0]
    found = ", ".join(f"{name} ({spec.kind} of shape {spec.shape})" for name, spec in action.items())
    raise UserError(
        f"The agent takes one Discrete action, but the environment has {found}; use ppo, or sac or td3 for "
        "continuous actions."
    )
