"""End a run at its first NaN or Inf, before it reaches the parameters."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from ludus.core.agent import Agent
from ludus.core.batch import Batch, Learned
from ludus.core.environment import EnvironmentManager, Role
from ludus.core.errors import UserError
from ludus.core.types import Tensors
from ludus.core.updater import NonFiniteError, Updater
from ludus.environments.problems import out_of_bounds
from ludus.experience.validate import Bounds, NotFinite, check_batch, check_resets, find_masks, finite_flags
from ludus.networks.placement import device_of

LARGE_REWARD = 100.0  # magnitude above which the message of a divergence mentions rewards


class TrainingFailed(UserError):
    """The error that ends a run at a NaN or Inf, with what reproduces the update."""

    def __init__(self, message: str, step: int, batch: Batch, refused: NonFiniteError | None = None) -> None:
        super().__init__(message)
        self.step = step  # environment steps so far
        self.batch = batch
        self.refused = refused  # the optimizer step that was not applied, if it is known


class Guard:
    """Runs ``agent.learn`` and raises ``TrainingFailed`` at the first NaN or Inf.

    The updater does not apply a gradient that is not finite, so the parameters of the last good step remain. On a GPU,
    flags are read once per ``learn``, at its end.
    """

    def __init__(self, agent: Agent, updater: Updater, manager: EnvironmentManager, role: Role | None = None) -> None:
        self.agent, self.updater, self._manager = agent, updater, manager
        observation, action, _ = role or Role(manager.observation, manager.action)
        self._name = manager.name
        self._masks = find_masks(observation, action)
        replaced = "" if agent.goal_reward is None else "desired_goal"  # replaced by achieved goals in hindsight replay
        self._bounds = Bounds({k: spec for k, spec in observation.items() if k != replaced}, device_of(agent))
        self._calls = 0
        self.step = 0  # environment steps so far, for messages; set by the container
        self.diverged = False

    def learn(self, batch: Batch) -> Learned:
        """Learn from a batch."""
        # replayed batches are only checked when a loss is not finite
        flags = finite_flags(batch, self._masks) if batch.index is None or self._masks else []
        if batch.reward.is_cpu:
            if not all_finite(flags):
                self._check(batch)
            flags = []
        self._calls += 1
        if self._calls & (self._calls - 1) == 0:  # calls 1, 2, 4, 8, …
            if batch.index is None:
                check_resets(batch, self._name)
            for name, value in self._bounds.find(batch.observation).items():
                self._manager.on_warning(f"{self._name}: {out_of_bounds(name, value)}")
        try:
            learned = self.agent.learn(batch, self.updater)
        except NonFiniteError as error:
            self._fail(batch, error.metrics, error)
        losses = [x for name, x in learned.metrics.items() if must_be_finite(name)]
        norms = self.updater.pop_gradient_norms()
        if not all_finite([*flags, *norms, *losses]):
            self._check(batch)
            if not all_finite([*norms, *losses]):
                self._fail(batch, learned.metrics)
        return learned

    def _fail(self, batch: Batch, metrics: Tensors, refused: NonFiniteError | None = None) -> NoReturn:
        """End the run, and blame the environment if the batch holds a NaN or Inf."""
        self.diverged = True
        self._check(batch)
        bad = [f"{k} is {float(x)}" for k, x in metrics.items() if must_be_finite(k) and not math.isfinite(x)]
        what = bad[0] if bad else "a gradient is not finite"
        largest, advice = float(batch.reward.abs().max()), self.agent.large_reward_advice()
        rewards = f", or {advice} (rewards reach {largest:.3g})" if largest > LARGE_REWARD and advice else ""
        raise TrainingFailed(
            f"Training diverged: {what} at step {self.step}; lower agent.learning_rate{rewards}. Earlier checkpoints "
            "are intact.",
            *(self.step, batch, refused),
        )

    def _check(self, batch: Batch) -> None:
        try:
            check_batch(batch, self._masks, self._name)
        except NotFinite as error:
            raise TrainingFailed(str(error), self.step, batch) from error


def must_be_finite(name: str) -> bool:
    """Whether a metric is a loss or a gradient norm; others may be NaN."""
    return name.startswith("loss/") or name == "gradient_norm"


def all_finite(values: list[Tensor]) -> bool:
    """Whether all of some 0-dimensional tensors are finite, with one synchronisation on a GPU."""
    if not values or values[0].is_cpu:
        return math.isfinite(sum(map(float, values)))  # in float64, so that the sum of float32 numbers cannot overflow
    return bool(torch.stack([x.detach().float() for x in values]).isfinite().all())
