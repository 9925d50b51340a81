"""The interface of updaters, which turn a loss into a step of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.types import State, Tensors

LossFunction = Callable[[Batch], tuple[Tensors, Tensors]]


class NonFiniteError(Exception):
    """A gradient holds a NaN or an Inf; the step was not applied, so the parameters are those before it."""

    def __init__(self, loss: LossFunction, batch: Batch, group: str, metrics: Tensors) -> None:
        super().__init__("a gradient is not finite")
        self.loss, self.batch, self.group, self.metrics = loss, batch, group, metrics


class Updater(ABC):
    """Forward, backward, reduction over ranks, clip and optimizer step, so that all can be one compiled region."""

    learning_rate: float

    @abstractmethod
    def step(self, loss: LossFunction, batch: Batch, group: str = "all") -> Tensors:
        """Step the parameters of ``group`` on the losses, each weighted by the agent's coefficient; return metrics.

        The loss is computed with the networks in training mode (BatchNorm, Dropout); acting and all else see them in
        evaluation mode.
        """

    def take_norms(self) -> list[Tensor]:
        """Return the norms of gradients since the last call that no ``step`` has looked at, such as those on a GPU."""
        return []

    @abstractmethod
    def mean(self, x: Tensor) -> Tensor:
        """The mean of ``x`` over ranks."""

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...
