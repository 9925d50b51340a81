"""End a run at its first NaN or Inf, before it reaches the parameters."""

from __future__ import annotations

import math
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ludus.core.agent import Agent
from ludus.core.batch import Batch, Learned
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.spec import is_mask
from ludus.core.types import State
from ludus.core.updater import NonFiniteError, Updater
from ludus.environments.findings import outside
from ludus.experience.validate import Bounds, NotFinite, check_batch, check_resets, finite_flags


class Failure(NamedTuple):
    """A learning that gave a NaN or an Inf: what ``ludus diagnose`` reads."""

    wrong: State  # kind: learning, observation or reward; and where
    step: int  # environment steps up to it
    batch: Batch
    metrics: dict[str, float]
    refused: NonFiniteError | None  # the optimizer step that was not applied, where it is known


class TrainingFailed(UserError):
    """The sentence that ends the run, with the failure for the dump."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


class Guard:
    """Runs ``agent.learn`` and raises ``TrainingFailed`` at the first NaN or Inf.

    The updater does not apply a gradient that is not finite, so the parameters of the last good step remain. On a GPU
    the flags of a whole learning are read at once, after it.
    """

    def __init__(self, agent: Agent, updater: Updater, manager: EnvironmentManager) -> None:
        self.agent, self.updater, self._manager = agent, updater, manager
        self._name = getattr(manager, "name", "The environment")
        self._device = next(agent.parameters()).device
        self._masked = any(map(is_mask, manager.observation))
        replaced = "" if agent.goal_reward is None else "desired_goal"  # hindsight puts reached goals in its place
        self._bounds = Bounds({k: spec for k, spec in manager.observation.items() if k != replaced}, self._device)
        self._learned = 0
        self.step = 0  # environment steps up to now, for messages; the container counts them
        self.diverged = False

    def learn(self, batch: Batch) -> Learned:
        """Learn from a batch."""
        # in a replay a bad number shows in the loss sooner or later, and is looked for then
        flags = finite_flags(batch, self._manager.action) if batch.index is None or self._masked else []
        if self._device.type == "cpu":
            if not all_finite(flags):
                self._check(batch)
            flags = []
        self._learned += 1
        if self._learned & (self._learned - 1) == 0:  # learnings 1, 2, 4, 8, …
            if batch.index is None:
                check_resets(batch, self._name)
            for name, value in self._bounds.find(batch.observation).items():
                self._manager.on_report(f"{self._name}: {outside(name, value)}")
        try:
            learned = self.agent.learn(batch, self.updater)
        except NonFiniteError as error:
            self._fail(batch, {name: float(x) for name, x in error.metrics.items() if not x.dim()}, error)
        essential = [x for name, x in learned.metrics.items() if is_essential(name)]
        norms = self.updater.take_norms()
        if not all_finite([*flags, *norms, *essential]):
            self._check(batch)
            if not all_finite([*norms, *essential]):
                self._fail(batch, {name: float(x) for name, x in learned.metrics.items()}, None)
        return learned

    def _fail(self, batch: Batch, metrics: dict[str, float], refused: NonFiniteError | None) -> NoReturn:
        """End the run, for the environment's number if the batch holds a bad one."""
        self.diverged = True
        self._check(batch)
        spoilt = [f"{name} is {x}" for name, x in metrics.items() if is_essential(name) and not math.isfinite(x)]
        what = (spoilt or ["a gradient is not finite"])[0]
        raise TrainingFailed(
            f"Training diverged: {what} at step {self.step}; lower agent.learning_rate, or "
            "turn on agent.normalize_reward if rewards are large; earlier checkpoints are whole.",
            Failure({"kind": "learning", "spoilt": spoilt}, self.step, batch, metrics, refused),
        )

    def _check(self, batch: Batch) -> None:
        try:
            check_batch(batch, self._manager.action, self._name)
        except NotFinite as error:
            failure = Failure(error.fault._asdict(), self.step, batch, {}, None)
            raise TrainingFailed(str(error), failure) from error


def is_essential(name: str) -> bool:
    """Whether a metric must be finite for learning to go on."""
    return name.startswith("loss/") or name == "gradient_norm"


def all_finite(values: list[Tensor]) -> bool:
    """Whether all of some 0-dimensional tensors are finite, with one wait for a GPU."""
    if not values:
        return True
    if values[0].is_cpu:
        return math.isfinite(sum(map(float, values)))  # in float64, where float32 cannot overflow
    return bool(torch.stack([x.detach().float() for x in values]).isfinite().all())
