"""The interface of updaters, which turn a loss into an optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.types import State, SumOverRanks, Tensors, single_rank

LossFunction = Callable[[Batch], tuple[Tensors, Tensors]]
OptimizerName = Literal["adam", "adamw", "rmsprop", "rmsprop_tf", "sgd"]


@dataclass(frozen=True)
class Group:
    """Parameters that share optimizer settings and are stepped together."""

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float  # or a schedule
    max_grad_norm: float = 0.0  # or a schedule; 0: no clipping
    weight_decay: float = 0.0  # or a schedule; adamw: decoupled; others: L2 penalty
    optimizer: OptimizerName = "adam"  # rmsprop_tf: TensorFlow's variant, ε inside the root
    eps: float = 1e-8
    beta1: float = 0.9  # of adam and adamw: decay of the mean of gradients


class NonFiniteError(Exception):
    """A gradient contains NaN or Inf; the step was not applied, so the parameters are unchanged."""

    def __init__(self, loss: LossFunction, batch: Batch, group: str, metrics: Tensors) -> None:
        super().__init__("a gradient is not finite")
        self.loss, self.batch, self.group, self.metrics = loss, batch, group, metrics


def total_loss(losses: Tensors, coefficients: Mapping[str, float]) -> Tensor:
    """Return the sum of the losses weighted by their coefficients, 1 by default; weight 0 skips a loss."""
    total: Tensor | None = None
    for name, x in losses.items():
        weight = coefficients.get(name, 1.0)
        if isinstance(weight, Tensor):  # scheduled, in a compiled update
            total = x * weight if total is None else total + x * weight
        elif total is None:
            total = x if weight == 1 else x * weight if weight else None
        elif weight:
            total = torch.add(total, x, alpha=weight)
    if total is None:
        raise UserError("All losses have the weight 0, so there is nothing to learn from; raise a coefficient.")
    return total


class Updater(ABC):
    """Computes gradients, sums them over ranks, clips them and steps the optimizer.

    ``group`` is a name from ``Agent.parameter_groups``. Losses and 0-dimensional metrics are weighted by
    ``Batch.share``, so their sum over ranks is the mean over all rows; they are returned summed.
    """

    ranks: int = 1
    learning_rate: float  # of the first group; setting it scales the other groups' by the same factor

    @abstractmethod
    def step(self, loss: LossFunction, batch: Batch, group: str) -> Tensors:
        """Compute the gradient of the weighted losses and apply it, possibly as one compiled region; return metrics.

        The loss is computed with the networks in training mode (BatchNorm, Dropout); they are in evaluation mode at
        all other times.
        """

    @abstractmethod
    def gradient(self, loss: LossFunction, batch: Batch, group: str) -> tuple[Tensor, Tensors]:
        """Return the flat gradient of ``group``, summed over ranks, and the metrics, without a step."""

    @abstractmethod
    def apply(self, gradient: Tensor, group: str) -> Tensors:
        """Clip a flat gradient and step the optimizer; return the norm before clipping.

        The step is skipped if the norm is not finite.
        """

    @abstractmethod
    def parameters(self, group: str) -> Tensor:
        """Return a flat view of the parameters of ``group``."""

    @abstractmethod
    def assign(self, values: Tensor, group: str) -> None:
        """Set the parameters of ``group``, given flat as by ``parameters``."""

    @abstractmethod
    def split(self, flat: Tensor, group: str) -> list[Tensor]:
        """Return views of a flat tensor, laid out as by ``parameters``, in the shapes of the group's parameters."""

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Set learning rates and weights of losses that are schedules; return the rates of single groups, to log.

        It is called after ``Agent.schedule`` with the same progress of the run (0 to 1).
        """
        return {}

    def add_return(self, mean: float) -> None:
        """Take note of the mean return of an evaluation, for ``schedule``."""
        return

    def pop_gradient_norms(self) -> list[Tensor]:
        """Return gradient norms since the last call that were not checked yet, which ``step`` defers on a GPU."""
        return []

    @property
    def sum(self) -> SumOverRanks:
        """The function that returns the sum of a tensor over ranks."""
        return single_rank

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of ``x`` over ranks."""
        return self.sum(x) / self.ranks if self.ranks > 1 else x

    def agree(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on all ranks."""
        return flag

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...
