"""Recomputed rewards and terminations of goals, of environments and managers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, NormalizeReward, TimeLimit, TransformReward

from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.environments.config import EnvConfig
from ludus.environments.goal_toy import BitFlipEnv, PointGoalEnv
from ludus.environments.goals import GoalReward, has_goals, make_goal_reward
from ludus.environments.gym import make
from ludus.managers.make import make_manager

TOY = "ludus.environments.goal_toy:"


class Goals(gymnasium.Env[Any, Any]):
    """Observes its goals alone, of any space; subclasses compute rewards."""

    def __init__(self, space: spaces.Space[Any] | None = None) -> None:
        space = spaces.Box(-1, 1, (3,), np.float64) if space is None else space
        self.observation_space = spaces.Dict({name: space for name in ("observation", "achieved_goal", "desired_goal")})
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, True, {}


class Alone(Goals):
    """Takes one goal at a time: returns a single number for a batch."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> float:
        return -float(np.linalg.norm(achieved_goal - desired_goal))


class Together(Goals):
    """Takes batches only."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -np.linalg.norm(achieved_goal - desired_goal, axis=1)


class Branching(Goals):
    """Raises for a batch."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> int:
        return 0 if abs(achieved_goal[0] - desired_goal[0]) < 0.1 else -1


class Crosswise(Goals):
    """Reduces the first dimension, which in a batch is that of the rows."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -np.abs(achieved_goal - desired_goal).max(axis=0)


class Picky(Goals):
    """Uses the first element, which in a batch is a row."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -np.abs(achieved_goal - desired_goal)[0]


class Relative(Goals):
    """Scales by the largest distance of the batch."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        distance = np.abs(achieved_goal - desired_goal).sum(-1)
        return -distance / (1e-9 + distance.max())


class Informed(Goals):
    """Needs the info of the step."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> float:
        return float(info["distance"])


class Listing(Goals):
    """Returns a number for every element of a goal."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return achieved_goal - desired_goal


class Declared(Alone):
    """Declares compute_terminated only, as Gymnasium-Robotics' GoalEnv."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        raise NotImplementedError


class AloneEnding(Alone):
    """As PointMaze: the norm of a batch of differences is one number."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return bool(np.linalg.norm(achieved_goal - desired_goal) <= 0.45)


class TogetherEnding(Together):
    """Takes batches only."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return np.linalg.norm(achieved_goal - desired_goal, axis=1) <= 0.45


class NeverEnding(Alone):
    """As Fetch: returns a single False for a batch."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return False


class Fallen(Alone):
    """Needs the info of the step."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return bool(info["fallen"])


class Counted(Goals):
    """Goals are integers from 5 on; records the goals of its calls."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(4, start=5))
        self.asked: list[Any] = []

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        self.asked.append(achieved_goal)
        return np.where(np.equal(achieved_goal, desired_goal), 0.0, -1.0)


class Plain:
    """Has the methods of an environment without deriving from gymnasium.Env."""

    def __init__(self) -> None:
        self._env = BitFlipEnv(4)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.reset, self.step, self.compute_reward = self._env.reset, self._env.step, self._env.compute_reward


class Halved(gymnasium.RewardWrapper[Any, Any]):
    """A reward wrapper with compute_reward."""

    def reward(self, reward: Any) -> Any:
        return reward / 2

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return self.env.unwrapped.compute_reward(achieved_goal, desired_goal, info) / 2


class Broken(BitFlipEnv):
    """Raises in compute_reward, which agents without hindsight do not call."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        if np.ndim(achieved_goal) > 1 or self._step == 0:
            raise ZeroDivisionError("a bad day")
        return super().compute_reward(achieved_goal, desired_goal, info)


def found(env: Any) -> GoalReward:
    made = make_goal_reward(env)
    assert isinstance(made, GoalReward)
    return made


