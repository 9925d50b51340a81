"""Toy environments for tests and examples; each tests one ability of an agent."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Info = dict[str, Any]


class CountingEnv(gymnasium.Env[Floats, np.int64]):
    """The observation is [episode, step in the episode], so that mistakes at episode boundaries are visible.

    An episode ends after ``length`` steps; the reward of a step is its number. Resetting with an earlier seed gives the
    episode number of that seed again.
    """

    def __init__(self, length: int = 5, ending: Literal["termination", "truncation"] = "termination") -> None:
        self.length, self.ending = length, ending
        self.observation_space = spaces.Box(0, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._numbers: dict[int, int] = {}
        self._episode, self._step, self._next = 0, 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Floats, Info]:
        super().reset(seed=seed)
        self._episode = self._next if seed is None else self._numbers.setdefault(seed, self._next)
        self._next = max(self._next, self._episode + 1)
        self._step = 0
        return self._observe(), {"episode": self._episode, "step": 0}

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, Info]:
        self._step += 1
        ends = self._step >= self.length
        info = {"episode": self._episode, "step": self._step}
        terminated = ends and self.ending == "termination"
        return self._observe(), float(self._step), terminated, ends and not terminated, info

    def _observe(self) -> Floats:
        return np.array([self._episode, self._step], np.float32)


class MemoryEnv(gymnasium.Env[Floats, np.int64]):
    """The first observation shows a cue, which is the right action of the last step.

    The right action is rewarded by 1, any other by −1/(cues − 1); all earlier rewards are 0. Later observations depend
    on the step alone, so a policy without memory has the expected return 1/cues − (cues − 1)/cues · 1/(cues − 1) = 0.
    """

    def __init__(self, length: int = 6, cues: int = 2) -> None:
        if length < 2 or cues < 2:
            raise ValueError(f"length ({length}) and cues ({cues}) must be at least 2")
        self.length, self.cues = length, cues
        self.observation_space = spaces.Box(0, 1, (cues + 1,), np.float32)
        self.action_space = spaces.Discrete(cues)
        self._cue, self._step = 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Floats, Info]:
        super().reset(seed=seed)
        self._cue, self._step = int(self.np_random.integers(self.cues)), 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, Info]:
        self._step += 1
        if self._step < self.length:
            return self._observe(), 0.0, False, False, {}
        right = int(action) == self._cue
        return self._observe(), 1.0 if right else -1 / (self.cues - 1), True, False, {"recalled": right}

    def _observe(self) -> Floats:
        """Return the one-hot cue (first step only) and whether the next action is the answer."""
        observation = np.zeros(self.cues + 1, np.float32)
        if self._step == 0:
            observation[self._cue] = 1
        observation[-1] = self._step == self.length - 1
        return observation


class MaskedEnv(gymnasium.Env[Any, np.int64]):
    """Each step allows a few of many actions; one of these, shown by the observation, is rewarded by 1.

    A forbidden action is rewarded by −1 and ends the episode. The mask is ``action_mask`` in the observation dict, or
    in info with ``in_info``.
    """

    def __init__(self, choices: int = 10, allowed: int = 3, length: int = 8, in_info: bool = False) -> None:
        self.choices, self.allowed, self.length, self.in_info = choices, allowed, length, in_info
        self.action_space = spaces.Discrete(choices)
        shown = spaces.Box(0, 1, (choices,), np.float32)
        mask = spaces.MultiBinary(choices)
        self.observation_space = shown if in_info else spaces.Dict({"observation": shown, "action_mask": mask})
        self._mask, self._target, self._step = np.ones(choices, np.int8), 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self._step = 0
        self._draw()
        return self._observe()

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, Info]:
        self._step += 1
        legal = bool(self._mask[action])
        reward = float(action == self._target) if legal else -1.0
        self._draw()
        observation, info = self._observe()
        return observation, reward, not legal or self._step >= self.length, False, info

    def _draw(self) -> None:
        chosen = self.np_random.permutation(self.choices)[: self.allowed]
        self._mask = np.zeros(self.choices, np.int8)
        self._mask[chosen] = 1
        self._target = int(chosen[0])

    def _observe(self) -> tuple[Any, Info]:
        shown = np.zeros(self.choices, np.float32)
        shown[self._target] = 1
        if self.in_info:
            return shown, {"action_mask": self._mask}
        return {"observation": shown, "action_mask": self._mask}, {}


class MixedActionEnv(gymnasium.Env[Floats, dict[str, Any]]):
    """A Dict action: a ``choice`` (Discrete) and an ``amount`` (Box); ``more`` adds MultiBinary and MultiDiscrete.

    The observation shows the target. The reward is 1 − mean |amount − target amount| / 2 if every discrete part is
    right, else 0.
    """

    def __init__(self, length: int = 8, more: bool = False) -> None:
        self.length, self.more = length, more
        parts: dict[str, spaces.Space[Any]] = {
            "choice": spaces.Discrete(3),
            "amount": spaces.Box(-1, 1, (2,), np.float32),
        }
        if more:
            parts |= {"switches": spaces.MultiBinary(2), "dials": spaces.MultiDiscrete([3, 2])}
        self.action_space = spaces.Dict(parts)
        self.observation_space = spaces.Box(-1, 2, (9 if more else 5,), np.float32)
        self._target: dict[str, Any] = {}
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Floats, Info]:
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: dict[str, Any]) -> tuple[Floats, float, bool, bool, Info]:
        self._step += 1
        right = all(np.array_equal(action[name], target) for name, target in self._target.items() if name != "amount")
        distance = float(np.abs(action["amount"] - self._target["amount"]).mean())
        return self._draw(), (1 - distance / 2) * right, False, self._step >= self.length, {}

    def _draw(self) -> Floats:
        """Draw the next target and return it as observation."""
        choice = int(self.np_random.integers(3))
        self._target = {"choice": choice, "amount": self.np_random.uniform(-1, 1, 2).astype(np.float32)}
        if self.more:
            self._target |= {"switches": self.np_random.integers(0, 2, 2), "dials": self.np_random.integers(0, [3, 2])}
        shown = [np.eye(3)[choice], *(self._target[name] for name in self._target if name != "choice")]
        return np.concatenate(shown).astype(np.float32)


class TargetEnv(gymnasium.Env[Floats, Floats]):
    """A contextual bandit with continuous actions: the reward is −|action − target|².

    The target is the reversed observation. The bounds of the action space are not −1 and 1, so that actions must be
    rescaled.
    """

    def __init__(self, dims: int = 2, low: float = -2.0, high: float = 2.0, length: int = 4) -> None:
        self.dims, self.length = dims, length
        self.observation_space = spaces.Box(-1, 1, (dims,), np.float32)
        self.action_space = spaces.Box(low, high, (dims,), np.float32)
        self._target: Floats = np.zeros(dims, np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Floats, Info]:
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: Floats) -> tuple[Floats, float, bool, bool, Info]:
        self._step += 1
        reward = -float(np.square(action - self._target).sum())
        return self._draw(), reward, False, self._step >= self.length, {}

    def _draw(self) -> Floats:
        observation = self.np_random.uniform(-1, 1, self.dims).astype(np.float32)
        self._target = observation[::-1].copy()
        return observation


class NoVelocityCartPole(gymnasium.Env[Floats, np.int64]):
    """CartPole-v1 without velocities, which a policy needs memory to infer."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 50}  # noqa: RUF012 (Gymnasium's own name)

    def __init__(self, render_mode: str | None = None) -> None:
        self._env = gymnasium.make("CartPole-v1", render_mode=render_mode, disable_env_checker=True)
        self.render_mode = render_mode
        whole = self._env.observation_space
        assert isinstance(whole, spaces.Box)
        self.observation_space = spaces.Box(whole.low[[0, 2]], whole.high[[0, 2]], dtype=np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Floats, Info]:
        super().reset(seed=seed)
        observation, info = self._env.reset(seed=seed, options=options)
        return observation[[0, 2]], info

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, Info]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation[[0, 2]], float(reward), terminated, truncated, info

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


class LuckEnv(gymnasium.Env[Any, np.int64]):
    """For asymmetric critics: the action shown by ``signal`` is rewarded by 1, and every reward adds a ``luck`` of ±10.

    Luck is drawn per episode and exceeds the effect of actions. A critic that observes it can predict it, which lowers
    the variance of advantages; the actor does not need it.
    """

    def __init__(self, length: int = 4, luck: float = 10.0) -> None:
        self.length, self.luck = length, luck
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict({"signal": spaces.Box(0, 1, (4,), np.float32), "luck": box})
        self.action_space = spaces.Discrete(4)
        self._target, self._step, self._luck = 0, 0, 0.0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self._step, self._luck = 0, float(self.np_random.choice([-1, 1]))
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, Info]:
        self._step += 1
        right = float(action == self._target)
        return self._draw(), right + self.luck * self._luck, self._step >= self.length, False, {"right": right}

    def _draw(self) -> dict[str, Floats]:
        self._target = int(self.np_random.integers(4))
        signal = np.eye(4, dtype=np.float32)[self._target]
        return {"signal": signal, "luck": np.array([self._luck], np.float32)}
