"""The interface of updaters, which turn a loss into a step of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from ludus.core.batch import Batch
from ludus.core.types import State, Tensors

LossFunction = Callable[[Batch], tuple[Tensors, Tensors]]
OptimizerName = Literal["adam", "adamw", "rmsprop", "rmsprop_tf", "sgd"]


@dataclass(frozen=True)
class Group:
    """Parameters that are stepped together, and how."""

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float
    max_grad_norm: float = 0.0  # the gradient is scaled down to this norm; 0: never
    weight_decay: float = 0.0  # adamw: apart from the gradient; the others: as a penalty on squared weights
    optimizer: OptimizerName = "adam"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    eps: float = 1e-8  # of the optimizer


class NonFiniteError(Exception):
    """A gradient holds a NaN or an Inf; the step was not applied, so the parameters are those before it."""

    def __init__(self, loss: LossFunction, batch: Batch, group: str, metrics: Tensors) -> None:
        super().__init__("a gradient is not finite")
        self.loss, self.batch, self.group, self.metrics = loss, batch, group, metrics


class Updater(ABC):
    """Forward, backward, reduction over ranks, clip and optimizer step, so that all can be one compiled region.

    A ``group`` is a name from ``Agent.parameter_groups``. Losses and 0-dimensional metrics are sums of what each row
    counts (``Batch.share``), so that their sum over ranks is that of all rows; they come back summed.
    """

    ranks: int = 1
    learning_rate: float  # of the first group; setting it scales the others alike

    @abstractmethod
    def step(self, loss: LossFunction, batch: Batch, group: str) -> Tensors:
        """Step the parameters of ``group`` on the losses, each weighted by the agent's coefficient; return metrics.

        The loss is computed with the networks in training mode (BatchNorm, Dropout); acting and all else see them in
        evaluation mode.
        """

    @abstractmethod
    def gradient(self, loss: LossFunction, batch: Batch, group: str) -> tuple[Tensor, Tensors]:
        """Return the flat gradient of ``group``, summed over ranks, and the metrics; step nothing."""

    @abstractmethod
    def apply(self, gradient: Tensor, group: str) -> Tensors:
        """Clip a flat gradient and take the optimizer's step along it; return the norm that it had.

        Where that is not finite, the parameters stay as they are.
        """

    @abstractmethod
    def parameters(self, group: str) -> Tensor:
        """The parameters of ``group`` as one flat vector, which shares memory with them."""

    def pop_gradient_norms(self) -> list[Tensor]:
        """Return the norms of gradients since the last call that no ``step`` has looked at, such as those on a GPU."""
        return []

    def sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over ranks."""
        return x

    def mean(self, x: Tensor) -> Tensor:
        """The mean of ``x`` over ranks."""
        return self.sum(x) / self.ranks if self.ranks > 1 else x

    def agree(self, flag: bool) -> bool:
        """Whether ``flag`` is true on all ranks."""
        return flag

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...
