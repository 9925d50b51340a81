"""Recompute rewards and terminations of goal environments for other goals, for hindsight replay. Needs no torch.

As in Gymnasium-Robotics, observations are a Dict with ``achieved_goal`` and ``desired_goal``, and the environment or a
wrapper has ``compute_reward(achieved_goal, desired_goal, info)``. It may have ``compute_terminated`` with the same
arguments; otherwise transitions keep their ``terminated``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from itertools import count
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import NormalizeReward
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.environments.gym import Environment, GymAdapter
from ludus.environments.spaces import Array, Layout

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
REWARD, TERMINATED = "compute_reward", "compute_terminated"
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Compute = Callable[[Any, Any, dict[str, Any]], Any]


def has_goals(env: Environment) -> bool:
    """Return whether an environment has goals and a ``compute_reward``."""
    return _goal_spaces(env) is not None and _find(env, REWARD)[0] is not None


def make_goal_reward(env: Environment, name: str = "") -> GoalReward | None:
    """Return a function that recomputes rewards and terminations; None if the environment has no goals.

    It is tried on goals sampled from the environment's spaces, so that errors show before training.
    """
    found, (compute, changing) = _goal_spaces(env), _find(env, REWARD)
    if found is None or compute is None:
        return None
    name = name or type(env.unwrapped).__name__
    if changing:
        raise UserError(
            f"{name}: the wrapper {changing} changes rewards, but not compute_reward; give the wrapper a "
            "compute_reward, remove it from env.wrappers, or set agent.hindsight to 0."
        )
    examples = _examples(*found)
    reward = GoalMethod(compute, REWARD, examples, name)
    return GoalReward(reward, _terminated(env, examples, name), *found, name)


class GoalReward:
    """Computes rewards ``[n]`` and terminations ``[n]`` (None without ``compute_terminated``) of goals ``[n, …]``."""

    def __init__(
        self,
        reward: GoalMethod,
        terminated: GoalMethod | None,
        achieved: spaces.Space[Any],
        desired: spaces.Space[Any],
        environment: str,
    ) -> None:
        self.reward, self.terminated = reward, terminated
        self._achieved, self._desired = Layout(achieved, ACHIEVED, environment), Layout(desired, DESIRED, environment)

    def __call__(self, achieved: Array, desired: Array) -> tuple[Floats, Flags | None]:
        """Compute both for goals as the replay buffer stores them."""
        goals = self._achieved.unflatten({ACHIEVED: achieved}), self._desired.unflatten({DESIRED: desired})
        return self.reward(*goals), None if self.terminated is None else self.terminated(*goals) != 0


class GoalMethod:
    """Calls an environment's method, which must be a pure function of the two goals, on a batch.

    The method is called once for the whole batch if that gives the same as a call for each row.
    """

    def __init__(self, compute: Compute, name: str, examples: tuple[Array, Array], environment: str) -> None:
        self._compute, self._name, self._environment = compute, name, environment
        self.batched = self._supports_batches(*examples)

    def __call__(self, achieved: Array, desired: Array) -> Floats:
        """Return the results ``[n]`` for goals ``[n, …]`` as the environment has them."""
        try:
            result = self._call_batch(achieved, desired) if self.batched else self._call_rows(achieved, desired)
        except Exception as error:
            raise self._error(error) from error
        if result.shape != (len(achieved),):
            raise self._shape_error(result.shape, f"{len(achieved)} goals")
        return result

    def _call_batch(self, achieved: Array, desired: Array) -> Floats:
        return np.asarray(self._compute(achieved, desired, {}), np.float32)

    def _call_rows(self, achieved: Array, desired: Array) -> Floats:
        made = [np.asarray(self._compute(a, b, {}), np.float32) for a, b in zip(achieved, desired, strict=True)]
        for x in made:
            if x.size != 1:
                raise self._shape_error(x.shape, "one goal")
        return np.array([x.reshape(()) for x in made], np.float32)

    def _supports_batches(self, achieved: Array, desired: Array) -> bool:
        """Return whether a batch gives the same as its rows; refuse a method that works for neither."""
        together = None
        with suppress(Exception):
            together = self._call_batch(achieved, desired)
        fits = together is not None and together.shape == (len(achieved),)
        try:
            alone = self._call_rows(achieved, desired)
        except Exception as error:
            if fits:  # it takes batches only
                return True
            raise self._error(error) from error
        return fits and np.allclose(together, alone, 1e-4, equal_nan=True)  # type: ignore[arg-type]

    def _error(self, error: Exception) -> UserError:
        if isinstance(error, UserError):
            return error
        message = " ".join(str(error).split()) or "no message"
        return UserError(
            f"{self._environment}: {self._name}(achieved_goal, desired_goal, info) raised {type(error).__name__}: "
            f"{message}; make it depend on the two goals alone (info is empty), or set agent.hindsight to 0."
        )

    def _shape_error(self, shape: tuple[int, ...], of: str) -> UserError:
        return UserError(
            f"{self._environment}: {self._name} returned an array of shape {shape} for {of}; return one number per "
            "goal, or set agent.hindsight to 0."
        )


def _terminated(env: Environment, examples: tuple[Array, Array], name: str) -> GoalMethod | None:
    compute, _ = _find(env, TERMINATED)
    try:
        return None if compute is None else GoalMethod(compute, TERMINATED, examples, name)
    except UserError as error:
        if isinstance(error.__cause__, NotImplementedError):  # only declared, as in Gymnasium-Robotics' GoalEnv
            return None
        raise


def _goal_spaces(env: Environment) -> tuple[spaces.Space[Any], spaces.Space[Any]] | None:
    """Return the spaces of both goals; None unless they are plain and have the same fixed shape."""
    space = env.observation_space
    if not isinstance(space, spaces.Dict) or not {ACHIEVED, DESIRED} <= space.spaces.keys():
        return None
    achieved, desired = space[ACHIEVED], space[DESIRED]
    if isinstance(achieved, spaces.Dict | spaces.Tuple) or achieved.shape is None or achieved.shape != desired.shape:
        return None
    return achieved, desired


def _find(env: Any, method: str) -> tuple[Compute | None, str]:
    """Return the outermost method of that name, and the name of a wrapper around it that changes rewards."""
    changing = ""
    while True:
        if callable(compute := getattr(env, method, None)):
            return compute, changing
        if isinstance(env, gymnasium.RewardWrapper | NormalizeReward):
            changing = changing or type(env).__name__
        if not isinstance(env, gymnasium.Wrapper | GymAdapter):
            return None, ""
        env = env.env


def _examples(achieved: spaces.Space[Any], desired: spaces.Space[Any]) -> tuple[Array, Array]:
    """Sample three or more pairs of goals, of which the first is achieved.

    Their number differs from the sizes of a goal, so that a sum over the wrong dimension is noticed, and at least two
    are not achieved, so that a dependence on other rows is noticed. The generators of the spaces are not used.
    """
    shape = achieved.shape or ()
    rows = next(n for n in count(3) if n not in shape)
    copies = deepcopy(achieved), deepcopy(desired)
    for seed, space in enumerate(copies):
        space.seed(seed)
    a, b = (np.stack([np.asarray(space.sample()) for _ in range(rows)]) for space in copies)
    b[0] = a[0]
    return a, b