def drawn(shape: tuple[int, ...]) -> tuple[Any, Any]:
    a, b = np.random.default_rng(0).uniform(-1, 1, (2, *shape))
    b[::2] = a[::2]
    return a, b


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    ("kind", "batched"),
    [(Alone, False), (Together, True), (Branching, False), (Crosswise, False), (Picky, False), (Relative, False)],
)
def test_rewards_equal_those_of_single_rows(kind: type[Goals], batched: bool, size: int) -> None:
    env: Any = kind(spaces.Box(-1, 1, (size,), np.float64))
    reward = found(env).reward
    assert reward.batched == batched
    a, b = drawn((size, size))  # as many rows as a goal has parts: what is summed the wrong way fits
    one = slice(None) if kind is not Together else None  # a goal, or a batch of one
    expected = [float(np.squeeze(env.compute_reward(x[one], y[one], {}))) for x, y in zip(a, b, strict=True)]
    made = reward(a, b)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "batched", "near"), [(AloneEnding, False, 0.45), (TogetherEnding, True, 0.45), (NeverEnding, False, -1)]
)
def test_terminations_equal_those_of_single_rows(kind: type[Goals], batched: bool, near: float) -> None:
    goal_reward = found(kind())
    assert goal_reward.terminated is not None
    assert goal_reward.terminated.batched == batched
    a, b = drawn((8, 3))
    ends = goal_reward(a, b)[1]
    assert ends is not None
    assert ends.dtype == np.bool_
    assert ends.tolist() == [bool(np.linalg.norm(x - y) <= near) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("kind", [Alone, Declared])
def test_without_compute_terminated_there_are_no_terminations(kind: type[Goals]) -> None:
    rewards, ends = found(kind())(*drawn((4, 3)))
    assert rewards[0] == 0
    assert ends is None


@pytest.mark.parametrize("env", [BitFlipEnv(2), BitFlipEnv(10), PointGoalEnv()])
def test_toys_compute_the_same_in_a_batch_as_step_by_step(env: Any) -> None:
    goal_reward = found(env)
    assert goal_reward.reward.batched
    assert goal_reward.terminated is not None
    assert goal_reward.terminated.batched
    observation, _ = env.reset(seed=1)
    steps = []
    env.action_space.seed(1)
    for _ in range(300):
        observation, given, terminated, truncated, info = env.step(env.action_space.sample())
        steps.append((observation["achieved_goal"], observation["desired_goal"], given, terminated))
        assert info["reached"] == (given == 0)
        if terminated or truncated:
            env.reset()
    reached, wanted, *said = map(np.stack, zip(*steps, strict=True))
    for told, before in zip(goal_reward(reached, wanted), said, strict=True):
        assert told is not None
        assert np.array_equal(told, before)
    assert (goal_reward(reached, reached)[0] == 0).all()


def test_bit_flip_ends_at_the_goal_or_after_bits_steps() -> None:
    env = BitFlipEnv(6)
    for seed in range(50):
        observation, _ = env.reset(seed=seed)
        differing = np.flatnonzero(observation["observation"] != observation["desired_goal"])
        assert len(differing)
        kept = observation["observation"]
        for i, bit in enumerate(differing):
            observation, reward, terminated, truncated, _ = env.step(np.int64(bit))
            last = i == len(differing) - 1
            assert (reward, terminated, truncated) == (0.0 if last else -1.0, last, False)
        assert np.flatnonzero(kept != observation["achieved_goal"]).tolist() == differing.tolist()
    env.reset(seed=0)
    cut = [env.step(np.int64(0))[2:4] for _ in range(6)]
    assert cut == [(False, False)] * 5 + [(False, True)]


def test_goals_are_converted_to_the_environments_types() -> None:
    """The replay buffer counts choices from 0 and may have another float type than the environment."""
    env = Counted()
    reward = found(env)
    assert reward(np.array([0, 3, 1]), np.array([0, 2, 1]))[0].tolist() == [0, -1, 0]
    assert env.asked[-1].tolist() == [5, 8, 6]
    seen: list[Any] = []
    other: Any = Alone()
    other.compute_reward = lambda a, b, info: float(seen.append(a.dtype) or 0)
    found(other)(np.zeros((3, 3), np.float32), np.zeros((3, 3), np.float32))
    assert set(seen) == {np.dtype(np.float64)}


@pytest.mark.parametrize(
    "env",
    [
        make("CartPole-v1"),
        Goals(),
        Alone(spaces.Dict(x=spaces.Discrete(2))),
        make(lambda: gymnasium.wrappers.FlattenObservation(BitFlipEnv())),
    ],
    ids=["no goals", "no compute_reward", "nested goals", "flattened"],
)
def test_without_goals_or_compute_reward_there_is_no_goal_reward(env: Any) -> None:
    assert not has_goals(env)
    assert make_goal_reward(env) is None


def test_goals_of_different_shapes_are_not_supported() -> None:
    env: Any = Alone()
    env.observation_space = spaces.Dict(env.observation_space.spaces | {"desired_goal": spaces.Box(-1, 1, (2,))})
    assert make_goal_reward(env) is None


def test_methods_are_found_in_wrappers_and_adapted_classes() -> None:
    bits = np.array([[0, 1], [1, 1]], np.int8)
    assert _lists(found(TimeLimit(BitFlipEnv(2), 5))(bits, bits[::-1])) == ([-1, -1], [False, False])
    assert has_goals(make(Plain))
    assert _lists(found(make(Plain))(np.eye(4, dtype=np.int8), np.eye(4, dtype=np.int8))) == ([0] * 4, None)
    assert _lists(found(Halved(BitFlipEnv(2)))(bits, bits)) == ([0, 0], [True, True])
    assert _lists(found(Halved(BitFlipEnv(2)))(bits, bits[::-1])) == ([-0.5, -0.5], [False, False])


def _lists(told: tuple[Any, Any]) -> tuple[Any, Any]:
    return told[0].tolist(), None if told[1] is None else told[1].tolist()


@pytest.mark.parametrize(
    ("wrap", "named"),
    [(lambda env: TransformReward(env, lambda r: 10 * r), "TransformReward"), (NormalizeReward, "NormalizeReward")],
)
def test_a_reward_wrapper_without_compute_reward_is_refused(wrap: Any, named: str) -> None:
    with pytest.raises(UserError, match=f"BitFlipEnv: the wrapper {named} changes rewards"):
        make_goal_reward(TimeLimit(wrap(BitFlipEnv()), 5))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (Informed(), r"raised KeyError: 'distance'; make it depend on the two goals alone \(info is empty\)"),
        (Listing(), r"array of shape \(3,\) for one goal; return one number"),
        (FrameStackObservation(BitFlipEnv(4), 3), r"array of shape \(3,\) for one goal"),
    ],
)
def test_a_failing_compute_reward_is_a_user_error(env: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"compute_reward.*{said}"):
        make_goal_reward(env)


