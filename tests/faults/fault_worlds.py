"""Environments with one fault each, named on the command line as ``fault_worlds:Name``."""

import gymnasium
import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Sound(gymnasium.Env):
    """Episodes of ten steps with nothing wrong; each class below breaks one thing of it."""

    observation_space, action_space = BOX, spaces.Discrete(3)
    steps = 0  # of all episodes together

    def observe(self):
        return np.full(2, 0.5, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), self.info()

    def step(self, action):
        self.count += 1
        self.steps += 1
        return self.observe(), self.reward(), self.count > 9, False, self.info()

    def reward(self):
        return 1.0

    def info(self):
        return {}


class NaNFromTheStart(Sound):
    def observe(self):
        return np.full(2, np.nan, np.float32)


class NaNLater(Sound):
    def observe(self):
        return np.array([0.5, np.nan if self.steps > 40 else 0.5], np.float32)


class InfiniteReward(Sound):
    def reward(self):
        return float("inf") if self.steps > 20 else 1.0


class TextReward(Sound):
    def reward(self):
        return "much"


class WrongType(Sound):
    def observe(self):
        return np.zeros(2, np.int64)


class Text(Sound):
    def observe(self):
        return "hello"


class WrongShape(Sound):
    def observe(self):
        return np.zeros(3, np.float32)


class WrongShapeLater(Sound):
    def observe(self):
        return np.zeros(3 if self.steps > 20 else 2, np.float32)


class OutsideDiscrete(Sound):
    observation_space = spaces.Discrete(3)

    def observe(self):
        return 7


class BelowDiscrete(Sound):
    observation_space = spaces.Discrete(3, start=5)

    def observe(self):
        return 0


class OutsideMultiDiscrete(Sound):
    observation_space = spaces.MultiDiscrete([2, 3])

    def observe(self):
        return np.array([1, 3 if self.steps > 20 else 1])


class LacksPart(Sound):
    observation_space = spaces.Dict(camera=BOX, speed=BOX)

    def observe(self):
        return {"camera": np.zeros(2, np.float32)}


class NoDict(Sound):
    observation_space = spaces.Dict(camera=BOX)


class NotASpace(Sound):
    observation_space = 4


class NoActionSpace(Sound):
    action_space = None


class Unsupported(Sound):
    observation_space = spaces.Text(4)


class EmptyDict(Sound):
    observation_space = spaces.Dict({})

    def observe(self):
        return {}


class OldStep(Sound):
    def step(self, action):
        return self.observe(), 0.0, False, {}


class OldReset(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class ResetWithoutSeed(Sound):
    def reset(self):
        return np.zeros(2, np.float32), {}


class NoInfoDict(Sound):
    def step(self, action):
        self.count += 1
        return self.observe(), 0.0, self.count > 9, False, None


class RaisesInStep(Sound):
    def step(self, action):
        if self.steps >= 5:
            raise ZeroDivisionError("the wheel fell off")
        return super().step(action)


class RaisesInside(Sound):
    """Raises two calls deep, after an update."""

    def step(self, action):
        self._turn()
        return super().step(action)

    def _turn(self):
        if self.steps > 40:
            raise ZeroDivisionError("the wheel fell off")


class RaisesInRender(Sound):
    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        raise OSError("no paint")


class RaisesInReset(Sound):
    def reset(self, *, seed=None, options=None):
        raise OSError("no such robot")


class RaisesWhenMade(Sound):
    def __init__(self):
        raise RuntimeError("the licence has run out")


class NeedsArgument(Sound):
    def __init__(self, map_name):
        self.map_name = map_name


class EmptyMask(Sound):
    def info(self):
        return {"action_mask": np.zeros(3, np.int8)}


class EmptyMaskLater(Sound):
    def info(self):
        return {"action_mask": np.full(3, self.steps < 20, np.int8)}


class LongMask(Sound):
    def info(self):
        return {"action_mask": np.ones(4, np.int8)}


class MaskInObservation(Sound):
    observation_space = spaces.Dict(observation=BOX, action_mask=spaces.MultiBinary(3))
    mask = np.zeros(3, np.int8)

    def observe(self):
        return {"observation": np.zeros(2, np.float32), "action_mask": self.mask}


class LongMaskInObservation(MaskInObservation):
    observation_space = spaces.Dict(observation=BOX, action_mask=spaces.MultiBinary(4))
    mask = np.ones(4, np.int8)


class MaskGoesAway(Sound):
    def info(self):
        return {"action_mask": np.ones(3, np.int8)} if self.steps < 20 else {}


class MaskOfContinuous(Sound):
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def info(self):
        return {"action_mask": np.ones(2, np.int8)}


class Unbounded(Sound):
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Images(Sound):
    """Two pictures of different size, which a body of rank 3 cannot join."""

    observation_space = spaces.Dict(
        left=spaces.Box(0, 255, (3, 40, 40), np.uint8), right=spaces.Box(0, 255, (3, 48, 48), np.uint8)
    )

    def observe(self):
        return {name: np.zeros(space.shape, np.uint8) for name, space in self.observation_space.items()}


class Endless(Sound):
    def step(self, action):
        return self.observe(), 0.0, False, False, {}


NOT_CALLABLE = 3


def gives_nothing():
    return None


class NoBools(Sound):
    def step(self, action):
        return self.observe(), 0.0, np.zeros(3), False, {}
