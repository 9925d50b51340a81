"""What an environment with goals says of goals that it did not set: rewards and endings told anew. Needs numpy alone.

The convention is that of Gymnasium-Robotics: observations are a Dict with ``achieved_goal`` and ``desired_goal``, and
the environment, or a wrapper around it, has ``compute_reward(achieved_goal, desired_goal, info)``. It may have
``compute_terminated`` of the same; without it, transitions keep the endings that they had.
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

REACHED, WANTED = "achieved_goal", "desired_goal"
REWARD, ENDING = "compute_reward", "compute_terminated"
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Compute = Callable[[Any, Any, dict[str, Any]], Any]


def has_goals(env: Environment) -> bool:
    """Whether an environment says what was reached and what is wanted, and can tell the reward of any two such."""
    return _goal_spaces(env) is not None and _find(env, REWARD)[0] is not None


def make_goal_reward(env: Environment, name: str = "") -> GoalReward | None:
    """What tells rewards and endings of goals reached and wanted, or None where the environment cannot tell rewards.

    It is tried on goals drawn from the environment's spaces, so that what is wrong shows before training.
    """
    found, (compute, changing) = _goal_spaces(env), _find(env, REWARD)
    if found is None or compute is None:
        return None
    name = name or type(env.unwrapped).__name__
    if changing:
        raise UserError(
            f"{name}: the wrapper {changing} changes rewards, but compute_reward does not; give the wrapper a "
            "compute_reward of its own, leave it out of env.wrappers, or set agent.hindsight to 0."
        )
    examples = _examples(*found)
    reward = GoalMethod(compute, REWARD, examples, name)
    return GoalReward(reward, _ending(env, examples, name), *found, name)


class GoalReward:
    """The rewards ``[n]`` of goals, and whether they end an episode ``[n]``: None where the environment cannot tell."""

    def __init__(
        self,
        reward: GoalMethod,
        ending: GoalMethod | None,
        reached: spaces.Space[Any],
        wanted: spaces.Space[Any],
        environment: str,
    ) -> None:
        self.reward, self.ending = reward, ending
        self._reached, self._wanted = Layout(reached, REACHED, environment), Layout(wanted, WANTED, environment)

    def __call__(self, reached: Array, wanted: Array) -> tuple[Floats, Flags | None]:
        """Of goals ``[n, …]`` as the replay has them."""
        goals = self._reached.unflatten({REACHED: reached}), self._wanted.unflatten({WANTED: wanted})
        return self.reward(*goals), None if self.ending is None else self.ending(*goals) != 0


class GoalMethod:
    """A method of an environment, which must be a pure function of the two goals, on rows of a batch.

    It is called once for all rows where that gives the same as one call for each.
    """

    def __init__(self, compute: Compute, name: str, examples: tuple[Array, Array], environment: str) -> None:
        self._compute, self._name, self._environment = compute, name, environment
        self.batched = self._try(*examples)

    def __call__(self, reached: Array, wanted: Array) -> Floats:
        """What it says ``[n]`` of goals ``[n, …]`` as the environment has them."""
        try:
            made = self._together(reached, wanted) if self.batched else self._one_by_one(reached, wanted)
        except Exception as error:
            raise self._failed(error) from error
        if made.shape != (len(reached),):
            raise self._misshapen(made.shape, f"{len(reached)} goals")
        return made

    def _together(self, reached: Array, wanted: Array) -> Floats:
        return np.asarray(self._compute(reached, wanted, {}), np.float32)

    def _one_by_one(self, reached: Array, wanted: Array) -> Floats:
        made = [np.asarray(self._compute(a, b, {}), np.float32) for a, b in zip(reached, wanted, strict=True)]
        for x in made:
            if x.size != 1:
                raise self._misshapen(x.shape, "one goal")
        return np.array([x.reshape(()) for x in made], np.float32)

    def _try(self, reached: Array, wanted: Array) -> bool:
        """Whether one call does for all rows; refuse what does neither for a row nor for all."""
        together = None
        with suppress(Exception):
            together = self._together(reached, wanted)
        fits = together is not None and together.shape == (len(reached),)
        try:
            alone = self._one_by_one(reached, wanted)
        except Exception as error:
            if fits:  # it takes nothing but batches
                return True
            raise self._failed(error) from error
        return fits and np.allclose(together, alone, 1e-4, equal_nan=True)  # type: ignore[arg-type]

    def _failed(self, error: Exception) -> UserError:
        if isinstance(error, UserError):
            return error
        said = " ".join(str(error).split()) or "no message"
        return UserError(
            f"{self._environment}: {self._name}(achieved_goal, desired_goal, info) raised {type(error).__name__}: "
            f"{said}; let it need nothing but the two goals (info is empty), or set agent.hindsight to 0."
        )

    def _misshapen(self, shape: tuple[int, ...], of: str) -> UserError:
        return UserError(
            f"{self._environment}: {self._name} gave an array of shape {shape} for {of}; return one number for a "
            "goal, or set agent.hindsight to 0."
        )


def _ending(env: Environment, examples: tuple[Array, Array], name: str) -> GoalMethod | None:
    compute, _ = _find(env, ENDING)
    try:
        return None if compute is None else GoalMethod(compute, ENDING, examples, name)
    except UserError as error:
        if isinstance(error.__cause__, NotImplementedError):  # Gymnasium-Robotics' GoalEnv declares it, no more
            return None
        raise


def _goal_spaces(env: Environment) -> tuple[spaces.Space[Any], spaces.Space[Any]] | None:
    """The spaces of what is reached and what is wanted; None unless both are plain and alike in shape."""
    space = env.observation_space
    if not isinstance(space, spaces.Dict) or not {REACHED, WANTED} <= space.spaces.keys():
        return None
    reached, wanted = space[REACHED], space[WANTED]
    if isinstance(reached, spaces.Dict | spaces.Tuple) or reached.shape != wanted.shape:
        return None
    return reached, wanted


def _find(env: Any, method: str) -> tuple[Compute | None, str]:
    """The outermost method of that name, and the name of a wrapper around it that changes rewards without one."""
    changing = ""
    while True:
        if callable(compute := getattr(env, method, None)):
            return compute, changing
        if isinstance(env, gymnasium.RewardWrapper | NormalizeReward):
            changing = changing or type(env).__name__
        if not isinstance(env, gymnasium.Wrapper | GymAdapter):
            return None, ""
        env = env.env


def _examples(reached: spaces.Space[Any], wanted: spaces.Space[Any]) -> tuple[Array, Array]:
    """Three rows or a few more, of which the first has reached its goal.

    Their number is no size of a goal, so that a sum over the wrong dimension shows, and two have not arrived, so that
    one that looks at the other rows shows too. They are drawn from copies: the environment's own generators stay as
    they were.
    """
    shape = reached.shape or ()
    rows = next(n for n in count(3) if n not in shape)
    spaces_ = deepcopy(reached), deepcopy(wanted)
    for seed, space in enumerate(spaces_):
        space.seed(seed)
    a, b = (np.stack([np.asarray(space.sample()) for _ in range(rows)]) for space in spaces_)
    b[0] = a[0]
    return a, b