def test_a_failing_compute_terminated_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"Fallen: compute_terminated\(.*raised KeyError: 'fallen'; make it depend"):
        make_goal_reward(Fallen())


def test_a_failure_during_training_is_a_user_error() -> None:
    env = BitFlipEnv(3)
    reward, goals = found(env), np.zeros((4, 3), np.int8)
    reward.reward._compute = lambda a, b, info: np.zeros(3)
    with pytest.raises(UserError, match=r"shape \(3,\) for 4 goals"):
        reward(goals, goals)
    reward.reward._compute = lambda a, b, info: 1 / 0
    with pytest.raises(UserError, match="raised ZeroDivisionError: division by zero"):
        reward(goals, goals)


def test_trying_compute_reward_does_not_use_the_environments_generators() -> None:
    plain, tried = Alone(), Alone()
    for env in (plain, tried):
        env.reset(seed=3)
        env.observation_space.seed(3)
    make_goal_reward(tried)
    assert np.array_equal(plain.step(0)[0]["observation"], tried.step(0)[0]["observation"])


def managers() -> dict[str, dict[str, Any]]:
    return {"simple": {}, "subproc": {"backend": "subproc", "workers": 1}}


@pytest.mark.parametrize("backend", managers())
def test_managers_give_goal_rewards(backend: str) -> None:
    config = EnvConfig(f"{TOY}PointGoalEnv", num=2, options=("near=0.5",), **managers()[backend])
    manager: EnvironmentManager = make_manager(config)
    try:
        reward = manager.goal_reward()
        manager.reset(0)
        assert reward is not None
        a, b = np.zeros((3, 2), np.float32), np.array([[0.4, 0], [0.6, 0], [0, -0.45]], np.float32)
        assert _lists(reward(a, b)) == ([0, -1, 0], [False] * 3)
    finally:
        manager.close()


def test_managers_of_environments_without_goals_give_none() -> None:
    made = [
        EnvConfig("CartPole-v1", num=2, backend="simple"),
        EnvConfig("CartPole-v1", num=2, backend="vector"),
        EnvConfig("CartPole-v1", num=2, backend="subproc", workers=1),
    ]
    for config in made:
        manager = make_manager(config)
        assert manager.goal_reward() is None
        manager.close()


def test_a_broken_compute_reward_fails_only_when_requested() -> None:
    manager = make_manager(EnvConfig(num=1), environment=Broken)
    with pytest.raises(UserError, match=r"Broken: compute_reward.*ZeroDivisionError: a bad day"):
        manager.goal_reward()
    manager.close()
